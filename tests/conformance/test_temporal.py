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
    found = decoded(value)
    return found if isinstance(found, torch.Tensor) else torch.tensor(found)


def same(found: torch.Tensor, expected: Any, mask: torch.Tensor) -> None:
    """Equal wherever the mask is True, and 0 elsewhere, whatever upstream has there."""
    mask = mask.bool()
    torch.testing.assert_close(found[mask], matrix(expected).float()[mask], **CLOSE)
    assert found[~mask].count_nonzero() == 0


@pytest.mark.parametrize("case", ["gae_g1.0_l1.0", "gae_g1.0_l0.95"])
def test_gae(case: str) -> None:
    given = decoded(LIGHTRFT[case]["inputs"])
    mask = given["action_mask"]
    found = temporal.gae(given["rewards"], given["values"], mask, gamma=given["gamma"], lam=given["lambd"])
    expected = decoded(LIGHTRFT[case]["lightrft_output"])
    same(found.advantages, expected["advantages"], mask)
    same(found.returns, expected["returns"], mask)
    # The reward of 5 lies on a token that does not count: dropped as upstream does, and said.
    assert found.report.which("reward off actions") == [1] and found.report.metrics["lost_reward_sum"] == 5


def test_gae_of_packed_rows() -> None:
    given = LIGHTRFT["gae_packed_lists"]["inputs"]
    found = temporal.gae(given["rewards"], given["values"], gamma=given["gamma"], lam=given["lambd"])
    expected = decoded(LIGHTRFT["gae_packed_lists"]["lightrft_output"])
    for made, rows in zip((found.advantages, found.returns), expected, strict=True):
        for row, other in zip(made, rows, strict=True):
            torch.testing.assert_close(row, other, **CLOSE)


def test_gae_past_a_tools_reply() -> None:
    case = LIGHTRFT["gae_interior_mask_wrong_bootstrap"]
    given = case["inputs"]
    tensors = [torch.tensor(given[name]) for name in ("rewards", "values", "action_mask")]
    options = {"gamma": given["gamma"], "lam": given["lambd"]}
    assert temporal.gae(*tensors, **options).advantages[0].tolist() == pytest.approx(case["better"], abs=1e-6)
    zeroed = temporal.gae(*tensors, observations="zeroed", **options).advantages
    same(zeroed, case["lightrft_output"], tensors[2])  # by choice


@pytest.mark.parametrize("case", ["cumret_g1.0", "cumret_g0.5"])
def test_cumulative_returns(case: str) -> None:
    given = decoded(LIGHTRFT[case]["inputs"])
    found = temporal.cumulative_returns(given["rewards"], given["action_mask"], gamma=given["gamma"])
    same(found, LIGHTRFT[case]["lightrft_output"], given["action_mask"])


def rows(case: str, key: str) -> tuple[list[float], list[int]]:
    """The rewards of a case's micro-batches, one after the other, and the prompt of each."""
    given = LIGHTRFT[case]["inputs"]
    found = [reward for part in given[key] for reward in part]
    return found, [i // given["n_samples_per_prompt"] for i in range(len(found))]


def flat(parts: list[list[float]]) -> Any:
    return pytest.approx([x for part in parts for x in part], abs=1e-6)


def test_rewards_minus_their_groups_mean() -> None:
    case = "naive_process_reinforce_baseline"
    rewards, groups = rows(case, "reward per micro-batch")
    found = temporal.reinforce_plus_plus_baseline(rewards=rewards, groups=groups, whiten=False)
    assert found.scores is not None
    assert found.scores.tolist() == found.advantages.tolist() == flat(LIGHTRFT[case]["lightrft_output"])


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
    found = temporal.gae(values=torch.zeros(len(rewards), 1), mask=one_action, rewards=rewards)
    assert found.advantages[:, 0].tolist() == found.returns[:, 0].tolist() == flat(expected)


@pytest.mark.parametrize("case", ["reinforce_compute_norm", "reinforce_compute_clip"])
def test_reinforce(case: str) -> None:
    given, expected = LIGHTRFT[case]["inputs"], decoded(LIGHTRFT[case]["lightrft_output"])
    mask = torch.tensor(given["action_mask"])
    options = {"gamma": given["gamma"], "whiten": given.get("advantages_norm", False)}
    found = temporal.reinforce(
        torch.tensor(given["final_reward"]), mask=mask, clip=given.get("advantage_clip"), **options
    )
    same(found.advantages, expected["advantages"], mask)
    same(found.returns, expected["returns"], mask)
    if "advantage_clip" in given:  # two of five tokens; upstream counts padding too
        assert found.report.metrics["clip_fraction"] == pytest.approx(2 / 5)


def test_the_clipped_fraction_is_measured_before_clipping() -> None:
    case = LIGHTRFT["gae_compute_norm_clip"]
    given, expected = case["inputs"], decoded(case["lightrft_output"])
    tensors = [torch.tensor(given[name]) for name in ("final_reward", "values", "action_mask")]
    options = {"gamma": given["gamma"], "lam": given["lambd"], "whiten": True}
    found = temporal.gae(*tensors, clip=given["advantage_clip"], **options)
    same(found.advantages, expected["advantages"], tensors[2])
    same(found.returns, expected["returns"], tensors[2])
    free = temporal.gae(*tensors, **options).advantages[tensors[2].bool()]
    assert found.report.metrics["clip_fraction"] == pytest.approx((free.abs() > 1).float().mean().item()) != 0


def test_gamma_of_the_baseline_is_one() -> None:
    case = LIGHTRFT["reinforce_baseline_forces_gamma1"]
    given, expected = case["inputs"], decoded(case["lightrft_output"])
    mask = torch.tensor(given["action_mask"])
    with pytest.warns(UserWarning, match=r"gamma 0\.5 is ignored"):
        found = temporal.reinforce_plus_plus_baseline(
            torch.tensor(given["final_reward"]), mask=mask, gamma=given["gamma"], whiten=False
        )
    same(found.advantages, expected["advantages"], mask)
    same(found.returns, expected["returns"], mask)


def test_whitening_over_micro_batches_at_once() -> None:
    case = LIGHTRFT["cross_batch_norm"]
    parts = [torch.tensor(part, dtype=torch.float32)[0] for part in case["inputs"]["advantages"]]
    masks = [torch.tensor(part)[0] for part in case["inputs"]["masks"]]
    found = whiten(parts, masks, std="population", eps_in="floor", eps=1e-8)
    for row, mask, expected in zip(found, masks, case["lightrft_output"], strict=True):
        same(row, decoded(expected)[0], mask)


def test_every_name_is_known() -> None:
    assert LIGHTRFT["unknown_estimator_reinforce++"]["inputs"]["name"] in ESTIMATORS
    for name in ("reinforce++", "reinforceplusplus", "reinforce_baseline", "gae", "ppo", "reinforce", "remax"):
        assert name in ESTIMATORS


@pytest.mark.parametrize("case", ["adv_reinforcepp", "adv_reinforcepp_gamma", "adv_remax", "adv_ppo_gae"])
def test_trinity(case: str) -> None:
    name, options = call_of(TRINITY[case])
    given, expected = TRINITY[case]["inputs"], decoded(TRINITY[case]["expected"])
    names = {"token_level_rewards": "token_rewards", "response_mask": "mask", "reward_baselines": "baselines"}
    data = {names.get(key, key): torch.tensor(value) for key, value in given.items() if key != "uid"}
    found = ESTIMATORS.call(name, data, **options)
    same(found.advantages, expected["advantages"], data["mask"])
    same(found.returns, expected["returns"], data["mask"])


def test_trinity_reinforce() -> None:
    case = TRINITY["adv_reinforce"]
    rewards = [row["r"] for row in case["inputs"]]
    found = ESTIMATORS.call(
        "reinforce", {"rewards": rewards, "groups": [row["task"] for row in case["inputs"]], "mask": torch.ones(2, 2)}
    )
    for row, returns, expected in zip(
        found.advantages, found.returns, decoded(case["expected"]["advantages"]), strict=True
    ):
        assert torch.equal(row, expected) and torch.equal(returns, expected)
    metrics = found.report.to_metrics("group_advantages")
    assert {key: metrics[key] for key in case["expected"]["metrics"]} == case["expected"]["metrics"]
