"""Estimators over time against loops over Python numbers; where rewards go, what is counted, and several processes."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from rollbook.algorithms.advantages import temporal
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.core.process_group import ProcessGroup
from rollbook.core.rows import Rows
from tests.algorithms.test_scan import naive_gae, naive_part, naive_returns

nan = math.nan
number = st.floats(-4, 4, width=32)
discount = st.sampled_from([0.0, 0.5, 0.95, 1.0])
OBSERVATIONS = st.sampled_from(["skip", "through", "zeroed"])


@st.composite
def batches(draw: Any) -> dict[str, list[list[Any]]]:
    """Rows of tokens: rewards (many of them 0), values and a mask with holes; rows may be empty or without actions."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))

    def column(elements: Any) -> list[list[Any]]:
        return [draw(st.lists(elements, min_size=n, max_size=n)) for n in lengths]

    rewards = column(st.one_of(st.just(0.0), number))
    return {"token_rewards": rewards, "values": column(number), "mask": column(st.booleans())}


def tensors(batch: dict[str, list[list[Any]]], side: str | None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """A batch packed (`side=None`), or padded with NaN on one side."""
    columns: dict[str, Any] = {}
    for name, rows in batch.items():
        kind = torch.bool if name == "mask" else dtype
        if side is None:
            columns[name] = Rows([torch.tensor(row, dtype=kind) for row in rows])
            continue
        width = max(map(len, rows)) + 1
        fill: Any = False if name == "mask" else nan
        gaps = [[fill] * (width - len(row)) for row in rows]
        joined = [gap + row if side == "left" else row + gap for row, gap in zip(rows, gaps, strict=True)]
        columns[name] = torch.tensor(joined, dtype=kind)
    return columns


def unpadded(padded: Any, batch: dict[str, list[list[Any]]], side: str | None) -> list[list[float]]:
    lengths = map(len, batch["mask"])
    if side is None:
        return [row.tolist() for row in padded]
    return [
        row.tolist()[len(row) - n :] if side == "left" else row.tolist()[:n]
        for row, n in zip(padded, lengths, strict=True)
    ]


def approximately(expected: list[list[float]], tolerance: float = 1e-9) -> Any:
    return [pytest.approx(row, rel=tolerance, abs=tolerance) for row in expected]


# --- references -----------------------------------------------------------------------------------------------------


def naive_carry(rewards: list[float], mask: list[bool], part: list[bool]) -> list[float]:
    actions = [t for t, hit in enumerate(mask) if hit]
    moved = [r if p else 0.0 for r, p in zip(rewards, part, strict=True)]
    for t, reward in enumerate(rewards):
        if not part[t] and actions:
            moved[max([a for a in actions if a <= t], default=actions[0])] += reward
    return moved


def naive_whiten(rows: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    unmasked = [x for row, hits in zip(rows, mask, strict=True) for x, hit in zip(row, hits, strict=True) if hit]
    if len(unmasked) < 2 or min(unmasked) == max(unmasked):
        return [[0.0] * len(row) for row in rows]
    mean, scale = statistics.fmean(unmasked), math.sqrt(statistics.variance(unmasked) + 1e-8)
    return [
        [(x - mean) / scale if hit else 0.0 for x, hit in zip(*pair, strict=True)]
        for pair in zip(rows, mask, strict=True)
    ]


# --- against the references -----------------------------------------------------------------------------------------


@given(batches(), discount, discount, OBSERVATIONS, st.sampled_from(["drop", "carry"]), st.booleans())
def test_gae_in_every_layout(
    batch: dict[str, Any], gamma: float, lam: float, observations: str, off: str, whiten: bool
) -> None:
    advantages, returns, lost, total = [], [], 0.0, 0.0
    for rewards, values, mask in zip(*batch.values(), strict=True):
        part = naive_part(mask, observations, None) if observations == "through" else mask
        outside = sum(r for r, p in zip(rewards, part, strict=True) if not p)
        total += outside
        lost += outside if off == "drop" or not any(mask) else 0.0
        placed = naive_carry(rewards, mask, part) if off == "carry" else rewards
        pair = naive_gae(placed, values, mask, gamma, lam, observations)
        advantages.append(pair[0])
        returns.append(pair[1])
    if whiten:
        advantages = naive_whiten(advantages, batch["mask"])
    for side in (None, "left", "right"):
        columns = tensors(batch, side)
        options = {"observations": observations, "off_action_rewards": off, "whiten": whiten}
        estimated = temporal.gae(**columns, gamma=gamma, lam=lam, **options)
        assert unpadded(estimated.advantages, batch, side) == approximately(advantages, 1e-6 if whiten else 1e-9)
        assert unpadded(estimated.returns, batch, side) == approximately(returns)
        assert estimated.report.metrics["off_action_reward_sum"] == pytest.approx(total)
        assert estimated.report.metrics["lost_reward_sum"] == pytest.approx(lost)
        assert estimated.report.which("no actions") == [i for i, mask in enumerate(batch["mask"]) if not any(mask)]
        if side is not None:
            assert estimated.advantages[~columns["mask"]].count_nonzero() == 0


@given(batches(), discount, st.data())
def test_returns_to_go_of_tokens_and_rows(batch: dict[str, Any], gamma: float, data: Any) -> None:
    count = len(batch["mask"])
    rewards = data.draw(st.lists(number, min_size=count, max_size=count))
    expected = []
    for tokens, mask, reward in zip(batch["token_rewards"], batch["mask"], rewards, strict=True):
        placed = list(tokens)
        if any(mask):
            placed[len(mask) - 1 - mask[::-1].index(True)] += reward
        expected.append(naive_returns(placed, mask, gamma))
    del batch["values"]
    whitened = naive_whiten(expected, batch["mask"])
    for side in (None, "left", "right"):
        columns = tensors(batch, side)
        per_row = torch.tensor(rewards, dtype=torch.float64)
        estimated = temporal.reinforce(**columns, rewards=per_row, gamma=gamma)
        assert unpadded(estimated.advantages, batch, side) == approximately(expected)
        assert unpadded(estimated.returns, batch, side) == approximately(expected)
        plus = temporal.reinforce_plus_plus(**columns, rewards=per_row, gamma=gamma)
        assert unpadded(plus.advantages, batch, side) == approximately(whitened, 1e-6)
        assert unpadded(plus.returns, batch, side) == approximately(expected)
        tokens_only = temporal.cumulative_returns(columns["token_rewards"], columns["mask"], gamma=gamma)
        bare = [naive_returns(*row, gamma) for row in zip(batch["token_rewards"], batch["mask"], strict=True)]
        assert unpadded(tokens_only, batch, side) == approximately(bare)
        less = temporal.remax(columns["token_rewards"], per_row, columns["mask"])
        undiscounted = [naive_returns(*row, 1.0) for row in zip(batch["token_rewards"], batch["mask"], strict=True)]
        minus = [
            [(x - b) if hit else 0.0 for x, hit in zip(row, mask, strict=True)]
            for row, mask, b in zip(undiscounted, batch["mask"], rewards, strict=True)
        ]
        assert unpadded(less.advantages, batch, side) == approximately(minus)
        assert unpadded(less.returns, batch, side) == approximately(undiscounted)


@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(batch: dict[str, Any], random: Any) -> None:
    order = list(range(len(batch["mask"])))
    random.shuffle(order)
    mixed = {name: [rows[i] for i in order] for name, rows in batch.items()}
    options = {"gamma": 0.9, "lam": 0.8, "off_action_rewards": "carry"}
    first = temporal.gae(**tensors(batch, None), **options)
    second = temporal.gae(**tensors(mixed, None), **options)
    for place, i in enumerate(order):
        assert torch.equal(first.advantages[i], second.advantages[place])
        assert torch.equal(first.returns[i], second.returns[place])


def test_one_gamma_for_every_micro_batch() -> None:
    # Upstream's second micro-batch had gamma 1: [.125, .25, .5, 1], then [1, 1, 1, 1].
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    parts = [temporal.reinforce(rewards, gamma=0.5).advantages for _ in range(2)]
    together = temporal.reinforce(rewards.repeat(2, 1), gamma=0.5).advantages
    assert torch.equal(torch.cat(parts), together)
    assert together.tolist() == [[0.125, 0.25, 0.5, 1.0]] * 2


# --- where rewards go -----------------------------------------------------------------------------------------------


def test_a_rows_reward_goes_to_its_last_action() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]])
    tokens, report = temporal.place_rewards([1.0, 2.0, nan, math.inf], mask)
    assert tokens.tolist() == [[0, 0, 1, 0], [0] * 4, [0] * 4, [0] * 4]
    assert tokens.dtype == torch.float32
    assert report.reasons == {
        "missing reward": [2],
        "infinite reward": [3],
        "no actions": [1],
        "reward off actions": [],
    }
    assert report.metrics["lost_reward_sum"] == 2.0
    rows, _ = temporal.place_rewards(torch.tensor([1.0, 2.0], dtype=torch.float64), [[1, 1, 0], [1]])
    assert [row.tolist() for row in rows] == [[0, 1, 0], [2]] and rows[0].dtype == torch.float64


def test_a_rows_reward_is_added_to_token_rewards_and_theirs_off_actions_are_counted() -> None:
    token_rewards = torch.tensor([[0.5, 7.0, 0.25]])
    tokens, report = temporal.place_rewards([1.0], torch.tensor([[1, 0, 1]]), token_rewards=token_rewards)
    assert tokens.tolist() == [[0.5, 0.0, 1.25]]
    assert report.which("reward off actions") == [0] and report.metrics["off_action_reward_sum"] == 7.0
    assert token_rewards.tolist() == [[0.5, 7.0, 0.25]]


def test_a_reward_behind_the_last_action_is_dropped_or_carried_and_never_lost_in_silence() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.9]])
    mask, response = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 1, 1]])
    options = {"gamma": 0.95, "lam": 0.95}
    dropped = temporal.gae(rewards, values, mask, **options)
    assert dropped.advantages[0].tolist() == pytest.approx([-0.4715, -0.6, 0.0])
    assert dropped.report.which("reward off actions") == [0] and dropped.report.metrics["lost_reward_sum"] == 1.0
    carried = temporal.gae(rewards, values, mask, off_action_rewards="carry", **options)
    on_action = temporal.gae(torch.tensor([[0.0, 1.0, 0.0]]), values, mask, **options)
    assert torch.equal(carried.advantages, on_action.advantages)
    assert carried.report.metrics["lost_reward_sum"] == 0.0
    assert carried.report.metrics["off_action_reward_sum"] == 1.0
    through = temporal.gae(rewards, values, mask, response, observations="through", **options)
    assert [round(x, 3) for x in through.advantages[0].tolist()] == [0.382, 0.345, 0.0]
    assert through.report.which("reward off actions") == []


def test_a_reward_before_the_first_action_is_carried_to_it_and_a_row_without_actions_loses_its_own() -> None:
    rewards = torch.tensor([[2.0, 0.0, 1.0], [3.0, 0.0, 0.0]])
    estimated = temporal.reinforce(rewards, mask=torch.tensor([[0, 1, 1], [0, 0, 0]]), off_action_rewards="carry")
    assert estimated.advantages.tolist() == [[0.0, 3.0, 1.0], [0.0, 0.0, 0.0]]
    assert (
        estimated.report.metrics["off_action_reward_sum"] == 5.0 and estimated.report.metrics["lost_reward_sum"] == 3.0
    )


# --- rewards that are missing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [nan, math.inf, -math.inf])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_row_that_lacks_a_reward_is_zero_and_in_no_statistic(bad: float, by_token: bool) -> None:
    values = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.1, 0.2]])
    tokens = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    tokens[2, 1] = bad if by_token else 0.0
    rewards = None if by_token else [0.0, 0.0, bad]
    reason = "missing reward" if bad != bad else "infinite reward"
    for name in ("gae", "ppo", "reinforce", "reinforce_plus_plus", "remax"):
        data = {"token_rewards": tokens, "rewards": rewards, "values": values, "baselines": [0.5, 0.5, 0.5]}
        estimated = ESTIMATORS.call(name, data, whiten=True)
        complete = {key: value[:2] for key, value in data.items() if value is not None}
        without = ESTIMATORS.call(name, complete, whiten=True)
        assert torch.equal(estimated.advantages[:2], without.advantages)
        assert torch.equal(estimated.returns[:2], without.returns)
        assert estimated.advantages[2].tolist() == [0.0, 0.0]
        expected = values[2].tolist() if name in ("gae", "ppo") else [0.0, 0.0]
        assert estimated.returns[2].tolist() == pytest.approx(expected)
        assert estimated.report.which(reason) == [2] and estimated.report.count("missing reward") == (bad != bad)


def test_a_missing_baseline_leaves_its_row_out() -> None:
    estimated = temporal.remax([[1.0], [2.0]], [None, 0.5])
    assert [row.tolist() for row in estimated.advantages] == [[0.0], [1.5]]
    assert estimated.report.which("missing baseline") == [0]


def test_a_critics_nan_is_not_hidden() -> None:
    estimated = temporal.gae(torch.zeros(1, 3), torch.tensor([[0.0, nan, 0.0]]))
    assert estimated.advantages.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("name", ["gae", "ppo", "reinforce", "reinforce_plus_plus", "remax"])
def test_a_batch_without_actions_is_zero(name: str) -> None:
    # Upstream's whitening made NaN of it.
    data = {
        "token_rewards": torch.full((2, 3), nan),
        "values": torch.full((2, 3), nan),
        "mask": torch.zeros(2, 3),
        "baselines": [1.0, 1.0],
    }
    estimated = ESTIMATORS.call(name, data, whiten=True, clip=1.0)
    assert estimated.advantages.count_nonzero() == estimated.returns.count_nonzero() == 0
    assert estimated.report.which("no actions") == [0, 1] and estimated.report.metrics["clip_fraction"] == 0


# --- whitening and bounds -------------------------------------------------------------------------------------------


def test_equal_advantages_and_a_single_one_whiten_to_exactly_zero() -> None:
    assert temporal.reinforce_plus_plus(rewards=[0.1] * 7).advantages.tolist() == [0.0] * 7
    assert temporal.reinforce_plus_plus(rewards=[0.1]).advantages.tolist() == [0.0]


def test_the_bound_holds_for_what_is_returned_and_its_fraction_counts_actions() -> None:
    rewards = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    estimated = temporal.reinforce(rewards, mask=mask, whiten=True, clip=1.2)
    assert estimated.advantages.abs().max().item() == pytest.approx(1.2)
    free = temporal.reinforce(rewards, mask=mask, whiten=True).advantages
    assert free[0, 2] > 1.2 and estimated.report.metrics["clip_fraction"] == 0.25
    assert "clip_fraction" not in temporal.reinforce(rewards, mask=mask).report.metrics


def test_population_deviation_by_choice() -> None:
    estimated = temporal.reinforce_plus_plus(rewards=[1.0, 3.0], std="population", eps=0.0)
    assert estimated.advantages.tolist() == [-1.0, 1.0]
    assert temporal.reinforce_plus_plus(rewards=[1.0, 3.0], eps=0.0).advantages[1].item() == pytest.approx(0.5**0.5)


# --- the baseline ---------------------------------------------------------------------------------------------------


def test_the_groups_mean_goes_by_id_and_token_rewards_stay() -> None:
    rewards, groups = [1.0, 3.0, 0.0, 2.0, 5.0], ["a", "b", "a", "b", "c"]
    mask = [[1, 1], [1, 0], [1, 1, 1], [0, 1], [1, 1]]
    penalty = [[0.5, 0.25], [0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    estimated = temporal.reinforce_plus_plus_baseline(penalty, rewards, groups, mask, whiten=False)
    expected = [[1.25, 0.75], [0.5, 0.0], [-1.5, -1.5, -1.5], [0.0, -0.5], [0.0, 0.0]]
    assert [row.tolist() for row in estimated.advantages] == expected
    assert estimated.report.which("singleton group") == [4]
    raw = temporal.reinforce_plus_plus_baseline(penalty, rewards, groups, mask, whiten=False, singleton="raw")
    assert raw.advantages[4].tolist() == [5.0, 5.0]
    whitened = temporal.reinforce_plus_plus_baseline(penalty, rewards, groups, mask)
    assert [row.tolist() for row in whitened.advantages] == approximately(
        naive_whiten(expected, [[bool(x) for x in row] for row in mask]), 1e-6
    )
    assert [row.tolist() for row in whitened.returns] == expected


def test_a_missing_reward_is_in_no_groups_mean() -> None:
    rewards = [1.0, None, 0.0, math.inf]
    estimated = temporal.reinforce_plus_plus_baseline(rewards=rewards, groups=[0, 0, 0, 0])
    assert estimated.advantages[[1, 3]].tolist() == [0.0, 0.0]
    assert estimated.returns.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert estimated.report.which("missing reward") == [1] and estimated.report.which("infinite reward") == [3]
    alike = temporal.reinforce_plus_plus_baseline(rewards=[0.1] * 8, groups=[0] * 8)
    assert alike.advantages.tolist() == [0.0] * 8 and alike.report.count("constant group") == 8


def test_rows_of_one_run_count_once() -> None:
    estimated = temporal.reinforce_plus_plus_baseline(
        rewards=[1.0, 1.0, 1.0, 0.0], groups=[0] * 4, runs=["x", "x", "x", "y"], whiten=False
    )
    assert estimated.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


# --- types, arguments -----------------------------------------------------------------------------------------------


def test_types_follow_the_data_and_nothing_given_is_changed() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        inputs = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype, requires_grad=True)
        before = [tensor.detach().clone() for tensor in inputs]
        estimated = temporal.gae(*inputs, torch.ones(2, 3), rewards=[1.0, nan], whiten=True, clip=0.5)
        assert estimated.advantages.dtype == estimated.returns.dtype == expected and not estimated.returns.requires_grad
        assert all(map(torch.equal, before, inputs))
    integers = torch.ones(2, 3, dtype=torch.int64)
    assert temporal.gae(integers, integers).advantages.dtype == torch.float32
    assert temporal.reinforce(rewards=torch.ones(2, dtype=torch.float64)).advantages.dtype == torch.float64


def test_advantages_and_returns_share_no_memory() -> None:
    estimated = temporal.reinforce(torch.ones(2, 3))
    estimated.advantages.zero_()
    assert estimated.returns.count_nonzero() == 6


TOKENS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("gae", {"token_rewards": TOKENS}, {}, "values: got None, expected the critic's value"),
        ("gae", {"values": TOKENS}, {}, "rewards: got neither rewards of rows nor token_rewards"),
        ("gae", {"token_rewards": TOKENS, "values": torch.zeros(2, 4)}, {}, r"values: got shape \[2, 4\]"),
        ("gae", {"token_rewards": TOKENS, "values": TOKENS, "response": torch.ones(1, 3)}, {}, "response: got shape"),
        (
            "gae",
            {"token_rewards": TOKENS, "values": TOKENS, "rewards": [1.0]},
            {},
            "rewards: got 1, expected 2, one for each row",
        ),
        ("gae", {"token_rewards": TOKENS, "values": TOKENS}, {"gamma": 2.0}, "gamma: got 2.0, expected a number"),
        ("gae", {"token_rewards": TOKENS, "values": TOKENS}, {"observations": "no"}, "observations: got 'no'"),
        ("reinforce", {"token_rewards": TOKENS}, {"off_action_rewards": "keep"}, "off_action_rewards: got 'keep'"),
        ("reinforce", {"token_rewards": TOKENS}, {"clip": 0.0}, "clip: got 0.0, expected a positive number or None"),
        ("reinforce", {"token_rewards": TOKENS}, {"std": "half", "whiten": True}, "std: got 'half'"),
        ("reinforce", {}, {}, "tokens: got nothing without row lengths"),
        ("reinforce", {"token_rewards": TOKENS}, {"lam": 0.5}, "unknown option 'lam'"),
        ("remax", {"token_rewards": TOKENS}, {}, "baselines: got None, expected"),
        ("remax", {"token_rewards": TOKENS, "baselines": [1.0]}, {}, "baselines: got 1, expected 2"),
        ("reinforce_baseline", {"rewards": [1.0]}, {}, "groups: got None, expected a group id for each row"),
        ("reinforce_baseline", {"rewards": [1.0], "groups": [0]}, {"gamma": 3}, "gamma: got 3, expected a number"),
    ],
)
def test_bad_arguments_are_named(name: str, data: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ESTIMATORS.call(name, data, **options)


# --- several processes ----------------------------------------------------------------------------------------------

SHARED = {
    "token_rewards": [[0.0, 1.0], [0.0, 0.5, 2.0], [], [1.5], [nan, 0.0], [0.0, 0.0, 3.0]],
    "values": [[0.5, 0.25], [0.1, 0.2, 0.3], [], [1.0], [0.0, 0.0], [0.9, 0.8, 0.7]],
    "mask": [[1, 1], [1, 0, 1], [], [1], [1, 1], [0, 1, 1]],
    "rewards": [1.0, 0.0, 2.0, 1.0, 0.5, 4.0],
    "groups": ["a", "b", "a", "a", "b", "b"],
    "baselines": [0.5] * 6,
}
SPLIT = [slice(0, 3), slice(3, 3), slice(3, 6)]
"""Which rows each process has; one has none."""
ACROSS = ("ppo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")


def estimates(rows: slice, **options: Any) -> dict[str, Any]:
    data = {name: value[rows] for name, value in SHARED.items()}
    by_name = {name: ESTIMATORS.call(name, data, whiten=True, clip=1.3, **options) for name in ACROSS}
    return {name: [row.tolist() for row in estimated.advantages] for name, estimated in by_name.items()}


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=len(SPLIT))
    advantages = estimates(SPLIT[rank], process_group=ProcessGroup())
    torch.save(advantages, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_several_processes_estimate_what_one_does(tmp_path: Path) -> None:
    mp.start_processes(one_process, args=(str(tmp_path),), nprocs=len(SPLIT), start_method="fork")
    expected = estimates(slice(0, 6))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SPLIT))]
    for name in ACROSS:
        joined = [row for part in parts for row in part[name]]
        assert joined == approximately(expected[name], 1e-6), name
        assert any(x for row in joined for x in row)


def test_token_rewards_may_be_a_view() -> None:
    tokens = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]).T
    plain = temporal.gae(tokens.contiguous(), torch.zeros(2, 3), torch.ones(2, 3), rewards=[1.0, 2.0])
    view = temporal.gae(tokens, torch.zeros(3, 2).T, torch.ones(3, 2).T, rewards=[1.0, 2.0])
    assert torch.equal(plain.advantages, view.advantages)
    assert tokens.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_groups_without_rewards_are_not_ignored() -> None:
    with pytest.raises(ValueError, match="rewards: got None, expected a reward for each row"):
        temporal.reinforce_plus_plus_baseline([[0.0, 1.0], [0.0, 0.0]], groups=["a", "a"])
