"""Short versions of the trials that `python -m tests.book.trials` runs, and that what they check can fail."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbook
from rollbook.book.book import Book
from tests.book.postgres import Server
from tests.book.trials import __main__ as command
from tests.book.trials import crash, server
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, made
from tests.book.trials.verify import check

ROOT = Path(__file__).parents[2]


def run(*words: str) -> str:
    """A trial in a process of its own: it forks, which this one, with the threads of other tests, should not."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.book.trials", *words], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_processes_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    said = run("crash", "--kills", "25")
    assert "25 kills" in said
    for window in crash.WINDOWS:
        assert window in said


def test_killed_processes_lose_nothing_in_postgresql(postgres_url: str) -> None:
    assert "8 kills" in run("crash", "--kills", "8", "--url", postgres_url)


def test_every_record_is_acknowledged_once_by_each_of_two_groups() -> None:
    assert "0 violations" in run("concurrency", "--pieces", "8")


def test_every_record_is_acknowledged_once_in_postgresql(postgres_url: str) -> None:
    assert "0 violations" in run("concurrency", "--pieces", "6", "--url", postgres_url)


def test_many_may_make_one_book_at_once() -> None:
    assert "in 8 books, 8 checks" in run("opening", "--rounds", "8")


def test_a_server_that_dies_loses_nothing_that_was_acknowledged(crashing_postgres: Server) -> None:
    report = server.trial(crashing_postgres, 3)
    assert report.violations == [], report
    assert report.records


def test_a_server_that_restarts_between_two_calls_is_not_noticed(crashing_postgres: Server) -> None:
    url = crashing_postgres.database()
    with rollbook.open(url) as book:
        book.append(made(Piece("a", 1, 2)))
        lease = book.lease(2)
        crashing_postgres.kill()
        crashing_postgres.restart()
        assert lease.ack() == 2
        crashing_postgres.restart()
        assert book.append(made(Piece("a", 2, 2))).admitted == 2
        assert (book.counts().trained, book.counts().waiting) == (2, 2)
    crashing_postgres.drop(url)


# --- what the trials check can fail -----------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path) -> tuple[str, Log]:
    """A sound book of every kind of event, and what was said of it."""
    url = str(tmp_path / "book")
    log = Log()
    worker = crash.Worker(url, log.feed, "w", 7)
    with worker.opened() as book:
        for task in range(1, 6):
            worker.put(book, Piece("p", task, 2))
        worker.mine = [Piece("p", 2, 2)]
        worker.revise(book)
        for consumer in crash.CONSUMERS:
            lease = book.lease(3, consumer=consumer)
            crash.acknowledge(lease, consumer, lease.uids, log.feed)
            book.lease(1, consumer=consumer).nack("not now")
            book.lease(1, consumer=consumer, seconds=100.0)
    assert check(url, log) == []
    return url, log


def statement(*statements: str) -> Callable[[Book], None]:
    def act(book: Book) -> None:
        with book.ledger.write() as tx:
            for sql in statements:
                assert tx.count(sql), sql

    return act


def without_segment(book: Book) -> None:
    for name in book.shelf.segments():
        Path(book.url, "segments", name).unlink()


def with_flipped_byte(book: Book) -> None:
    with book.ledger.read() as tx:
        name, start, size = tx.one("SELECT segment, start, size FROM records WHERE seq = 3")
    path = Path(book.url, "segments", name)
    data = bytearray(path.read_bytes())
    data[start + size // 2] ^= 1
    path.write_bytes(bytes(data))


TRAINED = "INSERT INTO events (time, kind, seq, consumer, lease) VALUES (1, 'trained', {}, 1, {})"
HARM: dict[str, tuple[Callable[[Book], None], str]] = {
    "a lost record": (statement("DELETE FROM records WHERE seq = 3"), "p/2/0/0/t: its append returned, and it is not"),
    "a lost append": (statement("DELETE FROM records WHERE seq IN (3, 4)"), "it is not in the book"),
    "a part of an append": (statement("DELETE FROM records WHERE seq = 4"), "p/2/2: 1 of the 2 records of one append"),
    "a record from nowhere": (
        statement("UPDATE records SET uid = 'p/9/0/0/t' WHERE seq = 3"),
        "p/9/0/0/t: it is in the book, and nobody ever appended it",
    ),
    "a doubled admission": (
        statement("INSERT INTO events (time, kind, seq) VALUES (1, 'admitted', 3)"),
        "p/2/0/0/t: its admission is not in the ledger exactly once",
    ),
    "two records in one place": (
        statement("UPDATE records SET slot = 0 WHERE seq = 2"),
        "2 records lie there",
    ),
    "records that changed places": (
        statement("UPDATE records SET slot = 1 - slot WHERE seq IN (1, 2)"),
        "p/1/0/0/t: its content is not what was appended",
    ),
    "a lost acknowledgement": (
        statement("DELETE FROM events WHERE kind = 'trained' AND seq = 1 AND consumer = 1"),
        "p/1/0/0/t: train acknowledged it under lease 1, the ledger has []",
    ),
    "a doubled acknowledgement": (statement(TRAINED.format(1, 1)), "p/1/0/0/t: train acknowledged it 2 times"),
    "an acknowledgement from nowhere": (
        statement(TRAINED.format(9, 5)),
        "p/5/0/0/t: trained by train under lease 5, which nobody acknowledged",
    ),
    "a record leased twice": (
        statement("INSERT INTO events (time, kind, seq, consumer, lease) VALUES (1, 'leased', 4, 1, 99)"),
        "leased under lease 99, but the record 'p/2/1/0/t' was leased",
    ),
    "a state without an event": (
        statement("UPDATE work SET state = 'dropped' WHERE seq = 9 AND consumer = 1"),
        "p/5/0/0/t: train has it as dropped",
    ),
    "a record that was not offered": (
        statement("DELETE FROM work WHERE seq = 9 AND consumer = 2"),
        "p/5/0/0/t: critic was never offered it",
    ),
    "a wrong tally": (
        statement("UPDATE tallies SET n = n + 1 WHERE consumer = 1 AND state = 'trained'"),
        "tally (1, 'trained', ''): 4 with weight",
    ),
    "counts that do not add up": (
        statement("UPDATE tallies SET n = n + 1 WHERE consumer = 0 AND state = 'admitted'"),
        "counts do not add up",
    ),
    "a wrong number of samples": (
        statement("UPDATE consumers SET samples = 0 WHERE id = 1"),
        "train: 10 inserts and 0",
    ),
    "a lease that ended and still holds": (
        statement("UPDATE leases SET state = 'acked' WHERE state = 'active' AND consumer = 1"),
        "which is acked",
    ),
    "a lost segment": (without_segment, "the ledger points to it, and it is not there"),
    "a flipped byte": (with_flipped_byte, "records cannot be read: Damaged"),
    "no ledger": (lambda book: Path(book.url, "ledger.sqlite").write_bytes(b"x" * 5000), "the book does not open"),
}


@pytest.mark.parametrize("name", HARM)
def test_the_check_finds(told: tuple[str, Log], name: str) -> None:
    url, log = told
    harm, expected = HARM[name]
    with rollbook.open(url) as book:
        harm(book)
    found = check(url, log)
    assert any(expected in text for text in found), found


def test_the_check_finds_a_lost_revision(told: tuple[str, Log]) -> None:
    url, log = told
    uid = next(iter(log.revised))
    with rollbook.open(url) as book:
        book.revise(uid, reward=0.5, author="somebody else")
    assert any(f"{uid}: reward 0.5, expected one of" in text for text in check(url, log))


def test_the_check_finds_an_ack_that_counts_although_its_lease_was_lost(told: tuple[str, Log]) -> None:
    url, log = told
    (consumer, fence, uids), *_ = log.acks
    log.feed(f"lost {consumer} {fence} {' '.join(uids)}")
    assert any(f"{uids[0]}: {consumer} heard that lease {fence} was lost" in text for text in check(url, log))


def test_the_check_finds_what_was_left_undone(told: tuple[str, Log]) -> None:
    url, log = told
    assert any("7 records were not acknowledged by critic" in text for text in check(url, log, done=True))


def test_a_violation_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failed(asked: argparse.Namespace) -> crash.Report:
        assert (asked.trial, asked.kills, asked.url, asked.seed) == ("crash", 7, "folder", 0)
        return crash.Report("crash trial", violations=["a record was lost"])

    monkeypatch.setattr(command, "run", failed)
    monkeypatch.setattr(sys, "argv", ["trials", "crash", "--kills", "7"])
    assert command.main() == 1
    assert "VIOLATION: a record was lost" in capsys.readouterr().out


def test_a_window_that_is_not_hit_often_enough_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, pathlib\n"
        "from tests.book.trials import crash\n"
        "crash.WINDOWS = ('after write', 'never')\n"
        "crash.LONGEST = 1.0\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "print(crash.trial(lambda n: str(folder / 'book'), 2, folder))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert "VIOLATION: a worker did not reach 'never' within 1 s" in done.stdout, done.stdout + done.stderr
