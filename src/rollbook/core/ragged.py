"""Ragged columns: values and offsets.

Invariant: row i of a `Ragged` is `values[offsets[i]:offsets[i + 1]]`, offsets do not decrease, and an absent row
(`valid[i]` False) has length 0. Tensors never share read-only memory: a column over a foreign buffer is copied once,
when the first tensor is requested (an in-place operation on a read-only map would kill the process).
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollbook.core.errors import WireError
from rollbook.core.fields import BY_CODE, COLUMNAR, DTYPES, INTEGERS

if TYPE_CHECKING:
    import torch

__all__ = ["Ragged", "RaggedRuns"]

_EXACT_IN_FLOAT32 = frozenset(("bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float32"))
_EXACT_IN_FLOAT64 = _EXACT_IN_FLOAT32 | {"uint32", "int32", "float64"}


def promote(dtypes: Iterable[str]) -> str | None:
    """Find the narrowest type that represents every value of some types exactly.

    Args:
        dtypes: Names of element types.

    Returns:
        The name of the type, or `None` if there is none.

    >>> promote(["int32", "int64"]), promote(["bfloat16", "float16"]), promote(["uint64", "int8"])
    ('int64', 'float32', None)
    """
    names = set(dtypes)
    if not names or not names <= COLUMNAR:
        return None
    if len(names) == 1:
        return names.pop()
    if names <= INTEGERS | {"bool"}:
        joined = np.result_type(*(np.dtype(name) for name in names)).name
        return joined if joined in INTEGERS else None
    if names <= _EXACT_IN_FLOAT32:
        return "float32"
    return "float64" if names <= _EXACT_IN_FLOAT64 else None


_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE
_LARGE = 4 << 20


def allocate(shape: tuple[int, ...], dtype: DTypeLike, touched: bool = True) -> NDArray[Any]:
    """Allocate an uninitialized array. Large ones come from Arrow's pool, which reuses freed pages.

    Args:
        shape: Shape of the array.
        dtype: Type of its elements.
        touched: Request the pages at once, because the array is about to be filled.

    Returns:
        The array.
    """
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype=kind)
    import pyarrow as pa

    memory = np.frombuffer(pa.allocate_buffer(size), dtype=kind).reshape(shape)
    if touched:
        populate(memory.ctypes.data, size)
    return memory


def populate(address: int, size: int) -> None:
    """Map the pages of memory that is about to be filled, in two threads, instead of one page fault each.

    Does nothing on other systems than Linux, and on Linux before 5.14.
    """
    if size < _LARGE or sys.platform != "linux":
        return
    start = -(-address // _PAGE) * _PAGE
    half = size // 2 // _PAGE * _PAGE
    helper = threading.Thread(target=_populate_pages, args=(start, half))
    helper.start()
    _populate_pages(start + half, (address + size - start - half) // _PAGE * _PAGE)
    helper.join()


def _populate_pages(start: int, size: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def tensor_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the elements of a tensor in row-major order as bytes, copied only if strided or on a device."""
    import torch

    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        # A tensor of one element counts as contiguous with any stride, but cannot be viewed as bytes.
        flat = torch.empty(1, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8).numpy()


def tensor_from_bytes(dtype: str | None, shape: Sequence[int], data: bytes | memoryview, prefix: str) -> torch.Tensor:
    """Build a tensor from its bytes.

    Args:
        dtype: Name of the element type.
        shape: Shape of the tensor.
        data: The elements in row-major order.
        prefix: Prefix of error messages.

    Returns:
        The tensor, on memory of its own.

    Raises:
        WireError: Type, shape and bytes do not match.
    """
    memory = np.frombuffer(data, dtype=np.uint8)
    sizes = check_shape(dtype, shape, len(memory), prefix)
    if dtype == "bool" and memory.size and memory.max() > 1:
        raise WireError(f"{prefix}: got the byte {int(memory.max())} for a bool, expected 0 or 1")
    import torch

    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise WireError(f"{prefix}: this version of torch has no dtype {dtype!r}")
    if not memory.size:
        return torch.empty(sizes, dtype=kind)
    return torch.from_numpy(np.array(memory)).view(kind).reshape(sizes)


def check_shape(dtype: str | None, shape: Sequence[int], nbytes: int, prefix: str) -> tuple[int, ...]:
    """Return a shape as a tuple, or raise `WireError` if it does not take `nbytes` bytes of `dtype`."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WireError(f"{prefix}: dtype {dtype!r} is unknown")
    if not isinstance(shape, (list, tuple)) or len(shape) > 64:
        raise WireError(f"{prefix}: got shape {shape!r}, expected a list of at most 64 sizes")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"{prefix}: got shape {shape!r}, expected sizes of at least 0")
    # Strides are products of sizes even where one of them is 0 and there are no elements.
    if prod(max(size, 1) for size in shape) >= 2**58:
        raise WireError(f"{prefix}: shape {shape!r} is larger than any tensor")
    count = prod(shape) * DTYPES[dtype].itemsize
    if count != nbytes:
        raise WireError(f"{prefix}: {dtype} of shape {list(shape)} takes {count} bytes, got {nbytes}")
    return tuple(shape)


@dataclass(slots=True, eq=False)
class _Store:
    """The memory that a column and its slices share."""

    memory: NDArray[Any]
    owned: bool
    """Whether tensors may be views of the memory."""
    pending: list[torch.Tensor] | None = None
    """Tensors that are not yet copied to the memory."""
    tensor: torch.Tensor | None = None
    """The memory as a tensor, once requested."""


class Ragged:
    """N arrays of different lengths, as one array of values and offsets. Slices share memory, `take` copies.

    Args:
        values: [total, ...] All rows, in the storage type of `dtype` (uint16 for bfloat16, uint8 for bool).
        offsets: [N + 1] Start of each row, and the end of the last.
        dtype: Element type. If rows differ in type, one that represents all of them exactly.
        valid: [N] Whether a row is present; `None`: all are.
        codes: [N] Code of each row's own type (see `fields.DTYPES`); `None`: all rows have `dtype`.
        owned: Whether tensors may be views of the values.

    >>> column = Ragged.from_arrays([[1, 2, 3], None, [4]], "int32")
    >>> column.offsets.tolist(), column.values.tolist(), column.lengths.tolist()
    ([0, 3, 3, 4], [1, 2, 3, 4], [3, 0, 1])
    >>> column.tensor(0)
    tensor([1, 2, 3], dtype=torch.int32)
    >>> column.tensor(1) is None
    True
    >>> column[1:], column[1:].lengths.tolist(), column[::-1][0].tolist()
    (Ragged(2 rows, 1 values of int32), [0, 1], [4])
    """

    __slots__ = ("_store", "codes", "dtype", "offsets", "valid")

    def __init__(
        self,
        values: NDArray[Any] | _Store,
        offsets: NDArray[np.int64],
        dtype: str,
        valid: NDArray[np.bool_] | None = None,
        codes: NDArray[np.uint8] | None = None,
        owned: bool = False,
    ) -> None:
        self._store = values if isinstance(values, _Store) else _Store(values, owned)
        self.offsets = offsets
        self.dtype = dtype
        self.valid = valid
        self.codes = codes

    @property
    def memory(self) -> NDArray[Any]:
        """The array behind `values`, to which pending tensors are not yet copied."""
        return self._store.memory

    @property
    def values(self) -> NDArray[Any]:
        """[total, ...] All rows, one after the other."""
        if self._store.pending is not None:
            self.copy_to(self._store.memory)
            self._store.pending = None
        return self._store.memory

    @property
    def pending(self) -> bool:
        """Whether the values are tensors that `copy_to` has not copied yet."""
        return self._store.pending is not None

    def copy_to(self, memory: NDArray[Any]) -> None:
        """Copy the pending tensors.

        Args:
            memory: An array of the shape and storage type of the column's memory.

        Raises:
            ValueError: A tensor cannot be read.
        """
        import torch

        target = getattr(torch, self.dtype)
        out = torch.from_numpy(memory)
        out = out if out.dtype == target else out.view(target)
        pending = self._store.pending or []
        try:
            torch.cat(pending, out=out)
        except RuntimeError:
            # Some need gradients, are on a device or have another layout; checking each beforehand would be slow.
            try:
                torch.cat([row.detach().to_dense().cpu() for row in pending], out=out)
            except RuntimeError as error:
                raise ValueError(f"a tensor cannot be kept: {error}") from None

    def leave_pending(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors as the values, to be copied later by `copy_to` and then `set_memory`.

        Args:
            tensors: The present rows, of the type of the column.
        """
        self._store.pending = tensors

    def set_memory(self, memory: NDArray[Any]) -> None:
        """Set the memory of the column.

        Args:
            memory: An array to which `copy_to` copied the pending tensors.
        """
        self._store.memory = memory
        self._store.pending = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {int(self.offsets[-1] - self.offsets[0])} values of {self.dtype})"

    @property
    def trailing(self) -> tuple[int, ...]:
        """Sizes of the dimensions after the first."""
        return self._store.memory.shape[1:]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] Length of each row; 0 if absent."""
        lengths: NDArray[np.int64] = self.offsets[1:] - self.offsets[:-1]
        return lengths

    @property
    def present(self) -> NDArray[np.bool_]:
        """[N] Whether each row is present."""
        return np.ones(len(self), dtype=np.bool_) if self.valid is None else self.valid

    def row_dtype(self, index: int) -> str:
        """Return the element type of a row.

        Args:
            index: Number of the row.

        Returns:
            The name of the type.
        """
        return self.dtype if self.codes is None else BY_CODE[int(self.codes[index])].name

    def row_dtypes(self) -> set[str]:
        """Return the element types of the present rows."""
        if self.codes is None:
            return {self.dtype} if self.present.any() else set()
        return {BY_CODE[int(code)].name for code in np.unique(self.codes[self.present])}

    @classmethod
    def from_arrays(cls, rows: Sequence[Any], dtype: str) -> Ragged:
        """Build a column from lists or numpy arrays.

        Args:
            rows: The rows, `None` where a row is absent.
            dtype: Element type that they are converted to.

        Returns:
            The column.

        Raises:
            ValueError: The type is `bfloat16`, which numpy does not have.
        """
        if dtype == "bfloat16":
            raise ValueError("dtype 'bfloat16': numpy has no such type; build the column from tensors")
        storage = np.dtype(dtype)
        arrays = [None if row is None else np.asarray(row, dtype=storage) for row in rows]
        lengths = [0 if array is None else len(array) for array in arrays]
        present = [array for array in arrays if array is not None]
        values = np.concatenate(present) if present else np.empty(0, dtype=storage)
        valid = None if len(present) == len(arrays) else np.array([a is not None for a in arrays], dtype=np.bool_)
        return cls(values.view(DTYPES[dtype].storage), compute_offsets(lengths), dtype, valid, owned=True)

    @classmethod
    def from_tensors(
        cls, rows: Sequence[torch.Tensor | None], dtype: str, copy: bool = True, uniform: bool = False
    ) -> Ragged:
        """Build a column from tensors, copied in one pass.

        Args:
            rows: The rows, `None` where a row is absent. Their trailing sizes must agree.
            dtype: Element type of the column, which must hold all of theirs exactly.
            copy: Copy now. With `False` the tensors stay pending, and must not change until they are copied.
            uniform: All rows are known to have the type `dtype`.

        Returns:
            The column.
        """
        import torch

        present = [row for row in rows if row is not None]
        trailing = tuple(present[0].shape[1:]) if present else ()
        # numel is several times as fast as len here, and the same thing for a row of one dimension.
        measure = len if trailing else torch.Tensor.numel
        offsets = compute_offsets([0 if row is None else measure(row) for row in rows])
        memory = allocate((int(offsets[-1]), *trailing), DTYPES[dtype].storage, touched=copy)
        valid = None if len(present) == len(rows) else np.array([row is not None for row in rows], dtype=np.bool_)
        codes = None
        kinds = set() if uniform else set(map(attrgetter("dtype"), present))
        target = getattr(torch, dtype)
        if kinds - {target}:
            names = {kind: DTYPES[str(kind).removeprefix("torch.")].code for kind in kinds}
            codes = np.array([0 if row is None else names[row.dtype] for row in rows], dtype=np.uint8)
        column = cls(memory, offsets, dtype, valid, codes, owned=True)
        if memory.size:
            if codes is not None:
                present = [row.detach().to("cpu", target) for row in present]
            column._store.pending = present
            if copy:
                column.values  # noqa: B018 (reading it copies)
        return column

    def tensor_of_values(self) -> torch.Tensor:
        """Return all values as one tensor [total, ...] of type `dtype`, on writable memory."""
        store = self._store
        if store.tensor is None:
            import torch

            if not store.owned:
                memory = allocate(store.memory.shape, store.memory.dtype)
                memory[...] = store.memory
                store.memory, store.owned = memory, True
            if self.dtype == "bool" and self.values.size and self.values.max() > 1:
                raise WireError(f"a bool column holds the byte {int(self.values.max())}, expected 0 or 1")
            tensor = torch.from_numpy(np.ascontiguousarray(self.values))
            dtype = getattr(torch, self.dtype)
            store.tensor = tensor if tensor.dtype == dtype else tensor.view(dtype)
        return store.tensor

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return a row.

        Args:
            index: Number of the row.

        Returns:
            A view of the column, a copy if the row has another type than the column, or `None` if the row is absent.
        """
        if self.valid is not None and not self.valid[index]:
            return None
        row = self.tensor_of_values()[int(self.offsets[index]) : int(self.offsets[index + 1])]
        return row if self.codes is None else self._cast(row, index)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor | None: ...
    @overload
    def __getitem__(self, index: slice[Any, Any, Any]) -> Ragged: ...
    def __getitem__(self, index: int | slice[Any, Any, Any]) -> torch.Tensor | Ragged | None:
        """Return a row as `tensor` does, or a column of the rows of a slice (copied if its step is not 1)."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.slice(start, max(start, stop))
            return self.take(np.array(range(start, stop, step), dtype=np.int64))  # a step may be of any size
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(f"index: got {index!r}, expected a row's number or a slice") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index}: the column has {len(self)}")
        return self.tensor(index % len(self))

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self.tensors())

    def tensors(self) -> list[torch.Tensor | None]:
        """Return every row as `tensor` does, in one pass."""
        import torch

        values = self.tensor_of_values()
        start, stop = int(self.offsets[0]), int(self.offsets[-1])
        rows: list[Any] = list(torch.split(values[start:stop], self.lengths.tolist()))
        if self.codes is not None:
            rows = [self._cast(row, i) for i, row in enumerate(rows)]
        if self.valid is not None:
            rows = [row if ok else None for row, ok in zip(rows, self.valid.tolist(), strict=True)]
        return rows

    def _cast(self, row: torch.Tensor, index: int) -> torch.Tensor:
        import torch

        name = self.row_dtype(index) if self.valid is None or self.valid[index] else self.dtype
        return row if name == self.dtype else row.to(getattr(torch, name))

    def slice(self, start: int, stop: int) -> Ragged:
        """Return a range of rows, sharing memory.

        Args:
            start: First row.
            stop: Row after the last one.

        Returns:
            A column of `stop - start` rows.
        """
        return Ragged(
            self._store,
            self.offsets[start : stop + 1],
            self.dtype,
            None if self.valid is None else self.valid[start:stop],
            None if self.codes is None else self.codes[start:stop],
        )

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """Copy rows. The memory of this column is not kept alive.

        Args:
            indices: [M] Row numbers.

        Returns:
            A column of M rows, in that order.
        """
        lengths = self.lengths[indices]
        offsets = compute_offsets(lengths)
        values = allocate((int(offsets[-1]), *self.trailing), self.values.dtype)
        source = self.values
        starts = self.offsets[indices].tolist()
        target = 0
        for start, length in zip(starts, lengths.tolist(), strict=True):
            values[target : target + length] = source[start : start + length]
            target += length
        return Ragged(
            values,
            offsets,
            self.dtype,
            None if self.valid is None else self.valid[indices],
            None if self.codes is None else self.codes[indices],
            owned=True,
        )

    def as_dtype(self, dtype: str) -> Ragged:
        """Convert the values to a wider type. Each row keeps its own type.

        Args:
            dtype: Element type of the new column.

        Returns:
            The new column, or this one if it has the type already.
        """
        if dtype == self.dtype:
            return self
        import torch

        start, stop = int(self.offsets[0]), int(self.offsets[-1])
        info = DTYPES[dtype]
        values = np.empty((stop - start, *self.trailing), dtype=info.storage)
        torch.from_numpy(values).view(getattr(torch, dtype)).copy_(self.tensor_of_values()[start:stop])
        codes = self.codes
        if codes is None:
            codes = np.full(len(self), DTYPES[self.dtype].code, dtype=np.uint8)
        return Ragged(values, self.offsets - start, dtype, self.valid, codes, owned=True)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate columns.

        Args:
            parts: Columns of one `dtype` and one trailing shape.

        Returns:
            All rows, copied.
        """
        offsets = compute_offsets(np.concatenate([column.lengths for column in parts]))
        values = np.concatenate([column.values[column.offsets[0] : column.offsets[-1]] for column in parts])
        valid = None
        if any(column.valid is not None for column in parts):
            valid = np.concatenate([column.present for column in parts])
        codes = None
        if any(column.codes is not None for column in parts):
            code = DTYPES[parts[0].dtype].code
            codes = np.concatenate(
                [np.full(len(p), code, dtype=np.uint8) if p.codes is None else p.codes for p in parts]
            )
        return cls(values, offsets, parts[0].dtype, valid, codes, owned=True)

    def largest(self) -> int:
        """Return the largest value of any row, or 0 if there are no values."""
        # Only the rows of this slice.
        values = self.values[self.offsets[0] : self.offsets[-1]]
        return int(values.max()) if values.size else 0

    def row(self, index: int) -> NDArray[Any]:
        """Return the values of a row.

        Args:
            index: Number of the row.

        Returns:
            [length, ...] A view, in the storage type of the column.
        """
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def absent(cls, count: int, dtype: str, trailing: tuple[int, ...] = ()) -> Ragged:
        """Build a column of absent rows.

        Args:
            count: Number of rows.
            dtype: Element type.
            trailing: Sizes of the dimensions after the first.

        Returns:
            The column.
        """
        values = np.empty((0, *trailing), dtype=DTYPES[dtype].storage)
        return cls(values, np.zeros(count + 1, dtype=np.int64), dtype, np.zeros(count, dtype=np.bool_), owned=True)


class RaggedRuns(Ragged):
    """N rows in several runs of an array that need not be contiguous, for checks and conversion to tensors.

    It has no offsets.

    Args:
        values: The array.
        starts: [F] Ascending start of each run in the array.
        lengths: [N] Length of each row; 0 if absent.
        counts: [F] Number of rows in each run.
        dtype: Element type.
        valid: [N] Whether a row is present; `None`: all are.

    >>> column = RaggedRuns(np.arange(9), np.array([0, 6]), np.array([2, 1, 3]), counts=[2, 1], dtype="int64")
    >>> [row.tolist() for row in column.tensors()]
    [[0, 1], [2], [6, 7, 8]]
    """

    __slots__ = ("checked", "counts", "row_lengths", "starts")

    def __init__(
        self,
        values: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        counts: Sequence[int],
        dtype: str,
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        super().__init__(values, np.empty(0, dtype=np.int64), dtype, valid, owned=True)
        self.starts = starts
        self.row_lengths = lengths
        self.counts = list(counts)
        self.checked = False
        """Whether bools are known to be 0 or 1."""

    def __len__(self) -> int:
        return len(self.row_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] Length of each row; 0 if absent."""
        return self.row_lengths

    def _runs(self) -> list[tuple[int, int]]:
        """Return the start and stop of the values of each run."""
        bounds = np.cumsum([0, *self.counts])
        ends = np.concatenate([[0], np.cumsum(self.row_lengths)])
        return list(zip(self.starts.tolist(), (self.starts + np.diff(ends[bounds])).tolist(), strict=True))

    def largest(self) -> int:
        """Return the largest value of any row, or 0 if there are no values."""
        return max((int(self.memory[start:stop].max()) for start, stop in self._runs() if stop > start), default=0)

    def row(self, index: int) -> NDArray[Any]:
        """Return the values of a row.

        Args:
            index: Number of the row.

        Returns:
            [length] A view of the values.
        """
        bounds = np.cumsum([0, *self.counts])
        run = int(np.searchsorted(bounds, index, side="right")) - 1
        start = int(self.starts[run] + self.row_lengths[bounds[run] : index].sum())
        return self.memory[start : start + int(self.row_lengths[index])]

    def tensors(self) -> list[torch.Tensor | None]:
        """Return every row as a view. Each run has its own storage, which is what saving a tensor writes."""
        import torch

        if self.dtype == "bool" and not self.checked and self.largest() > 1:
            raise WireError(f"a bool column holds the byte {self.largest()}, expected 0 or 1")
        dtype = getattr(torch, self.dtype)
        lengths = self.row_lengths.tolist()
        rows: list[Any] = []
        for (start, stop), count in zip(self._runs(), self.counts, strict=True):
            values = torch.from_numpy(self.memory[start:stop])
            values = values if values.dtype == dtype else values.view(dtype)
            rows += values.split_with_sizes(lengths[len(rows) : len(rows) + count])
        if self.valid is not None:
            rows = [row if present else None for row, present in zip(rows, self.valid.tolist(), strict=True)]
        return rows


def compute_offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute offsets from lengths.

    Args:
        lengths: [N] Lengths of rows.

    Returns:
        [N + 1] Start of each row, and the end of the last.

    >>> compute_offsets([3, 0, 1]).tolist()
    [0, 3, 3, 4]
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    offsets[1:] = lengths
    offsets.cumsum(out=offsets)
    return offsets
