"""Trackers of metrics: the book, a JSONL file, TensorBoard, Weights & Biases, and a display in the terminal.

Invariant: a run that is resumed from a step leaves no metrics of later steps in any tracker that can remove them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from rollbook.book.reports import decode_metrics, encode_metrics
from rollbook.core.checks import check_float, check_int, suggest
from rollbook.core.files import FILE_MODE, make_folder, private_opener
from rollbook.core.terminal import block, figure, shorten
from rollbook.train.user_code import resolve

if TYPE_CHECKING:
    from rollbook.book.book import Book as RunBook

TRACKERS = ("book", "jsonl", "tensorboard", "wandb", "display")
"""The names that `build_trackers` accepts."""
METRICS_FILE = "metrics.jsonl"
"""The file of a run's folder that `JsonlTracker` writes."""


class Tracker(Protocol):
    """Interface of trackers. A custom tracker has these two methods.

    >>> class PrintTracker:
    ...     def log(self, step, metrics):
    ...         print(step, dict(metrics))
    ...     def close(self):
    ...         print("done")
    >>> tracker: Tracker = PrintTracker()
    >>> tracker.log(1, {"loss": 0.5})
    1 {'loss': 0.5}
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step.

        Args:
            step: Number of the step. It may be logged several times, with different metrics.
            metrics: Numbers by name.
        """

    def close(self) -> None:
        """Flush and close. Called once, after the last step."""


class BookTracker:
    """Tracker that writes metrics to the book of a run. The book stays open.

    Args:
        book: The book.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> BookTracker(book).log(1, {"loss": 0.5})
    >>> book.metrics()
    [(1, {'loss': 0.5})]
    """

    def __init__(self, book: RunBook) -> None:
        self.book = book

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics with `book.log`.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        self.book.log(step, metrics)

    def close(self) -> None:
        """Do nothing."""


class JsonlTracker:
    """Tracker that appends to a JSONL file: an object with `step`, `time` (seconds since 1970) and `metrics` per line.

    Numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity". A line that a crash truncated is
    removed.

    Args:
        path: The file.
        after: The step from which a run is resumed; lines of later steps are removed.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
    >>> for resumed_from in (0, 1):
    ...     tracker = JsonlTracker(path, after=resumed_from)
    ...     for step in range(resumed_from + 1, 4):
    ...         tracker.log(step, {"loss": 1 / step + resumed_from})
    ...     tracker.close()
    >>> [(step, round(metrics["loss"], 2)) for step, metrics in read_metrics(path)]
    [(1, 1.0), (2, 1.5), (3, 1.33)]
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        if self.path.exists():
            self._remove_lines(after)
        self.path.touch(FILE_MODE)
        self._file = self.path.open("a", encoding="utf-8")

    def _remove_lines(self, after: int | None) -> None:
        """Remove a truncated line, and lines of steps after `after`."""
        if after is not None:
            check_int("after", after)
        text = self.path.read_bytes()
        remaining = text[: text.rfind(b"\n") + 1]
        if after is not None:
            lines = remaining.splitlines(keepends=True)
            remaining = b"".join(
                line for i, line in enumerate(lines) if _parse_line(line, f"{self.path}:{i + 1}")["step"] <= after
            )
        if remaining != text:
            # Write a new file and rename it, so that a crash leaves one of the two.
            new_path = self.path.with_name(f".{self.path.name}.new")
            with open(new_path, "wb", opener=private_opener) as file:
                file.write(remaining)
            os.replace(new_path, self.path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush a line.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        entry = {"step": check_int("step", step), "time": round(time.time(), 3), "metrics": encode_metrics(metrics)}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse_line(line: str | bytes, location: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{location}: got {line[:60]!r}, expected JSON: {error}") from None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or not isinstance(entry.get("metrics"), dict):
        raise ValueError(f"{location}: got {line[:60]!r}, expected an object with a step and metrics")
    return entry


def read_metrics(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, float]]]:
    """Read what `JsonlTracker` wrote.

    Args:
        path: The file. A last line without a line break is skipped.

    Returns:
        The metrics of each step, as `book.metrics` returns them. Of metrics logged twice, the last one counts.

    Raises:
        ValueError: A line is not what `JsonlTracker` writes.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> _ = path.write_text('{"step": 1, "metrics": {"loss": 0.5}}\\n')
    >>> read_metrics(path)
    [(1, {'loss': 0.5})]
    """
    steps: dict[int, dict[str, float]] = {}
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(keepends=True)):
        if line.endswith("\n"):
            entry = _parse_line(line, f"{path}:{i + 1}")
            steps.setdefault(entry["step"], {}).update(decode_metrics(entry["metrics"], f"{path}:{i + 1}"))
    return sorted(steps.items())


class TensorBoardTracker:
    """Tracker that writes event files of TensorBoard; `tensorboard --logdir FOLDER` shows them.

    TensorBoard allows no `@` in names: `eval/avg@8` becomes `eval/avg_8`.

    Args:
        folder: The folder.
        after: The step from which a run is resumed; TensorBoard hides what was written for later steps.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tracker 'tensorboard' needs the package tensorboard: pip install tensorboard ({error})"
            ) from None
        purge = None if after is None else check_int("after", after) + 1
        make_folder(folder)
        writer: Any = SummaryWriter  # torch does not annotate it
        self._writer = writer(os.fspath(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        for name, value in encode_metrics(metrics).items():
            self._writer.add_scalar(name.replace("@", "_"), float(value), check_int("step", step))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbTracker:
    """Tracker that logs to Weights & Biases, with its files in `FOLDER/wandb`.

    W&B's environment variables apply: with `WANDB_MODE=offline` nothing is uploaded, and `wandb sync` uploads the files
    later. A W&B run cannot go back to an earlier step, so a resumed run is a new one in the same group.

    Args:
        folder: The folder of the run.
        project: W&B project.
        config: Configuration to store with the run.
        after: The step from which a run is resumed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        project: str = "rollbook",
        config: Mapping[str, Any] | None = None,
        after: int | None = None,
    ) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(f"tracker 'wandb' needs the package wandb: pip install wandb ({error})") from None
        run = Path(folder)
        make_folder(run)
        self._run: Any = wandb.init(
            dir=os.fspath(run),
            project=project,
            group=run.resolve().name,  # groups the parts of a resumed run
            name=run.resolve().name if not after else f"{run.resolve().name}-from-{after}",
            config=dict(config or {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step; W&B merges those that are logged later for the same step.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        numbers = {
            name: float(value) if isinstance(value, str) else value for name, value in encode_metrics(metrics).items()
        }
        self._run.log(numbers, step=check_int("step", step))

    def close(self) -> None:
        """End the run."""
        self._run.finish()


# --- the terminal -----------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the display.

    Args:
        title: Heading.
        width: Width in characters.
        names: Metrics to show; the first that was logged counts.

    >>> Column("KL", 8, ("kl", "policy/kl")).value({"policy/kl": 0.5})
    0.5
    """

    title: str
    width: int
    names: tuple[str, ...]

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the first of its metrics that was logged.

        Args:
            metrics: Numbers by name.

        Returns:
            The number, or `None`.
        """
        return next((metrics[name] for name in self.names if name in metrics), None)


_LENGTH = Column("length", 6, ("length", "rollout/response_length"))
_LOSS = Column("loss", 8, ("loss", "critic/value_loss"))
_MARGIN = Column("margin", 8, ("policy/reward_margin",))
_ACCURACY = Column("accuracy", 8, ("policy/accuracy_mean",))
_GRADIENT = Column("grad", 6, ("grad_norm", "critic/grad_norm"))
_SPEED = Column("tok/s", 7, ("tokens_per_second", "rollout/tokens_per_second"))
COLUMNS = (
    Column("reward", 6, ("reward", "reward/mean")),
    Column("success", 7, ("success", "reward/success")),
    _LENGTH,
    Column("entropy", 7, ("entropy", "policy/entropy")),
    Column("KL", 8, ("kl", "policy/kl", "kl/mean")),
    _LOSS,
    _GRADIENT,
    _SPEED,
)
"""Columns of a run with rewards. With the step and the remaining time they fill 80 characters."""
SUPERVISED_COLUMNS = (_LOSS, _MARGIN, _ACCURACY, _LENGTH, _GRADIENT, _SPEED)
"""Columns of SFT and DPO. Those without a number in the first step are left out."""
UPDATE_COLUMNS = (_LOSS, _MARGIN, _ACCURACY, _GRADIENT)
"""Columns of metrics that cannot be computed from the records of a run."""
_TIME_WIDTH = 8
_TERMINAL_ROWS = 20
"""Number of rows of a run that stay on a terminal; rows in between are overwritten."""
_FAILURE_METRICS = ("truncated", "failed", "unscored")
_LOG_SHARE = 0.1
"""Share of the steps after which a line is printed if the output is not a terminal."""
_LOG_SECONDS = 30.0
"""Seconds after which a line is printed if the output is not a terminal."""


class Display:
    """Tracker that prints a table to the terminal.

    Steps with a reward or a loss are rows; evaluations (`eval/...`) are lines between them. On a terminal the last row
    is updated in place. Otherwise a line is printed for each tenth of the run or each half minute.

    Args:
        steps: Number of steps of the run, for the remaining time.
        stream: Output; `None`: standard error.
        live: Whether to update the last row in place; `None`: if the output is a terminal.
        seconds: Seconds after which a line is printed if the output is not live.
        clock: Returns the time in seconds.

    >>> display = Display(20, stream=sys.stdout, clock=iter([0.0, 1.0, 2.0, 3.0]).__next__)
    >>> for step in (1, 2, 3):
    ...     display.log(step, {"reward": step / 10, "kl": 0.001, "tokens_per_second": 5100.0})
     step reward success length entropy       KL     loss   grad   tok/s     left
     1/20    0.1       -      -       -    0.001        -      -   5,100       19
     3/20    0.3       -      -       -    0.001        -      -   5,100       17
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        seconds: float = _LOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = None if steps is None else check_int("steps", steps)
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty() if live is None else live
        self.seconds = check_float("seconds", seconds, 0.0)
        self._clock = clock
        self._start_time = clock()
        self._first_step: int | None = None
        """The first step that was logged; a resumed run spent no time on earlier ones."""
        self._table: tuple[Column, ...] = ()
        self._has_head = False
        self._row: str | None = None
        """The last row, until it is printed permanently."""
        self._printed_step = -1
        """The step of the last row that was printed permanently."""
        self._printed_time = self._start_time

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of a step, or the line of an evaluation.

        Args:
            step: Number of the step.
            metrics: Numbers by name.
        """
        if metrics and all(name.partition("/")[0].startswith("eval") for name in metrics):
            self.note(f"step {step}: {format_evaluation(metrics)}")
            return
        now = self._clock()
        if self._first_step is None:
            self._first_step = step
            self._table = _select_columns(metrics)
        self._row = self._format_row(step, metrics, now)
        is_edge = self._printed_step < 0 or (self.steps is not None and step >= self.steps)
        if self.live:
            self._draw()
            if is_edge or self._is_due(step, 1 / _TERMINAL_ROWS):
                self._print_row(step, now)
        elif is_edge or self._is_due(step, _LOG_SHARE) or now - self._printed_time >= self.seconds:
            self._print_row(step, now)

    def note(self, text: str) -> None:
        """Print a line between rows, such as an evaluation or a checkpoint.

        Args:
            text: The line.
        """
        clear = "\r\x1b[K" if self.live else ""
        self.stream.write(f"{clear}{block(text)}\n")
        if self.live and self._row is not None:
            self._draw()
        self.stream.flush()

    def close(self) -> None:
        """Print the last row permanently."""
        if self._row is not None:
            self._print_row(self._printed_step, self._printed_time)

    def _is_due(self, step: int, share: float) -> bool:
        """Return whether this share of the steps passed since a row was printed permanently."""
        return step - self._printed_step >= max(1, math.ceil((self.steps or 1000) * share - 1e-9))

    def _print_row(self, step: int, now: float) -> None:
        if self._row is not None:
            self._print_head()
            self.stream.write("\n" if self.live else f"{self._row}\n")
            self.stream.flush()
        self._row, self._printed_step, self._printed_time = None, step, now

    def _draw(self) -> None:
        """Overwrite the previous row."""
        self._print_head()
        self.stream.write(f"\r{shorten(self._row or '', self._terminal_width())}\x1b[K")
        self.stream.flush()

    def _print_head(self) -> None:
        if not self._has_head:
            self._has_head = True
            titles = [f"{'step':>{self._step_width}}", *(f"{column.title:>{column.width}}" for column in self._table)]
            text = " ".join([*titles, f"{'left':>{_TIME_WIDTH}}"])
            self.stream.write((shorten(text, self._terminal_width()) if self.live else text) + "\n")

    def _terminal_width(self) -> int:
        # A terminal that wraps at its last column would scroll with each row.
        return max(20, shutil.get_terminal_size().columns - 1)

    def _format_row(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        position = str(step) if self.steps is None else f"{step}/{self.steps}"
        cells = [f"{position:>{self._step_width}}"]
        cells += [f"{_format_number(column.value(metrics)):>{column.width}}" for column in self._table]
        return " ".join([*cells, f"{self._format_remaining(step, now):>{_TIME_WIDTH}}"])

    @property
    def _step_width(self) -> int:
        return 7 if self.steps is None else max(4, len(f"{self.steps}/{self.steps}"))

    def _format_remaining(self, step: int, now: float) -> str:
        if self.steps is None or self._first_step is None:
            return "-"
        done = step - self._first_step + 1
        return format_clock_time((now - self._start_time) / max(done, 1) * max(0, self.steps - step))


def _select_columns(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """Return the columns of a run whose first step has these metrics."""
    if any(name in metrics for name in COLUMNS[0].names) or "loss" not in metrics:
        return COLUMNS
    return tuple(column for column in SUPERVISED_COLUMNS if any(name in metrics for name in column.names))


def _format_number(value: float | None) -> str:
    """Format a number in few digits, with `nan` and `inf` spelled out."""
    return str(float(value)) if value is not None and not math.isfinite(value) else figure(value)


def shell_command() -> str:
    """Return the command for `rollbook` in this shell: its name if it is on the PATH, else the path of this program.

    >>> shell_command().split()[-1].endswith("rollbook")
    True
    """
    program = Path(sys.argv[0])
    if program.name != "rollbook":
        return f"{shlex.quote(sys.executable)} -m rollbook"
    on_path = shutil.which("rollbook")
    if on_path is not None and program.exists() and os.path.samefile(on_path, program):
        return "rollbook"
    return shlex.quote(os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program))


def format_clock_time(seconds: float) -> str:
    """Format seconds as on a clock.

    Args:
        seconds: The duration.

    Returns:
        Text such as `1:02:03`.

    >>> format_clock_time(41.2), format_clock_time(312), format_clock_time(3 * 3600 + 250)
    ('41', '5:12', '3:04:10')
    """
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left}"


def format_evaluation(metrics: Mapping[str, float]) -> str:
    """Format the metrics of an evaluation in one line.

    Rates of failures are shown if they are not 0. With one sample per prompt, pass@1 and maj@1 equal avg@1 and are left
    out.

    Args:
        metrics: What `Evaluation.metrics` returns.

    Returns:
        The line.

    >>> format_evaluation({"eval/avg@4": 0.5, "eval/avg@4/low": 0.44, "eval/avg@4/high": 0.56, "eval/pass@4": 0.75,
    ...                  "eval/reward": 0.625, "eval/prompts": 200.0})
    'avg@4 0.5 (0.44 to 0.56), pass@4 0.75, reward 0.625, 200 prompts'
    """
    parts = []
    single_sample = any(name.endswith("avg@1") for name in metrics)
    for name, value in metrics.items():
        low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
        prefix, _, last = name.rpartition("/")
        label = name.removeprefix("eval/")
        if (last in ("low", "high") and prefix in metrics) or (last in _FAILURE_METRICS and value == 0):
            continue
        if single_sample and last.endswith("@1") and not last.startswith("avg"):
            continue
        if last == "prompts":
            parts.append(f"{value:,.0f} {label}")
            continue
        interval = "" if low is None or high is None else f" ({_format_number(low)} to {_format_number(high)})"
        parts.append(f"{label} {_format_number(value)}{interval}")
    return ", ".join(parts)


# --- by name ----------------------------------------------------------------------------------------------------------


def build_trackers(
    names: str | Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    book: RunBook | None = None,
    *,
    steps: int | None = None,
    after: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Tracker]:
    """Build trackers by name.

    Args:
        names: Names in `TRACKERS`, or `module:Class` or `file.py:Class` of custom trackers. Their classes are called
            with those of `folder`, `steps`, `after` and `config` that their parameters name.
        folder: The folder of the run; needed by `jsonl`, `tensorboard` and `wandb`.
        book: The book of the run; needed by `book`.
        steps: Number of steps of the run.
        after: The step from which a run is resumed.
        config: Configuration of the run.

    Returns:
        The trackers.

    Raises:
        ValueError: A name is unknown, or something it needs is missing.
        ImportError: A package is missing.

    >>> import rollbook
    >>> [type(tracker).__name__ for tracker in build_trackers("book", book=rollbook.open("memory:"))]
    ['BookTracker']
    >>> build_trackers(["tensorbord"])
    Traceback (most recent call last):
        ...
    ValueError: trackers: got 'tensorbord'; did you mean 'tensorboard'? (book, jsonl, tensorboard, wandb, display)
    """
    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if isinstance(name, str) and ":" in name:
            continue
        if name not in TRACKERS:
            raise ValueError(f"trackers: got {name!r}{suggest(str(name), list(TRACKERS))}")
        if name == "book" and book is None:
            raise ValueError("trackers: got 'book' without a book")
        if name in ("jsonl", "tensorboard", "wandb") and folder is None:
            raise ValueError(f"trackers: got {name!r} without a folder")
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(requested):
            if name == "book" and book is not None:
                trackers.append(BookTracker(book))
            elif name == "display":
                trackers.append(Display(steps))
            elif ":" in name:
                trackers.append(
                    _build_custom(name, {"folder": folder, "steps": steps, "after": after, "config": config})
                )
            elif folder is not None:
                if name == "jsonl":
                    trackers.append(JsonlTracker(Path(folder) / METRICS_FILE, after=after))
                elif name == "tensorboard":
                    trackers.append(TensorBoardTracker(Path(folder) / "tensorboard", after=after))
                else:
                    trackers.append(WandbTracker(folder, config=config, after=after))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _build_custom(name: str, options: Mapping[str, Any]) -> Tracker:
    tracker_class = resolve(name, name="trackers")
    parameters = inspect.signature(tracker_class).parameters
    tracker = tracker_class(**{option: value for option, value in options.items() if option in parameters})
    for method in ("log", "close"):
        if not callable(getattr(tracker, method, None)):
            raise ValueError(f"trackers: got {name!r}, which has no method {method!r}, expected log and close")
    return tracker  # type: ignore[no-any-return]


__all__ = [
    "COLUMNS",
    "METRICS_FILE",
    "TRACKERS",
    "UPDATE_COLUMNS",
    "BookTracker",
    "Column",
    "Display",
    "JsonlTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "build_trackers",
    "format_clock_time",
    "format_evaluation",
    "read_metrics",
    "shell_command",
]
