"""Statistics of rewards by group id, and of tokens over a batch: means, deviations, whitening.

Invariant: statistics depend only on which rows are in a group, and are bit-equal for every order of the rows. Rows
without a finite reward are in no statistic, and a run of several rows counts once. A group of equal rewards has a
deviation of exactly 0, and deviates from its mean by exactly 0, regardless of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
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
from rollbook.algorithms.scan import spread_scan
from rollbook.core.checks import check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_process_group

STD = ("sample", "population")
SINGLETON = ("zero", "raw")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the tokens that count."""

    count: int
    mean: float
    squares: float
    constant: bool
    """Whether all of them are equal: their deviation is then exactly 0, whatever rounding says."""

    def std(self, kind: str = "sample") -> float:
        """The deviation, divided by n - 1 (`sample`) or by n (`population`); 0 for fewer than two tokens."""
        check_choice("std", kind, STD)
        if self.constant or self.count < 2:
            return 0.0
        return float((self.squares / (self.count - (kind == "sample"))) ** 0.5)


def moments(tokens: torch.Tensor, mask: torch.Tensor, process_group: ProcessGroup = SINGLE_PROCESS) -> Moments:
    """The moments of `tokens` where `mask`, over all processes of `process_group`; two passes, so that nothing cancels.

    >>> found = moments(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    >>> found.count, found.mean, found.std("population")
    (2, 2.0, 1.0)
    """
    check_process_group(process_group)
    counted = tokens.detach()[mask].to(torch.float64)
    ends = (counted.amin(), counted.amax()) if len(counted) else (counted.new_zeros(()), counted.new_zeros(()))
    total, low, high = torch.stack([counted.sum(), *ends]).tolist()
    count, total = process_group.sum(torch.tensor([float(len(counted)), total], dtype=torch.float64)).tolist()
    every = [end for part in process_group.gather([low, high] if len(counted) else []) for end in part]
    constant = len(set(every)) <= 1
    # Of equal tokens exactly that: a rounded mean would lie beside every one of them.
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

    Call it once, on the global batch: twice, or batch by batch, is another estimator. Equal tokens become exactly 0,
    and so does a single one (their mean, if that is kept).

    Args:
        values: [B, R] or packed.
        mask: [B, R] or packed: which tokens count. `None`: all.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the variance, or as `eps_in` says.
        eps_in: `"variance"` (verl, Trinity); `"std"`: added to the deviation (LightRFT); `"floor"`: the smallest
            variance.
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
    layout = Layout.of(mask, values=values)
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
    return layout.give(layout.masked(scaled).to(tokens.dtype))


def denominator(deviation: float, eps: float, eps_in: str) -> float:
    """What deviations are divided by."""
    if eps_in == "std":
        return deviation + eps
    if eps_in == "floor":
        return max(deviation, float(eps**0.5))
    return hypot(deviation, eps**0.5)  # and not the root of a sum of squares, which may be 0 when both are not


def as_rewards(name: str, rewards: PerRow) -> Floats:
    """[B] Rewards as float64; `None` is NaN, which means that there is none.

    >>> as_rewards("rewards", [1, None, 0.5]).tolist()
    [1.0, nan, 0.5]
    """
    if isinstance(rewards, (str, bytes)) or not hasattr(rewards, "__iter__"):
        raise ValueError(f"{name}: got {rewards!r}, expected one number for each row")
    if isinstance(rewards, torch.Tensor):
        numbers: Floats = rewards.detach().to("cpu", torch.float64, copy=True).numpy()  # reports are made later
    else:
        try:
            numeric = isinstance(rewards, np.ndarray) and rewards.dtype.kind in "fiub"
            entries = rewards if numeric else list(rewards)
            text = None if numeric else next((entry for entry in entries if isinstance(entry, (str, bytes))), None)
            if text is not None:
                raise ValueError(f"{text!r} is text")
            numbers = np.array(entries, dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: got what is no number or None: {error}") from None
    if numbers.ndim != 1:
        raise ValueError(f"{name}: got {numbers.ndim} dimensions, expected one number for each row")
    return numbers


def as_ids(name: str, ids: Ids, rows: int) -> Any:
    """[B] Ids as a list of hashable things, or as an array of whole numbers; one for each row."""
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu().numpy()
    if isinstance(ids, (str, bytes, Set, Mapping)) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{name}: got {ids!r}, expected {rows} ids, one for each row, in their order")
    checked = ids if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" else list(ids)
    if len(checked) != rows:
        raise ValueError(f"{name}: got {len(checked)}, expected {rows}, one for each row")
    return checked


def numbered(name: str, ids: Iterable[Hashable]) -> tuple[NDArray[np.int64], list[Hashable]]:
    """[B] The number of each id, counted from 0 as they first appear, and the ids in that order."""
    if isinstance(ids, np.ndarray):
        if (ids[:-1] <= ids[1:]).all():  # in order already
            starts = np.ones(len(ids), dtype=np.bool_)
            np.not_equal(ids[:-1], ids[1:], out=starts[1:])
            return starts.cumsum() - 1, ids[starts].tolist()
        coded = pa.array(ids).dictionary_encode()
        return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary.to_pylist()
    numbers: dict[Hashable, int] = {}
    try:
        index = [numbers.setdefault(key, len(numbers)) for key in ids]
    except TypeError as error:
        raise ValueError(f"{name}: got an id that cannot be a key ({error}); of an EID use `tid` or `rid`") from None
    return np.array(index, dtype=np.int64), list(numbers)


def _ends(values: Floats, index: NDArray[np.int64], count: int) -> tuple[Floats, Floats]:
    """[count] The least and the largest of each index's values; infinite where there is none."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return low, high


def segment_sums(values: Floats, index: NDArray[np.int64], count: int) -> Floats:
    """[count] The sum of the values of each index, added up from the least to the largest: the same in any order."""
    order = np.lexsort((values, index))
    sums = np.zeros(count)
    if len(order):
        sorted_index = index[order]
        starts = np.flatnonzero(np.r_[True, sorted_index[1:] != sorted_index[:-1]])
        sums[sorted_index[starts]] = np.add.reduceat(values[order], starts)
    return sums


def sums_of_blocks(blocks: Floats) -> Floats:
    """[groups] The sum of each row of a matrix, added up as `segment_sums` does."""
    return np.add.reduceat(blocks.reshape(-1), np.arange(0, blocks.size, blocks.shape[1]))


def block_means(blocks: Floats) -> tuple[Floats, Floats]:
    """Sort the rewards of each group and compute its mean, exactly the reward if all are equal.

    Args:
        blocks: [groups, n] finite rewards.

    Returns:
        [groups, n] the rewards in ascending order, and [groups] the means.
    """
    ascending = blocks.copy()
    ascending.sort(axis=1)
    low = ascending[:, 0]
    starts = np.arange(0, ascending.size, ascending.shape[1])
    means = np.add.reduceat(ascending.reshape(-1), starts)
    means /= blocks.shape[1]
    np.copyto(means, low, where=low == ascending[:, -1])
    return ascending, means


class Grouped:
    """Rewards and the groups they belong to, over the rows of all processes.

    rewards: (B,), `None` or NaN where there is none; groups: (B,) ids. With `runs`, (B,) ids, rows of one group that
    share a run are one sample of it: its reward is the mean over its rows, and it counts once, with the mean of its
    rows' squared deviations. (Float64 tensors give float64 scores, anything else float32.)

    >>> grouped = Grouped([1.0, 0.0, None, 5.0], ["a", "a", "a", "b"])
    >>> grouped.keys, grouped.count.tolist(), grouped.mean.tolist(), grouped.std("sample").round(4).tolist()
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
        """B, the rows of this process."""
        wide = isinstance(rewards, torch.Tensor) and rewards.dtype == torch.float64
        self.dtype = torch.float64 if wide else torch.float32
        self.device = rewards.device if isinstance(rewards, torch.Tensor) else torch.device("cpu")
        first = 0
        if check_process_group(process_group) is not SINGLE_PROCESS:
            parts = process_group.gather([numbers, names, labels])
            first = sum(len(part[0]) for part in parts[: process_group.rank])
            numbers = np.concatenate([part[0] for part in parts])
            names = [name for part in parts for name in list(part[1])]
            labels = [label for part in parts for label in part[2]] if labels is not None else None
        self.own = slice(first, first + self.rows)
        """Which of all rows are this process's."""
        self.values = numbers
        """[all rows] Rewards, NaN where there is none."""
        self.valid = np.isfinite(numbers)
        """[all rows] Whether there is a finite reward."""
        self.index, self.keys = numbered("groups", names)
        if labels is None:
            self.run, self.run_group = np.arange(len(numbers)), self.index
        else:
            self.run, pairs = numbered("runs", list(zip(self.index.tolist(), labels, strict=True)))
            self.run_group = np.array([pair[0] for pair in pairs], dtype=np.int64)  # type: ignore[index]
        self.row_is_run = len(self.run_group) == len(self.values)
        """Whether every row is a run of its own."""

    @cached_property
    def block(self) -> int:
        """The size of the groups if rows lie group by group, as many of each, all with a reward and a run of their own;
        else 0."""
        size = len(self.values) // max(len(self.keys), 1)
        even = size and size * len(self.keys) == len(self.values) and self.row_is_run and self.valid.all()
        return size if even and (self.index.reshape(-1, size) == np.arange(len(self.keys))[:, None]).all() else 0

    @cached_property
    def run_values(self) -> Floats:
        """[runs] The reward of each run; NaN if none of its rows has one."""
        return self.values if self.row_is_run else self.over_runs(self.values)

    def over_runs(self, per_row: Floats) -> Floats:
        """[runs] The mean over a run's rows with a reward; of equal numbers exactly that one; NaN if there is none."""
        run, valid_values = self.run[self.valid], per_row[self.valid]
        count = np.bincount(run, minlength=len(self.run_group))
        with np.errstate(invalid="ignore"):
            means = segment_sums(valid_values, run, len(count)) / count
        low, high = _ends(valid_values, run, len(count))
        return np.where(low == high, low, means)

    @cached_property
    def run_valid(self) -> NDArray[np.bool_]:
        """[runs] Whether a run has a reward."""
        return np.isfinite(self.run_values)

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """[groups] How many runs with a reward each group has."""
        if self.block:
            return np.full(len(self.keys), self.block)
        return np.bincount(self.run_group[self.run_valid], minlength=len(self.keys)).astype(np.int64)

    @cached_property
    def _in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The runs with a reward, group by group from the least reward to the largest; where each group with any
        begins among them; and which groups those are."""
        if self.block:
            starts = np.arange(0, len(self.values), self.block)
            order = self.values.reshape(-1, self.block).argsort(axis=1, kind="stable") + starts[:, None]
            return order.reshape(-1), starts, np.arange(len(starts))
        has_reward = np.flatnonzero(self.run_valid)
        order = has_reward[np.lexsort((self.run_values[has_reward], self.run_group[has_reward]))]
        of = self.run_group[order]
        starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]]) if len(of) else np.zeros(0, dtype=np.int64)
        return order, starts, of[starts]

    def _sums(self, per_run: Floats) -> Floats:
        """[groups] The sum over a group's runs with a reward, in the order of their rewards."""
        order, starts, groups = self._in_order
        sums = np.zeros(len(self.keys))
        if len(order):
            sums[groups] = np.add.reduceat(per_run[order], starts)
        return sums

    @cached_property
    def ends(self) -> tuple[Floats, Floats]:
        """[groups] The least and the largest reward of a group's rows; infinite for a group without any."""
        if self.block:
            ascending = np.sort(self.values.reshape(-1, self.block), axis=1)
            return ascending[:, 0], ascending[:, -1]
        if not self.row_is_run:
            return _ends(self.values[self.valid], self.index[self.valid], len(self.keys))
        order, starts, groups = self._in_order
        low, high = np.full(len(self.keys), np.inf), np.full(len(self.keys), -np.inf)
        low[groups] = self.run_values[order[starts]]
        high[groups] = self.run_values[order[np.r_[starts[1:], len(order)] - 1]] if len(order) else []
        return low, high

    @cached_property
    def constant(self) -> NDArray[np.bool_]:
        """[groups] Whether a group has several rewards, all equal."""
        low, high = self.ends
        return np.equal(low, high) & (self.count > 1)

    @cached_property
    def singleton(self) -> NDArray[np.bool_]:
        """[groups] Whether a group has one reward."""
        return np.equal(self.count, 1)

    @cached_property
    def mean(self) -> Floats:
        """[groups] The mean reward; of equal rewards exactly that reward; 0 if there is none."""
        if self.block:
            return block_means(self.values.reshape(-1, self.block))[1]
        low, high = self.ends
        return np.where(low == high, low, self._sums(self.run_values) / np.maximum(self.count, 1))

    def std(self, kind: str = "sample") -> Floats:
        """[groups] The deviation, over n - 1 (`sample`) or n (`population`); exactly 0 if constant or alone."""
        check_choice("std", kind, STD)
        if kind not in self._std:
            squares = (self.values - self.of(self.mean)) ** 2
            if self.row_is_run:
                sums = self._sums(squares)
            else:  # rows of one run may differ: each run adds the mean of its rows' squares
                of_runs = self.over_runs(squares)
                sums = segment_sums(of_runs[self.run_valid], self.run_group[self.run_valid], len(self.keys))
            deviations = np.sqrt(sums / np.maximum(self.count - (kind == "sample"), 1))
            self._std[kind] = np.where(self.count > 1, deviations, 0.0)
        return self._std[kind]

    def batch_std(self, kind: str = "sample") -> float:
        """The deviation of all runs' rewards, whatever their group."""
        check_choice("std", kind, STD)
        values = np.sort(self.run_values[self.run_valid])
        if len(values) < 2 or values[0] == values[-1]:
            return 0.0
        return float(values.std(ddof=int(kind == "sample")))

    def of(self, per_group: NDArray[Any]) -> NDArray[Any]:
        """[all rows] Each row's group's number."""
        if self.block:
            return per_group.repeat(self.block)
        return per_group[self.index]

    def centered(self) -> Floats:
        """[all rows] Reward minus the group's mean; 0 where there is no reward."""
        return self.filled(self.values - self.of(self.mean))

    def over(self, centered: Floats, divisor: Floats | float) -> Floats:
        """[all rows] Deviations over a divisor; exactly 0 stays exactly 0, also over 0."""
        return np.where(centered == 0, 0.0, centered / np.where(np.asarray(divisor) > 0, divisor, 1.0))

    def filled(self, scores: Floats) -> Floats:
        """[all rows] Scores, with exactly 0 where there is no reward, and nowhere a minus before it."""
        return (scores if self.block else np.where(self.valid, scores, 0.0)) + 0.0

    def alone(self, scores: Floats, singleton: str) -> Floats:
        """[all rows] Scores, with a lone row's as chosen: 0, or its `raw` reward."""
        check_choice("singleton", singleton, SINGLETON)
        if self.block > 1:
            return scores
        lone = self.filled(self.values) if singleton == "raw" else np.zeros(len(self.values))
        return np.where(self.of(self.singleton), lone, scores)

    def report(self) -> Report:
        """What is to be said: rows are this process's, numbers about groups are of all processes' rows."""
        local, valid = self.own, self.valid[self.own]
        missing = np.isnan(self.values[local])
        lone = valid & self.of(self.singleton)[local]
        rows = np.bincount(self.index[self.valid], minlength=len(self.keys))
        reasons = {
            "missing reward": rows_where(missing),
            "infinite reward": rows_where(~valid & ~missing),
            "singleton group": rows_where(lone),
            "constant group": rows_where(valid & self.of(self.constant)[local]),
        }
        if not self.row_is_run:
            # Such rows were perhaps meant to be samples of their own, and were not given a run each.
            reasons["one run alone, in several rows"] = rows_where(lone & (self.of(rows)[local] > 1))
        has_reward = self.count > 0
        metrics = {
            "groups": float(len(self.keys)),
            "constant_groups": float(self.constant.sum()),
            "singleton_groups": float(self.singleton.sum()),
        }
        for name, statistic in (("reward_mean", self.mean[has_reward]), ("reward_std", self.std()[has_reward])):
            if len(statistic):
                metrics |= {f"{name}/mean": float(statistic.mean()), f"{name}/max": float(statistic.max())}
                metrics[f"{name}/min"] = float(statistic.min())
        return Report(self.rows, reasons, metrics)

    def scored(self, scores: Floats, mask: PerToken | None, report: Report | None = None) -> Advantages:
        """The estimate: each row's score on the tokens that count, or, without a mask, the scores themselves."""
        mine = np.ascontiguousarray(scores[self.own])
        if self.dtype == torch.float32:
            with np.errstate(over="ignore"):
                mine = mine.astype(np.float32)
        finite = np.isfinite(mine)

        def made() -> Report:
            base = report or self.report()
            # Rewards so large that their differences, or these in the result's type, are not finite.
            return base if finite.all() else base.plus({"not finite": rows_where(~finite)})

        return scored_tokens(torch.from_numpy(mine).to(self.device), mask, made)


def scored_tokens(scores: torch.Tensor, mask: PerToken | None, report: Report | Callable[[], Report]) -> Advantages:
    """One score for each row, (B,), put on its tokens that count."""
    if mask is None:
        return Advantages(scores.clone(), None, scores, None, report)
    layout = Layout.of(mask)
    if layout.rows != len(scores):
        raise ValueError(f"mask: got {layout.rows} rows, expected {len(scores)}, one for each reward")
    scores_there = scores.to(layout.mask.device)
    if layout.packed and layout.mask.device.type == "cpu":
        tokens = spread_scan(scores_there, layout.mask, layout.offsets)
    else:
        tokens = layout.masked(layout.spread(scores_there))
    return Advantages(layout.give(tokens), None, scores, mask, report)


def last_steps(steps: Sequence[int], run: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """[runs] The row of each run's largest step, by number and not by place."""
    order = np.lexsort((np.arange(len(steps)), np.asarray(steps), run))
    last = np.zeros(count, dtype=np.int64)
    last[run[order]] = order  # later, that is larger, steps overwrite
    return last
