"""Aggregation of token losses to one number, in four modes, and the metrics of losses.

Invariant: the values of the micro-batches of a batch, each divided by the denominators of the whole batch, add up to
the value of the batch. A row without a token that counts contributes 0, never NaN, and does not count as a row.
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

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregate(
    values: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | None = None,
) -> torch.Tensor:
    """Aggregate the values of all tokens that count to one number.

    - `token-mean`: the sum over all tokens, divided by their number (DAPO).
    - `seq-mean-token-mean`: the mean over rows of the mean over tokens of each row (GRPO, GSPO, LightRFT).
    - `seq-mean-token-sum`: the mean over rows of the sum of each row.
    - `seq-mean-token-sum-norm`: the sum over all tokens, divided by the constant `norm`. That of Dr. GRPO is rows times
      the longest response allowed; verl and Trinity take the padded width, so that their loss changes with padding.

    Rows without a token that counts are not rows, also not in `denominators.sequences`.

    Args:
        values: [B, R] or packed.
        mask: [B, R] or packed: which tokens count. `None`: all.
        mode: One of `MODES`.
        norm: Constant of `seq-mean-token-sum-norm`.
        denominators: In micro-batches, the denominators of the whole batch, such as `plan(...).denominators`: the
            values of micro-batches then add up. `None`: those of this call.
        weights: [B, R] or packed: factors of the values, which leave the denominators as they are.

    Returns:
        [] The number.

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
    layout = Layout.of(mask, values=values)
    tokens = layout.take("values", values)
    if weights is not None:
        tokens = tokens * layout.take("weights", weights)
    return reduce(layout, tokens, mode, norm, denominators)


def count_denominators(mask: PerToken) -> Denominators:
    """Count the denominators of a batch, to be passed to its micro-batches.

    `plan(...)` counts them too. If the mask was narrowed since, for example to tokens of high entropy or by a
    correction, count them on the narrowed mask of the *whole* batch.

    Args:
        mask: [B, R] or packed: which tokens count. `None`: all.

    Returns:
        The denominators.

    Raises:
        ValueError: If the mask is no mask.

    >>> count_denominators([[1, 1, 0], [0, 0, 0]])
    Denominators(tokens=2, sequences=1, samples=2)
    """
    layout = Layout.of(mask)
    return Denominators(int(layout.mask.sum()), int((layout.counts > 0).sum()), layout.rows)


def reduce(
    layout: Layout, tokens: torch.Tensor, mode: str, norm: float | None = None, denominators: Denominators | None = None
) -> torch.Tensor:
    """`aggregate` for values (`layout.shape`) that are plain tensors already."""
    check_choice("mode", mode, MODES)
    if denominators is not None and not isinstance(denominators, Denominators):
        raise ValueError(
            f"denominators: got {type(denominators).__name__}, expected the Denominators of the whole batch, or None"
        )
    if mode == "seq-mean-token-sum-norm":
        if norm is None:
            raise ValueError("norm: got None, expected the constant to divide by (the padded width is none)")
        check_float("norm", norm, 1e-30, what="a positive number")
        return layout.masked(tokens).sum() / norm
    if mode == "token-mean":
        count = layout.mask.sum().clamp(min=1) if denominators is None else max(denominators.tokens, 1)
        return layout.masked(tokens).sum() / count
    rows = layout.row_means(tokens) if mode == "seq-mean-token-mean" else layout.row_sums(tokens)
    return rows.sum() / (
        (layout.counts > 0).sum().clamp(min=1) if denominators is None else max(denominators.sequences, 1)
    )


def token_share(layout: Layout, tokens: torch.Tensor, denominators: Denominators | None = None) -> torch.Tensor:
    """The mean over tokens as a metric: detached, and as a share of the whole batch where that is given."""
    return reduce(layout, tokens.detach().to(torch.float32), "token-mean", None, denominators)


def row_share(layout: Layout, rows: torch.Tensor, denominators: Denominators | None = None) -> torch.Tensor:
    """The mean over rows that have tokens as a metric: (B,) -> ()."""
    has = layout.counts > 0
    present = torch.where(has, rows.detach().to(torch.float32), 0.0)
    return present.sum() / (has.sum().clamp(min=1) if denominators is None else max(denominators.sequences, 1))


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
        layout = Layout.of(mask, values=values)
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
        denominators: Denominators | None,
        weights: PerToken | PerRow | None,
    ) -> Loss:
        """Aggregate; the value is reported under `name`."""
        tokens = self.tokens
        if weights is not None:
            tokens = tokens * on_tokens(layout, "weights", weights).detach()
        total = reduce(layout, tokens, mode, norm, denominators)
        metrics = {}
        for metric, entries in self.of_tokens.items():
            metrics[metric] = token_share(layout, entries, denominators)
        for metric, entries in self.of_rows.items():
            metrics[metric] = row_share(layout, entries, denominators)
        metrics[name] = total.detach()
        return Loss(total, metrics)


def clipped(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic of -A * ratio and -A * (ratio within [low, high]), and 1.0 where that is the latter.

    >>> clipped(torch.tensor([1.0, -1.0]), torch.tensor([1.5, 1.5]), 0.8, 1.2)
    (tensor([-1.2000,  1.5000]), tensor([1., 0.]))
    """
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(low, high)
    return torch.maximum(plain, bounded), (bounded > plain).to(ratio.dtype)
