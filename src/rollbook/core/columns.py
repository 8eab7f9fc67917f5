"""Values of one field, for many records, as physical columns, and back.

`encode` and `decode` convert values, `concat` joins columns, `to_arrays` and `from_arrays` convert to and from Arrow,
and `check_schema` and `check_columns` check columns against the field table.

Invariant: `decode(field, encode(field, values))` returns `values`. A value that does not fit the main column of its
field is kept in a side column (see `fields.SIDES`), never cast. A column is a `Ragged` (tensors) or a pyarrow array
(everything else); a field that no record has makes no column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
    OWNERS,
    SIDES,
    TENSOR_FIELDS,
    Field,
)
from rollbook.core.ids import EID, MAX_BITS
from rollbook.core.ragged import Ragged, promote, tensor_bytes, tensor_from_bytes

if TYPE_CHECKING:
    import torch

Column: TypeAlias = Any
"""A `Ragged` or a pyarrow array (which has no types of its own to check)."""
_TEXT = {str, type(None)}
_is_present = partial(is_not, None)
_JSON_TYPES = {"dict": {dict, type(None)}, "list": {list, tuple, type(None)}}
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
"""Type of an id. `ints`: 1 if the batch is a number, 2 if the task is, 3 if both are."""
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
"""Arrow type of each (kind, side), except for the main column of tensors, which depends on their elements."""


class Values:
    """A column as Python values, for rows that are written without Arrow arrays (see `wire.RowLayout`)."""

    __slots__ = ("_values", "data", "flat")

    def __init__(
        self,
        values: list[Any] | None,
        data: list[bytes | None] | None = None,
        flat: list[dict[str, Any] | None] | None = None,
    ) -> None:
        self._values = values
        self.data = data
        """UTF-8 of each text, for columns of text and JSON."""
        self.flat = flat
        """For JSON: the dicts that a plain JSON parser reads from the texts, if known."""

    @property
    def values(self) -> list[Any]:
        """Value of each record: a number, a text, or JSON text."""
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
    field: Field, values: Sequence[Any], malformed: Sequence[frozenset[str]] | None = None, copy: bool = True
) -> Columns:
    """Encode the values of a field as columns.

    Args:
        field: The field.
        values: One value per record, `None` where a record has none.
        malformed: For each record, its `Experience.malformed_fields`.
        copy: Copy tensors now; `False` may leave them pending (see `Ragged.from_tensors`).

    Returns:
        The main column and side columns; none if no record has a value.

    Raises:
        ValueError: A value does not fit the field.
    """
    name = field.name
    if set(map(type, values)) <= {type(None)} or (field.kind == "custom_fields" and not any(values)):
        return {}
    if field.kind == "tensor":
        try:
            return _encode_tensors(field, values, malformed, copy)
        except RuntimeError as error:
            # A device that cannot be read, or a layout without rows.
            raise ValueError(f"{name}: a tensor cannot be kept: {error}") from None
    if field.kind == "text":
        try:
            if set(map(type, values)) <= _TEXT:
                return {name: pa.array(values, pa.large_string())}
        except (UnicodeEncodeError, pa.ArrowException):
            pass
        return _encode_raw_text(name, values)
    if field.kind in ("json", "custom_fields"):
        return {name: _encode_json(field, values)}
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


def _encode_json(field: Field, values: Sequence[Any]) -> pa.Array:
    texts: list[bytes | None] = []
    for i, entry in enumerate(values):
        if entry is None or (field.kind == "custom_fields" and not entry):
            texts.append(None)
            continue
        if field.kind == "custom_fields":
            entry = [custom.to_dict() for custom in entry]
        if field.holds and not isinstance(entry, dict if field.holds == "dict" else (list, tuple)):
            raise ValueError(f"record {i}: {field.name}: got {type(entry).__name__}, expected a {field.holds}")
        try:
            texts.append(freeform.dump_bytes(entry)[0])
        except ValueError as error:
            raise ValueError(f"record {i}: {field.name}: {error}") from None
    return pa.array(texts, pa.large_string())


def _encode_raw_text(name: str, texts: Sequence[Any]) -> Columns:
    """Encode text that may have lone surrogates, or subclasses of `str`."""
    clean: list[str | None] = []
    raw: list[bytes | None] = []
    for i, text in enumerate(texts):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"record {i}: {name}: got {type(text).__name__} {text!r}, expected a str or None")
        if text is None or not any("\ud800" <= character <= "\udfff" for character in text):
            clean.append(text)
            raw.append(None)
        else:
            clean.append(None)
            raw.append(text.encode("utf-8", "surrogatepass"))
    columns = {name: pa.array(clean, pa.large_string())}
    if any(text is not None for text in raw):
        columns[f"{name}__raw"] = pa.array(raw, pa.large_binary())
    return columns


def _encode_eids(name: str, values: Sequence[EID | None]) -> pa.Array:
    ids: list[EID] = []
    ints = np.zeros(len(values), dtype=np.uint8)
    absent = np.zeros(len(values), dtype=np.bool_)
    for i, eid in enumerate(values):
        if eid is None:
            absent[i], eid = True, EID("", "", 0, 0, "")
        elif not (
            type(eid.run) is type(eid.step) is int
            and 0 <= eid.run < 1 << 63
            and 0 <= eid.step < 1 << 63
            and plain_part(eid.batch)
            and plain_part(eid.task)
            and type(eid.suffix) is str
            and eid.suffix.isascii()
        ):
            # Attributes of an id can be set to anything: validate the unusual ones.
            try:
                eid = eid.replace()
            except ValueError as error:
                raise ValueError(f"record {i}: {name}: {error}") from None
        ids.append(eid)
        ints[i] = (type(eid.batch) is int) + 2 * (type(eid.task) is int)
    batch, task, run, step, suffix = zip(*map(eid_parts, ids), strict=True)
    return pa.StructArray.from_arrays(
        [
            pa.array(map(str, batch), pa.large_string()),
            pa.array(map(str, task), pa.large_string()),
            pa.array(np.array(run, dtype=np.int64)),  # several times faster through numpy
            pa.array(np.array(step, dtype=np.int64)),
            pa.array(suffix, pa.large_string()),
            pa.array(ints),
        ],
        fields=_EID_FIELDS,
        mask=pa.array(absent) if absent.any() else None,
    )


eid_parts = attrgetter("batch", "task", "run", "step", "suffix")


def plain_part(part: int | str) -> bool:
    """Return whether a batch or task needs no validation: a 64-bit integer or ASCII text."""
    return -(1 << 63) <= part < 1 << 63 if type(part) is int else type(part) is str and part.isascii()


def _other(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": tensor_bytes(tensor).tobytes(),
    }


def _encode_media(name: str, values: Sequence[Any]) -> pa.Array:
    rows = []
    for i, media in enumerate(values):
        try:
            rows.append(None if media is None else [{"key": key, **_other(tensor)} for key, tensor in media.items()])
        except (RuntimeError, AttributeError) as error:
            raise ValueError(f"record {i}: {name}: a tensor cannot be kept: {error}") from None
    try:
        return pa.array(rows, MEDIA)
    except (UnicodeEncodeError, pa.ArrowException) as error:
        raise ValueError(f"{name}: a key cannot be kept: {error}") from None


def _encode_tensors(
    field: Field, values: Sequence[Any], malformed: Sequence[frozenset[str]] | None, copy: bool = True
) -> Columns:
    import torch

    name = field.name
    rows = list(values)
    if not malformed and not field.trailing and (dtype := uniform_dtype(list(filter(_is_present, rows)))):
        return {name: Ragged.from_tensors(rows, dtype, copy, uniform=True)}
    ones: dict[int, int] = {}
    others: dict[int, Any] = {}
    dimensions = 1 + field.trailing
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
        if dtype not in COLUMNAR or len(shape) != dimensions or 0 in shape[1:] or (malformed and name in malformed[i]):
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
    """Return the type of all rows if they are one-dimensional tensors of one type, which is the common case."""
    import torch

    try:
        if set(map(torch.Tensor.dim, present)) != {1}:
            return None
    except TypeError:
        return None
    kinds = set(map(attrgetter("dtype"), present))
    dtype = str(kinds.pop()).removeprefix("torch.")
    return dtype if not kinds and dtype in COLUMNAR else None


def _set_aside(rows: list[Any], others: dict[int, torch.Tensor], stays: Callable[[torch.Tensor], bool]) -> None:
    for i, row in enumerate(rows):
        if row is not None and not stays(row):
            others[i], rows[i] = row, None


def decode(field: Field, columns: Mapping[str, Column]) -> list[Any] | None:
    """Return the field's value in each record, or `None` if no record has it; tensors are views if possible."""
    name, kind, column = field.name, field.kind, columns.get(field.name)
    values: list[Any] | None = None
    if isinstance(column, Ragged):
        values = column.tensors()
    elif column is None:
        pass
    elif kind == "text":
        values = texts(column)
    elif kind == "json":
        values = freeform.loads_many(texts(column), prefix=name)
        if field.holds and not set(map(type, values)) <= _JSON_TYPES[field.holds]:
            wrong = next(entry for entry in values if type(entry) not in _JSON_TYPES[field.holds])
            raise WireError(f"{name}: got a {type(wrong).__name__}, expected a {field.holds}")
    elif kind == "eid":
        values = _decode_eids(column)
    elif kind == "custom_fields":
        values = [None if text is None else _custom_fields(text) for text in texts(column)]
    elif kind == "media":
        values = [_media(entries, name) for entries in column.to_pylist()]
    else:
        values = numbers(column)
    for side in SIDES[kind]:
        boxes = columns.get(f"{name}__{side}") if side != "dtype" else None
        if boxes is not None:
            unboxed = [_unbox(side, box, field) for box in boxes.to_pylist()]
            values = (
                unboxed if values is None else [b if a is None else a for a, b in zip(values, unboxed, strict=True)]
            )
    return values


def _unbox(side: str, box: freeform.Json, field: Field) -> Any:
    """Return the value of a row of a side column."""
    if box is None or side == "one":
        return box
    if side == "raw":
        try:
            return box.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"{field.name}__raw: {error}") from None
    if field.accepts == "integer" and box["dtype"] not in INTEGERS:
        raise WireError(f"{field.name}__other: got {box['dtype']}, expected integers")
    return _tensor(box, field.name)


def _tensor(box: dict[str, Any], prefix: str) -> torch.Tensor:
    if box is None or box["data"] is None:
        raise WireError(f"{prefix}: a tensor without data")
    return tensor_from_bytes(box["dtype"], box["shape"], box["data"], prefix)


def numbers(column: pa.Array) -> list[Any]:
    """Return the values of a number column, with `None` for nulls (`to_pylist` is slower)."""
    if isinstance(column, Values):
        return column.values
    values: list[Any] = column.to_pylist() if column.null_count else column.to_numpy().tolist()
    return values


def texts(column: pa.Array) -> list[str | None]:
    """Return the values of a text column (`to_numpy` is several times faster than `to_pylist`)."""
    if isinstance(column, Values):
        return column.values
    try:
        values: list[str | None] = column.to_numpy(zero_copy_only=False).tolist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise WireError(f"a text column is not UTF-8: {error}") from None
    return values


def _decode_eids(column: pa.StructArray) -> list[EID]:
    batches, tasks, runs, steps, suffixes, ints = map(column.field, range(6))
    batch, task, flags = texts(batches), texts(tasks), ints.to_numpy(zero_copy_only=False)
    # Batches and tasks repeat: convert each distinct number once.
    integers: dict[str | None, int] = {}
    for text in {*compress(batch, (flags & 1).tolist()), *compress(task, (flags & 2).tolist())}:
        try:
            integers[text] = number = int(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise WireError(f"eid: {text!r:.80} is marked as a number but is not one") from None
        if number.bit_length() > MAX_BITS:
            raise WireError(f"eid: a number of {number.bit_length()} bits, expected at most {MAX_BITS}")
    ids = []
    new, set_dict = EID.__new__, object.__setattr__  # skips validation: wire checked the columns
    for a, b, run, step, suffix, flag in zip(
        batch, task, numbers(runs), numbers(steps), texts(suffixes), flags.tolist(), strict=True
    ):
        eid = new(EID)
        set_dict(
            eid,
            "__dict__",
            {
                "batch": integers[a] if flag & 1 else a,
                "task": integers[b] if flag & 2 else b,
                "run": run,
                "step": step,
                "suffix": suffix,
            },
        )
        ids.append(eid)
    return ids


def _media(entries: list[dict[str, Any]] | None, prefix: str) -> dict[str, Any] | None:
    if entries is None:
        return None
    if any(entry is None or entry["key"] is None for entry in entries):
        raise WireError(f"{prefix}: a tensor without a key")
    media = {entry["key"]: _tensor(entry, f"{prefix}[{entry['key']!r}]") for entry in entries}
    if len(media) != len(entries):
        raise WireError(f"{prefix}: a duplicate key")
    return media


def _custom_fields(text: str) -> list[Any]:
    from rollbook.core.experience import CustomField

    entries = freeform.loads(text)
    if not isinstance(entries, list):
        raise WireError(f"custom_fields: got {type(entries).__name__}, expected a list")
    try:
        return [CustomField.from_dict(entry) for entry in entries]
    except (TypeError, ValueError, KeyError) as error:
        raise WireError(f"custom_fields: {error}") from None


def check_depth(columns: Mapping[str, Column], max_depth: int) -> None:
    """Raise `WireError` if a free-form value is nested deeper than `max_depth`, naming the record and field."""
    for name, field in FIELDS.items():
        if field.kind == "json" and name in columns:
            freeform.loads_many(texts(columns[name]), max_depth, prefix=name)


def set_aside(field: Field, columns: Mapping[str, Column], count: int) -> list[frozenset[str]]:
    """Return for each record the name of the field if its value is in the `__other` column, else nothing."""
    other = columns.get(f"{field.name}__other")
    if other is None:
        return [frozenset()] * count
    name, nothing = frozenset((field.name,)), frozenset[str]()
    return [name if valid else nothing for valid in other.is_valid().to_pylist()]


def concat(parts: Sequence[tuple[Columns, int]]) -> Columns:
    """Concatenate columns; a part without a column gets absent rows."""
    names: dict[str, None] = {}
    for columns, _ in parts:
        names.update(dict.fromkeys(sorted(columns)))
    joined: Columns = {}
    for name in names:
        if name in joined:
            continue
        present = [columns[name] for columns, _ in parts if name in columns]
        if isinstance(present[0], Ragged):
            _concat_ragged(name, parts, joined)
        else:
            joined[name] = _concat_arrow(name, parts, present[0].type)
    return joined


def _concat_arrow(name: str, parts: Sequence[tuple[Columns, int]], kind: pa.DataType) -> pa.Array:
    arrays = [columns[name] if name in columns else pa.nulls(count, kind) for columns, count in parts]
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r} has different types in the parts: {error}") from None


def _concat_ragged(name: str, parts: Sequence[tuple[Columns, int]], joined: Columns) -> None:
    columns = [columns_of_part.get(name) for columns_of_part, _ in parts]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    dtype = promote(column.dtype for column in ragged)
    if dtype is None or len({column.trailing for column in ragged}) > 1:
        # No column type fits all rows: encode them again, which moves some to the side column.
        field = FIELDS[name]
        values: list[Any] = []
        aside: list[frozenset[str]] = []
        for columns_of_part, count in parts:
            values.extend(decode(field, columns_of_part) or [None] * count)
            aside.extend(set_aside(field, columns_of_part, count))
        joined.update(_encode_tensors(field, values, aside))
        return
    trailing = ragged[0].trailing
    joined[name] = Ragged.concat(
        [
            column.as_dtype(dtype) if isinstance(column, Ragged) else Ragged.absent(count, dtype, trailing)
            for column, (_, count) in zip(columns, parts, strict=True)
        ]
    )


_STORAGE = {name: pa.from_numpy_dtype(np.dtype(name)) for name in {d.storage for d in DTYPES.values() if d.code}}
_STORAGE_NAMES = {kind: name for name, kind in _STORAGE.items()}


# --- columns to Arrow -----------------------------------------------------------------------------------------


def to_arrays(columns: Mapping[str, Column], portable: bool = False) -> dict[str, pa.Array]:
    """Return the columns as Arrow arrays, in the order of the table, unknown ones last.

    Args:
        columns: The columns.
        portable: Write half-precision floats as float32, with their type in a `__dtype` column: for Parquet and HF.

    Returns:
        The arrays; tensor columns share their memory.
    """
    arrays: dict[str, pa.Array] = {}
    for name in (*filter(columns.__contains__, OWNERS), *sorted(columns.keys() - OWNERS)):
        column = columns[name]
        if not isinstance(column, Ragged):
            arrays[name] = column
            continue
        dtype = DTYPES[column.dtype]
        if portable and dtype.portable != dtype.storage:
            column, dtype = column.as_dtype("float32"), DTYPES["float32"]
        start, stop = int(column.offsets[0]), int(column.offsets[-1])
        offsets = column.offsets - start if start else np.ascontiguousarray(column.offsets)
        values = (column.memory if column.pending else column.values)[start:stop]
        child = pa.Array.from_buffers(
            _STORAGE[dtype.storage], values.size, [None, pa.py_buffer(np.ascontiguousarray(values).reshape(-1))]
        )
        for size in reversed(column.trailing):
            child = pa.FixedSizeListArray.from_arrays(child, size)
        bitmap = None if column.valid is None else pa.py_buffer(np.packbits(column.valid, bitorder="little"))
        arrays[name] = pa.Array.from_buffers(
            pa.large_list(child.type), len(column), [bitmap, pa.py_buffer(offsets)], children=[child]
        )
        # A field that was withdrawn meanwhile still has its column.
        field = FIELDS.get(name) or Field(name, "tensor", dtype=column.dtype)
        codes = column.codes
        if codes is None and implied(dtype.storage, field) != column.dtype:
            codes = np.full(len(column), dtype.code, dtype=np.uint8)
        if codes is not None:
            codes = codes if column.valid is None else np.where(column.valid, codes, 0).astype(np.uint8)
            arrays[f"{name}__dtype"] = pa.array(codes, pa.uint8())
    return arrays


def implied(storage: str, field: Field) -> str:
    """Return the element type of a column that has no `__dtype` column."""
    return "bool" if storage == "uint8" and field.dtype == "bool" else storage


def empty_type(field: Field) -> pa.DataType:
    """Return the type of the main column of a field without values."""
    if field.kind != "tensor":
        return PLAIN_TYPES[field.kind, ""]
    kind = _STORAGE[DTYPES[field.dtype].storage]
    for _ in range(field.trailing):
        kind = pa.large_list(kind)
    return pa.large_list(kind)


# --- Arrow to columns -----------------------------------------------------------------------------------------


def check_schema(schema: pa.Schema) -> None:
    """Raise `WireError` if a schema does not fit the field table. Unknown columns are not checked."""
    if len(set(schema.names)) != len(schema.names):
        raise WireError("the schema has a duplicate column")
    for arrow_field in schema:
        kind = arrow_field.type
        if arrow_field.name not in OWNERS:
            continue
        field, side = OWNERS[arrow_field.name]
        if side == "dtype" and field.name not in schema.names:
            raise WireError(f"column {arrow_field.name!r} is there without {field.name!r}")
        if side == "one" and not field.broadcast:
            raise WireError(f"column {arrow_field.name!r}: one number cannot stand for all of {field.name}")
        if field.kind == "tensor" and not side:
            _check_ragged_type(field, kind)
        elif kind != PLAIN_TYPES[field.kind, side]:
            raise WireError(f"column {arrow_field.name!r}: type {kind}, expected {PLAIN_TYPES[field.kind, side]}")
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


def from_arrays(arrays: Mapping[str, pa.Array], memory: NDArray[np.uint8] | None = None) -> Columns:
    """Return columns over Arrow arrays of the right types, without copying.

    Args:
        arrays: The arrays, by column name.
        memory: The writable bytes of the arrays, if tensors may be views of them.

    Returns:
        The columns; `__dtype` columns become part of their tensor columns.
    """
    columns: Columns = {}
    for name, array in arrays.items():
        field, side = OWNERS.get(name, (None, ""))
        if field is not None and field.kind == "tensor" and not side:
            columns[name] = _arrow_to_ragged(array, field, arrays.get(f"{name}__dtype"), memory)
        elif side != "dtype":
            columns[name] = array
    return columns


def validity(array: pa.Array) -> NDArray[np.bool_] | None:
    """Return which entries are not null, or `None` if all are."""
    bitmap = array.buffers()[0]
    if bitmap is None or array.null_count == 0:
        return None
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def offsets(array: pa.Array, limit: int) -> NDArray[np.int64]:
    """Return the 64-bit offsets of a large list or text array; raise `WireError` if they decrease or exceed `limit`."""
    buffer = array.buffers()[1]
    if len(array) == 0:
        return np.zeros(1, dtype=np.int64)
    if buffer is None or buffer.size < 8 * (array.offset + len(array) + 1):
        raise WireError("an offsets buffer is too short")
    values = np.frombuffer(buffer, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    if values[0] < 0 or values[-1] > limit or bool((values[1:] < values[:-1]).any()):
        raise WireError("offsets decrease, or exceed their values")
    return values


def _arrow_to_ragged(array: pa.Array, field: Field, codes: pa.Array | None, memory: NDArray[np.uint8] | None) -> Ragged:
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
            raise WireError(f"column {field.name!r}: its values are truncated")
        values = np.frombuffer(buffer, dtype=dtype, count=len(child), offset=child.offset * dtype.itemsize)
    if memory is not None and values.size:
        # pyarrow hands out read-only views: take the same bytes of the memory that they are views of.
        start = values.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
        inside = 0 <= start <= memory.nbytes - values.nbytes
        values = memory[start : start + values.nbytes].view(dtype) if inside else values.copy()
    valid = validity(array)
    if valid is not None and (np.diff(bounds)[~valid] != 0).any():
        raise WireError(f"column {field.name!r}: a row is null and has values")
    name = implied(storage, field)
    row_codes = None
    if codes is not None:
        name, row_codes = _row_codes(field, storage, np.asarray(codes.fill_null(0)), valid)
    return Ragged(values.reshape(-1, *trailing), bounds, name, valid, row_codes, owned=memory is not None)


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
        raise WireError(f"column '{field.name}__dtype': {', '.join(names)}, expected integers")
    if not names:
        return implied(storage, field), None
    if len(names) == 1 and DTYPES[names[0]].storage == storage:
        return names[0], None
    if promote([*names, storage]) != storage:
        raise WireError(f"column '{field.name}__dtype': {storage} values cannot hold rows of {', '.join(names)}")
    return storage, codes


# --- checks against the field table-------------------------------------------------------------------------------


def check_columns(columns: Columns, count: int, masks: bool = False) -> None:
    """Check columns against the field table: lengths, kinds, required values.

    Args:
        columns: The columns.
        count: How many records they have.
        masks: Check also that bool columns hold nothing but 0 and 1, which reads every value.

    Raises:
        ValueError: Names the field, the record, what it has and what was expected.
    """
    # Small batches are frequent, and a call into Arrow takes longer than comparing eight numbers: the common cases,
    # columns without nulls and records of one kind, are recognized early.
    lengths, present = token_lengths(columns, count)
    if not present.all():
        _fail(present, "tokens: got None, expected token ids")
    for name in ("eid", "prompt_length", "experience_type"):
        if name not in columns:
            raise ValueError(f"{name}: got None in every record, expected a value")
        if columns[name].null_count:
            _fail(np.asarray(columns[name].is_valid()), f"{name}: got None, expected a value")
    eid = columns["eid"]
    for i in range(eid.type.num_fields):
        id_column = eid.field(i)
        if id_column.null_count:
            _fail(np.asarray(id_column.is_valid()), f"eid.{eid.type.field(i).name}: got None, expected a value")
    prompt = columns["prompt_length"].to_numpy(zero_copy_only=False).astype(np.int64)
    kind = columns["experience_type"]
    single, multi, dpo = kinds(kind)
    if not (single | multi | dpo).all():
        _fail(single | multi | dpo, f"experience_type: expected one of {', '.join(EXPERIENCE_TYPES)}, got", kind)
    pairs = bool(dpo.any())
    is_truncated = truncated(columns, count) & ~dpo
    fits = np.where(multi, prompt >= 0, prompt > 0) & (
        is_truncated | np.where(single, prompt < lengths, prompt <= lengths)
    )
    if pairs:
        fits = np.where(dpo, prompt == lengths, fits)
    if not fits.all():
        i = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"record {i}: prompt_length: got {int(prompt[i])} with {int(lengths[i])} tokens, expected "
            "0 < prompt_length < tokens (single_turn), 0 to all (multi_turn), all (dpo)"
        )
    expected = lengths - prompt
    if is_truncated.any():
        logprobs = columns.get("logprobs")
        scored = has(columns, "logprobs", count) | ~is_truncated
        if not scored.all():
            _fail(scored, "logprobs: got None, expected them with truncate_status 'prompt_truncated'")
        # -1: log-probs in a side column have no expected length.
        widths = np.where(logprobs.present, logprobs.lengths, -1) if isinstance(logprobs, Ragged) else -1
        expected = np.where(is_truncated, widths, expected)
        mask = columns.get("action_mask")
        if isinstance(mask, Ragged):
            for i in np.flatnonzero(is_truncated & mask.present).tolist():
                if mask.row(i).any():
                    raise ValueError(
                        f"record {i}: action_mask: got True, expected all False with truncate_status 'prompt_truncated'"
                    )
    for field in TENSOR_FIELDS[None]:
        column = columns.get(field.name) if field.accepts == "integer" else None
        if isinstance(column, Ragged) and not INTEGERS.issuperset({column.dtype, *column.row_dtypes()}):
            raise ValueError(f"{field.name}: got values of {column.dtype}, expected integers")
    for field in TENSOR_FIELDS["response"]:
        column = columns.get(field.name)
        if isinstance(column, Ragged):
            wrong = column.lengths != expected
            if wrong.any() and (wrong := wrong & column.present & (expected >= 0)).any():
                i = int(np.flatnonzero(wrong)[0])
                raise ValueError(
                    f"record {i}: {field.name}: got {int(column.lengths[i])} entries, expected {int(expected[i])} "
                    "(one per response token)"
                )
    for field in TENSOR_FIELDS["sequence"]:
        column = columns.get(field.name)
        if field.name != "tokens" and isinstance(column, Ragged):
            fits = ~column.present | (column.lengths == lengths)
            if not fits.all():
                _fail(fits, f"{field.name}: expected one entry for each token")
    if pairs or not columns.keys().isdisjoint(("chosen", "chosen__other", "rejected", "rejected__other")):
        chosen, rejected = has(columns, "chosen", count), has(columns, "rejected", count)
        for name, present in (("chosen", chosen), ("rejected", rejected)):
            fits = present | ~(dpo | chosen | rejected)
            if not fits.all():
                _fail(fits, f"{name}: got None, expected tokens, as for the other answer of a pair")
    if "group_size" in columns:
        sizes = columns["group_size"]
        fits = np.asarray(pc.fill_null(pc.greater(sizes, 0), True))
        if not fits.all():
            _fail(fits, "group_size: expected at least 1, got", sizes)
    if masks:
        for name, column in columns.items():
            if isinstance(column, Ragged) and column.dtype == "bool" and (largest := column.largest()) > 1:
                raise ValueError(f"{name}: got the byte {largest} in a bool column, expected 0 or 1")


def _fail(fits: NDArray[np.bool_], message: str, values: pa.Array | None = None) -> None:
    """Raise `ValueError` for the first record that does not fit."""
    i = int(np.flatnonzero(~fits)[0])
    raise ValueError(f"record {i}: {message}" + ("" if values is None else f" {values[i].as_py()!r}"))


def token_lengths(columns: Columns, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number of tokens of each record, and whether it has tokens. Shape: [N]."""
    tokens, other = columns.get("tokens"), columns.get("tokens__other")
    lengths = tokens.lengths.copy() if isinstance(tokens, Ragged) else np.zeros(count, dtype=np.int64)
    present = tokens.present.copy() if isinstance(tokens, Ragged) else np.zeros(count, dtype=np.bool_)
    if other is not None:
        for i in np.flatnonzero(np.asarray(other.is_valid())).tolist():
            shape = other[i]["shape"].as_py()
            if present[i] or not shape or len(shape) != 1 or shape[0] is None:
                raise ValueError(f"record {i}: tokens: got shape {shape}, expected one dimension, given once")
            lengths[i], present[i] = shape[0], True
    return lengths, present


def kinds(column: pa.Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which records are single_turn, multi_turn and dpo: three masks [N]."""
    count = len(column)
    plain = count and not column.null_count and column.type == pa.large_string()
    first: str = column[0].as_py() if plain else ""
    text = column.buffers()[2] if first in EXPERIENCE_TYPES else None
    if text is not None:
        # Usually all records are of one kind, and comparing all bytes at once is several times faster.
        bounds = offsets(column, text.size)
        alike = bool((np.diff(bounds) == len(first)).all())
        if alike and bytes(memoryview(text)[bounds[0] : bounds[-1]]) == first.encode() * count:
            masks = np.zeros((3, count), dtype=np.bool_)
            masks[EXPERIENCE_TYPES.index(first)] = True
            return masks[0], masks[1], masks[2]
    single, multi, dpo = (np.asarray(pc.fill_null(pc.equal(column, name), False)) for name in EXPERIENCE_TYPES)
    return single, multi, dpo


def truncated(columns: Columns, count: int) -> NDArray[np.bool_]:
    """Return which records have a truncated prompt. Shape: [N]."""
    if "truncate_status" not in columns:
        return np.zeros(count, dtype=np.bool_)
    return np.asarray(pc.fill_null(pc.equal(columns["truncate_status"], "prompt_truncated"), False))


def has(columns: Columns, name: str, count: int) -> NDArray[np.bool_]:
    """Return which records have a value in a tensor field. Shape: [N]."""
    column, other = columns.get(name), columns.get(f"{name}__other")
    present = column.present if isinstance(column, Ragged) else np.zeros(count, dtype=np.bool_)
    return present if other is None else present | np.asarray(other.is_valid())
