"""Small records, a clock to turn by hand, and the whole ledger as a value, for the tests of the book's behaviour."""

from __future__ import annotations

import json
from typing import Any

from rollbook import EID, Experience
from rollbook.book import Book
from rollbook.book.ledger import TABLES


def record(
    task: int | str = "", run: int = 0, *, step: int = 0, suffix: str = "", batch: int | str = 0, **fields: Any
) -> Experience:
    """A record of five tokens; without a task its id is a default one."""
    eid = EID(batch=batch, task=task, run=run, step=step, suffix=suffix) if task != "" else EID(suffix=suffix)
    return Experience(eid=eid, tokens=[1, 2, 3, 4, 5], prompt_length=2, **fields)


def records(count: int, start: int = 0, **fields: Any) -> list[Experience]:
    """Records that are groups of their own, numbered in their ids and in `info`."""
    return [record(suffix=f"{i:04}", info={"i": i}, **fields) for i in range(start, start + count)]


def group(task: int | str, runs: int, *, size: int | None = None, **fields: Any) -> list[Experience]:
    """One record for each of the first runs of a task; `size` is what they say of their group."""
    return [record(task, run, suffix="s", group_size=size, **fields) for run in range(runs)]


def numbers(rows: Any) -> list[Any]:
    """`info["i"]` of each record of a lease, a selection or a list."""
    return [row.info["i"] for row in rows]


class Clock:
    """Seconds that pass when a test says so; the `clock` of `rollbook.open`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def ledger(book: Book) -> dict[str, list[Any]]:
    """Every row of every table of the ledger."""
    with book.ledger.read() as tx:
        tables = {name: tx.all(f"SELECT * FROM {name}") for name in TABLES if name != "blobs"}
    return {
        name: sorted(([bytes(v) if isinstance(v, memoryview) else v for v in row] for row in rows), key=repr)
        for name, rows in tables.items()
    }


def check(book: Book) -> None:
    """For every consumer: the counts add up, and are what the rows of `queue` say."""
    with book.ledger.read() as tx:
        names = dict(tx.all("SELECT id, name FROM consumers"))
        rows = tx.all("SELECT consumer, state, COALESCE(reason, ''), COUNT(*), SUM(weight) FROM queue GROUP BY 1, 2, 3")
        tallies = tx.all(
            "SELECT consumer, state, reason, SUM(n), SUM(weight) FROM tallies WHERE consumer > 0 GROUP BY 1, 2, 3 "
            "HAVING SUM(n) <> 0"
        )
        admitted = tx.first(
            "SELECT COUNT(*) FROM records WHERE evaluation = 0 "
            "AND (removed_reason IS NULL OR removed_reason <> 'rewound')"
        )[0]
        ready = dict(tx.all("SELECT consumer, COUNT(*) FROM groups WHERE ready = 1 GROUP BY 1"))
        states = dict(tx.all("SELECT id, state FROM consumers"))
    assert sorted(row[:4] for row in rows) == sorted(row[:4] for row in tallies)
    weights = {row[:3]: row[4] for row in tallies}
    for consumer, state, reason, _, weight in rows:
        assert abs(weights[consumer, state, reason] - weight) <= 1e-6 * (1 + weight)
    for number, name in names.items():
        counts = book.counts(name)
        assert counts.adds_up, counts
        assert counts.admitted == admitted
        assert json.loads(states[number]).get("ready", (0, 0))[0] == ready.get(number, 0)


def take(book: Book, n: int, **options: Any) -> list[Experience]:
    """Lease, read and acknowledge."""
    with book.lease(n, **options) as lease:
        rows = list(lease)
        lease.ack()
    return rows
