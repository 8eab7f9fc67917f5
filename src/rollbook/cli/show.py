"""`show`, `view` and `doctor`: inspect a run in the terminal, in the web viewer, and by checks for failure modes.

Invariant: `show` prints every token once and in order; color is never the only signal. Nothing is written to the run,
unless `view --annotate` is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollbook.cli.run import OpenRun, open_run, resolve_uid, sample_table
from rollbook.core.addresses import redacted
from rollbook.core.terminal import (
    OK,
    block,
    break_lines,
    columns,
    figure,
    has_color,
    paint,
    percent,
    print_json,
    printable,
    shorten,
    spark,
    styled,
    table,
    wrapped,
)
from rollbook.inspect.trajectory import LENSES, Picture, Trajectory
from rollbook.train.tracker import UPDATE_COLUMNS

if TYPE_CHECKING:
    from rollbook.inspect.doctor import Thresholds

_SEQUENTIAL = ((253, 231, 37), (122, 209, 81), (34, 168, 132), (42, 120, 142), (65, 68, 135), (68, 1, 84))
_DIVERGING = ((178, 88, 9), (241, 163, 64), (254, 224, 182), (216, 218, 235), (94, 130, 180), (33, 70, 140))
"""RGB colors from low to high; the lowest sequential and the middle diverging ones are not painted."""
_REWARD_CELLS = "□■"


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
        trajectory_options = [f"--{name}" for name in ("raw", "tokens", "lens") if getattr(options, name)]
        groups = "SELECT 1 FROM samples WHERE gid = ? LIMIT 1"
        if trajectory_options and (options.id is None or run.index.query(groups, [options.id])):
            raise ValueError(
                f"{', '.join(trajectory_options)}: only for one trajectory, expected its uid (42/1089/6) or a prefix"
            )
        if options.id is not None:
            if run.index.query(groups, [options.id]):
                return _show_group(run, options)
            return _show_trajectory(run, resolve_uid(run.index, options.id), options)
        return _show_step(run, options) if options.step is not None else _show_run(run, options)


# --- a run, a step, a group -----------------------------------------------------------------------------------------


def _show_run(run: OpenRun, options: argparse.Namespace) -> int:
    from rollbook.inspect.sources import BookSource

    run_info, steps = run.answers.run(), run.answers.steps()["steps"]
    evaluation_only = not steps and bool(run_info["evaluation"])
    if evaluation_only:
        steps = run.answers.steps(evaluation=True)["steps"]
    logged = run.source.book.metrics() if isinstance(run.source, BookSource) else []
    if options.json:
        print_json({"run": run_info, "steps": steps, "metrics": [{"step": step, **values} for step, values in logged]})
        return OK
    kind = ", evaluation only" if evaluation_only else ""
    counts = f"{run_info['records']:,} trajectories, {run_info['groups']:,} groups{kind}"
    print(styled(printable(run_info["name"]), "bold"), f"· {counts}")
    if not steps:
        print("no records yet")
        return OK
    rows = _join_metrics(steps, logged)
    for name in ("reward", *_UPDATE_COLUMNS, "length", "entropy", "kl", "mismatch", "staleness"):
        values = [row[name] for row in rows]
        finite = [value for value in values if value is not None]
        if finite:
            print(f"{name:10}{spark(_thin(values, 60))}  {figure(finite[0])} → {figure(finite[-1])}")
    names = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    cells = [[_format_cell(name, row[name]) for name in names] for row in reversed(rows[-200:])]
    print()
    optional = [names.index(name) for name in _OPTIONAL_COLUMNS if name in names]
    for line in table(names, cells, right=range(len(names)), optional=optional):
        print(line)
    if len(rows) > 200:
        print(f"and {len(rows) - 200} earlier steps")
    _print_hint(options, f"--step {rows[-1]['step']}", "lists a step's groups")
    return OK


_UPDATE_COLUMNS = tuple(column.title for column in UPDATE_COLUMNS)
_SHARE_COLUMNS = {"0-var": "zero_variance", "truncated": "truncated", "loops": "loops"}
_COLUMNS = ("step", "n", "reward", "p25", "p75", *_UPDATE_COLUMNS, "length", "entropy", "kl", *_SHARE_COLUMNS)
_OPTIONAL_COLUMNS = ("loops", "kl", "p25", "p75", "grad", "entropy")


def _join_metrics(
    steps: list[dict[str, Any]], logged: list[tuple[int, dict[str, float]]]
) -> list[dict[str, float | int | None]]:
    """Join the summaries of each step's records with the metrics of its updates."""
    summaries = {summary["step"]: summary for summary in steps}
    updates = {step: values for step, values in logged if UPDATE_COLUMNS[0].value(values) is not None}
    rows = []
    for step in sorted({*summaries, *updates}):
        summary, values = summaries.get(step, {}), updates.get(step, {})
        row = {"step": step, "n": summary.get("n")}
        for name in ("reward", "length", "entropy", "kl", "mismatch", "staleness"):
            row[name] = (summary.get(name) or {}).get("mean")
        row |= {name: (summary.get("reward") or {}).get(name) for name in ("p25", "p75")}
        row |= {name: summary.get(key) for name, key in _SHARE_COLUMNS.items()}
        if row["reward"] is None:
            row["0-var"] = None
        row |= {column.title: column.value(values) for column in UPDATE_COLUMNS}
        rows.append(row)
    return rows


def _format_cell(name: str, value: float | int | None) -> str:
    if name in _UPDATE_COLUMNS and value is not None and math.isnan(value):
        return "nan"
    return str(value) if name == "step" else percent(value) if name in _SHARE_COLUMNS else figure(value)


def _print_hint(options: argparse.Namespace, arguments: str, text: str) -> None:
    """Print a follow-up command."""
    path = shlex.quote(redacted(options.path))
    print(styled(wrapped(f"\nrollbook show {printable(path)} {printable(arguments)} {text}"), "dim"))


def _thin(values: list[float | None], limit: int) -> list[float | None]:
    if len(values) <= limit:
        return values
    return [values[i * (len(values) - 1) // (limit - 1)] for i in range(limit)]


def _show_step(run: OpenRun, options: argparse.Namespace) -> int:
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
        cells = "".join(
            "·" if reward is None else _REWARD_CELLS[reward > half or top == low] for reward in row["rewards"]
        )
        line_cells = [printable(row["gid"]), str(row["n"]), cells, figure(row["mean"]), figure(row["std"])]
        line_cells += [figure(row["length"]), figure(row["entropy"]), " ".join(row["flags"]), printable(row["opening"])]
        rows.append(line_cells)
    names = ("group", "n", "rewards", "mean", "sd", "length", "entropy", "flags", "prompt")
    print(
        styled(f"step {options.step}", "bold"),
        f"· {page['total']} groups; ■ a reward above {figure((top + low) / 2)}, the middle of the step's range",
    )
    for line in table(names, rows, right=(1, 3, 4, 5, 6), optional=(6, 5, 4)):
        print(line)
    _print_hint(options, shlex.quote(page["rows"][0]["gid"]), "lists a group's samples")
    return OK


def _show_group(run: OpenRun, options: argparse.Namespace) -> int:
    group = run.answers.group(options.id)
    if options.json:
        # The remaining entries are for the viewer.
        print_json({name: entry for name, entry in group.items() if name not in ("previous", "next", "timeline")})
        return OK
    print(styled(printable(group["gid"]), "bold"), f"· step {group['step']} · {len(group['rows'])} samples")
    print(wrapped(shorten(printable(group["opening"]), 4 * columns())))
    print()
    for line in sample_table(group["rows"]):
        print(line)
    _print_hint(options, shlex.quote(group["rows"][0]["uid"].rpartition("/")[0]), "shows a trajectory")
    return OK


# --- a trajectory ---------------------------------------------------------------------------------------------------


def _show_trajectory(run: OpenRun, uid: str, options: argparse.Namespace) -> int:
    trajectory = run.source.trajectories([uid])[0]
    if options.json:
        print_json(run.source.record(uid))
        return OK
    run_info = run.answers.run()
    token_lines = None if options.tokens is None else list(_token_table(trajectory, options.tokens))
    for line in (*_header(trajectory, run_info["parts"]), *(token_lines or ())):
        print(line)
    if token_lines is not None:
        return OK
    name, reason = _choose_lens(trajectory, options.lens)
    scale = next((lens["scale"] for lens in run_info["lenses"] if lens["id"] == name), None)
    buckets = None if scale is None or name is None else _assign_buckets(trajectory.arrays[name], name, scale)
    if name is not None and scale is not None:
        print(wrapped(f"{'lens':12}{name}: {LENSES[name].help}", 12))
        print(f"{'':12}{_format_legend(scale, name)}")
    elif reason:
        print(wrapped(f"{'lens':12}{reason}", 12))
    kind = "diverging" if scale is not None and scale["kind"] == "diverging" else "sequential"
    if options.raw:
        print()
        print(_paint_tokens(trajectory, 0, trajectory.tokens, buckets, kind))
        return OK
    wide = dataclasses.replace(trajectory, text=break_lines(trajectory.text))
    for segment in trajectory.segments:
        marks = [f"turn {segment.turn + 1}", f"{segment.stop - segment.start} tokens"]
        marks += [segment.kind] * (segment.kind != "text") + [segment.name] * bool(segment.name)
        marks += [] if segment.trained else ["not trained on"]
        print(f"\n{styled(segment.role, 'bold')} {styled('· ' + printable(' · '.join(marks)), 'dim')}")
        print(_paint_tokens(wide, segment.start, segment.stop, buckets, kind))
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
        "versions": _format_versions(trajectory.versions),
        "images": ", ".join(_describe_picture(picture) for picture in trajectory.pictures),
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


def _describe_picture(picture: Picture) -> str:
    kind = picture.mime.removeprefix("image/")
    return f"{picture.width}x{picture.height} {kind}" if picture.width and picture.height else kind


def _format_versions(versions: NDArray[np.int64] | None) -> str | None:
    recorded = versions[versions >= 0] if versions is not None else np.zeros(0, np.int64)
    if not len(recorded):
        return None
    return str(recorded.min()) if recorded.min() == recorded.max() else f"{recorded.min()} to {recorded.max()}"


def _choose_lens(trajectory: Trajectory, lens: str | None) -> tuple[str | None, str]:
    """Return the lens to show, or `None` and the reason."""
    if lens == "off":
        return None, ""
    if lens is not None:
        return (lens, "") if lens in trajectory.arrays else (None, f"{lens} is not recorded for this trajectory")
    return next((name for name in LENSES if name in trajectory.arrays), None), ""


def _assign_buckets(values: NDArray[np.float32], name: str, scale: dict[str, Any]) -> NDArray[np.int64]:
    """Return the color bucket of each token, 0 to 5, on the run's scale; -1 without a value."""
    colored = -values if name == "logprob" else np.log(values) if name == "ratio" else values
    low, high = float(scale["low"]), float(scale["high"])
    if name == "ratio":
        low, high = float(np.log(max(low, 1e-6))), float(np.log(max(high, 1e-6)))
    with np.errstate(all="ignore"):
        buckets = np.floor((colored - low) / (high - low if high > low else 1.0) * 6)
    return np.where(np.isfinite(colored), np.clip(np.nan_to_num(buckets, nan=0, posinf=5, neginf=0), 0, 5), -1).astype(
        int
    )


def _format_legend(scale: dict[str, Any], name: str) -> str:
    palette = _DIVERGING if scale["kind"] == "diverging" else _SEQUENTIAL
    bar = "".join(paint("  ", color, color) for color in palette) if has_color() else "low to high"
    ends = (figure(scale["low"]), figure(scale["high"]))
    return f"{ends[0]} {bar} {ends[1]}" + (" (negated)" if name == "logprob" else "")


def _paint_tokens(trajectory: Trajectory, start: int, stop: int, buckets: NDArray[np.int64] | None, kind: str) -> str:
    """Return the text of tokens [start, stop), painted by bucket; runs of one bucket are one piece."""
    begin = int(trajectory.ends[start - 1]) if start else 0
    if stop <= start:
        return ""
    if buckets is None or not has_color():
        return block(trajectory.text[begin : int(trajectory.ends[stop - 1])])
    palette = _DIVERGING if kind == "diverging" else _SEQUENTIAL
    unpainted = (2, 3) if kind == "diverging" else (0,)
    pieces, at = [], start
    while at < stop:
        end = at + 1
        while end < stop and buckets[end] == buckets[at]:
            end += 1
        text = block(trajectory.text[int(trajectory.ends[at - 1]) if at else 0 : int(trajectory.ends[end - 1])])
        bucket = int(buckets[at])
        if bucket < 0 or bucket in unpainted:
            pieces.append(text)
        else:
            back = palette[bucket]
            front = (0, 0, 0) if 0.299 * back[0] + 0.587 * back[1] + 0.114 * back[2] > 140 else (255, 255, 255)
            pieces.append("\n".join(paint(line, back, front, underline=bucket == 5) for line in text.split("\n")))
        at = end
    return "".join(pieces)


def _token_table(trajectory: Trajectory, span: str) -> Iterator[str]:
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


# --- the viewer and the doctor ----------------------------------------------------------------------------------------

_SEVERITY_STYLES = {"high": "red", "medium": "yellow", "low": "blue"}


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
        return _print_thresholds(thresholds, options)
    if options.path is None:
        raise ValueError("PATH: missing, expected a book, the folder of a run, or saved rollouts")
    from rollbook.inspect.comparison import parse_steps

    steps = None if options.steps is None else parse_steps(options.steps)
    diagnosis = examine(options.path, steps=steps, thresholds=thresholds, evaluation=options.evaluation)
    if not diagnosis.records and steps is not None:
        raise ValueError(f"--steps: no records in steps {options.steps}")
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        for line in format_report(diagnosis, width=min(columns(), 120), verbose=options.verbose):
            first = line.split(" ", 1)[0]
            text = wrapped(line, len(line) - len(line.lstrip(" ")) + 2)
            print(styled(text, "bold", _SEVERITY_STYLES[first]) if first in _SEVERITY_STYLES else text)
        if not diagnosis.records and not options.evaluation:
            print(wrapped("\nThere are no training records; use --evaluation to check evaluation records."))
    return diagnosis.status(options.fail_on)


def _print_thresholds(thresholds: Thresholds, options: argparse.Namespace) -> int:
    from rollbook.inspect.doctor.checks import threshold_docs

    rows = [(name, getattr(thresholds, name), meaning) for name, meaning in threshold_docs().items()]
    if options.json:
        print_json([{"name": name, "value": value, "meaning": meaning} for name, value, meaning in rows])
    else:
        for line in table(("threshold", "value", "meaning"), [[n, printable(v), printable(m)] for n, v, m in rows]):
            print(line)
    return OK
