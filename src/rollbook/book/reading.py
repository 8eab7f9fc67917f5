"""Reading: records by number, by id, by condition and by column.

Invariant: a reader asks the ledger where a record lies and then the shelf; where compaction has moved it in between, it
asks again. What it hands out is memory of the reader's own, and its size is that of what was asked for, not the book's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rollbook.book import attachments, tags
from rollbook.book.errors import BookError, Damaged
from rollbook.book.ledger import Ledger, Transaction, chunks
from rollbook.book.shelves import MissingSegment, Place, check_place
from rollbook.errors import WireError
from rollbook.experiences import Experiences
from rollbook.fields import owner
from rollbook.wire import decode, decode_arrays, read_header

if TYPE_CHECKING:
    import pyarrow as pa

    from rollbook.book.book import Book

Result = TypeVar("Result")
_ATTEMPTS = 20
_TOGETHER = 16 << 20
"""How many bytes are mapped together at most: a view of a few of them keeps all."""
Location = tuple[int, str | None, int, int, int, str | None]
"""seq, segment, start, size, slot, why it is gone"""


class Frames:
    """The frames that were decoded last, whole; rows are gathered from them, never handed out as views."""

    def __init__(self, book: Book, most: int = 64) -> None:
        self.book = book
        self.most = most
        self._kept: OrderedDict[Place, Experiences] = OrderedDict()

    def get(self, place: Place, verify: bool = True) -> Experiences:
        """The frame at a place."""
        found = self._kept.get(place)
        if found is None:
            found = read_frame(self.book, place, verify)
            self._kept[place] = found
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(place)
        return found


def views(book: Book, places: Sequence[Place]) -> list[memoryview]:
    """The bytes at each place. Those that lie one behind the other, as the frames of many small appends do, are read or
    mapped together: that takes as long as one of them."""
    found: list[memoryview] = []
    for place in places:
        check_place(place)
    at = 0
    while at < len(places):
        first, end = places[at], at + 1
        while (
            end < len(places)
            and (places[end].segment, places[end].offset) == (first.segment, places[end - 1].stop)
            and places[end].stop - first.offset <= _TOGETHER
        ):
            end += 1
        run = places[at:end]
        try:
            whole = book.shelf.get(Place(first.segment, first.offset, run[-1].stop - first.offset))
        except Damaged:
            # Of a segment that is cut short, what is still there.
            found += [book.shelf.get(place) for place in run]
        else:
            found += [whole[place.offset - first.offset : place.stop - first.offset] for place in run]
        at = end
    return found


def read_frame(book: Book, place: Place, verify: bool = True) -> Experiences:
    """A frame as it lies there, media still references; `MissingSegment` if compaction moved it."""
    return _decoded(book, place, book.shelf.get(place), verify)


def _decoded(book: Book, place: Place, view: memoryview, verify: bool) -> Experiences:
    try:
        head = read_header(view)
        if head.compression is not None or head.stop != len(view):
            # Books write none that are compressed, and a few bytes of such a one could be any number.
            raise WireError(f"a frame of {head.stop} bytes, compression {head.compression}; expected {len(view)}, None")
        return decode(view, verify=verify, private=book.shelf.private)
    except WireError as error:
        raise Damaged(f"segment {place.segment}, byte {place.offset}: {error}") from None


def whole_arrays(
    place: Place, view: memoryview, slots: Sequence[Any], fields: Collection[str]
) -> dict[str, pa.Array] | None:
    """Columns of a frame, if `slots` are all of its records in their order; `None` if not."""
    try:
        if read_header(view).count != len(slots) or list(slots) != list(range(len(slots))):
            return None
        return decode_arrays(view, fields)
    except WireError as error:
        raise Damaged(f"segment {place.segment}, byte {place.offset}: {error}") from None


def locate(source: Ledger | Transaction, seqs: Sequence[int]) -> dict[int, Location]:
    """Where records lie."""
    rows: dict[int, Location] = {}
    sql = f"SELECT seq, segment, start, size, slot, gone FROM records WHERE seq {source.in_ints}"
    for start in range(0, len(seqs), 10_000):
        rows.update((row[0], row) for row in source.all(sql, (source.array(seqs[start : start + 10_000]),)))
    return rows


def retried(book: Book, seqs: Sequence[int], read: Callable[[dict[int, Location]], Result]) -> Result:
    """What `read` makes of the records' places; where compaction has moved some in between, of their new ones."""
    for _ in range(_ATTEMPTS):
        where = locate(book.ledger, seqs)
        for seq in seqs:
            if seq not in where:
                raise BookError(f"record number {seq}: there is none in the book")
            if where[seq][1] is None:
                with book.ledger.read() as tx:
                    (uid,) = tx.one("SELECT uid FROM records WHERE seq = ?", (seq,))
                raise BookError(f"{uid}: its bytes are gone ({where[seq][5] or 'never stored'})")
        try:
            return read(where)
        except MissingSegment as missing:
            gone = missing
    raise Damaged(f"{gone}: a segment that the ledger speaks of; see `rollbook check`") from None


def fetch(book: Book, seqs: Sequence[int], *, verify: bool = True, media: bool = True) -> Experiences:
    """These records, in this order."""
    if not seqs:
        return Experiences()

    def read(where: dict[int, Location]) -> Experiences:
        many = gather(book, [where[seq] for seq in seqs], verify)
        return restore(book, many) if media else many

    return retried(book, seqs, read)


def only_fields(many: Experiences, fields: Collection[str]) -> Experiences:
    """The columns of some fields alone: enough to gather and to hand on as Arrow, not to make rows of."""
    parts = {
        name: c for name, c in many.columns.items() if (found := owner(name)) is not None and found[0].name in fields
    }
    return Experiences._of(parts, len(many))


def fetch_parts(book: Book, seqs: Sequence[int]) -> list[Experiences]:
    """These records, in this order, in parts: where they are whole frames one after the other, nothing is copied."""

    def read(where: dict[int, Location]) -> list[Experiences]:
        parts, order = _parts(book, [where[seq] for seq in seqs])
        return [restore(book, part) for part in (parts if order is None else [_joined(parts, order)])]

    return retried(book, seqs, read) if seqs else []


def gather(
    book: Book, where: Sequence[Location], verify: bool = True, only: Collection[str] | None = None
) -> Experiences:
    """Records from the frames they lie in, each frame decoded once; with `only`, the columns of these fields."""
    return _joined(*_parts(book, where, verify, only))


def check_slots(place: Place, slots: Sequence[Any], count: int) -> None:
    """Refuse slots that a frame of so many records has not; SQLite keeps whatever it is given, text for numbers too."""
    if not all(type(slot) is int and 0 <= slot < count for slot in slots):
        raise Damaged(f"segment {place.segment}, byte {place.offset}: {count} records, none in slot {str(slots)[:80]}")


def _parts(
    book: Book, where: Sequence[Location], verify: bool = True, only: Collection[str] | None = None
) -> tuple[list[Experiences], list[int] | None]:
    """The records of each frame, and which they are of those that are asked for; `None` if all, in order."""
    frames: OrderedDict[Place, list[int]] = OrderedDict()
    for i, (_, segment, start, size, _, _) in enumerate(where):
        frames.setdefault(Place(str(segment), start, size), []).append(i)
    parts = []
    order: list[int] = []
    for (place, indices), view in zip(frames.items(), views(book, list(frames)), strict=True):
        many = _decoded(book, place, view, verify)
        if only is not None:
            many = only_fields(many, only)
        slots = [where[i][4] for i in indices]
        check_slots(place, slots, len(many))
        # A whole frame in order is private memory as it is; anything else is gathered.
        whole = slots == list(range(len(many)))
        parts.append(many if whole else many.take(slots))
        order += indices
    return parts, None if order == list(range(len(order))) else order


def _joined(parts: list[Experiences], order: list[int] | None) -> Experiences:
    joined = parts[0] if len(parts) == 1 else Experiences.concat(parts)
    if order is None:
        return joined
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    return joined.take(back)


def restore(book: Book, many: Experiences) -> Experiences:
    """Media in the place of their references."""
    wanted = {key for keys in attachments.references(many) for key in keys}
    if not wanted:
        return many
    places: dict[str, Place] = {}
    with book.ledger.read() as tx:
        for marks, part in chunks(sorted(wanted)):
            for key, segment, start, size in tx.all(
                f"SELECT hash, segment, start, size FROM media WHERE hash IN ({marks})", part
            ):
                places[key] = Place(segment, start, size)

    def get(key: str) -> memoryview:
        if key not in places:
            # Removed with its last record, since that was read: look again.
            raise MissingSegment(f"the medium sha256:{key} is not in the ledger")
        last.append(places[key])
        return book.shelf.get(places[key])

    last: list[Place] = []
    try:
        return attachments.restore(many, get)
    except WireError as error:
        if not last:
            raise
        raise Damaged(f"segment {last[-1].segment}, byte {last[-1].offset}: {error}") from None


def numbers_of(book: Book, uids: Sequence[str]) -> list[int]:
    """The numbers of records by id, in order; an unknown id is an error."""
    found: dict[str, int] = {}
    with book.ledger.read() as tx:
        for marks, part in chunks(list(dict.fromkeys(uids))):
            found.update(tx.all(f"SELECT uid, seq FROM records WHERE uid IN ({marks})", part))
    for uid in uids:
        if uid not in found:
            raise KeyError(f"uid: got {uid!r}, which is not in the book")
    return [found[uid] for uid in uids]


def numbers(book: Book, tx: Transaction, seqs: Sequence[int], key: str) -> list[float | None]:
    """One number of each record, from the ledger if it has it, else from the record."""
    if key in tags.Tags._fields:
        found: dict[int, Any] = {}
        for marks, part in chunks(seqs):
            found.update(tx.all(f"SELECT seq, {key} FROM records WHERE seq IN ({marks})", part))
        return [None if found[seq] is None else float(found[seq]) for seq in seqs]
    where = locate(tx, seqs)
    return tags.numbers(gather(book, [where[seq] for seq in seqs]), key) if seqs else []
