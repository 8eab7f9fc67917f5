"""Records through the Ray book and the PostgreSQL book, beside the queues of Trinity-RFT and TransferQueue.

    python -m benchmarks.bench_ray                      # about six minutes; writes results/ray.md
    python -m benchmarks.bench_ray --rounds 1 --writers 1 2 --sizes 8 --out /tmp

1 to 8 writers append batches of the standard workload while one consumer reads them, 64 at a time. Writers and consumer
are Ray actors, the same for all contenders, in one local Ray instance with a bounded object store. A cell moves a fixed
number of records; its rate is from the start of the writers until the consumer has all of them. The cells of a round
are shuffled. Peers are installed into the scratch folder (`peers.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray

import rollbook
from benchmarks import harness, peers
from benchmarks.book_scale import cpu
from benchmarks.workload import Row, make_workload
from rollbook import Experience
from rollbook.core.wire import encode

ROOT = Path(__file__).resolve().parents[1]
WRITERS = (1, 2, 4, 8)
SIZES = (8, 64)
"""Records per append."""
RECORDS = {8: 1024, 64: 2048}
"""Records of a cell, by records per append."""
READ = 64
"""Records that the consumer takes at a time."""
STORE_BYTES = 1 << 30
SEED = 20_260
GRACE_SECONDS = 60.0
FIELDS = ("tokens", "logprobs", "advantages", "returns", "action_mask")


class Contender(Protocol):
    """One way to move records; an object of it lives in each writer and in the consumer."""

    def prepare(self, rows: Sequence[Row], names: Sequence[str], partition: str) -> list[Any]:
        """Return the batches to append, outside of the timed part; `names` has the `batch` of each one's ids."""

    def append(self, batch: Any, partition: str) -> None:
        """Hand over a batch; return when the contender has confirmed it."""

    def take(self, count: int, partition: str) -> int:
        """Receive `count` records, confirm them where that is possible, and return the number of their tokens."""


def with_batch(row: Row, name: str) -> Row:
    """Return a row with an id of its own."""
    return {**row, "eid": {**row["eid"], "batch": name}, "info": dict(row["info"])}


class BookContender:
    """A book: of Ray, or in a database."""

    def __init__(self, url: str) -> None:
        self.book = rollbook.open(url)

    def prepare(self, rows: Sequence[Row], names: Sequence[str], partition: str) -> list[Any]:
        size = len(rows) // len(names)
        return [
            [Experience(**with_batch(row, name)) for row in rows[at * size : (at + 1) * size]]
            for at, name in enumerate(names)
        ]

    def append(self, batch: Any, partition: str) -> None:
        if self.book.append(batch).admitted != len(batch):
            raise AssertionError("not every record was admitted")

    def take(self, count: int, partition: str) -> int:
        with self.book.lease(count, timeout=GRACE_SECONDS) as lease:
            records = lease.experiences
            tokens = int(records.token_lengths().sum())
            if lease.ack(step=1) != count:
                raise AssertionError("not every record was acknowledged")
        return tokens


class TrinityContender:
    """Trinity-RFT's queue, by its own writer and reader."""

    def __init__(self, path: str) -> None:
        peers.trinity_storage()
        from trinity.buffer.reader.queue_reader import QueueReader
        from trinity.buffer.writer.queue_writer import QueueWriter
        from trinity.common.config import StorageConfig
        from trinity.common.experience import Experience as TrinityExperience

        logging.disable(logging.WARNING)
        self.experience = TrinityExperience
        name = Path(path).stem
        config = StorageConfig(
            name=name, schema_type="experience", storage_type="queue", path=path, batch_size=READ, capacity=10**6
        )
        config.ray_namespace = "trinity"
        self.writer, self.reader = QueueWriter(config), QueueReader(config)
        self.loop = asyncio.new_event_loop()

    def prepare(self, rows: Sequence[Row], names: Sequence[str], partition: str) -> list[Any]:
        size = len(rows) // len(names)
        return [
            [self.experience(**with_batch(row, name)) for row in rows[at * size : (at + 1) * size]]
            for at, name in enumerate(names)
        ]

    def append(self, batch: Any, partition: str) -> None:
        self.loop.run_until_complete(self.writer.write(batch))

    def take(self, count: int, partition: str) -> int:
        return sum(len(row.tokens) for row in self.loop.run_until_complete(self.reader.read(count)))


class TransferQueueContender:
    """TransferQueue with its default storage."""

    def __init__(self) -> None:
        self.client = connect_transfer_queue().get_client()

    def prepare(self, rows: Sequence[Row], names: Sequence[str], partition: str) -> list[Any]:
        size = len(rows) // len(names)
        return [to_tensordict(rows[at * size : (at + 1) * size], name) for at, name in enumerate(names)]

    def append(self, batch: Any, partition: str) -> None:
        self.client.put(batch, partition_id=partition)

    def take(self, count: int, partition: str) -> int:
        names = [*FIELDS, "reward", "prompt_length", "prompt_text", "response_text", "eid", "info"]
        end = time.monotonic() + GRACE_SECONDS
        while True:
            meta = self.client.get_meta(names, count, partition, mode="fetch", task_name="train")
            if meta.size:
                break
            if time.monotonic() > end:
                raise AssertionError("not every record arrived")
            time.sleep(0.001)
        batch = self.client.get_data(meta)
        self.client.clear_samples(meta)
        return int(batch["tokens"].values().numel())


def connect_transfer_queue() -> Any:
    """Start TransferQueue, or connect to it."""
    package = peers.transfer_queue()
    logging.disable(logging.WARNING)
    from omegaconf import OmegaConf

    # Without polling, a request that comes too early blocks the controller for 5 s.
    package.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    return package


def to_tensordict(rows: Sequence[Row], name: str) -> Any:
    """Return rows in the form that TransferQueue takes."""
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    texts = ("prompt_text", "response_text", "eid", "info")
    renamed = [with_batch(row, name) for row in rows]
    columns: dict[str, Any] = {
        field: torch.nested.as_nested_tensor([row[field] for row in renamed], layout=torch.jagged) for field in FIELDS
    }
    for field in ("reward", "prompt_length"):
        columns[field] = torch.tensor([[row[field]] for row in renamed])
    for field in texts:
        columns[field] = NonTensorStack(*(NonTensorData(row[field]) for row in renamed))
    return TensorDict(columns, batch_size=len(rows))


class PutContender:
    """`ray.put`, and a mailbox that hands the references over: what Ray itself takes."""

    def __init__(self, mailbox: Any, encoded: bool) -> None:
        self.mailbox, self.encoded = mailbox, encoded

    def prepare(self, rows: Sequence[Row], names: Sequence[str], partition: str) -> list[Any]:
        size = len(rows) // len(names)
        parts = [[with_batch(row, name) for row in rows[at * size :][:size]] for at, name in enumerate(names)]
        if not self.encoded:
            return parts
        return [np.frombuffer(bytes(encode([Experience(**row) for row in part])), np.uint8) for part in parts]

    def append(self, batch: Any, partition: str) -> None:
        size = len(batch) if not self.encoded else int(partition.rpartition("-")[2])
        ray.get(self.mailbox.put.remote([ray.put(batch)], size, partition))

    def take(self, count: int, partition: str) -> int:
        tokens = taken = 0
        while taken < count:
            refs, sizes = ray.get(self.mailbox.take.remote(count - taken, partition))
            taken += sum(sizes)
            for batch in ray.get([ref for (ref,) in refs]):
                # The bytes are mapped, not read: that is all that a reader of the object store has to do.
                tokens += 0 if self.encoded else sum(len(row["tokens"]) for row in batch)
        return tokens


class Mailbox:
    """References that wait for a consumer."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Queue[Any]] = {}

    async def put(self, ref: list[Any], size: int, partition: str) -> None:
        await self.waiting.setdefault(partition, asyncio.Queue()).put((ref, size))

    async def take(self, count: int, partition: str) -> tuple[list[Any], list[int]]:
        queue = self.waiting.setdefault(partition, asyncio.Queue())
        entries = [await queue.get()]
        while not queue.empty() and sum(size for _, size in entries) < count:
            entries.append(queue.get_nowait())
        return [ref for ref, _ in entries], [size for _, size in entries]


class Subject(NamedTuple):
    """A row of the tables."""

    name: str
    make: Callable[[], Contender]
    durable: str
    delivery: str


class Timing(NamedTuple):
    """What an actor measured: moments by the machine's clock, and seconds per call."""

    end: float
    latencies: list[float]
    tokens: int = 0


class Actor:
    """A writer or the consumer: a process with a connection to every contender."""

    def __init__(self, contenders: Mapping[str, Callable[[], Contender]], records: int) -> None:
        harness.single_thread()
        self.contenders = {name: make() for name, make in contenders.items()}
        self.rows = make_workload(records, SEED).rows if records else []
        self.batches: list[Any] = []

    def prepare(self, name: str, first: int, count: int, size: int, partition: str) -> None:
        """Build `count` batches, from record `first` on."""
        names = [f"{partition}.{first + at * size}" for at in range(count)]
        self.batches = self.contenders[name].prepare(self.rows[first : first + count * size], names, partition)

    def write(self, name: str, start: float, partition: str) -> Timing:
        """Append the batches."""
        contender, latencies = self.contenders[name], []
        time.sleep(max(start - time.time(), 0.0))
        for batch in self.batches:
            begun = time.perf_counter()
            contender.append(batch, partition)
            latencies.append(time.perf_counter() - begun)
        end = time.time()
        self.batches = []
        return Timing(end, latencies)

    def read(self, name: str, start: float, records: int, partition: str) -> Timing:
        """Take all records."""
        contender, latencies, tokens = self.contenders[name], [], 0
        time.sleep(max(start - time.time(), 0.0))
        for _ in range(records // READ):
            begun = time.perf_counter()
            tokens += contender.take(READ, partition)
            latencies.append(time.perf_counter() - begun)
        return Timing(time.time(), latencies, tokens)


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        name: The contender.
        writers: Number of writers.
        size: Records per append.
        seconds: From the start until the consumer had all records.
        append_ms: Median time of an append.
        busy: Share of the processors in use, by any process.
    """

    name: str
    writers: int
    size: int
    seconds: float
    append_ms: float
    busy: float


def start_ray(**environment: Any) -> None:
    """Start a local Ray instance whose workers import this checkout; the arguments are its runtime environment."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ray.init(
        address="local",
        num_cpus=64,  # logical: every process of the benchmark may start
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=environment or None,
    )


@contextmanager
def cluster(scratch: Path) -> Iterator[list[Subject]]:
    """Start Ray, a PostgreSQL server, the books and the peers."""
    from tests.book.postgres import Server

    os.environ.setdefault("ROLLBOOK_BENCH_DIR", str(scratch))
    folder = Path(tempfile.mkdtemp(prefix="ray.", dir=scratch))
    packages = (peers.trinity_storage(), peers.transfer_queue())
    installed = [str(Path(package.__file__).parents[1]) for package in packages]

    def add_peers() -> None:  # runs in every worker, as their actors are unpickled there
        sys.path.extend(installed)

    start_ray(worker_process_setup_hook=add_peers)
    try:
        with Server(settings={"max_connections": "100"}) as server:
            url, served = server.database(), server.database()
            rollbook.open(url).close()
            rollbook.open("ray://folder", over=folder / "book")
            rollbook.open("ray://postgres", over=served)
            mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
            connect_transfer_queue()
            yield subjects(url, mailbox, folder)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def subjects(url: str, mailbox: Any, folder: Path) -> list[Subject]:
    """Return the contenders."""
    with_file, without_file = str(folder / "with-file.jsonl"), str(folder / "without-file")
    lost = "in memory, lost with the writer"
    leased = "lease and ack, at least once, exactly one ack"
    return [
        Subject("Ray book over a folder", lambda: BookContender("ray://folder"), "synced to disk", leased),
        Subject("Ray book over PostgreSQL", lambda: BookContender("ray://postgres"), "committed, synced", leased),
        Subject("PostgreSQL book", lambda: BookContender(url), "committed, synced", leased),
        Subject(
            "Trinity-RFT queue",
            lambda: TrinityContender(with_file),
            "in memory of an actor; also a JSON file, not synced and not read again",
            "removed when read, no ack",
        ),
        Subject(
            "Trinity-RFT queue, no file",
            lambda: TrinityContender(without_file),
            "in memory of an actor",
            "removed when read, no ack",
        ),
        Subject(
            "TransferQueue",
            TransferQueueContender,
            "in memory of two actors",
            "marked as consumed when asked for, no ack",
        ),
        Subject("ray.put of records", lambda: PutContender(mailbox, False), lost, "reference"),
        Subject("ray.put of bytes", lambda: PutContender(mailbox, True), lost, "reference"),
    ]


def measure(options: argparse.Namespace, scratch: Path) -> tuple[list[Cell], list[Subject], dict[int, float]]:
    """Run every cell in every round, after a warm-up round."""
    cells: list[Cell] = []
    order = random.Random(SEED)
    records = {size: RECORDS[size] for size in options.sizes}
    workload = make_workload(max(records.values()), SEED)
    megabytes = {size: make_workload(count, SEED).payload_bytes / 1e6 for size, count in records.items()}
    expected = {size: sum(len(row["tokens"]) for row in workload.rows[:count]) for size, count in records.items()}
    with cluster(scratch) as chosen:
        chosen = [subject for subject in chosen if not options.only or subject.name in options.only]
        makers = {subject.name: subject.make for subject in chosen}
        actor = ray.remote(Actor).options(num_cpus=0)
        writers = [actor.remote(makers, max(records.values())) for _ in range(max(options.writers))]
        consumer = actor.remote(makers, 0)
        for turn in range(-1, options.rounds):
            keys = list(itertools.product(options.sizes, options.writers, makers))
            order.shuffle(keys)
            for size, count, name in keys:
                partition = f"r{turn + 1}-w{count}-{name.replace(' ', '')}-{size}"
                used, share = writers[:count], records[size] // count
                ray.get(
                    [
                        writer.prepare.remote(name, at * share, share // size, size, partition)
                        for at, writer in enumerate(used)
                    ]
                )
                start, before = time.time() + 0.05, cpu()
                waits = [writer.write.remote(name, start, partition) for writer in used]
                read: Timing = ray.get(consumer.read.remote(name, start, records[size], partition))
                after = cpu()
                latencies = [seconds for timing in ray.get(waits) for seconds in timing.latencies]
                if read.tokens not in (0, expected[size]):
                    raise AssertionError(f"{name}: got {read.tokens} tokens, expected {expected[size]}")
                if turn >= 0:
                    busy = (after[0] - before[0]) / max(after[1] - before[1], 1.0)
                    seconds = read.end - start
                    cells.append(Cell(name, count, size, seconds, statistics.median(latencies) * 1e3, busy))
            print(f"round {turn + 1}/{options.rounds}" if turn >= 0 else "warm-up", file=sys.stderr)
    return cells, chosen, megabytes


def report(
    cells: Sequence[Cell], chosen: Sequence[Subject], megabytes: Mapping[int, float], options: argparse.Namespace
) -> str:
    """Return the page."""
    counts = ", ".join(f"{RECORDS[size]:,} records per cell in appends of {size}" for size in options.sizes)
    text = [
        "# Records through Ray",
        "",
        f"`python -m benchmarks.bench_ray --rounds {options.rounds}`: writers append batches of the standard workload "
        f"(mean {megabytes[options.sizes[0]] / RECORDS[options.sizes[0]] * 1e3:.0f} kB per record: tokens, log-probs, "
        f"advantages, returns, mask, texts, info) while one consumer reads them {READ} at a time. Writers and consumer "
        f"are Ray actors in one local Ray {ray.__version__} with an object store of {STORE_BYTES >> 20} MiB, on "
        f"{os.cpu_count()} cores. {counts}; the rate is from the start of the writers until the consumer "
        f"has all records. Median of {options.rounds} interleaved rounds (range). p50: median time of an append.",
        "",
        "| contender | a confirmed append is | reading |",
        "|---|---|---|",
        *(f"| {subject.name} | {subject.durable} | {subject.delivery} |" for subject in chosen),
        "",
        f"Trinity-RFT {peers.TRINITY_VERSION} and TransferQueue {peers.TRANSFER_QUEUE_VERSION} are as released. "
        "Trinity-RFT takes and returns lists of its `Experience`; the book takes lists of `Experience` and returns "
        "columns. TransferQueue takes and returns a `TensorDict`, which is built before the clock starts; the consumer "
        "polls every millisecond and clears what it has read. `ray.put of records` pickles lists of dicts of tensors; "
        "`ray.put of bytes` moves an encoded frame that nobody decodes, and is the bound.",
        "",
    ]
    titles = [f"records/s, {count} writer{'s' if count > 1 else ''}" for count in options.writers]
    titles += [f"MB/s, {count}" for count in options.writers]
    titles.append(f"p50 ms, {' / '.join(map(str, options.writers))}")
    for size in options.sizes:
        text += [f"## Appends of {size}", "", f"| contender | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
        for subject in chosen:
            groups = [
                [cell for cell in cells if (cell.name, cell.writers, cell.size) == (subject.name, count, size)]
                for count in options.writers
            ]
            rates = [[RECORDS[size] / cell.seconds for cell in group] for group in groups]
            columns = [f"{statistics.median(rate):,.0f} ({min(rate):,.0f}-{max(rate):,.0f})" for rate in rates]
            columns += [f"{statistics.median(rate) * megabytes[size] / RECORDS[size]:,.0f}" for rate in rates]
            columns.append(" / ".join(f"{statistics.median(cell.append_ms for cell in group):.1f}" for group in groups))
            text.append(f"| {subject.name} | {' | '.join(columns)} |")
        text.append("")
    busy = statistics.median(cell.busy for cell in cells)
    text.append(f"The processors were {busy:.0%} in use in the median cell, by the benchmark and all other processes.")
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--writers", type=int, nargs="+", default=list(WRITERS))
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="+", default=[], help="names of contenders")
    parser.add_argument("--scratch", type=Path, default=None, help="where peers are installed (.bench)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    harness.single_thread()
    scratch = options.scratch or peers.default_scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    cells, chosen, megabytes = measure(options, scratch)
    results = {"environment": harness.environment(), "cells": [vars(cell) for cell in cells]}
    (options.out / "ray.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(cells, chosen, megabytes, options)
    (options.out / "ray.md").write_text(text)
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    # As a module of its own name, so that Ray's workers can import what they unpickle.
    from benchmarks.bench_ray import main as run

    sys.exit(run())
