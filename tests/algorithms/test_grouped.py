"""Estimators that score rows against their group, against a reference with plain loops, in any order and split."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.algorithms.advantages import grouped
from rollbook.algorithms.groups import Grouped
from rollbook.algorithms.registry import ESTIMATORS

REWARDS = st.one_of(
    st.floats(-100, 100, allow_nan=False, width=32),
    st.sampled_from([0.0, 1.0, 0.1, 0.9, 0.7]),
    st.sampled_from([None, math.nan]),
)
ROWS = st.lists(st.tuples(st.sampled_from("abcd"), REWARDS), min_size=1, max_size=24)


def has_reward(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def by_group(rows: list[tuple[str, float | None]]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for group, reward in rows:
        if has_reward(reward):
            groups[group].append(reward)
    return groups


def reference(name: str, rows: list[tuple[str, float | None]], **options: Any) -> list[float]:
    """Every estimator again, one row at a time, by the statistics module."""
    groups = by_group(rows)
    scores = []
    for group, reward in rows:
        members = groups[group]
        if not has_reward(reward):
            scores.append(0.0)
            continue
        if len(members) == 1:
            scores.append(reward if options.get("singleton") == "raw" else 0.0)
            continue
        mean = statistics.fmean(members)
        same = min(members) == max(members)
        if name == "grpo":
            std = statistics.stdev(members) if options["std"] == "sample" else statistics.pstdev(members)
            scores.append(0.0 if same else (reward - mean) / (std + options["eps"]))
        elif name == "dr_grpo":
            scores.append(0.0 if same else reward - mean)
        elif name == "rloo":
            scores.append(0.0 if same else reward - (sum(members) - reward) / (len(members) - 1))
        elif name == "opmd":
            tau, top = options["tau"], max(members)
            total = sum(math.exp((r - top) / tau) for r in members)
            scores.append(0.0 if same else reward - (top + tau * math.log(total / len(members))))
        elif name == "asymre":
            scores.append((0.0 if same else reward - mean) - options["shift"])
        elif name == "rec":
            scores.append(0.0 if same else (reward - mean) / (statistics.pstdev(members) + 1e-6))
    return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"std": "sample", "eps": 1e-6},
    "dr_grpo": {},
    "rloo": {},
    "opmd": {"baseline": "logavgexp", "tau": 0.7},
    "asymre": {"shift": -0.1},
    "rec": {"normalize": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@given(rows=ROWS, singleton=st.sampled_from(["zero", "raw"]))
def test_every_estimator_equals_its_loop(name: str, rows: list[tuple[str, float | None]], singleton: str) -> None:
    options = {**OPTIONS[name], "singleton": singleton}
    estimated = ESTIMATORS.call(name, {"rewards": [r for _, r in rows], "groups": [g for g, _ in rows]}, **options)
    expected = reference(name, rows, **options)
    assert estimated.advantages.tolist() == pytest.approx(expected, rel=2e-6, abs=2e-5)
    assert torch.equal(estimated.advantages, estimated.returns)
    assert estimated.report.which("missing reward") == [i for i, (_, r) in enumerate(rows) if not has_reward(r)]


@pytest.mark.parametrize("name", [*OPTIONS, "cpgd", "pass_at_k"])
@given(rows=ROWS, seed=st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing_not_even_the_last_bit(
    name: str, rows: list[tuple[str, float | None]], seed: Any
) -> None:
    def scores(picked: list[int]) -> dict[int, float]:
        data = {"rewards": [rows[i][1] for i in picked], "groups": [rows[i][0] for i in picked]}
        estimated = ESTIMATORS.call(name, data, **({"k": 2} if name == "pass_at_k" else {}))
        return dict(zip(picked, estimated.advantages.tolist(), strict=True))

    order = list(range(len(rows)))
    before = scores(order)
    seed.shuffle(order)
    assert scores(order) == before


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opmd", "rec", "cpgd", "pass_at_k"])
@given(value=st.floats(-1e30, 1e30, allow_nan=False), n=st.integers(2, 64))
def test_a_constant_group_is_exactly_zero(name: str, value: float, n: int) -> None:
    estimated = ESTIMATORS.call(name, {"rewards": [value] * n, "groups": ["a"] * n})
    assert estimated.advantages.tolist() == [0.0] * n
    assert estimated.report.count("constant group") == n
    narrow = ESTIMATORS.call(name, {"rewards": torch.full((n,), value, dtype=torch.float32), "groups": ["a"] * n})
    assert narrow.advantages.tolist() == [0.0] * n


@given(rows=ROWS, keep=st.lists(st.booleans(), min_size=24, max_size=24))
def test_rows_without_a_reward_are_as_if_they_were_not_there(
    rows: list[tuple[str, float | None]], keep: list[bool]
) -> None:
    partial = [(g, r if keeps else None) for (g, r), keeps in zip(rows, keep, strict=False)]
    left = [(i, g, r) for i, (g, r) in enumerate(partial) if has_reward(r)]
    advantages = grouped.grpo([r for _, r in partial], [g for g, _ in partial]).advantages
    if left:
        part = grouped.grpo([r for _, _, r in left], [g for _, g, _ in left]).advantages
        assert torch.equal(advantages[[i for i, _, _ in left]], part)
    assert all(advantages[i] == 0 for i, (_, r) in enumerate(partial) if not has_reward(r))


def test_an_infinite_reward_is_left_out_and_counted_apart() -> None:
    estimated = grouped.grpo([math.inf, 1.0, 0.0], ["a"] * 3, eps=0.0)
    assert estimated.advantages.tolist() == pytest.approx([0.0, math.sqrt(0.5), -math.sqrt(0.5)])
    assert estimated.report.which("infinite reward") == [0]
    assert estimated.report.count("missing reward") == 0


def test_a_run_of_several_rows_counts_once() -> None:
    # Run 0 branched into three rows: its reward of 1 is one sample, not three.
    estimated = grouped.dr_grpo([1.0, 1.0, 1.0, 0.0], ["a"] * 4, runs=[0, 0, 0, 1])
    assert estimated.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert grouped.dr_grpo([1.0, 1.0, 1.0, 0.0], ["a"] * 4).advantages.tolist() == [0.25, 0.25, 0.25, -0.75]
    # Branches that were rewarded apart: their mean is the run's.
    estimated = grouped.dr_grpo([1.0, 0.0, 2.5], ["a"] * 3, runs=[0, 0, 1])
    assert estimated.advantages.tolist() == [-0.5, -1.5, 1.0]


def test_runs_of_other_groups_are_other_runs() -> None:
    alone = grouped.rloo([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"]).advantages
    named = grouped.rloo([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"], runs=[0, 1, 0, 1]).advantages
    assert torch.equal(alone, named)


@given(rows=ROWS, widths=st.lists(st.integers(0, 4), min_size=24, max_size=24))
def test_scores_stand_on_tokens_that_count_and_nowhere_else(
    rows: list[tuple[str, float | None]], widths: list[int]
) -> None:
    widths = widths[: len(rows)]
    rewards, groups = [r for _, r in rows], [g for g, _ in rows]
    packed = [[(i + j) % 3 > 0 for j in range(width)] for i, width in enumerate(widths)]
    padded = torch.zeros(len(rows), 6, dtype=torch.bool)
    for i, row in enumerate(packed):
        padded[i, 6 - len(row) :] = torch.tensor(row, dtype=torch.bool)
    estimated = grouped.grpo(rewards, groups, packed)
    matrix = grouped.grpo(rewards, groups, padded)
    for i, row in enumerate(packed):
        score = estimated.scores[i].item()
        assert estimated.advantages[i].tolist() == [score if on else 0.0 for on in row]
        assert matrix.advantages[i, 6 - len(row) :].tolist() == estimated.advantages[i].tolist()
        assert not matrix.advantages[i, : 6 - len(row)].any()
    assert (
        estimated.returns.values.data_ptr() != estimated.advantages.values.data_ptr()
        or not estimated.advantages.values.numel()
    )


def test_types_and_devices_follow_the_rewards() -> None:
    assert grouped.grpo([0.0, 1.0], ["a", "a"]).advantages.dtype == torch.float32
    wide = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert grouped.grpo(wide, ["a", "a"]).advantages.dtype == torch.float64
    assert grouped.grpo(torch.tensor([0, 1]), torch.tensor([7, 7])).advantages.dtype == torch.float32


def test_rank_of_std_and_level() -> None:
    rewards, groups = [1.0, 3.0, 10.0, 14.0], ["a", "a", "b", "b"]
    batch = grouped.grpo(rewards, groups, level="batch", eps=0.0).advantages
    std = statistics.stdev(rewards)
    assert batch.tolist() == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std])
    population = grouped.grpo(rewards, groups, std="population", eps=0.0).advantages
    assert population.tolist() == pytest.approx([-1, 1, -1, 1])


def test_surplus_negatives_are_drawn_by_id() -> None:
    rewards, ids = [0.0, 0.0, 0.0, 1.0, 0.0], list("vwxyz")
    estimated = grouped.rec(rewards, ["a"] * 5, ids=ids, drop="balance", seed=3)
    dropped = set(estimated.report.which("dropped negative"))
    assert len(dropped) == 3 and 3 not in dropped
    again = grouped.rec(rewards[::-1], ["a"] * 5, ids=ids[::-1], drop="balance", seed=3)
    assert {4 - i for i in again.report.which("dropped negative")} == dropped
    others = {
        tuple(grouped.rec(rewards, ["a"] * 5, ids=ids, drop="balance", seed=s).advantages.tolist()) for s in range(9)
    }
    assert len(others) > 1


@given(n=st.integers(1, 12), c=st.integers(0, 12), k=st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_and_its_scores_average_to_zero(n: int, c: int, k: int) -> None:
    from itertools import combinations

    c = min(c, n)
    rewards = [1.0] * c + [0.0] * (n - c)
    if k <= n:
        subsets = list(combinations(rewards, k))
        assert grouped.pass_at_k_estimate(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    scores = grouped.pass_at_k_advantage(rewards, ["a"] * n, k=k).advantages
    assert scores.sum().item() == pytest.approx(0, abs=1e-5)
    chance = grouped.pass_at_k_estimate(n, c, k) if k <= n else 0
    if 0 < chance < 1:
        # A sample's score is the mean, over subsets it is in, of how far they pass above the average.
        deviation = math.sqrt(chance * (1 - chance))
        for i in (0, n - 1):
            inside = [any(rewards[j] for j in subset) for subset in combinations(range(n), k) if i in subset]
            assert scores[i].item() == pytest.approx((sum(inside) / len(inside) - chance) / deviation, abs=1e-5)
    else:
        assert not scores.any()


def test_weights_of_cpgd() -> None:
    rewards, groups = [1.0, 0.0, 5.0, 5.0, 2.0, 4.0], list("aabbcc")
    assert grouped.cpgd(rewards, groups, weight="none").advantages.tolist() == [0.5, -0.5, 0, 0, -1, 1]
    weighted = grouped.cpgd(rewards, groups, weight="clip_filter_like").advantages
    assert weighted.tolist() == pytest.approx([0.75, -0.75, 0, 0, -1.5, 1.5])
    assert grouped.cpgd(rewards, groups).advantages.tolist() == pytest.approx([1, -1, 0, 0, -1, 1], abs=1e-5)


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.floats(-10, 10, width=32), st.sampled_from("xyz")),
    min_size=1,
    max_size=12,
)


@given(
    rows=STEPS,
    seed=st.randoms(use_true_random=False),
    gamma=st.floats(0, 1),
    normalize=st.sampled_from(["none", "std"]),
)
def test_gigpo_equals_its_loop_in_any_order(rows: list[Any], seed: Any, gamma: float, normalize: str) -> None:
    steps: dict[Any, int] = defaultdict(int)
    table = []
    for task, run, reward, state in rows:
        table.append((task, run, steps[task, run], reward, state))
        steps[task, run] += 1

    def normal(members: list[float], value: float) -> float:
        if len(members) < 2 or min(members) == max(members):
            return 0.0
        off = value - statistics.fmean(members)
        return off / (statistics.stdev(members) + 1e-6) if normalize == "std" else off

    def to_go(task: str, run: int, step: int) -> float:
        later = sorted((s, r) for t, u, s, r, _ in table if (t, u) == (task, run) and s >= step)
        return sum(r * gamma ** (s - step) for s, r in later)

    totals = {(t, u): sum(r for a, b, _, r, _ in table if (a, b) == (t, u)) for t, u, *_ in table}
    expected = []
    for task, run, step, _, state in table:
        peers = [total for (t, _), total in totals.items() if t == task]
        states = [to_go(t, u, s) for t, u, s, _, h in table if (t, h) == (task, state)]
        expected.append(normal(peers, totals[task, run]) + 0.5 * normal(states, to_go(task, run, step)))
    order = list(range(len(table)))
    seed.shuffle(order)
    picked = [table[i] for i in order]
    estimated = grouped.gigpo(
        *(list(column) for column in zip(*[(r, t, u, s, h) for t, u, s, r, h in picked], strict=True)),
        omega=0.5,
        gamma=gamma,
        normalize=normalize,
    )
    # Near-equal members differ by rounding alone, and a deviation that small magnifies it.
    tolerance = 1e-2 if normalize == "std" else 1e-4
    assert estimated.advantages.tolist() == pytest.approx([expected[i] for i in order], rel=1e-4, abs=tolerance)


def test_gigpo_does_not_compare_states_across_tasks() -> None:
    estimated = grouped.gigpo([0.0, 1.0, 5.0, 7.0], ["a", "a", "b", "b"], [0, 1, 0, 1], [0] * 4, ["same"] * 4)
    assert estimated.advantages.tolist() == [-1, 1, -2, 2]


def test_the_last_step_is_the_largest_wherever_it_stands() -> None:
    rows = [(0, 1, 1.0), (0, 0, 5.0), (1, 0, 0.0), (1, 2, 3.0), (1, 1, 9.0)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 4, 0, 2, 3]):
        picked = [rows[i] for i in order]
        estimated = grouped.step_wise_grpo(
            [r for *_, r in picked], ["t"] * 5, [u for u, *_ in picked], [s for _, s, _ in picked]
        )
        by_run = {u: score for (u, _, _), score in zip(picked, estimated.advantages.tolist(), strict=True)}
        assert by_run == pytest.approx({0: -math.sqrt(0.5), 1: math.sqrt(0.5)}, rel=1e-5)


def test_two_rows_of_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"steps: rows 0 and 1 are both step 3 of run 'r' of group 'g'"):
        grouped.step_wise_grpo([0.0, 1.0], ["g", "g"], ["r", "r"], [3, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped.grpo([0.0, 1.0], ["a"]), "groups: got 1, expected 2, one for each row"),
        (lambda: grouped.grpo([0.0, 1.0], [["a"], ["a"]]), "groups: expected hashable ids"),
        (lambda: grouped.grpo([[0.0, 1.0]], ["a"]), "rewards: got 2 dimensions, expected one number for each row"),
        (lambda: grouped.grpo(["x"], ["a"]), "rewards: expected numbers or None"),
        (lambda: grouped.grpo([0.0], ["a"], std="both"), "std: got 'both', expected one of 'sample', 'population'"),
        (lambda: grouped.grpo([0.0], ["a"], eps=-1), "eps: got -1, expected a number >= 0"),
        (lambda: grouped.grpo([0.0], ["a"], singleton="keep"), "singleton: got 'keep', expected one of 'zero', 'raw'"),
        (lambda: grouped.grpo([0.0], ["a"], level="all"), "level: got 'all'"),
        (lambda: grouped.grpo([0.0], ["a"], torch.ones(2, 3)), "mask: got 2 rows, expected 1, one for each reward"),
        (lambda: grouped.opmd([0.0], ["a"], tau=0), "tau: got 0, expected a positive number"),
        (lambda: grouped.opmd([0.0], ["a"], baseline="median"), "baseline: got 'median'"),
        (lambda: grouped.pass_at_k_advantage([0.0], ["a"], k=0), "k: got 0, expected an integer >= 1"),
        (lambda: grouped.pass_at_k_estimate(3, 4, 1), "pass@k: got n=3, c=4, k=1"),
        (lambda: grouped.gigpo([0.0], ["a"], [0], ["0"], ["s"]), "steps: row 0 has '0', expected an integer"),
        (lambda: ESTIMATORS.call("grpoo", {}), "did you mean 'grpo'"),
        (lambda: ESTIMATORS.call("grpo", {"rewards": [1.0]}), "grpo: missing input 'groups'"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    import re

    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_no_rows_at_all() -> None:
    estimated = grouped.grpo([], [])
    assert estimated.advantages.shape == (0,) and estimated.report.rows == 0
    assert Grouped([], []).batch_std() == 0.0


def test_a_run_that_lacks_a_reward_is_in_no_statistic_of_gigpo() -> None:
    rows = {"groups": ["t"] * 4, "runs": [0, 0, 1, 1], "steps": [0, 1, 0, 1], "states": [None] * 4}
    estimated = grouped.gigpo([math.nan, math.nan, 1.0, 1.0], **rows)
    assert estimated.advantages.tolist() == [0, 0, 0, 0]
    assert estimated.report.which("missing reward") == [0, 1]
    assert estimated.report.which("singleton group") == [2, 3]
    half = grouped.gigpo([0.0, None, 1.0, 1.0], **rows)
    assert half.report.which("missing reward") == [0, 1] and half.advantages.tolist() == [0, 0, 0, 0]
    upstream = grouped.gigpo([0.0, None, 1.0, 1.0], **rows, missing="zero")
    assert upstream.advantages.tolist() == [-1, -1, 1, 1]
    assert upstream.report.which("missing reward") == [1]
    endless = grouped.gigpo([0.0, math.inf, 1.0, 1.0], **rows)
    assert endless.report.which("infinite reward") == [0, 1] and endless.report.count("missing reward") == 0


def test_runs_of_the_same_rewards_in_another_order_are_equal() -> None:
    rewards = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], dtype=torch.float64)
    estimated = grouped.gigpo(
        rewards, ["t"] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, list("abcdef"), normalize="std", eps=0.0
    )
    assert estimated.advantages.tolist() == [0.0] * 6 and estimated.report.count("constant group") == 6


def test_a_lone_row_of_float32_residue_is_not_magnified() -> None:
    # 0.1 + 0.2 in float32 beside 0.3: a leave-one-out deviation of rounding alone made x4000 of it elsewhere.
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float32)
    assert grouped.rloo(rewards, ["a"] * 3).advantages.abs().max() < 1e-6
    assert grouped.grpo(rewards, ["a"] * 3).advantages.abs().max() < 1
    assert grouped.grpo(torch.tensor([0.3], dtype=torch.float32), ["a"]).advantages.tolist() == [0]


def test_asymre_reports_the_rewards_and_not_its_baseline() -> None:
    estimated = grouped.asymre([0.7], ["a"], singleton="raw")
    assert estimated.report.metrics["reward_mean/mean"] == 0.7 and estimated.advantages.tolist() == pytest.approx([0.7])


def test_rewards_too_large_for_the_result_are_reported() -> None:
    estimated = grouped.dr_grpo([1e40, 0.0], ["a", "a"])
    assert estimated.report.which("not finite") == [0, 1]
    assert grouped.dr_grpo(torch.tensor([1e40, 0.0], dtype=torch.float64), ["a", "a"]).report.count("not finite") == 0


def test_scores_and_advantages_are_not_one_tensor() -> None:
    estimated = grouped.grpo([1.0, 0.0], ["a", "a"])
    estimated.advantages.zero_()
    assert estimated.scores.abs().min() > 0 and estimated.returns.tolist() == [0, 0]


def test_a_draw_needs_ids() -> None:
    with pytest.raises(ValueError, match="ids: got None, expected an id for each row"):
        grouped.rec([0.0, 0.0, 1.0], ["a"] * 3, drop="balance")
    with pytest.raises(ValueError, match="ids: got the same id for several rows"):
        grouped.rec([0.0, 0.0, 1.0], ["a"] * 3, ids=[1, 1, 2], drop="balance")


@pytest.mark.parametrize("groups", [None, 5, "ab"])
def test_groups_that_are_none(groups: Any) -> None:
    with pytest.raises(ValueError, match="groups: got .*, expected 2 ids, one for each row"):
        grouped.grpo([0.0, 1.0], groups)


def test_numbers_written_as_text_are_text() -> None:
    with pytest.raises(ValueError, match="rewards: expected numbers or None: '1.0' is text"):
        grouped.grpo(["1.0", 2.0], ["a", "a"])
    with pytest.raises(ValueError, match="correct: got 'x'"):
        grouped.pass_at_k_advantage([1.0], ["a"], correct="x")


@pytest.mark.parametrize("call", ["whiten", "normalize", "step_norm"])
def test_a_switch_is_on_or_off(call: str) -> None:
    calls = {
        "whiten": lambda: ESTIMATORS.call("reinforce", {"rewards": [1.0]}, whiten="no"),
        "normalize": lambda: grouped.rec([1.0], ["a"], normalize="no"),
        "step_norm": lambda: grouped.step_wise_grpo([1.0], ["a"], [0], [0], step_norm="no"),
    }
    with pytest.raises(ValueError, match=f"{call}: got 'no', expected True or False"):
        calls[call]()


RUNS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), REWARDS), min_size=1, max_size=12)


@given(rows=RUNS, seed=st.randoms(use_true_random=False))
def test_runs_of_several_rows_count_once_whatever_their_rewards(rows: list[Any], seed: Any) -> None:
    seed.shuffle(rows)
    groups, runs, rewards = ([row[j] for row in rows] for j in range(3))
    members: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, run, reward in rows:
        if has_reward(reward):
            members[group][run].append(reward)
    expected: dict[str, list[float]] = {"grpo": [], "rloo": []}
    for group, run, reward in rows:
        of_runs = members[group]
        every = [r for run_rewards in of_runs.values() for r in run_rewards]
        if not has_reward(reward) or len(of_runs) < 2 or min(every) == max(every):
            expected["grpo"].append(0.0)
            expected["rloo"].append(0.0)
            continue
        means = {u: statistics.fmean(run_rewards) for u, run_rewards in of_runs.items()}
        middle = statistics.fmean(means.values())
        squares = sum(statistics.fmean([(r - middle) ** 2 for r in run_rewards]) for run_rewards in of_runs.values())
        expected["grpo"].append((reward - middle) / (math.sqrt(squares / (len(of_runs) - 1)) + 1e-6))
        expected["rloo"].append(reward - statistics.fmean([m for u, m in means.items() if u != run]))
    for name, right in expected.items():
        estimated = ESTIMATORS.call(name, {"rewards": rewards, "groups": groups, "runs": runs})
        assert estimated.advantages.tolist() == pytest.approx(right, rel=1e-4, abs=1e-4), name


def test_runs_of_equal_means_are_not_a_constant_group() -> None:
    # Two runs of two steps, rewarded at the last one: their means are equal, their rows are not.
    estimated = grouped.grpo([0.0, 1.0, 0.0, 1.0], ["a"] * 4, runs=[0, 0, 1, 1])
    assert estimated.advantages.abs().max() < 2 and estimated.report.count("constant group") == 0
    assert estimated.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, rel=1e-4)


def test_samples_that_were_never_told_apart_are_said_to_be_one_run() -> None:
    estimated = grouped.grpo([0.0, 1.0, 1.0], ["a"] * 3, runs=["same"] * 3)
    assert estimated.advantages.tolist() == [0, 0, 0]
    assert estimated.report.which("one run alone, in several rows") == [0, 1, 2]
    assert estimated.report.metrics["singleton_groups"] == 1 and estimated.report.metrics["constant_groups"] == 0


def test_one_formula_for_weights_of_useful_groups() -> None:
    from rollbook.algorithms.filters import clip_filter_weights

    rewards, groups = [0.0, 1.0, 5.0], ["a", "a", "b"]
    weights = clip_filter_weights(rewards, groups).weights
    advantages = grouped.cpgd(rewards, groups, weight="clip_filter_like").advantages
    assert advantages.tolist() == pytest.approx((weights * torch.tensor([-0.5, 0.5, 0.0])).tolist())
    assert weights.tolist()[0] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: grouped.grpo([0.0, 1.0], ["a", "a"], level="batch", std="smaple"),
        lambda: grouped.rec([0.0, 1.0], ["a", "a"], std="smaple"),
        lambda: grouped.cpgd([0.0, 1.0], ["a", "a"], weight="none", std="smaple"),
        lambda: ESTIMATORS.call("reinforce", {"rewards": [1.0]}, std="smaple"),
        lambda: grouped.gigpo([0.0], ["a"], [0], [0], [None], std="smaple"),
        lambda: grouped.step_wise_grpo([0.0], ["a"], [0], [0], level="batch", std="smaple"),
    ],
)
def test_an_option_is_checked_whether_or_not_it_is_used(call: Any) -> None:
    with pytest.raises(ValueError, match="std: got 'smaple'"):
        call()


def test_ids_have_an_order() -> None:
    for groups in ({"a", "b"}, {"a": 1, "b": 2}):
        with pytest.raises(ValueError, match="groups: got .*, expected 2 ids"):
            grouped.grpo([0.0, 1.0], groups)


def test_ids_of_another_type_are_other_ids() -> None:
    rewards, ids = [0.0, 0.0, 1.0], [1, "1", 2]
    first = grouped.rec(rewards, ["a"] * 3, ids=ids, drop="balance").report.which("dropped negative")
    again = grouped.rec(rewards[::-1], ["a"] * 3, ids=ids[::-1], drop="balance").report.which("dropped negative")
    assert [2 - i for i in again] == first


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opmd"])
def test_rows_that_lie_group_by_group_are_scored_as_in_any_other_order(name: str) -> None:
    rewards = torch.tensor([0.1, 0.7, 0.9, 0.3, 0.3, 0.3, 2.0, -1.0, 0.1], dtype=torch.float64)
    groups, order = torch.arange(3).repeat_interleave(3), torch.tensor([8, 0, 4, 2, 6, 1, 3, 7, 5])
    together = ESTIMATORS[name].function(rewards, groups)
    apart = ESTIMATORS[name].function(rewards[order], groups[order])
    assert together.scores[order].tolist() == apart.scores.tolist()
    metrics = apart.report.to_metrics()
    rewards.zero_()  # a report is made when it is read, of the rewards as they were
    assert together.report.to_metrics() == pytest.approx(metrics, rel=1e-12)
