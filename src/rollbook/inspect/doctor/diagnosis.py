"""`examine`: read a run's samples once, run every check, and drop findings that others explain.

Invariant: nothing is changed, and torch is not imported; a temporary index is removed again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollbook.inspect.doctor.checks import CHECKS, EXPLAINED
from rollbook.inspect.doctor.findings import (
    TRIAGE,
    CheckResult,
    CheckStatus,
    Diagnosis,
    Finding,
    Thresholds,
    rank_findings,
    skipped,
)
from rollbook.inspect.doctor.samples import COLUMNS, Samples

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Source

_VERDICT = re.compile(r" Triggered (?:above|below|at|with)\b.*?\.(?=\s|$)", re.DOTALL)
"""The sentence of a finding that gives its threshold: with the thresholds of `triage` it would be wrong."""

Steps = int | str | tuple[int | None, int | None] | None


def examine(
    source: str | os.PathLike[str] | Book | Source | Index,
    *,
    steps: Steps = None,
    thresholds: Thresholds | Mapping[str, Any] | str | None = None,
    evaluation: bool = False,
) -> Diagnosis:
    """Check a run for common RL failure modes.

    Args:
        source: A path or URL of a book or of files, a book, a viewer's source, or an index that is up to date.
        steps: One step, (first, last) or "first-last", either of which may be left out.
        thresholds: Thresholds that differ from the defaults.
        evaluation: Examine the evaluation records instead of those that are trained on.

    >>> import rollbook
    >>> from rollbook import EID, Experience
    >>> book = rollbook.open("memory:")
    >>> made = [Experience(eid=EID(batch=str(i // 16), task=i // 4, run=i % 4), tokens=[1, i, 3], reward=float("nan"))
    ...         for i in range(64)]
    >>> _ = book.append(made)
    >>> diagnosis = examine(book)
    >>> [(finding.check, finding.severity, finding.count) for finding in diagnosis.findings]
    [('nans', 'medium', 64)]
    """
    chosen = Thresholds.of(thresholds)
    span = span_of(steps)
    with ExitStack() as stack:
        index, name = _indexed(source, stack)
        samples = read(index, span, evaluation)
    return diagnose(samples, chosen, evaluation=evaluation, source=name)


def _indexed(source: Any, stack: ExitStack) -> tuple[Index, str]:
    """Return an up-to-date index of the source, and its name; the stack closes what is opened here."""
    from rollbook.inspect.index import Index

    if isinstance(source, Index):
        return source, ""
    from rollbook.book.book import Book
    from rollbook.inspect.sources import load, open_source

    if isinstance(source, (str, os.PathLike)):
        opened = stack.enter_context(closing(open_source(source)))
    elif isinstance(source, Book):
        opened = open_source(source)
    elif hasattr(source, "refresh") and hasattr(source, "documents"):
        opened = source
    else:
        raise ValueError(f"source: got {type(source).__name__}, expected a path, a book, a viewer's source or an index")
    index = stack.enter_context(Index())
    load(opened, index)
    return index, opened.name


def triage(
    index: Index,
    *,
    steps: Steps = None,
    thresholds: Thresholds | Mapping[str, Any] | str | None = None,
    most: int = 12,
) -> list[Finding]:
    """Return what is worth a look, the worst first: the findings, and near misses (severity low), which say so."""
    samples = read(index, span_of(steps), False)
    surely = diagnose(samples, Thresholds.of(thresholds))
    named = {finding.check for finding in surely.findings} | {
        check.check for check in surely.checks if check.status == "explained"
    }
    maybe = diagnose(samples, TRIAGE)
    more = [
        replace(finding, severity="low", detail=_VERDICT.sub(" Not triggered yet.", finding.detail))
        for finding in maybe.findings
        if finding.check not in named
    ]
    return [*surely.findings, *rank_findings(more)][:most]


def diagnose(samples: Samples, t: Thresholds, *, evaluation: bool = False, source: str = "") -> Diagnosis:
    """Run the checks on samples."""
    judged = {
        name: check.run(samples, t)
        if check.evaluation or not evaluation
        else skipped("these are evaluation records, on which nothing is trained")
        for name, check in CHECKS.items()
    }
    findings = {name: outcome.finding for name, outcome in judged.items() if outcome.finding is not None}
    causes = {
        name: next(
            (
                cause
                for cause, holds in EXPLAINED[name].items()
                if cause in findings and holds(samples, t, findings[cause])
            ),
            None,
        )
        for name in findings
        if name in EXPLAINED
    }
    return Diagnosis(
        source,
        rank_findings(finding for name, finding in findings.items() if causes.get(name) is None),
        tuple(_status_of(name, outcome, causes.get(name)) for name, outcome in judged.items()),
        int(samples.there.sum()),
        (int(samples.steps[0]), int(samples.steps[-1])) if len(samples.steps) else None,
        evaluation,
        int(samples.chosen.sum()),
    )


def _status_of(name: str, judgement: CheckResult, cause: str | None) -> CheckStatus:
    if cause is not None:
        return CheckStatus(name, "explained", f"follows from {cause}: {judgement.why}")
    return CheckStatus(name, judgement.status, judgement.why)


def read(index: Index, span: tuple[int | None, int | None], evaluation: bool) -> Samples:
    """Read the samples of an index that count; with the evaluation samples beside those for training."""
    from rollbook.inspect.index import COUNTS

    first, last = span
    conditions, values = ["evaluation = ?", COUNTS], [int(evaluation)]
    if first is not None:
        conditions.append("step >= ?")
        values.append(first)
    if last is not None:
        conditions.append("step <= ?")
        values.append(last)
    rows = index.query(f"SELECT {', '.join(COLUMNS)} FROM samples WHERE {' AND '.join(conditions)} ORDER BY n", values)
    columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
    mixed = index.query("SELECT 1 FROM samples WHERE evaluation = ? LIMIT 1", [int(not evaluation)])
    apart = "" if not mixed else "evaluation" if evaluation else "not evaluation"
    evaluations = read(index, span, True) if mixed and not evaluation else None
    return Samples(dict(zip(COLUMNS, columns, strict=True)), apart, evaluations)


_SPAN = re.compile(r"\s*(\d+)?\s*(?:(-|\.\.|:)\s*(\d+)?)?\s*")


def span_of(steps: Steps) -> tuple[int | None, int | None]:
    """Parse `steps` to a first and a last step.

    >>> span_of("12-40"), span_of("12-"), span_of("7"), span_of(7), span_of((None, 9)), span_of(None)
    ((12, 40), (12, None), (7, 7), (7, 7), (None, 9), (None, None))
    """
    if steps is None:
        return None, None
    if isinstance(steps, str):
        match = _SPAN.fullmatch(steps)
        if match is None or not any(part.isdigit() for part in steps):
            raise ValueError(f"steps: got {steps!r}, expected a step, 'first-last', 'first-' or '-last'")
        first, dash, last = match.groups()
        low = int(first) if first is not None else None
        high = int(last) if last is not None else None
        return (low, high) if dash else (low, low)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return steps, steps
    if isinstance(steps, tuple) and len(steps) == 2 and all(part is None or type(part) is int for part in steps):
        return steps
    raise ValueError(f"steps: got {steps!r}, expected a step, a pair (first, last) or text such as '12-40'")
