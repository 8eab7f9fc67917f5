"""The value loss and the entropy bonus.

Invariant: returns and old values are constants. The entropy bonus is a loss, to be added to the others.
"""

from __future__ import annotations

import torch

from rollbook.algorithms.aggregate import LossTerms, mean_over_tokens, reduce
from rollbook.algorithms.layout import Layout, PerRow, PerToken, check_optional, on_tokens
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_float


@LOSSES.register(
    "value", "ValueLoss", source="value function clipping (Engstrom et al., 2020, arXiv 2005.12729)", role="critic"
)
def value_loss(
    values: PerToken,
    returns: PerToken,
    mask: PerToken | None = None,
    old_values: PerToken | None = None,
    *,
    clip: float | None = 0.2,
    mode: str = "seq-mean-token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute the clipped value loss: half the larger squared error of V and of V clipped around the old value.

    The default aggregation is that of LightRFT; Trinity and verl use `token-mean`.

    Args:
        values: [B, R] or packed: values of the critic being trained, with gradient.
        returns: [B, R] or packed: the targets, taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        old_values: [B, R] or packed: values before the update; not needed with `clip=None`.
        clip: Range around the old value; `None`: no clip.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `value_loss`, `vf_clipfrac`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> value_loss([[1.0, 2.0]], [[0.0, 3.0]], old_values=[[0.5, 1.9]]).value
    tensor(0.5000)
    """
    check_optional("clip", clip, 0, "a positive number")
    layout = Layout.from_tokens(mask, values=values, returns=returns)
    ours, target = layout.take("values", values), layout.take("returns", returns).detach()
    error = (ours - target).square()
    hit = torch.zeros_like(error)
    if clip is not None:
        if old_values is None:
            raise ValueError(f"old_values: got None, expected the values before the update, since clip is {clip:g}")
        old = layout.take("old_values", old_values).detach()
        clipped_error = (old + (ours - old).clamp(-clip, clip) - target).square()
        hit = (clipped_error > error).to(error.dtype)
        error = torch.maximum(error, clipped_error)
    return LossTerms(error / 2, {"vf_clipfrac": hit}).loss("value_loss", layout, mode, norm, denominators, weights)


@LOSSES.register("entropy", source="entropy bonus (Williams and Peng, 1991): -coef * H", role="regularizer")
def entropy_loss(
    entropy: PerToken,
    mask: PerToken | None = None,
    *,
    coef: float = 0.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -coef times the aggregated entropy, to be added to the policy loss.

    Trinity and verl give the bonus with the other sign and subtract it. With expert rows in the batch, pass a mask
    without them.

    Args:
        entropy: [B, R] or packed: entropy of the policy per token.
        mask: [B, R] or packed: which tokens count. `None`: all.
        coef: Coefficient.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `entropy_loss`, the aggregate before `coef` and with its own sign, and `entropy_coef`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> loss, metrics = entropy_loss([[1.0, 3.0]], coef=0.1)
    >>> loss, metrics["entropy_loss"]
    (tensor(-0.2000), tensor(2.))
    """
    check_float("coef", coef)
    layout = Layout.from_tokens(mask, entropy=entropy)
    tokens = layout.take("entropy", entropy)
    if weights is not None:
        tokens = tokens * on_tokens(layout, "weights", weights).detach()
    total = reduce(layout, tokens, mode, norm, denominators)
    share = mean_over_tokens(layout, torch.full(layout.shape, float(coef), device=layout.mask.device), denominators)
    return Loss(-coef * total, {"entropy_loss": total.detach(), "entropy_coef": share})
