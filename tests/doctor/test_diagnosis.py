"""What can be examined, which part of it, and the queue of what is worth a look."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.inspect.doctor import Thresholds, examine, triage
from rollbook.inspect.doctor.checks import diagnose, parse_steps
from rollbook.inspect.doctor.findings import Samples
from rollbook.inspect.index import Index
from rollbook.inspect.sources import load, open_source
from tests.doctor.books import PLANTS, Run
from tests.doctor.test_healthy import columns


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A book with loops in its second half, on disk, with evaluation records in it."""
    run = Run(0, steps=8)
    run.loop = (run.step >= 4) & (run.dice.random(run.n) < 0.3)
    run.reward[run.loop] = 0.0
    path = tmp_path_factory.mktemp("books") / "loops"
    book = run.write(path)
    beside = Run(1, steps=2, runs=2)
    beside.task += 100
    beside.evaluation = True
    beside.loop[:] = True
    for step in range(2):
        of_step = np.flatnonzero(beside.step == step)
        book.append(beside.records(of_step, np.zeros(beside.n)), evaluation=True)
    book.close()
    return str(path)


def test_every_kind_of_source(loops: str) -> None:
    source = open_source(loops)
    with Index() as index:
        load(source, index)
        diagnoses = [examine(loops), examine(Path(loops)), examine(source), examine(source.book), examine(index)]  # type: ignore[attr-defined]
    assert all(diagnosis.findings == diagnoses[0].findings for diagnosis in diagnoses)
    assert [finding.check for finding in diagnoses[0].findings] == ["repetition-loops"]
    assert diagnoses[0].source == "loops"
    source.record(diagnoses[0].findings[0].uids[0])  # It is still open.
    source.close()


def test_what_is_no_source() -> None:
    with pytest.raises(ValueError, match="source: got int, expected a path"):
        examine(7)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        examine("no/such/run")


def test_some_steps(loops: str) -> None:
    assert examine(loops, steps="0-3").healthy
    late = examine(loops, steps=(4, None))
    assert [finding.check for finding in late.findings] == ["repetition-loops"]
    assert late.steps == (4, 7)
    assert examine(loops, steps=5).steps == (5, 5)


def test_evaluation_is_apart(loops: str) -> None:
    (finding,) = examine(loops).findings
    assert finding.filter.endswith("and not evaluation")
    (beside,) = examine(loops, evaluation=True).findings
    assert beside.check == "repetition-loops"
    assert not set(beside.uids) & set(finding.uids)


@pytest.mark.parametrize("bad", ["", "-", "x", "1-2-3", 1.5, True, (1,), ("1", 2), [1, 2]])
def test_steps_that_are_none(bad: Any) -> None:
    with pytest.raises(ValueError, match="steps: got"):
        parse_steps(bad)


def test_negative_steps() -> None:
    assert parse_steps("-5") == (None, 5)
    assert parse_steps("3..9") == (3, 9)
    assert parse_steps((-4, -2)) == (-4, -2)


def test_torch_is_not_imported(loops: str) -> None:
    script = (
        "import json, sys\n"
        "from rollbook.inspect.doctor import examine, format_report\n"
        "found = examine(sys.argv[1])\n"
        "format_report(found)\n"
        "print(json.dumps([len(found.findings), 'torch' in sys.modules]))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script, loops], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(finished.stdout) == [1, False]


# --- worth a look ---------------------------------------------------------------------------------------------------


def queue(run: Run) -> list[tuple[str, str]]:
    with Index() as index:
        load(open_source(run.write()), index)
        return [(entry.check, entry.severity) for entry in triage(index)]


def test_the_queue_has_findings_first() -> None:
    run = Run(0)
    PLANTS["stale-data"][0](run, 7.0)
    run.loop[[40, 90]] = True
    entries = queue(run)
    assert entries[0] == ("stale-data", "high")
    assert ("repetition-loops", "low") in entries
    assert all(severity == "low" for _, severity in entries[1:])


def test_the_queue_calls_nothing_ill_that_is_not() -> None:
    """Its thresholds are lower than the doctor's: a sentence with those would be wrong."""
    run = Run(0)
    PLANTS["stale-data"][0](run, 7.0)
    run.loop[[40, 90]] = True
    with Index() as index:
        load(open_source(run.write()), index)
        details = {entry.check: entry.detail for entry in triage(index)}
    assert "Triggered above" in details["stale-data"] and "Not triggered yet" not in details["stale-data"]
    assert "Triggered" not in details["repetition-loops"] and details["repetition-loops"].endswith(
        " Not triggered yet."
    )


def test_the_queue_has_what_is_no_illness_yet() -> None:
    run = Run(0)
    run.truncated[50] = True
    run.reward[50] = 1.0
    run.truncated[60:68] = True
    run.reward[60:68] = 0.0
    entries = queue(run)
    assert ("truncation-rewarded", "low") in entries
    assert all(severity == "low" for _, severity in entries)


def test_the_queue_does_not_repeat_what_was_explained() -> None:
    run = Run(0)
    run.reward[:] = 1.0
    checks = [check for check, _ in queue(run)]
    assert checks[0] == "reward-saturation"
    assert "zero-variance" not in checks


# --- what a saver chose ---------------------------------------------------------------------------------------------


def test_records_that_a_saver_chose_do_not_count_for_shares() -> None:
    run = Run(0)
    table = columns(run)
    chosen = run.run == 0
    table["repetition"] = np.where(chosen, 0.9, 0.0)
    assert [finding.check for finding in diagnose(Samples(table), Thresholds()).findings] == ["repetition-loops"]
    table["kept"] = ["worst, longest" if is_chosen else "random" for is_chosen in chosen]
    diagnosis = diagnose(Samples(table), Thresholds())
    assert diagnosis.healthy
    assert diagnosis.excluded == int(chosen.sum())
    assert diagnosis.records == run.n - diagnosis.excluded
    assert {check_result.check: check_result.status for check_result in diagnosis.checks}[
        "groups-incomplete"
    ] == "skipped"


def test_a_nan_counts_wherever_it_is() -> None:
    run = Run(0)
    table = columns(run)
    table["kept"] = ["worst"] * run.n
    table["nans"] = np.where(np.arange(run.n) == 5, 3, 0)
    (finding,) = diagnose(Samples(table), Thresholds()).findings
    assert (finding.check, finding.count) == ("nans", 1)


def test_a_hundred_thousand_records() -> None:
    """Every pair of them would be five billion; memory and time must not follow that."""
    run = Run(0, steps=100, groups=64, runs=16)
    table = columns(run)
    diagnosis = diagnose(Samples(table), Thresholds())
    assert diagnosis.healthy
    assert diagnosis.records == 102_400
