"""The trainer keeps an engine in sync that has weights of its own, and stops if it does not follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import rollbook
from rollbook.models import Actor
from rollbook.rollout import StaleWeightsError, TransformersEngine
from rollbook.train import AlgorithmConfig, OptimizerConfig, Prompts, Trainer
from tests import tiny


def trainer(engine: Any, actor: Actor, **options: Any) -> Trainer:
    return Trainer(
        actor,
        AlgorithmConfig.preset("grpo", group_size=4, kl_coef=0.0),
        rollbook.open("memory:"),
        prompts=Prompts([{"prompt": [5, 6]}, {"prompt": [7]}]),
        prompts_per_step=2,
        reward=lambda response_ids: response_ids[0] / 300,
        sampling={"max_tokens": 3},
        optimizer=OptimizerConfig(lr=1e-2),
        engine=engine,
        **options,
    )


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2]), (2, [0, 0, 2]), (None, [0, 0, 0])])
def test_sync_every(every: int | None, expected: list[int]) -> None:
    actor = Actor(tiny.llama())
    engine = TransformersEngine(copy.deepcopy(actor.model))
    training = trainer(engine, actor, sync_every=every)
    reports = training.run(3)
    versions = [{int(record.policy_versions.max()) for record in training.book.get(report.uids)} for report in reports]
    assert versions == [{version} for version in expected]
    synced = ["sync/logprob_difference" in report for report in reports]
    assert synced == [every is not None, every == 1, every is not None]
    assert all(report["sync/logprob_difference"] < 1e-5 for report, was in zip(reports, synced, strict=True) if was)


def test_a_stale_engine_stops_the_run() -> None:
    class Stale(TransformersEngine):
        """Takes the version but not the weights."""

        def update_weights(self, source: Any, version: int) -> None:
            self.version = version

    actor = Actor(tiny.llama())
    training = trainer(Stale(copy.deepcopy(actor.model)), actor)
    training.step()  # still the same weights
    with pytest.raises(StaleWeightsError, match="does not sample from the policy's weights"):
        training.step()


def test_a_tolerance() -> None:
    actor = Actor(tiny.llama())
    training = trainer(TransformersEngine(copy.deepcopy(actor.model)), actor, sync_tolerance=1e-12)
    with pytest.raises(StaleWeightsError, match="at most 1e-12"):
        training.run(5)


def test_memory_of_all_engines_is_released_before_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    monkeypatch.setattr(TransformersEngine, "release_memory", lambda engine: released.append(engine))
    actor = Actor(tiny.llama())
    engine = TransformersEngine(copy.deepcopy(actor.model))
    training = trainer(engine, actor)
    training.evaluate(Prompts([{"prompt": [5, 6]}]), training.reward)  # samples from an engine of its own
    training.step()
    assert {id(other) for other in released} == {id(engine), id(TransformersEngine(actor))}
