"""PostgreSQL as a ledger: the same four verbs over psycopg.

Invariant: every write transaction holds the book's advisory lock until it is committed, so that writers come one after
another, as they do in SQLite; the clock is the server's.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rollbook.addresses import redacted
from rollbook.book import ledger
from rollbook.book.errors import BookError, ConnectionLost, LockTimeout, NotABook, OutcomeUnknown
from rollbook.book.windows import reached

if TYPE_CHECKING:
    import psycopg

LOCK = 0x726F6C6C  # "roll": the class of advisory locks that books take; the second number is the schema's.
IDLE_SECONDS = 20.0
"""How long a writer may pause inside a transaction before its session is ended: shorter than `BUSY_SECONDS`, so that
writers that wait for it get their turn. Also the longest wait for a lock in one statement."""
READ_SECONDS = 3600.0
"""The same for a reader, which blocks nobody and may copy data between two statements."""
RECONNECT_SECONDS = 30.0
"""How long to wait for a server that restarts."""
NETWORK = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's limits for a server that does not answer; what the URL or the environment says comes first."""
_HOLDERS = (
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s::bigint::oid "
    "AND l.objid = (hashtext(%s)::bigint & 4294967295)::oid "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_left_behind: list[Any] = []


def connect(url: str, schema: str) -> psycopg.Connection[Any]:
    """Connect, with time limits, so that statements refer to `schema`."""
    try:
        import psycopg
        from psycopg import sql
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise ImportError("a book in PostgreSQL needs psycopg: pip install 'rollbook[postgres]'") from None
    try:
        chosen = conninfo_to_dict(url)
        if "PGCONNECT_TIMEOUT" in os.environ:
            chosen["connect_timeout"] = None
        options: dict[str, Any] = {name: value for name, value in NETWORK.items() if name not in chosen}
        options["fallback_application_name"] = f"rollbook {socket.gethostname()}/{os.getpid()}"
        connection = psycopg.connect(url, autocommit=True, **options)
        settings = (
            "SET search_path TO {}; SET statement_timeout TO 0; SET synchronous_commit TO on; "
            "SET client_min_messages TO warning; SET lock_timeout TO {}; SET idle_in_transaction_session_timeout TO {}"
        )
        limit = sql.Literal(_milliseconds(IDLE_SECONDS))
        connection.execute(sql.SQL(settings).format(sql.Identifier(schema), limit, limit))
    except psycopg.OperationalError as error:
        raise ConnectionLost(f"{redacted(url)}: no connection to PostgreSQL: {_line(error)}") from None
    return connection


def _line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())


def _milliseconds(seconds: float) -> int:
    """A limit as the server takes it, where 0 is none."""
    return max(min(round(seconds * 1000), (1 << 31) - 1), 1)


class _PostgresTransaction:
    def __init__(self, cursor: psycopg.Cursor[Any], now: float) -> None:
        self.cursor = cursor
        self.now = now

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        self.cursor.execute(_marked(sql), tuple(values))
        return self.cursor.rowcount

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self.cursor.executemany(_marked(sql), list(rows))

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        self.cursor.execute(_marked(sql), tuple(values))
        return self.cursor.fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        self.cursor.execute(_marked(sql), tuple(values))
        return self.cursor.fetchone()


def _marked(sql: str) -> Any:
    return sql.replace("%", "%%").replace("?", "%s")


class PostgresLedger:
    """A schema of a PostgreSQL database."""

    dialect = "postgresql"

    def __init__(
        self, url: str, schema: str = "rollbook", *, read_only: bool = False, clock: Callable[[], float] | None = None
    ) -> None:
        self.url = url
        self.schema = schema
        self.read_only = read_only
        self.clock = clock
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._connection: Any = connect(url, schema)

    def make_schema(self) -> None:
        """Make the schema if it is not there."""
        import psycopg
        from psycopg import sql

        name = sql.Identifier(self.schema)
        with self._lock:
            row = self._connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (self.schema,)).fetchone()
            if row is None:
                try:
                    self._connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
                except psycopg.errors.UniqueViolation:
                    pass  # Another process made it in the same moment.
                except psycopg.Error as error:
                    raise NotABook(f"schema {self.schema!r} cannot be made: {str(error).strip()}") from None

    def fresh(self) -> psycopg.Connection[Any]:
        """A connection of one's own to the same schema, waiting a little for a server that restarts."""
        found: psycopg.Connection[Any] = self._again()
        return found

    def _current(self) -> Any:
        if self._closed:
            raise BookError("the book is closed")
        if self._pid != os.getpid():
            _left_behind.append(self._connection)
            self._lock = threading.RLock()
            self._pid = os.getpid()
            self._connection = connect(self.url, self.schema)
        return self._connection

    @contextmanager
    def write(self, timeout: float | None = None) -> Iterator[_PostgresTransaction]:
        yield from self._transaction(True, timeout)

    @contextmanager
    def read(self) -> Iterator[_PostgresTransaction]:
        yield from self._transaction(False)

    def _transaction(self, exclusive: bool, timeout: float | None = None) -> Iterator[_PostgresTransaction]:
        self._current()
        committing = False
        with ledger.take_turn(self._lock, timeout) as seconds:
            try:
                if exclusive:
                    cursor = self._locked(seconds)
                else:
                    cursor = self._begun(
                        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "
                        f"SET LOCAL idle_in_transaction_session_timeout TO {_milliseconds(READ_SECONDS)}"
                    )
                if self.clock is None:
                    now = float(cursor.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()[0])
                else:
                    now = self.clock()
                yield _PostgresTransaction(cursor, now)
                if exclusive:
                    reached("before commit")
                committing = exclusive
                cursor.execute("COMMIT")
            except BaseException as error:
                self._undo()
                explained = self._explained(error, committing, seconds)
                if explained is error:
                    raise
                raise explained from error
        if exclusive:
            reached("after commit")

    def _locked(self, seconds: float | None) -> Any:
        """A cursor in a new transaction that holds the book's lock."""
        import psycopg

        end = time.monotonic() + (ledger.BUSY_SECONDS if seconds is None else seconds)
        while True:
            cursor = self._begun("BEGIN")
            lock, values = "pg_advisory_xact_lock(%s, hashtext(%s))", (LOCK, self.schema)
            left = end - time.monotonic()
            try:
                if left >= IDLE_SECONDS:  # The session's limit.
                    return cursor.execute(f"SELECT {lock}", values)
                limit = str(_milliseconds(left))
                return cursor.execute(f"SELECT set_config('lock_timeout', %s, true), {lock}", (limit, *values))
            except psycopg.errors.LockNotAvailable:
                self._undo()
                self._end_paused()
                if time.monotonic() >= end:
                    raise

    def _end_paused(self) -> None:
        """End the sessions that hold the book's lock and have paused for too long.

        The server does so too, but its timer does not run after a pipeline (of `executemany`), whose last message is
        not a sync.
        """
        import psycopg

        with suppress(psycopg.Error):
            self._connection.execute(
                f"SELECT pg_terminate_backend(a.pid) {_HOLDERS} AND a.state LIKE 'idle in transaction%%' "
                "AND a.state_change < clock_timestamp() - %s * interval '1 second'",
                (LOCK, self.schema, IDLE_SECONDS),
            )

    def _begun(self, begin: str) -> Any:
        """A cursor in a new transaction, over a new connection if the old one broke while it lay idle, as it does when
        the server restarts: nothing was under way that could be lost."""
        import psycopg

        if not self._connection.closed:
            try:
                return self._connection.cursor().execute(begin)
            except psycopg.OperationalError:
                if not self._connection.closed:
                    raise
        self._connection = self._again()
        return self._connection.cursor().execute(begin)

    def _again(self) -> Any:
        end = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return connect(self.url, self.schema)
            except ConnectionLost:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def _undo(self) -> None:
        import psycopg

        try:
            if not self._connection.closed:
                self._connection.execute("ROLLBACK")
        except psycopg.Error:
            self._connection.close()

    def _explained(self, error: BaseException, committing: bool, seconds: float | None) -> BaseException:
        import psycopg

        where, text = redacted(self.url), _line(error)
        if isinstance(error, psycopg.errors.DiskFull):
            return OSError(f"{where}: {text}")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return BookError(f"{where}: {text}")
        if isinstance(error, psycopg.errors.LockNotAvailable):
            waited = ledger.BUSY_SECONDS if seconds is None else seconds
            return LockTimeout(f"{where}: other writers held the ledger for {waited:.3g} s{self._holder()}")
        if isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout):
            return ConnectionLost(
                f"{where}: this process paused for more than {IDLE_SECONDS:g} s inside a transaction, and the server "
                "ended its session; nothing was changed"
            )
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            if not self._connection.closed:
                return BookError(f"{where}: {text}")
            if committing:
                return OutcomeUnknown(
                    f"{where}: the connection to PostgreSQL broke during the commit, so its outcome is unknown; "
                    f"repeat the same call: {text}"
                )
            return ConnectionLost(f"{where}: the connection to PostgreSQL broke, nothing was changed: {text}")
        return error

    def _holder(self) -> str:
        """Name the session that holds the book's lock, if there is one now."""
        import psycopg

        try:
            row = self._connection.execute(
                f"SELECT a.pid, a.application_name, COALESCE(a.client_addr::text, 'local'), a.state {_HOLDERS}",
                (LOCK, self.schema),
            ).fetchone()
        except psycopg.Error:
            return ""
        return "" if row is None else f": session {row[0]} ({row[1]}, from {row[2]}) holds it, {row[3]}"

    def clear_log(self) -> None:
        """Nothing: old versions of rows leave with the server's vacuum."""

    def close(self) -> None:
        """Close the connection; what was committed is safe in any case."""
        if not self._closed and self._pid == os.getpid():
            with self._lock:
                self._connection.close()
        self._closed = True
