"""Numbers that describe many: quantiles, histograms on common edges, and how far apart two samples are.

Samples of one group share a prompt, so they are not independent: intervals and tests treat the group as the unit.

Invariant: everything that goes out is finite or `None`; what is not finite coming in is left out.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 1999
"""Of group labels, for one p-value: the smallest is 1 / 2000."""
_PERMUTED_GROUPS = 2000
"""With more groups the limit distribution is as good, and quicker."""
_Z = 1.959964
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
BINS = 24


def quantiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    """Five quantiles and the mean; `None` of nothing.

    >>> quantiles(np.array([0.0, 4.0, np.nan]))
    {'p5': 0.2, 'p25': 1.0, 'p50': 2.0, 'p75': 3.0, 'p95': 3.8, 'mean': 2.0}
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    found = np.quantile(finite, list(QUANTILES.values()))
    return {
        **{name: float(value) for name, value in zip(QUANTILES, found, strict=True)},
        "mean": float(finite.mean()),
    }


def edges(*samples: NDArray[np.float64], bins: int = BINS) -> list[float]:
    """Edges of equal width over all samples: whole numbers where there are few of them, so that each has its own bar.

    >>> edges(np.array([0.0, 1.0]))
    [-0.5, 0.5, 1.5]
    >>> edges(np.array([]))
    []
    """
    finite = np.concatenate([each[np.isfinite(each)] for each in samples]) if samples else np.zeros(0)
    if not len(finite):
        return []
    low, high = float(finite.min()), float(finite.max())
    if high - low < bins and bool(np.all(finite == np.round(finite))) and abs(low) < 2**52:
        return [float(edge) - 0.5 for edge in range(int(low), int(high) + 2)]
    if low == high:
        width = max(abs(low), 1.0) / 2
        return [low - width, low + width]
    step = high / bins - low / bins
    made = [low + step * i for i in range(bins)] + [high]
    return made if all(b > a for a, b in pairwise(made)) else [low, high]


def histograms(one: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """Two samples counted between the same edges.

    >>> histograms(np.array([0.0, 1.0, 1.0]), np.array([0.0]))
    {'edges': [-0.5, 0.5, 1.5], 'counts_a': [1, 2], 'counts_b': [1, 0]}
    """
    at = edges(one, other)
    if not at:
        return {"edges": [], "counts_a": [], "counts_b": []}
    counts = [np.histogram(each[np.isfinite(each)], at)[0].tolist() for each in (one, other)]
    return {"edges": at, "counts_a": counts[0], "counts_b": counts[1]}


def kolmogorov(one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """The largest distance of two samples' distribution functions (Kolmogorov and Smirnov's), and how likely one as
    large is by chance, by its limit for many values; ties make that too large, never too small.

    >>> kolmogorov(np.arange(100.0), np.arange(100.0))
    (0.0, 1.0)
    >>> distance, chance = kolmogorov(np.arange(100.0), np.arange(100.0) + 50)
    >>> distance, chance < 1e-9
    (0.5, True)
    """
    first, second = np.sort(one), np.sort(other)
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
    """[G] The mean of `values` [N] in each of the `groups` [N] they belong to.

    >>> group_means(np.array([0.0, 1.0, 3.0]), np.array(["a", "a", "b"])).tolist()
    [0.5, 3.0]
    """
    _, place = np.unique(groups, return_inverse=True)
    return np.bincount(place, values) / np.bincount(place)


def mean_interval(values: NDArray[np.float64], groups: NDArray[Any]) -> tuple[float, float]:
    """The mean of `values` [N], and half the width of its 95 % interval, by the variation between groups; NaN for one
    group, which says nothing about others.

    >>> mean_interval(np.array([0.0, 0.0, 1.0, 1.0]), np.array([0, 1, 2, 3]))[0]
    0.5
    """
    _, place = np.unique(groups, return_inverse=True)
    mean = float(values.mean())
    count = int(place.max()) + 1
    if count < 2:
        return mean, math.nan
    residuals = np.bincount(place, values - mean)
    error = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) / len(values)
    # Student's t by its expansion around the normal quantile.
    freedom = count - 1
    t = _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
    return mean, t * error


def group_test(one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """The Kolmogorov-Smirnov distance of two sets of group means, and how likely one as large is by chance: by
    permuting which groups are on which side.

    >>> group_test(np.arange(20.0), np.arange(20.0))
    (0.0, 1.0)
    >>> distance, chance = group_test(np.arange(20.0), np.arange(20.0) + 20)
    >>> distance, chance < 0.001
    (1.0, True)
    """
    if len(one) + len(other) > _PERMUTED_GROUPS:
        return kolmogorov(one, other)
    pooled = np.concatenate([one, other])
    order = np.argsort(pooled, kind="stable")
    ordered = pooled[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    first = order < len(one)

    def distances(sides: NDArray[np.bool_]) -> NDArray[np.int64]:
        # Whole numbers, so that equal distances are equal.
        below = np.cumsum(sides, axis=-1, dtype=np.int64)[..., ends]
        gaps = np.abs(below * len(other) - (ends + 1 - below) * len(one))
        most: NDArray[np.int64] = gaps.max(axis=-1)
        return most

    measured = int(distances(first))
    dice = np.random.default_rng(0)
    permuted = dice.permuted(np.broadcast_to(first, (PERMUTATIONS, len(first))), axis=1)
    chance = (1 + int((distances(permuted) >= measured).sum())) / (1 + PERMUTATIONS)
    return measured / (len(one) * len(other)), chance
