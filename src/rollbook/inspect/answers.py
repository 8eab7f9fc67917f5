"""`Answers`: the data of each page of the viewer, as dicts of strict JSON.

Invariant: every number is finite or `None`. An answer reads one state of the index, and reads the source only for data
that the index lacks (the label of a group, a text to search). The pages of a list contain each row of its snapshot
once, even if rows are added meanwhile; a row shows its current state.
"""

from __future__ import annotations

import importlib.util
import json
import math
import secrets
import sqlite3
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollbook.book import reports
from rollbook.book.errors import BookError
from rollbook.core import __version__
from rollbook.core.checks import check_choice, check_int
from rollbook.inspect import filters
from rollbook.inspect.index import ANSWER_COLUMNS, COUNTED, fetch_dicts
from rollbook.inspect.measures import FLAGGED_MISMATCH, newest_steps, reward_parts, summarize
from rollbook.inspect.search import Search
from rollbook.inspect.serialization import json_safe
from rollbook.inspect.statistics import edges, group_means, group_test
from rollbook.inspect.trajectory import LENSES
from rollbook.inspect.workers import QueryTimeoutError

if TYPE_CHECKING:
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Source


# --- lists of samples and groups ------------------------------------------------------------------------------------

VIEWS = ("samples", "groups")
MAX_SNAPSHOTS = 32
"""Number of snapshots kept; older ones are recomputed on request."""
MAX_PAGE_ROWS = 10_000
"""Maximum number of rows of a page."""
QUERY_SECONDS = 20.0
_COLUMNS = ", ".join(ANSWER_COLUMNS)
_SQL_CHUNK = 500


@dataclass(frozen=True)
class ListQuery:
    """Rows of a list and their order.

    Args:
        view: A name of `VIEWS`.
        step: Step of the rows.
        gid: Group of the rows.
        prompt: Prompt of the rows.
        filter: Filter of samples.
        sort: Order; "": the default of the view.
        evaluation: Whether to list evaluation samples; `None`: both, or training samples if `step` is set.
        parts: Names of numbers that `filter` and `sort` may use.
    """

    view: str
    step: int | None
    gid: str | None
    prompt: str | None
    filter: str
    sort: str
    evaluation: bool | None
    parts: Sequence[str]


class Snapshots:
    """Cached lists, as the ordered numbers of their rows."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._snapshots: OrderedDict[str, tuple[str, array[int]]] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, query: ListQuery, *, offset: int, limit: int, snapshot: str | None) -> dict[str, Any]:
        """Return a page of a list; see `Answers.list`."""
        check_choice("view", query.view, VIEWS)
        check_int("offset", offset)
        limit = min(check_int("limit", limit, 1), MAX_PAGE_ROWS)
        started = time.perf_counter()
        with self._lock:
            cached = self._snapshots.get(snapshot or "")
            if cached is not None and snapshot is not None and cached[0] == query.view:
                self._snapshots.move_to_end(snapshot)
            else:
                cached = None
        try:
            with self.index.reading(QUERY_SECONDS) as read:
                if cached is None:
                    snapshot, cached = secrets.token_hex(8), (query.view, _row_numbers(read, query))
                    with self._lock:
                        self._snapshots[snapshot] = cached
                        while len(self._snapshots) > MAX_SNAPSHOTS:
                            self._snapshots.popitem(last=False)
                chosen = cached[1][offset : offset + limit].tolist()
                rows = (sample_rows if query.view == "samples" else group_rows)(read, chosen)
        except sqlite3.OperationalError as error:
            if "interrupt" not in str(error):
                raise
            raise QueryTimeoutError(f"filter: took longer than {QUERY_SECONDS:g} seconds") from None
        return {
            "snapshot": snapshot,
            "total": len(cached[1]),
            "offset": offset,
            "milliseconds": round((time.perf_counter() - started) * 1000, 1),
            "rows": rows,
        }


def _row_numbers(read: sqlite3.Connection, query: ListQuery) -> array[int]:
    """Return the ordered row numbers of a list: `n` of samples, `g` of groups."""
    conditions: list[str] = []
    values: list[Any] = []
    for name, number in (("step", query.step), ("gid", query.gid), ("prompt", query.prompt)):
        if number is not None:
            conditions.append(f"{name} = ?")
            values.append(number)
    evaluation = query.evaluation
    if evaluation is None and query.step is not None:
        evaluation = False  # a step means training samples by default
    if evaluation is not None:
        conditions.append("evaluation = ?")
        values.append(int(evaluation))
    condition = filters.parse(query.filter, query.parts)
    default = "-step,gid,run,turn" if query.view == "samples" else "-step"
    ordered, more = filters.parse_sort(query.sort or default, query.view, query.parts)
    if query.view == "samples":
        conditions += [COUNTED, condition.sql]
        values += condition.values
    elif condition.sql != "1":
        conditions.append(
            f"(gid, evaluation) IN (SELECT gid, evaluation FROM samples WHERE {COUNTED} AND {condition.sql})"
        )
        values += condition.values
    key = "n" if query.view == "samples" else "g"
    sql = f"SELECT {key} FROM {query.view} WHERE {' AND '.join(conditions) or '1'} ORDER BY {ordered}"
    return array("q", (row[0] for row in read.execute(sql, [*values, *more])))


def to_json_row(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row to strict JSON: parts as a dict, non-finite numbers as `None`."""
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = None
    if "parts" in row:
        row["parts"] = json.loads(row["parts"])
    return row


def sample_rows(read: sqlite3.Connection, ns: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of samples by number, in this order."""
    rows_by_number: dict[int, dict[str, Any]] = {}
    for start in range(0, len(ns), _SQL_CHUNK):
        chunk = ns[start : start + _SQL_CHUNK]
        marks = ",".join("?" * len(chunk))
        for row in fetch_dicts(read.execute(f"SELECT n, {_COLUMNS} FROM samples WHERE n IN ({marks})", chunk)):
            rows_by_number[row.pop("n")] = to_json_row(row)
    return [rows_by_number[n] for n in ns if n in rows_by_number]


def group_rows(read: sqlite3.Connection, gs: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of groups by number, in this order: {gid, step, ..., rewards, uids, flags}."""
    newest = newest_steps(read)
    bars = dict(read.execute("SELECT evaluation, bar FROM tops WHERE solves").fetchall())
    rows_by_number: dict[int, dict[str, Any]] = {}
    for start in range(0, len(gs), _SQL_CHUNK):
        chunk = gs[start : start + _SQL_CHUNK]
        marks = ",".join("?" * len(chunk))
        rows = fetch_dicts(read.execute(f"SELECT * FROM groups WHERE g IN ({marks})", chunk))
        places = {(row["gid"], row["evaluation"]): row for row in rows}
        for row in rows:
            row.update(rewards=[], uids=[], opening="")
        for gid, evaluation, uid, reward, opening in read.execute(
            "SELECT gid, evaluation, uid, reward, opening FROM samples "
            f"WHERE gid IN (SELECT gid FROM groups WHERE g IN ({marks})) AND {COUNTED} "
            "ORDER BY reward IS NULL, reward DESC, run, turn, n",
            chunk,
        ):
            group = places.get((gid, evaluation))
            if group is not None:
                group["rewards"].append(reward if reward is None or math.isfinite(reward) else None)
                group["uids"].append(uid)
                group["opening"] = group["opening"] or opening
        for row in rows:
            rows_by_number[row["g"]] = _group_row(row, newest.get(row["evaluation"]), bars.get(row["evaluation"]))
    return [rows_by_number[g] for g in gs if g in rows_by_number]


_GROUP_COLUMNS = (
    *("gid", "step", "task", "prompt", "opening", "evaluation", "images", "n", "expected", "rewards", "uids", "mean"),
    *("std", "length", "entropy", "kl_max", "mismatch_max"),
)


def _group_row(row: dict[str, Any], newest: int | None, solved_from: float | None) -> dict[str, Any]:
    scored = solved_from is not None and row["high"] is not None
    some_solved, all_solved = (scored and row[name] >= solved_from for name in ("high", "low"))
    flags = {
        "zero-variance": row["zero_variance"],
        "truncated": row["truncated"],
        "loop": row["loops"],
        "duplicates": row["duplicates"],
        "incomplete": row["expected"] and newest is not None and row["runs"] < row["expected"] and row["step"] < newest,
        "nan": row["nans"],
        "mismatch": row["mismatch_max"] is not None and row["mismatch_max"] >= FLAGGED_MISMATCH,
        "stale": row["stale"],
        "none-solved": scored and not some_solved,
        "some-solved": some_solved and not all_solved,
        "all-solved": all_solved,
    }
    shown = to_json_row({name: row[name] for name in _GROUP_COLUMNS})
    return {**shown, "flags": [name for name, true in flags.items() if true]}


# --- answers --------------------------------------------------------------------------------------------------------

MAX_SCATTER_POINTS = 2000
"""Maximum number of points of a scatter plot."""
STEP_COLUMNS = {"reward": "reward", "length": "response_tokens", "entropy": "entropy", "advantage": "advantage"}
"""Metrics of a step page, and their columns."""
LIVE_SECONDS = 300.0
"""Seconds after the last change for which a run counts as live."""
_SUMMARY_SECONDS = 1.0
_FINDINGS_SECONDS = 3.0
_MAX_PROMPT_ROWS = 20_000
_MAX_COMPARISONS = 16


class Answers:
    """Answers about a source, from its index.

    >>> import rollbook
    >>> from rollbook.inspect.index import Index
    >>> from rollbook.inspect.sources import BookSource, load
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"batch": 3, "task": 1, "run": r, "suffix": "s"}, tokens=[1, 2, 3 + r],
    ...                                      reward=float(r), metrics={"accuracy": r}) for r in range(2)])
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> answers = Answers(source, index)
    >>> answers.run()["steps"], answers.run()["parts"]
    ({'first': 3, 'last': 3, 'count': 1}, ['accuracy'])
    >>> [row["uid"] for row in answers.list(filter="reward > .5")["rows"]]
    ['3/1/1/0/s']
    >>> answers.group("3/1")["rows"][0]["parts"]
    {'accuracy': 1.0}
    >>> answers.close(), index.close()
    (None, None)
    """

    def __init__(self, source: Source, index: Index) -> None:
        self.source = source
        self.index = index
        self.searching = Search(source, index)
        self._snapshots = Snapshots(index)
        self._findings: dict[bool, tuple[int, float, list[dict[str, Any]]]] = {}
        self._findings_lock = threading.Lock()
        self._comparisons: dict[tuple[int, tuple[int, int], tuple[int, int]], dict[str, Any]] = {}
        self._comparison_lock = threading.Lock()
        self._number_names: tuple[int, list[str], list[str]] = (-1, [], [])

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Return the summary of the run and the available features, for `/api/run`."""
        self.index.update_summaries(_SUMMARY_SECONDS)
        cursor = self.index.cursor
        with self.index.reading() as read:
            total, evaluation, measured = _count_records(read)
            unread = read.execute("SELECT COUNT(*) FROM samples WHERE searchable = 0").fetchone()[0]
            group_count = read.execute("SELECT COUNT(*) FROM groups").fetchone()[0]
            spans = dict.fromkeys((0, 1), (None, None, 0))
            for flag, *span in read.execute(
                "SELECT evaluation, MIN(step), MAX(step), COUNT(*) FROM steps WHERE n > 0 GROUP BY evaluation"
            ):
                spans[flag] = tuple(span)
            versions = read.execute(
                "SELECT MIN(json_extract(summary, '$.versions[0]')), MAX(json_extract(summary, '$.versions[1]')) "
                "FROM steps"
            ).fetchone()
            rewards = read.execute("SELECT MIN(low), MAX(top) FROM tops").fetchone()
            parts, metrics = self._update_number_names(read)
        first, last, count = spans[0] if spans[0][2] else spans[1]
        tokenized = self.index.fact("tokenized", [])
        book = self.source.kind == "book"
        changed = self.source.changed
        idle = None if changed is None else max(0.0, time.time() - changed)
        return {
            "name": self.source.name,
            "kind": self.source.kind,
            "live": idle is not None and idle < LIVE_SECONDS,
            "idle": idle,
            "records": total,
            "evaluation": evaluation,
            "groups": group_count,
            "steps": {"first": first, "last": last, "count": count},
            "tokenized": tokenized[0] if len(tokenized) == 1 else "mixed" if tokenized else "exact",
            "lenses": self._lenses(versions),
            "columns": filters.describe_columns(parts, metrics),
            "parts": parts,
            "metrics": metrics,
            "rewards": None if None in rewards else list(rewards),
            "features": {
                "ledger": book,
                "sql": book and importlib.util.find_spec("duckdb") is not None,
                "search": True,
                "export": False,
                "annotate": False,
            },
            "progress": {"measured": measured, "total": total, "searchable": max(0, total - unread)},
            "problems": [*filter(None, [self.index.fact("error")]), *self.source.problems],
            "cursor": cursor,
            "version": __version__,
        }

    def _update_number_names(self, read: sqlite3.Connection) -> tuple[list[str], list[str]]:
        """Return the names of reward parts and of other numbers; recomputed when the index changes."""
        cursor = self.index.cursor
        if self._number_names[0] != cursor:
            rows = read.execute(
                "SELECT key FROM steps, json_each(steps.summary, '$.parts') "
                "GROUP BY key ORDER BY MIN(steps.step), MIN(id)"
            )
            names = [row[0] for row in rows]
            parts = set(reward_parts(self.index))
            self._number_names = (cursor, [n for n in names if n in parts], [n for n in names if n not in parts])
        return self._number_names[1:]

    def _lenses(self, versions: tuple[Any, Any]) -> list[dict[str, Any]]:
        scales = self.index.fact("scales", {})
        if None not in versions:
            low, high = versions
            scales["version"] = {"low": low, "high": max(high, low + 1), "quantiles": None}
        return [
            {
                "id": lens.id,
                "key": lens.key,
                "label": lens.label,
                "help": lens.help,
                "scale": {"kind": lens.scale, **scales[lens.id], "middle": lens.middle},
            }
            for lens in LENSES.values()
            if lens.id in scales
        ]

    def change(self, since: int) -> dict[str, Any]:
        """Return the event for listening pages: {cursor, records, measured, steps changed since}."""
        self.index.update_summaries(_SUMMARY_SECONDS)
        cursor = self.index.cursor
        with self.index.reading() as read:
            records, _, measured = _count_records(read)
            steps = [
                row[0]
                for row in read.execute("SELECT DISTINCT step FROM steps WHERE cursor > ? ORDER BY step", (since,))
            ]
        return {"cursor": cursor, "records": records, "measured": measured, "steps": steps}

    # --- steps --------------------------------------------------------------------------------------------------

    def steps(self, since: int = 0, evaluation: bool = False) -> dict[str, Any]:
        """Return the summaries of steps that changed after a cursor, oldest step first."""
        check_int("since", since)
        self.index.update_summaries(_SUMMARY_SECONDS)
        cursor = self.index.cursor
        rows = self.index.query(
            "SELECT summary FROM steps WHERE evaluation = ? AND cursor > ? ORDER BY step", (int(evaluation), since)
        )
        return {"cursor": cursor, "steps": [json.loads(row[0]) for row in rows]}

    def step(self, step: int, evaluation: bool = False) -> dict[str, Any]:
        """Return a step: its summary, the previous summary, their distance, and the data of its charts."""
        check_int("step", step)
        self.index.update_summaries(_SUMMARY_SECONDS)
        flag = int(evaluation)
        with self.index.reading() as read:
            previous, following = (
                read.execute(
                    f"SELECT step FROM steps WHERE evaluation = ? AND n > 0 AND step {sign} ? "
                    f"ORDER BY step {way} LIMIT 1",
                    (flag, step),
                ).fetchone()
                for sign, way in (("<", "DESC"), (">", ""))
            )
            summary = _summary(read, step, flag)
            earlier = None if previous is None else _summary(read, previous[0], flag)
            now, then = (
                _step_values(read, number, flag) if number is not None else {}
                for number in (step, previous and previous[0])
            )
            rows = read.execute(
                "SELECT response_tokens, reward, status, n, uid FROM samples "
                f"WHERE step = ? AND evaluation = ? AND {COUNTED} ORDER BY n",
                (step, flag),
            ).fetchall()
        if len(rows) > MAX_SCATTER_POINTS:
            chosen = np.random.default_rng(step).choice(len(rows), MAX_SCATTER_POINTS, replace=False)
            rows = [rows[i] for i in sorted(chosen.tolist())]
        return {
            "step": step,
            "previous": previous and previous[0],
            "next": following and following[0],
            "summary": summary,
            "before": earlier,
            "versus": {
                name: _compare_steps(then[name], now[name])
                for name in ("reward", "length", "entropy")
                if then and len(then[name][0])
                if len(now[name][0])
            },
            "histograms": {name: _histogram(values) for name, (values, _) in now.items()},
            "scatter": json_safe([row[:4] for row in rows]),
            "uids": {str(row[3]): row[4] for row in rows},
        }

    # --- lists --------------------------------------------------------------------------------------------------

    def list(
        self,
        view: str = "samples",
        *,
        step: int | None = None,
        gid: str | None = None,
        prompt: str | None = None,
        filter: str | None = None,
        sort: str | None = None,
        offset: int = 0,
        limit: int = 100,
        snapshot: str | None = None,
        evaluation: bool | None = None,
    ) -> dict[str, Any]:
        """Return a page of samples, or of groups with a sample that matches the filter.

        The order is fixed by the first request. Later pages are requested with its `snapshot` and are consistent with
        it, even if samples were added since. With `step`, only training samples are listed unless `evaluation` is set;
        without it, all.
        """
        self.index.update_summaries(_SUMMARY_SECONDS)
        with self.index.reading() as read:
            names = [name for names in self._update_number_names(read) for name in names]
        if filter and filters.parse(filter, names).texts:
            self.searching.finish()
        query = ListQuery(view, step, gid, prompt, filter or "", sort or "", evaluation, names)
        return self._snapshots.page(query, offset=offset, limit=limit, snapshot=snapshot)

    def group(self, gid: str) -> dict[str, Any]:
        """Return a group: its samples, best reward first, adjacent groups, and its prompt at other steps."""
        self.index.update_summaries(_SUMMARY_SECONDS)
        with self.index.reading() as read:
            number, evaluation = _find_row(
                read, "group", gid, "SELECT g, evaluation FROM groups WHERE gid = ? ORDER BY evaluation"
            )
            (summary,) = group_rows(read, [number])
            ns = [
                row[0]
                for row in read.execute(
                    f"SELECT n FROM samples WHERE gid = ? AND evaluation = ? AND {COUNTED} "
                    "ORDER BY reward IS NULL, reward DESC, run, turn, n",
                    (gid, evaluation),
                )
            ]
            rows = sample_rows(read, ns)
            previous, following = _adjacent_groups(read, number)
            timeline = [
                {"step": row[0], "gid": row[1], "n": row[2], "mean": json_safe(row[3])}
                for row in read.execute(
                    "SELECT step, gid, n, mean FROM groups WHERE prompt = ? AND evaluation = ? ORDER BY step, first",
                    (summary["prompt"], evaluation),
                )
            ]
        if not summary["prompt"]:  # not measured yet
            timeline = [{"step": summary["step"], "gid": gid, "n": summary["n"], "mean": summary["mean"]}]
        label, reference = self._find_reference(rows)
        return {
            **{name: summary[name] for name in ("gid", "step", "task", "prompt", "opening", "n", "expected", "flags")},
            **{name: summary[name] for name in ("mean", "std")},
            "label": label,
            "reference": reference,
            "evaluation": bool(evaluation),
            "previous": previous and previous[1],
            "next": following and following[1],
            "timeline": timeline,
            "rows": rows,
        }

    def _find_reference(self, rows: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        """Return the label and reference answer that the samples of a group share."""
        for row in rows:
            if row["removed_reason"] is None:
                try:
                    (trajectory,) = self.source.trajectories([row["uid"]])
                except (BookError, KeyError, OSError, ValueError):
                    continue
                return json_safe(trajectory.label), json_safe(trajectory.reference)
        return None, None

    def neighbors(self, uid: str) -> dict[str, Any]:
        """Return the row of a sample and the adjacent samples in its group, its step and its prompt."""
        self.index.update_summaries(_SUMMARY_SECONDS)
        with self.index.reading() as read:
            n, gid, evaluation, step, prompt = _find_row(
                read, "uid", uid, "SELECT n, gid, evaluation, step, prompt FROM samples WHERE uid = ?"
            )
            members = [row[0] for row in read.execute(_GROUP_UIDS, (gid, evaluation))]
            at = members.index(uid) if uid in members else None
            group = read.execute("SELECT g FROM groups WHERE gid = ? AND evaluation = ?", (gid, evaluation)).fetchone()
            adjacent = (None, None) if group is None else _adjacent_groups(read, group[0])
            firsts = [
                None if neighbor is None else read.execute(_GROUP_UIDS, (neighbor[1], evaluation)).fetchone()
                for neighbor in adjacent
            ]
            steps = [
                row[0]
                for row in read.execute(
                    f"SELECT DISTINCT step FROM samples WHERE prompt = ? AND prompt <> '' AND {COUNTED} ORDER BY step",
                    (prompt,),
                )
            ]
            (row,) = sample_rows(read, [n])
        return {
            "row": row,
            "gid": gid,
            "step": step,
            "previous": members[at - 1] if at else None,
            "next": members[at + 1] if at is not None and at + 1 < len(members) else None,
            "previous_group": firsts[0] and firsts[0][0],
            "next_group": firsts[1] and firsts[1][0],
            "same_prompt": steps,
        }

    def prompt(self, prompt: str) -> dict[str, Any]:
        """Return all samples of a prompt, by step."""
        with self.index.reading() as read:
            rows = [
                to_json_row(row)
                for row in fetch_dicts(
                    read.execute(
                        "SELECT step, gid, uid, reward, response_tokens AS length, status, version_max, evaluation, "
                        f"opening FROM samples WHERE prompt = ? AND {COUNTED} ORDER BY step, n LIMIT ?",
                        (prompt, _MAX_PROMPT_ROWS),
                    )
                )
            ]
        if not prompt or not rows:
            raise KeyError(f"unknown prompt {prompt!r}")
        openings = [row.pop("opening") for row in rows]
        return {"prompt": prompt, "opening": next(filter(None, openings), ""), "rows": rows}

    # --- search, comparison, findings ----------------------------------------------------------------------------

    def search(self, q: str, mode: str = "phrase", limit: int = 50, step: int | None = None) -> dict[str, Any]:
        """Search texts; see `Search.search`."""
        answer: dict[str, Any] = json_safe(self.searching.search(q, mode, limit, step))
        return answer

    def compare(self, a: tuple[int, int], b: tuple[int, int]) -> dict[str, Any]:
        """Compare two step ranges; see `rollbook.inspect.comparison`."""
        from rollbook.inspect.comparison import Side, compare

        self.index.update_summaries(_SUMMARY_SECONDS)
        # Phrases of many texts take a second, so the result is cached until the run changes.
        key = (self.index.cursor, a, b)
        with self._comparison_lock:
            comparison = self._comparisons.get(key)
            if comparison is None:
                comparison = compare(Side(self.source, self.index, *a), Side(self.source, self.index, *b))
                while len(self._comparisons) >= _MAX_COMPARISONS:
                    del self._comparisons[next(iter(self._comparisons))]
                self._comparisons[key] = comparison
        return comparison

    def findings(self, evaluation: bool = False) -> dict[str, Any]:
        """Return the doctor's findings and near misses; recomputed at intervals when the run changes."""
        from rollbook.inspect.doctor import examine, triage

        with self._findings_lock:
            cursor, now = self.index.cursor, time.monotonic()
            cached = self._findings.get(evaluation)
            if cached is None or (cached[0] != cursor and now > cached[1]):
                findings = examine(self.index, evaluation=True).findings if evaluation else triage(self.index)
                items = [{"id": entry["check"], **entry} for entry in (finding.as_dict() for finding in findings)]
                # It takes seconds on a large run, so it is recomputed at intervals.
                after = time.monotonic() + max(_FINDINGS_SECONDS, 10 * (time.monotonic() - now))
                cached = self._findings[evaluation] = (cursor, after, json_safe(items))
            return {"items": cached[2]}

    def metrics(self, since: int = 0) -> dict[str, Any]:
        """Return the logged metrics from step `since` on: {steps: [[step, {name: number}]]}.

        Non-finite numbers are the texts `NaN`, `Infinity` and `-Infinity`. `count` is the total number of steps; a page
        that has more of them was rewound and reloads.
        """
        check_int("since", since)
        cursor = self.index.cursor
        from rollbook.inspect.sources import BookSource

        rows = self.source.metrics() if isinstance(self.source, BookSource) else []
        steps = [[step, reports.encode_metrics(numbers)] for step, numbers in rows if step >= since]
        return {"cursor": cursor, "count": len(rows), "steps": steps}

    def close(self) -> None:
        """Stop the background search."""
        self.searching.close()


def _count_records(read: sqlite3.Connection) -> tuple[int, int, int]:
    """Return the number of records, of evaluation records among them, and of measured ones."""
    totals = dict(read.execute("SELECT evaluation, SUM(n) FROM steps GROUP BY evaluation").fetchall())
    waiting = read.execute("SELECT COUNT(*) FROM samples WHERE measured = 0").fetchone()[0]
    total = sum(totals.values())
    return total, totals.get(1, 0), max(0, total - waiting)


_GROUP_UIDS = f"SELECT uid FROM samples WHERE gid = ? AND evaluation = ? AND {COUNTED} ORDER BY run, turn, n"


def _find_row(read: sqlite3.Connection, name: str, key: str, sql: str) -> tuple[Any, ...]:
    """Return the first row for a key, or raise `KeyError`."""
    row: tuple[Any, ...] | None = read.execute(sql, (key,)).fetchone()
    if row is None:
        raise KeyError(f"unknown {name} {key!r}")
    return row


def _adjacent_groups(read: sqlite3.Connection, g: int) -> tuple[Any, ...]:
    """Return the groups (number, gid) before and after a group in its step."""
    return tuple(
        read.execute(
            "SELECT other.g, other.gid FROM groups AS one JOIN groups AS other ON other.step = one.step "
            f"AND other.evaluation = one.evaluation AND other.first {sign} one.first "
            f"WHERE one.g = ? ORDER BY other.first {way} LIMIT 1",
            (g,),
        ).fetchone()
        for sign, way in (("<", "DESC"), (">", ""))
    )


def _summary(read: sqlite3.Connection, step: int, evaluation: int) -> dict[str, Any]:
    row = read.execute("SELECT summary FROM steps WHERE step = ? AND evaluation = ?", (step, evaluation)).fetchone()
    if row is not None:
        summary: dict[str, Any] = json.loads(row[0])
        return summary
    return summarize(read, step, evaluation, newest_steps(read).get(evaluation))


_Grouped = tuple[NDArray[np.float64], NDArray[Any]]
"""Values [N], and the groups [N] of their samples."""


def _step_values(read: sqlite3.Connection, step: int, evaluation: int) -> dict[str, _Grouped]:
    """Return the finite numbers of each metric in a step."""
    rows = read.execute(
        f"SELECT gid, {', '.join(STEP_COLUMNS.values())} FROM samples WHERE step = ? AND evaluation = ? AND {COUNTED} "
        "AND (removed_reason IS NULL OR length > 0)",
        (step, evaluation),
    ).fetchall()
    gids = np.array([row[0] for row in rows])
    table = np.array([row[1:] for row in rows], dtype=np.float64).reshape(len(rows), len(STEP_COLUMNS))
    return {
        name: (column[np.isfinite(column)], gids[np.isfinite(column)])
        for name, column in zip(STEP_COLUMNS, table.T, strict=True)
    }


def _compare_steps(then: _Grouped, now: _Grouped) -> dict[str, Any]:
    distance, chance = group_test(group_means(*then), group_means(*now))
    difference: dict[str, Any] = json_safe(
        {"ks": distance, "p": chance, "shift": float(now[0].mean() - then[0].mean())}
    )
    return difference


def _histogram(values: NDArray[np.float64]) -> dict[str, Any]:
    at = edges(values)
    return {"edges": at, "counts": np.histogram(values, at)[0].tolist() if at else []}
