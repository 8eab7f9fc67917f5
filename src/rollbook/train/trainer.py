"""`Trainer`: the loop closed: make experience, keep it, lease it, learn from it, acknowledge it.

Invariant: what a step does follows from the seed, the step's number and the state before it; a run that was killed and
goes on from a checkpoint makes the same records, by the same ids, and learns the same from them. A record is
acknowledged once in the lineage of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollbook.algorithms.filters import zero_variance
from rollbook.algorithms.inputs import row_rewards
from rollbook.algorithms.kl import token_kl
from rollbook.book.book import Book
from rollbook.book.checkpoint import forget_checkpoint
from rollbook.book.errors import ConnectionLostError, OutcomeUnknownError
from rollbook.book.failpoints import hit
from rollbook.book.lease import Lease
from rollbook.compat.lightrft.maker import NaiveExperienceMaker
from rollbook.compat.lightrft.records import mask_unpredicted
from rollbook.core.checks import check_float, check_int
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import Stages, advise
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows
from rollbook.train import saving
from rollbook.train.algorithm import Algorithm
from rollbook.train.completing import check_maker, complete
from rollbook.train.intake import Intake
from rollbook.train.learner import Batching, Learned, Learner
from rollbook.train.optimizing import Optimizing

if TYPE_CHECKING:
    from rollbook.train.data import Prompts
    from rollbook.train.evaluating import Evaluation


class Exhausted(RuntimeError):
    """There is nothing more to learn from."""


class Fruitless(RuntimeError):
    """Of all that a step made, every sample failed, or none could be given its reward: more steps would be as vain."""


@dataclass(frozen=True)
class Report(Mapping[str, float]):
    """What a step was: its metrics by name.

    >>> report = Report(3, {"records": 1.0, "reward": 0.25, "loss": 0.5, "lr": 1e-6}, ["3/0/0/0/a"])
    >>> report["loss"], report
    (0.5, Report(step 3: 1 records, reward 0.25, loss 0.5, and 1 more))
    """

    step: int
    metrics: dict[str, float]
    uids: list[str]
    """The records that were learnt from."""

    def __getitem__(self, name: str) -> float:
        if name not in self.metrics and self.metrics.get("records") == 0:
            raise KeyError(f"{name}: step {self.step} trained on no records")
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __repr__(self) -> str:
        first = [name for name in ("reward", "success", "loss", "kl", "grad_norm") if name in self.metrics]
        numbers = [f"{name} {self.metrics[name]:.3g}" for name in first]
        more = len(self.metrics) - len(first) - ("records" in self.metrics)
        listed = [f"{len(self.uids)} records", *numbers, *([f"and {more} more"] if more else [])]
        return f"Report(step {self.step}: {', '.join(listed)})"


class Trainer:
    """A policy that gets better by its own experience, kept in a book.

    - `actor`: a `rollbook.models.Actor`. `maker`: whatever has `make_records(prompts, **generate)`: a
      `NaiveExperienceMaker`, an `EpisodeMaker`, a `SupervisedMaker`; `None`: others bring records to the book.
    - `book`: where records are kept and leased from. `algorithm`: an `Algorithm`, or a preset's name.
    - `prompts`: a `Prompts`; each step takes `groups` of them. `generate`: options of sampling (`max_tokens`, ...).
    - `critic`, `reference`, `teacher`: models that the algorithm may need; a reference that is needed and not given is
      the maker's, or the actor as it is now; with the KL in the reward the maker is given it, too.
    - `optimizer`, `critic_optimizer`, `batching`, `precision`, `nonfinite_limit`: the `Learner`'s.
    - `intake`: which records a step takes; `expert`: a book of an expert's, for `intake.expert_share`.
    - `trackers`: what metrics go to, beside the book; each has `log(step, metrics)`.
    - `folder`: where checkpoints go; training continues from the newest one in it, with the book rewound to that
      point. `keep`: how many of them to keep. `success`: the reward from which a response counts.

    >>> from rollbook import open
    >>> from rollbook.compat.lightrft.maker import NaiveExperienceMaker
    >>> from rollbook.models import Actor
    >>> from rollbook.train import Prompts, maker_config
    >>> from transformers import LlamaConfig
    >>> _ = torch.manual_seed(0)
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> how = Algorithm.of("grpo", n=4, kl_coef=0.0)
    >>> maker = NaiveExperienceMaker(actor, None, None, None, None, 8, None, config=maker_config(how, seed=0),
    ...                              reward_fn=lambda response_ids: response_ids[0] / 32)
    >>> prompts = Prompts([{"prompt": [5, 6]}, {"prompt": [7]}])
    >>> trainer = Trainer(actor, maker, open("memory:"), how, prompts=prompts, groups=2, generate={"max_tokens": 2})
    >>> report = trainer.step()
    >>> report.step, report["records"], trainer.book.counts().trained
    (1, 8.0, 8)
    """

    def __init__(
        self,
        actor: Any,
        maker: Any,
        book: Book,
        algorithm: Algorithm | str,
        *,
        prompts: Prompts | None = None,
        groups: int = 64,
        generate: Mapping[str, Any] | None = None,
        critic: Any = None,
        reference: Any = None,
        teacher: Any = None,
        optimizer: Optimizing | None = None,
        critic_optimizer: Optimizing | None = None,
        batching: Batching | None = None,
        precision: str = "float32",
        nonfinite_limit: int = 3,
        intake: Intake | None = None,
        expert: Book | None = None,
        seed: int = 0,
        trackers: Iterable[Any] = (),
        folder: Any = None,
        keep: int | None = None,
        success: float = 1.0,
    ) -> None:
        self.actor, self.maker, self.book = actor, maker, book
        self.algorithm = Algorithm.of(algorithm)
        self.prompts, self.groups = prompts, check_int("groups", groups, 1)
        self.generate = dict(generate or {})
        self.critic, self.teacher = critic, teacher
        self.reference, self._own_reference = self._reference(reference)
        self.intake = Intake() if intake is None else intake
        self.expert, self._experts = expert, list[str]()
        self.seed = check_int("seed", seed)
        self.trackers = list(trackers)
        self.folder = None if folder is None else Path(folder)
        self.keep = keep
        self.success = check_float("success", success)
        self.done = 0
        """How many steps were done: the version of the policy."""
        self.resumed_from: int | None = None
        """The step of the checkpoint that training continues from; `None` for a new run."""
        if maker is not None and prompts is None:
            raise ValueError("prompts: got None, expected some for the maker, or maker=None")
        if self.algorithm.needs_teacher and teacher is None:
            raise ValueError(f"teacher: got None, and {self.algorithm.name} ({self.algorithm.estimator}) needs one")
        if isinstance(maker, NaiveExperienceMaker) and self.algorithm.estimator is not None:
            check_maker(maker, self.algorithm, self.generate)
            if maker.kl_coef and maker.initial_model is None:
                maker.set_reference(self.reference)
        self.max_tokens: int | None = self.generate.get("max_tokens", self.generate.get("max_new_tokens"))
        self.learner = Learner(
            actor,
            self.algorithm,
            critic=critic,
            reference=self.reference,
            optimizer=optimizer,
            critic_optimizer=critic_optimizer,
            batching=batching,
            precision=precision,
            seed=self.seed,
            max_tokens=self.max_tokens,
            nonfinite_limit=nonfinite_limit,
        )
        book.consumer(self.intake.consumer, create=True, change=True, **self.intake.settings(self.seed))
        if not self.resume():
            self._announce()

    def _reference(self, reference: Any) -> tuple[Any, bool]:
        """The reference model, one for maker and learner, and whether it was made here."""
        makers = getattr(self.maker, "initial_model", None)
        if not self.algorithm.needs_reference:
            return reference, False
        if reference is not None and makers not in (None, reference):
            raise ValueError("reference: got another model than the maker's initial_model, expected the same one")
        if reference is not None or makers is not None:
            return makers if reference is None else reference, False
        return self.actor.reference(), True

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> Report:
        """Make experience, learn from it, acknowledge it; what that was like.

        If there is nothing to lease, the weights stay as they are, no step is counted, `report["records"]` is 0, and
        a warning says why.
        """
        step = self.done + 1
        begun = time.perf_counter()
        stages = Stages()
        with stages("make"):
            metrics, appended = self._make(step)
        with self._lease() as lease:
            with stages("take"):
                own = lease.experiences if len(lease) else None
            if own is None:
                self._warn_nothing_leased(step, metrics, appended)
                return Report(step, {**metrics, "records": 0.0, "waited_for": 1.0}, [])
            with stages("learn"):
                records, flags = self._beside(own, step)
                records = self.completed(records, flags)
                learned = self.learner.learn(
                    records, step=step, expert=flags, weights=self._weights(lease, len(records))
                )
            hit("learnt")
            with stages("acknowledge"):
                self._acknowledge(lease, step, self._told(lease, learned))
                hit("acknowledged")
                self.done = step
                self._announce()
        metrics |= self._measured(own) | learned.metrics | stages.metrics()
        metrics |= self._paced(own, time.perf_counter() - begun)
        if self.algorithm.kl_coef and self.algorithm.kl_in == "reward" and not self.algorithm.pairs:
            metrics["kl"] = self._divergence(records[: len(own)])
        # Without a reference, how far the step itself moved.
        moved = metrics.get("policy/ppo_kl", metrics.get("policy/usual/ppo_kl"))
        if "kl" not in metrics and moved is not None:
            metrics["kl"] = moved
        self.track(step, metrics)
        hit("stepped")
        return Report(step, metrics, lease.uids)

    def _make(self, step: int) -> tuple[dict[str, float], int]:
        """Bring a step's experience to the book; metrics, and how many records were new there."""
        if self.maker is None or self.prompts is None or (step - 1) % self.intake.make_every:
            return {}, 0
        missing, made, appended, dropped, lost = self.groups, 0, 0, 0, list[str | None]()
        for _ in range(1 + self.algorithm.refill):
            records = self.maker.make_records(self.prompts.take(missing, step), **self.generate)
            hit("made")
            appended += self.book.append(records).admitted
            hit("appended")
            made += len(records)
            lost.append(_lost(records))
            if not self.algorithm.drop_constant_groups:
                break
            constant = _constant(records)
            if constant:
                self.book.drop(constant, "constant group", consumer=self.intake.consumer)
            gone = len({uid.rsplit("/", 3)[0] for uid in constant})
            dropped += gone
            missing = gone
            if not missing:
                break
        if all(lost):
            raise Fruitless(f"step {step}: all {made} samples failed, or have no reward; the first: {lost[0]}")
        found = {name: value for name, value in dict(self.maker.metrics).items() if math.isfinite(value)}
        return {**found, "made": float(made), "dropped_groups": float(dropped)}, appended

    def _warn_nothing_leased(self, step: int, metrics: Mapping[str, float], appended: int) -> None:
        if "made" not in metrics:
            counts = self.book.counts(self.intake.consumer)
            reason = f"no records are waiting for consumer {counts.consumer!r}"
            if counts.waiting:
                reason = (
                    f"{counts.waiting} records are waiting for consumer {counts.consumer!r}, but none can be leased: "
                    "their groups are incomplete, or a limit of the book holds them back"
                )
            places = {"leased": counts.leased, "trained": counts.trained}
            places |= {f"dropped ({why})": count for why, count in counts.dropped.items()}
            listed = [f"{count} {place}" for place, count in places.items() if count]
            reason += f"; {', '.join(listed)}" if listed else ""
        elif not appended:
            reason = (
                f"the {metrics['made']:g} records it generated are in the book already, from an earlier run with this "
                "seed. Open another book, or pass that run's folder to continue it"
            )
        elif metrics["dropped_groups"]:
            reason = "in every group all rewards were equal, and such groups are dropped"
        else:
            reason = f"the book offers none of the {appended} new records; see book.counts()"
        advise(f"step {step} trained on nothing: {reason}")

    def _lease(self) -> Lease:
        by, count = "group", self.groups
        if self.algorithm.estimator is None:
            by = "experience"
        given = self.intake
        return self.book.lease(
            count, by=by, consumer=given.consumer, timeout=given.timeout, seconds=given.lease_seconds
        )

    def _acknowledge(self, lease: Lease, step: int, details: Mapping[str, Mapping[str, Any]]) -> None:
        """Acknowledge a step's records.

        The weights have changed already: while the book's server cannot be reached, try again, for as long as the
        lease lives.
        """
        end = time.monotonic() + self.intake.lease_seconds
        while True:
            try:
                lease.ack(step=step, details=details)
                return
            except (ConnectionLostError, OutcomeUnknownError) as error:
                if time.monotonic() >= end:
                    raise
                advise(f"step {step} is not acknowledged yet: {error}")

    @staticmethod
    def _weights(lease: Lease, count: int) -> list[float] | None:
        """A sampler's weights of a step's records; an expert's weigh 1."""
        found = lease.weights
        return None if found is None else found + [1.0] * (count - len(found))

    @staticmethod
    def _told(lease: Lease, learned: Learned) -> dict[str, dict[str, Any]]:
        """What the ledger is to say of each record: where it was, and what the sampler had it weigh."""
        told = dict(zip(lease.uids, learned.places, strict=False))
        for uid, weight in zip(lease.uids, lease.weights or (), strict=False):
            told[uid] = {**told[uid], "importance": weight}
        return told

    def _beside(self, own: Experiences, step: int) -> tuple[Experiences, list[bool] | None]:
        """A step's own records and an expert's beside them, and which are the expert's."""
        given = self.intake.experts(self.expert, len(own), seed=self.seed, step=step, known=self._experts)
        if given is None:
            return own, [False] * len(own) if self.algorithm.mixed else None
        both = Experiences([*own, *given])
        return both, [i >= len(own) for i in range(len(both))] if self.algorithm.mixed else None

    def completed(self, records: Experiences, expert: Sequence[bool] | None = None) -> Experiences:
        """Records with all that the algorithm learns from; `expert` says which of them an expert made."""
        return complete(
            records,
            self.algorithm,
            actor=self.actor,
            critic=self.critic,
            reference=self.reference,
            teacher=self.teacher,
            token_budget=self.learner.batching.token_budget,
            max_tokens=self.max_tokens,
            expert=expert,
        )

    def _announce(self) -> None:
        """Say which version the policy has: to the actor's own engine, and to the book. Of another engine whoever
        changes its weights says so: a server's are what they were."""
        engine = getattr(self.maker, "engine", None)
        if engine is not None and engine is self._own_engine():
            engine.version = self.done
        known = self.book.policy_version
        if known is None or known < self.done:
            self.book.announce(self.done)

    def _own_engine(self) -> Any:
        """Who samples with the weights that are trained; `None` of an actor that has no engine."""
        return getattr(self.actor, "engine", None)

    # --- what there is to say -------------------------------------------------------------------------------------

    def _measured(self, own: Experiences) -> dict[str, float]:
        """Means over a step's records."""
        rewards = row_rewards(own)
        known = rewards[~np.isnan(rewards)]
        lengths = own.token_lengths() - own.prompt_lengths()
        made = {"records": float(len(own))}
        if not self.algorithm.pairs:
            made["length"] = float(lengths.mean())
        if len(known):
            made |= {"reward": float(known.mean()), "success": float((known >= self.success).mean())}
        entropy = own.column("entropy")
        if isinstance(entropy, Ragged) and entropy.valid is None and len(entropy.values):
            made["entropy"] = float(np.asarray(entropy.values, dtype=np.float64).mean())
        versions = [value for value in own.values("policy_versions") if value is not None]
        oldest = [int(value) if isinstance(value, int) else int(value.min()) for value in versions if _any(value)]
        if oldest:
            made["staleness"] = float(self.done - 1 - np.mean(oldest))
        return made

    def _divergence(self, records: Experiences) -> float:
        """The mean over response tokens of the KL divergence that is taken off the reward."""
        columns = mask_unpredicted(records)
        policy, reference = Rows(columns.values("policy_logprobs")), Rows(columns.values("ref_logprobs"))
        masks = zip(columns.values("action_mask"), policy, strict=True)
        mask = Rows([torch.ones(len(row), dtype=torch.bool) if known is None else known for known, row in masks])
        divergence = token_kl(policy, reference, mask, estimator=self.algorithm.kl_estimator)
        return float(divergence.values[mask.values].mean()) if bool(mask.values.any()) else 0.0

    def _paced(self, own: Experiences, seconds: float) -> dict[str, float]:
        made = {"seconds": seconds, "tokens": float(own.token_lengths().sum())}
        made["tokens_per_second"] = made["tokens"] / max(seconds, 1e-9)
        if torch.cuda.is_available() and self.actor.device.type == "cuda":
            made["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.actor.device) / 2**30
        return made

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give metrics to the book and to all trackers."""
        self.book.log(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def evaluate(self, prompts: Prompts, reward: Any, **options: Any) -> Evaluation:
        """Sample held-out prompts with the policy as it is; kept in the book, never trained on, and tracked.

        `options` are those of `rollbook.train.evaluate`.
        """
        from rollbook.train.episodes import EpisodeMaker
        from rollbook.train.evaluating import evaluate, evaluated

        options = {"sampling": self.generate, **options}
        others: Any = getattr(self.maker, "engine", None)
        engine = self._own_engine() or others
        if engine is not others:
            engine.version = self.done
        if isinstance(self.maker, EpisodeMaker):
            sampling, runs = dict(options.pop("sampling")), options.pop("k", 1)
            self.maker.engine = engine
            try:
                records = self.maker.play(prompts.every(f"eval-{self.done}"), **{**sampling, "n": runs})
            finally:
                self.maker.engine = others
            self.book.append(records, evaluation=True)
            found = evaluated(records, step=self.done, **options)
        else:
            options = {"seed": self.seed, **options}
            found = evaluate(engine, prompts, reward, step=self.done, book=self.book, **options)
        hit("evaluated")
        self.track(self.done, found.metrics())
        return found

    # --- a run ----------------------------------------------------------------------------------------------------

    def run(
        self,
        steps: int,
        *,
        save_every: int | None = None,
        on_step: Callable[[Report], Any] | None = None,
    ) -> list[Report]:
        """Steps up to number `steps`, counted from the run's beginning; their reports.

        Saves before the first, every `save_every` of them and at the end, if there is a folder.
        """
        check_int("steps", steps)
        reports: list[Report] = []
        if self.folder is not None and self.done == 0 < steps and not saving.saved(self.folder):
            self.save()
        while self.done < steps:
            report = self.advance()
            reports.append(report)
            if on_step is not None:
                on_step(report)
            if self.folder is not None and save_every and self.done % save_every == 0 and self.done < steps:
                self.save()
        if self.folder is not None and reports:
            self.save()
        return reports

    def advance(self) -> Report:
        """A step of a run, which is counted whatever comes of it: where every group was dropped, the prompts are spent
        and the weights stay as they are. `Exhausted` where nobody makes records and the book has none to lease."""
        report = self.step()
        if not report["records"]:
            if self.maker is None:
                raise Exhausted(f"step {report.step}: {self.book.url} has nothing more to lease")
            self.done = report.step
            self._announce()
            self.track(report.step, report.metrics)
        return report

    def save(self) -> Path:
        """Write a checkpoint of everything, and name this point of the book."""
        if self.folder is None:
            raise ValueError("folder: got None, expected where checkpoints go")
        saving.mend(self.folder)
        found = saving.saved(self.folder)
        if found and found[-1].step > self.done:
            raise ValueError(
                f"folder: got {self.folder}, which has a checkpoint of step {found[-1].step}, and this is step "
                f"{self.done}, expected another folder, or resume() first"
            )
        name = saving.name_of(self.done)
        # What a folder speaks of is there until another one is in its place; what none speaks of was left by a death.
        held = {one.told()["book"] for one in found if one.step == self.done}
        name = f"{name}+" if name in held else name
        if any(point.name == name for point in self.book.checkpoints()):
            forget_checkpoint(self.book, name)
        self.book.checkpoint(name)
        hit("book's checkpoint")
        told: dict[str, Any] = {
            "seed": self.seed,
            "algorithm": self.algorithm.name,
            "book": name,
            "prompts": None if self.prompts is None else self.prompts.state_dict(),
            # What a builder may have chosen, and a model's folder does not say.
            "suppress": list(self.actor.suppress),
            "attention": getattr(self.actor.config, "_attn_implementation", None),
        }
        state: dict[str, Any] = {"learner": self.learner.state_dict()}
        norm = getattr(self.maker, "reward_norm", None)
        if norm is not None:
            state["reward_norm"] = norm.state_dict()
        made = saving.save(
            self.folder,
            self.done,
            actor=self.actor,
            critic=self.critic,
            state=state,
            told=told,
        )
        saving.prune(self.folder, self.keep)
        hit("before forgetting")
        there = {saving.name_of(one.step) for one in saving.saved(self.folder)}
        for point in self.book.checkpoints():
            # Also what a process would have forgotten that was killed before it came to this.
            own = point.name.removesuffix("+")
            if saving.is_name(own) and (own not in there or point.name in held):
                forget_checkpoint(self.book, point.name)
        return made.path

    def resume(self) -> bool:
        """Go on from the newest checkpoint in the folder, the book rewound to it; whether there was one.

        The constructor calls it. Records that came later are dropped from the book, and made again by the same ids;
        without a maker, others brought them, and they wait. A checkpoint that cannot be read is refused
        (`saving.Broken`): older weights are not taken in its place.
        """
        if self.folder is None:
            return False
        saving.mend(self.folder)
        found = saving.saved(self.folder)
        if not found:
            return False
        last = found[-1]
        told, state = last.told(), saving.load_state(last)
        if told["seed"] != self.seed:
            raise ValueError(f"seed: got {self.seed}, and the run at {self.folder} has {told['seed']}")
        if told["book"] not in [point.name for point in self.book.checkpoints()]:
            raise ValueError(
                f"book: {self.book.url} has no checkpoint {told['book']!r}, which {last.path} goes with, expected the "
                "book of that run"
            )
        if self.prompts is not None:
            self.prompts.load_state_dict(told["prompts"])
        saving.load_weights(self.actor, last.model)
        if self.critic is not None and last.critic is not None:
            saving.load_weights(self.critic, last.critic)
        if self._own_reference and isinstance(self.reference, torch.nn.Module) and found[0].step == 0:
            saving.load_weights(self.reference, found[0].model)
        self.learner.load_state_dict(state["learner"])
        if "reward_norm" in state:
            self.maker.reward_norm.load_state_dict(state["reward_norm"])
        self.book.rewind(told["book"], later="keep" if self.maker is None else "drop")
        self.done = last.step
        self._announce()
        self.resumed_from = last.step
        saving.put_random_state(state["random"])
        return True


def _lost(records: Experiences) -> str | None:
    """What went wrong with the first of the records, if something did with each of them."""
    errors = [info.get("error") or info.get("reward_error") for info in records.values("info")]
    return str(errors[0]) if errors and all(errors) else None


def _any(value: Any) -> bool:
    return isinstance(value, int) or len(value) > 0


def _constant(records: Experiences) -> list[str]:
    """The ids of records whose group's rewards are all equal."""
    ids = records.eids()
    kept = zero_variance(row_rewards(records), [eid.tid for eid in ids], [eid.rid for eid in ids]).keep
    return [eid.uid for eid, keep in zip(ids, kept.tolist(), strict=True) if not keep]
