"""What Trinity-RFT and LightRFT were seen to do with KL and losses; where judged wrong, what is right, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollbook.algorithms.kl import AdaptiveKL, kl, kl_loss, penalize, token_kl
from rollbook.algorithms.losses import LOSSES, chord_mu, dpo, interleaved, mix, ppo, sapo, value_loss
from tests.conformance.algorithms import LIGHTRFT, TRINITY, call_of, decoded

AREAS = ("kl", "policy_loss", "schedule")

WHY_DIFFERENT = {
    "loss_dpo": "one logit for each pair; upstream adds up the pairs of a call into one",
    "loss_dpo_smooth": "one logit for each pair; upstream adds up the pairs of a call into one",
    "loss_sapo_gradient": "the gradient flows through the gate, as the objective has it",
    "reward_all_masked_row": "a row without actions gets no reward, and is counted",
    "ppo_policy_loss_fully_masked_row_nan": "a row without actions is as if it were not there",
}

OPTIONS = {
    "clip_range_low": "clip_low",
    "clip_range_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "loss_agg_mode": "mode",
    "enable_mask_clip": "mask_clip",
    "mask_clip_range_low": "mask_clip_low",
    "mask_clip_range_high": "mask_clip_high",
    "fallback_to_policy_gradient": "policy_gradient",
    "advantage_threshold": "threshold",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "epsilon_low_prime": "ring_low",
    "epsilon_high_prime": "ring_high",
    "temp": "temperature",
    "cutoff_prob": "cutoff",
    "mu_warmup_steps": "warmup",
    "mu_decay_steps": "decay",
    "mu_peak": "peak",
    "mu_valley": "valley",
    "enable_phi_function": "phi",
}
INPUTS = {
    "logprob": "new_logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "action_mask": "mask",
}


def close(value: Any, **tolerance: float) -> Any:
    return pytest.approx(value, **({"rel": 1e-5, "abs": 1e-6} | tolerance))


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Upstream's options under our names."""
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "clip_range":
            options |= {"clip_low": value, "clip_high": value}
        elif name not in ("enable_sequence_masking", "delta_sequence_masking"):  # off in every case
            options[OPTIONS.get(name, name)] = value
    return options


def data_of(case: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    inputs = {INPUTS.get(name, name): torch.tensor(value) for name, value in case["inputs"].items()}
    leaf = inputs["new_logprobs"].requires_grad_()
    return inputs, leaf


PLAIN = [
    name
    for name, case in TRINITY.items()
    if case["area"] == "policy_loss" and name not in WHY_DIFFERENT and name != "loss_mix_metric_scale"
]


@pytest.mark.parametrize("name", PLAIN)
def test_policy_losses(name):
    case = TRINITY[name]
    loss_name, arguments = call_of(case)
    options, (data, leaf) = options_of(arguments), data_of(case)
    if loss_name == "sapo":
        options["detach_gate"] = True
    if loss_name in ("mix", "mix_chord"):  # upstream's factor: rows of the kind, over sizes that are 1 here
        options |= {"usual_scale": 2.0, "expert_scale": 2.0}
    loss = LOSSES.call(loss_name, data, **options)
    loss.backward()
    expected = case["expected"]
    assert loss.value.item() == close(expected["loss"]["data"])
    assert leaf.grad.flatten().tolist() == close(torch.tensor(expected["grad"]["data"]).flatten().tolist())
    assert {key: loss.metrics[key].item() for key in expected["metrics"]} == close(expected["metrics"])


@pytest.mark.parametrize("name", ["loss_dpo", "loss_dpo_smooth"])
def test_dpo_is_per_pair(name):
    case = TRINITY[name]
    data, leaf = data_of(case)
    options = options_of(call_of(case)[1])
    beta, smoothing = options["beta"], options["label_smoothing"]
    pairs, chosen = interleaved(4)
    loss = dpo(data["new_logprobs"], pairs, chosen, data["ref_logprobs"], data["mask"], **options)
    ratios = [0.1, 0.0, 0.2, 0.3]  # sums of log p - log ref over the tokens that count
    assert ratios == close(((data["new_logprobs"] - data["ref_logprobs"]) * data["mask"]).sum(1).tolist())
    logits = [beta * (ratios[0] - ratios[1]), beta * (ratios[2] - ratios[3])]
    sure, wrong = ([math.log(1 / (1 + math.exp(-sign * z))) for z in logits] for sign in (1, -1))
    expected = -((1 - smoothing) * sum(sure) + smoothing * sum(wrong)) / 2
    assert loss.value.item() == close(expected)
    assert loss.metrics["accuracy_mean"] == 0.5
    assert loss.metrics["chosen_reward"].item() == close(case["expected"]["metrics"]["chosen_reward"] / 2, abs=1e-6)
    loss.backward()
    slopes = [beta * (-(1 - smoothing) / (1 + math.exp(z)) + smoothing / (1 + math.exp(-z))) / 2 for z in logits]
    signs = torch.tensor([slopes[0], -slopes[0], slopes[1], -slopes[1]])
    assert leaf.grad.flatten().tolist() == close((signs[:, None] * data["mask"]).flatten().tolist())


def test_sapo_gradient():
    case = TRINITY["loss_sapo_gradient"]
    for detach, expected in ((False, case["reference_correct"]), (True, case["expected"])):
        for ratio, advantage, slope in expected:
            x = torch.tensor([[math.log(ratio)]], requires_grad=True)
            sapo(x, [[0.0]], [[advantage]], detach_gate=detach).backward()
            assert x.grad.item() == close(slope)


def test_mix_metric_scale():
    case = TRINITY["loss_mix_metric_scale"]
    rows, inputs = case["inputs"]["rows"], case["inputs"]
    lp, old, adv = (torch.full((rows, 1), float(inputs[key])) for key in ("logprob", "old_logprob", "advantages"))
    for name, scale in (("placeholder_sizes", float(rows)), ("configured_sizes", 1.0)):
        loss = mix(lp, old, adv, [False] * rows, usual_scale=scale)
        expected = case["expected"][name]
        assert {key: loss.metrics[key].item() for key in expected} == close(expected)
        assert loss.metrics["expert/sft_loss"] == 0


def test_chord_mu():
    case = TRINITY["chord_mu"]
    assert [chord_mu(step, 10, 20, 0.9, 0.05) for step in case["inputs"]] == close(case["expected"])


KL_CASES = [name for name, case in TRINITY.items() if case["area"] == "kl"]


@pytest.mark.parametrize("name", KL_CASES)
def test_kl(name):
    case = TRINITY[name]
    inputs = {key: torch.tensor(value) for key, value in case["inputs"].items()}
    if name.startswith("kl_loss_"):
        mode = name.removeprefix("kl_loss_")
        loss = kl_loss(inputs["logprob"], inputs["ref_logprob"], inputs["mask"], estimator="k2", coef=0.5, mode=mode)
        assert loss.value.item() == close(case["expected"]["loss"]["data"])
        assert {key: value.item() for key, value in loss.metrics.items()} == close(case["expected"]["metrics"])
        return
    estimator = "low_var_kl" if name == "kl_low_var_clamped" else name.removeprefix("kl_")
    estimated = kl(estimator, inputs["logprob"], inputs["ref_logprob"], inputs.get("old_logprob"))
    expected = torch.tensor(case["expected"]["data"])
    assert estimated.dtype == torch.float32 and torch.allclose(estimated, expected, rtol=1e-5, atol=1e-6)


# --- LightRFT ---------------------------------------------------------------------------------------------------------


def lightrft(name: str) -> tuple[dict[str, Any], Any]:
    case = LIGHTRFT[name]
    return {key: decoded(value) for key, value in case["inputs"].items()}, case["lightrft_output"]


@pytest.mark.parametrize("name", ["kl_k2", "kl_k3"])
def test_token_kl(name):
    inputs, expected = lightrft(name)
    estimated = token_kl(
        inputs["log_probs"], inputs["log_probs_base"], inputs["action_mask"], estimator=inputs["kl_estimator"]
    )
    assert torch.allclose(estimated, decoded(expected), atol=1e-6)


@pytest.mark.parametrize("name", ["reward_with_kl_penalty", "reward_clip_range_and_negative_coef"])
def test_compute_reward(name):
    inputs, expected = lightrft(name)
    clip = tuple(inputs["reward_clip_range"]) if "reward_clip_range" in inputs else None
    penalized, report = penalize(
        inputs["r"], inputs["kl"], inputs["action_mask"], coef=inputs["kl_coef"], reward_clip=clip
    )
    assert torch.allclose(penalized, decoded(expected), atol=1e-6)
    assert report.count("no actions") == 0


def test_compute_reward_packed():
    inputs, expected = lightrft("reward_packed_lists")
    penalized, _ = penalize(inputs["r"], inputs["kl"], coef=inputs["kl_coef"])
    assert [len(row) for row in penalized] == inputs["num_actions"]
    assert all(
        torch.allclose(row, decoded(encoded), atol=1e-6) for row, encoded in zip(penalized, expected, strict=True)
    )


def test_reward_of_a_row_without_actions():
    inputs, _ = lightrft("reward_all_masked_row")
    mask = torch.tensor(inputs["action_mask"])
    penalized, report = penalize(inputs["r"], inputs["kl"], mask, coef=inputs["kl_coef"])
    assert (penalized == 0).all() and report.which("no actions") == [0]


def test_adaptive_kl():
    inputs, expected = lightrft("adaptive_kl")
    control = AdaptiveKL(inputs["init"], inputs["target"], inputs["horizon"])
    coefficients = []
    for measured, steps in inputs["updates"]:
        control.update(measured, steps)
        coefficients.append(control.value)
    assert coefficients == close(expected)


def actor() -> dict[str, torch.Tensor]:
    inputs, _ = lightrft("ppo_policy_loss")
    names = {"action_mask": "mask", "log_probs": "new_logprobs", "old_log_probs": "old_logprobs"}
    return {names.get(key, key): value for key, value in inputs.items()}


LIKE_LIGHTRFT: dict[str, Any] = {"mode": "seq-mean-token-mean", "dual_clip": None}


def test_ppo_policy_loss():
    data, expected = actor(), LIGHTRFT["ppo_policy_loss"]["lightrft_output"]["data"]
    assert ppo(**data, **LIKE_LIGHTRFT).value.item() == close(expected)
    regular = kl_loss(
        data["new_logprobs"], data["old_logprobs"], data["mask"], estimator="k3", coef=0.01, mode="seq-mean-token-mean"
    )
    total = LIGHTRFT["total_actor_loss_kl_loss_k3"]
    assert total["inputs"]["kl_coef"] == 0.01
    loss = ppo(**data, **LIKE_LIGHTRFT).value + regular.value
    assert loss.item() == close(total["lightrft_output"]["data"])


def test_ppo_policy_loss_with_a_fully_masked_row():
    data = actor()
    mask = torch.tensor(LIGHTRFT["ppo_policy_loss_fully_masked_row_nan"]["inputs"]["action_mask"])
    masked = ppo(**(data | {"mask": mask}), **LIKE_LIGHTRFT)
    rest = ppo(**{key: value[1:] for key, value in (data | {"mask": mask}).items()}, **LIKE_LIGHTRFT)
    assert masked.value.item() == close(rest.value.item()) and masked.value.isfinite()


@pytest.mark.parametrize(("name", "clip"), [("value_loss_clipped", 0.2), ("value_loss_unclipped", None)])
def test_value_loss(name, clip):
    inputs, expected = lightrft(name)
    values, returns, mask, old = (
        None if key not in inputs else torch.tensor(inputs[key])
        for key in ("values", "returns", "action_mask", "old_values")
    )
    assert value_loss(values, returns, mask, old, clip=clip).value.item() == close(expected["data"])


COVERED_LIGHTRFT = {
    "kl_k2",
    "kl_k3",
    "reward_with_kl_penalty",
    "reward_clip_range_and_negative_coef",
    "reward_all_masked_row",
    "reward_packed_lists",
    "adaptive_kl",
    "ppo_policy_loss",
    "ppo_policy_loss_fully_masked_row_nan",
    "value_loss_clipped",
    "value_loss_unclipped",
    "total_actor_loss_kl_loss_k3",
}
COVERED_TRINITY = {name for name, case in TRINITY.items() if case["area"] in AREAS}


def test_every_difference_has_its_reason():
    assert set(LIGHTRFT) >= COVERED_LIGHTRFT
    assert {*PLAIN, *KL_CASES, "chord_mu", "loss_mix_metric_scale"} | set(WHY_DIFFERENT) >= COVERED_TRINITY
    wrong = {name for name in COVERED_TRINITY if TRINITY[name]["quirk"]}
    wrong |= {name for name in COVERED_LIGHTRFT if LIGHTRFT[name]["kind"] != "conform"}
    assert wrong == set(WHY_DIFFERENT)
