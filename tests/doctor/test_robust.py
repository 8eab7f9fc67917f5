"""Whatever an index holds, the doctor answers: no error, no warning, strict JSON, filters that can be read."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest

from rollbook.inspect import filters
from rollbook.inspect.doctor import Thresholds, format_report
from rollbook.inspect.doctor.checks import diagnose
from rollbook.inspect.doctor.findings import NUMBER_COLUMNS, TRIAGE, Samples

EAGER = Thresholds(samples=1, groups=2, certainty=0.0, trend=0.0, trend_steps=3)
ODD = [0.0, 1.0, 1e300, -1e300, math.inf, -math.inf, 1e-300]


def numbers(dice: np.random.Generator, n: int) -> list[Any]:
    kind = dice.integers(0, 7)
    if kind == 0:
        return [None] * n
    if kind == 1:
        return [float(dice.normal())] * n
    if kind == 2:
        return [None if dice.random() < 0.5 else float(number) for number in dice.normal(size=n)]
    if kind == 3:
        return [ODD[choice] for choice in dice.integers(0, len(ODD), n)]
    if kind == 4:
        return list(dice.integers(0, 3, n))
    if kind == 5:
        return list(10 ** dice.uniform(-3, 4, n))
    return list(dice.normal(size=n))


def anything(seed: int) -> dict[str, Any]:
    dice = np.random.default_rng(seed)
    n = int(dice.choice([0, 1, 2, 9, 40, 300]))

    def pick(*some: Any) -> list[Any]:
        return [some[index] for index in dice.integers(0, len(some), n)]

    groups = max(1, n // int(dice.choice([1, 2, 8])))
    names = ("format", "acc", "x y", '"q"', "b")
    return {
        **{name: numbers(dice, n) for name in NUMBER_COLUMNS},
        "length": dice.integers(0, 50, n).tolist(),
        "uid": [f"u{i}" for i in range(n)],
        "gid": [f"g{index}" for index in dice.integers(0, groups, n)],
        "step": np.sort(dice.integers(-3, int(dice.choice([-2, 1, 5, 40])), n)).tolist(),
        "run": dice.integers(0, int(dice.choice([1, 2, 8])), n).tolist(),
        "scored": dice.integers(0, 3, n).tolist(),
        "status": pick("truncated", "finished", "error", ""),
        "state": pick("trained", "dropped", "waiting", ""),
        "removed_reason": pick(None, None, None, "failed"),
        "kept": pick("random", "worst", "all") if seed % 3 == 0 else [None] * n,
        "parent": pick(None, None, None, "u0"),
        "digest": pick(None, *range(20)),
        "parts": [json.dumps(dict.fromkeys(dice.choice(names, 2).tolist(), ODD[i % 4])) for i in range(n)],
    }


@pytest.mark.parametrize("part", range(4))
def test_anything(part: int) -> None:
    for seed in range(part * 15, part * 15 + 15):
        samples = Samples(anything(seed))
        for thresholds in (Thresholds(), TRIAGE, EAGER):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                diagnosis = diagnose(samples, thresholds, evaluation=seed % 2 == 1)
            json.dumps(diagnosis.as_dict(), allow_nan=False)
            assert format_report(diagnosis, verbose=True)
            for finding in diagnosis.findings:
                filters.parse(finding.filter)
                assert 0 < len(finding.uids) <= min(finding.count, 24), (seed, finding.check)
                assert finding.steps[0] <= finding.steps[1]
