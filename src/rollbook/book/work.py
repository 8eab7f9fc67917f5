"""Work: how far each consumer is with each record, and the one way in which that changes.

Invariant: rows of `work` change only through `enter_rows` and `change_rows`, which update `tallies` in the same
transaction and write an event for each: for every consumer, admitted = waiting + cooling + leased + trained + dropped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollbook.book import before, consumers, groups, lineages
from rollbook.book.consumers import Consumer
from rollbook.book.errors import BookError, CorruptBookError
from rollbook.book.ledger import Transaction, chunks

WAITING, COOLING, LEASED, TRAINED, DROPPED = "waiting", "cooling", "leased", "trained", "dropped"
STATES = (WAITING, COOLING, LEASED, TRAINED, DROPPED)


class Row(NamedTuple):
    """One record as one consumer has it."""

    seq: int
    gid: str
    state: str
    reason: str | None
    rank: float
    value: float | None
    weight: float
    version: int | None
    uses: int
    attempts: int
    lease: int | None
    until: float | None


ROW_COLUMNS = ", ".join(Row._fields)
_NONE = type(None)
_WHOLE, _REAL = (int, _NONE), (float, _NONE)
_ROW_TYPES: tuple[Any, ...] = (int, str, str, (str, _NONE), float, _REAL, float, _WHOLE, int, int, _WHOLE, _REAL)


class Event(NamedTuple):
    """What to write in the ledger."""

    kind: str
    seq: int | None = None
    consumer: int | None = None
    reason: str | None = None
    step: int | None = None
    lease: int | None = None
    detail: dict[str, Any] | None = None


_EVENT_COLUMNS = ("time", *Event._fields)


def record_events(tx: Transaction, events: Iterable[Event]) -> None:
    """Write events, in order."""
    tx.insert(
        "events", _EVENT_COLUMNS, [(tx.now, *e[:6], None if e.detail is None else json.dumps(e.detail)) for e in events]
    )


def select_rows(tx: Transaction, where: str, values: Sequence[Any]) -> list[Row]:
    """Rows of `work` under a condition."""
    return check_rows(tx.all(f"SELECT {ROW_COLUMNS} FROM work WHERE {where}", values))


def check_rows(values: Iterable[Any]) -> list[Row]:
    """Rows from a ledger that anybody may have written."""
    found = list(map(Row._make, values))
    for row in found:
        if not all(map(isinstance, row, _ROW_TYPES)):
            # SQLite keeps whatever it is given, text in a column of numbers too.
            raise CorruptBookError(
                f"work: record number {row.seq}: got {str(row)[:200]}, which has values of other types"
            )
    return found


def select_rows_by_seq(tx: Transaction, consumer: Consumer, seqs: Sequence[int]) -> list[Row]:
    """The rows of these records, in the order of their numbers."""
    found: list[Row] = []
    for _, part in chunks(sorted(seqs), 5000):
        found += select_rows(tx, f"consumer = ? AND seq {tx.in_ints} ORDER BY seq", (consumer.id, tx.array(part)))
    return found


def _tally(tx: Transaction, consumer: Consumer, changes: dict[tuple[str, str], list[float]]) -> None:
    add_counts(tx, [(consumer.id, *key, int(n), weight) for key, (n, weight) in changes.items() if n or weight])


def add_counts(tx: Transaction, changes: Sequence[tuple[int, str, str, int, float]]) -> None:
    """Add to counts (consumer, state, reason, number, weight)."""
    # In one order, so that two transactions with the same shard never wait for each other.
    tx.insert(
        "tallies",
        ("consumer", "state", "reason", "n", "weight", "shard"),
        [(*change, tx.shard) for change in sorted(changes)],
        "ON CONFLICT (consumer, state, reason, shard) DO UPDATE SET n = tallies.n + excluded.n, "
        # Rounding errors do not outlive the rows they came from.
        "weight = CASE tallies.n + excluded.n WHEN 0 THEN 0 ELSE tallies.weight + excluded.weight END",
    )


def count_rows(tx: Transaction, consumer: Consumer, *states: str) -> tuple[int, float]:
    """How many rows are in any of these states, and their weight."""
    marks = ",".join("?" * len(states))
    row = tx.one(
        f"SELECT COALESCE(SUM(n), 0), COALESCE(SUM(weight), 0) FROM tallies WHERE consumer = ? AND state IN ({marks})",
        (consumer.id, *states),
    )
    return int(row[0]), float(row[1])


def enter_rows(
    tx: Transaction, consumer: Consumer, made: Sequence[Row], details: Mapping[int, dict[str, Any]] | None = None
) -> None:
    """Rows for records that this consumer has not seen; groups of a consumer that leases by group are looked at.
    `details`: what the ledger says beside the reason why a record is dropped, by its number."""
    changes: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in made:
        entry = changes[row.state, row.reason or ""]
        entry[0] += 1
        entry[1] += row.weight
    tx.insert("work", ("consumer", *Row._fields), [(consumer.id, *row) for row in made])
    _tally(tx, consumer, changes)
    consumer.inserts += sum(row.state != DROPPED for row in made)
    about = details or {}
    record_events(
        tx,
        [
            Event(DROPPED, row.seq, consumer.id, row.reason, detail=about.get(row.seq))
            for row in made
            if row.state == DROPPED
        ],
    )
    if consumer.grouped:
        groups.refresh_groups(tx, consumer, dict.fromkeys(row.gid for row in made))


def change_rows(tx: Transaction, consumer: Consumer, moves: Sequence[tuple[Row, Row]], events: Iterable[Event]) -> None:
    """Rows that become others (their numbers stay), and the events that say why."""
    if not moves:
        return
    changes: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for old, new in moves:
        for row, sign in ((old, -1), (new, 1)):
            entry = changes[row.state, row.reason or ""]
            entry[0] += sign
            entry[1] += sign * row.weight
        # What is given up counts neither as brought nor as handed out, or its missing uses would hold appends back
        # for ever; what comes back from there counts again.
        if (old.state == DROPPED) != (new.state == DROPPED):
            sign = -1 if new.state == DROPPED else 1
            consumer.inserts += sign
            consumer.samples += sign * (old.uses if sign < 0 else new.uses)
    before.save_undo(tx, before.WORK_TABLE, consumer.id, "seq", [new.seq for _, new in moves])
    tx.update("work", ("consumer", "seq"), Row._fields[2:], [(*new[2:], consumer.id, new.seq) for _, new in moves])
    _tally(tx, consumer, changes)
    record_events(tx, events)
    if consumer.grouped:
        other = {new.gid for old, new in moves if (old.uses, old.value) != (new.uses, new.value)}
        groups.refresh_groups(tx, consumer, dict.fromkeys(new.gid for _, new in moves), other)


def drop_rows(
    tx: Transaction,
    consumer: Consumer,
    found: Sequence[Row],
    reason: str,
    details: Mapping[int, dict[str, Any]] | None = None,
) -> None:
    """Give rows up, for a reason; what was leased counts as never handed out. `details` as in `enter_rows`."""
    about = details or {}
    consumer.samples -= sum(row.state == LEASED for row in found)
    change_rows(
        tx,
        consumer,
        [(row, row._replace(state=DROPPED, reason=reason, lease=None, until=None, attempts=0)) for row in found],
        [Event(DROPPED, row.seq, consumer.id, reason, lease=row.lease, detail=about.get(row.seq)) for row in found],
    )


def drop_by_seq(tx: Transaction, consumer: Consumer, seqs: Sequence[int], reason: str) -> int:
    """Drop those of these records that wait or rest; how many."""
    found = [row for row in select_rows_by_seq(tx, consumer, seqs) if row.state in (WAITING, COOLING)]
    drop_rows(tx, consumer, found, reason)
    consumers.save_consumer(tx, consumer)
    return len(found)


def requeue_rows(tx: Transaction, consumer: Consumer, found: Sequence[Row], kind: str, reason: str | None) -> None:
    """Offer leased rows again, at the place they had; those that came back too often are dropped."""
    most = consumer.settings.max_attempts
    spent = [row for row in found if most is not None and row.attempts + 1 >= most]
    back = [row for row in found if most is None or row.attempts + 1 < most]
    consumer.samples -= len(back)
    sampler = consumer.settings.sampler
    moves = []
    for row in back:
        rank = row.rank
        if not sampler.keeps:  # Its number may have been revised while it was leased.
            rank = sampler.rank(consumer.item(row.seq, row.uses, row.version, row.value), consumer.state)
        moves.append((row, row._replace(state=WAITING, lease=None, attempts=row.attempts + 1, rank=rank)))
    change_rows(
        tx,
        consumer,
        moves,
        [Event(kind, row.seq, consumer.id, reason, lease=row.lease) for row in back],
    )
    drop_rows(tx, consumer, spent, "attempts")


def expire_leases(tx: Transaction, consumer: Consumer) -> None:
    """Take back what leases hold whose time is up, by the database's clock."""
    # A clock that was put back would keep them as much longer: from now on they have the time they were given.
    tx.run(
        "UPDATE leases SET expires = ? + seconds WHERE consumer = ? AND state = 'active' AND expires > ? + seconds + 1",
        (tx.now, consumer.id, tx.now),
    )
    # A holder that acknowledges in this moment has its lease's row.
    for (lease,) in tx.all(
        f"SELECT id FROM leases WHERE consumer = ? AND state = 'active' AND expires <= ? ORDER BY id{tx.lock_row()}",
        (consumer.id, tx.now),
    ):
        end_lease(tx, lease, "expired")
        requeue_rows(tx, consumer, select_rows(tx, "lease = ? ORDER BY seq", (lease,)), "expired", None)


def end_lease(tx: Transaction, lease: int, state: str) -> None:
    """A lease's last state."""
    tx.later("leases", "UPDATE leases SET state = ? WHERE id = ?", (state, lease))


def end_cooldowns(tx: Transaction, consumer: Consumer, most: int) -> bool:
    """Let records wait again that have rested long enough after a use; return whether none is left."""
    due = select_rows(
        tx, "consumer = ? AND state = 'cooling' AND until <= ? ORDER BY until, seq LIMIT ?", (consumer.id, tx.now, most)
    )
    change_rows(
        tx,
        consumer,
        [(row, row._replace(state=WAITING, until=None)) for row in due],
        [Event("rested", row.seq, consumer.id) for row in due],
    )
    return len(due) < most


def drop_over_age(tx: Transaction, consumer: Consumer, most: int) -> bool:
    """Drop what has waited longer than the consumer allows; return whether none is left."""
    age = consumer.settings.max_age
    if age is None:
        return True
    # Numbers are given in the order of admission: the oldest waiting ones come first.
    oldest = tx.all(
        "SELECT work.seq, records.admitted FROM work JOIN records ON records.seq = work.seq "
        "WHERE work.consumer = ? AND work.state = 'waiting' ORDER BY work.seq LIMIT ?",
        (consumer.id, most),
    )
    late = [seq for seq, admitted in oldest if admitted <= tx.now - age]
    drop_rows(tx, consumer, select_rows_by_seq(tx, consumer, late), "max_age")
    return len(late) < most


def drop_over_size(tx: Transaction, consumer: Consumer, most: int) -> bool:
    """Drop what is above the consumer's size; return whether nothing is left above it."""
    part = consumer.settings.max_size
    if part is None:
        return True
    over = count_rows(tx, consumer, WAITING, COOLING)[0] - part.size
    if over <= 0:
        return True
    order = "seq" if part.drop == "oldest" else "rank DESC, seq"
    surplus = select_rows(
        tx, f"consumer = ? AND state = 'waiting' ORDER BY {order} LIMIT ?", (consumer.id, min(over, most))
    )
    drop_rows(tx, consumer, surplus, "max_size")
    return len(surplus) < most


def drop_stale_rows(tx: Transaction, consumer: Consumer, floor: int | None, most: int) -> bool:
    """Drop waiting records whose oldest token is of a version below `floor`; return whether none is left."""
    if floor is None:
        return True
    # Looked for each time: what was leased or resting when the floor rose may have come back since.
    consumer.floor = floor if consumer.floor is None else max(floor, consumer.floor)
    stale = select_rows(
        tx, "consumer = ? AND state = 'waiting' AND version < ? ORDER BY seq LIMIT ?", (consumer.id, floor, most)
    )
    drop_rows(tx, consumer, stale, "stale")
    return len(stale) < most


def drop_abandoned_rows(tx: Transaction, consumer: Consumer) -> None:
    """Drop waiting records that abandoned versions of the policy sampled."""
    lineage = lineages.read_lineage(tx)
    if not lineage.number:
        return
    last = min(after for _, after, _ in lineage.branches)
    lowest = min(version for version, _, _ in lineage.branches)
    while True:
        waiting = tx.all(
            "SELECT work.seq, records.version_max FROM work JOIN records ON records.seq = work.seq "
            "WHERE work.consumer = ? AND work.state = 'waiting' AND work.seq > ? AND records.version_max > ? "
            "ORDER BY work.seq LIMIT 1000",
            (consumer.id, last, lowest),
        )
        details = {seq: abandoned_detail(version) for seq, version in waiting if lineage.is_abandoned(seq, version)}
        drop_rows(tx, consumer, select_rows_by_seq(tx, consumer, list(details)), "stale", details)
        if len(waiting) < 1000:
            return
        last = waiting[-1][0]


def abandoned_detail(version: int | None) -> dict[str, Any]:
    """What the ledger says of a record that is stale because an abandoned version sampled it."""
    return {"abandoned_version": version}


def version_floor(announced: int | None, max_staleness: int | None) -> int | None:
    """The oldest policy version that is fresh enough."""
    if announced is None or max_staleness is None:
        return None
    return max(min(announced - max_staleness, (1 << 63) - 1), -(1 << 63))


def announced_version(tx: Transaction) -> int | None:
    """The policy version that was announced last."""
    row = tx.one("SELECT value FROM meta WHERE key = 'policy_version'")
    return None if row is None else int(row[0])


def set_announced_version(tx: Transaction, version: int | None) -> None:
    """Write the announced version, or none."""
    tx.run("DELETE FROM meta WHERE key = 'policy_version'")
    if version is not None:
        tx.run("INSERT INTO meta (key, value) VALUES ('policy_version', ?)", (str(version),))


def announce_version(tx: Transaction, version: int) -> bool:
    """Write a version that is announced, and return whether it is another one; what is too old by it is dropped piece
    by piece, by `drop_stale_rows`."""
    now = announced_version(tx)
    if now is not None and version < now:
        raise BookError(f"announce: got version {version}, the book has {now}; only a rewind goes back")
    if now == version:
        return False
    lineages.settle_lineage(tx)
    set_announced_version(tx, version)
    record_events(tx, [Event("announced", detail={"version": version})])
    return True
