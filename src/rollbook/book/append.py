"""Appending records: preparation, transaction, group commit and the streaming writer.

Appends of several threads are written together, with one sync of the segment and one commit of the ledger: the first
thread writes its append, later ones wait, and the first of those then writes all waiting appends.

Invariant: bytes are in the store before the ledger refers to them, and the ledger has all records of an append or none.
Appending a record again changes nothing; a different record under its id is rejected before anything is written.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import compaction, content_hash, queue, revision
from rollbook.book.consumer import (
    SELECT_CONSUMERS,
    Consumer,
    all_consumers,
    find_consumer,
    parse_consumers,
    save_consumer,
)
from rollbook.book.content_hash import ContentHashes, content_hashes
from rollbook.book.errors import (
    BackPressureError,
    BookError,
    ConflictError,
    ConnectionLostError,
    CorruptBookError,
    LockTimeoutError,
    OutcomeUnknownError,
    QuotaExceededError,
)
from rollbook.book.index_columns import IndexColumns, column_types, index_columns, number_column
from rollbook.book.ledger import BUSY_SECONDS, RETRY_SECONDS, ConcurrentChangeError, Transaction, served, took_effect
from rollbook.book.media import MIN_BASE64, Blob, extract, may_hold_media
from rollbook.book.segments.files import Place
from rollbook.core.checks import check_float, check_int
from rollbook.core.columns import Values
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences, from_rows, gc_paused
from rollbook.core.metrics import warn_user
from rollbook.core.wire import RowLayout, decode, encode

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience
    from rollbook.core.vocabulary import Vocabulary


MAX_ATTEMPTS = 50
"""Attempts of an append, which starts again if another writer changed what it had read."""
ID_IS_FREE = "removed_reason IS NOT NULL AND (removed_reason = 'rewound' OR full_hash IS NULL)"
"""SQL condition: the row's id may be used again, since a rewind dropped its record or the run had failed."""
_COLUMNS = (
    *("seq", *IndexColumns._fields, "evaluation", "admitted", "revision", "full_hash", "core_hash"),
    *("segment", "start", "size", "slot", "bytes", "removed_reason"),
)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Counts of the records of an append.

    Attributes:
        admitted: New records.
        existing: Records that the book already had.
        revised: Records that the book had, to which the append added fields.
        stale: Admitted records that were too old for some consumer on arrival.

    >>> AppendResult(admitted=2) + AppendResult(admitted=1, stale=1)
    AppendResult(admitted=3, existing=0, revised=0, stale=1)
    """

    admitted: int = 0
    existing: int = 0
    revised: int = 0
    stale: int = 0

    def __add__(self, other: AppendResult) -> AppendResult:
        return AppendResult(
            self.admitted + other.admitted,
            self.existing + other.existing,
            self.revised + other.revised,
            self.stale + other.stale,
        )


@dataclass(frozen=True, slots=True)
class PendingAppend:
    """Records that are about to be appended, with their hashes and their rows of the ledger."""

    records: Experiences | RowLayout
    uids: list[str]
    hashes: ContentHashes
    index_rows: Sequence[IndexColumns]
    evaluation: bool
    frame: Any = None
    """Their bytes, if they are encoded already."""
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    """With `frame`: the media that it refers to."""
    uses: Sequence[tuple[str, ...]] = ()
    """With `frame`: the media of each record; empty if there are none."""

    def take(self, indices: list[int]) -> PendingAppend:
        """Return the records at `indices`, not encoded."""
        uids, index_rows = [self.uids[i] for i in indices], [self.index_rows[i] for i in indices]
        return PendingAppend(self.select(indices), uids, self.hashes.take(indices), index_rows, self.evaluation)

    def select(self, indices: list[int]) -> Experiences:
        """Copy the records at `indices`."""
        records = decode(self.frame, verify=False) if isinstance(self.records, RowLayout) else self.records
        return records.take(indices)


class _FrameBuffer(threading.local):
    """Memory for one frame, which is reused: the first touch of fresh memory takes longer than the copy."""

    max_bytes = 64 << 20

    def __init__(self) -> None:
        self.memory = bytearray()

    def reserve(self, size: int) -> bytearray:
        if size > self.max_bytes:
            return bytearray(size)
        if len(self.memory) < size:
            self.memory = bytearray(size + size // 4)
        return self.memory


_frame_buffer = _FrameBuffer()


def to_columns(experiences: Experience | Iterable[Experience]) -> Experiences:
    """Return one record, several, or columns as columns."""
    return experiences if isinstance(experiences, Experiences) else from_rows(to_rows(experiences), copy=False)


def to_rows(records: Experience | Iterable[Experience]) -> list[Experience]:
    """Return one record or several as a list."""
    from rollbook.core.experience import Experience

    if isinstance(records, Experience):
        return [records]
    if isinstance(records, (str, bytes, dict)) or not isinstance(records, Iterable):
        raise ValueError(f"append: got {type(records).__name__}, expected an Experience, several, or Experiences")
    return list(records)


def _prepare(records: Experiences | list[Any], evaluation: bool) -> PendingAppend:
    """Encode records, and compute their hashes and index columns."""
    # Tensors are gathered once, into the frame; hashes and index columns are computed there. The next append of this
    # thread reuses the memory of the frame, so columns of the caller must not refer to it.
    with gc_paused():
        layout = None if isinstance(records, Experiences) else RowLayout.from_rows(records)
        columns: Experiences | RowLayout
        blobs: Mapping[str, Blob] = {}
        uses: Sequence[tuple[str, ...]] = ()
        if layout is not None and not evaluation and not (_has_long_text(layout) and may_hold_media(layout)):
            columns, frame = layout, encode(layout, out=_frame_buffer.reserve)
        else:
            columns = records if isinstance(records, Experiences) else from_rows(records, copy=False)
            extracted = extract(columns, evaluation=[evaluation] * len(columns))
            frame = encode(extracted.stripped, out=_frame_buffer.reserve, adopt=columns is not records)
            if extracted.blobs:
                blobs, uses = extracted.blobs, extracted.uses
        ids = content_hash.printed_ids(columns.columns["eid"])
        hashes, index_rows = content_hashes(columns, ids), index_columns(columns, ids)
        return PendingAppend(columns, ids.uid, hashes, index_rows, evaluation, frame, blobs, uses)


def _has_long_text(layout: RowLayout) -> bool:
    """Return whether a free-form value is long enough to hold media."""
    return any(
        max(map(len, filter(None, column.data)), default=0) >= MIN_BASE64
        for column in layout.columns.values()
        if isinstance(column, Values) and column.flat is not None and column.data is not None
    )


class AppendCondition(NamedTuple):
    """A condition of an append, and what else happens in its transaction."""

    begin: Callable[[Transaction], None]
    """Called first in the transaction; raises an exception if the records must not be appended."""
    dropped_for: str | None = None
    """Name of a consumer for which the new records are dropped at once."""
    reason: str = ""
    """Why they are dropped."""


def append_records(
    book: Book,
    experiences: Experience | Iterable[Experience],
    *,
    evaluation: bool = False,
    author: str = "",
    timeout: float | None = None,
    condition: AppendCondition | None = None,
) -> tuple[AppendResult, dict[str, str]]:
    """Implement `Book.append`.

    Args:
        book: The book.
        experiences: One record, several, or columns.
        evaluation: Whether the records are for evaluation.
        author: Author of the revisions of records that the book already has.
        timeout: Seconds to wait for rate limiters and for other writers; `None`: no limit for rate limiters.
        condition: Checked in the transaction of new records; not if all are in the book already.

    Returns:
        The counts, and the outcome of records by id: `"admitted"`, `"stale"` or `"revised"`.

    Raises:
        BookError: The records were not appended; see `Book.append`.
    """
    records = experiences if isinstance(experiences, Experiences) else to_rows(experiences)
    if not records:
        return AppendResult(), {}
    pending, duplicates = _prepare(records, evaluation), 0
    if len(set(pending.uids)) < len(pending.uids):
        pending, duplicates = _deduplicate(pending)
    deadline = None if timeout is None else time.monotonic() + timeout
    # If one transaction writes bytes and rows, the first attempt assumes that all records are new and writes them at
    # once. If some are not, it writes nothing.
    optimistic = book.quota is None and book.store.transactional
    attempts = 0
    last_retry = time.monotonic() + RETRY_SECONDS
    revisions: list[tuple[int, int]]
    while True:
        if optimistic:
            optimistic, new_indices, known_count, revisions = False, list(range(len(pending.index_rows))), 0, []
        else:
            with book.ledger.read() as tx:
                new_indices, known_count, revisions = _classify(tx, pending)
                if book.tokenizer is not None:
                    check_tokenizer(tx, book)
                wait_reason = find_limiter_reason(tx, len(new_indices)) if new_indices and not evaluation else None
            if wait_reason is not None:
                _wait_for_limiter(wait_reason, deadline)
                continue
        new = pending if len(new_indices) == len(pending.index_rows) else pending.take(new_indices)
        outcomes: dict[str, str] = {}
        transaction = AppendTransaction(book, new, condition) if new_indices else None
        # Without a timeout, or with 0 s (for limiters), the lock has its default timeout.
        lock_wait = max(deadline - time.monotonic(), 0.0) if deadline is not None and timeout else None
        try:
            if revisions:
                # New records are written in the same transaction, which is only made if a revision changes something.
                changed = revision.add_fields(book, pending, revisions, author, transaction, lock_wait)
                outcomes = dict.fromkeys(changed, "revised")
                known_count += len(revisions) - len(changed)
            if transaction is not None and transaction.stale is None:
                if book.store.transactional:
                    transaction.write_bytes()
                    with book.ledger.write(shared=True, timeout=lock_wait) as tx:
                        transaction.commit(tx)
                else:
                    book.state.group_commit.run(book, transaction, lock_wait)
        except (_ConcurrentAppendError, ConcurrentChangeError):
            attempts += 1
            if attempts > MAX_ATTEMPTS:
                raise BookError(
                    f"append: failed {MAX_ATTEMPTS} times because other writers added the same records or removed its "
                    "segment; nothing was admitted"
                ) from None
            continue
        except (ConnectionLostError, OutcomeUnknownError) as error:
            # Ids make a second attempt safe. A query distinguishes records of this call from those stored before.
            if (
                not took_effect(book.ledger, error, transaction.is_committed if transaction else lambda tx: False)
                or revisions
            ):
                if time.monotonic() >= last_retry:
                    raise
                continue
        known_count, revised = known_count + duplicates, len(outcomes)
        if transaction is None or transaction.stale is None:
            return AppendResult(existing=known_count, revised=revised), outcomes

        book.state.known_column_types |= transaction.columns
        book.state.pending_tokenizer = None
        if not book.store.transactional and next(book.state.appends) % compaction.AUTO_MERGE_INTERVAL == 0:
            compaction.start_auto_merge(book)
        outcomes.update(dict.fromkeys(new.uids, "admitted"))
        for i in transaction.stale:
            outcomes[new.uids[i]] = "stale"
        return AppendResult(len(new_indices), known_count, revised, len(transaction.stale)), outcomes


def _deduplicate(pending: PendingAppend) -> tuple[PendingAppend, int]:
    """Drop repeated records, and return how many there were."""
    first: dict[str, int] = {}
    for i, uid in enumerate(pending.uids):
        j = first.setdefault(uid, i)
        if pending.hashes.full[i] != pending.hashes.full[j]:
            raise ConflictError(f"append: records {j} and {i} are different and have the same id {uid!r}")
    return pending.take(list(first.values())), len(pending.uids) - len(first)


def _classify(tx: Transaction, pending: PendingAppend) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Compare records with the book.

    Returns:
        The indices of new records, how many others have nothing to add, and (index, number) of those that may add
        fields.

    Raises:
        ConflictError: A record contradicts the one of the same id.
    """
    index_of = dict(zip(pending.uids, range(len(pending.uids)), strict=True))
    new_indices = dict.fromkeys(index_of.values())
    known_count = 0
    revisions = []
    for start in range(0, len(index_of), 10_000):
        chunk = list(index_of)[start : start + 10_000]
        for seq, uid, full_hash, core_hash, evaluation, removed_reason in tx.all(
            f"SELECT seq, uid, full_hash, core_hash, evaluation, removed_reason FROM records WHERE uid {tx.in_texts}",
            (tx.array(chunk),),
        ):
            i = index_of[uid]
            if removed_reason == "rewound" or (removed_reason is not None and full_hash is None):
                continue  # The id is free: see `ID_IS_FREE`.
            del new_indices[i]
            if bool(evaluation) != pending.evaluation:
                raise ConflictError(
                    f"{uid}: got it for {_purpose(pending.evaluation)}, it is there for {_purpose(evaluation)}"
                )
            same = full_hash is not None and bytes(full_hash) == pending.hashes.full[i]
            if same or tx.first(
                "SELECT 1 FROM revisions WHERE seq = ? AND full_hash = ?", (seq, pending.hashes.full[i])
            ):
                known_count += 1
            elif removed_reason is not None:
                # The same sample: it stays removed, and late fields are ignored.
                if core_hash is None or bytes(core_hash) != pending.hashes.core[i]:
                    raise ConflictError(f"{uid}: got a record under the id of a removed one ({removed_reason})")
                known_count += 1
            else:
                revisions.append((i, seq))
    return list(new_indices), known_count, revisions


def _purpose(evaluation: bool) -> str:
    return "evaluation" if evaluation else "training"


def check_tokenizer(tx: Transaction, book: Book) -> None:
    """Raise `BookError` if the book's records were made with another tokenizer than it was opened with."""
    row = tx.first("SELECT value FROM meta WHERE key = 'tokenizer'")
    if row is not None and row[0] != book.tokenizer:
        raise BookError(f"tokenizer: got {book.tokenizer!r}, the book's records were made with {row[0]!r}")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an append's bytes are: its frame, and the media that the book did not have."""

    frame: Place
    media: dict[str, Place]


def store_bytes(book: Book, transactions: Sequence[AppendTransaction]) -> None:
    """Write the bytes of appends that are not in the store yet, with one sync."""
    transactions = [transaction for transaction in transactions if transaction.stored is None]
    if not transactions:
        return
    new_media: list[list[str]] = [[] for _ in transactions]
    if [transaction for transaction in transactions if transaction.pending.blobs]:
        with book.ledger.read() as tx:
            new_media = [transaction.new_media(tx) for transaction in transactions]
    parts = [data for transaction, new in zip(transactions, new_media, strict=True) for data in transaction.parts(new)]
    if book.quota is not None:
        check_quota(book, sum(map(len, parts)))
    places = iter(book.store.put(parts))
    for transaction, new in zip(transactions, new_media, strict=True):
        transaction.stored = Stored(next(places), dict(zip(new, islice(places, len(new)), strict=True)))
        transaction.vocabulary = transaction.vocabulary or encode_vocabulary(book)


def check_quota(book: Book, size: int) -> None:
    """Raise `QuotaExceededError` unless `size` more bytes fit into the quota, after making room if needed."""
    from rollbook.book.compaction import make_room

    stored = sum(book.store.segments().values())
    if stored + size > book.quota and not make_room(book, size):  # type: ignore[operator]
        with book.ledger.read() as tx:
            states = (queue.WAITING, queue.COOLING, queue.LEASED)
            counts = {
                consumer.name: queue.count_rows(tx, consumer, *states)[0] + queue.inbox_size(tx, consumer.id)
                for consumer in all_consumers(tx)
            }
        raise QuotaExceededError(
            f"quota: the book has {sum(book.store.segments().values())} bytes and would get {size} more, expected at "
            f"most {book.quota}; nothing more could be removed"
            + "".join(f"; consumer {name!r} is not done with {n} records" for name, n in counts.items() if n)
        )


def find_limiter_reason(tx: Transaction, count: int) -> str | None:
    """Return why a limiter holds back an append of `count` records, or `None`."""
    for consumer in all_consumers(tx):
        if consumer.settings.ratio is not None:
            consumer.inserts += queue.inbox_size(tx, consumer.id)
            reason = _limiter_reason(tx, consumer, count)
            if reason is not None:
                return reason
    return None


class _ConcurrentAppendError(Exception):
    """Another writer appended the same records or reached a limit: start again."""


class AppendTransaction:
    """New records, written in two steps: `write_bytes` writes their bytes, `commit` the ledger.

    A store in the ledger's database gets the bytes in the same transaction.
    """

    def __init__(self, book: Book, pending: PendingAppend, condition: AppendCondition | None = None) -> None:
        if pending.frame is None and isinstance(pending.records, Experiences):
            # Some of the records of an append, which `PendingAppend.take` does not encode.
            extracted = extract(pending.records, evaluation=[pending.evaluation] * len(pending.records))
            frame = encode(extracted.stripped)
            pending = replace(pending, frame=frame, blobs=extracted.blobs, uses=extracted.uses)
        self.book = book
        self.pending = pending
        self.condition = condition
        self.columns = column_types(pending.records) - book.state.known_column_types
        self.stored: Stored | None = None
        self.location: Stored | None = None
        """Where the last `commit` found or wrote the bytes."""
        self.vocabulary: str | None = None
        self.stale: set[int] | None = None
        """Which records were too old for some consumer; `None` until they are written."""

    def write_bytes(self) -> None:
        """Put their bytes in the store, once."""
        if not self.book.store.transactional:
            store_bytes(self.book, [self])
            return
        if self.book.quota is not None:
            check_quota(self.book, sum(map(len, self.parts(list(self.pending.blobs)))))
        self.vocabulary = self.vocabulary or encode_vocabulary(self.book)

    def new_media(self, tx: Transaction) -> list[str]:
        """Return the hashes of the media that the book does not have."""
        blobs = self.pending.blobs
        if not blobs:
            return []
        rows = tx.all(f"SELECT hash FROM media WHERE hash {tx.in_texts}", (tx.array(list(blobs)),))
        known_hashes = {key for (key,) in rows}
        return [key for key in blobs if key not in known_hashes]

    def parts(self, hashes: Sequence[str]) -> list[bytes | bytearray | memoryview]:
        """Return the bytes to write: the frame, then the media with these hashes."""
        return [self.pending.frame, *(self.pending.blobs[key].data for key in hashes)]

    def is_committed(self, tx: Transaction) -> bool:
        """Return whether a `commit` took effect, though its connection was lost."""
        frame = None if self.location is None else self.location.frame
        if frame is None:
            return False
        key = (self.pending.uids[0], frame.segment, frame.offset)
        return tx.first("SELECT 1 FROM records WHERE uid = ? AND segment = ? AND start = ?", key) is not None

    def commit(self, tx: Transaction) -> None:
        """Write the records' rows, in a transaction of the ledger.

        Raises:
            _ConcurrentAppendError: Another writer changed what the append had read.
        """
        book, pending = self.book, self.pending
        uids, condition = pending.uids, self.condition
        if condition is not None:
            condition.begin(tx)
        dropped_for = None if condition is None else condition.dropped_for
        same_uids, consumer_rows, meta_rows, [(first_seq,)] = tx.query_many(
            (f"SELECT seq, uid, ({ID_IS_FREE}) FROM records WHERE uid {tx.in_texts}", (tx.array(uids),)),
            (SELECT_CONSUMERS, ()),
            ("SELECT key, value FROM meta WHERE key IN ('tokenizer', 'policy_version', 'lineage')", ()),
            tx.next_number("records", len(uids)),
        )
        meta = dict(meta_rows)
        if same_uids and not all(free for _, _, free in same_uids):
            raise _ConcurrentAppendError
        if book.tokenizer is not None and meta.get("tokenizer", book.tokenizer) != book.tokenizer:
            raise _ConcurrentAppendError
        self.location = stored = self._find_bytes(tx)
        # If bytes in the open segment must be removed, seal it, so that the next compaction can rewrite it. Stores in
        # PostgreSQL and fsspec have no open segments.
        segment = stored.frame.segment
        if book.ledger.dialect == "sqlite" and tx.first("SELECT 1 FROM purges WHERE segment = ?", (segment,)):
            book.store.seal()
        consumers = [] if pending.evaluation else parse_consumers(consumer_rows)
        # Appends that depend on the number of records, or change a limited number, run one after another.
        limited = []
        for consumer in consumers:
            if consumer.settings.ratio or consumer.settings.max_size or consumer.name == dropped_for:
                limited.append(_lock_drained(tx, book, consumer))
                if _limiter_reason(tx, limited[-1], len(uids)):
                    raise _ConcurrentAppendError
        if same_uids:
            renamed = [(f"{uid}~{seq}", seq) for seq, uid, _ in sorted(same_uids)]
            tx.run_many("UPDATE records SET uid = ? WHERE seq = ?", renamed)
        insert_records(tx, pending, stored, first_seq)
        stale: set[int] = set()
        inbox = []
        lineage = queue.parse_lineage(meta)
        if lineage.branches and queue.names_lineage(pending.records):
            lineage = queue.read_lineage(tx, lock=True)
        abandoned: set[int] = set()
        if lineage.branches:
            abandoned = lineage.mark_abandoned(
                tx, pending.records, first_seq, [row.version_max for row in pending.index_rows]
            )
        for consumer in consumers:
            key, numbers = consumer.settings.sampler.key, None
            if key is not None and key not in IndexColumns._fields:
                numbers = json.dumps(number_column(pending.records, key))
            inbox.append((consumer.id, first_seq, first_seq + len(uids) - 1, len(uids), numbers))
            if consumer.settings.max_staleness is not None:
                floor = queue.version_floor(lineage.announced, consumer.settings.max_staleness)
                stale |= abandoned
                for i, row in enumerate(pending.index_rows):
                    if floor is not None and row.version_min is not None and row.version_min < floor:
                        stale.add(i)
            if consumer.waiting > tx.now:
                tx.notify(consumer.id)
        tx.insert("inbox", queue.INBOX_COLUMNS, inbox)
        for consumer in limited:
            while not queue.drain_inbox(tx, book, consumer):
                pass
            if condition is not None and consumer.name == dropped_for:
                queue.drop_by_seq(tx, consumer, range(first_seq, first_seq + len(uids)), condition.reason)
            save_consumer(tx, consumer)
        if self.columns:
            tx.insert("columns", ("name", "type"), sorted(self.columns), "ON CONFLICT DO NOTHING")
        if book.tokenizer is not None and ("tokenizer" not in meta or self.vocabulary is not None):
            tx.run("INSERT INTO meta (key, value) VALUES ('tokenizer', ?) ON CONFLICT DO NOTHING", (book.tokenizer,))
            if self.vocabulary is not None:
                check_tokenizer(tx, book)
                new = "INSERT INTO meta (key, value) VALUES ('vocabulary', ?) ON CONFLICT DO NOTHING"
                tx.run(new, (self.vocabulary,))
        self.stale = stale

    def _find_bytes(self, tx: Transaction) -> Stored:
        """Return where the bytes are, after writing them (a transactional store) or checking that they still exist."""
        if self.book.store.transactional:
            new = self.new_media(tx)
            frame, *media = self.book.store.insert(tx, self.parts(new))  # type: ignore[attr-defined]
            return Stored(frame, dict(zip(new, media, strict=True)))
        stored = self.stored
        if stored is None or not self.book.store.has(stored.frame.segment):
            raise _ConcurrentAppendError
        if self.pending.blobs:
            segments = {location.segment for location in stored.media.values()}
            # Media that the book had when the bytes were written may have been removed since.
            if not all(map(self.book.store.has, segments)) or set(self.new_media(tx)) - stored.media.keys():
                raise _ConcurrentAppendError
        return stored


def _lock_drained(tx: Transaction, book: Book, consumer: Consumer) -> Consumer:
    """Lock a consumer and drain its inbox, so that its counts include every record before this append."""
    locked = find_consumer(tx, consumer.name, lock=True)
    if locked is None:
        raise _ConcurrentAppendError
    while not queue.drain_inbox(tx, book, locked):
        pass
    return locked


def _limiter_reason(tx: Transaction, consumer: Consumer, count: int) -> str | None:
    ratio = consumer.settings.ratio
    if ratio is None or ratio.inserts_left(consumer.inserts, consumer.samples) >= count:
        return None
    if not _can_lease_more(tx, consumer):
        # Nothing can be leased (groups wait for their other runs): waiting would never end.
        return None
    if count > ratio.append_size:
        raise BackPressureError(
            f"append: got {count} records at once, consumer {consumer.name!r} allows at most append_size = "
            f"{ratio.append_size}; append them in smaller pieces"
        )
    return (
        f"consumer {consumer.name!r} has {consumer.inserts} records and took {consumer.samples}: {count} more would "
        f"pass its ratio of {ratio.ratio:g} by more than {ratio.slack:g}"
    )


def _can_lease_more(tx: Transaction, consumer: Consumer) -> bool:
    """Return whether samples can catch up without more inserts: records are leased, cooling down or can be leased."""
    if queue.count_rows(tx, consumer, queue.LEASED, queue.COOLING)[0]:
        return True
    if consumer.grouped:
        return bool(tx.first("SELECT 1 FROM groups WHERE consumer = ? AND ready = 1 LIMIT 1", (consumer.id,)))
    return queue.count_rows(tx, consumer, queue.WAITING)[0] > 0


class HeldBackError(BackPressureError):
    """A rate limiter holds inserts back for now; other causes of `BackPressureError` do not pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"append: held back until the timeout, nothing was written: {self.reason}"


def _wait_for_limiter(reason: str, deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise HeldBackError(reason)
    time.sleep(0.01)


def insert_records(
    tx: Transaction, pending: PendingAppend, stored: Stored | None, first_seq: int, removed_reason: str | None = None
) -> None:
    """Insert the records' rows, numbered from `first_seq` on."""
    count = len(pending.index_rows)
    location = (
        (None, None, None) if stored is None else (stored.frame.segment, stored.frame.offset, stored.frame.length)
    )
    bytes_per_record = 0 if stored is None else -(-stored.frame.length // count)
    detail = {"evaluation": True} if pending.evaluation else None
    rows, events = [], []
    for i, columns in enumerate(pending.index_rows):
        full_hash, core_hash, slot = None, None, None
        if stored is not None:
            full_hash, core_hash, slot = pending.hashes.full[i], pending.hashes.core[i], i
        rows.append(
            (
                first_seq + i,
                *columns,
                int(pending.evaluation),
                tx.now,
                0,
                full_hash,
                core_hash,
                *location,
                slot,
                bytes_per_record,
                removed_reason,
            )
        )
        events.append(queue.Event("admitted", first_seq + i, detail=detail))
    tx.insert("records", _COLUMNS, rows)
    if stored is not None and pending.uses:
        # Another writer may have stored the same medium: its place stays, and compaction removes this copy.
        tx.insert(
            "media",
            ("hash", "segment", "start", "size"),
            [(key, p.segment, p.offset, p.length) for key, p in stored.media.items()],
            "ON CONFLICT DO NOTHING",
        )
        uses = [(key, first_seq + i) for i, keys in enumerate(pending.uses) for key in keys]
        tx.insert("media_uses", ("hash", "seq"), uses)
    queue.record_events(tx, events)
    queue.add_counts(tx, [(0, "evaluation" if pending.evaluation else "admitted", "", count, 0.0, tx.shard)])


def append_tombstones(book: Book, eids: Sequence[Any], reason: str, group_size: int | None) -> int:
    """Implement `Book.fail`."""
    from rollbook.core.experience import Experience

    if reason in ("deleted", "rewound"):
        raise ValueError(f"reason: got {reason!r}, which the ledger uses itself; expected another word")
    rows = [Experience(eid=eid, tokens=[0, 0], group_size=group_size) for eid in eids]
    experiences = from_rows(rows)
    entries = [
        columns._replace(length=0, prompt_tokens=0, response_tokens=0, trained_tokens=0)
        for columns in index_columns(experiences)
    ]
    pending = PendingAppend(experiences, [entry.uid for entry in entries], content_hashes(experiences), entries, False)
    with queue.write_drained(book) as tx:
        # A run that has a record or failed already is known: a restarted program fails it again, with another suffix.
        gids, uids = tx.array([entry.gid for entry in entries]), tx.array(pending.uids)
        runs, same_uids = tx.query_many(
            (
                "SELECT gid, run FROM records WHERE evaluation = 0 AND "
                f"(removed_reason IS NULL OR removed_reason <> 'rewound') AND gid {tx.in_texts}",
                (gids,),
            ),
            (f"SELECT seq, uid, ({ID_IS_FREE}) FROM records WHERE uid {tx.in_texts}", (uids,)),
        )
        known_runs = set(map(tuple, runs))
        used_uids = {uid for _, uid, free in same_uids if not free}
        first = {(entry.gid, entry.run): i for i, entry in reversed(list(enumerate(entries)))}
        new_indices = sorted(i for run, i in first.items() if run not in known_runs and entries[i].uid not in used_uids)
        if not new_indices:
            return 0
        pending = pending.take(new_indices)
        new_uids = set(pending.uids)
        tx.run_many(
            "UPDATE records SET uid = ? WHERE seq = ?",
            [(f"{uid}~{seq}", seq) for seq, uid, free in same_uids if free and uid in new_uids],
        )
        first_seq = tx.first(*tx.next_number("records", len(new_indices)))[0]
        insert_records(tx, pending, None, first_seq, reason)
        for consumer in all_consumers(tx):
            queue.enter_rows(
                tx,
                consumer,
                [
                    queue.new_row(consumer, first_seq + i, entry.gid, None, None, reason)
                    for i, entry in enumerate(pending.index_rows)
                ],
            )
            save_consumer(tx, consumer)
    return len(new_indices)


MAX_APPENDS = 64
"""Appends that one transaction commits at most."""


@dataclass(eq=False)
class _Entry:
    """An append in the queue."""

    transaction: AppendTransaction
    leads: bool = False
    """Whether its thread writes next, for all waiting appends."""
    done: bool = False
    """Whether it was written, or failed with `error`."""
    error: Exception | None = None


class GroupCommit:
    """A queue of appends that are ready to be written.

    Invariant: while the queue is not empty, one thread writes or is about to; an entry is done only if it was committed
    or has an error.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Entry] = []
        self._busy = False
        self._pid = os.getpid()

    def run(self, book: Book, transaction: AppendTransaction, timeout: float | None) -> None:
        """Write an append, alone or together with others.

        Raises:
            LockTimeoutError: Its turn did not come within `timeout` seconds.
        """
        if self._pid != os.getpid():
            self._reset()  # A forked process does not have the parent's threads.
        entry = _Entry(transaction)
        group: list[_Entry] = []  # Appends that this thread writes; empty if another thread writes the entry.
        wait_seconds = BUSY_SECONDS if timeout is None else timeout
        try:
            with self._changed:
                self._waiting.append(entry)
                entry.leads, self._busy = not self._busy, True
                if not entry.leads and not self._changed.wait_for(lambda: entry.done or entry.leads, wait_seconds):
                    if entry in self._waiting:
                        raise LockTimeoutError(
                            f"append: other threads of this process held the book for {wait_seconds:.3g} s"
                        )
                    self._changed.wait_for(lambda: entry.done or entry.leads)  # It is being written.
                if not entry.done:
                    group += self._waiting[:MAX_APPENDS]
                    del self._waiting[:MAX_APPENDS]
            _write_group(book, group, timeout)
        finally:
            with self._changed:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                if entry.leads:
                    # If this thread was interrupted, the others write for themselves.
                    self._waiting[:0] = [other for other in group if not other.done and other is not entry]
                    self._busy = bool(self._waiting)
                    if self._waiting:
                        self._waiting[0].leads = True
                    self._changed.notify_all()
        if entry.error is not None:
            raise entry.error


def _write_group(book: Book, group: Sequence[_Entry], timeout: float | None) -> None:
    """Write entries together, or one by one if one of them is faulty."""
    if len(group) > 1:
        try:
            _commit(book, [entry.transaction for entry in group], timeout)
        except LockTimeoutError as error:
            for entry in group:
                entry.error, entry.done = error, True
        except Exception:
            for entry in group:
                entry.transaction.stale = None
        else:
            for entry in group:
                entry.done = True
    for entry in group:
        if not entry.done:
            try:
                _commit(book, [entry.transaction], timeout)
            except Exception as error:
                entry.error = error
            entry.done = True


def _commit(book: Book, transactions: Sequence[AppendTransaction], timeout: float | None) -> None:
    """Write the bytes of appends with one sync, then the ledger with one commit."""
    store_bytes(book, transactions)
    with book.ledger.write(shared=True, timeout=timeout) as tx:
        for transaction in transactions:
            transaction.commit(tx)


class Receipt(Future[AppendResult]):
    """A future for the records of one `Writer.add`: `result()` waits until they are durable, or raises."""

    retrieved = False

    def __init__(self) -> None:
        super().__init__()
        # Waiting can be canceled, but not the append.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> AppendResult:
        """Wait until the records are durable and return their counts."""
        self.retrieved = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception of the append, or `None`."""
        self.retrieved = True
        return super().exception(timeout)


class Writer:
    """A background writer that batches small appends; created by `Book.writer`. Thread-safe.

    Records wait at most `delay` seconds, or until there are `batch` of them, and are then appended together (one sync,
    one frame). If that fails, the parts are appended one by one, so that only the faulty one fails. While rate limiters
    hold appends back, `add` blocks once `max_pending` records wait.

    Args:
        book: The book.
        delay: Seconds that a record waits at most for others.
        batch: Number of records that are committed without waiting longer.
        max_pending: Number of records that may be pending.
        evaluation: As for `Book.append`.
        author: As for `Book.append`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> with book.writer(delay=0.05) as writer:
    ...     receipts = [writer.add(rollbook.Experience(tokens=[1, 2, i])) for i in range(100)]
    >>> sum(receipt.result().admitted for receipt in receipts), len(book)
    (100, 100)
    """

    def __init__(
        self, book: Book, *, delay: float, batch: int, max_pending: int, evaluation: bool, author: str
    ) -> None:
        self._book = book
        self._delay = check_float("delay", delay, 0.0)
        self._batch = check_int("batch", batch, 1)
        self._max_pending = max(check_int("max_pending", max_pending, 1), self._batch)
        self._options: dict[str, Any] = {"evaluation": evaluation, "author": author, "timeout": None}
        self._failed: list[Receipt] = []
        self._pending: list[tuple[Experiences, Receipt]] = []
        self._count = 0
        self._since = 0.0
        self._flushing = False
        self._closing = False
        self._busy = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rollbook-writer", daemon=True)
        self._thread.start()

    def add(self, experiences: Experience | Iterable[Experience]) -> Receipt:
        """Queue records for the next append. Later changes to them have no effect.

        Args:
            experiences: One record or several.

        Returns:
            A receipt, whose `result()` waits until the records are durable.

        Raises:
            BookError: The writer is closed.
        """
        self._check_process()
        # A copy: the caller may change the records before they are appended.
        columns = to_columns(experiences).compact()
        receipt = Receipt()
        with self._changed:
            while self._count >= self._max_pending and not self._closing:
                self._changed.wait()
            if self._closing:
                raise BookError("writer: closed")
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append((columns, receipt))
            self._count += len(columns)
            self._changed.notify_all()
        return receipt

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all added records are durable.

        Args:
            timeout: Seconds to wait; `None` for no limit.

        Raises:
            TimeoutError: Some records are not durable yet.
            Exception: The first failure of an append whose receipt was not read.
        """
        self._check_process()
        with self._changed:
            self._flushing = bool(self._pending)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._busy and not self._pending, timeout)
        if not done:
            raise TimeoutError(f"writer: some records are not durable after {timeout} s")
        self._raise_failure()

    def close(self) -> None:
        """Flush and stop the writer.

        Raises:
            Exception: The first failure of an append whose receipt was not read.
        """
        self._stop()
        self._raise_failure()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise BookError("writer: used in a forked process, which does not have its thread; create a writer here")

    def _stop(self) -> None:
        if os.getpid() != self._pid:
            return  # The parent writes the pending records.
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_failure(self) -> None:
        failed, self._failed = [receipt for receipt in self._failed if not receipt.retrieved], []
        if failed:
            failed[0].result()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                while not (self._flushing or self._closing or self._count >= self._batch):
                    left = self._since + self._delay - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                batch, self._pending, self._count, self._flushing = self._pending, [], 0, False
                self._busy = True
                self._changed.notify_all()
            try:
                self._append(batch)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _append(self, batch: list[tuple[Experiences, Receipt]]) -> None:
        if len(batch) > 1:
            try:
                merged = Experiences.concat([columns for columns, _ in batch])
                _, outcomes = self._book._append(merged, **self._options)
            except Exception:
                pass  # One of them is faulty: append each alone. Records that were admitted are skipped.
            else:
                self._set_results(batch, outcomes)
                return
        for columns, receipt in batch:
            try:
                receipt.set_result(self._book._append(columns, **self._options)[0])
            except BaseException as error:
                self._failed.append(receipt)
                receipt.set_exception(error)

    def _set_results(self, batch: list[tuple[Experiences, Receipt]], outcomes: dict[str, str]) -> None:
        """Set the result of each receipt; a record that was added twice counts for the first."""
        for columns, receipt in batch:
            states = [outcomes.pop(eid.uid, "known") for eid in columns.eids()]
            known_count, revised, stale = (states.count(word) for word in ("known", "revised", "stale"))
            receipt.set_result(AppendResult(len(states) - known_count - revised, known_count, revised, stale))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def __repr__(self) -> str:
        return f"Writer({self._book!r}, {self._count} records waiting)"


def encode_vocabulary(book: Book) -> str | None:
    """Encode the vocabulary of the book's tokenizer for the ledger, or return `None` if the ledger has it already."""
    from rollbook.core.vocabulary import Vocabulary

    if book.state.pending_tokenizer is None:
        return None
    with book.ledger.read() as tx:
        if tx.first("SELECT 1 FROM meta WHERE key = 'vocabulary'"):
            book.state.pending_tokenizer = None
            return None
    try:
        pending = book.state.pending_tokenizer
        vocabulary = pending if isinstance(pending, Vocabulary) else Vocabulary.from_tokenizer(pending)
    except Exception as error:  # A user's tokenizer may raise anything; records are admitted without its vocabulary.
        warn_user(f"tokenizer: its vocabulary is not stored, and texts show as ids: {type(error).__name__}: {error}")
        book.state.pending_tokenizer = None
        return None
    return base64.b64encode(vocabulary.to_bytes()).decode("ascii")


@served(repeat=True)
def read_vocabulary(book: Book) -> Vocabulary | None:
    """Return the bytes of each token id, from the tokenizer that the book was first written with.

    Args:
        book: The book.

    Returns:
        The vocabulary, or `None` if the book has none.

    Raises:
        CorruptBookError: The vocabulary in the ledger cannot be read.

    >>> import rollbook
    >>> print(read_vocabulary(rollbook.open("memory:")))
    None
    """
    from rollbook.core.vocabulary import Vocabulary

    with book.ledger.read() as tx:
        row = tx.first("SELECT value FROM meta WHERE key = 'vocabulary'")
    if row is None:
        return None
    try:
        return Vocabulary.from_bytes(binascii.a2b_base64(row[0], strict_mode=True))
    except (TypeError, ValueError) as error:
        cause = error.message if isinstance(error, WireError) else str(error)
        raise CorruptBookError(f"{book.url}: the vocabulary in its ledger cannot be read: {cause}") from None
