"""Reward processes of whole programs: scripts and programs without a file, whose work is done once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollbook.rewards import FunctionReward, as_reward
from rollbook.rewards.functions import PoolError, ProcessPool
from tests.rewards.helpers import samples

HEAD = """
import sys
print("STARTS", flush=True)
from rollbook.rewards import RewardInput, as_reward
def tried(what):
    try:
        print(what())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
def scored(source, *responses, **options):
    inputs = [RewardInput(prompt="", response=one, reference="(x+1)^2") for one in responses]
    reward = as_reward(source, workers=2, **options)
    scores = reward(inputs)
    reward.close()
    return scores.rewards, [error for error in scores.errors if error]
def own(response):
    return float(response)
"""


def ran(*command: str, folder: Path, stdin: str | None = None) -> list[str]:
    """The lines that a program prints, and those of its standard error."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.splitlines()


def script(folder: Path, body: str) -> list[str]:
    (folder / "main.py").write_text(HEAD + body)
    return ran("main.py", folder=folder)


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(response):\n    return 2 * float(response)\n")
    body = """
import mine
tried(lambda: scored("math_match", "$x^2+2x+1$", "$x$"))
tried(lambda: scored(mine.twice, "1", "2", "3", pool="process"))
tried(lambda: scored("mine:twice", "4", pool="process"))
"""
    assert script(tmp_path, body) == ["STARTS", "([1.0, 0.0], [])", "([2.0, 4.0, 6.0], [])", "([8.0], [])"]


def test_its_own_function_is_refused_in_one_line(tmp_path: Path) -> None:
    first, *rest = script(tmp_path, 'tried(lambda: scored(own, "1", "2", pool="process"))')
    assert first == "STARTS" and len(rest) == 1
    assert rest[0].startswith("ValueError: function: defined in __main__; ")
    assert "move it into a module" in rest[0] and "pool='thread'" in rest[0]


def test_objects_of_a_script_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def labelled(label):\n    return label.value\n")
    body = """
import mine
class Label:
    value = 1.0
inputs = [RewardInput(prompt="", response="", label=Label())] * 3
tried(lambda: as_reward(mine.labelled, pool="process", workers=1)(inputs).rewards)
"""
    first, *rest = script(tmp_path, body)
    assert first == "STARTS" and len(rest) == 1
    assert rest[0].startswith("PoolError: Label: defined in __main__") and "move it into a module" in rest[0]


@pytest.mark.parametrize("way", ["-c", "-"])
def test_a_program_without_a_file(way: str, tmp_path: Path) -> None:
    body = """
tried(lambda: scored("math_match", "$x^2+2x+1$"))
tried(lambda: scored("math_match", "$x^2+2x+1$", pool="process"))
tried(lambda: scored(own, "1", pool="process"))
"""
    lines = ran("-c", HEAD + body, folder=tmp_path) if way == "-c" else ran(folder=tmp_path, stdin=HEAD + body)
    assert lines[:3] == ["STARTS", "([1.0], [])", "([1.0], [])"] and len(lines) == 4
    assert "ValueError: function: defined in __main__; " in lines[3]


# --- processes that do not start, and those of processes --------------------------------------------------------------


def test_a_function_that_cannot_be_loaded_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gone_soon.py").write_text("def score(response):\n    return 1.0\n")
    reward = as_reward("gone_soon:score", pool="process", workers=2)
    (tmp_path / "gone_soon.py").unlink()
    with pytest.raises(
        PoolError, match="could not load its function: ModuleNotFoundError: No module named 'gone_soon'"
    ):
        reward(samples(*"abcdefgh" * 20))


def test_an_interpreter_that_is_not_there_is_one_error() -> None:
    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/nowhere/python")
    try:
        with pytest.raises(PoolError, match="did not start: FileNotFoundError"):
            FunctionReward(abs_of, pool="process")(samples(*"123"))
    finally:
        multiprocessing.set_executable(executable)


def abs_of(response: str) -> float:
    return abs(float(response))


def with_one_of_its_own(response: str) -> float:
    """Waits for a process of this process, which says who it is and never ends."""
    ProcessPool(spins, 1).call((response,), None)
    return 1.0


def spins(path: str) -> None:
    Path(path).write_text("here")
    while True:
        Path(path).touch()


def test_a_process_is_killed_with_its_own_processes(tmp_path: Path) -> None:
    file = tmp_path / "inner"
    reward = FunctionReward(with_one_of_its_own, pool="process", workers=1, time_limit=4.0)
    assert "timed out" in (reward(samples(str(file))).errors[0] or "")
    assert file.read_text() == "here"
    time.sleep(0.2)  # a kill is not instant
    last = file.stat().st_mtime_ns
    time.sleep(0.3)
    assert file.stat().st_mtime_ns == last
