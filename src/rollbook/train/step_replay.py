"""`replay(run, step)`: restore a trained step, compute it again, and compare; optionally with changed settings.

Invariant: the ledger is only read. Records whose training was voided by a rewind do not belong to the step.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.book.consumer import find_consumer
from rollbook.book.ledger import Transaction, chunks, parse_object
from rollbook.core.checks import check_int
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.models import Actor
from rollbook.models.forward import forward, without_adapters
from rollbook.models.protocols import LogprobModel, ValueModel
from rollbook.rewards.recipes import CombinedReward
from rollbook.rewards.types import Reward, RewardInput, RewardResult
from rollbook.train import builders
from rollbook.train import checkpoint as saving
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.config.files import load_config
from rollbook.train.config.schema import Config, compare_configs
from rollbook.train.config.values import expand_variables
from rollbook.train.learner import Learner, UpdateResult
from rollbook.train.pipeline import Models, annotate, estimate, with_reward
from rollbook.train.run import BOOK_FOLDER, CONFIG_FILE
from rollbook.train.user_code import check_trusted

__all__ = ["Comparison", "CounterfactualResult", "RecordChange", "ReplayResult", "StepRecords", "Tolerance", "replay"]

SAME, ROUNDING, DIFFERS, NOT_COMPARED = "same", "differs by rounding", "differs", "not compared"
_PLACEMENT_KEYS = ("minibatch", "micro_batch", "weight", "excluded")

Numbers = float | Sequence[float] | NDArray[np.float64] | torch.Tensor
"""A number of a record, or one for each of its tokens."""


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A recorded quantity and the recomputed one.

    Args:
        quantity: Its name.
        recorded: The recorded value, or the mean of several.
        recomputed: The recomputed value, or the mean of several.
        difference: The largest difference; for plans, the number of records in other places.
        verdict: `SAME`, `ROUNDING`, `DIFFERS` or `NOT_COMPARED`.
        note: A remark.

    >>> Comparison("loss", 0.5, 0.5, 0.0, SAME).verdict
    'same'
    """

    quantity: str
    recorded: float | str | None
    recomputed: float | str | None
    difference: float | None
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Tolerance:
    """Differences that count as rounding.

    Args:
        absolute: Absolute difference of numbers.
        relative: Difference of numbers relative to the larger one, in addition.
        tokens: Mean difference of log-probs and values over all tokens; single unlikely tokens can differ by more.
        update: Norm of the difference of new weights, relative to that of the update.

    >>> print(Tolerance(absolute=1e-5, relative=1e-3, tokens=1e-4, update=1e-2))
    1e-05 absolute + 0.001 relative, 0.0001 mean over tokens, 0.01 of the norm of an update
    """

    absolute: float
    relative: float
    tokens: float
    update: float

    def __str__(self) -> str:
        numbers = f"{self.absolute:g} absolute + {self.relative:g} relative"
        return f"{numbers}, {self.tokens:g} mean over tokens, {self.update:g} of the norm of an update"


CPU_TOLERANCE = Tolerance(1e-5, 1e-3, 1e-4, 1e-2)
"""Tolerance for runs trained in float32 on a CPU, as they are replayed."""
GPU_TOLERANCE = Tolerance(5e-3, 1e-1, 3e-2, 5e-1)
"""Tolerance for runs trained on a GPU or in bfloat16."""
EXACT_TOLERANCE = Tolerance(2e-9, 1e-9, 0.0, 0.0)
"""Tolerance for counts, rates and shares, which involve no model."""
COUNT_METRICS = ("lr", "updates", "skipped", "rows")
_LEADING_METRICS = ("loss", "grad_norm", "policy/pg_loss", "kl", "entropy", "critic/value_loss", "critic/grad_norm")


def metric_order(name: str) -> tuple[int, str]:
    """Return the sort key of a metric: losses first, counts last.

    >>> sorted(["lr", "policy/ppo_kl", "grad_norm", "loss"], key=metric_order)
    ['loss', 'grad_norm', 'policy/ppo_kl', 'lr']
    """
    if name in _LEADING_METRICS:
        return _LEADING_METRICS.index(name), ""
    return (
        len(_LEADING_METRICS) if "/" in name and not name.startswith("excluded/") else len(_LEADING_METRICS) + 1
    ), name


def not_compared(quantity: str, note: str, recorded: float | str | None = None) -> Comparison:
    """Return the comparison of a quantity that is not compared; `note` is the reason."""
    return Comparison(quantity, recorded, None, None, NOT_COMPARED, note)


def compare_rows(
    quantity: str,
    recorded: Sequence[Numbers],
    recomputed: Sequence[Numbers],
    tolerance: Tolerance,
    *,
    size: bool = False,
) -> Comparison:
    """Compare numbers of rows, or of their tokens, of which each must be within the tolerance.

    Args:
        quantity: Name of the quantity.
        recorded: [rows] Recorded numbers.
        recomputed: [rows] Recomputed numbers.
        tolerance: What counts as rounding.
        size: Whether to report means of absolute values.

    >>> [compare_rows("loss", [0.5], [loss], CPU_TOLERANCE).verdict for loss in (0.50001, 0.6)]
    ['differs by rounding', 'differs']
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Comparison(quantity, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _absolute_difference(old, new)
    larger = np.maximum(np.abs(old), np.abs(new))
    is_near = gap <= tolerance.absolute + tolerance.relative * np.where(np.isfinite(larger), larger, 0.0)
    verdict = SAME if not gap.any() else ROUNDING if is_near.all() else DIFFERS
    means = [_mean(np.abs(side) if size else side) for side in (old, new)]
    return Comparison(quantity, means[0], means[1], float(gap.max(initial=0.0)), verdict)


def compare_tokens(
    quantity: str, recorded: Sequence[Numbers], recomputed: Sequence[Numbers], tolerance: float
) -> Comparison:
    """Compare model outputs of tokens, whose mean difference must be at most `tolerance`.

    >>> compare_tokens("log-probs", [[-1.0, -2.0]], [[-1.0, -2.001]], 1e-2).verdict
    'differs by rounding'
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Comparison(quantity, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _absolute_difference(old, new)
    mean = float(gap.mean()) if gap.size else 0.0
    verdict = SAME if not gap.any() else ROUNDING if mean <= tolerance else DIFFERS
    note = f"mean difference {mean:.3g}" if mean else ""
    return Comparison(quantity, _mean(old), _mean(new), float(gap.max(initial=0.0)), verdict, note)


def compare_plans(recorded: Sequence[Mapping[str, Any]], recomputed: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compare the placements of records in minibatches and micro-batches, and their weights.

    >>> placement = {"minibatch": 0, "micro_batch": 0, "weight": 0.5}
    >>> comparisons = compare_plans([placement, placement], [placement, {**placement, "micro_batch": 1}])
    >>> [comparison.verdict for comparison in comparisons]
    ['same', 'differs by rounding', 'same']
    """
    if not any(name in placement for placement in recorded for name in _PLACEMENT_KEYS):
        return [not_compared("plan", "the ledger has no plan: another trainer acknowledged these records")]
    checks: list[Comparison] = []
    pairs = list(zip(recorded, recomputed, strict=True))
    for name, quantity in (("minibatch", "plan: minibatches"), ("micro_batch", "plan: micro-batches")):
        names = (name, "excluded") if name == "minibatch" else (name,)
        different = sum(any(old.get(key) != new.get(key) for key in names) for old, new in pairs)
        counts = [
            str(len({str(placement[name]) for placement in side if name in placement}))
            for side in (recorded, recomputed)
        ]
        note = ""
        verdict = DIFFERS if different else SAME
        if different and name == "micro_batch" and checks[0].verdict == SAME:
            verdict = ROUNDING
            note = "another token budget or layout, which changes numbers only by rounding"
        checks.append(Comparison(quantity, counts[0], counts[1], float(different), verdict, note))
    weights = [[_as_list(placement.get("weight", 0.0)) for placement in side] for side in (recorded, recomputed)]
    return [*checks, compare_rows("plan: shares of tokens", weights[0], weights[1], EXACT_TOLERANCE)]


def select_actions(row: Experience, values: Numbers) -> NDArray[np.float64]:
    """Return the numbers of the response tokens that the mask of a record selects.

    >>> row = Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False])
    >>> select_actions(row, [0.5, 0.7])
    array([0.5])
    """
    array = np.asarray(values, dtype=np.float64)
    return array if row.action_mask is None else array[np.asarray(row.action_mask, dtype=bool)]


def _as_list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _flat(values: Sequence[Numbers]) -> NDArray[np.float64]:
    parts = [np.asarray(row, dtype=np.float64).reshape(-1) for row in values]
    return np.concatenate(parts) if parts else np.zeros(0)


def _absolute_difference(old: NDArray[np.float64], new: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute |old - new|: 0 if both are the same infinity or both NaN, infinite if only one is."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(old - new)
    gap[(old == new) | (np.isnan(old) & np.isnan(new))] = 0.0
    return np.where(np.isnan(gap), np.inf, gap)


def _mean(values: NDArray[np.float64]) -> float | None:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if finite.size else None


# --- records of a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRecords:
    """The records that a step was trained on.

    Args:
        step: Number of the step.
        uids: [N] Ids, in the order of the lease, which is that of the batch.
        placements: [N] What was acknowledged: `minibatch`, `micro_batch` and `weight`, or `excluded`.
        importance: [N] Sampling weights; `None` if the sampler has none.
        appends: Ids of the records that were appended together with some of these, if their data still exist.
        lost: Number of records of these appends without data.
        revised: Authors of changes after the step, by id.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"task": i}, tokens=[1, 2, 3]) for i in range(2)])
    >>> with book.lease(2) as lease:
    ...     _ = lease.ack(step=1, details={uid: {"minibatch": 0, "weight": 0.5} for uid in lease.uids})
    >>> traced = trace_step(book, 1)
    >>> traced.uids == lease.uids, traced.placements[0]["weight"]
    (True, 0.5)
    """

    step: int
    uids: list[str]
    placements: list[dict[str, Any]]
    importance: list[float] | None = None
    appends: list[list[str]] = field(default_factory=list)
    lost: int = 0
    revised: dict[str, str] = field(default_factory=dict)


def trace_step(book: Book, step: int, consumer: str = "train") -> StepRecords:
    """Read from the ledger which records a step was trained on.

    Args:
        book: The book of the run.
        step: Number of the step.
        consumer: Consumer group of the trainer.

    Returns:
        The records; none if the step trained on nothing.

    Raises:
        ValueError: The book has no such consumer.
    """
    with book.ledger.read() as tx:
        group = find_consumer(tx, consumer)
        if group is None:
            raise ValueError(f"{book.url}: unknown consumer {consumer!r}, expected that of the run")
        events = tx.all(
            "SELECT id, seq, kind, lease, detail FROM events WHERE kind IN ('trained', 'voided') AND step = ? "
            "AND consumer = ? ORDER BY id",
            (step, group.id),
        )
        acknowledged = [
            (event, seq, kind, lease, parse_object(detail, f"event {event}"))
            for event, seq, kind, lease, detail in events
        ]
        voided = {detail.get("event") for _, _, kind, _, detail in acknowledged if kind == "voided"}
        trained = {
            seq: (event, lease, detail)
            for event, seq, kind, lease, detail in acknowledged
            if kind == "trained" and event not in voided
        }
        order = _lease_order(tx, {lease for _, lease, _ in trained.values()})
        seqs = sorted(trained, key=lambda seq: (trained[seq][2].get("row", 0), order[trained[seq][1], seq]))
        records = _read_records(tx, seqs)
        appends, lost = _read_appends(tx, [records[seq][1:] for seq in seqs])
        revised = _read_revisions(tx, {seq: trained[seq][0] for seq in seqs})
    details = [trained[seq][2] for seq in seqs]
    weights: list[Any] = [detail.get("importance") for detail in details]
    return StepRecords(
        step,
        [records[seq][0] for seq in seqs],
        [{name: detail[name] for name in _PLACEMENT_KEYS if name in detail} for detail in details],
        [float(weight) for weight in weights] if weights and None not in weights else None,
        appends,
        lost,
        {records[seq][0]: author for seq, author in revised.items()},
    )


def _lease_order(tx: Transaction, leases: set[int]) -> dict[tuple[int, int], int]:
    """Return the event of each lease and record; their order is that of the records in the lease."""
    order: dict[tuple[int, int], int] = {}
    for marks, chunk in chunks(sorted(leases)):
        rows = tx.all(f"SELECT lease, seq, id FROM events WHERE kind = 'leased' AND lease IN ({marks})", chunk)
        order.update({(lease, seq): event for lease, seq, event in rows})
    return order


def _read_records(tx: Transaction, seqs: Sequence[int]) -> dict[int, tuple[str, str, float]]:
    """Return id, batch and time of each record."""
    details: dict[int, tuple[str, str, float]] = {}
    for marks, chunk in chunks(seqs):
        rows = tx.all(f"SELECT seq, uid, batch, admitted FROM records WHERE seq IN ({marks})", chunk)
        details.update({seq: (uid, batch, admitted) for seq, uid, batch, admitted in rows})
    return details


def _read_appends(tx: Transaction, appends: Sequence[tuple[str, float]]) -> tuple[list[list[str]], int]:
    groups: list[list[str]] = []
    lost = 0
    for append in dict.fromkeys(appends):
        rows = tx.all(
            "SELECT uid, segment FROM records WHERE batch = ? AND admitted = ? AND evaluation = 0 ORDER BY seq", append
        )
        groups.append([uid for uid, segment in rows if segment is not None])
        lost += len(rows) - len(groups[-1])
    return groups, lost


def _read_revisions(tx: Transaction, since: dict[int, int]) -> dict[int, str]:
    names: dict[int, str] = {}
    for marks, chunk in chunks(list(since)):
        rows = tx.all(
            f"SELECT id, seq, detail FROM events WHERE kind IN ('revised', 'redacted') AND seq IN ({marks})", chunk
        )
        for event, seq, detail in rows:
            if event > since[seq]:
                names[seq] = str(parse_object(detail, f"event {event}").get("author", ""))
    return names


# --- the step, restored -----------------------------------------------------------------------------------------------

State = Mapping[str, torch.Tensor]
"""Weights of a model by name."""
Weights = dict[str, dict[str, torch.Tensor]]
"""States of `policy` and `critic`."""
_CPU = torch.device("cpu")
_ATTENTION = (None, "eager", "sdpa")
"""Attention implementations that run on a CPU."""


def to_cpu(config: Config) -> Config:
    """Return the configuration for float32 on a CPU.

    >>> to_cpu(Config(model={"config": {"model_type": "llama"}, "precision": "bfloat16"})).model.precision
    'float32'
    """
    attention = config.model.attention if config.model.attention in _ATTENTION else None
    model = dataclasses.replace(config.model, precision="float32", attention=attention, gradient_checkpointing=False)
    return dataclasses.replace(config, model=model)


def load_actor(config: Config, checkpoint: saving.Checkpoint) -> Actor:
    """Load the policy of a checkpoint without calling `model.builder`; `config` is what `to_cpu` returned."""
    state = checkpoint.trainer_state()
    attention = state.get("attention", config.model.attention)
    with saving.loading_errors(checkpoint.model):
        return Actor(
            checkpoint.model,
            dtype=torch.float32,
            device=_CPU,
            attn_implementation=attention if attention in _ATTENTION else None,
            temperature=config.sampling.temperature,
            suppress=state.get("suppress", config.model.suppress),
        )


class RestoredStep:
    """A run, and its models with the weights before a step.

    Args:
        folder: The folder of the run.
        config: Its configuration.
        book: Its book, opened for reading.
        step: Number of the step.
        stack: Closes the book of expert records.

    Raises:
        ValueError: The run has no such step, or no checkpoint before it.
    """

    models: Models
    learner: Learner

    def __init__(self, folder: Path, config: Config, book: Book, step: int, stack: ExitStack) -> None:
        self.folder, self.book, self.step = folder, book, step
        self.config = to_cpu(config)
        self.replay = self.config.replay.replay_config()
        self.metrics = dict(book.metrics())
        self.traced = self.trace(step)
        if not self.traced.uids:
            raise ValueError(f"step {step}: nothing was trained on: every group was dropped, or there were no records")
        self.leased = self.records(self.traced)
        """The records of the step, without those of an expert."""
        checkpoints = saving.list_checkpoints(folder)
        earlier = [entry for entry in checkpoints if entry.step < step]
        if not earlier:
            raise ValueError(
                f"{folder}: got no checkpoint before step {step}, expected one in {saving.CHECKPOINT_FOLDER}"
            )
        self.start = earlier[-1]
        """The checkpoint from which the step is replayed."""
        self.first = checkpoints[0] if checkpoints[0].step == 0 else None
        self.end = next((entry for entry in checkpoints if entry.step == step), None)
        """The checkpoint after the step, if there is one."""
        self.expert: Book | None = None
        expert = builders.open_expert_book(self.config) if self.replay.expert_share else None
        if expert is not None:
            self.expert = stack.enter_context(expert)
        self._expert_uids: list[str] = []
        self.on_gpu = "peak_memory_gib" in self.metrics.get(step, {}) or config.device.startswith("cuda")
        self.exact = config.model.precision == "float32" and not self.on_gpu
        """Whether the run was trained in float32 on a CPU, as it is replayed."""

    # --- records ------------------------------------------------------------------------------------------------------

    def trace(self, step: int) -> StepRecords:
        """Return the records of a step of the run."""
        traced = trace_step(self.book, step, self.replay.consumer)
        steps = [number for number in self.metrics if number > 0]
        if not traced.uids and step not in steps:
            extent = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
            raise ValueError(f"step: got {step}, and the run has {extent}")
        return traced

    def records(self, traced: StepRecords) -> Experiences:
        """Read the records of a step in their current state."""
        try:
            return self.book.get(traced.uids)
        except ValueError as error:
            raise ValueError(f"step {traced.step}: a record cannot be read: {error}") from None

    def with_experts(
        self, leased: Experiences, step: int, algorithm: AlgorithmConfig
    ) -> tuple[Experiences, list[bool] | None]:
        """Append the expert records of a step; return all, and which are the expert's (for mixed losses)."""
        records = leased
        if self.replay.expert_share:
            seed, uids = self.config.seed, self._expert_uids
            experts = self.replay.experts(self.expert, len(leased), seed=seed, step=step, uids=uids)
            records = Experiences([*leased, *experts])
        return records, [i >= len(leased) for i in range(len(records))] if algorithm.mixed else None

    @staticmethod
    def sampling_weights(traced: StepRecords, records: Experiences) -> list[float] | None:
        """Return the sampling weights of a step; expert records have weight 1."""
        importance = traced.importance
        return None if importance is None else importance + [1.0] * (len(records) - len(importance))

    # --- models -------------------------------------------------------------------------------------------------------

    def load(self, other: Config | None) -> None:
        """Build the models, also those that another configuration needs, and load the weights of the checkpoint."""
        self.models = self._build_models(other)
        saving.load_weights(self.models.policy, self.start.model)
        if self.models.critic is not None:
            if self.start.critic is None:
                raise ValueError(f"{self.start.path}: got no critic, and {self.config.algorithm.name} needs one")
            saving.load_weights(self.models.critic, self.start.critic)
        self.learner = self.build_learner(self.config)
        load_learner_state(self.learner, saving.load_state(self.start)["learner"])

    def _build_models(self, other: Config | None) -> Models:
        configs = [self.config] if other is None else [self.config, other]
        if configs[-1].algorithm.needs_critic and not self.config.algorithm.needs_critic:
            name = configs[-1].algorithm.estimator
            raise ValueError(f"algorithm.estimator: got {name!r}, which needs a critic, and the run has none")
        if self.first is None and any(
            config.algorithm.needs_reference and config.reference is None for config in configs
        ):
            raise ValueError(f"{self.folder}: got no checkpoint of step 0, which has the weights of the reference")
        actor = load_actor(self.config, self.start if self.first is None else self.first)
        built = [builders.build_models(config, actor, _CPU) for config in configs]
        for name in ("reference", "teacher"):
            if getattr(built[0], name) is None:
                setattr(built[0], name, getattr(built[-1], name))
        return built[0]

    def build_learner(self, config: Config) -> Learner:
        """Build the learner of a configuration."""
        critic_optimizer = config.critic_optimizer
        return Learner(
            self.models.policy,
            config.algorithm,
            critic=self.models.critic if config.algorithm.needs_critic else None,
            reference=self.models.reference,
            optimizer=builders.end_with_run(config.optimizer, config.steps),
            critic_optimizer=(
                None if critic_optimizer is None else builders.end_with_run(critic_optimizer, config.steps)
            ),
            minibatch=config.batch.minibatch_config(),
            seed=config.seed,
            max_tokens=config.sampling.max_tokens,
            nonfinite_limit=1 << 30,  # report a non-finite update of changed settings, do not stop
        )

    def compute_missing_columns(
        self, records: Experiences, algorithm: AlgorithmConfig, *, expert: Sequence[bool] | None = None
    ) -> Experiences:
        """Return the records with all columns that an algorithm reads, as `Trainer.compute_missing_columns` does."""
        records = self._annotate(records, algorithm)
        return estimate(records, algorithm, max_tokens=self._max_response_tokens, expert=expert)

    def _annotate(self, records: Experiences, algorithm: AlgorithmConfig) -> Experiences:
        rollout = self.config.rollout
        is_current = rollout.uses_workers and rollout.mode == "sync"
        source: Literal["recompute", "engine"] = (
            "engine" if algorithm.correction is None and not is_current else "recompute"
        )
        budget = self.config.batch.token_budget
        return annotate(records, algorithm, self.models, old_logprobs=source, token_budget=budget)

    @property
    def _max_response_tokens(self) -> int:
        """Maximum response length, over all turns of an episode."""
        environment = self.config.environment
        return self.config.sampling.max_tokens * (1 if environment.function is None else environment.max_turns)

    def replay_earlier_steps(self) -> list[tuple[int, float, float]]:
        """Replay the steps between the checkpoint and this step.

        Returns:
            Number, recorded loss and recomputed loss of each step.
        """
        losses = []
        for step in range(self.start.step + 1, self.step):
            traced = self.trace(step)
            if not traced.uids:
                continue
            records, flags = self.with_experts(self.records(traced), step, self.config.algorithm)
            records = self.compute_missing_columns(records, self.config.algorithm, expert=flags)
            weights = self.sampling_weights(traced, records)
            loss = self.learner.update(records, step=step, expert=flags, weights=weights).metrics.get("loss")
            recorded = self.metrics.get(step, {}).get("loss")
            if recorded is not None and loss is not None:
                losses.append((step, recorded, loss))
        return losses

    def weights(self) -> Weights:
        """Return copies of the current weights of the trained models."""
        trained = {"policy": self.models.policy, "critic": self.models.critic}
        return {name: clone_tensors(model.state_dict()) for name, model in trained.items() if model is not None}

    def load_weights(self, weights: Weights) -> None:
        """Restore copied weights."""
        for name, state in weights.items():
            getattr(self.models, name).load_state_dict(state)

    # --- rewards and advantages ---------------------------------------------------------------------------------------

    def scores(self, source: Reward, rows: Experiences) -> RewardResult:
        """Score records; all records of a run have the score of its last one."""
        last = {row.eid.rid: row for row in rows}
        return source([RewardInput.of(last[row.eid.rid], self.models.policy.tokenizer) for row in rows])

    def _new_rewards(self, rows: Experiences, source: Reward) -> list[float]:
        """Compute rewards by another source. Missing rewards stay missing; rewards of an environment are added."""
        rewards = [math.nan if value is None else float(value) for value in rows.values("reward")]
        scored = [i for i, value in enumerate(rewards) if not math.isnan(value)]
        scores = self.scores(source, rows.take(scored))
        failed = next((error for error in scores.errors if error is not None), None)
        if failed is not None:
            raise ValueError(f"rewards: {failed}")
        played = self.config.environment.function is not None
        for i, value in zip(scored, scores.to_tensors()[0].tolist(), strict=True):
            rewards[i] = value + (rows[i].metrics.get("environment", rewards[i]) if played else 0.0)
        return rewards

    def estimate_advantages(
        self, algorithm: AlgorithmConfig, reward: Reward | None = None
    ) -> dict[str, dict[str, Any]]:
        """Estimate advantages over all records that were appended together.

        Args:
            algorithm: The estimator and its settings.
            reward: Scores the records; `None`: the recorded rewards.

        Returns:
            `reward`, `advantages` and `returns` by id.
        """
        has_advantages = all(row.advantages is not None for row in self.leased)
        batches = self.traced.appends if has_advantages else [self.traced.uids]
        names = ("reward", "advantages", "returns")
        estimates: dict[str, dict[str, Any]] = {}
        for uids in batches:
            rows = self.book.get(uids)
            if reward is not None:
                pairs = zip(rows, self._new_rewards(rows, reward), strict=True)
                rows = Experiences([with_reward(row, score) for row, score in pairs])
            if algorithm.estimator is not None:
                rows = self._annotate(rows, algorithm)
                rows = estimate(rows, algorithm, max_tokens=self._max_response_tokens, recompute=True)
            columns = [rows.values(name) for name in names]
            estimates |= {uid: dict(zip(names, row, strict=True)) for uid, *row in zip(uids, *columns, strict=True)}
        return estimates


def load_learner_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Load the state of a learner, but keep its optimizers' options.

    Float32 master weights of bfloat16 models are dropped: replayed weights are float32 themselves.
    """
    candidates = (("optimizer", learner.optimizer), ("critic_optimizer", learner.critic_optimizer))
    optimizers = {name: optimizer for name, optimizer in candidates if optimizer is not None}
    groups = {name: [{**group} for group in optimizer.inner.param_groups] for name, optimizer in optimizers.items()}
    states = {
        name: {key: entry for key, entry in clone_tensors(state[name]).items() if key != "masters"}
        for name in optimizers
    }
    learner.load_state_dict({"failures": state["failures"], **states})
    for name, optimizer in optimizers.items():
        for group, options in zip(optimizer.inner.param_groups, groups[name], strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})


def clone_tensors(value: Any) -> Any:
    """Copy tensors in nested dicts and lists.

    >>> clone_tensors({"a": [torch.ones(1)]})
    {'a': [tensor([1.])]}
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: clone_tensors(entry) for name, entry in value.items()}
    return [clone_tensors(entry) for entry in value] if isinstance(value, list) else value


def weight_difference(new: State, old: State) -> torch.Tensor:
    """Subtract old weights from new ones.

    Args:
        new: Weights by name.
        old: Weights by the same names.

    Returns:
        [W] All differences, as one vector.

    >>> weight_difference({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    tensor([1., 1.], dtype=torch.float64)
    """
    parts = [
        (weight.double() - old[name].double()).reshape(-1) for name, weight in new.items() if weight.is_floating_point()
    ]
    return torch.cat(parts)


_ROLLOUT_KEYS = ("algorithm.group_size", "algorithm.refill", "algorithm.drop_constant_groups")
"""Keys of an algorithm that only affect generation."""
_NAME_KEYS = ("algorithm.preset", "algorithm.name")
_REPLAYED_KEYS = ("algorithm.", "batch.", "optimizer.", "critic_optimizer", "rewards", "steps")
"""Keys that a replay can change."""


# --- changed settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordChange:
    """A record whose advantage changes with other settings; see `CounterfactualResult`.

    Args:
        uid: Its id.
        prompt: Text of its prompt.
        reward: Reward as trained, and with the changes.
        advantage: Mean advantage over tokens as trained, and with the changes.
    """

    uid: str
    prompt: str
    reward: tuple[float, float]
    advantage: tuple[float, float]


@dataclass(frozen=True)
class CounterfactualResult:
    """A step with changed settings, compared with the step as trained; see `replay`.

    Args:
        changes: The changes.
        numbers: Mean absolute advantage, losses, metrics, and norms of gradient and update, as trained and with the
            changes, by name.
        signs: Number of records whose advantage has another sign.
        rows: Number of records with an advantage.
        correlation: Correlation of the advantages.
        cosine: Cosine of the two updates of the policy.
        moved: The records whose advantage changes most.
        notes: Remarks.
    """

    changes: list[str]
    numbers: dict[str, tuple[float | None, float | None]]
    signs: int
    rows: int
    correlation: float | None
    cosine: float | None
    moved: list[RecordChange]
    notes: list[str] = field(default_factory=list)


def split_changes(config: Config, other: Config) -> tuple[list[str], list[str]]:
    """Split the differences of a configuration into those that a replay applies and those that affect generation only.

    Args:
        config: The configuration of the run.
        other: The changed configuration.

    Raises:
        ValueError: A key cannot be changed in a replay, or nothing changes.

    >>> other = Config.from_dict({"algorithm": {"preset": "grpo", "estimator": "rloo", "group_size": 4}})
    >>> split_changes(Config(), other)
    (['algorithm.estimator: "rloo", was "grpo"'], ['algorithm.group_size'])
    >>> split_changes(Config(), Config(seed=1))
    Traceback (most recent call last):
        ...
    ValueError: seed: cannot change in a replay; expected changes of algorithm, rewards, batch or optimizer
    """
    changes = compare_configs(to_cpu(config), to_cpu(other))
    for change in changes:
        if not change.path.startswith(_REPLAYED_KEYS) or change.path == "batch.prompts_per_step":
            raise ValueError(
                f"{change.path}: cannot change in a replay; expected changes of algorithm, rewards, batch or optimizer"
            )
    effective_changes = [str(change) for change in changes if change.path not in (*_ROLLOUT_KEYS, *_NAME_KEYS)]
    if not effective_changes:
        listed = ", ".join(change.path for change in changes) or "the run's own values"
        raise ValueError(f"changes: got {listed}, which changes nothing in a replay")
    return effective_changes, [change.path for change in changes if change.path in _ROLLOUT_KEYS]


def compute_counterfactual(
    run: RestoredStep,
    other: Config,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    trained: tuple[Experiences, UpdateResult, torch.Tensor],
) -> CounterfactualResult:
    """Compute a step with another configuration.

    Args:
        run: The restored step.
        other: The changed configuration.
        state: State of the learner before the step.
        weights: Weights before the step.
        trained: The records as trained, the result of the update, and the difference of the policy's weights.
    """
    trained_records, learned, update = trained
    applied, ignored = split_changes(run.config, other)
    notes = [f"{name}: affects only generation; not replayed" for name in ignored]
    leased = run.leased
    run.load_weights(weights)
    if other.algorithm.estimator is not None:
        source = None
        if other.rewards != run.config.rewards:
            source = builders.build_reward(other.rewards)
            if source is None:
                raise ValueError("rewards: missing")
        estimates = run.estimate_advantages(other.algorithm, source)
        if source is not None:
            source.close()
        names = ("reward", "advantages", "returns")
        leased = leased.assign(**{name: [estimates[uid][name] for uid in run.traced.uids] for name in names})
    records, flags = run.with_experts(leased, run.step, other.algorithm)
    records = run.compute_missing_columns(records, other.algorithm, expert=flags)
    learner = run.build_learner(other)
    if other.optimizer.name == run.config.optimizer.name:
        load_learner_state(learner, state)
    else:
        notes.append(f"optimizer.name: {other.optimizer.name} starts without state")
    importance = run.sampling_weights(run.traced, records)
    changed = learner.update(records, step=run.step, expert=flags, weights=importance)
    new_update = weight_difference(run.weights()["policy"], weights["policy"])
    rows = _mean_advantages(trained_records, records, len(leased))
    numbers: dict[str, tuple[float | None, float | None]] = {}
    if rows:
        sizes = [float(np.mean([abs(pair[k]) for _, pair in rows])) for k in (0, 1)]
        numbers["mean |advantage|"] = (sizes[0], sizes[1])
    for name in sorted({**learned.metrics, **changed.metrics}, key=metric_order):
        numbers[name] = (learned.metrics.get(name), changed.metrics.get(name))
    numbers["norm of the update"] = (float(update.norm()), float(new_update.norm()))
    moved = sorted(rows, key=lambda row: -abs(row[1][1] - row[1][0]))
    return CounterfactualResult(
        applied,
        numbers,
        signs=sum(int(np.sign(a) != np.sign(b)) for _, (a, b) in rows),
        rows=len(rows),
        correlation=_correlation([a for _, (a, _) in rows], [b for _, (_, b) in rows]),
        cosine=_cosine(update, new_update),
        moved=[_record_change(run, i, pair, records) for i, pair in moved[:5] if pair[0] != pair[1]],
        notes=notes,
    )


def _record_change(run: RestoredStep, i: int, advantage: tuple[float, float], records: Experiences) -> RecordChange:
    row = run.leased[i]
    prompt = row.prompt_text
    if prompt is None and row.messages:
        prompt = str(row.messages[-1].get("content"))
    if prompt is None and run.models.policy.tokenizer is not None:
        prompt = run.models.policy.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
    rewards = [math.nan if record.reward is None else float(record.reward) for record in (row, records[i])]
    return RecordChange(row.eid.uid, str(prompt or ""), (rewards[0], rewards[1]), advantage)


def _mean_advantages(trained: Experiences, replayed: Experiences, count: int) -> list[tuple[int, tuple[float, float]]]:
    """Return index and mean advantages of the first `count` records, of those that have advantages on both sides."""
    means = []
    for i in range(count):
        columns = [(row, row.advantages) for row in (trained[i], replayed[i])]
        old, new = [None if column is None else select_actions(row, column) for row, column in columns]
        if old is not None and new is not None:
            means.append((i, (float(old.mean()), float(new.mean())) if len(old) and len(new) else (0.0, 0.0)))
    return means


def _cosine(first: torch.Tensor, other: torch.Tensor) -> float | None:
    lengths = float(first.norm() * other.norm())
    return float(first @ other) / lengths if lengths > 0 else None


def _correlation(first: Sequence[float], other: Sequence[float]) -> float | None:
    if len(first) < 2 or not np.std(first) or not np.std(other):
        return None
    return float(np.corrcoef(first, other)[0, 1])


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass
class ReplayResult:
    """Result of `replay`.

    Args:
        folder: The folder of the run.
        step: Number of the step.
        records: Number of records.
        checkpoint: Name of the checkpoint from which the step was replayed.
        tolerance: What counts as rounding.
        checks: Comparisons of recorded and recomputed quantities.
        notes: Remarks.
        changed: The step with changed settings, if there are any.
    """

    folder: Path
    step: int
    records: int
    checkpoint: str
    tolerance: Tolerance
    checks: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed: CounterfactualResult | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(check.verdict != DIFFERS for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return {**dataclasses.asdict(self), "folder": str(self.folder), "agrees": self.agrees}


def replay(run: str | os.PathLike[str], step: int, changes: Sequence[str] = (), *, trust: bool = False) -> ReplayResult:
    """Recompute a step of a run, and compare it with the recorded one.

    Args:
        run: The folder of the run.
        step: The step, from 1 on.
        changes: Other settings, such as `algorithm.estimator=rloo`, to see what they would have changed.
        trust: Whether code outside Rollbook that the run's configuration names may run: reward functions and a
            teacher's builder. Models come from the checkpoints; `model.builder` is never called.

    Returns:
        The recorded and the recomputed values, and with `changes`, what these change.

    Raises:
        ValueError: The configuration names such code and `trust` is false, or the step cannot be replayed.

    >>> import io, tempfile
    >>> from rollbook.train.run import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = ["steps=1", "warmup.steps=1", "warmup.target_accuracy=null", "data.options.count=40",
    ...              "data.held_out=0",
    ...              "batch.prompts_per_step=2", "algorithm.group_size=2",
    ...              "model.options.hidden=32", "model.options.heads=1"]
    ...     _ = run(load_config("letters", [*small, f"out={folder}/run"]), stream=io.StringIO())
    ...     result = replay(f"{folder}/run", 1, ["algorithm.estimator=rloo"])
    >>> result.agrees, result.records, result.changed.changes
    (True, 4, ['algorithm.estimator: "rloo", was "grpo"'])
    """
    step = check_int("step", step, 1)
    folder = Path(run).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder}: got no {CONFIG_FILE}, expected the folder of a run of `rollbook train`")
    config = load_config(folder / CONFIG_FILE)
    other = to_cpu(load_config(folder / CONFIG_FILE, list(changes))) if changes else None
    if other is not None:
        split_changes(config, other)
    if not trust:
        # Code that only the changes name is the caller's.
        check_trusted(folder, config, remote=other is not None and other.rewards != config.rewards)
    with ExitStack() as stack:
        stack.enter_context(_torch_threads(config))
        address = expand_variables(config.book or str(folder / BOOK_FOLDER), "book")
        book = stack.enter_context(open_book(address, mode="r"))
        return _Replay(RestoredStep(folder, config, book, step, stack), config).run(other)


@contextmanager
def _torch_threads(config: Config) -> Iterator[None]:
    """Use the number of threads of the run; restore threads and random states at the end."""
    threads, state = torch.get_num_threads(), saving.random_state()
    try:
        torch.set_num_threads(threads if config.threads is None else config.threads)
        yield
    finally:
        torch.set_num_threads(threads)
        saving.set_random_state(state)


class _Replay:
    """A replay in progress: the restored step and the result so far."""

    def __init__(self, restored: RestoredStep, config: Config) -> None:
        self.step = run = restored
        tolerance = CPU_TOLERANCE if run.exact else GPU_TOLERANCE
        self.result = ReplayResult(
            run.folder, run.step, len(run.leased), saving.checkpoint_name(run.start.step), tolerance
        )
        self.checks, self.notes = self.result.checks, self.result.notes
        if not run.exact:
            device = "on a GPU" if run.on_gpu else f"in {config.model.precision}"
            self.notes.append(f"trained {device}, replayed in float32 on the CPU; small differences are rounding")

    def run(self, other: Config | None) -> ReplayResult:
        """Replay the step, and compute it with another configuration if there is one."""
        run = self.step
        run.load(other)
        self._replay_earlier_steps()
        state, weights = clone_tensors(run.learner.state_dict()), run.weights()
        self._note_changed_records()
        self._compare_rewards()
        self._compare_models()
        self._compare_advantages()
        algorithm = run.config.algorithm
        records, flags = run.with_experts(run.leased, run.step, algorithm)
        records = run.compute_missing_columns(records, algorithm, expert=flags)
        importance = run.sampling_weights(run.traced, records)
        learned = run.learner.update(records, step=run.step, expert=flags, weights=importance)
        update = weight_difference(run.weights()["policy"], weights["policy"])
        self._compare_update(learned)
        self._compare_new_weights(weights)
        if other is not None:
            trained = (records, learned, update)
            self.result.changed = compute_counterfactual(run, other, state=state, weights=weights, trained=trained)
        return self.result

    def _replay_earlier_steps(self) -> None:
        run = self.step
        steps = range(run.start.step + 1, run.step)
        losses = run.replay_earlier_steps()
        if steps:
            span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            self.notes.append(f"replayed {span} first, from the newest checkpoint {self.result.checkpoint}")
            if losses:
                old, new = [recorded for _, recorded, _ in losses], [loss for _, _, loss in losses]
                self.checks.append(compare_rows(f"loss of {span}", old, new, self.result.tolerance))

    def _note_changed_records(self) -> None:
        traced = self.step.traced
        if traced.revised:
            who = ", ".join(sorted(set(traced.revised.values())))
            names = ", ".join(list(traced.revised)[:3])
            self.notes.append(f"{len(traced.revised)} records were changed after the step, by {who}: {names}")
        if traced.lost:
            self.notes.append(f"the data of {traced.lost} records of these groups was removed")

    def _compare_rewards(self) -> None:
        run, rewards = self.step, self.step.config.rewards
        has_environment = run.config.environment.function is not None
        if not run.config.algorithm.needs_rollouts or (not rewards and not has_environment):
            return
        if has_environment:
            self.checks.append(not_compared("rewards: environment", "given by the environment"))
        if not rewards:
            return
        try:
            source = builders.build_reward(rewards)
        except (ValueError, ImportError, OSError) as error:
            self.checks.append(not_compared("rewards", f"the reward source cannot be created: {error}"))
            return
        local = [reward.remote is None and reward.model is None for reward in rewards]
        if source is not None and all(local):
            recorded = [row.metrics.get("source") if has_environment else row.reward for row in run.leased]
            self.checks.append(self._compare_scores("rewards", source, recorded))
            return
        self.checks.append(not_compared("rewards", "some come from a server or a model"))
        if isinstance(source, CombinedReward):
            for (name, component), is_local in zip(source.rewards.items(), local, strict=True):
                if is_local:
                    recorded = [row.metrics.get(name) for row in run.leased]
                    self.checks.append(self._compare_scores(f"rewards: {name}", component, recorded))

    def _compare_scores(self, quantity: str, source: Reward, recorded: Sequence[float | None]) -> Comparison:
        """Compare the recorded rewards with new scores of the same records."""
        old = {i: value for i, value in enumerate(recorded) if value is not None and not math.isnan(value)}
        scored = list(old)
        if not scored:
            return not_compared(quantity, "not recorded")
        scores = self.step.scores(source, self.step.leased.take(scored))
        source.close()
        valid = [k for k, error in enumerate(scores.errors) if error is None]
        failed = next((error for error in scores.errors if error is not None), None)
        if not valid:
            return not_compared(quantity, str(failed))
        new = scores.to_tensors()[0].tolist()  # in float32, as in records
        check = compare_rows(quantity, [old[scored[k]] for k in valid], [new[k] for k in valid], CPU_TOLERANCE)
        if len(valid) == len(recorded):
            return check
        reason = "" if failed is None else f": {failed}"
        return dataclasses.replace(
            check, note=f"{len(recorded) - len(valid)} of {len(recorded)} records not compared{reason}"
        )

    def _compare_models(self) -> None:
        """Compare the recorded outputs of each model with new ones."""
        models, tolerance = self.step.models, self.result.tolerance.tokens
        self._compare_model("policy log-probs", "old_logprobs", tolerance, models.policy, entropy=True)
        if not any(row.old_logprobs is not None for row in self.step.leased):
            self._compare_model("engine log-probs", "logprobs", GPU_TOLERANCE.tokens, models.policy)
        reference = without_adapters(models.reference)
        self._compare_model("reference log-probs", "ref_logprobs", tolerance, reference, trained=False)
        self._compare_model("teacher log-probs", "teacher_logprobs", tolerance, models.teacher, trained=False)
        self._compare_model("values", "values", tolerance, models.critic)

    def _compare_model(
        self,
        quantity: str,
        name: str,
        tolerance: float,
        model: LogprobModel | ValueModel | None,
        *,
        entropy: bool = False,
        trained: bool = True,
    ) -> None:
        """Compare the outputs of a model; of a trained one, for the records of the current policy version."""
        names = (name, "entropy") if entropy else (name,)
        run = self.step
        rows = [row for row in run.leased if getattr(row, name) is not None]
        if model is None or not rows:
            return
        if trained:
            rows = [row for row in rows if _version(row) == run.step - 1]
            if not rows:
                reason = "the records are from older or unknown policy versions"
                self.checks.append(not_compared(quantity, reason))
                return
        compared = {row.eid.uid for row in rows}
        outputs: dict[str, Any] = {}
        for uids in run.traced.appends:
            if not compared.isdisjoint(uids):
                # The same micro-batches as in the run give bitwise equal outputs.
                columns = forward(model, run.book.get(uids), names, token_budget=run.config.batch.token_budget)
                outputs.update(zip(uids, columns[name], strict=True))
        old = [select_actions(row, getattr(row, name)) for row in rows]
        new = [select_actions(row, outputs[row.eid.uid]) for row in rows]
        self.checks.append(compare_tokens(quantity, old, new, tolerance))

    def _compare_advantages(self) -> None:
        run, algorithm = self.step, self.step.config.algorithm
        if algorithm.estimator is None:
            return
        rows = [row for row in run.leased if row.advantages is not None]
        if not rows:
            self.checks.append(not_compared("advantages", "not recorded"))
            return
        if algorithm.reward_norm is not None:
            reason = "algorithm.reward_norm: the statistics of earlier rewards are not recorded"
            self.checks.append(not_compared("advantages", reason))
            return
        try:
            estimates = run.estimate_advantages(algorithm)
        except ValueError as error:
            self.checks.append(not_compared("advantages", str(error)))
            return
        for name in ("advantages", "returns"):
            rows = [row for row in rows if getattr(row, name) is not None]
            old = [select_actions(row, getattr(row, name)) for row in rows]
            new = [select_actions(row, estimates[row.eid.uid][name]) for row in rows]
            self.checks.append(compare_rows(name, old, new, CPU_TOLERANCE, size=True))

    def _compare_update(self, learned: UpdateResult) -> None:
        """Compare plan, losses and gradients."""
        run, recorded = self.step, self.step.metrics.get(self.step.step, {})
        self.checks += compare_plans(run.traced.placements, learned.placements[: len(run.leased)])
        if not recorded:
            self.notes.append(f"no metrics of step {run.step}: the run ended before they were written")
        for name in sorted(learned.metrics, key=metric_order):
            if name in recorded:
                counts = name in COUNT_METRICS or name.startswith("excluded/")
                tolerance = EXACT_TOLERANCE if counts else self.result.tolerance
                self.checks.append(compare_rows(name, [recorded[name]], [learned.metrics[name]], tolerance))

    def _compare_new_weights(self, weights: Weights) -> None:
        """Compare the new weights with the checkpoint after the step, if there is one."""
        run = self.step
        if run.end is None:
            return
        for name, folder in (("policy", run.end.model), ("critic", run.end.critic)):
            if name in weights and folder is not None:
                model = getattr(run.models, name)
                recomputed = clone_tensors(model.state_dict())
                saving.load_weights(model, folder)
                saved = clone_tensors(model.state_dict())
                model.load_state_dict(recomputed)
                quantity = "new weights" if name == "policy" else f"new weights: {name}"
                self.checks.append(self._compare_weights(quantity, weights[name], saved, recomputed))

    def _compare_weights(self, quantity: str, old: State, saved: State, recomputed: State) -> Comparison:
        gap = weight_difference(recomputed, saved)
        norms = [float(weight_difference(new, old).norm()) for new in (saved, recomputed)]
        bound = self.result.tolerance.update * max(norms)
        if not self.step.exact:
            # Rounding to bfloat16 changes weights by more than a small update.
            bound += 2**-8 * math.sqrt(sum(float(weight.double().square().sum()) for weight in saved.values()))
        largest = float(gap.abs().max())
        verdict = SAME if not largest else ROUNDING if float(gap.norm()) <= bound else DIFFERS
        note = f"norm of the update, compared with {saving.checkpoint_name(self.step.step)}"
        return Comparison(quantity, norms[0], norms[1], largest, verdict, note)


def _version(row: Experience) -> int | None:
    """Return the policy version that sampled a record; `None` if it is unknown or there are several."""
    if row.policy_versions is None:
        return None
    versions = np.unique(np.asarray(row.policy_versions))
    return int(versions[0]) if len(versions) == 1 else None
