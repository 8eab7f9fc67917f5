"""HTML tables that Jupyter shows for records, groups and books. All text is escaped; only the first rows are shown."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.core.experience import Experience, FieldValue
    from rollbook.core.experiences import Experiences

ROWS = 20
"""Rows of a table; the caption counts all."""
_CHARACTERS = 120


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table; cells are escaped and shortened.

    >>> table("1 record", ["text"], [["<b>"]])
    '<table><caption>1 record</caption><thead><tr><th>text</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """  # noqa: E501
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(_short(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def record_html(record: Experience) -> str:
    """Return a table of one record: its fields that are set; of tensors the shape and the first values."""
    from rollbook.core.fields import FIELDS

    cells = {name: getattr(record, name) for name in FIELDS if name != "eid"}
    rows = [(name, _described(cell)) for name, cell in cells.items() if cell is not None and cell != {}]
    return table(f"Experience {record.eid}", ["field", "value"], rows)


def records_html(records: Experiences) -> str:
    """Return a table of records, one row each."""
    shown = records[:ROWS]
    columns = {name: shown.values(name) for name in ("reward", "finish_reason", "prompt_text", "response_text")}
    responses = shown.token_lengths() - shown.prompt_lengths()
    rows = zip((eid.uid for eid in shown.eids()), responses.tolist(), *columns.values(), strict=True)
    headers = ["id", "response tokens", "reward", "finish reason", "prompt", "response"]
    return table(_counted(len(records), "record"), headers, rows)


def groups_html(groups: Mapping[str, Experiences]) -> str:
    """Return a table of groups: size, mean and range of the reward, and the prompt."""
    rows = []
    for name, group in list(groups.items())[:ROWS]:
        rewards = [float(reward) for reward in group.values("reward") if reward is not None and not math.isnan(reward)]
        statistics = [sum(rewards) / len(rewards), min(rewards), max(rewards)] if rewards else [None] * 3
        rows.append([name, len(group), *statistics, group.values("prompt_text")[0]])
    headers = ["group", "records", "mean reward", "lowest", "highest", "prompt"]
    return table(_counted(len(groups), "group"), headers, rows)


def _counted(count: int, noun: str) -> str:
    shown = f", the first {ROWS}" if count > ROWS else ""
    return f"{count:,} {noun}{'' if count == 1 else 's'}{shown}"


def _described(cell: FieldValue) -> Any:
    if not hasattr(cell, "dtype"):
        return cell
    return f"{str(cell.dtype).removeprefix('torch.')} {list(cell.shape)}: {cell.flatten()[:12].tolist()}"


def _short(cell: FieldValue) -> str:
    if cell is None:
        return "-"
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
