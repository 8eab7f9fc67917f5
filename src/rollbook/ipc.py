"""The Arrow IPC stream inside a frame, looked at before Arrow's own reader is.

Invariant: Arrow's reader only sees a stream of exactly one schema, one record batch and an end mark, whose buffers lie
in order inside the body, uncompressed, as many as the schema asks for. What it could be made to allocate or to
dereference has been compared with the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook import arrow
from rollbook.errors import WireError

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
END_BYTES = len(END)
_SCHEMA, _RECORD_BATCH = 1, 3
_V5 = 4


class _Flat:
    """A flatbuffer, read with every position checked."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data = data
        self.at = at

    def number(self, form: str, position: int) -> int:
        size = struct.calcsize(form)
        if not 0 <= position <= len(self.data) - size:
            raise WireError("Arrow metadata points outside itself", self.at + max(position, 0))
        value: int = struct.unpack_from(form, self.data, position)[0]
        return value

    def root(self) -> int:
        return self.number("<I", 0)

    def slot(self, table: int, index: int) -> int:
        """Where field `index` of a table lies, or 0 if it is not there."""
        vtable = table - self.number("<i", table)
        size = self.number("<H", vtable)
        entry = 4 + 2 * index
        if entry + 2 > size:
            return 0
        offset = self.number("<H", vtable + entry)
        return table + offset if offset else 0

    def follow(self, position: int) -> int:
        return position + self.number("<I", position)

    def pairs(self, table: int, index: int) -> NDArray[np.int64]:
        """A vector of structs of two 64-bit numbers, as an array (count, 2)."""
        slot = self.slot(table, index)
        if not slot:
            return np.empty((0, 2), dtype=np.int64)
        vector = self.follow(slot)
        count = self.number("<I", vector)
        if vector + 4 + 16 * count > len(self.data):
            raise WireError("Arrow metadata lists more than it holds", self.at + vector)
        return np.frombuffer(self.data[vector + 4 : vector + 4 + 16 * count], dtype=np.int64).reshape(-1, 2)


def _message(body: memoryview, start: int, at: int) -> tuple[_Flat, int, int, int]:
    """The message at `start`: its metadata, the kind of its header, where that lies, and where its body begins."""
    if bytes(body[start : start + 4]) != END[:4]:
        raise WireError("an Arrow message does not begin with its mark", at + start)
    if len(body) < start + 8:
        raise WireError("an Arrow message is cut short", at + start)
    size = struct.unpack_from("<i", body, start + 4)[0]
    if size <= 0 or size % 8 or start + 8 + size > len(body):
        raise WireError(f"an Arrow message states {size} bytes of metadata", at + start + 4)
    flat = _Flat(body[start + 8 : start + 8 + size], at + start + 8)
    root = flat.root()
    version = flat.slot(root, 0)
    if not version or flat.number("<h", version) != _V5:
        raise WireError("an Arrow message is not of metadata version 5", at + start)
    kind, header = flat.slot(root, 1), flat.slot(root, 2)
    if not kind or not header:
        raise WireError("an Arrow message has no header", at + start)
    return flat, flat.number("<B", kind), flat.follow(header), start + 8 + size


def read_batch(stored: NDArray[np.uint8], count: int, max_columns: int, at: int) -> pa.RecordBatch:
    """The one record batch of the stream in `stored`, which begins at byte `at` of the data."""
    body = memoryview(stored.data)
    flat, kind, _, batch_start = _message(body, 0, at)
    if kind != _SCHEMA:
        raise WireError("the Arrow stream does not begin with a schema", at)
    length = flat.slot(flat.root(), 3)
    if length and flat.number("<q", length):
        raise WireError("the Arrow schema has a body", at)
    buffer = pa.py_buffer(stored)
    try:
        schema = pa.ipc.read_schema(buffer.slice(0, batch_start))
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        raise WireError(f"the Arrow schema cannot be read: {error}", at) from None
    if len(schema) > max_columns:
        raise WireError(f"{len(schema)} columns are over the limit of {max_columns}", at)
    if count or len(schema):
        arrow.check_schema(schema)
    stop = _check_batch(body, batch_start, schema, count, at)
    if bytes(body[stop:]) != END:
        raise WireError("the Arrow stream does not end behind its one record batch", at + stop)
    try:
        batch = pa.ipc.read_record_batch(buffer.slice(batch_start, stop - batch_start), schema)
        batch.validate()
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        raise WireError(f"the Arrow record batch cannot be read: {error}", at + batch_start) from None
    return batch


def _check_batch(body: memoryview, start: int, schema: pa.Schema, count: int, at: int) -> int:
    """Compare the record batch's metadata with the schema and the bytes; returns where the message stops."""
    flat, kind, header, data = _message(body, start, at)
    if kind != _RECORD_BATCH:
        raise WireError("the second Arrow message is no record batch", at + start)
    if flat.slot(header, 3):
        raise WireError("Arrow's own body compression is refused", at + start)
    if flat.slot(header, 4):
        raise WireError("Arrow view types are refused", at + start)
    slot = flat.slot(flat.root(), 3)
    size = flat.number("<q", slot) if slot else 0
    if size < 0 or size > len(body) - data:
        raise WireError(f"the Arrow record batch states a body of {size} bytes", at + start)
    slot = flat.slot(header, 0)
    rows = flat.number("<q", slot) if slot else 0
    if rows != count:
        raise WireError(f"the header states {count} records, the Arrow record batch {rows}", at + start)
    nodes, buffers = flat.pairs(header, 1), flat.pairs(header, 2)
    wanted_nodes, wanted_buffers = 0, 0
    for field in schema:
        more = _counts(field.type)
        wanted_nodes, wanted_buffers = wanted_nodes + more[0], wanted_buffers + more[1]
    if len(nodes) != wanted_nodes or len(buffers) != wanted_buffers:
        raise WireError(
            f"the Arrow record batch has {len(nodes)} arrays and {len(buffers)} buffers, "
            f"its schema {wanted_nodes} and {wanted_buffers}",
            at + start,
        )
    # A node's length is bounded by the body: an entry takes a bit at least, or none at all in a null array.
    if len(nodes) and (
        (nodes < 0).any() or (nodes[:, 1] > nodes[:, 0]).any() or nodes[:, 0].max() > max(count, 8 * size)
    ):
        raise WireError("the Arrow record batch states impossible lengths", at + start)
    ends = buffers[:, 0] + buffers[:, 1]
    if len(buffers) and (
        (buffers < 0).any()
        or (buffers[:, 0] % 8).any()
        or (buffers > size).any()
        or ends.max() > size
        or (buffers[1:, 0] < ends[:-1]).any()
    ):
        raise WireError("the Arrow record batch's buffers overlap or leave its body", at + start)
    return data + size


def _counts(kind: pa.DataType) -> tuple[int, int]:
    """How many nodes and buffers an array of this type has, children included."""
    if pa.types.is_null(kind):
        return 1, 0
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        buffers = 1
    elif (
        kind.num_fields
        or pa.types.is_primitive(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_temporal(kind)
    ):
        buffers = 2
    else:
        buffers = 3
    nodes = 1
    for i in range(kind.num_fields):
        more = _counts(kind.field(i).type)
        nodes, buffers = nodes + more[0], buffers + more[1]
    return nodes, buffers


def check_arrays(arrays: Mapping[str, pa.Array], verify: bool) -> None:
    """Check all offsets and null counts, and with `verify` every byte of text."""
    for name, array in arrays.items():
        try:
            if pa.types.is_large_string(array.type):
                _check_text(array, verify)
            elif verify or not pa.types.is_large_binary(array.type):
                array.validate(full=True)
            else:
                arrow.offsets(array, _size(array))
        except (pa.ArrowException, ValueError) as error:
            raise WireError(f"column {name!r}: {str(error).removeprefix('byte ')}") from None


def _size(array: pa.Array) -> int:
    data = array.buffers()[2]
    return 0 if data is None else data.size


def _check_text(array: pa.Array, verify: bool) -> None:
    bounds = arrow.offsets(array, _size(array))
    if not verify or not len(array):
        return
    # Arrow's check for UTF-8 takes longer than the checksum. Text of one-byte characters, most of it, needs none:
    # then only lengths and nulls are left to check, as for binary.
    data = array.buffers()[2]
    text: Any = b"" if data is None else np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]]
    if len(text) and text.max() >= 128:
        array.validate(full=True)
        return
    binary = pa.Array.from_buffers(pa.large_binary(), len(array), array.buffers(), array.null_count, array.offset)
    binary.validate(full=True)


def check_zstd(stored: NDArray[np.uint8], decoded: int) -> None:
    """Refuse a zstd body whose window the decoder would have to hold beside the output, if it is large.

    RFC 8878, 3.1.1.1: magic, a descriptor byte, then the window byte unless the frame is a single segment.
    """
    head = bytes(stored[:6])
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 6:
        raise WireError("the body is no zstd frame")
    if not head[4] & 0x20:
        exponent, mantissa = head[5] >> 3, head[5] & 7
        window = (1 << (10 + exponent)) + ((1 << (10 + exponent)) >> 3) * mantissa
        if window > max(8 << 20, decoded):
            raise WireError(f"the zstd body asks for a window of {window} bytes")
