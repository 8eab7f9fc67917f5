"""Arrow tables of records: the columns of the wire format, in the form that other tools read and write.

Invariant: a table that Rollbook wrote is read back exactly; a table of another tool with the same column names is read
with the types that it has. Half-precision floats are float32 in these tables, with their own type in `<field>__dtype`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rollbook.core import columns, experiences
from rollbook.core.columns import PLAIN_TYPES, Columns
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS, Field, owner
from rollbook.core.freeform import Json
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, promote


def to_table(records: Experiences, portable: bool = False, typed: bool = True) -> pa.Table:
    """Convert records to an Arrow table.

    Args:
        records: The records.
        portable: Add a column for every field, as Parquet files and HF datasets have them.
        typed: With `portable`, give the column of a field that no record has the field's type, else the null type.

    Returns:
        A table with one row per record, and one column per field and side column.

    >>> table = to_table(Experiences.from_columns({"tokens": [[1, 2, 3], [4, 5]], "reward": [1.0, 0.0]}))
    >>> table["tokens"].to_pylist(), from_table(table).values("reward")
    ([[1, 2, 3], [4, 5]], [1.0, 0.0])
    """
    arrays = columns.to_arrays(records.columns, portable)
    if portable:
        ordered = {}
        for field in FIELDS.values():
            ordered[field.name] = arrays.pop(field.name, None)
            if ordered[field.name] is None:
                ordered[field.name] = pa.nulls(len(records), columns.empty_type(field) if typed else pa.null())
            for side in [name for name in arrays if name.startswith(f"{field.name}__")]:
                ordered[side] = arrays.pop(side)
        arrays = {**ordered, **arrays}
    return pa.table(arrays)


def from_table(table: pa.Table | pa.RecordBatch) -> Experiences:
    """Read records from an Arrow table of Rollbook, or of another tool with the same column names.

    In a table without `experience_type`, a record with the default mask of a single turn is `single_turn`: Trinity
    writes these masks, too.

    Args:
        table: The table.

    Returns:
        The records.

    Raises:
        WireError: The table has no tokens, or a column that cannot be read as its field.

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
            _normalize(name, array, arrays, parts)
        except WireError:
            raise
        except (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise WireError(f"column {name!r} of type {array.type} cannot be read as its field: {error}") from None
    if "tokens" not in arrays and "tokens" not in parts and "tokens__other" not in arrays:
        raise WireError("the table has no column 'tokens'")
    parts.update(columns.from_arrays({k: v for k, v in arrays.items() if k.partition("__")[0] not in parts}))
    try:
        experiences.add_required_columns(parts, count, explicit_masks=True)
        columns.check_columns(parts, count, masks=True)
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from None
    return Experiences.from_encoded(parts, count)


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    return column


def _normalize(name: str, array: pa.Array, arrays: dict[str, pa.Array], parts: Columns) -> None:
    """Add `array` to `arrays`, cast to the type of its field; if no cast exists, encode its values into `parts`."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    column = owner(name)
    if column is None:
        arrays[name] = array
        return
    field, side = column
    if field.kind == "tensor" and not side:
        kind = _ragged_type(field, array.type)
        if kind is None:
            parts.update(_by_value(field, array))
        else:
            arrays[name] = _drop_null_values(array if kind == array.type else array.cast(kind))
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
    """Return the column type that `kind` can be cast to without reading values, or `None`."""
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
        raise WireError(f"column {field.name!r}: got values of {inner}, expected numbers of its type")
    for size in reversed(sizes):
        inner = pa.list_(inner, size)
    return pa.large_list(inner)


def _drop_null_values(array: pa.Array) -> pa.Array:
    """Return a list array without the values of its null rows, which other tools may leave in place."""
    valid = columns.validity(array)
    if valid is None or not (np.diff(columns.offsets(array, len(array.values)))[~valid] != 0).any():
        return array
    return array.take(pa.array(np.arange(len(array))))


def _by_value(field: Field, array: pa.Array) -> Columns:
    """Encode columns of other tools, with other types, from Python values."""
    from rollbook.core.experience import as_eid, convert

    values = array.to_pylist()
    if field.kind == "tensor":
        element = array.type
        while element.num_fields:
            element = element.field(0).type
        dtype = str(element)
        values = [None if v is None else _tensor(v, dtype) for v in values]
    elif field.kind == "eid":
        values = [EID() if v is None else as_eid(_drop_nulls(v)) for v in values]
    else:
        values = [convert(field, v) if v is not None else None for v in values]
    return columns.encode(field, values)


def _drop_nulls(parts: Json) -> Any:
    return {name: entry for name, entry in parts.items() if entry is not None} if isinstance(parts, dict) else parts


def _tensor(value: Json, dtype: str) -> Any:
    import torch

    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(dtype, dtype)
    return torch.tensor(value, dtype=getattr(torch, name if name in DTYPES else "float32"))


# --- tables of one schema -----------------------------------------------------------------------------------------


class UnionSchema:
    """A schema that fits every batch so far: element type and trailing sizes of tensor columns, and side columns.

    Args:
        typed: Whether the column of a field that no batch has gets the field's type, or the null type (for HF).

    >>> union = UnionSchema(typed=True)
    >>> for dtype in ("int32", "int64"):
    ...     arrays, schema = union.fit(Experiences.from_columns({"tokens": Ragged.from_arrays([[1, 2]], dtype)}))
    ...     schema.field("tokens").type
    LargeListType(large_list<item: int32>)
    LargeListType(large_list<item: int64>)
    """

    def __init__(self, typed: bool) -> None:
        self.typed = typed
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.types: dict[str, pa.DataType] = {}

    def fit(self, records: Experiences) -> tuple[dict[str, pa.Array], pa.Schema]:
        """Add a batch; return its arrays and the schema that fits it and all earlier ones.

        Args:
            records: The batch.

        Returns:
            The arrays by column, and the schema.

        Raises:
            ValueError: A column has another type than in an earlier batch, and none fits both.
        """
        parts = dict(records.columns)
        for name in [name for name in parts if name in FIELDS and isinstance(parts[name], Ragged)]:
            column = parts[name]
            dtype, trailing = self.tensors.get(name, (column.dtype, column.trailing))
            wide = promote((dtype, column.dtype))
            if wide is None or trailing != column.trailing:
                # No column type holds both: these rows are stored as {dtype, shape, data}.
                self._store_separately(FIELDS[name], parts, len(records))
                continue
            if wide != dtype:
                # Rows of earlier batches keep their dtype in a side column.
                self.types[f"{name}__dtype"] = pa.uint8()
            self.tensors[name] = (wide, trailing)
            parts[name] = column.as_dtype(wide)
        arrays = columns.to_arrays(parts, portable=True)
        for name, array in arrays.items():
            earlier = self.types.setdefault(name, array.type)
            if earlier != array.type:
                if name not in self.tensors:
                    raise ValueError(f"column {name!r} is {earlier} in one batch and {array.type} in another")
                self.types[name] = array.type
        return arrays, self.schema()

    def _store_separately(self, field: Field, parts: Columns, count: int) -> None:
        values = columns.decode(field, parts) or []
        encoded = columns.encode(field, values, [frozenset((field.name,))] * count)
        for name in (field.name, f"{field.name}__other", f"{field.name}__one"):
            parts.pop(name, None)
        parts.update(encoded)

    def schema(self) -> pa.Schema:
        """Return the schema: the column of every field with its side columns, then unknown columns."""
        ordered: dict[str, pa.DataType] = {}
        for field in FIELDS.values():
            ordered[field.name] = self.types.get(field.name) or (columns.empty_type(field) if self.typed else pa.null())
            ordered.update({side: t for side, t in sorted(self.types.items()) if side.startswith(f"{field.name}__")})
        ordered.update({name: kind for name, kind in self.types.items() if name not in ordered})
        return pa.schema(list(ordered.items()))

    def table(self, arrays: dict[str, pa.Array], schema: pa.Schema, count: int) -> pa.Table:
        """Return the arrays as a table of this schema.

        Args:
            arrays: What `fit` returned for a batch.
            schema: A schema that `fit` returned then or later.
            count: Number of records of the batch.

        Returns:
            The table.
        """
        full = {}
        for name, kind in zip(schema.names, schema.types, strict=True):
            array = arrays.get(name)
            main = arrays.get(name.removesuffix("__dtype")) if name.endswith("__dtype") else None
            if array is None and main is not None:
                # Other tables of the file have this column, so this one needs it too, with the implied dtype.
                array = self._dtype_codes(FIELDS[name.removesuffix("__dtype")], main)
            full[name] = pa.nulls(count, kind) if array is None else array
        return pa.table(full, schema=schema)

    def _dtype_codes(self, field: Field, main: pa.Array) -> pa.Array:
        inner = main.type
        while inner.num_fields:
            inner = inner.field(0).type
        code = DTYPES[columns.implied(str(np.dtype(inner.to_pandas_dtype())), field)].code
        return pa.array(np.where(np.asarray(main.is_valid()), code, 0).astype(np.uint8))


def write_tables(
    batches: Iterable[Experiences],
    path: str,
    *,
    typed: bool,
    open_writer: Callable[[str, pa.Schema], Any],
    read_tables: Callable[[str], Iterator[Any]],
) -> int:
    """Write batches as tables of one schema.

    The schema is the first batch's, with every field. When a batch needs another type or a side column, the tables
    written so far are copied under the wider schema. That is rare: the schema only grows.

    Args:
        batches: The records.
        path: The file.
        typed: See `UnionSchema`.
        open_writer: Opens a writer (`write_table`, `close`) for a path and a schema.
        read_tables: Reads the tables of a path back.

    Returns:
        The number of records.

    >>> import tempfile
    >>> columns = [Ragged.from_arrays([[1, 2], [3, 4]], dtype) for dtype in ("int32", "int64")]
    >>> batches = [Experiences.from_columns({"tokens": column}) for column in columns]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tables(batches, f"{folder}/records.arrow", typed=True, open_writer=pa.ipc.new_stream,
    ...                  read_tables=lambda path: pa.ipc.open_stream(pa.memory_map(path)))
    4
    """
    union, count = UnionSchema(typed), 0
    schema = union.schema()
    writer = open_writer(path, schema)
    try:
        for batch in batches:
            arrays, wider = union.fit(batch)
            if wider != schema:
                writer.close()
                wide_writer = open_writer(f"{path}.wider", wider)
                try:
                    for table in read_tables(path) if count else ():
                        records = from_table(table)
                        wide_writer.write_table(union.table(union.fit(records)[0], wider, len(records)))
                except BaseException:
                    wide_writer.close()
                    raise
                os.replace(f"{path}.wider", path)
                writer, schema = wide_writer, wider
            writer.write_table(union.table(arrays, schema, len(batch)))
            count += len(batch)
    finally:
        writer.close()
        if os.path.exists(f"{path}.wider"):
            os.remove(f"{path}.wider")
    return count


__all__ = ["UnionSchema", "from_table", "to_table", "write_tables"]
