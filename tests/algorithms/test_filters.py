"""Filters of rows and groups against loops over dicts, in any order of rows; and a model of sampling until enough."""

from __future__ import annotations

import functools
import math
import pickle
import random as python_random
import statistics
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.filters import (
    FilterResult,
    Refill,
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


def agree(kept: FilterResult, rows: list[Row], reasons: dict[Any, str | None]) -> None:
    """What was kept, and each group's reason."""
    assert kept.keep.dtype == torch.bool
    assert kept.keep.tolist() == [reasons[group] is None for _, group in rows]
    assert kept.rows == [i for i, (_, group) in enumerate(rows) if reasons[group] is None]
    for reason in kept.groups:
        assert kept.groups[reason] == [group for group, why in reasons.items() if why == reason]
        assert kept.report.which(reason) == [i for i, (_, group) in enumerate(rows) if reasons[group] == reason]
    assert {why for why in reasons.values() if why} <= set(kept.groups)
    without = [i for i, (reward, group) in enumerate(rows) if reasons[group] is None and not finite(reward)]
    assert kept.report.which("kept without a finite reward") == without
    assert kept.report.metrics["groups"] == len(reasons)
    assert kept.report.metrics["groups_kept"] == sum(why is None for why in reasons.values())


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
    kept = zero_variance([r for r, _ in rows], [g for _, g in rows], threshold=threshold, std=std, singleton=singleton)
    agree(kept, rows, reasons)


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
        one = judge([r for r, _ in rows], [g for _, g in rows]).keep
        other = judge([r for r, _ in mixed], [g for _, g in mixed]).keep
        assert other.tolist() == one[order].tolist()


@pytest.mark.parametrize("value", [0.0, 0.1, 0.5, 0.7, 0.9, 1.0, -3.3, 1e-9])
@pytest.mark.parametrize("size", [2, 5, 7, 8, 64])
def test_equal_rewards_are_dropped_whatever_their_value(value: float, size: int) -> None:
    """Upstream drops a group only if it is all 0 or all 1."""
    kept = zero_variance(torch.full((size,), value), ["a"] * size)
    assert not kept.keep.any() and kept.groups["constant group"] == ["a"]


def test_a_run_of_several_rows_is_one_sample() -> None:
    rewards, groups, runs = [1.0, 1.0, 0.0, 5.0, 5.0], list("aaabb"), [0, 0, 1, 0, 0]
    kept = zero_variance(rewards, groups, runs, list("vwxyz"))
    assert kept.keep.tolist() == [True, True, True, False, False]
    assert kept.report.which("singleton group") == ["y", "z"]
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
    kept = invalid_rewards(rewards, infinite="keep")
    assert kept.keep.tolist() == [not x for x in missing] and kept.report.count("infinite reward") == 0
    above = reward_at_least(rewards, threshold, list(range(100, 100 + len(rewards))))
    assert above.keep.tolist() == [not m and r >= threshold for r, m in zip(rewards, missing, strict=True)]
    low = [100 + i for i, (r, m) in enumerate(zip(rewards, missing, strict=True)) if not m and r < threshold]
    assert above.report.which("below threshold") == low


@USUAL
@given(ragged(), st.lists(st.sampled_from(["stop", "length", "abort", None]), min_size=6, max_size=6))
def test_truncated_rows_keep_their_place_and_lose_their_tokens(data: Ragged, finish: list[str | None]) -> None:
    finish = finish[: len(data.lengths)]
    wanted = [[m and why != "length" for m in mask] for mask, why in zip(data.masks, finish, strict=True)]
    before = data.padded_mask
    padded = truncated(finish, before)
    packed = truncated(finish, data.packed_mask)
    assert padded.mask.dtype == torch.bool and data.unpadded(padded.mask) == wanted
    assert isinstance(packed.mask, Rows) and [row.tolist() for row in packed.mask] == wanted
    assert torch.equal(before, data.padded_mask)
    for found in (padded, packed):
        assert found.report.which("truncated") == [i for i, why in enumerate(finish) if why == "length"]
        assert found.report.which("unknown finish") == [i for i, why in enumerate(finish) if why is None]
        assert found.report.metrics["masked_tokens"] == sum(map(sum, data.masks)) - sum(map(sum, wanted))


def test_truncated_by_flag_and_by_status() -> None:
    mask = torch.ones(3, 2)
    for flags in ([True, False, None], torch.tensor([True, False, False]), np.array([1, 0, 0])):
        assert truncated(flags, mask).mask[:, 0].tolist() == [False, True, True]
    found = truncated(["response_truncated", "prompt_truncated", None], mask, list("xyz"))
    assert found.report.which("truncated") == ["x"]
    assert truncated(["abort", "stop", "stop"], mask, reasons=("abort",)).report.which("truncated") == [0]
    # One reason as a text is that reason, and not all that it contains.
    assert truncated(["length", "len", ""], mask, reasons="length").report.which("truncated") == [0]


# --- until there are enough -----------------------------------------------------------------------------------------


class Model:
    """Refill as a list of everything that ever happened, judged from the start each time."""

    def __init__(self, wanted: int, size: int | None) -> None:
        self.wanted, self.size = wanted, size
        self.open: dict[Any, list[tuple[float, Any]]] = {}
        self.useful: list[tuple[Any, list[Any]]] = []
        self.dropped: dict[str, list[Any]] = defaultdict(list)

    def add(self, rows: list[tuple[float, Any, Any]]) -> None:
        complete = []
        for score, group, sample in rows:
            self.open.setdefault(group, []).append((score, sample))
            if self.size is not None and len(self.open[group]) == self.size:
                complete.append((group, self.open.pop(group)))
        if self.size is None:
            complete, self.open = list(self.open.items()), {}
        for group, parts in complete:
            samples, right = [s for _, s in parts], [score > 0 for score, _ in parts]
            if len(right) == 1:
                self.dropped["singleton group"] += samples
            elif all(right) or not any(right):
                self.dropped["all correct" if all(right) else "all wrong"] += samples
            else:
                self.useful.append((group, samples))

    def take(self) -> list[tuple[Any, list[Any]]]:
        batch, self.useful = self.useful[: self.wanted], self.useful[self.wanted :]
        return batch


@USUAL
@given(
    st.lists(st.lists(st.tuples(st.sampled_from([0.0, 1.0, -1.0]), st.sampled_from("abcd")), max_size=9), max_size=12),
    st.integers(1, 3),
    st.none() | st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_refill_loses_nothing(
    rollouts: list[list[tuple[float, str]]], wanted: int, size: int | None, rounds: int, restart: bool
) -> None:
    refill, model = Refill(wanted, group_size=size, max_rounds=rounds), Model(wanted, size)
    taken: list[Any] = []
    given_in: list[Any] = []
    said: dict[str, list[Any]] = defaultdict(list)
    for number, rollout in enumerate(rollouts):
        rows = [(score, group, f"{number}.{i}") for i, (score, group) in enumerate(rollout)]
        given_in += [sample for _, _, sample in rows]
        refill.add([s for s, _, _ in rows], [g for _, g, _ in rows], [x for _, _, x in rows])
        model.add(rows)
        if restart:
            state = pickle.loads(pickle.dumps(refill.state_dict()))
            refill = Refill(wanted, group_size=size, max_rounds=rounds)
            refill.load_state_dict(state)
        assert refill.waiting == len(model.useful) and refill.missing == max(wanted - len(model.useful), 0)
        assert refill.incomplete == {group: len(parts) for group, parts in model.open.items()}
        while refill.done:
            batch = refill.take()
            assert list(zip(batch.groups, batch.samples, strict=True)) == model.take()
            assert batch.short == wanted - len(batch.groups) and (not batch.short or batch.rounds == rounds)
            taken += [sample for part in batch.samples for sample in part]
            for reason in batch.report.reasons:
                said[reason] += batch.report.which(reason)
    given_up = [sample for part in refill.abandon().values() for sample in part]
    assert refill.incomplete == {}
    while refill.waiting or not refill.done:
        if refill.done:
            batch = refill.take()
            taken += [sample for part in batch.samples for sample in part]
        else:
            refill.add([], [], [])
            continue
        for reason in batch.report.reasons:
            said[reason] += batch.report.which(reason)
    batch = refill.take()
    for reason in batch.report.reasons:
        said[reason] += batch.report.which(reason)
    dropped = [sample for reason, found in said.items() if not reason.startswith("kept") for sample in found]
    assert Counter(taken) + Counter(dropped) == Counter(given_in)
    assert said["incomplete group"] == given_up
    for reason, samples in model.dropped.items():
        assert said[reason] == samples


def test_refill_says_why_and_when_it_is_short() -> None:
    refill = Refill(2, max_rounds=2)
    with pytest.raises(ValueError, match="groups: got 0 of 2 after 0 of 2 rounds, expected another rollout first"):
        refill.take()
    refill.add([1.0, 1.0, 0.0], ["a", "a", "b"], ["a0", "a1", "b0"])
    refill.add([1.0, None, 0.0], ["c", "c", "c"], ["c0", "c1", "c2"])
    batch = refill.take()
    assert (batch.groups, batch.short, batch.rounds) == (["c"], 1, 2)
    assert batch.samples == [["c0", "c1", "c2"]]
    assert batch.report.to_metrics("refill") == {
        "refill/rows": 6,
        "refill/no_finite_reward": 0,
        "refill/all_correct": 2,
        "refill/all_wrong": 0,
        "refill/singleton_group": 1,
        "refill/kept_without_a_finite_reward": 1,
        "refill/rounds": 2.0,
    }
    assert not refill.done and refill.missing == 2


def test_refill_takes_a_group_that_comes_in_parts_and_surplus_next_time() -> None:
    refill = Refill(1, group_size=2)
    refill.add([1.0, 1.0, 0.0], ["a", "b", "c"], ["a0", "b0", "c0"])
    assert refill.incomplete == {"a": 1, "b": 1, "c": 1}
    refill.add([1.0, 0.0, 0.0, 0.0], ["c", "a", "a", "b"], ["c1", "a1", "a2", "b1"])
    assert [refill.take().samples for _ in range(3)] == [[["c0", "c1"]], [["a0", "a1"]], [["b0", "b1"]]]
    assert refill.incomplete == {"a": 1} and not refill.done


def test_refill_with_another_judge_and_part_of_a_group() -> None:
    refill = Refill(1, judge=functools.partial(zero_variance, threshold=0.1))
    refill.add([0.5, 0.55, 0.1, 0.9], list("aabb"), [1, 2, 3, 4])
    batch = refill.take()
    assert batch.samples == [[3, 4]] and batch.report.which("small deviation") == [1, 2]
    part = Refill(1, judge=lambda scores, groups: reward_at_least(scores, 0.5))
    part.add([0.0, 1.0, 0.0, 0.0], list("aabb"), [1, 2, 3, 4])
    assert part.take().samples == [[2]]


def test_numbers_of_numpy_are_sizes() -> None:
    refill = Refill(np.int64(1), group_size=np.int32(2), max_rounds=np.int64(3))
    refill.add([1, 0], ["a", "a"], ["a0", "a1"])
    assert refill.done and refill.take().samples == [["a0", "a1"]]


def test_bad_input_changes_nothing_in_refill() -> None:
    refill = Refill(3, group_size=2)
    refill.add([1.0, 0.0, 1.0], ["a", "a", "b"], ["a0", "a1", "b0"])
    before = refill.state_dict()
    for scores, groups, samples, words in [
        ([1.0], ["b"], ["b0"], "samples: got 'b0' again"),
        ([1.0], ["z"], ["a1"], "samples: got 'a1' again"),
        ([1.0, 2.0], ["z", "z"], ["z0", "z0"], "samples: got 'z0' again"),
        ([1.0], ["z", "y"], ["z0"], "groups: got 2, expected 1"),
        ([1.0], ["z"], [], "samples: got 0, expected 1"),
        ([1.0], [["z"]], ["z0"], "groups: expected hashable ids"),
        (["one"], ["z"], ["z0"], "scores: expected numbers or None"),
    ]:
        with pytest.raises(ValueError) as raised:
            refill.add(scores, groups, samples)
        assert words in str(raised.value)
        assert refill.state_dict() == before

    def broken(scores: Any, groups: Any) -> FilterResult:
        raise RuntimeError("no judge today")

    refill.judge = broken
    with pytest.raises(RuntimeError, match="no judge today"):
        refill.add([1.0], ["b"], ["b1"])
    assert refill.state_dict() == before
    with pytest.raises(ValueError, match="state: got rounds, expected rounds, pending, ready, judged, reasons"):
        refill.load_state_dict({"rounds": 1})
    with pytest.raises(ValueError, match="state: group 'b' has 1 samples, expected fewer than group_size"):
        Refill(3, group_size=1).load_state_dict(before)
    with pytest.raises(ValueError, match="state: group 'b' has 1 samples, expected fewer than group_size"):
        Refill(3).load_state_dict(before)


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
        (lambda: Refill(True), "groups: got True, expected an integer >= 1"),
        (lambda: Refill(0), "groups: got 0, expected an integer >= 1"),
        (lambda: Refill(1, group_size=0), "group_size: got 0, expected an integer >= 1"),
        (lambda: Refill(1, max_rounds=2.5), "max_rounds: got 2.5, expected an integer >= 1"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)
