"""Reward shaping against loops in plain Python; what is missing stays missing; what upstream got wrong is right."""

from __future__ import annotations

import json
import math
import random as python_random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.advantages import grpo
from rollbook.algorithms.corrections import importance_weights
from rollbook.algorithms.filters import zero_variance
from rollbook.algorithms.shaping import (
    RunningNorm,
    clip_advantages,
    clip_filter_like_weight_func,
    clip_filter_weights,
    clip_rewards,
    difference,
    length_bonus,
    length_penalty,
    overlong_penalty,
    pass_rates,
    rank_penalty,
    repetition_penalty,
    shape_by,
    shape_length,
    shape_overlong,
    shape_rank,
    shape_repetition,
)
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.rows import Rows
from tests.algorithms.test_corrections import Ragged, ragged

USUAL = settings(deadline=None, max_examples=60)
REWARD = st.none() | st.just(math.nan) | st.sampled_from([0.0, 1.0, 0.1, -1.0]) | st.floats(-100, 100)
REWARDS = st.lists(REWARD, max_size=12)


def missing(reward: float | None) -> bool:
    return reward is None or math.isnan(reward)


def same_shape(actual: torch.Tensor, expected: list[float | None], tolerance: float = 1e-5) -> None:
    assert actual.dtype == torch.float32 and actual.shape == (len(expected),)
    for number, reference in zip(actual.tolist(), expected, strict=True):
        same = (
            math.isnan(number)
            if missing(reference)
            else math.isclose(number, reference, rel_tol=tolerance, abs_tol=1e-6)
        )
        assert same, (actual, expected)


# --- length ---------------------------------------------------------------------------------------------------------


@USUAL
@given(
    st.lists(st.tuples(REWARD, st.integers(0, 60)), max_size=10),
    st.integers(1, 50),
    st.integers(1, 50),
    st.floats(0, 3),
    st.booleans(),
)
def test_overlong_is_the_formula(
    rows: list[tuple[float | None, int]], longest: int, buffer: int, factor: float, bounded: bool
) -> None:
    longest, buffer = max(longest, buffer), min(longest, buffer)
    rewards, lengths = [r for r, _ in rows], [n for _, n in rows]
    options: dict[str, Any] = {"max_length": longest, "buffer": buffer, "factor": factor, "bounded": bounded}
    penalties = []
    for length in lengths:
        penalty = min(0.0, -(length - (longest - buffer)) / buffer * factor)
        penalties.append(max(penalty, -factor) if bounded else penalty)
    same_shape(overlong_penalty(lengths, **options), list(penalties))
    shaped = shape_overlong(rewards, lengths, **options)
    same_shape(shaped.rewards, [None if missing(r) else r + p for r, p in zip(rewards, penalties, strict=True)])
    assert shaped.report.which("missing reward") == [i for i, r in enumerate(rewards) if missing(r)]
    if factor > 1e-6:
        assert shaped.report.which("overlong") == [i for i, n in enumerate(lengths) if n > longest - buffer]


def test_overlong_has_no_minus_zero_and_keeps_float64_and_its_argument() -> None:
    assert math.copysign(1, overlong_penalty([6], max_length=10, buffer=4).item()) == 1
    rewards = torch.tensor([1.0, 1.0], dtype=torch.float64)
    shaped = shape_overlong(rewards, torch.tensor([10, 3]), ["x", "y"], max_length=10, buffer=4)
    assert shaped.rewards.dtype == torch.float64 and rewards.tolist() == [1.0, 1.0]
    assert shaped.report.which("overlong") == ["x"]


@USUAL
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 200), st.floats(0, 0.1), st.floats(0, 2))
def test_length_penalty_is_the_formula(lengths: list[int], target: int, per_token: float, max_penalty: float) -> None:
    penalties = length_penalty(lengths, target=target, per_token=per_token, max_penalty=max_penalty)
    same_shape(penalties, [-min(max(0, n - target) * per_token, max_penalty) for n in lengths])
    assert all(math.copysign(1, x) > 0 for x, n in zip(penalties.tolist(), lengths, strict=True) if n <= target)


@USUAL
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([True, False, None, 1.0, 0.0, math.nan]), st.sampled_from("abc")),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_length_bonus_is_the_formula(rows: list[tuple[int, Any, str]], random: python_random.Random) -> None:
    expected: list[float | None] = []
    for length, correct, group in rows:
        sizes = [n for n, c, g in rows if g == group and not missing(c)]
        if missing(correct) or min(sizes) == max(sizes):
            expected.append(0.0)
            continue
        bonus = 0.5 - (length - min(sizes)) / (max(sizes) - min(sizes))
        expected.append(bonus if correct else min(0.0, bonus))
    same_shape(length_bonus([n for n, _, _ in rows], [c for _, c, _ in rows], [g for _, _, g in rows]), expected)
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = [rows[i] for i in order]
    bonuses = length_bonus([n for n, _, _ in mixed], [c for _, c, _ in mixed], [g for _, _, g in mixed])
    same_shape(bonuses, [expected[i] for i in order])


@USUAL
@given(st.lists(st.tuples(REWARD, st.integers(0, 40), st.lists(st.integers(0, 2), max_size=8)), max_size=8))
def test_penalties_say_how_many_which_and_why(rows: list[tuple[float | None, int, list[int]]]) -> None:
    rewards, lengths, tokens = ([row[part] for row in rows] for part in (0, 1, 2))
    ids = [f"row{i}" for i in range(len(rows))]
    long = shape_length(rewards, lengths, ids, target=20, per_token=0.3, max_penalty=2.0)
    same_shape(long.rewards, [None if missing(r) else r - min(max(n - 20, 0) * 0.3, 2.0) for r, n, _ in rows])
    assert long.report.which("over target") == [name for name, n in zip(ids, lengths, strict=True) if n > 20]
    again = shape_repetition(rewards, tokens, None, ids, n=2, max_penalty=3.0)
    shares = naive_repetition(tokens, [[True] * len(row) for row in tokens], 2, 3.0)
    same_shape(again.rewards, [None if missing(r) else r + lost for r, lost in zip(rewards, shares, strict=True)])
    assert again.report.which("repetition") == [name for name, lost in zip(ids, shares, strict=True) if lost]
    groups, likely = [n % 2 for n in lengths], [-float(n % 5) for n in lengths]
    unlikely = shape_rank(rewards, groups, likely, None, ids, penalty=0.5)
    lost = rank_penalty(
        torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64), groups, likely
    )
    lost = (lost * 2).tolist()
    same_shape(
        unlikely.rewards, [None if missing(r) else r + penalty for r, penalty in zip(rewards, lost, strict=True)]
    )
    assert unlikely.report.which("likely") == [name for name, penalty in zip(ids, lost, strict=True) if penalty]
    for shaped in (long, again, unlikely):
        assert shaped.report.which("missing reward") == [n for n, r in zip(ids, rewards, strict=True) if missing(r)]
        assert shaped.report.rows == len(rows) and bool(shaped.report.metrics) == bool(rows)


def test_shaped_rewards_keep_float64_and_their_argument() -> None:
    rewards = torch.tensor([1.0, 1.0], dtype=torch.float64)
    tokens, mask = torch.tensor([[1, 1, 1], [1, 2, 3]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    for shaped, reason, lost in (
        (shape_length(rewards, [5, 1], target=2, per_token=0.1), "over target", 0.3),
        (shape_repetition(rewards, tokens, mask, n=1), "repetition", 2 / 3),
        (shape_rank(rewards, ["a", "a"], [-1.0, -2.0], penalty=0.6), "likely", 0.3),
        (shape_by(rewards, [-0.5, 0.0], reason="style"), "style", 0.5),
    ):
        assert shaped.rewards.dtype == torch.float64 and rewards.tolist() == [1.0, 1.0]
        assert shaped.rewards.tolist() == pytest.approx([1.0 - lost, 1.0], rel=1e-12)
        assert shaped.report.which(reason) == [0]


# --- repetition -----------------------------------------------------------------------------------------------------


def naive_repetition(
    tokens: list[list[int]], masks: list[list[bool]], n: int, max_penalty: float
) -> list[float | None]:
    penalties: list[float | None] = []
    for row, mask in zip(tokens, masks, strict=True):
        starts = [i for i in range(len(row) - n + 1) if all(mask[i : i + n])]
        grams = [tuple(row[i : i + n]) for i in starts]
        penalties.append(-max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return penalties


@USUAL
@given(ragged(), st.integers(1, 9), st.sampled_from([1.0, 0.05]), st.sampled_from([1, 2, 3]), st.integers(1, 8))
def test_repetition_is_the_loop_in_every_layout(
    data: Ragged, n: int, max_penalty: float, letters: int, longer: int
) -> None:
    data.lengths = [length * longer for length in data.lengths]
    data.masks = [[m for m in mask for _ in range(longer)] for mask in data.masks]
    random = python_random.Random(data.seed)
    tokens = [[random.choice([5, 151_935, -1][:letters]) for _ in range(length)] for length in data.lengths]
    expected = naive_repetition(tokens, data.masks, n, max_penalty)
    padded = data.padded(tokens, 7.0).long()
    same_shape(repetition_penalty(padded, data.padded_mask, n=n, max_penalty=max_penalty), expected)
    packed = Rows(data.packed(tokens).values.long(), data.lengths)
    same_shape(repetition_penalty(packed, data.packed_mask, n=n, max_penalty=max_penalty), expected)


def test_a_loop_of_any_period_costs_nearly_all_and_plain_counting_nothing() -> None:
    loops = [(list(range(period)) * 1000)[:1000] for period in (1, 3, 17)]
    for share in repetition_penalty(loops, n=20).tolist():
        assert share < -0.97
    assert repetition_penalty([list(range(1000))], n=20).item() == 0.0


def test_every_width_of_ngram_tells_all_apart() -> None:
    """All words of two letters of one length: no two of their n-grams are the same, none are lost."""
    for n in range(1, 14):
        words = [[(word >> bit) & 1 for bit in range(n)] for word in range(2**n)]
        flat = [letter + 2 * i for i, word in enumerate(words) for letter in word]
        assert repetition_penalty([flat], n=n).item() == 0.0
        joined = [letter for word in words for letter in word]
        same_shape(repetition_penalty([joined], n=n), naive_repetition([joined], [[True] * len(joined)], n, 1.0))


# --- operations -----------------------------------------------------------------------------------------------------


@USUAL
@given(
    st.lists(st.tuples(REWARD, REWARD), max_size=10),
    st.sampled_from(["add", "sub", "mul", "div", "ADD", "SUB", "MUL", "DIV"]),
    st.sampled_from([0.0, 1.0, -2.0, 0.5]),
)
def test_shape_by_is_the_loop(rows: list[tuple[float | None, float | None]], op: str, weight: float) -> None:
    expected: list[float | None] = []
    skipped, unknown = [], []
    for i, (reward, value) in enumerate(rows):
        if missing(reward) or missing(value):
            expected.append(reward)
            unknown += [i] if not missing(reward) else []
            continue
        by = weight * value
        if op.lower() == "div" and by == 0:
            expected.append(reward)
            skipped.append(i)
            continue
        expected.append(
            {"add": reward + by, "sub": reward - by, "mul": reward * by}.get(op.lower(), reward / (by or 1))
        )
    rewards = [r for r, _ in rows]
    shaped = shape_by(rewards, [v for _, v in rows], op, weight)
    finite = [w if w is None or abs(w) < 1e30 else None for w in expected]
    same_shape(shaped.rewards[[k is not None for k in finite]], [k for k in finite if k is not None])
    assert shaped.report.which("zero divisor") == skipped and shaped.report.which("missing value") == unknown
    assert shaped.report.which("missing reward") == [i for i, (r, _) in enumerate(rows) if missing(r)]
    assert rewards == [r for r, _ in rows]
    # A quotient may overflow: what became infinite has no size to report.
    changes = [0.0 if missing(r) or math.isinf(w) else w - r for r, w in zip(rewards, expected, strict=True)]
    moved = [i for i, (r, w) in enumerate(zip(rewards, expected, strict=True)) if not missing(r) and r != w]
    assert shaped.report.which("changed") == moved
    assert shape_by(rewards, [v for _, v in rows], op, weight, reason="style").report.which("style") == moved
    if rows:
        assert shaped.report.metrics["reward_diff/max"] == pytest.approx(max(changes), rel=1e-9, abs=1e-9)


@USUAL
@given(REWARDS, st.none() | st.floats(-50, 0), st.none() | st.floats(0, 50))
def test_clipped_rewards_are_counted(rewards: list[float | None], low: float | None, high: float | None) -> None:
    lower, upper = -math.inf if low is None else low, math.inf if high is None else high
    clipped = clip_rewards(rewards, low, high)
    same_shape(clipped.rewards, [None if missing(r) else min(max(r, lower), upper) for r in rewards])
    assert clipped.report.which("below") == [i for i, r in enumerate(rewards) if not missing(r) and r < lower]
    assert clipped.report.which("above") == [i for i, r in enumerate(rewards) if not missing(r) and r > upper]


def test_infinite_rewards_are_clipped_and_do_not_spoil_the_numbers() -> None:
    clipped = clip_rewards([math.inf, -math.inf, 0.0], -1.0, 2.0)
    assert clipped.rewards.tolist() == [2.0, -1.0, 0.0]
    assert all(map(math.isfinite, clipped.report.metrics.values())) and difference([], []) == {}


def test_every_shaper_names_infinite_and_missing_rewards() -> None:
    rewards, lengths, ids = [1.0, math.inf, None, -math.inf], [1, 2, 3, 4], list("abcd")
    for shaped in (
        clip_rewards(rewards, -1.0, 2.0, ids),
        shape_by(rewards, [1.0] * 4, ids=ids),
        shape_length(rewards, lengths, ids, target=2),
        shape_overlong(rewards, lengths, ids, max_length=4, buffer=2),
        shape_repetition(rewards, [[1], [2], [3], [4]], None, ids, n=1),
        shape_rank(rewards, ["x"] * 4, [-1.0] * 4, None, ids),
        RunningNorm()(rewards, ids),
    ):
        assert shaped.report.which("infinite reward") == ["b", "d"] and shaped.report.which("missing reward") == ["c"]


@USUAL
@given(ragged(), st.floats(0.1, 2))
def test_the_clipped_share_is_of_tokens_that_count_before_they_are_clipped(data: Ragged, bound: float) -> None:
    rows = data.rows()
    counted = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, data.masks, strict=True)]
    shares = [sum(abs(x) > bound for x in row) / len(row) if row else 0.0 for row in counted]
    total = sum(map(len, counted))
    share = sum(abs(x) > bound for row in counted for x in row) / total if total else 0.0
    values = [
        [max(-bound, min(bound, x)) if m else 0.0 for x, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, data.masks, strict=True)
    ]
    padded = clip_advantages(data.padded(rows), data.padded_mask, bound)
    packed = clip_advantages(data.packed(rows), data.packed_mask, bound)
    for clipped, tokens in (
        (padded, data.unpadded(padded.advantages)),
        (packed, [r.tolist() for r in packed.advantages]),
    ):
        assert tokens == values and clipped.fraction == pytest.approx(share)
        same_shape(clipped.fractions, list(shares))
        assert clipped.report.which("clipped") == [i for i, x in enumerate(shares) if x]


def test_clipping_moves_nothing_it_was_given() -> None:
    advantages = torch.tensor([[3.0, math.nan]])
    clipped = clip_advantages(advantages, [[1, 1]], 1.0)
    assert clipped.advantages[0, 0] == 1.0 and math.isnan(clipped.advantages[0, 1]) and advantages[0, 0] == 3.0


# --- the running norm -----------------------------------------------------------------------------------------------


@USUAL
@given(
    st.lists(st.lists(REWARD | st.just(math.inf), max_size=6), max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_running_norm_is_the_deviation_of_all_in_any_order(
    rollouts: list[list[float | None]], minus_mean: bool, random: python_random.Random
) -> None:
    finite = [r for rollout in rollouts for r in rollout if not missing(r) and math.isfinite(r)]
    norm, other = RunningNorm(minus_mean=minus_mean), RunningNorm(minus_mean=minus_mean)
    for rollout in rollouts:
        norm.update(rollout)
    mixed = [r for rollout in rollouts for r in rollout]
    random.shuffle(mixed)
    for i in range(0, len(mixed), 4):
        other.update(mixed[i : i + 4])
    mean = statistics.fmean(finite) if finite else 0.0
    flat = len(set(finite)) < 2
    std = 0.0 if flat else statistics.stdev(finite)
    for running in (norm, other):
        assert running.count == len(finite)
        assert running.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
        assert running.std == pytest.approx(std, rel=1e-6, abs=1e-9)
        scale = running.std if running.std > 1e-3 else 1.0
        expected = [None if missing(r) else (r - (running.mean if minus_mean else 0.0)) / scale for r in mixed]
        same_shape(running.apply(mixed).rewards, expected)


def test_equal_first_rewards_stay_finite() -> None:
    """Two equal first rewards divided by 1.4e-12 became 7e11 upstream; one alone became 0."""
    assert RunningNorm()([1.0, 1.0]).rewards.tolist() == [1.0, 1.0]
    assert RunningNorm()([1.0]).rewards.tolist() == [1.0]
    assert RunningNorm(minus_mean=True)([0.1] * 8).rewards.tolist() == [0.0] * 8
    assert RunningNorm()([]).rewards.tolist() == []
    norm = RunningNorm()
    for _ in range(50):
        norm.update([0.1] * 7)
    assert norm.std == 0.0 and norm.mean == 0.1
    running = RunningNorm()
    assert running([1.0, 1.0 + 1e-9]).rewards.tolist() == [1.0, 1.0]  # as equal ones, and not a thousand times as large
    assert running.std > 0 and running.scale == 1.0
    wide = RunningNorm(floor=0.5)
    assert wide([0.0, 0.5]).rewards.tolist() == [0.0, 0.5] and wide.scale == 1.0
    assert wide([0.0, 8.0]).rewards.tolist() == pytest.approx([0.0, 8.0 / wide.std])


def test_what_was_read_of_it_does_not_change_and_evaluation_changes_nothing() -> None:
    norm = RunningNorm()
    norm.update([1.0, 2.0])
    mean, state = norm.mean, norm.state_dict()
    saved = dict(state)
    norm([100.0, 200.0], update=False)
    assert norm.state_dict() == saved
    norm.update([100.0])
    assert mean == 1.5 and state == saved and norm.count == 3
    rewards = torch.tensor([4.0, math.nan])
    norm.apply(rewards)
    assert rewards[0] == 4.0


def test_its_state_goes_on_elsewhere() -> None:
    norm = RunningNorm()
    norm.update([1.0, 2.0, 5.0])
    other = RunningNorm()
    other.load_state_dict(json.loads(json.dumps(norm.state_dict())))
    for running in (norm, other):
        running.update([7.0, None])
    assert norm.state_dict() == other.state_dict()
    empty = RunningNorm()
    empty.load_state_dict(json.loads(json.dumps(RunningNorm().state_dict())))
    assert empty.count == 0 and empty.std == 0.0
    with pytest.raises(ValueError, match="state: got mean, expected count, mean, squares, low, high"):
        other.load_state_dict({"mean": 1.0})
    for bad, words in (
        ({"squares": -1.0}, "state: squares: got -1.0, expected a finite number >= 0"),
        ({"squares": math.inf}, "state: squares: got inf, expected a finite number"),
        ({"count": 1.5}, "state: count: got 1.5, expected an integer >= 0"),
        ({"count": -1}, "state: count: got -1, expected an integer >= 0"),
        ({"mean": math.nan}, "state: mean: got nan, expected a finite number"),
        ({"low": 9.0}, "state: high: got 7.0, expected a finite number >= 9"),
    ):
        with pytest.raises(ValueError, match=words):
            other.load_state_dict({**norm.state_dict(), **bad})
    with pytest.raises(ValueError, match="state: got list, expected a mapping of count, mean"):
        other.load_state_dict([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state: mean: got None"):
        other.load_state_dict({**norm.state_dict(), "mean": None})  # type: ignore[dict-item]
    assert norm.state_dict() == other.state_dict()


PARTS = ([1.0, None, 3.0], [8.0])
GROUPS = (["a", "b", "a"], ["b"])
RANKED = (([1.0, 1.0, -2.0], [0.5, 1.0]), (["a", "a", "b"], ["b", "a"]), ([-1.0, -2.0, -1.0], [-3.0, -0.5]))
RANKED += ((["x", "y", "z"], ["w", "x"]),)  # run x of group a has a row in each process


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks = ProcessGroup()
    norm = RunningNorm()
    shaped = norm(PARTS[rank], process_group=ranks)
    bonus = length_bonus([[10, 20, 30], [5]][rank], [[1, 0, 1], [1]][rank], GROUPS[rank], process_group=ranks)
    weights = clip_filter_weights(PARTS[rank], GROUPS[rank], process_group=ranks).weights
    filtered = zero_variance(PARTS[rank], GROUPS[rank], process_group=ranks)
    off = torch.tensor([[0.5, 0.2], [0.1, 0.0]])[rank : rank + 1]
    scaled = importance_weights(off, torch.zeros(1, 2), truncate=None, normalize=True, process_group=ranks).weights
    likely = shape_rank(*(part[rank] for part in RANKED), process_group=ranks)
    numbers = [norm.state_dict(), shaped.rewards.tolist(), bonus.tolist(), weights.tolist(), filtered.keep.tolist()]
    numbers += [scaled[0].tolist(), likely.rewards.tolist(), likely.report.which("likely")]
    Path(folder, str(rank)).write_text(json.dumps(numbers))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    mp.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    norm = RunningNorm()
    shaped = norm(PARTS[0] + PARTS[1], process_group=SINGLE_PROCESS)
    assert first[0] == second[0]
    assert first[0] == pytest.approx(norm.state_dict())
    assert np.allclose(first[1] + second[1], shaped.rewards.tolist(), equal_nan=True)
    assert first[2] + second[2] == length_bonus([10, 20, 30, 5], [1, 0, 1, 1], GROUPS[0] + GROUPS[1]).tolist()
    assert first[3] + second[3] == clip_filter_weights(PARTS[0] + PARTS[1], GROUPS[0] + GROUPS[1]).weights.tolist()
    assert first[4] + second[4] == zero_variance(PARTS[0] + PARTS[1], GROUPS[0] + GROUPS[1]).keep.tolist()
    off = torch.tensor([[0.5, 0.2], [0.1, 0.0]])
    together = importance_weights(off, torch.zeros(2, 2), truncate=None, normalize=True).weights
    assert np.allclose([first[5], second[5]], together.tolist()) and together.mean().item() == pytest.approx(1.0)
    likely = shape_rank(*(left + right for left, right in RANKED))
    assert first[6] + second[6] == likely.rewards.tolist()
    assert first[7] + [3 + row for row in second[7]] == likely.report.which("likely") == [0, 2, 4]


# --- groups ---------------------------------------------------------------------------------------------------------


@USUAL
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.7]), min_size=n, max_size=n), min_size=1, max_size=6)
    ),
    st.floats(1, 4),
    st.floats(0, 2),
)
def test_clip_filter_weights_are_the_formula_by_place_and_by_id(
    groups: list[list[float]], clip: float, lam: float
) -> None:
    flat = [len(set(group)) == 1 for group in groups]
    useful = flat.count(False)
    group_weights = [1.0 if not useful else lam if dull else min(len(groups) / useful, clip) for dull in flat]
    matrix = clip_filter_like_weight_func(groups, clip, lam)
    assert matrix.dtype == torch.float32
    for row, weight in zip(matrix, group_weights, strict=True):
        same_shape(row, [weight] * len(groups[0]))
    rows = [(reward, i) for i, group in enumerate(groups) for reward in group]
    python_random.Random(0).shuffle(rows)
    by_id = clip_filter_weights([r for r, _ in rows], [i for _, i in rows], clip=clip, lam=lam)
    same_shape(by_id.weights, [group_weights[i] for _, i in rows])


def test_clip_filter_weights_of_odd_shapes(recwarn: pytest.WarningsRecorder) -> None:
    assert clip_filter_like_weight_func(torch.tensor([[1.0], [2.0]]), 3.0, 0.5).tolist() == [[1.0], [1.0]]
    assert clip_filter_like_weight_func(torch.zeros(0, 4)).shape == (0, 4)
    assert clip_filter_like_weight_func(torch.tensor([[1, 1], [0, 1]])).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert clip_filter_like_weight_func(torch.full((2, 7), 0.7, dtype=torch.float64)).dtype == torch.float64
    unequal = clip_filter_weights([1.0, 0.0, 1.0, None, 3.0, 3.0], list("aabbcd"))
    assert unequal.weights.tolist() == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert unequal.report.which("missing reward") == [3]
    assert not recwarn.list


def test_a_group_with_too_few_known_rewards_does_not_differ() -> None:
    groups = [[1, math.nan, math.nan], [1, 1, 1], [0, 1, math.nan], [math.nan] * 3, [math.inf, 1, 1]]
    matrix = clip_filter_like_weight_func(groups, 9.0, 0.5)
    assert matrix[:, 0].tolist() == [0.5, 0.5, 5.0, 0.5, 0.5]
    by_id = clip_filter_weights(
        [r for g in groups for r in g], [i for i in range(5) for _ in range(3)], clip=9.0, lam=0.5
    )
    assert by_id.weights.tolist() == matrix.flatten().tolist()
    assert clip_filter_like_weight_func([[math.nan, 1.0], [2.0, 2.0]], 3.0, 0.5).tolist() == [[1.0, 1.0], [1.0, 1.0]]


@USUAL
@given(st.lists(st.tuples(REWARD, st.tuples(st.integers(0, 1), st.integers(0, 2))), max_size=12))
def test_pass_rates_are_means_by_key(rows: list[tuple[float | None, tuple[int, int]]]) -> None:
    summary = pass_rates([r for r, _ in rows], [k for _, k in rows])
    keys = list(dict.fromkeys(k for _, k in rows))
    assert summary.keys == keys
    rates = []
    for key, rate, count in zip(keys, summary.rates, summary.counts, strict=True):
        rewards = [r for r, k in rows if k == key and not missing(r)]
        assert count == len(rewards)
        if rewards:
            rates.append(rate)
            assert rate == pytest.approx(statistics.fmean(rewards), rel=1e-9, abs=1e-9)
        else:
            assert math.isnan(rate)
    share = sum(0 < r < 1 for r in rates) / len(rates) if rates else 0.0
    assert summary.report.metrics["valid_ratio"] == pytest.approx(share)
    listed = [v for part in summary.by_taskset().values() for v in part["values"]]
    assert sorted(listed) == sorted(rates)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: overlong_penalty([1], max_length=4, buffer=5), "buffer: got 5, expected a number of tokens from 1 to"),
        (lambda: overlong_penalty([1], max_length=0), "max_length: got 0, expected a number >= 1"),
        (
            lambda: overlong_penalty([1], max_length=4, buffer=2, factor=-1),
            "factor: got -1, expected a number >=",
        ),
        (
            lambda: overlong_penalty([2, -1], max_length=4, buffer=2),
            "lengths: got -1 at row 1, expected a number of tok",
        ),
        (lambda: overlong_penalty([1.5], max_length=4, buffer=2), "lengths: got 1.5 at row 0"),
        (lambda: overlong_penalty([None], max_length=4, buffer=2), "lengths: got nan at row 0"),
        (lambda: overlong_penalty([math.inf], max_length=4, buffer=2), "lengths: got inf at row 0"),
        (lambda: shape_overlong([1.0], [1, 2], max_length=4, buffer=2), "lengths: got 2, expected 1, one for each row"),
        (lambda: shape_overlong([1.0], [1], ["a", "b"], max_length=4, buffer=2), "ids: got 2, expected 1"),
        (lambda: length_penalty([1], target=-1), "target: got -1, expected a number >= 0"),
        (lambda: length_penalty([1], target=1, per_token=-1), "per_token: got -1, expected a number >= 0"),
        (lambda: length_penalty([1], target=1, max_penalty=-1), "max_penalty: got -1, expected a number >= 0"),
        (lambda: length_bonus([1], [0.5], ["a"]), "correct: got 0.5 at row 0, expected true or false"),
        (lambda: length_bonus([1], [1, 0], ["a"]), "correct: got 2, expected 1"),
        (lambda: length_bonus([1], [1], ["a", "b"]), "groups: got 2, expected 1"),
        (lambda: repetition_penalty([[1]], n=0), "n: got 0, expected an integer >= 1"),
        (lambda: repetition_penalty([[1]], n=True), "n: got True, expected an integer >= 1"),
        (lambda: shape_length([1.0], [1, 2], target=1), "lengths: got 2, expected 1, one for each row"),
        (lambda: shape_length([1.0], [1], ["a", "b"], target=1), "ids: got 2, expected 1"),
        (lambda: shape_length([1.0], [1], target=-1), "target: got -1, expected a number >= 0"),
        (lambda: shape_repetition([1.0], [[1], [2]]), "tokens: got 2 rows, expected 1, one for each reward"),
        (lambda: shape_repetition([1.0], [[1.5]], n=1), "tokens: got float32, expected integers"),
        (lambda: shape_rank([1.0], ["a"], [-1.0], ["x", "y"]), "runs: got 2, expected 1"),
        (lambda: shape_rank([1.0], ["a"], [-1.0, -2.0]), "logprobs: got 2, expected 1"),
        (lambda: shape_rank([1.0], None, [-1.0]), "groups: got None"),
        (lambda: shape_by([1.0], [1.0], reason=""), "reason: got '', expected a name other than 'missing reward'"),
        (lambda: shape_by([1.0], [1.0], reason="zero divisor"), "reason: got 'zero divisor', expected a name other"),
        (lambda: shape_by([1.0], [1.0], reason=None), "reason: got None, expected a name other than"),
        (lambda: repetition_penalty([[1.5]], n=1), "tokens: got float32, expected integers"),
        (lambda: repetition_penalty([[1]], n=1, max_penalty=-1.0), "max_penalty: got -1.0, expected a number >= 0"),
        (lambda: shape_by([1.0], [1.0], "pow"), "op: got 'pow', expected one of 'add', 'sub', 'mul', 'div'"),
        (lambda: shape_by([1.0], [1.0], 3), "op: got 3, expected one of"),
        (lambda: shape_by([1.0], [1.0, 2.0]), "values: got 2, expected 1, one for each row"),
        (lambda: shape_by(["x"], [1.0]), "rewards: expected numbers or None"),
        (lambda: shape_by([1.0], [1.0], weight=math.nan), "weight: got nan, expected a number"),
        (lambda: clip_rewards([1.0], 2.0, 1.0), "low: got 2.0, expected at most high, 1.0"),
        (lambda: clip_rewards([[1.0]], 0.0, 1.0), "rewards: got 2 dimensions, expected one number for each row"),
        (lambda: clip_advantages([[1.0]], None, 0.0), "bound: got 0.0, expected a positive number"),
        (lambda: clip_advantages([[1.0]], None, 1.0, over="all"), "over: got 'all', expected one of 'tokens', 'slots'"),
        (
            lambda: overlong_penalty([1], max_length=4, buffer=2, bounded="no"),
            "bounded: got 'no', expected True or False",
        ),
        (lambda: RunningNorm(minus_mean="no"), "minus_mean: got 'no', expected True or False"),
        (lambda: RunningNorm()([1.0], update=None), "update: got None, expected True or False"),
        (lambda: shape_by([1.0], [1.0], reason="infinite reward"), "reason: got 'infinite reward', expected a name"),
        (lambda: RunningNorm(floor=0.0), "floor: got 0.0, expected a positive number"),
        (lambda: clip_filter_like_weight_func([1.0]), "rewards: got 1 dimensions, expected 2"),
        (lambda: clip_filter_weights([1.0, 2.0], ["a", "a"], clip=-1.0), "clip: got -1.0, expected a number >= 0"),
        (lambda: pass_rates([1.0], ["a", "b"]), "keys: got 2, expected 1"),
        (lambda: pass_rates([1.0], ["a"]).by_taskset(), "keys: got 'a', expected pairs"),
        (lambda: difference([1.0], [1.0, 2.0]), "after: got 2, expected 1"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)


# --- likely answers -------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("ab"), st.one_of(st.none(), st.floats(-2, 2, width=32)), st.sampled_from([-3.0, -1.0, -0.5])
        ),
        min_size=1,
        max_size=9,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_rank_penalty_equals_its_loop_in_any_order(rows: list[tuple[str, float | None, float]], seed: Any) -> None:
    expected = []
    for group, reward, likely in rows:
        peers = [p for g, r, p in rows if g == group and r is not None]
        if reward is None:
            expected.append(0.0)
            continue
        below, equal = sum(p < likely for p in peers), sum(p == likely for p in peers)
        expected.append(-0.3 * reward * (below + (equal - 1) / 2) / len(peers))
    order = list(range(len(rows)))
    seed.shuffle(order)
    columns = [[rows[i][j] for i in order] for j in (1, 0, 2)]
    penalties = rank_penalty(*columns, penalty=0.3).tolist()
    assert penalties == pytest.approx([expected[i] for i in order], abs=1e-6)


def test_equal_rewards_with_a_rank_penalty_score_against_each_other() -> None:
    # Trinity's mean and deviation are of penalized rewards, its numerator of raw ones: +0.707 for both.
    lost = rank_penalty([1.0, 1.0], ["a", "a"], [-0.1, -2.0], penalty=0.5)
    shaped = shape_by([1.0, 1.0], lost, "add").rewards
    scores = grpo(shaped, ["a", "a"]).scores
    assert scores.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)
    assert scores.sum().item() == pytest.approx(0, abs=1e-6)


def test_rank_penalty_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="penalty: got 2, expected a number from 0 to 1"):
        rank_penalty([1.0], ["a"], [0.0], penalty=2)
    with pytest.raises(ValueError, match="logprobs: got NaN at row 0"):
        rank_penalty([1.0], ["a"], [math.nan])
    with pytest.raises(ValueError, match="logprobs: got 2, expected 1"):
        rank_penalty([1.0], ["a"], [0.0, 0.0])


@USUAL
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from("xyz"),
            st.one_of(st.none(), st.sampled_from([1.0, -1.0, 0.5])),
            st.sampled_from([-3.0, -1.0, -0.5, -0.1, -math.inf]),
        ),
        min_size=1,
        max_size=12,
    ),
    random=st.randoms(use_true_random=False),
)
def test_a_run_has_one_rank(rows: list[tuple[str, str, float | None, float]], random: python_random.Random) -> None:
    means: dict[tuple[str, str], float] = {}
    for key in {(g, r) for g, r, _, _ in rows}:
        likelihoods = sorted(p for g, r, reward, p in rows if (g, r) == key and reward is not None)
        if likelihoods:
            means[key] = likelihoods[0] if likelihoods[0] == likelihoods[-1] else sum(likelihoods) / len(likelihoods)
    expected = []
    for group, run, reward, _ in rows:
        if reward is None:
            expected.append(0.0)
            continue
        own_mean, peers = means[group, run], [mean for (g, _), mean in means.items() if g == group]
        below, equal = sum(p < own_mean for p in peers), sum(p == own_mean for p in peers)
        expected.append(-0.3 * reward * (below + (equal - 1) / 2) / len(peers))
    order = list(range(len(rows)))
    random.shuffle(order)
    groups, runs, rewards, likely = ([rows[i][j] for i in order] for j in range(4))
    assert rank_penalty(rewards, groups, likely, runs, penalty=0.3).tolist() == pytest.approx(
        [expected[i] for i in order], abs=1e-6
    )


def test_rows_of_a_run_do_not_push_others_up() -> None:
    """A run in three rows was three likelier answers, so that the other one's rank rose by what it was cut into."""
    rewards, groups, likely = [1.0] * 5, ["a"] * 5, [-0.9, -0.8, -0.7, -0.1, -2.0]
    shaped = rank_penalty([1.0, 1.0, 1.0], ["a"] * 3, [-0.8, -0.1, -2.0], penalty=0.6)
    assert rank_penalty(rewards, groups, likely, list("xxxyz"), penalty=0.6).tolist() == pytest.approx(
        [shaped[0].item()] * 3 + shaped[1:].tolist()
    )
    assert rank_penalty(rewards, groups, likely, penalty=0.6)[3] != shaped[1]


def test_ranks_of_many_groups() -> None:
    size = 40_000
    likely = torch.linspace(-5, -1, 2 * size, dtype=torch.float64)
    groups = torch.arange(size).repeat(2)
    shaped = rank_penalty(torch.ones(2 * size), groups, likely, penalty=1.0)
    assert shaped[:size].abs().max() == 0 and (shaped[size:] == -0.5).all()
