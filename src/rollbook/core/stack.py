"""Frames of one schema that lie together in memory, checked and read as one.

Invariant: what a stack returns is what `wire.decode` returns for its frames, one behind the other. Frames that differ
in more than their numbers make no stack; neither do damaged ones, for which `wire.decode` says what is wrong.

Frames of one writer have the same schema, and metadata of the same shape: the metadata of the first is parsed, that of
the others is compared with it, byte by byte but for the numbers, and the numbers of all are checked at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rollbook.core import arrow, ipc
from rollbook.core.columns import Columns
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import Field, owner
from rollbook.core.ragged import Spread
from rollbook.core.wire import DEFAULT_LIMITS, HEADER_BYTES, Limits, read_header

_END = np.frombuffer(ipc.END, dtype=np.uint8)


class Stack:
    """Frames with one schema; made by `read_stack`."""

    def __init__(self, memory: NDArray[np.uint8], template: ipc.Template, counts: list[int]) -> None:
        self.memory = memory
        self.schema = template.schema
        self.parts = template.parts
        """How many nodes and buffers each column has."""
        self.counts = counts
        """Records in each frame."""
        self.starts: list[int] = []
        """Where the record batch of each frame begins."""
        self.stops: list[int] = []
        self.nodes: NDArray[np.int64]
        """[F, nodes, 2] Length and null count of each Arrow array."""
        self.buffers: NDArray[np.int64]
        """[F, buffers, 2] Start in memory and length of each Arrow buffer."""

    def batches(self) -> list[pa.RecordBatch]:
        """The record batch of each frame, without copying; offsets are not checked yet."""
        buffer = pa.py_buffer(self.memory)
        try:
            return [
                pa.ipc.read_record_batch(buffer.slice(start, stop - start), self.schema)
                for start, stop in zip(self.starts, self.stops, strict=True)
            ]
        except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
            raise WireError(f"the Arrow record batch cannot be read: {error}") from None

    def arrays(self, fields: Collection[str]) -> list[dict[str, pa.Array]]:
        """The Arrow arrays of some fields, sides included, of each frame, as `wire.decode_arrays` returns them."""
        chosen = [
            (i, name)
            for i, name in enumerate(self.schema.names)
            if (known := owner(name)) is not None and known[0].name in fields
        ]
        result = []
        for batch in self.batches():
            arrays = {name: batch.column(i) for i, name in chosen}
            ipc.check_arrays(arrays, False)
            result.append(arrays)
        return result

    def experiences(self, verify: bool = True) -> Experiences | None:
        """The records of all frames, to be made rows of and nothing else: tensors lie where they are in memory.

        Returns:
            The records; `None` if their columns are such as are better read frame by frame.
        """
        count = sum(self.counts)
        spread: dict[str, Spread] = {}
        rest: list[str] = []
        node = buffer = 0
        names = set(self.schema.names)
        for field, (nodes, buffers) in zip(self.schema, self.parts, strict=True):
            known = owner(field.name)
            if known is None or known[1] or known[0].kind != "tensor":
                rest.append(field.name)
            elif known[0].trailing or f"{field.name}__dtype" in names:
                return None
            else:
                spread[field.name] = self._spread(known[0], field.type, node, buffer)
            node, buffer = node + nodes, buffer + buffers
        batches = self.batches()
        try:
            for batch in batches:
                batch.validate()
            table = pa.Table.from_batches(batches).select(rest)
            arrays = {name: _combined(table.column(name)) for name in rest}
        except pa.ArrowException as error:
            raise WireError(f"the Arrow record batch cannot be read: {error}") from None
        ipc.check_arrays(arrays, verify)
        columns: Columns = {**arrow.from_arrays(arrays), **spread}
        try:
            arrow.check(columns, count)
            if verify:
                arrow.check_masks(columns)
                for column in spread.values():
                    column.checked = True
        except WireError:
            raise
        except ValueError as error:
            raise WireError(str(error)) from None
        return Experiences._of(columns, count)

    def _spread(self, field: Field, kind: pa.DataType, node: int, buffer: int) -> Spread:
        """A column of rows of numbers: validity and offsets, then the values, which have no validity."""
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
        tables = zip(self.counts, (begins[:, 1] >> 3).tolist(), strict=True)
        offsets = np.concatenate([numbers[begin : begin + count + 1] for count, begin in tables])
        steps = offsets[1:] - offsets[:-1]
        ends = np.cumsum(counts + 1)
        firsts = offsets[ends - counts - 1]
        inside = np.ones(len(steps), dtype=np.bool_)
        inside[ends[:-1] - 1] = False
        row_lengths = steps[inside]
        if (row_lengths < 0).any() or (firsts < 0).any() or (offsets[ends - 1] > lengths[:, 1]).any():
            raise WireError(f"column {field.name!r}: offsets fall, or leave their values")
        valid = None
        if nulls[:, 0].any():
            valid = np.concatenate([self._bits(f, begins[f, 0], sizes[f, 0], nulls[f, 0]) for f in range(len(counts))])
            if row_lengths[~valid].any():
                raise WireError(f"column {field.name!r}: a row is null and has values")
        return Spread(
            self.memory.view(dtype),
            begins[:, 3] // dtype.itemsize + firsts,
            row_lengths,
            self.counts,
            arrow.implied(dtype.name, field),
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
    """Check frames that lie together.

    Args:
        memory: The memory, aligned to 8 bytes.
        spans: Where each frame begins and stops in it, rising, at multiples of 64.
        verify: Whether to check the checksums of the bodies.
        limits: What the reader is willing to take.

    Returns:
        The stack, or `None` if the frames are not alike or one is damaged.
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
        template = ipc.read_template(view[begin : begin + lengths[0]], counts[0], limits.max_columns, begin)
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
    if (sizes < 0).any() or (bodies + ipc.END_BYTES != lengths).any():
        return None
    if ipc.impossible_lengths(nodes, sizes[:, 0, 0], rows[:, 0, 0]) or ipc.stray_buffers(buffers, sizes[:, 0, 0]):
        return None
    if (memory[(begins + bodies)[:, None] + np.arange(ipc.END_BYTES)] != _END).any():
        return None
    stack = Stack(memory, template, counts)
    stack.starts = (begins + template.batch_start).tolist()
    stack.stops = (begins + bodies).tolist()
    stack.nodes = nodes
    buffers = buffers.copy()
    buffers[:, :, 0] += (begins + len(template.head))[:, None]
    stack.buffers = buffers
    return stack


__all__ = ["Stack", "read_stack"]
