"""The ledger's database: SQLite in a folder or in memory, PostgreSQL on a server, behind one small protocol.

Invariant: `write()` is exclusive: no other transaction writes until it commits. `write(shared=True)` excludes exclusive
transactions only: appends, leases and acknowledgements run concurrently in PostgreSQL and lock the rows they change. In
SQLite every write transaction is exclusive. SQL is shared by both databases, with `?` for parameters.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import math
import os
import random
import sqlite3
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from rollbook.book import disk
from rollbook.book.disk import file_identity, folder_lock
from rollbook.book.errors import (
    BookError,
    ConnectionLostError,
    CorruptBookError,
    LockTimeoutError,
    MissingBookError,
    NewerLayoutError,
    NotABookError,
    OutcomeUnknownError,
    ReadOnlyError,
    StoreFullError,
    moved_error,
)
from rollbook.core.errors import RollbookError
from rollbook.core.files import FILE_MODE
from rollbook.core.metrics import warn_user

if TYPE_CHECKING:
    from rollbook.book.book import Book


LAYOUT = 5
"""Version of the tables' layout."""
HASH_FORMAT = 1
"""Version of the content hashes; here, so that listing books loads neither numpy nor pyarrow."""
BUSY_SECONDS = 30.0
"""Seconds that a writer waits for other writers by default."""
_WRITE_LOCK_BYTE = 120
"""The byte of the file `-shm` that a writer locks."""
RETRY_SECONDS = 30.0
"""Seconds for which a write transaction is retried after broken connections."""
OUTAGE_SECONDS = 600.0
"""Seconds for which `retry_outages` repeats a call."""
_OUTAGE_POLL_SECONDS = 1.0
WAL_SUFFIX = "-wal"
"""Suffix of the file name of SQLite's write-ahead log."""
_DAMAGE_PHRASES = ("malformed", "not a database", "corrupt", "Could not decode", "too big", "integer overflow")
MAX_VALUE_BYTES = 64 << 20
"""Maximum size of a text or row; SQLite would allow a gigabyte."""
MAX_IN_VALUES = 500
"""Maximum number of values of one `IN (...)`; the limit of old SQLite builds is 999."""

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
RETRIABLE_ERRORS = (ConnectionLostError, OutcomeUnknownError, LockTimeoutError, StoreFullError)
"""Errors of a book after which the same call may succeed later."""
LedgerValue = int | float | str | bytes | None
"""A value of any column: SQLite stores values of other types than the column's, too."""
_IN_JSON_ARRAY = "IN (SELECT value FROM json_each(?))"


def _to_json_array(values: Sequence[Any]) -> str:
    try:
        return json.dumps(values)
    except TypeError:
        # SQLite stores bytes in a column of texts, too.
        raise CorruptBookError(f"got {str(values)[:100]}, expected numbers or texts; see `rollbook check`") from None


class ConcurrentChangeError(RollbookError):
    """Another transaction inserted the same row, or the two deadlocked; nothing was written, retry."""


def retry_outages(
    function: Callable[..., Result],
    *arguments: Any,
    outage_seconds: float = OUTAGE_SECONDS,
    stop: threading.Event | None = None,
    **options: Any,
) -> Result:
    """Call a function of a book, and repeat the call while the book's server does not respond.

    Args:
        function: The function; a second call after one whose outcome is unknown must do no harm.
        arguments: Its arguments.
        outage_seconds: Seconds after which the error is raised.
        stop: Ends the attempts earlier.
        options: Its keyword arguments.
    """
    end, stop = time.monotonic() + outage_seconds, threading.Event() if stop is None else stop
    while True:
        try:
            return function(*arguments, **options)
        except RETRIABLE_ERRORS as error:
            if time.monotonic() >= end or stop.is_set():
                raise
            warn_user(f"book not responding, retrying: {error}")
            stop.wait(_OUTAGE_POLL_SECONDS)


class Transaction(Protocol):
    """A transaction of the ledger, which runs statements."""

    shard: int
    """The row of a counter that this transaction adds to; concurrent transactions have different ones."""
    in_ints: str
    """An SQL operator with one parameter, `tx.array(numbers)`: true for a value that is one of them."""
    in_texts: str
    """The same for texts."""
    for_update: str
    """The end of a query for rows that this transaction is going to change: a lock, if the database has row locks."""

    @property
    def now(self) -> float:
        """The database's clock when the transaction began, in seconds since 1970."""

    def run(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Run one statement. In PostgreSQL an error may surface at a later statement."""

    def defer(self, table: str, sql: str, values: Sequence[Any] = ()) -> None:
        """Run one statement that changes rows of `table`, at any time before the next query or the commit.

        Its effect must not depend on that of other statements since.
        """

    def count(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement and return how many rows it changed."""

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row of values."""

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], conflict: str = "") -> None:
        """Insert rows in one statement, as `defer` does; `conflict` is an `ON CONFLICT` clause."""

    def update(self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Set `columns` of the rows that `keys` name, as `defer` does; each row of values has the columns first, then
        the keys."""

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return every row of the answer."""

    def first(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of the answer, or `None`."""

    def query_many(self, *queries: tuple[str, Sequence[Any]]) -> list[list[Any]]:
        """Return the rows of several queries, sent to the database together."""

    def array(self, values: Sequence[Any]) -> Any:
        """Return the parameter of `in_ints` and `in_texts`."""

    def next_number(self, table: str, count: int) -> tuple[str, Sequence[Any]]:
        """Return a query that reserves `count` numbers for new rows of "records" or "leases" and gives the first."""

    def notify(self, consumer: int) -> None:
        """Wake leases that wait for records of this consumer, once the transaction is committed."""


class Waiter(Protocol):
    """Waits until the book changes."""

    def mark(self) -> None:
        """Make changes from now on end the next `wait`."""

    def wait(self, seconds: float) -> None:
        """Wait until the book has changed since `mark`, for up to `seconds` seconds."""


class Ledger(Protocol):
    """A database with the ledger of a book."""

    dialect: str

    @property
    def clock(self) -> Callable[[], float] | None:
        """Replaces the database's clock in tests; `None` for the clock of PostgreSQL."""

    def write(
        self, *, shared: bool = False, durable: bool = True, timeout: float | None = None
    ) -> AbstractContextManager[Transaction]:
        """Begin a write transaction, which the context commits unless an exception leaves it.

        Args:
            shared: Run concurrently with other shared transactions; by default no other transaction writes.
            durable: Wait until the commit is on disk. Otherwise a server crash may undo it, together with all later
                commits that did not wait either.
            timeout: How many seconds to wait for other writers, `BUSY_SECONDS` by default.

        Raises:
            LockTimeoutError: Other writers held the ledger for so long.
            ConnectionLostError: The connection broke before the commit.
            OutcomeUnknownError: The connection broke during the commit.
        """

    def read(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that sees one state of the book."""

    in_ints: str
    """See `Transaction.in_ints`; for `all`."""

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return every row of one query, in a transaction of its own."""

    def array(self, values: Sequence[Any]) -> Any:
        """Return the parameter of `in_ints`."""

    def wait_turn(
        self, consumer: int, seconds: float | None, stop: threading.Event
    ) -> AbstractContextManager[Waiter | None]:
        """Wait in line with callers of all processes; one at a time gets a `Waiter` as the context's value.

        The value is `None` if the turn does not come within `seconds`, or `stop` is set.
        """

    def bounds(self) -> tuple[int, int]:
        """Return the largest record number and event number such that nothing below them is still being written."""

    def clear_log(self) -> None:
        """Remove old versions of rows, unless the database does so itself."""

    def close(self) -> None: ...


def chunks(values: Sequence[Any], size: int = MAX_IN_VALUES) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield `values` in chunks, each with the question marks of an `IN (...)`.

    >>> [(marks, list(part)) for marks, part in chunks([1, 2, 3], 2)]
    [('?,?', [1, 2]), ('?', [3])]
    """
    for start in range(0, len(values), size):
        chunk = values[start : start + size]
        yield ",".join("?" * len(chunk)), chunk


def yield_to_writers(ledger: Ledger) -> None:
    """Let other writers run between two steps of a long task: SQLite is not fair, and they poll for the lock."""
    if ledger.dialect == "sqlite":
        time.sleep(0.01)


def took_effect(ledger: Ledger, error: BookError, committed: Callable[[Transaction], bool]) -> bool:
    """Return whether a write transaction took effect that ended with a broken connection.

    Args:
        error: `ConnectionLostError` or `OutcomeUnknownError`, as the transaction raised it.
        committed: Looks for a trace of the transaction.

    Raises:
        OutcomeUnknownError: The server does not answer.
    """
    if not isinstance(error, OutcomeUnknownError):
        return False
    try:
        # Not `read`: the broken session may still be committing, and holds the lock until it is done.
        with ledger.write() as tx:
            return committed(tx)
    except BookError as failure:
        raise OutcomeUnknownError(f"{error}; then: {failure}") from failure


def write_once(
    ledger: Ledger,
    transact: Callable[[Transaction], Result],
    committed: Callable[[Transaction, Result], bool],
    timeout: float | None = None,
    begin: Callable[[float | None], AbstractContextManager[Transaction]] | None = None,
) -> Result:
    """Run a write transaction exactly once, also if the connection breaks.

    Args:
        ledger: The ledger.
        transact: The body of the transaction.
        committed: Checks for a trace of a transaction that had this result. It is called after a broken connection; if
            it finds none, the transaction runs again.
        timeout: How many seconds to wait for other writers, `BUSY_SECONDS` by default.
        begin: Begins the transaction, with a timeout; by default it is `ledger.write(shared=True)`.

    Returns:
        The result of `transact`.

    Raises:
        LockTimeoutError: Other writers held the ledger for so long.
        OutcomeUnknownError: The server does not answer, so it is unknown whether the transaction took effect.
    """
    results: list[Result] = []
    start = time.monotonic()
    patience = BUSY_SECONDS if timeout is None else timeout
    while True:
        try:
            with ledger.write(shared=True, timeout=timeout) if begin is None else begin(timeout) as tx:
                results.append(transact(tx))
            return results[-1]
        except (ConnectionLostError, OutcomeUnknownError) as error:
            if took_effect(ledger, error, lambda tx: committed(tx, results[-1])):
                return results[-1]
            if time.monotonic() >= start + RETRY_SECONDS:
                raise
        except LockTimeoutError:
            # The wait for a row's lock is shorter than `patience`; paused sessions that held it have been ended.
            left = start + patience - time.monotonic()
            if left <= 0.01:
                raise
            timeout = left


def parse_object(text: LedgerValue, label: str) -> dict[str, Any]:
    """Parse a JSON object of a ledger, which is not trusted.

    Args:
        text: The JSON.
        label: Prefix of error messages.

    Raises:
        CorruptBookError: It is not a JSON object.

    >>> parse_object('{"step": 3}', "a detail")
    {'step': 3}
    """
    try:
        fields = json.loads(text)  # type: ignore[arg-type]
    except (RecursionError, TypeError, ValueError) as error:
        raise CorruptBookError(f"{label}: got {str(text)[:100]!r}, invalid JSON: {str(error)[:100]}") from None
    if not isinstance(fields, dict):
        raise CorruptBookError(f"{label}: got {str(text)[:100]!r}, expected a dict")
    return fields


class _SQLiteTransaction:
    shard = 0
    in_ints = in_texts = _IN_JSON_ARRAY
    for_update = ""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self.connection = connection
        self.now = now

    def run(self, sql: str, values: Sequence[Any] = ()) -> None:
        self.connection.execute(sql, values)

    def defer(self, table: str, sql: str, values: Sequence[Any] = ()) -> None:
        self.connection.execute(sql, values)

    def count(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self.connection.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self.connection.executemany(sql, rows)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], conflict: str = "") -> None:
        if not rows:
            return
        # The driver binds `None` several times slower than a number: columns without values are left out.
        names: list[str] = []
        values: list[tuple[Any, ...]] = []
        for name, column in zip(columns, zip(*rows, strict=True), strict=True):
            if column.count(None) < len(column):
                names.append(name)
                values.append(column)
        marks = ", ".join("?" * len(names))
        sql = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks}) {conflict}"
        self.connection.executemany(sql, zip(*values, strict=True))

    def update(self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        assignments, condition = " = ?, ".join(columns), " = ? AND ".join(keys)
        self.connection.executemany(f"UPDATE {table} SET {assignments} = ? WHERE {condition} = ?", rows)

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        return self.connection.execute(sql, values).fetchall()

    def first(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self.connection.execute(sql, values).fetchone()

    def query_many(self, *queries: tuple[str, Sequence[Any]]) -> list[list[Any]]:
        return [self.connection.execute(sql, values).fetchall() for sql, values in queries]

    array = staticmethod(_to_json_array)

    def next_number(self, table: str, count: int) -> tuple[str, Sequence[Any]]:
        key = {"records": "seq", "leases": "id"}[table]
        return f"SELECT COALESCE(MAX({key}), 0) + 1 FROM {table}", ()

    def notify(self, consumer: int) -> None:
        return None


POLL_SECONDS = 0.05
"""Polling interval of a waiting thread or process, in seconds."""


class TurnQueue:
    """Queues of waiting threads of this process, one for each consumer."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def take(self, consumer: int, end: float, stop: threading.Event) -> Iterator[bool]:
        """Wait for a turn; the context's value is whether it came before `end` (monotonic time) and `stop`."""
        line = self._lines[consumer]
        while not stop.is_set():
            if line.acquire(timeout=max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
                try:
                    yield True
                finally:
                    line.release()
                return
            if time.monotonic() >= end:
                break
        yield False


class _SQLiteWaiter:
    """Polls SQLite's counter of changes, which takes a few microseconds."""

    def __init__(self, ledger: SQLiteLedger) -> None:
        self.ledger = ledger
        self.seen = ledger.changes()

    def mark(self) -> None:
        self.seen = self.ledger.changes()

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        pause = 0.001
        while self.ledger.changes() == self.seen and time.monotonic() < end:
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(pause * 1.5, 0.01)


def check_files(path: Path) -> None:
    """Raise `NotABookError` if a file is a link, which SQLite would follow, or a pipe, on which it would block."""
    for tail in ("", "-wal", "-shm", "-journal"):
        name = f"{path}{tail}"
        try:
            mode = os.lstat(name).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(mode):
            raise NotABookError(f"{name}: a link, a pipe, a device or a folder, expected a plain file")


def check_no_code(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `NotABookError` if the database has views, triggers, virtual tables or generated columns.

    They could run code of an untrusted database. A ledger has only tables of plain columns, and indices.
    """
    objects = connection.execute(
        "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%' "
        "UNION ALL SELECT 'column', item.name || '.' || info.name FROM sqlite_master AS item "
        "JOIN pragma_table_xinfo(item.name) AS info WHERE item.type = 'table' AND info.hidden <> 0 LIMIT 1"
    ).fetchone()
    if objects is not None:
        raise NotABookError(f"{path}: not a ledger: it has the {objects[0]} {str(objects[1])[:80]!r}")


def _name_lock_holder(path: Path | None) -> str:
    """Name the process that holds SQLite's write lock, where the system lists file locks (Linux).

    The file itself must not be opened here: closing it would release this process's own locks on it.
    """
    if path is None:
        return ""
    try:
        inode = os.stat(f"{path}-shm").st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 4711 fe:01:1234 120 120
        words = line.split()
        if len(words) != 8 or words[3] != "WRITE" or not words[5].endswith(f":{inode}") or not words[4].isdigit():
            continue
        if int(words[6]) <= _WRITE_LOCK_BYTE and (words[7] == "EOF" or int(words[7]) >= _WRITE_LOCK_BYTE):
            return f": process {words[4]} holds it"
    return ""


_parent_connections: list[sqlite3.Connection] = []
"""Connections of a parent process: closing one in the child would release the parent's locks."""


class SQLiteLedger:
    """SQLite, in a file with a write-ahead log and a full sync at every commit, or (`path=None`) in memory.

    Every transaction checks that the file is still the one that was opened, and a write transaction shares the lock of
    its folder: a ledger that a repair replaces, or that is moved, takes no commit that would be lost.

    >>> ledger = SQLiteLedger(None)
    >>> with ledger.write() as tx:
    ...     tx.run("CREATE TABLE t (x INTEGER)")
    ...     tx.run_many("INSERT INTO t VALUES (?)", [(1,), (2,)])
    >>> with ledger.read() as tx:
    ...     tx.all("SELECT x FROM t ORDER BY x")
    [(1,), (2,)]
    >>> ledger.close()
    """

    dialect = "sqlite"
    in_ints = _IN_JSON_ARRAY

    def __init__(self, path: Path | None, *, read_only: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.read_only = read_only
        self.clock = clock
        self._lock = threading.RLock()
        self._turns = TurnQueue()
        self._pid = os.getpid()
        self._closed = False
        self._identity: tuple[int, int] | None = None
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        """Connect, and store the identity of the file."""
        if self.path is None:
            return self._connect()
        with nullcontext() if self.read_only else self._block_repairs(self.path):
            while True:
                # A file system with layers may copy a file, under another inode, when it is first opened for writing.
                identity = file_identity(self.path)
                connection = self._connect()
                now = file_identity(self.path)
                if identity == now or identity is None:
                    break
                connection.close()
        if self._identity is not None and self._identity != now:
            connection.close()
            raise moved_error(self.path)
        self._identity = now
        return connection

    @contextmanager
    def _block_repairs(self, path: Path) -> Iterator[None]:
        """Keep repairs from replacing the ledger."""
        with ExitStack() as stack:
            try:
                locked = stack.enter_context(folder_lock(path.parent, shared=True, seconds=BUSY_SECONDS))
            except (FileNotFoundError, NotADirectoryError):
                raise moved_error(path) from None
            if not locked:
                raise BookError(f"{path.parent}: a repair held the book for {BUSY_SECONDS:g} s")
            yield

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        else:
            check_files(self.path)
            mode = "ro" if self.read_only else "rwc"
            if self.read_only and self._is_immutable(self.path):
                mode += "&immutable=1"
            try:
                if not self.read_only and not self.path.exists():
                    # SQLite creates its log and shared-memory files with the mode of the database file.
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
                connection = sqlite3.connect(
                    f"{self.path.resolve().as_uri()}?mode={mode}",
                    uri=True,
                    isolation_level=None,
                    check_same_thread=False,
                    timeout=BUSY_SECONDS,
                )
            except (OSError, sqlite3.OperationalError) as error:
                if self.path.exists() and not os.access(self.path, os.R_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path)) from None
                raise NotABookError(f"{self.path}: the ledger cannot be opened: {error}") from None
        try:
            # Functions named in a foreign schema (views, triggers, indices) are not called.
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            if self.path is not None:
                self._execute_retrying(connection, "SELECT 1 FROM sqlite_master LIMIT 1")
                check_no_code(connection, self.path)
            if self.path is not None and not self.read_only:
                self._execute_retrying(connection, "PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA mmap_size=0")
            connection.execute("PRAGMA secure_delete=ON")  # free pages keep no redacted data
            connection.execute("PRAGMA cache_size=-16384")
            connection.execute("PRAGMA busy_timeout=0")  # `_execute_retrying` waits instead, and polls more often
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._translate_error(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_immutable(self, path: Path) -> bool:
        """Return whether no process can change the ledger: a closed book in a read-only folder.

        SQLite cannot create its shared-memory file there and would refuse to read it.
        """
        log = path.with_name(path.name + WAL_SUFFIX)
        return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)

    def _translate_error(self, error: sqlite3.DatabaseError) -> Exception:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError):
            if self.read_only and "readonly" in text:
                return NotABookError(f"{self.path}: a write was interrupted ({text}); open it for writing once")
            if self.path is not None and "readonly" in text:
                for path in (self.path, self.path.parent):
                    if not os.access(path, os.W_OK):
                        # A disk that is mounted read-only has the same symptom.
                        code = errno.EACCES if os.statvfs(path).f_flag & os.ST_RDONLY == 0 else errno.EROFS
                        return OSError(code, os.strerror(code), str(path))
            for phrase, code in (("disk is full", errno.ENOSPC), ("disk I/O", errno.EIO), ("readonly", errno.EROFS)):
                if phrase in text:
                    return OSError(code, text, str(self.path))
            if self.path is not None and "unable to open" in text:
                return BookError(
                    f"{self.path}: the ledger cannot be opened ({text}); with a {self.path.name}{WAL_SUFFIX} next "
                    "to it, the folder must be writable: copy the book to one that is"
                )
        if isinstance(error, sqlite3.ProgrammingError):
            return error
        if isinstance(error, sqlite3.IntegrityError):
            return CorruptBookError(
                f"{self.path}: the ledger's rows contradict each other ({text}); see `rollbook check`"
            )
        if any(phrase in text for phrase in _DAMAGE_PHRASES):
            return CorruptBookError(
                f"{self.path}: the ledger is damaged ({text}); `rollbook check --repair` recovers what it can"
            )
        return error

    def _execute_retrying(self, connection: sqlite3.Connection, sql: str, seconds: float | None = None) -> None:
        """Run a statement, retrying often while the database is locked: SQLite's own wait sleeps up to 100 ms."""
        seconds = BUSY_SECONDS if seconds is None else seconds
        end = time.monotonic() + seconds
        pause = 0.0002
        while True:
            try:
                connection.execute(sql)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) and "busy" not in str(error):
                    raise
                if time.monotonic() > end:
                    raise LockTimeoutError(
                        f"{self.path}: other writers held the ledger for {seconds:.3g} s{_name_lock_holder(self.path)}"
                    ) from None
            time.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 1.5, 0.005)

    def _get_connection(self) -> sqlite3.Connection:
        if self._closed:
            raise BookError("the book is closed")
        if self._pid != os.getpid():
            if self.path is None:
                raise BookError("memory: a book in memory cannot be used in a forked process")
            _parent_connections.append(self._connection)
            self._lock = threading.RLock()
            self._turns = TurnQueue()
            self._pid = os.getpid()
            self._connection = self._open()
        return self._connection

    @contextmanager
    def write(
        self, *, shared: bool = False, durable: bool = True, timeout: float | None = None
    ) -> Iterator[_SQLiteTransaction]:
        with nullcontext() if self.path is None else self._block_repairs(self.path):
            yield from self._transaction("BEGIN IMMEDIATE", timeout)

    @contextmanager
    def read(self) -> Iterator[_SQLiteTransaction]:
        yield from self._transaction("BEGIN")

    def _transaction(self, begin: str, timeout: float | None = None) -> Iterator[_SQLiteTransaction]:
        connection = self._get_connection()
        start = time.monotonic()
        lock = self._lock  # The threads of this process share the connection.
        if not lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise LockTimeoutError(f"another thread of this process held the ledger for {timeout:.3g} s")
        try:
            left = None if timeout is None else max(start + timeout - time.monotonic(), 0.0)
            self._execute_retrying(connection, begin, left)
            try:
                if begin == "BEGIN":
                    # The first query takes the snapshot. It may wait for a connection that recovers, clears the log or
                    # is the last to close the book.
                    self._execute_retrying(connection, "SELECT 1 FROM sqlite_master LIMIT 1")
                if self.path is not None and file_identity(self.path) != self._identity:
                    raise moved_error(self.path)
                yield _SQLiteTransaction(connection, self.clock())
                if disk.failpoints_active and begin != "BEGIN":
                    disk.hit_failpoint("before commit")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            explained = self._translate_error(error)
            if explained is error:
                raise
            raise explained from error
        except OverflowError as error:
            raise CorruptBookError(f"{self.path}: a number out of range ({error}); see `rollbook check`") from error
        finally:
            lock.release()
        if disk.failpoints_active and begin != "BEGIN":
            disk.hit_failpoint("after commit")

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return every row of one query."""
        with self.read() as tx:
            return tx.all(sql, values)

    array = staticmethod(_to_json_array)

    def changes(self) -> tuple[int, int]:
        """Return numbers that change when another connection, or this one, has written."""
        connection = self._get_connection()
        with self._lock:
            return connection.execute("PRAGMA data_version").fetchone()[0], connection.total_changes

    @contextmanager
    def wait_turn(self, consumer: int, seconds: float | None, stop: threading.Event) -> Iterator[_SQLiteWaiter | None]:
        """Implement `Ledger.wait_turn`. Processes wait for a lock on a file, in no guaranteed order."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        with self._turns.take(consumer, end, stop) as mine, ExitStack() as stack:
            if mine and self.path is not None:
                fd = os.open(f"{self.path}.turn{consumer}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
                stack.callback(os.close, fd)
                while mine:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        mine = time.monotonic() < end and not stop.wait(min(POLL_SECONDS, end - time.monotonic()))
            yield _SQLiteWaiter(self) if mine else None

    def bounds(self) -> tuple[int, int]:
        """Return the last record's and the last event's number."""
        with self.read() as tx:
            seq, event = tx.first("SELECT (SELECT MAX(seq) FROM records), (SELECT MAX(id) FROM events)")
        return seq or 0, event or 0

    def clear_log(self) -> None:
        """Write the log back to the database and truncate it if it is not in use, which removes old pages."""
        connection = self._get_connection()
        if self.path is not None and not self.read_only:
            with self._lock:
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                except sqlite3.DatabaseError as error:
                    raise self._translate_error(error) from error

    def close(self) -> None:
        """Close the connection. Commits are durable with or without it."""
        if not self._closed and self._pid == os.getpid():
            with self._lock:
                self._connection.close()
        self._closed = True


def check_text(name: str, text: str, min_length: int = 1, max_length: int = 1 << 20) -> str:
    """Return a text that every database can store.

    Args:
        name: The argument's name, for error messages.
        text: The text.
        min_length: Minimum length.
        max_length: Maximum length.

    Raises:
        ValueError: It is not a string, too short or long, or has NUL or lone surrogates.

    >>> check_text("reason", "too long")
    'too long'
    """
    if not isinstance(text, str) or not min_length <= len(text) <= max_length:
        size = " that is not empty" * min_length
        if isinstance(text, str) and text:
            size = f" of {min_length} to {max_length} characters"
        raise ValueError(f"{name}: got {str(text)[:100]!r}, expected a string{size}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ValueError(f"{name}: got {text!r}, expected no NUL and no lone surrogate, which databases cannot store")
    return text


def check_writable(book: Book, operation: str) -> None:
    """Raise `ReadOnlyError` if the book was opened for reading."""
    if book.read_only:
        raise ReadOnlyError(f"{operation}: {book.url} was opened for reading (mode 'r')")


class Forward(Protocol):
    """Calls a function of a book in the process that serves the book."""

    def __call__(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], *, repeat: bool, wait: bool
    ) -> Any: ...


class WeightsTransport(Protocol):
    """Passes weights from a trainer to rollout workers without storing them in the book."""

    def put_weights(self, id: str, version: int, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> None:
        """Publish weights in place of earlier ones."""

    def get_weights(self) -> tuple[str, int, Mapping[str, bytes | memoryview], Mapping[str, Any]] | None:
        """Return id, version, files and metadata of the published weights, or `None` if there are none."""

    def weights_version(self) -> tuple[str, int] | None:
        """Return the id and the version of the published weights, or `None` if there are none."""


SERVED: dict[str, Callable[..., Any]] = {}
"""The functions that a served book forwards, by module and name; see `served`."""


@overload
def served(function: Callable[Parameters, Result], /) -> Callable[Parameters, Result]: ...


@overload
def served(
    *, repeat: bool = False, wait: bool = False
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...


def served(
    function: Callable[..., Any] | None = None, /, *, repeat: bool = False, wait: bool = False
) -> Callable[..., Any]:
    """Make a function of a book, its first argument, work on a book that another process serves (`ray://`).

    The function then runs in that process. Its other arguments and its result are sent there and back: small plain
    values, dataclasses, bytes and arrays; an `Experience` or `Experiences` is sent as a frame.

    Args:
        function: The function; its first parameter is the book.
        repeat: Whether the call may be repeated if the answer to it was lost. Otherwise it raises
            `OutcomeUnknownError` then.
        wait: The function waits up to its keyword `timeout` (seconds, or `None`), and returns something false if
            nothing came. The wait is cut into short calls, so that it does not block others.

    Returns:
        The function with the same signature.
    """
    if function is None:
        return functools.partial(_serve, repeat=repeat, wait=wait)
    return _serve(function, repeat=repeat, wait=wait)


def _serve(function: Callable[..., Any], *, repeat: bool, wait: bool) -> Callable[..., Any]:
    name = f"{function.__module__}.{function.__qualname__}"
    SERVED[name] = function

    @functools.wraps(function)
    def call(book: Book, *args: Any, **options: Any) -> Any:
        if book.state.forward is None:
            return function(book, *args, **options)
        return book.state.forward(name, args, options, repeat=repeat, wait=wait)

    return call


TYPES = {
    "sqlite": {"EVENT_ID": "INTEGER PRIMARY KEY", "INT": "INTEGER", "REAL": "REAL", "BYTES": "BLOB"},
    "postgresql": {
        "EVENT_ID": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "INT": "BIGINT",
        "REAL": "DOUBLE PRECISION",
        "BYTES": "BYTEA",
    },
}
_TEXT_TYPES = {"sqlite": "TEXT", "postgresql": 'TEXT COLLATE "C"'}
"""The default order of texts depends on the locale in PostgreSQL, and is that of their bytes in SQLite."""

TABLES: dict[str, tuple[str, ...]] = {
    "meta": ("key TEXT PRIMARY KEY", "value TEXT NOT NULL"),
    "records": (
        "seq {INT} PRIMARY KEY",
        "uid TEXT NOT NULL UNIQUE",
        "gid TEXT NOT NULL",
        "batch TEXT NOT NULL",
        "task TEXT NOT NULL",
        "run {INT} NOT NULL",
        "step {INT} NOT NULL",
        "suffix TEXT NOT NULL",
        "reward {REAL}",
        "scored {INT} NOT NULL",
        "length {INT} NOT NULL",
        "prompt_tokens {INT} NOT NULL",
        "response_tokens {INT} NOT NULL",
        "trained_tokens {INT} NOT NULL",
        "version_min {INT}",
        "version_max {INT}",
        "finish_reason TEXT",
        "truncate_status TEXT",
        "kind TEXT NOT NULL",
        "group_size {INT}",
        "parent TEXT",
        "evaluation {INT} NOT NULL",
        "admitted {REAL} NOT NULL",
        "revision {INT} NOT NULL",
        "full_hash {BYTES}",
        "core_hash {BYTES}",
        "segment TEXT",
        "start {INT}",
        "size {INT}",
        "slot {INT}",
        "bytes {INT} NOT NULL",
        "removed_reason TEXT",
    ),
    "consumers": (
        "id {INT} PRIMARY KEY",
        "name TEXT NOT NULL UNIQUE",
        "made {REAL} NOT NULL",
        "settings TEXT NOT NULL",
        "state TEXT NOT NULL",
        "grouped {INT} NOT NULL",
        "inserts {INT} NOT NULL",
        "samples {INT} NOT NULL",
        "floor {INT}",
        "generation {INT} NOT NULL",
        "waiting {REAL}",
    ),
    "queue": (
        "consumer {INT} NOT NULL",
        "seq {INT} NOT NULL",
        "gid TEXT NOT NULL",
        "state TEXT NOT NULL",
        "reason TEXT",
        "rank {REAL} NOT NULL",
        "value {REAL}",
        "weight {REAL} NOT NULL",
        "version {INT}",
        "uses {INT} NOT NULL",
        "attempts {INT} NOT NULL",
        "lease {INT}",
        "until {REAL}",
        "PRIMARY KEY (consumer, seq)",
    ),
    "inbox": (
        "consumer {INT} NOT NULL",
        "first {INT} NOT NULL",
        "last {INT} NOT NULL",
        "count {INT} NOT NULL",
        "numbers TEXT",
        "PRIMARY KEY (consumer, first)",
    ),
    "groups": (
        "consumer {INT} NOT NULL",
        "gid TEXT NOT NULL",
        "seq {INT} NOT NULL",
        "size {INT}",
        "runs {INT} NOT NULL",
        "ready {INT} NOT NULL",
        "rank {REAL} NOT NULL",
        "weight {REAL} NOT NULL",
        "due {REAL}",
        "PRIMARY KEY (consumer, gid)",
    ),
    "leases": (
        "id {INT} PRIMARY KEY",
        "consumer {INT} NOT NULL",
        "holder TEXT NOT NULL",
        "made {REAL} NOT NULL",
        "expires {REAL} NOT NULL",
        "seconds {REAL} NOT NULL",
        "state TEXT NOT NULL",
        "count {INT} NOT NULL",
    ),
    "events": (
        "id {EVENT_ID}",
        "time {REAL} NOT NULL",
        "seq {INT}",
        "consumer {INT}",
        "kind TEXT NOT NULL",
        "reason TEXT",
        "step {INT}",
        "lease {INT}",
        "detail TEXT",
    ),
    "tallies": (
        "consumer {INT} NOT NULL",
        "state TEXT NOT NULL",
        "reason TEXT NOT NULL",
        "shard {INT} NOT NULL",
        "n {INT} NOT NULL",
        "weight {REAL} NOT NULL",
        "PRIMARY KEY (consumer, state, reason, shard)",
    ),
    "revisions": (
        "seq {INT} NOT NULL",
        "n {INT} NOT NULL",
        "time {REAL} NOT NULL",
        "author TEXT NOT NULL",
        "reason TEXT",
        "fields TEXT NOT NULL",
        "full_hash {BYTES}",
        "PRIMARY KEY (seq, n)",
    ),
    "media": (
        "hash TEXT PRIMARY KEY",
        "segment TEXT NOT NULL",
        "start {INT} NOT NULL",
        "size {INT} NOT NULL",
    ),
    "media_uses": ("hash TEXT NOT NULL", "seq {INT} NOT NULL", "PRIMARY KEY (hash, seq)"),
    "checkpoints": (
        "name TEXT PRIMARY KEY",
        "event {INT} NOT NULL",
        "seq {INT} NOT NULL",
        "made {REAL} NOT NULL",
        "state TEXT NOT NULL",
    ),
    "purges": ("segment TEXT PRIMARY KEY", "since {REAL} NOT NULL"),
    "columns": ("name TEXT NOT NULL", "type TEXT NOT NULL", "PRIMARY KEY (name, type)"),
    "orphans": ("segment TEXT PRIMARY KEY", "seen {REAL} NOT NULL"),
    "blobs": ("segment TEXT PRIMARY KEY", "data {BYTES} NOT NULL", "made {REAL} NOT NULL"),
    "rollouts": (
        "id {INT} PRIMARY KEY",
        "status TEXT NOT NULL",
        "next {INT} NOT NULL",
        "highest {INT} NOT NULL",
        "fence {INT} NOT NULL",
        "settings TEXT NOT NULL",
    ),
    "claims": (
        "number {INT} PRIMARY KEY",
        "fence {INT} NOT NULL",
        "worker TEXT NOT NULL",
        "version {INT} NOT NULL",
        "claimed {REAL} NOT NULL",
        "expires {REAL} NOT NULL",
        "factor {INT} NOT NULL",
        "state TEXT NOT NULL",
    ),
    "workers": ("name TEXT PRIMARY KEY", "seen {REAL} NOT NULL", "detail TEXT NOT NULL"),
    "weights": (
        "id TEXT NOT NULL",
        "part {INT} NOT NULL",
        "name TEXT NOT NULL",
        "data {BYTES} NOT NULL",
        "PRIMARY KEY (id, part)",
    ),
}
for _table, _key in (("queue", "seq"), ("groups", "gid")):
    TABLES[f"{_table}_before"] = (
        "checkpoint {INT} NOT NULL",
        *TABLES[_table][:-1],
        f"PRIMARY KEY (checkpoint, consumer, {_key})",
    )
"""`records`: one row per record: index columns, content hashes, place of the bytes (`removed_reason`: why there are
none). `queue`: the state of each record for each consumer. `inbox`: ranges of records for which a consumer has no rows
of `queue` yet. `groups`: which groups are ready, for consumers that lease by group. `tallies`: numbers of rows of
`queue` by state, updated with them; a count is the sum over `shard`. `events`: what happened, in order. `queue_before`,
`groups_before`: the undo log, with rows that have changed since a checkpoint as they were then. `rollouts` (one row),
`claims`, `workers`, `weights`: rollouts in progress (`rollbook.book.rollouts`)."""
ROLLOUT_TABLES = ("rollouts", "claims", "workers", "weights")
"""Tables about processes that run now; a copy or a repaired ledger has none of their rows."""

INDICES = (
    "CREATE INDEX records_batch ON records (batch, seq)",
    "CREATE INDEX records_gid ON records (gid, run)",
    "CREATE INDEX records_segment ON records (segment)",
    "CREATE INDEX queue_waiting ON queue (consumer, rank, seq) WHERE state = 'waiting'",
    "CREATE INDEX queue_oldest ON queue (consumer, seq) WHERE state = 'waiting'",
    "CREATE INDEX queue_version ON queue (consumer, version) WHERE state = 'waiting'",
    "CREATE INDEX queue_cooling ON queue (consumer, until) WHERE state = 'cooling'",
    "CREATE INDEX queue_lease ON queue (lease) WHERE lease IS NOT NULL",
    "CREATE INDEX queue_gid ON queue (consumer, gid, seq)",
    "CREATE INDEX groups_ready ON groups (consumer, rank, seq) WHERE ready = 1",
    "CREATE INDEX groups_due ON groups (consumer, due) WHERE ready = 0 AND due IS NOT NULL",
    "CREATE INDEX leases_active ON leases (consumer, expires) WHERE state = 'active'",
    "CREATE INDEX events_seq ON events (seq)",
    "CREATE INDEX media_uses_seq ON media_uses (seq)",
    "CREATE INDEX media_segment ON media (segment)",
    "CREATE INDEX checkpoints_event ON checkpoints (event, seq)",
)


def prepare_tables(ledger: Ledger, *, create: bool, address: str, meta: dict[str, str]) -> bool:
    """Create the tables, or check existing ones.

    Args:
        ledger: The ledger.
        create: Create the tables if there are none.
        address: The book's address, for error messages.
        meta: More rows of `meta` for new tables.

    Returns:
        Whether the tables were created.

    Raises:
        NotABookError: There are no tables, or tables of another layout.
        NewerLayoutError: A newer version wrote them.
    """
    layout = read_layout(ledger)
    if layout is None:
        if not create:
            raise MissingBookError(f"{address}: there is no book here")
        with ledger.write() as tx:
            if _read_layout(tx, ledger.dialect) is not None:  # Another process created them.
                return False
            _create_tables(tx, ledger.dialect, meta)
        return True
    if layout > LAYOUT:
        raise NewerLayoutError(
            f"{address}: the book has layout {layout}, this version knows up to {LAYOUT}; use a newer one"
        )
    if layout < LAYOUT:
        raise NotABookError(
            f"{address}: the book has layout {layout}, written by an older version of Rollbook; this one reads layout "
            f"{LAYOUT}"
        )
    return False


def read_layout(ledger: Ledger) -> int | None:
    """Return the number of the tables' layout, or `None` if there are no tables."""
    with ledger.read() as tx:
        return _read_layout(tx, ledger.dialect)


def _read_layout(tx: Transaction, dialect: str) -> int | None:
    if dialect == "sqlite":
        names = {row[0] for row in tx.all("SELECT name FROM sqlite_master WHERE type = 'table'")}
    else:
        names = {row[0] for row in tx.all("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")}
    if "meta" not in names:
        if names & set(TABLES):
            raise NotABookError(f"tables {sorted(names & set(TABLES))} without `meta`: not a book's ledger")
        return None
    row = tx.first("SELECT value FROM meta WHERE key = 'layout'")
    if row is None or not str(row[0]).isdigit():
        raise NotABookError(f"meta: got layout {row and row[0]!r}, expected a number")
    return int(row[0])


def _create_tables(tx: Transaction, dialect: str, meta: dict[str, str]) -> None:
    kinds = TYPES[dialect]
    for name, columns in TABLES.items():
        body = ", ".join(column.format(**kinds).replace("TEXT", _TEXT_TYPES[dialect]) for column in columns)
        tx.run(f"CREATE TABLE {name} ({body})")
    for sql in INDICES:
        tx.run(sql)
    if dialect == "postgresql":
        from rollbook.book.postgres import SEQUENCES

        tx.run("ALTER TABLE blobs ALTER COLUMN data SET STORAGE EXTERNAL")
        for sql in SEQUENCES:
            tx.run(sql)
    everything = {
        "layout": str(LAYOUT),
        "digests": str(HASH_FORMAT),
        "book": os.urandom(8).hex(),
        "made": repr(tx.now),
        **meta,
    }
    tx.run_many("INSERT INTO meta (key, value) VALUES (?, ?)", list(everything.items()))
