"""Groups: the runs of one task, and when a consumer may have them.

Invariant: a group's size counts runs, not rows, and every run that was admitted counts, whatever became of it: failed,
filtered and stale ones are there as tombstones. A group is ready when it is complete (or its time has come), some of it
waits and none of it is leased.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rollbook.book import before
from rollbook.book.errors import Damaged
from rollbook.book.ledger import Transaction

if TYPE_CHECKING:
    from rollbook.book.consumers import Consumer
    from rollbook.book.samplers import Item

UNRANKED = math.inf
"""The rank of a group that has none yet, or has lost it."""


def refresh(tx: Transaction, consumer: Consumer, gids: Iterable[str], other: Collection[str] = ()) -> None:
    """Look again at groups whose members changed; those of `other` have members with other uses or numbers."""
    listed = list(gids)
    before.note(tx, before.GROUPS, consumer.id, "gid", listed)
    for gid in listed:
        _refresh(tx, consumer, gid, gid in other)


def _refresh(tx: Transaction, consumer: Consumer, gid: str, other: bool) -> None:
    members = tx.all(
        "SELECT state, seq, version, value, uses FROM work WHERE consumer = ? AND gid = ? ORDER BY seq",
        (consumer.id, gid),
    )
    runs, size, first, since = tx.one(
        "SELECT COUNT(DISTINCT run), MAX(group_size), MIN(seq), MIN(admitted) FROM records "
        "WHERE gid = ? AND evaluation = 0 AND (gone IS NULL OR gone <> 'rewound')",
        (gid,),
    )
    known = tx.one("SELECT ready, rank, weight FROM groups WHERE consumer = ? AND gid = ?", (consumer.id, gid))
    was, rank, had = known or (0, UNRANKED, 1.0)
    if type(was) is not int or not all(type(n) in (int, float) for n in (rank, had, size or 0, since or 0)):
        raise Damaged(f"groups: {gid!r}: got {str((known, size, since))[:100]}, expected numbers")
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
    if ready:
        sampler = settings.sampler
        item = _item(consumer, first, waiting)
        weight = sampler.weight(item)
        # A place that chance or turns gave is kept, by what was given back too; other ranks follow from the members.
        if not sampler.keeps or rank == UNRANKED or weight != had:
            rank = sampler.rank(item, consumer.state)
    if ready or was:
        count, total = consumer.state.get("ready", (0, 0.0))
        count += int(ready) - was
        consumer.state["ready"] = (count, total + (ready * weight - was * had) if count else 0.0)
    if first is None:  # All of it was rewound: there is no such group.
        tx.run("DELETE FROM groups WHERE consumer = ? AND gid = ?", (consumer.id, gid))
        return
    tx.run(
        "INSERT INTO groups (consumer, gid, seq, size, runs, ready, rank, weight, due) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (consumer, gid) DO UPDATE SET size = excluded.size, runs = excluded.runs, "
        "ready = excluded.ready, rank = excluded.rank, weight = excluded.weight, due = excluded.due",
        (consumer.id, gid, first, size, runs, int(ready), rank, weight, None if complete else due),
    )


def _item(consumer: Consumer, first: int, waiting: list[tuple[str, int, int | None, float | None, int]]) -> Item:
    versions = [row[2] for row in waiting if row[2] is not None]
    values = [row[3] for row in waiting if row[3] is not None]
    made = consumer.item(
        first,
        min(row[4] for row in waiting),
        max(versions, default=None),
        sum(values) / len(values) if values else None,
    )
    return replace(made, group=True)


def ripen(tx: Transaction, consumer: Consumer) -> None:
    """Make groups ready whose time has come although they are not complete."""
    due = tx.all(
        "SELECT gid FROM groups WHERE consumer = ? AND ready = 0 AND due IS NOT NULL AND due <= ? ORDER BY due, seq",
        (consumer.id, tx.now),
    )
    refresh(tx, consumer, [gid for (gid,) in due])


def build(tx: Transaction, consumer: Consumer) -> None:
    """Begin to keep groups for a consumer that leases by group for the first time."""
    consumer.grouped = True
    found = tx.all("SELECT gid FROM work WHERE consumer = ? GROUP BY gid ORDER BY MIN(seq)", (consumer.id,))
    refresh(tx, consumer, [gid for (gid,) in found])
