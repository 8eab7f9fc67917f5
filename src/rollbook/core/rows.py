"""Rows of different lengths in torch, on any device: concatenated (packed), or padded to a matrix.

Invariant: `spans.unpad(spans.pad(values))` equals `values` bit for bit, and padded slots hold the fill value. On the
CPU rows are copied one by one, which is faster than index arrays; on a device, or if a gradient must flow, each
direction is one gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rollbook.core.fields import DTYPES
from rollbook.core.ragged import Ragged, compute_offsets

__all__ = ["Rows", "Segments", "Spans"]

LARGE = 1 << 20
"""Smallest size in bytes of recycled memory; below it the allocator of the system is as fast."""


class Recycler:
    """A pool of memory blocks. The block of a tensor returns to the pool when its last view is freed.

    Args:
        limit: Largest number of unused bytes in the pool.

    >>> recycler = Recycler(limit=64 << 20)
    >>> first = recycler.tensor(5 << 20)
    >>> address = first.data_ptr()
    >>> view = first[:4].view(torch.float32)
    >>> del first
    >>> recycler.tensor(5 << 20).data_ptr() == address  # `view` still uses the block
    False
    >>> del view
    >>> recycler.tensor(5 << 20).data_ptr() == address
    True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free_blocks: dict[int, list[NDArray[np.uint8]]] = {}
        self._free_bytes = 0

    def tensor(self, size: int) -> torch.Tensor:
        """Return an uninitialized uint8 tensor [size]."""
        block_size = _round_up(size)
        try:
            block = self._free_blocks[block_size].pop()
            self._free_bytes -= block_size
        except (KeyError, IndexError):
            block = np.empty(block_size, dtype=np.uint8)
        # The storage of the tensor, which all of its views share, holds the only reference to this array: when the
        # array is freed, nothing uses the block.
        array = block[:size]
        weakref.finalize(array, self._reclaim, block).atexit = False
        return torch.from_numpy(array)

    def _reclaim(self, block: NDArray[np.uint8]) -> None:
        if self._free_bytes + len(block) <= self.limit:
            self._free_bytes += len(block)
            self._free_blocks.setdefault(len(block), []).append(block)

    def clear(self) -> None:
        """Return unused blocks to the system."""
        self._free_blocks, self._free_bytes = {}, 0


def _round_up(size: int) -> int:
    """Round a size up by at most an eighth, so that blocks of similar sizes are interchangeable."""
    step = max(1 << max(size.bit_length() - 4, 0), 4096)
    return -(-size // step) * step


RECYCLER = Recycler(limit=512 << 20)
"""The pool that batches use. `RECYCLER.limit = 0` and `RECYCLER.clear()` disable it."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor, on recycled memory if it is large."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    return RECYCLER.tensor(size).view(dtype).reshape(shape)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMPY: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name) for name in DTYPES if name in np.sctypeDict and name != "complex128"
}
"""Types that numpy also has. The memory of others is handled as integers of the same size."""


class Segments(NamedTuple):
    """Rows in different arrays: row i is `arrays[i][starts[i]:stops[i]]`.

    Args:
        arrays: The array of each row.
        starts: [B] Start of each row in its array.
        stops: [B] End of each row in its array.
        dtype: Element type of the rows.
        trailing: Shape of an entry of a row.

    >>> arrays = [np.arange(3), np.array([7, 8, 9])]
    >>> Spans([2, 1], [0, 1], width=2).pad(Segments(arrays, [0, 2], [2, 3], torch.int64, ()), fill=0)
    tensor([[0, 1],
            [0, 9]])
    """

    arrays: Iterable[NDArray[Any]]
    starts: list[int]
    stops: list[int]
    dtype: torch.dtype
    trailing: tuple[int, ...]


Column: TypeAlias = torch.Tensor | Ragged | Segments
"""All rows of a field: concatenated to a tensor [total, ...], a column of records, or rows in different arrays."""


Lengths: TypeAlias = Sequence[int] | NDArray[np.int64]


class Rows(list[torch.Tensor]):
    """A list of views of one tensor: row i is `values[offsets[i]:offsets[i + 1]]`.

    A packed batch has it instead of a padded matrix. Kernels for ragged input take `values`. Setting a row copies into
    `values`; the number of rows and their lengths are fixed.

    Args:
        values: [total, ...] All rows, or the rows themselves, which are then concatenated.
        lengths: [B] Lengths of the rows, with a tensor of values.

    Raises:
        ValueError: The lengths do not add up to the number of values.

    >>> rows = Rows(torch.arange(5), [2, 3])
    >>> [row.tolist() for row in rows], rows.values.tolist(), rows.cu_seqlens.tolist()
    ([[0, 1], [2, 3, 4]], [0, 1, 2, 3, 4], [0, 2, 5])
    >>> rows[0] = torch.tensor([7, 8])
    >>> rows.values.tolist()
    [7, 8, 2, 3, 4]
    """

    def __init__(self, values: torch.Tensor | Iterable[torch.Tensor], lengths: Iterable[int] | None = None) -> None:
        if lengths is None:
            parts = list(values)  # generic code that maps over nested containers calls `type(x)(items)`
            lengths = map(len, parts)
            values = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        self.values: torch.Tensor = values  # type: ignore[assignment]
        self.lengths = sizes = list(map(int, lengths))
        try:
            rows = values.split_with_sizes(sizes) if sizes else ()  # type: ignore[union-attr]
        except RuntimeError:
            rows = None
        if rows is None or (not sizes and len(self.values)):
            total = self.values.shape[0]
            raise ValueError(f"rows: got {total} values, expected {sum(sizes)}, the sum of lengths")
        list.__init__(self, rows)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1] int64 start of each row, and the end of the last."""
        return compute_offsets(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] The offsets as an int32 tensor on the device of the values, for kernels on ragged input."""
        return torch.from_numpy(self.offsets).to(self.values.device, torch.int32)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """Apply a function to the values of all rows at once.

        Args:
            change: A function of a tensor [total, ...] that returns one with as many entries.

        Returns:
            The new rows, of the same lengths.
        """
        return Rows(change(self.values), self.lengths)

    def __setitem__(self, index: SupportsIndex | slice, value: ArrayLike | Iterable[torch.Tensor]) -> None:
        if isinstance(index, slice):
            raise ValueError("rows: got a slice, expected one row; assign a list to the batch's field to change all")
        row = self[index]
        replacement = torch.as_tensor(value)
        if replacement.shape != row.shape:
            raise ValueError(f"row {index}: got shape {list(replacement.shape)}, expected {list(row.shape)}")
        row.copy_(replacement)

    def _reject_change(self, *_: Any, **__: Any) -> Any:
        """Raise `ValueError`, since the number of rows is fixed. See `Rows`."""
        raise ValueError("rows: their number is fixed; assign a list to the batch's field instead")

    append = extend = insert = pop = remove = clear = _reject_change
    sort = reverse = __delitem__ = __iadd__ = __imul__ = _reject_change

    def __reduce__(self) -> Any:
        return Rows, (self.values, self.lengths)

    def __copy__(self) -> Rows:
        return Rows(self.values, self.lengths)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return Rows(self.values.detach().clone(), self.lengths)


class Spans:
    """Positions of ragged rows in a padded matrix: row i has `lengths[i]` entries from column `starts[i]` on.

    Args:
        lengths: [B] Lengths of the rows.
        starts: [B] First column of each row.
        width: Columns of the matrix.

    >>> spans = Spans([2, 3], [1, 0], width=3)
    >>> spans.pad(torch.arange(1, 6), 0)
    tensor([[0, 1, 2],
            [3, 4, 5]])
    >>> spans.unpad(spans.pad(torch.arange(1, 6), 0))
    tensor([1, 2, 3, 4, 5])
    """

    def __init__(self, lengths: Lengths, starts: Lengths, width: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.starts = np.asarray(starts, dtype=np.int64)
        self.width = int(width)
        self.offsets = compute_offsets(self.lengths)
        self._gather_indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slices = list(zip(self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True))

    @classmethod
    def right_aligned(cls, lengths: Lengths, width: int) -> Spans:
        """Build spans that end at the last column.

        Args:
            lengths: [B] Lengths of the rows.
            width: Columns of the matrix.

        Returns:
            The spans.
        """
        return cls(lengths, width - np.asarray(lengths, dtype=np.int64), width)

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return bool((self.lengths == self.width).all())

    def pad(
        self, column: Column, fill: float, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Pad rows to a matrix.

        Args:
            column: The rows: a tensor [total, ...] of all, a `Ragged`, or `Segments`.
            fill: Value of the padding.
            out: A tensor [B, width, ...] on the CPU to write to.
            dtype: Element type of the result, if not that of the rows; one that numpy has.

        Returns:
            [B, width, ...] The matrix.

        Raises:
            ValueError: The type cannot represent `fill`, or `out` has another shape or type.
        """
        if isinstance(column, torch.Tensor):
            column = column if dtype is None else column.to(dtype)
            check_fill(fill, column.dtype)  # also if these rows need no padding
            if self.full and out is None:
                return column.clone().reshape(len(self.lengths), self.width, *column.shape[1:])
            if _must_gather(column):
                padded = self._pad_gather(column, fill)
                return padded if out is None else out.copy_(padded)
        arrays, starts, stops, own_dtype, trailing = _segments(column, self.offsets)
        dtype = own_dtype if dtype is None else dtype
        shape = (len(self.lengths), self.width, *trailing)
        check_fill(fill, dtype)
        fill_gaps = out is None and prod(shape) * dtype.itemsize >= LARGE
        if fill_gaps:
            out = empty(shape, dtype)
        elif out is None:
            out = torch.full(shape, fill, dtype=dtype)
        elif out.shape != shape or out.dtype != dtype or out.device.type != "cpu":
            described = f"{list(out.shape)} of {out.dtype} on {out.device}"
            raise ValueError(f"out: got {described}, expected {list(shape)} of {dtype} on the CPU")
        else:
            out.fill_(fill)
        matrix = memory(out)
        for row, array, (first, end), start, stop in zip(matrix, arrays, self._slices, starts, stops, strict=False):
            row[first:end] = array[start:stop]
        if fill_gaps:  # a large matrix is filled only around the rows, so that no page is written twice
            filler = memory(torch.tensor([fill], dtype=dtype))[0]
            for row, (first, end) in zip(matrix, self._slices, strict=True):
                if first:
                    row[:first] = filler
                if end < self.width:
                    row[end:] = filler
        return out

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Extract the rows of a padded matrix.

        Args:
            padded: [B, width, ...]

        Returns:
            [total, ...] The rows, one after the other.
        """
        if _must_gather(padded):
            return padded[self._index(padded.device)[1]]
        return self.unpad_all([padded])[0]

    def unpad_all(self, matrices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Extract the rows of several matrices at once, into one allocation.

        Args:
            matrices: Matrices [B, width, ...] of one type and trailing shape, on the CPU.

        Returns:
            For each matrix its rows, [total, ...].
        """
        total, first = int(self.offsets[-1]), matrices[0]
        if not total:
            return [empty((0, *first.shape[2:]), first.dtype)] * len(matrices)
        parts: list[NDArray[Any]] = []
        for matrix in matrices:
            for row, (start, end) in zip(memory(matrix), self._slices, strict=True):
                parts.append(row[start:end])
        if first.dtype in NUMPY and len(matrices) * total * prod(first.shape[2:]) * first.element_size() < LARGE:
            out = torch.from_numpy(np.concatenate(parts))
        else:
            out = empty((total * len(matrices), *first.shape[2:]), first.dtype)
            np.concatenate(parts, out=memory(out))
        return out.split_with_sizes([total] * len(matrices)) if len(matrices) > 1 else [out]

    def mask(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Build a mask of the rows.

        Args:
            dtype: Element type.
            device: Device of the mask.

        Returns:
            [B, width] 1 inside rows, 0 on padding.
        """
        if torch.device(device).type != "cpu":
            return self._index(torch.device(device))[1].to(dtype, copy=True)  # the index is shared
        out = empty((len(self.lengths), self.width), dtype)
        for row, (start, end) in zip(out.numpy(), self._slices, strict=True):
            row[:start], row[start:end], row[end:] = 0, 1, 0
        return out

    def _index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of the value of each slot, and whether it has one; cached for all fields.

        Returns:
            [B, width].
        """
        if device not in self._gather_indices:
            starts, lengths, offsets = torch.from_numpy(np.stack([self.starts, self.lengths, self.offsets[:-1]])).to(
                device
            )
            slot = torch.arange(self.width, device=device) - starts[:, None]
            inside = (slot >= 0) & (slot < lengths[:, None])
            self._gather_indices[device] = (offsets[:, None] + slot, inside)
        return self._gather_indices[device]

    def _pad_gather(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        shape = (len(self.lengths), self.width, *values.shape[1:])
        if not len(values):
            return torch.full(shape, fill, dtype=values.dtype, device=values.device)
        index, inside = self._index(values.device)
        index = index.clamp(0, len(values) - 1)
        inside = inside.reshape(*inside.shape, *(1 for _ in values.shape[1:]))
        return torch.where(inside, values[index], torch.full((), fill, dtype=values.dtype, device=values.device))


def _must_gather(tensor: torch.Tensor) -> bool:
    no_array = tensor.device.type != "cpu" or tensor.element_size() not in _INTEGERS
    return no_array or (tensor.requires_grad and torch.is_grad_enabled())


def memory(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's memory as an array, of integers if numpy does not have the type (bfloat16)."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.numpy() if tensor.dtype in NUMPY else tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def blank(shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
    """Return a tensor filled with one value, on recycled memory if it is large."""
    if not fill and dtype in NUMPY and prod(shape) * dtype.itemsize < LARGE:
        return torch.from_numpy(np.zeros(shape, dtype=NUMPY[dtype]))
    return empty(shape, dtype).fill_(fill)


def _segments(column: Column, offsets: NDArray[np.int64]) -> Segments:
    """Return where the rows of a column are."""
    if isinstance(column, Segments):
        return column
    if isinstance(column, Ragged):
        dtype = getattr(torch, column.dtype)
        source = column.values.view(NUMPY.get(dtype) or NUMPY[_INTEGERS[dtype.itemsize]])
        bounds = column.offsets.tolist()
        return Segments(repeat(source), bounds[:-1], bounds[1:], dtype, column.trailing)
    bounds = offsets.tolist()
    return Segments(repeat(memory(column)), bounds[:-1], bounds[1:], column.dtype, tuple(column.shape[1:]))


def check_fill(fill: float, dtype: torch.dtype) -> None:
    """Raise `ValueError` if a type cannot represent the padding."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if fill != fill or fill in (float("inf"), -float("inf")) or fill != int(fill) or not low <= fill <= high:
        raise ValueError(f"padding: got {fill}, which {str(dtype).removeprefix('torch.')} cannot represent")


def concatenated(column: Column, lengths: NDArray[np.int64], out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate the rows of a column.

    Args:
        column: The column.
        lengths: [B] Lengths of the rows.
        out: A tensor [total, ...] to write to.

    Returns:
        [total, ...] The values; without `out`, a tensor is returned as it is.
    """
    if isinstance(column, torch.Tensor):
        return column if out is None else out.copy_(column)
    arrays, starts, stops, dtype, trailing = _segments(column, lengths)
    if out is None:
        out = empty((int(lengths.sum()), *trailing), dtype)
    if isinstance(column, Ragged):
        source = next(iter(arrays))  # the rows are already contiguous
        memory(out)[...] = source[int(column.offsets[0]) : int(column.offsets[-1])]
    elif len(out):
        parts = [array[start:stop] for array, start, stop in zip(arrays, starts, stops, strict=False)]
        np.concatenate(parts, out=memory(out))
    return out


def segments(rows: Sequence[torch.Tensor]) -> Column:
    """Return separate tensors as one column, without copying if possible."""
    first = rows[0]
    if first.dtype in NUMPY:
        try:
            arrays = list(map(torch.Tensor.numpy, rows))
        except (RuntimeError, TypeError):  # a gradient must flow, or they are on a device
            return torch.cat(list(rows))
    else:
        no_array = first.element_size() not in _INTEGERS or any(map(attrgetter("requires_grad"), rows))
        if no_array or not all(map(attrgetter("is_cpu"), rows)):
            return torch.cat(list(rows))
        arrays = list(map(memory, rows))
    return Segments(arrays, [0] * len(rows), list(map(len, arrays)), first.dtype, tuple(first.shape[1:]))


def unbind_copy(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a tensor, each on memory of its own."""
    rows: Any = torch.unbind_copy(tensor.detach())  # type: ignore[func-returns-value]
    return list(rows)
