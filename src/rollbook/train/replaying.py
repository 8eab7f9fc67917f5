"""`replay(run, step)`: a step of a run computed again, on the CPU, from its book and its checkpoints, and compared.

Invariant: nothing of the run is written, and nothing that its configuration names is run unless the caller trusts it.
Each stage is computed from what was recorded before it, so that a difference
is of the stage where it shows: rewards from texts, advantages from recorded rewards, the loss from recorded advantages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollbook.book.book import open as open_book
from rollbook.core.checks import check_int
from rollbook.models.forward import policy_log_probs, reference_log_probs, values
from rollbook.rewards.recipes import CombinedReward
from rollbook.train import building, verdicts
from rollbook.train import checkpoint as saving
from rollbook.train.config.loading import effective
from rollbook.train.config.schema import Config
from rollbook.train.learner import UpdateResult
from rollbook.train.otherwise import Changed, change, choices
from rollbook.train.rebuilding import Rebuilt, Weights, copied, less, on_cpu
from rollbook.train.running import BOOK, CONFIG
from rollbook.train.trust import check_trusted
from rollbook.train.verdicts import Check, Tolerance, counted


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
        return all(check.verdict != verdicts.DIFFERS for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**dataclasses.asdict(self), "folder": str(self.folder), "agrees": self.agrees}


def replay(run: Any, step: int, changes: Sequence[str] = (), *, trust: bool = False) -> Replayed:
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
    >>> from rollbook.train.running import run
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
        tolerance = verdicts.HERE if run.exact else verdicts.ELSEWHERE
        self.out = Replayed(run.folder, run.step, len(run.own), saving.name_of(run.begun.step), tolerance)
        self.checks, self.notes = self.out.checks, self.out.notes
        if not run.exact:
            where = "on a GPU" if run.on_gpu else f"in {config.model.precision}"
            self.notes.append(f"trained {where}, replayed in float32 on the CPU: small differences are rounding")

    def go(self, other: Config | None) -> Replayed:
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
                self.checks.append(verdicts.rows(f"loss of {span}", old, new, self.out.tolerance))

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
            self.checks.append(
                verdicts.skipped("rewards: environment", "they came with its turns, not from the record")
            )
        if not rewards:
            return
        try:
            source = building.reward_of(rewards)
        except (ValueError, ImportError, OSError) as error:
            self.checks.append(verdicts.skipped("rewards", f"their source cannot be made: {error}"))
            return
        local = [one.remote is None and one.model is None for one in rewards]
        if all(local):
            told = [row.metrics.get("source") if played else row.reward for row in run.own]
            self.checks.append(self._rewards("rewards", source, told))
            return
        self.checks.append(verdicts.skipped("rewards", "a server or a model gives some of them"))
        if isinstance(source, CombinedReward):
            for (name, part), known in zip(source.rewards.items(), local, strict=True):
                if known:
                    told = [row.metrics.get(name) for row in run.own]
                    self.checks.append(self._rewards(f"rewards: {name}", part, told))

    def _rewards(self, what: str, source: Any, told: Sequence[Any]) -> Check:
        """Scores of the step's records against those that were recorded, where there are both."""
        known = [i for i, value in enumerate(told) if value is not None and not math.isnan(value)]
        if not known:
            return verdicts.skipped(what, "no record has one")
        found = self.run.scores(source, self.run.own.take(known))
        source.close()
        kept = [k for k, error in enumerate(found.errors) if error is None]
        failed = next((error for error in found.errors if error is not None), None)
        if not kept:
            return verdicts.skipped(what, str(failed))
        new = found.to_tensors()[0].tolist()  # in float32, as records have them
        made = verdicts.rows(what, [told[known[k]] for k in kept], [new[k] for k in kept], verdicts.HERE)
        if len(kept) == len(told):
            return made
        why = "" if failed is None else f": {failed}"
        return dataclasses.replace(made, note=f"{len(told) - len(kept)} of {len(told)} records not compared{why}")

    def _look_at_models(self) -> None:
        """What the models say of the step's records, against what they said when those were made."""
        run, most = self.run, self.out.tolerance.tokens
        options: dict[str, Any] = {"token_budget": run.config.batch.token_budget}
        actor = run.models.policy
        self._compare(
            "policy log-probs", "policy_logprobs", most, actor, policy_log_probs, {**options, "entropy": True}
        )
        if not any(row.policy_logprobs is not None for row in run.own):
            self._compare("engine log-probs", "logprobs", verdicts.ELSEWHERE.tokens, actor, policy_log_probs, options)
        fixed = {"moves": False}
        reference, teacher = run.models.reference, run.models.teacher
        self._compare("reference log-probs", "ref_logprobs", most, reference, reference_log_probs, options, **fixed)
        self._compare("teacher log-probs", "teacher_logprobs", most, teacher, policy_log_probs, options, **fixed)
        self._compare("values", "values", most, run.models.critic, values, options)

    def _compare(
        self, what: str, name: str, most: float, model: Any, ask: Any, options: dict[str, Any], moves: bool = True
    ) -> None:
        """One model, of the records that were made with its weights of now; `moves`: it learns."""
        run = self.run
        known = [row for row in run.own if getattr(row, name) is not None]
        if model is None or not known:
            return
        if moves:
            known = [row for row in known if _version(row) == run.step - 1]
            if not known:
                why = "these records were made by older policies, or do not say by which"
                self.checks.append(verdicts.skipped(what, why))
                return
        wanted = {row.eid.uid for row in known}
        found: dict[str, Any] = {}
        for uids in run.traced.together:
            if not wanted.isdisjoint(uids):
                # All that were made together went through the model together: the same micro-batches, the same bits.
                scores = ask(model, run.book.get(uids), **options)
                column = scores.values if name == "values" else scores.log_probs
                found.update(zip(uids, column, strict=True))
        old = [counted(row, getattr(row, name)) for row in known]
        new = [counted(row, found[row.eid.uid]) for row in known]
        self.checks.append(verdicts.tokens(what, old, new, most))

    def _look_at_advantages(self) -> None:
        run, algorithm = self.run, self.run.config.algorithm
        if algorithm.estimator is None:
            return
        known = [row for row in run.own if row.advantages is not None]
        if not known:
            self.checks.append(verdicts.skipped("advantages", "none were recorded: they were made for the step alone"))
            return
        if algorithm.reward_norm is not None:
            why = "algorithm.reward_norm: the statistics of all rewards before the step are not recorded"
            self.checks.append(verdicts.skipped("advantages", why))
            return
        try:
            found = run.estimated(algorithm)
        except ValueError as error:
            self.checks.append(verdicts.skipped("advantages", str(error)))
            return
        for name in ("advantages", "returns"):
            rows = [row for row in known if getattr(row, name) is not None]
            old = [counted(row, getattr(row, name)) for row in rows]
            new = [counted(row, found[row.eid.uid][name]) for row in rows]
            self.checks.append(verdicts.rows(name, old, new, verdicts.HERE, size=True))

    def _look_at_learning(self, learned: UpdateResult) -> None:
        """Plan, losses and gradients."""
        run, told = self.run, self.run.metrics.get(self.run.step, {})
        self.checks += verdicts.plans(run.traced.places, learned.placements[: len(run.own)])
        if not told:
            self.notes.append(f"the book has no metrics of step {run.step}: the run ended before they were written")
        for name in sorted(learned.metrics, key=verdicts.rank):
            if name in told:
                counts = name in verdicts.COUNTS or name.startswith("left_out/")
                how = verdicts.EXACT if counts else self.out.tolerance
                self.checks.append(verdicts.rows(name, [told[name]], [learned.metrics[name]], how))

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
        verdict = verdicts.SAME if not most else verdicts.ROUNDING if far <= bound else verdicts.DIFFERS
        note = f"the update's length, against {saving.name_of(self.run.step)}"
        return Check(what, lengths[0], lengths[1], most, verdict, note)


def _version(row: Any) -> int | None:
    """The one policy that made a record; none if it is not known, or there were several."""
    if row.policy_versions is None:
        return None
    found = np.unique(np.asarray(row.policy_versions))
    return int(found[0]) if len(found) == 1 else None
