"""Cases of `tests.train.preset_steps` on several ranks, each compared with a single process.

python -m tests.train.ranks --ranks 2 3 --strategies ddp fsdp --steps 10     # all cases: minutes
torchrun --nproc-per-node 2 -m tests.train.ranks --work FOLDER ...           # what each rank runs
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rollbook
from rollbook.core.process_group import SINGLE_PROCESS
from rollbook.train.distributed import Distributed, DistributedTrainer
from rollbook.train.trainer import StepReport, Trainer
from tests.train import preset_steps

ROOT = Path(__file__).parents[2]
LONGEST = 120.0
"""Seconds of a case, after which ranks that wait for each other are ended."""
METRICS = ("loss", "grad_norm", "critic/value_loss", "critic/grad_norm", "ranks/wait_share", "ranks/plan_wait_share")
VARIATIONS: dict[str, dict[str, Any]] = {
    "grpo, short micro-batches": {**preset_steps.GRPO, "kl_coef": 0.1, "batch": {"token_budget": 12}},
    "grpo, one prompt": {**preset_steps.GRPO, "group_size": 2, "prompts_per_step": 1},
    "dpo, short micro-batches": {"algorithm": "dpo", "prompts_per_step": 5, "batch": {"token_budget": 16}},
}
"""Cases in which ranks have different numbers of micro-batches, or none."""
CASES = {**preset_steps.SETTINGS, **VARIATIONS}


def launch(ranks: int, module: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a module on several ranks with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", module, *arguments]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def summarize(trainer: Trainer, reports: Sequence[StepReport]) -> dict[str, Any]:
    """Return the metrics of the steps and the complete weights."""
    weights = {
        f"{name}/{key}": weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()
        for name, model in (("policy", trainer.actor), ("critic", trainer.models.critic))
        if model is not None
        for key, weight in model.state_dict().items()
    }
    metrics = [{name: float(report[name]) for name in METRICS if name in report.metrics} for report in reports]
    return {"metrics": metrics, "weights": weights, "uids": [report.uids for report in reports]}


def run_case(name: str, steps: int, folder: Path, distributed: Distributed | None = None) -> dict[str, Any]:
    """Train a case; with `distributed`, on all ranks, which read the book from a folder."""
    rank = 0 if distributed is None else distributed.rank
    open_book = rollbook.open

    def build(*arguments: Any, **options: Any) -> Trainer:
        if distributed is None:
            return Trainer(*arguments, **options)
        return DistributedTrainer(*arguments, distributed=distributed, **options)

    def open_shared(url: Any, *arguments: Any, **options: Any) -> Any:
        if url != "memory:" or distributed is None:
            return open_book(url, *arguments, **options)
        book = open_book(folder / "book") if rank == 0 else None
        distributed.group.gather([])  # the book exists
        return book or open_book(folder / "book", mode="r")

    preset_steps.Trainer, rollbook.open = build, open_shared  # type: ignore[misc, assignment]
    own = folder / f"rank-{rank}"
    own.mkdir(parents=True)
    try:
        with preset_steps.reproducible():
            trainer = preset_steps.build_trainer(folder=own, **CASES[name]) if rank == 0 else _follower(own, name)
            reports = trainer.run(steps)
            return summarize(trainer, reports)
    finally:
        preset_steps.Trainer, rollbook.open = Trainer, open_book  # type: ignore[misc]


def _follower(folder: Path, name: str) -> Trainer:
    """Build the trainer of a case on a rank that does not write to the book."""
    append = rollbook.book.book.Book.append

    def skip(book: Any, records: Any, **options: Any) -> Any:
        return append(book, records, **options) if "expert" in str(book.url) else None

    rollbook.book.book.Book.append = skip  # type: ignore[method-assign]
    try:
        return preset_steps.build_trainer(folder=folder, **CASES[name])
    finally:
        rollbook.book.book.Book.append = append  # type: ignore[method-assign]


def work(folder: Path, strategies: Sequence[str], names: Sequence[str], steps: int) -> None:
    """Run cases on this rank; rank 0 writes the results to `CASE-STRATEGY.pt`, in the order of the cases."""
    Trainer.process_group = SINGLE_PROCESS
    for strategy in strategies:
        distributed = Distributed(strategy, "cpu")
        for i, name in enumerate(names):
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            begun = time.perf_counter()
            result = run_case(name, steps, folder / f"{strategy}-{i}", distributed)
            faulthandler.cancel_dump_traceback_later()
            result["seconds"] = time.perf_counter() - begun
            if distributed.is_main:
                torch.save(result, folder / f"{strategy}-{i}.pt")


def relative_difference(expected: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative differences of losses, gradient norms and weights.

    A loss is compared relative to the largest of its run: the policy loss of a step is a difference of larger numbers.
    """
    differences: dict[str, float] = {}
    for name in METRICS[:4]:
        pairs = [
            (before[name], after[name])
            for before, after in zip(expected["metrics"], measured["metrics"], strict=True)
            if name in before or name in after
        ]
        if pairs:
            scale = max(abs(number) for number, _ in pairs) or 1.0
            differences[name] = max(abs(first - second) for first, second in pairs) / scale
    norms = [
        float((weight - measured["weights"][name]).norm() / weight.norm().clamp(min=1e-9))
        for name, weight in expected["weights"].items()
    ]
    return {**differences, "weights": max(norms)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare cases on several ranks with one process, and print the differences."""
    parser = argparse.ArgumentParser(description="Presets on several ranks.")
    parser.add_argument("--work", type=Path, help="run as a rank, and write results to this folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    options = parser.parse_args(arguments)
    if options.work is not None:
        try:
            work(options.work, options.strategies, options.cases, options.steps)
        except BaseException:
            traceback.print_exc()
            raise
        return 0
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        expected = [run_case(name, options.steps, Path(folder) / f"none-{i}") for i, name in enumerate(options.cases)]
        for ranks in options.ranks:
            where = Path(folder) / str(ranks)
            where.mkdir()
            done = launch(
                ranks, "tests.train.ranks", "--work", str(where), "--steps", str(options.steps),
                "--strategies", *options.strategies, "--cases", *options.cases, timeout=7200,
            )  # fmt: skip
            print(done.stderr[-6000:] if done.returncode else "", end="")
            for strategy in options.strategies:
                for i, name in enumerate(options.cases):
                    path = where / f"{strategy}-{i}.pt"
                    if not path.exists():
                        failures += 1
                        print(f"{ranks} ranks, {strategy}, {name}: no result")
                        continue
                    measured = torch.load(path)
                    differences = relative_difference(expected[i], measured)
                    same = measured["uids"] == expected[i]["uids"]
                    ok = same and max(differences.values()) <= options.tolerance
                    failures += not ok
                    text = ", ".join(f"{key} {number:.1e}" for key, number in differences.items())
                    waits = [step.get("ranks/wait_share", 0.0) for step in measured["metrics"]]
                    print(
                        f"{ranks} ranks, {strategy}, {name}: {'ok' if ok else 'DIFFERS'}{'' if same else ' (uids)'}: "
                        f"{text}; waiting {sum(waits) / len(waits):.0%}, {measured['seconds']:.1f} s",
                        flush=True,
                    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
