"""Supervised and preference losses: likelihood (`sft`, `sft_is`, `sft_phi`) and DPO (`dpo`, `dpo_sums`).

Invariant: weights computed from probabilities are constants, so that the gradient is the weight times that of -log p.
A pair has one logit, whatever the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch.nn.functional import logsigmoid

from rollbook.algorithms.aggregate import LossTerms
from rollbook.algorithms.groups import as_ids, number_ids
from rollbook.algorithms.layout import Ids, Layout, PerRow, PerToken, row_flags, same_shape
from rollbook.algorithms.registry import LOSSES, LossRows
from rollbook.algorithms.results import Loss
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_bool, check_choice, check_float

__all__ = ["dpo", "dpo_sums", "interleaved", "sft", "sft_is", "sft_phi"]

VARIANTS = ("sigmoid", "ipo", "hinge")


@LOSSES.register("sft", "nll", source="maximum likelihood: -log p", data="answers")
def sft(
    new_logprobs: PerToken,
    mask: PerToken | None = None,
    *,
    mode: str = "token-mean",
    norm: float | None = None,
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute the negative log-likelihood, -log p.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        mask: [B, R] or packed: which tokens count. `None`: all.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `sft_loss`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> sft([[-1.0, -2.0]]).value
    tensor(1.5000)
    """
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs)
    terms = LossTerms(-layout.take("new_logprobs", new_logprobs))
    return terms.loss("sft_loss", layout, mode, norm, denominators, weights)


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
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -p log p with the constant p, so that unlikely tokens have little weight (DFT).

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        mask: [B, R] or packed: which tokens count. `None`: all.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `sft_is_loss`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> sft_is([[-1.0, -2.0]]).value
    tensor(0.3193)
    """
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs)
    policy = layout.take("new_logprobs", new_logprobs)
    return LossTerms(-policy.detach().exp() * policy).loss("sft_is_loss", layout, mode, norm, denominators, weights)


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
    denominators: Denominators | None = None,
    weights: PerToken | PerRow | None = None,
) -> Loss:
    """Compute -p (1 - p) min(log p, log cutoff) with a constant weight p (1 - p) (CHORD).

    Neither certain nor very unlikely tokens have much weight.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        mask: [B, R] or packed: which tokens count. `None`: all.
        cutoff: Probability above which tokens have no gradient.
        mode: Aggregation; see `aggregate`.
        norm: Constant of the mode `seq-mean-token-sum-norm`.
        denominators: Denominators of the global batch, if this is a micro-batch of it.
        weights: [B, R] or packed, or [B]: factors of the token losses, which leave the denominators as they are.

    Returns:
        The loss and its metrics: `sft_phi_loss`.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> sft_phi([[-1.0, -2.0]]).value
    tensor(0.2333)
    """
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs)
    terms = phi_terms(layout.take("new_logprobs", new_logprobs), cutoff)
    return terms.loss("sft_phi_loss", layout, mode, norm, denominators, weights)


def phi_terms(logprobs: torch.Tensor, cutoff: float = 1.0) -> LossTerms:
    """Compute the `sft_phi` loss of each token."""
    check_float("cutoff", cutoff, 1e-30, 1, expected="a probability in (0, 1]")
    constant = logprobs.detach()
    weight = constant.exp() * -torch.expm1(constant)  # 1 - p, without cancellation where p is nearly 1
    return LossTerms(-weight * logprobs.clamp(max=math.log(cutoff)))


def interleaved(rows: int) -> tuple[list[int], list[bool]]:
    """Return pair ids and roles of a batch laid out chosen, rejected, chosen, rejected, as Trinity does.

    Args:
        rows: Number of rows.

    Returns:
        [rows] pair ids, and [rows] whether a row is the chosen one.

    Raises:
        ValueError: If the number of rows is odd.

    >>> interleaved(4)
    ([0, 0, 1, 1], [True, False, True, False])
    """
    if rows % 2:
        raise ValueError(f"rows: got {rows}, expected an even number, two for each pair")
    return [row // 2 for row in range(rows)], [row % 2 == 0 for row in range(rows)]


def _count_pairs(step_rows: LossRows, rows: Sequence[int]) -> int:
    """Count the pairs of a minibatch."""
    pairs = step_rows.pairs or ()
    return len({pairs[i] for i in rows})


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
    denominators: Denominators | int | None = None,
) -> Loss:
    """Compute the DPO loss: the mean over pairs of -log sigmoid(beta z).

    z = (log p - log ref of the chosen row) - (log p - log ref of the rejected row), summed over tokens. Rows may be in
    any order; a pair needs one chosen and one rejected row, both in the same micro-batch. A pair with an empty row is
    left out. The variant `ipo` is (z - 1 / (2 beta))^2 with z of sums, as in the paper (TRL takes means over tokens);
    `hinge` is max(0, 1 - beta z).

    Trinity adds up all pairs of a call into one logit, so that its loss is correct only for a single pair.

    Args:
        new_logprobs: [B, R] or packed: log-probs of the policy being trained, with gradient.
        pairs: [B] Id of the pair of each row.
        chosen: [B] Whether a row is the preferred one of its pair.
        ref_logprobs: [B, R] or packed: log-probs of the reference, taken as constants.
        mask: [B, R] or packed: which tokens count. `None`: all.
        beta: Inverse temperature of the implicit reward.
        label_smoothing: Probability that a label is wrong (`sigmoid` only).
        variant: `"sigmoid"`, `"ipo"` or `"hinge"`.
        reference_free: Whether to compute without a reference, as if it liked both answers equally.
        denominators: In micro-batches, the number of pairs of the batch, or its denominators, whose sequences are twice
            that if no row is empty.

    Returns:
        The loss and its metrics: `dpo_loss`, `accuracy_mean` (z > 0), `chosen_reward` and `rejected_reward` (beta times
        the log-ratio), `reward_margin`; means over pairs.

    Raises:
        ValueError: If a pair is incomplete, the reference is missing, or an option is invalid.

    >>> pairs, chosen = ["a", "b", "b", "a"], [True, True, False, False]
    >>> loss, metrics = dpo([[40.0], [0.0], [20.0], [0.0]], pairs, chosen, reference_free=True)
    >>> loss, metrics["accuracy_mean"]
    (tensor(1.0725), tensor(0.5000))
    """
    layout = Layout.from_tokens(mask, new_logprobs=new_logprobs, ref_logprobs=ref_logprobs)
    roles = row_flags(layout, "chosen", chosen)
    if check_bool("reference_free", reference_free) == (ref_logprobs is not None):
        raise ValueError(_reference("ref_logprobs", reference_free))
    policy = layout.take("new_logprobs", new_logprobs)
    tokens = policy.to(torch.float64)
    if ref_logprobs is not None:
        # Token by token: the sums of a long row are large and nearly equal, and their difference has few digits left.
        tokens = tokens - layout.take("ref_logprobs", ref_logprobs).detach()
    logits = layout.row_sums(tokens)
    winners, losers = _pairs(pairs, roles.tolist(), (layout.counts > 0).tolist(), layout.rows)
    return _loss(logits[winners], logits[losers], policy.dtype, beta, label_smoothing, variant, denominators)


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
    denominators: Denominators | int | None = None,
) -> Loss:
    """Compute the DPO loss of log-probs that are summed already.

    Args:
        chosen_logprobs: [P] Summed log-prob of each chosen answer.
        rejected_logprobs: [P] Of each rejected answer.
        ref_chosen_logprobs: [P] Of each chosen answer under the reference.
        ref_rejected_logprobs: [P] Of each rejected answer under the reference.
        beta: Inverse temperature of the implicit reward.
        label_smoothing: Probability that a label is wrong (`sigmoid` only).
        variant: `"sigmoid"`, `"ipo"` or `"hinge"`.
        reference_free: Whether to compute without a reference, as if it liked both answers equally.
        denominators: In micro-batches, the number of pairs of the batch, or its denominators, whose sequences are twice
            that if no row is empty.

    Returns:
        The loss and the metrics of `dpo`.

    Raises:
        ValueError: If shapes differ, the reference is missing, or an option is invalid.

    >>> dpo_sums([40.0, 0.0], [0.0, 20.0], [0.0, 0.0], [0.0, 0.0]).value
    tensor(1.0725)
    """
    sums = {"chosen_logprobs": chosen_logprobs, "rejected_logprobs": rejected_logprobs}
    refs = {"ref_chosen_logprobs": ref_chosen_logprobs, "ref_rejected_logprobs": ref_rejected_logprobs}
    for name, value in refs.items():
        if check_bool("reference_free", reference_free) == (value is not None):
            raise ValueError(_reference(name, reference_free))
    chosen, rejected, *others = same_shape(**sums, **({} if reference_free else refs))  # type: ignore[arg-type]
    if chosen.dim() != 1:
        raise ValueError(f"chosen_logprobs: got shape {list(chosen.shape)}, expected one number for each pair")
    better, worse = chosen.to(torch.float64), rejected.to(torch.float64)
    if others:
        better, worse = better - others[0].detach(), worse - others[1].detach()
    dtype = torch.promote_types(chosen.dtype, rejected.dtype)
    return _loss(better, worse, dtype, beta, label_smoothing, variant, denominators)


def _reference(name: str, free: bool) -> str:
    """Return the error message for a missing or an unexpected reference."""
    if free:
        return f"{name}: got a reference, expected None, since reference_free is True"
    return f"{name}: got None, expected the reference's log-probs, or reference_free=True"


def _pairs(pairs: Ids, roles: list[bool], filled: list[bool], rows: int) -> tuple[list[int], list[int]]:
    """Return the rows of chosen and of rejected answers, by pair in order of first appearance."""
    numbers, names = number_ids("pairs", as_ids("pairs", pairs, rows))
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
    complete = [pair for pair in by_number if filled[pair[True]] and filled[pair[False]]]
    return [pair[True] for pair in complete], [pair[False] for pair in complete]


def _loss(
    better: torch.Tensor,
    worse: torch.Tensor,
    dtype: torch.dtype,
    beta: float,
    label_smoothing: float,
    variant: str,
    denominators: Denominators | int | None,
) -> Loss:
    """Compute the mean loss over pairs; `better` and `worse` [P] are in float64, the result is of type `dtype`."""
    check_float("beta", beta, 1e-30, expected="a positive number")
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
    count: float = len(losses)
    if denominators is not None:
        count = denominators.sequences / 2 if isinstance(denominators, Denominators) else denominators
    count = max(check_float("denominators", count, 0, expected="the number of pairs of the whole batch"), 0.5)
    value = (losses.sum() / count).to(dtype)
    columns = {
        "accuracy_mean": (logits > 0).to(dtype),
        "chosen_reward": beta * better,
        "rejected_reward": beta * worse,
        "reward_margin": beta * logits,
    }
    metrics = {name: (column.detach().sum() / count).to(dtype) for name, column in columns.items()}
    return Loss(value, {**metrics, "dpo_loss": value.detach()})
