"""`show`: a run, a step, a group or one trajectory in the terminal, its tokens colored by a lens.

Invariant: every token is shown once and in its place, whatever it contains; color is never the only signal.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.cli.run import OpenRun, open_run, resolve_uid, sample_table
from rollbook.core.addresses import redacted
from rollbook.core.terminal import (
    OK,
    block,
    broken,
    coloured,
    columns,
    cut,
    figure,
    painted,
    percent,
    print_json,
    printable,
    spark,
    styled,
    table,
    wrapped,
)
from rollbook.inspect.trajectory import LENSES, Picture, Trajectory
from rollbook.train.tracker import UPDATE_COLUMNS

SEQUENTIAL = ((253, 231, 37), (122, 209, 81), (34, 168, 132), (42, 120, 142), (65, 68, 135), (68, 1, 84))
DIVERGING = ((178, 88, 9), (241, 163, 64), (254, 224, 182), (216, 218, 235), (94, 130, 180), (33, 70, 140))
"""RGB from low to high; the lowest of the first and the middle of the second are not painted."""
CELLS = "□■"


def show(options: argparse.Namespace) -> int:
    """Show a run, a step, a group or a trajectory."""
    if options.lens is not None and options.lens not in (*LENSES, "off"):
        from rollbook.core.checks import suggest

        raise ValueError(f"--lens: unknown lens {options.lens!r}{suggest(options.lens, [*LENSES, 'off'])}")
    if options.id is not None and options.step is not None:
        raise ValueError(f"show: got {options.id!r} and --step {options.step}, expected one of them")
    ids = None if options.id is None else [options.id]
    step = options.step
    spans = None if step is None else (lambda source: [(step, step)])
    with open_run(options.path, options.tokenizer, ids=ids, spans=spans) as run:
        alone = [f"--{name}" for name in ("raw", "tokens", "lens") if getattr(options, name)]
        groups = "SELECT 1 FROM samples WHERE gid = ? LIMIT 1"
        if alone and (options.id is None or run.index.query(groups, [options.id])):
            raise ValueError(f"{', '.join(alone)}: only for one trajectory, expected its uid (42/1089/6) or a prefix")
        if options.id is not None:
            if run.index.query(groups, [options.id]):
                return _group(run, options)
            return _trajectory(run, resolve_uid(run.index, options.id), options)
        return _step(run, options) if options.step is not None else _run(run, options)


# --- a run, a step, a group -----------------------------------------------------------------------------------------


def _run(run: OpenRun, options: argparse.Namespace) -> int:
    from rollbook.inspect.sources import BookSource

    run_info, steps = run.answers.run(), run.answers.steps()["steps"]
    only = not steps and bool(run_info["evaluation"])
    if only:
        steps = run.answers.steps(evaluation=True)["steps"]
    logged = run.source.book.metrics() if isinstance(run.source, BookSource) else []
    if options.json:
        print_json({"run": run_info, "steps": steps, "metrics": [{"step": step, **values} for step, values in logged]})
        return OK
    kind = ", evaluation only" if only else ""
    counts = f"{run_info['records']:,} trajectories, {run_info['groups']:,} groups{kind}"
    print(styled(printable(run_info["name"]), "bold"), f"· {counts}")
    if not steps:
        print("no records yet")
        return OK
    rows = _rows(steps, logged)
    for name in ("reward", *_UPDATES, "length", "entropy", "kl", "mismatch", "lag"):
        values = [row[name] for row in rows]
        finite = [value for value in values if value is not None]
        if finite:
            print(f"{name:10}{spark(_thinned(values, 60))}  {figure(finite[0])} → {figure(finite[-1])}")
    names = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    cells = [[_cell(name, row[name]) for name in names] for row in reversed(rows[-200:])]
    print()
    optional = [names.index(name) for name in _FIRST_TO_GO if name in names]
    for line in table(names, cells, right=range(len(names)), optional=optional):
        print(line)
    if len(rows) > 200:
        print(f"and {len(rows) - 200} earlier steps")
    _hint(options, f"--step {rows[-1]['step']}", "lists a step's groups")
    return OK


_UPDATES = tuple(column.title for column in UPDATE_COLUMNS)
_SHARES = {"0-var": "zero_variance", "truncated": "truncated", "loops": "loops"}
_COLUMNS = ("step", "n", "reward", "p25", "p75", *_UPDATES, "length", "entropy", "kl", *_SHARES)
_FIRST_TO_GO = ("loops", "kl", "p25", "p75", "grad", "entropy")


def _rows(
    steps: list[dict[str, Any]], logged: list[tuple[int, dict[str, float]]]
) -> list[dict[str, float | int | None]]:
    """Join the summaries of each step's records with the metrics of its updates."""
    summaries = {summary["step"]: summary for summary in steps}
    updates = {step: values for step, values in logged if UPDATE_COLUMNS[0].value(values) is not None}
    rows = []
    for step in sorted({*summaries, *updates}):
        summary, values = summaries.get(step, {}), updates.get(step, {})
        row = {"step": step, "n": summary.get("n")}
        for name in ("reward", "length", "entropy", "kl", "mismatch", "lag"):
            row[name] = (summary.get(name) or {}).get("mean")
        row |= {name: (summary.get("reward") or {}).get(name) for name in ("p25", "p75")}
        row |= {name: summary.get(key) for name, key in _SHARES.items()}
        if row["reward"] is None:
            row["0-var"] = None
        row |= {column.title: column.value(values) for column in UPDATE_COLUMNS}
        rows.append(row)
    return rows


def _cell(name: str, value: float | int | None) -> str:
    if name in _UPDATES and value is not None and math.isnan(value):
        return "nan"
    return str(value) if name == "step" else percent(value) if name in _SHARES else figure(value)


def _hint(options: argparse.Namespace, arguments: str, text: str) -> None:
    """Print a follow-up command."""
    path = shlex.quote(redacted(options.path))
    print(styled(wrapped(f"\nrollbook show {printable(path)} {printable(arguments)} {text}"), "dim"))


def _thinned(values: list[float | None], most: int) -> list[float | None]:
    if len(values) <= most:
        return values
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _step(run: OpenRun, options: argparse.Namespace) -> int:
    page = run.answers.list(view="groups", step=options.step, limit=1000)
    if not page["rows"]:
        page = run.answers.list(view="groups", step=options.step, limit=1000, evaluation=True)
    if not page["rows"]:
        raise ValueError(f"--step: no records of step {options.step}")
    if options.json:
        print_json({"step": options.step, "groups": page["rows"]})
        return OK
    top = max((reward for row in page["rows"] for reward in row["rewards"] if reward is not None), default=0.0)
    low = min((reward for row in page["rows"] for reward in row["rewards"] if reward is not None), default=0.0)
    rows = []
    for row in page["rows"]:
        half = (top + low) / 2
        cells = "".join("·" if reward is None else CELLS[reward > half or top == low] for reward in row["rewards"])
        line_cells = [printable(row["gid"]), str(row["n"]), cells, figure(row["mean"]), figure(row["std"])]
        line_cells += [figure(row["length"]), figure(row["entropy"]), " ".join(row["flags"]), printable(row["opening"])]
        rows.append(line_cells)
    names = ("group", "n", "rewards", "mean", "sd", "length", "entropy", "flags", "prompt")
    print(
        styled(f"step {options.step}", "bold"), f"· {page['total']} groups; ■ a reward above {figure((top + low) / 2)}"
    )
    for line in table(names, rows, right=(1, 3, 4, 5, 6), optional=(6, 5, 4)):
        print(line)
    _hint(options, shlex.quote(page["rows"][0]["gid"]), "lists a group's samples")
    return OK


def _group(run: OpenRun, options: argparse.Namespace) -> int:
    group = run.answers.group(options.id)
    if options.json:
        # The remaining entries are for the viewer.
        print_json({name: entry for name, entry in group.items() if name not in ("previous", "next", "timeline")})
        return OK
    print(styled(printable(group["gid"]), "bold"), f"· step {group['step']} · {len(group['rows'])} samples")
    print(wrapped(cut(printable(group["opening"]), 4 * columns())))
    print()
    for line in sample_table(group["rows"]):
        print(line)
    _hint(options, shlex.quote(group["rows"][0]["uid"].rpartition("/")[0]), "shows a trajectory")
    return OK


# --- a trajectory ---------------------------------------------------------------------------------------------------


def _trajectory(run: OpenRun, uid: str, options: argparse.Namespace) -> int:
    trajectory = run.source.documents([uid])[0]
    if options.json:
        print_json(run.source.record(uid))
        return OK
    run_info = run.answers.run()
    listed = None if options.tokens is None else list(_listed(trajectory, options.tokens))
    for line in (*_header(trajectory, run_info["parts"]), *(listed or ())):
        print(line)
    if listed is not None:
        return OK
    name, why = _lens(trajectory, options.lens)
    scale = next((lens["scale"] for lens in run_info["lenses"] if lens["id"] == name), None)
    buckets = None if scale is None or name is None else _buckets(trajectory.arrays[name], name, scale)
    if name is not None and scale is not None:
        print(wrapped(f"{'lens':12}{name}: {LENSES[name].help}", 12))
        print(f"{'':12}{_legend(scale, name)}")
    elif why:
        print(wrapped(f"{'lens':12}{why}", 12))
    kind = "diverging" if scale is not None and scale["kind"] == "diverging" else "sequential"
    if options.raw:
        print()
        print(_painted(trajectory, 0, trajectory.tokens, buckets, kind))
        return OK
    wide = dataclasses.replace(trajectory, text=broken(trajectory.text))
    for segment in trajectory.segments:
        marks = [f"turn {segment.turn + 1}", f"{segment.stop - segment.start} tokens"]
        marks += [segment.kind] * (segment.kind != "text") + [segment.name] * bool(segment.name)
        marks += [] if segment.trained else ["not trained on"]
        print(f"\n{styled(segment.role, 'bold')} {styled('· ' + printable(' · '.join(marks)), 'dim')}")
        print(_painted(wide, segment.start, segment.stop, buckets, kind))
    return OK


def _header(trajectory: Trajectory, names: Sequence[str]) -> Iterator[str]:
    yield styled(printable(trajectory.uid), "bold")
    parts = ", ".join(
        f"{printable(name)} {figure(trajectory.parts[name])}" for name in names if name in trajectory.parts
    )
    lines: dict[str, Any] = {
        "group": trajectory.gid,
        "reward": figure(trajectory.reward) + (f" ({parts})" if parts else ""),
        "advantage": None if trajectory.advantage is None else figure(trajectory.advantage),
        "tokens": f"{trajectory.tokens} ({trajectory.prompt_tokens} of the prompt, "
        f"{int(trajectory.mask.sum())} trained on)",
        "status": trajectory.status + (f" ({trajectory.finish_reason})" if trajectory.finish_reason else ""),
        "versions": _span(trajectory.versions),
        "pictures": ", ".join(_picture(picture) for picture in trajectory.pictures),
        "label": trajectory.label,
        "reference": trajectory.reference,
        "kept": trajectory.kept,
    }
    for name, value in lines.items():
        if value is not None and value != "":
            yield wrapped(f"{name:12}{printable(value)}", 12)
    notes = [printable(note) for note in trajectory.notes]
    notes += ["no tokenizer: token ids are shown; set one with --tokenizer PATH"] * (trajectory.tokenized == "ids")
    for note in notes:
        yield styled(wrapped(f"note        {note}", 12), "yellow")


def _picture(picture: Picture) -> str:
    kind = picture.mime.removeprefix("image/")
    return f"{picture.width}x{picture.height} {kind}" if picture.width and picture.height else kind


def _span(versions: NDArray[np.int64] | None) -> str | None:
    recorded = versions[versions >= 0] if versions is not None else np.zeros(0, np.int64)
    if not len(recorded):
        return None
    return str(recorded.min()) if recorded.min() == recorded.max() else f"{recorded.min()} to {recorded.max()}"


def _lens(trajectory: Trajectory, lens: str | None) -> tuple[str | None, str]:
    """Return the lens to show, or `None` and the reason."""
    if lens == "off":
        return None, ""
    if lens is not None:
        return (lens, "") if lens in trajectory.arrays else (None, f"{lens} is not recorded for this trajectory")
    return next((name for name in LENSES if name in trajectory.arrays), None), ""


def _buckets(values: NDArray[np.float32], name: str, scale: dict[str, Any]) -> NDArray[np.int64]:
    """Return a bucket from 0 to 5 per token, by the run's scale; -1 without a value."""
    shown = -values if name == "logprob" else np.log(values) if name == "ratio" else values
    low, high = float(scale["low"]), float(scale["high"])
    if name == "ratio":
        low, high = float(np.log(max(low, 1e-6))), float(np.log(max(high, 1e-6)))
    with np.errstate(all="ignore"):
        placed = np.floor((shown - low) / (high - low if high > low else 1.0) * 6)
    return np.where(np.isfinite(shown), np.clip(np.nan_to_num(placed, nan=0, posinf=5, neginf=0), 0, 5), -1).astype(int)


def _legend(scale: dict[str, Any], name: str) -> str:
    palette = DIVERGING if scale["kind"] == "diverging" else SEQUENTIAL
    bar = "".join(painted("  ", color, color) for color in palette) if coloured() else "low to high"
    ends = (figure(scale["low"]), figure(scale["high"]))
    return f"{ends[0]} {bar} {ends[1]}" + (" (negated)" if name == "logprob" else "")


def _painted(trajectory: Trajectory, start: int, stop: int, buckets: NDArray[np.int64] | None, kind: str) -> str:
    """Return the text of tokens [start, stop), painted by bucket; runs of one bucket are one piece."""
    begin = int(trajectory.ends[start - 1]) if start else 0
    if stop <= start:
        return ""
    if buckets is None or not coloured():
        return block(trajectory.text[begin : int(trajectory.ends[stop - 1])])
    palette = DIVERGING if kind == "diverging" else SEQUENTIAL
    quiet = (2, 3) if kind == "diverging" else (0,)
    pieces, at = [], start
    while at < stop:
        end = at + 1
        while end < stop and buckets[end] == buckets[at]:
            end += 1
        text = block(trajectory.text[int(trajectory.ends[at - 1]) if at else 0 : int(trajectory.ends[end - 1])])
        bucket = int(buckets[at])
        if bucket < 0 or bucket in quiet:
            pieces.append(text)
        else:
            back = palette[bucket]
            front = (0, 0, 0) if 0.299 * back[0] + 0.587 * back[1] + 0.114 * back[2] > 140 else (255, 255, 255)
            pieces.append("\n".join(painted(line, back, front, underline=bucket == 5) for line in text.split("\n")))
        at = end
    return "".join(pieces)


def _listed(trajectory: Trajectory, span: str) -> Iterator[str]:
    """Yield a table of tokens, one per line, with their values."""
    try:
        low, _, high = span.partition(":")
        start = int(low) if low else 0
        stop = int(high) if high else trajectory.tokens if ":" in span else start + 1
    except ValueError:
        raise ValueError(f"--tokens: got {span!r}, expected a span such as 100:120") from None
    start, stop, _ = slice(start, stop).indices(trajectory.tokens)
    arrays = [name for name in LENSES if name in trajectory.arrays]
    names = ["token", "id", "text", "trained", *arrays]
    rows = []
    for i in range(start, stop):
        text = trajectory.token(i).replace("\n", "\\n")
        row = [
            str(i),
            "" if trajectory.ids is None else str(trajectory.ids[i]),
            f"'{printable(text)}'",
            "yes" if trajectory.mask[i] else "",
        ]
        rows.append(row + [figure(float(trajectory.arrays[name][i])) for name in arrays])
    yield from table(names, rows, right=(0, 1, *range(4, len(names))))
