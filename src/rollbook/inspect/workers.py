"""Work that may hang (SQL, user regular expressions), in child processes that are killed at a time limit.

The child (`python -m rollbook.inspect.workers`) reads jobs from standard input, one line of JSON each, writes one line
per answer, and exits at the end of its input.

Invariant: when a call returns or raises, the work has ended: a child that exceeds its time or memory is killed, and the
next job gets a new one. Answers are strict JSON: no NaN, no number that loses digits. The child only reads.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from decimal import Decimal
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import RollbookError

if TYPE_CHECKING:
    from rollbook.inspect.trajectory import Json

MAX_ROWS = 10_000
MAX_BYTES = 16 << 20
"""Maximum size of an answer."""
_GRACE_SECONDS = 1.0
"""Extra time for a child to report that it was late."""
_START_SECONDS = 60.0
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of spreadsheet formulas, including full-width variants."""
_MAX_EXACT_INT = 2**53


class ServerBusyError(RollbookError, ValueError):
    """Raised when every worker is busy."""


class QueryTimeoutError(RollbookError, ValueError):
    """Raised when work was stopped at its time limit."""


class Workers:
    """A pool of child processes, started on demand and reused.

    Args:
        path: Path or URL for `open_source`, for SQL.
        children: Maximum number of child processes.
        memory: Maximum private memory of a child in bytes.

    >>> with Workers() as workers:
    ...     workers.mask(["call 555-0199 now"], [r"\\d{3}-\\d{4}"], seconds=20)
    ...     try:
    ...         workers.mask(["a" * 40 + "b"], ["(a+)+c"], seconds=0.2)
    ...     except QueryTimeoutError as error:
    ...         print(error)
    ['call ████████ now']
    stopped after 0.2 seconds
    """

    def __init__(self, path: str | None = None, *, children: int = 2, memory: int = 2 << 30) -> None:
        self.path = path
        self.memory = memory
        self._slots = threading.BoundedSemaphore(children)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False

    def sql(self, query: str, *, seconds: float = 30.0, rows: int = 1000) -> dict[str, Any]:
        """Run a read-only statement; return {"columns": [...], "rows": [[...]], "truncated": bool}."""
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"query: got {query!r}, expected one SELECT")
        if len(query) > 100_000:
            raise ValueError(f"query: got {len(query)} characters, expected at most 100000")
        seconds = check_float("seconds", seconds, 0.0)
        rows = min(check_int("rows", rows, 1), MAX_ROWS)
        job = {"job": "sql", "path": self.path, "query": query, "seconds": seconds, "rows": rows}
        table: dict[str, Any] = self._run(job, seconds)
        return table

    def mask(self, texts: Sequence[str], patterns: Sequence[str], *, seconds: float = 30.0) -> list[str]:
        """Replace each character of every match of a pattern in the texts by █."""
        masked: list[str] = self._run({"job": "mask", "texts": list(texts), "patterns": list(patterns)}, seconds)
        return masked

    def close(self) -> None:
        """End the child processes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.close()

    def _run(self, job: dict[str, Any], seconds: float) -> Any:
        if not self._slots.acquire(blocking=False):
            raise ServerBusyError("other queries are running; try again later")
        try:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None or not child.alive():
                child = _Child()
            try:
                answer = child.ask(job, seconds, self.memory)
            except BaseException:
                child.kill()
                raise
            with self._lock:
                if not self._closed:
                    self._idle.append(child)
                    child = None
            if child is not None:
                child.kill()
        finally:
            self._slots.release()
        if "error" in answer:
            raise (QueryTimeoutError if answer.get("late") else ValueError)(answer["error"])
        return answer["found"]


class _Child:
    """A child process that is ready for a job."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # -P: do not import from the current folder, which may be untrusted.
            [sys.executable, "-P", "-m", "rollbook.inspect.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the server, which then ends the child
        )
        self.buffer = b""
        try:
            # The time limit of a job does not include the start.
            self._line(time.monotonic() + _START_SECONDS, None)
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, job: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        until = time.monotonic() + seconds + (_GRACE_SECONDS if job["job"] == "sql" else 0)
        stdin = self.process.stdin
        if stdin is None:
            raise ValueError("the child has no input")
        # A thread writes, since a child that reads slowly must not delay the time limit.
        line = json.dumps({**job, "limit": seconds}).encode() + b"\n"
        writer = threading.Thread(target=_write_line, args=(stdin, line), daemon=True)
        writer.start()
        try:
            answer: dict[str, Any] = json.loads(self._line(until, memory))
        except QueryTimeoutError:
            raise QueryTimeoutError(f"stopped after {seconds:g} seconds") from None
        return answer

    def _line(self, until: float, memory: int | None) -> bytes:
        """Return the next line of the child's output, while checking its memory."""
        stdout = self.process.stdout
        if stdout is None:
            raise ValueError("the child has no output")
        pieces = [self.buffer]
        # Not select(), which fails for file descriptors from 1024 on.
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in pieces[-1]:
                left = until - time.monotonic()
                if left <= 0:
                    raise QueryTimeoutError("stopped")
                if memory is not None and _private_memory(self.process.pid) > memory:
                    raise ValueError(f"stopped: used more than {memory >> 20} MB of memory")
                if selector.select(min(left, 0.05)):
                    piece = os.read(stdout.fileno(), 1 << 20)
                    if not piece:
                        raise ValueError("the worker process ended without an answer (possibly out of memory)")
                    pieces.append(piece)
        line, _, self.buffer = b"".join(pieces).partition(b"\n")
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _write_line(stream: IO[bytes], line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        view = memoryview(line)
        while view:
            view = view[stream.write(view) :]


def _private_memory(pid: int) -> int:
    """Return the private memory of a process in bytes; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            match = re.search(rb"RssAnon:\s+(\d+) kB", file.read())
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0


# --- the child ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer jobs until the end of the input."""
    # Output of libraries must not be read as an answer.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(2, sys.stdout.fileno())
    sources: dict[str, Any] = {}

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        out.flush()

    send({})
    for line in sys.stdin.buffer:
        try:
            job = json.loads(line)
            # The parent kills this in time; if it is dead, the system does.
            signal.setitimer(signal.ITIMER_REAL, job["limit"] + 2 * _GRACE_SECONDS)
            send({"found": _run_job(job, sources)})
        except Exception as error:
            late = type(error).__name__ == "QueryTimeoutError"  # by name: its module loads duckdb
            message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            send({"error": message or type(error).__name__, "late": late})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _run_job(job: dict[str, Any], sources: dict[str, Any]) -> Any:
    if job["job"] == "mask":
        return _mask_texts(job["texts"], job["patterns"])
    path = job["path"]
    if path not in sources:
        from rollbook.inspect.sources import open_source

        sources[path] = open_source(path)
    table = sources[path].sql(job["query"], seconds=job["seconds"], rows=job["rows"])
    rows: list[list[Any]] = []
    size = 0
    truncated = bool(table["truncated"])
    for row in table["rows"]:
        cells = [to_json_cell(value) for value in row]
        size += len(json.dumps(cells))
        if size > MAX_BYTES:
            truncated = True
            break
        rows.append(cells)
    return {"columns": [str(name) for name in table["columns"]], "rows": rows, "truncated": truncated}


def _mask_texts(texts: list[str], patterns: list[str]) -> list[str]:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"redact: {pattern[:80]!r} is not a regular expression: {error}") from None
    return [_mask_text(text, compiled) for text in texts]


def _mask_text(text: str, patterns: list[re.Pattern[str]]) -> str:
    # All patterns are matched against the original text, since matches may overlap.
    spans = sorted(match.span() for pattern in patterns for match in pattern.finditer(text))
    pieces = []
    masked_until = 0
    for start, stop in spans:
        if stop > masked_until:
            pieces += [text[masked_until:start], "█" * (stop - max(start, masked_until))]
            masked_until = stop
    return "".join(pieces) + text[masked_until:]


def to_json_cell(value: Any) -> Any:
    """Convert a SQL value to JSON without visible loss: NaN and infinities as names, large integers as text, bytes as
    hex, times in ISO format.

    >>> to_json_cell([1, 2**60, float("nan"), b"ab", {"x": None}])
    [1, '1152921504606846976', 'NaN', '0x6162', {'x': None}]
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -_MAX_EXACT_INT <= value <= _MAX_EXACT_INT else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Decimal):
        rounded = float(value)
        return rounded if math.isfinite(rounded) and Decimal(repr(rounded)) == value else str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "0x" + bytes(value).hex()
    if isinstance(value, dict):
        return {str(key): to_json_cell(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_cell(entry) for entry in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def format_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Format a table as CSV; text cells that a spreadsheet would read as formulas are prefixed with a quote.

    >>> format_csv(["answer", "reward"], [["=1+1", -0.5], ["a,b", None]]).splitlines()
    [b'answer,reward', b"'=1+1,-0.5", b'"a,b",']
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([_csv_cell(name) for name in columns])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return text.getvalue().encode()


def _csv_cell(value: Json) -> Any:
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return value


if __name__ == "__main__":
    main()
