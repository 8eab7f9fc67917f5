"""Strict JSON (`json_safe`, `as_json`), and the binary frames in which trajectories are sent to a browser.

`encode` writes a frame: a JSON header, followed by aligned arrays ("blobs").

    [u32: bytes of header][JSON, padded with spaces so that the blobs begin at a multiple of 8][blobs]

Offsets in the header are relative to its end. Blobs are little-endian and aligned to 8 bytes: `text` in UTF-8; `widths`
[L], the length of each token in UTF-16 code units, as in JavaScript's strings; `flags` [L], with bit 0 for the mask and
bit 1 for special tokens; `ids` and `versions` [L]; and `array:NAME` [L]. L is `tokens` in the header.

Invariant: `json.dumps(json_safe(value), allow_nan=False).encode()` works for every value, in linear time and space,
without running code of the value. `decode(encode(trajectories))` returns every field, as far as JSON can represent it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollbook.core.errors import WireError
from rollbook.inspect.trajectory import KINDS, ROLES, Json, Segment, Trajectory

MAX_DEPTH = 64
MAX_ELEMENTS = 1 << 20
"""Maximum number of array elements that are written out."""
_MAX_EXACT_INT = 2**53
"""Largest integer that JavaScript represents exactly."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_DATA_URL = 256
"""Maximum number of characters of a `data:` URL that are written out."""


def replace_surrogates(value: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD.

    >>> replace_surrogates("a" + chr(0xd800))
    'a\ufffd'
    """
    return value if value.isascii() else _SURROGATES.sub("\ufffd", value)


def finite_or_none(value: float | None) -> float | None:
    """Return a finite number, or `None`.

    >>> finite_or_none(float("nan")), finite_or_none(0.5)
    (None, 0.5)
    """
    return float(value) if value is not None and math.isfinite(value) else None


def json_safe(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Convert a value to strict JSON.

    Non-finite numbers become `null`, integers that JavaScript would round become text, and bytes and other values
    without a JSON form become a description.

    >>> json_safe({"a": (1, float("nan")), 2: b"abc", "c": np.arange(3), "d": 2**60})
    {'a': [1, None], '2': '⟨3 bytes⟩', 'c': [0, 1, 2], 'd': '1152921504606846976'}
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        if len(value) > _MAX_DATA_URL and value.startswith("data:"):
            return f"{replace_surrogates(value[: value.find(',') + 1 or 64][:_MAX_DATA_URL])}⟨{len(value)} characters⟩"
        return replace_surrogates(str(value))
    if isinstance(value, int):
        return int(value) if -_MAX_EXACT_INT <= value <= _MAX_EXACT_INT else _format_int(value)
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"⟨{len(value)} bytes⟩"
    if isinstance(value, np.generic):
        return json_safe(value.item(), depth) if value.dtype.kind in "biufUS" else f"⟨{value.dtype}⟩"
    if depth <= 0:
        return "⟨nested too deeply⟩"
    if isinstance(value, Mapping):
        return {
            replace_surrogates(key if isinstance(key, str) else str(json_safe(key, 2))): json_safe(v, depth - 1)
            for key, v in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item, depth - 1) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = [int(size) for size in value.shape]
        if math.prod(shape) > MAX_ELEMENTS or str(value.dtype) in ("object", "complex64", "complex128"):
            return f"⟨{value.dtype} {shape}⟩"
        return json_safe(value.tolist(), depth - 1)
    return f"⟨{type(value).__name__}⟩"


def _format_int(value: int) -> str:
    # Python rejects conversion of very long integers to decimal.
    return str(int(value)) if value.bit_length() < 1024 else hex(value)


def as_json(value: Any) -> bytes:
    """Encode a value as strict JSON: non-finite numbers as null, lone surrogates as U+FFFD.

    >>> as_json({"reward": float("nan"), "text": "\\ud800"}).decode()
    '{"reward":null,"text":"�"}'
    """
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        return orjson.dumps(json_safe(value))


# --- frames ---------------------------------------------------------------------------------------------------------

VERSION = 1
TYPES = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "i4": "<i4", "f4": "<f4", "f2": "<f2"}
MASK, SPECIAL = 1, 2
_LENGTH = struct.Struct("<I")
_ALIGN = 8
_SEPARATE_FIELDS = {"text", "ends", "ids", "special", "mask", "versions", "arrays", "segments", "rejected", "pictures"}
"""Fields that are not stored in the header directly."""
_HEADER_FIELDS = [field.name for field in dataclasses.fields(Trajectory) if field.name not in _SEPARATE_FIELDS]
_MAX_FLOAT16 = 65504.0
"""Largest float16."""


class _Blobs:
    """Collects the blobs of a frame. `put` and `array` return the header's entry: [offset, bytes, type]."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def put(self, data: bytes) -> list[Any]:
        entry = [self.size, len(data)]
        padding = -len(data) % _ALIGN
        self.parts += [data, bytes(padding)]
        self.size += len(data) + padding
        return entry

    def array(self, values: NDArray[Any], kind: str) -> list[Any]:
        return [*self.put(np.ascontiguousarray(values, dtype=TYPES[kind]).tobytes()), kind]


def encode(trajectories: Sequence[Trajectory], dtype: str = "f4") -> bytes:
    """Encode trajectories as one frame.

    `prompt_text` and `response_text` are omitted if the tokens give the exact text.

    Args:
        trajectories: Trajectories to encode.
        dtype: Type of the arrays: `f4`, or `f2` for smaller files.

    >>> trajectory = Trajectory(uid="1/2/0/0/a", text="né", ends=np.array([1, 2]), reward=float("nan"))
    >>> decoded, = decode(encode([trajectory]))
    >>> decoded["uid"], decoded["text"], decoded["widths"].tolist(), decoded["reward"]
    ('1/2/0/0/a', 'né', [1, 1], None)
    """
    if dtype not in ("f4", "f2"):
        raise ValueError(f"dtype: got {dtype!r}, expected 'f4' or 'f2'")
    blobs = _Blobs()
    header = orjson.dumps(
        {
            "version": VERSION,
            "trajectories": [_encode_trajectory(trajectory, blobs, dtype) for trajectory in trajectories],
        }
    )
    header += b" " * (-(len(header) + _LENGTH.size) % _ALIGN)
    return b"".join((_LENGTH.pack(len(header)), header, *blobs.parts))


def utf16_ends(text: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert offsets `ends` [L] in a text from characters to UTF-16 code units.

    >>> utf16_ends("a😀b", np.array([1, 2, 3])).tolist()
    [1, 3, 4]
    """
    if text.isascii():
        return ends
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    units: NDArray[np.int64] = np.concatenate([[0], np.cumsum(1 + (points > 0xFFFF))])
    return units[ends]


def _encode_trajectory(trajectory: Trajectory, blobs: _Blobs, dtype: str) -> dict[str, Any]:
    ends = np.asarray(trajectory.ends, dtype=np.int64)
    widths = np.diff(utf16_ends(trajectory.text, ends), prepend=0)
    widest = int(widths.max(initial=0))
    flags = (
        np.asarray(trajectory.mask, dtype=np.uint8) * MASK + np.asarray(trajectory.special, dtype=np.uint8) * SPECIAL
    )
    places = {
        "text": blobs.put(replace_surrogates(trajectory.text).encode()),
        "widths": blobs.array(widths, "u1" if widest < 1 << 8 else "u2" if widest < 1 << 16 else "u4"),
        "flags": blobs.array(flags, "u1"),
    }
    if trajectory.ids is not None:
        # Some models have negative placeholder ids.
        places["ids"] = blobs.array(trajectory.ids, "i4" if trajectory.ids.min(initial=0) < 0 else "u4")
    if trajectory.versions is not None:
        places["versions"] = blobs.array(np.clip(trajectory.versions, -1, 2**31 - 1), "i4")
    for name, values in trajectory.arrays.items():
        if dtype == "f2":
            values = np.where(np.isfinite(values), np.clip(values, -_MAX_FLOAT16, _MAX_FLOAT16), values)
        places[f"array:{name}"] = blobs.array(values, dtype)
    fields = {name: json_safe(getattr(trajectory, name)) for name in _HEADER_FIELDS}
    if trajectory.tokenized == "exact":
        fields["prompt_text"] = fields["response_text"] = None
    return fields | {
        "tokens": trajectory.tokens,
        "segments": [[*(json_safe(entry) for entry in segment)] for segment in trajectory.segments],
        "pictures": [dataclasses.asdict(picture) for picture in trajectory.pictures],
        "rejected": None if trajectory.rejected is None else _encode_trajectory(trajectory.rejected, blobs, dtype),
        "blobs": places,
    }


def decode(data: bytes) -> list[dict[str, Any]]:
    """Decode a frame, in tests and tools. The viewer's JavaScript has its own decoder.

    Returns:
        Per trajectory the fields of the header, and `text`, `widths` [L], `ends` [L] (in characters), `mask`,
        `special`, `ids`, `versions` and `arrays`.

    Raises:
        WireError: If the data is not a frame.
    """
    if len(data) < _LENGTH.size:
        raise WireError(f"truncated frame: {len(data)} bytes, expected {_LENGTH.size} and a header", 0)
    (size,) = _LENGTH.unpack_from(data)
    base = _LENGTH.size + size
    if base > len(data) or base % _ALIGN:
        raise WireError(f"a header of {size} bytes does not fit a frame of {len(data)}", 0)
    try:
        header = json.loads(data[_LENGTH.size : base].decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"frame header: not strict JSON: {error}", _LENGTH.size) from None
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise WireError(f"frame header: expected version {VERSION}", _LENGTH.size)
    listed = header.get("trajectories")
    if not isinstance(listed, list):
        raise WireError("frame header: no list of trajectories", _LENGTH.size)
    return [_decode_trajectory(entry, memoryview(data)[base:]) for entry in listed]


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _decode_trajectory(entry: Json, blobs: memoryview, nested: bool = False) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("blobs"), dict):
        raise WireError("frame: a trajectory has no description")
    length = entry.get("tokens")
    if type(length) is not int or not 0 <= length <= len(blobs):
        raise WireError(f"frame: {length!r} tokens do not fit")
    places: dict[str, Any] = dict(entry["blobs"])
    text = _read_blob("text", places.pop("text", None), blobs, None)
    fields: dict[str, Any] = {name: value for name, value in entry.items() if name != "blobs"}
    arrays = {name: _read_array(name, blob_range, blobs, length) for name, blob_range in places.items()}
    try:
        fields["text"] = bytes(text).decode()
        widths, flags = arrays.pop("widths"), arrays.pop("flags")
    except (UnicodeDecodeError, KeyError) as error:
        raise WireError(f"frame: a trajectory has no text, widths or flags: {error}") from None
    fields["widths"] = widths.astype(np.int64)
    fields["mask"], fields["special"] = flags & MASK > 0, flags & SPECIAL > 0
    fields["ids"], fields["versions"] = arrays.pop("ids", None), arrays.pop("versions", None)
    fields["arrays"] = {name.removeprefix("array:"): array for name, array in arrays.items()}
    fields["ends"] = _character_ends(fields["text"], np.cumsum(fields["widths"]))
    fields["segments"] = [_decode_segment(segment) for segment in entry.get("segments") or ()]
    if entry.get("rejected") is not None:
        if nested:
            raise WireError("frame: a rejected answer has a rejected answer")
        fields["rejected"] = _decode_trajectory(entry["rejected"], blobs, nested=True)
    return fields


def _read_blob(name: str, blob_range: Json, blobs: memoryview, kind: str | None) -> memoryview:
    if not isinstance(blob_range, list) or len(blob_range) != (2 if kind is None else 3):
        raise WireError(f"frame: blob {name!r} has no offset and size")
    start, size = blob_range[:2]
    if type(start) is not int or type(size) is not int or start < 0 or size < 0 or start + size > len(blobs):
        raise WireError(f"frame: blob {name!r} at {blob_range[:2]} is outside of {len(blobs)} bytes")
    if start % _ALIGN:
        raise WireError(f"frame: blob {name!r} starts at {start}, expected a multiple of {_ALIGN}")
    return blobs[start : start + size]


def _read_array(name: str, blob_range: Json, blobs: memoryview, length: int) -> NDArray[Any]:
    kind = blob_range[2] if isinstance(blob_range, list) and len(blob_range) == 3 else None
    if not isinstance(kind, str) or kind not in TYPES:
        raise WireError(f"frame: blob {name!r} has type {kind!r}, expected one of {', '.join(TYPES)}")
    data = _read_blob(name, blob_range, blobs, kind)
    dtype = np.dtype(TYPES[kind])
    if len(data) != length * dtype.itemsize:
        raise WireError(f"frame: blob {name!r} has {len(data)} bytes, expected {length} numbers of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _character_ends(text: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert offsets `ends` [L] in a text from UTF-16 code units to characters."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    units = np.concatenate([[0], np.cumsum(1 + (points > 0xFFFF))])
    characters = np.searchsorted(units, ends)
    if (ends[-1] if len(ends) else 0) != units[-1] or (units[characters] != ends).any():
        raise WireError("frame: the token widths do not add up to the text")
    return characters.astype(np.int64)


def _decode_segment(segment: Sequence[Any]) -> Segment:
    try:
        parsed = Segment(*segment)
    except TypeError as error:
        raise WireError(f"frame: bad segment {str(segment)[:80]}: {error}") from None
    if parsed.role not in ROLES or parsed.kind not in KINDS:
        raise WireError(f"frame: unknown role {parsed.role!r} or kind {parsed.kind!r} of a segment")
    return parsed
