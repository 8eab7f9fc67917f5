"""Parquet files of records, and reading any Parquet file within limits.

Invariant: a column is decoded only after the headers of its pages were read, which state what Arrow will allocate; the
sizes in the footer are not trusted. What a file decodes to and the number of its rows are bounded by its size
(`Limits.max_ratio`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.files import check_regular
from rollbook.core.wire import DEFAULT_LIMITS, FREE_BYTES, Limits
from rollbook.io.arrow import from_table, to_table, write_tables

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["read_parquet", "write_parquet"]

FREE_ROWS, ROWS_PER_BYTE = 250_000, 4
"""Rows that any file may have, and rows per byte that a larger file may have."""
ROW_BYTES = 1024
"""Bytes that a row may decode to in any file: repeated values take almost no space."""
BATCH_BYTES = 256 << 20
"""Bytes that a batch may decode to before dictionary entries are counted one by one."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4": "lz4_raw"}
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8
_MAX_DEPTH = 8
Bytes = mmap.mmap | memoryview


def read_parquet(path: str | os.PathLike[str], limits: Limits = DEFAULT_LIMITS) -> Experiences:
    """Read the records of a Parquet file.

    Args:
        path: The file.
        limits: Largest sizes to accept.

    Returns:
        The records.

    Raises:
        WireError: The file is corrupt or exceeds a limit, or its columns are not those of records.

    >>> import tempfile
    >>> import pyarrow.parquet as pq
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"tokens": [[1, 2, 3], [4, 5]], "reward": [1.0, 0.0]}), f"{folder}/records.parquet")
    ...     read_parquet(f"{folder}/records.parquet").values("reward")
    [1.0, 0.0]
    """
    check_regular(path)
    parts = list(batches(path, 1 << 16, limits=limits))
    return from_table(pa.Table.from_batches(parts)) if parts else Experiences()


def write_parquet(records: Experiences, path: str | os.PathLike[str], compression: str = "zstd") -> None:
    """Write records to a Parquet file that DuckDB, pandas and polars read as ordinary columns.

    The file appears when it is complete.

    Args:
        records: The records.
        path: The file.
        compression: A codec of Parquet.

    >>> import tempfile
    >>> records = Experiences.from_columns({"tokens": [[1, 2, 3], [4, 5]], "reward": [1.0, 0.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_parquet(records, f"{folder}/records.parquet")
    ...     read_parquet(f"{folder}/records.parquet") == records
    True
    """
    import pyarrow.parquet as pq

    final = os.fspath(path)
    partial = f"{final}.{os.getpid()}.partial"
    try:
        pq.write_table(to_table(records, portable=True), partial, compression=compression)
        os.replace(partial, final)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def write(batches: Iterable[Experiences], path: str, *, compression: str = "zstd") -> int:
    """Write one file with a row group per batch; return the number of records."""
    import pyarrow.parquet as pq

    def open_writer(name: str, schema: pa.Schema) -> Any:
        return pq.ParquetWriter(name, schema, compression=compression)

    def read_tables(name: str) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(name) as file:
            yield from file.iter_batches(1024)

    return write_tables(batches, path, typed=True, open_writer=open_writer, read_tables=read_tables)


def batches(
    path: str | os.PathLike[str],
    batch_rows: int,
    *,
    max_row_bytes: int | None = None,
    columns: Collection[str] | None = None,
    row_groups: Sequence[int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[pa.RecordBatch]:
    """Read a Parquet file in batches of at most `batch_rows` rows.

    Args:
        path: The file.
        batch_rows: Rows of a batch. Batches have fewer where values may be large.
        max_row_bytes: The largest row that is read, on average over a row group.
        columns: Names of the columns to read, by default all.
        row_groups: Numbers of the row groups to read, by default all.
        limits: `max_ratio` is how many times its size a file may become once that is over 64 MiB and 1 KiB a row.

    Raises:
        WireError: The file is corrupt or exceeds a limit.
    """
    import pyarrow.parquet as pq

    name = os.fspath(path)
    try:
        with pq.ParquetFile(name) as file:
            size = os.path.getsize(name)
            groups = range(file.metadata.num_row_groups) if row_groups is None else row_groups
            names = [column for column in file.schema_arrow.names if columns is None or column in columns]
            rows = sum(file.metadata.row_group(i).num_rows for i in groups)
            if rows > max(FREE_ROWS, size * ROWS_PER_BYTE):
                raise WireError(
                    f"{name}: {size} bytes state {rows} rows, over the limit of {ROWS_PER_BYTE} for each byte"
                )
            allowed = max(FREE_BYTES, rows * ROW_BYTES, size * limits.max_ratio)
            with open(name, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                leaves = _leaves(name, data, file, groups, set(names), max_row_bytes)
                stated = sum(leaf.uncompressed + leaf.values * leaf.width for leaf in leaves)
                _check_size(name, size, stated, allowed, limits)
                batch_rows = _count_entries(name, data, leaves, batch_rows, allowed - stated)
            total = 0
            for batch in file.iter_batches(batch_rows, row_groups=list(groups), columns=names):
                total += batch.nbytes
                _check_size(name, size, total, allowed, limits)
                yield batch
    except (FileNotFoundError, WireError):
        raise
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        raise WireError(f"{name}: cannot read Parquet file: {error}") from None


def _check_size(name: str, size: int, decoded: int, allowed: int, limits: Limits) -> None:
    if decoded > allowed:
        raise WireError(
            f"{name}: {size} bytes become {decoded} or more, over the limit of {limits.max_ratio} times the size"
        )


# --- pages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Page:
    header: dict[int, Any]
    start: int
    """Start of the body."""
    codec: str

    def body(self, data: mmap.mmap, skipped: int = 0, compressed: bool = True) -> memoryview:
        """Return the decompressed body without its first `skipped` bytes."""
        stored = memoryview(data)[self.start + skipped : self.start + self.header[3]]
        if self.codec == "UNCOMPRESSED" or not compressed:
            return memoryview(bytes(stored))
        if self.codec not in _CODECS:
            raise WireError(f"pages compressed by {self.codec} are not supported if their dictionaries are this large")
        size = self.header[2] - skipped
        return memoryview(pa.Codec(_CODECS[self.codec]).decompress(bytes(stored), decompressed_size=size)).cast("B")


@dataclass
class _Leaf:
    """A leaf column, over all row groups that are read."""

    path: str
    width: int
    """Minimum bytes of a decoded value."""
    repeated: bool
    """Whether a row may have several values."""
    uncompressed: int = 0
    """Decompressed bytes of its pages."""
    values: int = 0
    largest: int = 0
    """Bytes of the largest page: a bound of the largest value."""
    prefixed: bool = False
    """Whether a value may share a prefix with the value before it."""
    levels: tuple[bool, bool] = (False, False)
    """Whether its pages begin with repetition levels, and with definition levels."""
    chunks: list[tuple[_Page, list[_Page]]] = field(default_factory=list)
    """Dictionary pages of byte arrays, each with the pages of indices into it."""


def _leaves(
    name: str,
    data: mmap.mmap,
    file: pq.ParquetFile,
    groups: Sequence[int],
    columns: set[str],
    max_row_bytes: int | None,
) -> list[_Leaf]:
    leaves: dict[int, _Leaf] = {}
    for j in range(file.metadata.num_columns):
        described = file.schema.column(j)
        if described.path.partition(".")[0] in columns:
            fixed = described.physical_type == "FIXED_LEN_BYTE_ARRAY"
            width = described.length if fixed else _WIDTHS[described.physical_type]
            leaf = leaves[j] = _Leaf(described.path, width, described.max_repetition_level > 0)
            leaf.levels = (leaf.repeated, described.max_definition_level > 0)
    for i in groups:
        group = file.metadata.row_group(i)
        size_before = sum(leaf.uncompressed for leaf in leaves.values())
        for j, leaf in leaves.items():
            _add_pages(name, data, group.column(j), leaf)
        group_size = sum(leaf.uncompressed for leaf in leaves.values()) - size_before
        if max_row_bytes is not None and group_size > max_row_bytes * max(group.num_rows, 1):
            raise WireError(
                f"{name}: row group {i} has {group_size} bytes in {group.num_rows} rows, over the limit of "
                f"{max_row_bytes} a row (max_row_bytes)"
            )
    return list(leaves.values())


def _add_pages(name: str, data: mmap.mmap, chunk: pq.ColumnChunkMetaData, leaf: _Leaf) -> None:
    """Add up the pages of a column chunk until there are as many values as the footer states, as Arrow does."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < at:
        at = chunk.dictionary_page_offset
    stop = min(at + chunk.total_compressed_size, len(data))
    values, dictionary = 0, False
    while values < chunk.num_values and 0 <= at < stop:
        try:
            header, body = _struct(data, at, stop)
            kind, uncompressed, compressed = header[1], header[2], header[3]
            count, entries, encoding = 0, 0, None
            if kind == _DATA_PAGE:
                count, encoding = header[5][1], header[5][2]
            elif kind == _DATA_PAGE_V2:
                count, encoding = header[8][1], header[8][4]
            page = _Page(header, body, chunk.compression)
            if kind == _DICTIONARY_PAGE and chunk.physical_type == "BYTE_ARRAY":
                entries = header[7][1]
                leaf.chunks.append((page, []))
                dictionary = True
            elif encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) and dictionary:
                leaf.chunks[-1][1].append(page)
            negative = min(uncompressed, compressed, count, entries) < 0  # TypeError: not a number
        except (IndexError, KeyError, TypeError):
            raise WireError(f"{name}: column {leaf.path!r}: the page at byte {at} has no header") from None
        if negative:
            raise WireError(f"{name}: column {leaf.path!r}: the page at byte {at} states a negative size")
        leaf.prefixed |= encoding == _DELTA_BYTE_ARRAY and chunk.physical_type == "BYTE_ARRAY"
        leaf.uncompressed += uncompressed
        leaf.largest = max(leaf.largest, uncompressed)
        values += count
        at = body + compressed
    leaf.values += values


def _struct(data: Bytes, at: int, stop: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Read the integers and structs of a struct in Thrift's compact protocol, by field number, and its end.

    Raises:
        IndexError: If it does not end before byte `stop`, or is nested deeper than a page header is.
    """
    if depth > _MAX_DEPTH:
        raise IndexError(at)
    fields: dict[int, Any] = {}
    number = 0
    while True:
        if at >= stop:
            raise IndexError(at)
        head, at = data[at], at + 1
        if not head:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            zigzag, at = _varint(data, at, stop)
            number = (zigzag >> 1) ^ -(zigzag & 1)
        fields[number], at = _value(data, at, stop, head & 15, depth)


def _value(data: Bytes, at: int, stop: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a bool, which is in the type
        return kind == 1, at
    if kind == 3:
        return None, at + 1
    if kind in (4, 5, 6):
        zigzag, at = _varint(data, at, stop)
        return (zigzag >> 1) ^ -(zigzag & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at, stop)
        return None, at + length
    if kind == 12:
        return _struct(data, at, stop, depth + 1)
    raise IndexError(at)  # lists and maps, which a page header has none of


def _varint(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    number = shift = 0
    while at < stop and shift < 70:
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
    raise IndexError(at)


# --- dictionaries ---------------------------------------------------------------------------------------------------


def _count_entries(name: str, data: mmap.mmap, leaves: list[_Leaf], batch_rows: int, allowed: int) -> int:
    """Reject byte arrays that decode to more than `allowed` bytes; return the rows of a batch of acceptable size.

    A dictionary's entry takes its length wherever an index names it, and a value of DELTA_BYTE_ARRAY that of all values
    before it. As long as batches stay small even if each value is as large as the largest page, nothing is counted.
    """
    growing = [leaf for leaf in leaves if leaf.chunks or leaf.prefixed]
    counts = [leaf.values if leaf.repeated else min(batch_rows, leaf.values) for leaf in growing]
    if sum(count * leaf.largest for count, leaf in zip(counts, growing, strict=True)) <= BATCH_BYTES:
        return batch_rows
    expanded = widest = 0
    for leaf in growing:
        largest = leaf.largest if leaf.prefixed else 0
        if leaf.prefixed and leaf.repeated:
            expanded += leaf.values * leaf.largest
        for dictionary, pages in leaf.chunks:
            try:
                lengths = _entry_lengths(dictionary.body(data), dictionary.header[7][1])
                expanded += sum(_indexed_size(page, data, leaf, lengths) for page in pages)
            except (IndexError, KeyError, TypeError, pa.ArrowException) as error:
                raise WireError(f"{name}: column {leaf.path!r}: a dictionary cannot be read: {error}") from None
            largest = max(largest, int(lengths.max(initial=0)))
        if expanded > allowed:
            raise WireError(
                f"{name}: column {leaf.path!r} becomes {expanded} bytes or more, over the limit of {allowed}"
            )
        widest += 0 if leaf.repeated else largest
    return min(batch_rows, max(1, BATCH_BYTES // max(widest, 1)))


def _entry_lengths(body: memoryview, count: int) -> NDArray[np.int64]:
    """Return the lengths [count] of the entries of a dictionary page."""
    if not 0 <= count <= len(body) // 4:
        raise IndexError(f"{count} entries in {len(body)} bytes")
    lengths, at = np.empty(count, dtype=np.int64), 0
    for i in range(count):
        length = int.from_bytes(body[at : at + 4], "little")
        lengths[i] = length
        at += 4 + length
    if at > len(body):
        raise IndexError("an entry runs past the page")
    return lengths


def _indexed_size(page: _Page, data: mmap.mmap, leaf: _Leaf, lengths: NDArray[np.int64]) -> int:
    """Return the bytes of the entries that a page of indices refers to."""
    header = page.header
    if header[1] == _DATA_PAGE_V2:
        skipped = header[8][5] + header[8][6]
        count, body = header[8][1] - header[8][2], page.body(data, skipped, header[8].get(7, True))
    else:
        count, body = header[5][1], page.body(data)
        for level in leaf.levels:
            if level:
                body = body[4 + int.from_bytes(body[:4], "little") :]
    if not len(body):
        return 0
    width, at, size, stop = body[0], 1, 0, len(body)
    if width > 32:
        raise IndexError(f"indices of {width} bits")
    weights = 1 << np.arange(width, dtype=np.int64)
    while count > 0 and at < stop:
        run, at = _varint(body, at, stop)
        if run & 1:  # groups of eight, bit-packed
            end = min(at + (run >> 1) * width, stop)
            bits = np.unpackbits(np.frombuffer(body[at:end], np.uint8), bitorder="little")
            taken = min(len(bits) // width if width else (run >> 1) * 8, count)
            if width:
                size += int(lengths[bits[: taken * width].reshape(-1, width) @ weights].sum())
            else:
                size += taken * int(lengths[0])
            count, at = count - max(taken, 1), end
        else:
            end = at + (width + 7) // 8
            taken = min(run >> 1, count)
            size += taken * int(lengths[int.from_bytes(body[at:end], "little")]) if taken else 0
            count, at = count - taken, end
    return size
