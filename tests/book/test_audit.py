"""Promises of the book that were once not kept: odd texts, changed folders, clocks put back, canceled waits, forks,
quotas, redaction key by key, appends that bring old and new, and queries that grew with the book."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.book import (
    BookError,
    EasyToHard,
    LeaseLostError,
    MaxUses,
    MinSize,
    Proportional,
    QuotaExceededError,
    export_records,
    fork,
    import_records,
    ledger,
    redact_records,
    snapshot,
)


def record(i: int = 0, **fields: Any) -> Experience:
    return Experience(tokens=[1, 2, 3 + i], **fields)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_book_stays_where_it_is_when_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    rollbook.open("runs").close()  # another book of the same relative name
    monkeypatch.chdir(tmp_path / "here")
    book = rollbook.open("runs")
    book.append(record())
    monkeypatch.chdir(tmp_path / "there")
    book.append(record(1))
    assert len(snapshot(book, tmp_path / "copy")) == 2
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if book.append(record(2)).admitted == 1 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(book) == 3
    assert book.check().ok
    assert len(rollbook.open("runs")) == 0


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with rollbook.open("~/demo") as book:
        book.append(record())
        snapshot(book, "~/copy").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "demo"]


# --- texts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["a\0b", "\ud800"])
def test_texts_that_a_database_cannot_keep_are_refused_alike(url: str, bad: str) -> None:
    book = rollbook.open(url)
    first, second = record(), record(1)
    book.append([first, second])
    lease = book.lease(1)
    for call in (
        lambda: book.drop(second, bad),
        lambda: book.fail(EID(task=1), bad),
        lambda: book.consumer(bad),
        lambda: book.lease(1, consumer=bad),
        lambda: book.counts(bad),
        lambda: book.checkpoint(bad),
        lambda: book.rewind(bad),
        lambda: book.revise(first, reward=1.0, author=bad),
        lambda: book.revise(first, reward=1.0, author="ana", reason=bad),
        lambda: book.append(first.replace(reward=1.0), author=bad),
        lambda: book.delete(first, author=bad),
        lambda: lease.nack(bad),
        lambda: book[bad],
        lambda: book.history(bad),
    ):
        with pytest.raises(ValueError, match="NUL"):
            call()
    assert lease.ack() == 1
    assert book.counts().waiting == 1
    assert book.check().ok


def test_nothing_is_given_up_or_changed_without_a_word_and_an_author() -> None:
    book = rollbook.open("memory:")
    row = record()
    book.append(row)
    with pytest.raises(ValueError, match="reason"):
        book.lease(1).nack("", drop=True)
    for author in (None, ""):
        with pytest.raises(ValueError, match="author"):
            book.delete(row, author=author)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="author"):
            redact_records(book, row, ["info"], author=author)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="author"):
        book.append(row.replace(reward=1.0), author=None)  # type: ignore[arg-type]
    assert [event.kind for event in book.history(row)] == ["admitted", "leased"]


def test_numbers_beyond_64_bits(url: str) -> None:
    book = rollbook.open(url)
    book.append([record(i) for i in range(3)])
    lease = book.lease(10**30)
    assert len(lease) == 3
    with pytest.raises(ValueError, match="step"):
        lease.ack(step=2**63)
    with pytest.raises(ValueError, match="seconds"):
        lease.renew(0)
    assert lease.ack(step=2**63 - 1) == 3


# --- redaction, evaluation, quota -----------------------------------------------------------------------------------


def test_keys_are_redacted_although_another_key_is_not_there() -> None:
    book = rollbook.open("memory:")
    row = record(info={"name": "Ana"})
    book.append(row)
    assert redact_records(book, row, ["info.name", "info.mail"], author="ana") == 1
    assert book[row.eid.uid].info == {}


@pytest.mark.parametrize("format", ["parquet", "jsonl", "frames"])
def test_evaluation_does_not_become_training_through_a_file(tmp_path: Path, format: str) -> None:
    book, other = rollbook.open("memory:"), rollbook.open("memory:")
    book.append([record(0), record(1)])
    seen = record(2)
    book.append(seen, evaluation=True)
    assert export_records(book, tmp_path / "train", format=format) == 2
    assert export_records(book, tmp_path / "eval", format=format, evaluation=True) == 1
    assert import_records(other, tmp_path / "train", format=format).admitted == 2
    assert seen.eid.uid not in other
    assert import_records(other, tmp_path / "eval", format=format, evaluation=True).admitted == 1
    assert (other.counts().waiting, other.counts().evaluation) == (2, 1)


def test_revisions_keep_the_quota(url: str) -> None:
    book = rollbook.open(url, quota=200_000)
    row = record()
    book.append(row)
    for i in range(30):
        book.revise(row, info={"note": f"{i}" + "x" * 20_000}, author="ana")
        assert sum(book.store.segments().values()) < 200_000
    with pytest.raises(QuotaExceededError):
        book.revise(row, info={"note": "y" * 300_000}, author="ana")
    assert str(book[row.eid.uid].info["note"]).startswith("29")
    assert redact_records(book, row, ["info"], author="ana") == 1


def test_an_append_of_late_fields_and_new_records_is_one(url: str) -> None:
    book = rollbook.open(url, quota=300_000)
    old = record()
    book.append(old)
    more = old.replace(advantages=[0.5, 0.5])
    with pytest.raises(QuotaExceededError):
        book.append([more, record(1, info={"text": "y" * 400_000})])
    assert book[old.eid.uid].advantages is None
    assert len(book) == 1
    done = book.append([more, record(2), record(3)])
    assert (done.admitted, done.revised, done.existing) == (2, 1, 0)
    again = book.append([more, record(4)])
    assert (again.admitted, again.revised, again.existing) == (1, 0, 1)
    assert book.check().ok


def test_a_record_that_is_deleted_while_it_is_revised_stays_deleted(url: str) -> None:
    book = rollbook.open(url)
    row = record()
    book.append(row)
    put = book.store.put

    def late(parts: Any) -> Any:
        book.store.put = put  # type: ignore[method-assign]
        book.delete(row, author="ben")
        return put(parts)

    book.store.put = late  # type: ignore[method-assign]
    with pytest.raises(BookError, match="data was removed"):
        book.revise(row, reward=1.0, author="ana")
    assert [event.kind for event in book.history(row)][-1] in ("deleted", "dropped")
    assert book.check().ok


def test_a_run_that_is_failed_twice_in_one_call() -> None:
    book = rollbook.open("memory:")
    run = EID(task=1, run=0)
    assert book.fail([run, run], "crashed", group_size=2) == 1
    assert book.check().ok


# --- writers --------------------------------------------------------------------------------------------------------


def test_a_wait_for_a_receipt_can_be_given_up_and_the_writer_goes_on() -> None:
    book = rollbook.open("memory:")

    async def wait(writer: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(writer.add(record())), 0.01)

    with book.writer(delay=0.2) as writer:
        asyncio.run(wait(writer))
        assert writer.add(record(1)).result(timeout=30).admitted == 1
    assert len(book) == 2


def test_a_writer_does_not_follow_into_a_forked_process_and_says_so(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    with book.writer(delay=0.01) as writer:
        writer.add(record()).result(timeout=30)
        child = os.fork()
        if not child:
            code = 1
            try:
                writer.add(record(1))
            except BookError:
                writer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert len(book) == 1


# --- leases ---------------------------------------------------------------------------------------------------------


def test_other_settings_wake_whoever_waits(url: str) -> None:
    book = rollbook.open(url, limiters=[MinSize(5)])
    book.append([record(i) for i in range(3)])
    sizes: list[int] = []
    waiting = threading.Thread(target=lambda: sizes.append(len(book.lease(2, timeout=60))))
    began = time.monotonic()
    waiting.start()
    time.sleep(0.2)
    book.consumer(limiters=[], change=True)
    waiting.join()
    assert sizes == [2]
    assert time.monotonic() - began < 50


def test_a_clock_that_is_put_back_does_not_keep_a_dead_holders_records(url: str) -> None:
    clock = Clock()
    book = rollbook.open(url, clock=clock, lease_seconds=10)
    book.append([record(i) for i in range(2)])
    dead, living = book.lease(1), book.lease(1)
    clock.now -= 3600
    assert len(book.lease(1)) == 0
    clock.now += 8
    assert len(living.experiences) == 1  # progress
    clock.now += 8
    assert len(book.lease(2)) == 1
    assert living.ack() == 1
    with pytest.raises(LeaseLostError):
        dead.ack()


def test_a_longer_time_lasts(url: str) -> None:
    clock = Clock()
    book = rollbook.open(url, clock=clock, lease_seconds=10)
    book.append(record())
    lease = book.lease(1)
    lease.renew(3600)
    clock.now += 100
    assert len(book.lease(1)) == 0
    assert len(lease.experiences) == 1
    clock.now += 3000
    assert lease.ack() == 1


def test_weights_of_all_sizes_do_not_make_the_counts_wrong(url: str) -> None:
    book = rollbook.open(url, sampler=Proportional(), removers=[MaxUses(2)])
    rewards = [float("inf"), 1e308, 0.0, 5e-324, 0.3, float("nan"), None]
    book.append([record(i, reward=reward) for i, reward in enumerate(rewards)])
    while lease := book.lease(2):
        lease.ack()
        assert book.check().ok


def test_a_fork_of_what_was_leased_adds_up(url: str, tmp_path: Path) -> None:
    book = rollbook.open(url)
    book.append([record(i) for i in range(4)])
    active, done = book.lease(1), book.lease(1)
    saved = book.checkpoint()
    done.ack()
    twin = fork(book, saved, tmp_path / "twin")
    assert twin.check().ok
    assert twin.counts().waiting == 4
    again = fork(twin, saved, "memory:")
    assert again.check().ok
    assert active.ack() == 1


# --- queries that must not grow with the book -----------------------------------------------------------------------


def test_leases_by_group_look_up_members_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: dict[str, str] = {}
    real = ledger._SQLiteTransaction.query_many

    def ask(self: Any, *queries: Any) -> Any:
        for sql, values in queries:
            steps = self.connection.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
            plans[sql] = " | ".join(row[3] for row in steps)
        return real(self, *queries)

    book = rollbook.open(tmp_path / "book", sampler=EasyToHard())
    book.append([record(run, eid=EID(task=task, run=run), group_size=2) for task in range(4) for run in range(2)])
    monkeypatch.setattr(ledger._SQLiteTransaction, "query_many", ask)
    book.lease(1, by="group").ack()
    book.append([record(run, eid=EID(task=9, run=run), group_size=2) for run in range(2)])
    group_plans = {sql: plan for sql, plan in plans.items() if re.search(r"queue.* AND (queue\.)?gid IN", sql)}
    assert len(group_plans) == 2
    for sql, plan in group_plans.items():
        assert "consumer=? AND gid=?" in plan, sql
