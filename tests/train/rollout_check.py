"""An independent check of runs with rollout workers, by plain SQL, and workers as threads, which start at once.

`check_rollouts` lists what is wrong: every group below `next` is in the book once, or waits for a worker; its records
were trained on once, were dropped with a reason, or wait; none was older than the bound when it was trained on.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book.rollouts import read_rollouts
from rollbook.train import run as runs
from rollbook.train.builders import build_worker
from rollbook.train.config import Config, load_config
from rollbook.train.prompts import Prompts
from rollbook.train.run import RunResult, run
from rollbook.train.worker import LocalWorkers, RolloutWorker
from tests.book.trials import tables
from tests.book.trials.verify import Ledger

PROMPTS, SAMPLES = 4, 3
SMALL = (
    *("steps=4", f"batch.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}", "batch.minibatches=2"),
    *("warmup.steps=1", "warmup.target_accuracy=null", "warmup.batch_size=8", "data.options.count=40"),
    *("data.held_out=4", "evaluation.before=false", "evaluation.after=false", "checkpoint.interval=2"),
    *("model.options.hidden=32", "model.options.heads=1", "model.options.layers=1", "algorithm.kl_coef=0.0"),
    *("sampling.max_tokens=6", "sampling.min_tokens=6", "rewards=rollbook.train.recipes.letters:random_reward"),
    "tracking.display=false",
)
"""A run of seconds: its rewards are random, so that groups are rarely constant."""
MODES = {
    "sync": ("rollout.mode=sync",),
    "one_step_off": ("rollout.mode=one_step_off",),
    "async": ("rollout.mode=async", "replay.max_staleness=2"),
}
BOUNDS = {"sync": 0, "one_step_off": 1, "async": 2}


def configure(folder: Path, *changes: str, recipe: str = "letters") -> Config:
    return load_config(recipe, [*SMALL, *changes, f"out={folder}"])


# --- the check --------------------------------------------------------------------------------------------------------


def check_rollouts(
    url: str, prompts: Prompts, bound: int, *, size: int = SAMPLES, steps: int | None = None
) -> list[str]:
    """List everything that is wrong with the rollouts of a run, whether it has ended or not.

    Args:
        url: The book.
        prompts: The training prompts, in their order.
        bound: Maximum staleness.
        size: Samples of a group.
        steps: Steps of the run, each of which trained `PROMPTS` groups, if it has ended.
    """
    state = tables.read(url)
    ledger = Ledger(state)
    ledger.by_group = {}
    # Records that a rewind removed have a past, too, but their rows of `work` stay as they were.
    live = ledger.training
    ledger.work = {key: row for key, row in ledger.work.items() if key[1] in live}
    ledger.training = {record.seq for record in state.records if not record.evaluation}
    ledger.lives()
    ledger.training = live
    wrong = ledger.wrong
    [rollouts] = state.rollouts
    unfinished = {claim.number for claim in state.claims}
    groups: dict[str, list[tables.Record]] = defaultdict(list)
    for record in state.records:
        if record.seq in ledger.training:
            groups[record.gid].append(record)
    states = {(row.seq): (row.state, row.reason) for row in state.work}
    by_number = {number: tid_at(prompts, number) for number in range(rollouts.next)}
    wrong += [f"group {gid}: in the book, and never begun" for gid in groups.keys() - set(by_number.values())]
    last_kinds = {
        json.loads(event.detail or "")["number"]: event.kind
        for event in state.events
        if event.kind in ("begun", "generated", "reassigned")
    }
    for number, gid in by_number.items():
        rows = groups.get(gid, [])
        if len(rows) != (size if rows else 0):
            wrong.append(f"group {number}: {len(rows)} records, expected {size}")
        # The end of a run takes unfinished groups back.
        is_returned = rollouts.status == "finished" and last_kinds.get(number) == "reassigned"
        if not rows and number not in unfinished and not is_returned:
            wrong.append(f"group {number}: lost; it is neither in the book nor in flight")
        if number not in last_kinds:
            wrong.append(f"group {number}: there is no event of its beginning")
        trained = Counter(len(ledger.trained.get(("train", row.uid), [])) for row in rows)
        if len(trained) > 1 or max(trained, default=0) > 1:
            wrong.append(f"group {number}: its records were trained on {dict(trained)} times")
        ends = {states.get(row.seq, ("waiting", None)) for row in rows}
        if rows and (len(ends) > 1 or (("dropped", None) in ends)):
            wrong.append(f"group {number}: its records are {ends}")
    wrong += _check_versions(url, bound, steps)
    return wrong


def tid_at(prompts: Prompts, number: int) -> str:
    """Return the id of a group by its number."""
    eid = prompts.at(number, PROMPTS).eid
    assert eid is not None
    return eid.tid


def _check_versions(url: str, bound: int, steps: int | None) -> list[str]:
    """Compare the version of each token with the step that trained on it; count the groups of steps."""
    wrong = []
    groups: dict[int, set[str]] = defaultdict(set)
    with rollbook.open(url, mode="r") as book:
        report = book.check()
        if not report.ok:
            wrong.append(str(report))
        records = {record.eid.uid: record for record in book.where(evaluation=0)}
        for uid, trained in rollbook.book.trained_steps(book).items():
            versions = token_versions(records[uid])
            for step in trained:
                groups[step].add(records[uid].eid.tid)
                if max(versions) > step - 1 or min(versions) < step - 1 - bound:
                    wrong.append(f"{uid}: step {step} trained on versions {versions}, bound {bound}")
    counts = {step: len(tids) for step, tids in groups.items()}
    if steps is not None and counts != dict.fromkeys(range(1, steps + 1), PROMPTS):
        wrong.append(f"groups by step: {counts}, expected {PROMPTS} in each of {steps}")
    return wrong


def token_versions(record: Any) -> list[int]:
    """Return the policy versions of the tokens of a record."""
    versions = record.policy_versions
    return [versions] if isinstance(versions, int) else [int(number) for number in versions]


# --- workers as threads -----------------------------------------------------------------------------------------------


class ThreadWorkers(LocalWorkers):
    """Workers as threads of the trainer's process; `prepare` may change them before they run."""

    prepare: Callable[[RolloutWorker, int], None] | None = None
    running: list[RolloutWorker]
    results: list[Any]

    def start(self) -> None:
        self.running, self.errors, self.results = [], list[BaseException](), []
        type(self).last = self
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(len(self.processes))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        try:
            with rollbook.open(self.book, mode="r+") as book:
                state = read_rollouts(book)
                assert state is not None
                config = load_config(state.settings["config"], [])
                with _BUILDING:
                    worker = build_worker(config, book, state.settings, f"worker-{number}")
                if type(self).prepare is not None:
                    type(self).prepare(worker, number)
                self.running.append(worker)
                self.results.append(worker.run())
        except BaseException as error:
            self.errors.append(error)

    def poll(self) -> None:
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        for worker in self.running:
            worker.stop()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


_BUILDING = threading.Lock()


@contextmanager
def thread_workers(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[RolloutWorker, int], None] | None = None
) -> Iterator[type[ThreadWorkers]]:
    """Let `run` start threads in place of processes."""
    kind = type("Workers", (ThreadWorkers,), {"prepare": None if prepare is None else staticmethod(prepare)})
    with monkeypatch.context() as patch:
        patch.setattr(runs, "LocalWorkers", kind)
        yield kind


def train(config: Config) -> RunResult:
    return run(config, stream=io.StringIO())


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and norm of the gradient of each step."""
    with rollbook.open(folder / "book", mode="r") as book:
        return [(step, row["loss"], row["grad_norm"]) for step, row in book.metrics() if "loss" in row]


def slow_down(worker: RolloutWorker, seconds: float, *, by_length: bool = False) -> None:
    """Let each forward pass of a worker's model take longer, or each position of its input."""
    assert worker.actor is not None

    def wait(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options["input_ids"] if "input_ids" in options else arguments[0]
        time.sleep(seconds * (ids.shape[1] if by_length else 1))

    worker.actor.model.register_forward_pre_hook(wait, with_kwargs=True)
