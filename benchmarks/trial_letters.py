"""Does a tiny model improve by RL for every seed, and not with random rewards?

    python -m benchmarks.trial_letters                                      # the demo, five seeds, with its control
    python -m benchmarks.trial_letters --what letters ppo calculator colors --seeds 0 1 2

Every run is the command that a user types (`rollbook train letters`, `python examples/calculator.py`, ...) in its own
process with one thread and a seed. Its control differs only in the training reward, which is random. Both are evaluated
by sampled success on held-out prompts before and after RL, read from the books of the runs. The exit status is 1 if
success does not rise for every seed, or rises for a control.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollbook
from benchmarks.book_scale import cpu
from benchmarks.charts import Series, lines
from rollbook.train.evaluation import compare_evaluations, evaluate_records

ARMS = {"reward": "#1b6ca8", "random": "#b5541c"}
TASK = "rollbook.train.recipes.letters"

Command = Callable[[str, int, int | None, Path], list[str]]


@dataclass(frozen=True)
class What:
    """Something to try: how it is started, and how its results are called."""

    title: str
    file: str
    command: Command
    success: float | str = 1.0
    """The reward, or the part of one, that counts as a success."""


def _recipe(name: str) -> Command:
    def command(arm: str, seed: int, steps: int | None, out: Path) -> list[str]:
        arguments = ["-m", "rollbook", "train", name, f"seed={seed}", f"out={out}", "evaluation.interval=20"]
        arguments += [] if arm == "reward" else [f"rewards={TASK}:random_reward", f"evaluation.rewards={TASK}:reward"]
        return [*arguments, *([] if steps is None else [f"steps={steps}"])]

    return command


def _example(file: str, control: list[str]) -> Command:
    def command(arm: str, seed: int, steps: int | None, out: Path) -> list[str]:
        arguments = [file, "--seed", str(seed), "--out", str(out), *([] if arm == "reward" else control)]
        return [*arguments, *([] if steps is None else ["--steps", str(steps)])]

    return command


WHAT = {
    "letters": What("Sort six letters with GRPO: `rollbook train letters`, the demo", "letters", _recipe("letters")),
    "ppo": What("Sort six letters by PPO: `rollbook train letters-ppo`", "letters_ppo", _recipe("letters-ppo")),
    "calculator": What(
        "Use a calculator, with GRPO over episodes: `python examples/calculator.py`",
        "calculator",
        _example("examples/calculator.py", ["--random-reward"]),
    ),
    "colors": What(
        "Name the color and quadrant of a square in an image, with GRPO: `python examples/colors.py`",
        "colors",
        _example("examples/colors.py", ["--reward", "random"]),
        "exact",
    ),
}


def ran(trial: What, arm: str, seed: int, steps: int | None, out: Path) -> dict[str, Any]:
    """Run one to its end; what it took, and what it came to."""
    took = run_command(trial.command(arm, seed, steps, out), out.with_suffix(".log"))
    return {"arm": arm, "seed": seed, **took, **read(out / "book", trial.success)}


def run_command(arguments: list[str], log: Path) -> dict[str, float]:
    """Run Python with these arguments and one thread.

    Returns:
        Seconds of wall time (`wall`) and of all its processes (`cpu`), and the share of the machine's processors that
        other processes used meanwhile (`others`).
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    begun, before = time.monotonic(), cpu()
    with log.open("wb") as file:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    after, seconds = cpu(), used.ru_utime + used.ru_stime
    total = (after[1] - before[1]) / os.sysconf("SC_CLK_TCK")
    busy = (after[0] - before[0]) / os.sysconf("SC_CLK_TCK")
    return {"wall": time.monotonic() - begun, "cpu": seconds, "others": max(busy - seconds, 0.0) / max(total, 1.0)}


def read(book: Path, success: float | str) -> dict[str, Any]:
    """What a run came to: every evaluation that its book has, the first and the last compared prompt by prompt."""
    with rollbook.open(book, mode="r") as opened:
        records: dict[int, list[Any]] = {}
        for record in opened.where(evaluation=1):
            records.setdefault(int(str(record.eid.batch).removeprefix("eval-")), []).append(record)
    evaluations = [evaluate_records(records[step], step=step, success=success) for step in sorted(records)]
    before, after = evaluations[0], evaluations[-1]
    change = compare_evaluations(before, after)
    summary: dict[str, Any] = {"steps": after.step, "prompts": after.prompts, "k": after.k}
    summary |= {
        name: [evaluation.success, evaluation.low, evaluation.high]
        for name, evaluation in (("before", before), ("after", after))
    }
    summary["change"] = list(change)
    summary["evaluations"] = [[evaluation.step, evaluation.success] for evaluation in evaluations]
    return summary


def verdict(runs: list[dict[str, Any]]) -> tuple[bool, str]:
    """What the runs show, in words, and whether it is what they are to show."""
    mine, control = ([run for run in runs if run["arm"] == arm] for arm in ARMS)
    rises, fooled = (sum(run["change"][1] > 0 for run in group) for group in (mine, control))
    lowest, highest = min(run["change"][1] for run in mine), max(run["change"][2] for run in control)
    text = (
        f"Success rises for {rises} of {len(mine)} seeds (the 95% interval of the change is above 0), with random "
        f"rewards (control) for {fooled} of {len(control)}. The lowest bound of a change is {lowest:+.3f}, the highest "
        f"of a control {highest:+.3f}: "
    )
    apart = lowest > highest
    text += "the intervals are disjoint." if apart else "the intervals are NOT disjoint."
    return rises == len(mine) and not fooled and apart, text


def report(trial: What, runs: list[dict[str, Any]], options: argparse.Namespace, conclusion: str) -> str:
    """The table, in words that say what it is and is not."""
    run = runs[0]
    text = [
        f"# {trial.title}",
        "",
        f"{len(options.seeds)} seeds of {run['steps']} steps, {options.at_once} runs at a time on {os.cpu_count()} "
        f"cores ({platform.machine()}), one thread each. Success is the share of samples that are right, {run['k']} at "
        f"temperature 1 of each of {run['prompts']} held-out prompts, before and after RL, with the 95% "
        "interval. The control is trained on random rewards and evaluated in the same way. Seconds are of the whole "
        "command: imports, warm-up, RL and all evaluations.",
        "",
        f"**{conclusion}**",
        "",
        "| rewards | seed | before | after | change, prompts paired | wall s | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        spans = [f"{v:.3f} ({low:.3f} to {high:.3f})" for v, low, high in (run["before"], run["after"], run["change"])]
        text.append(
            f"| {run['arm']} | {run['seed']} | {' | '.join(spans)} | {run['wall']:.0f} | {run['cpu']:.0f} |",
        )
    return "\n".join([*text, "", f"![held-out success over steps]({trial.file}.svg)"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=list(WHAT), default=["letters"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="of every run; by default each one's own number")
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    parser.add_argument("--runs", type=Path, help="a new folder that keeps the runs; without it they are removed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.runs is not None:
        options.runs.mkdir(parents=True)
    all_hold = True
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as scratch:
        for name in options.what:
            trial, place = WHAT[name], options.runs or Path(scratch)
            jobs = [(arm, seed) for arm in ARMS for seed in options.seeds]
            with ThreadPoolExecutor(options.at_once) as pool:
                waits = [
                    pool.submit(ran, trial, arm, seed, options.steps, place / f"{name}-{arm}-{seed}")
                    for arm, seed in jobs
                ]
                runs = [wait.result() for wait in waits]
            holds, conclusion = verdict(runs)
            all_hold &= holds
            (options.out / f"{trial.file}.json").write_text(json.dumps(runs, indent=1))
            text = report(trial, runs, options, conclusion)
            (options.out / f"{trial.file}.md").write_text(text)
            drawn = {
                f"trained on {'the reward' if arm == 'reward' else 'random rewards'}": [
                    Series(run["evaluations"], color, arm == "random") for run in runs if run["arm"] == arm
                ]
                for arm, color in ARMS.items()
            }
            (options.out / f"{trial.file}.svg").write_text(lines("Held-out success", drawn, y="share right"))
            print(text, flush=True)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
