"""`Learner`: update the weights of a policy and a critic from records, and the losses of a micro-batch.

Invariant: losses and metrics are divided by the denominators of the whole minibatch, so that those of its micro-batches
add up to those of the minibatch. The new weights depend only on the records, the number of the step, the seed and the
state before; the split into micro-batches, padded or packed, changes them by rounding only. An update whose loss or
gradient is not finite changes nothing, and is counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.aggregate import count_denominators
from rollbook.algorithms.kl import kl_loss
from rollbook.algorithms.losses import entropy_loss, value_loss
from rollbook.batch import Batch
from rollbook.batch.batch import Tokens
from rollbook.batch.columns import RESPONSE_COLUMNS
from rollbook.batch.device import move_to_device
from rollbook.batch.plan import Denominators, MicroBatch, plan
from rollbook.core.checks import check_bool, check_choice, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.metrics import warn_user
from rollbook.core.rows import Rows
from rollbook.models.forward import without_adapters
from rollbook.models.head import scoring
from rollbook.models.logprobs import TokenStats
from rollbook.models.protocols import LogprobModel, Policy, ValueModel, check_model
from rollbook.rollout.engine import derive_seed
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.optimizer import PRECISIONS, Optimizer, OptimizerConfig
from rollbook.train.rows import TrainRows

__all__ = ["Learner", "LossNormalizers", "MinibatchConfig", "NonFiniteLossError", "UpdateResult"]


class NonFiniteLossError(RollbookError, RuntimeError):
    """Raised when too many consecutive updates have a loss or a gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class MinibatchConfig:
    """How the records of a step are split into updates.

    Args:
        minibatches: Number of updates in each pass over the records of a step.
        epochs: Number of passes over the records of a step.
        token_budget: Maximum number of tokens in one forward and backward pass; a longer record is passed alone.
        packed: Pack sequences instead of padding them; `None`: if the attention implementation makes packing cheap.
        shuffle: Assign records to minibatches in a random order, by seed and step.
        keep_groups: Keep all responses to a prompt in one minibatch.
        drop_zero_advantages: Leave out records whose advantages are all 0, also from the denominators.

    >>> MinibatchConfig(minibatches=4, token_budget=8192).epochs
    1
    """

    minibatches: int = 1
    epochs: int = 1
    token_budget: int = 16384
    packed: bool | None = None
    shuffle: bool = True
    keep_groups: bool = False
    drop_zero_advantages: bool = False

    def __post_init__(self) -> None:
        for name in ("minibatches", "epochs", "token_budget"):
            object.__setattr__(self, name, check_int(f"batch.{name}", getattr(self, name), 1))
        for name in ("shuffle", "keep_groups", "drop_zero_advantages"):
            object.__setattr__(self, name, check_bool(f"batch.{name}", getattr(self, name)))
        if self.packed is not None:
            object.__setattr__(self, "packed", check_bool("batch.packed", self.packed))


@dataclass
class UpdateResult:
    """Result of `Learner.update`.

    Args:
        metrics: Means over the updates: `loss`, `policy/...`, `kl`, `entropy`, `grad_norm`, `lr`, `critic/...`, and
            counts.
        placements: [N] For each record `minibatch`, `micro_batch` and `weight` (its fraction of the minibatch's loss
            tokens), as lists if there are several passes; or `excluded` and the reason.
        updates: Number of updates that changed the weights.
        skipped: Number of updates that were skipped because the loss or a gradient was not finite.
    """

    metrics: dict[str, float]
    placements: list[dict[str, Any]]
    updates: int
    skipped: int

    def placements_by_uid(self, uids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the placements of the first records by their ids, as `Lease.ack` takes them.

        Args:
            uids: Ids of the first records, in order.

        >>> UpdateResult({}, [{"minibatch": 0}, {"minibatch": 1}], 1, 0).placements_by_uid(["a"])
        {'a': {'minibatch': 0}}
        """
        return dict(zip(uids, self.placements, strict=False))


def _add_shares(metrics: dict[str, Any], shares: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Add the shares of a micro-batch to the metrics; they stay on their device until the update is done."""
    for name, share in shares.items():
        key = name if name in ("loss", "kl", "entropy") and prefix == "policy" else f"{prefix}/{name}"
        metrics[key] = metrics[key] + share if key in metrics else share


@dataclass(frozen=True)
class LossNormalizers:
    """What the losses of a minibatch are divided by.

    Args:
        tokens_and_rows: Denominators of all losses but the policy's.
        policy: Denominators of the policy loss: of pairs their number, of mixed data a pair for policy and expert.
        norm: The constant of the mode `seq-mean-token-sum-norm`.

    >>> from rollbook import Experience
    >>> algorithm = AlgorithmConfig.preset("grpo", kl_coef=0.0)
    >>> records = Experiences([Experience(tokens=[1, 2, 3], advantages=[1.0, 1.0], logprobs=[-0.5, -0.25])])
    >>> LossNormalizers.from_rows(algorithm, TrainRows.from_records(records, algorithm), [0], None).policy
    Denominators(tokens=2, sequences=1, samples=1)
    """

    tokens_and_rows: Denominators
    policy: Denominators | int | tuple[Denominators, Denominators]
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
            max_tokens: Maximum response length; needed by the mode `seq-mean-token-sum-norm`.

        Returns:
            The normalizers.

        Raises:
            ValueError: The mode needs `max_tokens`.
        """
        masks = rows.masks
        mask = Rows([masks[i] for i in indices])
        tokens_and_rows = count_denominators(mask)
        count = algorithm.loss_entry.denominators
        policy = tokens_and_rows if count is None else count(rows, indices)
        if algorithm.mixed and isinstance(policy, tuple):
            tokens_and_rows = policy[0]  # KL divergence and entropy bonus are for the rows of the policy only
        norm = None
        if algorithm.aggregation_mode == "seq-mean-token-sum-norm":
            if max_tokens is None:
                raise ValueError("max_tokens: missing, expected the maximum response length, which divides the loss")
            norm = float(len(indices) * max_tokens)
        return cls(tokens_and_rows, policy, norm)


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
    columns: dict[str, Any] = {name: getattr(batch, name) for name in RESPONSE_COLUMNS}
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
        "denominators": normalizers.tokens_and_rows,
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
        denominators=normalizers.tokens_and_rows,
    )
    return loss.value, dict(loss.metrics)


def _without_expert(mask: Tokens, expert: Sequence[bool]) -> Tokens:
    """Mask out the rows of an expert."""
    flags = torch.tensor(list(expert))
    if isinstance(mask, Rows):
        by_token = torch.repeat_interleave(flags, torch.tensor(mask.lengths))
        return Rows(mask.values & ~by_token.to(mask.values.device), mask.lengths)
    return mask & ~flags.to(mask.device).unsqueeze(1)


class Learner:
    """Trains a policy, and a critic if the algorithm has one, on records. Has no book and no engine.

    Args:
        actor: The policy, such as a `rollbook.models.Actor`.
        algorithm: An `AlgorithmConfig`, or the name of a preset.
        critic: The value model, if the algorithm needs one.
        reference: The reference model for pairs of answers, whose records cannot hold its log-probs.
        optimizer: Settings of the policy's optimizer: an `OptimizerConfig`, or a mapping of its fields.
        critic_optimizer: Settings of the critic's optimizer; by default those of the policy.
        minibatch: How the records of a step are split into updates.
        precision: `float32`; `bfloat16`: bfloat16 weights with float32 copies in the optimizer; or `autocast`: float32
            weights with matrix products in bfloat16.
        seed: Seed of the order of records.
        max_tokens: Longest response, by which Dr. GRPO divides the loss.
        nonfinite_limit: Number of consecutive non-finite updates after which `update` raises.

    Raises:
        ValueError: A model that the algorithm needs is missing, or the weights do not have the type of `precision`.

    >>> from rollbook import Experience
    >>> from rollbook.models import Actor
    >>> from transformers import LlamaConfig
    >>> _ = torch.manual_seed(0)
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> learner = Learner(actor, "sft", optimizer=OptimizerConfig(lr=0.01))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2, eid={"task": 0})]
    >>> losses = [learner.update(records, step=step).metrics["loss"] for step in range(1, 30)]
    >>> losses[-1] < losses[0] / 4
    True
    """

    def __init__(
        self,
        actor: Policy,
        algorithm: AlgorithmConfig | str,
        *,
        critic: ValueModel | None = None,
        reference: LogprobModel | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        critic_optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        minibatch: MinibatchConfig | None = None,
        precision: str = "float32",
        seed: int = 0,
        max_tokens: int | None = None,
        nonfinite_limit: int = 3,
    ) -> None:
        check_model("actor", actor, Policy)
        if critic is not None:
            check_model("critic", critic, ValueModel)
        if reference is not None:
            check_model("reference", reference, LogprobModel)
        self.actor, self.critic, self.reference = actor, critic, reference
        self.algorithm = AlgorithmConfig.preset(algorithm)
        self.minibatch = MinibatchConfig() if minibatch is None else minibatch
        self.precision = precision
        check_choice("precision", precision, PRECISIONS)
        self.seed = check_int("seed", seed)
        self.max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, 1)
        self.nonfinite_limit = check_int("nonfinite_limit", nonfinite_limit, 1)
        if self.algorithm.needs_critic and critic is None:
            raise ValueError(f"critic: got None, and {self.algorithm.name} ({self.algorithm.estimator}) needs one")
        if self.algorithm.pairs and self.algorithm.needs_reference and reference is None:
            raise ValueError(f"reference: got None, and {self.algorithm.name} needs one, or reference_free=True")
        # The shards of FSDP are float32, and are rounded to bfloat16 when they are gathered.
        sharded = any(hasattr(weight, "to_local") for _, weight in actor.named_parameters())
        if not sharded and (precision == "bfloat16") != (actor.dtype == torch.bfloat16):
            expected = "bfloat16" if precision == "bfloat16" else "float32"
            raise ValueError(f"actor: got weights of {actor.dtype}, expected {expected} for precision={precision!r}")
        config = OptimizerConfig.of(optimizer)
        self.optimizer = Optimizer(actor, config, masters=precision == "bfloat16" and not sharded)
        self.critic_optimizer: Optimizer | None = None
        if critic is not None and self.algorithm.needs_critic:
            masters = critic.dtype == torch.bfloat16
            critic_config = config if critic_optimizer is None else OptimizerConfig.of(critic_optimizer)
            self.critic_optimizer = Optimizer(critic, critic_config, masters=masters)
        self.packed = actor.packs_cheaply if self.minibatch.packed is None else self.minibatch.packed
        """Whether micro-batches are packed instead of padded."""
        self.failures = 0
        """Number of consecutive updates that were not finite."""
        self.rank_count = 1
        """Number of ranks that the micro-batches of an update are planned for."""
        self.uniform_media = False
        """Whether ranks run rows with the same kinds of media at the same time."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def update(
        self,
        records: Experiences | Sequence[Experience],
        *,
        step: int,
        expert: Sequence[bool] | None = None,
        weights: Sequence[float] | None = None,
    ) -> UpdateResult:
        """Train on records: rows, minibatches, micro-batches, losses, optimizer steps.

        Args:
            records: Records with every column that the algorithm reads (`rollbook.train.pipeline`).
            step: Number of the step, from 1 on. It determines the learning rate and the order of records.
            expert: [N] Which records are an expert's.
            weights: [N] Sampling weights of the records.

        Returns:
            Metrics, and the placement of each record.

        Raises:
            NonFiniteLossError: `nonfinite_limit` consecutive updates were not finite.
        """
        step = check_int("step", step, 1)
        rows = TrainRows.from_records(
            as_experiences(records),
            self.algorithm,
            expert=expert,
            weights=weights,
            drop_zero_advantages=self.minibatch.drop_zero_advantages,
            version=step - 1,
        )
        placements: list[dict[str, Any]] = [{"excluded": rows.excluded.get(i, "")} for i in range(rows.record_count)]
        sums: dict[str, list[float]] = {}
        updates = skipped = 0
        critic_only = step <= self.algorithm.critic_warmup
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        for epoch in range(self.minibatch.epochs):
            for number, minibatch in enumerate(self.minibatches(rows, step, epoch)):
                micro_batches = self.plan_micro_batches(rows, minibatch)
                self._place(placements, rows, minibatch, micro_batches, epoch, number)
                normalizers = LossNormalizers.from_rows(self.algorithm, rows, minibatch, self.max_tokens)
                metrics = self._update(rows, minibatch, micro_batches, normalizers, step, critic_only)
                if metrics is None:
                    skipped += 1
                    self._count_failure(step, epoch, number)
                    continue
                self.failures = 0
                updates += 1
                for name, share in metrics.items():
                    sums.setdefault(name, []).append(share)
        totals = {name: float(np.mean(numbers)) for name, numbers in sums.items()}
        totals |= {**rows.metrics, "lr": self.optimizer.config.rate(step)}
        totals |= {"updates": float(updates), "skipped": float(skipped), "rows": float(len(rows))}
        return UpdateResult(totals, placements, updates, skipped)

    def minibatches(self, rows: TrainRows, step: int, epoch: int = 0) -> list[list[int]]:
        """Split the rows of a pass into minibatches, by the seed, the step and the pass.

        Args:
            rows: Rows of the step.
            step: Number of the step.
            epoch: Number of the pass.

        Returns:
            The rows of each update.
        """
        units: dict[Any, list[int]] = {}
        names: Sequence[Any] = range(len(rows))
        if rows.pairs is not None:
            names = rows.pairs
        elif self.minibatch.keep_groups:
            names = [eid.tid for eid in rows.records.eids()]
        for i, name in enumerate(names):
            units.setdefault(name, []).append(i)
        order = list(units.values())
        if self.minibatch.shuffle:
            random.Random(derive_seed(self.seed, f"minibatches/{step}/{epoch}")).shuffle(order)
        count = min(self.minibatch.minibatches, len(order))
        cuts = [len(order) * k // count for k in range(count + 1)] if count else []
        return [sorted(itertools.chain(*order[begin:end])) for begin, end in itertools.pairwise(cuts)]

    def plan_micro_batches(self, rows: TrainRows, minibatch: Sequence[int]) -> Sequence[MicroBatch]:
        """Plan the micro-batches of an update.

        Args:
            rows: Rows of the step.
            minibatch: Rows of the update.

        Returns:
            The micro-batches, rank by rank; their indices are positions in `minibatch`.
        """
        lengths = rows.records.token_lengths()[list(minibatch)]
        counts = rows.loss_tokens[list(minibatch)]
        options: dict[str, Any] = {}
        layout: Literal["packed", "padded"] = "packed" if self.packed else "padded"
        budget = self.minibatch.token_budget
        media = rows.media_kinds if self.uniform_media else []
        if len({media[i] for i in minibatch} if media else ()) > 1:
            options = {"modality": [media[i] for i in minibatch], "uniform_modality": True}
        if rows.pairs is not None:
            pairs = [rows.pairs[i] for i in minibatch]
            options |= {"groups": pairs, "keep_groups": "micro_batch"}
            budget = max(budget, *_pair_sizes(lengths, pairs, layout))
        planned = plan(
            lengths,
            token_cap=budget,
            ranks=self.rank_count,
            layout=layout,
            loss_tokens=counts,
            oversize="alone",
            empty="allow" if self.rank_count > 1 else "error",
            **options,
        )
        return planned.micro_batches

    @staticmethod
    def _place(
        placements: list[dict[str, Any]],
        rows: TrainRows,
        minibatch: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        epoch: int,
        number: int,
    ) -> None:
        """Write the placements of the records of a minibatch."""
        counts = rows.loss_tokens[list(minibatch)].tolist()
        total = max(sum(counts), 1)
        by_record: dict[int, dict[str, Any]] = {}
        for k, micro in enumerate(micro_batches):
            for i in micro.indices.tolist():
                source = int(rows.sources[minibatch[i]])
                other = by_record[source]["weight"] if source in by_record else 0.0  # the other answer of a pair
                weight = round(other + counts[i] / total, 9)
                by_record[source] = {"minibatch": number, "micro_batch": k, "weight": weight}
        for source, placement in by_record.items():
            if epoch:
                earlier = placements[source]  # lists from the third pass on
                placement = {
                    name: [*(earlier[name] if isinstance(earlier[name], list) else [earlier[name]]), entry]
                    for name, entry in placement.items()
                }
            placements[source] = placement

    def _update(
        self,
        rows: TrainRows,
        minibatch: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        normalizers: LossNormalizers,
        step: int,
        critic_only: bool,
    ) -> dict[str, Any] | None:
        """Update policy and critic; return the metrics, or `None` if a loss or gradient was not finite.

        A micro-batch without weight is run but does not count: it keeps this rank in step with the others.
        """
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.precision == "autocast":
            autocast = torch.autocast(self.actor.device.type, dtype=torch.bfloat16)
        sums: dict[str, Any] = {}
        for planned in micro_batches:
            micro = rows.take([minibatch[i] for i in planned.indices.tolist()])
            # One transfer of the columns that the losses read; actor and critic share the batch. Optional ones
            # (`loss_weights`) may be in no record.
            columns = [n for n in self.algorithm.loss_columns if len(micro.records.missing(n)) < len(micro)]
            batch = Batch.from_records(
                micro.records,
                columns,
                packed=self.packed,
                pad_token_id=self.actor.pad_token_id,
                device=self.actor.device,
            )
            if not critic_only:
                with autocast:
                    stats = self.actor.token_stats(batch, entropy=self.algorithm.entropy_coef != 0)
                ref = self._ref_logprobs(batch) if micro.pairs is not None else None
                loss, shares = policy_loss(
                    self.algorithm, stats, batch, micro, normalizers, step=step, ref_logprobs=ref
                )
                if planned.token_weight:
                    _add_shares(sums, shares, "policy")
                else:
                    loss = 0.0 * loss
                loss.backward()  # type: ignore[no-untyped-call]
            if self.critic_optimizer is not None and self.critic is not None:
                with autocast:
                    values = self.critic.token_values(batch)
                loss, shares = critic_loss(self.algorithm, values, batch, normalizers)
                if planned.token_weight:
                    _add_shares(sums, shares, "critic")
                else:
                    loss = 0.0 * loss
                loss.backward()  # type: ignore[no-untyped-call]
        metrics = self._reduce({name: float(share) for name, share in sums.items()})
        optimizers = {} if critic_only else {"grad_norm": self.optimizer}
        if self.critic_optimizer is not None:
            optimizers["critic/grad_norm"] = self.critic_optimizer
        losses = [metrics[name] for name in ("loss", "critic/value_loss") if name in metrics]
        norms = [optimizer.grad_norm() for optimizer in optimizers.values()]
        if not np.isfinite(losses + norms).all():
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            return None
        for (name, optimizer), norm in zip(optimizers.items(), norms, strict=True):
            metrics[name] = optimizer.update(step, norm)
        return metrics

    def _reduce(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sum metrics and gradients over ranks; here there is one."""
        return metrics

    def _ref_logprobs(self, batch: Batch) -> Any:
        """Compute the log-probs of the reference for preference pairs, whose records do not hold them."""
        if self.reference is None:
            return None
        reference = without_adapters(self.reference)
        with scoring(reference):
            return move_to_device(reference.token_stats(batch).logprobs, self.actor.device)

    def _count_failure(self, step: int, epoch: int, number: int) -> None:
        self.failures += 1
        location = f"step {step}, pass {epoch}, minibatch {number}"
        if self.failures >= self.nonfinite_limit:
            raise NonFiniteLossError(
                f"{location}: the loss or its gradient is not finite, {self.failures} times in a row; these updates "
                "were skipped. Try a smaller optimizer.lr or float32, and check the rewards"
            )
        warn_user(
            f"{location}: the loss or its gradient is not finite; this update is skipped ({self.failures} in a row)"
        )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizers. The weights are saved with the models."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "failures": self.failures}
        if self.critic_optimizer is not None:
            state["critic_optimizer"] = self.critic_optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Args:
            state: The state.

        Raises:
            ValueError: The state belongs to a learner with a critic and this one has none, or the reverse.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.failures = int(state["failures"])
        if ("critic_optimizer" in state) != (self.critic_optimizer is not None):
            raise ValueError("critic: the state and this learner must both have a critic, or neither")
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])


def _pair_sizes(lengths: NDArray[np.int64], pairs: Sequence[str], layout: str) -> list[int]:
    """Return the tokens that each pair takes in a micro-batch of its own."""
    units: dict[str, list[int]] = {}
    for length, pair in zip(lengths.tolist(), pairs, strict=True):
        units.setdefault(pair, []).append(length)
    return [sum(unit) if layout == "packed" else len(unit) * max(unit) for unit in units.values()]
