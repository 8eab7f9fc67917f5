"""Read several frames at once, or some rows of a frame from byte ranges.

Invariant: a stack returns what `wire.decode` returns for its frames, concatenated. Corrupt frames, and frames that
differ in more than their numbers, are not read as a stack; `wire.decode` reports what is wrong with them.

Frames of one writer have the same schema and metadata of the same structure. The metadata of the first is parsed, that
of the others is compared with it byte by byte except for the numbers, and the numbers of all are checked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rollbook.core import wire
from rollbook.core.columns import Columns, check_columns, from_arrays, implied
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import OWNERS, Field
from rollbook.core.ragged import RaggedRuns
from rollbook.core.wire import DEFAULT_LIMITS, HEADER_BYTES, Frame, Limits, read_header

_END = np.frombuffer(wire.END, dtype=np.uint8)


class Stack:
    """F frames with one schema, as `read_stack` returns them.

    Args:
        memory: Bytes of all frames.
        template: Metadata of the first frame.
        counts: Records in each frame.

    Attributes:
        schema: Schema of the frames.
        parts: Number of nodes and buffers of each column.
        starts: Start of the record batch of each frame.
        stops: End of the record batch of each frame.
        nodes: [F, nodes, 2] Length and null count of each Arrow array.
        buffers: [F, buffers, 2] Start in memory and length of each Arrow buffer.

    >>> from rollbook import Experience, wire
    >>> frames = [wire.encode([Experience(tokens=[1, 2, i])]) for i in range(2)]
    >>> memory = np.frombuffer(b"".join(frames), dtype=np.uint8).copy()
    >>> stack = read_stack(memory, [(0, len(frames[0])), (len(frames[0]), len(memory))])
    >>> stack.experiences().rows()[1].tokens.tolist()
    [1, 2, 1]
    """

    def __init__(self, memory: NDArray[np.uint8], template: wire.Template, counts: list[int]) -> None:
        self.memory = memory
        self.schema = template.schema
        self.parts = template.parts
        self.counts = counts
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.nodes: NDArray[np.int64]
        self.buffers: NDArray[np.int64]

    def batches(self) -> list[pa.RecordBatch]:
        """Return the record batch of each frame, without copying. Offsets are not checked yet."""
        buffer = pa.py_buffer(self.memory)
        try:
            return [
                pa.ipc.read_record_batch(buffer.slice(start, stop - start), self.schema)
                for start, stop in zip(self.starts, self.stops, strict=True)
            ]
        except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
            raise WireError(f"the Arrow record batch cannot be read: {error}") from None

    def arrays(self, fields: Collection[str]) -> list[dict[str, pa.Array]]:
        """Read some fields of each frame as Arrow arrays, as `wire.decode_arrays` does.

        Args:
            fields: Names of fields; their side columns are included.

        Returns:
            For each frame, the arrays by column name.
        """
        chosen = [
            (i, name) for i, name in enumerate(self.schema.names) if name in OWNERS and OWNERS[name][0].name in fields
        ]
        frames = []
        for batch in self.batches():
            arrays = {name: batch.column(i) for i, name in chosen}
            wire.check_arrays(arrays, False)
            frames.append(arrays)
        return frames

    def experiences(self, verify: bool = True) -> Experiences | None:
        """Return the records of all frames, on columns from which only rows can be made: tensors stay where they are.

        Args:
            verify: Check text encoding and masks.

        Returns:
            The records; `None` if their columns are better read frame by frame.

        Raises:
            WireError: The record batches are corrupt.
        """
        count = sum(self.counts)
        runs: dict[str, RaggedRuns] = {}
        rest: list[str] = []
        node = buffer = 0
        names = set(self.schema.names)
        for field, (nodes, buffers) in zip(self.schema, self.parts, strict=True):
            spec, side = OWNERS.get(field.name, (None, ""))
            if spec is None or side or spec.kind != "tensor":
                rest.append(field.name)
            elif spec.trailing or f"{field.name}__dtype" in names:
                return None
            else:
                runs[field.name] = self._read_runs(spec, field.type, node, buffer)
            node, buffer = node + nodes, buffer + buffers
        batches = self.batches()
        try:
            for batch in batches:
                batch.validate()
            table = pa.Table.from_batches(batches).select(rest)
            arrays = {name: _combined(table.column(name)) for name in rest}
        except pa.ArrowException as error:
            raise WireError(f"the Arrow record batch cannot be read: {error}") from None
        wire.check_arrays(arrays, verify)
        columns: Columns = {**from_arrays(arrays), **runs}
        try:
            check_columns(columns, count, masks=verify)
            if verify:
                for column in runs.values():
                    column.checked = True
        except WireError:
            raise
        except ValueError as error:
            raise WireError(str(error)) from None
        return Experiences.from_encoded(columns, count)

    def _read_runs(self, field: Field, kind: pa.DataType, node: int, buffer: int) -> RaggedRuns:
        """Read a tensor column, whose buffers are validity, offsets, and values with their own validity."""
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        lengths, nulls = self.nodes[:, node : node + 2, 0], self.nodes[:, node : node + 2, 1]
        begins, sizes = self.buffers[:, buffer : buffer + 4, 0], self.buffers[:, buffer : buffer + 4, 1]
        counts = np.array(self.counts)
        if nulls[:, 1].any():
            raise WireError(f"column {field.name!r}: null inside a row")
        if (
            (lengths[:, 0] != counts).any()
            or (sizes[:, 1] < 8 * (counts + 1)).any()
            or (sizes[:, 3] < lengths[:, 1] * dtype.itemsize).any()
        ):
            raise WireError(f"column {field.name!r}: a buffer is too short")
        numbers = self.memory.view(np.int64)
        offset_starts = (begins[:, 1] >> 3).tolist()
        offsets = np.concatenate(
            [numbers[start : start + count + 1] for count, start in zip(self.counts, offset_starts, strict=True)]
        )
        steps = offsets[1:] - offsets[:-1]
        ends = np.cumsum(counts + 1)
        firsts = offsets[ends - counts - 1]
        inside = np.ones(len(steps), dtype=np.bool_)
        inside[ends[:-1] - 1] = False
        row_lengths = steps[inside]
        if (row_lengths < 0).any() or (firsts < 0).any() or (offsets[ends - 1] > lengths[:, 1]).any():
            raise WireError(f"column {field.name!r}: offsets decrease, or exceed their values")
        valid = None
        if nulls[:, 0].any():
            valid = np.concatenate([self._bits(f, begins[f, 0], sizes[f, 0], nulls[f, 0]) for f in range(len(counts))])
            if row_lengths[~valid].any():
                raise WireError(f"column {field.name!r}: a row is null and has values")
        return RaggedRuns(
            self.memory.view(dtype),
            begins[:, 3] // dtype.itemsize + firsts,
            row_lengths,
            self.counts,
            implied(dtype.name, field),
            valid,
        )

    def _bits(self, frame: int, start: int, size: int, nulls: int) -> NDArray[np.bool_]:
        count = self.counts[frame]
        if not nulls:
            return np.ones(count, dtype=np.bool_)
        if size < (count + 7) // 8:
            raise WireError("an Arrow validity bitmap is too short")
        return np.unpackbits(self.memory[start : start + size], count=count, bitorder="little").astype(np.bool_)


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def read_stack(
    memory: NDArray[np.uint8], spans: Sequence[tuple[int, int]], verify: bool = True, limits: Limits = DEFAULT_LIMITS
) -> Stack | None:
    """Check the frames in a block of memory.

    Args:
        memory: The memory, aligned to 8 bytes.
        spans: Start and stop of each frame in it, ascending, at multiples of 64.
        verify: Whether to check the checksums of the bodies.
        limits: Limits of the reader.

    Returns:
        The stack, or `None` if the frames differ in structure or one is corrupt.

    >>> from rollbook import Experience, wire
    >>> frame = wire.encode([Experience(tokens=[1, 2, 3])])
    >>> read_stack(np.frombuffer(frame, dtype=np.uint8).copy(), [(0, len(frame))]).experiences().rows()[0].tokens
    tensor([1, 2, 3], dtype=torch.int32)
    """
    if memory.__array_interface__["data"][0] % 8 or len(memory) % 8 or not spans:
        return None
    view = memory.data
    counts, lengths = [], []
    try:
        for start, stop in spans:
            frame = read_header(view, start, limits)
            body = view[start + HEADER_BYTES : start + HEADER_BYTES + frame.length]
            if frame.compression is not None or frame.stop != stop or not frame.count or len(body) != frame.length:
                return None
            if any(view[start + HEADER_BYTES + frame.length : stop]):
                return None
            if verify and xxhash.xxh3_64_intdigest(body) != frame.checksum:
                return None
            counts.append(frame.count)
            lengths.append(frame.length)
        begin = spans[0][0] + HEADER_BYTES
        template = wire.read_template(view[begin : begin + lengths[0]], counts[0], limits.max_columns, begin)
    except WireError:
        return None
    if template is None or min(lengths) < len(template.head):
        return None
    begins = np.array([start + HEADER_BYTES for start, _ in spans])
    heads = memory[begins[:, None] + np.arange(len(template.head))]
    if ((heads ^ template.head) & template.fixed).any():
        return None
    nodes, buffers, rows, sizes = (template.numbers(heads, name) for name in ("nodes", "buffers", "rows", "size"))
    if (rows[:, 0, 0] != counts).any():
        return None
    bodies = len(template.head) + sizes[:, 0, 0]
    if (sizes < 0).any() or (bodies + wire.END_BYTES != lengths).any():
        return None
    if wire.find_fault(nodes, buffers, sizes[:, 0, 0], rows[:, 0, 0]) is not None:
        return None
    if (memory[(begins + bodies)[:, None] + np.arange(wire.END_BYTES)] != _END).any():
        return None
    stack = Stack(memory, template, counts)
    stack.starts = (begins + template.batch_start).tolist()
    stack.stops = (begins + bodies).tolist()
    stack.nodes = nodes
    buffers = buffers.copy()
    buffers[:, :, 0] += (begins + len(template.head))[:, None]
    stack.buffers = buffers
    return stack


Result = TypeVar("Result")
Span = tuple[int, int]
"""Start and stop: of rows, or of bytes."""
Reader = Generator[list[Span], list[Any], Result]

HEAD_BYTES = 4096
"""Bytes that are read first, enough for the metadata of most frames."""


def read_rows(
    size: int, slots: Sequence[int], fields: Collection[str] | None = None, limits: Limits = DEFAULT_LIMITS
) -> Reader[Experiences]:
    """Read the rows at `slots` of a frame of `size` bytes.

    Args:
        size: Length of the frame, padding included.
        slots: Ascending row numbers.
        fields: Names of the fields to read; all if `None`. With fewer, the columns can be gathered and converted to
            Arrow, but not to rows.
        limits: Limits of the reader.

    Yields:
        Byte ranges of the frame; send the bytes of each.

    Returns:
        The rows, on memory of their own.

    Raises:
        WireError: The bytes are not such a frame, or a slot is out of range.

    >>> from rollbook import Experience, wire
    >>> data = wire.encode([Experience(tokens=[1, 2, i]) for i in range(9)])
    >>> drive(read_rows(len(data), [2, 7]), lambda spans: [data[a:b] for a, b in spans]).values("tokens")[1].tolist()
    [1, 2, 7]
    """
    frame, layout = yield from _read_layout(size, limits)
    if slots and not 0 <= slots[0] <= slots[-1] < frame.count:
        raise WireError(f"slots: got {slots[0]} to {slots[-1]}, expected 0 to {frame.count - 1}")
    if not slots:
        return Experiences()
    spans = _runs(slots)
    names, readers = [], []
    for i, node in enumerate(layout.columns()):
        name = layout.schema.field(i).name
        if fields is None or (name in OWNERS and OWNERS[name][0].name in fields):
            names.append(name)
            readers.append(_read_node(node, spans))
    arrays = dict(zip(names, (yield from advance_together(readers)), strict=True))
    wire.check_arrays(arrays, True)
    columns = from_arrays(arrays)
    if fields is None:
        try:
            check_columns(columns, len(slots), masks=True)
        except WireError:
            raise
        except ValueError as error:
            raise WireError(str(error)) from None
    return Experiences.from_encoded(columns, len(slots))


def drive(reader: Reader[Result], fetch: Callable[[list[Span]], list[Any]]) -> Result:
    """Run a reader to its end; `fetch` returns the bytes of each of some ranges."""
    try:
        spans = next(reader)
        while True:
            spans = reader.send(fetch(spans))
    except StopIteration as stop:
        records: Result = stop.value
        return records


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
        chunks = yield spans
        at, spans, still = 0, [], []
        for i, count in waiting:
            group = chunks[at : at + count]
            at += count
            try:
                ranges = readers[i].send(group)
            except StopIteration as stop:
                results[i] = stop.value
            else:
                still.append((i, len(ranges)))
                spans += ranges
        waiting = still
    return results


def _runs(slots: Sequence[int]) -> list[Span]:
    """Return ascending numbers as runs."""
    runs: list[Span] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        elif runs and slot < runs[-1][1]:
            raise ValueError(f"slots: got {slot} after {runs[-1][1] - 1}, expected ascending numbers")
        else:
            runs.append((slot, slot + 1))
    return runs


# --- metadata -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _ArrowType:
    """The properties of an Arrow type that are needed to read its arrays."""

    kind: pa.DataType
    buffers: int
    null: bool
    offset_bytes: int
    """Size of an offset; 0 if the type has none."""
    list_size: int
    """Entries of the children for each entry: 1 except for fixed-size lists."""
    bits: int
    """Size of a value; 0 if the type has no fixed size."""
    children: tuple[_ArrowType, ...]

    @classmethod
    def from_arrow(cls, kind: pa.DataType) -> _ArrowType:
        types = pa.types
        width = _offset_bytes(kind)
        children = tuple(cls.from_arrow(kind.field(i).type) for i in range(kind.num_fields))
        plain = not (width or children or types.is_struct(kind) or types.is_null(kind))
        bits = (1 if types.is_boolean(kind) else kind.bit_width) if plain else 0
        size = kind.list_size if types.is_fixed_size_list(kind) else 1
        return cls(kind, wire.buffer_count(kind), types.is_null(kind), width, size, bits, children)


@dataclass(slots=True)
class _Node:
    """An Arrow array of the frame: its type, length, nulls, buffers (byte ranges of the frame) and children."""

    arrow_type: _ArrowType
    length: int
    nulls: int
    buffers: list[Span]
    children: list[_Node]


_type_cache: dict[int, tuple[pa.Schema, list[_ArrowType]]] = {}
"""Types of each schema, by the id of the schema, which is kept alive with them."""
_MAX_CACHED_TYPES = 64


def _arrow_types(schema: pa.Schema) -> list[_ArrowType]:
    entry = _type_cache.get(id(schema))
    if entry is None:
        if len(_type_cache) >= _MAX_CACHED_TYPES:
            _type_cache.clear()
        entry = _type_cache[id(schema)] = schema, [_ArrowType.from_arrow(kind) for kind in schema.types]
    return entry[1]


@dataclass(slots=True)
class _Layout:
    schema: pa.Schema
    nodes: list[list[int]]
    buffers: list[Span]

    def columns(self) -> list[_Node]:
        nodes, buffers = iter(self.nodes), iter(self.buffers)

        def build(arrow_type: _ArrowType) -> _Node:
            length, nulls = next(nodes)
            own_buffers = [next(buffers) for _ in range(arrow_type.buffers)]
            return _Node(arrow_type, length, nulls, own_buffers, [build(child) for child in arrow_type.children])

        return [build(arrow_type) for arrow_type in _arrow_types(self.schema)]


def _read_layout(size: int, limits: Limits) -> Reader[tuple[Frame, _Layout]]:
    """Read and check the frame's header, the schema and the metadata of the record batch."""
    (head,) = yield [(0, min(size, HEAD_BYTES))]
    frame = read_header(head, 0, limits)
    if frame.compression is not None or frame.stop != size:
        raise WireError(f"a frame of {frame.stop} bytes, compression {frame.compression}; expected {size}, None")
    end = HEADER_BYTES
    for _ in range(2):
        # The prefix of a message, with its length, then the message.
        for more in (8, None):
            stop = end + (8 + wire.metadata_bytes(memoryview(head)[end : end + 8], end) if more is None else more)
            if stop > HEADER_BYTES + frame.length:
                raise WireError("an Arrow message is longer than the frame", end)
            if stop > len(head):
                (rest,) = yield [(len(head), min(size, max(stop, len(head) + HEAD_BYTES)))]
                head = bytes(head) + bytes(rest)
        end = stop
    body = memoryview(head)[HEADER_BYTES:end]
    schema, nodes, buffers, start = wire.read_layout(body, frame.length, frame.count, limits.max_columns, HEADER_BYTES)
    start += HEADER_BYTES
    spans = [(start + at, start + at + length) for at, length in buffers.tolist()]
    return frame, _Layout(schema, nodes.tolist(), spans)


# --- arrays -------------------------------------------------------------------------------------------------------


def _inside(buffer: Span, start: int, stop: int) -> Span:
    """Convert a range of a buffer to a range of the frame."""
    if not 0 <= start <= stop <= buffer[1] - buffer[0]:
        raise WireError("an Arrow buffer is too short", buffer[0])
    return buffer[0] + start, buffer[0] + stop


def _read_node(node: _Node, spans: list[Span]) -> Reader[pa.Array]:
    """Read the entries in `spans`, which are ascending and disjoint, into one array."""
    arrow_type = node.arrow_type
    count = sum(stop - start for start, stop in spans)
    if spans and spans[-1][1] > node.length:
        raise WireError("an Arrow array is shorter than what points to it")
    if arrow_type.null or not count:
        return pa.nulls(count, arrow_type.kind)
    bitmap = [_inside(node.buffers[0], a >> 3, (b + 7) >> 3) for a, b in spans] if node.nulls else []
    width = arrow_type.offset_bytes
    children: list[pa.Array] = []
    buffers: list[Any] = []
    if width:
        offsets = [_inside(node.buffers[1], a * width, (b + 1) * width) for a, b in spans]
        chunks = yield bitmap + offsets
        bounds, inner = _rebase([np.frombuffer(buffer, f"<i{width}") for buffer in chunks[len(bitmap) :]], node)
        buffers.append(pa.py_buffer(bounds))
        if node.children:
            children.append((yield from _read_node(node.children[0], inner)))
        else:
            values = (yield [_inside(node.buffers[2], a, b) for a, b in inner]) if inner else []
            buffers.append(pa.py_buffer(b"".join(values)))
        del chunks[len(bitmap) :]
    elif node.children:
        size = arrow_type.list_size
        inner = [(a * size, b * size) for a, b in spans]
        readers: list[Reader[Any]] = [_read_node(child, inner) for child in node.children]
        *children, chunks = yield from advance_together([*readers, _read_spans(bitmap)])
    elif not arrow_type.bits:  # a struct without fields
        chunks = yield from _read_spans(bitmap)
    else:
        bits = arrow_type.bits
        values = [_inside(node.buffers[1], a * bits >> 3, (b * bits + 7) >> 3) for a, b in spans]
        chunks = yield bitmap + values
        parts = chunks[len(bitmap) :]
        buffers.append(_joined_bits(parts, spans) if bits == 1 else pa.py_buffer(b"".join(parts)))
    validity = _joined_bits(chunks[: len(bitmap)], spans) if node.nulls else None
    null_count = -1 if node.nulls else 0  # -1: Arrow counts them
    return pa.Array.from_buffers(arrow_type.kind, count, [validity, *buffers], null_count, children=children)


def _read_spans(spans: list[Span]) -> Reader[list[Any]]:
    return (yield spans) if spans else []


def _offset_bytes(kind: pa.DataType) -> int:
    """Return the size of an offset in arrays of a type, or 0 if they have none."""
    types = pa.types
    if types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind):
        return 8
    if types.is_string(kind) or types.is_binary(kind) or types.is_list(kind) or types.is_map(kind):
        return 4
    return 0


def _rebase(tables: list[Any], node: _Node) -> tuple[Any, list[Span]]:
    """Join the offsets of several runs, and return the ranges of the child that they refer to."""
    inner: list[Span] = []
    last, total = 0, 0
    shifted = [np.zeros(1, dtype=tables[0].dtype)]
    for table in tables:
        first, stop = int(table[0]), int(table[-1])
        # Offsets ascend across runs, too, so that no byte of the child is read twice.
        if first < last or stop < first or (table[1:] < table[:-1]).any():
            raise WireError("offsets decrease, or exceed their values")
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
    """Join the bits of several runs, each read from the bytes that contain it, into one bitmap."""
    pieces = []
    for buffer, (start, stop) in zip(parts, spans, strict=True):
        bits = np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little")
        pieces.append(bits[start & 7 : (start & 7) + stop - start])
    return pa.py_buffer(np.packbits(np.concatenate(pieces), bitorder="little"))


__all__ = [
    "Stack",
    "read_stack",
]
