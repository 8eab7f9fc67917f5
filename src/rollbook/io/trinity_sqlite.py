"""Trinity-RFT's SQLite buffers, read without changing them and without running anything in them.

Invariant: the files are byte for byte the same afterwards and none is added beside them; every row of the table comes
out as a record or as an error that names its id.

Up to 0.5.x a record's bytes are a column of its row. 0.6.0 keeps them in `<table>_blob` by the same id, and on opening
an older file adds that table and finds nothing in it: here both places are looked at. As in Trinity, the columns for
task, run, suffix, reward and model version override what the bytes say, since later writers may have changed them; but
a column that is NULL has nothing to say of ids or version (SQLite turns a NaN reward into NULL: the bytes still have
it), and a task that was a number is one again.
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
from rollbook.io.tables import ErrorHandler

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

_INLINE = ("experience_bytes", "serialized_exp")
"""Names of the column of bytes: since 0.2.1, and before."""
_META = ("task_id", "run_id", "msg_id", "model_version", "reward")
_KINDS = ({"task_id", "run_id", "msg_id"}, {"message_list"}, {"chosen_message_list", "rejected_message_list"})
"""Columns that identify a table of 0.6.0: of experiences, of SFT and of DPO data."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of records: the place of their bytes, and which of Trinity's columns it has."""

    name: str
    inline: str | None
    """The column of bytes in the table itself."""
    blob: str | None
    """The table of bytes beside it."""
    columns: tuple[str, ...]

    @property
    def layout(self) -> str:
        """Description of the place of the bytes."""
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
                where = row[0]
                try:
                    pending.append(_record(row, chosen, max_row_bytes))
                except WireError as error:
                    errors.handle(where if isinstance(where, int) else repr(where), error)
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
    logged = head[18:20] == b"\x02\x02"
    wal, shared = os.path.exists(f"{path}-wal"), os.path.exists(f"{path}-shm")
    with tempfile.TemporaryDirectory() as copies:
        try:
            if logged and not wal:
                # Nobody writes: a writer in this mode has a log. Opened otherwise, SQLite would make one.
                connection = _connect(path, "mode=ro&immutable=1")
            elif logged and not shared:
                # The log of a writer that is gone. To read it SQLite needs an index beside it, so a copy gets one.
                connection = _connect(_copied(path, "-wal", copies), "mode=rw")
            else:
                connection = _connect(path, "mode=ro")
        except sqlite3.Error as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise WireError(f"{path}: the database cannot be read: {error}") from None
            # Half a transaction of a writer that is gone, which SQLite undoes by writing: to a copy.
            connection = _connect(_copied(path, "-journal", copies), "mode=rw")
        with closing(connection):
            yield connection


def _copied(path: str, beside: str, folder: str) -> str:
    copy = os.path.join(folder, "copy")
    shutil.copyfile(path, copy)
    shutil.copyfile(path + beside, copy + beside)
    return copy


def _connect(path: str, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(os.path.abspath(path))}?{mode}", uri=True, isolation_level=None)
    try:
        # Nothing in the file's own schema may call a function with effects; text that is not UTF-8 is the error of a
        # row, not of the file.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        connection.text_factory = bytes
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def find_tables(connection: sqlite3.Connection, path: str) -> dict[str, Table]:
    try:
        # Views and virtual tables have no page of their own: they are not read.
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name NOT LIKE 'sqlite_%' "
            "ORDER BY rowid"
        ).fetchall()
        columns: dict[str, set[str]] = {}
        for (raw,) in rows:
            name = raw.decode("utf-8")
            info = connection.execute(f"PRAGMA table_info({_name(name)})").fetchall()
            columns[name] = {entry[1].decode("utf-8") for entry in info}
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise WireError(f"{path}: the list of tables cannot be read: {error}") from None
    tables = {}
    for name, has in columns.items():
        inline = next((column_name for column_name in _INLINE if column_name in has), None)
        blob = f"{name}_blob" if {"id", "experience_bytes"} <= columns.get(f"{name}_blob", set()) else None
        of_another = name.endswith("_blob") and has == {"id", "experience_bytes"}
        if "id" not in has or of_another or not (inline or any(kind <= has for kind in _KINDS)):
            continue
        tables[name] = Table(name, inline, blob, tuple(column_name for column_name in _META if column_name in has))
    return tables


def build_query(table: Table) -> str:
    """Return the query of: id, bytes and length in the row, bytes and length in the blob table, columns.

    A value over the limit is not fetched, only measured.
    """
    places = [f"t.{_name(table.inline)}" if table.inline else "NULL", "b.experience_bytes" if table.blob else "NULL"]
    selected = [f"CASE WHEN length({place}) <= ? THEN {place} END, length({place})" for place in places]
    joined = f" LEFT JOIN {_name(table.blob)} b ON b.id = t.id" if table.blob else ""
    columns = "".join(f", t.{column}" for column in table.columns)
    return f"SELECT t.id, {', '.join(selected)}{columns} FROM {_name(table.name)} t{joined} ORDER BY t.id"


# --- one row ------------------------------------------------------------------------------------------------------


def _record(row: tuple[Any, ...], table: Table, max_row_bytes: int) -> Experience:
    inline, inline_size, beside, beside_size = row[1:5]
    size = inline_size if inline_size is not None else beside_size
    data = inline if inline_size is not None else beside
    if size is None:
        places = [f"column {table.inline!r}"] * bool(table.inline) + [f"table {table.blob!r}"] * bool(table.blob)
        looked = " and ".join(places) or f"a table {table.name + '_blob'!r}, which is missing"
        raise WireError(f"the record's bytes are missing (looked in {looked})")
    if data is None:
        raise WireError(f"{size} bytes are over the limit of {max_row_bytes} (max_row_bytes)")
    if not isinstance(data, bytes):
        raise WireError(f"got a {type(data).__name__} where the record's bytes should be")
    records = read_any(data, Limits(max_bytes=max_row_bytes))
    if len(records) != 1:
        raise WireError(f"the bytes hold {len(records)} records, expected 1")
    _override(records[0], dict(zip(table.columns, row[5:], strict=True)))
    return records[0]


def _override(record: Experience, column: dict[str, Any]) -> None:
    try:
        stored = {name: entry.decode() if isinstance(entry, bytes) else entry for name, entry in column.items()}
        changes: dict[str, Any] = {}
        for name, part in (("task_id", "task"), ("run_id", "run"), ("msg_id", "suffix")):
            entry = stored.get(name)
            # Written as text: what prints alike is what it was.
            if entry is not None and str(getattr(record.eid, part)) != str(entry):
                changes[part] = str(entry) if part == "suffix" else entry
        if changes:
            record.eid = record.eid.replace(**changes)
        if "reward" in stored and not (stored["reward"] is None and record.reward != record.reward):
            record.reward = None if stored["reward"] is None else float(stored["reward"])
        if stored.get("model_version") is not None:
            record.info["model_version"] = stored["model_version"]
    except (ValueError, TypeError) as error:
        raise WireError(f"a column holds what it cannot: {error}") from None
