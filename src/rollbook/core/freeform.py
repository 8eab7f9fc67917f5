"""Free-form values (`info`, messages, tools) as strict JSON that keeps what JSON alone would lose.

Invariant: `loads(dumps(value))` equals `value` in every type and bit that Python can tell apart, or `dumps` raises
and names the path of what cannot be kept. Loading calls nothing on the text's word.

Plain values are plain JSON, so that any tool can query them. Everything else is an object with exactly one key that
begins with `$`, a *tag*:

| tag | holds |
|---|---|
| `{"$float": "nan"}` | NaN, `"inf"`, `"-inf"` |
| `{"$int": "-0x1f"}` | an integer outside -2**63 .. 2**64-1, in hexadecimal |
| `{"$text": "ed a0 80"}` | text with lone surrogates, as the hexadecimal of its generalised UTF-8 |
| `{"$bytes": "AAEC"}` | bytes, in base64 |
| `{"$tuple": [...]}` | a tuple |
| `{"$map": [[key, value], ...]}` | a dict with a key that is not text, or is text with lone surrogates |
| `{"$dict": {...}}` | the escape: a user's dict whose only key begins with `$` |
| `{"$tensor": {"dtype", "shape", "data"}}` | a torch tensor; dtype by torch's name, elements in base64 |
| `{"$array": {"dtype", "shape", "data"}}` | a numpy array; dtype as numpy writes it, such as `<f4` |
| `{"$scalar": {"dtype", "data"}}` | a numpy scalar |

>>> dumps({"a": (1, float("nan")), "b": [True, None, -0.0]})
'{"a":{"$tuple":[1,{"$float":"nan"}]},"b":[true,null,-0.0]}'
>>> loads(_)
{'a': (1, nan), 'b': [True, None, -0.0]}
>>> dumps({"$int": "mine"})
'{"$dict":{"$int":"mine"}}'
>>> dumps({"turns": [{"image": object()}]})
Traceback (most recent call last):
    ...
ValueError: $.turns[0].image: a value of type object cannot be kept
"""

from __future__ import annotations

import binascii
import math
import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import orjson

from rollbook.core.errors import WireError
from rollbook.core.ragged import check_shape, tensor_bytes, tensor_from_bytes

MAX_DEPTH = 64
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<>|][iufc][0-9]{1,2}|\|S[0-9]{1,9}|[<>]U[0-9]{1,9}"
    r"|[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_INT64 = 2**63
_SAME_HASH = 64
_LARGE = sys.float_info.max
_STR = {str}
_FLAT = {str, int, float, bool, type(None)}


class _CannotKeep(Exception):
    """Raised where the value is, given its path on the way out."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.path: list[str] = []


def dumps(value: Any, max_depth: int = MAX_DEPTH) -> str:
    """The JSON text of `value`; `ValueError` with the path of what cannot be kept."""
    return dump_bytes(value, max_depth)[0].decode()


def dump_bytes(value: Any, max_depth: int = MAX_DEPTH) -> tuple[bytes, bool]:
    """`dumps` as UTF-8, and whether `value` is a flat dict that needs no tags: JSON's parser gives it back."""
    if type(value) is dict and _STR.issuperset(map(type, value)) and _FLAT.issuperset(map(type, value.values())):
        if not value:
            return b"{}", True
        # A flat dict, what most are, is checked at the speed of C. A null may have been NaN: look again below.
        try:
            text = orjson.dumps(value)
        except TypeError:
            text = b"null"
        if b"null" not in text and (len(value) != 1 or not text.startswith(b'{"$')):
            return text, True
    try:
        return orjson.dumps(_tag(value, max_depth)), False
    except _CannotKeep as error:
        raise ValueError(f"${''.join(reversed(error.path))}: {error.message}") from None


def _tag(value: Any, depth: int) -> Any:
    """`value` itself where it is plain JSON, else its tagged form."""
    kind = type(value)
    if kind is str:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"$text": value.encode("utf-8", "surrogatepass").hex(" ")}
        return value
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -_INT64 <= value < 2 * _INT64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is dict or kind is list or kind is tuple:
        if depth <= 0:
            raise _CannotKeep("nested too deeply to be kept (or holds itself)")
        return _tag_dict(value, depth - 1) if kind is dict else _tag_items(value, depth - 1)
    if kind is bytes:
        return {"$bytes": _base64(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.shape == () and array[()] != value and value == value:
            raise _CannotKeep(f"numpy drops the zeros at the end of {value!r}, which cannot be kept")
        if array.dtype.names is None and _NUMPY_DTYPE.fullmatch(array.dtype.str):
            held = {"dtype": array.dtype.str, "data": _base64(array.tobytes())}
            return {"$array": {**held, "shape": list(array.shape)}} if kind is np.ndarray else {"$scalar": held}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        try:
            data = _base64(tensor_bytes(value).tobytes())
            check_shape(dtype, list(value.shape), len(data) // 4 * 3 - data[-2:].count("="), "tensor")
        except (RuntimeError, TypeError, WireError):
            raise _CannotKeep(
                f"a tensor of dtype {dtype}, layout {value.layout}, on {value.device} cannot be kept"
            ) from None
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}
    raise _CannotKeep(f"a value of type {kind.__qualname__} cannot be kept")


def _tag_dict(value: dict[Any, Any], depth: int) -> Any:
    changed = False
    plain_keys = True
    tagged: dict[Any, Any] = {}
    for key, item in value.items():
        if type(key) is not str or not (key.isascii() or _is_utf8(key)):
            plain_keys = False
        kind = type(item)
        if kind is bool or item is None or (kind is float and -_LARGE < item < _LARGE):
            tagged[key] = item
            continue
        try:
            tagged[key] = new = _tag(item, depth)
        except _CannotKeep as error:
            error.path.append(f".{key}" if isinstance(key, str) else f"[{key!r}]")
            raise
        changed = changed or new is not item
    if not plain_keys:
        pairs = []
        for key, item in tagged.items():
            try:
                pairs.append([_tag(key, depth), item])
            except _CannotKeep as error:
                error.path.append(f"[{key!r}]")
                raise
        return {"$map": pairs}
    if len(value) == 1 and next(iter(value)).startswith("$"):
        return {"$dict": tagged}
    return tagged if changed else value


def _tag_items(value: list[Any] | tuple[Any, ...], depth: int) -> Any:
    tagged = []
    changed = False
    for index, item in enumerate(value):
        try:
            tagged.append(new := _tag(item, depth))
        except _CannotKeep as error:
            error.path.append(f"[{index}]")
            raise
        changed = changed or new is not item
    if type(value) is tuple:
        return {"$tuple": tagged}
    return tagged if changed else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def loads(text: str, max_depth: int = MAX_DEPTH) -> Any:
    """The value that `dumps` made `text` of; `WireError` for anything it cannot have made."""
    return loads_many([text], max_depth)[0]


def loads_many(texts: list[str | None], max_depth: int = MAX_DEPTH, where: str = "") -> list[Any]:
    """`loads` of each text, `None` of `None`; an error names the record, and the field if `where` does."""
    values: list[Any] = []
    try:
        _load_into(values, texts, max_depth)
    except WireError as error:
        if not where:
            raise
        raise WireError(f"record {len(values)}: {where}: {error.message}") from None
    return values


def _load_into(values: list[Any], texts: list[str | None], max_depth: int) -> None:
    parse = orjson.loads
    for text in texts:
        if text is None:
            values.append(None)
            continue
        try:
            value = parse(text)
        except orjson.JSONDecodeError as error:
            raise WireError(f"a free-form value is no JSON: {error}") from None
        if '"$' in text or "\\u0024" in text:
            value = _untag(value, max_depth)
        elif len(text) > 2 * max_depth and text.count("[") + text.count("{") > max_depth:
            # Nothing to untag; the depth still has to be bounded for whoever walks the value next.
            _check_depth(value, max_depth)
        values.append(value)


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, (dict, list)):
        if depth <= 0:
            raise WireError("a free-form value is nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


def _untag(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is not dict and kind is not list:
        return value
    if kind is dict and len(value) == 1:
        tag, held = next(iter(value.items()))
        if tag.startswith("$"):
            return _untag_one(tag, held, depth)
    if depth <= 0:
        raise WireError("a free-form value is nested too deeply")
    if kind is list:
        return [_untag(item, depth - 1) for item in value]
    return {key: _untag(item, depth - 1) for key, item in value.items()}


def _untag_one(tag: str, held: Any, depth: int) -> Any:
    if depth <= 0 and tag in ("$dict", "$tuple", "$map"):
        raise WireError("a free-form value is nested too deeply")
    try:
        if tag == "$dict" and type(held) is dict:
            return {key: _untag(item, depth - 1) for key, item in held.items()}
        if tag == "$tuple" and type(held) is list:
            return tuple(_untag(item, depth - 1) for item in held)
        if tag == "$map" and type(held) is list:
            return _untag_map(held, depth - 1)
        if tag == "$float" and held in ("nan", "inf", "-inf"):
            return float(held)
        if tag == "$int" and type(held) is str:
            return int(held, 16)
        if tag == "$text" and type(held) is str:
            return bytes.fromhex(held).decode("utf-8", "surrogatepass")
        if tag == "$bytes" and type(held) is str:
            return binascii.a2b_base64(held, strict_mode=True)
        if tag == "$tensor" and type(held) is dict:
            data = binascii.a2b_base64(held["data"], strict_mode=True)
            return tensor_from_bytes(held["dtype"], held["shape"], data, "$tensor")
        if tag in ("$array", "$scalar") and type(held) is dict:
            return _numpy(held, tag)
    except WireError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"the tag {tag} holds what it cannot: {error}") from None
    raise WireError(f"the tag {tag!r} is unknown, or holds a {type(held).__name__}, which it cannot")


def _untag_map(pairs: list[Any], depth: int) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    hashes: Counter[int] = Counter()
    for key, item in pairs:
        found = _key(_untag(key, depth))
        # Whoever writes numbers can choose their hashes, and a dict of equal ones takes quadratic time to fill.
        hashes[hash(found)] += 1
        if hashes[hash(found)] > _SAME_HASH:
            raise WireError(f"a $map has more than {_SAME_HASH} keys of one hash")
        made[found] = _untag(item, depth)
    return made


def _key(key: Any) -> Any:
    if isinstance(key, (str, int, float, bytes, type(None), np.generic)):
        return key
    if isinstance(key, tuple):
        return tuple(_key(part) for part in key)
    raise WireError(f"a dict key of type {type(key).__name__} cannot be one")


def _numpy(held: dict[str, Any], tag: str) -> Any:
    if not isinstance(held["dtype"], str) or not _NUMPY_DTYPE.fullmatch(held["dtype"]):
        raise WireError(f"{tag}: dtype {held['dtype']!r} is unknown")
    dtype = np.dtype(held["dtype"])
    if dtype.itemsize == 0:
        raise WireError(f"{tag}: dtype {held['dtype']!r} has no bytes")
    data = binascii.a2b_base64(held["data"], strict_mode=True)
    shape = held["shape"] if tag == "$array" else []
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"{tag}: shape {shape!r} is no list of sizes")
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**62:
        raise WireError(f"{tag}: shape {shape!r} is larger than any array")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"{tag}: {held['dtype']} of shape {shape} does not take {len(data)} bytes")
    array = np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise WireError(f"{tag}: a bool that is neither 0 nor 1")
    if dtype.kind == "U" and array.size:
        characters = np.frombuffer(data, dtype=f"{held['dtype'][0]}u4")
        if characters.max() > sys.maxunicode:
            raise WireError(f"{tag}: text of what is no character")
    return array[()] if tag == "$scalar" else array
