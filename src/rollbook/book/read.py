"""Reading records by number, id, condition or column.

Invariant: a read gets a record's place from the ledger, then its bytes from the store, and tries again if compaction
has moved them in between. It returns private memory, whose size depends on the records that are read, not on the book.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from rollbook.book import index_columns
from rollbook.book.content_hash import content_hashes
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError
from rollbook.book.ledger import Ledger, Transaction, check_text, chunks
from rollbook.book.media import BOOK_COLUMNS, REFERENCES_COLUMN, references, restore
from rollbook.book.segments.files import Place, check_place
from rollbook.core import columns as arrow
from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences, gc_paused
from rollbook.core.fields import FIELDS, owner
from rollbook.core.frame_reader import Reader, Span, Stack, read_rows, read_stack
from rollbook.core.wire import decode, decode_arrays, read_header

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.ids import EID

    RecordId = str | EID | Experience
    RecordIds = RecordId | Iterable[RecordId]


Result = TypeVar("Result")
_ATTEMPTS = 20
_MAX_RUN_BYTES = 16 << 20
"""Maximum size of a run that is mapped at once: a view of a part of it keeps all of it."""
_WHOLE_FRAME_SHARE = 3
"""A frame is read whole if the requested records are more than a third of it."""
_WHOLE_FRAME_BYTES = 16 << 10
"""A frame up to this size is read whole, since requests for ranges would take longer."""
Location = tuple[int, str | None, int, int, int, str | None, int]
"""(seq, segment, start, size, slot, removed_reason, bytes): where a record is;
`bytes` is its equal share of the frame."""
_get_slot = operator.itemgetter(4)


class FrameCache:
    """A cache of decoded frames. Rows are copied from them, never returned as views."""

    def __init__(self, book: Book, max_frames: int = 64) -> None:
        self.book = book
        self.max_frames = max_frames
        self._cache: OrderedDict[Place, Experiences] = OrderedDict()

    def get(self, place: Place, verify: bool = True) -> Experiences:
        """Return the frame at a place."""
        frame = self._cache.get(place)
        if frame is None:
            frame = read_frame(self.book, place, verify)
            self._cache[place] = frame
            while len(self._cache) > self.max_frames:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(place)
        return frame


def read_runs(book: Book, places: Sequence[Place]) -> Iterator[tuple[memoryview, list[Place]]]:
    """Yield the bytes of runs of adjacent places, such as the frames of many small appends, and the places.

    A run is read or mapped at once, which takes as long as one frame.
    """
    for place in places:
        check_place(place)
    if len(places) > 1 and book.store.transactional:
        yield from _read_in_requests(book, places)
        return
    at = 0
    while at < len(places):
        first, end = places[at], at + 1
        while (
            end < len(places)
            and (places[end].segment, places[end].offset) == (first.segment, places[end - 1].stop)
            and places[end].stop - first.offset <= _MAX_RUN_BYTES
        ):
            end += 1
        run = list(places[at:end])
        try:
            memory = book.store.get(Place(first.segment, first.offset, run[-1].stop - first.offset))
        except CorruptBookError:
            # The segment may be cut short: read the parts that are still there.
            yield from ((book.store.get(place), [place]) for place in run)
        else:
            yield memory, run
        at = end


def _read_in_requests(book: Book, places: Sequence[Place]) -> Iterator[tuple[memoryview, list[Place]]]:
    """Read many frames in one request from a database, where each frame is a segment."""
    at = 0
    while at < len(places):
        end, size = at, 0
        while end < len(places) and (end == at or size + places[end].length <= _MAX_RUN_BYTES):
            size += places[end].length
            end += 1
        for place, data in zip(places[at:end], book.store.get_many(places[at:end]), strict=True):
            yield memoryview(bytearray(data)), [place]
        at = end


def _read_stack(memory: memoryview, run: Sequence[Place], verify: bool) -> Stack | None:
    """Read the frames of a run as one, if they have the same layout."""
    spans = [(place.offset - run[0].offset, place.stop - run[0].offset) for place in run]
    return read_stack(np.frombuffer(memory, dtype=np.uint8), spans, verify)


def read_frame(book: Book, place: Place, verify: bool = True) -> Experiences:
    """Read a frame, with references to media; raise `MissingSegmentError` if compaction moved it."""
    view = book.store.get(place)
    try:
        _check_frame(view)
        return decode(view, verify=verify, private=book.store.private)
    except WireError as error:
        raise CorruptBookError(f"segment {place.segment}, byte {place.offset}: {error}") from None


def _check_frame(view: memoryview) -> None:
    """Raise unless the bytes are one uncompressed frame; a compressed one could expand to any size."""
    head = read_header(view)
    if head.compression is not None or head.stop != len(view):
        raise WireError(f"a frame of {head.stop} bytes, compression {head.compression}; expected {len(view)}, None")


def read_whole_frames(
    book: Book, frames: Sequence[tuple[Place, Sequence[int]]], fields: Collection[str]
) -> Iterator[dict[str, pa.Array] | None]:
    """Yield the columns of each frame without copying; `None` if its slots are not all of its records in order.

    Raises:
        MissingSegmentError: If compaction moved one.
    """
    slots = iter([numbers for _, numbers in frames])  # a place may come twice
    for memory, run in read_runs(book, [place for place, _ in frames]):
        stack = _read_stack(memory, run, False)
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
    """Return the locations of records, by number."""
    locations: dict[int, Location] = {}
    sql = f"SELECT seq, segment, start, size, slot, removed_reason, bytes FROM records WHERE seq {source.in_ints}"
    for start in range(0, len(seqs), 10_000):
        for row in source.all(sql, (source.array(seqs[start : start + 10_000]),)):
            locations[row[0]] = row
    return locations


def check_present(book: Book, seqs: Sequence[int], locations: Mapping[int, Location]) -> list[Location]:
    """Return the locations of these records, in this order.

    Raises:
        BookError: A record is not in the book, or its bytes are gone.
    """
    present = []
    for seq in seqs:
        if seq not in locations:
            raise BookError(f"record number {seq}: not in the book")
        if locations[seq][1] is None:
            with book.ledger.read() as tx:
                (uid,) = tx.first("SELECT uid FROM records WHERE seq = ?", (seq,))
            raise BookError(f"{uid}: data was removed ({locations[seq][5] or 'never stored'})")
        present.append(locations[seq])
    return present


def retry_when_moved(
    book: Book,
    seqs: Sequence[int],
    read: Callable[[list[Location]], Result],
    *,
    skip: bool = False,
    located: Mapping[int, Location] | None = None,
) -> Result:
    """Call `read` with the locations of records, and again with new ones if compaction moved some in between.

    Args:
        book: The book.
        seqs: The records' numbers.
        read: Reads the records at these locations.
        skip: Leave out records that have no bytes (deleted since they were listed) instead of raising.
        located: The locations, if they were queried already.
    """
    for attempt in range(_ATTEMPTS):
        locations = locate(book.ledger, seqs) if located is None or attempt else located
        if skip:
            places = [locations[seq] for seq in seqs if seq in locations and locations[seq][1] is not None]
        else:
            places = check_present(book, seqs, locations)
        try:
            return read(places)
        except MissingSegmentError as missing:
            missing_error = missing
    raise CorruptBookError(f"{missing_error}: a segment that the ledger refers to; see `rollbook check`") from None


def fetch(book: Book, seqs: Sequence[int], *, verify: bool = True, media: bool = True) -> Experiences:
    """Read records, in this order.

    If few records of a frame are read, only their bytes are (see `core.frame_reader`). The frame's checksum does not
    cover them alone, so `verify` compares them with the hashes in the ledger; if one differs, the whole frame is read.

    Args:
        book: The book.
        seqs: The records' numbers.
        verify: Detect corrupt bytes.
        media: Restore media; otherwise records have references.

    Raises:
        BookError: A record is not in the book, or its bytes are gone.
        CorruptBookError: Bytes do not match the ledger.
    """
    if not seqs:
        return Experiences()
    for _ in range(_ATTEMPTS):
        places = check_present(book, seqs, locate(book.ledger, seqs))
        try:
            parts = _read_parts(book, places, verify, sparse=media or not verify)
            return _assemble(book, places, parts, verify, media)
        except MissingSegmentError as error:  # Compaction moved it.
            missing = error
    raise CorruptBookError(f"{missing}: a segment that the ledger refers to; see `rollbook check`") from None


def fetch_present(
    book: Book,
    seqs: Sequence[int],
    *,
    verify: bool = True,
    media: bool = True,
    located: Mapping[int, Location] | None = None,
) -> tuple[list[int], Experiences]:
    """Read records in this order, as `fetch`, but skip those without bytes.

    Args:
        book: The book.
        seqs: The records' numbers.
        verify: Detect corrupt bytes.
        media: Restore media.
        located: Their locations, if they were queried already.

    Returns:
        The numbers of the records that have bytes, and the records.
    """

    def read(places: list[Location]) -> tuple[list[int], Experiences]:
        if not places:
            return [], Experiences()
        parts = _read_parts(book, places, verify, sparse=media or not verify)
        return [place[0] for place in places], _assemble(book, places, parts, verify, media)

    return retry_when_moved(book, seqs, read, skip=True, located=located) if seqs else ([], Experiences())


def _assemble(book: Book, places: Sequence[Location], parts: _Parts, verify: bool, media: bool) -> Experiences:
    """Join the records of each frame and restore their media; read frames whole if a sparse record is damaged."""
    records = restore_media(book, _join(parts)) if media else _join(parts)
    if verify and parts.sparse and not _matches_hashes(book, records, places, parts.sparse):
        records = restore_media(book, gather(book, places, verify))
    return records


def _matches_hashes(book: Book, records: Experiences, locations: Sequence[Location], rows: Sequence[int]) -> bool:
    """Return whether some rows of `records` have the hashes that the ledger has for them."""
    hashes = book.ledger.all(
        "SELECT seq, CASE WHEN revision = 0 THEN full_hash ELSE (SELECT revisions.full_hash FROM revisions "
        "WHERE revisions.seq = records.seq AND revisions.n = records.revision) END "
        f"FROM records WHERE seq {book.ledger.in_ints}",
        (book.ledger.array([locations[i][0] for i in rows]),),
    )
    expected = {seq: None if digest is None else bytes(digest) for seq, digest in hashes}
    chosen = records if len(rows) == len(records) else records.take(list(rows))
    try:
        return [expected.get(locations[i][0]) for i in rows] == content_hashes(chosen).full
    except (WireError, ValueError):
        return False


def only_fields(records: Experiences, fields: Collection[str]) -> Experiences:
    """Return the columns of some fields, which is enough for Arrow but not for rows."""
    parts = {
        name: c for name, c in records.columns.items() if (entry := owner(name)) is not None and entry[0].name in fields
    }
    return Experiences.from_encoded(parts, len(records))


def fetch_rows(book: Book, located: Mapping[int, Location]) -> list[Experience]:
    """Read the records at these locations that have bytes, in this order; whole frames are not copied."""

    def read(places: list[Location]) -> list[Experience]:
        if not places:
            return []
        parts = _read_parts(book, places, together=_in_order(places))
        restored = [
            restore_media(book, records) for records in (parts.parts if parts.order is None else [_join(parts)])
        ]
        with gc_paused():
            return [row for records in restored for row in records.rows()]

    return retry_when_moved(book, list(located), read, skip=True, located=located) if located else []


def _in_order(locations: Sequence[Location]) -> bool:
    """Return whether the records of each frame are adjacent."""
    places = [location[1:4] for location in locations]
    return sum(a != b for a, b in pairwise(places)) + 1 == len(set(places))


def gather(
    book: Book, locations: Sequence[Location], verify: bool = True, only: Collection[str] | None = None
) -> Experiences:
    """Read records, each frame once; with `only`, the columns of these fields."""
    return _join(_read_parts(book, locations, verify, only, sparse=not verify))


def check_slots(place: Place, slots: Sequence[Any], count: int) -> None:
    """Raise `CorruptBookError` if a frame of `count` records lacks one of these slots.

    The types are checked because SQLite stores text in a column of numbers, too.
    """
    if slots and ({*map(type, slots)} != {int} or min(slots) < 0 or max(slots) >= count):
        raise CorruptBookError(
            f"segment {place.segment}, byte {place.offset}: {count} records, none in slot {str(slots)[:80]}"
        )


class _Parts(NamedTuple):
    parts: list[Experiences]
    order: list[int] | None
    """Index of each record of the joined parts; `None` if they are in order."""
    sparse: list[int]
    """Indices of records that were read without the rest of their frames, and are not verified."""


def _read_parts(
    book: Book,
    locations: Sequence[Location],
    verify: bool = True,
    only: Collection[str] | None = None,
    sparse: bool = False,
    together: bool = False,
) -> _Parts:
    """Read the records of each frame.

    Args:
        book: The book.
        locations: Locations of the records.
        verify: Verify the checksums of frames.
        only: Fields to read; all if `None`.
        sparse: Read the records without the rest of their frame if they are few.
        together: Read adjacent frames as one; only rows can be made from the result.
    """
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for i, location in enumerate(locations):
        grouped.setdefault(location[1:4], []).append(i)
    frames = {Place(*place): indices for place, indices in grouped.items()}
    slots = {place: list(map(_get_slot, map(locations.__getitem__, indices))) for place, indices in frames.items()}
    shares = {place: locations[indices[0]][6] for place, indices in frames.items()}
    rows = _sparse_rows(book, slots, shares, only) if sparse else {}
    rest = [place for place in frames if place not in rows]
    parts = {place: [records] for place, records in rows.items()}
    for memory, run in read_runs(book, rest):
        stacked = _read_stacked(memory, run, verify, slots) if together else None
        if stacked is not None:
            parts.update({place: [] for place in run} | {run[0]: [stacked]})
            continue
        for place in run:
            view = memory[place.offset - run[0].offset : place.stop - run[0].offset]
            try:
                _check_frame(view)
                records = decode(view, verify=verify, private=book.store.private)
            except WireError as error:
                raise CorruptBookError(f"segment {place.segment}, byte {place.offset}: {error}") from None
            if only is not None:
                records = only_fields(records, only)
            check_slots(place, slots[place], len(records))
            # A whole frame in order is private memory as it is; anything else is gathered.
            in_order = slots[place] == list(range(len(records)))
            parts[place] = [records if in_order else records.take(slots[place])]
    order = [i for indices in frames.values() for i in indices]
    return _Parts(
        [records for place in frames for records in parts[place]],
        None if order == list(range(len(order))) else order,
        sorted([i for place in rows for i in frames[place]]),
    )


def _read_stacked(
    memory: memoryview, run: Sequence[Place], verify: bool, slots: Mapping[Place, Sequence[Any]]
) -> Experiences | None:
    """Read all records of a run as one, if the frames have the same layout and `slots` are all of them."""
    stack = _read_stack(memory, run, verify)
    if stack is None or REFERENCES_COLUMN in stack.schema.names:
        return None
    if not all(_all_in_order(slots[place], count) for place, count in zip(run, stack.counts, strict=True)):
        return None
    try:
        return stack.experiences(verify)
    except WireError:
        return None  # Reading them one by one reports the damaged one.


def _sparse_rows(
    book: Book, frames: Mapping[Place, list[Any]], shares: Mapping[Place, Any], only: Collection[str] | None
) -> dict[Place, Experiences]:
    """Read single records of frames of which few records are needed.

    Args:
        book: The book.
        frames: The slots to read of each frame. Slots and shares come from the ledger and may have any type.
        shares: The bytes per record of each frame.
        only: Fields to read; all if `None`.

    Returns:
        The records by frame. Frames that are missing here have to be read whole.
    """
    places, slots, spare = [], [], []
    for place, numbers in frames.items():
        share = shares[place]
        plain = {*map(type, (place.length, share, *numbers))} == {int}
        if plain and place.length > max(_WHOLE_FRAME_BYTES, _WHOLE_FRAME_SHARE * share * len(numbers)):
            places.append(check_place(place))
            slots.append(numbers)
            spare.append(share * len(set(numbers)) // 2)
    if not places:
        return {}
    readers = [
        _ignore_damage(read_rows(place.length, sorted(set(numbers)), only))
        for place, numbers in zip(places, slots, strict=True)
    ]
    try:
        results = _read_ranges(book, places, readers, spare)
    except CorruptBookError:
        return {}
    rows = {}
    for place, numbers, records in zip(places, slots, results, strict=True):
        if records is not None:
            rising = sorted(set(numbers))
            rows[place] = (
                records if rising == numbers else records.take([bisect_left(rising, number) for number in numbers])
            )
    return rows


def _ignore_damage(reader: Reader[Experiences]) -> Reader[Experiences | None]:
    """Return the reader's result, or `None` if the bytes are damaged: reading the whole frame then reports it."""
    try:
        return (yield from reader)
    except WireError:
        return None


def _read_ranges(
    book: Book, places: Sequence[Place], readers: Sequence[Reader[Result]], spare: Sequence[int]
) -> list[Result | None]:
    """Run a reader for each frame, all in step, so that the store gets few requests.

    Args:
        book: The book.
        places: Place of each frame.
        readers: Reader of each frame.
        spare: Unneeded bytes that may be read of each frame per step, to request fewer ranges.
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
                requests.append((i, following, _merge_spans(following, spare[i])))
        needed = [
            Place(places[i].segment, places[i].offset + start, stop - start)
            for i, _, merged in requests
            for start, stop in merged
        ]
        pieces = iter(book.store.get_many(needed) if needed else [])
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


def _merge_spans(spans: Sequence[Span], spare: int) -> list[Span]:
    """Return ranges that cover `spans`, the nearest ones joined while the gaps total at most `spare` bytes.

    >>> _merge_spans([(50, 60), (0, 10), (12, 20), (100, 110)], 35)
    [(0, 60), (100, 110)]
    """
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    gaps = sorted((following[0] - previous[1], i) for i, (previous, following) in enumerate(pairwise(merged)))
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


def _join(parts: _Parts) -> Experiences:
    joined = parts.parts[0] if len(parts.parts) == 1 else Experiences.concat(parts.parts)
    if parts.order is None:
        return joined
    back = np.empty(len(parts.order), dtype=np.int64)
    back[parts.order] = np.arange(len(parts.order))
    return joined.take(back)


def restore_media(book: Book, records: Experiences) -> Experiences:
    """Replace references to media by the media."""
    if not any(name.startswith(BOOK_COLUMNS) for name in records.columns):
        return records
    hashes = {key for keys in references(records) for key in keys}
    if not hashes:
        return restore(records, dict[str, Any]().__getitem__)
    places: dict[str, Place] = {}
    with book.ledger.read() as tx:
        for marks, chunk in chunks(sorted(hashes)):
            for key, segment, start, size in tx.all(
                f"SELECT hash, segment, start, size FROM media WHERE hash IN ({marks})", chunk
            ):
                places[key] = Place(segment, start, size)

    def get(key: str) -> memoryview:
        if key not in places:
            # It was removed with its last record after that was read: read again.
            raise MissingSegmentError(f"the medium sha256:{key} is not in the ledger")
        last.append(places[key])
        return book.store.get(places[key])

    last: list[Place] = []
    try:
        return restore(records, get)
    except WireError as error:
        if not last:
            raise
        raise CorruptBookError(f"segment {last[-1].segment}, byte {last[-1].offset}: {error}") from None


def find_seqs(book: Book, uids: Sequence[str]) -> list[int]:
    """Return the numbers of records by id, in order; an unknown id raises `KeyError`."""
    listed: list[int] = []
    for marks, chunk in chunks(uids):
        with book.ledger.read() as tx:
            seqs = dict(tx.all(f"SELECT uid, seq FROM records WHERE uid IN ({marks})", chunk))
        for uid in chunk:
            if uid not in seqs:
                raise KeyError(f"uid: got {uid!r}, which is not in the book")
            listed.append(seqs[uid])
    return listed


def read_numbers(book: Book, tx: Transaction, seqs: Sequence[int], key: str) -> list[float | None]:
    """Return one number per record, from the ledger if possible, else from the record."""
    if key in index_columns.IndexColumns._fields:
        numbers: dict[int, Any] = {}
        for marks, chunk in chunks(seqs):
            numbers.update(tx.all(f"SELECT seq, {key} FROM records WHERE seq IN ({marks})", chunk))
        return [None if numbers[seq] is None else float(numbers[seq]) for seq in seqs]
    locations = locate(tx, seqs)
    return index_columns.number_column(gather(book, [locations[seq] for seq in seqs]), key) if seqs else []


def get_uid(record: RecordId) -> str:
    """Return the id of a record, from the id itself, an `EID` or an `Experience`."""
    if isinstance(record, str):
        return check_text("uid", record, 0)
    uid = getattr(getattr(record, "eid", record), "uid", None)
    if not isinstance(uid, str):
        raise ValueError(f"uid: got {type(record).__name__}, expected an id, an EID or an Experience")
    return uid


def get_uids(records: RecordIds) -> list[str]:
    """Return the distinct ids of one record or of several."""
    if isinstance(records, str) or hasattr(records, "uid") or hasattr(records, "eid"):
        return [get_uid(records)]  # type: ignore[arg-type]
    return list(dict.fromkeys(get_uid(record) for record in records))


LEDGER_COLUMNS = (
    *index_columns.IndexColumns._fields,
    "seq",
    "evaluation",
    "admitted",
    "revision",
    "bytes",
    "removed_reason",
)
"""Columns of the ledger that a condition can be on."""
_CONDITION_COLUMNS = tuple(
    dict.fromkeys(
        [*LEDGER_COLUMNS, *(name for name, field in FIELDS.items() if field.kind in ("text", "number", "integer"))]
    )
)
"""All columns that a condition can be on, in addition to entries of `info` and `metrics`."""
Scalar = str | float | bool
Operand = Scalar | None | Sequence[Scalar]
Condition = tuple[str, str, Any]
"""Column, operator (one of `OPERATORS`) and operand."""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SQL_OPERATORS = {"=": "=", "==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
OPERATORS = (*_COMPARISONS, "in", "not in", "is", "is not")
PAGE_ROWS = 1024
MAX_IN_VALUES = 10_000
"""Maximum number of values of one `in`; `Book.get` takes any number of ids."""


def parse_conditions(conditions: Sequence[Any], equal: dict[str, Any]) -> list[Condition]:
    """Check conditions: `("reward", ">", 0.5)`, and `task="a"` for `("task", "=", "a")`."""
    parsed: list[Condition] = []
    for condition in (
        *conditions,
        *((name, "in" if isinstance(value, (list, tuple, set)) else "=", value) for name, value in equal.items()),
    ):
        if not isinstance(condition, tuple) or len(condition) != 3 or not isinstance(condition[0], str):
            raise ValueError(f"where: got {condition!r}, expected (column, operator, value)")
        name, test, value = condition
        if test not in OPERATORS:
            raise ValueError(f"where: {name}: got operator {test!r}, expected one of {', '.join(OPERATORS)}")
        head = name.split(".")[0]
        if name not in LEDGER_COLUMNS and head not in FIELDS:
            raise ValueError(
                f"where: unknown column {name!r}{suggest(name, [*_CONDITION_COLUMNS, 'info.NAME', 'metrics.NAME'])}"
            )
        if test in ("in", "not in"):
            if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
                raise ValueError(f"where: {name}: got {test} {value!r}, expected several values")
            value = list(value)
            if len(value) > MAX_IN_VALUES:
                raise ValueError(f"where: {name}: got {len(value)} values, expected at most {MAX_IN_VALUES}")
        elif test in ("is", "is not"):
            if value is not None:
                raise ValueError(f"where: {name}: got {test} {value!r}, expected {test} None")
        elif value is None:
            if test not in ("=", "==", "!="):
                raise ValueError(f"where: {name}: got {test} None, expected 'is' or 'is not'")
            test = "is" if test in ("=", "==") else "is not"
        if (
            head not in ("info", "metrics")
            and name not in LEDGER_COLUMNS
            and FIELDS[head].kind not in ("text", "number", "integer")
        ):
            raise ValueError(
                f"where: {name!r} is a {FIELDS[head].kind}; conditions are on numbers and texts, book.sql on all"
            )
        if name in LEDGER_COLUMNS and value is not None:
            value = (
                [_coerce_operand(name, condition) for condition in value]
                if isinstance(value, list)
                else _coerce_operand(name, value)
            )
        parsed.append((name, test, value))
    return parsed


def _coerce_operand(name: str, value: Scalar) -> str | float:
    """Convert a value so that every database compares it with a column in the same way."""
    if name in ("batch", "task"):
        value = str(value)
    kind = LEDGER_TYPES[name]
    if kind == pa.large_string():
        if not isinstance(value, str) or "\0" in value or value.encode("utf-8", "replace").decode() != value:
            raise ValueError(f"where: {name}: got {value!r}, expected a string without NUL and lone surrogates")
        return value
    # Databases accept neither integers beyond 64 bits nor numpy numbers.
    number = check_float(f"where: {name}", int(value) if isinstance(value, (bool, np.bool_)) else value)
    return int(value) if isinstance(value, Integral) and abs(number) < 2**63 else number


def build_ledger_condition(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    """Return the SQL of the conditions that the ledger can answer, and its parameters."""
    parts: list[str] = []
    values: list[Any] = []
    for name, test, value in conditions:
        if name not in LEDGER_COLUMNS:
            continue
        # The ledger stores no number for a NaN reward, which differs from every number and is not missing.
        nan = f" OR scored = {index_columns.NOT_A_NUMBER}" if name == "reward" and test in ("!=", "not in") else ""
        if test in ("is", "is not") and name == "reward":
            parts.append(f"scored {'=' if test == 'is' else '<>'} {index_columns.UNSCORED}")
        elif test in ("is", "is not"):
            parts.append(f"{name} {test.upper()} NULL")
        elif test in ("in", "not in"):
            if not value:
                parts.append("1 = 0" if test == "in" else "1 = 1")
                continue
            parts.append(f"({name} {test.upper()} ({','.join('?' * len(value))}){nan})")
            values += value
        else:
            parts.append(f"({name} {_SQL_OPERATORS[test]} ?{nan})")
            values.append(value)
    return " AND ".join(parts) or "1 = 1", values


class Selection:
    """The records that meet some conditions, read lazily; created by `Book.where`.

    Args:
        book: The book.
        conditions: (column, operator, value) of each condition.
        order: Column of the ledger to order by.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, i], reward=i / 4, info={"i": i}) for i in range(5)])
    >>> good = book.where(("reward", ">", 0.4), ("info.i", "<", 4))
    >>> good.count(), [record.reward for record in good]
    (2, [0.5, 0.75])
    """

    def __init__(self, book: Book, conditions: Sequence[Condition], order: str = "seq") -> None:
        self._book = book
        self._conditions = list(conditions)
        self._order = order

    def where(self, *conditions: Condition, **equal: Operand) -> Selection:
        """Return the records that also meet these conditions. See `Book.where`."""
        return type(self)(self._book, [*self._conditions, *parse_conditions(conditions, equal)], self._order)

    @property
    def _record_conditions(self) -> list[Condition]:
        return [condition for condition in self._conditions if condition[0] not in LEDGER_COLUMNS]

    def count(self) -> int:
        """Count the records, including failed runs and those whose bytes were removed (see `removed_reason`)."""
        if not self._record_conditions:
            sql, values = build_ledger_condition(self._conditions)
            with self._book.ledger.read() as tx:
                return int(tx.first(f"SELECT COUNT(*) FROM records WHERE {sql}", values)[0])
        return sum(len(piece) for piece in self._pieces())

    def uids(self) -> list[str]:
        """Return their ids, in the order in which they were appended, including those whose bytes are gone."""
        return [uid for piece in self._pieces() for _, uid, *_ in piece]

    def experiences(self) -> Experiences:
        """Return all records at once, without those whose bytes were removed."""
        return Experiences.concat(list(self.batches()))

    def batches(self, rows: int = PAGE_ROWS) -> Iterator[Experiences]:
        """Yield the records in batches; those whose bytes are gone are left out.

        Args:
            rows: Records per batch at most.
        """
        for piece in self._pieces(check_int("rows", rows, 1)):
            located = _locations(piece)
            present, records = fetch_present(self._book, list(located), located=located)
            if present:
                yield records

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces():
            yield from fetch_rows(self._book, _locations(piece))

    def scan(self, columns: Sequence[str] | None = None, rows: int = PAGE_ROWS) -> Iterator[pa.RecordBatch]:
        """Return Arrow batches of some columns of the records.

        Uses the memory of one batch. Other columns are not read, and columns of mapped segments are not copied. Bytes
        are checked only for memory safety; `Book.get` checks all of them.

        Args:
            columns: Names of columns; all if `None`.
            rows: Rows per batch at most.
        """
        check_int("rows", rows, 1)
        return scan(self._book, self, columns, rows)

    def _pieces(self, rows: int = PAGE_ROWS) -> Iterator[list[Any]]:
        """Yield (seq, uid, segment, start, size, slot, removed_reason, bytes) of records that meet all conditions."""
        sql, values = build_ledger_condition(self._conditions)
        last = 0
        while True:
            with self._book.ledger.read() as tx:
                page = tx.all(
                    "SELECT seq, uid, segment, start, size, slot, removed_reason, bytes FROM records "
                    f"WHERE seq > ? AND {sql} ORDER BY seq LIMIT ?",
                    (last, *values, rows),
                )
            if not page:
                return
            last = page[-1][0]
            matches = page
            for condition in self._record_conditions:
                matches = self._filtered(matches, condition)
            if matches:
                yield matches
            if len(page) < rows:
                return

    def _filtered(self, piece: list[Any], condition: Condition) -> list[Any]:
        values = _read_values(self._book, [row[0] for row in piece if row[2] is not None], condition[0])
        return [row for row in piece if row[0] in values and _meets_condition(values[row[0]], condition)]

    def __repr__(self) -> str:
        shown = " and ".join(f"{name} {test} {value!r}" for name, test, value in self._conditions)
        return f"Selection({self._book.url!r}, {shown or 'all'})"


def _locations(piece: Sequence[Any]) -> dict[int, Location]:
    """Return the locations of the records of a piece that have bytes."""
    return {row[0]: (row[0], *row[2:]) for row in piece if row[2] is not None}


def _read_values(book: Book, seqs: list[int], name: str) -> dict[int, Any]:
    """Return one field of records by number, without records that have no bytes."""
    head, dot, key = name.partition(".")
    present, records = fetch_present(book, seqs, verify=False, media=False)
    values = records.values(head) if present else []
    if dot:
        values = [None if value is None else value.get(key) for value in values]
    return dict(zip(present, values, strict=True))


def _meets_condition(value: Any, condition: Condition) -> bool:
    _, test, operand = condition
    if test == "is":
        return value is None
    if test == "is not":
        return value is not None
    if value is None:
        return False
    try:
        if test == "in":
            return value in operand
        if test == "not in":
            return value not in operand
        return bool(_COMPARISONS[test](value, operand))
    except TypeError:
        return False


# --- columns --------------------------------------------------------------------------------------------------------


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """Check names of columns: of the ledger, or fields of a record."""
    if columns is None:
        return None
    for name in columns:
        if not isinstance(name, str) or (name not in LEDGER_COLUMNS and name not in FIELDS):
            raise ValueError(
                f"columns: got {name!r}, expected names of columns"
                f"{suggest(str(name), dict.fromkeys([*LEDGER_COLUMNS, *FIELDS]))}"
            )
    return list(dict.fromkeys(columns))


def scan(book: Book, selection: Selection, columns: Sequence[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    """Implement `Selection.scan`: columns of the ledger come from it, the others from frames.

    There is a batch per frame, so that columns of mapped segments are not copied.
    """
    requested = check_columns(columns)
    names = (
        [*LEDGER_COLUMNS, *(name for name in FIELDS if name not in LEDGER_COLUMNS)] if requested is None else requested
    )
    from_ledger = [name for name in names if name in LEDGER_COLUMNS]
    from_frames = [name for name in names if name not in LEDGER_COLUMNS]
    if from_frames and set(from_ledger) <= _ALSO_IN_FRAMES:
        # Frames have the same numbers, which saves a query of the ledger.
        from_ledger, from_frames = [], names
    for piece in selection._pieces(rows):
        with_bytes = [row for row in piece if row[2] is not None] if from_frames else piece
        if not with_bytes:
            continue
        arrays: dict[str, pa.Array] = {}
        if from_ledger:
            with book.ledger.read() as tx:
                arrays = ledger_arrays(tx, from_ledger, [row[0] for row in with_bytes])
        if not from_frames:
            yield _build_batch(names, arrays)
            continue
        runs = [list(run) for _, run in groupby(with_bytes, key=lambda row: row[2:5])]
        start = 0
        for run, (present, frame_columns) in zip(runs, _read_run_columns(book, runs, from_frames), strict=True):
            frame_arrays = {name: array.slice(start, len(run)) for name, array in arrays.items()}
            start += len(run)
            if len(present) < len(run):
                rows_present = [i for i, row in enumerate(run) if row[0] in set(present)]
                frame_arrays = {
                    name: array.take(pa.array(rows_present, pa.int64())) for name, array in frame_arrays.items()
                }
            if present:
                yield _build_batch(names, frame_arrays | frame_columns)


def _build_batch(names: list[str], arrays: dict[str, pa.Array]) -> pa.RecordBatch:
    ordered = _order_columns(tuple(names), tuple(arrays))
    return pa.RecordBatch.from_arrays([arrays[name] for name in ordered], names=ordered)


@lru_cache(256)
def _order_columns(names: tuple[str, ...], arrays: tuple[str, ...]) -> list[str]:
    """Return the names of the arrays of some fields, with side columns, in the order of the fields."""
    sides = (name for field in names for name in arrays if name == field or name.startswith(f"{field}__"))
    return list(dict.fromkeys(sides))


def _read_run_columns(
    book: Book, runs: Sequence[list[Any]], fields: Sequence[str]
) -> Iterator[tuple[list[int], dict[str, pa.Array]]]:
    """Yield the numbers and columns of each run of records of one frame, without those deleted meanwhile.

    A whole frame is not copied.
    """
    frames = [(Place(*run[0][2:5]), [row[5] for row in run]) for run in runs]
    done = 0
    try:
        for run, arrays in zip(runs, read_whole_frames(book, frames, fields), strict=True):
            if arrays is None:
                yield frame_arrays(book, [row[0] for row in run], fields)
            else:
                yield [row[0] for row in run], _with_nulls(arrays, fields, len(run))
            done += 1
    except MissingSegmentError:  # Compaction has moved some.
        for run in runs[done:]:
            yield frame_arrays(book, [row[0] for row in run], fields)


def _with_nulls(arrays: dict[str, pa.Array], fields: Sequence[str], count: int) -> dict[str, pa.Array]:
    """Add arrays of nulls for the fields that no record has."""
    missing = {name: pa.nulls(count, LEDGER_TYPES.get(name)) for name in fields if name not in arrays}
    return {**missing, **arrays} if missing else arrays


LEDGER_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(
        (
            "uid",
            "gid",
            "batch",
            "task",
            "suffix",
            "finish_reason",
            "truncate_status",
            "kind",
            "parent",
            "removed_reason",
        ),
        pa.large_string(),
    ),
    **dict.fromkeys(("reward", "admitted"), pa.float64()),
    **dict.fromkeys(
        (
            "run",
            "step",
            "scored",
            "length",
            "prompt_tokens",
            "response_tokens",
            "trained_tokens",
            "version_min",
            "version_max",
            "group_size",
            "seq",
            "revision",
            "bytes",
        ),
        pa.int64(),
    ),
    "evaluation": pa.bool_(),
}


_ALSO_IN_FRAMES = {name for name in LEDGER_COLUMNS if name in FIELDS and FIELDS[name].kind in ("number", "integer")}
"""Columns of the ledger that frames have as well, of the same type."""


def ledger_arrays(tx: Transaction, names: Sequence[str], seqs: Sequence[int]) -> dict[str, pa.Array]:
    """Return columns of the ledger for records with rising numbers."""
    chosen = ["seq", *names, *(["scored"] if "reward" in names else [])]
    rows = tx.all(
        f"SELECT {', '.join(chosen)} FROM records WHERE seq >= ? AND seq <= ? ORDER BY seq", (seqs[0], seqs[-1])
    )
    if len(rows) != len(seqs):
        requested = set(seqs)
        rows = [row for row in rows if row[0] in requested]
    arrays = {}
    for i, name in enumerate(names, 1):
        column = [row[i] for row in rows]
        if name == "reward":
            column = [float("nan") if row[-1] == index_columns.NOT_A_NUMBER else row[i] for row in rows]
        elif name == "evaluation":
            column = [bool(value) for value in column]
        arrays[name] = pa.array(column, LEDGER_TYPES[name])
    return arrays


def frame_arrays(
    book: Book, seqs: list[int], fields: Sequence[str], portable: bool = False
) -> tuple[list[int], dict[str, pa.Array]]:
    """Read columns of frames, these fields' and their sides', as Arrow arrays; `portable` as Parquet has them.

    Returns:
        The numbers of those of these records that have bytes, and their columns.
    """

    def read(places: list[Location]) -> tuple[list[int], dict[str, pa.Array]]:
        if not places:
            return [], {}
        records = gather(book, places, verify=False, only=fields)
        arrays = arrow.to_arrays(records.columns, portable)
        missing = {name: pa.nulls(len(places)) for name in fields if name not in arrays}
        return [place[0] for place in places], {**missing, **arrays}

    return retry_when_moved(book, seqs, read, skip=True)
