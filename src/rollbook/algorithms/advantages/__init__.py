"""Advantage estimators by name (`ESTIMATORS`), and `estimate`, which feeds them from records or a batch.

Invariant: every estimator is in `ESTIMATORS`, its signature defines its options and defaults, and
`estimate(name, data)` returns what the function returns for the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollbook.algorithms.advantages.grouped import (
    asymre,
    cpgd,
    dr_grpo,
    grpo,
    opmd,
    pass_at_k,
    pass_at_k_advantage,
    rec,
    rloo,
)
from rollbook.algorithms.advantages.stepwise import gigpo, step_wise_grpo
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
from rollbook.algorithms.inputs import Inputs, Uids, group_inputs, inputs_of
from rollbook.algorithms.registry import ESTIMATORS, Estimator
from rollbook.algorithms.results import Advantages, Report
from rollbook.core.experiences import as_experiences
from rollbook.core.process_group import SINGLE_PROCESS


def estimate(name: str, data: Any, *, info_keys: Mapping[str, str] | None = None, **options: Any) -> Advantages:
    """Estimate the advantages of records, of a batch, or of inputs by name.

    Records are grouped by task and counted by run; a run of several rows counts once, and a record without a task is a
    group of its own. An estimator over time takes the token-level rewards of the records, or else their reward on the
    last action (`reinforce_plus_plus_baseline`, which compares rows, always the reward).

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
    >>> many = Experiences([
    ...     Experience(eid={"task": t, "run": r}, tokens=[1, 2, 3], reward=float(r == t))
    ...     for t in (0, 1) for r in (0, 1, 2)
    ... ])
    >>> result = estimate("dr_grpo", many)
    >>> many.assign(advantages=result.advantages)[0].advantages
    tensor([0.6667, 0.6667])
    >>> estimate("grpo", many, eps_=1)
    Traceback (most recent call last):
        ...
    ValueError: grpo: unknown option 'eps_'; did you mean 'eps'? (std, eps, level, singleton, process_group)
    """
    entry = ESTIMATORS[name]
    if isinstance(data, Mapping):
        return ESTIMATORS.call(name, data, **options)  # type: ignore[no-any-return]
    records = None if hasattr(data, "estimator_inputs") else as_experiences(data)
    inputs: Inputs = inputs_of(data if records is None else records, info_keys=info_keys)  # type: ignore[assignment]
    apart = {"groups", "runs", "rewards", "token_rewards"}
    if options.get("observations", "skip") == "skip":
        apart.add("response")  # nobody asks
    arguments = {need: inputs[need] for need in entry.inputs if need in inputs and need not in apart}
    arguments |= _rewards(entry, inputs)
    grouped = records is not None or (data.ids is not None and None not in data.ids)
    if "groups" in entry.inputs and (grouped or entry.inputs["groups"] or entry.compares_runs):
        arguments |= group_inputs(
            inputs,
            records,
            required=entry.inputs.get("runs", False),
            process_group=options.get("process_group", SINGLE_PROCESS),
        )
    result = entry.call(arguments, options)
    if not isinstance(result, Advantages):
        raise ValueError(
            f"{entry.name}: got {type(result).__name__} back, expected Advantages, as `Grouped.scored` makes"
        )
    if not result.report.rows:
        result = result.with_report(Report(inputs.count, result.report.reasons, result.report.metrics))
    if records is None and (data.ids is None or None in data.ids):
        return result
    return result.with_report(result.report.with_ids(Uids(records) if records is not None else inputs["ids"]))


def _rewards(entry: Estimator, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards that an estimator takes: one for each row, or those of tokens for rows that have them."""
    if "rewards" not in entry.inputs:
        return {}
    rewards = inputs["rewards"]
    if not entry.takes_token_rewards or inputs["token_rewards"] is None:
        return {"rewards": rewards}
    # A record's token rewards are made from its reward: row by row the one or the other, never both.
    rewards, without = as_rewards("rewards", rewards), inputs["without_token_rewards"]
    row_rewards = np.where(
        np.isnan(rewards), np.nan, 0.0
    )  # a reward that could not be computed is missing all the same
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
    "pass_at_k",
    "pass_at_k_advantage",
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
