"""Filters of groups and rows by id, group weights, sampling with refill (`Refill`), and masks of tokens.

Invariant: a filter returns whether each row is kept, and changes and reorders nothing. Every dropped row has a reason
in the report. The result for a group does not depend on the order of rows or on the position of the group.
`high_entropy_mask` marks only tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.groups import Floats, Grouped, as_ids, as_rewards, numbered
from rollbook.algorithms.layout import Ids, Layout, Numbers, PerRow, PerToken, as_tensor, state_of
from rollbook.algorithms.results import Report, rows_where
from rollbook.core.checks import check_choice, check_float, check_int
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup
from rollbook.core.rows import NUMPY, memory

SINGLETON = ("drop", "keep")
TRUNCATED = ("length", "response_truncated")
"""What engines and Trinity's records call a response that ran out of tokens."""
WITHOUT = "kept without a finite reward"


@dataclass(frozen=True)
class Kept:
    """Which rows a filter keeps, and why not the others.

    The report's reasons name dropped rows, but for `"kept without a finite reward"`: rows of a kept group that
    estimators score 0 and leave out of its statistics.

    >>> kept = reward_at_least([0.2, 0.9, None], 0.5, ids=["x", "y", "z"])
    >>> kept.keep.tolist(), kept.rows, kept.report.which("below threshold"), kept.report.which("missing reward")
    ([False, True, False], [1], ['x'], ['z'])
    """

    keep: torch.Tensor
    """[B] bool."""
    report: Report
    groups: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)
    """For each reason, the ids of the groups that it dropped, as they first appear; filters of rows have none."""

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that are kept, ascending."""
        return rows_where(self.keep)


@dataclass(frozen=True)
class Masked:
    """A mask without the tokens of some rows, which stay in the batch.

    >>> masked = truncated([True, False], [[1, 1], [1]])
    >>> masked.mask, masked.report.metrics["masked_tokens"]
    ([tensor([False, False]), tensor([True])], 2.0)
    """

    mask: Any
    """bool, in the layout it came in."""
    report: Report


@dataclass(frozen=True)
class Weights:
    """A weight for each row.

    >>> found = clip_filter_weights([1.0, 1.0, 0.0, 1.0], list("aabb"))
    >>> found.weights, found.report.which("constant group")
    (tensor([1., 1., 2., 2.]), [0, 1])
    """

    weights: torch.Tensor
    """[B]"""
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
) -> Kept:
    """Drop groups whose rewards deviate by at most `threshold`; by default those with equal rewards.

    As in the estimators, rows without a finite reward are in no statistic; a group without any is dropped, and one with
    a single reward is a singleton. The deviation is of the population, as in the reward_std_filter of Trinity; that of
    GRPO is of the sample, so that a threshold above 0 has another meaning there.

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
    return _judged(grouped, drops, metrics, ids)


def dynamic_sampling(
    scores: PerRow,
    groups: Ids,
    runs: Ids | None = None,
    ids: Sequence[Hashable] | None = None,
    *,
    correct: float = 0.0,
    singleton: str = "drop",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Kept:
    """Keep groups in which some answers are correct, but not all.

    DAPO (Yu et al., 2025, arXiv 2503.14476), equation 11. `Refill` samples until there are enough such groups, which is
    the other half of DAPO.

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
    solved = np.bincount(grouped.run_group[right], minlength=len(grouped.keys))
    several = grouped.count > 1
    drops = {
        "all correct": several & (solved == grouped.count),
        "all wrong": several & (solved == 0),
        "singleton group": grouped.singleton & (singleton == "drop"),
    }
    return _judged(grouped, drops, {}, ids)


def _judged(
    grouped: Grouped,
    drops: Mapping[str, NDArray[np.bool_]],
    metrics: Mapping[str, float],
    ids: Sequence[Hashable] | None,
) -> Kept:
    """What a filter found of each group, said of each row of this process."""
    local_index = grouped.index[grouped.own]
    drops = {"no finite reward": np.equal(grouped.count, 0), **drops}
    dropped = np.any(list(drops.values()), axis=0)
    keep = ~dropped[local_index]
    here = np.unique(local_index)  # numbered as they first appear, so that sorted is that order
    reasons = {reason: rows_where(hit[local_index]) for reason, hit in drops.items()}
    reasons[WITHOUT] = rows_where(keep & ~grouped.valid[grouped.own])
    counts = {"groups": float(len(here)), "groups_kept": float(np.count_nonzero(~dropped[here]))}
    groups = {reason: [grouped.keys[i] for i in here if hit[i]] for reason, hit in drops.items()}
    report = Report(grouped.rows, reasons, counts | dict(metrics), _names(ids, grouped.rows))
    return Kept(torch.from_numpy(keep).to(grouped.device), report, groups)


# --- filters of rows ------------------------------------------------------------------------------------------------


def invalid_rewards(rewards: PerRow, ids: Sequence[Hashable] | None = None, *, infinite: str = "drop") -> Kept:
    """Drop rows whose reward is missing (`None`, NaN) or infinite.

    An infinite reward makes the mean of its group infinite and every advantage in it NaN. (The estimators leave both
    out of their statistics; this filter takes them out of the batch.)

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
    return _sifted(rewards, drops, ids)


def reward_at_least(rewards: PerRow, threshold: float = 0.0, ids: Sequence[Hashable] | None = None) -> Kept:
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
    return _sifted(rewards, {"missing reward": np.isnan(values), "below threshold": values < threshold}, ids)


def _sifted(rewards: PerRow, drops: Mapping[str, NDArray[np.bool_]], ids: Sequence[Hashable] | None) -> Kept:
    keep = ~np.any(list(drops.values()), axis=0)
    device = rewards.device if isinstance(rewards, torch.Tensor) else "cpu"
    reasons = {reason: rows_where(hit) for reason, hit in drops.items()}
    return Kept(torch.from_numpy(keep).to(device), Report(len(keep), reasons, {}, _names(ids, len(keep))))


def truncated(
    finish: Ids,
    mask: PerToken,
    ids: Sequence[Hashable] | None = None,
    *,
    reasons: str | Sequence[str] = TRUNCATED,
) -> Masked:
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
    causes = (reasons,) if isinstance(reasons, str) else reasons  # a text would have all its parts for reasons
    layout = Layout.of(mask)
    rows = as_ids("finish", finish, layout.rows)
    odd = next(
        (i for i, status in enumerate(rows) if not (status is None or isinstance(status, str) or status in (0, 1))),
        None,
    )
    if odd is not None:
        raise ValueError(f"finish: got {rows[odd]!r} at row {odd}, expected a finish reason, true, false or None")
    cut = [status in causes if isinstance(status, str) else bool(status) for status in rows]
    left = ~torch.tensor(cut, dtype=torch.bool, device=layout.mask.device)
    tokens = float(layout.counts.sum())
    counted = layout.mask & layout.spread(left)
    metrics = {"masked_tokens": tokens - float(counted.sum())}
    unknown = rows_where([status is None for status in rows])
    by_reason = {"truncated": rows_where(cut), "unknown finish": unknown}
    return Masked(layout.give(counted), Report(layout.rows, by_reason, metrics, _names(ids, layout.rows)))


def _names(ids: Ids | None, rows: int) -> list[Hashable] | None:
    return None if ids is None else as_ids("ids", ids, rows)


# --- until there are enough -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """The groups of one batch.

    >>> refill = Refill(1)
    >>> refill.add([1, 0], ["a", "a"], ["a0", "a1"])
    >>> taken = refill.take()
    >>> taken.groups, taken.samples, taken.short, taken.rounds, taken.report.rows
    (['a'], [['a0', 'a1']], 0, 1, 2)
    """

    groups: list[Hashable]
    """[n] Their ids, as they became complete."""
    samples: list[list[Hashable]]
    """[n] The ids of the samples of each."""
    short: int
    """How many groups are missing because the rounds were used up."""
    rounds: int
    """How many rollouts were added since the batch before."""
    report: Report
    """Of all samples judged since then, by id: which were dropped, and why."""


class Refill:
    """Dynamic sampling with refill: rollouts are added until `groups` useful, complete groups are there.

    A group is complete when `group_size` samples of it have come, in however many rollouts (without `group_size`: as
    it comes), and useful if `judge` keeps it; each is judged once. What is useful and not taken waits for the next
    batch, in order, and is never judged again or lost; so do incomplete groups, until `abandon` gives them up. After
    `max_rounds` rollouts the batch is what there is.

    Samples are known by id, and an id that is waiting is refused a second time. An id of a group may come again: once
    complete, the next sample of that id begins a group anew. `judge(scores, groups)` gives a `Kept`, as
    `dynamic_sampling` does, or `functools.partial(zero_variance, threshold=0.1)`; where it keeps part of a group, that
    part is the group.

    >>> refill = Refill(2, max_rounds=3)
    >>> refill.add([1, 0, 1, 1], ["a", "a", "b", "b"], ["a0", "a1", "b0", "b1"])
    >>> refill.missing, refill.done
    (1, False)
    >>> refill.add([0, 1, 0, 1], ["c", "c", "d", "d"], ["c0", "c1", "d0", "d1"])
    >>> taken = refill.take()
    >>> taken.samples, taken.report.which("all correct"), refill.waiting
    ([['a0', 'a1'], ['c0', 'c1']], ['b0', 'b1'], 1)
    """

    def __init__(
        self,
        groups: int,
        *,
        group_size: int | None = None,
        max_rounds: int = 10,
        judge: Callable[[Sequence[Any], Sequence[Hashable]], Kept] = dynamic_sampling,
    ) -> None:
        self.groups = check_int("groups", groups, 1)
        self.group_size = None if group_size is None else check_int("group_size", group_size, 1)
        self.max_rounds = check_int("max_rounds", max_rounds, 1)
        self.judge = judge
        self._rounds = 0
        self._pending: dict[Hashable, list[tuple[float, Hashable]]] = {}
        self._ready: list[tuple[Hashable, list[Hashable]]] = []
        self._judged: list[Hashable] = []
        self._reasons: dict[str, list[int]] = {}

    @property
    def waiting(self) -> int:
        """How many useful groups are there."""
        return len(self._ready)

    @property
    def missing(self) -> int:
        """How many are still wanted for a batch."""
        return max(self.groups - len(self._ready), 0)

    @property
    def incomplete(self) -> dict[Hashable, int]:
        """How many samples there are of each group that is not complete."""
        return {group: len(parts) for group, parts in self._pending.items()}

    @property
    def done(self) -> bool:
        """Whether a batch can be taken: enough groups, or no rounds left."""
        return not self.missing or self._rounds >= self.max_rounds

    def add(self, scores: PerRow, groups: Ids, samples: Ids) -> None:
        """The samples of one rollout, by id: scores, groups, samples (B,). Bad input changes nothing."""
        values = as_rewards("scores", scores)
        names, ids = as_ids("groups", groups, len(values)), as_ids("samples", samples, len(values))
        numbered("groups", names)
        _, different = numbered("samples", ids)
        known_samples = {sample for _, part in self._ready for sample in part}
        known_samples |= {sample for parts in self._pending.values() for _, sample in parts}
        seen: set[Hashable] = set()
        for sample in ids if len(different) < len(ids) or known_samples.intersection(different) else ():
            if sample in seen or sample in known_samples:
                raise ValueError(f"samples: got {sample!r} again, expected each sample once")
            seen.add(sample)
        pending = {group: list(parts) for group, parts in self._pending.items()}
        complete: list[tuple[Hashable, list[tuple[float, Hashable]]]] = []
        for value, group, sample in zip(values.tolist(), names, ids, strict=True):
            pending.setdefault(group, []).append((value, sample))
            if len(pending[group]) == self.group_size:
                complete.append((group, pending.pop(group)))
        if self.group_size is None:
            complete, pending = list(pending.items()), {}
        self._judge(complete)
        self._pending = pending
        self._rounds += 1

    def _judge(self, complete: list[tuple[Hashable, list[tuple[float, Hashable]]]]) -> None:
        rows = [(at, score, sample) for at, (_, parts) in enumerate(complete) for score, sample in parts]
        if not rows:
            return
        keep = self.judge([score for _, score, _ in rows], [at for at, _, _ in rows])
        left: dict[int, list[Hashable]] = {}
        for at, _, sample in (rows[i] for i in keep.rows):
            left.setdefault(at, []).append(sample)
        self._ready += [(complete[at][0], part) for at, part in left.items()]
        self._say(keep.report.reasons, [sample for _, _, sample in rows])

    def _say(self, reasons: Mapping[str, Sequence[int]], samples: list[Hashable]) -> None:
        for reason, rows in reasons.items():
            self._reasons.setdefault(reason, []).extend(len(self._judged) + row for row in rows)
        self._judged += samples

    def take(self) -> Taken:
        """The next batch, once `done`; the count of rounds and the report begin anew."""
        if not self.done:
            progress = f"{len(self._ready)} of {self.groups} after {self._rounds} of {self.max_rounds} rounds"
            raise ValueError(f"groups: got {progress}, expected another rollout first")
        batch, self._ready = self._ready[: self.groups], self._ready[self.groups :]
        report = Report(len(self._judged), self._reasons, {"rounds": float(self._rounds)}, self._judged)
        short, rounds = self.groups - len(batch), self._rounds
        self._judged, self._reasons, self._rounds = [], {}, 0
        return Taken([group for group, _ in batch], [part for _, part in batch], short, rounds, report)

    def abandon(self) -> dict[Hashable, list[Hashable]]:
        """Give up incomplete groups: their samples by group, in the report under `"incomplete group"`."""
        given_up = {group: [sample for _, sample in parts] for group, parts in self._pending.items()}
        samples = [sample for part in given_up.values() for sample in part]
        self._say({"incomplete group": range(len(samples))}, samples)
        self._pending = {}
        return given_up

    def state_dict(self) -> dict[str, Any]:
        """What is waiting and what was dropped, as plain containers of the ids that were given."""
        return {
            "rounds": self._rounds,
            "pending": [[group, [list(part) for part in parts]] for group, parts in self._pending.items()],
            "ready": [[group, list(part)] for group, part in self._ready],
            "judged": list(self._judged),
            "reasons": {reason: list(rows) for reason, rows in self._reasons.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; sizes, rounds and the judge are this object's own."""
        state_of(state, ("rounds", "pending", "ready", "judged", "reasons"))
        pending = {group: [(float(score), sample) for score, sample in parts] for group, parts in state["pending"]}
        full = next((g for g, parts in pending.items() if self.group_size and len(parts) >= self.group_size), None)
        if full is not None or (pending and self.group_size is None):
            name = next(iter(pending)) if full is None else full
            raise ValueError(f"state: group {name!r} waits with {len(pending[name])} samples; group_size is too small")
        self._pending, self._ready = pending, [(group, list(part)) for group, part in state["ready"]]
        self._rounds, self._judged = int(state["rounds"]), list(state["judged"])
        self._reasons = {reason: list(rows) for reason, rows in state["reasons"].items()}


# --- groups ---------------------------------------------------------------------------------------------------------


def clip_filter_like_weight_func(
    rewards: Numbers, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0
) -> torch.Tensor:
    """Weight groups to make up for groups of equal rewards. LightRFT's name and signature.

    With D of G groups constant, the others weigh min(G / (G - D), eps), the constant ones `lamda`; if all are constant,
    1. Upstream finds constant groups by a deviation of 0, which rounding hides for most values; here rewards are
    compared, without those that are not finite: a group with fewer than two others is constant. `clip_filter_weights`
    does the same by id.

    Args:
        rewards: [G, n] Rewards of G groups.
        clip_filter_like_weight_clip_eps: Largest weight.
        lamda: Weight of constant groups.

    Returns:
        [G, n] The weights.

    Raises:
        ValueError: If rewards are no matrix, or an option is invalid.

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
        # By way of numpy, whose calls take a fraction of the time of torch's on a matrix of this size.
        array = memory(matrix)
        low, high = array.min(-1), array.max(-1)
        if np.isfinite(low).all() and np.isfinite(high).all():  # a NaN would be both
            weights = make_up(low == high, clip_filter_like_weight_clip_eps, lamda).astype(array.dtype)
            return torch.from_numpy(weights.repeat(array.shape[1]).reshape(array.shape))
    is_known = matrix.isfinite()
    least, largest = (
        matrix.masked_fill(~is_known, torch.inf).amin(-1),
        matrix.masked_fill(~is_known, -torch.inf).amax(-1),
    )
    constant = ~(least < largest).cpu().numpy()
    made_up = torch.from_numpy(make_up(constant, clip_filter_like_weight_clip_eps, lamda))
    return made_up.to(matrix.device, matrix.dtype)[:, None].expand(matrix.shape).clone()


def clip_filter_weights(
    rewards: PerRow,
    groups: Ids,
    runs: Ids | None = None,
    *,
    clip: float = 3.0,
    lam: float = 1.0,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Weights:
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
    weights = grouped.of(make_up(grouped.constant | (grouped.count < 2), clip, lam))[grouped.own]
    return Weights(torch.from_numpy(weights).to(grouped.device, grouped.dtype), grouped.report())


def make_up(constant: NDArray[np.bool_], clip: float, lam: float) -> Floats:
    """[G] The weight of each group."""
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
    layout = Layout.of(mask, entropy=entropy)
    values = layout.tensor("entropy", entropy).detach()
    if ratio <= 0 or ratio >= 1 or not values.numel():
        return layout.give(layout.mask.clone())
    values = values if values.is_floating_point() else values.to(torch.float64)
    keys = values
    if not values.is_cpu or isnan(values.sum()):  # a sum costs a tenth of the replacement, but waits for a device
        keys = torch.where(values.isnan(), torch.full((), -torch.inf, dtype=values.dtype, device=values.device), values)
    if over == "batch":
        one_row = Layout((1, keys.numel()), None, layout.mask.reshape(1, -1))
        marked = _marked(one_row, keys.reshape(1, -1), ratio).reshape(layout.shape)
    else:
        marked = _marked(layout, keys, ratio)
    return layout.give(marked)


def _marked(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """[of `shape`] The tokens that count and come first in their row when it is sorted by key, from the highest."""
    if layout.mask.device.type == "cpu" and keys.dtype in NUMPY:
        return _by_row(layout, keys, ratio)
    # In float64, as Python multiplies: 100 * 0.29 is a little less than 29, here as there.
    quota = (layout.counts.to(torch.float64) * ratio).floor().clamp(min=1).to(torch.int64)
    return _by_order(layout, keys, quota) if layout.packed else _by_least(layout, keys, quota, ratio)


def _by_row(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """On the host, row by row, among the tokens that count alone."""
    marked = torch.zeros(layout.shape, dtype=torch.bool)
    rows: Any = map(memory, (marked, layout.mask, keys))
    if layout.packed:
        rows = [np.split(column, layout.offsets[1:-1]) for column in rows]
    for flags, mask, values in zip(*rows, strict=True):
        slots = np.flatnonzero(mask)
        if len(slots):
            count = max(1, int(len(slots) * ratio))
            first, last = slots[0], slots[-1] + 1
            where = slice(first, last) if last - first == len(slots) else slots
            candidates = values[where]
            least = np.partition(candidates, len(slots) - count)[len(slots) - count]
            highest = candidates > least
            equal = np.flatnonzero(candidates == least)
            highest[equal[: count - np.count_nonzero(highest)]] = True
            flags[where] = highest
    return marked


def _by_least(layout: Layout, keys: torch.Tensor, quota: torch.Tensor, ratio: float) -> torch.Tensor:
    """Padded rows: all above the least key that is marked, and as many of its equals as are wanted, from the left."""
    keys = torch.where(layout.mask, keys, torch.full((), -torch.inf, dtype=keys.dtype, device=keys.device))
    most = max(1, int(layout.shape[1] * ratio))  # no row can want more, and no device is asked how many they do
    least = keys.topk(most, dim=-1).values.gather(-1, quota[:, None] - 1)
    above = (keys > least) & layout.mask
    equal = (keys == least) & layout.mask
    return above | (equal & (equal.cumsum(-1) <= quota[:, None] - above.sum(-1, keepdim=True)))


def _by_order(layout: Layout, keys: torch.Tensor, quota: torch.Tensor) -> torch.Tensor:
    """Packed rows: sorted by key, then by row, so that each row lies together again; the first of each that count."""
    order = torch.argsort(keys, descending=True, stable=True)
    order = order[torch.argsort(layout.row_of[order], stable=True)]
    counting = layout.mask[order]
    place = counting.cumsum(0) - layout.spread(layout.counts.cumsum(0) - layout.counts)  # masked tokens take none
    return torch.zeros_like(layout.mask).scatter(0, order, counting & (place <= layout.spread(quota)))
