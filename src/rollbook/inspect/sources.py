"""What the viewer opens: `open_source(path)` gives a `Source`, of a book or of files; `Watcher` follows it.

Invariant: opening and looking change nothing; a path that is none of what can be opened is refused with what was found
there and what would be.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollbook.book.book import LEDGER, Book
from rollbook.book.book import open as open_book
from rollbook.book.errors import BookError
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.read import seqs_of, uids_of
from rollbook.core import columns as physical
from rollbook.core.addresses import POSTGRES, redacted
from rollbook.core.fields import FIELDS
from rollbook.core.files import check_regular
from rollbook.core.ids import step_of
from rollbook.core.metrics import Progress
from rollbook.core.ragged import Ragged
from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect.follower import Follower, columns_of
from rollbook.inspect.records import Reader

if TYPE_CHECKING:
    from rollbook.inspect.index import Index
    from rollbook.inspect.trajectory import Trajectory

BOOK, CONFIG = "book", "config.yaml"
"""What a run's folder has, as `rollbook.train.run` makes it."""
_DEPTH = 3
_LISTED = 20
_TEXTS = ("prompt_text", "response_text", "tokens", "prompt_length")


class Source(Protocol):
    """A run that pages can show: its samples go to an index, and each can be had as a document."""

    name: str
    kind: str
    """`book`, or the name of a format."""

    @property
    def changed(self) -> float | None:
        """When something was written to it last, in seconds since 1970; `None` if nobody knows."""

    @property
    def problems(self) -> list[str]:
        """What could not be read, as far as it was tried; a sentence each."""

    def refresh(self, index: Index) -> set[int] | None:
        """Bring the index up to date, or nearer to it; the steps that changed, `None` if there was nothing to do."""

    def documents(self, uids: Sequence[str]) -> list[Trajectory]:
        """These samples, in this order; `KeyError` names one that is not there."""

    def record(self, uid: str) -> dict[str, Any]:
        """The whole record as strict JSON can say it."""

    def media(self, sha256: str) -> tuple[bytes, str] | None:
        """The bytes and type of a picture that a document named."""

    def history(self, uid: str) -> list[dict[str, Any]] | None:
        """What the ledger says of a record, in order; `None` where there is no ledger."""

    def sql(self, query: str, *, seconds: float, rows: int) -> dict[str, Any]:
        """The answer to one statement that reads: {columns, rows, truncated}; `ValueError` where there is none."""

    def close(self) -> None:
        """Let go of files."""


class BookSource:
    """A book as a source; see `Source`.

    >>> import rollbook
    >>> from rollbook.inspect.index import Index
    >>> book = rollbook.open("memory:")
    >>> _ = book.append(rollbook.Experience(eid={"batch": 3, "task": 1, "suffix": "a"}, tokens=[1, 2, 3], reward=1.0))
    >>> source, index = BookSource(book), Index()
    >>> load(source, index)
    >>> index.query("SELECT uid, step, reward FROM samples")
    [('3/1/0/0/a', 3, 1.0)]
    >>> [entry["kind"] for entry in source.history("3/1/0/0/a")]
    ['admitted']
    >>> source.sql("select count(*) as n from experiences", seconds=10, rows=10)
    {'columns': ['n'], 'rows': [[1]], 'truncated': False}
    >>> source.close(), index.close()
    (None, None)
    """

    kind = "book"
    seqs: list[int] | None = None
    """The records that an index gets, by number; `None`: all, and whatever comes later."""
    _follower: Follower | None = None

    def __init__(self, book: Book, *, vocabulary: Vocabulary | None = None, name: str | None = None) -> None:
        self.book = book
        self.name = name or named(book.url)
        self.reader = Reader(book, vocabulary)

    @property
    def changed(self) -> float | None:
        """See `Source`."""
        try:
            with self.book.ledger.read() as tx:
                row = tx.one("SELECT time FROM events ORDER BY id DESC LIMIT 1")
        except BookError:  # The watcher says why it cannot be read.
            return None
        return None if row is None else float(row[0])

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """The numbers that were logged for each step, as `Book.metrics`."""
        return self.book.metrics()

    def seqs_of(self, ids: Sequence[str]) -> list[int]:
        """The records of groups, or of the groups of records, by the whole id or its beginning.

        Of a beginning that many ids have in common, the first few.
        """
        gids: dict[str, None] = {}
        with self.book.ledger.read() as tx:
            for name in ids:
                if tx.all("SELECT 1 FROM records WHERE gid = ? LIMIT 1", (name,)):
                    gids[name] = None
                    continue
                for start in (f"{name}/", name):
                    rows = tx.all(
                        "SELECT gid FROM records WHERE uid >= ? AND uid < ? ORDER BY uid LIMIT 9",
                        (start, f"{start}\U0010ffff"),
                    )
                    gids |= dict.fromkeys(gid for (gid,) in rows)
                    if rows:
                        break
            return _seqs(tx, "gid", list(gids))

    def steps(self) -> list[int]:
        """The training steps that there are records for training of."""
        with self.book.ledger.read() as tx:
            rows = tx.all(
                "SELECT DISTINCT batch, version_min FROM records "
                "WHERE evaluation = 0 AND (gone IS NULL OR gone NOT IN ('deleted', 'rewound'))"
            )
        return sorted({step_of(batch, version) for batch, version in rows})

    def seqs_in(self, spans: Sequence[tuple[int | None, int | None]]) -> list[int]:
        """The records of the training steps in some spans, from the first to the last; `None`: without an end."""
        with self.book.ledger.read() as tx:
            batches = [batch for (batch,) in tx.all("SELECT DISTINCT batch FROM records")]
            numbered = [batch for batch in batches if step_of(batch, None) == step_of(batch, 1)]
            inside = [batch for batch in numbered if _within(step_of(batch, None), spans)]
            seqs = _seqs(tx, "batch", inside)
            for marks, part in chunks(sorted({*batches}.difference(numbered))):
                seqs += [
                    seq
                    for seq, version in tx.all(f"SELECT seq, version_min FROM records WHERE batch IN ({marks})", part)
                    if _within(step_of("", version), spans)
                ]
        return sorted(seqs)

    @property
    def problems(self) -> list[str]:
        """What could not be read, as far as it was tried."""
        return [] if self._follower is None else list(self._follower.problems)

    def refresh(self, index: Index) -> set[int] | None:
        """See `Source`; works for about half a second at a time."""
        if self._follower is None or self._follower.index is not index:
            self._follower = Follower(self.book, index, self.reader, self.seqs)
        return self._follower.refresh()

    def documents(self, uids: Sequence[str]) -> list[Trajectory]:
        """See `Source`."""
        return self.reader.documents(uids)

    def record(self, uid: str) -> dict[str, Any]:
        """See `Source`."""
        return self.reader.record(uid)

    def media(self, sha256: str) -> tuple[bytes, str] | None:
        """See `Source`."""
        return self.reader.media(sha256)

    def history(self, uid: str) -> list[dict[str, Any]]:
        """See `Source`."""
        return [
            {
                "time": entry.time,
                "kind": entry.kind,
                "reason": entry.reason,
                "consumer": entry.consumer,
                "step": entry.step,
                "lease": entry.lease,
                "detail": entry.detail,
            }
            for entry in self.book.history(uid)
        ]

    def sql(self, query: str, *, seconds: float, rows: int) -> dict[str, Any]:
        """See `Source`: DuckDB over the tables of `Book.sql`."""
        from rollbook.book.query import run_query
        from rollbook.book.sql import sql_tables

        try:
            table = run_query(query, sql_tables(self.book), seconds=seconds, max_rows=rows)
        except ImportError as error:
            raise ValueError(str(error)) from None
        return {"columns": table.columns, "rows": [list(row) for row in table], "truncated": table.more}

    def texts(self, uids: Sequence[str]) -> list[tuple[str, str]]:
        """The prompt and the response of some records, as texts: those that were recorded, else by the vocabulary; ""
        where there is neither, or the bytes are gone."""
        seqs = seqs_of(self.book, uids_of(uids))
        texts_by_number: dict[int, tuple[str, str]] = {}
        vocabulary = self.reader.vocabulary
        ordered = sorted(set(seqs))
        for at in range(0, len(ordered), 500):
            for batch in self.book.where(("seq", "in", ordered[at : at + 500])).scan(("seq", *_TEXTS)):
                columns = columns_of(batch)
                numbers = columns["seq"].to_pylist()
                nothing: list[Any] = [None] * len(numbers)
                prompts, responses = (physical.decode(FIELDS[name], columns) or nothing for name in _TEXTS[:2])
                lengths = physical.numbers(columns["prompt_length"])
                tokens = columns.get("tokens")
                for i, seq in enumerate(numbers):
                    texts = [prompts[i], responses[i]]
                    if None in texts and vocabulary is not None and isinstance(tokens, Ragged):
                        ids = tokens.values[int(tokens.offsets[i]) : int(tokens.offsets[i + 1])]
                        parts = (ids[: lengths[i]], ids[lengths[i] :])
                        for at_, (text, part) in enumerate(zip(texts, parts, strict=True)):
                            if text is None:
                                texts[at_] = vocabulary.text_and_ends(part)[0]
                    texts_by_number[seq] = (texts[0] or "", texts[1] or "")
        return [texts_by_number.get(seq, ("", "")) for seq in seqs]

    def close(self) -> None:
        """See `Source`."""
        self.book.close()


class StartingSource(BookSource):
    """A run's folder that has no book yet, because the run is starting or warming up; a `BookSource` once it has."""

    def __init__(self, folder: Path, *, vocabulary: Vocabulary | None = None) -> None:
        self.folder = folder
        self.name = os.path.basename(os.path.abspath(folder))
        self._vocabulary = vocabulary

    def __getattr__(self, name: str) -> Any:
        if name in ("book", "reader"):
            raise KeyError("the run has no book yet")
        raise AttributeError(name)

    @property
    def started(self) -> bool:
        """Whether the book is there."""
        return "book" in vars(self)

    @property
    def changed(self) -> float | None:
        """See `Source`."""
        return super().changed if self.started else os.stat(self.folder).st_mtime

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """See `BookSource`."""
        return super().metrics() if self.started else []

    def refresh(self, index: Index) -> set[int] | None:
        """See `Source`."""
        if not self.started:
            place = self.folder / BOOK
            if not (place / LEDGER).exists():
                return None
            super().__init__(open_book(place, "r"), vocabulary=self._vocabulary, name=self.name)
        return super().refresh(index)

    def close(self) -> None:
        """See `Source`."""
        if self.started:
            super().close()


def _seqs(tx: Transaction, column: str, values: Sequence[str]) -> list[int]:
    return sorted(
        seq
        for marks, part in chunks(values)
        for (seq,) in tx.all(f"SELECT seq FROM records WHERE {column} IN ({marks})", part)
    )


def _within(step: int, spans: Sequence[tuple[int | None, int | None]]) -> bool:
    return any((first is None or step >= first) and (last is None or step <= last) for first, last in spans)


def named(url: str) -> str:
    """What a run is called: the last part of its address."""
    if "://" in url:
        from urllib.parse import parse_qsl, urlsplit

        parts = urlsplit(url)
        schema = dict(parse_qsl(parts.query)).get("schema")
        return (
            "/".join(filter(None, (parts.path.strip("/"), schema))) or parts.scheme
        )  # never the address: it may have a password
    return os.path.basename(os.path.abspath(url)) if url != "memory:" else "memory"


def open_source(path: str | os.PathLike[str] | Book, *, tokenizer: Any = None, starting: bool = False) -> Source:
    """Open a run to look at it: a book (a folder, or `postgresql://...`), a folder that holds one, or files of
    rollouts that this or another tool wrote.

    `tokenizer`: a tokenizer, a `Vocabulary`, or the path of a tokenizer.json or its folder, for records whose text is
    not known; a book that was written with one has it already. `starting`: a run's folder without a book is opened too,
    to be followed until it has one.

    >>> open_source("no/such/run")
    Traceback (most recent call last):
        ...
    FileNotFoundError: path: there is nothing at 'no/such/run'
    """
    if isinstance(path, Book):
        return BookSource(path, vocabulary=vocabulary_of(tokenizer))
    address = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(address, str) or not address:
        raise ValueError(f"path: got {path!r}, expected a book, a folder or a file")
    if address.startswith(POSTGRES):
        return BookSource(open_book(address, "r"), vocabulary=vocabulary_of(tokenizer))
    place = Path(os.path.expanduser(address))
    if not os.path.lexists(place):
        raise FileNotFoundError(f"path: there is nothing at {redacted(address)!r}")
    check_regular(place)
    if place.name == LEDGER and place.is_file():
        place = place.parent
    if (place / LEDGER).exists():
        return BookSource(open_book(place, "r"), vocabulary=vocabulary_of(tokenizer))
    books = books_in(place) if place.is_dir() else []
    if len(books) == 1:
        # A run's book is called so; the run, by its folder.
        name = os.path.basename(os.path.abspath(place)) if books[0].name == BOOK else None
        return BookSource(open_book(books[0], "r"), vocabulary=vocabulary_of(tokenizer), name=name)
    if books:
        shown = ", ".join(str(book) for book in books[:_LISTED])
        more = f" and {len(books) - _LISTED} more" if len(books) > _LISTED else ""
        raise ValueError(f"path: {address!r} holds {len(books)} books; open one of them: {shown}{more}")
    from rollbook.inspect.files import UnknownFormatError, open_file_source

    try:
        return open_file_source(place, tokenizer=tokenizer)
    except UnknownFormatError as error:
        if (place / CONFIG).is_file():
            if starting:
                return StartingSource(place, vocabulary=vocabulary_of(tokenizer))
            raise UnknownFormatError(
                f"path: {address!r} is a run without a book yet: it is starting or warming up; "
                "`rollbook view` follows it"
            ) from None
        raise UnknownFormatError(
            f"path: {address!r} is no book (a folder with {LEDGER}), and no rollouts: {error}"
        ) from None


def books_in(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """The books in a folder and a few levels below it, by name; links are not followed."""
    books: list[Path] = []
    try:
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return books
    for entry in inside:
        if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
            continue
        if os.path.isfile(os.path.join(entry.path, LEDGER)):
            books.append(Path(entry.path))
        elif depth > 1:
            books += books_in(Path(entry.path), depth - 1)
    return books


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """The vocabulary of what was given as a tokenizer; `None` of none."""
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        return Vocabulary.from_path(tokenizer)
    return Vocabulary.of(tokenizer)


def load(source: Source, index: Index) -> None:
    """Bring an index up to date with what a source has now; a bar on a terminal says how far that is."""
    with Progress("reading", 0, after=1.0) as bar:
        while source.refresh(index):
            bar.total, done = index.query("SELECT COUNT(*), COALESCE(SUM(measured), 0) FROM samples")[0]
            bar.advance(done - bar.done)
    index.settle()


class Watcher:
    """Follows a source in the background, and lets others wait for what it finds.

    It looks again at once while there is more to read, then every `seconds`, less often while nothing comes. An error
    is kept in `error`, shown, and tried again.
    """

    def __init__(self, source: Source, index: Index, *, seconds: float = 1.0, slowest: float = 5.0) -> None:
        self.source = source
        self.index = index
        self.seconds = seconds
        self.slowest = slowest
        self.error: str | None = None
        """Why the source could not be read the last time."""
        self._closing = threading.Event()
        self._soon = threading.Event()
        self._looked = threading.Event()
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbook-watcher", daemon=True)

    def start(self, patience: float = 2.0) -> Watcher:
        """Begin to follow; returns after the first look, so that the first page is not empty, or after `patience`
        seconds."""
        self._thread.start()
        self._looked.wait(patience)
        return self

    @property
    def loaded(self) -> bool:
        """Whether all that was there has been read once."""
        return self._loaded.is_set()

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Wait until all that was there has been read once, or could not be; whether it was within `timeout`."""
        return self._loaded.wait(timeout)

    def wait(self, cursor: int, timeout: float) -> bool:
        """Wait until the index changed after `cursor`; whether it did within `timeout` seconds."""
        return self.index.wait(cursor, timeout, self._closing.is_set)

    def look(self) -> None:
        """Have it look soon."""
        self._soon.set()

    def _run(self) -> None:
        pause = self.seconds
        while not self._closing.is_set() and not self.index.closed:
            error = None
            try:
                changed = self.source.refresh(self.index)
                self.index.settle()
            except Exception as raised:  # Whatever a source raises is shown; the pages go on with what there is.
                error = str(raised) if isinstance(raised, BookError) else f"{type(raised).__name__}: {raised}"
                changed = None
            if error != self.error:
                with contextlib.suppress(ValueError):  # closed meanwhile
                    self.index.keep("error", error)
                self.error = error
            self._looked.set()
            if changed:
                pause = self.seconds
                continue
            self._loaded.set()
            self._soon.wait(pause)
            self._soon.clear()
            pause = min(self.slowest, pause * 1.25)

    def close(self) -> None:
        """Stop following; what is being read is finished first."""
        self._closing.set()
        self._soon.set()
        self.index.wake()
        if self._thread.is_alive():
            self._thread.join(30)

    def __enter__(self) -> Watcher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
