"""The queue of each consumer: inbox, rows of `queue`, groups, their undo log, quarantine and policy lineage.

The state of a record for a consumer is one row of `queue`. An append only adds the range of its record numbers to
`inbox`, one row per consumer, so that concurrent appends do not change the same row. A lease, and any other change of
the queue, first drains the inbox: each record gets a row of `queue`, ranked by the sampler.

In this order: undo log, groups, policy lineage, rows of `queue`, maintenance (expired leases, cooldowns, size, age and
staleness), announced version, quarantine, inbox.

Invariants:

- Rows of `queue` change only through `enter_rows` and `change_rows`, which update `tallies` in the same transaction and
  write an event for each: for every consumer, admitted = waiting + cooling + leased + trained + dropped.
- For every consumer, a training record is in exactly one of `queue` and `inbox`. A transaction that drains holds the
  consumer's row, or is exclusive.
- A group's size counts runs, not rows, and every admitted run counts, also failed, filtered and stale ones. A group is
  ready when it is complete (or due), at least one of its rows is waiting and none is leased.
- For every checkpoint, a row of `queue` or `groups` that existed then is unchanged, or its value at that checkpoint is
  in the undo log, under that checkpoint or a later one. Without a checkpoint nothing is logged.
- A quarantined record can be read and queried, but is not leased until it is released.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import index_columns
from rollbook.book.consumer import (
    SELECT_CONSUMERS,
    Consumer,
    ConsumerConfig,
    ConsumerSetting,
    all_consumers,
    create_consumer,
    find_consumer,
    get_consumer,
    parse_consumers,
    save_consumer,
    save_settings,
)
from rollbook.book.errors import BookError, CorruptBookError
from rollbook.book.ledger import TABLES, LedgerValue, Transaction, chunks, parse_object, served, yield_to_writers
from rollbook.book.read import read_numbers
from rollbook.book.sampler import OldestPolicy
from rollbook.core.columns import texts

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experiences import Experiences
    from rollbook.core.wire import RowLayout


# --- undo log -------------------------------------------------------------------------------------------------------

QUEUE_TABLE, GROUPS_TABLE = "queue", "groups"
UNDO_COLUMNS = {table: [column.split()[0] for column in TABLES[table][:-1]] for table in (QUEUE_TABLE, GROUPS_TABLE)}
_UNDO_LISTED = {table: ", ".join(names) for table, names in UNDO_COLUMNS.items()}
_UNDO_SELECTED = {table: ", ".join(f"now.{name}" for name in names) for table, names in UNDO_COLUMNS.items()}


def save_undo(tx: Transaction, table: str, consumer: int, key: str, values: Sequence[Any]) -> None:
    """Copy rows that are about to change to the undo log, unless they have changed since the last checkpoint.

    Args:
        tx: The transaction.
        table: `QUEUE_TABLE` or `GROUPS_TABLE`.
        consumer: The consumer's number.
        key: The column that selects the rows, `"seq"` or `"gid"`.
        values: Values of that column.
    """
    if not values:
        return
    in_values = tx.in_ints if key == "seq" else tx.in_texts
    # Rows of records that were appended after the checkpoint did not exist then.
    tx.defer(
        f"{table}_before",
        f"INSERT INTO {table}_before (checkpoint, {_UNDO_LISTED[table]}) SELECT point.event, {_UNDO_SELECTED[table]} "
        f"FROM {table} AS now CROSS JOIN (SELECT event, seq FROM checkpoints ORDER BY event DESC LIMIT 1) AS point "
        f"WHERE now.consumer = ? AND now.{key} {in_values} AND now.seq <= point.seq ON CONFLICT DO NOTHING",
        (consumer, tx.array(values)),
    )


def merge_undo(tx: Transaction, checkpoint: int) -> None:
    """Move the undo log of a checkpoint that is deleted to the checkpoint before it, which may need it."""
    older = tx.first("SELECT event, seq FROM checkpoints WHERE event < ? ORDER BY event DESC LIMIT 1", (checkpoint,))
    for table, listed in _UNDO_LISTED.items():
        if older is not None:
            tx.run(
                f"INSERT INTO {table}_before (checkpoint, {listed}) SELECT {int(older[0])}, {listed} "
                f"FROM {table}_before WHERE checkpoint = ? AND seq <= ? ON CONFLICT DO NOTHING",
                (checkpoint, older[1]),
            )
        tx.run(f"DELETE FROM {table}_before WHERE checkpoint = ?", (checkpoint,))


def restore_groups(tx: Transaction, checkpoint: int, consumer: int) -> list[str]:
    """Restore the groups as of the checkpoint, and return those that had changed."""
    assignments = ", ".join(f"{name} = excluded.{name}" for name in UNDO_COLUMNS[GROUPS_TABLE][2:])
    parameters = (checkpoint, consumer)
    tx.run(
        f"INSERT INTO groups ({_UNDO_LISTED[GROUPS_TABLE]}) SELECT {_UNDO_LISTED[GROUPS_TABLE]} FROM groups_before "
        f"WHERE checkpoint = ? AND consumer = ? ON CONFLICT (consumer, gid) DO UPDATE SET {assignments}",
        parameters,
    )
    gids = tx.all("SELECT gid FROM groups_before WHERE checkpoint = ? AND consumer = ? ORDER BY seq, gid", parameters)
    tx.run("DELETE FROM groups_before WHERE checkpoint = ? AND consumer = ?", parameters)
    return [gid for (gid,) in gids]


# --- groups ---------------------------------------------------------------------------------------------------------

UNRANKED = math.inf
"""The rank of a group that has no rank yet, or needs a new one."""


def refresh_groups(tx: Transaction, consumer: Consumer, gids: Iterable[str], rerank: Collection[str] = ()) -> None:
    """Update groups whose members changed.

    Args:
        tx: The transaction.
        consumer: A consumer that leases by group.
        gids: The groups.
        rerank: Those of them that need a new rank, since the uses or values of members changed.
    """
    gids = list(gids)
    if not gids:
        return
    save_undo(tx, GROUPS_TABLE, consumer.id, "gid", gids)
    parameters = (consumer.id, tx.array(gids))
    queue_rows, record_rows, group_rows = tx.query_many(
        (
            # Without ORDER BY, for which SQLite would read all rows of the consumer.
            f"SELECT gid, state, seq, version, value, uses FROM queue WHERE consumer = ? AND gid {tx.in_texts}",
            parameters,
        ),
        (
            # Without runs that are still in the inbox: a group that they complete would be leased without them.
            "SELECT records.gid, COUNT(DISTINCT run), MAX(group_size), MIN(records.seq), MIN(admitted) FROM records "
            "JOIN queue ON queue.consumer = ? AND queue.seq = records.seq "
            f"WHERE records.gid {tx.in_texts} AND evaluation = 0 "
            "AND (removed_reason IS NULL OR removed_reason <> 'rewound') GROUP BY 1",
            parameters,
        ),
        (
            f"SELECT gid, ready, rank, weight FROM groups WHERE consumer = ? AND gid {tx.in_texts}",
            parameters,
        ),
    )
    members: defaultdict[str, list[Any]] = defaultdict(list)
    for gid, *member in sorted(queue_rows, key=itemgetter(2)):
        members[gid].append(member)
    totals: dict[str, Sequence[Any]] = {gid: total for gid, *total in record_rows}
    old_groups: dict[str, Sequence[Any]] = {gid: group for gid, *group in group_rows}
    rows = []
    empty = []
    for gid in gids:
        row = _refresh_group(tx, consumer, gid, members[gid], totals.get(gid), old_groups.get(gid), gid in rerank)
        if row is None:
            empty.append(gid)
        else:
            rows.append(row)
    if empty:
        tx.run(f"DELETE FROM groups WHERE consumer = ? AND gid {tx.in_texts}", (consumer.id, tx.array(empty)))
    tx.insert(
        "groups",
        ("consumer", "gid", "seq", "size", "runs", "ready", "rank", "weight", "due"),
        rows,
        "ON CONFLICT (consumer, gid) DO UPDATE SET size = excluded.size, runs = excluded.runs, "
        "ready = excluded.ready, rank = excluded.rank, weight = excluded.weight, due = excluded.due",
    )


def _refresh_group(
    tx: Transaction,
    consumer: Consumer,
    gid: str,
    members: Sequence[Any],
    total: Sequence[Any] | None,
    old_group: Sequence[Any] | None,
    rerank: bool,
) -> tuple[Any, ...] | None:
    """Compute a group's row of `groups`; `None` if all of its records were rewound.

    Args:
        tx: The transaction.
        consumer: The consumer.
        gid: The group.
        members: (state, record number, version, value, uses) of its rows of `queue`.
        total: Its number of runs, size, first record and time of the first append.
        old_group: (ready, rank, weight) of its row so far.
        rerank: Whether it needs a new rank.
    """
    runs, size, first, since = total or (0, None, None, None)
    was_ready, rank, old_weight = old_group or (0, UNRANKED, 1.0)
    types = {type(rank), type(old_weight), type(size or 0), type(since or 0)}
    if type(was_ready) is not int or not types <= {int, float}:
        raise CorruptBookError(f"groups: {gid!r}: got {str((old_group, size, since))[:100]}, expected numbers")
    settings = consumer.settings
    size = size or settings.group_size
    uses, versions, values, leased = [], [], [], False
    for state, _, version, value, used in members:
        leased |= state == LEASED
        if state == WAITING:
            uses.append(used)
            if version is not None:
                versions.append(version)
            if value is not None:
                values.append(value)
    due = None if settings.partial_after is None or since is None else since + settings.partial_after
    # A group of unknown size is always complete.
    complete = size is None or runs >= size or (due is not None and due <= tx.now)
    ready = complete and bool(uses) and not leased and first is not None
    weight = old_weight
    if rerank or not (uses or leased):
        rank = UNRANKED
    if ready and first is not None:
        sampler = settings.sampler
        mean = sum(values) / len(values) if values else None
        pick = min if isinstance(sampler, OldestPolicy) else max
        item = consumer.item(first, min(uses), pick(versions, default=None), mean, group=True)
        weight = sampler.weight(item)
        # Random and balanced samplers keep the rank, also of groups that were returned; others compute it again.
        if not sampler.keeps_rank or rank == UNRANKED or weight != old_weight:
            rank = sampler.rank(item, consumer.state)
    if ready or was_ready:
        count, weights = consumer.state.get("ready", (0, 0.0))
        count += int(ready) - was_ready
        consumer.state["ready"] = (count, weights + (ready * weight - was_ready * old_weight) if count else 0.0)
    if first is None:
        return None
    return consumer.id, gid, first, size, runs, int(ready), rank, weight, None if complete else due


def release_due_groups(tx: Transaction, consumer: Consumer, limit: int) -> bool:
    """Make incomplete groups ready after `partial_after` seconds; return whether none is left."""
    due = tx.all(
        "SELECT gid FROM groups WHERE consumer = ? AND ready = 0 AND due IS NOT NULL AND due <= ? ORDER BY due, seq "
        "LIMIT ?",
        (consumer.id, tx.now, limit),
    )
    refresh_groups(tx, consumer, [gid for (gid,) in due])
    return len(due) < limit


def begin_groups(tx: Transaction, consumer: Consumer) -> None:
    """Start to maintain groups for a consumer that leases by group for the first time, or rank them again.

    `build_groups` creates the groups of existing rows. Groups of later rows are created with the rows.
    """
    consumer.grouped = True
    (last,) = tx.first("SELECT MAX(seq) FROM queue WHERE consumer = ?", (consumer.id,))
    if last is not None:
        consumer.state["ungrouped"], consumer.state["ungrouped_last"] = 1, last


def build_groups(tx: Transaction, consumer: Consumer, limit: int) -> bool:
    """Create the groups of rows that existed at `begin_groups`, in order; return whether all are done."""
    start = consumer.state.get("ungrouped")
    if start is None:
        return True
    rows = tx.all(
        "SELECT seq, gid FROM queue WHERE consumer = ? AND seq >= ? AND seq <= ? ORDER BY seq LIMIT ?",
        (consumer.id, start, consumer.state.get("ungrouped_last", start), limit),
    )
    gids = dict.fromkeys(gid for _, gid in rows)
    refresh_groups(tx, consumer, gids, gids)
    if len(rows) < limit:
        del consumer.state["ungrouped"]
        consumer.state.pop("ungrouped_last", None)
        return True
    consumer.state["ungrouped"] = rows[-1][0] + 1
    return False


def rebuild_groups(tx: Transaction, consumer: Consumer) -> None:
    """Rebuild all groups, within an exclusive transaction."""
    tx.run("DELETE FROM groups WHERE consumer = ?", (consumer.id,))
    consumer.state.pop("ready", None)
    begin_groups(tx, consumer)
    while not build_groups(tx, consumer, 1000):
        pass


# --- policy lineage -------------------------------------------------------------------------------------------------

LINEAGE_KEY = "policy_lineage"
"""The key of a record's `info` with the number of the lineage that sampled it."""


@dataclass(slots=True)
class Lineage:
    """The policy versions and records that rewinds of a book abandoned.

    A rewind starts a new lineage of policy versions, which repeats version numbers of the old one. The fields below
    determine to which lineage a record belongs.

    >>> lineage = Lineage(announced=5, branches=[[5, 100, 200]], top=10, seen=200)
    >>> lineage.is_abandoned(150, 6), lineage.is_abandoned(150, 5), lineage.is_abandoned(250, 7)
    (True, False, True)
    """

    announced: int | None
    branches: list[list[int]] = field(default_factory=list)
    """[version, after, last] of each rewind: version and last record of the checkpoint, last record at the rewind."""
    top: int | None = None
    """The highest version that an abandoned lineage announced, or `None`."""
    seen: int = 0
    """The last record at the last rewind or announcement."""
    late: list[list[int]] = field(default_factory=list)
    """[version, top, after, last]: ranges of records whose versions, up to `top`, were not yet announced again."""
    named: list[list[int]] = field(default_factory=list)
    """[abandoned, after, last]: ranges of records with a lineage in `info`, which overrides the other rules."""

    def is_abandoned(self, seq: int, version: int | None) -> bool:
        """Return whether a record was sampled by an abandoned version; `version` is its newest one."""
        if version is None:
            return False
        if any(version > branch and after < seq <= last for branch, after, last in self.branches):
            return True
        for abandoned, after, last in self.named:
            if after < seq <= last:
                return bool(abandoned)
        if seq > self.seen:
            return self.top is not None and (self.announced or 0) < version <= self.top
        return any(low < version <= top and after < seq <= last for low, top, after, last in self.late)

    def mark_abandoned(
        self, tx: Transaction, records: Experiences | RowLayout, first_seq: int, versions: Sequence[int | None]
    ) -> set[int]:
        """Return the indices of new records, numbered from `first_seq` on, that abandoned versions sampled.

        Records that name their lineage are remembered.
        """
        named_before = len(self.named)
        for i, lineage in enumerate(_named_lineages(records)):
            version = versions[i]
            if version is None or lineage is None or lineage not in range(len(self.branches) + 1):
                continue
            abandoned = any(version > branch for branch, _, _ in self.branches[int(lineage) :])
            if abandoned != self.is_abandoned(first_seq + i, version):
                self.named.append([int(abandoned), first_seq + i - 1, first_seq + i])
        if len(self.named) > named_before:
            self.named = _join_ranges(self.named)
            save_lineage(tx, self)
        return {i for i, version in enumerate(versions) if self.is_abandoned(first_seq + i, version)}

    def clipped(self, last: int) -> Lineage:
        """Return the lineage of a copy of the book that ends with record `last`."""

        def clip(ranges: list[list[int]]) -> list[list[int]]:
            return [[*values, min(after, last), min(stop, last)] for *values, after, stop in ranges]

        return Lineage(self.announced, clip(self.branches), None, last, clip(self.late), clip(self.named))


def _named_lineages(records: Experiences | RowLayout) -> list[float | None]:
    """Return the lineage in each record's `info`."""
    column = records.column("info")
    if column is None or not any(text is not None and LINEAGE_KEY in text for text in texts(column)):
        return [None] * len(records)
    return index_columns.number_column(records, f"info.{LINEAGE_KEY}")


def _join_ranges(named: list[list[int]]) -> list[list[int]]:
    """Merge adjacent ranges."""
    joined: list[list[int]] = []
    for abandoned, after, last in named:
        if joined and joined[-1][0] == abandoned and joined[-1][2] == after:
            joined[-1][2] = last
        else:
            joined.append([abandoned, after, last])
    return joined


def names_lineage(records: Experiences | RowLayout) -> bool:
    """Return whether any of these records has a lineage in its `info`."""
    return any(lineage is not None for lineage in _named_lineages(records))


def read_lineage(tx: Transaction, lock: bool = False) -> Lineage:
    """Read the announced policy version and the abandoned lineages.

    Args:
        tx: The transaction.
        lock: Lock the rows until the end of the transaction.
    """
    end = f" ORDER BY key{tx.for_update}" if lock else ""
    return parse_lineage(dict(tx.all(f"SELECT key, value FROM meta WHERE key IN ('policy_version', 'lineage'){end}")))


@served(repeat=True)
def read_policy_lineage(book: Book) -> int:
    """Return the number of the policy's lineage, which every rewind increases.

    If rollout workers read it together with `Book.policy_version` and write it to `info["policy_lineage"]` of their
    records, the book detects records of an abandoned version whenever they are appended.

    Args:
        book: The book.

    Returns:
        0 for a book that was never rewound.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.rewind(book.checkpoint())
    >>> read_policy_lineage(book)
    1
    """
    with book.ledger.read() as tx:
        return len(read_lineage(tx).branches)


def parse_lineage(values: dict[str, str]) -> Lineage:
    """Parse the announced version and the lineage from rows of `meta`."""
    announced = int(values["policy_version"]) if "policy_version" in values else None
    if "lineage" not in values:
        return Lineage(announced)
    state: dict[str, Any] = parse_object(values["lineage"], "meta: lineage")
    lists: dict[str, Any] = {name: state.get(name) for name in ("branches", "late", "named")}
    numbers = [state.get("seen"), 0 if state.get("top") is None else state.get("top")]
    for (name, entries), width in zip(lists.items(), (3, 4, 3), strict=True):
        if not isinstance(entries, list) or not all(
            isinstance(entry, list) and len(entry) == width for entry in entries
        ):
            raise CorruptBookError(
                f"meta: lineage: {name}: got {str(entries)[:100]!r}, expected lists of {width} numbers"
            )
        numbers += [number for entry in entries for number in entry]
    if any(type(number) is not int for number in numbers):
        raise CorruptBookError(f"meta: lineage: got {values['lineage'][:100]!r}, expected integers")
    return Lineage(announced, top=state["top"], seen=state["seen"], **lists)


def save_lineage(tx: Transaction, lineage: Lineage) -> None:
    """Write the lineage; delete it if there was no rewind."""
    if not lineage.branches:
        tx.run("DELETE FROM meta WHERE key = 'lineage'")
        return
    state = asdict(lineage)
    del state["announced"]
    tx.run(
        "INSERT INTO meta (key, value) VALUES ('lineage', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (json.dumps(state),),
    )


def _last_seq(tx: Transaction) -> int:
    return int(tx.first("SELECT COALESCE(MAX(seq), 0) FROM records")[0])


def _close_lineage(tx: Transaction, lineage: Lineage) -> None:
    """Add to `late` the records since `seen` whose versions only an abandoned lineage has announced so far."""
    low, top, last = lineage.announced or 0, lineage.top, _last_seq(tx)
    if top is not None and tx.first(
        "SELECT 1 FROM records WHERE seq > ? AND version_max > ? AND version_max <= ? LIMIT 1", (lineage.seen, low, top)
    ):
        lineage.late.append([low, top, lineage.seen, last])
    lineage.seen = last


def branch_lineage(tx: Transaction, version: int | None, seq: int) -> Lineage:
    """Begin a lineage, before a rewind restores the announced version.

    Args:
        tx: The transaction.
        version: The announced version of the checkpoint; `None` counts as 0.
        seq: The last record of the checkpoint.
    """
    lineage = read_lineage(tx)
    _close_lineage(tx, lineage)
    lineage.branches.append([version or 0, seq, lineage.seen])
    if lineage.announced is not None:
        lineage.top = max(lineage.announced, lineage.top or 0)
    lineage.announced = version
    save_lineage(tx, lineage)
    return lineage


# --- rows of `queue` -------------------------------------------------------------------------------------------------

WAITING, COOLING, LEASED, TRAINED, DROPPED = "waiting", "cooling", "leased", "trained", "dropped"
STATES = (WAITING, COOLING, LEASED, TRAINED, DROPPED)


class Row(NamedTuple):
    """The state of one record for one consumer."""

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
_NoneType = type(None)
_OPTIONAL_INT, _OPTIONAL_FLOAT = (int, _NoneType), (float, _NoneType)
_ROW_TYPES: tuple[Any, ...] = (
    int,
    str,
    str,
    (str, _NoneType),
    float,
    _OPTIONAL_FLOAT,
    float,
    _OPTIONAL_INT,
    int,
    int,
    _OPTIONAL_INT,
    _OPTIONAL_FLOAT,
)


class Event(NamedTuple):
    """An event to write to the ledger."""

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
    rows = []
    for event in events:
        detail = None if event.detail is None else json.dumps(event.detail)
        rows.append((tx.now, *event[:6], detail))
    tx.insert("events", _EVENT_COLUMNS, rows)


def select_rows(tx: Transaction, condition: str, values: Sequence[Any]) -> list[Row]:
    """Select rows of `queue` by a condition."""
    return check_rows(tx.all(f"SELECT {ROW_COLUMNS} FROM queue WHERE {condition}", values))


def check_rows(values: Iterable[Any]) -> list[Row]:
    """Parse rows of `queue` and check their types, since the ledger is not trusted."""
    rows = list(map(Row._make, values))
    for row in rows:
        if not all(map(isinstance, row, _ROW_TYPES)):
            # SQLite also stores text in columns of numbers.
            raise CorruptBookError(
                f"queue: record number {row.seq}: got {str(row)[:200]}, expected the types of its columns"
            )
    return rows


def select_rows_by_seq(tx: Transaction, consumer: Consumer, seqs: Sequence[int]) -> list[Row]:
    """Return the rows of these records, in the order of their numbers."""
    rows: list[Row] = []
    for _, chunk in chunks(sorted(seqs), 5000):
        rows += select_rows(tx, f"consumer = ? AND seq {tx.in_ints} ORDER BY seq", (consumer.id, tx.array(chunk)))
    return rows


def add_counts(tx: Transaction, changes: Sequence[tuple[int, str, str, int, float, int]]) -> None:
    """Add to counts: (consumer, state, reason, number, weight, `tx.shard`)."""
    # Sorted, so that two transactions with the same shard never deadlock.
    tx.insert(
        "tallies",
        ("consumer", "state", "reason", "n", "weight", "shard"),
        sorted(changes),
        "ON CONFLICT (consumer, state, reason, shard) DO UPDATE SET n = tallies.n + excluded.n, "
        # Without rows, set the weight to 0 instead of accumulated rounding errors.
        "weight = CASE tallies.n + excluded.n WHEN 0 THEN 0 ELSE tallies.weight + excluded.weight END",
    )


def recount_all(tx: Transaction) -> None:
    """Recompute all tallies from `queue` and `records`, within an exclusive transaction."""
    tx.run("DELETE FROM tallies")
    tx.run(
        "INSERT INTO tallies (consumer, state, reason, shard, n, weight) SELECT consumer, state, "
        "COALESCE(reason, ''), 0, COUNT(*), SUM(weight) FROM queue GROUP BY 1, 2, 3"
    )
    tx.run(
        "INSERT INTO tallies (consumer, state, reason, shard, n, weight) SELECT 0, "
        "CASE WHEN evaluation = 0 THEN 'admitted' ELSE 'evaluation' END, '', 0, COUNT(*), 0 FROM records GROUP BY 2"
    )


def count_rows(tx: Transaction, consumer: Consumer, *states: str) -> tuple[int, float]:
    """Return how many rows are in any of these states, and their total weight."""
    marks = ",".join("?" * len(states))
    row = tx.first(
        f"SELECT COALESCE(SUM(n), 0), COALESCE(SUM(weight), 0) FROM tallies WHERE consumer = ? AND state IN ({marks})",
        (consumer.id, *states),
    )
    return int(row[0]), float(row[1])


def enter_rows(
    tx: Transaction, consumer: Consumer, rows: Sequence[Row], details: Mapping[int, dict[str, Any]] | None = None
) -> None:
    """Insert rows of records that are new to this consumer, and refresh their groups if it leases by group.

    Args:
        tx: The transaction.
        consumer: The consumer.
        rows: One row per record.
        details: Details of the events of dropped records, by record number.
    """
    details = details or {}
    changes: dict[tuple[str, str], list[float]] = {}
    gids: dict[str, None] = {}
    dropped = []
    for row in rows:
        entry = changes.setdefault((row.state, row.reason or ""), [0, 0.0])
        entry[0] += 1
        entry[1] += row.weight
        gids[row.gid] = None
        if row.state == DROPPED:
            dropped.append(Event(DROPPED, row.seq, consumer.id, row.reason, detail=details.get(row.seq)))
    tx.insert("queue", ("consumer", *Row._fields), [(consumer.id, *row) for row in rows])
    counts = [(consumer.id, *key, int(n), weight, tx.shard) for key, (n, weight) in changes.items() if n or weight]
    add_counts(tx, counts)
    consumer.inserts += len(rows) - len(dropped)
    record_events(tx, dropped)
    if consumer.grouped:
        refresh_groups(tx, consumer, gids)


def change_rows(tx: Transaction, consumer: Consumer, moves: Sequence[tuple[Row, Row]], events: Iterable[Event]) -> None:
    """Update rows, write their events, and refresh their groups if the consumer leases by group.

    Args:
        tx: The transaction.
        consumer: The consumer.
        moves: Each row before and after, with the same record number.
        events: The events.
    """
    if not moves:
        return
    changes: dict[tuple[str, str], list[float]] = {}
    gids: dict[str, None] = {}
    reranked = set()
    for old, new in moves:
        gids[new.gid] = None
        if (old.uses, old.value) != (new.uses, new.value):
            reranked.add(new.gid)
        for row, sign in ((old, -1), (new, 1)):
            entry = changes.setdefault((row.state, row.reason or ""), [0, 0.0])
            entry[0] += sign
            entry[1] += sign * row.weight
        # Dropped records count neither as inserted nor as sampled, or their missing uses would block appends forever.
        # A record that is no longer dropped counts again.
        if (old.state == DROPPED) != (new.state == DROPPED):
            sign = -1 if new.state == DROPPED else 1
            consumer.inserts += sign
            consumer.samples += sign * (old.uses if sign < 0 else new.uses)
    save_undo(tx, QUEUE_TABLE, consumer.id, "seq", [new.seq for _, new in moves])
    tx.update("queue", ("consumer", "seq"), Row._fields[2:], [(*new[2:], consumer.id, new.seq) for _, new in moves])
    counts = [(consumer.id, *key, int(n), weight, tx.shard) for key, (n, weight) in changes.items() if n or weight]
    add_counts(tx, counts)
    record_events(tx, events)
    if consumer.grouped:
        refresh_groups(tx, consumer, gids, reranked)


def drop_rows(
    tx: Transaction,
    consumer: Consumer,
    rows: Sequence[Row],
    reason: str,
    details: Mapping[int, dict[str, Any]] | None = None,
) -> None:
    """Drop rows; leased ones count as never leased.

    Args:
        tx: The transaction.
        consumer: The consumer.
        rows: The rows.
        reason: Why they are dropped.
        details: Details of the events, by record number.
    """
    details = details or {}
    consumer.samples -= sum(row.state == LEASED for row in rows)
    change_rows(
        tx,
        consumer,
        [(row, row._replace(state=DROPPED, reason=reason, lease=None, until=None, attempts=0)) for row in rows],
        [Event(DROPPED, row.seq, consumer.id, reason, lease=row.lease, detail=details.get(row.seq)) for row in rows],
    )


def drop_by_seq(tx: Transaction, consumer: Consumer, seqs: Sequence[int], reason: str) -> int:
    """Drop records that are waiting or cooling down; return how many."""
    rows = [row for row in select_rows_by_seq(tx, consumer, seqs) if row.state in (WAITING, COOLING)]
    drop_rows(tx, consumer, rows, reason)
    save_consumer(tx, consumer)
    return len(rows)


def requeue_rows(tx: Transaction, consumer: Consumer, rows: Sequence[Row], kind: str, reason: str | None) -> None:
    """Return leased rows to the queue with their former rank; drop those that were returned `max_attempts` times."""
    max_attempts = consumer.settings.max_attempts
    exhausted = [row for row in rows if max_attempts is not None and row.attempts + 1 >= max_attempts]
    returned = [row for row in rows if max_attempts is None or row.attempts + 1 < max_attempts]
    consumer.samples -= len(returned)
    sampler = consumer.settings.sampler
    moves = []
    for row in returned:
        rank = row.rank
        if not sampler.keeps_rank:  # its value may have been revised while it was leased
            rank = sampler.rank(consumer.item(row.seq, row.uses, row.version, row.value), consumer.state)
        moves.append((row, row._replace(state=WAITING, lease=None, attempts=row.attempts + 1, rank=rank)))
    change_rows(
        tx,
        consumer,
        moves,
        [Event(kind, row.seq, consumer.id, reason, lease=row.lease) for row in returned],
    )
    drop_rows(tx, consumer, exhausted, "attempts")


# --- maintenance ----------------------------------------------------------------------------------------------------


def expire_leases(tx: Transaction, consumer: Consumer) -> None:
    """Return the records of expired leases to the queue; the database's clock counts."""
    # If the clock was set back, leases would last longer: restart their time.
    tx.run(
        "UPDATE leases SET expires = ? + seconds WHERE consumer = ? AND state = 'active' AND expires > ? + seconds + 1",
        (tx.now, consumer.id, tx.now),
    )
    # A holder that acknowledges at this moment has locked the row of its lease.
    for (lease,) in tx.all(
        f"SELECT id FROM leases WHERE consumer = ? AND state = 'active' AND expires <= ? ORDER BY id{tx.for_update}",
        (consumer.id, tx.now),
    ):
        tx.defer("leases", "UPDATE leases SET state = 'expired' WHERE id = ?", (lease,))
        requeue_rows(tx, consumer, select_rows(tx, "lease = ? ORDER BY seq", (lease,)), "expired", None)


def end_cooldowns(tx: Transaction, consumer: Consumer, limit: int) -> bool:
    """Return records whose cooldown is over to the queue; return whether none is left."""
    due = select_rows(
        tx,
        "consumer = ? AND state = 'cooling' AND until <= ? ORDER BY until, seq LIMIT ?",
        (consumer.id, tx.now, limit),
    )
    change_rows(
        tx,
        consumer,
        [(row, row._replace(state=WAITING, until=None)) for row in due],
        [Event("rested", row.seq, consumer.id) for row in due],
    )
    return len(due) < limit


def drop_over_age(tx: Transaction, consumer: Consumer, limit: int) -> bool:
    """Drop records that have waited longer than `MaxAge`; return whether none is left."""
    age = consumer.settings.max_age
    if age is None:
        return True
    # Record numbers follow the order of appends: the oldest come first.
    oldest = tx.all(
        "SELECT queue.seq, records.admitted FROM queue JOIN records ON records.seq = queue.seq "
        "WHERE queue.consumer = ? AND queue.state = 'waiting' ORDER BY queue.seq LIMIT ?",
        (consumer.id, limit),
    )
    late = [seq for seq, admitted in oldest if admitted <= tx.now - age]
    drop_rows(tx, consumer, select_rows_by_seq(tx, consumer, late), "max_age")
    return len(late) < limit


def drop_over_size(tx: Transaction, consumer: Consumer, limit: int) -> bool:
    """Drop records beyond `MaxSize`; return whether none is left."""
    rule = consumer.settings.max_size
    if rule is None:
        return True
    over = count_rows(tx, consumer, WAITING, COOLING)[0] - rule.size
    if over <= 0:
        return True
    order = "seq" if rule.drop == "oldest" else "rank DESC, seq"
    surplus = select_rows(
        tx, f"consumer = ? AND state = 'waiting' ORDER BY {order} LIMIT ?", (consumer.id, min(over, limit))
    )
    drop_rows(tx, consumer, surplus, "max_size")
    return len(surplus) < limit


def drop_stale_rows(tx: Transaction, consumer: Consumer, floor: int | None, limit: int) -> bool:
    """Drop waiting records whose oldest token is of a version below `floor`; return whether none is left."""
    if floor is None:
        return True
    # Checked every time: records that were leased or cooling down when the floor rose may be waiting by now.
    consumer.floor = floor if consumer.floor is None else max(floor, consumer.floor)
    stale = select_rows(
        tx, "consumer = ? AND state = 'waiting' AND version < ? ORDER BY seq LIMIT ?", (consumer.id, floor, limit)
    )
    drop_rows(tx, consumer, stale, "stale")
    return len(stale) < limit


def drop_abandoned_rows(tx: Transaction, consumer: Consumer) -> None:
    """Drop waiting records that were sampled by abandoned versions of the policy."""
    lineage = read_lineage(tx)
    if not lineage.branches:
        return
    last = min(after for _, after, _ in lineage.branches)
    lowest = min(version for version, _, _ in lineage.branches)
    while True:
        waiting = tx.all(
            "SELECT queue.seq, records.version_max FROM queue JOIN records ON records.seq = queue.seq "
            "WHERE queue.consumer = ? AND queue.state = 'waiting' AND queue.seq > ? AND records.version_max > ? "
            "ORDER BY queue.seq LIMIT 1000",
            (consumer.id, last, lowest),
        )
        details = {seq: abandoned_detail(version) for seq, version in waiting if lineage.is_abandoned(seq, version)}
        drop_rows(tx, consumer, select_rows_by_seq(tx, consumer, list(details)), "stale", details)
        if len(waiting) < 1000:
            return
        last = waiting[-1][0]


def abandoned_detail(version: int | None) -> dict[str, Any]:
    """Return the event detail of a record that was sampled by an abandoned version."""
    return {"abandoned_version": version}


# --- announced version ----------------------------------------------------------------------------------------------


def version_floor(announced: int | None, max_staleness: int | None) -> int | None:
    """Return the oldest policy version that is not stale, or `None` if there is no bound."""
    if announced is None or max_staleness is None:
        return None
    return max(min(announced - max_staleness, (1 << 63) - 1), -(1 << 63))


def announced_version(tx: Transaction) -> int | None:
    """Return the policy version that was announced last."""
    row = tx.first("SELECT value FROM meta WHERE key = 'policy_version'")
    return None if row is None else int(row[0])


def set_announced_version(tx: Transaction, version: int | None) -> None:
    """Write the announced version; delete it if `None`."""
    tx.run("DELETE FROM meta WHERE key = 'policy_version'")
    if version is not None:
        tx.run("INSERT INTO meta (key, value) VALUES ('policy_version', ?)", (str(version),))


def announce_version(tx: Transaction, version: int) -> bool:
    """Write the announced policy version; `drop_stale_rows` then drops the records that it makes stale.

    Returns:
        Whether the version is new.

    Raises:
        BookError: The version is older than the announced one.
    """
    lineage = read_lineage(tx)
    now = lineage.announced
    if now is not None and version < now:
        raise BookError(f"announce: got version {version}, the book has {now}; only a rewind goes back")
    if now == version:
        return False
    if lineage.top is not None and (now or 0) < lineage.top:
        # Mark records of versions that this lineage is about to announce again.
        _close_lineage(tx, lineage)
        save_lineage(tx, lineage)
    set_announced_version(tx, version)
    record_events(tx, [Event("announced", detail={"version": version})])
    return True


# --- quarantine -----------------------------------------------------------------------------------------------------

QUARANTINED = "quarantined"
"""Reason of dropped rows, and kind of events and findings."""
_QUARANTINE_KEY = "quarantine"
"""Key of `meta` with the id of the first quarantine event that is in effect. Without it, no record is in quarantine."""


def add_to_quarantine(tx: Transaction, seqs: Sequence[int], first: int | None = None) -> None:
    """Put records in quarantine.

    Args:
        tx: The transaction.
        seqs: The record numbers.
        first: Id of the first quarantine event in effect, if there is none yet; by default the next event.
    """
    if first is None:
        first = tx.first("SELECT COALESCE(MAX(id), 0) + 1 FROM events")[0]
    tx.run("INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING", (_QUARANTINE_KEY, str(first)))
    record_events(tx, [Event(QUARANTINED, seq) for seq in seqs])


def _first_quarantine_event(tx: Transaction) -> int | None:
    row = tx.first("SELECT value FROM meta WHERE key = ?", (_QUARANTINE_KEY,))
    return None if row is None else int(row[0])


def find_quarantined(tx: Transaction, seqs: Sequence[int]) -> set[int]:
    """Return the records of `seqs` that are in quarantine."""
    first = _first_quarantine_event(tx)
    if first is None:
        return set()
    return {
        seq
        for marks, chunk in chunks(seqs)
        for (seq,) in tx.all(
            f"SELECT seq FROM events WHERE kind = '{QUARANTINED}' AND id >= {first} AND seq IN ({marks})", chunk
        )
    }


def quarantined_uids(tx: Transaction) -> list[str]:
    """Return the ids of the records in quarantine, in the order of their numbers."""
    first = _first_quarantine_event(tx)
    if first is None:
        return []
    rows = tx.all(
        "SELECT uid FROM records WHERE removed_reason IS NULL AND evaluation = 0 AND seq IN "
        f"(SELECT seq FROM events WHERE id >= {first} AND kind = '{QUARANTINED}') ORDER BY seq"
    )
    return [uid for (uid,) in rows]


def release_quarantine(tx: Transaction) -> int:
    """Release all records from quarantine, so that consumers can lease them; return how many there were."""
    count = len(quarantined_uids(tx))
    tx.run("DELETE FROM meta WHERE key = ?", (_QUARANTINE_KEY,))
    for consumer in all_consumers(tx):
        sampler = consumer.settings.sampler
        while rows := select_rows(
            tx, f"consumer = ? AND state = 'dropped' AND reason = '{QUARANTINED}' LIMIT 1000", (consumer.id,)
        ):
            moves = []
            for row in rows:
                rank = sampler.rank(consumer.item(row.seq, row.uses, row.version, row.value), consumer.state)
                moves.append((row, row._replace(state=WAITING, reason=None, rank=rank)))
            events = [Event("returned", row.seq, consumer.id, "offered") for row in rows]
            change_rows(tx, consumer, moves, events)
        while not drop_over_size(tx, consumer, 1000):
            pass
        save_consumer(tx, consumer)
    return count


# --- inbox ----------------------------------------------------------------------------------------------------------

INBOX_COLUMNS = ("consumer", "first", "last", "count", "numbers")
"""`numbers` is a JSON list of the values that the sampler ranks by, if they are not in index columns."""
CHUNK = 1000
"""Number of records that one transaction drains, so that it holds its locks for a short time."""


def backfill_consumer(tx: Transaction, consumer: int) -> None:
    """Add all training records of the book to the inbox of a new consumer, within an exclusive transaction."""
    last, count = tx.first("SELECT MAX(seq), COUNT(*) FROM records WHERE evaluation = 0")
    if count:
        tx.insert("inbox", INBOX_COLUMNS, [(consumer, 1, last, count, None)])


def add_consumer(tx: Transaction, name: str, settings: Mapping[str, ConsumerSetting] | None = None) -> Consumer:
    """Create a consumer group with all training records of the book, within an exclusive transaction."""
    consumer = create_consumer(tx, name, ConsumerConfig().changed(settings or {}))
    backfill_consumer(tx, consumer.id)
    return consumer


def configure_consumer(
    tx: Transaction, name: str, settings: Mapping[str, ConsumerSetting], *, create: bool, change: bool
) -> ConsumerConfig:
    """Implement `Book.consumer`."""
    if create and find_consumer(tx, name) is None:
        return add_consumer(tx, name, settings).settings
    current = get_consumer(tx, name)
    new = current.settings.changed(settings)
    if new != current.settings and not change:
        names = [key for key in settings if getattr(new, key) != getattr(current.settings, key)]
        raise BookError(
            f"consumer {name!r}: {names[0]}: got {getattr(new, names[0])!r}, the book has "
            f"{getattr(current.settings, names[0])!r}; change=True changes it for all users"
        )
    if new != current.settings:
        save_settings(tx, current, new)
        # All waiting records are ranked again, in chunks, before the next lease.
        current.state["unranked"] = current.state["oversized"] = 1
        save_consumer(tx, current)
        tx.run("UPDATE inbox SET numbers = NULL WHERE consumer = ?", (current.id,))  # of the former sampler's key
        # The event wakes waiting leases.
        detail = {"settings": json.loads(new.to_json())}
        record_events(tx, [Event("configured", consumer=current.id, detail=detail)])
    return new


def inbox_size(tx: Transaction, consumer: int) -> int:
    """Count the records in a consumer's inbox."""
    return int(tx.first("SELECT COALESCE(SUM(count), 0) FROM inbox WHERE consumer = ?", (consumer,))[0])


def drain_inbox(tx: Transaction, book: Book, consumer: Consumer, limit: int = CHUNK) -> bool:
    """Create rows of `queue` for about `limit` records, at least one range; return whether the inbox is empty now."""
    ranges = tx.all(
        f"SELECT first, last, numbers FROM inbox WHERE consumer = ? ORDER BY first LIMIT {limit + 1}", (consumer.id,)
    )
    if not ranges:
        return True
    seqs: list[int] = []
    values: dict[int, float | None] = {}
    done: list[int] = []
    split_range: tuple[int, int] | None = None
    for first, last, numbers in ranges:
        left = limit - len(seqs)
        if left <= 0:
            break
        if numbers is not None:
            values.update(zip(range(first, last + 1), _parse_numbers(numbers, last - first + 1), strict=True))
        elif last - first >= left:
            split_range = (first, first + left)  # the long range of a new consumer is drained in chunks
            seqs.extend(range(*split_range))
            break
        seqs.extend(range(first, last + 1))
        done.append(first)
    key = consumer.settings.sampler.key
    bounded = consumer.settings.max_staleness is not None
    meta = dict(tx.all(f"SELECT key, value FROM meta WHERE key IN ('policy_version', 'lineage', '{_QUARANTINE_KEY}')"))
    lineage = parse_lineage(meta)
    floor = version_floor(lineage.announced, consumer.settings.max_staleness) if bounded else None
    column = f", {key}" if key in index_columns.IndexColumns._fields else ""
    # Some numbers of a range belong to evaluation records, which are left out.
    records = tx.all(
        f"SELECT seq, gid, version_min, removed_reason, version_max{column} FROM records "
        f"WHERE evaluation = 0 AND seq {tx.in_ints} ORDER BY seq",
        (tx.array(seqs),),
    )
    if column:
        values = {row[0]: None if row[5] is None else float(row[5]) for row in records}
    elif key is not None:
        unknown = [row[0] for row in records if row[0] not in values and row[3] is None]
        values.update(zip(unknown, read_numbers(book, tx, unknown, key), strict=True))
    quarantined = find_quarantined(tx, [row[0] for row in records]) if _QUARANTINE_KEY in meta else set()
    rows = []
    details = {}
    for seq, gid, version, removed_reason, newest, *_ in records:
        stale = floor is not None and version is not None and version < floor
        if bounded and lineage.is_abandoned(seq, newest):
            stale, details[seq] = True, abandoned_detail(newest)
        dropped = removed_reason or (QUARANTINED if seq in quarantined else "stale" if stale else None)
        rows.append(new_row(consumer, seq, gid, version, values.get(seq), dropped))
    enter_rows(tx, consumer, rows, details)
    if consumer.settings.max_size is not None:
        drop_over_size(tx, consumer, CHUNK)
    if done:
        tx.defer("inbox", f"DELETE FROM inbox WHERE consumer = ? AND first {tx.in_ints}", (consumer.id, tx.array(done)))
    if split_range is not None:
        tx.run(
            "UPDATE inbox SET first = ?, count = count - ? WHERE consumer = ? AND first = ?",
            (split_range[1], sum(row.seq >= split_range[0] for row in rows), consumer.id, split_range[0]),
        )
    return len(done) == len(ranges)


def _parse_numbers(numbers: LedgerValue, count: int) -> list[float | None]:
    """Parse a list of numbers from the ledger, which is not trusted."""
    try:
        values = json.loads(numbers)  # type: ignore[arg-type]
    except (RecursionError, TypeError, ValueError):
        values = None
    if not isinstance(values, list) or len(values) != count or {type(n) for n in values} - {int, float, type(None)}:
        raise CorruptBookError(f"inbox: numbers: got {str(numbers)[:100]!r}, expected {count} numbers")
    return values


def new_row(
    consumer: Consumer, seq: int, gid: str, version: int | None, value: float | None, dropped: str | None
) -> Row:
    """Create the row of a record that is new to a consumer."""
    sampler = consumer.settings.sampler
    item = consumer.item(seq, 0, version, value)
    state = WAITING if dropped is None else DROPPED
    rank = sampler.rank(item, consumer.state) if dropped is None else 0.0
    return Row(seq, gid, state, dropped, rank, value, sampler.weight(item), version, 0, 0, None, None)


def drain_inboxes(book: Book, bounded: bool = False) -> None:
    """Drain the inbox of every consumer in short transactions, unless the book is read-only.

    Args:
        book: The book.
        bounded: Skip consumers without bounds on age, staleness or size: all records in their inboxes are waiting.
    """
    if book.read_only:
        return
    with book.ledger.read() as tx:
        rows = tx.all(SELECT_CONSUMERS.replace(" ORDER", " WHERE id IN (SELECT consumer FROM inbox) ORDER"))
    for consumer in parse_consumers(rows):
        empty = bounded and not consumer.settings.bounded
        while not empty:
            # Not durable: after a crash, the records are in the inbox again.
            with book.ledger.write(shared=True, durable=False) as tx:
                current = find_consumer(tx, consumer.name, lock=True)
                empty = current is None or drain_inbox(tx, book, current)
                if current is not None:
                    save_consumer(tx, current)
            if not empty:
                yield_to_writers(book.ledger)


@contextmanager
def write_drained(book: Book, timeout: float | None = None) -> Iterator[Transaction]:
    """Begin an exclusive transaction in which every inbox is empty: each consumer has a row for each record."""
    drain_long_inboxes(book)
    with book.ledger.write(timeout=timeout) as tx:
        drain_inboxes_within(tx, book)
        yield tx


def drain_long_inboxes(book: Book) -> None:
    """Drain inboxes that are too long to be drained within one transaction."""
    if book.ledger.all("SELECT COALESCE(SUM(count), 0) FROM inbox")[0][0] > CHUNK:
        drain_inboxes(book)


def drain_inboxes_within(tx: Transaction, book: Book) -> None:
    """Drain every inbox within an exclusive transaction."""
    for (name,) in tx.all("SELECT name FROM consumers WHERE id IN (SELECT consumer FROM inbox) ORDER BY id"):
        consumer = get_consumer(tx, name)
        while not drain_inbox(tx, book, consumer):
            pass
        save_consumer(tx, consumer)
