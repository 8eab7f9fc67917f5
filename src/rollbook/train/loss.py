"""Losses of a micro-batch: policy loss, KL divergence, entropy bonus and critic loss.

Invariant: losses and metrics are divided by the denominators of the whole minibatch, so that those of its micro-batches
add up to those of the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollbook.algorithms.aggregate import count_denominators
from rollbook.algorithms.kl import kl_loss
from rollbook.algorithms.losses import entropy_loss, value_loss
from rollbook.batch import Batch
from rollbook.batch.batch import Tokens
from rollbook.batch.columns import TOKEN_COLUMNS
from rollbook.batch.plan import Denominators
from rollbook.core.rows import Rows
from rollbook.models.logprobs import TokenStats
from rollbook.train.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from rollbook.train.rows import TrainRows


@dataclass(frozen=True)
class LossNormalizers:
    """What the losses of a minibatch are divided by.

    Args:
        all: Denominators of all losses but the policy's.
        policy: Denominators of the policy loss: of pairs their number, of mixed data a pair for policy and expert.
        norm: The constant of the mode `seq-mean-token-sum-norm`.
    """

    all: Denominators
    policy: Any
    norm: float | None

    @classmethod
    def from_rows(
        cls, algorithm: AlgorithmConfig, rows: TrainRows, indices: Sequence[int], max_tokens: int | None
    ) -> LossNormalizers:
        """Count the tokens and rows of a minibatch.

        Args:
            algorithm: The algorithm.
            rows: The rows of a step.
            indices: Indices of the rows of the minibatch.
            max_tokens: Maximum response length.
        """
        mask = Rows([rows.masks[i] for i in indices])
        everything = count_denominators(mask)
        count = algorithm.loss_entry.denominators
        policy: Any = everything if count is None else count(rows, indices)
        if algorithm.mixed:
            everything = policy[0]  # KL divergence and entropy bonus are for the rows of the policy only
        norm = None
        if algorithm.aggregation_mode == "seq-mean-token-sum-norm":
            if max_tokens is None:
                raise ValueError("max_tokens: missing, expected the maximum response length, which divides the loss")
            norm = float(len(indices) * max_tokens)
        return cls(everything, policy, norm)


def policy_loss(
    algorithm: AlgorithmConfig,
    stats: TokenStats,
    batch: Batch,
    rows: TrainRows,
    normalizers: LossNormalizers,
    *,
    step: int,
    ref_logprobs: Tokens | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy loss of a micro-batch.

    Args:
        algorithm: The loss and its options.
        stats: Log-probs and entropies of the trained policy, in the layout of the batch.
        batch: The micro-batch.
        rows: Its rows.
        normalizers: Normalizers of its minibatch.
        step: The training step.
        ref_logprobs: Log-probs of the reference, if the batch has none.

    Returns:
        The loss to call `backward` on, and detached shares of metrics: `loss`, those of the policy's loss, `kl`,
        `entropy`.
    """
    mask, weights = batch.action_mask, batch.loss_weights
    ref: Any = batch.ref_logprobs if ref_logprobs is None else ref_logprobs
    columns: dict[str, Any] = {name: getattr(batch, name) for name in TOKEN_COLUMNS}
    columns |= {"mask": mask, "ref_logprobs": ref if algorithm.needs_reference else None}
    columns |= {"new_logprobs": stats.logprobs, "step": step}
    columns |= {"expert_mask": rows.expert, "pairs": rows.pairs, "chosen": rows.chosen}
    entry = algorithm.loss_entry
    options: dict[str, Any] = {**algorithm.loss_options, "denominators": normalizers.policy}
    if weights is not None and entry.data != "pairs":
        if "weights" not in entry.options:
            raise ValueError(f"loss {entry.name!r}: has no option 'weights', and the records have loss weights")
        options["weights"] = weights
    if normalizers.norm is not None:
        options["norm"] = normalizers.norm
    policy = entry.call({name: columns.get(name) for name in entry.inputs}, options)
    total, metrics = policy.value, dict(policy.metrics)
    shared: dict[str, Any] = {
        "mode": algorithm.aggregation_mode,
        "norm": normalizers.norm,
        "denominators": normalizers.all,
        "weights": weights,
    }
    own_mask = mask if rows.expert is None else _without_expert(mask, rows.expert)
    if algorithm.kl_coef and algorithm.kl_in == "loss" and not algorithm.pairs:
        divergence = kl_loss(
            stats.logprobs,
            ref,
            own_mask,
            batch.old_logprobs,
            estimator=algorithm.kl_estimator,
            coef=algorithm.kl_coef,
            **shared,
        )
        total, metrics["kl"] = total + divergence.value, divergence.metrics["kl_loss"]
    if stats.entropy is not None:
        bonus = entropy_loss(stats.entropy, own_mask, coef=algorithm.entropy_coef, **shared)
        total, metrics["entropy"] = total + bonus.value, bonus.metrics["entropy_loss"]
    return total, {**metrics, "loss": total.detach()}


def critic_loss(
    algorithm: AlgorithmConfig, values: Tokens, batch: Batch, normalizers: LossNormalizers
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the critic loss of a micro-batch.

    Args:
        algorithm: The algorithm, for its `value_clip`.
        values: Values of the trained critic, in the layout of the batch.
        batch: The micro-batch, with `values` and `returns`.
        normalizers: Normalizers of its minibatch.

    Returns:
        The loss, and detached shares of metrics: `value_loss`, `vf_clipfrac`, `value`.
    """
    loss = value_loss(
        values,
        batch.returns,  # type: ignore[arg-type]
        batch.action_mask,
        batch.values,
        clip=algorithm.value_clip,
        mode="token-mean",
        denominators=normalizers.all,
    )
    return loss.value, dict(loss.metrics)


def _without_expert(mask: Tokens, expert: Sequence[bool]) -> Tokens:
    """Mask out the rows of an expert."""
    flags = torch.tensor(list(expert))
    if isinstance(mask, Rows):
        by_token = torch.repeat_interleave(flags, torch.tensor(mask.lengths))
        return Rows(mask.values & ~by_token.to(mask.values.device), mask.lengths)
    return mask & ~flags.to(mask.device).unsqueeze(1)
