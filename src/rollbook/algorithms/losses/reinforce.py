"""Policy losses in which a constant weighs log p: CISPO, TOPR, OPMD, sPPO, REC; and plain importance sampling.

Invariant: whatever weighs, clips or leaves out a token carries no gradient; the gradient is that weight times the
gradient of log p (importance sampling: of the ratio, which is the same).
"""

from __future__ import annotations

import torch

from rollbook.algorithms.aggregate import Policy, Terms
from rollbook.algorithms.layout import Layout, PerRow, PerToken, on_tokens
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_choice, check_float

CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@LOSSES.register("importance_sampling", "is", source="importance-sampled policy gradient (Degris et al., 2012): -A * r")
def importance_sampling(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    log_ratio_clamp: float = 20.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-A r, nothing clipped but log r within ±`log_ratio_clamp`. Metrics: `pg_loss`, `ratio/mean`, `approx_kl`.

    `approx_kl` is what other losses call `ppo_kl`.

    >>> importance_sampling([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(-0.9140)
    """
    batch = Policy.of(log_probs, old_log_probs, advantages, mask)
    ratio = batch.clamped(log_ratio_clamp).exp()
    terms = Terms(-batch.advantages * ratio, {"ratio/mean": ratio, "approx_kl": -batch.log_ratio})
    return terms.loss("pg_loss", batch.layout, mode, norm, whole, weights)


@LOSSES.register("cispo", source="CISPO (MiniMax-M1, 2025, arXiv 2506.13585): -A * clip(r) * log p, clip(r) a constant")
def cispo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    mask_clip: bool = False,
    mask_clip_low: float = 1.0,
    mask_clip_high: float = 0.28,
    log_ratio_clamp: float = 20.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-A c log p with c = clip(r, 1 - clip_low, 1 + clip_high) a constant: a clipped token keeps its gradient.

    `mask_clip` leaves out, as PPO would, tokens with r above 1 + `mask_clip_high` where A > 0, or below
    1 - `mask_clip_low` where A < 0; they still count in denominators. Metrics: `cispo_loss`, `ppo_kl`,
    `unmasked_frac`.

    >>> cispo([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(1.2172)
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_float(name, value, 0)
    for name, value in (("mask_clip_low", mask_clip_low), ("mask_clip_high", mask_clip_high)):
        check_float(name, value, 0)
    batch = Policy.of(log_probs, old_log_probs, advantages, mask)
    ratio, given = batch.clamped(log_ratio_clamp).detach().exp(), batch.advantages
    kept = torch.ones_like(ratio)
    if check_bool("mask_clip", mask_clip):
        out = (given > 0) & (ratio > 1 + mask_clip_high) | (given < 0) & (ratio < 1 - mask_clip_low)
        kept = (~out).to(ratio.dtype)
    tokens = -given * ratio.clamp(1 - clip_low, 1 + clip_high) * kept * batch.log_probs
    terms = Terms(tokens, {"ppo_kl": -batch.log_ratio, "unmasked_frac": kept})
    return terms.loss("cispo_loss", batch.layout, mode, norm, whole, weights)


@LOSSES.register(
    "topr", source="TOPR (Le Roux et al., 2025, arXiv 2503.14286): the ratio within [0, 1] where A is not positive"
)
def topr(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    threshold: float = 0.0,
    level: str = "token",
    log_ratio_clamp: float = 20.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-a A log p: a is 1 where A is above `threshold`, else the ratio within [0, 1].

    `level`: the ratio of each token (Trinity), or of the whole row, `"sequence"`, as the paper has it. Metrics:
    `topr_loss`, `avg_alpha`, `avg_ratio`.

    >>> topr([[-1.0, -2.0]], [[-1.2, -1.5]], [-1.0]).value
    tensor(-1.1065)
    """
    check_float("threshold", threshold)
    check_choice("level", level, ("token", "sequence"))
    batch = Policy.of(log_probs, old_log_probs, advantages, mask)
    log_ratio = batch.clamped(log_ratio_clamp).detach()
    if level == "sequence":
        whole_rows = batch.layout.row_sums(batch.log_ratio.detach())
        log_ratio = batch.layout.spread(whole_rows.clamp(-log_ratio_clamp, log_ratio_clamp))
    ratio = log_ratio.exp()
    alpha = torch.where(batch.advantages > threshold, torch.ones_like(ratio), ratio.clamp(0, 1))
    terms = Terms(-alpha * batch.advantages * batch.log_probs, {"avg_alpha": alpha, "avg_ratio": ratio})
    return terms.loss("topr_loss", batch.layout, mode, norm, whole, weights)


@LOSSES.register(
    "opmd", source="OPMD, as Trinity-RFT has it (arXiv 2505.17826), after Kimi k1.5 (2025, arXiv 2501.12599)"
)
def opmd(
    log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    tau: float = 1.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-A log p / (1 + tau): REINFORCE with the step of mirror descent; `tau` weighs the distance. Metric: `opmd_loss`.

    >>> opmd([[-1.0, -2.0]], [1.0]).value
    tensor(0.7500)
    """
    check_float("tau", tau, 0)
    layout = Layout.of(mask, log_probs=log_probs)
    ours, given = layout.take("log_probs", log_probs), on_tokens(layout, "advantages", advantages).detach()
    return Terms(-given * ours / (1 + tau)).loss("opmd_loss", layout, mode, norm, whole, weights)


@LOSSES.register("sppo", source="softmax PPO (Vaswani et al., 2022, arXiv 2108.05828): -A * log r within a range")
def sppo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    epsilon: float = 0.3,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0 (not the self-play method of the same name).

    Metrics: `pg_loss`, `pg_clipfrac`, the share of tokens out of range.

    >>> sppo([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(-0.1000)
    """
    check_float("epsilon", epsilon, 0)
    batch = Policy.of(log_probs, old_log_probs, advantages, mask)
    ratio = batch.log_ratio.detach().exp()
    inside = ((ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)).to(ratio.dtype)
    terms = Terms(-batch.advantages * batch.log_ratio * inside, {"pg_clipfrac": 1 - inside})
    return terms.loss("pg_loss", batch.layout, mode, norm, whole, weights)


@LOSSES.register(
    "rec", source="REC (Yao et al., 2025, arXiv 2509.24203): REINFORCE with clip, weight and regularizer apart"
)
def rec(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ring_low: float = 0.6,
    ring_high: float = 2.0,
    clip_mode: str = "none",
    weight: str = "none",
    regularizer: str = "none",
    regularizer_coef: float = 0.0,
    temperature: float = 1.0,
    log_ratio_clamp: float = 20.0,
    mode: str | None = None,
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-w A log p on tokens within range, plus a regularizer on all: REINFORCE with what PPO adds taken apart.

    - `clip_mode`, r in range: `two-side` both bounds, 1 - clip_low and 1 + clip_high; `one-side` the upper where
      A >= 0, the lower where A <= 0, as PPO; `gspo-one-side` the same of the row's ratio; `ring` as `two-side`, and
      also below 1 - ring_low where A >= 0 and above 1 + ring_high where A <= 0; `none`: all.
    - `weight`, w: the token's ratio, the row's, exp(A / temperature), or 1. Any goes with any `clip_mode`.
    - `regularizer`, times its coefficient: `k2` is (log r)^2 without the usual half, `forward-kl` is -log p.

    `mode` by default: `token-mean`, but `seq-mean-token-mean` for `gspo-one-side`. Metrics: `pg_loss` (with the
    regularizer), `pg_clipfrac`.

    >>> rec([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0], clip_mode="one-side", weight="importance_sampling").value
    tensor(0.6065)
    """
    check_choice("clip_mode", clip_mode, CLIP_MODES)
    check_choice("weight", weight, WEIGHTS)
    check_choice("regularizer", regularizer, REGULARIZERS)
    check_float("regularizer_coef", regularizer_coef, 0)
    check_float("temperature", temperature, 1e-30, what="a positive number")
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "ring_low": ring_low, "ring_high": ring_high}
    for name, value in bounds.items():
        check_float(name, value, 0)
    batch = Policy.of(log_probs, old_log_probs, advantages, mask)
    given, ours = batch.advantages, batch.log_probs
    ratio = batch.clamped(log_ratio_clamp).detach().exp()
    of_row = batch.row_log_ratio(log_ratio_clamp).exp()
    inside = _in_range(of_row if clip_mode == "gspo-one-side" else ratio, given, clip_mode, bounds).to(ratio.dtype)
    factor = torch.ones_like(ratio)
    if weight == "importance_sampling":
        factor = ratio
    elif weight == "gspo_importance_sampling":
        factor = of_row
    elif weight == "advantage":
        factor = (given / temperature).exp()
    tokens = -factor * given * inside * ours
    if regularizer == "k2":
        tokens = tokens + regularizer_coef * batch.log_ratio.square()
    elif regularizer == "forward-kl":
        tokens = tokens - regularizer_coef * ours
    if mode is None:
        mode = "seq-mean-token-mean" if clip_mode == "gspo-one-side" else "token-mean"
    terms = Terms(tokens, {"pg_clipfrac": 1 - inside})
    return terms.loss("pg_loss", batch.layout, mode, norm, whole, weights)


def _in_range(ratio: torch.Tensor, advantages: torch.Tensor, clip_mode: str, bounds: dict[str, float]) -> torch.Tensor:
    """[of `shape`] bool: which tokens REC learns from."""
    if clip_mode == "none":
        return torch.ones_like(ratio, dtype=torch.bool)
    above, below = ratio >= 1 - bounds["clip_low"], ratio <= 1 + bounds["clip_high"]
    rising, falling = advantages >= 0, advantages <= 0
    if clip_mode == "two-side":
        return above & below
    if clip_mode == "ring":
        far_below, far_above = ratio <= 1 - bounds["ring_low"], ratio >= 1 + bounds["ring_high"]
        return above & below | rising & far_below | falling & far_above
    return rising & below | falling & above
