"""Advantage estimators by name (`ESTIMATORS`), and `estimate`, which applies them to records or a batch.

Invariant: every estimator is in `ESTIMATORS`, its signature defines its options and defaults, and
`estimate(name, data)` returns what the function returns for the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from rollbook.algorithms.advantages.grouped import (
    asymre,
    cpgd,
    dr_grpo,
    gigpo,
    grpo,
    opmd,
    pass_at_k_advantage,
    pass_at_k_estimate,
    rec,
    rloo,
    step_wise_grpo,
)
from rollbook.algorithms.advantages.temporal import (
    cumulative_returns,
    gae,
    place_rewards,
    ppo,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from rollbook.algorithms.advantages.tokenwise import clip_b, clip_v, jsd, on_policy_distill
from rollbook.algorithms.groups import as_rewards
from rollbook.algorithms.inputs import EstimatorData, InputBatch, Inputs, RecordIds, group_inputs, read_inputs
from rollbook.algorithms.registry import ESTIMATORS, Estimator
from rollbook.algorithms.results import Advantages, Report
from rollbook.core.experiences import as_experiences
from rollbook.core.process_group import SINGLE_PROCESS, ProcessGroup

EstimatorOption: TypeAlias = bool | float | str | ProcessGroup | None


def estimate(
    name: str, data: EstimatorData, *, info_keys: Mapping[str, str] | None = None, **options: EstimatorOption
) -> Advantages:
    """Estimate the advantages of records, of a batch, or of inputs by name.

    Records are grouped by task. A run of several rows counts once in its group, and a record without a task is a group
    of its own. Estimators over time use the token-level rewards of records, or else their reward on the last action;
    `reinforce_plus_plus_baseline`, which compares rows, always uses the reward.

    Store the result with `records.assign(advantages=result.advantages, returns=result.returns)`, or assign it to the
    batch.

    Args:
        name: A key of `ESTIMATORS`.
        data: `Experiences` (or a list of records), a batch with `estimator_inputs`, or a mapping of the inputs of the
            function.
        info_keys: Keys of `info` under which records have `states`, `step_rewards`, `baselines`, `values`, `entropy` or
            `necs`.
        options: Options of the estimator: `ESTIMATORS[name].options`.

    Returns:
        Advantages and returns in the layout of the mask.

    Raises:
        ValueError: If the name or an option is unknown, or an input is missing.

    >>> from rollbook import Experience, Experiences
    >>> records = Experiences([
    ...     Experience(eid={"task": task, "run": run}, tokens=[1, 2, 3], reward=float(run == task))
    ...     for task in (0, 1) for run in (0, 1, 2)
    ... ])
    >>> result = estimate("dr_grpo", records)
    >>> records.assign(advantages=result.advantages)[0].advantages
    tensor([0.6667, 0.6667])
    >>> estimate("grpo", records, eps_=1)
    Traceback (most recent call last):
        ...
    ValueError: grpo: unknown option 'eps_'; did you mean 'eps'? (std, eps, level, singleton, process_group)
    """
    entry = ESTIMATORS[name]
    if isinstance(data, Mapping):
        return ESTIMATORS.call(name, data, **options)  # type: ignore[no-any-return]
    batch = data if isinstance(data, InputBatch) else None
    records = None if isinstance(data, InputBatch) else as_experiences(data)
    inputs: Inputs = read_inputs(data if records is None else records, info_keys=info_keys)  # type: ignore[assignment]
    skipped = {"groups", "runs", "rewards", "token_rewards"}
    if options.get("observations", "skip") == "skip":
        skipped.add("response")  # not read by the estimator
    arguments = {need: inputs[need] for need in entry.inputs if need in inputs and need not in skipped}
    arguments |= _rewards(entry, inputs)
    has_ids = batch is None or (batch.ids is not None and None not in batch.ids)
    if "groups" in entry.inputs and (has_ids or entry.inputs["groups"] or entry.compares_runs):
        process_group: Any = options.get("process_group", SINGLE_PROCESS)
        required = entry.inputs.get("runs", False)
        arguments |= group_inputs(inputs, records, required=required, process_group=process_group)
    result = entry.call(arguments, options)
    if not isinstance(result, Advantages):
        raise ValueError(
            f"{entry.name}: returned {type(result).__name__}, expected Advantages, as `Grouped.to_advantages` builds"
        )
    if not result.report.rows:
        result = result.with_report(Report(inputs.count, result.report.reasons, result.report.metrics))
    if not has_ids:
        return result
    return result.with_report(result.report.with_ids(RecordIds(records) if records is not None else inputs["ids"]))


def _rewards(entry: Estimator, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rewards that an estimator reads: of rows, or of tokens for rows that have them."""
    if "rewards" not in entry.inputs:
        return {}
    rewards = inputs["rewards"]
    if not entry.takes_token_rewards or inputs["token_rewards"] is None:
        return {"rewards": rewards}
    # Token rewards include the reward of the record: for each row one or the other, never both.
    rewards, without = as_rewards("rewards", rewards), inputs["without_token_rewards"]
    row_rewards = np.where(np.isnan(rewards), np.nan, 0.0)  # a reward that could not be computed stays missing
    row_rewards[without] = rewards[without]
    if not without and not np.isnan(row_rewards).any():
        return {"token_rewards": inputs["token_rewards"]}
    return {"token_rewards": inputs["token_rewards"], "rewards": row_rewards}


__all__ = [
    "ESTIMATORS",
    "Advantages",
    "asymre",
    "clip_b",
    "clip_v",
    "cpgd",
    "cumulative_returns",
    "dr_grpo",
    "estimate",
    "gae",
    "gigpo",
    "grpo",
    "jsd",
    "on_policy_distill",
    "opmd",
    "pass_at_k_advantage",
    "pass_at_k_estimate",
    "place_rewards",
    "ppo",
    "rec",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "step_wise_grpo",
]
