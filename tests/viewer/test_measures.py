"""What is measured of tokens: repetition on built cases, and rows from columns and from trajectories that agree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook import EID, Experience
from rollbook.inspect import measures
from rollbook.inspect.index import SCALE_TOKENS, Index, Scales
from rollbook.inspect.records import Reader
from rollbook.inspect.sources import BookSource, load
from rollbook.inspect.trajectory import derive_lenses

NATURAL = """The area of a triangle is half of the product of a side and the height on it. Here the side is seven and
the height is twelve, so that the product is eighty-four and the area is forty-two. Let me check that with the other
formula: the sides are seven, thirteen and fifteen, half of their sum is seventeen and a half, and the root of the
product of the four numbers is near forty-two as well. Both ways agree, which is what we hoped for; the answer is 42."""


def words(text: str) -> np.ndarray[Any, Any]:
    """A text's words as numbers, equal words alike."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(word, len(numbers)) for word in text.split()])


@pytest.mark.parametrize(
    ("ids", "share", "start"),
    [
        ([9, 8, 7, 6] + [5] * 60, 60 / 64, 4),
        ([9, 8, 7, 6] + [1, 2, 3] * 20, 60 / 64, 4),
        (list(range(100, 140)) + [1, 2, 3, 4, 5] * 20 + [1, 2], 102 / 142, 40),  # the last repeat is cut
        (list(range(100, 140)) + [1, 2, 3] * 20 + [0, 77], 60 / 102, 40),  # an end of text follows
        (list(range(100, 132)) + list(range(64)) * 4, 256 / 288, 32),  # the longest period
    ],
)
def test_a_loop_at_the_end_is_found_with_its_share_and_its_place(ids: list[int], share: float, start: int) -> None:
    repeated, at = measures.measure_repetition(np.array(ids))
    assert (repeated, at) == (pytest.approx(share), start)


@pytest.mark.parametrize(
    "ids",
    [
        words(NATURAL),
        np.arange(500),
        np.array([], dtype=np.int64),
        np.array([3] * 15),  # shorter than anything is judged by
        np.array([token for i in range(200) for token in (*map(int, str(i)), 11, 12)]),  # "0, 1, 2, ..." by digits
        np.array([1, 2, 3] * 3 + list(range(50, 100))),  # a phrase three times, then on
    ],
)
def test_text_that_goes_on_is_no_loop(ids: np.ndarray[Any, Any]) -> None:
    repeated, at = measures.measure_repetition(ids)
    assert at is None
    assert repeated < 0.1


def test_a_loop_that_ended_and_a_block_that_was_copied_count_by_their_8_grams() -> None:
    repeated, at = measures.measure_repetition(np.array([5] * 100 + list(range(10, 60))))
    assert at is None
    assert repeated == pytest.approx(92 / 143)
    repeated, at = measures.measure_repetition(np.concatenate([np.arange(100), np.arange(100)]))
    assert at is None  # two copies are no loop
    assert repeated == pytest.approx(93 / 193)


@given(st.lists(st.integers(0, 3), max_size=200))
def test_repetition_is_a_share_and_a_loop_is_periodic(ids: list[int]) -> None:
    share, at = measures.measure_repetition(np.array(ids, dtype=np.int64))
    assert 0 <= share <= 1
    if at is not None:
        # Some period up to 64 holds from there on, but for at most four tokens at the end.
        assert any(
            all(ids[i] == ids[i - period] for i in range(at + period, stop)) and (stop - at) >= max(16, 4 * period)
            for stop in range(len(ids) - 4, len(ids) + 1)
            for period in range(1, 65)
        )


def test_digests_tell_responses_apart_whatever_their_type() -> None:
    same = [measures.hash_tokens(np.array([1, 2, 3], dtype=kind)) for kind in (np.int32, np.int64, np.uint16)]
    assert len(set(same)) == 1
    assert same[0] is not None and 0 <= same[0] < 2**63
    assert measures.hash_tokens(np.array([1, 3, 2])) != same[0]
    assert measures.hash_tokens(np.array([], dtype=np.int32)) is None


def test_the_opening_is_what_the_user_asks() -> None:
    question = "Find\n\n the area."
    for prompt in (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        f"<|start_header_id|>user<|end_header_id|>\n\n{question}<|eot_id|>",
        f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n",
        f"[INST] {question} [/INST]",
        f"A conversation.\nUser: {question}\nAssistant: ",
        question,
    ):
        assert measures.extract_opening(prompt) == "Find the area."
    assert len(measures.extract_opening("word " * 1000)) == 240
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    assert measures.extract_user_message(messages) == "Find the area."
    assert measures.extract_user_message("nonsense") == ""


def test_what_somebody_says_in_a_message_is_not_counted() -> None:
    messages = [
        {"role": "user", "content": 'an {"role":"assistant"} and a "type":"image_url"'},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}, {"function": {"name": "g"}}]},
        {"role": "tool", "content": "1"},
    ]
    assert measures.count_messages(json.dumps(messages, separators=(",", ":"))) == (1, 2, 0)


def record(run: int, **fields: Any) -> Experience:
    """A sample of task 3/1 with a prompt of three tokens."""
    return Experience(eid=EID(batch=3, task=1, run=run, suffix="s"), prompt_length=3, **fields)


def test_numbers_are_over_trained_and_finite_tokens(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    rows = [
        record(
            0,
            tokens=[1, 2, 3, 4, 5, 6, 7],
            action_mask=[True, False, True, True],
            entropy=[1.0, 100.0, 3.0, 2.0],
            logprobs=[-1.0, nan, -2.0, -3.0],
            old_logprobs=[-1.5, -9.0, -2.0, -2.0],
            ref_logprobs=[-1.5, -9.0, -3.0, -2.0],
            advantages=[0.5, 9.0, 0.5, 2.0],
        ),
        record(1, tokens=[1, 2, 3, 4, 5], entropy=[nan, 4.0], logprobs=[-inf, -1.0], reward=nan),
        record(2, tokens=[1, 2, 3, 4]),
    ]
    book = rollbook.open(tmp_path / "book")
    book.append(rows)
    source, index = BookSource(book), Index()
    load(source, index)
    first, second, third = index.rows("SELECT * FROM samples ORDER BY run")
    assert (first["entropy"], first["entropy_max"], first["logprob"]) == (2.0, 3.0, -2.0)
    assert (first["mismatch"], first["mismatch_max"]) == (0.5, 1.0)
    k3 = math.exp(-1) - 1 + 1  # ref - policy = -1 at one token, 0 at the others
    assert (first["kl"], first["kl_max"]) == (pytest.approx(k3 / 3, rel=1e-6), pytest.approx(k3, rel=1e-6))
    assert (first["advantage"], first["nans"]) == (1.0, 0)  # a masked token's NaN is nobody's concern
    assert (second["entropy"], second["logprob"], second["nans"]) == (4.0, -1.0, 2)
    assert (second["reward"], second["scored"]) == (None, 2)
    assert [third[name] for name in ("entropy", "logprob", "kl", "mismatch", "advantage", "nans")] == [None] * 5 + [0]
    index.close()
    source.close()


def test_a_row_is_the_same_from_columns_and_from_a_trajectory(tmp_path: Path) -> None:
    import torch

    dice = np.random.default_rng(5)
    rows = []
    for run in range(6):
        count = int(dice.integers(20, 60))
        numbers = {
            name: torch.tensor(dice.normal(-1, 1, count), dtype=torch.bfloat16 if run % 2 else torch.float32)
            for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "advantages", "values")
            if dice.random() < 0.8
        }
        response = dice.integers(0, 9, count)
        if run == 4:
            response[5:] = 7
        rows.append(
            record(
                run,
                tokens=[1, 2, 3, *response.tolist()],
                action_mask=np.arange(count) % 11 > 1 if run % 3 else None,
                policy_versions=dice.integers(2, 5, count).astype(np.int32),
                reward=float(run) / 4,
                finish_reason="length" if run == 2 else None,
                prompt_text="User: add 2 and 3\nAssistant:",
                response_text="it is  five " * 3,
                metrics={"accuracy": True, "speed": np.float32(0.5), "odd": float("nan"), "note": "x"},
                info={"kept": "longest"} if run == 1 else {},
                group_size=8,
                **numbers,
            )
        )
    book = rollbook.open(tmp_path / "book")
    book.append(rows)
    source, index = BookSource(book), Index()
    load(source, index)
    documents = Reader(book).trajectories([row.eid.uid for row in rows])
    for row, document in zip(index.rows("SELECT * FROM samples ORDER BY n"), documents, strict=True):
        measured = measures.measure_trajectory(document)
        measured.pop("state")  # the ledger's
        for name, value in measured.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-6), name
            else:
                assert row[name] == value, name
    assert index.query("SELECT parts, kept FROM samples WHERE run = 1") == [
        ('{"accuracy": 1.0, "speed": 0.5}', "longest")
    ]
    index.close()
    source.close()


def test_scales_move_when_the_sample_doubles_and_then_no_more() -> None:
    scales = Scales()
    dice = np.random.default_rng(0)

    def offer(size: int, top: float) -> bool:
        values = {"entropy": dice.uniform(0, top, size), "mismatch": dice.normal(0, 0.1, size)}
        return scales.offer(derive_lenses({}, np.ones(0, bool)) | values, np.ones(size, bool))

    assert offer(100, 1.0)
    assert not offer(50, 9.0)  # 150 of the 200 that would be twice as many
    assert offer(100, 9.0)
    while not scales.full:
        offer(2048, 2.0)
    low, high = scales.ranges["entropy"]
    assert (low, round(high, 1)) == (0.0, 2.0)
    assert scales.ranges["mismatch"][0] == -scales.ranges["mismatch"][1]
    assert not offer(2 * SCALE_TOKENS, 100.0)
    assert scales.ranges["entropy"] == (low, high)
    assert len(scales.quantiles["entropy"]) == 101
