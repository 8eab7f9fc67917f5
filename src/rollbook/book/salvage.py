"""Rows of a SQLite file read page by page, without its b-trees: what is left of a ledger that is cut or overwritten.

Invariant: a page counts only if all of its cells can be read and fit one table; nothing is written. The format is that
of https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rollbook.book import media
from rollbook.book.content_hash import printed_ids
from rollbook.book.errors import CorruptBookError, MissingSegmentError
from rollbook.book.schema import TABLES
from rollbook.book.segments.files import ALIGN, Place, is_name
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.wire import HEADER_BYTES, decode, read_header

if TYPE_CHECKING:
    from rollbook.book.segments.files import SegmentStore


_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_LONGEST = 64 << 20
_DEFAULT_SIZE = 4096
"""The size of the pages of a ledger, which its first page states."""
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of an integer by its serial type."""

Row = tuple[Any, ...]


class _MalformedPageError(Exception):
    """A page that is not what it should be."""


class PageFile:
    """The pages of a SQLite file of which any may be damaged.

    >>> import sqlite3, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     connection = sqlite3.connect(f"{folder}/x")
    ...     _ = connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT UNIQUE, c REAL)")
    ...     _ = connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, "one", 0.5), (-7, "two", None)])
    ...     connection.commit()
    ...     with open(f"{folder}/x", "rb") as file:
    ...         pages = PageFile(file)
    ...         [rows for rows in pages.tables() if len(rows[0]) == 4], list(pages.indices())
    ([[(-7, None, 'two', None), (1, None, 'one', 0.5)]], [[('one', 1), ('two', -7)]])
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = file.seek(0, os.SEEK_END)
        head = self._read(0, 100)
        size, reserved = _DEFAULT_SIZE, 0
        if len(head) == 100 and head[:16] == b"SQLite format 3\0":
            (size,) = struct.unpack_from(">H", head, 16)
            reserved = head[20]
        if size < 512 or size & (size - 1):
            size, reserved = _DEFAULT_SIZE, 0
        self.size = size
        self.usable = size - reserved

    def _read(self, start: int, length: int) -> bytes:
        self.file.seek(start)
        return self.file.read(length)

    def tables(self) -> Iterator[list[Row]]:
        """The rows of each leaf page of a table: the row's number, then its values."""
        return self._scan((_LEAF,), self._table_cell)

    def indices(self) -> Iterator[list[Row]]:
        """The entries of each page of an index: the values, then the row's number."""
        return self._scan((_INDEX_LEAF, _INDEX_INTERIOR), self._index_cell)

    def _scan(self, kinds: Sequence[int], cell: Callable[[bytes, int, int], Row]) -> Iterator[list[Row]]:
        for number in range(self.length // self.size):
            page = self._read(number * self.size, self.size)
            at = 100 if number == 0 else 0
            kind = page[at]
            if kind not in kinds:
                continue
            width = 12 if kind == _INDEX_INTERIOR else 8
            (count,) = struct.unpack_from(">H", page, at + 3)
            try:
                if at + width + 2 * count > self.usable:
                    raise _MalformedPageError
                starts = struct.unpack_from(f">{count}H", page, at + width)
                rows = [cell(page, start, kind) for start in starts]
            except (_MalformedPageError, IndexError, struct.error, UnicodeDecodeError):
                continue
            if rows:
                yield rows

    def _table_cell(self, page: bytes, at: int, kind: int) -> Row:
        length, at = _varint(page, at)
        number, at = _varint(page, at)
        most = self.usable - 35
        return (number - (1 << 64) if number >= 1 << 63 else number, *_record(self._payload(page, at, length, most)))

    def _index_cell(self, page: bytes, at: int, kind: int) -> Row:
        length, at = _varint(page, at + (4 if kind == _INDEX_INTERIOR else 0))
        most = (self.usable - 12) * 64 // 255 - 23
        return _record(self._payload(page, at, length, most))

    def _payload(self, page: bytes, at: int, length: int, most: int) -> bytes:
        """The payload of a cell, from its page and the overflow pages behind it."""
        if length > min(_LONGEST, self.length):
            raise _MalformedPageError
        local = length
        if length > most:
            least = (self.usable - 12) * 32 // 255 - 23
            local = least + (length - least) % (self.usable - 4)
            local = local if local <= most else least
        parts = [page[at : at + local]]
        missing = length - local
        following = struct.unpack_from(">I", page, at + local)[0] if missing else 0
        while missing > 0:
            if following < 2:
                raise _MalformedPageError
            more = self._read((following - 1) * self.size, self.usable)
            if len(more) < self.usable:
                raise _MalformedPageError
            (following,) = struct.unpack_from(">I", more)
            parts.append(more[4 : 4 + missing])
            missing -= len(parts[-1])
        payload = b"".join(parts)
        if len(payload) != length:
            raise _MalformedPageError
        return payload


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(8):
        byte = data[at + i]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + i + 1
    return value << 8 | data[at + 8], at + 9


def _record(payload: bytes) -> Row:
    """The values of a record."""
    header, at = _varint(payload, 0)
    if header > len(payload):
        raise _MalformedPageError
    values: list[Any] = []
    body = header
    while at < header:
        code, at = _varint(payload, at)
        if code in _INTEGERS:
            length = _INTEGERS[code]
            values.append(int.from_bytes(payload[body : body + length], "big", signed=True))
        elif code == 7:
            length = 8
            values.append(struct.unpack_from(">d", payload, body)[0])
        elif code >= 12:
            length = (code - 12) // 2
            data = payload[body : body + length]
            values.append(data if code % 2 == 0 else data.decode())
        elif code in (0, 8, 9):
            length = 0
            values.append(None if code == 0 else code - 8)
        else:
            raise _MalformedPageError
        body += length
    if at != header or body != len(payload):
        raise _MalformedPageError
    return tuple(values)


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
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables & set(TABLES):
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
    first, second = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        first = (first + words[i] + second) & 0xFFFFFFFF
        second = (second + words[i + 1] + first) & 0xFFFFFFFF
    return first, second


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
            batch = connection.execute(sql, (at, count)).fetchall()
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
        for row in batch:
            if all(_fits(value, column) for value, column in zip(row[1:], columns, strict=True)):
                yield row[1:]
            else:
                lost.rows[table] = lost.rows.get(table, 0) + 1
        if len(batch) < count or batch[-1][0] == _LAST:
            return
        at, count = batch[-1][0] + 1, min(2 * count, _PAGE_ROWS)


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


def parts(store: SegmentStore, segment: str, size: int) -> Iterator[Part]:
    """Every part of a segment that is whole, in order. Damage is stepped over, 64 bytes at a time."""
    at = ALIGN
    while at + ALIGN <= size:
        part = _part(store, segment, at, size)
        if part is not None:
            yield part
            at += -(-part.place.length // ALIGN) * ALIGN
        else:
            at += ALIGN


def _part(store: SegmentStore, segment: str, at: int, size: int) -> Part | None:
    try:
        head = store.get(Place(segment, at, ALIGN))
        if bytes(head[:8]) == media.MAGIC:
            length = media.blob_size(head)
            if at + length > size:
                return None
            place = Place(segment, at, length)
            return Part(place, [], media.open_blob(store.get(place), verify=True).hash)
        frame = read_header(bytes(head[:HEADER_BYTES]))
        if frame.compression is not None or at + frame.stop > size:
            return None
        place = Place(segment, at, frame.stop)
        records: Experiences = decode(store.get(place), private=store.private)
        return Part(place, list(printed_ids(records.columns["eid"]).uid) if len(records) else [], None)
    except (WireError, MissingSegmentError, CorruptBookError):
        return None
