"""Bytes on their way to the shelf, in a thread of their own, while what the ledger will say of them is made.

Invariant: `Ahead.ended` returns, or raises, after the bytes have left the memory they lay in, whatever else went wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from rollbook.book.shelves import Place, Shelf

_THREADS = 16
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


class Ahead:
    """One `put` under way.

    >>> from rollbook.book.shelves import MemoryShelf
    >>> shelf = MemoryShelf()
    >>> [place] = Ahead(shelf, [b"tokens"]).ended()
    >>> bytes(shelf.get(place))
    b'tokens'
    """

    def __init__(self, shelf: Shelf, parts: Sequence[Buffer]) -> None:
        began = threading.Lock()
        began.acquire()

        def put() -> list[Place]:
            began.release()
            return shelf.put(parts)

        self._places: list[Place] | None = None
        self._future: Future[list[Place]] | None = None
        try:
            self._future = _threads().submit(put)
        except RuntimeError:  # An interpreter that ends starts no threads any more.
            self._places = shelf.put(parts)
            return
        # Python runs one thread at a time: this one waits until the other has begun, and goes on when that one waits
        # for the disk.
        began.acquire()

    def ended(self) -> list[Place]:
        """Where the bytes lie, once they are durable there."""
        if self._future is not None:
            try:
                self._places = self._future.result()
            finally:
                wait([self._future])  # An interrupt ends the waiting, not the writing.
        return self._places or []


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rollbook-shelf")
        return _pool


def _forked() -> None:
    """In a child, the threads are not there."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
