"""The stages of the pipeline by themselves: what a reward is given, what is filled, what fails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rollbook import EID, Experience, Experiences
from rollbook.core.metrics import StepMetrics
from rollbook.models import Actor
from rollbook.rewards import RewardInput
from rollbook.rewards.types import Reward, RewardResult
from rollbook.rollout import Line, Prompt, Sampling, ScriptedEngine
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.pipeline import Models, annotate, estimate, find_constant_groups, generate, score
from rollbook.train.trainer import Trainer
from tests import tiny

TOKENIZER = tiny.bytes_()


class Watching(Reward):
    """Keeps what it is given; every response is worth 1."""

    def __init__(self) -> None:
        self.inputs: list[RewardInput] = []

    def __call__(self, inputs: Any) -> RewardResult:
        self.inputs = list(inputs)
        return RewardResult(rewards=[1.0] * len(self.inputs))


def prompts(folder: Path) -> list[Prompt]:
    Image.new("RGB", (4, 4)).save(folder / "dot.png")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    drawn = [
        Prompt(text="ab", reference="r", label="l", info={"level": 3}),
        Prompt(messages=chat, reference="r"),
        Prompt(messages=[*chat, {"role": "assistant", "content": "so"}]),
        Prompt(text="ab", images=(folder / "dot.png",)),
    ]
    return [prompt.replace(eid=EID(batch=1, task=i, suffix="")) for i, prompt in enumerate(drawn)]


def test_a_group_that_failed_is_not_constant() -> None:
    error = {"reward_error": "no answer"}
    groups = [
        [(1.0, {}), (1.0, {})],
        [(1.0, {}), (math.nan, error)],
        [(math.nan, error), (math.nan, {"error": "timeout"})],
        [(1.0, {}), (0.0, {}), (math.nan, error)],
    ]
    records = [
        Experience(tokens=[1, 2], reward=reward, info=dict(info), eid=EID(batch=1, task=task, run=run))
        for task, rows in enumerate(groups)
        for run, (reward, info) in enumerate(rows)
    ]
    assert find_constant_groups(Experiences(records)) == [0, 1, 2, 3]


def test_a_reward_is_given_of_a_record_what_it_is_given_of_a_sample(tmp_path: Path) -> None:
    with_images = prompts(tmp_path)
    engine = ScriptedEngine(["x", "yy"], TOKENIZER)
    watching, sampling = Watching(), Sampling(n=2, seed=0)
    score(generate(engine, with_images, sampling), watching, TOKENIZER, prompts=with_images)
    samples = ScriptedEngine(["x", "yy"], TOKENIZER).generate(with_images, sampling)
    expected = [RewardInput.of(sample, TOKENIZER) for sample in samples]
    assert len(expected) == len(watching.inputs) == 8
    for actual, reference in zip(watching.inputs, expected, strict=True):
        for name in ("prompt", "response", "reference", "label", "messages", "prompt_ids", "response_ids", "eid"):
            assert getattr(actual, name) == getattr(reference, name), name
        assert list(map(str, actual.images)) == list(map(str, reference.images)) and actual.finish_reason == "stop"
        assert list(map(type, actual.images)) == list(map(type, reference.images)), "a file stays a path"
        assert reference.info.items() <= actual.info.items()
    # Without the prompts nothing that a record names is a file.
    score(generate(engine, with_images, sampling), watching, TOKENIZER)
    assert not any(isinstance(image, Path) for reward_input in watching.inputs for image in reward_input.images)


def test_rewards_that_look_at_ids_alone_need_no_tokenizer() -> None:
    records = generate(ScriptedEngine([[4], [5]]), [Prompt(token_ids=[1])], Sampling(n=2))
    assert score(records, lambda response_ids: float(response_ids[0])).values("reward") == [4.0, 5.0]


def test_failed_samples_and_failed_scores_have_no_reward() -> None:
    def reward(response: str) -> float:
        if response == "no":
            raise ValueError("unreadable")
        return float(len(response))

    engine = ScriptedEngine(["yes", Line(error="down"), "no", "y"], TOKENIZER)
    metrics = StepMetrics()
    single_prompt = [Prompt(text="q", eid=EID(batch=1, task=0, suffix=""))]
    records = score(generate(engine, single_prompt, Sampling(n=4), metrics=metrics), reward, metrics=metrics)
    assert [reward is not None and math.isnan(reward) for reward in records.values("reward")] == [0, 1, 1, 0]
    infos = records.values("info")
    assert infos[1]["error"] == "down" and infos[1]["reward_error"] == "no response: down"
    assert "unreadable" in infos[2]["reward_error"] and "error" not in infos[2]
    assert not records[1].action_mask.any() and records[2].action_mask.all()
    records = estimate(records, AlgorithmConfig.preset("dr_grpo", group_size=4))
    scores = [float(row.advantages[0]) if len(row.advantages) else 0.0 for row in records]
    assert scores == [1.0, 0.0, 0.0, -1.0], "compared with those that have a reward"
    assert {"rollout/seconds", "reward/seconds"} <= metrics.values().keys()


def test_a_reward_must_score_every_sample() -> None:
    class Short(Watching):
        def __call__(self, inputs: Any) -> RewardResult:
            return RewardResult(rewards=[1.0])

    records = generate(ScriptedEngine([[4], [5]]), [Prompt(token_ids=[1])], Sampling(n=2))
    with pytest.raises(ValueError, match="reward: got 1 scores back, expected 2"):
        score(records, Short())


def rows(count: int = 4) -> Experiences:
    return Experiences(
        [
            Experience(
                eid=EID(batch=0, task=0, run=i, suffix=""),
                tokens=[1, 5, 6 + i, 7],
                prompt_length=2,
                reward=float(i),
                logprobs=[-1.0, -2.0],
            )
            for i in range(count)
        ]
    )


def test_only_what_is_missing_is_computed() -> None:
    actor = Actor(tiny.llama(vocab=len(TOKENIZER)), tokenizer=TOKENIZER)
    algorithm, models = AlgorithmConfig.preset("grpo", kl_coef=0.0), Models(actor)
    partly = rows().fill([1, 3], old_logprobs=[torch.tensor([-9.0, -9.0])] * 2)
    records = annotate(partly, algorithm, models)
    assert records[1].old_logprobs.tolist() == [-9.0, -9.0] and records[1].entropy is None
    complete = annotate(rows(), algorithm, models)
    assert torch.allclose(records[0].old_logprobs, complete[0].old_logprobs, atol=1e-6)
    assert annotate(complete, algorithm, Models()) is complete, "nothing is missing: no model is needed"
    engine = annotate(partly, algorithm, Models(), old_logprobs="engine")
    assert [row.old_logprobs.tolist()[0] for row in engine] == [-1.0, -9.0, -1.0, -9.0]
    with pytest.raises(ValueError, match="policy: missing, required to compute 'old_logprobs'"):
        annotate(partly, algorithm, Models())
    entropy = AlgorithmConfig.preset(algorithm, high_entropy_ratio=0.5)
    assert not len(annotate(partly, entropy, models).missing("entropy")), "asked for where the algorithm reads it"


def test_advantages_are_estimated_again_on_request() -> None:
    algorithm = AlgorithmConfig.preset("dr_grpo", group_size=4)
    partly = rows().fill([0], advantages=[[9.0, 9.0]], returns=[[9.0, 9.0]])
    assert [float(row.advantages[0]) for row in estimate(partly, algorithm)] == [9.0, -0.5, 0.5, 1.5]
    again = estimate(partly, algorithm, recompute=True)
    assert [float(row.advantages[0]) for row in again] == [-1.5, -0.5, 0.5, 1.5]
    assert estimate(again, algorithm) is again
    assert estimate(rows(), AlgorithmConfig.preset("sft"))[0].advantages is None
    with pytest.raises(ValueError, match="gae: records lack 'values'|values: got None"):
        estimate(rows(), AlgorithmConfig.preset("ppo", estimator="gae"))
    with pytest.raises(ValueError, match="remax: records lack 'baselines'"):
        estimate(rows(), AlgorithmConfig.preset("grpo", estimator="remax"))
    with pytest.raises(ValueError, match="max_tokens: missing"):
        estimate(rows(), AlgorithmConfig.preset("grpo", overlong_buffer=2))


def test_a_narrowed_mask_is_kept() -> None:
    algorithm = AlgorithmConfig.preset("grpo", estimator="clip_b", estimator_options={"mu": 1.0}, kl_coef=0.0)
    records = estimate(rows().fill(entropy=[[0.1, 9.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]]), algorithm)
    assert [row.action_mask.tolist() for row in records] == [[False, True]] + [[True, True]] * 3


def test_parts_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match="engine: got NoneType, expected an engine"):
        generate(None, [Prompt(text="a")], Sampling())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="actor: got NoneType, expected a Policy such as Actor"):
        Trainer(None, "grpo", None)  # type: ignore[arg-type]
