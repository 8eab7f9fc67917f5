"""Does the letters recipe learn as well from vLLM's rollouts as from those of transformers?

    PYTHONPATH=src .vllm/bin/python -m benchmarks.trial_vllm --steps 60

Runs under the Python of an environment with vLLM (`make test-vllm` makes `.vllm`). Each run is `rollbook train letters`
with a seed and one of three engines: transformers, vLLM in process, and a `vllm serve` process. vLLM receives the
weights before every step. All runs are evaluated alike, by transformers on held-out prompts. Writes
`results/vllm_letters.md`, and ends with 1 if the 95% intervals of the engines do not overlap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rollbook
from benchmarks.trial_letters import read

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5% quantile of Student's t distribution, by the number of seeds."""
ARGS = {"enforce_eager": True, "max_num_seqs": 256}


def train(engine: list[str], seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Run the recipe and return its results."""
    command = [sys.executable, "-m", "rollbook", "train", "letters", f"seed={seed}", f"steps={steps}", f"out={out}"]
    subprocess.run([*command, "checkpoint.interval=0", *engine], check=True, stdout=subprocess.DEVNULL)
    return read_run(seed, out)


def read_run(seed: int, out: Path) -> dict[str, Any]:
    """Return the evaluations of a run, the difference after each sync and the time of its steps."""
    with rollbook.open(out / "book", mode="r") as book:
        metrics = [numbers for _, numbers in book.metrics() if "seconds" in numbers]
    return {
        "seed": seed,
        **read(out / "book", 1.0),
        "seconds": statistics.median(numbers["seconds"] for numbers in metrics),
        "difference": max((numbers.get("sync/logprob_difference", 0.0) for numbers in metrics), default=0.0),
        "syncs": sum("sync/logprob_difference" in numbers for numbers in metrics),
    }


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Run a vLLM server with the weights of the recipe."""
    os.environ["VLLM_PYTHON"] = sys.executable
    from rollbook.rollout.vllm import save_checkpoint
    from rollbook.train.recipes import letters
    from tests_vllm.conftest import vllm

    model, tokenizer = letters.model()
    save_checkpoint(model, folder)
    tokenizer.save_pretrained(folder)
    with vllm(folder, folder / "log", "--enable-scale-out", "--max-model-len", "64", "--max-num-seqs", "256") as url:
        yield url


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean over seeds with its 95% interval."""
    mean = statistics.mean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def report(results: dict[str, list[dict[str, Any]]], steps: int) -> tuple[bool, str]:
    """Return whether all intervals overlap, and the page."""
    intervals = {arm: mean_interval([run["after"][0] for run in runs]) for arm, runs in results.items()}
    overlap = max(low for _, low, _ in intervals.values()) <= min(high for _, _, high in intervals.values())
    seeds = [run["seed"] for run in next(iter(results.values()))]
    first = next(iter(results.values()))[0]
    text = [
        "# The letters recipe with vLLM's rollouts",
        "",
        f"`PYTHONPATH=src .vllm/bin/python -m benchmarks.trial_vllm --steps {steps}`: `rollbook train letters` for "
        f"{steps} steps, {len(seeds)} seeds, vLLM 0.32 (CPU build), weights sent before every step. Held-out success "
        f"is the share of right answers to {first['prompts']} prompts, sampled by transformers, with a 95% interval; "
        "the interval of the mean is over seeds (Student's t). The difference is the largest mean difference of "
        "log-probs between engine and trainer after a sync. Other work ran on the two cores at the same time.",
        "",
        f"**The 95% intervals of final held-out success {'overlap' if overlap else 'do NOT overlap'}.**",
        "",
        f"| engine | {' | '.join(f'seed {seed}: before, after' for seed in seeds)} | mean after | s per step | syncs | "
        "largest difference |",
        f"|---|{'---|' * len(seeds)}---|---|---|---|",
    ]
    for arm, runs in results.items():
        cells = [
            f"{run['before'][0]:.3f}, {run['after'][0]:.3f} ({run['after'][1]:.3f} to {run['after'][2]:.3f})"
            for run in runs
        ]
        mean, low, high = intervals[arm]
        seconds = statistics.median(run["seconds"] for run in runs)
        difference = max(run["difference"] for run in runs)
        cells += [f"{mean:.3f} ({low:.3f} to {high:.3f})", f"{seconds:.1f}", str(sum(run["syncs"] for run in runs))]
        text.append(f"| {arm} | {' | '.join(cells)} | {f'{difference:.1e}' if difference else ''} |")
    return overlap, "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--at-once", type=int, default=2, help="engines at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as scratch, serve(Path(scratch) / "model") as url:
        in_process = json.dumps({"engine_args": ARGS})
        arms = {
            "transformers": [],
            "vLLM in process": ["engine.kind=vllm", f"engine.options={in_process}"],
            "vLLM server": ["engine.kind=vllm", f"engine.url={url}"],
        }

        def run(name: str) -> list[dict[str, Any]]:
            folder = Path(scratch) / name.replace(" ", "-")
            return [train(arms[name], seed, options.steps, folder / str(seed)) for seed in options.seeds]

        with ThreadPoolExecutor(options.at_once) as pool:
            results = dict(zip(arms, pool.map(run, arms), strict=True))
    overlap, text = report(results, options.steps)
    (options.out / "vllm_letters.json").write_text(json.dumps(results, indent=1))
    (options.out / "vllm_letters.md").write_text(text)
    print(text, flush=True)
    return 0 if overlap else 1


if __name__ == "__main__":
    sys.exit(main())
