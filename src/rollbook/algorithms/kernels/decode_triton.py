"""Triton kernels of a decode step: `paged_attention` over a key-value cache, `rms_norm`, `rotate` for rotary position
embeddings, and `find_floors` for top-k and top-p.

Invariant: launching a kernel does not synchronize with the device or read values from it, so that a decode step can be
captured in a CUDA graph.
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without Triton
    triton = None

READY = triton is not None
"""Whether the functions of this module can be called."""
_PROGRAMS = 528
"""Number of programs that keep a large GPU busy. With fewer rows, the pages of a row are split over programs."""
_MAX_SPLITS = 16
"""Largest number of splits of a row."""
_SEARCH_BLOCK = 1024
"""Tokens that `_floor_kernel` loads at once."""


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


# --- attention ------------------------------------------------------------------------------------------------------


@_jit
def _attention_kernel(
    query,
    keys,
    values,
    table,
    lengths,
    partial,
    maxima,
    sums,
    output,
    scale,
    window,
    softcap,
    query_row_stride,
    query_head_stride,
    token_stride,
    head_stride,
    table_stride,
    heads,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    # One program per row, key-value head and split; the query heads of a group share the loaded keys.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    first_page = first // PAGE
    pages = tl.cdiv(length, PAGE) - first_page
    pages_per_split = tl.cdiv(pages, SPLITS)
    begin = first_page + split * pages_per_split
    end = tl.minimum(begin + pages_per_split, first_page + pages)

    group = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, SIZE_BLOCK)
    slot = tl.arange(0, PAGE)
    query_head = head * GROUP + group
    inside = (group < GROUP)[:, None] & (dim < SIZE)[None, :]
    q = tl.load(
        query + row * query_row_stride + query_head[:, None] * query_head_stride + dim[None, :], mask=inside, other=0.0
    )
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    weighted = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    for page in range(begin, end):
        cache_page = tl.load(table + row * table_stride + page).to(tl.int64)
        token = cache_page * PAGE + slot
        position = page * PAGE + slot
        visible = (position < length) & (position >= first)
        offset = token[:, None] * token_stride + head * head_stride + dim[None, :]
        mask = visible[:, None] & (dim < SIZE)[None, :]
        k = tl.load(keys + offset, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # softcap * tanh(scores / softcap)
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        decay = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + offset, mask=mask, other=0.0)
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    output_offset = (row * heads + query_head[:, None]) * SIZE + dim[None, :]
    if SPLITS == 1:
        tl.store(output + output_offset, (weighted / total[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        split_index = (row * heads + query_head) * SPLITS + split
        tl.store(maxima + split_index, largest, mask=group < GROUP)
        tl.store(sums + split_index, total, mask=group < GROUP)
        tl.store(partial + split_index[:, None] * SIZE + dim[None, :], weighted, mask=inside)


@_jit
def _merge_kernel(partial, maxima, sums, output, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    # One program per row and query head. The splits are rescaled to their common maximum and summed.
    row_head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, SIZE_BLOCK)
    largest = tl.load(maxima + row_head * SPLITS + split)
    weights = tl.exp(largest - tl.max(largest, 0))  # 0 for an empty split
    total = tl.sum(weights * tl.load(sums + row_head * SPLITS + split), 0)
    inside = (dim < SIZE)[None, :]
    parts = tl.load(partial + (row_head * SPLITS + split)[:, None] * SIZE + dim[None, :], mask=inside, other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / total
    tl.store(output + row_head * SIZE + dim, merged.to(output.dtype.element_ty), mask=dim < SIZE)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend from one token per row to the row's pages of a key-value cache.

    Args:
        query: [rows, heads, size]
        keys: [tokens, key heads, size] Keys of the cache; the last axis is contiguous.
        values: [tokens, key heads, size] Values of the cache, with the strides of `keys`.
        table: [rows, pages] int32. Page p of the cache has tokens [p * page_size, (p + 1) * page_size).
        lengths: [rows] Number of tokens before the current one. The current token is in the cache, too.
        page_size: Tokens per page, a power of two.
        scale: Factor of the scores, such as 1 / sqrt(size).
        window: Size of the sliding window, including the current token; `None`: no window.
        softcap: Soft cap c of the scores x, c tanh(x / c); `None`: no cap.

    Returns:
        [rows, heads, size]
    """
    rows, heads, size = query.shape
    key_heads = keys.shape[1]
    group = heads // key_heads
    splits = 1
    while splits < _MAX_SPLITS and rows * key_heads * splits * 2 <= _PROGRAMS:
        splits *= 2
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial = maxima = sums = output
    if splits > 1:
        partial = query.new_empty((rows, heads, splits, size), dtype=torch.float32)
        maxima, sums = query.new_empty((2, rows, heads, splits), dtype=torch.float32).unbind()
    size_block = max(triton.next_power_of_2(size), 16)
    _attention_kernel[(rows, key_heads, splits)](
        query,
        keys,
        values,
        table,
        lengths,
        partial,
        maxima,
        sums,
        output,
        scale,
        window or 0,
        softcap or 0.0,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        heads,
        GROUP=group,
        GROUP_BLOCK=max(triton.next_power_of_2(group), 16),
        SIZE=size,
        SIZE_BLOCK=size_block,
        PAGE=page_size,
        SPLITS=splits,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=4,
    )
    if splits > 1:
        _merge_kernel[(rows * heads,)](
            partial, maxima, sums, output, SIZE=size, SIZE_BLOCK=size_block, SPLITS=splits, num_warps=1
        )
    return output


# --- normalization and positions ------------------------------------------------------------------------------------


@_jit
def _norm_kernel(inputs, weight, output, row_stride, size, epsilon, OFFSET: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, SIZE_BLOCK)
    inside = dim < size
    x = tl.load(inputs + row * row_stride + dim, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    if OFFSET:
        normed = normed * (1.0 + scale)
    else:  # rounded before the product, as in the models
        normed = normed.to(output.dtype.element_ty).to(tl.float32) * scale
    tl.store(output + row * size + dim, normed.to(output.dtype.element_ty), mask=inside)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: bool) -> torch.Tensor:
    """Normalize the last axis by its root mean square, in one kernel.

    Args:
        inputs: [..., size]; the last axis is contiguous.
        weight: [size], of the type of `inputs`.
        epsilon: Added to the mean square.
        offset: Whether the factor is 1 + weight (Gemma) or weight (Llama).

    Returns:
        [..., size]
    """
    size = inputs.shape[-1]
    rows = inputs.reshape(-1, size)
    output = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    block = triton.next_power_of_2(size)
    _norm_kernel[(len(rows),)](
        rows,
        weight,
        output,
        rows.stride(0),
        size,
        epsilon,
        OFFSET=offset,
        SIZE_BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
    )
    return output


@_jit
def _rotate_kernel(
    query,
    key,
    cos,
    sin,
    query_output,
    key_output,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    cos_row_stride,
    sin_row_stride,
    heads,
    key_heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    # One program per row and head; the key heads follow the query heads. Products are rounded, as in the models.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, HALF_BLOCK)
    inside = dim < HALF
    kind = query_output.dtype.element_ty
    if head < heads:
        source = query + row * query_row_stride + head * query_head_stride
        target = query_output + (row * heads + head) * 2 * HALF
    else:
        source = key + row * key_row_stride + (head - heads) * key_head_stride
        target = key_output + (row * key_heads + head - heads) * 2 * HALF
    first = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + row * cos_row_stride + dim, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + row * cos_row_stride + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + row * sin_row_stride + dim, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + row * sin_row_stride + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    left = (first * first_cos).to(kind).to(tl.float32) - (second * first_sin).to(kind).to(tl.float32)
    right = (second * second_cos).to(kind).to(tl.float32) + (first * second_sin).to(kind).to(tl.float32)
    tl.store(target + dim, left.to(kind), mask=inside)
    tl.store(target + HALF + dim, right.to(kind), mask=inside)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary position embeddings to the query and the key of one token per row, in one kernel.

    Args:
        query: [rows, heads, 1, size]; the last axis of all arguments is contiguous.
        key: [rows, key heads, 1, size]
        cos: [rows, 1, size]
        sin: [rows, 1, size]

    Returns:
        The rotated query and key, in their shapes.
    """
    rows, heads, _, size = query.shape
    key_heads = key.shape[1]
    query_output, key_output = (
        torch.empty(states.shape, dtype=states.dtype, device=states.device) for states in (query, key)
    )
    _rotate_kernel[(rows, heads + key_heads)](
        query,
        key,
        cos,
        sin,
        query_output,
        key_output,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        heads,
        key_heads,
        HALF=size // 2,
        HALF_BLOCK=max(triton.next_power_of_2(size // 2), 16),
        num_warps=1,
    )
    return query_output, key_output


# --- top-k and top-p ------------------------------------------------------------------------------------------------


@_jit
def _floor_kernel(probs, row_stride, vocabulary, targets, floors, MASS: tl.constexpr, BLOCK: tl.constexpr):
    # Nonnegative floats sort like their bits. Each pass over the row finds the next four bits of the floor: the
    # largest digit for which the tokens at or above it reach the target.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    digit = tl.arange(0, 16)
    prefix = 0
    for step in tl.static_range(8):
        candidate = prefix + (digit << (28 - 4 * step))
        reached = tl.zeros([16], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            prob = tl.load(probs + row * row_stride + start + column, mask=inside, other=0.0)
            weight = tl.where(inside, prob if MASS else 1.0, 0.0)
            is_kept = prob.to(tl.int32, bitcast=True)[:, None] >= candidate[None, :]
            reached += tl.sum(tl.where(is_kept, weight[:, None], 0.0), 0)
        possible = reached >= target
        if step == 0:
            possible = possible & (digit < 4)  # probabilities are below 2; larger digits would overflow
        prefix += tl.max(tl.where(possible, digit, 0), 0) << (28 - 4 * step)
    tl.store(floors + row, prefix.to(tl.float32, bitcast=True))  # type: ignore[attr-defined]


def find_floors(probs: torch.Tensor, targets: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Find the threshold of top-k or top-p: the largest p such that the tokens of probability >= p reach a target.

    Args:
        probs: [rows, V] float32, in [0, 1]; the last axis is contiguous.
        targets: [rows] float32. If all tokens together do not reach it, the floor is 0.
        mass: Whether targets are sums of probabilities (top-p) or numbers of tokens (top-k).

    Returns:
        [rows, 1] float32.
    """
    rows, vocabulary = probs.shape
    floors = probs.new_empty((rows, 1))
    _floor_kernel[(rows,)](
        probs, probs.stride(0), vocabulary, targets, floors, MASS=mass, BLOCK=_SEARCH_BLOCK, num_warps=8
    )
    return floors
