"""The table of samples that `ls --where` and `show RUN GROUP` print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rollbook.core.terminal import columns, figure, printable, table, tail, width

_NUMBERS = ("reward", "advantage", "tokens", "entropy", "kl")
_FIRST_TO_GO = ("kl", "entropy", "advantage", "state", "tokens")


def sample_table(rows: Sequence[dict[str, Any]], more: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table of samples.

    On a terminal that is too narrow, ids are without their last part, which `rollbook show` does not need.

    Args:
        rows: The samples, as `Answers` lists them.
        more: Further columns of numbers, which come first.
    """
    numbers = (*more, *_NUMBERS)
    names = ("uid", *numbers, "status", "state", "how it ends")
    lines = []
    for row in rows:
        values = {**row, "tokens": row["response_tokens"]}
        # The steps of a run are names, not amounts.
        cells = [str(values[name]) if name == "step" else figure(values[name]) for name in numbers]
        lines.append(
            [printable(row["uid"]), *cells, row["status"], row["state"], tail(printable(row["closing"] or ""))]
        )
    whole = sum(max(width(line[i]) for line in (names, *lines)) + 1 for i in range(len(names) - 1)) + len(names[-1])
    short = [line[0].rpartition("/")[0] for line in lines]
    if whole > columns() and len(set(short)) == len(short):
        lines = [[name, *line[1:]] for name, line in zip(short, lines, strict=True)]
    yield from table(
        names,
        lines,
        right=range(1, 1 + len(numbers)),
        ends=(len(names) - 1,),
        optional=[names.index(name) for name in _FIRST_TO_GO],
    )
