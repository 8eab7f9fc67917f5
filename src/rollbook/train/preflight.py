"""Checks of a configuration that need no model: what would fail later is reported before weights are loaded.

Invariant: nothing is written, and no weight is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollbook.core.metrics import advise
from rollbook.models.loading import transformers_module
from rollbook.train.asking import check_rewards
from rollbook.train.config.kinds import ConfigError
from rollbook.train.config.schema import Config
from rollbook.train.naming import resolve

CONNECT_TIMEOUT = 10.0
"""Seconds in which a server must accept a connection."""


def check(config: Config) -> None:
    """Check rewards, engine, trackers and tokenizer.

    Raises:
        ConfigError: A package is missing, a reward cannot be called, the engine's server does not answer, or the
            tokenizer has tokens that the model does not.
    """
    check_rewards(config)
    _check_engine(config)
    _check_trackers(config)
    if config.model.path is not None or config.model.config is not None:
        _check_model_files(config)


def check_vocabulary(tokenizer: Any, model_config: Any, generation_config: Any = None) -> None:
    """Refuse a tokenizer that is larger than the model's vocabulary; warn if they end a text with different tokens."""
    if tokenizer is None or model_config is None:
        return
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    size = getattr(text, "vocab_size", None)
    try:
        count = len(tokenizer)
    except TypeError:
        return
    if size is not None and count > size:
        raise ConfigError("model.tokenizer", f"got one of {count} tokens, expected at most the model's {size}")
    end = getattr(tokenizer, "eos_token_id", None)
    for name, holder in (("model's config", text), ("generation config", generation_config)):
        ids = getattr(holder, "eos_token_id", None)
        ends = ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
        if end is not None and ends and end not in ends:
            advise(
                f"model.tokenizer: it ends a text with token {end}, and the {name} with {', '.join(map(str, ends))}. "
                "Responses end at any of them"
            )


def _check_engine(config: Config) -> None:
    engine = config.engine
    if engine.kind == "transformers":
        return
    if engine.api_key_env is not None and os.environ.get(engine.api_key_env) is None:
        raise ConfigError("engine.api_key_env", f"got {engine.api_key_env!r}, which is not set in the environment")
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("engine.kind", "got 'openai', which needs httpx: pip install 'rollbook[remote]'")
    try:
        address = urlsplit(str(engine.url))
        host, port = address.hostname or "", address.port or {"http": 80, "https": 443}[address.scheme]
    except ValueError as error:
        raise ConfigError("engine.url", f"got one that cannot be read: {error}") from None
    if any(os.environ.get(name) for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy",
                                             "https_proxy")):  # fmt: skip
        return  # the proxy reaches it, or not
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConfigError("engine.url", f"got a server at {host}:{port}, which does not answer: {error}") from None


def _check_trackers(config: Config) -> None:
    tracking = config.tracking
    for name, module, is_on in (
        ("tensorboard", "torch.utils.tensorboard", tracking.tensorboard),
        ("wandb", "wandb", tracking.wandb is not None),
    ):
        if is_on:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"tracking.{name}", f"needs the package {name}: pip install {name} ({error})"
                ) from None
    for i, name in enumerate(tracking.trackers):
        resolve(name, name=f"tracking.trackers.{i}")


def _check_model_files(config: Config) -> None:
    """Compare tokenizer and model by their configurations; what cannot be read is left to whoever loads it."""
    transformers = transformers_module()
    model = config.model
    words = model.tokenizer or model.processor or model.path
    if words is None:
        return
    generation = None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(words, trust_remote_code=False)
        if model.path is not None:
            model_config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=False)
            if Path(model.path, "generation_config.json").is_file() or not Path(model.path).exists():
                generation = transformers.GenerationConfig.from_pretrained(model.path, trust_remote_code=False)
        else:
            model_config = transformers.AutoConfig.for_model(**(model.config or {}))
    except Exception:  # of the hub, of its libraries
        return
    check_vocabulary(tokenizer, model_config, generation)
