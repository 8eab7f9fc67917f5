"""`python -m tests.book.trials crash --kills 500`: trials of one kind, a short report, and an error if any failed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.book.trials import crash


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
    import os

    token = os.urandom(4).hex()
    return lambda n: f"{url}{'&' if '?' in url else '?'}schema=trial_{token}_{n}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.book.trials", description=__doc__)
    trials = parser.add_subparsers(dest="trial", required=True)
    one = trials.add_parser("crash", help="kill processes that work on a book")
    one.add_argument("--kills", type=int, default=500)
    for each in trials.choices.values():
        each.add_argument(
            "--url", default="folder", help="folder, postgresql, or postgresql://... of an empty database"
        )
        each.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-trial-") as name, places(asked.url, Path(name)) as urls:
        kind = asked.url.partition(":")[0]
        report = crash.trial(
            urls, asked.kills, Path(name), seed=asked.seed, title=f"crash trial, {kind}", synced=kind == "folder"
        )
    print(report)
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
