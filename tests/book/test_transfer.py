"""Formats both ways: every record comes back equal whatever the batches were, files appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import EID, CustomField, Experience, Experiences, WireError
from rollbook.core.fields import FIELDS, Field, declare, withdraw
from rollbook.core.wire import Limits, to_trxp
from rollbook.io.formats import EXTENSIONS, FORMATS, guess, list_tables, read, write
from rollbook.io.hf import from_hf, to_hf
from rollbook.io.jsonl import encode_line, encode_lines
from rollbook.io.parquet import read_parquet
from rollbook.io.rows import regroup
from tests.strategies import exact_rows, full_record, record_lists

TWO_WAY = list(EXTENSIONS.values())


def some(count: int = 5) -> Experiences:
    return Experiences([full_record(["single_turn", "multi_turn", "dpo"][i % 3], i) for i in range(count)])


def back(path: Any, format: str | None = None, **options: Any) -> list[Any]:
    return [row for batch in read(path, format, **options) for row in batch]


@pytest.mark.parametrize("format", TWO_WAY)
def test_round_trip(format: str) -> None:
    @settings(max_examples=10 if format == "hf" else 25)
    @given(rows=record_lists(max_size=6, trxp=format == "trxp"), size=st.integers(1, 4), read_rows=st.integers(1, 4))
    def property_(rows: list[Experience], size: int, read_rows: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x")
            # Each piece has its own columns and types: the file has to hold them all.
            pieces = [Experiences(rows[i : i + size]) for i in range(0, len(rows), size)]
            assert write(pieces, path, format, batch_rows=size) == len(rows)
            assert exact_rows(back(path, format, batch_rows=read_rows)) == exact_rows(rows)
            if format == "parquet" and rows:
                assert exact_rows(read_parquet(path)) == exact_rows(rows)
            if format == "hf" and rows:
                assert exact_rows(from_hf(load_from_disk(path))) == exact_rows(rows)

    property_()


@pytest.mark.parametrize("format", TWO_WAY)
def test_all_fields_of_all_kinds(format: str, tmp_path: Path) -> None:
    experiences = some(7)
    path = tmp_path / "x"
    assert write(experiences, path, format, batch_rows=2) == 7
    assert exact_rows(back(path)) == exact_rows(experiences)
    assert guess(path) == format == read(path).format
    assert [len(batch) for batch in read(path, batch_rows=3)] == [3, 3, 1]
    assert [item.name for item in tmp_path.iterdir()] == ["x"], "nothing is left beside it"


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_the_schema_grows_with_the_batches(format: str, tmp_path: Path) -> None:
    eid = EID(1, 2, 3, 4, "a")
    rows = [
        Experience(eid=eid, tokens=[1, 2, 3], logprobs=torch.tensor([0.5, 1.5], dtype=torch.bfloat16)),
        Experience(eid=eid, tokens=[1, 2, 3], logprobs=[0.25, -0.5], info={}),
        Experience(eid=eid, tokens=torch.tensor([1, 2**40]), action_mask=torch.tensor([2], dtype=torch.int64)),
        Experience(eid=eid, tokens=torch.tensor([1, 2**63 + 5], dtype=torch.uint64), prompt_text="\ud800"),
        Experience(eid=eid, tokens=torch.tensor([1, -3], dtype=torch.int8), logprobs=torch.tensor([2**60 + 1])),
        Experience(eid=eid, tokens=[1, 2], routed_experts=torch.ones(1, 2, 3, dtype=torch.int16), policy_versions=7),
        Experience(eid=eid, tokens=[1, 2], routed_experts=torch.ones(1, 4, 1, dtype=torch.int16), policy_versions=[8]),
        Experience(eid=eid, tokens=[1, 2], custom_fields=[CustomField("a", "b", torch.bool)], messages=[], tools=None),
    ]
    path = tmp_path / "x"
    write((Experiences([row]) for row in rows), path, format, batch_rows=1)
    assert exact_rows(back(path)) == exact_rows(rows)
    assert exact_rows(back(path, batch_rows=1)) == exact_rows(rows)
    if format == "parquet":
        assert exact_rows(read_parquet(path)) == exact_rows(rows)


def test_parquet_of_plain_batches_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = pq.ParquetWriter
    monkeypatch.setattr(pq, "ParquetWriter", lambda name, *a, **k: opened.append(name) or real(name, *a, **k))
    plain = [Experiences([Experience(tokens=[1, 2, 3], reward=0.5)])] * 9
    more = [Experiences([Experience(tokens=[1, 2, 3], advantages=[0.5, 0.25], messages=[{"role": "user"}])])] * 9
    write([*plain, *more], tmp_path / "x.parquet", batch_rows=1)
    assert len(opened) <= 2, "a field that comes later is in the schema already"
    assert set(FIELDS) <= set(pq.read_schema(tmp_path / "x.parquet").names)


def test_unknown_columns_and_declared_fields(tmp_path: Path) -> None:
    declare(Field("surprise", "tensor", "response", "float32"))
    try:
        experiences = Experiences([Experience(tokens=[1, 2, 3], surprise=[0.5, float("inf")]), *some(2)])
        for name in ("parquet", "jsonl", "frames", "trxp"):
            write(experiences, tmp_path / f"x.{name}")
            assert back(tmp_path / f"x.{name}") == experiences
    finally:
        withdraw("surprise")
    for name in ("frames", "parquet"):
        (read_back,) = read(tmp_path / f"x.{name}")
        assert list(read_back[0].unknown) == ["surprise"], "what this version does not know is kept"
        write(read_back, tmp_path / f"again.{name}")
        assert back(tmp_path / f"again.{name}") == read_back
    for name in ("jsonl", "trxp"):
        with pytest.raises(ValueError, match=r"surprise.* of a newer version cannot be kept"):
            write(read_back, tmp_path / f"again.{name}")
    with pytest.raises(WireError, match="'surprise' is not a field"):
        back(tmp_path / "x.jsonl")


def test_odd_shapes_survive(tmp_path: Path) -> None:
    malformed = Experience.deserialize(to_trxp([Experience(tokens=[1, 2, 3])]))
    malformed.__dict__.update(logprobs=torch.ones(5), malformed_fields=frozenset({"logprobs"}))
    for name in ("parquet", "jsonl", "frames"):
        write(Experiences([malformed]), tmp_path / f"x.{name}")
        (row,) = back(tmp_path / f"x.{name}")
        assert row.malformed_fields == {"logprobs"} and row == malformed
    wrong = orjson.loads((tmp_path / "x.jsonl").read_bytes())
    del wrong["odd"]
    (tmp_path / "x.jsonl").write_bytes(orjson.dumps(wrong))
    with pytest.raises(WireError, match=r"row x.jsonl:1: logprobs: got 5 entries"):
        back(tmp_path / "x.jsonl")


# --- JSONL --------------------------------------------------------------------------------------------------------


@given(rows=record_lists(max_size=4))
def test_jsonl_of_columns_equals_that_of_rows(rows: list[Experience]) -> None:
    batch = Experiences(rows)
    assert encode_lines(batch) == [encode_line(row) for row in batch]


def test_jsonl_is_what_a_person_expects(tmp_path: Path) -> None:
    record = Experience(
        eid=EID(1, "t", 0, 0, "s"),
        tokens=[5, 6, 7],
        logprobs=torch.tensor([-0.5, float("nan")], dtype=torch.bfloat16),
        advantages=[0.1, -float("inf")],
        reward=1.0,
        info={"a": (1, None)},
        policy_versions=3,
    )
    write(Experiences([record]), tmp_path / "x.jsonl")
    text = (tmp_path / "x.jsonl").read_text()

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no strict JSON")

    content = json.loads(text, parse_constant=refused)
    assert content == {
        "rollbook": 1,
        "eid": {"batch": 1, "task": "t", "run": 0, "step": 0, "suffix": "s"},
        "tokens": [5, 6, 7],
        "prompt_length": 1,
        "logprobs": {"dtype": "bfloat16", "values": [-0.5, "nan"]},
        "reward": 1.0,
        "advantages": [float(np.float32(0.1)), "-inf"],
        "info": {"a": {"$tuple": [1, None]}},
        "policy_versions": 3,
        "experience_type": "single_turn",
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"tokens": [1, 2', "invalid JSON"),
        ('{"tokens": [1, 2], "reward": NaN}', "invalid JSON"),
        ("[1, 2]", "one object per line"),
        ('{"rollbook": 2, "tokens": [1, 2]}', "layout version 2"),
        ('{"reward": 1.0}', "no 'tokens'"),
        ('{"tokens": [1, 2.5]}', "tokens"),
        ('{"tokens": [1, true]}', "tokens"),
        ('{"tokens": [1, 99999999999]}', "tokens"),
        ('{"tokens": {"dtype": "qint8", "values": [1]}}', "'dtype' \\(a known one\\)"),
        ('{"tokens": {"$tensor": {"dtype": "int32", "shape": [9999999], "data": "AAAA"}}}', "takes 39999996 bytes"),
        ('{"tokens": [1, 2, 3], "logprobs": [0.5]}', "logprobs: got 1 entries, expected 2"),
        ('{"tokens": [1, 2], "logprobs": ["high"]}', "logprobs"),
        ('{"tokens": [1, 2], "eid": "1/2/0/0/a"}', "eid"),
        ('{"tokens": [1, 2], "prompt_lenght": 1}', "'prompt_lenght' is not a field"),
        ('{"tokens": [1, 2], "info": {"$unheard": 1}}', "unknown"),
        ('{"tokens": [1, 2], "info": {"a": ' + "[" * 100 + "]" * 100 + "}}", "nested"),
        ('{"tokens": ' + "[" * 100_000, "invalid JSON"),
    ],
)
def test_bad_lines_are_named_or_skipped(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = '{"tokens": [1, 2], "eid": {"suffix": "%s"}}\n'
    path.write_text(good % "a" + "\n" + line + "\n" + good % "b")
    with pytest.raises(WireError, match=f"row x.jsonl:3: .*{reason}"):
        back(path, "jsonl")
    reading = read(path, "jsonl", on_error="skip")
    assert [row.eid.suffix for batch in reading for row in batch] == ["a", "b"]
    assert reading.report.count == 1 and reading.report.skipped[0].row == "x.jsonl:3"


def test_long_lines_are_passed_over_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"tokens": [1, 2]}\n{"tokens": [' + "1," * 50_000 + '1]}\n{"tokens": [3, 4]}')
    with pytest.raises(WireError, match=r"x.jsonl:2: the line is over the limit of 1000 bytes"):
        back(path, max_row_bytes=1000)
    reading = read(path, max_row_bytes=1000, on_error="skip")
    assert [row.tokens.tolist() for batch in reading for row in batch] == [[1, 2], [3, 4]]
    assert back(path)[1].tokens.shape == (50_001,)
    exactly = '{"tokens":[1,2]}'
    path.write_text(exactly + "\n" + exactly)
    assert len(back(path, max_row_bytes=len(exactly))) == 2
    with pytest.raises(WireError, match="over the limit"):
        back(path, max_row_bytes=len(exactly) - 1)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TWO_WAY)
def test_batches_stream_both_ways(format: str, tmp_path: Path) -> None:
    """Counts batches alive: of fifty, a writer and a reader hold a few."""
    alive = peak = 0

    def count_freed() -> None:
        nonlocal alive
        alive -= 1

    def make_batches() -> Iterator[Experiences]:
        nonlocal alive, peak
        for i in range(50):
            batch = Experiences([Experience(tokens=[i, 1, 2], reward=1.0)])
            weakref.finalize(batch, count_freed)
            alive += 1
            yield batch
            del batch
            peak = max(peak, alive)

    path = tmp_path / "x"
    assert write(make_batches(), path, format, batch_rows=2) == 50
    assert peak <= 4
    assert [len(batch) for batch in read(path, batch_rows=7)] == [7] * 7 + [1]
    reading = read(path, batch_rows=1)
    assert next(reading)[0].tokens.tolist() == [0, 1, 2]
    reading.close()
    assert list(reading) == []


def test_regroup_keeps_no_large_parent() -> None:
    large = Experiences([Experience(tokens=list(range(1000)))] * 5)
    first, last = regroup([large], 4)
    assert last.columns["tokens"].memory.shape == (1000,)
    assert list(regroup([], 3)) == [] and first == large[:4]


# --- writing whole files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TWO_WAY)
def test_a_failed_write_leaves_nothing_or_the_old_file(format: str, tmp_path: Path) -> None:
    path = tmp_path / "x"

    def broken() -> Iterator[Experiences]:
        yield some(3)
        # A type that the schema lacks, so that Parquet is in the middle of its second file.
        yield Experiences([Experience(tokens=torch.tensor([1, 2]))])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(broken(), path, format, batch_rows=1)
    assert list(tmp_path.iterdir()) == []
    write(some(2), path, format)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write(some(3), path, format)
    with pytest.raises(KeyboardInterrupt):
        write(broken(), path, format, batch_rows=1, overwrite=True)
    assert back(path) == some(2) and [item.name for item in tmp_path.iterdir()] == ["x"]
    assert write(some(3), path, format, overwrite=True) == 3
    assert back(path) == some(3) and [item.name for item in tmp_path.iterdir()] == ["x"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "home.hf"
    precious.mkdir()
    (precious / "thesis.jsonl").write_text("to be written")
    for format in TWO_WAY:
        with pytest.raises(FileExistsError, match="is a folder and not a saved dataset"):
            write(some(), precious, format, overwrite=True)
    assert [item.name for item in precious.iterdir()] == ["thesis.jsonl"]


def test_writing_asks_for_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no known extension, expected format= .*\.parquet"):
        write([], tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"format: got 'parkett', .*did you mean 'parquet'"):
        write([], tmp_path / "x", "parkett")
    with pytest.raises(ValueError, match=r"'verl', unknown format for writing"):
        write([], tmp_path / "x", "verl")
    with pytest.raises(ValueError, match=r"'frames' has no option 'compresion'; did you mean 'compression'"):
        write([], tmp_path / "x.frames", compresion="zstd")
    with pytest.raises(ValueError, match=r"got a list, expected Experiences"):
        write([[1]], tmp_path / "x.frames")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"batches: got a int"):
        write(3, tmp_path / "x.frames")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_rows"):
        write([], tmp_path / "x.frames", batch_rows=0)
    with pytest.raises(ValueError, match="overwrite"):
        write([], tmp_path / "x.frames", overwrite="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compression"):
        write(some(), tmp_path / "x.frames", compression="rar")
    with pytest.raises(FileNotFoundError):
        write(some(), tmp_path / "absent" / "x.frames")
    assert list(tmp_path.iterdir()) == []


def test_compression_and_empty_files(tmp_path: Path) -> None:
    experiences = Experiences([Experience(tokens=[1] * 5000)] * 4)
    write(experiences, tmp_path / "a.frames")
    write(experiences, tmp_path / "b.frames", compression="zstd")
    write(experiences, tmp_path / "b.parquet", compression="snappy")
    assert (tmp_path / "b.frames").stat().st_size < (tmp_path / "a.frames").stat().st_size / 10
    assert back(tmp_path / "b.frames") == back(tmp_path / "b.parquet") == experiences
    for suffix in EXTENSIONS:
        path = tmp_path / f"empty{suffix}"
        assert write([], path) == 0
        assert guess(path) == EXTENSIONS[suffix] and back(path) == []


# --- guessing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TWO_WAY)
def test_content_decides_and_not_the_name(format: str, tmp_path: Path) -> None:
    for suffix in (".jsonl", ".parquet", ".db", ""):
        path = tmp_path / f"{format}{suffix}"
        write(some(), path, format)
        assert guess(path) == format and back(path) == some()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"hello, this is text", "bytes that begin b'hello"),
        (b'[{"tokens": [1, 2]}]', "a JSON array, not one object per line"),
        (b'{"a": 1, "b": 2}', "JSON lines with the keys a, b"),
        (b'{"tokens": [1, 2', "line 1: invalid JSON"),
        (b"PAR1 and nothing more", "cannot read Parquet file"),
        (b"\x80\x09", "bytes that begin"),
    ],
)
def test_what_is_no_format_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    if "Parquet" not in words:
        assert all(name in str(caught.value) for name in FORMATS), "with the names that exist"


def test_what_can_be_read_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.jsonl", "jsonl")
    with pytest.raises(ValueError, match="expected a path or a datasets.Dataset"):
        guess(3)
    write(some(), tmp_path / "x.frames")
    with pytest.raises(ValueError, match="on_error: got 'ignore'"):
        read(tmp_path / "x.frames", on_error="ignore")
    with pytest.raises(ValueError, match="'frames' has no option 'table'"):
        read(tmp_path / "x.frames", table="a")
    with pytest.raises(ValueError, match="format: got 'frame', .*did you mean 'frames'"):
        read(tmp_path / "x.frames", "frame")
    with pytest.raises(ValueError, match="batch_rows"):
        read(tmp_path / "x.frames", batch_rows=0)
    for wrong in ("parquet", "jsonl", "trxp", "hf", "trinity-sqlite"):
        with pytest.raises(WireError):
            back(tmp_path / "x.frames", wrong)


def test_folders(tmp_path: Path) -> None:
    for i in (10, 9, 100):
        write(Experiences([Experience(tokens=[1, i])]), tmp_path / f"{i}.jsonl")
    assert guess(tmp_path) == "jsonl"
    assert [row.tokens[1].item() for row in back(tmp_path)] == [9, 10, 100], "by number, not by letter"
    write(some(1), tmp_path / "z.frames")
    with pytest.raises(ValueError, match=r"the folder holds .*frames \(z.frames\)"):
        guess(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files"):
        guess(tmp_path / "empty")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a.jsonl").symlink_to(tmp_path / "9.jsonl")
    with pytest.raises(WireError, match="symbolic link to outside the folder"):
        back(inner, "jsonl")


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["frames", "trxp"])
def test_a_damaged_piece_is_named_or_skipped(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{format}"
    rows = [Experience(eid=EID(suffix="same"), tokens=[1, i]) for i in range(3)]
    write(Experiences(rows)[:1], tmp_path / "first", format)
    third = (tmp_path / "first").stat().st_size
    write(Experiences(rows), path, batch_rows=1)
    data = bytearray(path.read_bytes())
    data[third + 90] ^= 255  # in a body; both formats have heads that say how long it is
    path.write_bytes(data)
    with pytest.raises(WireError, match=rf"row x.{format}: byte {third}: "):
        back(path)
    reading = read(path, on_error="skip", batch_rows=1)
    assert [row.tokens[1].item() for batch in reading for row in batch] == [0, 2]
    assert reading.report.count == 1
    for length in (third // 2, third - 1, 5, 3):
        path.write_bytes(data[:length])
        with pytest.raises((WireError, ValueError)):
            back(path)
    path.write_bytes(data[: third + 70])
    reading = read(path, on_error="skip")
    assert [len(batch) for batch in reading] == [1] and "the file ends after" in reading.report.skipped[0].reason
    path.write_bytes(bytes(data[:third]) + b"\xff" * 200)
    with pytest.raises(WireError, match=rf"byte {third}"):
        back(path, on_error="skip")
    with pytest.raises(WireError, match="limit"):
        path.write_bytes(data)
        back(path, limits=Limits(max_bytes=10))


def test_damaged_parquet_and_hf(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(some(), path)
    data = path.read_bytes()
    for length in (10, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:length])
        with pytest.raises(WireError):
            back(path, "parquet")
    pq.write_table(pa.table({"tokens": [["a" * 5000]]}), path)
    with pytest.raises(WireError, match="over the limit of 100 a row"):
        back(path, max_row_bytes=100)
    with pytest.raises(WireError, match="tokens"):
        back(path)
    folder = tmp_path / "x.hf"
    write(some(), folder)
    (data_file,) = folder.glob("*.arrow")
    data = data_file.read_bytes()
    data_file.write_bytes(data[: len(data) // 3])
    with pytest.raises((WireError, OSError)):
        back(folder)


@pytest.mark.parametrize("format", ["parquet", "jsonl", "frames", "trxp", "verl", "trl", "openrlhf"])
def test_whatever_the_bytes_are_the_error_is_ours(format: str) -> None:
    good = Experiences([Experience(tokens=[1, 2, 3], logprobs=[0.5, float("nan")], info={"a": (1,)}), *some(2)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        if format in TWO_WAY:
            write(good, path, format)
        else:
            row = {"input": [1, 2], "output": [3], "score": 0.5, "prompt_ids": [1], "completion_ids": [2, 3], "step": 1}
            path.write_text(json.dumps({**row, "observation_tokens": [1, 2, 3], "action_ranges": [[1, 3]]}) + "\n")
        data = path.read_bytes()

        @settings(max_examples=40)
        @given(edits=st.lists(st.tuples(st.integers(0, len(data) - 1), st.binary(max_size=3)), min_size=1, max_size=3))
        def property_(edits: list[tuple[int, bytes]]) -> None:
            changed = bytearray(data)
            for at, new in edits:
                changed[at : at + len(new) or at + 1] = new
            path.write_bytes(changed)
            for on_error in ("raise", "skip"):
                with contextlib.suppress(ValueError):  # of which WireError is one
                    back(path, format, on_error=on_error)
            with contextlib.suppress(ValueError):
                guess(path)

        property_()


# --- hostile ------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_read_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "x.trxp"
    path.write_bytes(pickle.dumps(Bomb(mark)))
    assert guess(path) == "trxp"
    with pytest.raises(WireError, match="touch"):
        back(path)
    meta = pickle.dumps({"version": 1, "num_items": 1, "items": [Bomb(mark)]})
    good = to_trxp([Experience(tokens=[1, 2])])
    bad = b"TRXP\x01" + len(meta).to_bytes(8, "little") + (8).to_bytes(8, "little") + meta + bytes(8)
    path.write_bytes(good + bad + good)
    reading = read(path, on_error="skip")
    assert sum(len(batch) for batch in reading) == 2 and "touch" in reading.report.skipped[0].reason
    assert not mark.exists()


def test_a_dataset_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    write(some(), tmp_path / "secret.hf")
    write(some(), tmp_path / "x.hf")
    state = tmp_path / "x.hf" / "state.json"
    content = json.loads(state.read_text())
    (secret,) = (tmp_path / "secret.hf").glob("*.arrow")
    for name in (f"../secret.hf/{secret.name}", str(secret), "..", None):
        content["_data_files"] = [{"filename": name}]
        state.write_text(json.dumps(content))
        with pytest.raises(WireError, match="not a plain file name"):
            back(tmp_path / "x.hf")
    (tmp_path / "x.hf" / "link.arrow").symlink_to(secret)
    content["_data_files"] = [{"filename": "link.arrow"}]
    state.write_text(json.dumps(content))
    with pytest.raises(WireError, match="symbolic link to outside the folder"):
        back(tmp_path / "x.hf")


def test_datasets_and_their_splits(tmp_path: Path) -> None:
    data = to_hf(some())
    assert back(data) == some() and guess(data) == "hf"
    assert back(data.select([1, 0])) == [some()[1], some()[0]]
    both = DatasetDict({"train": data, "test": data.select([0])})
    both.save_to_disk(tmp_path / "d")
    for source in (both, tmp_path / "d"):
        assert back(source, "hf", split="test") == some()[:1]
        with pytest.raises(ValueError, match="expected one of 'train', 'test'"):
            back(source, "hf")
        with pytest.raises(ValueError, match="split: got 'dev'"):
            back(source, "hf", split="dev")
    assert guess(tmp_path / "d") == "hf"
    with pytest.raises(ValueError, match="has no splits"):
        back(data, split="train")
    with pytest.raises(ValueError, match="expected a path for format 'jsonl'"):
        read(data, "jsonl")
    foreign = Dataset.from_dict({"tokens": [[1, 2, 3]], "reward": [1.0]})
    assert back(foreign)[0].reward == 1.0


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, rollbook.io.formats; print([m for m in ('torch', 'datasets', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_other_databases_are_named(tmp_path: Path) -> None:
    write(some(), tmp_path / "x.jsonl")
    with pytest.raises(WireError, match="expected an SQLite database"):
        list_tables(tmp_path / "x.jsonl")
