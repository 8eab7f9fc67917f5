"""From a configuration to a run's parts: models, prompts, rewards, maker, book, trainer.

Invariant: what is built follows from the configuration alone; nothing is written before all of it could be built, but
for the run's folder and its book.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.book.book import Book
from rollbook.book.opening import open as open_book
from rollbook.experience_maker import NaiveExperienceMaker
from rollbook.models import Actor
from rollbook.models import Critic as CriticModel
from rollbook.models.heads import text_config
from rollbook.models.loading import transformers_module
from rollbook.rewards.choose import as_reward
from rollbook.rollout.types import Prompt
from rollbook.train.completing import maker_config
from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.parts import Data, Model, Reward, Teacher
from rollbook.train.config.schema import Config
from rollbook.train.data import Prompts
from rollbook.train.episodes import EpisodeMaker
from rollbook.train.naming import resolve
from rollbook.train.optimizing import Optimizing
from rollbook.train.supervised import SupervisedMaker
from rollbook.train.trainer import Trainer


@dataclass
class Models:
    """A run's models, before anything was learnt."""

    actor: Actor
    reference: Any = None
    teacher: Any = None
    critic: Any = None


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
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- models -----------------------------------------------------------------------------------------------------------


def actor_of(config: Config, device: torch.device) -> Actor:
    """The policy, with the weights that the run begins with."""
    made = _model("model", config.model, config, device, trainable=True)
    if config.model.gradient_checkpointing:
        made.gradient_checkpointing_enable()
    engine = made.engine
    engine.max_batch_rows, engine.max_batch_tokens = config.engine.max_batch_rows, config.engine.max_batch_tokens
    return made


def _model(name: str, given: Model | Teacher, config: Config, device: torch.device, *, trainable: bool) -> Actor:
    own = config.model
    dtype = torch.bfloat16 if own.precision == "bfloat16" else torch.float32
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "attn_implementation": own.attention,
        "temperature": config.sampling.temperature,
        "suppress": own.suppress,
        "trainable": trainable,
    }
    if isinstance(given, Model):
        transformers = transformers_module()
        if given.tokenizer is not None:
            options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(given.tokenizer)
        if given.processor is not None:
            options["processor"] = transformers.AutoProcessor.from_pretrained(given.processor)
        if given.lora is not None:
            options["lora"] = dict(given.lora)
    if given.path is not None:
        return Actor(given.path, **options)
    if given.config is not None:
        torch.manual_seed(config.seed)
        return Actor(transformers_module().AutoConfig.for_model(**given.config), **options)
    if given.builder is None:
        raise ConfigError(name, "got none, expected one of path, config, builder")
    made = called(f"{name}.builder", given.builder, given.options, config.seed)
    if isinstance(made, Actor):
        return made.to(device)
    model, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        got = type(made).__name__
        raise ConfigError(
            f"{name}.builder", f"{given.builder} gave {got}, expected an Actor, or a model and its tokenizer"
        )
    if tokenizer is not None:
        # A processor has the tokenizer of its texts.
        whole = hasattr(tokenizer, "image_processor")
        options.setdefault("processor" if whole else "tokenizer", tokenizer)
    return Actor(model, **options)


def called(name: str, target: str, options: Mapping[str, Any], seed: int) -> Any:
    """What a user's function gives, called with its options and, where it takes one and is not told, the run's seed."""
    function = resolve(target, name=name)
    if not callable(function):
        raise ConfigError(name, f"got {target!r}, which is a {type(function).__name__}, expected a function")
    takes = inspect.signature(function).parameters
    given = {"seed": seed, **options} if "seed" in takes else dict(options)
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ConfigError(name, f"{target} cannot be called with {given}: {error}") from None
    return function(**given)


def models_of(config: Config, actor: Actor, device: torch.device) -> Models:
    """All models, once the policy has the weights that training begins with (which reference and critic copy)."""
    own, made = config.algorithm, Models(actor)
    if own.needs_reference:
        made.reference = actor.reference()
        if config.reference is not None:
            made.reference = Actor(
                config.reference,
                dtype=actor.dtype,
                device=device,
                temperature=actor.temperature,
                suppress=actor.suppress,
                trainable=False,
            )
    if own.needs_teacher:
        made.teacher = _model("teacher", config.teacher, config, device, trainable=False)
    if own.needs_critic:
        options: dict[str, Any] = {"dtype": actor.dtype, "device": device, "value_head": config.critic.value_head}
        if config.critic.path is not None:
            made.critic = CriticModel(config.critic.path, **options)
        elif config.critic.config is not None:
            made.critic = CriticModel(transformers_module().AutoConfig.for_model(**config.critic.config), **options)
        else:
            made.critic = CriticModel(trunk_from=actor, **options)
        if config.model.gradient_checkpointing:
            made.critic.gradient_checkpointing_enable()
    return made


# --- what is asked, and what it is worth ----------------------------------------------------------------------------


def prompts_of(config: Config) -> tuple[Prompts, Prompts | None]:
    """The prompts to train on, and those to evaluate with, if there are any."""
    given = config.data
    if given.function is not None:
        found = _shaped(_from_function("data", given.function, given.options, config), config, given.limit)
    elif given.path is not None:
        found = _shaped(_from_file(given.path, given, config), config, None)
    else:
        raise ConfigError("data", "got none, expected one of path, function")
    held: Prompts | None = None
    if given.held_out:
        found, held = found.split(given.held_out if given.held_out < 1 else int(given.held_out), seed=config.seed)
    if config.evaluation.data is not None:
        held = _shaped(_from_file(config.evaluation.data, given, config), config, None)
    elif config.evaluation.function is not None:
        asked = config.evaluation
        held = _shaped(_from_function("evaluation", str(asked.function), asked.options, config), config, None)
    if held is not None and config.evaluation.prompts is not None and len(held) > config.evaluation.prompts:
        held = held.split(config.evaluation.prompts, seed=config.seed)[1]
    if not config.algorithm.needs_maker:
        found.require(*(("chosen", "rejected") if config.algorithm.pairs else ("response",)))
    if config.warmup.steps:
        found.require("response")
    return found, held


def _from_function(section: str, target: str, options: Mapping[str, Any], config: Config) -> Prompts:
    given = config.data
    return Prompts(
        lambda: called(f"{section}.function", target, options, config.seed),
        seed=config.seed,
        shuffle=given.shuffle,
        name=target,
        columns=dict(given.columns) or None,
        keep=given.keep,
    )


def _from_file(path: str, given: Data, config: Config) -> Prompts:
    return Prompts.from_file(
        path,
        split=given.split,
        subset=given.subset,
        columns=dict(given.columns) or None,
        keep=given.keep,
        limit=given.limit,
        seed=config.seed,
        shuffle=given.shuffle,
    )


def _shaped(prompts: Prompts, config: Config, limit: int | None) -> Prompts:
    """Plain texts as chats, and a system message before them, where that is asked for; the first `limit` rows."""
    given = config.data
    if not given.chat and given.system is None and limit is None:
        return prompts
    made = [_chat(one, given).replace(eid=None) for one in prompts.every()[:limit]]
    return Prompts(made, seed=config.seed, shuffle=given.shuffle, name=prompts.name)


def _chat(prompt: Prompt, given: Data) -> Prompt:
    messages = prompt.messages
    if given.chat and prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    if messages is None:
        return prompt
    if given.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": given.system}, *messages]
    return prompt.replace(text=None, messages=messages)


def reward_of(rewards: tuple[Reward, ...]) -> Any:
    """One reward from all that are given; `None` if there are none."""
    if not rewards:
        return None
    parts = [as_reward(_source(one), **_reward_options(one)) for one in rewards]
    if len(parts) == 1 and rewards[0].weight == 1.0 and rewards[0].name is None:
        return parts[0]
    names = [one.name or f"{_called(one)}" for one in rewards]
    names = [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]
    return as_reward(dict(zip(names, parts, strict=True)), weights=[one.weight for one in rewards])


def _source(one: Reward) -> Any:
    if one.remote is not None:
        return one.remote[0] if len(one.remote) == 1 else list(one.remote)
    return one.function or one.recipe or one.model


def _reward_options(one: Reward) -> dict[str, Any]:
    several = one.remote is not None and len(one.remote) > 1
    return {**one.options, "replicas": True} if several else dict(one.options)


def _called(one: Reward) -> str:
    if one.remote is not None:
        return "remote"
    if one.recipe is not None:
        return "recipe"
    return Path(str(one.function or one.model).rpartition(":")[2]).stem


# --- the whole ------------------------------------------------------------------------------------------------------


def generate_of(config: Config) -> dict[str, Any]:
    """The options of sampling."""
    made = {name: value for name, value in vars(config.sampling).items() if value not in ((), None, {})}
    if config.environment.function is None and config.data.max_prompt_tokens is not None:
        made |= {"max_prompt_tokens": config.data.max_prompt_tokens, "prompt_overflow": config.data.overflow}
    return made


def engine_of(config: Config, actor: Actor) -> Any:
    """Who samples."""
    given = config.engine
    if given.kind == "transformers":
        return actor.engine
    from rollbook.rollout import OpenAIEngine

    key = None if given.api_key_env is None else os.environ.get(given.api_key_env)
    if given.api_key_env is not None and key is None:
        raise ConfigError("engine.api_key_env", f"got {given.api_key_env!r}, which is not set in the environment")
    return OpenAIEngine(
        str(given.url),
        given.model,
        actor.tokenizer,
        api_key=key,
        timeout=given.timeout,
        concurrency=given.concurrency,
        **given.options,
    )


def maker_of(config: Config, models: Models, reward: Any) -> Any:
    """Who makes experience."""
    own, actor = config.algorithm, models.actor
    if not own.needs_maker:
        longest = config.data.max_prompt_tokens
        total = None if longest is None else longest + config.sampling.max_tokens
        return SupervisedMaker(
            actor.tokenizer, "dpo" if own.pairs else "sft", processor=actor.processor, max_tokens=total
        )
    how = maker_config(own, seed=config.seed, token_budget=config.batch.token_budget, progress=False)
    engine = engine_of(config, actor)
    shared = {"config": how, "engine": engine, "teacher": models.teacher}
    if config.environment.function is not None:
        given = config.environment
        function, options = resolve(str(given.function), name="environment.function"), dict(given.options)
        return EpisodeMaker(
            actor,
            (lambda prompt: function(prompt, **options)) if options else function,
            tokenizer=actor.processor or actor.tokenizer,
            critic=models.critic,
            initial_model=models.reference,
            kl_controller=own.kl_coef,
            reward=reward,
            rewards=given.rewards,
            max_turns=given.max_turns,
            context_limit=given.context_limit,
            on_cut=given.on_cut,
            workers=given.workers,
            episode=given.episode,
            **shared,
        )
    positions = getattr(text_config(actor), "max_position_embeddings", None)
    longest = config.data.max_prompt_tokens or positions or 1 << 20
    return NaiveExperienceMaker(
        actor,
        models.critic,
        reward if reward is not None else [],
        models.reference,
        actor.tokenizer,
        int(longest),
        own.kl_coef,
        processor=actor.processor,
        **shared,
    )


def trainer_of(config: Config, models: Models, prompts: Prompts, reward: Any, book: Book) -> Trainer:
    """The trainer of a run."""
    last = {"steps": config.steps} if config.steps else {}
    optimizer = _ending(config.optimizer, last)
    critic = None if config.critic_optimizer is None else _ending(config.critic_optimizer, last)
    expert = None if config.intake.expert is None else open_book(config.intake.expert, mode="r")
    success = config.evaluation.success
    return Trainer(
        models.actor,
        maker_of(config, models, reward),
        book,
        config.algorithm,
        prompts=prompts,
        groups=config.batch.prompts,
        generate=generate_of(config),
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
