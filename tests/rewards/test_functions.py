"""Reward functions: names, results, pools, limits, and that one sample's failure is its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import EID
from rollbook.compat.lightrft.rewards import PositionalFile
from rollbook.rewards import FunctionReward, Limits, RewardError, RewardInput, as_reward, batched
from rollbook.rewards.functions import FIELDS, FileFunction, read_scores
from tests.rewards import helpers
from tests.rewards.helpers import as_told, doubled, later, process_id, sample, samples, two_at_most


def nans(values: list[float]) -> list[bool]:
    return [math.isnan(value) for value in values]


# --- what a function sees -------------------------------------------------------------------------------------------


def test_a_function_sees_the_response_alone() -> None:
    seen: list[Any] = []

    def function(response: str) -> float:
        seen.append(response)
        return 1.0

    FunctionReward(function)([sample("answer", prompt="the system prompt says <think>")])
    assert seen == ["answer"]


def test_a_function_gets_what_it_names() -> None:
    sample = RewardInput(
        prompt="p",
        response="r",
        reference="f",
        label="l",
        messages=[{"role": "user", "content": "p"}],
        images=("i",),
        prompt_ids=[1],
        response_ids=[2],
        eid=EID(1, 2),
        finish_reason="stop",
        info={"k": 1},
    )

    def function(**everything: Any) -> float:
        assert everything == {name: getattr(sample, name) for name in FIELDS}
        assert everything["query"] == "pr"
        return 1.0

    assert FunctionReward(function)([sample]).rewards == [1.0]

    def some(label: str, reference: str, missing: int = 5, *, info: dict[str, int]) -> float:
        assert (label, reference, missing, info) == ("l", "f", 5, {"k": 1})
        return 2.0

    assert FunctionReward(some)([sample]).rewards == [2.0]


def test_other_libraries_names_are_known() -> None:
    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float((data_source, solution_str, ground_truth) == ("l", "r", "f"))

    def trl(completions: list[str], prompts: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
        assert kwargs["responses"] == completions and "response" not in kwargs
        return [float(c == "r" and p == "p" and g == "f") for c, p, g in zip(completions, prompts, ground_truth)]  # noqa: B905

    sample = RewardInput(prompt="p", response="r", reference="f", label="l")
    assert FunctionReward(verl)([sample]).rewards == [1.0]
    assert FunctionReward(trl)([sample, sample]).rewards == [1.0, 1.0]


def test_a_function_of_trl_receives_columns_of_the_data() -> None:
    def trl(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [float(c == s) for c, s in zip(completions, solution, strict=True)]

    rows = [RewardInput(prompt="p", response="r", info={"solution": s, "level": 1}) for s in ("r", "x")]
    assert FunctionReward(trl)([*rows, RewardInput(prompt="p", response="r", info={})]).rewards == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="trl: parameter 'solution' is neither a field .*did you mean 'solutoin'"):
        FunctionReward(trl)([RewardInput(prompt="p", response="r", info={"solutoin": "r"})])
    with pytest.raises(ValueError, match="parameter 'refrences' is neither a field .*did you mean 'references'"):
        FunctionReward(lambda completions, refrences, **kwargs: [1.0])(rows)
    with pytest.raises(ValueError, match="parameter 'solution' is not a field of a sample"):
        FunctionReward(lambda completions, solution: [1.0])


def test_an_unknown_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"f: parameter 'respons' .*did you mean 'response'\?"):
        as_reward(lambda respons: 1.0, name="f")
    with pytest.raises(ValueError, match="positional only"):
        as_reward(lambda response, /: 1.0)
    with pytest.raises(ValueError, match="batched=True gives lists"):
        FunctionReward(lambda responses: 1.0, batched=False)


def test_a_partial_keeps_what_it_has_fixed() -> None:
    def function(response: str, reference: str, scale: float) -> float:
        return scale * (response == reference)

    fixed = functools.partial(function, reference="a", scale=3.0)
    assert FunctionReward(fixed)([sample("a", reference="b")]).rewards == [3.0]
    assert FunctionReward(fixed).name == "function"


# --- what it gives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, True, np.float64(1), np.int32(1), torch.tensor(1), torch.tensor([1.0]), 1.0])
def test_numbers_of_all_kinds_become_floats(value: Any) -> None:
    rewards = FunctionReward(lambda response: value)(samples("a")).rewards
    assert rewards == [1.0] and type(rewards[0]) is float


def test_a_dict_has_a_total_and_metrics() -> None:
    def function(response: str) -> dict[str, Any]:
        return {"score": len(response), "format": True} if response != "bb" else {"score": 0, "other": 2}

    scores = FunctionReward(function)(samples("a", "bb", "ccc"))
    assert scores.rewards == [1.0, 0.0, 3.0]
    assert scores.metrics["format"][0] == 1.0 and nans(scores.metrics["format"]) == [False, True, False]
    assert nans(scores.metrics["other"]) == [True, False, True]


def test_a_dict_without_a_total_is_an_error_and_not_a_sum() -> None:
    parts = {"accuracy": 1.0, "format": 0.5}
    scores = FunctionReward(lambda response: parts)(samples("a"))
    assert nans(scores.rewards) == [True]
    assert "without 'reward' or 'score' (accuracy, format)" in (scores.errors[0] or "")
    assert FunctionReward(lambda response: parts, total="sum")(samples("a")).rewards == [1.5]
    assert FunctionReward(lambda response: parts, total="sum")(samples("a")).parts == tuple(parts)


def test_what_goes_wrong_is_that_samples_error() -> None:
    scores = FunctionReward(as_told)(samples("1", "raise", "nan", "text", "none", "exit", "2"))
    assert nans(scores.rewards) == [False, True, True, True, True, True, False]
    assert [scores.rewards[0], scores.rewards[-1]] == [1.0, 2.0]
    assert scores.errors == [
        None,
        f"as_told: {helpers.RAISED}",
        "as_told: gave nan, expected a finite number",
        "as_told: gave str ('good'), expected a number",
        "as_told: gave NoneType (None), expected a number",
        f"as_told: {helpers.EXITED}",
        None,
    ]


def test_a_fixed_score_or_an_exception_instead() -> None:
    fixed = FunctionReward(as_told, on_error=-1)(samples("1", "raise"))
    assert fixed.rewards == [1.0, -1.0] and fixed.errors[1] is not None
    with pytest.raises(RewardError, match="sample 3/4/0/0/x: as_told: KeyError"):
        FunctionReward(as_told, on_error="raise")([sample("raise", eid=EID(3, 4, suffix="x"))])


def test_failures_are_logged_once_a_call_without_the_texts(caplog: pytest.LogCaptureFixture) -> None:
    FunctionReward(as_told)(samples("1", "raise", "nan", prompt="secret prompt"))
    assert len(caplog.records) == 1
    assert "2 of 3 samples failed (2 without a reward)" in caplog.text and "secret" not in caplog.text


def test_no_samples_no_calls() -> None:
    assert FunctionReward(as_told)([]).rewards == []
    assert FunctionReward(doubled)([]).rewards == []
    assert FunctionReward(later)([]).rewards == []


# --- batched --------------------------------------------------------------------------------------------------------


def test_batched_functions_take_lists() -> None:
    sizes: list[int] = []

    @batched
    def function(response: list[str], reference: list[str]) -> list[int]:
        sizes.append(len(response))
        return [int(a == b) for a, b in zip(response, reference, strict=True)]

    inputs = [sample(str(i), reference="3") for i in range(7)]
    reward = FunctionReward(function, batch_size=3)
    assert reward.batched
    assert reward(inputs).rewards == [0, 0, 0, 1, 0, 0, 0]
    assert sorted(sizes) == [1, 3, 3]
    with pytest.raises(ValueError, match="takes one sample at a time"):
        FunctionReward(as_told, batch_size=3)


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_a_wrong_number_of_scores_is_raised(pool: Any) -> None:
    with contextlib.closing(FunctionReward(two_at_most, batch_size=3, pool=pool, on_error=0.0)) as reward:
        assert reward(samples("a", "b")).rewards == [1.0, 1.0]
        with pytest.raises(ValueError, match="two_at_most: gave 2 scores, expected 3, one for each sample"):
            reward(samples(*"abcde"))


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        torch.tensor([[1.0], [2.0]]),
        {"rewards": torch.tensor([1, 2])},
        {"scores": [1, 2]},
        ([1, 2], {}),
        [{"reward": 1}, {"reward": 2}],
        [torch.tensor(1), np.float32(2)],
    ],
)
def test_the_forms_of_a_batch(value: Any) -> None:
    assert [part[0] for part in read_scores(value, 2)] == [1.0, 2.0]


def test_metrics_of_a_batch() -> None:
    parts = read_scores({"rewards": [1, 2], "extra_logs": {"a": torch.tensor([3, 4])}, "b": [5, None]}, 2)
    assert parts[0] == (1.0, {"a": 3.0, "b": 5.0}, None)
    assert parts[1][1]["a"] == 4.0 and parts[1][2] == "b: gave NoneType (None), expected a number"
    with pytest.raises(ValueError, match="gave 1 entries of 'a', expected 2"):
        read_scores(([1, 2], {"a": [1]}), 2)
    with pytest.raises(ValueError, match="gave float, expected a list of 2 scores"):
        read_scores(1.0, 2)


# --- pools ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(-5, 5), max_size=40), st.integers(1, 7))
def test_order_is_kept_for_any_number_of_workers(values: list[int], workers: int) -> None:
    def function(response: str) -> float:
        time.sleep(0.0002 * (int(response) % 3))
        return float(response)

    scores = FunctionReward(function, workers=workers)(samples(*map(str, values)))
    assert scores.rewards == values


def test_calls_overlap() -> None:
    together = threading.Barrier(8, timeout=30)  # breaks, and every call with it, unless all are there at once
    scores = FunctionReward(lambda response: together.wait(), workers=8)(samples(*"abcdefgh"))
    assert sorted(scores.rewards) == list(range(8))


def test_a_hanging_thread_is_left_behind_and_the_rest_goes_on() -> None:
    start = time.monotonic()
    scores = FunctionReward(as_told, workers=1, time_limit=0.5)(samples("hang", "1", "hang", "2"))
    assert time.monotonic() - start < 10
    assert scores.rewards[1] == 1.0 and scores.rewards[3] == 2.0 and nans(scores.rewards)[::2] == [True, True]
    assert "timed out after 0.5 s; its thread is still running" in (scores.errors[0] or "")


def test_the_limit_counts_from_when_a_call_begins() -> None:
    def function(response: str) -> float:
        time.sleep(0.2)
        return 1.0

    assert FunctionReward(function, workers=1, time_limit=1.0)(samples(*"abcdefgh")).errors == [None] * 8


@pytest.fixture(scope="module")
def told_in_processes() -> Any:
    reward = FunctionReward(as_told, pool="process", workers=2, time_limit=1.0)
    yield reward
    reward.close()


def test_processes_are_killed_and_replaced(told_in_processes: FunctionReward) -> None:
    start = time.monotonic()
    scores = told_in_processes(samples("1", "spin", "die", "raise", "segfault", "exit", "2"))
    assert time.monotonic() - start < 60
    assert scores.rewards[0] == 1.0 and scores.rewards[-1] == 2.0
    assert scores.errors == [
        None,
        "as_told: timed out after 1 s",
        "as_told: its process ended with exit code 7",
        f"as_told: {helpers.RAISED}",
        "as_told: its process ended with exit code -11",
        f"as_told: {helpers.EXITED}",
        None,
    ]
    again = told_in_processes(samples("4", "5"))
    assert again.rewards == [4.0, 5.0]


def test_a_busy_process_is_really_gone() -> None:
    with_pid = FunctionReward(process_id, pool="process", workers=1)
    pid = int(with_pid(samples("a")).rewards[0])
    assert pid != os.getpid() and int(with_pid(samples("b")).rewards[0]) == pid
    with_pid.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert int(with_pid(samples("c")).rewards[0]) != pid  # and it starts again when it is used again
    with_pid.close()


def test_a_process_cannot_hold_a_local_function() -> None:
    with pytest.raises(ValueError, match="define it at the top level of a module"):
        FunctionReward(lambda response: 1.0, pool="process")


def test_arguments_that_cannot_travel_are_that_samples_error(told_in_processes: FunctionReward) -> None:
    reward = FunctionReward(takes_info, pool="process", workers=1)
    scores = reward([sample("a", info={"x": 1}), sample("b", info={"x": lambda: 1})])
    assert scores.rewards[0] == 1.0 and "cannot be sent to another process" in (scores.errors[1] or "")
    reward.close()


def takes_info(info: dict[str, Any]) -> float:
    return float(info["x"])


def test_batched_and_async_functions_in_processes() -> None:
    with_lists = FunctionReward(doubled, pool="process", workers=1)
    assert with_lists([sample("1", reference="5"), sample("2", reference="6")]).rewards == [7.0, 10.0]
    with_lists.close()
    awaited = FunctionReward(later, pool="process", workers=1)
    assert awaited(samples("1", "2")).rewards == [1.0, 2.0]
    awaited.close()


# --- async ------------------------------------------------------------------------------------------------------------


async def slow_or_not(response: str) -> float:
    if response == "hang":
        await asyncio.sleep(60)
    if response == "raise":
        raise KeyError("told to")
    await asyncio.sleep(0.01)
    return float(response)


def test_async_functions_overlap_and_are_canceled() -> None:
    reward = FunctionReward(slow_or_not, time_limit=1.0)
    start = time.monotonic()
    scores = reward(samples("1", "hang", "raise", *["2"] * 60))
    assert time.monotonic() - start < 10
    assert scores.rewards[0] == 1.0 and scores.rewards[3:] == [2.0] * 60
    assert scores.errors[1] == "slow_or_not: timed out after 1 s"
    assert (scores.errors[2] or "").startswith(f"slow_or_not: KeyError: 'told to' ({__file__}, line ")


def test_every_kind_works_inside_a_running_loop() -> None:
    async def work() -> list[list[float]]:
        rewards = []
        for function in (as_told, slow_or_not, doubled):
            inputs = [sample("1", reference="0"), sample("2", reference="0")]
            reward = FunctionReward(function)
            assert reward(inputs) == await reward.score_async(inputs)
            rewards.append(reward(inputs).rewards)
        return rewards

    assert asyncio.run(work()) == [[1.0, 2.0], [1.0, 2.0], [2.0, 4.0]]


def test_the_loop_goes_on_meanwhile() -> None:
    async def work() -> int:
        ticks = 0
        task = asyncio.create_task(FunctionReward(lambda response: time.sleep(0.3) or 1.0).score_async(samples("a")))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(work()) > 3


def test_an_object_with_an_async_call() -> None:
    class Judge:
        async def __call__(self, response: str) -> float:
            return float(response)

    assert FunctionReward(Judge())(samples("3")).rewards == [3.0]
    assert FunctionReward(Judge()).name == "Judge"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_with_reward_func(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    return torch.tensor([len(q) - len(p) + (l == 'x') for q, p, l in zip(queries, prompts, labels)])\n"
        "def other(response): return -1\n"
    )
    inputs = [sample("abc", label="x"), sample("a", label="y")]
    assert as_reward(str(path))(inputs).rewards == [4.0, 1.0]
    assert as_reward(path)(inputs).rewards == [4.0, 1.0]
    assert as_reward(f"{path}:other")(inputs).rewards == [-1.0, -1.0]
    with pytest.raises(ValueError, match=r"it has no function 'othr'; did you mean 'other'\?"):
        as_reward(f"{path}:othr")
    with pytest.raises(ValueError, match="expected a .py file; there is no /"):
        as_reward(str(tmp_path / "none.py"))


def test_parameters_of_a_files_function_are_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(respons, reference): return 1.0\n"
        "def reward_func(respons): return 1.0\n"
        "def positional(texts, asked): return 1.0\n"
    )
    for name, parameter in (("score", "respons"), ("reward_func", "respons"), ("positional", "texts")):
        with pytest.raises(ValueError, match=f"{name}: parameter '{parameter}' is not a field of a sample"):
            as_reward(f"{path}:{name}")
    other = tmp_path / "lightrft.py"
    other.write_text(
        "def reward_func(full, asked, right):\n    return [float(f == a + r) for f, a, r in zip(full, asked, right)]"
    )
    inputs = [sample("a", reference="a"), sample("b", reference="a")]
    assert as_reward(PositionalFile(str(other)))(inputs).rewards == [1.0, 0.0]
    with pytest.raises(ValueError, match="reward_func: parameter 'full' is not a field of a sample"):
        as_reward(str(other))


def test_the_source_of_a_reward_is_known_again(tmp_path: Path) -> None:
    def written(name: str, text: str) -> str | None:
        (tmp_path / name).write_text(text)
        return as_reward(f"{tmp_path / name}:score").source()

    first = written("a.py", "def score(response): return 1.0")
    assert first == written("b.py", "# the same\ndef score(response):\n    return 1.0\n")
    assert first is not None and first != written("c.py", "def score(response): return 2.0")
    assert as_reward("exact_match").source() is None and as_reward(["exact_match", "length"]).source() is None
    source, other_source = (
        as_reward(["length", f"{tmp_path}/{name}:score"], names=["a", "b"]).source() for name in ("a.py", "c.py")
    )
    assert source is not None and source != other_source


def test_a_file_goes_to_processes_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward_func(queries, prompts, references):\n    return {'rewards': [float(r) for r in references]}"
    )
    reward = as_reward(FileFunction(str(path)), pool="process", workers=1)
    assert reward([sample("a", reference="2")]).rewards == [2.0]
    reward.close()


def test_a_broken_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            as_reward(str(path))


# --- options ----------------------------------------------------------------------------------------------------------


def scaled(response: str, scale: float, *, add: float = 0.0) -> float:
    return scale * float(response) + add


def test_a_functions_own_options_go_to_it(tmp_path: Path) -> None:
    assert as_reward(scaled, scale=2, add=1, on_error=-5.0)(samples("3", "x")).rewards == [7.0, -5.0]
    assert as_reward("length", unit="words", target=1, per_unit=0.25)(samples("a b c")).rewards == [-0.5]
    path = tmp_path / "mine.py"
    path.write_text("def reward_func(response, scale, add=0):\n    return scale * float(response) + add\n")
    with contextlib.closing(as_reward(f"{path}:reward_func", scale=3, pool="process", workers=1)) as reward:
        assert reward(samples("3")).rewards == [9.0]
    both = as_reward([scaled, "length"], scale=2, unit="words", target=0, per_unit=0.5)
    assert both(samples("3")).metrics == {"scaled": [6.0], "length": [-0.5]}


def test_a_limit_of_the_functions_own_is_the_functions() -> None:
    def limit_of(response: str, *, time_limit: float = 1.0) -> float:
        return time_limit

    for limit, own_limit, call in ((2.0, 2.0, 60.0), (90.0, 90.0, 100.0), (None, 1.0, None)):
        reward = as_reward(limit_of, time_limit=limit)
        assert isinstance(reward, FunctionReward)
        assert (reward(samples("a")).rewards, reward.time_limit) == ([own_limit], call)
    slow = "```python\nimport time\ntime.sleep(60)\n```"
    scores = as_reward("code_match", time_limit=1.0)([sample(slow, reference={"inputs": [""], "outputs": [""]})])
    assert scores.rewards == [0.0] and scores.metrics["timed_out"] == [1.0]
    few = Limits(output=10)
    flood = [sample("print('x' * 100)", reference={"inputs": [""], "outputs": ["x" * 100]})]
    assert as_reward("code_match", limits=few)(flood).rewards == [0.0]


def test_options_that_nobody_takes_or_two_do() -> None:
    for source in (as_told, "code_match"):
        with pytest.raises(ValueError, match="'timeout' is not one of FunctionReward; did you mean 'time_limit'"):
            as_reward(source, timeout=3)
    with pytest.raises(ValueError, match=r"option 'time_limit' is not one of RemoteReward; did you mean 'timeout'"):
        as_reward("http://localhost:1", time_limit=3)
    with pytest.raises(ValueError, match=r"did you mean 'scale'\?"):
        as_reward(scaled, scal=3)
    with pytest.raises(ValueError, match="option 'name' is one of FunctionReward and of the function"):
        as_reward(lambda response, name="x": 1.0, name="mine")


def test_options_are_checked() -> None:
    for name, value in {"pool": "fork", "workers": 0, "time_limit": 0, "on_error": "skip", "total": "mean"}.items():
        with pytest.raises(ValueError, match=name):
            FunctionReward(as_told, **{name: value})  # type: ignore[arg-type]
