"""Checkpoints: what a rewind puts back, what it leaves, and that the sequence after it is the one of the first time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollbook
from rollbook import EID, Experience
from rollbook.book import (
    Balanced,
    Book,
    BookError,
    ConflictError,
    EasyToHard,
    First,
    Last,
    LeaseLostError,
    MaxSize,
    MaxUses,
    NewestPolicy,
    Priority,
    Proportional,
    ReadOnlyError,
    SamplesToInserts,
    Uniform,
    forget_checkpoint,
    queue,
    trained_steps,
)
from tests.book.conftest import DURABLE, new_url
from tests.book.postgres import Server

SAMPLERS = [
    First(),
    Last(),
    NewestPolicy(),
    Uniform(),
    Proportional(key="reward"),
    Priority(decay=0.7),
    Priority(function="decay_limit_randomization", sigma=0.5, limit=2),
    EasyToHard(),
    EasyToHard(key="info.difficulty", ascending=True),
    Balanced(edges=(0.3, 0.6)),
]
TWICE: dict[str, Any] = {"removers": [MaxUses(2)]}


def record(task: int, run: int = 0, *, batch: str = "b", version: int | None = None, size: int = 2) -> Experience:
    chance = (task * 7 + run * 3) % 11 / 10
    return Experience(
        eid=EID(batch=batch, task=task, run=run, suffix="s"),
        tokens=[1, 2, 3 + task, run],
        prompt_length=2,
        reward=chance,
        group_size=size,
        policy_versions=None if version is None else [version, version],
        info={"difficulty": chance},
    )


def some(tasks: range, runs: int = 2, **options: Any) -> list[Experience]:
    return [record(task, run, size=runs, **options) for task in tasks for run in range(runs)]


def seen(book: Book) -> dict[str, Any]:
    """All that a rewind puts back, as the ledger has it; not what a state says of numbers that come later."""
    with book.ledger.read() as tx:
        tallies = tx.all(
            "SELECT consumer, state, reason, SUM(n), SUM(weight) FROM tallies GROUP BY 1, 2, 3 HAVING SUM(n) <> 0 "
            "ORDER BY 1, 2, 3"
        )
        consumers = tx.all(
            "SELECT id, name, settings, state, grouped, inserts, samples, floor FROM consumers ORDER BY id"
        )
        return {
            "queue": tx.all(
                "SELECT consumer, seq, gid, state, reason, rank, value, weight, version, uses, attempts, lease, until "
                "FROM queue ORDER BY consumer, seq"
            ),
            "groups": tx.all(
                "SELECT consumer, gid, seq, size, runs, ready, due, CASE ready WHEN 1 THEN rank END, "
                "CASE ready WHEN 1 THEN weight END FROM groups ORDER BY consumer, seq, gid"
            ),
            "tallies": {row[:4] for row in tallies},
            "weights": {row[:3]: pytest.approx(row[4], abs=1e-9) for row in tallies},
            "consumers": [(*row[:3], {**json.loads(row[3]), "shifts": []}, *row[4:]) for row in consumers],
            "version": queue.announced_version(tx),
        }


def sound(book: Book) -> None:
    """Tallies are what the rows add up to, and uses are the acknowledgements that were not voided."""
    with book.ledger.read() as tx:
        names = tx.all("SELECT id, name, state FROM consumers")
    for id_, name, state in names:
        with book.ledger.read() as tx:
            counted = tx.all(
                "SELECT state, COALESCE(reason, ''), COUNT(*), SUM(weight) FROM queue WHERE consumer = ? GROUP BY 1, 2",
                (id_,),
            )
            tallies = tx.all(
                "SELECT state, reason, SUM(n), SUM(weight) FROM tallies WHERE consumer = ? GROUP BY 1, 2 "
                "HAVING SUM(n) <> 0",
                (id_,),
            )
            uses = tx.all(
                "SELECT records.uid, queue.uses FROM queue JOIN records ON records.seq = queue.seq "
                "WHERE queue.consumer = ? AND queue.uses > 0",
                (id_,),
            )
            ready = tx.first("SELECT COUNT(*) FROM groups WHERE consumer = ? AND ready = 1", (id_,))[0]
        assert {row[:3] for row in counted} == {row[:3] for row in tallies}
        assert {row[:2]: row[3] for row in counted} == {row[:2]: pytest.approx(row[3], abs=1e-9) for row in tallies}
        assert dict(uses) == {uid: len(steps) for uid, steps in trained_steps(book, name).items()}
        assert json.loads(state).get("ready", (0, 0))[0] == ready
        assert book.counts(name).adds_up


def sequence(book: Book, by: str, leases: int, count: int = 3, **options: Any) -> list[Any]:
    """What leases get, each acknowledged before the next, with their weights."""
    steps: list[Any] = []
    for step in range(leases):
        lease = book.lease(count, by=by, **options)
        weights = lease.weights and [round(weight, 9) for weight in lease.weights]
        steps.append((lease.uids, weights))
        if lease:
            lease.ack(step=step)
    return steps


@pytest.fixture(scope="session")
def many_books(postgres: Server) -> Iterator[str]:
    """A database for many books, each in a schema of its own: much quicker to have than a database for each."""
    url = postgres.database()
    yield url
    if not postgres.is_owned:  # ours goes with all that is in it
        postgres.drop(url)


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind != "postgresql":
        return new_url(kind, request, tmp_path)
    place: str = request.getfixturevalue("many_books")
    return f"{place}{'&' if '?' in place else '?'}schema=s{os.urandom(6).hex()}"


@pytest.fixture(params=["memory", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A book of each database; a folder's is that of a book in memory, and slower."""
    return place_of(request.param, request, tmp_path)


@pytest.fixture(params=DURABLE)
def durable_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place_of(request.param, request, tmp_path)


@pytest.fixture
def book(url: str) -> Iterator[Book]:
    with rollbook.open(url) as opened:
        yield opened


# --- making, listing, forgetting ----------------------------------------------------------------------------------


def test_a_checkpoint_is_listed_and_its_name_is_taken(book: Book) -> None:
    book.append(some(range(2)))
    book.announce(3)
    assert book.checkpoint("one") == "one"
    assert book.checkpoint("one") == "one"  # nothing happened in between
    [point] = book.checkpoints()
    assert (point.name, point.records, point.policy_version) == ("one", 4, 3)
    book.append(some(range(2, 3)))
    with pytest.raises(ConflictError, match="'one'.*2 events ago"):
        book.checkpoint("one")
    names = [book.checkpoint() for _ in range(3)]
    assert len(set(names)) == 3
    assert [p.name for p in book.checkpoints()] == ["one", *names]
    assert [p.event for p in book.checkpoints()] == sorted(p.event for p in book.checkpoints())


def test_only_so_many_are_kept(book: Book) -> None:
    for step in range(5):
        book.append(some(range(step, step + 1)))
        book.checkpoint(f"step-{step}", keep=2)
    assert [p.name for p in book.checkpoints()] == ["step-3", "step-4"]
    forget_checkpoint(book, "step-4")
    with pytest.raises(KeyError, match="'step-4', the book has 'step-3'"):
        forget_checkpoint(book, "step-4")
    forget_checkpoint(book, "step-3")
    with book.ledger.read() as tx:
        assert tx.first("SELECT (SELECT COUNT(*) FROM queue_before) + (SELECT COUNT(*) FROM groups_before)") == (0,)


def test_nothing_is_kept_without_a_checkpoint(book: Book) -> None:
    book.append(some(range(4)))
    sequence(book, "group", 2, 1)
    with book.ledger.read() as tx:
        assert tx.first("SELECT COUNT(*) FROM queue_before") == (0,)
        assert tx.first("SELECT COUNT(*) FROM groups_before") == (0,)


@pytest.mark.parametrize(("name", "options"), [("", {}), ("x" * 201, {}), (7, {}), ("x", {"keep": 0})])
def test_bad_names_and_numbers_are_refused(name: Any, options: dict[str, Any]) -> None:
    with rollbook.open("memory:") as book:
        with pytest.raises(ValueError, match="expected"):
            book.checkpoint(name, **options)
        assert book.checkpoints() == []


def test_rewinding_asks_for_what_is_there() -> None:
    with rollbook.open("memory:") as book:
        with pytest.raises(KeyError, match="'nowhere', the book has none"):
            book.rewind("nowhere")
        book.checkpoint("here")
        with pytest.raises(ValueError, match=r"checkpoint: got Checkpoint\(.*expected its name"):
            book.rewind(book.checkpoints()[0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="later: .*'burn'"):
            book.rewind("here", later="burn")


def test_a_reader_makes_and_rewinds_nothing(tmp_path: Any) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.checkpoint("a")
    with rollbook.open(tmp_path / "book", "r") as reader:
        assert [p.name for p in reader.checkpoints()] == ["a"]
        for act in (reader.checkpoint, lambda: forget_checkpoint(reader, "a"), lambda: reader.rewind("a")):
            with pytest.raises(ReadOnlyError):
                act()


# --- the same sequence again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_what_is_dropped_and_brought_again_is_taken_as_it_was(sampler: Any, by: str) -> None:
    """Chance does not go by how often a run was killed: the next sequence is that of a book that was never rewound."""

    def step(book: Book, number: int) -> list[Any]:
        book.append(some(range(3 * number, 3 * number + 3)))
        book.append([record(number, batch="eval")], evaluation=True)
        return sequence(book, by, 1, 2)

    with rollbook.open("memory:", sampler=sampler, **TWICE) as book:
        expected = [step(book, number) for number in range(6)]
    with rollbook.open("memory:", sampler=sampler, **TWICE) as book:
        steps = []
        for number in range(6):
            book.checkpoint(f"{number}")
            for back in {0: (), 1: (1, 1), 3: (3, 2, 0), 4: (4,)}.get(number, ()):
                for again in range(number, 6):
                    step(book, again)
                book.rewind(f"{back}", later="drop")
                for again in range(back, number):
                    assert step(book, again) == expected[again]
                    book.checkpoint(f"{again + 1}")
            steps.append(step(book, number))
        assert steps == expected
        sound(book)
        assert book.check().ok


@pytest.mark.parametrize("by", ["experience", "group"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_the_sequence_after_a_rewind_is_the_one_of_the_first_time(sampler: Any, by: str) -> None:
    with rollbook.open("memory:", sampler=sampler, seed=5, **TWICE) as book:
        book.append([record(task, run, version=task % 3) for task in range(12) for run in range(2)])
        sequence(book, by, 3, 2)
        then = seen(book)
        book.checkpoint("saved")
        first = sequence(book, by, 12, 2)
        assert any(uids for uids, _ in first[6:])
        for _ in range(2):
            done = book.rewind("saved")
            assert done.acks == sum(len(uids) for uids, _ in first)
            assert seen(book) == then
            sound(book)
            assert sequence(book, by, 12, 2) == first
        sound(book)


@pytest.mark.parametrize("by", ["experience", "group"])
def test_the_same_on_every_kind_of_book(url: str, by: str) -> None:
    with rollbook.open(url, sampler=Uniform(), seed=3, **TWICE) as book:
        book.append(some(range(8)))
        sequence(book, by, 2)
        then = seen(book)
        book.checkpoint("saved")
        first = sequence(book, by, 6)
        book.rewind("saved")
        assert seen(book) == then
        assert sequence(book, by, 6) == first
        sound(book)


def test_a_group_that_was_given_back_has_its_old_place() -> None:
    with rollbook.open("memory:", sampler=Uniform(), seed=1) as book:
        book.append(some(range(10)))
        book.lease(1, by="group").ack()
        book.checkpoint("saved")
        first = sequence(book, "group", 9, 1)
        book.rewind("saved")
        for _ in range(3):
            book.lease(2, by="group").nack()
        book.rewind("saved")
        assert sequence(book, "group", 9, 1) == first


def test_the_first_lease_by_group_after_the_checkpoint_is_undone_too() -> None:
    with rollbook.open("memory:", sampler=Uniform()) as book:
        book.append(some(range(10)))
        book.lease(3).ack()
        then = seen(book)
        book.checkpoint("saved")
        first = sequence(book, "group", 5, 1)
        book.rewind("saved")
        assert seen(book) == then
        assert sequence(book, "group", 5, 1) == first


def test_the_same_after_reopening(durable_url: str) -> None:
    with rollbook.open(durable_url, sampler=Uniform(), seed=3) as book:
        book.append(some(range(8)))
        book.checkpoint("saved")
        first = sequence(book, "group", 4, 1)
    with rollbook.open(durable_url) as book:
        book.rewind("saved")
    with rollbook.open(durable_url) as book:
        assert sequence(book, "group", 4, 1) == first


# --- what a rewind puts back --------------------------------------------------------------------------------------


def test_what_was_acknowledged_is_void_and_stays_in_the_history(book: Book) -> None:
    book.append(some(range(3)))
    book.lease(2).ack(step=1)
    book.checkpoint("saved")
    lease = book.lease(2)
    lease.ack(step=2)
    done = book.rewind("saved")
    assert (done.checkpoint, done.acks, done.leases, done.later, done.forgotten) == ("saved", 2, 0, 0, ())
    assert list(trained_steps(book).values()) == [[1], [1]]
    [*_, trained, voided] = book.history(lease.uids[0])
    assert (trained.kind, voided.kind) == ("trained", "voided")
    assert (voided.reason, voided.step, voided.lease) == ("saved", 2, trained.lease)
    assert voided.detail["what"] == "trained"
    again = book.lease(2)
    assert again.uids == lease.uids
    again.ack(step=7)
    assert [trained_steps(book)[uid] for uid in lease.uids] == [[7], [7]]
    sound(book)
    # Once more: only what is not void yet is voided.
    assert book.rewind("saved").acks == 2
    assert [entry.kind for entry in book.history(lease.uids[0])].count("voided") == 2
    sound(book)


def test_living_leases_end_and_their_holders_are_told(book: Book) -> None:
    book.append(some(range(3)))
    earlier = book.lease(2)
    book.checkpoint("saved")
    later = book.lease(1)
    for _ in range(2):
        done = book.rewind("saved")
        sound(book)
        with book.ledger.read() as tx:
            assert tx.first("SELECT samples, inserts FROM consumers") == (0, 6)
            assert tx.first("SELECT COUNT(*) FROM queue WHERE state <> 'waiting' OR lease IS NOT NULL") == (0,)
    assert done.leases == 0
    for lease in (earlier, later):
        with pytest.raises(LeaseLostError, match="it is voided"):
            lease.ack()
        with pytest.raises(LeaseLostError):
            lease.renew()
    assert book.lease(3).uids == earlier.uids + later.uids


def test_a_lease_that_was_acknowledged_in_part_is_freed_by_its_parts(book: Book) -> None:
    book.append(some(range(2)))
    lease = book.lease(3)
    lease.ack(uids=lease.uids[:1], step=1)
    book.checkpoint("saved")
    lease.ack(uids=lease.uids[1:2], step=2)
    book.rewind("saved")
    assert trained_steps(book) == {lease.uids[0]: [1]}
    counts = book.counts()
    assert (counts.waiting, counts.leased, counts.trained) == (3, 0, 1)
    sound(book)


def test_an_older_checkpoint_still_knows_what_was_leased(book: Book) -> None:
    book.append(some(range(3)))
    book.lease(2)
    book.checkpoint("old")
    book.lease(1).ack()
    book.checkpoint("new")
    assert book.rewind("new").leases == 1
    assert book.rewind("old").acks == 1
    with book.ledger.read() as tx:
        assert tx.first("SELECT samples FROM consumers") == (0,)
    sound(book)


def test_what_was_dropped_since_waits_again(url: str) -> None:
    now = [1000.0]
    with rollbook.open(url, clock=lambda: now[0], max_attempts=2, max_staleness=1, removers=[MaxSize(6)]) as book:
        book.announce(3)
        book.append(some(range(3), version=3))
        then = seen(book)
        book.checkpoint("saved")
        lease = book.lease(1)
        lease.nack()
        book.lease(1).nack()  # the second time: dropped
        book.lease(1).nack("no good", drop=True)
        book.drop(record(1, 1), reason="filtered")
        book.append(some(range(3, 5), version=3))  # pushes one out
        book.announce(9)
        assert {"attempts", "no good", "filtered", "max_size", "stale"} <= set(book.counts().dropped)
        book.rewind("saved", later="drop")
        after = seen(book)
        assert [row for row in after["queue"] if row[1] <= 6] == then["queue"]
        assert after["consumers"] == then["consumers"]
        assert book.policy_version == 3
        assert book.counts().dropped == {"rewound": 4}
        assert book.history(record(1, 1))[-1].detail == {"what": "dropped", "why": "filtered"}
        sound(book)
        book.announce(4)


def test_attempts_rests_and_priorities_are_as_they_were(url: str) -> None:
    now = [0.0]
    sampler = Priority(decay=1.0, cooldown=10.0)
    with rollbook.open(url, clock=lambda: now[0], sampler=sampler, lease_seconds=5.0) as book:
        book.append(some(range(4)))
        book.lease(2).ack()
        book.lease(1).nack()
        then = seen(book)
        book.checkpoint("saved")
        book.lease(3)
        now[0] = 20.0
        book.lease(8).ack()  # what expired and what has rested
        now[0] = 40.0
        book.lease(8).ack()
        book.rewind("saved")
        assert seen(book) == then
        sound(book)


def test_priorities_given_with_an_ack_are_taken_back() -> None:
    with rollbook.open("memory:", sampler=Proportional(key="reward"), removers=[MaxUses(None)]) as book:
        book.append(some(range(6)))
        lease = book.lease(4)
        lease.ack(priorities=dict.fromkeys(lease.uids, 5.0))
        then = seen(book)
        book.checkpoint("saved")
        first = sequence(book, "experience", 8)
        book.rewind("saved")
        for _ in range(4):
            lease = book.lease(4)
            lease.ack(priorities=dict.fromkeys(lease.uids, 0.1))
        book.rewind("saved")
        assert seen(book) == then
        assert sequence(book, "experience", 8) == first


def test_limiters_count_from_the_checkpoint() -> None:
    ratio = SamplesToInserts(ratio=1.0, slack=8, lease_size=4, append_size=8)
    with rollbook.open("memory:", limiters=[ratio]) as book:
        book.append(some(range(4)))
        book.checkpoint("saved")
        sequence(book, "experience", 2, 4)
        book.append(some(range(4, 8)))
        book.rewind("saved", later="drop")
        with book.ledger.read() as tx:
            assert tx.first("SELECT inserts, samples FROM consumers") == (8, 0)
        with pytest.raises(BookError, match="held back"):
            book.append(some(range(8, 9)), timeout=0.0)


def test_settings_are_as_they_were() -> None:
    with rollbook.open("memory:", sampler=Uniform(), seed=2) as book:
        book.append(some(range(8)))
        sequence(book, "group", 1)
        then = seen(book)
        book.checkpoint("saved")
        first = sequence(book, "group", 4, 1)
        book.rewind("saved")
        book.consumer(sampler=Last(), seed=9, group_size=2, change=True)
        sequence(book, "group", 2, 1)
        book.rewind("saved")
        assert seen(book) == then
        assert sequence(book, "group", 4, 1) == first
        sound(book)


def test_every_consumer_goes_back_and_one_made_since_begins_anew(book: Book) -> None:
    book.append(some(range(4)))
    book.consumer("critic", create=True, sampler=Last())
    book.lease(3, consumer="critic").ack(step=1)
    book.checkpoint("saved")
    first = sequence(book, "experience", 2, 2, consumer="critic")
    book.consumer("judge", create=True, sampler=First())
    book.lease(4, consumer="judge").ack(step=1)
    book.lease(1, consumer="judge", by="group")
    book.lease(4).ack(step=5)
    assert book.rewind("saved").acks == 4 + 4 + 4
    for name, waiting in (("train", 8), ("critic", 5), ("judge", 8)):
        assert book.counts(name).waiting == waiting
    sound(book)
    assert sequence(book, "experience", 2, 2, consumer="critic") == first


def test_later_checkpoints_are_forgotten_and_the_event_says_so(book: Book) -> None:
    book.append(some(range(4)))
    states = {}
    for step in range(4):
        book.checkpoint(f"step-{step}")
        states[step] = seen(book)
        book.lease(2).ack(step=step)
    assert book.rewind("step-1").forgotten == ("step-2", "step-3")
    assert [p.name for p in book.checkpoints()] == ["step-0", "step-1"]
    assert seen(book) == states[1]
    with book.ledger.read() as tx:
        detail = json.loads(tx.first("SELECT detail FROM events WHERE kind = 'rewound'")[0])
    assert detail["forgotten"] == ["step-2", "step-3"]
    book.lease(1).ack()
    book.rewind("step-0")
    assert seen(book) == states[0]
    sound(book)


def test_a_forgotten_checkpoint_leaves_what_older_ones_need(book: Book) -> None:
    book.append(some(range(4)))
    book.checkpoint("old")
    then = seen(book)
    book.lease(2, by="group").ack()
    book.checkpoint("new")
    book.append(some(range(4, 5)))
    book.lease(2).ack()
    forget_checkpoint(book, "new")
    book.lease(1).ack()
    book.rewind("old", later="drop")
    assert [row for row in seen(book)["queue"] if row[1] <= 8] == then["queue"]
    assert seen(book)["groups"] == then["groups"]
    sound(book)


# --- what came later ----------------------------------------------------------------------------------------------


def test_later_records_wait(book: Book) -> None:
    book.append(some(range(2)))
    book.lease(1, by="group").ack()
    book.checkpoint("saved")
    book.append(some(range(2, 4)))
    book.append(record(9, 0, batch="eval"), evaluation=True)
    book.fail(EID(batch="b", task=5, run=0), group_size=1)
    book.lease(3, by="group").ack(step=1)
    done = book.rewind("saved")
    assert (done.acks, done.later) == (6, 5)
    counts = book.counts()
    assert (counts.waiting, counts.trained, counts.dropped, counts.evaluation) == (6, 2, {"failed": 1}, 1)
    sound(book)
    assert book.lease(9, by="group").uids == [r.eid.uid for r in some(range(1, 4))]
    with book.ledger.read() as tx:
        assert tx.first("SELECT inserts FROM consumers") == (8,)


def test_later_records_are_dropped_and_may_come_again_with_other_content(book: Book) -> None:
    old = some(range(2))
    book.append(old)
    book.checkpoint("saved")
    rows = some(range(2, 3))
    book.append(rows)
    book.append(record(9, batch="eval"), evaluation=True)
    book.fail(EID(batch="b", task=6, run=0))
    book.lease(3, by="group").ack()
    assert book.rewind("saved", later="drop").later == 3
    assert book.counts().dropped == {"rewound": 3}
    with pytest.raises(BookError, match="rewound"):
        book[rows[0].eid.uid]
    assert book.append(old).existing == 4
    other = [row.replace(tokens=[9, 9, 9, 9, 9]) for row in rows]
    assert book.append(other).admitted == 2
    assert book.append(other).existing == 2
    assert book.append(record(9, batch="eval").replace(reward=0.25), evaluation=True).admitted == 1
    assert book.fail(EID(batch="b", task=6, run=0)) == 1
    assert book[rows[0].eid.uid].tokens.tolist() == [9] * 5
    assert book.counts().adds_up
    assert book.lease(9, by="group").uids == [r.eid.uid for r in [*old, *rows]]
    sound(book)


def test_a_bound_on_the_size_holds_for_what_is_kept_and_drops_nothing_else(book: Book) -> None:
    book.consumer(removers=[MaxSize(2)], change=True)
    book.append(some(range(1)))
    lease = book.lease(1)
    book.append(some(range(1, 2), 1))
    lease.nack()  # three wait: what is given back is not pushed out
    book.checkpoint("saved")
    book.append(some(range(2, 3), 1))
    book.rewind("saved", later="drop")
    assert (book.counts().waiting, book.counts().dropped) == (3, {"rewound": 1})
    book.append(some(range(3, 4), 1))
    book.rewind("saved", later="keep")
    assert book.lease(9).uids == [record(1).eid.uid, record(3).eid.uid]
    sound(book)


def test_a_group_that_was_completed_later_is_not_complete_any_more(book: Book) -> None:
    book.append([record(0, 0), record(1, 0), record(1, 1)])
    book.lease(1, by="group").nack()
    then = seen(book)["groups"]
    book.checkpoint("saved")
    book.append(record(0, 1))
    assert len(book.lease(2, by="group")) == 4
    book.rewind("saved", later="drop")
    assert [row[:6] for row in seen(book)["groups"]] == [row[:6] for row in then]
    assert book.lease(2, by="group").uids == [record(1, 0).eid.uid, record(1, 1).eid.uid]
    book.rewind("saved")
    book.append(record(0, 1))
    book.rewind("saved", later="keep")
    assert len(book.lease(2, by="group")) == 4
    sound(book)


def test_too_old_for_the_version_that_is_announced_again(book: Book) -> None:
    book.consumer(max_staleness=1, change=True)
    book.announce(5)
    book.checkpoint("saved")
    book.announce(8)
    assert book.append(some(range(2), version=5)).stale == 4
    assert book.append(some(range(2, 3), version=3)).stale == 2
    book.rewind("saved")
    assert (book.counts().waiting, book.counts().dropped) == (4, {"stale": 2})
    sound(book)


# --- facts stay ---------------------------------------------------------------------------------------------------


def test_revisions_stay_and_count_for_the_order(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard(), removers=[MaxUses(2)]) as book:
        rows = some(range(4), 1)
        book.append(rows)
        order = book.lease(4).uids
        book.rewind(book.checkpoint("saved"))
        book.lease(1).ack()
        book.revise(order[-1], reward=5.0, author="ana")
        book.rewind("saved")
        assert book[order[-1]].reward == 5.0
        assert book.lease(4).uids == [order[-1], *order[:-1]]
        book.rewind("saved")
        sound(book)


def test_what_feedback_returned_to_training_stays_returned(book: Book) -> None:
    book.append(some(range(2), 1))
    lease = book.lease(2)
    lease.ack(step=1)
    book.checkpoint("saved")
    book.revise(lease.uids[0], reward=0.5, author="ana", retrain=True)
    book.lease(1).ack(step=2)
    book.rewind("saved")
    assert book.counts().waiting == 1
    assert trained_steps(book) == {uid: [1] for uid in lease.uids}
    assert book.lease(2).uids == lease.uids[:1]
    book.rewind("saved")
    assert book.counts().waiting == 1
    sound(book)


def test_deletion_is_never_undone(book: Book) -> None:
    rows = some(range(2))
    book.append(rows)
    book.lease(1).ack()
    book.checkpoint("saved")
    book.append(some(range(2, 3)))
    book.delete([rows[0], rows[1], record(2, 0)], author="ana")
    for later in ("keep", "drop", "drop"):
        book.rewind("saved", later=later)
        counts = book.counts()
        assert (counts.trained, counts.dropped.get("deleted")) == (1, 2)
        sound(book)
    with pytest.raises(ConflictError, match="deleted"):
        book.append(record(2, 0).replace(tokens=[5, 5, 5]))
    with book.ledger.read() as tx:
        assert tx.first("SELECT inserts FROM consumers") == (3,)


def test_compaction_keeps_what_a_checkpoint_needs(url: str) -> None:
    with rollbook.open(url, removers=[MaxSize(4)]) as book:
        for task in range(3):
            book.append(some(range(task, task + 1)))  # the first two are too many
        book.checkpoint("saved")
        book.lease(1).ack()
        book.append(some(range(3, 5)))
        book.store.seal()
        book.compact(garbage=0.0, grace=0.0)
        with pytest.raises(BookError, match="max_size"):
            book[record(0, 0).eid.uid]
        book.rewind("saved", later="drop")
        lease = book.lease(9)
        assert [row.tokens.tolist() for row in lease] == [row.tokens.tolist() for row in some(range(1, 3))]
        book.store.seal()
        assert book.compact(garbage=0.0, grace=0.0).after < sum(1 for _ in lease) * 4096
        assert [row.eid.uid for row in book.get(lease.uids)] == lease.uids


# --- any history --------------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 30), st.integers(1, 3)),
        st.tuples(st.just("train"), st.sampled_from(["experience", "group"]), st.integers(1, 4)),
        st.tuples(st.just("nack"), st.sampled_from(["experience", "group"]), st.integers(1, 4)),
        st.tuples(st.just("hold"), st.sampled_from(["experience", "group"]), st.integers(1, 2)),
        st.tuples(st.just("critic"), st.sampled_from(["experience", "group"]), st.integers(1, 3)),
        st.tuples(st.just("drop"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("announce"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("change"), st.sampled_from([0, 3, 9]), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("checkpoint"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("rewind"), st.sampled_from(["keep", "drop"]), st.integers(0, 2)),
    ),
    max_size=14,
)


def act(book: Book, now: list[float], operations: list[tuple[str, Any, int]], free: bool, leases: list[Any]) -> None:
    """Run operations; those that would take the checkpoint "saved" away or leave it behind only if `free`."""
    for kind, first, second in operations:
        now[0] += 1.0
        if kind == "append":
            version = None if first % 5 == 0 else (book.policy_version or 0) - first % 2
            rows = [record(first, run, version=version) for run in range(second)]
            book.append(row for row in rows if row.eid.uid not in book or book.history(row)[-1].reason == "rewound")
        elif kind in ("train", "nack", "hold", "critic"):
            lease = book.lease(second, by=first, consumer="critic" if kind == "critic" else "train", create=True)
            if kind == "nack" and lease:
                lease.nack()
            elif kind == "hold":
                leases.append(lease)
            elif lease:
                follows = kind == "train" and book.consumer().sampler.key is not None
                priorities = {uid: (len(uid) + second) % 5 / 2 for uid in lease.uids}
                lease.ack(step=second, priorities=priorities if follows else None)
        elif kind == "drop":
            uid = record(first).eid.uid
            if uid in book:
                book.drop(uid)
        elif kind == "announce":
            book.announce((book.policy_version or 0) + first)
        elif kind == "change":
            book.consumer(seed=first, sampler=SAMPLERS[first], change=True)
        elif kind == "wait":
            now[0] += first
        elif kind == "checkpoint":
            book.checkpoint(keep=first if free else None)
        elif kind == "rewind" and (names := [p.name for p in book.checkpoints()]):
            if free:
                book.rewind(names[second % len(names)], later=first)
            elif second < len(names) and names.index("saved") <= len(names) - 1 - second:
                book.rewind(names[len(names) - 1 - second], later=first)
    sound(book)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SAMPLERS),
    st.sampled_from([None, 1]),
    st.sampled_from([(), (MaxSize(7),), (MaxSize(5, "worst"), MaxUses(3))]),
    OPERATIONS,
    OPERATIONS,
    st.sampled_from(["keep", "drop"]),
    st.sampled_from(["experience", "group"]),
)
def test_any_history_after_a_checkpoint_is_undone(
    sampler: Any, staleness: int | None, removers: Any, early: Any, late: Any, later: str, by: str
) -> None:
    now = [1000.0]
    options: dict[str, Any] = {"sampler": sampler, "max_staleness": staleness, "removers": removers, "max_attempts": 3}
    with rollbook.open("memory:", clock=lambda: now[0], lease_seconds=30.0, **options) as book:
        book.append(some(range(4), version=1))
        leases: list[Any] = []
        act(book, now, early, True, leases)
        for lease in leases:
            try:
                if lease:
                    lease.nack()
            except LeaseLostError:
                continue
        book.lease(1).nack()  # what time brings about has come
        moment = now[0]
        if "saved" in {p.name for p in book.checkpoints()}:
            forget_checkpoint(book, "saved")
        book.checkpoint("saved")
        then = seen(book)
        last = book.checkpoints()[-1].records
        first = sequence(book, by, 5, 2)
        now[0] = moment
        book.rewind("saved", later="drop")
        assert seen(book) == then
        act(book, now, late, False, [])
        now[0] = moment
        book.rewind("saved", later="drop")
        after = seen(book)
        consumers = {row[0] for row in then["consumers"]}
        for part in ("queue", "groups"):
            at = 1 if part == "queue" else 2
            assert [row for row in after[part] if row[at] <= last and row[0] in consumers] == then[part]
        assert all(row[3:5] == ("dropped", "rewound") for row in after["queue"] if row[1] > last)
        assert after["version"] == then["version"]
        assert [row for row in after["consumers"] if row[0] in consumers] == then["consumers"]
        sound(book)
        assert sequence(book, by, 5, 2) == first
        book.rewind("saved", later=later)
        sound(book)
