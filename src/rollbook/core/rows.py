"""Rows of different length in torch, on any device: packed end to end, or padded to a matrix.

Invariant: `spans.unpad(spans.pad(values))` is `values`, bit for bit; a padded slot holds the fill value and nothing
else. On the CPU rows are copied one by one, which beats index arrays; on a device, and where a gradient must flow, both
directions are one gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.fields import DTYPES
from rollbook.core.ragged import Ragged, offsets_of

LARGE = 1 << 20
"""Below this many bytes the system's own allocator does as well."""


class Recycler:
    """Gives out memory as tensors of bytes, and takes it back when they are gone.

    >>> recycler = Recycler(limit=64 << 20)
    >>> first = recycler.tensor(5 << 20)
    >>> place = first.data_ptr()
    >>> view = first[:4].view(torch.float32)
    >>> del first
    >>> recycler.tensor(5 << 20).data_ptr() == place  # `view` still looks at it
    False
    >>> del view
    >>> recycler.tensor(5 << 20).data_ptr() == place
    True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._waiting = 0

    def tensor(self, size: int) -> torch.Tensor:
        """(size,) uint8, with anything in it."""
        room = _rounded(size)
        try:
            block = self._free[room].pop()
            self._waiting -= room
        except (KeyError, IndexError):
            block = np.empty(room, dtype=np.uint8)
        # The tensor holds this array, every view of the tensor holds its storage, and nobody else ever sees the array:
        # when it goes, so has everything on the memory.
        array = block[:size]
        weakref.finalize(array, self._take_back, block).atexit = False
        return torch.from_numpy(array)

    def _take_back(self, block: NDArray[np.uint8]) -> None:
        if self._waiting + len(block) <= self.limit:
            self._waiting += len(block)
            self._free.setdefault(len(block), []).append(block)

    def clear(self) -> None:
        """Give what waits back to the system."""
        self._free, self._waiting = {}, 0


def _rounded(size: int) -> int:
    """A size that others ask for too: up to an eighth more."""
    step = max(1 << max(size.bit_length() - 4, 0), 4096)
    return -(-size // step) * step


RECYCLER = Recycler(limit=512 << 20)
"""What batches are made on. `RECYCLER.limit = 0` and `RECYCLER.clear()` do without."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with anything in it, on used memory if it is large and there is some."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    return RECYCLER.tensor(size).view(dtype).reshape(shape)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMPY: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name) for name in DTYPES if name in np.sctypeDict and name != "complex128"
}
"""Types that numpy has too; the memory of others is handled as integers of their size."""


class Segments(NamedTuple):
    """Rows that lie in different arrays: row i is `arrays[i][starts[i]:stops[i]]`."""

    arrays: Iterable[NDArray[Any]]
    starts: list[int]
    stops: list[int]
    dtype: torch.dtype
    trailing: tuple[int, ...]


Column: TypeAlias = torch.Tensor | Ragged | Segments
"""All rows of a field: end to end as a tensor (total, ...), as a record's column, or where they lie."""


Lengths: TypeAlias = Sequence[int] | NDArray[np.int64]


class Rows(list[torch.Tensor]):
    """A list of tensors that lie end to end in one: row i is `values[offsets[i]:offsets[i + 1]]`, as a view.

    What a packed batch has in place of a padded matrix: it reads as a list of 1-D tensors, and `values` is what a
    kernel for ragged input takes. Setting a row copies it into place, so that list and values stay one thing; the
    number of rows and their lengths are fixed.

    >>> rows = Rows(torch.arange(5), [2, 3])
    >>> [row.tolist() for row in rows], rows.values.tolist(), rows.cu_seqlens.tolist()
    ([[0, 1], [2, 3, 4]], [0, 1, 2, 3, 4], [0, 2, 5])
    >>> rows[0] = torch.tensor([7, 8])
    >>> rows.values.tolist()
    [7, 8, 2, 3, 4]
    """

    def __init__(self, values: torch.Tensor | Iterable[torch.Tensor], lengths: Iterable[int] | None = None) -> None:
        if lengths is None:
            parts = list(values)  # rows that lie apart: so a list is rebuilt by whoever walks a nest
            lengths = map(len, parts)
            values = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        self.values: torch.Tensor = values  # type: ignore[assignment]
        self.lengths = list(map(int, lengths))
        total = self.values.shape[0]
        if sum(self.lengths) != total:
            raise ValueError(f"rows: got {total} values, expected {sum(self.lengths)}, the sum of lengths")
        super().__init__(self.values.split_with_sizes(self.lengths) if self.lengths else ())

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[B + 1] Where each row begins, and where the last one ends."""
        return offsets_of(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] The same as an int32 tensor on the values' device, as kernels for ragged input take it."""
        return torch.from_numpy(self.offsets).to(self.values.device, torch.int32)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """Apply a function to the values of all rows at once.

        Args:
            change: A function of a tensor [total, ...] that returns one with as many entries.

        Returns:
            The new rows, of the same lengths.
        """
        return Rows(change(self.values), self.lengths)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            raise ValueError("rows: got a slice, expected one row; assign a list to the batch's field to change all")
        row = self[index]
        replacement = torch.as_tensor(value)
        if replacement.shape != row.shape:
            raise ValueError(f"row {index}: got shape {list(replacement.shape)}, expected {list(row.shape)}")
        row.copy_(replacement)

    def _fixed(self, *_: Any, **__: Any) -> Any:
        raise ValueError("rows: their number is fixed; assign a list to the batch's field instead")

    append = extend = insert = pop = remove = clear = sort = reverse = __delitem__ = __iadd__ = __imul__ = _fixed

    def __reduce__(self) -> Any:
        return Rows, (self.values, self.lengths)

    def __copy__(self) -> Rows:
        return Rows(self.values, self.lengths)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return Rows(self.values.detach().clone(), self.lengths)


class Spans:
    """Where each row of a ragged column lies in a padded matrix: from column `starts[i]`, `lengths[i]` entries.

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
        self.offsets = offsets_of(self.lengths)
        self.solid = False
        """Whether a mask over these rows is known to be 1 throughout."""
        self._where: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places = list(zip(self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True))

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
        """Whether there is no padding at all."""
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
        """
        if isinstance(column, torch.Tensor):
            column = column if dtype is None else column.to(dtype)
            check_fill(fill, column.dtype)  # whether or not these rows need it
            if self.full and out is None:
                return column.clone().reshape(len(self.lengths), self.width, *column.shape[1:])
            if _must_gather(column):
                padded = self._pad_gather(column, fill)
                return padded if out is None else out.copy_(padded)
        arrays, starts, stops, own_dtype, trailing = _segments(column, self.offsets)
        dtype = own_dtype if dtype is None else dtype
        shape = (len(self.lengths), self.width, *trailing)
        check_fill(fill, dtype)
        gaps = out is None and prod(shape) * dtype.itemsize >= LARGE
        if gaps:
            out = empty(shape, dtype)
        elif out is None:
            out = torch.full(shape, fill, dtype=dtype)
        elif out.shape != shape or out.dtype != dtype or out.device.type != "cpu":
            described = f"{list(out.shape)} of {out.dtype} on {out.device}"
            raise ValueError(f"out: got {described}, expected {list(shape)} of {dtype} on the CPU")
        else:
            out.fill_(fill)
        matrix = memory(out)
        for row, array, (at, to), start, stop in zip(matrix, arrays, self._places, starts, stops, strict=False):
            row[at:to] = array[start:stop]
        if gaps:  # a large matrix is filled around the rows alone, so that no page is written twice
            filler = memory(torch.tensor([fill], dtype=dtype))[0]
            for row, (at, to) in zip(matrix, self._places, strict=True):
                if at:
                    row[:at] = filler
                if to < self.width:
                    row[to:] = filler
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
            for row, (at, to) in zip(memory(matrix), self._places, strict=True):
                parts.append(row[at:to])
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
        for row, (at, to) in zip(out.numpy(), self._places, strict=True):
            row[:at], row[at:to], row[to:] = 0, 1, 0
        return out

    def _index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, width] Which value each slot takes, and whether it takes one; kept, since all fields of an axis share."""
        if device not in self._where:
            starts, lengths, offsets = torch.from_numpy(np.stack([self.starts, self.lengths, self.offsets[:-1]])).to(
                device
            )
            slot = torch.arange(self.width, device=device) - starts[:, None]
            inside = (slot >= 0) & (slot < lengths[:, None])
            self._where[device] = (offsets[:, None] + slot, inside)
        return self._where[device]

    def _pad_gather(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        shape = (len(self.lengths), self.width, *values.shape[1:])
        if not len(values):
            return torch.full(shape, fill, dtype=values.dtype, device=values.device)
        index, inside = self._index(values.device)
        index = index.clamp(0, len(values) - 1)
        inside = inside.reshape(*inside.shape, *(1 for _ in values.shape[1:]))
        return torch.where(inside, values[index], torch.full((), fill, dtype=values.dtype, device=values.device))


def _must_gather(tensor: torch.Tensor) -> bool:
    apart = tensor.device.type != "cpu" or tensor.element_size() not in _BITS
    return apart or (tensor.requires_grad and torch.is_grad_enabled())


def memory(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's memory as an array: of its own type, or of integers where numpy has no such type (bfloat16)."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.numpy() if tensor.dtype in NUMPY else tensor.view(_BITS[tensor.element_size()]).numpy()


def blank(shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
    """A tensor of one value, on used memory if it is large and there is some."""
    if not fill and dtype in NUMPY and prod(shape) * dtype.itemsize < LARGE:
        return torch.from_numpy(np.zeros(shape, dtype=NUMPY[dtype]))
    return empty(shape, dtype).fill_(fill)


def _words(dtype: torch.dtype) -> Any:
    return NUMPY[_BITS[dtype.itemsize]]


def _segments(column: Column, offsets: NDArray[np.int64]) -> Segments:
    """For each row an array and where in it the row lies; the type and trailing sizes of all."""
    if isinstance(column, Segments):
        return column
    if isinstance(column, Ragged):
        dtype = getattr(torch, column.dtype)
        source = column.values.view(NUMPY.get(dtype) or _words(dtype))
        bounds = column.offsets.tolist()
        return Segments(repeat(source), bounds[:-1], bounds[1:], dtype, column.trailing)
    bounds = offsets.tolist()
    return Segments(repeat(memory(column)), bounds[:-1], bounds[1:], column.dtype, tuple(column.shape[1:]))


def check_fill(fill: float, dtype: torch.dtype) -> None:
    """Refuse a padding that the type does not hold."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if fill != fill or fill in (float("inf"), -float("inf")) or fill != int(fill) or not low <= fill <= high:
        raise ValueError(f"padding: got {fill}, which {str(dtype).removeprefix('torch.')} does not hold")


def concatenated(column: Column, lengths: NDArray[np.int64], out: torch.Tensor | None = None) -> torch.Tensor:
    """(total, ...) The values as one tensor, in `out` if there is one; a tensor is given back as it is."""
    if isinstance(column, torch.Tensor):
        return column if out is None else out.copy_(column)
    arrays, starts, stops, dtype, trailing = _segments(column, lengths)
    if out is None:
        out = empty((int(lengths.sum()), *trailing), dtype)
    if isinstance(column, Ragged):
        source = next(iter(arrays))  # the rows lie end to end already
        memory(out)[...] = source[int(column.offsets[0]) : int(column.offsets[-1])]
    elif len(out):
        parts = [array[start:stop] for array, start, stop in zip(arrays, starts, stops, strict=False)]
        np.concatenate(parts, out=memory(out))
    return out


def segments(rows: Sequence[torch.Tensor]) -> Column:
    """Rows that lie apart, as one column: where they lie if they can be read there, else copied together."""
    model = rows[0]
    if model.dtype in NUMPY:
        try:
            arrays = list(map(torch.Tensor.numpy, rows))
        except (RuntimeError, TypeError):  # a gradient must flow, or they are on a device
            return torch.cat(list(rows))
    else:
        apart = model.element_size() not in _BITS or any(map(attrgetter("requires_grad"), rows))
        if apart or not all(map(attrgetter("is_cpu"), rows)):
            return torch.cat(list(rows))
        arrays = list(map(memory, rows))
    return Segments(arrays, [0] * len(rows), list(map(len, arrays)), model.dtype, tuple(model.shape[1:]))


def unbind_copy(tensor: torch.Tensor) -> list[Any]:
    """The rows of a tensor, each on memory of its own."""
    rows: Any = torch.unbind_copy(tensor.detach())  # type: ignore[func-returns-value]
    return list(rows)
