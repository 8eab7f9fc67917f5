"""Purging: which records lose their bytes, and which segments hold bytes that must go.

Invariant: a record keeps its bytes while a consumer may still be handed it, while one asked to keep it, and while the
oldest kept checkpoint could bring it back; deletion and redaction alone overrule that. The ledger's rows stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollbook.book import attachments, consumers, reading, work
from rollbook.book.errors import MissingSegmentError
from rollbook.book.identities import printed_ids
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.shelves import ALIGN, Place
from rollbook.core.errors import WireError
from rollbook.core.wire import read_header

if TYPE_CHECKING:
    from rollbook.book.book import Book

_EVICTED = ("stale", "max_size", "max_age", "attempts")
_UNUSED = "NOT EXISTS (SELECT 1 FROM media_uses WHERE media_uses.hash = media.hash)"
MARK = "INSERT INTO orphans (segment, seen) {} ON CONFLICT (segment) DO UPDATE SET seen = 0"
"""Note segments of which the ledger once spoke: no append can be on its way to one, and once empty it may go."""


# --- records that lose their bytes ----------------------------------------------------------------------------------


def _done_with(tx: Transaction, condition: str) -> str | None:
    """The end of a query of `work` and `records` for what every consumer is done with, as `condition` says of its row
    (`mine`), and what no kept checkpoint would bring back; `None` if there is no consumer."""
    first = tx.one("SELECT MIN(id) FROM consumers")[0]
    if first is None:
        return None
    checkpoint = tx.one("SELECT MIN(event) FROM checkpoints")[0]
    return (
        "FROM work JOIN records ON records.seq = work.seq "
        f"WHERE work.consumer = {int(first)} AND records.segment IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM consumers LEFT JOIN work AS mine ON mine.consumer = consumers.id "
        f"AND mine.seq = work.seq WHERE mine.state IS NULL OR NOT ({condition})) "
    ) + (
        ""
        if checkpoint is None
        else "AND NOT EXISTS (SELECT 1 FROM events WHERE events.seq = work.seq "
        f"AND events.kind IN ('dropped', 'trained') AND events.id > {int(checkpoint)}) "
    )


def _evicted(tx: Transaction) -> str | None:
    """`_done_with` what was dropped before it was ever used, by a rule; what a consumer keeps to look at is not."""
    keep = [each.id for each in consumers.all_consumers(tx) if each.settings.keep_stale]
    kept = f" AND NOT (mine.reason = 'stale' AND consumers.id IN ({','.join(map(str, keep))}))" if keep else ""
    reasons = ",".join(f"'{reason}'" for reason in _EVICTED)
    return _done_with(tx, f"mine.state = 'dropped' AND mine.uses = 0 AND mine.reason IN ({reasons}){kept}")


def _finished(tx: Transaction) -> str | None:
    """`_done_with` what was trained or dropped."""
    return _done_with(tx, "mine.state IN ('trained', 'dropped')")


def purge(book: Book) -> int:
    """Take the bytes of records that nobody will ask for; how many."""
    with book.ledger.read() as tx:
        gone = [row[0] for row in tx.all("SELECT seq FROM records WHERE gone IS NOT NULL AND segment IS NOT NULL")]
        rule = _evicted(tx)
        evicted = (
            [] if rule is None else [row[0] for row in tx.all(f"SELECT work.seq {rule} AND work.state = 'dropped'")]
        )
        unused = tx.one(f"SELECT 1 FROM media WHERE {_UNUSED}")
    count = 0
    for marks, part in chunks(gone):
        with book.ledger.write() as tx:
            found = tx.all(
                f"SELECT seq, gone FROM records WHERE gone IS NOT NULL AND segment IS NOT NULL AND seq IN ({marks})",
                part,
            )
            count += _take_bytes(tx, found)
    for marks, part in chunks(evicted):
        with book.ledger.write() as tx:
            # A revision may have brought one back meanwhile.
            found = tx.all(f"SELECT work.seq, work.reason {_evicted(tx)} AND work.seq IN ({marks})", part)
            count += _take_bytes(tx, found)
    if count or unused:
        _forget_media(book)
    return count


def _take_bytes(tx: Transaction, found: Sequence[tuple[int, str]]) -> int:
    """Records (number, reason) that have no bytes from now on; the ledger keeps them."""
    for marks, part in chunks([seq for seq, _ in found]):
        tx.run(MARK.format(f"SELECT DISTINCT segment, 0 FROM records WHERE seq IN ({marks})"), part)
        tx.run(f"DELETE FROM media_uses WHERE seq IN ({marks})", part)
    tx.many(
        "UPDATE records SET gone = COALESCE(gone, ?), segment = NULL, start = NULL, size = NULL, slot = NULL, "
        "bytes = 0 WHERE seq = ?",
        [(reason, seq) for seq, reason in found],
    )
    work.record_events(tx, [work.Event("removed", seq, reason=reason) for seq, reason in found])
    return len(found)


def _forget_media(book: Book) -> None:
    """Media that no record uses: their bytes are garbage."""
    with book.ledger.read() as tx:
        hashes = [key for (key,) in tx.all(f"SELECT hash FROM media WHERE {_UNUSED}")]
    for marks, part in chunks(hashes):
        with book.ledger.write() as tx:
            unused = f"hash IN ({marks}) AND {_UNUSED}"
            tx.run(MARK.format(f"SELECT DISTINCT segment, 0 FROM media WHERE {unused}"), part)
            tx.run(f"DELETE FROM media WHERE {unused}", part)


def take_finished(book: Book, least: int, most: int) -> int:
    """Take the bytes of records that were trained or dropped for every consumer, the oldest first, up to `most` bytes;
    how many records. None where less than `least` bytes could be had."""
    book.shelf.seal()
    held = {name for name in book.shelf.segments() if book.shelf.busy(name)}  # other writers' cannot be written anew
    with book.ledger.read() as tx:
        rule = _finished(tx)
        if rule is None:
            return 0
        finished = tx.all(f"SELECT work.seq, records.segment, records.bytes {rule} ORDER BY work.seq")
        sizes = {
            key: 0 if segment in held else size
            for key, segment, size in tx.all("SELECT hash, segment, size FROM media")
        }
        uses: defaultdict[int, list[str]] = defaultdict(list)
        left: Counter[str] = Counter()
        for key, seq in tx.all("SELECT hash, seq FROM media_uses"):
            uses[seq].append(key)
            left[key] += 1
    freed = 0
    taken: list[int] = []
    for seq, segment, size in finished:
        if freed >= most:
            break
        if segment in held:
            continue
        taken.append(seq)
        freed += size
        for key in uses[seq]:
            left[key] -= 1
            freed += 0 if left[key] else sizes.get(key, 0)
    if freed < least:
        return 0
    count = 0
    for marks, part in chunks(taken):
        with book.ledger.write() as tx:
            found = tx.all(f"SELECT work.seq {_finished(tx)} AND work.seq IN ({marks})", part)
            count += _take_bytes(tx, [(seq, "quota") for (seq,) in found])
    _forget_media(book)
    return count


# --- bytes that must go ---------------------------------------------------------------------------------------------


def seal_purged(tx: Transaction, book: Book, segment: str) -> None:
    """End this writer's open segment if bytes in it must go, so that the next compaction, of any process, can write it
    anew. Other shelves than a folder's and memory's have no open segments."""
    if book.ledger.dialect == "sqlite" and tx.one("SELECT 1 FROM purges WHERE segment = ?", (segment,)) is not None:
        book.shelf.seal()


def pending_purges(book: Book) -> dict[str, str]:
    """Segments that hold deleted or redacted bytes, and what the removal of these waits for."""
    with book.ledger.read() as tx:
        segments = [segment for (segment,) in tx.all("SELECT segment FROM purges ORDER BY segment")]
    return {
        segment: "a writer has it open: it ends the segment when it appends next or closes the book, and a compaction "
        "after that removes the bytes"
        if book.shelf.busy(segment)
        else "the next compaction removes the bytes"
        for segment in segments
        if book.shelf.has(segment)
    }


def look_for_forgotten(book: Book) -> None:
    """Find the segments that hold copies of deleted or redacted records which the ledger no longer knows of: from
    before a revision, or from an append that crashed or came second; list them in `purges`."""
    with book.ledger.read() as tx:
        row = tx.one("SELECT value FROM meta WHERE key = 'forgotten'")
        since = int(row[0]) if row is not None else 0
        last = int(tx.one("SELECT COALESCE(MAX(id), 0) FROM events")[0])
        seqs = tx.all("SELECT DISTINCT seq FROM events WHERE id > ? AND kind IN ('deleted', 'redacted')", (since,))
        listed = {row[0] for row in tx.all("SELECT segment FROM purges")}
    if last == since:
        return
    names: set[str] = set()
    for marks, part in chunks([seq for (seq,) in seqs]):
        with book.ledger.read() as tx:
            uids = [uid for (uid,) in tx.all(f"SELECT uid FROM records WHERE seq IN ({marks})", part)]
        # A rewound record's id has its number behind it.
        names.update(uids, (uid.rpartition("~")[0] for uid in uids))
    found = []
    if names:
        for segment, size in book.shelf.segments().items():
            if segment not in listed and _holds_bytes(book, segment, size, names):
                found.append(segment)
    with book.ledger.write() as tx:
        tx.many(
            "INSERT INTO purges (segment, since) VALUES (?, ?) ON CONFLICT DO NOTHING", [(s, tx.now) for s in found]
        )
        tx.run(
            "INSERT INTO meta (key, value) VALUES ('forgotten', ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (str(last),),
        )


def _holds_bytes(book: Book, segment: str, size: int, names: set[str]) -> bool:
    """Whether a segment holds, among what nothing points to, a record of one of these ids or a medium that is gone."""
    live: defaultdict[int, set[int]] = defaultdict(set)
    with book.ledger.read() as tx:
        for start, slot in tx.all("SELECT start, slot FROM records WHERE segment = ?", (segment,)):
            live[start].add(slot)
    at = ALIGN
    while at < size:
        try:
            head = book.shelf.get(Place(segment, at, ALIGN))
            if bytes(head[:8]) == attachments.MAGIC:
                length = attachments.blob_size(head)
                with book.ledger.read() as tx:
                    if tx.one("SELECT 1 FROM media WHERE hash = ?", (bytes(head[24:56]).hex(),)) is None:
                        return True
            else:
                frame = read_header(head)
                length = frame.stop
                dead = [slot for slot in range(frame.count) if slot not in live[at]]
                if dead:
                    uids = printed_ids(
                        reading.read_frame(book, Place(segment, at, length), verify=False).columns["eid"]
                    ).uid
                    if any(uids[slot] in names for slot in dead):
                        return True
        except MissingSegmentError:
            return False
        except WireError:
            return True  # What cannot be read may be anything: the rest is copied, and this goes.
        at += -(-length // ALIGN) * ALIGN
    return False
