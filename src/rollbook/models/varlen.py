"""Variable-length attention for packed batches with torch alone: `attn_implementation="varlen"`.

Invariant: a token attends to the tokens of its own sample up to itself, and no others. The output for a packed sample
equals that for the sample alone with SDPA, up to rounding. No mask over all pairs of tokens is allocated.

It is registered in transformers as `NAME`. A call is packed if it has boundaries (`cu_seq_lens_q`, of
`Batch.model_inputs`). On CUDA in half precision it uses torch's kernel for ragged input (`torch.nn.attention.varlen`);
elsewhere, and where the kernel is not supported (float32, dropout, head sizes), SDPA for one sample after the other.
All other calls (padded batches, generation with a cache) go to SDPA, with SDPA's masks, and are bit-equal to it.

transformers builds the mask before attention, without the boundaries. Here it is a `PackedMask`, which becomes a tensor
only if needed, and against which the boundaries are checked.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollbook.models.head import VARLEN as NAME
from rollbook.models.head import text_config, unwrap
from rollbook.models.loading import as_dtype, transformers_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rollbook.batch.device import Device
    from rollbook.models.loading import DType

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_SIZE = 256
"""Largest head size that the kernel supports; sizes are multiples of 8."""


def best_attention(device: Device, dtype: DType, config: PretrainedConfig | None = None) -> str:
    """Choose the attention implementation for packed training.

    Args:
        device: Where the model is.
        dtype: The type that attention is computed in; with autocast, that of autocast.
        config: The configuration of a model that `varlen` must support; `None`: any.

    Returns:
        `flash_attention_2` on CUDA in half precision if flash-attn is installed, `varlen` there without it, `sdpa`
        elsewhere.

    >>> best_attention("cpu", torch.bfloat16), best_attention("cuda", torch.float32)
    ('sdpa', 'sdpa')
    """
    target = torch.device(device)
    if as_dtype(dtype) not in _HALF or target.type != "cuda" or not torch.cuda.is_available():
        return "sdpa"
    if torch.cuda.get_device_capability(target)[0] < 8:
        return "sdpa"  # neither supports earlier devices
    if transformers_module().utils.is_flash_attn_2_available():
        return "flash_attention_2"
    if torch.version.hip is not None or (config is not None and unsupported_reason(config) is not None):
        return "sdpa"
    return "varlen"


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """Return the reason why `varlen` does not support a model with this configuration; `None` if it does.

    >>> from transformers import LlamaConfig, Gemma3TextConfig
    >>> unsupported_reason(LlamaConfig()), unsupported_reason(Gemma3TextConfig())
    (None, 'layers of sliding_attention')
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"layers of {', '.join(sorted(kinds))}"
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        return f"a sliding window of {window} tokens"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "a soft cap on attention logits"
    if getattr(text, "is_causal", True) is False:
        return "attention to later tokens"
    return None


def use_varlen(model: nn.Module) -> None:
    """Set the attention of a transformers model, or of one in a peft model; of a vision-language model, the text part.

    Args:
        model: The model.

    Raises:
        ValueError: If it is not supported: sliding windows, layers other than full attention, soft caps, learned
            prompts, models without SDPA, or with a fixed attention.
    """
    inner: Any = unwrap(model)
    problem = f"attn_implementation: got 'varlen' for a {type(inner).__name__}"
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "set_attn_implementation"):
        raise ValueError(f"{problem}, expected a transformers model")
    has_prompts = getattr(inner, "peft_config", None) is not None
    reason = "learned prompts" if has_prompts else unsupported_reason(config)
    if reason is not None:
        raise ValueError(f"{problem} with {reason}, expected plain causal attention; use 'sdpa'")
    register()
    text = text_config(inner)
    key = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    for kind in ("sdpa", NAME):  # calls that are not packed go to SDPA, which the model must support, too
        try:
            inner.set_attn_implementation(kind if key is None else {key: kind})
        except ValueError as error:
            raise ValueError(f"{problem}: {error}") from None
    if text._attn_implementation != NAME:
        raise ValueError(f"{problem}, whose attention is fixed; use 'sdpa' or 'eager'")


def register() -> None:
    """Register `NAME` in transformers. Idempotent."""
    transformers_module().AttentionInterface.register(NAME, varlen_attention)
    transformers_module().AttentionMaskInterface.register(NAME, varlen_mask)


# --- interface of transformers ----------------------------------------------------------------------------------------


class PackedMask:
    """The mask over all pairs of tokens of a packed row, built on first use.

    Args:
        make: Builds the mask for SDPA.
        sees: The mask function of transformers, `sees(row, head, q, k)`: whether token q attends to token k.
        tokens: Length of the row.
        device: Device of the row.
    """

    def __init__(self, make: Callable[[], Any], sees: Callable[..., torch.Tensor], tokens: int, device: Device) -> None:
        self._make, self._sees, self._tokens, self._device = make, sees, tokens, device
        self._tensor: Any = None
        self._bounds: tuple[torch.Tensor, list[int]] | None = None

    def tensor(self) -> Any:
        """Return the mask (1, 1, tokens, tokens), built once."""
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor

    def bounds(self, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return boundaries without empty samples, as int32 for kernels and as a list; checked once for all layers."""
        if self._bounds is None:
            bounds = check_bounds(cu_seqlens, self._tokens)
            self._check(bounds[0].to(self._device).long())
            self._bounds = bounds
        return self._bounds

    def _check(self, bounds: torch.Tensor) -> None:
        """Check at three entries per token that the mask is causal attention within the boundaries."""
        token = torch.arange(self._tokens, device=bounds.device)
        zero = token.new_zeros(())
        first = bounds[torch.searchsorted(bounds, token, right=True) - 1]
        previous = self._sees(zero, zero, token, (token - 1).clamp(min=0))
        missing_boundary = ((token != first) & ~previous).any()
        extra_boundary = ((token == first) & (token > 0) & previous).any()
        windowed = (~self._sees(zero, zero, token, first)).any()
        not_causal = self._sees(zero, zero, token[:-1], token[1:]).any()
        flags = torch.stack([extra_boundary, missing_boundary, windowed, not_causal]).tolist()  # one synchronization
        if flags[0] or flags[1]:
            raise ValueError(
                "cu_seq_lens_q: got boundaries other than those at which position_ids restart, expected the same "
                "samples from both"
            )
        if flags[2] or flags[3]:
            problem = "tokens attend to later ones" if flags[3] else "tokens do not attend to all earlier ones"
            raise ValueError(
                f"attention_mask: got one in which {problem} (a window, or blocks of an image), expected a causal one; "
                "use another attn_implementation than 'varlen' for packed samples of this model"
            )


def varlen_mask(**options: Any) -> Any:
    """Build the mask of a call: a `PackedMask` for packed samples that positions separate, else SDPA's."""
    plain = transformers_module().AttentionMaskInterface()["sdpa"]
    packed = (
        options.get("attention_mask") is None
        and options["batch_size"] == 1
        and options["q_length"] == options["kv_length"]
        and not options.get("allow_is_causal_skip", True)
        and not options.get("allow_is_bidirectional_skip", False)
        and not options.get("use_vmap", False)
    )
    if not packed:
        return plain(**options)
    return PackedMask(
        functools.partial(plain, **options), options["mask_function"], options["q_length"], options.get("device", "cpu")
    )


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedMask | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute attention within each sample if the call is packed, else SDPA.

    Args:
        module: The attention layer.
        query: (B, H, S, D)
        key: (B, K, T, D)
        value: (B, K, T, D)
        attention_mask: The result of `varlen_mask`.
        options: Options of transformers' attention interface.

    Returns:
        (B, S, H, D), and attention weights or `None`.
    """
    plain = transformers_module().AttentionInterface()["sdpa"]
    bounds = options.get("cu_seq_lens_q")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if bounds is None or not causal:
        mask = attention_mask.tensor() if isinstance(attention_mask, PackedMask) else attention_mask
        return plain(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    # Boundaries must not be ignored: that would mix samples.
    rows, _, tokens, _ = query.shape
    if rows != 1 or key.shape[2] != tokens:
        raise ValueError(
            f"cu_seq_lens_q: got boundaries with {rows} rows of {tokens} tokens and {key.shape[2]} keys, expected one "
            "row of samples and an empty cache"
        )
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError("attention_mask: got one with cu_seq_lens_q, expected only boundaries, and no padding")
    other = options.get("cu_seq_lens_k")
    if other is not None and other is not bounds and not torch.equal(other, bounds):
        raise ValueError("cu_seq_lens_k: got other boundaries than cu_seq_lens_q, expected the same")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: got it with packed samples, expected None: 'varlen' does not support it")
    marks, ends = attention_mask.bounds(bounds) if attention_mask is not None else check_bounds(bounds, tokens)
    scale, dropout = options.get("scaling"), float(options.get("dropout") or 0.0)
    if len(ends) > 2 and dropout == 0:
        parts = _halved(query, key, value)
        if parts is not None:
            return _kernel(parts, marks, ends, scale), None
    backend_options = {"dropout": dropout, "scaling": scale, "is_causal": True}
    outputs = [
        plain(module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, **backend_options)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return torch.cat(outputs, 1), None


# --- torch's kernel for ragged input ----------------------------------------------------------------------------------


def check_bounds(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Check boundaries; return them without empty samples, as int32 and as a list.

    >>> check_bounds(torch.tensor([0, 3, 3, 5]), 5)
    (tensor([0, 3, 5], dtype=torch.int32), [0, 3, 5])
    """
    ends: list[int] = cu_seqlens.tolist()
    rising = all(a <= b for a, b in itertools.pairwise(ends))
    if not rising or not ends or ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"cu_seq_lens_q: got {ends[:8]}, expected boundaries in ascending order from 0 to {tokens}")
    unique = sorted(set(ends))
    marks = cu_seqlens if len(unique) == len(ends) else torch.tensor(unique, device=cu_seqlens.device)
    return marks.to(torch.int32), unique


def _halved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor] | None:
    """Return inputs of the kernel, (tokens, heads, size), in the type that SDPA would use; `None` if not supported.

    Autocast does not cover the kernel, and rotary embeddings convert half precision back to float32.
    """
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    parts = [query, key, value]
    if torch.is_autocast_enabled("cuda"):
        parts = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in parts]
    size = query.shape[-1]
    if (
        any(tensor.shape[-1] != size or tensor.dtype != parts[0].dtype for tensor in parts)
        or parts[0].dtype not in _HALF
    ):
        return None
    if size % 8 or size > _MAX_HEAD_SIZE or torch.cuda.get_device_capability(query.device)[0] < 8:
        return None
    return [tensor[0].transpose(0, 1) for tensor in parts]


@functools.cache
def _shares_heads() -> bool:
    """Return whether the kernel supports grouped-query attention (torch 2.12 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _kernel(parts: list[torch.Tensor], marks: torch.Tensor, ends: list[int], scale: float | None) -> torch.Tensor:
    """(1, tokens, H, D) Compute attention by torch's kernel for ragged input."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = parts
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if groups > 1 and _shares_heads():
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    longest = max(b - a for a, b in itertools.pairwise(ends))
    marks = marks.to(query.device)
    output = varlen_attn(query, key, value, marks, marks, longest, longest, scale=scale, window_size=(-1, 0), **options)
    return output.unsqueeze(0)  # type: ignore[union-attr]
