"""Parquet, Arrow and HF: ordinary columns to other tools, and their tables read as records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk

from benchmarks import peers
from rollbook import EID, CustomField, Experience, Experiences, WireError
from rollbook.compat.trinity import from_hf_datasets, to_hf_datasets
from rollbook.core.fields import FIELDS
from rollbook.io.arrow import from_table
from rollbook.io.parquet import read_parquet, write_parquet


def rows() -> list[Experience]:
    return [
        Experience(
            eid=EID(1, "a/b", run, 0),
            tokens=list(range(4 + run)),
            prompt_length=2,
            logprobs=torch.full((2 + run,), -0.5, dtype=torch.bfloat16),
            advantages=torch.full((2 + run,), 0.25),
            reward=[0.0, 1.0, None, float("nan")][run],
            info={"model_version": run, "pair": (run, None)},
            prompt_text="\N{GRINNING FACE}" * run,
            routed_experts=torch.full((2 + run, 2, 3), run, dtype=torch.int16),
        )
        for run in range(4)
    ]


def write(path: Path) -> Path:
    write_parquet(Experiences(rows()), path)
    return path


def test_parquet_is_ordinary_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    selected = duckdb.sql(
        f"select eid.task as task, len(tokens) as n, list_sum(logprobs) as s, reward, "
        f"cast(info->>'model_version' as int) as v, routed_experts[1][1][1] as e from '{path}' order by n"
    ).fetchall()
    assert [row[:3] for row in selected] == [("a/b", 4 + i, -0.5 * (2 + i)) for i in range(4)]
    assert [row[4:] for row in selected] == [(i, i) for i in range(4)]
    assert [row[3] for row in selected][:3] == [0.0, 1.0, None]
    frame = pd.read_parquet(path)
    assert frame["tokens"][1].tolist() == [0, 1, 2, 3, 4]
    assert frame["logprobs"][0].tolist() == [-0.5, -0.5], "half precision is float32 to other tools"
    table = pl.read_parquet(path)
    assert table["advantages"].to_list()[1] == [0.25] * 3
    assert list(pq.read_schema(path).names)[:4] == ["eid", "tokens", "prompt_length", "logprobs"]
    assert set(FIELDS) <= set(pq.read_schema(path).names), "the schema does not depend on what the rows have"


def test_parquet_through_other_tools(tmp_path: Path) -> None:
    path, expected = write(tmp_path / "x.parquet"), rows()
    original = read_parquet(path)
    through_polars, through_duckdb = tmp_path / "p.parquet", tmp_path / "d.parquet"
    pl.read_parquet(path).write_parquet(through_polars)
    duckdb.sql(f"copy (select * from '{path}') to '{through_duckdb}' (format parquet)")
    for other in (through_polars, through_duckdb):
        assert read_parquet(other) == original
    assert [row.tokens.tolist() for row in original] == [row.tokens.tolist() for row in expected]
    assert original[0].logprobs.dtype == torch.bfloat16
    positive = duckdb.sql(f"select * from '{path}' where reward > 0").to_arrow_table()
    assert from_table(positive) == [original[1], original[3]], "NaN is above all in SQL"


def test_parquet_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(WireError, match="cannot read Parquet file"):
        read_parquet(path)
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "absent.parquet")
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(WireError, match="no column 'tokens'"):
        read_parquet(path)
    write(path)
    data = path.read_bytes()
    for length in (10, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:length])
        with pytest.raises(WireError):
            read_parquet(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    before = path.read_bytes()
    with pytest.raises((ValueError, pa.ArrowException, OSError)):
        write_parquet(Experiences(rows()), path, compression="no such codec")
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["x.parquet"]


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"tokens": [[1, 2], None]}, "tokens: got None"),
        ({"tokens": [[1, 2], [1, None]]}, "null inside"),
        ({"tokens": [[1.5, 2.0]]}, "tokens"),
        ({"tokens": [["a", "b"]]}, "tokens"),
        ({"tokens": [[1, 2]], "logprobs": [[0.5, 0.5]]}, "logprobs: got 2 entries, expected 1"),
        ({"tokens": [[1, 2]], "reward": ["good"]}, "reward"),
        ({"tokens": [[1, 2]], "experience_type": ["other"]}, "experience_type"),
        ({"tokens": [[1, 2]], "prompt_length": [5]}, "prompt_length: got 5 with 2 tokens"),
        ({"tokens": [[1, 2]], "info": ["{not json"]}, "record 0: info: .*not JSON"),
        ({"tokens": [[1, 2]], "eid": ["1/2/0/0/x"]}, "eid"),
        ({"tokens": [1, 2]}, "tokens"),
        (
            {
                "tokens": [[1, 2, 3]],
                "truncate_status": ["prompt_truncated"],
                "logprobs": [[0.0]],
                "action_mask": [[True]],
            },
            "action_mask: got True",
        ),
    ],
)
def test_foreign_tables_are_checked(columns: dict[str, Any], word: str) -> None:
    with pytest.raises(WireError, match=word):
        list(from_table(pa.table(columns)))


def test_what_is_no_table_is_named() -> None:
    for wrong in ([1], {"tokens": [[1, 2]]}, None):
        with pytest.raises(ValueError, match="expected a pyarrow Table"):
            from_table(wrong)
        with pytest.raises(ValueError, match="expected a datasets.Dataset"):
            from_hf_datasets(wrong)
    assert from_table(pa.table({"tokens": [[1, 2, 3]], "prompt_length": [None]}))[0].prompt_length == 1


def test_foreign_tables_are_read() -> None:
    table = pa.table(
        {
            "tokens": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int64())),
            "action_mask": pa.array([[True, False], None], pa.list_(pa.bool_())),
            "reward": pa.array([1, None], pa.int8()),
            "info": pa.array([{"a": 1}, {"a": None}]),
            "prompt_text": pa.array(["p", "p"]).dictionary_encode(),
            "eid": [{"batch": 1, "task": "x", "run": 0, "step": 0, "suffix": "s"}, None],
            "mine": [1, 2],
        }
    )
    first, second = from_table(table)
    assert (first.tokens.dtype, first.action_mask.tolist(), first.reward) == (torch.int64, [True, False], 1.0)
    assert (first.experience_type, second.experience_type) == ("multi_turn", "single_turn")
    assert first.info == {"a": 1}
    assert first.eid.uid == "1/x/0/0/s"
    assert (second.prompt_text, second.action_mask.tolist(), second.reward) == ("p", [True], None)
    assert first.unknown["mine"].to_pylist() == [1]


def test_hf_after_its_operations(tmp_path: Path) -> None:
    records = rows()
    dataset = to_hf_datasets(records)
    assert isinstance(dataset, Dataset)
    assert dataset.column_names[:3] == ["eid", "tokens", "prompt_length"]
    assert from_hf_datasets(dataset) == records
    assert from_hf_datasets(dataset.select([3, 1])) == [records[3], records[1]]
    assert from_hf_datasets(dataset.filter(lambda row: len(row["tokens"]) > 5)) == records[2:]
    assert sorted(row.eid.run for row in from_hf_datasets(dataset.shuffle(seed=0))) == [0, 1, 2, 3]
    doubled = concatenate_datasets([dataset, to_hf_datasets([Experience(tokens=[1, 2])])])
    assert from_hf_datasets(doubled)[:4] == records
    assert from_hf_datasets(doubled)[4].tokens.tolist() == [1, 2]
    dataset.save_to_disk(tmp_path / "ds")
    mapped = from_hf_datasets(load_from_disk(tmp_path / "ds"))
    assert mapped == records
    mapped[0].advantages.add_(1)
    assert to_hf_datasets(records)._fingerprint == dataset._fingerprint, "the same content has the same name"
    assert to_hf_datasets(records[:2])._fingerprint != dataset._fingerprint


def test_trinitys_own_dataset_is_read() -> None:
    """The columns that Trinity's to_hf_datasets makes: a struct for the id, nested lists, no kind."""
    dataset = Dataset.from_list(
        [
            {
                "eid": {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "abc123"},
                "tokens": [1, 2, 3],
                "prompt_length": 1,
                "logprobs": [-0.5, -0.25],
                "reward": 1.0,
                "info": {"model_version": 3},
                "metrics": {},
                "action_mask": [True, True],
                "messages": [{"role": "user", "content": "hi"}],
                "multi_modal_inputs": {"pixel_values": [[0.5, 1.0]]},
                "custom_fields": [],
                "chosen": None,
            }
        ]
    )
    (record,) = from_hf_datasets(dataset)
    assert record.eid.uid == "1/2/3/4/abc123"
    assert record.info == {"model_version": 3}
    assert record.messages == [{"role": "user", "content": "hi"}]
    assert record.multi_modal_inputs["pixel_values"].tolist() == [[0.5, 1.0]]
    assert record.logprobs.tolist() == [-0.5, -0.25]


def test_datasets_go_to_trinity_and_back() -> None:
    """The released Trinity reads what was written for it, and the single turns that it writes stay single turns."""
    trinity = peers.trinity()
    grid = torch.tensor([[1, 2, 2]])
    rows = [
        Experience(
            eid=EID(1, "a/b", 2, suffix="s"),
            tokens=[1, 2, 3],
            logprobs=[-0.5, -0.25],
            reward=1.0,
            info={"a": 1},
            metrics={"m": 0.5},
            messages=[{"role": "user", "content": "x"}],
            tools=[{"name": "search"}],
            multi_modal_inputs={"pixel_values": torch.tensor([[0.5]]), "image_grid_thw": grid},
            policy_versions=3,
        ),
        Experience(eid=EID("x", 2, 3, suffix="t"), tokens=[4, 5, 6], action_mask=[1, 0], prompt_length=1),
        Experience(eid=EID(1, 2, 4, suffix="u"), tokens=[7, 8], logprobs=[0.0], truncate_status="prompt_truncated"),
        Experience(eid=EID(1, 2, 5, suffix="v"), tokens=[1, 2], chosen=[3], rejected=[4, 5], reward=float("nan")),
    ]
    read = trinity.from_hf_datasets(to_hf_datasets(rows, for_trinity=True))
    for row, read_row in zip(rows, read, strict=True):
        assert type(read_row) is trinity.Experience and read_row.experience_type == row.experience_type
        assert read_row.eid.to_dict() == {**row.eid.to_dict(), "batch": str(row.eid.batch), "task": str(row.eid.task)}
        for name in ("tokens", "logprobs", "action_mask", "chosen", "rejected"):
            column, read_column = getattr(row, name), getattr(read_row, name)
            assert (column is read_column is None) or (
                torch.equal(column, read_column) and column.dtype == read_column.dtype
            ), name
        for name in ("info", "metrics", "messages", "tools", "truncate_status", "prompt_length"):
            assert getattr(read_row, name) == getattr(row, name), name
    assert (read[0].reward, read[1].reward) == (1.0, None) and math.isnan(read[3].reward)
    assert torch.equal(read[0].multi_modal_inputs["image_grid_thw"], grid) and read[1].multi_modal_inputs is None
    again = from_hf_datasets(trinity.to_hf_datasets(read))
    assert [row.experience_type for row in again] == ["single_turn", "multi_turn", "single_turn", "dpo"]
    assert [row.experience_type for row in from_hf_datasets(to_hf_datasets(rows, for_trinity=True))] == [
        row.experience_type for row in rows
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_fields": [CustomField("a", "b", torch.bool)]}, "record 1 .*: custom_fields: got 1, .*to_trxp"),
        ({"info": {"a": "x"}}, "info: .*one type in all records"),
        ({"multi_modal_inputs": {"sound": torch.ones(1)}}, r"record 1 .*: multi_modal_inputs: .*\['sound'\]"),
    ],
)
def test_what_trinitys_datasets_cannot_hold_is_refused(changes: dict[str, Any], message: str) -> None:
    row = Experience(tokens=[1, 2], info={"a": 1}, multi_modal_inputs={"pixel_values": torch.ones(1)})
    with pytest.raises(ValueError, match=message):
        to_hf_datasets([row, row.replace(**changes)], for_trinity=True)
