"""`Learner`: from records to new weights, without a book, a maker or a loop around it.

Invariant: what a step does to the weights depends on the records, the step's number, the seed and the state before, and
on nothing else; not on how minibatches are cut into micro-batches, padded or packed, but for rounding. An update whose
loss or gradient is not finite changes nothing, and is counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollbook.batch.plan import MicroBatch, plan
from rollbook.core.checks import check_bool, check_choice, check_int
from rollbook.core.metrics import advise
from rollbook.models.forward import reference_log_probs
from rollbook.rollout.engine import derive_seed
from rollbook.train.algorithm import Algorithm
from rollbook.train.material import Material
from rollbook.train.objective import Flags, Whole, critic_loss, policy_loss
from rollbook.train.optimizing import PRECISIONS, Optimizer, Optimizing


class NotFinite(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the records of a step become updates.

    >>> Batching(minibatches=4, token_budget=8192).epochs
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
    drop_zero: bool = False
    """Whether records whose advantages are all 0 are left out, of the denominators too."""

    def __post_init__(self) -> None:
        for name in ("minibatches", "epochs", "token_budget"):
            object.__setattr__(self, name, check_int(f"batch.{name}", getattr(self, name), 1))
        for name in ("shuffle", "keep_groups", "drop_zero"):
            object.__setattr__(self, name, check_bool(f"batch.{name}", getattr(self, name)))
        if self.packed is not None:
            object.__setattr__(self, "packed", check_bool("batch.packed", self.packed))


@dataclass
class Learned:
    """What a step of learning did."""

    metrics: dict[str, float]
    """Means over the updates: `loss`, `policy/...`, `kl`, `entropy`, `grad_norm`, `lr`, `critic/...`, and counts."""
    places: list[dict[str, Any]]
    """[records] Where each was: `minibatch`, `micro_batch` and `weight` (its tokens' share of its minibatch's) of each
    pass, or `left_out` and why."""
    updates: int
    """How many updates changed the weights."""
    skipped: int
    """How many did not, since something was not finite."""


@dataclass
class _Sums:
    """Metrics of updates, each a sum of its micro-batches' shares; kept where they are until all is done."""

    of: list[dict[str, Any]] = field(default_factory=list)

    def add(self, into: dict[str, Any], shares: Mapping[str, Any], prefix: str) -> None:
        for name, value in shares.items():
            key = name if name in ("loss", "kl", "entropy") and prefix == "policy" else f"{prefix}/{name}"
            into[key] = into[key] + value if key in into else value

    def means(self) -> dict[str, float]:
        names = dict.fromkeys(name for one in self.of for name in one)
        return {name: float(np.mean([float(one[name]) for one in self.of if name in one])) for name in names if self.of}


class Learner:
    """A policy, maybe a critic, and the optimizers that move them.

    `actor`, `critic`: `rollbook.models.Actor` and `Critic`. `reference`: for pairs of answers alone, whose records have
    no room for its log-probs. `max_tokens`: the longest response, which Dr. GRPO's loss is divided by. `precision`:
    `float32`; `bfloat16`, weights of that type with float32 copies in the optimizer; `autocast`, float32 weights and
    products in bfloat16. After `nonfinite_limit` updates in a row that are not finite, `NotFinite` is raised.

    >>> from rollbook import Experience
    >>> from rollbook.models import Actor
    >>> from transformers import LlamaConfig
    >>> _ = torch.manual_seed(0)
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> learner = Learner(actor, "sft", optimizer=Optimizing(lr=0.01))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2, eid={"task": 0})]
    >>> losses = [learner.learn(records, step=step).metrics["loss"] for step in range(1, 30)]
    >>> losses[-1] < losses[0] / 4
    True
    """

    def __init__(
        self,
        actor: Any,
        algorithm: Algorithm | str,
        *,
        critic: Any = None,
        reference: Any = None,
        optimizer: Optimizing | None = None,
        critic_optimizer: Optimizing | None = None,
        batching: Batching | None = None,
        precision: str = "float32",
        seed: int = 0,
        max_tokens: int | None = None,
        nonfinite_limit: int = 3,
    ) -> None:
        self.actor, self.critic, self.reference = actor, critic, reference
        self.algorithm = Algorithm.of(algorithm)
        self.batching = Batching() if batching is None else batching
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
        how = Optimizing() if optimizer is None else optimizer
        self.optimizer = Optimizer(actor, how, masters=precision == "bfloat16")
        self.critic_optimizer: Optimizer | None = None
        if critic is not None and self.algorithm.needs_critic:
            short = critic.dtype == torch.bfloat16
            self.critic_optimizer = Optimizer(critic, critic_optimizer or how, masters=short)
        self.failures = 0
        """Updates in a row that were not finite."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def learn(
        self,
        records: Any,
        *,
        step: int,
        expert: Sequence[bool] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Learned:
        """Learn from records, which have all that the algorithm needs (`rollbook.train.complete`).

        `step` counts from 1: the learning rate and the order of records follow from it. `expert` says which records an
        expert made; `weights` are a sampler's, one for each record.
        """
        step = check_int("step", step, 1)
        material = Material.of(
            records,
            self.algorithm,
            expert=expert,
            weights=weights,
            drop_zero=self.batching.drop_zero,
            version=step - 1,
        )
        places: list[dict[str, Any]] = [{"left_out": material.left_out.get(i, "")} for i in range(material.count)]
        sums, skipped, made = _Sums(), 0, 0
        alone = step <= self.algorithm.critic_warmup
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        for epoch in range(self.batching.epochs):
            for number, rows in enumerate(self.minibatches(material, step, epoch)):
                planned = self.plan(material, rows)
                self._note(places, material, rows, planned, epoch, number)
                done = self._update(material, rows, planned, step, alone)
                if done is None:
                    skipped += 1
                    self._failed(step, epoch, number)
                    continue
                made += 1
                self.failures = 0
                sums.of.append(done)
        metrics = {**sums.means(), **material.metrics, "lr": self.optimizer.how.rate(step)}
        metrics |= {"updates": float(made), "skipped": float(skipped), "rows": float(len(material.rows))}
        return Learned(metrics, places, made, skipped)

    def minibatches(self, material: Material, step: int, epoch: int = 0) -> list[list[int]]:
        """Which rows each update of a pass is of: a function of the seed, the step and the pass."""
        units: dict[Any, list[int]] = {}
        names: Sequence[Any] = range(len(material.rows))
        if material.pairs is not None:
            names = material.pairs
        elif self.batching.keep_groups:
            names = [eid.tid for eid in material.rows.eids()]
        for i, name in enumerate(names):
            units.setdefault(name, []).append(i)
        order = list(units.values())
        if self.batching.shuffle:
            random.Random(derive_seed(self.seed, f"minibatches/{step}/{epoch}")).shuffle(order)
        count = min(self.batching.minibatches, len(order))
        cuts = [len(order) * k // count for k in range(count + 1)] if count else []
        return [sorted(row for unit in order[begin:end] for row in unit) for begin, end in itertools.pairwise(cuts)]

    def plan(self, material: Material, rows: Sequence[int]) -> Sequence[MicroBatch]:
        """The micro-batches of an update; their indices are places in `rows`."""
        lengths = material.rows.token_lengths()[list(rows)]
        counted = [int(material_mask.sum()) for material_mask in _chosen(material.masks, rows)]
        options: dict[str, Any] = {}
        if material.pairs is not None:
            options = {"groups": [material.pairs[i] for i in rows], "keep_groups": "micro_batch"}
        layout: Any = "packed" if self.packed else "padded"
        budget = self.batching.token_budget
        if options:
            budget = max(budget, int(max(_pair_size(lengths, options["groups"], layout))))
        return plan(lengths, token_cap=budget, layout=layout, loss_tokens=counted, oversize="alone", **options)[0]

    @property
    def packed(self) -> bool:
        """Whether micro-batches are packed."""
        if self.batching.packed is None:
            return bool(self.actor.packs_cheaply)
        return self.batching.packed

    def _note(
        self,
        places: list[dict[str, Any]],
        material: Material,
        rows: Sequence[int],
        planned: Sequence[MicroBatch],
        epoch: int,
        number: int,
    ) -> None:
        counted = [int(mask.sum()) for mask in _chosen(material.masks, rows)]
        total = max(sum(counted), 1)
        found: dict[int, dict[str, Any]] = {}
        for k, micro in enumerate(planned):
            for i in micro.indices.tolist():
                source = int(material.sources[rows[i]])
                other = found[source]["weight"] if source in found else 0.0  # of a pair, the other answer's
                weight = round(other + counted[i] / total, 9)
                found[source] = {"minibatch": number, "micro_batch": k, "weight": weight}
        for source, place in found.items():
            if epoch:
                place = {name: [*_listed(places[source][name]), value] for name, value in place.items()}
            places[source] = place

    def _update(
        self, material: Material, rows: Sequence[int], planned: Sequence[MicroBatch], step: int, alone: bool
    ) -> dict[str, Any] | None:
        """One update of all that learns; its metrics, or `None` if something was not finite and nothing changed."""
        whole = Whole.of(self.algorithm, material, rows, self.max_tokens)
        found: dict[str, Any] = {}
        sums = _Sums()
        for micro in planned:
            chosen = [rows[i] for i in micro.indices.tolist()]
            batch = self._batch(material, chosen)
            if not alone:
                with self._precisely():
                    stats = self.actor.token_stats(batch, entropy=self.algorithm.entropy_coef != 0)
                flags = Flags.of(material, chosen)
                reference = self._reference(batch) if material.pairs is not None else None
                loss, shares = policy_loss(self.algorithm, stats, batch, flags, whole, step=step, reference=reference)
                loss.backward()  # type: ignore[no-untyped-call]
                sums.add(found, shares, "policy")
            if self.critic_optimizer is not None:
                with self._precisely():
                    values = self.critic.token_values(batch)
                loss, shares = critic_loss(self.algorithm, values, batch, whole)
                loss.backward()  # type: ignore[no-untyped-call]
                sums.add(found, shares, "critic")
        found = {name: float(value) for name, value in found.items()}
        movers = [(self.optimizer, "grad_norm")] if not alone else []
        if self.critic_optimizer is not None:
            movers.append((self.critic_optimizer, "critic/grad_norm"))
        losses = [found[name] for name in ("loss", "critic/value_loss") if name in found]
        if not all(np.isfinite(losses)) or not all(mover.finite for mover, _ in movers):
            for mover, _ in movers:
                mover.forget()
            return None
        for mover, name in movers:
            found[name] = mover.update(step)
        return found

    def _batch(self, material: Material, rows: Sequence[int]) -> Any:
        packed = self.packed
        device = self.actor.device
        pad = self.actor.pad_token_id
        options = {} if device.type == "cpu" else {"device": device}
        return material.rows.take(list(rows)).batch(packing_samples=packed, pad_token_id=pad, **options)

    def _precisely(self) -> AbstractContextManager[Any]:
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast(self.actor.device.type, dtype=torch.bfloat16)

    def _reference(self, batch: Any) -> Any:
        if self.reference is None:
            return None
        budget = self.batching.token_budget
        return reference_log_probs(self.reference, batch, token_budget=budget, device=self.actor.device).log_probs

    def _failed(self, step: int, epoch: int, number: int) -> None:
        self.failures += 1
        where = f"step {step}, pass {epoch}, minibatch {number}"
        if self.failures >= self.nonfinite_limit:
            raise NotFinite(
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


def _chosen(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    return [values[i] for i in rows]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pair_size(lengths: Any, names: Sequence[str], layout: str) -> list[int]:
    """What each pair occupies in a micro-batch of its own."""
    units: dict[str, list[int]] = {}
    for length, name in zip(lengths.tolist(), names, strict=True):
        units.setdefault(name, []).append(length)
    return [sum(unit) if layout == "packed" else len(unit) * max(unit) for unit in units.values()] or [1]
