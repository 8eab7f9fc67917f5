"""Group commit: appends of several threads of a process, written with one sync of the segment and one of the ledger.

The thread that comes first writes; those that come meanwhile wait, and the first of them then writes for all that wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollbook.book.errors import LockTimeout
from rollbook.book.ledger import BUSY_SECONDS

if TYPE_CHECKING:
    from rollbook.book.admission import Admit
    from rollbook.book.book import Book

MOST = 64
"""How many appends one transaction commits."""


@dataclass(eq=False)
class _Entry:
    admit: Admit
    leads: bool = False
    done: bool = False
    error: BaseException | None = field(default=None, repr=False)


class GroupCommit:
    """A queue of appends that are ready to be written."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._busy = False
        self._pid = os.getpid()

    def run(self, book: Book, admit: Admit, timeout: float | None) -> None:
        """Write an append, alone or together with others.

        Raises:
            LockTimeout: Its turn did not come within `timeout` seconds.
        """
        if self._pid != os.getpid():  # The threads of the parent process are not here.
            self._changed, self._waiting, self._busy, self._pid = threading.Condition(), [], False, os.getpid()
        entry = _Entry(admit)
        with self._changed:
            self._waiting.append(entry)
            entry.leads, self._busy = not self._busy, True
            came = self._changed.wait_for(
                lambda: entry.done or entry.leads, BUSY_SECONDS if timeout is None else timeout
            )
            if not came:
                self._waiting.remove(entry)
                raise LockTimeout("append: other threads of this process held the book for too long")
            group: list[_Entry] = []
            if not entry.done:
                group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        if group:
            try:
                _write(book, group, timeout)
            finally:
                with self._changed:
                    for each in group:
                        each.done = True
                    if self._waiting:
                        self._waiting[0].leads = True
                    else:
                        self._busy = False
                    self._changed.notify_all()
        if entry.error is not None:
            raise entry.error


def _write(book: Book, group: Sequence[_Entry], timeout: float | None) -> None:
    if len(group) > 1:
        try:
            _write_together(book, [entry.admit for entry in group], timeout)
            return
        except Exception:
            # One of them is at fault: each is tried alone.
            for entry in group:
                entry.admit.stale = None
    for entry in group:
        try:
            entry.admit.store()
            with book.ledger.write(shared=True, timeout=timeout) as tx:
                entry.admit(tx)
        except BaseException as error:
            entry.error = error
            if not isinstance(error, Exception):
                raise


def _write_together(book: Book, admits: Sequence[Admit], timeout: float | None) -> None:
    from rollbook.book.admission import store_all

    store_all(book, admits)
    with book.ledger.write(shared=True, timeout=timeout) as tx:
        for admit in admits:
            admit(tx)
