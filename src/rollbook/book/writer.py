"""A streaming writer: small appends, gathered and admitted together within a stated delay.

Invariant: `add` returns at once and promises nothing yet; what `flush`, or a receipt's `result`, returned for is
durable. Nothing is dropped silently: an error stays with the receipts of the records it struck, and `close` raises it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollbook.book import admission
from rollbook.book.admission import AppendResult, as_experiences
from rollbook.book.errors import BookError
from rollbook.core.checks import check_float, check_int
from rollbook.core.experiences import Experiences

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience


class Receipt(Future[AppendResult]):
    """What becomes of the records of one `add`: `result()` waits until they are durable, or raises why they are not."""

    asked = False

    def __init__(self) -> None:
        super().__init__()
        # What was added is on its way: a wait for it can be given up, not the records themselves.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> AppendResult:
        """What the append did with these records."""
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why they were refused; `None` if they were not."""
        self.asked = True
        return super().exception(timeout)


class Writer:
    """Appends in the background; made by `book.writer(delay=...)`. Threads may share it.

    Records wait at most `delay` seconds, or until `batch` of them are together, and are then admitted in one append
    (one sync, one frame). If one of them is refused, the pieces are appended one by one, so that only the one at fault
    fails. While the book holds inserts back, `add` blocks once `most` records wait.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> with book.writer(delay=0.05) as writer:
    ...     receipts = [writer.add(rollbook.Experience(tokens=[1, 2, i])) for i in range(100)]
    >>> sum(receipt.result().admitted for receipt in receipts), len(book)
    (100, 100)
    """

    def __init__(self, book: Book, *, delay: float, batch: int, most: int, evaluation: bool, author: str) -> None:
        self._book = book
        self._delay = check_float("delay", delay, 0.0)
        self._batch = check_int("batch", batch, 1)
        self._most = max(check_int("most", most, 1), self._batch)
        self._options: dict[str, Any] = {"evaluation": evaluation, "author": author, "timeout": None}
        self._failed: list[Receipt] = []
        self._pending: list[tuple[Experiences, Receipt]] = []
        self._count = 0
        self._since = 0.0
        self._hurry = False
        self._closing = False
        self._busy = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="rollbook-writer", daemon=True)
        self._thread.start()

    def add(self, experiences: Experience | Iterable[Experience]) -> Receipt:
        """Take records; the receipt's `result()` waits until they are durable."""
        self._check_process()
        # Columns hold what the records were now, not what the caller makes of them before the flush.
        many = as_experiences(experiences).compact()
        receipt = Receipt()
        with self._changed:
            while self._count >= self._most and not self._closing:
                self._changed.wait()
            if self._closing:
                raise BookError("writer: it is closed")
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append((many, receipt))
            self._count += len(many)
            self._changed.notify_all()
        return receipt

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was added is durable; raises what struck any of it, unless its receipt was asked."""
        self._check_process()
        with self._changed:
            self._hurry = bool(self._pending)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._busy and not self._pending, timeout)
        if not done:
            raise TimeoutError(f"writer: not all is durable after {timeout} s")
        self._complain()

    def close(self) -> None:
        """Flush and end; raises what struck any of the records, unless its receipt was asked."""
        self._end()
        self._complain()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise BookError("writer: its thread did not follow into this forked process; make a writer here")

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return  # What it holds is the parent's to write.
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _complain(self) -> None:
        failed, self._failed = [receipt for receipt in self._failed if not receipt.asked], []
        if failed:
            failed[0].result()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                while not (self._hurry or self._closing or self._count >= self._batch):
                    left = self._since + self._delay - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                taken, self._pending, self._count, self._hurry = self._pending, [], 0, False
                self._busy = True
                self._changed.notify_all()
            try:
                self._admit(taken)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _admit(self, taken: list[tuple[Experiences, Receipt]]) -> None:
        if len(taken) > 1:
            try:
                together = Experiences.concat([many for many, _ in taken])
                _, fates = admission.append_records(self._book, together, **self._options)
            except Exception:
                pass  # One of them is at fault: each is tried alone below, and what is admitted already is known.
            else:
                self._share_out(taken, fates)
                return
        for many, receipt in taken:
            try:
                receipt.set_result(admission.append_records(self._book, many, **self._options)[0])
            except BaseException as error:
                self._failed.append(receipt)
                receipt.set_exception(error)

    def _share_out(self, taken: list[tuple[Experiences, Receipt]], fates: dict[str, str]) -> None:
        """Each receipt's part of what one append did; of a record that came twice, the first has it."""
        for many, receipt in taken:
            found = [fates.pop(eid.uid, "known") for eid in many.eids()]
            known, revised, stale = (found.count(word) for word in ("known", "revised", "stale"))
            receipt.set_result(AppendResult(len(found) - known - revised, known, revised, stale))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def __repr__(self) -> str:
        return f"Writer({self._book!r}, {self._count} records waiting)"
