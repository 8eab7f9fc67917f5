"""Frames, digests and tags straight from rows: the same as by way of Arrow arrays, or that way is taken."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from rollbook import EID, Experience, Experiences
from rollbook.book.content_hash import content_hashes
from rollbook.book.index_columns import column_types, index_columns, number_column
from rollbook.book.media import may_hold_media
from rollbook.core.wire import RowLayout, encode
from tests.strategies import record_lists

OPTIONAL: dict[str, Any] = {
    "logprobs": lambda rng, size: torch.tensor([rng.choice([-0.0, 0.5, float("nan")]) for _ in range(size)]),
    "values": lambda rng, size: torch.rand(size, dtype=torch.float64),
    "policy_versions": lambda rng, size: torch.randint(0, 9, (size,), dtype=torch.int64),
    "reward": lambda rng, size: rng.choice([-0.0, 1.5, float("nan"), float("inf")]),
    "group_size": lambda rng, size: rng.choice([1, 2**62]),
    "prompt_text": lambda rng, size: rng.choice(["", "plain", "漢字 🙂", "x" * 5000, "nul \0"]),
    "finish_reason": lambda rng, size: rng.choice(["stop", "length"]),
    "truncate_status": lambda rng, size: "response_truncated",
    "info": lambda rng, size: rng.choice(
        [{}, {"score": 1.0, "model_version": 7}, {"score": True}, {"$int": 1}, {"a": [float("nan"), (1,)]}, {"b": None}]
    ),
    "messages": lambda rng, size: [{"role": "user", "content": "some words " * rng.choice([1, 300])}],
    "sampling": lambda rng, size: {"temperature": 0.5},
}


def plain_rows(seed: int) -> list[Experience]:
    """Records of which each field has one type, and some lack some fields."""
    rng = random.Random(seed)
    names = rng.sample(list(OPTIONAL), rng.randint(0, len(OPTIONAL)))
    rows = []
    for i in range(rng.choice([1, 2, 8, 17])):
        prompt, size = rng.randint(1, 4), rng.randint(1, 5)
        optional = {name: OPTIONAL[name](rng, size) for name in names if rng.random() < 0.8}
        if rng.random() < 0.5:
            optional["action_mask"] = torch.rand(size) < 0.5
        if seed % 3 == 0 and "policy_versions" in optional:
            optional["policy_versions"] = rng.randint(0, 9)
        eid = EID(rng.choice([3, -4, "a/b", "5%"]), rng.choice([2**62, "", "01"]), i, rng.randint(0, 9), f"{i:x}")
        tokens = torch.randint(0, 99, (prompt + size,), dtype=torch.int32)
        rows.append(Experience(eid=eid, tokens=tokens, prompt_length=prompt, **optional))
    return rows


def check_same(layout: RowLayout, rows: list[Experience]) -> None:
    columns = Experiences(rows)
    assert bytes(encode(layout, out=bytearray(1 << 20))) == encode(columns)
    assert content_hashes(layout) == content_hashes(columns)
    assert repr(index_columns(layout)) == repr(index_columns(columns))
    assert column_types(layout) == column_types(columns)
    assert repr(number_column(layout, "info.score")) == repr(number_column(columns, "info.score"))


@pytest.mark.parametrize("seed", range(40))
def test_plain_rows_give_what_columns_give(seed: int) -> None:
    rows = plain_rows(seed)
    layout = RowLayout.from_rows(rows)
    assert layout is not None
    assert not may_hold_media(layout)
    check_same(layout, rows)


@settings(max_examples=30)
@given(record_lists(max_size=3))
def test_any_rows_give_what_columns_give(rows: list[Experience]) -> None:
    assert encode(rows) == encode(Experiences(rows))
    layout = RowLayout.from_rows(rows)
    if layout is not None and not any("\0" in row.eid.uid for row in rows):
        check_same(layout, rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", None),
        ("tokens", [1.5, 2, 3]),
        ("tokens", torch.ones(3)),
        ("logprobs", torch.zeros(7)),
        ("prompt_length", 9),
        ("prompt_length", 0),
        ("reward", "good"),
        ("group_size", 0),
        ("group_size", 2**64),
        ("experience_type", "dialogue"),
        ("prompt_text", 3),
        ("info", {"a": object()}),
        ("messages", {}),
        ("eid", None),
    ],
)
def test_what_cannot_be_kept_is_refused_as_in_columns(name: str, value: Any) -> None:
    row = Experience(tokens=[1, 2, 3], logprobs=[-0.5, -0.25], reward=1.0)
    setattr(row, name, value)
    assert RowLayout.from_rows([row]) is None
    with pytest.raises(ValueError) as by_columns:
        Experiences([row])
    with pytest.raises(ValueError) as by_rows:
        encode([row])
    assert str(by_rows.value) == str(by_columns.value)
