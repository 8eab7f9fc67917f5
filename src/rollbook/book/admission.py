"""Admission: how records come into a book.

Invariant: bytes are on the shelf before the ledger speaks of them, and the ledger speaks of all records of an append or
of none. The same record again changes nothing; another one under its id is refused before anything is written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.book import (
    attachments,
    consumers,
    digests,
    groups,
    identities,
    kinds,
    reading,
    reports,
    revising,
    tags,
    work,
)
from rollbook.book.consumers import Consumer, Settings
from rollbook.book.errors import BackPressure, BookError, Conflict, QuotaExceeded
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.shelves import Place
from rollbook.experiences import Experiences, from_rows, uncollected
from rollbook.row_layout import RowLayout
from rollbook.wire import decode, encode

if TYPE_CHECKING:
    from rollbook.book.book import Book

FREE = "gone IS NOT NULL AND (gone = 'rewound' OR whole IS NULL)"
"""Rows whose ids may be taken again: records that a rewind dropped, and runs that failed and now gave a record."""
_COLUMNS = (
    *("seq", *tags.Tags._fields, "evaluation", "admitted", "revision", "whole", "core"),
    *("segment", "start", "size", "slot", "bytes", "gone"),
)


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did: how many records are new, how many were there already, how many of those got new fields."""

    admitted: int = 0
    known: int = 0
    revised: int = 0
    stale: int = 0
    """Of the admitted ones, how many were too old for some consumer as they came."""

    def __add__(self, other: Appended) -> Appended:
        return Appended(
            self.admitted + other.admitted,
            self.known + other.known,
            self.revised + other.revised,
            self.stale + other.stale,
        )


@dataclass(frozen=True, slots=True)
class Coming:
    """Records on their way in, with what the ledger will say of them."""

    many: Experiences | RowLayout
    digests: digests.Digests
    tags: Sequence[tags.Tags]
    evaluation: bool
    frame: Any = None
    """Their bytes, if they were made already."""
    blobs: Mapping[str, attachments.Blob] = field(default_factory=dict)
    """With `frame`: the media that it refers to."""
    uses: Sequence[tuple[str, ...]] = ()
    """With `frame`: the media of each record; empty if there are none."""

    def take(self, indices: list[int]) -> Coming:
        kept = digests.Digests(*([column[i] for i in indices] for column in self.digests))
        return Coming(self.select(indices), kept, [self.tags[i] for i in indices], self.evaluation)

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


def as_many(given: Any) -> Experiences:
    """One record, some, or columns, as columns."""
    return given if isinstance(given, Experiences) else from_rows(_rows(given), copy=False)


def _rows(records: Any) -> list[Any]:
    from rollbook.experience import Experience

    if isinstance(records, Experience):
        return [records]
    if isinstance(records, (str, bytes, dict)) or not isinstance(records, Iterable):
        raise ValueError(f"append: got {type(records).__name__}, expected an Experience, several, or Experiences")
    return list(records)


def _prepare(records: Experiences | list[Any], evaluation: bool) -> Coming:
    """Encode records, and compute what the ledger will say of them."""
    # Tensors are gathered once, into the frame; digests and tags are then taken there. A frame's memory is used again
    # by this thread's next append: columns that the caller holds stay out of it.
    with uncollected():
        layout = None if isinstance(records, Experiences) else RowLayout.of(records)
        if layout is not None and not attachments.may_hold_media(layout):
            return _described(layout, evaluation, encode(layout, out=_scratch.of), {}, ())
        columns = as_many(records)
        lifted = attachments.lift(columns)
        frame = encode(lifted.stripped, out=_scratch.of, settle=columns is not records)
        return _described(columns, evaluation, frame, lifted.blobs, lifted.uses if lifted.blobs else ())


def _described(records: Experiences | RowLayout, evaluation: bool, *encoded: Any) -> Coming:
    ids = identities.ids(records.columns["eid"])
    return Coming(records, digests.digests(records, ids), tags.tags(records, ids), evaluation, *encoded)


def append(
    book: Book, given: Any, *, evaluation: bool, author: str, timeout: float | None
) -> tuple[Appended, dict[str, str]]:
    """See `Book.append`; also, by id, which records were "admitted", too old as they came ("stale") or "revised"."""
    records = given if isinstance(given, Experiences) else _rows(given)
    if not records:
        return Appended(), {}
    coming, doubled = _once(_prepare(records, evaluation))
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        with book.ledger.read() as tx:
            fresh, known, revisions = _sorted_out(tx, coming)
            check_tokenizer(tx, book)
            held = _held(tx, evaluation, len(fresh))
        if held is not None:
            _wait(held, end)
            continue
        new = coming if len(fresh) == len(coming.tags) else coming.take(fresh)
        fates: dict[str, str] = {}
        try:
            admit = Admit(book, new) if fresh else None
            if revisions:
                # In one transaction with the new ones, which comes about only if one of them brings something.
                changed = revising.add(book, coming, revisions, author, admit)
                fates = dict.fromkeys(changed, "revised")
                known += len(revisions) - len(changed)
            if admit is not None and admit.stale is None:
                admit.store()
                with book.ledger.write() as tx:
                    admit(tx)
        except _Overtaken:
            continue
        result = Appended(known=known + doubled, revised=len(fates))
        if admit is None or admit.stale is None:
            return result, fates
        from rollbook.book.compaction import after_append

        book.known_kinds |= admit.columns
        book.untold = None
        after_append(book)
        fates |= {tag.uid: "stale" if i in admit.stale else "admitted" for i, tag in enumerate(new.tags)}
        return result + Appended(admitted=len(fresh), stale=len(admit.stale)), fates


def _once(coming: Coming) -> tuple[Coming, int]:
    """Each id once: the same record twice in one append counts once."""
    first: dict[str, int] = {}
    for i, tag in enumerate(coming.tags):
        j = first.setdefault(tag.uid, i)
        if coming.digests.whole[i] != coming.digests.whole[j]:
            raise Conflict(f"append: records {j} and {i} are different and have the same id {tag.uid!r}")
    doubled = len(coming.tags) - len(first)
    return (coming.take(list(first.values())), doubled) if doubled else (coming, 0)


def _sorted_out(tx: Transaction, coming: Coming) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Which records are new, how many are known, and which known ones (index, number) may bring new fields."""
    place = {tag.uid: i for i, tag in enumerate(coming.tags)}
    fresh = dict.fromkeys(place.values())
    known = 0
    revisions = []
    for marks, part in chunks(list(place)):
        for seq, uid, whole, core, evaluation, gone in tx.all(
            f"SELECT seq, uid, whole, core, evaluation, gone FROM records WHERE uid IN ({marks})", part
        ):
            i = place[uid]
            if gone == "rewound" or (gone is not None and whole is None):
                continue  # The id is free: see `FREE`.
            del fresh[i]
            if bool(evaluation) != coming.evaluation:
                raise Conflict(
                    f"{uid}: got it for {_purpose(coming.evaluation)}, it is there for {_purpose(evaluation)}"
                )
            same = whole is not None and bytes(whole) == coming.digests.whole[i]
            if same or tx.one("SELECT 1 FROM revisions WHERE seq = ? AND whole = ?", (seq, coming.digests.whole[i])):
                known += 1
            elif gone is not None:
                # What was sampled is the same: it stays gone, and late fields have nothing to be added to.
                if core is None or bytes(core) != coming.digests.core[i]:
                    raise Conflict(f"{uid}: got a record under the id of one that is gone ({gone})")
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


def _store(book: Book, coming: Coming) -> Stored:
    frame, blobs, uses = coming.frame, coming.blobs, coming.uses
    if frame is None:
        lifted = attachments.lift(as_many(coming.many))
        frame, blobs, uses = encode(lifted.stripped), lifted.blobs, lifted.uses
    unknown = _unknown(book, list(blobs))
    parts = [frame, *(blobs[key].data for key in unknown)]
    if book.quota is not None:
        check_quota(book, sum(map(len, parts)))
    places = book.shelf.put(parts)
    return Stored(places[0], dict(zip(unknown, places[1:], strict=True)), uses)


def _unknown(book: Book, hashes: list[str]) -> list[str]:
    if not hashes:
        return []
    known: set[str] = set()
    with book.ledger.read() as tx:
        for marks, part in chunks(hashes):
            known.update(row[0] for row in tx.all(f"SELECT hash FROM media WHERE hash IN ({marks})", part))
    return [key for key in hashes if key not in known]


def check_quota(book: Book, size: int) -> None:
    """Raise unless so many bytes more fit into the book's quota, after making room for them if need be."""
    from rollbook.book.compaction import make_room

    have = sum(book.shelf.segments().values())
    if have + size > book.quota and not make_room(book, size):  # type: ignore[operator]
        with book.ledger.read() as tx:
            held = tx.all(
                "SELECT consumers.name, SUM(tallies.n) FROM tallies JOIN consumers ON consumers.id = tallies.consumer "
                "WHERE tallies.state IN ('waiting', 'cooling', 'leased') AND tallies.n > 0 GROUP BY 1 ORDER BY 1"
            )
        raise QuotaExceeded(
            f"quota: the book has {sum(book.shelf.segments().values())} bytes and would get {size} more, expected at "
            f"most {book.quota}; nothing that could be removed was left"
            + "".join(f"; consumer {name!r} is not done with {n} records" for name, n in held)
        )


def _numbers(coming: Coming, key: str) -> list[float | None]:
    """A sampler's number of each record, from its tags if it is one of them."""
    if key in tags.Tags._fields:
        found = [getattr(tag, key) for tag in coming.tags]
        return [float(value) if isinstance(value, (int, float)) else None for value in found]
    return tags.numbers(coming.many, key)


def _held(tx: Transaction, evaluation: bool, count: int) -> str | None:
    """Why a limiter holds these records back, if one does."""
    if evaluation or not count:
        return None
    return next(filter(None, (_held_back(tx, consumer, count) for consumer in consumers.all_consumers(tx))), None)


class _Overtaken(Exception):
    """Other writers changed what is new, or filled what a limiter leaves: look again."""


class Admit:
    """New records, in two steps: `store` puts their bytes on the shelf, a call writes the ledger in a transaction."""

    def __init__(self, book: Book, coming: Coming) -> None:
        self.book = book
        self.coming = coming
        self.columns = kinds.kinds_of(coming.many) - book.known_kinds
        self.stored: Stored | None = None
        self.vocabulary: str | None = None
        self.stale: set[int] | None = None
        """Which records were too old for some consumer; `None` until they are written."""

    def store(self) -> None:
        """Put their bytes on the shelf, once."""
        self.stored = self.stored or _store(self.book, self.coming)
        if self.book.untold is not None and self.vocabulary is None:
            from rollbook.book.vocabularies import to_keep

            self.vocabulary = to_keep(self.book)

    def __call__(self, tx: Transaction) -> None:
        book, coming, stored = self.book, self.coming, self.stored
        if stored is None:
            raise _Overtaken
        values: dict[str, list[float | None]] = {}
        for marks, part in chunks([tag.uid for tag in coming.tags]):
            if tx.one(f"SELECT 1 FROM records WHERE NOT ({FREE}) AND uid IN ({marks})", part):
                raise _Overtaken
        if not all(
            book.shelf.has(name) for name in {stored.frame.segment, *(p.segment for p in stored.media.values())}
        ):
            raise _Overtaken
        if any(not tx.one("SELECT 1 FROM media WHERE hash = ?", (key,)) for key in _borrowed(stored)):
            raise _Overtaken  # A medium that was known has been removed meanwhile.
        listening = [] if coming.evaluation else consumers.all_consumers(tx)
        for consumer in listening:
            if _held_back(tx, consumer, len(coming.tags)):
                raise _Overtaken
            key = consumer.settings.sampler.key
            if key is not None and key not in values:
                values[key] = _numbers(coming, key)
        base = _insert(tx, coming, stored)
        stale: set[int] = set()
        announced = work.announced(tx)
        for consumer in listening:
            stale |= _offer(tx, consumer, coming, base, values, announced)
        if self.columns:
            tx.many("INSERT INTO columns (name, type) VALUES (?, ?) ON CONFLICT DO NOTHING", sorted(self.columns))
        if book.tokenizer is not None:
            tx.run("INSERT INTO meta (key, value) VALUES ('tokenizer', ?) ON CONFLICT DO NOTHING", (book.tokenizer,))
            if self.vocabulary is not None:
                check_tokenizer(tx, book)
                new = "INSERT INTO meta (key, value) VALUES ('vocabulary', ?) ON CONFLICT DO NOTHING"
                tx.run(new, (self.vocabulary,))
        self.stale = stale


def _borrowed(stored: Stored) -> list[str]:
    return list({key for keys in stored.uses for key in keys if key not in stored.media})


def _held_back(tx: Transaction, consumer: Consumer, count: int) -> str | None:
    ratio = consumer.settings.ratio
    if ratio is None or ratio.inserts_left(consumer.inserts, consumer.samples) >= count:
        return None
    if not _can_go_on(tx, consumer):
        # Nothing is there to be handed out (groups that wait for their other runs): holding back would be for ever.
        return None
    if count > ratio.append_size:
        raise BackPressure(
            f"append: got {count} records at once, consumer {consumer.name!r} lets at most append_size = "
            f"{ratio.append_size} in; append them in smaller pieces"
        )
    return (
        f"consumer {consumer.name!r} has {consumer.inserts} records and took {consumer.samples}: {count} more would "
        f"pass its ratio of {ratio.ratio:g} by more than {ratio.slack:g}"
    )


def _can_go_on(tx: Transaction, consumer: Consumer) -> bool:
    """Whether something is leased, rests, or could be leased now, so that samples can catch up without more inserts."""
    if work.tally(tx, consumer, work.LEASED, work.COOLING)[0]:
        return True
    if consumer.grouped:
        return bool(tx.one("SELECT 1 FROM groups WHERE consumer = ? AND ready = 1 LIMIT 1", (consumer.id,)))
    return work.tally(tx, consumer, work.WAITING)[0] > 0


def _wait(why: str, end: float | None) -> None:
    if end is not None and time.monotonic() >= end:
        raise BackPressure(f"append: held back until the time was up, nothing was written: {why}")
    time.sleep(0.01)


def _insert(tx: Transaction, coming: Coming, stored: Stored | None, gone: str | None = None) -> int:
    """The records' rows; the number of the first."""
    # A record under an id that is free again takes a number of its own.
    uids = [tag.uid for tag in coming.tags]
    for marks, part in chunks(uids):
        for seq, uid in tx.all(f"SELECT seq, uid FROM records WHERE ({FREE}) AND uid IN ({marks})", part):
            tx.run("UPDATE records SET uid = ? WHERE seq = ?", (f"{uid}~{seq}", seq))
    base = int(tx.one("SELECT COALESCE(MAX(seq), 0) + 1 FROM records")[0])
    count = len(uids)
    place = (None, None, None) if stored is None else (stored.frame.segment, stored.frame.offset, stored.frame.length)
    share = 0 if stored is None else -(-stored.frame.length // count)
    work.insert(
        tx,
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
        tx.many(
            "INSERT INTO media (hash, segment, start, size) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [(key, p.segment, p.offset, p.length) for key, p in stored.media.items()],
        )
        tx.many(
            "INSERT INTO media_uses (hash, seq) VALUES (?, ?)",
            [(key, base + i) for i, keys in enumerate(stored.uses) for key in keys],
        )
    reports.admitted(tx, coming.evaluation, count)
    detail = {"evaluation": True} if coming.evaluation else None
    work.record(tx, [work.Event("admitted", base + i, detail=detail) for i in range(count)])
    return base


def _offer(
    tx: Transaction,
    consumer: Consumer,
    coming: Coming,
    base: int,
    values: dict[str, list[float | None]],
    announced: int | None,
) -> set[int]:
    """The records' rows for one consumer; which were too old."""
    settings = consumer.settings
    key = settings.sampler.key
    numbers = values[key] if key is not None else [None] * len(coming.tags)
    floor = work.floor_of(announced, settings.max_staleness)
    made = []
    stale = set()
    for i, (tag, value) in enumerate(zip(coming.tags, numbers, strict=True)):
        old = floor is not None and tag.version_min is not None and tag.version_min < floor
        if old:
            stale.add(i)
        made.append(new_row(consumer, base + i, tag.gid, tag.version_min, value, "stale" if old else None))
    work.enter(tx, consumer, made)
    work.keep_size(tx, consumer)
    consumers.save(tx, consumer)
    return stale


def new_row(
    consumer: Consumer, seq: int, gid: str, version: int | None, value: float | None, dropped: str | None
) -> work.Row:
    """A record as a consumer first has it."""
    sampler = consumer.settings.sampler
    item = consumer.item(seq, 0, version, value)
    state = work.WAITING if dropped is None else work.DROPPED
    rank = sampler.rank(item, consumer.state) if dropped is None else 0.0
    return work.Row(seq, gid, state, dropped, rank, value, sampler.weight(item), version, 0, 0, None, None)


def tombstones(book: Book, eids: Sequence[Any], reason: str, group_size: int | None) -> int:
    """See `Book.fail`."""
    from rollbook.experience import Experience

    if reason in ("deleted", "rewound"):
        raise ValueError(f"reason: got {reason!r}, which the ledger says of records; expected another word")
    rows = [Experience(eid=eid, tokens=[0, 0], group_size=group_size) for eid in eids]
    many = from_rows(rows)
    found = [tag._replace(length=0, prompt_tokens=0, response_tokens=0, trained_tokens=0) for tag in tags.tags(many)]
    coming = Coming(many, digests.digests(many), found, False)
    with book.ledger.write() as tx:
        # A run that has a record, or failed already, is known: ids end in chance, and who starts again fails it again.
        known: set[tuple[str, int]] = set()
        for marks, part in chunks([tag.gid for tag in found]):
            sql = (
                "SELECT gid, run FROM records WHERE evaluation = 0 AND (gone IS NULL OR gone <> 'rewound') "
                f"AND gid IN ({marks})"
            )
            known.update((gid, run) for gid, run in tx.all(sql, part))
        taken: set[str] = set()
        for marks, part in chunks([tag.uid for tag in found]):
            taken.update(
                uid for (uid,) in tx.all(f"SELECT uid FROM records WHERE NOT ({FREE}) AND uid IN ({marks})", part)
            )
        first = {(tag.gid, tag.run): i for i, tag in reversed(list(enumerate(found)))}
        fresh = sorted(i for run, i in first.items() if run not in known and found[i].uid not in taken)
        if not fresh:
            return 0
        coming = coming.take(fresh)
        base = _insert(tx, coming, None, gone=reason)
        for consumer in consumers.all_consumers(tx):
            work.enter(
                tx,
                consumer,
                [new_row(consumer, base + i, tag.gid, None, None, reason) for i, tag in enumerate(coming.tags)],
            )
            consumers.save(tx, consumer)
    return len(fresh)


def enrol(tx: Transaction, consumer: Consumer, book: Book) -> None:
    """Offer a new consumer all that is in the book for training."""
    floor = work.floor_of(work.announced(tx), consumer.settings.max_staleness)
    last = 0
    while True:
        found = tx.all(
            "SELECT seq, gid, version_min, gone FROM records WHERE evaluation = 0 AND seq > ? ORDER BY seq LIMIT 1000",
            (last,),
        )
        if not found:
            break
        key = consumer.settings.sampler.key
        stored = [row[0] for row in found if row[3] is None]
        numbers = dict(zip(stored, reading.numbers(book, tx, stored, key), strict=True)) if key is not None else {}
        made = []
        for seq, gid, version, gone in found:
            old = floor is not None and version is not None and version < floor
            made.append(new_row(consumer, seq, gid, version, numbers.get(seq), gone or ("stale" if old else None)))
        work.enter(tx, consumer, made)
        last = found[-1][0]
    work.keep_size(tx, consumer)
    consumers.save(tx, consumer)


def configure(tx: Transaction, book: Book, name: str, settings: dict[str, Any], change: bool) -> Settings:
    """See `Book.consumer`."""
    found = consumers.find(tx, name)
    if found is None:
        return book.make_consumer(tx, name, settings).settings
    new = found.settings.changed(settings)
    if new != found.settings and not change:
        names = [key for key in settings if getattr(new, key) != getattr(found.settings, key)]
        raise BookError(
            f"consumer {name!r}: {names[0]}: got {getattr(new, names[0])!r}, the book has "
            f"{getattr(found.settings, names[0])!r}; change=True changes it for everybody"
        )
    if new != found.settings:
        consumers.configure(tx, found, new)
        rerank(tx, found, book)
        # Whoever waits for a lease looks again when there is an event.
        told = {"settings": json.loads(new.to_json())}
        work.record(tx, [work.Event("configured", consumer=found.id, detail=told)])
    return new


def rerank(tx: Transaction, consumer: Consumer, book: Book) -> None:
    """Rank all that waits anew, for a sampler or a seed that has changed, and hold the new bounds."""
    sampler = consumer.settings.sampler
    last = 0
    while True:
        # What is done with may have no bytes any more to read its number from, and needs no rank.
        found = work.rows(
            tx,
            "consumer = ? AND seq > ? AND state IN ('waiting', 'cooling', 'leased') ORDER BY seq LIMIT 1000",
            (consumer.id, last),
        )
        if not found:
            break
        seqs = [row.seq for row in found]
        values = [None] * len(seqs) if sampler.key is None else reading.numbers(book, tx, seqs, sampler.key)
        moves = []
        for row, value in zip(found, values, strict=True):
            item = consumer.item(row.seq, row.uses, row.version, value)
            rank = sampler.rank(item, consumer.state)
            moves.append((row, row._replace(value=value, weight=sampler.weight(item), rank=rank)))
        work.change(tx, consumer, moves, [])
        last = seqs[-1]
    if consumer.grouped:
        tx.run("DELETE FROM groups WHERE consumer = ?", (consumer.id,))
        consumer.state.pop("ready", None)
        groups.build(tx, consumer)
    work.forget_stale(tx, consumer, work.floor_of(work.announced(tx), consumer.settings.max_staleness))
    work.keep_size(tx, consumer)
    consumers.save(tx, consumer)
