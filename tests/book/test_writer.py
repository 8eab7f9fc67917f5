"""The streaming writer: small appends gathered into few, durable when a receipt says so, errors where they belong."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import rollbook
from rollbook.book import AppendResult, BookError, ConflictError, SamplesToInserts
from tests.book.records import check, numbers, record, records, take


def frames(book: rollbook.Book) -> int:
    with book.ledger.read() as tx:
        return int(tx.first("SELECT COUNT(*) FROM (SELECT DISTINCT segment, start FROM records) AS places")[0])


def test_small_appends_are_gathered(url: str) -> None:
    with rollbook.open(url) as book:
        with book.writer(delay=30.0, batch=1000) as writer:
            receipts = [writer.add(row) for row in records(50)]
            assert len(book) == 0 and not receipts[0].done()
        assert [receipt.result() for receipt in receipts] == [AppendResult(admitted=1)] * 50
        assert frames(book) == 1
        assert numbers(book.where()) == list(range(50))
        check(book)


def test_a_batch_is_admitted_when_it_is_full(url: str) -> None:
    with rollbook.open(url) as book, book.writer(delay=60.0, batch=4) as writer:
        receipts = [writer.add(row) for row in records(4)]
        assert receipts[3].result(timeout=30).admitted == 1
        assert len(book) == 4
        late = writer.add(records(1, start=4))
        with pytest.raises(TimeoutError):
            late.result(timeout=0.05)


def test_the_delay_is_held(url: str) -> None:
    with rollbook.open(url) as book, book.writer(delay=0.1, batch=1000) as writer:
        start = time.monotonic()
        receipts = [writer.add(row) for row in records(3)]
        assert receipts[0].result(timeout=30) == AppendResult(admitted=1)
        assert time.monotonic() - start >= 0.1
        assert len(book) == 3 and frames(book) == 1


def test_flush_waits_until_all_is_durable(durable_url: str) -> None:
    with rollbook.open(durable_url) as book:
        writer = book.writer(delay=60.0)
        writer.add(records(3))
        writer.flush()
        with rollbook.open(durable_url, mode="r") as other:
            assert len(other) == 3
        writer.flush()
        writer.close()
        with pytest.raises(BookError, match="writer: closed"):
            writer.add(records(1, start=3))
        writer.close()


def test_only_the_piece_at_fault_fails(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(record(suffix="known", reward=0.5))
        writer = book.writer(delay=60.0)
        good = writer.add(records(2))
        bad = writer.add([record(suffix="x"), record(suffix="known", reward=0.75)])
        after = writer.add(records(1, start=2))
        with pytest.raises(ConflictError, match="known.*reward"):
            writer.flush()
        assert good.result() == AppendResult(admitted=2) and after.result() == AppendResult(admitted=1)
        with pytest.raises(ConflictError):
            bad.result()
        assert "//0/0/x" not in book and len(book) == 4
        writer.flush()  # It was said once.
        writer.add(record(suffix="known", reward=0.25))
        with pytest.raises(ConflictError):
            writer.close()
        check(book)


def test_an_error_that_was_asked_for_is_not_raised_again(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(record(suffix="known", reward=0.5))
        with book.writer(delay=0.0) as writer:
            receipt = writer.add(record(suffix="known", reward=0.75))
            assert isinstance(receipt.exception(timeout=30), ConflictError)


def test_leaving_by_an_exception_keeps_what_was_added_and_the_exception(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(record(suffix="known", reward=0.5))
        with pytest.raises(ZeroDivisionError), book.writer(delay=60.0) as writer:
            writer.add(records(2))
            writer.add(record(suffix="known", reward=0.75))
            raise ZeroDivisionError
        assert len(book) == 3


def test_receipts_tell_what_became_of_their_own(url: str) -> None:
    with rollbook.open(url, max_staleness=0) as book:
        book.announce(2)
        row = record(suffix="a")
        book.append(row)
        with book.writer(delay=60.0, author="scorer") as writer:
            receipts = [
                writer.add([row, record(suffix="b")]),
                writer.add(record(suffix="b")),
                writer.add(record(suffix="old", policy_versions=1)),
                writer.add([]),
            ]
            revised = record(suffix="c")
        assert [receipt.result() for receipt in receipts] == [
            AppendResult(admitted=1, existing=1),
            AppendResult(existing=1),
            AppendResult(admitted=1, stale=1),
            AppendResult(),
        ]
        with book.writer(delay=60.0, author="scorer") as writer:
            receipts = [writer.add(row.replace(reward=1.0)), writer.add(revised)]
        assert [receipt.result() for receipt in receipts] == [AppendResult(revised=1), AppendResult(admitted=1)]
        assert book.history("//0/0/a")[-1].detail["author"] == "scorer"


def test_records_are_as_they_were_when_they_were_added(url: str) -> None:
    with rollbook.open(url) as book:
        with book.writer(delay=60.0) as writer:
            row = record(suffix="a", advantages=torch.ones(3), info={"i": 1})
            writer.add(row)
            row.advantages.zero_()  # type: ignore[union-attr]
            row.info["i"] = 2
            row.reward = 3.0
        read = book["//0/0/a"]
        assert read.advantages is not None and read.advantages.tolist() == [1, 1, 1]
        assert read.info == {"i": 1} and read.reward is None


def test_threads_share_a_writer(url: str) -> None:
    with rollbook.open(url) as book:
        with book.writer(delay=0.01, batch=16) as writer:

            def add(k: int) -> None:
                for i in range(20):
                    writer.add(records(1, start=100 * k + i))

            threads = [threading.Thread(target=add, args=(k,)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert sorted(numbers(book.where())) == sorted(100 * k + i for k in range(4) for i in range(20))
        assert frames(book) < 60
        check(book)


def test_back_pressure_reaches_whoever_adds(url: str) -> None:
    with rollbook.open(url, limiters=SamplesToInserts(ratio=1.0, slack=4, append_size=2)) as book:
        writer = book.writer(delay=0.0, batch=1, max_pending=2)
        added: list[int] = []

        def add() -> None:
            for i in range(12):
                writer.add(records(1, start=i))
                added.append(i)

        adder = threading.Thread(target=add)
        adder.start()
        deadline = time.monotonic() + 30
        while len(book) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        adder.join(0.2)
        # Four may be unread, or three, if two came together; four more are on their way.
        assert adder.is_alive() and len(added) < 10 and len(book) in (3, 4)
        taken: list[int] = []
        while len(taken) < 12 and time.monotonic() < deadline:
            taken += numbers(take(book, 1, timeout=1))
        adder.join(30)
        writer.close()
        assert taken == list(range(12))
        check(book)


def test_evaluation_and_bad_options(url: str) -> None:
    with rollbook.open(url) as book:
        with book.writer(evaluation=True) as writer:
            writer.add(records(2))
        assert book.counts().evaluation == 2
        for options in ({"delay": -1}, {"batch": 0}, {"max_pending": 0}):
            with pytest.raises(ValueError, match=next(iter(options))):
                book.writer(**options)  # type: ignore[arg-type]
        with book.writer() as writer, pytest.raises(ValueError, match="append: got str"):
            writer.add("text")  # type: ignore[arg-type]


def test_a_flush_that_takes_too_long(url: str) -> None:
    with rollbook.open(url, limiters=SamplesToInserts(ratio=1.0, slack=1)) as book:
        book.append(records(1))
        writer = book.writer(delay=0.0)
        writer.add(records(1, start=1))
        with pytest.raises(TimeoutError, match="some records are not durable after 0.1 s"):
            writer.flush(timeout=0.1)
        take(book, 1)
        writer.close()
        assert len(book) == 2
