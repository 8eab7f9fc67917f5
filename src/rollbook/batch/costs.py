"""What a sample costs a model: FLOPs of one forward pass as a function of its length, from the model's config.

Invariant: matrix products count once per token, with the experts that a token is sent to and no others; attention
counts the causal half; what a config says in a way that is not understood raises and names the key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOE_KEYS = {
    *_EXPERTS,
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "moe_layer_freq",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Cost:
    """FLOPs of a sample of L tokens: `constant + linear * L + quadratic * L**2`, and a part for sliding windows.

    - `linear`: matrix products, per token.
    - `quadratic`: attention that looks at every earlier token; the causal half is in the number.
    - `windows`: (window, coefficient) for attention that looks back at most `window` tokens: `coefficient * L**2` up to
      there, then a straight line, `coefficient * window * (2 * L - window)`.
    - `constant`: per sample.

    Only proportions matter to a plan, so the backward pass, which multiplies everything by three, is left out.

    >>> Cost(linear=10, quadratic=2)([0, 1, 3]).tolist()
    [0.0, 12.0, 48.0]
    >>> Cost(linear=0, windows=((4, 1.0),))([2, 4, 5]).tolist()  # 4 * (2 * 5 - 4) = 24, one less than 5 * 5
    [4.0, 16.0, 24.0]
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        parts = {"linear": self.linear, "quadratic": self.quadratic, "constant": self.constant}
        for i, (window, coefficient) in enumerate(self.windows):
            parts[f"windows[{i}][1]"] = coefficient
            if isinstance(window, bool) or not isinstance(window, int) or window < 1:
                raise ValueError(f"windows[{i}][0]: got {window!r}, expected a whole number of tokens, 1 or more")
        for name, value in parts.items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1e100:
                raise ValueError(f"{name}: got {value!r}, expected a number, 0 or more and below 1e100")
        if not any(parts.values()):
            raise ValueError("linear, quadratic, constant, windows: got 0 in all of them, expected a cost")

    def __call__(self, lengths: Any) -> NDArray[np.float64]:
        """[N] The cost of samples of these lengths."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total: NDArray[np.float64] = self.constant + tokens * (self.linear + self.quadratic * tokens)
        for window, coefficient in self.windows:
            seen = np.minimum(tokens, window)
            total = total + coefficient * seen * (2 * tokens - seen)
        return total

    @classmethod
    def from_config(cls, config: Any, *, gated: bool = True) -> Cost:
        """The cost of a decoder from its transformers config, an object or a dict (`text_config` inside is found).

        Needed: `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `vocab_size`.
        Understood: `num_key_value_heads`, `head_dim`; experts (`num_experts`, `num_local_experts` or
        `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `shared_expert_intermediate_size`,
        `n_shared_experts`) and which layers have them (`mlp_only_layers`, `decoder_sparse_step`,
        `first_k_dense_replace`, `moe_layer_freq`); windows (`sliding_window`, `layer_types`, `use_sliding_window` with
        `max_window_layers`, `sliding_window_pattern`); latent attention (`kv_lora_rank` and its kin). A config object
        is better than its JSON file: it fills in `layer_types`. `gated=False` is for an MLP of two matrices instead of
        three. A vision tower is not counted.

        Two layers; each has 8*8 + 2*8*4 + 8*8 = 192 weights in attention (two heads of four, one of keys and values)
        and 3*8*16 = 384 in its MLP; the head has 8*32 = 256. A weight is two FLOPs per token: 2 * (2*576 + 256) =
        2816. Scores and values are 2 * 2 * 8 FLOPs for each pair of tokens, half of which is causal: 2 * 16 = 32.

        >>> tiny = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...             num_key_value_heads=1, head_dim=4, vocab_size=32)
        >>> Cost.from_config(tiny)
        Cost(linear=2816.0, quadratic=32.0, constant=0.0, windows=())
        >>> float(Cost.from_config(tiny)([10])[0])  # 2816 * 10 + 32 * 10 * 10
        31360.0

        Four experts of width 16, two for each token, and a router of 8*4: only the two count.

        >>> moe = tiny | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        >>> Cost.from_config(moe).linear == 2 * (2 * (192 + 2 * 384 + 8 * 4) + 256)
        True
        """
        inner = _find(config, "text_config")
        model = _Config(config if inner is None else inner)
        hidden, layers = model.size("hidden_size"), model.size("num_hidden_layers")
        projections, scores = _attention(model, hidden)
        weights = layers * projections + hidden * model.size("vocab_size")
        weights += sum(_mlp(model, hidden, layers, 3 if gated else 2))
        kinds = _layer_windows(model, layers)
        windows = sorted({window for window in kinds if window is not None})
        return cls(
            linear=2.0 * weights,
            quadratic=float(scores * kinds.count(None)),
            windows=tuple((window, float(scores * kinds.count(window))) for window in windows),
        )


class _Config:
    """A config's values by name; `None` and absent are the same thing."""

    def __init__(self, config: Any) -> None:
        if config is None or isinstance(config, (str, bytes, Sequence, Real)):
            raise ValueError(f"config: got {type(config).__name__}, expected a dict or a transformers config")
        self.config = config

    def get(self, name: str) -> Any:
        return _find(self.config, name)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of the config; without a default it must be there."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"config: {name!r} is missing, expected a whole number")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"config: {name!r}: got {value!r}, expected a whole number, {least} or more")
        return value

    def names(self) -> list[str]:
        return list(self.config if isinstance(self.config, Mapping) else vars(self.config))


def _find(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _attention(model: _Config, hidden: int) -> tuple[int, int]:
    """Weights of the projections, and FLOPs of scores and values per squared token (the causal half), per layer."""
    heads = model.size("num_attention_heads")
    if model.get("kv_lora_rank") is not None:  # latent attention: keys and values come from a small shared vector
        rope, nope = model.size("qk_rope_head_dim"), model.size("qk_nope_head_dim")
        value, latent = model.size("v_head_dim"), model.size("kv_lora_rank")
        rank = model.get("q_lora_rank")
        query = heads * (nope + rope)
        weights = hidden * query if rank is None else model.size("q_lora_rank") * (hidden + query)
        weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return weights, heads * (nope + rope + value)
    if model.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config: 'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}, and no head_dim"
        )
    width = model.size("head_dim", hidden // heads)
    shared = model.size("num_key_value_heads", heads)
    return 2 * hidden * width * (heads + shared), 2 * heads * width


def _mlp(model: _Config, hidden: int, layers: int, matrices: int) -> list[int]:
    """Weights that a token meets in each layer's MLP: a dense one, or a router and the experts it is sent to."""
    dense = matrices * hidden * model.size("intermediate_size")
    for name in model.names():
        named = "expert" in name or name.startswith(("moe_", "interleave_moe"))
        value = model.get(name) if named and name not in _MOE_KEYS else None
        # Switches, coefficients and names of kernels do not change the count; unknown sizes and lists of layers may.
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
            raise ValueError(
                f"config: {name!r}: got {reprlib.repr(value)}, and what it means for the experts is not known; build "
                "Cost(linear=..., quadratic=...) by hand"
            )
    experts = next((model.size(name, 0, least=0) for name in _EXPERTS if model.get(name) is not None), 0)
    if not experts:
        return [dense] * layers
    width = model.size("moe_intermediate_size", model.size("intermediate_size"))
    active = model.size("num_experts_per_tok") * width
    active += model.size("shared_expert_intermediate_size", 0, least=0)
    active += model.size("n_shared_experts", 0, least=0) * width
    sparse = hidden * experts + matrices * hidden * active
    always_dense = set(model.get("mlp_only_layers") or ())
    first, every = model.size("first_k_dense_replace", 0, least=0), model.size("moe_layer_freq", 1)
    step = model.size("decoder_sparse_step", 1)
    return [dense if i in always_dense or (i + 1) % step or i < first or i % every else sparse for i in range(layers)]


def _layer_windows(model: _Config, layers: int) -> list[int | None]:
    """How far back each layer looks; `None` is all the way."""
    kinds = model.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ValueError(f"config: 'layer_types': got {len(kinds)} entries, expected {layers}, one for each layer")
        for kind in kinds:
            if kind not in (_FULL, _SLIDING):
                raise ValueError(f"config: 'layer_types': got {kind!r}, expected {_FULL!r} or {_SLIDING!r}")
        return [model.size("sliding_window") if kind == _SLIDING else None for kind in kinds]
    if not model.get("sliding_window") or model.get("use_sliding_window") is False:
        return [None] * layers
    window = model.size("sliding_window")
    full_before = model.size("max_window_layers", 0, least=0)
    pattern = model.size("sliding_window_pattern", 0, least=0)
    return [None if i < full_before or (pattern and not (i + 1) % pattern) else window for i in range(layers)]
