"""Frames: `Experiences` as Arrow bytes behind a checked header, and a reader that is safe on hostile bytes.

In this order: the reader of Arrow's metadata (flatbuffers, schema, record batch), `RowLayout`, which writes plain rows
without building columns first, the header with `encode`, and `decode`. Arrow's own readers only see bytes that were
checked here.

Invariant: `decode(encode(records)) == records`. Any other bytes raise `WireError` and nothing else: decoding runs no
code, imports nothing that the data names, and allocates nothing that was not checked against the bytes present.

The format is specified in docs/wire.md. In short, all numbers little-endian:

    0   8  magic            8d 52 4f 4c 4c 42 4b 0a
    8   2  version          2
    10  2  flags            bits 0-1: compression of the body (0 none, 1 zstd, 2 lz4)
    12  4  header length    64
    16  8  body length      bytes of body as stored
    24  8  decoded length   bytes of body once decompressed
    32  8  item count
    40  8  body checksum    xxh3-64 of the stored body
    48  8  reserved         0
    56  8  header checksum  xxh3-64 of bytes 0 to 55
    64  …  body             an Arrow IPC stream of one record batch, then zeros to a multiple of 64

>>> from rollbook import Experience
>>> data = encode([Experience(tokens=[1, 2, 3], reward=1.0)])
>>> data[:8], len(data) % 64, decode(data)[0].reward
(b'\\x8dROLLBK\\n', 0, 1.0)
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, compress
from operator import itemgetter, ne, sub
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rollbook.core import columns, freeform
from rollbook.core.columns import (
    EID_TYPE,
    Columns,
    EidParts,
    Values,
    check_columns,
    check_depth,
    eid_parts,
    from_arrays,
    plain_part,
    to_arrays,
    uniform_dtype,
)
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences, from_rows
from rollbook.core.fields import DTYPES, FIELDS, INTEGERS, OWNERS, Field, observe
from rollbook.core.freeform import MAX_DEPTH
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, allocate, populate

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from rollbook.core.experience import Experience


__all__ = [
    *[
        "DEFAULT_LIMITS",
        "FREE_BYTES",
        "MAGIC",
        "VERSION",
        "Frame",
        "Limits",
        "WireError",
        "decode",
        "encode",
        "encoded_size",
        "iter_frames",
        "read_header",
        "to_trxp",
        "write_frame",
    ]
]

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
END_BYTES = len(END)
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_V5 = 4
_STRUCTS = {form: struct.Struct(form) for form in ("<B", "<h", "<H", "<i", "<I", "<q")}


@dataclass(eq=False)
class _Flatbuffer:
    """A flatbuffer, read with every position checked."""

    data: memoryview
    at: int
    """Offset of `data`, for error messages."""

    def number(self, form: str, position: int) -> int:
        """Return the number at a position."""
        read = _STRUCTS[form]
        if not 0 <= position <= len(self.data) - read.size:
            raise WireError("Arrow metadata points outside itself", self.at + max(position, 0))
        number: int = read.unpack_from(self.data, position)[0]
        return number

    def slot(self, table: int, index: int) -> int:
        """Return the position of field `index` of a table, or 0 if the table does not have it."""
        vtable = table - self.number("<i", table)
        size = self.number("<H", vtable)
        entry = 4 + 2 * index
        if entry + 2 > size:
            return 0
        offset = self.number("<H", vtable + entry)
        return table + offset if offset else 0

    def follow(self, position: int) -> int:
        """Return the position that the offset at `position` points at."""
        return position + self.number("<I", position)

    def field(self, table: int, index: int, form: str, default: int = 0) -> int:
        """Return the number in field `index` of a table, or `default` if the table does not have it."""
        slot = self.slot(table, index)
        return self.number(form, slot) if slot else default

    def vector(self, table: int, index: int, size: int) -> tuple[int, int]:
        """Return the start and the count of the elements of a vector, which have `size` bytes each."""
        slot = self.slot(table, index)
        if not slot:
            return 0, 0
        start = self.follow(slot)
        count = self.number("<I", start)
        if start + 4 + size * count > len(self.data):
            raise WireError("Arrow metadata states a vector beyond its end", self.at + start)
        return start + 4, count

    def pairs(self, table: int, index: int) -> NDArray[np.int64]:
        """Return a vector of structs of two 64-bit numbers. Shape: [count, 2]."""
        start, count = self.vector(table, index, 16)
        return np.frombuffer(self.data[start : start + 16 * count], dtype=np.int64).reshape(-1, 2)

    def text(self, table: int, index: int) -> str:
        start, count = self.vector(table, index, 1)
        try:
            return bytes(self.data[start : start + count]).decode()
        except UnicodeDecodeError:
            raise WireError("an Arrow name is not UTF-8", self.at + start) from None


def _message(body: memoryview, start: int, at: int) -> tuple[_Flatbuffer, int, int, int]:
    """Read a message; return its metadata, the kind and position of its header, and the start of its body."""
    if bytes(body[start : start + 4]) != END[:4]:
        raise WireError("an Arrow message does not begin with its marker", at + start)
    if len(body) < start + 8:
        raise WireError("an Arrow message is truncated", at + start)
    size = struct.unpack_from("<i", body, start + 4)[0]
    if size <= 0 or size % 8 or start + 8 + size > len(body):
        raise WireError(f"an Arrow message states {size} bytes of metadata", at + start + 4)
    flat = _Flatbuffer(body[start + 8 : start + 8 + size], at + start + 8)
    root = flat.number("<I", 0)
    if flat.field(root, 0, "<h") != _V5:
        raise WireError("an Arrow message is not of metadata version 5", at + start)
    header = flat.slot(root, 2)
    if not header:
        raise WireError("an Arrow message has no header", at + start)
    if flat.vector(root, 4, 4)[1]:
        raise WireError(_CUSTOM_METADATA, flat.at + root)
    return flat, flat.field(root, 1, "<B"), flat.follow(header), start + 8 + size


# Custom metadata can name extension types, whose readers are code, and can refer to the same bytes thousands of times,
# which would be copied each time.
_CUSTOM_METADATA = "Arrow's custom metadata (and with it extension types) is not supported"


class _SchemaReader:
    """Reader of Arrow schemas. Arrow's own copies data as often as it is referenced, and calls the readers of
    extension types that are registered in this process."""

    def __init__(self, flat: _Flatbuffer, max_columns: int) -> None:
        self.flat = flat
        self.max_columns = max_columns
        # Writers never let two fields or names share bytes, so at most this many fit.
        self.fields_left = len(flat.data) // 16
        self.name_bytes_left = len(flat.data)

    def schema(self, table: int) -> pa.Schema:
        flat = self.flat
        if flat.field(table, 0, "<h"):
            raise WireError("big-endian Arrow data is not supported", flat.at + table)
        if flat.vector(table, 2, 4)[1]:
            raise WireError(_CUSTOM_METADATA, flat.at + table)
        fields = self.fields(table, 1, depth=_MAX_DEPTH)
        if len(fields) > self.max_columns:
            raise WireError(f"{len(fields)} columns are over the limit of {self.max_columns}", flat.at)
        return pa.schema(fields)

    def fields(self, table: int, index: int, depth: int) -> list[pa.Field]:
        start, count = self.flat.vector(table, index, 4)
        self.fields_left -= count
        if depth < 0 or self.fields_left < 0:
            raise WireError(
                "the Arrow schema has more fields than its bytes can hold, or nests them too deeply", self.flat.at
            )
        return [self.field(self.flat.follow(start + 4 * i), depth) for i in range(count)]

    def field(self, table: int, depth: int) -> pa.Field:
        flat = self.flat
        name = flat.text(table, 0)
        self.name_bytes_left -= len(name)
        if self.name_bytes_left < 0:
            raise WireError("the names in the Arrow schema are longer than its bytes", flat.at + table)
        if flat.slot(table, 4):
            raise WireError(f"column {name!r}: Arrow dictionaries are not supported", flat.at + table)
        if flat.vector(table, 6, 4)[1]:
            raise WireError(_CUSTOM_METADATA, flat.at + table)
        code = flat.field(table, 2, "<B")
        slot = flat.slot(table, 3)
        kind = self.read_type(code, flat.follow(slot) if slot else 0, self.fields(table, 5, depth - 1), name)
        nullable = bool(flat.field(table, 1, "<B")) or pa.types.is_null(kind)
        return pa.field(name, kind, nullable=nullable)

    def read_type(self, code: int, table: int, children: list[pa.Field], name: str) -> pa.DataType:
        """Return the type of a code in Arrow's format/Schema.fbs, whose field order the indices follow."""
        number = self.flat.field
        kind: pa.DataType | None = None
        if not table:
            raise WireError(f"column {name!r}: the Arrow schema names no type", self.flat.at)
        if code in _PLAIN_CODES and not children:
            kind = _PLAIN_CODES[code]
        elif code == 2 and not children:
            kind = _INTEGERS.get((number(table, 0, "<i"), number(table, 1, "<B")))
        elif code == 3 and not children:
            kind = {0: pa.float16(), 1: pa.float32(), 2: pa.float64()}.get(number(table, 0, "<h"))
        elif code == 8 and not children:
            kind = {0: pa.date32(), 1: pa.date64()}.get(number(table, 0, "<h", 1))
        elif code == 7 and not children:
            kind = self.decimal(number(table, 0, "<i"), number(table, 1, "<i"), number(table, 2, "<i", 128))
        elif code == 9 and not children:
            kind = _TIMES.get((number(table, 0, "<h", 1), number(table, 1, "<i", 32)))
        elif code in (10, 18) and not children:
            unit = _UNITS.get(number(table, 0, "<h", 0 if code == 10 else 1))
            zone = self.flat.text(table, 1) if code == 10 else ""
            self.name_bytes_left -= len(zone)
            if unit and self.name_bytes_left >= 0:
                kind = pa.timestamp(unit, zone or None) if code == 10 else pa.duration(unit)
        elif code == 15 and not children and number(table, 0, "<i") > 0:
            kind = pa.binary(number(table, 0, "<i"))
        elif code == 12 and len(children) == 1:
            kind = pa.list_(children[0])
        elif code == 21 and len(children) == 1:
            kind = pa.large_list(children[0])
        elif code == 16 and len(children) == 1 and number(table, 0, "<i") >= 0:
            kind = pa.list_(children[0], number(table, 0, "<i"))
        elif code == 13:
            kind = pa.struct(children)
        elif code == 17 and len(children) == 1 and pa.types.is_struct(children[0].type) and len(children[0].type) == 2:
            key, entry = children[0].type
            kind = pa.map_(key.with_nullable(False), entry, keys_sorted=bool(number(table, 0, "<B")))
        if kind is None:
            raise WireError(
                f"column {name!r}: Arrow type number {code} is not supported, or not described", self.flat.at
            )
        return kind

    def decimal(self, precision: int, scale: int, bits: int) -> pa.DataType | None:
        if bits not in (128, 256) or not 0 < precision <= (38 if bits == 128 else 76) or abs(scale) > 1000:
            return None
        return pa.decimal128(precision, scale) if bits == 128 else pa.decimal256(precision, scale)


_PLAIN_CODES = {
    1: pa.null(),
    4: pa.binary(),
    5: pa.string(),
    6: pa.bool_(),
    19: pa.large_binary(),
    20: pa.large_string(),
}
_INTEGERS = {
    (bits, signed): getattr(pa, f"{'' if signed else 'u'}int{bits}")() for bits in (8, 16, 32, 64) for signed in (0, 1)
}
_TIMES = {(0, 32): pa.time32("s"), (1, 32): pa.time32("ms"), (2, 64): pa.time64("us"), (3, 64): pa.time64("ns")}
_MAX_DEPTH = 60
_UNITS = {0: "s", 1: "ms", 2: "us", 3: "ns"}


_SIMPLE = {
    *_PLAIN_CODES.values(),
    *_INTEGERS.values(),
    *_TIMES.values(),
    *(pa.float16(), pa.float32(), pa.float64(), pa.date32(), pa.date64()),
}


def is_supported(kind: pa.DataType, depth: int = _MAX_DEPTH) -> bool:
    """Return whether a frame can have an unknown column of a type, as `_SchemaReader.read_type` reads them."""
    types = pa.types
    if kind in _SIMPLE or types.is_timestamp(kind) or types.is_duration(kind):
        return True
    if types.is_decimal128(kind) or types.is_decimal256(kind):
        return bool(abs(kind.scale) <= 1000)
    if types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > 0)
    nested = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_struct, types.is_map)
    if any(test(kind) for test in nested):
        return depth > 0 and all(is_supported(kind.field(i).type, depth - 1) for i in range(kind.num_fields))
    return False


def read_batch(stored: NDArray[np.uint8], count: int, max_columns: int, at: int) -> pa.RecordBatch:
    """Read the record batch of the stream in `stored`, which begins at byte `at` of the data."""
    body = memoryview(stored.data)
    schema, arrays, batch_start = _read_schema(body, count, max_columns, at)
    _, _, start, size = _check_batch(body, len(body), batch_start, arrays, count, at)
    stop = start + size
    if bytes(body[stop:]) != END:
        raise WireError("the Arrow stream does not end after its record batch", at + stop)
    buffer = pa.py_buffer(stored)
    try:
        batch = pa.ipc.read_record_batch(buffer.slice(batch_start, stop - batch_start), schema)
        batch.validate()
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        raise WireError(f"the Arrow record batch cannot be read: {error}", at + batch_start) from None
    return batch


def metadata_bytes(mark: memoryview, at: int) -> int:
    """Return the number of bytes of metadata after the first 8 bytes of a message."""
    size = struct.unpack_from("<i", mark, 4)[0]
    if bytes(mark[:4]) != END[:4] or size <= 0:
        raise WireError("an Arrow message does not begin with its marker", at)
    return int(size)


def read_layout(
    head: memoryview, length: int, count: int, max_columns: int, at: int
) -> tuple[pa.Schema, NDArray[np.int64], NDArray[np.int64], int]:
    """Check the metadata of a stream of `length` bytes whose first two messages are `head`.

    Returns:
        The schema, the length and null count of each array, the start and length of each buffer, and the byte of the
        stream that these starts are counted from.
    """
    schema, arrays, batch_start = _read_schema(head, count, max_columns, at)
    nodes, buffers, start, size = _check_batch(head, length, batch_start, arrays, count, at)
    if start + size + END_BYTES != length:
        raise WireError("the Arrow stream does not end after its record batch", at + start + size)
    return schema, nodes, buffers, start


_Parts = NDArray[np.int64]
"""[C, 2] Numbers of nodes and buffers of each column."""
_schema_cache: dict[tuple[bytes, int], tuple[pa.Schema, _Parts]] = {}
"""Checked schemas by their bytes: frames of one writer have the same schema, and reading it takes longer than the rest
of a small frame. Cleared when the field table changes."""
_MAX_CACHED_SCHEMAS, _MAX_CACHED_SCHEMA_BYTES = 64, 16 << 10
observe(_schema_cache.clear)


def _read_schema(body: memoryview, count: int, max_columns: int, at: int) -> tuple[pa.Schema, _Parts, int]:
    """Read the schema of a stream; return also the parts of each column and the start of the next message."""
    size = struct.unpack_from("<i", body, 4)[0] if len(body) >= 8 else 0
    key = (bytes(body[: 8 + size]), max_columns) if 0 < size <= min(_MAX_CACHED_SCHEMA_BYTES, len(body) - 8) else None
    if key is not None and count and key in _schema_cache:
        return *_schema_cache[key], 8 + size
    flat, kind, header, batch_start = _message(body, 0, at)
    if kind != _SCHEMA:
        raise WireError("the Arrow stream does not begin with a schema", at)
    if flat.field(flat.number("<I", 0), 3, "<q"):
        raise WireError("the Arrow schema has a body", at)
    try:
        schema = _SchemaReader(flat, max_columns).schema(header)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise WireError(f"the Arrow schema is invalid: {error}", at) from None
    if count or len(schema):
        columns.check_schema(schema)
    parts = np.array([_counts(field.type) for field in schema], dtype=np.int64).reshape(-1, 2)
    if key is not None and count:
        if len(_schema_cache) >= _MAX_CACHED_SCHEMAS:
            _schema_cache.clear()
        _schema_cache[key] = schema, parts
    return schema, parts, batch_start


def _check_batch(
    body: memoryview, length: int, start: int, parts: _Parts, count: int, at: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
    """Compare the record batch's metadata with the schema and the `length` of the stream.

    Returns:
        Its nodes, its buffers, and the start and length of its body.
    """
    flat, kind, header, begin = _message(body, start, at)
    if kind != _RECORD_BATCH:
        raise WireError("the second Arrow message is not a record batch", at + start)
    if flat.slot(header, 3):
        raise WireError("Arrow's own body compression is not supported", at + start)
    if flat.slot(header, 4):
        raise WireError("Arrow view types are not supported", at + start)
    size = flat.field(flat.number("<I", 0), 3, "<q")
    if size < 0 or size > length - begin:
        raise WireError(f"the Arrow record batch states a body of {size} bytes", at + start)
    rows = flat.field(header, 0, "<q")
    if rows != count:
        raise WireError(f"the header states {count} records, the Arrow record batch {rows}", at + start)
    nodes, buffers = flat.pairs(header, 1), flat.pairs(header, 2)
    expected = parts.sum(0).tolist()
    if [len(nodes), len(buffers)] != expected:
        raise WireError(
            f"the Arrow record batch has {len(nodes)} arrays and {len(buffers)} buffers, "
            f"its schema {expected[0]} and {expected[1]}",
            at + start,
        )
    fault = find_fault(nodes, buffers, size, count)
    if fault is not None:
        raise WireError(f"the Arrow record batch {fault}", at + start)
    return nodes, buffers, begin, size


def find_fault(
    nodes: NDArray[np.int64],
    buffers: NDArray[np.int64],
    size: int | NDArray[np.int64],
    count: int | NDArray[np.int64],
) -> str | None:
    """Check the numbers of record batches against the size of their bodies.

    Args:
        nodes: [..., N, 2] Length and null count of each array.
        buffers: [..., M, 2] Start and length of each buffer.
        size: [...] Bytes of the body.
        count: [...] Records.

    Returns:
        What is wrong, or `None`.
    """
    if nodes.size:
        # An entry takes at least one bit of the body, or none at all in a null array.
        longest = np.maximum(count, 8 * size)
        if (nodes < 0).any() or (nodes[..., 1] > nodes[..., 0]).any() or (nodes[..., 0].max(-1) > longest).any():
            return "states impossible lengths"
    if buffers.size:
        begins, ends = buffers[..., 0], buffers[..., 0] + buffers[..., 1]
        if (
            (buffers < 0).any()
            or (begins % 8).any()
            or (buffers.max((-1, -2)) > size).any()
            or (ends.max(-1) > size).any()
            or (begins[..., 1:] < ends[..., :-1]).any()
        ):
            return "has buffers that overlap or exceed its body"
    return None


@dataclass(slots=True)
class Template:
    """The messages before the body of a record batch, which are equal in frames of one layout except for numbers.

    Attributes:
        schema: The schema.
        parts: Numbers of nodes and buffers of each column.
        batch_start: Start of the record batch.
        head: The schema message and the metadata of the batch.
        fixed: 255 for each byte of the head that is structure, 0 for numbers.
        places: Position, count and width of the numbers: nodes and buffers (pairs), rows and size.
    """

    schema: pa.Schema
    parts: _Parts
    batch_start: int
    head: NDArray[np.uint8]
    fixed: NDArray[np.uint8]
    places: dict[str, tuple[int, int, int]]

    def numbers(self, heads: NDArray[np.uint8], name: str) -> NDArray[np.int64]:
        """Return the numbers of one kind in heads [F, bytes] of this layout. Shape: [F, count, 1 or 2]."""
        start, count, width = self.places[name]
        raw = np.ascontiguousarray(heads[:, start : start + 8 * width * count])
        return raw.view(np.int64).reshape(len(heads), count, width)


@dataclass(eq=False)
class _TracedFlatbuffer(_Flatbuffer):
    """A flatbuffer that marks the bytes that were read as structure."""

    read: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.read = np.zeros(len(self.data), dtype=np.bool_)

    def number(self, form: str, position: int) -> int:
        number = super().number(form, position)
        self.read[position : position + _STRUCTS[form].size] = True
        return number


def read_template(body: memoryview, count: int, max_columns: int, at: int) -> Template | None:
    """Check the messages of a stream and find their numbers; `None` if numbers and structure overlap."""
    schema, parts, start = _read_schema(body, count, max_columns, at)
    _, _, begin, _ = _check_batch(body, len(body), start, parts, count, at)
    flat = _TracedFlatbuffer(body[start + 8 : begin], at + start + 8)
    root = flat.number("<I", 0)
    flat.field(root, 0, "<h")
    flat.field(root, 1, "<B")
    flat.slot(root, 4)
    table = flat.follow(flat.slot(root, 2))
    flat.slot(table, 3)
    flat.slot(table, 4)
    places = {
        "rows": (flat.slot(table, 0), 1, 1),
        "size": (flat.slot(root, 3), 1, 1),
        "nodes": (*flat.vector(table, 1, 16), 2),
        "buffers": (*flat.vector(table, 2, 16), 2),
    }
    variable = np.zeros(len(flat.data), dtype=np.uint8)
    for position, number, width in places.values():
        variable[position : position + 8 * width * number] += 1
    # A number that is also structure, which no writer produces, could change the meaning of others.
    if not all(position for position, _, _ in places.values()) or variable.max() > 1 or variable[flat.read].any():
        return None
    fixed = np.full(begin, 255, dtype=np.uint8)
    fixed[start + 8 :][variable > 0] = 0
    shifted = {name: (start + 8 + position, number, width) for name, (position, number, width) in places.items()}
    return Template(schema, parts, start, np.array(body[:begin], dtype=np.uint8), fixed, shifted)


def batch_slots(body: memoryview) -> tuple[int, int, int, int, int]:
    """Find the numbers in a stream that Arrow wrote.

    Returns:
        The start of the buffers of its record batch, and the positions of the number of rows, the nodes, the buffers
        and the size of all buffers in its metadata.
    """
    start = _message(body, 0, 0)[3]
    flat, _, header, begin = _message(body, start, 0)
    slots = (
        flat.slot(header, 0),
        flat.vector(header, 1, 16)[0],
        flat.vector(header, 2, 16)[0],
        flat.slot(flat.number("<I", 0), 3),
    )
    rows, nodes, buffers, size = (start + 8 + slot for slot in slots)
    return begin, rows, nodes, buffers, size


def _counts(kind: pa.DataType) -> tuple[int, int]:
    """Return the numbers of nodes and buffers of an array of a type, children included."""
    nodes, buffers = 1, buffer_count(kind)
    for i in range(kind.num_fields):
        more = _counts(kind.field(i).type)
        nodes, buffers = nodes + more[0], buffers + more[1]
    return nodes, buffers


def buffer_count(kind: pa.DataType) -> int:
    """Return the number of buffers of an array of a type, without those of its children."""
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        return 1
    if (
        kind.num_fields
        or pa.types.is_primitive(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_temporal(kind)
    ):
        return 2
    return 3


def check_arrays(arrays: Mapping[str, pa.Array], verify: bool) -> None:
    """Check all offsets and null counts, and with `verify` every byte of text."""
    for name, array in arrays.items():
        kind = array.type
        is_text = pa.types.is_large_string(kind)
        try:
            if not is_text and (verify or not pa.types.is_large_binary(kind)):
                array.validate(full=True)
                continue
            content = array.buffers()[2]
            bounds = columns.offsets(array, 0 if content is None else content.size)
            if not verify or not len(array):
                continue
            # Arrow's check for UTF-8 takes longer than the checksum. ASCII text, which most is, does not need it:
            # only lengths and nulls are left to check, as for binary.
            text = np.frombuffer(content or b"", dtype=np.uint8)[bounds[0] : bounds[-1]]
            if not len(text) or text.max() < 128:
                array = pa.Array.from_buffers(
                    pa.large_binary(), len(array), array.buffers(), array.null_count, array.offset
                )
            array.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise WireError(f"column {name!r}: {str(error).removeprefix('byte ')}") from None


def check_stream(path: str) -> None:
    """Check that the rows of another tool's Arrow stream do not take far more memory than the file has bytes.

    Rejects compressed bodies, arrays that refer to the same bytes repeatedly (dictionaries, views, runs), and more than
    16 values for each byte of the file, such as nulls, which take no bytes.

    Raises:
        WireError: The stream is not supported.
    """
    allowed = max(1 << 20, 16 * os.path.getsize(path))
    with pa.memory_map(path) as file:
        values = 0
        for message in pa.ipc.MessageReader.open_stream(file):
            flat = _Flatbuffer(memoryview(message.metadata), 0)
            root = flat.number("<I", 0)
            kind, table = flat.field(root, 1, "<B"), flat.follow(flat.slot(root, 2))
            if kind == _DICTIONARY:
                raise WireError(f"{path}: dictionary columns are not supported")
            if kind != _RECORD_BATCH:
                continue
            if flat.slot(table, 3):
                raise WireError(f"{path}: compressed Arrow bodies are not supported")
            values += flat.field(table, 0, "<q") + int(flat.pairs(table, 1)[:, 0].sum())
            if values > allowed:
                raise WireError(f"{path}: over {allowed} values, 16 for each byte of the file")
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
        for column in stream.schema:
            _check_plain(path, column.name, column.type)


def _check_plain(path: str, name: str, kind: pa.DataType) -> None:
    if "_view" in str(kind) or pa.types.is_run_end_encoded(kind) or pa.types.is_dictionary(kind):
        raise WireError(f"{path}: column {name!r} of type {kind} is not supported")
    for i in range(kind.num_fields):
        _check_plain(path, name, kind.field(i).type)


MAX_LAYOUT_ROWS = 256
MAX_LAYOUT_BYTES = 4 << 20
"""Limits of a `RowLayout`; the tensors of larger bodies are gathered by two threads (see `_ColumnLayout`)."""
_NONE = type(None)
_PLAIN_KINDS = {"number": {float, _NONE}, "integer": {int, _NONE}, "text": {str, _NONE}}
_JSON_TYPES = {"dict": {dict, _NONE}, "list": {list, tuple, _NONE}, "": None}
_TURNS = {"single_turn", "multi_turn"}
_ZEROS = [bytes(n) for n in range(8)]
_EMPTY = {dtype.storage: np.empty(0, dtype=dtype.storage) for dtype in DTYPES.values() if dtype.code}


class _NotPlainError(Exception):
    """Raised inside `RowLayout.of` for rows that need a `_ColumnLayout`."""


class _StreamHead(NamedTuple):
    """The bytes that Arrow writes before the buffers of a batch of one schema, and the positions of the numbers."""

    head: bytes
    rows: int
    nodes: int
    buffers: int
    body: int


@lru_cache(64)
def _stream_head(columns: tuple[tuple[str, str], ...]) -> _StreamHead:
    """Return the head of a schema, given as (name, type) of each column."""
    batch = pa.RecordBatch.from_arrays(
        [pa.array([None], _arrow_type(kind)) for _, kind in columns], names=[name for name, _ in columns]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body = memoryview(sink.getvalue())
    slots = batch_slots(body)
    return _StreamHead(bytes(body[: slots[0]]), *slots[1:])


def _arrow_type(kind: str) -> pa.DataType:
    if kind in ("eid", "text"):
        return EID_TYPE if kind == "eid" else pa.large_string()
    return pa.large_list(pa.from_numpy_dtype(kind[1:])) if kind[0] == "*" else pa.from_numpy_dtype(kind)


class RowLayout:
    """The body of a frame from plain rows, without Arrow arrays.

    `fill` writes it, after which tensor columns use the memory that it was given. `columns` are like those of
    `Experiences`, with `Values` and `EidParts` instead of Arrow arrays.

    >>> from rollbook import Experience
    >>> layout = RowLayout.from_rows([Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> list(layout.columns)
    ['eid', 'tokens', 'prompt_length', 'reward', 'info', 'metrics', 'action_mask', 'experience_type']
    >>> RowLayout.from_rows([Experience(tokens=[1, 2], multi_modal_inputs={"pixel_values": [[0.5]]})]) is None
    True
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.columns: Columns = {}
        self._schema: list[tuple[str, str]] = []
        self._nodes: list[int] = []
        self._buffers: list[int] = []
        self._pieces: list[Any] = [b""]
        self._body = 0
        self._lengths: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[tuple[int, ...], tuple[NDArray[np.int64], bytes]] = {}

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> RowLayout | None:
        """Build the layout of rows, or return `None` if they are not plain.

        Plain rows are single-turn or multi-turn records without a truncated prompt, whose tensors have one dimension
        and one type within a field, and whose fields have exactly the types that the constructor creates. There are at
        most `MAX_LAYOUT_ROWS`, and their body takes at most about `MAX_LAYOUT_BYTES`.
        """
        from rollbook.core.experience import Experience

        if not 0 < len(rows) <= MAX_LAYOUT_ROWS or set(map(type, rows)) != {Experience}:
            return None
        states = [row.__dict__ for row in rows]
        names = set[str]().union(*states)
        if "malformed_fields" in names or "unknown" in names:
            return None
        layout = cls(len(rows))
        try:
            for name, field in FIELDS.items():
                if name in names:
                    try:
                        values = list(map(itemgetter(name), states))
                    except KeyError:
                        values = [state.get(name) for state in states]
                    layout._add(field, values)
            layout._check()
        except (_NotPlainError, ValueError, AttributeError, LookupError, TypeError, struct.error):
            return None
        layout._finish()
        return layout

    def __len__(self) -> int:
        return self.count

    def column(self, name: str) -> Any:
        """Return a column, or `None` if no record has it."""
        return self.columns.get(name)

    def prompt_lengths(self) -> NDArray[np.int64]:
        """Return the number of prompt tokens of each record. Shape: [N]."""
        return np.array(self.columns["prompt_length"].values, dtype=np.int64)

    @property
    def size(self) -> int:
        """Number of bytes that `fill` writes."""
        return len(self._pieces[0]) + self._body + END_BYTES

    def fill(self, memory: NDArray[np.uint8]) -> None:
        """Write the body to an array of `size` bytes."""
        out = memory.data
        at = 0
        pending: list[bytes] = []
        for piece in (*self._pieces, END, None):
            if type(piece) is bytes:
                pending.append(piece)
                continue
            joined = b"".join(pending)
            out[at : at + len(joined)] = joined
            at += len(joined)
            pending.clear()
            if piece is not None:
                stop = at + int(piece.offsets[-1]) * piece.memory.itemsize
                values = memory[at:stop].view(piece.memory.dtype)
                piece.copy_to(values)
                piece.set_memory(values)
                at = stop

    # --- columns ----------------------------------------------------------------------------------------------

    def _add(self, field: Field, values: list[Any]) -> None:
        kind = field.kind
        if kind == "eid":
            self._add_eids(field.name, values)
        elif kind == "custom_fields":
            if any(values):
                raise _NotPlainError
        elif values.count(None) == len(values) if kind != "tensor" else all(entry is None for entry in values):
            return
        elif kind == "tensor":
            self._add_tensors(field, values)
        elif kind == "json":
            self._add_json(field, values)
        elif kind == "media" or not set(map(type, values)) <= _PLAIN_KINDS[kind]:
            raise _NotPlainError
        elif kind == "text":
            encoded = [None if entry is None else entry.encode() for entry in values]
            self._begin(field.name, "text")
            self._texts(encoded)
            self.columns[field.name] = Values(values, encoded)
        else:
            self._add_numbers(field.name, "float64" if kind == "number" else "int64", values)

    def _begin(self, name: str, kind: str) -> None:
        self._schema.append((name, kind))

    def _buffer(self, length: int, pieces: Iterable[Any]) -> None:
        self._buffers += (self._body, length)
        self._pieces += pieces
        padding = -length % 8
        if padding:
            self._pieces.append(_ZEROS[padding])
        self._body += length + padding
        if self._body > MAX_LAYOUT_BYTES:
            raise _NotPlainError

    def _node(self, count: int, values: Sequence[Any] | None = None, nulls: int = 0) -> None:
        """Add an Arrow array of `count` entries: its node, and a bitmap of the `values` that are not null."""
        self._nodes += (count, nulls)
        if nulls and values is not None:
            bitmap = np.packbits([entry is not None for entry in values], bitorder="little").tobytes()
            self._buffer(len(bitmap), (bitmap,))
        else:
            self._buffers += (self._body, 0)

    def _numbers(self, form: str, values: Sequence[Any]) -> None:
        raw = struct.pack(f"<{len(values)}{form}", *values)
        self._buffer(len(raw), (raw,))

    def _texts(self, encoded: Sequence[bytes | None]) -> None:
        nulls = encoded.count(None)
        self._node(len(encoded), encoded, nulls)
        texts = [text or b"" for text in encoded] if nulls else encoded
        offsets = list(accumulate(map(len, texts), initial=0))  # type: ignore[arg-type]
        self._numbers("q", offsets)
        self._buffer(offsets[-1], texts)

    def _ascii(self, texts: Sequence[str]) -> None:
        self._node(len(texts))
        self._numbers("q", list(accumulate(map(len, texts), initial=0)))
        raw = "".join(texts).encode("ascii")
        self._buffer(len(raw), (raw,))

    def _add_numbers(self, name: str, dtype: str, values: list[Any]) -> None:
        self._begin(name, dtype)
        nulls = values.count(None)
        self._node(len(values), values, nulls)
        self._numbers(
            "d" if dtype == "float64" else "q", [0 if entry is None else entry for entry in values] if nulls else values
        )
        self.columns[name] = Values(values)

    def _add_eids(self, name: str, values: list[Any]) -> None:
        if set(map(type, values)) != {EID}:
            raise _NotPlainError
        batch, task, run, step, suffix = zip(*map(eid_parts, values), strict=True)
        batch_types, task_types = set(map(type, batch)), set(map(type, task))
        if set(map(type, run + step)) != {int} or min(run) < 0 or min(step) < 0 or set(map(type, suffix)) != {str}:
            raise _NotPlainError
        if not batch_types | task_types <= {int, str} or not all(map(plain_part, {*batch, *task})):
            raise _NotPlainError
        if batch_types == task_types == {int}:
            ints = b"\3" * len(values)
        else:
            ints = bytes([(type(a) is int) + 2 * (type(b) is int) for a, b in zip(batch, task, strict=True)])
        parts = EidParts(list(map(str, batch)), list(map(str, task)), list(run), list(step), list(suffix))
        self._begin(name, "eid")
        self._node(len(values))
        self._ascii(parts.batch)
        self._ascii(parts.task)
        self._node(len(values))
        self._numbers("q", run)
        self._node(len(values))
        self._numbers("q", step)
        self._ascii(parts.suffix)
        self._node(len(values))
        self._buffer(len(values), (ints,))
        self.columns[name] = parts

    def _add_json(self, field: Field, values: list[Any]) -> None:
        allowed = _JSON_TYPES[field.holds]
        if allowed is not None and not set(map(type, values)) <= allowed:
            raise _NotPlainError
        encoded: list[bytes | None] = []
        flat: list[dict[str, Any] | None] = []
        for entry in values:
            text, is_flat = (None, False) if entry is None else freeform.dump_bytes(entry)
            encoded.append(text)
            flat.append(entry if is_flat else None)
        self._begin(field.name, "text")
        self._texts(encoded)
        self.columns[field.name] = Values(None, encoded, flat)

    def _add_tensors(self, field: Field, values: list[Any]) -> None:
        import torch

        if field.broadcast and set(map(type, values)) <= {int, _NONE}:
            self._add_numbers(f"{field.name}__one", "int64", values)
            return
        present = [tensor for tensor in values if tensor is not None]
        dtype = None if field.trailing else uniform_dtype(present)
        if dtype is None or columns.implied(storage := DTYPES[dtype].storage, field) != dtype:
            raise _NotPlainError
        if field.accepts == "integer" and dtype not in INTEGERS:
            raise _NotPlainError
        nulls = len(values) - len(present)
        measure = torch.Tensor.numel
        lengths = tuple(
            [0 if tensor is None else measure(tensor) for tensor in values] if nulls else map(measure, values)
        )
        self._lengths[field.name] = lengths
        offsets, written = self._cached_offsets(lengths)
        valid = np.array([tensor is not None for tensor in values], dtype=np.bool_) if nulls else None
        column = Ragged(_EMPTY[storage], offsets, dtype, valid, owned=True)
        total = int(offsets[-1])
        if total:
            column.leave_pending(present)
        self._begin(field.name, f"*{storage}")
        self._node(len(values), values, nulls)
        self._buffer(len(written), (written,))
        self._node(total)
        self._buffer(total * DTYPES[dtype].itemsize, (column,) if total else ())
        self.columns[field.name] = column

    def _cached_offsets(self, lengths: tuple[int, ...]) -> tuple[NDArray[np.int64], bytes]:
        """Return offsets and their bytes, cached since fields of one axis share them."""
        if lengths not in self._offsets:
            offsets = np.array([0, *accumulate(lengths)], dtype=np.int64)
            self._offsets[lengths] = offsets, offsets.tobytes()
        return self._offsets[lengths]

    # --- checks -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Check the rows against the field table, as `check_columns` does."""
        columns = self.columns
        kinds, prompts = columns["experience_type"].values, columns["prompt_length"].values
        if not _TURNS.issuperset(kinds) or None in prompts or columns["tokens"].valid is not None:
            raise _NotPlainError
        if "chosen" in columns or "rejected" in columns:
            raise _NotPlainError
        if "truncate_status" in columns and "prompt_truncated" in columns["truncate_status"].values:
            raise _NotPlainError
        sizes = columns.get("group_size")
        if sizes is not None and any(size is not None and size <= 0 for size in sizes.values):
            raise _NotPlainError
        tokens = self._lengths["tokens"]
        response = tuple(map(sub, tokens, prompts))
        for kind, prompt, length in zip(kinds, prompts, response, strict=True):
            if prompt < 0 or length < 0 or (kind == "single_turn" and not (prompt and length)):
                raise _NotPlainError
        expected = {"response": response, "sequence": tokens}
        for name, lengths in self._lengths.items():
            right = expected.get(FIELDS[name].axis, lengths)
            if lengths != right:
                valid = columns[name].valid
                if valid is None or any(map(ne, compress(lengths, valid), compress(right, valid))):
                    raise _NotPlainError

    def _finish(self) -> None:
        head = _stream_head(tuple(self._schema))
        filled = bytearray(head.head)
        struct.pack_into("<q", filled, head.rows, self.count)
        struct.pack_into(f"<{len(self._nodes)}q", filled, head.nodes, *self._nodes)
        struct.pack_into(f"<{len(self._buffers)}q", filled, head.buffers, *self._buffers)
        struct.pack_into("<q", filled, head.body, self._body)
        self._pieces[0] = bytes(filled)


MAGIC = b"\x8dROLLBK\n"
VERSION = 2
HEADER = struct.Struct("<8sHHIQQQQQ")
HEADER_BYTES = 64
COMPRESSION = {None: 0, "zstd": 1, "lz4": 2}
FREE_BYTES = 64 << 20
"""Bytes that compressed data of any size may decode to; beyond that, `Limits.max_ratio` times its size."""
_SMALL = 16 << 10
_COMPRESSION_NAMES = {code: name for name, code in COMPRESSION.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a reader. A frame that exceeds them is rejected before anything is allocated.

    Args:
        max_bytes: Decompressed bytes of the body of a frame.
        max_items: Records in a frame.
        max_ratio: Compression ratio of frames that decompress to more than 64 MiB together.
        max_columns: Columns of a frame.
        max_depth: Nesting of free-form values and of pickles. Frames have at most 64 levels.

    >>> from rollbook import Experience
    >>> decode(encode([Experience(tokens=[1, 2])] * 3), limits=Limits(max_items=2))
    Traceback (most recent call last):
        ...
    rollbook.core.errors.WireError: byte 32: 3 records are over the limit of 2
    """

    max_bytes: int = 16 << 30
    max_items: int = 1 << 28
    max_ratio: int = 500
    max_columns: int = 1024
    max_depth: int = 64


DEFAULT_LIMITS = Limits()


# --- writing ------------------------------------------------------------------------------------------------------


class _ColumnLayout:
    """The body of a frame as pieces, which Arrow lists without copying them."""

    def __init__(self, records: Experiences, adopt: bool = False) -> None:
        self.adopt = adopt
        self.count = len(records)
        arrays = to_arrays(records.columns)
        for name, array in arrays.items():
            if name not in OWNERS and not is_supported(array.type):
                raise ValueError(f"column {name!r}: an unknown column of type {array.type} cannot be kept in a frame")
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
        self.pieces: list[Any] = []
        self.size = 0
        self.closed = False
        self.pending: dict[int, Ragged] = {}
        """Columns with pending tensors, by the address of the memory that is reserved for them."""
        for column in records.columns.values():
            if isinstance(column, Ragged) and column.pending:
                self.pending[column.memory.ctypes.data] = column
        with pa.ipc.new_stream(pa.PythonFile(self, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)

    # Methods of a file, which Arrow calls.

    def write(self, piece: pa.Buffer | bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def fill(self, memory: NDArray[np.uint8]) -> None:
        """Write the body to an array of `size` bytes."""
        jobs: list[tuple[Ragged | pa.Buffer, NDArray[np.uint8]]] = []
        small: list[pa.Buffer] = []
        start = at = 0
        # A frame has dozens of pieces of a few bytes: consecutive ones are copied together.
        for piece in (*self.pieces, None):
            column = self.pending.get(piece.address) if self.pending and isinstance(piece, pa.Buffer) else None
            if column is not None and len(piece) != column.memory.nbytes:
                column = None
            if piece is not None and len(piece) < _SMALL and column is None:
                small.append(piece)
                at += len(piece)
                continue
            if small:
                memory[start:at] = np.frombuffer(b"".join(small), dtype=np.uint8)
                small.clear()
            if piece is not None:
                target = memory[at : at + len(piece)]
                if self.pending:
                    jobs.append((piece if column is None else column, target))
                else:
                    target[:] = np.frombuffer(piece, dtype=np.uint8)
                start = at = at + len(piece)
        if self.size < MAX_LAYOUT_BYTES:
            for job in jobs:
                self._copy(*job)
            return
        # Gathering thousands of tensors mostly runs without the GIL: two threads share the work.
        jobs.sort(key=lambda job: -len(job[1]))
        with ThreadPoolExecutor(2) as pool:
            copies = [pool.submit(self._copy, *job) for job in jobs]
        for copy in copies:
            copy.result()

    def _copy(self, source: Ragged | pa.Buffer, target: NDArray[np.uint8]) -> None:
        """Copy a piece, or the pending tensors of a column, to the frame."""
        if not isinstance(source, Ragged):
            target[:] = np.frombuffer(source, dtype=np.uint8)
            return
        memory = target.view(source.memory.dtype).reshape(source.memory.shape)
        source.copy_to(memory)
        if self.adopt:
            source.set_memory(memory)


def _layout(experiences: Iterable[Experience], adopt: bool = False) -> _ColumnLayout | RowLayout:
    if isinstance(experiences, Experiences):
        return _ColumnLayout(experiences, adopt)
    rows = list(experiences)
    return RowLayout.from_rows(rows) or _ColumnLayout(from_rows(rows, copy=False), adopt)


def encoded_size(experiences: Iterable[Experience]) -> int:
    """Return the size of the frame that `encode` writes without compression.

    Args:
        experiences: The records.

    Returns:
        Number of bytes, header and padding included.

    >>> from rollbook import Experience
    >>> records = [Experience(tokens=[1, 2, 3])]
    >>> encoded_size(records) == len(encode(records))
    True
    """
    size = _layout(experiences).size
    return HEADER_BYTES + size + -size % HEADER_BYTES


def encode(
    experiences: Iterable[Experience] | RowLayout,
    *,
    compression: str | None = None,
    out: Buffer | Callable[[int], Buffer] | None = None,
    adopt: bool = False,
) -> Any:
    """Encode records as one frame.

    Reusing one buffer for many frames is several times faster than creating bytes for each, since most of the time is
    spent on page faults in new memory.

    Args:
        experiences: The records.
        compression: `None`, `"zstd"` or `"lz4"`, of the body. A body that zstd makes over 500 times smaller is stored
            as lz4, since readers reject such a ratio.
        out: A writable buffer, or a function that returns one for a number of bytes.
        adopt: Let columns with pending tensors use the memory of the frame, which must then stay unchanged.

    Returns:
        The frame as `bytes`; with `out`, a memoryview of the part written.

    Raises:
        ValueError: An argument is invalid, or a record holds a value that a frame cannot keep.

    >>> from rollbook import Experience
    >>> many = [Experience(tokens=[1, 2, 3])]
    >>> buffer = bytearray(encoded_size(many))
    >>> decode(encode(many, out=buffer)) == many
    True
    """
    if compression not in COMPRESSION:
        raise ValueError(f"compression: got {compression!r}, expected None, 'zstd' or 'lz4'")
    layout = experiences if isinstance(experiences, RowLayout) else _layout(experiences, adopt)
    stored: Any = None
    if compression is not None:
        body = allocate((layout.size,), np.uint8)
        layout.fill(body)
        stored = _compressed(body, compression)
        if layout.size > len(stored) * DEFAULT_LIMITS.max_ratio:
            compression = "lz4"  # whose ratio is at most 255
            stored = _compressed(body, compression)
    length = layout.size if stored is None else len(stored)
    total = HEADER_BYTES + length + -length % HEADER_BYTES
    frame: bytes | memoryview
    if out is None:
        frame, memory = _fresh_bytes(total)
    else:
        out = out(total) if callable(out) else out
        memory = np.frombuffer(memoryview(out), dtype=np.uint8)
        if not memory.flags.writeable:
            raise ValueError("out: got a read-only buffer, expected a writable one")
        if len(memory) < total:
            raise ValueError(f"out: got {len(memory)} bytes, expected at least {total}")
        memory = memory[:total]
        frame = memoryview(out).cast("B")[:total]
    target = memory[HEADER_BYTES : HEADER_BYTES + length]
    if stored is None:
        layout.fill(target)
    else:
        target[:] = stored
    memory[HEADER_BYTES + length :] = 0
    checksum = xxhash.xxh3_64_intdigest(target.data)
    flags = COMPRESSION[compression]
    header = HEADER.pack(MAGIC, VERSION, flags, HEADER_BYTES, length, layout.size, layout.count, checksum, 0)
    header += struct.pack("<Q", xxhash.xxh3_64_intdigest(header))
    memory[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
    return frame


def _compressed(body: NDArray[np.uint8], compression: str) -> NDArray[np.uint8]:
    return np.frombuffer(pa.Codec(compression).compress(pa.py_buffer(body)), dtype=np.uint8)


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype = ctypes.c_void_p
_bytes_address.argtypes = [ctypes.py_object]


def _fresh_bytes(size: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Create a bytes object and return it with its memory, to be filled: saves a copy of the frame.

    The C API allows writing to a new bytes object as long as no other code has seen it.
    """
    buffer: bytes = _new_bytes(None, size)
    address = _bytes_address(buffer)
    populate(address, size)
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    return buffer, np.frombuffer(memory, dtype=np.uint8)


def write_frame(file: BinaryIO, experiences: Iterable[Experience], *, compression: str | None = None) -> int:
    """Append one frame to an open file.

    Args:
        file: A binary file or stream.
        experiences: The records.
        compression: As for `encode`.

    Returns:
        Number of bytes written.

    >>> import io
    >>> from rollbook import Experience
    >>> file = io.BytesIO()
    >>> write_frame(file, [Experience(tokens=[1, 2, 3])]) == len(file.getvalue())
    True
    """
    frame = encode(experiences, compression=compression)
    file.write(frame)
    return len(frame)


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """The checked header of a frame.

    Attributes:
        start: First byte of the frame.
        compression: Compression of the body, or `None`.
        length: Bytes of the body as stored.
        decoded: Bytes of the body once decompressed.
        count: Number of records.
        checksum: Checksum of the stored body.
        stop: First byte of the next frame.

    >>> from rollbook import Experience
    >>> frame = read_header(encode([Experience(tokens=[1, 2, 3])] * 2))
    >>> frame.start, frame.stop % 64, frame.count, frame.compression
    (0, 0, 2, None)
    """

    start: int
    compression: str | None
    length: int
    decoded: int
    count: int
    checksum: int
    stop: int


def read_header(data: Buffer, start: int = 0, limits: Limits = DEFAULT_LIMITS) -> Frame:
    """Read and check a header. The bytes after it are not read.

    Args:
        data: A buffer.
        start: Where the frame begins.
        limits: Largest sizes to accept.

    Returns:
        The header.

    Raises:
        WireError: The header is not valid or exceeds the limits.

    >>> from rollbook import Experience
    >>> frame = read_header(encode([Experience(tokens=[1, 2, 3])], compression="zstd"))
    >>> frame.count, frame.compression
    (1, 'zstd')
    """
    view = memoryview(data).cast("B")
    head = bytes(view[start : start + HEADER_BYTES])
    if head[:8] != MAGIC[: len(head)] or not head:
        hint = "; Experience.deserialize_many reads TRXP" if head[:4] == b"TRXP" else ""
        raise WireError(f"bad magic {head[:8]!r}: not a Rollbook frame (a frame begins with {MAGIC!r}){hint}", start)
    if len(head) < HEADER_BYTES:
        raise WireError(f"the header is truncated: {len(head)} of {HEADER_BYTES} bytes", start + len(head))
    _, version, flags, header_length, length, decoded, count, checksum, reserved = HEADER.unpack_from(head)
    if version != VERSION:
        older = ", written before `policy_logprobs` became `old_logprobs`" if version == 1 else ""
        raise WireError(f"format version {version}{older}; this reader supports {VERSION}", start + 8)
    if xxhash.xxh3_64_intdigest(head[:56]) != struct.unpack_from("<Q", head, 56)[0]:
        raise WireError("the header does not match its checksum", start + 56)
    if header_length != HEADER_BYTES or flags not in _COMPRESSION_NAMES or reserved:
        raise WireError(
            f"flags {flags:#x}, header length {header_length} or reserved {reserved} is unknown", start + 10
        )
    compression = _COMPRESSION_NAMES[flags]
    if compression is None and length != decoded:
        raise WireError(f"decoded length {decoded} of an uncompressed body of {length} bytes", start + 24)
    if length > limits.max_bytes or decoded > limits.max_bytes:
        raise WireError(f"a body of {max(length, decoded)} bytes is over the limit of {limits.max_bytes}", start + 16)
    if count > limits.max_items:
        raise WireError(f"{count} records are over the limit of {limits.max_items}", start + 32)
    stop = start + HEADER_BYTES + length + -length % HEADER_BYTES
    return Frame(start, compression, length, decoded, count, checksum, stop)


def decode(data: Buffer, *, verify: bool = True, limits: Limits = DEFAULT_LIMITS, private: bool = False) -> Experiences:
    """Decode all frames of a buffer, without copying.

    Args:
        data: Bytes, bytearray, memoryview, mmap or any other contiguous buffer.
        verify: Check every byte: checksum, text encoding, masks. `False` checks the header, the schema and all offsets:
            memory-safe for trusted data, but does not detect corruption.
        limits: Largest sizes to accept.
        private: The buffer is writable and not used by others (a private map): tensors become views of it. Otherwise
            each tensor column is copied when it is first used.

    Returns:
        The records of all frames.

    Raises:
        WireError: The bytes are not valid frames.

    >>> from rollbook import Experience
    >>> decode(encode([Experience(tokens=[1, 2])]) + encode([Experience(tokens=[3, 4, 5])]))
    Experiences(2 records, 5 tokens)
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data: got a strided buffer, expected contiguous bytes")
    view = view.cast("B")
    if private and view.readonly:
        raise ValueError("private: got a read-only buffer, expected writable memory")
    parts: list[Experiences] = []
    start = stored = decoded = 0
    while start < len(view) or not parts:
        frame = read_header(view, start, limits)
        if frame.compression is not None:
            # Over all frames: many small ones take as much memory as one large one.
            stored, decoded = stored + frame.length, decoded + frame.decoded
            if decoded > max(FREE_BYTES, stored * limits.max_ratio):
                raise WireError(
                    f"{stored} compressed bytes state a size of {decoded}, over the limit of {limits.max_ratio} times "
                    "as many (max_ratio)",
                    start + 24,
                )
        parts.append(_decode_frame(view, frame, verify, limits, private))
        start = frame.stop
    if len(parts) == 1:
        return parts[0]
    if len({name for table in parts for name in table.columns}) > limits.max_columns:
        raise WireError(f"the frames together have more columns than the limit of {limits.max_columns}")
    try:
        return Experiences.concat(parts)
    except ValueError as error:
        raise WireError(f"the frames cannot be concatenated: {error}") from None


def decode_arrays(data: Buffer, fields: Collection[str], limits: Limits = DEFAULT_LIMITS) -> dict[str, pa.Array]:
    """Decode some fields of one uncompressed frame as Arrow arrays, without copying.

    Only the header, the schema and the offsets of these arrays are checked, which makes them safe to read.

    Args:
        data: A buffer with exactly one frame.
        fields: Names of fields; their side columns are included.
        limits: Largest sizes to accept.

    Returns:
        The arrays, by column name.

    Raises:
        WireError: The bytes are not such a frame.

    >>> from rollbook import Experience
    >>> decode_arrays(encode([Experience(tokens=[1, 2, 3], reward=1.0)]), ["reward"])["reward"].to_pylist()
    [1.0]
    """
    view = memoryview(data).cast("B")
    frame = read_header(view, 0, limits)
    begin, end = HEADER_BYTES, HEADER_BYTES + frame.length
    if frame.compression is not None:
        raise WireError(f"got a frame compressed by {frame.compression}, expected an uncompressed one", 10)
    if frame.stop != len(view):
        raise WireError(f"the frame takes {frame.stop} bytes, {len(view)} are there", begin)
    stored = np.frombuffer(view[begin:end], dtype=np.uint8)
    if stored.size and stored.__array_interface__["data"][0] % 8:
        stored = np.array(stored)
    batch = read_batch(stored, frame.count, limits.max_columns, begin)
    arrays = {
        name: batch.column(i)
        for i, name in enumerate(batch.schema.names)
        if name in OWNERS and OWNERS[name][0].name in fields
    }
    check_arrays(arrays, False)
    return arrays


def _decode_frame(view: memoryview, frame: Frame, verify: bool, limits: Limits, private: bool) -> Experiences:
    begin, end = frame.start + HEADER_BYTES, frame.start + HEADER_BYTES + frame.length
    if frame.stop > len(view):
        raise WireError(f"the frame takes {frame.stop - frame.start} bytes, {len(view) - frame.start} are there", begin)
    if any(view[end : frame.stop]):
        raise WireError("the padding after the body is not zero", end)
    body = view[begin:end]
    if verify and xxhash.xxh3_64_intdigest(body) != frame.checksum:
        raise WireError("the body does not match its checksum", begin)
    stored = np.frombuffer(body, dtype=np.uint8)
    if frame.compression is not None:
        stored, private = _decompress(stored, frame, begin), True
    elif stored.size and stored.ctypes.data % 8:
        # Arrow arrays must be aligned to their elements: an unaligned buffer is copied.
        aligned = allocate(stored.shape, np.uint8)
        aligned[:] = stored
        stored, private = aligned, True
    batch = read_batch(stored, frame.count, limits.max_columns, begin)
    if not frame.count:
        return Experiences()
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    check_arrays(arrays, verify)
    columns = from_arrays(arrays, stored if private else None)
    try:
        check_columns(columns, frame.count, masks=verify)
        if limits.max_depth < MAX_DEPTH:
            # The limit of the format is checked when rows are built; a lower one is checked here.
            check_depth(columns, limits.max_depth)
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error), begin) from None
    return Experiences.from_encoded(columns, frame.count)


def _decompress(stored: NDArray[np.uint8], frame: Frame, at: int) -> NDArray[np.uint8]:
    """Decompress the body into memory of exactly the stated size."""
    try:
        if frame.compression == "zstd":
            # Not as a stream, for which zstd would allocate a window of the size that the body states.
            body = pa.Codec("zstd").decompress(pa.py_buffer(stored), decompressed_size=frame.decoded)
            return np.frombuffer(body, dtype=np.uint8)
        # Pages are not requested in advance: the stated size may be wrong, and only decoded bytes should take memory.
        out = allocate((frame.decoded,), np.uint8, touched=False)
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(stored)), frame.compression) as stream:
            filled = 0
            while filled < frame.decoded:
                step = stream.readinto(out.data[filled : filled + (1 << 20)])
                if not step:
                    raise WireError(f"the body decompresses to {filled} bytes, {frame.decoded} are stated", at)
                filled += step
            if stream.read(1):
                raise WireError(f"the body decompresses to more than the stated {frame.decoded} bytes", at)
    except MemoryError:
        raise WireError(f"not enough memory for a body of {frame.decoded} bytes", at) from None
    except (OSError, pa.ArrowException) as error:
        raise WireError(f"the body cannot be decompressed: {error}", at) from None
    return out


def iter_frames(file: BinaryIO, *, verify: bool = True, limits: Limits = DEFAULT_LIMITS) -> Iterator[Experiences]:
    """Read the frames of a stream one at a time; memory holds one frame.

    Args:
        file: A binary file or socket stream.
        verify: As for `decode`.
        limits: Largest sizes to accept.

    Yields:
        The records of each frame.

    Raises:
        WireError: The bytes are not valid frames.

    >>> import io
    >>> from rollbook import Experience
    >>> file = io.BytesIO()
    >>> for tokens in ([1, 2], [3, 4, 5]):
    ...     _ = write_frame(file, [Experience(tokens=tokens)])
    >>> _ = file.seek(0)
    >>> [frame[0].tokens.tolist() for frame in iter_frames(file)]
    [[1, 2], [3, 4, 5]]
    """
    at = 0
    while head := _read(file, HEADER_BYTES):
        try:
            frame = read_header(head, 0, limits)
        except WireError as error:
            raise WireError(error.message, at + (error.offset or 0)) from None
        size = frame.stop
        memory = bytearray(head)
        while len(memory) < size:
            # In steps, so that a wrong length in the header takes no more memory than the bytes that arrive.
            step = _read(file, min(size - len(memory), 16 << 20))
            if not step:
                raise WireError(f"the frame takes {size} bytes, {len(memory)} are there", at + len(memory))
            memory += step
        try:
            frame_read = decode(memory, verify=verify, limits=limits, private=True)
        except WireError as error:
            raise WireError(error.message, None if error.offset is None else at + error.offset) from None
        yield frame_read
        at += size


def _read(file: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        chunk = file.read(size)
        if not chunk:
            break
        parts.append(chunk)
        size -= len(chunk)
    return b"".join(parts)


def to_trxp(experiences: Iterable[Experience]) -> bytes:
    """Write records as a TRXP 1 payload, which Trinity-RFT 0.5.2 and later read (see `rollbook.core.trxp`).

    Args:
        experiences: The records.

    Returns:
        The payload.

    >>> from rollbook import Experience
    >>> Experience.deserialize_many(to_trxp([Experience(tokens=[1, 2, 3])]))[0].tokens.tolist()
    [1, 2, 3]
    """
    from rollbook.core import trxp

    return trxp.write(experiences)
