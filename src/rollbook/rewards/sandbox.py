"""Running a program that nobody trusts: in a process of its own, with limits, and without what it does not need.

Invariant: a run ends within its wall-clock limit and leaves neither processes nor files behind; its output is kept up
to a bound; what this machine does not let the sandbox take away is said in the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rollbook.algorithms.registry import number, whole_number

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    `wall`: seconds until it is killed. Of each of its processes: `memory` (address space), `cpu` seconds (the wall's,
    if not given), `file_size` in bytes and open `files`. Of all together: `processes` (threads count) and `output`,
    bytes of stdout and of stderr, at which it is stopped.

    >>> Limits(wall=0)
    Traceback (most recent call last):
        ...
    ValueError: wall: got 0, expected a number from 0.01 to 100000
    """

    wall: float = 10.0
    memory: int = 512 * MiB
    cpu: int | None = None
    file_size: int = 16 * MiB
    files: int = 64
    processes: int = 16
    output: int = MiB

    def __post_init__(self) -> None:
        number("wall", self.wall, 0.01, 1e5)
        whole_number("memory", self.memory, 32 * MiB)
        if self.cpu is not None:
            whole_number("cpu", self.cpu, 1)
        whole_number("file_size", self.file_size)
        whole_number("files", self.files, 8)
        whole_number("processes", self.processes, 1)
        whole_number("output", self.output, 1)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a run went: `code` is the program's exit code (above 128: the signal that ended it; `None`: it was stopped).

    `unprotected`: what this machine does not let the sandbox take away, in words; see `sandboxed`.
    """

    code: int | None
    stdout: bytes
    stderr: bytes
    side: bytes
    """What it wrote to the extra descriptor, if it was given one."""
    timed_out: bool
    flooded: bool
    """Whether it was stopped for writing too much."""
    unprotected: tuple[str, ...]


def sandboxed(
    files: Mapping[str, str],
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    python: str | None = None,
    side: bool = False,
) -> Ran:
    """Run Python with these arguments in a new folder that holds these files; the folder is removed afterwards.

    The program gets its own session, the limits, three environment variables (PATH, HOME, LANG) and no secrets,
    standard input from `stdin`, and, where the machine allows it, namespaces of its own: no network at all, no sight of
    other processes; a trainer that runs as root has it run as a user that nobody is. `unprotected` in the result names
    what could not be had:

    - `network`: it can reach whatever this machine can.
    - `files of its user`: it can read and write what the trainer's user can, keys and checkpoints included. This is so
      unless the trainer is root. Even then it can read what everybody can, and write where everybody can.
    - `other processes of its user`: it can signal them and read their environment.
    - `fork bombs`: processes are not counted; the wall clock still ends them.
    - `leftovers`: a process that leaves its session outlives the run.

    Limits on memory and CPU are for each process, not for all. It is the kernel that holds all this: a hole in the
    kernel is a hole here. Programs of people who attack you belong in a virtual machine.

    `python`: another interpreter, with its packages; the one that runs here, without packages, if not given. `side`:
    the program gets a pipe to write to, whose descriptor is the last argument.

    >>> ran = sandboxed({"main.py": "print(input()[::-1])"}, ["main.py"], stdin=b"abc")
    >>> ran.code, ran.stdout
    (0, b'cba\\n')
    """
    if os.name != "posix":
        raise ValueError(f"sandbox: got {os.name}, expected a POSIX system: its limits do not exist here")
    limits = limits if limits is not None else Limits()
    folder = tempfile.mkdtemp(prefix="rollbook-")
    report_read, report = os.pipe()
    side_read, side_write = os.pipe() if side else (-1, -1)
    try:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8", "surrogateescape", newline="")
        settings = {
            "report": report,
            "wall_ms": ceil(limits.wall * 1000),
            "cpu": limits.cpu if limits.cpu is not None else ceil(limits.wall) + 1,
            "memory": limits.memory,
            "file_size": limits.file_size,
            "files": limits.files,
            "processes": limits.processes,
        }
        program = [os.path.realpath(sys.executable), "-I", "-S"] if python is None else [python, "-I", "-B"]
        own = [os.path.realpath(sys.executable), "-I", "-S", str(Path(__file__).with_name("_sandbox_main.py"))]
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = subprocess.Popen(
                [*own, json.dumps(settings), *program, *arguments, *([str(side_write)] if side else [])],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                start_new_session=True,
                pass_fds=[report, *([side_write] if side else [])],
            )
        os.close(report)
        report = -1
        if side:
            os.close(side_write)
            side_write = -1
        return _watched(process, report_read, side_read, limits)
    finally:
        for descriptor in (report, report_read, side_read, side_write):
            if descriptor >= 0:
                os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


GRACE = 20.0
"""Seconds past its limit after which the sandbox's own process is given up; it takes far less."""


def _watched(process: subprocess.Popen[bytes], report: int, side: int, limits: Limits) -> Ran:
    """Read everything that comes, up to its bound, until the sandbox's process has ended."""
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("sandbox: its pipes are not there")
    pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr", report: "report"}
    if side >= 0:
        pipes[side] = "side"
    found = {name: bytearray() for name in ("stdout", "stderr", "report", "side")}
    bounds = {"stdout": limits.output, "stderr": limits.output, "report": 65536, "side": limits.output}
    deadline = time.monotonic() + limits.wall + GRACE
    flooded = False
    with selectors.DefaultSelector() as waiting, process:
        for descriptor in pipes:
            os.set_blocking(descriptor, False)
            waiting.register(descriptor, selectors.EVENT_READ)
        try:
            while waiting.get_map() and time.monotonic() < deadline:
                ended = process.poll() is not None
                ready = waiting.select(0.0 if ended else 0.05)
                if ended and not ready:
                    break  # a process that outlived the run may hold a pipe open for ever
                for key, _ in ready:
                    name = pipes[key.fd]
                    data = os.read(key.fd, 65536)
                    if not data:
                        waiting.unregister(key.fd)
                        continue
                    found[name] += data
                    if len(found[name]) > bounds[name]:
                        del found[name][bounds[name] :]
                        if not flooded:
                            flooded = True
                            process.terminate()
            # Its pipes may close before it is done cleaning up.
            process.wait(max(deadline - time.monotonic(), 0.0))
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # and the kernel kills the program, whose parent dies
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    lines = found["report"].decode("utf-8", "replace").splitlines()
    unprotected = tuple(json.loads(lines[0])) if lines else ()
    ended_as: dict[str, Any] = json.loads(lines[1]) if len(lines) > 1 else {"timed_out": False, "code": None}
    if not lines:
        raise RuntimeError(f"sandbox: it did not start: {bytes(found['stderr'][-500:]).decode('utf-8', 'replace')}")
    return Ran(
        code=ended_as["code"],
        stdout=bytes(found["stdout"]),
        stderr=bytes(found["stderr"]),
        side=bytes(found["side"]),
        timed_out=bool(ended_as["timed_out"]) and not flooded,
        flooded=flooded,
        unprotected=unprotected,
    )
