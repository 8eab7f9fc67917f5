"""From one loss per token to one number: four ways, each over the global batch and blind to padding and micro-batches.

Invariant: the values of a batch's micro-batches, each divided by the whole batch's denominators, add up to the value of
the batch; a row without a token that counts contributes 0, never NaN, and does not count as a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_floats, as_mask, as_tensor, on_tokens
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_choice, check_float
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregate(
    values: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | None = None,
) -> torch.Tensor:
    """One number for the values of all tokens that count.

    values, mask: (B, A) or packed.

    - `token-mean`: the sum over all tokens, divided by how many there are (DAPO).
    - `seq-mean-token-mean`: the mean over rows of each row's mean over tokens (GRPO, GSPO, LightRFT).
    - `seq-mean-token-sum`: the mean over rows of each row's sum.
    - `seq-mean-token-sum-norm`: the sum over all tokens, divided by the constant `norm`. Dr. GRPO's is rows times the
      longest response allowed; verl and Trinity take the padded width, so that their loss changes with padding.

    Without `whole` the batch is this call's. In micro-batches give the denominators of the whole batch, as
    `plan(...).denominators` has them: the values then add up. Rows without a token that counts are not rows, also not
    in `whole.sequences`. `weights` (B, A) multiply the values and leave the denominators as they are.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> [round(aggregate(values, mask, mode=mode, norm=3).item(), 4) for mode in MODES]
    [2.3333, 2.75, 3.5, 2.3333]
    >>> rest = Denominators(tokens=3, sequences=2, samples=2)
    >>> round((aggregate(values[:1], mask[:1], whole=rest) + aggregate(values[1:], mask[1:], whole=rest)).item(), 4)
    2.3333
    """
    layout = Layout.of(mask, values=values)
    tokens = layout.take("values", values)
    if weights is not None:
        tokens = tokens * layout.take("weights", weights)
    return reduce(layout, tokens, mode, norm, whole)


def denominators(mask: PerToken) -> Denominators:
    """What a batch with this mask is divided by: to be given as `whole` to its micro-batches.

    mask: (B, A) or packed. `plan(...)` has them too, by the tokens it was told of; where the mask was narrowed since,
    to tokens of high entropy, say, or to those that a correction left, take them of the narrowed mask of the *whole*
    batch.

    >>> denominators([[1, 1, 0], [0, 0, 0]])
    Denominators(tokens=2, sequences=1, samples=2)
    """
    layout = Layout.of(mask)
    return Denominators(int(layout.mask.sum()), int((layout.counts > 0).sum()), layout.rows)


def reduce(
    layout: Layout, tokens: torch.Tensor, mode: str, norm: float | None = None, whole: Denominators | None = None
) -> torch.Tensor:
    """`aggregate` for values (`layout.shape`) that are plain tensors already."""
    check_choice("mode", mode, MODES)
    if whole is not None and not isinstance(whole, Denominators):
        raise ValueError(f"whole: got {type(whole).__name__}, expected the Denominators of the whole batch, or None")
    if mode == "seq-mean-token-sum-norm":
        if norm is None:
            raise ValueError("norm: got None, expected the constant to divide by (the padded width is none)")
        check_float("norm", norm, 1e-30, what="a positive number")
        return layout.masked(tokens).sum() / norm
    if mode == "token-mean":
        count = layout.mask.sum().clamp(min=1) if whole is None else max(whole.tokens, 1)
        return layout.masked(tokens).sum() / count
    rows = layout.row_means(tokens) if mode == "seq-mean-token-mean" else layout.row_sums(tokens)
    return rows.sum() / ((layout.counts > 0).sum().clamp(min=1) if whole is None else max(whole.sequences, 1))


def token_share(layout: Layout, tokens: torch.Tensor, whole: Denominators | None = None) -> torch.Tensor:
    """The mean over tokens as a metric: detached, and as a share of the whole batch where that is given."""
    return reduce(layout, tokens.detach().to(torch.float32), "token-mean", None, whole)


def row_share(layout: Layout, rows: torch.Tensor, whole: Denominators | None = None) -> torch.Tensor:
    """The mean over rows that have tokens as a metric: (B,) -> ()."""
    has = layout.counts > 0
    kept = torch.where(has, rows.detach().to(torch.float32), 0.0)
    return kept.sum() / (has.sum().clamp(min=1) if whole is None else max(whole.sequences, 1))


def masked_mean(values: PerToken | PerRow, mask: Any = None, *, dim: int | None = None) -> torch.Tensor:
    """The mean of the entries that count; 0 where none does.

    values, mask: any shape alike, or packed; `dim` averages along one dimension, else over all.

    >>> masked_mean([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 0], [1, 0, 0]], dim=1)
    tensor([1.5000, 4.0000])
    >>> masked_mean([[1.0, float("nan")]], [[0, 0]], dim=-1)
    tensor([0.])
    """
    if isinstance(values, (Rows, Ragged)):
        layout = Layout.of(mask, values=values)
        tokens = layout.take("values", values)
        if dim is None:
            return tokens.sum() / layout.mask.sum().clamp(min=1)
        if dim not in (1, -1):
            raise ValueError(f"dim: got {dim}, expected 1 or -1 for packed rows, or None")
        return layout.row_means(tokens)
    tensor = as_floats(as_tensor("values", values))
    kept = (
        torch.ones_like(tensor, dtype=torch.bool)
        if mask is None
        else as_mask("mask", as_tensor("mask", mask, tensor.device))
    )
    if kept.shape != tensor.shape:
        raise ValueError(f"mask: got shape {list(kept.shape)}, expected {list(tensor.shape)}, as the values have")
    total = torch.where(kept, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    if dim is None:
        return total.sum() / kept.sum().clamp(min=1)
    return total.sum(dim) / kept.sum(dim).clamp(min=1)


@dataclass(frozen=True)
class Policy:
    """The arguments of a policy loss as plain tensors of `layout.shape`."""

    layout: Layout
    new_logprobs: torch.Tensor
    log_ratio: torch.Tensor
    """log p - log old, with the gradient of log p."""
    advantages: torch.Tensor

    @classmethod
    def of(
        cls,
        new_logprobs: PerToken,
        old_logprobs: PerToken,
        advantages: PerToken | PerRow,
        mask: PerToken | None,
        rows: torch.Tensor | None = None,
    ) -> Policy:
        """Read the arguments; `rows` (B,) leaves out the tokens of all other rows before anything is read of them."""
        layout = layout_of(new_logprobs, old_logprobs, advantages, mask)
        if rows is not None:
            layout = layout.narrowed(layout.spread(rows))
        ours = layout.take("new_logprobs", new_logprobs)
        old = layout.take("old_logprobs", old_logprobs).detach()
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
    new_logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken | PerRow, mask: PerToken | None
) -> Layout:
    """The layout of a policy loss's arguments; advantages have a say in it if they are a matrix."""
    matrix = advantages if getattr(advantages, "ndim", 0) == 2 else None
    return Layout.of(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs, advantages=matrix)


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
