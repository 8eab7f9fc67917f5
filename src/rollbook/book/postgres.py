"""PostgreSQL as a ledger: the same four verbs over psycopg.

Invariant: every write transaction holds the book's advisory lock until it is committed, so that writers come one after
another, as they do in SQLite; the clock is the server's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollbook.addresses import redacted
from rollbook.book.errors import BookError, NotABook
from rollbook.book.windows import reached

if TYPE_CHECKING:
    import psycopg

LOCK = 0x726F6C6C  # "roll": the class of advisory locks that books take; the second number is the schema's.
_left_behind: list[Any] = []


def connect(url: str, schema: str) -> psycopg.Connection[Any]:
    """A connection whose statements speak of `schema`."""
    try:
        import psycopg
        from psycopg import sql
    except ImportError:
        raise ImportError("a book in PostgreSQL needs psycopg: pip install 'rollbook[postgres]'") from None
    try:
        connection = psycopg.connect(url, autocommit=True)
        connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))
        connection.execute("SET statement_timeout TO 0")
        connection.execute("SET synchronous_commit TO on")
        connection.execute("SET client_min_messages TO warning")
    except psycopg.OperationalError as error:
        raise BookError(f"{redacted(url)}: no connection to PostgreSQL: {str(error).strip()}") from None
    return connection


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
    def write(self) -> Iterator[_PostgresTransaction]:
        yield from self._transaction(True)

    @contextmanager
    def read(self) -> Iterator[_PostgresTransaction]:
        yield from self._transaction(False)

    def _transaction(self, exclusive: bool) -> Iterator[_PostgresTransaction]:
        self._current()
        with self._lock:
            try:
                cursor = self._begun("BEGIN" if exclusive else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                if exclusive:
                    cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (LOCK, self.schema))
                if self.clock is None:
                    now = float(cursor.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()[0])
                else:
                    now = self.clock()
                yield _PostgresTransaction(cursor, now)
                if exclusive:
                    reached("before commit")
                cursor.execute("COMMIT")
            except BaseException as error:
                self._undo()
                explained = self._explained(error)
                if explained is error:
                    raise
                raise explained from error
        if exclusive:
            reached("after commit")

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
        end = time.monotonic() + 30
        while True:
            try:
                return connect(self.url, self.schema)
            except BookError:
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

    def _explained(self, error: BaseException) -> BaseException:
        import psycopg

        if isinstance(error, psycopg.errors.DiskFull):
            return OSError(f"{redacted(self.url)}: {str(error).strip()}")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return BookError(f"{redacted(self.url)}: {str(error).strip()}")
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            return BookError(f"{redacted(self.url)}: the connection to PostgreSQL broke: {str(error).strip()}")
        return error

    def clear_log(self) -> None:
        """Nothing: old versions of rows leave with the server's vacuum."""

    def close(self) -> None:
        """Close the connection; what was committed is safe in any case."""
        if not self._closed and self._pid == os.getpid():
            with self._lock:
                self._connection.close()
        self._closed = True
