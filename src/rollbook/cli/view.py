"""`view` and `doctor`: the web viewer, and checks for common failure modes.

Invariant: both only read, unless `--annotate` is given.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from rollbook.core.terminal import OK, columns, print_json, printable, styled, table, wrapped

if TYPE_CHECKING:
    from rollbook.inspect.doctor import Thresholds

_STYLES = {"high": "red", "medium": "yellow", "low": "blue"}


def view(options: argparse.Namespace) -> int:
    """Serve the viewer until interrupted."""
    from rollbook.inspect.server import PORT, serve

    serve(
        options.path,
        host=options.host,
        port=PORT if options.port is None else options.port,
        socket=options.socket,
        # An environment variable, since other users of the machine can read command lines.
        token=options.token or os.environ.get("ROLLBOOK_TOKEN") or None,
        open_browser=options.open,
        tokenizer=options.tokenizer,
        trusted_hosts=options.trusted_host,
        annotate=options.annotate,
        unsafe_allow_unauthenticated=options.unsafe_allow_unauthenticated,
        json=options.json,
    )
    return OK


def doctor(options: argparse.Namespace) -> int:
    """Check a run for common RL failure modes."""
    from rollbook.inspect.doctor import Thresholds, examine, format_report

    thresholds = Thresholds.of(*options.set)
    if options.thresholds:
        return _thresholds(thresholds, options)
    from rollbook.inspect.comparison import span

    steps = None if options.steps is None else span(options.steps)
    diagnosis = examine(options.path, steps=steps, thresholds=thresholds, evaluation=options.evaluation)
    if not diagnosis.records and steps is not None:
        raise ValueError(f"--steps: no records in steps {options.steps}")
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        for line in format_report(diagnosis, width=min(columns(), 120), verbose=options.verbose):
            first = line.split(" ", 1)[0]
            text = wrapped(line, len(line) - len(line.lstrip(" ")) + 2)
            print(styled(text, "bold", _STYLES[first]) if first in _STYLES else text)
        if not diagnosis.records and not options.evaluation:
            print(wrapped("\nThere are no training records; use --evaluation to check evaluation records."))
    return diagnosis.status(options.fail_on)


def _thresholds(thresholds: Thresholds, options: argparse.Namespace) -> int:
    from rollbook.inspect.doctor.checks import threshold_docs

    rows = [(name, getattr(thresholds, name), meaning) for name, meaning in threshold_docs().items()]
    if options.json:
        print_json([{"name": name, "value": value, "meaning": meaning} for name, value, meaning in rows])
    else:
        for line in table(("threshold", "value", "meaning"), [[n, printable(v), printable(m)] for n, v, m in rows]):
            print(line)
    return OK
