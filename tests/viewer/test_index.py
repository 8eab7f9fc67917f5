"""The index: rows, groups and steps summed up by hand, readers beside a writer, and a file that does not stay."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.inspect.index import ANSWER_COLUMNS, COLUMNS, Index
from rollbook.inspect.measures import summarize
from rollbook.inspect.trajectory import Trajectory


def row(n: int, **columns: Any) -> dict[str, Any]:
    """A row of group 1/7, run n, unless it says otherwise."""
    return {"n": n, "uid": f"1/7/{n}/0/s", "gid": "1/7", "step": 1, "run": n, **columns}


def rewarded(n: int, reward: float, **columns: Any) -> dict[str, Any]:
    """A row with a reward."""
    return row(n, reward=reward, scored=1, **columns)


def summary(index: Index, step: int = 1) -> dict[str, Any]:
    """A step's summary as it is kept."""
    summed: dict[str, Any] = json.loads(index.query("SELECT summary FROM steps WHERE step = ?", (step,))[0][0])
    return summed


def test_a_step_is_summed_up() -> None:
    with Index() as index:
        index.put(
            [
                rewarded(1, 1.0, response_tokens=20, trained_tokens=20, digest=5, status="finished", version_min=3),
                rewarded(2, 0.0, response_tokens=20, trained_tokens=5, digest=5, status="truncated", repetition=0.8),
                row(3, response_tokens=30, trained_tokens=30, digest=9, scored=2, nans=1, staleness=2, version_max=4),
                row(4, response_tokens=0, digest=None, status="error", removed_reason="failed", length=0),
            ]
        )
        index.put({"n": n, "parts": json.dumps(parts)} for n, parts in ((1, {"a": 1.0, "b": 2.0}), (2, {"a": 0.0})))
        assert index.update_summaries() == {1}
        summed = summary(index)
        assert (summed["n"], summed["groups"]) == (4, 1)
        assert summed["reward"] == {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "mean": 0.5}
        assert summed["length"]["p50"] == 20  # the run that failed has no length
        shares = ("truncated", "duplicates", "stale", "loops", "errors", "nans")
        assert [summed[name] for name in shares] == [0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
        assert summed["masked"] == pytest.approx(1 - 55 / 70)
        assert summed["parts"] == {"a": 0.5, "b": 2.0}
        assert summed["versions"] == [3, 4]
        assert (summed["entropy"], summed["kl"], summed["zero_variance"]) == (None, None, 0)


def test_zero_variance_needs_two_that_are_all_scored_alike() -> None:
    with Index() as index:
        index.put([rewarded(1, 1.0, gid="a"), rewarded(2, 1.0, gid="a")])
        index.put([rewarded(3, 1.0, gid="b")])
        index.put([rewarded(4, 1.0, gid="c"), row(5, gid="c")])
        index.put([rewarded(6, 1.0, gid="d"), rewarded(7, 0.5, gid="d")])
        index.update_summaries()
        assert index.query("SELECT gid, zero_variance FROM groups ORDER BY gid") == [
            ("a", 1),
            ("b", 0),
            ("c", 0),
            ("d", 0),
        ]
        assert summary(index)["zero_variance"] == 0.25


def test_a_group_is_incomplete_once_there_is_a_newer_step_and_counts_runs_not_parts() -> None:
    with Index() as index:
        index.put([rewarded(1, 1.0, group_size=2), rewarded(2, 1.0, gid="1/8", group_size=1)])
        index.update_summaries()
        assert summary(index)["incomplete"] == 0  # more may come
        index.put([rewarded(3, 1.0, gid="2/7", step=2, group_size=2)])
        assert index.update_summaries() == {1, 2}
        assert (summary(index)["incomplete"], summary(index, 2)["incomplete"]) == (0.5, 0)
        index.put([rewarded(4, 1.0, uid="1/7/1/1/s", run=1, turn=1, group_size=2)])  # the first run's second part
        index.update_summaries()
        assert summary(index)["incomplete"] == 0.5
        index.put([rewarded(5, 1.0, run=2, group_size=2)])
        index.update_summaries()
        assert summary(index)["incomplete"] == 0


def test_duplicates_are_of_other_runs_of_the_group() -> None:
    with Index() as index:
        both = {"digest": 7, "response_tokens": 16}
        index.put([row(1, **both), row(2, **both), row(3, digest=8, response_tokens=16)])
        index.put([row(4, gid="1/8", **both), row(5, run=4, gid="1/8", uid="1/8/4/1/s", turn=1, **both)])
        short = {"gid": "1/9", "digest": 7, "response_tokens": 15}  # as right answers often are
        index.put([row(6, **short), row(7, **short)])
        index.update_summaries()
        assert index.query("SELECT n FROM samples WHERE duplicate") == [(1,), (2,)]
        assert summary(index)["duplicates"] == 1 / 7  # of a set one is none
        index.put([{"n": 1, "removed_reason": "deleted"}])
        index.update_summaries()
        assert index.query("SELECT n FROM samples WHERE duplicate AND n <> 1") == []


def test_solved_is_near_the_highest_reward_and_all_steps_follow_it() -> None:
    with Index() as index:
        index.put([rewarded(1, 0.0), rewarded(2, 0.5), rewarded(3, 0.2, gid="2/7", step=2)])
        index.update_summaries()
        assert (summary(index)["solved"], summary(index, 2)["solved"]) == (1, 0)
        index.put([rewarded(4, 1.0, gid="2/8", step=2), rewarded(5, 0.95, gid="3/8", step=3)])
        index.update_summaries()
        assert [summary(index, step)["solved"] for step in (1, 2, 3)] == [0, 0.5, 1]
        index.put([rewarded(6, 0.0, gid="3/8", step=3)])
        index.update_summaries()
        assert [(summary(index, step)["solved"], summary(index, step)["all_solved"]) for step in (2, 3)] == [
            (0.5, 0.5),
            (1, 0),
        ]


def test_evaluation_is_summed_up_apart() -> None:
    with Index() as index:
        index.put([rewarded(1, 1.0), rewarded(2, 0.0, uid="e", evaluation=1)])
        index.update_summaries()
        summed = index.query("SELECT evaluation, n, summary FROM steps ORDER BY evaluation")
        assert [(flag, n, json.loads(text)["reward"]["mean"]) for flag, n, text in summed] == [(0, 1, 1.0), (1, 1, 0.0)]
        assert index.query("SELECT gid, evaluation, n FROM groups ORDER BY evaluation") == [
            ("1/7", 0, 1),
            ("1/7", 1, 1),
        ]


def test_deleted_samples_count_nowhere_and_an_empty_step_says_so() -> None:
    with Index() as index:
        index.put([rewarded(1, 1.0), rewarded(2, 0.0)])
        index.update_summaries()
        index.put([{"n": 1, "removed_reason": "deleted"}])
        index.update_summaries()
        assert (summary(index)["n"], summary(index)["reward"]["mean"]) == (1, 0.0)
        index.put([{"n": 2, "removed_reason": "rewound"}])
        index.update_summaries()
        assert (summary(index)["n"], summary(index)["reward"]) == (0, None)
        assert index.query("SELECT * FROM groups") == []


def test_numbers_that_are_not_finite_spoil_nothing() -> None:
    with Index() as index:
        index.put([rewarded(1, math.inf), rewarded(2, 1.0, entropy=1e308), rewarded(3, 0.0, entropy=1e308)])
        index.update_summaries()
        summed = summary(index)
        assert summed["reward"]["mean"] == 0.5
        assert json.loads(json.dumps(summed, allow_nan=False)) == summed


def test_only_what_changed_is_summed_up_and_the_cursor_says_it() -> None:
    with Index() as index:
        index.put([rewarded(1, 1.0), rewarded(2, 1.0, gid="2/7", step=2)])
        index.update_summaries()
        before = dict(index.query("SELECT step, cursor FROM steps"))
        assert index.update_summaries() == set()
        index.put([{"n": 2, "reward": 0.0}])
        assert index.update_summaries() == {2}
        after = dict(index.query("SELECT step, cursor FROM steps"))
        assert after[1] == before[1]
        assert before[2] < after[2] <= index.cursor
        for step in (1, 2):
            with index.reading() as read:
                assert summarize(read, step, 0, 2) == summary(index, step)


def test_an_id_that_is_taken_again_leaves_the_old_row_under_another() -> None:
    with Index() as index:
        index.put([row(1)])
        index.put([row(9, uid="1/7/1/0/s")])
        assert index.query("SELECT n, uid FROM samples ORDER BY n") == [(1, "1/7/1/0/s~1"), (9, "1/7/1/0/s")]


def test_texts_that_sqlite_cannot_keep_are_kept_as_far_as_they_can_be() -> None:
    with Index() as index:
        index.put([row(1, opening="a\ud800b", closing="c\0d")])
        assert index.query("SELECT opening, closing FROM samples") == [("a\ufffdb", "c\0d")]


def test_documents_are_rows_too() -> None:
    trajectory = Trajectory(
        uid="5/1/0/0/a",
        gid="5/1",
        step=5,
        text="2+2=4",
        ends=np.arange(1, 6),
        prompt_tokens=4,
        reward=1.0,
        status="finished",
        arrays={"entropy": np.array([np.nan] * 4 + [0.5], np.float32)},
        tokenized="words",
    )
    with Index() as index:
        index.add([trajectory])
        trajectory.reward = 0.0
        index.add([trajectory])  # the same id: measured anew
        assert index.query("SELECT n, reward, entropy, closing FROM samples") == [(1, 0.0, 0.5, "4")]
        assert index.update_summaries() == {5}
        assert (index.fact("tokenized"), index.fact("scales")["entropy"]["low"]) == (["words"], 0.0)
        index.remove([1])
        assert index.update_summaries() == {5}
        assert summary(index, 5)["n"] == 0


def test_readers_see_whole_transactions_beside_a_writer() -> None:
    wrong: list[Any] = []
    done = threading.Event()
    with Index() as index:

        def read() -> None:
            while not done.is_set():
                count, total = index.query("SELECT COUNT(*), COALESCE(SUM(reward), 0) FROM samples")[0]
                if count % 10 or total != count:
                    wrong.append((count, total))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for start in range(0, 300, 10):
            index.put(rewarded(n, 1.0) for n in range(start, start + 10))
        done.set()
        for reader in readers:
            reader.join()
    assert not wrong


def test_a_write_that_fails_changes_nothing() -> None:
    with Index() as index:
        before = index.cursor
        with pytest.raises(sqlite3.IntegrityError):
            index.put([row(1), {"n": 2, "uid": "x", "gid": None, "step": 1, "run": 2}])
        assert index.query("SELECT * FROM samples") == []
        assert index.cursor == before


def test_waiting_ends_with_a_change_a_stop_and_the_time() -> None:
    with Index() as index:
        assert not index.wait(index.cursor, 0.01)
        assert not index.wait(index.cursor, 60, lambda: True)
        cursor = index.cursor
        writer = threading.Timer(0.05, lambda: index.put([row(1)]))
        writer.start()
        assert index.wait(cursor, 60)
        writer.join()
        assert index.wait(cursor, 60)  # it has been


def test_readers_cannot_write_and_slow_ones_are_stopped() -> None:
    with Index() as index:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            index.query("DELETE FROM samples")
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT MAX(x) FROM c"
        with pytest.raises(sqlite3.OperationalError, match="interrupt"):
            with index.reading(0.05) as read:
                read.execute(endless).fetchall()
        assert index.query("SELECT 1") == [(1,)]  # the connection is good for more


def test_the_file_goes_when_it_is_closed_and_when_the_process_ends() -> None:
    index = Index()
    folder = index.path.parent
    assert oct(folder.stat().st_mode)[-2:] == "00"  # prompts are nobody else's business
    index.close()
    index.close()
    assert not folder.exists()
    with pytest.raises(ValueError, match="closed"):
        index.query("SELECT 1")
    code = "from rollbook.inspect.index import Index; index = Index(); print(index.path.parent)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not Path(finished.stdout.strip()).exists()


def test_every_column_is_described_once() -> None:
    assert {name for name in COLUMNS if name not in ANSWER_COLUMNS} == {
        "n",
        "admitted",
        "batch",
        "digest",
        "searchable",
        "moment",
    }
    assert all(column.label and column.help for column in COLUMNS.values())
