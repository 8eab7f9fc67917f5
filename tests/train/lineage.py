"""What a run came to, and in what two runs differ: the lineage of the weights in the ledger, records, numbers of every
step, weights, optimizers and what the doctor finds. Only what clocks say is left out.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import rollbook
from rollbook.book import trained_steps
from rollbook.book.book import Book
from rollbook.inspect.doctor import examine
from rollbook.train import checkpoint
from rollbook.train.config import load_config
from rollbook.train.prompts import Prompts


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """Without what the clock says."""
    return {name: value for name, value in metrics.items() if "second" not in name}


def ledger(book: Book) -> dict[str, Any]:
    """What a book says of the surviving lineage."""
    counts = book.counts()
    rows = {kind: {row.eid.uid: row for row in book.where(evaluation=kind)} for kind in (0, 1)}
    return {
        "trained": trained_steps(book),
        "records": rows[0],
        "evaluations": rows[1],
        "counts": (counts.waiting, counts.leased, counts.trained),
        "dropped": {reason: count for reason, count in counts.dropped.items() if reason != "rewound"},
        "metrics": [(step, timeless(logged)) for step, logged in book.metrics()],
        "policy_version": book.policy_version,
    }


def weights(saved: checkpoint.Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors that a checkpoint has in its models' folders."""
    files = sorted(saved.path.rglob("*.safetensors"))
    return {
        f"{file.relative_to(saved.path)}:{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, in whatever it is nested."""
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(equal(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


@dataclass(frozen=True)
class Lineage:
    """All of a run that is to be the same, however often it died."""

    ledger: dict[str, Any]
    lines: list[tuple[int, dict[str, float]]]
    """metrics.jsonl, line by line."""
    checkpoints: dict[int, dict[str, Any]]
    """By step: weights, optimizers and random states, cursor."""
    findings: list[tuple[Any, ...]]
    """The doctor's."""

    @classmethod
    def of(cls, folder: Path) -> Lineage:
        """Of the run in a folder, whose book must be well."""
        with rollbook.open(folder / "book", mode="r") as book:
            report = book.check()
            if not report.ok:
                raise AssertionError(f"{folder}: {report}")
            records = ledger(book)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        checkpoints = {}
        for saved in checkpoint.list_checkpoints(folder):
            cursor = {name: value for name, value in saved.trainer_state().items() if name != "book"}
            checkpoints[saved.step] = {"weights": weights(saved), "state": checkpoint.load_state(saved), "told": cursor}
        found_by_doctor = examine(folder / "book").findings
        findings = [
            (finding.check, finding.severity, finding.count, finding.steps, finding.uids) for finding in found_by_doctor
        ]
        return cls(records, [(line["step"], timeless(line["metrics"])) for line in lines], checkpoints, findings)

    def differences(self, other: Lineage) -> list[str]:
        """In what another run is not the same; a checkpoint that one of them has not kept is no difference."""
        lines = []
        for name, own_part in self.ledger.items():
            other_part = other.ledger[name]
            if not equal(own_part, other_part):
                lines.append(f"{name}: {_describe_difference(own_part, other_part)}")
        if self.lines != other.lines:
            lines.append(f"lines: {_describe_difference(self.lines, other.lines)}")
        if self.findings != other.findings:
            lines.append(f"findings: {_describe_difference(self.findings, other.findings)}")
        both = self.checkpoints.keys() & other.checkpoints.keys()
        if not both or max(self.checkpoints) != max(other.checkpoints):
            lines.append(f"checkpoints: {sorted(self.checkpoints)} and {sorted(other.checkpoints)}")
        for step in sorted(both):
            for part, own_part in self.checkpoints[step].items():
                other_part = other.checkpoints[step][part]
                if not equal(own_part, other_part):
                    lines.append(f"checkpoint {step}, {part}: {_describe_difference(own_part, other_part)}")
        return lines


def _describe_difference(left: Any, right: Any) -> str:
    """The first place in which two of a kind differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        name = next((key for key in left if key not in right or not equal(left[key], right[key])), None)
        if name is None:
            return f"{list(right.keys() - left.keys())[:3]} too many"
        return f"{name!r}: " + (_describe_difference(left[name], right[name]) if name in right else "is not there")
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{len(left)} and {len(right)}"
        place = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if not equal(a, b))
        return f"[{place}]: " + _describe_difference(left[place], right[place])
    return f"{str(left)[:300]} and {str(right)[:300]}"


def misplaced(history: dict[str, Any], prompts: Prompts, groups: int, runs: int) -> list[str]:
    """What is wrong with the prompts of a run (its ledger): step after step it takes the next ones of the epochs'
    order, each with all its runs, and learns from each of them once."""
    ids = {uid: history["records"][uid].eid for uid in history["trained"]}
    mistakes = [f"{uid}: trained in {steps}" for uid, steps in history["trained"].items() if steps != [ids[uid].batch]]
    taken: dict[int, Counter[str]] = {}
    for eid in ids.values():
        taken.setdefault(eid.batch, Counter())[str(eid.task)] += 1
    numbers = [prompt.eid.task for prompt in prompts.every() if prompt.eid is not None]
    for step in range(1, max(taken) + 1):
        places = range((step - 1) * groups, step * groups)
        due = Counter(str(numbers[prompts.order(place // len(prompts))[place % len(prompts)]]) for place in places)
        taken_tasks = Counter(task.partition(".")[0] for task in taken.get(step, ()))
        if taken_tasks != due or {*taken.get(step, Counter()).values()} != {runs}:
            mistakes.append(f"step {step}: took {taken.get(step)}, expected {runs} of each of {due}")
    return mistakes


def copied(folder: Path, to: Path) -> Path:
    """A run's folder once more, to do something to."""
    shutil.copytree(folder, to)
    return to


SMALL = (
    *(
        "steps=6",
        "batch.prompts_per_step=4",
        "algorithm.group_size=3",
        "batch.minibatches=2",
        "checkpoint.interval=2",
        "evaluation.interval=3",
    ),
    *(
        "warmup.steps=2",
        "warmup.target_accuracy=null",
        "warmup.batch_size=16",
        "data.options.count=24",
        "data.held_out=6",
    ),
    *("model.options.hidden=32", "model.options.heads=1", "model.options.layers=1", "algorithm.kl_coef=0.01"),
    *("sampling.max_tokens=4", "rewards=rollbook.train.recipes.letters:random_reward"),
)
"""Six steps of the embedded recipe, of which the fifth crosses the end of an epoch of 18 rows."""


def command(folder: Path, *changes: str) -> list[str]:
    """The arguments of `rollbook` for such a run in a folder."""
    return ["train", "letters", *SMALL, *changes, "--out", str(folder)]


def rows_of(*changes: str) -> Prompts:
    """The prompts of such a run."""
    from rollbook.train.builders import load_prompts

    return load_prompts(load_config("letters", [*SMALL, *changes]))[0]
