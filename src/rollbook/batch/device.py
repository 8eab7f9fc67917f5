"""Transfer of tensors to a device or into pinned memory.

- `move_to_device`, `pin_memory`: move tensors in nested containers.
- `Movable`: base class of batches with these as methods.
- `copy_columns`: copy the columns of a batch to a device in one transfer.

Invariant: every tensor in nested lists, tuples and dicts is moved. `None` and objects that cannot move are unchanged,
and no accelerator is needed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.freeform import same
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Column, Rows, concatenated

T = TypeVar("T")
_CPU = torch.device("cpu")
_Move: TypeAlias = Callable[[Any], Any]
Device: TypeAlias = torch.device | str | int


def move_to_device(tensor: T, device: Device) -> T:
    """Copy tensors to a device.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors. Objects that cannot move are unchanged.
        device: The device.

    Returns:
        The same structure on the device.

    >>> move_to_device([torch.ones(1), None, {"a": (torch.ones(2), "b")}], "meta")[2]["a"][0].device
    device(type='meta')
    """
    moved: T = _map_tensors(tensor, *_device_moves(device))
    return moved


def _device_moves(device: Device) -> tuple[_Move, _Move]:
    """Return two functions that move to a device: one for tensors, one for other objects that can move."""
    target = torch.device(device) if isinstance(device, (str, int)) else device

    def move_other(value: Movable | torch.nn.Module) -> Movable | torch.nn.Module:
        return value.to_device(device) if isinstance(value, Movable) else value.to(device)

    if target == _CPU:  # reading `is_cpu` is faster than reading `device`
        return lambda value: value if value.is_cpu else value.to(target), move_other
    return (
        lambda value: value if value.device == target else value.to(target, non_blocking=value.is_pinned()),
        move_other,
    )


def pin_memory(tensor: T) -> T:
    """Copy tensors to page-locked memory, from which a device copies without blocking.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors.

    Returns:
        The same structure in page-locked memory. Without an accelerator, `tensor` itself, with one warning.
    """
    if not torch.accelerator.is_available():
        _warn_unpinned()
        return tensor
    pinned: T = _map_tensors(tensor, *_PIN_MOVES)
    return pinned


_PIN_MOVES: tuple[_Move, _Move] = (
    lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor,
    lambda other: other.pin_memory() if hasattr(other, "pin_memory") else other,
)


@functools.cache  # warn once
def _warn_unpinned() -> None:
    warnings.warn("pin_memory: there is no accelerator, so memory is not pinned", stacklevel=4)


def _map_tensors(tree: Any, move: _Move, move_other: _Move) -> Any:
    """Apply `move` to each tensor in nested containers, and `move_other` to other objects that can move."""
    if type(tree) is dict:  # first, since `isinstance(tree, torch.Tensor)` is slow for other types
        return {
            key: move(entry) if type(entry) is torch.Tensor else _map_tensors(entry, move, move_other)
            for key, entry in tree.items()
        }
    if isinstance(tree, torch.Tensor):
        return move(tree)
    if tree is None or isinstance(tree, (str, bytes, int, float)):
        return tree
    if isinstance(tree, Rows):
        return tree.apply(move)
    if isinstance(tree, dict):
        moved = copy.copy(tree)
        for key, entry in tree.items():
            moved[key] = _map_tensors(entry, move, move_other)
        return moved
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(entry, move, move_other) for entry in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(entry, move, move_other) for entry in tree)
    if isinstance(tree, Movable) or callable(getattr(tree, "to", None)):
        return move_other(tree)
    return tree


@dataclass(eq=False)
class Movable:
    """Base class of batches, items and samples: they are compared by value, and moved to a device in place."""

    def to_device(self, device: Device) -> Self:
        """Move every tensor to `device`, in place, and return the object."""
        return self._move(*_device_moves(device))

    def pin_memory(self) -> Self:
        """Pin the memory of every tensor, in place, and return the object. Without an accelerator, nothing happens."""
        if torch.accelerator.is_available():
            return self._move(*_PIN_MOVES)
        _warn_unpinned()
        return self

    def _move(self, move: _Move, move_other: _Move) -> Self:
        state = self.__dict__  # fields that are missing here have defaults without tensors
        for name, value in state.items():
            if value is not None:
                state[name] = move(value) if type(value) is torch.Tensor else _map_tensors(value, move, move_other)
        return self

    def __eq__(self, other: object) -> bool:
        """Return whether all fields are equal. Tensors are compared by dtype, shape and value; NaN equals NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]


class _StagedColumn(NamedTuple):
    """A column that is copied within the buffer of one transfer."""

    position: int
    """Position among the columns of the call."""
    column: Column
    lengths: NDArray[np.int64]
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the buffer."""

    @property
    def stop(self) -> int:
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the column's part of the buffer."""
        return buffer[self.start : self.stop].view(self.dtype).reshape(self.shape)


def copy_columns(columns: Sequence[tuple[Column, NDArray[np.int64]]], device: torch.device) -> list[torch.Tensor]:
    """Copy columns to a device. Columns on the host are copied in one transfer.

    Args:
        columns: Each column, and the lengths [B] of its rows.
        device: The target device.

    Returns:
        Each column as a tensor [total, ...] on the device.

    >>> columns = [(torch.arange(3), np.array([1, 2])), (torch.ones(2), np.array([2, 0]))]
    >>> [column.tolist() for column in copy_columns(columns, torch.device("cpu"))]
    [[0, 1, 2], [1.0, 1.0]]
    """
    copies: list[Any] = []
    staged: list[_StagedColumn] = []
    size = 0
    for column, lengths in columns:
        if isinstance(column, torch.Tensor) and (
            column.device.type != "cpu" or (column.dim() == 1 and _is_constant(column))
        ):
            # A constant is expanded on the device. A column that is on a device already is not staged.
            copies.append(column[:1].to(device).expand(column.shape) if _is_constant(column) else column.to(device))
            continue
        dtype = column.dtype if not isinstance(column, Ragged) else getattr(torch, column.dtype)
        trailing = tuple(column.shape[1:]) if isinstance(column, torch.Tensor) else column.trailing
        shape = (int(lengths.sum()), *trailing)
        staged.append(_StagedColumn(len(copies), column, lengths, dtype, shape, size))
        size = -(-staged[-1].stop // 64) * 64  # aligned, for views of other dtypes
        copies.append(None)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for entry in staged:
        concatenated(entry.column, entry.lengths, out=entry.view(buffer))
    on_device = buffer.to(device, non_blocking=True)
    for entry in staged:
        copies[entry.position] = entry.view(on_device)
    return copies


def _is_constant(column: torch.Tensor) -> bool:
    """Return whether a column is a single value that was expanded (`torch.Tensor.expand`)."""
    return column.dim() == 1 and column.stride(0) == 0 and len(column) > 0


__all__ = ["copy_columns"]
