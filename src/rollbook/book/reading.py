"""Reading: records by number, by id, by condition and by column.

Invariant: a reader asks the ledger where a record lies and then the shelf; where compaction has moved it in between, it
asks again. What it hands out is memory of the reader's own, and its size is that of what was asked for, not the book's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from rollbook.book import attachments, tags
from rollbook.book.digests import content_hashes
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError
from rollbook.book.ledger import Ledger, Transaction, check_text, chunks
from rollbook.book.shelves import Place, check_place
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences, uncollected
from rollbook.core.fields import owner
from rollbook.core.sparse import Reader, Span, read_rows
from rollbook.core.stack import Stack, read_stack
from rollbook.core.wire import decode, decode_arrays, read_header

if TYPE_CHECKING:
    import pyarrow as pa

    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.ids import EID

Result = TypeVar("Result")
_ATTEMPTS = 20
_TOGETHER = 16 << 20
"""How many bytes are mapped together at most: a view of a few of them keeps all."""
_WHOLE = 3
"""A frame is read whole where the records to read are more than a third of it: their ranges would be most of it."""
_WHOLE_BYTES = 16 << 10
"""A frame of at most this size is read whole: the requests for ranges take longer than the bytes."""
Location = tuple[int, str | None, int, int, int, str | None, int]
"""seq, segment, start, size, slot, why it is gone, bytes (an equal share of the frame)"""


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


def read_runs(book: Book, places: Sequence[Place]) -> Iterator[tuple[memoryview, list[Place]]]:
    """The bytes of places that lie one behind the other, as the frames of many small appends do, and the places.

    They are read or mapped together: that takes as long as one of them.
    """
    for place in places:
        check_place(place)
    if len(places) > 1 and book.shelf.transactional:
        yield from _together(book, places)
        return
    at = 0
    while at < len(places):
        first, end = places[at], at + 1
        while (
            end < len(places)
            and (places[end].segment, places[end].offset) == (first.segment, places[end - 1].stop)
            and places[end].stop - first.offset <= _TOGETHER
        ):
            end += 1
        run = list(places[at:end])
        try:
            memory = book.shelf.get(Place(first.segment, first.offset, run[-1].stop - first.offset))
        except CorruptBookError:
            # Of a segment that is cut short, what is still there.
            yield from ((book.shelf.get(place), [place]) for place in run)
        else:
            yield memory, run
        at = end


def _together(book: Book, places: Sequence[Place]) -> Iterator[tuple[memoryview, list[Place]]]:
    """The same from a database, where each frame of an append is a segment: many of them in one exchange."""
    at = 0
    while at < len(places):
        end, size = at, 0
        while end < len(places) and (end == at or size + places[end].length <= _TOGETHER):
            size += places[end].length
            end += 1
        for place, data in zip(places[at:end], book.shelf.get_many(places[at:end]), strict=True):
            yield memoryview(bytearray(data)), [place]
        at = end


def _stack(memory: memoryview, run: Sequence[Place], verify: bool) -> Stack | None:
    """The frames of a run, if they are alike."""
    spans = [(place.offset - run[0].offset, place.stop - run[0].offset) for place in run]
    return read_stack(np.frombuffer(memory, dtype=np.uint8), spans, verify)


def read_frame(book: Book, place: Place, verify: bool = True) -> Experiences:
    """A frame as it lies there, media still references; `MissingSegmentError` if compaction moved it."""
    return _decoded(book, place, book.shelf.get(place), verify)


def _decoded(book: Book, place: Place, view: memoryview, verify: bool) -> Experiences:
    try:
        head = read_header(view)
        if head.compression is not None or head.stop != len(view):
            # Books write none that are compressed, and a few bytes of such a one could be any number.
            raise WireError(f"a frame of {head.stop} bytes, compression {head.compression}; expected {len(view)}, None")
        return decode(view, verify=verify, private=book.shelf.private)
    except WireError as error:
        raise CorruptBookError(f"segment {place.segment}, byte {place.offset}: {error}") from None


def whole_arrays(
    book: Book, frames: Sequence[tuple[Place, Sequence[int]]], fields: Collection[str]
) -> Iterator[dict[str, pa.Array] | None]:
    """Columns of each frame, not copied, if its slots are all of its records in their order; `None` if not.

    Raises:
        MissingSegmentError: If compaction moved one.
    """
    slots = iter([numbers for _, numbers in frames])  # a place may come twice
    for memory, run in read_runs(book, [place for place, _ in frames]):
        stack = _stack(memory, run, False)
        if stack is not None:
            for count, arrays in zip(stack.counts, stack.arrays(fields), strict=True):
                yield arrays if _all_in_order(next(slots), count) else None
            continue
        for place in run:
            view = memory[place.offset - run[0].offset : place.stop - run[0].offset]
            try:
                complete = _all_in_order(next(slots), read_header(view).count)
                yield decode_arrays(view, fields) if complete else None
            except WireError as error:
                raise CorruptBookError(f"segment {place.segment}, byte {place.offset}: {error}") from None


def _all_in_order(slots: Sequence[Any], count: int) -> bool:
    return len(slots) == count and list(slots) == list(range(count))


def locate(source: Ledger | Transaction, seqs: Sequence[int]) -> dict[int, Location]:
    """Where records lie."""
    rows: dict[int, Location] = {}
    sql = f"SELECT seq, segment, start, size, slot, gone, bytes FROM records WHERE seq {source.in_ints}"
    for start in range(0, len(seqs), 10_000):
        rows.update((row[0], row) for row in source.all(sql, (source.array(seqs[start : start + 10_000]),)))
    return rows


def check_present(book: Book, seqs: Sequence[int], where: Mapping[int, Location]) -> None:
    """Raise if one of these records is not in the book, or has no bytes."""
    for seq in seqs:
        if seq not in where:
            raise BookError(f"record number {seq}: there is none in the book")
        if where[seq][1] is None:
            with book.ledger.read() as tx:
                (uid,) = tx.one("SELECT uid FROM records WHERE seq = ?", (seq,))
            raise BookError(f"{uid}: its bytes are gone ({where[seq][5] or 'never stored'})")


def retried(
    book: Book,
    seqs: Sequence[int],
    read: Callable[[list[Location]], Result],
    *,
    skip: bool = False,
    located: Mapping[int, Location] | None = None,
) -> Result:
    """Call `read` with the places of records, and again with their new ones where compaction has moved some meanwhile.

    Args:
        book: Where to look.
        seqs: The records' numbers.
        read: What to do with the places.
        skip: Leave out records that have no bytes (deleted since they were listed) instead of raising.
        located: The places, if the ledger was asked already.
    """
    for attempt in range(_ATTEMPTS):
        where = locate(book.ledger, seqs) if located is None or attempt else located
        if skip:
            where = {seq: place for seq, place in where.items() if place[1] is not None}
        else:
            check_present(book, seqs, where)
        try:
            return read([where[seq] for seq in seqs if seq in where])
        except MissingSegmentError as missing:
            gone = missing
    raise CorruptBookError(f"{gone}: a segment that the ledger speaks of; see `rollbook check`") from None


def fetch(book: Book, seqs: Sequence[int], *, verify: bool = True, media: bool = True) -> Experiences:
    """These records, in this order.

    Of a frame of which few records are read, only their bytes are: see `core.sparse`. The frame's checksum says
    nothing about them, so that with `verify` they are compared with the digests in the ledger, and where one differs
    the frame is read whole.
    """
    return _fetched(book, seqs, verify, media, False)[1]


def fetch_present(
    book: Book,
    seqs: Sequence[int],
    *,
    verify: bool = True,
    media: bool = True,
    located: Mapping[int, Location] | None = None,
) -> tuple[list[int], Experiences]:
    """Read those of these records that have bytes, in this order; `located`: their places, if the ledger was asked.

    Returns:
        Their numbers, and the records.
    """
    return _fetched(book, seqs, verify, media, True, located)


def _fetched(
    book: Book,
    seqs: Sequence[int],
    verify: bool,
    media: bool,
    skip: bool,
    located: Mapping[int, Location] | None = None,
) -> tuple[list[int], Experiences]:
    def read(places: list[Location]) -> tuple[list[int], Experiences]:
        numbers = [place[0] for place in places]
        if not places:
            return [], Experiences()
        if media or not verify:
            parts = _parts(book, places, verify, sparse=True)
            records = _joined(parts)
            records = restore(book, records) if media else records
            if not verify or _match(book, records, places, parts.sparse):
                return numbers, records
        records = gather(book, places, verify)
        return numbers, restore(book, records) if media else records

    return retried(book, seqs, read, skip=skip, located=located) if seqs else ([], Experiences())


def _match(book: Book, many: Experiences, where: Sequence[Location], rows: Sequence[int]) -> bool:
    """Whether some rows of `many` have the digests that the ledger has for their records."""
    if not rows:
        return True
    found = book.ledger.all(
        "SELECT seq, CASE WHEN revision = 0 THEN whole ELSE (SELECT revisions.whole FROM revisions "
        "WHERE revisions.seq = records.seq AND revisions.n = records.revision) END "
        f"FROM records WHERE seq {book.ledger.in_ints}",
        (book.ledger.array([where[i][0] for i in rows]),),
    )
    expected = {seq: None if digest is None else bytes(digest) for seq, digest in found}
    chosen = many if len(rows) == len(many) else many.take(list(rows))
    try:
        return [expected.get(where[i][0]) for i in rows] == content_hashes(chosen).whole
    except (WireError, ValueError):
        return False


def only_fields(many: Experiences, fields: Collection[str]) -> Experiences:
    """The columns of some fields alone: enough to gather and to hand on as Arrow, not to make rows of."""
    parts = {
        name: c for name, c in many.columns.items() if (found := owner(name)) is not None and found[0].name in fields
    }
    return Experiences._of(parts, len(many))


def fetch_rows(book: Book, located: Mapping[int, Location]) -> list[Experience]:
    """The records at these places that have bytes, in this order; of whole frames nothing is copied."""

    def read(places: list[Location]) -> list[Experience]:
        if not places:
            return []
        parts = _parts(book, places, together=_in_order(places))
        restored = [restore(book, part) for part in (parts.parts if parts.order is None else [_joined(parts)])]
        with uncollected():
            return [row for part in restored for row in part.rows()]

    return retried(book, list(located), read, skip=True, located=located) if located else []


def _in_order(where: Sequence[Location]) -> bool:
    """Whether the records of each frame follow each other."""
    places = [location[1:4] for location in where]
    return sum(a != b for a, b in pairwise(places)) + 1 == len(set(places))


def gather(
    book: Book, where: Sequence[Location], verify: bool = True, only: Collection[str] | None = None
) -> Experiences:
    """Records from the frames they lie in, each frame decoded once; with `only`, the columns of these fields."""
    return _joined(_parts(book, where, verify, only, sparse=not verify))


def check_slots(place: Place, slots: Sequence[Any], count: int) -> None:
    """Refuse slots that a frame of so many records has not; SQLite keeps whatever it is given, text for numbers too."""
    if not all(type(slot) is int and 0 <= slot < count for slot in slots):
        raise CorruptBookError(
            f"segment {place.segment}, byte {place.offset}: {count} records, none in slot {str(slots)[:80]}"
        )


class _Parts(NamedTuple):
    parts: list[Experiences]
    order: list[int] | None
    """Which records the parts have, one behind the other; `None` if all, in order."""
    sparse: list[int]
    """Which records were read without the rest of their frames, and are not verified."""


def _parts(
    book: Book,
    where: Sequence[Location],
    verify: bool = True,
    only: Collection[str] | None = None,
    sparse: bool = False,
    together: bool = False,
) -> _Parts:
    """The records of each frame.

    Args:
        book: Where to read.
        where: The places of the records.
        verify: Whether to check the frames' checksums.
        only: Fields to read; all if `None`.
        sparse: Read the records without the rest of their frame where they are few.
        together: Read frames that lie together as one; the records are then good to make rows of, and nothing else.
    """
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for i, location in enumerate(where):
        grouped.setdefault(location[1:4], []).append(i)
    frames = {Place(*place): indices for place, indices in grouped.items()}
    rows = _sparse_rows(book, frames, where, only) if sparse else {}
    rest = [place for place in frames if place not in rows]
    parts = {place: [many] for place, many in rows.items()}
    for memory, run in read_runs(book, rest):
        slots = {place: [where[i][4] for i in frames[place]] for place in run}
        stacked = _stacked(memory, run, verify, slots) if together else None
        if stacked is not None:
            parts.update({place: [] for place in run} | {run[0]: [stacked]})
            continue
        for place in run:
            view = memory[place.offset - run[0].offset : place.stop - run[0].offset]
            many = _decoded(book, place, view, verify)
            if only is not None:
                many = only_fields(many, only)
            check_slots(place, slots[place], len(many))
            # A whole frame in order is private memory as it is; anything else is gathered.
            parts[place] = [many if _all_in_order(slots[place], len(many)) else many.take(slots[place])]
    order = [i for indices in frames.values() for i in indices]
    return _Parts(
        [many for place in frames for many in parts[place]],
        None if order == list(range(len(order))) else order,
        sorted(i for place in rows for i in frames[place]),
    )


def _stacked(
    memory: memoryview, run: Sequence[Place], verify: bool, slots: Mapping[Place, Sequence[Any]]
) -> Experiences | None:
    """All records of a run of frames, if the frames are alike and `slots` are all they have."""
    stack = _stack(memory, run, verify)
    if stack is None or attachments.COLUMN in stack.schema.names:
        return None
    if not all(_all_in_order(slots[place], count) for place, count in zip(run, stack.counts, strict=True)):
        return None
    try:
        return stack.experiences(verify)
    except WireError:
        return None  # Read one by one, they say which is wrong.


def _sparse_rows(
    book: Book, frames: Mapping[Place, list[int]], where: Sequence[Location], only: Collection[str] | None
) -> dict[Place, Experiences]:
    """The records of the frames of which few are read, where that goes well; the others are to be read whole."""
    places, slots, spare = [], [], []
    for place, indices in frames.items():
        numbers = [where[i][4] for i in indices]
        share = where[indices[0]][6]
        plain = all(type(number) is int for number in (place.length, share, *numbers))
        if plain and place.length > max(_WHOLE_BYTES, _WHOLE * share * len(indices)):
            places.append(check_place(place))
            slots.append(numbers)
            spare.append(share * len(set(numbers)) // 2)
    readers = [
        _tolerate(read_rows(place.length, sorted(set(numbers)), only))
        for place, numbers in zip(places, slots, strict=True)
    ]
    try:
        results = _read_ranges(book, places, readers, spare)
    except CorruptBookError:
        return {}
    rows = {}
    for place, numbers, many in zip(places, slots, results, strict=True):
        if many is not None:
            rising = sorted(set(numbers))
            rows[place] = many if rising == numbers else many.take([bisect_left(rising, number) for number in numbers])
    return rows


def _tolerate(reader: Reader[Experiences]) -> Reader[Experiences | None]:
    """The reader's result, or `None` if the bytes are not good: reading them whole says what is wrong."""
    try:
        return (yield from reader)
    except WireError:
        return None


def _read_ranges(
    book: Book, places: Sequence[Place], readers: Sequence[Reader[Result]], spare: Sequence[int]
) -> list[Result | None]:
    """Run a reader for each place, all in step: the shelf is asked a few times, however many they are.

    Args:
        book: Where to read.
        places: Where each frame lies.
        readers: What reads each frame.
        spare: How many bytes more than needed may be read of each frame at a time, so that there are fewer ranges.
    """
    results: list[Result | None] = [None] * len(readers)
    pending: list[tuple[int, list[Span] | None, list[Any]]] = [(i, None, []) for i in range(len(readers))]
    while pending:
        requests: list[tuple[int, list[Span], list[Span]]] = []
        for i, spans, data in pending:
            try:
                following = next(readers[i]) if spans is None else readers[i].send(data)
            except StopIteration as finished:
                results[i] = finished.value
            else:
                requests.append((i, following, _merged(following, spare[i])))
        needed = [
            Place(places[i].segment, places[i].offset + start, stop - start)
            for i, _, merged in requests
            for start, stop in merged
        ]
        pieces = iter(book.shelf.get_many(needed) if needed else [])
        pending = []
        for i, spans, merged in requests:
            starts = [start for start, _ in merged]
            memory = [memoryview(next(pieces)) for _ in merged]
            data = []
            for start, stop in spans:
                at = bisect_right(starts, start) - 1
                data.append(memory[at][start - starts[at] : stop - starts[at]])
            pending.append((i, spans, data))
    return results


def _merged(spans: Sequence[Span], spare: int) -> list[Span]:
    """Ranges that cover `spans`, the nearest ones joined for as long as what lies between is at most `spare` bytes.

    >>> _merged([(50, 60), (0, 10), (12, 20), (100, 110)], 35)
    [(0, 60), (100, 110)]
    """
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    gaps = sorted((after[0] - before[1], i) for i, (before, after) in enumerate(pairwise(merged)))
    joined = set()
    for gap, i in gaps:
        spare -= gap
        if spare < 0:
            break
        joined.add(i)
    ranges: list[Span] = []
    for i, (start, stop) in enumerate(merged):
        if i - 1 in joined:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _joined(parts: _Parts) -> Experiences:
    joined = parts.parts[0] if len(parts.parts) == 1 else Experiences.concat(parts.parts)
    if parts.order is None:
        return joined
    back = np.empty(len(parts.order), dtype=np.int64)
    back[parts.order] = np.arange(len(parts.order))
    return joined.take(back)


def restore(book: Book, many: Experiences) -> Experiences:
    """Media in the place of their references."""
    wanted = {key for keys in attachments.references(many) for key in keys}
    if not wanted:
        return attachments.restore(many, dict[str, Any]().__getitem__)
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
            raise MissingSegmentError(f"the medium sha256:{key} is not in the ledger")
        last.append(places[key])
        return book.shelf.get(places[key])

    last: list[Place] = []
    try:
        return attachments.restore(many, get)
    except WireError as error:
        if not last:
            raise
        raise CorruptBookError(f"segment {last[-1].segment}, byte {last[-1].offset}: {error}") from None


def seqs_of(book: Book, uids: Sequence[str]) -> list[int]:
    """The numbers of records by id, in order; an unknown id is an error."""
    listed: list[int] = []
    for marks, part in chunks(uids):
        with book.ledger.read() as tx:
            seqs = dict(tx.all(f"SELECT uid, seq FROM records WHERE uid IN ({marks})", part))
        for uid in part:
            if uid not in seqs:
                raise KeyError(f"uid: got {uid!r}, which is not in the book")
            listed.append(seqs[uid])
    return listed


def read_numbers(book: Book, tx: Transaction, seqs: Sequence[int], key: str) -> list[float | None]:
    """One number of each record, from the ledger if it has it, else from the record."""
    if key in tags.IndexColumns._fields:
        found: dict[int, Any] = {}
        for marks, part in chunks(seqs):
            found.update(tx.all(f"SELECT seq, {key} FROM records WHERE seq IN ({marks})", part))
        return [None if found[seq] is None else float(found[seq]) for seq in seqs]
    where = locate(tx, seqs)
    return tags.number_column(gather(book, [where[seq] for seq in seqs]), key) if seqs else []


def uid_of(given: str | EID | Experience) -> str:
    """The id, from an id or from what has one."""
    if isinstance(given, str):
        return check_text("uid", given, 0)
    found = getattr(getattr(given, "eid", given), "uid", None)
    if not isinstance(found, str):
        raise ValueError(f"uid: got {type(given).__name__}, expected an id, an EID or an Experience")
    return found


def uids_of(given: Any) -> list[str]:
    """Several ids, from one or many."""
    if isinstance(given, str) or hasattr(given, "uid") or hasattr(given, "eid"):
        return [uid_of(given)]
    return list(dict.fromkeys(uid_of(each) for each in given))
