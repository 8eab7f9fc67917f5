"""Reports: what the ledger says of a record, of a consumer and of the book.

Invariant: for every consumer, admitted = waiting + leased + trained + dropped; the left side is counted as records come
in, the right side as they move, and neither is made from the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rollbook.book import consumers, inbox, work
from rollbook.book.ledger import Transaction, parsed
from rollbook.core.checks import check_choice

if TYPE_CHECKING:
    from rollbook.book.book import Book


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a record's life."""

    time: float
    """Seconds since 1970, by the database's clock."""
    kind: str
    """Of a record: admitted, leased, trained, nacked, expired, rested, dropped, returned, voided, revised, redacted,
    deleted, removed. Of the book: announced, configured, checkpoint, forgotten, rewound, compacted, copied."""
    reason: str | None
    consumer: str | None
    step: int | None
    lease: int | None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """How far a consumer is.

    >>> counts = Counts("train", admitted=3, waiting=1, leased=0, trained=1, dropped={"stale": 1})
    >>> counts.adds_up
    True
    """

    consumer: str
    admitted: int
    waiting: int
    """Resting ones too."""
    leased: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    evaluation: int = 0
    """Records kept beside, which no consumer is offered; not among the admitted."""

    @property
    def adds_up(self) -> bool:
        """Whether every record that was admitted is somewhere."""
        return self.admitted == self.waiting + self.leased + self.trained + sum(self.dropped.values())


def admitted(tx: Transaction, evaluation: bool, count: int) -> None:
    """Count records as they come in, apart from what consumers do with them."""
    work.add_counts(tx, [(0, "evaluation" if evaluation else "admitted", "", count, 0.0)])


_TALLY = "SELECT CAST(state AS TEXT), CAST(reason AS TEXT), CAST(SUM(CAST(n AS BIGINT)) AS BIGINT) FROM tallies"
"""SQLite keeps whatever it is given, text in a column of numbers too."""


def counts(book: Book, name: str) -> Counts:
    """See `Book.counts`."""
    inbox.drain_inboxes(book, bounded=True)
    with book.ledger.read() as tx:
        mine = (consumers.get_consumer(tx, name).id,)
        totals = {state: n for state, _, n in tx.all(f"{_TALLY} WHERE consumer = 0 GROUP BY 1, 2")}
        tallies = [row for row in tx.all(f"{_TALLY} WHERE consumer = ? GROUP BY 1, 2 ORDER BY 2", mine) if row[2]]
        unseen = inbox.inbox_size(tx, mine[0])
    by_state: Counter[str] = Counter()
    for state, _, n in tallies:
        by_state[state] += n
    return Counts(
        name,
        admitted=totals.get("admitted", 0),
        waiting=by_state["waiting"] + by_state["cooling"] + unseen,
        leased=by_state["leased"],
        trained=by_state["trained"],
        dropped={reason: n for state, reason, n in tallies if state == "dropped"},
        evaluation=totals.get("evaluation", 0),
    )


def history(book: Book, uid: str) -> list[Entry]:
    """See `Book.history`."""
    inbox.drain_inboxes(book, bounded=True)
    with book.ledger.read() as tx:
        row = tx.one("SELECT seq FROM records WHERE uid = ?", (uid,))
        if row is None:
            raise KeyError(f"uid: got {uid!r}, which is not in the book")
        found = tx.all(
            "SELECT events.time, events.kind, events.reason, consumers.name, events.step, events.lease, events.detail "
            "FROM events LEFT JOIN consumers ON consumers.id = events.consumer WHERE events.seq = ? ORDER BY events.id",
            row,
        )
    return [
        Entry(at, kind, reason, consumer, step, lease, parsed(detail, "an event's detail") if detail else {})
        for at, kind, reason, consumer, step, lease, detail in found
    ]


@dataclass(frozen=True, slots=True)
class KeepRate:
    """How many of the records in one range were trained on: dropping is often biased by length or reward."""

    low: float
    high: float
    admitted: int
    trained: int
    dropped: int

    @property
    def rate(self) -> float:
        """Trained among those that were decided; NaN where none was."""
        done = self.trained + self.dropped
        return self.trained / done if done else math.nan


def keep_rates(book: Book, name: str, by: str, edges: Sequence[float] | None) -> list[KeepRate]:
    """See `Book.keep_rates`."""
    check_choice("by", by, ("length", "reward"))
    column = "response_tokens" if by == "length" else "reward"
    inbox.drain_inboxes(book)
    with book.ledger.read() as tx:
        mine = (consumers.get_consumer(tx, name).id,)
        found = tx.all(
            f"SELECT records.{column}, work.state, work.uses, COUNT(*) FROM work "
            "JOIN records ON records.seq = work.seq "
            f"WHERE work.consumer = ? AND records.{column} IS NOT NULL "
            "AND NOT (records.length = 0 AND records.gone IS NOT NULL) "  # Failed runs have no length.
            "GROUP BY 1, 2, 3 ORDER BY 1",
            mine,
        )
    if edges is None:
        edges = _edges([row[0] for row in found])
    rising = [float(edge) for edge in edges]
    if len(rising) < 2 or any(b <= a for a, b in pairwise(rising)):
        if not found:
            return []
        raise ValueError(f"edges: got {list(edges)!r}, expected at least two numbers that rise")
    rates = []
    for low, high in pairwise(rising):
        last = high == rising[-1]
        inside = [row for row in found if low <= row[0] < high or (last and row[0] == high)]
        rates.append(
            KeepRate(
                low,
                high,
                sum(n for *_, n in inside),
                sum(n for _, state, uses, n in inside if state == "trained" or (state != "dropped" and uses)),
                sum(n for _, state, _, n in inside if state == "dropped"),
            )
        )
    return rates


def _edges(values: Sequence[float]) -> list[float]:
    """Up to eight ranges of equal width over what is there."""
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    if low == high:
        return [low, low + 1]
    return [low + (high - low) * i / 8 for i in range(8)] + [high]
