"""Opening: from an address to a ledger and a shelf.

Invariant: what an opener did not name is never followed: a book cannot send its reader to another place. A folder on a
network file system, a newer layout and a place that is no book are refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollbook.book import schema
from rollbook.book.admission import check_tokenizer
from rollbook.book.book import Book
from rollbook.book.disk import Disk
from rollbook.book.errors import BookError, CorruptBookError, NotABookError
from rollbook.book.ledger import Ledger, SQLiteLedger, check_files
from rollbook.book.shelves import FolderShelf, MemoryShelf, Shelf
from rollbook.core.addresses import POSTGRES, PostgresAddress, is_conninfo, redacted, url_secrets
from rollbook.core.checks import check_choice, check_int

LEDGER = "ledger.sqlite"
MODES = ("a", "r+", "r")


def open(
    url: str | os.PathLike[str],
    mode: str = "a",
    *,
    tokenizer: Any = None,
    quota: int | None = None,
    data: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    segment_bytes: int = 256 << 20,
    clock: Callable[[], float] | None = None,
    disk: Disk | None = None,
    **settings: Any,
) -> Book:
    """Open a book, or make it.

    `url` is a folder (`runs/first`; the folder of a run stands for its book), `memory:`, or
    `postgresql://user@host/database` (`?schema=NAME` for more than one book in a database); the password comes
    from `PGPASSWORD` or `~/.pgpass`, or stands in the URL, and is never shown.
    `mode`: "a" makes it if it is not there, "r+" wants it there, "r" only reads. `tokenizer` (or
    its fingerprint): a book takes records of one tokenizer, and keeps its vocabulary, so that its texts can be shown
    without it. `quota`: the most bytes its data may take. `data`: for
    PostgreSQL, a folder or an object store (any fsspec address) for the data instead of the database. `settings`: those
    of the consumer group "train" (see `Book.consumer`). `clock` replaces the database's clock in simulations, `disk`
    the file operations in trials.

    >>> import rollbook
    >>> with rollbook.open("memory:") as book:
    ...     book.append([rollbook.Experience(tokens=[1, 2, 3])]).admitted
    1
    """
    check_choice("mode", mode, MODES)
    if quota is not None:
        check_int("quota", quota, 1)
    check_int("segment_bytes", segment_bytes, 1)
    address = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    read_only = mode == "r"
    if not isinstance(address, str) or not address:
        raise ValueError(f"url: got {url!r}, expected a folder, 'memory:' or 'postgresql://...'")
    ledger: Ledger
    shelf: Shelf
    if address.startswith(POSTGRES):
        ledger, shelf = _postgres(address, mode, data, storage_options or {}, clock)
    else:
        if data is not None:
            raise ValueError(
                f"data: got {redacted(data)!r}, expected None: only a book in PostgreSQL keeps its data elsewhere"
            )
        if address == "memory:":
            if mode != "a":
                raise NotABookError(f"memory: got mode {mode!r}, expected 'a': a book in memory is always new")
            ledger = SQLiteLedger(None, clock=clock or time.time)
            shelf = MemoryShelf(segment_bytes)
            schema.prepare(ledger, create=True, where="memory:", meta={})
        elif "://" in address or (":" in address.split("/")[0] and not Path(address).exists() and os.name != "nt"):
            raise ValueError(f"url: got {redacted(address)!r}, expected a folder, 'memory:' or 'postgresql://...'")
        elif is_conninfo(address) and not Path(address).exists():
            raise ValueError(f"url: got {redacted(address)!r}, expected it as postgresql://user@host/database")
        else:
            # Absolute: a program may change its folder while the book is open.
            folder = Path(os.path.abspath(os.path.expanduser(address)))
            if not (folder / LEDGER).exists() and (folder / "book" / LEDGER).exists():
                # A run's folder stands for its book, as on the command line: an empty book beside it would hide it.
                folder, address = folder / "book", os.path.join(address, "book")
            ledger, shelf = _folder(folder, mode, segment_bytes, clock, disk or Disk())
    book = Book(address, ledger, shelf, read_only=read_only, tokenizer=_fingerprint(tokenizer), quota=quota)
    book.opened_with = {
        "url": address if "://" in address else os.path.abspath(os.path.expanduser(address)),
        "tokenizer": book.tokenizer,
        "quota": quota,
        "data": data,
        "storage_options": storage_options,
        "segment_bytes": segment_bytes,
    }
    if not isinstance(tokenizer, str):
        book.untold = tokenizer
    try:
        if book.tokenizer is not None:
            with ledger.read() as tx:
                check_tokenizer(tx, book)
        book.start(settings)
    except BaseException:
        book.close()
        raise
    return book


def _fingerprint(tokenizer: Any) -> str | None:
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    from rollbook.core.fingerprints import tokenizer_fingerprint

    if not (hasattr(tokenizer, "backend_tokenizer") or hasattr(tokenizer, "get_vocab")):
        raise ValueError(
            f"tokenizer: got {type(tokenizer).__name__}, of which no fingerprint can be taken; pass a text"
        )
    return tokenizer_fingerprint(tokenizer)


def _folder(
    folder: Path, mode: str, segment_bytes: int, clock: Callable[[], float] | None, disk: Disk
) -> tuple[Ledger, Shelf]:
    path = folder / LEDGER
    check_files(path)
    if mode != "a" and not path.exists():
        raise NotABookError(f"{folder}: there is no book here (no {LEDGER})")
    if folder.exists() and not folder.is_dir():
        raise NotABookError(f"{folder}: got a file, expected a folder")
    if mode == "a":
        disk.make_folder(str(folder))
    remote = disk.network_file_system(str(folder))
    if remote is not None:
        raise BookError(
            f"{folder}: the folder is on {remote}, where locks and syncs cannot be trusted; expected a local disk "
            "(postgresql:// is for books that many machines share)"
        )
    shelf = FolderShelf(str(folder), disk, segment_bytes)
    # Looked for before the ledger is: another process may be making the book, and a segment comes after the tables.
    lost = bool(shelf.segments())
    new = not path.exists()
    if lost and new:
        raise _lost(folder)
    ledger = SQLiteLedger(path, read_only=mode == "r", clock=clock or time.time)
    try:
        if lost and schema.layout_of(ledger) is None:
            raise _lost(folder)
        schema.prepare(ledger, create=mode != "r", where=str(folder), meta={})
        _check_schema(ledger, folder)
        if new:
            disk.sync_folder(str(folder))
        return ledger, shelf
    except BaseException:
        ledger.close()
        raise


def _lost(folder: Path) -> CorruptBookError:
    """Why no ledger is begun beside segments: it would know nothing of them, and compaction would remove them."""
    return CorruptBookError(
        f"{folder}: it has segments, and its {LEDGER} is missing or empty; `rollbook check --repair` makes one"
    )


_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@lru_cache(maxsize=1)
def _expected() -> frozenset[tuple[Any, ...]]:
    ledger = SQLiteLedger(None)
    schema.prepare(ledger, create=True, where="memory:", meta={})
    with ledger.read() as tx:
        return frozenset(tx.all(_SCHEMA))


def _check_schema(ledger: Ledger, folder: Path) -> None:
    """Refuse tables that are not, word by word, those of this layout: constraints and indices of a stranger's could
    compute whatever it likes at every write. Tables that the book does not know are never touched."""
    with ledger.read() as tx:
        found = frozenset(tx.all(_SCHEMA))
    mine = {row for row in found if row[2] in schema.TABLES}
    unlike = sorted(mine ^ _expected(), key=str)
    if unlike:
        kind, name = unlike[0][:2]
        raise CorruptBookError(
            f"{folder}: the ledger's {kind} {str(name)[:80]!r} is missing or is not what this version makes; "
            "`rollbook check --repair` builds it anew"
        )


def _postgres(
    url: str, mode: str, data: str | None, options: Mapping[str, Any], clock: Callable[[], float] | None
) -> tuple[Ledger, Shelf]:
    from rollbook.book.postgres import PostgresLedger
    from rollbook.book.postgres_shelf import PostgresShelf

    address = PostgresAddress.parse(url)
    if data is not None and url_secrets(data):
        # The book keeps where its data lies, for whoever opens it.
        raise ValueError(f"data: got {redacted(data)!r} with a secret in it, expected that in storage_options")
    ledger = PostgresLedger(address.plain, address.schema, read_only=mode == "r", clock=clock)
    try:
        if mode == "a":
            ledger.make_schema()
        where = redacted(url)
        if mode == "r+" and schema.layout_of(ledger) is None:
            raise NotABookError(f"{where}: there is no book here")
        schema.prepare(ledger, create=mode != "r", where=where, meta={"data": data or ""})
        with ledger.read() as tx:
            kept = tx.one("SELECT value FROM meta WHERE key = 'data'")[0]
        if kept != (data or ""):
            raise BookError(
                f"{where}: its data lies in {redacted(kept) or 'the database'}; got data={data!r}, expected "
                f"data={redacted(kept) or None!r}"
            )
        if data is None:
            return ledger, PostgresShelf(ledger)
        from rollbook.book.objects import ObjectShelf

        return ledger, ObjectShelf(data, options)
    except BaseException:
        ledger.close()
        raise
