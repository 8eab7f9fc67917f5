"""The server trial: PostgreSQL is killed and restarted under appends, leases and acknowledgements.

Who was told that an append or an ack is done finds it afterwards; who was told nothing tries again, and it is a no-op
or admitted once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import rollbook
from rollbook.book import BookError, LeaseLost
from tests.book.postgres import Server
from tests.book.trials import verify
from tests.book.trials.crash import Report, acknowledge
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, made

LONGEST = 120.0


def _append(url: str, say: Callable[[str], None], name: str, seed: int, ended: threading.Event) -> None:
    chance = random.Random(seed)
    with rollbook.open(url) as book:
        task = 0
        while not ended.is_set():
            task += 1
            piece = Piece(name, task, chance.choice((1, 2, 4)))
            say(f"try append {piece}")
            end = time.monotonic() + LONGEST
            while True:
                try:
                    done = book.append(made(piece))
                    break
                except BookError:
                    say("did fail")
                    if time.monotonic() > end:
                        raise
            if done.admitted + done.known != piece.count or (done.admitted and done.known):
                raise AssertionError(f"{piece}: {done}")
            say(f"did append {piece}")
            if done.known:
                say("did find")


def _take(url: str, say: Callable[[str], None], ended: threading.Event) -> None:
    with rollbook.open(url) as book:
        while True:
            over = ended.is_set()
            try:
                lease = book.lease(8, timeout=0.0 if over else 0.02, seconds=2.0)
                if lease:
                    acknowledge(lease, "train", lease.uids, say)
                elif over and not book.counts().leased:
                    return
                elif over:
                    time.sleep(0.05)
            except LeaseLost:
                continue
            except BookError:
                say("did fail")


def trial(server: Server, kills: int, *, seed: int = 0, between: float = 0.4) -> Report:
    """Kill the server `kills` times, `between` seconds or so of work apart."""
    report = Report("server trial, postgresql", books=1)
    begun = time.monotonic()
    chance = random.Random(seed)
    url = server.database()
    log = Log()
    lock = threading.Lock()
    ended = threading.Event()

    def say(line: str) -> None:
        with lock:
            log.feed(line)

    def told(act: Callable[..., None], *args: object) -> None:
        try:
            act(url, say, *args)
        except BaseException as error:
            say(f"error {type(error).__name__}: {error}")

    rollbook.open(url).close()
    threads = [threading.Thread(target=told, args=(_append, f"w{i}", seed + i, ended)) for i in range(3)]
    threads.append(threading.Thread(target=told, args=(_take, ended)))
    for thread in threads:
        thread.start()
    for _ in range(kills):
        time.sleep(between * (0.5 + chance.random()))
        server.kill()
        report.kills["server"] += 1
        server.restart()
    time.sleep(between)
    ended.set()
    for thread in threads:
        thread.join(LONGEST)
        if thread.is_alive():
            report.violations.append("a worker does not come to an end")
    report.violations += log.errors or verify.check(url, log, done=True)
    report.checks += 1
    report.add(log)
    server.drop(url)
    report.seconds = time.monotonic() - begun
    return report
