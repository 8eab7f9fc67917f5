"""Repair: rebuild a damaged ledger from its readable rows and from the segments, and correct what a check finds.

Invariant: a record is recovered only if all its bytes, and those of its media, are intact. A deleted record stays
deleted, and a redacted one is redacted again; if neither the ledger nor the list of deletions is conclusive, the record
is left out and reported. A record whose history is lost is quarantined.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rollbook.book import content_hash, index_columns, media, queue, revision
from rollbook.book.book import LEDGER, Book, open_folder, open_postgres
from rollbook.book.book import open as open_book
from rollbook.book.check import (
    EXPIRED_AND_EMPTY,
    LEASE_WITHOUT_STATE,
    LEASED_WITHOUT_LEASE,
    PAGE_ROWS,
    EventSummary,
    Report,
    check,
    check_layout,
    check_types,
    expected_columns,
    find_foreign_files,
    media_problems,
    parse_each_consumer,
    record_problems,
    summarize_events,
    wrong_groups,
)
from rollbook.book.consumer import (
    NOT_REMOVED,
    Consumer,
    ConsumerConfig,
    all_consumers,
    create_consumer,
    parse_settings,
    parse_state,
    save_consumer,
)
from rollbook.book.content_hash import printed_ids
from rollbook.book.disk import Disk, folder_lock
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError, NewerLayoutError, NotABookError
from rollbook.book.ledger import (
    BUSY_SECONDS,
    ROLLOUT_TABLES,
    TABLES,
    SQLiteLedger,
    Transaction,
    check_files,
    chunks,
    parse_object,
    prepare_tables,
)
from rollbook.book.queue import QUARANTINED
from rollbook.book.read import read_frame, read_numbers, restore_media
from rollbook.book.segments.files import ALIGN, FileSegmentStore, Place, is_name
from rollbook.core.addresses import POSTGRES, redacted
from rollbook.core.errors import WireError
from rollbook.core.files import FOLDER_MODE, make_private, private_opener
from rollbook.core.wire import HEADER_BYTES, decode, read_header

if TYPE_CHECKING:
    from rollbook.book.ledger import LedgerValue
    from rollbook.book.segments.files import SegmentStore
    from rollbook.core.experiences import Experiences


_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_MAX_PAYLOAD_BYTES = 64 << 20
_DEFAULT_PAGE_BYTES = 4096
"""Page size of ledgers; the first page states it."""
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of an integer by its serial type."""

Row = tuple[Any, ...]


class _MalformedPageError(Exception):
    """A page that cannot be parsed."""


class PageFile:
    """The pages of a SQLite file, any of which may be damaged.

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
        size, reserved = _DEFAULT_PAGE_BYTES, 0
        if len(head) == 100 and head[:16] == b"SQLite format 3\0":
            (size,) = struct.unpack_from(">H", head, 16)
            reserved = head[20]
        if size < 512 or size & (size - 1):
            size, reserved = _DEFAULT_PAGE_BYTES, 0
        self.size = size
        self.usable = size - reserved

    def _read(self, start: int, length: int) -> bytes:
        self.file.seek(start)
        return self.file.read(length)

    def tables(self) -> Iterator[list[Row]]:
        """Yield the rows of each leaf page of a table: the row number, then its values."""
        return self._scan((_TABLE_LEAF,), self._table_cell)

    def indices(self) -> Iterator[list[Row]]:
        """Yield the entries of each page of an index: the values, then the row number."""
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
        max_local = self.usable - 35
        return (
            number - (1 << 64) if number >= 1 << 63 else number,
            *_decode_record(self._payload(page, at, length, max_local)),
        )

    def _index_cell(self, page: bytes, at: int, kind: int) -> Row:
        length, at = _varint(page, at + (4 if kind == _INDEX_INTERIOR else 0))
        max_local = (self.usable - 12) * 64 // 255 - 23
        return _decode_record(self._payload(page, at, length, max_local))

    def _payload(self, page: bytes, at: int, length: int, max_local: int) -> bytes:
        """Read the payload of a cell from its page and overflow pages."""
        if length > min(_MAX_PAYLOAD_BYTES, self.length):
            raise _MalformedPageError
        local = length
        if length > max_local:
            least = (self.usable - 12) * 32 // 255 - 23
            local = least + (length - least) % (self.usable - 4)
            local = local if local <= max_local else least
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


def _decode_record(payload: bytes) -> Row:
    """Decode the values of a SQLite record."""
    header, at = _varint(payload, 0)
    if header > len(payload):
        raise _MalformedPageError
    values: list[Any] = []
    body = header
    while at < header:
        code, at = _varint(payload, at)
        if code in _INTEGER_BYTES:
            length = _INTEGER_BYTES[code]
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


_BATCH_ROWS = 500
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_TYPES: dict[str, tuple[type, ...]] = {
    "TEXT": (str,),
    "{INT}": (int,),
    "{EVENT_ID}": (int,),
    "{REAL}": (float, int),
    "{BYTES}": (bytes,),
}


_COLUMNS = {
    table: [column.split() for column in columns if not column.startswith("PRIMARY KEY")]
    for table, columns in TABLES.items()
}


# --- rows of a damaged ledger ---------------------------------------------------------------------------------------


class LostRows:
    """How much of each table could not be read."""

    def __init__(self) -> None:
        self.gaps: dict[str, int] = {}
        """Number of unreadable ranges of rows, by table."""
        self.rows: dict[str, int] = {}
        """Number of rows with values of other types, by table."""
        self.tables: dict[str, str] = {}
        """Reasons why nothing could be read, by table."""

    def any(self, table: str) -> bool:
        """Return whether rows of the table are lost."""
        return table in self.gaps or table in self.rows or table in self.tables


def connect_to_copy(path: str, copy: str) -> sqlite3.Connection | None:
    """Connect to a copy of a damaged ledger; return `None` if it is not a database at all.

    If its first page, which locates the tables, is damaged, it is replaced by the first page of `copy`, a new ledger:
    tables are always created in the same order and begin on the same pages.
    """
    _apply_log(path)
    size = read_page_size(path)
    # SQLite would read an incomplete last page as one that ends in zeros.
    os.truncate(path, os.path.getsize(path) // size * size)
    for transplant in (False, True):
        if transplant and not _copy_schema_pages(path, copy):
            return None
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA writable_schema=ON")  # also read a file that is shorter than its header states
            connection.execute("PRAGMA cell_size_check=ON")
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables & set(TABLES):
                return connection
        except sqlite3.Error:
            pass
        connection.close()
    return None


def read_page_size(path: str) -> int:
    """Return the page size of a SQLite file."""
    with open(path, "rb") as file:
        return PageFile(file).size


def _copy_schema_pages(path: str, copy: str) -> bool:
    """Copy the schema pages of a new ledger to a damaged one; return whether both have the same pages."""
    with open(copy, "rb") as file:
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
        # The number of pages, and no free pages, since the damaged header listed those.
        file.seek(28)
        file.write(struct.pack(">III", -(-length // size), 0, 0))
    return True


def _apply_log(path: str) -> None:
    """Write the committed pages of the log to the database, as SQLite would; checksums show where the log ends.

    The log is then removed, since SQLite would replace the copied first page by that of the log.
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
    salts, total = log[16:24], _log_checksum(log[:24], (0, 0), order)
    committed: dict[int, int] = {}
    since: dict[int, int] = {}
    at = 32
    while magic & ~1 == 0x377F0682 and 512 <= size <= 65536 and at + 24 + size <= len(log):
        page, commit = struct.unpack_from(">II", log, at)
        total = _log_checksum(log[at + 24 : at + 24 + size], _log_checksum(log[at : at + 8], total, order), order)
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


def _log_checksum(data: bytes, start: tuple[int, int], order: str) -> tuple[int, int]:
    """Compute the running checksum of a log."""
    first, second = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        first = (first + words[i] + second) & 0xFFFFFFFF
        second = (second + words[i + 1] + first) & 0xFFFFFFFF
    return first, second


def _children(data: bytes) -> list[int]:
    """Return the pages below the first, if the schema takes more than one page."""
    kind, count = data[100], struct.unpack_from(">H", data, 103)[0]
    if kind != 5:
        return []
    cells = struct.unpack_from(f">{count}H", data, 112)
    return [struct.unpack_from(">I", data, cell)[0] for cell in (*cells, 108)]


def read_rows(connection: sqlite3.Connection, table: str, lost: LostRows) -> Iterator[tuple[Any, ...]]:
    """Yield all readable rows of a table, in the order of its columns; damage is skipped."""
    columns = _COLUMNS[table]
    names = ", ".join(column[0] for column in columns)
    sql = f"SELECT rowid, {names} FROM {table} WHERE rowid >= ? ORDER BY rowid LIMIT ?"
    at, count = _FIRST, _BATCH_ROWS
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
            if all(_fits_column(value, column) for value, column in zip(row[1:], columns, strict=True)):
                yield row[1:]
            else:
                lost.rows[table] = lost.rows.get(table, 0) + 1
        if len(batch) < count or batch[-1][0] == _LAST:
            return
        at, count = batch[-1][0] + 1, min(2 * count, _BATCH_ROWS)


def _next_readable(connection: sqlite3.Connection, sql: str, at: int) -> int | None:
    """Find the first row number after the damage, by doubling steps and then bisection."""
    bad, step = at, 1
    while True:
        good = min(at + step, _LAST)
        if _is_readable(connection, sql, good):
            break
        if good == _LAST:
            return None
        bad, step = good, step * 2
    while good - bad > 1:
        middle = (good + bad) // 2
        if _is_readable(connection, sql, middle):
            good = middle
        else:
            bad = middle
    return good


def _is_readable(connection: sqlite3.Connection, sql: str, at: int) -> bool:
    try:
        connection.execute(sql, (at, 1)).fetchall()
    except sqlite3.Error:
        return False
    return True


def read_page_rows(file: BinaryIO) -> Iterator[tuple[str, Row]]:
    """Yield (table, row) of all rows on intact pages, whether or not a b-tree refers to them."""
    for rows in PageFile(file).tables():
        tables = [table for table in _COLUMNS if all(_fits_table(table, row) for row in rows)]
        if len(tables) > 1:
            tables = _distinguish_tables(tables, rows)
        for table in tables[:1]:
            for number, *values in rows:
                yield table, tuple(values) if not _is_numbered(table) else (number, *values[1:])


def read_page_numbers(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield (id, number) of records, from intact pages of the index of ids."""
    for entries in PageFile(file).indices():
        if all(len(entry) == 2 and type(entry[0]) is str and type(entry[1]) is int for entry in entries):
            yield from ((uid, seq) for uid, seq in entries if uid.count("/") == 4)


def _is_numbered(table: str) -> bool:
    """Return whether the first column is the row number, which a record does not store."""
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
    return all(map(_fits_column, values, columns))


def _distinguish_tables(tables: list[str], rows: list[Row]) -> list[str]:
    """Distinguish tables of two columns by their values."""
    first = [row[1] for row in rows]
    if "meta" in tables:
        return ["meta" if "layout" in first else "columns"]
    if all(map(is_name, first)):
        return ["purges"]
    return ["media_uses"] if "media_uses" in tables and all(len(text) == 64 for text in first) else []


def _fits_column(value: LedgerValue, column: list[str]) -> bool:
    if value is None:
        return "NOT" not in column and "KEY" not in column
    return type(value) in _TYPES[column[1]]


# --- segments -------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A complete frame or medium in a segment."""

    place: Place
    uids: list[str]
    """Of a frame, the id of each record."""
    hash: str | None
    """Of a medium."""


def read_parts(store: SegmentStore, segment: str, size: int) -> Iterator[Part]:
    """Yield every intact part of a segment, in order; damage is skipped, 64 bytes at a time."""
    at = ALIGN
    while at + ALIGN <= size:
        part = _read_part(store, segment, at, size)
        if part is not None:
            yield part
            at += -(-part.place.length // ALIGN) * ALIGN
        else:
            at += ALIGN


def _read_part(store: SegmentStore, segment: str, at: int, size: int) -> Part | None:
    try:
        head = store.get(Place(segment, at, ALIGN))
        if bytes(head[:8]) == media.MAGIC:
            length = media.blob_size(head)
            if at + length > size:
                return None
            location = Place(segment, at, length)
            return Part(location, [], media.open_blob(store.get(location), verify=True).hash)
        frame = read_header(bytes(head[:HEADER_BYTES]))
        if frame.compression is not None or at + frame.stop > size:
            return None
        location = Place(segment, at, frame.stop)
        records: Experiences = decode(store.get(location), private=store.private)
        return Part(location, list(printed_ids(records.columns["eid"]).uid) if len(records) else [], None)
    except (WireError, MissingSegmentError, CorruptBookError):
        return None


RECOVERED = "recovered"
DATABASE_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files of a SQLite database."""
_RECOVERED_TABLES = [name for name in TABLES if name not in ("blobs", "orphans", *ROLLOUT_TABLES)]
_FORMAT_KEYS = ("layout", "digests")
_REDACTABLE = (*revision.REDACTABLE, "info", "metrics", "multi_modal_inputs")


def recover_rows(book: Book, backup: str, report: Report) -> LostRows:
    """Copy all readable rows of the old ledger."""
    lost = LostRows()
    copied = os.path.join(backup, LEDGER)
    with book.ledger.write() as tx:
        tx.run("CREATE TEMP TABLE numbers (uid TEXT PRIMARY KEY, seq INT)")
    if not os.path.exists(copied):
        lost.tables = dict.fromkeys(_RECOVERED_TABLES, "there is no ledger")
        return lost
    working = os.path.join(backup, "working")
    os.mkdir(working, FOLDER_MODE)
    try:
        for tail in ("", "-wal", "-journal"):
            if os.path.exists(copied + tail):
                shutil.copyfile(copied + tail, os.path.join(working, LEDGER + tail))
        # A new ledger, all of it in one file.
        model = os.path.join(working, "model")
        other = SQLiteLedger(Path(model))
        prepare_tables(other, create=True, address=model, meta={})
        other.close()
        connection = connect_to_copy(os.path.join(working, LEDGER), model)
        if connection is None:
            lost.tables = dict.fromkeys(_RECOVERED_TABLES, "its b-tree cannot be read")
        else:
            try:
                for table in _RECOVERED_TABLES:
                    _insert_rows(book, table, read_rows(connection, table, lost))
            finally:
                connection.close()
        _recover_pages(book, os.path.join(working, LEDGER), lost, report)
    finally:
        shutil.rmtree(working)
    for table in _RECOVERED_TABLES:
        if lost.any(table):
            gaps, wrong = lost.gaps.get(table, 0), lost.rows.get(table, 0)
            description = lost.tables.get(table, f"{gaps} ranges and {wrong} single rows could not be read")
            report.add_repair("lost", description, f"table {table}")
    with book.ledger.write() as tx:
        if lost.any("meta") and tx.first(f"SELECT 1 FROM events WHERE kind = '{queue.QUARANTINED}' LIMIT 1"):
            queue.add_to_quarantine(tx, [], first=0)
    return lost


def _recover_pages(book: Book, path: str, lost: LostRows, report: Report) -> None:
    """Copy rows of intact pages that no b-tree refers to, and the numbers that records had."""
    broken = [table for table in _RECOVERED_TABLES if lost.any(table)]
    if not broken:
        return
    batches: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
    with open(path, "rb") as file:
        for table, row in read_page_rows(file):
            if table in broken:
                batches[table].append(row)
                if len(batches[table]) >= PAGE_ROWS:
                    _recover_page(book, table, batches.pop(table), report)
        for table, rows in batches.items():
            _recover_page(book, table, rows, report)
        with book.ledger.write() as tx:
            tx.run_many("INSERT OR IGNORE INTO numbers VALUES (?, ?)", read_page_numbers(file))


def _recover_page(book: Book, table: str, rows: Sequence[Sequence[Any]], report: Report) -> None:
    report.add_repair("salvaged", "rows of intact pages", f"table {table}", count=_insert_rows(book, table, rows))


def _insert_rows(book: Book, table: str, rows: Iterable[Sequence[Any]]) -> int:
    """Write rows that are not there yet; return how many."""
    names = expected_columns(table)
    # Rows of the old ledger replace those of the new one.
    verb = "INSERT OR REPLACE" if table == "meta" else "INSERT OR IGNORE"
    sql = f"{verb} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    remaining = (row for row in rows if table != "meta" or row[0] not in _FORMAT_KEYS)
    count = 0
    while batch := list(islice(remaining, PAGE_ROWS)):
        with book.ledger.write() as tx:
            count += sum(tx.count(sql, row) for row in batch)
    return count


def recover_parts(
    book: Book,
    sizes: dict[str, int],
    lost: LostRows,
    listed: Sequence[revision.Deletion],
    complete: bool,
    report: Report,
) -> None:
    """Append records of the segments that the ledger does not have; of several copies the last one counts.

    Args:
        book: The book.
        sizes: Sizes of the segments.
        lost: What could not be read of the old ledger.
        listed: Records that were deleted or redacted, which is repeated.
        complete: Whether all deletions and redactions are listed.
        report: Where to report.
    """
    with book.ledger.write() as tx:
        tx.run("CREATE TEMP TABLE found (uid TEXT PRIMARY KEY, segment TEXT, start INT, size INT, slot INT, n INT)")
        tx.run("CREATE TEMP TABLE intact (segment TEXT, start INT, PRIMARY KEY (segment, start))")
    for segment, size in sizes.items():
        report.segments += 1
        for part in read_parts(book.store, segment, size):
            location = (part.place.segment, part.place.offset, part.place.length)
            with book.ledger.write() as tx:
                tx.run("INSERT OR IGNORE INTO intact VALUES (?, ?)", location[:2])
                if part.hash is not None:
                    tx.run(
                        "INSERT INTO media (hash, segment, start, size) VALUES (?, ?, ?, ?) ON CONFLICT (hash) "
                        "DO UPDATE SET segment = excluded.segment, start = excluded.start, size = excluded.size "
                        "WHERE NOT EXISTS (SELECT 1 FROM intact WHERE intact.segment = media.segment "
                        "AND intact.start = media.start)",
                        (part.hash, *location),
                    )
                tx.run_many(
                    "INSERT INTO found VALUES (?, ?, ?, ?, ?, 1) ON CONFLICT (uid) DO UPDATE SET segment = "
                    "excluded.segment, start = excluded.start, size = excluded.size, slot = excluded.slot, n = n + 1",
                    [(uid, *location, slot) for slot, uid in enumerate(part.uids)],
                )
    with book.ledger.write() as tx:
        tx.run("CREATE TEMP TABLE recovered (uid TEXT PRIMARY KEY)")
        _find_other_copies(tx, report)
        _leave_out(tx, lost, complete, report)
    _append_found(book, report)
    _repeat_deletions(book, listed, report)


def _find_other_copies(tx: Transaction, report: Report) -> None:
    """Find another copy of records whose place in the ledger is damaged, except redacted ones."""
    moved = tx.all(
        "SELECT records.seq, records.uid, found.segment, found.start, found.size, found.slot FROM records "
        "JOIN found ON found.uid = records.uid WHERE records.removed_reason IS NULL AND NOT EXISTS "
        "(SELECT 1 FROM intact WHERE intact.segment = records.segment AND intact.start = records.start) "
        "AND found.segment NOT IN (SELECT segment FROM purges) AND NOT EXISTS "
        "(SELECT 1 FROM events WHERE events.seq = records.seq "
        "AND events.kind = 'redacted')"
    )
    for seq, uid, *location in moved:
        tx.run("UPDATE records SET segment = ?, start = ?, size = ?, slot = ? WHERE seq = ?", (*location, seq))
        report.add_repair(RECOVERED, "another copy of it was found; it may lack its last revision", uid)


def _leave_out(tx: Transaction, lost: LostRows, complete: bool, report: Report) -> None:
    """Leave out records that the ledger has or never admitted and, without a complete list, that may have been deleted.

    The latter are records in segments that were to be purged, and all unknown records if it is known that some were
    deleted, but not which.
    """
    tx.run("DELETE FROM found WHERE uid IN (SELECT uid FROM records)")
    # The id of a rewound record ends with its number.
    tx.run("DELETE FROM found WHERE uid IN (SELECT substr(uid, 1, length(uid) - length('~' || seq)) FROM records "
           "WHERE removed_reason = 'rewound' AND uid LIKE '%~' || seq)")  # fmt: skip
    missing = "SELECT 1 FROM {} WHERE seq IS NOT NULL AND seq NOT IN (SELECT seq FROM records) LIMIT 1"
    if not lost.any("records") and not any(tx.first(missing.format(table)) for table in ("events", "queue")):
        # No row is missing: these are bytes of appends that failed.
        for (uid,) in tx.all("SELECT uid FROM found ORDER BY uid"):
            report.add_repair(
                "uncommitted", "its bytes are there, but the ledger never admitted it: append it again", uid
            )
        tx.run("DELETE FROM found")
    if complete:
        return
    unknown = tx.first(
        "SELECT COUNT(DISTINCT seq) FROM events WHERE kind IN ('deleted', 'redacted') AND seq NOT IN "
        "(SELECT seq FROM records) AND seq NOT IN (SELECT seq FROM numbers JOIN found ON found.uid = numbers.uid)"
    )[0]
    condition = "segment IN (SELECT segment FROM purges)"
    reason = "it lies where bytes of deleted or redacted records are, and may be one of them"
    if unknown and lost.any("purges"):
        condition, reason = "1 = 1", f"{unknown} records were deleted or redacted, and it may be one of them"
    for (uid,) in tx.all(f"SELECT uid FROM found WHERE {condition} ORDER BY uid"):
        report.add_repair("lost", f"not recovered: {reason}", uid)
    tx.run(f"DELETE FROM found WHERE {condition}")


def _append_found(book: Book, report: Report) -> None:
    """Insert rows of `records` for recovered records, as new records. Rows of consumers are added later."""
    with book.ledger.read() as tx:
        base = 1 + max(
            tx.first(f"SELECT COALESCE(MAX(seq), 0) FROM {table}")[0]
            for table in ("records", "events", "queue", "revisions", "media_uses", "checkpoints", "numbers")
        )
    while True:
        with book.ledger.read() as tx:
            page = tx.all(f"SELECT segment, start, size, slot, uid, n FROM found ORDER BY 1, 2, 4 LIMIT {PAGE_ROWS}")
        if not page:
            return
        frames: defaultdict[Place, list[tuple[int, str, int]]] = defaultdict(list)
        for segment, start, size, slot, uid, n in page:
            frames[Place(segment, start, size)].append((slot, uid, n))
        for place, rows in frames.items():
            try:
                stripped = read_frame(book, place).take([slot for slot, _, _ in rows])
                records = restore_media(book, stripped)
                entries, digest, uses = (
                    index_columns.index_columns(records),
                    content_hash.content_hashes(records),
                    media.references(stripped),
                )
                purposes = media.evaluation_flags(stripped)
            except (WireError, ValueError) as error:
                for _, uid, _ in rows:
                    report.add_repair("lost", f"found, and cannot be restored: {error}", uid)
            else:
                numbers = _former_numbers(book, [uid for _, uid, _ in rows])
                seqs = [numbers.get(uid, base + i) for i, (_, uid, _) in enumerate(rows)]
                _insert_records(book, seqs, place, rows, records, entries, digest, uses, purposes)
                base += len(rows)
                for _, uid, n in rows:
                    history = "its number is known" if uid in numbers else "its history is not known"
                    more = f"; {n} versions were there, the last one stands" if n > 1 else ""
                    report.add_repair(RECOVERED, f"{history}{more}", uid)
                with book.ledger.write() as tx:
                    tx.run_many("INSERT INTO recovered VALUES (?)", [(uid,) for _, uid, _ in rows])
                    unknown = [
                        seq
                        for seq, (_, uid, _), evaluation in zip(seqs, rows, purposes, strict=True)
                        if uid not in numbers and not evaluation
                    ]
                    queue.add_to_quarantine(tx, unknown)
            with book.ledger.write() as tx:
                tx.run_many("DELETE FROM found WHERE uid = ?", [(uid,) for _, uid, _ in rows])


def _former_numbers(book: Book, uids: Sequence[str]) -> dict[str, int]:
    """Return the former numbers of records by id, if they are free, since events and the queue refer to them."""
    numbers: dict[str, int] = {}
    with book.ledger.read() as tx:
        for marks, chunk in chunks(uids):
            sql = f"SELECT uid, seq FROM numbers WHERE uid IN ({marks}) AND seq NOT IN (SELECT seq FROM records)"
            numbers.update(tx.all(sql, chunk))
    # A damaged index may have one number twice.
    return {uid: seq for seq, uid in {seq: uid for uid, seq in numbers.items()}.items()}


def _repeat_deletions(book: Book, listed: Sequence[revision.Deletion], report: Report) -> None:
    """Delete and redact records again, by the list of deletions and the events of the old ledger."""
    with book.ledger.read() as tx:
        rows = tx.all(
            "SELECT records.uid, events.kind, events.time, events.reason, events.detail FROM events "
            "JOIN records ON records.seq = events.seq WHERE events.kind IN ('deleted', 'redacted') "
            "AND records.removed_reason IS NULL"
        )
        recovered = {uid for (uid,) in tx.all("SELECT uid FROM recovered")}
        present_uids = {uid for (uid,) in tx.all("SELECT uid FROM records WHERE removed_reason IS NULL")}
    entries = [entry for entry in listed if entry.uid in present_uids]
    for uid, kind, when, reason, detail in rows:
        try:
            values = parse_object(detail or "{}", uid)
        except CorruptBookError:
            values = {}
        # If it is unknown which fields were redacted, redact all.
        fields = values.get("fields")
        fields = tuple(map(str, fields)) if isinstance(fields, list) and fields else _REDACTABLE
        fields = fields if kind == "redacted" else ()
        entries.append(revision.Deletion(uid, when, str(values.get("author") or "unknown"), reason, fields))
    deleted: defaultdict[tuple[str, str | None], dict[str, None]] = defaultdict(dict)
    for entry in entries:
        if not entry.fields:
            deleted[entry.author, entry.reason][entry.uid] = None
        elif entry.uid in recovered:
            # The recovered version may be the one before the redaction.
            try:
                revision.redact_records(book, [entry.uid], entry.fields, author=entry.author, reason=entry.reason)
            except ValueError:
                revision.redact_records(book, [entry.uid], _REDACTABLE, author="repair", reason=entry.reason)
            report.add_repair("redacted", f"{', '.join(entry.fields)} redacted again", entry.uid)
    for (author, reason), uids in deleted.items():
        revision.delete_records(book, list(uids), author=author, reason=reason)
        for uid in uids:
            report.add_repair("deleted", "it was deleted before, and stays so", uid)


def _insert_records(
    book: Book,
    seqs: Sequence[int],
    place: Place,
    rows: Sequence[tuple[int, str, int]],
    records: Experiences,
    entries: Sequence[index_columns.IndexColumns],
    digest: content_hash.ContentHashes,
    uses: Sequence[tuple[str, ...]],
    purposes: Sequence[bool],
) -> None:
    names = [
        "seq",
        *index_columns.IndexColumns._fields,
        *(
            [
                "evaluation",
                "admitted",
                "revision",
                "full_hash",
                "core_hash",
                "segment",
                "start",
                "size",
                "slot",
                "bytes",
            ]
        ),
    ]
    share = -(-place.length // len(rows))
    with book.ledger.write() as tx:
        tx.run_many(
            f"INSERT INTO records ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [
                (
                    *(seqs[i], *entries[i], int(purposes[i]), tx.now, 0, digest.full[i], digest.core[i]),
                    *(place.segment, place.offset, place.length, slot, share),
                )
                for i, (slot, _, _) in enumerate(rows)
            ],
        )
        tx.run_many(
            "INSERT OR IGNORE INTO media_uses (hash, seq) VALUES (?, ?)",
            [(key, seq) for seq, keys in zip(seqs, uses, strict=True) for key in keys],
        )
        tx.run_many(
            "INSERT INTO columns (name, type) VALUES (?, ?) ON CONFLICT DO NOTHING",
            sorted(index_columns.column_types(records)),
        )
        queue.record_events(tx, [queue.Event(RECOVERED, seq) for seq in seqs])


DAMAGED = "damaged"
LEFTOVER_SECONDS = 60.0
"""Age in seconds up to which a temporary file may belong to a live writer."""


def repair(url: str | os.PathLike[str], *, offer: bool = False) -> Report:
    """Repair a book.

    A folder whose ledger is damaged or missing gets a new one, from what can be read of the old one and the segments.
    Whatever changes is copied first, to `<folder>.before-repair-<time>` next to the folder; tables in PostgreSQL are
    copied to a schema of such a name.

    Args:
        url: The book's folder, or `postgresql://...`.
        offer: Release quarantined records: those that a repair recovered without knowing whether they were trained on.
            They can be read, but are leased only after this.

    Returns:
        A report of what was repaired, lost and is still wrong; `report.ok` if there is no error left.

    Raises:
        NotABookError: There is no book at the address.
        BookError: Other processes write to the book.
        ValueError: The address is neither a folder nor a PostgreSQL URL.

    >>> import rollbook, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rollbook.open(f"{folder}/demo") as book:
    ...         _ = book.append([rollbook.Experience(eid={"suffix": "a"}, tokens=[1, 2, 3])])
    ...     os.unlink(f"{folder}/demo/ledger.sqlite")
    ...     report = repair(f"{folder}/demo")
    ...     [finding.kind for finding in report.findings], report.repairs["recovered"]
    ...     repair(f"{folder}/demo", offer=True).ok
    (['quarantined'], 1)
    True
    """
    address = os.fspath(url)
    if address.startswith(POSTGRES):
        with Book(address, *open_postgres(address, "r+", None, {}, None)) as book:
            return _repair_readable(book, Report(book.url), lambda: _copy_schema(book), offer)
    if "://" in address:
        raise ValueError(f"url: got {redacted(address)!r}, expected a folder or 'postgresql://...'")
    folder = Path(os.path.abspath(os.path.expanduser(address)))
    path = folder / LEDGER
    check_files(path)
    if not folder.is_dir():
        raise NotABookError(f"{folder}: there is no book here")
    report = Report(address)
    reason = _rebuild_reason(address, path)
    if reason is None:
        # Not `rollbook.open`, which reads a consumer that may be damaged.
        with Book(address, *open_folder(folder, "r+", 256 << 20, None, Disk())) as book:
            return _repair_readable(book, report, lambda: _copy_ledger(path, _make_backup_folder(folder)), offer)
    # Write transactions share this lock; later ones see that the ledger was replaced, and raise.
    with folder_lock(folder, shared=False, seconds=BUSY_SECONDS) as alone:
        if not alone:
            raise BookError(f"{folder}: other processes wrote to the book for {BUSY_SECONDS:g} s; repair it later")
        reason = _rebuild_reason(address, path)
        if reason is not None:
            return _rebuild(folder, path, report, reason, offer)
    return repair(url, offer=offer)  # Another repair replaced it.


def _rebuild_reason(address: str, path: Path) -> str | None:
    """Return why the ledger has to be rebuilt, or `None` if it can be repaired in place."""
    if not path.exists():
        return "the ledger is missing"
    try:
        with open_book(address, "r") as book:
            report = Report(address)
            for stage in (check_layout, check_types):
                stage(book, report)
    except NewerLayoutError:
        raise
    except (BookError, OSError, sqlite3.Error) as error:
        return str(error)
    return next((f"{finding.subject}: {finding.description}" for finding in report.findings), None)


_NOT_REPAIRED = {"orphan", "unused", "stranger", "event", QUARANTINED}


def _repair_readable(book: Book, report: Report, copy: Callable[[], str], offer: bool) -> Report:
    """Repair a book whose ledger can be read."""
    problems = check(book)
    intact = set(problems.counts) <= _NOT_REPAIRED
    if intact and not (offer and problems.counts[QUARANTINED]):
        return problems
    report.backup = copy()
    if not intact:
        _repair_tables(book, report)
    if offer:
        _release_quarantine(book, report)
    return _check_again(book, report)


def _release_quarantine(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        report.add_repair("offered", "quarantined records are offered for training", count=queue.release_quarantine(tx))


def _check_again(book: Book, report: Report) -> Report:
    after = check(book)
    after.repaired, after.repairs, after.backup = report.repaired, report.repairs, report.backup
    return after


# --- backups --------------------------------------------------------------------------------------------------------


def _make_backup_folder(folder: Path) -> str:
    """Create a new folder next to the book's."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    base = f"{os.path.abspath(folder)}.before-repair-{stamp}"
    for n in range(1000):
        name = base if not n else f"{base}-{n}"
        try:
            os.mkdir(name, FOLDER_MODE)
        except FileExistsError:
            continue
        return name
    raise BookError(f"{base}: a thousand repairs in a second")


def _copy_ledger(path: Path, backup_folder: str) -> str:
    """Copy a ledger that is in use, as one transaction sees it."""
    source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    target = sqlite3.connect(os.path.join(backup_folder, LEDGER))
    try:
        source.backup(target)
    finally:
        target.close()
        source.close()
    make_private(os.path.join(backup_folder, LEDGER))
    _sync_file(os.path.join(backup_folder, LEDGER))
    return backup_folder


def _copy_schema(book: Book) -> str:
    """Copy the tables of a book in PostgreSQL, without its data, to another schema."""
    name = f"before_repair_{time.strftime('%Y%m%d_%H%M%S', time.gmtime())}_{os.urandom(2).hex()}"
    with book.ledger.write() as tx:
        tx.run(f"CREATE SCHEMA {name}")
        for table in TABLES:
            if table not in ("blobs", "weights"):
                tx.run(f"CREATE TABLE {name}.{table} AS SELECT * FROM {table}")
    return name


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- repairs of a readable ledger -----------------------------------------------------------------------------------


def _repair_tables(book: Book, report: Report, lost: LostRows | None = None) -> None:
    complete = _repair_consumers(book, report)
    if lost is not None and not complete:
        _quarantine_all(book)
    _repair_records(book, report)
    _repair_work(book, report, lost is not None and lost.any("events"))
    _repair_leases(book, report)
    _repair_counts(book, report)
    if isinstance(book.store, FileSegmentStore) and report.backup is not None:
        _repair_files(book.store, report.backup, report)
    with book.ledger.write() as tx:
        queue.record_events(tx, [queue.Event("repaired", detail=dict(report.repairs))])


def _quarantine_all(book: Book) -> None:
    """Quarantine all records: a new consumer with the name of a lost one would train on them again."""
    last = 0
    while True:
        with book.ledger.write() as tx:
            rows = tx.all(
                "SELECT seq FROM records WHERE evaluation = 0 AND removed_reason IS NULL AND seq > ? "
                f"ORDER BY seq LIMIT {PAGE_ROWS}",
                (last,),
            )
            if not rows:
                return
            seqs = [seq for (seq,) in rows]
            members = queue.find_quarantined(tx, seqs)
            queue.add_to_quarantine(tx, [seq for seq in seqs if seq not in members])
        last = seqs[-1]


def _repair_consumers(book: Book, report: Report) -> bool:
    """Reset unreadable settings of consumers and create missing consumers; return whether none was missing."""
    with book.ledger.write() as tx:
        for number, reason in parse_each_consumer(tx)[1].items():
            settings, state, name = tx.first("SELECT settings, state, name FROM consumers WHERE id = ?", (number,))
            try:
                parse_settings(settings)
            except ValueError:
                settings = ConsumerConfig().to_json()
                report.add_repair("consumer", f"its settings are those of a new one now: {reason}", str(name))
            try:
                parse_state(state)
            except ValueError:
                state = "{}"
                report.add_repair("consumer", f"its sampler starts over: {reason}", str(name))
            tx.run(
                "UPDATE consumers SET settings = ?, state = ?, grouped = CASE WHEN grouped = 1 THEN 1 ELSE 0 END, "
                "floor = NULL, generation = 0, inserts = (SELECT COUNT(*) FROM queue WHERE consumer = ? AND "
                "state <> 'dropped'), samples = (SELECT COALESCE(SUM(uses), 0) FROM queue WHERE consumer = ? AND "
                "state <> 'dropped') WHERE id = ?",
                (settings, state, number, number, number),
            )
        missing = tx.all(
            f"SELECT consumer FROM queue WHERE consumer NOT IN (SELECT id FROM consumers) AND {NOT_REMOVED} "
            "UNION SELECT consumer FROM events WHERE consumer IS NOT NULL "
            f"AND consumer NOT IN (SELECT id FROM consumers) AND {NOT_REMOVED} ORDER BY 1"
        )
        for (number,) in missing:
            # The first consumer of every book is "train".
            name = "train" if number == 1 else f"recovered-{number}"
            consumer = create_consumer(tx, name, ConsumerConfig())
            tx.run("UPDATE consumers SET id = ? WHERE id = ?", (number, consumer.id))
            report.add_repair("consumer", f"number {number} had no row: it has the settings of a new one now", name)
        return not missing and tx.first("SELECT 1 FROM consumers LIMIT 1") is not None


def _repair_records(book: Book, report: Report) -> None:
    """Drop records whose bytes are damaged, and correct the index columns and media of the others."""
    lost_media = {key for key, _ in media_problems(book, True)}
    damaged: list[tuple[int, str, str]] = []
    for problem in record_problems(book, True):
        if problem.kind == "tags":
            with book.ledger.write() as tx:
                settings = ", ".join(f"{name} = ?" for name in index_columns.IndexColumns._fields)
                tx.run(f"UPDATE records SET {settings} WHERE seq = ?", (*problem.fix, problem.seq))
                tx.run("UPDATE queue SET gid = ? WHERE seq = ?", (problem.fix.gid, problem.seq))
            report.add_repair("tags", problem.description, problem.uid)
        elif problem.kind == "uses":
            with book.ledger.write() as tx:
                tx.run("DELETE FROM media_uses WHERE seq = ?", (problem.seq,))
                tx.run_many(
                    "INSERT INTO media_uses (hash, seq) VALUES (?, ?)", [(key, problem.seq) for key in problem.fix]
                )
            report.add_repair("uses", problem.description, problem.uid)
        else:
            damaged.append((problem.seq, problem.uid, problem.description))
            if len(damaged) >= PAGE_ROWS:
                _drop_damaged(book, damaged, report)
                damaged = []
    with book.ledger.read() as tx:
        for marks, chunk in chunks(sorted(lost_media)):
            damaged += [
                (seq, uid, f"the medium sha256:{key} is damaged or missing")
                for seq, uid, key in tx.all(
                    "SELECT records.seq, records.uid, media_uses.hash FROM media_uses JOIN records "
                    f"ON records.seq = media_uses.seq WHERE media_uses.hash IN ({marks})",
                    chunk,
                )
            ]
    _drop_damaged(book, damaged, report)
    with book.ledger.write() as tx:
        for marks, chunk in chunks(sorted(lost_media)):
            tx.run(f"DELETE FROM media WHERE hash IN ({marks})", chunk)
        count = tx.count(
            "DELETE FROM media_uses WHERE NOT EXISTS (SELECT 1 FROM records WHERE records.seq = media_uses.seq "
            "AND records.segment IS NOT NULL) OR NOT EXISTS (SELECT 1 FROM media WHERE media.hash = media_uses.hash)"
        )
        report.add_repair("uses", f"{count} uses of media by records that are not there", count=count)


def _drop_damaged(book: Book, damaged: Sequence[tuple[int, str, str]], report: Report) -> None:
    """Detach the bytes of damaged records, and keep a copy of their segments."""
    descriptions: dict[int, tuple[str, str]] = {}
    for seq, uid, description in damaged:
        descriptions.setdefault(seq, (uid, description))
    seqs = list(descriptions)
    if not seqs:
        return
    with book.ledger.write() as tx:
        busy: set[str] = set()
        for marks, chunk in chunks(seqs):
            busy.update(
                name
                for (name,) in tx.all(
                    f"SELECT DISTINCT segment FROM records WHERE segment IS NOT NULL AND seq IN ({marks})", chunk
                )
            )
            tx.run(
                f"UPDATE records SET removed_reason = COALESCE(removed_reason, '{DAMAGED}'), segment = NULL, "
                f"start = NULL, size = NULL, slot = NULL, bytes = 0 WHERE seq IN ({marks})",
                chunk,
            )
            tx.run(f"DELETE FROM media_uses WHERE seq IN ({marks})", chunk)
        queue.record_events(tx, [queue.Event("removed", seq, reason=DAMAGED) for seq in seqs])
        for consumer in all_consumers(tx):
            living = (queue.WAITING, queue.COOLING, queue.LEASED)
            rows = [row for row in queue.select_rows_by_seq(tx, consumer, seqs) if row.state in living]
            queue.drop_rows(tx, consumer, rows, DAMAGED)
            save_consumer(tx, consumer)
    for uid, description in descriptions.values():
        report.add_repair("lost", description, uid)
    if isinstance(book.store, FileSegmentStore) and report.backup is not None:
        for name in filter(is_name, busy):
            _link_segment(book.store, name, report.backup)


def _link_segment(store: FileSegmentStore, name: str, backup: str) -> None:
    """Link a segment to another name, so that compaction does not remove it; skip one that does not exist."""
    if not store.has(name):
        return
    source, target = os.path.join(store.folder, name), os.path.join(backup, name)
    if not os.path.exists(target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            _copy_file(store.disk, source, target)


def _copy_file(disk: Disk, source: str, target: str) -> None:
    """Copy a plain file durably; links and devices, which could be of any size, are not followed."""
    fd = disk.open_read(source)
    with os.fdopen(fd, "rb") as file, open(target, "xb", opener=private_opener) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())


def _repair_work(book: Book, report: Report, gaps: bool) -> None:
    """Ensure one row per record and consumer, from the events if it is missing; `gaps` if events are lost."""
    queue.drain_inboxes(book)
    with book.ledger.write() as tx:
        stray = (
            "NOT EXISTS (SELECT 1 FROM records WHERE records.seq = queue.seq AND records.evaluation = 0) "
            "OR consumer NOT IN (SELECT id FROM consumers)"
        )
        report.add_repair(
            "queue", "rows of records that are not there", count=tx.count(f"DELETE FROM queue WHERE {stray}")
        )
        for table in ("queue_before", "groups_before"):
            tx.run(f"DELETE FROM {table} WHERE checkpoint NOT IN (SELECT event FROM checkpoints)")
        marks = ", ".join("?" * len(queue.STATES))
        count = tx.count(f"DELETE FROM queue WHERE state NOT IN ({marks})", queue.STATES)
        report.add_repair("queue", "rows in an unknown state, rebuilt from their events", count=count)
        tx.run("DELETE FROM inbox")  # what is in it is missing in `queue`
        for consumer in all_consumers(tx):
            _enter_missing_rows(tx, book, consumer, report, gaps)
            save_consumer(tx, consumer)


def _enter_missing_rows(tx: Transaction, book: Book, consumer: Consumer, report: Report, gaps: bool) -> None:
    key = consumer.settings.sampler.key
    while True:
        rows = tx.all(
            "SELECT seq, uid, gid, version_min, removed_reason FROM records WHERE evaluation = 0 AND NOT EXISTS "
            "(SELECT 1 FROM queue WHERE queue.consumer = ? AND queue.seq = records.seq) ORDER BY seq "
            f"LIMIT {PAGE_ROWS}",
            (consumer.id,),
        )
        if not rows:
            return
        stored = [row[0] for row in rows if row[4] is None]
        numbers = dict(zip(stored, read_numbers(book, tx, stored, key), strict=True)) if key is not None else {}
        histories = summarize_events(tx, [row[0] for row in rows])
        admitted_seqs = {
            seq
            for marks, chunk in chunks([row[0] for row in rows])
            for (seq,) in tx.all(f"SELECT seq FROM events WHERE kind = 'admitted' AND seq IN ({marks})", chunk)
        }
        quarantined = queue.find_quarantined(tx, stored)
        entries = []
        unknown = []
        for seq, uid, gid, version, removed_reason in rows:
            summary = histories.get((seq, consumer.id), EventSummary())
            reason = removed_reason or (summary.reason if summary.kind == queue.DROPPED else None)
            if removed_reason is None and summary.kind not in (queue.DROPPED, queue.TRAINED):
                if seq not in quarantined and (gaps or seq not in admitted_seqs):
                    unknown.append(seq)
                reason = QUARANTINED if seq in quarantined or gaps or seq not in admitted_seqs else None
            row = queue.new_row(consumer, seq, gid, version, numbers.get(seq), reason)
            uses = len(summary.acks)
            if summary.kind == queue.TRAINED:
                row = row._replace(state=queue.TRAINED, reason=None)
            entries.append(row._replace(uses=uses))
            report.add_repair(
                "queue", f"consumer {consumer.name!r} had no row for it: {row.state} now, by its events", uid
            )
        if unknown:
            queue.add_to_quarantine(tx, unknown)
        queue.enter_rows(tx, consumer, entries)


def _repair_leases(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        for consumer in all_consumers(tx):
            rows = queue.select_rows(tx, f"consumer = ? AND {LEASED_WITHOUT_LEASE} ORDER BY seq", (consumer.id,))
            queue.requeue_rows(tx, consumer, rows, "expired", "repair")
            save_consumer(tx, consumer)
            report.add_repair(
                "lease",
                f"consumer {consumer.name!r}: records without an active lease are offered again",
                count=len(rows),
            )
        count = tx.count(f"UPDATE queue SET lease = NULL WHERE {LEASE_WITHOUT_STATE}")
        report.add_repair("lease", "rows that named a lease and were not leased", count=count)
        count = tx.count(f"UPDATE leases SET state = 'voided' WHERE {EXPIRED_AND_EMPTY}", (tx.now,))
        report.add_repair("lease", "leases that held nothing are ended", count=count)


_SELECT_TALLIES = "SELECT consumer, state, reason, SUM(n), SUM(weight) FROM tallies GROUP BY 1, 2, 3 HAVING SUM(n) <> 0"


def _repair_counts(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        counts_before = {row[:3]: row[3:] for row in tx.all(_SELECT_TALLIES)}
        queue.recount_all(tx)
        after = {row[:3]: row[3:] for row in tx.all(_SELECT_TALLIES)}
        changed = sum(counts_before.get(key, (0, 0.0)) != after.get(key, (0, 0.0)) for key in {*counts_before, *after})
        report.add_repair("tally", "recounted", count=changed)
        for consumer in all_consumers(tx):
            wrong = wrong_groups(tx, consumer)
            if wrong:
                queue.rebuild_groups(tx, consumer)
                save_consumer(tx, consumer)
                report.add_repair("group", f"consumer {consumer.name!r}: all groups were rebuilt", count=len(wrong))


def _repair_files(store: FileSegmentStore, backup: str, report: Report) -> None:
    """Move files that crashes left to the backup."""
    for kind, path in find_foreign_files(store):
        if kind == "leftover" and os.lstat(path).st_mtime < time.time() - LEFTOVER_SECONDS:
            os.rename(path, os.path.join(backup, os.path.basename(path)))
            report.add_repair("leftover", "moved away", path)
    for name in store.segments():
        try:
            store.get(Place(name, 64, 0))
        except WireError:
            if not store.busy(name):
                os.rename(os.path.join(store.folder, name), os.path.join(backup, name))
                report.add_repair("begun", "moved away", name)
        except LookupError:
            continue


# --- a new ledger ---------------------------------------------------------------------------------------------------


def _rebuild(folder: Path, path: Path, report: Report, reason: str, offer: bool) -> Report:
    """Replace a ledger by one that is rebuilt from its readable rows and the segments."""
    disk = Disk()
    store = FileSegmentStore(str(folder), disk)
    sizes = store.segments()
    if not sizes and not path.exists():
        raise NotABookError(f"{folder}: there is no book here: neither a ledger nor segments")
    busy = [name for name in sizes if store.busy(name)]
    if busy:
        raise BookError(f"{folder}: another process writes to {busy[0]}; close all writers to rebuild the ledger")
    report.add_repair("ledger", f"rebuilt: {reason}", LEDGER)
    report.backup = backup = _make_backup_folder(folder)
    for tail in DATABASE_SUFFIXES:
        if os.path.exists(f"{path}{tail}"):
            _copy_file(disk, f"{path}{tail}", os.path.join(backup, LEDGER + tail))
    # In a separate folder, which has its own lock.
    work_folder = folder / f".repair.{os.urandom(8).hex()}.tmp"
    work_folder.mkdir(FOLDER_MODE)
    rebuilt = work_folder / LEDGER
    try:
        ledger = SQLiteLedger(rebuilt)
        try:
            prepare_tables(ledger, create=True, address=str(folder), meta={})
            book = Book(str(folder), ledger, store)
            lost = recover_rows(book, backup, report)
            recover_parts(book, sizes, lost, *revision.read_deletions(folder, disk), report)
            _repair_tables(book, report, lost)
            if offer:
                _release_quarantine(book, report)
        finally:
            ledger.close()
            store.close()
        _replace_ledger(rebuilt, path)
        disk.sync_folder(str(folder))
    finally:
        shutil.rmtree(work_folder)
    with open_book(folder, "r") as book:
        return _check_again(book, report)


def _replace_ledger(rebuilt: Path, path: Path) -> None:
    """Replace the old ledger. Its log is removed first, since SQLite would apply it to the new one."""
    connection = sqlite3.connect(rebuilt)
    try:
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
    _sync_file(str(rebuilt))
    for tail in DATABASE_SUFFIXES[1:]:
        Path(f"{path}{tail}").unlink(missing_ok=True)
    os.replace(rebuilt, path)
