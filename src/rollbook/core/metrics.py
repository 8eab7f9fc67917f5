"""How far long work is and what is odd about it, for people, and how long its stages took, for the metrics.

Invariant: nothing is printed where nobody looks: without a terminal there is no bar. Times are wall-clock seconds.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO


class Progress:
    """A bar on a terminal, redrawn at most ten times a second; silent anywhere else, or with `show=False`.

    `after`: drawn only if the work takes longer than so many seconds, and erased at the end.

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
        self._begun = time.monotonic()
        self._after = after
        self._drawn = 0.0

    def advance(self, by: int = 1) -> None:
        """So much more is done."""
        self.done += by
        now = time.monotonic()
        if not self.show or (self._after and (now - self._begun < self._after or self.done >= self.total)):
            return
        if now - self._drawn > 0.1 or self.done >= self.total:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        share = self.done / self.total if self.total else 1.0
        spent = now - self._begun
        left = f"{spent / share - spent:.0f} s left" if 0 < share < 1 else f"{spent:.1f} s"
        bar = "#" * int(share * 24)
        self.stream.write(f"\r{self.label} [{bar:<24}] {self.done}/{self.total} {left}\x1b[K")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self.stream.write("\r\x1b[K" if self._after else "\n")
            self.stream.flush()


class Stages:
    """Seconds, tokens and tokens per second of each stage of a piece of work.

    >>> stages = Stages()
    >>> with stages("rollout") as stage:
    ...     stage["tokens"] = 100
    >>> sorted(stages.metrics())
    ['rollout/seconds', 'rollout/tokens', 'rollout/tokens_per_second']
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, Any]]:
        """Time what is done inside; `stage["tokens"]` says how many tokens it was about; other keys go along."""
        stage = self._found.setdefault(name, {"seconds": 0.0, "tokens": 0})
        before, stage["tokens"] = stage["tokens"], 0
        begun = time.perf_counter()
        try:
            yield stage
        finally:
            stage["seconds"] += time.perf_counter() - begun
            stage["tokens"] += before

    def metrics(self) -> dict[str, float]:
        """By `stage/what`; stages that are not about tokens have seconds alone."""
        made: dict[str, float] = {}
        for name, stage in self._found.items():
            made |= {f"{name}/{key}": value for key, value in stage.items() if key != "tokens"}
            if stage["tokens"]:
                made[f"{name}/tokens"] = stage["tokens"]
                made[f"{name}/tokens_per_second"] = stage["tokens"] / max(stage["seconds"], 1e-9)
        return made


class StepMetrics:
    """The metrics of a step: timings of its stages, and numbers by name.

    >>> metrics = StepMetrics()
    >>> with metrics.time("rollout") as stage:
    ...     stage["tokens"] = 100
    >>> metrics.add({"reward": 0.5})
    >>> sorted(metrics.values())
    ['reward', 'rollout/seconds', 'rollout/tokens', 'rollout/tokens_per_second']
    """

    def __init__(self) -> None:
        self._stages = Stages()
        self._numbers: dict[str, float] = {}

    def time(self, name: str) -> AbstractContextManager[dict[str, Any]]:
        """Time a stage, as `Stages` does."""
        return self._stages(name)

    def add(self, *numbers: Mapping[str, float]) -> None:
        """Add numbers by name; later ones replace earlier ones."""
        for part in numbers:
            self._numbers.update(part)

    def values(self, **more: float) -> dict[str, float]:
        """Return all metrics."""
        return {**self._stages.metrics(), **self._numbers, **more}


def advise(message: str) -> None:
    """A warning that points at the line of whoever called into the library, however deep it is found out.

    >>> with warnings.catch_warnings(record=True) as said:
    ...     advise("mind the gap")
    >>> str(said[0].message)
    'mind the gap'
    """
    own, frame, level = os.path.dirname(os.path.dirname(__file__)), sys._getframe(1), 2
    # Torch's decorators stand between a method and its caller.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(own) or frame.f_code.co_filename.endswith("_contextlib.py")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
