"""Estimators that look at single tokens: distillation from a teacher, and group scores that spare some tokens.

Invariant: a distillation advantage is positive exactly where the teacher finds the token likelier than the student
did; an estimator that leaves tokens out returns a mask narrower than the one it was given, and never trains on more.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from rollbook.algorithms.advantages.grouped import grpo
from rollbook.algorithms.groups import moments
from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_floats
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup


@ESTIMATORS.register(
    "on_policy_distill", source="reverse KL as a reward for each token (Agarwal et al., 2023, arXiv 2306.13649)"
)
def on_policy_distill(
    old_logprobs: PerToken, teacher_logprobs: PerToken, mask: PerToken | None = None, *, coef: float = 1.0
) -> Advantages:
    """How much likelier the teacher finds each token: `coef` * (teacher - student), in log-probs.

    old_logprobs (of the policy that sampled), teacher_logprobs, mask: (B, A) or packed. In expectation over the
    policy's own samples its gradient is that of -coef * KL(student || teacher). Tool tokens are left out by the mask.

    >>> on_policy_distill(torch.tensor([[-0.5, -1.0]]), torch.tensor([[-0.25, -3.0]])).advantages
    tensor([[ 0.2500, -2.0000]])
    """
    layout = Layout.of(mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    student = layout.take("old_logprobs", old_logprobs).detach()
    teacher = layout.take("teacher_logprobs", teacher_logprobs).detach()
    gap = student - teacher
    return _tokens(layout, -check_float("coef", coef) * gap, mask, {"kl": gap})


@ESTIMATORS.register(
    "jsd", source="generalised Jensen-Shannon divergence (arXiv 2306.13649); its slope by the student's p"
)
def jsd(
    old_logprobs: PerToken,
    teacher_logprobs: PerToken,
    mask: PerToken | None = None,
    *,
    beta: float = 0.5,
    coef: float = 1.0,
    normalise: bool = True,
) -> Advantages:
    """The policy gradient of the generalised Jensen-Shannon divergence between teacher and student, token by token.

    With q the teacher, p the student and m = beta q + (1 - beta) p the divergence is D = beta KL(q || m) +
    (1 - beta) KL(p || m), and dD/dp(token) = (1 - beta) log(p / m). The advantage is minus that, `coef` times; with
    `normalise` divided by beta (1 - beta), which gives coef * log(1 + beta (q / p - 1)) / beta: on-policy distillation
    at beta = 1, and the forward KL's q / p - 1 at beta = 0. Positive exactly where the teacher is above the student.
    The report's `divergence` is the mean over tokens of an estimate of D that is never below 0, since f(q / p) with
    f(x) = beta x log x - (beta x + 1 - beta) log(beta x + 1 - beta) is not. Arguments as of `on_policy_distill`.

    Trinity's quantity is at most 0 by Jensen's inequality, and rewards every mismatch whatever its direction.

    >>> import math
    >>> teacher, student = torch.tensor([[math.log(0.25), math.log(0.5)]]), torch.tensor([[math.log(0.5)] * 2])
    >>> jsd(student, teacher).advantages  # 2 log(0.75)
    tensor([[-0.5754,  0.0000]])
    >>> jsd(student, teacher, beta=1.0).advantages
    tensor([[-0.6931,  0.0000]])
    """
    check_bool("normalise", normalise)
    check_float("beta", beta, 0, 1)
    check_float("coef", coef)
    layout = Layout.of(mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    student = layout.take("old_logprobs", old_logprobs).detach().to(torch.float64)
    teacher = layout.take("teacher_logprobs", teacher_logprobs).detach().to(torch.float64)
    gap = teacher - student
    if beta < sys.float_info.min:
        score = torch.expm1(gap)
    elif beta == 1:
        score = gap
    else:
        score = torch.where(gap < 700, torch.log1p(beta * torch.expm1(gap)), gap + math.log(beta)) / beta
    scale = 1.0 if normalise else beta * (1 - beta)
    ratio = torch.exp(gap.clamp(max=700))  # beyond that the divergence is as good as its largest
    mixture = beta * ratio + 1 - beta
    divergence = beta * torch.where(ratio > 0, ratio * gap.clamp(-700, 700), 0.0)
    divergence = divergence - torch.where(mixture > 0, mixture * torch.log(mixture), 0.0)
    given = (layout.whole("old_logprobs", old_logprobs), layout.whole("teacher_logprobs", teacher_logprobs))
    wide = torch.promote_types(*(as_floats(one).dtype for one in given))
    return _tokens(layout, (coef * scale * score).to(wide), mask, {"divergence": divergence.clamp(min=0)})


def _tokens(layout: Layout, tokens: torch.Tensor, mask: Any, metrics: dict[str, torch.Tensor]) -> Advantages:
    count = max(int(layout.mask.sum()), 1)
    kept = layout.masked(tokens) + 0.0
    found = {name: float(layout.masked(value).sum() / count) for name, value in metrics.items()}
    empty = rows_where(layout.counts == 0)
    report = Report(layout.rows, {"no actions": empty}, {**found, "advantage_mean": float(kept.sum() / count)})
    return Advantages(layout.give(kept), None, None, mask, report)


@ESTIMATORS.register(
    "clip_b",
    "clipb",
    source="Clip-B (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    compares_runs=True,
)
def clip_b(
    rewards: PerRow,
    groups: Any,
    mask: PerToken,
    old_logprobs: PerToken,
    entropy: PerToken,
    runs: Any = None,
    *,
    mu: float = 2.5,
    std: str = "sample",
    eps: float = 1e-6,
    singleton: str = "zero",
    ranks: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """GRPO that spares tokens with a negative advantage whose push would cost the most entropy.

    With S = p (H + log p) for each token, a token with A < 0 is left out where S lies more than `mu` population
    deviations below the mean of S over all tokens that count. old_logprobs, entropy, mask: (B, A) or packed; the rest
    as of `grpo`. The result's `mask` is the one to train with; its advantages are those of `grpo`, untouched.

    >>> found = clip_b([0.0, 1.0], ["a", "a"], torch.ones(2, 3), torch.full((2, 3), -0.5),
    ...                torch.tensor([[0.1, 0.6, 0.6], [0.6, 0.6, 0.6]]), mu=1.0)
    >>> found.mask
    tensor([[False,  True,  True],
            [ True,  True,  True]])
    """
    check_float("mu", mu, 0)
    if mask is None:
        raise ValueError("mask: got None, expected the tokens that count, since some are to be left out of it")
    found = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton, ranks=ranks)
    layout, advantages, surprise = _surprise(found, mask, old_logprobs, entropy)
    stats = moments(surprise, layout.mask, ranks)
    out = layout.mask & (advantages < 0) & (surprise - stats.mean < -mu * stats.std("population"))
    return _narrowed(found, layout, out, advantages, {"std_s": stats.std("population")})


def _surprise(
    found: Advantages, mask: PerToken, old_logprobs: PerToken, entropy: PerToken
) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    layout = Layout.of(mask, old_logprobs=old_logprobs, entropy=entropy)
    chosen = layout.take("old_logprobs", old_logprobs).detach().to(torch.float64)
    spread = layout.take("entropy", entropy).detach().to(torch.float64)
    return layout, layout.take("advantages", found.advantages), layout.masked(chosen.exp() * (spread + chosen))


@ESTIMATORS.register(
    "clip_v",
    "clipv",
    source="Clip-V (On the Entropy Dynamics in Reinforcement Fine-Tuning, 2026, arXiv 2602.03392)",
    compares_runs=True,
)
def clip_v(
    rewards: PerRow,
    groups: Any,
    mask: PerToken,
    old_logprobs: PerToken,
    entropy: PerToken,
    necs: PerToken,
    runs: Any = None,
    *,
    mu: float = 8.5,
    max_frac: float = 1e-4,
    centred: bool = True,
    zero_advantage: str = "keep",
    std: str = "sample",
    eps: float = 1e-6,
    singleton: str = "zero",
    ranks: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """GRPO that spares at most a share of tokens with a negative advantage: those farthest above what is expected.

    With S = p (H + log p) and D = necs - S for each token, a token with A < 0 is left out where D lies more than `mu`
    population deviations above its mean over tokens that count; of those at most `max_frac` of all tokens, or one if
    that is none, the largest first (of several equal ones at that limit none, so that order plays no part).
    old_logprobs, entropy, necs, mask: (B, A) or packed; the rest as of `clip_b`.

    Trinity compares D itself (`centred=False`), and also leaves out tokens with A = 0, without a limit
    (`zero_advantage="uncapped"`): in a batch of equal rewards that is every one.

    >>> found = clip_v([0.0, 1.0], ["a", "a"], torch.ones(2, 2), torch.full((2, 2), -0.5), torch.full((2, 2), 0.5),
    ...                torch.tensor([[0.9, 0.1], [0.1, 0.1]]), mu=1.0)
    >>> found.mask
    tensor([[False,  True],
            [ True,  True]])
    """
    check_bool("centred", centred)
    check_float("mu", mu, 0)
    check_float("max_frac", max_frac, 0, 1)
    check_choice("zero_advantage", zero_advantage, ("keep", "uncapped"))
    if mask is None:
        raise ValueError("mask: got None, expected the tokens that count, since some are to be left out of it")
    found = grpo(rewards, groups, mask, runs, std=std, eps=eps, singleton=singleton, ranks=ranks)
    layout, advantages, surprise = _surprise(found, mask, old_logprobs, entropy)
    gap = layout.masked(layout.take("necs", necs).to(torch.float64) - surprise)
    stats = moments(gap, layout.mask, ranks)
    high = layout.mask & (gap - (stats.mean if centred else 0.0) > mu * stats.std("population"))
    limit = max(int(max_frac * stats.count), 1) if max_frac > 0 else 0
    out = _largest(gap, high & (advantages < 0), limit, ranks)
    if zero_advantage == "uncapped":
        out = out | (high & (advantages == 0))
    return _narrowed(found, layout, out, advantages, {"std_d": stats.std("population")})


def _largest(values: torch.Tensor, among: torch.Tensor, limit: int, ranks: ProcessGroup) -> torch.Tensor:
    """Which candidates are the `limit` largest of all ranks; of several equal ones at the edge none, so that the order
    of rows plays no part."""
    own = values[among].flatten().tolist()
    everyone = sorted((value for part in ranks.gather(own) for value in part), reverse=True)
    if len(everyone) <= limit:
        return among
    return among & torch.gt(values, everyone[limit])


def _narrowed(
    found: Advantages, layout: Layout, out: torch.Tensor, advantages: torch.Tensor, metrics: dict[str, float]
) -> Advantages:
    kept = layout.mask & ~out
    count = max(int(layout.mask.sum()), 1)
    touched = rows_where(layout.narrowed(out).counts > 0)
    more = {
        "frac_clipped": float(out.sum()) / count,
        "frac_clipped_pos": float((out & (advantages > 0)).sum()) / count,
        "frac_clipped_neg": float((out & (advantages <= 0)).sum()) / count,
        **metrics,
    }
    report = found.report.plus({"tokens left out": touched}, more)
    return Advantages(found.advantages, None, found.scores, layout.give(kept), report)
