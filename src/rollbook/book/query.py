"""SQL over Arrow tables that are loaded column by column, in a DuckDB that can read them and do nothing else.

Invariant: a query sees the sources it was given and no file, network, extension, environment variable or Python
object; it changes nothing; when `run_query` returns or raises, it has stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset as ds

from rollbook.book.sql_columns import Result, retyped
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import RollbookError

_READS = "SELECT, WITH, FROM, VALUES, PIVOT, EXPLAIN, DESCRIBE, SHOW or SUMMARIZE"
_LARGE_PIECE = 8 << 20
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


class QueryError(RollbookError, ValueError):
    """The query is not allowed, does not match the tables, or failed."""


class QueryTimeoutError(QueryError):
    """The query exceeded its time limit."""


class Source(Protocol):
    """A table that can be loaded in part. Every load of one source gives the same rows in the same order.

    DuckDB answers `count(*)` with the first column, so that a cheap one stands there best. Names that differ in case
    only are one name in SQL: of `a` and `A` the second is called `A_1` there.
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns there are; asked for by every query, so it should cost nothing."""

    def load(self, columns: list[str]) -> pa.Table:
        """These columns, of the types that `schema` says; mapped memory will do, nothing is written on it."""


def run_query(
    query: str,
    sources: Mapping[str, Source],
    *,
    parameters: Sequence[Any] | Mapping[str, Any] | None = None,
    memory: str | int = "1GB",
    seconds: float = 60.0,
    threads: int | None = None,
    max_rows: int | None = None,
) -> Result:
    """What one reading statement of DuckDB's SQL says of the sources, each a table under its name.

    `parameters`: values for `?` and `$1`, or by name for `$name`. `memory`: what DuckDB may use, as "1GB" or in bytes,
    for all queries of this process that give the same limit; the result, which is not part of it, may be as large
    again. Nothing is spilled to disk. `seconds`: after which the query is stopped with `QueryTimeoutError` (one that is
    inside a single call of a function is stopped when that returns). `threads`: up to 8 by default. `max_rows`: stop
    after so many rows; `Result.more` then says whether there are more.

    Anything but one reading statement, and whatever DuckDB refuses, raises `QueryError`; what a source's `load`
    raises comes through as it is.

    >>> class Rewards:
    ...     schema = pa.schema([("task", pa.string()), ("reward", pa.float64()), ("tokens", pa.list_(pa.int32()))])
    ...     def load(self, columns):
    ...         print("loads", columns)
    ...         every = {"task": ["a", "a", "b"], "reward": [0.0, 1.0, 1.0], "tokens": [[1], [1, 2], [3]]}
    ...         return pa.table(every, self.schema).select(columns)
    >>> run_query("select task, avg(reward) as mean from runs group by task order by task", {"runs": Rewards()})
    loads ['task', 'reward']
    task  mean
    a      0.5
    b      1.0
    >>> try:
    ...     run_query("copy runs to 'runs.csv'", {"runs": Rewards()})
    ... except QueryError as error:
    ...     print(error)
    query: got COPY, expected one statement that reads: SELECT, WITH, FROM, VALUES, PIVOT, EXPLAIN, DESCRIBE, SHOW or
    SUMMARIZE
    """
    duckdb = _duckdb()
    if not isinstance(query, str) or any("\ud800" <= letter <= "\udfff" for letter in query):
        raise QueryError(f"query: got {query!r}, expected text")
    if isinstance(parameters, (str, bytes)):
        raise QueryError(f"parameters: got {parameters!r}, expected a list of values or a dict")
    limit = _bytes(memory)
    seconds = check_float("seconds", seconds, 0.0)
    threads = min(8, os.cpu_count() or 1) if threads is None else check_int("threads", threads, 1)
    if max_rows is not None:
        max_rows = check_int("max_rows", max_rows)
    lower = [name.lower() for name in sources]
    if len(set(lower)) != len(lower):
        raise QueryError(f"sources: got {', '.join(sources)}, of which two are one name in SQL")

    tables: dict[str, _Table] = {}
    with _closing(tables), _connection(limit, threads) as connection, _Watch(connection, seconds) as watch:
        try:
            _check_reads(query, connection)
            tables.update((name, _Table(name, source, watch)) for name, source in sources.items())
            for name, table in tables.items():
                connection.register(name, table)
            connection.execute("begin transaction read only")
            if parameters is not None and not isinstance(parameters, Mapping):
                parameters = list(parameters)
            reader = connection.sql(query, params=parameters).to_arrow_reader(8192)
            return _collect(reader, limit, max_rows, watch)
        except RuntimeError as error:
            # As such DuckDB shows the user's Ctrl-C while it computes.
            if str(error) == "Query interrupted":
                raise KeyboardInterrupt from None
            raise
        # Once rows flow, DuckDB's errors come through Arrow's stream, as OSError or one of Arrow's own.
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            failure = next((table.failure for table in tables.values() if table.failure is not None), None)
            if failure is not None:
                raise failure from None
            if watch.expired:
                raise QueryTimeoutError(f"query: stopped after {seconds:g} seconds") from None
            raise QueryError(_explain(error, sources, limit)) from None


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise ImportError("SQL over a book needs DuckDB: pip install 'rollbook[sql]'") from None
    # Before 2.0 comparisons that are pushed into an Arrow scan lose NaN, and scans take raw pointers.
    if int(duckdb.__version__.split(".")[0]) < 2:
        raise ImportError(f"SQL over a book needs DuckDB 2.0 or later, not {duckdb.__version__}: pip install -U duckdb")
    return duckdb


def _bytes(memory: str | int) -> int:
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if found is None or (found[3] and not found[2]):
            raise ValueError(f"memory: got {memory!r}, expected a size such as '1GB' or a number of bytes")
        unit = _UNITS[found[2].upper()]
        memory = int(float(found[1]) * (1024 ** list(_UNITS).index(found[2].upper()) if found[3] else unit))
    return check_int("memory", memory, 1)


# --- the connection ---------------------------------------------------------------------------------------------


class _Engine:
    """A DuckDB instance, kept because making one takes 20 ms; queries run on connections of their own."""

    def __init__(self, memory: int, threads: int) -> None:
        self.users = 0
        # The last word locks the others: no query can change them.
        self.main = _duckdb().connect(
            ":memory:",
            config={
                "enable_external_access": "false",
                "autoload_known_extensions": "false",
                "autoinstall_known_extensions": "false",
                "allow_community_extensions": "false",
                "allow_persistent_secrets": "false",
                "python_enable_replacements": "false",
                "temp_directory": "",
                "arrow_large_buffer_size": "true",
                "memory_limit": f"{memory}B",
                "threads": str(threads),
                "lock_configuration": "true",
            },
        )


_engines: dict[tuple[int, int], _Engine] = {}
_engines_lock = threading.Lock()
_parents: list[_Engine] = []


def _close_idle() -> None:
    for key in [key for key, engine in _engines.items() if not engine.users]:
        _engines.pop(key).main.close()


def _before_fork() -> None:
    # A child has none of the threads of an instance, and dies of it when it takes the instance down.
    _engines_lock.acquire()
    _close_idle()


def _in_child() -> None:
    # One that another thread was using could not be closed: here it is never used, and kept from being taken down.
    _parents.extend(_engines.values())
    _engines.clear()
    _engines_lock.release()


def _at_exit() -> None:
    with _engines_lock:
        _close_idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_engines_lock.release, after_in_child=_in_child)
atexit.register(_at_exit)


@contextmanager
def _connection(memory: int, threads: int) -> Iterator[Any]:
    """A fresh connection: what is registered on it is seen by no other, and goes with it."""
    key = (memory, threads)
    with _engines_lock:
        engine = _engines.get(key)
        if engine is None:
            _close_idle()
            engine = _engines[key] = _Engine(memory, threads)
        connection = engine.main.cursor()
        engine.users += 1
    try:
        yield connection
    finally:
        connection.interrupt()
        connection.close()
        with _engines_lock:
            engine.users -= 1


class _Watch:
    """Interrupts a connection when its time is over."""

    def __init__(self, connection: Any, seconds: float) -> None:
        self.expired = False
        self._connection: Any = connection
        self._seconds = seconds
        self._done = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> _Watch:
        if self._seconds < inf:
            threading.Thread(target=self._wait, name="rollbook-query-watch", daemon=True).start()
        return self

    def _wait(self) -> None:
        if self._done.wait(min(self._seconds, threading.TIMEOUT_MAX)):
            return
        self.expired = True
        # Again and again: an interrupt that comes between two steps of a query is forgotten by the next.
        while not self._done.wait(0.02):
            with self._lock:
                if not self._done.is_set():
                    self._connection.interrupt()

    def check(self) -> None:
        if self.expired:
            raise QueryTimeoutError(f"query: stopped after {self._seconds:g} seconds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread sees this soon; to wait for it would take longer than most queries. It keeps no connection that
        # DuckDB would report as leaked if the interpreter exits before.
        with self._lock:
            self._done.set()
            self._connection = None


# --- what may run -----------------------------------------------------------------------------------------------


def _check_reads(query: str, connection: Any) -> None:
    """Refuse what is not one reading statement, by name. (That it could not do harm is the connection's part.)"""
    duckdb = _duckdb()
    text = query.encode()  # tokens are counted in bytes
    starts = [place for place, kind in duckdb.tokenize(query) if kind != duckdb.token_type.comment]
    words = [text[a:b].split(maxsplit=1)[0].decode().upper() for a, b in pairwise([*starts, len(text)])]
    statements = connection.extract_statements(query)
    if not statements:
        raise QueryError(f"query: got {query!r}, expected one statement that reads: {_READS}")
    if len(statements) > 1:
        raise QueryError(f"query: got {len(statements)} statements, expected one")
    try:
        kind = statements[0].type.name
    except ValueError:  # one that DuckDB's Python package has no name for
        kind = words[0]
    if kind == "EXPLAIN":
        _check_reads(_explained(text, words, starts, connection), connection)
    # PIVOT without IN is several statements to DuckDB: it looks for the columns, then selects. CREATE TABLE ... AS
    # PIVOT is too.
    elif kind != "SELECT" and not (kind == "MULTI" and words[0] in ("PIVOT", "PIVOT_WIDER", "SELECT", "FROM", "(")):
        name = words[0] if kind in (words[0], "MULTI") else f"{words[0]} ({kind})"
        raise QueryError(f"query: got {name}, expected one statement that reads: {_READS}")


def _explained(text: bytes, words: list[str], starts: list[int], connection: Any) -> str:
    """The statement that an EXPLAIN is about."""
    duckdb = _duckdb()
    first = 2 if words[1] in ("ANALYZE", "VERBOSE") else 1
    if words[first] == "(":
        try:
            connection.extract_statements(text[starts[first] :].decode())
        except duckdb.ParserException:  # so it was no (SELECT ...), but options
            first = words.index(")") + 1
    return text[starts[first] :].decode() if first < len(starts) else ""


def _explain(error: BaseException, sources: Mapping[str, Source], limit: int) -> str:
    """DuckDB's message, and what would help."""
    text = str(error)
    if "Out of Memory" in text:
        return f"{text}\nmemory: {limit} bytes were allowed; memory= sets another limit"
    if "Table with name" in text:
        return f"{text}\nthe tables are: {', '.join(sources) or 'none'}"
    if text.startswith("Binder Error") and "olumn" in text:
        tables: dict[str, list[str]] = {}
        for name, source in sources.items():
            tables.setdefault(", ".join(source.schema.names), []).append(name)
        return "\n".join([text, *(f"columns of {', '.join(names)}: {columns}" for columns, names in tables.items())])
    return text


# --- tables -----------------------------------------------------------------------------------------------------


class _Scan:
    """A started scan in the place of the scanner that DuckDB asks a dataset for."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self.reader = reader

    def to_reader(self) -> pa.RecordBatchReader:
        return self.reader


@contextmanager
def _closing(tables: Mapping[str, _Table]) -> Iterator[None]:
    try:
        yield
    finally:
        for table in tables.values():
            table.close()


class _Table(ds.InMemoryDataset):  # type: ignore[misc]
    """A source as a dataset that is empty until DuckDB, which by then has planned the query, asks for columns."""

    def __init__(self, name: str, source: Source, watch: _Watch) -> None:
        found = source.schema
        if len(set(found.names)) != len(found.names):
            raise ValueError(f"source {name!r}: names a column twice: {', '.join(found.names)}")
        self.offered = pa.schema([pa.field(field.name, retyped(field.type, _KNOWN)) for field in found])
        self.empty = self.offered.empty_table()
        super().__init__(self.empty)
        self.name = name
        self.source = source
        self.watch = watch
        self.failure: BaseException | None = None
        self.loaded: dict[str, pa.ChunkedArray] = {}
        self.lock = threading.Lock()
        self.readers: list[pa.RecordBatchReader] = []
        self.closed = False

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **options: Any) -> _Scan:
        """The rows that pass the filter, of these columns (default: all), as DuckDB calls for them."""
        wanted = self.offered.names if columns is None else columns
        needed = [*wanted, *self._only_in(filter, wanted)]
        try:
            self.watch.check()
            with self.lock:
                self._load([name for name in needed if name not in self.loaded])
        except BaseException as error:
            self.failure = error
            raise
        table = pa.table([self.loaded[name] for name in needed], names=needed)
        reader = pa.RecordBatchReader.from_batches(table.schema, self._pieces(table))
        scanner = ds.Scanner.from_batches(reader, columns=wanted, filter=filter, batch_readahead=4)
        self.readers.append(scanner.to_reader())
        return _Scan(self.readers[-1])

    def close(self) -> None:
        """Wait until no thread of Arrow's will ask for another piece.

        They read ahead, also after a query that needed no more rows; one that asks while the interpreter exits aborts
        the process.
        """
        self.closed = True
        for reader in self.readers:
            with contextlib.suppress(pa.ArrowException, OSError, QueryError):
                reader.close()  # reads what is left, which is at most what was read ahead

    def _only_in(self, filter: Any, wanted: list[str]) -> list[str]:
        """The columns that the filter reads beside those that are wanted."""
        if filter is None:
            return []
        found = []
        shown = str(filter)
        for name in self.offered.names:
            if name not in wanted and name in shown:
                # It may be the text of a constant: the filter reads a column if it cannot do without.
                try:
                    ds.InMemoryDataset(self.empty.drop_columns([name])).scanner(filter=filter)
                except pa.ArrowInvalid:
                    found.append(name)
        return found

    def _load(self, names: list[str]) -> None:
        if not names:
            return
        table = self.source.load(list(names))
        rows = {len(column) for column in self.loaded.values()} | {table.num_rows}
        if len(rows) > 1:
            raise ValueError(f"source {self.name!r}: loads gave {' and '.join(map(str, sorted(rows)))} rows")
        promised = self.source.schema
        for name in names:
            column = table.column(name)
            # DuckDB would read the memory of one type as another.
            if column.type != promised.field(name).type:
                expected = promised.field(name).type
                raise ValueError(f"source {self.name!r}, column {name!r}: got {column.type}, expected {expected}")
            kind = self.offered.field(name).type
            self.loaded[name] = column if column.type == kind else column.cast(kind)

    def _pieces(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """The table in pieces of a good size: a thousand chunks of few rows take DuckDB far longer than one of many,
        and pieces of many long rows would fill the memory once they are filtered. A piece within one chunk is a view.
        """
        rows = max(64, min(65536, _LARGE_PIECE * table.num_rows // max(table.nbytes, 1)))
        for start in range(0, table.num_rows, rows):
            if self.closed:
                return
            self.watch.check()
            yield from table.slice(start, rows).combine_chunks().to_batches()


_KNOWN = {pa.float16(): pa.float32()}
"""DuckDB does not know half floats."""


# --- what comes out ---------------------------------------------------------------------------------------------


def _collect(reader: pa.RecordBatchReader, limit: int, max_rows: int | None, watch: _Watch) -> Result:
    batches = []
    rows = size = 0
    more = False
    for batch in reader:
        watch.check()
        if max_rows is not None and rows + batch.num_rows > max_rows:
            batches.append(batch.slice(0, max_rows - rows))
            more = True
            break
        rows += batch.num_rows
        size += batch.nbytes
        if size > limit:
            raise QueryError(
                f"query: the result has more than {limit} bytes, which memory= allows; "
                "select fewer columns, add a limit, or give max_rows="
            )
        batches.append(batch)
    return Result(pa.Table.from_batches(batches, schema=reader.schema), more)
