"""What LightRFT's shaping and Trinity's operators were seen to do, case by case; where that was wrong, what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollbook.algorithms.filters import (
    dynamic_sampling,
    high_entropy_mask,
    invalid_rewards,
    reward_at_least,
    zero_variance,
)
from rollbook.algorithms.groups import whiten
from rollbook.algorithms.shaping import (
    RunningNorm,
    clip_advantages,
    clip_filter_like_weight_func,
    difference,
    pass_rates,
    shape_by,
    shape_overlong,
)
from tests.conformance.algorithms import LIGHTRFT, TRINITY, call_of, decoded


def tensor(value: Any) -> torch.Tensor:
    """A tensor of the cases, which is written as one, or as nested lists."""
    parsed = decoded(value)
    return parsed if isinstance(parsed, torch.Tensor) else torch.tensor(parsed)


# --- LightRFT -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cfw_half_degenerate", "cfw_all_degenerate", "cfw_clipped_to_3", "cfw_no_degenerate"])
def test_clip_filter_like_weight(name: str) -> None:
    case = LIGHTRFT[name]
    expected = tensor(case["lightrft_output"])
    for rewards in (case["inputs"]["rewards"], tensor(case["inputs"]["rewards"])):
        actual = clip_filter_like_weight_func(rewards)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_overlong_penalty() -> None:
    case = LIGHTRFT["overlong_penalty"]
    inputs = case["inputs"]
    raw = torch.full((len(inputs["lengths"]),), inputs["reward"])
    shaped = shape_overlong(
        raw,
        inputs["lengths"],
        max_length=inputs["max_new_tokens"],
        buffer=inputs["overlong_buffer_len"],
        factor=inputs["penalty_factor"],
    )
    assert shaped.rewards.tolist() == case["lightrft_output"]["shaped"][0]
    assert torch.equal(raw, tensor(case["lightrft_output"]["info_reward"]))


def test_reinforce_compute_clip() -> None:
    """The bound and LightRFT's share, of all slots of the batch; by default it is of the tokens that count."""
    case = LIGHTRFT["reinforce_compute_clip"]
    inputs, expected = case["inputs"], case["lightrft_output"]
    returns, mask = tensor(expected["returns"]), tensor(inputs["action_mask"])
    assert inputs["gamma"] == 1.0
    assert torch.equal(tensor(inputs["final_reward"]).flip(-1).cumsum(-1).flip(-1) * mask, returns)
    over_slots = clip_advantages(returns, mask, inputs["advantage_clip"], over="slots")
    assert torch.equal(over_slots.advantages, tensor(expected["advantages"]))
    share = tensor(expected["info"]["advantage_clip_frac"])
    assert torch.allclose(torch.full_like(share, over_slots.fraction), share, atol=1e-6)
    over_actions = clip_advantages(returns, mask, inputs["advantage_clip"])
    assert (over_actions.fraction, over_actions.fractions.tolist()) == (2 / 5, [0.0, 1.0])


def test_gae_compute_norm_clip() -> None:
    """Better: the share of tokens that count beyond the bound, before they are clipped; upstream always says 0."""
    case = LIGHTRFT["gae_compute_norm_clip"]
    inputs = case["inputs"]
    advantages = []
    for rewards, values, mask in zip(inputs["final_reward"], inputs["values"], inputs["action_mask"], strict=True):
        row, ahead, value = [0.0] * len(rewards), 0.0, 0.0
        for t in range(sum(mask) - 1, -1, -1):  # nothing is masked but the end
            ahead = rewards[t] + inputs["gamma"] * value - values[t] + inputs["gamma"] * inputs["lambd"] * ahead
            row[t], value = ahead, values[t]
        advantages.append(row)
    mask = tensor(inputs["action_mask"])
    white = whiten(torch.tensor(advantages), mask, eps=1e-9, eps_in="std")
    clipped = clip_advantages(white, mask, inputs["advantage_clip"])
    expected = tensor(case["lightrft_output"]["advantages"])
    assert torch.allclose(clipped.advantages[mask.bool()], expected[mask.bool()], atol=1e-5)
    beyond = (white.abs() > inputs["advantage_clip"]) & mask.bool()
    assert clipped.fraction == pytest.approx(beyond.sum().item() / mask.sum().item()) and clipped.fraction == 0.2
    assert clipped.fractions.tolist() == [0.0, 0.5]
    assert clipped.advantages[1, 2] == 0.0


def test_running_norm_constant_reward() -> None:
    """Better: finite. Equal rewards have no deviation to be divided by, so that they keep their scale."""
    rewards = LIGHTRFT["running_norm_constant_reward_explodes"]["inputs"]["rewards"]
    norm = RunningNorm()
    assert norm(rewards).rewards.tolist() == rewards
    assert norm([3.0]).rewards.tolist() == pytest.approx([3.0 / math.sqrt(4 / 3)])


@pytest.mark.parametrize(
    "name",
    ["high_entropy_mask_doc_example", "high_entropy_mask_default_02", "high_entropy_ratio_zero_returns_action_mask"],
)
def test_high_entropy_mask(name: str) -> None:
    case = LIGHTRFT[name]
    inputs = case["inputs"]
    entropy, mask = tensor(inputs["entropy"]), tensor(inputs["action_mask"])
    selected = high_entropy_mask(entropy, mask, inputs["ratio"])
    assert selected.tolist() == tensor(case["lightrft_output"]).bool().tolist()
    rows = high_entropy_mask(list(entropy), list(mask), inputs["ratio"])
    assert [row.tolist() for row in rows] == selected.tolist()


def test_high_entropy_picks_no_masked_token() -> None:
    case = LIGHTRFT["high_entropy_picks_masked_token"]
    inputs = case["inputs"]
    selected = high_entropy_mask(tensor(inputs["entropy"]), tensor(inputs["action_mask"]), inputs["ratio"])
    assert selected.int().tolist() == case["better"]


# --- Trinity's operators --------------------------------------------------------------------------------------------


def rows_of(case: dict[str, Any]) -> tuple[list[Any], list[int], list[int]]:
    """Rewards, tasks and runs."""
    rows = case["inputs"]
    return [decoded(row["r"]) for row in rows], [row["task"] for row in rows], [row["run"] for row in rows]


def kept_of(case: dict[str, Any], rows: list[int]) -> list[list[Any]]:
    rewards, tasks, runs = rows_of(case)
    return [[tasks[i], runs[i], rewards[i]] for i in rows]


def wanted_of(case: dict[str, Any]) -> Any:
    return decoded(case["expected"]["kept"])


def test_op_reward_filter() -> None:
    case = TRINITY["op_reward_filter"]
    filtered = reward_at_least(rows_of(case)[0])
    assert kept_of(case, filtered.rows) == wanted_of(case)
    assert filtered.report.count("below threshold") == case["expected"]["metrics"]["filtered_count"]


def test_op_reward_std() -> None:
    case = TRINITY["op_reward_std"]
    rewards, tasks, _ = rows_of(case)
    filtered = zero_variance(rewards, tasks)
    assert kept_of(case, filtered.rows) == wanted_of(case)
    metrics = dict(case["expected"]["metrics"])
    assert len(rewards) - len(filtered.rows) == metrics.pop("operator_filtered_count")
    start = "origin_group_advantages/"
    assert {name: filtered.report.metrics[name.removeprefix(start)] for name in metrics} == metrics


def test_op_dapo() -> None:
    case = TRINITY["op_dapo"]
    rewards, tasks, _ = rows_of(case)
    filtered = dynamic_sampling(rewards, tasks)
    assert kept_of(case, filtered.rows) == wanted_of(case)
    metrics = case["expected"]["metrics"]
    assert filtered.report.count("all correct") == metrics["dropped_all_correct"]
    assert filtered.report.count("all wrong") == metrics["dropped_all_wrong"]
    assert len(rewards) - len(filtered.rows) == metrics["filtered_count"]
    assert filtered.report.which("singleton group") == [6]  # which upstream's counters leave out


def test_op_invalid() -> None:
    case = TRINITY["op_invalid"]
    rewards = rows_of(case)[0]
    filtered = invalid_rewards(rewards, infinite="keep")
    assert kept_of(case, filtered.rows) == wanted_of(case)
    assert filtered.report.count("missing reward") == case["expected"]["metrics"]["filtered_count"]
    assert invalid_rewards(rewards).rows == [3]  # an infinite reward makes its whole group NaN: dropped by default


def test_op_shaping() -> None:
    case = TRINITY["op_shaping"]
    _, steps = call_of(case)
    rewards = rows_of(case)[0]
    shaped: Any = rewards
    for step in steps["reward_shaping_configs"]:
        values = [row.get("info", {}).get(step["stats_key"]) for row in case["inputs"]]
        shaped = shape_by(shaped, values, step["op_type"], step["weight"]).rewards
    shaped_rewards = [None if math.isnan(reward) else reward for reward in shaped.tolist()]
    assert shaped_rewards == [reward for _, _, reward in case["expected"]["kept"]]
    assert difference(rewards, shaped) == pytest.approx(case["expected"]["metrics"])
    assert rewards == rows_of(case)[0]


def test_op_pass_rate() -> None:
    case = TRINITY["op_pass_rate"]
    tasks = [row["info"]["task_index"] for row in case["inputs"]]
    rates = pass_rates(rows_of(case)[0], [(task["taskset_id"], task["index"]) for task in tasks])
    metrics = dict(case["expected"]["metrics"])
    assert {str(name): part for name, part in rates.by_taskset().items()} == metrics.pop("selector_metric")
    assert {f"selection/{name}": value for name, value in rates.report.metrics.items()} == metrics
    assert pass_rates([], []).report.metrics["valid_ratio"] == 0.0  # NaN upstream
