"""The ledger's tables at one moment, read by plain SQL with the database's own driver, without the book's code."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode


class Record(NamedTuple):
    seq: int
    uid: str
    gid: str
    segment: str | None
    start: int | None
    size: int | None
    slot: int | None
    removed_reason: str | None
    evaluation: int
    version_min: int | None


class Work(NamedTuple):
    consumer: int
    seq: int
    state: str
    reason: str | None
    weight: float
    lease: int | None
    uses: int


class Lease(NamedTuple):
    id: int
    consumer: int
    expires: float
    state: str
    count: int


class Event(NamedTuple):
    id: int
    time: float
    seq: int | None
    consumer: int | None
    kind: str
    lease: int | None
    detail: str | None


class Consumer(NamedTuple):
    id: int
    name: str
    settings: str
    inserts: int
    samples: int

    @property
    def max_staleness(self) -> int | None:
        bound: int | None = json.loads(self.settings)["max_staleness"]
        return bound

    @property
    def max_uses(self) -> int | None:
        settings = json.loads(self.settings)
        uses = [part["uses"] for part in settings["removers"] if part["name"] == "max_uses"]
        return uses[0] if uses else None if settings["sampler"]["name"] == "priority" else 1


class Pending(NamedTuple):
    """A range of records, `count` of them for training, that are not yet entered into `queue` for a consumer."""

    consumer: int
    first: int
    last: int
    count: int


class Tally(NamedTuple):
    consumer: int
    state: str
    reason: str
    n: int
    weight: float


class Rollouts(NamedTuple):
    status: str
    next: int
    highest: int


class Claim(NamedTuple):
    number: int
    fence: int
    worker: str
    state: str


@dataclass
class Tables:
    """Every row that a check needs."""

    records: list[Record]
    consumers: list[Consumer]
    work: list[Work]
    leases: list[Lease]
    events: list[Event]
    tallies: list[Tally]
    inbox: list[Pending]
    rollouts: list[Rollouts] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


Select = Callable[[str], list[Any]]


def read(url: str) -> Tables:
    """Read the tables of the book at a folder or a PostgreSQL address, all at one moment."""
    return _read_postgres(url) if "://" in url else _read_sqlite(Path(url) / "ledger.sqlite")


def _read_sqlite(path: Path) -> Tables:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=60)
    try:
        connection.execute("BEGIN")
        tables = _tables(lambda sql: connection.execute(sql).fetchall())
        damage = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        tables.damage = [text for text in damage if text != "ok"]
    finally:
        connection.close()
    return tables


def _read_postgres(url: str) -> Tables:
    import psycopg
    from psycopg import sql

    base, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    schema = options.pop("schema", "rollbook")
    with psycopg.connect(f"{base}?{urlencode(options)}", autocommit=True) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(schema)))
        return _tables(lambda text: connection.execute(text.encode()).fetchall())


def _tables(select: Select) -> Tables:
    def rows(kind: Any, table: str, order: str = "1") -> list[Any]:
        return [kind(*row) for row in select(f"SELECT {', '.join(kind._fields)} FROM {table} ORDER BY {order}")]

    return Tables(
        rows(Record, "records"),
        rows(Consumer, "consumers"),
        rows(Work, "queue", "consumer, seq"),
        rows(Lease, "leases"),
        rows(Event, "events"),
        rows(Tally, "tallies"),
        rows(Pending, "inbox", "consumer, first"),
        rows(Rollouts, "rollouts"),
        rows(Claim, "claims"),
    )
