"""Reader for the SQLite buffers of Trinity-RFT: `list_tables` and `read`.

Invariant: reading changes no file, creates none next to the database, and executes nothing that the database contains.
Every row of the table becomes a record or an error with its id.

Up to version 0.5.x, the bytes of a record are in a column of its row; since 0.6.0, in the table `<table>_blob`, by the
same id. Version 0.6.0 adds an empty blob table to an older file, so both places are read. As in Trinity, the columns of
task, run, suffix, reward and model version override the values in the bytes, because writers may have updated them.
NULL does not override ids, the model version, or a reward of NaN, which SQLite stores as NULL. A numeric task id stays
a number, although the column is text.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollbook.core.checks import suggest
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.trxp import read_any
from rollbook.core.wire import Limits
from rollbook.io.rows import ErrorHandler

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

_INLINE = ("experience_bytes", "serialized_exp")
"""Name of the column of bytes since version 0.2.1, and before."""
_META = ("task_id", "run_id", "msg_id", "model_version", "reward")
_KINDS = ({"task_id", "run_id", "msg_id"}, {"message_list"}, {"chosen_message_list", "rejected_message_list"})
"""Columns that identify a table of version 0.6.0: experiences, SFT data and DPO data."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of records: where their bytes are, and which of Trinity's columns it has."""

    name: str
    inline: str | None
    """The column of bytes in the table itself."""
    blob: str | None
    """The separate table of bytes."""
    columns: tuple[str, ...]

    @property
    def layout(self) -> str:
        """Description of where the bytes are."""
        if self.inline and self.blob:
            return f"bytes in {self.inline!r} and in {self.blob!r} (0.5, later written by 0.6)"
        if self.inline:
            return f"bytes in {self.inline!r} (0.5)"
        return f"bytes in {self.blob!r} (0.6)" if self.blob else "no bytes: the table of blobs is missing"


def list_tables(path: str | os.PathLike[str]) -> dict[str, str]:
    """List the tables of records in a database of Trinity-RFT.

    Args:
        path: The SQLite file.

    Returns:
        A description of where the bytes are, by name of the table.

    Raises:
        WireError: The file is not an SQLite database, or cannot be read.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with closing(sqlite3.connect(f"{folder}/buffer.db")) as connection:
    ...         _ = connection.execute("CREATE TABLE explored (id, task_id, run_id, msg_id, experience_bytes)")
    ...     list_tables(f"{folder}/buffer.db")
    {'explored': "bytes in 'experience_bytes' (0.5)"}
    """
    with open_read_only(os.fspath(path)) as connection:
        return {name: table.layout for name, table in find_tables(connection, os.fspath(path)).items()}


def read(
    path: str, batch_rows: int, errors: ErrorHandler, *, table: str | None = None, max_row_bytes: int
) -> Iterator[Experiences]:
    """Read the records of a table by ascending id, in batches of `batch_rows`."""
    with open_read_only(path) as connection:
        by_name = find_tables(connection, path)
        if not by_name:
            raise ValueError(f"{path}: the database has no table of Trinity's experiences")
        if table is None and len(by_name) > 1:
            raise ValueError(f"table: got None, expected one of {', '.join(map(repr, by_name))}: {path} has several")
        if table is not None and table not in by_name:
            raise ValueError(f"table: got {table!r}, which {path} does not have{suggest(table, list(by_name))}")
        chosen = by_name[next(iter(by_name)) if table is None else table]
        pending = []
        try:
            for row in connection.execute(build_query(chosen), (max_row_bytes, max_row_bytes)):
                location = row[0]
                try:
                    pending.append(_record(row, chosen, max_row_bytes))
                except WireError as error:
                    errors.handle(location if isinstance(location, int) else repr(location), error)
                if len(pending) >= batch_rows:
                    yield Experiences(pending)
                    pending = []
        except sqlite3.Error as error:
            raise WireError(f"{path}: the database cannot be read: {error}") from None
        if pending:
            yield Experiences(pending)


# --- opening ------------------------------------------------------------------------------------------------------


@contextmanager
def open_read_only(path: str) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection that creates no files."""
    with open(path, "rb") as file:
        head = file.read(20)
    if not head.startswith(b"SQLite format 3\0"):
        raise WireError(f"{path}: begins with {head[:16]!r}, expected an SQLite database")
    wal_mode = head[18:20] == b"\x02\x02"
    has_wal, has_wal_index = os.path.exists(f"{path}-wal"), os.path.exists(f"{path}-shm")
    with tempfile.TemporaryDirectory() as copies:
        try:
            if wal_mode and not has_wal:
                # Without a log there is no writer. SQLite would create a log, except for an immutable file.
                connection = _connect(path, "mode=ro&immutable=1")
            elif wal_mode and not has_wal_index:
                # A writer crashed. SQLite needs to create the index of its log, so it reads a copy.
                connection = _connect(_copy_database(path, "-wal", copies), "mode=rw")
            else:
                connection = _connect(path, "mode=ro")
        except sqlite3.Error as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise WireError(f"{path}: the database cannot be read: {error}") from None
            # A writer crashed within a transaction. SQLite needs to roll it back, so it reads a copy.
            connection = _connect(_copy_database(path, "-journal", copies), "mode=rw")
        with closing(connection):
            yield connection


def _copy_database(path: str, log_suffix: str, folder: str) -> str:
    copy = os.path.join(folder, "copy")
    shutil.copyfile(path, copy)
    shutil.copyfile(path + log_suffix, copy + log_suffix)
    return copy


def _connect(path: str, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(os.path.abspath(path))}?{mode}", uri=True, isolation_level=None)
    try:
        # The schema of the file must not call functions with side effects.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        # Text that is not UTF-8 then fails in its row, not in the whole query.
        connection.text_factory = bytes
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _quote_name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def find_tables(connection: sqlite3.Connection, path: str) -> dict[str, Table]:
    """Return the tables of records by name."""
    try:
        # Views and virtual tables, which have no root page, are not read.
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name NOT LIKE 'sqlite_%' "
            "ORDER BY rowid"
        ).fetchall()
        columns: dict[str, set[str]] = {}
        for (raw,) in rows:
            name = raw.decode("utf-8")
            info = connection.execute(f"PRAGMA table_info({_quote_name(name)})").fetchall()
            columns[name] = {entry[1].decode("utf-8") for entry in info}
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise WireError(f"{path}: the list of tables cannot be read: {error}") from None
    tables = {}
    for name, column_names in columns.items():
        inline = next((column for column in _INLINE if column in column_names), None)
        blob = f"{name}_blob" if {"id", "experience_bytes"} <= columns.get(f"{name}_blob", set()) else None
        is_blob_table = name.endswith("_blob") and column_names == {"id", "experience_bytes"}
        holds_records = inline or any(kind <= column_names for kind in _KINDS)
        if "id" in column_names and holds_records and not is_blob_table:
            tables[name] = Table(name, inline, blob, tuple(column for column in _META if column in column_names))
    return tables


def build_query(table: Table) -> str:
    """Return the query for the id, the bytes and their length in the row and in the blob table, and the columns.

    Its two parameters are the limit of the bytes. Of larger values only the length is fetched.
    """
    inline = f"t.{_quote_name(table.inline)}" if table.inline else "NULL"
    blob = "b.experience_bytes" if table.blob else "NULL"
    selected = [
        f"CASE WHEN length({expression}) <= ? THEN {expression} END, length({expression})"
        for expression in (inline, blob)
    ]
    joined = f" LEFT JOIN {_quote_name(table.blob)} b ON b.id = t.id" if table.blob else ""
    columns = "".join(f", t.{column}" for column in table.columns)
    return f"SELECT t.id, {', '.join(selected)}{columns} FROM {_quote_name(table.name)} t{joined} ORDER BY t.id"


# --- one row ------------------------------------------------------------------------------------------------------


def _record(row: tuple[Any, ...], table: Table, max_row_bytes: int) -> Experience:
    inline, inline_size, blob, blob_size = row[1:5]
    size = inline_size if inline_size is not None else blob_size
    data = inline if inline_size is not None else blob
    if size is None:
        places = [f"column {table.inline!r}"] * bool(table.inline) + [f"table {table.blob!r}"] * bool(table.blob)
        searched = " and ".join(places) or f"a table {table.name + '_blob'!r}, which is missing"
        raise WireError(f"the record's bytes are missing (looked in {searched})")
    if data is None:
        raise WireError(f"{size} bytes are over the limit of {max_row_bytes} (max_row_bytes)")
    if not isinstance(data, bytes):
        raise WireError(f"got a {type(data).__name__}, expected the record's bytes")
    records = read_any(data, Limits(max_bytes=max_row_bytes))
    if len(records) != 1:
        raise WireError(f"the bytes hold {len(records)} records, expected 1")
    _override(records[0], dict(zip(table.columns, row[5:], strict=True)))
    return records[0]


def _override(record: Experience, columns: dict[str, Any]) -> None:
    """Replace fields of a record by the values of the table's columns."""
    try:
        stored = {name: entry.decode() if isinstance(entry, bytes) else entry for name, entry in columns.items()}
        changes: dict[str, Any] = {}
        for name, component in (("task_id", "task"), ("run_id", "run"), ("msg_id", "suffix")):
            entry = stored.get(name)
            # The column is text: an equal text is the same id, which may be a number in the record.
            if entry is not None and str(getattr(record.eid, component)) != str(entry):
                changes[component] = str(entry) if component == "suffix" else entry
        if changes:
            record.eid = record.eid.replace(**changes)
        if "reward" in stored and not (stored["reward"] is None and record.reward != record.reward):
            record.reward = None if stored["reward"] is None else float(stored["reward"])
        if stored.get("model_version") is not None:
            record.info["model_version"] = stored["model_version"]
    except (ValueError, TypeError) as error:
        raise WireError(f"a column has an invalid value: {error}") from None
