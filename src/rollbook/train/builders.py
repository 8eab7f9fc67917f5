"""Build the parts of a run from its configuration: prompts, rewards, models, engine, trainer.

Invariant: random weights depend only on the configuration and its seed. Errors name the key of the configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.core import __version__
from rollbook.core.checks import suggest
from rollbook.core.metrics import warn_user
from rollbook.core.sampling import Prompt, Sampling
from rollbook.models import Actor
from rollbook.models import Critic as CriticModel
from rollbook.models.head import text_config
from rollbook.models.loading import check_folder, load_classifier, transformers_module
from rollbook.rewards.functions import MissingExtraError
from rollbook.rewards.recipes import as_reward
from rollbook.rewards.types import Reward as RewardSource
from rollbook.rollout.engine import BaseEngine
from rollbook.rollout.environment import EnvironmentConfig
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.config.schema import Config, DataSection, ModelSection, RewardSection, TeacherSection
from rollbook.train.config.values import ConfigError, expand_variables
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import Models
from rollbook.train.prompts import Prompts
from rollbook.train.trainer import Trainer
from rollbook.train.user_code import resolve
from rollbook.train.worker import RolloutConfig, RolloutWorker

if TYPE_CHECKING:
    from rollbook.train.distributed import Distributed


def build_actor(config: Config, device: torch.device) -> Actor:
    """Build the policy with its initial weights.

    Args:
        config: The configuration of the run.
        device: Device of the weights.

    Returns:
        The policy.

    Raises:
        ConfigError: The model, its tokenizer or its adapters cannot be loaded.

    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model", "options": {"hidden": 48}})
    >>> build_actor(config, torch.device("cpu")).config.hidden_size
    48
    """
    check_model_paths(config)
    actor = _build_model("model", config.model, config, device, trainable=True)
    if config.model.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
    engine = TransformersEngine(actor)
    engine.max_batch_rows, engine.max_batch_tokens = config.engine.max_batch_rows, config.engine.max_batch_tokens
    return actor


def check_model_paths(config: Config) -> None:
    """Reject paths of files in the place of folders, before transformers asks the hub for models of these names.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: A model, tokenizer or processor is neither a folder nor possibly a name on the hub.

    >>> check_model_paths(Config(model="org/model"))  # not a path: a name on the hub, which is not asked
    """
    paths = {
        **{f"model.{key}": getattr(config.model, key) for key in ("path", "tokenizer", "processor")},
        "critic.path": config.critic.path,
        "teacher.path": config.teacher.path,
        "reference": config.reference,
        **{f"rewards.{i}.model": reward.model for i, reward in enumerate(config.rewards)},
    }
    for key, path in paths.items():
        if path is not None:
            with _loading(key, path):
                check_folder(path)


def _build_model(
    name: str, source: ModelSection | TeacherSection, config: Config, device: torch.device, *, trainable: bool
) -> Actor:
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
    if isinstance(source, ModelSection):
        transformers = transformers_module()
        if source.tokenizer is not None:
            with _loading(f"{name}.tokenizer", source.tokenizer):
                options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(
                    source.tokenizer, trust_remote_code=False
                )
        if source.processor is not None:
            with _loading(f"{name}.processor", source.processor):
                options["processor"] = transformers.AutoProcessor.from_pretrained(
                    source.processor, trust_remote_code=False
                )
        if source.lora is not None:
            options["lora"] = dict(source.lora)
    if source.path is not None:
        with _loading(f"{name}.path", source.path):
            return Actor(source.path, **options)
    if source.config is not None:
        torch.manual_seed(config.seed)
        with _loading(f"{name}.config", source.config):
            return Actor(transformers_module().AutoConfig.for_model(**source.config), **options)
    if source.builder is None:
        raise ConfigError(name, "missing, expected one of path, config, builder")
    built = _call_function(f"{name}.builder", source.builder, source.options, config.seed)
    if isinstance(built, Actor):
        return _configure_actor(built, policy, config, trainable).to(device)
    model, tokenizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{name}.builder",
            f"{source.builder} returned {type(built).__name__}, expected an Actor, or a model and its tokenizer",
        )
    if tokenizer is not None:
        options.setdefault("processor" if hasattr(tokenizer, "image_processor") else "tokenizer", tokenizer)
    with _loading(f"{name}.builder", source.builder):
        return Actor(model, **options)


def _configure_actor(actor: Actor, source: ModelSection, config: Config, trainable: bool) -> Actor:
    """Set the temperature of an actor that a builder returned.

    Keys that only the constructor of an actor takes are rejected, not ignored.
    """
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


_KEY_OF_ACTOR_ARGUMENT = {"attn_implementation": "attention", "suppress": "suppress", "lora": "lora"}
"""The keys of `model` by the arguments of `Actor` that they set."""


@contextmanager
def _loading(key: str, source: str | Mapping[str, Any]) -> Iterator[None]:
    """Raise errors of loading a model or a tokenizer as `ConfigError` of the key that caused them."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, OSError, ValueError) as error:
        message = " ".join(str(error).split()).removeprefix("model: ")
        if "trust_remote_code" in message:
            raise ConfigError(
                key, f"got {source!r}, which needs code from its repository. Such code is not run; use a builder"
            ) from error
        for argument, model_key in _KEY_OF_ACTOR_ARGUMENT.items():
            if message.startswith((f"{argument}:", f"{argument}[")):
                raise ConfigError(f"model.{model_key}", message.partition(": ")[2]) from error
            if f"`{argument}=" in message or (
                model_key == "attention" and "ttention" in message and isinstance(error, ImportError)
            ):
                raise ConfigError(f"model.{model_key}", message) from error
        if "arget modules" in message:  # an error of peft
            raise ConfigError("model.lora.target_modules", message) from error
        if isinstance(source, str) and not Path(source).exists() and isinstance(error, (OSError, ValueError)):
            message = f"got {source!r}, expected a folder or a name on the hub: {message}"
        raise ConfigError(key, message) from error


def _call_function(name: str, target: str, options: Mapping[str, Any], seed: int) -> Any:
    """Call a user's function with its options and, if it takes a `seed` and none is set, that of the run."""
    function = resolve(target, name=name)
    if not callable(function):
        raise ConfigError(name, f"got {target!r}, which is a {type(function).__name__}, expected a function")
    signature = inspect.signature(function)
    arguments = {"seed": seed, **options} if "seed" in signature.parameters else dict(options)
    key = f"{name.rpartition('.')[0]}.options"
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameters = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        for option in options:
            if option not in parameters and f"unexpected keyword argument {option!r}" in str(error):
                raise ConfigError(
                    f"{key}.{option}", f"unknown option of {target}{suggest(option, parameters)}"
                ) from None
        raise ConfigError(name, f"{target} cannot be called with {arguments}: {error}") from None
    arguments = expand_variables(arguments, key)
    try:
        return function(**arguments)
    except TypeError as error:
        # A function with `**options` passes them on.
        for option in options:
            if f"unexpected keyword argument {option!r}" in str(error):
                raise ConfigError(f"{key}.{option}", f"unknown option of {target}: {error}") from error
        raise


def build_models(config: Config, actor: Actor, device: torch.device) -> Models:
    """Build the models that the algorithm needs in addition to the policy.

    Args:
        config: The configuration of the run.
        actor: The policy with its initial weights, which the reference and the critic copy.
        device: Device of the weights.

    Returns:
        The policy, and the reference, teacher and critic that the algorithm reads.

    Raises:
        ConfigError: A model cannot be loaded, or its vocabulary is smaller than that of the policy.

    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model"}, algorithm={"kl_coef": 0.0})
    >>> cpu = torch.device("cpu")
    >>> build_models(config, build_actor(config, cpu), cpu).reference is None
    True
    """
    algorithm, models = config.algorithm, Models(actor)
    if algorithm.needs_reference:
        if config.reference is None:
            models.reference = actor.reference()
        else:
            with _loading("reference", config.reference):
                models.reference = Actor(
                    config.reference,
                    dtype=actor.dtype,
                    device=device,
                    temperature=actor.temperature,
                    suppress=actor.suppress,
                    trainable=False,
                )
            _check_vocabulary("reference", models.reference, actor)
    if algorithm.needs_teacher:
        models.teacher = _build_model("teacher", config.teacher, config, device, trainable=False)
        _check_vocabulary("teacher", models.teacher, actor)
    if algorithm.needs_critic:
        options: dict[str, Any] = {"dtype": actor.dtype, "device": device, "value_head": config.critic.value_head}
        if config.critic.path is not None:
            with _loading("critic.path", config.critic.path):
                models.critic = CriticModel(config.critic.path, **options)
            _check_vocabulary("critic.path", models.critic, actor)
        elif config.critic.config is not None:
            with _loading("critic.config", config.critic.config):
                models.critic = CriticModel(
                    transformers_module().AutoConfig.for_model(**config.critic.config), **options
                )
            _check_vocabulary("critic.config", models.critic, actor)
        else:
            models.critic = CriticModel(backbone_from=actor, **options)
        if config.model.gradient_checkpointing:
            models.critic.gradient_checkpointing_enable()
    return models


def _check_vocabulary(name: str, model: Actor | CriticModel, actor: Actor) -> None:
    """Reject a model whose vocabulary is smaller than that of the policy."""
    vocab_size, expected = (getattr(text_config(network), "vocab_size", None) for network in (model, actor))
    if vocab_size is not None and expected is not None and vocab_size < expected:
        raise ConfigError(name, f"got a model of {vocab_size} tokens, expected at least the policy's {expected}")


def load_prompts(config: Config) -> tuple[Prompts, Prompts | None]:
    """Load the prompts to train on and those to evaluate on.

    Args:
        config: The configuration of the run.

    Returns:
        The training prompts, and the evaluation prompts or `None`.

    Raises:
        ConfigError: `data` is missing, or the rows lack a column that the algorithm needs.

    >>> rows = {"function": "rollbook.train.recipes.letters:rows", "options": {"count": 10}, "held_out": 4}
    >>> tuple(map(len, load_prompts(Config(data=rows))))
    (6, 4)
    """
    data = config.data
    if data.function is not None:
        prompts = _add_chat(_prompts_from_function("data", data.function, data.options, config), config, data.limit)
    elif data.path is not None:
        prompts = _add_chat(_prompts_from_file(data.path, data, config), config, None)
    else:
        raise ConfigError("data", "missing, expected one of path, function")
    held_out: Prompts | None = None
    if data.held_out:
        prompts, held_out = prompts.split(data.held_out if data.held_out < 1 else int(data.held_out), seed=config.seed)
    if config.evaluation.data is not None or config.evaluation.split is not None:
        held_out = _add_chat(_evaluation_prompts(config), config, None)
    elif config.evaluation.function is not None:
        evaluation = config.evaluation
        held_out = _add_chat(
            _prompts_from_function("evaluation", str(evaluation.function), evaluation.options, config), config, None
        )
    if held_out is not None and config.evaluation.prompts is not None and len(held_out) > config.evaluation.prompts:
        held_out = held_out.split(config.evaluation.prompts, seed=config.seed)[1]
    shared = 0 if held_out is None else held_out.shared(prompts)
    if held_out is not None and shared:
        warn_user(f"evaluation: {shared} of {len(held_out)} prompts are also trained on")
    if not config.algorithm.needs_rollouts:
        answers = ("chosen", "rejected") if config.algorithm.pairs else ("response",)
        _require_columns(prompts, answers, f"algorithm {config.algorithm.name}")
    if config.warmup.steps:
        _require_columns(prompts, ("response",), "warmup")
    return prompts, held_out


def _require_columns(prompts: Prompts, columns: tuple[str, ...], user: str) -> None:
    """Reject rows without the columns that `user` trains on."""
    try:
        prompts.require(*columns)
    except ValueError as error:
        raise ValueError(
            f"{error}, because {user} trains on it; data.columns={{{columns[0]}: NAME}} reads it from another column"
        ) from error


def check_prompts_readable(actor: Actor, prompts: Prompts) -> None:
    """Check that the policy can tokenize the prompts.

    Args:
        actor: The policy.
        prompts: The prompts, of which the first is checked.

    Raises:
        ConfigError: Prompts are texts and there is no tokenizer, or chats and there is no chat template.

    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model"})
    >>> prompts = Prompts([{"prompt": [{"role": "user", "content": "Sort cab."}]}])
    >>> check_prompts_readable(build_actor(config, torch.device("cpu")), prompts)
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: model.tokenizer: got one without a chat template, expected one: the
    prompts are chats
    """
    first = prompts.every()[0]
    holders = (actor.processor, actor.tokenizer)
    if holders == (None, None) and first.token_ids is None:
        raise ConfigError("model.tokenizer", "missing, and the model has none, expected one: the prompts are texts")
    if first.messages is not None and not any(getattr(holder, "chat_template", None) for holder in holders):
        raise ConfigError("model.tokenizer", "got one without a chat template, expected one: the prompts are chats")


def _prompts_from_function(section: str, target: str, options: Mapping[str, Any], config: Config) -> Prompts:
    data = config.data
    return Prompts(
        lambda: _call_function(f"{section}.function", target, options, config.seed),
        seed=config.seed,
        shuffle=data.shuffle,
        name=target,
        columns=dict(data.columns) or None,
        keep=data.keep,
    )


def _prompts_from_file(path: str, source: DataSection, config: Config) -> Prompts:
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


def _evaluation_prompts(config: Config) -> Prompts:
    """Load `evaluation.data`, or another split of `data.path`."""
    evaluation, source = config.evaluation, config.data
    path = evaluation.data if evaluation.data is not None else source.path
    if path is None:
        raise ConfigError("evaluation.split", f"got {evaluation.split!r}, and neither evaluation.data nor data.path")
    # `data.split` and `data.subset` are names of `data.path`; `data.limit` is for training rows.
    split = source.split if evaluation.split is None and path == source.path else evaluation.split
    subset = source.subset if path == source.path else None
    return _prompts_from_file(
        path, dataclasses.replace(source, path=path, split=split, subset=subset, limit=None), config
    )


def _add_chat(prompts: Prompts, config: Config, limit: int | None) -> Prompts:
    """Apply `data.chat` and `data.system` to the first `limit` prompts."""
    settings = config.data
    if not settings.chat and settings.system is None and limit is None:
        return prompts
    rows = [_as_chat(prompt, settings).replace(eid=None) for prompt in prompts.every()[:limit]]
    return Prompts(rows, seed=config.seed, shuffle=settings.shuffle, name=prompts.name)


def _as_chat(prompt: Prompt, settings: DataSection) -> Prompt:
    messages = prompt.messages
    if settings.chat and prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    if messages is None:
        return prompt
    if settings.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": settings.system}, *messages]
    return prompt.replace(text=None, messages=messages)


def check_rewards(config: Config) -> None:
    """Build every reward except models, to find errors before models are loaded.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: A reward cannot be built.

    >>> check_rewards(Config(rewards={"function": "length", "options": {"totl": 9}}))
    Traceback (most recent call last):
        ...
    rollbook.train.config.values.ConfigError: rewards.0.options: option 'totl' is not one of FunctionReward; did you
    mean 'total'? (name, batched, batch_size, pool, workers, time_limit, on_error, total, target, per_unit, max_penalty,
    unit)
    """
    for key, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards)):
        for i, source in enumerate(rewards or ()):
            if source.model is None:
                _build_component(f"{key}.{i}", source, None).close()


def build_reward(
    rewards: tuple[RewardSection, ...],
    actor: Actor | None = None,
    key: str = "rewards",
    device: torch.device | None = None,
) -> RewardSource | None:
    """Build the reward of a run: one source, or the weighted sum of several.

    Args:
        rewards: Sections of the configuration.
        actor: The policy. Reward models read its tokens unless they have a tokenizer.
        key: Path of the sections, for errors.
        device: Device of reward models; `None`: that of the actor.

    Returns:
        The reward, or `None` if there are no sections.

    Raises:
        ConfigError: A source cannot be built.

    >>> sections = (RewardSection(function="exact_match"), RewardSection(function="length", weight=0.1))
    >>> build_reward(sections).rewards.keys()
    dict_keys(['exact_match', 'length'])
    """
    if not rewards:
        return None
    components = [_build_component(f"{key}.{i}", source, actor, device) for i, source in enumerate(rewards)]
    if len(components) == 1 and rewards[0].weight == 1.0 and rewards[0].name is None:
        return components[0]
    names = [source.name or _default_name(source) for source in rewards]
    names = [name if names.count(name) == 1 else f"{name}{names[:i].count(name)}" for i, name in enumerate(names)]
    return as_reward(dict(zip(names, components, strict=True)), weights=[source.weight for source in rewards])


def _build_component(
    key: str, settings: RewardSection, actor: Actor | None, device: torch.device | None = None
) -> RewardSource:
    kind = next(name for name in ("function", "recipe", "remote", "model") if getattr(settings, name) is not None)
    source = expand_variables(getattr(settings, kind), f"{key}.{kind}")
    options: dict[str, Any] = expand_variables(settings.options, f"{key}.options")
    if kind == "model":
        with _loading(f"{key}.model", source):
            source = _load_classifier(source, options, actor, device)
    elif kind == "remote":
        options |= {"replicas": True} if len(source) > 1 else {}
        source = source[0] if len(source) == 1 else list(source)
    elif kind == "function" and ":" in source and not source.rpartition(":")[0].endswith(".py"):
        source = resolve(source, name=f"{key}.function")
    try:
        return as_reward(source, **options)
    except (MissingExtraError, ValueError) as error:
        location = f"{key}.options" if str(error).startswith("reward: option") else f"{key}.{kind}"
        raise ConfigError(location, str(error).removeprefix("reward: ")) from error


def _load_classifier(
    name: str, options: dict[str, Any], actor: Actor | None, device: torch.device | None
) -> torch.nn.Module:
    """Load a sequence classifier, and add its name, device and tokenizers to `options`."""
    options.setdefault("name", Path(name).name)
    if actor is not None:
        options.setdefault("device", actor.device if device is None else device)
        options.setdefault("policy_tokenizer", actor.tokenizer)
    tokenizer = options.get("tokenizer", name)
    if isinstance(tokenizer, str):
        try:
            options["tokenizer"] = transformers_module().AutoTokenizer.from_pretrained(
                tokenizer, trust_remote_code=False
            )
        except (OSError, ValueError):
            if "tokenizer" in options:
                raise
            # The classifier has no tokenizer and gets the policy's tokens.
    return load_classifier(name)


def _default_name(source: RewardSection) -> str:
    if source.remote is not None:
        return "remote"
    if source.recipe is not None:
        return "recipe"
    return Path(str(source.function or source.model).rpartition(":")[2]).stem


def configure_torch(config: Config) -> torch.device:
    """Set torch's threads, determinism and seeds, and select the device.

    Args:
        config: The configuration of the run.

    Returns:
        The device of the models.

    Raises:
        ConfigError: There is no such device.

    >>> configure_torch(Config(device="cpu"))
    device(type='cpu')
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    random.seed(config.seed)  # for rewards and environments of the user; Rollbook uses neither generator
    np.random.seed(config.seed)
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= count:
        raise ConfigError("device", f"got {config.device!r}, expected one of the {count} that torch has of this type")
    return device


def build_sampling(config: Config, actor: Actor | None = None) -> dict[str, Any]:
    """Build the sampling options.

    Args:
        config: The configuration of the run.
        actor: The policy, whose context length limits the prompts of single-turn rollouts.

    Returns:
        Options of `rollbook.core.sampling.Sampling`.

    >>> build_sampling(Config(sampling={"max_tokens": 7, "stop": "end"}))["stop"]
    ('end',)
    """
    options = {name: option for name, option in vars(config.sampling).items() if option not in ((), None, {})}
    if config.environment.function is None:
        options["prompt_overflow"] = config.data.overflow
        longest = config.data.max_prompt_tokens
        if longest is None and actor is not None and config.algorithm.needs_rollouts:
            longest = getattr(text_config(actor), "max_position_embeddings", None) or 1 << 20
        if longest is not None:
            options["max_prompt_tokens"] = int(longest)
    if config.engine.kind != "transformers" and config.model.suppress:
        options["suppress"] = list(config.model.suppress)
    return options


def build_engine(config: Config, actor: Actor) -> BaseEngine:
    """Build the engine that samples rollouts.

    Args:
        config: The configuration of the run.
        actor: The policy.

    Returns:
        The engine.

    Raises:
        ConfigError: The engine does not take `engine.options`.

    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model"})
    >>> type(build_engine(config, build_actor(config, torch.device("cpu")))).__name__
    'TransformersEngine'
    """
    settings = config.engine
    if settings.kind == "transformers":
        return TransformersEngine(actor)
    from rollbook.rollout import OpenAIEngine, VllmEngine

    urls = expand_variables(settings.url, "engine.url")
    shared: dict[str, Any] = {
        "tokenizer": actor.tokenizer,
        "model": settings.model,
        "api_key": None if settings.api_key_env is None else os.environ.get(settings.api_key_env),
        "timeout": settings.timeout,
        "concurrency": settings.concurrency,
    }
    options: dict[str, Any] = expand_variables(settings.options, "engine.options")
    try:
        if settings.kind == "vllm":
            return VllmEngine(actor if urls is None else list(urls), sleep=settings.sleep, **shared, **options)
        engine = OpenAIEngine(urls[0], **shared, **options)
    except TypeError as error:
        raise ConfigError("engine.options", str(error)) from None
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        if not name.startswith("engine_args"):
            raise
        raise ConfigError(f"engine.options.{name}", message) from None
    hint = "" if config.algorithm.correction is not None else "; algorithm.correction corrects for the difference"
    warn_user(
        f"engine.url: the server at {urls[0]} keeps its own weights, so rollouts are off-policy after the first "
        f"update{hint}. Evaluations sample from the trained weights"
    )
    return engine


def build_environment(config: Config, actor: Actor) -> EnvironmentConfig | None:
    """Build the settings of multi-turn episodes.

    Args:
        config: The configuration of the run.
        actor: The policy, whose tokenizer or processor renders the chats.

    Returns:
        The settings, or `None` without an environment.

    >>> environment = {"function": "builtins:print", "max_turns": 3}  # of a user: "games.py:Game"
    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model"}, environment=environment)
    >>> build_environment(config, build_actor(config, torch.device("cpu"))).max_turns
    3
    """
    settings = config.environment
    if settings.function is None:
        return None
    function = resolve(str(settings.function), name="environment.function")
    options = expand_variables(settings.options, "environment.options")
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


def open_expert_book(config: Config) -> Book | None:
    """Open the book of expert records for reading.

    Args:
        config: The configuration of the run.

    Returns:
        The book, or `None` if `replay.expert` is not set.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_book(folder).close()
    ...     with open_expert_book(Config(replay={"expert": folder})) as book:
    ...         len(book)
    0
    """
    path = config.replay.expert
    return None if path is None else open_book(expand_variables(path, "replay.expert"), mode="r")


def build_trainer(
    config: Config,
    models: Models,
    prompts: Prompts,
    reward: RewardSource | None,
    book: Book | None,
    distributed: Distributed | None = None,
) -> Trainer:
    """Build the trainer.

    Args:
        config: The configuration of the run.
        models: The models of the run.
        prompts: The training prompts.
        reward: Scores rollouts; `None` if only an environment or a teacher does.
        book: The book of the run; on ranks other than 0 opened for reading, or `None`.
        distributed: The ranks of a distributed run.

    Returns:
        The trainer.

    Raises:
        ConfigError: The book of expert records cannot be opened.

    >>> from rollbook.train.config.files import load_config
    >>> config, cpu = load_config("letters", ["data.options.count=10", "data.held_out=0"]), torch.device("cpu")
    >>> models, (prompts, _) = build_models(config, build_actor(config, cpu), cpu), load_prompts(config)
    >>> trainer = build_trainer(config, models, prompts, build_reward(config.rewards), open_book("memory:"))
    >>> trainer.global_step, trainer.algorithm.name
    (0, 'grpo')
    """
    critic_optimizer = config.critic_optimizer
    expert = None
    try:
        expert = open_expert_book(config)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        if distributed is None or distributed.is_main:  # other ranks are sent the records
            raise ConfigError("replay.expert", f"got {config.replay.expert!r}, but {error}") from error
    success = config.evaluation.success
    # Workers sample with engines of their own; the trainer only sends weights to servers.
    uses_engine = config.algorithm.needs_rollouts and not (config.rollout.uses_workers and config.engine.url is None)
    build: Any = Trainer
    if distributed is not None:
        from rollbook.train.distributed import DistributedTrainer

        build = functools.partial(DistributedTrainer, distributed=distributed)
    trainer: Trainer = build(
        models.policy,
        config.algorithm,
        book,
        prompts=prompts,
        reward=reward if config.algorithm.needs_rollouts else None,
        engine=build_engine(config, models.policy) if uses_engine else None,
        sync_every=config.engine.sync_every,
        sync_tolerance=config.engine.sync_tolerance,
        environment=build_environment(config, models.policy),
        rollouts=build_rollouts(config, prompts) if config.rollout.uses_workers else None,
        sampling=build_sampling(config, models.policy),
        prompts_per_step=config.batch.prompts_per_step,
        critic=models.critic,
        reference=models.reference,
        teacher=models.teacher,
        optimizer=end_with_run(config.optimizer, config.steps),
        critic_optimizer=None if critic_optimizer is None else end_with_run(critic_optimizer, config.steps),
        minibatch=config.batch.minibatch_config(),
        precision=config.model.precision,
        nonfinite_limit=config.nonfinite_limit,
        replay=config.replay.replay_config(),
        expert=expert,
        seed=config.seed,
        checkpoints=CheckpointConfig(config.folder, **vars(config.checkpoint)),
        success=success if isinstance(success, float) else 1.0,
    )
    return trainer


def build_rollouts(config: Config, prompts: Prompts) -> RolloutConfig:
    """Build the settings of rollout workers, with the configuration that they read from the book.

    Args:
        config: The configuration of the run.
        prompts: The training prompts.

    Returns:
        The settings.

    >>> config = Config(rollout={"mode": "async", "workers": 2}, replay={"max_staleness": 3})
    >>> build_rollouts(config, Prompts([{"prompt": "1+1="}])).staleness_bound
    3
    """
    return RolloutConfig(
        mode=config.rollout.mode,
        max_staleness=config.replay.max_staleness or 0,
        late_seconds=config.rollout.late_seconds,
        settings={
            "config": config.to_dict(),
            "prompts": prompts.fingerprint,
            "folder": os.getcwd(),
            "rollbook": __version__,
        },
    )


def build_worker(config: Config, book: Book, settings: Mapping[str, Any], name: str | None = None) -> RolloutWorker:
    """Build a rollout worker: its model, prompts, reward and engine.

    Args:
        config: The configuration of the run.
        book: The book of the run.
        settings: What the trainer stored in the book.
        name: Name of the worker; `None`: host and process.

    Returns:
        The worker.

    Raises:
        ConfigError: Prompts or version of Rollbook are not those of the trainer, or a part cannot be built.

    >>> rows = {"function": "rollbook.train.recipes.letters:rows", "options": {"count": 10}}
    >>> config = Config(model={"builder": "rollbook.train.recipes.letters:model"}, data=rows, rewards="exact_match")
    >>> settings = {**build_rollouts(config, load_prompts(config)[0]).settings, "consumer": "train"}
    >>> build_worker(config, open_book("memory:"), settings, "worker-0").name
    'worker-0'
    """
    version = settings.get("rollbook", "unknown")
    if version != __version__:
        raise ConfigError("rollbook", f"the trainer has version {version}, this worker {__version__}")
    device = configure_torch(config)
    check_rewards(config)
    prompts, _ = load_prompts(config)
    if prompts.fingerprint != settings["prompts"]:
        raise ConfigError("data", "prompts differ from those of the trainer, expected the same rows in the same order")
    actor = build_actor(config, device)
    options = build_sampling(config, actor)
    seed = options.pop("seed", None)
    per_worker = -(-config.batch.prompts_per_step // max(config.rollout.workers, 1))
    return RolloutWorker(
        book,
        build_engine(config, actor),
        prompts,
        config.algorithm,
        name=name,
        actor=actor,
        sampling=Sampling.of(options, n=config.algorithm.group_size, seed=config.seed if seed is None else seed),
        reward=build_reward(config.rewards, actor, device=device),
        environment=build_environment(config, actor),
        prompts_per_step=config.batch.prompts_per_step,
        prompts_per_claim=config.rollout.prompts_per_claim or min(per_worker, 32),
        mode=config.rollout.mode,
        consumer=settings["consumer"],
        claim_seconds=config.rollout.claim_seconds,
    )


def end_with_run(optimizer: OptimizerConfig, steps: int) -> OptimizerConfig:
    """Set the end of a learning rate schedule that has none to the last step of the run.

    Args:
        optimizer: Settings of the optimizer.
        steps: Number of steps of the run; 0 leaves the settings unchanged.

    Returns:
        The settings, with an end if the schedule needs one.

    >>> end_with_run(OptimizerConfig(schedule="linear"), 50).steps
    50
    """
    return dataclasses.replace(optimizer, steps=steps) if optimizer.steps is None and steps else optimizer


__all__ = [
    "build_actor",
    "build_engine",
    "build_environment",
    "build_models",
    "build_reward",
    "build_rollouts",
    "build_sampling",
    "build_trainer",
    "build_worker",
    "check_model_paths",
    "check_prompts_readable",
    "check_rewards",
    "configure_torch",
    "end_with_run",
    "load_prompts",
    "open_expert_book",
]
