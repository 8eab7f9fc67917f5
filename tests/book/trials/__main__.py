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
    command = trials.add_parser("crash", help="kill processes that work on a book")
    command.add_argument("--kills", type=int, default=500)
    command = trials.add_parser("concurrency", help="8 writers and 4 consumers on one book")
    command.add_argument("--pieces", type=int, default=400, help="appends of each writer")
    command = trials.add_parser("opening", help="processes that make and close one book in the same moment")
    command.add_argument("--rounds", type=int, default=100)
    for trial in trials.choices.values():
        trial.add_argument(
            "--url", default="folder", help="folder, postgresql, or postgresql://... of an empty database"
        )
    command = trials.add_parser("faults", help="restart the server, cut connections, pause processes")
    command.add_argument("--kind", choices=faults.KINDS, required=True)
    command.add_argument("--count", type=int, default=100)
    command.add_argument("--url", choices=("folder", "postgresql"), default="postgresql")
    for name in ("crash", "concurrency", "faults"):
        trials.choices[name].add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run(options)
    print(report)
    return bool(report.violations)


def run(options: argparse.Namespace) -> Report:
    """The trial that is asked for."""
    if options.trial == "faults":
        with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as name:
            return disturbed(options.kind, options.url, options.count, Path(name), options.seed)
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as name, places(options.url, Path(name)) as urls:
        kind = options.url.partition(":")[0]
        title = f"{options.trial} trial, {kind}"
        if options.trial == "opening":
            return concurrency.opening(urls, options.rounds, Path(name), title=title)
        if options.trial == "concurrency":
            return concurrency.trial(urls(0), Path(name), pieces=options.pieces, seed=options.seed, title=title)
        return crash.trial(urls, options.kills, Path(name), seed=options.seed, title=title, synced=kind == "folder")


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
