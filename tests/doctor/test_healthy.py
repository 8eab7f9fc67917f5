"""No false alarm: healthy runs of many sizes, group sizes and kinds of reward, and books that are no RL runs at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.inspect.doctor import CHECKS, Thresholds, examine
from rollbook.inspect.doctor.checks import diagnose
from rollbook.inspect.doctor.findings import Samples
from tests.doctor.books import Run

KINDS = ("binary", "signs", "continuous", "parts", "none")
SHAPES = ((1, 4, 4), (2, 8, 8), (4, 8, 2), (5, 16, 1), (6, 3, 16), (24, 4, 4))


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_book(seed: int) -> None:
    steps, groups, runs = SHAPES[seed % len(SHAPES)]
    run = Run(100 + seed, steps=steps, groups=groups, runs=runs, kind=KINDS[seed % len(KINDS)])
    diagnosis = examine(run.write())
    assert diagnosis.healthy, [(finding.title, finding.detail) for finding in diagnosis.findings]
    assert [check_result.check for check_result in diagnosis.checks] == list(CHECKS)
    assert diagnosis.status("low") == 0


def columns(run: Run) -> dict[str, Any]:
    """What an index has of a run, without a book in between."""
    gids = [f"{step}/{task}" for step, task in zip(run.step, run.task, strict=True)]
    return {
        "uid": [f"{gid}/{i}" for gid, i in zip(gids, run.run, strict=True)],
        "gid": gids,
        "step": run.step,
        "run": run.run,
        "reward": run.reward,
        "length": run.lengths + 4,
        "response_tokens": run.lengths,
        "trained_tokens": run.lengths,
        "advantage": run.centered(),
        "entropy": run.entropy,
        "mismatch": run.mismatch,
        "kl": run.kl,
        "staleness": run.staleness,
        "version_max": run.step,
        "nans": np.zeros(run.n),
        "repetition": run.dice.beta(1, 20, run.n),
        "digest": np.arange(run.n).tolist(),
        "group_size": np.full(run.n, run.runs),
        "status": ["truncated" if is_truncated else "finished" for is_truncated in run.truncated],
        "state": ["dropped" if is_dropped else "trained" for is_dropped in run.dropped],
    }


@pytest.mark.parametrize("seed", range(10))
def test_many_healthy_runs(seed: int) -> None:
    """Ten at a time: what reaches the checks is the same as from a book."""
    for i in range(10):
        dice = np.random.default_rng((seed, i))
        steps, groups, runs = (int(dice.choice(choices)) for choices in ((1, 3, 4, 8, 30), (2, 4, 8, 16), (1, 2, 4, 8)))
        run = Run(seed * 1000 + i, steps=steps, groups=groups, runs=runs, kind=str(dice.choice(KINDS)))
        diagnosis = diagnose(Samples(columns(run)), Thresholds())
        assert diagnosis.healthy, (seed, i, [(finding.title, finding.detail) for finding in diagnosis.findings])


def test_a_book_without_anything_in_it() -> None:
    diagnosis = examine(rollbook.open("memory:"))
    assert diagnosis.healthy
    assert (diagnosis.records, diagnosis.steps, diagnosis.checks_run) == (0, None, 0)


def test_one_record() -> None:
    book = rollbook.open("memory:")
    book.append(Experience(eid=EID(batch="0", task="0"), tokens=[1, 2, 3], reward=0.0))
    assert examine(book).healthy


def test_demonstrations() -> None:
    """Neither rewards nor log-probs; the texts of a data set."""
    dice = np.random.default_rng(0)
    book = rollbook.open("memory:")
    book.append([Experience(tokens=dice.integers(0, 999, 60).astype(np.int32), prompt_length=10) for _ in range(200)])
    diagnosis = examine(book)
    assert diagnosis.healthy
    by_check = {check_result.check: check_result for check_result in diagnosis.checks}
    assert by_check["duplicates"].status == "passed"
    assert by_check["zero-variance"] == ("zero-variance", "skipped", "no group has two scored samples")


def test_preference_pairs() -> None:
    dice = np.random.default_rng(0)
    book = rollbook.open("memory:")
    book.append(
        [
            Experience(
                tokens=dice.integers(0, 999, 10).astype(np.int32),
                prompt_length=10,
                chosen=dice.integers(0, 999, 40).astype(np.int32),
                rejected=dice.integers(0, 999, 60).astype(np.int32),
            )
            for _ in range(100)
        ]
    )
    assert examine(book).healthy


def test_no_log_probs() -> None:
    run = Run(3)
    run.measured = False
    diagnosis = examine(run.write())
    assert diagnosis.healthy
    statuses = {check_result.check: check_result.status for check_result in diagnosis.checks}
    for check in ("entropy-collapse", "train-inference-mismatch", "kl-blowup", "advantage-mean", "stale-data"):
        assert statuses[check] == "skipped"


def test_evaluation_alone() -> None:
    run = Run(3)
    run.evaluation = True
    book = run.write()
    assert examine(book).records == 0
    diagnosis = examine(book, evaluation=True)
    assert diagnosis.healthy
    assert diagnosis.records == run.n
    statuses = {check_result.check: check_result.status for check_result in diagnosis.checks}
    assert statuses["zero-variance"] == "skipped"
    assert statuses["truncation-rewarded"] == "passed"


def test_a_sampler_that_logs_what_is_no_reward() -> None:
    """Numbers beside the reward are not its parts, however much they vary."""
    run = Run(4)
    run.parts = {"accuracy": run.reward.copy(), "seconds": run.dice.gamma(2, 100, run.n), "format_ok": np.ones(run.n)}
    assert examine(run.write()).healthy
