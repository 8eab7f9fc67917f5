"""Rollouts in progress: claims, their fences and expiry, weights and reports, in each kind of book."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.book import repair, rollouts, snapshot
from rollbook.book.book import Book
from rollbook.book.errors import BookError, ConflictError
from rollbook.book.rollouts import (
    RolloutClaim,
    append_rollouts,
    claim_rollouts,
    close_rollouts,
    count_open_groups,
    fetch_weights,
    finish_claims,
    groups_in_book,
    open_rollouts,
    publish_weights,
    read_rollouts,
    remove_worker,
    renew_claims,
    report_worker,
    return_claims,
    return_worker_claims,
    set_limit,
    suspend_rollouts,
    weights_version,
)
from rollbook.book.sampler import OldestPolicy
from rollbook.book.status import read_status
from rollbook.core.experiences import Experiences


@pytest.fixture
def book(url: str) -> Iterator[Book]:
    with rollbook.open(url) as opened:
        yield opened


def begin(book: Book, limit: int = 8, **options: Any) -> None:
    open_rollouts(book, {}, next=options.pop("next", 0), **options)
    set_limit(book, limit)


def claim(book: Book, count: int = 1, worker: str = "a", seconds: float = 60.0) -> list[RolloutClaim]:
    return claim_rollouts(book, worker, count, seconds=seconds)


def numbers(claims: list[RolloutClaim]) -> list[int]:
    return [assignment.number for assignment in claims]


def group(number: int, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Experiences:
    """The records of a group, as two workers with the same seed generate them but for `info`."""
    return Experiences(
        [
            Experience(
                eid=EID(batch=1, task=number, run=run, suffix="r"),
                tokens=[1, 2, 3 + number],
                prompt_length=1,
                reward=reward,
                policy_versions=version,
                group_size=len(rewards),
            )
            for run, reward in enumerate(rewards)
        ]
    )


def kinds(book: Book, *names: str) -> list[tuple[str, int]]:
    """Events about groups: kind and number, in order."""
    marks = ",".join("?" * len(names))
    rows = book.ledger.all(f"SELECT kind, detail FROM events WHERE kind IN ({marks}) ORDER BY id", names)
    return [(kind, json.loads(detail)["number"]) for kind, detail in rows]


# --- claims -----------------------------------------------------------------------------------------------------------


def test_claims_follow_the_limit(book: Book) -> None:
    assert read_rollouts(book) is None and claim(book) == []
    open_rollouts(book, {"config": {"a": 1}}, next=3)
    assert claim(book) == []  # the limit is where it begins
    set_limit(book, 6)
    book.announce(7)
    first = claim(book, 2)
    assert numbers(first) == [3, 4] and {assignment.version for assignment in first} == {7}
    assert numbers(claim(book, 5, "b")) == [5] and claim(book) == []
    state = read_rollouts(book)
    assert state is not None and (state.status, state.next, state.limit) == ("open", 6, 6)
    assert state.settings == {"config": {"a": 1}} and [c.worker for c in state.in_flight] == ["a", "a", "b"]
    set_limit(book, 4)  # lower than what was begun: nothing is taken away
    assert len(read_rollouts(book).in_flight) == 3  # type: ignore[union-attr]
    set_limit(book, 7)
    assert numbers(claim(book, 5)) == [6]
    fences = [c.fence for c in read_rollouts(book).in_flight]  # type: ignore[union-attr]
    assert len(set(fences)) == 4 and fences == sorted(fences)


def test_claims_of_a_group_last_longer_each_time_it_expires(book: Book) -> None:
    begin(book, 1)
    durations = []
    for _ in range(3):
        [current] = claim(book, seconds=0.06)
        durations.append(current.expires - current.claimed)
        assert renew_claims(book, [current], 0.05) == [current]
        [state] = read_rollouts(book).in_flight  # type: ignore[union-attr]
        durations.append(state.expires - time.time())
        time.sleep(max(state.expires - time.time(), 0) + 0.02)
    assert durations[::2] == pytest.approx([0.06, 0.12, 0.24])
    assert 0.1 < durations[5] < 0.21
    [current] = claim(book, seconds=10)
    return_claims(book, [current], "worker stopped")
    [current] = claim(book, seconds=10)
    assert current.expires - current.claimed == pytest.approx(80)


def test_a_fence_that_was_lost_changes_nothing(book: Book) -> None:
    begin(book)
    [old] = claim(book, seconds=0.05)
    assert renew_claims(book, [old], 0.05) == [old]
    time.sleep(0.1)
    assert renew_claims(book, [old], 0.05) == [old]  # expired, but nobody has it
    time.sleep(0.1)
    [new] = claim(book, worker="b")
    assert new.number == old.number and new.fence > old.fence and new.expires - new.claimed == pytest.approx(120)
    assert renew_claims(book, [old], 60) == []
    assert finish_claims(book, [old]) == return_claims(book, [old], "late") == 0
    assert not append_rollouts(book, old, group(0)) and len(book) == 0
    assert append_rollouts(book, new, group(0)) and len(book) == 2
    assert finish_claims(book, [new]) == 0
    assert kinds(book, "begun", "reassigned", "generated") == [
        ("begun", 0),
        ("reassigned", 0),
        ("begun", 0),
        ("generated", 0),
    ]
    # Called again, as after an answer that was lost.
    assert append_rollouts(book, new, group(0)) and len(book) == 2


def test_returned_groups_come_first(book: Book) -> None:
    begin(book)
    first, second, third = claim(book, 3)
    assert return_claims(book, [third, first], "stopped") == 2
    assert read_rollouts(book).returned == [0, 2]  # type: ignore[union-attr]
    assert numbers(claim(book, 3, "b")) == [0, 2, 3]
    assert return_worker_claims(book, "b", "restarted") == 3
    assert return_worker_claims(book, "b", "restarted") == 0
    assert finish_claims(book, [second]) == 1
    assert numbers(claim(book, 9, "c")) == [0, 2, 3, 4, 5, 6, 7]
    reasons = book.ledger.all("SELECT reason FROM events WHERE kind = 'reassigned' ORDER BY id")
    assert [reason for (reason,) in reasons] == ["stopped"] * 2 + ["restarted"] * 3


def test_opening_voids_all_claims(book: Book) -> None:
    begin(book)
    before = claim(book, 3)
    suspend_rollouts(book, {})
    state = read_rollouts(book)
    assert state is not None and state.status == "suspended" and state.in_flight == [] and claim(book) == []
    open_rollouts(book, {}, next=2, returned=[1])
    assert numbers(claim(book, 4)) == [1]  # until the limit is set
    assert renew_claims(book, before, 60) == [] and not append_rollouts(book, before[2], group(2))
    set_limit(book, 3)
    after = claim(book, 4)
    assert numbers(after) == [2] and after[0].fence > before[-1].fence
    close_rollouts(book)
    assert read_rollouts(book).status == "finished" and claim(book) == []  # type: ignore[union-attr]
    assert not append_rollouts(book, after[0], group(2))


def test_a_claim_waits(book: Book) -> None:
    begin(book, limit=0)
    start = time.monotonic()
    assert claim_rollouts(book, "a", 1, seconds=60, timeout=0.1) == [] and time.monotonic() - start >= 0.1
    timer = threading.Timer(0.1, set_limit, (book, 1))
    timer.start()
    assert numbers(claim_rollouts(book, "a", 1, seconds=60, timeout=20)) == [0]
    timer.join()


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "worker": lambda book: claim_rollouts(book, "", 1, seconds=1),
        "count": lambda book: claim_rollouts(book, "a", 0, seconds=1),
        "seconds": lambda book: claim_rollouts(book, "a", 1, seconds=-1),
        "timeout": lambda book: claim_rollouts(book, "a", 1, seconds=1, timeout=-1),
        "limit": lambda book: set_limit(book, -1),
        "next": lambda book: open_rollouts(book, {}, next=-1),
        "returned": lambda book: open_rollouts(book, {}, next=1, returned=[-1]),
        "version": lambda book: publish_weights(book, -1, {}, {}),
        "files": lambda book: publish_weights(book, 1, {"../a": b""}, {}),
    }.items(),
)
def test_bad_arguments(name: str, call: Any) -> None:
    with rollbook.open("memory:") as book, pytest.raises(ValueError, match=name):
        call(book)


def _claim_many(url: str, worker: str, claimed: Any) -> None:
    with rollbook.open(url) as book:
        while claims := claim_rollouts(book, worker, 3, seconds=60, timeout=0.3):
            for claim in claims:
                if claim.number % 5 == 4 and claim.fence < 60:
                    return_claims(book, [claim], "again")
                elif append_rollouts(book, claim, group(claim.number)):
                    claimed.put(claim.number)


def test_claims_of_many_threads_never_overlap(durable_url: str) -> None:
    _check_claims(durable_url, threading.Thread, 4)


@pytest.mark.slow
def test_claims_of_many_processes_never_overlap(tmp_path: Path) -> None:
    _check_claims(str(tmp_path / "book"), multiprocessing.get_context("spawn").Process, 2)


def _check_claims(url: str, start: Any, count: int) -> None:
    with rollbook.open(url) as book:
        begin(book, limit=40)
        claimed: Any = multiprocessing.get_context("spawn").Queue()
        workers = [start(target=_claim_many, args=(url, f"w{i}", claimed)) for i in range(count)]
        for worker in workers:
            worker.start()
        counts = Counter(claimed.get(timeout=60) for _ in range(40))
        for worker in workers:
            worker.join(60)
        assert claimed.empty() and counts == dict.fromkeys(range(40), 1) and len(book) == 80
        state = read_rollouts(book)
        assert state is not None and (state.next, state.in_flight, state.returned) == (40, [], [])
        assert Counter(kinds(book, "generated")) == {("generated", number): 1 for number in range(40)}
        assert book.check().ok


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_group_that_is_in_the_book_is_not_appended_again(book: Book) -> None:
    begin(book)
    first, second, third = claim(book, 3)
    book.append(group(0))
    assert not append_rollouts(book, first, group(0))  # the same
    book.append(group(1))
    assert not append_rollouts(book, second, group(1, version=3))  # of other weights
    assert append_rollouts(book, third, group(2), detail={"seconds": 1.5})
    assert len(book) == 6 and read_rollouts(book).in_flight == []  # type: ignore[union-attr]
    assert groups_in_book(book, [group(n).eids()[0].tid for n in range(4)]) == {
        group(n).eids()[0].tid for n in range(3)
    }
    [(detail,)] = book.ledger.all("SELECT detail FROM events WHERE kind = 'generated' ORDER BY id DESC LIMIT 1")
    assert json.loads(detail) == {"number": 2, "worker": "a", "version": 0, "seconds": 1.5}


def test_a_group_that_cannot_be_appended_stays_claimed(book: Book) -> None:
    begin(book)
    [only] = claim(book)
    twice = Experiences.concat([group(0), group(0, version=1)])
    with pytest.raises(ConflictError, match="have the same id"):
        append_rollouts(book, only, twice)
    assert [claim.fence for claim in read_rollouts(book).in_flight] == [only.fence]  # type: ignore[union-attr]
    assert append_rollouts(book, only, group(0)) and len(book) == 2


def test_records_of_a_voided_claim_are_not_appended_after_a_rewind(book: Book) -> None:
    """A worker that sampled from weights that a crash has lost."""
    book.consumer("train", create=True, change=True, sampler=OldestPolicy(), max_staleness=2)
    begin(book)
    book.announce(1)
    book.checkpoint("saved")
    book.announce(2)
    [late] = claim(book)
    suspend_rollouts(book, {})
    book.rewind("saved", later="drop")
    open_rollouts(book, {}, next=0)
    set_limit(book, 8)
    book.announce(2)  # the repeated version has the same number
    assert not append_rollouts(book, late, group(0, version=2))
    [again] = claim(book)
    assert append_rollouts(book, again, group(0, version=2))
    assert book.counts("train").waiting == 2 and not book.counts("train").dropped


def test_groups_are_dropped_with_their_append(book: Book) -> None:
    book.consumer("train", create=True, change=True, sampler=OldestPolicy(), max_staleness=2)
    book.consumer("other", create=True)
    begin(book)
    first, second = claim(book, 2)
    assert append_rollouts(book, first, group(0, rewards=(1.0, 1.0)), dropped_for="train", reason="constant group")
    assert append_rollouts(book, second, group(1))
    counts = book.counts("train")
    assert (counts.waiting, counts.dropped) == (2, {"constant group": 2}) and count_open_groups(book) == 1
    assert book.counts("other").waiting == 4
    assert [eid.task for eid in book.lease(4, by="group").experiences.eids()] == [1, 1]
    assert count_open_groups(book) == 1 and book.check().ok  # leased


def test_oldest_policy_by_record_and_group(book: Book) -> None:
    book.consumer("train", create=True, change=True, sampler=OldestPolicy(), max_staleness=9)
    versions = [3, 1, 2, 1]
    for number, version in enumerate(versions):
        rows = list(group(number, version))
        rows[1].policy_versions = 0 if number == 2 else version  # a group is as old as its oldest record
        book.append(rows)
    by_group = [book.lease(1, by="group", exact=True) for _ in versions]
    assert [lease.experiences.eids()[0].task for lease in by_group] == [2, 1, 3, 0]
    for lease in by_group:
        lease.nack()
    by_record = [eid.task for eid in book.lease(8).experiences.eids()]
    assert by_record == [2, 1, 1, 3, 3, 2, 0, 0]


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reports(book: Book) -> None:
    report_worker(book, "b", state="generating", version=1)
    report_worker(book, "a", state="waiting")
    report_worker(book, "b", state="generating", version=2)
    reports = read_status(book).workers
    assert [(report.name, report.details.get("version")) for report in reports] == [("a", None), ("b", 2)]
    assert all(0 <= report.age < 60 for report in reports)
    remove_worker(book, "a")
    remove_worker(book, "nobody")
    assert [report.name for report in read_status(book).workers] == ["b"]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_in_parts(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "WEIGHTS_PART_BYTES", 10)
    clock = iter(range(1000, 0, -1))  # of a trainer that was started again on a machine whose clock is behind
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    assert weights_version(book) is None
    with pytest.raises(BookError, match="no weights were published"):
        fetch_weights(book)
    files = {"a": bytes(range(25)), "b": b"", "c": b"0123456789"}
    publish_weights(book, 1, files, {"probe": [1.5]})
    weights = fetch_weights(book)
    assert (weights.version, weights.files, weights.metadata) == (1, files, {"probe": [1.5]})
    assert weights_version(book) == (weights.id, 1)
    for version in (2, 3, 2):  # also back, as after a restart
        publish_weights(book, version, {"a": bytes([version])}, {})
        assert fetch_weights(book).files == {"a": bytes([version])} and fetch_weights(book).version == version
    versions = book.ledger.all("SELECT COUNT(DISTINCT id) FROM weights")[0][0]
    folder = Path(book.url) / "weights"
    assert versions == 2 or len(list(folder.iterdir())) == 2


def test_weights_are_read_whole_while_others_are_published(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "WEIGHTS_PART_BYTES", 1000)
    names, ended, wrong = ["a", "b", "c"], threading.Event(), []

    def content(version: int) -> dict[str, bytes]:
        return {name: f"{name}{version}.".encode() * 400 for name in names}

    publish_weights(book, 0, content(0), {})

    def read() -> None:
        while not ended.is_set():
            weights = fetch_weights(book)
            if weights.files != content(weights.version):
                wrong.append(weights.version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(1, 60):
        publish_weights(book, version, content(version), {})
    ended.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_missing_files_of_weights_are_named(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        publish_weights(book, 1, {"a": b"1", "b": b"2"}, {})
        next((tmp_path / "book" / "weights").glob("*/b")).unlink()
        with pytest.raises(BookError, match="files of the published weights are missing"):
            fetch_weights(book)


# --- copies and repairs -----------------------------------------------------------------------------------------------


def test_copies_and_repairs_have_no_rollouts_in_progress(tmp_path: Path) -> None:
    source, copy = tmp_path / "book", tmp_path / "copy"
    with rollbook.open(source) as book:
        begin(book)
        [first, _] = claim(book, 2)
        append_rollouts(book, first, group(0))
        report_worker(book, "a", state="generating")
        publish_weights(book, 1, {"a": b"1"}, {})
        snapshot(book, copy).close()
    with rollbook.open(copy) as book:
        assert len(book) == 2 and read_rollouts(book) is None and read_status(book).workers == []
        assert weights_version(book) is None
        begin(book)
        assert numbers(claim(book)) == [0] and book.check().ok
    (source / "ledger.sqlite").write_bytes(b"damaged")
    repair(source)
    with rollbook.open(source) as book:
        assert len(book) == 2 and read_rollouts(book) is None and read_status(book).workers == []
