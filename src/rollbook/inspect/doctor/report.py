"""Reports: a diagnosis as lines of text, and the table of illnesses as rows and as a page of documentation.

Invariant: text that came with the records is escaped, so that no id or name can move a terminal's cursor; there is no
colour here, each line's first word is its severity.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from rollbook.inspect.doctor.findings import Diagnosis
from rollbook.inspect.doctor.illnesses import ILLNESSES
from rollbook.inspect.doctor.thresholds import Thresholds

_SHOWN = 6
"""Ids that are printed; `as_dict` has all."""


def plain(text: str) -> str:
    """Text with everything but printable characters and spaces escaped.

    >>> plain("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def lines(diagnosis: Diagnosis, *, width: int = 100, verbose: bool = False) -> list[str]:
    """A diagnosis for a terminal: each finding with its numbers, ids and advice, then what could not be judged.

    A finding begins with its severity and a space; what belongs to it is indented by two. `verbose`: what is well, too.
    """
    span = "" if diagnosis.steps is None else f", steps {diagnosis.steps[0]} to {diagnosis.steps[1]}"
    kind = "evaluation records" if diagnosis.evaluation else "records"
    beside = f" ({diagnosis.left_out:,} that were kept for what they show are left out)" if diagnosis.left_out else ""
    checks = f"; {diagnosis.judged} of {len(diagnosis.examined)} checks could be made"
    made = [f"{plain(diagnosis.source) or 'run'}: {diagnosis.records:,} {kind}{span}{beside}{checks}"]
    for each in diagnosis.findings:
        first, last = each.steps
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        made += ["", f"{each.severity} {plain(each.title)} [{each.illness}]"]
        made += _wrapped(f"{plain(each.detail)} ({where}, {each.count:,} records)", width)
        made += _wrapped(f"What to do: {plain(each.advice)}", width)
        if each.filter:
            made.append(f"  filter: {plain(each.filter)}")
        ids = [plain(uid) for uid in each.uids[:_SHOWN]]
        more = f" and {len(each.uids) - _SHOWN} more" if len(each.uids) > _SHOWN else ""
        if ids:
            made.append(f"  look at: {' '.join(ids)}{more}")
    by = {status: [each for each in diagnosis.examined if each.status == status] for status in _STATUSES}
    if not diagnosis.findings:
        made += ["", f"No problem found by {diagnosis.judged} of {len(diagnosis.examined)} checks."]
    if by["explained"]:
        made += ["", "Explained by the above:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["explained"]]
    if by["not judged"]:
        made += ["", "Could not be judged:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["not judged"]]
    if verbose and by["ok"]:
        made += ["", "Well:"]
        made += [f"  {each.illness}: {plain(each.why)}" for each in by["ok"]]
    return made


_STATUSES = ("ok", "found", "explained", "not judged")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)


@cache
def meanings() -> dict[str, str]:
    """What each threshold means, from the text under it.

    >>> meanings()["stale"]
    'Share of samples that are stale.'
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(Thresholds))).body
    found = {}
    if isinstance(tree, ast.ClassDef):
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def table() -> Iterator[dict[str, Any]]:
    """One row an illness: id, title, what, how, thresholds (name, default, meaning), cure."""
    defaults = Thresholds()
    for illness in ILLNESSES.values():
        yield {
            "id": illness.id,
            "title": illness.title,
            "what": illness.what,
            "how": illness.how,
            "thresholds": [
                {"name": name, "default": getattr(defaults, name), "meaning": meanings()[name]}
                for name in illness.thresholds
            ],
            "cure": illness.cure,
            "evaluation": illness.evaluation,
        }


def page() -> str:
    """The illnesses and the thresholds as Markdown."""
    made = []
    for row in table():
        decided = ", ".join(f"`{each['name']}` = {each['default']:g}" for each in row["thresholds"])
        made += [
            f"### {row['title']} (`{row['id']}`)",
            "",
            row["what"],
            "",
            f"*Found by:* {row['how']}",
            "",
            f"*Thresholds:* {decided}" + ("" if row["evaluation"] else ". Not judged on evaluation records."),
            "",
            f"*What to do:* {row['cure']}",
            "",
        ]
    made += ["## Thresholds", "", "| name | default | what it is |", "|---|---|---|"]
    made += [f"| `{each.name}` | {each.default:g} | {meanings()[each.name]} |" for each in fields(Thresholds)]
    return "\n".join(made) + "\n"
