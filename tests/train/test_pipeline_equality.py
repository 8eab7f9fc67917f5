"""The native pipeline against LightRFT's maker: the same records, column by column, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rollbook import Experiences
from rollbook.algorithms.shaping import RunningNorm
from rollbook.compat.lightrft.maker import MakerConfig, NaiveExperienceMaker
from rollbook.models import Actor, Critic
from rollbook.rollout import Prompt, TransformersEngine
from rollbook.train import pipeline
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.prompts import Prompts
from tests.maker_records import make_records

COLUMNS = (
    *("tokens", "prompt_length", "reward", "action_mask", "logprobs", "old_logprobs", "ref_logprobs", "entropy"),
    *("values", "advantages", "returns", "sampling", "info", "metrics", "finish_reason", "group_size"),
    *("policy_versions", "token_level_reward"),
)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo with KL in the reward": {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    "grpo with k3 and a discount": {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k3", "gamma": 0.9},
    "grpo with other eps": {"estimator_options": {"eps": 0.1}, "kl_coef": 0.0},
    "dr_grpo": {"preset": "dr_grpo", "gamma": 0.5},
    "rloo": {"preset": "rloo", "normalize_advantages": "mean_std", "advantage_clip": 0.8},
    "rloo, clipped and overlong": {"preset": "rloo", "reward_clip": (-0.2, 0.2), "overlong_buffer": 2},
    "running norm": {"preset": "rloo", "reward_norm": "std"},
    "running norm minus mean": {"preset": "reinforce++", "reward_norm": "mean_std", "gamma": 0.9},
    "opmd": {"preset": "opmd", "normalize_advantages": "mean"},
    "asymre": {"preset": "asymre"},
    "topr": {"preset": "topr", "normalize_advantages": "mean_std"},
    "rec": {"estimator": "rec", "estimator_options": {"drop": "balance"}},
    "cpgd": {"estimator": "cpgd", "reward_clip": (-0.1, 0.1), "gamma": 0.9},
    "pass_at_k": {"estimator": "pass_at_k", "estimator_options": {"k": 2, "correct": 0.5}},
    "step_wise_grpo": {"estimator": "step_wise_grpo", "kl_coef": 0.5, "kl_in": "reward"},
    "reinforce++": {"preset": "reinforce++", "kl_coef": 0.5, "kl_in": "reward"},
    "reinforce++ with a baseline": {"estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.5, "kl_in": "reward"},
    "remax": {"estimator": "remax", "kl_coef": 0.2, "kl_in": "reward"},
    "ppo": {"preset": "ppo", "group_size": 2, "gamma": 0.9, "lam": 0.8},
    "gae with KL in the reward": {
        "estimator": "gae",
        "kl_coef": 0.5,
        "kl_in": "reward",
        "normalize_advantages": "mean_std",
    },
    "clip_b": {"estimator": "clip_b", "estimator_options": {}},
    "on_policy_distill": {"preset": "on_policy_distill", "group_size": 2},
}


def reward(response_ids: list[int]) -> float:
    return response_ids[0] / 32


def broken_reward(response_ids: list[int]) -> float:
    if response_ids[0] % 3 == 0:
        raise ValueError("no such response")
    return response_ids[0] / 32


def models() -> pipeline.Models:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        eos_token_id=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actors = [Actor(config) for _ in range(3)]
        critic = Critic(config)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return pipeline.Models(actors[0], actors[1], critic, actors[2])


def algorithm_of(case: dict[str, Any]) -> AlgorithmConfig:
    settings = {"group_size": 4, **case}
    return AlgorithmConfig.preset(settings.pop("preset", "grpo"), **settings)


def maker_of(algorithm: AlgorithmConfig, trained: pipeline.Models, scored: Any) -> NaiveExperienceMaker:
    options = dict(algorithm.estimator_options)
    if algorithm.estimator == "reinforce_plus_plus_baseline":
        options["whiten"] = True
    config = MakerConfig(
        advantage_estimator=str(algorithm.estimator),
        estimator_options=options,
        n_samples_per_prompt=algorithm.group_size,
        kl_estimator=algorithm.kl_estimator,
        use_kl_loss=algorithm.kl_in == "loss",
        kl_coef=algorithm.kl_coef,
        advantage_clip=algorithm.advantage_clip,
        advantages_norm=algorithm.normalize_advantages is not None,
        no_advantage_std_norm=algorithm.normalize_advantages == "mean",
        reward_clip_range=algorithm.reward_clip,
        reward_running_norm=algorithm.reward_norm == "std",
        reward_running_norm_minus_mean=algorithm.reward_norm == "mean_std",
        overlong_buffer=algorithm.overlong_buffer > 0,
        overlong_buffer_len=max(algorithm.overlong_buffer, 1),
        gamma=algorithm.gamma,
        lambd=algorithm.lam,
        entropy=True,
        seed=0,
    )
    critic = trained.critic if algorithm.needs_critic else None
    reference = trained.reference if algorithm.kl_coef else None
    teacher = trained.teacher if algorithm.needs_teacher else None
    return NaiveExperienceMaker(
        trained.policy, critic, None, reference, None, 16, None, reward_fn=scored, config=config, teacher=teacher
    )


def rollout(
    algorithm: AlgorithmConfig, trained: pipeline.Models, scored: Any, prompts: list[Prompt], norm: RunningNorm | None
) -> Experiences:
    sampling = algorithm.sampling(max_tokens=5, seed=0, max_prompt_tokens=16, prompt_overflow="right")
    entry = algorithm.estimator_entry
    records = pipeline.generate(TransformersEngine(trained.policy), prompts, sampling)
    records = pipeline.score(records, scored)
    if entry is not None and entry.greedy_baseline:
        greedy = pipeline.generate(
            TransformersEngine(trained.policy), prompts, type(sampling).of(sampling, n=1, temperature=0.0)
        )
        records = pipeline.add_greedy_baseline(records, pipeline.score(greedy, scored))
    records = pipeline.annotate(records, algorithm, trained)
    return pipeline.estimate(records, algorithm, max_tokens=5, reward_norm=norm)


def assert_equal(old: Experiences, new: Experiences, ignored: tuple[str, ...] = ()) -> None:
    assert old.eids() == new.eids()
    for name in COLUMNS:
        if name in ignored:
            continue
        for row, (before, after) in enumerate(zip(old.values(name), new.values(name), strict=True)):
            assert same(before, after), (name, row, before, after)


def same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.dtype == after.dtype and torch.equal(before.nan_to_num(7e7), after.nan_to_num(7e7))
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and all(same(before[name], after[name]) for name in before)
    if isinstance(before, float) and isinstance(after, float):
        return before == after or (math.isnan(before) and math.isnan(after))
    return type(before) is type(after) and before == after


@pytest.mark.parametrize("scored", [reward, broken_reward])
@pytest.mark.parametrize("name", CASES)
def test_records_of_two_steps_are_those_of_the_maker(name: str, scored: Any) -> None:
    algorithm, trained = algorithm_of(CASES[name]), models()
    maker = maker_of(algorithm, trained, scored)
    data = Prompts([{"prompt": [5, 6, 7]}, {"prompt": [7]}, {"prompt": [9, 9]}])
    norm = RunningNorm(minus_mean=algorithm.reward_norm == "mean_std") if algorithm.reward_norm else None
    for step in (1, 2):
        prompts = data.take(3, step)
        old = make_records(maker, prompts, max_tokens=5)
        new = rollout(algorithm, trained, scored, prompts, norm)
        # A baseline was in the maker's batches only.
        assert_equal(old, new, ("info",) if algorithm.estimator == "remax" else ())


def test_another_eps_is_noticed() -> None:
    trained = models()
    maker = maker_of(algorithm_of(CASES["grpo"]), trained, reward)
    prompts = Prompts([{"prompt": [5, 6, 7]}, {"prompt": [7]}]).take(2, 1)
    new = rollout(algorithm_of(CASES["grpo with other eps"]), trained, reward, prompts, None)
    with pytest.raises(AssertionError):
        assert_equal(make_records(maker, prompts, max_tokens=5), new, ("ref_logprobs",))
