"""Statistics of samples and columns: quantiles, histograms, tests, trends, shares and orders.

Samples of one group share a prompt and are not independent: intervals and tests use the group as the unit.

Invariant: pure functions of numpy arrays. Values that are not finite are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 1999
"""Permutations of group labels for a p-value; the smallest is 1 / 2000."""
_PERMUTED_GROUPS = 2000
"""With more groups, the asymptotic distribution is as good and faster."""
_Z = 1.959964
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
BINS = 24


def quantiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    """Return five quantiles and the mean; `None` for no values.

    >>> quantiles(np.array([0.0, 4.0, np.nan]))
    {'p5': 0.2, 'p25': 1.0, 'p50': 2.0, 'p75': 3.0, 'p95': 3.8, 'mean': 2.0}
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    levels = np.quantile(finite, list(QUANTILES.values()))
    return {
        **{name: float(value) for name, value in zip(QUANTILES, levels, strict=True)},
        "mean": float(finite.mean()),
    }


def edges(*samples: NDArray[np.float64], bins: int = BINS) -> list[float]:
    """Return bin edges of equal width over all samples; integers if there are few distinct ones, so that each has a
    bar.

    >>> edges(np.array([0.0, 1.0]))
    [-0.5, 0.5, 1.5]
    >>> edges(np.array([]))
    []
    """
    finite = np.concatenate([sample[np.isfinite(sample)] for sample in samples]) if samples else np.zeros(0)
    if not len(finite):
        return []
    low, high = float(finite.min()), float(finite.max())
    if high - low < bins and bool(np.all(finite == np.round(finite))) and abs(low) < 2**52:
        return [float(edge) - 0.5 for edge in range(int(low), int(high) + 2)]
    if low == high:
        width = max(abs(low), 1.0) / 2
        return [low - width, low + width]
    step = high / bins - low / bins
    bounds = [low + step * i for i in range(bins)] + [high]
    return bounds if all(b > a for a, b in pairwise(bounds)) else [low, high]


def histograms(first: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """Return the histograms of two samples with the same edges.

    >>> histograms(np.array([0.0, 1.0, 1.0]), np.array([0.0]))
    {'edges': [-0.5, 0.5, 1.5], 'counts_a': [1, 2], 'counts_b': [1, 0]}
    """
    at = edges(first, other)
    if not at:
        return {"edges": [], "counts_a": [], "counts_b": []}
    counts = [np.histogram(sample[np.isfinite(sample)], at)[0].tolist() for sample in (first, other)]
    return {"edges": at, "counts_a": counts[0], "counts_b": counts[1]}


def kolmogorov(left: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance of two samples and its asymptotic p-value, which ties make conservative.

    >>> kolmogorov(np.arange(100.0), np.arange(100.0))
    (0.0, 1.0)
    >>> distance, chance = kolmogorov(np.arange(100.0), np.arange(100.0) + 50)
    >>> distance, chance < 1e-9
    (0.5, True)
    """
    first, second = np.sort(left), np.sort(other)
    every = np.concatenate([first, second])
    gaps = np.searchsorted(first, every, "right") / len(first) - np.searchsorted(second, every, "right") / len(second)
    distance = float(np.abs(gaps).max())
    size = len(first) * len(second) / (len(first) + len(second))
    scaled = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    if scaled < 0.2:
        return distance, 1.0
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, chance))


def group_means(values: NDArray[np.float64], groups: NDArray[Any]) -> NDArray[np.float64]:
    """Return [G] the mean of `values` [N] in each of the `groups` [N].

    >>> group_means(np.array([0.0, 1.0, 3.0]), np.array(["a", "a", "b"])).tolist()
    [0.5, 3.0]
    """
    _, inverse = np.unique(groups, return_inverse=True)
    return np.bincount(inverse, values) / np.bincount(inverse)


def mean_interval(values: NDArray[np.float64], groups: NDArray[Any]) -> tuple[float, float]:
    """Return the mean of `values` [N] and the half-width of its 95 % confidence interval, clustered by group; NaN for
    one group.

    >>> mean_interval(np.array([0.0, 0.0, 1.0, 1.0]), np.array([0, 1, 2, 3]))[0]
    0.5
    """
    _, inverse = np.unique(groups, return_inverse=True)
    mean = float(values.mean())
    count = int(inverse.max()) + 1
    if count < 2:
        return mean, math.nan
    residuals = np.bincount(inverse, values - mean)
    error = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) / len(values)
    # Student's t by its expansion around the normal quantile.
    freedom = count - 1
    t = _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
    return mean, t * error


def group_test(left: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance of two sets of group means, and its p-value from permuted groups.

    >>> group_test(np.arange(20.0), np.arange(20.0))
    (0.0, 1.0)
    >>> distance, chance = group_test(np.arange(20.0), np.arange(20.0) + 20)
    >>> distance, chance < 0.001
    (1.0, True)
    """
    if len(left) + len(other) > _PERMUTED_GROUPS:
        return kolmogorov(left, other)
    pooled = np.concatenate([left, other])
    order = np.argsort(pooled, kind="stable")
    ordered = pooled[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    first = order < len(left)

    def distances(sides: NDArray[np.bool_]) -> NDArray[np.int64]:
        # Integers, so that equal distances compare equal.
        below = np.cumsum(sides, axis=-1, dtype=np.int64)[..., ends]
        gaps = np.abs(below * len(other) - (ends + 1 - below) * len(left))
        largest: NDArray[np.int64] = gaps.max(axis=-1)
        return largest

    measured = int(distances(first))
    dice = np.random.default_rng(0)
    permuted = dice.permuted(np.broadcast_to(first, (PERMUTATIONS, len(first))), axis=1)
    chance = (1 + int((distances(permuted) >= measured).sum())) / (1 + PERMUTATIONS)
    return measured / (len(left) * len(other)), chance


Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

# --- columns --------------------------------------------------------------------------------------------------------

OFFSETS = 32
"""Number of other samples of its block that each sample is paired with: 3 million pairs for 100,000 samples instead of
5 billion.
"""
POINTS = 512
"""Maximum length of a series for pairwise tests; longer ones are thinned to block medians."""


@dataclass(frozen=True, slots=True)
class Series:
    """A value per step."""

    steps: Ints
    """[T] ascending"""
    values: Floats
    """[T] finite"""
    counts: Ints
    """[T] samples behind each value"""

    def __len__(self) -> int:
        return len(self.steps)


def by_step(steps: Ints, values: Floats, *, median: bool = False, least: int = 4) -> Series:
    """Return the mean (or median) of `values` at each step.

    Steps with fewer than `least` values, or a tenth of the usual number, are omitted as incomplete.

    >>> by_step(np.array([0, 0, 0, 1, 1, 1]), np.array([1.0, 3.0, np.nan, 2.0, 2.0, 8.0]), least=2).values.tolist()
    [2.0, 4.0]
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    present, inverse, counts = np.unique(steps, return_inverse=True, return_counts=True)
    if median:
        centers = block_medians(inverse, values, len(present))
    else:
        centers = np.bincount(inverse, values, minlength=len(present)) / np.maximum(counts, 1)
    enough = (counts >= least) & (counts >= 0.1 * np.median(counts) if len(counts) else True)
    return Series(present[enough], centers[enough], counts[enough])


def block_medians(block_index: Ints, values: Floats, blocks: int) -> Floats:
    """Return [blocks] the median of each block's values; `block_index` is the block of each value.

    >>> block_medians(np.array([0, 0, 1, 1, 1]), np.array([1.0, 3.0, 9.0, 7.0, 8.0]), 2).tolist()
    [2.0, 8.0]
    """
    order = np.lexsort((values, block_index))
    ordered = values[order]
    counts = np.bincount(block_index, minlength=blocks)
    starts = np.cumsum(counts) - counts
    medians = np.full(blocks, np.nan)
    some = counts > 0
    low, high = starts + (counts - 1) // 2, starts + counts // 2
    medians[some] = (ordered[low[some]] + ordered[high[some]]) / 2
    return medians


def trend(values: Floats) -> float:
    """Return the z of the Mann-Kendall test: positive for rising, negative for falling, 0 for a constant series.

    It compares all pairs by order, so a single outlier cannot create a trend.

    >>> round(trend(np.array([1.0, 2.0, 3.0, 40.0, 5.0, 6.0])), 2), trend(np.ones(9))
    (1.88, 0.0)
    """
    if len(values) > POINTS:
        values = np.array([np.median(segment) for segment in np.array_split(values, POINTS)])
    t = len(values)
    if t < 3:
        return 0.0
    score = float(np.sign(values[None, :] - values[:, None])[np.triu_indices(t, 1)].sum())
    _, ties = np.unique(values, return_counts=True)
    spread = (t * (t - 1) * (2 * t + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if spread <= 0 or score == 0:
        return 0.0
    return float((score - np.sign(score)) / np.sqrt(spread))


def at_least(hits: float, total: float, certainty: float) -> float:
    """Return the lower bound of Wilson's interval for a share, at `certainty` standard errors.

    >>> round(at_least(8, 8, 2.0), 3), round(at_least(500, 1000, 2.0), 3), at_least(0, 0, 2.0)
    (0.667, 0.468, 0.0)
    """
    if total <= 0 or hits <= 0:
        return 0.0
    share, z2 = hits / total, certainty * certainty
    middle = share + z2 / (2 * total)
    reach = certainty * float(np.sqrt(share * (1 - share) / total + z2 / (4 * total * total)))
    return float((middle - reach) / (1 + z2 / total))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of samples of a block (a group or a step), each pair once."""

    left: Ints
    """[P] indices of samples"""
    right: Ints
    """[P]"""
    blocks: Ints
    """[P] block of each pair, from 0"""


def pairs(blocks: Ints) -> Pairs:
    """Return pairs within blocks: all pairs in blocks of up to 64, and an even selection in larger ones.

    The samples of a block are shuffled with a fixed seed, and each is paired with the next 32, cyclically.

    >>> found = pairs(np.array([7, 7, 7, 2]))
    >>> sorted(map(tuple, np.sort(np.stack([found.left, found.right], 1), 1).tolist()))
    [(0, 1), (0, 2), (1, 2)]
    """
    _, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    order = np.lexsort((np.random.default_rng(0).random(len(blocks)), inverse))
    starts = np.cumsum(counts) - counts
    block = inverse[order]
    size, first = counts[block], starts[block]
    rank = np.arange(len(order)) - first
    left, right, which = [], [], []
    for offset in range(1, OFFSETS + 1):
        # In a block of n, offset n / 2 visits each pair twice, and larger offsets repeat smaller ones.
        use = (2 * offset < size) | ((2 * offset == size) & (rank < offset))
        if not use.any():
            break
        left.append(order[use])
        right.append(order[(first + (rank + offset) % np.maximum(size, 1))[use]])
        which.append(block[use])
    if not left:
        empty = np.zeros(0, np.int64)
        return Pairs(empty, empty, empty)
    return Pairs(np.concatenate(left), np.concatenate(right), np.concatenate(which))


@dataclass(frozen=True, slots=True)
class Order:
    """Agreement of the order of rewards with the order of another number, over pairs whose rewards differ."""

    d: float
    """Somers' d: share of concordant minus share of discordant pairs, from -1 to 1."""
    error: float
    """Standard error, clustered by block."""
    differs: float
    """Share of the pairs in which the other number differs."""
    blocks: int
    """Blocks with at least one such pair."""
    pairs: int
    weighted: float = 0.0
    """Somers' d with pairs weighted by the difference of their rewards."""


def order(pairing: Pairs, reward: Floats, other: Floats) -> Order:
    """Return Somers' d of `other` given `reward`, over pairs in which both are finite and the rewards differ.

    >>> blocks = np.repeat(np.arange(10), 4)
    >>> length = np.tile([10.0, 20.0, 30.0, 40.0], 10)
    >>> order(pairs(blocks), length / 40, length).d, order(pairs(blocks), -length, length).d
    (1.0, -1.0)
    """
    up = reward[pairing.left] - reward[pairing.right]
    across = other[pairing.left] - other[pairing.right]
    scale = np.nanmax(np.abs(reward), initial=0.0) * 1e-9
    use = np.isfinite(up) & np.isfinite(across) & (np.abs(up) > scale)
    if not use.any():
        return Order(0.0, float("inf"), 0.0, 0, 0)
    agree = np.sign(up[use]) * np.sign(across[use])
    _, inverse = np.unique(pairing.blocks[use], return_inverse=True)
    weights = np.bincount(inverse).astype(np.float64)
    sums = np.bincount(inverse, agree)
    d = float(sums.sum() / weights.sum())
    k = len(weights)
    # The error of a ratio of sums over independent blocks.
    spread = float(((sums - d * weights) ** 2).sum()) * k / max(k - 1, 1)
    error = float(np.sqrt(spread)) / float(weights.sum()) if k > 1 else float("inf")
    sizes = np.abs(up[use])
    weighted = float((agree * sizes).sum() / sizes.sum())
    return Order(d, error, float((agree != 0).mean()), k, int(use.sum()), weighted)


def fit_weights(total: Floats, columns: dict[str, Floats]) -> dict[str, float] | None:
    """Return weights of the columns that add up to `total` (with a constant), or `None` if they do not.

    Columns with a weight of 0, up to rounding, are not parts. A column equal to the total is omitted.

    >>> right, form = np.array([0.0, 1, 0, 1, 1, 0]), np.array([1.0, 1, 0, 0, 1, 1])
    >>> found = fit_weights(0.9 * right + 0.1 * form, {"right": right, "form": form, "seconds": np.arange(6.0)})
    >>> {name: round(weight, 6) for name, weight in found.items()}
    {'right': 0.9, 'form': 0.1}
    """
    spread = float(np.std(total))
    if not spread:
        return None
    usable = {}
    for name, column in columns.items():
        wide = float(np.std(column))
        same = np.abs(column - total).max() <= 1e-6 * max(1.0, float(np.abs(total).max()))
        if wide > 0 and not (same and len(columns) > 1):
            usable[name] = (column - column.mean()) / wide
    if not usable:
        return None
    matrix = np.stack(list(usable.values()), 1)
    centered = (total - total.mean()) / spread
    weights, *_ = np.linalg.lstsq(matrix, centered, rcond=1e-10)
    rest = float(np.sqrt(((matrix @ weights - centered) ** 2).mean()))
    if rest > 1e-3:
        return None
    tiny = max(1e-5, 6 * rest / len(total) ** 0.5)
    return {
        name: float(weight * spread / np.std(columns[name]))
        for name, weight in zip(usable, weights, strict=True)
        if abs(weight) > tiny
    }
