"""From what a caller gives to what a record keeps, field by field.

Invariant: nothing the caller owns is changed or shared, but for tensors, which are kept as given; what a field cannot
hold is a `ValueError` that names the field, what it got and what it expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rollbook.custom_field import TORCH_DTYPES, CustomField
from rollbook.fields import INTEGERS, Field
from rollbook.ids import EID


def as_tensor(field: Field, value: Any) -> torch.Tensor:
    """`value` as the field keeps it: a tensor as it is, anything else converted to the field's type.

    >>> from rollbook.fields import FIELDS
    >>> as_tensor(FIELDS["tokens"], range(3))
    tensor([0, 1, 2], dtype=torch.int32)
    >>> as_tensor(FIELDS["tokens"], [1.7])
    Traceback (most recent call last):
        ...
    ValueError: tokens: got values of float64, expected whole numbers
    """
    name = field.name
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if field.accepts == "integer" and kind not in INTEGERS:
            raise ValueError(f"{name}: got a tensor of {kind}, expected whole numbers")
        if value.is_complex():
            raise ValueError(f"{name}: got a tensor of {kind}, expected real numbers")
        return value
    try:
        array = np.asarray(value)
        if array.dtype == object and isinstance(value, (list, tuple)):
            # Lists of 0-d tensors or of numpy scalars of several types, as loops over tokens make them.
            array = np.asarray([item.item() if isinstance(item, torch.Tensor) else item for item in value])
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: got {type(value).__name__}, expected numbers: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)
    if array.dtype.kind not in ("iu" if field.accepts == "integer" else "biuf"):
        expected = "whole numbers" if field.accepts == "integer" else "real numbers"
        raise ValueError(f"{name}: got values of {array.dtype}, expected {expected}")
    # numpy has no bfloat16: by way of float32, which holds it.
    target = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if target.kind == "b" and array.size and not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name}: got values other than 0 and 1; give a tensor to keep them")
    if target.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(target)
        if low < bounds.min or high > bounds.max:
            raise ValueError(
                f"{name}: got {low if low < bounds.min else high}, which {field.dtype} does not hold; "
                "give a tensor of a wider type to keep it"
            )
    return torch.from_numpy(np.array(array, dtype=target)).to(TORCH_DTYPES[field.dtype])


def own(value: Any) -> Any:
    """A copy of the dicts, lists and tuples in `value`; what they hold is the same."""
    kind = type(value)
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    if kind is list:
        return [own(item) for item in value]
    if kind is tuple:
        return tuple(own(item) for item in value)
    return value


def deep_copy(value: Any) -> Any:
    """A copy of the containers, tensors and arrays in `value`."""
    kind = type(value)
    if kind is dict:
        return {key: deep_copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(deep_copy(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if isinstance(value, np.ndarray) else value


EMPTY: dict[str, Any] = {"json": dict, "custom_fields": list}


def convert(field: Field, value: Any) -> Any:
    """One field's value as a record keeps it; `None` stays `None` but for dicts and lists that are always there."""
    name, kind = field.name, field.kind
    if value is None:
        if kind == "eid":
            return EID()
        return EMPTY[kind]() if field.always or kind == "custom_fields" else None
    if kind == "tensor":
        if field.broadcast and isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: got {value}, expected a number of 32 bits")
            return int(value)
        return as_tensor(field, value)
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected a str")
        return value
    if kind == "number":
        return _number(name, value)
    if kind == "integer":
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected an int")
        if name == "group_size" and int(value) < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
        return int(value)
    if kind == "eid":
        return as_eid(value)
    if kind == "media":
        return _media(name, value)
    if kind == "custom_fields":
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"{name}: got {type(value).__name__}, expected a list of CustomField")
        return [item if isinstance(item, CustomField) else CustomField.from_dict(item) for item in value]
    if field.mapping and not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict")
    try:
        return own(dict(value) if isinstance(value, Mapping) else value)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply, or holds itself") from None


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name}: got a tensor of shape {list(value.shape)}, expected one real number")
        return float(value.item())
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            return float(value.item())
        raise ValueError(f"{name}: got {type(value).__name__} {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: got an integer too large for a float") from None


def as_eid(value: Any) -> EID:
    if isinstance(value, EID):
        # The record's own: `record.eid.run = i` must not change the id that others were built with.
        return value.replace()
    if isinstance(value, Mapping):
        unknown = set(value) - set(EID().to_dict())
        if unknown:
            raise ValueError(
                f"eid: got the key {sorted(map(str, unknown))[0]!r}, expected batch, task, run, step, suffix"
            )
        return EID(**value)
    raise ValueError(f"eid: got {type(value).__name__} {value!r}, expected an EID or a dict of its parts")


def _media(name: str, value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a dict of tensors")
    media: dict[str, torch.Tensor] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{name}: got the key {key!r}, expected a str")
        if isinstance(item, torch.Tensor):
            media[key] = item
            continue
        try:
            media[key] = torch.from_numpy(item.copy()) if isinstance(item, np.ndarray) else torch.tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}[{key!r}]: got {type(item).__name__}, expected a tensor: {error}") from None
    return media
