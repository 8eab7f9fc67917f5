"""How long calls on a large book keep others waiting.

While a call runs on a book of a million records, a second process appends one record after another; its longest append
is the longest time that the call held the write lock, plus the time of an append.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import rollbook
from benchmarks import peers
from rollbook import Experience
from rollbook.book import Book, Uniform

RECORDS = {"folder": 1_000_000, "PostgreSQL": 100_000}
QUICK = 50_000
PART = 2_000
"""Records of one append while the book is filled."""
MOST = 250.0
"""Milliseconds that a call may keep an append waiting."""


class Wait(NamedTuple):
    """What the second process saw while a call ran."""

    seconds: float
    """Of the call."""
    longest: float
    appends: int


def fill(book: Book, count: int) -> None:
    """Append `count` small records in groups of 8; a policy version for each thousandth of them."""
    for start in range(0, count, PART):
        book.append(
            [
                Experience(
                    eid={"batch": i // 1000, "task": i // 8, "run": i % 8, "step": 0, "suffix": ""},
                    tokens=[1, 2, 3],
                    reward=float(i % 2),
                    group_size=8,
                    info={"model_version": i * 1000 // count},
                )
                for i in range(start, min(start + PART, count))
            ]
        )


def uids(count: int) -> list[str]:
    """The ids of the records that `fill` appended."""
    return [f"{i // 1000}/{i // 8}/{i % 8}/0/" for i in range(count)]


def _append(url: str, pipe: Connection) -> None:
    """Append one record after another between two messages; answer with the longest time and their number."""
    with rollbook.open(url) as book:
        number = 0
        while pipe.recv():
            longest, first = 0.0, number
            pipe.send("ready")
            while not pipe.poll():
                number += 1
                record = Experience(
                    eid={"batch": "probe", "task": number, "run": 0, "step": 0, "suffix": ""},
                    tokens=[1, 2, 3],
                    info={"model_version": 10**6},
                )
                start = time.monotonic()
                book.append(record)
                longest = max(longest, time.monotonic() - start)
                time.sleep(0.002)
            pipe.recv()
            pipe.send((longest, number - first))


class Probe:
    """The second process."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_append, args=(url, far), daemon=True)
        self.process.start()

    def beside(self, call: Callable[[], object]) -> Wait:
        """Run a call while the process appends."""
        self.pipe.send(True)
        self.pipe.recv()
        time.sleep(0.05)
        start = time.monotonic()
        call()
        seconds = time.monotonic() - start
        self.pipe.send(False)
        longest, appends = self.pipe.recv()
        return Wait(seconds, longest, appends)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def first_lease(book: Book) -> None:
    """Make a consumer group and lease from it."""
    book.consumer("new", create=True)
    book.lease(8, consumer="new").nack()


def calls(book: Book, count: int) -> dict[str, Callable[[], object]]:
    """The calls, in an order in which each finds the book as large as it was filled."""
    listed = uids(count)

    def sweep() -> None:
        book.announce(500)
        book.lease(1, consumer="stale").nack()

    return {
        "nothing (half a second)": lambda: time.sleep(0.5),
        "a new consumer's first lease": lambda: first_lease(book),
        "consumer(change=True): another sampler": lambda: book.consumer(change=True, sampler=Uniform()),
        "the first lease by group": lambda: book.lease(1, by="group").nack(),
        "announce: half of the records become stale": sweep,
        "delete of all ids": lambda: book.delete(listed, author="bench"),
    }


def _open(url: str) -> Book:
    book = rollbook.open(url)
    book.consumer("stale", create=True, max_staleness=0)
    return book


def measure(url: str, count: int) -> dict[str, Wait]:
    """Fill a book and run the calls on it."""
    with _open(url) as book:
        fill(book, count)
    probe = Probe(url)
    try:
        with rollbook.open(url) as book:
            return {name: probe.beside(call) for name, call in calls(book, count).items()}
    finally:
        probe.close()


def bounded(scratch: Path | None, quick: bool) -> str:
    """Measure both backends; the section of the report."""
    from tests.book.postgres import CARELESS, Server

    counts = dict.fromkeys(RECORDS, QUICK) if quick else RECORDS
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 8e9
    place = memory if in_memory else scratch or peers.default_scratch()
    folder = tempfile.mkdtemp(prefix="bounded.", dir=place)
    try:
        waits: dict[str, Any] = {"folder": measure(f"{folder}/book", counts["folder"])}
    finally:
        shutil.rmtree(folder)
    with Server(settings=CARELESS) as server:
        waits["PostgreSQL"] = measure(server.database(), counts["PostgreSQL"])
    lines = [
        "Two consumers beside the new one; the folder is "
        f"{'on an in-memory file system' if in_memory else 'on a disk'}, PostgreSQL runs without fsync. A second "
        "process appends one record after another while the call runs.\n",
        "| call | backend | records | seconds | appends meanwhile | longest append ms | target | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, by_call in waits.items():
        for name, wait in by_call.items():
            longest = wait.longest * 1e3
            lines.append(
                f"| {name} | {kind} | {counts[kind]:,} | {wait.seconds:.2f} | {wait.appends} | {longest:,.0f} "
                f"| at most {MOST:g} | {'met' if longest <= MOST else 'MISSED'} |"
            )
    return "\n".join(lines) + "\n"
