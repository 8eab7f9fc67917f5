"""`ls`, `sql` and `history`: what a book holds, what it answers, what happened to a record.

Invariant: `ls` asks the ledger and nothing else; neither pyarrow nor torch nor duckdb is loaded for it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from rollbook.cli.opened import LEDGER, book_at
from rollbook.core.addresses import POSTGRES
from rollbook.core.ids import step_of
from rollbook.core.terminal import OK, figure, print_json, print_table, printable, size, styled, when, wrapped


def ls(options: argparse.Namespace) -> int:
    """List a book's contents, the runs of a folder, or the samples that meet a condition."""
    if any(given is not None for given in (options.where, options.sort, options.limit)):
        return _samples(options)
    path = options.path if _is_shared(options.path) else book_at(os.path.expanduser(options.path))
    if _is_shared(path) or os.path.lexists(os.path.join(path, LEDGER)):
        told = _told(path)
        if options.json:
            print_json(told)
            return OK
        for name in (*_SUMMARY, "policy_version", "segments", "bytes", "made"):
            shown = size(told[name]) if name == "bytes" and told[name] is not None else told[name]
            if shown is not None:
                print(f"{name.replace('_', ' '):19}{printable(shown)}")
        if told["checkpoints"]:
            print(wrapped(f"{'checkpoints':19}{printable(', '.join(told['checkpoints']))}", 19))
        rows = [[each[name] for name in STATES] for each in told["consumers"]]
        if rows:
            print()
            print_table(STATES, rows)
        return OK
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: there is no such folder or file")
        return _rollouts(options)
    found = []
    for name, book in _runs(path):
        try:
            found.append({"name": name, **_told(book)})
        except (ValueError, OSError) as error:
            denied = isinstance(error, PermissionError)
            found.append({"name": name, "error": "permission denied" if denied else str(error)})
    if not found and any(os.scandir(path)):
        try:
            return _rollouts(options)
        except (ValueError, OSError):
            pass  # a folder of something else
    if options.json:
        print_json(found)
    elif not found:
        print("no runs or books here")
    else:
        names = ("steps", "records", "reward", "evaluation_reward", "written")
        rows = [
            [each["name"], *(figure(each.get(name)) for name in names[:-1]), each.get("error") or each.get("written")]
            for each in found
        ]
        print_table(("run", "steps", "records", "last reward", "evaluation", "written"), rows, right=range(1, 5))
    return OK


_DEPTH = 3
"""How many levels below a folder runs are looked for."""
_SUMMARY = ("steps", "records", "evaluation", "reward", "evaluation_reward", "written")


def _runs(folder: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """The name and the book of each run in a folder, by name; links are not followed."""
    with os.scandir(folder) as entries:
        inside = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != ".")
    for name in inside:
        path = os.path.join(folder, name)
        book = book_at(path)
        if os.path.lexists(os.path.join(book, LEDGER)):
            yield name, book
        elif depth > 1:
            try:
                yield from ((f"{name}/{below}", found) for below, found in _runs(path, depth - 1))
            except PermissionError:
                yield name, path  # whose ledger cannot be opened either


def _rollouts(options: argparse.Namespace) -> int:
    """Tell what saved rollouts hold."""
    from rollbook.cli.opened import opened

    with opened(options.path) as run:
        told = run.answers.run()
    known = {name: told[name] for name in ("kind", "records", "evaluation", "groups")}
    first, last = told["steps"]["first"], told["steps"]["last"]
    if options.json:
        print_json({**known, "steps": None if first is None else [first, last]})
        return OK
    for name, value in {**known, "steps": None if first is None else f"{first} to {last}"}.items():
        if value is not None:
            print(f"{name:15}{printable(value)}")
    return OK


def _samples(options: argparse.Namespace) -> int:
    from rollbook.cli.opened import opened
    from rollbook.cli.samples import sample_table

    with opened(options.path) as run:
        order, most = options.sort or "n", options.limit or 50
        found = run.answers.list(view="samples", filter=options.where, sort=order, limit=most)
    if options.json:
        print_json(found["rows"])
        return OK
    for line in sample_table(found["rows"], ("step",)):
        print(line)
    if found["total"] > len(found["rows"]):
        print(styled(f"{len(found['rows'])} of {found['total']:,}; --limit N shows more", "dim"))
    return OK


STATES = ("consumer", "waiting", "leased", "trained", "dropped")


def _is_shared(path: str) -> bool:
    return path.startswith(POSTGRES)


def _told(path: str) -> dict[str, Any]:
    """What the ledger says of the whole; nothing but the ledger's own modules is loaded."""
    if _is_shared(path):
        import rollbook

        with rollbook.open(path, "r") as book:
            told = _from_ledger(book.ledger)
            sizes = book.store.segments()
        return {**told, "segments": len(sizes), "bytes": sum(sizes.values())}
    from pathlib import Path

    from rollbook.book.ledger import SQLiteLedger

    ledger = SQLiteLedger(Path(path) / "ledger.sqlite", read_only=True)
    try:
        told = _from_ledger(ledger)
    finally:
        ledger.close()
    parts = os.path.join(path, "segments")
    sizes = {}
    if os.path.isdir(parts) and not os.path.islink(parts):
        with os.scandir(parts) as entries:
            sizes = {each.name: each.stat(follow_symlinks=False).st_size for each in entries}
    return {**told, "segments": len(sizes), "bytes": sum(sizes.values())}


def _from_ledger(ledger: Any) -> dict[str, Any]:
    import sqlite3

    from rollbook.book.ledger import LAYOUT

    try:
        with ledger.read() as tx:
            layout = tx.one("SELECT value FROM meta WHERE key = 'layout'")
            if layout is not None and layout[0] != str(LAYOUT):
                raise ValueError(f"the book has layout {layout[0]}, this version reads {LAYOUT}")
            meta = dict(tx.all("SELECT key, value FROM meta WHERE key IN ('policy_version', 'made') LIMIT 2"))
            tallies = tx.all("SELECT consumer, state, SUM(n) FROM tallies GROUP BY 1, 2")
            unseen = dict(tx.all("SELECT consumer, SUM(count) FROM inbox GROUP BY 1"))
            names = tx.all("SELECT id, name FROM consumers ORDER BY id LIMIT 1000")
            points = [name for (name,) in tx.all("SELECT name FROM checkpoints ORDER BY event LIMIT 1000")]
            logged = tx.all("SELECT step FROM events WHERE seq IS NULL AND kind = 'metrics' ORDER BY id DESC LIMIT 1")
            written = tx.all("SELECT time FROM events ORDER BY id DESC LIMIT 1")
            rewound: dict[int, int] = {}
            if tx.all("SELECT 1 FROM events WHERE seq IS NULL AND kind = 'rewound' LIMIT 1"):
                rewound = dict(
                    tx.all("SELECT evaluation, COUNT(*) FROM records WHERE gone = 'rewound' GROUP BY evaluation")
                )
            step, reward = _last(tx, 0)
            evaluation_reward = _last(tx, 1)[1]
    except sqlite3.Error as error:
        raise ValueError(f"the ledger cannot be read: {error}; `rollbook check` says more") from None
    count = {(consumer, state): n for consumer, state, n in tallies}
    return {
        "steps": logged[0][0] if logged else step,
        "records": count.get((0, "admitted"), 0) - rewound.get(0, 0),
        "evaluation": count.get((0, "evaluation"), 0) - rewound.get(1, 0),
        "reward": reward,
        "evaluation_reward": evaluation_reward,
        "written": when(written[0][0]) if written else None,
        "policy_version": meta.get("policy_version"),
        "made": when(meta.get("made")),
        "checkpoints": [str(name) for name in points],
        "consumers": [
            {
                "consumer": name,
                "waiting": sum(count.get((number, state), 0) for state in ("waiting", "cooling"))
                + unseen.get(number, 0),
                **{state: count.get((number, state), 0) for state in STATES[2:]},
            }
            for number, name in names
        ],
    }


def _last(tx: Any, evaluation: int) -> tuple[int | None, float | None]:
    """The training step and the mean reward of the last records, for training or for evaluation."""
    kept = f"evaluation = {evaluation} AND (gone IS NULL OR gone NOT IN ('deleted', 'rewound'))"
    rows = tx.all(f"SELECT batch, version_min FROM records WHERE {kept} ORDER BY seq DESC LIMIT 1")
    if not rows:
        return None, None
    mean = tx.one(f"SELECT AVG(reward) FROM records WHERE batch = ? AND {kept}", (rows[0][0],))[0]
    return step_of(*rows[0]), mean


def sql(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(book_at(options.path), "r") as book:
        table = book.sql(options.query, memory=options.memory, seconds=options.seconds).arrow()
    if options.json:
        print_json(table.to_pylist())
    else:
        print_table(table.column_names, ([*row.values()] for row in table.to_pylist()))
    return OK


def history(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(book_at(options.path), "r") as book:
        entries = book.history(_whole(book, options.uid))
    names = ("time", "kind", "reason", "consumer", "step", "lease", "detail")
    if options.json:
        print_json([{name: getattr(entry, name) for name in names} for entry in entries])
    else:
        rows = [[when(each.time), *(getattr(each, name) for name in names[1:-1])] for each in entries]
        told = [json.dumps(each.detail, default=str) if each.detail else None for each in entries]
        print_table(names, [[*row, detail] for row, detail in zip(rows, told, strict=True)])
    return OK


def _whole(book: Any, uid: str) -> str:
    """The uid that begins so, if there is but one; `3/12/0` is run 0 of a task before it is another beginning."""
    with book.ledger.read() as tx:
        for beginning in (uid, f"{uid}/", uid):
            last = beginning + "\U0010ffff"
            rows = tx.all("SELECT uid FROM records WHERE uid >= ? AND uid < ? ORDER BY uid LIMIT 9", (beginning, last))
            found = [str(each) for (each,) in rows if str(each).startswith(beginning)]
            if uid in found:
                return uid
            if len(found) == 1:
                return found[0]
    if found:
        raise ValueError(f"uid: got {uid!r}, which {len(found)} or more begin with: {', '.join(found)}")
    return uid
