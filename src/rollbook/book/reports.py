"""Reports: counts of a consumer, history of a record, keep rates and metrics.

Invariant: for every consumer, admitted = waiting + leased + trained + dropped. The left side is counted when records
are appended, the right side when they change state; neither is computed from the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from rollbook.book import queue
from rollbook.book.consumer import get_consumer
from rollbook.book.errors import CorruptBookError
from rollbook.book.ledger import parse_object, served
from rollbook.core.checks import check_choice

if TYPE_CHECKING:
    from rollbook.book.book import Book

__all__ = ["Counts", "Entry", "KeepRate", "keep_rates"]


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of a record, as returned by `Book.history`.

    Attributes:
        time: Seconds since 1970, by the database's clock.
        kind: Of a record: admitted, leased, trained, nacked, expired, rested, dropped, returned, voided, revised,
            redacted, deleted, removed. Of the book: announced, configured, checkpoint, forgotten, rewound, compacted,
            copied.
        reason: Why it happened, if a reason was given.
        consumer: The consumer group, for events of one.
        step: The optimizer step, for events of one.
        lease: The fencing number of the lease, for events of one.
        detail: Further details by name.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> record = rollbook.Experience(tokens=[1, 2, 3])
    >>> _ = book.append(record)
    >>> _ = book.lease(1).ack(step=7)
    >>> [(entry.kind, entry.step) for entry in book.history(record.eid.uid)]
    [('admitted', None), ('leased', None), ('trained', 7)]
    """

    time: float
    kind: str
    reason: str | None
    consumer: str | None
    step: int | None
    lease: int | None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of records in each state of a consumer.

    Attributes:
        consumer: The consumer group.
        admitted: Training records of the book.
        waiting: Records that wait or cool down.
        leased: Records in active leases.
        trained: Records that are done.
        dropped: Dropped records by reason.
        evaluation: Records for evaluation, which are never leased and not counted in `admitted`.

    >>> counts = Counts("train", admitted=3, waiting=1, leased=0, trained=1, dropped={"stale": 1})
    >>> counts.adds_up
    True
    """

    consumer: str
    admitted: int
    waiting: int
    leased: int
    trained: int
    dropped: dict[str, int]
    evaluation: int = 0

    @property
    def adds_up(self) -> bool:
        """Whether the states sum up to the admitted records."""
        return self.admitted == self.waiting + self.leased + self.trained + sum(self.dropped.values())


_SELECT_TALLIES = (
    "SELECT CAST(state AS TEXT), CAST(reason AS TEXT), CAST(SUM(CAST(n AS BIGINT)) AS BIGINT) FROM tallies"
)
"""With casts, because SQLite also stores text in columns of numbers."""


def count_records(book: Book, name: str) -> Counts:
    """Implement `Book.counts`."""
    queue.drain_inboxes(book, bounded=True)
    with book.ledger.read() as tx:
        consumer = get_consumer(tx, name).id
        # Consumer 0 stands for the book.
        totals = {state: n for state, _, n in tx.all(f"{_SELECT_TALLIES} WHERE consumer = 0 GROUP BY 1, 2")}
        rows = tx.all(f"{_SELECT_TALLIES} WHERE consumer = ? GROUP BY 1, 2 ORDER BY 2", (consumer,))
        inbox = queue.inbox_size(tx, consumer)
    tallies = [row for row in rows if row[2]]
    by_state: Counter[str] = Counter()
    for state, _, n in tallies:
        by_state[state] += n
    return Counts(
        name,
        admitted=totals.get("admitted", 0),
        waiting=by_state["waiting"] + by_state["cooling"] + inbox,
        leased=by_state["leased"],
        trained=by_state["trained"],
        dropped={reason: n for state, reason, n in tallies if state == "dropped"},
        evaluation=totals.get("evaluation", 0),
    )


def read_history(book: Book, uid: str) -> list[Entry]:
    """Implement `Book.history`."""
    queue.drain_inboxes(book, bounded=True)
    with book.ledger.read() as tx:
        row = tx.first("SELECT seq FROM records WHERE uid = ?", (uid,))
        if row is None:
            raise KeyError(f"uid: got {uid!r}, which is not in the book")
        rows = tx.all(
            "SELECT events.time, events.kind, events.reason, consumers.name, events.step, events.lease, events.detail "
            "FROM events LEFT JOIN consumers ON consumers.id = events.consumer WHERE events.seq = ? ORDER BY events.id",
            row,
        )
    return [
        Entry(at, kind, reason, consumer, step, lease, parse_object(detail, "an event's detail") if detail else {})
        for at, kind, reason, consumer, step, lease, detail in rows
    ]


@dataclass(frozen=True, slots=True)
class KeepRate:
    """Number of records in a range of lengths or rewards that were trained on, and that were dropped.

    The rates of the ranges differ if dropping depends on length or reward.

    Args:
        low: Lower bound of the range.
        high: Upper bound of the range.
        admitted: Number of appended records.
        trained: Number of records that were trained on.
        dropped: Number of dropped records.

    >>> KeepRate(low=0, high=128, admitted=10, trained=6, dropped=2).rate
    0.75
    """

    low: float
    high: float
    admitted: int
    trained: int
    dropped: int

    @property
    def rate(self) -> float:
        """Trained records as a share of trained and dropped ones; NaN if there are none."""
        done = self.trained + self.dropped
        return self.trained / done if done else math.nan


@served(repeat=True)
def keep_rates(
    book: Book, by: str = "length", edges: Sequence[float] | None = None, consumer: str = "train"
) -> list[KeepRate]:
    """Count the records that were trained on and dropped, by response length or reward.

    Args:
        book: The book.
        by: `"length"` (response tokens) or `"reward"`.
        edges: Edges of the ranges; by default eight ranges of equal width.
        consumer: The consumer group.

    Returns:
        One entry per range. Failed runs, which have neither length nor reward, are left out.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=reward) for reward in (0.0, 1.0)])
    >>> _ = book.lease(1).ack()
    >>> [(rate.low, rate.high, rate.admitted, rate.trained) for rate in keep_rates(book, "reward", [0.0, 0.5, 1.0])]
    [(0.0, 0.5, 1, 1), (0.5, 1.0, 1, 0)]
    """
    check_choice("by", by, ("length", "reward"))
    column = "response_tokens" if by == "length" else "reward"
    queue.drain_inboxes(book)
    with book.ledger.read() as tx:
        rows = tx.all(
            f"SELECT records.{column}, queue.state, queue.uses, COUNT(*) FROM queue "
            "JOIN records ON records.seq = queue.seq "
            f"WHERE queue.consumer = ? AND records.{column} IS NOT NULL "
            "AND NOT (records.length = 0 AND records.removed_reason IS NOT NULL) "  # failed runs have no length
            "GROUP BY 1, 2, 3 ORDER BY 1",
            (get_consumer(tx, consumer).id,),
        )
    if edges is None:
        edges = _equal_ranges([row[0] for row in rows])
    bounds = [float(edge) for edge in edges]
    if len(bounds) < 2 or any(b <= a for a, b in pairwise(bounds)):
        if not rows:
            return []
        raise ValueError(f"edges: got {list(edges)!r}, expected at least two rising numbers")
    rates = []
    for low, high in pairwise(bounds):
        last = high == bounds[-1]
        inside = [row for row in rows if low <= row[0] < high or (last and row[0] == high)]
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


def _equal_ranges(values: Sequence[float]) -> list[float]:
    """Return the edges of up to eight ranges of equal width."""
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    if low == high:
        return [low, low + 1]
    return [low + (high - low) * i / 8 for i in range(8)] + [high]


METRICS_KIND = "metrics"
"""Kind of the events with metrics: `step` is the training step, `detail` the numbers by name."""
INT64_END = 1 << 63


def encode_metrics(metrics: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Convert metrics to strict JSON: NaN and infinity become strings that `float` and SQL's CAST parse.

    Args:
        metrics: Numbers by name.

    Raises:
        ValueError: A name is empty, or a value is not a number.

    >>> import numpy as np
    >>> encode_metrics({"loss": np.float32(0.5), "kl": float("nan"), "low": -float("inf"), "tokens": 7})
    {'loss': 0.5, 'kl': 'NaN', 'low': '-Infinity', 'tokens': 7}
    >>> encode_metrics({"loss": "0.5"})
    Traceback (most recent call last):
        ...
    ValueError: metrics['loss']: got '0.5', expected an int or a float
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics: got {type(metrics).__name__}, expected numbers by name")
    numbers: dict[str, int | float | str] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"metrics: got the name {name!r}, expected a non-empty text")
        if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
            hint = "; use .item() for a tensor" if hasattr(value, "item") else ""
            raise ValueError(f"metrics[{name!r}]: got {str(value)[:60]!r}, expected an int or a float{hint}")
        if isinstance(value, Integral) and -INT64_END <= int(value) < INT64_END:
            numbers[name] = int(value)
            continue
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"metrics[{name!r}]: got {value.__class__.__name__}, too large for a float") from None
        if math.isfinite(number):
            numbers[name] = number
        else:
            numbers[name] = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return numbers


def decode_metrics(metrics: Mapping[str, Any], label: str) -> dict[str, float]:
    """Convert the result of `encode_metrics` back to numbers. The input is not trusted.

    Args:
        metrics: Numbers, or names of special numbers, by name.
        label: Prefix of error messages.

    Raises:
        CorruptBookError: A value is not a number.

    >>> decode_metrics({"loss": 0.5, "kl": "NaN", "tokens": 7}, "a line")
    {'loss': 0.5, 'kl': nan, 'tokens': 7}
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if value in ("NaN", "Infinity", "-Infinity"):
            numbers[name] = float(value)
        elif type(value) in (int, float):
            numbers[name] = value
        else:
            raise CorruptBookError(f"{label}: {name}: got {str(value)[:60]!r}, expected a number")
    return numbers


def read_metrics(book: Book) -> list[tuple[int, dict[str, float]]]:
    """Implement `Book.metrics`."""
    with book.ledger.read() as tx:
        # There are few events without a record, and they are adjacent in the index.
        rows = tx.all(
            "SELECT id, kind, step, detail FROM events WHERE seq IS NULL AND kind IN ('metrics', 'rewound') ORDER BY id"
        )
    entries: list[tuple[int, int, dict[str, float]]] = []
    for event, kind, step, detail in rows:
        metrics = parse_object(detail, f"event {event}")
        if kind == METRICS_KIND:
            if type(step) is not int:
                raise CorruptBookError(f"event {event}: step: got {step!r}, expected an integer")
            entries.append((event, step, decode_metrics(metrics, f"event {event}")))
        else:
            # A rewind voids the metrics after its checkpoint.
            checkpoint = metrics.get("event")
            if type(checkpoint) is not int:
                raise CorruptBookError(f"event {event}: got {str(metrics)[:60]!r}, expected the event of a checkpoint")
            while entries and entries[-1][0] > checkpoint:
                entries.pop()
    steps: dict[int, dict[str, float]] = {}
    for _, step, metrics in entries:
        steps.setdefault(step, {}).update(metrics)
    return sorted(steps.items())
