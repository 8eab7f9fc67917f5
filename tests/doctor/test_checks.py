"""Each check alone: a book in which it was planted has it and no other, and a smaller dose has none."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.inspect import filters
from rollbook.inspect.doctor import CHECKS, Diagnosis, Thresholds, examine
from rollbook.inspect.index import Index
from rollbook.inspect.sources import load, open_source
from tests.doctor.books import PLANTS, Run

# A filter cannot say these exactly: it opens more than the affected ones (ranks within a step, orders within a group).
WIDER = {"keep-rate-bias", "reward-follows-length", "component-dominates"}


def plant(check: str, dose: float, seed: int, **others: object) -> Run:
    function, _, _, needs = PLANTS[check]
    run = Run(seed, **{**needs, **others})
    function(run, dose)
    return run


def names(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.findings}


def test_every_illness_has_a_plant() -> None:
    assert set(PLANTS) == set(CHECKS) - {"evaluation-falls"}


@pytest.mark.parametrize("check", list(PLANTS))
def test_it_is_found_and_nothing_else(check: str) -> None:
    run = plant(check, PLANTS[check][1], list(PLANTS).index(check))
    with Index() as index:
        load(open_source(run.write()), index)
        diagnosis = examine(index)
        assert names(diagnosis) == {check}
        (finding,) = diagnosis.findings
        planted = {run.uid(i) for i in np.flatnonzero(run.planted)}
        assert 0 < len(finding.uids) <= 24
        assert len(set(finding.uids)) == len(finding.uids)
        assert set(finding.uids) <= planted
        condition = filters.parse(finding.filter, list(run.parts))
        opened = {uid for (uid,) in index.query(f"SELECT uid FROM samples WHERE {condition.sql}", condition.values)}
    assert set(finding.uids) <= opened
    if check not in WIDER:
        assert len(opened) == finding.count
    first, last = finding.steps
    steps = {int(uid.split("/")[0]) for uid in finding.uids}
    assert first <= min(steps)
    assert max(steps) <= last
    assert finding.severity in ("high", "medium")
    assert {check_result.check: check_result.status for check_result in diagnosis.checks}[check] == "triggered"


@pytest.mark.parametrize("check", list(PLANTS))
def test_a_small_dose_is_no_illness(check: str) -> None:
    diagnosis = examine(plant(check, PLANTS[check][2], 2).write())
    assert diagnosis.healthy, [finding.title for finding in diagnosis.findings]
    assert {check_result.check: check_result.status for check_result in diagnosis.checks}[check] == "passed"


@pytest.mark.parametrize(
    ("check", "thresholds"),
    [
        ("zero-variance", "zero_variance=0.98"),
        ("stale-data", {"stale_lag": 9}),
        ("train-inference-mismatch", "mismatch=0.5"),
        ("repetition-loops", "loops=0.5"),
        ("length-explosion", Thresholds(length_growth=9.0)),
        ("kl-blowup", "kl=9,kl_growth=1e9"),
    ],
)
def test_thresholds_decide(check: str, thresholds: object) -> None:
    book = plant(check, PLANTS[check][1], 0).write()
    assert names(examine(book)) == {check}
    assert examine(book, thresholds=thresholds).healthy  # type: ignore[arg-type]


def test_what_is_said_twice_is_the_same() -> None:
    book = plant("truncation-rewarded", 0.9, 3).write()
    first, second = examine(book), examine(book)
    assert first == second
    assert json.loads(json.dumps(first.as_dict(), allow_nan=False)) == first.as_dict()


# --- causes that one check can have ----------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "word"), [(1.0, "harder"), (0.0, "easier")])
def test_zero_variance_tells_solved_from_unsolved(value: float, word: str) -> None:
    run = Run(0, steps=16)
    flat = run.group % 10 < 8
    run.truncated[:] = False
    run.reward[flat] = value
    run.reward[~flat] = (run.run[~flat] % 2).astype(float)
    (finding,) = examine(run.write()).findings
    assert finding.check == "zero-variance"
    assert word in finding.recommendation


def test_zero_variance_that_was_filtered_costs_only_generation() -> None:
    run = plant("zero-variance", 0.9, 0)
    run.dropped = run.planted.copy()
    (finding,) = examine(run.write()).findings
    assert (finding.check, finding.severity) == ("zero-variance", "low")


def test_a_policy_that_is_sure_because_it_is_right_is_hardly_ill() -> None:
    run = plant("entropy-collapse", PLANTS["entropy-collapse"][1], 0)
    solved = (run.dice.random(run.n) < 0.2 + 0.72 * run.time).astype(float)
    (collapse,) = examine(run.write()).findings
    assert (collapse.check, collapse.severity) == (
        "entropy-collapse",
        "high",
    ) and "clip-higher" in collapse.recommendation
    run.truncated[:] = False
    run.reward = solved
    (sure,) = [finding for finding in examine(run.write()).findings if finding.check == "entropy-collapse"]
    assert (
        sure.severity == "low"
        and "as the prompts were solved" in sure.title
        and "harder prompts" in sure.recommendation
    )
    run.reward = solved[::-1].copy()  # as good, but before: the entropy did not fall for that
    (after,) = [finding for finding in examine(run.write()).findings if finding.check == "entropy-collapse"]
    assert after.severity == "high"


def test_pairs_are_flat_by_chance() -> None:
    run = Run(0, steps=20, groups=16, runs=2)
    run.truncated[:] = False
    run.reward = (run.dice.random(run.n) < 0.5).astype(float)
    assert examine(run.write()).healthy


@pytest.mark.parametrize(
    ("value", "check"), [(1.0, "reward-saturation"), (0.0, "reward-collapse"), (-1.0, "reward-collapse")]
)
def test_one_reward_everywhere(value: float, check: str) -> None:
    run = Run(0)
    run.reward[:] = value
    diagnosis = examine(run.write())
    assert names(diagnosis) == {check}
    by_check = {check_result.check: check_result for check_result in diagnosis.checks}
    assert by_check["zero-variance"].status == "explained"
    assert check in by_check["zero-variance"].reason


def test_one_step_alone_can_differ_between_engine_and_trainer() -> None:
    run = Run(0)
    run.mismatch[run.step == 5] = 0.4
    (finding,) = examine(run.write()).findings
    assert (finding.check, finding.steps) == ("train-inference-mismatch", (5, 5))


def test_old_samples_may_differ() -> None:
    run = Run(0)
    old = run.dice.random(run.n) < 0.3
    run.staleness[old] = 3
    run.mismatch[old] = 0.3
    assert examine(run.write()).healthy


def test_length_that_pays_is_no_explosion() -> None:
    run = plant("length-explosion", 4.0, 0)
    run.reward = (run.dice.random(run.n) < 0.2 + 0.5 * run.time).astype(float)
    diagnosis = examine(run.write())
    assert diagnosis.healthy
    assert (
        "rose with it"
        in {check_result.check: check_result.reason for check_result in diagnosis.checks}["length-explosion"]
    )


def test_loops_explain_length() -> None:
    run = Run(0)
    run.reward = (run.dice.random(run.n) < 0.5).astype(float)
    run.truncated[:] = False
    late = (run.time > 0.5) & (run.dice.random(run.n) < 0.5)
    run.loop = late.copy()
    run.lengths[late] = 300
    run.reward[late] = run.dice.random(int(late.sum())) < 0.5
    diagnosis = examine(run.write())
    assert names(diagnosis) == {"repetition-loops"}
    assert {check_result.check: check_result.status for check_result in diagnosis.checks}[
        "length-explosion"
    ] == "explained"


def test_copies_of_right_answers_have_low_severity() -> None:
    run = Run(0)
    for i in np.flatnonzero(run.run > 0):
        run.copies[int(i)] = int(i) - int(run.run[i])
    for name in ("lengths", "truncated"):
        getattr(run, name)[:] = getattr(run, name)[run.group * run.runs]
    run.truncated[:] = False
    run.reward = (run.group % 10 > 0).astype(float)
    (copies,) = [finding for finding in examine(run.write()).findings if finding.check == "duplicates"]
    assert copies.severity == "low" and copies.title == "75% of responses are duplicates, most of them correct"
    run.reward = 1 - run.reward
    (copies,) = [finding for finding in examine(run.write()).findings if finding.check == "duplicates"]
    assert copies.severity == "high" and "raise the temperature" in copies.recommendation


def test_a_tiny_length_penalty_does_not_make_the_reward_follow_length() -> None:
    """Most groups are all right or all wrong, so that a penalty of 0.002 decides most pairs."""
    run = Run(0, steps=20, groups=16)
    run.truncated[:] = False
    flat = run.dice.random(int(run.group.max()) + 1) < 0.8
    run.reward = np.where(flat[run.group], run.group % 2, run.dice.random(run.n) < 0.5) - 1e-4 * run.lengths
    assert names(examine(run.write())) <= {"zero-variance"}
    run.reward = -1e-4 * run.lengths  # nothing else
    assert "reward-follows-length" in names(examine(run.write()))


def test_zero_variance_is_advised_on_for_each_kind_of_group() -> None:
    run = plant("zero-variance", 0.9, 0)
    (both,) = examine(run.write()).findings
    assert "Solved groups" in both.recommendation and "Unsolved groups" in both.recommendation


@pytest.mark.parametrize(("first", "last", "falls"), [(0.5, 0.2, True), (0.5, 0.48, False), (0.2, 0.5, False)])
def test_a_fall_of_the_held_out_reward_is_found(first: float, last: float, falls: bool) -> None:
    book = Run(0).write()
    dice = np.random.default_rng(0)
    for step, share in ((0, first), (12, last)):
        rewards = (dice.permutation(200) < 200 * share).astype(float)
        rows = [
            Experience(eid=EID(f"eval-{step}", i), tokens=[i, 1, 2, 3], prompt_length=2, reward=rewards[i])
            for i in range(200)
        ]
        book.append(rows, evaluation=True)
    diagnosis = examine(book)
    assert names(diagnosis) == ({"evaluation-falls"} if falls else set())
    if falls:
        (finding,) = diagnosis.findings
        assert finding.title == "The held-out reward dropped from 0.5 to 0.2" and finding.severity == "high"
        assert finding.steps == (0, 12) and all(uid.startswith("eval-12/") for uid in finding.uids)
    assert {check_result.check: check_result.status for check_result in diagnosis.checks}["evaluation-falls"] in (
        "triggered",
        "passed",
    )


def test_tool_output_is_not_the_models_own_loop() -> None:
    """An agent that reads a file three times does not repeat itself."""
    file = list(range(100, 160))
    rows = []
    for i in range(64):
        tokens = [1, 2, *([3 + i, 500 + i, *file] * 3), 9]
        mask = [True, *([True, True, *[False] * 60] * 3), True]
        rows.append(Experience(eid=EID(str(i // 16), i // 4, i % 4), tokens=tokens, prompt_length=1, action_mask=mask))
    with rollbook.open("memory:") as book:
        book.append(rows)
        diagnosis = examine(book)
    assert not {"repetition-loops", "duplicates"} & names(diagnosis)


def test_rewards_that_could_not_be_scored() -> None:
    run = Run(0)
    lost = run.dice.random(run.n) < 0.1
    run.reward[lost] = np.nan
    (finding,) = examine(run.write()).findings
    assert (finding.check, finding.severity, finding.count) == ("nans", "medium", int(lost.sum()))
    run = Run(0)
    run.reward[7] = np.nan
    assert examine(run.write()).healthy


def test_a_shorter_answer_can_be_what_pays() -> None:
    run = plant("reward-follows-length", 1.0, 0)
    run.reward = -run.reward
    (finding,) = examine(run.write()).findings
    assert finding.check == "reward-follows-length"
    assert "shorter" in finding.title


def test_failed_runs_complete_their_groups() -> None:
    run = plant("groups-incomplete", 0.4, 0)
    run.failed, run.missing = run.missing, np.zeros(run.n, bool)
    assert examine(run.write()).healthy


def test_the_newest_groups_may_lack_runs() -> None:
    run = Run(0)
    run.missing = (run.step >= 10) & (run.run == 0)
    assert examine(run.write()).healthy


def test_tokens_centred_is_centered() -> None:
    run = Run(0)
    long = run.lengths > np.median(run.lengths)
    # Long samples are pushed down and short ones up, so that the mean over tokens is 0.
    run.advantages = (
        np.where(long, -0.5, 0.5 * run.lengths[long].sum() / run.lengths[~long].sum()) + 0.3 * run.centered()
    )
    assert examine(run.write()).healthy


def test_versions_may_count_optimizer_steps() -> None:
    run = Run(0)
    run.staleness = run.dice.integers(0, 2, run.n) * 8
    book = run.write()
    assert names(examine(book)) == {"stale-data"}
    run = Run(0)
    run.stride = 8
    run.staleness = run.dice.integers(0, 2, run.n) * 8
    assert examine(run.write()).healthy


def test_two_illnesses_are_two_findings() -> None:
    run = Run(0)
    for check in ("nans", "stale-data", "groups-incomplete"):
        PLANTS[check][0](run, PLANTS[check][1])
    diagnosis = examine(run.write())
    assert names(diagnosis) == {"nans", "stale-data", "groups-incomplete"}
    ranks = [("high", "medium", "low").index(finding.severity) for finding in diagnosis.findings]
    assert ranks == sorted(ranks)
