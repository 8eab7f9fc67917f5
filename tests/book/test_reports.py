"""Reports: histories, counts that add up after whatever happened, and which records training keeps."""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress

import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.book import LeaseLostError, MaxAge, MaxSize, MaxUses, Priority, keep_rates
from tests.book.records import Clock, check, group, record, take


def test_a_whole_life(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock, removers=MaxUses(2), max_attempts=5) as book:
        row = record(suffix="a", info={"i": 0})
        book.append(row)
        clock.now += 1
        book.lease(1, seconds=1)
        clock.now += 1
        with book.lease(1) as lease:
            lease.nack("loss was NaN")
        clock.now += 1
        book.lease(1).ack(step=4, detail={"micro_batch": 2})
        book.revise(row, reward=1.0, author="ana")
        book.drop(row, "enough")
        book.delete(row, author="bo")
        events = [(e.time, e.kind, e.reason, e.consumer, e.step, e.lease) for e in book.history(row)]
        assert events == [
            (1000.0, "admitted", None, None, None, None),
            (1001.0, "leased", None, "train", None, 1),
            (1002.0, "expired", None, "train", None, 1),
            (1002.0, "leased", None, "train", None, 2),
            (1002.0, "nacked", "loss was NaN", "train", None, 2),
            (1003.0, "leased", None, "train", None, 3),
            (1003.0, "trained", None, "train", 4, 3),
            (1003.0, "revised", None, None, None, None),
            (1003.0, "dropped", "enough", "train", None, None),
            (1003.0, "deleted", None, None, None, None),
        ]
        assert book.history(row)[6].detail["micro_batch"] == 2
        assert book.history(row.eid) == book.history(row.eid.uid)
        with pytest.raises(KeyError, match="'unknown'"):
            book.history("unknown")


def test_counts_add_up_whatever_happens(url: str) -> None:
    """A seeded walk through all that changes a record's state, with two consumers."""
    clock, rng = Clock(), random.Random(4)
    settings = {"max_staleness": 2, "removers": [MaxSize(12), MaxAge(50), MaxUses(2)], "max_attempts": 2}
    with rollbook.open(url, clock=clock, **settings) as book:  # type: ignore[arg-type]
        sampler = Priority(function="decay_limit_randomization", cooldown=3.0, sigma=1.0)
        book.consumer("other", create=True, sampler=sampler)
        leases, rows, version = [], [], 0
        for turn in range(80):
            action = rng.randrange(9)
            if action <= 1:
                new = group(turn, 3, size=3, policy_versions=max(version - rng.randrange(4), 0), info={"i": turn})
                rows += new[:2]
                book.append(new[:2])
                book.fail(new[2].eid, "crashed")
            elif action == 2:
                leases.append(book.lease(2, by=rng.choice(["group", "experience"]), seconds=rng.choice([2, 20])))
            elif action == 3:
                leases.append(book.lease(3, consumer="other", seconds=5))
            elif action == 4 and leases:
                lease = leases.pop(rng.randrange(len(leases)))
                with suppress(LeaseLostError):
                    lease.ack() if rng.random() < 0.5 else lease.nack(drop=rng.random() < 0.2)
            elif action == 5:
                clock.now += rng.choice([1, 10])
            elif action == 6 and rows:
                book.revise(rng.choice(rows), info={"turn": turn}, author="ana", retrain=rng.random() < 0.5)
            elif action == 7 and rows and rng.random() < 0.5:
                book.delete(rows.pop(rng.randrange(len(rows))), author="ana")
            elif action == 8 and rng.random() < 0.5:
                version += 2
                book.announce(version)
            elif rows:
                book.drop(rng.choice(rows), consumer=rng.choice([None, "other"]))
            check(book)
        assert book.counts().dropped.keys() >= {"crashed", "stale"}
        happened = {kind for (kind,) in book.sql("select distinct kind from events").rows()}
        assert happened >= {"leased", "trained", "nacked", "expired", "dropped"}
        assert len(book) == book.counts().admitted


def test_keep_rates_by_length_and_reward(url: str) -> None:
    with rollbook.open(url) as book:
        lengths = [2, 2, 4, 8, 8, 8]
        book.append(
            [
                Experience(
                    eid=EID(suffix=f"{i}"), tokens=list(range(2 + n)), prompt_length=2, reward=i / 4, info={"i": i}
                )
                for i, n in enumerate(lengths)
            ]
        )
        book.append(record(suffix="nan", reward=math.nan))
        take(book, 2)
        book.drop(["//0/0/3", "//0/0/4"], "too long")
        book.fail(EID(task="t", run=1), "timeout")  # It has no length: it is not among the short ones.
        rates = keep_rates(book, "length", edges=[0, 4, 9])
        assert [(rate.low, rate.high, rate.admitted, rate.trained, rate.dropped) for rate in rates] == [
            (0.0, 4.0, 3, 2, 0),
            (4.0, 9.0, 4, 0, 2),
        ]
        assert [rate.rate for rate in rates] == [1.0, 0.0]
        by_reward = keep_rates(book, "reward", edges=[0, 0.5, 1.0, 1.25])
        assert [(rate.admitted, rate.trained, rate.dropped) for rate in by_reward] == [(2, 2, 0), (2, 0, 1), (2, 0, 1)]
        assert math.isnan(keep_rates(book, "reward", edges=[5, 6])[0].rate)
        alone = keep_rates(book, "length")
        assert sum(rate.admitted for rate in alone) == 7 and (alone[0].low, alone[-1].high) == (2.0, 8.0)
        for bad in ([1], [2, 1], []):
            with pytest.raises(ValueError, match="edges"):
                keep_rates(book, "length", edges=bad)
        with pytest.raises(ValueError, match="by: got 'step'"):
            keep_rates(book, "step")
        with pytest.raises(KeyError, match="'nobody'"):
            keep_rates(book, consumer="nobody")


def test_keep_rates_of_an_empty_book(url: str) -> None:
    with rollbook.open(url) as book:
        assert keep_rates(book) == [] and keep_rates(book, "reward") == []
        assert keep_rates(book, "reward", edges=[0, 1])[0].admitted == 0


def test_an_empty_book(url: str) -> None:
    with rollbook.open(url) as book:
        assert len(book) == 0 and bool(book) and "x" not in book
        assert book.counts().adds_up and book.counts().admitted == 0
        assert list(book.where()) == [] and list(book.where().scan()) == []
        assert len(book.get([])) == 0
        with pytest.raises(KeyError, match="'x'"):
            book["x"]
        assert repr(book).startswith(f"Book({book.url!r}: ")
        with book.ledger.read() as tx:
            assert abs(tx.now - time.time()) < 60
