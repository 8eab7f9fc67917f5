"""The command line: `rollbook ls | check | sql | history | export | import | compact`.

Invariant: what is not asked for is not loaded: help, and `ls`, which the ledger answers, import neither pyarrow, torch
nor duckdb. What a book or a file refuses is one line on the standard error and status 2, never a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

OK, FOUND, UNREADABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 well, 1 something was found, 2 it could not be done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     main(["ls", folder])
    no books here
    0
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has enough; Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, KeyError, ImportError) as error:
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"rollbook {options.command}: {said}", file=sys.stderr)
        return UNREADABLE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollbook",
        description="Look at books of experience, check them, and move records in and out.",
        epilog="A PATH is the folder of a book, or postgresql://user@host/database for one on a server.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Any, help: str, *, where: str = "a book: its folder, or postgresql://...") -> Any:
        made = commands.add_parser(name, help=help, description=help)
        made.add_argument("path", metavar="PATH", help=where)
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(run=run)
        return made

    command("ls", _ls, "List what a book holds, or the books in a folder.", where="a book, or a folder of books")
    made = command("check", _check, "Check everything a book promises; status 0: all is well, 1: not, 2: unreadable.")
    made.add_argument("--repair", action="store_true", help="mend what can be mended; what is changed is kept aside")
    made.add_argument("--quick", action="store_true", help="do not look at every byte of the data")
    made = command("sql", _sql, "Ask a question in SQL, of experiences, events, work, leases, revisions ...")
    made.add_argument("query", metavar="QUERY", help='such as "select tid, avg(reward) from experiences group by 1"')
    made.add_argument("--seconds", type=float, default=60.0, help="how long it may take (60)")
    made.add_argument("--memory", default="1GB", help="how much memory it may take (1GB)")
    made = command("history", _history, "Tell everything that happened to one record.")
    made.add_argument("uid", metavar="UID", help="the record's id")
    made = command("export", _export, "Write the records of a book to a file or folder.")
    made.add_argument("out", metavar="OUT", help="its name says the format: .parquet, .jsonl, .frames, .trxp, .hf")
    made.add_argument("--format", help="the format, if the name does not say it")
    made.add_argument("--evaluation", action="store_true", help="the records for evaluation, instead of the others")
    made.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    made = command("import", _import, "Bring the records of a file or folder into a book, which is made if it is new.")
    made.add_argument("source", metavar="IN", help="Parquet, JSONL, a HF dataset, frames, TRXP, Trinity's SQLite ...")
    made.add_argument("--format", help="the format, if it cannot be guessed")
    made.add_argument("--evaluation", action="store_true", help="for evaluation: kept beside, never trained on")
    made.add_argument("--skip", action="store_true", help="leave out rows that cannot be read")
    made.add_argument("--table", help="of a Trinity database that has several")
    made.add_argument("--tokenizer", metavar="PATH", help="for rollouts that are text alone (verl, TRL, OpenRLHF)")
    command("compact", _compact, "Remove bytes that nobody needs, and merge small segments.")
    return parser


# --- output ---------------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def _printable(value: Any) -> str:
    """A value on one line, without anything that a terminal would obey: a record's texts are anybody's."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _print_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    lines = [list(names), *([_printable(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# --- looking --------------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    path = options.path if _is_shared(options.path) else os.path.expanduser(options.path)
    if _is_shared(path) or os.path.lexists(os.path.join(path, "ledger.sqlite")):
        told = _told(path)
        if options.json:
            _print_json(told)
            return OK
        for name in ("records", "evaluation", "policy_version", "segments", "bytes", "made"):
            shown = _size(told[name]) if name == "bytes" and told[name] is not None else told[name]
            if shown is not None:
                print(f"{name.replace('_', ' '):15}{_printable(shown)}")
        if told["checkpoints"]:
            print(f"{'checkpoints':15}{_printable(', '.join(told['checkpoints']))}")
        rows = [[each[name] for name in _STATES] for each in told["consumers"]]
        if rows:
            print()
            _print_table(_STATES, rows)
        return OK
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: there is no such folder")
    found = []
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and os.path.lexists(os.path.join(entry.path, "ledger.sqlite")):
            try:
                found.append({"name": entry.name, **_told(entry.path)})
            except (ValueError, OSError) as error:
                found.append({"name": entry.name, "error": str(error)})
    if options.json:
        _print_json(found)
    elif not found:
        print("no books here")
    else:
        rows = [[each["name"], each.get("records"), _trained(each), each.get("error")] for each in found]
        _print_table(("book", "records", "trained", ""), rows)
    return OK


_STATES = ("consumer", "waiting", "leased", "trained", "dropped")


def _trained(told: dict[str, Any]) -> int | None:
    return told["consumers"][0]["trained"] if told.get("consumers") else None


def _is_shared(path: str) -> bool:
    return path.startswith(("postgresql://", "postgres://"))


def _told(path: str) -> dict[str, Any]:
    """What the ledger says of the whole; nothing but the ledger's own modules is loaded."""
    if _is_shared(path):
        import rollbook

        with rollbook.open(path, "r") as book:
            told = _from_ledger(book.ledger)
            sizes = book.shelf.segments()
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

    try:
        with ledger.read() as tx:
            meta = dict(tx.all("SELECT key, value FROM meta WHERE key IN ('policy_version', 'made') LIMIT 2"))
            tallies = tx.all("SELECT consumer, state, SUM(n) FROM tallies GROUP BY 1, 2")
            names = tx.all("SELECT id, name FROM consumers ORDER BY id LIMIT 1000")
            points = [name for (name,) in tx.all("SELECT name FROM checkpoints ORDER BY event LIMIT 1000")]
    except sqlite3.Error as error:
        raise ValueError(f"the ledger cannot be read: {error}; `rollbook check` says more") from None
    count = {(consumer, state): n for consumer, state, n in tallies}
    return {
        "records": count.get((0, "admitted"), 0),
        "evaluation": count.get((0, "evaluation"), 0),
        "policy_version": meta.get("policy_version"),
        "made": _when(meta.get("made")),
        "checkpoints": [str(name) for name in points],
        "consumers": [
            {
                "consumer": name,
                "waiting": count.get((number, "waiting"), 0) + count.get((number, "cooling"), 0),
                **{state: count.get((number, state), 0) for state in _STATES[2:]},
            }
            for number, name in names
        ],
    }


def _when(seconds: Any) -> str | None:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(seconds)))
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _sql(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(options.path, "r") as book:
        table = book.sql(options.query, memory=options.memory, seconds=options.seconds).arrow()
    if options.json:
        _print_json(table.to_pylist())
    else:
        _print_table(table.column_names, ([*row.values()] for row in table.to_pylist()))
    return OK


def _history(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(options.path, "r") as book:
        entries = book.history(options.uid)
    names = ("time", "kind", "reason", "consumer", "step", "lease", "detail")
    if options.json:
        _print_json([{name: getattr(entry, name) for name in names} for entry in entries])
    else:
        rows = [[_when(each.time), *(getattr(each, name) for name in names[1:-1])] for each in entries]
        told = [json.dumps(each.detail, default=str) if each.detail else None for each in entries]
        _print_table(names, [[*row, detail] for row, detail in zip(rows, told, strict=True)])
    return OK


# --- checking -------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    if options.repair and options.quick:
        raise ValueError("check: got --repair and --quick, expected one of them: a repair looks at every byte")
    if options.repair:
        from rollbook.book.repairing import repair

        report = repair(options.path)
    else:
        import rollbook

        with rollbook.open(options.path, "r") as book:
            report = book.check(deep=not options.quick)
    if options.json:
        _print_json(report.as_dict())
    else:
        _print_report(report)
    return OK if report.ok and not report.repairs else FOUND


def _print_report(report: Any) -> None:
    for each in report.repaired:
        print(f"repaired  {each.kind}: {_printable(each.where)}: {_printable(each.what)}")
    remedies: dict[str, str] = {}
    for each in report.findings:
        print(f"{each.severity:9} {each.kind}: {_printable(each.where)}: {_printable(each.what)}")
        remedies.setdefault(each.kind, each.remedy)
    for title, counts, listed in (
        ("repaired", report.repairs, report.repaired),
        ("found", report.counts, report.findings),
    ):
        for kind, count in counts.items():
            rest = count - sum(each.kind == kind for each in listed)
            if rest > 0:
                print(f"{title}: {rest} more of kind {kind}")
    for kind, remedy in remedies.items():
        print(f"help for {kind}: {remedy}")
    if report.aside is not None:
        print(f"as it was before: {report.aside}")
    looked = f"{report.records} records, {report.media} media, {report.segments} segments, {_size(report.bytes)}"
    print(f"{'ok' if report.ok else 'not well'}: {looked}")


# --- moving ---------------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(options.path, "r") as book:
        count = book.export(
            options.out, format=options.format, evaluation=options.evaluation, overwrite=options.overwrite
        )
    if options.json:
        _print_json({"exported": count})
    else:
        print(f"exported {count} records to {options.out}")
    return OK


def _import(options: argparse.Namespace) -> int:
    import rollbook

    if not os.path.lexists(options.source):
        raise FileNotFoundError(f"{options.source}: there is no such file")
    more = {name: getattr(options, name) for name in ("table", "tokenizer") if getattr(options, name) is not None}
    with rollbook.open(options.path) as book:
        done = book.import_(
            options.source,
            format=options.format,
            evaluation=options.evaluation,
            on_error="skip" if options.skip else "raise",
            **more,
        )
    if options.json:
        _print_json({name: getattr(done, name) for name in done.__slots__})
    else:
        print(f"admitted {done.admitted} records; {done.known} were known, of which {done.revised} got new fields")
    return OK


def _compact(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(options.path, "r+") as book:
        done = book.compact()
    if options.json:
        _print_json({name: getattr(done, name) for name in done.__slots__})
    else:
        freed = f"{_size(done.before)} became {_size(done.after)}"
        print(f"{freed}: {done.removed} segments removed, {done.records} records moved, {done.purged} records purged")
        for name, what in done.damaged.items():
            print(f"damaged: {name}: {_printable(what)}", file=sys.stderr)
    return FOUND if done.damaged else OK


if __name__ == "__main__":
    sys.exit(main())
