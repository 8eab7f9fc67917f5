"""The concurrency trial: 8 writers and 4 consumers of two consumer groups, all processes of their own, on one book.

Two writers at a time bring some of the same records. Consumers die with records in hand, hang until their lease has
ended, give records back and acknowledge them in parts. At the end the ledger must show, event by event, that every
record was admitted once and acknowledged exactly once by each consumer group.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rollbook
from rollbook.book import LeaseLostError
from rollbook.book.book import Book
from tests.book.trials.crash import CONSUMERS, Report, acknowledge, checked, leased, warm
from tests.book.trials.log import Logger, fork, kill, wait
from tests.book.trials.records import Piece, digest, expected, make_records

WRITERS = 8
PER_GROUP = 2
SECONDS = 0.7
LONGEST = 600.0


def _opened(url: str) -> Book:
    book = rollbook.open(url, lease_seconds=SECONDS)
    book.consumer("critic", create=True, lease_seconds=SECONDS)
    return book


def _write(url: str, say: Callable[[str], None], number: int, pieces: int, seed: int) -> None:
    chance = random.Random(seed)
    with _opened(url) as book, book.writer(delay=0.005) as writer:
        for task in range(pieces):
            # Its neighbour brings the same ones.
            shared = task % 5 == 0
            name = f"both{number // 2}" if shared else f"w{number}"
            piece = Piece(name, task, 1 + (task * 7) % 8 if shared else chance.choice((1, 2, 4, 8)))
            say(f"try append {piece}")
            if chance.random() < 0.3:
                writer.add(make_records(piece)).result()
            else:
                done = book.append(make_records(piece))
                if done.admitted + done.existing != piece.count or (not shared and done.existing):
                    raise AssertionError(f"{piece}: {done}")
            say(f"did append {piece}")


def _consume(
    url: str,
    say: Callable[[str], None],
    consumer: str,
    ended: Path,
    seed: int,
    fates: dict[int, str],
    fault_rate: float,
) -> None:
    """Take until all is done. `fates`: what becomes of the n-th lease; any other fails at `fault_rate`."""
    chance = random.Random(seed)
    by = "group" if consumer == "critic" else "experience"
    taken = 0
    with _opened(url) as book:
        while True:
            over = ended.exists()
            count = 3 if by == "group" else 12
            lease = leased(book, count, by, consumer, say, timeout=0.0 if over else 0.05)
            if not lease:
                counts = book.counts(consumer)
                if over and not counts.waiting + counts.leased:
                    return
                time.sleep(0.01)
                continue
            taken += 1
            fate = fates.get(taken) or (
                chance.choice(("die", "hang", "nack", "part")) if chance.random() < fault_rate else ""
            )
            try:
                for row in lease.experiences.rows():
                    piece = Piece(str(row.eid.batch), int(row.eid.task), row.group_size)
                    if digest(row) != expected(piece)[row.eid.run]:
                        raise AssertionError(f"{row.eid.uid}: leased, and not what was appended")
                if fate == "die":
                    say("die holding a lease take")
                    os.kill(os.getpid(), signal.SIGKILL)
                if fate == "hang":
                    time.sleep(SECONDS * 1.2)
                if fate == "nack":
                    lease.nack("not now")
                    say("did nack")
                    continue
                uids = lease.uids
                if fate == "part" and by == "experience" and len(uids) > 1:
                    acknowledge(lease, consumer, uids[::2], say)
                    uids = uids[1::2]
                acknowledge(lease, consumer, uids, say)
            except LeaseLostError:
                continue
            if fate == "hang":
                raise AssertionError(f"lease {lease.fence}: acknowledged {SECONDS * 1.2:g} s after its last progress")


def trial(
    url: str,
    folder: Path,
    *,
    pieces: int = 200,
    seed: int = 0,
    fault_rate: float = 0.05,
    title: str = "concurrency trial",
) -> Report:
    """Each writer appends `pieces` pieces; until every record is acknowledged by both groups."""
    report = Report(title, books=1)
    begun = time.monotonic()
    warm()
    chance = random.Random(seed)
    ended = folder / "ended"
    ended.unlink(missing_ok=True)
    running: dict[int, Callable[[], int]] = {}  # a consumer that dies is followed by another
    with Logger(folder / "log") as logger:
        writers = {
            fork(partial(_write, url, logger.say, i, pieces, seed * 1000 + i), logger.say) for i in range(WRITERS)
        }

        def consumer(name: str, fates: dict[int, str]) -> int:
            own_seed = chance.randrange(1 << 30)
            return fork(lambda: _consume(url, logger.say, name, ended, own_seed, fates, fault_rate), logger.say)

        for name in CONSUMERS:
            for fates in ({2: "hang", 4: "die"}, {2: "die", 4: "nack", 5: "part"}):
                running[consumer(name, fates)] = partial(consumer, name, {})
        while (writers or running) and not report.violations:
            if time.monotonic() - begun > LONGEST:
                report.violations.append(f"{len(writers)} writers and {len(running)} consumers do not come to an end")
                break
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.005)
                continue
            code = os.waitstatus_to_exitcode(status)
            if pid in writers:
                writers.discard(pid)
                if not writers:
                    ended.touch()
            elif pid in running:
                again = running.pop(pid)
                if code == -signal.SIGKILL:
                    report.kills["holding a lease"] += 1
                    running[again()] = again
                    continue
            else:
                report.violations.append(f"the logger ended with {code}")
            if code:
                report.violations.append(f"a process ended with {code}")
        for pid in (*writers, *running):
            kill(pid)
        checked(url, logger, report, others=False, done=True, sample=None)
        log = logger.state
        report.violations += log.errors
        report.add(log)
        brought = sum(piece.count for piece in log.tried)
        if sum(map(len, (piece.uids for piece in log.appended))) != brought:
            report.violations.append("not every append returned")
        acked = sum(len(uids) for _, _, uids in log.acks)
        if acked != len(CONSUMERS) * brought:
            report.violations.append(f"{acked} acknowledgements returned for {brought} records and 2 groups")
        for outcome, count in (("lost leases", log.done["lost"]), ("deaths", sum(log.deaths.values()))):
            if not count:
                report.violations.append(f"the trial saw no {outcome}")
    report.seconds = time.monotonic() - begun
    return report


def opening(urls: Callable[[int], str], rounds: int, folder: Path, *, title: str = "opening trial") -> Report:
    """Six processes at a time make one new book, append to it and close it, all in the same moment."""
    report = Report(title)
    begun = time.monotonic()
    warm()

    def meet(url: str, say: Callable[[str], None], number: int, moment: float) -> None:
        piece = Piece(f"w{number}", 1, 2)
        time.sleep(max(moment - time.monotonic(), 0.0))
        say(f"try append {piece}")
        with rollbook.open(url) as book:
            book.append(make_records(piece))
        say(f"did append {piece}")
        with rollbook.open(url, "r") as book:
            if len(book.get(piece.uids)) != piece.count:
                raise AssertionError(f"{piece}: not all of it is there")

    with Logger(folder / "log") as logger:
        while report.books < rounds and not report.violations:
            url = urls(report.books)
            report.books += 1
            moment = time.monotonic() + 0.05
            pids = [fork(partial(meet, url, logger.say, i, moment), logger.say) for i in range(6)]
            codes = [wait(pid) for pid in pids]
            checked(url, logger, report, others=False, done=False, sample=None)
            report.violations += logger.state.errors
            if any(codes) or len(logger.state.appended) != len(pids):
                report.violations.append(f"processes ended with {codes}")
            report.add(logger.state)
            logger.restart()
    report.seconds = time.monotonic() - begun
    return report
