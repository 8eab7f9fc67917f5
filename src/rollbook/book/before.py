"""What rows were before they changed, since the last checkpoint: what going back needs, and no more.

Invariant: for every kept checkpoint, a row of `work` or `groups` that was there then is now as it was, or the first
value that it had after that checkpoint, or after a later one, stands here. Without a checkpoint nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollbook.book.ledger import Transaction
from rollbook.book.schema import TABLES

WORK_TABLE, GROUPS_TABLE = "work", "groups"
UNDO_COLUMNS = {table: [column.split()[0] for column in TABLES[table][:-1]] for table in (WORK_TABLE, GROUPS_TABLE)}
_UNDO_LISTED = {table: ", ".join(names) for table, names in UNDO_COLUMNS.items()}


def save_undo(tx: Transaction, table: str, consumer: int, key: str, values: Sequence[Any]) -> None:
    """Keep rows as they are, which are about to change, unless they have changed since the last checkpoint already."""
    if not values:
        return
    listed = ", ".join(f"now.{name}" for name in UNDO_COLUMNS[table])
    among = tx.in_ints if key == "seq" else tx.in_texts
    # What came after the checkpoint was nothing then.
    tx.later(
        f"{table}_before",
        f"INSERT INTO {table}_before (checkpoint, {_UNDO_LISTED[table]}) SELECT point.event, {listed} "
        f"FROM {table} AS now CROSS JOIN (SELECT event, seq FROM checkpoints ORDER BY event DESC LIMIT 1) AS point "
        f"WHERE now.consumer = ? AND now.{key} {among} AND now.seq <= point.seq ON CONFLICT DO NOTHING",
        (consumer, tx.array(values)),
    )


def merge_undo(tx: Transaction, checkpoint: int) -> None:
    """Hand what is kept for a checkpoint that is forgotten to the one before it, which may need it."""
    older = tx.one("SELECT event, seq FROM checkpoints WHERE event < ? ORDER BY event DESC LIMIT 1", (checkpoint,))
    for table, listed in _UNDO_LISTED.items():
        if older is not None:
            tx.run(
                f"INSERT INTO {table}_before (checkpoint, {listed}) SELECT {int(older[0])}, {listed} "
                f"FROM {table}_before WHERE checkpoint = ? AND seq <= ? ON CONFLICT DO NOTHING",
                (checkpoint, older[1]),
            )
        tx.run(f"DELETE FROM {table}_before WHERE checkpoint = ?", (checkpoint,))


def restore_groups(tx: Transaction, checkpoint: int, consumer: int) -> list[str]:
    """Groups as they were at the checkpoint; those that had changed."""
    changing = ", ".join(f"{name} = excluded.{name}" for name in UNDO_COLUMNS[GROUPS_TABLE][2:])
    mine = (checkpoint, consumer)
    tx.run(
        f"INSERT INTO groups ({_UNDO_LISTED[GROUPS_TABLE]}) SELECT {_UNDO_LISTED[GROUPS_TABLE]} FROM groups_before "
        f"WHERE checkpoint = ? AND consumer = ? ON CONFLICT (consumer, gid) DO UPDATE SET {changing}",
        mine,
    )
    found = tx.all("SELECT gid FROM groups_before WHERE checkpoint = ? AND consumer = ? ORDER BY seq, gid", mine)
    tx.run("DELETE FROM groups_before WHERE checkpoint = ? AND consumer = ?", mine)
    return [gid for (gid,) in found]
