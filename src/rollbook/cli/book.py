"""`check`, `export`, `import` and `compact`: check a book, and move records in and out.

Invariant: `check` without `--repair` only reads, and `export` overwrites a file only with `--overwrite`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from rollbook.cli.run import LEDGER, resolve_book
from rollbook.core.terminal import FOUND, OK, print_json, printable, size, wrapped

if TYPE_CHECKING:
    from rollbook.book.check import Report


def check(options: argparse.Namespace) -> int:
    """Check a book, and with `--repair` repair it."""
    if options.repair and options.quick:
        raise ValueError("check: --repair and --quick exclude each other: a repair reads all data")
    if options.offer and not options.repair:
        raise ValueError("check: --offer requires --repair")
    if options.repair:
        from rollbook.book.recovery import repair

        report = repair(resolve_book(options.path), offer=options.offer)
    else:
        from rollbook.book import open as open_book

        with open_book(resolve_book(options.path), "r") as book:
            report = book.check(deep=not options.quick)
    if options.json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    return OK if report.ok and not report.repairs else FOUND


def _print_report(report: Report) -> None:
    for finding in report.repaired:
        print(wrapped(f"repaired  {finding.kind}: {printable(finding.subject)}: {printable(finding.description)}", 10))
    remedies: dict[str, str] = {}
    for finding in report.findings:
        print(
            wrapped(
                f"{finding.severity:9} {finding.kind}: {printable(finding.subject)}: {printable(finding.description)}",
                10,
            )
        )
        remedies.setdefault(finding.kind, finding.remedy)
    for title, counts, listed in (
        ("repaired", report.repairs, report.repaired),
        ("found", report.counts, report.findings),
    ):
        for kind, count in counts.items():
            rest = count - sum(finding.kind == kind for finding in listed)
            if rest > 0:
                print(f"{title}: {rest} more of kind {kind}")
    for kind, remedy in remedies.items():
        print(wrapped(f"help for {kind}: {remedy}", 2))
    if report.backup is not None:
        print(f"copy of the previous files: {report.backup}")
    totals = f"{report.records} records, {report.media} media, {report.segments} segments, {size(report.bytes)}"
    print(f"{'ok' if report.ok else 'problems found'}: {totals}")


def export(options: argparse.Namespace) -> int:
    """Export records to a file, or a selection as an HTML page."""
    if not options.overwrite and os.path.lexists(options.out):
        raise FileExistsError(f"{options.out}: already exists; --overwrite replaces it")
    folder = os.path.dirname(os.path.abspath(options.out))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{options.out}: no such folder: {folder}")
    if options.format == "html" or (options.format is None and options.out.endswith((".html", ".htm"))):
        return _export_html(options)
    misplaced = [f"--{name.replace('_', '-')}" for name in _HTML_OPTIONS if getattr(options, name)]
    misplaced += ["--theme"] * (options.theme != "auto") + ["--max-mb"] * (options.max_mb is not None)
    if misplaced:
        raise ValueError(f"{', '.join(misplaced)}: only for HTML pages (OUT ending in .html, or --format html)")
    from rollbook.book import export_records
    from rollbook.book import open as open_book

    with open_book(resolve_book(options.path), "r") as book:
        count = export_records(
            book, options.out, format=options.format, evaluation=options.evaluation, overwrite=options.overwrite
        )
    if options.json:
        print_json({"exported": count})
    else:
        print(f"exported {count} records to {options.out}")
    return OK


_HTML_OPTIONS = ("id", "where", "redact", "no_images", "title", "tokenizer")


def _export_html(options: argparse.Namespace) -> int:
    from rollbook.cli.run import open_run, resolve_uid
    from rollbook.inspect.html_export import write_html

    if bool(options.id) == bool(options.where):
        raise ValueError("export: no trajectories selected, expected --id ID (one or more) or --where FILTER")
    with open_run(options.path, options.tokenizer, ids=options.id or None) as run:
        selection: dict[str, Any] = {"filter": options.where}
        if options.id:
            groups = [i for i in options.id if run.index.query("SELECT 1 FROM samples WHERE gid = ? LIMIT 1", [i])]
            if groups and len(options.id) > 1:
                raise ValueError(f"--id: {groups[0]!r} is a group, expected no other ids")
            selection = {"gid": groups[0]} if groups else {"uids": [resolve_uid(run.index, uid) for uid in options.id]}
        export = write_html(
            options.out,
            run.source,
            run.answers,
            **selection,
            title=options.title,
            redact=options.redact,
            images=not options.no_images,
            max_mb=options.max_mb,
            theme=options.theme,
        )
    counts = {name: getattr(export, name) for name in ("trajectories", "images", "redactions", "size")}
    if options.json:
        print_json(counts)
    else:
        print(
            f"wrote {options.out}: {export.trajectories} trajectories, {export.images} images, {size(export.size)}"
            + (f", {export.redactions} redactions" if options.redact else "")
        )
    return OK


def import_(options: argparse.Namespace) -> int:
    """Import records into a book."""
    if not os.path.lexists(options.source):
        raise FileNotFoundError(f"{options.source}: no such file")
    path = resolve_book(options.path)
    folder = os.path.abspath(os.path.expanduser(path))
    if path == "memory:" or "://" in path or os.path.lexists(os.path.join(folder, LEDGER)):
        result = _import_into(path, options)
    elif os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise FileExistsError(f"{path}: exists and is not a book, expected a book or a new folder")
    else:
        result = _import_into_new(folder, options)
    if options.json:
        print_json({name: getattr(result, name) for name in result.__slots__})
    else:
        print(
            f"imported {result.admitted} records; {result.existing} already present, {result.revised} of them updated"
        )
    return OK


def _import_into_new(folder: str, options: argparse.Namespace) -> Any:
    """Import into a temporary book and move it to `folder` when it is complete."""
    parent = os.path.dirname(folder)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    partial = os.path.join(parent, f".{os.path.basename(folder)}.{os.urandom(8).hex()}.importing")
    try:
        result = _import_into(partial, options)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return result


def _import_into(path: str, options: argparse.Namespace) -> Any:
    from rollbook.book import import_records
    from rollbook.book import open as open_book

    extra = {name: getattr(options, name) for name in ("table", "tokenizer") if getattr(options, name) is not None}
    with open_book(path) as book:
        try:
            return import_records(
                book,
                options.source,
                format=options.format,
                evaluation=options.evaluation,
                on_error="skip" if options.skip else "raise",
                **extra,
            )
        except ValueError as error:
            if options.tokenizer is None and str(error).startswith("tokenizer: got None"):
                raise ValueError(f"{error}: --tokenizer PATH") from error
            raise


def compact(options: argparse.Namespace) -> int:
    """Compact a book."""
    from rollbook.book import open as open_book

    with open_book(resolve_book(options.path), "r+") as book:
        result = book.compact()
    if options.json:
        print_json({name: getattr(result, name) for name in result.__slots__})
    else:
        freed = f"{size(result.before)} -> {size(result.after)}"
        print(
            f"{freed}: {result.removed} segments removed, {result.records} records moved, "
            f"{result.purged} records purged"
        )
        for name, damage in result.damaged.items():
            print(f"damaged: {name}: {printable(damage)}", file=sys.stderr)
        for name, reason in result.pending.items():
            print(wrapped(f"pending: {name} has deleted or redacted data; {reason}", 2), file=sys.stderr)
    return FOUND if result.damaged or result.pending else OK
