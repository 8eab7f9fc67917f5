"""What is read of files that strangers wrote: how large, how deep, under which names.

Invariant: no size, depth or name that a file states is believed before it is checked, and nothing of it is run; what
goes beyond a limit is a `WireError` that names the limit.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

import orjson

from rollbook.core.errors import WireError
from rollbook.core.wire import DEFAULT_LIMITS
from rollbook.core.wire import FREE_BYTES as FREE_BYTES
from rollbook.io.tables import check_depth

MAX_ROW = 256 << 20
"""Bytes of one line, one element, one member of an archive."""
MAX_JSON = 512 << 20
"""Bytes of a file that is one JSON value."""
MAX_UNPACKED = 4 << 30
"""Bytes that a compressed file may become."""
MAX_RATIO = DEFAULT_LIMITS.max_ratio
"""How many times its size a compressed text may have, from `FREE_BYTES` on."""
MAX_DEPTH = 128
MAX_PICTURE = 32 << 20
MAX_PIXELS = 100_000_000
MAX_FILES = 100_000
MAX_FOLDERS = 6
"""How deep files lie in a folder that is opened."""

_DIGITS = re.compile(r"(\d{1,18})")


def parse(data: bytes | memoryview, what: str = "the row") -> Any:
    """A JSON value, NaN and Infinity as Python's json writes them.

    >>> parse(b'{"reward": NaN}')
    {'reward': nan}
    """
    if len(data) > MAX_ROW:
        raise WireError(f"{what} has {len(data)} bytes, over the limit of {MAX_ROW}")
    try:
        value = orjson.loads(data)
    except ValueError as error:
        text = bytes(data)
        if b"NaN" not in text and b"Infinity" not in text and b"\\ud" not in text.lower():
            raise WireError(f"{what} is no JSON: {error}") from None
        try:
            value = json.loads(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as other:
            raise WireError(f"{what} is no JSON: {other}") from None
        check_depth([value], MAX_DEPTH + 1)
        return _sound(value)
    if type(value) is dict or type(value) is list:
        check_depth(value, MAX_DEPTH)
    return value


def _sound(value: Any) -> Any:
    """The same with U+FFFD for halves of surrogate pairs, which no UTF-8 has."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_sound(item) for item in value]
    return {_sound(key): _sound(item) for key, item in value.items()} if isinstance(value, dict) else value


def row_of(data: bytes | memoryview) -> dict[str, Any]:
    """A JSON object, as a row is one."""
    value = parse(data)
    if type(value) is not dict:
        raise WireError(f"the row is a JSON {type(value).__name__}, expected an object")
    return value


def number(value: Any) -> float | None:
    """A number, or the only one of a list; NaN is one.

    >>> number(True), number([2]), number("3"), number(None)
    (1.0, 2.0, None, None)
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int):
        return float(value) if abs(value) < 2**63 else None
    return value if isinstance(value, float) else None


def whole(value: Any) -> int | None:
    """A whole number of 64 bits.

    >>> whole(3.0), whole("17"), whole(2.5), whole(True)
    (3, 17, None, None)
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


def numbers(values: Any) -> dict[str, float]:
    """Those entries of a dict that are finite numbers, by name.

    >>> numbers({"acc": True, "note": "x", "len": -0.5, "odd": float("nan")})
    {'acc': 1.0, 'len': -0.5}
    """
    if not isinstance(values, dict):
        return {}
    found = {str(name): number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


# --- names ----------------------------------------------------------------------------------------------------------


def in_order(path: str) -> list[Any]:
    """What sorts names by the numbers in them.

    >>> sorted(["10.jsonl", "9.jsonl", "a/2.json"], key=in_order)
    ['9.jsonl', '10.jsonl', 'a/2.json']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _DIGITS.split(path) if part]


def shown(name: str) -> str:
    """A file's name as text, whatever bytes it has."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def inside(root: str, path: str) -> bool:
    """Whether a path, its links followed, is in the folder `root` (which has none)."""
    return os.path.realpath(path).startswith(os.path.join(root, ""))


def listed(root: str) -> tuple[list[str], list[str]]:
    """The files in a folder and in those below it, relative, in order; and those that are links which leave it."""
    real = os.path.realpath(root)
    found: list[str] = []
    strangers: list[str] = []
    for folder, folders, names in os.walk(real):
        below = os.path.relpath(folder, real)
        depth = 0 if below == "." else below.count(os.sep) + 1
        folders[:] = [name for name in folders if not name.startswith(".") and depth + 1 < MAX_FOLDERS]
        for name in names:
            whole_name = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(whole_name):
                continue
            leaves = os.path.islink(whole_name) and not inside(real, whole_name)
            (strangers if leaves else found).append(name if below == "." else os.path.join(below, name))
            if len(found) > MAX_FILES:
                raise WireError(f"{root}: more than {MAX_FILES} files, expected the folder of one run")
    return sorted(found, key=in_order), strangers


def beside(root: str, name: Any) -> str | None:
    """The path of a file that a row names, if it is a plain relative name in the folder `root`."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or os.path.isabs(name) or ":" in name:
        return None
    if ".." in name.split("/"):
        return None
    path = os.path.join(root, name)
    return path if os.path.isfile(path) and inside(os.path.realpath(root), path) else None
