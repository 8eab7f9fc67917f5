"""The identity of files and the lock of a book's folder.

Invariant: while one process holds the lock alone, no other is in a write transaction of the folder's ledger.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager


def identity(path: str | os.PathLike[str] | int) -> tuple[int, int] | None:
    """Return the device and inode that a path leads to (or a descriptor has), or `None` if nothing is there.

    >>> identity("/") == identity("/tmp/.."), identity("/nowhere")
    (True, None)
    """
    try:
        entry = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry.st_dev, entry.st_ino


@contextmanager
def folder_lock(folder: str | os.PathLike[str], *, shared: bool, seconds: float) -> Iterator[bool]:
    """Hold the lock of a book's folder: shared for a write transaction, alone for a repair that replaces the ledger.

    The lock is taken on the folder itself: it needs no file, moves with the folder and ends with the process.

    Returns:
        A context whose value says whether the lock was had within `seconds`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with folder_lock(folder, shared=True, seconds=0.0), folder_lock(folder, shared=False, seconds=0.0) as alone:
    ...         alone
    False
    """
    # Opened anew each time: a descriptor that several threads or a forked child share would share its lock, too.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + seconds
        pause = 0.0002
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(pause * (0.5 + random.random()))
                    pause = min(pause * 1.5, 0.01)
                    continue
                yield False
                return
            break
        try:
            yield True
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # Closing would leave it to a child that was forked meanwhile.
    finally:
        os.close(fd)
