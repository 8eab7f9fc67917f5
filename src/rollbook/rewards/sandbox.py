"""Run an untrusted program in a separate process, with limits, isolated as far as the machine allows.

Invariant: a run ends within its wall-clock limit and leaves neither processes nor files behind. Its output is bounded.
What the machine does not let the sandbox isolate is in the result, and in a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from rollbook.core.checks import check_bool, check_float, check_int
from rollbook.rewards.types import Reference

__all__ = ["Limits", "ProgramTests", "SandboxResult", "code_match", "extract_program", "run_sandboxed"]

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a program.

    Args:
        wall: Seconds until it is killed.
        memory: Address space of each process in bytes.
        cpu: CPU seconds of each process; `None`: as `wall`.
        file_size: Size of each file in bytes.
        files: Open files of each process.
        processes: Number of processes, threads included.
        disk: Total size of the files that it writes in bytes.
        output: Bytes of stdout, and of stderr, at which it is stopped.

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
    disk: int = 64 * MiB
    output: int = MiB

    def __post_init__(self) -> None:
        check_float("wall", self.wall, 0.01, 1e5)
        check_int("memory", self.memory, 32 * MiB)
        if self.cpu is not None:
            check_int("cpu", self.cpu, 1)
        check_int("file_size", self.file_size)
        check_int("files", self.files, 8)
        check_int("processes", self.processes, 1)
        check_int("disk", self.disk, MiB)
        check_int("output", self.output, 1)


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """Result of a run.

    Args:
        code: Exit code; above 128: 128 plus the signal that ended it; `None`: it was stopped.
        stdout: Standard output.
        stderr: Standard error.
        side: What it wrote to the extra pipe, if it had one.
        timed_out: Whether it was stopped at its wall-clock limit.
        flooded: Whether it was stopped because it wrote too much.
        unprotected: What the machine does not let the sandbox isolate; see `run_sandboxed`.
    """

    code: int | None
    stdout: bytes
    stderr: bytes
    side: bytes
    timed_out: bool
    flooded: bool
    unprotected: tuple[str, ...]


def run_sandboxed(
    files: Mapping[str, str],
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    python: str | None = None,
    side: bool = False,
) -> SandboxResult:
    """Run Python in a new folder, which is removed afterwards.

    The program gets its own session, the limits, three environment variables (PATH, HOME, LANG), and a filter of system
    calls: no new namespaces, no mounts, no tracing, no sockets except Unix and IP. If the machine allows namespaces, it
    also has no network, sees no other processes, and has its own root: the system's programs and libraries and the
    folder of its interpreter, all read-only, and `Limits.disk` bytes of temporary storage (`/tmp`, `/var/tmp` and
    `/dev/shm`). If the trainer runs as root, the program runs as an unused user. `unprotected` in the result lists the
    missing protections, and the first such result warns:

    - `network`: it can reach whatever this machine can.
    - `files of its user`: it can read what the trainer's user can, keys and checkpoints included; with `disk space`
      missing too, it can write there.
    - `files of everybody`: it can read what every user of the machine can.
    - `disk space`: files that it writes outside of its folder are not bounded, and stay.
    - `other processes of its user`: it can signal them and read their environment.
    - `fork bombs`: processes are not counted; the wall clock still ends them.
    - `leftovers`: a process that leaves its session outlives the run.
    - `system calls`: they are not filtered (not Linux, or neither x86-64 nor ARM64).

    Limits on memory and CPU apply to each process. The sandbox relies on the kernel and does not protect from kernel
    exploits: run untrusted programs in a virtual machine.

    Args:
        files: Contents of files in the folder, by name.
        arguments: Arguments of the interpreter.
        stdin: Standard input.
        limits: Limits of the program.
        python: Another interpreter, with its packages; `None`: this one, without packages.
        side: Whether the program gets a pipe to write to, whose descriptor is its last argument.

    Returns:
        Exit code, output and errors of the program, and the protections that were missing.

    Raises:
        ValueError: This is not a POSIX system.

    >>> ran = run_sandboxed({"main.py": "print(input()[::-1])"}, ["main.py"], stdin=b"abc")
    >>> ran.code, ran.stdout
    (0, b'cba\\n')
    """
    if os.name != "posix":
        raise ValueError(f"sandbox: got {os.name}, expected a POSIX system")
    ran = _run(
        files, arguments, stdin, limits if limits is not None else Limits(), python, side, _strictest_settings(python)
    )
    if ran.unprotected:
        _warn(ran.unprotected)
    return ran


@cache
def _warn(unprotected: tuple[str, ...]) -> None:
    """Warn, once per list, about missing protections."""
    warnings.warn(
        f"sandbox: programs are not isolated on this machine in: {', '.join(unprotected)} "
        "(help(rollbook.rewards.run_sandboxed) explains each)",
        RuntimeWarning,
        stacklevel=3,
    )


SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/etc/alternatives",
          "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/dev/full", "/dev/null",
          "/dev/random", "/dev/urandom", "/dev/zero")  # fmt: skip
"""Paths that a program sees, beside its interpreter."""


@cache
def _strictest_settings(python: str | None) -> dict[str, Any]:
    """Find the strictest settings under which an interpreter runs on this machine, by trying."""
    if python is None:
        prefixes = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    else:
        places = {os.path.abspath(python), os.path.realpath(python)}
        prefixes = {os.path.dirname(os.path.dirname(folder)) for folder in places}
    shown = [
        *SYSTEM_PATHS,
        *(prefix for prefix in prefixes if not prefix.startswith("/usr/") and prefix not in SYSTEM_PATHS),
    ]
    ways: list[dict[str, Any]] = [
        {"visible": shown, "other_user": True},
        {"visible": ["/", *shown], "other_user": True},
        {"visible": ["/", *shown], "other_user": False},
    ]
    for way in ways[:-1]:
        if _run({}, ["-c", "import io"], b"", Limits(), python, False, way).code == 0:
            return way
    return ways[-1]


def _run(
    files: Mapping[str, str],
    arguments: Sequence[str],
    stdin: bytes,
    limits: Limits,
    python: str | None,
    side: bool,
    way: Mapping[str, Any],
) -> SandboxResult:
    folder = tempfile.mkdtemp(prefix="rollbook-")
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the program may rename it or change its mode
    report_read, report = os.pipe()
    side_read, side_write = os.pipe() if side else (-1, -1)
    try:
        for name, text in files.items():
            # A lone surrogate becomes bytes that Python rejects, so that the program fails and not the sandbox.
            (Path(folder) / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        settings = {
            "report": report,
            "wall_ms": ceil(limits.wall * 1000),
            "cpu": limits.cpu if limits.cpu is not None else ceil(limits.wall) + 1,
            "memory": limits.memory,
            "file_size": limits.file_size,
            "files": limits.files,
            "processes": limits.processes,
            "disk": limits.disk,
            **way,
        }
        program = [os.path.realpath(sys.executable), "-I", "-S"] if python is None else [python, "-I", "-B"]
        command = [os.path.realpath(sys.executable), "-I", "-S", str(Path(__file__).with_name("_sandbox_main.py"))]
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write(stdin)
            stdin_file.seek(0)
            process = subprocess.Popen(
                [*command, json.dumps(settings), *program, *arguments, *([str(side_write)] if side else [])],
                stdin=stdin_file,
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
        return _collect_output(process, report_read, side_read, limits)
    finally:
        for descriptor in (report, report_read, side_read, side_write):
            if descriptor >= 0:
                os.close(descriptor)
        _remove(folder, top)
        os.close(top)


def _remove(folder: str, top: int) -> None:
    """Remove a folder, open as `top`, of any depth, without recursion and long paths."""
    names: list[str] = []
    directory = os.dup(top)
    with contextlib.suppress(OSError):
        os.fchmod(top, 0o700)
        while True:
            below = None
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below = entry.name
                        break
                    os.unlink(entry.name, dir_fd=directory)
            if below is None and not names:
                break
            other = _open_folder(".." if below is None else below, directory)
            if below is not None:
                os.fchmod(other, 0o700)  # the program may have removed permissions
            os.close(directory)
            directory = other
            if below is None:
                os.rmdir(names.pop(), dir_fd=directory)
            else:
                names.append(below)
        os.rmdir(folder)
    os.close(directory)


def _open_folder(name: str, directory: int) -> int:
    """Open a folder in an open one, also without permission to read it; raise `OSError` if it is a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        if sys.platform != "linux":
            os.chmod(name, 0o700, dir_fd=directory, follow_symlinks=False)
            return os.open(name, flags, dir_fd=directory)
        # On Linux, `follow_symlinks=False` depends on the version of libc.
        path = os.open(name, os.O_PATH | flags, dir_fd=directory)
        try:
            os.chmod(f"/proc/self/fd/{path}", 0o700)
            return os.open(".", flags, dir_fd=path)
        finally:
            os.close(path)


GRACE_SECONDS = 20.0
"""Seconds after the wall-clock limit in which the process of the sandbox must end."""


def _collect_output(process: subprocess.Popen[bytes], report: int, side: int, limits: Limits) -> SandboxResult:
    """Read output up to its bound until the process of the sandbox ends."""
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("sandbox: the process has no pipes")
    pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr", report: "report"}
    if side >= 0:
        pipes[side] = "side"
    outputs = {name: bytearray() for name in ("stdout", "stderr", "report", "side")}
    bounds = {"stdout": limits.output, "stderr": limits.output, "report": 65536, "side": limits.output}
    deadline = time.monotonic() + limits.wall + GRACE_SECONDS
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
                    break  # a leftover process may keep a pipe open
                for key, _ in ready:
                    name = pipes[key.fd]
                    data = os.read(key.fd, 65536)
                    if not data:
                        waiting.unregister(key.fd)
                        continue
                    outputs[name] += data
                    if len(outputs[name]) > bounds[name]:
                        del outputs[name][bounds[name] :]
                        if not flooded:
                            flooded = True
                            process.terminate()
            # The pipes may close before the cleanup is complete.
            process.wait(max(deadline - time.monotonic(), 0.0))
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # the kernel then kills the program, whose parent died
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    ended_as: dict[str, Any] = {"unprotected": None, "timed_out": False, "code": None}
    lines = outputs["report"].decode("utf-8", "replace").splitlines()
    for line in lines:
        ended_as |= json.loads(line)
    if ended_as["unprotected"] is None and not ended_as["timed_out"]:
        raise RuntimeError(f"sandbox: did not start: {bytes(outputs['stderr'][-500:]).decode('utf-8', 'replace')}")
    return SandboxResult(
        code=ended_as["code"],
        stdout=bytes(outputs["stdout"]),
        stderr=bytes(outputs["stderr"]),
        side=bytes(outputs["side"]),
        timed_out=bool(ended_as["timed_out"]) and not flooded,
        flooded=flooded,
        unprotected=tuple(ended_as["unprotected"] or ()),
    )


# The number of spaces is bounded: otherwise a fence before many blanks takes quadratic time.
_FENCE = re.compile(r"```[ \t]{0,16}(?:python3?|py|Python)?[ \t]{0,16}\n(.*?)(?:```|\Z)", re.DOTALL)
_MAX_CHARACTERS = 1 << 20
"""Number of characters at the end of a response that are searched for a program."""


def extract_program(text: str) -> str:
    r"""Extract the program of a response: its last fenced block (an open one counts), else the whole text.

    Only the last 1,048,576 characters count.

    Args:
        text: The response.

    Returns:
        The program.

    >>> extract_program("Here:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    text = text[-_MAX_CHARACTERS:]
    blocks = _FENCE.findall(text)
    return str(blocks[-1]) if blocks else text


@dataclass(frozen=True)
class ProgramTests:
    """Tests of a program: pairs of input and output, and statements (`assert f(1) == 2`) that must not raise.

    Args:
        pairs: (input, output) of each run of the program.
        statements: Statements that are run after the program.

    >>> ProgramTests.from_reference({"inputs": ["1 2"], "outputs": ["3"]})
    ProgramTests(pairs=(('1 2', '3'),), statements=())
    >>> ProgramTests.from_reference(["assert f(1) == 2"]).statements
    ('assert f(1) == 2',)
    """

    pairs: tuple[tuple[str, str], ...] = ()
    statements: tuple[str, ...] = ()

    @classmethod
    def from_reference(cls, reference: Reference) -> ProgramTests:
        """Parse tests.

        Args:
            reference: {"inputs": [...], "outputs": [...]}, a list of {"input", "output"} or of statements,
                {"tests": ...}, or the JSON text of one of these.

        Raises:
            ValueError: It is none of these.
        """
        if isinstance(reference, str):
            try:
                reference = json.loads(reference)
            except ValueError:
                reference = [reference]  # one or more statements
        if isinstance(reference, Mapping) and "inputs" in reference and "outputs" in reference:
            if len(reference["inputs"]) != len(reference["outputs"]):
                raise ValueError(
                    f"tests: got {len(reference['inputs'])} inputs and {len(reference['outputs'])} outputs"
                )
            reference = [
                {"input": i, "output": o} for i, o in zip(reference["inputs"], reference["outputs"], strict=True)
            ]
        elif isinstance(reference, Mapping):
            reference = reference.get("tests", [reference])
        if isinstance(reference, str):
            reference = [reference]
        if not isinstance(reference, Sequence) or not reference:
            raise ValueError(f"tests: got {type(reference).__name__}, expected inputs and outputs, or statements")
        pairs, statements = [], []
        for i, entry in enumerate(reference):
            if isinstance(entry, str):
                statements.append(entry)
            elif isinstance(entry, Mapping) and "input" in entry and "output" in entry:
                pairs.append((_text(entry["input"]), _text(entry["output"])))
            else:
                raise ValueError(f"tests[{i}]: got {str(entry)[:80]}, expected a statement, or input and output")
        return cls(tuple(pairs), tuple(statements))


def _text(value: str | float | Sequence[str]) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_CHECKER = """
import os, sys

def main():
    key, place = sys.stdin.readline().strip(), int(sys.argv[1])
    with open("tests.json", encoding="utf-8") as file:
        import json
        tests = json.load(file)
    with open("main.py", encoding="utf-8", newline="") as file:
        source = file.read()
    sys.stdin = open(os.devnull)
    names = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(source, "main.py", "exec"), names)
    os.write(place, f"{key} loaded\\n".encode())
    for i, test in enumerate(tests):
        try:
            exec(compile(test, f"test {i}", "exec"), dict(names))
        except BaseException as error:
            print(f"test {i}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            os.write(place, f"{key} {i}\\n".encode())

main()
"""


def code_match(
    response: str,
    reference: Reference,
    *,
    limits: Limits | None = None,
    time_limit: float = 50.0,
    tolerance: float | None = None,
    all_or_nothing: bool = False,
    python: str | None = None,
) -> dict[str, float]:
    r"""Run the response's Python program and return the share of the tests that it passes.

    With input and output, the program runs once per pair and must print the expected text, up to space at the ends of
    lines. Statements run after the program, in one process, each with its own copy of the program's names. A program
    cannot pass a test of input and output except by printing what is expected. With statements it runs in the process
    that judges it: ending early does not pass, but a program that searches for the key that reports a pass finds it.

    Args:
        response: Text with the program.
        reference: The tests, see `ProgramTests`.
        limits: Limits of each run; by default 10 s and 512 MiB. See `run_sandboxed` for what the sandbox isolates.
        time_limit: Seconds for all tests; tests that are not finished by then fail.
        tolerance: Compare numbers in the output as numbers.
        all_or_nothing: 1 only if all tests pass.
        python: Another interpreter.

    Returns:
        `reward`, and the counts `passed`, `cases` and `timed_out`.

    >>> code_match("```python\nprint(sum(map(int, input().split())))\n```", {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]})
    {'reward': 0.5, 'passed': 1.0, 'cases': 2.0, 'timed_out': 0.0}
    >>> code_match("def double(x):\n    return 2 * x", ["assert double(2) == 4", "assert double('a') == 'aa'"])["reward"]
    1.0
    """  # noqa: E501
    cases = ProgramTests.from_reference(reference)
    check_bool("all_or_nothing", all_or_nothing)
    if tolerance is not None:
        check_float("tolerance", tolerance, 0, 1)
    deadline = time.monotonic() + check_float("time_limit", time_limit, 0.1, 1e6)
    limits = limits if limits is not None else Limits()
    source = extract_program(response)
    passed = late = 0
    for text, expected in cases.pairs:
        left = _remaining_limits(limits, deadline)
        if left is None:
            late += 1
            continue
        stdin = text.encode("utf-8", "surrogatepass")
        ran = run_sandboxed({"main.py": source}, ["main.py"], stdin=stdin, limits=left, python=python)
        late += ran.timed_out
        output = ran.stdout.decode("utf-8", "replace")
        passed += ran.code == 0 and not ran.flooded and _same_output(output, expected, tolerance)
    left = _remaining_limits(limits, deadline)
    if cases.statements and left is None:
        late += 1
    elif cases.statements:
        # Lines of the checker have a secret key, which the program does not know.
        key = secrets.token_hex(16)
        files = {"main.py": source, "tests.json": json.dumps(cases.statements), "check.py": _CHECKER}
        ran = run_sandboxed(files, ["check.py"], stdin=f"{key}\n".encode(), limits=left, python=python, side=True)
        late += ran.timed_out
        lines = set(ran.side.decode("ascii", "replace").splitlines())
        passed += sum(f"{key} {i}" in lines for i in range(len(cases.statements)))
    total = len(cases.pairs) + len(cases.statements)
    share = float(passed == total) if all_or_nothing else passed / total
    return {"reward": share, "passed": float(passed), "cases": float(total), "timed_out": float(late)}


def _remaining_limits(limits: Limits, deadline: float) -> Limits | None:
    """Return the limits of the next run within the remaining time; `None` if there is none."""
    left = deadline - time.monotonic()
    return None if left < 0.05 else replace(limits, wall=min(limits.wall, left))


def _same_output(output: str, expected: str, tolerance: float | None) -> bool:
    printed, required = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    if printed == required:
        return True
    if tolerance is None or len(printed) != len(required):
        return False
    for line, other in zip(printed, required, strict=True):
        words, others = line.split(), other.split()
        if len(words) != len(others) or not all(map(_is_near(tolerance), words, others)):
            return False
    return True


def _is_near(tolerance: float) -> Any:
    def is_near(word: str, other: str) -> bool:
        if word == other:
            return True
        try:
            a, b = float(word), float(other)
        except ValueError:
            return False
        return abs(a - b) <= tolerance * max(1.0, abs(b))

    return is_near
