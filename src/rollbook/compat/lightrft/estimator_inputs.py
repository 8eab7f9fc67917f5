"""Inputs of estimators, by name, from an `ExperienceBatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rollbook.algorithms.inputs import Inputs, all_of, group_id, run_id
from rollbook.compat.lightrft.layouts import action_starts, predicted_mask, spans_of_rows
from rollbook.core.ids import EID
from rollbook.core.rows import Rows

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import ExperienceBatch


def estimator_inputs(batch: ExperienceBatch, keys: Mapping[str, str]) -> Inputs:
    info = batch.info or {}
    extras = batch.extras or {}
    inner = info.get("info") or {}

    def ids() -> list[EID]:
        known = [eid for eid in batch.ids or () if eid is not None]
        if len(known) != len(batch):
            raise ValueError("batch: got rows without ids, expected an id for each, to group by")
        return [eid if isinstance(eid, EID) else EID.parse(eid) for eid in known]

    def whole(name: str, value: Any) -> Any:
        """A field that every row has, or none; rows that lack it read as padding, and are no data."""
        absent = batch.origin.absent.get(name)
        if value is None or not absent:
            return value
        raise ValueError(f"{name}: row {min(absent)} has none, expected it in every row, or in none")

    def rewards() -> Any:
        """As `row_rewards` of the records."""
        known, token_rewards = info.get("reward"), extras.get("token_level_reward")
        known = [None] * len(batch) if known is None else known
        if token_rewards is None or isinstance(known, torch.Tensor):
            return known
        absent = batch.origin.absent.get("extras.token_level_reward", ())
        sums = [None if i in absent else float(row.double().sum()) for i, row in enumerate(token_rewards)]
        return [total if reward is None else reward for reward, total in zip(known, sums, strict=True)]

    makers: dict[str, Callable[[], Any]] = {
        "rewards": rewards,
        "groups": lambda: [group_id(eid) for eid in ids()],
        "runs": lambda: [run_id(eid) for eid in ids()],
        "steps": lambda: [eid.step for eid in ids()],
        "ids": lambda: [eid.uid for eid in ids()],
        "mask": lambda: predicted_mask(batch),
        "response": lambda: _response(batch),
        "token_rewards": lambda: extras.get("token_level_reward"),
        "without_token_rewards": lambda: sorted(batch.origin.absent.get("extras.token_level_reward", ())),
        "values": lambda: whole("values", batch.values),
        "log_probs": lambda: whole("action_log_probs", batch.action_log_probs),
        "ref_log_probs": lambda: whole("base_action_log_probs", batch.base_action_log_probs),
        "teacher_log_probs": lambda: whole("extras.teacher_logprobs", extras.get("teacher_logprobs")),
        "entropy": lambda: whole("action_entropy", batch.action_entropy),
    }
    makers |= {name: lambda key=key: info.get(key, inner.get(key)) for name, key in keys.items()}  # type: ignore[misc]
    return Inputs(makers, len(batch))


def _response(batch: ExperienceBatch) -> Any:
    """The slots that are a row's response, tools' tokens at its end included, and no padding."""
    if isinstance(batch.action_mask, Rows):
        return all_of(batch.action_mask)
    if batch.action_mask is None:
        return None
    width, slots = batch.sequences.shape[1], batch.action_mask.shape[1]
    _, acting = spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return acting.mask(torch.bool, batch.action_mask.device)
