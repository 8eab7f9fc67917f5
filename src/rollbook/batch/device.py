"""Transfer of tensors to a device or into pinned memory.

- `to`, `pin_memory`: move tensors in nested containers.
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
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.freeform import Json, same
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Column, Rows, concatenated

T = TypeVar("T")
_CPU = torch.device("cpu")
_Move: TypeAlias = Callable[[Any], Any]
Device: TypeAlias = torch.device | str | int


def to(tensor: T, device: Device) -> T:
    """Copy tensors to a device.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors. Objects that cannot move are unchanged.
        device: The device.

    Returns:
        The same structure on the device.

    >>> to([torch.ones(1), None, {"a": (torch.ones(2), "b")}], "meta")[2]["a"][0].device
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


def _map_tensors(value: Json, move: _Move, move_other: _Move) -> Json:
    """Apply `move` to each tensor in nested containers, and `move_other` to other objects that can move."""
    if type(value) is dict:  # first, since `isinstance(value, torch.Tensor)` is slow for other types
        return {
            key: move(item) if type(item) is torch.Tensor else _map_tensors(item, move, move_other)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return move(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, Rows):
        return value.apply(move)
    if isinstance(value, dict):
        moved = copy.copy(value)
        for key, item in value.items():
            moved[key] = _map_tensors(item, move, move_other)
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, move, move_other) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, move, move_other) for item in value)
    if isinstance(value, Movable) or callable(getattr(value, "to", None)):
        return move_other(value)
    return value


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
    staged: list[tuple[int, Column, NDArray[np.int64], torch.dtype, tuple[int, ...], int]] = []
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
        staged.append((len(copies), column, lengths, dtype, shape, size))
        size += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64  # aligned, for views of other dtypes
        copies.append(None)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = []
    for index, column, lengths, dtype, shape, start in staged:
        stop = start + int(np.prod(shape)) * dtype.itemsize
        concatenated(column, lengths, out=buffer[start:stop].view(dtype).reshape(shape))
        parts.append((index, start, stop, dtype, shape))
    on_device = buffer.to(device, non_blocking=True)
    for index, start, stop, dtype, shape in parts:
        copies[index] = on_device[start:stop].view(dtype).reshape(shape)
    return copies


def _is_constant(column: torch.Tensor) -> bool:
    """Return whether a column is a single value that was expanded (`torch.Tensor.expand`)."""
    return column.dim() == 1 and column.stride(0) == 0 and len(column) > 0


__all__ = ["copy_columns"]
