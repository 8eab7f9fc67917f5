"""PostgreSQL as a ledger, over psycopg.

Invariant: every write transaction holds the book's advisory lock until it ends, shared or exclusively, so that an
exclusive transaction runs alone. The clock is the server's.

Statements of a transaction are sent in a pipeline: one that returns nothing is on its way when the next one is sent,
and the client waits only where it needs an answer, and at the end. An append takes three round trips.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from rollbook.book.disk import hit_failpoint
from rollbook.book.errors import BookError, ConnectionLostError, LockTimeoutError, NotABookError, OutcomeUnknownError
from rollbook.book.ledger import BUSY_SECONDS, ConcurrentChangeError, TurnQueue
from rollbook.core.addresses import redacted

if TYPE_CHECKING:
    import psycopg

LOCK = 0x726F6C6C  # "roll": the class of advisory locks that books take; the second number is the schema's.
CONNECTIONS = 8
"""Maximum number of connections of one open book; a thread needs one."""
SHARDS = 64
"""Number of rows of a counter, so that transactions that add to it seldom wait for each other."""
IDLE_SECONDS = 20.0
"""How long a writer may pause inside a transaction before its session is ended: shorter than `BUSY_SECONDS`, so that
writers that wait for it get their turn. Also the longest wait for a lock in one statement."""
READ_SECONDS = 3600.0
"""The same for a reader, which blocks no writer and may copy data between two statements."""
RECONNECT_SECONDS = 30.0
"""Seconds to wait for a server that restarts."""
_STARTING = ("starting up", "shutting down", "not yet accepting connections", "in recovery mode")
"""Texts of errors of a server that will accept connections soon."""
NETWORK_LIMITS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq options for a server that does not answer; the URL and the environment take precedence."""
_LOCK_HOLDERS = (
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s::bigint::oid "
    "AND l.objid = (hashtext(%s)::bigint & 4294967295)::oid "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())"
_SCAN_SETTINGS = ("enable_seqscan", "enable_hashjoin", "enable_mergejoin")
"""Ways to read whole tables: right for queries, wrong for writes, which find a few rows by their keys. Before the
server has statistics of a new or fast-growing table, it would choose them."""
_parent_connections: list[Any] = []


def connect(url: str, schema: str) -> psycopg.Connection[Any]:
    """Connect, with time limits, so that statements refer to `schema`."""
    try:
        import psycopg
        from psycopg import sql
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise ImportError("a book in PostgreSQL needs psycopg: install the extra 'postgres' of Rollbook") from None
    try:
        chosen = conninfo_to_dict(url)
        if "PGCONNECT_TIMEOUT" in os.environ:
            chosen["connect_timeout"] = None
        options: dict[str, Any] = {name: value for name, value in NETWORK_LIMITS.items() if name not in chosen}
        options["fallback_application_name"] = f"rollbook {socket.gethostname()}/{os.getpid()}"
        connection = psycopg.connect(url, autocommit=True, **options)
        settings = (
            "SET search_path TO {}; SET statement_timeout TO 0; SET synchronous_commit TO on; "
            "SET client_min_messages TO warning; SET lock_timeout TO {}; SET idle_in_transaction_session_timeout TO {}"
            + "".join(f"; SET {name} TO off" for name in _SCAN_SETTINGS)
        )
        limit = sql.Literal(_milliseconds(IDLE_SECONDS))
        connection.execute(sql.SQL(settings).format(sql.Identifier(schema), limit, limit))
    except psycopg.OperationalError as error:
        raise ConnectionLostError(f"{redacted(url)}: no connection to PostgreSQL: {_one_line(error)}") from None
    return connection


def _one_line(error: BaseException) -> str:
    """Return an error's message as one line."""
    return " ".join(str(error).split())


def _milliseconds(seconds: float) -> int:
    """Convert a timeout for the server, for which 0 would mean none."""
    return max(min(round(seconds * 1000), (1 << 31) - 1), 1)


class PostgresTransaction:
    """A transaction in a pipeline of statements."""

    in_ints = "= ANY(?::bigint[])"
    in_texts = "= ANY(?::text[])"
    for_update = " FOR UPDATE"

    def __init__(self, connection: psycopg.Connection[Any], pipeline: psycopg.Pipeline, now: float) -> None:
        self.connection = connection
        self.pipeline = pipeline
        self.now = now
        self.notified_consumers: set[int] = set()
        self.shard = connection.info.backend_pid % SHARDS
        self._deferred: dict[str, tuple[str, Sequence[Any]]] = {}
        """Statements that are sent as one, by the table that each changes."""

    def _send(self, sql: str, values: Sequence[Any]) -> psycopg.Cursor[Any]:
        self.flush()
        cursor = self.connection.cursor()
        return cursor.execute(_to_percent(sql), values) if values else cursor.execute(sql.encode())

    def flush(self) -> None:
        """Send what `defer` has gathered."""
        if self._deferred:
            statements, self._deferred = list(self._deferred.values()), {}
            values = [value for _, values in statements for value in values]
            self.connection.cursor().execute(_to_percent(_combine(tuple(sql for sql, _ in statements))), values)

    def run(self, sql: str, values: Sequence[Any] = ()) -> None:
        self._send(sql, values)

    def defer(self, table: str, sql: str, values: Sequence[Any] = ()) -> None:
        if table in self._deferred:
            self.flush()
        self._deferred[table] = (sql, values)

    def count(self, sql: str, values: Sequence[Any] = ()) -> int:
        cursor = self._send(sql, values)
        self.pipeline.sync()
        return cursor.rowcount

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self.flush()
        self.connection.cursor().executemany(_to_percent(sql), list(rows))

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], conflict: str = "") -> None:
        if rows:
            self.defer(table, _insert_sql(table, tuple(columns), conflict), (_rows_json(table, tuple(columns), rows),))

    def update(self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            names = (*columns, *keys)
            self.defer(table, _update_sql(table, tuple(keys), tuple(columns)), (_rows_json(table, names, rows),))

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._send(sql, values).fetchall()

    def first(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._send(sql, values).fetchone()

    def query_many(self, *queries: tuple[str, Sequence[Any]]) -> list[list[Any]]:
        return [cursor.fetchall() for cursor in [self._send(sql, values) for sql, values in queries]]

    def array(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def next_number(self, table: str, count: int) -> tuple[str, Sequence[Any]]:
        return "SELECT take_numbers(?, ?)", (f"{table}_numbers", count)

    def notify(self, consumer: int) -> None:
        self.notified_consumers.add(consumer)


SEQUENCES = (
    "CREATE SEQUENCE records_numbers",
    "CREATE SEQUENCE leases_numbers",
    # A sequence is not part of a transaction: the lock is held for a moment, not until the commit.
    "CREATE FUNCTION take_numbers(sequence text, count bigint) RETURNS bigint LANGUAGE plpgsql AS $$ "
    "DECLARE number bigint; BEGIN "
    f"PERFORM pg_advisory_lock({LOCK + 1}, hashtext(current_schema() || sequence)); "
    "number := nextval(sequence::regclass); "
    "IF count > 1 THEN PERFORM setval(sequence::regclass, number + count - 1); END IF; "
    f"PERFORM pg_advisory_unlock({LOCK + 1}, hashtext(current_schema() || sequence)); "
    "RETURN number; END $$",
)
"""Sequences of consecutive numbers that do not wait for other transactions."""


@lru_cache(maxsize=512)
def _to_percent(sql: str) -> Any:
    return sql.replace("%", "%%").replace("?", "%s")


@lru_cache(maxsize=256)
def _combine(statements: tuple[str, ...]) -> str:
    """Combine independent statements into one, which costs little more than one."""
    *first, last = statements
    return (f"WITH {', '.join(f'done{i} AS ({sql})' for i, sql in enumerate(first))} " if first else "") + last


@lru_cache(maxsize=1)
def _column_types() -> dict[str, dict[str, str]]:
    from rollbook.book.ledger import TABLES, TYPES

    types = {"TEXT": "text", **{f"{{{kind}}}": name for kind, name in TYPES["postgresql"].items()}}
    declared = {
        table: {column.split()[0]: column.split()[1] for column in columns if not column.startswith("PRIMARY KEY")}
        for table, columns in TABLES.items()
    }
    return {
        table: {name: types[kind].split(" GENERATED")[0] for name, kind in columns.items()}
        for table, columns in declared.items()
    }


@lru_cache(maxsize=256)
def _rows_sql(table: str, columns: tuple[str, ...]) -> str:
    types = _column_types()[table]
    return f"json_to_recordset(?::json) AS given ({', '.join(f'{name} {types[name]}' for name in columns)})"


@lru_cache(maxsize=256)
def _insert_sql(table: str, columns: tuple[str, ...], conflict: str) -> str:
    names = ", ".join(columns)
    # Rows with unique texts are inserted in one order, so that two transactions never wait for each other's rows.
    order = {"records": " ORDER BY uid", "media": " ORDER BY hash"}.get(table, "")
    return f"INSERT INTO {table} ({names}) SELECT {names} FROM {_rows_sql(table, columns)}{order} {conflict}"


@lru_cache(maxsize=256)
def _update_sql(table: str, keys: tuple[str, ...], columns: tuple[str, ...]) -> str:
    settings = ", ".join(f"{name} = given.{name}" for name in columns)
    condition = " AND ".join(f"{table}.{name} = given.{name}" for name in keys)
    return f"UPDATE {table} SET {settings} FROM {_rows_sql(table, (*columns, *keys))} WHERE {condition}"


def _rows_json(table: str, columns: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> str:
    """Encode rows as JSON: the server parses one parameter far faster than a client binds hundreds."""
    types = _column_types()[table]
    values = [list(column) for column in zip(*rows, strict=True)]
    for name, column in zip(columns, values, strict=True):
        if types[name] == "BYTEA":
            column[:] = [None if value is None else f"\\x{value.hex()}" for value in column]
        elif types[name] == "DOUBLE PRECISION":
            # JSON has no infinity; as a text the server reads it.
            column[:] = [value if value is None or math.isfinite(value) else str(value) for value in column]
    named = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    return orjson.dumps(named, option=orjson.OPT_SERIALIZE_NUMPY).decode()


NOTIFY_SECONDS = 30.0
"""Seconds for which appends notify after a lease announced that it waits."""


class _PostgresWaiter:
    """Listens for notifications, and announces this to appends."""

    def __init__(self, ledger: PostgresLedger, connection: psycopg.Connection[Any], consumer: int) -> None:
        self.ledger = ledger
        self.connection = connection
        self.consumer = consumer
        self.announced_at = -math.inf

    def mark(self) -> None:
        if time.monotonic() < self.announced_at + NOTIFY_SECONDS / 2:
            return
        with self.ledger.write(shared=True, durable=False) as tx:
            tx.run("UPDATE consumers SET waiting = ? WHERE id = ?", (tx.now + NOTIFY_SECONDS, self.consumer))
        self.announced_at = time.monotonic()

    def wait(self, seconds: float) -> None:
        import psycopg

        try:
            for _ in self.connection.notifies(timeout=seconds, stop_after=1):
                pass
        except psycopg.Error as error:
            raise self.ledger._translate_error(error, self.connection.closed) from error


@contextmanager
def _pipeline(connection: psycopg.Connection[Any]) -> Iterator[psycopg.Pipeline]:
    """Enter a pipeline that does not report the statements that an error skipped."""
    import psycopg

    context = connection.pipeline()
    pipeline = context.__enter__()
    try:
        yield pipeline
    except BaseException:
        with suppress(psycopg.Error):
            context.__exit__(None, None, None)
        raise
    context.__exit__(None, None, None)


class PostgresLedger:
    """A schema of a PostgreSQL database. Each thread that uses it at the same time has a connection of its own."""

    dialect = "postgresql"
    in_ints = PostgresTransaction.in_ints

    def __init__(
        self, url: str, schema: str = "rollbook", *, read_only: bool = False, clock: Callable[[], float] | None = None
    ) -> None:
        self.url = url
        self.schema = schema
        self.read_only = read_only
        self.clock = clock
        self._changed = threading.Condition()
        self._turns = TurnQueue()
        self._pid = os.getpid()
        self._closed = False
        self._idle: list[Any] = [self._connect(waits_for=_STARTING)]
        self._open = 1
        self._lock_key = f"""{LOCK}, hashtext('{schema.replace("'", "''")}')"""

    def check_privilege(self) -> None:
        """Raise `BookError` if the schema exists and this user may not use it: its tables would seem to be missing."""
        query = "SELECT current_user, has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s"
        with self.connection() as connection:
            row = connection.execute(query, (self.schema,)).fetchone()
        if row is not None and not row[1]:
            raise BookError(
                f"{redacted(self.url)}: user {row[0]!r} has no rights on the schema {self.schema!r}, expected those on "
                "the schema, its tables and its sequences"
            )

    def make_schema(self) -> None:
        """Create the schema if it does not exist."""
        import psycopg
        from psycopg import sql

        name = sql.Identifier(self.schema)
        with self.connection() as connection:
            row = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (self.schema,)).fetchone()
            if row is None:
                try:
                    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
                except psycopg.errors.UniqueViolation:
                    pass  # Another process created it at the same moment.
                except psycopg.Error as error:
                    raise NotABookError(f"schema {self.schema!r} cannot be created: {str(error).strip()}") from None

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection to the calling thread; a broken one is replaced."""
        if self._pid != os.getpid():
            # Only the parent may close its connections.
            _parent_connections.extend(self._idle)
            self._changed, self._turns = threading.Condition(), TurnQueue()
            self._idle, self._open, self._pid = [], 0, os.getpid()
        with self._changed:
            while not self._idle and self._open >= CONNECTIONS and not self._closed:
                self._changed.wait()
            if self._closed:
                raise BookError("the book is closed")
            connection = self._idle.pop() if self._idle else None
            if connection is None:
                self._open += 1
        try:
            if connection is None or connection.closed:
                connection = self._connect()
            yield connection
        finally:
            with self._changed:
                if connection is None or connection.closed or self._closed:
                    self._open -= 1
                    if connection is not None:
                        connection.close()
                else:
                    self._idle.append(connection)
                self._changed.notify()

    @contextmanager
    def write(
        self, *, shared: bool = False, durable: bool = True, timeout: float | None = None
    ) -> Iterator[PostgresTransaction]:
        begin = "" if durable else "SET LOCAL synchronous_commit TO off; "
        kind = "_shared" if shared else ""
        begin += f"SELECT pg_advisory_xact_lock{kind}({self._lock_key})"
        yield from self._transaction(begin, True, BUSY_SECONDS if timeout is None else timeout)

    @contextmanager
    def read(self) -> Iterator[PostgresTransaction]:
        idle = f"SET LOCAL idle_in_transaction_session_timeout TO {_milliseconds(READ_SECONDS)}"
        scans = "; ".join(f"SET LOCAL {name} TO on" for name in _SCAN_SETTINGS)
        yield from self._transaction(
            f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; {idle}; {scans}", False, math.inf
        )

    def _transaction(self, begin: str, writes: bool, seconds: float) -> Iterator[PostgresTransaction]:
        import psycopg

        committing, broken = False, True
        try:
            with self._begin(begin, seconds) as (connection, now):
                try:
                    with _pipeline(connection) as pipeline:
                        tx = PostgresTransaction(connection, pipeline, now)
                        yield tx
                        tx.flush()
                        if writes:
                            hit_failpoint("before commit")
                        committing = writes
                        connection.execute("COMMIT")
                        for consumer in tx.notified_consumers:
                            # Not within the transaction: the server lets one commit at a time that notifies.
                            connection.execute("SELECT pg_notify(%s, '')", (self.channel(consumer),))
                except BaseException as error:
                    broken = connection.closed
                    failed = not broken and connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
                    self._undo(connection)
                    if isinstance(error, psycopg.errors.LockNotAvailable):
                        self._end_paused_sessions(connection)
                    if failed:
                        # The server skipped the rest of the pipeline. psycopg takes statements for prepared that were
                        # in it: the next transaction gets another connection.
                        connection.close()
                    raise
        except BaseException as error:
            explained = self._translate_error(error, broken, committing, seconds)
            if explained is error:
                raise
            raise explained from error
        if writes:
            hit_failpoint("after commit")

    @contextmanager
    def _begin(self, begin: str, seconds: float) -> Iterator[tuple[psycopg.Connection[Any], float]]:
        """Return a connection in a new transaction, and the time.

        Connections that broke while idle (after a restart of the server) are replaced; no statement can be lost.
        """
        import psycopg

        end = time.monotonic() + seconds
        attempt = 0
        with ExitStack() as stack:
            while True:
                connection = stack.enter_context(self.connection())
                left = max(end - time.monotonic(), 0.0)
                # With more time left, the session's limit applies.
                limit = f"SET LOCAL lock_timeout TO {_milliseconds(left)}; " if left < IDLE_SECONDS else ""
                try:
                    if self.clock is not None:
                        connection.execute(f"BEGIN; {limit}{begin}".encode())
                        now = self.clock()
                    else:
                        cursor = connection.execute(f"BEGIN; {limit}{begin}; {_CLOCK}".encode())
                        while cursor.nextset():
                            pass
                        now = float(cursor.fetchone()[0])  # type: ignore[index]
                    break
                except psycopg.errors.LockNotAvailable:
                    self._undo(connection)
                    self._end_paused_sessions(connection)
                    if time.monotonic() >= end:
                        raise
                    stack.close()
                except BaseException as error:
                    self._undo(connection)
                    attempt += 1
                    broken = isinstance(error, psycopg.OperationalError) and connection.closed
                    if not broken or attempt > CONNECTIONS:
                        raise
                    stack.close()
            yield connection, now

    def _connect(self, waits_for: Sequence[str] = ("",)) -> Any:
        """Connect, again while the error has one of these texts."""
        end = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return connect(self.url, self.schema)
            except ConnectionLostError as error:
                if time.monotonic() > end or not any(text in str(error) for text in waits_for):
                    raise
            time.sleep(0.2)

    def _undo(self, connection: psycopg.Connection[Any]) -> None:
        import psycopg

        try:
            if not connection.closed:
                connection.execute("ROLLBACK")
        except psycopg.Error:
            connection.close()

    def _end_paused_sessions(self, connection: psycopg.Connection[Any]) -> None:
        """End the sessions that hold the book's lock and have waited for their clients for too long.

        The server's own timer does not run within a pipeline, nor after one that ended with a flush.
        """
        import psycopg

        paused = (
            f"{_LOCK_HOLDERS} AND (a.state LIKE 'idle in transaction%%' OR a.wait_event = 'ClientRead') "
            "AND a.state_change < clock_timestamp() - %s * interval '1 second'"
        )
        values = (LOCK, self.schema, IDLE_SECONDS)
        with suppress(psycopg.Error):
            # Checked twice: a session that has just finished a long statement continues.
            seen = connection.execute(f"SELECT a.pid, a.state_change {paused}", values).fetchall()
            if seen:
                time.sleep(0.1)
            for pid, since in seen:
                connection.execute(
                    f"SELECT pg_terminate_backend(a.pid) {paused} AND a.pid = %s AND a.state_change = %s",
                    (*values, pid, since),
                )

    def _translate_error(
        self, error: BaseException, broken: bool, committing: bool = False, seconds: float = math.inf
    ) -> BaseException:
        import psycopg

        address, text = redacted(self.url), _one_line(error)
        if isinstance(error, psycopg.errors.DiskFull):
            return OSError(f"{address}: {text}")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return BookError(f"{address}: {text}")
        if isinstance(error, (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected)):
            return ConcurrentChangeError(text)
        if isinstance(error, psycopg.errors.LockNotAvailable):
            waited = min(seconds, BUSY_SECONDS)
            return LockTimeoutError(
                f"{address}: other writers held the ledger for {waited:.3g} s{self._name_lock_holder()}"
            )
        if isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout):
            return ConnectionLostError(
                f"{address}: this process paused for more than {IDLE_SECONDS:g} s inside a transaction, and the server "
                "ended its session; nothing was changed"
            )
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            if not broken:
                return BookError(f"{address}: {text}")
            if committing:
                return OutcomeUnknownError(
                    f"{address}: the connection to PostgreSQL broke during the commit, so its outcome is unknown; "
                    f"repeat the same call: {text}"
                )
            return ConnectionLostError(f"{address}: the connection to PostgreSQL broke, nothing was changed: {text}")
        return error

    def _name_lock_holder(self) -> str:
        """Name a session that holds the book's lock, if there is one now."""
        import psycopg

        try:
            with self.connection() as connection:
                columns = "a.pid, a.application_name, COALESCE(a.client_addr::text, 'local'), a.state"
                row = connection.execute(f"SELECT {columns} {_LOCK_HOLDERS}", (LOCK, self.schema)).fetchone()
        except (psycopg.Error, BookError):
            return ""
        return "" if row is None else f": session {row[0]} ({row[1]}, from {row[2]}) holds it, {row[3]}"

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return every row of one query, in one exchange with the server."""
        import psycopg

        attempt = 0
        while True:
            with self.connection() as connection:
                try:
                    return connection.execute(_to_percent(sql), values).fetchall()
                except psycopg.Error as error:
                    attempt += 1
                    if not connection.closed or attempt > CONNECTIONS:
                        raise self._translate_error(error, connection.closed) from error

    def array(self, values: Sequence[Any]) -> list[Any]:
        """Return the parameter of `in_ints`."""
        return list(values)

    def channel(self, consumer: int) -> str:
        """Return the channel on which appends notify waiting leases of a consumer."""
        return f"rollbook_{xxhash.xxh3_64_hexdigest(self.schema.encode())}_{consumer}"

    @contextmanager
    def wait_turn(
        self, consumer: int, seconds: float | None, stop: threading.Event
    ) -> Iterator[_PostgresWaiter | None]:
        """Implement `Ledger.wait_turn`. Processes wait for an advisory lock, over a separate connection."""
        import psycopg

        end = math.inf if seconds is None else time.monotonic() + seconds
        with self._turns.take(consumer, end, stop) as mine, ExitStack() as stack:
            waiter = None
            if mine:
                connection = stack.enter_context(self._connect())
                key = f"{LOCK + 2}, hashtext('{self.channel(consumer)}')"
                while waiter is None and not stop.is_set() and time.monotonic() < end:
                    # Short: a statement that waits for long keeps the server from vacuuming the book's tables.
                    wait = min(1.0, end - time.monotonic())
                    try:
                        connection.execute(f"SET lock_timeout TO {max(1, int(wait * 1000))}")
                        connection.execute(f"SELECT pg_advisory_lock({key})")
                        connection.execute(f"LISTEN {self.channel(consumer)}")
                        waiter = _PostgresWaiter(self, connection, consumer)
                    except psycopg.errors.LockNotAvailable:
                        continue
                    except psycopg.Error as error:
                        raise self._translate_error(error, connection.closed) from error
            yield waiter

    def bounds(self) -> tuple[int, int]:
        """Return the largest record number and event number such that nothing below them is still being written."""
        # With the exclusive lock, transactions with smaller numbers have committed. A single round trip, so that
        # writers never wait for this client.
        sql = (
            f"BEGIN; SELECT pg_advisory_xact_lock({self._lock_key}); "
            "SELECT (SELECT MAX(seq) FROM records), (SELECT MAX(id) FROM events); COMMIT"
        )
        with self.connection() as connection:
            try:
                cursor = connection.execute(sql.encode())
                cursor.nextset()
                cursor.nextset()
                seq, event = cursor.fetchone()  # type: ignore[misc]
            except BaseException as error:
                broken = connection.closed
                self._undo(connection)
                raise self._translate_error(error, broken) from error
        return seq or 0, event or 0

    def clear_log(self) -> None:
        """Do nothing: the server's vacuum removes old versions of rows."""

    def close(self) -> None:
        """Close the connections. Commits are durable with or without it."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()
