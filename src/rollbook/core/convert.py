"""From what a caller gives to what a record keeps, field by field.

Invariant: nothing the caller owns is changed or shared, but for tensors, which are kept as given; what a field cannot
hold is a `ValueError` that names the field, what it got and what it expected.
"""

from __future__ import annotations

import copy
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rollbook.core.custom_field import TORCH_DTYPES, CustomField
from rollbook.core.fields import INTEGERS, Field
from rollbook.core.ids import EID


def as_tensor(field: Field, value: Any) -> torch.Tensor:
    """`value` as the field keeps it: a tensor as it is, anything else converted to the field's type.

    >>> from rollbook.core.fields import FIELDS
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
        raise ValueError(f"{name}: got {shown(value)}, expected numbers: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)
    if array.dtype.kind not in ("iu" if field.accepts == "integer" else "biuf"):
        expected = "whole numbers" if field.accepts == "integer" else "real numbers"
        if array.dtype.kind in "OUSM" and isinstance(value, (list, tuple)):
            wrong = next((i for i, item in enumerate(value) if not isinstance(item, (int, float))), 0)
            raise ValueError(f"{name}[{wrong}]: got {shown(value[wrong])}, expected {expected}")
        if array.dtype.kind in "OUSM":
            raise ValueError(f"{name}: got {shown(value)}, expected {expected}")
        raise ValueError(f"{name}: got values of {array.dtype}, expected {expected}")
    # numpy has no bfloat16: by way of float32, which holds it.
    target = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if target.kind == "b" and not (good := np.isin(array, (0, 1))).all():
        raise ValueError(f"{name}: got {array[~good][0]}, expected 0 and 1; give a tensor to keep other values")
    if target.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(target)
        if low < bounds.min or high > bounds.max:
            raise ValueError(
                f"{name}: got {low if low < bounds.min else high}, which {field.dtype} does not hold; "
                "give a tensor of a wider type to keep it"
            )
    with np.errstate(over="ignore"):
        made = np.array(array, dtype=target)
    if target.kind == "f" and (np.isinf(made) & np.isfinite(array)).any():
        raise ValueError(f"{name}: got a number that {field.dtype} does not hold; give a wider tensor to keep it")
    return torch.from_numpy(made).to(TORCH_DTYPES[field.dtype])


_ATOMS = frozenset((float, int, bool, str, type(None)))


def own(value: Any, tensors: bool = False) -> Any:
    """A copy of the containers and arrays in `value`, of the same types; of the tensors too if asked for."""
    if type(value) in _ATOMS:  # first: `isinstance` of a tensor takes long where it is none
        return value
    if tensors and isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_() if value.requires_grad else value.clone()
    if isinstance(value, dict):
        mapping = {} if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            mapping[key] = own(item, tensors)
        return mapping
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(own(item, tensors) for item in value)
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = [own(item, tensors) for item in value]
        return items
    if isinstance(value, (np.ndarray, set, bytearray)):
        return value.copy()
    return value


def shown(value: Any) -> str:
    """A value as an error names it: by type, and short."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


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
        if field.broadcast and isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:
            return convert(field, value.item())
        return as_tensor(field, value)
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {shown(value)}, expected a str")
        return value
    if kind == "number":
        return _number(name, value)
    if kind == "integer":
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or isinstance(value, bool):
            raise ValueError(f"{name}: got {shown(value)}, expected an int")
        if name == "group_size" and number < 1:
            raise ValueError(f"{name}: got {number}, expected at least 1")
        return number
    if kind == "eid":
        return as_eid(value)
    if kind == "media":
        return _media(name, value)
    if kind == "custom_fields":
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"{name}: got {shown(value)}, expected a list of CustomField")
        return [item if isinstance(item, CustomField) else CustomField.from_dict(item) for item in value]
    if field.holds == "dict" and not isinstance(value, Mapping):
        raise ValueError(f"{name}: got {shown(value)}, expected a dict")
    if field.holds == "list" and not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: got {shown(value)}, expected a list")
    try:
        return own(value if isinstance(value, dict) or not isinstance(value, Mapping) else dict(value))
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
        raise ValueError(f"{name}: got {shown(value)}, expected a number")
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
    hint = " (EID.parse reads a uid)" if isinstance(value, str) else ""
    raise ValueError(f"eid: got {shown(value)}, expected an EID or a dict of its parts{hint}")


def _holds_arrays(value: Any) -> bool:
    # torch warns of lists of arrays, and takes a hundred times as long as numpy.
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], np.ndarray)


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
            made = np.array(item) if isinstance(item, np.ndarray) or _holds_arrays(item) else None
            media[key] = torch.tensor(item) if made is None else torch.from_numpy(made)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}[{key!r}]: got {type(item).__name__}, expected a tensor: {error}") from None
    return media
