"""LightRFT's and Trinity's cases for estimators over time: reproduced, or, where they were judged wrong, done right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollbook.algorithms.advantages import temporal
from rollbook.algorithms.groups import whiten
from rollbook.algorithms.registry import ESTIMATORS
from tests.conformance.algorithms import LIGHTRFT, TRINITY, call_of, decoded

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def matrix(value: Any) -> torch.Tensor:
    parsed = decoded(value)
    return parsed if isinstance(parsed, torch.Tensor) else torch.tensor(parsed)


def same(actual: torch.Tensor, expected: Any, mask: torch.Tensor) -> None:
    """Equal wherever the mask is True, and 0 elsewhere, whatever upstream has there."""
    mask = mask.bool()
    torch.testing.assert_close(actual[mask], matrix(expected).float()[mask], **CLOSE)
    assert actual[~mask].count_nonzero() == 0


@pytest.mark.parametrize("case", ["gae_g1.0_l1.0", "gae_g1.0_l0.95"])
def test_gae(case: str) -> None:
    inputs = decoded(LIGHTRFT[case]["inputs"])
    mask = inputs["action_mask"]
    estimated = temporal.gae(inputs["rewards"], inputs["values"], mask, gamma=inputs["gamma"], lam=inputs["lambd"])
    expected = decoded(LIGHTRFT[case]["lightrft_output"])
    same(estimated.advantages, expected["advantages"], mask)
    same(estimated.returns, expected["returns"], mask)
    # The reward of 5 lies on a token that does not count: dropped as upstream does, and said.
    assert estimated.report.which("reward off actions") == [1] and estimated.report.metrics["lost_reward_sum"] == 5


def test_gae_of_packed_rows() -> None:
    inputs = LIGHTRFT["gae_packed_lists"]["inputs"]
    estimated = temporal.gae(inputs["rewards"], inputs["values"], gamma=inputs["gamma"], lam=inputs["lambd"])
    expected = decoded(LIGHTRFT["gae_packed_lists"]["lightrft_output"])
    for column, rows in zip((estimated.advantages, estimated.returns), expected, strict=True):
        for row, other in zip(column, rows, strict=True):
            torch.testing.assert_close(row, other, **CLOSE)


def test_gae_past_a_tools_reply() -> None:
    case = LIGHTRFT["gae_interior_mask_wrong_bootstrap"]
    inputs = case["inputs"]
    tensors = [torch.tensor(inputs[name]) for name in ("rewards", "values", "action_mask")]
    options = {"gamma": inputs["gamma"], "lam": inputs["lambd"]}
    assert temporal.gae(*tensors, **options).advantages[0].tolist() == pytest.approx(case["better"], abs=1e-6)
    zeroed = temporal.gae(*tensors, observations="zeroed", **options).advantages
    same(zeroed, case["lightrft_output"], tensors[2])  # by choice


@pytest.mark.parametrize("case", ["cumret_g1.0", "cumret_g0.5"])
def test_cumulative_returns(case: str) -> None:
    inputs = decoded(LIGHTRFT[case]["inputs"])
    returns = temporal.cumulative_returns(inputs["rewards"], inputs["action_mask"], gamma=inputs["gamma"])
    same(returns, LIGHTRFT[case]["lightrft_output"], inputs["action_mask"])


def rows(case: str, key: str) -> tuple[list[float], list[int]]:
    """The rewards of a case's micro-batches, one after the other, and the prompt of each."""
    inputs = LIGHTRFT[case]["inputs"]
    rewards = [reward for part in inputs[key] for reward in part]
    return rewards, [i // inputs["n_samples_per_prompt"] for i in range(len(rewards))]


def flat(parts: list[list[float]]) -> Any:
    return pytest.approx([x for part in parts for x in part], abs=1e-6)


def test_rewards_minus_their_groups_mean() -> None:
    case = "naive_process_reinforce_baseline"
    rewards, groups = rows(case, "reward per micro-batch")
    estimated = temporal.reinforce_plus_plus_baseline(rewards=rewards, groups=groups, whiten=False)
    assert estimated.scores is not None
    assert estimated.scores.tolist() == estimated.advantages.tolist() == flat(LIGHTRFT[case]["lightrft_output"])


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("calc_pre_reinforce", "rewards"),
        ("calc_pre_gae", "rewards"),
        ("naive_process_reinforce_raises", None),
        ("naive_process_gae_raises", None),
    ],
)
def test_rewards_pass_unchanged(case: str, key: str | None) -> None:
    if key is None:  # upstream raised; what it was given is what is to come out
        expected = LIGHTRFT[case]["better"]
        rewards = [reward for part in expected for reward in part]
    else:
        expected, (rewards, _) = LIGHTRFT[case]["lightrft_output"]["rewards"], rows(case, key)
    if "reinforce" in case:
        assert temporal.reinforce(rewards=rewards).advantages.tolist() == flat(expected)
    one_action = torch.ones(len(rewards), 1)
    estimated = temporal.gae(values=torch.zeros(len(rewards), 1), mask=one_action, rewards=rewards)
    assert estimated.advantages[:, 0].tolist() == estimated.returns[:, 0].tolist() == flat(expected)


@pytest.mark.parametrize("case", ["reinforce_compute_norm", "reinforce_compute_clip"])
def test_reinforce(case: str) -> None:
    inputs, expected = LIGHTRFT[case]["inputs"], decoded(LIGHTRFT[case]["lightrft_output"])
    mask = torch.tensor(inputs["action_mask"])
    options = {"gamma": inputs["gamma"], "whiten": inputs.get("advantages_norm", False)}
    estimated = temporal.reinforce(
        torch.tensor(inputs["final_reward"]), mask=mask, clip=inputs.get("advantage_clip"), **options
    )
    same(estimated.advantages, expected["advantages"], mask)
    same(estimated.returns, expected["returns"], mask)
    if "advantage_clip" in inputs:  # two of five tokens; upstream counts padding too
        assert estimated.report.metrics["clip_fraction"] == pytest.approx(2 / 5)


def test_the_clipped_fraction_is_measured_before_clipping() -> None:
    case = LIGHTRFT["gae_compute_norm_clip"]
    inputs, expected = case["inputs"], decoded(case["lightrft_output"])
    tensors = [torch.tensor(inputs[name]) for name in ("final_reward", "values", "action_mask")]
    options = {"gamma": inputs["gamma"], "lam": inputs["lambd"], "whiten": True}
    estimated = temporal.gae(*tensors, clip=inputs["advantage_clip"], **options)
    same(estimated.advantages, expected["advantages"], tensors[2])
    same(estimated.returns, expected["returns"], tensors[2])
    free = temporal.gae(*tensors, **options).advantages[tensors[2].bool()]
    assert estimated.report.metrics["clip_fraction"] == pytest.approx((free.abs() > 1).float().mean().item()) != 0


def test_gamma_of_the_baseline_is_one() -> None:
    case = LIGHTRFT["reinforce_baseline_forces_gamma1"]
    inputs, expected = case["inputs"], decoded(case["lightrft_output"])
    mask = torch.tensor(inputs["action_mask"])
    with pytest.warns(UserWarning, match=r"gamma 0\.5 is ignored"):
        estimated = temporal.reinforce_plus_plus_baseline(
            torch.tensor(inputs["final_reward"]), mask=mask, gamma=inputs["gamma"], whiten=False
        )
    same(estimated.advantages, expected["advantages"], mask)
    same(estimated.returns, expected["returns"], mask)


def test_whitening_over_micro_batches_at_once() -> None:
    case = LIGHTRFT["cross_batch_norm"]
    parts = [torch.tensor(part, dtype=torch.float32)[0] for part in case["inputs"]["advantages"]]
    masks = [torch.tensor(part)[0] for part in case["inputs"]["masks"]]
    whitened = whiten(parts, masks, std="population", eps_in="floor", eps=1e-8)
    for row, mask, expected in zip(whitened, masks, case["lightrft_output"], strict=True):
        same(row, decoded(expected)[0], mask)


def test_every_name_is_known() -> None:
    assert LIGHTRFT["unknown_estimator_reinforce++"]["inputs"]["name"] in ESTIMATORS
    for name in ("reinforce++", "reinforceplusplus", "reinforce_baseline", "gae", "ppo", "reinforce", "remax"):
        assert name in ESTIMATORS


@pytest.mark.parametrize("case", ["adv_reinforcepp", "adv_reinforcepp_gamma", "adv_remax", "adv_ppo_gae"])
def test_trinity(case: str) -> None:
    name, options = call_of(TRINITY[case])
    inputs, expected = TRINITY[case]["inputs"], decoded(TRINITY[case]["expected"])
    names = {"token_level_rewards": "token_rewards", "response_mask": "mask", "reward_baselines": "baselines"}
    data = {names.get(key, key): torch.tensor(value) for key, value in inputs.items() if key != "uid"}
    estimated = ESTIMATORS.call(name, data, **options)
    same(estimated.advantages, expected["advantages"], data["mask"])
    same(estimated.returns, expected["returns"], data["mask"])


def test_trinity_reinforce() -> None:
    case = TRINITY["adv_reinforce"]
    rewards = [row["r"] for row in case["inputs"]]
    estimated = ESTIMATORS.call(
        "reinforce", {"rewards": rewards, "groups": [row["task"] for row in case["inputs"]], "mask": torch.ones(2, 2)}
    )
    for row, returns, expected in zip(
        estimated.advantages, estimated.returns, decoded(case["expected"]["advantages"]), strict=True
    ):
        assert torch.equal(row, expected) and torch.equal(returns, expected)
    metrics = estimated.report.to_metrics("group_advantages")
    assert {key: metrics[key] for key in case["expected"]["metrics"]} == case["expected"]["metrics"]
