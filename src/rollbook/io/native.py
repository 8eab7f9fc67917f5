"""Rollbook's columns in files: Parquet and HF datasets of one schema, frames and TRXP payloads one after the other.

Invariant: what is written is read back equal, whatever columns and types later batches bring, and neither side holds
more than a batch (a frame or a payload of another writer is held whole).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from rollbook.core import columns, wire
from rollbook.core import columns as arrow
from rollbook.core.columns import Columns, to_arrays
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS, Field, owner
from rollbook.core.ragged import Ragged, promote
from rollbook.core.wire import DEFAULT_LIMITS, Limits
from rollbook.io import arrow as interchange
from rollbook.io import parquet
from rollbook.io.rows import Errors, files

# --- one schema for all batches -----------------------------------------------------------------------------------


class Shape:
    """The schema that holds every batch seen so far: the element type and trailing sizes of each tensor column, and
    which side columns there are. It only ever grows."""

    def __init__(self, typed: bool) -> None:
        self.typed = typed
        """Whether a field that no batch has is a null column of the field's type, or of none (as HF likes it)."""
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.types: dict[str, pa.DataType] = {}

    def fit(self, many: Experiences) -> tuple[dict[str, pa.Array], pa.Schema]:
        """A batch's arrays under the schema that holds it and all before."""
        parts = dict(many.columns)
        for name in [name for name in parts if name in FIELDS and isinstance(parts[name], Ragged)]:
            column = parts[name]
            dtype, trailing = self.tensors.get(name, (column.dtype, column.trailing))
            wide = promote((dtype, column.dtype))
            if wide is None or trailing != column.trailing:
                # No one column holds both: these rows stand aside, as {dtype, shape, data}.
                self._set_aside(FIELDS[name], parts, len(many))
                continue
            if wide != dtype:
                # The rows before will have to say which type they are.
                self.types[f"{name}__dtype"] = pa.uint8()
            self.tensors[name] = (wide, trailing)
            parts[name] = column.as_dtype(wide)
        arrays = to_arrays(parts, portable=True)
        for name, array in arrays.items():
            known = self.types.setdefault(name, array.type)
            if known != array.type:
                if name not in self.tensors:
                    raise ValueError(f"column {name!r} is {known} in one batch and {array.type} in another")
                self.types[name] = array.type
        return arrays, self.schema()

    def _set_aside(self, field: Field, parts: Columns, count: int) -> None:
        values = columns.decode(field, parts) or []
        made = columns.encode(field, values, [frozenset((field.name,))] * count)
        for name in (field.name, f"{field.name}__other", f"{field.name}__one"):
            parts.pop(name, None)
        parts.update(made)

    def schema(self) -> pa.Schema:
        """Every field's column, its side columns behind it, and unknown columns last."""
        named: dict[str, pa.DataType] = {}
        for field in FIELDS.values():
            named[field.name] = self.types.get(field.name) or (arrow.empty_type(field) if self.typed else pa.null())
            named.update({side: t for side, t in sorted(self.types.items()) if side.startswith(f"{field.name}__")})
        named.update({name: kind for name, kind in self.types.items() if name not in named})
        return pa.schema(list(named.items()))

    def table(self, arrays: dict[str, pa.Array], schema: pa.Schema, count: int) -> pa.Table:
        """The arrays as a table of the whole schema."""
        full = {}
        for name, kind in zip(schema.names, schema.types, strict=True):
            array = arrays.get(name)
            main = arrays.get(name.removesuffix("__dtype")) if name.endswith("__dtype") else None
            if array is None and main is not None:
                # A column that has the type its storage implies says so too where others of its file have to.
                array = self._codes(FIELDS[name.removesuffix("__dtype")], main)
            full[name] = pa.nulls(count, kind) if array is None else array
        return pa.table(full, schema=schema)

    def _codes(self, field: Field, main: pa.Array) -> pa.Array:
        inner = main.type
        while inner.num_fields:
            inner = inner.field(0).type
        code = DTYPES[arrow.implied(str(np.dtype(inner.to_pandas_dtype())), field)].code
        return pa.array(np.where(np.asarray(main.is_valid()), code, 0).astype(np.uint8))


Opened = Callable[[str, pa.Schema], Any]
Tables = Callable[[str], Iterator[Any]]


def write_unified(batches: Iterable[Experiences], path: str, typed: bool, opened: Opened, tables: Tables) -> int:
    """Write tables of one schema to `path`; how many records there were.

    The schema is the first batch's, with every field. A batch that needs more than that (another type, a side column)
    has what was written so far copied under the wider one: that happens a few times in a file's life at most, since
    the schema only grows, and most files are written once.
    """
    shape, count = Shape(typed), 0
    schema = shape.schema()
    writer = opened(path, schema)
    try:
        for batch in batches:
            arrays, wider = shape.fit(batch)
            if wider != schema:
                writer.close()
                again = opened(f"{path}.wider", wider)
                try:
                    for part in tables(path) if count else ():
                        old = interchange.from_table(part)
                        again.write_table(shape.table(shape.fit(old)[0], wider, len(old)))
                except BaseException:
                    again.close()
                    raise
                os.replace(f"{path}.wider", path)
                writer, schema = again, wider
            writer.write_table(shape.table(arrays, schema, len(batch)))
            count += len(batch)
    finally:
        writer.close()
        if os.path.exists(f"{path}.wider"):
            os.remove(f"{path}.wider")
    return count


# --- Parquet ------------------------------------------------------------------------------------------------------


def write_parquet(batches: Iterable[Experiences], path: str, *, compression: str = "zstd") -> int:
    """One file, a row group for each batch."""
    import pyarrow.parquet as pq

    def opened(name: str, schema: pa.Schema) -> Any:
        return pq.ParquetWriter(name, schema, compression=compression)

    def tables(name: str) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(name) as file:
            yield from file.iter_batches(1024)

    return write_unified(batches, path, True, opened, tables)


def read_parquet(path: str, batch_rows: int, errors: Errors, *, max_row_bytes: int) -> Iterator[Experiences]:
    """The records of a file, or of a folder of files."""
    for name in files(path):
        for batch in parquet.batches(name, batch_rows, max_row_bytes=max_row_bytes):
            yield interchange.from_table(batch)


# --- HF datasets --------------------------------------------------------------------------------------------------


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError("format 'hf' needs the package datasets: pip install 'rollbook[hf]'") from None
    return datasets


def write_hf(batches: Iterable[Experiences], path: str, *, max_shard_size: int | str = "1GB") -> int:
    """A folder as `Dataset.save_to_disk` makes it."""
    datasets = _datasets()
    spool = f"{path}.arrow"
    try:
        count = write_unified(batches, spool, False, pa.ipc.new_stream, _stream)
        made = datasets.Dataset.from_file(spool)
        quiet = not datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            # The library writes no shard for no rows, and does not read back what it then wrote.
            made.save_to_disk(path, **({"max_shard_size": max_shard_size} if count else {"num_shards": 1}))
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        del made
    finally:
        if os.path.exists(spool):
            os.remove(spool)
    return count


def _stream(path: str) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
        yield from stream


def read_hf(path: Any, batch_rows: int, errors: Errors, *, split: str | None = None) -> Iterator[Experiences]:
    """The records of a saved dataset, or of a `Dataset` object (of its `split`, where there are several)."""
    found = path if not isinstance(path, str) else _load(path)
    if isinstance(found, dict):
        names = list(found)
        if split is None and len(names) != 1:
            raise ValueError(f"split: got None, expected one of {', '.join(map(repr, names))}: the dataset has several")
        if split is not None and split not in found:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(map(repr, names))}")
        found = found[names[0] if split is None else split]
    elif split is not None:
        raise ValueError(f"split: got {split!r}, but the dataset has no splits")
    for table in found.with_format("arrow").iter(batch_size=batch_rows):
        # Taken, not sliced: a batch holds its own rows, and is judged by them.
        yield interchange.from_table(table.take(pa.array(np.arange(len(table)))))


def _load(path: str) -> Any:
    folders = [path]
    listing = os.path.join(path, "dataset_dict.json")
    if os.path.isfile(listing):
        folders = [os.path.join(path, _plain(name, listing)) for name in _json(listing).get("splits", [])]
    for folder in folders:
        # The library would open whatever these name, also outside of the folder.
        state = os.path.join(folder, "state.json")
        for key in ("_data_files", "_indices_data_files"):
            for entry in _json(state).get(key) or []:
                name = _plain(entry.get("filename") if isinstance(entry, dict) else None, state)
                real = os.path.realpath(os.path.join(folder, name))
                if os.path.dirname(real) != os.path.realpath(folder):
                    raise WireError(f"{state}: {name!r} is a link that leaves the folder")
    try:
        return _datasets().load_from_disk(path)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise WireError(f"{path}: no saved dataset that can be read: {error}") from None


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(16 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise WireError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise WireError(f"{path}: got a {type(found).__name__}, expected an object")
    return found


def _plain(name: Any, where: str) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
        raise WireError(f"{where}: {name!r} is no plain file name")
    return name


# --- one after the other ------------------------------------------------------------------------------------------


def write_frames(batches: Iterable[Experiences], path: str, *, compression: str | None = None) -> int:
    """Frames, one for each batch; see `rollbook.core.wire`."""
    return _appended(batches, path, lambda many: wire.encode(many, compression=compression))


def write_trxp(batches: Iterable[Experiences], path: str) -> int:
    """TRXP payloads, one for each batch; Trinity reads a file of one with `Experience.deserialize_many`."""

    def payload(many: Experiences) -> bytes:
        unknown = [name for name in many.columns if owner(name) is None]
        if unknown:
            raise ValueError(f"the columns {', '.join(unknown)} of a newer version cannot be kept in TRXP")
        return wire.to_trxp(many)

    return _appended(batches, path, payload)


def _appended(batches: Iterable[Experiences], path: str, encode: Callable[[Experiences], bytes]) -> int:
    count = 0
    with open(path, "wb") as file:
        for batch in batches:
            file.write(encode(batch))
            count += len(batch)
    return count


def read_frames(
    path: str, batch_rows: int, errors: Errors, *, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Experiences]:
    """The records of all frames; a frame whose body is damaged can be skipped, a damaged header ends the file."""

    def size(head: bytes) -> int:
        return wire.read_header(head, 0, limits).stop

    def records(data: bytearray) -> Experiences:
        return wire.decode(data, limits=limits, private=True)

    for name in files(path):
        yield from _chunks(name, wire.HEADER_BYTES, size, records, errors)


def read_trxp(path: str, batch_rows: int, errors: Errors, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[Experiences]:
    """The records of all TRXP payloads, or of the one pickle that an older Trinity wrote."""
    from rollbook.core import trxp

    def size(head: bytes) -> int:
        if head[:4] != trxp.MAGIC or len(head) < trxp._HEADER.size:
            raise WireError(f"{head[:4]!r} is no TRXP header", 0)
        _, _, meta, tensors = trxp._HEADER.unpack(head)
        return int(trxp._HEADER.size + meta + tensors)

    def records(data: bytearray) -> Experiences:
        return Experiences(trxp.read(memoryview(data), limits))

    for name in files(path):
        with open(name, "rb") as file:
            first = file.read(4)
            if first and first != trxp.MAGIC:
                yield records(bytearray(first + file.read(limits.max_bytes)))
                continue
        yield from _chunks(name, trxp._HEADER.size, size, records, errors, limits.max_bytes)


def _chunks(
    path: str,
    head_bytes: int,
    size: Callable[[bytes], int],
    records: Callable[[bytearray], Experiences],
    errors: Errors,
    max_bytes: int = 1 << 62,
) -> Iterator[Experiences]:
    """Chunks that say in a header how long they are; each is held whole, and memory grows only with what is there."""
    with open(path, "rb") as file:
        at = 0
        while head := file.read(head_bytes):
            where = f"{os.path.basename(path)}: byte {at}"
            try:
                total = size(head)
                if total > max_bytes:
                    raise WireError(f"{total} bytes are over the limit of {max_bytes}")
            except WireError as error:
                # How long it is, and so where the next begins, is not known.
                raise WireError(f"{os.path.basename(path)}: {error.message}", at + (error.offset or 0)) from None
            data = bytearray(head)
            _fill(file, data, total)
            try:
                if len(data) < total:
                    raise WireError(f"the file ends after {len(data)} of {total} bytes")
                batch = records(data)
            except WireError as error:
                errors.bad(where, error)
            else:
                yield batch
            at += total


def _fill(file: BinaryIO, data: bytearray, total: int) -> None:
    while len(data) < total and (part := file.read(min(total - len(data), 16 << 20))):
        data += part
