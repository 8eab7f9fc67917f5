"""The stages of the pipeline in one call, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollbook import EID, Experiences
from rollbook.core.experiences import as_experiences
from rollbook.core.metrics import StepMetrics
from rollbook.rollout import Engine, EnvironmentConfig, Prompt, Sampling, TransformersEngine
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.pipeline import Models, add_greedy_baseline, annotate, estimate, generate, score
from rollbook.train.trainer import rollout_metrics


def complete(
    records: Any,
    algorithm: AlgorithmConfig,
    *,
    actor: Any = None,
    reference: Any = None,
    critic: Any = None,
    max_tokens: int | None = None,
    expert: Sequence[bool] | None = None,
) -> Experiences:
    """Records with all columns that an algorithm reads, as a trainer completes what it leases."""
    models = Models(actor, reference, critic)
    annotated = annotate(as_experiences(records), algorithm, models, old_logprobs="engine")
    return estimate(annotated, algorithm, max_tokens=max_tokens, expert=expert)


class Player:
    """Episodes from prompts to advantages: what `Trainer.collect` does, without a trainer."""

    def __init__(
        self,
        environment: Any,
        *,
        actor: Any = None,
        engine: Engine | None = None,
        reward: Any = None,
        models: Models | None = None,
        n: int = 2,
        seed: int = 3,
        token_budget: int = 16384,
        algorithm: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        settings = {"estimator": "grpo", "kl_coef": 0.0, **(algorithm or {})}
        self.algorithm = AlgorithmConfig.preset("grpo", group_size=n, **settings)
        self.environment = EnvironmentConfig(factory=environment, **options)
        self.engine = engine if engine is not None else TransformersEngine(actor)
        self.models = models if models is not None else Models(actor)
        self.reward, self.seed, self.token_budget = reward, seed, token_budget
        self.metrics: dict[str, float] = {}

    def play(self, prompts: Sequence[Any], **options: Any) -> Experiences:
        """Episodes with their rewards alone."""
        collected = StepMetrics()
        records = self._play(prompts, collected, **options)
        self.metrics = collected.values() | rollout_metrics(records)
        return records

    def _play(self, prompts: Sequence[Any], collected: StepMetrics, **options: Any) -> Experiences:
        named = [
            prompt if prompt.eid is not None else prompt.replace(eid=EID(batch=0, task=i, suffix=""))
            for i, prompt in enumerate(map(Prompt.of, prompts))
        ]
        sampling = Sampling.of({"n": self.algorithm.group_size, "seed": self.seed, **options})
        records = generate(self.engine, named, sampling, self.environment, metrics=collected)
        if self.reward is None:
            return records
        tokenizer = self.environment.get_tokenizer(self.engine)
        return score(records, self.reward, tokenizer, prompts=named, metrics=collected)

    def make_records(self, prompts: Sequence[Any], **options: Any) -> Experiences:
        """Episodes with rewards, log-probs where there is an actor, and advantages."""
        entry = self.algorithm.estimator_entry
        greedy = None
        if entry is not None and entry.greedy_baseline:
            greedy = self._play(prompts, StepMetrics(), **{**options, "n": 1, "temperature": 0.0})
        records = self.play(prompts, **options)
        records = records if greedy is None else add_greedy_baseline(records, greedy)
        source: Any = "engine" if self.models.policy is None else "recompute"
        records = annotate(records, self.algorithm, self.models, old_logprobs=source, token_budget=self.token_budget)
        return estimate(records, self.algorithm)
