"""Rebuilding: the rows of a new ledger, from what can be read of the old one and from what lies in the segments.

Invariant: a record enters only if every byte of it, and of its media, is whole. A record that was deleted or redacted
does not come back; where that cannot be told, it stays out and is named.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.book import attachments, digests, kinds, reading, salvaging, tags, work
from rollbook.book import schema as tables
from rollbook.book.checking import names_of
from rollbook.book.findings import Report
from rollbook.book.inspecting import PAGE
from rollbook.book.ledger import SQLiteLedger, Transaction
from rollbook.book.opening import LEDGER
from rollbook.book.shelves import Place
from rollbook.errors import WireError
from rollbook.files import FOLDER

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.experiences import Experiences

RECOVERED = "recovered"
LOGS = ("", "-wal", "-shm", "-journal")
"""What the files of a SQLite database are called behind its name."""
_SALVAGED = [name for name in tables.TABLES if name not in ("blobs", "orphans")]
_OWN = ("layout", "digests")


def take_rows(book: Book, aside: str, report: Report) -> salvaging.Lost:
    """All rows that can be read of the old ledger."""
    lost = salvaging.Lost()
    copied = os.path.join(aside, LEDGER)
    if not os.path.exists(copied):
        lost.tables = dict.fromkeys(_SALVAGED, "there is no ledger")
        return lost
    working = os.path.join(aside, "working")
    os.mkdir(working, FOLDER)
    try:
        for tail in ("", "-wal", "-journal"):
            if os.path.exists(copied + tail):
                shutil.copyfile(copied + tail, os.path.join(working, LEDGER + tail))
        # What a new ledger looks like, all of it in one file.
        model = os.path.join(working, "model")
        other = SQLiteLedger(Path(model))
        tables.prepare(other, create=True, where=model, meta={})
        other.close()
        connection = salvaging.connect(os.path.join(working, LEDGER), model)
        if connection is None:
            lost.tables = dict.fromkeys(_SALVAGED, "the ledger is no database")
            report.did("lost", "nothing of the old ledger could be read: consumers, events, deletions", LEDGER)
            return lost
        try:
            for table in _SALVAGED:
                _take_table(book, connection, table, lost)
        finally:
            connection.close()
    finally:
        shutil.rmtree(working)
    for table in _SALVAGED:
        if lost.any(table):
            gaps, wrong = lost.gaps.get(table, 0), lost.rows.get(table, 0)
            what = lost.tables.get(table, f"{gaps} ranges and {wrong} single rows could not be read")
            report.did("lost", what, f"table {table}")
    return lost


def _take_table(book: Book, connection: sqlite3.Connection, table: str, lost: salvaging.Lost) -> None:
    names = names_of(table)
    sql = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    batch: list[tuple[Any, ...]] = []

    def write() -> None:
        with book.ledger.write() as tx:
            tx.many(sql, batch)
        batch.clear()

    for row in salvaging.rows(connection, table, lost):
        if table == "meta":
            if row[0] not in _OWN:
                with book.ledger.write() as tx:
                    tx.run("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", row)
            continue
        batch.append(row)
        if len(batch) >= PAGE:
            write()
    write()


def take_parts(book: Book, sizes: dict[str, int], lost: salvaging.Lost, report: Report) -> None:
    """Admit what the segments hold and the ledger does not know; a later copy of a record stands for an earlier one."""
    with book.ledger.write() as tx:
        tx.run("CREATE TEMP TABLE found (uid TEXT PRIMARY KEY, segment TEXT, start INT, size INT, slot INT, n INT)")
        tx.run("CREATE TEMP TABLE whole (segment TEXT, start INT, PRIMARY KEY (segment, start))")
    for segment, size in sizes.items():
        report.segments += 1
        for part in salvaging.parts(book.shelf, segment, size):
            place = (part.place.segment, part.place.offset, part.place.length)
            with book.ledger.write() as tx:
                tx.run("INSERT OR IGNORE INTO whole VALUES (?, ?)", place[:2])
                if part.hash is not None:
                    tx.run(
                        "INSERT INTO media (hash, segment, start, size) VALUES (?, ?, ?, ?) ON CONFLICT (hash) "
                        "DO UPDATE SET segment = excluded.segment, start = excluded.start, size = excluded.size "
                        "WHERE NOT EXISTS (SELECT 1 FROM whole WHERE whole.segment = media.segment "
                        "AND whole.start = media.start)",
                        (part.hash, *place),
                    )
                tx.many(
                    "INSERT INTO found VALUES (?, ?, ?, ?, ?, 1) ON CONFLICT (uid) DO UPDATE SET segment = "
                    "excluded.segment, start = excluded.start, size = excluded.size, slot = excluded.slot, n = n + 1",
                    [(uid, *place, slot) for slot, uid in enumerate(part.uids)],
                )
    with book.ledger.write() as tx:
        _find_again(tx, report)
        _withhold(tx, lost, report)
    _admit(book, report)


def _find_again(tx: Transaction, report: Report) -> None:
    """Records whose place in the ledger holds nothing whole, and of which another copy is there; none redacted."""
    moved = tx.all(
        "SELECT records.seq, records.uid, found.segment, found.start, found.size, found.slot FROM records "
        "JOIN found ON found.uid = records.uid WHERE records.gone IS NULL AND NOT EXISTS (SELECT 1 FROM whole "
        "WHERE whole.segment = records.segment AND whole.start = records.start) AND found.segment NOT IN "
        "(SELECT segment FROM purges) AND NOT EXISTS (SELECT 1 FROM events WHERE events.seq = records.seq "
        "AND events.kind = 'redacted')"
    )
    for seq, uid, *place in moved:
        tx.run("UPDATE records SET segment = ?, start = ?, size = ?, slot = ? WHERE seq = ?", (*place, seq))
        report.did(RECOVERED, "another copy of it was found; it may lack its last revision", uid)


def _withhold(tx: Transaction, lost: salvaging.Lost, report: Report) -> None:
    """Leave out what may have been deleted or redacted: ids that the ledger has, bytes that were to be purged, and,
    where it is known that unknown records were deleted and not which, every unknown one."""
    tx.run("DELETE FROM found WHERE uid IN (SELECT uid FROM records)")
    # A rewound record's id has its number behind it.
    tx.run("DELETE FROM found WHERE uid IN (SELECT substr(uid, 1, length(uid) - length('~' || seq)) FROM records "
           "WHERE gone = 'rewound' AND uid LIKE '%~' || seq)")  # fmt: skip
    unknown = tx.one(
        "SELECT COUNT(DISTINCT seq) FROM events WHERE kind IN ('deleted', 'redacted') AND seq NOT IN "
        "(SELECT seq FROM records)"
    )[0]
    where = "segment IN (SELECT segment FROM purges)"
    why = "it lies where bytes of deleted or redacted records are, and may be one of them"
    if unknown and lost.any("purges"):
        where, why = "1 = 1", f"{unknown} records were deleted or redacted, and it may be one of them"
    for (uid,) in tx.all(f"SELECT uid FROM found WHERE {where} ORDER BY uid"):
        report.did("lost", f"not brought back: {why}", uid)
    tx.run(f"DELETE FROM found WHERE {where}")


def _admit(book: Book, report: Report) -> None:
    """Rows for the records that are found and not known, as if they came now; consumers get theirs later."""
    with book.ledger.read() as tx:
        base = 1 + max(
            tx.one(f"SELECT COALESCE(MAX(seq), 0) FROM {table}")[0]
            for table in ("records", "events", "work", "revisions", "media_uses", "checkpoints")
        )
    while True:
        with book.ledger.read() as tx:
            found = tx.all(f"SELECT segment, start, size, slot, uid, n FROM found ORDER BY 1, 2, 4 LIMIT {PAGE}")
        if not found:
            return
        frames: defaultdict[Place, list[tuple[int, str, int]]] = defaultdict(list)
        for segment, start, size, slot, uid, n in found:
            frames[Place(segment, start, size)].append((slot, uid, n))
        for place, mine in frames.items():
            try:
                stripped = reading.read_frame(book, place).take([slot for slot, _, _ in mine])
                many = reading.restore(book, stripped)
                told, digest, uses = tags.tags(many), digests.digests(many), attachments.references(stripped)
            except (WireError, ValueError) as error:
                for _, uid, _ in mine:
                    report.did("lost", f"found, and cannot be restored: {error}", uid)
            else:
                _insert(book, base, place, mine, many, told, digest, uses)
                base += len(mine)
                for _, uid, n in mine:
                    more = f"; {n} versions were there, the last one stands" if n > 1 else ""
                    report.did(RECOVERED, f"its history is not known{more}", uid)
            with book.ledger.write() as tx:
                tx.many("DELETE FROM found WHERE uid = ?", [(uid,) for _, uid, _ in mine])


def _insert(
    book: Book,
    base: int,
    place: Place,
    mine: Sequence[tuple[int, str, int]],
    many: Experiences,
    told: Sequence[tags.Tags],
    digest: digests.Digests,
    uses: Sequence[tuple[str, ...]],
) -> None:
    names = [
        "seq",
        *tags.Tags._fields,
        *(["evaluation", "admitted", "revision", "whole", "core", "segment", "start", "size", "slot", "bytes"]),
    ]
    share = -(-place.length // len(mine))
    with book.ledger.write() as tx:
        tx.many(
            f"INSERT INTO records ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [
                (
                    *(base + i, *told[i], 0, tx.now, 0, digest.whole[i], digest.core[i]),
                    *(place.segment, place.offset, place.length, slot, share),
                )
                for i, (slot, _, _) in enumerate(mine)
            ],
        )
        tx.many(
            "INSERT INTO media_uses (hash, seq) VALUES (?, ?)",
            [(key, base + i) for i, keys in enumerate(uses) for key in keys],
        )
        tx.many("INSERT INTO columns (name, type) VALUES (?, ?) ON CONFLICT DO NOTHING", sorted(kinds.kinds_of(many)))
        work.record(tx, [work.Event(RECOVERED, base + i) for i in range(len(mine))])
