"""`diff`: two spans of steps, two runs, or two trajectories, side by side.

Invariant: the first side is the baseline; a change is the second less the first.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Sequence
from typing import Any

from rollbook.cli.run import Opened, opened, uid_of
from rollbook.core.terminal import (
    OK,
    block,
    coloured,
    columns,
    cut,
    figure,
    percent,
    print_json,
    printable,
    styled,
    table,
    width,
    wrapped,
)


def diff(options: argparse.Namespace) -> int:
    """Compare what the command names."""
    from rollbook.inspect.comparison import Side, compare

    if options.words is not None:
        return _words(options)
    with contextlib.ExitStack() as stack:
        if options.other is None:
            one = other = stack.enter_context(
                opened(options.path, spans=lambda source: _spans(options, source.steps()))
            )
        else:
            one = stack.enter_context(opened(options.path, spans=lambda source: _spans(options)[:1]))
            other = stack.enter_context(opened(options.other, spans=lambda source: _spans(options)[1:]))
        sides = [
            Side(run.source, run.index, *each)
            for run, each in zip((one, other), _spans(options, _steps(one)), strict=True)
        ]
        found = compare(*sides, texts=options.texts, limit=options.limit, solved=options.solved)
    for name, asked, run in (("a", options.a, one), ("b", options.b, other)):
        if not found[name]["n"]:
            if asked is None:
                raise ValueError(f"diff: {run.source.name} has no records for training, expected some to compare")
            raise ValueError(f"diff: there is nothing in the steps of --{name}, expected such as `rollbook show` lists")
    if options.json:
        print_json(found)
    else:
        _print(found)
    return OK


def _spans(options: argparse.Namespace, steps: Sequence[int] = ()) -> list[tuple[int | None, int | None]]:
    """The steps of both sides, where they are not named: of two runs all, of one its first and its last quarter."""
    from rollbook.inspect.comparison import span

    named = [None if text is None else span(text) for text in (options.a, options.b)]
    others: list[tuple[int | None, int | None]] = [(None, None), (None, None)]
    if options.other is None and None in named:
        if len(steps) < 2:
            raise ValueError(
                f"diff: the run has {len(steps)} steps, expected two or more, or another run to compare with"
            )
        size = max(1, len(steps) // 4)
        others = [(steps[0], steps[size - 1]), (steps[-size], steps[-1])]
    return [each or other for each, other in zip(named, others, strict=True)]


def _steps(run: Opened) -> list[int]:
    from rollbook.inspect.sources import BookSource

    if isinstance(run.source, BookSource):
        return run.source.steps()
    return [step for (step,) in run.index.query("SELECT DISTINCT step FROM samples WHERE evaluation = 0 ORDER BY step")]


def _print(found: dict[str, Any]) -> None:
    for name in ("a", "b"):
        side = found[name]
        first, last = side["steps"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        told = f"{printable(side['name'])}, {steps}: {side['n']:,} trajectories, {side['groups']:,} groups"
        print(wrapped(f"{styled(name.upper(), 'bold')} {told}", 2))
    metrics = {name: metric for name, metric in found["metrics"].items() if metric is not None}
    rows = [
        [
            name,
            _interval(metric["a"]),
            _interval(metric["b"]),
            _change(metric),
            figure(metric["ks"]),
            _sure(metric["p"]),
        ]
        for name, metric in metrics.items()
    ]
    print()
    for line in table(("mean, 95%", "A", "B", "change", "KS", ""), rows, right=range(1, 5), optional=(4,)):
        print(line)
    rows = [
        [name, *(figure((metric[side] or {}).get(each)) for each in ("p25", "p50", "p75") for side in ("a", "b"))]
        for name, metric in metrics.items()
    ]
    print()
    for line in table(
        ("quantiles", "p25 A", "B", "median A", "B", "p75 A", "B"), rows, right=range(1, 7), optional=(1, 2, 5, 6)
    ):
        print(line)
    rows = [[name, percent(each["a"]), percent(each["b"])] for name, each in found["shares"].items()]
    groups = found["prompts"]["groups"]
    for tag in groups["a"]:
        shares = [percent(groups[side][tag] / (sum(groups[side].values()) or 1)) for side in ("a", "b")]
        rows.append([f"groups with {tag} solved", *shares])
    rows += [
        [f"{kind}: {printable(name)}", figure(each["a"]), figure(each["b"])]
        for kind, key in (("reward", "parts"), ("metric", "logged"))
        for name, each in found[key].items()
    ]
    print()
    for line in table(("", "A", "B"), rows, right=(1, 2)):
        print(line)
    if found["phrases"]:
        told = found["texts"]
        print(styled(f"\nphrases, in {told['a']} and {told['b']} responses", "bold"))
        rows = [
            [printable(each["phrase"]), percent(each["share_a"]), percent(each["share_b"]), figure(each["reward"])]
            for each in found["phrases"]
        ]
        for line in table(("phrase", "in A", "in B", "goes with reward"), rows, right=(1, 2, 3)):
            print(line)
    prompts = found["prompts"]
    better, worse = f"{prompts['solved_count']:,} more solved", f"{prompts['broken_count']:,} less solved"
    told = (
        f"{prompts['common']:,} prompts are in both; a sample is solved from a reward of "
        f"{figure(prompts['solved_from'])}: {styled(better, 'green')}, {styled(worse, 'red')}"
    )
    print(f"\n{wrapped(told)}")
    for sign, rows in (("+", prompts["newly_solved"]), ("-", prompts["newly_broken"])):
        for each in rows:
            tags = f"{each['solved_a']} → {each['solved_b']}"
            told = f"{sign} {tags:11}  {figure(each['a'])} → {figure(each['b'])}  {printable(each['gid_b'])}"
            print(f"{told}  {cut(printable(each['opening']), max(20, min(90, columns() - width(told) - 2)))}")


def _interval(side: dict[str, float] | None) -> str:
    """A side's mean and half the width of its interval."""
    if side is None:
        return ""
    known = side["low"] is not None and side["high"] is not None
    return figure(side["mean"]) + (f" ± {figure((side['high'] - side['low']) / 2)}" if known else "")


def _change(metric: dict[str, Any]) -> str:
    if metric["shift"] is None:
        return ""
    sign = "+" if metric["shift"] > 0 else ""
    known = metric["shift_low"] is not None
    half = f" ± {figure((metric['shift_high'] - metric['shift_low']) / 2)}" if known else ""
    return f"{sign}{figure(metric['shift'])}{half}"


def _sure(chance: float | None) -> str:
    return "" if chance is None else "clear" if chance < 0.001 else "likely" if chance < 0.05 else ""


# --- two trajectories -----------------------------------------------------------------------------------------------


def _words(options: argparse.Namespace) -> int:
    from rollbook.inspect.comparison import responses

    uids, texts = [], []
    for path, name in zip((options.path, options.other or options.path), options.words, strict=True):
        with opened(path, ids=[name]) as run:
            uids.append(uid_of(run.index, name))
            texts.append(next(iter(responses(run.source, uids[-1:])))[1])
    pieces = [re.findall(r"\s+|\w+|[^\w\s]", text) for text in texts]
    changes: list[dict[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, pieces[0], pieces[1], autojunk=False).get_opcodes():
        one_side, other_side = "".join(pieces[0][a:b]), "".join(pieces[1][c:d])
        # A space that two changes have between them is no part that stayed.
        if changes and (changes[-1]["kind"] != "equal") and (kind != "equal" or one_side.isspace()):
            changes[-1] = {"kind": "replace", "a": changes[-1]["a"] + one_side, "b": changes[-1]["b"] + other_side}
        else:
            changes.append({"kind": kind, "a": one_side, "b": other_side})
    if options.json:
        print_json({"a": uids[0], "b": uids[1], "changes": changes})
        return OK
    print(styled(f"- {printable(uids[0])}", "red"))
    print(styled(f"+ {printable(uids[1])}", "green"))
    made = []
    for change in changes:
        if change["kind"] == "equal":
            made.append(block(change["a"]))
            continue
        for side, sign, colour in (("a", "-", "red"), ("b", "+", "green")):
            if change[side]:
                text = block(change[side])
                made.append(styled(text, colour) if coloured() else f"[{sign}{text}{sign}]")
    print("\n".join(map(wrapped, "".join(made).split("\n"))))
    return OK
