"""Triton kernels of a decode step: attention over a paged key-value cache, and truncation of a distribution.

Neither kernel waits for the device or depends on the host, so both can be captured in a CUDA graph.
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs comes without Triton; then `READY` is False and nothing here is called
    triton = None

READY = triton is not None
_PROGRAMS = 528
"""Number of programs that fill a large device. With fewer rows, a row's tokens are split over several programs."""
_MAX_SPLITS = 16
_SEARCH_BLOCK = 1024


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
    query_row,
    query_head,
    cache_token,
    cache_head,
    table_row,
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
    # One program per row, key-value head and split; the query heads of the group share the keys that are read.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    first_page = first // PAGE
    pages = tl.cdiv(length, PAGE) - first_page
    per_split = tl.cdiv(pages, SPLITS)
    begin = first_page + split * per_split
    end = tl.minimum(begin + per_split, first_page + pages)

    group = tl.arange(0, GROUP_BLOCK)
    size = tl.arange(0, SIZE_BLOCK)
    slot = tl.arange(0, PAGE)
    query_head_index = head * GROUP + group
    inside = (group < GROUP)[:, None] & (size < SIZE)[None, :]
    q = tl.load(
        query + row * query_row + query_head_index[:, None] * query_head + size[None, :], mask=inside, other=0.0
    )
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    weighted = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    for page in range(begin, end):
        number = tl.load(table + row * table_row + page).to(tl.int64)
        token = number * PAGE + slot
        position = page * PAGE + slot
        valid = (position < length) & (position >= first)
        place = token[:, None] * cache_token + head * cache_head + size[None, :]
        readable = valid[:, None] & (size < SIZE)[None, :]
        k = tl.load(keys + place, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        decay = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + place, mask=readable, other=0.0)
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    target = (row * heads + query_head_index[:, None]) * SIZE + size[None, :]
    if SPLITS == 1:
        tl.store(output + target, (weighted / total[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        place = (row * heads + query_head_index) * SPLITS + split
        tl.store(maxima + place, largest, mask=group < GROUP)
        tl.store(sums + place, total, mask=group < GROUP)
        tl.store(partial + place[:, None] * SIZE + size[None, :], weighted, mask=inside)


@_jit
def _merge_kernel(partial, maxima, sums, output, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    # One program per row and query head: the splits are combined by their maxima, as within a split.
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    size = tl.arange(0, SIZE_BLOCK)
    largest = tl.load(maxima + place * SPLITS + split)
    weights = tl.exp(largest - tl.max(largest, 0))  # 0 for an empty split
    total = tl.sum(weights * tl.load(sums + place * SPLITS + split), 0)
    inside = (size < SIZE)[None, :]
    parts = tl.load(partial + (place * SPLITS + split)[:, None] * SIZE + size[None, :], mask=inside, other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / total
    tl.store(output + place * SIZE + size, merged.to(output.dtype.element_ty), mask=size < SIZE)


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
        lengths: [rows] Number of tokens before the current one, which is in the cache already.
        page_size: Tokens per page, a power of two.
        scale: Factor of the scores.
        window: Number of last tokens that are seen, the current one included; `None` for all.
        softcap: Scores are capped smoothly at this; `None` for no cap.

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


# --- truncation of a distribution -----------------------------------------------------------------------------------


@_jit
def _floor_kernel(shares, row_stride, vocabulary, targets, floors, MASS: tl.constexpr, BLOCK: tl.constexpr):
    # Positive floats are ordered as their bits are. Each pass over the row finds four bits of the floor: the largest
    # digit for which the tokens that are not below it reach the target.
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
            share = tl.load(shares + row * row_stride + start + column, mask=inside, other=0.0)
            weight = tl.where(inside, share if MASS else 1.0, 0.0)
            not_below = share.to(tl.int32, bitcast=True)[:, None] >= candidate[None, :]
            reached += tl.sum(tl.where(not_below, weight[:, None], 0.0), 0)
        possible = reached >= target
        if step == 0:
            possible = possible & (digit < 4)  # shares are below 2; larger digits overflow
        prefix += tl.max(tl.where(possible, digit, 0), 0) << (28 - 4 * step)
    tl.store(floors + row, prefix.to(tl.float32, bitcast=True))  # type: ignore[attr-defined]


def find_floors(shares: torch.Tensor, targets: torch.Tensor, *, mass: bool) -> torch.Tensor:
    """Find the largest share such that the tokens whose share is not below it reach a target.

    Args:
        shares: [rows, V] float32, in [0, 1]; the last axis is contiguous.
        targets: [rows] float32. Above what all tokens have, the floor is 0.
        mass: Whether the target is a sum of shares (top-p) or a number of tokens (top-k).

    Returns:
        [rows, 1] float32.
    """
    rows, vocabulary = shares.shape
    floors = shares.new_empty((rows, 1))
    _floor_kernel[(rows,)](
        shares, shares.stride(0), vocabulary, targets, floors, MASS=mass, BLOCK=_SEARCH_BLOCK, num_warps=8
    )
    return floors
