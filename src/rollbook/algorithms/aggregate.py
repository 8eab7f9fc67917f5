"""Aggregation of token losses to a scalar, in four modes, and the metrics of losses.

Invariant: the values of micro-batches, each divided by the denominators of the whole batch, add up to the value of the
batch. A row without a token that counts contributes 0, never NaN, and is not counted as a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_floats, as_mask, as_tensor, on_tokens
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_choice, check_float
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

__all__ = ["MODES", "aggregate", "count_denominators", "masked_mean", "reduce"]

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Aggregation modes; see `aggregate`."""


def aggregate(
    values: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | None = None,
) -> torch.Tensor:
    """Aggregate the values of all tokens that count to a scalar.

    - `token-mean`: the sum over all tokens, divided by their number (DAPO).
    - `seq-mean-token-mean`: the mean over rows of the mean over tokens of each row (GRPO, GSPO, LightRFT).
    - `seq-mean-token-sum`: the mean over rows of the sum of each row.
    - `seq-mean-token-sum-norm`: the sum over all tokens, divided by the constant `norm`. For Dr. GRPO that is the
      number of rows times the longest response allowed. verl and Trinity use the padded width, so that their loss
      depends on padding.

    Rows without a token that counts are not counted, also not in `denominators.sequences`.

    Args:
        values: [B, R] or packed.
        mask: [B, R] or packed: which tokens count. `None`: all.
        mode: One of `MODES`.
        norm: Constant of `seq-mean-token-sum-norm`.
        denominators: For micro-batches, the denominators of the whole batch, such as `plan(...).denominators`; the
            values of micro-batches then add up. `None`: those of this call.
        weights: [B, R] or packed: factors of the values. They do not change the denominators.

    Returns:
        [] The aggregate.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> [round(aggregate(values, mask, mode=mode, norm=3).item(), 4) for mode in MODES]
    [2.3333, 2.75, 3.5, 2.3333]
    >>> denominators = Denominators(tokens=3, sequences=2, samples=2)
    >>> parts = [aggregate(values[i : i + 1], mask[i : i + 1], denominators=denominators) for i in (0, 1)]
    >>> round(sum(parts).item(), 4)
    2.3333
    """
    layout = Layout.from_tokens(mask, values=values)
    tokens = layout.take("values", values)
    if weights is not None:
        tokens = tokens * layout.take("weights", weights)
    return reduce(layout, tokens, mode, norm, denominators)


def count_denominators(mask: PerToken) -> Denominators:
    """Count the denominators of a batch for its micro-batches.

    `plan(...)` counts them too. If the mask is narrowed afterwards, for example to high-entropy tokens or by a
    correction, count them on the narrowed mask of the *whole* batch.

    Args:
        mask: [B, R] or packed: which tokens count. `None`: all.

    Returns:
        The denominators.

    Raises:
        ValueError: If the mask is invalid.

    >>> count_denominators([[1, 1, 0], [0, 0, 0]])
    Denominators(tokens=2, sequences=1, samples=2)
    """
    layout = Layout.from_tokens(mask)
    return Denominators(int(layout.mask.sum()), int((layout.counts > 0).sum()), layout.rows)


def reduce(
    layout: Layout, tokens: torch.Tensor, mode: str, norm: float | None = None, denominators: Denominators | None = None
) -> torch.Tensor:
    """Compute `aggregate` of a plain tensor of `layout.shape`.

    Args:
        layout: Layout of the tokens.
        tokens: [of `layout.shape`] Losses of the tokens.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.

    Returns:
        The aggregated loss, a scalar with the gradient of `tokens`.

    Raises:
        ValueError: If the mode is unknown, it needs `norm`, or `denominators` are not `Denominators`.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> reduce(Layout.from_tokens(mask, values=values), values, "seq-mean-token-mean")
    tensor(2.7500)
    """
    check_choice("mode", mode, MODES)
    if denominators is not None and not isinstance(denominators, Denominators):
        raise ValueError(
            f"denominators: got {type(denominators).__name__}, expected the Denominators of the whole batch, or None"
        )
    if mode == "seq-mean-token-sum-norm":
        if norm is None:
            raise ValueError("norm: got None, expected the constant to divide by (not the padded width)")
        check_float("norm", norm, 1e-30, expected="a positive number")
        return layout.masked(tokens).sum() / norm
    if mode == "token-mean":
        count = layout.mask.sum().clamp(min=1) if denominators is None else max(denominators.tokens, 1)
        return layout.masked(tokens).sum() / count
    rows = layout.row_means(tokens) if mode == "seq-mean-token-mean" else layout.row_sums(tokens)
    return rows.sum() / (
        (layout.counts > 0).sum().clamp(min=1) if denominators is None else max(denominators.sequences, 1)
    )


def mean_over_tokens(layout: Layout, tokens: torch.Tensor, denominators: Denominators | None = None) -> torch.Tensor:
    """Compute a metric as the mean over tokens; with `denominators`, this micro-batch's share of the batch's mean."""
    return reduce(layout, tokens.detach().to(torch.float32), "token-mean", None, denominators)


def mean_over_rows(layout: Layout, rows: torch.Tensor, denominators: Denominators | None = None) -> torch.Tensor:
    """Compute a metric as the mean over rows [B] that have tokens."""
    has_tokens = layout.counts > 0
    present = torch.where(has_tokens, rows.detach().to(torch.float32), 0.0)
    return present.sum() / (has_tokens.sum().clamp(min=1) if denominators is None else max(denominators.sequences, 1))


def masked_mean(
    values: PerToken | PerRow, mask: PerToken | PerRow | None = None, *, dim: int | None = None
) -> torch.Tensor:
    """Compute the mean of the entries that count, 0 where there are none.

    Args:
        values: Numbers of any shape, or packed.
        mask: Which entries count, of the same shape. `None`: all.
        dim: Dimension to average along; `None`: all.

    Returns:
        [] or, with `dim`, the means along it.

    Raises:
        ValueError: If shapes differ.

    >>> masked_mean([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 0], [1, 0, 0]], dim=1)
    tensor([1.5000, 4.0000])
    >>> masked_mean([[1.0, float("nan")]], [[0, 0]], dim=-1)
    tensor([0.])
    """
    if isinstance(values, (Rows, Ragged)):
        layout = Layout.from_tokens(mask, values=values)
        tokens = layout.take("values", values)
        if dim is None:
            return tokens.sum() / layout.mask.sum().clamp(min=1)
        if dim not in (1, -1):
            raise ValueError(f"dim: got {dim}, expected 1 or -1 for packed rows, or None")
        return layout.row_means(tokens)
    tensor = as_floats(as_tensor("values", values))
    counted = (
        torch.ones_like(tensor, dtype=torch.bool)
        if mask is None
        else as_mask("mask", as_tensor("mask", mask, tensor.device))  # type: ignore[arg-type]
    )
    if counted.shape != tensor.shape:
        raise ValueError(f"mask: got shape {list(counted.shape)}, expected {list(tensor.shape)}, as the values have")
    total = torch.where(counted, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    if dim is None:
        return total.sum() / counted.sum().clamp(min=1)
    return total.sum(dim) / counted.sum(dim).clamp(min=1)


@dataclass(frozen=True)
class PolicyTensors:
    """Arguments of a policy loss as plain tensors of `layout.shape`."""

    layout: Layout
    new_logprobs: torch.Tensor
    log_ratio: torch.Tensor
    """log p - log old, with the gradient of log p."""
    advantages: torch.Tensor

    @classmethod
    def from_arguments(
        cls,
        new_logprobs: PerToken,
        old_logprobs: PerToken,
        advantages: PerToken | PerRow,
        mask: PerToken | None,
        rows: torch.Tensor | None = None,
    ) -> PolicyTensors:
        """Read the arguments; with `rows` [B], only the tokens of those rows."""
        layout = policy_layout(new_logprobs, old_logprobs, advantages, mask)
        if rows is not None:
            layout = layout.narrowed(layout.spread(rows))
        policy = layout.take("new_logprobs", new_logprobs)
        old = layout.take("old_logprobs", old_logprobs).detach()
        return cls(layout, policy, policy - old, on_tokens(layout, "advantages", advantages).detach())

    def clamp_log_ratio(self, bound: float) -> torch.Tensor:
        """Clamp the log-ratio to ±`bound`, so that its exponential stays finite; beyond, its gradient is 0."""
        check_float("log_ratio_clamp", bound, 0)
        return self.log_ratio.clamp(-bound, bound)

    def row_log_ratio(self, bound: float) -> torch.Tensor:
        """Compute the mean log-ratio of each row, clamped to ±`bound`, without gradient. Shape: `shape`."""
        check_float("log_ratio_clamp", bound, 0)
        layout = self.layout
        return layout.spread(layout.row_means(self.log_ratio.detach()).clamp(-bound, bound))


def policy_layout(
    new_logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken | PerRow, mask: PerToken | None
) -> Layout:
    """Determine the layout of the arguments of a policy loss; advantages of rows do not affect it."""
    matrix = advantages if getattr(advantages, "ndim", 0) == 2 else None
    return Layout.from_tokens(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs, advantages=matrix)


@dataclass(frozen=True)
class LossTerms:
    """Losses of tokens, and metrics."""

    tokens: torch.Tensor
    """[of `shape`]"""
    token_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """[of `shape`] each: metrics that are means over tokens."""
    row_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B] each: metrics that are means over rows with tokens."""

    def loss(
        self,
        name: str,
        layout: Layout,
        mode: str,
        norm: float | None,
        denominators: Denominators | None,
        weights: PerToken | PerRow | None,
    ) -> Loss:
        """Aggregate the losses; `name` is the metric of the value."""
        tokens = self.tokens
        if weights is not None:
            tokens = tokens * on_tokens(layout, "weights", weights).detach()
        total = reduce(layout, tokens, mode, norm, denominators)
        metrics = {}
        for metric, entries in self.token_metrics.items():
            metrics[metric] = mean_over_tokens(layout, entries, denominators)
        for metric, entries in self.row_metrics.items():
            metrics[metric] = mean_over_rows(layout, entries, denominators)
        metrics[name] = total.detach()
        return Loss(total, metrics)


def clip_surrogate(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute max(-A * ratio, -A * clip(ratio, low, high)), and 1.0 where the clipped term is the larger.

    >>> clip_surrogate(torch.tensor([1.0, -1.0]), torch.tensor([1.5, 1.5]), 0.8, 1.2)
    (tensor([-1.2000,  1.5000]), tensor([1., 0.]))
    """
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(low, high)
    return torch.maximum(plain, bounded), (bounded > plain).to(ratio.dtype)
