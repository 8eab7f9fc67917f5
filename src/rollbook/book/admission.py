"""Admission: how records come into a book.

Invariant: bytes are on the shelf before the ledger speaks of them, and the ledger speaks of all records of an append or
of none. The same record again changes nothing; another one under its id is refused before anything is written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.book import (
    attachments,
    consumers,
    digests,
    groups,
    identities,
    inbox,
    lineages,
    purging,
    reading,
    reports,
    revising,
    tags,
    work,
)
from rollbook.book.consumers import Consumer, Settings
from rollbook.book.errors import (
    BackPressureError,
    BookError,
    ConflictError,
    ConnectionLostError,
    OutcomeUnknownError,
    QuotaExceededError,
)
from rollbook.book.ledger import RETRY_SECONDS, ConcurrentChangeError, Transaction, took_effect
from rollbook.book.shelves import Place
from rollbook.core.experiences import Experiences, from_rows, uncollected
from rollbook.core.row_layout import RowLayout
from rollbook.core.wire import decode, encode

if TYPE_CHECKING:
    from rollbook.book.book import Book

ATTEMPTS = 50
"""How often an append looks again after another writer changed what it had seen."""
FREE = "gone IS NOT NULL AND (gone = 'rewound' OR whole IS NULL)"
"""Rows whose ids may be taken again: records that a rewind dropped, and runs that failed and now gave a record."""
_COLUMNS = (
    *("seq", *tags.IndexColumns._fields, "evaluation", "admitted", "revision", "whole", "core"),
    *("segment", "start", "size", "slot", "bytes", "gone"),
)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What an append did: how many records are new, how many were there already, how many of those got new fields."""

    admitted: int = 0
    known: int = 0
    revised: int = 0
    stale: int = 0
    """Of the admitted ones, how many were too old for some consumer as they came."""

    def __add__(self, other: AppendResult) -> AppendResult:
        return AppendResult(
            self.admitted + other.admitted,
            self.known + other.known,
            self.revised + other.revised,
            self.stale + other.stale,
        )


@dataclass(frozen=True, slots=True)
class PendingAppend:
    """Records on their way in, with what the ledger will say of them."""

    many: Experiences | RowLayout
    digests: digests.ContentHashes
    tags: Sequence[tags.IndexColumns]
    evaluation: bool
    frame: Any = None
    """Their bytes, if they were made already."""
    blobs: Mapping[str, attachments.Blob] = field(default_factory=dict)
    """With `frame`: the media that it refers to."""
    uses: Sequence[tuple[str, ...]] = ()
    """With `frame`: the media of each record; empty if there are none."""

    def take(self, indices: list[int]) -> PendingAppend:
        kept = digests.ContentHashes(*([column[i] for i in indices] for column in self.digests))
        return PendingAppend(self.select(indices), kept, [self.tags[i] for i in indices], self.evaluation)

    def select(self, indices: list[int]) -> Experiences:
        """The records at `indices`, on memory of their own."""
        records = decode(self.frame, verify=False) if isinstance(self.many, RowLayout) else self.many
        return records.take(indices)


class _Scratch(threading.local):
    """Memory for one frame, used again and again: the first touch of fresh memory takes longer than the copy."""

    most = 64 << 20

    def __init__(self) -> None:
        self.memory = bytearray()

    def of(self, size: int) -> bytearray:
        if size > self.most:
            return bytearray(size)
        if len(self.memory) < size:
            self.memory = bytearray(size + size // 4)
        return self.memory


_scratch = _Scratch()


def as_experiences(given: Any) -> Experiences:
    """One record, some, or columns, as columns."""
    return given if isinstance(given, Experiences) else from_rows(_rows(given), copy=False)


def _rows(records: Any) -> list[Any]:
    from rollbook.core.experience import Experience

    if isinstance(records, Experience):
        return [records]
    if isinstance(records, (str, bytes, dict)) or not isinstance(records, Iterable):
        raise ValueError(f"append: got {type(records).__name__}, expected an Experience, several, or Experiences")
    return list(records)


def _prepare(records: Experiences | list[Any], evaluation: bool) -> PendingAppend:
    """Encode records, and compute what the ledger will say of them."""
    # Tensors are gathered once, into the frame; digests and tags are then taken there. A frame's memory is used again
    # by this thread's next append: columns that the caller holds stay out of it.
    with uncollected():
        layout = None if isinstance(records, Experiences) else RowLayout.of(records)
        if layout is not None and not evaluation and not attachments.may_hold_media(layout):
            return _describe(layout, evaluation, encode(layout, out=_scratch.of), {}, ())
        columns = as_experiences(records)
        lifted = attachments.extract(columns, evaluation=[evaluation] * len(columns))
        frame = encode(lifted.stripped, out=_scratch.of, settle=columns is not records)
        return _describe(columns, evaluation, frame, lifted.blobs, lifted.uses if lifted.blobs else ())


def _describe(records: Experiences | RowLayout, evaluation: bool, *encoded: Any) -> PendingAppend:
    ids = identities.printed_ids(records.columns["eid"])
    return PendingAppend(
        records, digests.content_hashes(records, ids), tags.index_columns(records, ids), evaluation, *encoded
    )


def append_records(
    book: Book, given: Any, *, evaluation: bool, author: str, timeout: float | None
) -> tuple[AppendResult, dict[str, str]]:
    """See `Book.append`; also, by id, which records were "admitted", too old as they came ("stale") or "revised"."""
    records = given if isinstance(given, Experiences) else _rows(given)
    if not records:
        return AppendResult(), {}
    coming, doubled = _deduplicate(_prepare(records, evaluation))
    end = None if timeout is None else time.monotonic() + timeout
    # Where bytes and rows are written by one transaction, the first attempt takes all records for new and writes them
    # at once; if some are not, it writes nothing.
    hopeful = book.quota is None and book.shelf.transactional
    attempts = 0
    last_retry = time.monotonic() + RETRY_SECONDS
    revisions: list[tuple[int, int]]
    while True:
        if hopeful:
            hopeful, fresh, known, revisions = False, list(range(len(coming.tags))), 0, []
        else:
            with book.ledger.read() as tx:
                fresh, known, revisions = _classify(tx, coming)
                check_tokenizer(tx, book)
                held = _limiter_wait(tx, evaluation, len(fresh))
            if held is not None:
                _wait(held, end)
                continue
        new = coming if len(fresh) == len(coming.tags) else coming.take(fresh)
        fates: dict[str, str] = {}
        admit = AppendTransaction(book, new) if fresh else None
        # Without a limit, or one of 0 s for limiters, the lock has its default limit.
        lock_wait = max(end - time.monotonic(), 0.0) if end is not None and timeout else None
        try:
            if revisions:
                # In one transaction with the new ones, which comes about only if one of them brings something.
                changed = revising.add_fields(book, coming, revisions, author, admit, lock_wait)
                fates = dict.fromkeys(changed, "revised")
                known += len(revisions) - len(changed)
            if admit is not None and admit.stale is None:
                if book.shelf.transactional:
                    admit.store()
                    with book.ledger.write(shared=True, timeout=lock_wait) as tx:
                        admit(tx)
                else:
                    book.group_commit.run(book, admit, lock_wait)
        except (_ConcurrentAppendError, ConcurrentChangeError):
            attempts += 1
            if attempts > ATTEMPTS:
                raise BookError(
                    f"append: other writers changed what is new {ATTEMPTS} times while it was written, or its segment "
                    "was removed; nothing was admitted"
                ) from None
            continue
        except (ConnectionLostError, OutcomeUnknownError) as error:
            # Ids make a second attempt safe; a look tells new records from those that were known before this call.
            if not took_effect(book.ledger, error, admit.is_there if admit else lambda tx: False) or revisions:
                if time.monotonic() >= last_retry:
                    raise
                continue
        result = AppendResult(known=known + doubled, revised=len(fates))
        if admit is None or admit.stale is None:
            return result, fates
        from rollbook.book.compaction import after_append

        book.known_kinds |= admit.columns
        book.untold = None
        after_append(book)
        fates |= {tag.uid: "stale" if i in admit.stale else "admitted" for i, tag in enumerate(new.tags)}
        return result + AppendResult(admitted=len(fresh), stale=len(admit.stale)), fates


def _deduplicate(coming: PendingAppend) -> tuple[PendingAppend, int]:
    """Each id once: the same record twice in one append counts once."""
    first: dict[str, int] = {}
    for i, tag in enumerate(coming.tags):
        j = first.setdefault(tag.uid, i)
        if coming.digests.whole[i] != coming.digests.whole[j]:
            raise ConflictError(f"append: records {j} and {i} are different and have the same id {tag.uid!r}")
    doubled = len(coming.tags) - len(first)
    return (coming.take(list(first.values())), doubled) if doubled else (coming, 0)


def _classify(tx: Transaction, coming: PendingAppend) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Which records are new, how many are known, and which known ones (index, number) may bring new fields."""
    place = {tag.uid: i for i, tag in enumerate(coming.tags)}
    fresh = dict.fromkeys(place.values())
    known = 0
    revisions = []
    for start in range(0, len(place), 10_000):
        part = list(place)[start : start + 10_000]
        for seq, uid, whole, core, evaluation, gone in tx.all(
            f"SELECT seq, uid, whole, core, evaluation, gone FROM records WHERE uid {tx.in_texts}", (tx.array(part),)
        ):
            i = place[uid]
            if gone == "rewound" or (gone is not None and whole is None):
                continue  # The id is free: see `FREE`.
            del fresh[i]
            if bool(evaluation) != coming.evaluation:
                raise ConflictError(
                    f"{uid}: got it for {_purpose(coming.evaluation)}, it is there for {_purpose(evaluation)}"
                )
            same = whole is not None and bytes(whole) == coming.digests.whole[i]
            if same or tx.one("SELECT 1 FROM revisions WHERE seq = ? AND whole = ?", (seq, coming.digests.whole[i])):
                known += 1
            elif gone is not None:
                # What was sampled is the same: it stays gone, and late fields have nothing to be added to.
                if core is None or bytes(core) != coming.digests.core[i]:
                    raise ConflictError(f"{uid}: got a record under the id of one that is gone ({gone})")
                known += 1
            else:
                revisions.append((i, seq))
    return list(fresh), known, revisions


def _purpose(evaluation: Any) -> str:
    return "evaluation" if evaluation else "training"


def check_tokenizer(tx: Transaction, book: Book) -> None:
    """Raise if the book's records are of another tokenizer than its opener named."""
    if book.tokenizer is None:
        return
    row = tx.one("SELECT value FROM meta WHERE key = 'tokenizer'")
    if row is not None and row[0] != book.tokenizer:
        raise BookError(f"tokenizer: got {book.tokenizer!r}, the book's records were made with {row[0]!r}")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an append's bytes were put: one frame, and the media that the book did not have."""

    frame: Place
    media: dict[str, Place]
    uses: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Records as they are written: a frame, and the media that it refers to."""

    frame: Any
    blobs: Mapping[str, attachments.Blob]
    uses: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, coming: PendingAppend) -> Encoded:
        """Encode records, unless they are encoded already."""
        if coming.frame is not None:
            return cls(coming.frame, coming.blobs, coming.uses)
        columns = as_experiences(coming.many)
        lifted = attachments.extract(columns, evaluation=[coming.evaluation] * len(columns))
        return cls(encode(lifted.stripped), lifted.blobs, lifted.uses)

    def parts(self, known: Collection[str]) -> tuple[list[Any], list[str]]:
        """What is written: the frame, then the media that the book does not know; and the hashes of those."""
        new = [key for key in self.blobs if key not in known]
        return [self.frame, *(self.blobs[key].data for key in new)], new

    def known_media(self, tx: Transaction) -> set[str]:
        """Those of its media that the book has."""
        if not self.blobs:
            return set()
        hashes = tx.array(list(self.blobs))
        return {key for (key,) in tx.all(f"SELECT hash FROM media WHERE hash {tx.in_texts}", (hashes,))}

    def stored(self, places: Sequence[Place], new: Sequence[str]) -> Stored:
        """Where its parts were put."""
        return Stored(places[0], dict(zip(new, places[1:], strict=True)), self.uses)


def store_all(book: Book, admits: Sequence[AppendTransaction]) -> None:
    """Put the bytes of appends on the shelf, with one sync; those that are there already stay where they are."""
    admits = [admit for admit in admits if admit.stored is None]
    if not admits:
        return
    known: set[str] = set()
    if any(admit.encoded.blobs for admit in admits):
        with book.ledger.read() as tx:
            known = set().union(*(admit.encoded.known_media(tx) for admit in admits))
    listed = [admit.encoded.parts(known) for admit in admits]
    parts = [part for parts, _ in listed for part in parts]
    if book.quota is not None:
        check_quota(book, sum(map(len, parts)))
    places = book.shelf.put(parts)
    start = 0
    for admit, (own_parts, new) in zip(admits, listed, strict=True):
        admit.stored = admit.encoded.stored(places[start : start + len(own_parts)], new)
        start += len(own_parts)
        admit.keep_vocabulary()


def check_quota(book: Book, size: int) -> None:
    """Raise unless so many bytes more fit into the book's quota, after making room for them if need be."""
    from rollbook.book.compaction import make_room

    have = sum(book.shelf.segments().values())
    if have + size > book.quota and not make_room(book, size):  # type: ignore[operator]
        with book.ledger.read() as tx:
            states = (work.WAITING, work.COOLING, work.LEASED)
            counts = {
                consumer.name: work.count_rows(tx, consumer, *states)[0] + inbox.inbox_size(tx, consumer.id)
                for consumer in consumers.all_consumers(tx)
            }
        raise QuotaExceededError(
            f"quota: the book has {sum(book.shelf.segments().values())} bytes and would get {size} more, expected at "
            f"most {book.quota}; nothing that could be removed was left"
            + "".join(f"; consumer {name!r} is not done with {n} records" for name, n in counts.items() if n)
        )


def _limiter_wait(tx: Transaction, evaluation: bool, count: int) -> str | None:
    """Why a limiter holds these records back, if one does."""
    if evaluation or not count:
        return None
    for consumer in consumers.all_consumers(tx):
        if consumer.settings.ratio is not None:
            consumer.inserts += inbox.inbox_size(tx, consumer.id)
            reason = _limiter_reason(tx, consumer, count)
            if reason is not None:
                return reason
    return None


class _ConcurrentAppendError(Exception):
    """Other writers changed what is new, or filled what a limiter leaves: look again."""


class AppendTransaction:
    """New records, in two steps: `store` writes their bytes, a call writes the ledger in a transaction. A shelf that
    lies in the ledger's database gets the bytes in the same transaction."""

    def __init__(self, book: Book, coming: PendingAppend) -> None:
        self.book = book
        self.coming = coming
        self.columns = tags.column_types(coming.many) - book.known_kinds
        self.encoded = Encoded.of(coming)
        self.stored: Stored | None = None
        self.placed: Stored | None = None
        """Where the last call found or put the bytes."""
        self.vocabulary: str | None = None
        self.stale: set[int] | None = None
        """Which records were too old for some consumer; `None` until they are written."""

    def store(self) -> None:
        """Put their bytes on the shelf, once."""
        if not self.book.shelf.transactional:
            store_all(self.book, [self])
            return
        if self.book.quota is not None:
            check_quota(self.book, sum(map(len, self.encoded.parts(())[0])))
        self.keep_vocabulary()

    def keep_vocabulary(self) -> None:
        """Prepare the tokenizer's vocabulary for the ledger, if that does not have it."""
        if self.book.untold is not None and self.vocabulary is None:
            from rollbook.book.vocabularies import encode_vocabulary

            self.vocabulary = encode_vocabulary(self.book)

    def is_there(self, tx: Transaction) -> bool:
        """Whether a call wrote the ledger and was committed."""
        frame = None if self.placed is None else self.placed.frame
        if frame is None:
            return False
        place = (self.coming.tags[0].uid, frame.segment, frame.offset)
        return tx.one("SELECT 1 FROM records WHERE uid = ? AND segment = ? AND start = ?", place) is not None

    def __call__(self, tx: Transaction) -> None:
        book, coming = self.book, self.coming
        uids = [tag.uid for tag in coming.tags]
        same_uids, consumer_rows, meta_rows, [(base,)] = tx.ask(
            (f"SELECT seq, uid, ({FREE}) FROM records WHERE uid {tx.in_texts}", (tx.array(uids),)),
            (consumers.SELECT_CONSUMERS, ()),
            ("SELECT key, value FROM meta WHERE key IN ('tokenizer', 'policy_version', 'lineage')", ()),
            tx.next_number("records", len(uids)),
        )
        meta = dict(meta_rows)
        if not all(free for _, _, free in same_uids):
            raise _ConcurrentAppendError
        if book.tokenizer is not None and meta.get("tokenizer", book.tokenizer) != book.tokenizer:
            raise _ConcurrentAppendError
        self.placed = stored = self._placed(tx)
        purging.seal_purged(tx, book, stored.frame.segment)
        listening = [] if coming.evaluation else consumers.parse_consumers(consumer_rows)
        # Where an append depends on how many records there are, or the other way round, appends come one by one.
        limited = []
        for consumer in [each for each in listening if each.settings.ratio or each.settings.max_size]:
            limited.append(_counted(tx, book, consumer))
            if _limiter_reason(tx, limited[-1], len(uids)):
                raise _ConcurrentAppendError
        if same_uids:
            renamed = [(f"{uid}~{seq}", seq) for seq, uid, _ in sorted(same_uids)]
            tx.many("UPDATE records SET uid = ? WHERE seq = ?", renamed)
        insert_records(tx, coming, stored, base)
        stale: set[int] = set()
        numbers: dict[int, str] = {}
        lineage = lineages.parse_lineage(meta)
        if lineage.number and lineages.name_lineage(coming.many):
            lineage = lineages.read_lineage(tx, lock=True)
        newest = [tag.version_max for tag in coming.tags]
        abandoned = lineage.admit(tx, coming.many, base, newest) if lineage.number else set()
        for consumer in listening:
            key = consumer.settings.sampler.key
            if key is not None and key not in tags.IndexColumns._fields:
                numbers[consumer.id] = json.dumps(tags.number_column(coming.many, key))
            if consumer.settings.max_staleness is not None:
                floor = work.version_floor(lineage.announced, consumer.settings.max_staleness)
                versions = [tag.version_min for tag in coming.tags]
                stale |= abandoned
                stale.update(i for i, v in enumerate(versions) if floor is not None and v is not None and v < floor)
            if consumer.waiting > tx.now:
                tx.notify(consumer.id)
        inbox.add_to_inbox(tx, [consumer.id for consumer in listening], base, len(uids), numbers)
        for consumer in limited:
            while not inbox.drain_inbox(tx, book, consumer):
                pass
            consumers.save_consumer(tx, consumer)
        if self.columns:
            tx.insert("columns", ("name", "type"), sorted(self.columns), "ON CONFLICT DO NOTHING")
        if book.tokenizer is not None and ("tokenizer" not in meta or self.vocabulary is not None):
            tx.run("INSERT INTO meta (key, value) VALUES ('tokenizer', ?) ON CONFLICT DO NOTHING", (book.tokenizer,))
            if self.vocabulary is not None:
                check_tokenizer(tx, book)
                new = "INSERT INTO meta (key, value) VALUES ('vocabulary', ?) ON CONFLICT DO NOTHING"
                tx.run(new, (self.vocabulary,))
        self.stale = stale

    def _placed(self, tx: Transaction) -> Stored:
        """Where the bytes are, written now or before, and still there."""
        if self.book.shelf.transactional:
            parts, new = self.encoded.parts(self.encoded.known_media(tx))
            return self.encoded.stored(self.book.shelf.insert(tx, parts), new)  # type: ignore[attr-defined]
        stored = self.stored
        if stored is None:
            raise _ConcurrentAppendError
        segments = {stored.frame.segment, *(place.segment for place in stored.media.values())}
        if not all(map(self.book.shelf.has, segments)):
            raise _ConcurrentAppendError
        borrowed = _borrowed(stored)
        if borrowed and len(borrowed) > len(
            tx.all(f"SELECT hash FROM media WHERE hash {tx.in_texts}", (tx.array(borrowed),))
        ):
            raise _ConcurrentAppendError  # A medium that was known has been removed meanwhile.
        return stored


def _counted(tx: Transaction, book: Book, consumer: Consumer) -> Consumer:
    """A consumer, locked, whose counts include every record before this append."""
    locked = consumers.find_consumer(tx, consumer.name, lock=True)
    if locked is None:
        raise _ConcurrentAppendError
    while not inbox.drain_inbox(tx, book, locked):
        pass
    return locked


def _borrowed(stored: Stored) -> list[str]:
    return list({key for keys in stored.uses for key in keys if key not in stored.media})


def _limiter_reason(tx: Transaction, consumer: Consumer, count: int) -> str | None:
    ratio = consumer.settings.ratio
    if ratio is None or ratio.inserts_left(consumer.inserts, consumer.samples) >= count:
        return None
    if not _can_go_on(tx, consumer):
        # Nothing is there to be handed out (groups that wait for their other runs): holding back would be for ever.
        return None
    if count > ratio.append_size:
        raise BackPressureError(
            f"append: got {count} records at once, consumer {consumer.name!r} lets at most append_size = "
            f"{ratio.append_size} in; append them in smaller pieces"
        )
    return (
        f"consumer {consumer.name!r} has {consumer.inserts} records and took {consumer.samples}: {count} more would "
        f"pass its ratio of {ratio.ratio:g} by more than {ratio.slack:g}"
    )


def _can_go_on(tx: Transaction, consumer: Consumer) -> bool:
    """Whether something is leased, rests, or could be leased now, so that samples can catch up without more inserts."""
    if work.count_rows(tx, consumer, work.LEASED, work.COOLING)[0]:
        return True
    if consumer.grouped:
        return bool(tx.one("SELECT 1 FROM groups WHERE consumer = ? AND ready = 1 LIMIT 1", (consumer.id,)))
    return work.count_rows(tx, consumer, work.WAITING)[0] > 0


def _wait(why: str, end: float | None) -> None:
    if end is not None and time.monotonic() >= end:
        raise BackPressureError(f"append: held back until the time was up, nothing was written: {why}")
    time.sleep(0.01)


def insert_records(
    tx: Transaction, coming: PendingAppend, stored: Stored | None, base: int, gone: str | None = None
) -> None:
    """Insert the records' rows, numbered from `base` on."""
    count = len(coming.tags)
    place = (None, None, None) if stored is None else (stored.frame.segment, stored.frame.offset, stored.frame.length)
    share = 0 if stored is None else -(-stored.frame.length // count)
    tx.insert(
        "records",
        _COLUMNS,
        [
            (
                base + i,
                *coming.tags[i],
                int(coming.evaluation),
                tx.now,
                0,
                None if stored is None else coming.digests.whole[i],
                None if stored is None else coming.digests.core[i],
                *place,
                None if stored is None else i,
                share,
                gone,
            )
            for i in range(count)
        ],
    )
    if stored is not None and stored.uses:
        # Another writer may have brought the same medium: its place stays, this one's bytes are left to compaction.
        tx.insert(
            "media",
            ("hash", "segment", "start", "size"),
            [(key, p.segment, p.offset, p.length) for key, p in stored.media.items()],
            "ON CONFLICT DO NOTHING",
        )
        uses = [(key, base + i) for i, keys in enumerate(stored.uses) for key in keys]
        tx.insert("media_uses", ("hash", "seq"), uses)
    detail = {"evaluation": True} if coming.evaluation else None
    work.record_events(tx, [work.Event("admitted", base + i, detail=detail) for i in range(count)])
    reports.admitted(tx, coming.evaluation, count)


def append_tombstones(book: Book, eids: Sequence[Any], reason: str, group_size: int | None) -> int:
    """See `Book.fail`."""
    from rollbook.core.experience import Experience

    if reason in ("deleted", "rewound"):
        raise ValueError(f"reason: got {reason!r}, which the ledger says of records; expected another word")
    rows = [Experience(eid=eid, tokens=[0, 0], group_size=group_size) for eid in eids]
    many = from_rows(rows)
    found = [
        tag._replace(length=0, prompt_tokens=0, response_tokens=0, trained_tokens=0) for tag in tags.index_columns(many)
    ]
    coming = PendingAppend(many, digests.content_hashes(many), found, False)
    with inbox.write_drained(book) as tx:
        # A run that has a record, or failed already, is known: ids end in chance, and who starts again fails it again.
        gids, uids = tx.array([tag.gid for tag in found]), tx.array([tag.uid for tag in found])
        runs, same_uids = tx.ask(
            (
                "SELECT gid, run FROM records WHERE evaluation = 0 AND (gone IS NULL OR gone <> 'rewound') "
                f"AND gid {tx.in_texts}",
                (gids,),
            ),
            (f"SELECT seq, uid, ({FREE}) FROM records WHERE uid {tx.in_texts}", (uids,)),
        )
        known = set(map(tuple, runs))
        taken = {uid for _, uid, free in same_uids if not free}
        first = {(tag.gid, tag.run): i for i, tag in reversed(list(enumerate(found)))}
        fresh = sorted(i for run, i in first.items() if run not in known and found[i].uid not in taken)
        if not fresh:
            return 0
        coming = coming.take(fresh)
        again = {tag.uid for tag in coming.tags}
        tx.many(
            "UPDATE records SET uid = ? WHERE seq = ?",
            [(f"{uid}~{seq}", seq) for seq, uid, free in same_uids if free and uid in again],
        )
        base = tx.one(*tx.next_number("records", len(fresh)))[0]
        insert_records(tx, coming, None, base, reason)
        for consumer in consumers.all_consumers(tx):
            work.enter_rows(
                tx,
                consumer,
                [inbox.new_row(consumer, base + i, tag.gid, None, None, reason) for i, tag in enumerate(coming.tags)],
            )
            consumers.save_consumer(tx, consumer)
    return len(fresh)


def configure_consumer(
    tx: Transaction, book: Book, name: str, settings: dict[str, Any], *, create: bool, change: bool
) -> Settings:
    """See `Book.consumer`."""
    if create and consumers.find_consumer(tx, name) is None:
        return book.make_consumer(tx, name, settings).settings
    current = consumers.get_consumer(tx, name)
    new = current.settings.changed(settings)
    if new != current.settings and not change:
        names = [key for key in settings if getattr(new, key) != getattr(current.settings, key)]
        raise BookError(
            f"consumer {name!r}: {names[0]}: got {getattr(new, names[0])!r}, the book has "
            f"{getattr(current.settings, names[0])!r}; change=True changes it for everybody"
        )
    if new != current.settings:
        consumers.save_settings(tx, current, new)
        # All that waits is ranked anew, piece by piece, before the next lease.
        current.state["unranked"] = current.state["oversized"] = 1
        consumers.save_consumer(tx, current)
        tx.run("UPDATE inbox SET numbers = NULL WHERE consumer = ?", (current.id,))  # those of the former key
        # Whoever waits for a lease looks again when there is an event.
        detail = {"settings": json.loads(new.to_json())}
        work.record_events(tx, [work.Event("configured", consumer=current.id, detail=detail)])
    return new


def rerank_queue(tx: Transaction, consumer: Consumer, book: Book, most: int) -> bool:
    """Rank waiting records anew, for a sampler or a seed that has changed, and hold a new bound on their number; return
    whether that is done."""
    start = consumer.state.get("unranked")
    if start is None:
        if "oversized" not in consumer.state or not work.drop_over_size(tx, consumer, most):
            return "oversized" not in consumer.state
        del consumer.state["oversized"]
        return True
    sampler = consumer.settings.sampler
    # What is done with may have no bytes any more to read its number from, and needs no rank.
    rows = work.select_rows(
        tx,
        "consumer = ? AND seq >= ? AND state IN ('waiting', 'cooling', 'leased') ORDER BY seq LIMIT ?",
        (consumer.id, start, most),
    )
    seqs = [row.seq for row in rows]
    values = [None] * len(seqs) if sampler.key is None else reading.read_numbers(book, tx, seqs, sampler.key)
    moves = []
    for row, value in zip(rows, values, strict=True):
        item = consumer.item(row.seq, row.uses, row.version, value)
        rank = sampler.rank(item, consumer.state)
        moves.append((row, row._replace(value=value, weight=sampler.weight(item), rank=rank)))
    # Groups are made anew from their members when all of those have their ranks.
    grouped, consumer.grouped = consumer.grouped, False
    work.change_rows(tx, consumer, moves, [])
    consumer.grouped = grouped
    if len(rows) == most:
        consumer.state["unranked"] = seqs[-1] + 1
        return False
    del consumer.state["unranked"]
    if consumer.settings.max_staleness is not None:
        work.drop_abandoned_rows(tx, consumer)
    if consumer.grouped:
        groups.begin_groups(tx, consumer)
    return False
