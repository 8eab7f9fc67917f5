"""Attention for packed batches that costs what the samples cost, through torch alone: `attn_implementation="varlen"`.

Invariant: a token sees the tokens of its own sample up to itself, and no others; what a model says of a packed sample
is what it says of the sample alone with SDPA, up to rounding. No mask over all pairs of tokens is made for it.

transformers takes it by the name `NAME`. A call is a packed pass if boundaries come with it (`cu_seq_lens_q`, as
`ExperienceBatch.model_inputs` gives them and models hand them on). On CUDA in half precision that is torch's kernel for
ragged input (`torch.nn.attention.varlen`); elsewhere, and where the kernel does not do it (float32, dropout, sizes of
heads), SDPA over one sample after the other. Any other call (padded batches, generation with a cache) is SDPA's, with
SDPA's masks, and gives the same to the bit.

Before attention, transformers makes the mask, without knowing of boundaries. In its place the model carries a
`PackedMask`, which becomes a tensor only if something needs it, and by which boundaries are checked at each token.
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
from rollbook.models.head import text_config, unwrapped
from rollbook.models.loading import as_dtype, transformers_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rollbook.batch.device import Device
    from rollbook.models.loading import DType

_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256
"""The largest head that the kernel takes; sizes are multiples of 8."""


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
    place = torch.device(device)
    if as_dtype(dtype) not in _HALF or place.type != "cuda" or not torch.cuda.is_available():
        return "sdpa"
    if torch.cuda.get_device_capability(place)[0] < 8:
        return "sdpa"  # neither has kernels for earlier devices
    if transformers_module().utils.is_flash_attn_2_available():
        return "flash_attention_2"
    if torch.version.hip is not None or (config is not None and why_not(config) is not None):
        return "sdpa"
    return "varlen"


def why_not(config: PretrainedConfig) -> str | None:
    """What about a model, by its configuration, makes `varlen` the wrong attention for it, in words; `None`: nothing.

    >>> from transformers import LlamaConfig, Gemma3TextConfig
    >>> why_not(LlamaConfig()), why_not(Gemma3TextConfig())
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
        return "a soft cap on attention's logits"
    if getattr(text, "is_causal", True) is False:
        return "attention to tokens ahead"
    return None


def use_varlen(model: nn.Module) -> None:
    """Have a transformers model (or peft's around one) attend so; of a model that sees, the part that reads text.

    Raises ValueError of a model that it is not for: sliding windows and other layers than of full attention, soft caps,
    models that do not take SDPA, or that leave attention to no interface.
    """
    inner: Any = unwrapped(model)
    named = f"attn_implementation: got 'varlen' for a {type(inner).__name__}"
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "set_attn_implementation"):
        raise ValueError(
            f"attn_implementation: got 'varlen' for a {type(inner).__name__}, expected a transformers model"
        )
    named = f"attn_implementation: got 'varlen' for a {type(inner).__name__}"
    learned = getattr(inner, "peft_config", None) is not None
    reason = "learned prompts, which are no sample's" if learned else why_not(config)
    if reason is not None:
        raise ValueError(f"{named} with {reason}, expected causal attention without; 'sdpa' takes it")
    register()
    text = text_config(inner)
    key = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    for kind in ("sdpa", NAME):  # what is not packed goes to SDPA, so a model must take that, too
        try:
            inner.set_attn_implementation(kind if key is None else {key: kind})
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from None
    if text._attn_implementation != NAME:
        raise ValueError(f"{named}, which does not let its attention be chosen; 'sdpa' or 'eager' may be its own")


def register() -> None:
    """Make `NAME` known to transformers; another time does nothing."""
    transformers_module().AttentionInterface.register(NAME, attend)
    transformers_module().AttentionMaskInterface.register(NAME, mask)


# --- what transformers calls ------------------------------------------------------------------------------------------


class PackedMask:
    """The mask over all pairs of a packed row's tokens, in words: a tensor only when it is asked for.

    - `make`: gives the mask as SDPA takes it.
    - `sees(row, head, q, k)`: transformers' function of indices, whether token q sees token k.
    - `tokens`, `device`: how long the row is, and where it lies.
    """

    def __init__(self, make: Callable[[], Any], sees: Callable[..., torch.Tensor], tokens: int, device: Device) -> None:
        self._make, self._sees, self._tokens, self._device = make, sees, tokens, device
        self._made: Any = None
        self._bounds: tuple[torch.Tensor, list[int]] | None = None

    def tensor(self) -> Any:
        """The mask itself, (1, 1, tokens, tokens), made once."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def bounds(self, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Boundaries, checked once for all layers: int32 for kernels, and as a list; without empty samples."""
        if self._bounds is None:
            bounds = bounds_of(cu_seqlens, self._tokens)
            self._check(bounds[0].to(self._device).long())
            self._bounds = bounds
        return self._bounds

    def _check(self, bounds: torch.Tensor) -> None:
        """Three places of each token in the mask tell whether it is what attention within boundaries amounts to."""
        token = torch.arange(self._tokens, device=bounds.device)
        zero = token.new_zeros(())
        first = bounds[torch.searchsorted(bounds, token, right=True) - 1]
        before = self._sees(zero, zero, token, (token - 1).clamp(min=0))
        apart = ((token == first) & (token > 0) & before).any()
        torn = ((token != first) & ~before).any()
        short = (~self._sees(zero, zero, token, first)).any()
        ahead = self._sees(zero, zero, token[:-1], token[1:]).any()
        wrong = torch.stack([apart, torn, short, ahead]).tolist()
        if wrong[0] or wrong[1]:
            raise ValueError(
                "cu_seq_lens_q: got boundaries between other tokens than those at which position_ids begin anew, "
                "expected the same samples from both"
            )
        if wrong[2] or wrong[3]:
            problem = "tokens ahead are seen" if wrong[3] else "a sample's first token is not seen by its last"
            raise ValueError(
                f"attention_mask: got one by which {problem} (a window, or blocks of an image), expected a causal one: "
                f"packed samples of such a model need another attn_implementation than 'varlen'"
            )


def mask(**options: Any) -> Any:
    """SDPA's mask for SDPA's calls; a `PackedMask` for a row of samples that its positions tell apart."""
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


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, Any]:
    """(B, S, H, D) From query (B, H, S, D), key and value (B, K, T, D): each sample by itself if the call is a packed
    pass, else SDPA."""
    plain = transformers_module().AttentionInterface()["sdpa"]
    bounds = options.get("cu_seq_lens_q")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if bounds is None or not causal:
        mask = attention_mask.tensor() if isinstance(attention_mask, PackedMask) else attention_mask
        return plain(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    # Boundaries that are given hold: where they cannot, going on without them would mix samples.
    rows, _, tokens, _ = query.shape
    if rows != 1 or key.shape[2] != tokens:
        raise ValueError(
            f"cu_seq_lens_q: got boundaries with {rows} rows of {tokens} tokens and {key.shape[2]} keys, expected one "
            "row of samples and nothing in a cache before them"
        )
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError("attention_mask: got one beside cu_seq_lens_q, expected boundaries alone, and no padding")
    other = options.get("cu_seq_lens_k")
    if other is not None and other is not bounds and not torch.equal(other, bounds):
        raise ValueError("cu_seq_lens_k: got other boundaries than cu_seq_lens_q, expected the same")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: got it with packed samples, expected none: 'varlen' is causal attention without")
    marks, ends = attention_mask.bounds(bounds) if attention_mask is not None else bounds_of(bounds, tokens)
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


# --- by torch's kernel, or one sample after the other -----------------------------------------------------------------


def bounds_of(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Where samples begin and the last one ends, int32 and as a list, without empty samples.

    >>> bounds_of(torch.tensor([0, 3, 3, 5]), 5)
    (tensor([0, 3, 5], dtype=torch.int32), [0, 3, 5])
    """
    ends: list[int] = cu_seqlens.tolist()
    rising = all(a <= b for a, b in itertools.pairwise(ends))
    if not rising or not ends or ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"cu_seq_lens_q: got {ends[:8]}, expected boundaries that rise from 0 to {tokens}")
    unique = sorted(set(ends))
    marks = cu_seqlens if len(unique) == len(ends) else torch.tensor(unique, device=cu_seqlens.device)
    return marks.to(torch.int32), unique


def _halved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor] | None:
    """What the kernel takes, (tokens, heads, size), in the type that SDPA would compute in; `None` if it takes it not.

    Autocast knows of SDPA and not of the kernel, and rotary positions make float32 of what it made half.
    """
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    parts = [query, key, value]
    if torch.is_autocast_enabled("cuda"):
        parts = [part.to(torch.get_autocast_dtype("cuda")) for part in parts]
    size = query.shape[-1]
    if any(part.shape[-1] != size or part.dtype != parts[0].dtype for part in parts) or parts[0].dtype not in _HALF:
        return None
    if size % 8 or size > _WIDEST or torch.cuda.get_device_capability(query.device)[0] < 8:
        return None
    return [part[0].transpose(0, 1) for part in parts]


@functools.cache
def _shares_heads() -> bool:
    """Whether the kernel's function takes fewer heads of keys than of queries; it does from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _kernel(parts: list[torch.Tensor], marks: torch.Tensor, ends: list[int], scale: float | None) -> torch.Tensor:
    """(1, tokens, H, D) By torch's kernel for ragged input."""
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
