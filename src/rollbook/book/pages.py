"""Rows of a SQLite file read page by page, without its b-trees: what is left of a ledger that is cut or overwritten.

Invariant: a page counts only if all of its cells can be read and fit one table; nothing is written. The format is that
of https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

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
