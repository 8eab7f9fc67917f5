"""Rollbook's own exports and Trinity's buffers: Parquet, HF datasets, frames, JSONL, TRXP and SQLite, without torch.

Invariant: a record is shown as a book shows it, since both are made of the same columns. Nothing in a file is run: a
pickle in TRXP goes through the reader that knows a handful of names.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import columns, freeform, ipc, trxp, wire
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS
from rollbook.core.ids import EID
from rollbook.inspect.files.stores import MAX_ROW, Found, Growing, Place, Row, Whole, row_of, stamp
from rollbook.inspect.images import Album, Where
from rollbook.inspect.records import documents_from
from rollbook.inspect.trajectory import Trajectory
from rollbook.io import arrow, trinity_sqlite

_TENSORS = {name: field for name, field in FIELDS.items() if field.kind == "tensor" and not field.trailing}


def record(row: Row, where: Where) -> Iterator[Trajectory]:
    """The one record that stands in `row`."""
    album = Album()
    for trajectory in documents_from(row["record"], where.vocabulary, album):
        for picture in trajectory.pictures:
            image = album.media(picture.sha256)
            if image is not None:
                where.keep(picture.sha256, *image)
        yield trajectory


def of_columns(records: Experiences) -> Iterator[Row]:
    """Each of the records, alone."""
    for i in range(len(records)):
        yield {"record": records[i : i + 1]}


def of_batch(batch: pa.RecordBatch) -> Iterator[Row]:
    """The records of a table that Rollbook wrote, or of one with its columns' names."""
    # Taken, not sliced: what is read is judged by its own rows.
    return of_columns(arrow.from_table(batch.take(pa.array(np.arange(len(batch))))))


def of_values(values: Row) -> Row:
    """A record of plain values and arrays by the names of its fields; free-form ones are JSON with tags, or values."""
    arrays: dict[str, pa.Array] = {}
    for name, value in values.items():
        field = FIELDS.get(name)
        if field is None or value is None:
            continue
        if name in _TENSORS:
            broadcast = field.broadcast and type(value) is int
            arrays[f"{name}__one" if broadcast else name] = pa.array([value if broadcast else np.asarray(value)])
        elif field.kind == "json" and isinstance(value, _Json):
            arrays[name] = pa.array([str(value)], pa.large_string())
        elif field.kind == "eid":
            parts = {part: value[part] for part in _EID if value.get(part) is not None}
            arrays.update(columns.encode(field, [EID(**{"suffix": "", **parts})]))
        elif field.kind in ("number", "integer", "text", "json"):
            arrays.update(columns.encode(field, [value]))
    try:
        return {"record": arrow.from_table(pa.table(arrays))}
    except (pa.ArrowException, TypeError) as error:
        raise WireError(f"the record cannot be read: {error}") from None


class _Json(str):
    """JSON as `rollbook.core.freeform` writes it."""

    __slots__ = ()


_EID = ("batch", "task", "run", "step", "suffix")


def _numpy(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """bfloat16, which numpy lacks, as float32."""
    if dtype == "bfloat16" and values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.bool_) if dtype == "bool" else values


Piece = TypeVar("Piece")


def _pieces(
    store: Growing, more: bool, read: Callable[[Any, int], tuple[Piece | None, int]]
) -> Iterator[tuple[int, Piece | WireError]]:
    """What lies one after the other in a file, and where each begins, as far as it is complete. `read` gives the piece
    that begins at a place, and where the next one does."""
    store.done = store.done if more else 0
    with open(store.path, "rb") as file:
        while True:
            at = store.done
            try:
                piece, store.done = read(file, at)
            except WireError as error:
                store.done = os.path.getsize(store.path)  # Where the next one begins is not known.
                yield at, error
                break
            if piece is None:
                break
            yield at, piece
    store.remember()


# --- columns --------------------------------------------------------------------------------------------------------


class Frames(Growing):
    """Frames one after the other; (a, b): where a frame begins, and which of its records."""

    def _frame(self, file: Any, at: int) -> tuple[Experiences | None, int]:
        """The frame that begins there, and where the next does; none, if it is not complete yet."""
        file.seek(at)
        head = file.read(wire.HEADER_BYTES)
        if len(head) < wire.HEADER_BYTES:
            return None, at
        stop = wire.read_header(head, 0, wire.DEFAULT_LIMITS).stop
        data = bytearray(head + file.read(stop - len(head)))
        if len(data) < stop:
            return None, at
        return wire.decode(data, limits=wire.DEFAULT_LIMITS, private=True), at + stop

    def scan(self, more: bool) -> Iterator[Found]:
        for at, records in _pieces(self, more, self._frame):
            if isinstance(records, WireError):
                yield at, 0, records
                continue
            for i, row in enumerate(of_columns(records)):
                yield at, i, row

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        fetched: dict[Place, Row] = {}
        by_frame: dict[int, list[int]] = {}
        for at, i in places:
            by_frame.setdefault(at, []).append(i)
        with open(self.path, "rb") as file:
            for at, rows in by_frame.items():
                records, _ = self._frame(file, at)
                if records is None:
                    raise WireError(f"{self.path}: the frame at byte {at} is gone")
                for i in rows:
                    (fetched[at, i],) = of_columns(records[i : i + 1])
        return fetched


class Arrow(Whole):
    """The Arrow files of a saved HF dataset, as `decode` makes rows of a batch; (a, b): which batch, and which of its
    rows."""

    def __init__(self, path: str, decode: Callable[[pa.RecordBatch], Iterable[Row]]) -> None:
        super().__init__(path)
        self.decode = decode

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            ipc.check_stream(self.path)
            with pa.memory_map(self.path) as file, pa.ipc.open_stream(file) as stream:
                yield from stream
        except (pa.ArrowException, OSError) as error:
            raise WireError(f"{self.path}: no Arrow stream that can be read: {error}") from None

    def scan(self, more: bool) -> Iterator[Found]:
        try:
            for number, batch in enumerate(self._batches()):
                for first in range(0, len(batch), 64):
                    for i, row in enumerate(self.decode(batch.slice(first, 64))):
                        yield number, first + i, row
        except WireError as error:
            yield 0, 0, error

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        sorted_places = sorted(places)
        rows: dict[Place, Row] = {}
        for number, batch in enumerate(self._batches()):
            for place in sorted_places:
                if place[0] == number:
                    (rows[place],) = self.decode(batch.slice(place[1], 1))
            if number >= sorted_places[-1][0]:
                break
        return rows


# --- JSONL ----------------------------------------------------------------------------------------------------------

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def line(row: Row, where: Where) -> Iterator[Trajectory]:
    """A line of Rollbook's own JSONL."""
    yield from record(of_line(row), where)


def of_line(row: Row) -> Row:
    """The record that a line of Rollbook's own JSONL holds."""
    fields: Row = {}
    for name, value in row.items():
        field = FIELDS.get(name)
        if field is None or value is None:
            continue
        if name in _TENSORS:
            fields[name] = value if type(value) is int and field.broadcast else _listed(name, value)
        elif field.kind == "json":
            fields[name] = _Json(json.dumps(value))
        elif field.kind == "eid":
            fields[name] = freeform.loads(json.dumps(value)) if isinstance(value, dict) else {}
        elif field.kind in ("number", "integer", "text"):
            fields[name] = freeform.loads(json.dumps(value)) if isinstance(value, dict) else value
    return of_values(fields)


def _listed(name: str, value: Any) -> NDArray[Any]:
    if type(value) is dict and set(value) == {"dtype", "values"}:
        value = value["values"]
    if type(value) is not list:
        raise WireError(f"{name}: got a {type(value).__name__}, expected a list")
    try:
        return np.array([_NOT_FINITE.get(element, element) if type(element) is str else element for element in value])
    except ValueError as error:
        raise WireError(f"{name}: {error}") from None


# --- Trinity --------------------------------------------------------------------------------------------------------


class OldPickle(WireError):
    """Bytes of a Trinity before 0.5.2."""


def payload(data: bytes) -> list[Row]:
    """The records of a TRXP payload."""
    view = memoryview(data)
    if bytes(view[:4]) != trxp.MAGIC:
        raise OldPickle(
            "records that are pickles, of an older Trinity, are not read here; `rollbook import BOOK FILE` reads them"
        )
    if len(view) < trxp._HEADER.size:
        raise WireError(f"the TRXP header is cut short: {len(view)} of {trxp._HEADER.size} bytes")
    _, version, meta, tensors = trxp._HEADER.unpack_from(view)
    split = trxp._HEADER.size + meta
    if version != 1 or split + tensors != len(view):
        raise WireError(f"TRXP of version {version} and {split + tensors} bytes, of which {len(view)} are there")
    content = trxp._unpickled(view[trxp._HEADER.size : split], trxp._HEADER.size, wire.DEFAULT_LIMITS)
    items = content.get("items") if isinstance(content, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise WireError("the TRXP payload holds no list of items")
    extra = [item.pop(trxp._EXTRA, None) or {} for item in items]
    rows: list[Row] = [
        {**item, **(more if isinstance(more, dict) else {})} for item, more in zip(items, extra, strict=True)
    ]
    for key, array in _safetensors(view[split:]).items():
        index, _, name = key.partition(":")
        if index.isdecimal() and int(index) < len(rows) and name in _TENSORS:
            rows[int(index)][name] = array
    return rows


def _safetensors(view: memoryview) -> dict[str, NDArray[Any]]:
    if len(view) < 8:
        raise WireError("the tensors are cut short")
    size = struct.unpack_from("<Q", view)[0]
    if size > len(view) - 8:
        raise WireError(f"the tensors state a header of {size} bytes, {len(view) - 8} are there")
    header = row_of(bytes(view[8 : 8 + size]))
    data = view[8 + size :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype = trxp._SAFETENSORS[entry["dtype"]]
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= len(data):
                raise WireError(f"tensor {name!r} lies outside of the data")
            storage = DTYPES[dtype].storage
            values = np.frombuffer(data[start:stop], dtype=storage).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"tensor {name!r} cannot be read: {error}") from None
        tensors[name] = _numpy(values, dtype)
    return tensors


class Payloads(Growing):
    """TRXP payloads one after the other; (a, b): where a payload begins, and which of its records."""

    def _rows(self, file: Any, at: int) -> tuple[list[Row] | None, int]:
        file.seek(at)
        head = file.read(trxp._HEADER.size)
        if len(head) < trxp._HEADER.size:
            return None, at
        if head[:4] != trxp.MAGIC:
            return payload(head), at
        _, _, meta, tensors = trxp._HEADER.unpack(head)
        total = len(head) + meta + tensors
        if total > MAX_ROW:
            raise WireError(f"a payload of {total} bytes is over the limit of {MAX_ROW}")
        data = head + file.read(meta + tensors)
        return (payload(data), at + total) if len(data) == total else (None, at)

    def scan(self, more: bool) -> Iterator[Found]:
        for at, rows in _pieces(self, more, self._rows):
            if isinstance(rows, WireError):
                yield at, 0, rows
                continue
            for i, row in enumerate(rows):
                try:
                    yield at, i, of_values(row)
                except ValueError as error:
                    yield at, i, WireError(str(error))

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        rows: dict[Place, Row] = {}
        payloads: dict[int, list[Row]] = {}
        with open(self.path, "rb") as file:
            for at, i in places:
                if at not in payloads:
                    payloads[at] = self._rows(file, at)[0] or []
                rows[at, i] = of_values(payloads[at][i])
        return rows


class Database:
    """The tables of records in Trinity's SQLite buffers, 0.5.2 and later; (a, b): which table, and the row's id.

    Rows are only ever added, with ids that rise."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.log: Row = {}
        self._last: dict[int, int] = {}

    def stamp(self) -> tuple[int, ...]:
        beside = f"{self.path}-wal"
        return *stamp(self.path), *(stamp(beside) if os.path.exists(beside) else ())

    def grown(self) -> bool:
        return bool(self._last)

    def scan(self, more: bool) -> Iterator[Found]:
        if not more:
            self._last = {}
        with trinity_sqlite.open_read_only(self.path) as connection:
            for number, table in enumerate(trinity_sqlite.find_tables(connection, self.path).values()):
                query = trinity_sqlite.build_query(table).replace(" ORDER BY", " WHERE t.id > ? ORDER BY")
                for row in connection.execute(query, (MAX_ROW, MAX_ROW, self._last.get(number, -(2**62)))):
                    at = row[0] if isinstance(row[0], int) else 0
                    self._last[number] = at
                    try:
                        yield number, at, _database_row(row, table)
                    except WireError as error:
                        yield number, at, error

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        rows: dict[Place, Row] = {}
        with trinity_sqlite.open_read_only(self.path) as connection:
            tables = list(trinity_sqlite.find_tables(connection, self.path).values())
            for number, at in places:
                table = tables[number]
                # The query names the table as t, and orders by its id.
                query = trinity_sqlite.build_query(table).replace(" ORDER BY t.id", " WHERE t.id = ?")
                for row in connection.execute(query, (MAX_ROW, MAX_ROW, at)):
                    rows[number, at] = _database_row(row, table)
        return rows


def _database_row(row: tuple[Any, ...], table: trinity_sqlite.Table) -> Row:
    data = row[1] if row[2] is not None else row[3]
    if not isinstance(data, bytes):
        raise WireError("the record's bytes are missing, or over the limit")
    records = payload(data)
    if len(records) != 1:
        raise WireError(f"the bytes hold {len(records)} records, expected 1")
    record_row = records[0]
    column = {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        for name, value in zip(table.columns, row[5:], strict=True)
    }
    eid = dict(record_row.get("eid") or {})
    for name, part in (("task_id", "task"), ("run_id", "run"), ("msg_id", "suffix")):
        if column.get(name) is not None:
            eid[part] = int(column[name]) if part == "run" and str(column[name]).isdecimal() else column[name]
    record_row["eid"] = eid
    if isinstance(column.get("reward"), (int, float)):
        record_row["reward"] = float(column["reward"])
    return of_values(record_row)
