"""`rollbook top`: a live view of a book: who generates, leases and trains.

Invariant: the terminal is restored however the command ends. A server that does not answer never blocks the keyboard.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollbook.cli.run import resolve_book
from rollbook.core.addresses import redacted
from rollbook.core.terminal import (
    ENTER_SCREEN,
    LEAVE_SCREEN,
    OK,
    columns,
    figure,
    format_duration,
    print_json,
    printable,
    screen,
    shorten,
    styled,
    table,
    tail,
    width,
)

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.book.rollouts import WorkerReport
    from rollbook.book.status import BookStatus, ConsumerStatus, RolloutStatus

_SILENT_SECONDS, _SILENT_TRAINER_SECONDS = 10.0, 60.0
"""Time without a report after which a worker or trainer is silent. A worker reports every 2 s, a
trainer every step, and every 2 s while it waits."""
_KEY_SECONDS = 0.1
_MAX_NOTE_LINES = 3
_MAX_CONSUMERS, _MAX_LEASES = 4, 3
"""How many a small terminal shows at most."""


def top(options: argparse.Namespace) -> int:
    """Show the status of a book, and update it until the user quits."""
    reader = _StatusReader(resolve_book(os.path.expanduser(options.path)), options.window)
    # Before the screen is taken over: an address that cannot be opened is an ordinary error.
    status = reader.read()
    try:
        if options.json:
            print_json(describe(status))
        elif options.once or not sys.stdout.isatty():
            for line in format_status(status):
                print(line)
        else:
            _watch(reader, status, options.interval)
    finally:
        reader.close()
    return OK


class _StatusReader:
    """Reads the status of a book, and opens the book again after an error.

    Args:
        url: Address of the book.
        window: Seconds that rates are averaged over.
    """

    def __init__(self, url: str, window: float) -> None:
        self.url, self.window = url, window
        self._book: Book | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> BookStatus:
        """Return the status."""
        from rollbook.book import open as open_book
        from rollbook.book.status import read_status

        if self._book is None:
            self._book = open_book(self.url, mode="r")
        return read_status(self._book, self.window)

    def start(self, interval: float, view: _Screen) -> None:
        """Read repeatedly in a thread, so that a slow answer does not block the keyboard."""
        self._thread = threading.Thread(target=self._run, args=(interval, view), daemon=True)
        self._thread.start()

    def _run(self, interval: float, view: _Screen) -> None:
        while not view.stop.wait(interval):
            try:
                view.update(self.read())
            except Exception as error:  # shown to the user, and tried again
                view.fail(error)
                self._reset()

    def _reset(self) -> None:
        book, self._book = self._book, None
        if book is not None:
            with contextlib.suppress(Exception):  # it is the connection that is broken
                book.close()

    def close(self) -> None:
        """Close the book, unless the thread still waits for an answer."""
        if self._thread is not None:
            self._thread.join(0.5)
            if self._thread.is_alive():
                return
        self._reset()


# --- the live screen --------------------------------------------------------------------------------------------------


class _Screen:
    """What the live view shows: the last status, and the last error, if any."""

    def __init__(self, status: BookStatus, interval: float) -> None:
        self.status, self.interval = status, interval
        self.error: str | None = None
        self.answered = time.monotonic()
        self.stop = threading.Event()
        self.changed = threading.Event()

    def update(self, status: BookStatus) -> None:
        self.status, self.error, self.answered = status, None, time.monotonic()
        self.changed.set()

    def fail(self, error: Exception) -> None:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
        self.error = " ".join(text.split())
        self.changed.set()

    def draw(self) -> str:
        size = shutil.get_terminal_size()
        error = self.error
        silence = time.monotonic() - self.answered
        if error is None and silence > max(3 * self.interval, 5.0):
            error = "still waiting"
        lines = format_status(self.status, rows=size.lines, interval=self.interval)
        if error is not None:
            note = f"no answer for {_age(silence)}: {printable(error)}"
            notes = textwrap.wrap(note, columns(), max_lines=_MAX_NOTE_LINES, placeholder="…")
            lines = [lines[0], *(styled(text, "red") for text in notes), *lines[2:]]
        return screen(lines[: size.lines])


def _watch(reader: _StatusReader, status: BookStatus, interval: float) -> None:
    view = _Screen(status, interval)
    with _full_screen() as stopped:
        reader.start(interval, view)
        size, drawn = None, 0.0
        try:
            while not stopped.is_set() and not _quit_requested():
                now = time.monotonic()
                # A terminal of another size is drawn again, and so is the age of an answer that does not come.
                late = now - drawn > max(interval, 1.0) and now - view.answered > interval
                if view.changed.is_set() or size != shutil.get_terminal_size() or late:
                    view.changed.clear()
                    size, drawn = shutil.get_terminal_size(), now
                    sys.stdout.write(view.draw())
                    sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        finally:
            view.stop.set()


@contextlib.contextmanager
def _full_screen() -> Iterator[threading.Event]:
    """Take over the terminal; yields an event that a termination signal sets."""
    import termios  # not on Windows, where the other forms of the command work
    import tty

    stopped = threading.Event()
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    saved = None if keyboard is None else termios.tcgetattr(keyboard)
    handler = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
            attributes = termios.tcgetattr(keyboard)
            attributes[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on the alternate screen
            termios.tcsetattr(keyboard, termios.TCSANOW, attributes)
        sys.stdout.write(ENTER_SCREEN)
        sys.stdout.flush()
        yield stopped
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stdout.write(LEAVE_SCREEN)
            sys.stdout.flush()
        if keyboard is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(keyboard, termios.TCSADRAIN, saved or [])
        signal.signal(signal.SIGTERM, handler)


def _quit_requested() -> bool:
    """Wait a moment for a key; return whether it is q."""
    if sys.stdin is None or not sys.stdin.isatty():
        time.sleep(_KEY_SECONDS)
        return False
    if not select.select([sys.stdin], [], [], _KEY_SECONDS)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower() or b"\x03" in keys  # no bytes: the terminal was closed


# --- text -------------------------------------------------------------------------------------------------------------


def describe(status: BookStatus) -> dict[str, Any]:
    """Return a status as plain values for `--json`."""
    plain = dataclasses.asdict(status)
    plain["workers"] = [
        {
            **report.details,
            "name": report.name,
            "age": report.age,
            "silent": is_silent(report, status),
            "groups_per_second": status.worker_rates.get(report.name, 0.0),
        }
        for report in status.workers
    ]
    del plain["worker_rates"]
    return plain


def is_silent(report: WorkerReport, status: BookStatus) -> bool:
    """Return whether a worker or trainer sends no heartbeats; a trainer with an active lease is training."""
    is_trainer = report.details.get("role") == "trainer"
    if report.age <= (_SILENT_TRAINER_SECONDS if is_trainer else _SILENT_SECONDS):
        return False
    return not any(lease.holder == report.name and lease.left > 0 for lease in status.leases)


def format_status(status: BookStatus, *, rows: int | None = None, interval: float | None = None) -> list[str]:
    """Return the lines of a status, no wider than the terminal.

    Args:
        status: The status.
        rows: Number of lines of the terminal; `None`: as many as there are.
        interval: Seconds between updates, for the header of a live view.
    """
    limit = columns()
    parts = [_format_header(status, limit, interval), *_format_consumers(status, limit, rows)]
    if status.rollouts is not None:
        parts.append(_format_rollouts(status.rollouts, limit))
    used = sum(len(section) + 1 for section in parts)
    free_lines = 10**6 if rows is None else max(rows - used, 0)
    # A header, a line and a blank line each; leases get what workers do not need, and a few lines in any case.
    leases = min(len(status.leases), max(_MAX_LEASES, free_lines - len(status.workers) - 3))
    lease_lines = leases + 2 + (_count_leases(status) > leases) if leases else 0
    if status.workers:
        parts.append(_format_workers(status, max(free_lines - lease_lines - 1, 1)))
    if leases:
        parts.append(_format_leases(status, leases))
    lines = [line for section in parts for line in (*section, "")][:-1]
    return lines if rows is None else lines[:rows]


def _count_leases(status: BookStatus) -> int:
    return sum(consumer.leases for consumer in status.consumers)


def _format_header(status: BookStatus, limit: int, interval: float | None) -> list[str]:
    right = time.strftime("%H:%M:%S", time.localtime(status.time))
    if interval is not None:
        right += f"  every {interval:g} s, q quits"
    free_columns = limit - width(right) - 2
    address = tail(printable(redacted(status.url)), max(free_columns - len("rollbook top  "), 8))
    left = f"rollbook top  {address}"
    gap = " " * (max(free_columns - width(left), 0) + 2) if limit < 10**6 else "  "
    version = "no policy version" if status.policy_version is None else f"policy version {status.policy_version}"
    texts = [version, f"records {status.records:,} (+{_rate(status.appended)}/s)"]
    if status.evaluation:
        texts.append(f"evaluation {status.evaluation:,}")
    texts.append(f"rates over {status.window:.3g} s")
    return [styled(shorten(left + gap + right, limit), "bold"), shorten("   ".join(texts), limit)]


def _format_consumers(status: BookStatus, limit: int, rows: int | None) -> Iterator[list[str]]:
    """Yield a table of the consumers, with staleness and drops of each below its row."""
    shown = status.consumers if rows is None else status.consumers[:_MAX_CONSUMERS]
    names = ("consumer", "waiting", "groups", "leased", "trained", "dropped", "leased/s", "trained/s", "dropped/s")
    cells = []
    for consumer in shown:
        counts, rates = consumer.counts, consumer.rates
        cells.append(
            [
                shorten(printable(counts.consumer), 20),
                *(figure(n) for n in (counts.waiting, consumer.groups, counts.leased, counts.trained)),
                figure(sum(counts.dropped.values())),
                *(_rate(rates.get(kind, 0.0)) for kind in ("leased", "trained", "dropped")),
            ]
        )
    header, *lines = table(names, cells, right=range(1, len(names)), optional=(8, 6, 2, 7))
    consumer_lines = [header]
    for consumer, line in zip(shown, lines, strict=True):
        consumer_lines += [line, *(shorten(f"  {text}", limit) for text in _consumer_notes(consumer))]
    if len(shown) < len(status.consumers):
        consumer_lines.append(f"  and {len(status.consumers) - len(shown)} more consumers")
    yield consumer_lines


def _consumer_notes(consumer: ConsumerStatus) -> Iterator[str]:
    staleness, counts = consumer.staleness, consumer.counts
    if staleness is not None:
        median = "" if staleness.median is None else f", median {staleness.median:g}"
        bound = "" if staleness.bound is None else f" (at most {staleness.bound} allowed)"
        if staleness.min == staleness.max:
            text = f"{staleness.max} version{'s' if staleness.max != 1 else ''} behind"
        else:
            text = f"{staleness.min} to {staleness.max} versions behind{median}"
        yield f"waiting records are {text}{bound}"
    if counts.dropped:
        reasons = sorted(counts.dropped.items(), key=lambda entry: -entry[1])
        yield "dropped: " + ", ".join(f"{printable(reason)} {n:,}" for reason, n in reasons)
    returned = [f"{kind} {_rate(consumer.rates[kind])}/s" for kind in ("expired", "nacked") if kind in consumer.rates]
    if returned:
        yield "returned to the queue: " + ", ".join(returned)


def _format_rollouts(rollouts: RolloutStatus, limit: int) -> list[str]:
    expired = f" ({rollouts.expired} expired)" if rollouts.expired else ""
    texts = [
        f"rollouts {printable(rollouts.status)}: {rollouts.in_flight} groups in flight{expired}, "
        f"{rollouts.returned} returned, {_rate(60 * rollouts.rate)} finished per minute",
        f"  next group {rollouts.next:,}, limit {rollouts.limit:,}",
    ]
    if rollouts.oldest is not None:
        texts[1] += f"; oldest claim {_age(rollouts.oldest)} ({printable(rollouts.oldest_worker)})"
    return [shorten(text, limit) for text in texts]


_WORKER_COLUMNS = (
    *("worker", "role", "state", "version", "in flight", "groups", "records", "groups/min", "discarded", "seen"),
)
_WORKER_OPTIONAL = ("records", "groups", "role", "version", "groups/min", "in flight")
"""Columns that a narrow terminal does not show."""


def _format_workers(status: BookStatus, max_lines: int) -> list[str]:
    """Return a table of the workers: trainers first, then silent ones, so that only healthy workers are cut off."""
    silent = {report.name for report in status.workers if is_silent(report, status)}
    reports = sorted(
        status.workers, key=lambda report: (report.details.get("role") != "trainer", report.name not in silent)
    )
    if len(reports) + 1 > max_lines:
        reports = reports[: max(max_lines - 2, 1)]
    cells = [_worker_cells(report, status, report.name in silent) for report in reports]
    names = [name for name in _WORKER_COLUMNS if name != "discarded" or any(row[name] for row in cells)]
    widths = {name: max(width(text) for text in (name, *(row[name] for row in cells))) for name in names}
    for name in _WORKER_OPTIONAL:
        if sum(widths[column] + 1 for column in names) > columns() + 1:
            names.remove(name)
    right = [i for i, name in enumerate(names) if name not in ("worker", "role", "state")]
    header, *lines = table(names, [[row[name] for name in names] for row in cells], right=right)
    worker_lines = [header]
    for report, line in zip(reports, lines, strict=True):
        worker_lines.append(styled(line, "red") if report.name in silent else line)
    if len(reports) < len(status.workers):
        hidden = {report.name for report in status.workers} - {report.name for report in reports}
        worker_lines.append(f"  and {len(hidden)} more workers, {len(hidden & silent)} of them silent")
    return worker_lines


def _worker_cells(report: WorkerReport, status: BookStatus, silent: bool) -> dict[str, str]:
    """Return the cells of a worker by column. Its report is not trusted: values may have any type."""
    details = report.details
    is_trainer = details.get("role") == "trainer"
    flight, groups, records, discarded = (
        figure(count) if type(count) in (int, float) else ""
        for count in map(details.get, ("groups_in_flight", "groups", "records", "discarded"))
    )
    state = printable(details.get("state")) or "-"
    if type(details.get("step")) is int:
        state += f" step {details['step']}"
    return {
        "worker": tail(printable(report.name), min(columns() // 3, 24)),
        "role": shorten(printable(details.get("role")), 10),
        "state": shorten(f"SILENT, was {state}" if silent else state, 40),
        "version": _worker_version(details.get("version"), status.policy_version),
        "in flight": flight,
        "groups": groups,
        "records": "" if is_trainer else records,  # those of its lease, which is listed
        "groups/min": "" if is_trainer else _rate(60 * status.worker_rates.get(report.name, 0.0)),
        "discarded": "" if discarded == "0" else discarded,
        "seen": _age(report.age),
    }


def _worker_version(version: Any, announced: int | None) -> str:
    if type(version) is not int:
        return "-"
    behind = 0 if announced is None else announced - version
    return f"{version} (-{behind})" if behind > 0 else str(version)


def _format_leases(status: BookStatus, count: int) -> list[str]:
    several = len(status.consumers) > 1
    names = ["lease held by", *(["consumer"] if several else []), "records", "age", "expires in"]
    cells: list[Sequence[str]] = []
    for lease in status.leases[:count]:
        left = _age(lease.left) if lease.left > 0 else "expired"
        consumer = [shorten(printable(lease.consumer), 20)] if several else []
        cells.append(
            [
                tail(printable(lease.holder), min(columns() // 3, 30)),
                *consumer,
                figure(lease.records),
                _age(lease.age),
                left,
            ]
        )
    lines = list(table(names, cells, right=range(1 + several, len(names)), optional=(names.index("age"), 1)))
    if (more := _count_leases(status) - count) > 0:
        lines.append(f"  and {more} more leases")
    return lines


def _rate(number: float) -> str:
    """Format a rate.

    >>> _rate(0.0), _rate(0.25), _rate(12.345), _rate(1234.5)
    ('0', '0.25', '12.3', '1,234')
    """
    return "0" if number == 0 else figure(float(number))


def _age(seconds: float) -> str:
    """Format a duration, short ones to a tenth of a second.

    >>> _age(0.44), _age(75), _age(7300)
    ('0.4 s', '1 min 15 s', '2 h 1 min')
    """
    return f"{seconds:.1f} s" if seconds < 9.95 else format_duration(seconds)
