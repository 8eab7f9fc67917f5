"""Parquet and Arrow files of a few hundred bytes that become gigabytes, or millions of rows, when they are read."""

from __future__ import annotations

import mmap
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import Experience, Experiences, WireError
from rollbook.inspect.file_source import ArrowFile
from rollbook.inspect.file_stores import to_dicts
from rollbook.io import parquet
from rollbook.io.parquet import read_parquet, write_parquet
from rollbook.train import prompts
from tests.attacks.outcome import in_child

LARGE = "x" * 1_000_000


def repeated(count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), pa.array([LARGE]))


def in_one_row(values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)


def lying(path: Path) -> None:
    """State sizes of one byte in the footer, as long as the ones that were there."""
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    size, true = b"", 2 * chunk.total_uncompressed_size
    while true:
        size, true = size + bytes([true & 127 | (128 if true > 127 else 0)]), true >> 7
    small = b"\x82" + b"\x80" * (len(size) - 2) + b"\x00"
    assert size in data[footer:]
    path.write_bytes(data[:footer] + data[footer:].replace(size, small))
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 1


def bombs(folder: Path) -> dict[str, Path]:
    tables = {
        "rows of nulls": (pa.table({"messages": pa.nulls(1_000_000, pa.int8())}), {}),
        "nulls in one row": (pa.table({"messages": in_one_row(pa.nulls(20_000_000, pa.int8()))}), {}),
        "a word again and again": (pa.table({"messages": repeated(5_000)}), {}),
        "a word again and again in one row": (pa.table({"messages": in_one_row(repeated(2_000))}), {}),
        "zeros": (pa.table({"messages": pa.array([LARGE * 80])}), {"use_dictionary": False}),
        "zeros, the footer lies": (pa.table({"messages": pa.array([LARGE * 80])}), {"use_dictionary": False}),
        "prefixes": (
            pa.table({"messages": pa.array([LARGE] * 90)}),
            {"use_dictionary": False, "column_encoding": {"messages": "DELTA_BYTE_ARRAY"}},
        ),
    }
    paths = {}
    for i, (name, (table, options)) in enumerate(tables.items()):
        paths[name] = folder / f"{i}.parquet"
        pq.write_table(
            table, paths[name], compression="zstd", store_schema=False, row_group_size=1 << 26, data_page_size=1 << 30,
            **options,
        )  # fmt: skip
    lying(paths["zeros, the footer lies"])
    return paths


READ = """
import sys, time
from rollbook import WireError
from rollbook.io.parquet import read_parquet
from rollbook.io.rows import ErrorHandler, Report, read_rows
from rollbook.train import prompts
from rollbook.inspect.file_stores import Table, to_dicts
from tests.attacks.outcome import Meter

readers = {
    "viewer": lambda path: list(Table(path, to_dicts).scan(False)),
    "import": lambda path: list(read_rows(path, ErrorHandler(False, Report()), 1 << 28)),
    "train": lambda path: list(prompts.read(path)),
    "from_parquet": read_parquet,
}
for path in sys.argv[1:]:
    for name, read in readers.items():
        meter, start = Meter(), time.process_time()
        try:
            read(path)
            print(path, name, "was read")
        except WireError as error:
            if "over the limit" not in str(error):
                print(error)
        if meter.peak() > 400 << 20 or time.process_time() - start > 10:
            print(path, name, meter.peak() >> 20, "MiB", time.process_time() - start, "s")
"""


def test_small_parquet_files_that_become_large_are_refused(tmp_path: Path) -> None:
    paths = bombs(tmp_path)
    assert all(path.stat().st_size < 100_000 for path in paths.values())
    assert in_child(READ, *map(str, paths.values())) == ""


def test_repetitive_columns_are_read(tmp_path: Path) -> None:
    count = 200_000
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["2+2="] * count, "source": ["train"] * count, "label": [1] * count}), path)
    assert path.stat().st_size < 10_000 and sum(len(batch) for batch in parquet.batches(path, 4096)) == count
    pq.write_table(pa.table({"prompt": ["You are an assistant. " * 40] * (count // 2)}), path)
    assert sum(1 for _ in prompts.read(path)) == count // 2


def test_a_damaged_page_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path)
    data = bytearray(path.read_bytes())
    for at in range(4, 40):
        for byte in (0, 0x1C, 0xFF):
            path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            try:
                list(parquet.batches(path, 10))
            except WireError as error:
                assert re.match(rf"{path}: ", str(error))


def test_columns_whose_entries_are_counted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table(
        {
            "text": ["a", None, "bb"] * 10,
            "messages": [[{"role": "user", "content": "x" * 10}, None], None, []] * 10,
            "nested": [{"inner": ["z", None]}, None, {"inner": None}] * 10,
            "map": pa.array([[("k", "v")], None, []] * 10, pa.map_(pa.string(), pa.string())),
            "bytes": pa.array([b"1", None, b"22"] * 10, pa.large_binary()),
            "list": pa.array([["p", "q"], [], None] * 10, pa.large_list(pa.large_string())),
            "number": pa.array([1, 2, None] * 10, pa.int16()),
        }
    )
    path = tmp_path / "x.parquet"
    for options in ({}, {"data_page_version": "2.0", "compression": "lz4"}, {"use_dictionary": False}):
        pq.write_table(table, path, row_group_size=12, **options)
        monkeypatch.setattr(parquet, "BATCH_BYTES", 1)
        assert pa.Table.from_batches(parquet.batches(path, 7)).equals(table)
        monkeypatch.undo()
        assert pa.Table.from_batches(parquet.batches(path, 7)).equals(table)
        assert pa.Table.from_batches(parquet.batches(path, 7, columns={"list"}, row_groups=[1])).equals(
            table.select(["list"])[12:24]
        )
    with pytest.raises(WireError, match=r"row group 0 has \d+ bytes in 12 rows, over the limit of 8 a row"):
        list(parquet.batches(path, 7, max_row_bytes=8))


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.none() | st.sampled_from(["", "a", "bb" * 9, "c" * 300]) | st.text(max_size=5), min_size=1),
    times=st.integers(1, 40),
    nested=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "compression": st.sampled_from(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
            "data_page_size": st.sampled_from([1, 100, 1 << 20]),
            "row_group_size": st.sampled_from([7, 1 << 20]),
        }
    ),
)
def test_entries_are_counted(words: list[Any], times: int, nested: bool, options: dict[str, Any]) -> None:
    words = words * times
    column = pa.array([words[i : i + 3] for i in range(0, len(words), 3)] if nested else words)
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(pa.table({"words": column}), file.name, **options)
        source = pq.ParquetFile(file.name)
        groups = range(source.metadata.num_row_groups)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (leaf,) = parquet._leaves(file.name, data, source, groups, {"words"}, None)
            size = 0
            for dictionary, pages in leaf.chunks:
                lengths = parquet._entry_lengths(dictionary.body(data), dictionary.header[7][1])
                size += sum(parquet._indexed_size(page, data, leaf, lengths) for page in pages)
    expected = sum(len(word.encode()) for word in words if word is not None)
    if options["data_page_version"] == "2.0" or None not in words:
        assert size == expected
    else:  # how many are null is not known, and the last indices may be padding
        assert expected <= size <= expected + 7 * 300 * len(words)


def test_records_that_compress_well_are_read(tmp_path: Path) -> None:
    experiences = Experiences([Experience(tokens=[1, 2, 3] * 100, prompt_length=2, prompt_text="a" * 1000)] * 2000)
    path = tmp_path / "x.parquet"
    write_parquet(experiences, path)
    assert read_parquet(path) == experiences


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(50_000_000),
        in_one_row(pa.nulls(50_000_000)),
        repeated(100),
        pa.array(["x" * 100] * 3, pa.string_view()),
        pa.array(["x"] * 100_000),
    ],
    ids=["rows of nulls", "nulls in one row", "a dictionary", "views", "compressed"],
)
def test_arrow_streams_that_become_large_are_refused(column: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd" if len(column) == 100_000 else None)
    table = pa.table({"messages": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)
    ((_, _, row),) = ArrowFile(str(path), to_dicts).scan(False)
    assert type(row) is WireError and str(path) in str(row)
