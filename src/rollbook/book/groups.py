"""Groups: the runs of one task, and when a consumer may have them.

Invariant: a group's size counts runs, not rows, and every run that was admitted counts, whatever became of it: failed,
filtered and stale ones are there as tombstones. A group is ready when it is complete (or its time has come), some of it
waits and none of it is leased.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rollbook.book import before
from rollbook.book.errors import CorruptBookError
from rollbook.book.ledger import Transaction

if TYPE_CHECKING:
    from rollbook.book.consumers import Consumer
    from rollbook.book.samplers import Item

UNRANKED = math.inf
"""The rank of a group that has none yet, or has lost it."""


def refresh_groups(tx: Transaction, consumer: Consumer, gids: Iterable[str], other: Collection[str] = ()) -> None:
    """Look again at groups whose members changed; those of `other` have members with other uses or numbers."""
    listed = list(gids)
    if not listed:
        return
    before.save_undo(tx, before.GROUPS_TABLE, consumer.id, "gid", listed)
    chosen = tx.array(listed)
    work_rows, record_rows, group_rows = tx.ask(
        (
            # Without an order, which would have SQLite read all rows of the consumer in that order.
            f"SELECT gid, state, seq, version, value, uses FROM work WHERE consumer = ? AND gid {tx.in_texts}",
            (consumer.id, chosen),
        ),
        (
            # Runs that are still in the inbox do not complete a group: it would be handed out without them.
            "SELECT records.gid, COUNT(DISTINCT run), MAX(group_size), MIN(records.seq), MIN(admitted) FROM records "
            "JOIN work ON work.consumer = ? AND work.seq = records.seq "
            f"WHERE records.gid {tx.in_texts} AND evaluation = 0 AND (gone IS NULL OR gone <> 'rewound') GROUP BY 1",
            (consumer.id, chosen),
        ),
        (
            f"SELECT gid, ready, rank, weight FROM groups WHERE consumer = ? AND gid {tx.in_texts}",
            (consumer.id, chosen),
        ),
    )
    members: defaultdict[str, list[Any]] = defaultdict(list)
    for gid, *member in sorted(work_rows, key=itemgetter(2)):
        members[gid].append(member)
    totals = {gid: total for gid, *total in record_rows}
    earlier = {gid: row for gid, *row in group_rows}
    rows = []
    empty = []
    for gid in listed:
        row = _refresh_group(tx, consumer, gid, members[gid], totals.get(gid), earlier.get(gid), gid in other)
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
    earlier: Sequence[Any] | None,
    other: bool,
) -> tuple[Any, ...] | None:
    """A group's row as it is now; `None` if all of it was rewound: there is no such group."""
    runs, size, first, since = total or (0, None, None, None)
    was, rank, had = earlier or (0, UNRANKED, 1.0)
    if type(was) is not int or not all(type(n) in (int, float) for n in (rank, had, size or 0, since or 0)):
        raise CorruptBookError(f"groups: {gid!r}: got {str((earlier, size, since))[:100]}, expected numbers")
    settings = consumer.settings
    size = size or settings.group_size
    waiting = [row for row in members if row[0] == "waiting"]
    held = any(row[0] == "leased" for row in members)
    due = None if settings.partial_after is None or since is None else since + settings.partial_after
    # A group of unknown size is what has been brought of it.
    complete = size is None or runs >= size or (due is not None and due <= tx.now)
    ready = complete and bool(waiting) and not held and first is not None
    weight = had
    if other or not (waiting or held):
        rank = UNRANKED
    if ready and first is not None:
        sampler = settings.sampler
        item = _group_item(consumer, first, waiting)
        weight = sampler.weight(item)
        # A place that chance or turns gave is kept, by what was given back too; other ranks follow from the members.
        if not sampler.keeps or rank == UNRANKED or weight != had:
            rank = sampler.rank(item, consumer.state)
    if ready or was:
        count, weights = consumer.state.get("ready", (0, 0.0))
        count += int(ready) - was
        consumer.state["ready"] = (count, weights + (ready * weight - was * had) if count else 0.0)
    if first is None:
        return None
    return consumer.id, gid, first, size, runs, int(ready), rank, weight, None if complete else due


def _group_item(consumer: Consumer, first: int, waiting: list[tuple[str, int, int | None, float | None, int]]) -> Item:
    versions = [row[2] for row in waiting if row[2] is not None]
    values = [row[3] for row in waiting if row[3] is not None]
    made = consumer.item(
        first,
        min(row[4] for row in waiting),
        max(versions, default=None),
        sum(values) / len(values) if values else None,
    )
    return replace(made, group=True)


def release_due_groups(tx: Transaction, consumer: Consumer, most: int) -> bool:
    """Make groups ready whose time has come although they are not complete; return whether none is left."""
    due = tx.all(
        "SELECT gid FROM groups WHERE consumer = ? AND ready = 0 AND due IS NOT NULL AND due <= ? ORDER BY due, seq "
        "LIMIT ?",
        (consumer.id, tx.now, most),
    )
    refresh_groups(tx, consumer, [gid for (gid,) in due])
    return len(due) < most


def begin_groups(tx: Transaction, consumer: Consumer) -> None:
    """Begin to keep groups for a consumer that leases by group for the first time, or to rank them anew: those of the
    rows that it has are made by `build_groups`, the others as their rows come."""
    consumer.grouped = True
    (last,) = tx.one("SELECT MAX(seq) FROM work WHERE consumer = ?", (consumer.id,))
    if last is not None:
        consumer.state["ungrouped"], consumer.state["ungrouped_last"] = 1, last


def build_groups(tx: Transaction, consumer: Consumer, most: int) -> bool:
    """Make the groups of rows that were there when groups began, in order; return whether all are made."""
    start = consumer.state.get("ungrouped")
    if start is None:
        return True
    rows = tx.all(
        "SELECT seq, gid FROM work WHERE consumer = ? AND seq >= ? AND seq <= ? ORDER BY seq LIMIT ?",
        (consumer.id, start, consumer.state.get("ungrouped_last", start), most),
    )
    gids = dict.fromkeys(gid for _, gid in rows)
    refresh_groups(tx, consumer, gids, gids)
    if len(rows) < most:
        del consumer.state["ungrouped"]
        consumer.state.pop("ungrouped_last", None)
        return True
    consumer.state["ungrouped"] = rows[-1][0] + 1
    return False


def rebuild_groups(tx: Transaction, consumer: Consumer) -> None:
    """Make all groups anew, within an exclusive transaction."""
    tx.run("DELETE FROM groups WHERE consumer = ?", (consumer.id,))
    consumer.state.pop("ready", None)
    begin_groups(tx, consumer)
    while not build_groups(tx, consumer, 1000):
        pass
