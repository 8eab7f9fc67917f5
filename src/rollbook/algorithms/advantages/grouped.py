"""Estimators that score a row against its group, and spread the score over its tokens.

Invariant: results do not depend on the order of rows, on micro-batches or on padding. Unless an option says otherwise,
a row without a finite reward scores 0 and is in no statistic, a row alone in its group scores 0, and a group of equal
rewards scores exactly 0; the report counts all three. Tool tokens get no score.
"""

from __future__ import annotations

import hashlib
import math
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.algorithms.filters import group_weights
from rollbook.algorithms.groups import (
    STD,
    Floats,
    Grouped,
    as_ids,
    as_rewards,
    last_steps,
    number_ids,
    segment_sums,
)
from rollbook.algorithms.layout import Ids, PerRow, PerToken
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_process_group

LEVELS = ("group", "batch")
"""Rows whose deviation GRPO divides by."""


@ESTIMATORS.register(
    "grpo",
    "group_norm",
    "grpo_verl",
    source="GRPO (Shao et al., 2024, arXiv 2402.03300), section 4.1.2: (r - mean) / std",
    normalized=True,
    compares_runs=True,
)
def grpo(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    std: str = "sample",
    eps: float = 1e-6,
    level: str = "group",
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean reward of the group, and divide by its standard deviation (GRPO).

    A = (r - mean) / (std + eps).

    Other frameworks: for a row alone in its group, verl, Trinity and SkyRL return its reward (`singleton="raw"`),
    LightRFT and OpenRLHF NaN. The eps of LightRFT, 1e-9, is below the rounding error of a float32 mean, so that equal
    rewards of 0.1 score -0.83.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        level: Deviation of the `"group"`, or of the whole `"batch"`.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> grpo([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"], eps=0.0).advantages
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071])
    >>> result = grpo([0.1, 0.1, 0.1, None], ["a", "a", "a", "a"], [[1, 1], [1], [1, 0], [1]])
    >>> result.advantages, result.report.which("missing reward")
    ([tensor([0., 0.]), tensor([0.]), tensor([0., 0.]), tensor([0.])], [3])
    """
    check_choice("level", level, LEVELS)
    check_float("eps", eps, 0)
    grouped = Grouped(rewards, groups, runs, process_group)
    spread = grouped.per_row(grouped.std(std)) if level == "group" else grouped.batch_std(std)
    return grouped.to_advantages(
        grouped.fill_singletons(grouped.divide(grouped.centered(), spread + eps), singleton), mask
    )


@ESTIMATORS.register("dr_grpo", source="Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): r - mean", compares_runs=True)
def dr_grpo(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean reward of the group (Dr. GRPO).

    A = r - mean. The other half of the method is a loss divided by a constant: `mode="seq-mean-token-sum-norm"`.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> dr_grpo([1.0, 0.0, 0.0, 1.0, 3.0], ["a", "a", "b", "b", "b"]).advantages
    tensor([ 0.5000, -0.5000, -1.3333, -0.3333,  1.6667])
    """
    grouped = Grouped(rewards, groups, runs, process_group)
    return grouped.to_advantages(grouped.fill_singletons(grouped.centered(), singleton), mask)


@ESTIMATORS.register(
    "rloo", source="RLOO (Ahmadian et al., 2024, arXiv 2402.14740): r - mean of the others", compares_runs=True
)
def rloo(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean of the other rewards of the group (RLOO).

    A = r - (sum of the others) / (n - 1), computed as n / (n - 1) * (r - mean), so that equal rewards give exactly 0.
    With `runs`, the others are the other runs.

    Other frameworks: verl and Trinity give a lone row its reward (`singleton="raw"`), LightRFT NaN.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> rloo([1.0, 0.0, 0.0, 1.0], ["a"] * 4).advantages
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    grouped = Grouped(rewards, groups, runs, process_group)
    if grouped.block:
        scores = grouped.centered() * grouped.block / max(grouped.block - 1, 1)
    else:
        count = grouped.per_row(grouped.count)
        of_run = np.where(grouped.valid, grouped.run_values[grouped.run], 0.0)
        centered = np.where(grouped.per_row(grouped.constant), 0.0, of_run - grouped.per_row(grouped.mean))
        scores = grouped.zero_missing(centered * count / np.maximum(count - 1, 1) + (grouped.values - of_run))
    return grouped.to_advantages(grouped.fill_singletons(scores, singleton), mask)


@ESTIMATORS.register(
    "opmd",
    "opmd_verl",
    source="OPMD, as Trinity-RFT has it (Pan et al., 2025, arXiv 2505.17826): r - baseline",
    compares_runs=True,
)
def opmd(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    baseline: str = "mean",
    tau: float = 1.0,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean reward of the group, or its log-mean-exp (OPMD).

    A = r - mean, or r - tau * (logsumexp(R / tau) - log n) with `baseline="logavgexp"`.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        baseline: `"mean"` or `"logavgexp"`.
        tau: Temperature of `"logavgexp"`.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> opmd([0.0, 1.0], ["a", "a"], baseline="logavgexp", tau=0.5).advantages
    tensor([-0.7169,  0.2831])
    """
    check_choice("baseline", baseline, ("mean", "logavgexp"))
    check_float("tau", tau, 1e-30, expected="a positive number")
    grouped = Grouped(rewards, groups, runs, process_group)
    scores = grouped.centered()
    if baseline == "logavgexp":
        scores = grouped.zero_missing(scores - grouped.per_row(_log_mean_exp(grouped, tau)))
    return grouped.to_advantages(grouped.fill_singletons(scores, singleton), mask)


def _log_mean_exp(grouped: Grouped, tau: float) -> Floats:
    """Compute tau * log mean exp((r - mean) / tau), the baseline minus the mean; 0 for equal rewards.

    Returns:
        [groups] One number per group.
    """
    valid, index = grouped.run_valid, grouped.run_group
    exponents = (grouped.run_values[valid] - grouped.mean[index[valid]]) / tau
    top = np.full(len(grouped.group_ids), -np.inf)
    np.maximum.at(top, index[valid], exponents)
    top = np.where(np.isfinite(top), top, 0.0)
    sums = segment_sums(np.exp(exponents - top[index[valid]]), index[valid], len(grouped.group_ids))
    shift = tau * (top + np.log(np.maximum(sums, 1e-300) / np.maximum(grouped.count, 1)))
    return np.where(grouped.constant | (grouped.count < 2), 0.0, shift)


@ESTIMATORS.register(
    "asymre",
    "asymre_verl",
    source="AsymRE (Arnal et al., 2025, arXiv 2506.20520): r - (mean + shift)",
    compares_runs=True,
)
def asymre(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    shift: float = -0.1,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract a baseline that is `shift` above the mean reward of the group (AsymRE).

    A = r - (mean + shift). A group of equal rewards scores exactly -shift.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        shift: Distance of the baseline from the mean; usually negative.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> asymre([0.0, 1.0, 1.0, 1.0], ["a", "a", "b", "b"]).advantages
    tensor([-0.4000,  0.6000,  0.1000,  0.1000])
    """
    check_float("shift", shift)
    grouped = Grouped(rewards, groups, runs, process_group)
    return grouped.to_advantages(
        grouped.fill_singletons(grouped.zero_missing(grouped.centered() - shift), singleton), mask
    )


@ESTIMATORS.register(
    "rec", source="REC (Yao et al., 2025, arXiv 2509.24203): r - mean, or over the deviation", compares_runs=True
)
def rec(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    ids: Ids | None = None,
    *,
    normalize: bool = False,
    std: str = "population",
    eps: float = 1e-6,
    drop: str | None = None,
    seed: int = 0,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean reward of the group; optionally divide by its deviation, and drop surplus negatives (REC).

    With `drop="balance"`, a group with more negative than positive scores keeps as many negatives as positives, drawn
    by a hash of `seed` and id. Dropped rows score 0 and are in the report; the mean is that of the whole group (in
    Trinity, of the rows it keeps). The default deviation is of the population, as the estimator is defined.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        ids: [B] Ids of the rows; required for `drop="balance"`.
        normalize: Whether to divide by the deviation.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        drop: `None` or `"balance"`.
        seed: Seed of the draw.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> rec([0.0, 1.0, 1.0], ["a"] * 3, normalize=True).advantages
    tensor([-1.4142,  0.7071,  0.7071])
    >>> result = rec([0.0, 0.0, 0.0, 1.0], ["a"] * 4, ids=["w", "x", "y", "z"], drop="balance")
    >>> len(result.report.which("dropped negative"))
    2
    """
    check_choice("drop", drop, (None, "balance"))
    check_bool("normalize", normalize)
    check_choice("std", std, STD)
    check_float("eps", eps, 0)
    grouped = Grouped(rewards, groups, runs, process_group)
    scores = grouped.centered()
    if normalize:
        scores = grouped.divide(scores, grouped.per_row(grouped.std(std)) + eps)
    scores = grouped.fill_singletons(scores, singleton)
    report = grouped.report()
    if drop is not None:
        if ids is None:
            raise ValueError("ids: got None, expected an id for each row, since drop='balance' draws by id")
        all_ids = [
            name for rank_ids in process_group.gather(list(as_ids("ids", ids, grouped.rows))) for name in rank_ids
        ]
        if len(set(all_ids)) != len(all_ids):
            raise ValueError("ids: got the same id for several rows, expected a different id for each")
        dropped = _surplus_negatives(grouped, scores, all_ids, seed)
        scores = np.where(dropped, 0.0, scores)
        report = report.plus({"dropped negative": rows_where(dropped[grouped.local])})
    return grouped.to_advantages(scores, mask, report)


def _surplus_negatives(grouped: Grouped, scores: Floats, ids: list[Any], seed: int) -> Any:
    """Mark the negatives that a group has more of than positives, drawn by a hash of seed and id.

    Returns:
        [all rows] One entry per row.
    """
    dropped = np.zeros(len(scores), dtype=bool)
    draw = [hashlib.blake2b(f"{seed}/{name!r}".encode(), digest_size=8).digest() for name in ids]
    negatives: dict[int, list[int]] = {}
    for i in np.flatnonzero(scores < 0).tolist():
        negatives.setdefault(int(grouped.index[i]), []).append(i)
    positives = np.bincount(grouped.index[scores > 0], minlength=len(grouped.group_ids))
    for group, rows in negatives.items():
        surplus = len(rows) - int(positives[group])
        dropped[sorted(rows, key=draw.__getitem__)[: max(surplus, 0)]] = True
    return dropped


@ESTIMATORS.register(
    "cpgd",
    source="CPGD (Liu et al., 2025, arXiv 2505.12504): (r - mean) times a weight of the group",
    kl_in_reward=False,
    discounts=False,
    clips_rewards=False,
    compares_runs=True,
)
def cpgd(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    weight: str = "std",
    weight_clip: float = 3.0,
    weight_constant: float = 1.0,
    std: str = "population",
    eps: float = 1e-6,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Subtract the mean reward of the group, and weight by group (CPGD).

    `weight="std"` divides by the deviation (of the population, as the estimator is defined). `"clip_filter_like"`
    multiplies groups with different rewards by min(groups / such groups, `weight_clip`) and others by `weight_constant`
    (see `filters.clip_filter_weights`), so that a batch with few useful groups has the update of a full one. LightRFT
    sums its rewards over the batch first, and always gets 0.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        weight: `"std"`, `"none"` or `"clip_filter_like"`.
        weight_clip: Largest weight of a group.
        weight_constant: Weight of groups of equal rewards.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> cpgd([1.0, 0.0], ["a", "a"], [[1, 1, 1], [1, 1]]).advantages
    [tensor([1.0000, 1.0000, 1.0000]), tensor([-1.0000, -1.0000])]
    """
    check_choice("weight", weight, ("std", "none", "clip_filter_like"))
    check_float("eps", eps, 0)
    check_choice("std", std, STD)
    grouped = Grouped(rewards, groups, runs, process_group)
    scores = grouped.centered()
    factors = group_weights(grouped.constant | (grouped.count < 2), weight_clip, weight_constant)
    if weight == "std":
        scores = grouped.divide(scores, grouped.per_row(grouped.std(std)) + eps)
    elif weight == "clip_filter_like":
        scores = scores * grouped.per_row(factors)
    return grouped.to_advantages(grouped.fill_singletons(scores, singleton), mask)


@ESTIMATORS.register(
    "pass_at_k", "pass@k", source="Pass@k training (Chen et al., 2025, arXiv 2508.10751): the analytical advantage"
)
def pass_at_k_advantage(
    rewards: PerRow,
    groups: Ids,
    mask: PerToken | None = None,
    runs: Ids | None = None,
    *,
    k: int = 4,
    correct: float = 0.0,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Score a sample by its contribution to pass@k, the probability that one of `k` samples is correct.

    A sample is correct if its reward is above `correct`. With n samples, w of them wrong, P = 1 - C(w, k) / C(n, k) and
    s = sqrt(P (1 - P)): a correct one scores (1 - P) / s, a wrong one (1 - P - C(w - 1, k - 1) / C(n - 1, k - 1)) / s.
    Groups where P is 0 or 1, among them those smaller than `k` and those with fewer than `k` wrong, score exactly 0.

    Args:
        rewards: [B] Reward of each row; `None` or NaN where it is missing.
        groups: [B] Group id of each row.
        mask: [B, R] or packed: which tokens count. `None`: all.
        runs: [B] Run id of each row; rows of one run count once in their group. `None`: every row is a run.
        k: Number of samples of which one must be correct.
        correct: Reward above which a sample is correct.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> pass_at_k_advantage([1.0, 0.0, 0.0, 0.0], ["a"] * 4, k=2).advantages
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    k = check_int("k", k, 1)
    check_float("correct", correct)
    grouped = Grouped(rewards, groups, runs, process_group)
    with np.errstate(invalid="ignore"):
        wrong_run = grouped.run_valid & ~(grouped.run_values > correct)
        right = grouped.values > correct
    wrong = np.bincount(grouped.run_group[wrong_run], minlength=len(grouped.group_ids))
    score = np.zeros((2, len(grouped.group_ids)))
    for g, (n, w) in enumerate(zip(grouped.count.tolist(), wrong.tolist(), strict=True)):
        chance = pass_at_k_estimate(n, n - w, k) if n >= k else 0.0
        if 0 < chance < 1:
            deviation = (chance * (1 - chance)) ** 0.5
            score[1, g] = (1 - chance) / deviation
            score[0, g] = (1 - chance - comb(w - 1, k - 1) / comb(n - 1, k - 1)) / deviation
    scores = grouped.zero_missing(np.where(right, grouped.per_row(score[1]), grouped.per_row(score[0])))
    return grouped.to_advantages(scores, mask)


def pass_at_k_estimate(n: int, c: int, k: int) -> float:
    """Estimate pass@k, the probability that at least one of `k` samples is correct: 1 - C(n - c, k) / C(n, k).

    Unbiased over samples (Chen et al., 2021, arXiv 2107.03374, equation 1).

    Args:
        n: Number of samples.
        c: Number of correct samples.
        k: Number of samples drawn.

    Returns:
        The probability, 0 to 1.

    Raises:
        ValueError: Unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k_estimate(4, 1, 2), pass_at_k_estimate(10, 0, 5), pass_at_k_estimate(10, 10, 1)
    (0.5, 0.0, 1.0)
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k: got n={n}, c={c}, k={k}, expected 0 <= c <= n and 1 <= k <= n")
    return 1.0 - comb(n - c, k) / comb(n, k)


# --- multi-step runs, one row per step --------------------------------------------------------------------------------
# Steps are ordered by their number, runs and tasks are identified by id, and states are compared within a task.


class _Episodes:
    """The rows of all processes with the run and the step of each."""

    def __init__(
        self, rewards: PerRow, groups: Ids, runs: Ids, steps: Ids, states: Ids | None, process_group: ProcessGroup
    ) -> None:
        self.own_rewards = as_rewards("rewards", rewards)
        rows = len(self.own_rewards)
        names, labels = as_ids("groups", groups, rows), as_ids("runs", runs, rows)
        numbers = as_ids("steps", steps, rows)
        for i, step in enumerate(numbers):
            if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
                raise ValueError(f"steps: row {i} has {step!r}, expected an integer")
        hashes = as_ids("states", states, rows) if states is not None else [None] * rows
        parts = check_process_group(process_group).gather([self.own_rewards, names, labels, numbers, hashes])
        first = sum(len(shard[0]) for shard in parts[: process_group.rank])
        self.local = slice(first, first + rows)
        self.rewards: Floats = np.concatenate([shard[0] for shard in parts])
        joined = [[item for shard in parts for item in shard[j]] for j in range(1, 5)]
        self.groups, self.runs, self.steps, self.states = joined
        self.group, self.keys = number_ids("groups", self.groups)
        self.run, pairs = number_ids("runs", list(zip(self.group.tolist(), self.runs, strict=True)))
        self.run_group: NDArray[np.int64] = np.array([pair[0] for pair in pairs], dtype=np.int64)  # type: ignore[index]
        seen: dict[tuple[int, Any], int] = {}
        for i, key in enumerate(zip(self.run.tolist(), self.steps, strict=True)):
            if key in seen:
                raise ValueError(
                    f"steps: rows {seen[key]} and {i} are both step {key[1]} of run {self.runs[i]!r} of group "
                    f"{self.groups[i]!r}, expected each step once"
                )
            seen[key] = i

    def in_order(self) -> NDArray[np.int64]:
        """Return row numbers, ordered by run and step. Shape: [all rows]."""
        return np.lexsort((np.array(self.steps, dtype=np.int64), self.run))


@ESTIMATORS.register(
    "step_wise_grpo", source="GRPO (arXiv 2402.03300) of each run's last reward, given to all of its steps"
)
def step_wise_grpo(
    rewards: PerRow,
    groups: Ids,
    runs: Ids,
    steps: Ids,
    mask: PerToken | None = None,
    *,
    step_norm: bool = False,
    std: str = "sample",
    eps: float = 1e-6,
    level: str = "group",
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Give all steps of a run the GRPO score of its last step.

    There is one row for each step of a run. The last step is the one with the largest number, in any order of rows
    (Trinity takes the last in the list). A run whose last step has no reward scores 0 and is in no statistic.

    Args:
        rewards: [B] Reward of each step.
        groups: [B] Task id of each row.
        runs: [B] Run id of each row.
        steps: [B] Number of the step within its run.
        mask: [B, R] or packed: which tokens count. `None`: all.
        step_norm: Whether to divide by the number of steps of the run.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        level: Deviation of the `"group"`, or of the whole `"batch"`.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> step_wise_grpo([0.0, 9.0, 1.0], ["a"] * 3, [0, 1, 1], [0, 0, 1], eps=0.0, step_norm=True).advantages
    tensor([-0.7071,  0.3536,  0.3536])
    """
    check_choice("level", level, LEVELS)
    check_bool("step_norm", step_norm)
    check_choice("std", std, STD)
    check_float("eps", eps, 0)
    episodes = _Episodes(rewards, groups, runs, steps, None, process_group)
    last = last_steps(episodes.steps, episodes.run, len(episodes.run_group))
    grouped = Grouped(episodes.rewards[last], episodes.run_group)
    spread = grouped.per_row(grouped.std(std)) if level == "group" else grouped.batch_std(std)
    score = grouped.fill_singletons(grouped.divide(grouped.centered(), spread + eps), singleton)
    if step_norm:
        score = score / np.bincount(episodes.run, minlength=len(score))
    return _score_rows(episodes, grouped, score[episodes.run], rewards, mask)


def _score_rows(
    episodes: _Episodes, runs: Grouped, scores: Floats, rewards: PerRow, mask: PerToken | None
) -> Advantages:
    """Spread the scores of this process's rows over their tokens; the report lists rows by the state of their runs."""
    local = episodes.local
    run = episodes.run[local]
    valid = runs.valid[run]
    missing = np.isnan(runs.values)[run]
    reasons = {
        "missing reward": rows_where(missing),
        "infinite reward": rows_where(~valid & ~missing),
        "singleton group": rows_where(valid & runs.per_row(runs.singleton)[run]),
        "constant group": rows_where(valid & runs.per_row(runs.constant)[run]),
    }
    rows = local.stop - local.start
    metrics = {"runs": float(len(runs.values)), **runs.report().metrics}
    local_rows = Grouped(rewards, [0] * rows)  # has the type and device of the rewards
    return local_rows.to_advantages(scores[local], mask, Report(rows, reasons, metrics))


@ESTIMATORS.register(
    "gigpo", source="GiGPO (Feng et al., 2025, arXiv 2505.10978): a run among runs + omega * a step among steps"
)
def gigpo(
    step_rewards: PerRow,
    groups: Ids,
    runs: Ids,
    steps: Ids,
    states: Ids,
    mask: PerToken | None = None,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    normalize: str = "none",
    missing: str = "exclude",
    std: str = "sample",
    eps: float = 1e-6,
    singleton: str = "zero",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Advantages:
    """Add the score of a run within its task and the score of a step among steps from the same state (GiGPO).

    There is one row for each step. The run is scored by the sum of its step rewards; a step by its discounted
    return-to-go, among all steps of the *same task* that began in the same state (Trinity compares across tasks). A
    lone state scores 0. A run that lacks the reward of a step scores 0 among runs, and its steps up to there score 0
    among states; it is in neither statistic, and all its rows are in the report.

    Args:
        step_rewards: [B] Reward of each step.
        groups: [B] Task id of each row.
        runs: [B] Run id of each row.
        steps: [B] Number of the step within its run.
        states: [B] Id of the state that the step began in; `None`: unknown.
        mask: [B, R] or packed: which tokens count. `None`: all.
        omega: Weight of the score among states.
        gamma: Discount per step, 0 to 1.
        normalize: `"std"` divides both scores by their deviation plus eps; `"none"` does not.
        missing: `"exclude"`, or `"zero"` (Trinity): a step without a reward adds nothing.
        std: `"sample"` (n - 1) or `"population"` (n) standard deviation.
        eps: Added to the denominator.
        singleton: Score of a row that is alone in its group: `"zero"`, or its `"raw"` reward.
        process_group: Processes over whose rows statistics are computed.

    Returns:
        Advantages in the layout of the mask, 0 where it is False; without a mask [B]. The report lists missing rewards,
        lone rows and constant groups.

    Raises:
        ValueError: If an option is invalid, or the number of rows differs.

    >>> gigpo([0.0, 1.0, 0.5, 0.0], ["t"] * 4, [0, 0, 1, 1], [0, 1, 0, 1], ["a", "b", "a", "c"]).advantages
    tensor([ 0.5000,  0.2500, -0.5000, -0.2500])
    """
    check_choice("normalize", normalize, ("none", "std"))
    check_float("eps", eps, 0)
    check_float("omega", omega)
    check_float("gamma", gamma, 0, 1)
    episodes = _Episodes(step_rewards, groups, runs, steps, states, process_group)
    check_choice("std", std, STD)
    check_choice("missing", missing, ("exclude", "zero"))
    has_reward = np.isfinite(episodes.rewards)
    rewards = np.where(has_reward | (missing == "exclude"), episodes.rewards, 0.0)
    order = episodes.in_order()
    to_go = np.zeros(len(rewards))
    for i, after in zip(order[::-1].tolist(), [None, *order[::-1].tolist()], strict=False):
        same = after is not None and episodes.run[after] == episodes.run[i]
        to_go[i] = rewards[i] + (gamma * to_go[after] if same else 0.0)
    of_run: list[list[float]] = [[] for _ in episodes.run_group]
    for run, reward in zip(episodes.run.tolist(), rewards.tolist(), strict=True):
        of_run[run].append(reward)
    # Exact sums: runs with the same rewards in another order are exactly equal.
    totals = np.array([_sum_rewards(rewards_of_run) for rewards_of_run in of_run])
    grouped_runs = Grouped(totals, episodes.run_group)
    by_run = grouped_runs.fill_singletons(_center(grouped_runs, normalize, std, eps), singleton)
    anchors = Grouped(to_go, list(zip(episodes.group.tolist(), _state_keys(episodes.states), strict=True)))
    by_state = anchors.fill_singletons(_center(anchors, normalize, std, eps), "zero")
    result = _score_rows(episodes, grouped_runs, by_run[episodes.run] + omega * by_state, step_rewards, mask)
    several = int((anchors.count > 1).sum())
    reasons = {}
    if missing == "zero":
        reasons["missing reward"] = rows_where(np.isnan(episodes.own_rewards))
        reasons["infinite reward"] = rows_where(np.isinf(episodes.own_rewards))
    metrics = {
        "anchor_groups": float(len(anchors.group_ids)),
        "anchor_groups_shared": float(several),
        "mean_abs_episode": float(np.abs(by_run[episodes.run]).mean()) if len(rewards) else 0.0,
        "mean_abs_step": float(np.abs(by_state).mean()) if len(rewards) else 0.0,
    }
    return result.with_report(result.report.plus(reasons, metrics))


def _sum_rewards(rewards: list[float]) -> float:
    """Sum rewards exactly; NaN if one is missing, infinite if one is."""
    if all(map(math.isfinite, rewards)):
        return math.fsum(rewards)
    return math.nan if any(map(math.isnan, rewards)) else math.inf


def _center(grouped: Grouped, normalize: str, std: str, eps: float) -> Floats:
    centered = grouped.centered()
    return centered if normalize == "none" else grouped.divide(centered, grouped.per_row(grouped.std(std)) + eps)


def _state_keys(states: list[Any]) -> list[Any]:
    """Return a key for each state; an unknown state equals no other."""
    return [("unknown", i) if state is None else ("state", state) for i, state in enumerate(states)]


__all__ = [
    "LEVELS",
    "asymre",
    "cpgd",
    "dr_grpo",
    "gigpo",
    "grpo",
    "opmd",
    "pass_at_k_advantage",
    "pass_at_k_estimate",
    "rec",
    "rloo",
    "step_wise_grpo",
]
