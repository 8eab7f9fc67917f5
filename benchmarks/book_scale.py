"""The book beside a plain PostgreSQL queue, by processes and batch size, and appends beside waiting consumers.

All of it runs on one machine: the queue and the book's PostgreSQL backend on one server with fsync on, the folder on
the scratch disk. Each cell runs for a fixed time in each round; the cells of a round are shuffled. Ratios are taken
within a round.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rollbook
from benchmarks import peers, raw_queue
from rollbook import Experience
from rollbook.core.wire import encode

PROCESSES = (1, 4, 8, 16)
BATCHES = (8, 64)
KINDS = ("raw queue", "folder", "PostgreSQL")
OPERATIONS = ("append", "lease + ack")
SECONDS = 0.5
"""How long a cell runs in a round."""
ROUNDS = 3
TOKENS = 100
"""Tokens of a record, half of them with log-probs: small records show the cost of a call."""
MOST_CALLS = {8: 1600, 64: 500}
"""Calls per second, of all processes together, that records are built for, unless the warm-up was slower."""
RATIO = {1: 0.5}
"""The least part of the raw queue's rate, by number of processes; 0.3 for those not named."""
MOST_P99 = 250.0
"""Milliseconds of the slowest call but one percent, at 16 processes."""
WAITERS = 32
LEAST_BESIDE = 0.8
"""The least part of the append rate that is left beside the waiting consumers."""


def build(batch: str, count: int, tokens: int) -> list[Experience]:
    """Build the records of one append: groups of 8 runs."""
    ids = np.arange(tokens, dtype=np.int32)
    logprobs = np.full(tokens - tokens // 2, -0.5, dtype=np.float32)
    return [
        Experience(
            eid={"batch": batch, "task": i // 8, "run": i % 8, "step": 0, "suffix": ""},
            tokens=ids + i,
            prompt_length=tokens // 2,
            logprobs=logprobs * (i + 1),
            reward=float(i % 2),
            group_size=8,
            info={"model_version": 0, "temperature": 1.0},
        )
        for i in range(count)
    ]


# --- what a process does ----------------------------------------------------------------------------------------------


class RawWorker:
    """Calls of the raw queue over one connection."""

    def __init__(self, url: str, name: str, tokens: int) -> None:
        import psycopg

        self.connection = psycopg.connect(url, autocommit=True)
        self.name = name
        self.tokens = tokens
        self.fences = itertools.count(int(name.rpartition("-")[2]) << 32)
        self.bodies: dict[int, list[bytes]] = {}

    def rows(self, batch: str, count: int) -> Any:
        """Build rows with as many bytes as the book's frame of the same records."""
        if count not in self.bodies:
            frame = bytes(encode(build(batch, count, self.tokens)))
            size = len(frame) // count
            self.bodies[count] = [frame[i * size : (i + 1) * size] for i in range(count)]
        return [(f"{batch}/{i}", body) for i, body in enumerate(self.bodies[count])]

    def append(self, rows: Any) -> None:
        raw_queue.append(self.connection, rows)

    def take(self, count: int) -> int:
        fence = next(self.fences)
        claimed = raw_queue.lease(self.connection, count, fence)
        if claimed and raw_queue.ack(self.connection, [row[0] for row in claimed], fence) != len(claimed):
            raise AssertionError("a claim was lost")
        return len(claimed)


class BookWorker:
    """The same calls of a book."""

    def __init__(self, url: str, name: str, tokens: int) -> None:
        self.book = rollbook.open(url)
        self.name = name
        self.tokens = tokens

    def rows(self, batch: str, count: int) -> Any:
        return build(batch, count, self.tokens)

    def append(self, rows: Any) -> None:
        if self.book.append(rows).admitted != len(rows):
            raise AssertionError("not every record was admitted")

    def take(self, count: int) -> int:
        lease = self.book.lease(count)
        if lease and (len(lease.experiences) != len(lease) or lease.ack(step=1) != len(lease)):
            raise AssertionError("a lease was lost")
        return len(lease)


class Order(NamedTuple):
    """One cell's work, as it is sent to a process."""

    operation: str
    batch: int
    calls: int
    """At most so many."""
    seconds: float
    round: str


class Timing(NamedTuple):
    """What a process measured: the moments of its start and its last success, and the seconds of each call."""

    start: float
    end: float
    latencies: list[float]


def serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Run orders until killed: prepare, say so, wait for the moment to start, work, send the timing."""
    worker = make()
    pipe.send("open")
    while True:
        order: Order = pipe.recv()
        appends = order.operation == "append"
        names = [f"{worker.name}.{order.round}.{i}" for i in range(order.calls if appends else 0)]
        prepared = [worker.rows(name, order.batch) for name in names]
        pipe.send("ready")
        start = float(pipe.recv())
        time.sleep(max(start - time.monotonic(), 0.0))
        latencies: list[float] = []
        end = begun = time.monotonic()
        for i in range(order.calls):
            if begun > start + order.seconds:
                break
            if appends:
                worker.append(prepared[i])
            elif worker.take(order.batch) < order.batch:
                break
            end = time.monotonic()
            latencies.append(end - begun)
            begun = end
        pipe.send(Timing(start, end, latencies))


class Crew:
    """Processes that work on one queue or book."""

    def __init__(self, kind: str, url: str, tokens: int) -> None:
        context = multiprocessing.get_context("fork")
        make = RawWorker if kind == "raw queue" else BookWorker
        self.pipes: list[Connection] = []
        self.processes = []
        for i in range(max(PROCESSES)):
            own_end, child_end = context.Pipe()
            name = f"{kind[:1]}-{i}"
            process = context.Process(
                target=serve, args=(child_end, lambda name=name: make(url, name, tokens)), daemon=True
            )
            process.start()
            child_end.close()
            self.pipes.append(own_end)
            self.processes.append(process)
        for pipe in self.pipes:
            _answer(pipe, "open")

    def work(self, count: int, order: Order) -> tuple[list[Timing], float]:
        """Have the first `count` processes carry out an order at the same time; also how busy the processors were."""
        used = self.pipes[:count]
        for pipe in used:
            pipe.send(order)
        for pipe in used:
            _answer(pipe, "ready")
        start = time.monotonic() + 0.02
        for pipe in used:
            pipe.send(start)
        before = cpu()
        timings = [pipe.recv() for pipe in used]
        after = cpu()
        return timings, (after[0] - before[0]) / max(after[1] - before[1], 1.0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, expected: str) -> None:
    answer = pipe.recv()
    if answer != expected:
        raise AssertionError(f"a process answered {answer!r}, expected {expected!r}")


@contextmanager
def crews(scratch: Path, tokens: int) -> Iterator[dict[str, Crew]]:
    """Start a server, a raw queue, a book of each kind, and the processes of each."""
    import psycopg

    from tests.book.postgres import Server

    folder = Path(tempfile.mkdtemp(prefix="scale.", dir=scratch))
    with Server(settings={"max_connections": "200"}) as server:
        urls = {"raw queue": server.database(), "folder": str(folder / "book"), "PostgreSQL": server.database()}
        with psycopg.connect(urls["raw queue"], autocommit=True) as connection:
            connection.execute(raw_queue.SCHEMA)  # type: ignore[arg-type]
        for kind in KINDS[1:]:
            rollbook.open(urls[kind]).close()
        started = {kind: Crew(kind, urls[kind], tokens) for kind in KINDS}
        try:
            yield started
        finally:
            for crew in started.values():
                crew.close()
            shutil.rmtree(folder)


# --- the table --------------------------------------------------------------------------------------------------------


def rate(timings: Sequence[Timing]) -> float:
    """Calls per second of all processes together."""
    return sum(len(timing.latencies) / (timing.end - timing.start) for timing in timings if timing.latencies)


@dataclass
class Cell:
    """What one operation of one kind reached, by round."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    warm: float = float("inf")
    """The rate of the warm-up."""

    def add(self, timings: Sequence[Timing], busy: float) -> None:
        self.rates.append(rate(timings))
        for timing in timings:
            self.latencies += timing.latencies
        self.busy.append(busy)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def percentile(self, percent: float) -> float:
        """Milliseconds that so many percent of the calls took at most."""
        return float(np.percentile(self.latencies, percent)) * 1e3 if self.latencies else float("nan")


Key = tuple[str, int, int, str]
"""Operation, batch, processes, kind."""


def cpu() -> tuple[float, float]:
    """Seconds that the machine's processors were busy, and all their seconds, since it started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def measure(scratch: Path, rounds: int, seconds: float, tokens: int, seed: int) -> dict[Key, Cell]:
    """Run every cell in every round, after a short warm-up round."""
    cells = {
        (operation, batch, count, kind): Cell()
        for operation in OPERATIONS
        for batch in BATCHES
        for count in PROCESSES
        for kind in KINDS
    }
    chance = random.Random(seed)
    with crews(scratch, tokens) as started:
        for turn in range(-1, rounds):
            lasts = seconds if turn >= 0 else seconds / 5
            configurations = list(itertools.product(BATCHES, PROCESSES))
            chance.shuffle(configurations)
            for batch, count in configurations:
                kinds = list(KINDS)
                chance.shuffle(kinds)
                # What was appended is leased next; a claim that comes up short ends the cell.
                for operation, kind in itertools.product(OPERATIONS, kinds):
                    key = operation, batch, count, kind
                    expected = min(2 * cells[key].warm, MOST_CALLS[batch])
                    calls = int(expected * lasts / count) + 4
                    order = Order(operation, batch, calls, lasts, f"{turn}.{count}.{batch}")
                    timings, busy = started[kind].work(count, order)
                    if turn >= 0:
                        cells[key].add(timings, busy)
                    else:
                        cells[key].warm = rate(timings)
            print(f"round {turn + 1}/{rounds}" if turn >= 0 else "warm-up", file=sys.stderr)
    return cells


def table(cells: dict[Key, Cell]) -> str:
    """The cells as Markdown tables, with the ratio to the raw queue and its target."""
    lines: list[str] = []
    for operation, batch in itertools.product(OPERATIONS, BATCHES):
        lines += [
            f"### {operation}, batches of {batch}\n",
            "| processes | backend | calls/s | of the raw queue | target | | p50 ms | p99 ms | target | | CPU |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for count, kind in itertools.product(PROCESSES, KINDS):
            cell, raw = cells[operation, batch, count, kind], cells[operation, batch, count, KINDS[0]]
            ratio, target, verdict = "-", "-", "-"
            if kind != KINDS[0]:
                part = statistics.median(a / b for a, b in zip(cell.rates, raw.rates, strict=True))
                least = RATIO.get(count, 0.3)
                ratio, target, verdict = f"{part:.2f}", f"at least {least}", "met" if part >= least else "MISSED"
            slowest = cell.percentile(99)
            late, met = "-", "-"
            if kind != KINDS[0] and count == max(PROCESSES):
                late, met = f"at most {MOST_P99:g}", "met" if slowest <= MOST_P99 else "MISSED"
            lines.append(
                f"| {count} | {kind} | {cell.rate:,.0f} | {ratio} | {target} | {verdict} | {cell.percentile(50):.1f} "
                f"| {slowest:.1f} | {late} | {met} | {statistics.median(cell.busy):.0%} |"
            )
        lines.append("")
    return "\n".join(lines)


def scale(scratch: Path | None, rounds: int | None, seed: int, tokens: int = TOKENS) -> str:
    """Measure the table of processes, batches and backends; its section of the report."""
    place = scratch or peers.default_scratch()
    place.mkdir(parents=True, exist_ok=True)
    cells = measure(place, rounds or ROUNDS, SECONDS, tokens, seed)
    size = len(bytes(encode(build("x", 8, tokens)))) // 8
    return (
        f"Records of {tokens} tokens ({size:,} bytes each in a frame of 8), {rounds or ROUNDS} rounds of {SECONDS:g} s "
        f"per cell, {os.cpu_count()} processors. CPU: share of all processors in use, by any process. "
        "Rates are medians of the rounds, ratios medians of the ratios within a round.\n\n" + table(cells)
    )


# --- waiting consumers ------------------------------------------------------------------------------------------------


def _append_for(url: str, seconds: float, waiters: int, tokens: int) -> float:
    """Appends per second of one process while others wait for more records than will come."""
    context = multiprocessing.get_context("fork")
    with rollbook.open(url) as book:
        prepared = [build(f"w{i}", 8, tokens) for i in range(int(MOST_CALLS[8] * seconds))]
        entered = context.Semaphore(0)
        processes = [context.Process(target=_wait, args=(url, entered), daemon=True) for _ in range(waiters)]
        for process in processes:
            process.start()
        for _ in processes:
            entered.acquire()
        time.sleep(0.3)
        start = time.monotonic()
        count = 0
        for rows in prepared:
            if time.monotonic() > start + seconds:
                break
            book.append(rows)
            count += 1
        rate = count / (time.monotonic() - start)
        for process in processes:
            process.kill()
            process.join()
    return rate


def _wait(url: str, entered: Any) -> None:
    with rollbook.open(url) as book:
        entered.release()
        book.lease(10**6, timeout=600.0)


def waiting(scratch: Path | None, rounds: int | None, seed: int, seconds: float = 2.0) -> str:
    """Measure appends without and beside waiting consumers; the section of the report."""
    from tests.book.postgres import Server

    place = scratch or peers.default_scratch()
    place.mkdir(parents=True, exist_ok=True)
    rates: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in KINDS[1:] for n in (0, WAITERS)}
    order = random.Random(seed)
    with Server(settings={"max_connections": "200"}) as server:
        for turn in range(rounds or ROUNDS):
            cells = list(rates)
            order.shuffle(cells)
            for kind, waiters in cells:
                folder = tempfile.mkdtemp(prefix="waiting.", dir=place)
                url = f"{folder}/book" if kind == "folder" else server.database()
                rates[kind, waiters].append(_append_for(url, seconds, waiters, TOKENS))
                shutil.rmtree(folder)
            print(f"round {turn + 1}/{rounds or ROUNDS}", file=sys.stderr)
    lines = [
        f"One process appends batches of 8 while {WAITERS} processes wait in `lease` for more than there is.\n",
        "| backend | appends/s alone | beside the waiting | ratio | spread | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS[1:]:
        alone, beside = rates[kind, 0], rates[kind, WAITERS]
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        ratio = statistics.median(ratios)
        lines.append(
            f"| {kind} | {statistics.median(alone):,.0f} | {statistics.median(beside):,.0f} | {ratio:.2f} "
            f"| {min(ratios):.2f}-{max(ratios):.2f} | at least {LEAST_BESIDE} "
            f"| {'met' if ratio >= LEAST_BESIDE else 'MISSED'} |"
        )
    return "\n".join(lines) + "\n"
