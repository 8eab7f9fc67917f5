"""What a first user ran into: starting again, feedback on one run of a group, leases lost inside their block."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rollbook
from rollbook import EID
from rollbook.book import (
    LeaseLostError,
    UnknownConsumerError,
    consumer,
    remove_consumer,
    repair,
    snapshot,
    trained_steps,
)
from tests.book.records import Clock, check, group, ledger, record, records


def test_a_run_fails_once(url: str) -> None:
    with rollbook.open(url) as book:
        assert book.fail(EID(0, 1, 2), "timeout", group_size=4) == 1
        assert book.fail(EID(0, 1, 2), "timeout", group_size=4) == 0  # another id, the same run
        assert book.fail([EID(0, 1, 3), EID(0, 1, 3)], "timeout") == 1
        book.append(group(2, runs=2))
        assert book.fail(EID(0, 2, 1)) == 0  # it has a record
        book.append(record(3, suffix="e"), evaluation=True)
        assert book.fail(EID(0, 3, 0)) == 1  # what is kept for evaluation is no run of a group
        assert book.fail(EID(0, 3, 0, suffix="e")) == 0
        check(book)


def test_a_run_that_failed_may_still_give_a_record(url: str) -> None:
    row = record(1, suffix="x")
    with rollbook.open(url) as book:
        book.fail(row.eid, "timeout")
        assert book.append(row).admitted == 1 and book.append(row).existing == 1
        assert book[row.eid.uid] == row
        assert (book.counts().waiting, book.counts().dropped) == (1, {"timeout": 1})
        check(book)


def test_feedback_returns_the_whole_group(url: str) -> None:
    with rollbook.open(url) as book:
        rows = group(1, runs=3, reward=0.25)
        book.append(rows)
        book.lease(1, by="group").ack(step=1)
        assert book.revise(rows[1], reward=0.5, author="ana", retrain="group") == 1
        with book.lease(1, by="group") as lease:
            assert sorted(lease.uids) == sorted(row.eid.uid for row in rows)
            assert lease.ack(step=2) == 3
        assert (
            book.revise(rows[0], reward=rows[0].reward, author="ana", retrain=True) == 0
        )  # nothing new, and yet again
        assert book.lease(5).uids == [rows[0].eid.uid]
        with pytest.raises(ValueError, match="retrain: got 'all', expected one of False, True, 'group'"):
            book.revise(rows[1], reward=1.0, author="ana", retrain="all")
        check(book)


def test_consumer_groups_are_created_listed_and_removed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_REMOVED_CHUNK", 2)
    with rollbook.open(url, lease_seconds=60) as book:
        book.append(records(5))
        for call in (
            lambda: book.lease(1, consumer="trian"),
            lambda: asyncio.run(book.alease(1, consumer="trian")),
            lambda: book.consumer("trian"),
            lambda: remove_consumer(book, "trian"),
            lambda: trained_steps(book, "trian"),
        ):
            with pytest.raises(
                UnknownConsumerError, match=r"^consumer: unknown consumer group 'trian'; did you mean 'train'\?"
            ) as caught:
                call()
            assert isinstance(caught.value, KeyError)
        lease = book.lease(1, consumer="replay", create=True, by="group")
        assert book.consumer("replay", create=True) == book.consumer("replay")
        assert list(book.consumers()) == ["train", "replay"]
        assert book.consumers()["train"].lease_seconds == 60
        saved = book.checkpoint()
        book.lease(1, consumer="replay").ack()
        with pytest.raises(ValueError, match="remove_consumer: got 'train'"):
            remove_consumer(book, "train")

        delete = consumer.delete_removed_consumers
        monkeypatch.setattr(consumer, "delete_removed_consumers", lambda ledger: None)  # As if it were killed there.
        remove_consumer(book, "replay")
        monkeypatch.setattr(consumer, "delete_removed_consumers", delete)
        assert list(book.consumers()) == ["train"] and book.check().ok
        with pytest.raises(LeaseLostError):
            lease.ack()
        with snapshot(book, "memory:") as copy:
            check(copy)
        book.compact()
        with book.ledger.read() as tx:
            for table in ("queue", "groups", "queue_before", "groups_before", "tallies"):
                assert tx.first(f"SELECT MAX(consumer) FROM {table}")[0] in (1, None), table
        check(book)
        book.rewind(saved)
        assert len(book.lease(9, consumer="replay", create=True)) == 5, "a new group under the name of the old one"
        numbers_used = {row[1] for row in ledger(book)["leases"]}
        assert len(numbers_used) == 2, "with a number of its own"
        check(book)
        assert book.check().ok
    if url == str(tmp_path / "book"):
        repair(url)
        with rollbook.open(url) as book:
            assert list(book.consumers()) == ["train", "replay"], "a repair brings no removed group back"


def test_a_lost_lease_is_told_once() -> None:
    clock = Clock()
    with rollbook.open("memory:", clock=clock) as book:
        book.append(record())
        with book.lease(1, seconds=10) as lease:
            clock.now += 11
            with pytest.raises(LeaseLostError):
                lease.ack()
        with pytest.raises(LeaseLostError), book.lease(1, seconds=10):
            clock.now += 11
