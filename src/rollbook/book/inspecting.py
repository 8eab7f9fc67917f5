"""Inspecting: each record and each medium against what the ledger says of it.

Invariant: a problem that is told was there on a second look, after the ledger was asked again: compaction and revisions
move records while others look. Memory is a page of the ledger and a frame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import attachments, reading, tags
from rollbook.book.errors import MissingSegmentError
from rollbook.book.findings import Report
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.shelves import Place
from rollbook.core.errors import WireError

if TYPE_CHECKING:
    from rollbook.book.book import Book

PAGE = 1000
"""How many rows of the ledger are looked at together."""


class Problem(NamedTuple):
    """What is wrong with one record."""

    kind: str
    seq: int
    uid: str
    what: str
    mend: Any = None
    """Of `tags` those of the record, of `uses` the hashes of its media."""


class _Row(NamedTuple):
    seq: int
    segment: Any
    start: Any
    size: Any
    slot: Any
    gone: str | None
    tags: tags.IndexColumns


_ROWS = f"SELECT seq, segment, start, size, slot, gone, {', '.join(tags.IndexColumns._fields)} FROM records"


def _rows(tx: Transaction, condition: str, values: Sequence[Any]) -> list[_Row]:
    found = tx.all(f"{_ROWS} WHERE {condition}", values)
    return [_Row._make((*row[:6], tags.IndexColumns(*row[6:]))) for row in found]


def pages(book: Book) -> Iterator[list[_Row]]:
    """All records, a page at a time."""
    last = -(1 << 63)
    while True:
        with book.ledger.read() as tx:
            found = _rows(tx, f"seq > ? ORDER BY seq LIMIT {PAGE}", (last,))
        if not found:
            return
        yield found
        last = found[-1].seq


def record_problems(book: Book, deep: bool, report: Report | None = None) -> Iterator[Problem]:
    """What is wrong with records, in order; what compaction or a revision moved meanwhile is looked at again."""
    for page in pages(book):
        if report is not None:
            report.records += len(page)
        suspects = [problem.seq for problem in _problems(book, page, deep)]
        for marks, part in chunks(list(dict.fromkeys(suspects))):
            with book.ledger.read() as tx:
                again = _rows(tx, f"seq IN ({marks}) ORDER BY seq", part)
            yield from _problems(book, again, deep)


def _problems(book: Book, rows: Sequence[_Row], deep: bool) -> Iterator[Problem]:
    stored: defaultdict[tuple[Any, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        if row.segment is not None:
            stored[row.segment, row.start, row.size].append(row)
        elif row.gone is None:
            yield Problem("missing", row.seq, row.tags.uid, "the ledger says neither where it lies nor why it is gone")
    for place, mine in stored.items():
        try:
            frame = reading.read_frame(book, Place(*place), deep)
        except MissingSegmentError:
            for row in mine:
                yield Problem("missing", row.seq, row.tags.uid, f"segment {place[0]} is not there")
            continue
        except (WireError, OSError) as error:
            for row in mine:
                yield Problem("damaged", row.seq, row.tags.uid, str(error))
            continue
        yield from _in_frame(book, frame, mine)


def _in_frame(book: Book, frame: Any, rows: Sequence[_Row]) -> Iterator[Problem]:
    inside = []
    for row in rows:
        if type(row.slot) is int and 0 <= row.slot < len(frame):
            inside.append(row)
        else:
            what = f"slot {row.slot!r} of a frame of {len(frame)} records"
            yield Problem("damaged", row.seq, row.tags.uid, what)
    if not inside:
        return
    try:
        many = frame.take([row.slot for row in inside])
        said = tags.index_columns(many)
        references = attachments.references(many)
    except (WireError, ValueError) as error:
        for row in inside:
            yield Problem("damaged", row.seq, row.tags.uid, str(error))
        return
    uses: defaultdict[int, set[str]] = defaultdict(set)
    known: set[str] = set()
    with book.ledger.read() as tx:
        for marks, part in chunks([row.seq for row in inside]):
            for seq, key in tx.all(f"SELECT seq, hash FROM media_uses WHERE seq IN ({marks})", part):
                uses[seq].add(key)
        for marks, part in chunks(list({key for keys in references for key in keys})):
            known.update(key for (key,) in tx.all(f"SELECT hash FROM media WHERE hash IN ({marks})", part))
    for row, mine, keys in zip(inside, said, references, strict=True):
        uid = row.tags.uid
        if mine.uid != uid:
            yield Problem("another", row.seq, uid, f"the record that lies there is {mine.uid!r}")
            continue
        unlike = [name for name in tags.IndexColumns._fields if getattr(mine, name) != getattr(row.tags, name)]
        if unlike:
            name = unlike[0]
            what = f"{name}: the ledger has {getattr(row.tags, name)!r}, the record {getattr(mine, name)!r}"
            yield Problem("tags", row.seq, uid, what, mine)
        missing = [key for key in keys if key not in known]
        if missing:
            yield Problem("medium", row.seq, uid, f"the medium sha256:{missing[0]} is not in the book")
        elif uses[row.seq] != set(keys):
            what = f"the ledger counts {len(uses[row.seq])} media, the record refers to {len(set(keys))}"
            yield Problem("uses", row.seq, uid, what, tuple(dict.fromkeys(keys)))


def media_problems(book: Book, deep: bool, report: Report | None = None) -> Iterator[tuple[str, str]]:
    """(hash, what is wrong) of media whose bytes are not what they should be."""
    last = ""
    while True:
        with book.ledger.read() as tx:
            found = tx.all(
                f"SELECT hash, segment, start, size FROM media WHERE hash > ? ORDER BY hash LIMIT {PAGE}", (last,)
            )
        if not found:
            return
        last = found[-1][0]
        if report is not None:
            report.media += len(found)
        for key, *place in found:
            told = _medium(book, key, Place(*place), deep)
            if told is None:
                continue
            with book.ledger.read() as tx:  # Compaction may have moved it.
                now = tx.one("SELECT segment, start, size FROM media WHERE hash = ?", (key,))
            told = None if now is None else _medium(book, key, Place(*now), deep)
            if told is not None:
                yield key, told


def _medium(book: Book, key: str, place: Place, deep: bool) -> str | None:
    try:
        found = attachments.open_blob(book.shelf.get(place), verify=deep).hash
    except MissingSegmentError:
        return f"segment {place.segment} is not there"
    except (WireError, OSError) as error:
        return str(error)
    return None if found == key else f"what lies there is sha256:{found}"
