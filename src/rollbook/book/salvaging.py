"""Salvaging: what can still be read of a damaged ledger, and of segments without one.

Invariant: nothing here writes to what it reads; a row is given back only if every value has its column's type, a record
or a medium only if every byte of it matches its checksum (and the medium its hash).
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rollbook.book import attachments
from rollbook.book.errors import CorruptBookError, MissingSegmentError
from rollbook.book.identities import printed_ids
from rollbook.book.pages import PageFile, Row
from rollbook.book.schema import TABLES
from rollbook.book.shelves import ALIGN, Place, is_name
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.wire import HEADER_BYTES, decode, read_header

if TYPE_CHECKING:
    from rollbook.book.shelves import Shelf

_PAGE_ROWS = 500
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_TYPES: dict[str, tuple[type, ...]] = {
    "TEXT": (str,),
    "{INT}": (int,),
    "{EVENT_ID}": (int,),
    "{REAL}": (float, int),
    "{BYTES}": (bytes,),
}


# --- rows of a damaged ledger ---------------------------------------------------------------------------------------


class Lost:
    """How much of each table could not be read."""

    def __init__(self) -> None:
        self.gaps: dict[str, int] = {}
        """Ranges of rows, by table, that raised."""
        self.rows: dict[str, int] = {}
        """Rows, by table, that hold values of other types."""
        self.tables: dict[str, str] = {}
        """Tables of which nothing could be read, and why."""

    def any(self, table: str) -> bool:
        """Whether something of the table is lost."""
        return table in self.gaps or table in self.rows or table in self.tables


def connect(path: str, fresh: str) -> sqlite3.Connection | None:
    """A connection to a damaged ledger, which may be changed: it is a copy. `None` if it is no database at all.

    Where its first page is damaged, which says where the tables begin, that of `fresh` takes its place, a ledger that
    was just made: tables are always made in the same order, and so begin on the same pages.
    """
    _apply_log(path)
    size = page_bytes(path)
    os.truncate(path, os.path.getsize(path) // size * size)  # Half a page would be read as one that ends in zeros.
    for transplant in (False, True):
        if transplant and not _transplant(path, fresh):
            return None
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA writable_schema=ON")  # A file that is shorter than it says is read, too.
            connection.execute("PRAGMA cell_size_check=ON")
            found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if found & set(TABLES):
                return connection
        except sqlite3.Error:
            pass
        connection.close()
    return None


def page_bytes(path: str) -> int:
    """How long a page of a SQLite file is."""
    with open(path, "rb") as file:
        return PageFile(file).size


def _transplant(path: str, fresh: str) -> bool:
    """Write the pages of a fresh ledger's schema over those of a damaged one; whether both have the same pages."""
    with open(fresh, "rb") as file:
        good = file.read()
    size = struct.unpack_from(">H", good, 16)[0]
    pages = [1, *_children(good)]
    with open(path, "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        if length < size * max(pages):
            return False
        for page in pages:
            file.seek((page - 1) * size)
            file.write(good[(page - 1) * size : page * size])
        # How many pages there are, and none that are free: what the header says of those is not known any more.
        file.seek(28)
        file.write(struct.pack(">III", -(-length // size), 0, 0))
    return True


def _apply_log(path: str) -> None:
    """Write the pages that the log has committed into the database, as SQLite would: its checksums say how far it goes.

    The log is then removed, or it would put its first page in the place of the one that is transplanted.
    """
    try:
        with open(f"{path}-wal", "rb") as file:
            log = file.read()
    except FileNotFoundError:
        return
    os.unlink(f"{path}-wal")
    if len(log) < 32:
        return
    magic, _, size = struct.unpack_from(">III", log)
    order = ">" if magic & 1 else "<"
    salts, total = log[16:24], _sum(log[:24], (0, 0), order)
    committed: dict[int, int] = {}
    since: dict[int, int] = {}
    at = 32
    while magic & ~1 == 0x377F0682 and 512 <= size <= 65536 and at + 24 + size <= len(log):
        page, commit = struct.unpack_from(">II", log, at)
        total = _sum(log[at + 24 : at + 24 + size], _sum(log[at : at + 8], total, order), order)
        if log[at + 8 : at + 16] != salts or struct.unpack_from(">II", log, at + 16) != total:
            break
        since[page] = at + 24
        if commit:
            committed |= since
            since = {}
        at += 24 + size
    with open(path, "r+b") as file:
        for page, start in committed.items():
            file.seek((page - 1) * size)
            file.write(log[start : start + size])


def _sum(data: bytes, start: tuple[int, int], order: str) -> tuple[int, int]:
    """The running checksum of a log."""
    one, two = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        one = (one + words[i] + two) & 0xFFFFFFFF
        two = (two + words[i + 1] + one) & 0xFFFFFFFF
    return one, two


def _children(data: bytes) -> list[int]:
    """The pages below the first, if the schema takes more than that one."""
    kind, count = data[100], struct.unpack_from(">H", data, 103)[0]
    if kind != 5:
        return []
    cells = struct.unpack_from(f">{count}H", data, 112)
    return [struct.unpack_from(">I", data, cell)[0] for cell in (*cells, 108)]


def rows(connection: sqlite3.Connection, table: str, lost: Lost) -> Iterator[tuple[Any, ...]]:
    """All rows of a table that can be read, in the order of its columns; what raises is stepped over."""
    columns = [column.split() for column in TABLES[table] if not column.startswith("PRIMARY KEY")]
    names = ", ".join(column[0] for column in columns)
    sql = f"SELECT rowid, {names} FROM {table} WHERE rowid >= ? ORDER BY rowid LIMIT ?"
    at, count = _FIRST, _PAGE_ROWS
    while True:
        try:
            found = connection.execute(sql, (at, count)).fetchall()
        except (sqlite3.Error, OverflowError) as error:
            if "no such" in str(error):
                lost.tables[table] = str(error)
                return
            if count > 1:
                count = 1
                continue
            lost.gaps[table] = lost.gaps.get(table, 0) + 1
            after = _next_readable(connection, sql, at)
            if after is None:
                return
            at = after
            continue
        for row in found:
            if all(_fits(value, column) for value, column in zip(row[1:], columns, strict=True)):
                yield row[1:]
            else:
                lost.rows[table] = lost.rows.get(table, 0) + 1
        if len(found) < count or found[-1][0] == _LAST:
            return
        at, count = found[-1][0] + 1, min(2 * count, _PAGE_ROWS)


def _next_readable(connection: sqlite3.Connection, sql: str, at: int) -> int | None:
    """The first row number behind the damage: by steps that double, then halving the last one."""
    bad, step = at, 1
    while True:
        good = min(at + step, _LAST)
        if _reads(connection, sql, good):
            break
        if good == _LAST:
            return None
        bad, step = good, step * 2
    while good - bad > 1:
        middle = (good + bad) // 2
        if _reads(connection, sql, middle):
            good = middle
        else:
            bad = middle
    return good


def _reads(connection: sqlite3.Connection, sql: str, at: int) -> bool:
    try:
        connection.execute(sql, (at, 1)).fetchall()
    except sqlite3.Error:
        return False
    return True


_COLUMNS = {
    table: [column.split() for column in columns if not column.startswith("PRIMARY KEY")]
    for table, columns in TABLES.items()
}


def page_rows(file: BinaryIO) -> Iterator[tuple[str, Row]]:
    """(table, row) of all rows on intact pages of a ledger, whether its b-trees lead to them or not."""
    for rows in PageFile(file).tables():
        tables = [table for table in _COLUMNS if all(_fits_table(table, row) for row in rows)]
        if len(tables) > 1:
            tables = _told_apart(tables, rows)
        for table in tables[:1]:
            for number, *values in rows:
                yield table, tuple(values) if not _is_numbered(table) else (number, *values[1:])


def page_numbers(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """(id, number) of records, from intact pages of the ledger's index of ids."""
    for entries in PageFile(file).indices():
        if all(len(entry) == 2 and type(entry[0]) is str and type(entry[1]) is int for entry in entries):
            yield from ((uid, seq) for uid, seq in entries if uid.count("/") == 4)


def _is_numbered(table: str) -> bool:
    """Whether the first column is the row's number, which a record leaves out."""
    return _COLUMNS[table][0][1] == "{EVENT_ID}" or _COLUMNS[table][0][1:] == ["{INT}", "PRIMARY", "KEY"]


def _fits_table(table: str, row: Row) -> bool:
    number, *values = row
    columns = _COLUMNS[table]
    if len(values) != len(columns):
        return False
    if _is_numbered(table):
        if values[0] is not None:
            return False
        values[0] = number
    return all(map(_fits, values, columns))


def _told_apart(tables: list[str], rows: list[Row]) -> list[str]:
    """Tables of two columns look alike: tell them by what they hold."""
    first = [row[1] for row in rows]
    if "meta" in tables:
        return ["meta" if "layout" in first else "columns"]
    if all(map(is_name, first)):
        return ["purges"]
    return ["media_uses"] if "media_uses" in tables and all(len(text) == 64 for text in first) else []


def _fits(value: Any, column: list[str]) -> bool:
    if value is None:
        return "NOT" not in column and "KEY" not in column
    return type(value) in _TYPES[column[1]]


# --- segments -------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A whole frame, or a whole medium, in a segment."""

    place: Place
    uids: list[str]
    """Of a frame, the id of each record."""
    hash: str | None
    """Of a medium."""


def parts(shelf: Shelf, segment: str, size: int) -> Iterator[Part]:
    """Every part of a segment that is whole, in order. Damage is stepped over, 64 bytes at a time."""
    at = ALIGN
    while at + ALIGN <= size:
        found = _part(shelf, segment, at, size)
        if found is not None:
            yield found
            at += -(-found.place.length // ALIGN) * ALIGN
        else:
            at += ALIGN


def _part(shelf: Shelf, segment: str, at: int, size: int) -> Part | None:
    try:
        head = shelf.get(Place(segment, at, ALIGN))
        if bytes(head[:8]) == attachments.MAGIC:
            length = attachments.blob_size(head)
            if at + length > size:
                return None
            place = Place(segment, at, length)
            return Part(place, [], attachments.open_blob(shelf.get(place), verify=True).hash)
        frame = read_header(bytes(head[:HEADER_BYTES]))
        if frame.compression is not None or at + frame.stop > size:
            return None
        place = Place(segment, at, frame.stop)
        many: Experiences = decode(shelf.get(place), private=shelf.private)
        return Part(place, list(printed_ids(many.columns["eid"]).uid) if len(many) else [], None)
    except (WireError, MissingSegmentError, CorruptBookError):
        return None
