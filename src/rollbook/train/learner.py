"""`Learner`: from records to new weights, without a book, an engine or a loop around it.

Invariant: what a step does to the weights depends on the records, the step's number, the seed and the state before, and
on nothing else; not on how minibatches are cut into micro-batches, padded or packed, but for rounding. An update whose
loss or gradient is not finite changes nothing, and is counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from rollbook.batch import Batch
from rollbook.batch.device import to
from rollbook.batch.plan import MicroBatch, plan
from rollbook.core.checks import check_bool, check_choice, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.experiences import as_experiences
from rollbook.core.metrics import advise
from rollbook.models.forward import without_adapters
from rollbook.models.head import scoring
from rollbook.models.protocols import Policy, ValueModel
from rollbook.rollout.engine import derive_seed
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.loss import LossNormalizers, critic_loss, loss_columns, policy_loss
from rollbook.train.optimizer import PRECISIONS, Optimizer, OptimizerConfig
from rollbook.train.rows import TrainRows


class NonFiniteLossError(RollbookError, RuntimeError):
    """Too many updates in a row had a loss or a gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class MinibatchConfig:
    """How the records of a step become updates.

    >>> MinibatchConfig(minibatches=4, token_budget=8192).epochs
    1
    """

    minibatches: int = 1
    """Updates in each pass over the step's records."""
    epochs: int = 1
    """Passes over the step's records."""
    token_budget: int = 16384
    """Tokens that go through the model at once; a longer record goes alone."""
    packed: bool | None = None
    """Records end to end instead of padded; none: where the model's attention costs no more for it."""
    shuffle: bool = True
    """Whether records are put into minibatches in a random order, by seed and step."""
    keep_groups: bool = False
    """Whether the runs of a prompt stay in one minibatch."""
    drop_zero_advantages: bool = False
    """Whether records whose advantages are all 0 are left out, of the denominators too."""

    def __post_init__(self) -> None:
        for name in ("minibatches", "epochs", "token_budget"):
            object.__setattr__(self, name, check_int(f"batch.{name}", getattr(self, name), 1))
        for name in ("shuffle", "keep_groups", "drop_zero_advantages"):
            object.__setattr__(self, name, check_bool(f"batch.{name}", getattr(self, name)))
        if self.packed is not None:
            object.__setattr__(self, "packed", check_bool("batch.packed", self.packed))


@dataclass
class UpdateResult:
    """What the updates of a step did."""

    metrics: dict[str, float]
    """Means over the updates: `loss`, `policy/...`, `kl`, `entropy`, `grad_norm`, `lr`, `critic/...`, and counts."""
    placements: list[dict[str, Any]]
    """[records] Where each was: `minibatch`, `micro_batch` and `weight` (its tokens' share of its minibatch's) of each
    pass, or `left_out` and the reason."""
    updates: int
    """How many updates changed the weights."""
    skipped: int
    """How many did not, since something was not finite."""

    def placements_by_uid(self, uids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The placements of the first records, by their ids, as `Lease.ack` takes them.

        >>> UpdateResult({}, [{"minibatch": 0}, {"minibatch": 1}], 1, 0).placements_by_uid(["a"])
        {'a': {'minibatch': 0}}
        """
        return dict(zip(uids, self.placements, strict=False))


def _add_shares(metrics: dict[str, Any], shares: Mapping[str, Any], prefix: str) -> None:
    """Add a micro-batch's shares of metrics; they stay on their device until the update is done."""
    for name, share in shares.items():
        key = name if name in ("loss", "kl", "entropy") and prefix == "policy" else f"{prefix}/{name}"
        metrics[key] = metrics[key] + share if key in metrics else share


def _means(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: float(np.mean([float(metrics[name]) for metrics in updates if name in metrics])) for name in names}


class Learner:
    """A policy, maybe a critic, and the optimizers that move them.

    `actor`, `critic`: `rollbook.models.Actor` and `Critic`. `reference`: for pairs of answers alone, whose records have
    no room for its log-probs. `max_tokens`: the longest response, which Dr. GRPO's loss is divided by. `precision`:
    `float32`; `bfloat16`, weights of that type with float32 copies in the optimizer; `autocast`, float32 weights and
    products in bfloat16. After `nonfinite_limit` updates in a row that are not finite, `NonFiniteLossError` is raised.

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
        reference: Policy | None = None,
        optimizer: OptimizerConfig | None = None,
        critic_optimizer: OptimizerConfig | None = None,
        minibatch: MinibatchConfig | None = None,
        precision: str = "float32",
        seed: int = 0,
        max_tokens: int | None = None,
        nonfinite_limit: int = 3,
    ) -> None:
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
        if (precision == "bfloat16") != (actor.dtype == torch.bfloat16):
            expected = "bfloat16" if precision == "bfloat16" else "float32"
            raise ValueError(f"actor: got weights of {actor.dtype}, expected {expected} for precision={precision!r}")
        config = OptimizerConfig() if optimizer is None else optimizer
        # Weights have names in checkpoints, which a module knows.
        self.optimizer = Optimizer(cast("nn.Module", actor), config, masters=precision == "bfloat16")
        self.critic_optimizer: Optimizer | None = None
        if critic is not None and self.algorithm.needs_critic:
            short = critic.dtype == torch.bfloat16
            self.critic_optimizer = Optimizer(cast("nn.Module", critic), critic_optimizer or config, masters=short)
        self.failures = 0
        """Updates in a row that were not finite."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def update(
        self,
        records: Any,
        *,
        step: int,
        expert: Sequence[bool] | None = None,
        weights: Sequence[float] | None = None,
    ) -> UpdateResult:
        """Train on records: rows, minibatches, micro-batches, losses, optimizer steps.

        Args:
            records: Records with every column that the algorithm reads (`rollbook.train.pipeline`).
            step: The step's number from 1 on, from which the learning rate and the order of records follow.
            expert: [N] Which records an expert made.
            weights: [N] A sampler's weight of each record.

        Returns:
            Metrics, and where each record was.

        Raises:
            NonFiniteLossError: If `nonfinite_limit` updates in a row were not finite.
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
        placements: list[dict[str, Any]] = [{"left_out": rows.left_out.get(i, "")} for i in range(rows.record_count)]
        updates: list[dict[str, Any]] = []
        skipped = 0
        critic_only = step <= self.algorithm.critic_warmup
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        for epoch in range(self.minibatch.epochs):
            for number, minibatch in enumerate(self.minibatches(rows, step, epoch)):
                micro_batches = self.plan(rows, minibatch)
                self._place(placements, rows, minibatch, micro_batches, epoch, number)
                metrics = self._update(rows, minibatch, micro_batches, step, critic_only)
                if metrics is None:
                    skipped += 1
                    self._failed(step, epoch, number)
                    continue
                self.failures = 0
                updates.append(metrics)
        totals = {**_means(updates), **rows.metrics, "lr": self.optimizer.how.rate(step)}
        totals |= {"updates": float(len(updates)), "skipped": float(skipped), "rows": float(len(rows))}
        return UpdateResult(totals, placements, len(updates), skipped)

    def minibatches(self, rows: TrainRows, step: int, epoch: int = 0) -> list[list[int]]:
        """Which rows each update of a pass is of: a function of the seed, the step and the pass."""
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
        return [sorted(row for unit in order[begin:end] for row in unit) for begin, end in itertools.pairwise(cuts)]

    def plan(self, rows: TrainRows, minibatch: Sequence[int]) -> Sequence[MicroBatch]:
        """The micro-batches of an update; their indices are places in `minibatch`."""
        lengths = rows.records.token_lengths()[list(minibatch)]
        counts = rows.loss_tokens[list(minibatch)]
        options: dict[str, Any] = {}
        if rows.pairs is not None:
            options = {"groups": [rows.pairs[i] for i in minibatch], "keep_groups": "micro_batch"}
        layout: Any = "packed" if self.packed else "padded"
        budget = self.minibatch.token_budget
        if options:
            budget = max(budget, int(max(_pair_size(lengths, options["groups"], layout))))
        return plan(lengths, token_cap=budget, layout=layout, loss_tokens=counts, oversize="alone", **options)[0]

    @property
    def packed(self) -> bool:
        """Whether micro-batches are packed."""
        if self.minibatch.packed is None:
            return bool(self.actor.packs_cheaply)
        return self.minibatch.packed

    @staticmethod
    def _place(
        placements: list[dict[str, Any]],
        rows: TrainRows,
        minibatch: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        epoch: int,
        number: int,
    ) -> None:
        """Note where the records of a minibatch are."""
        counts = rows.loss_tokens[list(minibatch)].tolist()
        total = max(sum(counts), 1)
        places: dict[int, dict[str, Any]] = {}
        for k, micro in enumerate(micro_batches):
            for i in micro.indices.tolist():
                source = int(rows.sources[minibatch[i]])
                other = places[source]["weight"] if source in places else 0.0  # of a pair, the other answer's
                weight = round(other + counts[i] / total, 9)
                places[source] = {"minibatch": number, "micro_batch": k, "weight": weight}
        for source, place in places.items():
            if epoch:
                place = {name: [*_listed(placements[source][name]), entry] for name, entry in place.items()}
            placements[source] = place

    def _update(
        self,
        rows: TrainRows,
        minibatch: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        step: int,
        critic_only: bool,
    ) -> dict[str, Any] | None:
        """One update of all that learns; its metrics, or `None` if something was not finite and nothing changed."""
        normalizers = LossNormalizers.from_rows(self.algorithm, rows, minibatch, self.max_tokens)
        sums: dict[str, Any] = {}
        for planned in micro_batches:
            micro = rows.take([minibatch[i] for i in planned.indices.tolist()])
            batch = self._batch(micro)
            if not critic_only:
                with self._autocast():
                    stats = self.actor.token_stats(batch, entropy=self.algorithm.entropy_coef != 0)
                ref = self._ref_logprobs(batch) if micro.pairs is not None else None
                loss, shares = policy_loss(
                    self.algorithm, stats, batch, micro, normalizers, step=step, ref_logprobs=ref
                )
                loss.backward()  # type: ignore[no-untyped-call]
                _add_shares(sums, shares, "policy")
            if self.critic_optimizer is not None and self.critic is not None:
                with self._autocast():
                    values = self.critic.token_values(batch)
                loss, shares = critic_loss(self.algorithm, values, batch, normalizers)
                loss.backward()  # type: ignore[no-untyped-call]
                _add_shares(sums, shares, "critic")
        metrics = {name: float(share) for name, share in sums.items()}
        optimizers = [(self.optimizer, "grad_norm")] if not critic_only else []
        if self.critic_optimizer is not None:
            optimizers.append((self.critic_optimizer, "critic/grad_norm"))
        losses = [metrics[name] for name in ("loss", "critic/value_loss") if name in metrics]
        if not all(np.isfinite(losses)) or not all(optimizer.finite for optimizer, _ in optimizers):
            for optimizer, _ in optimizers:
                optimizer.forget()
            return None
        for optimizer, name in optimizers:
            metrics[name] = optimizer.update(step)
        return metrics

    def _batch(self, rows: TrainRows) -> Batch:
        """The columns of a micro-batch that the losses read, on the actor's device in one transfer."""
        return Batch.from_records(
            rows.records,
            loss_columns(self.algorithm),
            packed=self.packed,
            pad_token_id=self.actor.pad_token_id,
            device=self.actor.device,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast(self.actor.device.type, dtype=torch.bfloat16)

    def _ref_logprobs(self, batch: Batch) -> Any:
        """The reference's log-probs of preference pairs, whose records have no room for them."""
        if self.reference is None:
            return None
        reference = without_adapters(self.reference)
        with scoring(reference):
            return to(reference.token_stats(batch).logprobs, self.actor.device)

    def _failed(self, step: int, epoch: int, number: int) -> None:
        self.failures += 1
        where = f"step {step}, pass {epoch}, minibatch {number}"
        if self.failures >= self.nonfinite_limit:
            raise NonFiniteLossError(
                f"{where}: the loss or its gradient is not finite, {self.failures} times in a row; nothing was changed "
                "by any of them. A smaller optimizer.lr, float32, or a look at the rewards may help"
            )
        advise(f"{where}: the loss or its gradient is not finite; this update is left out ({self.failures} in a row)")

    # --- going on another time ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What moves the weights: moments, counts, float32 copies. The weights are the models' own."""
        made: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "failures": self.failures}
        if self.critic_optimizer is not None:
            made["critic_optimizer"] = self.critic_optimizer.state_dict()
        return made

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.failures = int(state["failures"])
        if ("critic_optimizer" in state) != (self.critic_optimizer is not None):
            raise ValueError("critic: got the state of a run with a critic, and there is none, or the other way round")
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pair_size(lengths: Any, names: Sequence[str], layout: str) -> list[int]:
    """What each pair occupies in a micro-batch of its own."""
    units: dict[str, list[int]] = {}
    for length, name in zip(lengths.tolist(), names, strict=True):
        units.setdefault(name, []).append(length)
    return [sum(unit) if layout == "packed" else len(unit) * max(unit) for unit in units.values()] or [1]
