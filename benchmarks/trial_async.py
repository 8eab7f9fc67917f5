"""Does the letters recipe learn as well from asynchronous rollout workers as in a single process?

    python -m benchmarks.trial_async                            # 3 seeds, about twenty minutes on two idle cores
    python -m benchmarks.trial_async --steps 6 --seeds 0 1 --runs /tmp/trial --out /tmp

Each run is `rollbook train letters` with a seed: in a single process, and with two rollout workers, asynchronously,
with a staleness of at most 2. In a third arm the process of the trainer is killed in the middle of the asynchronous
run, and the same command is given again; the page says where these runs continued. A further run has words of 4 to 8
letters, to compare prompts of different lengths. All runs are evaluated on held-out prompts. Runs are kept in
`--runs`; a second call continues after the last finished run.

`--controls` adds workers in the modes `sync` and `one_step_off`, which separate the effect of staleness from that of
the workers, and asynchronous ones with `algorithm.correction`. Writes `results/async_letters.md`, and ends with 1 if
the 95% intervals of the two arms do not overlap.

The intervals of three seeds are wide, and overlap also for clearly different arms. The page therefore also has the
difference between arms paired by seed: runs of one seed begin with the same weights and prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rollbook
from benchmarks import peers
from benchmarks.trial_letters import read, run_command
from benchmarks.trial_vllm import mean_interval
from rollbook.train.config import load_config

STALENESS = 2
WORKERS = ["rollout.mode=async", "rollout.workers=2", f"replay.max_staleness={STALENESS}"]
MIXED_ROWS = Path(__file__).with_name("mixed_letters.py")
SINGLE, ASYNC, MIXED = "single process", "2 workers, asynchronous", "2 workers, words of 4 to 8 letters"
SYNC, ONE_STEP_OFF = "2 workers, synchronous", "2 workers, one step off"
KILLED = "2 workers, asynchronous, killed and resumed"
CORRECTED = "2 workers, asynchronous, sequence correction"
ARMS = {
    SINGLE: [],
    ASYNC: WORKERS,
    MIXED: [*WORKERS, f"data.function={MIXED_ROWS}:rows", "data.options={count: 10000}", "sampling.max_tokens=9"],
    SYNC: ["rollout.mode=sync", "rollout.workers=2"],
    ONE_STEP_OFF: ["rollout.mode=one_step_off", "rollout.workers=2"],
    KILLED: [*WORKERS, "checkpoint.interval=10"],
    CORRECTED: [*WORKERS, "algorithm.correction={level: sequence}"],
}
COMPARED = (SINGLE, ASYNC)
CONTROLS = (SYNC, ONE_STEP_OFF, CORRECTED)

_STALENESS = """
WITH tokens AS (SELECT uid, unnest(policy_versions) AS version FROM training)
SELECT events.step - 1 - tokens.version AS staleness, count(*) AS tokens
FROM events JOIN tokens USING (uid) WHERE events.kind = 'trained' GROUP BY ALL ORDER BY staleness
"""
_MIXED_VERSIONS = """
SELECT avg((list_max(policy_versions) > list_min(policy_versions))::INT) FROM training WHERE len(policy_versions) > 0
"""
_WAITING = """
WITH claims AS (
    SELECT CAST(detail->>'$.number' AS BIGINT) AS number, max(time) FILTER (kind = 'begun') AS begun,
    max(time) FILTER (kind = 'generated') AS generated
    FROM events WHERE kind IN ('begun', 'generated') GROUP BY ALL
), records AS (
    SELECT uid, prompt_length, CAST(info->>'$.rollout.number' AS BIGINT) AS number, version_min FROM training
), groups AS (
    SELECT number, max(prompt_length) AS length, max(events.time) AS trained,
    avg(events.step - 1 - version_min) AS staleness
    FROM records JOIN events ON events.uid = records.uid AND events.kind = 'trained' GROUP BY number
)
SELECT length, count(*) AS groups, quantile_cont(generated - begun, [0.5, 0.9]) AS generation,
quantile_cont(trained - generated, [0.5, 0.9]) AS waiting, avg(staleness) AS staleness
FROM groups JOIN claims USING (number) GROUP BY length ORDER BY length
"""


def train(arm: str, seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """Run the recipe, unless it has been run before, and return its results."""
    out = folder / f"{list(ARMS).index(arm)}-{seed}"
    words = ["-m", "rollbook", "train", "letters", f"seed={seed}", f"out={out}", "checkpoint.interval=0", *ARMS[arm]]
    words += [] if steps is None else [f"steps={steps}"]
    result_file = out.with_suffix(".json")
    if result_file.exists():
        results: dict[str, Any] = json.loads(result_file.read_text())
        if results["command"] == words:
            return results
    shutil.rmtree(out, ignore_errors=True)
    print(f"{arm}, seed {seed}", file=sys.stderr, flush=True)
    killed_after = kill_in_the_middle(words, out) if arm == KILLED else None
    usage = run_command(words, out.with_suffix(".log"))
    results = {"command": words, "arm": arm, "seed": seed, **usage, **read_run(out, arm)}
    if killed_after is not None:
        results |= {"killed_after": killed_after, **read_resume(out)}
    result_file.write_text(json.dumps(results))
    return results


def kill_in_the_middle(words: list[str], out: Path) -> int:
    """Run a command, and kill its process after half of its steps; return the number of steps it had done."""
    with out.with_suffix(".killed.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=subprocess.STDOUT)
    metrics = out / "metrics.jsonl"
    half = load_config("letters", [word for word in words[4:] if not word.startswith("out=")]).steps // 2
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("update/seconds") < half):
        time.sleep(0.1)
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"{out}: the run ended before it was killed")
    return metrics.read_text().count("update/seconds")


def read_resume(out: Path) -> dict[str, Any]:
    """Return the step after which a run that was killed continued, and what `rollbook check` finds."""
    match = re.search(r"continuing after step (\d+)", out.with_suffix(".log").read_text())
    if match is None:
        raise SystemExit(f"{out}: the run was not resumed")
    with rollbook.open(out / "book", mode="r") as book:
        report = book.check()
    return {"resumed_after": int(match[1]), "check": "nothing wrong" if report.ok else str(report)}


def read_run(out: Path, arm: str) -> dict[str, Any]:
    """Return the evaluations of a run, the time of its steps, and what its ledger says about staleness and waiting."""
    results = read(out / "book", 1.0)
    with rollbook.open(out / "book", mode="r") as book:
        metrics = [numbers for _, numbers in book.metrics() if "update/seconds" in numbers]
        results["step_seconds"] = statistics.median(numbers["seconds"] for numbers in metrics)
        results["staleness"] = {str(version): tokens for version, tokens in book.sql(_STALENESS).rows()}
        results["mixed_versions"] = book.sql(_MIXED_VERSIONS).rows()[0][0]
        results["dropped"] = dict(book.counts().dropped)
        if arm != SINGLE:
            results["waiting"] = [list(row) for row in book.sql(_WAITING).rows()]
    return results


def report(runs: list[dict[str, Any]], steps: int) -> tuple[bool, str]:
    """Return whether the intervals overlap, and the page."""
    by_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    seeds = [run["seed"] for run in by_arm[SINGLE]]
    intervals = {arm: mean_interval([run["after"][0] for run in by_arm[arm]]) for arm in COMPARED}
    overlap = max(low for _, low, _ in intervals.values()) <= min(high for _, _, high in intervals.values())
    loads = [run["others"] for run in runs if "others" in run]
    load = f"used {statistics.median(loads):.0%} of the processors" if len(loads) == len(runs) else "ran meanwhile"
    flag = " --controls" if by_arm[SYNC] else ""
    text = [
        "# The letters recipe with asynchronous rollout workers",
        "",
        f"`python -m benchmarks.trial_async{flag}`: `rollbook train letters` for {steps} steps, {len(seeds)} seeds, on "
        f"{os.cpu_count()} cores, one run at a time, one thread per process: in a single process, and with `"
        f"{' '.join(WORKERS)}`. Held-out success is the share of right answers to {runs[0]['prompts']} prompts with a "
        "95% interval; the interval of the mean is over seeds (Student's t). Change: difference from the single "
        "process, paired by seed, with its 95% interval. Seconds per step are the median; wall is the whole command: "
        "imports, warm-up, training and evaluations. Killed and resumed: the trainer's process is killed (SIGKILL) "
        f"after half of the steps, and the same command is given again; wall is that of the second. Other work {load}.",
        "",
        f"**{describe_verdict(by_arm, overlap)}**",
        "",
        f"| arm | {' | '.join(f'seed {seed}: before, after' for seed in seeds)} | mean after | change | s per step | "
        "wall s |",
        f"|---|{'---|' * len(seeds)}---|---|---|---|",
    ]
    for arm in (*COMPARED, KILLED, *CONTROLS):
        if not by_arm[arm]:
            continue
        cells = [
            f"{run['before'][0]:.3f}, {run['after'][0]:.3f} ({run['after'][1]:.3f} to {run['after'][2]:.3f})"
            for run in by_arm[arm]
        ]
        mean, low, high = mean_interval([run["after"][0] for run in by_arm[arm]])
        change = "" if arm == SINGLE else "{:+.3f} ({:+.3f} to {:+.3f})".format(*paired_change(by_arm, arm))
        seconds = statistics.median(run["step_seconds"] for run in by_arm[arm])
        wall = statistics.median(run["wall"] for run in by_arm[arm])
        cells += [f"{mean:.3f} ({low:.3f} to {high:.3f})", change, f"{seconds:.2f}", f"{wall:.0f}"]
        text.append(f"| {arm} | {' | '.join(cells)} |")
    return overlap, "\n".join(
        [*text, *describe_resumes(by_arm[KILLED]), *describe_staleness(by_arm), *describe_waiting(by_arm)]
    ) + "\n"


def paired_change(by_arm: dict[str, list[dict[str, Any]]], arm: str) -> tuple[float, float, float]:
    """Return the mean difference of final success from the single process over seeds, with its 95% interval."""
    pairs = zip(by_arm[SINGLE], by_arm[arm], strict=True)
    return mean_interval([other["after"][0] - single["after"][0] for single, other in pairs])


def describe_verdict(by_arm: dict[str, list[dict[str, Any]]], overlap: bool) -> str:
    """Return what the two arms show: the intervals of the means, the seeds one by one, and the paired difference."""
    pairs = list(zip(by_arm[SINGLE], by_arm[ASYNC], strict=True))
    apart = sum(other["after"][2] < single["after"][1] for single, other in pairs)
    mean, low, high = paired_change(by_arm, ASYNC)
    text = (
        f"The 95% intervals of the mean final success {'overlap' if overlap else 'do NOT overlap'}. Paired by seed, "
        f"asynchronous differs by {mean:+.3f} ({low:+.3f} to {high:+.3f}); its interval is below that of the single "
        f"process for {apart} of {len(pairs)} seeds: "
    )
    if high < 0:
        return (
            text + "after as many steps, asynchronous training is WORSE, although the intervals of the means overlap."
        )
    return text + ("no difference is shown." if low <= 0 else "asynchronous training is better.")


def describe_resumes(runs: list[dict[str, Any]]) -> list[str]:
    """Return a paragraph about the runs that were killed and resumed."""
    parts = [
        f"seed {run['seed']}: killed after step {run['killed_after']}, continued after step {run['resumed_after']}, "
        f"{run['dropped'].get('rewound', 0):,} records rewound, `rollbook check`: {run['check']}"
        for run in runs
    ]
    text = (
        "Killed and resumed runs continue after their last checkpoint. Records generated later are dropped as rewound."
    )
    return ["", f"{text} {'; '.join(parts)}."]


def describe_staleness(by_arm: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the section about the age of the tokens."""
    columns = [str(version) for version in range(STALENESS + 1)]
    text = [
        "",
        "## Staleness of tokens",
        "",
        "Policy versions between the one that sampled a token and the one that was updated with it, by the ledger: "
        "share of all tokens trained on. Mixed: share of responses with tokens of several versions. Dropped: records "
        "that were not trained on, by reason.",
        "",
        f"| arm | seed | {' | '.join(columns)} | more | mixed | dropped |",
        f"|---|---|{'---|' * len(columns)}---|---|---|",
    ]
    for arm, runs in by_arm.items():
        for run in runs:
            total = sum(run["staleness"].values())
            shares = [run["staleness"].get(version, 0) / total for version in columns]
            dropped = ", ".join(f"{reason} {count}" for reason, count in run["dropped"].items()) or "none"
            cells = [f"{share:.1%}" for share in [*shares, max(1.0 - sum(shares), 0.0)]]
            text.append(f"| {arm} | {run['seed']} | {' | '.join(cells)} | {run['mixed_versions']:.1%} | {dropped} |")
    return text


def describe_waiting(by_arm: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the section about the waiting time of groups by the length of their prompts."""
    text = [
        "",
        "## Waiting time by prompt length",
        "",
        "Seconds from the claim of a group until its records are in the book (events `begun` and `generated`: "
        "generation and reward), and from then until it was trained on; median and 90% quantile of all trained "
        "groups. Staleness: mean of the oldest tokens of the responses. Prompts of the recipe have 7 tokens; the last "
        "rows are a run with words of 4 to 8 letters, which also have longer answers.",
        "",
        "| arm | seed | prompt tokens | groups | claim to book s | book to training s | staleness |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, runs in by_arm.items():
        for run in runs:
            for length, groups, generation, waiting, staleness in run.get("waiting", []):
                spans = [f"{median:.2f}, {largest:.2f}" for median, largest in (generation, waiting)]
                text.append(
                    f"| {arm} | {run['seed']} | {length} | {groups:,} | {' | '.join(spans)} | {staleness:.2f} |"
                )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="2 to 5 of them")
    parser.add_argument("--steps", type=int, help="of every run; by default that of the recipe")
    parser.add_argument("--controls", action="store_true", help="also workers in other modes, and with correction")
    parser.add_argument("--runs", type=Path, default=peers.default_scratch() / "trial-async", help="keeps the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(arm, seed) for seed in options.seeds for arm in (*COMPARED, KILLED)] + [(MIXED, options.seeds[0])]
    jobs += [(arm, seed) for arm in CONTROLS for seed in options.seeds if options.controls]
    runs = [train(arm, seed, options.steps, options.runs) for arm, seed in jobs]
    overlap, text = report(runs, runs[0]["steps"])
    text = json.dumps(runs, indent=1).replace(f"{MIXED_ROWS.parents[1]}/", "")  # paths within the project
    (options.out / "async_letters.json").write_text(text + "\n")
    (options.out / "async_letters.md").write_text(text)
    print(text, flush=True)
    return 0 if overlap else 1


if __name__ == "__main__":
    sys.exit(main())
