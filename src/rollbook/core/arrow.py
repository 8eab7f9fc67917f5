"""Physical columns as Arrow arrays and back, and the checks that stand between foreign Arrow data and a record.

Invariant: columns that `check` lets pass keep every promise of the field table: lengths agree with tokens and
prompt, kinds are known, masks hold 0 and 1, offsets rise. Nothing downstream checks them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollbook.core.columns import PLAIN_TYPES, Column, Columns
from rollbook.core.errors import WireError
from rollbook.core.fields import BY_CODE, DTYPES, EXPERIENCE_TYPES, FIELDS, INTEGERS, Field, owner, tensor_fields
from rollbook.core.ragged import Ragged, promote

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
        raise WireError(f"column '{field.name}__dtype': code {unknown[0]} is none that is known")
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


def check(columns: Columns, count: int) -> None:
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
