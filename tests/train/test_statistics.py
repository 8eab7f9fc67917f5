"""Statistics of outcomes: against closed forms and against every choice there is, and intervals that hold the truth as
often as they say, over prompts that differ."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.train.evaluation import (
    Interval,
    _student_probability,
    avg_at_k,
    avg_at_k_interval,
    maj_at_k,
    mean_interval,
    paired_difference,
    pass_at_k,
    powers_of_two,
    student_quantile,
)

OUTCOMES = st.integers(1, 5).flatmap(
    lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1, max_size=8)
)
VOTES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=7)


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_student_is_that_of_the_tables() -> None:
    """Two-sided, from printed tables; and where the expansion takes over from the sum."""
    quantiles = {
        (0.95, 1): 12.706,
        (0.95, 2): 4.303,
        (0.95, 4): 2.776,
        (0.99, 5): 4.032,
        (0.95, 30): 2.042,
        (0.9, 120): 1.658,
    }
    for (confidence, freedom), t in quantiles.items():
        assert student_quantile(confidence, freedom) == pytest.approx(t, abs=6e-4)
    for confidence in (0.5, 0.95, 0.999):
        t = student_quantile(confidence, 301)
        assert _student_probability(math.atan(t / math.sqrt(301)), 301) == pytest.approx(confidence, abs=1e-9)


def test_with_one_sample_a_prompt_the_interval_is_wilsons() -> None:
    """p = 30 / 100, with Student's quantile for 99; of independent samples, nothing is lost by clustering."""
    t2 = student_quantile(0.95, 99) ** 2
    interval = avg_at_k_interval([[True]] * 30 + [[False]] * 70)
    n = 100.0  # one sample a prompt: as many as there are
    middle, reach = (0.3 + t2 / (2 * n)) / (1 + t2 / n), math.sqrt(t2 * (0.21 / n + t2 / (4 * n * n))) / (1 + t2 / n)
    assert interval == pytest.approx(Interval(0.3, middle - reach, middle + reach))


def test_samples_that_are_all_alike_are_as_good_as_one() -> None:
    single = avg_at_k_interval([[True]] * 30 + [[False]] * 70)
    eight = avg_at_k_interval([[True] * 8] * 30 + [[False] * 8] * 70)
    assert eight == pytest.approx(single)
    mixed = avg_at_k_interval([[i < 3 for i in range(10)]] * 100)  # every prompt alike: all samples count
    assert mixed.high - mixed.low < 0.4 * (single.high - single.low)


@pytest.mark.parametrize("k", [1, 8])
def test_nothing_but_success_is_not_certainty(k: int) -> None:
    best, worst = avg_at_k_interval([[True] * k] * 200), avg_at_k_interval([[False] * k] * 200)
    assert best.value == best.high == 1.0 and 0.97 < best.low < 0.99
    assert worst == pytest.approx(Interval(0.0, 0.0, 1 - best.low))
    nearly = avg_at_k_interval([[True] * k] * 199 + [[False] + [True] * (k - 1)])
    # A lone failure tells that samples of a prompt are not all alike, and no more than that.
    assert nearly.low < best.low + (0 if k == 1 else 0.006)
    assert avg_at_k_interval([[True] * k] * 199 + [[False] * k]).low < best.low
    assert avg_at_k_interval([[True] * k]) == Interval(1.0, 0.0, 1.0)


def test_a_mean_has_students_interval() -> None:
    assert mean_interval([1.0, 2.0, math.nan, 3.0]) == pytest.approx(
        Interval(2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4
    )
    assert mean_interval([2.0]) == Interval(2.0, -math.inf, math.inf)
    assert all(map(math.isnan, mean_interval([math.nan])))


@given(OUTCOMES, st.data())
def test_pass_at_k_is_the_mean_over_all_choices(outcomes: list[list[bool]], data: Any) -> None:
    k = data.draw(st.integers(1, len(outcomes[0])))
    slow = np.mean(
        [np.mean([any(chosen) for chosen in combinations(prompt_outcomes, k)]) for prompt_outcomes in outcomes]
    )
    assert pass_at_k(outcomes, k) == pytest.approx(float(slow))
    assert pass_at_k(outcomes, 1) == pytest.approx(avg_at_k(outcomes))


@given(VOTES, st.data())
def test_maj_at_k_is_the_mean_over_all_choices_and_ties(votes: list[tuple[str | None, bool]], data: Any) -> None:
    k = data.draw(st.integers(1, len(votes)))
    right = {name: np.mean([ok for other, ok in votes if other == name]) for name, _ in votes if name is not None}
    chances = []
    for chosen in combinations([name for name, _ in votes], k):
        counts = {name: chosen.count(name) for name in chosen if name is not None}
        first = [name for name, count in counts.items() if count == max(counts.values())]
        chances.append(np.mean([right[name] for name in first]) if first else 0.0)
    answers, outcomes = [[name for name, _ in votes]], [[ok for _, ok in votes]]
    assert maj_at_k(answers, outcomes, k) == pytest.approx(float(np.mean(chances)))
    if k == len(votes):
        assert maj_at_k(answers, outcomes) == pytest.approx(float(np.mean(chances)))


def test_a_majority_of_many_samples_is_quick_and_rises() -> None:
    """Right with 0.4 of the samples, three wrong answers with 0.2 each: the more vote, the surer it is."""
    answers = ["right"] * 26 + [f"wrong {i}" for i in range(3) for _ in range(13)]
    rises = [maj_at_k([answers], [[answer == "right" for answer in answers]], k) for k in (1, 4, 16, 64)]
    assert rises == sorted(rises) and rises[0] == pytest.approx(0.4) and rises[2] > 0.7 and rises[3] == 1.0


def test_powers_of_two_end_in_k() -> None:
    assert [powers_of_two(k) for k in (1, 2, 5, 16)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8, 16]]


# --- how often the truth is inside ------------------------------------------------------------------------------------

PROMPTS = {
    "even": (1.0, 1.0),
    "all or nothing": (0.1, 0.1),
    "hard": (0.05, 1.5),
    "nearly solved": (2.0, 0.05),
    "one coin": (40.0, 40.0),
    "settled": (0.01, 0.01),
}
"""Beta distributions that prompts' chances of success are drawn from."""


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize(("m", "k"), [(20, 8), (100, 1), (100, 8)])
def test_the_interval_holds_the_truth_as_often_as_it_says(kind: str, m: int, k: int) -> None:
    """400 evaluations each: at 95 % a true coverage gives below 0.92 once in 500; an interval that takes all samples
    for independent has 0.6 to 0.8 where samples of a prompt are alike."""
    a, b = PROMPTS[kind]
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(400):
        chances = rng.beta(a, b, m)
        interval = avg_at_k_interval((rng.random((m, k)) < chances[:, None]).tolist())
        inside += interval.low <= a / (a + b) <= interval.high
    assert inside / 400 >= 0.92


def test_taking_all_samples_for_independent_would_not_hold_it() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(400):
        chances = rng.beta(0.1, 0.1, 100)
        flat = (rng.random((100, 8)) < chances[:, None]).reshape(-1, 1)
        interval = avg_at_k_interval(flat.tolist())
        inside += interval.low <= 0.5 <= interval.high
    assert inside / 400 < 0.7


@pytest.mark.parametrize("rise", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(("kind", "k"), [("even", 2), ("all or nothing", 2), ("nearly solved", 2), ("settled", 1)])
def test_the_paired_interval_holds_the_truth_too(kind: str, k: int, rise: float) -> None:
    """Every prompt's chance of failure falls by the share `rise`; where nearly all prompts come out as before, an
    interval that trusts their correlation holds a rise of 0.01 in 3 of 4 evaluations."""
    a, b = PROMPTS[kind]
    rng = np.random.default_rng(3)
    truth = rise * b / (a + b)
    inside = 0
    for _ in range(300):
        before = rng.beta(a, b, 80)
        after = before + rise * (1 - before)
        drawn = [(rng.random((80, k)) < chances[:, None]).tolist() for chances in (before, after)]
        interval = paired_difference(drawn[0], drawn[1])
        inside += interval.low <= truth <= interval.high
    assert inside / 300 >= 0.92


def test_pairing_is_worth_it_where_prompts_differ_and_says_little_of_equals() -> None:
    rng = np.random.default_rng(0)
    chances = rng.beta(0.1, 0.1, 200)
    before, after = ((rng.random((200, 4)) < np.clip(chances + d, 0, 1)[:, None]).tolist() for d in (0.0, 0.05))
    together = paired_difference(before, after)
    strangers = paired_difference(before, rng.permutation(np.array(after)).tolist())
    assert together.high - together.low < 0.5 * (strangers.high - strangers.low)
    same = paired_difference(before, before)
    assert same.value == 0 and -0.05 < same.low < 0 < same.high < 0.05
    risen = paired_difference([[False]] * 200, [[True]] * 200)
    assert risen.value == risen.high == 1.0 and 0.96 < risen.low < 0.99


@given(OUTCOMES, st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_intervals_hold_their_value_and_stay_in_range(outcomes: list[list[bool]], confidence: float) -> None:
    interval = avg_at_k_interval(outcomes, confidence)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    rise = paired_difference(outcomes, outcomes[::-1], confidence)
    assert -1 <= rise.low <= rise.value <= rise.high <= 1
    assert interval.low < interval.high


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: avg_at_k_interval([]), "outcomes: got no prompt"),
        (lambda: avg_at_k([[True], []]), r"outcomes\[1\]: got no sample"),
        (lambda: avg_at_k_interval([[True]], 95), "confidence: got 95"),
        (lambda: pass_at_k([[True, True], [True]], 2), "k: got 2, expected at most 1"),
        (lambda: pass_at_k([[True]], 0), "k: got 0"),
        (lambda: maj_at_k([["a"]], [[True, False]]), r"answers\[0\]: got 1 answers, expected 2"),
        (lambda: maj_at_k([], [[True]]), "answers: got 0 prompts"),
        (lambda: maj_at_k([["a"]], [[True]], 2), "k: got 2"),
        (lambda: paired_difference([[True]], [[True]] * 2), "after: got 2 prompts, expected the 1 of before"),
    ],
)
def test_what_cannot_be_counted_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
