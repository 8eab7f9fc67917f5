"""Estimates of avg@k, pass@k and maj@k from several samples per prompt, and confidence intervals.

Intervals are clustered by prompt, because samples of one prompt are correlated. They have a positive width even if all
outcomes are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from rollbook.core.checks import check_float, check_int

Outcomes = Sequence[Sequence[bool]]
"""[prompts][samples] Which samples succeeded; every prompt has at least one sample."""

_PRIOR_PROMPTS = 2.0
"""Weight, in prompts, of the prior that the samples of a prompt are all equal (see `avg_at_k_interval`)."""
_UNCORRELATED_PROMPTS = 4.0
"""Weight, in prompts, of the prior that success rates before and after are uncorrelated (see `paired_difference`)."""
_EXACT_UP_TO = 300
"""Degrees of freedom up to which the t distribution is computed by a sum; above, an expansion is exact to 1e-9."""


class Interval(NamedTuple):
    """An estimate with its confidence interval.

    Args:
        value: The estimate.
        low: Lower end.
        high: Upper end.

    >>> print(Interval(0.5, 0.4, 0.6))
    0.500 (0.400 to 0.600)
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


# --- rates and means --------------------------------------------------------------------------------------------------


def avg_at_k(outcomes: Outcomes) -> float:
    """Compute the mean success rate over prompts.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.

    >>> avg_at_k([[True, False], [True, True]])
    0.75
    """
    return _mean(_success_rates(outcomes))


def avg_at_k_interval(outcomes: Outcomes, confidence: float = 0.95) -> Interval:
    """Compute avg@k with a Wilson interval for the effective number of independent samples.

    The k samples of a prompt are correlated, so m prompts have fewer than m k independent samples. The success rates of
    the m prompts are independent, and the variance v = s^2 / m of their mean p gives the effective number
    n = p (1 - p) / v, between m and m k. With n, and Student's quantile for m - 1 degrees of freedom instead of the
    normal one, the Wilson interval equals that of a t test over prompts for p near 0.5. Near 0 and 1, where a t test
    gives a point or leaves [0, 1], it remains valid.

    If nearly all samples agree, the correlation cannot be estimated well. The design effect m k / n is therefore
    averaged with its maximum k, which has the weight of two prompts.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.
        confidence: Confidence level.

    >>> print(avg_at_k_interval([[True, False]] * 100 + [[True, True]] * 100))
    0.750 (0.705 to 0.791)
    >>> print(avg_at_k_interval([[True]] * 200))
    1.000 (0.981 to 1.000)
    """
    rates = _success_rates(outcomes)
    _check_confidence(confidence)
    m, p = len(rates), _mean(rates)
    k = sum(map(len, outcomes)) / m
    n = float(m)
    if m > 1 and 0 < p < 1:
        variance = sum((rate - p) ** 2 for rate in rates) / (m - 1) / m
        design_effect = min(max(variance * m * k / (p * (1 - p)), 1.0), k)
        informative = min(sum(rate > 0 for rate in rates), sum(rate < 1 for rate in rates))
        n = m * k * (informative + _PRIOR_PROMPTS) / (informative * design_effect + _PRIOR_PROMPTS * k)
    t2 = student_quantile(confidence, m - 1) ** 2 if m > 1 else math.inf
    if t2 == math.inf:
        return Interval(p, 0.0, 1.0)  # the variance over prompts cannot be estimated from one prompt
    center = (p + t2 / (2 * n)) / (1 + t2 / n)
    margin = math.sqrt(t2 * (p * (1 - p) / n + t2 / (4 * n * n))) / (1 + t2 / n)
    return Interval(p, min(max(0.0, center - margin), p), max(min(1.0, center + margin), p))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Compute the mean of one number per prompt, such as a reward or a length, with Student's interval.

    Args:
        values: [prompts] The numbers; those that are not finite are ignored.
        confidence: Confidence level.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 (-0.484 to 4.484)
    """
    _check_confidence(confidence)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.nan, math.nan, math.nan)
    center = _mean(finite)
    if len(finite) == 1:
        return Interval(center, -math.inf, math.inf)
    error = math.sqrt(sum((value - center) ** 2 for value in finite) / (len(finite) - 1) / len(finite))
    margin = student_quantile(confidence, len(finite) - 1) * error
    return Interval(center, center - margin, center + margin)


def paired_difference(before: Outcomes, after: Outcomes, confidence: float = 0.95) -> Interval:
    """Compute the increase of avg@k from `before` to `after`, paired by prompt.

    The intervals of `avg_at_k_interval` are combined by MOVER (Newcombe 1998, method 10), with the correlation of the
    success rates over prompts, which makes the interval narrower than that of unpaired evaluations. The correlation is
    shrunk by a prior with the weight of four uncorrelated prompts, so that the interval has a positive width even if
    both evaluations agree on every prompt.

    Args:
        before: [prompts][samples] Which samples succeeded.
        after: The same prompts, in the same order.
        confidence: Confidence level.

    Raises:
        ValueError: The numbers of prompts differ.

    >>> before = [[False, False]] * 60 + [[True, False]] * 40
    >>> after = [[True, False]] * 60 + [[True, True]] * 40
    >>> print(paired_difference(before, after))
    0.500 (0.481 to 0.518)
    """
    if len(before) != len(after):
        raise ValueError(f"after: got {len(after)} prompts, expected the {len(before)} of before")
    old, new = avg_at_k_interval(before, confidence), avg_at_k_interval(after, confidence)
    correlation = _correlation(_success_rates(before), _success_rates(after))
    correlation *= len(before) / (len(before) + _UNCORRELATED_PROMPTS)
    rise = new.value - old.value
    lower = _combine_margins(new.value - new.low, old.high - old.value, correlation)
    upper = _combine_margins(new.high - new.value, old.value - old.low, correlation)
    return Interval(rise, max(-1.0, rise - lower), min(1.0, rise + upper))


def _combine_margins(first: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, first * first + other * other - 2 * correlation * first * other))


def _correlation(first: Sequence[float], other: Sequence[float]) -> float:
    """Compute the correlation over prompts; 0 if one side is constant."""
    first_mean, other_mean = _mean(first), _mean(other)
    covariance = sum((x - first_mean) * (y - other_mean) for x, y in zip(first, other, strict=True))
    scale = math.sqrt(sum((x - first_mean) ** 2 for x in first) * sum((y - other_mean) ** 2 for y in other))
    return covariance / scale if scale else 0.0


def _success_rates(outcomes: Outcomes) -> list[float]:
    """[prompts] Compute the success rate of each prompt."""
    if not len(outcomes):
        raise ValueError("outcomes: got no prompt, expected at least one")
    for i, runs in enumerate(outcomes):
        if not len(runs):
            raise ValueError(f"outcomes[{i}]: got no sample, expected at least one for each prompt")
    return [sum(map(bool, runs)) / len(runs) for runs in outcomes]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- pass@k and maj@k ------------------------------------------------------------------------------------------------


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Compute the unbiased estimate of pass@k from n >= k samples per prompt.

    Args:
        outcomes: [prompts][samples] Which samples succeeded.
        k: Number of samples of which at least one must succeed.

    Raises:
        ValueError: A prompt has fewer than k samples.

    >>> pass_at_k([[True, False, False, False], [False] * 4], 2)
    0.25
    """
    from rollbook.algorithms.advantages import pass_at_k as prompt_pass_at_k  # loads torch

    check_int("k", k, 1)
    _check_sample_count(outcomes, k)
    return _mean([prompt_pass_at_k(len(runs), sum(map(bool, runs)), k) for runs in outcomes])


def powers_of_two(k: int) -> list[int]:
    """Return 1, 2, 4, ... up to k, and k itself.

    Args:
        k: The last number.

    >>> powers_of_two(8), powers_of_two(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    powers = [1 << i for i in range(check_int("k", k, 1).bit_length())]
    return powers if powers[-1] == k else [*powers, k]


def maj_at_k(answers: Sequence[Sequence[Hashable | None]], outcomes: Outcomes, k: int | None = None) -> float:
    """Compute maj@k: the probability that the majority answer of k samples is correct.

    The result is exact: the mean over all subsets of k of the n samples, with ties broken at random. A sample without
    an answer does not vote. If samples with equal answers have different outcomes, the answer counts as correct with
    the share of them that succeeded.

    Args:
        answers: [prompts][samples] The answers, or `None`.
        outcomes: [prompts][samples] Which samples succeeded.
        k: Number of samples that vote; `None`: all samples of a prompt.

    Raises:
        ValueError: The lengths differ, or a prompt has fewer than k samples.

    >>> answers = [["4", "4", "5"], ["1", "2", None]]
    >>> outcomes = [[True, True, False], [False, True, False]]
    >>> maj_at_k(answers, outcomes), round(maj_at_k(answers, outcomes, 2), 3)
    (0.75, 0.583)
    """
    if len(answers) != len(outcomes):
        raise ValueError(f"answers: got {len(answers)} prompts, expected the {len(outcomes)} of outcomes")
    _success_rates(outcomes)
    if k is not None:
        check_int("k", k, 1)
        _check_sample_count(outcomes, k)
    probabilities = []
    for i, (row, successes) in enumerate(zip(answers, outcomes, strict=True)):
        if len(row) != len(successes):
            raise ValueError(f"answers[{i}]: got {len(row)} answers, expected {len(successes)}, one for each sample")
        votes = Counter(answer for answer in row if answer is not None)
        wins = _win_probabilities(tuple(sorted(votes.values())), len(row) - votes.total(), len(row) if k is None else k)
        correct = Counter(answer for answer, ok in zip(row, successes, strict=True) if ok and answer is not None)
        probabilities.append(math.fsum(wins[count] * correct[answer] / count for answer, count in votes.items()))
    return _mean(probabilities)


@lru_cache(4096)
def _win_probabilities(counts: tuple[int, ...], abstaining: int, k: int) -> dict[int, float]:
    """Compute the probability that an answer wins the vote of k of all samples, by the number of samples that give it.

    An answer with x votes wins if no other has more, with probability 1 / (1 + t) if t others have x too. The subsets
    of the other samples are counted by their votes s and ties t: the coefficients of the product over answers of
    sum_{d < x} C(count, d) z^d + C(count, x) z^x u, in integers.

    Args:
        counts: Number of samples of each answer.
        abstaining: Number of samples without an answer.
        k: Number of samples that vote.
    """
    n = sum(counts) + abstaining
    if k == n:
        top = max(counts, default=0)
        return {count: float(count == top) / counts.count(top) for count in counts}
    wins = {}
    for candidate in set(counts):
        others = list(counts)
        others.remove(candidate)
        probability = 0.0
        for x in range(1, min(candidate, k) + 1):
            subsets = {(0, 0): 1}
            for count in others:
                subsets = _add_answer(subsets, count, x, k - x, ties=True)
            subsets = _add_answer(subsets, abstaining, abstaining + 1, k - x, ties=False)
            winning = math.fsum(number / (1 + t) for (s, t), number in subsets.items() if s == k - x)
            probability += math.comb(candidate, x) * winning / math.comb(n, k)
        wins[candidate] = probability
    return wins


def _add_answer(
    subsets: dict[tuple[int, int], int], count: int, x: int, max_votes: int, *, ties: bool
) -> dict[tuple[int, int], int]:
    """Add an answer of `count` samples with at most x votes to the numbers of subsets by (votes, ties)."""
    extended: Counter[tuple[int, int]] = Counter()
    for (s, t), number in subsets.items():
        for d in range(min(count, x, max_votes - s) + 1):
            extended[s + d, t + (ties and d == x)] += number * math.comb(count, d)
    return extended


def _check_sample_count(outcomes: Outcomes, k: int) -> None:
    _success_rates(outcomes)
    fewest = min(map(len, outcomes))
    if k > fewest:
        raise ValueError(f"k: got {k}, expected at most {fewest}, the samples of a prompt")


# --- Student's distribution -----------------------------------------------------------------------------------------


def _check_confidence(confidence: float) -> None:
    check_float("confidence", confidence, 1e-6, 1 - 1e-6, "a number between 0 and 1, such as 0.95")


@lru_cache(256)
def student_quantile(confidence: float, df: int) -> float:
    """Return the t with P(|T| <= t) = confidence for Student's distribution.

    Args:
        confidence: The probability.
        df: Degrees of freedom.

    >>> round(student_quantile(0.95, 9), 4), round(student_quantile(0.95, 10**6), 4)
    (2.2622, 1.96)
    """
    _check_confidence(confidence)
    check_int("df", df, 1)
    if df > _EXACT_UP_TO:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / df + second / df**2 + third / df**3
    low, high = 0.0, math.pi / 2  # bisection for the angle with tangent t / sqrt(df)
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_probability(angle, df) < confidence else (low, angle)
    return math.tan(low) * math.sqrt(df)


def _student_probability(angle: float, df: int) -> float:
    """Compute P(|T| <= sqrt(df) tan(angle)) by a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for i in range(2 + odd, df - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


__all__ = [
    "Interval",
    "Outcomes",
    "avg_at_k",
    "avg_at_k_interval",
    "maj_at_k",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "powers_of_two",
    "student_quantile",
]
