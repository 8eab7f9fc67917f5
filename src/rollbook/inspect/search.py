"""Search in prompts and responses: by phrase (SQLite's FTS5), by substring, and by regular expression.

Invariant: user input is data and never becomes FTS5 or SQL syntax; a regular expression runs in a child process that is
killed at a time limit. Texts are stored compressed, each prompt once, so the index stays smaller than the texts;
nothing is stored before the first search.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.core.checks import check_choice, check_float, check_int
from rollbook.inspect.workers import QueryTimeoutError, ServerBusyError

if TYPE_CHECKING:
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Source

MODES = ("phrase", "substring", "regex")
CONTEXT_LENGTH = 60
"""Characters shown on each side of a match."""
REGEX_SECONDS = 10.0
MAX_QUERY_LENGTH = 1000
MAX_TOTAL_TEXT = 2 << 30
"""Maximum number of characters in an index; of a larger run, the newest steps are kept."""
MAX_TEXT_LENGTH = 1 << 20
BATCH_SIZE = 128
_MAX_SEARCHES = 2
_FIRST_WAIT_SECONDS = 1.0

TABLES = (
    "CREATE TABLE bodies (n INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE prompt_bodies (p INTEGER PRIMARY KEY, prompt TEXT NOT NULL UNIQUE, body BLOB NOT NULL)",
)
"""Compressed text of each response, and of each prompt by its hash."""
_FULL_TEXT = (
    "CREATE VIRTUAL TABLE texts USING fts5(response, content='', tokenize='unicode61 remove_diacritics 0')",
    "CREATE VIRTUAL TABLE prompt_texts USING fts5(prompt, content='', tokenize='unicode61 remove_diacritics 0')",
)
_COUNTED = "(samples.removed_reason IS NULL OR samples.removed_reason NOT IN ('deleted', 'rewound'))"
_WORD = re.compile(r"[^\W_]+")
_QUOTED = re.compile(r'"([^"]*)"')
_UNSPACED_SCRIPTS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Scripts without spaces, in which FTS5 finds no words."""


def create_tables(write: sqlite3.Connection) -> bool:
    """Create the tables; return whether this SQLite has full-text search."""
    for sql in TABLES:
        write.execute(sql)
    try:
        for sql in _FULL_TEXT:
            write.execute(sql)
    except sqlite3.OperationalError:
        return False
    return True


def compress(text: str) -> bytes:
    """Compress a text."""
    return zlib.compress(text[:MAX_TEXT_LENGTH].encode("utf-8", "surrogatepass"), 1)


def decompress(body: bytes) -> str:
    """Decompress a text."""
    return zlib.decompress(body).decode("utf-8", "surrogatepass")


def text_contains(body: bytes, substring: str) -> int:
    """Return whether the compressed text `body` contains another, ignoring case.

    >>> text_contains(compress("Wait, no"), "wait")
    1
    """
    return int(substring.casefold() in decompress(body).casefold())


def remove_texts(write: sqlite3.Connection, ns: Sequence[int]) -> None:
    """Remove the texts of records; they are read again on the next search."""
    full_text = bool(write.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone())
    for n in ns:
        for table, key, sql in (
            ("bodies", "n", "SELECT n, body FROM bodies WHERE n = ?"),
            (
                "prompt_bodies",
                "p",
                "SELECT p, body FROM prompt_bodies WHERE prompt = (SELECT prompt FROM samples WHERE n = ?)",
            ),
        ):
            for row, body in write.execute(sql, (n,)).fetchall():
                if full_text:
                    name, column = ("texts", "response") if table == "bodies" else ("prompt_texts", "prompt")
                    write.execute(
                        f"INSERT INTO {name} ({name}, rowid, {column}) VALUES ('delete', ?, ?)",
                        (row, _clean_text(decompress(body))),
                    )
                write.execute(f"DELETE FROM {table} WHERE {key} = ?", (row,))
        write.execute("UPDATE samples SET searchable = 0 WHERE n = ?", (n,))


def _clean_text(text: str) -> str:
    """Return a text for FTS5: without NUL, which would end it, and lone surrogates, which SQLite cannot store."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def split_phrases(text: str) -> list[str]:
    """Split a query into phrases that must all match: quoted ones, and each unquoted word; without quotes, the whole
    query.

    >>> split_phrases('wait, "let me" check'), split_phrases("let me check")
    (['let me', 'wait', 'check'], ['let me check'])
    """
    quoted = [phrase for phrase in _QUOTED.findall(text) if _WORD.search(phrase)]
    if not quoted:
        return [text] if _WORD.search(text) else []
    return [*quoted, *_WORD.findall(_QUOTED.sub(" ", text))]


def _phrase_regex(phrase: str) -> str:
    """Return the regular expression that finds a phrase where FTS5 does."""
    words = r"[\W_]+".join(map(re.escape, _WORD.findall(phrase)))
    return rf"(?<![^\W_]){words}(?![^\W_])"


class Search:
    """Search over the texts of a source, which are read in the background from the first search on, newest step first.

    `search` returns immediately with matches in the texts read so far; `complete` is whether these are all texts.
    """

    def __init__(self, source: Source, index: Index) -> None:
        self.source = source
        self.index = index
        self.error: str | None = None
        """Why texts cannot be read, if they cannot."""
        self.max_wait: float | None = None
        """Seconds that a filter on texts waits until they are read; `None`: no limit."""
        self._first_step: int | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._idle = threading.Event()
        self._text_length = 0
        self._slots = threading.BoundedSemaphore(_MAX_SEARCHES)

    # --- filling ------------------------------------------------------------------------------------------------

    def start(self, step: int | None = None) -> None:
        """Start to read texts, those of `step` first."""
        with self._lock:
            self._first_step = step
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="rollbook-search", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set() and not self.index.closed:
            try:
                filled = self.fill()
                self.error = None
            except Exception as error:  # an error of a source must not end the search for good
                self.error = f"{type(error).__name__}: {error}"
                filled = 0
            if not filled:
                self._idle.set()
                self.index.wait(self.index.cursor, 2.0, self._closing.is_set)

    def fill(self) -> int:
        """Read the texts of one piece of the run; return the number of records."""
        if self._text_length >= MAX_TOTAL_TEXT:
            return 0
        first_step = "samples.step = ? DESC, " if self._first_step is not None else ""
        values = [] if self._first_step is None else [self._first_step]
        pending = self.index.query(
            "SELECT n, uid, prompt, removed_reason FROM samples WHERE searchable = 0 AND measured = 1 "
            f"ORDER BY {first_step}step DESC, n LIMIT {BATCH_SIZE}",
            values,
        )
        if not pending:
            return 0
        self._idle.clear()
        present = [row for row in pending if row[3] is None]
        texts = dict(
            zip([row[0] for row in present], read_texts(self.source, [row[1] for row in present]), strict=True)
        )
        with self.index.writing(quiet=True) as write:
            for n, _, prompt, _ in pending:
                prompt_text, response = texts.get(n, ("", ""))
                self._text_length += len(response)
                if response:
                    write.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (n, compress(response)))
                    if self.index.full_text:
                        write.execute(
                            "INSERT INTO texts (rowid, response) VALUES (?, ?)",
                            (n, _clean_text(response[:MAX_TEXT_LENGTH])),
                        )
                if prompt_text and prompt:
                    cursor = write.execute(
                        "INSERT INTO prompt_bodies (prompt, body) VALUES (?, ?) ON CONFLICT DO NOTHING",
                        (prompt, compress(prompt_text)),
                    )
                    if cursor.rowcount == 1:
                        self._text_length += len(prompt_text)
                        if self.index.full_text:
                            write.execute(
                                "INSERT INTO prompt_texts (rowid, prompt) VALUES (?, ?)",
                                (cursor.lastrowid, _clean_text(prompt_text[:MAX_TEXT_LENGTH])),
                            )
            write.executemany("UPDATE samples SET searchable = 1 WHERE n = ?", [(row[0],) for row in pending])
        return len(pending)

    def complete(self) -> bool:
        """Whether all texts are searchable."""
        return not self.index.query("SELECT 1 FROM samples WHERE searchable = 0 LIMIT 1")

    def finish(self) -> None:
        """Wait until the texts of all measured records are read; raise `QueryTimeoutError` after `max_wait` seconds."""
        self.start(self._first_step)
        end = math.inf if self.max_wait is None else time.monotonic() + self.max_wait
        while not self.complete():
            if time.monotonic() > end:
                done, total = self.index.query("SELECT SUM(searchable), COUNT(*) FROM samples")[0]
                raise QueryTimeoutError(
                    f"filter: only {done / total:.0%} of the texts are indexed so far; try again later"
                )
            if self._idle.wait(0.05):
                break  # the rest is not measured yet, or beyond the limit
        if self.error is not None:
            raise ValueError(f"filter: cannot read the texts: {self.error}")

    # --- searching ----------------------------------------------------------------------------------------------

    def search(
        self, q: str, mode: str = "phrase", limit: int = 50, step: int | None = None, *, seconds: float = REGEX_SECONDS
    ) -> dict[str, Any]:
        """Return records whose prompt or response matches, newest step first. A matching prompt is listed once per
        group.

        Args:
            q: The query.
            mode: `phrase`: words in sequence, ignoring case and punctuation; all quoted phrases must match.
                `substring`: any part of the text, ignoring case. `regex`: a Python regular expression.
            step: Search only this step.
            limit: Maximum number of matches.
            seconds: Time limit of a regular expression.
        """
        check_choice("mode", mode, MODES)
        check_int("limit", limit, 1)
        check_float("seconds", seconds, 0.0)
        if not isinstance(q, str) or not q.strip() or len(q) > MAX_QUERY_LENGTH:
            raise ValueError(f"q: got {str(q)[:40]!r}, expected 1 to {MAX_QUERY_LENGTH} characters")
        terms = split_phrases(q) if mode == "phrase" else []
        if mode == "phrase" and _UNSPACED_SCRIPTS.search(q):
            mode = "substring"
        elif mode == "phrase" and not terms:
            raise ValueError(f"q: got {q!r}, expected at least one word; use mode=substring to search for symbols")
        pattern, also, flags = q, list[str](), re.MULTILINE
        if mode == "substring":
            pattern, flags = re.escape(q), re.IGNORECASE
        elif mode == "phrase":
            (pattern, *also), flags = map(_phrase_regex, terms), re.IGNORECASE
        started = time.monotonic()
        total: int | None
        self.start(step)
        if not self.complete():
            self._idle.wait(_FIRST_WAIT_SECONDS)
        if mode == "phrase" and self.index.full_text:
            total, hits = self._search_phrases(terms, limit, step)
        else:
            total, hits = self._search_regex(pattern, also, flags, limit, step, seconds)
        return {
            "total": total,
            "complete": self.complete(),
            "milliseconds": round((time.monotonic() - started) * 1000, 1),
            "mode": mode,
            "rows": self._format_hits(hits),
        }

    def _format_hits(self, hits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = {}
        ns = [hit["n"] for hit in hits]
        for start in range(0, len(ns), 500):
            chunk = ns[start : start + 500]
            marks = ",".join("?" * len(chunk))
            for row in self.index.query(f"SELECT n, uid, gid, step, reward FROM samples WHERE n IN ({marks})", chunk):
                rows[row[0]] = row
        return [
            {
                **dict(zip(("uid", "gid", "step", "reward"), rows[hit["n"]][1:], strict=True)),
                "field": hit["field"],
                "snippet": {name: hit[name] for name in ("before", "match", "after")},
            }
            for hit in hits
            if hit["n"] in rows
        ]

    def _search_phrases(self, terms: Sequence[str], limit: int, step: int | None) -> tuple[int, list[dict[str, Any]]]:
        match = " AND ".join('"' + _clean_text(phrase).replace('"', '""') + '"' for phrase in terms)
        condition, values = ("AND samples.step = ?", (step,)) if step is not None else ("", ())
        condition += f" AND {_COUNTED}"
        responses = f"FROM texts JOIN samples ON samples.n = texts.rowid WHERE texts MATCH ? {condition}"
        prompts = (
            "FROM prompt_texts JOIN prompt_bodies ON prompt_bodies.p = prompt_texts.rowid "
            f"JOIN samples ON samples.prompt = prompt_bodies.prompt WHERE prompt_texts MATCH ? {condition}"
        )
        pattern = re.compile(_phrase_regex(terms[0]), re.IGNORECASE)
        with self.index.reading() as read:
            total = read.execute(f"SELECT COUNT(*) {responses}", (match, *values)).fetchone()[0]
            total += read.execute(f"SELECT COUNT(DISTINCT samples.gid) {prompts}", (match, *values)).fetchone()[0]
            hits = read.execute(
                f"SELECT samples.step, samples.n, 'response' {responses} ORDER BY samples.step DESC, samples.n LIMIT ?",
                (match, *values, limit),
            ).fetchall()
            hits += read.execute(
                f"SELECT samples.step, MIN(samples.n), 'prompt' {prompts} "
                "GROUP BY samples.gid ORDER BY samples.step DESC LIMIT ?",
                (match, *values, limit),
            ).fetchall()
            hits.sort(key=lambda hit: (-hit[0], hit[2] == "prompt", hit[1]))
            matches = []
            for _, n, field in hits[:limit]:
                sql = (
                    "SELECT body FROM bodies WHERE n = ?"
                    if field == "response"
                    else "SELECT body FROM prompt_bodies WHERE prompt = (SELECT prompt FROM samples WHERE n = ?)"
                )
                text = decompress(read.execute(sql, (n,)).fetchone()[0])
                span = pattern.search(text)
                start, stop = span.span() if span else (0, 0)
                shown = {
                    "before": text[max(0, start - CONTEXT_LENGTH) : start],
                    "match": text[start:stop],
                    "after": text[stop : stop + CONTEXT_LENGTH],
                }
                matches.append({"n": n, "field": field, **shown})
        return total, matches

    def _search_regex(
        self, pattern: str, also: list[str], flags: int, limit: int, step: int | None, seconds: float
    ) -> tuple[int | None, list[dict[str, Any]]]:
        job = {
            "path": self.index.path.as_uri(),
            "pattern": pattern,
            "also": also,
            "flags": int(flags),
            "step": step,
            "limit": limit,
            "context": CONTEXT_LENGTH,
            "seconds": seconds / 2,
        }
        if not self._slots.acquire(blocking=False):
            raise ServerBusyError(f"{_MAX_SEARCHES} searches are already running; try again later")
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("regex_worker.py"))],
                input=json.dumps(job) + "\n",
                capture_output=True,
                text=True,
                encoding="utf-8",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise QueryTimeoutError(
                f"q: {pattern[:80]!r} took longer than {seconds:g} seconds; simplify it, or search a single step"
            ) from None
        finally:
            self._slots.release()
        if done.returncode:
            raise ValueError(f"q: the search failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        lines = [json.loads(line) for line in done.stdout.split("\n") if line]
        if "error" in lines[-1]:
            raise ValueError(f"q: got {pattern[:80]!r}, expected a regular expression: {lines[-1]['error']}")
        return lines[-1]["total"], lines[:-1]

    def close(self) -> None:
        """Stop the background work."""
        self._closing.set()
        self.index.wake()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(10)


def read_texts(source: Source, uids: Sequence[str]) -> list[tuple[str, str]]:
    """Return prompt and response texts of records, from a book's columns or from trajectories."""
    from rollbook.inspect.sources import BookSource

    if isinstance(source, BookSource):
        return source.texts(uids)
    texts = []
    for trajectory in source.trajectories(uids):
        prompt = trajectory.text[: trajectory.prompt_end] if trajectory.prompt_text is None else trajectory.prompt_text
        response = (
            trajectory.text[trajectory.prompt_end :] if trajectory.response_text is None else trajectory.response_text
        )
        texts.append((prompt, response))
    return texts
