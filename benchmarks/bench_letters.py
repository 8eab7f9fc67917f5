"""Seconds per step of `rollbook train letters` on the CPU and on a CUDA device, by stage.

Run as `python -m benchmarks.bench_letters [--steps 40] [--rounds 2] [--results FOLDER]` from the project root, on a
machine with a CUDA device (`--devices cpu` tries it out). Runs alternate, each in its own process. Steps before
`--skip` are left out: the first ones compile kernels and capture CUDA graphs. The device is waited for only where a
stage reads numbers from it, so a stage may include waiting for the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

STAGES = {
    "generate": lambda step: step["rollout/seconds"],
    "score": lambda step: step["reward/seconds"],
    "log-probs before the update": lambda step: step["policy/seconds"],
    "advantages": lambda step: step["advantages/seconds"],
    "records, append": lambda step: (
        step["collect/seconds"]
        - sum(step[f"{stage}/seconds"] for stage in ("rollout", "reward", "policy", "advantages"))
    ),
    "lease": lambda step: step["lease/seconds"],
    "update": lambda step: step["update/seconds"],
    "acknowledge": lambda step: step["acknowledge/seconds"],
    "whole step": lambda step: step["seconds"],
}
SETTINGS = ("evaluation.before=false", "evaluation.after=false", "checkpoint.interval=0", "tracking.display=false")


def train(device: str, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Run the recipe and return the metrics of its steps after the warm-up."""
    command = [sys.executable, "-m", "rollbook", "train", "letters", f"device={device}", f"out={folder}"]
    command += [f"steps={options.steps}", *SETTINGS, *options.set]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [metrics for metrics in lines if "update/seconds" in metrics][options.skip :]


def report(steps: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """Return the table of medians."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    devices = list(steps)
    lines = [
        "# A step of the letters recipe by device",
        "",
        f"{name}, torch {torch.__version__}; `python -m benchmarks.bench_letters --steps {options.steps} --rounds "
        f"{options.rounds}`: medians in ms of the steps after the first {options.skip} of {options.rounds} runs, one "
        "thread, 64 prompts x 8 samples of at most 7 tokens, a model of 0.19 million weights.",
        "",
        f"| stage | {' | '.join(devices)} | ratio |",
        f"|---|{'---|' * len(devices)}---|",
    ]
    for stage, seconds in STAGES.items():
        medians = [statistics.median(map(seconds, steps[device])) for device in devices]
        cells = " | ".join(f"{median * 1e3:.1f}" for median in medians)
        lines.append(f"| {stage} | {cells} | x{medians[0] / medians[-1]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of the configuration")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    steps: dict[str, list[dict[str, Any]]] = {device: [] for device in options.devices}
    with tempfile.TemporaryDirectory(prefix="rollbook-letters-") as scratch:
        for turn in range(options.rounds):
            for device in steps:
                steps[device] += train(device, options, Path(scratch) / f"{device}-{turn}")
    text = report(steps, options)
    print(text)
    (options.results / "letters_cuda.md").write_text(text)


if __name__ == "__main__":
    main()
