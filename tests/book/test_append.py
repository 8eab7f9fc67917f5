"""Appending: durable, whole, idempotent; what is added late is a revision, and what differs is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

import rollbook
from rollbook import EID, Experience, Experiences
from rollbook.book import (
    AppendResult,
    Book,
    BookError,
    ConflictError,
    CorruptBookError,
    LockTimeoutError,
    MaxSize,
    Uniform,
)
from rollbook.book import append as group_commit
from rollbook.book.append import AppendTransaction
from rollbook.book.segments.fsspec import FsspecSegmentStore
from rollbook.core.experiences import from_rows
from tests.book.records import check, group, ledger, record, records, take
from tests.strategies import exact, exact_rows, full_record, record_lists


def test_what_append_returned_for_is_there_after_opening_again(durable_url: str) -> None:
    rows = records(3, reward=0.5)
    with rollbook.open(durable_url) as book:
        assert book.append(rows) == AppendResult(admitted=3)
    with rollbook.open(durable_url) as book:
        assert len(book) == 3
        assert exact_rows(book.get([row.eid.uid for row in rows])) == exact_rows(rows)
        assert book.append(rows) == AppendResult(existing=3)
        check(book)


def test_one_several_columns_and_a_generator_are_taken(url: str) -> None:
    with rollbook.open(url) as book:
        assert book.append(record(suffix="one")).admitted == 1
        assert book.append(records(2)).admitted == 2
        assert book.append(Experiences(records(2, start=2))).admitted == 2
        assert book.append(row for row in records(2, start=4)).admitted == 2
        assert book.append([]) == AppendResult()
        assert book.append(Experiences()) == AppendResult()
        assert len(book) == 7 and len(book.where().uids()) == 7
        assert [event.kind for event in book.history("//0/0/one")] == ["admitted"]


@pytest.mark.parametrize("bad", ["text", b"bytes", {"tokens": [1]}, 3, None])
def test_what_is_no_record_is_refused(bad: Any) -> None:
    book = rollbook.open("memory:")
    with pytest.raises(ValueError, match=f"append: got {type(bad).__name__}, expected an Experience"):
        book.append(bad)
    with pytest.raises((TypeError, ValueError), match="Experience"):
        book.append([record(suffix="a"), "b"])  # type: ignore[list-item]
    assert len(book) == 0


def test_the_same_record_again_changes_nothing(url: str) -> None:
    with rollbook.open(url) as book:
        rows = records(3, reward=1.0)
        book.append(rows)
        before = ledger(book)
        assert book.append(rows) == AppendResult(existing=3)
        assert book.append(rows[1]) == AppendResult(existing=1)
        assert ledger(book) == before
        take(book, 2)
        before = ledger(book)
        assert book.append(rows) == AppendResult(existing=3)
        assert ledger(book) == before


def test_the_same_record_is_known_after_revisions_of_every_kind(url: str) -> None:
    with rollbook.open(url) as book:
        first = record(suffix="a", info={"i": 1})
        book.append(first)
        scored = first.replace(reward=0.5)
        assert book.append(scored) == AppendResult(revised=1)
        advanced = scored.replace(advantages=torch.ones(3))
        assert book.append(advanced) == AppendResult(revised=1)
        book.revise(first, reward=0.75, author="ana")
        before = ledger(book)
        # As it was admitted, and as it was after each addition.
        for version in (first, scored, advanced):
            assert book.append(version) == AppendResult(existing=1)
        assert ledger(book) == before
        assert book["//0/0/a"].reward == 0.75


def test_late_fields_are_revisions(url: str) -> None:
    with rollbook.open(url) as book:
        first = record(suffix="a", info={"i": 1})
        book.append([first, record(suffix="b")])
        more = first.replace(
            reward=0.25, advantages=torch.tensor([1.0, 2.0, 3.0]), returns=torch.zeros(3), info={"i": 1, "judge": "x"}
        )
        assert book.append([more, record(suffix="c"), record(suffix="b")], author="scorer") == AppendResult(
            admitted=1, existing=1, revised=1
        )
        assert exact(book["//0/0/a"]) == exact(more)
        event = book.history("//0/0/a")[-1]
        assert (event.kind, event.detail["author"], event.detail["is"]["reward"]) == ("revised", "scorer", 0.25)
        assert {"reward", "advantages", "returns"} <= {name.partition(".")[0] for name in event.detail["fields"]}
        assert book.where(("reward", "=", 0.25)).uids() == ["//0/0/a"]
        check(book)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", torch.tensor([1, 2, 3, 4, 6])),
        ("reward", 0.75),
        ("logprobs", torch.zeros(3)),
        ("response_text", "other"),
        ("info", {"i": 2}),
        ("advantages", torch.zeros(3)),
    ],
)
def test_a_different_record_under_the_same_id_names_the_field(name: str, value: Any) -> None:
    book = rollbook.open("memory:")
    first = record(
        suffix="a", reward=0.5, response_text="text", info={"i": 1}, advantages=torch.ones(3), logprobs=torch.ones(3)
    )
    book.append(first)
    before = ledger(book)
    with pytest.raises(ConflictError, match=rf"//0/0/a.*{name}"):
        book.append([record(suffix="new"), first.replace(**{name: value})])
    assert ledger(book) == before
    assert "//0/0/new" not in book


def test_a_conflict_writes_nothing(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(record(suffix="a", reward=0.5))
        before = ledger(book)
        with pytest.raises(ConflictError, match="reward"):
            book.append([record(suffix="b"), record(suffix="a", reward=0.75), record(suffix="c")])
        assert ledger(book) == before


def test_duplicates_within_one_call(url: str) -> None:
    with rollbook.open(url) as book:
        row = record(suffix="a")
        assert book.append([row, row, record(suffix="b"), row]) == AppendResult(admitted=2, existing=2)
        assert len(book) == 2
        with pytest.raises(ConflictError, match=r"records 1 and 2 .* '//0/0/c'"):
            book.append([record(suffix="d"), record(suffix="c"), record(suffix="c", reward=1.0)])
        assert "//0/0/d" not in book


def test_a_bad_record_in_the_middle_writes_nothing(url: str) -> None:
    with rollbook.open(url) as book:
        with pytest.raises(ValueError, match="NUL"):
            book.append([record(suffix="a"), record(suffix="b\0")])
        assert len(book) == 0 and "//0/0/a" not in book


def test_evaluation_records_are_kept_beside_and_never_leased(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2), evaluation=True)
        book.append(records(1, start=2))
        assert len(book) == 3
        assert (book.counts().admitted, book.counts().evaluation) == (1, 2)
        assert len(book.lease(10)) == 1
        book.consumer("later", create=True)
        assert book.counts("later").waiting == 1
        assert book.where(evaluation=True).count() == 2
        assert book["//0/0/0000"].info == {"i": 0}
        book.fail(EID(task="t"), "timeout")
        assert len(list(book)) == 3 and len(book) == 4  # A failed run is counted, and is no record to read.
        with pytest.raises(ValueError, match="eid: got str '0/t/0'.*EID.parse"):
            book.fail("0/t/0", "timeout")  # type: ignore[arg-type]
        assert book.history("//0/0/0000")[0].detail == {"evaluation": True}
        with pytest.raises(ConflictError, match="for training, it is there for evaluation"):
            book.append(records(1))
        with pytest.raises(ConflictError, match="for evaluation, it is there for training"):
            book.append(records(1, start=2), evaluation=True)
        # Neither a revision nor a group of its task makes one a record to train on.
        book.revise("//0/0/0000", reward=1.0, author="ana", retrain=True)
        assert not book.lease(10)
        check(book)


def test_evaluation_runs_do_not_complete_a_group_of_training(url: str) -> None:
    with rollbook.open(url) as book:
        first, second = group(1, 2, size=2)
        book.append(first)
        book.append(second, evaluation=True)
        assert not book.lease(1, by="group")


def test_media_are_stored_once(url: str) -> None:
    pixels = torch.arange(4096, dtype=torch.float32)
    with rollbook.open(url) as book:
        book.append([record(suffix=f"{i}", multi_modal_inputs={"pixel_values": pixels}) for i in range(4)])
        book.append(record(suffix="4", multi_modal_inputs={"pixel_values": pixels.clone()}))
        media = book.sql("select size, uses from media").rows()
        assert len(media) == 1 and media[0][1] == 5
        assert media[0][0] >= pixels.nbytes
        assert sum(book.store.segments().values()) < 2 * pixels.nbytes
        for i in range(5):
            inputs = book[f"//0/0/{i}"].multi_modal_inputs
            assert inputs is not None and torch.equal(inputs["pixel_values"], pixels)
        book.delete([f"//0/0/{i}" for i in range(4)], author="ana")
        assert book.sql("select uses from media").rows() == [(1,)]
        assert torch.equal(book["//0/0/4"].multi_modal_inputs["pixel_values"], pixels)  # type: ignore[index]


@settings(max_examples=25)
@given(rows=record_lists(max_size=4))
def test_any_record_comes_back_exactly(rows: list[Experience]) -> None:
    by_uid: dict[str, Experience] = {}
    for row in rows:
        if "\0" not in row.eid.uid:
            by_uid.setdefault(row.eid.uid, row)
    with rollbook.open("memory:") as book:
        book.append(list(by_uid.values()))
        assert exact_rows(book.get(list(by_uid))) == exact_rows(by_uid.values())
        assert book.append(list(by_uid.values())) == AppendResult(existing=len(by_uid))
        check(book)


def odd_records() -> list[Experience]:
    plain = full_record("single_turn", 1)
    return [
        plain,
        full_record("multi_turn", 2),
        full_record("dpo", 3),
        record(
            suffix="bf16",
            logprobs=torch.tensor([0.5, float("nan"), -0.0], dtype=torch.bfloat16),
            reward=float("nan"),
            finish_reason="a\0b\ud800",
            info={"array": np.float32(0.1), "text": "\0\ud800", 3: (1, 2), "big": 2**70},
        ),
        record("漢/字", 1, suffix="%", reward=float("-inf"), response_text="\ud83d\ude00"),
        record(suffix="reward", reward=float("inf"), token_level_reward=torch.zeros(3, dtype=torch.float64)),
        Experience(eid=EID(suffix="short"), tokens=[1, 2]),
    ]


def test_odd_records_come_back_exactly_from_every_kind_of_book(url: str) -> None:
    rows = odd_records()
    with rollbook.open(url) as book:
        book.append(rows)
        assert exact_rows(book.get([row.eid.uid for row in rows])) == exact_rows(rows)
        assert exact(book[rows[2].eid]) == exact(rows[2])
        assert exact_rows(book.lease(len(rows)).experiences) == exact_rows(rows)
        assert book.append(rows) == AppendResult(existing=len(rows))


def test_columns_of_a_newer_version_survive(url: str) -> None:
    experiences = from_rows(records(2))
    experiences = Experiences.from_encoded({**experiences.columns, "from_the_future": pa.array([1, None])}, 2)
    assert experiences[0].unknown
    with rollbook.open(url) as book:
        book.append(experiences)
        book.append(records(1, start=2))
        read = book.get(["//0/0/0001", "//0/0/0000", "//0/0/0002"])
        assert exact_rows(read)[:2] == [exact(experiences[1]), exact(experiences[0])]
        assert book.append(read) == AppendResult(existing=3)


def test_records_stay_as_they_were_when_the_callers_change(url: str) -> None:
    with rollbook.open(url) as book:
        row = record(suffix="a", advantages=torch.ones(3))
        book.append(row)
        row.advantages.zero_()  # type: ignore[union-attr]
        read = book["//0/0/a"]
        assert read.advantages is not None and read.advantages.tolist() == [1, 1, 1]
        read.advantages.zero_()
        assert book["//0/0/a"].advantages.tolist() == [1, 1, 1]  # type: ignore[union-attr]


def test_two_threads_that_append_the_same_admit_it_once(url: str) -> None:
    with rollbook.open(url) as book:
        results: list[AppendResult] = []
        threads = [threading.Thread(target=lambda: results.append(book.append(records(8)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(appended.admitted for appended in results) == 8
        assert sum(appended.existing for appended in results) == 24
        assert len(book) == 8
        check(book)


class HeldWriter:
    """Appends of threads beside one that is in the middle of writing to a folder's book."""

    def __init__(self, book: Book, monkeypatch: pytest.MonkeyPatch, fail: BaseException | None = None) -> None:
        self.book = book
        self.errors: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []
        self.writing, self.release = threading.Event(), threading.Event()
        put = book.store.put

        def held_put(parts: Any) -> Any:
            monkeypatch.setattr(book.store, "put", put)
            self.writing.set()
            assert self.release.wait(30)
            if fail is not None:
                raise fail
            return put(parts)

        monkeypatch.setattr(book.store, "put", held_put)

    def append(self, number: int, **options: Any) -> None:
        """Start to append record `number` in a thread, and wait until it is in the queue."""

        def run() -> None:
            try:
                self.book.append(records(1, start=number), **options)
            except BaseException as error:
                self.errors[number] = error

        thread = threading.Thread(target=run)
        waiting = len(self.book.state.group_commit._waiting)
        thread.start()
        self.threads.append(thread)
        if len(self.threads) == 1:
            assert self.writing.wait(30)
            return
        end = time.monotonic() + 30
        while len(self.book.state.group_commit._waiting) == waiting and thread.is_alive():
            assert time.monotonic() < end
            time.sleep(0.001)

    def finish(self) -> None:
        self.release.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def test_an_interrupted_writer_loses_no_append_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollbook.open(tmp_path / "book") as book:
        writer = HeldWriter(book, monkeypatch)
        for number in range(4):
            writer.append(number)
        commit = group_commit._commit

        def interrupted(*args: Any) -> None:
            monkeypatch.setattr(group_commit, "_commit", commit)
            raise KeyboardInterrupt

        monkeypatch.setattr(group_commit, "_commit", interrupted)  # for the thread that writes 1, 2 and 3
        writer.finish()
        assert [type(error) for error in writer.errors.values()] == [KeyboardInterrupt]
        assert len(book) == 3
        book.append(records(1, start=9))
        assert len(book) == 4
        check(book)


def test_an_append_waits_for_other_threads_no_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollbook.open(tmp_path / "book") as book:
        writer = HeldWriter(book, monkeypatch)
        writer.append(0)
        writer.append(1, timeout=0.05)
        writer.threads[1].join(30)
        assert isinstance(writer.errors.pop(1), LockTimeoutError)
        writer.append(2)
        writer.finish()
        assert not writer.errors
        assert sorted(row.info["i"] for row in book) == [0, 2]
        check(book)


def test_an_append_that_fails_does_not_fail_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rollbook.open(tmp_path / "book") as book:
        writer = HeldWriter(book, monkeypatch, OSError("disk full"))
        for number in range(4):
            writer.append(number)
        admits = AppendTransaction.commit

        def faulty(self: AppendTransaction, tx: Any) -> Any:
            if self.pending.select([0])[0].info["i"] == 2:
                raise OSError("bad append")
            return admits(self, tx)

        monkeypatch.setattr(AppendTransaction, "commit", faulty)
        writer.finish()
        assert {number: str(error) for number, error in writer.errors.items()} == {0: "disk full", 2: "bad append"}
        assert sorted(row.info["i"] for row in book) == [1, 3]
        check(book)


def test_append_in_a_thread(url: str) -> None:
    with rollbook.open(url) as book:
        assert asyncio.run(asyncio.to_thread(book.append, records(2), evaluation=True)) == AppendResult(admitted=2)
        assert book.counts().evaluation == 2


def test_tombstones_are_runs_without_a_record(url: str) -> None:
    with rollbook.open(url) as book:
        lost = record(1, 0, suffix="x")
        assert book.fail(lost.eid, "crashed") == 1
        assert book.fail([lost.eid], "crashed") == 0
        assert book.counts().dropped == {"crashed": 1}
        with pytest.raises(BookError, match="data was removed .crashed"):
            book.get(lost)
        with pytest.raises(ValueError, match="reason"):
            book.fail(lost.eid, "")
        for word in ("deleted", "rewound"):  # What the ledger itself says of records.
            with pytest.raises(ValueError, match=f"reason: got '{word}'"):
                book.fail(EID(suffix="y"), word)
        check(book)


def test_the_largest_size_drops_as_records_come(url: str) -> None:
    with rollbook.open(url, removers=[MaxSize(3)]) as book:
        book.append(records(5))
        assert book.counts().dropped == {"max_size": 2}
        assert [row.info["i"] for row in book.lease(5)] == [2, 3, 4]
        check(book)


def test_appending_to_a_closed_book(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    book.close()
    with pytest.raises(BookError, match="closed"):
        book.append(records(1))


# --- reading a few of many --------------------------------------------------------------------------------------------


class Counted:
    """A store that counts the bytes it is asked for, and how often."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.bytes = self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, place: Any) -> Any:
        self.bytes, self.requests = self.bytes + place.length, self.requests + 1
        return self.store.get(place)

    def get_many(self, places: Any) -> Any:
        self.bytes, self.requests = self.bytes + sum(place.length for place in places), self.requests + 1
        return self.store.get_many(places)


def long_records(count: int) -> list[Experience]:
    """Records of a few kB, unlike in length."""
    return [
        Experience(
            eid=EID(batch=0, task=i, suffix="s"),
            tokens=torch.arange(300 + i % 50, dtype=torch.int32) + 1000 * i,
            prompt_length=20,
            logprobs=torch.linspace(-1, 0, 280 + i % 50),
            advantages=torch.full((280 + i % 50,), i / 7) if i % 3 else None,
            reward=i / 5 if i % 2 else None,
            info={"i": i},
            response_text=f"answer {i}, " * (i % 40),
        )
        for i in range(count)
    ]


def test_a_few_records_are_read_without_the_rest_of_their_frames(url: str) -> None:
    with rollbook.open(url) as book:
        check_partial_reads(book)


def test_a_few_records_are_read_without_the_rest_of_their_objects(tmp_path: Path) -> None:
    with rollbook.open("memory:") as book:
        book.store = FsspecSegmentStore(f"memory://{tmp_path.name}")
        check_partial_reads(book)


def check_partial_reads(book: Book) -> None:
    rows = long_records(192)
    uids = [row.eid.uid for row in rows]
    store: Any = Counted(book.store)
    book.store = store
    book.append(rows[:64])
    book.append(rows[64:])
    with book.ledger.read() as tx:
        share = float(tx.first("SELECT AVG(bytes) FROM records")[0])

    def read_bytes(count: int) -> float:
        """What was read since the last time: times the size of so many records, without frame headers."""
        factor = (store.bytes - 2 * 4096) / (share * count)
        assert store.requests == 3  # the headers, the offsets, the values, of both frames at once
        store.bytes = store.requests = 0
        return factor

    for chosen in ([7], [100, 3, 77, 150]):
        assert exact_rows(book.get([uids[i] for i in chosen])) == exact_rows([rows[i] for i in chosen])
        assert read_bytes(len(chosen)) <= 3
    book.consumer("some", create=True, sampler=Uniform())
    lease = book.lease(4, consumer="some")
    assert exact_rows(lease.experiences) == exact_rows([rows[row.info["i"]] for row in lease.experiences])
    assert read_bytes(4) <= 3
    # The digest of a revised record is that of the revision.
    book.revise({uid: {"reward": 3.0} for uid in uids[64:]}, author="a")
    store.bytes = store.requests = 0
    assert exact(book[uids[90]]) == exact(rows[90].replace(reward=3.0))
    assert read_bytes(1) <= 3
    assert exact_rows(book.get(uids[:64])) == exact_rows(rows[:64]) and store.requests == 1


def test_a_flipped_bit_is_seen_by_whoever_reads_the_record() -> None:
    rows = long_records(64)
    with rollbook.open("memory:") as book:
        book.append(rows)
        [memory] = book.store._segments.values()  # type: ignore[attr-defined]
        values = {
            "tokens": rows[9].tokens.numpy().tobytes(),
            "response_text": rows[9].response_text.encode(),
            "info": b'{"i":9}',
            "reward": np.float64(rows[9].reward).tobytes(),
        }
        for data in values.values():
            at = memory.index(data) + len(data) // 2
            memory[at] ^= 1
            with pytest.raises(CorruptBookError, match="does not match its checksum"):
                book[rows[9].eid.uid]
            assert exact(book[rows[8].eid.uid]) == exact(rows[8])
            memory[at] ^= 1
        assert exact(book[rows[9].eid.uid]) == exact(rows[9])
