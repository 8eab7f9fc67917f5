"""The crash trial: processes that work on one book are killed, inside named windows and at any moment.

Beside each victim two others work on the same book, and one process writes down what all of them heard back. After each
kill the book is opened and held against that. Every few dozen kills all die at once, one worker that nobody kills
finishes what is left, and the next book begins; so also the making of a book is struck.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rollbook
from rollbook.book import BookError, LeaseLostError, disk
from rollbook.book.book import Book
from tests.book.trials import verify
from tests.book.trials.log import Log, Logger, fork, kill, wait
from tests.book.trials.records import Piece, digest, expected, make_records

CONSUMERS = ("train", "critic")
SECONDS = 0.3
"""How long a lease lives."""
WINDOWS = ("after write", "after sync", "before commit", "after commit", "during compaction", "during ack")
NO_SYNC = "after sync"  # PostgreSQL syncs data and ledger together, at the commit
SETTINGS = {"lease_seconds": SECONDS, "segment_bytes": 96 << 10}
BIAS = {"during compaction": "compact", "during ack": "take"}
LONGEST = 60.0


@dataclass
class Report:
    """What a trial did."""

    title: str
    seconds: float = 0.0
    unit: str = "kills"
    kills: Counter[str] = field(default_factory=Counter)
    inside: Counter[tuple[str, str]] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    records: int = 0
    books: int = 0
    checks: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, log: Log) -> None:
        """Count what the log of one book says."""
        self.inside.update(log.deaths)
        self.done.update(log.done)
        self.records += sum(piece.count for piece in log.appended)

    def __str__(self) -> str:
        lines = [f"{self.title}: {sum(self.kills.values())} {self.unit} in {self.seconds:.1f} s"]
        for window, count in self.kills.items():
            inside = ", ".join(
                f"{doing} {n}" for (crashed, doing), n in sorted(self.inside.items()) if crashed == window
            )
            lines.append(f"  {window:<18} {count:>5}" + (f"  ({inside})" if inside else ""))
        lines.append(
            f"  {self.records} records in {self.books} books, {self.checks} checks; "
            + ", ".join(f"{action} {n}" for action, n in sorted(self.done.items()))
        )
        lines += [f"  VIOLATION: {text}" for text in self.violations[:20]]
        lines.append(f"  {len(self.violations)} violations")
        return "\n".join(lines)


class Worker:
    """One process's life: appends, leases, acknowledgements, revisions and compactions, until it is killed."""

    def __init__(self, url: str, say: Callable[[str], None], name: str, seed: int) -> None:
        self.url, self.say, self.name = url, say, name
        self.random = random.Random(seed)
        self.doing = "open"
        self.mine: list[Piece] = []
        self.task = 0
        self.doom: tuple[str, int] | None = None

    def reached(self, window: str) -> None:
        if self.doom is not None and window == self.doom[0]:
            self.doom = (window, self.doom[1] - 1)
            if self.doom[1] <= 0:
                self.say(f"die {window} {self.doing}")
                os.kill(os.getpid(), signal.SIGKILL)

    def live(self, doom: tuple[str, int] | None, retries: list[Piece], pause: float) -> None:
        """Work until death, at the n-th time a window is reached if that is its doom."""
        self.doom = doom
        disk.watch_failpoints(self.reached)
        acts = [self.append] * 5 + [self.take] * 5 + [self.revise] * 2 + [self.compact]
        if doom is not None and doom[0] in BIAS:
            acts += [getattr(self, BIAS[doom[0]])] * 13
        with self.opened() as book:
            self.doing = "retry"
            for piece in retries:
                self.put(book, piece)
            while True:
                act = self.random.choice(acts)
                self.doing = act.__name__
                act(book)
                time.sleep(pause * self.random.random())

    def opened(self) -> Book:
        book = rollbook.open(self.url, **SETTINGS)
        book.consumer("critic", create=True, lease_seconds=SECONDS)
        return book

    def put(self, book: Book, piece: Piece) -> None:
        self.say(f"try append {piece}")
        if self.random.random() < 0.2:
            with book.writer(delay=0.001) as writer:
                done = writer.add(make_records(piece)).result()
        else:
            done = book.append(make_records(piece))
        if done.admitted + done.existing != piece.count:
            raise AssertionError(f"{piece}: {done}")
        self.say(f"did append {piece}")

    def append(self, book: Book) -> None:
        """A new piece, or one that is known already."""
        if self.mine and self.random.random() < 0.15:
            piece = self.random.choice(self.mine)
            if book.append(make_records(piece)).existing != piece.count:
                raise AssertionError(f"{piece}: appended again, and it was not all known")
            self.say("did refuse")
            return
        self.task += 1
        piece = Piece(self.name, self.task, self.random.choice((1, 1, 2, 4, 8)))
        self.put(book, piece)
        self.mine.append(piece)

    def take(self, book: Book) -> None:
        """Lease some, look at them, and acknowledge all, some or none of them."""
        consumer = self.random.choice(CONSUMERS)
        by = "group" if consumer == "critic" and self.random.random() < 0.5 else "experience"
        lease = leased(book, self.random.randint(1, 3 if by == "group" else 6), by, consumer, self.say)
        if not lease:
            return
        choice = self.random.random()
        try:
            for row in lease.experiences.rows():
                piece = Piece(str(row.eid.batch), int(row.eid.task), row.group_size)
                if digest(row) != expected(piece)[row.eid.run]:
                    raise AssertionError(f"{row.eid.uid}: leased, and not what was appended")
            if choice < 0.1:
                return  # left to expire
            if choice < 0.15 and self.doom is None:
                time.sleep(SECONDS * 1.1)
            if 0.15 <= choice < 0.25:
                lease.nack("not now")
                self.say("did nack")
                return
            uids = lease.uids
            if choice < 0.4 and len(uids) > 1:
                first = self.random.sample(uids, len(uids) // 2)
                acknowledge(lease, consumer, first, self.say)
                uids = [uid for uid in uids if uid not in first]
            acknowledge(lease, consumer, uids, self.say)
        except LeaseLostError:
            return  # This one hung; `acknowledge` has said so where it matters.

    def revise(self, book: Book) -> None:
        """A late reward for a record of one's own, so that the order of its rewards is known."""
        if self.mine:
            uid = self.random.choice(self.random.choice(self.mine).uids)
            value = round(self.random.uniform(2, 1000), 3)
            self.say(f"try revise {uid} {value}")
            book.revise(uid, reward=value, author=self.name)
            self.say(f"did revise {uid} {value}")

    def compact(self, book: Book) -> None:
        done = book.compact(garbage=self.random.choice((0.0, 0.3)), grace=0.0)
        if done.damaged:
            raise AssertionError(f"compaction met damage: {done.damaged}")
        self.say("did compact")

    def finish(self, retries: list[Piece]) -> None:
        """Settle what the dead left open, and acknowledge all that is there."""
        with self.opened() as book:
            for piece in retries:
                self.put(book, piece)
            end = time.monotonic() + LONGEST
            while any(book.counts(consumer).waiting + book.counts(consumer).leased for consumer in CONSUMERS):
                if time.monotonic() > end:
                    raise AssertionError(f"not all could be leased: {[book.counts(c) for c in CONSUMERS]}")
                for consumer in CONSUMERS:
                    lease = leased(book, 64, "experience", consumer, self.say, timeout=0.05, seconds=30.0)
                    if lease:
                        acknowledge(lease, consumer, lease.uids, self.say)
            self.compact(book)


def warm() -> None:
    """Have everything imported that workers use, on a book in memory: this process makes them by the hundred."""
    import psycopg  # noqa: F401

    lines: list[str] = []
    worker = Worker("memory:", lines.append, "warm", 0)
    with worker.opened() as book:
        for act in (worker.append, worker.take, worker.revise, worker.compact):
            act(book)
        book.get(worker.mine[0].uids).rows()


def leased(
    book: Book, count: int, by: str, consumer: str, say: Callable[[str], None], **options: Any
) -> rollbook.book.Lease:
    """Lease records and say which."""
    lease = book.lease(count, by=by, consumer=consumer, **options)
    if lease:
        say(f"did lease {consumer} {lease.fence} {by} {count} {' '.join(lease.uids)}")
    return lease


def acknowledge(
    lease: rollbook.book.Lease, consumer: str, uids: list[str], say: Callable[[str], None], *, patience: float = 0.0
) -> None:
    """Acknowledge records, with a word before and one after; a call that fails is repeated for `patience` seconds."""
    about = f"{consumer} {lease.fence} {' '.join(uids)}"
    say(f"try ack {about}")
    end = time.monotonic() + patience
    while True:
        try:
            count = lease.ack(step=1, uids=uids)
            break
        except LeaseLostError:
            say(f"lost {about}")
            raise
        except BookError as error:
            if time.monotonic() >= end:
                raise
            say(f"did fail {type(error).__name__}")
            time.sleep(0.01)
    if count != len(uids):
        raise AssertionError(f"lease {lease.fence}: acknowledged {count} of {len(uids)} records")
    say(f"did ack {about}")


def checked(url: str, logger: Logger, report: Report, *, others: bool, done: bool, sample: int | None) -> None:
    """Hold the book against the log, in a child: this process, from which workers are made, never opens a book."""
    log = logger.update()
    for piece in log.tried:
        expected(piece)  # known to all children from now on
    ready, write_end = os.pipe()

    def act() -> None:
        os.close(ready)
        violations = verify.check(
            url, log, logger.update if others else None, done=done, sample=sample, seed=report.checks
        )
        os.write(
            write_end, "\n".join(["checked", *(text.replace("\n", " ")[:900] for text in violations[:50])]).encode()
        )

    pid = fork(act, logger.say)
    os.close(write_end)
    answer = b""
    while data := os.read(ready, 1 << 16):
        answer += data
    os.close(ready)
    code = wait(pid)
    report.checks += 1
    first, *wrong = answer.decode().split("\n")
    if code != 0 or first != "checked":
        wrong.append(f"the check did not come to an end ({code})")
    report.violations += wrong


def trial(
    urls: Callable[[int], str],
    kills: int,
    folder: Path,
    *,
    seed: int = 0,
    title: str = "crash trial",
    synced: bool = True,
    a_book: int = 40,
    sample: int | None = 80,
) -> Report:
    """Kill `kills` processes; `urls(n)` is what the n-th book is opened by."""
    report = Report(title)
    begun = time.monotonic()
    warm()
    chance = random.Random(seed)
    targets = [window for window in WINDOWS if synced or window != NO_SYNC]
    report.kills.update(dict.fromkeys([*targets, "any moment", "all at once"], 0))
    turns = [*targets, "any moment"]
    number = killed = rounds = 0
    with Logger(folder / "log") as logger:
        while killed < kills and not report.violations:
            url = urls(report.books)
            report.books += 1
            companions: list[int] = []
            stop = min(killed + a_book, kills)

            def born(doom: tuple[str, int] | None, retries: list[Piece], pause: float, url: str = url) -> int:
                nonlocal number
                number += 1
                worker = Worker(url, logger.say, f"w{number}", seed * 1_000_003 + number)
                return fork(lambda: worker.live(doom, retries, pause), logger.say)

            while killed < stop and not report.violations:
                log = logger.update()
                retries = log.unsettled()
                while len(companions) < 2:
                    companions.append(born(None, [], 0.06))
                window = turns[rounds % len(turns)]
                rounds += 1
                if window == "any moment":
                    victim = born(None, retries, 0.0)
                    time.sleep(chance.random() * 0.12)
                    code = kill(victim)
                else:
                    victim = born((window, chance.randint(1, 3 if window == "during ack" else 6)), retries, 0.0)
                    code = wait(victim, LONGEST)
                    if code is None:
                        kill(victim)
                        report.violations.append(f"a worker did not reach {window!r} within {LONGEST:g} s")
                if code != -signal.SIGKILL:
                    report.violations.append(f"a worker that was to die ended with {code}")
                report.kills[window] += 1
                killed += 1
                if chance.random() < 0.15 or killed == stop:
                    for pid in companions:
                        kill(pid)
                        if killed < kills:
                            report.kills["all at once"] += 1
                            killed += 1
                    companions.clear()
                checked(url, logger, report, others=bool(companions), done=False, sample=sample)
                report.violations += logger.state.errors
            for pid in companions:
                kill(pid)
            if not report.violations:
                _finished(url, logger, report, Worker(url, logger.say, f"f{report.books}", seed))
            report.add(logger.state)
            logger.restart()
    least = min(20, kills // (2 * len(targets)))
    report.violations += [
        f"{window!r} was hit {report.kills[window]} times, expected at least {least}"
        for window in targets
        if report.kills[window] < least and not report.violations
    ]
    report.seconds = time.monotonic() - begun
    return report


def _finished(url: str, logger: Logger, report: Report, worker: Worker) -> None:
    """What is left is done by one that nobody kills; then every record must be acknowledged once by each consumer."""
    retries = logger.update().unsettled()
    code = wait(fork(lambda: worker.finish(retries), logger.say), 2 * LONGEST)
    checked(url, logger, report, others=False, done=True, sample=None)
    report.violations += logger.state.errors
    if code != 0:
        report.violations.append(f"the last worker ended with {code}")
