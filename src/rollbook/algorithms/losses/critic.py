"""The critic's loss, and the entropy bonus.

Invariant: returns and old values are constants; a bonus has the sign of a loss, so that losses are only ever added.
"""

from __future__ import annotations

import torch

from rollbook.algorithms.aggregate import Terms, reduce, token_share
from rollbook.algorithms.layout import Layout, PerRow, PerToken, constant, on_tokens, optional_number
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_float


@LOSSES.register("value", "ValueLoss", source="value function clipping (Engstrom et al., 2020, arXiv 2005.12729)")
def value_loss(
    values: PerToken,
    returns: PerToken,
    mask: PerToken | None = None,
    old_values: PerToken | None = None,
    *,
    clip: float | None = 0.2,
    mode: str = "seq-mean-token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Half the squared error, the larger of that of V and that of V held within ±`clip` of the old value.

    values, returns, old_values: (B, A) or packed. `clip=None` needs no old values. The aggregation by default is
    LightRFT's; Trinity and verl take `token-mean`. Metrics: `value_loss`, `vf_clipfrac`.

    >>> value_loss([[1.0, 2.0]], [[0.0, 3.0]], old_values=[[0.5, 1.9]]).value
    tensor(0.5000)
    """
    optional_number("clip", clip, 0, "a positive number")
    layout = Layout.of(mask, values=values, returns=returns)
    ours, target = layout.take("values", values), layout.take("returns", returns).detach()
    error = (ours - target).square()
    hit = torch.zeros_like(error)
    if clip is not None:
        if old_values is None:
            raise ValueError(f"old_values: got None, expected those that clip={clip:g} is about, or clip=None")
        old = layout.take("old_values", old_values).detach()
        held = (old + (ours - old).clamp(-clip, clip) - target).square()
        hit = (held > error).to(error.dtype)
        error = torch.maximum(error, held)
    return Terms(error / 2, {"vf_clipfrac": hit}).loss("value_loss", layout, mode, norm, whole, weights)


@LOSSES.register("entropy", source="entropy bonus (Williams and Peng, 1991): -coef * H")
def entropy_loss(
    entropy: PerToken,
    mask: PerToken | None = None,
    *,
    coef: float = 0.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-coef times the aggregate of entropies: add it to the policy loss, and more entropy is less loss.

    Trinity and verl give the bonus with the other sign and subtract it. Mixed with expert rows, give a mask without
    them. Metrics: `entropy_loss`, the aggregate before `coef` and with its own sign, and `entropy_coef`.

    >>> loss, metrics = entropy_loss([[1.0, 3.0]], coef=0.1)
    >>> loss, metrics["entropy_loss"]
    (tensor(-0.2000), tensor(2.))
    """
    check_float("coef", coef)
    layout = Layout.of(mask, entropy=entropy)
    tokens = layout.take("entropy", entropy)
    if weights is not None:
        tokens = tokens * on_tokens(layout, "weights", weights).detach()
    total = reduce(layout, tokens, mode, norm, whole)
    share = token_share(layout, constant(layout, coef), whole)
    return Loss(-coef * total, {"entropy_loss": total.detach(), "entropy_coef": share})
