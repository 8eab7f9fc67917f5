"""The book: appending, reading back, leasing and a queue, beside Trinity-RFT's storage and what the disk allows.

Run as `python -m benchmarks.bench_book [--part peers] [--rounds 5] [--json PATH]` from the project root. The parts are
`peers` (about three minutes), `million` (the ledger of a million records, two or three), `scale` (processes and batches
beside a raw queue, three), `waiting` (appends beside waiting consumers) and `bounded` (the longest wait for a lock on a
large book; `--quick` for a small one). `--save` puts the sections of the last three into results/book.md. Books lie in
the scratch folder, on its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rollbook
from benchmarks import harness, peers
from benchmarks.harness import Comparison, Contender, Options, Report
from benchmarks.workload import Workload, check_same, make_workload, touch
from rollbook import Experience, Experiences
from rollbook.book import Book, First, Proportional, Uniform
from rollbook.core.wire import encode
from rollbook.io.parquet import read_parquet, write_parquet

N = 512
SIZES = (8, 64)
ROUNDS = 5
COLUMNS = ("tokens", "logprobs", "advantages", "returns", "action_mask", "reward")
"""What a trainer reads."""

THEIR_READ = "Trinity query of all"
THEIR_ROWS = "Trinity query of all, every field read"
THEIR_CLAIMS = "Trinity read of 8 at a time"
THEIR_QUEUE = "Trinity queue put and get"


def named(operation: str, size: int) -> str:
    """A contender that works in batches."""
    return f"{operation}, batches of {size}"


def comparisons(sizes: Sequence[int], postgres: bool) -> list[Comparison]:
    """The targets, and what stands beside them without one."""
    compared = []
    for size, target, bound in zip(sizes, (7, 18), (5, 4), strict=True):
        append_rows, trinity_write, raw = (
            named(operation, size) for operation in ("append rows", "Trinity write", "raw write and sync")
        )
        compared += [
            Comparison(append_rows, append_rows, trinity_write, target=target),
            Comparison(append_rows, append_rows, raw, target=bound, bound=True),
            Comparison(named("append columns", size), named("append columns", size), trinity_write),
            Comparison(append_rows, append_rows, named("SQLite blobs", size)),
            Comparison(append_rows, append_rows, named("Parquet files", size)),
        ]
    for size in sizes:
        compared += [
            Comparison(f"{read}, batches of {size}", named(read, size), THEIR_READ, target=target)
            for read, target in (("mapped columns", 40), ("rows", 8))
        ]
        compared.append(Comparison(named("rows, every field", size), named("rows, every field", size), THEIR_ROWS))
    compared += [
        Comparison(f"lease 8 and ack, {kind}", f"lease 8 and ack, {kind}", THEIR_CLAIMS) for kind in kinds(postgres)
    ]
    compared += [
        Comparison(f"append 8, lease 8, {kind}", f"append 8, lease 8, {kind}", THEIR_QUEUE) for kind in kinds(postgres)
    ]
    return compared


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
        store = self.package.buffer.storage.sql.SQLExperienceStorage(
            self.config(storage_type="sql", path=f"sqlite:///{place.folder}/trinity.db", batch_size=8)
        )
        self.run(store.prepare())
        return place.hold(store, lambda: self.run(store.engine.dispose()))

    def queue(self, scratch: Path) -> Place:
        """A queue as it is by default: in memory, and each experience in a JSON file, which is not synced."""
        place = Place(scratch)
        store = self.package.buffer.storage.queue.QueueStorage(
            self.config(storage_type="queue", path=f"{place.folder}/trinity.jsonl", batch_size=8)
        )
        return place.hold(store, lambda: self.run(store.release()))

    def write(self, storage: Any, rows: Sequence[Any], size: int) -> None:
        async def work() -> None:
            for part in parts(rows, size):
                await storage.write(part)

        self.run(work())

    def claim(self, storage: Any, times: int) -> int:
        async def work() -> int:
            return sum([len(await storage.read(8)) for _ in range(times)])

        claimed: int = self.run(work())
        return claimed

    def put_and_get(self, queue: Any, rows: Sequence[Any]) -> int:
        make = self.experience

        async def work() -> int:
            received = 0
            for part in parts(rows, 8):
                await queue.put_batch(make.serialize_many(part))
                received += len(make.deserialize_many(await queue.get_batch(8, timeout=10)))
            return received

        received: int = self.run(work())
        return received


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


def appends(workload: Workload, trinity: Trinity, scratch: Path, size: int) -> list[Contender]:
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
            write_parquet(Experiences(part), path)
            for name, flags in ((path, os.O_RDONLY), (place.folder, os.O_RDONLY | os.O_DIRECTORY)):
                fd = os.open(name, flags)
                os.fsync(fd)
                os.close(fd)
        return state

    def write(state: tuple[Place, Any]) -> Any:
        trinity.write(state[0].held, state[1], size)
        return state

    return [
        Contender(named("append rows", size), append, with_rows(open_book, Experience)),
        Contender(named("append columns", size), append_columns, columns),
        Contender(named("Trinity write", size), write, with_rows(trinity.storage, trinity.experience)),
        Contender(named("raw write and sync", size), raw, lambda: Place(scratch)),
        Contender(named("SQLite blobs", size), blobs, database),
        Contender(named("Parquet files", size), parquet, with_rows(Place, Experience)),
    ]


def reads(workload: Workload, trinity: Trinity, scratch: Path, places: dict[str, Place]) -> list[Contender]:
    """Everything that reads all records back; the books and files lie ready, and in the page cache."""
    rows = workload.build(Experience)
    stored = places["Trinity"] = trinity.storage(scratch)
    trinity.write(stored.held, workload.build(trinity.experience), 64)
    files = places["Parquet"] = Place(scratch)
    write_parquet(Experiences(rows), files.folder / "all.parquet")
    uids = [row.eid.uid for row in rows]
    n = len(rows)

    def query() -> Any:
        return trinity.run(stored.held.query(0, n))

    def scan(book: Book) -> list[Any]:
        batches = list(book.where().scan(list(COLUMNS)))
        if sum(batch.num_rows for batch in batches) != n:
            raise AssertionError("not every record was scanned")
        return batches

    def claimed() -> Place:
        place = trinity.storage(scratch)
        trinity.write(place.held, workload.build(trinity.experience), 64)
        return place

    def claim(place: Place) -> Place:
        if trinity.claim(place.held, n // 8) != n:
            raise AssertionError("not every record was read")
        return place

    reading = [
        Contender(THEIR_READ, lambda _: query()),
        Contender(THEIR_ROWS, lambda _: touch(query())),
        Contender(THEIR_CLAIMS, claim, claimed),
        Contender("Parquet file read as rows", lambda _: read_parquet(files.folder / "all.parquet").rows()),
    ]
    for size in SIZES:
        book: Book = places.setdefault(f"book of {size}", filled(scratch, rows, size)).held
        reading += [
            Contender(named("mapped columns", size), lambda _, book=book: scan(book)),
            Contender(named("rows", size), lambda _, book=book: list(book.where())),
            Contender(named("one Experiences of all", size), lambda _, book=book: book.get(uids)),
            Contender(named("rows, every field", size), lambda _, book=book: touch(book.where())),
        ]
    check_same(workload, {f"a book of {size}": list(places[f"book of {size}"].held.where()) for size in SIZES})
    if len(query()) != n:
        raise AssertionError("Trinity did not give every record back")
    return reading


class Books:
    """Empty books of every kind, and a PostgreSQL server for as long as this lives, where one can be had."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.server: Any = None
        try:
            from tests.book.postgres import NoServer, Server
        except ImportError:  # the tests are not there, or psycopg is not
            return
        try:
            self.server = Server()
        except NoServer as error:
            print(f"no PostgreSQL: {error}", file=sys.stderr)

    def open(self, kind: str) -> Place:
        """A new book."""
        if kind == "folder":
            return open_book(self.scratch)
        place = Place(self.scratch)
        url = "memory:" if kind == "memory" else self.server.database()
        book = rollbook.open(url)
        place.hold(book, book.close)
        if kind == "PostgreSQL":
            place.closes.append(lambda: self.server.drop(url))
        return place

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()


def leases(workload: Workload, trinity: Trinity, scratch: Path, books: Books) -> list[Contender]:
    """Claims of 8 with what they hold, acknowledged; and the same right behind each append, as a queue is used."""

    def full(kind: str) -> Place:
        place = books.open(kind)
        for part in parts(workload.build(Experience), 64):
            place.held.append(part)
        return place

    def take(book: Book) -> int:
        with book.lease(8) as lease:
            lease.experiences.rows()
            return lease.ack(step=1)

    def drain(place: Place) -> Place:
        if sum(take(place.held) for _ in range(len(workload.rows) // 8)) != len(workload.rows):
            raise AssertionError("not every record was acknowledged")
        return place

    def queue(state: tuple[Place, Any]) -> Any:
        place, rows = state
        for part in parts(rows, 8):
            place.held.append(part)
            if take(place.held) != len(part):
                raise AssertionError("what was put was not got")
        return state

    def their_queue(state: tuple[Place, Any]) -> Any:
        if trinity.put_and_get(state[0].held, state[1]) != len(state[1]):
            raise AssertionError("what was put was not got")
        return state

    leasing = [
        Contender(THEIR_QUEUE, their_queue, lambda: (trinity.queue(scratch), workload.build(trinity.experience)))
    ]
    for kind in kinds(books.server is not None):
        leasing += [
            Contender(f"lease 8 and ack, {kind}", drain, lambda kind=kind: full(kind)),
            Contender(
                f"append 8, lease 8, {kind}",
                queue,
                lambda kind=kind: (books.open(kind), workload.build(Experience)),
            ),
        ]
    return leasing


# --- memory of a reader ---------------------------------------------------------------------------------------------

_READER = """
import sys, rollbook
book = rollbook.open(sys.argv[1], mode="r")
peak = 0
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
for batch in book.where().scan(["tokens", "reward"], rows=64):
    batch["tokens"].values.to_numpy(zero_copy_only=False).sum()
    peak = max(peak, anonymous())
print(peak / 1024)
"""


def reader_memory(workload: Workload, scratch: Path, sizes: Sequence[int] = (16, 64, 256)) -> dict[str, float]:
    """MB of memory of its own that a process reaches which scans a book, by the book's size in MB."""
    memory = {}
    for size in sizes:
        place = open_book(scratch)
        for i in range(size * 10**6 // workload.payload_bytes + 1):
            rows = workload.build(Experience)
            for row in rows:
                row.eid = row.eid.replace(batch=i)
            for part in parts(rows, 64):
                place.held.append(part)
        command = [sys.executable, "-c", _READER, str(place.folder / "book")]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        memory[f"MB of a reader of {size} MB"] = round(float(printed), 1)
    return memory


# --- a million records ----------------------------------------------------------------------------------------------

SAMPLERS = {"first": First(), "uniform": Uniform(), "proportional": Proportional("reward")}
STEPS = (10**4, 10**5, 10**6)
BATCH = 1000
"""Records of one step of the explorer."""
CALLS = 5


def uid(i: int) -> str:
    """The id of record `i`."""
    return f"{i // BATCH}/{i // 8}/{i % 8}/0/{i:x}"


def grow(book: Book, count: int) -> None:
    """Rows for records until there are `count`, as many appends would have left them, all at the place of the first."""
    from rollbook.book.consumer import all_consumers, save_consumer
    from rollbook.book.queue import Event, enter_rows, new_row, record_events, recount_all

    with book.ledger.write() as tx:
        have, last = tx.first("SELECT COUNT(*), MAX(seq) FROM records")
        listening = all_consumers(tx)
        columns = [row[1] for row in tx.all("PRAGMA table_info(records)")]
        pattern = dict(
            zip(columns, tx.first(f"SELECT {', '.join(columns)} FROM records WHERE seq = ?", (last,)), strict=True)
        )
        marks = ", ".join("?" * len(columns))
        for start in range(have, count, 10_000):
            numbers = range(start, min(start + 10_000, count))
            rows = []
            for i in numbers:
                row_columns = {
                    **pattern,
                    "seq": last - have + 1 + i,
                    "uid": uid(i),
                    "gid": f"{i // BATCH}/{i // 8}",
                    "batch": str(i // BATCH),
                    "task": str(i // 8),
                    "run": i % 8,
                    "suffix": f"{i:x}",
                    "reward": (i * 7919 % 997) / 997,
                }
                rows.append(tuple(row_columns.values()))
            tx.run_many(f"INSERT INTO records ({', '.join(columns)}) VALUES ({marks})", rows)
            record_events(tx, [Event("admitted", row[0]) for row in rows])
            reward = columns.index("reward")
            for consumer in listening:
                values = [None if consumer.settings.sampler.key is None else row[reward] for row in rows]
                gids = columns.index("gid")
                enter_rows(
                    tx,
                    consumer,
                    [
                        new_row(consumer, row[0], row[gids], None, value, None)
                        for row, value in zip(rows, values, strict=True)
                    ],
                )
        recount_all(tx)
        for consumer in listening:
            save_consumer(tx, consumer)


def million(options: Options) -> Report:
    """What a call takes on ledgers of ten thousand, a hundred thousand and a million waiting records.

    They lie in memory where the system has a folder there: a sync takes the same time whatever the size, and on a disk
    hardly anything else would be seen.
    """
    memory = Path("/dev/shm")
    quick = memory.is_dir() and shutil.disk_usage(memory).free > 4e9
    folder = memory if quick else options.scratch or peers.default_scratch()
    places = {size: open_book(folder) for size in STEPS}
    contenders = []
    for size, place in places.items():
        book: Book = place.held
        book.append([Experience(tokens=[1, 2, 3], reward=0.5, info={"model_version": 0})])
        for name, sampler in SAMPLERS.items():
            book.consumer(name, create=True, sampler=sampler)
        grow(book, size)
        print(f"{size:,} records", file=sys.stderr)
        contenders += [
            Contender(f"{operation}, {size:,} records", call) for operation, call in calls(book, size).items()
        ]
    times = harness.measure(contenders, options.rounds or 15, options.seed)
    results = []
    for operation in calls(places[STEPS[0]].held, STEPS[0]):
        smallest, largest = (f"{operation}, {size:,} records" for size in (STEPS[0], STEPS[-1]))
        # The logarithm of a hundred times as many is 1.5 times as large.
        compared = Comparison(f"{operation}: a million over ten thousand", largest, smallest, target=1.5, bound=True)
        results.append(times.compare(compared))
    ledger = places[STEPS[-1]].folder / "book" / "ledger.sqlite"
    facts = {
        "records": f"{STEPS[-1]:,}",
        "calls per timing": CALLS,
        "on": "an in-memory file system" if quick else "a disk",
        "MB of ledger": round(ledger.stat().st_size / 1e6),
    }
    return Report("The book: a million records", facts, times, results)


def calls(book: Book, size: int) -> dict[str, Callable[[Any], object]]:
    """What is asked of each ledger, several times in a row, each time of other records."""
    turn = itertools.count()

    def repeated(work: Callable[[int], object]) -> Callable[[Any], object]:
        return lambda _: [work(next(turn)) for _ in range(CALLS)]

    def lease(name: str) -> Callable[[int], object]:
        return lambda _: book.lease(8, consumer=name).ack(step=1)

    return {
        **{f"lease 8 and ack, {name}": repeated(lease(name)) for name in SAMPLERS},
        "records of a batch": repeated(lambda i: book.where(batch=i * 7 % (size // BATCH)).uids()),
        "history of a record": repeated(lambda i: book.history(uid(i * 7919 % (size - 10) + 1))),
        "counts": repeated(lambda _: book.counts()),
        "append of 8": repeated(lambda _: book.append([Experience(tokens=[1, 2, 3], reward=0.5) for _ in range(8)])),
    }


# --- the report -----------------------------------------------------------------------------------------------------


def run(options: Options) -> Report:
    """Check what is read back, then time it all."""
    rounds = options.rounds or ROUNDS
    scratch = options.scratch or peers.default_scratch()
    trinity = Trinity(options.scratch)
    workload = make_workload(min(options.n, N), options.seed)
    places: dict[str, Place] = {}
    books = Books(scratch)
    try:
        contenders = [contender for size in SIZES for contender in appends(workload, trinity, scratch, size)]
        contenders += reads(workload, trinity, scratch, places) + leases(workload, trinity, scratch, books)
        times = harness.measure(contenders, rounds, options.seed)
        memory = reader_memory(workload, scratch)
    finally:
        places.clear()
        books.close()
    n = len(workload.rows)
    rates = [
        *(named("append rows", size) for size in SIZES),
        *(f"lease 8 and ack, {kind}" for kind in kinds(bool(books.server))),
    ]
    facts = {
        "experiences": n,
        "rounds": rounds,
        "MB": round(workload.payload_bytes / 1e6, 1),
        **{f"records per second, {name},": round(n * 1e3 / times.median_ms(name)) for name in rates},
        **memory,
    }
    return Report("The book", facts, times, [times.compare(c) for c in comparisons(SIZES, books.server is not None)])


SECTIONS = {
    "scale": "The book: processes and batches beside a raw queue",
    "waiting": "The book: appends beside waiting consumers",
    "bounded": "The book: the longest wait for a lock",
}
RESULTS = Path(__file__).with_name("results") / "book.md"


def section(part: str, options: Options, quick: bool) -> str:
    """Measure a part that has a table of its own."""
    from benchmarks import book_bounded, book_scale

    if part == "bounded":
        return book_bounded.bounded(options.scratch, quick)
    measure = book_scale.scale if part == "scale" else book_scale.waiting
    return measure(options.scratch, options.rounds, options.seed)


def replaced(text: str, title: str, body: str) -> str:
    """Replace the section `title` of a Markdown page, or add it at the end."""
    section = f"## {title}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: section + "\n", text).rstrip() + "\n"
    return f"{text.rstrip()}\n\n{section}"


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", nargs="+", choices=("peers", "million", *SECTIONS), default=["peers"])
    parser.add_argument("--quick", action="store_true", help="a small book for the part `bounded`")
    parser.add_argument("--save", action="store_true", help="write the sections into results/book.md")
    chosen, sys.argv[1:] = parser.parse_known_args()
    options = harness.parse(__doc__)
    for part in (name for name in chosen.part if name in SECTIONS):
        harness.single_thread()
        body = section(part, options, chosen.quick)
        print(f"## {SECTIONS[part]}\n\n{body}", flush=True)
        if chosen.save:
            RESULTS.write_text(replaced(RESULTS.read_text(), SECTIONS[part], body))
    reports = {"peers": run, "million": million}
    if chosen_reports := [reports[name] for name in chosen.part if name in reports]:
        harness.main(*chosen_reports)


if __name__ == "__main__":
    main()
