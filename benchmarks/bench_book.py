"""The book: appending, reading back, leasing and a queue, beside Trinity-RFT's storage and what the disk allows.

Run as `python -m benchmarks.bench_book [--rounds 5] [--json PATH]` from the project root, about three minutes; with
`--million` also the ledger of a million records, two or three more. Books lie in the scratch folder, on its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rollbook
from benchmarks import harness, peers
from benchmarks.harness import Comparison, Contender, Options, Report, Times
from benchmarks.workload import Workload, check_same, make_workload, touch
from rollbook import Experience, Experiences
from rollbook.book import Book, First, Proportional, Uniform
from rollbook.wire import encode

N = 512
SIZES = (8, 64)
ROUNDS = 5
COLUMNS = ("tokens", "logprobs", "advantages", "returns", "action_mask", "reward")
"""What a trainer reads."""

THEIR_READ = "Trinity query of all"
THEIR_ROWS = "Trinity query of all, every field asked for"
THEIR_CLAIMS = "Trinity read of 8 at a time"
THEIR_QUEUE = "Trinity queue put and get"


def named(what: str, size: int) -> str:
    """A contender that works in batches."""
    return f"{what}, batches of {size}"


def comparisons(sizes: Sequence[int], postgres: bool) -> list[Comparison]:
    """The targets, and what stands beside them without one."""
    made = []
    for size, target in zip(sizes, (12, 25), strict=True):
        ours, theirs, raw = (named(what, size) for what in ("append rows", "Trinity write", "raw write and sync"))
        made += [
            Comparison(ours, ours, theirs, target=target),
            Comparison(ours, ours, raw, target=3, bound=True),
            Comparison(named("append columns", size), named("append columns", size), theirs),
            Comparison(ours, ours, named("SQLite blobs", size)),
            Comparison(ours, ours, named("Parquet files", size)),
        ]
    for size in sizes:
        made += [
            Comparison(f"{read}, batches of {size}", named(read, size), THEIR_READ, target=target)
            for read, target in (("mapped columns", 100), ("rows", 15))
        ]
        made.append(Comparison(named("rows, every field", size), named("rows, every field", size), THEIR_ROWS))
    made += [Comparison(f"lease 8 and ack, {kind}", f"lease 8 and ack, {kind}", THEIR_CLAIMS) for kind in kinds(postgres)]
    made += [
        Comparison(f"append 8, lease 8, {kind}", f"append 8, lease 8, {kind}", THEIR_QUEUE) for kind in kinds(postgres)
    ]
    return made


def kinds(postgres: bool) -> tuple[str, ...]:
    """Where a book can lie."""
    return ("folder", "memory", "PostgreSQL") if postgres else ("folder", "memory")


class Place:
    """A folder of its own, and what lies there; both go when nobody refers to it any more."""

    def __init__(self, scratch: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="book.", dir=scratch))
        self.closes: list[Callable[[], object]] = []
        self.held: Any = None
        self._end = weakref.finalize(self, _end, self.folder, self.closes)

    def hold(self, thing: Any, close: Callable[[], object]) -> Place:
        """Keep something here, and how to close it."""
        self.held = thing
        self.closes.append(close)
        return self


def _end(folder: Path, closes: list[Callable[[], object]]) -> None:
    for close in closes:
        close()
    shutil.rmtree(folder)


def parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`items` in batches."""
    return (items[at : at + size] for at in range(0, len(items), size))


# --- Trinity ------------------------------------------------------------------------------------------------------


class Trinity:
    """The released storage, called as its actors call it, without Ray around it."""

    def __init__(self, scratch: Path | None) -> None:
        self.package = peers.trinity_storage(scratch)
        self.experience = self.package.common.experience.Experience
        self.loop = asyncio.new_event_loop()
        # It logs a line for every write: time that is not its storage's.
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore", module="sqlalchemy|trinity")

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def config(self, **options: Any) -> Any:
        return self.package.common.config.StorageConfig(
            name="bench", schema_type="experience", wrap_in_ray=False, max_read_timeout=30, **options
        )

    def storage(self, scratch: Path) -> Place:
        """An SQL storage on SQLite, its tables made."""
        place = Place(scratch)
        made = self.package.buffer.storage.sql.SQLExperienceStorage(
            self.config(storage_type="sql", path=f"sqlite:///{place.folder}/trinity.db", batch_size=8)
        )
        self.run(made.prepare())
        return place.hold(made, lambda: self.run(made.engine.dispose()))

    def queue(self, scratch: Path) -> Place:
        """A queue that keeps its experiences in SQLite as well."""
        place = Place(scratch)
        made = self.package.buffer.storage.queue.QueueStorage(
            self.config(storage_type="queue", path=f"sqlite:///{place.folder}/trinity.db", batch_size=8)
        )
        return place.hold(made, lambda: None)

    def write(self, storage: Any, rows: Sequence[Any], size: int) -> None:
        async def work() -> None:
            for part in parts(rows, size):
                await storage.write(part)

        self.run(work())

    def claim(self, storage: Any, times: int) -> int:
        async def work() -> int:
            return sum([len(await storage.read(8)) for _ in range(times)])

        found: int = self.run(work())
        return found

    def put_and_get(self, queue: Any, rows: Sequence[Any]) -> int:
        make = self.experience

        async def work() -> int:
            got = 0
            for part in parts(rows, 8):
                await queue.put_batch(make.serialize_many(part))
                got += len(make.deserialize_many(await queue.get_batch(8, timeout=10)))
            return got

        found: int = self.run(work())
        return found


# --- contenders -----------------------------------------------------------------------------------------------------


def open_book(scratch: Path) -> Place:
    """An empty book in a folder."""
    place = Place(scratch)
    book = rollbook.open(place.folder / "book")
    return place.hold(book, book.close)


def filled(scratch: Path, rows: Sequence[Experience], size: int) -> Place:
    """A book in a folder with these rows, appended in batches."""
    place = open_book(scratch)
    for part in parts(rows, size):
        place.held.append(part)
    return place


def appends(workload: Workload, theirs: Trinity, scratch: Path, size: int) -> list[Contender]:
    """Everything that stores all records in batches of `size`, each durable before the next."""
    frames = [bytes(encode(part)) for part in parts(workload.build(Experience), size)]

    def with_rows(make: Callable[[Path], Place], build: Callable[..., Any]) -> Callable[[], tuple[Place, list[Any]]]:
        return lambda: (make(scratch), workload.build(build))

    def append(state: tuple[Place, Any]) -> Any:
        place, rows = state
        for part in parts(rows, size):
            place.held.append(part)
        return state

    def append_columns(state: tuple[Place, Any]) -> Any:
        place, batches = state
        for part in batches:
            place.held.append(part)
        return state

    def columns() -> tuple[Place, list[Experiences]]:
        return open_book(scratch), [Experiences(part) for part in parts(workload.build(Experience), size)]

    def raw(place: Place) -> Place:
        with open(place.folder / "raw", "wb", buffering=0) as file:
            for frame in frames:
                file.write(frame)
                os.fdatasync(file.fileno())
        return place

    def blobs(place: Place) -> Place:
        for frame in frames:
            with place.held:
                place.held.execute("INSERT INTO frames (data) VALUES (?)", (frame,))
        return place

    def database() -> Place:
        place = Place(scratch)
        connection = sqlite3.connect(place.folder / "blobs.db")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE frames (id INTEGER PRIMARY KEY, data BLOB)")
        return place.hold(connection, connection.close)

    def parquet(state: tuple[Place, Any]) -> Any:
        place, rows = state
        for i, part in enumerate(parts(rows, size)):
            path = place.folder / f"{i}.parquet"
            Experiences(part).to_parquet(path)
            for name, flags in ((path, os.O_RDONLY), (place.folder, os.O_RDONLY | os.O_DIRECTORY)):
                fd = os.open(name, flags)
                os.fsync(fd)
                os.close(fd)
        return state

    def write(state: tuple[Place, Any]) -> Any:
        theirs.write(state[0].held, state[1], size)
        return state

    return [
        Contender(named("append rows", size), append, with_rows(open_book, Experience)),
        Contender(named("append columns", size), append_columns, columns),
        Contender(named("Trinity write", size), write, with_rows(theirs.storage, theirs.experience)),
        Contender(named("raw write and sync", size), raw, lambda: Place(scratch)),
        Contender(named("SQLite blobs", size), blobs, database),
        Contender(named("Parquet files", size), parquet, with_rows(Place, Experience)),
    ]
