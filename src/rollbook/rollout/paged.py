"""Decoding with continuous batching over a paged key-value cache; on CUDA the decode step is a captured graph.

An engine has one `PagedDecoder`, which owns the cache, the device buffers and the graphs. Each call of the engine has a
`PagedBatch`: rows join when there is room, are decoded in windows of `STEPS_PER_SYNC` tokens, and are removed when they
finish. The host reads the sampled tokens once per window, not once per token.

Invariant: between two windows, only the keys and values are on the device alone. The rest of the state is on the host
and is copied to the device at the start of each window, so rows, calls and weights can change between windows.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rollbook.algorithms.kernels import decode_triton
from rollbook.core.errors import RollbookError
from rollbook.core.sampling import KINDS
from rollbook.models.head import text_config
from rollbook.rollout.decoding import (
    COLD_TEMPERATURE,
    MIN_TEMPERATURE,
    BatchRules,
    Blocks,
    DecodingRow,
    FinishedRow,
    ModelRunner,
    choose_tokens,
    uniform_numbers,
)

if TYPE_CHECKING:
    from transformers import DynamicCache

ATTENTION = "rollbook_paged"
"""Name under which transformers knows the attention of this module."""
PAGE_SIZE = 64
"""Tokens per page of the cache."""
STEPS_PER_SYNC = 16
"""Tokens of each row in a window, after which the host reads them. A row wastes half of its last window on average."""
PREFILL_TOKENS = 16_384
"""Largest number of prompt tokens in one forward pass; a longer prompt has a pass of its own."""
GRAPH_ROWS = (8, 32, 128, 512, 2048)
"""Batch sizes for which graphs are captured, besides the engine's `max_batch_rows`."""
REFILL_SHARE = 8
"""New rows join when 1 / REFILL_SHARE of the rows is free, since a prefill delays all other rows."""
_NEVER = 1 << 62
"""Minimum response length of a token that is never sampled (see `LiveRow.forbidden`)."""


class UnsupportedModelError(RollbookError):
    """A model cannot be decoded over a paged cache."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether device memory ran out. In a capture, CUDA raises another error after that one.

    Args:
        error: The error; its causes are also checked.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def unsupported_reason(runner: ModelRunner) -> str | None:
    """Return why a model cannot be decoded over a paged cache, or `None` if nothing is known to prevent it.

    Args:
        runner: Calls the model.
    """
    model = runner.base
    name = type(model).__name__
    config = text_config(model)
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not let its attention be replaced"
    if not {"position_ids", "logits_to_keep"} <= runner.forward_parameters:
        return f"the forward method of {name} takes no position_ids or no logits_to_keep"
    if other_layers:
        return f"{name} has layers of {', '.join(sorted(other_layers))}"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{name} has layers that share keys and values"
    adapters = getattr(runner.model, "peft_config", {}).values()
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
        return "the adapter is a learned prompt"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return f"{name} is on several devices"
    return None


# --- pages ----------------------------------------------------------------------------------------------------------


class PagePool:
    """Free pages of a cache, and a reference count for each page in use. Finished and empty rows write to page 0.

    Args:
        pages: Number of pages, including page 0, which is never taken.

    >>> pool = PagePool(4)
    >>> first = pool.take(2)
    >>> pool.share(first[:1])
    >>> pool.release(first)
    >>> pool.available
    2
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, 0, -1))
        self._users = [0] * pages

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free pages.

        Args:
            count: Number of pages.

        Returns:
            The pages.

        Raises:
            ValueError: There are too few; none are taken.
        """
        if count > self.available:
            raise ValueError(f"count: got {count}, expected at most {self.available}, the number of free pages")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to pages.

        Args:
            pages: Pages in use.
        """
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from pages. Pages without users are free.

        Args:
            pages: Pages in use.
        """
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


def pages_for(tokens: int) -> int:
    """Return the number of pages for a number of tokens.

    Args:
        tokens: Number of tokens.

    >>> pages_for(65)
    2
    """
    return -(-tokens // PAGE_SIZE)


@functools.cache
def _cache_class() -> Any:
    """Return the cache class. It is defined on first use, to import transformers late."""
    from transformers import Cache

    class PagedCache(Cache):
        """Keys and values of all layers in one tensor [layers, 2, pages * PAGE_SIZE, heads, size].

        A forward pass writes its token i to `write_index[i]`.
        """

        def __init__(self, layers: int, pages: int) -> None:
            super().__init__(layers=[])
            self.layer_count, self.pages = layers, pages
            self.storage: torch.Tensor | None = None
            self.write_index = torch.zeros(0, dtype=torch.int64)
            self.layer = 0
            """The layer of the last `update`, whose attention is computed next."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
            storage = self.storage_for(keys, values)
            storage[layer_idx, 0].index_copy_(0, self.write_index, keys)
            storage[layer_idx, 1].index_copy_(0, self.write_index, values)
            self.layer = layer_idx
            return key_states, value_states

        def storage_for(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            """Return the storage for keys and values [tokens, heads, size]. The first call allocates it."""
            if self.storage is None:
                shape = (self.layer_count, 2, self.pages * PAGE_SIZE, *keys.shape[1:])
                self.storage = keys.new_zeros(shape)
            if not keys.shape[1:] == values.shape[1:] == self.storage.shape[3:] or keys.dtype != self.storage.dtype:
                raise UnsupportedModelError("keys and values of the layers differ in shape or type")
            return self.storage

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0  # positions are passed explicitly, and there is no mask

    return PagedCache


# --- attention ------------------------------------------------------------------------------------------------------


class PackedAttention:
    """Causal attention within each of several sequences that are packed in one row."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.bounds = np.cumsum([0, *lengths]).tolist()
        self.max_length = max(lengths)
        self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend from query [1, heads, tokens, size] to key and value [1, key heads, tokens, size].

        Returns:
            [1, tokens, heads, size]
        """
        size = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cuda"
        if half and softcap is None and size % 8 == 0 and size <= 256:
            return self._varlen_attention(query, key, value, scale, window)
        outputs = []
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            q, k, v = (states[:, :, start:stop] for states in (query, key, value))
            mask = None
            if window is not None and window < stop - start:
                ones = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device)
                mask = ones.tril().triu(1 - window)
            outputs.append(_dense_attention(q, k, v, mask, scale, softcap))
        return torch.cat(outputs, 2).transpose(1, 2)

    def _varlen_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = query.shape[1] // key.shape[1]
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if groups > 1:  # a small copy: a prompt runs once for all its samples
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        window_size = (-1 if window is None else window - 1, 0)
        bounds, length = self.cu_seqlens, self.max_length
        output: Any = varlen_attn(q, k, v, bounds, bounds, length, length, scale=scale, window_size=window_size)
        return output.unsqueeze(0)  # type: ignore[no-any-return]


class DecodeAttention:
    """Attention from the current token of each row to the row's pages.

    Args:
        cache: The cache.
        table: [rows, pages] Pages of each row.
        lengths: [rows] Number of tokens of each row before the current one.
    """

    def __init__(self, cache: Any, table: torch.Tensor, lengths: torch.Tensor) -> None:
        self.cache, self.table, self.lengths = cache, table, lengths

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend from query [rows, heads, 1, size]; key and value are in the cache.

        Returns:
            [rows, 1, heads, size]
        """
        keys, values = self.cache.storage[self.cache.layer]
        if query.device.type == "cuda":
            output = decode_triton.paged_attention(
                query[:, :, 0],
                keys,
                values,
                self.table,
                self.lengths,
                page_size=PAGE_SIZE,
                scale=scale,
                window=window,
                softcap=softcap,
            )
            return output.unsqueeze(1)
        offsets = torch.arange(PAGE_SIZE, device=query.device)
        index = (self.table[:, :, None] * PAGE_SIZE + offsets).flatten(1).long()  # [rows, tokens]
        position = torch.arange(index.shape[1], device=query.device)
        mask = position <= self.lengths[:, None]
        if window is not None:
            mask &= position > self.lengths[:, None] - window
        k, v = (states[index].transpose(1, 2) for states in (keys, values))
        return _dense_attention(query, k, v, mask[:, None, None], scale, softcap).transpose(1, 2)


def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from query [rows, heads, queries, size]. Without a mask, attention is causal."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value


_pass_lock = threading.Lock()
"""Held during a forward pass. transformers calls `_attend` without the pass as an argument, so one runs at a time."""
_attention: PackedAttention | DecodeAttention | None = None
"""Attention of the running forward pass."""
_windows: set[int] = set()
"""Sliding windows of the layers that the running forward pass has reached."""


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature of an implementation in transformers. `attention_mask` is always `None`."""
    unsupported = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    if _attention is None or unsupported or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"its attention has {', '.join(unsupported) or 'no causal order'}")
    if sliding_window is not None:
        _windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attention(query, key, value, scale, sliding_window, softcap), None


@contextmanager
def _use_attention(runner: ModelRunner, attention: PackedAttention | DecodeAttention) -> Iterator[None]:
    """Replace the attention of a model during one forward pass."""
    global _attention
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    config = text_config(runner.base)
    with _pass_lock:
        implementation, _attention = config._attn_implementation, attention
        _windows.clear()
        config._attn_implementation_internal = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation_internal = implementation
            _attention = None


class FusedKernels:
    """RMS norms and rotary position embeddings of a model in one kernel each, where the model's code launches ten.

    A kernel replaces the code of a model only if both agree on random inputs.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._norms: list[tuple[Any, bool]] = []
        self._rotary: list[tuple[Any, Callable[..., Any]]] = []
        offsets: dict[type, bool | None] = {}
        for module in model.modules():
            if not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module):
                continue  # a forward method of the instance is the user's
            if type(module) not in offsets:
                offsets[type(module)] = _norm_offset(module)
            offset = offsets[type(module)]
            if offset is not None:
                self._norms.append((module, offset))
        for source in {sys.modules.get(type(module).__module__) for module in model.modules()}:
            rotate = getattr(source, _ROTARY, None)
            if rotate is not None and _rotates_halves(rotate, next(model.parameters())):
                self._rotary.append((source, rotate))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the kernels in the forward passes of the current thread."""
        thread = threading.get_ident()
        for module, offset in self._norms:
            module.forward = _fused_norm(module, offset, thread)
        for source, rotate in self._rotary:
            setattr(source, _ROTARY, _fused_rotary(rotate, thread))
        try:
            yield
        finally:
            for module, _ in self._norms:
                del module.forward
            for source, rotate in self._rotary:
                setattr(source, _ROTARY, rotate)


_ROTARY = "apply_rotary_pos_emb"
"""Name of the function for rotary position embeddings in transformers' modeling modules."""


def _norm_epsilon(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    return actual.dtype == expected.dtype and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _random_like(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random numbers of the type and device of a tensor; the global generator is not used."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(tensor.device, tensor.dtype)


def _norm_offset(norm: Any) -> bool | None:
    """Return the argument `offset` with which `rms_norm` computes a norm, or `None` if it does not."""
    weight, epsilon = getattr(norm, "weight", None), _norm_epsilon(norm)
    if weight is None or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    inputs = _random_like(weight, 4, 1, len(weight))
    expected = norm(inputs)
    for offset in (False, True):
        if _agree(decode_triton.rms_norm(inputs, weight, epsilon, offset=offset), expected):
            return offset
    return None


def _fused_norm(norm: Any, offset: bool, thread: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that calls `decode_triton.rms_norm`, which has no gradient, in one thread only."""
    forward, epsilon = norm.forward, _norm_epsilon(norm)

    def fused(hidden_states: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != thread or hidden_states.dtype != norm.weight.dtype or epsilon is None:
            return forward(hidden_states)  # type: ignore[no-any-return]
        return decode_triton.rms_norm(hidden_states, norm.weight, epsilon, offset=offset)

    return fused


def _rotates_halves(rotate: Callable[..., Any], parameter: torch.Tensor) -> bool:
    """Whether a function for rotary position embeddings computes what `decode_triton.rotate` does."""
    query, key = _random_like(parameter, 2, 4, 1, 32), _random_like(parameter, 2, 2, 1, 32)
    cos, sin = _random_like(parameter, 2, 2, 1, 32).unbind()
    try:
        expected = rotate(query, key, cos, sin)
    except Exception:  # a function of this name with other arguments
        return False
    return all(map(_agree, decode_triton.rotate(query, key, cos, sin), expected))


def _fused_rotary(rotate: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """Return a function that calls `decode_triton.rotate` for decode steps of one thread, and `rotate` otherwise."""

    def fused(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any) -> Any:
        shape = (query.shape[0], 1, query.shape[-1])
        same_type = query.dtype == key.dtype == cos.dtype == sin.dtype
        if args or threading.get_ident() != thread or query.shape[2] != 1 or cos.shape != shape or not same_type:
            return rotate(query, key, cos, sin, *args)
        return decode_triton.rotate(query, key, cos, sin)

    return fused


# --- the decode step ------------------------------------------------------------------------------------------------

(_ID, _POSITION, _LENGTH, _COUNT, _ALIVE, _LIMIT, _STOP_SET, _GREEDY, _KIND, _TOP_K, _STEP) = range(11)
"""Indices of `StepState.integers`. The first entry of `_STEP` is the index of the step in the window."""
_TEMPERATURE, _TOP_P, _MIN_P, _UNIFORM = range(4)
"""Indices of `StepState.floats`. From `_UNIFORM` on, there is a random number for each step of the window."""


class Variant(NamedTuple):
    """Options of a decode step that select its code. A graph is captured for each variant."""

    rows: int
    greedy: str
    """`none`, `some` or `all`."""
    has_temperature: bool
    """Whether a temperature is not 1."""
    is_cold: bool
    """Whether a temperature is below `COLD_TEMPERATURE`."""
    top_k: bool
    top_p: bool
    min_p: bool
    kinds: tuple[str, ...]
    """Kinds of log-probs."""
    forbidden: int
    """Largest number of forbidden tokens of a row, rounded up."""


class StepRules(BatchRules):
    """Rules that are read from the state on the device, which the host rewrites for each window."""

    def __init__(self, variant: Variant, state: StepState, blocks: Blocks) -> None:
        rows = variant.rows
        self.state, self.variant, self.blocks = state, variant, blocks
        self.all_greedy = variant.greedy == "all"
        self.greedy = None if variant.greedy == "none" else state.integers[_GREEDY, :rows] > 0
        self.temperature = state.floats[_TEMPERATURE, :rows].float()
        self.has_temperature, self.is_cold = variant.has_temperature, variant.is_cold
        self.common_kind = variant.kinds[0] if len(variant.kinds) == 1 else None  # type: ignore[assignment]
        kind = state.integers[_KIND, :rows]
        self.kinds = {name: kind == KINDS.index(name) for name in variant.kinds}  # type: ignore[misc]
        self.forbidden = state.forbidden if variant.forbidden else None  # type: ignore[assignment]
        self.truncates = variant.top_k or variant.top_p or variant.min_p

    def forbid(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.variant.forbidden:
            return scores
        return self._exclude(scores, self.state.integers[_COUNT, : self.variant.rows])

    def suppress(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.variant.forbidden:
            return logits
        # At this count, only the tokens that are never sampled are forbidden.
        count = torch.full_like(self.state.integers[_COUNT, : self.variant.rows], _NEVER - 1)
        return self._exclude(logits.to(torch.float32, copy=True), count)

    def _exclude(self, scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        tokens, min_counts = self.state.forbidden[:, : self.variant.rows, : self.variant.forbidden]
        penalty = torch.where(count[:, None] < min_counts, -torch.inf, 0.0).to(scores.dtype)
        return scores.scatter_add_(1, tokens, penalty)

    def truncate(self, probs: torch.Tensor) -> torch.Tensor:
        rows, floats = self.variant.rows, self.state.floats
        floor = probs.new_zeros((rows, 1))
        if self.variant.min_p:
            floor = probs.amax(-1, keepdim=True) * floats[_MIN_P, :rows, None].float()
        mass: torch.Tensor | float = 1.0
        if self.variant.top_k:
            top_k = self.state.integers[_TOP_K, :rows].float()
            top_k_floor = _find_floors(probs, top_k, mass=False)
            floor = torch.maximum(floor, top_k_floor)
            mass = probs.masked_fill(probs < top_k_floor, 0.0).sum(-1)
        if self.variant.top_p:
            top_p = floats[_TOP_P, :rows].float()
            top_p_floor = _find_floors(probs, top_p * mass, mass=True)
            floor = torch.maximum(floor, top_p_floor.masked_fill(top_p[:, None] >= 1, 0.0))
        return probs.masked_fill_(probs < floor, 0.0)


def _find_floors(probs: torch.Tensor, targets: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Compute `decode_triton.find_floors` on any device."""
    if probs.device.type == "cuda":
        return decode_triton.find_floors(probs, targets, mass=mass)
    ordered = probs.sort(-1, descending=True).values
    if mass:
        reached = ordered.double().cumsum(-1)
    else:
        reached = torch.arange(1, probs.shape[1] + 1, device=probs.device).expand_as(probs)
    below = (reached < targets[:, None]).sum(-1, keepdim=True)
    floors = ordered.gather(1, below.clamp(max=probs.shape[1] - 1))
    return floors.masked_fill(below >= probs.shape[1], 0.0)


class StepState:
    """Device buffers with the state of the rows. Captured graphs read and write them, so their addresses are fixed.

    Args:
        rows: Largest number of rows.
        pages: Largest number of pages of a row.
        vocabulary: Number of logits.
        device: The device.
    """

    def __init__(self, rows: int, pages: int, vocabulary: int, device: torch.device) -> None:
        self.rows, self.vocabulary, self.device = rows, vocabulary, device
        self.integers = torch.zeros((_STEP + 1, rows), dtype=torch.int64, device=device)
        self.floats = torch.zeros((_UNIFORM + STEPS_PER_SYNC, rows), dtype=torch.float64, device=device)
        self.table = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self.forbidden = torch.zeros((2, rows, 0), dtype=torch.int64, device=device)
        self.stops = torch.zeros((1, vocabulary), dtype=torch.bool, device=device)
        self.ids = torch.zeros((STEPS_PER_SYNC, rows), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((STEPS_PER_SYNC, rows), dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Make all rows empty, so that a step writes to page 0 only."""
        for tensor in (self.integers, self.floats, self.table, self.forbidden):
            tensor.zero_()
        self.floats[_TEMPERATURE] = 1.0


class PagedDecoder:
    """The cache, buffers and graphs of an engine.

    Args:
        runner: Calls the model.
        max_rows: Largest number of rows that are decoded together.
        capture: Whether to capture the decode step in CUDA graphs. Otherwise it runs eagerly.
    """

    def __init__(self, runner: ModelRunner, max_rows: int, capture: bool) -> None:
        self.runner, self.max_rows, self.capture = runner, max_rows, capture
        self.cache: Any = None
        self.pool = PagePool(1)
        self._state: StepState | None = None
        self.graphs: dict[Variant, torch.cuda.CUDAGraph] = {}
        self.stop_sets: dict[frozenset[int], int] = {}
        self.calls = 0
        """Number of engine calls that are using the cache."""
        self._graph_pool: Any = None
        self._fingerprint: tuple[Any, ...] = ()

    @functools.cached_property
    def _fused_kernels(self) -> FusedKernels:
        return FusedKernels(self.runner.model)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and the device buffers, without the memory of the graphs."""
        buffers = () if self._state is None else vars(self._state).values()
        tensors = (getattr(self.cache, "storage", None), *buffers)
        return sum(int(tensor.nbytes) for tensor in tensors if isinstance(tensor, torch.Tensor))

    def reserve(self, longest: int, tokens: int, max_tokens: int) -> bool:
        """Allocate a larger cache if needed, and drop the graphs if the weights moved to other addresses.

        The number of pages is rounded up to a power of two, since a larger cache needs all graphs to be captured again.

        Args:
            longest: Largest number of tokens of a row, for which there is always room.
            tokens: Number of tokens of all rows.
            max_tokens: Largest number of tokens that the cache holds for several rows, rounded up to pages.

        Returns:
            Whether the cache can hold the longest row. It cannot grow while another call uses it.
        """
        if self.graphs and self._fingerprint != self._model_fingerprint():
            self._drop_graphs()
        rounded = 1 << (pages_for(tokens) - 1).bit_length()
        pages = max(min(rounded, pages_for(max_tokens)), pages_for(longest + STEPS_PER_SYNC)) + 1
        size = 0 if self.cache is None else self.cache.pages
        if size < pages and not self.calls:
            self.release()
            layers = int(text_config(self.runner.base).num_hidden_layers)
            self.cache = _cache_class()(layers, pages)
            self.pool = PagePool(pages)
        return bool(self.cache is not None and self.cache.pages > pages_for(longest + STEPS_PER_SYNC))

    def release(self) -> None:
        """Free the cache and the graphs."""
        self._drop_graphs()
        self.cache, self._state, self.pool, self.stop_sets = None, None, PagePool(1), {}
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        for graph in self.graphs.values():
            graph.reset()
        self.graphs, self._graph_pool = {}, None

    def _model_fingerprint(self) -> tuple[Any, ...]:
        """Return the addresses of the weights and the active adapters, which are constants in a captured graph."""
        # In a transformers model without adapters, `active_adapters` raises.
        adapters = (
            getattr(self.runner.model, "active_adapters", ()) if hasattr(self.runner.model, "peft_config") else ()
        )
        disabled = [
            bool(getattr(module, "disable_adapters", False)) or bool(getattr(module, "merged", False))
            for module in self.runner.model.modules()
            if hasattr(module, "active_adapter")
        ]
        pointers = [parameter.data_ptr() for parameter in self.runner.model.parameters()]
        return (*pointers, *disabled, str(adapters() if callable(adapters) else adapters))

    # --- prefill ----------------------------------------------------------------------------------------------------

    def prefill(self, rows: Sequence[DecodingRow], pages: Sequence[list[int]]) -> tuple[torch.Tensor, list[int]]:
        """Run rows through the model and write their keys and values to pages.

        Args:
            rows: Rows whose prompt and response so far are run.
            pages: Pages of each row.

        Returns:
            [rows, V] Logits of the next tokens, and their positions.
        """
        logits: list[torch.Tensor] = []
        next_positions: list[int] = []
        chunk: list[int] = []
        for i, row in enumerate(rows):
            tokens = sum(_length(rows[j]) for j in chunk)
            if chunk and (row.prepared.media or tokens + _length(row) > PREFILL_TOKENS):
                logits.append(self._prefill_packed([rows[j] for j in chunk], [pages[j] for j in chunk]))
                chunk = []
            if row.prepared.media:
                row_logits, position = self._prefill_media(row, pages[i])
                logits.append(row_logits)
                next_positions.append(position)
            else:
                chunk.append(i)
                next_positions.append(_length(row))
        if chunk:
            logits.append(self._prefill_packed([rows[j] for j in chunk], [pages[j] for j in chunk]))
        self.runner.stats.prompts += len(rows)
        self.runner.stats.prompt_tokens += sum(map(_length, rows))
        return torch.cat(logits), next_positions

    def _prefill_packed(self, rows: Sequence[DecodingRow], pages: Sequence[list[int]]) -> torch.Tensor:
        """Run rows packed in one forward pass; return the logits of their next tokens, [rows, V]."""
        runner, device = self.runner, self.runner.device
        lengths = [_length(row) for row in rows]
        ids = torch.tensor([[token for row in rows for token in (*row.prepared.ids, *row.ids)]], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        if runner.get_rope_index is not None:
            positions = positions.expand(3, -1, -1)
        last = torch.tensor(np.cumsum(lengths) - 1, device=device)
        self.cache.write_index = _write_index(pages, lengths).to(device)
        runner.stats.steps += 1
        with _use_attention(runner, PackedAttention(lengths, device)):
            logits: torch.Tensor = runner.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=last,
                return_dict=True,
            ).logits[0]
            layer_types = getattr(text_config(runner.base), "layer_types", None) or ()
            if "sliding_attention" in layer_types and not _windows:
                raise UnsupportedModelError("its sliding windows are not passed to attention")
        return logits

    def _prefill_media(self, row: DecodingRow, pages: list[int]) -> tuple[torch.Tensor, int]:
        """Run a row with images or videos with the model's own attention and cache, and copy that cache to pages."""
        from transformers import DynamicCache

        runner, device, length = self.runner, self.runner.device, _length(row)
        ids = torch.tensor([[*row.prepared.ids, *row.ids]])
        positions, next_position = torch.arange(length)[None], length
        if runner.get_rope_index is not None:
            positions, next_positions = runner.rope_positions([row], length)
            next_position = int(next_positions[0])
        cache: DynamicCache = DynamicCache(config=runner.config)
        logits = runner.logits(ids.to(device), None, positions.to(device), cache, runner.media([row], length))
        index = _write_index([pages], [length]).to(device)
        layers: list[Any] = cache.layers
        for i, layer in enumerate(layers):
            # [tokens, heads, size]. A sliding layer has only the last tokens; later tokens do not attend to the others.
            keys, values = (states[0].transpose(0, 1) for states in (layer.keys, layer.values))
            storage = self.cache.storage_for(keys, values)
            storage[i, 0].index_copy_(0, index[-len(keys) :], keys)
            storage[i, 1].index_copy_(0, index[-len(keys) :], values)
        return logits, next_position

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages, in all layers.

        Args:
            sources: Pages to copy.
            targets: Pages to write.
        """
        storage = self.cache.storage
        paged = storage.view(*storage.shape[:2], self.cache.pages, PAGE_SIZE, *storage.shape[3:])
        source, target = (torch.tensor(pages, device=storage.device) for pages in (sources, targets))
        paged.index_copy_(2, target, paged.index_select(2, source))

    # --- decode steps -----------------------------------------------------------------------------------------------

    def batch_size(self, count: int) -> int:
        """Return the smallest batch size with a graph that holds a number of rows.

        Args:
            count: Number of rows.
        """
        return next((size for size in GRAPH_ROWS if count <= size < self.max_rows), self.max_rows)

    def make_state(self, vocabulary: int) -> None:
        """Allocate the device buffers, if that was not done.

        Args:
            vocabulary: Number of logits.
        """
        if self._state is None:
            positions = self.runner.max_positions or self.cache.pages * PAGE_SIZE
            pages = min(pages_for(positions + STEPS_PER_SYNC), self.cache.pages)
            self._state = StepState(self.max_rows, pages, vocabulary, self.runner.device)

    @property
    def state(self) -> StepState:
        """The device buffers."""
        if self._state is None:
            raise ValueError("state: used before make_state")
        return self._state

    def stop_set(self, tokens: frozenset[int]) -> int:
        """Return the row of a set of stop tokens in `StepState.stops`, where it is added if needed.

        Args:
            tokens: The stop tokens.
        """
        number = self.stop_sets.get(tokens)
        if number is not None:
            return number
        number, state = len(self.stop_sets), self.state
        if number >= len(state.stops):
            stops = torch.zeros((2 * len(state.stops), state.vocabulary), dtype=torch.bool, device=state.device)
            stops[: len(state.stops)] = state.stops
            state.stops = stops
            self._drop_graphs()
        state.stops[number, [token for token in tokens if token < state.vocabulary]] = True
        self.stop_sets[tokens] = number
        return number

    def widen_forbidden(self, columns: int) -> None:
        """Enlarge the buffer of forbidden tokens, if needed.

        Args:
            columns: Number of forbidden tokens per row.
        """
        state = self.state
        if state.forbidden.shape[2] < columns:
            state.forbidden = torch.zeros((2, state.rows, columns), dtype=torch.int64, device=state.device)
            self._drop_graphs()

    def run_steps(self, variant: Variant, count: int) -> None:
        """Run steps on the state that is on the device.

        Args:
            variant: Variant of the step; its graph must have been captured.
            count: Number of steps.
        """
        if not self.capture:
            for _ in range(count):
                self._step(variant)
            return
        graph = self.graphs[variant]
        for _ in range(count):
            graph.replay()

    def capture_step(self, variant: Variant) -> None:
        """Capture the graph of a variant, if there is none. This overwrites the state on the device.

        Args:
            variant: Variant of the step.

        Raises:
            UnsupportedModelError: The step of this model cannot be captured.
        """
        if not self.capture or variant in self.graphs:
            return
        try:
            self._capture(variant)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(f"{type(error).__name__}: {error}") from error
        self._fingerprint = self._model_fingerprint()

    def _capture(self, variant: Variant) -> None:
        state = self.state
        state.clear()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and allocates the workspaces of libraries
                self._step(variant)
        torch.cuda.current_stream().wait_stream(stream)
        state.clear()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            self._step(variant)
        self._graph_pool = graph.pool()
        self.graphs[variant] = graph

    def _step(self, variant: Variant) -> None:
        """Sample the next token of each row, and advance the rows that have not ended."""
        state, runner, rows = self.state, self.runner, variant.rows
        integers = state.integers[:, :rows]
        lengths, step = integers[_LENGTH], state.integers[_STEP, :1]
        table = state.table[:rows]
        page = table.gather(1, (lengths // PAGE_SIZE)[:, None])[:, 0].long()
        self.cache.write_index = page * PAGE_SIZE + lengths % PAGE_SIZE
        positions = integers[_POSITION][:, None]
        if runner.get_rope_index is not None:
            positions = positions.expand(3, -1, -1)
        fused = self._fused_kernels() if runner.device.type == "cuda" else nullcontext()
        with _use_attention(runner, DecodeAttention(self.cache, table, lengths)), fused:
            logits = runner.model(
                input_ids=integers[_ID][:, None],
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
            ).logits[:, -1]
        rules = StepRules(variant, state, Blocks(rows, logits.shape[1], logits.device))
        uniform = state.floats[_UNIFORM:, :rows].index_select(0, step)[0]
        chosen = choose_tokens(logits, rules, uniform)
        state.ids[:, :rows].index_copy_(0, step, chosen.ids[None])
        state.logprobs[:, :rows].index_copy_(0, step, chosen.logprobs[None].float())
        alive = integers[_ALIVE].clone()
        for counter in (_POSITION, _LENGTH, _COUNT):
            integers[counter].add_(alive)
        ended = state.stops[integers[_STOP_SET], chosen.ids] | chosen.logprobs.isnan()
        ended |= integers[_COUNT] >= integers[_LIMIT]
        integers[_ID].copy_(torch.where(chosen.logprobs.isnan(), integers[_ID], chosen.ids))
        integers[_ALIVE].mul_(~ended)
        step.add_(1)


def _length(row: DecodingRow) -> int:
    """Return the number of tokens of a row: prompt and response so far."""
    return len(row.prepared.ids) + len(row.ids)


def _prompt_key(row: DecodingRow) -> int:
    """Return a key that rows have in common if one prefill serves them: same prompt, and no response yet."""
    return id(row) if row.ids else id(row.prepared)


def _write_index(pages: Sequence[list[int]], lengths: Sequence[int]) -> torch.Tensor:
    """Return the indices of sequences in the cache, [tokens], by the pages of each sequence."""
    indices = [
        (np.array(sequence_pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[:length]
        for sequence_pages, length in zip(pages, lengths, strict=True)
    ]
    return torch.from_numpy(np.concatenate(indices))


# --- the rows of a call ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LiveRow:
    """A row that is being decoded."""

    row: DecodingRow
    pages: list[int]
    offset: int
    """Position id of a token minus its index; not 0 after images (spatial positions)."""
    stop_set: int
    forbidden: tuple[tuple[int, int], ...]
    """Pairs (token, minimum response length at which it can be sampled)."""


@dataclass(eq=False)
class PagedBatch:
    """The rows of one call that are being decoded.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32)
    >>> decoder = PagedDecoder(ModelRunner(LlamaForCausalLM(config)), max_rows=4, capture=False)
    >>> PagedBatch(decoder).free_rows
    4
    """

    decoder: PagedDecoder
    live: list[LiveRow] = field(default_factory=list)

    @property
    def free_rows(self) -> int:
        """Number of rows that can join."""
        return self.decoder.max_rows - len(self.live)

    def next_groups(self, waiting: deque[DecodingRow]) -> list[list[DecodingRow]]:
        """Remove the rows that can join now from the front of a queue, and return them in groups.

        The rows of a group have one prompt, which runs once. If they do not fit in an empty batch, as many as fit join.

        Args:
            waiting: Rows that wait; those that join are removed.

        Returns:
            The groups, for `admit`.
        """
        if self.live and self.free_rows < max(1, self.decoder.max_rows // REFILL_SHARE):
            return []
        groups: list[list[DecodingRow]] = []
        free_rows = self.free_rows
        # Each row in the batch may need another page for the next window.
        available = self.decoder.pool.available - len(self.live)
        while waiting:
            first = waiting[0]
            group = 1
            while group < len(waiting) and _prompt_key(waiting[group]) == _prompt_key(first):
                group += 1
            shared = _length(first) // PAGE_SIZE
            per_row = pages_for(_length(first) + STEPS_PER_SYNC) - shared
            if not groups and not self.live:
                group = min(group, free_rows)
                while group > 1 and shared + group * per_row > available:
                    group -= 1
            if group > free_rows or shared + group * per_row > available:
                break
            free_rows -= group
            available -= shared + group * per_row
            groups.append([waiting.popleft() for _ in range(group)])
        return groups

    def admit(self, groups: Sequence[Sequence[DecodingRow]], version: int) -> list[FinishedRow]:
        """Run the prompts of groups of rows and sample the first token of each row.

        Args:
            groups: Groups that `next_groups` returned.
            version: Version of the policy, recorded for the tokens.

        Returns:
            The rows that their first token finishes. If it raises, the rows are unchanged.
        """
        decoder, pool = self.decoder, self.decoder.pool
        rows = [row for group in groups for row in group]
        group_of_row = [i for i, group in enumerate(groups) for _ in group]
        pages: list[list[int]] = []  # of each row
        prompt_pages: list[list[int]] = []
        sources: list[int] = []
        targets: list[int] = []
        try:
            for group in groups:
                prompt_pages.append(pool.take(pages_for(_length(group[0]))))
                pages.append(prompt_pages[-1])
                full = _length(group[0]) // PAGE_SIZE
                for _ in group[1:]:  # full pages are shared; the last page, which the response continues, is copied
                    copies = pool.take(len(prompt_pages[-1]) - full)
                    pool.share(prompt_pages[-1][:full])
                    pages.append(prompt_pages[-1][:full] + copies)
                    sources += prompt_pages[-1][full:]
                    targets += copies
            logits, next_positions = decoder.prefill([group[0] for group in groups], prompt_pages)
            decoder.make_state(logits.shape[1])
            if targets:
                decoder.copy_pages(sources, targets)
            joined = [
                self._live_row(row, row_pages, next_positions[i] - _length(row))
                for row, row_pages, i in zip(rows, pages, group_of_row, strict=True)
            ]
            finished = _sample_first(rows, logits[torch.tensor(group_of_row, device=logits.device)], version)
        except BaseException:
            for row_pages in pages:
                pool.release(row_pages)
            raise
        decoder.runner.stats.tokens += len(rows)
        ended = {id(row) for row, _, _ in finished}
        for live in joined:
            if id(live.row) in ended:
                pool.release(live.pages)
            else:
                self.live.append(live)
        return finished

    def _live_row(self, row: DecodingRow, pages: list[int], offset: int) -> LiveRow:
        stops, min_tokens = row.ends | row.stop_ids, row.request.sampling.min_tokens
        forbidden = [(token, _NEVER) for token in row.suppress]
        if min_tokens > len(row.ids):
            forbidden += [(token, min_tokens) for token in sorted(stops)]
        # A model can have an end token that is beyond its vocabulary.
        in_vocabulary = tuple(pair for pair in forbidden if pair[0] < self.decoder.state.vocabulary)
        return LiveRow(row, pages, offset, self.decoder.stop_set(stops), in_vocabulary)

    def remove_all(self) -> None:
        """Remove all rows. They keep their tokens."""
        for live in self.live:
            self.decoder.pool.release(live.pages)
        self.live = []

    def run_window(self, version: int, waiting: deque[DecodingRow]) -> list[FinishedRow]:
        """Sample up to `STEPS_PER_SYNC` tokens for each row.

        Args:
            version: Version of the policy, recorded for the tokens.
            waiting: Takes the rows that are removed because the cache is full. They keep their tokens.

        Returns:
            The finished rows. If it raises, no row has more tokens than before.
        """
        decoder = self.decoder
        steps = min(STEPS_PER_SYNC, max(live.row.limit - len(live.row.ids) for live in self.live))
        self._extend_pages(steps, waiting)
        if not self.live:
            return []
        variant = self._variant()
        decoder.capture_step(variant)
        self._upload(variant, steps)
        decoder.run_steps(variant, steps)
        state = decoder.state
        ids = state.ids[:steps, : len(self.live)].T.cpu().tolist()
        logprobs = state.logprobs[:steps, : len(self.live)].T.cpu().tolist()
        stats = decoder.runner.stats
        stats.steps += steps
        stats.rows += steps * len(self.live)
        finished: list[FinishedRow] = []
        remaining: list[LiveRow] = []
        for live, row_ids, row_logprobs in zip(self.live, ids, logprobs, strict=True):
            length = len(live.row.ids)
            end = _take_tokens(live.row, row_ids, row_logprobs, version)
            stats.tokens += len(live.row.ids) - length
            if end is None:
                remaining.append(live)
            else:
                finished.append(end)
                decoder.pool.release(live.pages)
        self.live = remaining
        return finished

    def _extend_pages(self, steps: int, waiting: deque[DecodingRow]) -> None:
        """Take pages for the next tokens. If there are too few, the rows that joined last go back to a queue."""
        pool = self.decoder.pool
        i = 0
        while i < len(self.live):
            live = self.live[i]
            row = live.row
            tokens = _length(row) - 1 + min(steps, row.limit - len(row.ids))
            missing = pages_for(tokens) - len(live.pages)
            if missing <= pool.available:
                live.pages += pool.take(max(missing, 0))
                i += 1
                continue
            last = self.live.pop()
            pool.release(last.pages)
            waiting.appendleft(last.row)

    def _variant(self) -> Variant:
        """Return the variant of the step that the sampling options of the rows need."""
        samplings = [live.row.request.sampling for live in self.live]
        random = [sampling for sampling in samplings if sampling.temperature >= MIN_TEMPERATURE]
        forbidden = max(len(live.forbidden) for live in self.live)
        columns = 1 << (forbidden - 1).bit_length() if forbidden else 0
        self.decoder.widen_forbidden(columns)
        state = self.decoder.state
        return Variant(
            rows=self.decoder.batch_size(len(self.live)),
            greedy="all" if not random else "some" if len(random) < len(samplings) else "none",
            has_temperature=any(sampling.temperature != 1 for sampling in random),
            is_cold=any(sampling.temperature < COLD_TEMPERATURE for sampling in random),
            top_k=any(0 < sampling.top_k < state.vocabulary for sampling in random),
            top_p=any(sampling.top_p < 1 for sampling in random),
            min_p=any(sampling.min_p > 0 for sampling in random),
            kinds=tuple(sorted({live.row.logprobs_kind or "processed" for live in self.live})),
            forbidden=columns,
        )

    def _upload(self, variant: Variant, steps: int) -> None:
        """Copy the state of the rows to the device."""
        state, live_rows, rows = self.decoder.state, len(self.live), variant.rows
        integers = np.zeros((_STEP + 1, rows), np.int64)
        floats = np.zeros((_UNIFORM + STEPS_PER_SYNC, rows))
        floats[_TEMPERATURE] = 1.0
        integer_fields: list[tuple[int, ...]] = []
        float_fields: list[tuple[float, ...]] = []
        seeds: list[int] = []
        starts: list[int] = []
        width = max(len(live.pages) for live in self.live)
        for live in self.live:
            row = live.row
            sampling, length, count = row.request.sampling, _length(row) - 1, len(row.ids)
            greedy = sampling.temperature < MIN_TEMPERATURE
            top_k = sampling.top_k if 0 < sampling.top_k < state.vocabulary else state.vocabulary
            kind = KINDS.index(row.logprobs_kind or "processed")
            progress = (row.ids[-1], length + live.offset, length, count, 1)
            integer_fields.append((*progress, row.limit, live.stop_set, greedy, kind, top_k))
            float_fields.append((1.0 if greedy else sampling.temperature, sampling.top_p, sampling.min_p))
            seeds.append(row.request.seeds[row.k])
            starts.append(count)
        integers[:_STEP, :live_rows] = np.array(integer_fields).T
        floats[:_UNIFORM, :live_rows] = np.array(float_fields).T
        table = np.zeros((rows, width), np.int32)
        table[:live_rows] = [live.pages + [0] * (width - len(live.pages)) for live in self.live]
        if variant.greedy != "all":
            floats[_UNIFORM : _UNIFORM + steps, :live_rows] = uniform_numbers(seeds, starts, steps).T
        state.integers[:, :rows].copy_(torch.from_numpy(integers))
        state.floats[:, :rows].copy_(torch.from_numpy(floats))
        state.table[:rows, :width].copy_(torch.from_numpy(table))
        state.table[:rows, width : width + 1] = 0  # a row that ended with a full page writes to page 0
        if variant.forbidden:
            forbidden = np.zeros((2, rows, variant.forbidden), np.int64)
            for i, live in enumerate(self.live):
                if live.forbidden:
                    forbidden[:, i, : len(live.forbidden)] = np.array(live.forbidden).T
            state.forbidden[:, :rows, : variant.forbidden].copy_(torch.from_numpy(forbidden))


def _sample_first(rows: Sequence[DecodingRow], logits: torch.Tensor, version: int) -> list[FinishedRow]:
    """Sample the first token of each row from the logits [rows, V]; return the rows that it finishes."""
    rules = BatchRules([row.next_rule()[0] for row in rows], logits.shape[1], logits.device)
    seeds = [row.request.seeds[row.k] for row in rows]
    uniform = uniform_numbers(seeds, [len(row.ids) for row in rows], 1)[:, 0]
    chosen = choose_tokens(logits, rules, torch.from_numpy(uniform).to(logits.device))
    ids, logprobs = chosen.ids.tolist(), chosen.logprobs.tolist()
    ends = [_take_tokens(row, ids[i : i + 1], logprobs[i : i + 1], version) for i, row in enumerate(rows)]
    return [end for end in ends if end is not None]


def _take_tokens(row: DecodingRow, ids: list[int], logprobs: list[float], version: int) -> FinishedRow | None:
    """Append tokens to a row up to the token that ends it; return why it ended, or `None`."""
    count = min(len(ids), row.limit - len(row.ids))
    # A log-prob of NaN means that no token could be chosen.
    valid = next((i for i, logprob in enumerate(logprobs[:count]) if math.isnan(logprob)), count)
    candidates = {i for i, token in enumerate(ids[:valid]) if token in row.ends or token in row.stop_ids}
    if row.texts is not None and valid:
        try:
            candidates |= set(row.texts.may_end(np.array(ids[:valid])).nonzero()[0].tolist())
        except Exception:  # a failure of the decoder, which `ended` reports
            candidates = set(range(valid))
    if valid == count:
        candidates.add(count - 1)
    taken = 0
    for stop in sorted({*(i + 1 for i in candidates), valid}):
        row.ids += ids[taken:stop]
        row.versions += [version] * (stop - taken)
        if row.logprobs_kind is not None:
            row.logprobs += logprobs[taken:stop]
        taken = stop
        end = row.ended() if stop - 1 in candidates else None
        if end is not None:
            return end
    if valid < count:
        error = ValueError(f"token {len(row.ids)}: the model's logits are NaN, infinite or all forbidden")
        return FinishedRow(row, "error", error)
    return None
