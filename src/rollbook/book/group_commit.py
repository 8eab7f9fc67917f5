"""Group commit: appends of several threads of a process, written with one sync of the segment and one of the ledger.

The first thread writes its append. Threads that come meanwhile wait; the first of them then writes all that wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollbook.book.errors import LockTimeoutError
from rollbook.book.ledger import BUSY_SECONDS

if TYPE_CHECKING:
    from rollbook.book.admission import AppendTransaction
    from rollbook.book.book import Book

MAX_APPENDS = 64
"""How many appends one transaction commits."""


@dataclass(eq=False)
class _Entry:
    """An append in the queue."""

    admit: AppendTransaction
    leads: bool = False
    """Whether its thread writes next, for all that wait."""
    done: bool = False
    """Whether it was written, or failed with `error`."""
    error: Exception | None = None


class GroupCommit:
    """A queue of appends that are ready to be written.

    Invariant: while the queue is not empty, one thread writes or is about to; an entry is done only if it was committed
    or has an error.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._busy = False
        self._pid = os.getpid()

    def run(self, book: Book, admit: AppendTransaction, timeout: float | None) -> None:
        """Write an append, alone or together with others.

        Raises:
            LockTimeoutError: Its turn did not come within `timeout` seconds.
        """
        if self._pid != os.getpid():
            self._reset()  # The parent's threads did not follow into this forked process.
        entry = _Entry(admit)
        group: list[_Entry] = []
        try:
            self._join(entry, group, BUSY_SECONDS if timeout is None else timeout)
            _write(book, group, timeout)
        finally:
            with self._changed:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                if entry.leads:
                    # If this thread was interrupted, the others write for themselves.
                    self._waiting[:0] = [other for other in group if not other.done and other is not entry]
                    self._hand_over()
        if entry.error is not None:
            raise entry.error

    def _join(self, entry: _Entry, group: list[_Entry], timeout: float) -> None:
        """Wait in the queue; fill `group` with what this thread has to write, unless another thread wrote the entry."""
        with self._changed:
            self._waiting.append(entry)
            entry.leads, self._busy = not self._busy, True
            if not self._changed.wait_for(lambda: entry.done or entry.leads, timeout):
                if entry in self._waiting:
                    raise LockTimeoutError(f"append: other threads of this process held the book for {timeout:.3g} s")
                self._changed.wait_for(lambda: entry.done or entry.leads)  # It is being written.
            if not entry.done:
                group += self._waiting[:MAX_APPENDS]
                del self._waiting[:MAX_APPENDS]

    def _hand_over(self) -> None:
        """Let the first thread that waits write; with the lock."""
        self._busy = bool(self._waiting)
        if self._waiting:
            self._waiting[0].leads = True
        self._changed.notify_all()


def _write(book: Book, group: Sequence[_Entry], timeout: float | None) -> None:
    """Write entries together, or one by one if one of them is at fault."""
    if len(group) > 1:
        try:
            _commit(book, [entry.admit for entry in group], timeout)
        except LockTimeoutError as error:
            for entry in group:
                entry.error, entry.done = error, True
        except Exception:
            for entry in group:
                entry.admit.stale = None
        else:
            for entry in group:
                entry.done = True
    for entry in group:
        if not entry.done:
            try:
                _commit(book, [entry.admit], timeout)
            except Exception as error:
                entry.error = error
            entry.done = True


def _commit(book: Book, admits: Sequence[AppendTransaction], timeout: float | None) -> None:
    from rollbook.book.admission import store_all

    store_all(book, admits)
    with book.ledger.write(shared=True, timeout=timeout) as tx:
        for admit in admits:
            admit(tx)
