"""Step time with a slow reward: synchronous, one step off and asynchronous.

    python -m benchmarks.bench_overlap                  # about eight minutes; writes results/overlap.md
    python -m benchmarks.bench_overlap --rounds 1 --steps 8 --out /tmp

Each run is the command that a user types: `rollbook train letters` with a reward that sleeps (`slow_reward.py`). The
model is larger than that of the recipe, and has random weights, so that every run does the same work. The time of a
step is the time between two steps in `metrics.jsonl`; steps before `--skip` are warm-up. The runs of a round are
shuffled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.trial_letters import run_command

SECONDS = (0.0, 0.5)
"""How long the reward of a sample takes."""
PROMPTS, GROUP_SIZE = 64, 8
MODES = {
    "single process": [],
    "sync": ["rollout.mode=sync", "rollout.workers=2"],
    "one step off": ["rollout.mode=one_step_off", "rollout.workers=2"],
    "async, staleness 2": ["rollout.mode=async", "rollout.workers=2", "replay.max_staleness=2"],
}
SETTINGS = (
    "model.options={hidden: 192, layers: 4}",
    "warmup.steps=0",
    "batch.drop_zero_advantages=false",
    "checkpoint.interval=0",
    "checkpoint.save_final=false",
    "evaluation.before=false",
    "evaluation.after=false",
    "tracking.display=false",
)
REWARD = Path(__file__).with_name("slow_reward.py")


@dataclass(frozen=True)
class Run:
    """Times of the steps of one run.

    Args:
        mode: A key of `MODES`.
        sleep: Seconds that the reward of a sample takes.
        steps: Seconds of each step after the warm-up.
        waiting: Of these, seconds until the records of the step were there.
        updating: Of these, seconds of the update.
        staleness: Mean age of the records that the steps trained on, in policy versions.
        load: Share of the processors that other processes of the machine used during the run.
    """

    mode: str
    sleep: float
    steps: list[float]
    waiting: list[float]
    updating: list[float]
    staleness: float
    load: float


def train(mode: str, sleep: float, steps: int, skip: int, seed: int, out: Path) -> Run:
    """Run the recipe and return the times of its steps."""
    samples = PROMPTS * GROUP_SIZE
    reward = {"function": f"{REWARD}:reward", "options": {"seconds": sleep, "workers": samples}}
    words = ["-m", "rollbook", "train", "letters", f"out={out}", f"steps={steps}", f"seed={seed}", *SETTINGS]
    usage = run_command([*words, f"rewards={json.dumps(reward)}", *MODES[mode]], out.with_suffix(".log"))
    return read_steps(mode, sleep, out, skip, usage["others"])


def read_steps(mode: str, sleep: float, out: Path, skip: int, load: float) -> Run:
    """Return the times in the metrics of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "update/seconds" in line["metrics"]]
    times = [line["time"] for line in steps]
    metrics = [line["metrics"] for line in steps[skip:]]
    return Run(
        mode,
        sleep,
        [after - before for before, after in zip(times[skip - 1 :], times[skip:], strict=False)],
        [numbers["collect/seconds"] for numbers in metrics],
        [numbers["update/seconds"] for numbers in metrics],
        statistics.mean(numbers["staleness"] for numbers in metrics),
        load,
    )


def mean_step(run: Run) -> float:
    """Return the mean seconds of a step: those of a bounded queue alternate, so that a median would mislead."""
    return statistics.mean(run.steps)


def report(runs: list[Run], options: argparse.Namespace) -> str:
    """Return the page."""
    by_cell: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        by_cell.setdefault((run.mode, run.sleep), []).append(run)
    samples = PROMPTS * GROUP_SIZE
    text = [
        "# Step time with a slow reward",
        "",
        f"`python -m benchmarks.bench_overlap --rounds {options.rounds} --steps {options.steps}`: `rollbook train "
        f"letters` with a Llama of 4 layers of 192 (1.2 million weights), {PROMPTS} prompts x {GROUP_SIZE} samples per "
        f"step, on {os.cpu_count()} cores. The reward sleeps {SECONDS[1]:g} s for each sample, without computing, as a "
        f"reward server would let it wait; up to {samples} samples are scored at the same time, so that scoring a step "
        f"takes {SECONDS[1]:g} s in one process. With workers, each of the 2 generates and scores half of a step, and "
        "scores in a thread of its own.",
        "",
        f"Step: the time between two steps: median over {options.rounds} runs of the mean of {options.steps} - "
        f"{options.skip} steps after the warm-up, and its range. Waiting: seconds until the records of a step are in "
        "the book, of which generation is a part. Cost: step time with the sleep minus that without. Other processes "
        f"used {statistics.median(run.load for run in runs):.0%} of the processors (at most "
        f"{max(run.load for run in runs):.0%} during a run).",
        "",
        f"| mode | step s, no sleep | step s, sleep {SECONDS[1]:g} s | cost s | waiting s, no sleep | waiting s, sleep "
        f"{SECONDS[1]:g} s | update s | staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        cells = [[mean_step(run) for run in by_cell[mode, sleep]] for sleep in SECONDS]
        cells.append([late - early for early, late in zip(*cells, strict=True)])
        cells += [[statistics.mean(run.waiting) for run in by_cell[mode, sleep]] for sleep in SECONDS]
        cells.append([statistics.mean(run.updating) for run in by_cell[mode, SECONDS[1]]])
        spans = [f"{statistics.median(cell):.2f} ({min(cell):.2f} to {max(cell):.2f})" for cell in cells]
        staleness = statistics.mean(run.staleness for run in by_cell[mode, SECONDS[1]])
        text.append(f"| {mode} | {' | '.join(spans)} | {staleness:.1f} |")
    text += [
        "",
        "Waiting is the part of a step that a slow reward can lengthen, and changes least with the load of the "
        "machine. Where other processes use much of the processors, the cost is a difference of two noisy runs.",
    ]
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of every run")
    parser.add_argument("--skip", type=int, default=6, help="steps of the warm-up, at least 1")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    order = random.Random(options.seed)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="rollbook-overlap-") as scratch:
        for turn in range(options.rounds):
            cells: list[tuple[str, float]] = [(mode, sleep) for mode in MODES for sleep in SECONDS]
            order.shuffle(cells)
            for mode, sleep in cells:
                out = Path(scratch) / f"{turn}-{mode.replace(' ', '-')}-{sleep}"
                runs.append(train(mode, sleep, options.steps, options.skip, turn, out))
                print(f"round {turn + 1}, {mode}, {sleep:g} s: {mean_step(runs[-1]):.2f} s per step", file=sys.stderr)
    results: list[dict[str, Any]] = [asdict(run) for run in runs]
    (options.out / "overlap.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(runs, options)
    (options.out / "overlap.md").write_text(text)
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
