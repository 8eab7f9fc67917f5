"""What the viewer's pages ask of a book of a hundred thousand trajectories: how long the index and its answers take.

Run as `python -m benchmarks.bench_viewer_data [--rounds 9] [--n 100352] [--scratch FOLDER] [--json PATH]` from the
project root, about two minutes. The book is generated: 196 steps of 512 samples, in groups of 16, of about 96 tokens.
With `--write` the results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rollbook
from benchmarks import harness
from rollbook import EID, Experience
from rollbook.inspect.answers import Answers
from rollbook.inspect.index import Index
from rollbook.inspect.sources import BookSource, load, open_source

STEP, GROUP, TOKENS = 512, 16, 96
TEXT = """let me verify this again so the area is half of the product and we get wait that is not right check the
units first compute times minus leaves answer therefore number of boxes each gives total"""
WORDS = TEXT.split()


def rollout(step: int, dice: np.random.Generator) -> list[Experience]:
    """The samples of one step."""
    rows = []
    for i in range(STEP):
        task, run = (step * STEP // GROUP + i // GROUP) % 800, i % GROUP
        count = int(dice.integers(TOKENS // 2, TOKENS * 3 // 2))
        prompt = [task % 50 + 3, task // 50 + 3, *range(100, 110)]
        words = dice.integers(0, len(WORDS), count)
        if dice.random() < 0.03:
            words[count // 3 :] = words[count // 3]
        right = bool(dice.random() < 0.2 + 0.6 * step / 196 - 0.1 * (task % 3))
        entropy = dice.gamma(0.6, 0.9, count).astype(np.float32)
        logprobs = -entropy
        policy = logprobs + dice.normal(0, 0.01, count).astype(np.float32)
        rows.append(
            Experience(
                eid=EID(batch=step, task=task, run=run, suffix="s"),
                tokens=np.array([*prompt, *(words + 200)], dtype=np.int32),
                prompt_length=len(prompt),
                logprobs=logprobs,
                old_logprobs=policy,
                ref_logprobs=policy + dice.normal(0, 0.05, count).astype(np.float32),
                entropy=entropy,
                advantages=np.full(count, float(right) - 0.5, dtype=np.float32),
                reward=float(right),
                policy_versions=step,
                finish_reason="length" if dice.random() < 0.05 else "stop",
                prompt_text=f"Question {task}: what is {task} times {task % 7}?",
                response_text=" ".join(WORDS[word] for word in words),
                group_size=GROUP,
                metrics={"accuracy": float(right), "format": 1.0},
            )
        )
    return rows


def make(folder: Path, count: int, seed: int) -> int:
    """Write the book; how many records it has."""
    with rollbook.open(folder) as book:
        for step in range(count // STEP):
            book.append(rollout(step, np.random.default_rng((seed, step))))
            book.announce(step)
            with book.lease(STEP // GROUP - 1, by="group") as lease:
                lease.ack(step=step + 1)
        return len(book)


def questions(answers: Answers, steps: int) -> dict[str, Callable[[], Any]]:
    """What pages ask, each time of another step, group or word."""
    turn = itertools.count()
    uids = [row[0] for row in answers.index.query("SELECT uid FROM samples WHERE run = 3 ORDER BY n")]
    gids = [row[0] for row in answers.index.query("SELECT gid FROM groups ORDER BY g")]

    def step() -> int:
        return next(turn) * 37 % steps

    def three() -> tuple[int, int]:
        first = step() * (steps - 3) // steps
        return first, first + 2

    def paged() -> Any:
        first = answers.list(filter=f"reward < .5 and len > {60 + next(turn) % 9}", sort="-kl_max")
        return answers.list(sort="-kl_max", offset=100, snapshot=first["snapshot"])

    return {
        "overview: run": answers.run,
        "overview: all steps": answers.steps,
        "step page": lambda: answers.step(step()),
        "groups of a step": lambda: answers.list("groups", step=step()),
        "samples of a step": lambda: answers.list("samples", step=step(), limit=512),
        "filter and sort over all, first page": lambda: answers.list(
            filter=f"reward < .5 and len > {60 + next(turn) % 9}", sort="-kl_max"
        ),
        "filter and sort over all, two pages": paged,
        "filter by text over all": lambda: answers.list(filter=f'opening ~ "question {next(turn) % 800}:"'),
        "group filter over all": lambda: answers.list("groups", filter="zero_variance and truncated", sort="-step"),
        "group": lambda: answers.group(gids[next(turn) * 7919 % len(gids)]),
        "neighbors of a sample": lambda: answers.neighbors(uids[next(turn) * 7919 % len(uids)]),
        "findings": lambda: (setattr(answers, "_looked", None), answers.findings()),
        "compare 3 steps with 3": lambda: answers.compare(three(), three()),
        "search: phrase": lambda: answers.search("let me verify this"),
        "search: rare phrase": lambda: answers.search(f"question {next(turn) % 800}"),
        "search: substring": lambda: answers.search("rea is ha", "substring"),
        "search: regex": lambda: answers.search(r"units (first|number) \w+ answer", "regex"),
    }


def commands(answers: Answers, steps: int) -> dict[str, list[str]]:
    """What `rollbook show` is asked for in a process of its own, which has no index yet."""
    uid = answers.index.query("SELECT uid FROM samples WHERE step = ? LIMIT 1", (steps // 2,))[0][0]
    return {"rollbook show RUN ID, from start to end": [uid], "rollbook show RUN --step N": ["--step", str(steps // 3)]}


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def until(source: BookSource, index: Index, done: Callable[[], bool]) -> float:
    """Seconds of refreshing until something is true."""
    begun = time.perf_counter()
    while not done() and source.refresh(index):
        pass
    return time.perf_counter() - begun


def report(count: int, rounds: int, seed: int, scratch: Path | None) -> dict[str, Any]:
    """Make the book, index it and ask."""
    folder = Path(tempfile.mkdtemp(prefix="rollbook-bench-", dir=scratch))
    try:
        begun = time.perf_counter()
        total = make(folder / "book", count, seed)
        print(f"{total:,} records written in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        source, index = open_source(folder / "book"), Index()
        assert isinstance(source, BookSource)
        ledger = until(source, index, lambda: index.query("SELECT COUNT(*) FROM samples")[0][0] >= total)
        begun = time.perf_counter()
        load(source, index)
        measured = time.perf_counter() - begun
        size = sum(file.stat().st_size for file in index.path.parent.iterdir())
        answers = Answers(source, index)
        begun = time.perf_counter()
        while answers.searching.fill():
            pass
        texts = time.perf_counter() - begun
        with_texts = sum(file.stat().st_size for file in index.path.parent.iterdir())
        letters = index.query("SELECT SUM(response_tokens) FROM samples")[0][0]
        times: dict[str, list[float]] = {}
        for name, ask in questions(answers, count // STEP).items():
            ask()
            times[name] = [timed(ask) for _ in range(rounds)]
            print(f"{name}: {statistics.median(times[name]):.1f} ms", file=sys.stderr)
        idle = [timed(lambda: source.refresh(index)) for _ in range(rounds)]
        times["check for new records, none"] = idle
        for name, arguments in commands(answers, count // STEP).items():
            command = [sys.executable, "-m", "rollbook", "show", str(folder / "book"), *arguments]
            times[name] = [
                timed(lambda command=command: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))
                for _ in range(rounds)
            ]
            print(f"{name}: {statistics.median(times[name]):.0f} ms", file=sys.stderr)
        answers.close()
        source.close()
        index.close()
        return {
            "facts": {
                "records": total,
                "tokens": letters,
                "rounds": rounds,
                "index from the ledger, s": round(ledger, 2),
                "index from the tokens, s": round(measured, 2),
                "microseconds per record": round(measured / total * 1e6, 1),
                "MB of index": round(size / 1e6, 1),
                "text index, s": round(texts, 2),
                "MB with texts": round(with_texts / 1e6, 1),
            },
            "milliseconds": times,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def markdown(measurements: dict[str, Any]) -> str:
    """The tables to print."""
    lines = ["## The viewer's data: a book of many trajectories", ""]
    lines += [", ".join(f"{name} {value:,}" for name, value in measurements["facts"].items()), ""]
    lines += ["| query | median ms | spread |", "|---|---|---|"]
    for name, times in measurements["milliseconds"].items():
        lines.append(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f}-{max(times):.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=196 * STEP)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    measurements = report(options.n, options.rounds, options.seed, options.scratch)
    print(markdown(measurements))
    written = json.dumps({"environment": harness.environment(), **measurements}, indent=1) + "\n"
    if options.json is not None:
        options.json.write_text(written)
    if options.write:
        results = Path(os.path.dirname(os.path.abspath(__file__))) / "results"
        (results / "viewer_data.json").write_text(written)
        (results / "viewer_data.md").write_text(markdown(measurements))
