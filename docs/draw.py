"""Pictures of batches and plans, as SVG: where tokens, padding and samples lie.

Invariant: a picture is drawn from the batch or plan itself, cell by cell, and the same input gives the same bytes.
`python docs/draw.py docs/pictures` draws the pictures of the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rollbook.batch.plan import Plan
    from rollbook.compat.lightrft.batch import ExperienceBatch

# Okabe and Ito's colors, which people with any color vision tell apart; padding is hatched besides.
COLORS = {"padding": "#ececec", "prompt": "#56b4e9", "action": "#009e73", "masked": "#e69f00"}
NAMES = {"padding": "padding", "prompt": "prompt", "action": "action", "masked": "response, not an action"}
_SHADES = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#f0e442", "#999999")
_STYLE = (
    "text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;font-size:12px;fill:#222}"
    ".r{font-size:11px;text-anchor:end;fill:#666}.t{font-weight:600;font-size:14px}.s{fill:#666;font-size:11px}.n{font-size:10px;text-anchor:middle;fill:#222}"
)
_CELL, _ROW, _EDGE = 22, 20, 16


class _Canvas:
    """Shapes, and how far they reach."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, about: str = "") -> None:
        title = f"<title>{escape(about)}</title>" if about else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {place} fill="{fill}" stroke="#fff">{title}</rect>')
        self._reach(x + width, y + height)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        marked = f' class="{kind}"' if kind else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{marked}>{escape(words)}</text>')
        self._reach(x + {"n": 3.3, "t": 8.2, "r": 0}.get(kind, 6.6) * len(words), y + 4)

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="#d55e00" stroke-dasharray="4 3"/>'
        )
        self._reach(to_x, to_y)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def svg(self, about: str) -> str:
        """The picture, on a white card so that it reads on any page."""
        width, height = self.width + _EDGE, self.height + _EDGE
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(about)}">\n<style>{_STYLE}</style>\n'
            '<defs><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{COLORS["padding"]}"/>'
            '<path d="M0 6L6 0" stroke="#cfcfcf"/></pattern></defs>\n'
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fff"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


def draw_batch(batch: ExperienceBatch, title: str = "") -> str:
    """An SVG of a batch: a row for each sample, or one row if it is packed; token ids in the cells.

    >>> import torch
    >>> from rollbook.compat.lightrft.batch import BufferItem
    >>> from rollbook.compat.lightrft.replay_buffer import make_experience_batch
    >>> items = [BufferItem(torch.arange(n), torch.zeros(n - 1), *[None] * 6, {}) for n in (3, 5)]
    >>> draw_batch(make_experience_batch(items)).count("<rect")
    12
    """
    canvas = _Canvas()
    _batch(canvas, batch, title or repr(batch), _EDGE)
    return canvas.svg(title or repr(batch))


def _batch(canvas: _Canvas, batch: ExperienceBatch, title: str, top: float) -> float:
    """Draw a batch from `top` on; gives where it ends."""
    canvas.text(_EDGE, top + 12, title, "t")
    top += 24
    if batch.layout == "packed":
        cells = [cell for row in _cells(batch) for cell in row]
        _row(canvas, _EDGE, top, [(int(token), kind) for token, kind in cells])
        for name, numbers in (("cu_seqlens", batch.cu_seqlens.tolist()),):
            for at in numbers:
                canvas.text(_EDGE + at * _CELL, top + _ROW + 14, str(at), "n")
            canvas.text(_EDGE + (numbers[-1] + 0.7) * _CELL, top + _ROW + 14, name, "s")
        for at, position in enumerate(batch.position_ids[0].tolist()):
            canvas.text(_EDGE + (at + 0.5) * _CELL, top + _ROW + 30, str(position), "n")
        canvas.text(_EDGE + (len(cells) + 0.7) * _CELL, top + _ROW + 30, "position_ids", "s")
        top += _ROW + 36
    else:
        for row in _cells(batch):
            _row(canvas, _EDGE, top, [(int(token), kind) for token, kind in row])
            top += _ROW
        slots = batch.sequences.shape[1] - _slots(batch)
        if slots < batch.sequences.shape[1]:
            canvas.line(_EDGE + slots * _CELL, top - _ROW * len(batch) - 4, _EDGE + slots * _CELL, top + 4)
            canvas.text(_EDGE + slots * _CELL + 4, top + 12, "response-axis fields begin here", "s")
            top += 14
    return top + 14


def _row(canvas: _Canvas, x: float, y: float, cells: Iterable[tuple[int, str]]) -> None:
    for at, (token, kind) in enumerate(cells):
        fill = "url(#pad)" if kind == "padding" else COLORS[kind]
        canvas.box(x + at * _CELL, y, _CELL, _ROW, fill, f"{NAMES[kind]}: token {token}")
        canvas.text(x + (at + 0.5) * _CELL, y + 14, str(token), "n")


def _slots(batch: ExperienceBatch) -> int:
    from rollbook.compat.lightrft.ragged_batch import check_fields, widths

    return widths(check_fields(batch))[1]


def _cells(batch: ExperienceBatch) -> list[list[tuple[int, str]]]:
    """For each row of a batch its tokens, and what each is."""
    from rollbook.compat.lightrft.ragged_batch import action_starts, check_fields, find_spans, widths

    values = check_fields(batch)
    mask = batch.action_mask
    if batch.layout == "packed":
        slots = batch.action_cu_seqlens.diff().tolist()
        bounds = [(0, len(row), len(row) - n, len(row)) for row, n in zip(batch.sequences, slots, strict=True)]
    else:
        width, wide = widths(values)
        tokens, responses = find_spans(batch.attention_mask, len(batch), width, wide, action_starts(batch, wide))
        shift = width - wide
        bounds = [
            (a, a + n, shift + b, shift + b + m)
            for a, n, b, m in zip(tokens.starts, tokens.lengths, responses.starts, responses.lengths, strict=True)
        ]
    rows = []
    for i, (first, last, begin, end) in enumerate(bounds):
        row = []
        for at, token in enumerate(batch.sequences[i].tolist()):
            if not first <= at < last:
                kind = "padding"
            elif not begin <= at < end:
                kind = "prompt"
            else:
                slot = at - begin if batch.layout == "packed" else at - shift
                kind = "action" if mask is None or mask[i][slot] else "masked"
            row.append((token, kind))
        rows.append(row)
    return rows


def _legend(canvas: _Canvas, top: float) -> None:
    x: float = _EDGE
    for kind, name in NAMES.items():
        canvas.box(x, top, 14, 14, "url(#pad)" if kind == "padding" else COLORS[kind])
        canvas.text(x + 19, top + 11, name, "s")
        x += 40 + 6.2 * len(name)


def draw_layouts(batches: Sequence[tuple[str, ExperienceBatch]]) -> str:
    """An SVG of several batches, one below the other, each under its title, and what the colors mean."""
    canvas, top = _Canvas(), float(_EDGE)
    for title, batch in batches:
        top = _batch(canvas, batch, title, top)
    _legend(canvas, top)
    return canvas.svg("; ".join(title for title, _ in batches))


def draw_bins(
    panels: Sequence[tuple[str, Sequence[Sequence[Sequence[int]]]]], cap: int | None = None, width: float = 620
) -> str:
    """An SVG of where samples went: for each rank a bar for each micro-batch, with a segment for each sample.

    `panels` are pairs of a title and, by rank and micro-batch, the samples' lengths; all share one scale, and `cap` is
    a line.

    >>> draw_bins([("two ranks", [[[3, 5]], [[8]]])], cap=8).count("<title>")
    3
    """
    largest = max((sum(bin_) for _, ranks in panels for rank in ranks for bin_ in rank), default=1)
    scale = width / max(largest, cap or 0, 1)
    canvas, top, left = _Canvas(), float(_EDGE), _EDGE + 92.0
    for title, ranks in panels:
        canvas.text(_EDGE, top + 12, title, "t")
        top += 22
        start = top
        for number, rank in enumerate(ranks):
            canvas.text(_EDGE, top + 12, f"rank {number}", "s")
            for bin_ in rank:
                x = left
                for at, length in enumerate(bin_):
                    canvas.box(x, top, length * scale, 15, _SHADES[at % len(_SHADES)], f"{length} tokens")
                    x += length * scale
                canvas.text(left - 6, top + 12, f"{sum(bin_):,}", "r")
                top += 17
            top += 5
        if cap is not None:
            canvas.line(left + cap * scale, start - 4, left + cap * scale, top)
            canvas.text(left + cap * scale, top + 8, f"cap {cap:,}", "n")
        top += 18
    return canvas.svg("; ".join(title for title, _ in panels))


def draw_plan(plan: Plan, lengths: Any, title: str = "") -> str:
    """An SVG of a plan: a bar for each micro-batch of each rank; see `draw_bins`."""
    return draw_bins([(title or "plan", plan_bins(plan, lengths))], plan.token_cap)


def plan_bins(plan: Plan, lengths: Any) -> list[list[list[int]]]:
    """By rank and micro-batch, the lengths of a plan's samples."""
    sizes = np.asarray(lengths.token_lengths() if hasattr(lengths, "token_lengths") else lengths)
    return [[sizes[batch.indices].tolist() for batch in rank] for rank in plan]


def documentation() -> dict[str, str]:
    """The pictures of the documentation, by file name."""
    import torch

    from rollbook.batch.plan import plan
    from rollbook.compat.lightrft.batch import BufferItem
    from rollbook.compat.lightrft.replay_buffer import make_experience_batch

    items = []
    for first, prompt, mask in ((11, 3, [1, 1, 1, 1]), (21, 2, [1, 1, 0, 0, 1, 1, 1]), (31, 4, [1, 1])):
        length = prompt + len(mask)
        items.append(
            BufferItem(
                sequences=torch.arange(first, first + length),
                action_log_probs=None,
                base_action_log_probs=None,
                values=None,
                returns=None,
                advantages=None,
                attention_mask=torch.ones(length, dtype=torch.int64),
                action_mask=torch.tensor(mask, dtype=torch.bool),
                info={},
            )
        )
    layouts = [
        ("padded, left: rows end together", make_experience_batch(items)),
        (
            "padded, prompt_left_response_right: prompts end together, responses begin together",
            make_experience_batch(items, layout="prompt_left_response_right"),
        ),
        ("packed: no padding", make_experience_batch(items, packing_samples=True)),
    ]
    draw = np.random.default_rng(5)
    lengths = (draw.integers(64, 1024, 48) + np.minimum(draw.lognormal(np.log(800), 0.9, 48), 8192)).astype(int)
    cap, ranks = 10240, 4
    planned = plan(lengths, token_cap=cap, ranks=ranks)
    # What a trainer does without a plan: as many samples on each rank, in the order they came, in equal shares.
    share = len(lengths) // ranks
    chunks = [lengths[rank * share : (rank + 1) * share] for rank in range(ranks)]
    before = [[part.tolist() for part in np.array_split(chunk, planned.steps)] for chunk in chunks]
    panels = [
        (f"before: {len(lengths)} samples in the order they came, in equal shares", before),
        (f"after: plan(lengths, token_cap={cap}, ranks={ranks})", plan_bins(planned, lengths)),
    ]
    return {"layouts.svg": draw_layouts(layouts), "plan.svg": draw_bins(panels, cap)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in documentation().items():
        (folder / name).write_text(picture)
