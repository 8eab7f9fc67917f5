"""From a configuration to models: the policy, its reference, a teacher, a critic.

Invariant: weights follow from the configuration and its seed; what cannot be loaded is an error that names the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollbook.models import Actor
from rollbook.models import Critic as CriticModel
from rollbook.models.heads import text_config
from rollbook.models.loading import transformers_module
from rollbook.rollout.transformers import TransformersEngine
from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.parts import Model, Teacher
from rollbook.train.config.schema import Config
from rollbook.train.config.secrets import expanded
from rollbook.train.naming import resolve
from rollbook.train.pipeline import Models


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
            made.critic = CriticModel(trunk_from=actor, **options)
        if config.model.gradient_checkpointing:
            made.critic.gradient_checkpointing_enable()
    return made


def _check_words(name: str, other: Any, actor: Actor) -> None:
    """Refuse a model that cannot read what the policy writes."""
    got, expected = (getattr(text_config(one), "vocab_size", None) for one in (other, actor))
    if got is not None and expected is not None and got < expected:
        raise ConfigError(name, f"got a model of {got} tokens, expected at least the policy's {expected}")
