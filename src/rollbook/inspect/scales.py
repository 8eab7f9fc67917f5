"""`Scales`: the range of each lens, from a sample of the run's tokens, so that a colour means the same on every page.

Invariant: a range changes only when the sample it comes from has doubled, and no more once that has `ENOUGH` tokens: it
does not move under a reader's eyes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.inspect.documents import LENSES

ENOUGH = 50_000
"""How many tokens are enough to know a range for good."""
AT_ONCE = 2048
"""How many are taken of one piece of a run at most, so that a run's first pieces are not all that is seen."""
_LEAST = 8


class Scales:
    """The first and last percentile of each lens over a random sample of tokens that are trained on.

    Sequential ranges begin at 0 where the lens cannot be less (entropy, KL, weight); diverging ones reach as far to
    both sides of their middle (of the ratio, whose middle is 1, in factors).

    >>> scales = Scales()
    >>> scales.offer({"entropy": np.linspace(0, 2, 101), "advantage": np.linspace(-1, 3, 101)}, np.ones(101, bool))
    True
    >>> scales.ranges["entropy"], scales.ranges["advantage"]
    ((0.0, 1.98), (-2.96, 2.96))
    """

    def __init__(self, seed: int = 0) -> None:
        self._dice = np.random.default_rng(seed)
        self._seen: dict[str, list[NDArray[np.float64]]] = {}
        self._counts: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()
        self.ranges: dict[str, tuple[float, float]] = {}
        self.quantiles: dict[str, list[float]] = {}
        """Of each lens that was met, 101 values from the least to the greatest in the sample its range is from."""

    @property
    def full(self) -> bool:
        """Whether every lens that was met is known for good."""
        return bool(self._counts) and min(self._counts.values()) >= ENOUGH

    def offer(self, lenses: Mapping[str, NDArray[Any]], keep: NDArray[np.bool_]) -> bool:
        """Take some of these tokens: arrays [T] by lens, of which those count where `keep` [T] is true; whether a range
        changed."""
        with self._lock:
            wanted = [name for name in lenses if name in LENSES and self._counts.get(name, 0) < ENOUGH]
            if not wanted:
                return False
            places = np.flatnonzero(keep)
            if len(places) > AT_ONCE:
                places = places[self._dice.integers(0, len(places), AT_ONCE)]
            changed = False
            for name in wanted:
                found = np.asarray(lenses[name])[places].astype(np.float64)
                found = found[np.isfinite(found)]
                if not len(found):
                    continue
                self._seen.setdefault(name, []).append(found)
                count = self._counts[name] = self._counts.get(name, 0) + len(found)
                if count >= min(ENOUGH, max(_LEAST, 2 * self._used.get(name, 0))) or name not in self.ranges:
                    self._used[name] = count
                    seen = np.concatenate(self._seen[name])
                    self.ranges[name] = _range(name, seen)
                    self.quantiles[name] = np.quantile(seen, np.linspace(0, 1, 101)).round(6).tolist()
                    changed = True
                if count >= ENOUGH:
                    self._seen[name].clear()
            return changed

    def as_dict(self) -> dict[str, Any]:
        """Ranges and quantiles, as JSON can hold them."""
        with self._lock:
            return {
                name: {"low": low, "high": high, "quantiles": self.quantiles[name]}
                for name, (low, high) in self.ranges.items()
            }


def _range(name: str, values: NDArray[np.float64]) -> tuple[float, float]:
    lens = LENSES[name]
    low, high = (round(float(each), 6) for each in np.quantile(values, (0.01, 0.99)))
    if lens.middle is None:
        if low >= 0:
            low = 0.0
        elif high <= 0:
            high = 0.0
        return (low, high) if high > low else (low, low + 1.0)
    if name == "ratio":
        far = max(abs(math.log(max(each, 1e-6))) for each in (low, high)) or math.log(2)
        return round(math.exp(-far), 6), round(math.exp(far), 6)
    far = max(abs(low - lens.middle), abs(high - lens.middle)) or 1.0
    return lens.middle - far, lens.middle + far
