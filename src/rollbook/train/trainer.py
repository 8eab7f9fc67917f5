"""`Trainer`: roll out, append to the book, lease, update, acknowledge.

Invariant: a step depends on the seed, its number and the state before it. A run that is resumed from a checkpoint
generates the same records, with the same ids, and computes the same updates. Every record that the weights were trained
on is acknowledged once.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rollbook.algorithms.inputs import row_rewards
from rollbook.algorithms.kl import token_kl
from rollbook.algorithms.shaping import RunningNorm
from rollbook.batch.columns import mask_unpredicted
from rollbook.book.book import Book
from rollbook.book.checkpoint import forget_checkpoint
from rollbook.book.disk import hit_failpoint
from rollbook.book.errors import ConflictError
from rollbook.book.lease import Lease
from rollbook.book.ledger import retry_outages
from rollbook.book.sampler import OldestPolicy
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import StepMetrics, warn_user
from rollbook.core.process_group import ProcessGroup
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows
from rollbook.core.sampling import Prompt, Sampling
from rollbook.models import Actor
from rollbook.models.head import text_config
from rollbook.models.protocols import LogprobModel, Policy, Trainable, ValueModel, check_model
from rollbook.rewards.recipes import as_reward
from rollbook.rollout.engine import BaseEngine, Engine
from rollbook.rollout.environment import EnvironmentConfig
from rollbook.rollout.transformers import TransformersEngine
from rollbook.rollout.weight_sync import check_sync
from rollbook.train import checkpoint
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.evaluation import AllSamplesFailedError
from rollbook.train.learner import Learner, MinibatchConfig, UpdateResult
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.pipeline import (
    Models,
    add_greedy_baseline,
    annotate,
    estimate,
    find_constant_groups,
    generate,
    generate_greedy,
    sample_errors,
    score,
)
from rollbook.train.replay_config import ReplayConfig
from rollbook.train.supervised import records_from_answers
from rollbook.train.worker import RolloutConfig, RolloutPacer

if TYPE_CHECKING:
    from rollbook.rewards.recipes import RewardLike
    from rollbook.train.evaluation import Evaluation
    from rollbook.train.prompts import Prompts
    from rollbook.train.tracker import Tracker

__all__ = ["OutOfDataError", "StepReport", "Trainer"]


def rollout_metrics(records: Experiences) -> dict[str, float]:
    """Compute counts and means over a rollout: `rollout/...` and `reward/...`, with a mean for each part of the reward.

    >>> from rollbook import Experience
    >>> rollout_metrics(Experiences([Experience(tokens=[1, 2, 3], reward=0.5)]))["rollout/response_length"]
    2.0
    """
    infos, reasons = records.values("info"), records.values("finish_reason")
    masks = mask_unpredicted(records).values("action_mask")
    lengths = [0 if mask is None else int(mask.sum()) for mask in masks]
    rewards = [math.nan if reward is None else reward for reward in records.values("reward")]
    metrics = {
        "rollout/samples": float(len(records)),
        "rollout/failed": float(reasons.count("error")),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/prompts_cut": float(np.mean(["prompt_truncated_from" in info for info in infos])),
        "rollout/truncated": float(np.mean([reason == "length" for reason in reasons])),
        "reward/errors": float(sum(["reward_error" in info for info in infos])),
    }
    finite = [reward for reward in rewards if not math.isnan(reward)]
    if finite:
        metrics |= {"reward/mean": float(np.mean(finite)), "reward/std": float(np.std(finite))}
    parts = records.values("metrics")
    for name in dict.fromkeys([name for info in infos for name in info.get("reward_parts") or ()]):
        numbers = [part[name] for part in parts if name in part and not math.isnan(part[name])]
        if numbers:
            metrics[f"reward/{name}"] = float(np.mean(numbers))
    return metrics


def record_metrics(
    records: Experiences, *, version: int, success: float = 1.0, pairs: bool = False
) -> dict[str, float]:
    """Compute means over the records of a step.

    Args:
        records: The records.
        version: The policy's version when the step began, for `staleness`.
        success: Minimum reward of a success.
        pairs: Whether they are pairs of answers, which have no response length.
    """
    rewards = row_rewards(records)
    finite = rewards[~np.isnan(rewards)]
    metrics = {"records": float(len(records))}
    if not pairs:
        metrics["length"] = float((records.token_lengths() - records.prompt_lengths()).mean())
    if len(finite):
        metrics |= {"reward": float(finite.mean()), "success": float((finite >= success).mean())}
    entropy = records.column("entropy")
    if isinstance(entropy, Ragged) and entropy.valid is None and len(entropy.values):
        metrics["entropy"] = float(np.asarray(entropy.values, dtype=np.float64).mean())
    versions = [number for number in records.values("policy_versions") if number is not None]
    oldest = [
        number if isinstance(number, int) else int(number.min())
        for number in versions
        if isinstance(number, int) or len(number)
    ]
    if oldest:
        metrics["staleness"] = float(version - np.mean(oldest))
    return metrics


def mean_divergence(records: Experiences, estimator: str) -> float:
    """Compute the mean KL divergence from the reference over response tokens, by the columns of the records."""
    columns = mask_unpredicted(records)
    policy, reference = Rows(columns.values("old_logprobs")), Rows(columns.values("ref_logprobs"))
    masks = zip(columns.values("action_mask"), policy, strict=True)
    mask = Rows([torch.ones(len(row), dtype=torch.bool) if row_mask is None else row_mask for row_mask, row in masks])
    divergence = token_kl(policy, reference, mask, estimator=estimator)
    return float(divergence.values[mask.values].mean()) if bool(mask.values.any()) else 0.0


class OutOfDataError(RollbookError, RuntimeError):
    """Raised when there are no prompts and the book has no records to lease."""


@dataclass(frozen=True)
class StepReport(Mapping[str, float]):
    """Metrics of a step, by name.

    Args:
        step: Number of the step.
        metrics: The metrics.
        uids: Ids of the records that were trained on.

    >>> report = StepReport(3, {"records": 1.0, "reward": 0.25, "loss": 0.5, "lr": 1e-6}, ["3/0/0/0/a"])
    >>> report["loss"], report
    (0.5, StepReport(step 3: 1 records, reward 0.25, loss 0.5, and 1 more))
    """

    step: int
    metrics: dict[str, float]
    uids: list[str]

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
        return f"StepReport(step {self.step}: {', '.join(listed)})"


class Trainer:
    """Trains a policy on its own rollouts, or on records that others append, kept in a book.

    Args:
        actor: The policy: a `rollbook.models.Actor`, or another `rollbook.models.Policy`.
        algorithm: An `AlgorithmConfig`, or the name of a preset.
        book: Where records are kept and leased from.
        prompts: What rollouts (or, for supervised algorithms, given answers) come from; `None`: others append records.
        reward: Scores rollouts: anything that `rollbook.rewards.as_reward` accepts.
        engine: Generates rollouts; for an `Actor`, by default a `TransformersEngine` with its weights.
        sync_every: Send weights every N steps to a `BaseEngine` with its own copy (`engine.takes_weights`). After each
            update `check_sync` compares log-probs. `None`: never.
        sync_tolerance: Tolerance of that check; by default by the dtype of the weights.
        environment: For multi-turn episodes. With a `reward` too, the two are added.
        rollouts: Rollout workers in other processes generate and score (`RolloutWorker`); `None`: this trainer does.
        sampling: Sampling options; the number of responses per prompt is the algorithm's, the seed the trainer's.
        prompts_per_step: Prompts (groups) of a step.
        critic: The value model, if the algorithm needs one.
        reference: The reference model, if the algorithm needs one; by default the actor as it is now.
        teacher: The teacher, if the algorithm needs one.
        optimizer: See `Learner`; so are `critic_optimizer`, `minibatch`, `precision` and `nonfinite_limit`.
        replay: Which records a step takes.
        expert: A book of an expert's records, for `replay.expert_share`.
        seed: The seed of every random choice.
        trackers: Receive metrics, in addition to the book; each has `log(step, metrics)`.
        checkpoints: Where and when to write checkpoints: a `CheckpointConfig`, or a folder for checkpoints before the
            first step and after the last. Training continues from the newest one in the folder, with the book rewound
            to it.
        success: Minimum reward of a success.

    >>> from rollbook import open
    >>> from rollbook.models import Actor
    >>> from rollbook.train import Prompts
    >>> from transformers import LlamaConfig
    >>> _ = torch.manual_seed(0)
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> trainer = Trainer(
    ...     actor, AlgorithmConfig.preset("grpo", group_size=4, kl_coef=0.0), open("memory:"),
    ...     prompts=Prompts([{"prompt": [5, 6]}, {"prompt": [7]}]), prompts_per_step=2,
    ...     reward=lambda response_ids: response_ids[0] / 32, sampling={"max_tokens": 2},
    ... )
    >>> report = trainer.step()
    >>> report.step, report["records"], trainer.book.counts().trained
    (1, 8.0, 8)
    """

    process_group: ProcessGroup | None = None
    """The processes over which statistics are computed; `None`: all that `torch.distributed` has."""

    def __init__(
        self,
        actor: Policy,
        algorithm: AlgorithmConfig | str,
        book: Book,
        *,
        prompts: Prompts | None = None,
        reward: RewardLike | None = None,
        engine: Engine | None = None,
        sync_every: int | None = 1,
        sync_tolerance: float | None = None,
        environment: EnvironmentConfig | None = None,
        rollouts: RolloutConfig | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        prompts_per_step: int = 64,
        critic: ValueModel | None = None,
        reference: LogprobModel | None = None,
        teacher: LogprobModel | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        critic_optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        minibatch: MinibatchConfig | None = None,
        precision: str = "float32",
        nonfinite_limit: int = 3,
        replay: ReplayConfig | None = None,
        expert: Book | None = None,
        seed: int = 0,
        trackers: Iterable[Tracker] = (),
        checkpoints: CheckpointConfig | str | Path | None = None,
        success: float = 1.0,
    ) -> None:
        check_model("actor", actor, Policy)
        if teacher is not None:
            check_model("teacher", teacher, LogprobModel)
        self.actor, self.book = actor, book
        self.algorithm = AlgorithmConfig.preset(algorithm)
        self.seed = check_int("seed", seed)
        self.prompts, self.prompts_per_step = prompts, check_int("prompts_per_step", prompts_per_step, 1)
        self.reward = None if reward is None else as_reward(reward)
        self.environment = environment
        self._own_engine = TransformersEngine(actor) if isinstance(actor, Actor) else None
        """Engine over the weights that are trained; `None` if the policy is not an `Actor`."""
        self.engine: Any = self._own_engine if engine is None else engine
        self.sync_every = None if sync_every is None else check_int("sync_every", sync_every, 1)
        self.sync_tolerance = sync_tolerance
        self._synced: int | None = None  # step whose weights the engine has
        self.sampling = self._sampling(sampling)
        self.max_response_tokens = self.sampling.max_tokens * (1 if environment is None else environment.max_turns)
        """Longest response, over all turns of an episode."""
        self._own_reference = self.algorithm.needs_reference and reference is None
        self.models = Models(actor, self._copy_actor() if self._own_reference else reference, critic, teacher)
        norm = self.algorithm.reward_norm
        self.reward_norm = None if norm is None else RunningNorm(minus_mean=norm == "mean_std")
        self.replay = ReplayConfig() if replay is None else replay
        self.pacer: RolloutPacer | None = None
        """Paces the rollout workers; `None` if this trainer generates."""
        if rollouts is not None:
            self.pacer = RolloutPacer(
                book, rollouts, prompts_per_step=self.prompts_per_step, consumer=self.replay.consumer
            )
        self._lease_by = "experience" if self.algorithm.estimator is None else "group"
        # In mode `sync`, workers sample from the policy before the update: recomputed as by `collect`, a step equals
        # that of a trainer without workers.
        is_current = rollouts is not None and rollouts.mode == "sync"
        self._old_logprobs: Literal["recompute", "engine"] = (
            "engine" if self.algorithm.correction is None and not is_current else "recompute"
        )
        """Where the policy log-probs of leased records without any come from."""
        self._retry: Callable[..., Any] = operator.call if self.pacer is None else retry_outages
        """Calls the book; with rollout workers, repeats the call while the book's server does not respond."""
        self.expert, self._expert_uids = expert, list[str]()
        self.trackers = list(trackers)
        self.checkpoints = CheckpointConfig(Path(checkpoints)) if isinstance(checkpoints, (str, Path)) else checkpoints
        self.success = check_float("success", success)
        self.global_step = 0
        """Number of finished steps, which is the version of the policy."""
        self.last_step: int | None = None
        """Number of the last step of the run, if it is known: workers do not generate for steps after it."""
        self.resumed_from: int | None = None
        """The step of the checkpoint that training continues from; `None` for a new run."""
        self._check_arguments()
        self.learner = self._build_learner(
            critic=critic,
            reference=self.models.reference,
            optimizer=optimizer,
            critic_optimizer=critic_optimizer,
            minibatch=minibatch,
            precision=precision,
            seed=self.seed,
            max_tokens=None if sampling is None and prompts is None else self.sampling.max_tokens,
            nonfinite_limit=nonfinite_limit,
        )
        self._start()

    def _copy_actor(self) -> LogprobModel:
        """Return the reference: the actor as it is now."""
        copy_of = getattr(self.actor, "reference", None)
        if copy_of is None:
            raise ValueError(
                f"reference: missing, required by {self.algorithm.name}; {type(self.actor).__name__} has no reference()"
            )
        reference: LogprobModel = copy_of()
        return reference

    def _build_learner(self, **options: Any) -> Learner:
        return Learner(self.actor, self.algorithm, **options)

    def _start(self) -> None:
        """Open the consumer group, and continue from the last checkpoint if there is one."""
        settings = self.replay.settings(self.seed)
        if self.pacer is not None:
            settings |= {"sampler": OldestPolicy(), "max_staleness": self.pacer.config.staleness_bound}
        self.book.consumer(self.replay.consumer, create=True, change=True, **settings)
        if not self.resume():
            self._announce(rollouts={"next_group": 0})

    def _check_arguments(self) -> None:
        """Raise `ValueError` if the arguments do not fit together."""
        algorithm = self.algorithm
        if algorithm.needs_teacher and self.models.teacher is None:
            raise ValueError(f"teacher: missing, required by {algorithm.name} ({algorithm.estimator})")
        if self.pacer is not None:
            if self.prompts is None or not algorithm.needs_rollouts:
                raise ValueError(f"rollouts: got workers, but {algorithm.name} has no prompts to generate rollouts for")
            if self.replay.kind != "on_policy":
                raise ValueError(f"rollouts: got workers with replay.kind {self.replay.kind!r}, expected 'on_policy'")
        if self.prompts is None:
            if self.reward is not None:
                raise ValueError("prompts: missing, required by the reward, which scores rollouts")
            return
        if algorithm.group_size == 1 and algorithm.needs_groups:
            raise ValueError(
                f"algorithm.group_size: got 1, and {algorithm.name} ({algorithm.estimator}) compares the responses to "
                "a prompt, expected at least 2"
            )
        if algorithm.needs_rollouts and self.engine is None:
            raise ValueError(f"engine: missing, required by {algorithm.name} with a {type(self.actor).__name__}")
        if algorithm.needs_rollouts and algorithm.takes_rewards and self.reward is None and self.environment is None:
            raise ValueError(
                f"reward: missing, required by {algorithm.name} ({algorithm.estimator}), unless there is an environment"
            )

    def _sampling(self, options: Sampling | Mapping[str, Any] | None) -> Sampling:
        """Sampling options with the algorithm's number of responses, and by default the actor's temperature."""
        temperature = getattr(self.actor, "temperature", 1.0)
        sampling = (
            options if isinstance(options, Sampling) else Sampling.of({"temperature": temperature, **(options or {})})
        )
        if sampling.n not in (1, self.algorithm.group_size):
            raise ValueError(
                f"sampling.n: got {sampling.n}, expected algorithm.group_size, {self.algorithm.group_size}"
            )
        if sampling.temperature not in (0, temperature):
            warn_user(
                f"temperature: samples are drawn at {sampling.temperature:g} and the actor's log-probs are at "
                f"{temperature:g}; Actor(temperature={sampling.temperature:g}) makes them one"
            )
        return Sampling.of(
            sampling, n=self.algorithm.group_size, seed=self.seed if sampling.seed is None else sampling.seed
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Roll out, lease, update, acknowledge.

        Returns:
            The metrics of the step. If there is nothing to lease, the weights stay as they are, no step is counted,
            `report["records"]` is 0, and a warning gives the reason.
        """
        step, metrics = self.global_step + 1, StepMetrics()
        start_time = time.perf_counter()
        appended = None
        with metrics.time("collect"):
            if self.pacer is not None:
                lease = self.pacer.lease(
                    self.global_step, by=self._lease_by, seconds=self.replay.lease_seconds, steps_left=self._steps_left
                )
            else:
                if self.prompts is not None and (step - 1) % self.replay.rollout_interval == 0:
                    self._sync_engine(metrics)
                    appended = self._rollout(self.prompts, step, metrics)
                lease = self.book.lease(
                    self.prompts_per_step,
                    by=self._lease_by,
                    consumer=self.replay.consumer,
                    timeout=self.replay.timeout,
                    seconds=self.replay.lease_seconds,
                )
        with lease:
            with metrics.time("lease"):
                leased = self._retry(attrgetter("experiences"), lease) if len(lease) else None
            if leased is None:
                self._warn_nothing_leased(step, metrics.values(), appended)
                return StepReport(step, metrics.values(records=0.0), [])
            uids = lease.uids
            if self.pacer is not None:
                leased = _sort_rollouts(leased)
                uids = [eid.uid for eid in leased.eids()]
                self._check_rollouts(self.pacer, leased, step, metrics)
            with metrics.time("update"):
                self._release_memory()
                records, expert, weights = self._with_experts(leased, lease.weights, step)
                records = self.compute_missing_columns(records, expert)
                result = self.learner.update(records, step=step, expert=expert, weights=weights)
            hit_failpoint("learned")
            with metrics.time("acknowledge"):
                self._acknowledge(lease, uids, step, result)
                hit_failpoint("acknowledged")
                self.global_step = step
                self._announce(metrics)
        metric_records = leased if self.pacer is None else records[: len(leased)]
        metrics.add(
            record_metrics(metric_records, version=step - 1, success=self.success, pairs=self.algorithm.pairs),
            result.metrics,
        )
        self._add_metrics(metrics, leased, records[: len(leased)], time.perf_counter() - start_time)
        self.track(step, metrics.values())
        hit_failpoint("stepped")
        return StepReport(step, metrics.values(), uids)

    @property
    def _steps_left(self) -> int | None:
        return None if self.last_step is None else max(self.last_step - self.global_step, 0)

    def _check_rollouts(self, pacer: RolloutPacer, leased: Experiences, step: int, metrics: StepMetrics) -> None:
        """Add the metrics of what workers generated; raise `AllSamplesFailedError` if none of it can be trained on."""
        pacer.report(state="training", version=self.global_step, step=step, records=len(leased))
        metrics.add(rollout_metrics(leased), pacer.metrics())
        errors = sample_errors(leased)
        if all(errors):
            raise AllSamplesFailedError(
                f"step {step}: all {len(errors)} samples failed, or have no reward; the first: {errors[0]}"
            )

    def collect(self, prompts: Sequence[Prompt], metrics: StepMetrics | None = None) -> Experiences:
        """Make the records of prompts: rollouts with rewards and advantages, or given answers.

        Args:
            prompts: The prompts.
            metrics: Collects timings, counts and means.

        Returns:
            The records, with every column that the algorithm reads.
        """
        metrics = StepMetrics() if metrics is None else metrics
        if not self.algorithm.needs_rollouts:
            return self._answers(prompts, metrics)
        records = self._sample(prompts, metrics)
        metrics.add(rollout_metrics(records))
        records = annotate(
            records, self.algorithm, self.models, token_budget=self.learner.minibatch.token_budget, metrics=metrics
        )
        return self._estimate(records, metrics)

    def _sample(self, prompts: Sequence[Prompt], metrics: StepMetrics) -> Experiences:
        """Generate and score rollouts."""
        records = generate(self.engine, prompts, self.sampling, self.environment, metrics=metrics)
        tokenizer = self.models.tokenizer or getattr(self.engine, "tokenizer", None)
        if self.reward is not None:
            records = score(records, self.reward, tokenizer, prompts=prompts, metrics=metrics)
        greedy = generate_greedy(
            self.engine,
            prompts,
            self.sampling,
            self.algorithm,
            environment=self.environment,
            reward=self.reward,
            tokenizer=tokenizer,
        )
        return records if greedy is None else add_greedy_baseline(records, greedy)

    def _estimate(self, records: Experiences, metrics: StepMetrics) -> Experiences:
        return estimate(
            records,
            self.algorithm,
            max_tokens=self.max_response_tokens,
            reward_norm=self.reward_norm,
            process_group=self.process_group,
            metrics=metrics,
        )

    def _answers(self, prompts: Sequence[Prompt], metrics: StepMetrics) -> Experiences:
        positions = getattr(text_config(self.actor), "max_position_embeddings", None)
        longest = self.sampling.max_prompt_tokens
        limits = [positions, None if longest is None else longest + self.sampling.max_tokens]
        return records_from_answers(
            prompts,
            self.models.tokenizer,
            "pairs" if self.algorithm.pairs else "answers",
            processor=getattr(self.actor, "processor", None),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            max_prompt_tokens=longest,
            prompt_overflow=self.sampling.prompt_overflow,
            metrics=metrics,
        )

    def _rollout(self, prompts: Prompts, step: int, metrics: StepMetrics) -> int:
        """Append the records of a step to the book, with refill rounds, and return how many were new."""
        missing, collected, appended, dropped, failures = self.prompts_per_step, 0, 0, 0, list[str | None]()
        for _ in range(1 + self.algorithm.refill):
            records = self.collect(prompts.take(missing, step), metrics)
            hit_failpoint("collected")
            try:
                appended += self.book.append(records).admitted
            except ConflictError as error:
                raise ConflictError(
                    f"step {step}: the book has other records of this step, from another run with this seed. To "
                    f"continue that run, pass its folder as checkpoints; for a new run, open another book ({error})"
                ) from error
            hit_failpoint("appended")
            collected += len(records)
            errors = sample_errors(records)
            failures.append(str(errors[0]) if errors and all(errors) else None)
            if not self.algorithm.drop_constant_groups:
                break
            ids = records.eids()
            constant = [ids[row] for row in find_constant_groups(records)]
            if constant:
                self.book.drop([eid.uid for eid in constant], "constant group", consumer=self.replay.consumer)
            missing = len({eid.tid for eid in constant})
            dropped += missing
            if not missing:
                break
        if all(failures):
            raise AllSamplesFailedError(
                f"step {step}: all {collected} samples failed, or have no reward; the first: {failures[0]}"
            )
        metrics.add({"collected": float(collected), "dropped_groups": float(dropped)})
        return appended

    def _warn_nothing_leased(self, step: int, metrics: Mapping[str, float], appended: int | None) -> None:
        if appended is None:
            counts = self.book.counts(self.replay.consumer)
            reason = f"no records are waiting for consumer {counts.consumer!r}"
            if counts.waiting:
                reason = (
                    f"{counts.waiting} records are waiting for consumer {counts.consumer!r}, but none can be leased: "
                    "their groups are incomplete, or a limit of the book holds them back"
                )
            places = {"leased": counts.leased, "trained": counts.trained}
            places |= {f"dropped ({drop_reason})": count for drop_reason, count in counts.dropped.items()}
            listed = [f"{count} {queue_state}" for queue_state, count in places.items() if count]
            reason += f"; {', '.join(listed)}" if listed else ""
        elif not appended:
            reason = (
                f"the {metrics['collected']:g} records it generated are in the book already, from an earlier run with "
                "this seed. Open another book, or pass that run's folder to continue it"
            )
        elif metrics["dropped_groups"]:
            reason = "in every group all rewards were equal, and such groups are dropped"
        else:
            reason = f"the book offers none of the {appended} new records; see book.counts()"
        warn_user(f"step {step}: no records to train on: {reason}")

    def _acknowledge(self, lease: Lease, uids: Sequence[str], step: int, result: UpdateResult) -> None:
        """Acknowledge the records of a step, with their places in the update and their sampling weights.

        The weights of the model have changed already: while the book's server cannot be reached, try again until the
        lease expires.

        Args:
            lease: The lease.
            uids: Ids of its records, in the order of the update.
            step: The step.
            result: Result of the update.
        """
        details = result.placements_by_uid(uids)
        if self.pacer is not None:
            details = {uid: {**details[uid], "row": row} for row, uid in enumerate(uids)}
        for uid, weight in zip(lease.uids, lease.weights or (), strict=False):
            details[uid] = {**details[uid], "importance": weight}
        retry_outages(lease.ack, step=step, details=details, outage_seconds=self.replay.lease_seconds)

    def _with_experts(
        self, leased: Experiences, weights: list[float] | None, step: int
    ) -> tuple[Experiences, list[bool] | None, list[float] | None]:
        """Append expert records to those of a step.

        Args:
            leased: The leased records.
            weights: [N] Sampling weights of the leased records; expert records have weight 1.
            step: The step.

        Returns:
            The records, which of them are the expert's (for mixed losses), and their weights.
        """
        records, flags = leased, None
        if self.replay.expert_share:
            experts = self.replay.experts(self.expert, len(leased), seed=self.seed, step=step, uids=self._expert_uids)
            records = Experiences([*leased, *experts])
        if self.algorithm.mixed:
            flags = [i >= len(leased) for i in range(len(records))]
        if weights is not None:
            weights = weights + [1.0] * (len(records) - len(leased))
        return records, flags, weights

    def compute_missing_columns(self, records: Experiences, expert: Sequence[bool] | None = None) -> Experiences:
        """Add the columns that the algorithm reads and the records lack.

        Args:
            records: Leased records; those made by `collect` have all columns.
            expert: Which of them an expert made.

        Returns:
            The records with the added columns.
        """
        records = annotate(
            records,
            self.algorithm,
            self.models,
            old_logprobs=self._old_logprobs,
            token_budget=self.learner.minibatch.token_budget,
        )
        return estimate(
            records,
            self.algorithm,
            max_tokens=self.max_response_tokens,
            reward_norm=None if self.pacer is None else self.reward_norm,  # else they were normalized by `collect`
            process_group=self.process_group,
            expert=expert,
        )

    def _announce(self, metrics: StepMetrics | None = None, *, rollouts: Mapping[str, Any] | None = None) -> None:
        """Set the policy version of the book, and of the engine if it samples from the trained weights.

        The version of another engine, such as a server, is set by the process that changes its weights. Rollout workers
        can get the weights before the version is announced.

        Args:
            metrics: Collects the time of the weight update.
            rollouts: Arguments of `RolloutPacer.open`, when training begins or continues. Workers may claim groups only
                after the weights are published: otherwise they would sample from those of a run that was killed. New
                groups are allowed by the first step, after the first checkpoint: a run that is killed before has no
                records and can begin again.
        """
        if self._own_engine is not None and self.engine is self._own_engine:
            self._own_engine.version = self.global_step
        if self.pacer is not None:
            self._sync_engine(StepMetrics() if metrics is None else metrics)
            if getattr(self.engine, "is_remote", False):
                self.pacer.publish_served(self.engine, self.global_step)
            else:
                self._publish(self.pacer)
            if rollouts is not None:
                self.pacer.open(**rollouts)
        announced = self._retry(attrgetter("policy_version"), self.book)
        if announced is None or announced < self.global_step:
            self._retry(self.book.announce, self.global_step)
        if self.pacer is not None and rollouts is None:
            self.pacer.pace(self._steps_left)

    def _publish(self, pacer: RolloutPacer) -> None:
        """Publish the weights for rollout workers."""
        pacer.publish(self.actor, self.global_step)

    def _sync_engine(self, metrics: StepMetrics) -> None:
        """Send the weights to an engine that does not share them, every `sync_every` steps, and check that it has them.

        Raises:
            StaleWeightsError: The engine samples from other weights after the update.
        """
        engine, every = self.engine, self.sync_every
        if engine is self._own_engine or every is None or not getattr(engine, "takes_weights", False):
            return
        if self._synced is not None and self.global_step - self._synced < every:
            return
        with metrics.time("sync"):
            difference = self._send_weights(self.global_step)
        self._synced = self.global_step
        metrics.add({"sync/logprob_difference": difference})

    def _release_memory(self) -> None:
        """Free the memory of the engines before an update; evaluations may sample from one of their own."""
        for engine in (self.engine, self._own_engine):
            if isinstance(engine, BaseEngine):
                engine.release_memory()

    def _send_weights(self, version: int) -> float:
        """Send the weights to the engine, check that it has them, and return the mean difference of log-probs."""
        self.engine.update_weights(self.actor, version)
        return check_sync(self.engine, self.actor, version, tolerance=self.sync_tolerance)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _add_metrics(self, metrics: StepMetrics, leased: Experiences, trained: Experiences, seconds: float) -> None:
        """Add `kl`, the throughput and the peak memory of a step.

        `kl` is the divergence from the reference or, without a reference, from the policy before the update.
        """
        tokens = float(leased.token_lengths().sum())
        metrics.add({"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / max(seconds, 1e-9)})
        if torch.cuda.is_available() and self.actor.device.type == "cuda":
            metrics.add({"peak_memory_gib": torch.cuda.max_memory_allocated(self.actor.device) / 2**30})
        algorithm, numbers = self.algorithm, metrics.values()
        if algorithm.kl_coef and algorithm.kl_in == "reward" and not algorithm.pairs:
            metrics.add({"kl": mean_divergence(trained, algorithm.kl_estimator)})
        elif "kl" not in numbers:
            moved = numbers.get("policy/ppo_kl", numbers.get("policy/usual/ppo_kl"))
            metrics.add({} if moved is None else {"kl": moved})

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give metrics to the book and to all trackers.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        self._retry(self.book.log, step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def evaluate(self, prompts: Prompts, reward: RewardLike | None = None, **options: Any) -> Evaluation:
        """Evaluate the current policy on held-out prompts. Records go to the book, metrics to the trackers.

        Args:
            prompts: The prompts.
            reward: Scores the samples; may be missing if there is an environment.
            options: Those of `rollbook.train.evaluate`.

        Returns:
            The evaluation.
        """
        from rollbook.train.evaluation import append_evaluation, evaluate

        engine = self._own_engine or self.engine
        if engine is not self.engine:
            engine.version = self.global_step
        settings = {"sampling": self.sampling, "seed": self.seed, "environment": self.environment, **options}
        scored = evaluate(engine, prompts, reward, step=self.global_step, **settings)
        evaluation: Evaluation = self._retry(append_evaluation, scored, self.book)
        hit_failpoint("evaluated")
        self.track(self.global_step, evaluation.metrics())
        return evaluation

    # --- a run ----------------------------------------------------------------------------------------------------

    def run(
        self,
        steps: int,
        *,
        on_step: Callable[[StepReport], Any] | None = None,
    ) -> list[StepReport]:
        """Run steps up to number `steps`, counted from the run's beginning.

        With `checkpoints`, saves before the first step, every `interval` steps and after the last one.

        Args:
            steps: Number of the last step.
            on_step: Called with the report of each step.

        Returns:
            The reports of the steps.
        """
        self.last_step = check_int("steps", steps)
        reports: list[StepReport] = []
        saving = self.checkpoints
        if saving is not None and self.global_step == 0 < steps and not checkpoint.list_checkpoints(saving.folder):
            self.save()
        while self.global_step < steps:
            report = self.advance()
            reports.append(report)
            if on_step is not None:
                on_step(report)
            is_due = saving is not None and saving.interval and self.global_step % saving.interval == 0
            if is_due and self.global_step < steps:
                self.save()
        if saving is not None and saving.save_final and reports:
            self.save()
        return reports

    def advance(self) -> StepReport:
        """Run a step and count it, also if every group was dropped and the weights do not change.

        Raises:
            OutOfDataError: There are no prompts, and the book has no records to lease.
        """
        report = self.step()
        if not report["records"]:
            if self.prompts is None:
                raise OutOfDataError(f"step {report.step}: {self.book.url} has nothing more to lease")
            self.global_step = report.step
            self._announce()
            self.track(report.step, report.metrics)
        return report

    def save(self) -> Path:
        """Write a checkpoint of the run and of the book, and return its folder."""
        if self.checkpoints is None:
            raise ValueError("checkpoints: missing; pass CheckpointConfig(folder) to the trainer")
        folder = self.checkpoints.folder
        checkpoint.remove_partial(folder)
        saved = checkpoint.list_checkpoints(folder)
        if saved and saved[-1].step > self.global_step:
            raise ValueError(
                f"checkpoints.folder: got {folder}, which has a checkpoint of the later step {saved[-1].step}, at step "
                f"{self.global_step}, expected another folder, or resume() first"
            )
        name = checkpoint.checkpoint_name(self.global_step)
        # The book's checkpoint that a folder refers to is kept until the folder is replaced.
        replaced = {entry.trainer_state()["book"] for entry in saved if entry.step == self.global_step}
        name = f"{name}+" if name in replaced else name
        # Read before the book's checkpoint: groups that are finished in between are found in the book.
        rollouts = None if self.pacer is None else self.pacer.state()
        self._retry(self._forget_checkpoint, name)
        self._retry(self.book.checkpoint, name)
        hit_failpoint("book's checkpoint")
        trainer_state: dict[str, Any] = {
            "seed": self.seed,
            "algorithm": self.algorithm.name,
            "book": name,
            "prompts": None if self.prompts is None else self.prompts.state_dict(),
            "rollouts": rollouts,
            # Settings of a builder's actor that the folder of the model does not contain.
            "suppress": list(getattr(self.actor, "suppress", ())),
            "attention": getattr(getattr(self.actor, "config", None), "_attn_implementation", None),
        }
        state: dict[str, Any] = {"learner": self.learner.state_dict()}
        if self.reward_norm is not None:
            state["reward_norm"] = self.reward_norm.state_dict()
        return self._write(folder, state, trainer_state, replaced)

    def _write(
        self, folder: Path, state: Mapping[str, Any], trainer_state: Mapping[str, Any], replaced: set[str]
    ) -> Path:
        """Write the files of a checkpoint, then remove old checkpoints.

        Args:
            folder: Folder of the run.
            state: Content of `state.pt`.
            trainer_state: Content of `trainer.json`.
            replaced: Checkpoints of the book that an earlier checkpoint of this step refers to.
        """
        written = checkpoint.save(
            folder,
            self.global_step,
            actor=self.actor,
            critic=self.models.critic,
            state=state,
            trainer_state=trainer_state,
        )
        self._prune(folder, replaced)
        return written.path

    def _prune(self, folder: Path, replaced: set[str]) -> None:
        """Remove old checkpoints of the run, then those of the book that no folder refers to."""
        keep = None if self.checkpoints is None else self.checkpoints.keep_last
        checkpoint.prune(folder, keep)
        hit_failpoint("before forgetting")
        existing = {checkpoint.checkpoint_name(entry.step) for entry in checkpoint.list_checkpoints(folder)}
        for point in self._retry(self.book.checkpoints):
            # Includes those of a process that was killed before it removed them.
            base_name = point.name.removesuffix("+")
            if checkpoint.is_checkpoint_name(base_name) and (base_name not in existing or point.name in replaced):
                self._retry(self._forget_checkpoint, point.name)

    def _forget_checkpoint(self, name: str) -> None:
        """Forget a checkpoint of the book, if it has it."""
        if any(point.name == name for point in self.book.checkpoints()):
            forget_checkpoint(self.book, name)

    def resume(self) -> bool:
        """Continue from the newest checkpoint in the folder, and rewind the book to it. Called by the constructor.

        Later records are dropped from the book and generated again with the same ids. Without prompts, other processes
        appended them, and they stay.

        Returns:
            Whether there was a checkpoint.

        Raises:
            CorruptCheckpointError: The newest checkpoint cannot be read. Older ones are not used instead.
            ValueError: The seed differs, or the book is not that of the run.
        """
        if self.checkpoints is None:
            return False
        folder = self.checkpoints.folder
        checkpoint.remove_partial(folder)
        saved = checkpoint.list_checkpoints(folder)
        if not saved:
            return False
        last = saved[-1]
        trainer_state = last.trainer_state()
        if trainer_state["seed"] != self.seed:
            raise ValueError(f"seed: got {self.seed}, and the run at {folder} has {trainer_state['seed']}")
        if trainer_state["book"] not in [point.name for point in self.book.checkpoints()]:
            raise ValueError(
                f"book: {self.book.url} has no checkpoint {trainer_state['book']!r} of {last.path}, expected the book "
                "of that run"
            )
        rollouts: dict[str, Any] = trainer_state.get("rollouts") or {}
        if bool(rollouts) != (self.pacer is not None):
            with_or_without = "with" if rollouts else "without"
            raise ValueError(f"rollouts: the run at {folder} was trained {with_or_without} rollout workers")
        if self.prompts is not None:
            self.prompts.load_state_dict(trainer_state["prompts"])
        if self.pacer is not None:
            self.pacer.suspend()
        state = self._load(last)
        # The reference of adapters has no weights of its own.
        if self._own_reference and isinstance(self.models.reference, Trainable) and saved[0].step == 0:
            self.load_weights(self.models.reference, saved[0].model)
        if self.reward_norm is not None and "reward_norm" in state:
            self.reward_norm.load_state_dict(state["reward_norm"])
        self.book.rewind(trainer_state["book"], later="keep" if self.prompts is None else "drop")
        self.global_step = last.step
        self._announce(rollouts=rollouts)
        self.resumed_from = last.step
        self._set_random_states(state)
        return True

    def _load(self, saved: checkpoint.Checkpoint) -> dict[str, Any]:
        """Load the weights and the optimizer states of a checkpoint; return the content of its `state.pt`."""
        state = checkpoint.load_state(saved)
        self.load_weights(self.actor, saved.model)
        if self.models.critic is not None and saved.critic is not None:
            self.load_weights(self.models.critic, saved.critic)
        self.learner.load_state_dict(state["learner"])
        return state

    def load_weights(self, model: Trainable, folder: Path) -> None:
        """Load the weights of a saved model into a model of this trainer.

        Args:
            model: The policy, the critic, or another model of the trainer.
            folder: The folder of the saved model.

        Raises:
            CorruptCheckpointError: The folder cannot be loaded, or lacks a weight.
        """
        checkpoint.load_weights(model, folder)

    def _set_random_states(self, state: Mapping[str, Any]) -> None:
        checkpoint.set_random_state(state["random"])


def _sort_rollouts(records: Experiences) -> Experiences:
    """Sort records of rollout workers by group, so that an update does not depend on which was generated first."""
    numbers = [info.get("rollout", {}).get("number", 0) for info in records.values("info")]
    return records.take(sorted(range(len(records)), key=numbers.__getitem__))
