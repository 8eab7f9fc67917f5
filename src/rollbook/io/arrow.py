"""Arrow tables, Parquet files and HF datasets: the same columns as on the wire, as other tools read them.

Invariant: what Rollbook wrote it reads back exactly; what another tool wrote with the same column names it reads with
the types that tool gave. Half-precision floats are float32 in these forms, with their own type in `<field>__dtype`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rollbook.core import columns, experiences
from rollbook.core import columns as arrow
from rollbook.core.columns import PLAIN_TYPES, Columns
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS, Field, owner
from rollbook.core.files import check_regular
from rollbook.core.ids import EID
from rollbook.core.wire import DEFAULT_LIMITS, Limits
from rollbook.io import parquet


def to_table(many: Experiences, portable: bool, typed: bool = True) -> pa.Table:
    """The columns as a table; `portable` has a column for every field, null (and of null type unless `typed`) where no
    record has it."""
    arrays = arrow.to_arrays(many.columns, portable)
    if portable:
        named = {}
        for field in FIELDS.values():
            named[field.name] = arrays.pop(field.name, None)
            if named[field.name] is None:
                named[field.name] = pa.nulls(len(many), arrow.empty_type(field) if typed else pa.null())
            for side in [name for name in arrays if name.startswith(f"{field.name}__")]:
                named[side] = arrays.pop(side)
        arrays = {**named, **arrays}
    return pa.table(arrays)


def from_table(table: pa.Table | pa.RecordBatch) -> Experiences:
    """Records from an Arrow table; see `Experiences.from_arrow`.

    In a table without `experience_type`, a record whose mask is the one that a single turn gets is a single_turn:
    Trinity writes these masks too.

    >>> table = pa.table({"tokens": [[1, 2, 3], [4, 5]], "reward": [1, None], "action_mask": [[True, False], None]})
    >>> [(row.tokens.tolist(), row.reward, row.experience_type) for row in from_table(table)]
    [([1, 2, 3], 1.0, 'multi_turn'), ([4, 5], None, 'single_turn')]
    """
    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        raise ValueError(f"table: got {type(table).__name__}, expected a pyarrow Table or RecordBatch")
    count = table.num_rows
    if not count:
        return Experiences()
    if len(set(table.schema.names)) != len(table.schema.names):
        raise WireError("the table names a column twice")
    arrays: dict[str, pa.Array] = {}
    parts: Columns = {}
    for name in table.schema.names:
        array = _one_chunk(table.column(name))
        if array.null_count == len(array) and owner(name) is not None:
            continue
        try:
            array.validate(full=True)
            _normalise(name, array, arrays, parts)
        except WireError:
            raise
        except (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise WireError(f"column {name!r} of type {array.type} cannot be read as its field: {error}") from None
    if "tokens" not in arrays and "tokens" not in parts and "tokens__other" not in arrays:
        raise WireError("the table has no column 'tokens'")
    parts.update(arrow.from_arrays({k: v for k, v in arrays.items() if k.partition("__")[0] not in parts}))
    try:
        experiences.complete(parts, count, explicit_masks=True)
        arrow.check_columns(parts, count)
        arrow.check_masks(parts)
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from None
    return Experiences._of(parts, count)


def _one_chunk(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    return column


def _normalise(name: str, array: pa.Array, arrays: dict[str, pa.Array], parts: Columns) -> None:
    """Put `array` into `arrays` with the type its field has, or, if it must be remade by value, into `parts`."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    known = owner(name)
    if known is None:
        arrays[name] = array
        return
    field, side = known
    if field.kind == "tensor" and not side:
        kind = _ragged_type(field, array.type)
        if kind is None:
            parts.update(_by_value(field, array))
        else:
            arrays[name] = _without_hidden(array if kind == array.type else array.cast(kind))
        return
    kind = PLAIN_TYPES[field.kind, side]
    if array.type == kind:
        arrays[name] = array
    elif (
        (_is_text(kind) and not _is_text(array.type))
        or (field.kind == "eid" and "ints" not in _names(array.type))
        or (field.kind == "media" and not _is_list(array.type))
    ):
        parts.update(_by_value(field, array))
    else:
        arrays[name] = array.cast(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _names(kind: pa.DataType) -> list[str]:
    return [kind.field(i).name for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _ragged_type(field: Field, kind: pa.DataType) -> pa.DataType | None:
    """The column type that `kind` can be cast to without looking at values, if there is one."""
    if not (_is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    inner = kind.value_type
    sizes = []
    while pa.types.is_fixed_size_list(inner):
        sizes.append(inner.list_size)
        inner = inner.value_type
    if len(sizes) != field.trailing or 0 in sizes:
        return None
    if pa.types.is_boolean(inner) and field.accepts == "real":
        inner = pa.uint8()
    if not pa.types.is_integer(inner) and (field.accepts == "integer" or not pa.types.is_floating(inner)):
        raise WireError(f"column {field.name!r}: got values of {inner}, expected numbers that it can hold")
    for size in reversed(sizes):
        inner = pa.list_(inner, size)
    return pa.large_list(inner)


def _without_hidden(array: pa.Array) -> pa.Array:
    """The same list array, with no values behind its null rows (other tools may leave some there)."""
    valid = arrow.validity(array)
    if valid is None or not (np.diff(arrow.offsets(array, len(array.values)))[~valid] != 0).any():
        return array
    return array.take(pa.array(np.arange(len(array))))


def _by_value(field: Field, array: pa.Array) -> Columns:
    """Columns made again from Python values: for tables of other tools, whose types are not ours."""
    from rollbook.core.experience import as_eid, convert

    values = array.to_pylist()
    if field.kind == "tensor":
        element = array.type
        while element.num_fields:
            element = element.field(0).type
        dtype = str(element)
        values = [None if v is None else _tensor(v, dtype) for v in values]
    elif field.kind == "eid":
        values = [EID() if v is None else as_eid(_given(v)) for v in values]
    else:
        values = [convert(field, v) if v is not None else None for v in values]
    return columns.encode(field, values)


def _given(parts: Any) -> Any:
    return {name: part for name, part in parts.items() if part is not None} if isinstance(parts, dict) else parts


def _tensor(value: Any, dtype: str) -> Any:
    import torch

    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(dtype, dtype)
    return torch.tensor(value, dtype=getattr(torch, name if name in DTYPES else "float32"))


# --- Parquet ------------------------------------------------------------------------------------------------------


def write_parquet(many: Experiences, path: str | os.PathLike[str], compression: str = "zstd") -> None:
    """Write one Parquet file, whole or not at all: it is moved into place when it is complete."""
    import pyarrow.parquet as pq

    final = os.fspath(path)
    partial = f"{final}.{os.getpid()}.partial"
    try:
        pq.write_table(to_table(many, portable=True), partial, compression=compression)
        os.replace(partial, final)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def read_parquet(path: str | os.PathLike[str], limits: Limits = DEFAULT_LIMITS) -> Experiences:
    """The records of a Parquet file; `WireError` if it is damaged or its columns are not those of records."""
    check_regular(path)
    parts = list(parquet.batches(path, 1 << 16, limits=limits))
    return from_table(pa.Table.from_batches(parts)) if parts else Experiences()


# --- HF datasets --------------------------------------------------------------------------------------------------


def to_hf(many: Experiences, for_trinity: bool = False) -> Any:
    """A `datasets.Dataset` of these records; see `rollbook.compat.trinity.to_hf_datasets`."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # Empty columns without a type: datasets then concatenates with any.
    table = _trinity_table(many) if for_trinity else to_table(many, portable=True, typed=False)
    # Left to itself, datasets pickles the whole table to name it; the same content gets the same name here too.
    digest = xxhash.xxh3_128(str(table.schema).encode())
    for column in table.columns:
        for chunk in column.chunks:
            digest.update(f"{len(chunk)} {chunk.offset}".encode())
            for buffer in chunk.buffers():
                digest.update(b"" if buffer is None else buffer)
    return Dataset(InMemoryTable(table), fingerprint=digest.hexdigest()[:16])


def _trinity_table(many: Experiences) -> pa.Table:
    """The records with the columns and types of Trinity's own `to_hf_datasets`: dicts as structs, tensors as lists."""
    names = list(FIELDS)
    arrays = {}
    for name in names[: names.index("custom_fields")]:  # the table begins with Trinity's fields, in its order
        values = _trinity_values(many, FIELDS[name])
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{name}: Trinity's datasets need values of one type in all records: {error}; "
                "rollbook.core.wire.to_trxp writes these records"
            ) from None
    for i, custom_fields in enumerate(many.values("custom_fields")):
        if custom_fields:
            raise ValueError(
                f"record {i} ({many.eids()[i]}): custom_fields: got {len(custom_fields)}, expected none: Trinity's "
                "datasets cannot hold them; rollbook.core.wire.to_trxp writes them"
            )
    return pa.table(arrays)


def _trinity_values(many: Experiences, field: Field) -> list[Any]:
    from rollbook.core.experience import implied_mask

    values = many.values(field.name)
    if field.kind == "eid":
        parts = [eid.to_dict() for eid in many.eids()]
        for name in ("batch", "task"):
            if len({type(part[name]) for part in parts}) > 1:  # which print alike as numbers and as text
                parts = [{**part, name: str(part[name])} for part in parts]
        return parts
    if field.kind == "media":
        keys = [value.keys() if value else None for value in values]
        first = next((entry for entry in keys if entry is not None), None)
        for i, entry in enumerate(keys):
            if entry is not None and entry != first:
                raise ValueError(
                    f"record {i} ({many.eids()[i]}): {field.name}: got the keys {sorted(entry)}, expected "
                    f"{sorted(first or ())}: Trinity's datasets need the same in all records that have any"
                )
        return [{key: tensor.tolist() for key, tensor in value.items()} if value else None for value in values]
    if field.name == "action_mask":
        # Without a mask Trinity makes that of a single turn, and with it the right kind.
        return [
            None if value is None or implied_mask(row) else (value != 0).tolist()
            for row, value in zip(many.rows(), values, strict=True)
        ]
    if field.kind == "tensor":
        return [None if value is None else value.tolist() for value in values]
    return [value if value or field.kind != "json" else None for value in values]


def from_hf(dataset: Any) -> Experiences:
    """The records of a `datasets.Dataset`, whatever was selected, filtered or shuffled in it."""
    if not hasattr(dataset, "with_format") or isinstance(dataset, dict):
        raise ValueError(f"dataset: got {type(dataset).__name__}, expected a datasets.Dataset")
    return from_table(dataset.with_format("arrow")[:])
