"""Lists of samples and of groups, page by page, in an order that is fixed when it is first asked for.

Invariant: the pages of one snapshot hold each of its rows once, whatever comes in meanwhile; a row shows what is known
now.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import check_choice, check_int
from rollbook.inspect import filters
from rollbook.inspect.index import COUNTS, SHOWN, named
from rollbook.inspect.queries import TooLate
from rollbook.inspect.summaries import MISMATCH, newest_steps

if TYPE_CHECKING:
    from rollbook.inspect.index import Index

VIEWS = ("samples", "groups")
KEPT = 32
"""Snapshots that are kept; an older one is made anew when it is asked for."""
MOST = 10_000
"""Rows of one page, at most."""
SECONDS = 20.0
_COLUMNS = ", ".join(SHOWN)
_IN_ONE = 500


class Snapshots:
    """Lists that were asked for, as the numbers of their rows in order."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._kept: OrderedDict[str, tuple[str, array[int]]] = OrderedDict()
        self._lock = threading.Lock()

    def page(
        self,
        view: str,
        *,
        step: int | None,
        gid: str | None,
        prompt: str | None,
        filter: str,
        sort: str,
        offset: int,
        limit: int,
        snapshot: str | None,
        evaluation: bool | None,
        parts: Sequence[str],
    ) -> dict[str, Any]:
        """See `Answers.list`."""
        check_choice("view", view, VIEWS)
        check_int("offset", offset)
        limit = min(check_int("limit", limit, 1), MOST)
        begun = time.perf_counter()
        with self._lock:
            known = self._kept.get(snapshot or "")
            if known is not None and snapshot is not None and known[0] == view:
                self._kept.move_to_end(snapshot)
            else:
                known = None
        try:
            with self.index.reading(SECONDS) as read:
                if known is None:
                    numbers = _numbers(read, view, step, gid, prompt, filter, sort, evaluation, parts)
                    snapshot, known = secrets.token_hex(8), (view, numbers)
                    with self._lock:
                        self._kept[snapshot] = known
                        while len(self._kept) > KEPT:
                            self._kept.popitem(last=False)
                wanted = known[1][offset : offset + limit].tolist()
                rows = (samples if view == "samples" else groups)(read, wanted)
        except sqlite3.OperationalError as error:
            if "interrupt" not in str(error):
                raise
            raise TooLate(f"filter: it took longer than {SECONDS:g} seconds") from None
        return {
            "snapshot": snapshot,
            "total": len(known[1]),
            "offset": offset,
            "milliseconds": round((time.perf_counter() - begun) * 1000, 1),
            "rows": rows,
        }


def _numbers(
    read: sqlite3.Connection,
    view: str,
    step: int | None,
    gid: str | None,
    prompt: str | None,
    filter: str,
    sort: str,
    evaluation: bool | None,
    parts: Sequence[str],
) -> array[int]:
    """The rows of a list in order, by their numbers: `n` of samples, `g` of groups."""
    where: list[str] = []
    values: list[Any] = []
    for name, wanted in (("step", step), ("gid", gid), ("prompt", prompt)):
        if wanted is not None:
            where.append(f"{name} = ?")
            values.append(wanted)
    if evaluation is None and step is not None:
        evaluation = False  # A step is one of training, unless somebody asks for evaluation.
    if evaluation is not None:
        where.append("evaluation = ?")
        values.append(int(evaluation))
    condition = filters.parse(filter, parts)
    default = "-step,gid,run,turn" if view == "samples" else "-step"
    ordered, more = filters.order(sort or default, view, parts)
    if view == "samples":
        where += [COUNTS, condition.sql]
        values += condition.values
    elif condition.sql != "1":
        where.append(f"(gid, evaluation) IN (SELECT gid, evaluation FROM samples WHERE {COUNTS} AND {condition.sql})")
        values += condition.values
    key = "n" if view == "samples" else "g"
    sql = f"SELECT {key} FROM {view} WHERE {' AND '.join(where) or '1'} ORDER BY {ordered}"
    return array("q", (row[0] for row in read.execute(sql, [*values, *more])))


def tidy(row: dict[str, Any]) -> dict[str, Any]:
    """A row as strict JSON can say it: parts as a dict, numbers that are not finite as `None`."""
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = None
    if "parts" in row:
        row["parts"] = json.loads(row["parts"])
    return row


def samples(read: sqlite3.Connection, ns: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of samples by number, in this order."""
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(ns), _IN_ONE):
        part = ns[start : start + _IN_ONE]
        marks = ",".join("?" * len(part))
        for row in named(read.execute(f"SELECT n, {_COLUMNS} FROM samples WHERE n IN ({marks})", part)):
            found[row.pop("n")] = tidy(row)
    return [found[n] for n in ns if n in found]


def groups(read: sqlite3.Connection, gs: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of groups by number, in this order: {gid, step, ..., rewards, uids, flags}."""
    newest = newest_steps(read)
    bars = dict(read.execute("SELECT evaluation, bar FROM tops WHERE solves").fetchall())
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(gs), _IN_ONE):
        part = gs[start : start + _IN_ONE]
        marks = ",".join("?" * len(part))
        rows = named(read.execute(f"SELECT * FROM groups WHERE g IN ({marks})", part))
        places = {(row["gid"], row["evaluation"]): row for row in rows}
        for row in rows:
            row.update(rewards=[], uids=[], opening="")
        for gid, evaluation, uid, reward, opening in read.execute(
            "SELECT gid, evaluation, uid, reward, opening FROM samples "
            f"WHERE gid IN (SELECT gid FROM groups WHERE g IN ({marks})) AND {COUNTS} "
            "ORDER BY reward IS NULL, reward DESC, run, turn, n",
            part,
        ):
            mine = places.get((gid, evaluation))
            if mine is not None:
                mine["rewards"].append(reward if reward is None or math.isfinite(reward) else None)
                mine["uids"].append(uid)
                mine["opening"] = mine["opening"] or opening
        for row in rows:
            found[row["g"]] = _group(row, newest.get(row["evaluation"]), bars.get(row["evaluation"]))
    return [found[g] for g in gs if g in found]


_SHOWN_OF_GROUP = (
    *("gid", "step", "task", "prompt", "opening", "evaluation", "images", "n", "expected", "rewards", "uids", "mean"),
    *("std", "length", "entropy", "kl_max", "mismatch_max"),
)


def _group(row: dict[str, Any], newest: int | None, bar: float | None) -> dict[str, Any]:
    scored = bar is not None and row["high"] is not None
    most, least = (scored and row[name] >= bar for name in ("high", "low"))
    flags = {
        "zero-variance": row["zero_variance"],
        "truncated": row["truncated"],
        "loop": row["loops"],
        "duplicates": row["duplicates"],
        "incomplete": row["expected"] and newest is not None and row["runs"] < row["expected"] and row["step"] < newest,
        "nan": row["nans"],
        "mismatch": row["mismatch_max"] is not None and row["mismatch_max"] >= MISMATCH,
        "stale": row["stale"],
        "none-solved": scored and not most,
        "some-solved": most and not least,
        "all-solved": least,
    }
    shown = tidy({name: row[name] for name in _SHOWN_OF_GROUP})
    return {**shown, "flags": [name for name, true in flags.items() if true]}
