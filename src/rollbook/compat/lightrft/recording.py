"""A rollout's samples as records, with everything that was found out about them.

Invariant: record i is of sample i, with its id; what the engine said of it stays as it is, and what was computed since
lies beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollbook.compat.lightrft.rollout_batches import Whole
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.sampling import Sample

_FIELDS = {
    "policy_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "entropy": "action_entropy",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""A record's fields, and those of a batch that they come from."""


def records_of(rollouts: Sequence[Sample], whole: Whole, made: Sequence[Experience] | None = None) -> Experiences:
    """The records of those of an engine's samples that `whole` still has, in its order. `made`: the samples' records as
    `to_experience` gives them, if somebody has made them already; what was found out is put into these.

    >>> from rollbook.compat.lightrft.samples import batch_of, samples_of
    >>> from rollbook.rollout import ScriptedEngine
    >>> rollouts = ScriptedEngine([[7, 2]]).generate([[5], [6]])
    >>> batch = batch_of(samples_of(rollouts))
    >>> batch.info["reward"], batch.advantages = torch.tensor([1.0, 0.0]), torch.ones(2, 2)
    >>> [(row.reward, row.advantages.tolist()) for row in records_of(rollouts, Whole([batch]))]
    [(1.0, [1.0, 1.0]), (0.0, [1.0, 1.0])]
    """
    return finished([one.to_experience() for one in rollouts] if made is None else made, whole)


def finished(rows: Sequence[Experience], whole: Whole) -> Experiences:
    """Records with what was found out about them: masks, rewards, log-probs, values, advantages.

    `whole` has a row for each record, matched by id: a record without a row (filtered out) is left out, and the result
    is in the order of `whole`. Rows without ids are matched by place.

    >>> from rollbook.compat.lightrft.batch import from_experiences
    >>> record = Experience(tokens=[5, 7, 2], prompt_length=1)
    >>> batch = from_experiences([record])
    >>> batch.info["reward"], batch.values = torch.tensor([1.0]), torch.ones(1, 2)
    >>> finished([record], Whole([batch]))[0].values.tolist()
    [1.0, 1.0]
    """
    rows = _matched(rows, whole)
    if not rows:
        return Experiences([])
    masks = whole.rows("action_mask")
    rows = [_masked(row, None if masks is None else masks[i]) for i, row in enumerate(rows)]
    for row, error in zip(rows, whole.entries("reward_error") or (), strict=False):
        if error is not None:
            row.info["reward_error"] = error
    for row, parts in zip(rows, whole.entries("reward_parts") or (), strict=False):
        if parts is not None:
            row.info["reward_parts"] = parts
    at = 0
    for batch, size in zip(whole.batches, whole.sizes, strict=True):
        for name, values in ((batch.info or {}).get("reward_metrics") or {}).items():
            for row, value in zip(rows[at : at + size], values.tolist(), strict=True):
                row.metrics[name] = value
        at += size
    found: dict[str, list[Any]] = {"reward": whole.numbers("reward").tolist()}
    for name, field in _FIELDS.items():
        column = whole.rows(field)
        if column is not None:
            found[name] = [values.clone() for values in column]
    return Experiences(rows).assign(**found)


def _matched(records: Sequence[Experience], whole: Whole) -> list[Experience]:
    """[N] The record of each row."""
    ids = whole.ids()
    by_uid = {record.eid.uid: record for record in records}
    uids = [] if ids is None else [eid.uid for eid in ids]
    if ids is not None and by_uid.keys() >= set(uids) and len(by_uid) == len(records):
        return [by_uid[uid] for uid in uids]
    if len(records) != len(whole):
        raise ValueError(
            f"experiences: got {len(whole)} rows, expected {len(records)}, one for each sample, or rows with the "
            "samples' ids"
        )
    return list(records)


def _masked(row: Experience, mask: torch.Tensor | None) -> Experience:
    """A record with another mask, where the estimator or a filter left tokens out."""
    if mask is None or (row.action_mask is not None and torch.equal(row.action_mask, mask.cpu())):
        return row
    return row.replace(action_mask=mask.cpu())
