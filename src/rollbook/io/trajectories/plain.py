"""Free-form values as strict JSON has them: what a person reads, not what a program reads back.

Invariant: whatever is given, what comes out is JSON: NaN and infinities are null, and noted; nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.images import source_key
from rollbook.core.media import is_picture

_DEEPEST = 32
_MOST = 1 << 18
"""A tensor or array of more elements is described, not written out."""
_LONGEST = 1 << 16
"""Bytes, and what an unknown object says of itself, are cut here."""
_INT64 = 1 << 63


class Plain:
    """Makes values plain, and notes by path what was not finite.

    Tensors and arrays become lists (of no dimension: numbers), tuples and sets lists, keys text; bytes that are UTF-8
    become text, and others the hexadecimal `{"$bytes": ...}`; images and objects of other kinds are described.
    `references`: by the identity of a part of a message that has an image, or of its bytes, what to write in the
    image's place.

    >>> made = Plain()
    >>> made.of({"a": torch.tensor([1.0, float("nan")]), 2: {3}, "b": b"x", "c": np.float32(0.5)}, "info")
    {'a': [1.0, None], '2': [3], 'b': 'x', 'c': 0.5}
    >>> made.nonfinite
    {'info.a': {'nan': 1}}
    """

    def __init__(self, references: Mapping[int, str] | None = None) -> None:
        self.nonfinite: dict[str, dict[str, int]] = {}
        self.references = references or {}

    def of(self, value: Any, path: str, depth: int = 0) -> Any:
        """`value` as plain values; `path` is where it stands in the record."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text(value)
        if kind is float:
            return self.number(value, path)
        if kind is int:
            return value if -_INT64 <= value < 2 * _INT64 else str(value)
        if depth >= _DEEPEST:
            return f"{kind.__name__}, too deep to be shown"
        try:
            return self._of(value, path, depth)
        except Exception as error:  # an object of a user's own may raise anything when it is looked at
            return f"{kind.__name__}, which cannot be shown ({type(error).__name__})"

    def _of(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            image = source_key(value) if id(value) in self.references else None
            found = {}
            for name, item in value.items():
                shown = self.text(name if isinstance(name, str) else str(name))
                is_image = image is not None and name == image
                found[shown] = self.references[id(value)] if is_image else self.of(item, f"{path}.{shown}", depth + 1)
            return found
        if isinstance(value, (list, tuple)):
            return [self.of(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return [self.of(item, path, depth + 1) for item in sorted(value, key=lambda item: (str(type(item)), item))]
        if isinstance(value, torch.Tensor):
            if value.numel() > _MOST or value.is_meta:
                return f"tensor of {value.dtype}, shape {list(value.shape)}"
            return self.array(host(value), path)
        if isinstance(value, np.generic | np.ndarray):
            array = np.asarray(value)
            if array.size > _MOST or array.dtype.names is not None:
                return f"array of {array.dtype}, shape {list(array.shape)}"
            return self.array(array, path)
        if isinstance(value, bytes) and id(value) in self.references:
            return self.references[id(value)]
        if isinstance(value, (bytes, bytearray, memoryview)):
            held = bytes(value[:_LONGEST])
            try:
                return held.decode()
            except UnicodeDecodeError:
                return {"$bytes": held.hex()}
        if is_picture(value):
            return f"image {value.width}x{value.height} {value.mode}"
        if isinstance(value, str):
            return self.text(str(value))
        if isinstance(value, (bool, int, float)):
            return self.of(float(value) if isinstance(value, float) else int(value), path, depth)
        return self.text(str(value)[:_LONGEST])

    def text(self, value: str) -> str:
        """Text that UTF-8 can hold: halves of surrogate pairs are U+FFFD."""
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

    def number(self, value: float, path: str) -> float | None:
        """A number, or nothing and a note."""
        if math.isfinite(value):
            return value
        self._note(path, repr(value), 1)
        return None

    def array(self, values: NDArray[Any], path: str) -> Any:
        """An array as lists, or a number if it has no dimension."""
        if values.dtype.kind == "f":
            self.check(values, path)
            made: Any = values.astype(object)
            made[~np.isfinite(values)] = None
            return made.tolist()
        if values.dtype.kind in "biu":
            return values.tolist()
        return self.of(values.tolist(), path, 1)

    def check(self, values: NDArray[Any], path: str) -> None:
        """Note what of an array is not finite."""
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        for name, count in (
            ("nan", np.isnan(values).sum()),
            ("inf", np.isposinf(values).sum()),
            ("-inf", np.isneginf(values).sum()),
        ):
            if count:
                self._note(path, name, int(count))

    def _note(self, path: str, name: str, count: int) -> None:
        seen = self.nonfinite.setdefault(path, {})
        seen[name] = seen.get(name, 0) + count


def host(value: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array of its own memory; of a type that numpy lacks, as float32."""
    value = value.detach()
    if value.dtype in _AS_FLOAT or str(value.dtype).startswith("torch.float8"):
        value = value.float()
    return np.array(value.cpu().numpy())


_AS_FLOAT = (torch.bfloat16, torch.float16)
