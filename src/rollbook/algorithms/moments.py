"""Means and deviations over tokens that count, in float64, over one process or many; whitening by them, once.

Invariant: the moments of the union of all processes' tokens are what one process would compute from all of them, and
tokens that do not count are never read and stay 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Any

import torch

from rollbook.algorithms.layout import Layout, PerToken
from rollbook.core.checks import check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_ranks

STD = ("sample", "population")


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the tokens that count."""

    count: int
    mean: float
    squares: float
    constant: bool
    """Whether all of them are equal: their deviation is then exactly 0, whatever rounding says."""

    def std(self, kind: str = "sample") -> float:
        """The deviation, divided by n - 1 (`sample`) or by n (`population`); 0 for fewer than two tokens."""
        check_choice("std", kind, STD)
        if self.constant or self.count < 2:
            return 0.0
        return float((self.squares / (self.count - (kind == "sample"))) ** 0.5)


def moments(tokens: torch.Tensor, mask: torch.Tensor, ranks: ProcessGroup = SINGLE_PROCESS) -> Moments:
    """The moments of `tokens` where `mask`, over all `ranks`; two passes, so that nothing cancels.

    >>> found = moments(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    >>> found.count, found.mean, found.std("population")
    (2, 2.0, 1.0)
    """
    check_ranks(ranks)
    kept = tokens.detach()[mask].to(torch.float64)
    ends = (kept.amin(), kept.amax()) if len(kept) else (kept.new_zeros(()), kept.new_zeros(()))
    total, low, high = torch.stack([kept.sum(), *ends]).tolist()
    count, total = ranks.sum(torch.tensor([float(len(kept)), total], dtype=torch.float64)).tolist()
    every = [end for part in ranks.gather([low, high] if len(kept) else []) for end in part]
    constant = len(set(every)) <= 1
    # Of equal tokens exactly that: a rounded mean would lie beside every one of them.
    mean = every[0] if every and constant else total / max(count, 1)
    squares = ranks.sum(((kept - mean) ** 2).sum().cpu())
    return Moments(int(count), mean, float(squares), constant)


def whiten(
    values: PerToken,
    mask: PerToken | None = None,
    *,
    std: str = "sample",
    eps: float = 1e-8,
    eps_in: str = "variance",
    shift_mean: bool = True,
    scale: bool = True,
    ranks: ProcessGroup = SINGLE_PROCESS,
) -> Any:
    """Tokens that count with mean 0 and deviation 1, over the whole batch of all `ranks`; others 0.

    values, mask: (B, A) or packed; the result has their layout. `eps` is added to the variance (`eps_in="variance"`,
    verl and Trinity), to the deviation (`"std"`, LightRFT) or is the least variance (`"floor"`). `shift_mean=False`
    keeps the mean, `scale=False` the deviation. Call it once, on the global batch: twice, or batch by batch, is
    another estimator. Equal tokens become exactly 0, and so does a single one (their mean, where that is kept).

    >>> whiten(torch.tensor([[1.0, 2.0], [3.0, 100.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """
    check_choice("eps_in", eps_in, ("variance", "std", "floor"))
    check_float("eps", eps, 0)
    layout = Layout.of(mask, values=values)
    tokens = layout.take("values", values)
    found = moments(tokens, layout.mask, ranks)
    deviation = found.std(std)
    scaled = tokens.to(torch.float64) - found.mean
    divisor = denominator(deviation, eps, eps_in) if scale else 1.0
    scaled = torch.zeros_like(scaled) if found.constant or found.count < 2 or not divisor else scaled / divisor
    if not shift_mean:
        scaled = scaled + found.mean
    return layout.give(layout.masked(scaled).to(tokens.dtype))


def denominator(deviation: float, eps: float, eps_in: str) -> float:
    """What deviations are divided by."""
    if eps_in == "std":
        return deviation + eps
    if eps_in == "floor":
        return max(deviation, float(eps**0.5))
    return hypot(deviation, eps**0.5)  # and not the root of a sum of squares, which may be 0 when both are not
