"""Groups and steps summed up: the rows of `groups` and `steps`, from those of `samples`.

Invariant: a row here is a function of the samples that are there now, of the run's top reward and of its newest step;
only what changed is summed up again. Samples that were deleted or rewound count nowhere.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollbook.inspect.doctor.thresholds import Thresholds
from rollbook.inspect.statistics import quantiles

LOOP = 0.5
"""From which share of repetition on a response counts as a loop."""
STALE = 1
"""Beyond which lag a sample counts as stale."""
_NEAR_TOP = 0.2
MISMATCH = 1.0
"""From which distance of the trainer's log-prob to the engine's on, at any token, a group is marked."""
STEP_METRICS = ("reward", "length", "entropy", "kl", "mismatch", "lag", "advantage")
"""What a step's summary has quantiles of; `length` is that of responses."""
DUPLICATE_TOKENS = Thresholds().duplicate_tokens
"""A shorter response is not counted as a duplicate: right answers of a few tokens are the same."""
SHARES = ("truncated", "duplicates", "stale", "loops", "masked", "errors", "nans")

_COUNTS = "(gone IS NULL OR gone NOT IN ('deleted', 'rewound'))"
_GROUP = {
    "first": ("INTEGER NOT NULL", "MIN(n)"),
    "step": ("INTEGER NOT NULL", "MIN(step)"),
    "task": ("TEXT NOT NULL", "MIN(task)"),
    "prompt": ("TEXT NOT NULL", "MAX(prompt)"),
    "n": ("INTEGER NOT NULL", "COUNT(*)"),
    "runs": ("INTEGER NOT NULL", "COUNT(DISTINCT run)"),
    "expected": ("INTEGER", "MAX(group_size)"),
    "images": ("INTEGER NOT NULL", "COALESCE(MAX(images), 0)"),
    "mean": ("REAL", "AVG(reward)"),
    "std": ("REAL", "spread(reward)"),
    "low": ("REAL", "MIN(reward)"),
    "high": ("REAL", "MAX(reward)"),
    "length": ("REAL", "AVG(NULLIF(response_tokens, 0))"),
    "entropy": ("REAL", "AVG(entropy)"),
    "kl_max": ("REAL", "MAX(kl_max)"),
    "mismatch_max": ("REAL", "MAX(mismatch_max)"),
    "zero_variance": ("INTEGER", "COUNT(*) >= 2 AND COUNT(reward) = COUNT(*) AND MIN(reward) = MAX(reward)"),
    "truncated": ("INTEGER", "SUM(status = 'truncated')"),
    "loops": ("INTEGER", f"COALESCE(SUM(repetition >= {LOOP}), 0)"),
    "duplicates": ("INTEGER", "SUM(duplicate)"),
    "nans": ("INTEGER", "SUM(COALESCE(nans, 0) > 0 OR scored = 2)"),
    "stale": ("INTEGER", f"COALESCE(SUM(lag > {STALE}), 0)"),
}
"""The columns of `groups`: their types, and what each is of a group's samples."""
TABLES = (
    "CREATE TABLE groups (g INTEGER PRIMARY KEY, gid TEXT NOT NULL, evaluation INTEGER NOT NULL, "
    f"{', '.join(f'{name} {kind}' for name, (kind, _) in _GROUP.items())}, UNIQUE (gid, evaluation))",
    "CREATE INDEX groups_step ON groups (step, first)",
    "CREATE INDEX groups_newest ON groups (evaluation, step)",
    "CREATE INDEX groups_prompt ON groups (prompt, step)",
    "CREATE TABLE steps (step INTEGER NOT NULL, evaluation INTEGER NOT NULL, cursor INTEGER NOT NULL, "
    "n INTEGER NOT NULL, summary TEXT NOT NULL, PRIMARY KEY (step, evaluation))",
    "CREATE TABLE tops (evaluation INTEGER PRIMARY KEY, low REAL NOT NULL, top REAL NOT NULL, bar REAL NOT NULL, "
    "solves INTEGER NOT NULL, groups INTEGER NOT NULL)",
)
"""`groups`: one row a group, in the order of their `first` samples; `expected` runs it was to have, of which `runs` are
there. `tops`: the lowest and highest reward, that from which on a sample counts as solved, and whether it tells solved
ones from others."""

_GROUPS = (
    f"INSERT INTO groups (gid, evaluation, {', '.join(_GROUP)}) "
    f"SELECT gid, evaluation, {', '.join(sql for _, sql in _GROUP.values())} FROM samples "
    f"WHERE gid IN (SELECT gid FROM dirty) AND {_COUNTS} GROUP BY gid, evaluation "
    f"ON CONFLICT (gid, evaluation) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _GROUP)}"
)
_DUPLICATES = f"""
    UPDATE samples SET duplicate = 1 - duplicate
    WHERE gid IN (SELECT gid FROM dirty) AND duplicate <> (response_tokens >= {DUPLICATE_TOKENS} AND EXISTS (
        SELECT 1 FROM samples AS other WHERE other.gid = samples.gid AND other.digest = samples.digest
        AND other.run <> samples.run AND other.turn = samples.turn AND other.evaluation = samples.evaluation
        AND {_COUNTS.replace("gone", "other.gone")}))"""
"""Parts of one run may be alike: a duplicate is another run's."""


class _Spread:
    """The standard deviation of a population, for SQL; nothing for no number that is finite."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.values.append(value)

    def finalize(self) -> float | None:
        if not self.values:
            return None
        first = self.values[0]
        if all(value == first for value in self.values):
            return 0.0
        return float(np.std(self.values))


def prepare(connection: sqlite3.Connection) -> None:
    """Have what `settle` needs on a connection."""
    connection.create_aggregate("spread", 1, _Spread)  # type: ignore[arg-type]
    connection.execute("CREATE TEMP TABLE dirty (gid TEXT PRIMARY KEY)")


def settle(
    write: sqlite3.Connection, gids: Iterable[str], steps: Iterable[tuple[int, int]], cursor: int
) -> set[tuple[int, int]]:
    """Sum up these groups, and the steps that they or their samples are in; (step, evaluation) of each that changed."""
    touched = set(steps)
    write.execute("DELETE FROM dirty")
    write.executemany("INSERT INTO dirty VALUES (?)", [(gid,) for gid in gids])
    places = "SELECT DISTINCT step, evaluation FROM groups WHERE gid IN (SELECT gid FROM dirty)"
    touched.update(write.execute(places).fetchall())
    write.execute(_DUPLICATES)
    write.execute(_GROUPS)
    write.execute(
        "DELETE FROM groups WHERE gid IN (SELECT gid FROM dirty) AND NOT EXISTS (SELECT 1 FROM samples "
        f"WHERE samples.gid = groups.gid AND samples.evaluation = groups.evaluation AND {_COUNTS})"
    )
    touched.update(write.execute(places).fetchall())
    newest = newest_steps(write)
    looked = set(touched)
    for evaluation in (0, 1):
        if _top(write, evaluation):
            looked.update(write.execute("SELECT step, evaluation FROM steps WHERE evaluation = ?", (evaluation,)))
        # What was the newest step may have groups that are now known to be incomplete.
        before = write.execute("SELECT MAX(step) FROM steps WHERE evaluation = ? AND n > 0", (evaluation,)).fetchone()
        if before[0] is not None and before[0] != newest.get(evaluation):
            looked.add((before[0], evaluation))
    kept = dict[tuple[int, int], str]()
    for step, evaluation, text in write.execute("SELECT step, evaluation, summary FROM steps"):
        if (step, evaluation) in looked:
            kept[step, evaluation] = text
    rows = []
    for step, evaluation in sorted(looked):
        summary = summarise(write, step, evaluation, newest.get(evaluation))
        text = json.dumps(summary, allow_nan=False)
        # A sample's state is not in the summary, but a page that shows the step's samples has to know.
        if (step, evaluation) in touched or text != kept.get((step, evaluation)):
            rows.append((step, evaluation, cursor, summary["n"], text))
    write.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", rows)
    return {row[:2] for row in rows}


def newest_steps(read: sqlite3.Connection) -> dict[int, int]:
    """The newest step that has groups, for training (0) and evaluation (1)."""
    return dict(read.execute("SELECT evaluation, MAX(step) FROM groups GROUP BY evaluation").fetchall())


def _top(write: sqlite3.Connection, evaluation: int) -> bool:
    """Look again from which reward on a sample counts as solved; whether that changed.

    It is the highest of the run, less a fifth of what lies between it and the lowest tenth of all rewards: a bonus for
    short answers must not leave one solved prompt. It is worked out when the highest changes and when the run has
    doubled, so that it stays where it is.
    """
    count, least, top = write.execute(
        "SELECT COUNT(*), MIN(low), MAX(high) FROM groups WHERE evaluation = ? AND low > -9e999 AND high < 9e999",
        (evaluation,),
    ).fetchone()
    before = write.execute("SELECT top, bar, solves, groups FROM tops WHERE evaluation = ?", (evaluation,)).fetchone()
    write.execute("UPDATE tops SET low = ? WHERE evaluation = ? AND low <> ?", (least, evaluation, least))
    if top is None:
        write.execute("DELETE FROM tops WHERE evaluation = ?", (evaluation,))
        return before is not None
    if before is not None and before[0] == top and before[3] <= count < 2 * before[3]:
        return False
    where = f"evaluation = ? AND reward > -9e999 AND reward < 9e999 AND {_COUNTS}"
    scored = write.execute(f"SELECT COUNT(*) FROM samples WHERE {where}", (evaluation,)).fetchone()[0]
    low = write.execute(
        f"SELECT reward FROM samples WHERE {where} ORDER BY reward LIMIT 1 OFFSET ?", (evaluation, scored // 10)
    ).fetchone()[0]
    bar = top - _NEAR_TOP * (top - low)
    found = (top, bar, int(top > low or top > 0), count)
    write.execute("INSERT OR REPLACE INTO tops VALUES (?, ?, ?, ?, ?, ?)", (evaluation, least, *found))
    return before is not None and before[1:3] != found[1:3]


def solved_bar(read: sqlite3.Connection, evaluation: int = 0) -> float | None:
    """The reward from which on a sample counts as solved; `None` where rewards do not tell solved ones from others."""
    row = read.execute("SELECT bar FROM tops WHERE evaluation = ? AND solves", (evaluation,)).fetchone()
    return None if row is None else float(row[0])


SOLVED = ("none", "some", "all")
"""How many of a prompt's samples are solved, fewest first."""


def solved_tag(solved: int, total: int) -> str:
    """The one of `SOLVED` for so many solved samples.

    >>> solved_tag(0, 8), solved_tag(3, 8), solved_tag(8, 8)
    ('none', 'some', 'all')
    """
    return SOLVED[0 if not solved else 2 if solved == total else 1]


def incomplete(newest: int | None) -> str:
    """The condition for a group that has fewer runs than it was to have, and will get no more of them."""
    return f"(runs < expected AND step < {int(newest)})" if newest is not None else "0"


def summarise(read: sqlite3.Connection, step: int, evaluation: int, newest: int | None) -> dict[str, Any]:
    """The summary of one step, as `/api/steps` gives it; every number is finite or `None`."""
    rows = read.execute(
        "SELECT reward, response_tokens, entropy, kl, mismatch, lag, advantage, status, duplicate, repetition, "
        "trained_tokens, nans, scored, parts, version_min, version_max, gone FROM samples "
        f"WHERE step = ? AND evaluation = ? AND {_COUNTS}",
        (step, evaluation),
    ).fetchall()
    count = len(rows)
    bar = solved_bar(read, evaluation)
    groups, flat, missing, solved, whole = read.execute(
        f"SELECT COUNT(*), SUM(zero_variance), SUM({incomplete(newest)}), SUM(high >= ?), SUM(low >= ?) "
        "FROM groups WHERE step = ? AND evaluation = ?",
        (bar, bar, step, evaluation),
    ).fetchone()
    copied = read.execute(
        "SELECT COUNT(*) FROM (SELECT DISTINCT gid, turn, digest FROM samples "
        f"WHERE step = ? AND evaluation = ? AND duplicate AND {_COUNTS})",
        (step, evaluation),
    ).fetchone()[0]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 17
    (reward, response, entropy, kl, mismatch, lag, advantage) = columns[:7]
    status, duplicate, repetition, trained, nans, scored, parts, low, high, gone = columns[7:]
    lengths = [r if r or why is None else None for r, why in zip(response, gone, strict=True)]
    measured = (reward, lengths, entropy, kl, mismatch, lag, advantage)
    tokens = sum(response)
    shares = {
        "truncated": sum(each == "truncated" for each in status),
        # One of each set is no duplicate: this is the share that could be left out.
        "duplicates": sum(duplicate) - copied,
        "stale": sum(each is not None and each > STALE for each in lag),
        "loops": sum(each is not None and each >= LOOP for each in repetition),
        "errors": sum(each == "error" for each in status),
        "nans": sum(bool(number) or score == 2 for number, score in zip(nans, scored, strict=True)),
    }
    oldest = [version for version in low if version is not None]
    latest = [version for version in high if version is not None]
    return {
        "step": step,
        "n": count,
        "groups": groups,
        **{name: spread_of(column) for name, column in zip(STEP_METRICS, measured, strict=True)},
        **{name: found / count if count else 0.0 for name, found in shares.items()},
        "masked": 1 - sum(trained) / tokens if tokens else 0.0,
        "zero_variance": (flat or 0) / groups if groups else 0.0,
        "incomplete": (missing or 0) / groups if groups else 0.0,
        "solved": (solved or 0) / groups if groups else 0.0,
        "all_solved": (whole or 0) / groups if groups else 0.0,
        "parts": means_of(parts),
        "versions": [min(oldest), max(latest)] if oldest and latest else None,
    }


def spread_of(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Quantiles and mean of the finite numbers among some; `None` if there are none.

    >>> spread_of([1.0, None, 3.0, float("inf")])
    {'p5': 1.1, 'p25': 1.5, 'p50': 2.0, 'p75': 2.5, 'p95': 2.9, 'mean': 2.0}
    """
    with np.errstate(all="ignore"):
        found = quantiles(np.array([math.nan if value is None else value for value in values], dtype=np.float64))
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def means_of(parts: Sequence[str]) -> dict[str, float]:
    """The mean of each named number over those samples that have it."""
    sums: dict[str, list[float]] = {}
    for text in parts:
        if text != "{}":
            for name, value in json.loads(text).items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += 1
    means = {name: total / count for name, (total, count) in sums.items()}
    return {name: value for name, value in means.items() if math.isfinite(value)}
