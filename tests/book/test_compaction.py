"""Compaction: what goes and what stays, on every store, whoever reads, writes, compacts or dies meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook.book import compaction, disk, forget_checkpoint, redact_records
from rollbook.book.book import Book
from rollbook.book.consumer import MaxSize
from rollbook.book.errors import BookError, QuotaExceededError, ReadOnlyError
from rollbook.book.segments.files import Place
from rollbook.cli import main
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.wire import encode
from rollbook.io.arrow import from_table, to_table

MARKER = "this-text-must-not-stay"
ROOT = Path(__file__).parents[2]


def record(i: int, text: str = "", **fields: Any) -> Experience:
    return Experience(
        eid={"batch": 0, "task": i, "suffix": "r"},
        tokens=torch.arange(40, dtype=torch.int32) + i,
        prompt_length=8,
        response_text=text or f"answer {i} " + "x" * 100,
        **fields,
    )


def uid(i: int) -> str:
    return record(i).eid.uid


def spread(book: Book, records: Iterator[Experience] | list[Experience], size: int = 1) -> None:
    """Append records so that each append lies in a segment of its own."""
    listed = list(records)
    for start in range(0, len(listed), size):
        book.append(listed[start : start + size])
        book.store.seal()


def stored_bytes(book: Book) -> bytes:
    """All bytes in the store; of a folder, all bytes in it."""
    content = b"".join(bytes(book.store.get(Place(n, 64, s - 64))) for n, s in book.store.segments().items() if s > 64)
    if os.path.isdir(book.url):
        content += b"".join(path.read_bytes() for path in Path(book.url).rglob("*") if path.is_file())
    return content


def sound(book: Book, expected: dict[int, Experience]) -> None:
    """Every record is there as it was given, every count adds up, and the ledger points to what is there."""
    assert book.counts().adds_up
    assert len(book) == len({row[0] for row in _all(book, "SELECT uid FROM records")})
    segments = book.store.segments()
    used = {row[0] for table in ("records", "media") for row in _all(book, f"SELECT segment FROM {table}")} - {None}
    assert used <= set(segments)
    read = book.get([record.eid for record in expected.values()]) if expected else Experiences()
    assert read == Experiences(list(expected.values()))


def _all(book: Book, sql: str) -> list[Any]:
    with book.ledger.read() as tx:
        return list(tx.all(sql))


@contextmanager
def watched(callback: Callable[[], None]) -> Iterator[None]:
    """`callback` at every point of compactions in this thread that it does not bring about itself."""
    inside = threading.get_ident()
    busy = False

    def seen(name: str) -> None:
        nonlocal busy
        if name == "during compaction" and not busy and threading.get_ident() == inside:
            busy = True
            try:
                callback()
            finally:
                busy = False

    disk.watch_failpoints(seen)
    try:
        yield
    finally:
        disk.watch_failpoints(None)


# --- what goes and what stays -----------------------------------------------------------------------------------


def test_garbage_goes_and_the_rest_is_unharmed(url: str) -> None:
    with rollbook.open(url) as book:
        rows = {i: record(i, info={"n": i}) for i in range(60)}
        spread(book, list(rows.values()), size=20)
        book.delete([uid(i) for i in range(55) if i % 5], author="ana")
        deleted = {i for i in range(55) if i % 5}
        before = sum(book.store.segments().values())
        done = book.compact()
        assert (done.before, done.after) == (before, sum(book.store.segments().values()))
        assert done.after < before / 2 and (done.read, done.removed, done.records) == (3, 3, 16)
        sound(book, {i: row for i, row in rows.items() if i not in deleted})
        assert [e.kind for e in book.history(uid(1))] == ["admitted", "deleted", "dropped"]
        assert [kind for (kind,) in _all(book, "SELECT kind FROM events WHERE seq IS NULL")] == ["compacted"]
        again = book.compact()
        assert (again.read, again.removed, again.records) == (0, 0, 0)


def test_little_garbage_stays_where_it_is(url: str) -> None:
    with rollbook.open(url) as book:
        spread(book, [record(i) for i in range(10)], size=10)
        book.revise({uid(3): {"reward": 1.0}}, author="ana")
        assert book.compact().read == 0
        assert book.compact(garbage=0.05).records == 9


def test_many_small_segments_become_one(url: str) -> None:
    with rollbook.open(url) as book:
        rows = {i: record(i) for i in range(30)}
        spread(book, list(rows.values()))
        assert len(book.store.segments()) == 30
        done = book.compact()
        assert (done.read, done.written, done.records, len(book.store.segments())) == (30, 1, 30, 1)
        sound(book, rows)
        # All in one frame now, in the order of their numbers.
        assert len(_all(book, "SELECT DISTINCT start FROM records")) == 1
        assert [slot for (slot,) in _all(book, "SELECT slot FROM records ORDER BY seq")] == list(range(30))


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_small_segments_are_merged_beside_appends(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory:" if kind == "memory" else str(tmp_path / "book")
    monkeypatch.setattr(compaction, "AUTO_MERGE_INTERVAL", 4)
    monkeypatch.setattr(compaction, "AUTO_MERGE_SEGMENTS", 8)
    monkeypatch.setattr(compaction, "REPOINT_ROWS", 5)
    threads = []
    move = compaction._move_segments

    def moving(*arguments: Any) -> None:
        threads.append(threading.get_ident())
        move(*arguments)

    monkeypatch.setattr(compaction, "_move_segments", moving)
    with rollbook.open(url) as book:
        rows = {i: record(i) for i in range(40)}
        for row in rows.values():
            spread(book, [row])
            if book.state.compactor is not None:
                book.state.compactor.join()
        assert len(book.store.segments()) <= 8 + 4 + 2
        assert threads and threading.get_ident() not in threads
        sound(book, rows)
        assert _all(book, "SELECT key FROM meta WHERE key = 'tending'") == []


def test_closing_waits_for_a_merge_and_a_fork_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "AUTO_MERGE_INTERVAL", 1)
    begun, go_on = threading.Event(), threading.Event()

    def waiting(book: Book) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(compaction, "_auto_merge", waiting)
    with rollbook.open(tmp_path / "book") as book:
        book.append(record(0))
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            try:
                book.append(record(1))
                go_on.set()
                book.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        closing = threading.Thread(target=book.close)
        closing.start()
        assert book.state.compactor is not None and book.state.compactor.is_alive()
        go_on.set()
        closing.join(60)
        assert not book.state.compactor.is_alive()


def test_an_append_does_not_fail_for_a_merge(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "AUTO_MERGE_SEGMENTS", 8)
    with rollbook.open(url) as book:
        book.state.appends = count(1)
        spread(book, [record(i) for i in range(10)])
        put = book.store.put
        left = iter([] if book.store.transactional else [put])  # the append's own, if it puts

        def full(parts: Any) -> Any:
            try:
                return next(left)(parts)
            except StopIteration:
                raise OSError(errno.ENOSPC, "No space left on device") from None

        book.store.put = full  # type: ignore[method-assign]
        book.state.appends = count(compaction.AUTO_MERGE_INTERVAL)
        tend = compaction._auto_merge
        monkeypatch.setattr(compaction, "_auto_merge", lambda _: None)
        assert book.append(record(10)).admitted == 1
        with pytest.warns(RuntimeWarning, match="No space left"):
            tend(book)
        book.store.put = put  # type: ignore[method-assign]
        sound(book, {i: record(i) for i in range(11)})
        assert book.compact().records >= 10


def test_data_beside_the_database(postgres_url: str, tmp_path: Path) -> None:
    with rollbook.open(postgres_url, data=str(tmp_path / "objects")) as book:
        spread(book, [record(i, MARKER if i == 3 else "") for i in range(20)])
        assert len(list((tmp_path / "objects").iterdir())) == 20
        book.delete(uid(3), author="ana")
        done = book.compact()
        assert (done.removed, done.records) == (20, 19)
        [left] = (tmp_path / "objects").iterdir()
        assert MARKER.encode() not in left.read_bytes()
        sound(book, {i: record(i) for i in range(20) if i != 3})


def test_records_keep_their_types_when_frames_are_merged(url: str) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    with rollbook.open(url) as book:
        rows = {i: record(i, logprobs=torch.linspace(-1, 0, 32).to(kinds[i // 4])) for i in range(12)}
        spread(book, list(rows.values()))
        assert book.compact().records == 12
        assert len(_all(book, "SELECT DISTINCT start FROM records")) == 3
        for i, row in rows.items():
            logprobs = book[uid(i)].logprobs
            assert logprobs is not None and row.logprobs is not None
            assert logprobs.dtype == kinds[i // 4] and torch.equal(logprobs, row.logprobs)


def test_columns_of_another_version_do_not_stop_it() -> None:
    with rollbook.open("memory:") as book:
        for i in range(10):
            column = pa.array([i] if i < 5 else [str(i)])
            book.append(from_table(to_table(Experiences([record(i)])).append_column("of_tomorrow", column)))
            book.store.seal()
        assert book.compact().records == 10
        assert [to_table(book.get([uid(i)]))["of_tomorrow"].to_pylist() for i in (4, 5)] == [[4], ["5"]]


@given(st.lists(st.integers(0, 3 << 20), max_size=80))
def test_pieces_are_bounded_and_complete(sizes: list[int]) -> None:
    rows = [compaction._Row(i, "s", 64, 0, i, size) for i, size in enumerate(sizes)]
    pieces = list(compaction._split_rows(rows))
    assert [row for piece in pieces for row in piece] == rows
    assert all(len(piece) == 1 or sum(row.bytes for row in piece) <= compaction.FRAME_BYTES for piece in pieces)
    assert all(len(piece) <= compaction.FRAME_RECORDS for piece in pieces)


# --- bytes that must go -----------------------------------------------------------------------------------------


def test_deleted_bytes_are_on_no_disk(url: str) -> None:
    """Also those from before a revision, and those of an append that never was."""
    with rollbook.open(url) as book:
        secret = record(0, MARKER)
        book.append([secret, *(record(i) for i in range(1, 20))])
        book.store.seal()
        book.revise({uid(0): {"reward": 1.0}}, author="ana")
        book.store.seal()
        # A writer that died before its commit, and lived on before that.
        book.append([record(i) for i in range(20, 40)])
        book.store.put([encode(Experiences([secret]))])
        book.store.seal()
        book.delete(uid(0), author="ana", reason="asked for it")
        assert MARKER.encode() in stored_bytes(book)
        book.compact(grace=0.0)
        assert MARKER.encode() not in stored_bytes(book)
        sound(book, {i: record(i) for i in range(1, 40)})
        assert _all(book, "SELECT segment FROM purges") == []
        with pytest.raises(BookError, match="deleted"):
            book[uid(0)]


def test_redacted_bytes_are_on_no_disk(url: str) -> None:
    with rollbook.open(url) as book:
        book.append([record(0, MARKER), *(record(i) for i in range(1, 40))])
        redact_records(book, uid(0), ["response_text"], author="ana")
        assert MARKER.encode() in stored_bytes(book)
        book.compact()
        assert MARKER.encode() not in stored_bytes(book)
        sound(book, {i: record(i) for i in range(1, 40)})
        assert book[uid(0)].response_text is None
        assert torch.equal(book[uid(0)].tokens, record(0).tokens)


@pytest.mark.parametrize("ending", ["close", "append", "revise"])
@pytest.mark.parametrize("removal", ["delete", "redact"])
def test_bytes_in_another_writers_segment_go_when_it_ends(
    ending: str, removal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rollbook.open(tmp_path / "book") as book, rollbook.open(tmp_path / "book") as other:
        other.append([record(0, MARKER), record(1)])
        [segment] = book.store.segments()
        if removal == "delete":
            book.delete(uid(0), author="ana")
        else:
            redact_records(book, uid(0), ["response_text"], author="ana")
        done = book.compact()
        assert done.read == 0 and MARKER.encode() in stored_bytes(book)
        assert list(done.pending) == [segment] and "a writer has it open" in done.pending[segment]
        sound(book, {1: record(1)})
        assert [(finding.kind, finding.subject) for finding in book.check().findings] == [("pending", segment)]
        assert main(["compact", str(tmp_path / "book")]) == 1
        assert f"pending: {segment} has deleted" in capsys.readouterr().err
        if ending == "close":
            other.close()
        elif ending == "append":
            other.append(record(2))
        else:
            other.revise(uid(1), info={"late": 1}, author="ana")
        assert "the next compaction" in book.check().findings[0].description
        assert book.compact().pending == {}
        assert MARKER.encode() not in stored_bytes(book)
        assert book.check().findings == []
        sound(book, {2: record(2)} if ending == "append" else {})


# --- media ------------------------------------------------------------------------------------------------------


def test_media_stay_while_any_record_uses_them(url: str) -> None:
    image = torch.arange(4096, dtype=torch.int32)
    with rollbook.open(url) as book:
        rows = {i: record(i, multi_modal_inputs={"pixels": image}) for i in range(3)}
        spread(book, list(rows.values()))
        assert len(_all(book, "SELECT hash FROM media")) == 1
        book.delete([uid(0), uid(1)], author="ana")
        assert book.compact().media == 1
        sound(book, {2: rows[2]})
        assert image.numpy().tobytes() in stored_bytes(book)
        book.delete(uid(2), author="ana")
        book.compact()
        assert _all(book, "SELECT hash FROM media") == [] and image.numpy().tobytes() not in stored_bytes(book)
        # The same medium comes again.
        book.append(record(9, multi_modal_inputs={"pixels": image}))
        sound(book, {9: record(9, multi_modal_inputs={"pixels": image})})


# --- orphans ----------------------------------------------------------------------------------------------------


def test_what_nothing_points_to_goes_after_the_grace(url: str) -> None:
    now = [1e9]
    with rollbook.open(url, clock=lambda: now[0]) as book:
        book.append(record(0))
        book.store.seal()
        [orphan] = book.store.put([b"left by a crash"])
        book.store.seal()
        assert book.compact(grace=100.0).removed == 0
        now[0] += 99
        assert book.compact(grace=100.0).removed == 0 and book.store.has(orphan.segment)
        now[0] += 2
        assert book.compact(grace=100.0).removed == 1 and not book.store.has(orphan.segment)
        assert _all(book, "SELECT segment FROM orphans") == []
        sound(book, {0: record(0)})


@pytest.mark.parametrize("kind", ["folder", "memory"])  # PostgreSQL writes bytes and rows in one transaction
def test_an_append_whose_bytes_were_taken_puts_them_again(kind: str, tmp_path: Path) -> None:
    """Its segment is removed between its put and its commit, as if it had taken longer than the grace."""
    with rollbook.open("memory:" if kind == "memory" else tmp_path / "book") as book:
        put = book.store.put
        times: list[int] = []

        def slow(parts: Any) -> Any:
            places = put(parts)
            if not times:
                times.append(1)
                book.store.seal()
                assert book.compact(grace=0.0).removed + book.compact(grace=0.0).removed == 1
                assert not book.store.has(places[0].segment)
            return places

        book.store.put = slow  # type: ignore[method-assign]
        assert book.append(record(0)).admitted == 1 and times
        sound(book, {0: record(0)})


# --- records that lose their bytes ------------------------------------------------------------------------------


def stale(book: Book) -> None:
    """Ten records, the first five too old for the consumer "train"."""
    book.append([record(i, policy_versions=torch.full((32,), 0 if i < 5 else 9)) for i in range(10)])
    book.announce(9)


def test_stale_records_lose_their_bytes_and_stay_in_the_ledger(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        stale(book)
        counts = book.counts()
        done = book.compact(garbage=0.2)
        assert (done.purged, done.records) == (5, 5)
        assert book.counts() == counts and counts.dropped == {"stale": 5}
        assert [e.kind for e in book.history(uid(0))] == ["admitted", "dropped", "removed"]
        with pytest.raises(BookError, match="stale"):
            book[uid(0)]
        assert book.append(record(0, policy_versions=torch.full((32,), 0))).existing == 1
        assert book.compact().purged == 0


def test_stale_records_that_somebody_wants_keep_their_bytes(url: str) -> None:
    with rollbook.open(url, max_staleness=1) as book:
        book.consumer("other", create=True)
        stale(book)
        assert book.compact().purged == 0
    with rollbook.open("memory:", max_staleness=1, keep_stale=True) as book:
        stale(book)
        assert book.compact().purged == 0


def test_what_the_oldest_checkpoint_needs_keeps_its_bytes(url: str) -> None:
    with rollbook.open(url, removers=MaxSize(2)) as book:
        book.append([record(i) for i in range(4)])  # drops 0 and 1 before the checkpoint
        book.checkpoint("old")
        book.append([record(i) for i in range(4, 6)])  # drops 2 and 3 after it
        book.checkpoint("new")
        assert book.counts().dropped == {"max_size": 4}
        assert book.compact().purged == 2
        sound(book, {i: record(i) for i in range(2, 6)})
        forget_checkpoint(book, "old")
        assert book.compact().purged == 2
        sound(book, {i: record(i) for i in range(4, 6)})


def test_a_rewind_after_compaction_offers_what_was_dropped_since(url: str) -> None:
    with rollbook.open(url, removers=MaxSize(2)) as book:
        book.append([record(i) for i in range(4)])
        book.checkpoint("start")
        book.append([record(i) for i in range(4, 6)])
        book.compact(garbage=0.0)
        book.rewind("start", later="drop")
        book.compact(garbage=0.0)
        with book.lease(8) as lease:
            assert lease.experiences == Experiences([record(2), record(3)])


def test_trained_and_evaluation_records_keep_their_bytes(url: str) -> None:
    with rollbook.open(url) as book:
        book.append([record(i) for i in range(4)])
        book.append(record(9), evaluation=True)
        with book.lease(4) as lease:
            lease.ack()
        assert book.compact(garbage=0.0).purged == 0
        sound(book, {i: record(i) for i in (0, 1, 2, 3, 9)})


# --- quota ------------------------------------------------------------------------------------------------------


def test_a_quota_is_kept_by_removing_the_oldest_finished_records(url: str) -> None:
    quota = 60_000
    with rollbook.open(url, quota=quota) as book:
        book.append([record(1000)], evaluation=True)
        for i in range(0, 200, 10):
            book.append([record(j) for j in range(i, i + 10)])
            assert sum(book.store.segments().values()) <= quota
            with book.lease(10) as lease:
                lease.ack(step=i)
        remaining = [
            seq for (seq,) in _all(book, "SELECT seq FROM records WHERE segment IS NOT NULL AND seq > 1 ORDER BY seq")
        ]
        assert 10 <= len(remaining) < 190 and remaining == list(range(201 - len(remaining) + 1, 202))
        assert book.counts().trained == 200
        assert book.history(uid(0))[-1].kind == "removed" and book.history(uid(0))[-1].reason == "quota"
        sound(book, {i: record(i) for i in (1000, *range(200 - len(remaining), 200))})


def test_a_quota_never_takes_what_waits(url: str) -> None:
    with rollbook.open(url, quota=60_000) as book:
        waiting: dict[int, Experience] = {}
        with pytest.raises(QuotaExceededError, match=r"60000.*consumer 'train' is not done with \d+ records"):
            for i in range(0, 500, 10):
                book.append([record(j) for j in range(i, i + 10)])
                waiting |= {j: record(j) for j in range(i, i + 10)}
        assert len(waiting) > 50
        sound(book, waiting)
        with book.lease(10) as lease:
            lease.ack()
        # Too large for what is finished: nothing is taken for nothing.
        with pytest.raises(QuotaExceededError):
            book.append([record(j, "y" * 3000) for j in range(1000, 1010)])
        sound(book, waiting)
        assert book.append([record(900)]).admitted == 1
        sound(book, {i: row for i, row in {**waiting, 900: record(900)}.items() if i >= 10})


# --- meanwhile --------------------------------------------------------------------------------------------------


def test_readers_and_leases_go_on(url: str) -> None:
    with rollbook.open(url) as book:
        rows = {i: record(i) for i in range(40)}
        spread(book, list(rows.values()), size=4)
        lease = book.lease(20)
        views = book.get([row.eid for row in rows.values()])
        book.delete([uid(i) for i in range(20, 30)], author="ana")
        rest = {i: row for i, row in rows.items() if not 20 <= i < 30}
        looks = []

        def look() -> None:
            looks.append(book.get([row.eid for row in rest.values()]) == Experiences(list(rest.values())))

        with watched(look):
            assert book.compact(garbage=0.0).removed
        assert len(looks) > 3 and all(looks)
        assert lease.experiences == Experiences([rows[i] for i in range(20)])
        assert lease.ack() == 20
        assert views == Experiences(list(rows.values()))
        sound(book, rest)


def test_a_reader_that_looked_up_the_old_place_looks_again(url: str) -> None:
    with rollbook.open(url) as book:
        rows = {i: record(i) for i in range(20)}
        spread(book, list(rows.values()))
        get = book.store.get
        times: list[int] = []

        def late(place: Place) -> memoryview:
            if not times:
                times.append(1)
                assert book.compact().records == 20
            return get(place)

        book.store.get = late  # type: ignore[method-assign]
        assert book[uid(7)] == rows[7] and times
        sound(book, rows)


def test_writers_go_on(url: str) -> None:
    """Appends, revisions, deletions, leases at every step of a compaction."""
    with rollbook.open(url) as book:
        rows = {i: record(i) for i in range(40)}
        spread(book, list(rows.values()), size=2)
        numbers = count(100)
        turns = count()

        def act() -> None:
            i, turn = next(numbers), next(turns)
            book.append(record(i))
            rows[i] = record(i)
            book.revise({uid(turn): {"reward": float(turn)}}, author="ana")
            rows[turn] = rows[turn].replace(reward=float(turn))
            book.delete(uid(39 - turn), author="ana")
            del rows[39 - turn]
            with book.lease(1) as lease:
                lease.ack()

        with watched(act):
            for _ in range(2):
                book.compact(garbage=0.0, grace=0.0)
        assert next(turns) >= 6
        sound(book, rows)
        book.compact(garbage=0.0)
        sound(book, rows)


def test_two_compactors_at_once(durable_url: str) -> None:
    with rollbook.open(durable_url) as book, rollbook.open(durable_url) as other:
        rows = {i: record(i) for i in range(40)}
        spread(book, list(rows.values()), size=2)
        book.delete([uid(i) for i in range(0, 40, 4)], author="ana")
        rows = {i: row for i, row in rows.items() if i % 4}
        with watched(lambda: (other.compact(garbage=0.0), None)[1]):
            book.compact(garbage=0.0)
        sound(book, rows)
        sound(other, rows)
        book.store.seal()
        other.store.seal()
        book.compact(garbage=0.0, grace=0.0)
        book.compact(garbage=0.0, grace=0.0)
        sound(book, rows)
        assert _all(book, "SELECT segment FROM orphans") == [] == _all(book, "SELECT segment FROM purges")


def test_compactors_and_writers_in_threads(url: str) -> None:
    with rollbook.open(url, segment_bytes=20_000) as book:
        errors: list[BaseException] = []

        def run(act: Callable[[int], Any]) -> None:
            try:
                for i in range(12):
                    act(i)
            except BaseException as error:
                errors.append(error)

        acts = [
            lambda i: book.append([record(100 + 5 * i + j) for j in range(5)]),
            lambda i: book.append([record(200 + 5 * i + j) for j in range(5)]),
            lambda i: book.compact(garbage=0.1, grace=0.0),
            lambda i: [book.get([uid(number) for number in range(100, 105)]) for _ in range(3)] if i > 1 else None,
        ]
        book.append([record(100 + j) for j in range(5)])
        threads = [threading.Thread(target=run, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads)
        sound(book, {i: record(i) for base in (100, 200) for i in range(base, base + 60)})


def killed_at(url: str, at: int) -> None:
    """A compaction, with something to do, that ends with the process at its `at`-th point; the one before it has
    harmed nothing."""
    left = count(1)
    points = ("during compaction", "before commit")
    book = rollbook.open(url)
    sound(book, {i: record(i) for i in range(4 * at) if i % 4})
    spread(book, [record(i) for i in range(4 * at, 4 * at + 4)], size=4)
    book.delete(uid(4 * at), author="ana")
    disk.watch_failpoints(lambda name: os._exit(9) if name in points and next(left) == at else None)
    book.compact(garbage=0.0, small=1 << 20, grace=0.0)


def forked(act: Callable[[], None]) -> int:
    """How a child ended that did this."""
    if (child := os.fork()) == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_everywhere(url: str) -> None:
    """Kill compactors, each at a later point than the one before, until one comes through."""
    with rollbook.open("memory:") as book:  # loads what is loaded late, once for all children
        book.append([record(i) for i in range(40)])
        book.delete([uid(i) for i in range(0, 40, 4)], author="ana")
        book.compact()
        sound(book, {i: record(i) for i in range(40) if i % 4})
    for at in count(1):
        ended = forked(partial(killed_at, url, at))
        if ended == 0:
            print("killed", at - 1)
            return
        assert ended == 9


def test_a_killed_compactor_loses_nothing(durable_url: str) -> None:
    with rollbook.open(durable_url) as book:
        book.append([record(0, MARKER), *(record(i) for i in range(1, 4))])
        book.delete(uid(0), author="ana")
    # In a process that has no threads, which forking would leave behind.
    code = f"from tests.book.test_compaction import killed_everywhere; killed_everywhere({durable_url!r})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    kills = int(ran.stdout.split()[1])
    assert kills >= 10
    with rollbook.open(durable_url) as book:
        sound(book, {i: record(i) for i in range(4 * kills + 8) if i % 4})
        book.compact(garbage=0.0, grace=0.0)
        book.compact(garbage=0.0, grace=0.0)
        assert MARKER.encode() not in stored_bytes(book)
        assert _all(book, "SELECT segment FROM orphans") == [] == _all(book, "SELECT segment FROM purges")
        used = {row[0] for row in _all(book, "SELECT segment FROM records WHERE segment IS NOT NULL")}
        assert used == set(book.store.segments())


# --- damage and refusals ----------------------------------------------------------------------------------------


def test_what_is_damaged_is_reported_and_left(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append([record(i) for i in range(5)])
        book.append([record(i) for i in range(5, 10)])
        book.store.seal()
        spread(book, [record(i) for i in range(10, 20)], size=10)
        book.revise({uid(i): {"reward": 0.5} for i in (0, 5, 10, 11)}, author="ana")
        [(segment, start, size)] = _all(book, f"SELECT segment, start, size FROM records WHERE uid = '{uid(6)}'")
        path = folder / "segments" / segment
        data = bytearray(path.read_bytes())
        data[start + size // 2] ^= 1
        path.write_bytes(data)
        done = book.compact(garbage=0.1)
        assert list(done.damaged) == [segment] and "checksum" in done.damaged[segment]
        assert path.read_bytes() == data
        fields = {i: record(i, reward=0.5 if i in (0, 10, 11) else None) for i in (*range(5), *range(10, 20))}
        sound(book, fields)
        # What the damaged frame holds is still where it was, for a repair.
        assert _all(book, f"SELECT COUNT(*) FROM records WHERE segment = '{segment}'") == [(4,)]
        book.delete([uid(i) for i in range(6, 10)], author="ana")
        assert book.compact().damaged == {} and not path.exists()


def test_a_book_for_reading_is_not_compacted(tmp_path: Path) -> None:
    rollbook.open(tmp_path / "book").close()
    with rollbook.open(tmp_path / "book", "r") as book, pytest.raises(ReadOnlyError, match="compact"):
        book.compact()


@pytest.mark.parametrize("options", [{"garbage": 1.5}, {"small": -1}, {"grace": -1.0}, {"garbage": "half"}])
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with rollbook.open("memory:") as book, pytest.raises(ValueError, match=next(iter(options))):
        book.compact(**options)
