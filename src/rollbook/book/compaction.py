"""Compaction: remove bytes that are not needed any more, and merge small segments.

Invariant: everything that the ledger refers to is in the store. Records are copied first, then the ledger is changed to
refer to the copies (unless it was changed meanwhile), then segments without references are removed, each after a check
in the same transaction. A compaction that dies, or that another one overtakes, leaves too many bytes, never too few. A
record is moved completely and verified, or stays where it is.

A row of `orphans` has the time since when nothing refers to a segment. 0 means that the ledger referred to it before:
no append can be about to use it, and it may be removed at once.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import media, queue
from rollbook.book.consumer import all_consumers, delete_removed_consumers
from rollbook.book.content_hash import printed_ids
from rollbook.book.disk import hit_failpoint
from rollbook.book.errors import CorruptBookError, MissingSegmentError, SegmentBusyError
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.media import open_blob
from rollbook.book.read import FrameCache, check_slots, read_frame
from rollbook.book.segments.files import ALIGN, Place
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.ragged import Ragged
from rollbook.core.wire import encode, read_header

if TYPE_CHECKING:
    from rollbook.book.book import Book


_EVICTION_REASONS = ("stale", "max_size", "max_age", "attempts")
_UNUSED_MEDIUM = "NOT EXISTS (SELECT 1 FROM media_uses WHERE media_uses.hash = media.hash)"
MARK_ORPHANS = "INSERT INTO orphans (segment, seen) {} ON CONFLICT (segment) DO UPDATE SET seen = 0"
"""Mark segments that the ledger referred to before: no append is about to use them, and they may be removed."""


# --- records that lose their bytes ----------------------------------------------------------------------------------


def _finished_rule(tx: Transaction, condition: str) -> str | None:
    """Return the end of a query of `queue` and `records` for records that every consumer has finished.

    `condition` is about a consumer's row (`mine`). Records that a checkpoint may need again are left out. Without a
    consumer the result is `None`.
    """
    first = tx.first("SELECT MIN(id) FROM consumers")[0]
    if first is None:
        return None
    checkpoint = tx.first("SELECT MIN(event) FROM checkpoints")[0]
    return (
        "FROM queue JOIN records ON records.seq = queue.seq "
        f"WHERE queue.consumer = {int(first)} AND records.segment IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM consumers LEFT JOIN queue AS mine ON mine.consumer = consumers.id "
        f"AND mine.seq = queue.seq WHERE mine.state IS NULL OR NOT ({condition})) "
    ) + (
        ""
        if checkpoint is None
        else "AND NOT EXISTS (SELECT 1 FROM events WHERE events.seq = queue.seq "
        f"AND events.kind IN ('dropped', 'trained') AND events.id > {int(checkpoint)}) "
    )


def _evicted_rule(tx: Transaction) -> str | None:
    """Apply `_finished_rule` to records that a rule dropped before their first use, unless `keep_stale` keeps them."""
    keep = [group.id for group in all_consumers(tx) if group.settings.keep_stale]
    condition = f" AND NOT (mine.reason = 'stale' AND consumers.id IN ({','.join(map(str, keep))}))" if keep else ""
    reasons = ",".join(f"'{reason}'" for reason in _EVICTION_REASONS)
    return _finished_rule(tx, f"mine.state = 'dropped' AND mine.uses = 0 AND mine.reason IN ({reasons}){condition}")


def _trained_or_dropped_rule(tx: Transaction) -> str | None:
    """Apply `_finished_rule` to trained and dropped records."""
    return _finished_rule(tx, "mine.state IN ('trained', 'dropped')")


def purge_records(book: Book) -> int:
    """Detach the bytes of records that no consumer or checkpoint needs, and return how many."""
    with book.ledger.read() as tx:
        removed = [
            row[0] for row in tx.all("SELECT seq FROM records WHERE removed_reason IS NOT NULL AND segment IS NOT NULL")
        ]
        rule = _evicted_rule(tx)
        evicted = (
            [] if rule is None else [row[0] for row in tx.all(f"SELECT queue.seq {rule} AND queue.state = 'dropped'")]
        )
        unused = tx.first(f"SELECT 1 FROM media WHERE {_UNUSED_MEDIUM}")
    count = 0
    for marks, chunk in chunks(removed):
        with book.ledger.write() as tx:
            rows = tx.all(
                "SELECT seq, removed_reason FROM records WHERE removed_reason IS NOT NULL AND segment IS NOT NULL "
                f"AND seq IN ({marks})",
                chunk,
            )
            count += _detach_bytes(tx, rows)
    for marks, chunk in chunks(evicted):
        with book.ledger.write() as tx:
            # A revision may have returned one to the queue meanwhile.
            rows = tx.all(f"SELECT queue.seq, queue.reason {_evicted_rule(tx)} AND queue.seq IN ({marks})", chunk)
            count += _detach_bytes(tx, rows)
    if count or unused:
        _forget_media(book)
    return count


def _detach_bytes(tx: Transaction, reasons: Sequence[tuple[int, str]]) -> int:
    """Detach the bytes of records (number, reason); the ledger keeps their rows."""
    for marks, chunk in chunks([seq for seq, _ in reasons]):
        tx.run(MARK_ORPHANS.format(f"SELECT DISTINCT segment, 0 FROM records WHERE seq IN ({marks})"), chunk)
        tx.run(f"DELETE FROM media_uses WHERE seq IN ({marks})", chunk)
    tx.run_many(
        "UPDATE records SET removed_reason = COALESCE(removed_reason, ?), segment = NULL, start = NULL, "
        "size = NULL, slot = NULL, bytes = 0 WHERE seq = ?",
        [(reason, seq) for seq, reason in reasons],
    )
    queue.record_events(tx, [queue.Event("removed", seq, reason=reason) for seq, reason in reasons])
    return len(reasons)


def _forget_media(book: Book) -> None:
    """Delete the rows of media that no record uses."""
    with book.ledger.read() as tx:
        hashes = [key for (key,) in tx.all(f"SELECT hash FROM media WHERE {_UNUSED_MEDIUM}")]
    for marks, chunk in chunks(hashes):
        with book.ledger.write() as tx:
            unused = f"hash IN ({marks}) AND {_UNUSED_MEDIUM}"
            tx.run(MARK_ORPHANS.format(f"SELECT DISTINCT segment, 0 FROM media WHERE {unused}"), chunk)
            tx.run(f"DELETE FROM media WHERE {unused}", chunk)


def evict_finished(book: Book, min_bytes: int, max_bytes: int) -> int:
    """Detach the bytes of records that every consumer has trained on or dropped, oldest first.

    Args:
        book: The book.
        min_bytes: Do nothing if fewer bytes could be freed.
        max_bytes: Stop when this many bytes are freed.

    Returns:
        Number of records whose bytes were detached.
    """
    book.store.seal()
    busy = {
        name for name in book.store.segments() if book.store.busy(name)
    }  # segments of other writers cannot be rewritten
    with book.ledger.read() as tx:
        rule = _trained_or_dropped_rule(tx)
        if rule is None:
            return 0
        finished = tx.all(f"SELECT queue.seq, records.segment, records.bytes {rule} ORDER BY queue.seq")
        sizes = {
            key: 0 if segment in busy else size
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
        if freed >= max_bytes:
            break
        if segment in busy:
            continue
        taken.append(seq)
        freed += size
        for key in uses[seq]:
            left[key] -= 1
            freed += 0 if left[key] else sizes.get(key, 0)
    if freed < min_bytes:
        return 0
    count = 0
    for marks, chunk in chunks(taken):
        with book.ledger.write() as tx:
            rows = tx.all(f"SELECT queue.seq {_trained_or_dropped_rule(tx)} AND queue.seq IN ({marks})", chunk)
            count += _detach_bytes(tx, [(seq, "quota") for (seq,) in rows])
    _forget_media(book)
    return count


# --- bytes that must be removed----------------------------------------------------------------------------------------


def pending_purges(book: Book) -> dict[str, str]:
    """Return the segments that hold deleted or redacted bytes, with what their removal waits for."""
    with book.ledger.read() as tx:
        segments = [segment for (segment,) in tx.all("SELECT segment FROM purges ORDER BY segment")]
    return {
        segment: "a writer has it open: it ends the segment when it appends next or closes the book, and a compaction "
        "after that removes the bytes"
        if book.store.busy(segment)
        else "the next compaction removes the bytes"
        for segment in segments
        if book.store.has(segment)
    }


def find_stale_copies(book: Book) -> None:
    """Find segments with copies of deleted or redacted records that the ledger does not refer to; add them to `purges`.

    Such copies are left by revisions, by appends that crashed, and by appends of a record that was stored meanwhile.
    """
    with book.ledger.read() as tx:
        row = tx.first("SELECT value FROM meta WHERE key = 'forgotten'")
        since = int(row[0]) if row is not None else 0
        last = int(tx.first("SELECT COALESCE(MAX(id), 0) FROM events")[0])
        seqs = tx.all("SELECT DISTINCT seq FROM events WHERE id > ? AND kind IN ('deleted', 'redacted')", (since,))
        listed = {row[0] for row in tx.all("SELECT segment FROM purges")}
    if last == since:
        return
    names: set[str] = set()
    for marks, chunk in chunks([seq for (seq,) in seqs]):
        with book.ledger.read() as tx:
            uids = [uid for (uid,) in tx.all(f"SELECT uid FROM records WHERE seq IN ({marks})", chunk)]
        # The id of a rewound record ends in "~" and its number.
        names.update(uids, (uid.rpartition("~")[0] for uid in uids))
    segments = []
    if names:
        for segment, size in book.store.segments().items():
            if segment not in listed and _holds_stale_copy(book, segment, size, names):
                segments.append(segment)
    with book.ledger.write() as tx:
        tx.run_many(
            "INSERT INTO purges (segment, since) VALUES (?, ?) ON CONFLICT DO NOTHING", [(s, tx.now) for s in segments]
        )
        tx.run(
            "INSERT INTO meta (key, value) VALUES ('forgotten', ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (str(last),),
        )


def _holds_stale_copy(book: Book, segment: str, size: int, names: set[str]) -> bool:
    """Return whether the unreferenced parts of a segment hold a record with one of these ids, or a removed medium."""
    live: defaultdict[int, set[int]] = defaultdict(set)
    with book.ledger.read() as tx:
        for start, slot in tx.all("SELECT start, slot FROM records WHERE segment = ?", (segment,)):
            live[start].add(slot)
    at = ALIGN
    while at < size:
        try:
            head = book.store.get(Place(segment, at, ALIGN))
            if bytes(head[:8]) == media.MAGIC:
                length = media.blob_size(head)
                with book.ledger.read() as tx:
                    if tx.first("SELECT 1 FROM media WHERE hash = ?", (bytes(head[24:56]).hex(),)) is None:
                        return True
            else:
                frame = read_header(head)
                length = frame.stop
                dead = [slot for slot in range(frame.count) if slot not in live[at]]
                if dead:
                    uids = printed_ids(read_frame(book, Place(segment, at, length), verify=False).columns["eid"]).uid
                    if any(uids[slot] in names for slot in dead):
                        return True
        except MissingSegmentError:
            return False
        except WireError:
            return True  # It may be anything: the rest is copied, and this is removed.
        at += -(-length // ALIGN) * ALIGN
    return False


FRAME_RECORDS = 512
FRAME_BYTES = 8 << 20
"""Limits of a new frame: records, and bytes unless it has a single record."""
PUT_BYTES = 64 << 20
"""Bytes that are copied between two commits, and about what compaction holds in memory."""
REPOINT_ROWS = 2000
"""Rows of the ledger that one transaction updates, while other writers wait."""
MERGE_SEGMENTS = 8
"""Merge this many small segments of about one size: each byte is copied once per step in size."""
SMALL_SEGMENT_BYTES = 32 << 20
AUTO_MERGE_INTERVAL = 64
"""Check every this many appends whether small segments should be merged."""
AUTO_MERGE_SEGMENTS = 64
AUTO_MERGE_BYTES = 8 << 20
"""Bytes merged at once in the background, if more than `AUTO_MERGE_SEGMENTS` segments are smaller than this."""
_AUTO_MERGE_SECONDS = 60.0
_REMOVE_CHUNK = 16
_FAILPOINT = "during compaction"


@dataclass(slots=True)
class CompactionResult:
    """The result of a compaction.

    Attributes:
        before: Bytes in the store before.
        after: Bytes in the store afterwards.
        read: Segments whose records were copied.
        written: Segments that hold the copies.
        removed: Segments that were removed.
        records: Records that were moved.
        media: Media that were moved.
        purged: Records that lost their bytes: dropped by every consumer, and needed by no checkpoint.
        damaged: Segments that do not match the ledger, with the problem; they are not changed.
        pending: Segments that still hold deleted or redacted bytes, with what the removal waits for.

    >>> import rollbook
    >>> rollbook.open("memory:").compact().removed
    0
    """

    before: int = 0
    after: int = 0
    read: int = 0
    written: int = 0
    removed: int = 0
    records: int = 0
    media: int = 0
    purged: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)


def compact(
    book: Book, *, garbage: float = 0.5, small: int = SMALL_SEGMENT_BYTES, grace: float = 3600.0
) -> CompactionResult:
    """Implement `Book.compact`."""
    check_float("garbage", garbage, 0.0, 1.0)
    check_int("small", small)
    check_float("grace", grace, 0.0)
    done = CompactionResult(before=sum(book.store.segments().values()))
    delete_removed_consumers(book.ledger)
    done.purged = purge_records(book)
    hit_failpoint(_FAILPOINT)
    find_stale_copies(book)
    hit_failpoint(_FAILPOINT)
    for names in _choose_segments(book, garbage, small):
        _move_segments(book, names, done)
    done.removed += _sweep_orphans(book, grace)
    book.ledger.clear_log()
    done.pending = {
        name: "it is damaged: repair the book first" if name in done.damaged else reason
        for name, reason in pending_purges(book).items()
    }
    done.after = sum(book.store.segments().values())
    return done


# --- which segments -------------------------------------------------------------------------------------------------


def _choose_segments(book: Book, garbage: float, small: int) -> list[list[str]]:
    """Return the segments to rewrite, oldest first, in groups that fit into one copy."""
    sizes = book.store.segments()
    with book.ledger.read() as tx:
        live: Counter[str] = Counter()
        for table, column in (("records", "bytes"), ("media", "size")):
            rows = tx.all(f"SELECT segment, SUM({column}) FROM {table} WHERE segment IS NOT NULL GROUP BY segment")
            live.update({name: int(total) for name, total in rows})
        must = {row[0] for row in tx.all("SELECT segment FROM purges")}
        emptied = {row[0] for row in tx.all("SELECT segment FROM orphans WHERE seen = 0")}
    chosen = set()
    for name, size in sizes.items():
        # A segment without references may belong to an append that is about to commit, unless it is marked.
        if name in must or (name in emptied if name not in live else _garbage_share(live[name], size) > garbage):
            chosen.add(name)
    if any(map(book.store.busy, chosen)):
        book.store.seal()  # This ends the segment of this process; those of others have to wait.
        chosen = {name for name in chosen if not book.store.busy(name)}
    merged = {
        name
        for tier in _group_by_size(
            {n: s for n, s in sizes.items() if s < small and n in live and n not in chosen}
        ).values()
        for name in _mergeable(book, tier)
    }
    groups: list[list[str]] = []
    free_bytes = 0
    for name in sorted(chosen | merged):
        if not groups or live[name] > free_bytes:
            groups.append([])
            free_bytes = PUT_BYTES
        groups[-1].append(name)
        free_bytes -= live[name]
    # Rewriting a single small segment would change nothing.
    return [names for names in groups if len(names) > 1 or names[0] in chosen]


def _garbage_share(live: int, size: int) -> float:
    """Return the share of a segment that is not needed."""
    return 1.0 - live / max(size - ALIGN, 1)


def _group_by_size(sizes: dict[str, int]) -> dict[int, list[str]]:
    """Group segments by size; each group is eight times as large as the one before.

    >>> _group_by_size({"a": 100, "b": 60_000, "c": 70_000, "d": 1 << 20})
    {0: ['a', 'b'], 1: ['c'], 2: ['d']}
    """
    tiers: defaultdict[int, list[str]] = defaultdict(list)
    for name, size in sizes.items():
        tiers[((size >> 16).bit_length() + 2) // 3].append(name)
    return dict(tiers)


def _mergeable(book: Book, names: Sequence[str]) -> list[str]:
    """Return the segments without a writer, if a merge is worth it."""
    idle = [name for name in names if not book.store.busy(name)] if len(names) >= MERGE_SEGMENTS else []
    return idle if len(idle) >= MERGE_SEGMENTS else []


# --- copying --------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    seq: int
    segment: str
    start: int
    size: int
    slot: int
    bytes: int

    @property
    def place(self) -> Place:
        return Place(self.segment, self.start, self.size)


class _Medium(NamedTuple):
    hash: str
    segment: str
    start: int
    size: int


class _Copies:
    """Verified frames and media, to be put with one write."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.owners: list[list[_Row] | _Medium] = []
        self.size = 0

    def add(self, data: bytes | bytearray | memoryview, owner: list[_Row] | _Medium) -> None:
        self.parts.append(data)
        self.owners.append(owner)
        self.size += len(data)


def _move_segments(book: Book, names: Sequence[str], done: CompactionResult) -> None:
    """Copy the needed parts of these segments, make the ledger refer to the copies, and remove the segments."""
    rows: list[_Row] = []
    media: list[_Medium] = []
    with book.ledger.read() as tx:
        for marks, chunk in chunks(names):
            rows += [
                _Row(*row)
                for row in tx.all(
                    f"SELECT seq, segment, start, size, slot, bytes FROM records WHERE segment IN ({marks})", chunk
                )
            ]
            media += [
                _Medium(*row)
                for row in tx.all(f"SELECT hash, segment, start, size FROM media WHERE segment IN ({marks})", chunk)
            ]
    copies = _Copies()
    frames = FrameCache(book, 8)
    for piece in _split_rows(sorted(rows)):
        for records, moved in _gather(frames, piece, done):
            copies.add(encode(records), moved)
        copies = _put_copies(book, names, copies, done, PUT_BYTES)
    for medium in sorted(media, key=lambda medium: medium[1:]):
        blob = _read_blob(book, medium, done)
        if blob is not None:
            copies.add(blob, medium)
        copies = _put_copies(book, names, copies, done, PUT_BYTES)
    _put_copies(book, names, copies, done, 1)
    done.read += len(names)
    done.removed += _remove_segments(book, names)


def _split_rows(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Yield records of adjacent numbers, as many as fit into a frame."""
    piece: list[_Row] = []
    free_bytes = FRAME_BYTES
    for row in rows:
        if piece and (len(piece) == FRAME_RECORDS or row.bytes > free_bytes):
            yield piece
            piece, free_bytes = [], FRAME_BYTES
        piece.append(row)
        free_bytes -= row.bytes
    if piece:
        yield piece


def _gather(
    frames: FrameCache, piece: Sequence[_Row], done: CompactionResult
) -> Iterator[tuple[Experiences, list[_Row]]]:
    """Read and verify the records of a piece, in order; those with columns of the same types together."""
    parts: list[Experiences] = []
    rows: list[_Row] = []
    kinds: dict[str, Any] = {}
    for place, run in groupby(piece, key=lambda row: row.place):
        members = list(run)
        try:
            frame = frames.get(place)
            check_slots(place, [row.slot for row in members], len(frame))
        except MissingSegmentError:
            continue  # Another compaction removed it.
        except CorruptBookError as error:
            done.damaged.setdefault(place.segment, str(error))
            continue
        mine = {
            name: (column.dtype, column.trailing) if isinstance(column, Ragged) else column.type
            for name, column in frame.columns.items()
        }
        if any(kinds.get(name, kind) != kind for name, kind in mine.items()):
            # Joined, narrow numbers would become wide; columns of other versions may not be joinable at all.
            yield Experiences.concat(parts), rows
            parts, rows, kinds = [], [], {}
        kinds |= mine
        parts.append(frame.take([row.slot for row in members]))
        rows += members
    if parts:
        yield Experiences.concat(parts), rows


def _read_blob(book: Book, medium: _Medium, done: CompactionResult) -> memoryview | None:
    """Read and verify a medium; return `None` if it is gone or damaged."""
    try:
        view = book.store.get(Place(*medium[1:]))
        digest = open_blob(view).hash
        if digest != medium.hash:
            raise CorruptBookError(
                f"segment {medium.segment}, byte {medium.start}: medium {digest}, expected {medium.hash}"
            )
        return view
    except MissingSegmentError:
        pass
    except WireError as error:
        done.damaged.setdefault(medium.segment, str(error))
    return None


def _put_copies(book: Book, names: Sequence[str], copies: _Copies, done: CompactionResult, min_bytes: int) -> _Copies:
    """Put copies of `min_bytes` or more in the store and make the ledger refer to them; return those still to put."""
    if copies.size < min_bytes:
        return copies
    hit_failpoint(_FAILPOINT)
    places = book.store.put(copies.parts)
    hit_failpoint(_FAILPOINT)
    copy_segment = places[0].segment
    records: list[tuple[Any, ...]] = []
    media: list[tuple[Any, ...]] = []
    for place, owner in zip(places, copies.owners, strict=True):
        if isinstance(owner, _Medium):
            media.append((copy_segment, place.offset, place.length, owner.hash, owner.segment, owner.start))
        else:
            share = -(-place.length // len(owner))
            records += [
                (copy_segment, place.offset, place.length, slot, share, row.seq, row.segment, row.start, row.slot)
                for slot, row in enumerate(owner)
            ]
    starts = range(0, max(len(records), len(media)), REPOINT_ROWS)
    for start in starts:
        selection = slice(start, start + REPOINT_ROWS)
        if not _repoint(
            book, names, copy_segment, records[selection], media[selection], copies.size, start == starts[-1], done
        ):
            return _Copies()
        hit_failpoint(_FAILPOINT)
    return _Copies()


def _repoint(
    book: Book,
    names: Sequence[str],
    copy_segment: str,
    records: Sequence[tuple[Any, ...]],
    media: Sequence[tuple[Any, ...]],
    size: int,
    last: bool,
    done: CompactionResult,
) -> bool:
    """Make the ledger refer to copies in the segment `copy_segment`; return whether that segment exists."""
    with book.ledger.write() as tx:
        if not book.store.has(copy_segment):
            return False  # Another compaction removed it as an orphan; the originals are still there.
        counts_before = [_count_references(tx, table, copy_segment) for table in ("records", "media")]
        # A record that was revised or purged meanwhile has another place, and its row does not change.
        tx.run_many(
            "UPDATE records SET segment = ?, start = ?, size = ?, slot = ?, bytes = ? "
            "WHERE seq = ? AND segment = ? AND start = ? AND slot = ?",
            records,
        )
        tx.run_many(
            "UPDATE media SET segment = ?, start = ?, size = ? WHERE hash = ? AND segment = ? AND start = ?", media
        )
        moved = [
            _count_references(tx, table, copy_segment) - n
            for table, n in zip(("records", "media"), counts_before, strict=True)
        ]
        if any(moved):
            detail = {"segments": len(names), "records": moved[0], "media": moved[1], "bytes": size}
            queue.record_events(tx, [queue.Event("compacted", detail=detail)])
            done.written += not any(counts_before)
        for name in (*names, copy_segment) if last else ():
            if not _is_referenced(tx, name):
                tx.run(MARK_ORPHANS.format("VALUES (?, 0)"), (name,))
    done.records += moved[0]
    done.media += moved[1]
    return True


def _count_references(tx: Transaction, table: str, segment: str) -> int:
    return int(tx.first(f"SELECT COUNT(*) FROM {table} WHERE segment = ?", (segment,))[0])


# --- removing -------------------------------------------------------------------------------------------------------


def _is_referenced(tx: Transaction, segment: str) -> bool:
    return any(
        tx.first(f"SELECT 1 FROM {table} WHERE segment = ? LIMIT 1", (segment,)) is not None
        for table in ("records", "media")
    )


def _remove_segments(book: Book, names: Sequence[str]) -> int:
    """Remove the segments that have no references and no writer; return how many."""
    count = 0
    for _, chunk in chunks(names, _REMOVE_CHUNK):
        # An append checks in its own transaction that its segment still exists.
        with book.ledger.write() as tx:
            for name in chunk:
                if _is_referenced(tx, name):
                    continue
                exists = book.store.has(name)
                try:
                    book.store.remove(name)
                except SegmentBusyError:
                    continue
                tx.run("DELETE FROM orphans WHERE segment = ?", (name,))
                tx.run("DELETE FROM purges WHERE segment = ?", (name,))
                count += exists
        hit_failpoint(_FAILPOINT)
    return count


def _sweep_orphans(book: Book, grace: float) -> int:
    """Mark segments without references, and remove those marked at least `grace` seconds ago; return how many."""
    sizes = book.store.segments()
    with book.ledger.read() as tx:
        used = {
            row[0]
            for table in ("records", "media")
            for row in tx.all(f"SELECT DISTINCT segment FROM {table} WHERE segment IS NOT NULL")
        }
        marked = dict(tx.all("SELECT segment, seen FROM orphans"))
        to_purge = [row[0] for row in tx.all("SELECT segment FROM purges")]
        now = tx.now
    orphans = [name for name in sizes if name not in used and not book.store.busy(name)]
    new = [name for name in orphans if name not in marked]
    removable = [name for name in orphans if name in marked and (marked[name] == 0 or marked[name] <= now - grace)]
    # A segment may have been begun after the list was made.
    absent = {name for name in (*marked, *to_purge) if name not in sizes and not book.store.has(name)}
    unmarked = [name for name in marked if name in used or name in absent]
    if new or absent or unmarked:
        with book.ledger.write() as tx:
            tx.run_many(
                "INSERT INTO orphans (segment, seen) VALUES (?, ?) ON CONFLICT DO NOTHING", [(n, tx.now) for n in new]
            )
            tx.run_many("DELETE FROM orphans WHERE segment = ? AND seen = ?", [(n, marked[n]) for n in unmarked])
            tx.run_many("DELETE FROM purges WHERE segment = ?", [(name,) for name in absent])
    return _remove_segments(book, removable)


# --- room under a quota ---------------------------------------------------------------------------------------------


def make_room(book: Book, size: int) -> bool:
    """Make room for `size` bytes under the book's quota, and return whether there is room now.

    Garbage is removed first, then the bytes of records that every consumer has finished, oldest first, up to a
    sixteenth of the quota at once. While segments are rewritten, the store exceeds the quota by up to `PUT_BYTES`. No
    record loses its bytes if that would not be enough.
    """
    quota = book.quota
    if quota is None:
        return True

    def over() -> int:
        return sum(book.store.segments().values()) + size - quota

    while True:
        for garbage in (0.25, 0.05):
            if over() > 0:
                compact(book, garbage=garbage, small=0, grace=0.0)
        excess = over()
        if excess <= 0:
            return True
        if not evict_finished(book, excess, excess + quota // 16):
            # Last resort: remove the little garbage that is left in many segments.
            compact(book, garbage=0.0, small=0, grace=0.0)
            return over() <= 0


# --- in the background ----------------------------------------------------------------------------------------------

_compactors: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _join_compactors() -> None:
    """Wait for compactions: a daemon thread that is stopped inside Arrow's code would abort the process."""
    for thread in list(_compactors):
        thread.join(10.0)


def start_auto_merge(book: Book) -> None:
    """Start a thread that merges small segments if there are many; an append never waits for it.

    The thread does one bounded step and ends. `Book.close` waits for it, and a forked child does not have it. Rows of
    a database need no merging: they are read many at once.
    """
    if book.state.compactor is not None and book.state.compactor.is_alive():
        return
    book.state.compactor = threading.Thread(target=_auto_merge, args=(book,), name="rollbook-merge", daemon=True)
    _compactors.add(book.state.compactor)
    book.state.compactor.start()


def _auto_merge(book: Book) -> None:
    """Merge up to `AUTO_MERGE_BYTES` of small segments, unless another process does; warn of errors."""
    try:
        sizes = {name: size for name, size in book.store.segments().items() if size < AUTO_MERGE_BYTES}
        if len(sizes) <= AUTO_MERGE_SEGMENTS:
            return
        names: list[str] = []
        free_bytes = AUTO_MERGE_BYTES
        for name in _mergeable(book, max(_group_by_size(sizes).values(), key=len)):
            free_bytes -= sizes[name]
            if free_bytes < 0 or len(names) == 4 * AUTO_MERGE_SEGMENTS:
                break
            names.append(name)
        with book.ledger.write() as tx:
            row = tx.first("SELECT value FROM meta WHERE key = 'tending'")
            names = [name for name in names if _is_referenced(tx, name)]
            if len(names) < MERGE_SEGMENTS or (row is not None and float(row[0]) > tx.now):
                return
            tx.run(
                "INSERT INTO meta (key, value) VALUES ('tending', ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (repr(tx.now + _AUTO_MERGE_SECONDS),),
            )
        _move_segments(book, names, CompactionResult())
        with book.ledger.write() as tx:
            tx.run("DELETE FROM meta WHERE key = 'tending'")
    except Exception as error:
        if not book.closed:
            warnings.warn(f"{book.url}: small segments could not be merged: {error}", RuntimeWarning, stacklevel=1)
