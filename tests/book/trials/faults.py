"""The fault trial: processes work on one book while connections are cut, the server restarts or processes are paused.

Writers append and announce policy versions; consumers lease by experience, by group and within a staleness bound. Every
call that raises is repeated: `append` and `ack` must take effect once, whatever became of the answer to their commit.

    restart     the server stops (fast, immediate, killed) and starts again
    cut         the server ends a session
    proxy       a proxy between the workers and the server cuts a line: at any moment, at a COMMIT that it holds back,
                or after a COMMIT whose answer it holds back
    pause       a process is stopped for a moment, or for longer than its lease
    hold        a process is stopped inside a transaction; the others must go on meanwhile
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import rollbook
from rollbook.book import BookError, LeaseLostError, disk
from rollbook.book.book import Book
from tests.book.trials.crash import CONSUMERS, Report, acknowledge, checked, leased, warm
from tests.book.trials.log import Logger, fork, kill, wait
from tests.book.trials.records import Piece, digest, expected, make_records

KINDS = ("restart", "cut", "proxy", "pause", "hold")
SERVER = ("restart", "cut", "proxy", "hold")
"""Those that need a PostgreSQL server."""
FRESH = "fresh"
"""The consumer with a staleness bound."""
SECONDS = 1.0
"""How long a lease lives."""
WRITERS = 3
LONGEST = 120.0
"""How long a call may be repeated, the writers may take to go on after a fault, and the workers to come to an end."""

Result = TypeVar("Result")


def repeat(call: Callable[[], Result], say: Callable[[str], None]) -> Result:
    """Repeat a call until the book is there to answer it."""
    end = time.monotonic() + LONGEST
    while True:
        try:
            return call()
        except LeaseLostError:
            raise
        except BookError as error:
            say(f"did fail {type(error).__name__}")
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _open(url: str) -> Book:
    book = rollbook.open(url, lease_seconds=SECONDS)
    book.consumer("critic", create=True, lease_seconds=SECONDS)
    book.consumer(FRESH, create=True, lease_seconds=SECONDS, max_staleness=2)
    return book


def _write(url: str, say: Callable[[str], None], number: int, ended: Path, seed: int) -> None:
    chance = random.Random(seed)
    book = repeat(lambda: _open(url), say)
    task = 0
    while not ended.exists():
        task += 1
        piece = Piece(f"w{number}-{os.getpid()}", task, chance.choice((1, 2, 4)))
        say(f"try append {piece}")
        done = repeat(lambda piece=piece: book.append(make_records(piece)), say)  # type: ignore[misc]
        if done.admitted + done.existing != piece.count:
            raise AssertionError(f"{piece}: {done}")
        say(f"did append {piece}")
        if number == 0 and task % 5 == 0:
            repeat(lambda version=task - 2: book.announce(version), say)  # type: ignore[misc]
        time.sleep(0.02 * chance.random())
    book.close()


def _consume(url: str, say: Callable[[str], None], consumer: str, ended: Path, seed: int) -> None:
    chance = random.Random(seed)
    by = "group" if consumer == "critic" else "experience"
    book = repeat(lambda: _open(url), say)
    while True:
        over = ended.exists()
        count = chance.randint(1, 3 if by == "group" else 8)
        lease = repeat(lambda count=count: leased(book, count, by, consumer, say, timeout=0.02), say)  # type: ignore[misc]
        if not lease:
            counts = repeat(lambda: book.counts(consumer), say)
            if over and not counts.waiting + counts.leased:
                book.close()
                return
            continue
        try:
            for row in repeat(lambda lease=lease: lease.experiences, say).rows():  # type: ignore[misc]
                piece = Piece(str(row.eid.batch), int(row.eid.task), row.group_size)
                if digest(row) != expected(piece)[row.eid.run]:
                    raise AssertionError(f"{row.eid.uid}: leased, and not what was appended")
            if chance.random() < 0.1 and not over:
                continue  # left to expire
            uids = lease.uids
            if chance.random() < 0.2 and len(uids) > 1:
                acknowledge(lease, consumer, uids[::2], say, patience=LONGEST)
                uids = uids[1::2]
            acknowledge(lease, consumer, uids, say, patience=LONGEST)
        except LeaseLostError:
            continue


def _hold(url: str, say: Callable[[str], None], ended: Path, seed: int) -> None:
    """Write, and stop this process inside the third transaction."""
    left = [3]

    def reached(window: str) -> None:
        left[0] -= window == "before commit"
        if left[0] == 0:
            left[0] = -1
            os.kill(os.getpid(), signal.SIGSTOP)

    book = repeat(lambda: _open(url), say)
    book.close()
    disk.watch_failpoints(reached)
    _write(url, say, 9, ended, seed)


# --- the proxy --------------------------------------------------------------------------------------------------------


class Proxy:
    """A process that passes connections on to the server's socket, and cuts some of them."""

    def __init__(self, target: Path, seed: int, odds: float) -> None:
        self.target = target
        self.random = random.Random(seed)
        self.odds = odds
        """Cuts for each chunk that a client sends; more at a COMMIT."""
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]

    def serve(self, say: Callable[[str], None], quiet: Path) -> None:
        """Pass on until killed; without cuts once the file `quiet` is there."""
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self._pass_on, args=(client, say, quiet), daemon=True).start()

    def _pass_on(self, client: socket.socket, say: Callable[[str], None], quiet: Path) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            try:
                server.connect(str(self.target))
                while True:
                    ready, _, _ = select.select([client, server], [], [])
                    for source, sink in ((client, server), (server, client)):
                        if source not in ready:
                            continue
                        data = source.recv(1 << 16)
                        if not data or (source is client and self._cuts(data, server, say, quiet)):
                            return
                        sink.sendall(data)
            except OSError:
                return

    def _cuts(self, data: bytes, server: socket.socket, say: Callable[[str], None], quiet: Path) -> bool:
        """Whether the line is cut here, instead of passing `data` on."""
        commit = b"COMMIT" in data.upper()
        if self.random.random() > self.odds * (25 if commit else 1) or quiet.exists():
            return False
        window = self.random.choice(("at COMMIT", "after COMMIT")) if commit else "at any moment"
        if window == "after COMMIT":
            server.sendall(data)
            select.select([server], [], [], 10.0)  # the answer is here, and nobody hears it
        say(f"die {window} cut")
        return True


# --- the trial --------------------------------------------------------------------------------------------------------


class Scene:
    """The workers of one book, and what happens to them."""

    def __init__(self, url: str, logger: Logger, folder: Path, report: Report, seed: int, server: Any) -> None:
        self.url = url
        self.logger = logger
        self.report = report
        self.server = server
        self.random = random.Random(seed)
        self.quiet = folder / "quiet"
        """There when no line is cut any more."""
        self.written = folder / "written"
        """There when the writers are to end."""
        self.ended = folder / "ended"
        """There when all that will be appended is there."""
        self.writers: list[int] = []
        self.consumers: list[int] = []
        for path in (self.quiet, self.written, self.ended):
            path.unlink(missing_ok=True)

    def start(self, url: str) -> None:
        """Start the writers and two processes for each consumer."""
        for number in range(WRITERS):
            self.writers.append(self._fork(_write, url, self.logger.say, number, self.written))
        for name in (*CONSUMERS, FRESH):
            self.consumers += [self._fork(_consume, url, self.logger.say, name, self.ended) for _ in range(2)]

    def _fork(self, act: Callable[..., None], *arguments: Any) -> int:
        return fork(partial(act, *arguments, self.random.randrange(1 << 30)), self.logger.say)

    def progress(self) -> None:
        """Wait until the writers have appended a few pieces more, and records were acknowledged."""
        before = self.logger.update().done.copy()
        end = time.monotonic() + LONGEST
        while not self.logger.state.errors:
            now = self.logger.update().done
            if now["append"] >= before["append"] + WRITERS and now["ack"] > before["ack"]:
                return
            if time.monotonic() > end:
                self.report.violations.append(f"nothing was appended and acknowledged in {LONGEST:g} s")
                return
            time.sleep(0.02)

    def restart(self) -> None:
        mode = self.random.choice(("fast", "immediate", "killed"))
        if mode == "killed":
            self.server.kill()
        else:
            self.server.process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
            self.server.process.wait(LONGEST)
        time.sleep(0.1 * self.random.random())
        self.server.restart()
        self.report.kills[f"server {mode}"] += 1

    def cut(self) -> None:
        import psycopg

        base = self.url.partition("?")
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = %s "
                "ORDER BY random() LIMIT 1) AS victim",
                (urlsplit(base[0]).path[1:],),
            ).fetchone()
        self.report.kills["session ended"] += row is not None

    def pause(self) -> None:
        pid = self.random.choice([*self.writers, *self.consumers])
        long = self.random.random() < 0.3
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SECONDS * 1.4 if long else 0.1 * self.random.random())
        os.kill(pid, signal.SIGCONT)
        self.report.kills["longer than the lease" if long else "for a moment"] += 1

    def hold(self) -> None:
        """Stop a process inside a transaction until the others have appended a few pieces."""
        pid = self._fork(_hold, self.url, self.logger.say, self.written)
        end = time.monotonic() + LONGEST
        while os.waitpid(pid, os.WNOHANG | os.WUNTRACED)[0] == 0:
            if time.monotonic() > end:
                self.report.violations.append("a worker did not stop inside a transaction")
                break
            time.sleep(0.01)
        self.progress()
        os.kill(pid, signal.SIGCONT)
        self.writers.append(pid)
        self.report.kills["inside a transaction"] += 1

    def finish(self) -> None:
        """Let the writers come to an end, then the consumers."""
        self.quiet.touch()
        for flag, pids in ((self.written, self.writers), (self.ended, self.consumers)):
            flag.touch()
            codes = [wait(pid, LONGEST) for pid in pids]
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    kill(pid)
            if any(code != 0 for code in codes):
                self.report.violations.append(f"workers ended with {codes} (None: not at all)")


@contextmanager
def _line(kind: str, url: str, server: Any, scene: Scene, odds: float) -> Iterator[str]:
    """What workers connect to: the server, or a proxy before it."""
    if kind != "proxy":
        yield url
        return
    proxy = Proxy(server.folder / ".s.PGSQL.5432", scene.random.randrange(1 << 30), odds)
    pid = fork(lambda: proxy.serve(scene.logger.say, scene.quiet), scene.logger.say)
    name = quote(urlsplit(url).path[1:])
    try:
        yield f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}?sslmode=disable&gssencmode=disable"
    finally:
        kill(pid)
        proxy.listener.close()


def trial(kind: str, url: str, count: int, folder: Path, *, server: Any = None, seed: int = 0) -> Report:
    """Disturb the workers `count` times; then every record must be settled, once, with every consumer."""
    report = Report(f"{kind} trial, {'postgresql' if '://' in url else 'folder'}", unit="faults", books=1)
    begun = time.monotonic()
    warm()
    with Logger(folder / "log") as logger:
        scene = Scene(url, logger, folder, report, seed, server)
        with _line(kind, url, server, scene, odds=0.004) as line:
            scene.start(line)
            disturb = (lambda: None) if kind == "proxy" else getattr(scene, kind)
            checks = 0
            while not report.violations:
                scene.progress()
                time.sleep(0.2 * scene.random.random())
                disturb()
                log = logger.update()
                report.violations += log.errors
                if kind == "proxy":
                    report.kills.update({window: n - report.kills[window] for (window, _), n in log.deaths.items()})
                if report.kills.total() >= count:
                    break
                if time.monotonic() - begun > LONGEST + 3 * count:
                    report.violations.append(f"{report.kills.total()} of {count} faults in {LONGEST + 3 * count:g} s")
                if report.kills.total() // 25 > checks:
                    checks = report.kills.total() // 25
                    checked(url, logger, report, others=True, done=False, sample=80)
            scene.finish()
        checked(url, logger, report, others=False, done=not report.violations, sample=None)
        log = logger.state
        if kind == "proxy":
            report.kills.update({window: n - report.kills[window] for (window, _), n in log.deaths.items()})
        report.violations += [text for text in log.errors if text not in report.violations]
        report.add(log)
        report.violations += [f"{piece}: its append did not return" for piece in log.unsettled()]
        if kind == "pause" and count > 20 and not log.done["lost"]:
            report.violations.append("no lease was lost to a pause")
    report.seconds = time.monotonic() - begun
    return report
