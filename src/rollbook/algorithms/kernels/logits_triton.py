"""Triton kernels of `kernels.vocabulary`: sums over the vocabulary, their gradients, and sums of a product of matrices.

Invariant: every logit is read once and converted to float32. Results are the four numbers of
`kernels.vocabulary.SoftmaxSums` for each token, equal to those of the torch implementation up to the order of
additions. Nothing here synchronizes the device.
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch for CPUs comes without Triton; nothing here is then called
    triton = None

AVAILABLE = triton is not None
_BLOCK = 4096
_WARPS = 4
_LOG2E: Any = 1.4426950408889634
_LN2: Any = 0.6931471805599453
# Replaces -inf in logits from a product: differences are never NaN, and its exponential is 0 next to any real logit.
LOWEST: Any = -1e30
# exp of this is 0 in every type: clamping a difference here changes no result.
_FLOOR: Any = -1e4
# Largest scale: an infinite one times a difference of 0 would be NaN.
_LARGEST: Any = 3e38
if triton is not None:
    _LOG2E, _LN2, LOWEST, _FLOOR, _LARGEST = map(tl.constexpr, (_LOG2E, _LN2, LOWEST, _FLOOR, _LARGEST))


def _jit(function: Callable[..., Any]) -> Any:
    # Triton compiles a kernel again for integers that are divisible by 16, which takes seconds. The number of tokens
    # (`inner` of logits [O, I, V]) differs from batch to batch.
    return function if triton is None else triton.jit(function, do_not_specialize=["tokens", "inner"])


@_jit
def _capped(x, cap):
    # cap * tanh(x / cap); near 0 by its series, where a difference of powers would lose digits.
    share = x / cap
    square = share * share
    small_tanh = share * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    power = tl.exp(-2 * tl.abs(share))
    far = (1 - power) / (1 + power)
    far = tl.where(share < 0, -far, far)
    return cap * tl.where(square < 0.01, small_tanh, far)


@_jit
def _in_powers_of_2(scale):
    # 1 / temperature for `exp2`; where() and not minimum(), which would hide NaN.
    scale *= _LOG2E
    return tl.where(scale > _LARGEST, _LARGEST, scale)


@_jit
def _sums_kernel(
    logits,
    labels,
    scales,
    top_out,
    mass_out,
    spread_out,
    chosen_out,
    inner,
    stride_outer,
    stride_inner,
    stride_entry,
    vocabulary,
    start,
    SCALED: tl.constexpr,
    SPREAD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + (row // inner) * stride_outer + (row % inner) * stride_inner
    scale = _LOG2E
    if SCALED:
        scale = _in_powers_of_2(tl.load(scales + row))
    top = -float("inf")
    mass = 0.0
    spread = 0.0
    for first in tl.range(0, vocabulary, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        at = entries.to(tl.int64) if WIDE else entries
        x = tl.load(row_logits + at * stride_entry, mask=entries < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        # Rescale the sums so far to the new maximum; before the first logit there are none.
        rise = tl.where(top == -float("inf"), 0.0, (reference - top) * scale)
        keep = tl.exp2(-rise)
        distance = (x - reference) * scale
        power = tl.exp2(distance)
        if SPREAD:
            moved = keep * (spread + tl.minimum(rise, -_FLOOR) * mass)
            spread = moved - tl.sum(tl.maximum(distance, _FLOOR) * power, 0)
        mass = keep * mass + tl.sum(power, 0)
        top = higher
    label = tl.load(labels + row) - start
    inside = (label >= 0) & (label < vocabulary)
    chosen = tl.load(row_logits + label * stride_entry, mask=inside, other=0.0).to(tl.float32)
    tl.store(top_out + row, top)
    tl.store(mass_out + row, mass)
    tl.store(spread_out + row, spread * _LN2)
    tl.store(chosen_out + row, chosen)


@_jit
def _gradient_kernel(
    logits,
    out,
    labels,
    scales,
    tops,
    log_masses,
    entropies,
    grad_logprobs,
    grad_entropy,
    inner,
    stride_outer,
    stride_inner,
    stride_entry,
    vocabulary,
    start,
    cap,
    SCALED: tl.constexpr,
    SPREAD: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < vocabulary
    row_logits = logits + (row // inner) * stride_outer + (row % inner) * stride_inner
    weight = tl.load(grad_logprobs + row)
    # A token without an incoming gradient is not read: its gradient is 0 even if its logits are NaN.
    has_gradient = weight != 0.0
    if SPREAD:
        weight_entropy = tl.load(grad_entropy + row)
        has_gradient = has_gradient | (weight_entropy != 0.0)
    read = inside & has_gradient
    at = entries.to(tl.int64) if WIDE else entries
    x = tl.load(row_logits + at * stride_entry, mask=read, other=-float("inf")).to(tl.float32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + row)
    log_prob = (x - tl.load(tops + row)) * scale - tl.load(log_masses + row)
    factor = weight
    if SPREAD:
        factor += weight_entropy * (tl.maximum(log_prob, _FLOOR) + tl.load(entropies + row))
    label = tl.load(labels + row) - start
    gain = tl.where((entries == label) & (x != -float("inf")), weight, 0.0)
    slope = (gain - tl.exp(log_prob) * factor) * scale
    if CAPPED:
        share = x / cap
        slope *= 1.0 - share * share
    slope = tl.where(read, slope, 0.0)
    tl.store(out + row * vocabulary + entries, slope.to(out.dtype.element_ty), mask=inside)


@_jit
def _product_kernel(
    hidden,
    weight,
    bias,
    scales,
    top_out,
    mass_out,
    spread_out,
    tokens,
    vocabulary,
    width,
    cap,
    SCALED: tl.constexpr,
    SPREAD: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_t = tl.cdiv(tokens, BLOCK_T)
    tiles_v = tl.cdiv(vocabulary, BLOCK_V)
    steps = tl.cdiv(width, BLOCK_D)
    in_group = GROUP * tiles_v
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        # Grouped so that concurrent programs share tiles of tokens and of the vocabulary in the L2 cache.
        first_t = (tile // in_group) * GROUP
        group = min(tiles_t - first_t, GROUP)
        at_t = first_t + (tile % in_group) % group
        at_v = (tile % in_group) // group
        x = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
        for step in range(steps):
            left = hidden.load([at_t * BLOCK_T, step * BLOCK_D])
            right = weight.load([at_v * BLOCK_V, step * BLOCK_D])
            x = tl.dot(left, right.T, x)
        rows = at_t * BLOCK_T + tl.arange(0, BLOCK_T)
        entries = at_v * BLOCK_V + tl.arange(0, BLOCK_V)
        if BIASED:
            x += tl.load(bias + entries, mask=entries < vocabulary, other=0.0).to(tl.float32)[None, :]
            x = tl.where(x < LOWEST, LOWEST, x)
        if CAPPED:
            x = _capped(x, cap)
        x = tl.where((entries < vocabulary)[None, :], x, LOWEST)
        scale = _LOG2E
        top = tl.max(x, 1)
        if SCALED:
            scale = _in_powers_of_2(tl.load(scales + rows, mask=rows < tokens, other=1.0))[:, None]
        distance = (x - top[:, None]) * scale
        power = tl.exp2(distance)
        at = at_v.to(tl.int64) * tokens + rows
        tl.store(top_out + at, top, mask=rows < tokens)
        tl.store(mass_out + at, tl.sum(power, 1), mask=rows < tokens)
        if SPREAD:
            # As in `_sums_kernel`: where a temperature is tiny a distance is -inf, and -inf * 0 is NaN.
            spread = tl.sum(tl.maximum(distance, _FLOOR) * power, 1) * -_LN2
            tl.store(spread_out + at, spread, mask=rows < tokens)


@_jit
def _merge_kernel(
    tops,
    masses,
    spreads,
    scales,
    top_out,
    mass_out,
    spread_out,
    tokens,
    tiles,
    SCALED: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = (rows < tokens)[None, :]
    top = tl.full((BLOCK_T,), LOWEST, dtype=tl.float32)
    for first in tl.range(0, tiles, BLOCK_V):
        tile = first + tl.arange(0, BLOCK_V)
        at = tile[:, None].to(tl.int64) * tokens + rows[None, :]
        tile_tops = tl.load(tops + at, mask=real & (tile < tiles)[:, None], other=LOWEST)
        top = tl.maximum(top, tl.max(tile_tops, 0))
    scale = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if SCALED:
        scale = tl.load(scales + rows, mask=rows < tokens, other=1.0)
    mass = tl.zeros((BLOCK_T,), dtype=tl.float32)
    spread = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for first in tl.range(0, tiles, BLOCK_V):
        tile = first + tl.arange(0, BLOCK_V)
        at = tile[:, None].to(tl.int64) * tokens + rows[None, :]
        loaded = real & (tile < tiles)[:, None]
        rise = (top[None, :] - tl.load(tops + at, mask=loaded, other=LOWEST)) * scale[None, :]
        keep = tl.exp(-rise)
        tile_mass = tl.load(masses + at, mask=loaded, other=0.0)
        mass += tl.sum(keep * tile_mass, 0)
        if SPREAD:
            rise = tl.minimum(rise, -_FLOOR)
            spread += tl.sum(keep * (tl.load(spreads + at, mask=loaded, other=0.0) + rise * tile_mass), 0)
    tl.store(top_out + rows, top, mask=rows < tokens)
    tl.store(mass_out + rows, mass, mask=rows < tokens)
    tl.store(spread_out + rows, spread, mask=rows < tokens)


@_jit
def _chosen_kernel(
    hidden,
    weight,
    bias,
    labels,
    out,
    stride_hidden,
    stride_weight,
    vocabulary,
    width,
    cap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < vocabulary)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        loaded = (at < width) & inside
        left = tl.load(hidden + row * stride_hidden + at, mask=loaded, other=0.0).to(tl.float32)
        total += left * tl.load(weight + label * stride_weight + at, mask=loaded, other=0.0).to(tl.float32)
    x = tl.sum(total, 0)
    if BIASED:
        x += tl.load(bias + label, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        x = _capped(x, cap)
    tl.store(out + row, x)


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _is_wide(logits: torch.Tensor) -> bool:
    """Return whether offsets within a row exceed 32 bits, as in a transposed view."""
    return bool((logits.shape[-1] + _BLOCK) * abs(logits.stride(-1)) > 2**31 - 1)


def sums(logits: torch.Tensor, labels: torch.Tensor, start: int, scales: torch.Tensor | None, spread: bool) -> Sums:
    """Compute `SoftmaxSums` of logits [O, I, V], the first of which belongs to token `start` of the vocabulary."""
    outer, inner, vocabulary = logits.shape
    out = torch.empty(4, outer * inner, dtype=torch.float32, device=logits.device)
    top, mass, spreads, chosen = out.unbind()
    if outer * inner:
        with torch.cuda.device(logits.device):
            _sums_kernel[(outer * inner,)](
                logits,
                labels,
                labels if scales is None else scales,
                *(top, mass, spreads, chosen),
                inner,
                *logits.stride(),
                vocabulary,
                start,
                SCALED=scales is not None,
                SPREAD=spread,
                WIDE=_is_wide(logits),
                BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
                num_warps=_WARPS,
            )
    return top, mass, spreads, chosen


def logits_gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    labels: torch.Tensor,
    start: int,
    scales: torch.Tensor | None,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    cap: float | None,
) -> None:
    """Write the gradient by logits [O, I, V] into `out`, contiguous; `saved` has top, log mass and entropy [O * I]."""
    outer, inner, vocabulary = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    if outer * inner:
        with torch.cuda.device(logits.device):
            _gradient_kernel[(outer * inner, triton.cdiv(vocabulary, block))](
                logits,
                out,
                labels,
                labels if scales is None else scales,
                *saved,
                grad_logprobs,
                grad_logprobs if grad_entropy is None else grad_entropy,
                inner,
                *logits.stride(),
                vocabulary,
                start,
                1.0 if cap is None else cap,
                SCALED=scales is not None,
                SPREAD=grad_entropy is not None,
                CAPPED=cap is not None,
                WIDE=_is_wide(logits),
                BLOCK=block,
                num_warps=_WARPS,
            )


_TILE_T, _TILE_V, _TILE_D = 128, 256, 64
_STAGES = 4
_GROUP = 32
_SHARED = 200 << 10


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 0 if the device lacks TMA or the shared memory for the product."""
    properties: Any = torch.cuda.get_device_properties(device)
    supported = (properties.major, properties.minor) >= (9, 0) and properties.shared_memory_per_block_optin >= _SHARED
    return int(properties.multi_processor_count) if supported else 0


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `product_sums` supports these: 16 bits each, rows aligned for TMA, and a device that has it."""
    return (
        hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and all(
            tensor.stride(1) == 1
            and tensor.stride(0) % 8 == 0
            and tensor.data_ptr() % 16 == 0
            and min(tensor.shape) > 0
            for tensor in (hidden, weight)
        )
        and _processors(hidden.device) > 0
    )


def product_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scales: torch.Tensor | None,
    cap: float | None,
    spread: bool,
) -> Sums:
    """Compute `sums` of `hidden @ weight.T`, [N, D] and [V, D], without writing the product to memory."""
    (tokens, width), vocabulary = hidden.shape, len(weight)
    tiles = triton.cdiv(vocabulary, _TILE_V)
    parts = torch.empty(3 if spread else 2, tiles, tokens, dtype=torch.float32, device=hidden.device)
    out = torch.empty(4, tokens, dtype=torch.float32, device=hidden.device)
    top, mass, spreads, chosen = out.unbind()
    scale_pointer = labels if scales is None else scales
    flags = {"SCALED": scales is not None, "SPREAD": spread}
    shape = {"BIASED": bias is not None, "CAPPED": cap is not None}
    limit = 1.0 if cap is None else cap
    programs = min(_processors(hidden.device), tiles * triton.cdiv(tokens, _TILE_T))
    with torch.cuda.device(hidden.device):
        _product_kernel[(programs,)](
            TensorDescriptor.from_tensor(hidden, [_TILE_T, _TILE_D]),
            TensorDescriptor.from_tensor(weight, [_TILE_V, _TILE_D]),
            labels if bias is None else bias,
            scale_pointer,
            *(parts[0], parts[1], parts[-1]),
            *(tokens, vocabulary, width, limit),
            **flags,
            **shape,
            BLOCK_T=_TILE_T,
            BLOCK_V=_TILE_V,
            BLOCK_D=_TILE_D,
            GROUP=_GROUP,
            PROGRAMS=programs,
            num_warps=8,
            num_stages=_STAGES,
        )
        _merge_kernel[(triton.cdiv(tokens, 16),)](
            *(parts[0], parts[1], parts[-1]),
            scale_pointer,
            *(top, mass, spreads),
            *(tokens, tiles),
            **flags,
            BLOCK_T=16,
            BLOCK_V=64,
        )
        _chosen_kernel[(tokens,)](
            *(hidden, weight),
            labels if bias is None else bias,
            *(labels, chosen, hidden.stride(0), weight.stride(0), vocabulary, width, limit),
            **shape,
            BLOCK=min(2048, triton.next_power_of_2(width)),
        )
    # Rows with only -inf have no distribution: NaN, as in the torch implementation.
    return top.masked_fill_(top <= -1e30, torch.nan), mass, spreads, chosen
