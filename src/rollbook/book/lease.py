"""Leases: atomic claims on records or groups, with a fencing number and an expiry time; and mixes of several books.

Invariant: a record is in at most one active lease of a consumer. Delivery is at least once; acknowledgement is exactly
once: a lease that was ended, by its holder or by the database's clock, changes nothing and raises `LeaseLostError`,
unless the call repeats an acknowledgement that the ledger has.

Invariant: over time the shares of a mix are exact, not only on average. Rounding is carried over to the next lease; the
balance is in the first part's ledger, so that a restart continues with it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import disk, queue
from rollbook.book.consumer import (
    SELECT_CONSUMER,
    Consumer,
    find_consumer,
    get_consumer,
    parse_consumers,
    save_consumer,
    unknown_consumer,
)
from rollbook.book.errors import (
    BookError,
    ConnectionLostError,
    CorruptBookError,
    LeaseLostError,
    LockTimeoutError,
    UnknownConsumerError,
)
from rollbook.book.ledger import RETRY_SECONDS, Transaction, check_text, served, write_once, yield_to_writers
from rollbook.book.read import fetch, get_uids, read_numbers
from rollbook.book.sampler import First, Proportional
from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.experiences import Experiences
from rollbook.core.metrics import warn_user

if TYPE_CHECKING:
    from rollbook.batch import Batch
    from rollbook.book.book import Book
    from rollbook.book.read import RecordIds
    from rollbook.core.experience import Experience

__all__ = ["Lease", "Mix", "MixedLease", "Part"]

FIFO_DRAIN_RECORDS = 256
"""Records that a first-in-first-out lease drains from the inbox at once."""
MAX_WAIT_SECONDS = 0.25
"""Longest wait between two attempts, in seconds."""
LAST_ATTEMPT_SECONDS = 0.5
"""How long the last attempt waits for other writers, in seconds."""
_NO_STEP = -1
"""The step of a `nack` in the list of calls."""


class LeaseRequest(NamedTuple):
    """The arguments of a lease."""

    consumer: str
    requested: int
    """Number of records or groups."""
    by: str
    max_staleness: int | None
    seconds: float | None
    holder: str
    """Host, process and a random token, which identifies a lease whose commit was not confirmed."""
    exact: bool = False
    """Claim all records or none."""
    create: bool = False
    """Create the consumer if it does not exist."""


class Claim(NamedTuple):
    """The records of a lease (numbers and ids, in the order of their ranks) and their importance weights."""

    id: int
    seqs: list[int]
    uids: list[str]
    weights: list[float] | None
    expires: float
    seconds: float
    short: str
    """Why there are fewer records than requested; empty if there are not."""
    partial: Sequence[str] = ()
    """Groups that are not complete."""
    lock_consumer: bool = False
    """Whether an acknowledgement changes more of the consumer than the rows of these records."""


class Lease:
    """Records claimed by this process until it acknowledges them, gives them back, or makes no progress for too long.

    Use it as a context manager: leaving it with an exception, or without `ack`, gives the records back. `batch`,
    `experiences` and `renew` are progress and restart the expiry time. A holder that hangs loses its records, and its
    `ack` then raises `LeaseLostError`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> with book.lease(8) as lease:
    ...     print(len(lease), lease.short)
    ...     _ = lease.ack(step=1)
    1 asked for 8, got 1: no more was waiting
    >>> book.counts().trained
    1

    Args:
        book: The book.
        request: The arguments of `Book.lease`.
        claim: The claimed records.
    """

    def __init__(self, book: Book, request: LeaseRequest, claim: Claim) -> None:
        self._book = book
        self._request = request
        self._claim = claim
        self.fence = claim.id
        """The fencing number: larger than that of every lease before; 0 if nothing was leased."""
        self.uids = claim.uids
        """The ids of its records, in the sampler's order."""
        self.weights = claim.weights
        """Importance weights of a proportional sampler, one per record, at most 1; `None` for other samplers."""
        self.short = claim.short
        """Why the lease has fewer records than requested; empty if it has all."""
        self.partial = list(claim.partial)
        """Ids of groups that were leased incomplete, because `partial_after` seconds had passed."""
        self._experiences: Experiences | None = None
        self._remaining = dict(zip(claim.uids, claim.seqs, strict=True))
        self._acks: list[tuple[int | None, dict[str, int]]] = []
        """The step and the records (id, number) of every `ack`."""
        self._known_lost = False
        self._seconds = claim.seconds
        self._renewed = time.monotonic()
        self.expires = claim.expires
        """When it ends without progress, by the database's clock, in seconds since 1970."""

    @property
    def experiences(self) -> Experiences:
        """The records, in the sampler's order. The first access reads them."""
        if self._experiences is None:
            self._experiences = self._fetch()
        if self._remaining:
            self._renew_if_due()
        return self._experiences

    def _fetch(self) -> Experiences:
        return fetch(self._book, self._claim.seqs)

    def batch(self, **options: Any) -> Batch:
        """Return the records as a batch, with importance weights in `extra["weights"]` if the sampler has any.

        Args:
            options: Arguments of `Batch.from_records`.
        """
        if not self:
            raise BookError(f"lease.batch: the lease is empty: {self.short or 'no record was requested'}")
        batch = _build_batch(self.experiences, self._claim.weights, options)
        if self._remaining:
            self._renew_if_due()
        return batch

    def _renew_if_due(self) -> None:
        """Renew the lease if a quarter of its time is over, so that not every access writes to the database."""
        if self._book.ledger.clock is None and time.monotonic() - self._renewed < self._seconds * 0.05:
            return
        # If the database's clock was put back, more than the whole duration is left.
        if self._claim.id:
            with self._book.ledger.read() as tx:
                left = self.expires - tx.now
            if not self._seconds * 0.75 <= left <= self._seconds:
                self.renew()

    def renew(self, seconds: float | None = None) -> float:
        """Restart the expiry time.

        Args:
            seconds: Time to live from now on; by default that of the lease.

        Returns:
            The new expiry time, in seconds since 1970 by the database's clock.

        Raises:
            LeaseLostError: The lease has ended.
        """
        duration = self._seconds if seconds is None else check_float("seconds", seconds, 0.0, 1e9)
        if not duration > 0 and self._claim.id:
            raise ValueError(f"seconds: got {seconds!r}, expected a number > 0")
        if not self._claim.id:
            return self.expires
        self.expires = self._renew(duration)
        self._seconds, self._renewed = duration, time.monotonic()
        return self.expires

    def _renew(self, duration: float) -> float:
        def transact(tx: Transaction) -> float:
            self._check(tx, tx.all(f"{_SELECT_LEASE}{tx.for_update}", (self._claim.id,)))
            expires = tx.now + duration
            tx.run("UPDATE leases SET expires = ?, seconds = ? WHERE id = ?", (expires, duration, self._claim.id))
            return expires

        return write_once(self._book.ledger, transact, lambda tx, _: False)

    def ack(
        self,
        step: int | None = None,
        *,
        uids: RecordIds | None = None,
        priorities: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Acknowledge that the records were trained on.

        Idempotent: an `ack` of the same records in the same step changes nothing and returns the same count, also after
        an error.

        Args:
            step: The optimizer step.
            uids: Ids or records; by default all of the lease.
            priorities: New numbers for a sampler with a `key`, by id: `dict(zip(lease.uids, numbers))`.
            detail: JSON-compatible details for the events of all records.
            details: The same for single records, by id, such as micro-batch and weight.

        Returns:
            How many records were acknowledged.

        Raises:
            LeaseLostError: The lease has ended and these records were not acknowledged; nothing was changed.
            OutcomeUnknownError: The server does not answer; call `ack` again with the same arguments.
        """
        if step is not None:
            step = check_int("step", step)
            if step >= 1 << 63:
                raise ValueError(f"step: got {step}, expected a 64-bit integer")
        chosen = self._select(uids, step)
        priorities_by_seq = {}
        if priorities is not None and not isinstance(priorities, Mapping):
            raise ValueError(
                f"priorities: got {type(priorities).__name__}, expected "
                "{uid: number}, such as dict(zip(lease.uids, numbers))"
            )
        for uid, value in (priorities or {}).items():
            if uid not in chosen:
                raise ValueError(f"priorities: got {uid!r}, which is not acknowledged here")
            priorities_by_seq[chosen[uid]] = check_float(f"priorities[{uid!r}]", value)
        details_by_seq = dict.fromkeys(chosen.values(), detail or {})
        for uid, more in (details or {}).items():
            if uid not in chosen:
                raise ValueError(f"details: got {uid!r}, which is not acknowledged here")
            details_by_seq[chosen[uid]] = {**(detail or {}), **more}
        if not chosen:
            return 0
        try:
            count = self._ack(chosen, step, priorities_by_seq, details_by_seq)
        except RetryAckError:
            count = self._ack(chosen, step, priorities_by_seq, details_by_seq)
        self._acks.append((step, chosen))
        for uid in chosen:
            self._remaining.pop(uid, None)
        return count

    def _ack(
        self,
        chosen: dict[str, int],
        step: int | None,
        priorities: Mapping[int, float],
        details: Mapping[int, Mapping[str, Any]],
    ) -> int:
        seqs = list(chosen.values())

        def transact(tx: Transaction) -> int:
            try:
                consumer, rows = self._load_rows(tx, chosen)
            except LeaseLostError:
                count = self._repeats(tx, seqs, step)
                if not count:
                    raise
                return count
            if priorities and consumer.settings.sampler.key is None:
                raise ValueError(f"priorities: {consumer.settings.sampler!r} does not use them, expected None")
            count = len(rows)
            if count < len(chosen):
                count += len(self._acknowledged(tx, seqs, step))
            _count_use(tx, consumer, rows, step, self._claim.id, priorities, details)
            if chosen.keys() >= self._remaining.keys():
                tx.defer("leases", "UPDATE leases SET state = 'acked' WHERE id = ?", (self.fence,))
            save_consumer(tx, consumer)
            if disk.failpoints_active:
                disk.hit_failpoint("during ack")
            return count

        def committed(tx: Transaction, count: int) -> bool:
            return len(self._acknowledged(tx, seqs, step)) == count > 0

        return write_once(self._book.ledger, transact, committed)

    def nack(self, reason: str = "given back", *, uids: RecordIds | None = None, drop: bool = False) -> int:
        """Return records to the queue, with their former rank.

        Args:
            reason: Stored in the ledger.
            uids: Ids or records; by default all of the lease.
            drop: Drop the records instead.

        Returns:
            Number of records that were returned.

        Raises:
            LeaseLostError: The lease has ended.
        """
        check_text("reason", reason)
        chosen = self._select(uids)
        if not chosen:
            return 0
        count = self._nack(chosen, reason, drop=drop)
        self._acks.append((_NO_STEP, {}))
        for uid in chosen:
            self._remaining.pop(uid, None)
        return count

    def _nack(self, chosen: dict[str, int], reason: str, *, drop: bool) -> int:
        def transact(tx: Transaction) -> int:
            consumer, rows = self._load_rows(tx, chosen, lock_consumer=True)
            if drop:
                queue.drop_rows(tx, consumer, rows, reason)
            else:
                queue.requeue_rows(tx, consumer, rows, "nacked", reason)
                tx.notify(consumer.id)
            if len(chosen) == len(self._remaining):
                tx.defer("leases", "UPDATE leases SET state = 'nacked' WHERE id = ?", (self.fence,))
            save_consumer(tx, consumer)
            return len(rows)

        def committed(tx: Transaction, _: int) -> bool:
            sql = f"SELECT 1 FROM queue WHERE lease = ? AND seq {tx.in_ints}"
            return tx.first(sql, (self._claim.id, tx.array(list(chosen.values())))) is None

        return write_once(self._book.ledger, transact, committed)

    def _acknowledged(self, tx: Transaction, seqs: Sequence[int], step: int | None) -> set[int]:
        """Return the records that this lease acknowledged in this step, unless a rewind voided it."""
        rows = tx.all(
            "SELECT done.seq FROM events AS done WHERE done.kind = 'trained' AND done.lease = ? "
            f"AND COALESCE(done.step, -1) = ? AND done.seq {tx.in_ints} AND NOT EXISTS (SELECT 1 FROM events "
            "AS undone WHERE undone.seq = done.seq AND undone.kind = 'voided' AND undone.lease = done.lease "
            "AND undone.id > done.id)",
            (self._claim.id, -1 if step is None else step, tx.array(seqs)),
        )
        return {seq for (seq,) in rows}

    def _repeats(self, tx: Transaction, seqs: Sequence[int], step: int | None) -> int:
        """Return how many records a former `ack` with these arguments acknowledged; 0 if there was none."""
        acknowledged = self._acknowledged(tx, seqs, step)
        # A record that was deleted while it was leased could not be acknowledged.
        others = tx.array([seq for seq in seqs if seq not in acknowledged])
        if tx.first(f"SELECT 1 FROM records WHERE removed_reason IS NULL AND seq {tx.in_ints}", (others,)):
            return 0
        return len(acknowledged)

    def _select(self, uids: RecordIds | None, repeated_step: int | None = _NO_STEP) -> dict[str, int]:
        """Return the records of a call, by id; for `ack`, also those that were acknowledged in the same step."""
        if not self._claim.id:
            return {}
        if uids is None and self._remaining:
            return dict(self._remaining)
        # Without ids, the last call is repeated.
        repeated = [ack for ack in self._acks[-1:] if uids is None] or self._acks
        records = dict(self._remaining)
        for step, acknowledged in repeated:
            records.update(acknowledged if step == repeated_step else {})
        if not records:
            raise LeaseLostError(f"lease {self.fence}: all its records were acknowledged or returned already")
        if uids is None:
            return records
        listed = get_uids(uids)
        for uid in listed:
            if uid not in records:
                raise ValueError(f"uids: got {uid!r}, which this lease does not hold")
        return {uid: records[uid] for uid in listed}

    def _load_rows(
        self, tx: Transaction, chosen: Mapping[str, int], lock_consumer: bool = False
    ) -> tuple[Consumer, list[queue.Row]]:
        """Return the consumer, and the chosen rows that still belong to the lease (deleted ones do not).

        The consumer's row is locked, before the lease's, if more of its queue changes than the lease's own records.

        Raises:
            LeaseLostError: The lease has ended.
        """
        name, fence = self._request.consumer, self._claim.id
        lock_consumer = self._claim.lock_consumer or lock_consumer
        consumer_rows, lease_rows, rows = tx.query_many(
            (f"{SELECT_CONSUMER}{tx.for_update if lock_consumer else ''}", (name,)),
            (f"{_SELECT_LEASE}{tx.for_update}", (fence,)),
            (f"SELECT {queue.ROW_COLUMNS} FROM queue WHERE lease = ? ORDER BY seq", (fence,)),
        )
        if not consumer_rows:
            raise LeaseLostError(f"consumer {name!r}: removed from the book")
        [consumer] = parse_consumers(consumer_rows)
        if not lock_consumer and _needs_consumer_lock(consumer):
            self._claim = self._claim._replace(lock_consumer=True)
            raise RetryAckError
        self._check(tx, lease_rows)
        seqs = set(chosen.values())
        return consumer, [row for row in queue.check_rows(rows) if row.seq in seqs]

    def _check(self, tx: Transaction, rows: Sequence[Any]) -> None:
        """Raise `LeaseLostError` unless the lease is active."""
        row = rows[0] if rows else None
        self._known_lost = row is None or row[0] != "active" or row[1] <= tx.now
        if row is None or row[0] != "active":
            raise LeaseLostError(
                f"lease {self.fence}: it is {row[0] if row else 'not in the book'}, nothing was changed"
            )
        if row[1] <= tx.now:
            raise LeaseLostError(
                f"lease {self.fence}: it ended {tx.now - row[1]:.3f} s ago, after {self._seconds:g} s without "
                "progress; its records are offered again, and nothing was changed"
            )

    # --- async: the same, in a thread -------------------------------------------------------------------------

    async def aack(
        self,
        step: int | None = None,
        *,
        uids: RecordIds | None = None,
        priorities: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Call `ack` without blocking the event loop. See `ack`."""
        options = {"uids": uids, "priorities": priorities, "detail": detail, "details": details}
        return await asyncio.to_thread(self.ack, step, **options)  # type: ignore[arg-type]

    async def anack(self, reason: str = "given back", *, uids: RecordIds | None = None, drop: bool = False) -> int:
        """Call `nack` without blocking the event loop. See `nack`."""
        return await asyncio.to_thread(self.nack, reason, uids=uids, drop=drop)

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
        was_lost = self._known_lost  # `nack` changes it.
        if self._remaining and self._claim.id:
            if error is None:
                warn_user(
                    f"{len(self._remaining)} leased records were not acknowledged and go back: call lease.ack(step=...)"
                )
            try:
                self.nack("not acknowledged" if error is None else _format_error(error))
            except LeaseLostError:
                # `ack` or `renew` may have raised it already.
                if error is None and not was_lost:
                    raise

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)


def _format_error(error: BaseException) -> str:
    """Format an exception as one line that every database can store."""
    text = f"{type(error).__name__}: {error}"[:200].replace("\0", "\ufffd")
    return text.encode("utf-8", "replace").decode("utf-8")


_SELECT_LEASE = "SELECT state, expires FROM leases WHERE id = ?"


class RetryAckError(Exception):
    """The consumer's settings changed since the lease: retry with its row locked."""


def _needs_consumer_lock(consumer: Consumer) -> bool:
    """Return whether an acknowledgement changes what other leases depend on: groups, or a sampler's state."""
    return consumer.grouped or (consumer.settings.sampler.keeps_rank and consumer.settings.max_uses != 1)


def _count_use(
    tx: Transaction,
    consumer: Consumer,
    rows: Sequence[queue.Row],
    step: int | None,
    lease: int,
    priorities: Mapping[int, float],
    details: Mapping[int, Mapping[str, Any]],
) -> None:
    """Count one more use of rows: they are done, or wait (perhaps after a cooldown) for the next use."""
    sampler = consumer.settings.sampler
    max_uses = consumer.settings.max_uses
    moves, events = [], []
    for row in rows:
        value = priorities.get(row.seq, row.value)
        item = consumer.item(row.seq, row.uses + 1, row.version, value)
        again, cooldown = sampler.reuse(item)
        again = again and (max_uses is None or item.uses < max_uses)
        new = row._replace(
            uses=item.uses, lease=None, value=value, weight=sampler.weight(item), attempts=0, state=queue.TRAINED
        )
        if again:
            state, until = (queue.COOLING, tx.now + cooldown) if cooldown else (queue.WAITING, None)
            new = new._replace(state=state, until=until, rank=sampler.rank(item, consumer.state))
            tx.notify(consumer.id)
        moves.append((row, new))
        # What rewinding needs to put the row back.
        detail = {"uses": row.uses, "rank": row.rank, "value": row.value, **details[row.seq]}
        events.append(queue.Event(queue.TRAINED, row.seq, consumer.id, None, step, lease, detail))
    queue.change_rows(tx, consumer, moves, events)


def refresh_queue(tx: Transaction, book: Book, name: str, request: LeaseRequest | None) -> tuple[Consumer | None, bool]:
    """Do what is due in a consumer's queue, at most a chunk of it: drain the inbox, expire leases, end cooldowns, drop
    old and stale records, update groups.

    Args:
        tx: The transaction.
        book: The book.
        name: The consumer's name.
        request: The lease this is for; without one, the inbox is drained only if records might be dropped.

    Returns:
        The consumer, locked (`None` if it does not exist), and whether nothing is left to do.
    """
    check_text("consumer", name, 1, 200)
    mine = "consumer = (SELECT id FROM consumers WHERE name = ?)"
    rows, [(expired, cooled_down, has_inbox, version)] = tx.query_many(
        (f"{SELECT_CONSUMER}{tx.for_update}", (name,)),
        (
            f"SELECT (SELECT 1 FROM leases WHERE {mine} AND state = 'active' AND "
            "(expires <= ? OR expires > ? + seconds + 1) LIMIT 1), "
            f"(SELECT 1 FROM queue WHERE {mine} AND state = 'cooling' AND until <= ? LIMIT 1), "
            f"(SELECT 1 FROM inbox WHERE {mine} LIMIT 1), "
            "(SELECT value FROM meta WHERE key = 'policy_version')",
            (name, tx.now, tx.now, name, tx.now, name),
        ),
    )
    if not rows:
        return None, True
    [consumer] = parse_consumers(rows)
    settings = consumer.settings
    if request is not None and request.by == "group" and not consumer.grouped:
        queue.begin_groups(tx, consumer)
    if expired:
        queue.expire_leases(tx, consumer)
    done = True
    if "unranked" in consumer.state or "oversized" in consumer.state:
        done = rerank_queue(tx, consumer, book, queue.CHUNK)
    if has_inbox and (settings.bounded if request is None else not takes_in_order(consumer, request)):
        done &= queue.drain_inbox(tx, book, consumer, queue.CHUNK)
    if cooled_down:
        done &= queue.end_cooldowns(tx, consumer, queue.CHUNK)
    if settings.max_age is not None:
        done &= queue.drop_over_age(tx, consumer, queue.CHUNK)
    bound = settings.max_staleness if request is None or request.max_staleness is None else request.max_staleness
    if version is not None and bound is not None:
        done &= queue.drop_stale_rows(tx, consumer, queue.version_floor(int(version), bound), queue.CHUNK)
    if request is not None and request.max_staleness is not None and settings.max_staleness is None:
        # The inbox was drained without a bound.
        queue.drop_abandoned_rows(tx, consumer)
    if consumer.grouped:
        if "ungrouped" in consumer.state:
            done &= queue.build_groups(tx, consumer, queue.CHUNK)
        if settings.partial_after is not None:
            done &= queue.release_due_groups(tx, consumer, queue.CHUNK)
    return consumer, done


def rerank_queue(tx: Transaction, consumer: Consumer, book: Book, limit: int) -> bool:
    """Rank waiting records again after the sampler or seed changed, and apply a new `MaxSize`; `limit` records at once.

    Returns:
        Whether all is done.
    """
    start = consumer.state.get("unranked")
    if start is None:
        if "oversized" not in consumer.state or not queue.drop_over_size(tx, consumer, limit):
            return "oversized" not in consumer.state
        del consumer.state["oversized"]
        return True
    sampler = consumer.settings.sampler
    # Finished records need no rank, and may have no bytes to read their number from.
    rows = queue.select_rows(
        tx,
        "consumer = ? AND seq >= ? AND state IN ('waiting', 'cooling', 'leased') ORDER BY seq LIMIT ?",
        (consumer.id, start, limit),
    )
    seqs = [row.seq for row in rows]
    values = [None] * len(seqs) if sampler.key is None else read_numbers(book, tx, seqs, sampler.key)
    moves = []
    for row, value in zip(rows, values, strict=True):
        item = consumer.item(row.seq, row.uses, row.version, value)
        rank = sampler.rank(item, consumer.state)
        moves.append((row, row._replace(value=value, weight=sampler.weight(item), rank=rank)))
    # Groups are rebuilt when all of their members have ranks.
    grouped, consumer.grouped = consumer.grouped, False
    queue.change_rows(tx, consumer, moves, [])
    consumer.grouped = grouped
    if len(rows) == limit:
        consumer.state["unranked"] = seqs[-1] + 1
        return False
    del consumer.state["unranked"]
    if consumer.settings.max_staleness is not None:
        queue.drop_abandoned_rows(tx, consumer)
    if consumer.grouped:
        queue.begin_groups(tx, consumer)
    return False


def drop_stale_records(book: Book, name: str) -> None:
    """Drop the records that the announced version makes stale for a consumer, in short transactions."""
    done = False
    while not done:
        with book.ledger.write(shared=True, durable=False) as tx:
            consumer = find_consumer(tx, name, lock=True)
            if consumer is None:
                return
            floor = queue.version_floor(queue.announced_version(tx), consumer.settings.max_staleness)
            done = queue.drain_inbox(tx, book, consumer) & queue.drop_stale_rows(tx, consumer, floor, queue.CHUNK)
            save_consumer(tx, consumer)
        if not done:
            yield_to_writers(book.ledger)


def refresh_consumer(book: Book, name: str) -> None:
    """Do all that is due in a consumer's queue, in short transactions."""
    done = False
    while not done:
        with book.ledger.write(shared=True, durable=False) as tx:
            consumer, done = refresh_queue(tx, book, name, None)
            if consumer is not None:
                save_consumer(tx, consumer)
        if not done:
            yield_to_writers(book.ledger)


def takes_in_order(consumer: Consumer, request: LeaseRequest) -> bool:
    """Return whether the lease does not depend on later records, so that those may stay in the inbox."""
    settings = consumer.settings
    return (
        request.by == "experience"
        and request.max_staleness is None
        and type(settings.sampler) is First
        and not settings.removers
        and not settings.limiters
        and not consumer.grouped
    )


def try_claim(book: Book, request: LeaseRequest, last: bool, timeout: float | None, end: float) -> Claim | None:
    """Claim the requested records.

    Args:
        book: The book.
        request: The arguments of the lease.
        last: Whether this is the last attempt, which claims fewer records than requested if need be.
        timeout: The lease's timeout, which ends at `end`.
        end: On the monotonic clock.

    Returns:
        The claim, or `None` if there are too few records. The claim is empty if the timeout passes while other writers
        hold the ledger.
    """

    def transact(tx: Transaction) -> tuple[bool, Claim | None]:
        consumer, done = refresh_queue(tx, book, request.consumer, request)
        if consumer is None:
            names = [name for (name,) in tx.all("SELECT name FROM consumers ORDER BY id")]
            raise unknown_consumer(request.consumer, names)
        claim = _claim(tx, book, consumer, request, last) if done else None
        save_consumer(tx, consumer)
        return done, claim

    def committed(tx: Transaction, outcome: tuple[bool, Claim | None]) -> bool:
        claim = outcome[1]
        if claim is None or not claim.id:
            return True
        return tx.first("SELECT 1 FROM leases WHERE id = ? AND holder = ?", (claim.id, request.holder)) is not None

    done = False
    claim = None
    while not done:
        # The last attempt claims the records that are available now, and waits shortly for other writers.
        lock_wait = max(end - time.monotonic(), LAST_ATTEMPT_SECONDS if last else 0.0) if timeout else None
        try:
            done, claim = write_once(book.ledger, transact, committed, lock_wait)
            if not done:
                yield_to_writers(book.ledger)
        except UnknownConsumerError:
            if not request.create:
                raise
            with book.ledger.write() as tx:
                if find_consumer(tx, request.consumer) is None:
                    queue.add_consumer(tx, request.consumer)
        except LockTimeoutError as error:
            if timeout is None:
                raise
            return _empty_claim(f"asked for {request.requested}, got 0: {error}")
    return claim


def _empty_claim(reason: str) -> Claim:
    return Claim(0, [], [], None, 0.0, 0.0, reason)


_SELECT_READY_GROUPS = (
    "SELECT gid, rank, weight, size, runs FROM groups WHERE consumer = ? AND ready = 1 ORDER BY rank, seq LIMIT ?"
)
_SELECT_WAITING = (
    f"SELECT {', '.join(f'queue.{name}' for name in queue.Row._fields)}, records.uid "
    "FROM queue JOIN records ON records.seq = queue.seq WHERE queue.consumer = ? AND queue.state = 'waiting'"
)


def _limit_count(tx: Transaction, consumer: Consumer, request: LeaseRequest) -> tuple[int, str]:
    """Return how many of the requested records or groups the rate limiters allow, and why not all."""
    settings = consumer.settings
    if settings.min_size:
        present = queue.count_rows(tx, consumer, queue.WAITING, queue.COOLING, queue.LEASED)[0]
        if present < settings.min_size:
            return 0, f"{present} records are there, MinSize waits for {settings.min_size}"
    if settings.ratio is None:
        return request.requested, ""
    left = settings.ratio.samples_left(consumer.inserts, consumer.samples)
    if request.by == "group":
        fits = 0
        for gid, *_ in tx.all(_SELECT_READY_GROUPS, (consumer.id, request.requested)):
            left -= len(queue.select_rows(tx, "consumer = ? AND gid = ? AND state = 'waiting'", (consumer.id, gid)))
            fits += left >= 0
        left = fits
    if left < request.requested:
        return left, f"SamplesToInserts waits for more inserts ({consumer.inserts} so far)"
    return request.requested, ""


def _claim(tx: Transaction, book: Book, consumer: Consumer, request: LeaseRequest, last: bool) -> Claim | None:
    """Lease waiting records; `None` if they are fewer than requested and this is not the `last` attempt."""
    sampler = consumer.settings.sampler
    limit, reason = request.requested, ""
    if consumer.settings.min_size or consumer.settings.ratio is not None:
        limit, reason = _limit_count(tx, consumer, request)
    partial: list[str] = []
    if request.by == "group":
        ready = tx.all(_SELECT_READY_GROUPS, (consumer.id, limit))
        units = len(ready)
        if units < request.requested and not last:
            return None
        ranks = [rank for _, rank, *_ in ready]
        members: dict[str, list[queue.Row]] = {}
        for gid, _, _, size, runs in ready:
            if type(runs) is not int or not isinstance(size, (int, type(None))):
                raise CorruptBookError(f"groups: got {str(ready)[:100]}, expected integers")
            members[gid] = []
            if size is not None and runs < size:
                partial.append(gid)
        claimed, [(lease,)] = tx.query_many(
            (f"{_SELECT_WAITING} AND queue.gid {tx.in_texts}", (consumer.id, tx.array(list(members)))),
            tx.next_number("leases", 1),
        )
        for row in queue.check_rows([values[:-1] for values in sorted(claimed)]):
            members[row.gid].append(row)
        rows = [row for group in members.values() for row in group]
        probabilities = [weight for gid, _, weight, *_ in ready for _ in members[gid]]
        count, total = consumer.state.get("ready", (0, 0.0))
    else:
        in_order = (f"{_SELECT_WAITING} ORDER BY queue.rank, queue.seq LIMIT ?", (consumer.id, limit))
        claimed, [(lease,)] = tx.query_many(in_order, tx.next_number("leases", 1))
        empty = not takes_in_order(consumer, request)
        while len(claimed) < limit and not empty:
            empty = queue.drain_inbox(
                tx, book, consumer, max(FIFO_DRAIN_RECORDS, min(limit - len(claimed), queue.CHUNK))
            )
            claimed = tx.all(*in_order)
        units = len(claimed)
        if units < request.requested and not last:
            return None
        rows = queue.check_rows([values[:-1] for values in claimed])
        probabilities = [row.weight for row in rows]
        ranks = [row.rank for row in rows]
        count, total = queue.count_rows(tx, consumer, queue.WAITING) if isinstance(sampler, Proportional) else (0, 0.0)
    if units < limit or not reason:
        reason = "no more was waiting" if request.by == "experience" else "no more groups were complete"
    if units < request.requested and request.exact:
        return _empty_claim(f"asked for exactly {request.requested}, {units} can be leased: {reason}")
    reason = f"asked for {request.requested}, got {units}: {reason}" if units < request.requested else ""
    if partial:
        more = f"{len(partial)} of {units} groups are partial, since partial_after has passed: {', '.join(partial[:3])}"
        reason = f"{reason}; {more}" if reason else more
    if not rows:
        return Claim(0, [], [], [] if isinstance(sampler, Proportional) else None, tx.now, 0.0, reason)
    for rank in ranks:
        sampler.record_lease(rank, consumer.state)
    weights = None
    if isinstance(sampler, Proportional):
        unscaled = [(max(total, weight) / (count * weight)) ** sampler.beta for weight in probabilities]
        weights = [value / max(unscaled) for value in unscaled]
    seconds = consumer.settings.lease_seconds if request.seconds is None else request.seconds
    tx.insert(
        "leases",
        ("id", "consumer", "holder", "made", "expires", "seconds", "state", "count"),
        [(lease, consumer.id, request.holder, tx.now, tx.now + seconds, seconds, "active", len(rows))],
    )
    queue.change_rows(
        tx,
        consumer,
        [(row, row._replace(state=queue.LEASED, lease=lease)) for row in rows],
        [queue.Event(queue.LEASED, row.seq, consumer.id, lease=lease) for row in rows],
    )
    consumer.samples += len(rows)
    uids = {values[0]: values[-1] for values in claimed}
    return Claim(
        lease,
        [row.seq for row in rows],
        [uids[row.seq] for row in rows],
        weights,
        tx.now + seconds,
        seconds,
        reason,
        partial,
        _needs_consumer_lock(consumer),
    )


def check_request(
    consumer: str,
    count: int,
    by: str,
    max_staleness: int | None,
    seconds: float | None,
    timeout: float | None,
    *,
    exact: bool = False,
    create: bool = False,
) -> LeaseRequest:
    """Check the arguments of a lease."""
    check_int("n", count, 1)
    check_choice("by", by, ("experience", "group"))
    if max_staleness is not None:
        check_int("max_staleness", max_staleness)
    if seconds is not None and not check_float("seconds", seconds, 0.0, 1e9) > 0:
        raise ValueError(f"seconds: got {seconds!r}, expected a number > 0")
    if timeout is not None:
        check_float("timeout", timeout, 0.0)
    holder = f"{socket.gethostname()}/{os.getpid()}/{os.urandom(6).hex()}"
    options = (check_bool("exact", exact), check_bool("create", create))
    return LeaseRequest(consumer, min(int(count), 1 << 62), by, max_staleness, seconds, holder, *options)


class Forecast(NamedTuple):
    """When a waiting lease may succeed."""

    consumer: int
    """The consumer's number."""
    seconds: float
    """Seconds until an expiry, cooldown or deadline may offer records."""
    enough: bool
    """Whether enough records seem to wait; without a lock this is an estimate."""


def forecast(book: Book, request: LeaseRequest) -> Forecast:
    """Estimate without a lock when a lease can succeed.

    Args:
        book: The book.
        request: The lease that waits.

    Returns:
        When a lease may succeed, and what it waits for.
    """
    with book.ledger.read() as tx:
        consumer = get_consumer(tx, request.consumer)
        number = consumer.id
        enough = request.by == "group" or (
            queue.count_rows(tx, consumer, queue.WAITING)[0] + queue.inbox_size(tx, number) >= request.requested
        )
        leases, cooldowns, partial = tx.query_many(
            ("SELECT MIN(expires) FROM leases WHERE consumer = ? AND state = 'active'", (number,)),
            ("SELECT MIN(until) FROM queue WHERE consumer = ? AND state = 'cooling'", (number,)),
            ("SELECT MIN(due) FROM groups WHERE consumer = ? AND ready = 0 AND due IS NOT NULL", (number,)),
        )
        due = [moment for [(moment,)] in (leases, cooldowns, partial) if moment is not None]
    return Forecast(number, max(0.0, min([MAX_WAIT_SECONDS, *(moment - tx.now for moment in due)])), enough)


def empty_lease(book: Book, consumer: str) -> Lease:
    """Return a lease without records."""
    return Lease(book, LeaseRequest(consumer, 0, "experience", None, None, ""), Claim(0, [], [], None, 0.0, 0.0, ""))


def lease_records(
    book: Book,
    request: LeaseRequest,
    timeout: float | None,
    stop: threading.Event | None = None,
    *,
    partial: bool = True,
) -> Lease:
    """Implement `Book.lease`.

    Args:
        book: The book.
        request: The arguments of the lease.
        timeout: See `Book.lease`.
        stop: Ends the wait with an empty lease when it is set.
        partial: Claim what is there at the timeout; otherwise the lease is empty then.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    stop = stop or threading.Event()
    lost_since = math.inf
    try:
        claim = try_claim(book, request, timeout == 0 and partial, timeout, end)
        while claim is None and time.monotonic() < end and not stop.is_set():
            try:
                number = forecast(book, request).consumer
                with book.ledger.wait_turn(number, end - time.monotonic(), stop) as waiter:
                    while claim is None and waiter is not None and time.monotonic() < end and not stop.is_set():
                        waiter.mark()
                        _, seconds, enough = forecast(book, request)
                        if enough or not seconds:
                            claim = try_claim(book, request, False, timeout, end)
                        lost_since = math.inf
                        if claim is None:
                            waiter.wait(max(0.001, min(seconds, end - time.monotonic())))
            except ConnectionLostError:  # The server may be restarting: keep waiting.
                lost_since = min(lost_since, time.monotonic())
                if time.monotonic() > lost_since + RETRY_SECONDS:
                    raise
        if claim is None and partial and not stop.is_set():
            claim = try_claim(book, request, True, timeout, end)
    except LockTimeoutError as error:
        if timeout is None:
            raise
        claim = _empty_claim(f"asked for {request.requested}, got 0: {error}")
    return Lease(book, request, claim or _empty_claim(""))


async def alease_records(lease: Callable[[threading.Event], Lease]) -> Lease:
    """Run `lease`, whose wait ends when the event is set, in a thread; a canceled wait claims nothing."""
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Lease] = loop.create_future()

    def run() -> None:
        try:
            result = lease(stop)
        except BaseException as error:
            loop.call_soon_threadsafe(outcome.set_exception, error)
        else:
            loop.call_soon_threadsafe(outcome.set_result, result)

    # A separate thread: many waiting leases would take all threads of the event loop's pool.
    threading.Thread(target=run, name="rollbook-lease", daemon=True).start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        stop.set()
        late = await outcome
        if late:
            await asyncio.to_thread(late.nack, "cancelled")
        raise


def _build_batch(records: Experiences, weights: Sequence[float] | None, options: Mapping[str, Any]) -> Batch:
    """Build a batch, with the importance weights in `extra["weights"]`."""
    from rollbook.batch import Batch

    batch = Batch.from_records(records, **options)
    if weights is not None:
        import torch

        batch.extra["weights"] = torch.tensor(weights)
    return batch


# --- mixes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One source of a mix. To use its records repeatedly, give its consumer group `removers=[MaxUses(None)]`.

    Args:
        book: The book to lease from.
        share: Relative to the other parts: 4 and 1 are 0.8 and 0.2.
        consumer: The consumer group to lease for.
        by: `"experience"` or `"group"`: what the share counts.

    >>> import rollbook
    >>> part = Part(rollbook.open("memory:"), 0.25)
    >>> part.consumer, part.by
    ('train', 'experience')
    """

    book: Book
    share: float
    consumer: str = "train"
    by: str = "experience"


class MixedLease:
    """The leases of all parts as one, in the order of the parts; created by `Mix.lease`.

    Args:
        leases: The lease of each part.

    >>> import rollbook
    >>> rollouts, expert = rollbook.open("memory:"), rollbook.open("memory:")
    >>> for book in (rollouts, expert):
    ...     _ = book.append([rollbook.Experience(tokens=[1, 2, i]) for i in range(2)])
    >>> with Mix([Part(rollouts, 2), Part(expert, 1)]).lease(3) as lease:
    ...     lease.sources, lease.ack(step=1)
    ([0, 0, 1], 3)
    """

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        """One per part, in order; some may be empty."""

    @property
    def experiences(self) -> Experiences:
        """The records of all parts."""
        return Experiences.concat([lease.experiences for lease in self.leases])

    @property
    def sources(self) -> list[int]:
        """The index of each record's part, which distinguishes expert data from rollouts."""
        return [i for i, lease in enumerate(self.leases) for _ in range(len(lease))]

    @property
    def uids(self) -> list[str]:
        """The ids of all records."""
        return [uid for lease in self.leases for uid in lease.uids]

    @property
    def short(self) -> str:
        """Which parts have fewer records than requested, and why."""
        return "; ".join(f"part {i}: {lease.short}" for i, lease in enumerate(self.leases) if lease.short)

    @property
    def weights(self) -> list[float] | None:
        """Importance weights, 1 for parts without any; `None` if no part has any."""
        if all(lease.weights is None for lease in self.leases):
            return None
        return [weight for lease in self.leases for weight in lease.weights or [1.0] * len(lease)]

    def batch(self, **options: Any) -> Batch:
        """Return all records as one batch, with importance weights in `extra["weights"]`.

        Args:
            options: Arguments of `Batch.from_records`.
        """
        if not self:
            raise BookError(f"lease.batch: the lease is empty: {self.short}")
        return _build_batch(self.experiences, self.weights, options)

    def renew(self, seconds: float | None = None) -> None:
        """Restart the expiry time of every part.

        Args:
            seconds: See `Lease.renew`.
        """
        for lease in self.leases:
            if lease:
                lease.renew(seconds)

    def ack(self, step: int | None = None) -> int:
        """Acknowledge every part.

        Args:
            step: The optimizer step.

        Returns:
            How many records were acknowledged.

        Raises:
            LeaseLostError: A part's lease has ended. The parts before it are acknowledged, the others are not.
        """
        return sum(lease.ack(step) for lease in self.leases if lease)

    def nack(self, reason: str = "given back") -> int:
        """Return the records of every part to their queues.

        Args:
            reason: Stored in the ledgers.

        Returns:
            Number of records that were returned.
        """
        return sum(lease.nack(reason) for lease in self.leases if lease)

    def __len__(self) -> int:
        return sum(len(lease) for lease in self.leases)

    def __bool__(self) -> bool:
        return any(self.leases)

    def __iter__(self) -> Iterator[Experience]:
        for lease in self.leases:
            yield from lease

    def __repr__(self) -> str:
        return f"MixedLease({' + '.join(str(len(lease)) for lease in self.leases)} records)"

    def __enter__(self) -> MixedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost: LeaseLostError | None = None
        for lease in self.leases:
            try:
                lease.__exit__(kind, error, trace)
            except LeaseLostError as failure:  # the other leases still end
                lost = lost or failure
        if lost is not None:
            raise lost


class Mix:
    """Leases from several books by ratio, such as expert data and rollouts.

    Args:
        parts: The sources.
        name: Under which the first part's book stores the balance.

    >>> import rollbook
    >>> rollouts, expert = rollbook.open("memory:"), rollbook.open("memory:")
    >>> for book in (rollouts, expert):
    ...     _ = book.append([rollbook.Experience(tokens=[1, 2, i]) for i in range(40)])
    >>> mix = Mix([Part(rollouts, 0.75), Part(expert, 0.25)])
    >>> for _ in range(2):
    ...     with mix.lease(10) as lease:
    ...         print(lease)
    ...         _ = lease.ack()
    MixedLease(8 + 2 records)
    MixedLease(7 + 3 records)
    """

    def __init__(self, parts: Sequence[Part], name: str = "mix") -> None:
        self.parts = tuple(parts)
        self.name = name
        if not self.parts:
            raise ValueError("parts: missing, expected at least one")
        for i, source in enumerate(self.parts):
            if not isinstance(source, Part):
                raise ValueError(f"parts[{i}]: got {type(source).__name__}, expected a Part(book, share)")
            if not check_float(f"parts[{i}].share", source.share, 0.0, 1e9) > 0:
                raise ValueError(f"parts[{i}].share: got {source.share!r}, expected a number > 0")
        self._total = sum(source.share for source in self.parts)

    @property
    def balance(self) -> list[float]:
        """By how many records each part is behind (or ahead of, if negative) its share."""
        return read_balance(self.parts[0].book, self.name, len(self.parts))

    def lease(
        self, n: int, *, timeout: float | None = 0.0, max_staleness: int | None = None, seconds: float | None = None
    ) -> MixedLease:
        """Lease `n` records (or groups) in total.

        A part with too few records is not replaced by another; `short` reports it, and its balance does not grow.

        Args:
            n: Number of records or groups.
            timeout: See `Book.lease`; applies to all parts together.
            max_staleness: See `Book.lease`.
            seconds: See `Book.lease`.

        Returns:
            The lease, a context manager.
        """
        check_int("n", n, 1)
        end = None if timeout is None else time.monotonic() + timeout
        counts = self._split(n)
        leases: list[Lease] = []
        try:
            for source, count in zip(self.parts, counts, strict=True):
                if not count:
                    leases.append(empty_lease(source.book, source.consumer))
                    continue
                leases.append(
                    source.book.lease(
                        count,
                        by=source.by,
                        consumer=source.consumer,
                        timeout=None if end is None else max(end - time.monotonic(), 0.001 if timeout else 0.0),
                        max_staleness=max_staleness,
                        seconds=seconds,
                    )
                )
        except BaseException:
            for lease in leases:
                lease.nack("another part of the mix failed")
            changes = [count - share for count, share in zip(counts, self._exact_shares(n), strict=True)]
            add_to_balance(self.parts[0].book, self.name, changes)
            raise
        return MixedLease(leases)

    def _exact_shares(self, n: int) -> list[float]:
        return [n * source.share / self._total for source in self.parts]

    def _split(self, n: int) -> list[int]:
        """Split `n` and update the balance in one transaction, so that concurrent leases do not settle it twice."""
        return split_by_balance(self.parts[0].book, self.name, n, self._exact_shares(n))

    def acks(self) -> Mapping[int, int]:
        """Return how many records of each part, by index, were trained on."""
        return {i: source.book.counts(source.consumer).trained for i, source in enumerate(self.parts)}


@served(repeat=True)
def read_balance(book: Book, name: str, parts: int) -> list[float]:
    """Return the balance of a mix of `parts` parts; see `Mix.balance`."""
    with book.ledger.read() as tx:
        return _read_balance(tx, name, parts)


@served
def split_by_balance(book: Book, name: str, n: int, shares: Sequence[float]) -> list[int]:
    """Split `n` records by the exact shares and the balance of a mix, and update the balance."""
    with book.ledger.write() as tx:
        owed = [owed + share for owed, share in zip(_read_balance(tx, name, len(shares)), shares, strict=True)]
        counts = _round_to_sum(owed, n)
        _write_balance(tx, name, [share - count for share, count in zip(owed, counts, strict=True)])
    return counts


@served
def add_to_balance(book: Book, name: str, changes: Sequence[float]) -> None:
    """Add a number of records to the balance of each part of a mix."""
    with book.ledger.write() as tx:
        balance = _read_balance(tx, name, len(changes))
        _write_balance(tx, name, [owed + change for owed, change in zip(balance, changes, strict=True)])


def _read_balance(tx: Transaction, name: str, parts: int) -> list[float]:
    row = tx.first("SELECT value FROM meta WHERE key = ?", (f"mix:{name}",))
    balance: list[float] = json.loads(row[0]) if row is not None else []
    return balance if len(balance) == parts else [0.0] * parts


def _write_balance(tx: Transaction, name: str, balance: Sequence[float]) -> None:
    tx.run(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (f"mix:{name}", json.dumps([round(owed, 9) for owed in balance])),
    )


def _round_to_sum(shares: Sequence[float], total: int) -> list[int]:
    """Round shares to integers >= 0 that sum up to `total`.

    >>> _round_to_sum([7.5, 2.5], 10), _round_to_sum([-1.0, 5.0], 4)
    ([8, 2], [0, 4])
    """
    counts = [max(int(share), 0) for share in shares]
    by_rounding = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_rounding[: max(total - sum(counts), 0)]:
        counts[i] += 1
    while sum(counts) > total:
        counts[max(range(len(counts)), key=lambda i: counts[i] - shares[i] if counts[i] else -1e18)] -= 1
    return counts
