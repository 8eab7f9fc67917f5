"""The display of a run in a terminal: a row for each step, the last of them live; and a few plain lines elsewhere.

Invariant: a log that nobody watches stays short: a line for each tenth of the run, or each half minute. Nothing that is
printed in between tears the live row apart, and nothing is said by colour or movement alone.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from rollbook.core.checks import check_float, check_int
from rollbook.core.terminal import block, cut, figure


class Column(NamedTuple):
    """A column: what it is called, how wide it is, and the metrics that fill it: the first that there is."""

    title: str
    width: int
    names: tuple[str, ...]

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the first of its metrics that was logged."""
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
"""Of a run with rewards; with the step and the time left they fill 80 columns."""
SUPERVISED_COLUMNS = (_LOSS, _MARGIN, _ACCURACY, _LENGTH, _GRADIENT, _SPEED)
"""Of SFT and DPO; columns without a number in the first step are left out."""
UPDATE_COLUMNS = (_LOSS, _MARGIN, _ACCURACY, _GRADIENT)
"""Of the updates alone, which a run's records say nothing of."""
_LEFT = 8
ROWS = 20
"""How many rows of a run stay on a terminal: in between, the last one is written over."""
_FAILURES = ("truncated", "failed", "unscored")
TENTH = 0.1
SECONDS = 30.0
"""Elsewhere than on a terminal: a line after this share of the steps, or after so long."""


class Display:
    """A tracker that shows a run to people; on `stream` (standard error), live if that is a terminal.

    Steps with a reward or a loss are rows; numbers of an evaluation alone (`eval/...`) are a line of their own.
    `note` prints a line between rows.

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
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = None if steps is None else check_int("steps", steps)
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty() if live is None else live
        self.seconds = check_float("seconds", seconds, 0.0)
        self._clock = clock
        self._begun = clock()
        self._first: int | None = None
        """The first step that was told of: what came before it took no time of this run's."""
        self._table: tuple[Column, ...] = ()
        self._headed = False
        self._row: str | None = None
        """The last row, while it is not printed for good."""
        self._told = -1
        """The step of the last row that was."""
        self._when = self._begun

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's row, or an evaluation's line."""
        if metrics and all(name.partition("/")[0].startswith("eval") for name in metrics):
            self.note(f"step {step}: {evaluation_line(metrics)}")
            return
        now = self._clock()
        if self._first is None:
            self._first = step
            self._table = _columns_for(metrics)
        self._row = self._made(step, metrics, now)
        last = self.steps is not None and step >= self.steps
        if self.live:
            self._draw()
            if last or self._due(step, 1 / ROWS) or self._told < 0:
                self._keep(step, now)
        elif last or self._told < 0 or self._due(step, TENTH) or now - self._when >= self.seconds:
            self._keep(step, now)

    def note(self, text: str) -> None:
        """A line between the rows: an evaluation, a checkpoint, something odd."""
        clear = "\r\x1b[K" if self.live else ""
        self.stream.write(f"{clear}{block(text)}\n")
        if self.live and self._row is not None:
            self._draw()
        self.stream.flush()

    def close(self) -> None:
        """Leave the last row where it is."""
        if self._row is not None:
            self._keep(self._told, self._when)

    def _due(self, step: int, share: float) -> bool:
        """Whether so much of the run went by since a row was kept."""
        return step - self._told >= max(1, math.ceil((self.steps or 1000) * share - 1e-9))

    def _keep(self, step: int, now: float) -> None:
        """Print the row for good."""
        if self._row is not None:
            self._head()
            self.stream.write("\n" if self.live else f"{self._row}\n")
            self.stream.flush()
        self._row, self._told, self._when = None, step, now

    def _draw(self) -> None:
        """Write the row over the one before it."""
        self._head()
        self.stream.write(f"\r{cut(self._row or '', self._columns())}\x1b[K")
        self.stream.flush()

    def _head(self) -> None:
        if not self._headed:
            self._headed = True
            titles = [f"{'step':>{self._step_width}}", *(f"{column.title:>{column.width}}" for column in self._table)]
            text = " ".join([*titles, f"{'left':>{_LEFT}}"])
            self.stream.write((cut(text, self._columns()) if self.live else text) + "\n")

    def _columns(self) -> int:
        # Not all of it: a terminal that wraps at its last column would scroll with each row.
        return max(20, shutil.get_terminal_size().columns - 1)

    def _made(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        place = str(step) if self.steps is None else f"{step}/{self.steps}"
        cells = [f"{place:>{self._step_width}}"]
        cells += [f"{_figure(column.value(metrics)):>{column.width}}" for column in self._table]
        return " ".join([*cells, f"{self._left(step, now):>{_LEFT}}"])

    @property
    def _step_width(self) -> int:
        return 7 if self.steps is None else max(4, len(f"{self.steps}/{self.steps}"))

    def _left(self, step: int, now: float) -> str:
        if self.steps is None or self._first is None:
            return "-"
        done = step - self._first + 1
        return clock_time((now - self._begun) / max(done, 1) * max(0, self.steps - step))


def _columns_for(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """The columns of a run whose first step has these metrics."""
    if any(name in metrics for name in COLUMNS[0].names) or "loss" not in metrics:
        return COLUMNS
    return tuple(column for column in SUPERVISED_COLUMNS if any(name in metrics for name in column.names))


def _figure(value: float | None) -> str:
    """A number in few digits; one that is not finite by its name, since that is what one looks for."""
    return str(float(value)) if value is not None and not math.isfinite(value) else figure(value)


def shell_command() -> str:
    """Return what to type for `rollbook` in this shell: its name if it is on the PATH, else the path of this program.

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


def clock_time(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock_time(41.2), clock_time(312), clock_time(3 * 3600 + 250)
    ('41', '5:12', '3:04:10')
    """
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left}"


def duration(seconds: float) -> str:
    """Seconds, for people.

    >>> duration(41.2), duration(312), duration(3 * 3600 + 250), duration(200_000)
    ('41 s', '5 min 12 s', '3 h 4 min', '2 d 7 h')
    """
    total = round(seconds)
    for unit, name, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= unit:
            return f"{total // unit} {name} {total % unit // part} {small}"
    return f"{total} s"


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """An evaluation's numbers on one line, an interval behind its share; failures only if there are any, and of one
    sample for each prompt its share alone.

    >>> evaluation_line({"eval/avg@4": 0.5, "eval/avg@4/low": 0.44, "eval/avg@4/high": 0.56, "eval/pass@4": 0.75,
    ...                  "eval/reward": 0.625, "eval/prompts": 200.0})
    'avg@4 0.5 (0.44 to 0.56), pass@4 0.75, reward 0.625, 200 prompts'
    """
    parts = []
    once = any(name.endswith("avg@1") for name in metrics)
    for name, value in metrics.items():
        low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
        of, _, last = name.rpartition("/")
        shown = name.removeprefix("eval/")
        if (last in ("low", "high") and of in metrics) or (last in _FAILURES and value == 0):
            continue
        if once and last.endswith("@1") and not last.startswith("avg"):
            continue
        if last == "prompts":
            parts.append(f"{value:,.0f} {shown}")
            continue
        between = "" if low is None or high is None else f" ({_figure(low)} to {_figure(high)})"
        parts.append(f"{shown} {_figure(value)}{between}")
    return ", ".join(parts)


__all__ = ["COLUMNS", "UPDATE_COLUMNS", "Column", "Display", "duration", "evaluation_line"]
