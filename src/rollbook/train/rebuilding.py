"""A step's beginning, rebuilt from a run's folder: its records, and models and optimizers as they were before it.

Invariant: nothing of the run is written. Everything is on the CPU and in float32, wherever the run was trained. What
the checkpoint before a step does not have is got by learning again what was recorded in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from rollbook.book.book import Book
from rollbook.core.experiences import Experiences
from rollbook.models import Actor
from rollbook.rewards.types import RewardInput, RewardResult
from rollbook.train import building
from rollbook.train import checkpoint as saving
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.config.schema import Config
from rollbook.train.learner import Learner
from rollbook.train.optimizer import Optimizing
from rollbook.train.pipeline import Models, annotate, estimate, with_reward
from rollbook.train.retracing import Traced, trace

Weights = dict[str, dict[str, torch.Tensor]]
"""Of `policy` and `critic`, by name."""
_CPU = torch.device("cpu")
_ATTENTION = (None, "eager", "sdpa")
"""Attention that a CPU has."""


def on_cpu(config: Config) -> Config:
    """A run's configuration as a CPU can have it, in float32.

    >>> on_cpu(Config(model={"config": {"model_type": "llama"}, "precision": "bfloat16"})).model.precision
    'float32'
    """
    attention = config.model.attention if config.model.attention in _ATTENTION else None
    model = dataclasses.replace(config.model, precision="float32", attention=attention, gradient_checkpointing=False)
    return dataclasses.replace(config, model=model)


def saved_actor(config: Config, checkpoint: saving.Saved) -> Actor:
    """Load a checkpoint's policy without calling `model.builder`; `config` is one that `on_cpu` returned."""
    known = checkpoint.told()
    attention = known.get("attention", config.model.attention)
    with saving.loading(checkpoint.model):
        return Actor(
            checkpoint.model,
            dtype=torch.float32,
            device=_CPU,
            attn_implementation=attention if attention in _ATTENTION else None,
            temperature=config.sampling.temperature,
            suppress=known.get("suppress", config.model.suppress),
        )


class Rebuilt:
    """A run, and its models with the weights that a step began with."""

    models: Models
    learner: Learner

    def __init__(self, folder: Path, config: Config, book: Book, step: int, stack: ExitStack) -> None:
        self.folder, self.book, self.step = folder, book, step
        self.config = on_cpu(config)
        self.intake = self.config.intake.intake()
        self.metrics = dict(book.metrics())
        self.traced = self.trace(step)
        if not self.traced.uids:
            raise ValueError(f"step {step}: it learnt from nothing: every group was dropped, or nothing was there")
        self.own = self.records(self.traced)
        found = saving.saved(folder)
        before = [one for one in found if one.step < step]
        if not before:
            raise ValueError(f"{folder}: got no checkpoint before step {step}, expected one in {saving.FOLDER}")
        self.begun = before[-1]
        """The checkpoint that is begun from."""
        self.first = found[0] if found[0].step == 0 else None
        self.after = next((one for one in found if one.step == step), None)
        """The checkpoint of the step itself, if there is one."""
        self.expert: Book | None = None
        expert = building.expert_of(self.config) if self.intake.expert_share else None
        if expert is not None:
            self.expert = stack.enter_context(expert)
        self._experts: list[str] = []
        self.on_gpu = "peak_memory_gib" in self.metrics.get(step, {}) or config.device.startswith("cuda")
        self.exact = config.model.precision == "float32" and not self.on_gpu
        """Whether the run was trained as it is replayed."""

    # --- records ------------------------------------------------------------------------------------------------------

    def trace(self, step: int) -> Traced:
        """What the book says of a step of the run."""
        found = trace(self.book, step, self.intake.consumer)
        known = [each for each in self.metrics if each > 0]
        if not found.uids and step not in known:
            told = f"steps {min(known)} to {max(known)}" if known else "no steps"
            raise ValueError(f"step: got {step}, and the run has {told}")
        return found

    def records(self, traced: Traced) -> Experiences:
        """A step's records, from the book."""
        try:
            return traced.records(self.book)
        except ValueError as error:
            raise ValueError(f"step {traced.step}: a record of it cannot be read: {error}") from None

    def beside(self, own: Experiences, step: int, algorithm: AlgorithmConfig) -> tuple[Experiences, list[bool] | None]:
        """A step's own records and the expert's that were beside them, and which are the expert's."""
        given = self.intake.experts(self.expert, len(own), seed=self.config.seed, step=step, known=self._experts)
        both = own if given is None else Experiences([*own, *given])
        return both, [i >= len(own) for i in range(len(both))] if algorithm.mixed else None

    @staticmethod
    def weighed(traced: Traced, records: Experiences) -> list[float] | None:
        """What a sampler had a step's records weigh; an expert's weigh 1."""
        found = traced.importance
        return None if found is None else found + [1.0] * (len(records) - len(found))

    # --- models -------------------------------------------------------------------------------------------------------

    def load(self, other: Config | None) -> None:
        """Make the models, with the weights of the checkpoint; those too that another configuration needs."""
        self.models = self._made(other)
        saving.load_weights(self.models.policy, self.begun.model)
        if self.models.critic is not None:
            if self.begun.critic is None:
                raise ValueError(f"{self.begun.path}: got no critic, and {self.config.algorithm.name} needs one")
            saving.load_weights(self.models.critic, self.begun.critic)
        self.learner = self.learner_of(self.config)
        put_state(self.learner, saving.load_state(self.begun)["learner"])

    def _made(self, other: Config | None) -> Models:
        asked = [self.config] if other is None else [self.config, other]
        if asked[-1].algorithm.needs_critic and not self.config.algorithm.needs_critic:
            name = asked[-1].algorithm.estimator
            raise ValueError(f"algorithm.estimator: got {name!r}, which needs a critic, and the run has none")
        if self.first is None and any(one.algorithm.needs_reference and one.reference is None for one in asked):
            raise ValueError(f"{self.folder}: got no checkpoint of step 0, whose weights the reference has")
        # The reference has the weights of step 0.
        actor = saved_actor(self.config, self.begun if self.first is None else self.first)
        made = [building.models_of(one, actor, _CPU) for one in asked]
        for name in ("reference", "teacher"):
            if getattr(made[0], name) is None:
                setattr(made[0], name, getattr(made[-1], name))
        return made[0]

    def learner_of(self, config: Config) -> Learner:
        """What a configuration learns with."""
        return Learner(
            self.models.policy,
            config.algorithm,
            critic=self.models.critic if config.algorithm.needs_critic else None,
            reference=self.models.reference,
            optimizer=_ending(config.optimizer, config),
            critic_optimizer=None if config.critic_optimizer is None else _ending(config.critic_optimizer, config),
            batching=config.batch.batching(),
            seed=config.seed,
            max_tokens=config.sampling.max_tokens,
            nonfinite_limit=1 << 30,  # what another choice comes to is to be seen, whatever it is
        )

    def completed(
        self, records: Experiences, algorithm: AlgorithmConfig, *, expert: Sequence[bool] | None = None
    ) -> Experiences:
        """Return the records with all columns that an algorithm reads, as `Trainer.completed` does."""
        return estimate(self._annotated(records, algorithm), algorithm, max_tokens=self._longest, expert=expert)

    def _annotated(self, records: Experiences, algorithm: AlgorithmConfig) -> Experiences:
        source: Literal["recompute", "engine"] = "engine" if algorithm.correction is None else "recompute"
        budget = self.config.batch.token_budget
        return annotate(records, algorithm, self.models, old_logprobs=source, token_budget=budget)

    @property
    def _longest(self) -> int:
        """The longest response, over all turns of an episode."""
        environment = self.config.environment
        return self.config.sampling.max_tokens * (1 if environment.function is None else environment.max_turns)

    def go_on(self) -> list[tuple[int, float, float]]:
        """Learn from the checkpoint to the step before; each step's number, its loss as recorded and as it is now."""
        made = []
        for step in range(self.begun.step + 1, self.step):
            traced = self.trace(step)
            if not traced.uids:
                continue
            records, flags = self.beside(self.records(traced), step, self.config.algorithm)
            records = self.completed(records, self.config.algorithm, expert=flags)
            weights = self.weighed(traced, records)
            loss = self.learner.update(records, step=step, expert=flags, weights=weights).metrics.get("loss")
            told = self.metrics.get(step, {}).get("loss")
            if told is not None and loss is not None:
                made.append((step, told, loss))
        return made

    def weights(self) -> Weights:
        """A copy of what moves, as it is now."""
        both = {"policy": self.models.policy, "critic": self.models.critic}
        return {name: copied(one.state_dict()) for name, one in both.items() if one is not None}

    def put(self, weights: Weights) -> None:
        """Have weights as they were."""
        for name, kept in weights.items():
            getattr(self.models, name).load_state_dict(kept)

    # --- what comes before the models ---------------------------------------------------------------------------------

    def scores(self, source: Any, rows: Experiences) -> RewardResult:
        """What a reward says of records; those of a conversation that a template forked have the reward of its last."""
        last = {row.eid.rid: row for row in rows}
        found: RewardResult = source([RewardInput.of(last[row.eid.rid], self.models.policy.tokenizer) for row in rows])
        return found

    def _rewarded(self, rows: Experiences, source: Any) -> list[float]:
        """Rewards by another source; what could not be scored then has none now, and what an environment gave stays."""
        made = [math.nan if value is None else float(value) for value in rows.values("reward")]
        known = [i for i, value in enumerate(made) if not math.isnan(value)]
        found = self.scores(source, rows.take(known))
        failed = next((error for error in found.errors if error is not None), None)
        if failed is not None:
            raise ValueError(f"rewards: {failed}")
        played = self.config.environment.function is not None
        for i, value in zip(known, found.to_tensors()[0].tolist(), strict=True):
            made[i] = value + (rows[i].metrics.get("environment", made[i]) if played else 0.0)
        return made

    def estimated(self, algorithm: AlgorithmConfig, reward: Any = None) -> dict[str, dict[str, Any]]:
        """`reward`, `advantages` and `returns` of records by id, estimated over all that were made together; with
        another reward, from its scores."""
        whole = self.traced.together if all(row.advantages is not None for row in self.own) else [self.traced.uids]
        names = ("reward", "advantages", "returns")
        made: dict[str, dict[str, Any]] = {}
        for uids in whole:
            rows = self.book.get(uids)
            if reward is not None:
                pairs = zip(rows, self._rewarded(rows, reward), strict=True)
                rows = Experiences([with_reward(row, score) for row, score in pairs])
            if algorithm.estimator is not None:
                rows = self._annotated(rows, algorithm)
                rows = estimate(rows, algorithm, max_tokens=self._longest, recompute=True)
            columns = [rows.values(name) for name in names]
            made |= {uid: dict(zip(names, row, strict=True)) for uid, *row in zip(uids, *columns, strict=True)}
        return made


def _ending(given: Optimizing, config: Config) -> Optimizing:
    """A schedule that does not say when it ends, ends with the run."""
    return given if given.steps is not None or not config.steps else dataclasses.replace(given, steps=config.steps)


def put_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Put optimizers' states into a learner that keeps its own options, and has no float32 copies beside its weights,
    which are float32 themselves."""
    both = (("optimizer", learner.optimizer), ("critic_optimizer", learner.critic_optimizer))
    movers = {name: mover for name, mover in both if mover is not None}
    own = {name: [{**group} for group in mover.inner.param_groups] for name, mover in movers.items()}
    given = {name: {key: one for key, one in copied(state[name]).items() if key != "masters"} for name in movers}
    learner.load_state_dict({"failures": state["failures"], **given})
    for name, mover in movers.items():
        for group, mine in zip(mover.inner.param_groups, own[name], strict=True):
            group.update({key: value for key, value in mine.items() if key != "params"})


def copied(value: Any) -> Any:
    """A copy of tensors in dicts and lists, apart from what moves.

    >>> copied({"a": [torch.ones(1)]})
    {'a': [tensor([1.])]}
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def less(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[weights] New weights less old ones, as one vector.

    >>> less({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    tensor([1., 1.], dtype=torch.float64)
    """
    parts = [(one.double() - old[name].double()).reshape(-1) for name, one in new.items() if one.is_floating_point()]
    return torch.cat(parts)
