"""Training on several ranks, compared with one process: presets, checkpoints, failures and killed ranks.

    python -m tests.train.ranks --ranks 2 3           # every preset and its variations: half an hour
    python -m tests.train.ranks --kills 20            # ranks killed at random times
    python -m tests.train.ranks --short FOLDER        # what `test_distributed` reads

Ranks are forked from a process that has imported everything, so that a rank costs what its work costs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rollbook
from rollbook.book.book import Book
from rollbook.cli import main as cli
from rollbook.core.process_group import SINGLE_PROCESS
from rollbook.models import Actor
from rollbook.train import distributed as train_distributed
from rollbook.train.algorithm import AlgorithmConfig
from rollbook.train.checkpoint import CheckpointConfig
from rollbook.train.distributed import Distributed, DistributedTrainer
from rollbook.train.learner import MinibatchConfig
from rollbook.train.optimizer import OptimizerConfig
from rollbook.train.prompts import Prompts
from rollbook.train.recipes import letters
from rollbook.train.tracker import METRICS_FILE
from rollbook.train.trainer import StepReport, Trainer
from tests import tiny
from tests.train import preset_steps

LONGEST = 240.0
"""Seconds of a case, after which ranks that wait for each other are ended."""
TOLERANCE = 1e-5
LOOSE = {"ppo, critic warm-up": 5e-5, "sft, bfloat16": 5e-2, "sft, autocast": 2e-2}
"""In one process, other micro-batches change the gradient norm of the last step by 2e-5, too; in bfloat16 by more."""
METRICS = ("loss", "grad_norm", "critic/value_loss", "critic/grad_norm")
WAITING = ("ranks/wait_share", "ranks/plan_wait_share")
VARIATIONS: dict[str, dict[str, Any]] = {
    "grpo, short micro-batches": {**preset_steps.GRPO, "kl_coef": 0.1, "batch": {"token_budget": 12}},
    "grpo, one prompt": {**preset_steps.GRPO, "group_size": 2, "prompts_per_step": 1},
    "grpo, LoRA": {**preset_steps.GRPO, "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
    "sft, bfloat16": {"algorithm": "sft", "prompts_per_step": 5, "precision": "bfloat16"},
    "sft, autocast": {"algorithm": "sft", "prompts_per_step": 5, "precision": "autocast"},
    "dpo, short micro-batches": {"algorithm": "dpo", "prompts_per_step": 5, "batch": {"token_budget": 16}},
}
"""Adapters, bfloat16, autocast, and cases in which ranks have different numbers of micro-batches, or none."""
IMAGES = "grpo, images and text"
CASES = [*preset_steps.SETTINGS, *VARIATIONS, IMAGES]
SHORT = [
    "grpo, short micro-batches", "grpo, one prompt", "grpo, LoRA", "ppo", "sft", "dpo", "replay with an expert", IMAGES,
]  # fmt: skip
SHORT_STEPS = 2
RUN_STEPS, INTERVAL = 6, 2
FAILURE = "no samples today"


# --- ranks ------------------------------------------------------------------------------------------------------------


def fork_ranks(count: int, function: Callable[..., Any], *arguments: Any, log: Path | None = None) -> list[int]:
    """Call a function in forked processes, the ranks of a run, and return their ids; `log` gets their output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost"}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_PORT=port)
            if log is not None:
                handle = os.open(log.with_name(f"{log.name}-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
                os.dup2(handle, 2)
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return children


def wait_for(children: Sequence[int]) -> list[int]:
    """Return the exit statuses of processes; of a killed one, minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


# --- presets ----------------------------------------------------------------------------------------------------------


def summarize(trainer: Trainer, reports: Sequence[StepReport]) -> dict[str, Any]:
    """Return the metrics of the steps and the complete weights."""
    weights = {
        f"{name}/{key}": weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()
        for name, model in (("policy", trainer.actor), ("critic", trainer.models.critic))
        if model is not None
        for key, weight in model.state_dict().items()
    }
    metrics = [
        {name: float(report[name]) for name in (*METRICS, *WAITING) if name in report.metrics} for report in reports
    ]
    return {"metrics": metrics, "weights": weights, "uids": [report.uids for report in reports]}


@contextlib.contextmanager
def shared_book(folder: Path, distributed: Distributed) -> Iterator[None]:
    """Open one book in a folder on all ranks, where a case opens one in memory. Only rank 0 writes to it."""
    open_book, append = rollbook.open, Book.append

    def open_shared(url: Any, *arguments: Any, **options: Any) -> Any:
        if url != "memory:":
            return open_book(url, *arguments, **options)
        book = open_book(folder / "book") if distributed.is_main else None
        distributed.group.gather([])  # the book exists
        return book or open_book(folder / "book", mode="r")

    def append_once(book: Book, records: Any, **options: Any) -> Any:
        return None if book.read_only else append(book, records, **options)

    rollbook.open, Book.append = open_shared, append_once  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        rollbook.open, Book.append = open_book, append  # type: ignore[method-assign]


def build_case(name: str, folder: Path) -> Trainer:
    """Build the trainer of a case; `folder` is for its books."""
    if name == IMAGES:
        return build_vision_trainer()
    return preset_steps.build_trainer(folder=folder, **{**preset_steps.SETTINGS, **VARIATIONS}[name])


def build_vision_trainer() -> Trainer:
    """Build a trainer of a vision-language model, some prompts of which have an image."""
    model, processor = tiny.llava()
    for weight in model.parameters():
        if not weight.any():
            weight.data.fill_(0.1)  # the gradients of biases of keys are rounding errors, which show near 0
    texts = [{"prompt": "abcdefghij"[i:]} for i in range(5)]
    images = [{"prompt": "<image>" + "abcde"[i:], "images": [tiny.picture((50 * i, 0, 255))]} for i in range(5)]
    return preset_steps.Trainer(
        Actor(model, processor=processor),
        AlgorithmConfig.preset("grpo", group_size=2, kl_coef=0.0),
        rollbook.open("memory:"),
        prompts=Prompts([*texts, *images], seed=preset_steps.SEED),
        reward=preset_steps.reward_sum,
        sampling={"max_tokens": 4},
        prompts_per_step=5,
        optimizer=OptimizerConfig(lr=0.02, eps=1e-2),
        minibatch=MinibatchConfig(minibatches=2, token_budget=20),
        seed=preset_steps.SEED,
    )


def run_case(name: str, steps: int, folder: Path, distributed: Distributed | None = None) -> dict[str, Any]:
    """Train a case; with `distributed`, on all ranks, which read the book from a folder."""
    if distributed is None:
        with preset_steps.reproducible():
            trainer = build_case(name, folder)
            return summarize(trainer, trainer.run(steps))
    rank_folder = folder / f"rank-{distributed.rank}"
    rank_folder.mkdir(parents=True)
    preset_steps.Trainer = partial(DistributedTrainer, distributed=distributed)  # type: ignore[assignment, misc]
    try:
        with preset_steps.reproducible(), shared_book(folder, distributed):
            trainer = build_case(name, rank_folder)
            return summarize(trainer, trainer.run(steps))
    finally:
        preset_steps.Trainer = Trainer  # type: ignore[misc]


def run_cases(folder: Path, strategies: Sequence[str], names: Sequence[str], steps: int) -> None:
    """Run cases on this rank; rank 0 writes the results to `STRATEGY-NUMBER.pt`."""
    Trainer.process_group = SINGLE_PROCESS
    for strategy in strategies:
        distributed = Distributed(strategy, "cpu")
        for i, name in enumerate(names):
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            begun = time.perf_counter()
            result = run_case(name, steps, folder / f"{strategy}-{i}", distributed)
            result["seconds"] = time.perf_counter() - begun
            if distributed.is_main:
                torch.save(result, folder / f"{strategy}-{i}.pt")


def relative_difference(expected: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative differences of losses, gradient norms and weights.

    Losses and norms are compared relative to the largest of their run: the policy loss of a step is a difference of
    larger numbers.
    """
    differences: dict[str, float] = {}
    for name in METRICS:
        steps = zip(expected["metrics"], measured["metrics"], strict=True)
        pairs = [(before[name], after[name]) for before, after in steps if name in before or name in after]
        if pairs:
            scale = max(abs(number) for number, _ in pairs) or 1.0
            differences[name] = max(abs(first - second) for first, second in pairs) / scale
    norms = [
        float((weight - measured["weights"][name]).norm() / weight.norm().clamp(min=1e-9))
        for name, weight in expected["weights"].items()
    ]
    return {**differences, "weights": max(norms)}


# --- runs with checkpoints --------------------------------------------------------------------------------------------


def build_run(folder: Path, distributed: Distributed | None = None) -> Trainer:
    """Build a trainer with checkpoints and a book in a folder; it continues from the last checkpoint."""
    options: dict[str, Any] = {
        "prompts": preset_steps.build_prompts(),
        "reward": preset_steps.reward_sum,
        "sampling": {"max_tokens": preset_steps.MAX_TOKENS},
        "prompts_per_step": 3,
        "critic": preset_steps.build_critic(11),
        "optimizer": OptimizerConfig(lr=0.02, eps=1e-2),
        "minibatch": MinibatchConfig(minibatches=2, token_budget=24),
        "checkpoints": CheckpointConfig(folder, interval=INTERVAL, keep_last=3),
        "seed": preset_steps.SEED,
    }
    # The reference is the initial policy, which a resumed run takes from the first checkpoint.
    algorithm = AlgorithmConfig.preset("ppo", group_size=2, kl_coef=0.1)
    actor = Actor(preset_steps.build_model(), tokenizer=preset_steps.TOKENIZER)
    if distributed is None:
        return Trainer(actor, algorithm, rollbook.open(folder / "book"), **options)
    book = rollbook.open(folder / "book") if distributed.is_main else None
    distributed.group.gather([])
    book = book or rollbook.open(folder / "book", mode="r")
    return DistributedTrainer(actor, algorithm, book, distributed=distributed, **options)


def train_run(folder: Path, strategy: str, steps: int, pause: float = 0.0) -> None:
    """Train, or continue, a run on this rank; rank 0 appends the metrics of each step to `steps.jsonl`."""
    distributed = None if strategy == "none" else Distributed(strategy, "cpu")

    def write(report: StepReport) -> None:
        entry = {"step": report.step, "uids": report.uids, **{name: report[name] for name in METRICS if name in report}}
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        time.sleep(pause)

    with preset_steps.reproducible():
        build_run(folder, distributed).run(steps, on_step=write)
    if distributed is not None:
        distributed.close()


def train_apart(folder: Path, strategy: str, steps: int) -> None:
    """Do what `train_run` does, as if each rank was on a machine of its own, without the files of rank 0."""
    rank = os.environ["RANK"]
    socket.gethostname = lambda: f"machine-{rank}"  # type: ignore[assignment]
    train_run(folder, strategy, steps)


def read_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run by step; of a repeated step, the last ones."""
    entries = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return {entry["step"]: entry for entry in entries}


def count_steps(folder: Path) -> int:
    """Return how many steps a run has written."""
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def compare_runs(expected: dict[int, dict[str, Any]], measured: dict[int, dict[str, Any]]) -> float:
    """Return the largest relative difference of metrics of two runs, infinite if they trained on other records."""
    if [entry["uids"] for entry in expected.values()] != [measured.get(step, {}).get("uids") for step in expected]:
        return float("inf")
    scales = {name: max(abs(entry[name]) for entry in expected.values()) for name in METRICS}
    return max(
        abs(entry[name] - measured[step][name]) / scales[name] for step, entry in expected.items() for name in METRICS
    )


def fail_on_one_rank(folder: Path, strategy: str) -> None:
    """Train on this rank, until rank 1 raises in the middle of an update."""
    distributed = Distributed(strategy, "cpu")
    with preset_steps.reproducible():
        trainer = build_run(folder, distributed)
        if distributed.rank == 1:
            trainer.actor.train = _fail  # type: ignore[method-assign]
        trainer.run(1)


def _fail() -> None:
    raise ValueError(FAILURE)


def wait_and_close(folder: Path) -> None:
    """Let rank 0 work alone for a while, then end the ranks; write what was measured, and the threads that are left."""
    train_distributed._POLL_SECONDS = 0.02
    distributed = Distributed("ddp", "cpu")
    distributed.handlers = {"work": time.sleep}
    shares = {}
    if distributed.is_main:
        distributed.start_measuring()
        distributed.call("work", [0.2, 0.2])
        time.sleep(0.6)
        shares = distributed.wait_metrics()
        distributed.release()
    else:
        distributed.follow()
    distributed._store = SlowStore(distributed._store)
    time.sleep(0.2)  # the watch is in the store now
    distributed.close()
    threads = [thread.name for thread in threading.enumerate() if "watch" in thread.name]
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads += [name for name in names if name == "pt_gloo_runloop"]
    (folder / f"closed-{distributed.rank}.json").write_text(json.dumps({"shares": shares, "threads": threads}))


class SlowStore:
    """A store that takes half a second to answer."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.5)
        return bool(self.store.check(keys))


def kill_and_continue(folder: Path, strategy: str, ranks: int, wait: Callable[[], bool]) -> list[int]:
    """Kill one rank of a run when `wait` returns, then train the run to its end; return the first exit statuses."""
    folder.mkdir(exist_ok=True)
    children = fork_ranks(ranks, train_run, folder, strategy, RUN_STEPS, 0.05, log=folder / "said")
    end = time.monotonic() + LONGEST
    while not wait() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(children[random.randrange(ranks)], signal.SIGKILL)
    statuses = wait_for(children)
    wait_for(fork_ranks(ranks, train_run, folder, strategy, RUN_STEPS, log=folder / "said"))
    return statuses


def train_arguments(folder: Path, strategy: str, steps: int = 3) -> list[str]:
    """Return the arguments of `rollbook` for a short run."""
    changes = {
        "out": folder, "distributed": strategy, "steps": steps, "threads": 1, "tracking.display": "false",
        "warmup.steps": 1, "warmup.target_accuracy": "null", "data.options.count": 40, "data.held_out": 6,
        "batch.prompts_per_step": 3, "batch.token_budget": 64, "algorithm.group_size": 2, "algorithm.kl_coef": 0.1,
        "model.options.hidden": 32, "model.options.heads": 1, "checkpoint.interval": 2, "optimizer.lr": 0.003,
        "rewards": "{function: 'tests.train.preset_steps:reward_sum'}", "model.gradient_checkpointing": "true",
    }  # fmt: skip
    return ["train", "letters", *(f"{key}={value}" for key, value in changes.items())]


def train_command(*arguments: str) -> None:
    """Run `rollbook` on this rank, as torchrun does."""
    status = cli(list(arguments))
    if status:
        raise SystemExit(status)


def build_on_rank_0(**options: Any) -> Any:
    """Build the model of a run, except on rank 1."""
    if os.environ["RANK"] == "1":
        raise RuntimeError(FAILURE)
    return letters.model(**options)


def kill_launcher(folder: Path) -> list[int]:
    """Kill a run's launcher; return how many ranks it had, and how many of them still run half a minute later."""
    command = [sys.executable, "-m", "rollbook", *train_arguments(folder / "run", "ddp", 10_000), "--ranks", "2"]
    launcher = subprocess.Popen(command)
    metrics, end = folder / "run" / METRICS_FILE, time.monotonic() + LONGEST
    while not metrics.exists() and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 30
    while any(map(is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in ranks if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [len(ranks), len(left)]


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- commands ---------------------------------------------------------------------------------------------------------


def run_short(folder: Path) -> None:
    """Do the work of `test_distributed`, in one process that forks all ranks, and write the exit statuses."""
    statuses: dict[str, list[int]] = {}
    for name in ("one", "two", "three", "run", "failed"):
        (folder / name).mkdir()
    log = folder / "said"
    statuses["one"] = wait_for(fork_ranks(1, expect_cases, folder / "one", SHORT, SHORT_STEPS, log=log))
    statuses["expected"] = wait_for(fork_ranks(1, expect_run, folder / "expected", log=log))
    statuses["two"] = wait_for(
        fork_ranks(2, run_cases, folder / "two", ("ddp", "fsdp"), SHORT, SHORT_STEPS, log=folder / "two/said")
    )
    statuses["three"] = wait_for(
        fork_ranks(3, run_cases, folder / "three", ("fsdp",), SHORT[:1], SHORT_STEPS, log=folder / "three/said")
    )
    for name in ("none", "ranks", "torchrun", "killed-launcher", "fails"):
        (folder / f"command-{name}").mkdir()
    command_folder = folder / "command-none"
    statuses["command-none"] = wait_for(
        fork_ranks(1, train_command, *train_arguments(command_folder / "run", "none"), log=command_folder / "said")
    )
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    for name, strategy, prefix, options in (
        ("ranks", "fsdp", [], ["--ranks", "2"]),
        ("torchrun", "ddp", torchrun, []),
    ):
        command_folder = folder / f"command-{name}"
        command = [
            sys.executable,
            "-m",
            *prefix,
            "rollbook",
            *train_arguments(command_folder / "run", strategy),
            *options,
        ]
        with (command_folder / "said-all").open("w") as output:
            statuses[f"command-{name}"] = [subprocess.run(command, stderr=output, timeout=LONGEST).returncode]
    statuses["killed-launcher"] = kill_launcher(folder / "command-killed-launcher")
    command_folder = folder / "command-fails"
    arguments = [*train_arguments(command_folder / "run", "ddp"), "model.builder=tests.train.ranks:build_on_rank_0"]
    statuses["fails"] = wait_for(fork_ranks(2, train_command, *arguments, log=command_folder / "said"))
    statuses["closed"] = wait_for(fork_ranks(2, wait_and_close, folder, log=log))
    half = RUN_STEPS // 2
    statuses["run"] = wait_for(fork_ranks(2, train_run, folder / "run", "fsdp", half, log=folder / "run/said"))
    for name, strategy, ranks in (("run-none", "none", 1), ("run-fsdp", "fsdp", 3), ("run-ddp", "ddp", 2)):
        shutil.copytree(folder / "run", folder / name)
        statuses[name] = wait_for(
            fork_ranks(ranks, train_run, folder / name, strategy, RUN_STEPS, log=folder / name / "said")
        )
    (folder / "run-apart").mkdir()
    statuses["run-apart"] = [
        status
        for steps in (half, RUN_STEPS)
        for status in wait_for(
            fork_ranks(2, train_apart, folder / "run-apart", "fsdp", steps, log=folder / "run-apart/said")
        )
    ]
    statuses["killed"] = kill_and_continue(
        folder / "killed",
        "fsdp",
        2,
        lambda: count_steps(folder / "killed") >= 1,  # before the second checkpoint
    )
    statuses["failed"] = wait_for(
        fork_ranks(2, fail_on_one_rank, folder / "failed", "fsdp", log=folder / "failed/said")
    )
    (folder / "statuses.json").write_text(json.dumps(statuses))


def expect_cases(folder: Path, names: Sequence[str], steps: int) -> None:
    """Run cases in one process."""
    for i, name in enumerate(names):
        (folder / str(i)).mkdir()
        torch.save(run_case(name, steps, folder / str(i)), folder / f"none-{i}.pt")


def expect_run(folder: Path) -> None:
    """Train a run in one process."""
    folder.mkdir()
    train_run(folder, "none", RUN_STEPS)


def compare_cases(folder: Path, ranks: int, strategies: Sequence[str], names: Sequence[str]) -> int:
    """Print the differences of cases on several ranks from one process, and return how many are above the tolerance."""
    failures = 0
    for strategy in strategies:
        for i, name in enumerate(names):
            path = folder / str(ranks) / f"{strategy}-{i}.pt"
            if not path.exists():
                failures += 1
                print(f"{ranks} ranks, {strategy}, {name}: no result")
                continue
            expected, measured = torch.load(folder / "one" / f"none-{i}.pt"), torch.load(path)
            differences = relative_difference(expected, measured)
            is_same = measured["uids"] == expected["uids"]
            is_close = is_same and max(differences.values()) <= LOOSE.get(name, TOLERANCE)
            failures += not is_close
            verdict = "ok" if is_close else "DIFFERS" if is_same else "other records"
            numbers = ", ".join(f"{key} {number:.1e}" for key, number in differences.items())
            waits = [step.get("ranks/wait_share", 0.0) for step in measured["metrics"]]
            waiting = f"waiting {sum(waits) / len(waits):.0%}, {measured['seconds']:.1f} s"
            print(f"{ranks} ranks, {strategy}, {name}: {verdict}: {numbers}; {waiting}", flush=True)
    return failures


def run_kills(folder: Path, count: int) -> int:
    """Kill ranks of runs at random times and compare the continued runs with one process; return the failures."""
    wait_for(fork_ranks(1, expect_run, folder / "expected"))
    expected, failures = read_steps(folder / "expected"), 0
    for i in range(count):
        strategy, ranks = ("ddp", "fsdp")[i % 2], 2 + i // 2 % 2
        killed, steps = folder / f"killed-{i}", random.randrange(RUN_STEPS - 1)
        delay = random.uniform(0.0, 0.3)

        def wait(killed: Path = killed, steps: int = steps, delay: float = delay) -> bool:
            if count_steps(killed) < steps:
                return False
            time.sleep(delay)
            return True

        statuses = kill_and_continue(killed, strategy, ranks, wait)
        difference = compare_runs(expected, read_steps(killed))
        failures += difference > TOLERANCE or 0 in statuses
        print(f"kill {i}: {ranks} ranks, {strategy}: exit statuses {statuses}, difference {difference:.1e}", flush=True)
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--short", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.short is not None:
        run_short(options.short)
        return 0
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.ranks:
            (folder / "one").mkdir()
            wait_for(fork_ranks(1, expect_cases, folder / "one", options.cases, options.steps))
        for ranks in options.ranks:
            ranks_folder = folder / str(ranks)
            ranks_folder.mkdir()
            wait_for(fork_ranks(ranks, run_cases, ranks_folder, options.strategies, options.cases, options.steps))
            failures += compare_cases(folder, ranks, options.strategies, options.cases)
        failures += run_kills(folder, options.kills) if options.kills else 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
