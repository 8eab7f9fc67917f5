"""`python -m tests.train.trials crash --kills 30`: runs of `rollbook train` are killed, at any moment and at named
points, and started again until they come to their end; each must come to what a run that nobody killed came to.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.train.lineage import Lineage, command
from tests.train.nursery import Nursery

VARIANTS = {
    "grpo": ["steps=8"],
    "every step saved, one kept": [
        "steps=6",
        "checkpoint.interval=1",
        "checkpoint.keep_last=1",
        "evaluation.interval=1",
    ],
    "ppo": ["steps=6", "algorithm.preset=ppo", "algorithm.group_size=2", "algorithm.critic_warmup=2"],
    "dropped groups": ["steps=6", "algorithm.preset=dapo", "algorithm.group_size=3", "algorithm.refill=2"],
    "replay": [
        "steps=9",
        "replay.kind=replay",
        "replay.reuse=3",
        "replay.rollout_interval=2",
        "replay.max_staleness=5",
    ],
    "bfloat16": ["steps=6", "model.precision=bfloat16"],
}
ANY = "any moment"
_MOST = 12  # lives of a run, so that every run comes to its end


@dataclass
class Report:
    """What a trial did."""

    kills: Counter[str] = field(default_factory=Counter)
    """By the point at which, or at any moment."""
    ended: Counter[str] = field(default_factory=Counter)
    """Runs that came to their end, by variant."""
    resumed: int = 0
    """Lives that went on from a checkpoint."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"crash trial of rollbook train: {sum(self.kills.values())} kills in {self.seconds:.1f} s"]
        lines += [f"  {point:<20} {count:>4}" for point, count in self.kills.most_common()]
        runs = ", ".join(f"{name} {count}" for name, count in self.ended.items())
        lines.append(f"  {sum(self.ended.values())} runs came to their end ({runs}); {self.resumed} lives went on")
        lines += [f"  VIOLATION: {text}" for text in self.violations[:20]]
        lines.append(f"  {len(self.violations)} violations")
        return "\n".join(lines)


def trial(nursery: Nursery, folder: Path, kills: int, *, seed: int = 0, variants: dict[str, list[str]]) -> Report:
    """Kill lives of runs, one run after the other, one variant after the other, until there were so many kills."""
    report, begun, luck = Report(), time.monotonic(), random.Random(seed)
    uninterrupted: dict[str, tuple[Lineage, float, list[str]]] = {}
    turn = 0
    while sum(report.kills.values()) < kills and not report.violations:
        name = list(variants)[turn % len(variants)]
        if name not in uninterrupted:
            place, start = folder / f"whole{turn}", time.monotonic()
            life = nursery.live(command(place, *variants[name]))
            if life.code:
                report.violations.append(
                    f"{name}: a run that nobody killed ended with {life.code}: {life.printed[-500:]}"
                )
                break
            uninterrupted[name] = Lineage.of(place), time.monotonic() - start, life.points
        _run(nursery, folder / f"run{turn}", name, variants[name], uninterrupted[name], luck, report, kills)
        turn += 1
    report.seconds = time.monotonic() - begun
    return report


def _run(
    nursery: Nursery,
    folder: Path,
    name: str,
    changes: list[str],
    uninterrupted: tuple[Lineage, float, list[str]],
    luck: random.Random,
    report: Report,
    kills: int,
) -> None:
    """One run, to its end."""
    expected, seconds, points = uninterrupted
    for lives in range(_MOST + 1):
        spared = lives == _MOST or sum(report.kills.values()) >= kills
        at = after = None
        if not spared and luck.random() < 0.5:
            # A place in the whole run, so that points which are reached often are met more often.
            place = luck.randrange(len(points))
            at = points[place], 1 + luck.randrange(1 + points[:place].count(points[place]))
        elif not spared:
            after = luck.uniform(0, seconds)
        life = nursery.live(command(folder, *changes), at=at, after=after)
        report.resumed += "continuing after step" in life.printed
        if life.killed:
            report.kills[ANY if at is None else at[0]] += 1
            continue
        if life.code:
            report.violations.append(f"{name}, life {lives}: ended with {life.code}: {life.printed[-500:]}")
            return
        break
    differences = [f"{name}: {text}" for text in expected.differences(Lineage.of(folder))]
    report.violations += differences
    report.ended[name] += 1


def main() -> int:
    """Run the trial that is asked for, and print what it did."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.trials", description=__doc__)
    crash = parser.add_subparsers(dest="trial", required=True).add_parser("crash", help="kill runs of rollbook train")
    crash.add_argument("--kills", type=int, default=60)
    crash.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as place, Nursery(Path(place)) as nursery:
        report = trial(nursery, Path(place), options.kills, seed=options.seed, variants=VARIANTS)
    print(report)
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
