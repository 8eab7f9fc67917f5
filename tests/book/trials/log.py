"""What workers said they were about to do and had done, kept by a process that no trial kills.

A worker writes a line into a pipe, at once and whole: before a call ("try ...") and after it returned ("did ..."). A
line is in the pipe even if its writer is killed right behind it, and lines come out in the order they went in.

    try append PIECE             did append PIECE
    did lease CONSUMER FENCE experience|group COUNT UID..
    try ack CONSUMER FENCE UID.. did ack CONSUMER FENCE UID..    lost CONSUMER FENCE UID..   (LeaseLostError)
    try revise UID VALUE         did revise UID VALUE
    did nack | compact | refuse  die WINDOW WHILE     error TEXT
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.book.trials.records import Piece, first_reward

PATIENCE = 60.0


class Log:
    """What the lines so far say."""

    def __init__(self) -> None:
        self.tried: dict[Piece, None] = {}
        self.appended: dict[Piece, None] = {}
        self.piece_of: dict[str, Piece] = {}
        self.acks_tried: dict[tuple[str, int, tuple[str, ...]], None] = {}
        self.acks: dict[tuple[str, int, tuple[str, ...]], None] = {}
        self.leases: list[tuple[str, int, str, int, tuple[str, ...]]] = []
        """Consumer, fence, by what, how many were asked for, and what came."""
        self.lost: dict[tuple[str, int, tuple[str, ...]], None] = {}
        self.rewards: dict[str, list[float]] = {}
        """What was to become of each reward, in order."""
        self.revised: dict[str, int] = {}
        """How many of those are known to have been written."""
        self.deaths: Counter[tuple[str, str]] = Counter()
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.marks: set[str] = set()

    def feed(self, line: str) -> None:
        """Take one line."""
        word, _, rest = line.partition(" ")
        if word == "error":
            self.errors.append(rest)
            return
        if word == "mark":
            self.marks.add(rest)
            return
        if word == "die":
            window, _, doing = rest.rpartition(" ")
            self.deaths[window, doing] += 1
            return
        if word == "lost":
            self.lost[_acknowledgement(rest)] = None
            self.done["lost"] += 1
            return
        verb, _, about = rest.partition(" ")
        if word == "did":
            self.done[verb] += 1
        if verb == "append":
            piece = Piece.parse(about)
            (self.tried if word == "try" else self.appended)[piece] = None
            self.piece_of.update(dict.fromkeys(piece.uids, piece))
        elif verb == "lease":
            consumer, fence, by, count, *uids = about.split(" ")
            self.leases.append((consumer, int(fence), by, int(count), tuple(uids)))
        elif verb == "ack":
            (self.acks_tried if word == "try" else self.acks)[_acknowledgement(about)] = None
        elif verb == "revise":
            uid, value = about.split(" ")
            values = self.rewards.setdefault(uid, [first_reward(uid)])
            if word == "try":
                values.append(float(value))
            else:
                self.revised[uid] = len(values) - 1

    def unsettled(self) -> list[Piece]:
        """Appends of which nobody heard how they ended."""
        return [piece for piece in self.tried if piece not in self.appended]


def _acknowledgement(text: str) -> tuple[str, int, tuple[str, ...]]:
    consumer, fence, *uids = text.split(" ")
    return consumer, int(fence), tuple(uids)


def fork(act: Callable[[], None], say: Callable[[str], None]) -> int:
    """Run `act` in a child; its id. What it raises becomes a line of the log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # Ends with the trial, also where that is killed itself.
        _die_with_parent()
        act()
        code = 0
    except BaseException as error:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)[-10:]
        trace = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        say(f"error {type(error).__name__}: {error} ({trace})".replace("\n", " ")[:3000])
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    import ctypes
    import sys

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait(pid: int, seconds: float = PATIENCE) -> int | None:
    """How a child ended (its exit code, or minus the signal); `None` if it did not."""
    end = time.monotonic() + seconds
    pause = 0.0005
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def kill(pid: int) -> int | None:
    """Kill a child; how it ended."""
    os.kill(pid, signal.SIGKILL)
    return wait(pid)


class Logger:
    """The process that keeps the log, and the way to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read, self._write = os.pipe()
        self.state = Log()
        self._at = 0
        self._left = b""
        self._marks = 0
        self._pid = fork(self._keep, lambda line: None)
        os.close(self._read)

    def _keep(self) -> None:
        os.close(self._write)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self.path.open("ab", buffering=0) as file:
            while data := os.read(self._read, 1 << 16):
                file.write(data)

    def say(self, line: str) -> None:
        """Write one line; whole, since it is shorter than what a pipe takes at once."""
        data = line.encode() + b"\n"
        if len(data) > select.PIPE_BUF:
            raise ValueError(f"line: got {len(data)} bytes, expected at most {select.PIPE_BUF}")
        os.write(self._write, data)

    def update(self) -> Log:
        """All that was said before this call."""
        self._marks += 1
        mark = f"{os.getpid()}-{self._marks}"
        self.say(f"mark {mark}")
        end = time.monotonic() + PATIENCE
        pause = 0.0002
        while True:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            self._at += len(data)
            *lines, self._left = (self._left + data).split(b"\n")
            for line in lines:
                self.state.feed(line.decode())
            if mark in self.state.marks:
                return self.state
            if time.monotonic() > end:
                raise TimeoutError("the logger does not answer")
            time.sleep(pause)
            pause = min(pause * 2, 0.01)

    def restart(self) -> None:
        """Forget what was said, for another book."""
        self.update()
        self.state = Log()

    def close(self) -> None:
        os.close(self._write)
        wait(self._pid)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
