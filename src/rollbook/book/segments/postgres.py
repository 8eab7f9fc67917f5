"""Segment store in PostgreSQL: segments are rows of the table `blobs`, next to the ledger.

Invariant: a segment is written by one transaction and never changed: a reader that sees one of its rows sees all of
them, and never waits for its writer. It is durable with any later commit on the same server that saw it.

A segment has the same bytes as a file (see `rollbook.book.segments.files`): one per `put`, split into rows of
`ROW_BYTES`. The first row has the segment's name, the others the name, a slash and their number. So no value exceeds a
limit of the database, and neither side buffers more than a row beyond the data that is read.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rollbook.book.disk import hit_failpoint
from rollbook.book.errors import BookError, MissingSegmentError, NotABookError
from rollbook.book.ledger import Transaction
from rollbook.book.postgres import CONNECTIONS, PostgresLedger
from rollbook.book.segments.files import (
    ALIGN,
    HEADER,
    Place,
    align_parts,
    check_header,
    check_name,
    check_place,
    is_name,
    new_name,
    too_short_error,
)
from rollbook.core.ragged import allocate

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import Buffer

Answer = TypeVar("Answer")

ROW_BYTES = 8 << 20
"""Maximum size of a row: far below the limit of a gigabyte, since a server holds several copies of a value."""

# The commit of the data does not wait for the disk. The ledger's commit is later in the same write-ahead log and waits
# until everything before it is flushed, so one wait is enough for both. If the server crashes in between, the row is
# lost, which `has` detects inside the ledger's transaction. The setting ends with the statement's transaction, so that
# it does not affect another one, even if a pooler gives the same session to the ledger.
_ASYNC_COMMIT = "set_config('synchronous_commit', 'off', true) = 'off'"
_PUT = (
    "INSERT INTO {} (segment, data, made) SELECT %s, %b, extract(epoch FROM clock_timestamp())"
    f" WHERE {_ASYNC_COMMIT} ON CONFLICT (segment) DO NOTHING"
)
# Stored EXTERNAL, neither a slice of a value nor its length makes the server read the rest.
_GET = (
    "SELECT substring(data FROM 1 FOR 64), octet_length(data), substring(data FROM %s FOR %s)"
    " FROM {} WHERE segment = %s"
)
_GET_MANY = (
    "SELECT substring(blobs.data FROM place.start FOR place.length)"
    " FROM unnest(%s::text[], %s::int[], %s::int[]) WITH ORDINALITY AS place(segment, start, length, number)"
    " LEFT JOIN {} AS blobs ON blobs.segment = place.segment ORDER BY place.number"
)
_HAS = "SELECT 1 FROM {} WHERE segment = %s"
_SIZES = "SELECT split_part(segment, '/', 1) AS name, sum(octet_length(data))::bigint FROM {} GROUP BY name"
_REMOVE = f"DELETE FROM {{}} WHERE segment = %s AND {_ASYNC_COMMIT} RETURNING octet_length(data)"


class PostgresSegmentStore:
    """Segments as rows of the ledger's table `blobs`, over the ledger's connections.

    Every `put` creates a segment, which is complete when it is visible: no segment is ever busy, and `seal` does
    nothing.
    """

    private = True
    transactional = True

    def __init__(self, ledger: PostgresLedger) -> None:
        self.ledger = ledger
        self.schema = ledger.schema
        self._closed = False

    def insert(self, tx: Transaction, parts: Sequence[Buffer]) -> list[Place]:
        """Insert all parts within a transaction of the ledger, with which they become durable."""
        name = new_name()
        spans, pieces = align_parts(parts)
        for number, data in enumerate(_split_rows([HEADER, *pieces]) if spans else ()):
            row = (_row_name(name, number), data, tx.now)
            tx.defer("blobs", "INSERT INTO blobs (segment, data, made) VALUES (?, ?, ?)", row)
        return [Place(name, ALIGN + start, length) for start, length in spans]

    def put(self, parts: Sequence[Buffer]) -> list[Place]:
        """Insert all parts in one transaction; durable with the ledger's next commit, if `has` is true inside it."""
        name = new_name()
        spans, pieces = align_parts(parts)
        if not spans:
            return []
        fits_row = sum(map(len, pieces)) + ALIGN <= ROW_BYTES

        def insert(connection: psycopg.Connection[Any]) -> None:
            # One row is one statement, and that its own transaction: one exchange with the server.
            with nullcontext() if fits_row else connection.transaction():
                for number, data in enumerate(_split_rows([HEADER, *pieces])):
                    connection.execute(self._sql(_PUT), (_row_name(name, number), data))

        self._run(insert)
        hit_failpoint("after write")
        return [Place(name, ALIGN + start, length) for start, length in spans]

    def get(self, place: Place) -> memoryview:
        """Return a copy of the bytes."""
        check_place(place)
        return self._run(lambda connection: self._get(connection, place))

    def _get(self, connection: psycopg.Connection[Any], place: Place) -> memoryview:
        first, last = place.offset // ROW_BYTES, (place.stop - 1) // ROW_BYTES

        def row(number: int) -> Any:
            """Return the row's first bytes, its length, and the part of the place in it."""
            start, stop = (min(max(byte - number * ROW_BYTES, 0), ROW_BYTES) for byte in (place.offset, place.stop))
            values = (start + 1, stop - start, _row_name(place.segment, number))
            fetched = connection.execute(self._sql(_GET), values, binary=True).fetchone()
            if fetched is None and number == 0:
                raise MissingSegmentError(place.segment)
            if fetched is None or fetched[1] < stop:
                raise too_short_error(place, self._sizes(connection).get(place.segment, 0))
            return fetched

        # Several rows are read in one snapshot: a remover takes all of them or none.
        with connection.transaction() if last else nullcontext():
            if last:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # Check both ends before allocating memory: the length in the ledger is not trusted.
            ends = {0: row(0)}
            check_header(bytes(ends[0][0]), place.segment)
            ends[last] = ends[0] if last == 0 else row(last)
            memory: Any = allocate((place.length,), np.uint8)
            filled = 0
            for number in range(first, last + 1):
                data = np.frombuffer(ends[number][2] if number in ends else row(number)[2], dtype=np.uint8)
                memory[filled : filled + len(data)] = data
                filled += len(data)
        return memoryview(memory)

    def get_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Return the bytes at each place, in one statement; each has at most two rows."""
        segments = list(dict.fromkeys(check_place(place).segment for place in places))
        if not places or max(place.length for place in places) > ROW_BYTES:
            return [self.get(place) for place in places]
        # In one snapshot with the header of each segment, without which the segment does not exist.
        ranges = [(segment, 1, ALIGN) for segment in segments]
        counts = []
        for place in places:
            rows = range(place.offset // ROW_BYTES, max(place.stop - 1, place.offset) // ROW_BYTES + 1)
            counts.append(len(rows))
            for number in rows:
                start, stop = (min(max(byte - number * ROW_BYTES, 0), ROW_BYTES) for byte in (place.offset, place.stop))
                ranges.append((_row_name(place.segment, number), start + 1, stop - start))
        columns = [list(column) for column in zip(*ranges, strict=True)]

        def select(connection: psycopg.Connection[Any]) -> list[Buffer]:
            rows = connection.execute(self._sql(_GET_MANY), columns, binary=True).fetchall()
            data = [None if row[0] is None else bytes(row[0]) for row in rows]
            for segment, head in zip(segments, data, strict=False):
                if head is None:
                    raise MissingSegmentError(segment)
                check_header(head, segment)
            pieces: list[Buffer] = []
            at = len(segments)
            for place, count in zip(places, counts, strict=True):
                piece = b"".join(row_bytes or b"" for row_bytes in data[at : at + count])
                if len(piece) != place.length:
                    raise too_short_error(place, self._sizes(connection).get(place.segment, 0))
                pieces.append(piece)
                at += count
            return pieces

        return self._run(select)

    def _sizes(self, connection: psycopg.Connection[Any]) -> dict[str, int]:
        return dict(sorted(connection.execute(self._sql(_SIZES)).fetchall()))

    def has(self, segment: str) -> bool:
        """Return whether the segment exists."""
        check_name(segment)
        return self._run(lambda connection: connection.execute(self._sql(_HAS), (segment,)).fetchone() is not None)

    def segments(self) -> dict[str, int]:
        """Return every segment with its size in bytes, oldest first."""
        return {name: size for name, size in self._run(self._sizes).items() if is_name(name)}

    def busy(self, segment: str) -> bool:
        """Return false: an existing segment is complete."""
        check_name(segment)
        return False

    def seal(self) -> None:
        """Do nothing: every `put` creates a complete segment."""

    def remove(self, segment: str) -> None:
        """Remove a segment. A missing segment is not an error."""
        check_name(segment)

        def delete(connection: psycopg.Connection[Any]) -> None:
            with connection.transaction():
                number, size = 0, ROW_BYTES
                while size == ROW_BYTES:  # only the last row is shorter
                    row = connection.execute(self._sql(_REMOVE), (_row_name(segment, number),)).fetchone()
                    number, size = number + 1, 0 if row is None else row[0]

        self._run(delete)

    def close(self) -> None:
        """Make later calls raise; the ledger closes the connections."""
        self._closed = True

    def _sql(self, statement: str) -> Any:
        from psycopg import sql

        return sql.SQL(statement).format(sql.Identifier(self.schema, "blobs"))

    def _run(self, act: Callable[[psycopg.Connection[Any]], Answer]) -> Answer:
        """Run `act` with a connection, and again with another one if that broke.

        Every act can be repeated: a name is used by one `put` only, and existing rows are left as they are.
        """
        import psycopg

        if self._closed:
            raise ValueError("the segment store is closed")
        attempt = 0
        while True:
            with self.ledger.connection() as connection:
                try:
                    return act(connection)
                except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                    attempt += 1
                    if not connection.closed or attempt > CONNECTIONS:
                        raise self._translate_error(error) from error
                except psycopg.Error as error:
                    raise self._translate_error(error) from error

    def _translate_error(self, error: psycopg.Error) -> Exception:
        import psycopg

        message = str(error).strip()
        if isinstance(error, (psycopg.errors.DiskFull, psycopg.errors.OutOfMemory)):
            code = errno.ENOSPC if isinstance(error, psycopg.errors.DiskFull) else errno.ENOMEM
            return OSError(code, f"PostgreSQL, schema {self.schema!r}: {message}")
        if isinstance(error, (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)):
            return NotABookError(f"schema {self.schema!r}: there is no book here: {message}")
        return BookError(f"PostgreSQL, schema {self.schema!r}: {message}")


def _row_name(segment: str, number: int) -> str:
    return f"{segment}/{number}" if number else segment


def _split_rows(pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Split the concatenated pieces into rows of `ROW_BYTES`, the last one shorter."""
    row: list[memoryview] = []
    free_bytes = ROW_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            row.append(view[:free_bytes])
            view = view[len(row[-1]) :]
            free_bytes -= len(row[-1])
            if not free_bytes:
                yield b"".join(row)
                row, free_bytes = [], ROW_BYTES
    if row:
        yield b"".join(row)
