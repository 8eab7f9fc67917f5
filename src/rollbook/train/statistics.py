"""How well a model answers, from outcomes of several samples of each prompt: avg@k, pass@k, maj@k, and how sure it is.

Invariant: pure functions of plain numbers; prompts are what was drawn, so an interval treats all samples of a prompt as
one draw, and none is a single point only because everything that was seen is alike.
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
"""For each prompt, whether each of its samples succeeded; every prompt has at least one sample."""

_DOUBT = 2.0
"""How many prompts' worth of doubt there is that samples of a prompt are more than one sample (see `share`)."""
_STRANGERS = 4.0
"""How many prompts' worth of doubt there is that the shares before and after have anything in common (see `paired`)."""
_EXACT = 300
"""Up to so many degrees of freedom, Student's distribution is summed; beyond, its expansion is exact to 1e-9."""


class Interval(NamedTuple):
    """An estimate, and the interval that holds the truth with the confidence that was asked for."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


# --- shares and means -----------------------------------------------------------------------------------------------


def avg_at_k(outcomes: Outcomes) -> float:
    """The share of samples that succeed, every prompt counting alike: what a user sees on average.

    >>> avg_at_k([[True, False], [True, True]])
    0.75
    """
    return _mean(_shares(outcomes))


def share(outcomes: Outcomes, confidence: float = 0.95) -> Interval:
    """avg@k with its interval: Wilson's for a share, of as many independent samples as there are in effect.

    m prompts of k samples are not m k draws: samples of one prompt are alike. The m shares of the prompts are
    independent, and the variance v = s^2 / m of their mean says how many independent samples would be as sure:
    n = p (1 - p) / v, between m (samples of a prompt all alike) and m k. With it, and Student's quantile for m - 1 in
    the place of the normal one, Wilson's interval is that of a t test over prompts in the middle; near 0 and 1, where
    such a test gives a point or leaves [0, 1], it is still one that can be trusted: 200 of 200 is not certainty.

    How alike samples are is itself not known where nearly all of them agree: the design effect m k / n is averaged with
    k, the worst it can be, which counts as two prompts beside those whose samples show something.

    >>> print(share([[True, False]] * 100 + [[True, True]] * 100))
    0.750 (0.705 to 0.791)
    >>> print(share([[True]] * 200))
    1.000 (0.981 to 1.000)
    """
    shares = _shares(outcomes)
    _confident(confidence)
    m, p = len(shares), _mean(shares)
    k = sum(map(len, outcomes)) / m
    n = float(m)
    if m > 1 and 0 < p < 1:
        spread = sum((rate - p) ** 2 for rate in shares) / (m - 1) / m
        effect = min(max(spread * m * k / (p * (1 - p)), 1.0), k)
        telling = min(sum(rate > 0 for rate in shares), sum(rate < 1 for rate in shares))
        n = m * k * (telling + _DOUBT) / (telling * effect + _DOUBT * k)
    t2 = student(confidence, m - 1) ** 2 if m > 1 else math.inf
    if t2 == math.inf:
        return Interval(p, 0.0, 1.0)  # one prompt says nothing about others
    middle = (p + t2 / (2 * n)) / (1 + t2 / n)
    reach = math.sqrt(t2 * (p * (1 - p) / n + t2 / (4 * n * n))) / (1 + t2 / n)
    return Interval(p, min(max(0.0, middle - reach), p), max(min(1.0, middle + reach), p))


def mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of one number for each prompt (a mean reward, a length) with Student's interval; values that are not
    finite are no values.

    >>> print(mean([1.0, 2.0, 3.0]))
    2.000 (-0.484 to 4.484)
    """
    _confident(confidence)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.nan, math.nan, math.nan)
    middle = _mean(finite)
    if len(finite) == 1:
        return Interval(middle, -math.inf, math.inf)
    error = math.sqrt(sum((value - middle) ** 2 for value in finite) / (len(finite) - 1) / len(finite))
    reach = student(confidence, len(finite) - 1) * error
    return Interval(middle, middle - reach, middle + reach)


def paired(before: Outcomes, after: Outcomes, confidence: float = 0.95) -> Interval:
    """How much avg@k rose from `before` to `after`, the same prompts in the same order.

    The two `share` intervals are put together (Newcombe 1998, method 10; the rule is called MOVER), less what the two
    have in common: prompts that are hard before are hard after, and the correlation of the prompts' shares makes the
    interval of the difference narrower than two unpaired ones would allow. That correlation is shrunk a little, as if
    four more prompts had shown none: two evaluations that agree on every prompt are not certain to be of equals.

    >>> before = [[False, False]] * 60 + [[True, False]] * 40
    >>> after = [[True, False]] * 60 + [[True, True]] * 40
    >>> print(paired(before, after))
    0.500 (0.481 to 0.518)
    """
    if len(before) != len(after):
        raise ValueError(f"after: got {len(after)} prompts, expected the {len(before)} of before")
    old, new = share(before, confidence), share(after, confidence)
    common = _correlation(_shares(before), _shares(after)) * len(before) / (len(before) + _STRANGERS)
    rise = new.value - old.value
    down = _apart(new.value - new.low, old.high - old.value, common)
    up = _apart(new.high - new.value, old.value - old.low, common)
    return Interval(rise, max(-1.0, rise - down), min(1.0, rise + up))


def _apart(first: float, other: float, common: float) -> float:
    return math.sqrt(max(0.0, first * first + other * other - 2 * common * first * other))


def _correlation(first: Sequence[float], other: Sequence[float]) -> float:
    """Of two numbers of each prompt; 0 where one of them does not vary."""
    a, b = _mean(first), _mean(other)
    both = sum((x - a) * (y - b) for x, y in zip(first, other, strict=True))
    apart = math.sqrt(sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in other))
    return both / apart if apart else 0.0


def _shares(outcomes: Outcomes) -> list[float]:
    """The share of each prompt's samples that succeed."""
    if not len(outcomes):
        raise ValueError("outcomes: got no prompt, expected at least one")
    for i, runs in enumerate(outcomes):
        if not len(runs):
            raise ValueError(f"outcomes[{i}]: got no sample, expected at least one for each prompt")
    return [sum(map(bool, runs)) / len(runs) for runs in outcomes]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- the best, and the most frequent, of k --------------------------------------------------------------------------


def pass_at_k(outcomes: Outcomes, k: int) -> float:
    """The chance that at least one of `k` samples of a prompt succeeds, without bias from the n >= k that there are.

    >>> pass_at_k([[True, False, False, False], [False] * 4], 2)
    0.25
    """
    from rollbook.algorithms.advantages import pass_at_k as of_one  # loads torch

    check_int("k", k, 1)
    _enough(outcomes, k)
    return _mean([of_one(len(runs), sum(map(bool, runs)), k) for runs in outcomes])


def powers_of_two(k: int) -> list[int]:
    """1, 2, 4, ... up to k, and k itself: the ones to give pass@k for.

    >>> powers_of_two(8), powers_of_two(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    powers = [1 << i for i in range(check_int("k", k, 1).bit_length())]
    return powers if powers[-1] == k else [*powers, k]


def maj_at_k(answers: Sequence[Sequence[Hashable | None]], outcomes: Outcomes, k: int | None = None) -> float:
    """The chance that the answer which most of `k` samples give is right; by default of all samples of a prompt.

    It is exact: the mean over every choice of k of the n samples, and over answers that have equally many votes. A
    sample without an answer (`None`) does not vote; where nobody votes, nothing is right. Where samples of one answer
    differ in their outcome (a reward that looks at the form too), it is right to the share of them that succeeded.

    >>> answers = [["4", "4", "5"], ["1", "2", None]]
    >>> outcomes = [[True, True, False], [False, True, False]]
    >>> maj_at_k(answers, outcomes), round(maj_at_k(answers, outcomes, 2), 3)
    (0.75, 0.583)
    """
    if len(answers) != len(outcomes):
        raise ValueError(f"answers: got {len(answers)} prompts, expected the {len(outcomes)} of outcomes")
    _shares(outcomes)
    if k is not None:
        check_int("k", k, 1)
        _enough(outcomes, k)
    chances = []
    for i, (given_answers, right) in enumerate(zip(answers, outcomes, strict=True)):
        if len(given_answers) != len(right):
            raise ValueError(
                f"answers[{i}]: got {len(given_answers)} answers, expected {len(right)}, one for each sample"
            )
        votes = Counter(answer for answer in given_answers if answer is not None)
        wins = _wins(
            tuple(sorted(votes.values())), len(given_answers) - votes.total(), len(given_answers) if k is None else k
        )
        good = Counter(answer for answer, ok in zip(given_answers, right, strict=True) if ok and answer is not None)
        chances.append(math.fsum(wins[count] * good[answer] / count for answer, count in votes.items()))
    return _mean(chances)


@lru_cache(4096)
def _wins(counts: tuple[int, ...], silent: int, k: int) -> dict[int, float]:
    """By how many samples give an answer, the chance that it wins the vote of `k` of all samples.

    An answer with x votes wins if no other has more, and then with a chance of 1 / (1 + t) if t others have x too. The
    choices of the others are counted by their votes s and ties t: the product over answers of
    sum_{d < x} C(count, d) z^d + C(count, x) z^x u, in whole numbers.
    """
    n = sum(counts) + silent
    if k == n:
        top = max(counts, default=0)
        return {count: float(count == top) / counts.count(top) for count in counts}
    wins = {}
    for mine in set(counts):
        others = list(counts)
        others.remove(mine)
        chance = 0.0
        for x in range(1, min(mine, k) + 1):
            ways = {(0, 0): 1}
            for count in others:
                ways = _times(ways, count, x, k - x, ties=True)
            ways = _times(ways, silent, silent + 1, k - x, ties=False)
            fair = math.fsum(number / (1 + t) for (s, t), number in ways.items() if s == k - x)
            chance += math.comb(mine, x) * fair / math.comb(n, k)
        wins[mine] = chance
    return wins


def _times(
    ways: dict[tuple[int, int], int], count: int, x: int, most: int, *, ties: bool
) -> dict[tuple[int, int], int]:
    """Ways to choose, with one more answer of `count` samples that may get at most `x` votes."""
    totals: Counter[tuple[int, int]] = Counter()
    for (s, t), number in ways.items():
        for d in range(min(count, x, most - s) + 1):
            totals[s + d, t + (ties and d == x)] += number * math.comb(count, d)
    return totals


def _enough(outcomes: Outcomes, k: int) -> None:
    _shares(outcomes)
    least = min(map(len, outcomes))
    if k > least:
        raise ValueError(f"k: got {k}, expected at most {least}, the samples of a prompt")


# --- Student's distribution -----------------------------------------------------------------------------------------


def _confident(confidence: float) -> None:
    check_float("confidence", confidence, 1e-6, 1 - 1e-6, "a number between 0 and 1, such as 0.95")


@lru_cache(256)
def student(confidence: float, freedom: int) -> float:
    """The t for which |T| <= t with this probability, T of Student's distribution with `freedom` degrees of freedom.

    >>> round(student(0.95, 9), 4), round(student(0.95, 10**6), 4)
    (2.2622, 1.96)
    """
    _confident(confidence)
    check_int("freedom", freedom, 1)
    if freedom > _EXACT:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / freedom + second / freedom**2 + third / freedom**3
    low, high = 0.0, math.pi / 2  # of the angle, whose tangent is t / sqrt(freedom)
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, freedom) < confidence else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle)): a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for i in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


__all__ = [
    "Interval",
    "Outcomes",
    "avg_at_k",
    "maj_at_k",
    "mean",
    "paired",
    "pass_at_k",
    "powers_of_two",
    "share",
    "student",
]
