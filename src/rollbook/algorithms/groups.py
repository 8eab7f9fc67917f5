"""Statistics of rewards by group id, and of tokens over a batch: means, deviations, whitening.

Invariant: statistics depend only on which rows are in a group, and are bit-equal for every order of the rows. Rows
without a finite reward are in no statistic, and a run of several rows counts once. A group of equal rewards has a
deviation of exactly 0, and deviates from its mean by exactly 0, regardless of rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import hypot
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rollbook.algorithms.layout import Ids, Layout, PerRow, PerToken
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.algorithms.scan import spread_scores
from rollbook.core.checks import check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_process_group

STD = ("sample", "population")
"""Standard deviations: divided by n - 1, or by n."""
SINGLETON = ("zero", "raw")
"""Scores of a row that is alone in its group: 0, or its reward."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the tokens that count."""

    count: int
    mean: float
    squares: float
    constant: bool
    """Whether all are equal. Their deviation is then exactly 0, regardless of rounding."""

    def std(self, kind: str = "sample") -> float:
        """Return the deviation, divided by n - 1 (`sample`) or n (`population`); 0 for fewer than two tokens."""
        check_choice("std", kind, STD)
        if self.constant or self.count < 2:
            return 0.0
        return float((self.squares / (self.count - (kind == "sample"))) ** 0.5)


def moments(tokens: torch.Tensor, mask: torch.Tensor, process_group: ProcessGroup = SINGLE_PROCESS) -> Moments:
    """Compute the moments of masked tokens over all processes, in two passes to avoid cancellation.

    >>> result = moments(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    >>> result.count, result.mean, result.std("population")
    (2, 2.0, 1.0)
    """
    check_process_group(process_group)
    counted = tokens.detach()[mask].to(torch.float64)
    ends = (counted.amin(), counted.amax()) if len(counted) else (counted.new_zeros(()), counted.new_zeros(()))
    total, low, high = torch.stack([counted.sum(), *ends]).tolist()
    count, total = process_group.sum(torch.tensor([float(len(counted)), total], dtype=torch.float64)).tolist()
    every = [end for rank_ends in process_group.gather([low, high] if len(counted) else []) for end in rank_ends]
    constant = len(set(every)) <= 1
    # The mean of equal tokens is exactly their value; a rounded sum would differ from it.
    mean = every[0] if every and constant else total / max(count, 1)
    squares = process_group.sum(((counted - mean) ** 2).sum().cpu())
    return Moments(int(count), mean, float(squares), constant)


def whiten(
    values: PerToken,
    mask: PerToken | None = None,
    *,
    std: str = "sample",
    eps: float = 1e-8,
    eps_in: str = "variance",
    shift_mean: bool = True,
    scale: bool = True,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Any:
    """Scale tokens that count to mean 0 and deviation 1, over the whole batch of all processes.

    Call it once, on the global batch: whitening twice, or per micro-batch, is another estimator. Equal tokens, and a
    single token, become exactly 0 (or their mean, with `shift_mean=False`).

    Args:
        values: [B, R] or packed.
        mask: [B, R] or packed: which tokens count. `None`: all.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: A small constant; `eps_in` says where it is added.
        eps_in: `"variance"`: added to the variance (verl, Trinity); `"std"`: added to the deviation (LightRFT);
            `"floor"`: the smallest variance.
        shift_mean: Whether to subtract the mean.
        scale: Whether to divide by the deviation.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Tokens in the layout of `values`, 0 where the mask is False.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> whiten(torch.tensor([[1.0, 2.0], [3.0, 100.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """
    check_choice("eps_in", eps_in, ("variance", "std", "floor"))
    check_float("eps", eps, 0)
    layout = Layout.from_tokens(mask, values=values)
    tokens = layout.take("values", values)
    statistics = moments(tokens, layout.mask, process_group)
    deviation = statistics.std(std)
    scaled = tokens.to(torch.float64) - statistics.mean
    divisor = denominator(deviation, eps, eps_in) if scale else 1.0
    scaled = (
        torch.zeros_like(scaled) if statistics.constant or statistics.count < 2 or not divisor else scaled / divisor
    )
    if not shift_mean:
        scaled = scaled + statistics.mean
    return layout.restore(layout.masked(scaled).to(tokens.dtype))


def denominator(deviation: float, eps: float, eps_in: str) -> float:
    """Compute the divisor of whitening."""
    if eps_in == "std":
        return deviation + eps
    if eps_in == "floor":
        return max(deviation, float(eps**0.5))
    return hypot(deviation, eps**0.5)  # squaring by hand could underflow to 0


def as_rewards(name: str, rewards: PerRow) -> Floats:
    """Convert rewards to float64; a missing one (`None`) becomes NaN.

    Args:
        name: Name of the argument, for errors.
        rewards: [B] The rewards.

    Returns:
        [B] The rewards, on the host.

    >>> as_rewards("rewards", [1, None, 0.5]).tolist()
    [1.0, nan, 0.5]
    """
    if isinstance(rewards, (str, bytes)) or not hasattr(rewards, "__iter__"):
        raise ValueError(f"{name}: got {rewards!r}, expected one number for each row")
    if isinstance(rewards, torch.Tensor):
        # A copy: reports are built later, when the tensor may have changed.
        numbers: Floats = rewards.detach().to("cpu", torch.float64, copy=True).numpy()
    else:
        try:
            numeric = isinstance(rewards, np.ndarray) and rewards.dtype.kind in "fiub"
            entries = rewards if numeric else list(rewards)
            text = None if numeric else next((entry for entry in entries if isinstance(entry, (str, bytes))), None)
            if text is not None:
                raise ValueError(f"{text!r} is text")
            numbers = np.array(entries, dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected numbers or None: {error}") from None
    if numbers.ndim != 1:
        raise ValueError(f"{name}: got {numbers.ndim} dimensions, expected one number for each row")
    return numbers


def as_ids(name: str, ids: Ids, rows: int) -> Any:
    """Convert ids to a list or an integer array, and check that there is one for each row. Shape: [B]."""
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu().numpy()
    if isinstance(ids, (str, bytes, Set, Mapping)) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{name}: got {ids!r}, expected {rows} ids, one for each row, in their order")
    checked = ids if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" else list(ids)
    if len(checked) != rows:
        raise ValueError(f"{name}: got {len(checked)}, expected {rows}, one for each row")
    return checked


def number_ids(name: str, ids: Iterable[Hashable]) -> tuple[NDArray[np.int64], list[Hashable]]:
    """Number ids from 0 in order of first appearance; also return the distinct ids in that order. Shape: [B]."""
    if isinstance(ids, np.ndarray):
        if (ids[:-1] <= ids[1:]).all():  # already sorted
            starts = np.ones(len(ids), dtype=np.bool_)
            np.not_equal(ids[:-1], ids[1:], out=starts[1:])
            return starts.cumsum() - 1, ids[starts].tolist()
        coded = pa.array(ids).dictionary_encode()
        return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary.to_pylist()
    numbers: dict[Hashable, int] = {}
    try:
        index = [numbers.setdefault(key, len(numbers)) for key in ids]
    except TypeError as error:
        raise ValueError(f"{name}: expected hashable ids ({error}); for an EID, use its `tid` or `rid`") from None
    return np.array(index, dtype=np.int64), list(numbers)


def _range_by_index(values: Floats, index: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """Return the smallest and largest value of each index; infinite if it has none. Shape: [count]."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return low, high


def segment_sums(values: Floats, index: NDArray[np.int64], count: int) -> Floats:
    """Sum the values of each index in ascending order, so that the order of rows has no effect. Shape: [count]."""
    order = np.lexsort((values, index))
    sums = np.zeros(count)
    if len(order):
        sorted_index = index[order]
        starts = np.flatnonzero(np.r_[True, sorted_index[1:] != sorted_index[:-1]])
        sums[sorted_index[starts]] = np.add.reduceat(values[order], starts)
    return sums


def block_sums(blocks: Floats) -> Floats:
    """Sum each row of a matrix in the order of its columns, as `segment_sums` does. Shape: [groups, 1]."""
    return np.add.reduceat(blocks, _FIRST_COLUMN, axis=1)


_FIRST_COLUMN = np.zeros(1, dtype=np.intp)


class Grouped:
    """Rewards by group, over the rows of all processes.

    Float64 rewards give float64 scores, all others float32.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        runs: [B] Run id of each row. Rows that share a run are one sample of their group, whose reward is the mean over
            the rows, and whose squared deviation is the mean over theirs. `None`: every row is a run.
        process_group: Processes over whose rows statistics are computed.

    >>> grouped = Grouped([1.0, 0.0, None, 5.0], ["a", "a", "a", "b"])
    >>> grouped.group_ids, grouped.count.tolist(), grouped.mean.tolist(), grouped.std("sample").round(4).tolist()
    (['a', 'b'], [2, 1], [0.5, 5.0], [0.7071, 0.0])
    >>> grouped.centered().tolist()
    [0.5, -0.5, 0.0, 0.0]
    """

    def __init__(
        self, rewards: PerRow, groups: Ids, runs: Ids | None = None, process_group: ProcessGroup = SINGLE_PROCESS
    ) -> None:
        numbers = as_rewards("rewards", rewards)
        names = as_ids("groups", groups, len(numbers))
        labels = as_ids("runs", runs, len(numbers)) if runs is not None else None
        self._std: dict[str, Floats] = {}
        self.rows = len(numbers)
        """B, the number of rows of this process."""
        wide = isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64
        self.dtype = torch.float64 if wide else torch.float32
        self.device = rewards.device if isinstance(rewards, torch.Tensor) else torch.device("cpu")
        first = 0
        if check_process_group(process_group) is not SINGLE_PROCESS:
            parts = process_group.gather([numbers, names, labels])
            first = sum(len(shard[0]) for shard in parts[: process_group.rank])
            numbers = np.concatenate([shard[0] for shard in parts])
            names = [name for shard in parts for name in list(shard[1])]
            labels = [label for shard in parts for label in shard[2]] if labels is not None else None
        self.local = slice(first, first + self.rows)
        """The rows of this process among all rows."""
        self.values = numbers
        """[all rows] Rewards, NaN where they are missing."""
        self.valid = np.isfinite(numbers)
        """[all rows] Whether the reward is finite."""
        self.index, self.group_ids = number_ids("groups", names)
        if labels is None:
            self.run, self.run_group = np.arange(len(numbers)), self.index
        else:
            self.run, pairs = number_ids("runs", list(zip(self.index.tolist(), labels, strict=True)))
            self.run_group = np.array([pair[0] for pair in pairs], dtype=np.int64)  # type: ignore[index]
        self.row_is_run = len(self.run_group) == len(self.values)
        """Whether every row is a run of its own."""

    @cached_property
    def block(self) -> int:
        """Group size if rows are contiguous groups of equal size, with all rewards and one run per row; else 0."""
        size = len(self.values) // max(len(self.group_ids), 1)
        even = size and size * len(self.group_ids) == len(self.values) and self.row_is_run and self.valid.all()
        return size if even and (self.index.reshape(-1, size) == np.arange(len(self.group_ids))[:, None]).all() else 0

    @cached_property
    def run_values(self) -> Floats:
        """[runs] Reward of each run; NaN if none of its rows has one."""
        return self.values if self.row_is_run else self.over_runs(self.values)

    def over_runs(self, per_row: Floats) -> Floats:
        """Compute the mean over a run's rows that have a reward; exact for equal numbers; NaN without any.

        Returns:
            [runs] One number per run.
        """
        run, valid_values = self.run[self.valid], per_row[self.valid]
        count = np.bincount(run, minlength=len(self.run_group))
        with np.errstate(invalid="ignore"):
            means = segment_sums(valid_values, run, len(count)) / count
        low, high = _range_by_index(valid_values, run, len(count))
        return np.where(low == high, low, means)

    @cached_property
    def run_valid(self) -> NDArray[np.bool_]:
        """[runs] Whether a run has a reward."""
        return np.isfinite(self.run_values)

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """[groups] Number of runs with a reward."""
        if self.block:
            return np.full(len(self.group_ids), self.block)
        return np.bincount(self.run_group[self.run_valid], minlength=len(self.group_ids)).astype(np.int64)

    @cached_property
    def _in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs with a reward, by group and ascending reward; the start of each group that has any; and those groups."""
        if self.block:
            starts = np.arange(0, len(self.values), self.block)
            order = self.values.reshape(-1, self.block).argsort(axis=1, kind="stable") + starts[:, None]
            return order.reshape(-1), starts, np.arange(len(starts))
        has_reward = np.flatnonzero(self.run_valid)
        order = has_reward[np.lexsort((self.run_values[has_reward], self.run_group[has_reward]))]
        groups = self.run_group[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else np.zeros(0, dtype=np.int64)
        return order, starts, groups[starts]

    def _sums(self, per_run: Floats) -> Floats:
        """Sum over the runs with a reward, in the order of their rewards. Shape: [groups]."""
        order, starts, groups = self._in_order
        sums = np.zeros(len(self.group_ids))
        if len(order):
            sums[groups] = np.add.reduceat(per_run[order], starts)
        return sums

    @cached_property
    def reward_range(self) -> tuple[Floats, Floats]:
        """[groups] Smallest and largest reward of a row; infinite for a group without rewards."""
        if self.block:
            ascending = np.sort(self.values.reshape(-1, self.block), axis=1)
            return ascending[:, 0], ascending[:, -1]
        if not self.row_is_run:
            return _range_by_index(self.values[self.valid], self.index[self.valid], len(self.group_ids))
        order, starts, groups = self._in_order
        low, high = np.full(len(self.group_ids), np.inf), np.full(len(self.group_ids), -np.inf)
        low[groups] = self.run_values[order[starts]]
        high[groups] = self.run_values[order[np.r_[starts[1:], len(order)] - 1]] if len(order) else []
        return low, high

    @cached_property
    def constant(self) -> NDArray[np.bool_]:
        """[groups] Whether a group has several rewards, all equal."""
        low, high = self.reward_range
        return np.equal(low, high) & (self.count > 1)

    @cached_property
    def singleton(self) -> NDArray[np.bool_]:
        """[groups] Whether a group has one reward."""
        return np.equal(self.count, 1)

    @cached_property
    def mean(self) -> Floats:
        """[groups] Mean reward; exact for equal rewards; 0 without any."""
        if self.block:
            ascending = np.sort(self.values.reshape(-1, self.block), axis=1)
            means = np.add.reduceat(ascending.reshape(-1), np.arange(0, ascending.size, self.block)) / self.block
            return np.where(ascending[:, 0] == ascending[:, -1], ascending[:, 0], means)
        low, high = self.reward_range
        return np.where(low == high, low, self._sums(self.run_values) / np.maximum(self.count, 1))

    def std(self, kind: str = "sample") -> Floats:
        """Compute the deviation, with n - 1 (`sample`) or n (`population`); exactly 0 if constant or alone.

        Returns:
            [groups] One number per group.
        """
        check_choice("std", kind, STD)
        if kind not in self._std:
            squares = (self.values - self.per_row(self.mean)) ** 2
            if self.row_is_run:
                sums = self._sums(squares)
            else:  # rows of one run may differ: each run contributes the mean of its rows' squares
                of_runs = self.over_runs(squares)
                sums = segment_sums(of_runs[self.run_valid], self.run_group[self.run_valid], len(self.group_ids))
            deviations = np.sqrt(sums / np.maximum(self.count - (kind == "sample"), 1))
            self._std[kind] = np.where(self.count > 1, deviations, 0.0)
        return self._std[kind]

    def batch_std(self, kind: str = "sample") -> float:
        """Compute the deviation of the rewards of all runs."""
        check_choice("std", kind, STD)
        values = np.sort(self.run_values[self.run_valid])
        if len(values) < 2 or values[0] == values[-1]:
            return 0.0
        return float(values.std(ddof=int(kind == "sample")))

    def per_row(self, per_group: NDArray[Any]) -> NDArray[Any]:
        """Return the entry of each row's group. Shape: [all rows]."""
        if self.block:
            return per_group.repeat(self.block)
        return per_group[self.index]

    def centered(self) -> Floats:
        """Subtract the group's mean from each reward; 0 where a reward is missing. Shape: [all rows]."""
        return self.zero_missing(self.values - self.per_row(self.mean))

    def divide(self, centered: Floats, divisor: Floats | float) -> Floats:
        """Divide deviations; exactly 0 stays 0, even with a divisor of 0. Shape: [all rows]."""
        return np.where(centered == 0, 0.0, centered / np.where(np.asarray(divisor) > 0, divisor, 1.0))

    def zero_missing(self, scores: Floats) -> Floats:
        """Set scores to 0 where a reward is missing, and turn -0.0 into 0.0. Shape: [all rows]."""
        return (scores if self.block else np.where(self.valid, scores, 0.0)) + 0.0

    def fill_singletons(self, scores: Floats, singleton: str) -> Floats:
        """Set the scores of singleton groups to 0 (`zero`) or to their reward (`raw`). Shape: [all rows]."""
        check_choice("singleton", singleton, SINGLETON)
        if self.block > 1:
            return scores
        lone = self.zero_missing(self.values) if singleton == "raw" else np.zeros(len(self.values))
        return np.where(self.per_row(self.singleton), lone, scores)

    def report(self) -> Report:
        """Build the report: rows of this process, and metrics of the groups of all processes."""
        local, valid = self.local, self.valid[self.local]
        missing = np.isnan(self.values[local])
        lone = valid & self.per_row(self.singleton)[local]
        rows = np.bincount(self.index[self.valid], minlength=len(self.group_ids))
        reasons = {
            "missing reward": rows_where(missing),
            "infinite reward": rows_where(~valid & ~missing),
            "singleton group": rows_where(lone),
            "constant group": rows_where(valid & self.per_row(self.constant)[local]),
        }
        if not self.row_is_run:
            # Perhaps these rows were meant to be separate samples, and the caller forgot to give each a run.
            reasons["one run alone, in several rows"] = rows_where(lone & (self.per_row(rows)[local] > 1))
        has_reward = self.count > 0
        metrics = {
            "groups": float(len(self.group_ids)),
            "constant_groups": float(self.constant.sum()),
            "singleton_groups": float(self.singleton.sum()),
        }
        for name, statistic in (("reward_mean", self.mean[has_reward]), ("reward_std", self.std()[has_reward])):
            if len(statistic):
                metrics |= {f"{name}/mean": float(statistic.mean()), f"{name}/max": float(statistic.max())}
                metrics[f"{name}/min"] = float(statistic.min())
        return Report(self.rows, reasons, metrics)

    def to_advantages(self, scores: Floats, mask: PerToken | None, report: Report | None = None) -> Advantages:
        """Spread scores [all rows] of this process over the tokens that count; without a mask, return them per row."""
        local_scores = np.ascontiguousarray(scores[self.local])
        if self.dtype == torch.float32:
            with np.errstate(over="ignore"):
                local_scores = local_scores.astype(np.float32)
        finite = np.isfinite(local_scores)

        def build_report() -> Report:
            base = report or self.report()
            # Rewards so large that their differences overflow, or overflow in float32.
            return base if finite.all() else base.plus({"not finite": rows_where(~finite)})

        row_scores = torch.from_numpy(local_scores).to(self.device)
        if mask is None:
            return Advantages(row_scores.clone(), None, row_scores, None, build_report)
        layout = Layout.from_tokens(mask)
        if layout.rows != len(row_scores):
            raise ValueError(f"mask: got {layout.rows} rows, expected {len(row_scores)}, one for each reward")
        on_device = row_scores.to(layout.mask.device)
        if layout.packed and layout.mask.device.type == "cpu":
            tokens = spread_scores(on_device, layout.mask, layout.offsets)
        else:
            tokens = layout.masked(layout.spread(on_device))
        return Advantages(layout.restore(tokens), None, row_scores, mask, build_report)


def last_steps(steps: Sequence[int], run: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the row of the largest step of each run. Shape: [runs]."""
    order = np.lexsort((np.arange(len(steps)), np.asarray(steps), run))
    last = np.zeros(count, dtype=np.int64)
    last[run[order]] = order  # larger steps overwrite smaller ones
    return last
