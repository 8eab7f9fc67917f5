"""Build the parts of a run from its configuration: prompts, rewards, models, engine, book, trainer.

Invariant: weights follow from the configuration and its seed; what cannot be loaded is an error that names the key.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.core.metrics import advise
from rollbook.core.sampling import Prompt
from rollbook.models import Actor
from rollbook.models import Critic as CriticModel
from rollbook.models.head import text_config
from rollbook.models.loading import transformers_module
from rollbook.rewards.functions import MissingExtraError
from rollbook.rewards.recipes import as_reward
from rollbook.rollout.environment import EnvironmentConfig
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.config.schema import Config, Data, Model, Reward, Teacher
from rollbook.train.config.values import ConfigError, expanded
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import Models
from rollbook.train.prompts import Prompts
from rollbook.train.trainer import Trainer
from rollbook.train.user_code import resolve


def actor_of(config: Config, device: torch.device) -> Actor:
    """The policy, with the weights that the run begins with."""
    actor = _model("model", config.model, config, device, trainable=True)
    if config.model.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
    engine = TransformersEngine(actor)
    engine.max_batch_rows, engine.max_batch_tokens = config.engine.max_batch_rows, config.engine.max_batch_tokens
    return actor


def _model(name: str, source: Model | Teacher, config: Config, device: torch.device, *, trainable: bool) -> Actor:
    policy = config.model
    dtype = torch.bfloat16 if policy.precision == "bfloat16" else torch.float32
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "attn_implementation": policy.attention,
        "temperature": config.sampling.temperature,
        "suppress": policy.suppress,
        "trainable": trainable,
    }
    if isinstance(source, Model):
        transformers = transformers_module()
        if source.tokenizer is not None:
            with loading(f"{name}.tokenizer", source.tokenizer):
                options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(
                    source.tokenizer, trust_remote_code=False
                )
        if source.processor is not None:
            with loading(f"{name}.processor", source.processor):
                options["processor"] = transformers.AutoProcessor.from_pretrained(
                    source.processor, trust_remote_code=False
                )
        if source.lora is not None:
            options["lora"] = dict(source.lora)
    if source.path is not None:
        with loading(f"{name}.path", source.path):
            return Actor(source.path, **options)
    if source.config is not None:
        torch.manual_seed(config.seed)
        with loading(f"{name}.config", source.config):
            return Actor(transformers_module().AutoConfig.for_model(**source.config), **options)
    if source.builder is None:
        raise ConfigError(name, "got none, expected one of path, config, builder")
    built = called(f"{name}.builder", source.builder, source.options, config.seed)
    if isinstance(built, Actor):
        return _as_asked(built, policy, config, trainable).to(device)
    model, tokenizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        kind = type(built).__name__
        raise ConfigError(
            f"{name}.builder", f"{source.builder} gave {kind}, expected an Actor, or a model and its tokenizer"
        )
    if tokenizer is not None:
        # A processor has the tokenizer of its texts.
        is_processor = hasattr(tokenizer, "image_processor")
        options.setdefault("processor" if is_processor else "tokenizer", tokenizer)
    with loading(f"{name}.builder", source.builder):
        return Actor(model, **options)


def _as_asked(actor: Actor, source: Model, config: Config, trainable: bool) -> Actor:
    """An actor that a function of the user's returned, at the temperature that is sampled at. What else an actor is
    made with cannot be put into one, and is refused rather than ignored."""
    if not trainable:
        actor.trainable = False
        actor.requires_grad_(False).eval()
    else:
        for key in ("lora", "attention", "suppress", "tokenizer", "processor"):
            if getattr(source, key):
                raise ConfigError(
                    f"model.{key}",
                    f"got {getattr(source, key)!r}, but {source.builder} returns an Actor; set it there, or return a "
                    "model and its tokenizer",
                )
    actor.temperature = config.sampling.temperature
    return actor


_OF_ACTOR = {"attn_implementation": "attention", "suppress": "suppress", "lora": "lora"}
"""What `Actor` calls its arguments, and the keys that they come from."""


@contextmanager
def loading(key: str, source: Any) -> Iterator[None]:
    """Have what goes wrong while a model or a tokenizer is loaded name the key that it is wrong with."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        if "trust_remote_code" in message:
            raise ConfigError(
                key, f"got {source!r}, which needs code from its repository, and that is not run; a builder can load it"
            ) from error
        for name, mine in _OF_ACTOR.items():
            if message.startswith((f"{name}:", f"{name}[")):
                raise ConfigError(f"model.{mine}", message.partition(": ")[2]) from error
            if f"`{name}=" in message or (
                mine == "attention" and "ttention" in message and isinstance(error, ImportError)
            ):
                raise ConfigError(f"model.{mine}", message) from error
        if "arget modules" in message:  # peft's words
            raise ConfigError("model.lora.target_modules", message) from error
        if isinstance(source, str) and not Path(source).exists() and isinstance(error, (OSError, ValueError)):
            message = f"got {source!r}, which is no folder here, and nothing that the hub gives: {message}"
        raise ConfigError(key, message) from error


def called(name: str, target: str, options: Mapping[str, Any], seed: int) -> Any:
    """What a user's function gives, called with its options and, where it takes one and is not told, the run's seed."""
    function = resolve(target, name=name)
    if not callable(function):
        raise ConfigError(name, f"got {target!r}, which is a {type(function).__name__}, expected a function")
    takes = inspect.signature(function).parameters
    arguments = {"seed": seed, **options} if "seed" in takes else dict(options)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(name, f"{target} cannot be called with {arguments}: {error}") from None
    arguments = expanded(arguments, f"{name.rpartition('.')[0]}.options")
    return function(**arguments)


def models_of(config: Config, actor: Actor, device: torch.device) -> Models:
    """All models, once the policy has the weights that training begins with (which reference and critic copy)."""
    algorithm, models = config.algorithm, Models(actor)
    if algorithm.needs_reference:
        if config.reference is None:
            models.reference = actor.reference()
        else:
            with loading("reference", config.reference):
                models.reference = Actor(
                    config.reference,
                    dtype=actor.dtype,
                    device=device,
                    temperature=actor.temperature,
                    suppress=actor.suppress,
                    trainable=False,
                )
            _check_words("reference", models.reference, actor)
    if algorithm.needs_teacher:
        models.teacher = _model("teacher", config.teacher, config, device, trainable=False)
        _check_words("teacher", models.teacher, actor)
    if algorithm.needs_critic:
        options: dict[str, Any] = {"dtype": actor.dtype, "device": device, "value_head": config.critic.value_head}
        if config.critic.path is not None:
            with loading("critic.path", config.critic.path):
                models.critic = CriticModel(config.critic.path, **options)
            _check_words("critic.path", models.critic, actor)
        elif config.critic.config is not None:
            with loading("critic.config", config.critic.config):
                models.critic = CriticModel(
                    transformers_module().AutoConfig.for_model(**config.critic.config), **options
                )
            _check_words("critic.config", models.critic, actor)
        else:
            models.critic = CriticModel(backbone_from=actor, **options)
        if config.model.gradient_checkpointing:
            models.critic.gradient_checkpointing_enable()
    return models


def _check_words(name: str, other: Any, actor: Actor) -> None:
    """Refuse a model that cannot read what the policy writes."""
    vocab_size, expected = (getattr(text_config(model), "vocab_size", None) for model in (other, actor))
    if vocab_size is not None and expected is not None and vocab_size < expected:
        raise ConfigError(name, f"got a model of {vocab_size} tokens, expected at least the policy's {expected}")


def prompts_of(config: Config) -> tuple[Prompts, Prompts | None]:
    """The prompts to train on, and those to evaluate with, if there are any."""
    data = config.data
    if data.function is not None:
        prompts = _shaped(_from_function("data", data.function, data.options, config), config, data.limit)
    elif data.path is not None:
        prompts = _shaped(_from_file(data.path, data, config), config, None)
    else:
        raise ConfigError("data", "got none, expected one of path, function")
    held_out: Prompts | None = None
    if data.held_out:
        prompts, held_out = prompts.split(data.held_out if data.held_out < 1 else int(data.held_out), seed=config.seed)
    if config.evaluation.data is not None or config.evaluation.split is not None:
        held_out = _shaped(_evaluation_file(config), config, None)
    elif config.evaluation.function is not None:
        evaluation = config.evaluation
        held_out = _shaped(
            _from_function("evaluation", str(evaluation.function), evaluation.options, config), config, None
        )
    if held_out is not None and config.evaluation.prompts is not None and len(held_out) > config.evaluation.prompts:
        held_out = held_out.split(config.evaluation.prompts, seed=config.seed)[1]
    both = 0 if held_out is None else held_out.shared(prompts)
    if held_out is not None and both:
        advise(f"evaluation: {both} of {len(held_out)} prompts are among those that are trained on")
    if not config.algorithm.needs_rollouts:
        prompts.require(*(("chosen", "rejected") if config.algorithm.pairs else ("response",)))
    if config.warmup.steps:
        prompts.require("response")
    return prompts, held_out


def check_readable(actor: Actor, prompts: Prompts) -> None:
    """Refuse prompts of text where nobody turns them into tokens: each of them would fail."""
    first = prompts.every()[0]
    holder = actor.processor if actor.processor is not None else actor.tokenizer
    if holder is None and first.token_ids is None:
        raise ConfigError("model.tokenizer", "got none, and the model has none of its own, expected one: data are text")
    templates = [getattr(holder, "chat_template", None) for holder in (actor.processor, actor.tokenizer)]
    if first.messages is not None and not any(templates):
        raise ConfigError("model.tokenizer", "got one without a chat template, expected one that has: data are chats")


def _from_function(section: str, target: str, options: Mapping[str, Any], config: Config) -> Prompts:
    data = config.data
    return Prompts(
        lambda: called(f"{section}.function", target, options, config.seed),
        seed=config.seed,
        shuffle=data.shuffle,
        name=target,
        columns=dict(data.columns) or None,
        keep=data.keep,
    )


def _from_file(path: str, source: Data, config: Config) -> Prompts:
    return Prompts.from_file(
        path,
        split=source.split,
        subset=source.subset,
        columns=dict(source.columns) or None,
        keep=source.keep,
        limit=source.limit,
        seed=config.seed,
        shuffle=source.shuffle,
    )


def _evaluation_file(config: Config) -> Prompts:
    """Prompts of a file or dataset of their own, or of another split of the data's."""
    evaluation, source = config.evaluation, config.data
    path = evaluation.data if evaluation.data is not None else source.path
    if path is None:
        raise ConfigError("evaluation.split", f"got {evaluation.split!r}, and neither evaluation.data nor data.path")
    # Another dataset has splits of its own; the limit is of the rows to train on.
    split = source.split if evaluation.split is None and path == source.path else evaluation.split
    subset = source.subset if path == source.path else None
    return _from_file(path, dataclasses.replace(source, path=path, split=split, subset=subset, limit=None), config)


def _shaped(prompts: Prompts, config: Config, limit: int | None) -> Prompts:
    """Plain texts as chats, and a system message before them, where that is asked for; the first `limit` rows."""
    settings = config.data
    if not settings.chat and settings.system is None and limit is None:
        return prompts
    shaped = [_chat(prompt, settings).replace(eid=None) for prompt in prompts.every()[:limit]]
    return Prompts(shaped, seed=config.seed, shuffle=settings.shuffle, name=prompts.name)


def _chat(prompt: Prompt, settings: Data) -> Prompt:
    messages = prompt.messages
    if settings.chat and prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    if messages is None:
        return prompt
    if settings.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": settings.system}, *messages]
    return prompt.replace(text=None, messages=messages)


def check_rewards(config: Config) -> None:
    """Build every reward but for models, so that what is wrong with one is known before anything is loaded."""
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, source in enumerate(rewards or ()):
            if source.model is None:
                _reward(f"{key}.{i}", source, None).close()


def reward_of(rewards: tuple[Reward, ...], actor: Actor | None = None, key: str = "rewards") -> Any:
    """One reward from all that are given; `None` if there are none. `actor`: the policy, beside which reward models lie
    and whose tokens they may read otherwise; `key`: where the configuration has them."""
    if not rewards:
        return None
    parts = [_reward(f"{key}.{i}", source, actor) for i, source in enumerate(rewards)]
    if len(parts) == 1 and rewards[0].weight == 1.0 and rewards[0].name is None:
        return parts[0]
    names = [source.name or f"{_called(source)}" for source in rewards]
    names = [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]
    return as_reward(dict(zip(names, parts, strict=True)), weights=[source.weight for source in rewards])


def _reward(key: str, settings: Reward, actor: Actor | None) -> Any:
    kind = next(name for name in ("function", "recipe", "remote", "model") if getattr(settings, name) is not None)
    source = expanded(getattr(settings, kind), f"{key}.{kind}")
    options: dict[str, Any] = expanded(settings.options, f"{key}.options")
    if kind == "model":
        with loading(f"{key}.model", source):
            source = _classifier(source, options, actor)
    elif kind == "remote":
        options |= {"replicas": True} if len(source) > 1 else {}
        source = source[0] if len(source) == 1 else list(source)
    elif kind == "function" and ":" in source and not source.rpartition(":")[0].endswith(".py"):
        source = resolve(source, name=f"{key}.function")
    try:
        return as_reward(source, **options)
    except (MissingExtraError, ValueError) as error:
        place = f"{key}.options" if str(error).startswith("reward: option") else f"{key}.{kind}"
        raise ConfigError(place, str(error).removeprefix("reward: ")) from error


def _classifier(name: str, options: dict[str, Any], actor: Actor | None) -> Any:
    """A sequence classifier; into its options go where it lies, and the tokenizer by which it reads what a policy of
    another one wrote."""
    transformers = transformers_module()
    options.setdefault("name", Path(name).name)
    if actor is not None:
        options.setdefault("device", actor.device)
        options.setdefault("policy_tokenizer", actor.tokenizer)
    words = options.get("tokenizer", name)
    if isinstance(words, str):
        try:
            options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(words, trust_remote_code=False)
        except (OSError, ValueError):
            if "tokenizer" in options:
                raise
            # It has none of its own, and is given the policy's tokens.
    return transformers.AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", trust_remote_code=False)


def _called(source: Reward) -> str:
    if source.remote is not None:
        return "remote"
    if source.recipe is not None:
        return "recipe"
    return Path(str(source.function or source.model).rpartition(":")[2]).stem


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
    device = torch.device(config.device)
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= there:
        raise ConfigError("device", f"got {config.device!r}, and torch sees {there} of that kind here")
    return device


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
    settings = config.engine
    if settings.kind == "transformers":
        return TransformersEngine(actor)
    from rollbook.rollout import OpenAIEngine

    key = None if settings.api_key_env is None else os.environ.get(settings.api_key_env)
    try:
        engine = OpenAIEngine(
            expanded(settings.url, "engine.url"),
            settings.model,
            actor.tokenizer,
            api_key=key,
            timeout=settings.timeout,
            concurrency=settings.concurrency,
            **expanded(settings.options, "engine.options"),
        )
    except TypeError as error:
        raise ConfigError("engine.options", str(error)) from None
    weighed = "" if config.algorithm.correction is not None else "; algorithm.correction weighs that"
    advise(
        f"engine.url: the server at {settings.url} keeps the weights that it has, whatever is trained here, and what "
        f"it samples is of an ever older policy{weighed}. Evaluations sample with the weights that are trained"
    )
    return engine


def environment_of(config: Config, actor: Actor) -> EnvironmentConfig | None:
    """Return how episodes are played; `None` without an environment."""
    settings = config.environment
    if settings.function is None:
        return None
    function = resolve(str(settings.function), name="environment.function")
    options = expanded(settings.options, "environment.options")
    return EnvironmentConfig(
        factory=(lambda prompt: function(prompt, **options)) if options else function,
        rewards=settings.rewards,
        max_turns=settings.max_turns,
        context_limit=settings.context_limit,
        on_truncation=settings.on_truncation,
        workers=settings.workers,
        episode=settings.episode,
        tokenizer=actor.processor or actor.tokenizer,
    )


def expert_of(config: Config) -> Book | None:
    """Open the book of the expert's records, if there is one."""
    path = config.replay.expert
    return None if path is None else open_book(expanded(path, "replay.expert"), mode="r")


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
        raise ConfigError("replay.expert", f"got {config.replay.expert!r}, but {error}") from error
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
        prompts_per_step=config.batch.prompts_per_step,
        critic=models.critic,
        reference=models.reference,
        teacher=models.teacher,
        optimizer=optimizer,
        critic_optimizer=critic,
        minibatch=config.batch.minibatch_config(),
        precision=config.model.precision,
        nonfinite_limit=config.nonfinite_limit,
        replay=config.replay.replay_config(),
        expert=expert,
        seed=config.seed,
        checkpoints=CheckpointConfig(config.folder, **vars(config.checkpoint)),
        success=success if isinstance(success, float) else 1.0,
    )


def _ending(optimizer: OptimizerConfig, last: Mapping[str, Any]) -> OptimizerConfig:
    """A schedule that does not say when it ends, ends with the run."""
    return dataclasses.replace(optimizer, **last) if optimizer.steps is None and last else optimizer


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
