"""Answers: the story's run and small runs by hand, pages that stay put while records come, and JSON that is strict."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.book import Book
from rollbook.inspect.answers import MAX_SNAPSHOTS, Answers
from rollbook.inspect.index import ANSWER_COLUMNS, Index
from rollbook.inspect.sources import BookSource, load, open_source
from tests.viewer import story


def sample(step: int, task: int, run: int, **fields: Any) -> Experience:
    """Two tokens asked (by task), three said."""
    columns: dict[str, Any] = {"reward": float(run), "group_size": 2, "policy_versions": step} | fields
    tokens = columns.pop("tokens", [1, task, 10 + run, 11, 12])
    return Experience(eid=EID(batch=step, task=task, run=run, suffix="s"), tokens=tokens, prompt_length=2, **columns)


class Run:
    """A book that is written and looked at."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.source, self.index = BookSource(book), Index()
        self.answers = Answers(self.source, self.index)
        self.look()

    def look(self) -> None:
        """Bring the index up to date."""
        load(self.source, self.index)

    def close(self) -> None:
        """End everything."""
        self.answers.close()
        self.index.close()
        self.source.close()


@pytest.fixture
def run() -> Iterator[Run]:
    book = rollbook.open("memory:")
    for step in (1, 2, 3):
        for task in (5, 6):
            book.append([sample(step, task, run, entropy=[1.0, 2.0, float(step)]) for run in (0, 1)])
    opened = Run(book)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def story_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    path = story.make(tmp_path_factory.mktemp("story") / "run", steps=12)
    source, index = open_source(path), Index()
    load(source, index)
    answers = Answers(source, index)
    yield answers
    answers.close()
    index.close()
    source.close()


def strict(value: Any) -> Any:
    """The value, once strict JSON has said it and given it back."""
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    return value


def test_the_run_as_a_whole(story_answers: Answers) -> None:
    summary = strict(story_answers.run())
    assert (summary["name"], summary["kind"], summary["live"], summary["tokenized"]) == ("run", "book", True, "exact")
    assert (summary["records"], summary["evaluation"], summary["groups"]) == (12 * 48 + 12, 12, 12 * 6 + 12)
    assert summary["steps"] == {"first": 0, "last": 11, "count": 12}
    assert summary["parts"] == ["accuracy", "format", "length"]
    assert summary["progress"] == {"measured": 588, "total": 588, "searchable": 0}
    assert summary["features"]["ledger"] and summary["features"]["sql"] and summary["features"]["search"]
    lenses = {lens["id"]: lens for lens in summary["lenses"]}
    recorded = ["entropy", "logprob", "mismatch", "ratio", "kl", "advantage", "credit", "version"]
    assert list(lenses) == recorded  # no critic, no reward by token
    assert lenses["entropy"]["scale"]["low"] == 0 < lenses["entropy"]["scale"]["high"] < 8
    assert lenses["logprob"]["scale"]["low"] < lenses["logprob"]["scale"]["high"] <= 0
    assert lenses["mismatch"]["scale"]["low"] == -lenses["mismatch"]["scale"]["high"]
    assert lenses["ratio"]["scale"]["low"] * lenses["ratio"]["scale"]["high"] == pytest.approx(1, abs=1e-3)
    assert (lenses["version"]["scale"]["low"], lenses["version"]["scale"]["high"]) == (0, 11)
    assert all(
        name in {column["name"] for column in summary["columns"]} for name in ("reward", "part.accuracy", "loop")
    )


def test_every_answer_about_the_story_is_strict_json(story_answers: Answers) -> None:
    steps = strict(story_answers.steps())["steps"]
    assert [step["step"] for step in steps] == list(range(12))
    nan = next(step for step in steps if step["nans"])
    assert nan["step"] == 9  # the story has one reward that is NaN
    assert [step["step"] for step in strict(story_answers.steps(evaluation=True))["steps"]] == [0, 8]
    step = strict(story_answers.step(7))
    assert (step["previous"], step["next"], step["before"]["step"]) == (6, 8, 6)
    assert sum(step["histograms"]["reward"]["counts"]) == 48
    assert len(step["scatter"]) == 48 and all(str(point[3]) in step["uids"] for point in step["scatter"])
    assert 0 <= step["versus"]["reward"]["ks"] <= 1
    assert step["versus"]["reward"]["shift"] == pytest.approx(
        step["summary"]["reward"]["mean"] - step["before"]["reward"]["mean"]
    )
    rows = strict(story_answers.list("samples", step=7, limit=100))["rows"]
    assert len(rows) == 48 and set(rows[0]) == set(ANSWER_COLUMNS)
    strict(story_answers.list("groups"))
    group = strict(story_answers.group(rows[0]["gid"]))
    strict(story_answers.neighbors(rows[0]["uid"]))
    strict(story_answers.prompt(group["prompt"]))
    strict(story_answers.search("let me"))
    items = strict(story_answers.findings())["items"]
    assert items and {"id", "severity", "title", "detail", "recommendation", "steps", "uids", "count", "filter"} <= set(
        items[0]
    )
    for item in items:
        assert story_answers.list(filter=item["filter"])["total"] > 0  # the filter opens what it speaks of
    strict(story_answers.compare((1, 2), (9, 10)))


def test_the_story_s_oddities_are_found(story_answers: Answers) -> None:
    def uids(text: str) -> list[str]:
        return [row["uid"] for row in story_answers.list(filter=text, limit=1000)["rows"]]

    assert uids("nan and reward is null") == [
        row["uid"] for row in story_answers.list(filter="scored = no", limit=9)["rows"]
    ]
    loops = story_answers.list(filter="loop", limit=1000)["rows"]
    assert loops and all(row["loop_at"] is not None and "wait wait wait" in row["closing"] for row in loops)
    assert {row["status"] for row in loops} == {"truncated"}
    tools = story_answers.list(filter="tool and masked", limit=1000)["rows"]
    assert tools and all((row["turns"], row["tool_calls"]) == (2, 1) for row in tools)
    seen = story_answers.list(filter="image", limit=1000)["rows"]
    assert {int(row["task"]) % 9 for row in seen} == {4}
    assert all(row["opening"].startswith(tuple(story.NAMES)) for row in seen)
    assert story_answers.list("groups", filter="evaluation")["total"] == 12


def test_steps_are_told_when_they_change(run: Run) -> None:
    first = run.answers.steps()
    assert [step["step"] for step in first["steps"]] == [1, 2, 3]
    assert run.answers.steps(first["cursor"])["steps"] == []
    run.book.revise("2/5/0/0/s", reward=0.5, author="ana")
    run.look()
    later = run.answers.steps(first["cursor"])
    assert [step["step"] for step in later["steps"]] == [2]
    assert run.answers.change(first["cursor"]) == {
        "cursor": later["cursor"],
        "records": 12,
        "measured": 12,
        "steps": [2],
    }
    # A state that changed is in no summary, and pages that show it are told all the same.
    run.book.drop(["1/6/0/0/s"])
    run.look()
    assert run.answers.change(later["cursor"])["steps"] == [1]


def test_a_step_without_samples_is_empty_not_an_error(run: Run) -> None:
    empty = strict(run.answers.step(2**40))
    assert (empty["summary"]["n"], empty["previous"], empty["next"], empty["scatter"]) == (0, 3, None, [])
    assert empty["histograms"]["reward"] == {"edges": [], "counts": []}
    with pytest.raises(ValueError, match="step"):
        run.answers.step(-1)


def test_lists_by_step_group_prompt_filter_and_order(run: Run) -> None:
    ask = run.answers.list

    def uids(**query: Any) -> list[str]:
        return [row["uid"] for row in ask(**query)["rows"]]

    assert uids(step=2) == ["2/5/0/0/s", "2/5/1/0/s", "2/6/0/0/s", "2/6/1/0/s"]
    assert uids(gid="3/6", sort="-reward") == ["3/6/1/0/s", "3/6/0/0/s"]
    (prompt,) = {row["prompt"] for row in ask(gid="1/5")["rows"]}
    assert uids(prompt=prompt, filter="r=1", sort="step") == ["1/5/1/0/s", "2/5/1/0/s", "3/5/1/0/s"]
    assert uids(filter="h > 1.9", sort="-step,task,run") == ["3/5/0/0/s", "3/5/1/0/s", "3/6/0/0/s", "3/6/1/0/s"]
    assert ask(filter="r=1", limit=2)["total"] == 6
    groups = ask("groups", step=2)["rows"]
    assert [row["gid"] for row in groups] == ["2/5", "2/6"]
    assert groups[0]["rewards"] == [1.0, 0.0] and groups[0]["uids"] == ["2/5/1/0/s", "2/5/0/0/s"]
    assert (groups[0]["n"], groups[0]["expected"], groups[0]["mean"], groups[0]["std"]) == (2, 2, 0.5, 0.5)
    assert groups[0]["flags"] == ["some-solved"]
    assert [row["gid"] for row in ask("groups", sort="-entropy,gid", limit=2)["rows"]] == ["3/5", "3/6"]
    for query, message in (
        ({"view": "rows"}, "view: got 'rows'"),
        ({"limit": 0}, "limit: got 0"),
        ({"offset": -1}, "offset: got -1"),
        ({"filter": "rewrd > 1"}, "did you mean 'reward'"),
        ({"sort": "rewrd"}, "did you mean 'reward'"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(**query)


def test_pages_of_a_snapshot_hold_each_row_once_while_records_come_in(run: Run) -> None:
    first = run.answers.list(sort="-reward,step", limit=5)
    seen = [row["uid"] for row in first["rows"]]
    assert (first["total"], first["offset"]) == (12, 0)
    for task in range(20, 24):  # these would stand before all others
        run.book.append([sample(0, task, 9, reward=9.0)])
        run.look()
        page = run.answers.list(sort="-reward,step", offset=len(seen), limit=2, snapshot=first["snapshot"])
        assert (page["snapshot"], page["total"]) == (first["snapshot"], 12)
        seen += [row["uid"] for row in page["rows"]]
    assert len(seen) == 12
    assert len(set(seen)) == len(seen)
    again = run.answers.list(sort="-reward,step", limit=5)
    assert again["total"] == 16 and again["rows"][0]["reward"] == 9.0
    # Rows are of now, their order of then.
    run.book.revise("1/5/1/0/s", reward=-5.0, author="ana")
    run.look()
    assert run.answers.list(snapshot=first["snapshot"], limit=1)["rows"][0]["reward"] == -5.0


def test_old_snapshots_are_made_anew(run: Run) -> None:
    first = run.answers.list(limit=1)["snapshot"]
    for _ in range(MAX_SNAPSHOTS):
        run.answers.list(limit=1)
    page = run.answers.list(limit=3, offset=3, snapshot=first)
    assert page["snapshot"] != first
    assert len(page["rows"]) == 3
    assert run.answers.list("groups", snapshot=page["snapshot"])["total"] == 6  # of another view: not that one


def test_a_group_and_its_neighbors(run: Run) -> None:
    run.book.append([sample(2, 7, 0, info={"label": "a", "reference": [4]}, tokens=[1, 5, 9])])
    run.look()
    group = run.answers.group("2/6")
    assert (group["previous"], group["next"], group["step"], group["task"]) == ("2/5", "2/7", 2, "6")
    assert [row["uid"] for row in group["rows"]] == ["2/6/1/0/s", "2/6/0/0/s"]
    assert [(entry["step"], entry["gid"]) for entry in group["timeline"]] == [(1, "1/6"), (2, "2/6"), (3, "3/6")]
    assert (group["label"], group["reference"], group["evaluation"]) == (None, None, False)
    last = run.answers.group("2/7")
    assert (last["label"], last["reference"], last["next"]) == ("a", [4], None)
    assert "incomplete" in last["flags"]
    assert [entry["gid"] for entry in last["timeline"]] == ["1/5", "2/5", "2/7", "3/5"]  # its prompt is task 5's
    beside = run.answers.neighbors("2/6/0/0/s")
    assert (beside["previous"], beside["next"]) == (None, "2/6/1/0/s")
    assert (beside["previous_group"], beside["next_group"]) == ("2/5/0/0/s", "2/7/0/0/s")
    assert (beside["same_prompt"], beside["row"]["uid"]) == ([1, 2, 3], "2/6/0/0/s")
    with pytest.raises(KeyError, match="9/9"):
        run.answers.group("9/9")
    with pytest.raises(KeyError, match="nobody"):
        run.answers.neighbors("nobody")


def test_a_prompt_over_time(run: Run) -> None:
    key = run.answers.group("1/5")["prompt"]
    shown = run.answers.prompt(key)
    assert [(row["step"], row["reward"]) for row in shown["rows"]] == [(s, r) for s in (1, 2, 3) for r in (0.0, 1.0)]
    assert set(shown["rows"][0]) >= {"step", "gid", "uid", "reward", "length", "status", "version_max"}
    with pytest.raises(KeyError, match="0000"):
        run.answers.prompt("0000000000000000")


def test_deleted_records_leave_every_answer_and_infinities_are_null(run: Run) -> None:
    run.book.append([sample(4, 5, 0, reward=math.inf), sample(4, 5, 1, reward=1.0)])
    run.book.delete(["1/5/0/0/s", "1/5/1/0/s"], author="ana")
    run.look()
    strict(run.answers.steps())
    assert [row["reward"] for row in strict(run.answers.list(step=4))["rows"]] == [None, 1.0]
    assert strict(run.answers.list("groups", step=4))["rows"][0]["rewards"] == [None, 1.0]
    with pytest.raises(KeyError):
        run.answers.group("1/5")
    assert run.answers.list(step=1)["total"] == 2
    assert run.answers.run()["records"] == 12
    assert run.answers.neighbors("1/5/0/0/s")["row"]["removed_reason"] == "deleted"  # a kept link says why


def test_a_run_that_is_empty_has_answers(tmp_path: Path) -> None:
    opened = Run(rollbook.open(tmp_path / "book"))
    summary = strict(opened.answers.run())
    assert (summary["records"], summary["steps"]["count"], summary["lenses"], summary["rewards"]) == (0, 0, [], None)
    assert strict(opened.answers.steps())["steps"] == []
    assert strict(opened.answers.list())["total"] == 0
    assert strict(opened.answers.findings()) == {"items": []}
    assert opened.answers.search("x")["rows"] == []
    opened.close()


def test_a_step_with_many_samples_is_drawn_in_part() -> None:
    with Index() as index:
        index.put(
            {"n": n, "uid": str(n), "gid": "g", "step": 1, "reward": n % 2, "response_tokens": n} for n in range(5000)
        )
        source: Any = type("Files", (), {"name": "x", "kind": "verl", "live": False})()
        shown = Answers(source, index).step(1)
        assert len(shown["scatter"]) == len(shown["uids"]) == 2000
        assert shown == Answers(source, index).step(1)  # the same part each time
        assert np.sum(shown["histograms"]["reward"]["counts"]) == 5000


def test_only_what_the_reward_is_made_of_counts_as_its_parts() -> None:
    dice = random.Random(0)

    def describe(declared: list[str] | None) -> dict[str, Any]:
        book = rollbook.open("memory:")
        rows = []
        for i in range(64):
            numbers = {"right": float(i % 2), "form": dice.random(), "tool_errors": float(dice.randrange(9))}
            rows.append(
                Experience(
                    eid=EID(batch=0, task=i // 4, run=i % 4),
                    tokens=[1, 2, i],
                    reward=0.9 * numbers["right"] + 0.1 * numbers["form"],
                    metrics=numbers,
                    info={} if declared is None else {"reward_parts": declared},
                )
            )
        book.append(rows)
        source, index = open_source(book), Index()
        load(source, index)
        answers = Answers(source, index)
        answer = {**answers.run(), "compared": answers.compare((0, 0), (0, 0))}
        assert answers.list(filter="metric.tool_errors > 4")["total"] > 0
        answers.close()
        index.close()
        return answer

    fitted = describe(None)
    assert (sorted(fitted["parts"]), fitted["metrics"]) == (["form", "right"], ["tool_errors"])
    assert (list(fitted["compared"]["parts"]), list(fitted["compared"]["logged"])) == (
        ["form", "right"],
        ["tool_errors"],
    )
    assert {"part.right", "metric.tool_errors"} < {column["name"] for column in fitted["columns"]}
    described = describe(["right"])
    assert (described["parts"], described["metrics"]) == (["right"], ["form", "tool_errors"])


def test_filters_look_in_whole_prompts_and_responses(story_answers: Answers) -> None:
    every = story_answers.list(limit=10_000, filter="not removed")["rows"]
    texts = {
        trajectory.uid: trajectory for trajectory in story_answers.source.trajectories([row["uid"] for row in every])
    }
    for filter, condition in (
        ("prompt ~ 'IVO buys'", lambda trajectory: "Ivo buys" in trajectory.text[: trajectory.prompt_end]),
        (
            "response ~ check and length > 60",
            lambda trajectory: "check" in response_of(trajectory) and trajectory.tokens - trajectory.prompt_tokens > 60,
        ),
        ("response !~ check", lambda trajectory: "check" not in response_of(trajectory)),
    ):
        expected = {uid for uid, trajectory in texts.items() if condition(trajectory)}
        assert 0 < len(expected) < len(texts)
        assert {
            row["uid"] for row in story_answers.list(limit=10_000, filter=f"not removed and {filter}")["rows"]
        } == expected
    prompt = every[0]["prompt"]
    assert {row["prompt"] for row in story_answers.list(filter=f"prompt = {prompt}")["rows"]} == {prompt}


def response_of(trajectory: Any) -> str:
    return str(trajectory.response_text or trajectory.text[trajectory.prompt_end :]).casefold()
