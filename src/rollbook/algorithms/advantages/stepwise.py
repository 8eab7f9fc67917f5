"""Estimators for multi-step runs with one row per step: step-wise GRPO and GiGPO.

Invariant: steps are ordered by their step number, runs and tasks are identified by id, and states are compared only
within a task. The position of a row in the batch has no effect.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.algorithms.advantages.grouped import LEVELS
from rollbook.algorithms.groups import STD, Floats, Grouped, as_ids, as_rewards, last_steps, number_ids
from rollbook.algorithms.layout import Ids, PerRow, PerToken
from rollbook.algorithms.registry import ESTIMATORS
from rollbook.algorithms.results import Advantages, Report, rows_where
from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup, check_process_group

__all__ = ["gigpo", "step_wise_grpo"]


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
        """[all rows] Return row numbers, ordered by run and step."""
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
