"""`rollbook top`: the numbers of a book made by hand, the text, and the live screen in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollbook
from rollbook.book import Book, status
from rollbook.book.rollouts import (
    claim_rollouts,
    finish_claims,
    open_rollouts,
    report_worker,
    return_claims,
    set_limit,
)
from rollbook.book.status import read_status
from rollbook.cli import top
from rollbook.cli.parser import main
from rollbook.core.terminal import width
from tests.book.conftest import crashing_postgres, database, durable_url, postgres, postgres_url  # noqa: F401
from tests.book.postgres import Server
from tests.book.records import Clock, group, records

WORKER = {"role": "rollout", "host": "gpu1", "pid": 7, "state": "generating", "version": 2}


def fill(book: Book) -> None:
    """Three groups of four records: one trained, one leased, one waiting; two dropped records; two workers."""
    book.consumer("train", change=True, max_staleness=4)
    book.announce(1)
    book.append([*group("a", 4, size=4, policy_versions=1), *group("b", 4, size=4, policy_versions=1)])
    book.append(records(2, policy_versions=1))
    book.lease(1, by="group").ack(step=1)
    book.drop([record.eid.uid for record in records(2)], "constant group")
    book.announce(3)
    book.append(group("c", 4, size=4, policy_versions=2))
    book.append(group("e", 1, policy_versions=2), evaluation=True)
    open_rollouts(book, {}, next=0)
    set_limit(book, 6)
    claims = claim_rollouts(book, "worker-0", 3, seconds=60)
    claims += claim_rollouts(book, "worker-1", 2, seconds=60)
    finish_claims(book, claims[:1])
    return_claims(book, claims[1:2], "worker stopped")
    report_worker(book, "worker-0", **WORKER, groups_in_flight=1, groups=1, records=4, discarded=0)
    report_worker(book, "worker-1", **WORKER, groups_in_flight=2, groups=0, records=0, discarded=3)


def test_numbers(durable_url: str) -> None:  # noqa: F811
    with rollbook.open(durable_url) as book:
        fill(book)
        lease = book.lease(1, by="group", seconds=30)
        with rollbook.open(durable_url, mode="r") as reader:
            snapshot = read_status(reader, seconds=100.0)
        lease.nack()
    (consumer,) = snapshot.consumers
    assert consumer.counts == book_counts(leased=4, waiting=4)
    assert (snapshot.policy_version, snapshot.records, snapshot.evaluation) == (3, 14, 1)
    assert consumer.groups == 1
    assert consumer.staleness == status.Staleness(1, 1.0, 1, bound=4)
    assert snapshot.appended == pytest.approx(0.15)
    assert consumer.rates == pytest.approx({"leased": 0.08, "trained": 0.04, "dropped": 0.02})
    assert snapshot.rollouts is not None
    assert snapshot.rollouts.oldest is not None and 0 <= snapshot.rollouts.oldest < 60
    assert (snapshot.rollouts.status, snapshot.rollouts.next, snapshot.rollouts.limit) == ("open", 5, 6)
    assert (snapshot.rollouts.in_flight, snapshot.rollouts.returned, snapshot.rollouts.expired) == (3, 1, 0)
    assert snapshot.rollouts.oldest_worker == "worker-0"
    assert snapshot.worker_rates == pytest.approx({"worker-0": 0.01})
    assert [report.name for report in snapshot.workers] == ["worker-0", "worker-1"]
    assert snapshot.workers[1].details["discarded"] == 3
    (leased,) = snapshot.leases
    assert (leased.records, leased.consumer, consumer.leases) == (4, "train", 1)
    assert leased.holder.endswith(f"/{os.getpid()}") and 0 < leased.left <= 30


def book_counts(*, leased: int, waiting: int) -> rollbook.book.Counts:
    return rollbook.book.Counts(
        "train", 14, waiting=waiting, leased=leased, trained=4, dropped={"constant group": 2}, evaluation=1
    )


def test_the_inbox_is_part_of_the_queue_and_nothing_is_written(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.announce(5)
        book.append([*group("a", 2, policy_versions=5), *group("b", 2, policy_versions=2)])
        before = book.ledger.all("SELECT * FROM inbox")
        assert before
        (consumer,) = read_status(book).consumers
        assert (consumer.counts.waiting, consumer.groups) == (4, 2)
        assert consumer.staleness == status.Staleness(0, 1.5, 3)
        assert book.ledger.all("SELECT * FROM inbox") == before


def test_a_long_queue_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.announce(5)
        book.append([*group("a", 2, size=2, policy_versions=5), *group("b", 2, size=2, policy_versions=2)])
        book.lease(1, by="group").nack()
        monkeypatch.setattr(status, "MAX_WAITING", 1)
        (consumer,) = read_status(book).consumers
        assert consumer.staleness == status.Staleness(0, None, 3)
        assert (consumer.counts.waiting, consumer.groups) == (4, 2)


def test_rates_of_a_busy_book_are_those_of_its_last_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(status, "MAX_EVENTS", 4)
    with rollbook.open(tmp_path / "book", clock=clock) as book:
        book.append(records(6))
        clock.now += 8
        book.append(records(4, start=6))
        clock.now += 2
        snapshot = read_status(book, seconds=60.0)
        assert (snapshot.window, snapshot.appended) == (2.0, 2.0)


def test_silent_workers(tmp_path: Path) -> None:
    clock = Clock()
    with rollbook.open(tmp_path / "book", clock=clock) as book:
        book.append(group("a", 4, size=4))
        report_worker(book, "gone", **WORKER)
        lease = book.lease(1, by="group", seconds=3600)
        holder = read_status(book).leases[0].holder
        report_worker(book, holder, role="trainer", state="training", step=3, version=2)
        report_worker(book, "evaluating", role="trainer", state="evaluating", version=2)
        clock.now += 11
        report_worker(book, "here", **WORKER)
        status = read_status(book)
        silent = {report.name for report in status.workers if top.is_silent(report, status)}
        assert silent == {"gone"}, "a trainer reports once per step"
        clock.now += 60
        status = read_status(book)
        silent = {report.name for report in status.workers if top.is_silent(report, status)}
        assert silent == {"gone", "here", "evaluating"}, "a trainer with a lease is training"
        assert any("SILENT, was generating" in line for line in top.format_status(status))
        lease.nack()


@pytest.mark.parametrize("limit", [40, 80, 200])
def test_the_text_fits(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "columns", lambda: limit)
    monkeypatch.setattr("rollbook.core.terminal.columns", lambda: limit)
    with rollbook.open(tmp_path / "book") as book:
        fill(book)
        lease = book.lease(1, by="group")
        for number in range(40):
            report_worker(book, f"some-host-{number}/12345", **{**WORKER, "state": "waiting for \x1b[31mprompts"})
        report_worker(book, "odd", role=[1], state={"a": 1}, version="x", groups=None, records=1e300)
        for name in ("replay", "judge", "third", "fourth", "fifth"):
            book.consumer(name, create=True)
        status = read_status(book)
        lease.nack()
    lines = top.format_status(status, rows=24, interval=2.0)
    assert len(lines) == 24
    assert max(map(width, lines)) <= limit
    assert not any("\x1b" in line for line in lines)
    text = "\n".join(lines)
    assert "more workers" in text and "lease held by" in text and "rollouts open: 3 groups" in text
    assert len(top.format_status(status)) > 50


def test_a_book_without_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollbook.open(tmp_path / "run" / "book").close()
    assert main(["top", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "no policy version" in out and "train" in out
    assert not any(line.startswith(("rollouts", "worker", "lease held by")) for line in out.splitlines())


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rollbook.open(tmp_path / "book") as book:
        fill(book)
    assert main(["top", str(tmp_path / "book"), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["consumers"][0]["counts"]["dropped"] == {"constant group": 2}
    assert status["workers"][1] | {"age": 0, "groups_per_second": 0} == {
        **WORKER,
        "name": "worker-1",
        "age": 0,
        "silent": False,
        "groups_per_second": 0,
        "groups_in_flight": 2,
        "groups": 0,
        "records": 0,
        "discarded": 3,
    }
    assert status["rollouts"]["in_flight"] == 3


@pytest.mark.parametrize("path", ["nowhere", "postgresql://ana:secret@127.0.0.1:1/x"])
def test_a_bad_address(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = path if "://" in path else str(tmp_path / path)
    assert main(["top", address]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "secret" not in err
    assert err.startswith("rollbook top: ")
    if "://" not in path:
        assert len(err.splitlines()) == 1


def test_bad_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "nan", "x", "1e9"):
        with pytest.raises(SystemExit):
            main(["top", "x", "--interval", text])
        assert "expected a number of seconds" in capsys.readouterr().err


def test_no_torch(tmp_path: Path) -> None:
    rollbook.open(tmp_path / "book").close()
    code = (
        "import sys; from rollbook.cli.parser import main; main(['top', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "book")], check=True, timeout=120, stdout=subprocess.DEVNULL
    )


# --- in a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """`rollbook top` in a pseudo-terminal."""

    def __init__(self, path: Path | str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollbook", "top", str(path), "--interval", "0.2"],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm"},
            preexec_fn=self._take_terminal,
        )

    def _take_terminal(self) -> None:
        """Make the pseudo-terminal the controlling one, so that Ctrl-C is a signal."""
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

    def read(self, seconds: float = 0.1) -> str:
        while select.select([self.master], [], [], seconds)[0]:
            text = os.read(self.master, 1 << 16).decode(errors="replace")
            self.output += text
            if not text:
                break
        return self.output

    def wait_for(self, condition: Callable[[str], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition(self.read()):
            assert time.monotonic() < end, self.output[-3000:]
            assert self.process.poll() is None, self.output[-3000:]

    def last(self) -> str:
        """The last screen that was drawn."""
        return self.output.rpartition("\x1b[H")[2]

    def finish(self) -> int:
        code = self.process.wait(20)
        self.read()
        assert self.output.endswith("\x1b[?25h\x1b[?1049l"), "the former screen and the cursor are back"
        assert termios.tcgetattr(self.slave) == self.before, "the terminal has its settings back"
        return code


@contextlib.contextmanager
def terminal(path: Path | str) -> Iterator[Terminal]:
    view = Terminal(path)
    try:
        yield view
    finally:
        if view.process.poll() is None:
            view.process.kill()
            view.process.wait()
        os.close(view.master)
        os.close(view.slave)


@pytest.mark.parametrize("key", ["q", "\x03", "SIGTERM"])
def test_it_refreshes_and_quits(key: str, tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book, terminal(tmp_path / "book") as view:
        fill(book)
        view.wait_for(lambda _: "records 14" in view.last())
        book.append(records(3, start=50))
        view.wait_for(lambda _: "records 17" in view.last())
        if key == "SIGTERM":
            view.process.send_signal(signal.SIGTERM)
        else:
            os.write(view.master, key.encode())
        assert view.finish() == 0


def test_a_book_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    rollbook.open(tmp_path / "book").close()
    with terminal(tmp_path / "book") as view:
        view.wait_for(lambda _: "no policy version" in view.last())
        (tmp_path / "book").rename(tmp_path / "away")
        view.wait_for(lambda _: "no answer for " in view.last() and "ledger.sqlite" in view.last())
        (tmp_path / "away").rename(tmp_path / "book")
        view.wait_for(lambda _: "no answer" not in view.last() and "no policy version" in view.last())
        os.write(view.master, b"q")
        assert view.finish() == 0


def test_a_server_that_is_killed_and_restarted(crashing_postgres: Server) -> None:  # noqa: F811
    url = crashing_postgres.database()
    with rollbook.open(url) as book:
        book.announce(7)
    with terminal(url) as view:
        view.wait_for(lambda _: "policy version 7" in view.last())
        crashing_postgres.kill()
        view.wait_for(lambda _: "no answer for " in view.last())
        crashing_postgres.restart()
        view.wait_for(lambda _: "no answer" not in view.last() and "policy version 7" in view.last())
        crashing_postgres.kill()
        view.wait_for(lambda _: "no answer for " in view.last())
        os.write(view.master, b"q")
        assert view.finish() == 0
    crashing_postgres.restart()
