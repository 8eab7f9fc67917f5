"""Power loss: a book on a disk that forgets what was not synced, and the order of syncs and commits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book.book import Book
from rollbook.book.disk import Disk, File, watch_failpoints
from rollbook.book.ledger import SQLiteLedger
from tests.book.forgetful import ForgetfulDisk, open_on
from tests.book.trials.crash import CONSUMERS, Worker
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, make_records
from tests.book.trials.verify import check


class PowerLoss(BaseException):
    """The machine is off: nothing that catches errors may go on."""


class Doomed(ForgetfulDisk):
    """Loses power before its n-th operation, or in the n-th window that is reached."""

    def __init__(self, attic: Path, seed: int, after: int) -> None:
        super().__init__(attic, seed)
        self.left = after

    def step(self, _: str = "") -> None:
        if self.off:
            raise PowerLoss
        self.left -= 1
        if self.left <= 0:
            self.power_loss()
            raise PowerLoss

    def create(self, path: str) -> File:
        self.step()
        return super().create(path)

    def append(self, file: File, pieces: Sequence[bytes | memoryview]) -> int:
        self.step()
        return super().append(file, pieces)

    def sync(self, file: File) -> None:
        self.step()
        super().sync(file)

    def sync_folder(self, path: str) -> None:
        self.step()
        super().sync_folder(path)

    def unlink(self, path: str) -> None:
        self.step()
        super().unlink(path)


class Lying(Doomed):
    """Says that it has synced a file, and has not."""

    def sync(self, file: File) -> None:
        self.step()


@pytest.fixture(autouse=True)
def unwatched() -> Any:
    yield
    watch_failpoints(None)


def suffer(folder: Path, losses: int, seed: int, disk: type[Doomed] = Doomed) -> tuple[list[str], Log, int]:
    """Work on a book whose power fails again and again; what is wrong with it, what was said, how often it failed."""
    chance = random.Random(seed)
    log = Log()
    wrong: list[str] = []
    url = str(folder / "book")
    failed = 0
    for life in range(losses):
        power = disk(folder / "attic", chance.randrange(1 << 30), chance.randint(1, 60))
        worker = Worker(url, log.feed, f"w{life}", chance.randrange(1 << 30))
        watch_failpoints(power.step)
        book: Book | None = None
        try:
            book = open_on(power, url, segment_bytes=20_000)
            for name in CONSUMERS:
                book.consumer(name, create=True)
            for piece in log.unsettled():
                worker.put(book, piece)
            while True:
                act = chance.choice([worker.append] * 3 + [worker.take, worker.revise, worker.compact])
                act(book)
        except PowerLoss:
            failed += 1
        finally:
            watch_failpoints(None)
            if book is not None:
                book.close()
        wrong += check(url, log)
        if wrong:
            break
    return wrong, log, failed


@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_outlives_every_power_loss(tmp_path: Path, seed: int) -> None:
    wrong, log, failed = suffer(tmp_path, 8, seed)
    assert wrong == []
    assert failed == 8
    assert log.appended


def test_a_disk_that_lies_is_found_out(tmp_path: Path) -> None:
    """The test above can fail: without syncs, records that the ledger speaks of are lost."""
    wrong = []
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        wrong += suffer(tmp_path / str(seed), 3, seed, Lying)[0]
    assert any("cannot be read" in text for text in wrong)


class Noting(Disk):
    """Writes down what is done."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def append(self, file: File, pieces: Sequence[bytes | memoryview]) -> int:
        self.events.append("append")
        return super().append(file, pieces)

    def sync(self, file: File) -> None:
        self.events.append("sync")
        super().sync(file)

    def sync_folder(self, path: str) -> None:
        self.events.append("sync folder")
        super().sync_folder(path)

    def unlink(self, path: str) -> None:
        self.events.append("unlink")
        super().unlink(path)


def test_bytes_are_synced_before_the_ledger_commits(tmp_path: Path) -> None:
    events: list[str] = []
    with open_on(Noting(events), tmp_path / "book") as book:
        events.clear()
        watch_failpoints(events.append)
        book.append(make_records(Piece("a", 1, 2)))
        # The folder's sync, of the file's new name, and that of the folder above, where the first is new.
        first = [word for word in events if word != "sync folder"]
        assert first == ["append", "after write", "sync", "after sync", "before commit", "after commit"]
        assert events.index("sync folder") < events.index("before commit")
        assert events.count("sync folder") >= 2
        events.clear()
        book.append(make_records(Piece("a", 2, 2)))
        assert events == ["append", "after write", "sync", "after sync", "before commit", "after commit"]
        events.clear()
        book.revise(Piece("a", 1, 2).uids[0], reward=9.0, author="ana")
        assert events == ["append", "after write", "sync", "after sync", "before commit", "after commit"]


def test_compaction_syncs_the_copy_commits_and_only_then_removes(tmp_path: Path) -> None:
    events: list[str] = []
    with open_on(Noting(events), tmp_path / "book") as book:
        for task in range(4):
            book.append(make_records(Piece("a", task, 2)))
        book.delete(Piece("a", 1, 2).uids, author="ana")
        watch_failpoints(events.append)
        events.clear()
        assert book.compact(grace=0.0).removed == 1
        copying = events[events.index("append") :]
        order = [copying.index(word) for word in ("append", "sync", "after sync", "after commit", "unlink")]
        assert order == sorted(order), copying


def test_the_ledger_is_synced_at_every_commit(tmp_path: Path) -> None:
    def pragmas(book: Book) -> dict[str, Any]:
        assert isinstance(book.ledger, SQLiteLedger)
        names = ("journal_mode", "synchronous", "fullfsync", "mmap_size")
        with book.ledger.read() as tx:
            return {name: tx.first(f"PRAGMA {name}")[0] for name in names}

    with rollbook.open(tmp_path / "book") as book:
        assert pragmas(book)["journal_mode"] == "wal"
        assert pragmas(book)["synchronous"] == 2  # FULL
        book.append(make_records(Piece("a", 1, 1)))
    with rollbook.open(tmp_path / "book") as book:
        assert (pragmas(book)["journal_mode"], pragmas(book)["synchronous"]) == ("wal", 2)


@pytest.mark.parametrize("window", ["after write", "after sync", "before commit", "after commit"])
def test_an_append_is_there_as_a_whole_or_not_at_all(tmp_path: Path, window: str) -> None:
    url = str(tmp_path / "book")
    log = Log()
    power = ForgetfulDisk(tmp_path / "attic")

    def strike(name: str) -> None:
        if name == window:
            power.power_loss()
            raise PowerLoss

    with open_on(power, url) as book:
        book.append(make_records(Piece("a", 1, 4)))
        log.feed("try append a/1/4")
        log.feed("did append a/1/4")
        log.feed("try append a/2/8")
        watch_failpoints(strike)
        with pytest.raises(PowerLoss):
            book.append(make_records(Piece("a", 2, 8)))
        watch_failpoints(None)
    assert check(url, log) == []
    with rollbook.open(url) as book:
        assert len(book) == (12 if window == "after commit" else 4)
        again = book.append(make_records(Piece("a", 2, 8)))
        assert (again.existing, again.admitted) == ((8, 0) if window == "after commit" else (0, 8))
    log.feed("did append a/2/8")
    assert check(url, log) == []
