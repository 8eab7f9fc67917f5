"""`diff`: compare two step ranges, two runs, or two trajectories.

Invariant: A is the baseline; a change is B minus A.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Sequence
from typing import Any

from rollbook.cli.run import OpenRun, open_run, resolve_uid
from rollbook.core.terminal import (
    OK,
    block,
    columns,
    figure,
    has_color,
    percent,
    print_json,
    printable,
    shorten,
    styled,
    table,
    width,
    wrapped,
)


def diff(options: argparse.Namespace) -> int:
    """Compare two step ranges, two runs, or two trajectories."""
    from rollbook.inspect.comparison import Side, compare

    if options.words is not None:
        return _diff_trajectories(options)
    with contextlib.ExitStack() as stack:
        if options.other is None:
            first = other = stack.enter_context(
                open_run(options.path, spans=lambda source: _step_ranges(options, source.steps()))
            )
        else:
            first = stack.enter_context(open_run(options.path, spans=lambda source: _step_ranges(options)[:1]))
            other = stack.enter_context(open_run(options.other, spans=lambda source: _step_ranges(options)[1:]))
        sides = [
            Side(run.source, run.index, *steps)
            for run, steps in zip((first, other), _step_ranges(options, _training_steps(first)), strict=True)
        ]
        comparison = compare(*sides, texts=options.texts, limit=options.limit, solved=options.solved)
    for name, span_text, run in (("a", options.a, first), ("b", options.b, other)):
        if not comparison[name]["n"]:
            if span_text is None:
                raise ValueError(f"diff: {run.source.name} has no training records to compare")
            raise ValueError(f"diff: no training records in the steps of --{name}; `rollbook show` lists the steps")
    if options.json:
        print_json(comparison)
    else:
        _print_comparison(comparison)
    return OK


def _step_ranges(options: argparse.Namespace, steps: Sequence[int] = ()) -> list[tuple[int | None, int | None]]:
    """Return the steps of both sides; by default all of two runs, or the first and last quarter of one."""
    from rollbook.inspect.comparison import parse_steps

    ranges = [None if text is None else parse_steps(text) for text in (options.a, options.b)]
    defaults: list[tuple[int | None, int | None]] = [(None, None), (None, None)]
    if options.other is None and None in ranges:
        if len(steps) < 2:
            raise ValueError(f"diff: the run has {len(steps)} steps, expected two or more, or a second run")
        size = max(1, len(steps) // 4)
        defaults = [(steps[0], steps[size - 1]), (steps[-size], steps[-1])]
    return [chosen or default for chosen, default in zip(ranges, defaults, strict=True)]


def _training_steps(run: OpenRun) -> list[int]:
    from rollbook.inspect.sources import BookSource

    if isinstance(run.source, BookSource):
        return run.source.steps()
    return [step for (step,) in run.index.query("SELECT DISTINCT step FROM samples WHERE evaluation = 0 ORDER BY step")]


def _print_comparison(comparison: dict[str, Any]) -> None:
    for name in ("a", "b"):
        side = comparison[name]
        first, last = side["steps"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        text = f"{printable(side['name'])}, {steps}: {side['n']:,} trajectories, {side['groups']:,} groups"
        print(wrapped(f"{styled(name.upper(), 'bold')} {text}", 2))
    metrics = {name: metric for name, metric in comparison["metrics"].items() if metric is not None}
    rows = [
        [
            name,
            _format_mean(metric["a"]),
            _format_mean(metric["b"]),
            _format_change(metric),
            figure(metric["ks"]),
            _describe_p_value(metric["p"]),
        ]
        for name, metric in metrics.items()
    ]
    print()
    for line in table(("mean, 95%", "A", "B", "change", "KS", ""), rows, right=range(1, 5), optional=(4,)):
        print(line)
    rows = [
        [name, *(figure((metric[side] or {}).get(entry)) for entry in ("p25", "p50", "p75") for side in ("a", "b"))]
        for name, metric in metrics.items()
    ]
    print()
    for line in table(
        ("quantiles", "p25 A", "B", "median A", "B", "p75 A", "B"), rows, right=range(1, 7), optional=(1, 2, 5, 6)
    ):
        print(line)
    rows = [[name, percent(entry["a"]), percent(entry["b"])] for name, entry in comparison["shares"].items()]
    groups = comparison["prompts"]["groups"]
    for tag in groups["a"]:
        shares = [percent(groups[side][tag] / (sum(groups[side].values()) or 1)) for side in ("a", "b")]
        rows.append([f"groups with {tag} solved", *shares])
    rows += [
        [f"{kind}: {printable(name)}", figure(entry["a"]), figure(entry["b"])]
        for kind, key in (("reward", "parts"), ("metric", "logged"))
        for name, entry in comparison[key].items()
    ]
    print()
    for line in table(("", "A", "B"), rows, right=(1, 2)):
        print(line)
    if comparison["phrases"]:
        counts = comparison["texts"]
        print(styled(f"\nphrases, in {counts['a']} and {counts['b']} responses", "bold"))
        rows = [
            [printable(entry["phrase"]), percent(entry["share_a"]), percent(entry["share_b"]), figure(entry["reward"])]
            for entry in comparison["phrases"]
        ]
        for line in table(("phrase", "in A", "in B", "reward corr."), rows, right=(1, 2, 3)):
            print(line)
    prompts = comparison["prompts"]
    better, worse = f"{prompts['solved_count']:,} more solved", f"{prompts['broken_count']:,} fewer solved"
    text = (
        f"{prompts['common']:,} prompts in both (solved: reward >= {figure(prompts['solved_from'])}): "
        f"{styled(better, 'green')}, {styled(worse, 'red')}"
    )
    print(f"\n{wrapped(text)}")
    for sign, rows in (("+", prompts["newly_solved"]), ("-", prompts["newly_broken"])):
        for entry in rows:
            tags = f"{entry['solved_a']} → {entry['solved_b']}"
            text = f"{sign} {tags:11}  {figure(entry['a'])} → {figure(entry['b'])}  {printable(entry['gid_b'])}"
            print(f"{text}  {shorten(printable(entry['opening']), max(20, min(90, columns() - width(text) - 2)))}")


def _format_mean(side: dict[str, float] | None) -> str:
    """Format the mean of a side and the half-width of its confidence interval."""
    if side is None:
        return ""
    has_interval = side["low"] is not None and side["high"] is not None
    return figure(side["mean"]) + (f" ± {figure((side['high'] - side['low']) / 2)}" if has_interval else "")


def _format_change(metric: dict[str, Any]) -> str:
    if metric["shift"] is None:
        return ""
    sign = "+" if metric["shift"] > 0 else ""
    has_interval = metric["shift_low"] is not None
    half = f" ± {figure((metric['shift_high'] - metric['shift_low']) / 2)}" if has_interval else ""
    return f"{sign}{figure(metric['shift'])}{half}"


def _describe_p_value(p: float | None) -> str:
    return "" if p is None else "clear" if p < 0.001 else "likely" if p < 0.05 else ""


# --- two trajectories -----------------------------------------------------------------------------------------------


def _diff_trajectories(options: argparse.Namespace) -> int:
    from rollbook.inspect.comparison import read_responses

    uids, texts = [], []
    for path, name in zip((options.path, options.other or options.path), options.words, strict=True):
        with open_run(path, ids=[name]) as run:
            uids.append(resolve_uid(run.index, name))
            texts.append(next(iter(read_responses(run.source, uids[-1:])))[1])
    pieces = [re.findall(r"\s+|\w+|[^\w\s]", text) for text in texts]
    changes: list[dict[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, pieces[0], pieces[1], autojunk=False).get_opcodes():
        a_text, b_text = "".join(pieces[0][a:b]), "".join(pieces[1][c:d])
        # A space between two changes is part of the change.
        if changes and (changes[-1]["kind"] != "equal") and (kind != "equal" or a_text.isspace()):
            changes[-1] = {"kind": "replace", "a": changes[-1]["a"] + a_text, "b": changes[-1]["b"] + b_text}
        else:
            changes.append({"kind": kind, "a": a_text, "b": b_text})
    if options.json:
        print_json({"a": uids[0], "b": uids[1], "changes": changes})
        return OK
    print(styled(f"- {printable(uids[0])}", "red"))
    print(styled(f"+ {printable(uids[1])}", "green"))
    output = []
    for change in changes:
        if change["kind"] == "equal":
            output.append(block(change["a"]))
            continue
        for side, sign, color in (("a", "-", "red"), ("b", "+", "green")):
            if change[side]:
                text = block(change[side])
                output.append(styled(text, color) if has_color() else f"[{sign}{text}{sign}]")
    print("\n".join(map(wrapped, "".join(output).split("\n"))))
    return OK
