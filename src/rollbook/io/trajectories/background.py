"""Writing beside training: one thread, and few jobs that wait for it.

Invariant: a caller never waits; a job that finds no room is dropped, and who submitted it is told. Jobs that were taken
are done before the program ends.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class Background:
    """A thread that does jobs in order, of which at most `room` wait.

    >>> done = []
    >>> worker = Background(room=4)
    >>> [worker.submit(lambda i=i: done.append(i)) for i in range(3)]
    [True, True, True]
    >>> worker.flush()
    >>> done
    [0, 1, 2]
    """

    def __init__(self, room: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="rollbook saver", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)  # at the end of the program too

    def submit(self, job: Job) -> bool:
        """Have `job` done, unless there is no room; it must not raise."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until every job is done."""
        self._jobs.join()


def _work(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # a job reports its own errors
            job()
        del job
        jobs.task_done()


def _stop(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the last to hold the saver may have been a job
        thread.join()
