"""A batch's `info`, from the `info` of its items and back.

Invariant: `split_info(collate_info(infos))` gives `infos` back, whatever they hold and whichever of them lack a key:
numbers with their type, tensors with theirs, nested dicts, `None`, keys in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.equality import same
from rollbook.core.experience import own
from rollbook.core.rows import NUMPY, memory, unbind_copy

Path = tuple[Any, ...]
Kind = tuple[torch.dtype, tuple[int, ...]]
"""What a number was as an entry of a tensor: its type, and its shape there (`(1,)` in a (B, 1) tensor)."""

_MISSING: Any = object()
_TORCH = {numpy_type: torch_type for torch_type, numpy_type in NUMPY.items()}
_NUMBERS = (bool, int, float, complex, np.generic)
_DEFAULTS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
}


@dataclass(slots=True)
class InfoOrigin:
    """What a collated `info` does not say of the items it came from."""

    missing: dict[Path, frozenset[int]] = field(default_factory=dict)
    """The rows that lack a key."""
    given: dict[Path, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    """What a tensor shows, and what the items had, where a number of the tensor is not what was given."""
    kinds: dict[Path, tuple[Kind | None, ...]] = field(default_factory=dict)
    """What each row remembered of a number, where rows differed in that."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfoOrigin):
            return NotImplemented
        return same([self.missing, self.given, self.kinds], [other.missing, other.given, other.kinds])

    __hash__ = None  # type: ignore[assignment]


def collate_info(infos: Sequence[Any], kinds: Sequence[Any] | None = None) -> tuple[dict[Any, Any], InfoOrigin]:
    """One dict of tensors and lists, by key: numbers and tensors of one shape are stacked, dicts are collated by key,
    anything else is a list with `None` where an item lacks it.

    A number has the type that `kinds` remembers of it (see `split_info`), else int64, float32 or bool.

    >>> infos = [{"reward": 0.5, "tag": "a", "parts": {"x": 1}}, {"reward": 1.0, "parts": {"x": 2}}]
    >>> info, origin = collate_info(infos)
    >>> info
    {'reward': tensor([0.5000, 1.0000]), 'tag': ['a', None], 'parts': {'x': tensor([1, 2])}}
    >>> split_info(info, 2, origin)[0]
    [{'reward': 0.5, 'tag': 'a', 'parts': {'x': 1}}, {'reward': 1.0, 'parts': {'x': 2}}]
    """
    origin = InfoOrigin()
    return _collate([{} if info is None else info for info in infos], (), origin, list(kinds or ())), origin


def _collate(rows: list[Any], path: Path, origin: InfoOrigin, kinds: list[Any]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    keys = rows[0].keys() if rows else ()
    ragged = any(row.keys() != keys for row in rows)
    if ragged:
        keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        column = [row.get(key, _MISSING) for row in rows]
        here = (*path, key)
        missing = frozenset(i for i, v in enumerate(column) if v is _MISSING) if ragged else frozenset()
        if missing:
            origin.missing[here] = missing
        found = [value for value in column if value is not _MISSING] if missing else column
        if set(map(type, found)) == {dict}:
            result[key] = _collate([{} if value is _MISSING else value for value in column], here, origin, kinds)
            continue
        stacked = None if missing else _stack(column, here, origin, kinds)
        result[key] = [None if v is _MISSING else own(v, tensors=True) for v in column] if stacked is None else stacked
    return result


def _stack(column: list[Any], path: Path, origin: InfoOrigin, kinds: list[Any]) -> torch.Tensor | None:
    """The values as one tensor, if they can be."""
    types = set(map(type, column))
    if len(types) == 1 and not any(kinds) and (dtype := _DEFAULTS.get(type(column[0]))) is not None:
        try:
            plain = torch.tensor(column, dtype=dtype)
        except (RuntimeError, OverflowError, TypeError, ValueError):
            return None  # an integer beyond 64 bits
        shown = plain.tolist()
        if shown != column and not same(shown, column):
            origin.given[path] = shown, list(column)
        return plain
    if all(issubclass(kind, _NUMBERS) for kind in types):
        made = _number_tensor(column, types, _kind(path, column, kinds, origin))
        if made is None:
            return None
    elif all(issubclass(kind, torch.Tensor) for kind in types):
        if len({(value.dtype, value.shape, value.device) for value in column}) > 1:
            return None
        made = torch.stack([value.detach() for value in column])
    else:
        return None
    if made[0].numel() == 1:
        shown = made.reshape(-1).tolist()
        if types != {type(shown[0])} or not (shown == column or same(shown, column)):
            origin.given[path] = shown, own(column, tensors=True)
    return made


def _kind(path: Path, column: list[Any], kinds: list[Any], origin: InfoOrigin) -> Kind | None:
    """The type that all rows remember of a number; where they differ, the widest, and each row's is noted."""
    shared = {id(one): one for one in kinds}  # items of one batch share theirs
    found = {(one or {}).get(path) for one in shared.values()}
    if len(found) < 2:
        return found.pop() if found else None
    rows = tuple((one or {}).get(path) for one in kinds)
    origin.kinds[path] = rows
    if len({kind[1] for kind in rows if kind is not None}) > 1 or any(kind[1] for kind in rows if kind is not None):
        return None  # of different shapes: as numbers
    wide = [_DEFAULTS.get(type(v), torch.float32) if k is None else k[0] for k, v in zip(rows, column, strict=True)]
    return reduce(torch.promote_types, wide), ()


def _number_tensor(column: list[Any], types: set[type], kind: Kind | None) -> torch.Tensor | None:
    dtype, tail = kind or (None, ())
    if dtype is not None and not all(_holds(dtype, value) for value in column):
        dtype, tail = None, ()
    if dtype is None:
        if len(types) == 1 and all(issubclass(kind, np.generic) for kind in types):
            dtype = _TORCH.get(np.dtype(next(iter(types))))
            if dtype is None:
                return None  # dates, texts, long doubles
        if dtype is None and types <= {bool}:
            dtype = torch.bool
        if dtype is None:
            whole = all(issubclass(kind, (bool, int, np.integer, np.bool_)) for kind in types)
            imaginary = any(issubclass(kind, (complex, np.complexfloating)) for kind in types)
            dtype = torch.int64 if whole else torch.complex64 if imaginary else torch.float32
    try:
        return torch.tensor([v.item() if isinstance(v, np.generic) else v for v in column], dtype=dtype).reshape(
            len(column), *tail
        )
    except (RuntimeError, OverflowError, TypeError, ValueError):
        return None  # an integer beyond 64 bits, a date


def _holds(dtype: torch.dtype, value: Any) -> bool:
    if dtype.is_complex or isinstance(value, (complex, np.complexfloating)):
        return dtype.is_complex
    if dtype.is_floating_point:
        return True
    if dtype == torch.bool:
        return isinstance(value, (bool, np.bool_))
    bounds = torch.iinfo(dtype)
    return float(value).is_integer() and bounds.min <= value <= bounds.max


def split_info(
    info: Any, count: int, origin: InfoOrigin | None = None
) -> tuple[list[dict[Any, Any]], dict[Path, Kind] | None]:
    """The `info` of each of `count` items, and what is to be remembered of its numbers (see `collate_info`).

    Tensors and lists with an entry for each item are split, and one-element entries become Python numbers; dicts are
    split by key; anything else goes to every item. Nothing is shared between the items or with `info`.

    >>> items, kinds = split_info({"reward": torch.tensor([1.0, 2.0], dtype=torch.float64), "epoch": 3}, 2)
    >>> items, kinds
    ([{'reward': 1.0, 'epoch': 3}, {'reward': 2.0, 'epoch': 3}], {('reward',): (torch.float64, ())})
    """
    kinds: dict[Path, Kind] = {}
    if info is None:
        return [{} for _ in range(count)], None
    if not isinstance(info, dict):
        raise ValueError(f"info: got {type(info).__name__}, expected a dict")
    return _split(info, count, (), origin or InfoOrigin(), kinds), kinds or None


def row_kinds(kinds: dict[Path, Kind] | None, origin: InfoOrigin, row: int) -> dict[Path, Kind] | None:
    """What one row remembers of its numbers."""
    if not origin.kinds:
        return kinds
    own_kinds = dict(kinds or {})
    for path, rows in origin.kinds.items():
        own_kinds.pop(path, None)
        kind = rows[row]
        if kind is not None:
            own_kinds[path] = kind
    return own_kinds or None


def _split(info: dict[Any, Any], count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]) -> list[Any]:
    rows: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key, value in info.items():
        here = (*path, key)
        entries = _entries(value, count, here, origin, kinds)
        missing = origin.missing.get(here, ())
        for i, (row, entry) in enumerate(zip(rows, entries, strict=True)):
            # A row that has the key by now was given it since the batch was made.
            empty = entry is None or (isinstance(entry, dict) and not entry)
            if not (empty and i in missing):
                row[key] = entry
    return rows


def _entries(value: Any, count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]) -> list[Any]:
    if isinstance(value, dict):
        return _split(value, count, path, origin, kinds)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return _tensor_entries(value, count, path, origin, kinds)
    if isinstance(value, list) and len(value) == count:
        return [own(item, tensors=True) for item in value]
    return [own(value, tensors=True) for _ in range(count)]


def check_info(info: Any, count: int, path: Path = ()) -> None:
    """Refuse a tensor that has not an entry for each of `count` samples."""
    if isinstance(info, dict):
        for key, value in info.items():
            check_info(value, count, (*path, key))
    elif isinstance(info, torch.Tensor) and info.dim() and info.shape[0] != count:
        name = "".join(f"[{key!r}]" for key in path)
        raise ValueError(f"info{name}: got {len(info)} entries, expected {count}, one for each sample")


def _tensor_entries(
    value: torch.Tensor, count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]
) -> list[Any]:
    if value.dim() == 0:
        return [value.item()] * count
    check_info(value, count, path)
    tail = tuple(value.shape[1:])
    if count and value[0].numel() != 1:
        return unbind_copy(value)
    shown = value.reshape(-1).tolist()
    held, given = origin.given.get(path, (None, None))
    if given is not None and same(held, shown):
        return [own(item, tensors=True) for item in given]
    if tail or (shown and _DEFAULTS.get(type(shown[0])) != value.dtype):
        kinds[path] = value.dtype, tail
    return shown


def info_arrays(info: Any, origin: InfoOrigin) -> dict[Any, Any] | None:
    """A collated `info` for `pick_info`, if it is all tensors with an entry for each row: their memory and types."""
    if origin.missing or origin.given or origin.kinds:
        return None
    result: dict[Any, Any] = {}
    for key, value in (info or {}).items():
        if isinstance(value, dict):
            result[key] = info_arrays(value, origin)
        elif isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu":
            result[key] = memory(value), value.dtype if value.dtype not in NUMPY else None
        else:
            return None
        if result[key] is None:
            return None
    return result


def pick_info(arrays: dict[Any, Any], rows: NDArray[np.int64]) -> dict[Any, Any]:
    """The collated `info` of some rows (what `collate_info` makes of the rows' own is the same, and takes longer)."""
    result: dict[Any, Any] = {}
    for key, value in arrays.items():
        if isinstance(value, dict):
            result[key] = pick_info(value, rows)
        else:
            # By way of numpy, whose indexing takes a fraction of the time.
            array, dtype = value
            picked = torch.from_numpy(array[rows])
            result[key] = picked if dtype is None else picked.view(dtype)
    return result
