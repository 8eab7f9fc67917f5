"""`replay(run, step)`: restore a trained step, compute it again, with or without a changed setting, and compare.

Invariant: the ledger is only read, and what a rewind voided is not of the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rollbook.book.book import Book
from rollbook.book.book import open as open_book
from rollbook.book.consumer import find_consumer
from rollbook.book.ledger import Transaction, chunks, parsed
from rollbook.core.checks import check_int
from rollbook.core.experiences import Experiences
from rollbook.models import Actor
from rollbook.models.forward import forward, without_adapters
from rollbook.rewards.recipes import CombinedReward
from rollbook.rewards.types import RewardInput, RewardResult
from rollbook.train import builders
from rollbook.train import checkpoint as saving
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.config.files import load_config
from rollbook.train.config.schema import Config, compare_configs
from rollbook.train.learner import Learner, UpdateResult
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import Models, annotate, estimate, with_reward
from rollbook.train.run import BOOK, CONFIG
from rollbook.train.user_code import check_trusted

__all__ = [
    *[
        "CounterfactualResult",
        "RecordChange",
        "compute_counterfactual",
        "split_changes",
    ]
]

SAME, ROUNDING, DIFFERS, NOT_COMPARED = "same", "differs by rounding", "differs", "not compared"
_PLAN = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class Comparison:
    """One thing that was recorded, and computed again.

    >>> Comparison("loss", 0.5, 0.5, 0.0, SAME).verdict
    'same'
    """

    quantity: str
    recorded: float | str | None
    recomputed: float | str | None
    difference: float | None
    """The largest; of a plan, how many records are elsewhere."""
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding.

    Numbers: up to `absolute`, and `relative` of the larger one. Log-probs and values: up to `compare_tokens` on the average of
    all tokens, since a few unlikely ones can be far off.
    """

    absolute: float
    relative: float
    tokens: float
    update: float
    """Of new weights: the length of the difference, as a share of the update's."""

    def __str__(self) -> str:
        numbers = f"{self.absolute:g} absolute + {self.relative:g} relative"
        return f"{numbers}, {self.tokens:g} mean over tokens, {self.update:g} of the norm of an update"


CPU_TOLERANCE = Tolerance(1e-5, 1e-3, 1e-4, 1e-2)
"""Of a run that was trained in float32 on a CPU, as it is replayed."""
GPU_TOLERANCE = Tolerance(5e-3, 1e-1, 3e-2, 5e-1)
"""Of one that was trained on a GPU, or in bfloat16."""

EXACT_TOLERANCE = Tolerance(2e-9, 1e-9, 0.0, 0.0)
"""Of counts, rates and shares, which no model is asked for."""
COUNT_METRICS = ("lr", "updates", "skipped", "rows")
_LEADING_METRICS = ("loss", "grad_norm", "policy/pg_loss", "kl", "entropy", "critic/value_loss", "critic/grad_norm")


def metric_order(name: str) -> tuple[int, str]:
    """Where a metric stands: losses before others, counts last.

    >>> sorted(["lr", "policy/ppo_kl", "grad_norm", "loss"], key=metric_order)
    ['loss', 'grad_norm', 'policy/ppo_kl', 'lr']
    """
    if name in _LEADING_METRICS:
        return _LEADING_METRICS.index(name), ""
    return (len(_LEADING_METRICS) if "/" in name and not name.startswith("left_out/") else len(_LEADING_METRICS) + 1), name


def not_compared(quantity: str, note: str, recorded: float | str | None = None) -> Comparison:
    """Something that is not compared, and why."""
    return Comparison(quantity, recorded, None, None, NOT_COMPARED, note)


def compare_rows(
    quantity: str, recorded: Sequence[Any], recomputed: Sequence[Any], tolerance: Tolerance, *, size: bool = False
) -> Comparison:
    """Numbers of rows, or of their tokens: each must be within the tolerance. Shown is their mean, or with `size` that
    of their sizes.

    >>> compare_rows("loss", [0.5], [0.50001], CPU_TOLERANCE).verdict, compare_rows("loss", [0.5], [0.6], CPU_TOLERANCE).verdict
    ('differs by rounding', 'differs')
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Comparison(quantity, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _absolute_difference(old, new)
    most = np.maximum(np.abs(old), np.abs(new))
    near = gap <= tolerance.absolute + tolerance.relative * np.where(np.isfinite(most), most, 0.0)
    verdict = SAME if not gap.any() else ROUNDING if near.all() else DIFFERS
    shown = [_mean(np.abs(side) if size else side) for side in (old, new)]
    return Comparison(quantity, shown[0], shown[1], float(gap.max(initial=0.0)), verdict)


def compare_tokens(quantity: str, recorded: Sequence[Any], recomputed: Sequence[Any], most: float, note: str = "") -> Comparison:
    """What a model says of tokens: the mean difference must be at most `most`.

    >>> compare_tokens("log-probs", [[-1.0, -2.0]], [[-1.0, -2.001]], 1e-2).verdict
    'differs by rounding'
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Comparison(quantity, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _absolute_difference(old, new)
    mean = float(gap.mean()) if gap.size else 0.0
    verdict = SAME if not gap.any() else ROUNDING if mean <= most else DIFFERS
    remark = "; ".join(part for part in (note, f"mean difference {mean:.3g}" if mean else "") if part)
    return Comparison(quantity, _mean(old), _mean(new), float(gap.max(initial=0.0)), verdict, remark)


def compare_plans(recorded: Sequence[Mapping[str, Any]], recomputed: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Where records were, of each kind of place.

    >>> one = {"minibatch": 0, "micro_batch": 0, "weight": 0.5}
    >>> [each.verdict for each in compare_plans([one, one], [one, {**one, "micro_batch": 1}])]
    ['same', 'differs by rounding', 'same']
    """
    if not any(name in placement for placement in recorded for name in _PLAN):
        return [not_compared("plan", "the ledger has no plan: another trainer acknowledged these records")]
    checks: list[Comparison] = []
    pairs = list(zip(recorded, recomputed, strict=True))
    for name, quantity in (("minibatch", "plan: minibatches"), ("micro_batch", "plan: micro-batches")):
        names = (name, "left_out") if name == "minibatch" else (name,)
        odd = sum(any(old.get(key) != new.get(key) for key in names) for old, new in pairs)
        shown = [
            str(len({str(placement[name]) for placement in side if name in placement}))
            for side in (recorded, recomputed)
        ]
        note = ""
        verdict = DIFFERS if odd else SAME
        if odd and name == "micro_batch" and checks[0].verdict == SAME:
            verdict = ROUNDING
            note = "another token budget or layout, which changes numbers only by rounding"
        checks.append(Comparison(quantity, shown[0], shown[1], float(odd), verdict, note))
    weights = [[_as_list(placement.get("weight", 0.0)) for placement in side] for side in (recorded, recomputed)]
    return [*checks, compare_rows("plan: shares of tokens", weights[0], weights[1], EXACT_TOLERANCE)]


def select_actions(row: Any, values: Any) -> Any:
    """What a field of a record says of the tokens that count.

    >>> from rollbook import Experience
    >>> row = Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False])
    >>> select_actions(row, [0.5, 0.7])
    array([0.5])
    """
    array = np.asarray(values, dtype=np.float64)
    return array if row.action_mask is None else array[np.asarray(row.action_mask, dtype=bool)]


def _as_list(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def _flat(values: Sequence[Any]) -> Any:
    parts = [np.asarray(row, dtype=np.float64).reshape(-1) for row in values]
    return np.concatenate(parts) if parts else np.zeros(0)


def _absolute_difference(old: Any, new: Any) -> Any:
    """How far apart numbers are: not at all where both are the same infinity or both no number, infinitely where one
    is."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(old - new)
    gap[(old == new) | (np.isnan(old) & np.isnan(new))] = 0.0
    return np.where(np.isnan(gap), np.inf, gap)


def _mean(values: Any) -> float | None:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if finite.size else None


_PLACE = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class StepRecords:
    """The records that a step learnt from.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"task": i}, tokens=[1, 2, 3]) for i in range(2)])
    >>> with book.lease(2) as lease:
    ...     _ = lease.ack(step=1, details={uid: {"minibatch": 0, "weight": 0.5} for uid in lease.uids})
    >>> found = trace_step(book, 1)
    >>> found.uids == lease.uids, found.places[0]["weight"]
    (True, 0.5)
    """

    step: int
    uids: list[str]
    """In the order of the lease, which is that of the batch."""
    places: list[dict[str, Any]]
    """[records] What was acknowledged of each: `minibatch`, `micro_batch` and `weight`, or `left_out`."""
    importance: list[float] | None = None
    """[records] What a sampler had each weigh; `None` where it has no weights."""
    together: list[list[str]] = field(default_factory=list)
    """The records of each append that some of these came with, as far as their bytes are there: a rollout, whole."""
    lost: int = 0
    """How many of those have no bytes any more."""
    revised: dict[str, str] = field(default_factory=dict)
    """The records that were changed after they were trained on, and by whom."""

    def records(self, book: Book) -> Experiences:
        """The records as they are now; one whose bytes are gone is an error that names it."""
        return book.get(self.uids)


def trace_step(book: Book, step: int, consumer: str = "train") -> StepRecords:
    """The records that a step learnt from; none if there was nothing to learn from."""
    with book.ledger.read() as tx:
        group = find_consumer(tx, consumer)
        if group is None:
            raise ValueError(f"{book.url}: got no consumer {consumer!r}, expected the one that the run trained as")
        events = tx.all(
            "SELECT id, seq, kind, lease, detail FROM events WHERE kind IN ('trained', 'voided') AND step = ? "
            "AND consumer = ? ORDER BY id",
            (step, group.id),
        )
        acknowledged = [
            (event, seq, kind, lease, parsed(detail, f"event {event}")) for event, seq, kind, lease, detail in events
        ]
        void = {detail.get("event") for _, _, kind, _, detail in acknowledged if kind == "voided"}
        done = {
            seq: (event, lease, detail)
            for event, seq, kind, lease, detail in acknowledged
            if kind == "trained" and event not in void
        }
        order = _lease_order(tx, {lease for _, lease, _ in done.values()})
        seqs = sorted(done, key=lambda seq: order[done[seq][1], seq])
        details = _read_records(tx, seqs)
        together, lost = _read_appends(tx, [details[seq][1:] for seq in seqs])
        revised = _read_revisions(tx, {seq: done[seq][0] for seq in seqs})
    weights: list[Any] = [done[seq][2].get("importance") for seq in seqs]
    return StepRecords(
        step,
        [details[seq][0] for seq in seqs],
        [{name: done[seq][2][name] for name in _PLACE if name in done[seq][2]} for seq in seqs],
        [float(weight) for weight in weights] if weights and None not in weights else None,
        together,
        lost,
        {details[seq][0]: author for seq, author in revised.items()},
    )


def _lease_order(tx: Transaction, leases: set[int]) -> dict[tuple[int, int], int]:
    """Where each record was in its lease."""
    uses: dict[tuple[int, int], int] = {}
    for marks, part in chunks(sorted(leases)):
        rows = tx.all(f"SELECT lease, seq, id FROM events WHERE kind = 'leased' AND lease IN ({marks})", part)
        uses.update({(lease, seq): event for lease, seq, event in rows})
    return uses


def _read_records(tx: Transaction, seqs: Sequence[int]) -> dict[int, tuple[str, str, float]]:
    details: dict[int, tuple[str, str, float]] = {}
    for marks, part in chunks(seqs):
        rows = tx.all(f"SELECT seq, uid, batch, admitted FROM records WHERE seq IN ({marks})", part)
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
    for marks, part in chunks(list(since)):
        rows = tx.all(
            f"SELECT id, seq, detail FROM events WHERE kind IN ('revised', 'redacted') AND seq IN ({marks})", part
        )
        for event, seq, detail in rows:
            if event > since[seq]:
                names[seq] = str(parsed(detail, f"event {event}").get("author", ""))
    return names


Weights = dict[str, dict[str, torch.Tensor]]
"""Of `policy` and `critic`, by name."""
_CPU = torch.device("cpu")
_ATTENTION = (None, "eager", "sdpa")
"""Attention that a CPU has."""


def to_cpu(config: Config) -> Config:
    """A run's configuration as a CPU can have it, in float32.

    >>> to_cpu(Config(model={"config": {"model_type": "llama"}, "precision": "bfloat16"})).model.precision
    'float32'
    """
    attention = config.model.attention if config.model.attention in _ATTENTION else None
    model = dataclasses.replace(config.model, precision="float32", attention=attention, gradient_checkpointing=False)
    return dataclasses.replace(config, model=model)


def load_actor(config: Config, checkpoint: saving.Saved) -> Actor:
    """Load a checkpoint's policy without calling `model.builder`; `config` is one that `to_cpu` returned."""
    state = checkpoint.trainer_state()
    attention = state.get("attention", config.model.attention)
    with saving.loading(checkpoint.model):
        return Actor(
            checkpoint.model,
            dtype=torch.float32,
            device=_CPU,
            attn_implementation=attention if attention in _ATTENTION else None,
            temperature=config.sampling.temperature,
            suppress=state.get("suppress", config.model.suppress),
        )


class RestoredStep:
    """A run, and its models with the weights that a step began with."""

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
        self.own = self.records(self.traced)
        checkpoints = saving.saved(folder)
        before = [entry for entry in checkpoints if entry.step < step]
        if not before:
            raise ValueError(f"{folder}: got no checkpoint before step {step}, expected one in {saving.FOLDER}")
        self.begun = before[-1]
        """The checkpoint that is begun from."""
        self.first = checkpoints[0] if checkpoints[0].step == 0 else None
        self.after = next((entry for entry in checkpoints if entry.step == step), None)
        """The checkpoint of the step itself, if there is one."""
        self.expert: Book | None = None
        expert = builders.open_expert_book(self.config) if self.replay.expert_share else None
        if expert is not None:
            self.expert = stack.enter_context(expert)
        self._expert_uids: list[str] = []
        self.on_gpu = "peak_memory_gib" in self.metrics.get(step, {}) or config.device.startswith("cuda")
        self.exact = config.model.precision == "float32" and not self.on_gpu
        """Whether the run was trained as it is replayed."""

    # --- records ------------------------------------------------------------------------------------------------------

    def trace(self, step: int) -> StepRecords:
        """What the book says of a step of the run."""
        traced = trace_step(self.book, step, self.replay.consumer)
        steps = [number for number in self.metrics if number > 0]
        if not traced.uids and step not in steps:
            extent = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
            raise ValueError(f"step: got {step}, and the run has {extent}")
        return traced

    def records(self, traced: StepRecords) -> Experiences:
        """A step's records, from the book."""
        try:
            return traced.records(self.book)
        except ValueError as error:
            raise ValueError(f"step {traced.step}: a record of it cannot be read: {error}") from None

    def beside(
        self, leased: Experiences, step: int, algorithm: AlgorithmConfig
    ) -> tuple[Experiences, list[bool] | None]:
        """A step's own records and the expert's that were beside them, and which are the expert's."""
        both = leased
        if self.replay.expert_share:
            seed, uids = self.config.seed, self._expert_uids
            both = Experiences(
                [*leased, *self.replay.experts(self.expert, len(leased), seed=seed, step=step, uids=uids)]
            )
        return both, [i >= len(leased) for i in range(len(both))] if algorithm.mixed else None

    @staticmethod
    def weighed(traced: StepRecords, records: Experiences) -> list[float] | None:
        """What a sampler had a step's records weigh; an expert's weigh 1."""
        importance = traced.importance
        return None if importance is None else importance + [1.0] * (len(records) - len(importance))

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
        load_learner_state(self.learner, saving.load_state(self.begun)["learner"])

    def _made(self, other: Config | None) -> Models:
        configs = [self.config] if other is None else [self.config, other]
        if configs[-1].algorithm.needs_critic and not self.config.algorithm.needs_critic:
            name = configs[-1].algorithm.estimator
            raise ValueError(f"algorithm.estimator: got {name!r}, which needs a critic, and the run has none")
        if self.first is None and any(
            config.algorithm.needs_reference and config.reference is None for config in configs
        ):
            raise ValueError(f"{self.folder}: got no checkpoint of step 0, whose weights the reference has")
        # The reference has the weights of step 0.
        actor = load_actor(self.config, self.begun if self.first is None else self.first)
        built = [builders.build_models(config, actor, _CPU) for config in configs]
        for name in ("reference", "teacher"):
            if getattr(built[0], name) is None:
                setattr(built[0], name, getattr(built[-1], name))
        return built[0]

    def learner_of(self, config: Config) -> Learner:
        """What a configuration learns with."""
        return Learner(
            self.models.policy,
            config.algorithm,
            critic=self.models.critic if config.algorithm.needs_critic else None,
            reference=self.models.reference,
            optimizer=_ending(config.optimizer, config),
            critic_optimizer=None if config.critic_optimizer is None else _ending(config.critic_optimizer, config),
            minibatch=config.batch.minibatch_config(),
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
        losses = []
        for step in range(self.begun.step + 1, self.step):
            traced = self.trace(step)
            if not traced.uids:
                continue
            records, flags = self.beside(self.records(traced), step, self.config.algorithm)
            records = self.completed(records, self.config.algorithm, expert=flags)
            weights = self.weighed(traced, records)
            loss = self.learner.update(records, step=step, expert=flags, weights=weights).metrics.get("loss")
            recorded = self.metrics.get(step, {}).get("loss")
            if recorded is not None and loss is not None:
                losses.append((step, recorded, loss))
        return losses

    def weights(self) -> Weights:
        """A copy of what moves, as it is now."""
        both = {"policy": self.models.policy, "critic": self.models.critic}
        return {name: clone_tensors(model.state_dict()) for name, model in both.items() if model is not None}

    def put(self, weights: Weights) -> None:
        """Have weights as they were."""
        for name, state in weights.items():
            getattr(self.models, name).load_state_dict(state)

    # --- what comes before the models ---------------------------------------------------------------------------------

    def scores(self, source: Any, rows: Experiences) -> RewardResult:
        """What a reward says of records; those of a conversation that a template forked have the reward of its last."""
        last = {row.eid.rid: row for row in rows}
        scores: RewardResult = source([RewardInput.of(last[row.eid.rid], self.models.policy.tokenizer) for row in rows])
        return scores

    def _rewarded(self, rows: Experiences, source: Any) -> list[float]:
        """Rewards by another source; what could not be scored then has none now, and what an environment gave stays."""
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

    def estimated(self, algorithm: AlgorithmConfig, reward: Any = None) -> dict[str, dict[str, Any]]:
        """`reward`, `advantages` and `returns` of records by id, estimated over all that were made together; with
        another reward, from its scores."""
        batches = self.traced.together if all(row.advantages is not None for row in self.own) else [self.traced.uids]
        names = ("reward", "advantages", "returns")
        estimates: dict[str, dict[str, Any]] = {}
        for uids in batches:
            rows = self.book.get(uids)
            if reward is not None:
                pairs = zip(rows, self._rewarded(rows, reward), strict=True)
                rows = Experiences([with_reward(row, score) for row, score in pairs])
            if algorithm.estimator is not None:
                rows = self._annotated(rows, algorithm)
                rows = estimate(rows, algorithm, max_tokens=self._longest, recompute=True)
            columns = [rows.values(name) for name in names]
            estimates |= {uid: dict(zip(names, row, strict=True)) for uid, *row in zip(uids, *columns, strict=True)}
        return estimates


def _ending(optimizer: OptimizerConfig, config: Config) -> OptimizerConfig:
    """A schedule that does not say when it ends, ends with the run."""
    return (
        optimizer
        if optimizer.steps is not None or not config.steps
        else dataclasses.replace(optimizer, steps=config.steps)
    )


def load_learner_state(learner: Learner, state: Mapping[str, Any]) -> None:
    """Put optimizers' states into a learner that keeps its own options, and has no float32 copies beside its weights,
    which are float32 themselves."""
    both = (("optimizer", learner.optimizer), ("critic_optimizer", learner.critic_optimizer))
    movers = {name: mover for name, mover in both if mover is not None}
    groups = {name: [{**group} for group in mover.inner.param_groups] for name, mover in movers.items()}
    states = {name: {key: entry for key, entry in clone_tensors(state[name]).items() if key != "masters"} for name in movers}
    learner.load_state_dict({"failures": state["failures"], **states})
    for name, mover in movers.items():
        for group, mine in zip(mover.inner.param_groups, groups[name], strict=True):
            group.update({key: value for key, value in mine.items() if key != "params"})


def clone_tensors(value: Any) -> Any:
    """A copy of tensors in dicts and lists, apart from what moves.

    >>> clone_tensors({"a": [torch.ones(1)]})
    {'a': [tensor([1.])]}
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: clone_tensors(entry) for name, entry in value.items()}
    return [clone_tensors(entry) for entry in value] if isinstance(value, list) else value


def weight_difference(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[weights] New weights less old ones, as one vector.

    >>> weight_difference({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    tensor([1., 1.], dtype=torch.float64)
    """
    parts = [
        (weight.double() - old[name].double()).reshape(-1) for name, weight in new.items() if weight.is_floating_point()
    ]
    return torch.cat(parts)


_ROLLOUT_KEYS = ("algorithm.group_size", "algorithm.refill", "algorithm.drop_constant_groups")
"""Keys of an algorithm that say how records are made."""
_NAME_KEYS = ("algorithm.preset", "algorithm.name")
_REPLAYED_KEYS = ("algorithm.", "batch.", "optimizer.", "critic_optimizer", "rewards", "steps")
"""Where another choice can be put in the place of a recorded one."""


@dataclass(frozen=True)
class RecordChange:
    """A record whose advantage another choice changes."""

    uid: str
    prompt: str
    reward: tuple[float, float]
    """As it was trained, and as it would have been."""
    advantage: tuple[float, float]
    """Means over its tokens."""


@dataclass(frozen=True)
class CounterfactualResult:
    """A step under another choice, beside the step as it was; of two numbers the first is of what was trained."""

    changes: list[str]
    numbers: dict[str, tuple[float | None, float | None]]
    """By name: mean sizes of advantages, losses, metrics, gradient and update."""
    signs: int
    """How many records have an advantage of another sign."""
    rows: int
    """How many records have an advantage."""
    correlation: float | None
    """Between the advantages of records."""
    cosine: float | None
    """Between the two updates of the policy's weights."""
    moved: list[RecordChange]
    """The records whose advantage changes most."""
    notes: list[str] = field(default_factory=list)


def split_changes(config: Config, other: Config) -> tuple[list[str], list[str]]:
    """What another configuration changes, of all that a replay can change; and what it changes that is not replayed.

    >>> split_changes(Config(), Config.of({"algorithm": {"preset": "grpo", "estimator": "rloo", "group_size": 4}}))
    (['algorithm.estimator: "rloo", was "grpo"'], ['algorithm.group_size'])
    >>> split_changes(Config(), Config(seed=1))
    Traceback (most recent call last):
        ...
    ValueError: seed: got another value, and the records are what they are, expected changes of algorithm, rewards, batch or optimizer
    """  # noqa: E501
    changes = compare_configs(to_cpu(config), to_cpu(other))
    for change in changes:
        if not change.path.startswith(_REPLAYED_KEYS) or change.path == "batch.prompts_per_step":
            raise ValueError(
                f"{change.path}: got another value, and the records are what they are, expected changes of algorithm, "
                "rewards, batch or optimizer"
            )
    effective_changes = [str(change) for change in changes if change.path not in (*_ROLLOUT_KEYS, *_NAME_KEYS)]
    if not effective_changes:
        listed = ", ".join(change.path for change in changes) or "the run's own values"
        raise ValueError(f"changes: got {listed}, which changes nothing of a step whose records are there")
    return effective_changes, [change.path for change in changes if change.path in _ROLLOUT_KEYS]


def compute_counterfactual(
    run: RestoredStep,
    other: Config,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    trained: tuple[Experiences, UpdateResult, torch.Tensor],
) -> CounterfactualResult:
    """The step of `run` under another configuration. `state`, `weights`: what the step began with. `trained`: the
    records as they were learnt from, what came of it, and the update of the policy's weights."""
    before, learned, update = trained
    applied, left = split_changes(run.config, other)
    notes = [f"{name}: affects only generation; not replayed" for name in left]
    leased = run.own
    run.put(weights)
    if other.algorithm.estimator is not None:
        source = None
        if other.rewards != run.config.rewards:
            source = builders.build_reward(other.rewards)
            if source is None:
                raise ValueError("rewards: got none, expected some")
        estimates = run.estimated(other.algorithm, source)
        if source is not None:
            source.close()
        names = ("reward", "advantages", "returns")
        leased = leased.assign(**{name: [estimates[uid][name] for uid in run.traced.uids] for name in names})
    records, flags = run.beside(leased, run.step, other.algorithm)
    records = run.completed(records, other.algorithm, expert=flags)
    learner = run.learner_of(other)
    if other.optimizer.name == run.config.optimizer.name:
        load_learner_state(learner, state)
    else:
        notes.append(f"optimizer.name: {other.optimizer.name} starts without state")
    changed = learner.update(records, step=run.step, expert=flags, weights=run.weighed(run.traced, records))
    new = weight_difference(run.weights()["policy"], weights["policy"])
    rows = _advantages(before, records, len(leased))
    numbers: dict[str, tuple[float | None, float | None]] = {}
    old, now = [[abs(pair[k]) for _, pair in rows] for k in (0, 1)]
    if rows:
        numbers["mean |advantage|"] = (float(np.mean(old)), float(np.mean(now)))
    for name in sorted({**learned.metrics, **changed.metrics}, key=metric_order):
        numbers[name] = (learned.metrics.get(name), changed.metrics.get(name))
    numbers["norm of the update"] = (float(update.norm()), float(new.norm()))
    moved = sorted(rows, key=lambda row: -abs(row[1][1] - row[1][0]))
    return CounterfactualResult(
        applied,
        numbers,
        signs=sum(int(np.sign(a) != np.sign(b)) for _, (a, b) in rows),
        rows=len(rows),
        correlation=_correlation([a for _, (a, _) in rows], [b for _, (_, b) in rows]),
        cosine=_cosine(update, new),
        moved=[_moved(run, i, pair, records) for i, pair in moved[:5] if pair[0] != pair[1]],
        notes=notes,
    )


def _moved(run: RestoredStep, i: int, advantage: tuple[float, float], records: Experiences) -> RecordChange:
    row = run.own[i]
    prompt = row.prompt_text
    if prompt is None and row.messages:
        prompt = str(row.messages[-1].get("content"))
    if prompt is None and run.models.policy.tokenizer is not None:
        prompt = run.models.policy.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
    rewards = [math.nan if record.reward is None else float(record.reward) for record in (row, records[i])]
    return RecordChange(row.eid.uid, str(prompt or ""), (rewards[0], rewards[1]), advantage)


def _advantages(before: Experiences, after: Experiences, count: int) -> list[tuple[int, tuple[float, float]]]:
    """Of the first `count` records that have advantages on both sides: their numbers, and means over their tokens."""
    lines = []
    for i in range(count):
        pair = (before[i], after[i])
        if all(row.advantages is not None for row in pair):
            old, new = (select_actions(row, row.advantages) for row in pair)
            lines.append((i, (float(old.mean()), float(new.mean())) if len(old) and len(new) else (0.0, 0.0)))
    return lines


def _cosine(first: torch.Tensor, other: torch.Tensor) -> float | None:
    lengths = float(first.norm() * other.norm())
    return float(first @ other) / lengths if lengths > 0 else None


def _correlation(first: Sequence[float], other: Sequence[float]) -> float | None:
    if len(first) < 2 or not np.std(first) or not np.std(other):
        return None
    return float(np.corrcoef(first, other)[0, 1])


@dataclass
class ReplayResult:
    """What came of a replay."""

    folder: Path
    step: int
    records: int
    checkpoint: str
    """What the replay began from."""
    tolerance: Tolerance
    checks: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed: CounterfactualResult | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(check.verdict != DIFFERS for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**dataclasses.asdict(self), "folder": str(self.folder), "agrees": self.agrees}


def replay(run: Any, step: int, changes: Sequence[str] = (), *, trust: bool = False) -> ReplayResult:
    """Compute a step of the run in a folder again, and compare it with what was trained.

    Args:
        run: The run's folder.
        step: The step, from 1 on.
        changes: Other choices (`algorithm.estimator=rloo`), to see what they would have changed.
        trust: Whether code outside Rollbook that the run's configuration names may run: reward functions and a
            teacher's builder. Models come from the checkpoints; `model.builder` is never called.

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
    ...     found = replay(f"{folder}/run", 1)
    >>> found.agrees, found.records
    (True, 4)
    """
    step = check_int("step", step, 1)
    folder = Path(run).expanduser()
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: got no {CONFIG}, expected the folder of a run of `rollbook train`")
    config = load_config(folder / CONFIG)
    other = to_cpu(load_config(folder / CONFIG, list(changes))) if changes else None
    if other is not None:
        split_changes(config, other)
    if not trust:
        # What only the changes name is the caller's own.
        check_trusted(folder, config, remote=other is not None and other.rewards != config.rewards)
    with ExitStack() as stack:
        stack.enter_context(_torch_threads(config))
        book = stack.enter_context(open_book(folder / BOOK, mode="r"))
        return _Replay(RestoredStep(folder, config, book, step, stack), config).go(other)


@contextmanager
def _torch_threads(config: Config) -> Iterator[None]:
    """Torch's threads as the run had them; threads and random states as they are now when it is over."""
    threads, state = torch.get_num_threads(), saving.random_state()
    try:
        torch.set_num_threads(threads if config.threads is None else config.threads)
        yield
    finally:
        torch.set_num_threads(threads)
        saving.put_random_state(state)


class _Replay:
    """A replay under way: a step's beginning, and what was found."""

    def __init__(self, run: RestoredStep, config: Config) -> None:
        self.run = run
        tolerance = CPU_TOLERANCE if run.exact else GPU_TOLERANCE
        self.out = ReplayResult(run.folder, run.step, len(run.own), saving.name_of(run.begun.step), tolerance)
        self.checks, self.notes = self.out.checks, self.out.notes
        if not run.exact:
            where = "on a GPU" if run.on_gpu else f"in {config.model.precision}"
            self.notes.append(f"trained {where}, replayed in float32 on the CPU; small differences are rounding")

    def go(self, other: Config | None) -> ReplayResult:
        """All of it."""
        run = self.run
        run.load(other)
        self._get_there()
        state, weights = clone_tensors(run.learner.state_dict()), run.weights()
        self._look_at_records()
        self._look_at_rewards()
        self._look_at_models()
        self._look_at_advantages()
        algorithm = run.config.algorithm
        records, flags = run.beside(run.own, run.step, algorithm)
        records = run.completed(records, algorithm, expert=flags)
        importance = run.weighed(run.traced, records)
        learned = run.learner.update(records, step=run.step, expert=flags, weights=importance)
        update = weight_difference(run.weights()["policy"], weights["policy"])
        self._look_at_learning(learned)
        self._look_at_new_weights(weights)
        if other is not None:
            trained = (records, learned, update)
            self.out.changed = compute_counterfactual(run, other, state=state, weights=weights, trained=trained)
        return self.out

    def _get_there(self) -> None:
        """From the checkpoint to the step before this one."""
        run = self.run
        steps = range(run.begun.step + 1, run.step)
        losses = run.go_on()
        if steps:
            span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            self.notes.append(f"replayed {span} first, from the newest checkpoint {self.out.checkpoint}")
            if losses:
                old, new = [recorded for _, recorded, _ in losses], [loss for _, _, loss in losses]
                self.checks.append(compare_rows(f"loss of {span}", old, new, self.out.tolerance))

    # --- what was recorded, and what is found now ---------------------------------------------------------------------

    def _look_at_records(self) -> None:
        traced = self.run.traced
        if traced.revised:
            who = ", ".join(sorted(set(traced.revised.values())))
            names = ", ".join(list(traced.revised)[:3])
            self.notes.append(f"{len(traced.revised)} records were changed after the step, by {who}: {names}")
        if traced.lost:
            self.notes.append(f"the data of {traced.lost} records of these groups was removed")

    def _look_at_rewards(self) -> None:
        run, rewards = self.run, self.run.config.rewards
        played = run.config.environment.function is not None
        if not run.config.algorithm.needs_rollouts or (not rewards and not played):
            return
        if played:
            self.checks.append(not_compared("rewards: environment", "given by the environment"))
        if not rewards:
            return
        try:
            source = builders.build_reward(rewards)
        except (ValueError, ImportError, OSError) as error:
            self.checks.append(not_compared("rewards", f"the reward source cannot be created: {error}"))
            return
        local = [reward.remote is None and reward.model is None for reward in rewards]
        if all(local):
            recorded = [row.metrics.get("source") if played else row.reward for row in run.own]
            self.checks.append(self._rewards("rewards", source, recorded))
            return
        self.checks.append(not_compared("rewards", "some come from a server or a model"))
        if isinstance(source, CombinedReward):
            for (name, part), is_local in zip(source.rewards.items(), local, strict=True):
                if is_local:
                    recorded = [row.metrics.get(name) for row in run.own]
                    self.checks.append(self._rewards(f"rewards: {name}", part, recorded))

    def _rewards(self, quantity: str, source: Any, recorded: Sequence[Any]) -> Comparison:
        """Scores of the step's records against those that were recorded, where there are both."""
        scored = [i for i, value in enumerate(recorded) if value is not None and not math.isnan(value)]
        if not scored:
            return not_compared(quantity, "not recorded")
        scores = self.run.scores(source, self.run.own.take(scored))
        source.close()
        valid = [k for k, error in enumerate(scores.errors) if error is None]
        failed = next((error for error in scores.errors if error is not None), None)
        if not valid:
            return not_compared(quantity, str(failed))
        new = scores.to_tensors()[0].tolist()  # in float32, as records have them
        check = compare_rows(quantity, [recorded[scored[k]] for k in valid], [new[k] for k in valid], CPU_TOLERANCE)
        if len(valid) == len(recorded):
            return check
        why = "" if failed is None else f": {failed}"
        return dataclasses.replace(
            check, note=f"{len(recorded) - len(valid)} of {len(recorded)} records not compared{why}"
        )

    def _look_at_models(self) -> None:
        """What the models say of the step's records, against what they said when those were made."""
        run, most = self.run, self.out.tolerance.tokens
        actor, reference, teacher = run.models.policy, run.models.reference, run.models.teacher
        self._compare("policy log-probs", "old_logprobs", most, actor, entropy=True)
        if not any(row.old_logprobs is not None for row in run.own):
            self._compare("engine log-probs", "logprobs", GPU_TOLERANCE.tokens, actor)
        self._compare("reference log-probs", "ref_logprobs", most, without_adapters(reference), moves=False)
        self._compare("teacher log-probs", "teacher_logprobs", most, teacher, moves=False)
        self._compare("values", "values", most, run.models.critic)

    def _compare(
        self, quantity: str, name: str, most: float, model: Any, *, entropy: bool = False, moves: bool = True
    ) -> None:
        """One model, of the records that were made with its weights of now; `moves`: it learns."""
        names = (name, "entropy") if entropy else (name,)
        run = self.run
        rows = [row for row in run.own if getattr(row, name) is not None]
        if model is None or not rows:
            return
        if moves:
            rows = [row for row in rows if _version(row) == run.step - 1]
            if not rows:
                why = "the records are from older or unknown policy versions"
                self.checks.append(not_compared(quantity, why))
                return
        compared = {row.eid.uid for row in rows}
        outputs: dict[str, Any] = {}
        for uids in run.traced.together:
            if not compared.isdisjoint(uids):
                # All that were made together went through the model together: the same micro-batches, the same bits.
                columns = forward(model, run.book.get(uids), names, token_budget=run.config.batch.token_budget)
                outputs.update(zip(uids, columns[name], strict=True))
        old = [select_actions(row, getattr(row, name)) for row in rows]
        new = [select_actions(row, outputs[row.eid.uid]) for row in rows]
        self.checks.append(compare_tokens(quantity, old, new, most))

    def _look_at_advantages(self) -> None:
        run, algorithm = self.run, self.run.config.algorithm
        if algorithm.estimator is None:
            return
        rows = [row for row in run.own if row.advantages is not None]
        if not rows:
            self.checks.append(not_compared("advantages", "not recorded"))
            return
        if algorithm.reward_norm is not None:
            why = "algorithm.reward_norm: the statistics of earlier rewards are not recorded"
            self.checks.append(not_compared("advantages", why))
            return
        try:
            estimates = run.estimated(algorithm)
        except ValueError as error:
            self.checks.append(not_compared("advantages", str(error)))
            return
        for name in ("advantages", "returns"):
            rows = [row for row in rows if getattr(row, name) is not None]
            old = [select_actions(row, getattr(row, name)) for row in rows]
            new = [select_actions(row, estimates[row.eid.uid][name]) for row in rows]
            self.checks.append(compare_rows(name, old, new, CPU_TOLERANCE, size=True))

    def _look_at_learning(self, learned: UpdateResult) -> None:
        """Plan, losses and gradients."""
        run, recorded = self.run, self.run.metrics.get(self.run.step, {})
        self.checks += compare_plans(run.traced.places, learned.placements[: len(run.own)])
        if not recorded:
            self.notes.append(f"no metrics of step {run.step}: the run ended before they were written")
        for name in sorted(learned.metrics, key=metric_order):
            if name in recorded:
                counts = name in COUNT_METRICS or name.startswith("left_out/")
                tolerance = EXACT_TOLERANCE if counts else self.out.tolerance
                self.checks.append(compare_rows(name, [recorded[name]], [learned.metrics[name]], tolerance))

    def _look_at_new_weights(self, weights: Weights) -> None:
        """What came of the step, against the checkpoint after it, if there is one."""
        run = self.run
        if run.after is None:
            return
        for name, folder in (("policy", run.after.model), ("critic", run.after.critic)):
            if name in weights and folder is not None:
                model = getattr(run.models, name)
                mine = clone_tensors(model.state_dict())
                saving.load_weights(model, folder)
                saved = clone_tensors(model.state_dict())
                model.load_state_dict(mine)
                quantity = "new weights" if name == "policy" else f"new weights: {name}"
                self.checks.append(self._weights(quantity, weights[name], saved, mine))

    def _weights(self, quantity: str, old: Any, saved: Any, mine: Any) -> Comparison:
        gap = weight_difference(mine, saved)
        lengths = [float(weight_difference(new, old).norm()) for new in (saved, mine)]
        bound = self.out.tolerance.update * max(lengths)
        if not self.run.exact:
            # Of bfloat16 weights, what rounding alone does is more than a small update.
            bound += 2**-8 * math.sqrt(sum(float(weight.double().square().sum()) for weight in saved.values()))
        far, most = float(gap.norm()), float(gap.abs().max())
        verdict = SAME if not most else ROUNDING if far <= bound else DIFFERS
        note = f"norm of the update, compared with {saving.name_of(self.run.step)}"
        return Comparison(quantity, lengths[0], lengths[1], most, verdict, note)


def _version(row: Any) -> int | None:
    """The one policy that made a record; none if it is not known, or there were several."""
    if row.policy_versions is None:
        return None
    versions = np.unique(np.asarray(row.policy_versions))
    return int(versions[0]) if len(versions) == 1 else None
