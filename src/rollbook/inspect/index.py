"""`Index`: samples, groups and steps of a run in a temporary SQLite file, for the viewer, the doctor and the command
line.

Invariant: the index is derived from the source; the file is removed when the index is closed and when the process ends.
One thread writes at a time; readers see complete transactions and never wait.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollbook.inspect import measures, search
from rollbook.inspect.serialization import replace_surrogates
from rollbook.inspect.trajectory import LENSES, Json

if TYPE_CHECKING:
    from rollbook.inspect.trajectory import Trajectory


# --- scales of the lenses -------------------------------------------------------------------------------------------

SCALE_TOKENS = 50_000
"""Number of tokens after which the range of a lens is final."""
PIECE_TOKENS = 2048
"""Maximum number of tokens sampled from one piece of a run, so that the first pieces do not dominate."""
_MIN_VALUES = 8


class Scales:
    """The 1st and 99th percentile of each lens over a random sample of trained tokens.

    Sequential ranges start at 0 if the lens cannot be negative (entropy, KL, weight); diverging ones are symmetric
    about their middle (for the ratio, whose middle is 1, in factors).

    >>> scales = Scales()
    >>> scales.offer({"entropy": np.linspace(0, 2, 101), "advantage": np.linspace(-1, 3, 101)}, np.ones(101, bool))
    True
    >>> scales.ranges["entropy"], scales.ranges["advantage"]
    ((0.0, 1.98), (-2.96, 2.96))
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._values: dict[str, list[NDArray[np.float64]]] = {}
        self._counts: dict[str, int] = {}
        self._range_counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self.ranges: dict[str, tuple[float, float]] = {}
        self.quantiles: dict[str, list[float]] = {}
        """101 quantiles (0% to 100%) of the sampled values of each lens."""

    @property
    def full(self) -> bool:
        """Whether the ranges of all lenses are final."""
        return bool(self._counts) and min(self._counts.values()) >= SCALE_TOKENS

    def offer(self, lenses: Mapping[str, NDArray[Any]], keep: NDArray[np.bool_]) -> bool:
        """Sample tokens from arrays [T] by lens where `keep` [T] is true; return whether a range changed."""
        with self._lock:
            names = [name for name in lenses if name in LENSES and self._counts.get(name, 0) < SCALE_TOKENS]
            if not names:
                return False
            places = np.flatnonzero(keep)
            if len(places) > PIECE_TOKENS:
                places = places[self._random.integers(0, len(places), PIECE_TOKENS)]
            changed = False
            for name in names:
                values = np.asarray(lenses[name])[places].astype(np.float64)
                values = values[np.isfinite(values)]
                if not len(values):
                    continue
                self._values.setdefault(name, []).append(values)
                count = self._counts[name] = self._counts.get(name, 0) + len(values)
                if (
                    count >= min(SCALE_TOKENS, max(_MIN_VALUES, 2 * self._range_counts.get(name, 0)))
                    or name not in self.ranges
                ):
                    self._range_counts[name] = count
                    seen = np.concatenate(self._values[name])
                    self.ranges[name] = _scale_range(name, seen)
                    self.quantiles[name] = np.quantile(seen, np.linspace(0, 1, 101)).round(6).tolist()
                    changed = True
                if count >= SCALE_TOKENS:
                    self._values[name].clear()
            return changed

    def as_dict(self) -> dict[str, Any]:
        """Return ranges and quantiles as JSON."""
        with self._lock:
            return {
                name: {"low": low, "high": high, "quantiles": self.quantiles[name]}
                for name, (low, high) in self.ranges.items()
            }


def _scale_range(name: str, values: NDArray[np.float64]) -> tuple[float, float]:
    lens = LENSES[name]
    low, high = (round(float(bound), 6) for bound in np.quantile(values, (0.01, 0.99)))
    if lens.middle is None:
        if low >= 0:
            low = 0.0
        elif high <= 0:
            high = 0.0
        return (low, high) if high > low else (low, low + 1.0)
    if name == "ratio":
        far = max(abs(math.log(max(bound, 1e-6))) for bound in (low, high)) or math.log(2)
        return round(math.exp(-far), 6), round(math.exp(far), 6)
    far = max(abs(low - lens.middle), abs(high - lens.middle)) or 1.0
    return lens.middle - far, lens.middle + far


SqlValues = Sequence[Any] | Mapping[str, Any]

# --- the index ------------------------------------------------------------------------------------------------------

_MAX_READERS = 8
_SQL_CHUNK = 500


class Column(NamedTuple):
    """A column of `samples`, for the schema, filters and pages."""

    name: str
    type: str
    """`number`, `text` or `flag`; "" is internal and cannot be filtered."""
    sql: str
    label: str = ""
    help: str = ""


_COLUMNS = (
    Column("n", "", "INTEGER PRIMARY KEY", "n", "Order of arrival."),
    Column("uid", "text", "TEXT NOT NULL UNIQUE", "Sample", "Id of the record."),
    Column("gid", "text", "TEXT NOT NULL", "Group", "The samples of one prompt in one step."),
    Column("step", "number", "INTEGER NOT NULL", "Step", "The training step."),
    Column("batch", "text", "TEXT NOT NULL DEFAULT ''", "Batch", "The first part of the id."),
    Column("task", "text", "TEXT NOT NULL DEFAULT ''", "Task", "The second part of the id."),
    Column("run", "number", "INTEGER NOT NULL DEFAULT 0", "Run", "Index of the sample within its task."),
    Column(
        "turn", "number", "INTEGER NOT NULL DEFAULT 0", "Part", "Index of the part, for runs stored in several parts."
    ),
    Column("prompt", "text", "TEXT NOT NULL DEFAULT ''", "Prompt", "Text of the prompt with ~, its id with =."),
    Column("evaluation", "flag", "INTEGER NOT NULL DEFAULT 0", "Evaluation", "Evaluation sample, never trained on."),
    Column("admitted", "number", "REAL", "Admitted", "Arrival time in seconds since 1970."),
    Column("reward", "number", "REAL", "Reward", "Reward used for training."),
    Column("scored", "number", "INTEGER NOT NULL DEFAULT 0", "Scored", "0: not scored, 1: a number, 2: NaN."),
    Column("parts", "", "TEXT NOT NULL DEFAULT '{}'", "Numbers", "Named numbers: part.NAME and metric.NAME."),
    Column("advantage", "number", "REAL", "Advantage", "Mean over trained tokens."),
    Column("length", "number", "INTEGER NOT NULL DEFAULT 0", "Tokens", "Tokens of prompt and response."),
    Column("prompt_tokens", "number", "INTEGER NOT NULL DEFAULT 0", "Prompt", "Tokens of the prompt."),
    Column("response_tokens", "number", "INTEGER NOT NULL DEFAULT 0", "Length", "Tokens of the response."),
    Column("trained_tokens", "number", "INTEGER NOT NULL DEFAULT 0", "Trained", "Number of trained tokens."),
    Column("version_min", "number", "INTEGER", "Oldest policy", "Oldest policy version that sampled a token."),
    Column("version_max", "number", "INTEGER", "Newest policy", "Newest policy version that sampled a token."),
    Column(
        "staleness",
        "number",
        "INTEGER",
        "Lag",
        "Policy versions between sampling and training (or arrival, in a run without training).",
    ),
    Column("finish_reason", "text", "TEXT", "Finish", "Finish reason of the engine."),
    Column("status", "text", "TEXT NOT NULL DEFAULT ''", "Status", "finished, truncated, aborted, error, unfinished."),
    Column("kind", "text", "TEXT NOT NULL DEFAULT ''", "Kind", "single_turn, multi_turn or dpo."),
    Column("group_size", "number", "INTEGER", "Group size", "Expected number of samples of the group."),
    Column("parent", "text", "TEXT", "Parent", "Record that it is derived from."),
    Column("entropy", "number", "REAL", "Entropy", "Mean over trained tokens."),
    Column("entropy_max", "number", "REAL", "Max entropy", "Maximum over trained tokens."),
    Column("logprob", "number", "REAL", "Log-prob", "Mean over trained tokens."),
    Column("kl", "number", "REAL", "KL", "KL to the reference policy (k3 estimate), mean over trained tokens."),
    Column("kl_max", "number", "REAL", "Max KL", "Maximum over trained tokens."),
    Column(
        "mismatch", "number", "REAL", "Train-inference mismatch", "Mean |old_logprobs - logprobs| of trained tokens."
    ),
    Column("mismatch_max", "number", "REAL", "Max train-inference mismatch", "Maximum over trained tokens."),
    Column(
        "nans",
        "number",
        "INTEGER",
        "NaN/Inf",
        "Number of NaN/Inf values: per-token values of trained tokens, and the reward.",
    ),
    Column("repetition", "number", "REAL", "Repetition", "Share of the response that is repetition, 0 to 1."),
    Column("loop_at", "number", "INTEGER", "Loop at", "Response token where a final repetition loop starts."),
    Column("turns", "number", "INTEGER", "Turns", "Number of assistant turns."),
    Column("tool_calls", "number", "INTEGER", "Tool calls", "Number of tool calls."),
    Column("images", "number", "INTEGER", "Images", "Number of images."),
    Column("digest", "", "INTEGER", "Digest", "Hash of the response's tokens."),
    Column("duplicate", "flag", "INTEGER NOT NULL DEFAULT 0", "Duplicate", "Identical to another sample of its group."),
    Column("opening", "text", "TEXT NOT NULL DEFAULT ''", "Prompt text", "First 240 characters of the user message."),
    Column("closing", "text", "TEXT NOT NULL DEFAULT ''", "Answer text", "Last 240 characters of the response."),
    Column("kept", "text", "TEXT", "Kept", "Why the saver selected it."),
    Column("state", "text", "TEXT NOT NULL DEFAULT ''", "State", "waiting, leased, trained, dropped, evaluation."),
    Column("reason", "text", "TEXT", "Reason", "Why it was dropped."),
    Column("trained_step", "number", "INTEGER", "Trained in", "Last step that trained on it."),
    Column("removed_reason", "text", "TEXT", "Removed", "Why its data was removed."),
    Column("measured", "flag", "INTEGER NOT NULL DEFAULT 0", "Measured", "Whether its tokens have been measured."),
    Column("searchable", "", "INTEGER NOT NULL DEFAULT 0", "Searchable", "Whether its texts are indexed."),
    Column("moment", "", "INTEGER", "Moment", "Ledger event at which its staleness is measured."),
)
COLUMNS: dict[str, Column] = {column.name: column for column in _COLUMNS}
"""Columns of `samples`, which has one row per record.

>>> COLUMNS["reward"].type
'number'
"""
INTERNAL_COLUMNS = ("n", "admitted", "batch", "digest", "searchable", "moment")
"""Columns that no answer contains."""
ANSWER_COLUMNS = tuple(name for name in COLUMNS if name not in INTERNAL_COLUMNS)

VOID_REASONS = ("deleted", "rewound")
"""Values of `removed_reason` for records that were taken out of the run and do not count."""
COUNTED = "(removed_reason IS NULL OR removed_reason NOT IN ('deleted', 'rewound'))"
"""Condition for samples that summaries count."""

_COVERED_COLUMNS = (
    *("step", "gid", "evaluation", "removed_reason", "reward", "scored", "response_tokens"),
    *("trained_tokens", "advantage"),
    *("entropy", "kl", "kl_max", "mismatch", "mismatch_max", "staleness", "status", "state", "repetition", "nans"),
    *("duplicate", "tool_calls", "images", "run", "turn"),
)
"""Columns that most filters and orders use. A covering index over them is read instead of the table, whose rows contain
texts and are several times longer. An index on the reward alone would make SQLite read rows in random order.
"""
_SCHEMA = (
    f"CREATE TABLE samples ({', '.join(f'{column.name} {column.sql}' for column in _COLUMNS)})",
    f"CREATE INDEX samples_step ON samples ({', '.join(_COVERED_COLUMNS)})",
    "CREATE INDEX samples_gid ON samples (gid, digest)",
    "CREATE INDEX samples_prompt ON samples (prompt, step)",
    "CREATE INDEX samples_unmeasured ON samples (n) WHERE measured = 0",
    "CREATE INDEX samples_unjudged ON samples (n) "
    "WHERE staleness IS NULL AND version_min IS NOT NULL AND moment IS NOT NULL",
    "CREATE INDEX samples_unsearched ON samples (step, n) WHERE searchable = 0",
    *measures.TABLES,
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
)


class Index:
    """Samples, groups and steps of a run as tables. `query` reads; `writing` and the methods built on it write.

    >>> index = Index()
    >>> before = index.cursor
    >>> index.put([{"n": 1, "uid": "4/7/0/0/a", "gid": "4/7", "step": 4, "reward": 0.5, "scored": 1}])
    >>> index.query("SELECT uid, reward FROM samples WHERE step = ?", [4]), index.cursor > before
    ([('4/7/0/0/a', 0.5)], True)
    >>> index.update_summaries()
    {4}
    >>> index.query("SELECT step, n FROM groups")
    [(4, 1)]
    >>> index.close()
    >>> index.path.exists()
    False
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        temporary = tempfile.mkdtemp(prefix="rollbook-view-", dir=folder)
        self._remove = weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        self.path = Path(temporary) / "index.sqlite"
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._closed = False
        # Starts at the time, so that cursors increase across restarts of the viewer.
        self._cursor = int(time.time() * 1000)
        self._gids: set[str] = set()
        self._steps: set[tuple[int, int]] = set()
        self._summarized_at = 0.0
        self.scales = Scales()
        """Ranges of the lenses; also stored as the fact "scales"."""
        self._writer = self._connect("rwc")
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.execute("PRAGMA synchronous=OFF")
        measures.register_functions(self._writer)
        with self.writing() as write:
            for sql in _SCHEMA:
                write.execute(sql)
            self.full_text = search.create_tables(write)
            """Whether this SQLite has full text search."""

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=60
        )
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cache_size=-32768")
        connection.create_function("contains", 2, _contains, deterministic=True)
        connection.create_function("text_contains", 2, search.text_contains, deterministic=True)
        return connection

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """Number that increases with every change."""
        return self._cursor

    @property
    def closed(self) -> bool:
        """Whether the index is closed."""
        return self._closed

    @contextlib.contextmanager
    def reading(self, seconds: float | None = None) -> Iterator[sqlite3.Connection]:
        """Yield a read-only connection that sees one state of the index; statements longer than `seconds` raise
        `sqlite3.OperationalError`.
        """
        if self._closed:
            raise ValueError("index: already closed")
        try:
            connection = self._readers.get_nowait()
        except queue.Empty:
            connection = self._connect("ro")
            connection.execute("PRAGMA query_only=ON")
        try:
            if seconds is not None:
                end = time.monotonic() + seconds
                connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.set_progress_handler(None, 0)
                connection.execute("ROLLBACK")
        finally:
            if self._closed or self._readers.qsize() >= _MAX_READERS:
                connection.close()
            else:
                self._readers.put(connection)

    def query(self, sql: str, values: SqlValues = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a read-only statement."""
        with self.reading() as read:
            return read.execute(sql, values).fetchall()

    def rows(self, sql: str, values: SqlValues = ()) -> list[dict[str, Any]]:
        """Return all rows of a read-only statement as dicts."""
        with self.reading() as read:
            return fetch_dicts(read.execute(sql, values))

    def fact(self, key: str, default: Json = None) -> Any:
        """Return the value stored under a key."""
        rows = self.query("SELECT value FROM facts WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else default

    # --- writing ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, quiet: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose changes become visible together and raise the cursor (unless `quiet`); an error
        rolls back.
        """
        with self._lock:
            if self._closed:
                raise ValueError("index: already closed")
            connection = self._writer
            connection.execute("BEGIN IMMEDIATE")
            changes_before = connection.total_changes
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            if quiet or connection.total_changes == changes_before:
                return
            with self._changed:
                self._cursor += 1
                self._changed.notify_all()

    def set_fact(self, key: str, value: Mapping[str, Any] | Sequence[Any] | float | None) -> None:
        """Store a JSON value under a key."""
        with self.writing() as write:
            write.execute(
                "INSERT INTO facts VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value "
                "WHERE value <> excluded.value",
                (key, json.dumps(value)),
            )

    def declare(self, names: Iterable[str]) -> None:
        """Add names to the declared reward parts."""
        declared = self.fact("reward_parts", [])
        new = [name for name in dict.fromkeys(names) if name not in declared]
        if new:
            self.set_fact("reward_parts", [*declared, *new])

    def put(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows of `samples` (with `uid`, `gid` and `step`), or update columns of existing rows.

        Rows of one call with the same columns are written together. If an id is reused, as after a rewind, the older
        row keeps its number and gets another id.
        """
        rows_by_columns: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for row in rows:
            rows_by_columns.setdefault(tuple(row), []).append(row)
        with self.writing() as write:
            for names, row_values in rows_by_columns.items():
                ns = [row["n"] for row in row_values]
                self._mark_changed(write, ns)
                others = [name for name in names if name != "n"]
                if "uid" in names:
                    self._release_ids(write, [(row["uid"], row["n"]) for row in row_values])
                    update = ", ".join(f"{name} = excluded.{name}" for name in others)
                    sql = (
                        f"INSERT INTO samples ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)}) "
                        f"ON CONFLICT (n) DO UPDATE SET {update}"
                    )
                else:
                    sql = f"UPDATE samples SET {', '.join(f'{name} = :{name}' for name in others)} WHERE n = :n"
                try:
                    write.executemany(sql, row_values)
                except UnicodeEncodeError:
                    # Lone surrogates, which SQLite cannot store.
                    write.executemany(
                        sql,
                        [
                            {
                                name: replace_surrogates(value) if isinstance(value, str) else value
                                for name, value in row.items()
                            }
                            for row in row_values
                        ],
                    )
                self._mark_changed(write, ns)

    def _release_ids(self, write: sqlite3.Connection, ids: Sequence[tuple[str, int]]) -> None:
        numbers = dict(ids)
        for chunk in _chunks(list(numbers)):
            marks = ",".join("?" * len(chunk))
            for uid, n in write.execute(f"SELECT uid, n FROM samples WHERE uid IN ({marks})", chunk).fetchall():
                if numbers[uid] != n:
                    write.execute("UPDATE samples SET uid = ? WHERE n = ?", (f"{uid}~{n}", n))

    def remove(self, ns: Sequence[int]) -> None:
        """Remove rows."""
        with self.writing() as write:
            self._mark_changed(write, ns)
            search.remove_texts(write, ns)
            write.executemany("DELETE FROM samples WHERE n = ?", [(n,) for n in ns])

    def forget(self, ns: Sequence[int]) -> None:
        """Remove the texts of changed records; they are indexed again later."""
        with self.writing() as write:
            search.remove_texts(write, ns)

    def _mark_changed(self, write: sqlite3.Connection, ns: Sequence[int]) -> None:
        """Mark groups and steps to be summarized again."""
        for chunk in _chunks(ns):
            marks = ",".join("?" * len(chunk))
            for gid, step, evaluation in write.execute(
                f"SELECT DISTINCT gid, step, evaluation FROM samples WHERE n IN ({marks})", chunk
            ):
                self._gids.add(gid)
                self._steps.add((step, evaluation))

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add, or measure again, `Trajectory`s in order of arrival."""
        seen = {*self.fact("tokenized", []), *(trajectory.tokenized for trajectory in trajectories)}
        self.set_fact("tokenized", sorted(seen))
        self.declare(name for trajectory in trajectories for name in trajectory.declared)
        with self._lock:
            numbers: dict[str, int] = {}
            for chunk in _chunks([trajectory.uid for trajectory in trajectories]):
                marks = ",".join("?" * len(chunk))
                numbers.update(
                    self._writer.execute(f"SELECT uid, n FROM samples WHERE uid IN ({marks})", chunk).fetchall()
                )
            (last,) = self._writer.execute("SELECT COALESCE(MAX(n), 0) FROM samples").fetchone()
            rows = []
            for trajectory in trajectories:
                if trajectory.uid not in numbers:
                    last += 1
                    numbers[trajectory.uid] = last
                rows.append({"n": numbers[trajectory.uid], **measures.measure_trajectory(trajectory)})
            self.put(rows)
        measures.update_scales(self, trajectories)

    # --- summaries ----------------------------------------------------------------------------------------------

    def update_summaries(self, min_seconds: float = 0.0) -> set[int]:
        """Summarize the groups and steps that changed since the last call; return the steps.

        Args:
            min_seconds: Do nothing if the last call was less than this many seconds ago.
        """
        if not self._steps or time.monotonic() - self._summarized_at < min_seconds:
            return set()
        with self._lock:
            gids, steps = self._gids, self._steps
            self._gids, self._steps = set(), set()
            try:
                with self.writing() as write:
                    changed = measures.update_summaries(write, gids, steps, self._cursor + 1)
            except BaseException:
                self._gids |= gids
                self._steps |= steps
                raise
            self._summarized_at = time.monotonic()
        return {step for step, _ in changed}

    def wait(self, cursor: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a change after `cursor`; return whether there was one within `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            while self._cursor <= cursor and not self._closed and not stop():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return self._cursor > cursor

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._changed.notify_all()

    # --- ending -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections and remove the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._writer.close()
        while True:
            try:
                self._readers.get_nowait().close()
            except queue.Empty:
                break
        self.wake()
        self._remove()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.close()


def fetch_dicts(answer: sqlite3.Cursor) -> list[dict[str, Any]]:
    """Return the rows of a statement as dicts."""
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer]


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), _SQL_CHUNK):
        yield values[start : start + _SQL_CHUNK]


def _contains(text: str | float | None, substring: str | float) -> int | None:
    """Return whether a text contains another, ignoring case; `None` without a text."""
    return None if text is None else int(str(substring).casefold() in str(text).casefold())
