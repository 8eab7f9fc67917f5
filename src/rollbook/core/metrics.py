"""`Progress` bars, the `StepMetrics` of a training step, and `warn_user`, which points at the user's line of code.

Invariant: without a terminal, no bar is printed. Times are wall-clock seconds.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """A progress bar, redrawn at most ten times a second.

    Args:
        label: Text before the bar.
        total: Number of steps.
        show: Whether to draw the bar. `None`: only if `stream` is a terminal.
        stream: Where to draw the bar. `None`: standard error.
        after: Draw the bar only after this many seconds, and erase it at the end. 0: draw it at once, and keep it.

    >>> with Progress("scoring", 3) as bar:  # not a terminal: nothing is shown
    ...     bar.advance(2)
    >>> bar.done
    2
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        show: bool | None = None,
        stream: TextIO | None = None,
        after: float = 0.0,
    ) -> None:
        self.label, self.total, self.done = label, total, 0
        self.stream = stream if stream is not None else sys.stderr
        self.show = self.stream.isatty() if show is None else show
        self._start = time.monotonic()
        self._after = after
        self._last_drawn = 0.0

    def advance(self, by: int = 1) -> None:
        """Add completed steps."""
        self.done += by
        now = time.monotonic()
        if not self.show or (self._after and (now - self._start < self._after or self.done >= self.total)):
            return
        if now - self._last_drawn > 0.1 or self.done >= self.total:
            self._last_drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        share = self.done / self.total if self.total else 1.0
        elapsed = now - self._start
        timing = f"{elapsed / share - elapsed:.0f} s left" if 0 < share < 1 else f"{elapsed:.1f} s"
        bar = "#" * int(share * 24)
        self.stream.write(f"\r{self.label} [{bar:<24}] {self.done}/{self.total} {timing}\x1b[K")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last_drawn:
            self.stream.write("\r\x1b[K" if self._after else "\n")
            self.stream.flush()


class StepMetrics:
    """Metrics of a training step: timings and tokens of its stages, and numbers by name.

    >>> metrics = StepMetrics()
    >>> with metrics.time("rollout") as stage:
    ...     stage["tokens"] = 100
    >>> metrics.add({"reward": 0.5})
    >>> sorted(metrics.values())
    ['reward', 'rollout/seconds', 'rollout/tokens', 'rollout/tokens_per_second']
    """

    def __init__(self) -> None:
        self._stages: dict[str, dict[str, float]] = {}
        self._numbers: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[dict[str, float]]:
        """Time the body of a `with` statement.

        Args:
            name: Name of the stage. Times of the same stage add up.

        Yields:
            The numbers of the stage. Set `"tokens"` to the number of tokens that the body processed. Other keys are
            reported, too.
        """
        stage = self._stages.setdefault(name, {"seconds": 0.0, "tokens": 0})
        tokens_before, stage["tokens"] = stage["tokens"], 0
        start = time.perf_counter()
        try:
            yield stage
        finally:
            stage["seconds"] += time.perf_counter() - start
            stage["tokens"] += tokens_before

    def add(self, *numbers: Mapping[str, float]) -> None:
        """Add numbers by name; later ones replace earlier ones."""
        for rank_numbers in numbers:
            self._numbers.update(rank_numbers)

    def merge(self, others: Iterable[StepMetrics]) -> None:
        """Take in the stages of other ranks, which ran at the same time: the longest time, and the tokens of all.

        >>> here, there = StepMetrics(), StepMetrics()
        >>> with there.time("rollout") as stage:
        ...     stage["tokens"] = 10
        >>> here.merge([there])
        >>> here.values()["rollout/tokens"]
        10
        """
        for other in others:
            for name, stage in other._stages.items():
                total = self._stages.setdefault(name, {"seconds": 0.0, "tokens": 0})
                for key, number in stage.items():
                    total[key] = total.get(key, 0.0) + number if key == "tokens" else max(total.get(key, 0.0), number)

    def values(self, **more: float) -> dict[str, float]:
        """Return the numbers of the stages by `stage/name`, then the added numbers, then `more`."""
        metrics: dict[str, float] = {}
        for name, stage in self._stages.items():
            for key, number in stage.items():
                if key != "tokens":
                    metrics[f"{name}/{key}"] = number
            if stage["tokens"]:
                metrics[f"{name}/tokens"] = stage["tokens"]
                metrics[f"{name}/tokens_per_second"] = stage["tokens"] / max(stage["seconds"], 1e-9)
        return {**metrics, **self._numbers, **more}


def warn_user(message: str) -> None:
    """Warn, with the line of the user's code that called the library.

    Args:
        message: Text of the warning.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warn_user("mind the gap")
    >>> str(caught[0].message)
    'mind the gap'
    """
    package, frame, level = os.path.dirname(os.path.dirname(__file__)), sys._getframe(1), 2
    # Decorators of torch add frames between a method and its caller.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(package) or frame.f_code.co_filename.endswith("_contextlib.py")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
