"""Anything as values that strict JSON can say: finite numbers, text without lone surrogates, lists, dicts by text.

Invariant: `json.dumps(plain(value), allow_nan=False).encode()` works for every value, in time and space that grow with
it, and nothing of it is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

DEPTH = 64
MOST = 1 << 20
"""Elements of an array that are written out."""
_EXACT = 2**53
"""Beyond it a browser's numbers are not exact."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_LONG = 256
"""Characters of a `data:` address that are written out: a record's images are shown, not spelled."""


def text(value: str) -> str:
    """The same text, with U+FFFD for lone surrogates, which UTF-8 cannot say.

    >>> text("a" + chr(0xd800))
    'a\ufffd'
    """
    return value if value.isascii() else _SURROGATES.sub("\ufffd", value)


def number(value: float | None) -> float | None:
    """A finite number, or `None`.

    >>> number(float("nan")), number(0.5)
    (None, 0.5)
    """
    return float(value) if value is not None and math.isfinite(value) else None


def plain(value: Any, depth: int = DEPTH) -> Any:
    """`value` as JSON can say it. What is no number is `null`, whole numbers a browser would round are text, bytes and
    what has no JSON at all say what they are.

    >>> plain({"a": (1, float("nan")), 2: b"abc", "c": np.arange(3), "d": 2**60})
    {'a': [1, None], '2': '⟨3 bytes⟩', 'c': [0, 1, 2], 'd': '1152921504606846976'}
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        if len(value) > _LONG and value.startswith("data:"):
            return f"{text(value[: value.find(',') + 1 or 64][:_LONG])}⟨{len(value)} characters⟩"
        return text(str(value))
    if isinstance(value, int):
        return int(value) if -_EXACT <= value <= _EXACT else _digits(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"⟨{len(value)} bytes⟩"
    if isinstance(value, np.generic):
        return plain(value.item(), depth) if value.dtype.kind in "biufUS" else f"⟨{value.dtype}⟩"
    if depth <= 0:
        return "⟨nested too deeply⟩"
    if isinstance(value, Mapping):
        return {
            text(key if isinstance(key, str) else str(plain(key, 2))): plain(v, depth - 1) for key, v in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth - 1) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = [int(size) for size in value.shape]
        if math.prod(shape) > MOST or str(value.dtype) in ("object", "complex64", "complex128"):
            return f"⟨{value.dtype} {shape}⟩"
        return plain(value.tolist(), depth - 1)
    return f"⟨{type(value).__name__}⟩"


def _digits(value: int) -> str:
    # Python refuses to write numbers of thousands of digits in decimal, for the time it takes.
    return str(int(value)) if value.bit_length() < 1024 else hex(value)
