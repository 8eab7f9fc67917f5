"""Staleness: the announced policy version, held as records come in and again as they are leased."""

from __future__ import annotations

import pytest
import torch

import rollbook
from rollbook.book import (
    AppendResult,
    BackPressureError,
    BookError,
    MaxUses,
    SamplesToInserts,
    fork,
    read_policy_lineage,
)
from tests.book.records import check, numbers, record, records, take


def versioned(*versions: object, start: int = 0) -> list[rollbook.Experience]:
    return [record(suffix=f"{i}", info={"i": i}, policy_versions=version) for i, version in enumerate(versions, start)]


def test_announced_versions_rise(url: str) -> None:
    with rollbook.open(url) as book:
        assert book.policy_version is None
        book.announce(3)
        book.announce(3)
        assert book.policy_version == 3
        with pytest.raises(BookError, match="announce: got version 2, the book has 3; only a rewind goes back"):
            book.announce(2)
        for bad in (-1, 1.5, "4", None):
            with pytest.raises(ValueError, match="version: got"):
                book.announce(bad)  # type: ignore[arg-type]
        assert book.policy_version == 3
        details = book.sql("select detail from events where kind = 'announced'").rows()
        assert details == [('{"version": 3}',)]


def test_the_version_outlives_the_process(durable_url: str) -> None:
    with rollbook.open(durable_url, max_staleness=0) as book:
        book.announce(7)
    with rollbook.open(durable_url) as book:
        assert book.policy_version == 7
        assert book.append(versioned(6)).stale == 1


def test_old_records_are_recorded_as_such_when_they_come(url: str) -> None:
    with rollbook.open(url, max_staleness=2) as book:
        assert book.append(versioned(0)).stale == 0  # Nothing was announced: nothing is old.
        book.announce(5)
        assert book.append(versioned(2, 3, 5, 9, start=1)) == AppendResult(admitted=4, stale=1)
        counts = book.counts()
        assert (counts.admitted, counts.waiting, counts.dropped) == (5, 3, {"stale": 2})
        assert [event.kind for event in book.history("//0/0/1")] == ["admitted", "dropped"]
        assert book.history("//0/0/1")[-1].reason == "stale"
        assert book["//0/0/1"].info == {"i": 1}  # Kept until a compaction.
        assert numbers(book.lease(9)) == [2, 3, 4]
        check(book)


def test_old_records_are_not_leased(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        book.append(versioned(1, 2, 3))
        book.announce(2)
        assert book.counts().dropped == {}
        book.announce(3)
        assert book.counts().dropped == {"stale": 1}
        assert numbers(book.lease(9)) == [1, 2]


def test_what_grew_old_while_it_was_leased_is_not_leased_again(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        book.append(versioned(1, 3))
        book.announce(1)
        lease = book.lease(2)
        book.announce(3)
        assert book.counts().leased == 2  # Whoever trains on it now may finish.
        lease.nack()
        assert numbers(book.lease(9)) == [1]
        assert book.counts().dropped == {"stale": 1}
        check(book)


def test_what_grew_old_while_it_rested_is_not_leased_again(url: str) -> None:
    with rollbook.open(url, max_staleness=1, removers=MaxUses(None)) as book:
        book.append(versioned(1, 3))
        book.announce(2)
        lease = book.lease(2)
        book.announce(3)
        lease.ack()
        assert numbers(book.lease(9)) == [1]
        check(book)


def test_a_lease_may_be_stricter(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(versioned(1, 2, 3))
        book.announce(3)
        assert numbers(take(book, 9, max_staleness=1)) == [1, 2]
        assert book.counts().dropped == {"stale": 1}
        # It holds for what comes later too, each time it is asked.
        book.append(versioned(1, 3, start=3))
        assert numbers(take(book, 9, max_staleness=1)) == [4]
        book.append(versioned(1, start=5))
        assert numbers(take(book, 9)) == [5]
        check(book)


def test_each_consumer_has_its_own_bound(url: str) -> None:
    with rollbook.open(url, max_staleness=0) as book:
        book.consumer("critic", create=True, max_staleness=2)
        book.announce(2)
        assert book.append(versioned(0, 1, 2)).stale == 2
        assert numbers(book.lease(9)) == [2]
        assert numbers(book.lease(9, consumer="critic")) == [0, 1, 2]
        book.consumer("late", create=True, max_staleness=1)
        assert numbers(book.lease(9, consumer="late")) == [1, 2]
        check(book)


def test_versions_of_tokens_count(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        book.announce(5)
        partly = record(suffix="a", policy_versions=torch.tensor([5, 3, 5]))
        masked = record(
            suffix="b", policy_versions=torch.tensor([5, 3, 5]), action_mask=torch.tensor([True, False, True])
        )
        trinity = record(suffix="c", info={"model_version": 3})
        current = record(suffix="d", info={"model_version": 5})
        unknown = record(suffix="e")
        assert book.append([partly, masked, trinity, current, unknown]).stale == 2
        assert book.lease(9).uids == [f"//0/0/{name}" for name in "bde"]
        versions = book.sql("select suffix, version_min, version_max from experiences order by 1").rows()
        assert versions == [("a", 3, 5), ("b", 5, 5), ("c", 3, 3), ("d", 5, 5), ("e", None, None)]


def test_a_record_of_no_version_is_never_stale(url: str) -> None:
    with rollbook.open(url, max_staleness=0) as book:
        book.append(records(1))
        book.announce(1000)
        book.append(records(1, start=1))
        assert numbers(book.lease(9)) == [0, 1]


def test_what_is_too_old_is_kept_if_asked(url: str) -> None:
    for keep in (False, True):
        name = f"{url}{keep}" if url.startswith("/") else url
        if url.startswith("postgresql"):
            name = f"{url}&schema=keep_{keep}"
        with rollbook.open(name, max_staleness=0, keep_stale=keep) as book:
            book.append(versioned(1, 2))
            book.announce(2)
            book.compact(garbage=0.0)
            assert book.counts().dropped == {"stale": 1}
            assert book["//0/0/1"].info == {"i": 1}
            if keep:
                assert book["//0/0/0"].info == {"i": 0}
            else:
                with pytest.raises(BookError, match=r"//0/0/0: data was removed \(stale\)"):
                    book["//0/0/0"]
            # The same record again is known, whether or not its bytes are kept.
            assert book.append(versioned(1)).existing == 1
            check(book)


def test_going_stale_frees_room(url: str) -> None:
    with rollbook.open(url, max_staleness=0, limiters=SamplesToInserts(ratio=1.0, slack=2, append_size=2)) as book:
        book.announce(1)
        book.append(versioned(1, 1))
        with pytest.raises(BackPressureError):
            book.append(versioned(1, start=2), timeout=0)
        book.announce(2)
        assert book.append(versioned(2, 2, start=3), timeout=0).admitted == 2
        assert numbers(book.lease(9)) == [3, 4]
        check(book)


# --- lineages ----------------------------------------------------------------------------------------------------


def test_versions_that_a_rewind_abandoned_are_stale(url: str) -> None:
    with rollbook.open(url, max_staleness=2) as book:
        book.consumer("unbounded", create=True)
        book.announce(5)
        book.append(versioned(4, 5))
        book.checkpoint("saved")
        book.append(versioned(5, 6, torch.tensor([5, 5, 7]), start=2))
        book.announce(7)
        book.append(versioned(7, start=5))
        assert read_policy_lineage(book) == 0
        assert book.rewind("saved").lineage == read_policy_lineage(book) == 1
        # Versions up to the checkpoint's are shared.
        assert (book.policy_version, book.counts().dropped) == (5, {"stale": 3})
        event = book.history("//0/0/3")[-1]
        assert (event.kind, event.reason, event.detail) == ("dropped", "stale", {"abandoned_version": 6})
        assert book.counts("unbounded").waiting == 6
        # A worker that has not loaded the other weights; and a version that no lineage had.
        assert book.append(versioned(6, 7, 8, 5, start=6)).stale == 2
        assert book.history("//0/0/6")[-1].detail == {"abandoned_version": 6}
        book.checkpoint("again")
        assert book.rewind("again").lineage == 2
        book.announce(6)
        assert book.append(versioned(6, 7, start=10)).stale == 1
        book.announce(8)
        assert book.append(versioned(7, start=12)).stale == 0
        # Who comes later, asks for a bound later, or for one lease, sees the same; floors are 6 and, for all, 0.
        book.consumer("late", create=True, max_staleness=8)
        book.consumer("changed", create=True)
        book.consumer("changed", change=True, max_staleness=8)
        for name in ("late", "changed"):
            assert numbers(book.lease(99, consumer=name)) == [0, 1, 2, 8, 9, 10, 12]
        assert numbers(book.lease(99, consumer="unbounded", max_staleness=8)) == [0, 1, 2, 8, 9, 10, 12]
        assert book.counts("unbounded").dropped == {"stale": 6}
        assert numbers(book.lease(99)) == [8, 10, 12]
        check(book)


def test_records_name_the_lineage_that_sampled_them(url: str) -> None:
    def sampled(i: int, version: int, lineage: int | None) -> rollbook.Experience:
        entries = {"i": i} if lineage is None else {"i": i, "policy_lineage": lineage}
        return record(suffix=f"{i}", info=entries, policy_versions=version)

    with rollbook.open(url, max_staleness=9) as book:
        book.announce(5)
        book.checkpoint("first")
        book.announce(7)
        book.rewind("first")
        book.announce(6)
        book.checkpoint("second")
        # Weights that are not announced yet; weights of the other lineage, under a number that is announced here, too.
        rows = [sampled(0, 7, 1), sampled(1, 6, 0), sampled(2, 5, 0), sampled(3, 6, 1), sampled(4, 6, None)]
        assert book.append(rows).stale == 1
        book.announce(9)
        assert book.append([sampled(5, 7, 0), sampled(6, 7, 1), sampled(7, 9, 9)]).stale == 1
        book.rewind("second")
        assert book.append([sampled(8, 6, 1), sampled(9, 7, 1), sampled(10, 6, 0), sampled(11, 7, 2)]).stale == 2
        book.consumer("late", create=True, max_staleness=9)
        assert numbers(book.lease(99)) == numbers(book.lease(99, consumer="late")) == [2, 3, 4, 8, 11]
        check(book)
        # A fork has its own records from there on: none of them is of versions that this book abandoned.
        name = f"{url}&schema=twin" if url.startswith("postgresql") else f"{url}-twin" if url != "memory:" else url
        with fork(book, "second", name) as twin:
            assert (read_policy_lineage(twin), twin.policy_version) == (2, 6)
            assert twin.append(versioned(6, 7, 8)).stale == 0


def test_a_lineage_that_was_tampered_with_is_refused(url: str) -> None:
    with rollbook.open(url) as book:
        for value in ("[", '{"seen": 0}', '{"branches": [[1, 2, "x"]], "late": [], "named": [], "seen": 0, "top": 1}'):
            with book.ledger.write() as tx:
                tx.run("DELETE FROM meta WHERE key = 'lineage'")
                tx.run("INSERT INTO meta (key, value) VALUES ('lineage', ?)", (value,))
            with pytest.raises(BookError, match="meta: lineage"):
                book.append(versioned(1))
