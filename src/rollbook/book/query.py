"""SQL over Arrow tables that are loaded column by column, in a DuckDB that can read them and do nothing else.

Invariant: a query sees the sources it was given and no file, network, extension, environment variable or Python
object; it changes nothing; when `run_query` returns or raises, it has stopped.
"""

from __future__ import annotations

import atexit
import copy
import html
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from rollbook.book.ledger import TABLES
from rollbook.book.read import LEDGER_TYPES, frame_arrays, ledger_arrays
from rollbook.core import columns as arrow
from rollbook.core.checks import check_float, check_int
from rollbook.core.columns import PLAIN_TYPES
from rollbook.core.errors import RollbookError
from rollbook.core.fields import BY_CODE, COLUMNAR, DTYPES, FIELDS
from rollbook.core.ids import EID, record_step
from rollbook.core.ragged import promote

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from rollbook.book.book import Book
    from rollbook.book.ledger import LedgerValue


_NUMBERS = {pa.from_numpy_dtype(np.dtype(name)): name for name in COLUMNAR if DTYPES[name].storage == name}
_NUMBERS[pa.bool_()] = "bool"
# Every 64-bit integer, signed or not.
_INT_128 = pa.decimal128(20, 0)
_TIME_UNITS = ("s", "ms", "us", "ns")


def superset(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return the schema with all columns of all `schemas`, in the order of first appearance.

    A column's type depends on the set of its types, not on their order:

    - numbers and booleans: the narrowest type that holds all exactly; without one, decimal128(20, 0) for integers
      (uint64 and a signed type), and float64 if a float is among them;
    - list, large_list, fixed_size_list: the same kind if all are equal, else large_list; values by the same rules;
    - string and its variants: large_string; binary and its variants: large_binary;
    - struct: all fields of all; dictionary: as its values; timestamp of one time zone: the finest unit;
    - null: the type of the others.

    Anything else raises `ValueError` naming the column and its types.

    >>> a = pa.schema([("tokens", pa.large_list(pa.int32())), ("reward", pa.float32())])
    >>> b = pa.schema([("tokens", pa.large_list(pa.int64())), ("text", pa.string())])
    >>> superset([a, b])
    tokens: large_list<item: int64>
      child 0, item: int64
    reward: float
    text: string
    >>> superset([a, pa.schema([("reward", pa.string())])])
    Traceback (most recent call last):
        ...
    ValueError: column 'reward': got float and string, which have no type in common
    """
    types: dict[str, dict[pa.DataType, None]] = {}
    for schema in distinct_schemas(schemas):
        if len(set(schema.names)) != len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise ValueError(f"column {twice!r}: stands twice in one schema")
        for field in schema:
            types.setdefault(field.name, {})[field.type] = None
    return pa.schema([pa.field(name, _join(name, list(kinds))) for name, kinds in types.items()])


def distinct_schemas(schemas: Iterable[pa.Schema]) -> list[pa.Schema]:
    """Return the distinct schemas, in order; a book's thousands of frames have a few."""
    return list(dict.fromkeys(schema.remove_metadata() for schema in schemas))


def unify(batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None) -> pa.Table:
    """Return one table of all batches, a chunk for each; missing columns are null.

    Args:
        batches: The batches.
        schema: Columns and types of the table; by default the superset of the batches'. Other columns are left out.

    Raises:
        ValueError: A column has a type that the schema's cannot hold.

    >>> narrow = pa.record_batch({"step": pa.array([1, 2], pa.int32())})
    >>> wide = pa.record_batch({"step": pa.array([2**40]), "note": ["late"]})
    >>> unify([narrow, wide]).to_pydict()
    {'step': [1, 2, 1099511627776], 'note': [None, None, 'late']}
    """
    batches = list(batches)
    if schema is None:
        schema = superset(batch.schema for batch in batches)
    else:
        for other in distinct_schemas(batch.schema for batch in batches):
            _check_holds(schema, other)
    return pa.Table.from_batches([_cast_batch(batch, schema) for batch in batches], schema=schema)


def _check_holds(schema: pa.Schema, other: pa.Schema) -> None:
    for field in schema:
        places = other.get_all_field_indices(field.name)
        if len(places) > 1:
            raise ValueError(f"column {field.name!r}: stands twice in one schema")
        kind = other.field(places[0]).type if places else field.type
        if kind != field.type and _join(field.name, [field.type, kind]) != field.type:
            raise ValueError(f"column {field.name!r}: got {kind}, which {field.type} cannot hold")


def _cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        elif batch.column(index).type == field.type:
            arrays.append(batch.column(index))
        else:
            # Not "safe", which would reject 2**53 + 1 as a float; the types were checked above.
            column = batch.column(index)
            counted = replace_types(column.type, _BOOL_AS_NUMBER)
            if counted != column.type:  # Arrow casts a bool to any number but a decimal.
                column = column.cast(counted, safe=False)
            arrays.append(column.cast(field.type, safe=False))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_BOOL_AS_NUMBER = {pa.bool_(): pa.uint8()}


def replace_types(kind: pa.DataType, instead: Mapping[pa.DataType, pa.DataType]) -> pa.DataType:
    """Replace types, also within lists and structs.

    >>> replace_types(pa.large_list(pa.bool_()), {pa.bool_(): pa.uint8()})
    LargeListType(large_list<item: uint8>)
    """
    if pa.types.is_large_list(kind):
        return pa.large_list(replace_types(kind.value_type, instead))
    if pa.types.is_list(kind):
        return pa.list_(replace_types(kind.value_type, instead))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(replace_types(kind.value_type, instead), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, replace_types(field.type, instead)) for field in kind])
    return instead.get(kind, kind)


def _join(name: str, kinds: list[pa.DataType]) -> pa.DataType:
    """Return a common type for values of all `kinds` (at least one)."""
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
    distinct = list(dict.fromkeys(kind for kind in plain if not pa.types.is_null(kind)))
    if not distinct:
        return pa.null()
    if len(distinct) == 1:
        return kinds[0] if len(set(kinds)) == 1 else distinct[0]
    joined: pa.DataType | None = None
    if all(kind in _NUMBERS or kind == _INT_128 for kind in distinct):
        joined = _join_numbers(distinct)
    elif _all_match(distinct, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list):
        joined = _join_lists(name, distinct)
    elif _all_match(distinct, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view):
        joined = pa.large_string()
    elif _all_match(
        distinct,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    ):
        joined = pa.large_binary()
    elif _all_match(distinct, pa.types.is_struct):
        fields: dict[str, dict[pa.DataType, None]] = {}
        for kind in distinct:
            for field in kind:
                fields.setdefault(field.name, {})[field.type] = None
        joined = pa.struct([pa.field(key, _join(f"{name}.{key}", list(types))) for key, types in fields.items()])
    elif _all_match(distinct, pa.types.is_timestamp) and len({kind.tz for kind in distinct}) == 1:
        joined = pa.timestamp(max((kind.unit for kind in distinct), key=_TIME_UNITS.index), distinct[0].tz)
    if joined is None:
        names = " and ".join(sorted(map(str, distinct)))
        raise ValueError(f"column {name!r}: got {names}, which have no type in common")
    return joined


def _all_match(kinds: list[pa.DataType], *tests: Callable[[pa.DataType], bool]) -> bool:
    return all(any(test(kind) for test in tests) for kind in kinds)


def _join_numbers(kinds: list[pa.DataType]) -> pa.DataType:
    exact = promote(_NUMBERS[kind] for kind in kinds) if _INT_128 not in kinds else None
    if exact is not None:
        return pa.from_numpy_dtype(np.dtype(exact))
    return pa.float64() if any(pa.types.is_floating(kind) for kind in kinds) else _INT_128


def _join_lists(name: str, kinds: list[pa.DataType]) -> pa.DataType:
    value = _join(name, list(dict.fromkeys(kind.value_type for kind in kinds)))
    if _all_match(kinds, pa.types.is_list):
        return pa.list_(value)
    sizes = {kind.list_size if pa.types.is_fixed_size_list(kind) else None for kind in kinds}
    size = sizes.pop()
    return pa.list_(value, size) if size is not None and not sizes else pa.large_list(value)


# --- query results --------------------------------------------------------------------------------------------------


class Result:
    """The rows of a query's answer.

    Columns of one name get a number (`a`, `a_1`). Whole numbers of 128 bits, which sums of integers are in DuckDB,
    come as int64 where all fit, else as decimals.

    >>> result = Result(pa.table({"task": ["a", "b"], "tokens": [[1, 2], list(range(4096))]}))
    >>> len(result), result.columns, result.rows()[0]
    (2, ['task', 'tokens'], ('a', [1, 2]))
    >>> result
    task  tokens
    a     [1, 2]
    b     [0, 1, 2, 3, … 4096 in all]
    """

    def __init__(self, table: pa.Table, more: bool = False) -> None:
        for index, field in enumerate(table.schema):
            if pa.types.is_decimal128(field.type) and field.type.precision == 38 and field.type.scale == 0:
                try:
                    table = table.set_column(index, field.name, table.column(index).cast(pa.int64()))
                except pa.ArrowInvalid:
                    continue
        self._table = table.rename_columns(_number_duplicates(table.column_names))
        self.more = more
        """Whether `max_rows` cut off rows."""

    @property
    def columns(self) -> list[str]:
        """The names, each once."""
        names: list[str] = self._table.column_names
        return names

    def arrow(self) -> pa.Table:
        """Return an Arrow table; texts and lists have 64-bit offsets."""
        return self._table

    def pandas(self) -> Any:
        """Return a pandas DataFrame; lists are numpy arrays."""
        try:
            return self._table.to_pandas()
        except ImportError:
            raise ImportError("Result.pandas needs pandas: pip install pandas") from None

    def polars(self) -> Any:
        """Return a polars DataFrame."""
        try:
            import polars
        except ImportError:
            raise ImportError("Result.polars needs polars: pip install polars") from None
        return polars.from_arrow(self._table)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return all rows as plain Python values."""
        return list(self)

    def dicts(self) -> list[dict[str, Any]]:
        """Return all rows as dicts by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self]

    def __len__(self) -> int:
        count: int = self._table.num_rows
        return count

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def text(self, rows: int = 20, width: int = 160) -> str:
        """Format the first rows in lines of at most `width` characters; long values, lists and rows are truncated.

        The output of EXPLAIN is not changed.
        """
        if self.columns == ["explain_key", "explain_value"]:
            return "\n".join(plan for _, plan in self)
        shown = self._cells(rows, 40)
        numeric = [pa.types.is_integer(f.type) or pa.types.is_floating(f.type) for f in self._table.schema]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        ends = list(itertools.accumulate(size + 2 for size in widths))
        fit = max(1, sum(end - 2 <= width for end in ends))
        lines = []
        for line in shown:
            cells = zip(line[:fit], widths, numeric, strict=False)
            lines.append("  ".join(c.rjust(size) if right else c.ljust(size) for c, size, right in cells).rstrip())
        hidden = [
            f"{len(self) - rows} more rows" if len(self) > rows else "",
            f"{len(widths) - fit} more columns: {_shorten(', '.join(self.columns[fit:]), width)}"
            if fit < len(widths)
            else "",
            "cut by max_rows" if self.more else "",
            "no rows" if not len(self) else "",
        ]
        note = "; ".join(filter(None, hidden))
        return "\n".join([*lines, f"({note})"] if note else lines)

    __repr__ = text

    def _repr_html_(self) -> str:
        head, *body = self._cells(50, 200)
        parts = ["<table><thead><tr>", *(f"<th>{html.escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
        for line in body:
            parts += ["<tr>", *(f"<td>{html.escape(cell)}</td>" for cell in line), "</tr>"]
        more = f"<p>{len(self) - 50} more rows</p>" if len(self) > 50 else ""
        return "".join([*parts, "</tbody></table>", more])

    def _cells(self, rows: int, size: int) -> list[list[str]]:
        first = self._table.slice(0, rows)
        columns = [[_shorten(str(n), size), *(_format_cell(v, size) for v in first.column(n))] for n in self.columns]
        return [list(line) for line in zip(*columns, strict=True)]


def _number_duplicates(names: list[str]) -> list[str]:
    used = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        new = name
        numbers = itertools.count(1)
        while new in seen or (new != name and new in used):
            new = f"{name}_{next(numbers)}"
        seen.add(new)
        result.append(new)
    return result


def _format_cell(value: pa.Scalar, size: int) -> str:
    """Format a value as one short line; only the first items of a long list are formatted."""
    if not value.is_valid:
        return "NULL"
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        count = len(value.values)
        few = count if count <= 6 else 4
        inside = ", ".join(_format_cell(element, max(8, size // 2)) for element in value.values.slice(0, few))
        tail = f", … {count} in all]" if few < count else "]"
        return "[" + _shorten(inside, max(8, size - len(tail) - 1)) + tail
    if pa.types.is_floating(kind):
        return f"{value.as_py():.6g}" if len(repr(value.as_py())) > 12 else repr(value.as_py())
    return _shorten(str(value.as_py()), size)


def _shorten(text: str, size: int) -> str:
    # Texts come from models: unprintable characters could move the cursor or color the terminal.
    short = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: size + 1])
    return short if len(short) <= size else short[: size - 1] + "…"


_READING_STATEMENTS = "SELECT, WITH, FROM, VALUES, PIVOT, EXPLAIN, DESCRIBE, SHOW or SUMMARIZE"
_PIECE_BYTES = 8 << 20
_MEMORY_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


class QueryError(RollbookError, ValueError):
    """The query is not allowed, does not match the tables, or failed."""


class QueryTimeoutError(QueryError):
    """The query exceeded its time limit."""


class Source(Protocol):
    """A table that can be loaded in part. Every load of one source gives the same rows in the same order.

    The first column should be cheap to load, since DuckDB answers `count(*)` with it. Names that differ only in case
    are one name in SQL: of `a` and `A` the second is called `A_1` there.
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns; every query reads it, so it should be cheap."""

    def load(self, columns: list[str]) -> pa.Table:
        """Return these columns, with the types of `schema`; read-only (mapped) memory is fine."""


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
    """Run one reading DuckDB statement on sources, each a table under its name.

    Nothing is spilled to disk. Exceptions of a source's `load` are raised unchanged.

    Args:
        query: The statement.
        sources: Tables by name.
        parameters: Values for `?` and `$1`, or by name for `$name`.
        memory: Memory limit of DuckDB, as "1GB" or in bytes, shared by all queries of this process with the same limit.
            The result is not part of it and may be as large again.
        seconds: Time limit. A query inside a single call of a function is stopped when the call returns.
        threads: Number of threads, by default up to 8.
        max_rows: Maximum number of rows; `Result.more` is true if there are more.

    Raises:
        QueryError: It is not one reading statement, or DuckDB rejects it.
        QueryTimeoutError: The query exceeded its time limit.

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
        raise QueryError(f"query: got {query!r}, expected a string")
    if isinstance(parameters, (str, bytes)):
        raise QueryError(f"parameters: got {parameters!r}, expected a list of values or a dict")
    limit = _parse_memory(memory)
    seconds = check_float("seconds", seconds, 0.0)
    threads = min(8, os.cpu_count() or 1) if threads is None else check_int("threads", threads, 1)
    if max_rows is not None:
        max_rows = check_int("max_rows", max_rows)
    lower = [name.lower() for name in sources]
    if len(set(lower)) != len(lower):
        raise QueryError(f"sources: got {', '.join(sources)}, expected names that differ in more than case")

    tables: dict[str, _Table] = {}
    with _close_tables(tables), _connection(limit, threads) as connection, _Watch(connection, seconds) as watch:
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
            # DuckDB raises this for Ctrl-C during a computation.
            if str(error) == "Query interrupted":
                raise KeyboardInterrupt from None
            raise
        # Errors of DuckDB while rows are read come through Arrow's stream, as OSError or an Arrow exception.
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            failure = next((table.failure for table in tables.values() if table.failure is not None), None)
            if failure is not None:
                raise failure from None
            if watch.stopped:
                raise KeyboardInterrupt from None
            if watch.expired:
                raise QueryTimeoutError(f"query: stopped after {seconds:g} seconds") from None
            raise QueryError(_explain(error, sources, limit)) from None


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise ImportError("SQL over a book needs DuckDB: install the extra 'sql' of Rollbook") from None
    # Before 2.0, comparisons that are pushed into an Arrow scan lose NaN, and scans take raw pointers.
    if int(duckdb.__version__.split(".")[0]) < 2:
        raise ImportError(f"SQL over a book needs DuckDB 2.0 or later, not {duckdb.__version__}: pip install -U duckdb")
    return duckdb


def _parse_memory(memory: str | int) -> int:
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if match is None or (match[3] and not match[2]):
            raise ValueError(f"memory: got {memory!r}, expected a size such as '1GB' or a number of bytes")
        unit = _MEMORY_UNITS[match[2].upper()]
        memory = int(float(match[1]) * (1024 ** list(_MEMORY_UNITS).index(match[2].upper()) if match[3] else unit))
    return check_int("memory", memory, 1)


# --- the connection -------------------------------------------------------------------------------------------------


class _Engine:
    """A DuckDB instance, reused because creating one takes 20 ms; each query has its own connection."""

    def __init__(self, memory: int, threads: int) -> None:
        self.users = 0
        # The last setting locks the others: no query can change them.
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
_parent_engines: list[_Engine] = []


def _close_idle() -> None:
    for key in [key for key, engine in _engines.items() if not engine.users]:
        _engines.pop(key).main.close()


def _before_fork() -> None:
    # A forked child does not have the threads of an instance, and crashes when it closes the instance.
    _engines_lock.acquire()
    _close_idle()


def _in_child() -> None:
    # An instance that another thread was using could not be closed: the child keeps it unused and open.
    _parent_engines.extend(_engines.values())
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
    """Open a fresh connection, whose registered tables no other connection sees."""
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
    """Interrupts a connection when its time is over, and at Ctrl-C, which DuckDB's threads do not always notice."""

    def __init__(self, connection: DuckDBPyConnection, seconds: float) -> None:
        self.expired = False
        self.stopped = False
        """Whether Ctrl-C was pressed."""
        self._connection: DuckDBPyConnection | None = connection
        self._seconds = seconds
        self._lock = threading.Lock()
        self._wakeup, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self._previous: int | None = None

    def __enter__(self) -> _Watch:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
            if self._previous != -1:  # an event loop has its own, which stays
                signal.set_wakeup_fd(self._previous)
                self._previous = None
        threading.Thread(target=self._wait, name="rollbook-query-watch", daemon=True).start()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + self._seconds
        with self._wakeup:
            while not self.stopped and not self.expired:
                self._wakeup.settimeout(min(max(deadline - time.monotonic(), 0.001), 3600.0))
                try:
                    received = self._wakeup.recv(64)
                except TimeoutError:
                    self.expired = time.monotonic() >= deadline
                else:
                    if not received:  # the query is done
                        return
                    self.stopped = signal.SIGINT in received
            # Repeatedly: an interrupt between two steps of a query is lost.
            self._wakeup.settimeout(0.02)
            while True:
                with self._lock:
                    if self._connection is None:
                        return
                    self._connection.interrupt()
                with suppress(TimeoutError):
                    self._wakeup.recv(64)

    def check(self) -> None:
        if self.expired:
            raise QueryTimeoutError(f"query: stopped after {self._seconds:g} seconds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread ends soon; waiting for it would take longer than most queries. It keeps no connection, which
        # DuckDB would report as leaked if the interpreter exits first.
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous)
        with self._lock:
            self._connection = None
        self._signals.close()


# --- allowed statements ---------------------------------------------------------------------------------------------


def _check_reads(query: str, connection: DuckDBPyConnection) -> None:
    """Raise unless the query is one reading statement. (The connection ensures that it can do no harm.)"""
    duckdb = _duckdb()
    text = query.encode()  # tokens are counted in bytes
    starts = [offset for offset, kind in duckdb.tokenize(query) if kind != duckdb.token_type.comment]
    words = [text[a:b].split(maxsplit=1)[0].decode().upper() for a, b in pairwise([*starts, len(text)])]
    statements = connection.extract_statements(query)
    if not statements:
        raise QueryError(f"query: got {query!r}, expected one statement that reads: {_READING_STATEMENTS}")
    if len(statements) > 1:
        raise QueryError(f"query: got {len(statements)} statements, expected one")
    try:
        kind = statements[0].type.name
    except ValueError:  # one that DuckDB's Python package has no name for
        kind = words[0]
    if kind == "EXPLAIN":
        _check_reads(_find_explained(text, words, starts, connection), connection)
    # PIVOT without IN is several statements to DuckDB: it looks for the columns, then selects. CREATE TABLE ... AS
    # PIVOT is too.
    elif kind != "SELECT" and not (kind == "MULTI" and words[0] in ("PIVOT", "PIVOT_WIDER", "SELECT", "FROM", "(")):
        name = words[0] if kind in (words[0], "MULTI") else f"{words[0]} ({kind})"
        raise QueryError(f"query: got {name}, expected one statement that reads: {_READING_STATEMENTS}")


def _find_explained(text: bytes, words: list[str], starts: list[int], connection: DuckDBPyConnection) -> str:
    """Return the statement that an EXPLAIN is about."""
    duckdb = _duckdb()
    first = 2 if words[1] in ("ANALYZE", "VERBOSE") else 1
    if words[first] == "(":
        try:
            connection.extract_statements(text[starts[first] :].decode())
        except duckdb.ParserException:  # so it was no (SELECT ...), but options
            first = words.index(")") + 1
    return text[starts[first] :].decode() if first < len(starts) else ""


def _explain(error: BaseException, sources: Mapping[str, Source], limit: int) -> str:
    """Return DuckDB's message, with a hint."""
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


# --- tables ---------------------------------------------------------------------------------------------------------


class _Scan:
    """A started scan, instead of the scanner that DuckDB requests from a dataset."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self.reader = reader

    def to_reader(self) -> pa.RecordBatchReader:
        return self.reader


@contextmanager
def _close_tables(tables: Mapping[str, _Table]) -> Iterator[None]:
    try:
        yield
    finally:
        for table in tables.values():
            table.close()


class _Table(ds.InMemoryDataset):  # type: ignore[misc]
    """A source as a dataset that is empty until DuckDB has planned the query and requests columns."""

    def __init__(self, name: str, source: Source, watch: _Watch) -> None:
        schema = source.schema
        if len(set(schema.names)) != len(schema.names):
            raise ValueError(f"source {name!r}: names a column twice: {', '.join(schema.names)}")
        self.offered = pa.schema([pa.field(field.name, replace_types(field.type, _DUCKDB_TYPES)) for field in schema])
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

    def scanner(
        self, columns: list[str] | None = None, filter: ds.Expression | None = None, **options: str | int | None
    ) -> _Scan:
        """Return the rows that pass the filter, of these columns (default: all), as DuckDB calls it."""
        names = self.offered.names if columns is None else columns
        needed = [*names, *self._only_in(filter, names)]
        try:
            self.watch.check()
            with self.lock:
                self._load([name for name in needed if name not in self.loaded])
        except BaseException as error:
            self.failure = error
            raise
        table = pa.table([self.loaded[name] for name in needed], names=needed)
        reader = pa.RecordBatchReader.from_batches(table.schema, self._pieces(table))
        scanner = ds.Scanner.from_batches(reader, columns=names, filter=filter, batch_readahead=4)
        self.readers.append(scanner.to_reader())
        return _Scan(self.readers[-1])

    def close(self) -> None:
        """Wait until no thread of Arrow reads from the source.

        These threads prefetch, even after a query that needs no more rows. A read while the interpreter exits would
        abort the process.
        """
        self.closed = True
        for reader in self.readers:
            with suppress(pa.ArrowException, OSError, QueryError):
                reader.close()  # reads what is left, which is at most what was read ahead

    def _only_in(self, filter: ds.Expression | None, names: list[str]) -> list[str]:
        """Return the columns that only the filter reads."""
        if filter is None:
            return []
        only = []
        shown = str(filter)
        for name in self.offered.names:
            if name not in names and name in shown:
                # The name may be part of a constant: the filter reads a column if it fails without it.
                try:
                    ds.InMemoryDataset(self.empty.drop_columns([name])).scanner(filter=filter)
                except pa.ArrowInvalid:
                    only.append(name)
        return only

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
            # DuckDB would reinterpret the memory of another type.
            if column.type != promised.field(name).type:
                expected = promised.field(name).type
                raise ValueError(f"source {self.name!r}, column {name!r}: got {column.type}, expected {expected}")
            kind = self.offered.field(name).type
            self.loaded[name] = column if column.type == kind else column.cast(kind)

    def _pieces(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield the table in chunks of a good size.

        DuckDB takes far longer for a thousand chunks of few rows than for one of many, and chunks of many long rows
        would fill the memory once they are filtered. A piece within one chunk is a view.
        """
        rows = max(64, min(65536, _PIECE_BYTES * table.num_rows // max(table.nbytes, 1)))
        for start in range(0, table.num_rows, rows):
            if self.closed:
                return
            self.watch.check()
            yield from table.slice(start, rows).combine_chunks().to_batches()


_DUCKDB_TYPES = {pa.float16(): pa.float32()}
"""Types that DuckDB does not have, with the types that are used instead."""


# --- results --------------------------------------------------------------------------------------------------------


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


_LEDGER_TYPES = {"INT": pa.int64(), "REAL": pa.float64(), "EVENT_ID": pa.int64(), "BYTES": pa.large_binary()}
LEDGER_TABLES = {
    "events": ("id", "time", "seq", "uid", "consumer", "kind", "reason", "step", "lease", "detail"),
    "queue": ("seq", "uid", "consumer", "state", "reason", "rank", "weight", "version", "uses", "attempts", "lease"),
    "leases": ("id", "consumer", "holder", "made", "expires", "seconds", "state", "count"),
    "revisions": ("seq", "uid", "n", "time", "author", "reason", "fields"),
    "checkpoints": ("name", "event", "seq", "made"),
    "media": ("hash", "size", "uses"),
}
"""Tables of the ledger that queries see, with ids and names instead of numbers; `ledger` is another name of
`events`."""


_QUEUE_WITH_INBOX = (
    "(SELECT seq, consumer, state, reason, rank, weight, version, uses, attempts, lease FROM queue UNION ALL "
    "SELECT records.seq, inbox.consumer, 'waiting', NULL, NULL, NULL, records.version_min, 0, 0, NULL FROM inbox "
    "JOIN records ON records.seq BETWEEN inbox.first AND inbox.last AND records.evaluation = 0) AS queue"
)
"""`queue` with the records of inboxes, which wait and have no rank yet."""


def _ledger_type(table: str, column: str) -> pa.DataType:
    if column in ("uid", "consumer"):
        return pa.large_string()
    if (table, column) == ("media", "uses"):
        return pa.int64()
    declared = next(definition for definition in TABLES[table] if definition.split()[0] == column).split()[1]
    return _LEDGER_TYPES.get(declared.strip("{}"), pa.large_string())


class LedgerTable:
    """A table of the ledger."""

    def __init__(self, book: Book, name: str) -> None:
        self.book = book
        self.name = name
        self.schema = pa.schema([(column, _ledger_type(name, column)) for column in LEDGER_TABLES[name]])

    def load(self, columns: list[str]) -> pa.Table:
        """Return these columns, read at once."""
        name = self.name
        expressions = {
            "uid": "records.uid",
            "consumer": "consumers.name",
            "uses": "(SELECT COUNT(*) FROM media_uses WHERE media_uses.hash = media.hash)"
            if name == "media"
            else f"{name}.uses",
        }
        joins = ""
        if "uid" in columns:
            joins += f" LEFT JOIN records ON records.seq = {name}.seq"
        if "consumer" in columns:
            joins += f" LEFT JOIN consumers ON consumers.id = {name}.consumer"
        order = {"events": "id", "leases": "id", "checkpoints": "event", "media": "hash"}.get(name, "seq")
        listed = ", ".join(expressions.get(column, f"{name}.{column}") for column in columns)
        source = _QUEUE_WITH_INBOX if name == "queue" else name
        with self.book.ledger.read() as tx:
            rows = tx.all(f"SELECT {listed} FROM {source}{joins} ORDER BY {name}.{order}")
        arrays = [pa.array([row[i] for row in rows], self.schema.field(c).type) for i, c in enumerate(columns)]
        return pa.Table.from_arrays(arrays, names=columns)


_NOT_REWOUND = "(removed_reason IS NULL OR removed_reason <> 'rewound')"
RECORD_TABLES = {
    "experiences": _NOT_REWOUND,
    "training": f"{_NOT_REWOUND} AND evaluation = 0",
    "evaluations": f"{_NOT_REWOUND} AND evaluation = 1",
    "all_experiences": "1 = 1",
}
"""Tables of records with the condition on their rows; only `all_experiences` has records that a rewind dropped."""


class RecordsTable:
    """The current state of records, with or without bytes."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.condition = RECORD_TABLES["experiences"]
        with book.ledger.read() as tx:
            self.last = tx.first("SELECT COALESCE(MAX(seq), 0) FROM records")[0]
            noted = tx.all("SELECT name, type FROM columns ORDER BY name, type")
        types = {
            "seq": pa.int64(),
            "uid": pa.large_string(),
            "train_step": pa.int64(),
            "tid": pa.large_string(),
            "rid": pa.large_string(),
            **LEDGER_TYPES,
        }
        self.frames = {name: kind for name, kind in arrow_types(noted).items() if name not in types}
        self.schema = pa.schema([*types.items(), *self.frames.items()])

    def where(self, condition: str) -> RecordsTable:
        """Return the same table with another condition on its records."""
        table = copy.copy(self)
        table.condition = condition
        return table

    def load(self, columns: list[str]) -> pa.Table:
        """Return these columns; frames are read only if the ledger lacks one of them."""
        from_frames = [name for name in columns if name in self.frames]
        from_ledger = [name for name in columns if name not in self.frames]
        requested = self.schema if not columns else pa.schema([self.schema.field(name) for name in columns])
        batches = []
        for seqs, stored in self._pieces(bool(from_frames)):
            arrays: dict[str, pa.Array] = {}
            if from_ledger:
                arrays |= self._from_ledger(from_ledger, seqs)
            if stored and from_frames:
                present, columns_read = frame_arrays(self.book, seqs, from_frames, portable=True)
                if len(present) < len(seqs):  # Deleted meanwhile: a row without bytes.
                    index_of = {seq: i for i, seq in enumerate(present)}
                    indices = pa.array([index_of.get(seq) for seq in seqs], pa.int64())
                    columns_read = {name: array.take(indices) for name, array in columns_read.items()}
                arrays |= columns_read
            chosen = [name for name in columns if name in arrays and not pa.types.is_null(arrays[name].type)]
            if not chosen:
                # No record has bytes: a column of nulls.
                chosen, arrays = [columns[0]], {columns[0]: pa.nulls(len(seqs), requested.field(columns[0]).type)}
            batches.append(pa.RecordBatch.from_arrays([arrays[name] for name in chosen], names=chosen))
        return unify(batches, requested)

    def _pieces(self, by_frame: bool) -> Iterator[tuple[list[int], bool]]:
        """Yield the numbers of all records, in order, those of one frame together."""
        last = 0
        while True:
            with self.book.ledger.read() as tx:
                rows = tx.all(
                    "SELECT seq, segment, start FROM records "
                    f"WHERE seq > ? AND seq <= ? AND {self.condition} ORDER BY seq LIMIT 10000",
                    (last, self.last),
                )
            if not rows:
                return
            last = rows[-1][0]
            if not by_frame:
                yield [row[0] for row in rows], False
                continue
            for location, run in groupby(rows, key=lambda row: row[1:]):
                yield [row[0] for row in run], location[0] is not None

    def _from_ledger(self, columns: list[str], seqs: list[int]) -> dict[str, pa.Array]:
        computed = {name: needs for name, needs in _COMPUTED.items() if name in columns}
        names = [name for name in columns if name not in computed]
        needed = [name for needs in computed.values() for name in needs]
        with self.book.ledger.read() as tx:
            arrays = ledger_arrays(tx, list(dict.fromkeys([*names, *needed])), seqs)
        if "train_step" in columns:
            pairs = zip(*(arrays[name].to_pylist() for name in _COMPUTED["train_step"]), strict=True)
            arrays["train_step"] = pa.array([record_step(batch, version) for batch, version in pairs], pa.int64())
        if "tid" in columns or "rid" in columns:
            parts = (arrays[name].to_pylist() for name in _COMPUTED["tid"])
            ids = [EID(batch, task, run, 0, "") for batch, task, run in zip(*parts, strict=True)]
            arrays["tid"] = pa.array([eid.tid for eid in ids], pa.large_string())
            arrays["rid"] = pa.array([eid.rid for eid in ids], pa.large_string())
        return arrays


_COMPUTED = {
    "train_step": ("batch", "version_min"),
    "tid": ("batch", "task", "run"),
    "rid": ("batch", "task", "run"),
}
"""Columns that are computed from others of the ledger."""


class MetricsTable:
    """Metrics of `Book.log`: one row per name and training step, without those that a rewind undid."""

    schema = pa.schema([("train_step", pa.int64()), ("name", pa.large_string()), ("value", pa.float64())])

    def __init__(self, book: Book) -> None:
        self.book = book

    def load(self, columns: list[str]) -> pa.Table:
        """Return these columns, in the order of the steps."""
        rows = [(step, name, value) for step, values in self.book.metrics() for name, value in values.items()]
        arrays = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(self.schema)]
        return pa.Table.from_arrays(arrays, schema=self.schema).select(columns)


def sql_tables(book: Book) -> dict[str, Source]:
    """Return the tables of a book by name."""
    records = RecordsTable(book)
    tables: dict[str, Source] = {name: records.where(condition) for name, condition in RECORD_TABLES.items()}
    tables["metrics"] = MetricsTable(book)
    tables |= {name: LedgerTable(book, name) for name in LEDGER_TABLES}
    tables["ledger"] = tables["events"]
    return tables


def run_sql(
    book: Book, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None, memory: str | int, seconds: float
) -> Result:
    """Implement `Book.sql`."""
    return run_query(query, sql_tables(book), parameters=parameters, memory=memory, seconds=seconds)


_TENSOR = re.compile(r"([a-z0-9]{3,8})((?:x[0-9]{1,9}){0,32})")
_PORTABLE = {d.name: pa.from_numpy_dtype(d.portable) for d in BY_CODE.values()}


def arrow_types(noted: Iterable[tuple[str, str]]) -> dict[str, pa.DataType]:
    """Return, for every field, a column type that holds all types that were recorded."""
    noted_types: dict[str, list[pa.DataType]] = {}
    for name, text in noted:
        kind = _parse_type(text)
        if name in FIELDS and FIELDS[name].kind == "tensor" and kind is not None:
            noted_types.setdefault(name, []).append(kind)
    types = {}
    for name, field in FIELDS.items():
        if field.kind != "tensor":
            types[name] = PLAIN_TYPES[field.kind, ""]
        elif name in noted_types:
            types[name] = superset([pa.schema([(name, kind)]) for kind in noted_types[name]]).field(name).type
        else:
            types[name] = arrow.empty_type(field)
    return types


def _parse_type(text: LedgerValue) -> pa.DataType | None:
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[1] not in _PORTABLE or match[1] not in DTYPES:
        return None
    kind = _PORTABLE[match[1]]
    for size in reversed([int(part) for part in match[2].split("x") if part]):
        kind = pa.list_(kind, size)
    return pa.large_list(kind)
