"""Filters of rows and groups against loops over dicts, in any order of rows; and a model of sampling until enough."""

from __future__ import annotations

import math
import random as python_random
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.filters import (
    FilterResult,
    dynamic_sampling,
    invalid_rewards,
    reward_at_least,
    truncated,
    zero_variance,
)
from rollbook.core.rows import Rows
from tests.algorithms.test_corrections import Ragged, ragged

USUAL = settings(deadline=None, max_examples=80)
REWARD = st.sampled_from([None, math.nan, math.inf, -math.inf, 0.0, 1.0, 0.1, 0.7, -1.0, 0.5])
ROWS = st.lists(st.tuples(REWARD, st.sampled_from(["a", "b", ("c", 1), 4])), max_size=16)
Row = tuple[float | None, Any]


def finite(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def by_group(rows: list[Row]) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = {}
    for reward, group in rows:
        groups.setdefault(group, [])
        if finite(reward):
            groups[group].append(reward)  # type: ignore[arg-type]
    return groups


def agree(filtered: FilterResult, rows: list[Row], reasons: dict[Any, str | None]) -> None:
    """What was kept, and each group's reason."""
    assert filtered.keep.dtype == torch.bool
    assert filtered.keep.tolist() == [reasons[group] is None for _, group in rows]
    assert filtered.rows == [i for i, (_, group) in enumerate(rows) if reasons[group] is None]
    for reason in filtered.groups:
        assert filtered.groups[reason] == [group for group, cause in reasons.items() if cause == reason]
        assert filtered.report.which(reason) == [i for i, (_, group) in enumerate(rows) if reasons[group] == reason]
    assert {cause for cause in reasons.values() if cause} <= set(filtered.groups)
    without = [i for i, (reward, group) in enumerate(rows) if reasons[group] is None and not finite(reward)]
    assert filtered.report.which("kept without a finite reward") == without
    assert filtered.report.metrics["groups"] == len(reasons)
    assert filtered.report.metrics["groups_kept"] == sum(cause is None for cause in reasons.values())


@USUAL
@given(
    ROWS, st.sampled_from([0.0, 0.2, 0.5]), st.sampled_from(["population", "sample"]), st.sampled_from(["drop", "keep"])
)
def test_zero_variance_is_the_loop(rows: list[Row], threshold: float, std: str, singleton: str) -> None:
    reasons: dict[Any, str | None] = {}
    for group, values in by_group(rows).items():
        if len(values) < 2:
            lone = "singleton group" if singleton == "drop" else None
            reasons[group] = lone if values else "no finite reward"
        elif len(set(values)) == 1:
            reasons[group] = "constant group"
        else:
            spread = statistics.pstdev(values) if std == "population" else statistics.stdev(values)
            reasons[group] = "small deviation" if spread <= threshold + 1e-12 else None
            if abs(spread - threshold) < 1e-9:
                return  # on the edge rounding decides
    filtered = zero_variance(
        [r for r, _ in rows], [g for _, g in rows], threshold=threshold, std=std, singleton=singleton
    )
    agree(filtered, rows, reasons)


@USUAL
@given(ROWS, st.sampled_from([0.0, 0.5, -2.0]), st.sampled_from(["drop", "keep"]))
def test_dynamic_sampling_is_the_loop(rows: list[Row], correct: float, singleton: str) -> None:
    reasons: dict[Any, str | None] = {}
    for group, values in by_group(rows).items():
        right = [value > correct for value in values]
        if len(right) < 2:
            lone = "singleton group" if singleton == "drop" else None
            reasons[group] = lone if right else "no finite reward"
        else:
            reasons[group] = "all correct" if all(right) else None if any(right) else "all wrong"
    scores, groups = [r for r, _ in rows], [g for _, g in rows]
    agree(dynamic_sampling(scores, groups, correct=correct, singleton=singleton), rows, reasons)


@USUAL
@given(ROWS, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_nothing_is_reordered(rows: list[Row], random: python_random.Random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = [rows[i] for i in order]
    for judge in (zero_variance, dynamic_sampling):
        in_order = judge([r for r, _ in rows], [g for _, g in rows]).keep
        other = judge([r for r, _ in mixed], [g for _, g in mixed]).keep
        assert other.tolist() == in_order[order].tolist()


@pytest.mark.parametrize("value", [0.0, 0.1, 0.5, 0.7, 0.9, 1.0, -3.3, 1e-9])
@pytest.mark.parametrize("size", [2, 5, 7, 8, 64])
def test_equal_rewards_are_dropped_whatever_their_value(value: float, size: int) -> None:
    """Upstream drops a group only if it is all 0 or all 1."""
    filtered = zero_variance(torch.full((size,), value), ["a"] * size)
    assert not filtered.keep.any() and filtered.groups["constant group"] == ["a"]


def test_a_run_of_several_rows_is_one_sample() -> None:
    rewards, groups, runs = [1.0, 1.0, 0.0, 5.0, 5.0], list("aaabb"), [0, 0, 1, 0, 0]
    filtered = zero_variance(rewards, groups, runs, list("vwxyz"))
    assert filtered.keep.tolist() == [True, True, True, False, False]
    assert filtered.report.which("singleton group") == ["y", "z"]
    solved = dynamic_sampling([1.0, 0.0, 1.0, 1.0], ["a"] * 4, [0, 0, 1, 1])
    assert solved.groups["all correct"] == ["a"]


def test_two_reports_in_one_log_keep_their_names() -> None:
    """Upstream's operators write the same key, and the last one wins."""
    first, second = reward_at_least([-1.0, 1.0, 1.0]), zero_variance([1.0, 1.0], ["a", "a"])
    log = first.report.to_metrics("reward") | second.report.to_metrics("variance")
    assert log["reward/below_threshold"] == 1 and log["variance/constant_group"] == 2


@USUAL
@given(st.lists(REWARD, max_size=8), st.sampled_from([0.0, 0.5, -math.inf]))
def test_filters_of_rows_are_the_loop(rewards: list[float | None], threshold: float) -> None:
    missing = [r is None or math.isnan(r) for r in rewards]
    infinite = [r is not None and math.isinf(r) for r in rewards]
    dropped = invalid_rewards(rewards)
    assert dropped.keep.tolist() == [finite(r) for r in rewards]
    assert dropped.report.which("missing reward") == [i for i, x in enumerate(missing) if x]
    assert dropped.report.which("infinite reward") == [i for i, x in enumerate(infinite) if x]
    filtered = invalid_rewards(rewards, infinite="keep")
    assert filtered.keep.tolist() == [not x for x in missing] and filtered.report.count("infinite reward") == 0
    above = reward_at_least(rewards, threshold, list(range(100, 100 + len(rewards))))
    assert above.keep.tolist() == [not m and r >= threshold for r, m in zip(rewards, missing, strict=True)]
    low = [100 + i for i, (r, m) in enumerate(zip(rewards, missing, strict=True)) if not m and r < threshold]
    assert above.report.which("below threshold") == low


@USUAL
@given(ragged(), st.lists(st.sampled_from(["stop", "length", "abort", None]), min_size=6, max_size=6))
def test_truncated_rows_keep_their_place_and_lose_their_tokens(data: Ragged, finish: list[str | None]) -> None:
    finish = finish[: len(data.lengths)]
    expected = [[m and reason != "length" for m in mask] for mask, reason in zip(data.masks, finish, strict=True)]
    before = data.padded_mask
    padded = truncated(finish, before)
    packed = truncated(finish, data.packed_mask)
    assert padded.mask.dtype == torch.bool and data.unpadded(padded.mask) == expected
    assert isinstance(packed.mask, Rows) and [row.tolist() for row in packed.mask] == expected
    assert torch.equal(before, data.padded_mask)
    for filtered in (padded, packed):
        assert filtered.report.which("truncated") == [i for i, reason in enumerate(finish) if reason == "length"]
        assert filtered.report.which("unknown finish") == [i for i, reason in enumerate(finish) if reason is None]
        assert filtered.report.metrics["masked_tokens"] == sum(map(sum, data.masks)) - sum(map(sum, expected))


def test_truncated_by_flag_and_by_status() -> None:
    mask = torch.ones(3, 2)
    for flags in ([True, False, None], torch.tensor([True, False, False]), np.array([1, 0, 0])):
        assert truncated(flags, mask).mask[:, 0].tolist() == [False, True, True]
    filtered = truncated(["response_truncated", "prompt_truncated", None], mask, list("xyz"))
    assert filtered.report.which("truncated") == ["x"]
    assert truncated(["abort", "stop", "stop"], mask, reasons=("abort",)).report.which("truncated") == [0]
    # One reason as a text is that reason, and not all that it contains.
    assert truncated(["length", "len", ""], mask, reasons="length").report.which("truncated") == [0]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zero_variance([1.0], ["a"], threshold=-1.0), "threshold: got -1.0, expected a number >= 0"),
        (
            lambda: zero_variance([1.0], ["a"], std="robust"),
            "std: got 'robust', expected one of 'sample', 'population'",
        ),
        (lambda: zero_variance([1.0], ["a"], singleton="raw"), "singleton: got 'raw', expected one of 'drop', 'keep'"),
        (lambda: zero_variance([1.0], ["a", "b"]), "groups: got 2, expected 1, one for each row"),
        (lambda: zero_variance([1.0], [["a"]]), "groups: expected hashable ids"),
        (lambda: zero_variance([1.0], ["a"], ids=[1, 2]), "ids: got 2, expected 1, one for each row"),
        (lambda: dynamic_sampling([1.0], ["a"], correct=math.nan), "correct: got nan, expected a number"),
        (lambda: dynamic_sampling([1.0], ["a"], singleton="x"), "singleton: got 'x', expected one of 'drop', 'keep'"),
        (lambda: invalid_rewards([1.0], infinite="clip"), "infinite: got 'clip', expected one of 'drop', 'keep'"),
        (lambda: invalid_rewards([1.0], [1, 2]), "ids: got 2, expected 1, one for each row"),
        (lambda: reward_at_least([1.0], math.nan), "threshold: got nan, expected a number"),
        (lambda: truncated(["stop"], torch.ones(2, 2)), "finish: got 1, expected 2, one for each row"),
        (lambda: truncated([0.5], torch.ones(1, 2)), "finish: got 0.5 at row 0, expected a finish reason, true, false"),
        (lambda: truncated(None, torch.ones(2, 2)), "finish: got None, expected 2 ids, one for each row"),
        (lambda: truncated("stop", torch.ones(4, 2)), "finish: got 'stop', expected 4 ids, one for each row"),
        (lambda: zero_variance([1.0], None), "groups: got None"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)
