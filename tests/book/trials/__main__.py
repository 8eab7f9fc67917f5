"""`python -m tests.book.trials crash --kills 500`: trials of one kind, a short report, and an error if any failed."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.book.trials import concurrency, crash, faults
from tests.book.trials.crash import Report


@contextmanager
def places(kind: str, folder: Path) -> Iterator[Callable[[int], str]]:
    """What fresh books are opened by."""
    if kind == "folder":
        yield lambda n: str(folder / f"book{n}")
        return
    if kind.startswith("postgresql://"):
        yield _schemas(kind)
        return
    from tests.book.postgres import Server

    with Server() as server:
        yield _schemas(server.database())


def _schemas(url: str) -> Callable[[int], str]:
    token = os.urandom(4).hex()
    return lambda n: f"{url}{'&' if '?' in url else '?'}schema=trial_{token}_{n}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.book.trials", description=__doc__)
    trials = parser.add_subparsers(dest="trial", required=True)
    one = trials.add_parser("crash", help="kill processes that work on a book")
    one.add_argument("--kills", type=int, default=500)
    one = trials.add_parser("concurrency", help="8 writers and 4 consumers on one book")
    one.add_argument("--pieces", type=int, default=400, help="appends of each writer")
    one = trials.add_parser("opening", help="processes that make and close one book in the same moment")
    one.add_argument("--rounds", type=int, default=100)
    for each in trials.choices.values():
        each.add_argument(
            "--url", default="folder", help="folder, postgresql, or postgresql://... of an empty database"
        )
    one = trials.add_parser("faults", help="restart the server, cut connections, pause processes")
    one.add_argument("--kind", choices=faults.KINDS, required=True)
    one.add_argument("--count", type=int, default=100)
    one.add_argument("--url", choices=("folder", "postgresql"), default="postgresql")
    for name in ("crash", "concurrency", "faults"):
        trials.choices[name].add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    report = run(asked)
    print(report)
    return bool(report.violations)


def run(asked: argparse.Namespace) -> Report:
    """The trial that is asked for."""
    if asked.trial == "faults":
        with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as name:
            return disturbed(asked.kind, asked.url, asked.count, Path(name), asked.seed)
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as name, places(asked.url, Path(name)) as urls:
        kind = asked.url.partition(":")[0]
        title = f"{asked.trial} trial, {kind}"
        if asked.trial == "opening":
            return concurrency.opening(urls, asked.rounds, Path(name), title=title)
        if asked.trial == "concurrency":
            return concurrency.trial(urls(0), Path(name), pieces=asked.pieces, seed=asked.seed, title=title)
        return crash.trial(urls, asked.kills, Path(name), seed=asked.seed, title=title, synced=kind == "folder")


def disturbed(kind: str, url: str, count: int, folder: Path, seed: int) -> Report:
    """Run the fault trial in a folder, or on a server of its own."""
    if url == "folder":
        if kind in faults.SERVER:
            raise SystemExit(f"--kind {kind}: needs --url postgresql")
        return faults.trial(kind, str(folder / "book"), count, folder, seed=seed)
    from tests.book.postgres import Server

    with Server() as server:
        return faults.trial(kind, server.database(), count, folder, server=server, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
