"""What all losses share: reading log-probs and advantages, and making one `Loss` out of one loss for each token.

Invariant: only `log_probs` carry a gradient; metrics are detached, and those of micro-batches add up to the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rollbook.algorithms.aggregate import reduce, row_share, token_share
from rollbook.algorithms.arguments import on_tokens
from rollbook.algorithms.layout import Layout, PerRow, PerToken
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_float


@dataclass(frozen=True)
class Policy:
    """The arguments of a policy loss as plain tensors of `layout.shape`."""

    layout: Layout
    log_probs: torch.Tensor
    log_ratio: torch.Tensor
    """log p - log old, with the gradient of log p."""
    advantages: torch.Tensor

    @classmethod
    def of(
        cls,
        log_probs: PerToken,
        old_log_probs: PerToken,
        advantages: PerToken | PerRow,
        mask: PerToken | None,
        rows: torch.Tensor | None = None,
    ) -> Policy:
        """Read the arguments; `rows` (B,) leaves out the tokens of all other rows before anything is read of them."""
        layout = layout_of(log_probs, old_log_probs, advantages, mask)
        if rows is not None:
            layout = layout.narrowed(layout.spread(rows))
        ours = layout.take("log_probs", log_probs)
        old = layout.take("old_log_probs", old_log_probs).detach()
        return cls(layout, ours, ours - old, on_tokens(layout, "advantages", advantages).detach())

    def clamped(self, bound: float) -> torch.Tensor:
        """The log-ratio within ±`bound`, so that its exponential stays finite; beyond that its gradient is 0."""
        check_float("log_ratio_clamp", bound, 0)
        return self.log_ratio.clamp(-bound, bound)

    def row_log_ratio(self, bound: float) -> torch.Tensor:
        """[of `shape`] The mean log-ratio of each row on its tokens, within ±`bound`, as a constant."""
        check_float("log_ratio_clamp", bound, 0)
        layout = self.layout
        return layout.spread(layout.row_means(self.log_ratio.detach()).clamp(-bound, bound))


def layout_of(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken | PerRow, mask: PerToken | None
) -> Layout:
    """The layout of a policy loss's arguments; advantages have a say in it if they are a matrix."""
    matrix = advantages if getattr(advantages, "ndim", 0) == 2 else None
    return Layout.of(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=matrix)


@dataclass(frozen=True)
class Terms:
    """One loss for each token, and what to report of them."""

    tokens: torch.Tensor
    """[of `shape`]"""
    of_tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    """[of `shape`] each: metrics that are means over tokens."""
    of_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B] each: metrics that are means over rows with tokens."""

    def loss(
        self,
        name: str,
        layout: Layout,
        mode: str,
        norm: float | None,
        whole: Denominators | None,
        weights: PerToken | PerRow | None,
    ) -> Loss:
        """Aggregate; the value is reported under `name`."""
        tokens = self.tokens
        if weights is not None:
            tokens = tokens * on_tokens(layout, "weights", weights).detach()
        value = reduce(layout, tokens, mode, norm, whole)
        metrics = {each: token_share(layout, found, whole) for each, found in self.of_tokens.items()}
        metrics |= {each: row_share(layout, found, whole) for each, found in self.of_rows.items()}
        return Loss(value, {**metrics, name: value.detach()})


def clipped(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic of -A * ratio and -A * (ratio within [low, high]), and 1.0 where that is the latter.

    >>> clipped(torch.tensor([1.0, -1.0]), torch.tensor([1.5, 1.5]), 0.8, 1.2)
    (tensor([-1.2000,  1.5000]), tensor([1., 0.]))
    """
    plain, held = -advantages * ratio, -advantages * ratio.clamp(low, high)
    return torch.maximum(plain, held), (held > plain).to(ratio.dtype)
