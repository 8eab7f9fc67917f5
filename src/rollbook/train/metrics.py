"""Metrics of records: of a rollout, and of the records that a step trains on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from rollbook.algorithms.inputs import row_rewards
from rollbook.algorithms.kl import token_kl
from rollbook.batch.columns import mask_unpredicted
from rollbook.core.experiences import Experiences
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows


def rollout_metrics(records: Experiences) -> dict[str, float]:
    """Compute counts and means over a rollout: `rollout/...` and `reward/...`, with a mean for each part of the reward.

    >>> from rollbook import Experience
    >>> rollout_metrics(Experiences([Experience(tokens=[1, 2, 3], reward=0.5)]))["rollout/response_length"]
    2.0
    """
    infos, reasons = records.values("info"), records.values("finish_reason")
    masks = mask_unpredicted(records).values("action_mask")
    lengths = [0 if mask is None else int(mask.sum()) for mask in masks]
    rewards = [math.nan if reward is None else reward for reward in records.values("reward")]
    metrics = {
        "rollout/samples": float(len(records)),
        "rollout/failed": float(sum(reason == "error" for reason in reasons)),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/prompts_cut": _share("prompt_truncated_from" in info for info in infos),
        "rollout/truncated": _share(reason == "length" for reason in reasons),
        "reward/errors": float(sum("reward_error" in info for info in infos)),
    }
    finite = [reward for reward in rewards if not math.isnan(reward)]
    if finite:
        metrics |= {"reward/mean": float(np.mean(finite)), "reward/std": float(np.std(finite))}
    parts = records.values("metrics")
    for name in dict.fromkeys(name for info in infos for name in info.get("reward_parts") or ()):
        numbers = [part[name] for part in parts if name in part and not math.isnan(part[name])]
        if numbers:
            metrics[f"reward/{name}"] = float(np.mean(numbers))
    return metrics


def record_metrics(
    records: Experiences, *, version: int, success: float = 1.0, pairs: bool = False
) -> dict[str, float]:
    """Compute means over the records of a step.

    Args:
        records: The records.
        version: The policy's version when the step began, for `staleness`.
        success: The least reward that counts as a success.
        pairs: Whether they are pairs of answers, which have no response length.
    """
    rewards = row_rewards(records)
    finite = rewards[~np.isnan(rewards)]
    metrics = {"records": float(len(records))}
    if not pairs:
        metrics["length"] = float((records.token_lengths() - records.prompt_lengths()).mean())
    if len(finite):
        metrics |= {"reward": float(finite.mean()), "success": float((finite >= success).mean())}
    entropy = records.column("entropy")
    if isinstance(entropy, Ragged) and entropy.valid is None and len(entropy.values):
        metrics["entropy"] = float(np.asarray(entropy.values, dtype=np.float64).mean())
    versions = [number for number in records.values("policy_versions") if number is not None]
    oldest = [
        number if isinstance(number, int) else int(number.min())
        for number in versions
        if isinstance(number, int) or len(number)
    ]
    if oldest:
        metrics["staleness"] = float(version - np.mean(oldest))
    return metrics


def mean_divergence(records: Experiences, estimator: str) -> float:
    """Compute the mean KL divergence from the reference over response tokens, by the columns of the records."""
    columns = mask_unpredicted(records)
    policy, reference = Rows(columns.values("policy_logprobs")), Rows(columns.values("ref_logprobs"))
    masks = zip(columns.values("action_mask"), policy, strict=True)
    mask = Rows([torch.ones(len(row), dtype=torch.bool) if row_mask is None else row_mask for row_mask, row in masks])
    divergence = token_kl(policy, reference, mask, estimator=estimator)
    return float(divergence.values[mask.values].mean()) if bool(mask.values.any()) else 0.0


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean(list(flags)))
