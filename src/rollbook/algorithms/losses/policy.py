"""Policy losses: PPO and its variants, and REINFORCE with constant weights; the value loss and the entropy bonus.

The gradient of PPO, GSPO, GMPO, SAPO, CPG and importance sampling flows through the ratio of probabilities. CISPO,
TOPR, OPMD, sPPO and REC multiply the gradient of log p by constant weights.

Invariant: at new_logprobs = old_logprobs the gradient of each ratio loss is the policy gradient, -A per token before
aggregation. Weights of the REINFORCE losses are constants, and so are the returns and old
values of the value loss. The entropy bonus is a loss, to be added to the others.
"""

from __future__ import annotations

import math

import torch

from rollbook.algorithms.aggregate import LossTerms, PolicyTensors, clip_surrogate, mean_over_tokens, reduce
from rollbook.algorithms.layout import Layout, PerRow, PerToken, check_optional, on_tokens
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_choice, check_float

__all__ = [
    "cispo",
    "cpg",
    "entropy_loss",
    "gmpo",
    "gspo",
    "importance_sampling",
    "opmd",
    "ppo",
    "rec",
    "sapo",
    "sppo",
    "topr",
    "value_loss",
]

CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@LOSSES.register(
    "ppo",
    "PolicyLoss",
    source="PPO (Schulman et al., 2017, arXiv 1707.06347), equation 7; dual clip: arXiv 1912.09729",
)
def ppo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
    sequence_delta: float | None = None,
    policy_gradient: bool = False,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute the clipped PPO loss: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = p / old.

    `ppo_kl`, here and in every loss, is the mean of -log r, before it is clamped or set to 1. The loss of LightRFT is
    `mode="seq-mean-token-mean", dual_clip=None`.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        dual_clip: Where A < 0, the loss is at most -A * `dual_clip` (verl, Trinity). `None`: no such bound (LightRFT,
            TRL).
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        sequence_delta: Tokens with A < 0 in rows whose mean of -log r is above it have loss 0, and still count in
            denominators.
        policy_gradient: Whether r is 1 with the gradient of log p, so that nothing is clipped.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, `pg_clipfrac`, `pg_clipfrac_lower` (of the dual clip), `ppo_kl`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> loss, metrics = ppo([[-1.0, -2.0]], [[-1.2, -1.5]], [[1.0, 1.0]])
    >>> loss, metrics["pg_clipfrac"]
    (tensor(-0.9033), tensor(0.5000))
    """
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    terms = ppo_terms(batch, clip_low, clip_high, dual_clip, log_ratio_clamp, sequence_delta, policy_gradient)
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


def ppo_terms(
    batch: PolicyTensors,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    log_ratio_clamp: float = 20.0,
    sequence_delta: float | None = None,
    policy_gradient: bool = False,
) -> LossTerms:
    """Compute the PPO loss of each token."""
    check_float("clip_low", clip_low, 0)
    check_float("clip_high", clip_high, 0)
    check_optional("dual_clip", dual_clip, 1, "a number > 1")
    check_optional("sequence_delta", sequence_delta, -math.inf, "a number")
    layout, advantages = batch.layout, batch.advantages
    log_ratio = batch.clamp_log_ratio(log_ratio_clamp)
    exponent = log_ratio
    if check_bool("policy_gradient", policy_gradient):
        exponent = batch.new_logprobs - batch.new_logprobs.detach()
    tokens, hit = clip_surrogate(advantages, exponent.exp(), 1 - clip_low, 1 + clip_high)
    token_metrics = {"pg_clipfrac": hit, "pg_clipfrac_lower": torch.zeros_like(hit), "ppo_kl": -batch.log_ratio}
    row_metrics = {}
    negative = advantages < 0
    if dual_clip is not None:
        bound = -advantages * dual_clip
        token_metrics["pg_clipfrac_lower"] = (negative & (tokens > bound)).to(hit.dtype)
        tokens = torch.where(negative, torch.minimum(tokens, bound), tokens)
    if sequence_delta is not None:
        distance = layout.row_means(-log_ratio.detach())
        left_out = negative & layout.spread(distance > sequence_delta)
        tokens = tokens * (~left_out).to(tokens.dtype)  # not where(), which would hide a loss of NaN
        token_metrics["seq_mask/masked_tokens"] = left_out
        row_metrics["seq_mask/mean_sequence_kl"] = distance
    return LossTerms(tokens, token_metrics, row_metrics)


@LOSSES.register(
    "gspo", source="GSPO (Zheng et al., 2025, arXiv 2507.18071): the ratio of whole rows, exp(mean of log-ratios)"
)
def gspo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_clamp: float = 20.0,
    mode: str = "seq-mean-token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Clip the ratio of whole rows as PPO does: s = exp(mean of log r), on every token with the gradient of its log p.

    With one advantage per row and the default `mode`, this is the gradient of the objective of the row, split over its
    tokens; advantages that differ within a row, and other modes, are GSPO-token.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        log_ratio_clamp: Bound of the absolute log s (verl bounds it above by 10); the gradient is not affected.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, `pg_clipfrac`, `ppo_kl`, and `ppo_kl_seq`, the mean over rows of -log s.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> gspo([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0], clip_low=0.2, clip_high=0.2).value
    tensor(-0.8607)
    """
    check_float("clip_low", clip_low, 0)
    check_float("clip_high", clip_high, 0)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    straight = batch.new_logprobs - batch.new_logprobs.detach()
    ratio = (batch.row_log_ratio(log_ratio_clamp) + straight).exp()
    tokens, hit = clip_surrogate(batch.advantages, ratio, 1 - clip_low, 1 + clip_high)
    rows = -batch.layout.row_means(batch.log_ratio)
    terms = LossTerms(tokens, {"pg_clipfrac": hit, "ppo_kl": -batch.log_ratio}, {"ppo_kl_seq": rows})
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register(
    "gmpo", "geo_mean", source="GMPO (Zhao et al., 2025, arXiv 2507.20673): the geometric mean of clipped ratios"
)
def gmpo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    log_ratio_clamp: float = 20.0,
    mode: str = "seq-mean-token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Multiply -A by the geometric mean of the clipped ratios of a row (GMPO).

    Computed in logarithms, so that nothing underflows. The advantage of a row is the mean over its tokens. The loss of
    the row is on each of its tokens, so that the default `mode` is the mean over rows.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Where A < 0, log r is at least -`clip_low`.
        clip_high: Where A > 0, log r is at most `clip_high`.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, `pg_clipfrac`, `ppo_kl`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> gmpo([[-1.0, -2.0]], [[-1.8, -1.5]], [1.0]).value
    tensor(-0.9512)
    """
    check_float("clip_low", clip_low, 0)
    check_float("clip_high", clip_high, 0)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    layout, log_ratio = batch.layout, batch.clamp_log_ratio(log_ratio_clamp)
    of_row = layout.row_means(batch.advantages)
    rising = layout.spread(of_row > 0)
    bounded = torch.where(rising, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    tokens = layout.spread(-of_row * layout.row_means(bounded).exp())
    terms = LossTerms(tokens, {"pg_clipfrac": (bounded != log_ratio), "ppo_kl": -batch.log_ratio})
    return terms.loss("pg_loss", layout, mode, norm, denominators, weights)


@LOSSES.register("sapo", source="SAPO (Gao et al., 2025, arXiv 2511.20347): 4 / tau * sigmoid(tau * (r - 1))")
def sapo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    log_ratio_clamp: float = 20.0,
    detach_gate: bool = False,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Replace the clip by a soft gate: -A g, g = 4 / tau * sigmoid(tau * (r - 1)), tau by the sign of A (SAPO).

    The gradient flows through the gate, as in the paper: 1 at r = 1, fading on both sides. Trinity multiplies a
    detached gate with log p, whose gradient is twice that at r = 1 and grows with r.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        tau_pos: tau where A > 0.
        tau_neg: tau elsewhere.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        detach_gate: Whether to use the form of Trinity.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `sapo_loss`, `ppo_kl`, `avg_soft_gate`, `avg_ratio`, `pos_adv_frac`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> x = torch.tensor([[0.0]], requires_grad=True)
    >>> sapo(x, [[0.0]], [[1.0]]).backward()
    >>> x.grad
    tensor([[-1.]])
    """
    detach_gate = check_bool("detach_gate", detach_gate)
    tau_pos, tau_neg = (check_float(name, tau, 1e-6) for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)))
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    positive, ratio = batch.advantages > 0, batch.clamp_log_ratio(log_ratio_clamp).exp()
    tau = torch.where(positive, ratio.new_full((), tau_pos), ratio.new_full((), tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    tokens = -batch.advantages * (gate.detach() * batch.new_logprobs if detach_gate else gate)
    metrics = {"ppo_kl": -batch.log_ratio, "avg_soft_gate": gate, "avg_ratio": ratio, "pos_adv_frac": positive}
    return LossTerms(tokens, metrics).loss("sapo_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register(
    "cpg", "cpgd", source="CPGD (Liu et al., 2025, arXiv 2505.12504): the clipped policy gradient on log p"
)
def cpg(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mode: str = "seq-mean-token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Clip log p instead of a ratio: -A min(log p, log old + log(1 + clip_high)) for A > 0 (CPG).

    For A < 0 it is -A max(log p, log old + log(1 - clip_low)); beyond the bound the gradient is 0. LightRFT has one
    bound for both sides.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, `pg_clipfrac`, `ppo_kl`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> cpg([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(1.5088)
    """
    check_float("clip_high", clip_high, 0)
    if not 0 <= check_float("clip_low", clip_low) < 1:
        raise ValueError(f"clip_low: got {clip_low!r}, expected a number in [0, 1)")
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    policy, positive = batch.new_logprobs, batch.advantages > 0
    old = policy.detach() - batch.log_ratio.detach()
    above, below = (old.new_full((), math.log1p(change)) for change in (clip_high, -clip_low))
    bound = old + torch.where(positive, above, below)
    bounded = torch.where(positive, torch.minimum(policy, bound), torch.maximum(policy, bound))
    beyond = (batch.advantages != 0) & (bounded != policy)
    terms = LossTerms(-batch.advantages * bounded, {"pg_clipfrac": beyond, "ppo_kl": -batch.log_ratio})
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register("importance_sampling", "is", source="importance-sampled policy gradient (Degris et al., 2012): -A * r")
def importance_sampling(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    log_ratio_clamp: float = 20.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -A r without a clip.

    `approx_kl` is what other losses call `ppo_kl`.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, `ratio/mean`, `approx_kl`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> importance_sampling([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(-0.9140)
    """
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    ratio = batch.clamp_log_ratio(log_ratio_clamp).exp()
    terms = LossTerms(-batch.advantages * ratio, {"ratio/mean": ratio, "approx_kl": -batch.log_ratio})
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register("cispo", source="CISPO (MiniMax-M1, 2025, arXiv 2506.13585): -A * clip(r) * log p, clip(r) a constant")
def cispo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
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
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -A c log p with the constant c = clip(r, 1 - clip_low, 1 + clip_high) (CISPO).

    A clipped token keeps its gradient.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        mask_clip: Whether to mask, as PPO would, tokens with r above 1 + `mask_clip_high` where A > 0, or below 1 -
            `mask_clip_low` where A < 0; they still count in denominators.
        mask_clip_low: Lower range of `mask_clip`.
        mask_clip_high: Upper range of `mask_clip`.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `cispo_loss`, `ppo_kl`, `unmasked_frac`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> cispo([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(1.2172)
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_float(name, value, 0)
    for name, value in (("mask_clip_low", mask_clip_low), ("mask_clip_high", mask_clip_high)):
        check_float(name, value, 0)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    ratio, gains = batch.clamp_log_ratio(log_ratio_clamp).detach().exp(), batch.advantages
    inside = torch.ones_like(ratio)
    if check_bool("mask_clip", mask_clip):
        out = (gains > 0) & (ratio > 1 + mask_clip_high) | (gains < 0) & (ratio < 1 - mask_clip_low)
        inside = (~out).to(ratio.dtype)
    tokens = -gains * ratio.clamp(1 - clip_low, 1 + clip_high) * inside * batch.new_logprobs
    terms = LossTerms(tokens, {"ppo_kl": -batch.log_ratio, "unmasked_frac": inside})
    return terms.loss("cispo_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register(
    "topr", source="TOPR (Le Roux et al., 2025, arXiv 2503.14286): the ratio within [0, 1] where A is not positive"
)
def topr(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    threshold: float = 0.0,
    level: str = "token",
    log_ratio_clamp: float = 20.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -a A log p: a is 1 where A is above `threshold`, else the ratio clipped to [0, 1] (TOPR).

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        threshold: Advantage above which a is 1.
        level: Ratio of each `"token"` (Trinity), or of the row, `"sequence"`, as in the paper.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `topr_loss`, `avg_alpha`, `avg_ratio`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> topr([[-1.0, -2.0]], [[-1.2, -1.5]], [-1.0]).value
    tensor(-1.1065)
    """
    check_float("threshold", threshold)
    check_choice("level", level, ("token", "sequence"))
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    log_ratio = batch.clamp_log_ratio(log_ratio_clamp).detach()
    if level == "sequence":
        whole_rows = batch.layout.row_sums(batch.log_ratio.detach())
        log_ratio = batch.layout.spread(whole_rows.clamp(-log_ratio_clamp, log_ratio_clamp))
    ratio = log_ratio.exp()
    alpha = torch.where(batch.advantages > threshold, torch.ones_like(ratio), ratio.clamp(0, 1))
    terms = LossTerms(-alpha * batch.advantages * batch.new_logprobs, {"avg_alpha": alpha, "avg_ratio": ratio})
    return terms.loss("topr_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register(
    "opmd", source="OPMD, as Trinity-RFT has it (arXiv 2505.17826), after Kimi k1.5 (2025, arXiv 2501.12599)"
)
def opmd(
    new_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    tau: float = 1.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -A log p / (1 + tau): REINFORCE with the step of mirror descent (OPMD).

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        tau: Weight of the distance to the old policy.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `opmd_loss`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> opmd([[-1.0, -2.0]], [1.0]).value
    tensor(0.7500)
    """
    check_float("tau", tau, 0)
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs)
    policy, gains = layout.take("new_logprobs", new_logprobs), on_tokens(layout, "advantages", advantages).detach()
    return LossTerms(-gains * policy / (1 + tau)).loss("opmd_loss", layout, mode, norm, denominators, weights)


@LOSSES.register("sppo", source="softmax PPO (Vaswani et al., 2022, arXiv 2108.05828): -A * log r within a range")
def sppo(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    mask: PerToken | None = None,
    *,
    epsilon: float = 0.3,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0.

    This is not the self-play method of the same name.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        epsilon: Range of the ratio.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss`, and `pg_clipfrac`, the share of tokens out of range.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> sppo([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0]).value
    tensor(-0.1000)
    """
    check_float("epsilon", epsilon, 0)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    ratio = batch.log_ratio.detach().exp()
    inside = ((ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)).to(ratio.dtype)
    terms = LossTerms(-batch.advantages * batch.log_ratio * inside, {"pg_clipfrac": 1 - inside})
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


@LOSSES.register(
    "rec", source="REC (Yao et al., 2025, arXiv 2509.24203): REINFORCE with clip, weight and regularizer apart"
)
def rec(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
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
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -w A log p on tokens within range, plus a regularizer on all tokens (REC).

    - `clip_mode` (r in range): `two-side` both bounds, 1 - clip_low and 1 + clip_high; `one-side` the upper where A >=
      0, the lower where A <= 0, as PPO; `gspo-one-side` the same for the ratio of the row; `ring` as `two-side`, and
      also below 1 - ring_low where A >= 0 and above 1 + ring_high where A <= 0; `none`: all.
    - `weight` (w): the ratio of the token, that of the row, exp(A / temperature), or 1. Any goes with any `clip_mode`.
    - `regularizer`, times its coefficient: `k2` is (log r)^2 without the usual half, `forward-kl` is -log p.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        ring_low: Lower range of the mode `ring`.
        ring_high: Upper range of the mode `ring`.
        clip_mode: Which tokens are in range; see above.
        weight: Factor of each token; see above.
        regularizer: `"none"`, `"k2"` or `"forward-kl"`.
        regularizer_coef: Coefficient of the regularizer.
        temperature: Temperature of the weight `"advantage"`.
        log_ratio_clamp: Bound of the absolute log-ratio, so that its exponential stays finite.
        mode: Aggregation; by default `token-mean`, but `seq-mean-token-mean` for `gspo-one-side`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `pg_loss` (with the regularizer), `pg_clipfrac`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> rec([[-1.0, -2.0]], [[-1.2, -1.5]], [1.0], clip_mode="one-side", weight="importance_sampling").value
    tensor(0.6065)
    """
    check_choice("clip_mode", clip_mode, CLIP_MODES)
    check_choice("weight", weight, WEIGHTS)
    check_choice("regularizer", regularizer, REGULARIZERS)
    check_float("regularizer_coef", regularizer_coef, 0)
    check_float("temperature", temperature, 1e-30, expected="a positive number")
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "ring_low": ring_low, "ring_high": ring_high}
    for name, value in bounds.items():
        check_float(name, value, 0)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask)
    gains, policy = batch.advantages, batch.new_logprobs
    ratio = batch.clamp_log_ratio(log_ratio_clamp).detach().exp()
    of_row = batch.row_log_ratio(log_ratio_clamp).exp()
    inside = _in_range(of_row if clip_mode == "gspo-one-side" else ratio, gains, clip_mode, bounds).to(ratio.dtype)
    factor = torch.ones_like(ratio)
    if weight == "importance_sampling":
        factor = ratio
    elif weight == "gspo_importance_sampling":
        factor = of_row
    elif weight == "advantage":
        factor = (gains / temperature).exp()
    tokens = -factor * gains * inside * policy
    if regularizer == "k2":
        tokens = tokens + regularizer_coef * batch.log_ratio.square()
    elif regularizer == "forward-kl":
        tokens = tokens - regularizer_coef * policy
    if mode is None:
        mode = "seq-mean-token-mean" if clip_mode == "gspo-one-side" else "token-mean"
    terms = LossTerms(tokens, {"pg_clipfrac": 1 - inside})
    return terms.loss("pg_loss", batch.layout, mode, norm, denominators, weights)


def _in_range(ratio: torch.Tensor, advantages: torch.Tensor, clip_mode: str, bounds: dict[str, float]) -> torch.Tensor:
    """Mark the tokens that REC trains on. Shape: `shape` bool."""
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
    predicted, target = layout.take("values", values), layout.take("returns", returns).detach()
    error = (predicted - target).square()
    hit = torch.zeros_like(error)
    if clip is not None:
        if old_values is None:
            raise ValueError(f"old_values: got None, expected the values before the update, since clip is {clip:g}")
        old = layout.take("old_values", old_values).detach()
        clipped_error = (old + (predicted - old).clamp(-clip, clip) - target).square()
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
