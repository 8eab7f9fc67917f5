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
from rollbook.train.config.schema import Config, Data, Model, Reward, Teacher
from rollbook.train.config.values import ConfigError, expanded
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import Models
from rollbook.train.prompts import Prompts
from rollbook.train.trainer import Trainer
from rollbook.train.user_code import resolve


def actor_of(config: Config, device: torch.device) -> Actor:
    """The policy, with the weights that the run begins with."""
    made = _model("model", config.model, config, device, trainable=True)
    if config.model.gradient_checkpointing:
        made.gradient_checkpointing_enable()
    engine = TransformersEngine(made)
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
            with loading(f"{name}.tokenizer", given.tokenizer):
                options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(
                    given.tokenizer, trust_remote_code=False
                )
        if given.processor is not None:
            with loading(f"{name}.processor", given.processor):
                options["processor"] = transformers.AutoProcessor.from_pretrained(
                    given.processor, trust_remote_code=False
                )
        if given.lora is not None:
            options["lora"] = dict(given.lora)
    if given.path is not None:
        with loading(f"{name}.path", given.path):
            return Actor(given.path, **options)
    if given.config is not None:
        torch.manual_seed(config.seed)
        with loading(f"{name}.config", given.config):
            return Actor(transformers_module().AutoConfig.for_model(**given.config), **options)
    if given.builder is None:
        raise ConfigError(name, "got none, expected one of path, config, builder")
    made = called(f"{name}.builder", given.builder, given.options, config.seed)
    if isinstance(made, Actor):
        return _as_asked(made, own, config, trainable).to(device)
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
    with loading(f"{name}.builder", given.builder):
        return Actor(model, **options)


def _as_asked(made: Actor, own: Model, config: Config, trainable: bool) -> Actor:
    """An actor that a function of the user's returned, at the temperature that is sampled at. What else an actor is
    made with cannot be put into one, and is refused rather than ignored."""
    if not trainable:
        made.trainable = False
        made.requires_grad_(False).eval()
    else:
        for one in ("lora", "attention", "suppress", "tokenizer", "processor"):
            if getattr(own, one):
                raise ConfigError(
                    f"model.{one}",
                    f"got {getattr(own, one)!r}, and {own.builder} returns an Actor, which has its own, expected it "
                    "there, or a model and its tokenizer",
                )
    made.temperature = config.sampling.temperature
    return made


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
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            raise ConfigError(
                key, f"got {source!r}, which needs code from its repository, and that is not run; a builder can load it"
            ) from error
        for name, mine in _OF_ACTOR.items():
            if said.startswith((f"{name}:", f"{name}[")):
                raise ConfigError(f"model.{mine}", said.partition(": ")[2]) from error
            if f"`{name}=" in said or (mine == "attention" and "ttention" in said and isinstance(error, ImportError)):
                raise ConfigError(f"model.{mine}", said) from error
        if "arget modules" in said:  # peft's words
            raise ConfigError("model.lora.target_modules", said) from error
        if isinstance(source, str) and not Path(source).exists() and isinstance(error, (OSError, ValueError)):
            said = f"got {source!r}, which is no folder here, and nothing that the hub gives: {said}"
        raise ConfigError(key, said) from error


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
    given = expanded(given, f"{name.rpartition('.')[0]}.options")
    return function(**given)


def models_of(config: Config, actor: Actor, device: torch.device) -> Models:
    """All models, once the policy has the weights that training begins with (which reference and critic copy)."""
    own, made = config.algorithm, Models(actor)
    if own.needs_reference:
        if config.reference is None:
            made.reference = actor.reference()
        else:
            with loading("reference", config.reference):
                made.reference = Actor(
                    config.reference,
                    dtype=actor.dtype,
                    device=device,
                    temperature=actor.temperature,
                    suppress=actor.suppress,
                    trainable=False,
                )
            _check_words("reference", made.reference, actor)
    if own.needs_teacher:
        made.teacher = _model("teacher", config.teacher, config, device, trainable=False)
        _check_words("teacher", made.teacher, actor)
    if own.needs_critic:
        options: dict[str, Any] = {"dtype": actor.dtype, "device": device, "value_head": config.critic.value_head}
        if config.critic.path is not None:
            with loading("critic.path", config.critic.path):
                made.critic = CriticModel(config.critic.path, **options)
            _check_words("critic.path", made.critic, actor)
        elif config.critic.config is not None:
            with loading("critic.config", config.critic.config):
                made.critic = CriticModel(transformers_module().AutoConfig.for_model(**config.critic.config), **options)
            _check_words("critic.config", made.critic, actor)
        else:
            made.critic = CriticModel(backbone_from=actor, **options)
        if config.model.gradient_checkpointing:
            made.critic.gradient_checkpointing_enable()
    return made


def _check_words(name: str, other: Any, actor: Actor) -> None:
    """Refuse a model that cannot read what the policy writes."""
    got, expected = (getattr(text_config(one), "vocab_size", None) for one in (other, actor))
    if got is not None and expected is not None and got < expected:
        raise ConfigError(name, f"got a model of {got} tokens, expected at least the policy's {expected}")


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
    if config.evaluation.data is not None or config.evaluation.split is not None:
        held = _shaped(_evaluation_file(config), config, None)
    elif config.evaluation.function is not None:
        asked = config.evaluation
        held = _shaped(_from_function("evaluation", str(asked.function), asked.options, config), config, None)
    if held is not None and config.evaluation.prompts is not None and len(held) > config.evaluation.prompts:
        held = held.split(config.evaluation.prompts, seed=config.seed)[1]
    both = 0 if held is None else held.shared(found)
    if held is not None and both:
        advise(f"evaluation: {both} of {len(held)} prompts are among those that are trained on")
    if not config.algorithm.needs_rollouts:
        found.require(*(("chosen", "rejected") if config.algorithm.pairs else ("response",)))
    if config.warmup.steps:
        found.require("response")
    return found, held


def check_readable(actor: Actor, prompts: Prompts) -> None:
    """Refuse prompts of text where nobody turns them into tokens: each of them would fail."""
    first = prompts.every()[0]
    holder = actor.processor if actor.processor is not None else actor.tokenizer
    if holder is None and first.token_ids is None:
        raise ConfigError("model.tokenizer", "got none, and the model has none of its own, expected one: data are text")
    templates = [getattr(one, "chat_template", None) for one in (actor.processor, actor.tokenizer)]
    if first.messages is not None and not any(templates):
        raise ConfigError("model.tokenizer", "got one without a chat template, expected one that has: data are chats")


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


def _evaluation_file(config: Config) -> Prompts:
    """Prompts of a file or dataset of their own, or of another split of the data's."""
    asked, given = config.evaluation, config.data
    path = asked.data if asked.data is not None else given.path
    if path is None:
        raise ConfigError("evaluation.split", f"got {asked.split!r}, and neither evaluation.data nor data.path")
    # Another dataset has splits of its own; the limit is of the rows to train on.
    split = given.split if asked.split is None and path == given.path else asked.split
    subset = given.subset if path == given.path else None
    return _from_file(path, dataclasses.replace(given, path=path, split=split, subset=subset, limit=None), config)


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


def check_rewards(config: Config) -> None:
    """Build every reward but for models, so that what is wrong with one is known before anything is loaded."""
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, one in enumerate(rewards or ()):
            if one.model is None:
                _reward(f"{key}.{i}", one, None).close()


def reward_of(rewards: tuple[Reward, ...], actor: Actor | None = None, key: str = "rewards") -> Any:
    """One reward from all that are given; `None` if there are none. `actor`: the policy, beside which reward models lie
    and whose tokens they may read otherwise; `key`: where the configuration has them."""
    if not rewards:
        return None
    parts = [_reward(f"{key}.{i}", one, actor) for i, one in enumerate(rewards)]
    if len(parts) == 1 and rewards[0].weight == 1.0 and rewards[0].name is None:
        return parts[0]
    names = [one.name or f"{_called(one)}" for one in rewards]
    names = [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]
    return as_reward(dict(zip(names, parts, strict=True)), weights=[one.weight for one in rewards])


def _reward(key: str, one: Reward, actor: Actor | None) -> Any:
    kind = next(name for name in ("function", "recipe", "remote", "model") if getattr(one, name) is not None)
    source = expanded(getattr(one, kind), f"{key}.{kind}")
    options: dict[str, Any] = expanded(one.options, f"{key}.options")
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
    known = options.get("tokenizer", name)
    if isinstance(known, str):
        try:
            options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(known, trust_remote_code=False)
        except (OSError, ValueError):
            if "tokenizer" in options:
                raise
            # It has none of its own, and is given the policy's tokens.
    return transformers.AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", trust_remote_code=False)


def _called(one: Reward) -> str:
    if one.remote is not None:
        return "remote"
    if one.recipe is not None:
        return "recipe"
    return Path(str(one.function or one.model).rpartition(":")[2]).stem


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


def _ending(given: OptimizerConfig, last: Mapping[str, Any]) -> OptimizerConfig:
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
