"""From a configuration to a run's parts: engine, environment, book, trainer; models and prompts are next door.

Invariant: what is built follows from the configuration alone; nothing is written before all of it could be built, but
for the run's folder and its book.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.core.metrics import advise
from rollbook.models import Actor
from rollbook.models.heads import text_config
from rollbook.rollout.environment import EnvironmentConfig
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.asking import check_readable, prompts_of, reward_of
from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.schema import Config
from rollbook.train.config.secrets import expanded
from rollbook.train.data import Prompts
from rollbook.train.modelling import actor_of, called, loading, models_of
from rollbook.train.naming import resolve
from rollbook.train.optimizer import Optimizing
from rollbook.train.pipeline import Models
from rollbook.train.trainer import Trainer


def settle(config: Config) -> torch.device:
    """Torch's threads, seed and determinism as the configuration has them; the device of the models."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    random.seed(config.seed)  # of no use to this library, but rewards and environments of the user's may ask them
    np.random.seed(config.seed)
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(config.device)
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(found.type, 1)
    if (found.index or 0) >= there:
        raise ConfigError("device", f"got {config.device!r}, and torch sees {there} of that kind here")
    return found


def sampling_of(config: Config, actor: Actor | None = None) -> dict[str, Any]:
    """Return the sampling options; rollouts of single turns are limited to the positions of `actor`, if given."""
    options = {name: option for name, option in vars(config.sampling).items() if option not in ((), None, {})}
    if config.environment.function is None:
        options["prompt_overflow"] = config.data.overflow
        longest = config.data.max_prompt_tokens
        if longest is None and actor is not None and config.algorithm.needs_rollouts:
            longest = getattr(text_config(actor), "max_position_embeddings", None) or 1 << 20
        if longest is not None:
            options["max_prompt_tokens"] = int(longest)
    if config.engine.kind == "openai" and config.model.suppress:
        options["suppress"] = list(config.model.suppress)
    return options


def engine_of(config: Config, actor: Actor) -> Any:
    """Who samples."""
    given = config.engine
    if given.kind == "transformers":
        return TransformersEngine(actor)
    from rollbook.rollout import OpenAIEngine

    key = None if given.api_key_env is None else os.environ.get(given.api_key_env)
    try:
        made = OpenAIEngine(
            expanded(given.url, "engine.url"),
            given.model,
            actor.tokenizer,
            api_key=key,
            timeout=given.timeout,
            concurrency=given.concurrency,
            **expanded(given.options, "engine.options"),
        )
    except TypeError as error:
        raise ConfigError("engine.options", str(error)) from None
    weighed = "" if config.algorithm.correction is not None else "; algorithm.correction weighs that"
    advise(
        f"engine.url: the server at {given.url} keeps the weights that it has, whatever is trained here, and what it "
        f"samples is of an ever older policy{weighed}. Evaluations sample with the weights that are trained"
    )
    return made


def environment_of(config: Config, actor: Actor) -> EnvironmentConfig | None:
    """Return how episodes are played; `None` without an environment."""
    given = config.environment
    if given.function is None:
        return None
    function = resolve(str(given.function), name="environment.function")
    options = expanded(given.options, "environment.options")
    return EnvironmentConfig(
        factory=(lambda prompt: function(prompt, **options)) if options else function,
        rewards=given.rewards,
        max_turns=given.max_turns,
        context_limit=given.context_limit,
        on_cut=given.on_cut,
        workers=given.workers,
        episode=given.episode,
        tokenizer=actor.processor or actor.tokenizer,
    )


def expert_of(config: Config) -> Book | None:
    """Open the book of the expert's records, if there is one."""
    given = config.intake.expert
    return None if given is None else open_book(expanded(given, "intake.expert"), mode="r")


def trainer_of(config: Config, models: Models, prompts: Prompts, reward: Any, book: Book) -> Trainer:
    """The trainer of a run."""
    last = {"steps": config.steps} if config.steps else {}
    optimizer = _ending(config.optimizer, last)
    critic = None if config.critic_optimizer is None else _ending(config.critic_optimizer, last)
    try:
        expert = expert_of(config)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError("intake.expert", f"got {config.intake.expert!r}, but {error}") from error
    success = config.evaluation.success
    return Trainer(
        models.policy,
        config.algorithm,
        book,
        prompts=prompts,
        reward=reward if config.algorithm.needs_rollouts else None,
        engine=engine_of(config, models.policy) if config.algorithm.needs_rollouts else None,
        environment=environment_of(config, models.policy),
        sampling=sampling_of(config, models.policy),
        prompts_per_step=config.batch.prompts,
        critic=models.critic,
        reference=models.reference,
        teacher=models.teacher,
        optimizer=optimizer,
        critic_optimizer=critic,
        batching=config.batch.batching(),
        precision=config.model.precision,
        nonfinite_limit=config.nonfinite_limit,
        intake=config.intake.intake(),
        expert=expert,
        seed=config.seed,
        folder=config.folder,
        keep=config.saving.keep,
        success=success if isinstance(success, float) else 1.0,
    )


def _ending(given: Optimizing, last: Mapping[str, Any]) -> Optimizing:
    """A schedule that does not say when it ends, ends with the run."""
    return dataclasses.replace(given, **last) if given.steps is None and last else given


__all__ = [
    "Models",
    "actor_of",
    "called",
    "check_readable",
    "engine_of",
    "environment_of",
    "expert_of",
    "loading",
    "models_of",
    "prompts_of",
    "reward_of",
    "sampling_of",
    "settle",
    "trainer_of",
]
