"""Records of what LightRFT's maker makes, to compare them with those of the native pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollbook import Experience, Experiences
from rollbook.compat.lightrft.samples import RolloutBatches
from rollbook.experience_maker import NaiveExperienceMaker

_FIELDS = {
    "old_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "entropy": "action_entropy",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""Fields of a record, and the fields of the batch that they come from."""


def make_records(maker: NaiveExperienceMaker, prompts: Any, **options: Any) -> Experiences:
    """Make experience, and return it as records, one for each sample."""
    batches = RolloutBatches(maker.make_experience_list(prompts, **options))
    rollout, maker._rollout = maker._rollout, None
    samples = [sample for part in ([] if rollout is None else rollout.samples) for sample in part.rollouts or ()]
    if rollout is None or rollout.records is None:  # a subclass made the experience itself
        rows = [sample.to_experience() for sample in samples]
    else:
        rows = rollout.records.rows()
    for row, sample in zip(rows, samples, strict=True):
        row.metrics.update({name: number for name, number in sample.metrics.items() if name not in row.metrics})
    return finished_records(rows, batches)


def finished_records(rows: Sequence[Experience], rollout: RolloutBatches) -> Experiences:
    """Give records the masks, rewards, log-probs, values and advantages of their rows in batches, matched by id."""
    rows = _match_rows(rows, rollout)
    if not rows:
        return Experiences([])
    masks = rollout.rows("action_mask")
    rows = [_with_mask(row, None if masks is None else masks[i]) for i, row in enumerate(rows)]
    columns: dict[str, list[Any]] = {"reward": rollout.numbers("reward").tolist()}
    for name, batch_field in _FIELDS.items():
        column = rollout.rows(batch_field)
        if column is not None:
            columns[name] = [row.clone() for row in column]
    return Experiences(rows).assign(**columns)


def _match_rows(records: Sequence[Experience], rollout: RolloutBatches) -> list[Experience]:
    """[N] Return the record of each row."""
    ids = rollout.ids()
    by_uid = {record.eid.uid: record for record in records}
    uids = [] if ids is None else [eid.uid for eid in ids]
    if ids is not None and by_uid.keys() >= set(uids) and len(by_uid) == len(records):
        return [by_uid[uid] for uid in uids]
    if len(records) != len(rollout):
        raise ValueError(
            f"experiences: got {len(rollout)} rows, expected {len(records)}, one for each sample, or rows with the "
            "samples' ids"
        )
    return list(records)


def _with_mask(row: Experience, mask: torch.Tensor | None) -> Experience:
    """Return a record with the mask of its row, which the estimator or a filter may have narrowed."""
    if mask is None or (row.action_mask is not None and torch.equal(row.action_mask, mask.cpu())):
        return row
    return row.replace(action_mask=mask.cpu())
