"""Warm-up: supervised steps before RL, until the model succeeds in some samples.

Invariant: a warm-up depends only on its seed and the rows. The rows that measure its success are held out from its
training rows, and are not the evaluation rows of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import check_float, check_int
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.evaluation import evaluate
from rollbook.train.learner import Learner, MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import Prompts
from rollbook.train.supervised import records_from_answers
from rollbook.train.trainer import AllSamplesFailedError

if TYPE_CHECKING:
    from rollbook.models import Actor
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rollout.engine import SamplingLike

_ERROR_KEYS = ("error", "reward_error")
"""Keys of `info` with the reason why a record has no reward."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Settings of a supervised warm-up.

    Args:
        steps: Maximum number of supervised steps.
        target_accuracy: Success rate of sampled responses at which the warm-up stops; `None`: after `steps`.
        eval_interval: Steps between measurements of the success rate.
        batch_size: Rows per step.
        eval_prompts: Held-out prompts sampled in each measurement.
        optimizer: Settings of the optimizer.

    >>> WarmupConfig(target_accuracy=0.2).steps
    100
    """

    steps: int = 100
    target_accuracy: float | None = None
    eval_interval: int = 5
    batch_size: int = 128
    eval_prompts: int = 256
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=30))

    def __post_init__(self) -> None:
        for name in ("steps", "eval_interval", "batch_size", "eval_prompts"):
            check_int(f"warmup.{name}", getattr(self, name), 0 if name == "steps" else 1)
        if self.target_accuracy is not None:
            check_float("warmup.target_accuracy", self.target_accuracy, 0, 1)


@dataclass(frozen=True)
class WarmupResult:
    """Result of a warm-up.

    Args:
        steps: Number of steps.
        loss: Loss of the last step.
        success: Last measured success rate; `None` if there is no target.
    """

    steps: int
    loss: float
    success: float | None


def warm_up(
    actor: Actor,
    prompts: Prompts,
    config: WarmupConfig,
    *,
    reward: RewardLike | None = None,
    sampling: SamplingLike = None,
    seed: int = 0,
    precision: str = "float32",
    token_budget: int = 16384,
    on_step: Callable[[int, float, float | None], Any] | None = None,
) -> WarmupResult:
    """Train a policy on the answers (`response`) of prompts.

    Args:
        actor: The policy.
        prompts: Prompts with answers.
        config: Settings.
        reward: Scores sampled responses, for `target_accuracy`.
        sampling: Sampling options of these responses.
        seed: Seed of every random choice.
        precision: As in `Learner`; so is `token_budget`.
        token_budget: Maximum number of tokens in one pass.
        on_step: Called with the step, its loss, and the success rate if it was measured.

    Raises:
        ValueError: There is a target but no reward.
        AllSamplesFailedError: No sample of a measurement has a reward.

    >>> from rollbook.models import Actor
    >>> from rollbook.train.recipes import letters
    >>> model, tokenizer = letters.model(hidden=32, heads=1, layers=1)
    >>> actor = Actor(model, tokenizer=tokenizer)
    >>> result = warm_up(actor, Prompts(letters.rows(500)), WarmupConfig(steps=3, batch_size=16))
    >>> result.steps, result.success
    (3, None)
    """
    if config.target_accuracy is not None and reward is None:
        raise ValueError(f"reward: missing, required by warmup.target_accuracy ({config.target_accuracy:g})")
    held_out: Prompts | None = None
    if config.target_accuracy is not None:
        prompts, held_out = prompts.split(min(config.eval_prompts, len(prompts) // 2), seed=seed)
    learner = Learner(
        actor,
        "sft",
        optimizer=config.optimizer,
        minibatch=MinibatchConfig(token_budget=token_budget),
        precision=precision,
        seed=seed,
    )
    loss, success, done = 0.0, None, 0
    for step in range(1, config.steps + 1):
        batch = prompts.take(config.batch_size, f"warmup-{step}")
        records = records_from_answers(batch, actor.tokenizer, processor=actor.processor)
        loss, done = learner.update(records, step=step).metrics["loss"], step
        measured = held_out is not None and step % config.eval_interval == 0
        if held_out is not None and measured:
            evaluation = evaluate(TransformersEngine(actor), held_out, reward, sampling=sampling, step=step, seed=seed)
            if evaluation.failed + evaluation.unscored == len(evaluation.records):
                errors = (info[key] for info in evaluation.records.values("info") for key in _ERROR_KEYS if key in info)
                raise AllSamplesFailedError(
                    f"warm-up, step {step}: no sample has a reward; the first: {next(errors, None)}"
                )
            success = evaluation.success
        if on_step is not None:
            on_step(step, loss, success if measured else None)
        if config.target_accuracy is not None and success is not None and success >= config.target_accuracy:
            break
    return WarmupResult(done, loss, success)
