"""Rollout workers: processes that generate and score rollouts for a trainer, over the book that they share.

`RolloutWorker` claims groups in the book, samples and scores them, and appends the records. `RolloutPacer` is the
trainer's side: it publishes weights, allows new groups, and leases finished ones. Neither knows where the other runs: a
worker is a process on this machine, `rollbook rollout` on another one, or a Ray actor.

Invariant: each group is stored once. The append checks the claim in the same transaction, so a worker that lost its
claim cannot append.

Invariant: at most `(1 + max_staleness) * prompts_per_step` groups are in flight or queued, and the oldest are trained
on first. Staleness exceeds the bound only for groups later than `late_seconds`, which are dropped.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollbook.book.book import open as open_book
from rollbook.book.errors import (
    BookError,
    MissingBookError,
    NoWeightsError,
)
from rollbook.book.ledger import RETRIABLE_ERRORS, retry_outages
from rollbook.book.rollouts import (
    FINISHED,
    RolloutClaim,
    append_rollouts,
    claim_rollouts,
    close_rollouts,
    count_open_groups,
    fetch_weights,
    finish_claims,
    groups_in_book,
    open_rollouts,
    publish_weights,
    read_generations,
    read_rollouts,
    read_worker_reports,
    remove_worker,
    renew_claims,
    report_worker,
    return_claims,
    return_worker_claims,
    set_limit,
    suspend_rollouts,
    weights_version,
)
from rollbook.core.addresses import redacted
from rollbook.core.checks import check_choice, check_float, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import warn_user
from rollbook.core.sampling import Prompt, Sample, Sampling
from rollbook.rewards.recipes import as_reward
from rollbook.rollout.engine import BaseEngine, Cancel, WeightSource, WeightSyncError, get_module
from rollbook.rollout.transformers import TransformersEngine
from rollbook.rollout.weight_sync import check_probe, check_sync, make_probe
from rollbook.train.pipeline import (
    add_greedy_baseline,
    find_constant_groups,
    generate,
    generate_greedy,
    score,
)

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.book.lease import Lease
    from rollbook.book.rollouts import RolloutState
    from rollbook.models import Actor
    from rollbook.rewards.recipes import RewardLike
    from rollbook.rollout.environment import EnvironmentConfig
    from rollbook.train.algorithm import AlgorithmConfig
    from rollbook.train.prompts import Prompts

MODES = ("sync", "one_step_off", "async")
WEIGHTS_FILE_BYTES = 1 << 30
"""Size at which a new file of published weights begins."""
IDLE_SHARE = 0.2
"""Generation runs further ahead if the trainer waits, and workers lack prompts, for more than this share of time."""
SLOW_FACTOR = 12.0
"""A worker is slow that takes this many times as long for a group as the median."""
_MIN_SLOW_SECONDS = 0.5
"""Shortest time after which a worker is slow, and time between two checks."""
_MIN_FINISHED = 4
"""Number of finished groups from which a median is known."""
_IDLE_SECONDS = 60.0
"""How long after its last group a worker without one is taken to be idle, and not gone."""
_HEARTBEAT_SECONDS = 2.0
"""Longest time between two reports of a trainer or worker."""
_POLL_SHARE = 0.02
"""How often a worker polls for new weights while it generates: after this share of the time between two updates."""
_MIN_POLL_SECONDS = 0.2
"""Shortest time between two such polls. Many workers share the book."""
_POLL_SECONDS = 1.0
"""Time between two other calls that wait for something in the book."""
_WARN_SECONDS = 60.0
"""How often a trainer that waits for rollouts warns."""
MAX_FAILURES = 5
"""Failures in a row after which a run stops."""
_EARLY_FAILURE_SECONDS = 60.0
"""A worker that fails within this time of its start counts as failing repeatedly."""
_START_SECONDS = 60.0
"""Seconds for which a starting worker retries calls of a book that does not respond."""


class WorkersFailedError(RollbookError, RuntimeError):
    """Raised when rollout workers fail repeatedly."""


class TrainerReplacedError(RollbookError, RuntimeError):
    """Raised in a trainer when another one has opened the rollouts of its book."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a trainer uses rollout workers.

    Args:
        mode: `sync`: workers generate the groups of a step with the newest weights while the trainer waits.
            `one_step_off`: they generate the next step meanwhile; weights change between groups. `async`: they
            generate continuously within `max_staleness`; weights change also between two tokens of a response.
        max_staleness: For `async`: how many policy versions behind a group may be when it is trained on.
        late_seconds: How long the trainer waits for a group that would become stale in this step.
        settings: What workers need to know; stored in the book.

    >>> RolloutConfig(mode="one_step_off").staleness_bound
    1
    """

    mode: str = "async"
    max_staleness: int = 2
    late_seconds: float = 600.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_int("max_staleness", self.max_staleness)
        check_float("late_seconds", self.late_seconds, 0)

    @property
    def staleness_bound(self) -> int:
        """Maximum staleness of a group, in policy versions."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]


# --- weights ----------------------------------------------------------------------------------------------------------


def pack_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Pack weights into files in the safetensors format, each of about `WEIGHTS_FILE_BYTES`.

    >>> files = pack_weights({"a": torch.ones(2)})
    >>> unpack_weights(files)["a"]
    tensor([1., 1.])
    """
    from safetensors.torch import save

    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if size and size + tensor.nbytes > WEIGHTS_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
    return {f"weights-{i}.safetensors": save(tensors) for i, tensors in enumerate(parts)}


def unpack_weights(files: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in files that `pack_weights` made."""
    from safetensors.torch import load

    weights: dict[str, torch.Tensor] = {}
    for data in files.values():
        weights |= load(bytes(data))
    return weights


def trained_weights(actor: WeightSource) -> dict[str, torch.Tensor]:
    """Return the weights that training changes, by their names in the model: of an actor with LoRA, the adapters."""
    return {name: weight.detach() for name, weight in get_module(actor).named_parameters() if weight.requires_grad}


# --- the trainer's side -----------------------------------------------------------------------------------------------


class RolloutPacer:
    """The trainer's side of rollout workers: publishes weights, allows new groups, and leases finished ones.

    Args:
        book: The book.
        config: How workers are used.
        prompts_per_step: Groups of a step.
        consumer: Consumer group of the trainer.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> config = RolloutConfig(mode="async", max_staleness=2)
    >>> pacer = RolloutPacer(book, config, prompts_per_step=4, consumer="train")
    >>> pacer.open(next_group=0)
    >>> pacer.pace().limit  # the groups of this step and of the next one
    8
    """

    def __init__(self, book: Book, config: RolloutConfig, *, prompts_per_step: int, consumer: str) -> None:
        self.book, self.config = book, config
        self.prompts_per_step, self.consumer = prompts_per_step, consumer
        self.name = f"{socket.gethostname()}/{os.getpid()}"
        self.on_wait: Callable[[], None] | None = None
        """Called before each step and about once a second while it waits for rollouts, such as to restart workers."""
        self._trainer = os.urandom(8).hex()
        """Identifies this trainer in the book, which has one."""
        self._is_open = False
        self._reported_at = -math.inf
        self._in_flight = 0
        self._queued_groups = 0
        self._times_reassigned: Counter[int] = Counter()
        """By number of a group."""
        self._checked_slow_at = -math.inf
        self._lead = self._min_lead = min(1.0, float(config.staleness_bound))
        self._adapted_at: float | None = None
        self._waited_seconds = 0.0
        """Since then."""
        self._worker_seconds: dict[str, tuple[float, float]] = {}
        """By worker, as last reported: seconds without prompts, and since its start."""

    def _settings(self) -> dict[str, Any]:
        return {**self.config.settings, "consumer": self.consumer, "trainer": self._trainer}

    def suspend(self) -> None:
        """Void the groups that workers are generating, and allow no new ones until `open`."""
        retry_outages(suspend_rollouts, self.book, self._settings())

    def open(self, next_group: int, returned: Sequence[int] = ()) -> None:
        """Start, or continue after a restart.

        Args:
            next_group: Number of the first group that was not started.
            returned: Numbers of groups before it that were not finished.
        """
        retry_outages(open_rollouts, self.book, self._settings(), next=next_group, returned=returned)
        self._is_open = True

    def close(self) -> None:
        """Tell the workers that training has ended."""
        self._read()
        retry_outages(close_rollouts, self.book)
        retry_outages(remove_worker, self.book, self.name)

    def state(self) -> dict[str, Any]:
        """Return the arguments of `open` that continue from here."""
        state = self._read()
        unfinished = sorted({*state.returned, *(group.number for group in state.in_flight)})
        return {"next_group": state.next, "returned": unfinished}

    def _read(self) -> RolloutState:
        state = retry_outages(read_rollouts, self.book)
        if state is None or state.settings.get("trainer") != self._trainer:
            raise TrainerReplacedError(f"{self.book.url}: another trainer is now using this book")
        return state

    def publish(self, actor: WeightSource, version: int) -> None:
        """Publish the trained weights of a policy for the workers.

        Args:
            actor: The policy, with complete weights.
            version: The policy version.
        """
        self._publish(version, pack_weights(trained_weights(actor)), {"probe": make_probe(actor)})

    def publish_served(self, engine: BaseEngine, version: int) -> None:
        """Publish which weights the servers of an engine have.

        Args:
            engine: The engine, which has sent weights to its servers.
            version: The policy version.
        """
        self._publish(version, {}, {"served": engine.served_weights()})

    def _publish(self, version: int, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> None:
        if self._is_open:
            self._read()  # raises if another trainer has published its own
        retry_outages(publish_weights, self.book, version, files, metadata)

    def pace(self, steps_left: int | None = None) -> RolloutState:
        """Allow new groups, as far as the trainer needs them soon and the staleness bound permits.

        Args:
            steps_left: Number of steps until the end of the run; `None`: not known.

        Returns:
            The state of the rollouts.
        """
        state = self._read()
        self._in_flight = len(state.in_flight)
        self._queued_groups = retry_outages(count_open_groups, self.book, self.consumer)
        max_groups = (1 + self._lead) * self.prompts_per_step
        if steps_left is not None:
            max_groups = min(max_groups, steps_left * self.prompts_per_step)
        started_groups = self._queued_groups + self._in_flight + len(state.returned)
        limit = state.next + max(round(max_groups) - started_groups, 0)
        if limit != state.limit:
            retry_outages(set_limit, self.book, limit)
        return replace(state, limit=limit)

    def lease(self, version: int, *, by: str, seconds: float, steps_left: int | None = None) -> Lease:
        """Lease the groups of a step, the oldest first, and wait until there are enough.

        Groups in flight that would be stale after this step are waited for, up to `late_seconds`. Those of a worker
        that is much slower than others are given to idle ones.

        Args:
            version: The current policy version.
            by: See `Book.lease`.
            seconds: Lease duration.
            steps_left: See `pace`.
        """
        start = warned_at = time.monotonic()
        count = self.prompts_per_step
        while True:
            if self.on_wait is not None:
                self.on_wait()
            state = self.pace(steps_left)
            is_late = time.monotonic() - start > self.config.late_seconds
            if is_late or not self._is_waiting_for_stale(state, version):
                # A timeout also limits the wait for other writers, which on a slow disk take seconds each.
                is_ready = self._queued_groups >= count
                lease = retry_outages(
                    self.book.lease,
                    count,
                    by=by,
                    consumer=self.consumer,
                    timeout=0.0 if is_ready else _POLL_SECONDS,
                    exact=True,
                    seconds=seconds,
                )
                if lease:
                    self._adapt(time.monotonic() - start)
                    return lease
                if is_ready:
                    time.sleep(0.05)
            else:
                time.sleep(0.05)
            self._reassign_slow_groups(state)
            if time.monotonic() - self._reported_at > _HEARTBEAT_SECONDS:
                self.report(state="waiting for rollouts", version=version)
            if time.monotonic() - warned_at > _WARN_SECONDS:
                warned_at = time.monotonic()
                warn_user(
                    f"waited {warned_at - start:.0f} s for rollouts: {self._queued_groups} of {count} groups ready, "
                    f"{self._in_flight} in flight; `rollbook top {self.book.url}` shows the workers"
                )

    def _reassign_slow_groups(self, state: RolloutState) -> None:
        """Give the groups of slow workers back while the trainer waits for them and other workers are idle.

        A group that was given back gets twice the time with its next worker, so that one that takes long for any
        worker is finished.
        """
        now = time.monotonic()
        if now - self._checked_slow_at < _MIN_SLOW_SECONDS:
            return
        self._checked_slow_at = now
        if state.next < state.limit or state.returned:
            return  # workers that are idle have something to do
        finished = retry_outages(read_generations, self.book)
        busy = {claim.worker for claim in state.in_flight}
        if len(finished) < _MIN_FINISHED or not any(
            group.worker not in busy and group.age < _IDLE_SECONDS for group in finished
        ):
            return
        limit = max(_MIN_SLOW_SECONDS, SLOW_FACTOR * statistics.median(group.seconds for group in finished))
        slow = [
            claim
            for claim in state.in_flight
            if state.time - claim.claimed > limit * 2 ** self._times_reassigned[claim.number]
        ]
        if slow:
            retry_outages(return_claims, self.book, slow, "slow worker")
            self._times_reassigned.update(claim.number for claim in slow)

    def _adapt(self, waited_seconds: float) -> None:
        """Change how many steps generation runs ahead, after the trainer has waited for a lease.

        The more it runs ahead, the staler the records are. So it runs ahead by one step, and by more, up to the bound,
        only while the trainer waits and workers lack prompts: if they do not, generation is the bottleneck, and a
        greater lead would only let records wait.
        """
        if self._min_lead == self.config.staleness_bound:
            return
        now = time.monotonic()
        self._waited_seconds += waited_seconds
        if self._adapted_at is None:
            self._read_idle_share()
        else:
            seconds = now - self._adapted_at
            if seconds < _HEARTBEAT_SECONDS:
                return
            idle_share = self._read_idle_share()
            if idle_share is not None:
                # A greater lead can save no more time than both spend waiting.
                both_wait = min(self._waited_seconds / seconds, idle_share) > IDLE_SHARE
                lead = self._lead + (0.25 if both_wait else -0.1)
                self._lead = min(max(lead, self._min_lead), float(self.config.staleness_bound))
        self._adapted_at, self._waited_seconds = now, 0.0

    def _read_idle_share(self) -> float | None:
        """Return for which share of the time since the last call workers lacked prompts, or `None` if none reported."""
        last, self._worker_seconds = self._worker_seconds, {}
        idle = total = 0.0
        for report in retry_outages(read_worker_reports, self.book):
            if "idle_seconds" in report.details:
                seconds = float(report.details["idle_seconds"]), float(report.details["seconds"])
                self._worker_seconds[report.name] = seconds
                last_idle, last_total = last.get(report.name, seconds)
                if seconds[1] > last_total:  # else there is no new report, or the worker was restarted
                    idle += seconds[0] - last_idle
                    total += seconds[1] - last_total
        return idle / total if total else None

    def _is_waiting_for_stale(self, state: RolloutState, version: int) -> bool:
        """Return whether a group in flight must be trained on in this step."""
        due = version - self.config.staleness_bound
        return self.config.staleness_bound > 0 and any(group.version == due for group in state.in_flight)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of groups in flight and of queued or leased ones at the last `pace`, and how many steps
        generation runs ahead."""
        return {
            "rollout/groups_in_flight": float(self._in_flight),
            "rollout/groups_queued": float(self._queued_groups),
            "rollout/lead": self._lead,
        }

    def report(self, **details: Any) -> None:
        """Report what the trainer does, for `rollbook top`.

        Args:
            details: JSON-compatible details, such as the step.
        """
        self._reported_at = time.monotonic()
        with suppress(*RETRIABLE_ERRORS):
            report_worker(self.book, self.name, role="trainer", host=socket.gethostname(), pid=os.getpid(), **details)


# --- a worker ---------------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """A group that this worker generates."""

    claim: RolloutClaim
    prompt: Prompt
    claimed: float
    records: Experiences | None = None
    is_scored: bool = False
    """Whether the scoring thread has it, which counts it if it is discarded."""


@dataclass
class WorkerResult:
    """What a worker did.

    Args:
        groups: Groups that it appended.
        records: Their records.
        discarded: Groups generated but not appended: the claim was lost, or the group was already in the book.
        updates: How often it loaded weights.
    """

    groups: int = 0
    records: int = 0
    discarded: int = 0
    updates: int = 0


class RolloutWorker:
    """Generates groups for a trainer until it has finished.

    One thread generates, one scores and appends, and one renews claims, reports to `rollbook top` and, in mode
    `async`, loads new weights between two tokens.

    `rollbook.train.builders.build_worker` builds one from a configuration.

    Args:
        book: The book that the trainer uses.
        engine: Generates responses. An engine of transformers or vLLM gets the weights that the trainer publishes. The
            servers of a `VllmEngine` get theirs from the trainer, so its URLs are among those of the trainer's engine.
            Other engines keep their own weights.
        prompts: The training prompts, the same as the trainer's.
        algorithm: The trainer's algorithm.
        name: Name of this worker, unique in the book. A worker that is started again keeps its name.
        actor: The policy that the engine samples from.
        sampling: Sampling options.
        reward: Scores the samples.
        environment: For multi-turn episodes.
        prompts_per_step: Prompts of a step of the trainer.
        prompts_per_claim: Prompts that are generated together.
        mode: See `RolloutConfig`.
        consumer: Consumer group of the trainer.
        claim_seconds: Seconds without a heartbeat after which another worker gets the prompts of this one.
    """

    def __init__(
        self,
        book: Book,
        engine: BaseEngine,
        prompts: Prompts,
        algorithm: AlgorithmConfig,
        *,
        name: str | None = None,
        actor: Actor,
        sampling: Sampling,
        reward: RewardLike | None = None,
        environment: EnvironmentConfig | None = None,
        prompts_per_step: int,
        prompts_per_claim: int,
        mode: str,
        consumer: str,
        claim_seconds: float,
    ) -> None:
        self.book, self.engine, self.prompts, self.algorithm = book, engine, prompts, algorithm
        self.name = f"{socket.gethostname()}/{os.getpid()}" if name is None else name
        self.actor, self.sampling, self.environment = actor, sampling, environment
        self.reward = None if reward is None else as_reward(reward)
        self.prompts_per_step = check_int("prompts_per_step", prompts_per_step, 1)
        self.prompts_per_claim = check_int("prompts_per_claim", prompts_per_claim, 1)
        check_choice("mode", mode, MODES)
        self.mode = mode
        self.consumer = consumer
        self.claim_seconds = check_float("claim_seconds", claim_seconds, 0.1)
        self.result = WorkerResult()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._weights_lock = threading.Lock()
        self._weights_id: str | None = None
        self._weights_version = -1
        self._updated = time.monotonic()
        self._update_seconds = 0.0  # between the last two updates
        self._checked_id: str | None = None
        self._probe: dict[str, Any] | None = None
        self._groups: dict[int, _Group] = {}  # by fence: being generated, scored or appended
        self._scoring: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._cancel = Cancel()
        self._stage = "starting"
        self._started = time.monotonic()
        self._idle_seconds = 0.0  # without prompts, and without groups that wait for the book
        self._append_seconds = 0.0  # in earlier appends
        self._append_started: float | None = None
        self._failure: BaseException | None = None
        self._claim_lost = False
        self._tokenizer = getattr(engine, "tokenizer", None) or getattr(actor, "tokenizer", None)

    def stop(self) -> None:
        """End `run` soon; groups that are not finished are given back. Safe in a signal handler."""
        self._stop.set()
        self._cancel.request()

    def run(self) -> WorkerResult:
        """Generate groups until the trainer has finished, or `stop` is called.

        Returns:
            What was done.

        Raises:
            StaleWeightsError: The model does not have the trainer's weights after it loaded them.
        """
        self._retry(return_worker_claims, self.book, self.name, "worker restarted")
        threads = [
            threading.Thread(target=target, daemon=True) for target in (self._score_groups, self._send_heartbeats)
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._stop.is_set() and self._failure is None:
                try:
                    if not self._generate_groups():
                        break
                except RETRIABLE_ERRORS as error:
                    warn_user(f"book not responding, retrying: {error}")
                    self._claim_lost = True
                    self._stop.wait(_POLL_SECONDS)
        finally:
            self._scoring.put(None)
            threads[0].join()
            self._stop.set()
            threads[1].join()
            with suppress(BookError):
                self._return_claims("worker stopped" if self._failure is None else f"worker failed: {self._failure}")
                remove_worker(self.book, self.name)
        if self._failure is not None:
            raise self._failure
        return self.result

    @property
    def _is_generating(self) -> bool:
        return self._stage == "generating"

    # --- generation ---------------------------------------------------------------------------------------------------

    def _generate_groups(self) -> bool:
        """Claim and generate some groups; return whether there may be more."""
        if len(self._groups) >= 2 * self.prompts_per_claim:
            self._stop.wait(0.02)  # rewards are slower than generation
            return True
        self._stage = "waiting for prompts"
        if self._claim_lost:
            self._return_unknown_claims()
            self._claim_lost = False
        claims = self._claim(timeout=0.0)
        if not claims:
            start, start_appending = time.monotonic(), self._measure_appends()
            claims = self._claim(timeout=_POLL_SECONDS)
            # While groups wait to be appended, the book is the bottleneck: more prompts would only wait, too.
            appending = self._measure_appends() - start_appending
            self._idle_seconds += max(time.monotonic() - start - appending, 0.0)
        if not claims:
            state = read_rollouts(self.book)
            return state is None or state.status != FINISHED or bool(self._groups)
        groups = [
            _Group(claim, self.prompts.at(claim.number, self.prompts_per_step), time.monotonic()) for claim in claims
        ]
        self._add_groups(groups)
        scoring: set[int] = set()
        try:
            self._generate(groups, scoring)
        except RETRIABLE_ERRORS:
            # Forgotten, so that they are not renewed: `_return_unknown_claims` gives them back.
            with self._lock:
                for group in groups:
                    if group.claim.fence not in scoring:
                        self._groups.pop(group.claim.fence, None)
            raise
        return True

    def _add_groups(self, groups: Sequence[_Group]) -> None:
        """Take up groups that were claimed.

        Earlier claims of the same groups have expired, and are forgotten: a group must not be appended together with
        another attempt at it.
        """
        numbers = {group.claim.number for group in groups}
        with self._lock:
            self._cancel = Cancel()
            self._forget([fence for fence, group in self._groups.items() if group.claim.number in numbers])
            self._groups |= {group.claim.fence: group for group in groups}

    def _forget(self, fences: Iterable[int]) -> None:
        """Remove groups whose claims were lost; the scoring thread counts those that it has. Call with the lock."""
        for fence in fences:
            group = self._groups.pop(fence, None)
            if group is not None and not group.is_scored:
                self.result.discarded += 1

    def _measure_appends(self) -> float:
        """Return for how many seconds groups have been appended."""
        started = self._append_started
        return self._append_seconds + (0.0 if started is None else time.monotonic() - started)

    def _claim(self, timeout: float) -> list[RolloutClaim]:
        return claim_rollouts(self.book, self.name, self.prompts_per_claim, seconds=self.claim_seconds, timeout=timeout)

    def _generate(self, groups: Sequence[_Group], scoring: set[int]) -> None:
        """Generate groups and pass them on to be scored; add the fences of those that are to `scoring`."""
        # A group that was appended before the trainer, or the worker that generated it, was restarted.
        existing = groups_in_book(self.book, [_task_id(group) for group in groups])
        for group in groups:
            if _task_id(group) in existing:
                self._finish(group)
        groups = [group for group in groups if _task_id(group) not in existing]
        if groups:
            self._wait_for_weights(groups)
            groups = [group for group in groups if self._is_claimed(group)]
        if groups:
            self._stage = "generating"
            for group in self._sample(groups):
                scoring.add(group.claim.fence)
                self._scoring.put(group)

    def _return_unknown_claims(self) -> None:
        """Give back groups of a claim whose answer was lost; they would wait until the claim expires."""
        state = read_rollouts(self.book)
        claims = [] if state is None else [claim for claim in state.in_flight if claim.worker == self.name]
        with self._lock:
            unknown = [claim for claim in claims if claim.fence not in self._groups]
        return_claims(self.book, unknown, "claim not received")

    def _sample(self, groups: Sequence[_Group]) -> Iterator[_Group]:
        """Yield groups as soon as their records are generated."""
        by_task = {_task_id(group): group for group in groups}
        prompts = [group.prompt for group in groups]
        greedy = generate_greedy(
            self.engine,
            prompts,
            self.sampling,
            self.algorithm,
            environment=self.environment,
            reward=self.reward,
            tokenizer=self._tokenizer,
        )
        if self.environment is not None:
            records = generate(self.engine, prompts, self.sampling, self.environment)
            tasks = [eid.tid for eid in records.eids()]
            for task, group in by_task.items():
                rows = records.take([row for row, other in enumerate(tasks) if other == task])
                group.records = rows if greedy is None else add_greedy_baseline(rows, greedy)
                yield group
            return
        samples: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.engine.stream(prompts, self.sampling, cancel=self._cancel):
            task = sample.eid.tid
            samples[task].append(sample)
            if len(samples[task]) == self.sampling.n:
                finished = sorted(samples.pop(task), key=lambda run: run.eid.run)
                if self._cancel.requested and any(run.unfinished for run in finished):
                    continue
                rows = Experiences([run.to_experience() for run in finished])
                by_task[task].records = rows if greedy is None else add_greedy_baseline(rows, greedy)
                yield by_task[task]

    # --- scores and the book ------------------------------------------------------------------------------------------

    def _score_groups(self) -> None:
        """Score and append groups, in a thread, so that slow rewards do not hold up generation."""
        ended = False
        while not ended:
            batch = [self._scoring.get()]
            with suppress(queue.Empty):
                while True:
                    batch.append(self._scoring.get_nowait())
            ended = None in batch
            with self._lock:
                groups = [group for group in batch if group is not None and group.claim.fence in self._groups]
                for group in groups:
                    group.is_scored = True
            if not groups or self._failure is not None:
                continue
            try:
                self._append(groups)
            except BaseException as error:  # raised by `run`
                self._failure = error
                self._cancel.request()

    def _append(self, groups: Sequence[_Group]) -> None:
        records = Experiences.concat([group.records for group in groups if group.records is not None])
        if self.reward is not None:
            prompts = [group.prompt for group in groups]
            records = score(records, self.reward, self._tokenizer, prompts=prompts)
        self._append_started = start = time.monotonic()
        tasks = [eid.tid for eid in records.eids()]
        for group in groups:
            rows = records.take([row for row, task in enumerate(tasks) if task == _task_id(group)])
            claim = group.claim
            details = {
                "worker": self.name,
                "number": claim.number,
                "seconds": round(time.monotonic() - group.claimed, 3),
            }
            rows = rows.assign(info=[{**info, "rollout": details} for info in rows.values("info")])
            is_dropped = self.algorithm.drop_constant_groups and bool(find_constant_groups(rows))
            appended = self._retry(
                append_rollouts,
                self.book,
                claim,
                rows,
                detail=details,
                dropped_for=self.consumer if is_dropped else None,
                reason="constant group",
            )
            with self._lock:
                self._groups.pop(claim.fence, None)
                self.result.discarded += not appended
            if appended:
                self.result.groups += 1
                self.result.records += len(rows)
        self._append_started = None
        self._append_seconds += time.monotonic() - start

    def _finish(self, group: _Group) -> None:
        self._retry(finish_claims, self.book, [group.claim])
        with self._lock:
            self._groups.pop(group.claim.fence, None)

    def _retry(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the book, for as long as its server is down: generated groups are not lost."""
        return retry_outages(function, *arguments, outage_seconds=math.inf, stop=self._stop, **options)

    def _return_claims(self, reason: str) -> None:
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        if groups:
            return_claims(self.book, [group.claim for group in groups], reason[:200])

    # --- weights ------------------------------------------------------------------------------------------------------

    def _is_claimed(self, group: _Group) -> bool:
        """Return whether the claim of a group was not lost."""
        with self._lock:
            return group.claim.fence in self._groups

    def _wait_for_weights(self, groups: Sequence[_Group]) -> None:
        """Wait until the engine has weights of at least the version of these groups, or their claims are lost.

        A trainer that dies takes its weights along, and the next one may continue from an earlier version.
        """
        self._stage = "loading weights"
        version = max(group.claim.version for group in groups)
        while not self._stop.is_set() and self._failure is None and any(map(self._is_claimed, groups)):
            if not self.engine.takes_weights:
                self.engine.version = max(self.book.policy_version or 0, version)
                return
            self._fetch_weights()
            if self._weights_version >= version:
                break
            self._stop.wait(0.05)  # the trainer publishes before it announces a version, so this is rare
        with self._weights_lock:
            if self._checked_id != self._weights_id:
                self._check_weights()
                self._checked_id = self._weights_id

    def _check_weights(self) -> None:
        """Check that the model of this process has the trainer's weights. The trainer checks its servers."""
        if self.engine.is_remote:
            return
        if self._probe is not None:
            check_probe(self.actor, self._probe)
        if not isinstance(self.engine, TransformersEngine):
            check_sync(self.engine, self.actor, self.engine.version)

    def _fetch_weights(self) -> None:
        """Fetch the newest weights and apply them to the engine, unless it has them."""
        with self._weights_lock:
            newest = weights_version(self.book)
            if newest is None or newest[0] == self._weights_id:
                return
            try:
                published = fetch_weights(self.book)
            except NoWeightsError:
                return  # their trainer has died; the next one publishes its own
            served = published.metadata.get("served")
            if self.engine.is_remote:
                self.engine.follow_weights(served or {}, while_updated=self.mode != "sync")
            elif served is not None:
                raise WeightSyncError(
                    f"engine: got {self.engine!r}, but the trainer sends weights to its servers only, expected a "
                    f"VllmEngine with some of {', '.join(served['urls'])}"
                )
            else:
                self._apply_weights(unpack_weights(published.files), published.version)
            self._probe = published.metadata.get("probe")
            self._weights_id, self._weights_version = published.id, published.version
            now = time.monotonic()
            self._update_seconds, self._updated = now - self._updated, now
            self.result.updates += 1

    def _apply_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        if isinstance(self.engine, TransformersEngine):
            self.engine.update_weights(weights, version)
        else:
            targets = dict(self.actor.model.named_parameters())
            with torch.no_grad():
                for name, weight in weights.items():
                    targets[name].copy_(weight)
            self.engine.update_weights(self.actor, version)

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Renew claims, report, and in mode `async` load new weights, until the worker stops."""
        report_interval = min(_HEARTBEAT_SECONDS, self.claim_seconds / 4)
        reported_at = 0.0
        while True:
            # Poll rarely: many workers share the book.
            poll_interval = min(max(_POLL_SHARE * self._update_seconds, _MIN_POLL_SECONDS), report_interval)
            if self._stop.wait(poll_interval if self.mode == "async" else report_interval):
                return
            try:
                if self.mode == "async" and self.engine.takes_weights and self._is_generating:
                    self._fetch_weights()
                if time.monotonic() - reported_at >= report_interval:
                    self._renew_claims()
                    self.report()
                    reported_at = time.monotonic()
            except RETRIABLE_ERRORS:
                continue
            except BaseException as error:  # raised by `run`
                self._failure = error
                self._cancel.request()
                return

    def _renew_claims(self) -> None:
        with self._lock:
            groups = dict(self._groups)
        if not groups:
            return
        renewed = renew_claims(self.book, [group.claim for group in groups.values()], self.claim_seconds)
        lost = groups.keys() - {claim.fence for claim in renewed}
        with self._lock:
            self._forget(lost)
            if lost and not self._groups:
                self._cancel.request()  # nothing of what is being sampled is needed

    def report(self) -> None:
        """Report what this worker does, for `rollbook top`."""
        report_worker(
            self.book,
            self.name,
            role="rollout",
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self._stage,
            version=self.engine.version,
            groups_in_flight=len(self._groups),
            groups=self.result.groups,
            records=self.result.records,
            discarded=self.result.discarded,
            idle_seconds=round(self._idle_seconds, 3),
            seconds=round(time.monotonic() - self._started, 3),
        )


def _task_id(group: _Group) -> str:
    return "" if group.prompt.eid is None else group.prompt.eid.tid


def wait_for_trainer(
    address: str, stop: threading.Event, log: Callable[[str], None] | None = None
) -> tuple[Book, dict[str, Any]] | None:
    """Wait until a trainer has created a book and opened rollouts in it.

    Args:
        address: Address of the book.
        stop: Ends the wait.
        log: Called with a line of text, such as that it waits.

    Returns:
        The book and the settings of the trainer; `None` if there is nothing to do.

    Raises:
        MissingBookError: There is no book in this folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open_book(folder) as trainer_book:
    ...         RolloutPacer(trainer_book, RolloutConfig(), prompts_per_step=4, consumer="train").open(0)
    ...     book, settings = wait_for_trainer(folder, threading.Event())
    ...     book.close()
    >>> settings["consumer"]
    'train'
    """
    book, state, has_logged = None, None, False
    while state is None:
        try:
            if book is None:
                book = retry_outages(open_book, address, mode="r+", outage_seconds=_START_SECONDS, stop=stop)
            state = retry_outages(read_rollouts, book, outage_seconds=math.inf, stop=stop)
        except MissingBookError:
            if "://" not in address:  # a trainer on this machine creates its folder before it starts workers
                raise
        if state is None:
            if not has_logged and log is not None:
                log(f"waiting for a trainer with rollout workers on {redacted(address)}")
            has_logged = True
            if stop.wait(_POLL_SECONDS):
                break
    if book is not None and state is not None and state.status != FINISHED:
        return book, state.settings
    if state is not None and log is not None:
        log(f"{redacted(address)}: its training has finished")
    if book is not None:
        book.close()
    return None


# --- processes on this machine ----------------------------------------------------------------------------------------


class WorkerFailures:
    """Counts the failures of workers, which are restarted until one of them has failed too often.

    Args:
        max_failures: Failures of a worker in a row, each within 60 s of a start, after which the run stops.

    >>> failures = WorkerFailures(2)
    >>> failures.record_start(0)
    >>> failures.record(0, "out of memory")
    >>> failures.record(0, "out of memory")
    Traceback (most recent call last):
        ...
    rollbook.train.worker.WorkersFailedError: worker-0 failed 2 times in a row; the last error: out of memory
    """

    def __init__(self, max_failures: int = MAX_FAILURES) -> None:
        self.max_failures = max_failures
        self._counts: Counter[int] = Counter()
        self._start_times: dict[int, float] = {}

    def record_start(self, number: int) -> None:
        """Record that a worker was started.

        Args:
            number: Number of the worker.
        """
        self._start_times[number] = time.monotonic()

    def record(self, number: int, reason: str, log: Path | None = None) -> None:
        """Record that a worker failed, and warn that it is restarted.

        Args:
            number: Number of the worker.
            reason: Its last error.
            log: File with more about it.

        Raises:
            WorkersFailedError: It failed too often.
        """
        is_early = time.monotonic() - self._start_times[number] < _EARLY_FAILURE_SECONDS
        self._counts[number] = self._counts[number] + 1 if is_early else 1
        if self._counts[number] >= self.max_failures:
            raise WorkersFailedError(
                f"worker-{number} failed {self._counts[number]} times in a row; the last error: {reason}"
                + ("" if log is None else f" (log: {log})")
            )
        warn_user(f"worker-{number} exited ({reason}); restarting")


class LocalWorkers:
    """Rollout workers as processes of this machine, restarted if they end. They end with this process.

    Args:
        book: Address of the book.
        count: Number of workers.
        folder: Folder for their logs.
        max_failures: See `WorkerFailures`.
    """

    def __init__(self, book: str, count: int, folder: Path, *, max_failures: int = MAX_FAILURES) -> None:
        self.book, self.folder = book, folder
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._failures = WorkerFailures(max_failures)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def start(self) -> None:
        """Start the workers."""
        for number in range(len(self.processes)):
            self._start(number)

    def _start(self, number: int) -> None:
        arguments = ["--book", self.book, "--name", f"worker-{number}", "--trust", "--parent", str(os.getpid())]
        self._failures.record_start(number)
        # The trainer and the workers share the processors.
        threads = str(max(1, (os.cpu_count() or 1) // (len(self.processes) + 1)))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        command = [sys.executable, "-m", "rollbook", "rollout", *arguments]
        with open(self._log(number), "ab") as log:
            self.processes[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _log(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def poll(self) -> None:
        """Restart workers that have ended.

        Raises:
            WorkersFailedError: A worker failed too often.
        """
        for number, process in enumerate(self.processes):
            status = None if process is None else process.poll()
            if status is None:
                continue
            if status == 0:  # ended by SIGTERM
                warn_user(f"worker-{number} was stopped; restarting")
                self._start(number)
                continue
            lines = self._log(number).read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if lines and status > 0 else f"status {status}"
            self._failures.record(number, reason, self._log(number))
            self._start(number)

    def stop(self) -> None:
        """Ask the workers to end, and wait for them."""
        running = [process for process in self.processes if process is not None and process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


__all__ = [
    "LocalWorkers",
    "RolloutConfig",
    "RolloutPacer",
    "RolloutWorker",
    "TrainerReplacedError",
    "WorkerFailures",
    "WorkerResult",
    "WorkersFailedError",
    "wait_for_trainer",
]
