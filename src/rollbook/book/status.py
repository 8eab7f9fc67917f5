"""The status of a book that is in use: queues, rates, rollouts in progress, workers and leases.

Invariant: `read_status` writes nothing, and its cost does not grow with the book: it reads counts, the last events, and
at most `MAX_WAITING` rows of a queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollbook.book import queue
from rollbook.book.consumer import Consumer, all_consumers
from rollbook.book.ledger import Transaction, parse_object, served
from rollbook.book.reports import Counts
from rollbook.book.rollouts import CLAIMED, WorkerReport, select_worker_reports
from rollbook.core.checks import check_float, check_int

if TYPE_CHECKING:
    from rollbook.book.book import Book

MAX_WAITING = 20_000
"""Longer queues: the median is omitted and groups are estimated from complete groups."""
MAX_EVENTS = 50_000
"""Rates are computed from at most this many events; in a busy book, they span less time than requested."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many policy versions waiting records are behind the announced one; see `ConsumerStatus`.

    Attributes:
        min: Of the newest record.
        median: `None` if more than `MAX_WAITING` records wait.
        max: Of the oldest record.
        bound: The consumer's `max_staleness`.
    """

    min: int
    median: float | None
    max: int
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """An active lease; see `BookStatus`.

    Attributes:
        fence: Its number.
        consumer: The consumer group.
        holder: Host and process.
        records: How many records were leased.
        age: Seconds since then.
        left: Seconds until it expires; negative if it has expired and no other lease was made since.
    """

    fence: int
    consumer: str
    holder: str
    records: int
    age: float
    left: float


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A consumer group and its queue; see `BookStatus`.

    Attributes:
        counts: Records by state.
        groups: Groups with waiting records; of more than `MAX_WAITING` records, the complete groups that a consumer
            that leases by group can lease, else `None`.
        staleness: Of waiting records; `None` if no version was announced, or no waiting record has one.
        rates: Records per second: `leased`, `trained`, `dropped`, `expired`, `nacked` ...
        leases: Number of active leases.
    """

    counts: Counts
    groups: int | None
    staleness: Staleness | None
    rates: dict[str, float]
    leases: int


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Rollouts in progress; see `BookStatus`.

    Attributes:
        status: `open`, `suspended` or `finished`.
        next: Number of the first group that was not started.
        limit: Number of the first group that may not be started yet.
        in_flight: How many groups workers have claimed.
        expired: How many of them have expired, and wait for another worker.
        returned: How many groups were given back, and wait for another worker.
        oldest: Seconds since the oldest claim.
        oldest_worker: Worker of that claim.
        rate: Groups that were finished per second.
    """

    status: str
    next: int
    limit: int
    in_flight: int
    expired: int
    returned: int
    oldest: float | None
    oldest_worker: str | None
    rate: float


@dataclass(frozen=True, slots=True)
class BookStatus:
    """Contents and current activity of a book; see `read_status`.

    Attributes:
        url: Address, without secrets.
        time: By the database's clock, in seconds since 1970.
        policy_version: The announced version.
        records: Training records.
        evaluation: Evaluation records.
        window: Seconds that the rates are averaged over.
        appended: Records per second, training and evaluation.
        consumers: The consumer groups, in the order of their creation.
        rollouts: Rollouts in progress; `None` if no trainer has opened them.
        workers: Last reports of workers and trainers, by name.
        worker_rates: Groups per second that each worker finished.
        leases: Active leases, those that expire first.
    """

    url: str
    time: float
    policy_version: int | None
    records: int
    evaluation: int
    window: float
    appended: float
    consumers: list[ConsumerStatus] = field(default_factory=list)
    rollouts: RolloutStatus | None = None
    workers: list[WorkerReport] = field(default_factory=list)
    worker_rates: dict[str, float] = field(default_factory=dict)
    leases: list[LeaseStatus] = field(default_factory=list)


@dataclass
class _RecentEvents:
    """Numbers of events of the last seconds."""

    seconds: float
    appended: int = 0
    by_consumer: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Numbers of records by consumer and kind."""
    by_worker: Counter[str] = field(default_factory=Counter)
    """Numbers of finished groups."""


@served(repeat=True)
def read_status(book: Book, seconds: float = 10.0, leases: int = 20) -> BookStatus:
    """Return the contents and the current activity of a book.

    Args:
        book: The book.
        seconds: Rates are averages over the last N seconds, or over the last `MAX_EVENTS` events if these span less.
        leases: How many leases to list for each consumer.

    Returns:
        Counts, queues, leases, rates and rollouts in progress.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=reward) for reward in (0.0, 1.0)])
    >>> lease = book.lease(1)
    >>> status = read_status(book)
    >>> status.records, status.appended, status.consumers[0].counts.leased, status.leases[0].records
    (2, 0.2, 1, 1)
    >>> lease.nack()
    1
    """
    check_float("seconds", seconds, 0.001, 1e9)
    check_int("leases", leases)
    with book.ledger.read() as tx:
        version = queue.announced_version(tx)
        events = _read_events(tx, seconds)
        tallies = _read_tallies(tx)
        consumers = all_consumers(tx)
        totals = tallies[0]
        records, evaluation = totals["admitted", ""], totals["evaluation", ""]
        listed: list[LeaseStatus] = []
        statuses = []
        for consumer in consumers:
            active = _read_leases(tx, consumer, leases)
            listed += active
            statuses.append(_read_consumer(tx, consumer, tallies, version, events))
        return BookStatus(
            book.url,
            tx.now,
            version,
            records,
            evaluation,
            events.seconds,
            events.appended / events.seconds,
            statuses,
            _read_rollouts(tx, sum(events.by_worker.values()) / events.seconds),
            select_worker_reports(tx),
            {worker: count / events.seconds for worker, count in sorted(events.by_worker.items())},
            sorted(listed, key=lambda lease: lease.left),
        )


def _read_tallies(tx: Transaction) -> defaultdict[int, Counter[tuple[str, str]]]:
    """Return the number of records by consumer, state and reason."""
    tallies: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    for consumer, state, reason, n in tx.all("SELECT consumer, state, reason, SUM(n) FROM tallies GROUP BY 1, 2, 3"):
        tallies[consumer][str(state), str(reason)] += int(n)
    return tallies


def _read_events(tx: Transaction, seconds: float) -> _RecentEvents:
    """Count the events of the last seconds, from the newest ones backward."""
    # Events have no index on the time, but a later one has a higher id, apart from concurrent transactions.
    earlier = int(tx.first("SELECT COALESCE(MAX(id), 0) FROM events")[0]) - MAX_EVENTS
    if earlier > 0:
        (oldest,) = tx.first("SELECT time FROM events WHERE id > ? ORDER BY id LIMIT 1", (earlier,))
        seconds = min(max(tx.now - oldest, 0.001), seconds)
    rows = tx.all(
        "SELECT kind, consumer, CASE kind WHEN 'generated' THEN detail END, COUNT(*) FROM events "
        "WHERE id > ? AND time >= ? AND (seq IS NOT NULL OR kind = 'generated') GROUP BY 1, 2, 3",
        (earlier, tx.now - seconds),
    )
    events = _RecentEvents(seconds)
    for kind, consumer, detail, count in rows:
        if kind == "admitted":
            events.appended += count
        elif kind == "generated":
            worker = parse_object(detail, "an event's detail").get("worker") if detail else None
            events.by_worker[str(worker)] += count
        elif consumer is not None:
            events.by_consumer[consumer][kind] += count
    return events


def _read_leases(tx: Transaction, consumer: Consumer, limit: int) -> list[LeaseStatus]:
    rows = tx.all(
        "SELECT id, holder, count, made, expires FROM leases WHERE consumer = ? AND state = 'active' "
        "ORDER BY expires LIMIT ?",
        (consumer.id, limit),
    )
    return [
        # A holder is host/process/token.
        LeaseStatus(fence, consumer.name, str(holder).rpartition("/")[0], count, tx.now - created, expires - tx.now)
        for fence, holder, count, created, expires in rows
    ]


def _read_consumer(
    tx: Transaction,
    consumer: Consumer,
    tallies: Mapping[int, Counter[tuple[str, str]]],
    announced: int | None,
    events: _RecentEvents,
) -> ConsumerStatus:
    by_state: Counter[str] = Counter()
    dropped = {}
    for (state, reason), n in sorted(tallies[consumer.id].items()):
        by_state[state] += n
        if state == queue.DROPPED and n:
            dropped[reason] = n
    inbox = queue.inbox_size(tx, consumer.id)
    counts = Counts(
        consumer.name,
        admitted=tallies[0]["admitted", ""],
        waiting=by_state[queue.WAITING] + by_state[queue.COOLING] + inbox,
        leased=by_state[queue.LEASED],
        trained=by_state[queue.TRAINED],
        dropped=dropped,
        evaluation=tallies[0]["evaluation", ""],
    )
    (active,) = tx.first("SELECT COUNT(*) FROM leases WHERE consumer = ? AND state = 'active'", (consumer.id,))
    rates = {kind: count / events.seconds for kind, count in sorted(events.by_consumer[consumer.id].items())}
    if by_state[queue.WAITING] + inbox > MAX_WAITING:
        groups = int(consumer.state.get("ready", (0, 0.0))[0]) if consumer.grouped else None
        staleness = _read_version_range(tx, consumer, announced)
    else:
        groups, staleness = _read_queue(tx, consumer, announced)
    return ConsumerStatus(counts, groups, staleness, rates, int(active))


def _read_queue(tx: Transaction, consumer: Consumer, announced: int | None) -> tuple[int, Staleness | None]:
    """Return the number of waiting groups and the staleness of waiting records, also of those in the inbox."""
    rows = tx.all(
        "SELECT gid, version FROM queue WHERE consumer = ? AND state = 'waiting' UNION ALL "
        "SELECT records.gid, records.version_min FROM inbox JOIN records "
        "ON records.seq BETWEEN inbox.first AND inbox.last WHERE inbox.consumer = ? AND records.evaluation = 0",
        (consumer.id, consumer.id),
    )
    groups = len({gid for gid, _ in rows})
    versions = sorted(version for _, version in rows if version is not None)
    if announced is None or not versions:
        return groups, None
    middle = (versions[(len(versions) - 1) // 2] + versions[len(versions) // 2]) / 2
    bound = consumer.settings.max_staleness
    return groups, Staleness(announced - versions[-1], announced - middle, announced - versions[0], bound)


def _read_version_range(tx: Transaction, consumer: Consumer, announced: int | None) -> Staleness | None:
    """Return the least and greatest staleness of a long queue, without its inbox, by an index."""
    oldest, newest = (
        tx.first(
            "SELECT version FROM queue WHERE consumer = ? AND state = 'waiting' AND version IS NOT NULL "
            f"ORDER BY version {order} LIMIT 1",
            (consumer.id,),
        )
        for order in ("ASC", "DESC")
    )
    if announced is None or oldest is None:
        return None
    return Staleness(announced - newest[0], None, announced - oldest[0], consumer.settings.max_staleness)


def _read_rollouts(tx: Transaction, rate: float) -> RolloutStatus | None:
    row = tx.first("SELECT status, next, highest FROM rollouts WHERE id = 0")
    if row is None:
        return None
    claims = tx.all("SELECT state, claimed, expires, worker FROM claims ORDER BY claimed, number")
    in_flight = [claim for claim in claims if claim[0] == CLAIMED]
    expired = sum(expires <= tx.now for _, _, expires, _ in in_flight)
    return RolloutStatus(
        status=row[0],
        next=row[1],
        limit=row[2],
        in_flight=len(in_flight),
        expired=expired,
        returned=len(claims) - len(in_flight),
        oldest=max(tx.now - in_flight[0][1], 0.0) if in_flight else None,
        oldest_worker=str(in_flight[0][3]) if in_flight else None,
        rate=rate,
    )


__all__ = ["BookStatus", "ConsumerStatus", "LeaseStatus", "RolloutStatus", "Staleness", "read_status"]
