"""How many rollout workers a book can serve: rates of what workers and trainer ask of it, and what saturates first.

    python -m benchmarks.bench_capacity                 # about four minutes; writes results/capacity.md
    python -m benchmarks.bench_capacity --rounds 1 --seconds 0.5 --out /tmp

Each operation is called for a fixed time by 1 and by 8 processes at once, on a book in a folder, in PostgreSQL, and in
PostgreSQL served by a Ray actor. The operations of a round are shuffled. The demand of 100 and 1,000 workers is
arithmetic on the assumptions in `Load`; divided by the measured rate it gives the share of the book that is used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

import rollbook
from benchmarks import harness, peers
from benchmarks.bench_ray import start_ray
from benchmarks.book_scale import cpu
from rollbook import Experience
from rollbook.book.book import Book
from rollbook.book.ray import RayBook
from rollbook.book.rollouts import (
    claim_rollouts,
    fetch_weights,
    finish_claims,
    groups_in_book,
    open_rollouts,
    publish_weights,
    renew_claims,
    report_worker,
    set_limit,
    weights_version,
)

KINDS = ("folder", "PostgreSQL", "Ray over PostgreSQL")
PROCESSES = (1, 8)
GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 128, 512
LEASED_GROUPS = 16
WEIGHTS_BYTES = 64 << 20
WORKER_THREADS = 3
"""Threads of a rollout worker that call the book."""
SINGLE = ("lease and ack", "publish")
"""Operations of the trainer, which is one process."""


@dataclass(frozen=True)
class Load:
    """What a number of workers asks of a book, per second.

    Args:
        workers: Number of rollout workers.
        group_seconds: Seconds in which a worker generates a group.
        step_seconds: Seconds of a training step, which has all groups of that time.
        beat_seconds: Seconds between two heartbeats of a worker (renew claims, report).
        poll_seconds: Seconds between two looks for new weights, in mode `async`.
        workers_per_node: Workers that share the object store of a node.
    """

    workers: int
    group_seconds: float = 20.0
    step_seconds: float = 60.0
    beat_seconds: float = 2.0
    poll_seconds: float = 1.2  # as a worker does for steps of a minute
    workers_per_node: int = 8

    @property
    def groups(self) -> float:
        return self.workers / self.group_seconds

    def calls(self) -> dict[str, float]:
        """Return calls per second by operation."""
        return {
            "claim and finish": self.groups,
            "append": self.groups,
            "heartbeat": self.workers / self.beat_seconds,
            "weights version": self.workers / self.poll_seconds,
            "lease and ack": self.groups / LEASED_GROUPS,
        }

    def fetched(self, gigabytes: float, nodes: bool = False) -> float:
        """Return gigabytes per second of weights that workers, or nodes, fetch after every step."""
        readers = self.workers / self.workers_per_node if nodes else self.workers
        return readers * gigabytes / self.step_seconds


def build(batch: str) -> list[Experience]:
    """Build the records of a group."""
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    return [
        Experience(
            eid={"batch": batch, "task": 0, "run": run, "step": 0, "suffix": ""},
            tokens=np.arange(tokens, dtype=np.int32) + run,
            prompt_length=PROMPT_TOKENS,
            logprobs=np.full(RESPONSE_TOKENS, -0.5, dtype=np.float32) * (run + 1),
            policy_versions=np.zeros(RESPONSE_TOKENS, dtype=np.int32),
            reward=float(run % 2),
            group_size=GROUP_SIZE,
            info={"rollout": {"worker": batch, "number": 0, "seconds": 20.0}},
        )
        for run in range(GROUP_SIZE)
    ]


class Client:
    """A process that calls the books."""

    def __init__(self, urls: Mapping[str, str], name: str) -> None:
        harness.single_thread()
        self.books, self.name, self.turn = {kind: rollbook.open(url) for kind, url in urls.items()}, name, 0
        self.claims: dict[str, list[Any]] = {}

    def call(self, kind: str, operation: str, seconds: float) -> tuple[int, float]:
        """Call an operation until the time is over; return the number of calls and the seconds."""
        book = self.books[kind]
        function: Callable[[], bool] = partial(OPERATIONS[operation], self, book)
        if operation == "append":
            self.turn += 1
            groups = [build(f"{self.name}.{self.turn}.{i}") for i in range(int(400 * seconds))]
            function = iter_append(book, groups)
        elif operation == "heartbeat":
            if kind not in self.claims:
                self.claims[kind] = claim_rollouts(book, self.name, 1, seconds=3600.0)
            function = partial(self.send_heartbeat, book, self.claims[kind])
        elif operation == "publish":
            function = partial(self.publish, book, {"weights": os.urandom(1 << 20) * (WEIGHTS_BYTES >> 20)})
        start = time.perf_counter()
        calls = 0
        while time.perf_counter() < start + seconds and function():
            calls += 1
        return calls, time.perf_counter() - start

    def use_threads(self, kind: str) -> None:
        """Call a book from as many threads as a worker has, which may open further connections."""
        end = time.monotonic() + 1.0

        def read(_: int) -> None:
            while time.monotonic() < end:
                self.read_version(self.books[kind])

        with ThreadPoolExecutor(WORKER_THREADS) as pool:
            list(pool.map(read, range(WORKER_THREADS)))

    def claim_and_finish(self, book: Book) -> bool:
        claims = claim_rollouts(book, self.name, 1, seconds=60.0)
        groups_in_book(book, [f"{self.name}/0"])
        renew_claims(book, claims, 60.0)
        return finish_claims(book, claims) == 1

    def send_heartbeat(self, book: Book, claims: Sequence[Any] = ()) -> bool:
        report_worker(book, self.name, role="rollout", host="node", pid=1, state="generating", version=1)
        return len(renew_claims(book, claims, 3600.0)) == len(claims)

    def read_version(self, book: Book) -> bool:
        version = book.weights_version() if isinstance(book, RayBook) else weights_version(book)
        return version is not None

    def lease_and_ack(self, book: Book) -> bool:
        with book.lease(LEASED_GROUPS, by="group") as lease:
            return bool(lease) and len(lease.experiences) == lease.ack(step=1)

    def publish(self, book: Book, files: Mapping[str, bytes]) -> bool:
        if isinstance(book, RayBook):
            book.put_weights(f"{time.time_ns():016x}", 1, files, {})
        else:
            publish_weights(book, 1, files, {})
        return True

    def fetch(self, book: Book) -> bool:
        if isinstance(book, RayBook):
            weights = book.get_weights()
            # A copy, as a model makes one; the array itself is a view of the object store.
            return weights is not None and len(bytes(weights[2]["weights"])) == WEIGHTS_BYTES
        return len(fetch_weights(book).files["weights"]) == WEIGHTS_BYTES


OPERATIONS: dict[str, Callable[..., Any]] = {
    "claim and finish": Client.claim_and_finish,
    "append": Book.append,
    "heartbeat": Client.send_heartbeat,
    "weights version": Client.read_version,
    "lease and ack": Client.lease_and_ack,
    "publish": Client.publish,
    "fetch": Client.fetch,
}


def iter_append(book: Any, groups: Sequence[Sequence[Experience]]) -> Callable[[], bool]:
    """Return a function that appends one group after the other."""
    left = iter(groups)

    def append() -> bool:
        group = next(left, None)
        return group is not None and book.append(group).admitted == len(group)

    return append


@contextmanager
def books(scratch: Path) -> Iterator[tuple[dict[str, str], Callable[[], int]]]:
    """Start Ray, a PostgreSQL server and a book of each kind; also count the connections of the server."""
    import psycopg

    from tests.book.postgres import Server

    folder = Path(tempfile.mkdtemp(prefix="capacity.", dir=scratch))
    start_ray()
    try:
        with Server(settings={"max_connections": "100"}) as server:
            url, served = server.database(), server.database()
            urls = {"folder": str(folder / "book"), "PostgreSQL": url, "Ray over PostgreSQL": "ray://capacity"}
            opened = [
                rollbook.open(urls["folder"]),
                rollbook.open(url),
                rollbook.open(urls["Ray over PostgreSQL"], over=served),
            ]
            for book in opened:
                open_rollouts(book, {}, next=0)
                set_limit(book, 10**9)
                book.close()

            def connections() -> int:
                with psycopg.connect(url, autocommit=True) as connection:
                    row = connection.execute(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                    ).fetchone()
                return int(row[0]) if row else 0

            yield urls, connections
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Cell:
    """Calls per second of all processes together."""

    kind: str
    operation: str
    processes: int
    rate: float
    busy: float


def measure(options: argparse.Namespace, scratch: Path) -> tuple[list[Cell], float]:
    """Run every cell in every round, after a short warm-up; also return the connections per PostgreSQL client."""
    cells: list[Cell] = []
    order = random.Random(0)
    with books(scratch) as (urls, connections):
        actor = ray.remote(Client).options(num_cpus=0)
        clients = [actor.remote(urls, f"worker-{i}") for i in range(max(PROCESSES))]
        for turn in range(-1, options.rounds):
            for kind in order.sample(KINDS, len(KINDS)):
                # Weights must be there before they are fetched, and records before they are leased.
                for operation in ("publish", "append", *OPERATIONS):
                    for count in (1,) if operation in SINGLE else PROCESSES:
                        seconds = options.seconds if turn >= 0 else options.seconds / 4
                        before = cpu()
                        results = ray.get([client.call.remote(kind, operation, seconds) for client in clients[:count]])
                        after = cpu()
                        rate = sum(calls / spent for calls, spent in results)
                        busy = (after[0] - before[0]) / max(after[1] - before[1], 1.0)
                        if turn >= 0:
                            cells.append(Cell(kind, operation, count, rate, busy))
            print(f"round {turn + 1}/{options.rounds}" if turn >= 0 else "warm-up", file=sys.stderr)
        ray.get([client.use_threads.remote("PostgreSQL") for client in clients])
        per_client = connections() / max(PROCESSES)
    return cells, per_client


def best_rate(cells: Sequence[Cell], kind: str, operation: str) -> float:
    """Return the rate that a book reaches, by one process or by several: the higher median."""
    by_count: dict[int, list[float]] = {}
    for cell in cells:
        if (cell.kind, cell.operation) == (kind, operation):
            by_count.setdefault(cell.processes, []).append(cell.rate)
    return max(statistics.median(rates) for rates in by_count.values())


def describe_rates(cells: Sequence[Cell]) -> list[str]:
    """Return the table of measured rates."""
    text = ["| operation | processes | " + " | ".join(KINDS) + " |", f"|---|---|{'---|' * len(KINDS)}"]
    for operation in OPERATIONS:
        for count in (1,) if operation in SINGLE else PROCESSES:
            columns = []
            for kind in KINDS:
                rates = [
                    cell.rate
                    for cell in cells
                    if (cell.kind, cell.operation, cell.processes) == (kind, operation, count)
                ]
                if operation in ("publish", "fetch"):
                    rates = [rate * WEIGHTS_BYTES / 1e6 for rate in rates]
                unit = " MB/s" if operation in ("publish", "fetch") else "/s"
                columns.append(f"{statistics.median(rates):,.0f}{unit} ({min(rates):,.0f}-{max(rates):,.0f})")
            text.append(f"| {operation} | {count} | {' | '.join(columns)} |")
    return text


def describe_load(cells: Sequence[Cell], load: Load, per_client: float) -> list[str]:
    """Return the table of one number of workers: demand, and its share of what was measured."""
    text = [
        f"### {load.workers:,} workers",
        "",
        "| asked of the book | per second | " + " | ".join(f"share of {kind}" for kind in KINDS) + " |",
        f"|---|---|{'---|' * len(KINDS)}",
    ]
    totals = dict.fromkeys(KINDS, 0.0)
    for operation, calls in load.calls().items():
        shares = {kind: calls / best_rate(cells, kind, operation) for kind in KINDS}
        totals = {kind: totals[kind] + share for kind, share in shares.items()}
        text.append(f"| {operation} | {calls:,.1f} | {' | '.join(f'{share:.0%}' for share in shares.values())} |")
    text.append(f"| **all of these** | | {' | '.join(f'**{total:.0%}**' for total in totals.values())} |")
    for gigabytes in (1.0, 15.0):
        columns = []
        for kind in KINDS:
            rate = best_rate(cells, kind, "fetch") * WEIGHTS_BYTES / 1e9
            if kind.startswith("Ray"):
                per_node = gigabytes / load.step_seconds
                columns.append(f"{load.fetched(gigabytes, nodes=True):,.1f} GB/s in all, {per_node:.2f} per node")
            else:
                columns.append(f"{load.fetched(gigabytes) / rate:.0%}")
        text.append(
            f"| weights of {gigabytes:g} GB after every step | {load.fetched(gigabytes):,.1f} GB | "
            f"{' | '.join(columns)} |"
        )
    used = load.workers * per_client
    text += [f"| PostgreSQL connections | {used:,.0f} | - | {used / 100:.0%} of the default 100 | a few |", ""]
    return text


def report(cells: Sequence[Cell], per_client: float, options: argparse.Namespace) -> str:
    """Return the page."""
    load = Load(100)
    busy = statistics.median(cell.busy for cell in cells if cell.processes > 1)
    size = sum(len(record.tokens) for record in build("x")) * 4
    text = [
        "# How many rollout workers a book can serve",
        "",
        f"`python -m benchmarks.bench_capacity --rounds {options.rounds} --seconds {options.seconds:g}` on "
        f"{os.cpu_count()} cores, which the clients, PostgreSQL (fsync on) and Ray share ({busy:.0%} in use, by any "
        "process, in the median cell with 8 processes). A server of its own, with more cores, is faster; these rates "
        "are lower bounds.",
        "",
        "## Measured rates",
        "",
        f"Calls per second of all processes together, median of {options.rounds} rounds (range). Claim and finish: "
        "claim one group, look for its records, renew, finish: 3 transactions. Append: one group of "
        f"{GROUP_SIZE} records with {RESPONSE_TOKENS} sampled tokens ({size / 1e3:.0f} kB of tokens). Heartbeat: "
        "report and renew. Weights version: the read by which a worker finds new weights. Lease and ack: "
        f"{LEASED_GROUPS} groups, by the trainer. Publish and fetch: weights of {WEIGHTS_BYTES >> 20} MiB.",
        "",
        *describe_rates(cells),
        "",
        "## Demand",
        "",
        f"Assumptions: a worker generates a group of {GROUP_SIZE} samples of {RESPONSE_TOKENS} tokens in "
        f"{load.group_seconds:g} s, one group per claim; a training step takes {load.step_seconds:g} s and trains on "
        f"all groups of that time ({Load(100).groups * load.step_seconds:.0f} for 100 workers, "
        f"{Load(1000).groups * load.step_seconds:,.0f} for 1,000); every worker sends a heartbeat each "
        f"{load.beat_seconds:g} s and looks for weights each {load.poll_seconds:g} s (mode `async`), and fetches the "
        f"weights after every step; {load.workers_per_node} workers share a node. Weights of 1 GB are those of a "
        "0.5B model in bfloat16, 15 GB of a 7B model. A share is demand divided by the measured rate; above 100 % "
        "that part saturates. For Ray, a node fetches weights once, and its workers map them.",
        "",
        *describe_load(cells, Load(100), per_client),
        *describe_load(cells, Load(1000), per_client),
        *describe_order(cells, per_client),
    ]
    return "\n".join(text) + "\n"


def describe_order(cells: Sequence[Cell], per_client: float) -> list[str]:
    """Return at how many workers each part saturates, the first one first."""
    text = [
        "## What saturates first",
        "",
        "Workers at which each part alone reaches 100 %, by the same arithmetic:",
        "",
        "| part | " + " | ".join(KINDS) + " |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    load = Load(1)
    for operation, calls in load.calls().items():
        columns = [f"{best_rate(cells, kind, operation) / calls:,.0f}" for kind in KINDS]
        text.append(f"| {operation} | {' | '.join(columns)} |")
    alone = {kind: sum(calls / best_rate(cells, kind, name) for name, calls in load.calls().items()) for kind in KINDS}
    text.append(f"| all calls together | {' | '.join(f'{1 / share:,.0f}' for share in alone.values())} |")
    for gigabytes in (1.0, 15.0):
        rates = {kind: best_rate(cells, kind, "fetch") * WEIGHTS_BYTES / 1e9 for kind in KINDS}
        columns = [
            "not by the book" if kind.startswith("Ray") else f"{rates[kind] / load.fetched(gigabytes):,.0f}"
            for kind in KINDS
        ]
        text.append(f"| weights of {gigabytes:g} GB | {' | '.join(columns)} |")
    text.append(f"| 100 PostgreSQL connections ({per_client:.1f} per worker) | - | {100 / per_client:,.0f} | - |")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each cell")
    parser.add_argument("--scratch", type=Path, default=None, help="where books lie (.bench)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    scratch = options.scratch or peers.default_scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    cells, per_client = measure(options, scratch)
    results = {"connections_per_client": per_client, "cells": [asdict(cell) for cell in cells]}
    (options.out / "capacity.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(cells, per_client, options)
    (options.out / "capacity.md").write_text(text)
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    # As a module of its own name, so that Ray's workers can import what they unpickle.
    from benchmarks.bench_capacity import main as run

    sys.exit(run())
