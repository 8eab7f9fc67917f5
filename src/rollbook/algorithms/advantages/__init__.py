"""Advantage estimators: pure functions by name, and `estimate`, which feeds them from records or a batch.

Invariant: every estimator is in `ESTIMATORS`, its signature is the one place where its options and defaults stand, and
`estimate(name, data)` gives what the function gives for the same numbers.
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
    """The advantages of records, of a batch, or of inputs by name, by the estimator called `name`.

    data: `Experiences` (or a list of records), a batch with `estimator_inputs`, or a mapping of the function's inputs.
    Records are grouped by task and counted by run; a run of several rows counts once, and a record that was never given
    a task is a group of its own. An estimator over time takes the records' token-level rewards, or else their reward on
    the last action (`reinforce_plus_plus_baseline`, which compares rows, always the reward). Options are the
    function's: `ESTIMATORS[name].options`. `info_keys` says under which keys of `info` records keep `states`,
    `step_rewards`, `baselines`, `values`, `entropy` or `necs`.

    Put the result where it belongs by `experiences.assign(advantages=found.advantages, returns=found.returns)` or by
    assigning to the batch.

    >>> from rollbook import Experience, Experiences
    >>> many = Experiences([
    ...     Experience(eid={"task": t, "run": r}, tokens=[1, 2, 3], reward=float(r == t))
    ...     for t in (0, 1) for r in (0, 1, 2)
    ... ])
    >>> found = estimate("dr_grpo", many)
    >>> many.assign(advantages=found.advantages)[0].advantages
    tensor([0.6667, 0.6667])
    >>> estimate("grpo", many, eps_=1)
    Traceback (most recent call last):
        ...
    ValueError: grpo: unknown option 'eps_'; did you mean 'eps'? (std, eps, level, singleton, ranks)
    """
    entry = ESTIMATORS[name]
    if isinstance(data, Mapping):
        return ESTIMATORS.call(name, data, **options)  # type: ignore[no-any-return]
    many = None if hasattr(data, "estimator_inputs") else as_experiences(data)
    inputs: Inputs = inputs_of(data if many is None else many, info_keys=info_keys)  # type: ignore[assignment]
    apart = {"groups", "runs", "rewards", "token_rewards"}
    if options.get("observations", "skip") == "skip":
        apart.add("response")  # nobody asks
    given = {need: inputs[need] for need in entry.inputs if need in inputs and need not in apart}
    given |= _rewards(entry, inputs)
    grouped = many is not None or (data.ids is not None and None not in data.ids)
    if "groups" in entry.inputs and (grouped or entry.inputs["groups"] or entry.compares_runs):
        given |= group_inputs(
            inputs, many, required=entry.inputs.get("runs", False), ranks=options.get("ranks", SINGLE_PROCESS)
        )
    found = entry.call(given, options)
    if not isinstance(found, Advantages):
        raise ValueError(
            f"{entry.name}: got {type(found).__name__} back, expected Advantages, as `Grouped.scored` makes"
        )
    if not found.report.rows:
        found = found.with_report(Report(inputs.count, found.report.reasons, found.report.metrics))
    if many is None and (data.ids is None or None in data.ids):
        return found
    return found.with_report(found.report.with_ids(Uids(many) if many is not None else inputs["ids"]))


def _rewards(entry: Estimator, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards that an estimator takes: one for each row, or those of tokens for rows that have them."""
    if "rewards" not in entry.inputs:
        return {}
    rewards = inputs["rewards"]
    if not entry.takes_token_rewards or inputs["token_rewards"] is None:
        return {"rewards": rewards}
    # A record's token rewards are made from its reward: row by row the one or the other, never both.
    rewards, without = as_rewards("rewards", rewards), inputs["without_token_rewards"]
    own = np.where(np.isnan(rewards), np.nan, 0.0)  # a reward that could not be computed is missing all the same
    own[without] = rewards[without]
    if not without and not np.isnan(own).any():
        return {"token_rewards": inputs["token_rewards"]}
    return {"token_rewards": inputs["token_rewards"], "rewards": own}


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
