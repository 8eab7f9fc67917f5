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
from rollbook.train.config.files import effective
from rollbook.train.config.schema import Config, differences
from rollbook.train.learner import Learner, UpdateResult
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import Models, annotate, estimate, with_reward
from rollbook.train.run import BOOK, CONFIG
from rollbook.train.user_code import check_trusted

__all__ = [
    *[
        "Changed",
        "Moved",
        "change",
        "choices",
    ]
]

SAME, ROUNDING, DIFFERS, NOT = "same", "differs by rounding", "differs", "not compared"
_PLAN = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class Check:
    """One thing that was recorded, and computed again.

    >>> Check("loss", 0.5, 0.5, 0.0, SAME).verdict
    'same'
    """

    what: str
    recorded: float | str | None
    recomputed: float | str | None
    difference: float | None
    """The largest; of a plan, how many records are elsewhere."""
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding.

    Numbers: up to `absolute`, and `relative` of the larger one. Log-probs and values: up to `tokens` on the average of
    all tokens, since a few unlikely ones can be far off.
    """

    absolute: float
    relative: float
    tokens: float
    update: float
    """Of new weights: the length of the difference, as a share of the update's."""

    def __str__(self) -> str:
        numbers = f"{self.absolute:g} and {self.relative:g} of a number"
        return f"{numbers}, {self.tokens:g} on the average over tokens, {self.update:g} of an update"


HERE = Tolerance(1e-5, 1e-3, 1e-4, 1e-2)
"""Of a run that was trained in float32 on a CPU, as it is replayed."""
ELSEWHERE = Tolerance(5e-3, 1e-1, 3e-2, 5e-1)
"""Of one that was trained on a GPU, or in bfloat16."""

EXACT = Tolerance(2e-9, 1e-9, 0.0, 0.0)
"""Of counts, rates and shares, which no model is asked for."""
COUNTS = ("lr", "updates", "skipped", "rows")
_FIRST = ("loss", "grad_norm", "policy/pg_loss", "kl", "entropy", "critic/value_loss", "critic/grad_norm")


def rank(name: str) -> tuple[int, str]:
    """Where a metric stands: losses before others, counts last.

    >>> sorted(["lr", "policy/ppo_kl", "grad_norm", "loss"], key=rank)
    ['loss', 'grad_norm', 'policy/ppo_kl', 'lr']
    """
    if name in _FIRST:
        return _FIRST.index(name), ""
    return (len(_FIRST) if "/" in name and not name.startswith("left_out/") else len(_FIRST) + 1), name


def skipped(what: str, note: str, recorded: float | str | None = None) -> Check:
    """Something that is not compared, and why."""
    return Check(what, recorded, None, None, NOT, note)


def compare_rows(
    what: str, recorded: Sequence[Any], recomputed: Sequence[Any], tolerance: Tolerance, *, size: bool = False
) -> Check:
    """Numbers of rows, or of their tokens: each must be within the tolerance. Shown is their mean, or with `size` that
    of their sizes.

    >>> compare_rows("loss", [0.5], [0.50001], HERE).verdict, compare_rows("loss", [0.5], [0.6], HERE).verdict
    ('differs by rounding', 'differs')
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Check(what, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _gap(old, new)
    most = np.maximum(np.abs(old), np.abs(new))
    near = gap <= tolerance.absolute + tolerance.relative * np.where(np.isfinite(most), most, 0.0)
    verdict = SAME if not gap.any() else ROUNDING if near.all() else DIFFERS
    shown = [_mean(np.abs(one) if size else one) for one in (old, new)]
    return Check(what, shown[0], shown[1], float(gap.max(initial=0.0)), verdict)


def tokens(what: str, recorded: Sequence[Any], recomputed: Sequence[Any], most: float, note: str = "") -> Check:
    """What a model says of tokens: the mean difference must be at most `most`.

    >>> tokens("log-probs", [[-1.0, -2.0]], [[-1.0, -2.001]], 1e-2).verdict
    'differs by rounding'
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Check(what, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _gap(old, new)
    mean = float(gap.mean()) if gap.size else 0.0
    verdict = SAME if not gap.any() else ROUNDING if mean <= most else DIFFERS
    said = "; ".join(part for part in (note, f"mean difference {mean:.3g}" if mean else "") if part)
    return Check(what, _mean(old), _mean(new), float(gap.max(initial=0.0)), verdict, said)


def plans(recorded: Sequence[Mapping[str, Any]], recomputed: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Where records were, of each kind of place.

    >>> one = {"minibatch": 0, "micro_batch": 0, "weight": 0.5}
    >>> [each.verdict for each in plans([one, one], [one, {**one, "micro_batch": 1}])]
    ['same', 'differs by rounding', 'same']
    """
    if not any(name in one for one in recorded for name in _PLAN):
        return [skipped("plan", "the ledger has no places: another trainer acknowledged these records")]
    made: list[Check] = []
    pairs = list(zip(recorded, recomputed, strict=True))
    for name, what in (("minibatch", "plan: minibatches"), ("micro_batch", "plan: micro-batches")):
        names = (name, "left_out") if name == "minibatch" else (name,)
        odd = sum(any(old.get(each) != new.get(each) for each in names) for old, new in pairs)
        shown = [str(len({str(one[name]) for one in side if name in one})) for side in (recorded, recomputed)]
        note = ""
        verdict = DIFFERS if odd else SAME
        if odd and name == "micro_batch" and made[0].verdict == SAME:
            verdict = ROUNDING
            note = "cut for another token budget or layout, which changes numbers by rounding alone"
        made.append(Check(what, shown[0], shown[1], float(odd), verdict, note))
    weights = [[_listed(one.get("weight", 0.0)) for one in side] for side in (recorded, recomputed)]
    return [*made, compare_rows("plan: shares of tokens", weights[0], weights[1], EXACT)]


def counted(row: Any, values: Any) -> Any:
    """What a field of a record says of the tokens that count.

    >>> from rollbook import Experience
    >>> row = Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False])
    >>> counted(row, [0.5, 0.7])
    array([0.5])
    """
    found = np.asarray(values, dtype=np.float64)
    return found if row.action_mask is None else found[np.asarray(row.action_mask, dtype=bool)]


def _listed(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def _flat(values: Sequence[Any]) -> Any:
    parts = [np.asarray(one, dtype=np.float64).reshape(-1) for one in values]
    return np.concatenate(parts) if parts else np.zeros(0)


def _gap(old: Any, new: Any) -> Any:
    """How far apart numbers are: not at all where both are the same infinity or both no number, infinitely where one
    is."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(old - new)
    gap[(old == new) | (np.isnan(old) & np.isnan(new))] = 0.0
    return np.where(np.isnan(gap), np.inf, gap)


def _mean(values: Any) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


_PLACE = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class Traced:
    """The records that a step learnt from.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"task": i}, tokens=[1, 2, 3]) for i in range(2)])
    >>> with book.lease(2) as lease:
    ...     _ = lease.ack(step=1, details={uid: {"minibatch": 0, "weight": 0.5} for uid in lease.uids})
    >>> found = trace(book, 1)
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


def trace(book: Book, step: int, consumer: str = "train") -> Traced:
    """The records that a step learnt from; none if there was nothing to learn from."""
    with book.ledger.read() as tx:
        own = find_consumer(tx, consumer)
        if own is None:
            raise ValueError(f"{book.url}: got no consumer {consumer!r}, expected the one that the run trained as")
        found = tx.all(
            "SELECT id, seq, kind, lease, detail FROM events WHERE kind IN ('trained', 'voided') AND step = ? "
            "AND consumer = ? ORDER BY id",
            (step, own.id),
        )
        told = [
            (event, seq, kind, lease, parsed(detail, f"event {event}")) for event, seq, kind, lease, detail in found
        ]
        void = {detail.get("event") for _, _, kind, _, detail in told if kind == "voided"}
        done = {
            seq: (event, lease, detail)
            for event, seq, kind, lease, detail in told
            if kind == "trained" and event not in void
        }
        order = _order(tx, {lease for _, lease, _ in done.values()})
        seqs = sorted(done, key=lambda seq: order[done[seq][1], seq])
        known = _known(tx, seqs)
        together, lost = _together(tx, [known[seq][1:] for seq in seqs])
        revised = _revised(tx, {seq: done[seq][0] for seq in seqs})
    weights: list[Any] = [done[seq][2].get("importance") for seq in seqs]
    return Traced(
        step,
        [known[seq][0] for seq in seqs],
        [{name: done[seq][2][name] for name in _PLACE if name in done[seq][2]} for seq in seqs],
        [float(weight) for weight in weights] if weights and None not in weights else None,
        together,
        lost,
        {known[seq][0]: author for seq, author in revised.items()},
    )


def _order(tx: Transaction, leases: set[int]) -> dict[tuple[int, int], int]:
    """Where each record was in its lease."""
    found: dict[tuple[int, int], int] = {}
    for marks, part in chunks(sorted(leases)):
        rows = tx.all(f"SELECT lease, seq, id FROM events WHERE kind = 'leased' AND lease IN ({marks})", part)
        found.update({(lease, seq): event for lease, seq, event in rows})
    return found


def _known(tx: Transaction, seqs: Sequence[int]) -> dict[int, tuple[str, str, float]]:
    found: dict[int, tuple[str, str, float]] = {}
    for marks, part in chunks(seqs):
        rows = tx.all(f"SELECT seq, uid, batch, admitted FROM records WHERE seq IN ({marks})", part)
        found.update({seq: (uid, batch, admitted) for seq, uid, batch, admitted in rows})
    return found


def _together(tx: Transaction, appends: Sequence[tuple[str, float]]) -> tuple[list[list[str]], int]:
    made: list[list[str]] = []
    lost = 0
    for one in dict.fromkeys(appends):
        rows = tx.all(
            "SELECT uid, segment FROM records WHERE batch = ? AND admitted = ? AND evaluation = 0 ORDER BY seq", one
        )
        made.append([uid for uid, segment in rows if segment is not None])
        lost += len(rows) - len(made[-1])
    return made, lost


def _revised(tx: Transaction, since: dict[int, int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for marks, part in chunks(list(since)):
        rows = tx.all(
            f"SELECT id, seq, detail FROM events WHERE kind IN ('revised', 'redacted') AND seq IN ({marks})", part
        )
        for event, seq, detail in rows:
            if event > since[seq]:
                found[seq] = str(parsed(detail, f"event {event}").get("author", ""))
    return found


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
        expert = builders.expert_of(self.config) if self.intake.expert_share else None
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
        made = [builders.models_of(one, actor, _CPU) for one in asked]
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


def _ending(given: OptimizerConfig, config: Config) -> OptimizerConfig:
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


_MAKING = ("algorithm.n", "algorithm.refill", "algorithm.drop_constant_groups")
"""Keys of an algorithm that say how records are made."""
_NAMES = ("algorithm.preset", "algorithm.name")
_OTHER = ("algorithm.", "batch.", "optimizer.", "critic_optimizer", "rewards", "steps")
"""Where another choice can be put in the place of a recorded one."""


@dataclass(frozen=True)
class Moved:
    """A record whose advantage another choice changes."""

    uid: str
    prompt: str
    reward: tuple[float, float]
    """As it was trained, and as it would have been."""
    advantage: tuple[float, float]
    """Means over its tokens."""


@dataclass(frozen=True)
class Changed:
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
    moved: list[Moved]
    """The records whose advantage changes most."""
    notes: list[str] = field(default_factory=list)


def choices(config: Config, other: Config) -> tuple[list[str], list[str]]:
    """What another configuration changes, of all that a replay can change; and what it changes that is not replayed.

    >>> choices(Config(), Config.of({"algorithm": {"preset": "grpo", "estimator": "rloo", "n": 4}}))
    (['algorithm.estimator: "rloo", was "grpo"'], ['algorithm.n'])
    >>> choices(Config(), Config(seed=1))
    Traceback (most recent call last):
        ...
    ValueError: seed: got another value, and the records are what they are, expected changes of algorithm, rewards, batch or optimizer
    """  # noqa: E501
    found = differences(on_cpu(config), on_cpu(other))
    for one in found:
        if not one.path.startswith(_OTHER) or one.path == "batch.prompts":
            raise ValueError(
                f"{one.path}: got another value, and the records are what they are, expected changes of algorithm, "
                "rewards, batch or optimizer"
            )
    made = [str(one) for one in found if one.path not in (*_MAKING, *_NAMES)]
    if not made:
        said = ", ".join(one.path for one in found) or "the run's own values"
        raise ValueError(f"changes: got {said}, which changes nothing of a step whose records are there")
    return made, [one.path for one in found if one.path in _MAKING]


def change(
    run: Rebuilt,
    other: Config,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    trained: tuple[Experiences, UpdateResult, torch.Tensor],
) -> Changed:
    """The step of `run` under another configuration. `state`, `weights`: what the step began with. `trained`: the
    records as they were learnt from, what came of it, and the update of the policy's weights."""
    before, learned, update = trained
    made, left = choices(run.config, other)
    notes = [f"{name}: of how records are made, which they are already; not replayed" for name in left]
    own = run.own
    run.put(weights)
    if other.algorithm.estimator is not None:
        source = None
        if other.rewards != run.config.rewards:
            source = builders.reward_of(other.rewards)
            if source is None:
                raise ValueError("rewards: got none, expected some")
        found = run.estimated(other.algorithm, source)
        if source is not None:
            source.close()
        names = ("reward", "advantages", "returns")
        own = own.assign(**{name: [found[uid][name] for uid in run.traced.uids] for name in names})
    records, flags = run.beside(own, run.step, other.algorithm)
    records = run.completed(records, other.algorithm, expert=flags)
    learner = run.learner_of(other)
    if other.optimizer.name == run.config.optimizer.name:
        put_state(learner, state)
    else:
        notes.append(f"optimizer.name: {other.optimizer.name} begins without a state")
    changed = learner.update(records, step=run.step, expert=flags, weights=run.weighed(run.traced, records))
    new = less(run.weights()["policy"], weights["policy"])
    rows = _advantages(before, records, len(own))
    numbers: dict[str, tuple[float | None, float | None]] = {}
    old, now = [[abs(pair[k]) for _, pair in rows] for k in (0, 1)]
    if rows:
        numbers["mean size of advantages"] = (float(np.mean(old)), float(np.mean(now)))
    for name in sorted({**learned.metrics, **changed.metrics}, key=rank):
        numbers[name] = (learned.metrics.get(name), changed.metrics.get(name))
    numbers["length of the update"] = (float(update.norm()), float(new.norm()))
    moved = sorted(rows, key=lambda row: -abs(row[1][1] - row[1][0]))
    return Changed(
        made,
        numbers,
        signs=sum(int(np.sign(a) != np.sign(b)) for _, (a, b) in rows),
        rows=len(rows),
        correlation=_correlation([a for _, (a, _) in rows], [b for _, (_, b) in rows]),
        cosine=_cosine(update, new),
        moved=[_moved(run, i, pair, records) for i, pair in moved[:5] if pair[0] != pair[1]],
        notes=notes,
    )


def _moved(run: Rebuilt, i: int, advantage: tuple[float, float], records: Experiences) -> Moved:
    row = run.own[i]
    asked = row.prompt_text
    if asked is None and row.messages:
        asked = str(row.messages[-1].get("content"))
    if asked is None and run.models.policy.tokenizer is not None:
        asked = run.models.policy.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
    rewards = [math.nan if one.reward is None else float(one.reward) for one in (row, records[i])]
    return Moved(row.eid.uid, str(asked or ""), (rewards[0], rewards[1]), advantage)


def _advantages(before: Experiences, after: Experiences, count: int) -> list[tuple[int, tuple[float, float]]]:
    """Of the first `count` records that have advantages on both sides: their numbers, and means over their tokens."""
    made = []
    for i in range(count):
        pair = (before[i], after[i])
        if all(row.advantages is not None for row in pair):
            old, new = (counted(row, row.advantages) for row in pair)
            made.append((i, (float(old.mean()), float(new.mean())) if len(old) and len(new) else (0.0, 0.0)))
    return made


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float | None:
    lengths = float(one.norm() * other.norm())
    return float(one @ other) / lengths if lengths > 0 else None


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 2 or not np.std(one) or not np.std(other):
        return None
    return float(np.corrcoef(one, other)[0, 1])


@dataclass
class ReplayResult:
    """What came of a replay."""

    folder: Path
    step: int
    records: int
    checkpoint: str
    """What the replay began from."""
    tolerance: Tolerance
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed: Changed | None = None

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
    ...     small = ["steps=1", "warmup.steps=1", "warmup.until=null", "data.options.count=40", "data.held_out=0",
    ...              "batch.prompts=2", "algorithm.n=2", "model.options.hidden=32", "model.options.heads=1"]
    ...     _ = run(effective("letters", [*small, f"out={folder}/run"]), stream=io.StringIO())
    ...     found = replay(f"{folder}/run", 1)
    >>> found.agrees, found.records
    (True, 4)
    """
    step = check_int("step", step, 1)
    folder = Path(run).expanduser()
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: got no {CONFIG}, expected the folder of a run of `rollbook train`")
    config = effective(folder / CONFIG)
    other = on_cpu(effective(folder / CONFIG, list(changes))) if changes else None
    if other is not None:
        choices(config, other)
    if not trust:
        # What only the changes name is the caller's own.
        check_trusted(folder, config, remote=other is not None and other.rewards != config.rewards)
    with ExitStack() as stack:
        stack.enter_context(_as_it_was(config))
        book = stack.enter_context(open_book(folder / BOOK, mode="r"))
        return _Replay(Rebuilt(folder, config, book, step, stack), config).go(other)


@contextmanager
def _as_it_was(config: Config) -> Iterator[None]:
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

    def __init__(self, run: Rebuilt, config: Config) -> None:
        self.run = run
        tolerance = HERE if run.exact else ELSEWHERE
        self.out = ReplayResult(run.folder, run.step, len(run.own), saving.name_of(run.begun.step), tolerance)
        self.checks, self.notes = self.out.checks, self.out.notes
        if not run.exact:
            where = "on a GPU" if run.on_gpu else f"in {config.model.precision}"
            self.notes.append(f"trained {where}, replayed in float32 on the CPU: small differences are rounding")

    def go(self, other: Config | None) -> ReplayResult:
        """All of it."""
        run = self.run
        run.load(other)
        self._get_there()
        state, weights = copied(run.learner.state_dict()), run.weights()
        self._look_at_records()
        self._look_at_rewards()
        self._look_at_models()
        self._look_at_advantages()
        algorithm = run.config.algorithm
        records, flags = run.beside(run.own, run.step, algorithm)
        records = run.completed(records, algorithm, expert=flags)
        importance = run.weighed(run.traced, records)
        learned = run.learner.update(records, step=run.step, expert=flags, weights=importance)
        update = less(run.weights()["policy"], weights["policy"])
        self._look_at_learning(learned)
        self._look_at_new_weights(weights)
        if other is not None:
            trained = (records, learned, update)
            self.out.changed = change(run, other, state=state, weights=weights, trained=trained)
        return self.out

    def _get_there(self) -> None:
        """From the checkpoint to the step before this one."""
        run = self.run
        steps = range(run.begun.step + 1, run.step)
        found = run.go_on()
        if steps:
            span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            self.notes.append(f"the newest checkpoint before the step is {self.out.checkpoint}: {span} replayed first")
            if found:
                old, new = [told for _, told, _ in found], [loss for _, _, loss in found]
                self.checks.append(compare_rows(f"loss of {span}", old, new, self.out.tolerance))

    # --- what was recorded, and what is found now ---------------------------------------------------------------------

    def _look_at_records(self) -> None:
        traced = self.run.traced
        if traced.revised:
            who = ", ".join(sorted(set(traced.revised.values())))
            names = ", ".join(list(traced.revised)[:3])
            self.notes.append(f"{len(traced.revised)} records were changed after the step, by {who}: {names}")
        if traced.lost:
            self.notes.append(f"{traced.lost} records that were made with these have no bytes any more")

    def _look_at_rewards(self) -> None:
        run, rewards = self.run, self.run.config.rewards
        played = run.config.environment.function is not None
        if not run.config.algorithm.needs_rollouts or (not rewards and not played):
            return
        if played:
            self.checks.append(skipped("rewards: environment", "they came with its turns, not from the record"))
        if not rewards:
            return
        try:
            source = builders.reward_of(rewards)
        except (ValueError, ImportError, OSError) as error:
            self.checks.append(skipped("rewards", f"their source cannot be made: {error}"))
            return
        local = [one.remote is None and one.model is None for one in rewards]
        if all(local):
            told = [row.metrics.get("source") if played else row.reward for row in run.own]
            self.checks.append(self._rewards("rewards", source, told))
            return
        self.checks.append(skipped("rewards", "a server or a model gives some of them"))
        if isinstance(source, CombinedReward):
            for (name, part), known in zip(source.rewards.items(), local, strict=True):
                if known:
                    told = [row.metrics.get(name) for row in run.own]
                    self.checks.append(self._rewards(f"rewards: {name}", part, told))

    def _rewards(self, what: str, source: Any, told: Sequence[Any]) -> Check:
        """Scores of the step's records against those that were recorded, where there are both."""
        known = [i for i, value in enumerate(told) if value is not None and not math.isnan(value)]
        if not known:
            return skipped(what, "no record has one")
        found = self.run.scores(source, self.run.own.take(known))
        source.close()
        kept = [k for k, error in enumerate(found.errors) if error is None]
        failed = next((error for error in found.errors if error is not None), None)
        if not kept:
            return skipped(what, str(failed))
        new = found.to_tensors()[0].tolist()  # in float32, as records have them
        made = compare_rows(what, [told[known[k]] for k in kept], [new[k] for k in kept], HERE)
        if len(kept) == len(told):
            return made
        why = "" if failed is None else f": {failed}"
        return dataclasses.replace(made, note=f"{len(told) - len(kept)} of {len(told)} records not compared{why}")

    def _look_at_models(self) -> None:
        """What the models say of the step's records, against what they said when those were made."""
        run, most = self.run, self.out.tolerance.tokens
        actor, reference, teacher = run.models.policy, run.models.reference, run.models.teacher
        self._compare("policy log-probs", "old_logprobs", most, actor, entropy=True)
        if not any(row.old_logprobs is not None for row in run.own):
            self._compare("engine log-probs", "logprobs", ELSEWHERE.tokens, actor)
        self._compare("reference log-probs", "ref_logprobs", most, without_adapters(reference), moves=False)
        self._compare("teacher log-probs", "teacher_logprobs", most, teacher, moves=False)
        self._compare("values", "values", most, run.models.critic)

    def _compare(
        self, what: str, name: str, most: float, model: Any, *, entropy: bool = False, moves: bool = True
    ) -> None:
        """One model, of the records that were made with its weights of now; `moves`: it learns."""
        outputs = (name, "entropy") if entropy else (name,)
        run = self.run
        known = [row for row in run.own if getattr(row, name) is not None]
        if model is None or not known:
            return
        if moves:
            known = [row for row in known if _version(row) == run.step - 1]
            if not known:
                why = "these records were made by older policies, or do not say by which"
                self.checks.append(skipped(what, why))
                return
        wanted = {row.eid.uid for row in known}
        found: dict[str, Any] = {}
        for uids in run.traced.together:
            if not wanted.isdisjoint(uids):
                # All that were made together went through the model together: the same micro-batches, the same bits.
                records = run.book.get(uids)
                columns = forward(model, records, outputs, token_budget=run.config.batch.token_budget)
                found.update(zip(uids, columns[name], strict=True))
        old = [counted(row, getattr(row, name)) for row in known]
        new = [counted(row, found[row.eid.uid]) for row in known]
        self.checks.append(tokens(what, old, new, most))

    def _look_at_advantages(self) -> None:
        run, algorithm = self.run, self.run.config.algorithm
        if algorithm.estimator is None:
            return
        known = [row for row in run.own if row.advantages is not None]
        if not known:
            self.checks.append(skipped("advantages", "none were recorded: they were made for the step alone"))
            return
        if algorithm.reward_norm is not None:
            why = "algorithm.reward_norm: the statistics of all rewards before the step are not recorded"
            self.checks.append(skipped("advantages", why))
            return
        try:
            found = run.estimated(algorithm)
        except ValueError as error:
            self.checks.append(skipped("advantages", str(error)))
            return
        for name in ("advantages", "returns"):
            rows = [row for row in known if getattr(row, name) is not None]
            old = [counted(row, getattr(row, name)) for row in rows]
            new = [counted(row, found[row.eid.uid][name]) for row in rows]
            self.checks.append(compare_rows(name, old, new, HERE, size=True))

    def _look_at_learning(self, learned: UpdateResult) -> None:
        """Plan, losses and gradients."""
        run, told = self.run, self.run.metrics.get(self.run.step, {})
        self.checks += plans(run.traced.places, learned.placements[: len(run.own)])
        if not told:
            self.notes.append(f"the book has no metrics of step {run.step}: the run ended before they were written")
        for name in sorted(learned.metrics, key=rank):
            if name in told:
                counts = name in COUNTS or name.startswith("left_out/")
                how = EXACT if counts else self.out.tolerance
                self.checks.append(compare_rows(name, [told[name]], [learned.metrics[name]], how))

    def _look_at_new_weights(self, weights: Weights) -> None:
        """What came of the step, against the checkpoint after it, if there is one."""
        run = self.run
        if run.after is None:
            return
        for name, folder in (("policy", run.after.model), ("critic", run.after.critic)):
            if name in weights and folder is not None:
                model = getattr(run.models, name)
                mine = copied(model.state_dict())
                saving.load_weights(model, folder)
                kept = copied(model.state_dict())
                model.load_state_dict(mine)
                what = "new weights" if name == "policy" else f"new weights: {name}"
                self.checks.append(self._weights(what, weights[name], kept, mine))

    def _weights(self, what: str, old: Any, kept: Any, mine: Any) -> Check:
        gap = less(mine, kept)
        lengths = [float(less(new, old).norm()) for new in (kept, mine)]
        bound = self.out.tolerance.update * max(lengths)
        if not self.run.exact:
            # Of bfloat16 weights, what rounding alone does is more than a small update.
            bound += 2**-8 * math.sqrt(sum(float(one.double().square().sum()) for one in kept.values()))
        far, most = float(gap.norm()), float(gap.abs().max())
        verdict = SAME if not most else ROUNDING if far <= bound else DIFFERS
        note = f"the update's length, against {saving.name_of(self.run.step)}"
        return Check(what, lengths[0], lengths[1], most, verdict, note)


def _version(row: Any) -> int | None:
    """The one policy that made a record; none if it is not known, or there were several."""
    if row.policy_versions is None:
        return None
    found = np.unique(np.asarray(row.policy_versions))
    return int(found[0]) if len(found) == 1 else None
