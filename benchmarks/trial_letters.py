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
        made = ["-m", "rollbook", "train", name, f"seed={seed}", f"out={out}", "evaluation.interval=20"]
        made += [] if arm == "reward" else [f"rewards={TASK}:random_reward", f"evaluation.rewards={TASK}:reward"]
        return [*made, *([] if steps is None else [f"steps={steps}"])]

    return command


def _example(file: str, control: list[str]) -> Command:
    def command(arm: str, seed: int, steps: int | None, out: Path) -> list[str]:
        made = [file, "--seed", str(seed), "--out", str(out), *([] if arm == "reward" else control)]
        return [*made, *([] if steps is None else ["--steps", str(steps)])]

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


def ran(what: What, arm: str, seed: int, steps: int | None, out: Path) -> dict[str, Any]:
    """Run one to its end; what it took, and what it came to."""
    took = run_command(what.command(arm, seed, steps, out), out.with_suffix(".log"))
    return {"arm": arm, "seed": seed, **took, **read(out / "book", what.success)}


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
    found = [evaluate_records(records[step], step=step, success=success) for step in sorted(records)]
    before, after = found[0], found[-1]
    change = compare_evaluations(before, after)
    made: dict[str, Any] = {"steps": after.step, "prompts": after.prompts, "k": after.k}
    made |= {name: [one.success, one.low, one.high] for name, one in (("before", before), ("after", after))}
    made["change"] = list(change)
    made["evaluations"] = [[one.step, one.success] for one in found]
    return made


def verdict(found: list[dict[str, Any]]) -> tuple[bool, str]:
    """What the runs show, in words, and whether it is what they are to show."""
    mine, control = ([one for one in found if one["arm"] == arm] for arm in ARMS)
    rises, fooled = (sum(one["change"][1] > 0 for one in group) for group in (mine, control))
    lowest, highest = min(one["change"][1] for one in mine), max(one["change"][2] for one in control)
    text = (
        f"Success rises for {rises} of {len(mine)} seeds (the 95% interval of the change is above 0), with random "
        f"rewards (control) for {fooled} of {len(control)}. The lowest bound of a change is {lowest:+.3f}, the highest "
        f"of a control {highest:+.3f}: "
    )
    apart = lowest > highest
    text += "the intervals are disjoint." if apart else "the intervals are NOT disjoint."
    return rises == len(mine) and not fooled and apart, text


def report(what: What, found: list[dict[str, Any]], options: argparse.Namespace, said: str) -> str:
    """The table, in words that say what it is and is not."""
    one = found[0]
    text = [
        f"# {what.title}",
        "",
        f"{len(options.seeds)} seeds of {one['steps']} steps, {options.at_once} runs at a time on {os.cpu_count()} "
        f"cores ({platform.machine()}), one thread each. Success is the share of samples that are right, {one['k']} at "
        f"temperature 1 of each of {one['prompts']} held-out prompts, before and after RL, with the 95% "
        "interval. The control is trained on random rewards and evaluated in the same way. Seconds are of the whole "
        "command: imports, warm-up, RL and all evaluations.",
        "",
        f"**{said}**",
        "",
        "| rewards | seed | before | after | change, prompts paired | wall s | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        spans = [f"{v:.3f} ({low:.3f} to {high:.3f})" for v, low, high in (one["before"], one["after"], one["change"])]
        text.append(
            f"| {one['arm']} | {one['seed']} | {' | '.join(spans)} | {one['wall']:.0f} | {one['cpu']:.0f} |",
        )
    return "\n".join([*text, "", f"![held-out success over steps]({what.file}.svg)"]) + "\n"


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
    held = True
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as scratch:
        for name in options.what:
            what, place = WHAT[name], options.runs or Path(scratch)
            jobs = [(arm, seed) for arm in ARMS for seed in options.seeds]
            with ThreadPoolExecutor(options.at_once) as pool:
                waits = [
                    pool.submit(ran, what, arm, seed, options.steps, place / f"{name}-{arm}-{seed}")
                    for arm, seed in jobs
                ]
                found = [one.result() for one in waits]
            holds, said = verdict(found)
            held &= holds
            (options.out / f"{what.file}.json").write_text(json.dumps(found, indent=1))
            text = report(what, found, options, said)
            (options.out / f"{what.file}.md").write_text(text)
            drawn = {
                f"trained on {'the reward' if arm == 'reward' else 'random rewards'}": [
                    Series(one["evaluations"], color, arm == "random") for one in found if one["arm"] == arm
                ]
                for arm, color in ARMS.items()
            }
            (options.out / f"{what.file}.svg").write_text(lines("Held-out success", drawn, y="share right"))
            print(text, flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
