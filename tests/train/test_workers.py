"""Rollout workers: what a run with them trains on, by its ledger, in each mode and with parts that fail.

Most workers are threads, which start at once (`rollout_check.thread_workers`); processes are killed and paused in
`worker_trials`, of which short trials run here.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook.book.errors import ConnectionLostError
from rollbook.book.lease import Lease
from rollbook.book.rollouts import (
    append_rollouts,
    claim_rollouts,
    close_rollouts,
    fetch_weights,
    groups_in_book,
    open_rollouts,
    read_rollouts,
    read_worker_reports,
    report_worker,
    set_limit,
)
from rollbook.cli import main
from rollbook.core.sampling import RunInfo
from rollbook.models import Actor
from rollbook.rewards import as_reward
from rollbook.rollout.engine import BaseEngine, WeightSource, get_module
from rollbook.rollout.environment import Reply
from rollbook.rollout.transformers import TransformersEngine
from rollbook.rollout.weight_sync import StaleWeightsError
from rollbook.train.builders import build_rollouts, build_worker, load_prompts
from rollbook.train.config import ConfigError, load_config
from rollbook.train.recipes import letters
from rollbook.train.trainer import AllSamplesFailedError
from rollbook.train.worker import (
    LocalWorkers,
    RolloutConfig,
    RolloutPacer,
    RolloutWorker,
    TrainerReplacedError,
    WorkersFailedError,
    unpack_weights,
)
from tests.book.postgres import Server
from tests.book.trials import tables
from tests.train import ray_trials, worker_trials
from tests.train.rollout_check import (
    BOUNDS,
    MODES,
    SMALL,
    check_rollouts,
    configure,
    losses,
    slow_down,
    thread_workers,
    tid_at,
    token_versions,
    train,
)


def failing_reward(response: str) -> float:
    """A reward that never works."""
    raise RuntimeError("no reward today")


def rows_of_all_lengths(count: int) -> list[dict[str, str]]:
    """Prompts of 2, 8 and 24 letters in turn."""
    rows = [letters.rows(count, length=length) for length in (8, 24)]
    short = [{**row, "prompt": f"{row['prompt'][:2]}>"} for row in rows[0]]
    return [(short, *rows)[i % 3][i] for i in range(count)]


class Game:
    """An environment of two turns, each worth a tenth of its length."""

    def __init__(self, prompt: Any) -> None:
        self.left = 2

    def begin(self) -> str | None:
        return None

    def respond(self, text: str) -> Reply:
        self.left -= 1
        return Reply("go", reward=len(text) / 10, done=self.left == 0)


class SeparateEngine(BaseEngine):
    """An engine with a copy of the model, as vLLM has one in the same process."""

    takes_weights = True

    def __init__(self, actor: Actor) -> None:
        self.model = copy.deepcopy(actor.model)
        self.inner = TransformersEngine(self.model, actor.tokenizer)

    @property
    def run(self) -> RunInfo:
        return self.inner.run

    def update_weights(self, source: WeightSource, version: int) -> None:
        self.model.load_state_dict(get_module(source).state_dict())
        self.version = self.inner.version = version

    def _run(self, requests: Any, cancel: Any) -> Any:
        return self.inner._run(requests, cancel)


@pytest.fixture(autouse=True)
def same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker changes to the folder of its trainer."""
    monkeypatch.chdir(os.getcwd())


def check(folder: Path, config: Any, *, bound: int, **options: Any) -> None:
    assert check_rollouts(str(folder / "book"), load_prompts(config)[0], bound, **options) == []


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_trains_within_its_bound(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path / "run", *MODES[mode], "rollout.workers=2", "evaluation.interval=2")
    with thread_workers(monkeypatch) as kind:
        outcome = train(config)
    assert outcome.steps == 4 and not kind.last.errors
    check(tmp_path / "run", config, bound=BOUNDS[mode], steps=4)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        state = read_rollouts(book)
        assert state is not None and state.status == "finished"
        staleness = [row["staleness"] for _, row in book.metrics() if "staleness" in row]
        assert max(staleness) <= BOUNDS[mode] and (mode == "sync" or max(staleness) > 0)
    assert main(["replay", str(tmp_path / "run"), "--step", "3"]) == 0


def test_sync_equals_a_run_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(configure(tmp_path / "single"))
    with thread_workers(monkeypatch):
        train(configure(tmp_path / "sync", "rollout.workers=2", "rollout.prompts_per_claim=1"))
    assert losses(tmp_path / "single") == losses(tmp_path / "sync") and len(losses(tmp_path / "sync")) == 4
    records = []
    for name in ("single", "sync"):
        with rollbook.open(tmp_path / name / "book", mode="r") as book:
            records.append({row.eid.uid: (row.tokens.tolist(), row.reward) for row in book.where(evaluation=0)})
    assert records[0] == records[1]  # workers generate nothing for steps after the last


def test_weights_change_between_two_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(worker: RolloutWorker, number: int) -> None:
        slow_down(worker, 0.02 if number else 0.004)

    changes = ("sampling.max_tokens=48", "sampling.min_tokens=48", "rollout.workers=2", "steps=5")
    config = configure(tmp_path / "run", *MODES["async"], *changes)
    with thread_workers(monkeypatch, slow):
        train(config)
    check(tmp_path / "run", config, bound=2, steps=5)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        versions = [token_versions(row) for row in book.where(evaluation=0)]
    mixed = [row for row in versions if len(set(row)) > 1]
    assert mixed and all(row == sorted(row) for row in versions)


def test_the_check_of_the_ray_trials_finds_changed_and_lost_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Restored after the test: `ray_user_code` replaces both.
    monkeypatch.setattr("rollbook.train.worker.append_rollouts", append_rollouts)
    monkeypatch.setattr(Lease, "ack", Lease.ack)
    log, book_folder = tmp_path / "log", tmp_path / "run" / "book"
    user_code = ("steps=2", f"model.builder={ray_trials.USER_CODE}:model", f"model.options.log={log}")
    with thread_workers(monkeypatch):
        config = configure(tmp_path / "run", *MODES["async"], "rollout.workers=2", *user_code)
        train(config)

    def violations() -> list[str]:
        return ray_trials.check(str(book_folder), log, BOUNDS["async"], 2)

    assert violations() == []
    logged = log.read_text()
    log.write_text("".join(line for line in logged.splitlines(True) if '"append"' not in line))
    assert violations() == ["the processes of the run logged no append"]
    log.write_text(logged)
    with rollbook.open(book_folder) as book:
        changed, lost = list(book.where(evaluation=0))[:2]
        book.revise({changed.eid.uid: {"reward": 123.0}}, author="test")
    assert violations() == [f"{changed.eid.uid}: its content is not what was appended"]
    with closing(sqlite3.connect(book_folder / "ledger.sqlite")) as database, database:
        database.execute("UPDATE records SET removed_reason = 'deleted' WHERE uid = ?", (lost.eid.uid,))
    assert f"{lost.eid.uid}: its append returned, and it is not in the book" in violations()
    with closing(sqlite3.connect(book_folder / "ledger.sqlite")) as database, database:
        database.execute("DELETE FROM records WHERE gid = ?", (lost.eid.tid,))
    wrong = check_rollouts(str(book_folder), load_prompts(config)[0], BOUNDS["async"])
    assert any(text.endswith("lost; it is neither in the book nor in flight") for text in wrong)


# --- stragglers -------------------------------------------------------------------------------------------------------


def test_a_slow_worker_neither_stalls_the_others_nor_loses_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """One of two workers takes ten times as long, and both the longer the longer a prompt is: 2, 8 or 24 letters."""

    def slow(worker: RolloutWorker, number: int) -> None:
        slow_down(worker, 0.01 if number else 0.001, by_length=True)

    data = ("data.function=tests.train.test_workers:rows_of_all_lengths", "data.options.count=40")
    changes = ("rollout.workers=2", "rollout.prompts_per_claim=1", "steps=12", *data)
    config = configure(tmp_path / "run", *MODES["async"], *changes, "checkpoint.interval=0")
    with thread_workers(monkeypatch, slow) as kind:
        train(config)
    check(tmp_path / "run", config, bound=2, steps=12)
    groups = {worker.name: worker.result.groups for worker in kind.last.running}
    assert groups["worker-0"] > 2 * groups["worker-1"] > 0
    waits, dropped = waiting_times(tmp_path / "run", config)
    assert not dropped, "a slow worker's groups are waited for"
    assert sorted(waits) == [3, 9, 25], "every length is trained on"
    record_property("seconds from begun to trained, by prompt tokens", waits)
    # Measured: at most 2 times as long. Prompts that others overtake would wait for the staleness bound, several steps.
    assert waits[25] < 4 * min(waits[3], waits[9]), waits


def test_groups_of_a_much_slower_worker_are_given_to_an_idle_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two workers takes eight seconds for a group. No step waits that long."""

    def slow(worker: RolloutWorker, number: int) -> None:
        slow_down(worker, 2.0 if number else 0.001)

    changes = ("rollout.workers=2", "rollout.prompts_per_claim=1", "steps=12", "checkpoint.interval=0")
    config = configure(tmp_path / "run", *MODES["async"], *changes, "sampling.max_tokens=4", "sampling.min_tokens=4")
    with thread_workers(monkeypatch, slow):
        train(config)
    check(tmp_path / "run", config, bound=2, steps=12)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        waits = [numbers["collect/seconds"] for _, numbers in book.metrics() if "collect/seconds" in numbers]
        [(reassigned,)] = book.sql("select count(*) from events where kind = 'reassigned' and reason = 'slow worker'")
    assert reassigned and max(waits) < 7, waits


def waiting_times(folder: Path, config: Any) -> tuple[dict[int, float], list[int]]:
    """Return the mean seconds from the beginning of a group to its training by prompt length, and dropped groups."""
    state = tables.read(str(folder / "book"))
    prompts, _ = load_prompts(config)
    gids = {record.seq: record.gid for record in state.records}
    begun, trained = dict[str, float](), dict[str, float]()
    for event in state.events:
        if event.kind == "begun":
            begun.setdefault(tid_at(prompts, json.loads(event.detail or "")["number"]), event.time)
        elif event.kind == "trained" and event.seq is not None:
            trained[gids[event.seq]] = event.time
    with rollbook.open(folder / "book", mode="r") as book:
        lengths = {row.eid.tid: row.prompt_length for row in book.where(evaluation=0)}
    waits = defaultdict(list)
    for gid, end in trained.items():
        waits[lengths[gid]].append(end - begun[gid])
    dropped = [row.seq for row in state.work if row.state == "dropped"]
    return {length: round(float(np.mean(waits[length])), 3) for length in sorted(waits)}, dropped


def test_groups_that_are_too_late_are_dropped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With late_seconds=0, a step does not wait for a group that becomes stale."""

    def slow(worker: RolloutWorker, number: int) -> None:
        slow_down(worker, 0.1 if number else 0.0)

    changes = ("rollout.workers=2", "rollout.prompts_per_claim=1", "rollout.late_seconds=0", "steps=8")
    config = configure(tmp_path / "run", *MODES["one_step_off"], *changes)
    with thread_workers(monkeypatch, slow):
        train(config)
    check(tmp_path / "run", config, bound=1, steps=8)


# --- algorithms -------------------------------------------------------------------------------------------------------


def test_constant_groups_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("algorithm.preset=dapo", "algorithm.group_size=3", "rollout.workers=2")
    config = configure(tmp_path / "run", *MODES["async"], *changes)
    with thread_workers(monkeypatch):
        train(config)
    check(tmp_path / "run", config, bound=2, steps=4)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        assert book.counts("train").dropped.get("constant group", 0) > 0
        groups = defaultdict(set)
        for row in book.where(evaluation=0):
            if row.eid.uid in rollbook.book.trained_steps(book):
                groups[row.eid.tid].add(row.reward)
    assert all(len(rewards) > 1 for rewards in groups.values())


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
def test_a_reward_that_always_fails_ends_the_run(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (f"algorithm.preset={preset}", "algorithm.group_size=3", "rollout.workers=1")
    config = configure(tmp_path / "run", *changes, "rewards=tests.train.test_workers:failing_reward", "warmup.steps=0")
    with thread_workers(monkeypatch), pytest.raises(AllSamplesFailedError, match="no reward today"):
        train(config)


def test_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = (
        "environment=tests.train.test_workers:Game",
        "environment.on_truncation=respond",
        "rewards=[]",
        "warmup.steps=0",
    )
    config = configure(tmp_path / "run", *MODES["async"], *game, "rollout.workers=2", "steps=2")
    with thread_workers(monkeypatch):
        train(config)
    check(tmp_path / "run", config, bound=2, steps=2)
    with rollbook.open(tmp_path / "run" / "book", mode="r") as book:
        rows = list(book.where(evaluation=0))
    # Both turns are in one record, with what the environment said between them masked.
    assert all(row.action_mask is not None and 0 < row.action_mask.sum() < len(row.action_mask) for row in rows)


def test_adapters_only_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    lora = "model.lora={r: 2, lora_alpha: 4, target_modules: [q_proj, v_proj]}"
    config = configure(tmp_path / "run", lora, "rollout.workers=1", *MODES["one_step_off"], "steps=2", "warmup.steps=0")
    with thread_workers(monkeypatch):
        train(config)
    check(tmp_path / "run", config, bound=1, steps=2)
    with rollbook.open(tmp_path / "run" / "book") as book:
        weights = fetch_weights(book)
        names = unpack_weights(weights.files)
        assert names and all("lora_" in name for name in names) and weights.version == 2
        # A worker with another base model, to which the adapters do not belong.
        settings = read_rollouts(book).settings  # type: ignore[union-attr]
        open_rollouts(book, settings, next=100)
        set_limit(book, 101)
        other = load_config(settings["config"], ["model.options.seed=5"])
        for engine_type in (TransformersEngine, SeparateEngine):
            worker = build_worker(other, book, settings, "other")
            if engine_type is SeparateEngine:
                worker.engine = SeparateEngine(worker.actor)
            timer = threading.Timer(60, worker.stop)  # a worker that finds nothing wrong waits for the next group
            timer.start()
            with pytest.raises(StaleWeightsError, match="the weights differ from those of the trainer"):
                worker.run()
            timer.cancel()
            assert read_rollouts(book).returned == [100]  # type: ignore[union-attr]


# --- configurations and commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.mode=async"], "replay.max_staleness: missing, required by rollout.mode async"),
        (["rollout.workers=1", "replay.max_staleness=2"], "replay.max_staleness: got 2 with rollout.mode sync; remove"),
        (["rollout.workers=1", "book=memory:"], "book: got 'memory:' with rollout workers"),
        (["rollout.workers=1", "engine={kind: openai, url: http://127.0.0.1:1}"], "engine.kind: got 'openai' with"),
        ([*MODES["async"], "replay.kind=replay"], "replay.kind: got 'replay' with rollout workers"),
        (["rollout.mode=later"], "rollout.mode: "),
        (["rollout.workers=-1"], "rollout.workers: "),
    ],
)
def test_bad_configurations(changes: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(tmp_path / "run", *changes).require()
    assert str(raised.value).startswith(message)


def test_supervised_training_has_no_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout: got workers, but sft trains on given answers"):
        load_config("letters-sft", ["rollout.workers=1", f"out={tmp_path}/run"]).require()


def finished_book(folder: Path, *changes: str) -> tuple[Path, Any]:
    """A book with the settings of a trainer, in which no group is to be generated."""
    config = configure(folder / "run", *changes)
    prompts, _ = load_prompts(config)
    settings = {**build_rollouts(config, prompts).settings, "folder": str(folder), "consumer": "train"}
    with rollbook.open(folder / "book") as book:
        open_rollouts(book, settings, next=0)
    return folder / "book", config


def test_a_trainer_that_was_replaced_stops() -> None:
    """Two trainers that were started on one new book at once."""
    with rollbook.open("memory:") as book:
        first, second = (RolloutPacer(book, RolloutConfig(), prompts_per_step=1, consumer="train") for _ in range(2))
        book.consumer("train", create=True, change=True, max_staleness=2)
        first.open(0)
        first.pace()
        second.open(0)
        second.pace()
        for call in (first.pace, first.close, lambda: first.lease(0, by="group", seconds=60)):
            with pytest.raises(TrainerReplacedError, match="another trainer is now using this book"):
                call()
        assert read_rollouts(book).status == "open"  # type: ignore[union-attr]


def test_generation_runs_further_ahead_only_while_workers_lack_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer waits in every step, at first since generation is slow, then since workers may not start more."""
    now, leads, idle_seconds = 0.0, [], 0.0
    monkeypatch.setattr("rollbook.train.worker.time.monotonic", lambda: now)
    with rollbook.open("memory:") as book:
        pacer = RolloutPacer(book, RolloutConfig(max_staleness=2), prompts_per_step=4, consumer="train")
        for step in range(9):
            now += 10.0
            idle_seconds += 3.0 * (3 < step < 7)
            for worker in ("a", "b"):
                report_worker(book, worker, idle_seconds=idle_seconds, seconds=now)
            pacer._adapt(waited_seconds=5.0)
            leads.append(pacer.metrics()["rollout/lead"])
    assert leads == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.25, 1.5, 1.75, 1.65, 1.55])


def test_a_worker_drops_groups_for_the_consumer_of_its_trainer(tmp_path: Path) -> None:
    """It also reports how long it lacked prompts."""
    config = configure(tmp_path / "run", "algorithm.drop_constant_groups=true", "data.options.count=40")
    prompts, _ = load_prompts(config)
    with rollbook.open("memory:") as book:
        book.consumer("x", create=True, max_staleness=2)
        pacer = RolloutPacer(book, build_rollouts(config, prompts), prompts_per_step=4, consumer="x")
        pacer.open(0)
        worker = build_worker(config, book, read_rollouts(book).settings)  # type: ignore[union-attr]
        worker.engine.takes_weights = False
        worker.reward = as_reward(lambda response: 1.0)
        thread = threading.Thread(target=worker.run)
        thread.start()
        time.sleep(0.3)
        set_limit(book, 1)
        while len(book) < 3:
            time.sleep(0.02)
        worker.report()
        [report] = read_worker_reports(book)
        assert 0.25 < report.details["idle_seconds"] < report.details["seconds"]
        close_rollouts(book)
        thread.join(60)
        assert book.counts("x").dropped == {"constant group": 3}
        assert not book.counts("train").dropped


def test_the_command_of_a_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "--book", str(tmp_path / "nowhere")]) != 0
    assert "nowhere" in capsys.readouterr().err
    place, config = finished_book(tmp_path)
    for change, message in (
        ("data.options.count=41", "prompts differ from those of the trainer"),
        ("sampling.temperature=0.3", "sampling.temperature: cannot differ from the trainer's"),
        ("algorithm.group_size=7", "algorithm.group_size: cannot differ"),
    ):
        assert main(["rollout", "--book", str(place), "--trust", change]) != 0
        assert message in capsys.readouterr().err
    hostile, _ = finished_book(tmp_path / "other", "critic.config={model_type: llama, attn_implementation: a/kernel}")
    assert main(["rollout", "--book", str(hostile), "data.options.count=41"]) != 0
    assert "critic.config.attn_implementation: a/kernel" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="rollbook: the trainer has version 0.0.1, this worker"):
        with rollbook.open(place) as book:
            settings = read_rollouts(book).settings  # type: ignore[union-attr]
            build_worker(config, book, {**settings, "rollbook": "0.0.1"})
    with rollbook.open(place) as book:
        close_rollouts(book)
    assert main(["rollout", "--book", str(place), "--trust"]) == 0
    assert "its training has finished" in capsys.readouterr().err


def test_a_worker_waits_for_its_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollbook.open(tmp_path / "book").close()

    def begin() -> None:
        finished_book(tmp_path)
        with rollbook.open(tmp_path / "book") as book:
            close_rollouts(book)

    timer = threading.Timer(0.3, begin)
    timer.start()
    assert main(["rollout", "--book", str(tmp_path / "book"), "--trust"]) == 0
    timer.join()
    assert "waiting for a trainer" in capsys.readouterr().err


def poll_forever(workers: LocalWorkers) -> None:
    while True:
        workers.poll()
        time.sleep(0.01)


def test_a_worker_that_ends_is_started_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is one that ends with an error, except when it is asked to end."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ntest -e stopped && exit 0\necho no such model >&2\nexit 2\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(tmp_path)
    workers = LocalWorkers("book", 1, tmp_path / "logs", max_failures=3)
    workers.start()
    with (
        pytest.warns(UserWarning, match=r"worker-0 exited \(no such model\); restarting"),
        pytest.raises(WorkersFailedError, match=r"worker-0 failed 3 times in a row; the last error: no such model"),
    ):
        poll_forever(workers)
    (tmp_path / "stopped").touch()
    workers.start()
    first = workers.processes[0]
    assert first is not None and first.wait(30) == 0
    with pytest.warns(UserWarning, match="worker-0 was stopped; restarting"):
        workers.poll()
    assert workers.processes[0] is not first
    workers.stop()


def test_a_run_cannot_change_whether_it_has_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_workers(monkeypatch):
        train(configure(tmp_path / "run", "rollout.workers=2", "steps=2"))
        train(configure(tmp_path / "run", "rollout.workers=1", "steps=4"))  # fewer workers are fine
        with pytest.raises(ValueError, match="was trained with rollout workers"):
            train(configure(tmp_path / "run", "steps=5"))
    config = configure(tmp_path / "run", "steps=4")
    check(tmp_path / "run", config, bound=0, steps=4)


def test_a_resumed_run_waits_for_the_server_of_its_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run does not: its address may be wrong."""
    outage = [ConnectionLostError("the server is starting")] * 3

    def open_book(*arguments: Any, **options: Any) -> Any:
        if outage:
            raise outage.pop()
        return rollbook.open(*arguments, **options)

    monkeypatch.setattr("rollbook.train.run.open_book", open_book)
    monkeypatch.setattr("rollbook.book.ledger._OUTAGE_POLL_SECONDS", 0.01)
    book = f"book={tmp_path / 'book'}"
    with pytest.raises(ConfigError, match="book: the server is starting"):
        train(configure(tmp_path / "run", book, "steps=1"))
    assert len(outage) == 2
    outage.clear()
    train(configure(tmp_path / "run", book, "steps=1"))
    outage += [ConnectionLostError("the server is starting")] * 3
    with pytest.warns(UserWarning, match="book not responding, retrying: the server is starting") as warned:
        assert train(configure(tmp_path / "run", book, "steps=2")).steps == 2
    assert not outage and len({str(warning.message) for warning in warned}) == 1
    outage += [ConnectionLostError("the server is starting")] * 3
    with pytest.warns(UserWarning, match="book not responding"):
        assert train(configure(tmp_path / "run", book, "steps=2")).steps == 2  # has nothing to do


# --- groups that are late ---------------------------------------------------------------------------------------------


def test_a_group_that_was_generated_in_vain_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is paused while it scores; another one is given its group and appends it."""
    place, config = finished_book(tmp_path)
    with rollbook.open(place) as book, rollbook.open(place) as other:
        settings = read_rollouts(book).settings  # type: ignore[union-attr]
        workers = [build_worker(config, opened, settings, name) for opened, name in ((book, "a"), (other, "b"))]
        for worker in workers:
            worker.engine.takes_weights = False
        set_limit(book, 2)
        paused, going_on = threading.Event(), threading.Event()

        def pause(*arguments: Any, **options: Any) -> Any:
            if options and not paused.is_set():
                paused.set()
                assert going_on.wait(60)
            return append_rollouts(*arguments, **options)

        monkeypatch.setattr("rollbook.train.worker.append_rollouts", pause)
        monkeypatch.setattr("rollbook.train.worker.renew_claims", lambda book, claims, seconds: list(claims))
        workers[0].claim_seconds = 0.2
        threads = [threading.Thread(target=worker.run) for worker in workers]
        threads[0].start()
        assert paused.wait(60)
        time.sleep(0.3)
        workers[1].claim_seconds = 60
        threads[1].start()
        while len(book) < 6:
            time.sleep(0.02)
        going_on.set()
        while workers[0].result.discarded < 1:
            time.sleep(0.02)
        close_rollouts(book)
        for thread in threads:
            thread.join(60)
        assert sum(worker.result.groups for worker in workers) == 2
        assert len(book) == 6 and book.check().ok
        assert claim_rollouts(book, "c", 1, seconds=1) == []
    check(tmp_path, config, bound=0)


def test_a_group_that_is_claimed_again_by_its_worker_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The book does not respond for longer than claims last, so that two attempts at a group wait to be appended."""
    place, config = finished_book(tmp_path)
    responding = threading.Event()

    def wait(*arguments: Any, **options: Any) -> Any:
        assert responding.wait(60)
        return append_rollouts(*arguments, **options)

    monkeypatch.setattr("rollbook.train.worker.append_rollouts", wait)
    monkeypatch.setattr("rollbook.train.worker.renew_claims", lambda book, claims, seconds: list(claims))
    with rollbook.open(place) as book:
        worker = build_worker(config, book, read_rollouts(book).settings, "a")  # type: ignore[union-attr]
        worker.engine.takes_weights, worker.claim_seconds, worker.prompts_per_claim = False, 0.2, 2
        set_limit(book, 1)
        thread = threading.Thread(target=worker.run)
        thread.start()
        while not worker._append_started:
            time.sleep(0.02)
        set_limit(book, 2)
        while not worker._scoring.qsize():
            time.sleep(0.02)
        book.announce(1)  # so that the next attempt's records differ
        while worker._scoring.qsize() < 3:  # the second group, and both again
            time.sleep(0.02)
        responding.set()
        while read_rollouts(book).in_flight:  # type: ignore[union-attr]
            time.sleep(0.02)
        close_rollouts(book)
        thread.join(60)
        assert len(book) == 6 and book.check().ok
        assert worker.result.groups == 2 and worker.result.discarded >= 2
    check(tmp_path, config, bound=0)


def test_a_claim_that_is_lost_while_it_is_scored_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat notices the loss before the append does."""
    place, config = finished_book(tmp_path)
    with rollbook.open(place) as book:
        settings = read_rollouts(book).settings  # type: ignore[union-attr]
        worker = build_worker(config, book, settings, "a")
        worker.engine.takes_weights = False

        def lose(*arguments: Any, **options: Any) -> Any:
            open_rollouts(book, settings, next=2)  # voids the claim
            worker._renew_claims()
            return append_rollouts(*arguments, **options)

        monkeypatch.setattr("rollbook.train.worker.append_rollouts", lose)
        set_limit(book, 1)
        thread = threading.Thread(target=worker.run)
        thread.start()
        while worker.result.discarded < 1:
            time.sleep(0.02)
        close_rollouts(book)
        thread.join(60)
        assert vars(worker.result) == {"groups": 0, "records": 0, "discarded": 1, "updates": 0}


def test_a_group_whose_generation_the_book_interrupted_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is restarted after the claim. Renewed, but never generated, the group would stall the trainer."""
    place, config = finished_book(tmp_path)
    lost = [ConnectionLostError("the server was restarted")]

    def interrupted(*arguments: Any) -> Any:
        if lost:
            raise lost.pop()
        return groups_in_book(*arguments)

    monkeypatch.setattr("rollbook.train.worker.groups_in_book", interrupted)
    with rollbook.open(place) as book:
        worker = build_worker(config, book, read_rollouts(book).settings, "a")  # type: ignore[union-attr]
        worker.engine.takes_weights = False
        set_limit(book, 2)
        thread = threading.Thread(target=worker.run)
        thread.start()
        end = time.monotonic() + 30
        while len(book) < 6 and time.monotonic() < end:
            time.sleep(0.02)
        close_rollouts(book)
        thread.join(60)
        assert len(book) == 6 and not lost
    check(tmp_path, config, bound=0)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker_trials.Nest]:
    with worker_trials.Nest(tmp_path_factory.mktemp("nest")) as started:
        yield started


@pytest.mark.slow
def test_a_short_trial(nest: worker_trials.Nest, tmp_path: Path) -> None:
    """Trainers and workers are killed and paused, as `python -m tests.train.worker_trials` does at length."""
    report = worker_trials.trial(tmp_path, kills=3, seed=1, steps=20, nest=nest)
    assert report.violations == [] and report.runs >= 1


@pytest.mark.slow
def test_the_server_of_the_book_is_restarted(nest: worker_trials.Nest, tmp_path: Path) -> None:
    with Server() as server:
        report = worker_trials.trial(tmp_path, kills=1, steps=30, faults=["server restarted"], server=server, nest=nest)
    assert report.violations == [] and report.runs and report.faults["server restarted"] == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_slow_disk(tmp_path: Path) -> None:
    """A sync takes 0.1 s; 2 s in `python -m tests.train.worker_trials`."""
    report = worker_trials.trial(tmp_path, kills=0, steps=2, sync_seconds=0.1)
    assert report.violations == [] and report.runs == 1 and report.seconds > 1


@pytest.mark.slow
def test_interrupting_a_worker_and_a_trainer(nest: worker_trials.Nest, tmp_path: Path) -> None:
    place, _ = finished_book(tmp_path)
    worker = ["rollout", "--book", str(place), "--trust"]
    # It waits for workers. Its display says how to continue.
    trainer = ["train", "letters", *SMALL, *MODES["one_step_off"], "tracking.display=true", f"out={tmp_path / 'run'}"]
    for command, text, statuses in (
        (worker, "generating rollouts", {signal.SIGINT: 130, signal.SIGTERM: 0}),
        (trainer, "workers   start some", {signal.SIGINT: 130, signal.SIGTERM: 143}),
    ):
        for number, status in statuses.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # of a shell's background job
            process = nest.start(f"{command[0]}-{number}", command)
            end = time.monotonic() + 60
            while text not in process.log.read_text():
                assert process.poll() is None and time.monotonic() < end, process.tail()
                time.sleep(0.02)
            process.send(number)
            assert process.wait(60) == status and "Traceback" not in process.tail(), process.tail()
            assert command is worker or "interrupted; the same command continues" in process.tail()
