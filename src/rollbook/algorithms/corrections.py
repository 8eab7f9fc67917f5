"""Off-policy corrections: importance weights, staleness weights, masks, and diagnostics of the mismatch.

Invariant: ratios are differences of logarithms in float64, clamped before they are exponentiated, so that finite
float32 log-probs give finite weights and metrics. Weights carry no gradient and are 0 where the returned mask is False,
which is never wider than the given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.kl import k3
from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_tensor, is_per_row
from rollbook.algorithms.results import Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.rows import Rows

__all__ = ["Correction", "diagnostics", "importance_weights", "staleness_weights"]

LEVELS = ("token", "sequence", "geometric")
"""Levels of `importance_weights`."""
KINDS = ("cut", "exponential", "linear")
"""Kinds of `staleness_weights`."""
_MAX_EXPONENT = 80.0
"""Metrics are at most e^80, which float32 can represent."""


@dataclass(frozen=True)
class Correction:
    """Weights of the token losses, and the tokens to train on.

    Pass both to a loss: `ppo(..., mask=correction.mask, weights=correction.weights)`. To keep the denominators of all
    tokens, pass the mask from before the correction; the weights of masked tokens are 0.

    Attributes:
        weights: For each token, in the given layout, without gradient; 0 where `mask` is False.
        mask: bool: the given mask without the tokens masked here.
        report: Rows that lost tokens, by reason, and metrics of the weights.

    >>> correction = staleness_weights([5, 1], 5, [[1, 1], [1]], max_staleness=2)
    >>> correction.weights, correction.mask, correction.report.which("nothing left")
    ([tensor([1., 1.]), tensor([0.])], [tensor([True, True]), tensor([False])], [1])
    """

    weights: Any
    mask: Any
    report: Report


def importance_weights(
    old_logprobs: PerToken,
    logprobs: PerToken,
    mask: PerToken | None = None,
    versions: PerToken | PerRow | int | None = None,
    *,
    level: str = "token",
    truncate: float | None = 2.0,
    low: float | None = None,
    mask_outside: tuple[float, float] | None = None,
    veto: float | None = None,
    log_clamp: float = 20.0,
    normalize: bool = False,
    current: int | None = None,
    max_staleness: int | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Correction:
    """Compute importance weights from the engine's policy to the trainer's old policy: truncated, masked, or both.

    With d = log p_old - log p_engine at each token that counts, a weight is e to the power of

    - `level="token"`: d itself (truncated importance sampling, Yao et al., 2025; biased for sequences, low variance);
    - `"sequence"`: the sum of d over the row, on each of its tokens (unbiased, high variance);
    - `"geometric"`: the mean of d over the row (its per-token geometric mean; bounded variance for any length).

    The exponent is clamped to ±`log_clamp`. Then, in this order:

    1. `veto` masks a row if one of its tokens has e^d below it.
    2. `mask_outside` masks weights out of range: tokens, or at the other levels rows.
    3. `versions`, `current` and `max_staleness` mask older tokens. They still count in the ratio of their row.
    4. `truncate` caps weights, `low` raises them.
    5. `normalize` divides by the mean weight over the tokens that are left (at the other levels: rows), of all
       processes. Do this on the whole batch, before it is divided into micro-batches.

    NaN log-probs give NaN weights.

    Args:
        old_logprobs: [B, R] or packed: log-probs of the trainer's policy before the update, recomputed.
        logprobs: [B, R] or packed: log-probs of the engine, of the *same* distribution, temperature and top-p
            truncation included. Otherwise every ratio is off by the log of the remaining mass.
        mask: [B, R] or packed: which tokens count. `None`: all.
        versions: Policy versions, see `staleness_weights`.
        level: `"token"`, `"sequence"` or `"geometric"`.
        truncate: Largest weight; `None`: no cap.
        low: Smallest weight; `None`: no floor.
        mask_outside: Range (low, high) of weights; `None`: any.
        veto: Smallest e^d of a token, such as 1e-4; `None`: any.
        log_clamp: Bound of the absolute exponent.
        normalize: Whether to divide by the mean weight.
        current: Current policy version.
        max_staleness: Largest number of versions that a token may be old.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Weights and mask in the layout of the arguments. The report lists masked rows; its metrics are those of
        `diagnostics`, and of the weights that are left, before step 5: `weight_mean`, `weight_min`, `weight_max`,
        `weight_ess` (as a share), the shares `capped` and `raised`, and the share of tokens `masked`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> policy, engine = torch.tensor([[-1.0, -1.0], [-9.0, -1.0]]), torch.tensor([[-1.5, -3.0], [-1.0, -1.0]])
    >>> importance_weights(policy, engine).weights
    tensor([[1.6487e+00, 2.0000e+00],
            [3.3546e-04, 1.0000e+00]])
    >>> result = importance_weights(policy, engine, level="geometric", truncate=None, mask_outside=(0.5, 5.0))
    >>> result.weights, result.report.which("outside range")
    (tensor([[3.4903, 3.4903],
            [0.0000, 0.0000]]), [1])
    """
    check_choice("level", level, LEVELS)
    check_float("log_clamp", log_clamp, 1e-30, _MAX_EXPONENT, expected=f"a positive number up to {_MAX_EXPONENT:g}")
    _check_bounds(truncate, low, mask_outside, veto)
    normalize = check_bool("normalize", normalize)
    layout, dtype, policy, engine = _read_logprobs(old_logprobs, logprobs, mask)
    off = policy - engine
    by_row = level != "token"
    exponent = off if not by_row else layout.row_sums(off) if level == "sequence" else layout.row_means(off)
    raw = exponent.clamp(-log_clamp, log_clamp).exp()  # of tokens, or of rows; `to_tokens` spreads either
    to_tokens = layout.spread if by_row else layout.masked
    removed: dict[str, torch.Tensor] = {}
    if veto is not None:
        # Not of the clamped ratio: a threshold below e^-log_clamp must have an effect.
        removed["vetoed"] = layout.spread(layout.row_sums((off < log(veto)).to(torch.float64)) > 0)
    if mask_outside is not None:
        removed["outside range"] = to_tokens((raw < mask_outside[0]) | (raw > mask_outside[1]))
    if versions is not None or current is not None or max_staleness is not None:
        if versions is None or current is None or max_staleness is None:
            raise ValueError("versions: expected all of versions, current and max_staleness, or none of them")
        removed["stale"] = _staleness(layout, versions, current) > check_float("max_staleness", max_staleness, 0)
    left = layout.narrowed(~torch.stack(list(removed.values())).any(0)) if removed else layout
    weights = raw.clamp(low, truncate) if truncate is not None or low is not None else raw
    counted = left.counts > 0 if by_row else left.mask
    metrics = _compute_diagnostics(layout, policy, engine) | _weight_metrics(
        raw[counted], weights[counted], truncate, low
    )
    tokens = int(layout.mask.sum())
    metrics["masked"] = 1 - int(left.mask.sum()) / tokens if tokens else 0.0
    if normalize:
        sum_and_count = torch.stack([weights[counted].sum(), counted.sum().to(torch.float64)]).cpu()
        total, count = process_group.sum(sum_and_count).tolist()
        if total > 0:
            weights = weights * (count / total)
    return Correction(
        layout.restore(left.masked(to_tokens(weights)).to(dtype)),
        layout.restore(left.mask.clone()),
        _build_report(layout, left, removed, metrics),
    )


def staleness_weights(
    versions: PerToken | PerRow | int,
    current: int,
    mask: PerToken | None = None,
    *,
    kind: str = "cut",
    max_staleness: int | None = None,
    decay: float = 0.9,
) -> Correction:
    """Weight tokens by the age of the policy that sampled them, s = current - version.

    - `"cut"`: 1 up to `max_staleness`, masked beyond;
    - `"linear"`: 1 - s / (max_staleness + 1), masked beyond `max_staleness`;
    - `"exponential"`: decay^s, masked beyond `max_staleness` if that is given.

    Tokens are masked, not rows, so that the fresh end of a response that began under an old policy is kept.

    Args:
        versions: [B, R] or packed: policy version of each token; or [B] or one number, either of which needs the mask.
            Those of masked tokens are ignored.
        current: Current policy version.
        mask: [B, R] or packed: which tokens count. `None`: all.
        kind: `"cut"`, `"linear"` or `"exponential"`.
        max_staleness: Largest age.
        decay: Factor of the kind `"exponential"` per version.

    Returns:
        Weights and mask in the layout of the mask, and the report.

    Raises:
        ValueError: If a version is ahead of `current`, or an option is invalid.

    >>> result = staleness_weights([[3, 3, 5], [1, 5]], 5, kind="linear", max_staleness=3)
    >>> result.weights, result.mask, result.report.which("stale")
    ([tensor([0.5000, 0.5000, 1.0000]), tensor([0., 1.])],
     [tensor([True, True, True]), tensor([False,  True])], [1])
    """
    check_choice("kind", kind, KINDS)
    check_float("decay", decay, 0, 1)
    if max_staleness is None and kind != "exponential":
        raise ValueError(f"max_staleness: got None, expected a number of versions for kind={kind!r}")
    max_age = float("inf") if max_staleness is None else check_float("max_staleness", max_staleness, 0)
    if versions is None:
        raise ValueError("versions: got None, expected the version of each token, of each row, or one for all")
    if mask is None and (_is_scalar(versions) or _is_flat(versions)):
        raise ValueError("mask: got None, expected a mask beside one version for each row, or for all")
    layout = Layout.from_tokens(mask) if mask is not None else Layout.from_tokens(None, versions=versions)  # type: ignore[arg-type]
    age = _staleness(layout, versions, current)
    weights = torch.ones_like(age)
    if kind == "linear":
        weights = 1 - age / (max_age + 1)
    elif kind == "exponential":
        weights = torch.pow(torch.full_like(age, decay), age)
    removed = {"stale": age > max_age}
    left = layout.narrowed(~removed["stale"])
    metrics = {"staleness_mean": 0.0, "staleness_max": 0.0, "stale_fraction": 0.0}
    if (tokens := int(layout.mask.sum())) > 0:
        stale = (tokens - left.mask.sum()) / tokens
        numbers = torch.stack([layout.masked(age).sum() / tokens, layout.masked(age).amax(), stale.to(torch.float64)])
        metrics = dict(zip(metrics, numbers.tolist(), strict=True))
    return Correction(
        layout.restore(left.masked(weights).to(torch.float32)),
        layout.restore(left.mask),
        _build_report(layout, left, removed, metrics),
    )


def diagnostics(old_logprobs: PerToken, logprobs: PerToken, mask: PerToken | None = None) -> dict[str, float]:
    """Measure how far the policy being trained is from the one that sampled, over the N tokens that count.

    With d = log p_old - log p_engine, D its sum over a row, w = e^d, W = e^D; means over tokens, or over rows that have
    any:

    - `kl`: mean(-d), the k1 estimate of KL(engine || policy); `kl_k3`: mean(w - 1 - d), the same, never negative;
    - `chi2_token`: mean(w^2) - 1; `chi2_sequence`: mean(W^2) - 1;
    - `ess_token`: (sum w)^2 / (N sum w^2), the effective sample size as a share; `ess_sequence`: of W, over rows;
    - `log_diff_mean_abs`, `log_diff_max_abs`, `log_diff_std`: of d, with the population deviation. The mean hides the
      few tokens that matter; check the maximum;
    - `policy_perplexity`, `engine_perplexity`: e to the minus mean over rows of the mean log-prob of the row;
      `perplexity_ratio`: the first over the second.

    Sums of exponentials are computed in logarithms, and metrics are bounded by e^80. Without tokens, the metrics are
    those of two equal policies.

    Args:
        old_logprobs: [B, R] or packed: log-probs of the trainer's policy.
        logprobs: [B, R] or packed: log-probs of the engine.
        mask: [B, R] or packed: which tokens count. `None`: all.

    Returns:
        The metrics by name. NaN and infinite log-probs show in them.

    Raises:
        ValueError: If shapes differ.

    >>> result = diagnostics([[-1.0, -2.0], [-0.5]], [[-1.0, -1.0], [-0.5]])
    >>> round(result["kl"], 4), round(result["ess_token"], 4), round(result["perplexity_ratio"], 4)
    (0.3333, 0.8752, 1.284)
    """
    layout, _, policy, engine = _read_logprobs(old_logprobs, logprobs, mask)
    return _compute_diagnostics(layout, policy, engine)


_EQUAL_POLICIES = {
    "kl": 0.0,
    "kl_k3": 0.0,
    "chi2_token": 0.0,
    "chi2_sequence": 0.0,
    "ess_token": 1.0,
    "ess_sequence": 1.0,
    "log_diff_mean_abs": 0.0,
    "log_diff_max_abs": 0.0,
    "log_diff_std": 0.0,
    "policy_perplexity": 1.0,
    "engine_perplexity": 1.0,
    "perplexity_ratio": 1.0,
}


def _read_logprobs(
    old_logprobs: PerToken, logprobs: PerToken, mask: PerToken | None
) -> tuple[Layout, torch.dtype, torch.Tensor, torch.Tensor]:
    """Return the layout, the type of results, and both log-probs in float64, 0 where the mask is False."""
    layout = Layout.from_tokens(mask, old_logprobs=old_logprobs, logprobs=logprobs)
    policy = layout.take("old_logprobs", old_logprobs).detach()
    engine = layout.take("logprobs", logprobs).detach()
    dtype = torch.float64 if torch.float64 in (policy.dtype, engine.dtype) else torch.float32
    return layout, dtype, policy.to(torch.float64), engine.to(torch.float64)


def _compute_diagnostics(layout: Layout, policy: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    has = layout.counts > 0
    off = (policy - engine)[layout.mask]
    if not off.numel():
        return dict(_EQUAL_POLICIES)
    sums = layout.row_sums(policy - engine)[has]
    log_policy, log_engine = (-layout.row_means(logprobs)[has].mean() for logprobs in (policy, engine))
    numbers = torch.stack(
        [
            -off.mean(),
            k3(torch.zeros_like(off), off.clamp(max=_MAX_EXPONENT)).mean(),
            torch.expm1(_log_mean(2 * off).clamp(max=_MAX_EXPONENT)),
            torch.expm1(_log_mean(2 * sums).clamp(max=_MAX_EXPONENT)),
            (2 * _log_mean(off) - _log_mean(2 * off)).clamp(max=0).exp(),
            (2 * _log_mean(sums) - _log_mean(2 * sums)).clamp(max=0).exp(),
            off.abs().mean(),
            off.abs().amax(),
            off.std(correction=0),
            log_policy.clamp(max=_MAX_EXPONENT).exp(),
            log_engine.clamp(max=_MAX_EXPONENT).exp(),
            (log_policy - log_engine).clamp(max=_MAX_EXPONENT).exp(),
        ]
    )
    return dict(zip(_EQUAL_POLICIES, numbers.tolist(), strict=True))  # one copy from the device, not twelve


def _log_mean(exponents: torch.Tensor) -> torch.Tensor:
    """Compute log(mean(exp(exponents)))."""
    return torch.logsumexp(exponents, 0) - log(len(exponents))


def _weight_metrics(
    raw: torch.Tensor, weights: torch.Tensor, truncate: float | None, low: float | None
) -> dict[str, float]:
    """Compute metrics of the weights of the tokens (or rows) that are left, before normalization."""
    names = ("weight_mean", "weight_min", "weight_max", "weight_ess", "capped", "raised")
    if not weights.numel():
        return dict.fromkeys(names, 0.0)
    capped = raw > (float("inf") if truncate is None else truncate)
    raised = raw < (0.0 if low is None else low)
    squares = (len(weights) * (weights**2).sum()).clamp(min=1e-300)
    numbers = [weights.mean(), weights.amin(), weights.amax(), weights.sum() ** 2 / squares]
    numbers += [capped.to(torch.float64).mean(), raised.to(torch.float64).mean()]
    return dict(zip(names, torch.stack(numbers).tolist(), strict=True))


def _build_report(layout: Layout, left: Layout, removed: dict[str, torch.Tensor], metrics: dict[str, float]) -> Report:
    """Report the rows with masked tokens, by reason, and those without any token left."""
    lost = {reason: layout.row_sums(hit.to(torch.float64)) > 0 for reason, hit in removed.items()}
    lost["nothing left"] = (layout.counts > 0) & (left.counts == 0)
    return Report(layout.rows, {reason: rows_where(hit) for reason, hit in lost.items()}, metrics)


def _is_scalar(versions: PerToken | PerRow | int) -> bool:
    """Return whether there is one number for all rows."""
    return isinstance(versions, Real) or getattr(versions, "ndim", None) == 0


def _is_flat(versions: PerToken | PerRow | int) -> bool:
    """Return whether versions are one-dimensional: of rows, or of packed tokens."""
    if isinstance(versions, (torch.Tensor, np.ndarray)):
        return versions.ndim == 1
    return (
        isinstance(versions, Sequence)
        and not isinstance(versions, Rows)
        and not any(hasattr(version, "__len__") for version in versions)
    )


def _staleness(layout: Layout, versions: PerToken | PerRow | int, current: int) -> torch.Tensor:
    """Compute the age of each token in versions; 0 where the mask is False. Shape: `layout.shape` float64."""
    if isinstance(current, bool) or not isinstance(current, Integral):
        raise ValueError(f"current: got {current!r}, expected the number of a version")
    if _is_scalar(versions):
        tensor = as_tensor("versions", versions).to(layout.mask.device).expand(layout.shape)
    elif is_per_row(layout, "versions", versions):
        tensor = as_tensor("versions", versions, layout.mask.device)
        if tuple(tensor.shape) != (layout.rows,):
            raise ValueError(f"versions: got {len(tensor)}, expected {layout.rows}, one for each row, or tokens")
        tensor = layout.spread(tensor)
    else:
        tensor = layout.tensor("versions", versions)
    if (tensor.is_floating_point() or tensor.dtype == torch.bool) and tensor.numel():
        raise ValueError(f"versions: got {str(tensor.dtype).removeprefix('torch.')}, expected integers")
    age = layout.masked(int(current) - tensor.to(torch.float64))
    if age.numel() and float(age.amin()) < 0:
        ahead = current - int(age.amin())
        raise ValueError(f"versions: got {ahead}, expected at most current, {current}")
    return age


def _check_bounds(
    truncate: float | None, low: float | None, mask_outside: tuple[float, float] | None, veto: float | None
) -> None:
    if truncate is not None:
        check_float("truncate", truncate, 1e-30, expected="a positive number or None")
    if low is not None:
        check_float("low", low, 0, float("inf") if truncate is None else truncate)
    if veto is not None:
        check_float("veto", veto, 1e-300, 1, expected="a ratio in (0, 1] or None")
    if mask_outside is not None:
        if not isinstance(mask_outside, (tuple, list)) or len(mask_outside) != 2:
            raise ValueError(f"mask_outside: got {mask_outside!r}, expected a pair (low, high), or None")
        least = check_float("mask_outside: low", mask_outside[0], 0)
        check_float(
            "mask_outside: high", mask_outside[1], least, expected=f"a number of at least {least:g}, the low end"
        )
