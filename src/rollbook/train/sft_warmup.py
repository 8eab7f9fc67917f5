"""A warm-up: supervised steps before reinforcement, until a model succeeds now and then.

Invariant: what a warm-up does follows from its seed and the rows; it stops at the first look at which the model, by
sampling, succeeds often enough, and the rows it is looked at with are not those that a run is judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.checks import check_float, check_int
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.evaluation import evaluate
from rollbook.train.learner import Learner, MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import Prompts
from rollbook.train.supervised import records_from_answers
from rollbook.train.trainer import AllSamplesFailedError

_ERRORS = ("error", "reward_error")
"""Keys of a record's `info` that say why it has no reward."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """How long to learn from given answers first.

    >>> WarmupConfig(target_accuracy=0.2).steps
    100
    """

    steps: int = 100
    """The most supervised steps."""
    target_accuracy: float | None = None
    """The share of sampled answers that succeed at which it is over; none: all steps are done."""
    eval_interval: int = 5
    """How often to look whether it is over."""
    batch_size: int = 128
    """Rows of each supervised step."""
    eval_prompts: int = 256
    """Rows that are sampled at each look."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3, warmup_steps=30))
    """How weights move meanwhile."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_interval", "batch_size", "eval_prompts"):
            check_int(f"warmup.{name}", getattr(self, name), 0 if name == "steps" else 1)
        if self.target_accuracy is not None:
            check_float("warmup.target_accuracy", self.target_accuracy, 0, 1)


@dataclass(frozen=True)
class Warmed:
    """What a warm-up came to."""

    steps: int
    loss: float
    success: float | None
    """At the last look, of rows that it did not learn from."""


def warm_up(
    actor: Any,
    prompts: Prompts,
    config: WarmupConfig,
    *,
    reward: Any = None,
    sampling: Any = None,
    seed: int = 0,
    precision: str = "float32",
    token_budget: int = 16384,
    on_step: Callable[[int, float, float | None], Any] | None = None,
) -> Warmed:
    """Supervised steps on the prompts' answers (`response`); `on_step(step, loss, success)` is told of each.

    >>> from rollbook.models import Actor
    >>> from rollbook.train.recipes import letters
    >>> model, words = letters.model(hidden=32, heads=1, layers=1)
    >>> done = warm_up(Actor(model, tokenizer=words), Prompts(letters.rows(500)), WarmupConfig(steps=3, batch_size=16))
    >>> done.steps, done.success
    (3, None)
    """
    if config.target_accuracy is not None and reward is None:
        raise ValueError(f"reward: got None, expected one, since warmup.target_accuracy is {config.target_accuracy:g}")
    check: Prompts | None = None
    if config.target_accuracy is not None:
        prompts, check = prompts.split(min(config.eval_prompts, len(prompts) // 2), seed=seed)
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
        shown = prompts.take(config.batch_size, f"warmup-{step}")
        records = records_from_answers(shown, actor.tokenizer, processor=actor.processor)
        loss, done = learner.update(records, step=step).metrics["loss"], step
        look = check is not None and step % config.eval_interval == 0
        if look:
            evaluation = evaluate(TransformersEngine(actor), check, reward, sampling=sampling, step=step, seed=seed)
            if evaluation.failed + evaluation.unscored == len(evaluation.records):
                errors = (info[key] for info in evaluation.records.values("info") for key in _ERRORS if key in info)
                raise AllSamplesFailedError(
                    f"warm-up, step {step}: no sample has a reward; the first: {next(errors, None)}"
                )
            success = evaluation.success
        if on_step is not None:
            on_step(step, loss, success if look else None)
        if config.target_accuracy is not None and success is not None and success >= config.target_accuracy:
            break
    return Warmed(done, loss, success)
