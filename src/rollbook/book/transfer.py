"""Copies of a book: snapshots, forks, exports and imports.

Invariant: a snapshot or fork holds one state of the book, or it does not exist: it is written under another name and
renamed when it is complete. Bytes that the ledger no longer refers to (deleted, redacted, rewound) are not copied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rollbook.book import queue
from rollbook.book.append import AppendResult
from rollbook.book.checkpoint import find_checkpoint, free_leased, undo_work, void_leases
from rollbook.book.consumer import all_consumers, delete_removed_consumers, save_consumer
from rollbook.book.disk import Disk, hit_failpoint
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError
from rollbook.book.ledger import ROLLOUT_TABLES, TABLES, Ledger, SQLiteLedger, Transaction, check_writable, chunks
from rollbook.book.read import check_slots
from rollbook.book.segments.files import Place
from rollbook.core.addresses import POSTGRES, PostgresAddress, redacted
from rollbook.core.checks import check_bool, suggest
from rollbook.core.errors import WireError
from rollbook.core.metrics import warn_user
from rollbook.core.wire import decode, encode

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.book.checkpoint import Point
    from rollbook.core.vocabulary import Tokenizer

    StorageOption = str | int | Mapping[str, Any] | Callable[[], float] | Disk | Tokenizer | None

COPY_OPTIONS = ("tokenizer", "quota", "data", "storage_options", "segment_bytes", "clock", "disk")
"""Options of `rollbook.open` for the storage of a copy. Settings of consumers are copied."""
_BOOK_META = ("layout", "book", "made", "data", "from", "weights")
"""Keys of `meta` that belong to one book and are not copied."""
_PAGE_ROWS = 2000
"""Rows that are copied at once."""
PUT_BYTES = 16 << 20
"""Bytes that are put at once."""
_KEPT_KINDS = "('revised', 'redacted', 'deleted')"
"""Events after a checkpoint that a fork keeps."""
_TABLES_BY_SEQ = ("records", "queue", "groups", "revisions", "media_uses")
_TABLES_NOT_COPIED = ("meta", "blobs", "purges", "orphans", *ROLLOUT_TABLES)
_MAX_ATTEMPTS = 10


class _SourceChangedError(Exception):
    """A record changed, and its old bytes were removed, while they were copied."""


def snapshot(book: Book, url: str | os.PathLike[str], **options: StorageOption) -> Book:
    """Copy the book, in its current state, to an empty address of any kind, while others go on writing.

    Active leases are void in the copy.

    Args:
        book: The book.
        url: Where to write the copy.
        options: Options of `rollbook.open` for the storage of the copy.

    Returns:
        The copy, open.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
    >>> copy = snapshot(book, "memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[4, 5, 6])])
    >>> len(book), len(copy)
    (2, 1)
    """
    return _copy_book(book, url, None, options)


def fork(book: Book, name: str, url: str | os.PathLike[str], **options: StorageOption) -> Book:
    """Start another run from a checkpoint: copy the book as it was then to `url`.

    The copy contains nothing from after the checkpoint, except revisions and deletions of older records.

    Args:
        book: The book, which does not change.
        name: The checkpoint.
        url: Where to write the copy.
        options: Options of `rollbook.open` for the storage of the copy.

    Returns:
        The copy, open.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3])])
    >>> saved = book.checkpoint()
    >>> _ = book.append([rollbook.Experience(tokens=[4, 5, 6])])
    >>> len(fork(book, saved, "memory:"))
    1
    """
    return _copy_book(book, url, name, options)


def export_records(
    book: Book,
    path: str | os.PathLike[str],
    *conditions: tuple[str, str, Any],
    format: str | None = None,
    evaluation: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Write the records that meet all conditions as Parquet, a HF dataset, JSONL, frames or TRXP.

    Args:
        book: The book.
        path: File or folder to write.
        conditions: As for `Book.where`; without any, all records are written.
        format: A key of `rollbook.io.formats.FORMATS`; by default it follows from the path.
        evaluation: Write the records for evaluation instead of those for training. Files do not contain this flag.
        overwrite: Replace what is at `path`.
        options: Options of the format.

    Returns:
        How many records were written.

    >>> import rollbook, tempfile
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=reward) for reward in (0.0, 1.0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_records(book, f"{folder}/good.parquet", ("reward", ">", 0.5))
    ...     import_records(rollbook.open("memory:"), f"{folder}/good.parquet")
    1
    AppendResult(admitted=1, existing=0, revised=0, stale=0)
    """
    from rollbook.io import formats

    records = book.where(*conditions, evaluation=int(check_bool("evaluation", evaluation)))
    return formats.write(records.batches(), path, format, overwrite=overwrite, **options)


def import_records(
    book: Book,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    evaluation: bool = False,
    author: str = "",
    on_error: str = "raise",
    **options: Any,
) -> AppendResult:
    """Append the records of a file, folder or database. Idempotent: records already in the book are skipped.

    Args:
        book: The book.
        path: What to read.
        format: A key of `rollbook.io.formats.FORMATS`; by default it follows from the path.
        evaluation: As for `Book.append`.
        author: As for `Book.append`.
        on_error: `"skip"` leaves out rows that cannot be read, and warns.
        options: Options of the format.

    Returns:
        How many records are new, known, revised, and stale for some consumer.

    >>> import rollbook, tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".frames") as file:
    ...     _ = file.write(rollbook.Experience(tokens=[1, 2, 3]).serialize())
    ...     file.flush()
    ...     import_records(rollbook.open("memory:"), file.name).admitted
    1
    """
    from rollbook.io import formats

    check_writable(book, "import_records")
    total = AppendResult()
    with formats.read(path, format, on_error=on_error, **options) as reader:
        for batch in reader:
            total += book.append(batch, evaluation=evaluation, author=author)
    if reader.report.count:
        warn_user(
            f"import_records: {reader.report.count} rows of {os.fspath(path)} could not be read; the first: "
            f"{reader.report.skipped[0].reason}"
        )
    return total


def _copy_book(book: Book, url: str | os.PathLike[str], name: str | None, options: Mapping[str, Any]) -> Book:
    address = os.fspath(url)
    if not isinstance(address, str) or not address or ("://" in address and not address.startswith(POSTGRES)):
        raise ValueError(f"url: got {redacted(url)!r}, expected a folder, 'memory:' or 'postgresql://...'")
    for option in options:
        if option not in COPY_OPTIONS:
            raise ValueError(f"snapshot: unknown option {option!r}{suggest(option, list(COPY_OPTIONS))}")
    if name is not None:
        with book.ledger.read() as tx:
            find_checkpoint(tx, name)
    for _ in range(_MAX_ATTEMPTS):
        with suppress(_SourceChangedError):
            if address.startswith(POSTGRES):
                return _copy_to_postgres(book, address, name, options)
            if address == "memory:":
                return _copy_to_memory(book, name, options)
            return _copy_to_folder(book, address, name, options)
    raise BookError(f"{book.url}: compaction removed records during each of {_MAX_ATTEMPTS} attempts to copy them")


# --- destinations ---------------------------------------------------------------------------------------------------


def _copy_to_memory(book: Book, name: str | None, options: Mapping[str, Any]) -> Book:
    from rollbook.book.book import open

    copy = open("memory:", **options)
    try:
        _fill_copy(book, copy, name)
    except BaseException:
        copy.close()
        raise
    return copy


def _copy_to_folder(book: Book, address: str, name: str | None, options: Mapping[str, Any]) -> Book:
    from rollbook.book.book import open

    disk: Disk = options.get("disk") or Disk()
    target = os.path.abspath(os.path.expanduser(address))
    if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target) or os.listdir(target)):
        raise BookError(f"{address}: not empty; expected a new or empty folder")
    above, last = os.path.split(target)
    aside = os.path.join(above, f".{last}.{os.urandom(8).hex()}.copying")
    try:
        with open(aside, **options) as copy:
            _fill_copy(book, copy, name)
        hit_failpoint("before rename")
        disk.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    disk.sync_folder(above)
    hit_failpoint("after rename")
    return open(address, "r+", **options)


def _copy_to_postgres(book: Book, address: str, name: str | None, options: Mapping[str, Any]) -> Book:
    from psycopg import sql

    from rollbook.book.book import open
    from rollbook.book.postgres import connect

    target = PostgresAddress.parse(address)
    schema = target.schema
    aside = f"copying_{os.urandom(8).hex()}"
    with connect(target.plain, schema) as connection:
        if connection.execute("SELECT 1 FROM pg_tables WHERE schemaname = %s LIMIT 1", (schema,)).fetchone():
            raise BookError(f"schema {schema!r}: not empty; expected a new or empty schema")
        try:
            with open(target.with_schema(aside), **options) as copy:
                if copy.store.segments():
                    raise BookError(
                        f"data: {redacted(str(options.get('data')))!r} holds segments already, expected an empty place"
                    )
                _fill_copy(book, copy, name)
            hit_failpoint("before rename")
            with connection.transaction():
                # Only an empty schema is dropped: one that others filled meanwhile is an error.
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {}").format(sql.Identifier(schema)))
                rename = sql.SQL("ALTER SCHEMA {} RENAME TO {}")
                connection.execute(rename.format(sql.Identifier(aside), sql.Identifier(schema)))
        except BaseException:
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(aside)))
            raise
    hit_failpoint("after rename")
    return open(address, "r+", **options)


# --- the ledger -----------------------------------------------------------------------------------------------------


def _fill_copy(book: Book, copy: Book, name: str | None) -> None:
    with _open_separately(book) as source:
        with source.read() as tx, copy.ledger.write() as out:
            point = None if name is None else find_checkpoint(tx, name)
            for table in TABLES:
                if table != "meta":
                    out.run(f"DELETE FROM {table}")
                if table not in _TABLES_NOT_COPIED:
                    _copy_table(tx, out, table, point)
            out.run("DELETE FROM media WHERE hash NOT IN (SELECT hash FROM media_uses)")
            _copy_meta(tx, out, point)
            if copy.ledger.dialect == "postgresql":
                # The copied numbers did not come from the sequences, which have to continue after them.
                number = "(SELECT COALESCE(MAX(id), 0) + 1 FROM events)"
                out.first(f"SELECT setval(pg_get_serial_sequence('events', 'id'), {number}, false)")
                for table, key in (("records", "seq"), ("leases", "id")):
                    out.first(
                        f"SELECT setval('{table}_numbers', (SELECT COALESCE(MAX({key}), 0) + 1 FROM {table}), false)"
                    )
        delete_removed_consumers(copy.ledger)
        hit_failpoint("during snapshot")
        _copy_records(book, source, copy)
        _copy_media(book, source, copy)
    with copy.ledger.write() as out:
        if point is None:
            void_leases(out, "copied")
            for consumer in all_consumers(out):
                gids = free_leased(out, consumer)
                if consumer.grouped:
                    queue.refresh_groups(out, consumer, gids)
                save_consumer(out, consumer)
        else:
            queue.recount_all(out)
            _void_leases_at(out, point)
            last = out.first("SELECT MAX(id) FROM events")[0]
            lineage = queue.read_lineage(out)
            undo_work(out, copy, point, "drop")
            # The copy has no events from after the checkpoint.
            queue.save_lineage(out, lineage.clipped(point.seq))
            out.run("DELETE FROM events WHERE id > ? AND kind IN ('voided', 'rewound', 'forgotten')", (last,))
        detail = json.loads(out.first("SELECT value FROM meta WHERE key = 'from'")[0])
        queue.record_events(out, [queue.Event("copied", reason=name, detail=detail)])
        hit_failpoint("end of snapshot")


@contextmanager
def _open_separately(book: Book) -> Iterator[Ledger]:
    """Open the ledger with another connection, so that a long read does not block users of the book."""
    ledger: Any = book.ledger
    separate: Ledger
    if ledger.dialect == "postgresql":
        from rollbook.book.postgres import PostgresLedger

        separate = PostgresLedger(ledger.url, ledger.schema, read_only=True, clock=ledger.clock)
    elif ledger.path is not None:
        separate = SQLiteLedger(ledger.path, read_only=True, clock=ledger.clock)
    else:
        # A database in memory has a single connection.
        yield ledger
        return
    try:
        yield separate
    finally:
        separate.close()


def _list_columns(table: str) -> tuple[list[str], list[str]]:
    """Return a table's columns, and those of its key."""
    names, key = [], []
    for column in TABLES[table]:
        if column.startswith("PRIMARY KEY"):
            key = column[column.index("(") + 1 : -1].split(", ")
        else:
            names.append(column.split()[0])
            if "PRIMARY KEY" in column or "{EVENT_ID}" in column:
                key = names[-1:]
    return names, key


def _copy_table(tx: Transaction, out: Transaction, table: str, point: Point | None) -> None:
    names, key = _list_columns(table)
    listed, marks, keys = ", ".join(names), ", ".join("?" * len(names)), ", ".join(key)
    condition = "1 = 1"
    if point is not None and table == "events":
        condition = f"(seq IS NULL OR seq <= {point.seq}) AND (id <= {point.event} OR kind IN {_KEPT_KINDS})"
    elif point is not None and table == "inbox":
        condition = "1 = 0"  # a checkpoint is made when all inboxes are empty
    elif point is not None and table in _TABLES_BY_SEQ:
        condition = f"seq <= {point.seq}"
    at = [names.index(column) for column in key]
    last: tuple[Any, ...] | None = None
    while True:
        after = "" if last is None else f" AND ({keys}) > ({', '.join('?' * len(key))})"
        rows = tx.all(
            f"SELECT {listed} FROM {table} WHERE {condition}{after} ORDER BY {keys} LIMIT {_PAGE_ROWS}", last or ()
        )
        if not rows:
            return
        out.run_many(f"INSERT INTO {table} ({listed}) VALUES ({marks})", rows)
        last = tuple(rows[-1][i] for i in at)


def _copy_meta(tx: Transaction, out: Transaction, point: Point | None) -> None:
    """Copy the rows of `meta` that are not specific to a book, and note the source."""
    values = dict(tx.all("SELECT key, value FROM meta"))
    meta = {
        "book": values["book"],
        "event": tx.first("SELECT COALESCE(MAX(id), 0) FROM events")[0] if point is None else point.event,
        "checkpoint": None if point is None else point.name,
        "from": json.loads(values["from"]) if "from" in values else None,
    }
    new = {key: value for key, value in values.items() if key not in _BOOK_META} | {"from": json.dumps(meta)}
    for key, value in new.items():
        out.run("DELETE FROM meta WHERE key = ?", (key,))
        out.run("INSERT INTO meta (key, value) VALUES (?, ?)", (key, value))


def _void_leases_at(out: Transaction, point: Point) -> None:
    """Void the leases at the checkpoint, whose holders only have the other book."""
    out.run(
        "INSERT INTO events (time, seq, consumer, kind, reason, lease, detail) "
        f"SELECT {out.now!r}, held.seq, held.consumer, 'voided', ?, held.lease, '{{\"what\": \"leased\"}}' "
        "FROM events AS held "
        "WHERE held.kind = 'leased' AND held.id <= ? AND NOT EXISTS (SELECT 1 FROM events AS ended "
        "WHERE ended.seq = held.seq AND ended.consumer = held.consumer AND ended.id > held.id) ORDER BY held.id",
        (point.name, point.event),
    )


# --- the bytes ------------------------------------------------------------------------------------------------------


def _copy_records(book: Book, source: Ledger, copy: Book) -> None:
    """Copy every frame that the copied ledger refers to, without records that it does not refer to."""
    with copy.ledger.read() as out:
        sizes = out.all("SELECT segment, COUNT(*) FROM records WHERE segment IS NOT NULL GROUP BY segment ORDER BY 1")
    waiting = deque(sizes)
    while waiting:
        # Segments of a folder hold many records each, those of a database few.
        names: list[str] = []
        rows = 0
        while waiting and len(names) < _PAGE_ROWS and rows < _PAGE_ROWS:
            name, count = waiting.popleft()
            names.append(name)
            rows += count
        frames = _list_frames(copy, names)
        batch: list[tuple[list[tuple[int, int]], Any]] = []
        size = 0
        for place, members in frames.items():
            try:
                frame = _read_part(book, place, [slot for _, slot in members])
            except MissingSegmentError:
                waiting += _follow_move(source, copy, place, [seq for seq, _ in members])
                continue
            batch.append(([(seq, i) for i, (seq, _) in enumerate(members)], frame))
            size += memoryview(frame).nbytes
            if size >= PUT_BYTES:
                _put_frames(copy, batch)
                batch, size = [], 0
        _put_frames(copy, batch)


def _list_frames(copy: Book, names: Sequence[str]) -> dict[Place, list[tuple[int, int]]]:
    """Return the frames of some segments: their places, and the records (number, slot) to copy."""
    frames: dict[Place, list[tuple[int, int]]] = {}
    with copy.ledger.read() as out:
        for marks, chunk in chunks(names):
            for seq, segment, start, size, slot in out.all(
                f"SELECT seq, segment, start, size, slot FROM records WHERE segment IN ({marks}) "
                "ORDER BY segment, start, slot",
                chunk,
            ):
                frames.setdefault(Place(segment, start, size), []).append((seq, slot))
    return frames


def _read_part(book: Book, place: Place, slots: list[int]) -> Any:
    """Return a frame with only these records."""
    view = book.store.get(place)
    try:
        records = decode(view)
    except WireError as error:
        raise CorruptBookError(f"segment {place.segment}, byte {place.offset}: {error}") from None
    check_slots(place, slots, len(records))
    return view if slots == list(range(len(records))) else encode(records.take(slots))


def _follow_move(source: Ledger, copy: Book, place: Place, seqs: Sequence[int]) -> list[tuple[str, int]]:
    """Return where compaction moved a frame's records, and the segments to read for them."""
    now, then = _list_places(source, seqs), _list_places(copy.ledger, seqs)
    if any(now[seq][0] is None or now[seq][4] != then[seq][4] for seq in seqs):
        raise _SourceChangedError
    if any(Place(*now[seq][:3]) == place for seq in seqs):
        raise CorruptBookError(f"segment {place.segment} is missing, but the ledger refers to it; see `rollbook check`")
    with copy.ledger.write() as out:
        out.run_many(
            "UPDATE records SET segment = ?, start = ?, size = ?, slot = ? WHERE seq = ?",
            [(*now[seq][:4], seq) for seq in seqs],
        )
    return [(name, len(seqs)) for name in sorted({now[seq][0] for seq in seqs})]


def _list_places(ledger: Ledger, seqs: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """Return (segment, start, size, slot, revision) of records by number."""
    places: dict[int, tuple[Any, ...]] = {}
    with ledger.read() as tx:
        for marks, chunk in chunks(seqs):
            sql = f"SELECT seq, segment, start, size, slot, revision FROM records WHERE seq IN ({marks})"
            places.update((row[0], tuple(row[1:])) for row in tx.all(sql, chunk))
    return places


def _put_frames(copy: Book, batch: Sequence[tuple[list[tuple[int, int]], Any]]) -> None:
    if not batch:
        return
    places = copy.store.put([frame for _, frame in batch])
    with copy.ledger.write() as out:
        _check_stored(copy, places)
        out.run_many(
            "UPDATE records SET segment = ?, start = ?, size = ?, slot = ?, bytes = ? WHERE seq = ?",
            [
                (place.segment, place.offset, place.length, slot, -(-place.length // len(members)), seq)
                for (members, _), place in zip(batch, places, strict=True)
                for seq, slot in members
            ],
        )


def _check_stored(copy: Book, places: Sequence[Place]) -> None:
    """Check that segments exist, within the transaction that refers to them: only then are they not removed."""
    if not all(copy.store.has(name) for name in {place.segment for place in places}):
        raise BookError(f"{copy.url}: the server lost what was put before it was committed")


def _copy_media(book: Book, source: Ledger, copy: Book) -> None:
    last = ""
    while True:
        with copy.ledger.read() as out:
            rows = out.all(
                f"SELECT hash, segment, start, size FROM media WHERE hash > ? ORDER BY hash LIMIT {_PAGE_ROWS}", (last,)
            )
        if not rows:
            return
        batch: list[tuple[str, Any]] = []
        size = 0
        for key, *place in rows:
            batch.append((key, _read_medium(book, source, key, Place(*place))))
            size += memoryview(batch[-1][1]).nbytes
            if size >= PUT_BYTES:
                _put_media(copy, batch)
                batch, size = [], 0
        _put_media(copy, batch)
        last = rows[-1][0]


def _read_medium(book: Book, source: Ledger, key: str, place: Place) -> memoryview:
    try:
        return book.store.get(place)
    except MissingSegmentError:
        with source.read() as tx:
            row = tx.first("SELECT segment, start, size FROM media WHERE hash = ?", (key,))
        if row is None:
            raise _SourceChangedError from None
        if Place(*row) == place:
            raise CorruptBookError(
                f"segment {place.segment} is missing, but a medium refers to it; see `rollbook check`"
            ) from None
        return _read_medium(book, source, key, Place(*row))


def _put_media(copy: Book, batch: Sequence[tuple[str, Any]]) -> None:
    if not batch:
        return
    places = copy.store.put([data for _, data in batch])
    with copy.ledger.write() as out:
        _check_stored(copy, places)
        out.run_many(
            "UPDATE media SET segment = ?, start = ?, size = ? WHERE hash = ?",
            [(p.segment, p.offset, p.length, key) for (key, _), p in zip(batch, places, strict=True)],
        )
