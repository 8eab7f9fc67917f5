"""Interleaved timing of contenders and bounds: each runs once per round, and ratios are taken within a round.

Machines drift, so only contenders of one run are compared, and nothing is asserted on absolute time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

Verdict = Literal["met", "MISSED", "-"]

FRESH = "memcpy, fresh pages"
WARM = "memcpy, warm pages"


@dataclass(frozen=True)
class Contender:
    """One timed call, `run(prepare())`: neither preparing nor dropping the result is timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Comparison:
    """One line of the table: how many times faster than a peer, or how many times a bound's time."""

    label: str
    ours: str
    reference: str
    target: float | None = None
    bound: bool = False

    def ratio(self, seconds: float, reference: float) -> float:
        """Larger is better against a peer, smaller against a bound."""
        return seconds / reference if self.bound else reference / seconds

    def met(self, ratio: float) -> Verdict:
        """Whether the ratio reaches the target, if there is one."""
        if self.target is None:
            return "-"
        return "met" if (ratio <= self.target if self.bound else ratio >= self.target) else "MISSED"

    @property
    def stated(self) -> str:
        """The target in words."""
        if self.target is None:
            return "-"
        return f"at most {self.target:g} of it" if self.bound else f"at least x{self.target:g}"


@dataclass(frozen=True)
class Result:
    """A comparison with its numbers. `ratio` is the median of the ratios within each round."""

    comparison: Comparison
    ours_ms: float
    ours_spread_ms: tuple[float, float]
    reference_ms: float
    ratio: float
    ratio_spread: tuple[float, float]
    verdict: Verdict


@dataclass
class Times:
    """Seconds per contender and round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median_ms(self, name: str) -> float:
        """Milliseconds of the median round."""
        return statistics.median(self.seconds[name]) * 1e3

    def spread_ms(self, name: str) -> tuple[float, float]:
        """Milliseconds of the fastest and of the slowest round."""
        return min(self.seconds[name]) * 1e3, max(self.seconds[name]) * 1e3

    def compare(self, comparison: Comparison) -> Result:
        """The comparison with its numbers filled in."""
        pairs = zip(self.seconds[comparison.ours], self.seconds[comparison.reference], strict=True)
        ratios = [comparison.ratio(seconds, reference) for seconds, reference in pairs]
        ratio = statistics.median(ratios)
        return Result(
            comparison,
            self.median_ms(comparison.ours),
            self.spread_ms(comparison.ours),
            self.median_ms(comparison.reference),
            ratio,
            (min(ratios), max(ratios)),
            comparison.met(ratio),
        )


@dataclass(frozen=True)
class Options:
    """The options of a run; `rounds` is the benchmark's own default where it is None."""

    n: int
    rounds: int | None
    seed: int
    json: Path | None
    scratch: Path | None


@dataclass(frozen=True)
class Report:
    """What one benchmark found."""

    title: str
    facts: Mapping[str, Any]
    times: Times
    results: Sequence[Result]

    def markdown(self) -> str:
        """The tables to print."""
        facts = ", ".join(f"{key} {value}" for key, value in self.facts.items())
        return f"## {self.title}\n\n{facts}\n\n{table(self.results)}\n\n{times_table(self.times)}\n"

    def plain(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        return {
            "title": self.title,
            "facts": dict(self.facts),
            "seconds": self.times.seconds,
            "results": [asdict(result) for result in self.results],
        }


def single_thread() -> None:
    """One thread for torch and for Arrow, on every side."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    seed: int = 0,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """One warm-up of every contender, then `rounds` rounds, each in its own shuffled order."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders share a name: {names}")
    order = random.Random(seed)
    times = Times({name: [] for name in names})
    for round_ in range(-1, rounds):
        turn = list(contenders)
        order.shuffle(turn)
        for contender in turn:
            elapsed = time_once(contender, clock)
            if round_ >= 0:
                times.seconds[contender.name].append(elapsed)
        if progress:
            print(f"round {round_ + 1}/{rounds}" if round_ >= 0 else "warm-up", file=sys.stderr)
    return times


def time_once(contender: Contender, clock: Callable[[], float]) -> float:
    """Seconds of one call, without preparing and dropping the result."""
    state = contender.prepare()
    gc.collect()
    start = clock()
    result = contender.run(state)
    elapsed = clock() - start
    del result, state
    gc.collect()
    return elapsed


def memcpy_bounds(size: int) -> list[Contender]:
    """What memory allows: `size` bytes copied into a new `bytes`, and into a buffer that is used again."""
    source = np.arange(size, dtype=np.uint8)
    target = np.ones(size, dtype=np.uint8)
    view = source.data
    return [
        Contender(FRESH, lambda _: bytes(view)),
        Contender(WARM, lambda _: np.copyto(target, source)),
    ]


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| | Rollbook ms | spread | reference | ms | ratio | spread | target | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        compared = result.comparison
        sign = "" if compared.bound else "x"
        low, high = (_number(value) for value in result.ratio_spread)
        fast, slow = (_number(value) for value in result.ours_spread_ms)
        lines.append(
            f"| {compared.label} | {_number(result.ours_ms)} | {fast}-{slow} | {compared.reference} "
            f"| {_number(result.reference_ms)} | {sign}{_number(result.ratio)} | {low}-{high} "
            f"| {compared.stated} | {result.verdict} |"
        )
    return "\n".join(lines)


def times_table(times: Times) -> str:
    """Every contender's median and spread as a Markdown table."""
    lines = ["| contender | median ms | spread |", "|---|---|---|"]
    for name in times.seconds:
        low, high = (_number(value) for value in times.spread_ms(name))
        lines.append(f"| {name} | {_number(times.median_ms(name))} | {low}-{high} |")
    return "\n".join(lines)


def parse(description: str | None, argv: Sequence[str] | None = None) -> Options:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--n", type=int, default=4096, help="experiences (targets are stated for 4096)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds after the warm-up")
    parser.add_argument("--seed", type=int, default=20_260, help="of the workload and of each round's order")
    parser.add_argument("--json", type=Path, default=None, help="file for every time; the report is written beside it")
    parser.add_argument("--scratch", type=Path, default=None, help="where peers are installed (.bench)")
    return Options(**vars(parser.parse_args(argv)))


def main(*benchmarks: Callable[[Options], Report]) -> None:
    """Run the benchmarks with the options of the command line, printing each report as it comes."""
    options = parse("Rollbook beside its peers and the bounds of the machine.")
    single_thread()
    reports = []
    for benchmark in benchmarks:
        reports.append(benchmark(options))
        print(reports[-1].markdown(), flush=True)
    if options.json is not None:
        found = environment()
        versions = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
        text = "\n".join([f"# Benchmarks\n\n{versions}\n", *map(Report.markdown, reports)])
        options.json.with_suffix(".md").write_text(text)
        written = {"environment": found, "reports": [report.plain() for report in reports]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Versions and the machine's size: what a reader needs to judge the numbers."""
    versions = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    for package in ("rollbook", "torch", "numpy", "pyarrow", "datasets", "safetensors"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
