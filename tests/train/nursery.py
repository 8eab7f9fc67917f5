"""A process that has imported everything `rollbook train` needs and forks a child for each command: a life of it costs
what its work costs, and it can be told at which named point, or after how many seconds, it is to be killed.

Not the process of the tests: what others did in that one (threads, devices) does not come along.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.book.trials.log import wait

ROOT = Path(__file__).parents[2]
LONGEST = 120.0


@dataclass(frozen=True)
class Life:
    """How a command ended."""

    code: int
    """Its exit status, or minus the signal that killed it."""
    printed: str
    """What it wrote, to both outputs."""
    points: list[str] = field(default_factory=list)
    """The named points that it reached, in order."""

    @property
    def killed(self) -> bool:
        """Whether it was."""
        return self.code == -signal.SIGKILL


class Nursery:
    """The way to that process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.nursery"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, arguments: Sequence[str], *, at: tuple[str, int] | None = None, after: float | None = None) -> Life:
        """Run `rollbook` with these arguments: to its end, to the n-th time a point is reached, or for so long."""
        ask = {"arguments": list(arguments), "at": at, "after": after, "folder": str(self.folder)}
        ends = self._process.stdin, self._process.stdout
        if ends[0] is None or ends[1] is None:
            raise AssertionError("the nursery has no pipes")
        ends[0].write(json.dumps(ask) + "\n")
        ends[0].flush()
        answer = ends[1].readline()
        if not answer:
            raise AssertionError(f"the nursery ended: {self._process.wait()}")
        code = json.loads(answer)
        points = (self.folder / "points").read_text().splitlines()
        return Life(code, (self.folder / "said").read_text(), points)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=LONGEST)


def _child(ask: dict[str, Any]) -> int:
    """One command's life, in a process of its own."""
    from rollbook.book import disk
    from rollbook.cli import main

    folder = Path(ask["folder"])
    out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    points = os.open(folder / "points", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    name, left = ask["at"] or ("", 0)

    def reached(point: str) -> None:
        nonlocal left
        os.write(points, f"{point}\n".encode())
        left -= point == name
        if point == name and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    disk.watch_failpoints(reached)
    return main(ask["arguments"])


def _ended(pid: int, after: float | None) -> int:
    if after is not None:
        end = time.monotonic() + after
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
    code = wait(pid, LONGEST)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"a life took longer than {LONGEST:g} s")
    return code


def serve() -> None:
    """Read what to run from the standard input, line by line; answer how it ended."""
    import io
    import tempfile

    import torch

    torch.set_num_threads(1)
    import rollbook.cli.train  # noqa: F401
    from rollbook.train.config import load_config
    from rollbook.train.run import run
    from tests.train.lineage import SMALL

    with tempfile.TemporaryDirectory() as folder:
        # A whole run, and one that goes on, so that children find loaded whatever is loaded on the way.
        for steps in (1, 2):
            run(load_config("letters", [*SMALL, f"steps={steps}", f"out={folder}/run"]), stream=io.StringIO())
    for line in sys.stdin:
        ask = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 70
            try:
                code = _child(ask)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(_ended(pid, ask["after"]), flush=True)


if __name__ == "__main__":
    serve()
