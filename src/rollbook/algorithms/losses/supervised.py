"""Losses on given text: the plain likelihood, and two that weigh each token by how likely it is already.

Invariant: weights made of probabilities are constants; the gradient is that weight times the gradient of -log p.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from rollbook.algorithms.aggregate import Terms
from rollbook.algorithms.groups import as_ids, numbered
from rollbook.algorithms.layout import Layout, PerRow, PerToken, alike, row_flags
from rollbook.algorithms.registry import LOSSES
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_choice, check_float


@LOSSES.register("sft", "nll", source="maximum likelihood: -log p", data="answers")
def sft(
    new_logprobs: PerToken,
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
    layout = Layout.of(mask, new_logprobs=new_logprobs)
    terms = Terms(-layout.take("new_logprobs", new_logprobs))
    return terms.loss("sft_loss", layout, mode, norm, whole, weights)


@LOSSES.register(
    "sft_is",
    "dft",
    source="Dynamic Fine-Tuning (Wu et al., 2025, arXiv 2508.05629): -p * log p, p a constant",
    data="answers",
)
def sft_is(
    new_logprobs: PerToken,
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
    layout = Layout.of(mask, new_logprobs=new_logprobs)
    ours = layout.take("new_logprobs", new_logprobs)
    return Terms(-ours.detach().exp() * ours).loss("sft_is_loss", layout, mode, norm, whole, weights)


@LOSSES.register(
    "sft_phi",
    source="CHORD (Zhang et al., 2025, arXiv 2508.11408): -p * (1 - p) * log p, the weight a constant",
    data="answers",
)
def sft_phi(
    new_logprobs: PerToken,
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
    layout = Layout.of(mask, new_logprobs=new_logprobs)
    terms = phi_terms(layout.take("new_logprobs", new_logprobs), cutoff)
    return terms.loss("sft_phi_loss", layout, mode, norm, whole, weights)


def phi_terms(ours: torch.Tensor, cutoff: float = 1.0) -> Terms:
    """The loss of each token of `sft_phi`."""
    check_float("cutoff", cutoff, 1e-30, 1, what="a probability above 0, up to 1")
    new_logprobs = ours.detach()
    weight = new_logprobs.exp() * -torch.expm1(new_logprobs)  # 1 - p, without cancellation where p is nearly 1
    return Terms(-weight * ours.clamp(max=math.log(cutoff)))


VARIANTS = ("sigmoid", "ipo", "hinge")


def interleaved(rows: int) -> tuple[list[int], list[bool]]:
    """Ids and roles for a batch that is known to be laid out chosen, rejected, chosen, rejected (Trinity's way).

    >>> interleaved(4)
    ([0, 0, 1, 1], [True, False, True, False])
    """
    if rows % 2:
        raise ValueError(f"rows: got {rows}, expected an even number, two for each pair")
    return [row // 2 for row in range(rows)], [row % 2 == 0 for row in range(rows)]


def _count_pairs(train_rows: Any, rows: Sequence[int]) -> int:
    """Count the pairs of a minibatch."""
    return len({train_rows.pairs[i] for i in rows})


@LOSSES.register(
    "dpo",
    source="DPO (Rafailov et al., 2023, arXiv 2305.18290), equation 7; one logit for each pair",
    data="pairs",
    denominators=_count_pairs,
    needs_reference=lambda options: not options.get("reference_free", False),
)
def dpo(
    new_logprobs: PerToken,
    pairs: Sequence[Hashable] | torch.Tensor,
    chosen: PerRow,
    ref_logprobs: PerToken | None = None,
    mask: PerToken | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: str = "sigmoid",
    reference_free: bool = False,
    whole: Denominators | int | None = None,
) -> Loss:
    """The mean over pairs of -log sigmoid(beta z), z = (log p - log ref of the chosen row) - (of the rejected row).

    new_logprobs, ref_logprobs, mask: (B, A) or packed, summed over each row's tokens. pairs: (B,) what the two rows of
    a pair share; chosen: (B,) which of them was preferred. Rows may stand in any order; a pair needs one of each, and
    both in the same micro-batch. A pair of which a row has no tokens is left out, as if that row were not there.

    `variant`: `ipo` is (z - 1 / (2 beta))^2 with z of sums, as in the paper (TRL takes means over tokens); `hinge` is
    max(0, 1 - beta z). `label_smoothing` is the chance that a label is wrong (`sigmoid` only). `reference_free` takes
    a reference that likes both alike, and no other beside it. In micro-batches `whole` is how many pairs the batch
    has, or its denominators, half of whose sequences that is if no row is empty.

    Trinity adds up all pairs of a call into one logit, so that its loss is right for one pair at a time only.

    Metrics: `dpo_loss`, `accuracy_mean` (z > 0), `chosen_reward` and `rejected_reward` (beta times the log-ratio),
    `reward_margin`; means over pairs.

    >>> pairs, chosen = ["a", "b", "b", "a"], [True, True, False, False]
    >>> loss, metrics = dpo([[40.0], [0.0], [20.0], [0.0]], pairs, chosen, reference_free=True)
    >>> loss, metrics["accuracy_mean"]
    (tensor(1.0725), tensor(0.5000))
    """
    layout = Layout.of(mask, new_logprobs=new_logprobs, ref_logprobs=ref_logprobs)
    roles = row_flags(layout, "chosen", chosen)
    if check_bool("reference_free", reference_free) == (ref_logprobs is not None):
        raise ValueError(_reference("ref_logprobs", reference_free))
    ours = layout.take("new_logprobs", new_logprobs)
    tokens = ours.to(torch.float64)
    if ref_logprobs is not None:
        # Token by token: the sums of a long row are large and nearly equal, and their difference has few digits left.
        tokens = tokens - layout.take("ref_logprobs", ref_logprobs).detach()
    logits = layout.row_sums(tokens)
    winners, losers = _pairs(pairs, roles.tolist(), (layout.counts > 0).tolist(), layout.rows)
    return _loss(logits[winners], logits[losers], ours.dtype, beta, label_smoothing, variant, whole)


@LOSSES.register("dpo_sums", source="DPO (Rafailov et al., 2023, arXiv 2305.18290), equation 7, of sums", data="pairs")
def dpo_sums(
    chosen_logprobs: PerRow,
    rejected_logprobs: PerRow,
    ref_chosen_logprobs: PerRow | None = None,
    ref_rejected_logprobs: PerRow | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: str = "sigmoid",
    reference_free: bool = False,
    whole: Denominators | int | None = None,
) -> Loss:
    """`dpo` of log-probs that are summed already: entry i of each argument, (P,), belongs to pair i.

    >>> dpo_sums([40.0, 0.0], [0.0, 20.0], [0.0, 0.0], [0.0, 0.0]).value
    tensor(1.0725)
    """
    given = {"chosen_logprobs": chosen_logprobs, "rejected_logprobs": rejected_logprobs}
    refs = {"ref_chosen_logprobs": ref_chosen_logprobs, "ref_rejected_logprobs": ref_rejected_logprobs}
    for name, value in refs.items():
        if check_bool("reference_free", reference_free) == (value is not None):
            raise ValueError(_reference(name, reference_free))
    ours, theirs, *others = alike(**given, **({} if reference_free else refs))
    if ours.dim() != 1:
        raise ValueError(f"chosen_logprobs: got shape {list(ours.shape)}, expected one number for each pair")
    better, worse = ours.to(torch.float64), theirs.to(torch.float64)
    if others:
        better, worse = better - others[0].detach(), worse - others[1].detach()
    dtype = torch.promote_types(ours.dtype, theirs.dtype)
    return _loss(better, worse, dtype, beta, label_smoothing, variant, whole)


def _reference(name: str, free: bool) -> str:
    """What is wrong with a reference that is there, or is not."""
    if free:
        return f"{name}: got a reference, expected None, since reference_free is True"
    return f"{name}: got None, expected the reference's log-probs, or reference_free=True"


def _pairs(pairs: Any, roles: list[bool], filled: list[bool], rows: int) -> tuple[list[int], list[int]]:
    """The rows of the chosen and of the rejected answers, pair by pair in order of first sight."""
    numbers, names = numbered("pairs", as_ids("pairs", pairs, rows))
    by_number: list[dict[bool, int]] = [{} for _ in names]
    for row, (at, role) in enumerate(zip(numbers.tolist(), roles, strict=True)):
        name, pair = names[at], by_number[at]
        if role in pair:
            both = f"rows {pair[role]} and {row}"
            raise ValueError(f"pairs: {name!r} has {both} as {'chosen' if role else 'rejected'}, expected one of each")
        pair[role] = row
    for name, pair in zip(names, by_number, strict=True):
        if len(pair) != 2:
            has, lacks = ("chosen", "rejected") if True in pair else ("rejected", "chosen")
            raise ValueError(f"pairs: {name!r} has a {has} row and no {lacks} one, expected one of each")
    whole = [pair for pair in by_number if filled[pair[True]] and filled[pair[False]]]
    return [pair[True] for pair in whole], [pair[False] for pair in whole]


def _loss(
    better: torch.Tensor,
    worse: torch.Tensor,
    dtype: torch.dtype,
    beta: float,
    label_smoothing: float,
    variant: str,
    whole: Denominators | int | None,
) -> Loss:
    """The mean over pairs; `better` and `worse`, (P,), in float64, the result of type `dtype`."""
    check_float("beta", beta, 1e-30, what="a positive number")
    check_float("label_smoothing", label_smoothing, 0, 0.5)
    check_choice("variant", variant, VARIANTS)
    if label_smoothing and variant != "sigmoid":
        raise ValueError(f"label_smoothing: got {label_smoothing:g}, expected 0, since variant is {variant!r}")
    logits = better - worse
    if variant == "ipo":
        losses = (logits - 1 / (2 * beta)).square()
    elif variant == "hinge":
        losses = (1 - beta * logits).clamp(min=0)
    else:
        sure, wrong = logsigmoid(beta * logits), logsigmoid(-beta * logits)
        losses = -(1 - label_smoothing) * sure - label_smoothing * wrong
    count = whole.sequences / 2 if isinstance(whole, Denominators) else len(losses) if whole is None else whole
    count = max(check_float("whole", count, 0, what="how many pairs the whole batch has"), 0.5)
    value = (losses.sum() / count).to(dtype)
    found = {
        "accuracy_mean": (logits > 0).to(dtype),
        "chosen_reward": beta * better,
        "rejected_reward": beta * worse,
        "reward_margin": beta * logits,
    }
    metrics = {name: (each.detach().sum() / count).to(dtype) for name, each in found.items()}
    return Loss(value, {**metrics, "dpo_loss": value.detach()})
