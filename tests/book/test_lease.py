"""Leases: atomic claims with an end, acknowledged once; the order in which samplers hand out; limiters; settings."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook.book import (
    BackPressureError,
    Balanced,
    BookError,
    EasyToHard,
    First,
    Last,
    LeaseLostError,
    MaxAge,
    MaxSize,
    MaxUses,
    MinSize,
    NewestPolicy,
    Priority,
    Proportional,
    SamplesToInserts,
    Uniform,
)
from tests.book.records import Clock, check, group, ledger, numbers, record, records, take

# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_lease_hands_out_once_and_ack_is_for_good(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(5))
        first, second = book.lease(2), book.lease(2)
        assert (numbers(first), numbers(second)) == ([0, 1], [2, 3])
        assert not first.short and second.fence > first.fence > 0
        counts = book.counts()
        assert (counts.waiting, counts.leased, counts.trained) == (1, 4, 0)
        assert first.ack(step=7) == 2
        check(book)
        assert book.counts().trained == 2
        assert second.nack("no room") == 2
        assert numbers(book.lease(9)) == [2, 3, 4]
        events = book.history("//0/0/0000")
        assert [event.kind for event in events] == ["admitted", "leased", "trained"]
        assert (events[2].step, events[2].lease, events[2].consumer) == (7, first.fence, "train")
        events = book.history("//0/0/0002")
        assert [event.kind for event in events] == ["admitted", "leased", "nacked", "leased"]
        assert events[2].reason == "no room"
        check(book)


def test_what_is_asked_of_a_lease_is_checked(url: str) -> None:
    with rollbook.open(url) as book:
        for options in ({"n": 0}, {"n": 1.5}, {"n": True}, {"by": "run"}, {"timeout": -1}, {"timeout": math.nan}):
            with pytest.raises(ValueError, match=r"^(n|by|timeout): "):
                book.lease(**{"n": 1, **options})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"seconds: got 0, expected a number > 0"):
            book.lease(1, seconds=0)
        with pytest.raises(ValueError, match=r"max_staleness"):
            book.lease(1, max_staleness=-1)
        with pytest.raises(ValueError, match=r"consumer: got ''"):
            book.lease(1, consumer="")


def test_numbers_of_numpy_are_numbers(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2, reward=0.5))
        with book.lease(np.int64(1)) as lease:  # type: ignore[arg-type]
            assert lease.ack(step=np.int64(3)) == 1  # type: ignore[arg-type]
        assert book.history("//0/0/0000")[-1].step == 3
        assert book.where(("reward", ">", np.float32(0.25)), ("seq", "<=", np.int64(9))).count() == 2


def test_threads_never_share_a_record(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(40))
        taken: list[int] = []

        def work() -> None:
            while lease := book.lease(3):
                taken.extend(numbers(lease))
                lease.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(taken) == list(range(40))
        check(book)


def test_consumer_groups_are_independent(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(3))
        book.consumer("audit", create=True, sampler=Last())
        assert numbers(take(book, 2)) == [0, 1]
        assert numbers(take(book, 2, consumer="audit")) == [2, 1]
        # One that nobody has named before begins with all that is there.
        assert numbers(take(book, 9, consumer="new", create=True)) == [0, 1, 2]
        book.append(records(1, start=3))
        assert [book.counts(name).waiting for name in ("train", "audit", "new")] == [2, 2, 1]
        with pytest.raises(KeyError, match=r"unknown consumer group 'nobody'; choose from train, audit, new"):
            book.counts("nobody")
        check(book)


def test_part_of_a_lease(url: str) -> None:
    with rollbook.open(url) as book:
        rows = records(4)
        book.append(rows)
        lease = book.lease(4)
        uids = lease.uids
        assert lease.ack(uids=uids[:1]) == 1
        assert lease.ack(uids=[rows[1]]) == 1  # Records and ids of their own type, as everywhere else.
        assert lease.nack(uids=uids[2]) == 1
        for bad in (uids[2], "unknown"):
            with pytest.raises(ValueError, match=f"uids: got '{bad}', which this lease does not hold"):
                lease.ack(uids=[bad])
        assert lease.nack("bad sample", uids=[uids[3]], drop=True) == 1
        with pytest.raises(LeaseLostError, match="all its records were acknowledged or returned already"):
            lease.ack()
        with pytest.raises(LeaseLostError):
            lease.ack(step=1, uids=uids[:1])
        assert lease.ack(uids=uids[:2]) == 2, "the same again"
        counts = book.counts()
        assert (counts.waiting, counts.leased, counts.trained, counts.dropped) == (1, 0, 2, {"bad sample": 1})
        check(book)


def test_an_ack_may_be_repeated(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, lease_seconds=10.0) as book:
        book.append(records(6))
        saved = book.checkpoint()
        lease, other = book.lease(3), book.lease(3)
        book.delete(lease.uids[0], author="ana")
        assert lease.ack(step=1, uids=lease.uids[:2]) == 1
        before = ledger(book)
        assert lease.ack(step=1, uids=lease.uids[:2]) == 1
        assert ledger(book) == before
        assert [lease.ack(step=1) for _ in range(2)] == [1, 1]
        with pytest.raises(LeaseLostError, match="all its records were acknowledged"):
            lease.ack(step=2)
        assert other.ack(step=1, uids=other.uids[:1]) == 1
        clock.now += 10
        with pytest.raises(LeaseLostError, match="it ended"):
            other.ack(step=1)
        assert other.ack(step=1, uids=other.uids[:1]) == 1, "acknowledged before the lease ended"
        book.rewind(saved)
        with pytest.raises(LeaseLostError, match="it is acked"):
            lease.ack(step=1)
        check(book)


def test_an_empty_lease_is_harmless(url: str) -> None:
    with rollbook.open(url) as book, book.lease(3) as lease:
        assert not lease and len(lease) == 0 and lease.fence == 0 and lease.uids == []
        assert lease.short == "asked for 3, got 0: no more was waiting"
        assert len(lease.experiences) == 0 and lease.ack(step=1) == 0 and lease.nack() == 0
        with pytest.raises(BookError, match="the lease is empty: asked for 3, got 0: no more was waiting"):
            lease.batch(pad_token_id=0)
        assert lease.renew() == lease.expires
        assert book.lease(1, by="group").short == "asked for 1, got 0: no more groups were complete"


def test_an_exact_lease_takes_all_or_nothing_and_waits_without_limit_if_asked(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(group("a", 2, size=2))
        for by, count, available in (("experience", 3, 2), ("group", 2, 1)):
            lease = book.lease(count, by=by, exact=True)
            assert not lease and lease.short.startswith(
                f"asked for exactly {count}, {available} can be leased: no more"
            )
        assert book.counts().waiting == 2
        timer = threading.Timer(0.1, lambda: book.append(group("b", 2, size=2)))
        timer.start()
        assert len(book.lease(2, by="group", exact=True, timeout=None)) == 4
        timer.join()


# --- contexts -------------------------------------------------------------------------------------------------------


def test_leaving_by_an_exception_gives_back(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        with pytest.raises(ZeroDivisionError), book.lease(2) as lease:
            lease.ack(uids=lease.uids[:1])
            raise ZeroDivisionError("loss\0 is \ud800 bad")  # Texts of models find their way into exceptions.
        assert book.history("//0/0/0000")[-1].kind == "trained"
        event = book.history("//0/0/0001")[-1]
        assert (
            event.kind == "nacked" and event.reason is not None and event.reason.startswith("ZeroDivisionError: loss")
        )
        with book.lease(1):
            pass
        assert book.history("//0/0/0001")[-1].reason == "not acknowledged"
        assert book.counts().waiting == 1
        check(book)


def test_leaving_a_lost_lease_says_so_but_hides_no_error(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock) as book:
        book.append(records(1))
        with pytest.raises(LeaseLostError), book.lease(1, seconds=5):
            clock.now += 6
        with pytest.raises(ZeroDivisionError), book.lease(1, seconds=5):
            clock.now += 6
            raise ZeroDivisionError


# --- time -----------------------------------------------------------------------------------------------------------


def test_a_lost_lease_changes_nothing(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, lease_seconds=10.0) as book:
        book.append(records(3))
        lease = book.lease(2)
        assert lease.expires == clock.now + 10
        clock.now += 10
        before = ledger(book)
        for call in (lease.ack, lease.nack, lease.renew, lambda: lease.ack(uids=lease.uids[:1])):
            with pytest.raises(LeaseLostError, match=r"lease 1: it ended 0\.000 s ago, after 10 s without progress"):
                call()
        assert ledger(book) == before
        other = book.lease(3)
        assert numbers(other) == [0, 1, 2] and other.fence > lease.fence
        before = ledger(book)
        for call in (lease.ack, lease.nack, lease.renew):
            with pytest.raises(LeaseLostError, match="it is expired, nothing was changed"):
                call()
        assert ledger(book) == before
        assert other.ack() == 3
        assert [event.kind for event in book.history("//0/0/0000")] == [
            "admitted",
            "leased",
            "expired",
            "leased",
            "trained",
        ]
        check(book)


def test_progress_renews(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, lease_seconds=10.0) as book:
        book.append(records(2))
        lease = book.lease(2)
        for _ in range(3):
            clock.now += 8
            lease.batch(pad_token_id=0)
            assert lease.expires == clock.now + 10
            clock.now += 8
            assert len(lease.experiences) == 2  # Read long ago: looking at them again is progress too.
            assert lease.expires == clock.now + 10
        clock.now += 8
        assert lease.renew(100) == clock.now + 100
        clock.now += 99
        assert not book.lease(1)
        assert lease.ack() == 2
        with pytest.raises(LeaseLostError):
            lease.renew()


def test_a_hung_holder_is_told_when_it_reads(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock) as book:
        book.append(records(1))
        lease = book.lease(1, seconds=5)
        clock.now += 5
        with pytest.raises(LeaseLostError):
            lease.batch(pad_token_id=0)


def test_what_comes_back_too_often_is_dropped(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, max_attempts=3, removers=MaxUses(2)) as book:
        book.append(records(1))
        book.lease(1).nack()
        book.lease(1, seconds=1)
        clock.now += 2
        take(book, 1)  # A use that worked starts the count anew.
        for _ in range(3):
            assert book.lease(1).nack() == 1
        assert not book.lease(1)
        assert book.counts().dropped == {"attempts": 1}
        assert book.history("//0/0/0000")[-1].reason == "attempts"
        check(book)


def test_a_timeout_returns_what_there_is(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        start = time.monotonic()
        lease = book.lease(4, timeout=0.1)
        assert time.monotonic() - start >= 0.1
        assert len(lease) == 2 and lease.short == "asked for 4, got 2: no more was waiting"
        assert "asked for 4" in repr(lease)


def test_waiting_sees_what_comes_meanwhile(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        active = book.lease(1)
        later = threading.Timer(0.05, lambda: (book.append(records(1, start=2)), active.nack()))
        later.start()
        lease = book.lease(3, timeout=60)
        later.join(60)
        assert sorted(numbers(lease)) == [0, 1, 2] and not lease.short


def test_waiting_sees_a_lease_that_ends_by_itself(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(1))
        book.lease(1, seconds=0.1)
        assert numbers(book.lease(1, timeout=60)) == [0]


# --- async ----------------------------------------------------------------------------------------------------------


def test_async(url: str) -> None:
    with rollbook.open(url) as book:

        async def run() -> None:
            waiting = asyncio.ensure_future(book.alease(2, timeout=60))
            await asyncio.sleep(0.02)
            await asyncio.to_thread(book.append, records(3))
            async with await waiting as lease:
                assert numbers(lease) == [0, 1]
                assert await lease.aack(step=1) == 2
            other = await book.alease(5)
            assert other.short and await other.anack() == 1
            with pytest.raises(ZeroDivisionError):
                async with await book.alease(1):
                    raise ZeroDivisionError

        asyncio.run(run())
        assert (book.counts().trained, book.counts().waiting) == (2, 1)
        check(book)


def test_a_wait_that_is_canceled_has_claimed_nothing(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(1))

        async def run(pause: float) -> None:
            waiting = asyncio.ensure_future(book.alease(2, timeout=60))
            await asyncio.sleep(pause)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(run(0.03))
        book.append(records(1, start=1))
        asyncio.run(run(0.0))  # As it claims, or just before.
        assert (book.counts().waiting, book.counts().leased) == (2, 0)
        check(book)


# --- records that go while they are leased --------------------------------------------------------------------------


def test_deleted_while_leased(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(3))
        lease = book.lease(3)
        book.delete("//0/0/0001", author="ana")
        assert book.counts().dropped == {"deleted": 1}
        with pytest.raises(BookError, match=r"//0/0/0001.*deleted"):
            _ = lease.experiences
        assert lease.ack() == 2
        assert book.counts().trained == 2
        assert [event.kind for event in book.history("//0/0/0001")] == ["admitted", "leased", "deleted", "dropped"]
        check(book)


# --- samplers: the order --------------------------------------------------------------------------------------------


def test_last_in_first_out(url: str) -> None:
    with rollbook.open(url, sampler=Last()) as book:
        book.append(records(3))
        assert numbers(take(book, 2)) == [2, 1]
        book.append(records(1, start=3))
        assert numbers(take(book, 2)) == [3, 0]


def test_newest_policy_first(url: str) -> None:
    with rollbook.open(url, sampler=NewestPolicy()) as book:
        versions = [3, None, 5, 3, 4]
        book.append([record(suffix=f"{i}", policy_versions=v, info={"i": i}) for i, v in enumerate(versions)])
        assert numbers(take(book, 9)) == [2, 4, 0, 3, 1]


def test_easy_to_hard(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard()) as book:
        book.consumer("level", create=True, sampler=EasyToHard(key="info.level", ascending=True))
        rewards = [0.5, None, 1.0, math.nan, 0.5, -2.0]
        levels = [3, "2", None, 1.5, True, 9]
        book.append(
            [
                record(suffix=f"{i}", reward=reward, info={"i": i, "level": level})
                for i, (reward, level) in enumerate(zip(rewards, levels, strict=True))
            ]
        )
        assert numbers(take(book, 9)) == [2, 0, 4, 5, 1, 3]
        assert numbers(take(book, 9, consumer="level")) == [4, 3, 1, 0, 5, 2]


def test_balanced_takes_from_every_band_in_turn(url: str) -> None:
    with rollbook.open(url, sampler=Balanced(edges=(0.5,))) as book:
        book.append([record(suffix=f"{i}", reward=float(i >= 4), info={"i": i}) for i in range(6)])
        assert numbers(take(book, 4)) == [0, 4, 1, 5]
        # The second band was empty for two turns, which it does not make up for.
        assert numbers(take(book, 1)) == [2]
        book.append([record(suffix=f"{i}", reward=1.0, info={"i": i}) for i in range(6, 9)])
        later = numbers(take(book, 9))
        assert sorted(later) == [3, 6, 7, 8] and set(later[:2]) == {3, 6}


def test_trinity_priorities_give_trinity_s_sequence(url: str) -> None:
    with rollbook.open(url, sampler=Priority(decay=0.6)) as book:
        book.append([record(suffix=f"{v}", info={"i": v}, policy_versions=v) for v in range(1, 5)])
        uses = dict.fromkeys(range(1, 5), 0)
        leased = []
        for _ in range(12):
            (version,) = numbers(take(book, 1))
            uses[version] += 1
            leased.append((version, uses[version]))
        expected = "(4,1)(4,2)(3,1)(4,3)(3,2)(4,4)(2,1)(3,3)(4,5)(2,2)(3,4)(1,1)"
        assert "".join(f"({v},{n})" for v, n in leased) == expected
        assert book.counts().waiting == 4 and book.counts().trained == 0
        check(book)


def test_a_limit_of_uses_and_a_rest_after_each(url: str) -> None:
    clock = Clock()
    sampler = Priority(function="decay_limit_randomization", decay=1.0, limit=2, cooldown=10.0)
    with rollbook.open(url, sampler=sampler, clock=clock) as book:
        book.append([record(suffix=f"{v}", info={"i": v}, policy_versions=v) for v in (1, 2)])
        assert numbers(take(book, 9)) == [2, 1]
        assert not book.lease(1) and book.counts().waiting == 2
        clock.now += 9.5
        assert not book.lease(1)
        clock.now += 1
        assert numbers(take(book, 9)) == [2, 1]
        clock.now += 60
        assert not book.lease(1)
        assert book.counts().trained == 2
        assert [event.kind for event in book.history("//0/0/1")] == [
            "admitted",
            "leased",
            "trained",
            "rested",
            "leased",
            "trained",
        ]
        check(book)


def test_chance_goes_on_after_a_restart(durable_url: str) -> None:
    with rollbook.open("memory:", sampler=Uniform(), seed=3) as book:
        book.append(records(30))
        expected = [numbers(take(book, 3)) for _ in range(6)]
    assert expected != sorted(expected)
    leased = []
    for turn in range(3):
        with rollbook.open(durable_url, sampler=Uniform(), seed=3) as book:
            if turn == 0:
                book.append(records(30))
            leased += [numbers(take(book, 3)) for _ in range(2)]
    assert leased == expected
    with rollbook.open("memory:", sampler=Uniform(), seed=4) as book:
        book.append(records(30))
        assert [numbers(take(book, 3)) for _ in range(6)] != expected


def test_proportional_priorities_and_their_weights(url: str) -> None:
    sampler = Proportional(key="info.p", alpha=1.0, beta=1.0)
    with rollbook.open(url, sampler=sampler, removers=MaxUses(None)) as book:
        book.append([record(suffix=f"{i}", info={"i": i, "p": p}) for i, p in enumerate([1.0, 2.0, 4.0])])
        lease = book.lease(3)
        weights = dict(zip(numbers(lease), lease.weights or [], strict=True))
        assert weights == pytest.approx({0: 1.0, 1: 0.5, 2: 0.25})
        assert lease.batch(pad_token_id=0).extra["weights"].tolist() == pytest.approx(lease.weights)
        with pytest.raises(ValueError, match="priorities: got 'unknown', which is not acknowledged here"):
            lease.ack(priorities={"unknown": 1.0})
        with pytest.raises(ValueError, match="priorities: got list, expected {uid: number}"):
            lease.ack(priorities=[1.0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priorities"):
            lease.ack(priorities={"//0/0/0": math.nan})
        lease.ack(priorities={"//0/0/0": 8.0})
        lease = book.lease(3)
        weights = dict(zip(numbers(lease), lease.weights or [], strict=True))
        assert weights == pytest.approx({0: 0.25, 1: 1.0, 2: 0.5})
        check(book)


def test_priorities_are_refused_where_nothing_follows_them() -> None:
    book = rollbook.open("memory:")
    book.append(records(1))
    lease = book.lease(1)
    with pytest.raises(ValueError, match="priorities: .*First"):
        lease.ack(priorities={"//0/0/0000": 1.0})
    assert lease.ack() == 1 and lease.weights is None


def test_what_is_given_back_keeps_its_place(url: str) -> None:
    with rollbook.open(url, sampler=Uniform()) as book:
        book.append(records(12))
        lease = book.lease(5)
        first = numbers(lease)
        lease.nack()
        assert numbers(book.lease(5)) == first


# --- removers and limiters ------------------------------------------------------------------------------------------


def test_max_age_and_max_uses(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, removers=[MaxAge(60), MaxUses(2)]) as book:
        book.append(records(2))
        clock.now += 30
        book.append(records(1, start=2))
        assert numbers(take(book, 1)) == [0]
        assert book.counts().trained == 0
        clock.now += 30
        assert numbers(take(book, 9)) == [2]
        assert book.counts().dropped == {"max_age": 2}
        assert numbers(take(book, 9)) == [2]
        assert book.counts().trained == 1
        check(book)


def test_the_worst_go_first_if_that_is_asked(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard(), removers=[MaxSize(2, drop="worst")]) as book:
        book.append([record(suffix=f"{i}", reward=float(r), info={"i": i}) for i, r in enumerate([3, 1, 2])])
        assert book.history("//0/0/1")[-1].reason == "max_size"
        assert numbers(take(book, 9)) == [0, 2]


def test_min_size(url: str) -> None:
    with rollbook.open(url, limiters=MinSize(3)) as book:
        book.append(records(2))
        lease = book.lease(1)
        assert not lease and lease.short == "asked for 1, got 0: 2 records are there, MinSize waits for 3"
        book.append(records(1, start=2))
        assert len(book.lease(2)) == 2
        # What is leased is there.
        assert len(book.lease(2)) == 1


def test_samples_to_inserts_holds_leases_and_appends(url: str) -> None:
    limiter = SamplesToInserts(ratio=1.0, slack=4, lease_size=2, append_size=4)
    with rollbook.open(url, limiters=limiter) as book:
        book.append(records(4))
        before = ledger(book)
        with pytest.raises(
            BackPressureError, match=r"nothing was written: consumer 'train' has 4 records and took 0: 1 more"
        ):
            book.append(records(1, start=4), timeout=0.05)
        assert ledger(book) == before
        with pytest.raises(BackPressureError, match=r"got 5 records at once.* append_size = 4"):
            book.append(records(5, start=4))
        assert book.append(records(4)).existing == 4  # What is known brings nothing and is not held back.
        assert book.append(records(9, start=50), evaluation=True).admitted == 9
        done = threading.Event()

        def write() -> None:
            book.append(records(2, start=4))
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        assert not done.wait(0.1)
        lease = book.lease(2)
        assert done.wait(60)
        writer.join(60)
        lease.nack()  # Not used after all: the room is taken back.
        with pytest.raises(BackPressureError):
            book.append(records(1, start=9), timeout=0)
        assert len(take(book, 6)) == 6
        check(book)


def test_a_back_pressure_that_comes_with_a_revision_writes_neither(url: str) -> None:
    with rollbook.open(url, limiters=SamplesToInserts(ratio=1.0, slack=1)) as book:
        rows = records(2)
        book.append(rows[0])
        before = ledger(book)
        with pytest.raises(BackPressureError):
            book.append([rows[0].replace(reward=1.0), rows[1]], timeout=0)
        assert ledger(book) == before


def test_records_that_are_given_up_do_not_shift_the_ratio(url: str) -> None:
    with rollbook.open(url, limiters=SamplesToInserts(ratio=1.0, slack=1), max_attempts=1) as book:
        for i in range(8):
            assert book.append(records(1, start=i), timeout=0).admitted == 1
            lease = book.lease(1)
            assert len(lease) == 1, lease.short
            if i % 4 == 0:
                lease.nack(drop=True)
            elif i % 4 == 1:
                book.delete(lease.uids, author="ana")
            elif i % 4 == 2:
                lease.nack()  # attempts
            else:
                lease.ack()
        assert book.counts().waiting == 0
        check(book)


def test_parts_that_would_wait_for_each_other_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="could wait for each other forever"):
        SamplesToInserts(ratio=1.0, slack=4, lease_size=64, append_size=8)
    for settings in (
        {"removers": [MaxSize(3)], "limiters": [MinSize(4)]},
        {"limiters": [SamplesToInserts(ratio=2.0, slack=100)]},
        {"limiters": [MinSize(1), MinSize(2)]},
        {"group_size": 4, "removers": [MaxSize(3)]},
    ):
        with pytest.raises(ValueError, match=r"ever|twice"):
            rollbook.open("memory:", **settings)


# --- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_the_book_s(url: str) -> None:
    with rollbook.open(url, sampler=Last(), lease_seconds=5.0) as book:
        assert book.consumer().sampler == Last() and book.consumer().lease_seconds == 5.0
        assert book.consumer("train", sampler=Last()) == book.consumer()
        with pytest.raises(
            BookError, match=r"consumer 'train': sampler: got First\(\), the book has Last\(\); change=Tr"
        ):
            book.consumer("train", sampler=First())
        with pytest.raises(ValueError, match="unknown setting 'samplr'; did you mean 'sampler'"):
            book.consumer("other", create=True, samplr=Last())
        with pytest.raises(ValueError, match="unknown setting 'lease_second'"):
            book.consumer("train", lease_second=5.0)
        with pytest.raises(ValueError, match="sampler: got 'uniform', expected one of First"):
            book.consumer("other", create=True, sampler="uniform")
        with pytest.raises(ValueError, match="limiters"):
            book.consumer("other", create=True, limiters=[MaxSize(3)])
        with pytest.raises(KeyError):
            book.counts("other")


def test_settings_outlive_the_process(durable_url: str) -> None:
    everything: dict[str, Any] = {
        "sampler": Balanced(key="info.level", edges=(0.1, 0.2)),
        "removers": [MaxSize(9, drop="worst"), MaxAge(3.5), MaxUses(2)],
        "limiters": [MinSize(1), SamplesToInserts(ratio=0.5, slack=8)],
        "max_staleness": 2,
        "keep_stale": True,
        "group_size": 1,
        "partial_after": 2.5,
        "max_attempts": 3,
        "seed": 5,
    }
    with rollbook.open(durable_url, **everything) as book:
        config = book.consumer()
    with rollbook.open(durable_url) as book:
        assert book.consumer() == config
    with rollbook.open(durable_url, **everything) as book:
        assert book.consumer() == config
    with pytest.raises(BookError, match="seed: got 6, the book has 5"):
        rollbook.open(durable_url, seed=6)


def test_changed_settings_rank_anew(url: str) -> None:
    with rollbook.open(url) as book:
        book.append([record(suffix=f"{i}", reward=float(i), info={"i": i}) for i in range(6)])
        assert numbers(take(book, 1)) == [0]
        book.delete("//0/0/0", author="ana")  # Done with and gone: it needs no number any more.
        book.consumer(change=True, sampler=EasyToHard(key="info.i"))
        assert numbers(take(book, 2)) == [5, 4]
        book.consumer(change=True, sampler=First(), removers=[MaxSize(2)])
        assert book.counts().dropped == {"max_size": 1}
        assert numbers(take(book, 9)) == [2, 3]
        check(book)


def test_a_key_that_no_record_has_is_refused_at_once(url: str) -> None:
    with rollbook.open(url) as book:
        with pytest.raises(ValueError, match=r"sampler: key: got 'rewrd', expected .*reward"):
            book.consumer("other", create=True, sampler=EasyToHard(key="rewrd"))
        with pytest.raises(ValueError, match=r"'rewrd'"):
            book.consumer(change=True, sampler=EasyToHard(key="rewrd"))
        assert book.append(records(1)).admitted == 1
        assert book.consumer().sampler == First()


def test_leases_by_group_and_by_experience_share_one_truth(url: str) -> None:
    with rollbook.open(url) as book:
        book.append([*group(1, 2, size=2), *group(2, 2, size=2)])
        assert len(book.lease(1, by="group")) == 2
        assert len(book.lease(1)) == 1
        # One of the second group is leased: the rest waits for it.
        assert not book.lease(1, by="group")
        check(book)
