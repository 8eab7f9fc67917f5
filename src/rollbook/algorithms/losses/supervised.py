"""Losses on given text: the plain likelihood, and two that weigh each token by how likely it is already.

Invariant: weights made of probabilities are constants; the gradient is that weight times the gradient of -log p.
"""

from __future__ import annotations

import math

import torch

from rollbook.algorithms.aggregate import Terms
from rollbook.algorithms.layout import Layout, PerRow, PerToken
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_float


@LOSSES.register("sft", "nll", source="maximum likelihood: -log p")
def sft(
    log_probs: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-log p. Metric: `sft_loss`.

    >>> sft([[-1.0, -2.0]]).value
    tensor(1.5000)
    """
    layout = Layout.of(mask, log_probs=log_probs)
    terms = Terms(-layout.take("log_probs", log_probs))
    return terms.loss("sft_loss", layout, mode, norm, whole, weights)


@LOSSES.register(
    "sft_is", "dft", source="Dynamic Fine-Tuning (Wu et al., 2025, arXiv 2508.05629): -p * log p, p a constant"
)
def sft_is(
    log_probs: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-p log p with p a constant: tokens that the model finds unlikely hardly pull. Metric: `sft_is_loss`.

    >>> sft_is([[-1.0, -2.0]]).value
    tensor(0.3193)
    """
    layout = Layout.of(mask, log_probs=log_probs)
    ours = layout.take("log_probs", log_probs)
    return Terms(-ours.detach().exp() * ours).loss("sft_is_loss", layout, mode, norm, whole, weights)


@LOSSES.register(
    "sft_phi", source="CHORD (Zhang et al., 2025, arXiv 2508.11408): -p * (1 - p) * log p, the weight a constant"
)
def sft_phi(
    log_probs: PerToken,
    mask: PerToken | None = None,
    *,
    cutoff: float = 1.0,
    mode: str = "token-mean",
    norm: float | None = None,
    whole: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """-p (1 - p) min(log p, log cutoff) with the weight a constant: neither sure nor hopeless tokens pull.

    Tokens likelier than `cutoff` have no gradient. Metric: `sft_phi_loss`.

    >>> sft_phi([[-1.0, -2.0]]).value
    tensor(0.2333)
    """
    layout = Layout.of(mask, log_probs=log_probs)
    terms = phi_terms(layout.take("log_probs", log_probs), cutoff)
    return terms.loss("sft_phi_loss", layout, mode, norm, whole, weights)


def phi_terms(ours: torch.Tensor, cutoff: float = 1.0) -> Terms:
    """The loss of each token of `sft_phi`."""
    check_float("cutoff", cutoff, 1e-30, 1, what="a probability above 0, up to 1")
    log_probs = ours.detach()
    weight = log_probs.exp() * -torch.expm1(log_probs)  # 1 - p, without cancellation where p is nearly 1
    return Terms(-weight * ours.clamp(max=math.log(cutoff)))
