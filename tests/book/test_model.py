"""A book against a model of it: any order of appends, leases, acknowledgements, revisions and restarts.

The model is plain Python, made from what the documentation promises. After every step the book's counts are the
model's, its tallies and groups are what a recount finds, and its events, replayed, give the state that it is in.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import rollbook
from rollbook.book import (
    Book,
    BookError,
    ConflictError,
    EasyToHard,
    First,
    Last,
    Lease,
    LeaseLostError,
    MaxAge,
    MaxSize,
    MaxUses,
    NewestPolicy,
    Priority,
    queue,
)
from tests.book.postgres import Server

NAMES = ("train", "critic")

# --- the model ----------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What the model knows of a record; `failed` is a tombstone's reason."""

    uid: str
    seq: int
    group: str
    run: int
    group_size: int | None
    version: int | None
    reward: float | None
    admitted: float
    failed: str | None = None
    evaluation: bool = False


@dataclass
class Progress:
    """How far one consumer is with one record."""

    record: Record
    state: str = "waiting"
    reason: str | None = None
    uses: int = 0
    attempts: int = 0
    lease: int | None = None
    until: float | None = None

    def drop(self, reason: str) -> None:
        self.state, self.reason, self.lease, self.until, self.attempts = "dropped", reason, None, None, 0

    def give_back(self, max_attempts: int | None) -> None:
        self.attempts += 1
        if max_attempts is not None and self.attempts >= max_attempts:
            self.drop("attempts")
        else:
            self.state, self.lease = "waiting", None


@dataclass
class Held:
    """A lease, by its fencing number."""

    consumer: str
    uids: list[str]
    seconds: float
    expires: float
    state: str = "active"
    last: tuple[int, int] | None = None
    """The step of the last acknowledgement and how many records it had; `None` if what came last was none."""

    def repeats(self, step: int) -> bool:
        """Whether an acknowledgement of all that is left, which is nothing, repeats the last one."""
        return not self.uids and self.last is not None and self.last[0] == step


@dataclass
class Reader:
    """A consumer group: its settings in plain words, and its progress by id."""

    sampler: Any
    uses: int | None
    max_size: int | None
    worst: bool
    max_age: float | None
    max_staleness: int | None
    group_size: int | None
    partial_after: float | None
    max_attempts: int | None
    rows: dict[str, Progress] = field(default_factory=dict)
    grouped: bool = False

    def settings(self) -> dict[str, Any]:
        removers: list[Any] = []
        if self.uses != 1 or isinstance(self.sampler, Priority):  # Others use a record once.
            removers.append(MaxUses(self.uses))
        if self.max_size is not None:
            removers.append(MaxSize(self.max_size, "worst" if self.worst else "oldest"))
        if self.max_age is not None:
            removers.append(MaxAge(self.max_age))
        return {
            "sampler": self.sampler,
            "removers": tuple(removers),
            "max_staleness": self.max_staleness,
            "group_size": self.group_size,
            "partial_after": self.partial_after,
            "max_attempts": self.max_attempts,
            "lease_seconds": 10.0,
        }

    def order(self, seq: int, uses: int, version: int | None, reward: float | None) -> float:
        """What is taken first has the smallest."""
        if isinstance(self.sampler, First):
            return seq
        if isinstance(self.sampler, Last):
            return -seq
        if isinstance(self.sampler, NewestPolicy):
            return math.inf if version is None else -version
        if isinstance(self.sampler, Priority):
            return -((version or 0) - self.sampler.decay * uses)
        return math.inf if reward is None else -reward

    def place(self, row: Progress) -> tuple[float, int]:
        record = row.record
        return self.order(record.seq, row.uses, record.version, record.reward), record.seq

    def waiting(self) -> list[Progress]:
        return [row for row in self.rows.values() if row.state == "waiting"]

    def may_go_on(self, uses: int) -> bool:
        limited = isinstance(self.sampler, Priority) and self.sampler.function != "linear_decay"
        return (self.uses is None or uses < self.uses) and not (limited and uses >= self.sampler.limit)

    def rest(self) -> float:
        return self.sampler.cooldown if isinstance(self.sampler, Priority) else 0.0


class Model:
    """The whole book."""

    def __init__(self, readers: dict[str, Reader]) -> None:
        self.readers = readers
        self.records: dict[str, Record] = {}
        self.leases: dict[int, Held] = {}
        self.announced: int | None = None
        self.now = 1000.0

    def floor(self, bound: int | None) -> float:
        return -math.inf if bound is None or self.announced is None else self.announced - bound

    def admit(self, records: list[Record]) -> int:
        """How many were too old for some consumer."""
        late = 0
        for record in records:
            self.records[record.uid] = record
        for reader in self.readers.values():
            floor = self.floor(reader.max_staleness)
            stale = 0
            for record in records:
                if record.evaluation:
                    continue
                row = reader.rows[record.uid] = Progress(record)
                if record.failed is not None:
                    row.drop(record.failed)
                elif record.version is not None and record.version < floor:
                    row.drop("stale")
                    stale += 1
            late = max(late, stale)
            if reader.max_size is not None and records[0].failed is None and not records[0].evaluation:
                waiting = reader.waiting()
                over = len(waiting) + sum(row.state == "cooling" for row in reader.rows.values()) - reader.max_size
                if reader.worst:
                    waiting.sort(key=lambda row: (-reader.place(row)[0], row.record.seq))
                for row in waiting[: max(over, 0)]:
                    row.drop("max_size")
        return late

    def pass_time(self, name: str, bound: int | None) -> None:
        """What time and the announced version bring about, before a consumer takes anything."""
        reader = self.readers[name]
        for number, lease in self.leases.items():
            if lease.consumer == name and lease.state == "active" and lease.expires <= self.now:
                lease.state = "expired"
                for row in reader.rows.values():
                    if row.lease == number:
                        row.give_back(reader.max_attempts)
        for row in reader.rows.values():
            if row.state == "cooling" and row.until is not None and row.until <= self.now:
                row.state, row.until = "waiting", None
        for row in reader.waiting():
            if reader.max_age is not None and row.record.admitted <= self.now - reader.max_age:
                row.drop("max_age")
        self.forget_stale(reader, reader.max_staleness if bound is None else bound)

    def forget_stale(self, reader: Reader, bound: int | None) -> None:
        for row in reader.waiting():
            if row.record.version is not None and row.record.version < self.floor(bound):
                row.drop("stale")

    def group(self, group: str) -> list[Record]:
        return [r for r in self.records.values() if r.group == group and not r.evaluation]

    def complete(self, reader: Reader, group: str) -> bool:
        members = self.group(group)
        sizes = [record.group_size for record in members if record.group_size is not None]
        size = max(sizes, default=reader.group_size)
        return size is None or len({record.run for record in members}) >= size

    def due(self, reader: Reader, group: str) -> bool:
        if reader.partial_after is None:
            return False
        return min(record.admitted for record in self.group(group)) + reader.partial_after <= self.now

    def ready(self, reader: Reader, group: str, *, due: bool = True) -> bool:
        rows = [reader.rows[record.uid] for record in self.group(group)]
        is_offered = self.complete(reader, group) or (due and self.due(reader, group))
        return is_offered and any(r.state == "waiting" for r in rows) and not any(r.state == "leased" for r in rows)

    def choose(self, name: str, count: int, by: str) -> list[str]:
        """The ids that a lease takes, in order."""
        reader = self.readers[name]
        if by == "experience":
            return [row.record.uid for row in sorted(reader.waiting(), key=reader.place)[:count]]
        reader.grouped = True
        candidates = []
        for group in dict.fromkeys(row.record.group for row in reader.rows.values()):
            if self.ready(reader, group):
                members = [row for row in reader.waiting() if row.record.group == group]
                rewards = [row.record.reward for row in members if row.record.reward is not None]
                versions = [row.record.version for row in members if row.record.version is not None]
                first = self.group(group)[0].seq
                order = reader.order(
                    first,
                    min(row.uses for row in members),
                    max(versions, default=None),
                    sum(rewards) / len(rewards) if rewards else None,
                )
                candidates.append((order, first, [row.record.uid for row in members]))
        return [uid for _, _, uids in sorted(candidates)[:count] for uid in uids]

    def train(self, reader: Reader, uids: list[str]) -> None:
        for uid in uids:
            row = reader.rows[uid]
            row.uses, row.attempts, row.lease, row.state = row.uses + 1, 0, None, "trained"
            if reader.may_go_on(row.uses):
                rest = reader.rest()
                row.state, row.until = ("cooling", self.now + rest) if rest else ("waiting", None)


# --- the book beside it -------------------------------------------------------------------------------------------

READERS = st.builds(
    Reader,
    sampler=st.sampled_from(
        [
            First(),
            Last(),
            NewestPolicy(),
            EasyToHard(),
            Priority(decay=0.6, cooldown=5.0),
            Priority(function="decay_limit_randomization", decay=0.6, limit=2),
        ]
    ),
    uses=st.sampled_from([1, 1, 2, None]),
    max_size=st.sampled_from([None, None, 3]),
    worst=st.booleans(),
    max_age=st.sampled_from([None, None, None, 30.0]),
    max_staleness=st.sampled_from([None, None, 0, 1]),
    group_size=st.sampled_from([None, None, 3]),
    partial_after=st.sampled_from([None, 15.0]),
    max_attempts=st.sampled_from([None, None, 2]),
)
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the task
        st.integers(0, 2),  # the run
        st.sampled_from([None, 0, 1, 2, 3]),  # the policy's version
        st.sampled_from([None, 0.0, 0.25, 1.0]),  # the reward
        st.sampled_from([None, None, 2]),  # the group's size
    ),
    min_size=1,
    max_size=4,
)


class Machine(RuleBasedStateMachine):
    """Does the same to a book and to the model."""

    def __init__(self, new_book: Callable[[], tuple[str, Callable[[], None]]]) -> None:
        super().__init__()
        self.url, self.clear = new_book()
        self.numbers = itertools.count(1)
        self.appended: dict[str, rollbook.Experience] = {}
        self.open_leases: dict[int, Lease] = {}
        self.book: Book | None = None

    def clock(self) -> float:
        return self.model.now

    @initialize(train=READERS, critic=READERS)
    def open(self, train: Reader, critic: Reader) -> None:
        self.model = Model(dict(zip(NAMES, (train, critic), strict=True)))
        self.book = rollbook.open(self.url, clock=self.clock, **train.settings())
        self.book.consumer("critic", create=True, **critic.settings())

    def teardown(self) -> None:
        if self.book is not None:
            self.book.close()
        self.clear()

    # --- bringing -------------------------------------------------------------------------------------------------

    def draw_uid(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.appended)), label="uid")

    @rule(drawn=RECORDS, evaluation=st.sampled_from([False] * 7 + [True]))
    def append(self, drawn: list[tuple[Any, ...]], evaluation: bool) -> None:
        rows, records = [], []
        for task, run, version, reward, size in drawn:
            number = next(self.numbers)
            info = {} if version is None else {"model_version": version}
            eid = {"batch": 1, "task": task, "run": run, "step": number, "suffix": "s"}
            row = rollbook.Experience(eid=eid, tokens=[1, 2, number], reward=reward, group_size=size, info=info)
            rows.append(row)
            uid = row.eid.uid
            self.appended[uid] = row
            seq = len(self.model.records) + len(records) + 1
            records.append(
                Record(uid, seq, f"1/{task}", run, size, version, reward, self.model.now, evaluation=evaluation)
            )
        done = self.book.append(rows, evaluation=evaluation)
        assert done.admitted == len(rows) and done.existing == 0
        assert done.stale == self.model.admit(records)

    @precondition(lambda self: self.appended)
    @rule(data=st.data(), change=st.sampled_from(["again", "another", "another beside a new one", "older version"]))
    def change_nothing(self, data: st.DataObject, change: str) -> None:
        """The same record again; another under its id, which is refused with all that comes with it."""
        uid = self.draw_uid(data)
        evaluation = self.model.records[uid].evaluation
        was = self.everything()
        if change == "again":
            done = self.book.append(self.appended[uid], evaluation=evaluation)
            assert (done.admitted, done.existing, done.revised) == (0, 1, 0)
        elif change == "older version":
            if self.model.announced:
                with pytest.raises(BookError, match="only a rewind goes back"):
                    self.book.announce(self.model.announced - 1)
        else:
            number = next(self.numbers)
            eid = {"batch": 1, "task": 0, "step": number, "suffix": "s"}
            others = [
                rollbook.Experience(eid=eid, tokens=[1, 2, number]),
                self.appended[uid].replace(tokens=[1, 2, 999]),
            ]
            with pytest.raises(ConflictError):
                self.book.append(others[change == "another" :], evaluation=evaluation)
        assert self.everything() == was

    @precondition(lambda self: any(r.reward is None for r in self.model.records.values() if r.uid in self.appended))
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5, 1.0]))
    def append_with_reward(self, data: st.DataObject, reward: float) -> None:
        """A reward that was missing comes with the same record: a revision."""
        unscored = [uid for uid in self.appended if self.model.records[uid].reward is None]
        uid = data.draw(st.sampled_from(unscored), label="uid")
        scored = self.appended[uid].replace(reward=reward)
        done = self.book.append(scored, evaluation=self.model.records[uid].evaluation, author="judge")
        assert (done.admitted, done.revised) == (0, 1)
        self.model.records[uid].reward = reward
        assert self.book.append(scored, evaluation=self.model.records[uid].evaluation).existing == 1

    @rule(task=st.integers(0, 2), runs=st.sets(st.integers(0, 2), min_size=1), size=st.sampled_from([None, 2]))
    def fail(self, task: int, runs: set[int], size: int | None) -> None:
        """A run that has a record for training, or failed before, is known."""
        eids, records = [], []
        runs_by_group = {(row.group, row.run) for row in self.model.records.values() if not row.evaluation}
        for run in sorted(runs):
            eids.append(rollbook.EID(batch=1, task=task, run=run, step=0, suffix="failed"))
            uid = eids[-1].uid
            if (f"1/{task}", run) not in runs_by_group:
                seq = len(self.model.records) + len(records) + 1
                records.append(Record(uid, seq, f"1/{task}", run, size, None, None, self.model.now, failed="crashed"))
        assert self.book.fail(eids, "crashed", group_size=size) == len(records)
        if records:
            self.model.admit(records)

    @precondition(lambda self: self.appended)
    @rule(data=st.data(), name=st.sampled_from([None, *NAMES]))
    def drop(self, data: st.DataObject, name: str | None) -> None:
        uids = {self.draw_uid(data) for _ in range(2)}
        count = 0
        for consumer, reader in self.model.readers.items():
            for uid in uids:
                row = reader.rows.get(uid)
                if name in (None, consumer) and row is not None and row.state in ("waiting", "cooling"):
                    row.drop("filtered")
                    count += 1
        assert self.book.drop(sorted(uids), consumer=name) == count

    # --- taking ---------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        count=st.integers(1, 3),
        by=st.sampled_from(["experience", "group"]),
        bound=st.sampled_from([None, None, 0, 1]),
        seconds=st.sampled_from([None, 5.0, 30.0]),
    )
    def lease(self, name: str, count: int, by: str, bound: int | None, seconds: float | None) -> None:
        lease = self.book.lease(count, by=by, consumer=name, max_staleness=bound, seconds=seconds)
        self.model.pass_time(name, bound)
        expected = self.model.choose(name, count, by)
        assert lease.uids == expected
        if by == "experience":
            assert bool(lease.short) == (len(expected) < count)
        if not expected:
            assert lease.fence == 0 and not lease and lease.ack() == 0
            return
        assert lease.fence > max(self.model.leases, default=0)
        lasts = 10.0 if seconds is None else seconds
        self.model.leases[lease.fence] = Held(name, list(expected), lasts, self.model.now + lasts)
        self.open_leases[lease.fence] = lease
        for uid in expected:
            row = self.model.readers[name].rows[uid]
            assert row.lease is None
            row.state, row.lease = "leased", lease.fence
        leased = lease.experiences
        assert [row.eid.uid for row in leased] == expected
        assert leased.values("reward") == [self.model.records[uid].reward for uid in expected]

    lease_more = lease  # The more leases there are beside each other, the more there is to go wrong.

    def living(self, data: st.DataObject) -> tuple[Lease, Held, bool]:
        number = data.draw(st.sampled_from(sorted(self.open_leases)), label="fence")
        modeled = self.model.leases[number]
        return self.open_leases[number], modeled, modeled.state == "active" and modeled.expires > self.model.now

    def part(self, data: st.DataObject, modeled: Held) -> list[str] | None:
        if not modeled.uids or data.draw(st.booleans(), label="all"):
            return None
        return data.draw(st.lists(st.sampled_from(modeled.uids), min_size=1, unique=True), label="part")

    def settle(self, lease: Lease, modeled: Held, part: list[str] | None, state: str) -> list[str]:
        chosen = list(modeled.uids) if part is None else part
        modeled.uids = [uid for uid in modeled.uids if uid not in chosen]
        if not modeled.uids:
            modeled.state = state
        return chosen

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), step=st.integers(0, 5))
    def ack(self, data: st.DataObject, step: int) -> None:
        lease, modeled, living = self.living(data)
        part = self.part(data, modeled)
        if part is None and modeled.repeats(step):
            assert modeled.last is not None
            assert lease.ack(step) == modeled.last[1], "the same acknowledgement again changes nothing"
            return
        if not living:
            self.lost(lambda: lease.ack(step, uids=part))
            return
        chosen = self.settle(lease, modeled, part, "acked")
        assert lease.ack(step, uids=part) == len(chosen)
        modeled.last = (step, len(chosen))
        self.model.train(self.model.readers[modeled.consumer], chosen)

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), drop=st.booleans())
    def nack(self, data: st.DataObject, drop: bool) -> None:
        lease, modeled, living = self.living(data)
        part = self.part(data, modeled)
        if not living:
            self.lost(lambda: lease.nack("too long", uids=part, drop=drop))
            return
        chosen = self.settle(lease, modeled, part, "nacked")
        modeled.last = None
        assert lease.nack("too long", uids=part, drop=drop) == len(chosen)
        reader = self.model.readers[modeled.consumer]
        for uid in chosen:
            if drop:
                reader.rows[uid].drop("too long")
            else:
                reader.rows[uid].give_back(reader.max_attempts)

    @precondition(lambda self: self.open_leases)
    @rule(data=st.data(), seconds=st.sampled_from([None, 20.0]))
    def renew(self, data: st.DataObject, seconds: float | None) -> None:
        lease, modeled, living = self.living(data)
        if not living:
            self.lost(lambda: lease.renew(seconds))
            return
        modeled.seconds = modeled.seconds if seconds is None else seconds
        modeled.expires = self.model.now + modeled.seconds
        assert lease.renew(seconds) == modeled.expires

    def lost(self, act: Callable[[], Any]) -> None:
        was = self.everything()
        with pytest.raises(LeaseLostError):
            act()
        assert self.everything() == was

    # --- time, versions, revisions, restarts ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(more=st.integers(0, 2))
    def announce(self, more: int) -> None:
        version = (self.model.announced or 0) + more
        self.book.announce(version)
        changed = version != self.model.announced
        self.model.announced = version
        for reader in self.model.readers.values() if changed else ():
            self.model.forget_stale(reader, reader.max_staleness)

    @precondition(lambda self: self.appended)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5, 2.0]), retrain=st.booleans())
    def revise(self, data: st.DataObject, reward: float, retrain: bool) -> None:
        uid = self.draw_uid(data)
        record = self.model.records[uid]
        changed = record.reward != reward
        assert self.book.revise(uid, reward=reward, author="ana", retrain=retrain) == changed
        record.reward = reward
        assert self.book[uid].reward == reward
        for reader in self.model.readers.values():
            row = reader.rows.get(uid)
            if retrain and row is not None and row.state in ("trained", "dropped"):
                row.state, row.reason = "waiting", None

    @precondition(lambda self: self.url != "memory:")
    @rule()
    def restart(self) -> None:
        """Another process: it has no leases, and those of the first end by the clock."""
        was = self.everything()
        self.book.close()
        self.book = rollbook.open(self.url, clock=self.clock)
        self.open_leases.clear()
        assert self.everything() == was

    # --- what always holds ----------------------------------------------------------------------------------------

    def table(self, sql: str) -> list[tuple[Any, ...]]:
        with self.book.ledger.read() as tx:
            return [tuple(row) for row in tx.all(sql)]

    def everything(self) -> list[list[tuple[Any, ...]]]:
        return [
            self.table("SELECT seq, uid, revision, removed_reason, reward FROM records ORDER BY seq"),
            self.table("SELECT consumer, seq, state, reason, rank, uses, attempts, lease FROM queue ORDER BY 1, 2"),
            self.table("SELECT consumer, gid, ready, rank, weight, due FROM groups ORDER BY 1, 2"),
            self.table("SELECT id, state, expires FROM leases ORDER BY id"),
            self.table("SELECT id, name, settings, state, inserts, samples, generation FROM consumers ORDER BY id"),
            self.table("SELECT consumer, state, reason, n FROM tallies ORDER BY 1, 2, 3"),
            self.table("SELECT MAX(id), COUNT(*) FROM events"),
            self.table("SELECT key, value FROM meta ORDER BY key"),
        ]

    @invariant()
    def counts_are_the_models(self) -> None:
        for name, reader in self.model.readers.items():
            counts = self.book.counts(name)
            assert counts.adds_up
            states = [row.state for row in reader.rows.values()]
            assert counts.admitted == len(states)
            assert counts.waiting == states.count("waiting") + states.count("cooling")
            assert (counts.leased, counts.trained) == (states.count("leased"), states.count("trained"))
            dropped: dict[str, int] = {}
            for row in reader.rows.values():
                if row.reason is not None:
                    dropped[row.reason] = dropped.get(row.reason, 0) + 1
            assert counts.dropped == dropped
            assert counts.evaluation == sum(r.evaluation for r in self.model.records.values())
        assert len(self.book) == len(self.model.records)

    @invariant()
    def every_record_is_where_the_model_has_it(self) -> None:
        queue.drain_inboxes(self.book)
        stored = self.table(
            "SELECT consumers.name, records.uid, queue.state, queue.reason, queue.uses, queue.attempts, queue.lease, "
            "queue.until FROM queue JOIN records ON records.seq = queue.seq "
            "JOIN consumers ON consumers.id = queue.consumer"
        )
        expected = {
            (name, uid, row.state, row.reason, row.uses, row.attempts, row.lease, row.until)
            for name, reader in self.model.readers.items()
            for uid, row in reader.rows.items()
        }
        assert len(stored) == len(expected) and set(stored) == expected

    @invariant()
    def leases_are_the_models(self) -> None:
        stored = self.table("SELECT id, state, expires FROM leases")
        assert set(stored) == {
            (number, modeled.state, modeled.expires) for number, modeled in self.model.leases.items()
        }
        # Numbers are those of one lease each: a record in two living leases of a consumer would be in one too few.
        for number, modeled in self.model.leases.items():
            if modeled.state == "active":
                rows = self.model.readers[modeled.consumer].rows
                assert {uid for uid, row in rows.items() if row.lease == number} == set(modeled.uids)

    @invariant()
    def tallies_are_a_recount(self) -> None:
        queue.drain_inboxes(self.book)
        tallies = self.table(
            "SELECT consumer, state, reason, SUM(n), SUM(weight) FROM tallies WHERE consumer > 0 GROUP BY 1, 2, 3"
        )
        by_key = {tuple(row[:3]): row[3:] for row in tallies}
        counted = self.table(
            "SELECT consumer, state, COALESCE(reason, ''), COUNT(*), SUM(weight) FROM queue GROUP BY 1, 2, 3"
        )
        assert {key for key, (n, _) in by_key.items() if n} == {tuple(row[:3]) for row in counted}
        for *key, count, weight in counted:
            assert by_key[tuple(key)][0] == count and by_key[tuple(key)][1] == pytest.approx(weight, abs=1e-9)

    @invariant()
    def groups_are_ready_when_they_should_be(self) -> None:
        with self.book.ledger.read() as tx:
            for consumer in rollbook.book.consumer.all_consumers(tx):
                reader = self.model.readers[consumer.name]
                assert consumer.grouped == reader.grouped
                groups = tx.all("SELECT gid, ready, weight FROM groups WHERE consumer = ?", (consumer.id,))
                if not reader.grouped:
                    assert not groups
                    continue
                assert {row[0] for row in groups} == {row.record.group for row in reader.rows.values()}
                for gid, ready, _ in groups:
                    # A deadline is looked at when somebody leases.
                    expected = {self.model.ready(reader, gid), self.model.ready(reader, gid, due=False)}
                    assert bool(ready) in expected, gid
                count, weight = consumer.state.get("ready", (0, 0.0))
                assert count == sum(row[1] for row in groups)
                assert weight == pytest.approx(sum(row[2] for row in groups if row[1]), abs=1e-9)

    @invariant()
    def events_replayed_give_the_state(self) -> None:
        names = dict(self.table("SELECT id, name FROM consumers"))
        uids = dict(self.table("SELECT seq, uid FROM records"))
        states: dict[tuple[str, str], str] = {}
        uses: dict[tuple[str, str], int] = {}
        for kind, seq, consumer, reason in self.table("SELECT kind, seq, consumer, reason FROM events ORDER BY id"):
            if seq is None or kind == "revised":
                continue
            if kind == "admitted":
                if not self.model.records[uids[seq]].evaluation:
                    states |= {(name, uids[seq]): "waiting" for name in NAMES}
                continue
            key = names[consumer], uids[seq]
            now = states[key]
            if kind == "leased":
                assert now == "waiting"
                states[key] = "leased"
            elif kind == "trained":
                assert now == "leased"
                uses[key] = uses.get(key, 0) + 1
                reader = self.model.readers[key[0]]
                again = reader.may_go_on(uses[key])
                states[key] = ("cooling" if reader.rest() else "waiting") if again else "trained"
            elif kind in ("nacked", "expired"):
                assert now == "leased"
                states[key] = "waiting"
            elif kind == "rested":
                assert now == "cooling"
                states[key] = "waiting"
            elif kind == "returned":
                assert now == "trained" or now.startswith("dropped")
                states[key] = "waiting"
            else:
                assert kind == "dropped" and not now.startswith("dropped") and now != "trained"
                states[key] = f"dropped {reason}"
        assert states == {
            (name, uid): row.state if row.reason is None else f"dropped {row.reason}"
            for name, reader in self.model.readers.items()
            for uid, row in reader.rows.items()
        }


def check(new_book: Callable[[], tuple[str, Callable[[], None]]], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: Machine(new_book),
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


def test_a_book_in_memory_does_what_the_model_does() -> None:
    check(lambda: ("memory:", lambda: None), 40, 40)


def test_a_folder_does_what_the_model_does() -> None:
    def new_book() -> tuple[str, Callable[[], None]]:
        folder = tempfile.mkdtemp()
        return folder, lambda: shutil.rmtree(folder)

    check(new_book, 8, 40)


def test_a_book_in_postgresql_does_what_the_model_does(postgres: Server) -> None:
    url = postgres.database()
    numbers = itertools.count()
    joined = "&" if "?" in url else "?"

    def new_book() -> tuple[str, Callable[[], None]]:
        return f"{url}{joined}schema=book{next(numbers)}", lambda: None

    try:
        check(new_book, 4, 25)
    finally:
        postgres.drop(url)
