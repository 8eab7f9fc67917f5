"""Mixes: one lease over several books by ratio, exact over time, and across restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book import Book, LeaseLostError, Proportional, ReadOnlyError
from rollbook.book.lease import Mix, Part
from tests.book.records import Clock, check, group, numbers, records


@pytest.fixture
def expert() -> Any:
    with rollbook.open("memory:") as book:
        book.append(records(200, start=1000))
        yield book


def step(mix: Mix, n: int) -> list[int]:
    """How many of each part, acknowledged."""
    with mix.lease(n) as lease:
        counts = [len(part) for part in lease.leases]
        assert lease.sources == [i for i, count in enumerate(counts) for _ in range(count)]
        lease.ack()
    return counts


def test_shares_are_exact_over_time(url: str, expert: Book) -> None:
    with rollbook.open(url) as book:
        book.append(records(60))
        mix = Mix([Part(book, 2), Part(expert, 1)])
        total = [0, 0]
        for turn in range(1, 11):
            for i, count in enumerate(step(mix, 4)):
                total[i] += count
            assert sum(total) == 4 * turn
            assert abs(total[0] - 4 * turn * 2 / 3) < 1
        assert total == [27, 13] and sum(mix.balance) == pytest.approx(0, abs=1e-6)
        assert mix.acks() == {0: 27, 1: 13}
        check(book)
        check(expert)


def test_a_part_with_a_small_share_comes_in_turn(url: str, expert: Book) -> None:
    with rollbook.open(url) as book:
        book.append(records(60))
        mix = Mix([Part(expert, 1), Part(book, 9)])
        counts = [step(mix, 2) for _ in range(10)]
        # A part that gives nothing this time has its place all the same.
        assert [0, 2] in counts and [1, 1] in counts
        assert [sum(column) for column in zip(*counts, strict=True)] == [2, 18]


def test_a_restart_goes_on(tmp_path: Path, expert: Book) -> None:
    with rollbook.open("memory:") as book:
        book.append(records(40))
        mix = Mix([Part(book, 0.7), Part(expert, 0.3)])
        expected = [step(mix, 3) for _ in range(6)]
    counts = []
    for turn in range(3):
        with rollbook.open(tmp_path / "book") as book:
            if turn == 0:
                book.append(records(40))
            mix = Mix([Part(book, 0.7), Part(expert, 0.3)])
            counts += [step(mix, 3) for _ in range(2)]
    assert counts == expected
    assert [sum(column) for column in zip(*counts, strict=True)] == [13, 5]


def test_what_one_part_cannot_give(url: str, expert: Book) -> None:
    with rollbook.open(url) as book:
        book.append(records(1))
        mix = Mix([Part(book, 1), Part(expert, 1)])
        lease = mix.lease(6)
        assert len(lease) == 4 and lease.short == "part 0: asked for 3, got 1: no more was waiting"
        assert mix.balance == [0, 0]  # It is not made up for later.
        lease.ack()
        book.append(records(10, start=1))
        assert step(mix, 6) == [3, 3] and not mix.lease(2).short


def test_one_lease_of_all_parts(url: str, expert: Book) -> None:
    with rollbook.open(url) as book:
        book.append(records(10))
        mix = Mix([Part(book, 1), Part(expert, 1)])
        with pytest.raises(ZeroDivisionError), mix.lease(4) as lease:
            raise ZeroDivisionError
        assert book.counts().leased == expert.counts().leased == 0
        with mix.lease(4) as lease:
            assert numbers(lease) == [0, 1, 1000, 1001] == numbers(lease.experiences)
            assert lease.uids == [row.eid.uid for row in lease]
            assert lease.batch(pad_token_id=0).tokens.shape[0] == 4 and lease.weights is None
            lease.renew()
            assert lease.ack(step=3) == 4
        assert book.history("//0/0/0000")[-1].step == 3
        lease = mix.lease(2)
        assert repr(lease) == "MixedLease(1 + 1 records)" and bool(lease)
        assert lease.nack("no") == 2
        assert book.counts().waiting == 8


def test_a_lost_part_says_so_and_the_others_are_given_back(expert: Book) -> None:
    clock = Clock()
    with rollbook.open("memory:", clock=clock) as book:
        book.append(records(4))
        mix = Mix([Part(book, 1), Part(expert, 1)])
        with pytest.raises(LeaseLostError), mix.lease(4, seconds=60):
            clock.now += 61
        assert expert.counts().leased == 0
        with pytest.raises(LeaseLostError), mix.lease(4, seconds=60) as lease:
            clock.now += 61
            lease.ack()
        assert expert.counts().leased == 0 and expert.counts().trained == 0


def test_a_part_that_fails_takes_nothing_from_the_others(tmp_path: Path, expert: Book) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append(records(2))
    with rollbook.open(tmp_path / "book", mode="r") as book:
        mix = Mix([Part(expert, 1), Part(book, 1)])
        with pytest.raises(ReadOnlyError):
            mix.lease(2)
        assert expert.counts().leased == 0 and mix.balance == [0, 0]


def test_groups_and_consumers_of_one_book(url: str) -> None:
    with rollbook.open(url) as book:
        book.consumer("replay", create=True, sampler=Proportional(beta=1.0))
        book.append([row for task in range(6) for row in group(task, 2, size=2, reward=1.0)])
        mix = Mix([Part(book, 1, by="group"), Part(book, 1, consumer="replay")], name="own")
        with mix.lease(4) as lease:
            assert [len(part) for part in lease.leases] == [4, 2]
            assert lease.weights == pytest.approx([1.0] * 6)
            assert lease.batch(pad_token_id=0).extra["weights"].tolist() == pytest.approx([1.0] * 6)
            lease.ack()
        assert (book.counts().trained, book.counts("replay").trained) == (4, 2)
        check(book)


def test_bad_parts(expert: Book) -> None:
    with pytest.raises(ValueError, match="parts: missing"):
        Mix([])
    with pytest.raises(ValueError, match=r"parts\[1\]: got tuple, expected a Part"):
        Mix([Part(expert, 1), (expert, 1)])  # type: ignore[list-item]
    for share in (0, -1, float("nan"), "half"):
        with pytest.raises(ValueError, match=r"parts\[0\].share"):
            Mix([Part(expert, share)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n: got 0"):
        Mix([Part(expert, 1)]).lease(0)
