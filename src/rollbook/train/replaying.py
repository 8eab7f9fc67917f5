"""`replay(run, step)`: a step of a run computed again, on the CPU, from its book and its checkpoints, and compared.

Invariant: nothing of the run is written. Each stage is computed from what was recorded before it, so that a difference
is of the stage where it shows: rewards from texts, advantages from recorded rewards, the loss from recorded advantages.
Another choice is computed from the same records and the same weights, and compared with the step as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.registry import whole_number
from rollbook.book.book import Book
from rollbook.book.opening import open as open_book
from rollbook.book.samplers import Proportional
from rollbook.experiences import Experiences
from rollbook.models.forward import policy_log_probs, reference_log_probs, values
from rollbook.rewards.recipes import Combined
from rollbook.rewards.types import RewardInput
from rollbook.train import building, saving, verdicts
from rollbook.train.algorithm import Algorithm
from rollbook.train.completing import complete
from rollbook.train.config.loading import effective
from rollbook.train.config.schema import Config, differences
from rollbook.train.learner import Learned, Learner
from rollbook.train.optimizing import Optimizing
from rollbook.train.retracing import Traced, trace
from rollbook.train.running import BOOK, CONFIG
from rollbook.train.verdicts import Check, Tolerance

_MAKING = ("algorithm.n", "algorithm.refill", "algorithm.drop_constant_groups", "algorithm.preset", "algorithm.name")
"""Keys of an algorithm that only say how records are made, or what it is called."""
_OTHER = ("algorithm.", "batch.", "optimizer.", "critic_optimizer", "rewards", "steps")
"""Where another choice can be put in the place of a recorded one."""
_CPU = torch.device("cpu")
_ATTENTION = (None, "eager", "sdpa")
"""Attention that a CPU has."""


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


@dataclass
class Replayed:
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
        return all(check.agrees for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        made = {**dataclasses.asdict(self), "folder": str(self.folder), "agrees": self.agrees}
        return made


def replay(run: Any, step: int, changes: Sequence[str] = ()) -> Replayed:
    """Compute a step of the run in a folder again, and compare it with what was trained; `changes` are other choices
    (`algorithm.estimator=rloo`), to see what they would have changed.

    >>> import io, tempfile
    >>> from rollbook.train.running import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = ["steps=1", "warmup.steps=1", "warmup.until=null", "data.options.count=40", "data.held_out=0",
    ...              "batch.prompts=2", "algorithm.n=2", "model.options.hidden=32", "model.options.heads=1"]
    ...     _ = run(effective("letters", [*small, f"out={folder}/run"]), stream=io.StringIO())
    ...     found = replay(f"{folder}/run", 1)
    >>> found.agrees, found.records
    (True, 4)
    """
    step = whole_number("step", step, 1)
    folder = Path(run).expanduser()
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: got no {CONFIG}, expected the folder of a run of `rollbook train`")
    config = effective(folder / CONFIG)
    other = effective(folder / CONFIG, list(changes)) if changes else None
    with ExitStack() as stack:
        stack.enter_context(_as_it_was(config))
        book = stack.enter_context(open_book(folder / BOOK, mode="r"))
        return _Replay(folder, config, book, step, stack).go(other)


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
    """A replay under way: the run, its models with the weights that the step began with, and what was found."""

    def __init__(self, folder: Path, config: Config, book: Book, step: int, stack: ExitStack) -> None:
        self.book, self.step = book, step
        self.config = _on_cpu(config)
        self.intake = self.config.intake.intake()
        self.metrics = dict(book.metrics())
        self.traced = self._trace(step)
        if not self.traced.uids:
            raise ValueError(f"step {step}: it learnt from nothing: every group was dropped, or nothing was there")
        self.own = self._records(self.traced)
        found = saving.saved(folder)
        before = [one for one in found if one.step < step]
        if not before:
            raise ValueError(f"{folder}: got no checkpoint before step {step}, expected one in {saving.FOLDER}")
        self.begun = before[-1]
        self.first = found[0] if found[0].step == 0 else None
        self.after = next((one for one in found if one.step == step), None)
        self.expert: Book | None = None
        if self.intake.expert_share:
            self.expert = stack.enter_context(open_book(str(self.config.intake.expert), mode="r"))
        self.experts: list[str] = []
        exact = config.model.precision == "float32" and not self._on_gpu()
        self.out = Replayed(
            folder,
            step,
            len(self.own),
            saving.name_of(self.begun.step),
            verdicts.HERE if exact else verdicts.ELSEWHERE,
        )
        if not exact:
            where = "on a GPU" if self._on_gpu() else f"in {config.model.precision}"
            self.note(
                f"the run was trained {where} and is replayed in float32 on the CPU: small differences are rounding"
            )

    def note(self, text: str) -> None:
        """Something that whoever reads the result should know."""
        self.out.notes.append(text)

    def _on_gpu(self) -> bool:
        return "peak_memory_gib" in self.metrics.get(self.step, {}) or self.config.device.startswith("cuda")

    def _trace(self, step: int) -> Traced:
        found = trace(self.book, step, self.intake.consumer)
        known = [each for each in self.metrics if each > 0]
        if not found.uids and step not in known:
            told = f"steps {min(known)} to {max(known)}" if known else "no steps"
            raise ValueError(f"step: got {step}, and the run has {told}")
        return found

    def _records(self, traced: Traced) -> Experiences:
        try:
            return traced.records(self.book)
        except ValueError as error:
            raise ValueError(f"step {traced.step}: a record of it cannot be read: {error}") from None

    # --- the weights that the step began with -------------------------------------------------------------------------

    def go(self, other: Config | None) -> Replayed:
        """All of it."""
        changes = [] if other is None else self._choices(other)
        other = None if other is None else _on_cpu(other)
        self.models = self._models(other)
        saving.load_weights(self.models.actor, self.begun.model)
        if self.models.critic is not None:
            if self.begun.critic is None:
                raise ValueError(f"{self.begun.path}: got no critic, and {self.config.algorithm.name} needs one")
            saving.load_weights(self.models.critic, self.begun.critic)
        state = saving.load_state(self.begun)["learner"]
        learner = self._learner(self.config)
        _load(learner, state)
        self._go_on(learner)
        state, weights = _copied(learner.state_dict()), self._weights()
        self._look_at_records()
        self._look_at_rewards()
        self._look_at_models()
        self._look_at_advantages()
        records, flags = self._beside(self.own, self.step)
        records = self._completed(records, self.config.algorithm)
        learned = learner.learn(records, step=self.step, expert=flags)
        self._look_at_learning(learned, weights)
        if other is not None:
            update = _update(self._weights()["actor"], weights["actor"])
            self._put(weights)
            self.out.changed = self._change(other, changes, state, weights, (records, learned, update))
        return self.out

    def _models(self, other: Config | None) -> building.Models:
        """The models, with the weights that training began with, where reference and critic are made from those."""
        asked = [self.config] if other is None else [self.config, other]
        if any(one.algorithm.needs_critic for one in asked) and not self.config.algorithm.needs_critic:
            name = asked[-1].algorithm.estimator
            raise ValueError(f"algorithm.estimator: got {name!r}, which needs a critic, and the run has none")
        actor = building.actor_of(self.config, _CPU)
        needs = any(one.algorithm.needs_reference and one.reference is None for one in asked)
        if self.first is not None:
            saving.load_weights(actor, self.first.model)
        elif needs:
            raise ValueError(f"{self.out.folder}: got no checkpoint of step 0, whose weights the reference has")
        made = [building.models_of(one, actor, _CPU) for one in asked]
        for name in ("reference", "teacher"):
            if getattr(made[0], name) is None:
                setattr(made[0], name, getattr(made[-1], name))
        return made[0]

    def _learner(self, config: Config) -> Learner:
        ends = {"steps": config.steps} if config.steps else {}
        movers = [
            one if one is None or one.steps is not None else dataclasses.replace(one, **ends)
            for one in (config.optimizer, config.critic_optimizer)
        ]
        return Learner(
            self.models.actor,
            config.algorithm,
            critic=self.models.critic if config.algorithm.needs_critic else None,
            reference=self.models.reference,
            optimizer=movers[0],
            critic_optimizer=movers[1],
            batching=config.batch.batching(),
            seed=config.seed,
            max_tokens=config.sampling.max_tokens,
            nonfinite_limit=config.nonfinite_limit,
        )

    def _go_on(self, learner: Learner) -> None:
        """From the checkpoint to the step before this one, by what was recorded."""
        between = range(self.begun.step + 1, self.step)
        old, new = [], []
        for step in between:
            traced = self._trace(step)
            if not traced.uids:
                continue
            records, flags = self._beside(self._records(traced), step)
            learned = learner.learn(self._completed(records, self.config.algorithm), step=step, expert=flags)
            told = self.metrics.get(step, {}).get("loss")
            if told is not None and "loss" in learned.metrics:
                old.append(told)
                new.append(learned.metrics["loss"])
        if between:
            span = f"step {between[0]}" if len(between) == 1 else f"steps {between[0]} to {between[-1]}"
            self.note(f"the newest checkpoint before the step is {self.out.checkpoint}: {span} replayed to get here")
            if old and not self._weighed():
                self.out.checks.append(verdicts.rows(f"loss of {span}", old, new, self.out.tolerance))

    def _beside(self, own: Experiences, step: int) -> tuple[Experiences, list[bool] | None]:
        """A step's own records and the expert's that were beside them, and which are the expert's."""
        given = self.intake.experts(self.expert, len(own), seed=self.config.seed, step=step, known=self.experts)
        both = own if given is None else Experiences([*own, *given])
        return both, [i >= len(own) for i in range(len(both))] if self.config.algorithm.mixed else None

    def _completed(self, records: Experiences, algorithm: Algorithm, **more: Any) -> Experiences:
        return complete(
            records,
            algorithm,
            actor=self.models.actor,
            critic=self.models.critic,
            reference=self.models.reference,
            teacher=self.models.teacher,
            token_budget=self.config.batch.token_budget,
            **{"max_tokens": self.config.sampling.max_tokens, **more},
        )

    def _weights(self) -> dict[str, dict[str, torch.Tensor]]:
        both = {"actor": self.models.actor, "critic": self.models.critic}
        return {name: _copied(one.state_dict()) for name, one in both.items() if one is not None}

    def _put(self, weights: dict[str, dict[str, torch.Tensor]]) -> None:
        for name, kept in weights.items():
            getattr(self.models, name).load_state_dict(kept)

    def _weighed(self) -> bool:
        """Whether a sampler gave its records weights, which the ledger does not keep."""
        return isinstance(self.intake.settings().get("sampler"), Proportional)

    # --- what was recorded, and what is found now ---------------------------------------------------------------------

    def _look_at_records(self) -> None:
        if self.traced.revised:
            who = ", ".join(sorted(set(self.traced.revised.values())))
            names = ", ".join(list(self.traced.revised)[:3])
            self.note(f"{len(self.traced.revised)} records were changed after they were trained on, by {who}: {names}")
        if self.traced.lost:
            self.note(f"{self.traced.lost} records that were made with these have no bytes any more")

    def _look_at_rewards(self) -> None:
        rewards = self.config.rewards
        if not self.config.algorithm.needs_maker:
            return
        if not rewards:
            why = "the environment gave them" if self.config.environment.function is not None else "there are none"
            self.out.checks.append(verdicts.skipped("rewards", f"{why}: not a function of the record"))
            return
        try:
            source = building.reward_of(rewards)
        except (ValueError, ImportError, OSError) as error:
            self.out.checks.append(verdicts.skipped("rewards", f"the source cannot be made: {error}"))
            return
        local = [one.remote is None and one.model is None for one in rewards]
        if all(local):
            played = self.config.environment.function is not None
            told = [row.metrics.get("source") if played else row.reward for row in self.own]
            self.out.checks.append(self._rewards("rewards", source, told))
            return
        self.out.checks.append(verdicts.skipped("rewards", "a remote source or a model is among them"))
        if isinstance(source, Combined):
            for (name, part), known in zip(source.rewards.items(), local, strict=True):
                if known:
                    told = [row.metrics.get(name) for row in self.own]
                    self.out.checks.append(self._rewards(f"reward: {name}", part, told))

    def _rewards(self, what: str, source: Any, told: Sequence[Any]) -> Check:
        """Scores of the step's records against those that were recorded, where there are both."""
        known = [i for i, value in enumerate(told) if value is not None and not math.isnan(value)]
        found = self._scores(source, [self.own[i] for i in known])
        failed = [error for error in found.errors if error is not None]
        kept = [k for k, error in enumerate(found.errors) if error is None]
        if not kept:
            return verdicts.skipped(what, failed[0] if failed else "no record has one")
        made = verdicts.rows(
            what, [told[known[k]] for k in kept], [_float(found.rewards[k]) for k in kept], verdicts.HERE
        )
        lacking = len(told) - len(kept)
        if not lacking:
            return made
        why = f": {failed[0]}" if failed else ""
        return dataclasses.replace(made, note=f"{lacking} of {len(told)} records are not compared{why}")

    def _scores(self, source: Any, rows: Sequence[Any]) -> Any:
        # The rows of a conversation that a template forked have the reward of its last.
        last = {row.eid.rid: row for row in rows}
        tokenizer = self.models.actor.tokenizer
        try:
            return source([RewardInput.of(last[row.eid.rid], tokenizer) for row in rows])
        finally:
            source.close()

    def _look_at_models(self) -> None:
        """What the models say of the step's records, against what they said when those were made."""
        budget: dict[str, Any] = {"token_budget": self.config.batch.token_budget}
        most, actor = self.out.tolerance.tokens, self.models.actor
        self._compare("policy log-probs", "policy_logprobs", most, actor, policy_log_probs, {**budget, "entropy": True})
        if not any(row.policy_logprobs is not None for row in self.own):
            self._compare("engine log-probs", "logprobs", verdicts.ELSEWHERE.tokens, actor, policy_log_probs, budget)
        reference, teacher = self.models.reference, self.models.teacher
        self._compare("reference log-probs", "ref_logprobs", most, reference, reference_log_probs, budget, moves=False)
        self._compare("teacher log-probs", "teacher_logprobs", most, teacher, policy_log_probs, budget, moves=False)
        self._compare("values", "values", most, self.models.critic, values, budget)

    def _compare(
        self, what: str, name: str, most: float, model: Any, ask: Any, options: dict[str, Any], moves: bool = True
    ) -> None:
        """One model, of the records that were made with its weights of now; `moves`: it learns."""
        known = [row for row in self.own if getattr(row, name) is not None]
        if model is None or not known:
            return
        if moves:
            known = [row for row in known if _version(row) == self.step - 1]
            if not known:
                why = "these records were made by older policies, or do not say by which"
                self.out.checks.append(verdicts.skipped(what, why))
                return
        wanted = {row.eid.uid for row in known}
        found: dict[str, Any] = {}
        for uids in self.traced.together:
            if not wanted.isdisjoint(uids):
                # All that were made together went through the model together: the same micro-batches, the same bits.
                scores = ask(model, self.book.get(uids), **options)
                column = scores.values if name == "values" else scores.log_probs
                found.update(zip(uids, column, strict=True))
        pairs = [
            (_counted(row, getattr(row, name)), _counted(row, torch.as_tensor(found[row.eid.uid]))) for row in known
        ]
        self.out.checks.append(verdicts.tokens(what, *zip(*pairs, strict=True), most))

    def _look_at_advantages(self) -> None:
        algorithm = self.config.algorithm
        if algorithm.estimator is None:
            return
        known = [row for row in self.own if row.advantages is not None]
        if not known:
            self.out.checks.append(
                verdicts.skipped("advantages", "none were recorded: they were made for the step alone")
            )
            return
        try:
            found = self._estimated(algorithm)
        except ValueError as error:
            self.out.checks.append(verdicts.skipped("advantages", str(error)))
            return
        for name in ("advantages", "returns"):
            pairs = [
                (_counted(row, getattr(row, name)), _counted(row, found[row.eid.uid][name]))
                for row in known
                if getattr(row, name) is not None
            ]
            if pairs:
                made = verdicts.rows(name, *zip(*pairs, strict=True), verdicts.HERE, size=True)
                self.out.checks.append(made)

    def _estimated(self, algorithm: Algorithm, reward: Any = None) -> dict[str, dict[str, Any]]:
        """`advantages`, `returns` and `reward` of records by id, estimated over all that were made together; with
        another reward, from its scores."""
        turns = self.config.environment.max_turns if self.config.environment.function is not None else 1
        longest = self.config.sampling.max_tokens * turns
        whole = self.traced.together if all(row.advantages is not None for row in self.own) else [self.traced.uids]
        made: dict[str, dict[str, Any]] = {}
        for uids in whole:
            rows = self.book.get(uids)
            if reward is not None:
                scores = self._scores(reward, list(rows))
                failed = next((error for error in scores.errors if error is not None), None)
                if failed is not None:
                    raise ValueError(f"rewards: {failed}")
                rows = rows.assign(reward=[_float(one) for one in scores.rewards])
            if algorithm.estimator is not None:
                rows = self._completed(rows, algorithm, max_tokens=longest, anew=True)
            names = ("reward", "advantages", "returns")
            columns = [rows.values(name) for name in names]
            made |= {uid: dict(zip(names, row, strict=True)) for uid, *row in zip(uids, *columns, strict=True)}
        return made

    def _look_at_learning(self, learned: Learned, weights: dict[str, dict[str, torch.Tensor]]) -> None:
        """Plan, losses, gradients and new weights."""
        out, told = self.out, self.metrics.get(self.step, {})
        places = learned.places[: len(self.own)]
        out.checks += verdicts.plans(self.traced.places, places)
        if self._weighed():
            out.checks.append(verdicts.skipped("loss", "the sampler's weights are not in the ledger"))
            return
        if not told:
            self.note(f"the book has no metrics of step {self.step}: the run ended before they were written")
        exact = Tolerance(0.0, 1e-9, 0.0, 0.0)
        counts = ("lr", "updates", "skipped", "rows")
        for name in sorted(learned.metrics, key=_rank):
            if name in told:
                how = exact if name in counts or name.startswith("left_out/") else out.tolerance
                out.checks.append(verdicts.number(name, told[name], learned.metrics[name], how))
        if self.after is None:
            return
        for name, folder in (("actor", self.after.model), ("critic", self.after.critic)):
            if name in weights and folder is not None:
                model = getattr(self.models, name)
                mine = _copied(model.state_dict())
                saving.load_weights(model, folder)
                saved = _copied(model.state_dict())
                model.load_state_dict(mine)
                out.checks.append(self._new_weights(name, weights[name], saved, mine))

    def _new_weights(self, name: str, old: Any, saved: Any, mine: Any) -> Check:
        what = "new weights" if name == "actor" else f"new weights: {name}"
        gap = _update(mine, saved)
        lengths = [float(_update(new, old).norm()) for new in (saved, mine)]
        short = self.out.tolerance is verdicts.ELSEWHERE
        # Of bfloat16 weights, what rounding alone does is more than a small update.
        room = 2**-8 * float(_update(saved, {}).norm()) if short else 0.0
        bound = self.out.tolerance.update * max(lengths) + room
        far = float(gap.norm())
        verdict = verdicts.SAME if not gap.any() else verdicts.ROUNDING if far <= bound else verdicts.DIFFERS
        note = f"lengths of the update from step {self.step - 1}, against {saving.name_of(self.step)}"
        return Check(what, *lengths, float(gap.abs().max()) if len(gap) else 0.0, verdict, note)

    # --- another choice -----------------------------------------------------------------------------------------------

    def _choices(self, other: Config) -> list[str]:
        """What another choice changes, of all that a replay can change."""
        found = differences(self.config, dataclasses.replace(_on_cpu(other), device=self.config.device))
        for one in found:
            if not one.path.startswith(_OTHER) or one.path == "batch.prompts":
                raise ValueError(
                    f"{one.path}: got another value, and the records are what they are; expected changes of algorithm, "
                    "rewards, batch or optimizer"
                )
        made = [one for one in found if one.path not in _MAKING]
        if not made:
            said = ", ".join(one.path for one in found) or "the run's own values"
            raise ValueError(f"changes: got {said}, which changes nothing of a step whose records are there")
        left = [one.path for one in found if one.path in _MAKING[:3]]
        if left:
            self.note(f"{', '.join(left)}: of how records are made, which they are already; not replayed")
        return [str(one) for one in made]

    def _change(
        self,
        other: Config,
        changes: list[str],
        state: dict[str, Any],
        weights: dict[str, dict[str, torch.Tensor]],
        trained: tuple[Experiences, Learned, torch.Tensor],
    ) -> Changed:
        """The step under another choice, from the same weights."""
        before, learned, update = trained
        source = None
        if other.rewards != self.config.rewards:
            source = building.reward_of(other.rewards)
            if source is None:
                raise ValueError("rewards: got none, expected some")
        own = self.own
        if other.algorithm.estimator is not None:
            found = self._estimated(other.algorithm, source)
            columns = {
                name: [found[uid][name] for uid in self.traced.uids] for name in ("reward", "advantages", "returns")
            }
            own = own.assign(**columns)
        records, _ = self._beside(own, self.step)
        flags = [i >= len(own) for i in range(len(records))] if other.algorithm.mixed else None
        records = self._completed(records, other.algorithm)
        learner = self._learner(other)
        if other.optimizer.name == self.config.optimizer.name:
            _load(learner, state)
        else:
            self.note(f"optimizer.name: {other.optimizer.name} begins without a state")
        changed = learner.learn(records, step=self.step, expert=flags)
        new = _update(self._weights()["actor"], weights["actor"])
        rows = _advantages(before.take(range(len(own))), records.take(range(len(own))))
        numbers: dict[str, tuple[float | None, float | None]] = {}
        if rows:
            numbers["mean size of advantages"] = tuple(float(np.mean([abs(a[k]) for _, a in rows])) for k in (0, 1))  # type: ignore[assignment]
        for name in sorted({**learned.metrics, **changed.metrics}, key=_rank):
            numbers[name] = (learned.metrics.get(name), changed.metrics.get(name))
        numbers["length of the update"] = (float(update.norm()), float(new.norm()))
        moved = sorted(rows, key=lambda row: -abs(row[1][1] - row[1][0]))
        return Changed(
            changes,
            numbers,
            signs=sum(np.sign(a) != np.sign(b) for _, (a, b) in rows),
            rows=len(rows),
            correlation=_correlation([a for _, (a, _) in rows], [b for _, (_, b) in rows]),
            cosine=_cosine(update, new),
            moved=[self._moved(i, pair, records) for i, pair in moved[:5] if pair[0] != pair[1]],
        )

    def _moved(self, i: int, advantage: tuple[float, float], records: Experiences) -> Moved:
        row = self.own[i]
        asked = row.prompt_text
        if asked is None and row.messages:
            asked = str(row.messages[-1].get("content"))
        if asked is None and self.models.actor.tokenizer is not None:
            asked = self.models.actor.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
        rewards = [math.nan if one.reward is None else float(one.reward) for one in (row, records[i])]
        return Moved(row.eid.uid, str(asked or ""), (rewards[0], rewards[1]), advantage)


# --- small things -----------------------------------------------------------------------------------------------------


def _on_cpu(config: Config) -> Config:
    """A run's configuration as a CPU can have it, in float32."""
    attention = config.model.attention if config.model.attention in _ATTENTION else None
    model = dataclasses.replace(config.model, precision="float32", attention=attention, gradient_checkpointing=False)
    return dataclasses.replace(config, model=model)


def _load(learner: Learner, state: dict[str, Any]) -> None:
    """Put an optimizer's state into a learner that keeps its own options, in float32."""
    movers = {"optimizer": learner.optimizer, "critic_optimizer": learner.critic_optimizer}
    own = {
        name: [{**group} for group in mover.inner.param_groups] for name, mover in movers.items() if mover is not None
    }
    given = {"failures": state["failures"]}
    for name in own:
        kept = _copied(state[name])
        kept.pop("masters", None)
        given[name] = kept
    learner.load_state_dict(given)
    for name, groups in own.items():
        mover = movers[name]
        if mover is not None:
            for group, mine in zip(mover.inner.param_groups, groups, strict=True):
                group.update({key: value for key, value in mine.items() if key != "params"})


def _copied(value: Any) -> Any:
    """A copy of tensors in dicts and lists, apart from what moves."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _update(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> torch.Tensor:
    """[weights] New weights less old ones, as one vector."""
    parts = [
        (one.double() - old[name].double() if old else one.double()).reshape(-1)
        for name, one in new.items()
        if one.is_floating_point()
    ]
    return torch.cat(parts)


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float | None:
    lengths = float(one.norm() * other.norm())
    return float(one @ other) / lengths if lengths > 0 else None


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 2 or not np.std(one) or not np.std(other):
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _advantages(before: Experiences, after: Experiences) -> list[tuple[int, tuple[float, float]]]:
    """The number of each record that has advantages on both sides, and their means over its tokens."""
    made = []
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.advantages is not None and new.advantages is not None:
            means = [
                _counted(row, row.advantages).mean() if len(row.advantages) else np.float64(0) for row in (old, new)
            ]
            made.append((i, (float(means[0]), float(means[1]))))
    return made


def _counted(row: Any, values: Any) -> Any:
    """What a field says of the tokens that count."""
    found = np.asarray(values, dtype=np.float64)
    return found if row.action_mask is None else found[row.action_mask.bool().numpy()]


def _version(row: Any) -> int | None:
    """The one policy that made a record; none if it is not known, or there were several."""
    if row.policy_versions is None:
        return None
    found = np.unique(np.asarray(row.policy_versions))
    return int(found[0]) if len(found) == 1 else None


def _float(value: float) -> float:
    """A reward as records have it, in float32."""
    return float(np.float32(value))


_FIRST = ("loss", "grad_norm", "policy/pg_loss", "kl", "entropy", "critic/value_loss", "critic/grad_norm")


def _rank(name: str) -> tuple[int, str]:
    """Losses before other metrics, counts last."""
    if name in _FIRST:
        return _FIRST.index(name), ""
    return (len(_FIRST) if "/" in name and not name.startswith("left_out") else len(_FIRST) + 1), name
