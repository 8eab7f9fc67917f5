"""Per-token estimators: distillation (`on_policy_distill`, `jsd`) and GRPO with token masks (`clip_b`, `clip_v`).

Invariant: a distillation advantage is positive exactly where the teacher's probability of the token is above the
student's. A returned mask is a subset of the argument `mask`.
"""

from __future__ import annotations

import math
import sys

import torch

from rollbook.algorithms.advantages.grouped import grpo
from rollbook.algorithms.groups import moments
from rollbook.algorithms.layout import Ids, Layout, PerRow, PerToken, as_floats
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup

__all__ = ["clip_b", "clip_v", "jsd", "on_policy_distill"]


@ESTIMATORS.register(
    "on_policy_distill", source="reverse KL as a reward for each token (Agarwal et al., 2023, arXiv 2306.13649)"
)
def on_policy_distill(
    old_logprobs: PerToken, teacher_logprobs: PerToken, mask: PerToken | None = None, *, coef: float = 1.0
) -> Advantages:
    """Compute `coef` * (teacher - student) in log-probs for each token (on-policy distillation).

    The expected policy gradient over samples of the policy is the gradient of -coef * KL(student || teacher).

    Args:
        old_logprobs: [B, R] or packed: log-probs of the policy that sampled.
        teacher_logprobs: [B, R] or packed: log-probs of the teacher.
        mask: [B, R] or packed: which tokens count. `None`: all.
        coef: Coefficient.

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> on_policy_distill(torch.tensor([[-0.5, -1.0]]), torch.tensor([[-0.25, -3.0]])).advantages
    tensor([[ 0.2500, -2.0000]])
    """
    layout = Layout.from_tokens(mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    student = layout.take("old_logprobs", old_logprobs).detach()
    teacher = layout.take("teacher_logprobs", teacher_logprobs).detach()
    gap = student - teacher
    return _token_advantages(layout, -check_float("coef", coef) * gap, mask, {"kl": gap})


@ESTIMATORS.register(
    "jsd", source="generalized Jensen-Shannon divergence (arXiv 2306.13649); its slope by the student's p"
)
def jsd(
    old_logprobs: PerToken,
    teacher_logprobs: PerToken,
    mask: PerToken | None = None,
    *,
    beta: float = 0.5,
    coef: float = 1.0,
    normalize: bool = True,
) -> Advantages:
    """Compute the policy gradient of the generalized Jensen-Shannon divergence between teacher and student.

    With q the teacher, p the student and m = beta q + (1 - beta) p, the divergence is D = beta KL(q || m) + (1 - beta)
    KL(p || m), and dD/dp(token) = (1 - beta) log(p / m). The advantage is -coef * dD/dp(token). With `normalize`, it is
    divided by beta (1 - beta), which gives coef * log(1 + beta (q / p - 1)) / beta: on-policy distillation at beta = 1,
    and q / p - 1, the advantage of the forward KL, at beta = 0. It is positive exactly where the teacher is above the
    student. `divergence` in the report is the mean over tokens of f(q / p), an estimate of D that is never negative,
    with f(x) = beta x log x - (beta x + 1 - beta) log(beta x + 1 - beta).

    Trinity's estimator of this name is at most 0 by Jensen's inequality, and rewards mismatches in both directions.

    Args:
        old_logprobs: [B, R] or packed: log-probs of the policy that sampled.
        teacher_logprobs: [B, R] or packed: log-probs of the teacher.
        mask: [B, R] or packed: which tokens count. `None`: all.
        beta: Weight of the teacher in the mixture, 0 to 1.
        coef: Coefficient.
        normalize: Whether to divide by beta (1 - beta).

    Returns:
        Advantages and returns in the layout of the mask, 0 where it is False.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> import math
    >>> teacher, student = torch.tensor([[math.log(0.25), math.log(0.5)]]), torch.tensor([[math.log(0.5)] * 2])
    >>> jsd(student, teacher).advantages  # 2 log(0.75)
    tensor([[-0.5754,  0.0000]])
    >>> jsd(student, teacher, beta=1.0).advantages
    tensor([[-0.6931,  0.0000]])
    """
    check_bool("normalize", normalize)
    check_float("beta", beta, 0, 1)
    check_float("coef", coef)
    layout = Layout.from_tokens(mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    student = layout.take("old_logprobs", old_logprobs).detach().to(torch.float64)
    teacher = layout.take("teacher_logprobs", teacher_logprobs).detach().to(torch.float64)
    gap = teacher - student
    if beta < sys.float_info.min:
        score = torch.expm1(gap)
    elif beta == 1:
        score = gap
    else:
        score = torch.where(gap < 700, torch.log1p(beta * torch.expm1(gap)), gap + math.log(beta)) / beta
    scale = 1.0 if normalize else beta * (1 - beta)
    ratio = torch.exp(gap.clamp(max=700))  # a larger exponent would overflow float64
    mixture = beta * ratio + 1 - beta
    divergence = beta * torch.where(ratio > 0, ratio * gap.clamp(-700, 700), 0.0)
    divergence = divergence - torch.where(mixture > 0, mixture * torch.log(mixture), 0.0)
    inputs = (layout.tensor("old_logprobs", old_logprobs), layout.tensor("teacher_logprobs", teacher_logprobs))
    dtype = torch.promote_types(*(as_floats(tensor).dtype for tensor in inputs))
    return _token_advantages(layout, (coef * scale * score).to(dtype), mask, {"divergence": divergence.clamp(min=0)})


def _token_advantages(
    layout: Layout, advantages: torch.Tensor, mask: PerToken | None, metrics: dict[str, torch.Tensor]
) -> Advantages:
    """Build the result of a distillation estimator; the report has the means over tokens of `metrics`."""
    count = max(int(layout.mask.sum()), 1)
    masked = layout.masked(advantages) + 0.0  # turns -0.0 into 0.0
    means = {name: float(layout.masked(value).sum() / count) for name, value in metrics.items()}
    empty = rows_where(layout.counts == 0)
    report = Report(layout.rows, {"no actions": empty}, {**means, "advantage_mean": float(masked.sum() / count)})
    return Advantages(layout.restore(masked), None, None, mask, report)


@ESTIMATORS.register(
    "clip_b",
    "clipb",
    source="Clip-B (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    compares_runs=True,
)
def clip_b(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken,
    old_logprobs: PerToken,
    entropy: PerToken,
    runs: Ids | None = None,
    *,
    mu: float = 2.5,
    std: str = "sample",
    eps: float = 1e-6,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Compute GRPO advantages, and mask the tokens with A < 0 whose update would reduce entropy most (Clip-B).

    With S = p (H + log p) for each token, a token with A < 0 is masked where S is more than `mu` population deviations
    below the mean of S over all tokens that count. The advantages are those of `grpo`. Train with the `mask` of the
    result.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        entropy: [B, R] or packed: entropy of the policy per token.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        mu: Threshold in population deviations.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False, and the narrowed mask. The report lists missing
        rewards, lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, `mask` is `None`, or the number of rows differs.

    >>> result = clip_b([0.0, 1.0], ["a", "a"], torch.ones(2, 3), torch.full((2, 3), -0.5),
    ...                torch.tensor([[0.1, 0.6, 0.6], [0.6, 0.6, 0.6]]), mu=1.0)
    >>> result.mask
    tensor([[False,  True,  True],
            [ True,  True,  True]])
    """
    check_float("mu", mu, 0)
    if mask is None:
        raise ValueError("mask: got None, expected the tokens that count, since the estimator narrows it")
    estimate = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton, process_group=process_group)
    layout, advantages, change = _entropy_change(estimate, mask, old_logprobs, entropy)
    stats = moments(change, layout.mask, process_group)
    masked = layout.mask & (advantages < 0) & (change - stats.mean < -mu * stats.std("population"))
    return _mask_tokens(estimate, layout, masked, advantages, {"std_s": stats.std("population")})


def _entropy_change(
    estimate: Advantages, mask: PerToken, old_logprobs: PerToken, entropy: PerToken
) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """Return the layout, the advantages, and S = p (H + log p) of each token in float64."""
    layout = Layout.from_tokens(mask, old_logprobs=old_logprobs, entropy=entropy)
    logprobs = layout.take("old_logprobs", old_logprobs).detach().to(torch.float64)
    entropies = layout.take("entropy", entropy).detach().to(torch.float64)
    change = layout.masked(logprobs.exp() * (entropies + logprobs))
    return layout, layout.take("advantages", estimate.advantages), change


@ESTIMATORS.register(
    "clip_v",
    "clipv",
    source="Clip-V (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    compares_runs=True,
)
def clip_v(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken,
    old_logprobs: PerToken,
    entropy: PerToken,
    necs: PerToken,
    runs: Ids | None = None,
    *,
    mu: float = 8.5,
    max_frac: float = 1e-4,
    centered: bool = True,
    zero_advantage: str = "keep",
    std: str = "sample",
    eps: float = 1e-6,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Compute GRPO advantages, and mask a bounded share of tokens with A < 0 (Clip-V).

    With S = p (H + log p) and D = necs - S for each token, a token with A < 0 is masked where D is more than `mu`
    population deviations above its mean over tokens that count. Tokens with the largest D are masked first, at most
    `max_frac` of all tokens, but at least one. If several tokens at that limit have the same D, none of them is masked,
    so that the order of tokens has no effect.

    Trinity compares D itself (`centered=False`), and also masks tokens with A = 0, without a limit
    (`zero_advantage="uncapped"`): in a batch of equal rewards that is every token.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count.
        old_logprobs: [B, R] or packed: log-probs of the policy before the update, taken as constants.
        entropy: [B, R] or packed: entropy of the policy per token.
        necs: [B, R] or packed: expected entropy change of each token.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        mu: Threshold in population deviations.
        max_frac: Largest share of tokens that are masked.
        centered: Whether D is compared with its mean.
        zero_advantage: `"keep"` tokens with A = 0, or mask them without a limit (`"uncapped"`).
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False, and the narrowed mask. The report lists missing
        rewards, lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, `mask` is `None`, or the number of rows differs.

    >>> result = clip_v([0.0, 1.0], ["a", "a"], torch.ones(2, 2), torch.full((2, 2), -0.5), torch.full((2, 2), 0.5),
    ...                torch.tensor([[0.9, 0.1], [0.1, 0.1]]), mu=1.0)
    >>> result.mask
    tensor([[False,  True],
            [ True,  True]])
    """
    check_bool("centered", centered)
    check_float("mu", mu, 0)
    check_float("max_frac", max_frac, 0, 1)
    check_choice("zero_advantage", zero_advantage, ("keep", "uncapped"))
    if mask is None:
        raise ValueError("mask: got None, expected the tokens that count, since the estimator narrows it")
    estimate = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton, process_group=process_group)
    layout, advantages, change = _entropy_change(estimate, mask, old_logprobs, entropy)
    gap = layout.masked(layout.take("necs", necs).to(torch.float64) - change)
    stats = moments(gap, layout.mask, process_group)
    high = layout.mask & (gap - (stats.mean if centered else 0.0) > mu * stats.std("population"))
    limit = max(int(max_frac * stats.count), 1) if max_frac > 0 else 0
    masked = _mark_largest(gap, high & (advantages < 0), limit, process_group)
    if zero_advantage == "uncapped":
        masked = masked | (high & (advantages == 0))
    return _mask_tokens(estimate, layout, masked, advantages, {"std_d": stats.std("population")})


def _mark_largest(
    values: torch.Tensor, candidates: torch.Tensor, limit: int, process_group: ProcessGroup
) -> torch.Tensor:
    """Mark the `limit` largest candidates of all processes, without those that equal the first one beyond the limit."""
    local = values[candidates].flatten().tolist()
    ordered = sorted((value for rank_values in process_group.gather(local) for value in rank_values), reverse=True)
    if len(ordered) <= limit:
        return candidates
    return candidates & torch.gt(values, ordered[limit])


def _mask_tokens(
    estimate: Advantages, layout: Layout, masked: torch.Tensor, advantages: torch.Tensor, metrics: dict[str, float]
) -> Advantages:
    """Remove the tokens `masked` from the mask of an estimate, and report them."""
    count = max(int(layout.mask.sum()), 1)
    affected = rows_where(layout.narrowed(masked).counts > 0)
    fractions = {
        "frac_clipped": float(masked.sum()) / count,
        "frac_clipped_pos": float((masked & (advantages > 0)).sum()) / count,
        "frac_clipped_neg": float((masked & (advantages <= 0)).sum()) / count,
    }
    report = estimate.report.plus({"tokens left out": affected}, fractions | metrics)
    return Advantages(estimate.advantages, None, estimate.scores, layout.restore(layout.mask & ~masked), report)
