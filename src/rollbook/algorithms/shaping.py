"""Rewards before an estimator sees them: penalties for length and repetition, clipping, scaling.

Invariant: nothing that is given is changed; a reward that is missing (`None` or NaN) stays missing, is in no
statistic, and is counted; what was done to which row stands in the report.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.arguments import state_of
from rollbook.algorithms.filters import Weights as Weights
from rollbook.algorithms.filters import clip_filter_like_weight_func as clip_filter_like_weight_func
from rollbook.algorithms.filters import clip_filter_weights as clip_filter_weights
from rollbook.algorithms.groups import Floats, Grouped, as_ids, as_rewards
from rollbook.algorithms.layout import Layout, PerRow, PerToken
from rollbook.algorithms.moments import whiten
from rollbook.algorithms.penalties import (
    given_back,
    likely_lost,
    over_target,
    overlong,
    repeated,
    same_rows,
    whole_lengths,
)
from rollbook.algorithms.penalties import length_bonus as length_bonus
from rollbook.algorithms.penalties import length_penalty as length_penalty
from rollbook.algorithms.penalties import overlong_penalty as overlong_penalty
from rollbook.algorithms.penalties import rank_penalty as rank_penalty
from rollbook.algorithms.penalties import repetition_penalty as repetition_penalty
from rollbook.algorithms.ranks import ALONE, Ranks
from rollbook.algorithms.registry import choice, number, switch
from rollbook.algorithms.results import Report, rows_where

OPERATIONS = ("add", "sub", "mul", "div")
_OTHER_REASONS = ("missing reward", "infinite reward", "missing value", "zero divisor")


@dataclass(frozen=True)
class Shaped:
    """Rewards that were shaped, and what was done to which.

    The report's reasons name rows, "missing reward" and "infinite reward" among them, the latter of rewards that came
    so; its metrics are those of `difference`.

    >>> shaped = clip_rewards([3.0, None, 0.5], high=1.0, ids=["x", "y", "z"])
    >>> shaped.rewards, shaped.report.which("above"), shaped.report.which("missing reward")
    (tensor([1.0000,    nan, 0.5000]), ['x'], ['y'])
    """

    rewards: torch.Tensor
    """[B] NaN where a reward is missing."""
    report: Report


@dataclass(frozen=True)
class Clipped:
    """Advantages within a bound, and how many were not.

    >>> clipped = clip_advantages([[3.0, 0.5], [-0.1]], None, 1.0)
    >>> clipped.advantages, clipped.fractions, clipped.report.which("clipped")
    ([tensor([1.0000, 0.5000]), tensor([-0.1000])], tensor([0.5000, 0.0000]), [0])
    """

    advantages: Any
    """For each token, in the layout they came in; 0 where the mask is False."""
    fractions: torch.Tensor
    """[B] float32: which share of each row's tokens was outside the bound; 0 for a row without tokens."""
    fraction: float
    """The same of the whole batch."""
    report: Report


@dataclass(frozen=True)
class PassRates:
    """The mean reward of each task.

    >>> found = pass_rates([1.0, 0.0, None], ["easy", "easy", "odd"])
    >>> found.keys, found.rates, found.counts, found.report.which("missing reward")
    (['easy', 'odd'], [0.5, nan], [2, 0], [2])
    """

    keys: list[Hashable]
    """The tasks, as they first appear."""
    rates: list[float]
    """The mean of a task's rewards; NaN if none of them is known."""
    counts: list[int]
    """How many rewards that is the mean of."""
    report: Report

    def by_taskset(self) -> dict[Hashable, dict[str, list[Any]]]:
        """For keys `(taskset, index)`: what a selector of tasks takes, without tasks whose rate is not known."""
        found: dict[Hashable, dict[str, list[Any]]] = {}
        for key, rate, count in zip(self.keys, self.rates, self.counts, strict=True):
            if not isinstance(key, tuple) or len(key) != 2:
                raise ValueError(f"keys: got {key!r}, expected pairs (taskset, index)")
            if count:
                part = found.setdefault(key[0], {"indices": [], "values": []})
                part["indices"].append(key[1])
                part["values"].append(rate)
        return found


# --- penalties ------------------------------------------------------------------------------------------------------


def shape_overlong(
    rewards: PerRow,
    lengths: PerRow,
    ids: Sequence[Hashable] | None = None,
    *,
    max_length: int,
    buffer: int = 1024,
    factor: float = 1.0,
    bounded: bool = True,
) -> Shaped:
    """Rewards with the `overlong_penalty` of their lengths added.

    >>> shaped = shape_overlong([1.0, 1.0, 1.0], [10, 7, 6], max_length=10, buffer=4)
    >>> shaped.rewards, shaped.report.which("overlong")
    (tensor([0.0000, 0.7500, 1.0000]), [0, 1])
    """
    before, sizes = as_rewards("rewards", rewards), whole_lengths(lengths)
    same_rows("lengths", sizes, before)
    lost = overlong(sizes, max_length, buffer, factor, bounded)
    return _shaped(rewards, before, before + lost, {"overlong": rows_where(lost < 0)}, ids)


def shape_length(
    rewards: PerRow,
    lengths: PerRow,
    ids: Sequence[Hashable] | None = None,
    *,
    target: int,
    per_token: float = 0.001,
    max_penalty: float = 1.0,
) -> Shaped:
    """Rewards with the `length_penalty` of their lengths added; those that lost by it are "over target".

    >>> shaped = shape_length([1.0, 1.0], [90, 150], target=100, per_token=0.01)
    >>> shaped.rewards, shaped.report.which("over target")
    (tensor([1.0000, 0.5000]), [1])
    """
    before, sizes = as_rewards("rewards", rewards), whole_lengths(lengths)
    same_rows("lengths", sizes, before)
    lost = over_target(sizes, target, per_token, max_penalty)
    return _shaped(rewards, before, before + lost, {"over target": rows_where(lost < 0)}, ids)


def shape_repetition(
    rewards: PerRow,
    tokens: PerToken,
    mask: PerToken | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    n: int = 20,
    max_penalty: float = 1.0,
) -> Shaped:
    """Rewards with the `repetition_penalty` of their tokens added; those that lost by it are under "repetition".

    >>> shaped = shape_repetition([1.0, 1.0], [[1, 2, 1, 2, 1], [1, 2, 3, 4]], n=2)
    >>> shaped.rewards, shaped.report.which("repetition")
    (tensor([0.5000, 1.0000]), [0])
    """
    before, layout = as_rewards("rewards", rewards), Layout.of(mask, tokens=tokens)
    if layout.rows != len(before):
        raise ValueError(f"tokens: got {layout.rows} rows, expected {len(before)}, one for each reward")
    lost = repeated(layout, tokens, n, max_penalty)
    return _shaped(rewards, before, before + lost, {"repetition": rows_where(lost < 0)}, ids)


def shape_rank(
    rewards: PerRow,
    groups: Any,
    log_probs: PerRow,
    runs: Any = None,
    ids: Sequence[Hashable] | None = None,
    *,
    penalty: float = 0.25,
    ranks: Ranks = ALONE,
) -> Shaped:
    """Rewards with the `rank_penalty` of their log-probs added; those that it changed are under "likely".

    A likely response with a reward below 0 comes nearer to 0.

    >>> shaped = shape_rank([1.0, 1.0, 0.0], ["a", "a", "a"], [-0.2, -0.9, -0.5], penalty=0.3)
    >>> shaped.rewards, shaped.report.which("likely")
    (tensor([0.8000, 1.0000, 0.0000]), [0])
    """
    before = as_rewards("rewards", rewards)
    lost = likely_lost(rewards, groups, log_probs, runs, penalty, ranks)
    return _shaped(rewards, before, before + lost, {"likely": rows_where(lost != 0)}, ids)


# --- the shaping of a rollout ----------------------------------------------------------------------------------------


def shape_rewards(
    rewards: torch.Tensor,
    lengths: PerRow,
    *,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    max_tokens: int | None = None,
    norm: RunningNorm | None = None,
    ranks: Ranks = ALONE,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Shape the rewards of a rollout: overlong penalty, then running norm.

    Args:
        rewards: [B] float32, NaN where a reward is missing.
        lengths: [B] response tokens.
        overlong_buffer: The last tokens before `max_tokens` that are penalized; 0: none.
        overlong_penalty: The penalty at the end of the buffer.
        max_tokens: The longest response.
        norm: Statistics of all rewards so far, which take these in.
        ranks: The processes that share the statistics.

    Returns:
        The rewards [B], and metrics.

    >>> shape_rewards(torch.tensor([1.0, 1.0]), [10, 6], overlong_buffer=4, max_tokens=10)[0]
    tensor([0., 1.])
    """
    metrics: dict[str, float] = {}
    if overlong_buffer:
        if max_tokens is None:
            raise ValueError("max_tokens: missing; the overlong buffer ends at the longest response")
        options: dict[str, Any] = {"max_length": max_tokens, "buffer": overlong_buffer, "factor": overlong_penalty}
        shaped = shape_overlong(rewards, lengths, **options)
        rewards, metrics = shaped.rewards, shaped.report.to_metrics("overlong")
    if norm is not None:
        shaped = norm(rewards, ranks=ranks)
        rewards, metrics = shaped.rewards, metrics | shaped.report.to_metrics("running_norm")
    return rewards, metrics


def clip_scores(scores: torch.Tensor, bounds: tuple[float, float] | None) -> tuple[torch.Tensor, dict[str, float]]:
    """Clip the scores (or rewards) of rows.

    Args:
        scores: [B], NaN where a reward is missing.
        bounds: (low, high); `None`: no bounds.

    Returns:
        The scores [B], and the metric `reward/clip_fraction` if there are bounds.

    >>> clip_scores(torch.tensor([3.0, -0.5]), (-1.0, 1.0))
    (tensor([ 1.0000, -0.5000]), {'reward/clip_fraction': 0.5})
    """
    if bounds is None:
        return scores, {}
    clipped = clip_rewards(scores, *bounds).rewards
    changed = ((clipped != scores) & ~scores.isnan()).float()
    return clipped, {"reward/clip_fraction": float(changed.mean()) if len(changed) else 0.0}


def normalize_advantages(
    advantages: PerToken,
    mask: PerToken,
    has_reward: torch.Tensor,
    *,
    normalize: str | None = None,
    clip: float = 0.0,
    ranks: Ranks = ALONE,
) -> tuple[Any, dict[str, float]]:
    """Normalize advantages over all rows with a reward, then clip them, so that the bound holds at the loss.

    Args:
        advantages: (B, A) or packed.
        mask: Which tokens count, in the same layout.
        has_reward: [B] bool: rows that have a reward.
        normalize: Subtract the `mean`, or also divide by the standard deviation (`mean_std`); `None`: neither.
        clip: The bound; 0: none.
        ranks: The processes whose rows are normalized together.

    Returns:
        The advantages in their layout, and the metric `advantage/clip_fraction` if there is a bound.

    >>> normalize_advantages(torch.tensor([[2.0, -0.5]]), torch.tensor([[1, 1]]), torch.tensor([True]), clip=1.0)
    (tensor([[ 1.0000, -0.5000]]), {'advantage/clip_fraction': 0.5})
    """
    if normalize is not None:
        layout = Layout.of(mask)
        counted = layout.give(layout.mask & layout.spread(has_reward))
        advantages = whiten(advantages, counted, eps_in="std", scale=normalize == "mean_std", ranks=ranks)
    if clip <= 0:
        return advantages, {}
    clipped = clip_advantages(advantages, mask, clip)
    return clipped.advantages, {"advantage/clip_fraction": clipped.fraction}


# --- operations on rewards ------------------------------------------------------------------------------------------


def shape_by(
    rewards: PerRow,
    values: PerRow,
    op: str = "add",
    weight: float = 1.0,
    ids: Sequence[Hashable] | None = None,
    *,
    reason: str = "changed",
) -> Shaped:
    """Rewards with `weight * values` added, subtracted, multiplied or divided by (`add`, `sub`, `mul`, `div`).

    rewards, values: (B,). In capitals too, as Trinity's reward_shaping_mapper has it. A reward is left as it is where
    its value is missing, and where it would be divided by 0; both are counted. Rows whose reward is another than before
    are reported under `reason`. In sequence: shape what came out.

    >>> shaped = shape_by([2.0, 2.0, None], [0.5, 0.0, 1.0], "div", 2.0)
    >>> shaped.rewards, shaped.report.which("zero divisor"), shaped.report.which("missing reward")
    (tensor([2., 2., nan]), [1], [2])
    >>> shape_by([1.0, 1.0], [0.0, -0.5], reason="style").report.which("style")
    [1]
    """
    choice("op", op.lower() if isinstance(op, str) else op, OPERATIONS)
    number("weight", weight)
    if not isinstance(reason, str) or not reason or reason in _OTHER_REASONS:
        raise ValueError(f"reason: got {reason!r}, expected a name other than {', '.join(map(repr, _OTHER_REASONS))}")
    before, by = as_rewards("rewards", rewards), as_rewards("values", values)
    same_rows("values", by, before)
    by = by * weight
    missing, kind = np.isnan(by), op.lower()
    zero = (by == 0) & (kind == "div")
    with np.errstate(all="ignore"):
        after = {"add": before + by, "sub": before - by, "mul": before * by}.get(kind, before / np.where(zero, 1, by))
    after = np.where(missing | zero, before, after)
    known = ~np.isnan(before)
    reasons = {"missing value": rows_where(missing & known), "zero divisor": rows_where(zero & known)}
    reasons[reason] = rows_where((after != before) & known)
    return _shaped(rewards, before, after, reasons, ids)


def clip_rewards(
    rewards: PerRow, low: float | None = None, high: float | None = None, ids: Sequence[Hashable] | None = None
) -> Shaped:
    """Rewards within `low` and `high`, each of which may be left out. LightRFT's `reward_clip` c is `-c, c`.

    >>> clipped = clip_rewards([20.0, None, -3.0, 0.5], -1.0, 10.0)
    >>> clipped.rewards, clipped.report.which("above"), clipped.report.which("below")
    (tensor([10.0000,     nan, -1.0000,  0.5000]), [0], [2])
    """
    least = -np.inf if low is None else number("low", low)
    most = np.inf if high is None else number("high", high)
    if least > most:
        raise ValueError(f"low: got {low}, expected at most high, {high}")
    before = as_rewards("rewards", rewards)
    reasons = {"below": rows_where(before < least), "above": rows_where(before > most)}
    return _shaped(rewards, before, np.clip(before, least, most), reasons, ids)


def difference(before: PerRow, after: PerRow) -> dict[str, float]:
    """By how much rewards were changed, over all rows; one that is missing or infinite, before or after, counts as 0.

    Each shaper's report has these numbers for its own step; this gives them for a sequence of steps.

    >>> difference([2.0, 2.0, None], [3.0, 2.0, None])
    {'reward_diff/mean': 0.3333333333333333, 'reward_diff/min': 0.0, 'reward_diff/max': 1.0}
    """
    first, last = as_rewards("before", before), as_rewards("after", after)
    same_rows("after", last, first)
    off = np.zeros(len(first))
    moved = np.isfinite(first) & np.isfinite(last)
    off[moved] = last[moved] - first[moved]
    if not len(off):
        return {}
    return {
        "reward_diff/mean": float(off.mean()),
        "reward_diff/min": float(off.min()),
        "reward_diff/max": float(off.max()),
    }


def clip_advantages(advantages: PerToken, mask: PerToken | None, bound: float, *, over: str = "tokens") -> Clipped:
    """Advantages within `-bound` and `bound`, and the share that was outside *before*, of the tokens that count.

    advantages, mask: (B, A) or packed. Clip last, after whitening, so that the bound holds at the loss. `over="slots"`
    gives shares of all slots, padding included, which is what LightRFT logs for its REINFORCE estimators (for GAE it
    measures after clipping, and always logs 0).

    >>> found = clip_advantages([[1.0, 1.0, 1.0], [2.0, -2.0]], None, 1.5)
    >>> found.advantages, found.fractions, found.fraction
    ([tensor([1., 1., 1.]), tensor([ 1.5000, -1.5000])], tensor([0., 1.]), 0.4)
    """
    number("bound", bound, 1e-30, what="a positive number")
    choice("over", over, ("tokens", "slots"))
    layout = Layout.of(mask, advantages=advantages)
    tokens = layout.take("advantages", advantages)
    outside = layout.row_sums((tokens.detach().abs() > bound).to(torch.float64)).cpu()
    counts = (layout.counts if over == "tokens" else layout.row_lengths).cpu()
    fraction = float(outside.sum() / counts.sum().clamp(min=1))
    report = Report(layout.rows, {"clipped": rows_where(outside > 0)}, {"clip_fraction": fraction})
    fractions = (outside / counts.clamp(min=1)).to(tokens.device, torch.float32)
    return Clipped(layout.give(tokens.clamp(-bound, bound)), fractions, fraction, report)


class RunningNorm:
    """Rewards divided by the deviation of all rewards there have been, in all processes; or first less their mean.

    Call it once for each rollout with all of its rewards: `norm(rewards)` takes them in and scales them,
    `norm(rewards, update=False)` only scales (evaluation). The state is exact to rounding whatever the order and
    however the rewards are cut into calls and ranks: counts, means and squares in float64, merged as by Chan, Golub
    and LeVeque (1979). The deviation is of the sample (n - 1). While it is at most `floor` rewards keep their scale, so
    that equal rewards and nearly equal ones are treated alike (and so is a single one), and nothing is ever made more
    than 1 / floor times as large. Missing and infinite rewards are not taken in.

    >>> norm = RunningNorm()
    >>> norm([1.0, 1.0]).rewards, norm([3.0, None, 3.0]).rewards, norm.count, norm.mean, round(norm.std, 4)
    (tensor([1., 1.]), tensor([2.5981,    nan, 2.5981]), 4, 2.0, 1.1547)
    >>> RunningNorm(minus_mean=True)([5.0, 5.0]).rewards
    tensor([0., 0.])
    >>> RunningNorm()([1.0, 1.0 + 1e-9]).rewards
    tensor([1., 1.])
    """

    def __init__(self, *, floor: float = 1e-3, minus_mean: bool = False) -> None:
        self.floor = number("floor", floor, 1e-30, what="a positive number")
        self.minus_mean = switch("minus_mean", minus_mean)
        self._state = (0, 0.0, 0.0, 0.0, 0.0)

    @property
    def count(self) -> int:
        """How many rewards were taken in."""
        return self._state[0]

    @property
    def mean(self) -> float:
        """Their mean: a number, which later updates leave as it is. Of equal rewards exactly that reward."""
        _, mean, _, low, high = self._state
        return low if low == high else mean

    @property
    def std(self) -> float:
        """Their deviation; exactly 0 if there are fewer than two, or all are equal."""
        count, _, squares, low, high = self._state
        return 0.0 if count < 2 or low == high else float((squares / (count - 1)) ** 0.5)

    @property
    def scale(self) -> float:
        """What rewards are divided by: the deviation where it is above the floor, else 1."""
        return self.std if self.std > self.floor else 1.0

    def update(self, rewards: PerRow, ranks: Ranks = ALONE) -> None:
        """Take in the rewards (B,) of one rollout, of every process."""
        values = as_rewards("rewards", rewards)
        own = np.sort(values[np.isfinite(values)])  # sorted: the same sum in any order
        part = (0, 0.0, 0.0, 0.0, 0.0)
        if len(own):
            mean = float(own.mean())
            part = (len(own), mean, float(((own - mean) ** 2).sum()), float(own[0]), float(own[-1]))
        for (found,) in ranks.gather([part]):
            self._state = _merged(self._state, found)

    def apply(self, rewards: PerRow, ids: Sequence[Hashable] | None = None) -> Shaped:
        """Scale rewards (B,) by what has been taken in."""
        before = as_rewards("rewards", rewards)
        shaped = (before - (self.mean if self.minus_mean else 0.0)) / self.scale
        return _shaped(rewards, before, shaped, {}, ids, {"running_mean": self.mean, "running_std": self.std})

    def __call__(
        self, rewards: PerRow, ids: Sequence[Hashable] | None = None, *, update: bool = True, ranks: Ranks = ALONE
    ) -> Shaped:
        """`update` and `apply`."""
        if switch("update", update):
            self.update(rewards, ranks)
        return self.apply(rewards, ids)

    def state_dict(self) -> dict[str, float]:
        """The state as plain numbers."""
        return dict(zip(_STATE, self._state, strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        state_of(state, _STATE)
        count = number("state: count", state["count"], 0, 2**63, "a whole number from 0 on")
        if not count.is_integer():
            raise ValueError(f"state: count: got {count}, expected a whole number from 0 on")
        most = float(np.finfo(np.float64).max)
        mean, low = (number(f"state: {name}", state[name], -most, most, "a finite number") for name in ("mean", "low"))
        squares = number("state: squares", state["squares"], 0, most, "a finite number of at least 0")
        high = number("state: high", state["high"], low, most, f"a finite number of at least low, {low:g}")
        self._state = (int(count), mean, squares, low, high)


_STATE = ("count", "mean", "squares", "low", "high")
_State = tuple[int, float, float, float, float]


def _merged(one: _State, other: _State) -> _State:
    if not one[0] or not other[0]:
        return other if not one[0] else one
    count, off = one[0] + other[0], other[1] - one[1]
    mean = one[1] + off * other[0] / count
    squares = one[2] + other[2] + off * off * one[0] * other[0] / count
    return count, mean, squares, min(one[3], other[3]), max(one[4], other[4])


def pass_rates(rewards: PerRow, keys: Sequence[Hashable]) -> PassRates:
    """The mean reward of each task, and how many tasks are neither solved nor hopeless.

    rewards, keys: (B,); `(taskset, index)` pairs as keys make `by_taskset` work. The ratios are shares of the tasks
    whose rate is known (of none: 0): `valid_ratio` has a rate within (0, 1), `strict_valid_ratio` within (1/16, 15/16).

    >>> found = pass_rates([1.0, 0.0, 1.0, None], [(0, 7), (0, 7), (1, 3), (1, 3)])
    >>> found.rates, found.report.metrics["valid_ratio"], found.by_taskset()[0]
    ([0.5, 1.0], 0.5, {'indices': [7], 'values': [0.5]})
    """
    grouped = Grouped(rewards, as_ids("keys", keys, len(as_rewards("rewards", rewards))))
    known = grouped.count > 0
    rates = grouped.mean[known]
    shares = {
        "valid_ratio": (rates > 0) & (rates < 1),
        "strict_valid_ratio": (rates > 1 / 16) & (rates < 15 / 16),
        "<1_ratio": rates < 1,
        ">0_ratio": rates > 0,
        "<15_16_ratio": rates < 15 / 16,
        ">1_16_ratio": rates > 1 / 16,
    }
    metrics = {name: float(share.mean()) if len(rates) else 0.0 for name, share in shares.items()}
    missing = np.isnan(grouped.values)
    reasons = {"missing reward": rows_where(missing), "infinite reward": rows_where(~grouped.valid & ~missing)}
    means = np.where(known, grouped.mean, np.nan).tolist()
    return PassRates(grouped.keys, means, grouped.count.tolist(), Report(grouped.rows, reasons, metrics))


# --- shared ---------------------------------------------------------------------------------------------------------


def _shaped(
    rewards: PerRow,
    before: Floats,
    after: Floats,
    reasons: Mapping[str, Sequence[int]],
    ids: Sequence[Hashable] | None,
    metrics: Mapping[str, float] | None = None,
) -> Shaped:
    found = {"missing reward": rows_where(np.isnan(before)), "infinite reward": rows_where(np.isinf(before)), **reasons}
    report = Report(len(before), found, {**difference(before, after), **(metrics or {})})
    return Shaped(given_back(rewards, after), report if ids is None else report.with_ids(ids))
