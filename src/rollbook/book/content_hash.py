"""Content hashes and printed ids of records, computed on columns without building records.

Invariant: `tid` and `uid` equal those of `EID` for the same parts. Two records have the same hash if and only if they
are equal, regardless of the layout of their columns.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_128_digest as hash128

from rollbook.core import columns as arrow
from rollbook.core import freeform
from rollbook.core.columns import Column, EidParts, Values, numbers, texts
from rollbook.core.errors import WireError
from rollbook.core.fields import BY_CODE, DTYPES, Field, owner
from rollbook.core.freeform import Json
from rollbook.core.ragged import Ragged, check_shape

if TYPE_CHECKING:
    from rollbook.core.experiences import Experiences
    from rollbook.core.wire import RowLayout


class Ids(NamedTuple):
    """The parts of each record's id, and what `EID.tid` and `EID.uid` print of them."""

    batch: list[str]
    task: list[str]
    run: list[int]
    step: list[int]
    suffix: list[str]
    tid: list[str]
    uid: list[str]


def printed_ids(column: pa.StructArray | EidParts) -> Ids:
    """Return the ids of a column; batches and tasks that are numbers become text.

    >>> from rollbook import EID, Experience, Experiences
    >>> eid = EID(batch="10/eval", task=3, run=1, suffix="a")
    >>> printed_ids(Experiences([Experience(eid=eid, tokens=[1, 2])]).column("eid")).uid, eid.uid
    (['10%2Feval/3/1/0/a'], '10%2Feval/3/1/0/a')
    """
    if isinstance(column, EidParts):
        batch, task, run, step, suffix = column
    else:
        strings: list[Any] = [texts(column.field(i)) for i in (0, 1, 4)]
        run, step = numbers(column.field(2)), numbers(column.field(3))
        flags = column.field(5).to_numpy()
        batch, task, suffix = _print_parts(strings[0], flags & 1), _print_parts(strings[1], flags & 2), strings[2]
    escaped = []
    for parts in (batch, task, suffix):
        joined = "".join(parts)
        if "%" in joined or "/" in joined:
            parts = [part.replace("%", "%25").replace("/", "%2F") for part in parts]
        escaped.append(parts)
    tid = [f"{a}/{b}" for a, b in zip(escaped[0], escaped[1], strict=True)]
    uid = [f"{t}/{r}/{s}/{x}" for t, r, s, x in zip(tid, run, step, escaped[2], strict=True)]
    return Ids(batch, task, run, step, suffix, tid, uid)


def _print_parts(parts: list[str], are_numbers: NDArray[np.integer[Any]]) -> list[str]:
    """Write parts that are marked as numbers in their canonical form: a foreign writer's "01" is the number 1."""
    if not are_numbers.any():
        return parts
    parts = list(parts)
    printed: dict[str, str] = {}  # A batch has few distinct tasks.
    for i in np.flatnonzero(are_numbers).tolist():
        text = parts[i]
        if text not in printed:
            try:
                printed[text] = str(int(text))
            except ValueError as error:
                raise WireError(f"eid: a part is marked as a number but is not one: {error}") from None
        parts[i] = printed[text]
    return parts


_CORE_SALT = b"rollbook core 1\0"
_FULL_SALT = b"rollbook whole 1\0"
_ABSENT = b""
_CACHED_BYTES = 64
"""Hashes of free-form texts below this size are cached, since many records have the same (such as `{}`)."""
_INTEGER, _NUMBER = struct.Struct("<qq"), struct.Struct("<dq")
_SORTED = orjson.OPT_SORT_KEYS
_CANONICAL_TYPES = frozenset((str, int, type(None)))
_NAN_BITS = {"float16": (0x7C00, 0x7E00), "bfloat16": (0x7F80, 0x7FC0)}
"""Bits of infinity and of the canonical NaN, for types that numpy lacks or handles slowly."""


class ContentHashes(NamedTuple):
    """One pair of 16-byte digests per record."""

    full: list[bytes]
    """Of all fields: equal if and only if the records are."""
    core: list[bytes]
    """Of all fields but late ones (see `is_late`): equal if one record may be the other with late fields added."""

    def take(self, indices: Iterable[int]) -> ContentHashes:
        """Return the hashes of the records at `indices`."""
        chosen = list(indices)
        return ContentHashes([self.full[i] for i in chosen], [self.core[i] for i in chosen])


def is_late(field: Field) -> bool:
    """Return whether a field may be added to a record that is already in a book.

    Late fields are computed after sampling: numbers (`reward`), floats per response token (`advantages`, `returns`, a
    teacher's log-probs, weights), and the dicts that every record has (`info`, `metrics`). All other
    fields describe the sample and how it was drawn, including `logprobs`, which the engine returns with the tokens.
    Declared fields follow the same rule.

    >>> from rollbook.core.fields import FIELDS
    >>> [name for name, field in FIELDS.items() if is_late(field)]  # doctest: +NORMALIZE_WHITESPACE
    ['reward', 'token_level_reward', 'advantages', 'returns', 'info', 'metrics', 'teacher_logprobs', 'loss_weights',
     'old_logprobs', 'ref_logprobs', 'entropy', 'values']
    """
    if field.kind == "tensor":
        return (
            field.axis == "response"
            and field.dtype.endswith(("float16", "float32", "float64"))
            and (field.name != "logprobs")
        )
    return field.kind == "number" or (field.kind == "json" and field.always)


def content_hashes(records: Experiences | RowLayout, ids: Ids | None = None) -> ContentHashes:
    """Hash every record.

    Args:
        records: The records.
        ids: Their printed ids, if they were computed already.

    >>> from rollbook import Experience, Experiences
    >>> record = Experience(eid={"batch": 1, "task": 2, "suffix": "a"}, tokens=[1, 2, 3], info={"a": 1, "b": 2})
    >>> other = Experience(tokens=[1, 2, 3], reward=1.0, policy_versions=3)
    >>> alone, joined = content_hashes(Experiences([record])), content_hashes(Experiences([other, record]))
    >>> alone.full[0] == joined.full[1], alone.full[0].hex()
    (True, '0d14085f88b1b4d5b088912f5eb41e0d')
    >>> scored = content_hashes(Experiences([record.replace(reward=0.5)]))
    >>> scored.core == alone.core, scored.full == alone.full
    (True, False)
    """
    count, columns = len(records), records.columns
    core: list[Iterable[bytes]] = [[_CORE_SALT] * count]
    late: list[Iterable[bytes]] = []
    fields: dict[str, Field] = {}
    unknown: dict[str, Column] = {}
    for name, column in columns.items():
        entry = owner(name)
        if entry is None:
            unknown[name] = column
        else:
            fields[entry[0].name] = entry[0]
    with np.errstate(all="ignore"):
        for name, field in sorted(fields.items()):
            if field.kind == "eid":
                ids = ids or printed_ids(columns[name])
                head = _hash_name(name, "uid")
                hashes = [head + hash128(uid.encode()) for uid in ids.uid]
            elif field.kind in ("number", "integer"):
                hashes = _hash_scalars(name, field.kind, columns[name])
            else:
                hashes = _HASHERS[field.kind](field, columns)
            (late if is_late(field) else core).append(hashes)
    for name, array in sorted(arrow.to_arrays(unknown).items()) if unknown else ():
        core.append(_hash_unknown(name, array))
    join = b"".join
    cores = [hash128(join(row)) for row in zip(*core, strict=True)]
    return ContentHashes([hash128(join(row)) for row in zip([_FULL_SALT] * count, cores, *late, strict=True)], cores)


@lru_cache(4096)
def _hash_name(name: str, form: str) -> bytes:
    data = name.encode("utf-8", "surrogatepass")
    return hash128(struct.pack("<I", len(data)) + data + form.encode())


def _describe_tensor(dtype: str, shape: tuple[int, ...]) -> str:
    if not shape:
        return f"tensor {dtype}"
    first = shape[0] if 0 in shape[1:] else "*"
    return f"tensor {dtype} {','.join(map(str, (first, *shape[1:])))}"


@lru_cache(4096)
def _hash_rows_name(name: str, dtype: str, trailing: tuple[int, ...]) -> bytes:
    """Return the head of a column's rows, whose first dimension follows from their size in bytes."""
    return _hash_name(name, _describe_tensor(dtype, (0, *trailing)))


def _first_present(candidates: Sequence[list[bytes]]) -> list[bytes]:
    """Return the entry of the main column, or else of a side column, as `columns.decode` does."""
    entries, *sides = candidates
    for side in sides:
        entries = [a or b for a, b in zip(entries, side, strict=True)]
    return entries


# --- tensors --------------------------------------------------------------------------------------------------------


def canonical_floats(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return elements with one canonical NaN and zero; the same array if nothing changes.

    >>> canonical_floats(np.array([-0.0, 1.5]), "float64").tolist()
    [0.0, 1.5]
    """
    if not values.size:
        return values
    if dtype in ("float32", "float64"):
        # As an integer, -0.0 is the smallest of all bit patterns.
        least = values.view(f"int{dtype[-2:]}").min()
        if least != -(2 ** (8 * values.itemsize - 1)) and not np.isnan(values.min()):
            return values
        cleaned: NDArray[Any] = values + values.dtype.type(0)
        cleaned[np.isnan(cleaned)] = np.nan
        return cleaned
    if dtype in _NAN_BITS:
        infinity, nan = _NAN_BITS[dtype]
        bits = values.view(np.uint16)
        size = bits & 0x7FFF
        changed = (size > infinity) | (bits == 0x8000)
        return np.where(changed, np.where(size > infinity, nan, 0), bits).astype(np.uint16) if changed.any() else values
    if dtype.startswith("complex"):
        parts = values.view(f"float{4 * DTYPES[dtype].itemsize}").reshape(-1, 2) + 0
        parts[np.isnan(parts).any(axis=1)] = np.nan  # complex numbers with a NaN part are equal
        return np.asarray(parts).reshape(-1)
    if dtype.startswith("float8"):
        return _float8_table(dtype)[values.view(np.uint8)]
    return values


@lru_cache
def _float8_table(dtype: str) -> NDArray[np.uint8]:
    """Return a table of the canonical byte of each byte; types without signed zero have one NaN anyway."""
    table = np.arange(256, dtype=np.uint8)
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        table[0x80] = 0
        infinity = 0x7E if dtype == "float8_e4m3fn" else 0x7C  # for e4m3fn the largest number: it has no infinity
        table[(np.arange(256) & 0x7F) > infinity] = 0x7F
    return table


def _to_bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _narrow(values: NDArray[Any], dtype: str, target: str) -> NDArray[Any]:
    """Convert values of a column to the type of a row, which holds them exactly."""
    if dtype == target:
        return values
    if target == "bfloat16":
        wide = canonical_floats(values.astype(np.float32), "float32")
        return (wide.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[target].storage)


def _hash_tensors(field: Field, columns: Mapping[str, Column]) -> list[bytes]:
    name = field.name
    candidates = []
    if (main := columns.get(name)) is not None:
        candidates.append(_hash_ragged(name, main))
    if (other := columns.get(f"{name}__other")) is not None:
        candidates.append([_ABSENT if box is None else _hash_boxed(name, *box) for box in list_boxes(other, name)])
    if (single := columns.get(f"{name}__one")) is not None:
        candidates.append(_hash_scalars(name, "one", single))
    return candidates[0] if len(candidates) == 1 else _first_present(candidates)


def _hash_ragged(name: str, column: Ragged) -> list[bytes]:
    start, stop = int(column.offsets[0]), int(column.offsets[-1])
    trailing = column.trailing
    values = column.values[start:stop]
    offsets = column.offsets - start if start else column.offsets
    if 0 in trailing:
        dtypes = [column.row_dtype(i) if present else "" for i, present in enumerate(column.present.tolist())]
        shapes = [(length, *trailing) for length in column.lengths.tolist()]
        entries = [
            _hash_boxed(name, dtype, shape, b"") if dtype else b"" for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
    elif column.codes is None:
        entries = _hash_rows(name, column.dtype, values, offsets, trailing)
    else:
        # A column of several types: convert all of it to each type, and take each row from its own.
        codes = np.where(column.present, column.codes, 0)
        hashes = {
            code: _hash_rows(name, dtype, _narrow(values, column.dtype, dtype), offsets, trailing)
            for code, dtype in ((code, BY_CODE[code].name) for code in np.unique(codes).tolist() if code)
        }
        entries = [hashes[code][i] if code else _ABSENT for i, code in enumerate(codes.tolist())]
    if column.valid is not None:
        entries = [entry if present else _ABSENT for entry, present in zip(entries, column.valid.tolist(), strict=True)]
    return entries


def _hash_rows(
    name: str, dtype: str, values: NDArray[Any], offsets: NDArray[np.int64], trailing: tuple[int, ...]
) -> list[bytes]:
    head = _hash_rows_name(name, dtype, trailing)
    data = _to_bytes(canonical_floats(values, dtype))
    bounds = (offsets * (DTYPES[dtype].itemsize * math.prod(trailing))).tolist()
    return [head + hash128(data[a:b]) for a, b in pairwise(bounds)]


def _hash_boxed(name: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
    return _hash_name(name, _describe_tensor(dtype, shape)) + _hash_elements(dtype, data)


def _hash_elements(dtype: str, data: bytes | memoryview) -> bytes:
    values = np.frombuffer(data, dtype=np.uint8)
    if dtype in ("float16", "float32", "float64"):
        values = values.view(dtype)
    return hash128(_to_bytes(canonical_floats(values, dtype)))


def list_boxes(column: pa.StructArray, prefix: str) -> list[tuple[str, tuple[int, ...], bytes | memoryview] | None]:
    """Return the type, shape and bytes of each tensor of an `__other` column, `None` for missing ones."""
    fields = {column.type.field(i).name: column.field(i) for i in range(column.type.num_fields)}
    valid = column.is_valid().to_pylist()
    tensors: list[tuple[str, tuple[int, ...], bytes | memoryview] | None] = []
    rows = zip(valid, texts(fields["dtype"]), fields["shape"].to_pylist(), _slices(fields["data"]), strict=True)
    for present, dtype, shape, data in rows:
        if not present:
            tensors.append(None)
        elif data is None:
            raise WireError(f"{prefix}: a tensor without data")
        else:
            tensors.append((str(dtype), check_shape(dtype, shape, len(data), prefix), data))
    return tensors


# --- texts, numbers, media, unknown columns -------------------------------------------------------------------------


def _slices(array: pa.Array | Values) -> Sequence[bytes | memoryview | None]:
    """Return the bytes of each entry of a large text or binary array."""
    if isinstance(array, Values):
        return array.data or []
    buffer = array.buffers()[2]
    data = memoryview(b"") if buffer is None else memoryview(buffer)
    bounds = arrow.offsets(array, len(data)).tolist()
    valid = arrow.validity(array)
    slices: list[memoryview | None] = [data[a:b] for a, b in pairwise(bounds)]
    if valid is not None:
        slices = [item if present else None for item, present in zip(slices, valid.tolist(), strict=True)]
    return slices


def _hash_texts(field: Field, columns: Mapping[str, Column]) -> list[bytes]:
    head = _hash_name(field.name, "text")
    entries = []
    for key in (field.name, f"{field.name}__raw"):
        if key in columns:
            slices = _slices(columns[key])
            entries.append([_ABSENT if text is None else head + hash128(text) for text in slices])
    return entries[0] if len(entries) == 1 else _first_present(entries)


def _hash_scalars(name: str, form: str, array: pa.Array | Values) -> list[bytes]:
    head, values = _hash_name(name, form), numbers(array)
    pack = _INTEGER.pack
    if form == "number":
        pack = _NUMBER.pack
        values = [None if value is None else value + 0.0 if value == value else math.nan for value in values]
    return [_ABSENT if value is None else head + pack(value, 0) for value in values]


def _hash_media(field: Field, columns: Mapping[str, Column]) -> list[bytes]:
    array = columns[field.name]
    valid = array.is_valid().to_pylist()
    # Bytes under a null belong to no row.
    lengths = [
        length if present else 0
        for length, present in zip(np.diff(arrow.offsets(array, len(array.values))).tolist(), valid, strict=True)
    ]
    flat = array.flatten()
    keys = _slices(flat.field(0))
    tensors = list_boxes(flat, field.name)
    head = _hash_name(field.name, "media")
    entries, at = [], 0
    for present, length in zip(valid, lengths, strict=True):
        items = []
        for key, box in zip(keys[at : at + length], tensors[at : at + length], strict=True):
            if key is None or box is None:
                raise WireError(f"{field.name}: a tensor without a key or value")
            dtype, shape, data = box
            items.append((bytes(key), hash128(_describe_tensor(dtype, shape).encode()) + _hash_elements(dtype, data)))
        at += length
        content = b"".join(struct.pack("<Q", len(key)) + key + value for key, value in sorted(items))
        entries.append(head + hash128(content) if present else _ABSENT)
    return entries


def _hash_unknown(name: str, array: pa.Array) -> list[bytes]:
    head = _hash_name(name, f"arrow {array.type}")
    return [head + hash128(_encode_arrow(array, i, name)) if array[i].is_valid else _ABSENT for i in range(len(array))]


def _encode_arrow(array: pa.Array, i: int, name: str) -> bytes:
    """Encode one value of an Arrow array: 0 for null, else 1 and its bytes, with their number if it varies."""
    kind, types, scalar = array.type, pa.types, array[i]
    if not scalar.is_valid:
        return b"\0"
    if types.is_boolean(kind):
        return b"\1\1" if scalar.as_py() else b"\1\0"
    if types.is_struct(kind):
        return b"\1" + b"".join(_encode_arrow(array.field(k), i, name) for k in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
        inner = scalar.values
        return struct.pack("<BQ", 1, len(inner)) + b"".join(_encode_arrow(inner, k, name) for k in range(len(inner)))
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        data: bytes = scalar.as_buffer().to_pybytes()
        return struct.pack("<BQ", 1, len(data)) + data
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        at = (array.offset + i) * width
        fixed: bytes = array.buffers()[1][at : at + width].to_pybytes()
        return b"\1" + fixed
    raise ValueError(f"column {name!r}: an unknown column of type {kind} cannot be stored in a book")


# --- free-form values -----------------------------------------------------------------------------------------------


def _hash_json(field: Field, columns: Mapping[str, Column]) -> list[bytes]:
    custom = field.kind == "custom_fields"
    head = _hash_name(field.name, "custom" if custom else "json")
    # For fields that every record has, missing and empty are the same.
    empty = (b"[]",) if custom else (b"null", b"{}") if field.always else (b"null",)
    entries, depth = [], freeform.MAX_DEPTH
    loads, dumps = orjson.loads, orjson.dumps
    cache: dict[bytes, bytes] = {}
    column = columns[field.name]
    flat = column.flat if isinstance(column, Values) else None
    for i, text in enumerate(_slices(column)):
        if text is None:
            entries.append(_ABSENT)
            continue
        if len(text) < _CACHED_BYTES and (entry := cache.get(short := bytes(text))) is not None:
            entries.append(entry)
            continue
        try:
            parsed = flat[i] if flat else None
            value = _canonical(loads(text) if parsed is None else parsed, depth)
            if custom:
                value = [
                    [item["source_field"], item["destination_field"], item["data_type"].removeprefix("torch.")]
                    for item in value
                ]
            data = dumps(value, option=_SORTED)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise WireError(f"record {i}: {field.name}: {error}") from None
        entries.append(_ABSENT if data in empty else head + hash128(data))
        if len(text) < _CACHED_BYTES:
            cache[short] = entries[-1]
    return entries


def _canonical(value: Json, depth: int) -> Json:
    """Return the canonical form of tagged JSON: equal values have the same form, once keys are sorted."""
    kind = type(value)
    if kind is dict:
        if depth <= 0:
            raise WireError("a free-form value is nested too deeply")
        if len(value) == 1:
            tag = next(iter(value))
            if tag.startswith("$"):
                return _canonical_tagged(tag, value[tag], depth - 1)
        return {
            key: item if type(item) in _CANONICAL_TYPES else _canonical(item, depth - 1) for key, item in value.items()
        }
    if kind is float:
        # Within the integers that JSON can hold.
        return int(value) if value.is_integer() and -(2.0**63) <= value < 2.0**64 else value
    if kind is bool:
        return int(value)
    if kind is list:
        if depth <= 0:
            raise WireError("a free-form value is nested too deeply")
        return [item if type(item) in _CANONICAL_TYPES else _canonical(item, depth - 1) for item in value]
    return value


def _canonical_tagged(tag: str, content: Json, depth: int) -> Json:
    if tag == "$dict":
        return _escape({key: _canonical(item, depth) for key, item in content.items()})
    if tag == "$tuple":
        return {tag: [_canonical(item, depth) for item in content]}
    if tag == "$map":
        return _canonical_map([(_canonical_key(key, depth), _canonical(item, depth)) for key, item in content])
    if tag == "$float":
        return {tag: content}
    if tag == "$int":
        return _canonical_int(int(content, 16))
    if tag == "$text":
        data = bytes.fromhex(content)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {tag: data.hex(" ")}
    if tag == "$bytes":
        return {tag: _base64(content).hex()}
    if tag == "$tensor":
        data = _base64(content["data"])
        shape = check_shape(content["dtype"], content["shape"], len(data), tag)
        return {tag: [content["dtype"], shape, _hash_elements(content["dtype"], data).hex()]}
    if tag in ("$array", "$scalar"):
        array = np.asarray(freeform.loads(orjson.dumps({tag: content}).decode()))
        return {tag: [array.dtype.str, array.shape, hash128(_to_bytes(_canonical_array(array))).hex()]}
    raise WireError(f"the tag {tag!r} is unknown")


def _base64(text: str) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def _canonical_int(value: int) -> Json:
    if -(2**63) <= value < 2**64:
        return value
    try:
        rounded = float(value)
    except OverflowError:
        rounded = 0.0
    return rounded if int(rounded) == value else {"$int": hex(value)}


def _escape(value: dict[str, Any]) -> dict[str, Any]:
    """Wrap a dict whose only key looks like a tag."""
    return {"$dict": value} if len(value) == 1 and next(iter(value)).startswith("$") else value


_NAN_JSON = b'{"$float":"nan"}'


def _canonical_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    written = [orjson.dumps(key, option=_SORTED) for key, _ in pairs]
    if any(_NAN_JSON in text for text in written):
        # A NaN equals no key, so dicts that have one are compared in order.
        return {"$map": pairs}
    if all(type(key) is str for key, _ in pairs):
        return _escape(dict(pairs))
    by_key = dict(zip(written, pairs, strict=True))
    return {"$map": [by_key[text] for text in sorted(by_key)]}


def _canonical_key(key: Json, depth: int) -> Json:
    """Return the canonical form of a dict's key; a numpy number equals the plain number here, unlike in values."""
    if depth <= 0:
        raise WireError("a free-form value is nested too deeply")
    if isinstance(key, dict) and "$tuple" in key:
        return {"$tuple": [_canonical_key(part, depth - 1) for part in key["$tuple"]]}
    if isinstance(key, dict) and "$scalar" in key:
        item = freeform.loads(orjson.dumps(key).decode()).item()
        if isinstance(item, (bool, int, float, str, bytes)):
            key = orjson.loads(freeform.dumps(item))
    return _canonical(key, depth)


def _canonical_array(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind not in "fc":
        return array
    parts = 2 if array.dtype.kind == "c" else 1
    kind = np.dtype(f"{array.dtype.str[0]}f{array.dtype.itemsize // parts}")
    cleaned = np.array(array, order="C").reshape(-1).view(kind).reshape(-1, parts)
    cleaned[cleaned == 0] = 0
    cleaned[np.isnan(cleaned).any(axis=1)] = np.nan
    if kind.itemsize > 8 and np.finfo(np.longdouble).nmant == 63:
        cleaned.view(np.uint8).reshape(-1, kind.itemsize)[:, 10:] = 0  # padding of a long double
    return cleaned


_HASHERS: dict[str, Callable[[Field, Mapping[str, Column]], list[bytes]]] = {
    "tensor": _hash_tensors,
    "text": _hash_texts,
    "json": _hash_json,
    "custom_fields": _hash_json,
    "media": _hash_media,
}
