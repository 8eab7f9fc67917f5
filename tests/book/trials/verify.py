"""Whether a book holds what the log says it must, and nothing that contradicts itself.

The ledger is read by plain SQL (`tables`) and its events are replayed here; nothing of that goes through the book's
code. Only the contents of records are read by the book, and compared with digests that the trial computes.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import rollbook
from rollbook import Experience
from rollbook.book.book import Book
from tests.book.trials import tables
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, digest, expected, first_reward

ENDS = ("trained", "nacked", "expired", "dropped", "voided")
"""Events that end a lease's hold on a record."""
CLOCK = 1e-3
"""Seconds by which moments of one clock may differ where they are compared."""


def check(
    url: str,
    log: Log,
    later: Callable[[], Log] | None = None,
    *,
    done: bool = False,
    sample: int | None = None,
    seed: int = 0,
) -> list[str]:
    """List everything that is wrong with the book.

    Args:
        log: What had been said before.
        later: Returns what has been said until it is called, where others work meanwhile.
        done: Whether every consumer must be done with every record.
        sample: How many records' contents to read; all by default.
    """
    pieces = dict.fromkeys(log.appended)
    acks = list(log.acks)
    leases = list(log.leases)
    revised = dict(log.revised)
    try:
        book = rollbook.open(url)
    except Exception as error:
        return [f"the book does not open: {type(error).__name__}: {error}"]
    try:
        ledger = Ledger(tables.read(url))
        rows = _read(url, book, ledger, sample, seed)
        after = log if later is None else later()
        ledger.appends(pieces, after)
        ledger.acknowledgements(acks, after)
        ledger.leases(leases, after)
        ledger.lives()
        ledger.staleness()
        ledger.conservation()
        ledger.counters()
        if done:
            ledger.all_done()
        _contents(ledger, rows, revised, after)
        if later is None:
            _public_counts(book, ledger)
    except Exception as error:
        return [f"the book cannot be read: {type(error).__name__}: {error}"]
    finally:
        book.close()
    return ledger.wrong


class Ledger:
    """One state of the ledger, all of it, and what is wrong with it."""

    def __init__(self, state: tables.Tables) -> None:
        self.state = state
        self.wrong = [f"SQLite: {text}" for text in state.damage]
        self.uid = {record.seq: record.uid for record in state.records}
        self.seq = {record.uid: record.seq for record in state.records if record.removed_reason != "rewound"}
        self.gid = {record.seq: record.gid for record in state.records}
        self.training = {
            record.seq for record in state.records if not record.evaluation and record.removed_reason != "rewound"
        }
        self.consumers = {consumer.id: consumer for consumer in state.consumers}
        self.work = {(row.consumer, row.seq): row for row in state.work}
        self.voided = _voided(state.events)
        self.trained: dict[tuple[str, str], list[int | None]] = defaultdict(list)
        self.leased: dict[int, list[int]] = defaultdict(list)
        """The records of each lease, by its number."""
        for event in state.events:
            if event.kind == "trained" and event.id not in self.voided:
                self.trained[self.name(event.consumer), self.name_of(event.seq)].append(event.lease)
            elif event.kind == "leased" and event.lease is not None and event.seq is not None:
                self.leased[event.lease].append(event.seq)

    def name(self, consumer: int | None) -> str:
        return self.consumers[consumer].name if consumer in self.consumers else f"consumer {consumer}"

    def name_of(self, seq: int | None) -> str:
        return self.uid.get(-1 if seq is None else seq, f"record {seq}")

    def appends(self, pieces: dict[Piece, None], after: Log) -> None:
        """Every append that returned is there, all of it; nothing is there that nobody appended."""
        uids = Counter(record.uid for record in self.state.records if record.removed_reason != "rewound")
        self.wrong += [f"{uid}: it is there {count} times" for uid, count in uids.items() if count > 1]
        for piece in pieces:
            for uid in piece.uids:
                if uid not in self.seq:
                    self.wrong.append(f"{uid}: its append returned, and it is not in the book")
        for piece in after.tried:
            present = sum(uid in self.seq for uid in piece.uids)
            if 0 < present < piece.count:
                self.wrong.append(f"{piece}: {present} of the {piece.count} records of one append are there")
        for uid in self.seq:
            if uid not in after.piece_of:
                self.wrong.append(f"{uid}: it is in the book, and nobody ever appended it")
        places = Counter(
            (record.segment, record.start, record.size, record.slot)
            for record in self.state.records
            if record.segment is not None
        )
        self.wrong += [f"{place}: {count} records lie there" for place, count in places.items() if count > 1]
        admitted = Counter(event.seq for event in self.state.events if event.kind == "admitted")
        for seq, uid in self.uid.items():
            if admitted.pop(seq, 0) != 1:
                self.wrong.append(f"{uid}: its admission is not in the ledger exactly once")
        self.wrong += [f"record number {seq}: admitted, and not there" for seq in admitted]

    def acknowledgements(self, acks: list[tuple[str, int, tuple[str, ...]]], after: Log) -> None:
        """Every ack that returned counts once, one that was refused not at all, and none that nobody asked for."""
        for consumer, fence, uids in acks:
            for uid in uids:
                if self.trained.get((consumer, uid), []).count(fence) != 1:
                    self.wrong.append(
                        f"{uid}: {consumer} acknowledged it under lease {fence}, "
                        f"the ledger has {self.trained.get((consumer, uid), [])}"
                    )
        for consumer, fence, uids in after.acks_tried:
            trained = sum(fence in self.trained.get((consumer, uid), ()) for uid in uids)
            if 0 < trained < len(uids):
                self.wrong.append(
                    f"lease {fence} of {consumer}: {trained} of {len(uids)} records of one ack are trained"
                )
        for consumer, fence, uids in after.lost:
            for uid in uids:
                if fence in self.trained.get((consumer, uid), ()):
                    self.wrong.append(f"{uid}: {consumer} heard that lease {fence} was lost, and it counts as trained")
        requested = {(consumer, uid, fence) for consumer, fence, uids in after.acks_tried for uid in uids}
        max_uses = {consumer.name: consumer.max_uses for consumer in self.consumers.values()}
        for (consumer, uid), fences in self.trained.items():
            limit = max_uses.get(consumer, 1)
            if len(set(fences)) != len(fences) or (limit is not None and len(fences) > limit):
                self.wrong.append(f"{uid}: {consumer} acknowledged it {len(fences)} times, under leases {fences}")
            for fence in fences:
                if (consumer, uid, fence) not in requested:
                    self.wrong.append(f"{uid}: trained by {consumer} under lease {fence}, which nobody acknowledged")

    def leases(self, heard: list[tuple[str, int, str, int, tuple[str, ...]]], after: Log) -> None:
        """Every lease that a worker heard of is its alone and holds what the worker heard; the rows agree."""
        holders = Counter(fence for _, fence, *_ in after.leases)
        self.wrong += [f"lease {fence}: {count} workers heard of it" for fence, count in holders.items() if count > 1]
        for consumer, fence, _, _, uids in heard:
            leased = sorted(self.name_of(seq) for seq in self.leased.get(fence, ()))
            if leased != sorted(uids):
                self.wrong.append(f"lease {fence} of {consumer}: got {sorted(uids)}, the ledger has {leased}")
        for lease in self.state.leases:
            if lease.count != len(self.leased.get(lease.id, ())):
                self.wrong.append(
                    f"lease {lease.id}: of {lease.count} records, with {len(self.leased[lease.id])} events"
                )
        self.by_group = {fence: count for _, fence, by, count, _ in heard if by == "group"}

    def lives(self) -> None:
        """Replay every record's events for every consumer, and compare with where it is said to be."""
        ends = {lease.id: lease for lease in self.state.leases}
        admitted = {event.seq for event in self.state.events if event.kind == "admitted"}
        members: dict[str, list[int]] = defaultdict(list)
        for seq in sorted(self.training):
            members[self.gid[seq]].append(seq)
        state = {(c, seq): "absent" if seq in admitted else "waiting" for c in self.consumers for seq in self.training}
        holder: dict[tuple[int, int], int] = {}
        fences: dict[tuple[int, int], int] = {}
        uses: Counter[tuple[int, int]] = Counter()
        complete: set[int] = set()
        for event in self.state.events:
            if event.kind == "admitted":
                state.update({(c, event.seq): "waiting" for c in self.consumers if (c, event.seq) in state})
            if event.consumer is None or event.seq is None or event.consumer not in self.consumers:
                continue
            key = (event.consumer, event.seq)
            about = f"event {event.id}: {event.kind} under lease {event.lease}"
            if event.kind == "leased" and event.lease is not None:
                if event.lease in self.by_group and event.lease not in complete:
                    complete.add(event.lease)
                    self._whole_groups(event, state, members)
                if state.get(key) != "waiting" or key in holder:
                    self.wrong.append(
                        f"{about}, but the record {self.name_of(event.seq)!r} was {state.get(key)} under lease "
                        f"{holder.get(key)}"
                    )
                if event.lease <= fences.get(key, 0):
                    self.wrong.append(f"{about}: its number is not larger than {fences[key]}, of the lease before")
                fences[key] = holder[key] = event.lease
                state[key] = "leased"
            elif event.kind in ENDS:
                lease = holder.pop(key, None)
                if event.kind != "voided" and lease != event.lease:
                    self.wrong.append(
                        f"{about}, but the record {self.name_of(event.seq)!r} was {state.get(key)} under lease {lease}"
                    )
                limit = ends.get(-1 if event.lease is None else event.lease)
                if event.kind == "expired" and limit is not None and event.time < limit.expires - CLOCK:
                    self.wrong.append(f"{about}: {limit.expires - event.time:.3f} s before the lease ended")
                if event.kind == "trained" and limit is not None and event.time > limit.expires + CLOCK:
                    self.wrong.append(f"{about}: {event.time - limit.expires:.3f} s after the lease had ended")
                if event.kind == "trained":
                    uses[key] += 1
                elif event.kind == "voided" and json.loads(event.detail or "{}").get("what") == "trained":
                    uses[key] -= 1
                max_uses = self.consumers[event.consumer].max_uses
                spent = max_uses is not None and uses[key] >= max_uses
                state[key] = "dropped" if event.kind == "dropped" else "trained" if spent else "waiting"
            elif event.kind in ("rested", "returned"):
                state[key] = "waiting"
        for key, row in self.work.items():
            replayed = (state.get(key), holder.get(key), uses[key])
            if ("waiting" if row.state == "cooling" else row.state, row.lease, row.uses) != replayed:
                self.wrong.append(
                    f"{self.name_of(row.seq)}: {self.name(row.consumer)} has it as {row.state} under lease {row.lease} "
                    f"after {row.uses} uses, its events as {replayed[0]} under lease {replayed[1]} after {replayed[2]}"
                )
            if row.lease is not None and (row.lease not in ends or ends[row.lease].state != "active"):
                ended = ends[row.lease].state if row.lease in ends else "not there"
                self.wrong.append(f"{self.name_of(row.seq)}: held by lease {row.lease}, which is {ended}")

    def _whole_groups(
        self, event: tables.Event, state: dict[tuple[int, int], str], members: dict[str, list[int]]
    ) -> None:
        """A lease by group takes all that waits of its groups, none of which is leased, and no other group."""
        fence = event.lease or 0
        seqs = self.leased[fence]
        gids = {self.gid.get(seq, "?") for seq in seqs}
        if len(gids) > self.by_group[fence]:
            self.wrong.append(f"lease {fence}: asked for {self.by_group[fence]} groups, got {len(gids)}")
        for gid in gids:
            now = {seq: state[event.consumer or 0, seq] for seq in members[gid]}
            left = [self.name_of(seq) for seq, state in now.items() if state == "waiting" and seq not in seqs]
            if left:
                self.wrong.append(f"lease {fence}: a part of group {gid!r}, without {left}, which waited")
            if "leased" in now.values():
                self.wrong.append(f"lease {fence}: group {gid!r}, of which another lease held a record")

    def staleness(self) -> None:
        """No record was leased whose oldest token was too old for its consumer by what had been announced."""
        version = {record.seq: record.version_min for record in self.state.records}
        announced: int | None = None
        for event in self.state.events:
            if event.kind == "announced":
                announced = int(json.loads(event.detail or "{}")["version"])
            if event.kind != "leased" or event.consumer not in self.consumers or announced is None:
                continue
            bound = self.consumers[event.consumer].max_staleness
            oldest = version.get(-1 if event.seq is None else event.seq)
            if bound is not None and oldest is not None and oldest < announced - bound:
                self.wrong.append(
                    f"event {event.id}: {self.name_of(event.seq)} of version {oldest} leased after version {announced} "
                    f"was announced, at most {bound} behind"
                )

    def conservation(self) -> None:
        """Every record for training is with every consumer once: in `work`, or in its inbox, where it waits."""
        pending: Counter[tuple[int, int]] = Counter()
        for entry in self.state.inbox:
            seqs = [seq for seq in range(entry.first, entry.last + 1) if seq in self.training]
            pending.update((entry.consumer, seq) for seq in seqs)
            if len(seqs) != entry.count:
                self.wrong.append(f"{entry}: the book has {len(seqs)} such records")
        for (consumer, seq), count in pending.items():
            if count > 1:
                self.wrong.append(f"{self.name_of(seq)}: {count} times in the inbox of {self.name(consumer)}")
            if (consumer, seq) in self.work:
                self.wrong.append(f"{self.name_of(seq)}: in the inbox of {self.name(consumer)} and in its work")
        for consumer, seq in self.work:
            if seq not in self.training:
                self.wrong.append(f"{self.name_of(seq)}: in the work of {self.name(consumer)}, and not for training")
        self.standing: dict[str, Counter[str]] = {}
        for consumer in self.consumers:
            count = Counter(row.state for row in self.state.work if row.consumer == consumer)
            missing = [seq for seq in self.training if (consumer, seq) not in self.work]
            never = [seq for seq in missing if (consumer, seq) not in pending]
            self.wrong += [f"{self.name_of(seq)}: {self.name(consumer)} was never offered it" for seq in never]
            count["waiting"] += len(missing) + count.pop("cooling", 0)
            self.standing[self.name(consumer)] = count
            if sum(count.values()) != len(self.training):
                self.wrong.append(
                    f"{self.name(consumer)}: {dict(count)}, which is not the {len(self.training)} admitted"
                )

    def counters(self) -> None:
        """The tallies, and the consumers' numbers of inserts and samples, are those of the rows."""
        recount: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for row in self.state.work:
            recount[row.consumer, row.state, row.reason or ""][0] += 1
            recount[row.consumer, row.state, row.reason or ""][1] += row.weight
        recount[0, "admitted", ""][0] = len(self.training)
        tallies: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for shard in self.state.tallies:
            tallies[shard.consumer, shard.state, shard.reason][0] += shard.n
            tallies[shard.consumer, shard.state, shard.reason][1] += shard.weight
        for key in recount.keys() | tallies.keys():
            (n, weight), (tally, heavy) = recount.get(key, [0, 0.0]), tallies.get(key, [0, 0.0])
            if n != tally or abs(weight - heavy) > 1e-6 * max(n, 1):
                self.wrong.append(f"tally {key}: {tally} with weight {heavy}, counted {n} with weight {weight}")
        for consumer in self.state.consumers:
            rows = [row for row in self.state.work if row.consumer == consumer.id and row.state != "dropped"]
            samples = sum(row.uses + (row.state == "leased") for row in rows)
            if (consumer.inserts, consumer.samples) != (len(rows), samples):
                self.wrong.append(
                    f"{consumer.name}: {consumer.inserts} inserts and {consumer.samples} samples, counted "
                    f"{len(rows)} and {samples}"
                )

    def all_done(self) -> None:
        """Every consumer has trained on every record, or dropped it as stale where it has a bound."""
        for consumer in self.state.consumers:
            stale = {
                row.seq
                for row in self.state.work
                if row.consumer == consumer.id and (row.state, row.reason) == ("dropped", "stale")
            }
            left = [
                uid
                for uid, seq in self.seq.items()
                if not self.trained.get((consumer.name, uid))
                and not (seq in stale and consumer.max_staleness is not None)
            ]
            if left:
                self.wrong.append(f"{len(left)} records were not acknowledged by {consumer.name}, as {left[0]}")


def _voided(events: list[tables.Event]) -> set[int]:
    """Numbers of the events that rewinds took back."""
    details = (json.loads(event.detail or "{}") for event in events if event.kind == "voided")
    return {detail["event"] for detail in details if "event" in detail}


def _read(url: str, book: Book, ledger: Ledger, sample: int | None, seed: int) -> dict[str, Experience]:
    store = book.store.segments()
    for name in {record.segment for record in ledger.state.records if record.segment is not None} - store.keys():
        # Compaction may have been here since.
        if any(record.segment == name for record in tables.read(url).records) and not book.store.has(name):
            ledger.wrong.append(f"segment {name}: the ledger points to it, and it is not there")
    uids = list(ledger.seq)
    if sample is not None and sample < len(uids):
        # The latest are those that the last crash may have struck.
        half = sample // 2
        uids = [*random.Random(seed).sample(uids[:-half], half), *uids[-half:]]
    try:
        rows = book.get(uids).rows() if uids else []
    except Exception as error:
        ledger.wrong.append(f"records cannot be read: {type(error).__name__}: {error}")
        return {}
    if [row.eid.uid for row in rows] != uids:
        ledger.wrong.append(f"asked for {len(uids)} records, got {len(rows)}, or others")
    return dict(zip(uids, rows, strict=False))


def _contents(ledger: Ledger, rows: dict[str, Experience], revised: dict[str, int], after: Log) -> None:
    for uid, row in rows.items():
        piece = after.piece_of.get(uid)
        if piece is not None and digest(row) != expected(piece)[piece.uids.index(uid)]:
            ledger.wrong.append(f"{uid}: its content is not what was appended")
        allowed = after.rewards.get(uid, [first_reward(uid)])[revised.get(uid, 0) :]
        if row.reward not in allowed:
            ledger.wrong.append(f"{uid}: reward {row.reward}, expected one of {allowed}")


def _public_counts(book: Book, ledger: Ledger) -> None:
    """What the book says of itself is what its rows say."""
    for name, standing in ledger.standing.items():
        counts: Any = book.counts(name)
        public = Counter(
            waiting=counts.waiting,
            leased=counts.leased,
            trained=counts.trained,
            dropped=sum(counts.dropped.values()),
        )
        if public != standing or not counts.adds_up or counts.admitted != len(ledger.training):
            ledger.wrong.append(f"counts do not add up: {counts}, the rows say {dict(standing)}")
