"""`python -m tests.train.ray_trials --rounds 3`: runs of `rollbook train --ray` on a cluster of three raylets, over a
folder and a PostgreSQL server, while their processes are killed and paused and their nodes removed.

`Machines` is the cluster, `Driver` the command, `check` the independent checker: it reads the tables by plain SQL, and
compares them with what the processes of the run logged (`ray_user_code`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import rollbook
from rollbook.book import trained_steps
from tests.book.postgres import Server, processes
from tests.book.trials import tables
from tests.book.trials.log import Log
from tests.book.trials.verify import Ledger
from tests.train.ray_user_code import fingerprint

ROOT = Path(__file__).parents[2]
USER_CODE = Path(__file__).with_name("ray_user_code.py")
LONGEST = 240.0
"""Seconds that a run may take on a busy machine."""
PROMPTS, SAMPLES = 4, 3
STORE_BYTES = 80 << 20
SMALL = (
    *(f"batch.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}", "batch.minibatches=1"),
    *("warmup.steps=1", "warmup.target_accuracy=null", "warmup.batch_size=8", "data.options.count=400"),
    *("data.held_out=2", "evaluation.before=false", "evaluation.after=false", "checkpoint.interval=2"),
    *("model.options.hidden=32", "model.options.heads=1", "model.options.layers=1", "algorithm.kl_coef=0.0"),
    *("sampling.max_tokens=4", "sampling.min_tokens=4", "optimizer.lr=1e-4", "rollout.prompts_per_claim=2"),
    *("threads=1", "rollout.workers=2", "rollout.worker_resources={num_cpus: 1}"),
)
"""A run of seconds; its rewards are random, so that groups are rarely constant."""
MODES = {
    "sync": ("rollout.mode=sync",),
    "one_step_off": ("rollout.mode=one_step_off",),
    "async": ("rollout.mode=async", "replay.max_staleness=2"),
}
BOUNDS = {"sync": 0, "one_step_off": 1, "async": 2}
BOOK, WORKER, TRAINER = "BookServer", "RolloutActor", "TrainerRank"
SLOW_FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Sleeps while the file $SLOW_FSYNC exists, in processes whose title has $SLOW_TITLE. */
static void slow(void) {
    const char *flag = getenv("SLOW_FSYNC"), *name = getenv("SLOW_TITLE");
    char title[256] = {0};
    if (!flag || !name || access(flag, F_OK)) return;
    int file = open("/proc/self/cmdline", O_RDONLY);
    if (file < 0) return;
    ssize_t size = read(file, title, sizeof title - 1);
    close(file);
    if (size > 0 && strstr(title, name)) sleep(2);
}
int fsync(int fd) { slow(); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { slow(); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""


def wait_until(condition: Callable[[], Any], about: str | Callable[[], str], seconds: float = LONGEST / 2) -> Any:
    """Return the first true result of a condition."""
    end = time.monotonic() + seconds
    while True:
        outcome = condition()
        if outcome:
            return outcome
        if time.monotonic() > end:
            raise AssertionError(f"after {seconds:g} s: {about if isinstance(about, str) else about()}")
        time.sleep(0.05)


# --- the cluster ------------------------------------------------------------------------------------------------------


class Actor(NamedTuple):
    """The process of an actor."""

    kind: str
    pid: int
    node: Any


class Machines:
    """A Ray cluster of three raylets on this machine, without the address file that `ray.init("auto")` reads.

    The head has the driver. The other nodes have the resource `remote`.

    Args:
        folder: For the library that slows `fsync` down.
    """

    def __init__(self, folder: Path) -> None:
        self.short = Path(tempfile.mkdtemp(prefix="rb", dir="/tmp"))  # sockets have short paths
        self.slow_flag = folder / "slow"
        library = folder / "slow.so"
        source = folder / "slow.c"
        source.write_text(SLOW_FSYNC)
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "RAY_TMPDIR": str(self.short),
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        preload = {"LD_PRELOAD": str(library), "SLOW_FSYNC": str(self.slow_flag), "SLOW_TITLE": BOOK}
        self._before = dict(os.environ)
        os.environ.clear()
        os.environ.update({**self.environment, **preload})
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 3, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=arguments)
        self.add_node()
        self.add_node()
        os.environ.clear()
        os.environ.update(self._before)
        self.address: str = self.cluster.address
        self.ignored: set[int] = set()
        """Processes that an earlier trial left behind when it failed."""

    def add_node(self, resource: str = "remote", **environment: str) -> Any:
        """Add a node with a resource, whose processes have these variables too; return it."""
        before = dict(os.environ)
        os.environ.update(self.environment | environment)
        try:
            return self.cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES, resources={resource: 4})
        finally:
            os.environ.clear()
            os.environ.update(before)

    def fill(self) -> None:
        """Add nodes until there are three again."""
        while len(self.cluster.list_all_nodes()) < 3:
            self.add_node()

    def out_of_disk(self) -> int:
        """Count the objects that could not be created, by the logs of all raylets."""
        logs = [path.read_text(errors="replace") for path in self.short.glob("**/logs/raylet*")]
        return sum(log.count("Out-of-disk: Failed to create object") for log in logs)

    def _raylets(self) -> dict[int, Any]:
        nodes = {}
        for node in self.cluster.list_all_nodes():
            for entry in node.all_processes.get("raylet", []):
                nodes[entry.process.pid] = node
        return nodes

    def actors(self, kind: str) -> list[Actor]:
        """Return the processes of actors of a class that run, by the titles that Ray gives them."""
        raylets = self._raylets()
        actors = [
            Actor(kind, pid, raylets[process.parent])
            for pid, process in sorted(processes().items())
            if process.parent in raylets and not process.ended and process.command.startswith(f"ray::{kind}")
        ]
        return [actor for actor in actors if actor.pid not in self.ignored]

    def wait_for(self, kind: str, count: int = 1, other_than: Sequence[int] = ()) -> list[Actor]:
        """Wait for so many processes of actors of a class."""

        def running() -> list[Actor]:
            actors = [actor for actor in self.actors(kind) if actor.pid not in other_than]
            return actors if len(actors) >= count else []

        actors: list[Actor] = wait_until(running, f"no {count} processes of {kind}")
        return actors

    def wait_for_none(self) -> None:
        """Wait until no actor of a run is left."""

        def left() -> list[Actor]:
            return [actor for kind in (BOOK, WORKER, TRAINER) for actor in self.actors(kind)]

        wait_until(lambda: not left(), "actors are left", 20)

    def remove(self, node: Any) -> None:
        """Kill a raylet with its processes, as if the machine had failed."""
        self.cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """Stop the cluster."""
        self.cluster.shutdown()
        shutil.rmtree(self.short, ignore_errors=True)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# --- a run ------------------------------------------------------------------------------------------------------------


class Trial:
    """A run: its configuration, its commands one after another, and its check.

    Args:
        machines: The cluster.
        folder: For the run and its log.
        changes: Of the configuration.
        mode: A key of `MODES`.
        steps: Steps of the run.
        seconds: Duration of a reward.
        book: Address of the book; `None`: in the folder of the run.
        ranks: Of the trainer.
    """

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        *changes: str,
        mode: str = "async",
        steps: int = 6,
        seconds: float = 0.0,
        book: str | None = None,
        ranks: int = 1,
    ) -> None:
        self.machines, self.mode, self.steps, self.ranks = machines, mode, steps, ranks
        self.address = machines.address
        machines.ignored |= {actor.pid for kind in (BOOK, WORKER, TRAINER) for actor in machines.actors(kind)}
        self.place = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        self.out, self.log = self.place / "run", self.place / "log"
        self.gate = self.place / "gate"
        self.url = book or str(self.out / "book")
        options = f"{{seconds: {seconds}, gate: {self.gate}}}"
        self.changes = [
            *SMALL,
            *MODES[mode],
            *(f"steps={steps}", f"model.builder={USER_CODE}:model", f"model.options.log={self.log}"),
            f"rewards=[{{function: '{USER_CODE}:reward', options: {options}}}]",
            *([f"book={book}"] if book else []),
            *([f"distributed={'fsdp' if book else 'ddp'}"] if ranks > 1 else []),
            *changes,
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.output = self.place / "output"

    @property
    def command(self) -> list[str]:
        """The command of the driver."""
        words = [sys.executable, "-m", "rollbook", "train", "letters", *self.changes, "--out", str(self.out)]
        return [*words, "--ray", self.address, *(["--ranks", str(self.ranks)] if self.ranks > 1 else [])]

    def start(self) -> Trial:
        """Start the driver."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.place,
                env=self.machines.environment,
                start_new_session=True,
            )
        return self

    def printed(self) -> str:
        """Return what all drivers of this run printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def done(self) -> int:
        """Return the last step in the metrics of the run."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step was done."""

        def reached() -> bool:
            if self.process is not None and self.process.poll() is not None and self.done() < step:
                raise AssertionError(f"the driver ended with {self.process.returncode}:\n{self.printed()[-3000:]}")
            return self.done() >= step

        wait_until(reached, lambda: f"step {step} was not reached:\n{self.printed()[-3000:]}", LONGEST)

    def wait(self, seconds: float = LONGEST) -> int:
        """Wait for the end of the driver; return its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver does not end:\n{self.printed()[-3000:]}") from None

    def finish(self) -> None:
        """Wait for the end of the run; start the driver again, once, if it ended before."""
        if self.wait():
            assert "Traceback" not in self.printed(), self.printed()[-5000:]
            self.start()
            assert self.wait() == 0, self.printed()[-5000:]
        assert "Traceback" not in self.printed(), self.printed()[-5000:]

    def kill(self, kind: str = "") -> Actor | None:
        """Kill the driver, or the process of an actor."""
        if not kind:
            assert self.process is not None
            self.process.kill()
            self.process.wait(60)
            return None
        actor = self.machines.wait_for(kind)[0]
        os.kill(actor.pid, signal.SIGKILL)
        return actor

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Press Ctrl-C, or send another signal; check that the driver ends its actors and says how to continue."""
        assert self.process is not None
        length = len(self.printed())
        self.process.send_signal(number)
        status = self.wait(60)
        text = self.printed()[length:]
        assert status == 128 + number, (status, text[-3000:])
        assert "interrupted; the same command continues" in text and "Traceback" not in text, text[-3000:]
        self.machines.wait_for_none()

    def fails_with(self, message: str) -> None:
        """Check that the driver ends with a line that has this text, and ends its actors."""
        assert self.wait() == 2, self.printed()[-3000:]
        lines = [line for line in self.printed().splitlines() if line.startswith("rollbook train: ")]
        assert lines and message in lines[-1], self.printed()[-3000:]
        assert "Traceback" not in self.printed(), self.printed()[-3000:]
        self.machines.wait_for_none()

    def check(self) -> None:
        """Raise an error that lists what is wrong with the finished run."""
        wrong = check(self.url, self.log, BOUNDS[self.mode], self.steps)
        assert not wrong, "\n".join([*wrong[:20], f"{len(wrong)} violations in {self.place}", self.printed()[-2000:]])

    def end(self) -> None:
        """Kill what is left of the run."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# --- the check --------------------------------------------------------------------------------------------------------


def check(url: str, log: Path, bound: int, steps: int) -> list[str]:
    """List everything that is wrong with the book of a finished run.

    Args:
        url: The book.
        log: What the processes of the run logged.
        bound: Maximum staleness of a token.
        steps: Steps of the run.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    state = tables.read(url)
    wrong = _check_appends(state, lines)
    wrong += _check_claims(state)
    wrong += _check_ledger(state, lines)
    return wrong + _check_steps(url, lines, bound, steps)


def _check_appends(state: tables.Tables, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Each acknowledged record is there once, or was there until a rewind; nobody else appended records."""
    live = Counter(record.uid for record in state.records if record.removed_reason is None and not record.evaluation)
    rewound = {record.uid for record in state.records if record.removed_reason == "rewound"}
    wrong = [f"{uid}: it is there {count} times" for uid, count in live.items() if count > 1]
    tried, appended = (
        {uid for line in lines if line["did"] == did for uid in line["records"]} for did in ("try append", "append")
    )
    if not appended:
        wrong.append("the processes of the run logged no append")
    wrong += [f"{uid}: its append returned, and it is not in the book" for uid in appended - live.keys() - rewound]
    wrong += [f"{uid}: no worker appended it" for uid in live.keys() - tried]
    admitted = Counter(event.seq for event in state.events if event.kind == "admitted")
    wrong += [f"{r.uid}: admitted {admitted[r.seq]} times" for r in state.records if admitted[r.seq] != 1]
    return wrong


def _check_claims(state: tables.Tables) -> list[str]:
    """Each group that a worker began was finished or given back, and groups are never given to two workers."""
    wrong = []
    holders: dict[int, int] = {}  # fence by number of the group
    for event in state.events:
        detail = json.loads(event.detail or "{}")
        if event.kind == "begun":
            number = detail["number"]
            if number in holders:
                wrong.append(f"group {number}: begun under fence {event.lease}, while {holders[number]} had it")
            holders[number] = event.lease or 0
        elif event.kind in ("generated", "reassigned"):
            fence = holders.pop(detail["number"], None)
            if event.lease is not None and fence != event.lease:
                wrong.append(f"group {detail['number']}: {event.kind} under fence {event.lease}, it had {fence}")
    return wrong + [f"group {number}: begun and never ended" for number in holders]


def _check_ledger(state: tables.Tables, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Replay the events of records that were not rewound, and compare acknowledgements with the log."""
    rewound = {record.seq for record in state.records if record.removed_reason == "rewound"}
    voided = {event.lease for event in state.events if event.kind == "voided"}
    is_rewound = any(event.kind == "rewound" for event in state.events)
    counted = Ledger(state)
    counted.training |= {
        record.seq for record in state.records if record.removed_reason == "rewound" and not record.evaluation
    }
    counted.counters()
    state.records = [record for record in state.records if record.seq not in rewound]
    state.events = [event for event in state.events if event.seq not in rewound]
    lost_work = [row for row in state.work if row.seq in rewound]
    wrong = [f"{row}: its record was rewound" for row in lost_work if (row.state, row.reason) != ("dropped", "rewound")]
    state.work = [row for row in state.work if row.seq not in rewound]
    ledger = Ledger(state)
    ledger.by_group = {}
    log = Log()
    for line in lines:
        uids = tuple(uid for uid in line.get("uids", ()) if uid in ledger.seq)
        key = ("train", line.get("fence", 0), uids)
        if line["did"] == "try ack":
            log.acks_tried[key] = None
        elif line["did"] == "lost":
            log.lost[key] = None
        elif line["did"] == "ack" and line["fence"] not in voided:
            log.acks[key] = None
    ledger.acknowledgements(list(log.acks), log)
    ledger.lives()
    if not is_rewound:  # which announces an earlier version again
        ledger.staleness()
    ledger.conservation()
    dropped = [row for row in state.work if row.state == "dropped" and not row.reason]
    return [*wrong, *counted.wrong, *ledger.wrong, *(f"{row}: dropped without a reason" for row in dropped)]


def _check_steps(url: str, lines: Sequence[dict[str, Any]], bound: int, steps: int) -> list[str]:
    """Each step trained on whole groups, each once, with tokens within the bound; records are as they were appended."""
    wrong = []
    appended: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line["did"] == "try append":
            for uid, mark in line["records"].items():
                appended[uid].add(mark)
    groups: dict[int, Counter[str]] = defaultdict(Counter)
    with rollbook.open(url, mode="r") as book:
        report = book.check()
        if not report.ok:
            wrong.append(str(report))
        counts = book.counts()
        if not counts.adds_up or counts.leased:
            wrong.append(f"counts: {counts}")
        records = {record.eid.uid: record for record in book.where(evaluation=0)}
        trained = trained_steps(book)
    for uid, record in records.items():
        if fingerprint(record) not in appended[uid]:
            wrong.append(f"{uid}: its content is not what was appended")
    for uid, numbers in trained.items():
        versions = records[uid].policy_versions
        tokens = [versions] if isinstance(versions, int) else [int(version) for version in versions]
        if len(numbers) != 1:
            wrong.append(f"{uid}: trained in steps {numbers}")
        step = numbers[0] or 0
        groups[step][records[uid].eid.tid] += 1
        if max(tokens) > step - 1 or min(tokens) < step - 1 - bound:
            wrong.append(f"{uid}: step {step} trained on tokens of versions {tokens}, the bound is {bound}")
    sizes = {step: sorted(sizes.values()) for step, sizes in groups.items()}
    if sizes != dict.fromkeys(range(1, steps + 1), [SAMPLES] * PROMPTS):
        wrong.append(f"samples of the groups of steps: {sizes}, expected {PROMPTS} groups of {SAMPLES} in each")
    return wrong


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """What trials share."""

    machines: Machines
    server: Server
    folder: Path

    def trial(self, *changes: str, postgres: bool = False, **options: Any) -> Trial:
        """Make a run."""
        book = self.server.database() if postgres else None
        return Trial(self.machines, self.folder, *changes, book=book, **options)


REMOTE = "rollout.trainer_resources={resources: {remote: 1}}"
"""Places the trainer on another node than the driver."""
WORKERS_REMOTE = "rollout.worker_resources={resources: {remote: 1}}"


def plain(setting: Setting, mode: str, *, ranks: int = 1, postgres: bool = False) -> None:
    """A run without faults."""
    with setting.trial(mode=mode, ranks=ranks, postgres=postgres) as trial:
        trial.start()
        assert trial.wait() == 0, trial.printed()[-5000:]
        trial.check()
        setting.machines.wait_for_none()


def killed_actors(setting: Setting, *, postgres: bool = False, steps: int = 24) -> None:
    """A worker, the book's actor and the trainer are killed, one after another; a worker is paused past its claim."""
    changes = ("rollout.claim_seconds=2", "checkpoint.interval=1")
    with setting.trial(*changes, steps=steps, seconds=0.05, postgres=postgres) as trial:
        trial.start()
        trial.wait_for_step(1)
        paused = setting.machines.wait_for(WORKER, 2)[0]
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            killed = trial.kill(BOOK)
            assert killed is not None
            time.sleep(4)  # claims expire
            trial.wait_for_step(3)
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        other = setting.machines.wait_for(WORKER, 1, other_than=[paused.pid])[0]
        os.kill(other.pid, signal.SIGKILL)
        trial.wait_for_step(trial.done() + 2)
        trial.kill(TRAINER)
        trial.finish()
        trial.check()
        assert "restarting the trainer" in trial.printed()


def several_faults(setting: Setting) -> None:
    """As `killed_actors` in less time: a failing builder, the book, a worker, its node, the trainer and SIGTERM."""
    changes = ("rollout.claim_seconds=2", "checkpoint.interval=1", WORKERS_REMOTE, f"model.options.fail={WORKER}")
    with setting.trial(*changes, steps=14, seconds=0.03) as trial:
        trial.changes.append(f"model.options.failed={trial.place / 'failed'}")
        trial.start()
        trial.wait_for_step(1)
        workers = setting.machines.wait_for(WORKER, 2)
        os.kill(workers[0].pid, signal.SIGSTOP)
        trial.kill(BOOK)
        trial.wait_for_step(trial.done() + 3)
        os.kill(workers[0].pid, signal.SIGCONT)
        os.kill(workers[1].pid, signal.SIGKILL)
        trial.wait_for_step(trial.done() + 1)
        setting.machines.remove(workers[0].node)
        trial.kill(TRAINER)
        try:
            trial.wait_for_step(trial.done() + 1)
            trial.interrupt(signal.SIGTERM)
            trial.start()
            trial.finish()
            trial.check()
        finally:
            setting.machines.fill()
        assert "restarting the trainer" in trial.printed()
        assert "exited (RuntimeError: the builder of the trial fails); restarting" in trial.printed()


def killed_rank(setting: Setting) -> None:
    """The second rank of the trainer is killed."""
    with setting.trial(steps=8, seconds=0.05, ranks=2) as trial:
        trial.start()
        trial.wait_for_step(2)
        ranks = setting.machines.wait_for(TRAINER, 2)
        os.kill(ranks[1].pid, signal.SIGKILL)
        trial.finish()
        trial.check()
        assert "restarting the trainer" in trial.printed(), trial.printed()[-3000:]


def continued(setting: Setting) -> None:
    """A finished run continues with more steps; then the same command finds nothing to do."""
    with setting.trial(steps=4) as trial:
        trial.start()
        assert trial.wait() == 0, trial.printed()[-5000:]
        trial.steps = 6
        trial.changes.append("steps=6")
        for _ in range(2):
            trial.start()
            assert trial.wait() == 0, trial.printed()[-5000:]
        trial.check()


def killed_driver(setting: Setting, *, postgres: bool = False, ranks: int = 1) -> None:
    """The driver is killed twice, and the same command resumes."""
    with setting.trial(steps=8, seconds=0.05, postgres=postgres, ranks=ranks) as trial:
        trial.start()
        trial.wait_for_step(3)
        trial.kill()
        trial.start()
        trial.finish()
        trial.check()
        assert "continuing after step" in trial.printed()


def killed_driver_and_database(setting: Setting) -> None:
    """With two ranks, the driver is killed and started again, and then the database server."""
    with setting.trial(mode="one_step_off", ranks=2, steps=8, seconds=0.05, postgres=True) as trial:
        trial.start()
        trial.wait_for_step(3)
        trial.kill()
        trial.start()
        trial.wait_for_step(5)
        setting.server.kill()
        time.sleep(0.5)
        setting.server.restart()
        trial.finish()
        trial.check()
        assert "continuing after step 2" in trial.printed()


def restarted_database(setting: Setting, *, ranks: int = 1) -> None:
    """The database server is killed and started again, twice."""
    with setting.trial(steps=10, seconds=0.05, postgres=True, ranks=ranks) as trial:
        trial.start()
        for step in (2, 4):
            trial.wait_for_step(step)
            setting.server.kill()
            time.sleep(1)
            setting.server.restart()
        trial.finish()
        trial.check()


def lost_node(setting: Setting, *, with_trainer: bool, postgres: bool = False) -> None:
    """A node with a worker, or that of the trainer, fails."""
    changes = [REMOTE] if with_trainer else [WORKERS_REMOTE]
    with setting.trial(*changes, "rollout.claim_seconds=2", steps=10, seconds=0.05, postgres=postgres) as trial:
        trial.start()
        trial.wait_for_step(2)
        kind = TRAINER if with_trainer else WORKER
        setting.machines.remove(setting.machines.wait_for(kind)[0].node)
        try:
            trial.finish()
            trial.check()
        finally:
            setting.machines.fill()


def lost_book_node(setting: Setting) -> None:
    """The node of the book's actor, which serves a database, fails: another node serves it."""
    machines = setting.machines
    with setting.trial("rollout.claim_seconds=2", steps=10, seconds=0.05, postgres=True) as trial:
        trial.start()
        trial.wait_for_step(2)
        [book] = machines.wait_for(BOOK)
        for _ in range(20):
            if book.node is not machines.cluster.head_node:
                break
            os.kill(book.pid, signal.SIGKILL)  # Ray restarts it on any node
            [book] = machines.wait_for(BOOK, other_than=[book.pid])
        assert book.node is not machines.cluster.head_node
        machines.remove(book.node)
        try:
            trial.finish()
            trial.check()
        finally:
            machines.fill()


FILLER = """
import sys, time, ray, numpy as np

ray.init(sys.argv[1], namespace="filler", log_to_driver=False)

@ray.remote(resources={"small": 0.1})
class Filler:
    def fill(self):
        self.views = []
        try:
            while True:
                self.views.append(ray.get(ray.put(np.ones(4 << 20, np.uint8))))
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError):
            return len(self.views)

filler = Filler.remote()
ray.get(filler.__ray_ready__.remote())
print("ready", flush=True)
sys.stdin.readline()
print("full", ray.get(filler.fill.remote()), flush=True)
time.sleep(600)
"""
"""Fills the object store of the node that has the resource `small`, in use, so that nothing can be evicted.

It begins when it reads a line.
"""


def full_store(setting: Setting) -> None:
    """The object store of the trainer's node fills up during the run, and objects cannot be spilled to its disk."""
    machines = setting.machines
    # A disk counts as full above this share of its size.
    node = machines.add_node("small", RAY_local_fs_capacity_threshold="0.0001")
    changes = ("model.options.hidden=256", "model.options.layers=4", "model.options.heads=2")
    process = None
    try:
        with setting.trial(*changes, "rollout.trainer_resources={resources: {small: 1}}", steps=16) as trial:
            process = subprocess.Popen(
                [sys.executable, "-c", FILLER, machines.address],
                env=machines.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            trial.start()
            trial.wait_for_step(2)
            process.stdin.write(b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line.startswith(b"full") and int(line.split()[1]) > 5, line
            full = machines.out_of_disk()
            # The trainer cannot put new weights into the store, and waits.
            wait_until(lambda: machines.out_of_disk() > full, trial.printed)
            step = trial.done()
            time.sleep(2)
            assert trial.done() <= step + 1
            process.kill()
            trial.finish()
            trial.check()
    finally:
        if process is not None:
            process.kill()
            process.wait(60)
        machines.remove(node)


def slow_disk(setting: Setting, *, seconds: float | None = None) -> None:
    """Each `fsync` of the book's process takes two seconds, in the second and third step, or for some seconds.

    Claims have to last longer than several writes, else their groups are given from worker to worker.
    """
    with setting.trial("checkpoint.interval=5", steps=5) as trial:
        trial.start()
        trial.wait_for_step(1)
        setting.machines.slow_flag.touch()
        try:
            if seconds is None:
                trial.wait_for_step(3)
            else:
                time.sleep(seconds)
        finally:
            setting.machines.slow_flag.unlink()
        trial.finish()
        trial.check()


def interrupted(setting: Setting) -> None:
    """Ctrl-C and SIGTERM end the actors, and the same command continues."""
    with setting.trial(steps=8, seconds=0.1) as trial:
        for step, number in ((2, signal.SIGINT), (4, signal.SIGTERM)):
            trial.start()
            trial.wait_for_step(step)
            trial.interrupt(number)
        trial.start()
        assert trial.wait() == 0, trial.printed()[-3000:]
        trial.check()


def failed_reward(setting: Setting) -> None:
    """A reward that fails on all samples ends the run."""
    with setting.trial(f"rewards={USER_CODE}:failing_reward") as trial:
        trial.start().fails_with("step 1: all 12 samples failed, or have no reward")
        assert "the reward of the trial fails" in trial.printed()


def failed_builder(setting: Setting) -> None:
    """A builder that always fails in a worker ends the run after some restarts, and its traceback is in a file."""
    with setting.trial(f"model.options.fail={WORKER}", "rollout.workers=1") as trial:
        trial.start().fails_with(
            "worker-0 failed 5 times in a row; the last error: RuntimeError: the builder of the trial fails"
        )
        [log, *_] = (trial.out / "workers").glob("worker-*.log")
        assert "ray_user_code.py" in log.read_text()


def wrong_address(setting: Setting) -> None:
    """There is no cluster at the address."""
    with setting.trial() as trial:
        trial.address = "127.0.0.1:1"
        trial.start().fails_with("--ray: cannot connect to the cluster at 127.0.0.1:1")
        assert not trial.out.exists()


def too_few_cpus(setting: Setting) -> None:
    """A run that needs more CPUs than there are waits with a warning, and Ctrl-C ends it."""
    with setting.trial("rollout.worker_resources={num_cpus: 50}") as trial:
        trial.start()
        wait_until(lambda: "the run needs 101 CPUs and the cluster has 9" in trial.printed(), trial.printed)
        trial.interrupt()


TRIALS: dict[str, Callable[[Setting], None]] = {
    **{f"plain, {mode}": partial(plain, mode=mode) for mode in MODES},
    "plain, async, 2 ranks": partial(plain, mode="async", ranks=2),
    "plain, sync, 2 ranks, PostgreSQL": partial(plain, mode="sync", ranks=2, postgres=True),
    "plain, async, PostgreSQL": partial(plain, mode="async", postgres=True),
    "actors killed, worker paused": killed_actors,
    "actors killed, worker paused, PostgreSQL": partial(killed_actors, postgres=True),
    "rank killed": killed_rank,
    "continued with more steps": continued,
    "several faults": several_faults,
    "driver killed": killed_driver,
    "driver killed, 2 ranks, PostgreSQL": partial(killed_driver, ranks=2, postgres=True),
    "driver and database killed, 2 ranks": killed_driver_and_database,
    "database killed": restarted_database,
    "database killed, 2 ranks": partial(restarted_database, ranks=2),
    "node of a worker lost": partial(lost_node, with_trainer=False),
    "node of the trainer lost": partial(lost_node, with_trainer=True),
    "node of the trainer lost, PostgreSQL": partial(lost_node, with_trainer=True, postgres=True),
    "node of the book lost, PostgreSQL": lost_book_node,
    "object store full": full_store,
    "slow disk": slow_disk,
    "Ctrl-C and SIGTERM": interrupted,
    "failing reward": failed_reward,
    "failing builder": failed_builder,
    "wrong address": wrong_address,
    "too few CPUs": too_few_cpus,
}


def main() -> int:
    """Run the trials, and print what failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.ray_trials", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="text in the names of the trials to run")
    options = parser.parse_args()
    failures = count = 0
    with tempfile.TemporaryDirectory(prefix="rollbook-ray-") as place:
        for number in range(options.rounds):
            # A new cluster each time: what one trial leaves behind should not add up.
            with Machines(Path(place)) as machines, Server() as server:
                setting = Setting(machines, server, Path(place))
                for name, trial in TRIALS.items():
                    if options.only not in name:
                        continue
                    count += 1
                    start = time.monotonic()
                    try:
                        trial(setting)
                        outcome = "ok"
                    except Exception:
                        failures += 1
                        outcome = f"FAILED\n{traceback.format_exc()}"
                    print(f"round {number + 1}: {name:<42} {time.monotonic() - start:6.1f} s  {outcome}", flush=True)
    print(f"{failures} failures in {count} trials")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
