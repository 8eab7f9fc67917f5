"""The ids of a column of records, as they print, without making a record.

Invariant: `tid` and `uid` are those that `EID` gives for the same parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core.columns import EidParts, numbers, texts
from rollbook.core.errors import WireError


class Ids(NamedTuple):
    """The parts of each record's id, and what `EID.tid` and `EID.uid` print of them."""

    batch: list[str]
    task: list[str]
    run: list[int]
    step: list[int]
    suffix: list[str]
    tid: list[str]
    uid: list[str]


def printed_ids(column: pa.StructArray | EidParts) -> Ids:
    """The ids of a column, numbers among batches and tasks as text.

    >>> from rollbook import EID, Experience, Experiences
    >>> eid = EID(batch="10/eval", task=3, run=1, suffix="a")
    >>> printed_ids(Experiences([Experience(eid=eid, tokens=[1, 2])]).column("eid")).uid, eid.uid
    (['10%2Feval/3/1/0/a'], '10%2Feval/3/1/0/a')
    """
    if isinstance(column, EidParts):
        batch, task, run, step, suffix = column
    else:
        parts: list[Any] = [texts(column.field(i)) for i in (0, 1, 4)]
        run, step = numbers(column.field(2)), numbers(column.field(3))
        flags = column.field(5).to_numpy()
        batch, task, suffix = _print_parts(parts[0], flags & 1), _print_parts(parts[1], flags & 2), parts[2]
    tid = [f"{a}/{b}" for a, b in zip(map(_percent_encode, batch), map(_percent_encode, task), strict=True)]
    rest = zip(tid, run, step, map(_percent_encode, suffix), strict=True)
    return Ids(batch, task, run, step, suffix, tid, [f"{t}/{r}/{s}/{x}" for t, r, s, x in rest])


def _print_parts(parts: list[Any], are_numbers: NDArray[Any]) -> list[str]:
    if not are_numbers.any():
        return parts
    marks = are_numbers.tolist()
    try:
        # A foreign writer's "01" is the number 1, and few of a batch's tasks are different.
        made = {text: str(int(text)) for text in {text for text, mark in zip(parts, marks, strict=True) if mark}}
    except ValueError as error:
        raise WireError(f"eid: a part is marked as a number, and is none: {error}") from None
    return [made[text] if mark else text for text, mark in zip(parts, marks, strict=True)]


def _percent_encode(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F") if "%" in part or "/" in part else part
