"""What may come of bytes: records, or a `WireError` that says why. Anything else passes through and fails the test."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollbook import Experience, Experiences, WireError
from rollbook.core import frame_reader, wire
from rollbook.core.fields import FIELDS
from rollbook.core.frame_reader import read_stack
from rollbook.io.arrow import to_table
from tests.strategies import exact_rows

SPARE = 64 << 20
"""How much a reader may take beside twice the decoded size: what interpreters and allocators keep for themselves."""
ROOT = Path(__file__).parents[2]


def judged(read: Callable[[], Any]) -> Any:
    """What `read` gives, or `None` if it was refused in the one way that is allowed."""
    try:
        return read()
    except WireError as error:
        if type(error) is not WireError or not str(error).strip():
            raise TypeError(f"a refusal that is no plain WireError with a message: {error!r}") from error
        return None


def used(rows: list[Experience], experiences: Experiences | None = None) -> None:
    """Write again what was read, and take its columns through what is done with columns.

    What cannot be done must be said with a `ValueError`.
    """
    with contextlib.suppress(ValueError):
        wire.encode(rows)
    if experiences is None:
        return
    with contextlib.suppress(ValueError):
        wire.encode(experiences)
    with contextlib.suppress(ValueError):
        to_table(experiences, portable=True).validate(full=True)
    with contextlib.suppress(ValueError):
        backwards = experiences[::-1]
        Experiences.concat([backwards, experiences[1:], experiences]).rows()
    with contextlib.suppress(ValueError):
        experiences.group_by("task")
        experiences.token_lengths().sum()
        experiences.prompt_lengths().sum()


def decoded(data: Any, **options: Any) -> bool:
    """Whether `wire.decode` took the bytes; what it gave is made into rows and written again. With `verify=False`, some
    rows are read alone as well."""
    experiences = judged(lambda: wire.decode(data, **options))
    if not options.get("verify", True):
        slots = range(0, min(wire.HEADER.unpack_from(data)[6], 8), 2) if len(data) >= wire.HEADER_BYTES else [0]
        ranges = judged(
            lambda: frame_reader.drive(
                frame_reader.read_rows(len(data), slots), lambda all: [data[a:b] for a, b in all]
            )
        )
        if ranges is not None:
            judged(ranges.rows)
    rows = None if experiences is None else judged(experiences.rows)
    if rows is None:
        return False
    used(rows, experiences)
    return True


def stacked(*frames: bytes) -> bool:
    """Whether frames were read as one; if so, they are what `wire.decode` reads."""
    ends = np.cumsum([0, *map(len, frames)]).tolist()
    memory = np.frombuffer(bytearray(b"".join(frames)), dtype=np.uint8)
    stack = read_stack(memory, list(itertools.pairwise(ends)), verify=False)
    if stack is None:
        return False
    judged(lambda: stack.arrays(list(FIELDS)))
    experiences = judged(lambda: stack.experiences(verify=False))
    rows = None if experiences is None else judged(experiences.rows)
    if rows is None:
        return False
    assert exact_rows(rows) == exact_rows(wire.decode(b"".join(frames), verify=False).rows())
    return True


def read_as_any(data: Any) -> bool:
    """Whether `Experience.deserialize_many` took the bytes."""
    rows = judged(lambda: Experience.deserialize_many(data))
    if rows is None:
        return False
    used(rows)
    return True


def streamed(data: bytes) -> bool:
    """Whether `iter_frames` read them to the end."""
    parts = judged(lambda: list(wire.iter_frames(io.BytesIO(data))))
    rows = None if parts is None else judged(lambda: [row for part in parts for row in part.rows()])
    if rows is None:
        return False
    used(rows)
    return True


def refusal(data: Any, **options: Any) -> str:
    """The message with which these bytes are refused by `decode` (or by making the rows), and by
    `Experience.deserialize_many` too; fails if they are read."""
    reads: list[Callable[[], Any]] = [lambda: wire.decode(data, **options).rows()]
    if not options:
        reads.append(lambda: Experience.deserialize_many(data))
    messages = []
    for read in reads:
        try:
            read()
        except WireError as error:
            assert type(error) is WireError, type(error)
            assert str(error).strip()
            messages.append(str(error))
        else:
            raise AssertionError("the bytes were read, and should have been refused")
    return messages[0]


def stated_size(data: bytes) -> int:
    """What frames say they take when decoded, as far as they can be told, or their own size if that is more."""
    stated, at = 0, 0
    limits = wire.DEFAULT_LIMITS
    while data[at : at + 8] == wire.MAGIC and len(data) - at >= wire.HEADER.size:
        length, size = wire.HEADER.unpack_from(data, at)[4:6]
        # Over the limits nothing may be taken at all: the statement is no excuse.
        stated += size if size <= min(limits.max_bytes, max(wire.FREE_BYTES, limits.max_ratio * length)) else 0
        at += 64 + length + -length % 64
    return max(min(stated, max(wire.FREE_BYTES, limits.max_ratio * len(data))), len(data))


class Meter:
    """How far this process's resident memory rose since `start`, at its highest.

    Linux lets a process forget its high-water mark. Where that is not allowed the mark of the whole life is compared,
    which misses a rise that stays below an earlier one, and never invents one.
    """

    def __init__(self) -> None:
        # Opened once: whoever watches for files that are opened to be written sees nothing of the meter later on.
        try:
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        except OSError:
            self._reset = self._status = -1
        self.start()

    def _marks(self) -> tuple[int, int]:
        """Bytes resident: at the highest, and now."""
        if self._status < 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return peak, peak
        text = os.pread(self._status, 8192, 0)
        highest, now = (re.search(rb"\n%s:\s+(\d+) kB" % name, text) for name in (b"VmHWM", b"VmRSS"))
        assert highest is not None
        assert now is not None
        return int(highest[1]) << 10, int(now[1]) << 10

    def start(self) -> None:
        if self._reset >= 0:
            os.write(self._reset, b"5")
        self._before = self._marks()[1]

    def peak(self) -> int:
        return self._marks()[0] - self._before


def in_child(source: str, *arguments: str, timeout: float = 60) -> str:
    """Run Python source in a process of its own, which may die without taking the tests along; gives its output.

    Fails if a signal ends it, if it exits with anything but 0, and if it takes too long.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode >= 0, f"the process was ended by signal {-done.returncode}\n{done.stderr}"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
