"""Compaction: bytes that nobody needs leave the shelf, and many small segments become few.

Invariant: whatever the ledger points to is on the shelf. Records are copied first, then the ledger points to the copies
(only where it still pointed to what was copied), then what nothing points to any more is removed, each removal checked
in the transaction that does it. A compactor that dies, or that another one overtakes, leaves bytes too many, never too
few; a record is moved whole and unharmed, or stays where it is.

A row of `orphans` says since when a segment has been seen without anything pointing to it; 0: the ledger once spoke of
it, so that no append can be on its way to it, and it may go at once.
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

from rollbook.book import attachments, consumers, purging, reading, work
from rollbook.book.errors import CorruptBookError, MissingSegmentError, SegmentBusyError
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.shelves import ALIGN, Place
from rollbook.book.windows import hit
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.ragged import Ragged
from rollbook.core.wire import encode

if TYPE_CHECKING:
    from rollbook.book.book import Book

FRAME_RECORDS = 512
FRAME_BYTES = 8 << 20
"""A new frame holds at most so many records and, unless it holds one only, about so many bytes."""
PUT_BYTES = 64 << 20
"""How much is copied between two commits: about what a compactor holds in memory."""
POINTED_AT_ONCE = 2000
"""How many rows of the ledger one transaction has point to their copies: others wait for it."""
MERGE = 8
"""So many small segments of about one size become one: each byte is then copied once for each step in size."""
SMALL = 32 << 20
TEND_EVERY = 64
"""How many appends lie between two looks whether small segments should be merged."""
TEND_ABOVE = 64
TEND_BYTES = 8 << 20
"""What is merged at once beside appends, and only if there are more than `TEND_ABOVE` segments smaller than this."""
_TEND_SECONDS = 60.0
_REMOVE_AT_ONCE = 16
_POINT = "during compaction"


@dataclass(slots=True)
class CompactionResult:
    """What a compaction did."""

    before: int = 0
    """Bytes on the shelf."""
    after: int = 0
    read: int = 0
    """Segments whose records were copied elsewhere."""
    written: int = 0
    """Segments that the copies lie in."""
    removed: int = 0
    """Segments that are gone."""
    records: int = 0
    """Records that were moved."""
    media: int = 0
    purged: int = 0
    """Records that lost their bytes: dropped by every consumer, and needed by no checkpoint."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Segments that hold something which is not what the ledger says, and what; they are left as they are."""
    pending: dict[str, str] = field(default_factory=dict)
    """Segments that still hold deleted or redacted bytes, and what the removal waits for."""


def compact(book: Book, *, garbage: float = 0.5, small: int = SMALL, grace: float = 3600.0) -> CompactionResult:
    """See `Book.compact`."""
    check_float("garbage", garbage, 0.0, 1.0)
    check_int("small", small)
    check_float("grace", grace, 0.0)
    done = CompactionResult(before=sum(book.shelf.segments().values()))
    consumers.delete_removed_consumers(book.ledger)
    done.purged = purging.purge(book)
    hit(_POINT)
    purging.look_for_forgotten(book)
    hit(_POINT)
    for names in _chosen(book, garbage, small):
        _move(book, names, done)
    done.removed += _sweep(book, grace)
    book.ledger.clear_log()
    done.pending = {
        name: "it is damaged: repair the book first" if name in done.damaged else reason
        for name, reason in purging.pending_purges(book).items()
    }
    done.after = sum(book.shelf.segments().values())
    return done


# --- which segments -------------------------------------------------------------------------------------------------


def _chosen(book: Book, garbage: float, small: int) -> list[list[str]]:
    """The segments to write anew, in the order of their age, those together that fit into one copy."""
    sizes = book.shelf.segments()
    with book.ledger.read() as tx:
        live: Counter[str] = Counter()
        for table, column in (("records", "bytes"), ("media", "size")):
            found = tx.all(f"SELECT segment, SUM({column}) FROM {table} WHERE segment IS NOT NULL GROUP BY segment")
            live.update({name: int(total) for name, total in found})
        must = {row[0] for row in tx.all("SELECT segment FROM purges")}
        emptied = {row[0] for row in tx.all("SELECT segment FROM orphans WHERE seen = 0")}
    wanted = set()
    for name, size in sizes.items():
        # What nothing points to may be an append's on its way, unless it is known that it is not.
        if name in must or (name in emptied if name not in live else _share(live[name], size) > garbage):
            wanted.add(name)
    if any(map(book.shelf.busy, wanted)):
        book.shelf.seal()  # It may be this writer's own, which can end it; others' have to wait.
        wanted = {name for name in wanted if not book.shelf.busy(name)}
    merged = {
        name
        for tier in _tiers({n: s for n, s in sizes.items() if s < small and n in live and n not in wanted}).values()
        for name in _mergeable(book, tier)
    }
    groups: list[list[str]] = []
    room = 0
    for name in sorted(wanted | merged):
        if not groups or live[name] > room:
            groups.append([])
            room = PUT_BYTES
        groups[-1].append(name)
        room -= live[name]
    # To write a single one anew because it is small would change nothing.
    return [names for names in groups if len(names) > 1 or names[0] in wanted]


def _share(live: int, size: int) -> float:
    """How much of a segment is not needed."""
    return 1.0 - live / max(size - ALIGN, 1)


def _tiers(sizes: dict[str, int]) -> dict[int, list[str]]:
    """Segments of about one size, each step eight times the one before.

    >>> _tiers({"a": 100, "b": 60_000, "c": 70_000, "d": 1 << 20})
    {0: ['a', 'b'], 1: ['c'], 2: ['d']}
    """
    tiers: defaultdict[int, list[str]] = defaultdict(list)
    for name, size in sizes.items():
        tiers[((size >> 16).bit_length() + 2) // 3].append(name)
    return dict(tiers)


def _mergeable(book: Book, names: Sequence[str]) -> list[str]:
    """Those without a writer, if they are enough for a merge to be worth it."""
    idle = [name for name in names if not book.shelf.busy(name)] if len(names) >= MERGE else []
    return idle if len(idle) >= MERGE else []


# --- copying ------------------------------------------------------------------------------------------------------


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
    """What was read and checked, to be put with one write."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.owners: list[list[_Row] | _Medium] = []
        self.size = 0

    def add(self, part: Any, owner: list[_Row] | _Medium) -> None:
        self.parts.append(part)
        self.owners.append(owner)
        self.size += len(part)


def _move(book: Book, names: Sequence[str], done: CompactionResult) -> None:
    """Copy what is needed of these segments, have the ledger point to the copies, and remove them."""
    rows: list[_Row] = []
    media: list[_Medium] = []
    with book.ledger.read() as tx:
        for marks, part in chunks(names):
            rows += [
                _Row(*row)
                for row in tx.all(
                    f"SELECT seq, segment, start, size, slot, bytes FROM records WHERE segment IN ({marks})", part
                )
            ]
            media += [
                _Medium(*row)
                for row in tx.all(f"SELECT hash, segment, start, size FROM media WHERE segment IN ({marks})", part)
            ]
    copies = _Copies()
    frames = reading.Frames(book, 8)
    for piece in _pieces(sorted(rows)):
        for many, moved in _gathered(frames, piece, done):
            copies.add(encode(many), moved)
        copies = _put(book, names, copies, done, PUT_BYTES)
    for medium in sorted(media, key=lambda medium: medium[1:]):
        blob = _blob(book, medium, done)
        if blob is not None:
            copies.add(blob, medium)
        copies = _put(book, names, copies, done, PUT_BYTES)
    _put(book, names, copies, done, 1)
    done.read += len(names)
    done.removed += _remove(book, names)


def _pieces(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Records of adjacent numbers, as many as go into a frame."""
    piece: list[_Row] = []
    room = FRAME_BYTES
    for row in rows:
        if piece and (len(piece) == FRAME_RECORDS or row.bytes > room):
            yield piece
            piece, room = [], FRAME_BYTES
        piece.append(row)
        room -= row.bytes
    if piece:
        yield piece


def _gathered(
    frames: reading.Frames, piece: Sequence[_Row], done: CompactionResult
) -> Iterator[tuple[Experiences, list[_Row]]]:
    """The records of a piece, in order, every byte checked; those together whose columns are of one type."""
    parts: list[Experiences] = []
    rows: list[_Row] = []
    kinds: dict[str, Any] = {}
    for place, run in groupby(piece, key=lambda row: row.place):
        found = list(run)
        try:
            frame = frames.get(place)
            reading.check_slots(place, [row.slot for row in found], len(frame))
        except MissingSegmentError:
            continue  # Another compactor was here.
        except CorruptBookError as error:
            done.damaged.setdefault(place.segment, str(error))
            continue
        mine = {
            name: (column.dtype, column.trailing) if isinstance(column, Ragged) else column.type
            for name, column in frame.columns.items()
        }
        if any(kinds.get(name, kind) != kind for name, kind in mine.items()):
            # Joined, narrow numbers would be kept as wide ones; columns of another version may not go together at all.
            yield Experiences.concat(parts), rows
            parts, rows, kinds = [], [], {}
        kinds |= mine
        parts.append(frame.take([row.slot for row in found]))
        rows += found
    if parts:
        yield Experiences.concat(parts), rows


def _blob(book: Book, medium: _Medium, done: CompactionResult) -> memoryview | None:
    """A medium's bytes, checked; `None` if they are gone or damaged."""
    try:
        view = book.shelf.get(Place(*medium[1:]))
        found = attachments.open_blob(view).hash
        if found != medium.hash:
            raise CorruptBookError(
                f"segment {medium.segment}, byte {medium.start}: medium {found}, expected {medium.hash}"
            )
        return view
    except MissingSegmentError:
        pass
    except WireError as error:
        done.damaged.setdefault(medium.segment, str(error))
    return None


def _put(book: Book, names: Sequence[str], copies: _Copies, done: CompactionResult, least: int) -> _Copies:
    """Put copies of `least` bytes or more on the shelf and have the ledger point to them; what is still to be put."""
    if copies.size < least:
        return copies
    hit(_POINT)
    places = book.shelf.put(copies.parts)
    hit(_POINT)
    fresh = places[0].segment
    records: list[tuple[Any, ...]] = []
    media: list[tuple[Any, ...]] = []
    for place, owner in zip(places, copies.owners, strict=True):
        if isinstance(owner, _Medium):
            media.append((fresh, place.offset, place.length, owner.hash, owner.segment, owner.start))
        else:
            share = -(-place.length // len(owner))
            records += [
                (fresh, place.offset, place.length, slot, share, row.seq, row.segment, row.start, row.slot)
                for slot, row in enumerate(owner)
            ]
    starts = range(0, max(len(records), len(media)), POINTED_AT_ONCE)
    for start in starts:
        part = slice(start, start + POINTED_AT_ONCE)
        if not _repoint(book, names, fresh, records[part], media[part], copies.size, start == starts[-1], done):
            return _Copies()
        hit(_POINT)
    return _Copies()


def _repoint(
    book: Book,
    names: Sequence[str],
    fresh: str,
    records: Sequence[tuple[Any, ...]],
    media: Sequence[tuple[Any, ...]],
    size: int,
    last: bool,
    done: CompactionResult,
) -> bool:
    """Have the ledger point to copies of records and media in the segment `fresh`; whether the segment is there."""
    with book.ledger.write() as tx:
        if not book.shelf.has(fresh):
            return False  # A remover thought it was left behind; everything is still where it was.
        had = [_pointing(tx, table, fresh) for table in ("records", "media")]
        # A record that was revised or purged meanwhile lies elsewhere: its row is left alone.
        tx.many(
            "UPDATE records SET segment = ?, start = ?, size = ?, slot = ?, bytes = ? "
            "WHERE seq = ? AND segment = ? AND start = ? AND slot = ?",
            records,
        )
        tx.many("UPDATE media SET segment = ?, start = ?, size = ? WHERE hash = ? AND segment = ? AND start = ?", media)
        moved = [_pointing(tx, table, fresh) - n for table, n in zip(("records", "media"), had, strict=True)]
        if any(moved):
            detail = {"segments": len(names), "records": moved[0], "media": moved[1], "bytes": size}
            work.record_events(tx, [work.Event("compacted", detail=detail)])
            done.written += not any(had)
        for name in (*names, fresh) if last else ():
            if not _referred(tx, name):
                tx.run(purging.MARK.format("VALUES (?, 0)"), (name,))
    done.records += moved[0]
    done.media += moved[1]
    return True


def _pointing(tx: Transaction, table: str, segment: str) -> int:
    return int(tx.one(f"SELECT COUNT(*) FROM {table} WHERE segment = ?", (segment,))[0])


# --- removing -----------------------------------------------------------------------------------------------------


def _referred(tx: Transaction, segment: str) -> bool:
    return any(
        tx.one(f"SELECT 1 FROM {table} WHERE segment = ? LIMIT 1", (segment,)) is not None
        for table in ("records", "media")
    )


def _remove(book: Book, names: Sequence[str]) -> int:
    """Remove those of these segments that nothing points to and nobody writes; how many there were."""
    count = 0
    for _, part in chunks(names, _REMOVE_AT_ONCE):
        # An append that is on its way looks in its own transaction whether its segment is still there.
        with book.ledger.write() as tx:
            for name in part:
                if _referred(tx, name):
                    continue
                there = book.shelf.has(name)
                try:
                    book.shelf.remove(name)
                except SegmentBusyError:
                    continue
                tx.run("DELETE FROM orphans WHERE segment = ?", (name,))
                tx.run("DELETE FROM purges WHERE segment = ?", (name,))
                count += there
        hit(_POINT)
    return count


def _sweep(book: Book, grace: float) -> int:
    """Note what nothing points to, remove what was noted `grace` seconds ago or more; how many were removed."""
    there = book.shelf.segments()
    with book.ledger.read() as tx:
        used = {
            row[0]
            for table in ("records", "media")
            for row in tx.all(f"SELECT DISTINCT segment FROM {table} WHERE segment IS NOT NULL")
        }
        noted = dict(tx.all("SELECT segment, seen FROM orphans"))
        must = [row[0] for row in tx.all("SELECT segment FROM purges")]
        now = tx.now
    loose = [name for name in there if name not in used and not book.shelf.busy(name)]
    new = [name for name in loose if name not in noted]
    late = [name for name in loose if name in noted and (noted[name] == 0 or noted[name] <= now - grace)]
    # A segment may have been begun after the list was made.
    absent = {name for name in (*noted, *must) if name not in there and not book.shelf.has(name)}
    found_again = [name for name in noted if name in used or name in absent]
    if new or absent or found_again:
        with book.ledger.write() as tx:
            tx.many(
                "INSERT INTO orphans (segment, seen) VALUES (?, ?) ON CONFLICT DO NOTHING", [(n, tx.now) for n in new]
            )
            tx.many("DELETE FROM orphans WHERE segment = ? AND seen = ?", [(n, noted[n]) for n in found_again])
            tx.many("DELETE FROM purges WHERE segment = ?", [(name,) for name in absent])
    return _remove(book, late)


# --- room under a quota -------------------------------------------------------------------------------------------


def make_room(book: Book, size: int) -> bool:
    """Have room for `size` bytes under the book's quota: first garbage goes, then the bytes of what every consumer is
    done with, oldest first and a sixteenth of the quota at once where there is so much; whether there is room now.

    While segments are written anew the shelf holds their copies too, up to `PUT_BYTES` above the quota. No record loses
    its bytes where all that could go would not be enough.
    """
    quota = book.quota
    if quota is None:
        return True

    def over() -> int:
        return sum(book.shelf.segments().values()) + size - quota

    while True:
        for garbage in (0.25, 0.05):
            if over() > 0:
                compact(book, garbage=garbage, small=0, grace=0.0)
        excess = over()
        if excess <= 0:
            return True
        if not purging.take_finished(book, excess, excess + quota // 16):
            # The little garbage that is left in many segments, as the last resort.
            compact(book, garbage=0.0, small=0, grace=0.0)
            return over() <= 0


# --- beside appends -----------------------------------------------------------------------------------------------

_tenders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _wait_for_tenders() -> None:
    """A daemon thread that the interpreter stops inside Arrow's code would abort the process."""
    for thread in list(_tenders):
        thread.join(10.0)


def after_append(book: Book) -> None:
    """Now and then, start a thread that merges small segments if there are many; an append never waits for it.

    The thread does one bounded step and ends. `Book.close` waits for it, and a forked child does not have it. Rows of
    a database need no merging: they are read many at once.
    """
    if book.shelf.transactional:
        return
    if next(book.appends) % TEND_EVERY or (book.tender is not None and book.tender.is_alive()):
        return
    book.tender = threading.Thread(target=_tend, args=(book,), name="rollbook-merge", daemon=True)
    _tenders.add(book.tender)
    book.tender.start()


def _tend(book: Book) -> None:
    """Merge small segments if there are many, unless somebody else does: at most `TEND_BYTES`. Errors are warnings."""
    try:
        sizes = {name: size for name, size in book.shelf.segments().items() if size < TEND_BYTES}
        if len(sizes) <= TEND_ABOVE:
            return
        names: list[str] = []
        room = TEND_BYTES
        for name in _mergeable(book, max(_tiers(sizes).values(), key=len)):
            room -= sizes[name]
            if room < 0 or len(names) == 4 * TEND_ABOVE:
                break
            names.append(name)
        with book.ledger.write() as tx:
            row = tx.one("SELECT value FROM meta WHERE key = 'tending'")
            names = [name for name in names if _referred(tx, name)]
            if len(names) < MERGE or (row is not None and float(row[0]) > tx.now):
                return
            tx.run(
                "INSERT INTO meta (key, value) VALUES ('tending', ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (repr(tx.now + _TEND_SECONDS),),
            )
        _move(book, names, CompactionResult())
        with book.ledger.write() as tx:
            tx.run("DELETE FROM meta WHERE key = 'tending'")
    except Exception as error:
        if not book.closed:
            warnings.warn(f"{book.url}: small segments could not be merged: {error}", RuntimeWarning, stacklevel=1)
