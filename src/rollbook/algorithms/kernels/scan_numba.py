"""The recursions of `scan` compiled for the CPU by numba: packed rows, one thread, sums in float64.

Invariant: the same operations in the same order as the numpy implementation in `scan`, so that results are bit-equal;
inactive tokens are never read. Imported only for large calls (`scan.LARGE`).

Measured alternatives (one thread of a shared machine, warm caches; B=128, R=8192, float32, all tokens active):

| implementation | ms |
|---|---|
| copy of the two outputs (lower bound) | 0.2 |
| numba, vectorized differences in blocks, sums of four rows interleaved: this module | 1.3 |
| numba, one token after the other | 2.1 |
| scipy.signal.lfilter over reversed rows | 7.9 |
| numpy, time-major, float32, without a mask | 19 |
| numpy, time-major, float64, only active tokens: the numpy implementation in `scan` | 66 |
| torch, a Python loop over time | 161 |
| torch.compile of that loop | unrolled: compiles 79 s for 128 steps, 107 s for 256; needs a C++ compiler |

The sum of one row is a chain of dependent multiplications and additions, about six cycles per token. Differences and
conversions do not depend on the chain and are vectorized over a block; four interleaved chains hide the latency. numba
(35 MB, plus 173 MB for llvmlite) is therefore an optional extra. Compiled code is cached in the folder of this file, or
in the user's cache, so that a process loads it in half a second.
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, uint64

BLOCK = 2048
LANES = 4
STEP = 512


def _jit(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no writable cache folder: compile in each process
        return njit(nogil=True)(function)


@_jit
def _any(mask):
    hit = np.int32(0)
    for t in range(len(mask)):
        hit |= np.int32(mask[t])
    return hit != 0


@_jit
def spans(active, offsets):
    """Return the first and the last active slot of each row, and the number of active slots. Shape: [B]."""
    rows = len(offsets) - 1
    first, last, count = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    for row in range(rows):
        mask = active[offsets[row] : offsets[row + 1]]
        total, low, high = np.int32(0), 0, len(mask)
        for t in range(len(mask)):
            total += np.int32(mask[t])
        if total == 0:
            high = 0
        elif total < high:
            while not _any(mask[low : low + STEP]):
                low += STEP
            while not mask[low]:
                low += 1
            while not _any(mask[max(high - STEP, 0) : high]):
                high -= STEP
            while not mask[high - 1]:
                high -= 1
        first[row], last[row], count[row] = offsets[row] + low, offsets[row] + high, total
    return first, last, count


@_jit
def count_rewards(rewards, active, offsets):
    """Count active tokens, their rewards that are not finite, and nonzero rewards on other tokens. Shape: [B]."""
    rows = len(offsets) - 1
    counts, nonfinite, off_mask = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    for row in range(rows):
        reward, mask = rewards[offsets[row] : offsets[row + 1]], active[offsets[row] : offsets[row + 1]]
        count, bad, outside = np.int32(0), np.int32(0), np.int32(0)
        for t in range(len(reward)):
            entry = reward[t]
            hit, finite = np.int32(mask[t]), np.int32(entry - entry == 0)
            count += hit
            bad += hit & (1 - finite)
            outside += (1 - hit) & finite & np.int32(entry != 0)
        counts[row], nonfinite[row], off_mask[row] = count, bad, outside
    return counts, nonfinite, off_mask


@_jit
def spread(scores, mask, offsets, out):
    """Fill `out` [total] with the score of each row where the mask is True, else with 0."""
    for row in range(len(scores)):
        score = scores[row]
        counts, into = mask[offsets[row] : offsets[row + 1]], out[offsets[row] : offsets[row + 1]]
        for t in range(len(into)):
            into[t] = score if counts[t] else 0


@_jit
def _chain(sums, above, below, total, decay):
    """In place: `sums[i] += decay * sums[i + 1]` for i from `above` - 1 down to `below`; return the last sum."""
    for i in range(above - 1, below - 1, -1):
        total = sums[uint64(i)] + decay * total
        sums[uint64(i)] = total
    return total


@_jit
def _chains(sums, sizes, carry, decay):
    """Run `_chain` on the last `sizes[j]` entries of four rows `sums[j]`, interleaved; sizes are descending."""
    d0, d1, d2, d3 = sums[0], sums[1], sums[2], sums[3]
    a0, a1, a2, a3 = carry[0], carry[1], carry[2], carry[3]
    common = BLOCK - sizes[3]
    for i in range(BLOCK - 1, common - 1, -1):
        t = uint64(i)
        a0 = d0[t] + decay * a0
        a1 = d1[t] + decay * a1
        a2 = d2[t] + decay * a2
        a3 = d3[t] + decay * a3
        d0[t] = a0
        d1[t] = a1
        d2[t] = a2
        d3[t] = a3
    carry[0] = _chain(d0, common, BLOCK - sizes[0], a0, decay)
    carry[1] = _chain(d1, common, BLOCK - sizes[1], a1, decay)
    carry[2] = _chain(d2, common, BLOCK - sizes[2], a2, decay)
    carry[3] = a3


@_jit
def _copy(source, target):
    for i in range(len(target)):  # vectorized, unlike a slice assignment
        target[i] = source[i]


@_jit
def _zero(target):
    for i in range(len(target)):
        target[i] = 0


@_jit
def _deltas(rewards, values, after, gamma, out):
    end = len(rewards) - 1
    for i in range(end):
        out[i] = np.float64(rewards[i]) + gamma * np.float64(values[i + 1]) - np.float64(values[i])
    out[end] = np.float64(rewards[end]) + gamma * after - np.float64(values[end])


@_jit
def _with_values(sums, values, advantages, returns):
    for i in range(len(values)):
        advantages[i] = sums[i]
        returns[i] = sums[i] + values[i]


@_jit
def _gae_holes(rewards, values, active, gamma, decay, advantages, returns):
    """Compute one row with gaps: inactive tokens."""
    total, after = 0.0, 0.0
    for i in range(len(rewards)):
        t = len(rewards) - 1 - i
        if active[t]:
            value = np.float64(values[t])
            total = np.float64(rewards[t]) + gamma * after - value + decay * total
            after = value
            advantages[t] = total
            returns[t] = total + value
        else:
            advantages[t] = 0
            returns[t] = 0


@_jit
def _returns_holes(rewards, active, gamma, returns):
    total = 0.0
    for i in range(len(rewards)):
        t = len(rewards) - 1 - i
        if active[t]:
            total = np.float64(rewards[t]) + gamma * total
            returns[t] = total
        else:
            returns[t] = 0


@_jit
def _by_length(first, last):
    """Return the rows with tokens left, longest first, since interleaved rows should be of about the same length."""
    return np.argsort(first - last, kind="mergesort")[: np.sum(last > first)]


@_jit
def gae(rewards, values, active, offsets, gamma, lam, advantages, returns):
    """Fill `advantages` and `returns`; all arrays are [total]."""
    decay = gamma * lam
    first, last, count = spans(active, offsets)
    for row in range(len(first)):
        start, stop, a, b = offsets[row], offsets[row + 1], first[row], last[row]
        _zero(advantages[start:a])
        _zero(returns[start:a])
        _zero(advantages[b:stop])
        _zero(returns[b:stop])
        if count[row] < b - a:
            _gae_holes(rewards[a:b], values[a:b], active[a:b], gamma, decay, advantages[a:b], returns[a:b])
            last[row] = a  # none left
    order = _by_length(first, last)
    sums, sizes, ends = np.empty((LANES, BLOCK)), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for at in range(0, len(order), LANES):
        group = order[at : at + LANES]
        ends[: len(group)] = last[group]
        sizes[:] = 0
        carry, after = np.zeros(LANES), np.zeros(LANES)
        while ends[0] > first[group[0]]:
            for j in range(len(group)):
                sizes[j] = min(BLOCK, ends[j] - first[group[j]])
                a, b = ends[j] - sizes[j], ends[j]
                if a < b:
                    _deltas(rewards[a:b], values[a:b], after[j], gamma, sums[j, BLOCK - sizes[j] :])
            _chains(sums, sizes, carry, decay)
            for j in range(len(group)):
                a, b = ends[j] - sizes[j], ends[j]
                if a < b:
                    _with_values(sums[j, BLOCK - sizes[j] :], values[a:b], advantages[a:b], returns[a:b])
                    after[j] = values[a]
                ends[j] = a


@_jit
def discounted(rewards, active, offsets, gamma, returns):
    """Fill `returns` [total]."""
    first, last, count = spans(active, offsets)
    for row in range(len(first)):
        a, b = first[row], last[row]
        _zero(returns[offsets[row] : a])
        _zero(returns[b : offsets[row + 1]])
        if count[row] < b - a:
            _returns_holes(rewards[a:b], active[a:b], gamma, returns[a:b])
            last[row] = a  # none left
    order = _by_length(first, last)
    sums, sizes, ends = np.empty((LANES, BLOCK)), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for at in range(0, len(order), LANES):
        group = order[at : at + LANES]
        ends[: len(group)] = last[group]
        sizes[:] = 0
        carry = np.zeros(LANES)
        while ends[0] > first[group[0]]:
            for j in range(len(group)):
                sizes[j] = min(BLOCK, ends[j] - first[group[j]])
                _copy(rewards[ends[j] - sizes[j] : ends[j]], sums[j, BLOCK - sizes[j] :])
            _chains(sums, sizes, carry, gamma)
            for j in range(len(group)):
                _copy(sums[j, BLOCK - sizes[j] :], returns[ends[j] - sizes[j] : ends[j]])
                ends[j] -= sizes[j]
