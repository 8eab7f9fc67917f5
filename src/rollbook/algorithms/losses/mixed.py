"""Losses over rollouts and expert records in one batch: a policy loss and a supervised loss, weighted by mu.

Invariant: a row is either a rollout ("usual") or an expert's, and each part has its own denominators, so that
micro-batches with any mixture of the two add up to the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rollbook.algorithms.aggregate import LossTerms, PolicyTensors, mean_over_rows, policy_layout
from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_tensor, row_flags
from rollbook.algorithms.losses.policy import ppo_terms
from rollbook.algorithms.losses.supervised import phi_terms
from rollbook.algorithms.registry import LOSSES, LossRows
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_float
from rollbook.core.rows import Rows

__all__ = ["chord_mu", "mix", "mix_chord", "mix_denominators"]

Parts = tuple[Denominators, Denominators]
"""The denominators of the whole batch's usual rows, and of its expert rows."""


def mix_denominators(mask: PerToken, expert_mask: PerRow) -> Parts:
    """Count the denominators of the usual rows and of the expert rows of a batch.

    Pass the result as `denominators` to the micro-batches of the batch.

    Args:
        mask: [B, R] or packed: which tokens count. `None`: all.
        expert_mask: [B] Whether a row is of the expert.

    Returns:
        Denominators of the usual rows, and of the expert rows.

    Raises:
        ValueError: If the number of rows differs.

    >>> usual, expert = mix_denominators([[1, 1], [1, 0], [0, 0]], [False, True, False])
    >>> usual
    Denominators(tokens=2, sequences=1, samples=2)
    """
    layout = Layout.from_tokens(mask)
    flags = row_flags(layout, "expert_mask", expert_mask)

    def count(rows: torch.Tensor) -> Denominators:
        counts = layout.counts[rows]
        return Denominators(int(counts.sum()), int((counts > 0).sum()), int(rows.sum()))

    return count(~flags), count(flags)


def _denominators(step_rows: LossRows, rows: Sequence[int]) -> Parts:
    """Compute `mix_denominators` of a minibatch."""
    expert = step_rows.expert or ()
    return mix_denominators(Rows([step_rows.masks[i] for i in rows]), [expert[i] for i in rows])


def chord_mu(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Compute the weight of the expert at a step: linear from 0 to `peak`, a half cosine to `valley`, then constant.

    Args:
        step: Training step.
        warmup: Steps of the linear rise.
        decay: Steps of the cosine decay.
        peak: Weight after the warmup.
        valley: Final weight.

    Returns:
        The weight, 0 to 1.

    Raises:
        ValueError: If an argument is out of range.

    >>> [round(chord_mu(step, 10, 20, 0.9, 0.05), 4) for step in (0, 5, 10, 20, 30, 100)]
    [0.0, 0.45, 0.9, 0.475, 0.05, 0.05]
    """
    check_float("step", step, 0)
    check_float("warmup", warmup, 0)
    check_float("decay", decay, 0)
    check_float("peak", peak, 0, 1)
    check_float("valley", valley, 0, 1)
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return float(valley)
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2


@LOSSES.register(
    "mix",
    source="(1 - mu) * PPO over own rows + mu * maximum likelihood over expert rows, as Trinity-RFT has it",
    data="mixed",
    denominators=_denominators,
)
def mix(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    expert_mask: PerRow,
    mask: PerToken | None = None,
    *,
    mu: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    usual_scale: float = 1.0,
    expert_scale: float = 1.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Parts | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute (1 - mu) * PPO over usual rows + mu * maximum likelihood over expert rows.

    With `denominators`, micro-batches add up exactly. Trinity instead multiplies the mean of each part by its rows over
    a configured size; `usual_scale` and `expert_scale` are such factors. A part without rows reports 0.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        expert_mask: [B] Whether a row is of the expert; neither old log-probs nor advantages of such rows are read.
        mask: [B, R] or packed: which tokens count. `None`: all.
        mu: Weight of the expert part, 0 to 1.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        dual_clip: Bound of the loss where A < 0: -A * `dual_clip`. `None`: no bound.
        usual_scale: Factor of value and metrics of the usual part.
        expert_scale: Factor of value and metrics of the expert part.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: A pair, of usual rows and of expert rows, as `mix_denominators` returns it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: those of `ppo` under `usual/`, `expert/sft_loss`, `loss`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> mix([[-1.0], [-2.0]], [[-1.0], [0.0]], [1.0, 0.0], [False, True], mu=0.25).value
    tensor(-0.2500)
    """
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    scales = (usual_scale, expert_scale)
    data = (new_logprobs, old_logprobs, advantages, expert_mask, mask)
    return _mixed(data, mu, options, "sft_loss", scales, mode, norm, denominators, weights)


@LOSSES.register(
    "mix_chord",
    "chord",
    source="CHORD (Zhang et al., 2025, arXiv 2508.11408): mu by a schedule, the expert by phi",
    data="mixed",
    denominators=_denominators,
)
def mix_chord(
    new_logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken | PerRow,
    expert_mask: PerRow,
    step: int | PerRow,
    mask: PerToken | None = None,
    *,
    warmup: int = 0,
    decay: int = 0,
    peak: float = 0.1,
    valley: float = 0.1,
    phi: bool = True,
    cutoff: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    usual_scale: float = 1.0,
    expert_scale: float = 1.0,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Parts | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute `mix` with mu from the schedule `chord_mu`, and `sft_phi` for the expert (CHORD).

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        advantages: [B, R] or packed, or [B] for one per row; taken as constants.
        expert_mask: [B] Whether a row is of the expert; neither old log-probs nor advantages of such rows are read.
        step: Training step: an integer, or [B] with the same in every row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        warmup: Steps of the linear rise.
        decay: Steps of the cosine decay.
        peak: Weight after the warmup.
        valley: Final weight.
        phi: Whether the expert part is `sft_phi`; else maximum likelihood.
        cutoff: See `sft_phi`.
        clip_low: Lower clip range of the ratio: 1 - `clip_low`.
        clip_high: Upper clip range of the ratio: 1 + `clip_high`.
        dual_clip: Bound of the loss where A < 0: -A * `dual_clip`. `None`: no bound.
        usual_scale: Factor of value and metrics of the usual part.
        expert_scale: Factor of value and metrics of the expert part.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: A pair, of usual rows and of expert rows, as `mix_denominators` returns it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: those of `mix`, with `expert/sft_phi_loss`; and `mu`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> loss, metrics = mix_chord([[-1.0]], [[0.0]], [0.0], [True], step=5, warmup=10, peak=0.9)
    >>> round(metrics["mu"].item(), 4)
    0.45
    """
    layout = policy_layout(new_logprobs, old_logprobs, advantages, mask)
    mu = chord_mu(_step(step, layout.rows), warmup, decay, peak, valley)
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    data, scales = (new_logprobs, old_logprobs, advantages, expert_mask, mask), (usual_scale, expert_scale)
    name = "sft_phi_loss" if check_bool("phi", phi) else "sft_loss"
    loss = _mixed(data, mu, options, name, scales, mode, norm, denominators, weights, cutoff)
    parts = None if denominators is None else Denominators(0, denominators[0].sequences + denominators[1].sequences, 0)
    share = mean_over_rows(layout, torch.full((layout.rows,), mu, device=layout.mask.device), parts)
    return Loss(loss.value, {**loss.metrics, "mu": share})


def _mixed(
    data: tuple[Any, Any, Any, Any, Any],
    mu: float,
    options: dict[str, Any],
    expert: str,
    scales: tuple[float, float],
    mode: str,
    norm: float | None,
    denominators: Parts | None,
    weights: PerToken | PerRow | None,
    cutoff: float = 1.0,
) -> Loss:
    check_float("mu", mu, 0, 1)
    usual_scale, expert_scale = check_float("usual_scale", scales[0], 0), check_float("expert_scale", scales[1], 0)
    of_usual, of_expert = _parts(denominators)
    new_logprobs, old_logprobs, advantages, expert_mask, mask = data
    layout = policy_layout(new_logprobs, old_logprobs, advantages, mask)
    flags = row_flags(layout, "expert_mask", expert_mask)
    batch = PolicyTensors.from_arguments(new_logprobs, old_logprobs, advantages, mask, rows=~flags)
    usual = ppo_terms(batch, **options).loss("pg_loss", batch.layout, mode, norm, of_usual, weights)
    layout = layout.narrowed(layout.spread(flags))
    expert_logprobs = layout.take("new_logprobs", new_logprobs)
    terms = phi_terms(expert_logprobs, cutoff) if expert == "sft_phi_loss" else LossTerms(-expert_logprobs)
    expert_loss = terms.loss(expert, layout, mode, norm, of_expert, weights)
    value = (1 - mu) * usual_scale * usual.value + mu * expert_scale * expert_loss.value
    metrics = {f"usual/{name}": usual_scale * metric for name, metric in usual.metrics.items()}
    metrics |= {f"expert/{name}": expert_scale * metric for name, metric in expert_loss.metrics.items()}
    return Loss(value, {**metrics, "loss": value.detach()})


def _parts(denominators: Parts | None) -> tuple[Denominators | None, Denominators | None]:
    if denominators is None:
        return None, None
    if (
        not isinstance(denominators, Sequence)
        or len(denominators) != 2
        or not all(isinstance(w, Denominators) for w in denominators)
    ):
        raise ValueError(
            f"denominators: got {type(denominators).__name__}, expected a pair of Denominators, of usual rows and of "
            "expert rows, as mix_denominators returns it"
        )
    return denominators[0], denominators[1]


def _step(step: int | PerRow, rows: int) -> int:
    steps = as_tensor("step", step).flatten()
    if not len(steps) and not rows:
        return 0  # without rows, mu has no effect
    if not len(steps) or bool((steps != steps[0]).any()):
        raise ValueError(f"step: got {sorted(set(steps.tolist()))}, expected one step, the same in every row")
    first = steps[0].item()
    if steps.dtype == torch.bool or not float(first).is_integer():
        raise ValueError(f"step: got {first}, expected an integer")
    return int(first)
