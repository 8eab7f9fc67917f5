"""Filters of groups and rows, group weights, and token masks.

Invariant: a filter returns whether each row is kept, and changes and reorders nothing. Every dropped row has a reason
in the report. The result for a group does not depend on the order of rows or on the position of the group.
`high_entropy_mask` marks only tokens that count.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.groups import Floats, Grouped, as_ids, as_rewards
from rollbook.algorithms.layout import Ids, Layout, Numbers, PerRow, PerToken, as_tensor
from rollbook.algorithms.results import Report, rows_where
from rollbook.core.checks import check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.rows import NUMPY, memory

__all__ = [
    "FilterResult",
    "MaskResult",
    "WeightResult",
    "clip_filter_like_weight_func",
    "clip_filter_weights",
    "dynamic_sampling",
    "group_weights",
    "high_entropy_mask",
    "invalid_rewards",
    "reward_at_least",
    "truncated",
    "zero_variance",
]

SINGLETON = ("drop", "keep")
"""What a filter does with groups that have one reward."""
TRUNCATED = ("length", "response_truncated")
"""Finish reasons of truncated responses, of engines and of Trinity."""
KEPT_WITHOUT_REWARD = "kept without a finite reward"


@dataclass(frozen=True)
class FilterResult:
    """Which rows a filter keeps, and why the others are dropped.

    The reasons of the report list dropped rows, except `"kept without a finite reward"`: rows of a kept group that
    estimators score 0 and ignore in its statistics.

    Attributes:
        keep: [B] bool: whether a row is kept.
        report: The report.
        groups: Ids of the dropped groups by reason, in order of first appearance; empty for filters of rows.

    >>> kept = reward_at_least([0.2, 0.9, None], 0.5, ids=["x", "y", "z"])
    >>> kept.keep.tolist(), kept.rows, kept.report.which("below threshold"), kept.report.which("missing reward")
    ([False, True, False], [1], ['x'], ['z'])
    """

    keep: torch.Tensor
    report: Report
    groups: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Numbers of the rows that are kept, ascending."""
        return rows_where(self.keep)


@dataclass(frozen=True)
class MaskResult:
    """A mask without the tokens of some rows, which stay in the batch.

    Attributes:
        mask: bool, in the layout of the given mask.
        report: The report.

    >>> masked = truncated([True, False], [[1, 1], [1]])
    >>> masked.mask, masked.report.metrics["masked_tokens"]
    ([tensor([False, False]), tensor([True])], 2.0)
    """

    mask: Any
    report: Report


@dataclass(frozen=True)
class WeightResult:
    """A weight for each row.

    Attributes:
        weights: [B]
        report: The report.

    >>> result = clip_filter_weights([1.0, 1.0, 0.0, 1.0], list("aabb"))
    >>> result.weights, result.report.which("constant group")
    (tensor([1., 1., 2., 2.]), [0, 1])
    """

    weights: torch.Tensor
    report: Report


# --- filters of groups ----------------------------------------------------------------------------------------------


def zero_variance(
    rewards: PerRow,
    groups: Ids,
    runs: Ids | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    threshold: float = 0.0,
    std: str = "population",
    singleton: str = "drop",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> FilterResult:
    """Drop groups whose rewards deviate by at most `threshold`; by default those with equal rewards.

    As in the estimators, rows without a finite reward are in no statistic. A group without any is dropped, and one with
    a single reward is a singleton. The default deviation is of the population, as in the reward_std_filter of Trinity,
    and differs from that of GRPO, which is of the sample.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        ids: [B] Names of the rows for the report.
        threshold: Largest deviation of a dropped group.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        singleton: Whether to `"drop"` or `"keep"` groups with one reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Which rows are kept, and why the others are not.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> kept = zero_variance([0.1, 0.1, 0.1, 0.0, 1.0, None, 5.0], list("aaabbbc"))
    >>> kept.keep.tolist(), kept.groups["constant group"], kept.groups["singleton group"]
    ([False, False, False, True, True, True, False], ['a'], ['c'])
    """
    check_float("threshold", threshold, 0)
    check_choice("singleton", singleton, SINGLETON)
    grouped = Grouped(rewards, groups, runs, process_group)
    deviation = grouped.std(std)
    several = grouped.count > 1
    drops = {
        "constant group": grouped.constant,
        "small deviation": several & ~grouped.constant & (deviation <= threshold),
        "singleton group": grouped.singleton & (singleton == "drop"),
    }
    metrics: dict[str, float] = {}
    for name, numbers in (("reward_mean", grouped.mean[several]), ("reward_std", deviation[several])):
        if len(numbers):
            metrics |= {f"{name}/mean": float(numbers.mean()), f"{name}/max": float(numbers.max())}
            metrics[f"{name}/min"] = float(numbers.min())
    return _filter_groups(grouped, drops, metrics, ids)


def dynamic_sampling(
    scores: PerRow,
    groups: Ids,
    runs: Ids | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    correct: float = 0.0,
    singleton: str = "drop",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> FilterResult:
    """Keep groups in which some answers are correct, but not all.

    DAPO (Yu et al., 2025, arXiv 2503.14476), equation 11. The other half of DAPO, further prompts until there are
    enough such groups, is `algorithm.refill` of the trainer.

    Args:
        scores: [B] Accuracy, or else the reward, of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        ids: [B] Names of the rows for the report.
        correct: Score above which an answer is correct.
        singleton: Whether to `"drop"` or `"keep"` groups with one reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Which rows are kept, and why the others are not.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> kept = dynamic_sampling([1, 1, 0, 1, 0, -1, 1], [0, 0, 1, 1, 2, 2, 3])
    >>> kept.rows, kept.groups
    ([2, 3], {'no finite reward': [], 'all correct': [0], 'all wrong': [2], 'singleton group': [3]})
    """
    check_float("correct", correct)
    check_choice("singleton", singleton, SINGLETON)
    grouped = Grouped(scores, groups, runs, process_group)
    right = grouped.run_valid & (np.where(grouped.run_valid, grouped.run_values, 0.0) > correct)
    solved = np.bincount(grouped.run_group[right], minlength=len(grouped.group_ids))
    several = grouped.count > 1
    drops = {
        "all correct": several & (solved == grouped.count),
        "all wrong": several & (solved == 0),
        "singleton group": grouped.singleton & (singleton == "drop"),
    }
    return _filter_groups(grouped, drops, {}, ids)


def _filter_groups(
    grouped: Grouped,
    drops: Mapping[str, NDArray[np.bool_]],
    metrics: Mapping[str, float],
    ids: Sequence[Hashable] | None,
) -> FilterResult:
    """Drop the rows of this process whose group is marked under one of the reasons of `drops`, [groups] each."""
    local_index = grouped.index[grouped.local]
    drops = {"no finite reward": np.equal(grouped.count, 0), **drops}
    dropped = np.any(list(drops.values()), axis=0)
    keep = ~dropped[local_index]
    local_groups = np.unique(local_index)  # in order of first appearance, since groups are numbered so
    reasons = {reason: rows_where(hit[local_index]) for reason, hit in drops.items()}
    reasons[KEPT_WITHOUT_REWARD] = rows_where(keep & ~grouped.valid[grouped.local])
    counts = {"groups": float(len(local_groups)), "groups_kept": float(np.count_nonzero(~dropped[local_groups]))}
    groups = {reason: [grouped.group_ids[i] for i in local_groups if hit[i]] for reason, hit in drops.items()}
    report = Report(grouped.rows, reasons, counts | dict(metrics), _check_names(ids, grouped.rows))
    return FilterResult(torch.from_numpy(keep).to(grouped.device), report, groups)


# --- filters of rows ------------------------------------------------------------------------------------------------


def invalid_rewards(rewards: PerRow, ids: Sequence[Hashable] | None = None, *, infinite: str = "drop") -> FilterResult:
    """Drop rows whose reward is missing (`None`, NaN) or infinite.

    The estimators only exclude such rows from their statistics; this filter removes them from the batch.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        ids: [B] Names of the rows for the report.
        infinite: `"drop"`, or `"keep"` as Trinity does.

    Returns:
        Which rows are kept, and why the others are not.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> kept = invalid_rewards([None, float("nan"), float("inf"), 1.0])
    >>> kept.rows, kept.report.which("missing reward"), kept.report.which("infinite reward")
    ([3], [0, 1], [2])
    """
    check_choice("infinite", infinite, ("drop", "keep"))
    values = as_rewards("rewards", rewards)
    drops = {"missing reward": np.isnan(values), "infinite reward": np.isinf(values) & (infinite == "drop")}
    return _filter_rows(rewards, drops, ids)


def reward_at_least(rewards: PerRow, threshold: float = 0.0, ids: Sequence[Hashable] | None = None) -> FilterResult:
    """Keep rows with a reward of at least `threshold`; rows without a reward are dropped.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        threshold: Smallest reward of a kept row.
        ids: [B] Names of the rows for the report.

    Returns:
        Which rows are kept, and why the others are not.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> kept = reward_at_least([-1.0, 0.0, None, 2.0])
    >>> kept.rows, kept.report.which("below threshold")
    ([1, 3], [0])
    """
    check_float("threshold", threshold)
    values = as_rewards("rewards", rewards)
    return _filter_rows(rewards, {"missing reward": np.isnan(values), "below threshold": values < threshold}, ids)


def _filter_rows(
    rewards: PerRow, drops: Mapping[str, NDArray[np.bool_]], ids: Sequence[Hashable] | None
) -> FilterResult:
    keep = ~np.any(list(drops.values()), axis=0)
    device = rewards.device if isinstance(rewards, torch.Tensor) else "cpu"
    reasons = {reason: rows_where(hit) for reason, hit in drops.items()}
    return FilterResult(torch.from_numpy(keep).to(device), Report(len(keep), reasons, {}, _check_names(ids, len(keep))))


def truncated(
    finish: Ids,
    mask: PerToken,
    ids: Sequence[Hashable] | None = None,
    *,
    reasons: str | Sequence[str] = TRUNCATED,
) -> MaskResult:
    """Mask all tokens of truncated rows; they stay in the batch and in the statistics of their group.

    DAPO (Yu et al., 2025), section 3.4, calls it overlong filtering. Losses ignore rows without tokens.

    Args:
        finish: [B] Why each row ended (`finish_reason`, or `truncate_status` of Trinity), or whether it was truncated;
            `None` if that is unknown: the row stays as it is, and is counted.
        mask: [B, R] or packed: which tokens count. `None`: all.
        ids: [B] Names of the rows for the report.
        reasons: Finish reason, or reasons, of truncated rows.

    Returns:
        The mask, and the report.

    Raises:
        ValueError: If an entry of `finish` is invalid, or the number of rows differs.

    >>> result = truncated(["stop", "length", None], torch.ones(3, 2))
    >>> result.mask.tolist(), result.report.which("truncated"), result.report.which("unknown finish")
    ([[True, True], [False, False], [True, True]], [1], [2])
    """
    causes = (reasons,) if isinstance(reasons, str) else reasons  # `in` on a string would match substrings
    layout = Layout.from_tokens(mask)
    rows = as_ids("finish", finish, layout.rows)
    invalid = next(
        (i for i, status in enumerate(rows) if not (status is None or isinstance(status, str) or status in (0, 1))),
        None,
    )
    if invalid is not None:
        raise ValueError(
            f"finish: got {rows[invalid]!r} at row {invalid}, expected a finish reason, true, false or None"
        )
    is_truncated = [status in causes if isinstance(status, str) else bool(status) for status in rows]
    left = ~torch.tensor(is_truncated, dtype=torch.bool, device=layout.mask.device)
    tokens = float(layout.counts.sum())
    counted = layout.mask & layout.spread(left)
    metrics = {"masked_tokens": tokens - float(counted.sum())}
    unknown = rows_where([status is None for status in rows])
    by_reason = {"truncated": rows_where(is_truncated), "unknown finish": unknown}
    return MaskResult(layout.restore(counted), Report(layout.rows, by_reason, metrics, _check_names(ids, layout.rows)))


def _check_names(ids: Ids | None, rows: int) -> list[Hashable] | None:
    return None if ids is None else as_ids("ids", ids, rows)


# --- group weights --------------------------------------------------------------------------------------------------


def clip_filter_like_weight_func(
    rewards: Numbers, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0
) -> torch.Tensor:
    """Weight groups to compensate for groups of equal rewards; the name and signature are LightRFT's.

    With D of G groups constant, the others have the weight min(G / (G - D), eps) and the constant ones `lamda`. If all
    are constant, all have the weight 1. LightRFT tests for a deviation of 0, which rounding hides for most rewards;
    here finite rewards are compared, and a group with fewer than two of them is constant. `clip_filter_weights` does
    the same by group id.

    Args:
        rewards: [G, n] Rewards of G groups.
        clip_filter_like_weight_clip_eps: Largest weight.
        lamda: Weight of constant groups.

    Returns:
        [G, n] The weights.

    Raises:
        ValueError: If rewards are not a matrix, or an option is invalid.

    >>> clip_filter_like_weight_func([[1.0, 1.0], [0.0, 1.0], [2.0, 2.0], [0.0, 3.0]])[:, 0]
    tensor([1., 2., 1., 2.])
    """
    matrix = as_tensor("rewards", rewards)
    matrix = matrix if matrix.is_floating_point() else matrix.to(torch.float32)
    if matrix.dim() != 2:
        raise ValueError(f"rewards: got {matrix.dim()} dimensions, expected 2 (groups, samples)")
    if not matrix.numel():
        return torch.ones_like(matrix)
    if matrix.device.type == "cpu" and matrix.dtype in NUMPY:
        # On small matrices, numpy calls take a fraction of the time of torch calls.
        array = memory(matrix)
        low, high = array.min(-1), array.max(-1)
        if np.isfinite(low).all() and np.isfinite(high).all():  # NaN would propagate to both
            weights = group_weights(low == high, clip_filter_like_weight_clip_eps, lamda).astype(array.dtype)
            return torch.from_numpy(weights.repeat(array.shape[1]).reshape(array.shape))
    missing = ~matrix.isfinite()
    least, largest = matrix.masked_fill(missing, torch.inf).amin(-1), matrix.masked_fill(missing, -torch.inf).amax(-1)
    constant = ~(least < largest).cpu().numpy()
    by_group = torch.from_numpy(group_weights(constant, clip_filter_like_weight_clip_eps, lamda))
    return by_group.to(matrix.device, matrix.dtype)[:, None].expand(matrix.shape).clone()


def clip_filter_weights(
    rewards: PerRow,
    groups: Ids,
    runs: Ids | None = None,
    *,
    clip: float = 3.0,
    lam: float = 1.0,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> WeightResult:
    """Compute `clip_filter_like_weight_func` for groups of any sizes, by id.

    A group is constant if its known rewards are all equal, or if it has fewer than two. A row whose reward is missing
    has the weight of its group.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        clip: Largest weight.
        lam: Weight of constant groups.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        A weight for each row.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> clip_filter_weights([1.0, 0.0, 1.0, 2.0, 2.0, 2.0], list("abbaca")).weights
    tensor([1.5000, 1.5000, 1.5000, 1.5000, 1.0000, 1.5000])
    """
    grouped = Grouped(rewards, groups, runs, process_group)
    weights = grouped.per_row(group_weights(grouped.constant | (grouped.count < 2), clip, lam))[grouped.local]
    return WeightResult(torch.from_numpy(weights).to(grouped.device, grouped.dtype), grouped.report())


def group_weights(constant: NDArray[np.bool_], clip: float, lam: float) -> Floats:
    """Compute the weight of each group; see `clip_filter_like_weight_func`.

    Args:
        constant: [G] Whether all rewards of a group are equal.
        clip: Largest weight of the other groups.
        lam: Weight of constant groups.

    Returns:
        [G] The weights.

    Raises:
        ValueError: If an option is invalid.

    >>> group_weights(np.array([True, False, True, False]), clip=3.0, lam=1.0).tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    check_float("clip", clip, 0)
    check_float("lam", lam)
    useful = len(constant) - int(np.count_nonzero(constant))
    if not useful:
        return np.ones(len(constant))
    return np.where(constant, lam, min(len(constant) / useful, clip))


def high_entropy_mask(
    entropy: PerToken, mask: PerToken | None = None, ratio: float = 0.2, *, over: str = "sample"
) -> Any:
    """Mark the tokens with the highest entropies: `ratio` of the tokens of each sample, or of the batch.

    "Beyond the 80/20 rule" (Wang et al., 2025, arXiv 2506.01939). max(1, floor(ratio * n)) of n tokens are marked. A
    row without tokens has none marked. A ratio of 0 or less, or of 1 or more, marks all tokens that count, as LightRFT
    does. NaN ranks below every number.

    As the mask of a loss, its denominators count marked tokens only; as weights, they count all tokens.

    Args:
        entropy: [B, R] or packed: entropy of each token.
        mask: [B, R] or packed: which tokens count. `None`: all.
        ratio: Share of the tokens that are marked.
        over: Rank tokens in each `"sample"` (LightRFT), or in the whole `"batch"`, as in the paper; some rows may then
            have none.

    Returns:
        A bool mask in the layout of the arguments.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> entropy = torch.tensor([[1.0, 5.0, 2.0, 6.0, 3.0], [2.0, 4.0, 1.0, 5.0, 9.0]])
    >>> high_entropy_mask(entropy, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), 0.4).int()
    tensor([[0, 1, 0, 1, 0],
            [0, 0, 0, 1, 0]], dtype=torch.int32)
    """
    check_choice("over", over, ("sample", "batch"))
    check_float("ratio", ratio)
    layout = Layout.from_tokens(mask, entropy=entropy)
    values = layout.tensor("entropy", entropy).detach()
    if ratio <= 0 or ratio >= 1 or not values.numel():
        return layout.restore(layout.mask.clone())
    values = values if values.is_floating_point() else values.to(torch.float64)
    keys = values
    if not values.is_cpu or isnan(values.sum()):  # a sum costs a tenth of `where`, but would synchronize a device
        keys = torch.where(values.isnan(), torch.full((), -torch.inf, dtype=values.dtype, device=values.device), values)
    if over == "batch":
        one_row = Layout((1, keys.numel()), None, layout.mask.reshape(1, -1))
        marked = _mark_highest(one_row, keys.reshape(1, -1), ratio).reshape(layout.shape)
    else:
        marked = _mark_highest(layout, keys, ratio)
    return layout.restore(marked)


def _mark_highest(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """Mark the share `ratio` of the tokens of each row that have the highest keys. Shape: `shape`."""
    if layout.mask.device.type == "cpu" and keys.dtype in NUMPY:
        return _mark_on_host(layout, keys, ratio)
    # In float64, as Python multiplies: 100 * 0.29 is slightly less than 29 in both.
    quota = (layout.counts.to(torch.float64) * ratio).floor().clamp(min=1).to(torch.int64)
    return _mark_packed(layout, keys, quota) if layout.packed else _mark_padded(layout, keys, quota, ratio)


def _mark_on_host(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """Mark tokens on the host, row by row."""
    marked = torch.zeros(layout.shape, dtype=torch.bool)
    columns: Any = map(memory, (marked, layout.mask, keys))
    if layout.packed:
        columns = [np.split(column, layout.offsets[1:-1]) for column in columns]
    for flags, mask, values in zip(*columns, strict=True):
        slots = np.flatnonzero(mask)
        if len(slots):
            count = max(1, int(len(slots) * ratio))
            first, last = slots[0], slots[-1] + 1
            selection = slice(first, last) if last - first == len(slots) else slots
            candidates = values[selection]
            least = np.partition(candidates, len(slots) - count)[len(slots) - count]
            highest = candidates > least
            equal = np.flatnonzero(candidates == least)
            highest[equal[: count - np.count_nonzero(highest)]] = True
            flags[selection] = highest
    return marked


def _mark_padded(layout: Layout, keys: torch.Tensor, quota: torch.Tensor, ratio: float) -> torch.Tensor:
    """Mark tokens of padded rows: all above the smallest marked key, and ties from the left up to the quota."""
    keys = torch.where(layout.mask, keys, torch.full((), -torch.inf, dtype=keys.dtype, device=keys.device))
    largest_quota = max(1, int(layout.shape[1] * ratio))  # a bound that does not synchronize the device
    least = keys.topk(largest_quota, dim=-1).values.gather(-1, quota[:, None] - 1)
    above = (keys > least) & layout.mask
    equal = (keys == least) & layout.mask
    return above | (equal & (equal.cumsum(-1) <= quota[:, None] - above.sum(-1, keepdim=True)))


def _mark_packed(layout: Layout, keys: torch.Tensor, quota: torch.Tensor) -> torch.Tensor:
    """Mark tokens of packed rows: sort by row and falling key, and take the first of each row that count."""
    order = torch.argsort(keys, descending=True, stable=True)
    order = order[torch.argsort(layout.row_index[order], stable=True)]
    counting = layout.mask[order]
    rank = counting.cumsum(0) - layout.spread(layout.counts.cumsum(0) - layout.counts)  # among tokens that count
    return torch.zeros_like(layout.mask).scatter(0, order, counting & (rank <= layout.spread(quota)))
