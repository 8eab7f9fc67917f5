"""The loss of one micro-batch, as an algorithm has it: the policy's, the divergence, the entropy bonus; the critic's.

Invariant: losses and metrics are shares of the minibatch's, by the denominators of the whole of it, so that those of
its micro-batches add up to what one micro-batch would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.algorithms import LOSSES
from rollbook.algorithms.aggregate import denominators
from rollbook.algorithms.kl import kl_loss
from rollbook.algorithms.losses import entropy_loss, value_loss
from rollbook.algorithms.tokens import TokenStats
from rollbook.batch import ExperienceBatch
from rollbook.jagged import Rows
from rollbook.planner import Denominators
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.material import Material


@dataclass(frozen=True)
class Whole:
    """What a minibatch is divided by."""

    all: Denominators
    of_loss: Any
    """In the form the policy's loss takes: of pairs their number, of a mix one for each part."""
    norm: float | None
    """The constant of the mode `seq-mean-token-sum-norm`."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, material: Material, rows: Sequence[int], max_tokens: int | None) -> Whole:
        """Of these rows of a step."""
        mask = Rows([material.masks[i] for i in rows])
        found = denominators(mask)
        denominators_of = algorithm.loss_entry.denominators
        loss: Any = found if denominators_of is None else denominators_of(material, rows)
        if algorithm.mixed:
            found = loss[0]  # the divergence and the bonus are of its own rows alone
        norm = None
        if mode_of(algorithm) == "seq-mean-token-sum-norm":
            if max_tokens is None:
                raise ValueError("max_tokens: got None, expected the longest response, which the loss is divided by")
            norm = float(len(rows) * max_tokens)
        return cls(found, loss, norm)


def mode_of(algorithm: AlgorithmConfig) -> str:
    """How the algorithm's loss makes one number of tokens.

    >>> mode_of(AlgorithmConfig.preset("gspo")), mode_of(AlgorithmConfig.preset("dr_grpo"))
    ('seq-mean-token-mean', 'seq-mean-token-sum-norm')
    """
    options = LOSSES[algorithm.loss].options
    given = algorithm.loss_options.get("mode", options.get("mode"))
    return "token-mean" if given is None else str(given)


@dataclass(frozen=True)
class Flags:
    """What a micro-batch's rows are, beside their tokens."""

    pairs: list[str] | None
    chosen: list[bool] | None
    expert: list[bool] | None

    @classmethod
    def of(cls, material: Material, rows: Sequence[int]) -> Flags:
        """Of these rows of a step."""
        columns = (material.pairs, material.chosen, material.expert)
        return cls(*(None if one is None else [one[i] for i in rows] for one in columns))  # type: ignore[arg-type]


def policy_loss(
    algorithm: AlgorithmConfig,
    found: TokenStats,
    batch: ExperienceBatch,
    flags: Flags,
    whole: Whole,
    *,
    step: int,
    reference: Any = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to call backward on, and detached shares of metrics: `loss`, those of the policy's loss, `kl`,
    `entropy`.

    found: of the policy that learns, (B, A) or packed; reference: log-probs in the same layout, where the batch has
    none.
    """
    mask = batch.action_mask
    ref = batch.base_action_log_probs if reference is None else reference
    weights = (batch.extras or {}).get("loss_weights")
    data = {
        "log_probs": found.log_probs,
        "old_log_probs": batch.action_log_probs,
        "advantages": batch.advantages,
        "mask": mask,
        "ref_log_probs": ref if algorithm.needs_reference else None,
        "expert_mask": flags.expert,
        "step": step,
        "pairs": flags.pairs,
        "chosen": flags.chosen,
    }
    entry = LOSSES[algorithm.loss]
    options: dict[str, Any] = {**algorithm.loss_options, "whole": whole.of_loss}
    if weights is not None and "weights" in entry.options:
        options["weights"] = weights
    if whole.norm is not None:
        options["norm"] = whole.norm
    policy = entry.call({name: value for name, value in data.items() if name in entry.inputs}, options)
    total, metrics = policy.value, dict(policy.metrics)
    shared: dict[str, Any] = {"mode": mode_of(algorithm), "norm": whole.norm, "whole": whole.all}
    own = mask if flags.expert is None else _without(mask, flags.expert)
    if algorithm.kl_coef and algorithm.kl_in == "loss" and not algorithm.pairs:
        divergence = kl_loss(
            found.log_probs,
            ref,
            own,
            batch.action_log_probs,
            estimator=algorithm.kl_estimator,
            coef=algorithm.kl_coef,
            weights=weights,
            **shared,
        )
        total, metrics["kl"] = total + divergence.value, divergence.metrics["kl_loss"]
    if found.entropy is not None:
        bonus = entropy_loss(found.entropy, own, coef=algorithm.entropy_coef, weights=weights, **shared)
        total, metrics["entropy"] = total + bonus.value, bonus.metrics["entropy_loss"]
    return total, {**metrics, "loss": total.detach()}


def critic_loss(
    algorithm: AlgorithmConfig, values: Any, batch: ExperienceBatch, whole: Whole
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The critic's loss of a micro-batch, and detached shares of metrics: `value_loss`, `vf_clipfrac`, `value`."""
    loss = value_loss(
        values,
        batch.returns,
        batch.action_mask,
        batch.values,
        clip=algorithm.value_clip,
        mode="token-mean",
        whole=whole.all,
    )
    return loss.value, dict(loss.metrics)


def _without(mask: Any, expert: Sequence[bool]) -> Any:
    """A mask without the expert's rows."""
    if isinstance(mask, Rows):
        gone = torch.repeat_interleave(torch.tensor(list(expert)), torch.tensor(mask.lengths))
        return Rows(mask.values & ~gone.to(mask.values.device), mask.lengths)
    return mask & ~torch.tensor(list(expert), device=mask.device).unsqueeze(1)
