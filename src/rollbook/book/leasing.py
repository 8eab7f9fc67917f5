"""Leases: an atomic claim on records or whole groups, with a fencing number and an end.

Invariant: a record is in at most one living lease of a consumer. Delivery is at least once; acknowledgement is exactly
once: a lease that has ended, by its holder or by the database's clock, changes nothing any more and says `LeaseLost`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.algorithms.registry import choice, number, whole_number
from rollbook.book import consumers, groups, reading, work
from rollbook.book.consumers import Consumer
from rollbook.book.errors import LeaseLost
from rollbook.book.ledger import Transaction, chunks
from rollbook.book.naming import text_of, uids_of
from rollbook.book.samplers import Proportional
from rollbook.book.windows import reached
from rollbook.progress import advise

if TYPE_CHECKING:
    from rollbook.batch import ExperienceBatch
    from rollbook.book.book import Book
    from rollbook.experience import Experience
    from rollbook.experiences import Experiences

POLL = (0.002, 0.05)
"""The shortest and the longest pause between two looks for more."""


class Wanted(NamedTuple):
    """What a lease asks for."""

    consumer: str
    most: int
    by: str
    max_staleness: int | None
    seconds: float | None
    holder: str


class Claim(NamedTuple):
    """What a lease got: records (number, id) in the order of their ranks, with their importance weights."""

    id: int
    seqs: list[int]
    uids: list[str]
    weights: list[float] | None
    expires: float
    seconds: float
    why: str
    """Why it is less than was asked for; empty if it is not."""


class Lease:
    """Records that are this holder's until it acknowledges them, gives them back, or makes no progress for too long.

    Use it as a context: leaving it by an exception, or without `ack`, gives the records back. Every `batch`,
    `experiences` and `renew` is progress and starts the time anew; a holder that hangs loses its records to others, and
    its `ack` then raises `LeaseLost`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> with book.lease(8) as lease:
    ...     print(len(lease), lease.short)
    ...     _ = lease.ack(step=1)
    1 asked for 8, got 1: no more was waiting
    >>> book.counts().trained
    1
    """

    def __init__(self, book: Book, wanted: Wanted, claim: Claim) -> None:
        self._book = book
        self._wanted = wanted
        self._claim = claim
        self._experiences: Experiences | None = None
        self._left = dict(zip(claim.uids, claim.seqs, strict=True))
        self._lost = False
        self._seconds = claim.seconds
        self.expires = claim.expires
        """When it ends without progress, by the database's clock, in seconds since 1970."""

    @property
    def fence(self) -> int:
        """The fencing number: larger than that of every lease before; 0 if nothing was leased."""
        return self._claim.id

    @property
    def uids(self) -> list[str]:
        """The ids of its records, in the sampler's order."""
        return list(self._claim.uids)

    @property
    def weights(self) -> list[float] | None:
        """Importance weights of a proportional sampler, one per record, at most 1; `None` for other samplers."""
        return None if self._claim.weights is None else list(self._claim.weights)

    @property
    def short(self) -> str:
        """Empty if all that was asked for is here; otherwise a sentence that says what is not, and why."""
        return self._claim.why

    @property
    def experiences(self) -> Experiences:
        """Its records."""
        if self._experiences is None:
            self._experiences = reading.fetch(self._book, self._claim.seqs)
        if self._left:
            self._progress()
        return self._experiences

    def batch(self, **options: Any) -> ExperienceBatch:
        """Its records as a batch (the options of `Experiences.batch`); with weights under `info["weights"]`."""
        made = self.experiences.batch(**options)
        if self._claim.weights is not None:
            import torch

            made.info = {**(made.info or {}), "weights": torch.tensor(self._claim.weights)}
        if self._left:
            self._progress()
        return made

    def _progress(self) -> None:
        """Start the time anew, once a good part of it is over: a database is not written for every look."""
        # More time than there ever was is left if the database's clock was put back.
        if self._claim.id and not self._seconds * 0.75 <= self.expires - self._book.now() <= self._seconds:
            self.renew()

    def renew(self, seconds: float | None = None) -> float:
        """Start the time anew, from now on with `seconds` if they are given; when it ends."""
        lasts = self._seconds if seconds is None else number("seconds", seconds, 0.0, 1e9)
        if not lasts > 0 and self._claim.id:
            raise ValueError(f"seconds: got {seconds!r}, expected a number above 0")
        if not self._claim.id:
            return self.expires
        with self._book.ledger.write() as tx:
            self._check(tx)
            ends = tx.now + lasts
            tx.run("UPDATE leases SET expires = ?, seconds = ? WHERE id = ?", (ends, lasts, self._claim.id))
        self.expires, self._seconds = ends, lasts
        return self.expires

    def ack(
        self,
        step: int | None = None,
        *,
        uids: Any = None,
        priorities: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """These records (or some of them: ids or records) were trained on, in optimizer step `step`; how many.

        `priorities`: new numbers for a sampler with a `key`, by id (`dict(zip(lease.uids, numbers))`). `detail`: what
        the ledger should say of all of them, `details` of each, by id (its micro-batch, its weight). Raises
        `LeaseLost`, and changes nothing, if the lease has ended.
        """
        if step is not None:
            step = whole_number("step", step)
            if step >= 1 << 63:
                raise ValueError(f"step: got {step}, expected a whole number of 64 bits")
        chosen = self._chosen(uids)
        given = {}
        if priorities is not None and not isinstance(priorities, Mapping):
            raise ValueError(
                f"priorities: got {type(priorities).__name__}, expected {{uid: number}}, as of "
                "zip(lease.uids, numbers), since batches have that order"
            )
        for uid, value in (priorities or {}).items():
            if uid not in chosen:
                raise ValueError(f"priorities: got {uid!r}, which is not acknowledged here")
            given[chosen[uid]] = number(f"priorities[{uid!r}]", value)
        told = {seq: dict(detail or {}) for seq in chosen.values()}
        for uid, more in (details or {}).items():
            if uid not in chosen:
                raise ValueError(f"details: got {uid!r}, which is not acknowledged here")
            told[chosen[uid]] = {**(detail or {}), **more}
        if not chosen:
            return 0
        with self._book.ledger.write() as tx:
            self._check(tx)
            consumer = _consumer(tx, self._wanted.consumer)
            if given and consumer.settings.sampler.key is None:
                raise ValueError(f"priorities: got some, and nothing follows them in {consumer.settings.sampler!r}")
            found = self._held(tx, consumer, chosen)
            _train(tx, consumer, found, step, self._claim.id, given, told)
            if len(chosen) == len(self._left):
                work.end_lease(tx, self._claim.id, "acked")
            consumers.save(tx, consumer)
            reached("during ack")
        self._settle(chosen)
        return len(found)

    def nack(self, reason: str = "given back", *, uids: Any = None, drop: bool = False) -> int:
        """Give records back, to be offered again at the place they had, or (`drop=True`) to be dropped; how many."""
        text_of("reason", reason)
        chosen = self._chosen(uids)
        if not chosen:
            return 0
        with self._book.ledger.write() as tx:
            self._check(tx)
            consumer = _consumer(tx, self._wanted.consumer)
            found = self._held(tx, consumer, chosen)
            if drop:
                work.drop(tx, consumer, found, reason)
            else:
                work.requeue(tx, consumer, found, "nacked", reason)
            if len(chosen) == len(self._left):
                work.end_lease(tx, self._claim.id, "nacked")
            consumers.save(tx, consumer)
        self._settle(chosen)
        return len(found)

    def _held(self, tx: Transaction, consumer: Consumer, chosen: Mapping[str, int]) -> list[work.Row]:
        """The rows that are still this lease's: a record that was deleted meanwhile is not."""
        return [row for row in work.rows_of(tx, consumer, list(chosen.values())) if row.lease == self._claim.id]

    def _chosen(self, uids: Any) -> dict[str, int]:
        if not self._claim.id:
            return {}
        if not self._left:
            raise LeaseLost(f"lease {self.fence}: all its records were acknowledged or given back already")
        if uids is None:
            return dict(self._left)
        listed = uids_of(uids)
        for uid in listed:
            if uid not in self._left:
                raise ValueError(f"uids: got {uid!r}, which this lease does not hold")
        return {uid: self._left[uid] for uid in listed}

    def _settle(self, chosen: Mapping[str, int]) -> None:
        for uid in chosen:
            del self._left[uid]

    def _check(self, tx: Transaction) -> None:
        row = tx.one("SELECT state, expires FROM leases WHERE id = ?", (self._claim.id,))
        self._lost = row is None or row[0] != "active" or row[1] <= tx.now
        if row is None or row[0] != "active":
            raise LeaseLost(f"lease {self.fence}: it is {row[0] if row else 'not in the book'}, nothing was changed")
        if row[1] <= tx.now:
            raise LeaseLost(
                f"lease {self.fence}: it ended {tx.now - row[1]:.3f} s ago, after {self._seconds:g} s without "
                "progress; its records are offered again, and nothing was changed"
            )

    # --- async: the same, in a thread -------------------------------------------------------------------------

    async def aack(self, step: int | None = None, **options: Any) -> int:
        """`ack` without blocking the event loop."""
        return await asyncio.to_thread(self.ack, step, **options)

    async def anack(self, reason: str = "given back", **options: Any) -> int:
        """`nack` without blocking the event loop."""
        return await asyncio.to_thread(self.nack, reason, **options)

    async def arenew(self, seconds: float | None = None) -> float:
        """`renew` without blocking the event loop."""
        return await asyncio.to_thread(self.renew, seconds)

    # --- a sequence, and a context ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._claim.seqs)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self.experiences)

    def __bool__(self) -> bool:
        return bool(self._claim.seqs)

    def __repr__(self) -> str:
        short = f"; {self.short}" if self.short else ""
        return f"Lease({len(self)} records, fence {self.fence}{short})"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        told = self._lost
        if self._left and self._claim.id:
            if error is None:
                advise(f"{len(self._left)} leased records were not acknowledged and go back: call lease.ack(step=...)")
            try:
                self.nack("not acknowledged" if error is None else _told(error))
            except LeaseLost:
                # Whoever was told by `ack` or `renew` need not hear it again.
                if error is None and not told:
                    raise

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)


def _told(error: BaseException) -> str:
    """An exception in a line that every database can keep."""
    text = f"{type(error).__name__}: {error}"[:200].replace("\0", "\ufffd")
    return text.encode("utf-8", "replace").decode("utf-8")


def _consumer(tx: Transaction, name: str) -> Consumer:
    found = consumers.find(tx, name)
    if found is None:
        raise LeaseLost(f"consumer {name!r}: it is no longer in the book")
    return found


def _train(
    tx: Transaction,
    consumer: Consumer,
    found: Sequence[work.Row],
    step: int | None,
    lease: int,
    priorities: Mapping[int, float],
    details: Mapping[int, Mapping[str, Any]],
) -> None:
    """Rows that were used once more: trained, or waiting (perhaps after a rest) for their next use."""
    sampler = consumer.settings.sampler
    most = consumer.settings.max_uses
    moves, events = [], []
    for row in found:
        value = priorities.get(row.seq, row.value)
        item = consumer.item(row.seq, row.uses + 1, row.version, value)
        again, rest = sampler.after(item)
        again = again and (most is None or item.uses < most)
        new = row._replace(
            uses=item.uses, lease=None, value=value, weight=sampler.weight(item), attempts=0, state=work.TRAINED
        )
        if again:
            state, until = (work.COOLING, tx.now + rest) if rest else (work.WAITING, None)
            new = new._replace(state=state, until=until, rank=sampler.rank(item, consumer.state))
        moves.append((row, new))
        # What rewinding needs to put the row back.
        told = {"uses": row.uses, "rank": row.rank, "value": row.value, **details[row.seq]}
        events.append(work.Event(work.TRAINED, row.seq, consumer.id, None, step, lease, told))
    work.change(tx, consumer, moves, events)


def tidy(tx: Transaction, book: Book, consumer: Consumer, max_staleness: int | None) -> None:
    """All that time alone brings about: leases that ended, rests that are over, records too old to be used."""
    work.expire(tx, consumer)
    work.thaw(tx, consumer)
    work.forget_old(tx, consumer)
    bound = consumer.settings.max_staleness if max_staleness is None else max_staleness
    work.forget_stale(tx, consumer, work.floor_of(work.announced(tx), bound))
    if max_staleness is not None and consumer.settings.max_staleness is None:
        work.forget_abandoned(tx, consumer)  # A consumer's own bound was held as they came.
    if consumer.grouped:
        groups.ripen(tx, consumer)


def attempt(book: Book, wanted: Wanted, last: bool) -> Claim | None:
    """Claim what is asked for; if it is not all there, `None`, or on the `last` look what there is."""
    with book.ledger.write() as tx:
        consumer = consumers.find(tx, wanted.consumer) or book.make_consumer(tx, wanted.consumer)
        if wanted.by == "group" and not consumer.grouped:
            groups.build(tx, consumer)
        tidy(tx, book, consumer, wanted.max_staleness)
        units, why = _available(tx, consumer, wanted)
        if units < wanted.most and not last:
            consumers.save(tx, consumer)
            return None
        claim = _claim(tx, consumer, wanted, min(units, wanted.most), why if units < wanted.most else "")
        consumers.save(tx, consumer)
    return claim


def _available(tx: Transaction, consumer: Consumer, wanted: Wanted) -> tuple[int, str]:
    """How many units can be had, at most as many as are wanted, and why no more."""
    settings = consumer.settings
    there = work.tally(tx, consumer, work.WAITING, work.COOLING, work.LEASED)[0]
    if there < settings.min_size:
        return 0, f"{there} records are there, MinSize waits for {settings.min_size}"
    table, ready = ("groups", "ready = 1") if wanted.by == "group" else ("work", "state = 'waiting'")
    units = tx.one(
        f"SELECT COUNT(*) FROM (SELECT 1 AS one FROM {table} WHERE consumer = ? AND {ready} LIMIT ?) AS found",
        (consumer.id, wanted.most),
    )[0]
    why = "no more was waiting" if wanted.by == "experience" else "no more groups were complete"
    ratio = settings.ratio
    if ratio is not None and units:
        left = ratio.samples_left(consumer.inserts, consumer.samples)
        if wanted.by == "group":
            fits = 0
            for gid in _ready(tx, consumer, units):
                left -= len(work.rows(tx, "consumer = ? AND gid = ? AND state = 'waiting'", (consumer.id, gid[0])))
                fits += left >= 0
            left = fits
        if left < units:
            units, why = left, f"SamplesToInserts waits for more inserts ({consumer.inserts} so far)"
    return units, why


def _ready(tx: Transaction, consumer: Consumer, count: int) -> list[tuple[str, float, float]]:
    return tx.all(
        "SELECT gid, rank, weight FROM groups WHERE consumer = ? AND ready = 1 ORDER BY rank, seq LIMIT ?",
        (consumer.id, count),
    )


def _claim(tx: Transaction, consumer: Consumer, wanted: Wanted, units: int, why: str) -> Claim:
    told = f"asked for {wanted.most}, got {units}: {why}" if why else ""
    sampler = consumer.settings.sampler
    found: list[work.Row] = []
    odds: list[float] = []
    if wanted.by == "group":
        _, total = consumer.state.get("ready", (0, 0.0))
        count = consumer.state.get("ready", (0, 0.0))[0]
        for gid, rank, weight in _ready(tx, consumer, units):
            members = work.rows(tx, "consumer = ? AND gid = ? AND state = 'waiting' ORDER BY seq", (consumer.id, gid))
            found += members
            odds += [weight] * len(members)
            sampler.took(rank, consumer.state)
    else:
        count, total = work.tally(tx, consumer, work.WAITING)
        found = work.rows(tx, "consumer = ? AND state = 'waiting' ORDER BY rank, seq LIMIT ?", (consumer.id, units))
        odds = [row.weight for row in found]
        for row in found:
            sampler.took(row.rank, consumer.state)
    if not found:
        return Claim(0, [], [], [] if isinstance(sampler, Proportional) else None, tx.now, 0.0, told)
    weights = None
    if isinstance(sampler, Proportional):
        raw = [(max(total, weight) / (count * weight)) ** sampler.beta for weight in odds]
        weights = [value / max(raw) for value in raw]
    seconds = consumer.settings.lease_seconds if wanted.seconds is None else wanted.seconds
    lease = int(tx.one("SELECT COALESCE(MAX(id), 0) + 1 FROM leases")[0])
    tx.run(
        "INSERT INTO leases (id, consumer, holder, made, expires, seconds, state, count) "
        "VALUES (?, ?, ?, ?, ?, ?, 'active', ?)",
        (lease, consumer.id, wanted.holder, tx.now, tx.now + seconds, seconds, len(found)),
    )
    work.change(
        tx,
        consumer,
        [(row, row._replace(state=work.LEASED, lease=lease)) for row in found],
        [work.Event(work.LEASED, row.seq, consumer.id, lease=lease) for row in found],
    )
    consumer.samples += len(found)
    names: dict[int, str] = {}
    for marks, part in chunks([row.seq for row in found]):
        names.update(tx.all(f"SELECT seq, uid FROM records WHERE seq IN ({marks})", part))
    seqs = [row.seq for row in found]
    return Claim(lease, seqs, [names[seq] for seq in seqs], weights, tx.now + seconds, seconds, told)


def wanted(
    consumer: str, count: Any, by: str, max_staleness: int | None, seconds: float | None, timeout: float
) -> Wanted:
    """Check what a lease asks for."""
    whole_number("lease", count, 1)
    choice("by", by, ("experience", "group"))
    if max_staleness is not None:
        whole_number("max_staleness", max_staleness)
    if seconds is not None and not number("seconds", seconds, 0.0, 1e9) > 0:
        raise ValueError(f"seconds: got {seconds!r}, expected a number above 0")
    number("timeout", timeout, 0.0)
    holder = f"{socket.gethostname()}/{os.getpid()}"
    return Wanted(consumer, min(int(count), 1 << 62), by, max_staleness, seconds, holder)


def pulse(book: Book, name: str) -> tuple[int, float | None]:
    """The last event of the book, and when time alone will next bring this consumer something."""
    with book.ledger.read() as tx:
        last = tx.one("SELECT COALESCE(MAX(id), 0) FROM events")[0]
        row = tx.one("SELECT id FROM consumers WHERE name = ?", (name,))
        if row is None:
            return last, None
        due = [
            tx.one(f"SELECT MIN({column}) FROM {table} WHERE consumer = ? AND {condition}", row)[0]
            for table, column, condition in (
                ("leases", "expires", "state = 'active'"),
                ("work", "until", "state = 'cooling'"),
                ("groups", "due", "ready = 0 AND due IS NOT NULL"),
            )
        ]
    return last, min((moment for moment in due if moment is not None), default=None)


def stirred(book: Book, name: str, seen: tuple[int, float | None]) -> bool:
    """Whether there may be more than there was: a look that writes nothing."""
    with book.ledger.read() as tx:
        if tx.one("SELECT COALESCE(MAX(id), 0) FROM events")[0] != seen[0]:
            return True
        return seen[1] is not None and tx.now >= seen[1]


def nothing(book: Book, consumer: str) -> Lease:
    """A lease of no record, where none was asked for."""
    return Lease(book, Wanted(consumer, 0, "experience", None, None, ""), Claim(0, [], [], None, 0.0, 0.0, ""))


def lease(book: Book, asked: Wanted, timeout: float) -> Lease:
    """See `Book.lease`."""
    end = time.monotonic() + timeout
    pause = POLL[0]
    while True:
        last = time.monotonic() >= end
        claim = attempt(book, asked, last)
        if claim is not None:
            return Lease(book, asked, claim)
        seen = pulse(book, asked.consumer)
        while time.monotonic() < end and not stirred(book, asked.consumer, seen):
            time.sleep(min(pause, max(end - time.monotonic(), 0)))
            pause = min(pause * 1.5, POLL[1])


async def alease(book: Book, asked: Wanted, timeout: float) -> Lease:
    """See `Book.alease`; a wait that is cancelled has claimed nothing."""
    end = time.monotonic() + timeout
    pause = POLL[0]
    while True:
        last = time.monotonic() >= end
        looking = asyncio.ensure_future(asyncio.to_thread(attempt, book, asked, last))
        try:
            claim = await asyncio.shield(looking)
        except asyncio.CancelledError:
            claim = await looking
            if claim is not None:
                Lease(book, asked, claim).nack("cancelled")
            raise
        if claim is not None:
            return Lease(book, asked, claim)
        seen = await asyncio.to_thread(pulse, book, asked.consumer)
        while time.monotonic() < end and not await asyncio.to_thread(stirred, book, asked.consumer, seen):
            await asyncio.sleep(min(pause, max(end - time.monotonic(), 0)))
            pause = min(pause * 1.5, POLL[1])
