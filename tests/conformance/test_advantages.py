"""Trinity's and LightRFT's cases for estimators that score rows against their group, or tokens by a teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollbook import Experience, Experiences
from rollbook.algorithms.advantages import grouped, tokenwise
from rollbook.algorithms.registry import ESTIMATORS
from tests.conformance.algorithms import LIGHTRFT, TRINITY, call_of, decoded

CLOSE = {"rel": 1e-5, "abs": 1e-6}

# Trinity's options by our names. Where our default is another, upstream's choice is set.
TRANSLATE = {
    "epsilon": "eps",
    "std_cal_level": "level",
    "enable_step_norm": "step_norm",
    "std_normalize": "normalize",
    "opmd_baseline": "baseline",
    "baseline_shift": "shift",
    "fnorm": "normalize",
    "kl_coef": "coef",
    "lambda_coef": "beta",
}
LEFT_OUT = ("duplicate_experiences", "rank_penalty", "std_threshold", "step_reward_key", "env_state_hash_key")


def records(case: dict[str, Any]) -> Experiences:
    return Experiences(
        Experience(
            eid={"batch": 0, "task": row["task"], "run": row["run"], "step": row.get("step", 0), "suffix": "s"},
            tokens=[1, 2, 3],
            prompt_length=1,
            reward=decoded(row["r"]),
            info=row.get("info"),
        )
        for row in case["inputs"]
    )


def translated(case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name, options = call_of(case)
    renamed = {TRANSLATE.get(key, key): value for key, value in options.items() if key not in LEFT_OUT}
    if "singleton" in ESTIMATORS[name].options:
        renamed["singleton"] = "raw"
    return name, renamed


BY_ROWS = [
    *("adv_grpo_pair", "adv_grpo_four", "adv_grpo_singleton", "adv_grpo_equal", "adv_grpo_batch_std"),
    *("adv_stepwise", "adv_stepwise_norm", "adv_stepwise_batch", "adv_rec_norm", "adv_opmd", "adv_opmd_logavgexp"),
    *("adv_asymre", "adv_reinforce", "adv_gigpo", "adv_gigpo_std_gamma"),
]


@pytest.mark.parametrize("case", BY_ROWS)
def test_trinity_by_rows(case: str) -> None:
    from rollbook.algorithms.advantages import estimate

    name, options = translated(TRINITY[case])
    experiences = records(TRINITY[case])
    estimated = estimate(name, experiences, **options)
    expected = decoded(TRINITY[case]["expected"])
    assert [eid.uid for eid in experiences.eids()] == expected["order"]
    for row, right in zip(estimated.advantages, expected["advantages"], strict=True):
        assert row.tolist() == pytest.approx(right.tolist(), **CLOSE)
    assert np.array_equal(estimated.advantages.values, estimated.returns.values) is expected["returns_equal"]
    for key in ("reward_mean", "reward_std"):
        for end in ("mean", "max", "min"):
            metric = expected["metrics"].get(f"group_advantages/{key}/{end}")
            if metric is not None and case != "adv_grpo_singleton" and name != "rec":
                assert estimated.report.metrics[f"{key}/{end}"] == pytest.approx(metric, rel=1e-5)


def test_trinity_std_threshold_is_a_filter_before_the_estimator() -> None:
    from rollbook.algorithms.advantages import estimate
    from rollbook.algorithms.filters import zero_variance

    experiences = records(TRINITY["adv_grpo_std_threshold"])
    filtered = zero_variance([row.reward for row in experiences], [row.eid.tid for row in experiences])
    estimated = estimate("grpo", experiences.take([i for i, keep in enumerate(filtered.keep) if keep]), singleton="raw")
    expected = decoded(TRINITY["adv_grpo_std_threshold"]["expected"])
    assert [experiences[i].eid.uid for i, keep in enumerate(filtered.keep) if keep] == expected["order"]
    assert [row.tolist() for row in estimated.advantages] == [
        pytest.approx(row.tolist()) for row in expected["advantages"]
    ]
    assert len(experiences) - sum(filtered.keep) == expected["metrics"]["filtered_count"]


def test_trinity_nan_reward_no_longer_poisons_its_group() -> None:
    from rollbook.algorithms.advantages import estimate

    name, options = translated(TRINITY["adv_grpo_nan"])
    options.pop("singleton")
    estimated = estimate(name, records(TRINITY["adv_grpo_nan"]), **options)
    assert [row.tolist() for row in estimated.advantages] == [[0, 0], [0, 0]]
    assert estimated.report.which("missing reward") == ["0/0/0/0/s"]
    assert estimated.report.which("singleton group") == ["0/0/1/0/s"]


def test_trinity_rec_singleton_no_longer_crashes() -> None:
    from rollbook.algorithms.advantages import estimate

    experiences = records(TRINITY["adv_rec_singleton"])
    assert estimate("rec", experiences).advantages[0].tolist() == [0, 0]
    assert estimate("rec", experiences, singleton="raw").advantages[0].tolist() == pytest.approx([0.7, 0.7])


def test_trinity_gigpo_compares_states_within_a_task() -> None:
    from rollbook.algorithms.advantages import estimate

    name, options = translated(TRINITY["adv_gigpo_cross_task"])
    estimated = estimate(name, records(TRINITY["adv_gigpo_cross_task"]), **options)
    assert [row.tolist() for row in estimated.advantages] == [[-1, -1], [1, 1], [-2, -2], [2, 2]]


@pytest.mark.parametrize("case", ["adv_rloo", "adv_grpo_verl", "adv_opd", "adv_clipv_cap"])
def test_trinity_by_batch(case: str) -> None:
    name, options = translated(TRINITY[case])
    data = decoded(TRINITY[case]["inputs"])
    mask = torch.tensor(data["response_mask"])
    inputs = {
        "rewards": torch.tensor(data["token_level_rewards"]).sum(-1),
        "groups": data["uid"],
        "mask": mask,
        "old_logprobs": torch.tensor(data.get("old_log_probs", [[0.0]])),
        "teacher_logprobs": torch.tensor(data.get("teacher_logprobs", [[0.0]])),
        "entropy": torch.tensor(data.get("entropys", [[0.0]])),
        "necs": torch.tensor(data.get("necs", [[0.0]])),
    }
    if name == "clipv":
        options |= {"centered": False, "zero_advantage": "uncapped"}
    estimated = ESTIMATORS.call(name, inputs, **options)
    expected = decoded(TRINITY[case]["expected"])
    for actual, reference in ((estimated.advantages, expected["advantages"]), (estimated.returns, expected["returns"])):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)
    narrowed = estimated.mask if name == "clipv" else mask
    assert torch.equal(narrowed.to(torch.float32), expected["response_mask"])
    if name == "clipv":
        for key in ("frac_clipped", "frac_clipped_pos", "frac_clipped_neg"):
            assert estimated.report.metrics[key] == pytest.approx(expected["metrics"][key])
        assert estimated.report.metrics["std_d"] == pytest.approx(expected["metrics"]["stdD"], rel=1e-5)


def test_clip_v_holds_its_cap_unless_told_otherwise() -> None:
    data = decoded(TRINITY["adv_clipv_cap"]["inputs"])
    estimated = tokenwise.clip_v(
        torch.tensor(data["token_level_rewards"]).sum(-1),
        data["uid"],
        torch.tensor(data["response_mask"]),
        torch.tensor(data["old_log_probs"]),
        torch.tensor(data["entropys"]),
        torch.tensor(data["necs"]),
        mu=0.1,
        max_frac=1e-4,
    )
    assert int((~estimated.mask).sum()) == 1
    assert bool((estimated.advantages[~estimated.mask] < 0).all())


@pytest.mark.parametrize("case", ["adv_jsd", "adv_jsd_beta1"])
def test_jsd_has_the_sign_of_distillation(case: str) -> None:
    name, options = translated(TRINITY[case])
    options = {key: value for key, value in options.items() if key in ("beta", "coef")}
    data = decoded(TRINITY[case]["inputs"])
    student, teacher = torch.tensor(data["old_log_probs"]), torch.tensor(data["teacher_logprobs"])
    estimated = ESTIMATORS.call(name, {"old_logprobs": student, "teacher_logprobs": teacher}, **options)
    assert torch.equal(estimated.advantages.sign(), (teacher - student).sign())
    assert estimated.report.metrics["divergence"] >= 0
    if case == "adv_jsd_beta1":
        torch.testing.assert_close(estimated.advantages, teacher - student)


@pytest.mark.parametrize("case", ["naive_process_rloo", "naive_process_reinforce_baseline", "calc_pre_group_norm"])
def test_lightrft_shaping_by_group(case: str) -> None:
    inputs = LIGHTRFT[case]["inputs"]
    name = inputs.get("advantage_estimator") or inputs["estimator"]
    parts = inputs.get("reward per micro-batch") or inputs["rewards"]
    rewards = [r for part in parts for r in part]
    groups = [i // inputs["n_samples_per_prompt"] for i in range(len(rewards))]
    function = "dr_grpo" if name == "reinforce_baseline" else name
    estimated = ESTIMATORS.call(function, {"rewards": rewards, "groups": groups})
    reference = LIGHTRFT[case]["lightrft_output"]
    reference = reference["rewards"] if isinstance(reference, dict) else reference
    assert estimated.scores.tolist() == pytest.approx([r for part in reference for r in part], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", [name for name in LIGHTRFT if name.startswith("grpo_zero_variance")])
def test_lightrft_equal_rewards_score_exactly_zero(case: str) -> None:
    inputs = LIGHTRFT[case]["inputs"]
    estimated = grouped.grpo(inputs["rewards"][0], ["a"] * inputs["n_samples_per_prompt"])
    assert [estimated.scores.tolist()] == LIGHTRFT[case]["better"]


@pytest.mark.parametrize("case", ["grpo_n1_nan", "rloo_n1_nan"])
def test_lightrft_lone_samples_are_no_nan(case: str) -> None:
    rewards = LIGHTRFT[case]["inputs"]["rewards"][0]
    function = grouped.grpo if case.startswith("grpo") else grouped.rloo
    assert function(rewards, [0, 1]).scores.tolist() == [0, 0]
    assert function(rewards, [0, 1], singleton="raw").scores.tolist() == rewards


@pytest.mark.parametrize("case", ["cpgd_2d_STD_weight", "cpgd_2d_none"])
def test_lightrft_cpgd(case: str) -> None:
    inputs = LIGHTRFT[case]["inputs"]
    mask = torch.tensor(inputs["action_mask"])
    weight = {"STD_weight": "std", "none": "none"}[inputs["weight_factor"]]
    estimated = grouped.cpgd(torch.tensor(inputs["reward"]).sum(-1), ["a", "a"], mask, weight=weight)
    torch.testing.assert_close(estimated.advantages, decoded(LIGHTRFT[case]["lightrft_output"]), rtol=1e-5, atol=1e-6)


def test_lightrft_cpgd_learns_from_one_reward_a_row() -> None:
    inputs = LIGHTRFT["cpgd_1d_reward_all_zero"]["inputs"]
    estimated = grouped.cpgd(inputs["info.reward"], ["a", "a"], torch.tensor(inputs["action_mask"]))
    torch.testing.assert_close(estimated.advantages, torch.tensor([[1.0, 1, 1], [-1, -1, 0]]), rtol=1e-5, atol=1e-5)


def test_lightrft_every_name_of_its_command_line_is_known() -> None:
    names = ("gae", "reinforce", "reinforce++", "rloo", "reinforce_baseline", "group_norm", "grpo", "cpgd")
    assert all(name in ESTIMATORS for name in names)


def test_lightrft_short_last_micro_batch_keeps_its_size() -> None:
    sizes = LIGHTRFT["chunk_misalignment"]["inputs"]["micro-batch sizes"]
    rewards = torch.arange(9.0)
    scores = grouped.grpo(rewards, [i // 3 for i in range(9)]).scores
    assert [len(part) for part in torch.split(scores, sizes)] == LIGHTRFT["chunk_misalignment"]["better"]


def test_steps_are_ordered_by_number() -> None:
    # The last *listed* step was upstream's final one.
    estimated = grouped.step_wise_grpo([1.0, 0.0, 0.0], ["t"] * 3, [0, 0, 1], [1, 0, 0], eps=0.0)
    assert estimated.advantages.tolist() == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)])
