"""Rebuilding: the rows of a new ledger, from what can be read of the old one and from what lies in the segments.

Invariant: a record enters only if every byte of it, and of its media, is whole. A record that was deleted stays
deleted, and one that was redacted is redacted again; where neither the ledger nor the list of deletions tells, it stays
out and is named. A record whose history is lost is quarantined.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.book import (
    attachments,
    deletions,
    digests,
    quarantine,
    reading,
    revising,
    salvaging,
    tags,
    work,
)
from rollbook.book import schema as tables
from rollbook.book.checking import names_of
from rollbook.book.errors import CorruptBookError
from rollbook.book.findings import Report
from rollbook.book.inspecting import PAGE
from rollbook.book.ledger import SQLiteLedger, Transaction, chunks, parsed
from rollbook.book.opening import LEDGER
from rollbook.book.shelves import Place
from rollbook.core.errors import WireError
from rollbook.core.files import FOLDER

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experiences import Experiences

RECOVERED = "recovered"
LOGS = ("", "-wal", "-shm", "-journal")
"""What the files of a SQLite database are called behind its name."""
_SALVAGED = [name for name in tables.TABLES if name not in ("blobs", "orphans")]
_OWN = ("layout", "digests")
_REDACTABLE = (*revising.REDACTABLE, "info", "metrics", "multi_modal_inputs")


def take_rows(book: Book, aside: str, report: Report) -> salvaging.Lost:
    """All rows that can be read of the old ledger."""
    lost = salvaging.Lost()
    copied = os.path.join(aside, LEDGER)
    with book.ledger.write() as tx:
        tx.run("CREATE TEMP TABLE numbers (uid TEXT PRIMARY KEY, seq INT)")
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
            lost.tables = dict.fromkeys(_SALVAGED, "its b-tree cannot be read")
        else:
            try:
                for table in _SALVAGED:
                    _take_rows(book, table, salvaging.rows(connection, table, lost))
            finally:
                connection.close()
        _take_pages(book, os.path.join(working, LEDGER), lost, report)
    finally:
        shutil.rmtree(working)
    for table in _SALVAGED:
        if lost.any(table):
            gaps, wrong = lost.gaps.get(table, 0), lost.rows.get(table, 0)
            what = lost.tables.get(table, f"{gaps} ranges and {wrong} single rows could not be read")
            report.did("lost", what, f"table {table}")
    with book.ledger.write() as tx:
        if lost.any("meta") and tx.one(f"SELECT 1 FROM events WHERE kind = '{quarantine.QUARANTINED}' LIMIT 1"):
            quarantine.add_to_quarantine(tx, [], first=0)
    return lost


def _take_pages(book: Book, path: str, lost: salvaging.Lost, report: Report) -> None:
    """Rows that lie on intact pages and that no b-tree leads to any more, and the numbers that records had."""
    broken = [table for table in _SALVAGED if lost.any(table)]
    if not broken:
        return
    batches: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
    with open(path, "rb") as file:
        for table, row in salvaging.page_rows(file):
            if table in broken:
                batches[table].append(row)
                if len(batches[table]) >= PAGE:
                    _take_page(book, table, batches.pop(table), report)
        for table, rows in batches.items():
            _take_page(book, table, rows, report)
        with book.ledger.write() as tx:
            tx.many("INSERT OR IGNORE INTO numbers VALUES (?, ?)", salvaging.page_numbers(file))


def _take_page(book: Book, table: str, rows: Sequence[Sequence[Any]], report: Report) -> None:
    report.did("salvaged", "rows of intact pages", f"table {table}", count=_take_rows(book, table, rows))


def _take_rows(book: Book, table: str, rows: Iterable[Sequence[Any]]) -> int:
    """Write rows that are not there yet; return how many."""
    names = names_of(table)
    # What was just made says little of the book: what the old ledger says of it stands.
    verb = "INSERT OR REPLACE" if table == "meta" else "INSERT OR IGNORE"
    sql = f"{verb} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    remaining = (row for row in rows if table != "meta" or row[0] not in _OWN)
    count = 0
    while batch := list(islice(remaining, PAGE)):
        with book.ledger.write() as tx:
            count += sum(tx.count(sql, row) for row in batch)
    return count


def take_parts(
    book: Book,
    sizes: dict[str, int],
    lost: salvaging.Lost,
    listed: Sequence[deletions.Deletion],
    complete: bool,
    report: Report,
) -> None:
    """Admit what the segments hold and the ledger does not know; a later copy of a record stands for an earlier one.
    What is `listed` as deleted or redacted stays so; `complete` says whether all that was is listed."""
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
        tx.run("CREATE TEMP TABLE recovered (uid TEXT PRIMARY KEY)")
        _find_again(tx, report)
        _withhold(tx, lost, complete, report)
    _admit(book, report)
    _delete_again(book, listed, report)


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


def _withhold(tx: Transaction, lost: salvaging.Lost, complete: bool, report: Report) -> None:
    """Leave out ids that the ledger has, what it never admitted and, if the list of deletions is not complete, what may
    have been deleted or redacted: bytes that were to be purged and, where it is known that unknown records were deleted
    and not which, every unknown one."""
    tx.run("DELETE FROM found WHERE uid IN (SELECT uid FROM records)")
    # A rewound record's id has its number behind it.
    tx.run("DELETE FROM found WHERE uid IN (SELECT substr(uid, 1, length(uid) - length('~' || seq)) FROM records "
           "WHERE gone = 'rewound' AND uid LIKE '%~' || seq)")  # fmt: skip
    missing = "SELECT 1 FROM {} WHERE seq IS NOT NULL AND seq NOT IN (SELECT seq FROM records) LIMIT 1"
    if not lost.any("records") and not any(tx.one(missing.format(table)) for table in ("events", "work")):
        # No row is missing: these are bytes of appends that raised, or that a crash ended.
        for (uid,) in tx.all("SELECT uid FROM found ORDER BY uid"):
            report.did("uncommitted", "its bytes are there, but the ledger never admitted it: append it again", uid)
        tx.run("DELETE FROM found")
    if complete:
        return
    unknown = tx.one(
        "SELECT COUNT(DISTINCT seq) FROM events WHERE kind IN ('deleted', 'redacted') AND seq NOT IN "
        "(SELECT seq FROM records) AND seq NOT IN (SELECT seq FROM numbers JOIN found ON found.uid = numbers.uid)"
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
            for table in ("records", "events", "work", "revisions", "media_uses", "checkpoints", "numbers")
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
                told, digest, uses = (
                    tags.index_columns(many),
                    digests.content_hashes(many),
                    attachments.references(stripped),
                )
                purposes = attachments.purposes(stripped)
            except (WireError, ValueError) as error:
                for _, uid, _ in mine:
                    report.did("lost", f"found, and cannot be restored: {error}", uid)
            else:
                numbers = _numbers(book, [uid for _, uid, _ in mine])
                seqs = [numbers.get(uid, base + i) for i, (_, uid, _) in enumerate(mine)]
                _insert(book, seqs, place, mine, many, told, digest, uses, purposes)
                base += len(mine)
                for _, uid, n in mine:
                    history = "its number is known" if uid in numbers else "its history is not known"
                    more = f"; {n} versions were there, the last one stands" if n > 1 else ""
                    report.did(RECOVERED, f"{history}{more}", uid)
                with book.ledger.write() as tx:
                    tx.many("INSERT INTO recovered VALUES (?)", [(uid,) for _, uid, _ in mine])
                    unknown = [
                        seq
                        for seq, (_, uid, _), evaluation in zip(seqs, mine, purposes, strict=True)
                        if uid not in numbers and not evaluation
                    ]
                    quarantine.add_to_quarantine(tx, unknown)
            with book.ledger.write() as tx:
                tx.many("DELETE FROM found WHERE uid = ?", [(uid,) for _, uid, _ in mine])


def _numbers(book: Book, uids: Sequence[str]) -> dict[str, int]:
    """The numbers that records had, by id, as far as they are known and free: their work and events have them."""
    numbers: dict[str, int] = {}
    with book.ledger.read() as tx:
        for marks, part in chunks(uids):
            sql = f"SELECT uid, seq FROM numbers WHERE uid IN ({marks}) AND seq NOT IN (SELECT seq FROM records)"
            numbers.update(tx.all(sql, part))
    # A damaged index may give one number to two.
    return {uid: seq for seq, uid in {seq: uid for uid, seq in numbers.items()}.items()}


def _delete_again(book: Book, listed: Sequence[deletions.Deletion], report: Report) -> None:
    """Delete and redact what was deleted and redacted before, by the list of deletions and the old ledger's events."""
    with book.ledger.read() as tx:
        rows = tx.all(
            "SELECT records.uid, events.kind, events.time, events.reason, events.detail FROM events "
            "JOIN records ON records.seq = events.seq WHERE events.kind IN ('deleted', 'redacted') "
            "AND records.gone IS NULL"
        )
        recovered = {uid for (uid,) in tx.all("SELECT uid FROM recovered")}
        there = {uid for (uid,) in tx.all("SELECT uid FROM records WHERE gone IS NULL")}
    entries = [entry for entry in listed if entry.uid in there]
    for uid, kind, when, reason, detail in rows:
        try:
            values = parsed(detail or "{}", uid)
        except CorruptBookError:
            values = {}
        # Where it is not known any more which fields were redacted, all that can be are.
        fields = values.get("fields")
        fields = tuple(map(str, fields)) if isinstance(fields, list) and fields else _REDACTABLE
        fields = fields if kind == "redacted" else ()
        entries.append(deletions.Deletion(uid, when, str(values.get("author") or "unknown"), reason, fields))
    deleted: defaultdict[tuple[str, str | None], dict[str, None]] = defaultdict(dict)
    for entry in entries:
        if not entry.fields:
            deleted[entry.author, entry.reason][entry.uid] = None
        elif entry.uid in recovered:
            # The version that was found may be the one from before.
            try:
                revising.redact_records(book, [entry.uid], entry.fields, author=entry.author, reason=entry.reason)
            except ValueError:
                revising.redact_records(book, [entry.uid], _REDACTABLE, author="repair", reason=entry.reason)
            report.did("redacted", f"{', '.join(entry.fields)} redacted again", entry.uid)
    for (author, reason), uids in deleted.items():
        revising.delete_records(book, list(uids), author=author, reason=reason)
        for uid in uids:
            report.did("deleted", "it was deleted before, and stays so", uid)


def _insert(
    book: Book,
    seqs: Sequence[int],
    place: Place,
    mine: Sequence[tuple[int, str, int]],
    many: Experiences,
    told: Sequence[tags.IndexColumns],
    digest: digests.ContentHashes,
    uses: Sequence[tuple[str, ...]],
    purposes: Sequence[bool],
) -> None:
    names = [
        "seq",
        *tags.IndexColumns._fields,
        *(["evaluation", "admitted", "revision", "whole", "core", "segment", "start", "size", "slot", "bytes"]),
    ]
    share = -(-place.length // len(mine))
    with book.ledger.write() as tx:
        tx.many(
            f"INSERT INTO records ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [
                (
                    *(seqs[i], *told[i], int(purposes[i]), tx.now, 0, digest.whole[i], digest.core[i]),
                    *(place.segment, place.offset, place.length, slot, share),
                )
                for i, (slot, _, _) in enumerate(mine)
            ],
        )
        tx.many(
            "INSERT OR IGNORE INTO media_uses (hash, seq) VALUES (?, ?)",
            [(key, seq) for seq, keys in zip(seqs, uses, strict=True) for key in keys],
        )
        tx.many(
            "INSERT INTO columns (name, type) VALUES (?, ?) ON CONFLICT DO NOTHING", sorted(tags.column_types(many))
        )
        work.record_events(tx, [work.Event(RECOVERED, seq) for seq in seqs])
