"""Tracking: where a run's numbers go, step by step: the book, a file of JSON lines, TensorBoard, W&B, a terminal.

Invariant: all of them are one small interface, `Tracker`, and get the same numbers; a run that goes on from a step
leaves behind, in each of them, nothing that was written for later ones.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollbook.book.reports import decode_metrics, encode_metrics
from rollbook.core.checks import check_int, suggest
from rollbook.core.files import FILE_MODE, make_folder, private_opener
from rollbook.train.user_code import resolve

if TYPE_CHECKING:
    from rollbook.book.book import Book as RunBook

TRACKERS = ("book", "jsonl", "tensorboard", "wandb", "display")
"""The names that `trackers_of` knows."""
LINES = "metrics.jsonl"
"""The file of a run's folder that `Jsonl` writes."""


class Tracker(Protocol):
    """Something that is told a run's numbers. One of one's own has these two methods.

    >>> class Loud:
    ...     def log(self, step, metrics):
    ...         print(step, dict(metrics))
    ...     def close(self):
    ...         print("done")
    >>> tracker: Tracker = Loud()
    >>> tracker.log(1, {"loss": 0.5})
    1 {'loss': 0.5}
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step, by name; a step may be told of several times."""

    def close(self) -> None:
        """All was told."""


class Book:
    """The run's book, which stays open.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> Book(book).log(1, {"loss": 0.5})
    >>> book.metrics()
    [(1, {'loss': 0.5})]
    """

    def __init__(self, book: RunBook) -> None:
        self.book = book

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """As `book.log`."""
        self.book.log(step, metrics)

    def close(self) -> None:
        """The book is its owner's to close."""


class Jsonl:
    """A file with a JSON object on each line: `step`, `time` (seconds since 1970), and `metrics`, numbers by name.

    JSON has no word for NaN and infinity: they are the texts "NaN", "Infinity" and "-Infinity". A line that a crash cut
    short is removed. `after`: the step that a resumed run goes on from; lines of later ones are removed.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
    >>> for begun in (0, 1):
    ...     file = Jsonl(path, after=begun)
    ...     for step in range(begun + 1, 4):
    ...         file.log(step, {"loss": 1 / step + begun})
    ...     file.close()
    >>> [(step, round(metrics["loss"], 2)) for step, metrics in read_lines(path)]
    [(1, 1.0), (2, 1.5), (3, 1.33)]
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        if self.path.exists():
            self._mend(after)
        self.path.touch(FILE_MODE)
        self._file = self.path.open("a", encoding="utf-8")

    def _mend(self, after: int | None) -> None:
        if after is not None:
            check_int("after", after)
        text = self.path.read_bytes()
        remaining = text[: text.rfind(b"\n") + 1]
        if after is not None:
            lines = remaining.splitlines(keepends=True)
            remaining = b"".join(
                line for i, line in enumerate(lines) if _parsed(line, f"{self.path}:{i + 1}")["step"] <= after
            )
        if remaining != text:
            # Beside the file, then in its place: a crash leaves the one or the other.
            aside = self.path.with_name(f".{self.path.name}.new")
            with open(aside, "wb", opener=private_opener) as file:
                file.write(remaining)
            os.replace(aside, self.path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line; whoever reads the file sees it when this returns."""
        entry = {"step": check_int("step", step), "time": round(time.time(), 3), "metrics": encode_metrics(metrics)}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parsed(line: str | bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: got {line[:60]!r}, which is no JSON: {error}") from None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or not isinstance(entry.get("metrics"), dict):
        raise ValueError(f"{where}: got {line[:60]!r}, expected an object with a step and metrics")
    return entry


def read_lines(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, float]]]:
    """What `Jsonl` wrote, step by step, of one name the last: as `book.metrics`. A last line that has no end yet is
    left out."""
    steps: dict[int, dict[str, float]] = {}
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(keepends=True)):
        if line.endswith("\n"):
            entry = _parsed(line, f"{path}:{i + 1}")
            steps.setdefault(entry["step"], {}).update(decode_metrics(entry["metrics"], f"{path}:{i + 1}"))
    return sorted(steps.items())


class TensorBoard:
    """TensorBoard's event files in a folder: `tensorboard --logdir FOLDER` shows them.

    `after`: the step that a resumed run goes on from; TensorBoard hides what was written for later ones. It has no `@`
    in names: `eval/avg@8` is `eval/avg_8` there.
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
        writer: Any = SummaryWriter  # not annotated there
        self._writer = writer(os.fspath(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each number."""
        for name, value in encode_metrics(metrics).items():
            self._writer.add_scalar(name.replace("@", "_"), float(value), check_int("step", step))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases; its files are in `FOLDER/wandb`. Whether it uploads is up to W&B's own settings: with
    `WANDB_MODE=offline` in the environment it does not, and `wandb sync` uploads the files later.

    A run there cannot go back: one that is resumed is another run, with the steps from `after` on; `config` goes along.
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
            group=run.resolve().name,  # the parts of a run that was resumed are together
            name=run.resolve().name if not after else f"{run.resolve().name}-from-{after}",
            config=dict(config or {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers of a step; those that are told of later in the same step join them."""
        numbers = {
            name: float(value) if isinstance(value, str) else value for name, value in encode_metrics(metrics).items()
        }
        self._run.log(numbers, step=check_int("step", step))

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def trackers_of(
    names: str | Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    book: RunBook | None = None,
    *,
    steps: int | None = None,
    after: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Tracker]:
    """The trackers of these names, for the run in `folder`: all of them, or none and an error.

    names: of `TRACKERS`, or `module:Class` or `file.py:Class` of one's own, which is called with those of `folder`,
    `steps`, `after` and `config` that its parameters name.

    `steps`: how many there will be, for the display's time left. `after`: the step that a resumed run goes on from.

    >>> import rollbook
    >>> [type(each).__name__ for each in trackers_of("book", book=rollbook.open("memory:"))]
    ['Book']
    >>> trackers_of(["tensorbord"])
    Traceback (most recent call last):
        ...
    ValueError: trackers: got 'tensorbord'; did you mean 'tensorboard'? (book, jsonl, tensorboard, wandb, display)
    """
    from rollbook.train.display import Display

    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if isinstance(name, str) and ":" in name:
            continue
        if name not in TRACKERS:
            raise ValueError(f"trackers: got {name!r}{suggest(str(name), list(TRACKERS))}")
        if name == "book" and book is None:
            raise ValueError("trackers: got 'book' and no book, expected one")
        if name in ("jsonl", "tensorboard", "wandb") and folder is None:
            raise ValueError(f"trackers: got {name!r} and no folder, expected the run's")
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(requested):
            if name == "book" and book is not None:
                trackers.append(Book(book))
            elif name == "display":
                trackers.append(Display(steps))
            elif ":" in name:
                trackers.append(_own(name, {"folder": folder, "steps": steps, "after": after, "config": config}))
            elif folder is not None:
                if name == "jsonl":
                    trackers.append(Jsonl(Path(folder) / LINES, after=after))
                elif name == "tensorboard":
                    trackers.append(TensorBoard(Path(folder) / "tensorboard", after=after))
                else:
                    trackers.append(WandB(folder, config=config, after=after))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _own(name: str, options: Mapping[str, Any]) -> Tracker:
    """A tracker of the user's own, made from a name."""
    kind = resolve(name, name="trackers")
    parameters = inspect.signature(kind).parameters
    tracker = kind(**{option: value for option, value in options.items() if option in parameters})
    for method in ("log", "close"):
        if not callable(getattr(tracker, method, None)):
            raise ValueError(f"trackers: got {name!r}, which has no method {method!r}, expected log and close")
    return tracker  # type: ignore[no-any-return]


__all__ = ["LINES", "TRACKERS", "Book", "Jsonl", "TensorBoard", "Tracker", "WandB", "read_lines", "trackers_of"]
