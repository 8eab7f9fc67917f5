"""Whether a book holds what the log says it must, and nothing that contradicts itself."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import rollbook
from rollbook import Experience
from rollbook.book.book import Book
from rollbook.book.ledger import SQLiteLedger
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, digest, expected, first_reward

# From which states an event leads where, for one record and one consumer: "" is before it was admitted.
MOVES = {
    "leased": (("waiting",), "leased"),
    "trained": (("leased",), "trained"),
    "nacked": (("leased",), "waiting"),
    "expired": (("leased",), "waiting"),
}


def check(
    url: str,
    log: Log,
    later: Callable[[], Log] | None = None,
    *,
    done: bool = False,
    sample: int | None = None,
    seed: int = 0,
) -> list[str]:
    """Everything that is wrong with the book; empty if nothing is.

    `log` is what had been said before; `later()` what has been said until it is called, where others work meanwhile.
    `done`: every record must have been acknowledged by every consumer. `sample`: read only so many records' contents.
    """
    known = dict.fromkeys(log.appended)
    acks = list(log.acks)
    floor = dict(log.revised)
    try:
        book = rollbook.open(url)
    except Exception as error:
        return [f"the book does not open: {type(error).__name__}: {error}"]
    try:
        with book.ledger.read() as tx:
            seen = _Ledger(tx)
            if isinstance(book.ledger, SQLiteLedger):
                seen.wrong += [f"SQLite: {row[0]}" for row in tx.all("PRAGMA integrity_check") if row[0] != "ok"]
        rows = _read(book, seen, sample, seed)
        after = log if later is None else later()
        seen.appends(known, after)
        seen.acknowledgements(acks, after)
        seen.lives()
        seen.counts()
        if done:
            seen.all_done()
        _contents(seen, rows, floor, after)
        if later is None:
            _public_counts(book, seen)
    except Exception as error:
        return [f"the book cannot be read: {type(error).__name__}: {error}"]
    finally:
        book.close()
    return seen.wrong


class _Ledger:
    """One state of the ledger, all of it."""

    def __init__(self, tx: Any) -> None:
        self.wrong: list[str] = []
        self.records = tx.all("SELECT seq, uid, segment, start, size, slot, gone, evaluation FROM records ORDER BY seq")
        self.uid = {row[0]: row[1] for row in self.records}
        self.seq = {uid: seq for seq, uid in self.uid.items()}
        self.consumers = tx.all("SELECT id, name, inserts, samples FROM consumers")
        self.names = {row[0]: row[1] for row in self.consumers}
        self.work = {
            (row[0], row[1]): row
            for row in tx.all("SELECT consumer, seq, state, reason, weight, lease, uses FROM work")
        }
        self.leases = {row[0]: row for row in tx.all("SELECT id, consumer, state FROM leases")}
        self.tallies = tx.all("SELECT consumer, state, reason, n, weight FROM tallies")
        self.events = tx.all("SELECT id, seq, consumer, kind, lease FROM events ORDER BY id")
        self.trained: dict[tuple[str, str], list[int]] = defaultdict(list)
        for _, seq, consumer, kind, lease in self.events:
            if kind == "trained":
                self.trained[self.names[consumer], self.uid.get(seq, "?")].append(lease)

    def appends(self, known: dict[Piece, None], after: Log) -> None:
        if len(self.seq) != len(self.records):
            self.wrong.append(f"{len(self.records) - len(self.seq)} ids are there twice")
        for piece in known:
            for uid in piece.uids:
                if uid not in self.seq:
                    self.wrong.append(f"{uid}: its append returned, and it is not in the book")
        for piece in after.tried:
            there = sum(uid in self.seq for uid in piece.uids)
            if 0 < there < piece.count:
                self.wrong.append(f"{piece}: {there} of the {piece.count} records of one append are there")
        for uid in self.seq:
            if uid not in after.piece_of:
                self.wrong.append(f"{uid}: it is in the book, and nobody ever appended it")
        places = Counter(row[2:6] for row in self.records if row[2] is not None)
        self.wrong += [f"{place}: {n} records lie there" for place, n in places.items() if n > 1]
        admitted = Counter(seq for _, seq, _, kind, _ in self.events if kind == "admitted")
        for seq, uid in self.uid.items():
            if admitted.pop(seq, 0) != 1:
                self.wrong.append(f"{uid}: its admission is not in the ledger exactly once")
        self.wrong += [f"record number {seq}: admitted, and not there" for seq in admitted]

    def acknowledgements(self, acks: list[tuple[str, int, tuple[str, ...]]], after: Log) -> None:
        for consumer, fence, uids in acks:
            for uid in uids:
                if self.trained.get((consumer, uid)) != [fence]:
                    self.wrong.append(
                        f"{uid}: {consumer} acknowledged it under lease {fence}, "
                        f"the ledger has {self.trained.get((consumer, uid), [])}"
                    )
        for consumer, fence, uids in after.acks_tried:
            there = sum(fence in self.trained.get((consumer, uid), ()) for uid in uids)
            if 0 < there < len(uids):
                self.wrong.append(f"lease {fence} of {consumer}: {there} of {len(uids)} records of one ack are trained")
        for consumer, fence, uids in after.lost:
            for uid in uids:
                if fence in self.trained.get((consumer, uid), ()):
                    self.wrong.append(f"{uid}: {consumer} heard that lease {fence} was lost, and it counts as trained")
        asked = {(consumer, uid, fence) for consumer, fence, uids in after.acks_tried for uid in uids}
        for (consumer, uid), fences in self.trained.items():
            if len(fences) != 1:
                self.wrong.append(f"{uid}: {consumer} acknowledged it {len(fences)} times, under leases {fences}")
            for fence in fences:
                if (consumer, uid, fence) not in asked:
                    self.wrong.append(f"{uid}: trained by {consumer} under lease {fence}, which nobody acknowledged")

    def lives(self) -> None:
        """Replay every record's events for every consumer, and compare with where it is said to be."""
        state = dict.fromkeys(self.work, "waiting")
        holder: dict[tuple[int, int], int | None] = {}
        for number, seq, consumer, kind, lease in self.events:
            if consumer is None or kind not in MOVES:
                continue
            before, becomes = MOVES[kind]
            key = (consumer, seq)
            if state.get(key) not in before or (kind != "leased" and holder.get(key) != lease):
                self.wrong.append(
                    f"event {number}: {kind} under lease {lease}, but the record {self.uid.get(seq, seq)!r} was "
                    f"{state.get(key)} under lease {holder.get(key)}"
                )
            state[key] = becomes
            holder[key] = lease if becomes == "leased" else None
        for key, (consumer, seq, now, _, _, lease, uses) in self.work.items():
            uid = self.uid.get(seq, "?")
            if now != state[key] or lease != holder.get(key) or uses != (now == "trained"):
                self.wrong.append(
                    f"{uid}: {self.names.get(consumer)} has it as {now} under lease {lease} after {uses} uses, its "
                    f"events as {state[key]} under lease {holder.get(key)}"
                )
            if lease is not None and self.leases[lease][2] != "active":
                self.wrong.append(f"{uid}: held by lease {lease}, which is {self.leases[lease][2]}")
        for consumer in self.names:
            missing = self.uid.keys() - {seq for each, seq in self.work if each == consumer}
            self.wrong += [f"{self.uid[seq]}: {self.names[consumer]} was never offered it" for seq in missing]

    def counts(self) -> None:
        recount: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for consumer, _, state, reason, weight, _, _ in self.work.values():
            recount[consumer, state, reason or ""][0] += 1
            recount[consumer, state, reason or ""][1] += weight
        recount[0, "admitted", ""][0] = len(self.records)
        kept = {(consumer, state, reason): [n, weight] for consumer, state, reason, n, weight in self.tallies}
        for key in recount.keys() | kept.keys():
            (n, weight), (has, heavy) = recount.get(key, [0, 0.0]), kept.get(key, [0, 0.0])
            if n != has or abs(weight - heavy) > 1e-6 * max(n, 1):
                self.wrong.append(f"tally {key}: {has} with weight {heavy}, counted {n} with weight {weight}")
        for consumer, name, inserts, samples in self.consumers:
            held = sum(
                {"leased": 1, "nacked": -1, "expired": -1}.get(kind, 0)
                for _, _, each, kind, _ in self.events
                if each == consumer
            )
            if (inserts, samples) != (len(self.records), held):
                self.wrong.append(
                    f"{name}: {inserts} inserts and {samples} samples, counted {len(self.records)} and {held}"
                )

    def all_done(self) -> None:
        for consumer in self.names.values():
            left = [uid for uid in self.seq if len(self.trained.get((consumer, uid), ())) != 1]
            if left:
                self.wrong.append(f"{len(left)} records were not acknowledged by {consumer}, as {left[0]}")


def _read(book: Book, seen: _Ledger, sample: int | None, seed: int) -> dict[str, Experience]:
    shelf = book.shelf.segments()
    for name in {row[2] for row in seen.records if row[2] is not None} - shelf.keys():
        # Compaction may have been here since.
        with book.ledger.read() as tx:
            if tx.one("SELECT 1 FROM records WHERE segment = ?", (name,)) and not book.shelf.has(name):
                seen.wrong.append(f"segment {name}: the ledger points to it, and it is not there")
    uids = list(seen.seq)
    if sample is not None and sample < len(uids):
        # The latest are those that the last crash may have struck.
        half = sample // 2
        uids = [*random.Random(seed).sample(uids[:-half], half), *uids[-half:]]
    try:
        rows = book.get(uids).rows() if uids else []
    except Exception as error:
        seen.wrong.append(f"records cannot be read: {type(error).__name__}: {error}")
        return {}
    if [row.eid.uid for row in rows] != uids:
        seen.wrong.append(f"asked for {len(uids)} records, got {len(rows)}, or others")
    return dict(zip(uids, rows, strict=False))


def _contents(seen: _Ledger, rows: dict[str, Experience], floor: dict[str, int], after: Log) -> None:
    for uid, row in rows.items():
        piece = after.piece_of.get(uid)
        if piece is not None and digest(row) != expected(piece)[piece.uids.index(uid)]:
            seen.wrong.append(f"{uid}: its content is not what was appended")
        allowed = after.rewards.get(uid, [first_reward(uid)])[floor.get(uid, 0) :]
        if row.reward not in allowed:
            seen.wrong.append(f"{uid}: reward {row.reward}, expected one of {allowed}")


def _public_counts(book: Book, seen: _Ledger) -> None:
    for name in seen.names.values():
        found = book.counts(name)
        if not found.adds_up or found.admitted != len(seen.records):
            seen.wrong.append(f"counts do not add up: {found}")
