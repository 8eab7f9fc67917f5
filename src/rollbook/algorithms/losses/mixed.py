"""Learning from own rollouts and from an expert's at once: two losses over two kinds of rows, weighed by mu.

Invariant: a row is either usual or the expert's, and each part has denominators of its own, so that micro-batches with
any mixture of the two add up to the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rollbook.algorithms.aggregate import Policy, Terms, layout_of, row_share
from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_tensor, row_flags
from rollbook.algorithms.losses.policy import ppo_terms
from rollbook.algorithms.losses.supervised import phi_terms
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_float
from rollbook.core.rows import Rows

Parts = tuple[Denominators, Denominators]
"""The denominators of the whole batch's usual rows, and of its expert rows."""


def mix_denominators(mask: PerToken, expert_mask: PerRow) -> Parts:
    """What a mixed batch is divided by: of its usual rows, and of its expert rows.

    mask: (B, A) or packed; expert_mask: (B,). Give the result as `whole` to the micro-batches of this batch.

    >>> usual, expert = mix_denominators([[1, 1], [1, 0], [0, 0]], [False, True, False])
    >>> usual
    Denominators(tokens=2, sequences=1, samples=2)
    """
    layout = Layout.of(mask)
    flags = row_flags(layout, "expert_mask", expert_mask)

    def of(rows: torch.Tensor) -> Denominators:
        counts = layout.counts[rows]
        return Denominators(int(counts.sum()), int((counts > 0).sum()), int(rows.sum()))

    return of(~flags), of(flags)


def _denominators(train_rows: Any, rows: Sequence[int]) -> Parts:
    """Compute `mix_denominators` of a minibatch."""
    return mix_denominators(Rows([train_rows.masks[i] for i in rows]), [train_rows.expert[i] for i in rows])


def chord_mu(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """The weight of the expert at a step: linear from 0 to `peak`, then half a cosine down to `valley`, then constant.

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
    whole: Parts | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """(1 - mu) * PPO over usual rows + mu * maximum likelihood over expert rows.

    expert_mask: (B,) bool. Of expert rows neither old log-probs nor advantages are read. `whole` is a pair, of usual
    rows and of expert rows (`mix_denominators`): with it micro-batches add up exactly. Trinity instead multiplies each
    part's own mean by rows over a configured size; `usual_scale` and `expert_scale` are such factors, on value and
    metrics of a part.

    Metrics: those of `ppo` under `usual/`, `expert/sft_loss`, `loss`. A part without rows reports 0.

    >>> mix([[-1.0], [-2.0]], [[-1.0], [0.0]], [1.0, 0.0], [False, True], mu=0.25).value
    tensor(-0.2500)
    """
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    scales = (usual_scale, expert_scale)
    data = (new_logprobs, old_logprobs, advantages, expert_mask, mask)
    return _mixed(data, mu, options, "sft_loss", scales, mode, norm, whole, weights)


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
    whole: Parts | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """`mix` with mu by `chord_mu` at `step`, and for the expert `sft_phi` (`phi=False`: maximum likelihood).

    step: one whole number, or (B,) all alike, as batches carry it (none for a micro-batch without rows). Metrics: those
    of `mix`, with `expert/sft_phi_loss`; and `mu`.

    >>> loss, metrics = mix_chord([[-1.0]], [[0.0]], [0.0], [True], step=5, warmup=10, peak=0.9)
    >>> round(metrics["mu"].item(), 4)
    0.45
    """
    layout = layout_of(new_logprobs, old_logprobs, advantages, mask)
    mu = chord_mu(_step(step, layout.rows), warmup, decay, peak, valley)
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    data, scales = (new_logprobs, old_logprobs, advantages, expert_mask, mask), (usual_scale, expert_scale)
    name = "sft_phi_loss" if check_bool("phi", phi) else "sft_loss"
    loss = _mixed(data, mu, options, name, scales, mode, norm, whole, weights, cutoff)
    parts = None if whole is None else Denominators(0, whole[0].sequences + whole[1].sequences, 0)
    share = row_share(layout, torch.full((layout.rows,), mu, device=layout.mask.device), parts)
    return Loss(loss.value, {**loss.metrics, "mu": share})


def _mixed(
    data: tuple[Any, Any, Any, Any, Any],
    mu: float,
    options: dict[str, Any],
    expert: str,
    scales: tuple[float, float],
    mode: str,
    norm: float | None,
    whole: Parts | None,
    weights: PerToken | PerRow | None,
    cutoff: float = 1.0,
) -> Loss:
    check_float("mu", mu, 0, 1)
    scale_u, scale_e = (check_float(f"{name}_scale", s, 0) for name, s in zip(("usual", "expert"), scales, strict=True))
    of_usual, of_expert = _parts(whole)
    new_logprobs, old_logprobs, advantages, expert_mask, mask = data
    layout = layout_of(new_logprobs, old_logprobs, advantages, mask)
    flags = row_flags(layout, "expert_mask", expert_mask)
    batch = Policy.of(new_logprobs, old_logprobs, advantages, mask, rows=~flags)
    usual = ppo_terms(batch, **options).loss("pg_loss", batch.layout, mode, norm, of_usual, weights)
    layout = layout.narrowed(layout.spread(flags))
    ours = layout.take("new_logprobs", new_logprobs)
    terms = phi_terms(ours, cutoff) if expert == "sft_phi_loss" else Terms(-ours)
    given = terms.loss(expert, layout, mode, norm, of_expert, weights)
    value = (1 - mu) * scale_u * usual.value + mu * scale_e * given.value
    metrics = {f"usual/{name}": scale_u * found for name, found in usual.metrics.items()}
    metrics |= {f"expert/{name}": scale_e * found for name, found in given.metrics.items()}
    return Loss(value, {**metrics, "loss": value.detach()})


def _parts(whole: Any) -> tuple[Denominators | None, Denominators | None]:
    if whole is None:
        return None, None
    if not isinstance(whole, Sequence) or len(whole) != 2 or not all(isinstance(w, Denominators) for w in whole):
        raise ValueError(
            f"whole: got {type(whole).__name__}, expected a pair of Denominators, of usual rows and of expert rows, as "
            "mix_denominators makes it"
        )
    return whole[0], whole[1]


def _step(step: Any, rows: int) -> int:
    found = as_tensor("step", step).flatten()
    if not len(found) and not rows:
        return 0  # mu weighs nothing
    if not len(found) or bool((found != found[0]).any()):
        raise ValueError(f"step: got {sorted(set(found.tolist()))}, expected one step, the same in every row")
    one = found[0].item()
    if found.dtype == torch.bool or not float(one).is_integer():
        raise ValueError(f"step: got {one}, expected a whole number")
    return int(one)
