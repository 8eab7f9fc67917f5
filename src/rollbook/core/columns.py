"""Values of one field, for many records, as physical columns, and back.

Invariant: `decode(field, encode(field, values))` gives `values` back, whatever they are; what does not fit a field's
main column stands in a side column beside it (see `fields.SIDES`), never in a cast. A column is a `Ragged` (tensors)
or a pyarrow array (everything else); a field that no record has makes no column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import freeform
from rollbook.core.errors import WireError
from rollbook.core.fields import COLUMNAR, FIELDS, INTEGERS, SIDES, Field
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
    """A column as Python values, where rows need no Arrow array (see `rollbook.core.row_layout`)."""

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
    from rollbook.core.custom_field import CustomField

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
