"""Short versions of the trials that `python -m tests.book.trials` runs, and that what they check can fail."""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbook
from rollbook.book.book import Book
from tests.book.postgres import Server
from tests.book.trials import __main__ as command
from tests.book.trials import crash, faults, tables
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, make_records
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
    printed = run("crash", "--kills", "14")  # at least one in each window
    assert "14 kills" in printed
    for window in crash.WINDOWS:
        assert window in printed


def test_killed_processes_lose_nothing_in_postgresql(postgres_url: str) -> None:
    assert "8 kills" in run("crash", "--kills", "8", "--url", postgres_url)


def test_every_record_is_acknowledged_once_by_each_of_two_groups() -> None:
    assert "0 violations" in run("concurrency", "--pieces", "8")


def test_every_record_is_acknowledged_once_in_postgresql(postgres_url: str) -> None:
    assert "0 violations" in run("concurrency", "--pieces", "6", "--url", postgres_url)


def test_many_may_make_one_book_at_once() -> None:
    assert "in 4 books, 4 checks" in run("opening", "--rounds", "4")


def test_a_server_that_restarts_between_two_calls_is_not_noticed(crashing_postgres: Server) -> None:
    url = crashing_postgres.database()
    with rollbook.open(url) as book:
        book.append(make_records(Piece("a", 1, 2)))
        lease = book.lease(2)
        crashing_postgres.kill()
        crashing_postgres.restart()
        assert lease.ack() == 2
        crashing_postgres.restart()
        assert book.append(make_records(Piece("a", 2, 2))).admitted == 2
        assert (book.counts().trained, book.counts().waiting) == (2, 2)
    crashing_postgres.drop(url)


# --- what the trials check can fail -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log]:
    """A sound book of every kind of event, and what was said of it."""
    folder = tmp_path_factory.mktemp("sound") / "book"
    log = Log()
    worker = crash.Worker(str(folder), log.feed, "w", 7)
    with worker.opened() as book:
        for task in range(1, 6):
            worker.put(book, Piece("p", task, 2))
        worker.mine = [Piece("p", 2, 2)]
        worker.revise(book)
        for consumer in crash.CONSUMERS:
            lease = crash.leased(book, 3, "experience", consumer, log.feed)
            crash.acknowledge(lease, consumer, lease.uids, log.feed)
            book.lease(1, consumer=consumer).nack("not now")
            book.lease(1, consumer=consumer, seconds=100.0)
        crash.leased(book, 2, "group", "critic", log.feed, seconds=100.0)
    assert check(str(folder), log) == []
    return folder, log


@pytest.fixture
def trial_log(sound: tuple[Path, Log], tmp_path: Path) -> tuple[str, Log]:
    """A copy of the sound book, to harm."""
    shutil.copytree(sound[0], tmp_path / "book")
    return str(tmp_path / "book"), copy.deepcopy(sound[1])


def statement(*statements: str) -> Callable[[Book], None]:
    def act(book: Book) -> None:
        with book.ledger.write() as tx:
            for sql in statements:
                assert tx.count(sql), sql

    return act


def without_segment(book: Book) -> None:
    for name in book.store.segments():
        Path(book.url, "segments", name).unlink()


def with_flipped_byte(book: Book) -> None:
    with book.ledger.read() as tx:
        name, start, size = tx.first("SELECT segment, start, size FROM records WHERE seq = 3")
    path = Path(book.url, "segments", name)
    data = bytearray(path.read_bytes())
    data[start + size // 2] ^= 1
    path.write_bytes(bytes(data))


NACKED = (2, 3)
"""The first lease of record 4 by train, given back, and the second."""
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
        statement("UPDATE queue SET state = 'dropped' WHERE seq = 9 AND consumer = 1"),
        "p/5/0/0/t: train has it as dropped",
    ),
    "a record that was not offered": (
        statement("DELETE FROM queue WHERE seq = 9 AND consumer = 2"),
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
    "a lease that ended too early": (
        statement("INSERT INTO events (time, kind, seq, consumer, lease) VALUES (1, 'expired', 4, 1, 3)"),
        " s before the lease ended",
    ),
    "an acknowledgement after the lease had ended": (
        statement("UPDATE leases SET expires = 1 WHERE state = 'acked' AND consumer = 1"),
        "s after the lease had ended",
    ),
    "a fencing number that does not grow": (
        statement("UPDATE events SET lease = {0} + {1} - lease WHERE lease IN ({0}, {1})".format(*NACKED)),
        "its number is not larger than",
    ),
    "a lease of more records than it has": (
        statement("UPDATE leases SET count = count + 1 WHERE id = 1"),
        "lease 1: of 4 records, with 3 events",
    ),
    "a part of a group": (
        statement("DELETE FROM events WHERE kind = 'leased' AND seq = 6 AND consumer = 2"),
        "a part of group 'p/3', without ['p/3/1/0/t'], which waited",
    ),
    "a group that another lease holds": (
        statement("UPDATE events SET seq = 3 WHERE kind = 'leased' AND seq = 5 AND consumer = 2"),
        "group 'p/2', of which another lease held a record",
    ),
    "a stale record that was leased": (
        statement(
            "UPDATE consumers SET settings = replace(settings, '\"max_staleness\": null', '\"max_staleness\": 1')",
            "INSERT INTO events (id, time, kind, detail) VALUES (0, 1, 'announced', '{\"version\": 3}')",
        ),
        "p/1/0/0/t of version 1 leased after version 3 was announced, at most 1 behind",
    ),
    "work on a record for evaluation": (
        statement("UPDATE records SET evaluation = 1 WHERE seq = 9"),
        "p/5/0/0/t: in the work of train, and not for training",
    ),
    "a lost segment": (without_segment, "the ledger points to it, and it is not there"),
    "a flipped byte": (with_flipped_byte, "records cannot be read: CorruptBookError"),
    "no ledger": (lambda book: Path(book.url, "ledger.sqlite").write_bytes(b"x" * 5000), "the book does not open"),
}


@pytest.mark.parametrize("name", HARM)
def test_the_check_finds(trial_log: tuple[str, Log], name: str) -> None:
    url, log = trial_log
    harm, expected = HARM[name]
    with rollbook.open(url) as book:
        harm(book)
    violations = check(url, log)
    assert any(expected in text for text in violations), violations


def test_the_check_finds_a_lost_revision(trial_log: tuple[str, Log]) -> None:
    url, log = trial_log
    uid = next(iter(log.revised))
    with rollbook.open(url) as book:
        book.revise(uid, reward=0.5, author="somebody else")
    assert any(f"{uid}: reward 0.5, expected one of" in text for text in check(url, log))


def test_the_check_finds_an_ack_that_counts_although_its_lease_was_lost(trial_log: tuple[str, Log]) -> None:
    url, log = trial_log
    (consumer, fence, uids), *_ = log.acks
    log.feed(f"lost {consumer} {fence} {' '.join(uids)}")
    assert any(f"{uids[0]}: {consumer} heard that lease {fence} was lost" in text for text in check(url, log))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("did lease train 1 experience 3 p/1/0/0/t p/1/1/0/t p/2/0/0/t", "lease 1: 2 workers heard of it"),
        ("did lease critic 7 group 1 p/5/0/0/t", "lease 7: asked for 1 groups, got 2"),
        ("did lease train 77 experience 1 p/1/0/0/t", "lease 77 of train: got ['p/1/0/0/t'], the ledger has []"),
    ],
)
def test_the_check_finds_a_lease_that_a_worker_heard_otherwise(
    trial_log: tuple[str, Log], line: str, expected: str
) -> None:
    url, log = trial_log
    log.feed(line)
    violations = check(url, log)
    assert any(expected in text for text in violations), violations


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(2, 9, 10, 2)], None),
        ([(2, 9, 10, 2), (1, 9, 9, 1)], "p/5/0/0/t: in the inbox of train and in its work"),
        ([(2, 9, 10, 2), (2, 10, 10, 1)], "p/5/1/0/t: 2 times in the inbox of critic"),
        ([(2, 9, 11, 3)], "the book has 2 such records"),
        ([(2, 9, 9, 1)], "p/5/1/0/t: critic was never offered it"),
    ],
)
def test_records_in_an_inbox_count_as_waiting(
    trial_log: tuple[str, Log],
    monkeypatch: pytest.MonkeyPatch,
    entries: list[tuple[int, int, int, int]],
    expected: str | None,
) -> None:
    url, log = trial_log
    state = tables.read(url)
    state.work = [row for row in state.work if (row.consumer, row.seq) not in ((2, 9), (2, 10))]
    state.tallies.append(tables.Tally(2, "waiting", "", -2, -2.0))
    state.consumers[1] = state.consumers[1]._replace(inserts=state.consumers[1].inserts - 2)
    state.inbox = [tables.Pending(*entry) for entry in entries]
    monkeypatch.setattr(tables, "read", lambda url: state)
    violations = check(url, log)
    assert violations == [] if expected is None else any(expected in text for text in violations), violations


def test_the_check_finds_what_was_left_undone(trial_log: tuple[str, Log]) -> None:
    url, log = trial_log
    assert any("7 records were not acknowledged by critic" in text for text in check(url, log, done=True))


def test_the_table_of_faults_names_tests_and_trials_that_exist() -> None:
    page = (ROOT / "docs" / "book_storage.md").read_text()
    rows = page.partition("## Guarantees under faults\n")[2].partition("\n#")[0]
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "book").glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", rows)
    assert names
    assert [name for name in names if f"def {name}(" not in sources] == []
    assert set(re.findall(r"`faults --kind (\w+)`", rows)) <= set(faults.KINDS)


def test_a_violation_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failed(options: argparse.Namespace) -> crash.Report:
        assert (options.trial, options.kills, options.url, options.seed) == ("crash", 7, "folder", 0)
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
