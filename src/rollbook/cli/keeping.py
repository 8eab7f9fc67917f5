"""`check`, `export`, `import` and `compact`: whether a book is well, and moving records in and out.

Invariant: nothing is changed that the command does not name: `check` alone reads, `export` writes over no file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

from rollbook.cli.opened import LEDGER, book_at
from rollbook.core.terminal import FOUND, OK, print_json, printable, size, wrapped


def check(options: argparse.Namespace) -> int:
    if options.repair and options.quick:
        raise ValueError("check: got --repair and --quick, expected one of them: a repair looks at every byte")
    if options.offer and not options.repair:
        raise ValueError("check: got --offer, expected --repair with it: checking alone changes nothing")
    if options.repair:
        from rollbook.book.recovery import repair

        report = repair(book_at(options.path), offer=options.offer)
    else:
        import rollbook

        with rollbook.open(book_at(options.path), "r") as book:
            report = book.check(deep=not options.quick)
    if options.json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    return OK if report.ok and not report.repairs else FOUND


def _print_report(report: Any) -> None:
    for each in report.repaired:
        print(wrapped(f"repaired  {each.kind}: {printable(each.where)}: {printable(each.what)}", 10))
    remedies: dict[str, str] = {}
    for each in report.findings:
        print(wrapped(f"{each.severity:9} {each.kind}: {printable(each.where)}: {printable(each.what)}", 10))
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
        print(wrapped(f"help for {kind}: {remedy}", 2))
    if report.aside is not None:
        print(f"as it was before: {report.aside}")
    looked = f"{report.records} records, {report.media} media, {report.segments} segments, {size(report.bytes)}"
    print(f"{'ok' if report.ok else 'not well'}: {looked}")


def export(options: argparse.Namespace) -> int:
    """Write records to a file, or some of them as a page."""
    if not options.overwrite and os.path.lexists(options.out):
        raise FileExistsError(f"{options.out}: is there already; --overwrite replaces it")
    folder = os.path.dirname(os.path.abspath(options.out))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{options.out}: there is no folder {folder}")
    if options.format == "html" or (options.format is None and options.out.endswith((".html", ".htm"))):
        return _page(options)
    given = [f"--{name.replace('_', '-')}" for name in _PAGE if getattr(options, name)]
    given += ["--theme"] * (options.theme != "auto") + ["--max-mb"] * (options.max_mb is not None)
    if given:
        raise ValueError(f"{', '.join(given)}: for HTML pages alone, expected OUT to end in .html, or --format html")
    import rollbook
    from rollbook.book import export_records

    with rollbook.open(book_at(options.path), "r") as book:
        count = export_records(
            book, options.out, format=options.format, evaluation=options.evaluation, overwrite=options.overwrite
        )
    if options.json:
        print_json({"exported": count})
    else:
        print(f"exported {count} records to {options.out}")
    return OK


_PAGE = ("id", "where", "redact", "no_images", "title", "tokenizer")


def _page(options: argparse.Namespace) -> int:
    from rollbook.cli.opened import opened, uid_of
    from rollbook.inspect.single import write_html

    if bool(options.id) == bool(options.where):
        raise ValueError("export: an HTML page shows trajectories: expected --id ID (one or more), or --where FILTER")
    with opened(options.path, options.tokenizer, ids=options.id or None) as run:
        chosen: dict[str, Any] = {"filter": options.where}
        if options.id:
            groups = [i for i in options.id if run.index.query("SELECT 1 FROM samples WHERE gid = ? LIMIT 1", [i])]
            if groups and len(options.id) > 1:
                raise ValueError(f"--id: got {len(options.id)} of which {groups[0]!r} is a group, expected it alone")
            chosen = {"gid": groups[0]} if groups else {"uids": [uid_of(run.index, each) for each in options.id]}
        done = write_html(
            options.out,
            run.source,
            run.answers,
            **chosen,
            title=options.title,
            redact=options.redact,
            images=not options.no_images,
            max_mb=options.max_mb,
            theme=options.theme,
        )
    told = {name: getattr(done, name) for name in ("trajectories", "images", "redactions", "size")}
    if options.json:
        print_json(told)
    else:
        print(
            f"wrote {options.out}: {done.trajectories} trajectories, {done.images} pictures, {size(done.size)}"
            + (f", {done.redactions} blacked out" if options.redact else "")
        )
    return OK


def import_(options: argparse.Namespace) -> int:
    if not os.path.lexists(options.source):
        raise FileNotFoundError(f"{options.source}: there is no such file")
    path = book_at(options.path)
    folder = os.path.abspath(os.path.expanduser(path))
    if path == "memory:" or "://" in path or os.path.lexists(os.path.join(folder, LEDGER)):
        done = _import_into(path, options)
    elif os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise FileExistsError(f"{path}: exists and is not a book, expected a book or a new folder")
    else:
        done = _import_as(folder, options)
    if options.json:
        print_json({name: getattr(done, name) for name in done.__slots__})
    else:
        print(f"admitted {done.admitted} records; {done.known} were known, of which {done.revised} got new fields")
    return OK


def _import_as(folder: str, options: argparse.Namespace) -> Any:
    """Import into a new book, which appears when all of it is there."""
    above = os.path.dirname(folder)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    partial = os.path.join(above, f".{os.path.basename(folder)}.{os.urandom(8).hex()}.importing")
    try:
        done = _import_into(partial, options)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return done


def _import_into(path: str, options: argparse.Namespace) -> Any:
    import rollbook
    from rollbook.book import import_records

    more = {name: getattr(options, name) for name in ("table", "tokenizer") if getattr(options, name) is not None}
    with rollbook.open(path) as book:
        try:
            return import_records(
                book,
                options.source,
                format=options.format,
                evaluation=options.evaluation,
                on_error="skip" if options.skip else "raise",
                **more,
            )
        except ValueError as error:
            if options.tokenizer is None and str(error).startswith("tokenizer: got None"):
                raise ValueError(f"{error}: --tokenizer PATH") from error
            raise


def compact(options: argparse.Namespace) -> int:
    import rollbook

    with rollbook.open(book_at(options.path), "r+") as book:
        done = book.compact()
    if options.json:
        print_json({name: getattr(done, name) for name in done.__slots__})
    else:
        freed = f"{size(done.before)} became {size(done.after)}"
        print(f"{freed}: {done.removed} segments removed, {done.records} records moved, {done.purged} records purged")
        for name, what in done.damaged.items():
            print(f"damaged: {name}: {printable(what)}", file=sys.stderr)
        for name, reason in done.pending.items():
            print(wrapped(f"pending: {name} holds deleted or redacted bytes; {reason}", 2), file=sys.stderr)
    return FOUND if done.damaged or done.pending else OK
