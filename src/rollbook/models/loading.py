"""Loading of models: from a module, a configuration, a local folder or a name on the hub.

Invariant: a module is used as it is (moved and converted only if requested). A configuration gives random weights. A
path or name is loaded by transformers, with the class that fits the configuration.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ModelSource: TypeAlias = nn.Module | PretrainedConfig | str | os.PathLike[str]
    """A model, a configuration, a local folder, or a name on the hub."""

Purpose = Literal["language", "values"]
DType: TypeAlias = torch.dtype | str
"""A floating point type, or its name."""

BASE = "base"
"""Folder of the base model in a folder of adapters, if it came from neither a folder nor the hub."""
VALUE_HEAD = "value_head.safetensors"
"""File of a critic's head in the folder of its backbone."""


def transformers_module() -> Any:
    """Import transformers; the `ImportError` says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models need transformers: install the extra 'models' of Rollbook") from error
    return transformers


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers within the context.

    >>> with hide_progress_bars():
    ...     transformers_module().utils.logging.is_progress_bar_enabled()
    False
    """
    bars = transformers_module().utils.logging
    were_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            bars.enable_progress_bar()


def as_dtype(dtype: DType | None) -> torch.dtype | None:
    """Return a floating point type, given as such or by name; `None` for `None`.

    >>> as_dtype("bfloat16"), as_dtype(None)
    (torch.bfloat16, None)
    """
    if dtype is None:
        return None
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}, expected a floating point type such as torch.bfloat16 or 'bfloat16'")
    return resolved


def load_model(
    model: ModelSource,
    *,
    purpose: Purpose = "language",
    dtype: DType | None = None,
    attn_implementation: str | None = None,
) -> nn.Module:
    """Load a model.

    Args:
        model: A module, which is used as it is, a configuration (random weights), a local folder, or a name on the hub.
        purpose: `language`: with its output layer. `values`: a backbone, or a classifier of tokens or sequences with
            one label, where a folder has one.
        dtype: A floating point type, or its name; `None`: as it is.
        attn_implementation: One of transformers', or `varlen` (`rollbook.models.varlen`).

    Returns:
        The model.

    Raises:
        ValueError: If `model` is none of these, its configuration names code of the hub, or a classifier has several
            labels.
    """
    kind = as_dtype(dtype)
    if attn_implementation == "varlen":
        from rollbook.models.varlen import use_varlen

        loaded = load_model(model, purpose=purpose, dtype=dtype)
        use_varlen(loaded)
        return loaded
    if isinstance(model, nn.Module):
        loaded = model
        if attn_implementation is not None:
            loaded.set_attn_implementation(attn_implementation)  # type: ignore[operator]
        if kind is not None:
            loaded = loaded.to(kind)
    elif isinstance(model, (str, os.PathLike)):
        loaded = _from_name(os.fspath(model), purpose, kind, attn_implementation)
    else:
        config_class = transformers_module().PretrainedConfig
        if not isinstance(model, config_class):
            raise ValueError(
                f"model: got {type(model).__name__}, expected a module, a configuration, a folder or a name"
            )
        reject_hub_kernels(model, "model")
        options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        # A copy: transformers writes the type and the attention into the configuration.
        loaded = auto_class(model, purpose).from_config(
            copy.deepcopy(model), dtype=kind or torch.float32, trust_remote_code=False, **options
        )
    return loaded


def reject_hub_kernels(config: PretrainedConfig, name: str) -> None:
    """Reject a configuration that names a kernel of the hub, as `org/name`, which transformers would download and run.

    Args:
        config: The configuration. Those inside it count, at any depth.
        name: Name of the model in the error.

    Raises:
        ValueError: The configuration names a kernel.
    """
    config_class = transformers_module().PretrainedConfig
    parts: list[Any] = [config]
    for part in parts:
        for key, value in (part if isinstance(part, Mapping) else vars(part)).items():
            if "implementation" in str(key) and "/" in str(value):
                raise ValueError(
                    f"{name}: its configuration names the kernel {value!r}: code from the hub is not run; if you trust "
                    "it, pass it as attn_implementation (model.attention in a configuration of a run)"
                )
            if isinstance(value, (Mapping, config_class)):
                parts.append(value)
            elif isinstance(value, (list, tuple)):
                parts.append(dict(enumerate(value)))


def check_folder(name: str | os.PathLike[str]) -> None:
    """Reject the path of something that is no folder, for which transformers would ask the hub.

    Args:
        name: A folder, or a name on the hub.

    Raises:
        ValueError: There is a file or another thing of this name, or a link to nothing.
    """
    if os.path.lexists(name) and not os.path.isdir(name):
        shown = "a file" if os.path.isfile(name) else "neither a folder nor a file"
        raise ValueError(f"model: got {os.fspath(name)!r}, which is {shown}, expected a folder or a name on the hub")


def auto_class(config: PretrainedConfig, purpose: Purpose) -> Any:
    """Return the Auto class of transformers for a configuration and a purpose."""
    transformers = transformers_module()
    if purpose == "values":
        for ending in ("ForTokenClassification", "ForSequenceClassification"):
            if any(str(name).endswith(ending) for name in config.architectures or ()):
                if config.num_labels != 1:
                    raise ValueError(f"model: got a classifier of {config.num_labels} labels, expected one of 1")
                return getattr(transformers, f"AutoModel{ending}")
        return transformers.AutoModel
    multimodal = hasattr(config, "vision_config") or hasattr(config, "audio_config")
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if multimodal and type(config) in mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _from_name(name: str, purpose: Purpose, kind: torch.dtype | None, attn_implementation: str | None) -> nn.Module:
    transformers = transformers_module()
    check_folder(name)
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        from rollbook.models.lora import load_adapter

        base = folder / BASE
        base_name = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        if not base_name and not base.is_dir():
            raise ValueError(f"model: got {name!r}, adapters without a base model")
        inner = _from_name(str(base) if base.is_dir() else base_name, purpose, kind, attn_implementation)
        return load_adapter(inner, name)
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    reject_hub_kernels(config, f"model: {name!r}")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    loaded: nn.Module = auto_class(config, purpose).from_pretrained(
        name, dtype="auto" if kind is None else kind, trust_remote_code=False, **options
    )
    return loaded


def load_classifier(name: str, dtype: DType = "auto") -> nn.Module:
    """Load a classifier of sequences, such as a reward model.

    Args:
        name: A local folder, or a name on the hub.
        dtype: A floating point type, or its name; `auto`: as it is.

    Returns:
        The model.

    Raises:
        ValueError: `name` is the path of a file, or the configuration names code of the hub.
    """
    transformers = transformers_module()
    check_folder(name)
    reject_hub_kernels(transformers.AutoConfig.from_pretrained(name, trust_remote_code=False), f"model: {name!r}")
    loaded: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
        name, dtype=dtype, trust_remote_code=False
    )
    return loaded


def load_tokenizers(model: ModelSource, config: PretrainedConfig | None) -> tuple[Any, Any]:
    """Load the tokenizer and the processor of a model given by path or name; `None` for missing ones."""
    if not isinstance(model, (str, os.PathLike)):
        return None, None
    transformers, name = transformers_module(), os.fspath(model)
    local = Path(name)
    files = {entry.name for entry in local.iterdir()} if local.is_dir() else {"tokenizer_config.json"}
    if "tokenizer_config.json" not in files:
        return None, None
    if hasattr(config, "vision_config"):
        try:
            processor = transformers.AutoProcessor.from_pretrained(name, trust_remote_code=False)
            return processor.tokenizer, processor
        except (AttributeError, ImportError, OSError, ValueError) as error:
            warnings.warn(f"model {name!r}: its processor did not load, so it takes text only: {error}", stacklevel=3)
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False), None
    except OSError:
        return None, None
