"""`python -m tests.train.worker_trials --kills 40`: runs with rollout workers, of which trainers and workers are killed
and paused, the server of the book is restarted, or the disk is slow. Each run must end, and `check_rollouts` must find
nothing wrong with its ledger, also after each kill of a trainer.

Trainers and workers are children of one process that has everything loaded (`Nest`), so that they start at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.book.postgres import Server, processes, send, wait_ended
from tests.train.rollout_check import BOUNDS, MODES, SMALL, check_rollouts, configure

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 480.0
"""Seconds after which a run is taken for one that does not end."""
CLAIM_SECONDS = 1.0

SLOW_SYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void slow_down(int fd) {
    const char *folder = getenv("SLOW_SYNC_FOLDER"), *seconds = getenv("SLOW_SYNC_SECONDS");
    char link[64], path[4096];
    if (!folder || !seconds) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (!strncmp(path, folder, strlen(folder))) usleep((useconds_t)(atof(seconds) * 1e6));
}

int fsync(int fd) {
    slow_down(fd);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}

int fdatasync(int fd) {
    slow_down(fd);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


def slow_disk(folder: Path, seconds: float) -> dict[str, str]:
    """Compile the library, and return the environment in which each sync of a file below `folder` takes longer."""
    source, library = folder / "slow_sync.c", folder / "slow_sync.so"
    source.write_text(SLOW_SYNC)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {
        "LD_PRELOAD": str(library),
        "SLOW_SYNC_FOLDER": f"{folder}/run0/run/book",
        "SLOW_SYNC_SECONDS": str(seconds),
    }


class Nest:
    """A process with everything loaded, which forks `rollbook` commands."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "tests.train.worker_trials", "--serve"],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **question: Any) -> Any:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError(f"the nest ended: {self._process.wait()}")
        return json.loads(answer)

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        log = self.folder / f"{name}-{next(self._numbers)}.log"
        log.touch()
        return Child(self, self._ask(arguments=list(arguments), log=str(log)), log)

    def poll(self, pid: int) -> int | None:
        code: int | None = self._ask(poll=pid)
        return code

    def __enter__(self) -> Nest:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


@dataclass
class Child:
    """A command that was started."""

    nest: Nest
    pid: int
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or `None` while it runs."""
        if self.code is None:
            self.code = self.nest.poll(self.pid)
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> int:
        """Kill it, and wait."""
        self.send(signal.SIGKILL)
        return self.wait(60)

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise AssertionError(f"{self.log}: still running after {seconds:g} s: {self.tail()}")
            time.sleep(0.02)
        assert self.code is not None
        return self.code

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]


@dataclass
class Report:
    """What a trial did."""

    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    discarded: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items())) or "none"
        lines = [f"trial of rollout workers: {self.runs} runs in {self.seconds:.0f} s; faults: {faults}"]
        lines += [f"  VIOLATION: {text}" for text in self.violations[:20]]
        return "\n".join([*lines, f"  {len(self.violations)} violations"])


class Trial:
    """One run with two workers, and what is done to it.

    Args:
        nest: Starts its processes.
        folder: Where the run, and logs of processes, are.
        mode: A key of `MODES`, not `sync`.
        report: Collects faults and violations.
        url: The book; by default it is in the folder of the run.
        changes: Further changes of the configuration.
    """

    def __init__(
        self, nest: Nest, folder: Path, mode: str, report: Report, url: str | None = None, changes: Sequence[str] = ()
    ) -> None:
        self.nest, self.folder, self.mode, self.report = nest, folder, mode, report
        self.url = url or str(folder / "run" / "book")
        book = () if url is None else (f"book={url}",)
        self.changes = [*MODES[mode], *book, *changes]
        self.config = configure(folder / "run", *self.changes)
        self.trainer: Child | None = None
        self.workers: list[Child | None] = [None, None]
        self._starts = 0

    def start_trainer(self) -> None:
        self._starts += 1
        words = ["train", "letters", *SMALL, *self.changes, "--out", str(self.folder / "run")]
        self.trainer = self.nest.start(f"trainer-{self._starts}", words)

    def start_worker(self, number: int) -> None:
        self._starts += 1
        words = ["rollout", "--book", self.url, "--name", f"worker-{number}", "--trust"]
        self.workers[number] = self.nest.start(f"worker-{number}-{self._starts}", words)

    def has_book(self) -> bool:
        if "://" in self.url:
            return (self.folder / "run" / "checkpoints" / "step-000000").exists()
        return (Path(self.url) / "ledger.sqlite").exists()

    def is_running(self) -> bool:
        """Return whether the trainer and both workers have opened the book."""
        ready = (self.folder / "run" / "checkpoints" / "step-000000").exists()
        return ready and all(worker is not None and "generating" in worker.tail() for worker in self.workers)

    def run(self, luck: random.Random, faults: Sequence[str], count: int, server: Server | None = None) -> int:
        """Run to the end, with up to `count` faults at random times; return how many there were."""
        self.folder.mkdir(parents=True)
        done, end = 0, time.monotonic() + LONGEST
        self.start_trainer()
        assert self.trainer is not None
        next_fault = time.monotonic() + luck.uniform(0.2, 3.0)
        while True:
            code = self.trainer.poll()
            if code == 0:
                break
            if code is not None:
                self._fail(f"the trainer ended with {code}: {self.trainer.tail()}")
                break
            if time.monotonic() > end:
                self._fail(f"the run does not end: {self.trainer.tail()}")
                break
            time.sleep(0.02)
            if self.has_book():
                for number, worker in enumerate(self.workers):
                    if worker is None or worker.poll() is not None:
                        if worker is not None and worker.code not in (0, -signal.SIGKILL):
                            self._fail(f"a worker ended with {worker.code}: {worker.tail()}")
                        self.start_worker(number)
                if done < count and time.monotonic() > next_fault:
                    fault = luck.choice(faults)
                    if fault == "server restarted" and not self.is_running():
                        continue  # a book cannot be opened without its server
                    self._strike(fault, luck, server)
                    done += 1
                    next_fault = time.monotonic() + luck.uniform(0.2, 3.0)
        self._end()
        return done

    def _strike(self, fault: str, luck: random.Random, server: Server | None) -> None:
        assert self.trainer is not None
        self.report.faults[fault] += 1
        number = luck.randrange(2)
        worker = self.workers[number]
        if fault == "trainer killed":
            self.trainer.end()
            self._check(None)
            self.start_trainer()
        elif fault == "worker killed" and worker is not None:
            worker.end()
        elif fault == "worker paused" and worker is not None:
            worker.send(signal.SIGSTOP)
            time.sleep(CLAIM_SECONDS * luck.uniform(1.2, 2.0))
            worker.send(signal.SIGCONT)
        elif fault == "server restarted" and server is not None and server.process is not None:
            server.process.send_signal(signal.SIGQUIT)
            server.process.wait(60)
            time.sleep(luck.uniform(0.0, 1.0))
            server.restart()

    def _check(self, steps: int | None) -> None:
        if not self.has_book():
            return
        from rollbook.train.builders import load_prompts

        prompts, _ = load_prompts(self.config)
        try:
            violations = check_rollouts(self.url, prompts, BOUNDS[self.mode], steps=steps)
        except ValueError as error:  # killed before the rollouts were opened
            violations = [] if "not enough values" in str(error) else [repr(error)]
        except Exception as error:
            violations = [repr(error)] if steps is not None else []  # killed while it created the book
        self.report.violations += [f"{self.mode}: {text}" for text in violations]

    def _end(self) -> None:
        for worker in self.workers:
            if worker is not None:
                worker.send(signal.SIGCONT)
                try:
                    code = worker.wait(30)  # the trainer has finished
                    if code not in (0, -signal.SIGKILL):
                        self._fail(f"a worker ended with {code}: {worker.tail()}")
                except AssertionError as error:
                    self._fail(str(error))
                    worker.end()
        if self.trainer is not None and self.trainer.code == 0:
            self._check(self.config.steps)
            self.report.runs += 1
        elif self.trainer is not None:
            self.trainer.end()

    def _fail(self, text: str) -> None:
        self.report.violations.append(f"{self.mode}: {text}")
        for worker in self.workers:
            if worker is not None and self.trainer is not None and self.trainer.code != 0:
                worker.end()


FAULTS = ("trainer killed", "worker killed", "worker paused")


def trial(
    folder: Path,
    kills: int,
    *,
    seed: int = 0,
    faults: Sequence[str] = FAULTS,
    server: Server | None = None,
    steps: int = 40,
    sync_seconds: float = 0.0,
    per_run: int = 8,
    nest: Nest | None = None,
) -> Report:
    """Run after run, until there were so many faults.

    Args:
        folder: A new folder.
        kills: Number of faults.
        seed: Seed of their times and kinds.
        faults: Kinds of faults.
        server: Server for the books; by default they are in folders.
        steps: Steps of a run.
        sync_seconds: Seconds that a sync of a file of the book takes, of a slow disk.
        per_run: Most faults of one run.
        nest: Starts the processes; by default a new one.
    """
    report, begun, luck = Report(), time.monotonic(), random.Random(seed)
    environment = slow_disk(folder, sync_seconds) if sync_seconds else {}
    # SQLite has one writer at a time, and claims must last longer than the wait for it.
    seconds = max(CLAIM_SECONDS, 30 * sync_seconds)
    changes = [f"steps={steps}", "checkpoint.interval=5", "evaluation.interval=10", f"rollout.claim_seconds={seconds}"]
    with nullcontext(nest) if nest is not None else Nest(folder, **environment) as nest:
        turn = 0
        while (sum(report.faults.values()) < kills or not turn) and not report.violations:
            mode = ("async", "one_step_off")[turn % 2]
            place = folder / f"run{turn}"
            url = None if server is None else server.database()
            run = Trial(nest, place, mode, report, url, changes)
            run.run(luck, faults, min(kills - sum(report.faults.values()), per_run), server)
            turn += 1
    report.seconds = time.monotonic() - begun
    return report


def local_trial(folder: Path) -> Report:
    """Kill a trainer of two ranks that has started its worker itself: the worker ends, and the same command goes on."""
    report, begun = Report(), time.monotonic()
    changes = (*MODES["one_step_off"], "rollout.workers=1", "distributed=ddp")
    words = [sys.executable, "-m", "rollbook", "train", "letters", *SMALL, *changes, "--ranks", "2"]
    words += ["--out", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        trainer = subprocess.Popen([*words, "--steps", "1000"], env=environment, stdout=log, stderr=log)
    end = time.monotonic() + LONGEST
    while time.monotonic() < end and not list((folder / "run" / "checkpoints").glob("step-000002")):
        time.sleep(0.1)
    mine = {pid: process.command for pid, process in processes().items() if str(folder / "run") in process.command}
    workers = [pid for pid, text in mine.items() if " rollout " in text]
    if len(workers) != 1:
        report.violations.append(f"{len(workers)} workers: {(folder / 'log').read_text()[-1000:]}")
    send(mine.keys() - set(workers), signal.SIGKILL)
    report.faults["trainer killed"] += 1
    trainer.wait(60)
    wait_ended(workers)
    done = subprocess.run([*words, "--steps", "8"], env=environment, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        report.violations.append(f"the trainer ended with {done.returncode}: {done.stderr[-1000:]}")
    from rollbook.train.builders import load_prompts

    config = configure(folder / "run", *changes)
    book = str(folder / "run" / "book")
    report.violations += check_rollouts(book, load_prompts(config)[0], BOUNDS["one_step_off"])
    report.runs, report.seconds = 1, time.monotonic() - begun
    return report


def serve() -> None:
    """Read commands from the standard input, line by line; fork them, and answer their ids or how they ended."""
    import io

    import torch

    torch.set_num_threads(1)
    import rollbook.cli.train  # noqa: F401
    from rollbook.cli import main
    from rollbook.train.run import run

    with tempfile.TemporaryDirectory() as folder:
        run(configure(Path(folder, "run"), "steps=1"), stream=io.StringIO())  # loads what is loaded on the way
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        code = 70
        try:
            log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = main(question["arguments"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def run_trials() -> int:
    """Run the trials that are asked for, and print what they did."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.worker_trials", description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=40, help="faults of runs in folders")
    parser.add_argument("--restarts", type=int, default=10, help="restarts of the server of runs in PostgreSQL")
    parser.add_argument("--sync-seconds", type=float, default=2.0, help="seconds of a sync on the slow disk; 0: none")
    parser.add_argument("--local", type=int, default=1, help="0: no trial of two ranks with workers of their own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    folder = Path(tempfile.mkdtemp(prefix="rollbook-trial-"))
    reports = []
    for name in ("kills", "restarts", "postgres", "slow", "local"):
        (folder / name).mkdir()
    if options.kills:
        reports.append(trial(folder / "kills", options.kills, seed=options.seed))
        print(reports[-1], flush=True)
    if options.restarts:
        with Server() as server:
            for name, faults in (("restarts", ("worker paused", "server restarted")), ("postgres", FAULTS)):
                reports.append(trial(folder / name, options.restarts, seed=options.seed, faults=faults, server=server))
                print(reports[-1], flush=True)
    if options.sync_seconds:
        reports.append(trial(folder / "slow", 0, steps=3, sync_seconds=options.sync_seconds))
        print(reports[-1], flush=True)
    if options.local:
        reports.append(local_trial(folder / "local"))
        print(reports[-1], flush=True)
    if not any(report.violations for report in reports):
        shutil.rmtree(folder)
    else:
        print(f"logs: {folder}")
    return int(any(report.violations for report in reports))


if __name__ == "__main__":
    sys.exit(run_trials())
