"""Values of one field, for many records, as physical columns, and back.

Invariant: `decode(field, encode(field, values))` gives `values` back, whatever they are; what does not fit a field's
main column stands in a side column beside it (see `fields.SIDES`), never in a cast. A column is a `Ragged` (tensors)
or a pyarrow array (everything else); a field that no record has makes no column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollbook.core import freeform
from rollbook.core.errors import WireError
from rollbook.core.fields import (
    BY_CODE,
    COLUMNAR,
    DTYPES,
    EXPERIENCE_TYPES,
    FIELDS,
    INTEGERS,
    SIDES,
    Field,
    owner,
    tensor_fields,
)
from rollbook.core.ids import EID, MAX_BITS
from rollbook.core.ragged import Ragged, promote, tensor_bytes, tensor_from_bytes

Column: TypeAlias = Any
"""A `Ragged` or a pyarrow array (which has no types of its own to check)."""
_TEXT = {str, type(None)}
_HELD = {"dict": {dict, type(None)}, "list": {list, tuple, type(None)}}
Columns = dict[str, Column]

OTHER = pa.struct(
    [
        ("dtype", pa.large_string()),
        ("shape", pa.large_list(pa.int64())),
        ("data", pa.large_binary()),
    ]
)
MEDIA = pa.large_list(pa.struct([("key", pa.large_string()), *OTHER]))
EID_TYPE = pa.struct(
    [
        ("batch", pa.large_string()),
        ("task", pa.large_string()),
        ("run", pa.int64()),
        ("step", pa.int64()),
        ("suffix", pa.large_string()),
        ("ints", pa.uint8()),
    ]
)
"""`ints`: 1 if batch was a number, 2 if task was, 3 if both were."""
_EID_FIELDS = list(EID_TYPE)

PLAIN_TYPES: dict[tuple[str, str], pa.DataType] = {
    ("eid", ""): EID_TYPE,
    ("number", ""): pa.float64(),
    ("integer", ""): pa.int64(),
    ("text", ""): pa.large_string(),
    ("text", "raw"): pa.large_binary(),
    ("json", ""): pa.large_string(),
    ("custom_fields", ""): pa.large_string(),
    ("media", ""): MEDIA,
    ("tensor", "other"): OTHER,
    ("tensor", "one"): pa.int64(),
    ("tensor", "dtype"): pa.uint8(),
}
"""The Arrow type of each (kind, side) but a tensor's main column, whose type follows its elements."""


class Values:
    """A column as Python values, where rows need no Arrow array (see `rollbook.core.wire`)."""

    __slots__ = ("_values", "data", "flat")

    def __init__(
        self,
        values: list[Any] | None,
        data: list[bytes | None] | None = None,
        flat: list[dict[str, Any] | None] | None = None,
    ) -> None:
        self._values = values
        self.data = data
        """The UTF-8 of each text, for columns of text and JSON."""
        self.flat = flat
        """For JSON: the dicts that loading the text would give again, where that is known."""

    @property
    def values(self) -> list[Any]:
        """The value of each record: a number, a text, or the text of JSON."""
        if self._values is None:
            self._values = [None if text is None else text.decode() for text in self.data or ()]
        return self._values


class EidParts(NamedTuple):
    """A column of ids as Python values; numbers among batches and tasks are text."""

    batch: list[str]
    task: list[str]
    run: list[int]
    step: list[int]
    suffix: list[str]


def encode(
    field: Field, values: Sequence[Any], odd: Sequence[frozenset[str]] | None = None, copy: bool = True
) -> Columns:
    """The columns of `values`, one per record, `None` where a record has none.

    `odd[i]` names the fields that record i was read with in a shape they cannot have (see `Experience.odd`).
    `copy=False` may leave tensors pending (see `Ragged.from_tensors`).
    """
    name = field.name
    if all(value is None for value in values) or (field.kind == "custom_fields" and not any(values)):
        return {}
    if field.kind == "tensor":
        try:
            return _encode_tensors(field, values, odd, copy)
        except RuntimeError as error:
            # A device that cannot be read from, a layout that has no rows.
            raise ValueError(f"{name}: a tensor cannot be kept: {error}") from None
    if field.kind == "text":
        return _encode_text(name, values)
    if field.kind in ("json", "custom_fields"):
        return {name: pa.array([_json(field, i, value) for i, value in enumerate(values)], pa.large_string())}
    if field.kind == "eid":
        return {name: _encode_eids(name, values)}
    if field.kind == "media":
        return {name: _encode_media(name, values)}
    kind = PLAIN_TYPES[field.kind, ""]
    try:
        return {name: pa.array(values, kind)}
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(
            f"{name}: expected {'a number' if field.kind == 'number' else 'an integer'} or None in each record: {error}"
        ) from None


def _json(field: Field, row: int, value: Any) -> str | None:
    if value is None:
        return None
    if field.kind == "custom_fields":
        if not value:
            return None
        value = [custom.to_dict() for custom in value]
    if field.holds and not isinstance(value, dict if field.holds == "dict" else (list, tuple)):
        raise ValueError(f"record {row}: {field.name}: got {type(value).__name__}, expected a {field.holds}")
    try:
        return freeform.dumps(value)
    except ValueError as error:
        raise ValueError(f"record {row}: {field.name}: {error}") from None


def _encode_text(name: str, values: Sequence[Any]) -> Columns:
    if not set(map(type, values)) <= _TEXT:
        for i, value in enumerate(values):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"record {i}: {name}: got {type(value).__name__} {value!r}, expected a str or None")
    try:
        return {name: pa.array(values, pa.large_string())}
    except (UnicodeEncodeError, pa.ArrowException):
        pass
    clean: list[str | None] = []
    raw: list[bytes | None] = []
    for value in values:
        data = None if value is None else value.encode("utf-8", "surrogatepass")
        lone = data is not None and not _decodes(data)
        clean.append(None if lone else value)
        raw.append(data if lone else None)
    return {name: pa.array(clean, pa.large_string()), f"{name}__raw": pa.array(raw, pa.large_binary())}


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encode_eids(name: str, values: Sequence[Any]) -> pa.Array:
    blank = EID("", "", 0, 0, "")
    ids: list[EID] = [blank if eid is None else eid for eid in values]
    for i, eid in enumerate(ids):
        if not _plain(eid):  # parts can be set to anything
            try:
                eid = ids[i] = eid.replace()
            except ValueError as error:
                raise ValueError(f"record {i}: {name}: {error}") from None
    ints = [(type(eid.batch) is int) + 2 * (type(eid.task) is int) for eid in ids]
    return pa.StructArray.from_arrays(
        [
            pa.array([str(eid.batch) for eid in ids], pa.large_string()),
            pa.array([str(eid.task) for eid in ids], pa.large_string()),
            _whole([eid.run for eid in ids], pa.int64(), np.int64),
            _whole([eid.step for eid in ids], pa.int64(), np.int64),
            pa.array([eid.suffix for eid in ids], pa.large_string()),
            _whole(ints, pa.uint8(), np.uint8),
        ],
        fields=_EID_FIELDS,
        mask=pa.array([eid is None for eid in values]) if None in values else None,
    )


def _whole(values: list[int], kind: pa.DataType, dtype: Any) -> pa.Array:
    """Numbers that are known to be whole and there: several times as fast as Arrow's look at each."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.array(values, dtype=dtype))])


def _plain(eid: EID) -> bool:
    """Whether the parts are such as need no look by `EID.validate`."""
    return (
        type(eid.run) is type(eid.step) is int
        and 0 <= eid.run < 1 << 63
        and 0 <= eid.step < 1 << 63
        and plain_part(eid.batch)
        and plain_part(eid.task)
        and type(eid.suffix) is str
        and eid.suffix.isascii()
    )


def plain_part(part: Any) -> bool:
    """Whether a batch or task is such as needs no look by `EID.validate`."""
    return -(1 << 63) <= part < 1 << 63 if type(part) is int else type(part) is str and part.isascii()


def _other(value: Any) -> dict[str, Any]:
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": tensor_bytes(value).tobytes(),
    }


def _encode_media(name: str, values: Sequence[Any]) -> pa.Array:
    rows = []
    for i, value in enumerate(values):
        try:
            rows.append(None if value is None else [{"key": key, **_other(item)} for key, item in value.items()])
        except (RuntimeError, AttributeError) as error:
            raise ValueError(f"record {i}: {name}: a tensor cannot be kept: {error}") from None
    try:
        return pa.array(rows, MEDIA)
    except (UnicodeEncodeError, pa.ArrowException) as error:
        raise ValueError(f"{name}: a key cannot be kept: {error}") from None


def _encode_tensors(
    field: Field, values: Sequence[Any], odd: Sequence[frozenset[str]] | None, copy: bool = True
) -> Columns:
    import torch

    name = field.name
    rows = list(values)
    if not odd and not field.trailing and (dtype := uniform_dtype([row for row in rows if row is not None])):
        return {name: Ragged.from_tensors(rows, dtype, copy, uniform=True)}
    ones: dict[int, int] = {}
    others: dict[int, Any] = {}
    wanted = 1 + field.trailing
    shapes: Counter[tuple[int, ...]] = Counter()
    dtypes: Counter[str] = Counter()
    short: dict[Any, str] = {}
    for i, row in enumerate(rows):
        if row is None:
            continue
        if field.broadcast and isinstance(row, int):
            ones[i], rows[i] = row, None
            continue
        if not isinstance(row, torch.Tensor):
            raise ValueError(f"record {i}: {name}: got {type(row).__name__}, expected a tensor")
        dtype = short.get(row.dtype) or short.setdefault(row.dtype, str(row.dtype).removeprefix("torch."))
        shape = row.shape
        if dtype not in COLUMNAR or len(shape) != wanted or 0 in shape[1:] or (odd and name in odd[i]):
            others[i], rows[i] = row, None
        else:
            dtypes[dtype] += 1
            if field.trailing:
                shapes[tuple(shape[1:])] += 1
    if dtypes and promote(dtypes) is None:
        _set_aside(rows, others, lambda row: short[row.dtype] == dtypes.most_common(1)[0][0])
        dtypes = Counter(dtypes.most_common(1)[0][:1])
    if len(shapes) > 1:
        common = shapes.most_common(1)[0][0]
        _set_aside(rows, others, lambda row: tuple(row.shape[1:]) == common)
    columns: Columns = {}
    dtype = promote(dtypes)
    if dtype is not None:
        columns[name] = Ragged.from_tensors(rows, dtype)
    if others:
        boxes = [_other(others[i]) if i in others else None for i in range(len(rows))]
        columns[f"{name}__other"] = pa.array(boxes, OTHER)
    if ones:
        columns[f"{name}__one"] = pa.array([ones.get(i) for i in range(len(rows))], pa.int64())
    return columns


def uniform_dtype(present: list[Any]) -> str | None:
    """The one type of all rows, if they are one-dimensional tensors of it: what nearly every column is."""
    import torch

    try:
        if set(map(torch.Tensor.dim, present)) != {1}:
            return None
    except TypeError:
        return None
    kinds = set(map(attrgetter("dtype"), present))
    dtype = str(kinds.pop()).removeprefix("torch.")
    return dtype if not kinds and dtype in COLUMNAR else None


def _set_aside(rows: list[Any], others: dict[int, Any], stays: Any) -> None:
    for i, row in enumerate(rows):
        if row is not None and not stays(row):
            others[i], rows[i] = row, None


def decode(field: Field, columns: Mapping[str, Column]) -> list[Any] | None:
    """The field's values in each record, or `None` if no record has it; tensors are views where they can be."""
    name = field.name
    sides = {key: columns.get(f"{name}__{key}") for key in SIDES[field.kind] if key != "dtype"}
    main = columns.get(name)
    if main is None and all(side is None for side in sides.values()):
        return None
    values: list[Any] | None = None
    if main is not None:
        values = _decode_main(field, main)
    for key, side in sides.items():
        if side is None:
            continue
        found = [_unbox(key, item, field) for item in side.to_pylist()]
        values = found if values is None else [b if a is None else a for a, b in zip(values, found, strict=True)]
    return values


def _unbox(side: str, item: Any, field: Field) -> Any:
    if item is None or side == "one":
        return item
    if side == "raw":
        try:
            return item.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"{field.name}__raw: {error}") from None
    if field.accepts == "integer" and item["dtype"] not in INTEGERS:
        raise WireError(f"{field.name}__other: got {item['dtype']}, expected whole numbers")
    return _tensor(item, field.name)


def _tensor(item: dict[str, Any], where: str) -> Any:
    if item is None or item["data"] is None:
        raise WireError(f"{where}: a tensor without data")
    return tensor_from_bytes(item["dtype"], item["shape"], item["data"], where)


def _decode_main(field: Field, column: Column) -> list[Any]:
    if isinstance(column, Ragged):
        return column.tensors()
    if field.kind == "text":
        return texts(column)
    if field.kind == "json":
        values = freeform.loads_many(texts(column), where=field.name)
        if field.holds and not set(map(type, values)) <= _HELD[field.holds]:
            wrong = next(value for value in values if type(value) not in _HELD[field.holds])
            raise WireError(f"{field.name}: got a {type(wrong).__name__}, expected a {field.holds}")
        return values
    if field.kind == "eid":
        return _decode_eids(column)
    if field.kind == "custom_fields":
        return [None if text is None else _custom_fields(text) for text in texts(column)]
    if field.kind == "media":
        return [_media(item, field.name) for item in column.to_pylist()]
    return numbers(column)


def numbers(column: pa.Array) -> list[Any]:
    """A number column's values, `None` where there is none (only `to_pylist` tells NaN from null; it is slower)."""
    if isinstance(column, Values):
        return column.values
    values: list[Any] = column.to_pylist() if column.null_count else column.to_numpy().tolist()
    return values


def texts(column: pa.Array) -> list[str | None]:
    """A text column's values (`to_numpy` makes the strings several times faster than `to_pylist`)."""
    if isinstance(column, Values):
        return column.values
    try:
        values: list[str | None] = column.to_numpy(zero_copy_only=False).tolist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise WireError(f"a text column is not UTF-8: {error}") from None
    return values


def _decode_eids(column: pa.StructArray) -> list[EID]:
    batch, task, run, step, suffix, ints = (column.field(i) for i in range(6))
    parts = zip(texts(batch), texts(task), numbers(run), numbers(step), texts(suffix), numbers(ints), strict=True)
    ids = []
    new, set_dict = EID.__new__, object.__setattr__
    known: dict[str, int] = {}  # batches and tasks come many times
    for a, b, r, s, x, i in parts:
        if i & 1:
            a = known[a] if a in known else known.setdefault(a, _int(a))
        if i & 2:
            b = known[b] if b in known else known.setdefault(b, _int(b))
        eid = new(EID)
        set_dict(eid, "__dict__", {"batch": a, "task": b, "run": r, "step": s, "suffix": x})
        ids.append(eid)
    return ids


def _int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise WireError(f"eid: {text!r:.80} is marked as a number, and is none") from None
    if number.bit_length() > MAX_BITS:
        raise WireError(f"eid: a number of {number.bit_length()} bits, expected at most {MAX_BITS}")
    return number


def _media(item: list[dict[str, Any]] | None, where: str) -> dict[str, Any] | None:
    if item is None:
        return None
    if any(entry is None or entry["key"] is None for entry in item):
        raise WireError(f"{where}: a tensor without a key")
    media = {entry["key"]: _tensor(entry, f"{where}[{entry['key']!r}]") for entry in item}
    if len(media) != len(item):
        raise WireError(f"{where}: a key stands twice")
    return media


def _custom_fields(text: str) -> list[Any]:
    from rollbook.core.experience import CustomField

    held = freeform.loads(text)
    if not isinstance(held, list):
        raise WireError(f"custom_fields: got {type(held).__name__}, expected a list")
    try:
        return [CustomField.from_dict(item) for item in held]
    except (TypeError, ValueError, KeyError) as error:
        raise WireError(f"custom_fields: {error}") from None


def check_depth(columns: Mapping[str, Column], max_depth: int) -> None:
    """Raise `WireError` if a free-form value is nested deeper than `max_depth`, naming the record and field."""
    for name, field in FIELDS.items():
        if field.kind == "json" and name in columns:
            freeform.loads_many(texts(columns[name]), max_depth, where=name)


def set_aside(field: Field, columns: Mapping[str, Column], count: int) -> list[frozenset[str]]:
    """For each record, the field's name if its value stands in the `__other` column."""
    other = columns.get(f"{field.name}__other")
    if other is None:
        return [frozenset()] * count
    here, nothing = frozenset((field.name,)), frozenset[str]()
    return [here if valid else nothing for valid in other.is_valid().to_pylist()]


def slice_column(column: Column, start: int, stop: int) -> Column:
    """Rows start to stop, sharing memory."""
    return column.slice(start, stop) if isinstance(column, Ragged) else column.slice(start, stop - start)


def take_column(column: Column, indices: NDArray[np.int64]) -> Column:
    """The rows at `indices`, copied."""
    return column.take(indices if isinstance(column, Ragged) else pa.array(indices))


def concat(parts: Sequence[tuple[Columns, int]]) -> Columns:
    """The columns of all parts, one after the other; a part without a column has absent rows there."""
    names: dict[str, None] = {}
    for columns, _ in parts:
        names.update(dict.fromkeys(sorted(columns)))
    result: Columns = {}
    for name in names:
        if name in result:
            continue
        present = [columns[name] for columns, _ in parts if name in columns]
        if isinstance(present[0], Ragged):
            _concat_ragged(name, parts, result)
        else:
            result[name] = _concat_arrow(name, parts, present[0].type)
    return result


def _concat_arrow(name: str, parts: Sequence[tuple[Columns, int]], kind: pa.DataType) -> pa.Array:
    arrays = [columns[name] if name in columns else pa.nulls(count, kind) for columns, count in parts]
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r} has different types in the parts: {error}") from None


def _concat_ragged(name: str, parts: Sequence[tuple[Columns, int]], result: Columns) -> None:
    columns = [part.get(name) for part, _ in parts]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    dtype = promote(column.dtype for column in ragged)
    if dtype is None or len({column.trailing for column in ragged}) > 1:
        # Types or shapes that no one column holds: sort the rows again, which sets some aside.
        field = FIELDS[name]
        values: list[Any] = []
        aside: list[frozenset[str]] = []
        for part, count in parts:
            values.extend(decode(field, part) or [None] * count)
            aside.extend(set_aside(field, part, count))
        result.update(_encode_tensors(field, values, aside))
        return
    trailing = ragged[0].trailing
    result[name] = Ragged.concat(
        [
            column.as_dtype(dtype) if isinstance(column, Ragged) else Ragged.absent(count, dtype, trailing)
            for column, (_, count) in zip(columns, parts, strict=True)
        ]
    )


_STORAGE = {name: pa.from_numpy_dtype(np.dtype(name)) for name in {d.storage for d in DTYPES.values() if d.code}}
_STORAGE_NAMES = {kind: name for name, kind in _STORAGE.items()}


# --- columns to Arrow -----------------------------------------------------------------------------------------


def to_arrays(columns: Mapping[str, Column], portable: bool = False) -> dict[str, pa.Array]:
    """Arrow arrays of all columns in the table's order, unknown ones last.

    `portable`: for Parquet and HF, with half-precision floats as float32 (their type stands in the `__dtype` side).
    """
    arrays: dict[str, pa.Array] = {}
    for name in _sorted(columns):
        column = columns[name]
        if isinstance(column, Ragged):
            # A field that was withdrawn meanwhile still has its column.
            field = FIELDS.get(name) or Field(name, "tensor", dtype=column.dtype)
            arrays[name], codes = _ragged_to_arrow(column, field, portable)
            if codes is not None:
                arrays[f"{name}__dtype"] = codes
        else:
            arrays[name] = column
    return arrays


def _sorted(names: Iterable[str]) -> list[str]:
    place = {name: i for i, name in enumerate(FIELDS)}

    def order(name: str) -> tuple[int, str]:
        known = owner(name)
        return (place[known[0].name], name) if known else (len(place), name)

    return sorted(names, key=order)


def implied(storage: str, field: Field) -> str:
    """The element type that a column has when no `__dtype` column says otherwise."""
    return "bool" if storage == "uint8" and field.dtype == "bool" else storage


def _ragged_to_arrow(column: Ragged, field: Field, portable: bool) -> tuple[pa.Array, pa.Array | None]:
    if portable and DTYPES[column.dtype].portable != DTYPES[column.dtype].storage:
        column = column.as_dtype("float32")
    start, stop = int(column.offsets[0]), int(column.offsets[-1])
    offsets = column.offsets - start if start else np.ascontiguousarray(column.offsets)
    values = (column.memory if column.pending else column.values)[start:stop]
    child = pa.Array.from_buffers(
        _STORAGE[DTYPES[column.dtype].storage],
        values.size,
        [None, pa.py_buffer(np.ascontiguousarray(values).reshape(-1))],
    )
    for size in reversed(column.trailing):
        child = pa.FixedSizeListArray.from_arrays(child, size)
    validity = None
    if column.valid is not None:
        validity = pa.py_buffer(np.packbits(column.valid, bitorder="little"))
    array = pa.Array.from_buffers(
        pa.large_list(child.type), len(column), [validity, pa.py_buffer(offsets)], children=[child]
    )
    codes = column.codes
    if codes is None:
        if implied(DTYPES[column.dtype].storage, field) == column.dtype:
            return array, None
        codes = np.full(len(column), DTYPES[column.dtype].code, dtype=np.uint8)
    if column.valid is not None:
        codes = np.where(column.valid, codes, 0).astype(np.uint8)
    return array, pa.array(codes, pa.uint8())


def empty_type(field: Field) -> pa.DataType:
    """The type of a field's main column when nothing in it says otherwise."""
    if field.kind != "tensor":
        return PLAIN_TYPES[field.kind, ""]
    kind = _STORAGE[DTYPES[field.dtype].storage]
    for _ in range(field.trailing):
        kind = pa.large_list(kind)
    return pa.large_list(kind)


# --- Arrow to columns -----------------------------------------------------------------------------------------


def check_schema(schema: pa.Schema) -> None:
    """Refuse a schema that the field table does not allow; of unknown columns it says nothing."""
    if len(set(schema.names)) != len(schema.names):
        raise WireError("the schema names a column twice")
    for arrow_field in schema:
        known = owner(arrow_field.name)
        kind = arrow_field.type
        if known is None:
            continue
        if known[1] == "dtype" and known[0].name not in schema.names:
            raise WireError(f"column {arrow_field.name!r} stands without {known[0].name!r}")
        if known[1] == "one" and not known[0].broadcast:
            raise WireError(f"column {arrow_field.name!r}: one number cannot stand for all of {known[0].name}")
        if known[0].kind == "tensor" and not known[1]:
            _check_ragged_type(known[0], kind)
        elif kind != PLAIN_TYPES[known[0].kind, known[1]]:
            expected = PLAIN_TYPES[known[0].kind, known[1]]
            raise WireError(f"column {arrow_field.name!r}: type {kind}, expected {expected}")
    for name in ("eid", "tokens", "prompt_length", "experience_type"):
        if name not in schema.names and not (name == "tokens" and "tokens__other" in schema.names):
            raise WireError(f"the schema has no column {name!r}")


def _check_ragged_type(field: Field, kind: pa.DataType) -> None:
    inner = kind.value_type if pa.types.is_large_list(kind) else None
    for _ in range(field.trailing):
        if not inner or not pa.types.is_fixed_size_list(inner) or not inner.list_size > 0:
            inner = None
            break
        inner = inner.value_type
    if inner not in _STORAGE_NAMES or (field.accepts == "integer" and not pa.types.is_integer(inner)):
        raise WireError(
            f"column {field.name!r}: type {kind}, expected a large_list of numbers"
            + (f" over {field.trailing} fixed sizes" if field.trailing else "")
        )


def from_arrays(arrays: Mapping[str, pa.Array], private: bool = False) -> Columns:
    """Columns over Arrow arrays of the right types; nothing is copied. `private`: the memory is ours to write on."""
    columns: Columns = {}
    for name, array in arrays.items():
        known = owner(name)
        if known is None or known[0].kind != "tensor":
            columns[name] = array
        elif not known[1]:
            columns[name] = _arrow_to_ragged(array, known[0], arrays.get(f"{name}__dtype"), private)
        elif known[1] != "dtype":
            columns[name] = array
    return columns


def validity(array: pa.Array) -> NDArray[np.bool_] | None:
    """Which entries are there; `None` if all are."""
    bitmap = array.buffers()[0]
    if bitmap is None or array.null_count == 0:
        return None
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def offsets(array: pa.Array, limit: int) -> NDArray[np.int64]:
    """The 64-bit offsets of a large list or text array, once they are known to rise and to stay in bounds."""
    buffer = array.buffers()[1]
    if len(array) == 0:
        return np.zeros(1, dtype=np.int64)
    if buffer is None or buffer.size < 8 * (array.offset + len(array) + 1):
        raise WireError("an offsets buffer is too short")
    values = np.frombuffer(buffer, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    if values[0] < 0 or values[-1] > limit or bool((values[1:] < values[:-1]).any()):
        raise WireError("offsets fall, or leave their values")
    return values


def _arrow_to_ragged(array: pa.Array, field: Field, codes: pa.Array | None, private: bool) -> Ragged:
    child = array.values
    bounds = offsets(array, len(child))
    trailing = []
    while pa.types.is_fixed_size_list(child.type):
        if child.null_count:
            raise WireError(f"column {field.name!r}: null inside a row")
        size = child.type.list_size
        trailing.append(size)
        child = child.values.slice(child.offset * size, len(child) * size)
    if child.null_count:
        raise WireError(f"column {field.name!r}: null inside a row")
    storage = _STORAGE_NAMES[child.type]
    dtype = np.dtype(storage)
    buffer = child.buffers()[1]
    if len(child) == 0 or buffer is None:
        if len(child):
            raise WireError(f"column {field.name!r}: its values are missing")
        values: NDArray[Any] = np.empty(0, dtype=dtype)
    else:
        if buffer.size < (child.offset + len(child)) * dtype.itemsize:
            raise WireError(f"column {field.name!r}: its values are cut short")
        values = np.frombuffer(buffer, dtype=dtype, count=len(child), offset=child.offset * dtype.itemsize)
    if private and values.size:
        values = _writable(values)
    valid = validity(array)
    if valid is not None and (np.diff(bounds)[~valid] != 0).any():
        raise WireError(f"column {field.name!r}: a row is null and has values")
    name = implied(storage, field)
    row_codes = None
    if codes is not None:
        name, row_codes = _row_codes(field, storage, np.asarray(codes.fill_null(0)), valid)
    return Ragged(values.reshape(-1, *trailing), bounds, name, valid, row_codes, owned=private)


class _Memory:
    """The same memory as a read-only array's, offered for writing, and the owner that keeps it alive."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.owner = values
        described = values.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


def _writable(values: NDArray[Any]) -> NDArray[Any]:
    # pyarrow hands its buffers out read-only; this memory is the caller's own (a private map or a copy).
    return np.asarray(_Memory(values))


def _row_codes(
    field: Field, storage: str, codes: NDArray[np.uint8], valid: NDArray[np.bool_] | None
) -> tuple[str, NDArray[np.uint8] | None]:
    present = codes if valid is None else codes[valid]
    kinds = [int(code) for code in np.unique(present)]
    unknown = [code for code in kinds if code not in BY_CODE]
    if unknown:
        raise WireError(f"column '{field.name}__dtype': code {unknown[0]} is unknown")
    names = [BY_CODE[code].name for code in kinds]
    if field.accepts == "integer" and not INTEGERS.issuperset(names):
        raise WireError(f"column '{field.name}__dtype': {', '.join(names)}, expected whole numbers")
    if not names:
        return implied(storage, field), None
    if len(names) == 1 and DTYPES[names[0]].storage == storage:
        return names[0], None
    if promote([*names, storage]) != storage:
        raise WireError(f"column '{field.name}__dtype': {storage} values cannot hold rows of {', '.join(names)}")
    return storage, codes


# --- the promises of the table ----------------------------------------------------------------------------------


def check_columns(columns: Columns, count: int) -> None:
    """Raise `ValueError` naming field, record, got and expected if the columns break a promise of the table."""
    # Small batches come by the thousand: a call of Arrow's takes longer than a look at eight numbers, and columns
    # without nulls, or all of one kind, as nearly all are, are told apart by looking at them once.
    lengths, there = token_lengths(columns, count)
    _all(there, "tokens: got None, expected token ids")
    for name in ("eid", "prompt_length", "experience_type"):
        if name not in columns:
            raise ValueError(f"{name}: got None in every record, expected a value")
        if columns[name].null_count:
            _all(np.asarray(columns[name].is_valid()), f"{name}: got None, expected a value")
    eid = columns["eid"]
    for i in range(eid.type.num_fields):
        part = eid.field(i)
        if part.null_count:
            _all(np.asarray(part.is_valid()), f"eid.{eid.type.field(i).name}: got None, expected a value")
    prompt = columns["prompt_length"].to_numpy(zero_copy_only=False).astype(np.int64)
    kind = columns["experience_type"]
    single, multi, dpo = kinds(kind)
    _all(single | multi | dpo, f"experience_type: expected one of {', '.join(EXPERIENCE_TYPES)}, got", kind)
    pairs = bool(dpo.any())
    cut = truncated(columns, count) & ~dpo
    fits = np.where(multi, prompt >= 0, prompt > 0) & (cut | np.where(single, prompt < lengths, prompt <= lengths))
    if pairs:
        fits = np.where(dpo, prompt == lengths, fits)
    if not fits.all():
        i = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"record {i}: prompt_length: got {int(prompt[i])} with {int(lengths[i])} tokens, expected "
            "0 < prompt_length < tokens (single_turn), 0 to all (multi_turn), all (dpo)"
        )
    expected = lengths - prompt
    if cut.any():
        logprobs = columns.get("logprobs")
        known = logprobs.present if isinstance(logprobs, Ragged) else np.zeros(count, dtype=np.bool_)
        aside = columns.get("logprobs__other")
        if aside is not None:
            known = known | np.asarray(aside.is_valid())
        _all(known | ~cut, "logprobs: got None, expected them with truncate_status 'prompt_truncated'")
        # Log-probs that stand aside say nothing about the others: -1.
        widths = np.where(logprobs.present, logprobs.lengths, -1) if isinstance(logprobs, Ragged) else -1
        expected = np.where(cut, widths, expected)
        mask = columns.get("action_mask")
        if isinstance(mask, Ragged):
            good = np.ones(count, dtype=np.bool_)
            for i in np.flatnonzero(cut & mask.present).tolist():
                good[i] = not mask.row(i).any()
            _all(good, "action_mask: got True, expected all False with truncate_status 'prompt_truncated'")
    for field in tensor_fields("response"):
        column = columns.get(field.name)
        if isinstance(column, Ragged):
            wrong = column.lengths != expected
            if wrong.any() and (wrong := wrong & column.present & (expected >= 0)).any():
                i = int(np.flatnonzero(wrong)[0])
                got, want = int(column.lengths[i]), int(expected[i])
                raise ValueError(
                    f"record {i}: {field.name}: got {got} entries, expected {want} (one per response token)"
                )
    for field in tensor_fields("sequence"):
        column = columns.get(field.name)
        if field.name != "tokens" and isinstance(column, Ragged):
            _all(~column.present | (column.lengths == lengths), f"{field.name}: expected one entry for each token")
    if pairs or not columns.keys().isdisjoint(("chosen", "chosen__other", "rejected", "rejected__other")):
        chosen, rejected = has(columns, "chosen", count), has(columns, "rejected", count)
        for name, there in (("chosen", chosen), ("rejected", rejected)):
            _all(
                there | ~(dpo | chosen | rejected),
                f"{name}: got None, expected tokens, as for the other answer of a pair",
            )
    if "group_size" in columns:
        sizes = columns["group_size"]
        _all(np.asarray(pc.fill_null(pc.greater(sizes, 0), True)), "group_size: expected at least 1, got", sizes)


def token_lengths(columns: Columns, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """How many tokens each record has, and whether it has any value there."""
    tokens = columns.get("tokens")
    lengths = tokens.lengths.copy() if isinstance(tokens, Ragged) else np.zeros(count, dtype=np.int64)
    there = tokens.present.copy() if isinstance(tokens, Ragged) else np.zeros(count, dtype=np.bool_)
    other = columns.get("tokens__other")
    if other is not None:
        for i in np.flatnonzero(np.asarray(other.is_valid())).tolist():
            shape = other[i]["shape"].as_py()
            if there[i] or not shape or len(shape) != 1 or shape[0] is None:
                raise ValueError(f"record {i}: tokens: got shape {shape}, expected one dimension, given once")
            lengths[i], there[i] = shape[0], True
    return lengths, there


def kinds(column: pa.Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which records are single_turn, multi_turn and dpo."""
    found = _one_kind(column)
    if found is not None:
        single, multi, dpo = (np.full(len(column), name == found, dtype=np.bool_) for name in EXPERIENCE_TYPES)
    else:
        single, multi, dpo = (np.asarray(pc.fill_null(pc.equal(column, name), False)) for name in EXPERIENCE_TYPES)
    return single, multi, dpo


def _one_kind(column: pa.Array) -> str | None:
    """The kind of all records, if they have one."""
    if not len(column) or column.null_count or column.type != pa.large_string():
        return None
    first: str = column[0].as_py()
    if first not in EXPERIENCE_TYPES:
        return None
    data = column.buffers()[2]
    bounds = offsets(column, 0 if data is None else data.size)
    alike = data is not None and bool((bounds[1:] - bounds[:-1] == len(first)).all())
    # As bytes: two views are compared entry by entry.
    return first if alike and bytes(memoryview(data)[bounds[0] : bounds[-1]]) == first.encode() * len(column) else None


def truncated(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Which records say that their prompt was cut."""
    if "truncate_status" not in columns:
        return np.zeros(count, dtype=np.bool_)
    return np.asarray(pc.fill_null(pc.equal(columns["truncate_status"], "prompt_truncated"), False))


def has(columns: Columns, name: str, count: int) -> NDArray[np.bool_]:
    """Which records have a value in a tensor field."""
    column, other = columns.get(name), columns.get(f"{name}__other")
    there = column.present if isinstance(column, Ragged) else np.zeros(count, dtype=np.bool_)
    return there if other is None else there | np.asarray(other.is_valid())


def _all(good: NDArray[np.bool_], message: str, values: pa.Array | None = None) -> None:
    if not good.all():
        i = int(np.flatnonzero(~good)[0])
        raise ValueError(f"record {i}: {message}" + ("" if values is None else f" {values[i].as_py()!r}"))


def check_masks(columns: Columns) -> None:
    """Raise `ValueError` if a bool column holds anything but 0 and 1."""
    for name, column in columns.items():
        if isinstance(column, Ragged) and column.dtype == "bool":
            most = column.largest()
            if most > 1:
                raise ValueError(f"{name}: got the byte {most} in a bool column, expected 0 or 1")
