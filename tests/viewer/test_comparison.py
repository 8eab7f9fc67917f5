"""One part of a run against another: what moved is found, and what did not is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import rollbook
from rollbook import EID, Experience
from rollbook.inspect.comparison import Side, compare, count_phrases, parse_steps
from rollbook.inspect.index import Index
from rollbook.inspect.sources import load, open_source
from rollbook.inspect.statistics import edges, group_means, group_test, histograms, kolmogorov, quantiles

NAMES = ["one", "two", "three", "four", "five", "six"]
WORDS = ["so", "we", "count", "again", "let", "me", "verify", "this", "the", "answer", "is", ".", "what", "?", *NAMES]


def tokenizer() -> Tokenizer:
    """A word a token."""
    built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return built


def record(step: int, task: int, run: int, text: str, reward: float, **more: Any) -> Experience:
    """A sample that says `text`."""
    prompt = tokenizer().encode(f"what {NAMES[task]} ?").ids
    answer = tokenizer().encode(text).ids
    return Experience(
        eid=EID(batch=step, task=task, run=run, suffix="s"),
        tokens=[*prompt, *answer],
        prompt_length=len(prompt),
        entropy=[0.5 if step < 5 else 0.1] * len(answer),
        reward=reward,
        metrics={"accuracy": reward},
        **more,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Index]]:
    """Ten steps: after the fifth it verifies, task 0 is solved, task 1 is broken, and nothing else changes."""
    path = tmp_path_factory.mktemp("comparing") / "run"
    with rollbook.open(path, tokenizer=tokenizer()) as book:
        for step in range(10):
            late = step >= 5
            rows = []
            for task in range(4):
                good = {0: late, 1: not late, 2: True, 3: False}[task]
                for i in range(6):
                    texts = (
                        "let me verify this . the answer is one ."
                        if late and i < 5
                        else "so we count again . the answer is one ."
                    )
                    rows.append(record(step, task, i, texts, float(good) if i else 0.5))
            book.append(rows)
            book.append([record(step, 5, 0, "six six six", 0.0)], evaluation=True)
    source, index = open_source(str(path)), Index()
    load(source, index)
    yield source, index
    index.close()
    source.close()


def test_what_moved(run: tuple[Any, Index]) -> None:
    comparison = compare(Side(*run, 0, 4), Side(*run, 5, 9))
    assert comparison["a"] == {"name": "run", "n": 120, "groups": 20, "steps": [0, 4]}
    assert comparison["metrics"]["entropy"]["ks"] == 1.0 and comparison["metrics"]["entropy"]["p"] == 1 / 2000
    assert comparison["metrics"]["entropy"]["shift"] == pytest.approx(-0.4)
    reward = comparison["metrics"]["reward"]
    assert reward["p"] == 1.0 and reward["shift"] == 0 and reward["shift_low"] < 0 < reward["shift_high"]
    assert reward["a"]["low"] < reward["a"]["mean"] < reward["a"]["high"]
    assert comparison["metrics"]["kl"] is None  # It was not recorded; that is no zero.
    assert sum(comparison["metrics"]["reward"]["counts_a"]) == 120
    assert comparison["parts"] == {"accuracy": {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}}
    assert comparison["shares"]["loops"] == {"a": 0.0, "b": 0.0}


def test_prompts_newly_solved_and_broken(run: tuple[Any, Index]) -> None:
    prompts = compare(Side(*run, 0, 4), Side(*run, 5, 9), texts=0)["prompts"]
    assert prompts["solved_from"] == 0.8 and prompts["common"] == 4 and not prompts["only_a"]
    (solved,), (broken,) = prompts["newly_solved"], prompts["newly_broken"]
    assert "one" in solved["opening"] and "two" in broken["opening"]
    assert solved["gid_a"].endswith("/0") and solved["gid_b"].endswith("/0") and solved["a"] < solved["b"]
    assert (solved["solved_a"], solved["solved_b"], broken["solved_b"]) == ("none", "some", "none")
    assert prompts["solved_count"] == prompts["broken_count"] == 1
    assert prompts["groups"]["a"] == {"none": 10, "some": 10, "all": 0}
    lax = compare(Side(*run, 0, 4), Side(*run, 5, 9), texts=0, solved=0.5)["prompts"]
    assert lax["groups"]["b"] == {"none": 0, "some": 10, "all": 10}


def test_halves_of_one_step_differ_as_often_as_chance_has_it() -> None:
    dice = np.random.default_rng(0)
    groups = np.repeat(np.arange(64), 8)
    sure = {"groups": 0, "samples": 0}
    for _ in range(100):
        values = (dice.normal(size=64)[groups] + 0.3 * dice.normal(size=512)).round(1)
        half = np.isin(groups, dice.permutation(64)[:32])
        sides = [(values[side], groups[side]) for side in (half, ~half)]
        sure["groups"] += group_test(*(group_means(*side) for side in sides))[1] < 0.05
        sure["samples"] += kolmogorov(sides[0][0], sides[1][0])[1] < 0.05
    assert 1 <= sure["groups"] <= 11 and sure["samples"] > 30  # 5 of 100 are expected


def test_special_tokens_are_no_phrases(tmp_path: Path) -> None:
    words = tokenizer()
    words.add_special_tokens(["<|im_end|>"])
    end = words.token_to_id("<|im_end|>")
    with rollbook.open(tmp_path / "run", tokenizer=words) as book:
        for step, text in enumerate(("so we count .", "let me verify .")):
            ids = [*words.encode(text).ids, *[end] * step]
            book.append(
                [
                    Experience(eid=EID(batch=step, task=i, run=0), tokens=[0, *ids], prompt_length=1, reward=1.0)
                    for i in range(40)
                ]
            )
    source, index = open_source(str(tmp_path / "run")), Index()
    load(source, index)
    phrases = {entry["phrase"] for entry in compare(Side(source, index, 0, 0), Side(source, index, 1, 1))["phrases"]}
    index.close()
    source.close()
    assert phrases == {"so we count", "let me verify"}


def test_phrases_that_came_and_went(run: tuple[Any, Index]) -> None:
    comparison = compare(Side(*run, 0, 4), Side(*run, 5, 9))
    phrases = {entry["phrase"]: entry for entry in comparison["phrases"]}
    assert comparison["texts"] == {"a": 120, "b": 120} and set(phrases) == {"let me verify this", "so we count again"}
    came = phrases["let me verify this"]
    assert (
        came["share_a"] == 0
        and came["share_b"] == pytest.approx(5 / 6)
        and came["z"] > 3 > -3 > phrases["so we count again"]["z"]
    )
    assert came["uids"] and all(int(uid.split("/")[0]) >= 5 for uid in came["uids"])
    assert came["reward"] == pytest.approx(0, abs=0.1)  # It is said as often where it is right as where it is wrong.
    again = compare(Side(*run, 0, 4), Side(*run, 0, 4))
    assert not again["phrases"] and again["metrics"]["entropy"]["p"] == 1.0


def test_an_empty_side(run: tuple[Any, Index]) -> None:
    comparison = compare(Side(*run, 50, 60), Side(*run, 0, 4))
    assert comparison["a"]["n"] == 0 and comparison["a"]["steps"] is None
    assert (
        comparison["metrics"]["reward"]["ks"] is None
        and comparison["shares"]["loops"]["a"] is None
        and not comparison["phrases"]
    )


def test_two_runs(run: tuple[Any, Index], tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "other", tokenizer=tokenizer()) as book:
        book.append([record(0, task, i, "the answer is two .", 1.0) for task in range(4) for i in range(6)])
    source, index = open_source(str(tmp_path / "other")), Index()
    load(source, index)
    comparison = compare(Side(*run, name="first"), Side(source, index))
    assert (
        comparison["a"]["name"] == "first"
        and comparison["b"]["name"] == "other"
        and comparison["prompts"]["solved_count"] == 4
    )
    index.close()
    source.close()


@pytest.mark.parametrize(
    ("text", "expected"), [("7", (7, 7)), (" 3-9 ", (3, 9)), ("3..9", (3, 9)), ("-2--1", (-2, -1))]
)
def test_spans(text: str, expected: tuple[int, int]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-", "9-3", "1-2-3", "1" * 30, "1.5"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match="steps: got"):
        parse_steps(text)


# --- numbers --------------------------------------------------------------------------------------------------------

floats = st.lists(st.floats(width=32), max_size=60).map(lambda numbers: np.array(numbers, dtype=np.float64))


@given(floats, floats)
def test_histograms_count_everything_finite(left: Any, right: Any) -> None:
    counted = histograms(left, right)
    for values, counts in ((left, counted["counts_a"]), (right, counted["counts_b"])):
        assert sum(counts) == int(np.isfinite(values).sum())
    at = edges(left, right)
    assert all(math.isfinite(edge) for edge in at) and at == sorted(set(at))


@given(floats)
def test_quantiles_are_in_order(values: Any) -> None:
    by_name = quantiles(values)
    if by_name is None:
        assert not np.isfinite(values).any()
    else:
        order = [by_name[name] for name in ("p5", "p25", "p50", "p75", "p95")]
        assert all(a <= b + 1e-6 * abs(b) for a, b in pairwise(order))


@given(st.integers(0, 1000))
def test_distance_is_as_defined(seed: int) -> None:
    dice = np.random.default_rng(seed)
    left, right = dice.normal(size=dice.integers(1, 60)), dice.normal(size=dice.integers(1, 60))
    distance, chance = kolmogorov(left, right)
    at = np.concatenate([left, right])
    slow = max(abs((left <= x).mean() - (right <= x).mean()) for x in at)
    assert distance == pytest.approx(slow) and 0 <= chance <= 1
    close, far = kolmogorov(left, right), kolmogorov(left, right + 100)
    assert far[0] == 1.0 and far[1] <= close[1] + 1e-12  # The farther apart, the less likely by chance.


@given(st.text(max_size=200))
def test_phrases_are_words_of_the_text(text: str) -> None:
    for phrase, count in count_phrases(text).items():
        assert 1 <= len(phrase.split(" ")) <= 4 and count > 0
        assert all(word in text.casefold() for word in phrase.split(" "))
