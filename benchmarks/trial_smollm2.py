"""SmolLM2-135M-Instruct with GRPO on a reasoning-gym task, several seeds, with a random-reward control.

    python examples/smollm2/prepare.py smollm2-135m
    python -m benchmarks.trial_smollm2 --model smollm2-135m --seeds 0 1 2 --steps 80 --out benchmarks/results

Every run is `rollbook train examples/smollm2/reversal.yaml` with another seed; the control differs only in its training
reward. All are evaluated on the same 512 held-out prompts, with four samples each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rollbook
from benchmarks.charts import Series, lines
from rollbook.train.evaluation import Evaluation, compare_evaluations, evaluate_records

CONFIG = "examples/smollm2/reversal.yaml"
ARMS = {"reward": "examples/smollm2/task.py:reward", "random": "examples/smollm2/task.py:random_reward"}


def start(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    changes = [f"model.path={options.model}", f"rewards={ARMS[arm]}", f"evaluation.rewards={ARMS['reward']}"]
    changes += [
        f"seed={seed}",
        f"steps={options.steps}",
        f"out={folder}",
        f"evaluation.interval={options.every}",
    ]
    command = [sys.executable, "-m", "rollbook", "train", CONFIG, *changes, *options.changes]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder.with_suffix(".log")).open("wb"))


def judged(book: Any, step: int) -> Evaluation:
    return evaluate_records(list(book.where(evaluation=1, batch=f"eval-{step}")), step=step)


def read(arm: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """What a run came to, from its book."""
    with rollbook.open(folder / "book", mode="r") as book:
        metrics = book.metrics()
        before, after = judged(book, 0), judged(book, steps)
    change = compare_evaluations(before, after)
    summary: dict[str, Any] = {"arm": arm, "seed": seed, "prompts": after.prompts, "k": after.k}
    summary |= {
        name: [evaluation.success, evaluation.low, evaluation.high]
        for name, evaluation in (("before", before), ("after", after))
    }
    summary["change"] = [change.value, change.low, change.high]
    for words in (2, 3):
        for name, evaluation in (("before", before), ("after", after)):
            some = [row for row in evaluation.records if row.info["words"] == words]
            summary[f"{name}_{words}_words"] = sum((row.reward or 0) >= 1 for row in some) / len(some)
    summary["evaluations"] = [[step, row["eval/avg@4"]] for step, row in metrics if "eval/avg@4" in row]
    summary["training"] = [[step, row["reward"]] for step, row in metrics if "reward" in row]
    summary["entropy"] = [[step, row["entropy"]] for step, row in metrics if "entropy" in row]
    summary["seconds_per_step"] = sum(row["seconds"] for _, row in metrics if "seconds" in row) / steps
    summary["samples"] = [
        _sample(was, now) for was, now in zip(before.records[:: 4 * 51], after.records[:: 4 * 51], strict=True)
    ]
    return summary


def _sample(before: Any, after: Any) -> dict[str, Any]:
    question = [message["content"] for message in after.messages if message["role"] == "user"][-1]
    return {
        "asked": question,
        "reference": after.info["reference"],
        "before": [before.response_text, before.reward],
        "after": [after.response_text, after.reward],
    }


def report(runs: list[dict[str, Any]], options: argparse.Namespace, device: str) -> str:
    """The table, in words that say what it is and is not."""
    text = [
        "# SmolLM2-135M-Instruct, GRPO on word_sequence_reversal (reasoning-gym)",
        "",
        f"`python -m benchmarks.trial_smollm2 --steps {options.steps}` on one {device}. Success is the share of",
        f"samples that are exactly right, {runs[0]['k']} at temperature 1 of each of {runs[0]['prompts']} held-out",
        "prompts, with the 95% interval over prompts. The control is trained on random rewards.",
        "Several runs shared the device, which makes seconds unreliable.",
        "",
        "| rewards | seed | before | after | change, prompts paired | 2 words | 3 words | s per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        spans = [f"{v:.3f} ({low:.3f} to {high:.3f})" for v, low, high in (run["before"], run["after"], run["change"])]
        by = [f"{run[f'before_{n}_words']:.2f} -> {run[f'after_{n}_words']:.2f}" for n in (2, 3)]
        text.append(
            f"| {run['arm']} | {run['seed']} | {' | '.join(spans)} | {' | '.join(by)} | {run['seconds_per_step']:.2f} |"
        )
    arms = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    apart = all(mine["change"][1] > control["change"][2] for mine in arms["reward"] for control in arms["random"])
    verdict = "The interval of the change of every run lies above those of all controls."
    if not apart:
        verdict = "NOT every run is separate from every control: some intervals of the change overlap."
    text += ["", verdict, "", "![curves](smollm2.svg)", "", "## Ten held-out prompts, before and after (seed 0)", ""]
    for sample in arms["reward"][0]["samples"][:10]:
        question = " ".join(sample["asked"].split())
        text.append(f"- {question}\n  - before: `{sample['before'][0]!r}` ({sample['before'][1]:g})")
        text.append(f"  - after: `{sample['after'][0]!r}` ({sample['after'][1]:g})")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the device (28 GiB each)")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("changes", nargs="*", help="KEY=VALUE of the configuration, for all runs")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    begun = time.monotonic()
    jobs = {(arm, seed): options.runs / f"{arm}-{seed}" for arm in ARMS for seed in options.seeds}
    waiting, running, failed = list(jobs), {}, []
    while waiting or running:
        while waiting and len(running) < options.at_once:
            running[waiting[0]] = start(*waiting[0], options, jobs[waiting[0]])
            waiting.pop(0)
        for key in [key for key, process in running.items() if process.poll() is not None]:
            failed += [key] if running.pop(key).returncode else []
        time.sleep(1)
    for key in failed:
        print(key, jobs[key].with_suffix(".log").read_text()[-2000:])
    print(f"{len(jobs)} runs in {time.monotonic() - begun:.0f} s")
    runs = [read(*key, folder, options.steps) for key, folder in jobs.items() if key not in failed]
    (options.out / "smollm2.json").write_text(json.dumps(runs))
    if failed:
        raise SystemExit(f"failed: {failed}")
    text = report(runs, options, device)
    (options.out / "smollm2.md").write_text(text)
    drawn = {}
    for arm, color in (("reward", "#1b6ca8"), ("random", "#b5541c")):
        drawn[f"trained on {'the reward' if arm == 'reward' else 'random rewards'}"] = [
            Series(run["evaluations"], color, arm == "random") for run in runs if run["arm"] == arm
        ]
    (options.out / "smollm2.svg").write_text(lines("Held-out success", drawn, y="share right"))
    print(text[:3000])


if __name__ == "__main__":
    main()
