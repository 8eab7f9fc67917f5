"""Free-form values (`info`, messages, tools) as strict JSON that keeps what JSON alone would lose; equality of values.

Invariant: `loads(dumps(value))` equals `value` (see `same`) in every type and bit, or `dumps` raises and names the path
of what cannot be kept. Loading executes nothing that the text names.

Plain values are plain JSON, so that any tool can query them. Everything else is an object with exactly one key that
begins with `$`, a *tag*:

| tag | holds |
|---|---|
| `{"$float": "nan"}` | NaN, `"inf"`, `"-inf"` |
| `{"$int": "-0x1f"}` | an integer outside -2**63 .. 2**64-1, in hexadecimal |
| `{"$text": "ed a0 80"}` | text with lone surrogates, as the hexadecimal of its generalized UTF-8 |
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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from rollbook.core.errors import WireError
from rollbook.core.ragged import check_shape, tensor_bytes, tensor_from_bytes

if TYPE_CHECKING:
    import torch

Json: TypeAlias = Any
"""A free-form value: nested dicts, lists and tuples of what the table above lists."""

MAX_DEPTH = 64
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<>|][iufc][0-9]{1,2}|\|S[0-9]{1,9}|[<>]U[0-9]{1,9}"
    r"|[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_INT64 = 2**63
_MAX_EQUAL_HASHES = 64
_LARGE = sys.float_info.max
_STR = {str}
_FLAT = {str, int, float, bool, type(None)}


class _UnsupportedValueError(Exception):
    """Raised for a value that cannot be encoded; callers add its path."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.path: list[str] = []


def dumps(value: Json, max_depth: int = MAX_DEPTH) -> str:
    """Write a free-form value as JSON text.

    Args:
        value: The value.
        max_depth: Largest nesting.

    Returns:
        The text.

    Raises:
        ValueError: Names the path of what cannot be kept.
    """
    return dump_bytes(value, max_depth)[0].decode()


def dump_bytes(value: Json, max_depth: int = MAX_DEPTH) -> tuple[bytes, bool]:
    """Write a free-form value as UTF-8 JSON.

    Args:
        value: The value.
        max_depth: Largest nesting.

    Returns:
        The text, and whether the value is a flat dict without tags, which a plain JSON parser gives back.
    """
    if type(value) is dict and _STR.issuperset(map(type, value)) and _FLAT.issuperset(map(type, value.values())):
        if not value:
            return b"{}", True
        # Most dicts are flat, which orjson checks faster. A null may have been NaN: those are checked below.
        try:
            text = orjson.dumps(value)
        except TypeError:
            text = b"null"
        if b"null" not in text and (len(value) != 1 or not text.startswith(b'{"$')):
            return text, True
    try:
        return orjson.dumps(_tag(value, max_depth)), False
    except _UnsupportedValueError as error:
        raise ValueError(f"${''.join(reversed(error.path))}: {error.message}") from None


def _tag(value: Json, depth: int) -> Any:
    """Return a value itself if it is plain JSON, else its tagged form."""
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
            raise _UnsupportedValueError("nested too deeply to be kept (or contains itself)")
        return _tag_dict(value, depth - 1) if kind is dict else _tag_items(value, depth - 1)
    if kind is bytes:
        return {"$bytes": _base64(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.shape == () and array[()] != value and value == value:
            raise _UnsupportedValueError(f"numpy drops the zeros at the end of {value!r}, which cannot be kept")
        if array.dtype.names is None and _NUMPY_DTYPE.fullmatch(array.dtype.str):
            described = {"dtype": array.dtype.str, "data": _base64(_array_bytes(array))}
            return (
                {"$array": {**described, "shape": list(array.shape)}} if kind is np.ndarray else {"$scalar": described}
            )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        try:
            encoded = _base64(tensor_bytes(value).tobytes())
            check_shape(dtype, list(value.shape), len(encoded) // 4 * 3 - encoded[-2:].count("="), "tensor")
        except (RuntimeError, TypeError, WireError):
            raise _UnsupportedValueError(
                f"a tensor of dtype {dtype}, layout {value.layout}, on {value.device} cannot be kept"
            ) from None
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": encoded}}
    raise _UnsupportedValueError(f"a value of type {kind.__qualname__} cannot be kept")


def _array_bytes(array: NDArray[Any]) -> bytes:
    """Return the memory of an array, with zeros in the padding of long doubles, where numpy leaves any bytes."""
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        return array.tobytes()
    numbers = np.frombuffer(bytearray(array.tobytes()), np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
    numbers[:, 10:] = 0
    return numbers.tobytes()


def _tag_dict(mapping: dict[Any, Any], depth: int) -> Any:
    changed = False
    plain_keys = True
    tagged: dict[Any, Any] = {}
    for key, entry in mapping.items():
        if type(key) is not str or not (key.isascii() or _is_utf8(key)):
            plain_keys = False
        kind = type(entry)
        if kind is bool or entry is None or (kind is float and -_LARGE < entry < _LARGE):
            tagged[key] = entry
            continue
        try:
            tagged[key] = new = _tag(entry, depth)
        except _UnsupportedValueError as error:
            error.path.append(f".{key}" if isinstance(key, str) else f"[{key!r}]")
            raise
        changed = changed or new is not entry
    if not plain_keys:
        pairs = []
        for key, entry in tagged.items():
            try:
                pairs.append([_tag(key, depth), entry])
            except _UnsupportedValueError as error:
                error.path.append(f"[{key!r}]")
                raise
        return {"$map": pairs}
    if len(mapping) == 1 and next(iter(mapping)).startswith("$"):
        return {"$dict": tagged}
    return tagged if changed else mapping


def _tag_items(sequence: list[Any] | tuple[Any, ...], depth: int) -> Any:
    tagged = []
    changed = False
    for index, entry in enumerate(sequence):
        try:
            tagged.append(new := _tag(entry, depth))
        except _UnsupportedValueError as error:
            error.path.append(f"[{index}]")
            raise
        changed = changed or new is not entry
    if type(sequence) is tuple:
        return {"$tuple": tagged}
    return tagged if changed else sequence


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def loads(text: str, max_depth: int = MAX_DEPTH) -> Any:
    """Read what `dumps` wrote.

    Args:
        text: JSON text.
        max_depth: Largest nesting.

    Returns:
        The value.

    Raises:
        WireError: The text is not what `dumps` writes.
    """
    return loads_many([text], max_depth)[0]


def loads_many(texts: list[str | None], max_depth: int = MAX_DEPTH, prefix: str = "") -> list[Any]:
    """Read many texts as `loads` does.

    Args:
        texts: JSON texts; `None` stays `None`.
        max_depth: Largest nesting.
        prefix: Name of the field for error messages.

    Returns:
        The values.

    Raises:
        WireError: Names the record that is not valid.
    """
    values: list[Any] = []
    parse = orjson.loads
    try:
        for text in texts:
            if text is None:
                values.append(None)
                continue
            parsed = parse(text)
            if '"$' in text or "\\u0024" in text:
                parsed = _untag(parsed, max_depth)
            elif len(text) > 2 * max_depth and text.count("[") + text.count("{") > max_depth:
                # There is nothing to untag, but code that walks the value needs a bounded depth.
                _check_depth(parsed, max_depth)
            values.append(parsed)
    except (WireError, orjson.JSONDecodeError) as error:
        message = error.message if isinstance(error, WireError) else f"a free-form value is not JSON: {error}"
        raise WireError(f"record {len(values)}: {prefix}: {message}" if prefix else message) from None
    return values


def _check_depth(value: Json, depth: int) -> None:
    if isinstance(value, (dict, list)):
        if depth <= 0:
            raise WireError("a free-form value is nested too deeply")
        for entry in value.values() if isinstance(value, dict) else value:
            _check_depth(entry, depth - 1)


def _untag(value: Json, depth: int) -> Any:
    kind = type(value)
    if kind is not dict and kind is not list:
        return value
    if kind is dict and len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag.startswith("$"):
            return _untag_one(tag, content, depth)
    if depth <= 0:
        raise WireError("a free-form value is nested too deeply")
    if kind is list:
        return [_untag(entry, depth - 1) for entry in value]
    return {key: _untag(entry, depth - 1) for key, entry in value.items()}


def _untag_one(tag: str, content: Json, depth: int) -> Any:
    if depth <= 0 and tag in ("$dict", "$tuple", "$map"):
        raise WireError("a free-form value is nested too deeply")
    try:
        if tag == "$dict" and type(content) is dict:
            return {key: _untag(entry, depth - 1) for key, entry in content.items()}
        if tag == "$tuple" and type(content) is list:
            return tuple(_untag(entry, depth - 1) for entry in content)
        if tag == "$map" and type(content) is list:
            return _untag_map(content, depth - 1)
        if tag == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if tag == "$int" and type(content) is str:
            return int(content, 16)
        if tag == "$text" and type(content) is str:
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        if tag == "$bytes" and type(content) is str:
            return binascii.a2b_base64(content, strict_mode=True)
        if tag == "$tensor" and type(content) is dict:
            raw = binascii.a2b_base64(content["data"], strict_mode=True)
            return tensor_from_bytes(content["dtype"], content["shape"], raw, "$tensor")
        if tag in ("$array", "$scalar") and type(content) is dict:
            return _numpy(content, tag)
    except WireError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"the tag {tag} has an invalid value: {error}") from None
    raise WireError(f"the tag {tag!r} is unknown, or cannot have a {type(content).__name__}")


def _untag_map(pairs: list[Any], depth: int) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    hashes: Counter[int] = Counter()
    for key, entry in pairs:
        hashable = _key(_untag(key, depth))
        # A writer can choose numbers with equal hashes, with which filling a dict takes quadratic time.
        hashes[hash(hashable)] += 1
        if hashes[hash(hashable)] > _MAX_EQUAL_HASHES:
            raise WireError(f"a $map has more than {_MAX_EQUAL_HASHES} keys of one hash")
        mapping[hashable] = _untag(entry, depth)
    return mapping


def _key(key: Json) -> Any:
    if isinstance(key, (str, int, float, bytes, type(None), np.generic)):
        return key
    if isinstance(key, tuple):
        return tuple(_key(part) for part in key)
    raise WireError(f"a value of type {type(key).__name__} cannot be a dict key")


def _numpy(content: dict[str, Any], tag: str) -> Any:
    if not isinstance(content["dtype"], str) or not _NUMPY_DTYPE.fullmatch(content["dtype"]):
        raise WireError(f"{tag}: dtype {content['dtype']!r} is unknown")
    dtype = np.dtype(content["dtype"])
    if dtype.itemsize == 0:
        raise WireError(f"{tag}: dtype {content['dtype']!r} has no bytes")
    raw = binascii.a2b_base64(content["data"], strict_mode=True)
    shape = content["shape"] if tag == "$array" else []
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"{tag}: got shape {shape!r}, expected a list of sizes")
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**62:
        raise WireError(f"{tag}: shape {shape!r} is larger than any array")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise WireError(f"{tag}: {content['dtype']} of shape {shape} does not take {len(raw)} bytes")
    array = np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise WireError(f"{tag}: a bool that is neither 0 nor 1")
    if dtype.kind == "U" and array.size:
        characters = np.frombuffer(raw, dtype=f"{content['dtype'][0]}u4")
        if characters.max() > sys.maxunicode:
            raise WireError(f"{tag}: text with a code beyond Unicode")
    return array[()] if tag == "$scalar" else array


# --- equality ------------------------------------------------------------------------------------------------------


def same(a: Json, b: Json) -> bool:
    """Return whether two values are equal: tensors and arrays by type, shape and value, NaN equal to NaN.

    Args:
        a: A value.
        b: Another value.

    >>> same({"a": [float("nan"), (1, 2)]}, {"a": [float("nan"), (1, 2)]}), same([1], (1,))
    (True, False)
    """
    if a is b:
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _same_tensors(a, b)
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        return _same_arrays(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        if len(a) != len(b):
            return False
        if all(key in b for key in a):
            return all(same(entry, b[key]) for key, entry in a.items())
        # NaN keys cannot be looked up: compare in order.
        return all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    equal = a == b
    return equal if isinstance(equal, bool) else False


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta or b.is_meta or a.layout != b.layout:
        return False
    if str(a.layout) != "torch.strided":
        a, b = a.to_dense(), b.to_dense()

    if not (a.is_floating_point() or a.is_complex()):
        return bool((a.detach().cpu() == b.detach().cpu()).all())
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.element_size() == 1:
        a, b = a.float(), b.float()  # 8-bit floats have no arithmetic of their own
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same_arrays(a: Json, b: Json) -> bool:
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = np.asarray(a == b)
    if a.dtype.kind in "fcmM":
        equal = equal | ((a != a) & (b != b))
    return bool(equal.all())
