"""Trackers: the same numbers in each of them, resumed runs that leave nothing of later steps, and a display that is
live on a terminal and short elsewhere."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import struct
import sys
import tempfile
import termios
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook.core.terminal import format_duration
from rollbook.train.tracker import (
    METRICS_FILE,
    BookTracker,
    Display,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    build_trackers,
    format_evaluation,
    read_metrics,
)

ODD = {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "eval/avg@8": 0.5, "tokens": 7}


def same(left: dict[str, float], right: dict[str, float]) -> bool:
    return left.keys() == right.keys() and all(
        left[name] == right[name] or (math.isnan(left[name]) and math.isnan(right[name])) for name in left
    )


# --- files ----------------------------------------------------------------------------------------------------------


def test_lines_are_strict_json_and_come_back(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "run" / METRICS_FILE)
    tracker.log(1, ODD)
    tracker.log(1, {"reward": 0.25})
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()  # there, before it is closed
    assert [sorted(json.loads(line, parse_constant=pytest.fail)) for line in lines] == [["metrics", "step", "time"]] * 2
    tracker.close()
    ((step, logged),) = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert step == 1 and same(logged, {**ODD, "reward": 0.25})
    with pytest.raises(ValueError, match=r"metrics\['loss'\]"):
        JsonlTracker(tmp_path / "other").log(1, {"loss": "low"})  # type: ignore[dict-item]


@given(st.lists(st.tuples(st.integers(0, 9), st.floats()), max_size=12), st.integers(0, 200))
def test_a_line_that_was_cut_short_is_removed_and_no_other(rows: list[tuple[int, float]], lost: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / METRICS_FILE
        tracker = JsonlTracker(path)
        for step, value in rows:
            tracker.log(step, {"loss": value})
        tracker.close()
        content = path.read_bytes()
        path.write_bytes(content[: max(0, len(content) - lost)])
        torn, left = read_metrics(path), path.read_bytes().count(b"\n")
        tracker = JsonlTracker(path)
        tracker.log(99, {"loss": 1.0})
        tracker.close()
        *others, last = read_metrics(path)
        assert last == (99, {"loss": 1.0}) and len(others) == len(torn)
        assert all(step == was and same(left, right) for (step, left), (was, right) in zip(others, torn, strict=True))
        assert path.read_bytes().count(b"\n") == left + 1


def test_a_resumed_run_has_no_lines_of_later_steps(tmp_path: Path) -> None:
    for after, last in ((0, 5), (3, 4), (4, 5)):
        tracker = JsonlTracker(tmp_path / METRICS_FILE, after=after)
        for step in range(after + 1, last + 1):
            tracker.log(step, {"loss": step + after / 10})
        tracker.close()
    losses = [(step, metrics["loss"]) for step, metrics in read_metrics(tmp_path / METRICS_FILE)]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.3), (5, 5.4)]
    assert os.listdir(tmp_path) == [METRICS_FILE]
    with pytest.raises(ValueError, match="after: got -1"):
        JsonlTracker(tmp_path / METRICS_FILE, after=-1)
    (tmp_path / METRICS_FILE).write_text('{"step": "1"}\n')
    with pytest.raises(ValueError, match=f"{METRICS_FILE}:1: got .*expected an object with a step"):
        JsonlTracker(tmp_path / METRICS_FILE, after=1)
    (tmp_path / METRICS_FILE).write_text("nonsense\n")
    with pytest.raises(ValueError, match="expected JSON"):
        read_metrics(tmp_path / METRICS_FILE)


# --- TensorBoard and W&B --------------------------------------------------------------------------------------------

STAND_IN = """
    class SummaryWriter:
        def __init__(self, folder, purge_step=None):
            import json, os
            os.makedirs(folder, exist_ok=True)
            self.file = open(os.path.join(folder, "events.jsonl"), "a")
            self.note = lambda *told: print(json.dumps(told), file=self.file)
            if purge_step is not None:
                self.note("purge", purge_step)

        def add_scalar(self, tag, value, global_step):
            self.note(tag, value, global_step)

        def flush(self):
            self.file.flush()

        def close(self):
            self.file.close()
"""
"""The four calls of TensorBoard's writer that are used, for machines without it: a purge hides what has later steps."""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    if find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore

        shown = EventAccumulator(str(folder))
        shown.Reload()
        return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}
    by_tag: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        tag, *rest = json.loads(line)
        if tag == "purge":
            by_tag = {name: [point for point in values if point[0] < rest[0]] for name, values in by_tag.items()}
        else:
            by_tag.setdefault(tag, []).append((rest[1], rest[0]))
    return by_tag


@pytest.fixture
def tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_spec("tensorboard"):
        home = tmp_path / "site"
        home.mkdir()
        (home / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
        monkeypatch.syspath_prepend(str(home))
        import stand_in  # type: ignore[import-not-found]

        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
        monkeypatch.delitem(sys.modules, "stand_in")


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_every_number_and_nothing_that_a_resumed_run_left_behind(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    first: Tracker = TensorBoardTracker(folder)
    for step in range(1, 6):
        first.log(step, {"loss": float(step), "eval/avg@8": 0.5})
    first.log(5, {"kl": math.nan})
    first.close()
    second = TensorBoardTracker(folder, after=3)
    second.log(4, {"loss": 4.5})
    second.close()
    by_tag = scalars(folder)
    assert by_tag["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    assert by_tag["eval/avg_8"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert not by_tag.get("kl")


WANDB = """
    import json, os

    class Run:
        def __init__(self, **options):
            self.folder = os.path.join(options.pop("dir"), "wandb")
            os.makedirs(self.folder)
            self.told = [options]

        def log(self, metrics, step):
            self.told.append([step, metrics])

        def finish(self):
            with open(os.path.join(self.folder, "run.json"), "w") as file:
                json.dump(self.told, file)

    def init(**options):
        return Run(**options)
"""
"""Of W&B, which starts a server of its own, the three calls that are used."""


def test_wandb_is_told_every_number_and_has_its_own_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "site"
    home.mkdir()
    (home / "wandb.py").write_text(textwrap.dedent(WANDB))
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    tracker: Tracker = WandbTracker(tmp_path / "demo", config={"lr": 0.1}, after=3)
    tracker.log(4, ODD)
    tracker.log(4, {"reward": 0.5})
    tracker.close()
    monkeypatch.delitem(sys.modules, "wandb")
    options, (step, metrics), second = json.loads((tmp_path / "demo" / "wandb" / "run.json").read_text())
    assert options == {
        "project": "rollbook",
        "group": "demo",
        "name": "demo-from-3",
        "config": {"lr": 0.1},
    }
    assert step == 4 and same(metrics, ODD) and second == [4, {"reward": 0.5}]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_what_is_not_installed_says_how_to_install_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    with pytest.raises(ImportError, match=f"tracker '{name}' needs the package {name}: pip install {name}"):
        build_trackers(["jsonl", name], tmp_path)


# --- by name --------------------------------------------------------------------------------------------------------


def test_trackers_by_name_are_told_the_same_and_leave_the_book_open(tmp_path: Path) -> None:
    with rollbook.open("memory:") as book:
        trackers = build_trackers(["book", "jsonl", "display", "book"], tmp_path, book, steps=2, after=0)
        assert [type(tracker) for tracker in trackers] == [BookTracker, JsonlTracker, Display]
        for step in (1, 2):
            for tracker in trackers:
                tracker.log(step, {"loss": 1 / step})
        for tracker in trackers:
            tracker.close()
        assert book.metrics() == read_metrics(tmp_path / METRICS_FILE) == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]


class Mine:
    """A tracker of one's own."""

    def __init__(self, folder: Path, after: int | None = None) -> None:
        self.path = Path(folder) / f"mine-{after}"

    def log(self, step: int, metrics: Any) -> None:
        self.path.write_text(f"{step} {sorted(metrics)}")

    def close(self) -> None: ...


def test_trackers_of_ones_own(tmp_path: Path) -> None:
    custom, jsonl = build_trackers([f"{__name__}:Mine", "jsonl"], tmp_path, after=3, config={"lr": 1})
    custom.log(4, {"loss": 0.5})
    assert (tmp_path / "mine-3").read_text() == "4 ['loss']" and isinstance(jsonl, JsonlTracker)
    jsonl.close()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (f"{__name__}:Mime", "did you mean 'Mine'"),
        ("fractions:Fraction", "has no method 'log', expected log and close"),
        ("jsnl", "trackers: got 'jsnl'; did you mean 'jsonl'"),
        (["book"], "trackers: got 'book' without a book"),
        (["jsonl"], "trackers: got 'jsonl' without a folder"),
        ([3], "trackers: got 3"),
    ],
)
def test_names_that_cannot_be_had_are_refused(names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trackers(names)


# --- the display ----------------------------------------------------------------------------------------------------


def ticks(seconds: float = 1.0) -> Any:
    """A clock that goes on by so much with each look."""
    return iter(i * seconds for i in range(10**6)).__next__


def shown(steps: int | None, count: int, seconds: float = 1.0, **options: Any) -> list[str]:
    stream = io.StringIO()
    display = Display(steps, stream=stream, clock=ticks(seconds), **options)
    for step in range(1, count + 1):
        display.log(step, {"reward": step / 1000})
    display.close()
    return stream.getvalue().splitlines()


def test_a_log_stays_short() -> None:
    head, *rows = shown(1000, 1000, 0.001)
    assert head.split() == ["step", "reward", "success", "length", "entropy", "KL", "loss", "grad", "tok/s", "left"]
    assert [row.split()[0] for row in rows] == ["1/1000", *(f"{n}/1000" for n in range(101, 1000, 100)), "1000/1000"]
    assert len(shown(10_000, 300, 1.0)) == 1 + 1 + 9 + 1  # or one in half a minute, and where it ended
    assert len(shown(None, 1000, 0.001)) <= 13
    assert "\x1b" not in "".join(rows) and "\r" not in "".join(rows)


def test_a_row_has_the_numbers_and_the_time_left() -> None:
    stream = io.StringIO()
    display = Display(104, stream=stream, clock=ticks(60.0))
    numbers = {"reward/mean": 0.5, "success": 0.25, "rollout/response_length": 81.4, "entropy": 1.2, "kl": math.nan}
    display.log(101, {**numbers, "loss": -0.00123, "grad_norm": 0.5, "tokens_per_second": 12345.0})
    head, row = stream.getvalue().splitlines()
    assert row.split() == ["101/104", "0.5", "0.25", "81.4", "1.2", "nan", "-0.00123", "0.5", "12,345", "3:00"]
    assert len(head) == len(row) < 80
    display.log(102, {"length": 1.0})
    display.close()
    assert stream.getvalue().splitlines()[2].split() == ["102/104", "-", "-", "1", *"-----", "2:00"]


@pytest.mark.parametrize("metrics", [{}, {"policy/reward_margin": 0.5, "policy/accuracy_mean": 0.75}])
def test_a_row_of_supervised_training_has_its_numbers(metrics: dict[str, float]) -> None:
    stream = io.StringIO()
    Display(10, stream=stream, clock=ticks()).log(1, {"loss": 0.5, "grad_norm": 2.0, **metrics})
    head, row = (line.split() for line in stream.getvalue().splitlines())
    assert head == ["step", "loss", *(["margin", "accuracy"] if metrics else []), "grad", "left"]
    assert row == ["1/10", "0.5", *(["0.5", "0.75"] if metrics else []), "2", "9"]


def test_an_evaluation_is_a_line_of_its_own() -> None:
    stream = io.StringIO()
    display = Display(10, stream=stream, clock=ticks())
    display.log(0, {"eval/avg@4": 0.5, "eval/avg@4/low": 0.44, "eval/avg@4/high": 0.56, "eval/failed": 0.0})
    display.log(1, {"reward": 0.1})
    display.note("checkpoint \x1b[31mstep-1")
    assert stream.getvalue().splitlines()[0] == "step 0: avg@4 0.5 (0.44 to 0.56)"
    assert stream.getvalue().splitlines()[-1] == r"checkpoint \x1b[31mstep-1"
    assert format_evaluation({"eval/failed": 0.5, "eval/low": 1.0}) == "failed 0.5, low 1"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A terminal of 60 columns: a stream to write to, and what arrives there, up to a text and an end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    monkeypatch.setenv("COLUMNS", "60")
    text = ""

    def arrived(has: str, end: str) -> str:
        nonlocal text
        while has not in text or not text.endswith(end):
            text += os.read(master, 1 << 16).decode()
        return text

    with os.fdopen(slave, "w") as stream:
        yield stream, arrived
    os.close(master)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after a text with carriage returns and erasures."""
    lines = [""]
    at = 0
    for part in text.replace("\x1b[K", "\0").replace("\r\n", "\n"):
        if part == "\n":
            lines.append("")
            at = 0
        elif part == "\r":
            at = 0
        elif part == "\0":
            lines[-1] = lines[-1][:at]
        else:
            lines[-1] = lines[-1][:at].ljust(at) + part + lines[-1][at + 1 :]
            at += 1
    return lines


def test_on_a_terminal_the_last_row_is_live(terminal: Any) -> None:
    stream, arrived = terminal
    display = Display(100, stream=stream, clock=ticks())
    assert display.live
    for step in range(1, 4):
        display.log(step, {"reward": step / 10})
    text = arrived("3/100", "\x1b[K")
    lines = screen(text)
    assert [line.split()[0] for line in lines] == ["step", "1/100", "3/100"] and "2/100" in text
    display.note("saved")
    display.log(4, {"reward": 0.4})
    text = arrived("4/100", "\x1b[K")
    assert [line.split()[0] for line in screen(text)] == ["step", "1/100", "saved", "4/100"]
    for step in range(5, 101):
        display.log(step, {"reward": step / 10})
        if step % 10 == 0:
            arrived(f"{step}/100", "")  # a terminal's buffer is small
    display.close()
    lines = screen(arrived("100/100", "\r\n"))
    assert len(lines) == 1 + 1 + 1 + 20 + 1 and lines[-1] == "" and lines[-2].split()[0] == "100/100"
    assert max(map(len, lines)) < 60


def test_a_run_that_stops_early_leaves_its_last_row() -> None:
    stream = io.StringIO()
    display = Display(100, stream=stream, live=True, clock=ticks())
    display.log(1, {"reward": 0.1})
    display.log(2, {"reward": 0.2})
    display.close()
    display.close()
    assert [line.split()[:1] for line in screen(stream.getvalue())] == [["step"], ["1/100"], ["2/100"], []]


def test_durations_are_for_people() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.4, 60, 3599, 3600, 90_000)] == [
        "0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "1 d 1 h",
    ]  # fmt: skip
