"""Transfer of tensors to a device or into pinned memory: alone, nested, or as columns in one transfer.

Invariant: every tensor in nested lists, tuples and dicts is moved. `None` and objects that cannot move stay as they
are, and no accelerator is needed.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
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
_Change: TypeAlias = Callable[[Any], Any]
Device: TypeAlias = torch.device | str | int


def to(tensor: T, device: Device) -> T:
    """Copy tensors to a device.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors; objects that cannot move stay as they are.
        device: The device.

    Returns:
        The same structure on the device.

    >>> to([torch.ones(1), None, {"a": (torch.ones(2), "b")}], "meta")[2]["a"][0].device
    device(type='meta')
    """
    moved: T = _map_tensors(tensor, *_mover(device))
    return moved


def _mover(device: Device) -> tuple[_Change, _Change]:
    """Return the functions that move a tensor to a device, and any other object that can move."""
    target = torch.device(device) if isinstance(device, (str, int)) else device

    def move_other(value: Movable | torch.nn.Module) -> Movable | torch.nn.Module:
        return value.to_device(device) if isinstance(value, Movable) else value.to(device)

    if target == _CPU:  # `is_cpu` takes a fraction of the time of `device`
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
    pinned: T = _map_tensors(tensor, *_PINNER)
    return pinned


_PINNER: tuple[_Change, _Change] = (
    lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor,
    lambda other: other.pin_memory() if hasattr(other, "pin_memory") else other,
)
_warned: list[bool] = []


def _warn_unpinned() -> None:
    if not _warned:
        _warned.append(True)
        warnings.warn("pin_memory: there is no accelerator, so memory stays as it is", stacklevel=4)


def _map_tensors(value: Json, change: _Change, other: _Change) -> Json:
    """Apply `change` to each tensor in nested containers, and `other` to other objects that can move."""
    if type(value) is dict:  # first, since `isinstance(x, torch.Tensor)` is slow for other types
        return {
            key: change(item) if type(item) is torch.Tensor else _map_tensors(item, change, other)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, Rows):
        return value.apply(change)
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = _map_tensors(item, change, other)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change, other) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, change, other) for item in value)
    if isinstance(value, Movable) or callable(getattr(value, "to", None)):
        return other(value)
    return value


@dataclass(eq=False)
class Movable:
    """Base class of batches, items and samples: equality by value, and moves to a device in place."""

    def to_device(self, device: Device) -> Self:
        """Move every tensor to `device`, in place; returns itself."""
        return self._change(*_mover(device))

    def pin_memory(self) -> Self:
        """Page-lock every tensor, in place; returns itself. Without an accelerator nothing happens."""
        if torch.accelerator.is_available():
            return self._change(*_PINNER)
        _warn_unpinned()
        return self

    def _change(self, change: _Change, other: _Change) -> Self:
        state = self.__dict__  # fields that are not there have defaults without tensors
        for name, value in state.items():
            if value is not None:
                state[name] = change(value) if type(value) is torch.Tensor else _map_tensors(value, change, other)
        return self

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: tensors by type, shape and value, NaN equal to NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]


def assign_rest(new: Movable, first: int, more: tuple[Any, ...], rest: dict[str, Any]) -> None:
    """Assign the arguments of a constructor after its `first` fields, positional and by name."""
    names = list(new.__dataclass_fields__)
    if len(more) > len(names) - first:
        raise TypeError(f"{type(new).__name__}() takes {len(names)} arguments, got {first + len(more)}")
    assigned = dict(zip(names[first:], more, strict=False))
    for name, value in rest.items():
        if name not in names or name in assigned:
            problem = "multiple values for" if name in assigned else "an unexpected keyword"
            raise TypeError(f"{type(new).__name__}() got {problem} argument {name!r}")
        assigned[name] = value
    for name, value in assigned.items():
        if value is not None:
            setattr(new, name, value)


def constructor_signature(kind: type[Any]) -> inspect.Signature:
    """Return the signature of the default constructor of a dataclass."""
    parameters = []
    for spec in dataclasses.fields(kind):
        default = inspect.Parameter.empty if spec.default is dataclasses.MISSING else spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = None
        parameters.append(
            inspect.Parameter(spec.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=spec.type)
        )
    return inspect.Signature(parameters)


def copy_columns(columns: Sequence[tuple[Column, NDArray[np.int64]]], device: torch.device) -> list[torch.Tensor]:
    """Copy columns to a device, those of the host in one transfer.

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
            # A constant needs no transfer; a column that is on a device is not staged.
            copies.append(column[:1].to(device).expand(column.shape) if _is_constant(column) else column.to(device))
            continue
        dtype = column.dtype if not isinstance(column, Ragged) else getattr(torch, column.dtype)
        trailing = tuple(column.shape[1:]) if isinstance(column, torch.Tensor) else column.trailing
        shape = (int(lengths.sum()), *trailing)
        staged.append((len(copies), column, lengths, dtype, shape, size))
        size += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64  # views of another type need alignment
        copies.append(None)
    stage = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = []
    for index, column, lengths, dtype, shape, start in staged:
        stop = start + int(np.prod(shape)) * dtype.itemsize
        concatenated(column, lengths, out=stage[start:stop].view(dtype).reshape(shape))
        parts.append((index, start, stop, dtype, shape))
    moved = stage.to(device, non_blocking=True)
    for index, start, stop, dtype, shape in parts:
        copies[index] = moved[start:stop].view(dtype).reshape(shape)
    return copies


def _is_constant(column: torch.Tensor) -> bool:
    """Return whether a column is one expanded value (see `torch.Tensor.expand`)."""
    return column.dim() == 1 and column.stride(0) == 0 and len(column) > 0


__all__ = [
    "copy_columns",
]
