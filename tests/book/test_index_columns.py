"""Tags: what they say of a record is what the record itself says, and what both databases can keep."""

from __future__ import annotations

import math
import sqlite3
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import EID, Experience, Experiences
from rollbook.book.index_columns import (
    NOT_A_NUMBER,
    SCORED,
    UNSCORED,
    IndexColumns,
    get_reward,
    index_columns,
    number_column,
)
from rollbook.core.wire import decode, encode
from tests.strategies import FREEFORM, full_record, record_lists

FEW = settings(max_examples=60)
MOST = 2**63 - 1


def naive(record: Experience) -> dict[str, Any]:
    """The tags of one record by its attributes, without columns."""
    eid = record.eid
    length = len(record.tokens)
    prompt = min(record.prompt_length, length)
    if record.experience_type == "dpo":
        length += len(record.chosen) + len(record.rejected)  # type: ignore[arg-type]
    mask = record.action_mask
    trained = length - prompt if mask is None else sum(bool(value != 0) for value in mask.reshape(-1).tolist())
    versions = record.policy_versions
    if isinstance(versions, torch.Tensor):
        numbers = versions.tolist()
        if mask is not None and len(mask) == len(numbers):
            numbers = [version for version, keep in zip(numbers, mask.tolist(), strict=True) if keep] or numbers
    else:
        numbers = [] if versions is None else [versions]
    if not numbers and isinstance(record.info.get("model_version"), int | float):
        recorded = record.info["model_version"]
        numbers = [int(recorded)] if abs(recorded) < 2**62 else []
    number = record.reward
    return {
        "uid": eid.uid,
        "gid": eid.uid if eid.tid == "/" else eid.tid,
        "batch": str(eid.batch),
        "task": str(eid.task),
        "run": eid.run,
        "step": eid.step,
        "suffix": eid.suffix,
        "reward": None if number is None or math.isnan(number) else number,
        "scored": UNSCORED if number is None else NOT_A_NUMBER if math.isnan(number) else SCORED,
        "length": length,
        "prompt_tokens": prompt,
        "response_tokens": length - prompt,
        "trained_tokens": trained,
        "version_min": min(min(numbers), MOST) if numbers else None,
        "version_max": min(max(numbers), MOST) if numbers else None,
        "finish_reason": _storable(record.finish_reason),
        "truncate_status": _storable(record.truncate_status),
        "kind": record.experience_type,
        "group_size": record.group_size,
        "parent": _storable(record.parent),
    }


def _storable(text: str | None) -> str | None:
    if text is None:
        return None
    return "".join("\\x00" if c == "\0" else f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


@FEW
@given(rows=record_lists(max_size=5), version=st.one_of(st.none(), st.integers(0, 9), st.floats(0, 9), st.just("x")))
def test_tags_are_what_the_records_say(rows: list[Experience], version: Any) -> None:
    rows = [row.replace(eid=EID.parse(row.eid.uid.replace("\0", "0"))) for row in rows]
    if rows and version is not None:
        rows[0] = rows[0].replace(info={**rows[0].info, "model_version": version})
    expected = [naive(row) for row in rows]
    experiences = Experiences(rows)
    assert [tag._asdict() for tag in index_columns(experiences)] == expected
    assert [tag._asdict() for tag in index_columns(decode(encode(experiences))[1:])] == expected[1:]
    assert [tag._asdict() for row in rows for tag in index_columns(Experiences([row]))] == expected
    for tag in index_columns(experiences):
        assert tag.length == tag.prompt_tokens + tag.response_tokens
        assert {type(value) for value in tag} <= {str, int, float, type(None)}


@FEW
@given(rows=record_lists(max_size=4))
def test_a_database_gives_tags_back_as_they_were(rows: list[Experience]) -> None:
    rows = [row.replace(eid=EID.parse(row.eid.uid.replace("\0", "0"))) for row in rows]
    tags = index_columns(Experiences(rows))
    with sqlite3.connect(":memory:") as database:
        database.execute(f"CREATE TABLE t ({', '.join(IndexColumns._fields)})")
        database.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(IndexColumns._fields))})", tags)
        assert list(map(IndexColumns._make, database.execute("SELECT * FROM t ORDER BY rowid"))) == tags
    for row, tag in zip(rows, tags, strict=True):
        back = get_reward(tag)
        assert back == row.reward or (back != back and row.reward != row.reward)
        assert not any(isinstance(value, str) and "\0" in value for value in tag)


def test_groups() -> None:
    eids = [EID(), EID(), EID(batch=1), EID(task="a/b"), EID(1, 2, run=3), EID("1", "2", run=4), EID(run=3)]
    tags = index_columns(Experiences([Experience(eid=eid, tokens=[1, 2]) for eid in eids]))
    alone = [0, 1, 6]
    assert [tags[i].gid for i in alone] == [eids[i].uid for i in alone]
    assert [tag.gid for i, tag in enumerate(tags) if i not in alone] == ["1/", "/a%2Fb", "1/2", "1/2"]
    assert (tags[3].task, tags[4].task, tags[4].run) == ("a/b", "2", 3)


def test_ids_that_a_database_cannot_keep_are_refused() -> None:
    experiences = Experiences([Experience(tokens=[1, 2]), Experience(eid=EID(task="a\0b"), tokens=[1, 2])])
    with pytest.raises(ValueError, match=r"record 1: eid: got '/a\\x00b/.*expected no NUL"):
        index_columns(experiences)


def _versions(*rows: dict[str, Any]) -> list[tuple[int | None, int | None]]:
    records = [Experience(**{"tokens": [1, 2, 3, 4, 5], "prompt_length": 2, **row}) for row in rows]
    return [(tag.version_min, tag.version_max) for tag in index_columns(Experiences(records))]


def test_versions_are_of_the_tokens_that_count() -> None:
    mask = [False, True, True]
    rows: list[dict[str, Any]] = [
        {"policy_versions": [1, 5, 9], "action_mask": mask},
        {"policy_versions": [9, 8, 7], "action_mask": mask},
        {"policy_versions": [1, 5, 9], "action_mask": [False] * 3},
        {"policy_versions": [4, 4, 4]},
    ]
    expected: list[tuple[int | None, int | None]] = [(5, 9), (7, 8), (1, 9), (4, 4)]
    assert _versions(*rows) == expected
    # Beside records that have one number, Trinity's or none, whose masks are then not those of the column.
    rows += [
        {"policy_versions": 6},
        {"info": {"model_version": 3}},
        {},
        {"policy_versions": torch.tensor([2**64 - 1, 2, 3], dtype=torch.uint64), "action_mask": [True, True, False]},
        {"policy_versions": 2, "info": {"model_version": 3}},
        {"info": {"model_version": np.int64(11)}},
        {"info": {"model_version": None}},
        {"info": {"model_version": "new"}},
        {"info": {"model_version": float("nan")}},
    ]
    expected += [(6, 6), (3, 3), (None, None), (2, MOST), (2, 2), (11, 11), (None, None), (None, None), (None, None)]
    assert _versions(*rows) == expected
    assert [_versions(row)[0] for row in rows] == expected


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "int64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
)
def test_masks_of_any_type(dtype: str) -> None:
    mask = torch.tensor([0.0, -0.0, 1.0]).to(getattr(torch, dtype))
    record = Experience(tokens=[1, 2, 3, 4, 5], prompt_length=2, action_mask=mask, policy_versions=[1, 2, 3])
    plain = Experience(tokens=[1, 2, 3, 4, 5], prompt_length=2, action_mask=[True, True, False])
    tags = index_columns(Experiences([plain, record]))
    assert [tag.trained_tokens for tag in tags] == [2, 1]
    assert (tags[1].version_min, tags[1].version_max) == (3, 3)


def test_pairs_and_cut_prompts() -> None:
    pair = Experience(tokens=[1, 2], chosen=[3, 4, 5], rejected=torch.tensor([6], dtype=torch.int64))
    truncated = Experience(tokens=[1, 2], prompt_length=5, truncate_status="prompt_truncated", logprobs=[0.0])
    tags = index_columns(Experiences([pair, truncated]))
    assert [tag[9:13] for tag in tags] == [(6, 2, 4, 4), (2, 2, 0, 0)]
    assert index_columns(Experiences()) == []


# --- numbers ------------------------------------------------------------------------------------------------------

VALUES: list[tuple[Any, float | None]] = [
    (1, 1.0),
    (0.5, 0.5),
    (True, 1.0),
    (False, 0.0),
    (None, None),
    ("3.5", 3.5),
    (" -2e3 ", -2000.0),
    ("hard", None),
    ("nan", None),
    ("inf", None),
    ("1_000", None),
    ("", None),
    ([1], None),
    ({}, None),
    ((1,), None),
    (b"1", None),
    (float("inf"), math.inf),
    (2**70, float(2**70)),
    (10**400, None),
    (np.float32(0.5), 0.5),
    (np.array([7]), 7.0),
    (np.array([7, 8]), None),
    (np.str_("7"), None),
    (torch.tensor(2.5), 2.5),
    (torch.tensor([2.5], dtype=torch.bfloat16), 2.5),
    (torch.tensor([True]), 1.0),
    (torch.tensor([1, 2]), None),
    (torch.tensor(1j), None),
]


def test_numbers_of_free_form_values() -> None:
    for field in ("info", "metrics"):
        rows = [Experience(tokens=[1, 2], **{field: {"x": value, "y": 0}}) for value, _ in VALUES]
        experiences = Experiences([*rows, Experience(tokens=[1, 2])])
        assert number_column(experiences, f"{field}.x") == [*(number for _, number in VALUES), None]
    numbers = number_column(Experiences([Experience(tokens=[1, 2], info={"x": math.nan})]), "info.x")
    assert numbers[0] is not None and math.isnan(numbers[0])


def test_names_with_dots_quotes_and_tags() -> None:
    infos: list[dict[Any, Any]] = [
        {"a": {"b": {"c": 1}}},
        {"a.b": {"c": 2}},
        {"a.b.c": 3, "a": {"b": {"c": 9}}},
        {"a": {"b.c": 4}},
        {"a": 5},
        {"a": {"b": {"c": 6}}, 7: 8},
        {"a": {"b": {7: 0, "c": 7}}},
    ]
    experiences = Experiences([Experience(tokens=[1, 2], info=info) for info in infos])
    assert number_column(experiences, "info.a.b.c") == [1, 2, 3, 4, None, 6, 7]
    names = ['say "hi"', "$tuple", "tab\t", "漢", "a/b", "ends."]
    experiences = Experiences([Experience(tokens=[1, 2], info={name: 1}) for name in names])
    for i, name in enumerate(names):
        assert number_column(experiences, f"info.{name}") == [1.0 if j == i else None for j in range(len(names))], name


@FEW
@given(values=st.lists(FREEFORM, max_size=4))
def test_numbers_of_anything(values: list[Any]) -> None:
    experiences = Experiences([Experience(tokens=[1, 2], info={"x": value, "": 0}) for value in values])
    numbers = number_column(experiences, "info.x")
    for value, number in zip(values, numbers, strict=True):
        if type(value) in (bool, int, float) and abs(value) < 1e300:
            assert number == float(value)  # as near as a float is to it
        assert number is None or type(number) is float


def test_numbers_of_tags() -> None:
    rows = [full_record(reward=value, eid=EID(batch=batch)) for value, batch in ((0.5, 3), (math.nan, "x"), (None, ""))]
    experiences = Experiences(rows)
    rewards = number_column(experiences, "reward")
    assert rewards[0] == 0.5 and math.isnan(rewards[1] or 0.0) and rewards[2] is None
    assert number_column(experiences, "batch") == [3.0, None, None]
    assert number_column(experiences, "response_tokens") == [3.0] * 3
    assert number_column(experiences, "group_size") == [4.0] * 3
    for key, guess in {"rewards": "'reward'", "info.": "info.NAME", "length.x": "'length'", 3: "index column"}.items():
        with pytest.raises(ValueError, match=f"key: got .*{guess}"):
            number_column(experiences, key)  # type: ignore[arg-type]
