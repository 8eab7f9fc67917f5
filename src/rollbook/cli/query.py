"""`ls`, `sql` and `history`: list the contents of a book, query it, and show the history of a record.

Invariant: `ls` of a book or of a folder of books reads only ledgers, and loads neither pyarrow, torch nor duckdb.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollbook.cli.run import LEDGER, resolve_book
from rollbook.core.addresses import POSTGRES
from rollbook.core.ids import record_step
from rollbook.core.terminal import OK, figure, print_json, print_table, printable, size, styled, when, wrapped

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.book.ledger import Ledger, Transaction


def ls(options: argparse.Namespace) -> int:
    """List the contents of a book, the runs of a folder, or the samples that match a filter."""
    if any(option is not None for option in (options.where, options.sort, options.limit)):
        return _list_samples(options)
    path = options.path if _is_postgres(options.path) else resolve_book(os.path.expanduser(options.path))
    if _is_postgres(path) or os.path.lexists(os.path.join(path, LEDGER)):
        return _list_book(path, options)
    if os.path.isdir(path):
        return _list_folder(path, options)
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: no such file or folder")
    return _summarize_rollouts(options)


_CONSUMER_COLUMNS = ("consumer", "waiting", "leased", "trained", "dropped")
_SUMMARY_FIELDS = (
    *("steps", "records", "evaluation", "reward", "evaluation_reward", "written"),
    *("policy_version", "segments", "bytes", "created"),
)


def _list_book(path: str, options: argparse.Namespace) -> int:
    summary = _summarize(path)
    if options.json:
        print_json(summary)
        return OK
    for name in _SUMMARY_FIELDS:
        value = size(summary[name]) if name == "bytes" and summary[name] is not None else summary[name]
        if value is not None:
            print(f"{name.replace('_', ' '):19}{printable(value)}")
    if summary["checkpoints"]:
        print(wrapped(f"{'checkpoints':19}{printable(', '.join(summary['checkpoints']))}", 19))
    rows = [[entry[name] for name in _CONSUMER_COLUMNS] for entry in summary["consumers"]]
    if rows:
        print()
        print_table(_CONSUMER_COLUMNS, rows)
    return OK


def _list_folder(path: str, options: argparse.Namespace) -> int:
    """List the runs and books in a folder; without any, summarize the folder as saved rollouts."""
    runs = []
    for name, book in _find_runs(path):
        try:
            runs.append({"name": name, **_summarize(book)})
        except (ValueError, OSError) as error:
            denied = isinstance(error, PermissionError)
            runs.append({"name": name, "error": "permission denied" if denied else str(error)})
    if not runs and any(os.scandir(path)):
        try:
            return _summarize_rollouts(options)
        except (ValueError, OSError):
            pass  # not a folder of rollouts
    if options.json:
        print_json(runs)
    elif not runs:
        print("no runs or books here")
    else:
        rows = [
            [
                entry["name"],
                *(figure(entry.get(name)) for name in ("steps", "records", "reward", "evaluation_reward")),
                entry.get("error") or entry.get("written"),
            ]
            for entry in runs
        ]
        print_table(("run", "steps", "records", "last reward", "evaluation", "written"), rows, right=range(1, 5))
    return OK


_MAX_DEPTH = 3
"""Levels below a folder that are searched for runs."""


def _find_runs(folder: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, str]]:
    """Yield the name and the book of each run in a folder, in order of names. Links are not followed."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".")
    for name in names:
        path = os.path.join(folder, name)
        book = resolve_book(path)
        if os.path.lexists(os.path.join(book, LEDGER)):
            yield name, book
        elif depth > 1:
            try:
                for inner_name, inner_book in _find_runs(path, depth - 1):
                    yield f"{name}/{inner_name}", inner_book
            except PermissionError:
                yield name, path  # reported as unreadable


def _summarize_rollouts(options: argparse.Namespace) -> int:
    """Summarize saved rollouts."""
    from rollbook.cli.run import open_run

    with open_run(options.path) as run:
        run_info = run.answers.run()
    counts = {name: run_info[name] for name in ("kind", "records", "evaluation", "groups")}
    first, last = run_info["steps"]["first"], run_info["steps"]["last"]
    if options.json:
        print_json({**counts, "steps": None if first is None else [first, last]})
        return OK
    for name, value in {**counts, "steps": None if first is None else f"{first} to {last}"}.items():
        if value is not None:
            print(f"{name:15}{printable(value)}")
    return OK


def _list_samples(options: argparse.Namespace) -> int:
    from rollbook.cli.run import open_run, sample_table

    with open_run(options.path) as run:
        page = run.answers.list(
            view="samples", filter=options.where, sort=options.sort or "n", limit=options.limit or 50
        )
    if options.json:
        print_json(page["rows"])
        return OK
    for line in sample_table(page["rows"], ("step",)):
        print(line)
    if page["total"] > len(page["rows"]):
        print(styled(f"{len(page['rows'])} of {page['total']:,}; --limit N shows more", "dim"))
    return OK


def _is_postgres(path: str) -> bool:
    return path.startswith(POSTGRES)


def _summarize(path: str) -> dict[str, Any]:
    """Summarize a book from its ledger, loading only the ledger's modules."""
    if _is_postgres(path):
        from rollbook.book import open as open_book

        with open_book(path, "r") as book:
            summary = _summarize_ledger(book.ledger)
            sizes = book.store.segments()
        return {**summary, "segments": len(sizes), "bytes": sum(sizes.values())}
    from pathlib import Path

    from rollbook.book.ledger import SQLiteLedger

    ledger = SQLiteLedger(Path(path) / "ledger.sqlite", read_only=True)
    try:
        summary = _summarize_ledger(ledger)
    finally:
        ledger.close()
    segments = os.path.join(path, "segments")
    sizes = {}
    if os.path.isdir(segments) and not os.path.islink(segments):
        with os.scandir(segments) as entries:
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    return {**summary, "segments": len(sizes), "bytes": sum(sizes.values())}


def _summarize_ledger(ledger: Ledger) -> dict[str, Any]:
    import sqlite3

    from rollbook.book.ledger import LAYOUT

    try:
        with ledger.read() as tx:
            layout = tx.first("SELECT value FROM meta WHERE key = 'layout'")
            if layout is not None and layout[0] != str(LAYOUT):
                raise ValueError(f"the book has layout {layout[0]}, this version reads {LAYOUT}")
            meta = dict(tx.all("SELECT key, value FROM meta WHERE key IN ('policy_version', 'made') LIMIT 2"))
            tallies = tx.all("SELECT consumer, state, SUM(n) FROM tallies GROUP BY 1, 2")
            in_inbox = dict(tx.all("SELECT consumer, SUM(count) FROM inbox GROUP BY 1"))
            consumers = tx.all("SELECT id, name FROM consumers ORDER BY id LIMIT 1000")
            checkpoints = [name for (name,) in tx.all("SELECT name FROM checkpoints ORDER BY event LIMIT 1000")]
            last_metrics = tx.all(
                "SELECT step FROM events WHERE seq IS NULL AND kind = 'metrics' ORDER BY id DESC LIMIT 1"
            )
            last_event = tx.all("SELECT time FROM events ORDER BY id DESC LIMIT 1")
            rewound: dict[int, int] = {}
            if tx.all("SELECT 1 FROM events WHERE seq IS NULL AND kind = 'rewound' LIMIT 1"):
                rewound = dict(
                    tx.all(
                        "SELECT evaluation, COUNT(*) FROM records WHERE removed_reason = 'rewound' GROUP BY evaluation"
                    )
                )
            step, reward = _last_step_and_reward(tx, 0)
            evaluation_reward = _last_step_and_reward(tx, 1)[1]
    except sqlite3.Error as error:
        raise ValueError(f"the ledger cannot be read: {error}; `rollbook check` gives details") from None
    counts = {(consumer, state): n for consumer, state, n in tallies}  # consumer 0 stands for the book
    return {
        "steps": last_metrics[0][0] if last_metrics else step,
        "records": counts.get((0, "admitted"), 0) - rewound.get(0, 0),
        "evaluation": counts.get((0, "evaluation"), 0) - rewound.get(1, 0),
        "reward": reward,
        "evaluation_reward": evaluation_reward,
        "written": when(last_event[0][0]) if last_event else None,
        "policy_version": meta.get("policy_version"),
        "created": when(meta.get("made")),
        "checkpoints": [str(name) for name in checkpoints],
        "consumers": [
            {
                "consumer": name,
                "waiting": sum(counts.get((number, state), 0) for state in ("waiting", "cooling"))
                + in_inbox.get(number, 0),
                **{state: counts.get((number, state), 0) for state in _CONSUMER_COLUMNS[2:]},
            }
            for number, name in consumers
        ],
    }


def _last_step_and_reward(tx: Transaction, evaluation: int) -> tuple[int | None, float | None]:
    """Return the step and mean reward of the newest batch of training (0) or evaluation (1) records."""
    present = f"evaluation = {evaluation} AND (removed_reason IS NULL OR removed_reason NOT IN ('deleted', 'rewound'))"
    rows = tx.all(f"SELECT batch, version_min FROM records WHERE {present} ORDER BY seq DESC LIMIT 1")
    if not rows:
        return None, None
    mean = tx.first(f"SELECT AVG(reward) FROM records WHERE batch = ? AND {present}", (rows[0][0],))[0]
    return record_step(*rows[0]), mean


def sql(options: argparse.Namespace) -> int:
    """Run a SQL query on a book."""
    from rollbook.book import open as open_book

    with open_book(resolve_book(options.path), "r") as book:
        table = book.sql(options.query, memory=options.memory, seconds=options.seconds).arrow()
    if options.json:
        print_json(table.to_pylist())
    else:
        print_table(table.column_names, ([*row.values()] for row in table.to_pylist()))
    return OK


def history(options: argparse.Namespace) -> int:
    """Print the history of a record."""
    from rollbook.book import open as open_book

    with open_book(resolve_book(options.path), "r") as book:
        entries = book.history(_resolve_uid(book, options.uid))
    names = ("time", "kind", "reason", "consumer", "step", "lease", "detail")
    if options.json:
        print_json([{name: getattr(entry, name) for name in names} for entry in entries])
    else:
        rows = [[when(event.time), *(getattr(event, name) for name in names[1:-1])] for event in entries]
        details = [json.dumps(event.detail, default=str) if event.detail else None for event in entries]
        print_table(names, [[*row, detail] for row, detail in zip(rows, details, strict=True)])
    return OK


def _resolve_uid(book: Book, uid: str) -> str:
    """Return the only uid with this prefix, or `uid` itself if there is none.

    `3/12/0` matches run 0 of a task, although it is also a prefix of runs 01, 02, ...
    """

    def find(prefix: str) -> list[str]:
        query = "SELECT uid FROM records WHERE uid >= ? AND uid < ? ORDER BY uid LIMIT 9"
        uids = [str(candidate) for (candidate,) in tx.all(query, (prefix, prefix + "\U0010ffff"))]
        return [candidate for candidate in uids if candidate.startswith(prefix)]

    with book.ledger.read() as tx:
        matches = find(uid)
        in_run = find(f"{uid}/")
    if uid in matches or not matches:
        return uid
    if len(matches) == 1:
        return matches[0]
    if len(in_run) == 1:
        return in_run[0]
    raise ValueError(f"uid: {uid!r} is ambiguous: {len(matches)} or more begin with it: {', '.join(matches)}")
