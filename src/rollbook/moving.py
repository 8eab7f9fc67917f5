"""Taking tensors to a device, or into pinned memory, however deep they lie; and what batches, items and samples share.

Invariant: every tensor is reached, in any nest of lists, tuples and dicts; `None` and what cannot move stay as they
are, and no accelerator is needed.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollbook.equality import same
from rollbook.jagged import Rows


def to(tensor: Any, device: Any) -> Any:
    """`tensor` on `device`: a tensor, or any nest of lists, tuples and dicts; what cannot move stays as it is.

    >>> to([torch.ones(1), None, {"a": (torch.ones(2), "b")}], "meta")[2]["a"][0].device
    device(type='meta')
    """
    return _each_tensor(tensor, *_moves(device))


def _moves(device: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What takes a tensor to a device, and what takes anything else that can move."""
    target = torch.device(device) if isinstance(device, (str, int)) else device
    return (
        lambda one: one if one.device == target else one.to(target, non_blocking=one.is_pinned()),
        lambda other: other.to_device(device) if isinstance(other, Movable) else other.to(device),
    )


def pin_memory(tensor: Any) -> Any:
    """`tensor` in page-locked memory, which a device copies from without waiting; nests as for `to`.

    Without an accelerator it gives back what it got, and says so once.
    """
    if not torch.accelerator.is_available():
        _say_unpinned()
        return tensor
    return _each_tensor(
        tensor,
        lambda one: one if one.device.type != "cpu" else one.pin_memory(),
        lambda other: other.pin_memory() if hasattr(other, "pin_memory") else other,
    )


_said: list[bool] = []


def _say_unpinned() -> None:
    if not _said:
        _said.append(True)
        warnings.warn("pin_memory: there is no accelerator, so memory stays as it is", stacklevel=4)


def _each_tensor(value: Any, change: Callable[[Any], Any], other: Callable[[Any], Any]) -> Any:
    """The nest with each tensor changed; `other` changes what can move and is neither tensor nor container."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, Rows):
        return value.apply(change)
    if isinstance(value, dict):
        made = {} if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            made[key] = _each_tensor(item, change, other)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each_tensor(item, change, other) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(item, change, other) for item in value)
    if isinstance(value, Movable) or callable(getattr(value, "to", None)):
        return other(value)
    return value


@dataclass(eq=False)
class Movable:
    """What batches, items and samples share: equality by value, and moving to a device in place."""

    def to_device(self, device: Any) -> Self:
        """Move every tensor to `device`, in place; gives itself back."""
        tensor, other = _moves(device)
        return self._change(
            lambda value: tensor(value) if isinstance(value, torch.Tensor) else _each_tensor(value, tensor, other)
        )

    def pin_memory(self) -> Self:
        """Page-lock every tensor, in place; gives itself back. Without an accelerator nothing happens."""
        return self._change(pin_memory)

    def _change(self, change: Any) -> Self:
        # Past __setattr__, which would take it for new content.
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None:
                self.__dict__[name] = change(value)
        return self

    def __eq__(self, other: object) -> bool:
        """Equal when every field is: tensors by type, shape and value, NaN equal to NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]
