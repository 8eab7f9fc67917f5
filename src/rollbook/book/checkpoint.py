"""Checkpoints: named states of a book that belong to a trainer's checkpoints, and rewinding to them.

Invariant: after a rewind every consumer is in the state of the checkpoint, and its next leases are those that followed
it then. Nothing is erased: the ledger marks what is undone as voided, and the acknowledgements of a record that are not
voided are as many as its uses. Revisions, redactions and deletions are not undone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import compaction, queue, revision
from rollbook.book.consumer import (
    Consumer,
    ConsumerConfig,
    all_consumers,
    get_consumer,
    get_shift,
    save_consumer,
    save_settings,
)
from rollbook.book.disk import hit_failpoint
from rollbook.book.errors import ConflictError, CorruptBookError, OutcomeUnknownError
from rollbook.book.ledger import Transaction, check_text, check_writable, chunks, parse_object, served, write_once
from rollbook.book.read import read_numbers
from rollbook.core.checks import check_choice, check_int

if TYPE_CHECKING:
    from rollbook.book.book import Book

_CHUNK = 1000
_UNVOIDED = (
    "NOT EXISTS (SELECT 1 FROM events AS undone WHERE undone.seq = done.seq AND undone.kind = 'voided' "
    "AND undone.consumer = done.consumer AND undone.lease = done.lease AND undone.id > done.id)"
)
"""Condition on an acknowledgement `done`. A lease acknowledges a record once, so the lease identifies it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named point of a book.

    Attributes:
        name: Its name.
        created: Seconds since 1970, by the database's clock.
        event: Number of the ledger's event that created it; later events have larger numbers.
        records: Number of the last record that was admitted before it.
        policy_version: The announced policy version, or `None`.

    >>> import rollbook
    >>> with rollbook.open("memory:") as book:
    ...     _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
    ...     _ = book.checkpoint("step-100")
    ...     [(point.name, point.records, point.policy_version) for point in book.checkpoints()]
    [('step-100', 1, None)]
    """

    name: str
    created: float
    event: int
    records: int
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class RewindResult:
    """The result of a rewind.

    Attributes:
        checkpoint: Name of the checkpoint.
        acks: Acknowledgements that were voided.
        leases: Leases that were ended; their holders get `LeaseLostError`.
        later: Number of records after the checkpoint, which were kept or dropped.
        forgotten: Names of later checkpoints, which were deleted.
        lineage: Number of the new policy lineage: the number of rewinds so far.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> book.rewind(book.checkpoint("start"))
    RewindResult(checkpoint='start', acks=0, leases=0, later=0, forgotten=(), lineage=1)
    """

    checkpoint: str
    acks: int
    leases: int
    later: int
    forgotten: tuple[str, ...]
    lineage: int


class Point(NamedTuple):
    """A checkpoint as a transaction sees it."""

    name: str
    event: int
    seq: int
    created: float
    state: dict[str, Any]


def list_points(tx: Transaction) -> list[Point]:
    """Return every checkpoint, oldest first."""
    rows = tx.all("SELECT name, event, seq, made, state FROM checkpoints ORDER BY event")
    return [_parse_point(row) for row in rows]


def _parse_point(row: Sequence[Any]) -> Point:
    """Parse a checkpoint's row, which is not trusted."""
    name, event, seq, created, state = row
    fields = parse_object(state, f"checkpoint {name!r}")
    consumers, version = fields.get("consumers"), fields.get("policy_version")
    valid = isinstance(consumers, list) and all(
        isinstance(entry, dict) and type(entry.get("id")) is int for entry in consumers
    )
    if not valid or any(type(number) is not int for number in (event, seq, 0 if version is None else version)):
        raise CorruptBookError(f"checkpoint {name!r}: got {str(state)[:100]!r}, expected the state of every consumer")
    return Point(name, event, seq, created, fields)


def find_checkpoint(tx: Transaction, name: str) -> Point:
    """Return the checkpoint of this name, or raise `KeyError`."""
    if not isinstance(name, str):
        raise ValueError(f"checkpoint: got {name!r}, expected its name, as book.checkpoint gave it")
    check_text("checkpoint", name)
    row = tx.first("SELECT name, event, seq, made, state FROM checkpoints WHERE name = ?", (name,))
    if row is None:
        names = [repr(checkpoint) for (checkpoint,) in tx.all("SELECT name FROM checkpoints ORDER BY event")]
        raise KeyError(f"checkpoint: got {name!r}, the book has {', '.join(names) or 'none'}")
    return _parse_point(row)


# --- creating and forgetting ----------------------------------------------------------------------------------------


def make_checkpoint(book: Book, name: str | None, keep: int | None, token: str | None = None) -> str:
    """Implement `Book.checkpoint`; calls with the same `token` make one checkpoint."""
    if name is not None:
        check_text("checkpoint", name, 1, 200)
    if keep is not None:
        check_int("keep", keep, 1)
    # A call that repeats one whose outcome is unknown has its token.
    token = token or book.state.unsettled_checkpoints.pop(name, None) or os.urandom(6).hex()

    def transact(tx: Transaction) -> str:
        used = _find_by_token(tx, token)
        if used is not None:
            return used
        state = json.dumps(_capture_state(tx, book))
        used = name if name is not None and _exists(tx, name, state) else _insert_checkpoint(tx, name, state, token)
        if keep is not None:
            for old in list_points(tx)[:-keep]:
                _forget(tx, old)
        hit_failpoint("during checkpoint")
        return used

    try:
        return write_once(
            book.ledger,
            transact,
            lambda tx, used: _find_by_token(tx, token) == used,
            begin=lambda timeout: queue.write_drained(book, timeout),
        )
    except OutcomeUnknownError:
        book.state.unsettled_checkpoints[name] = token
        raise


def _find_by_token(tx: Transaction, token: str) -> str | None:
    """Return the name of the checkpoint that the call with this token created."""
    row = tx.first(
        "SELECT checkpoints.name FROM checkpoints JOIN events ON events.id = checkpoints.event WHERE events.detail = ?",
        (json.dumps({"token": token}),),
    )
    return None if row is None else str(row[0])


def _exists(tx: Transaction, name: str, state: str) -> bool:
    """Return whether an identical checkpoint exists; a different one of this name is an error."""
    row = tx.first("SELECT event, state FROM checkpoints WHERE name = ?", (name,))
    if row is None:
        return False
    last = tx.first("SELECT MAX(id) FROM events")[0]
    if row != (last, state):
        raise ConflictError(
            f"checkpoint: got {name!r}, which is the name of another point, {last - row[0]} events ago; expected a new "
            "name, or rollbook.book.forget_checkpoint first"
        )
    return True


def _insert_checkpoint(tx: Transaction, name: str | None, state: str, token: str) -> str:
    """Insert a checkpoint; `token` identifies the call, to find a checkpoint whose commit was not confirmed."""
    last = tx.first("SELECT COALESCE(MAX(id), 0) FROM events")[0]
    while name is None:
        last += 1
        name = f"checkpoint-{last}"
        if tx.first("SELECT 1 FROM checkpoints WHERE name = ?", (name,)):
            name = None
    queue.record_events(tx, [queue.Event("checkpoint", reason=name, detail={"token": token})])
    # Each checkpoint has its own event, and all later events have larger numbers.
    event, seq = tx.first("SELECT (SELECT MAX(id) FROM events), (SELECT COALESCE(MAX(seq), 0) FROM records)")
    tx.run(
        "INSERT INTO checkpoints (name, event, seq, made, state) VALUES (?, ?, ?, ?, ?)",
        (name, event, seq, tx.now, state),
    )
    return name


def _capture_state(tx: Transaction, book: Book) -> dict[str, Any]:
    return {
        "policy_version": queue.announced_version(tx),
        "consumers": [
            {
                "id": group.id,
                "settings": group.settings.to_json(),
                "state": group.state,
                "grouped": group.grouped,
                "inserts": group.inserts,
                "samples": group.samples,
                "floor": group.floor,
            }
            for group in all_consumers(tx)
        ],
    }


def list_checkpoints(book: Book) -> list[Checkpoint]:
    """Implement `Book.checkpoints`."""
    with book.ledger.read() as tx:
        points = list_points(tx)
    return [Checkpoint(p.name, p.created, p.event, p.seq, p.state["policy_version"]) for p in points]


@served
def forget_checkpoint(book: Book, name: str) -> None:
    """Forget a checkpoint; bytes that only it needs may be removed.

    Args:
        book: The book.
        name: The checkpoint.

    Raises:
        KeyError: The book has no checkpoint of this name.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> forget_checkpoint(book, book.checkpoint())
    >>> book.checkpoints()
    []
    """
    check_writable(book, "forget_checkpoint")
    with book.ledger.write() as tx:
        _forget(tx, find_checkpoint(tx, name))


def _forget(tx: Transaction, point: Point) -> None:
    tx.run("DELETE FROM checkpoints WHERE event = ?", (point.event,))
    queue.merge_undo(tx, point.event)
    queue.record_events(tx, [queue.Event("forgotten", reason=point.name)])


# --- rewinding ------------------------------------------------------------------------------------------------------


def rewind_book(book: Book, name: str, later: str) -> RewindResult:
    """Implement `Book.rewind`."""
    check_choice("later", later, ("keep", "drop"))
    with queue.write_drained(book) as tx:
        done = undo_work(tx, book, find_checkpoint(tx, name), later)
        hit_failpoint("during rewind")
    return done


def undo_work(tx: Transaction, book: Book, point: Point, later: str) -> RewindResult:
    """Restore the state of the checkpoint, within a transaction."""
    # Newest first: each undo log is merged into the one before it, until this checkpoint has all.
    forgotten = [later_point for later_point in reversed(list_points(tx)) if later_point.event > point.event]
    for later_point in forgotten:
        _forget(tx, later_point)
    lineage = queue.branch_lineage(tx, point.state["policy_version"], point.seq)
    queue.set_announced_version(tx, point.state["policy_version"])
    acks = _void_acks(tx, point)
    leases = void_leases(tx, point.name)
    later_count = tx.first("SELECT COUNT(*) FROM records WHERE seq > ? AND removed_reason IS NULL", (point.seq,))[0]
    if later == "drop":
        _mark_rewound(tx, point.seq)
    states = {consumer_state["id"]: consumer_state for consumer_state in point.state["consumers"]}
    revised = _list_revised(tx, point)
    # Records that are appended again get larger numbers, but the ranks of their former numbers.
    last = tx.first("SELECT COALESCE(MAX(seq), 0) FROM records")[0] if later == "drop" else point.seq
    for consumer in all_consumers(tx):
        if consumer.id in states:
            _restore_consumer(tx, book, consumer, states[consumer.id], point, revised, last)
        else:
            _reset_consumer(tx, book, consumer, point, last)
        save_consumer(tx, consumer)
    done = RewindResult(
        point.name, acks, leases, later_count, tuple(newer.name for newer in reversed(forgotten)), len(lineage.branches)
    )
    detail = {
        "lineage": len(lineage.branches),
        "event": point.event,
        "acks": acks,
        "leases": leases,
        later: later_count,
        "forgotten": list(done.forgotten),
    }
    queue.record_events(tx, [queue.Event("rewound", reason=point.name, detail=detail)])
    return done


def _void_acks(tx: Transaction, point: Point) -> int:
    return tx.count(
        "INSERT INTO events (time, seq, consumer, kind, reason, step, lease, detail) "
        f"SELECT {tx.now!r}, done.seq, done.consumer, 'voided', ?, done.step, done.lease, "
        '\'{"what": "trained", "event": \' || done.id || \'}\' '
        f"FROM events AS done WHERE done.id > ? AND done.kind = 'trained' AND {_UNVOIDED} ORDER BY done.id",
        (point.name, point.event),
    )


def void_leases(tx: Transaction, reason: str) -> int:
    """End every active lease; the caller has to free its rows."""
    tx.run(
        "INSERT INTO events (time, seq, consumer, kind, reason, lease, detail) "
        f"SELECT {tx.now!r}, seq, consumer, 'voided', ?, lease, '{{\"what\": \"leased\"}}' FROM queue "
        "WHERE lease IS NOT NULL ORDER BY consumer, seq",
        (reason,),
    )
    return tx.count("UPDATE leases SET state = 'voided' WHERE state = 'active'")


def _mark_rewound(tx: Transaction, seq: int) -> None:
    """Mark the records after the checkpoint as rewound, which frees their ids; deleted ones stay deleted."""
    tx.run(
        compaction.MARK_ORPHANS.format("SELECT DISTINCT segment, 0 FROM records WHERE seq > ? AND segment IS NOT NULL"),
        (seq,),
    )
    tx.run(
        "UPDATE records SET removed_reason = 'rewound', segment = NULL, start = NULL, size = NULL, slot = NULL, "
        "bytes = 0 WHERE seq > ? AND (removed_reason IS NULL OR removed_reason <> 'deleted')",
        (seq,),
    )
    tx.run("DELETE FROM media_uses WHERE seq > ?", (seq,))


def _list_revised(tx: Transaction, point: Point) -> list[int]:
    """Return the records of the checkpoint that were revised since and still exist."""
    rows = tx.all(
        "SELECT seq FROM records WHERE removed_reason IS NULL AND seq <= ? AND seq IN "
        "(SELECT seq FROM events WHERE id > ? AND kind IN ('revised', 'redacted')) ORDER BY seq",
        (point.seq, point.event),
    )
    return [seq for (seq,) in rows]


def _shift_state(state: dict[str, Any], point: Point, last: int) -> dict[str, Any]:
    """Shift a consumer's state, so that the record after number `last` follows the checkpoint's last record."""
    if last == point.seq:
        return dict(state)
    return {
        **state,
        "shifts": [*state.get("shifts", ()), last, last - point.seq + get_shift(state, point.seq)],
    }


def _reset_consumer(tx: Transaction, book: Book, consumer: Consumer, point: Point, last: int) -> None:
    """Reset a consumer that was created after the checkpoint, except its settings."""
    for table in ("queue", "groups", "tallies", "queue_before", "groups_before"):
        tx.run(f"DELETE FROM {table} WHERE consumer = ?", (consumer.id,))
    consumer.state, consumer.grouped, consumer.floor = _shift_state({}, point, last), False, None
    consumer.inserts = consumer.samples = 0
    tx.run("DELETE FROM inbox WHERE consumer = ?", (consumer.id,))
    queue.backfill_consumer(tx, consumer.id)


def _restore_consumer(
    tx: Transaction,
    book: Book,
    consumer: Consumer,
    was: dict[str, Any],
    point: Point,
    revised: Sequence[int],
    last: int,
) -> None:
    settings = ConsumerConfig.from_json(was["settings"])
    if settings != consumer.settings:
        save_settings(tx, consumer, settings)
    # Groups are restored from the undo log, not refreshed for each change of a member.
    consumer.grouped = False
    consumer.state = _shift_state(was["state"], point, last)
    lost = _restore_rows(tx, consumer, point)
    gids = dict.fromkeys(row.gid for rows in lost.values() for row in rows)
    gids.update(dict.fromkeys(free_leased(tx, consumer)))
    mine = (point.event, consumer.id)
    source = "FROM queue_before WHERE checkpoint = ? AND consumer = ? AND state"
    leased = tx.first(f"SELECT COUNT(*) {source} = 'leased'", mine)[0]
    # The undo log keeps rows that were leased, since they wait now; the others are as they were.
    tx.run(f"DELETE {source} <> 'leased'", mine)
    consumer.inserts, consumer.samples, consumer.floor = was["inserts"], was["samples"] - leased, was["floor"]
    if was["grouped"]:
        tx.run("DELETE FROM groups WHERE consumer = ? AND seq > ?", (consumer.id, point.seq))
        gids = dict.fromkeys([*queue.restore_groups(tx, *mine), *gids])
    else:
        tx.run("DELETE FROM groups WHERE consumer = ?", (consumer.id,))
        tx.run("DELETE FROM groups_before WHERE checkpoint = ? AND consumer = ?", mine)
    for reason, rows in lost.items():
        queue.drop_rows(tx, consumer, rows, reason)
    other = _apply_revisions(tx, book, consumer, point, revised)
    inserts = consumer.inserts
    later = _offer_later_records(tx, book, consumer, point)
    more = consumer.inserts > inserts
    consumer.grouped = was["grouped"]
    if consumer.grouped:
        queue.refresh_groups(tx, consumer, dict.fromkeys([*gids, *other, *later]), set(other))
    if more:
        while not queue.drop_over_size(tx, consumer, _CHUNK):
            pass


def _restore_rows(tx: Transaction, consumer: Consumer, point: Point) -> dict[str, list[queue.Row]]:
    """Restore rows as of the checkpoint, leased ones as waiting; drop those whose bytes were removed since."""
    lost: dict[str, list[queue.Row]] = {}
    last = 0
    while True:
        rows = tx.all(
            f"SELECT {queue.ROW_COLUMNS} FROM queue_before WHERE checkpoint = ? AND consumer = ? AND seq > ? "
            f"ORDER BY seq LIMIT {_CHUNK}",
            (point.event, consumer.id, last),
        )
        if not rows:
            return lost
        then = {row.seq: row for row in (queue.Row(*values) for values in rows)}
        removed_reasons: dict[int, str] = {}
        for marks, chunk in chunks(list(then)):
            removed_reasons.update(
                tx.all(
                    f"SELECT seq, removed_reason FROM records WHERE removed_reason IS NOT NULL AND seq IN ({marks})",
                    chunk,
                )
            )
        moves, events = [], []
        for now in queue.select_rows_by_seq(tx, consumer, list(then)):
            new = _unlease(then[now.seq])
            if new.seq in removed_reasons and new.state in (queue.WAITING, queue.COOLING):
                lost.setdefault(removed_reasons[new.seq], []).append(new)
            if new != now:
                moves.append((now, new))
            if now.state == queue.DROPPED != new.state:
                detail = {"what": queue.DROPPED, "why": now.reason}
                events.append(queue.Event("voided", now.seq, consumer.id, point.name, detail=detail))
        queue.change_rows(tx, consumer, moves, events)
        last = rows[-1][0]


def _unlease(row: queue.Row) -> queue.Row:
    return row._replace(state=queue.WAITING, lease=None) if row.state == queue.LEASED else row


def free_leased(tx: Transaction, consumer: Consumer) -> list[str]:
    """Return all leased rows to the queue with their former ranks; return their groups."""
    rows = queue.select_rows(tx, "lease IS NOT NULL AND consumer = ? ORDER BY seq", (consumer.id,))
    queue.change_rows(tx, consumer, [(row, _unlease(row)) for row in rows], [])
    consumer.samples -= len(rows)
    return list(dict.fromkeys(row.gid for row in rows))


def _apply_revisions(
    tx: Transaction, book: Book, consumer: Consumer, point: Point, revised: Sequence[int]
) -> list[str]:
    """Apply revisions made after the checkpoint, which a rewind does not undo, to restored rows.

    Returns:
        The groups of records whose numbers changed or that wait again.
    """
    returned = {
        seq
        for (seq,) in tx.all(
            "SELECT DISTINCT seq FROM events WHERE id > ? AND kind = 'returned' AND consumer = ?",
            (point.event, consumer.id),
        )
    }
    key = consumer.settings.sampler.key
    then = set(queue.select_rows_by_seq(tx, consumer, revised))
    for again in (False, True):
        seqs = [seq for seq in revised if (seq in returned) == again]
        for start in range(0, len(seqs), _CHUNK):
            piece = seqs[start : start + _CHUNK]
            values = None if key is None else read_numbers(book, tx, piece, key)
            revision.apply_revisions(tx, consumer, piece, values, again)
    return [row.gid for row in queue.select_rows_by_seq(tx, consumer, revised) if row not in then]


def _offer_later_records(tx: Transaction, book: Book, consumer: Consumer, point: Point) -> list[str]:
    """Queue the records after the checkpoint like new records, and return their groups."""
    lineage = queue.read_lineage(tx)
    bounded = consumer.settings.max_staleness is not None
    floor = queue.version_floor(lineage.announced, consumer.settings.max_staleness)
    key = consumer.settings.sampler.key
    gids: dict[str, None] = {}
    last = point.seq
    while True:
        rows = queue.select_rows(tx, f"consumer = ? AND seq > ? ORDER BY seq LIMIT {_CHUNK}", (consumer.id, last))
        if not rows:
            return list(gids)
        seqs = [row.seq for row in rows]
        removed_reasons: dict[int, str | None] = {}
        newest: dict[int, int | None] = {}
        for marks, chunk in chunks(seqs):
            for seq, reason, version in tx.all(
                f"SELECT seq, removed_reason, version_max FROM records WHERE seq IN ({marks})", chunk
            ):
                removed_reasons[seq], newest[seq] = reason, version
        stored = [seq for seq in seqs if removed_reasons[seq] is None]
        removed_reasons.update(dict.fromkeys(queue.find_quarantined(tx, stored), queue.QUARANTINED))
        numbers = {} if key is None else dict(zip(stored, read_numbers(book, tx, stored, key), strict=True))
        inserts, samples = consumer.inserts, consumer.samples
        moves, events = [], []
        for now in rows:
            outdated = floor is not None and now.version is not None and now.version < floor
            abandoned = bounded and lineage.is_abandoned(now.seq, newest[now.seq])
            reason_dropped = removed_reasons[now.seq] or ("stale" if outdated or abandoned else None)
            detail = queue.abandoned_detail(newest[now.seq]) if abandoned else None
            new = queue.new_row(consumer, now.seq, now.gid, now.version, numbers.get(now.seq), reason_dropped)
            moves.append((now, new))
            inserts += new.state != queue.DROPPED
            if new.state == queue.DROPPED and (now.state, now.reason) != (new.state, new.reason):
                events.append(queue.Event(queue.DROPPED, now.seq, consumer.id, reason_dropped, detail=detail))
            elif now.state == queue.DROPPED != new.state:
                reoffer_detail = {"what": queue.DROPPED, "why": now.reason}
                events.append(queue.Event("voided", now.seq, consumer.id, point.name, detail=reoffer_detail))
        queue.change_rows(tx, consumer, moves, events)
        consumer.inserts, consumer.samples = inserts, samples
        gids.update(dict.fromkeys(row.gid for row in rows))
        last = seqs[-1]


# --- trained steps --------------------------------------------------------------------------------------------------


@served(repeat=True)
def trained_steps(book: Book, consumer: str = "train") -> dict[str, list[int | None]]:
    """Return the optimizer steps in which each record was trained on, without those that a rewind voided.

    Args:
        book: The book.
        consumer: The consumer group.

    Returns:
        The steps by id.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"suffix": "a"}, tokens=[1, 2, 3]))
    >>> _ = book.lease(1).ack(step=7)
    >>> trained_steps(book)
    {'//0/0/a': [7]}
    """
    with book.ledger.read() as tx:
        group = get_consumer(tx, consumer)
        rows = tx.all(
            "SELECT records.uid, done.step FROM events AS done JOIN records ON records.seq = done.seq "
            f"WHERE done.kind = 'trained' AND done.consumer = ? AND {_UNVOIDED} ORDER BY done.id",
            (group.id,),
        )
    steps: dict[str, list[int | None]] = {}
    for uid, step in rows:
        steps.setdefault(uid, []).append(step)
    return steps
