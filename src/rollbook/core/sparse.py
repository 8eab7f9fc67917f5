"""Some rows of an uncompressed frame, from byte ranges of it.

Invariant: what `read_rows` returns is what `wire.decode` returns for these rows, and hostile bytes raise `WireError`:
every range is inside the buffer that the checked metadata names, and ranges of different rows never overlap, so that
no more is asked for than the frame has. The checksum covers the whole body and is not checked.

A reader is a generator: it yields byte ranges of the frame and is sent their bytes. Readers of several columns or
frames advance together, so that a store is asked once for all of them: the metadata, then offsets and fixed-size
values, then what the offsets point to, and one more time for each level of nesting.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from rollbook.core import arrow, ipc
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import owner
from rollbook.core.wire import DEFAULT_LIMITS, HEADER_BYTES, Frame, Limits, read_header

Result = TypeVar("Result")
Span = tuple[int, int]
"""Start and stop: of rows, or of bytes."""
Reader = Generator[list[Span], list[Any], Result]

HEAD_BYTES = 4096
"""How much is read first: the metadata of most frames."""


def read_rows(
    size: int, slots: Sequence[int], fields: Collection[str] | None = None, limits: Limits = DEFAULT_LIMITS
) -> Reader[Experiences]:
    """Read the rows at `slots` of a frame of `size` bytes.

    Args:
        size: Length of the frame, padding included.
        slots: Row numbers, rising.
        fields: Names of the fields to read; all if `None`. With fewer, the columns are enough to gather and to hand on
            as Arrow, not to make rows of.
        limits: What the reader is willing to take.

    Yields:
        Byte ranges of the frame; send the bytes of each.

    Returns:
        The rows, on memory of their own.

    Raises:
        WireError: If the bytes are no such frame, or a slot is not in it.

    >>> from rollbook import Experience, wire
    >>> data = wire.encode([Experience(tokens=[1, 2, i]) for i in range(9)])
    >>> drive(read_rows(len(data), [2, 7]), lambda spans: [data[a:b] for a, b in spans]).values("tokens")[1].tolist()
    [1, 2, 7]
    """
    frame, layout = yield from _read_layout(size, limits)
    if slots and not 0 <= slots[0] <= slots[-1] < frame.count:
        raise WireError(f"{frame.count} records, none in slot {slots[0]} or {slots[-1]}")
    if not slots:
        return Experiences()
    spans = _runs(slots)
    names, readers = [], []
    for i, node in enumerate(layout.columns()):
        name = layout.schema.field(i).name
        if fields is None or ((known := owner(name)) is not None and known[0].name in fields):
            names.append(name)
            readers.append(_read_node(node, spans))
    arrays = dict(zip(names, (yield from advance_together(readers)), strict=True))
    ipc.check_arrays(arrays, True)
    columns = arrow.from_arrays(arrays)
    if fields is None:
        try:
            arrow.check(columns, len(slots))
            arrow.check_masks(columns)
        except WireError:
            raise
        except ValueError as error:
            raise WireError(str(error)) from None
    return Experiences._of(columns, len(slots))


def drive(reader: Reader[Result], fetch: Any) -> Result:
    """Run a reader to its end; `fetch` returns the bytes of each of some ranges."""
    try:
        spans = next(reader)
        while True:
            spans = reader.send(fetch(spans))
    except StopIteration as stop:
        result: Result = stop.value
        return result


def advance_together(readers: Sequence[Reader[Any]]) -> Reader[list[Any]]:
    """Run readers in step, asking once for the ranges of all of them.

    Returns:
        The result of each reader.
    """
    results: list[Any] = [None] * len(readers)
    waiting: list[tuple[int, int]] = []
    spans: list[Span] = []
    for i, reader in enumerate(readers):
        try:
            ranges = next(reader)
        except StopIteration as stop:
            results[i] = stop.value
        else:
            waiting.append((i, len(ranges)))
            spans += ranges
    while waiting:
        data = yield spans
        at, spans, still = 0, [], []
        for i, count in waiting:
            part = data[at : at + count]
            at += count
            try:
                ranges = readers[i].send(part)
            except StopIteration as stop:
                results[i] = stop.value
            else:
                still.append((i, len(ranges)))
                spans += ranges
        waiting = still
    return results


def _runs(slots: Sequence[int]) -> list[Span]:
    """Rising numbers as the runs they form."""
    runs: list[Span] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        elif runs and slot < runs[-1][1]:
            raise ValueError(f"slots: got {slot} behind {runs[-1][1] - 1}, expected rising numbers")
        else:
            runs.append((slot, slot + 1))
    return runs


# --- metadata -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Form:
    """What has to be known of an Arrow type to read its arrays."""

    kind: pa.DataType
    buffers: int
    null: bool
    offset_bytes: int
    """The size of an offset; 0 if the type has none."""
    list_size: int
    """Entries of the children for each entry: 1 but for lists of fixed size."""
    bits: int
    """The size of a value; 0 if the type has none of fixed size."""
    children: tuple[_Form, ...]

    @classmethod
    def of(cls, kind: pa.DataType) -> _Form:
        types = pa.types
        width = _offset_bytes(kind)
        children = tuple(cls.of(kind.field(i).type) for i in range(kind.num_fields))
        plain = not (width or children or types.is_struct(kind) or types.is_null(kind))
        bits = (1 if types.is_boolean(kind) else kind.bit_width) if plain else 0
        size = kind.list_size if types.is_fixed_size_list(kind) else 1
        return cls(kind, ipc.buffer_count(kind), types.is_null(kind), width, size, bits, children)


@dataclass(slots=True)
class _Node:
    """An Arrow array of the frame: its type, length, nulls, buffers (byte ranges of the frame) and children."""

    form: _Form
    length: int
    nulls: int
    buffers: list[Span]
    children: list[_Node]


_forms: dict[int, tuple[pa.Schema, list[_Form]]] = {}
"""By the id of a schema, which is kept with them: frames of one writer share one (see `ipc`)."""
_MOST_FORMS = 64


def _forms_of(schema: pa.Schema) -> list[_Form]:
    entry = _forms.get(id(schema))
    if entry is None:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        entry = _forms[id(schema)] = schema, [_Form.of(kind) for kind in schema.types]
    return entry[1]


@dataclass(slots=True)
class _Layout:
    schema: pa.Schema
    nodes: list[list[int]]
    buffers: list[Span]

    def columns(self) -> list[_Node]:
        nodes, buffers = iter(self.nodes), iter(self.buffers)

        def build(form: _Form) -> _Node:
            length, nulls = next(nodes)
            mine = [next(buffers) for _ in range(form.buffers)]
            return _Node(form, length, nulls, mine, [build(child) for child in form.children])

        return [build(form) for form in _forms_of(self.schema)]


def _read_layout(size: int, limits: Limits) -> Reader[tuple[Frame, _Layout]]:
    """Read and check the frame's header, the schema and the metadata of the record batch."""
    (head,) = yield [(0, min(size, HEAD_BYTES))]
    frame = read_header(head, 0, limits)
    if frame.compression is not None or frame.stop != size:
        raise WireError(f"a frame of {frame.stop} bytes, compression {frame.compression}; expected {size}, None")
    end = HEADER_BYTES
    for _ in range(2):
        # The mark and the length of a message, then the message.
        for more in (8, None):
            stop = end + (8 + ipc.metadata_bytes(memoryview(head)[end : end + 8], end) if more is None else more)
            if stop > HEADER_BYTES + frame.length:
                raise WireError("an Arrow message is longer than the frame", end)
            if stop > len(head):
                (rest,) = yield [(len(head), min(size, max(stop, len(head) + HEAD_BYTES)))]
                head = bytes(head) + bytes(rest)
        end = stop
    body = memoryview(head)[HEADER_BYTES:end]
    schema, nodes, buffers, start = ipc.read_layout(body, frame.length, frame.count, limits.max_columns, HEADER_BYTES)
    start += HEADER_BYTES
    spans = [(start + at, start + at + length) for at, length in buffers.tolist()]
    return frame, _Layout(schema, nodes.tolist(), spans)


# --- arrays -------------------------------------------------------------------------------------------------------


def _inside(buffer: Span, start: int, stop: int) -> Span:
    """A range of a buffer as a range of the frame."""
    if not 0 <= start <= stop <= buffer[1] - buffer[0]:
        raise WireError("an Arrow buffer is too short", buffer[0])
    return buffer[0] + start, buffer[0] + stop


def _read_node(node: _Node, spans: list[Span]) -> Reader[pa.Array]:
    """Read the entries in `spans`, which rise and do not overlap, one behind the other."""
    form = node.form
    kind = form.kind
    count = sum(stop - start for start, stop in spans)
    if spans and spans[-1][1] > node.length:
        raise WireError("an Arrow array is shorter than what points to it")
    if form.null or not count:
        return pa.nulls(count, kind)
    bitmap = [_inside(node.buffers[0], a >> 3, (b + 7) >> 3) for a, b in spans] if node.nulls else []
    width = form.offset_bytes
    children: list[pa.Array] = []
    buffers: list[Any] = []
    if width:
        offsets = [_inside(node.buffers[1], a * width, (b + 1) * width) for a, b in spans]
        data = yield bitmap + offsets
        bounds, inner = _rebase([np.frombuffer(part, f"<i{width}") for part in data[len(bitmap) :]], node)
        buffers.append(pa.py_buffer(bounds))
        if node.children:
            children.append((yield from _read_node(node.children[0], inner)))
        else:
            values = (yield [_inside(node.buffers[2], a, b) for a, b in inner]) if inner else []
            buffers.append(pa.py_buffer(b"".join(values)))
        del data[len(bitmap) :]
    elif node.children:
        inner = [(a * form.list_size, b * form.list_size) for a, b in spans] if form.list_size != 1 else spans
        readers: list[Reader[Any]] = [_read_node(child, inner) for child in node.children]
        *children, data = yield from advance_together([*readers, _read_spans(bitmap)])
    elif not form.bits:  # a struct without fields
        data = yield from _read_spans(bitmap)
    else:
        bits = form.bits
        values = [_inside(node.buffers[1], a * bits >> 3, (b * bits + 7) >> 3) for a, b in spans]
        data = yield bitmap + values
        parts = data[len(bitmap) :]
        buffers.append(_joined_bits(parts, spans) if bits == 1 else pa.py_buffer(b"".join(parts)))
    validity = _joined_bits(data[: len(bitmap)], spans) if node.nulls else None
    # Null counts are those of the rows, which -1 makes Arrow count.
    return pa.Array.from_buffers(kind, count, [validity, *buffers], -1 if node.nulls else 0, children=children)


def _read_spans(spans: list[Span]) -> Reader[list[Any]]:
    return (yield spans) if spans else []


def _offset_bytes(kind: pa.DataType) -> int:
    """The size of an offset in arrays of this type; 0 if they have none."""
    types = pa.types
    if types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind):
        return 8
    if types.is_string(kind) or types.is_binary(kind) or types.is_list(kind) or types.is_map(kind):
        return 4
    return 0


def _rebase(tables: list[Any], node: _Node) -> tuple[Any, list[Span]]:
    """Offsets of some runs of entries as those of one array, and the ranges of the child that they name."""
    inner: list[Span] = []
    last, total = 0, 0
    shifted = [np.zeros(1, dtype=tables[0].dtype)]
    for table in tables:
        first, stop = int(table[0]), int(table[-1])
        # Rising across the runs as well: no byte of the child is asked for twice.
        if first < last or stop < first or (table[1:] < table[:-1]).any():
            raise WireError("offsets fall, or leave their values")
        shifted.append(table[1:] + (total - first))
        total += stop - first
        last = stop
        if stop > first:
            if inner and inner[-1][1] == first:
                inner[-1] = (inner[-1][0], stop)
            else:
                inner.append((first, stop))
    return np.concatenate(shifted), inner


def _joined_bits(parts: Sequence[Any], spans: Sequence[Span]) -> pa.Buffer:
    """The bits of some runs, each from the bytes that hold it, as one bitmap."""
    pieces = []
    for part, (start, stop) in zip(parts, spans, strict=True):
        bits = np.unpackbits(np.frombuffer(part, dtype=np.uint8), bitorder="little")
        pieces.append(bits[start & 7 : (start & 7) + stop - start])
    return pa.py_buffer(np.packbits(np.concatenate(pieces), bitorder="little"))
