"""Snapshots and forks: copies between all kinds of books, whole or not there, with no byte that is not theirs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook import EID
from rollbook.book import (
    Book,
    BookError,
    LeaseLostError,
    MaxUses,
    Uniform,
    disk,
    fork,
    queue,
    redact_records,
    snapshot,
    trained_steps,
)
from tests.book.conftest import KINDS
from tests.book.test_checkpoints import durable_url, many_books, place_of, record, seen, sequence, some, sound

__all__ = ["durable_url", "many_books"]  # fixtures


class Stopped(BaseException):
    """As a process that is killed: nothing but a handler of everything sees it."""


@pytest.fixture
def watched() -> Iterator[Callable[[Callable[[str], None]], None]]:
    yield disk.watch_failpoints
    disk.watch_failpoints(None)


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place_of(request.param, request, tmp_path)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a copy goes: beside `url`, of each kind."""
    return place_of(request.param, request, tmp_path / "copies")


@pytest.fixture
def book(url: str) -> Iterator[Book]:
    with rollbook.open(url, tokenizer="t1", sampler=Uniform(), seed=4) as opened:
        yield opened


def picture(seed: int) -> dict[str, Any]:
    return {"pixel_values": np.random.default_rng(seed).random((64, 64)).astype(np.float32)}


def contents(book: Book) -> dict[str, Any]:
    """Every record that is there, whole, by id."""
    with book.ledger.read() as tx:
        uids = [uid for (uid,) in tx.all("SELECT uid FROM records WHERE segment IS NOT NULL ORDER BY seq")]
    return {row.eid.uid: row.to_dict() for row in book.get(uids)} if uids else {}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return repr(left) == repr(right)


def rows(book: Book, sql: str) -> list[Any]:
    with book.ledger.read() as tx:
        return list(tx.all(sql))


def events(book: Book) -> list[Any]:
    return rows(book, "SELECT id, time, seq, consumer, kind, reason, step, lease, detail FROM events ORDER BY id")


def lived(book: Book) -> None:
    """A book with some of everything."""
    book.append(some(range(3), version=1))
    book.append([record(9, batch="eval")], evaluation=True)
    book.append(
        [record(4, 0).replace(multi_modal_inputs=picture(1)), record(4, 1).replace(multi_modal_inputs=picture(1))]
    )
    book.fail(EID(batch="b", task=7, run=0, suffix="s"), group_size=1)
    book.announce(2)
    book.consumer("critic", create=True)
    book.lease(1, by="group").ack(step=1)
    book.lease(2, consumer="critic").ack(step=1)
    book.revise(record(1, 0), reward=7.0, author="ana")
    redact_records(book, record(1, 1), ["info"], author="ana")
    book.delete(record(2, 0), author="ana")


# --- snapshots ----------------------------------------------------------------------------------------------------


def test_a_copy_is_the_book(book: Book, target: str) -> None:
    lived(book)
    before = seen(book), events(book), contents(book)
    with snapshot(book, target) as copy:
        assert (seen(book), events(book)) == before[:2]
        assert seen(copy) == before[0]
        assert events(copy)[:-1] == before[1]
        assert events(copy)[-1][4] == "copied"
        assert same(contents(copy), before[2])
        assert len(before[2]) == 8
        sound(copy)
        assert copy.counts() == book.counts()
        [(copy_id,)], [(book_id,)] = (
            rows(opened, "SELECT value FROM meta WHERE key = 'book'") for opened in (copy, book)
        )
        assert copy_id != book_id
        origin = json.loads(rows(copy, "SELECT value FROM meta WHERE key = 'from'")[0][0])
        assert origin == {"book": book_id, "event": before[1][-1][0], "checkpoint": None, "from": None}
        # Both go on, on their own.
        assert copy.append([record(1, 0, version=1), record(4, 0).replace(multi_modal_inputs=picture(1))]).existing == 2
        assert sequence(copy, "group", 2, 1) == sequence(book, "group", 2, 1)
        assert copy.append(some(range(20, 22))).admitted == 4
        assert len(copy) == len(book) + 4
        copy.compact()
        assert copy[record(4, 0).eid.uid].multi_modal_inputs is not None
        sound(copy)


def test_a_copy_of_a_copy_knows_both() -> None:
    with rollbook.open("memory:") as book, snapshot(book, "memory:") as first, snapshot(first, "memory:") as second:
        origin = json.loads(rows(second, "SELECT value FROM meta WHERE key = 'from'")[0][0])
        assert origin["book"] == rows(first, "SELECT value FROM meta WHERE key = 'book'")[0][0]
        assert origin["from"]["book"] == rows(book, "SELECT value FROM meta WHERE key = 'book'")[0][0]


def test_a_book_of_one_tokenizer_stays_one(book: Book) -> None:
    book.append(some(range(1)))
    with snapshot(book, "memory:", tokenizer="t2") as copy, pytest.raises(BookError, match="tokenizer"):
        copy.append(some(range(5, 6)))


def test_leases_are_void_in_the_copy_and_live_in_the_book(book: Book) -> None:
    book.append(some(range(4)))
    lease = book.lease(2, by="group")
    with snapshot(book, "memory:") as copy:
        assert copy.counts().leased == 0
        assert rows(copy, "SELECT state FROM leases") == [("voided",)]
        assert rows(copy, "SELECT samples FROM consumers") == [(0,)]
        assert copy.history(lease.uids[0])[-1].kind == "voided"
        sound(copy)
        assert len(copy.lease(9, by="group")) == 8
    assert book.counts().leased == 4
    lease.ack()
    sound(book)


def test_checkpoints_work_in_the_copy(book: Book) -> None:
    book.append(some(range(5)))
    book.checkpoint("saved")
    then = seen(book)
    first = sequence(book, "group", 3, 1)
    with snapshot(book, "memory:") as copy:
        copy.rewind("saved")
        assert seen(copy) == then
        assert sequence(copy, "group", 3, 1) == first
        sound(copy)


def test_bytes_that_are_nobodys_are_not_copied(tmp_path: Path) -> None:
    secret = b"a word that was deleted"
    with rollbook.open(tmp_path / "book") as book:
        book.append([record(0, 0).replace(response_text=secret.decode()), record(0, 1)])
        book.append([record(1, 0).replace(response_text="kept", info={"word": secret.decode()})])
        book.delete(record(0, 0), author="ana")
        redact_records(book, record(1, 0), ["info"], author="ana")
        with snapshot(book, tmp_path / "copy") as copy:
            assert copy[record(0, 1).eid.uid].tokens.tolist() == record(0, 1).tokens.tolist()
            assert copy[record(1, 0).eid.uid].response_text == "kept"
    has_bytes = {
        kind: any(secret in path.read_bytes() for path in (tmp_path / kind).rglob("*") if path.is_file())
        for kind in ("book", "copy")
    }
    assert has_bytes == {"book": True, "copy": False}


def test_small_pieces_make_the_same_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollbook.book import transfer

    monkeypatch.setattr(transfer, "_PAGE_ROWS", 2)
    monkeypatch.setattr(transfer, "PUT_BYTES", 100)
    with rollbook.open("memory:") as book:
        lived(book)
        with snapshot(book, "memory:", segment_bytes=1000) as copy:
            assert seen(copy) == seen(book)
            assert same(contents(copy), contents(book))
            assert len(copy.store.segments()) > 2


def test_a_reader_may_copy(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append(some(range(2)))
        book.checkpoint("saved")
    with rollbook.open(tmp_path / "book", "r") as reader:
        with snapshot(reader, "memory:") as copy, fork(reader, "saved", "memory:") as other:
            assert len(copy) == len(other) == 4


# --- where to -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder", "book", "link"])
def test_a_folder_that_is_not_empty_is_refused(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "there"
    if kind == "file":
        place.write_text("x")
    elif kind == "folder":
        (place / "x").mkdir(parents=True)
    elif kind == "book":
        rollbook.open(place).close()
    else:
        (tmp_path / "other").mkdir()
        place.symlink_to(tmp_path / "other")
    before = sorted(tmp_path.rglob("*"))
    with rollbook.open("memory:") as book, pytest.raises(BookError, match="expected a new or empty folder"):
        snapshot(book, place)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with rollbook.open("memory:") as book:
        book.append(some(range(2)))
        snapshot(book, tmp_path / "there").close()
    with rollbook.open(tmp_path / "there", "r") as copy:
        assert len(contents(copy)) == 4


def test_a_schema_that_is_not_empty_is_refused(postgres_url: str) -> None:
    with rollbook.open(postgres_url) as book:
        book.append(some(range(2)))
        with pytest.raises(BookError, match="schema 'rollbook'.*expected a new or empty schema"):
            snapshot(book, postgres_url)
        separator = "&" if "?" in postgres_url else "?"
        with snapshot(book, f"{postgres_url}{separator}schema=other") as copy:
            assert len(contents(copy)) == 4
            copy.append(some(range(5, 6)))
        names = rows(book, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'copying%'")
        assert (len(book), names) == (4, [])


def test_the_data_of_a_copy_may_lie_in_a_folder(postgres_url: str, tmp_path: Path) -> None:
    with rollbook.open("memory:") as book:
        lived(book)
        place = f"file://{tmp_path}/data"
        with snapshot(book, postgres_url, data=place) as copy:
            assert same(contents(copy), contents(book))
        with rollbook.open(postgres_url, "r", data=place) as copy:
            assert same(contents(copy), contents(book))
        with pytest.raises(BookError, match="holds segments already"):
            separator = "&" if "?" in postgres_url else "?"
            snapshot(book, f"{postgres_url}{separator}schema=other", data=place)


@pytest.mark.parametrize(("url", "options"), [("", {}), (b"x", {}), ("memory:", {"seed": 3}), ("s3://x", {})])
def test_bad_places_and_options_are_refused(url: Any, options: dict[str, Any]) -> None:
    with rollbook.open("memory:") as book, pytest.raises(ValueError, match="got|unknown option"):
        snapshot(book, url, **options)


# --- while others go on -------------------------------------------------------------------------------------------


def test_a_copy_is_one_state_while_others_write(durable_url: str) -> None:
    """A writer appends groups of three in one append: a copy holds whole ones only, and what came before it."""
    stop = threading.Event()
    done: list[int] = []

    def write() -> None:
        with rollbook.open(durable_url) as writer:
            for task in range(10_000):
                if stop.is_set():
                    return
                writer.append([record(task, run, size=3) for run in range(3)])
                done.append(task)
                if task % 3 == 0:
                    writer.lease(1, by="group").ack(step=task)

    with rollbook.open(durable_url) as book:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(3):
                while len(done) < 4:
                    stop.wait(0.01)
                finished = len(done)
                with snapshot(book, "memory:") as copy:
                    assert len(copy) % 3 == 0
                    assert len(copy) >= 3 * finished
                    assert len(contents(copy)) == len(copy)
                    sound(copy)
        finally:
            stop.set()
            thread.join()
        sound(book)


def test_compaction_may_move_what_is_copied(book: Book, watched: Any) -> None:
    for task in range(6):
        book.append(some(range(task, task + 1)))
    book.append(record(9, 0).replace(multi_modal_inputs=picture(3)))
    book.delete([record(task, 0) for task in range(6)], author="ana")
    expected = contents(book)
    moved: list[str] = []

    def meddle(name: str) -> None:
        if name == "during snapshot" and not moved:
            moved.append(name)
            before = set(book.store.segments())
            book.store.seal()
            book.compact(garbage=0.0)
            # In a database the picture has a segment of its own, which has no need to move.
            assert len(before & set(book.store.segments())) <= (book.ledger.dialect == "postgresql")

    watched(meddle)
    with snapshot(book, "memory:") as copy:
        assert moved
        assert same(contents(copy), expected)
        sound(copy)


def test_a_revision_whose_old_bytes_are_gone_starts_the_copy_anew(book: Book, watched: Any) -> None:
    book.append(some(range(2)))
    tries: list[str] = []

    def meddle(name: str) -> None:
        if name == "during snapshot":
            tries.append(name)
            if len(tries) == 1:
                book.revise({row.eid.uid: {"reward": 9.0} for row in some(range(2))}, author="ana")
                book.store.seal()
                book.compact(garbage=0.0, grace=0.0)
                book.compact(garbage=0.0, grace=0.0)

    watched(meddle)
    with snapshot(book, "memory:") as copy:
        assert len(tries) == 2
        assert same(contents(copy), contents(book))
        assert copy[record(0, 0).eid.uid].reward == 9.0
        assert rows(copy, "SELECT revision FROM records") == [(1,)] * 4


@pytest.mark.parametrize("window", ["during snapshot", "end of snapshot", "before rename"])
def test_half_a_copy_is_no_book(window: str, tmp_path: Path, watched: Any) -> None:
    def stop(name: str) -> None:
        if name == window:
            assert not (tmp_path / "copy").exists()
            raise Stopped

    with rollbook.open(tmp_path / "book") as book:
        lived(book)
        watched(stop)
        with pytest.raises(Stopped):
            snapshot(book, tmp_path / "copy")
        disk.watch_failpoints(None)
        assert os.listdir(tmp_path) == ["book"]
        snapshot(book, tmp_path / "copy").close()


def test_half_a_copy_leaves_no_schema(postgres_url: str, watched: Any) -> None:
    def stop(name: str) -> None:
        if name == "before rename":
            raise Stopped

    with rollbook.open("memory:") as book:
        book.append(some(range(1)))
        watched(stop)
        with pytest.raises(Stopped):
            snapshot(book, postgres_url)
        disk.watch_failpoints(None)
        with snapshot(book, postgres_url) as copy:
            names = rows(copy, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'copying%'")
            assert (len(copy), names) == (2, [])


# --- forks --------------------------------------------------------------------------------------------------------


def test_a_fork_is_the_book_at_the_checkpoint_and_goes_the_same_way(book: Book, target: str) -> None:
    book.consumer(removers=[MaxUses(2)], change=True)
    lived(book)
    book.checkpoint("older")
    book.lease(1).ack(step=2)
    book.checkpoint("saved")
    then, history = seen(book), events(book)
    with snapshot(book, "memory:") as copy:
        content = contents(copy)
    # What follows it: records, uses, an announced version, another consumer, another checkpoint.
    book.append(some(range(10, 14)))
    first = sequence(book, "group", 4, 2)
    active = book.lease(1, by="group")
    book.announce(9)
    book.consumer("judge", create=True)
    book.checkpoint("newer")
    book.lease(2, consumer="judge").ack()
    book.lease(1, by="group").ack()
    now = seen(book), events(book)
    with fork(book, "saved", target) as other:
        assert (seen(book), events(book)) == now
        queue.drain_inboxes(other)
        forked = seen(other)
        assert forked["queue"][: len(then["queue"])] == then["queue"]
        assert {row[3] for row in forked["queue"][len(then["queue"]) :]} == {"waiting", "dropped"}  # one made since
        for part in ("groups", "version"):
            assert forked[part] == then[part]
        assert forked["consumers"][:2] == then["consumers"]
        assert same(contents(other), content)
        assert events(other)[: len(history)] == history
        assert {row[4] for row in events(other)[len(history) :]} <= {"copied", "dropped"}
        assert [p.name for p in other.checkpoints()] == ["older", "saved"]
        sound(other)
        # The other run brings the same records, and is given the same.
        assert other.append(some(range(10, 14))).admitted == 8
        assert sequence(other, "group", 4, 2) == first
        sound(other)
        other.rewind("older")
        sound(other)
    active.ack()
    sound(book)


def test_a_fork_knows_revisions_and_deletions_that_came_later(book: Book) -> None:
    book.append(some(range(3)))
    book.checkpoint("saved")
    book.revise(record(0, 0), reward=4.0, author="ana")
    book.delete(record(1, 0), author="ana")
    book.append(record(5, 0))
    book.lease(3).ack()
    with fork(book, "saved", "memory:") as other:
        assert other[record(0, 0).eid.uid].reward == 4.0
        assert [entry.kind for entry in other.history(record(0, 0))] == ["admitted", "revised"]
        assert (other.counts().waiting, other.counts().dropped) == (5, {"deleted": 1})
        assert record(5, 0) not in other
        assert trained_steps(other) == {}
        origin = json.loads(rows(other, "SELECT value FROM meta WHERE key = 'from'")[0][0])
        assert origin["checkpoint"] == "saved"
        sound(other)


def test_a_fork_ends_leases_that_lived_at_the_checkpoint(book: Book) -> None:
    book.append(some(range(3)))
    lease = book.lease(2)
    book.checkpoint("saved")
    lease.ack()
    with fork(book, "saved", "memory:") as other:
        assert other.counts().waiting == 6
        assert rows(other, "SELECT samples FROM consumers") == [(0,)]
        assert set(other.lease(6).uids) == {row.eid.uid for row in some(range(3))}
        sound(other)
    with pytest.raises(LeaseLostError):
        lease.nack()


def test_a_fork_from_nowhere_is_refused(tmp_path: Path) -> None:
    with rollbook.open("memory:") as book, pytest.raises(KeyError, match="'nowhere', the book has none"):
        fork(book, "nowhere", tmp_path / "copy")
    assert os.listdir(tmp_path) == []


def test_no_memory_is_shared() -> None:
    with rollbook.open("memory:") as book:
        book.append(record(1))
        uid = record(1).eid.uid
        with snapshot(book, "memory:") as copy:
            copy[uid].tokens[0] = 9
            assert book[uid].tokens.tolist() == copy[uid].tokens.tolist() == record(1).tokens.tolist()
