"""Ready functions that need more than text: mathematics, JSON schemas, length and repetition; and looking is free."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from rollbook.algorithms.shaping import length_penalty, repetition_penalty
from rollbook.rewards import (
    BUILTIN_REWARDS,
    as_reward,
    find_json_errors,
    json_match,
    json_schema,
    length,
    math_match,
    repetition,
)
from tests.rewards.helpers import sample


def test_every_ready_function_is_there_and_has_an_example() -> None:
    assert len(BUILTIN_REWARDS) == 12
    for name, function in BUILTIN_REWARDS.items():
        assert function.__name__ == name and ">>>" in (function.__doc__ or "")
        as_reward(name).close()
    with pytest.raises(KeyError):
        BUILTIN_REWARDS["nothing"]


def test_importing_rewards_loads_nothing_heavy() -> None:
    script = """
import sys
import rollbook.rewards
from rollbook.rewards import *
from rollbook.rewards import FunctionReward, RemoteReward, Recipe, as_reward, RewardInput
from rollbook.rewards import math_match, code_match, json_schema
as_reward("numeric_match")([RewardInput(prompt="", response="5", reference="5")])
heavy = ("httpx", "transformers", "PIL", "math_verify", "sympy", "jsonschema")
print([name for name in heavy if name in sys.modules])
"""
    # `import *` asks for every name, the models' too, which is torch's; all else stays away.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    without = script.replace("from rollbook.rewards import *\n", "").replace(
        'heavy = ("httpx"', 'heavy = ("torch", "httpx"'
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# --- mathematics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{x^2+2x+1}", "(x+2)^2", 0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{x = 3}", "3", 1),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        (r"\boxed{3\text{ cm}}", "3", 1),
        ("the answer is 42", "42", 1),
        ("the answer is 41", "#### 42", 0),
        ("no numbers at all", "42", 0),
        (r"\boxed{7}", ["6", "7"], 1),
        (r"\boxed{\text{B}}", "B", 1),
    ],
)
def test_math_match(response: str, reference: Any, score: int) -> None:
    assert math_match(response, reference) == score


def test_mathematics_in_threads_and_loops() -> None:
    inputs = [sample(rf"\boxed{{\frac{{{i}}}{{4}}}}", reference=f"{i / 4}") for i in range(8)]
    assert as_reward(math_match)(inputs).rewards == [1.0] * 8

    async def work() -> list[float]:
        return (await as_reward("math_match").score_async(inputs)).rewards

    assert asyncio.run(work()) == [1.0] * 8
    assert threading.current_thread() is threading.main_thread()


def test_a_comparison_that_hangs_is_stopped_and_the_answer_is_wrong() -> None:
    hard = r"\boxed{9^{9^{9^{9}}}}"
    start = time.monotonic()
    scores = as_reward("math_match", time_limit=1.0)([sample(hard, reference="7^{7^{7^{7}}}")])
    assert scores.rewards == [0.0] and scores.errors == [None]
    assert time.monotonic() - start < 30
    assert math_match(r"\boxed{\frac{2}{4}}", "1/2") == 1.0  # and the next one has a fresh process


def test_mathematics_inside_a_process_pool() -> None:
    reward = as_reward("math_match", pool="process", workers=1, time_limit=1.0)
    inputs = [(r"\boxed{\frac{2}{4}}", "1/2"), (r"\boxed{9^{9^{9^{9}}}}", "7^{7^{7^{7}}}")]
    assert reward([sample(text, reference=right) for text, right in inputs]).rewards == [1.0, 0.0]
    reward.close()


def test_a_missing_package_is_everybodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollbook.rewards import answers

    answers._validator.cache_clear()
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match="extra 'json' of Rollbook"):
        as_reward("json_schema")
    with pytest.raises(ImportError, match="extra 'json' of Rollbook"):
        as_reward(json_schema)([sample("{}", reference={"type": "object"})])
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match="extra 'remote' of Rollbook"):
        as_reward("http://localhost:1")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="extra 'math' of Rollbook"):
        as_reward("math_match")


# --- JSON ----------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "valid", "parsed"),
    [
        ('{"age": 3}', 1, 1),
        (' {"age": 3}\n', 1, 1),
        ('Here it is:\n```json\n{"age": 3}\n```\nDone', 1, 1),
        ('```\n{"age": 2.5}\n```', 0, 1),
        ('{"age": 3, "x": 1}', 0, 1),
        ('{"age": 3, "age": 4}', 0, 0),
        ('{"age": NaN}', 0, 0),
        ("{'age': 3}", 0, 0),
        ('Here it is: {"age": 3}', 0, 0),
        ("", 0, 0),
        ("[" * 200_000, 0, 0),
    ],
)
def test_json_schema(text: str, valid: int, parsed: int) -> None:
    scores = json_schema(text, PERSON)
    assert (scores["reward"], scores["json"]) == (valid, parsed)
    assert (scores["errors"] == 0) == bool(valid)


def test_json_errors_say_where() -> None:
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    assert find_json_errors('{"a": [1, "x"]}', nested) == ["$.a[1]: 'x' is not of type 'integer'"]
    assert find_json_errors('{"a": 1}') == []


def test_a_schema_for_all_samples_or_as_text() -> None:
    fixed = functools.partial(json_schema, schema=PERSON)
    assert as_reward(fixed)([sample('{"age": 3}'), sample("{}")]).rewards == [1.0, 0.0]
    assert as_reward("json_schema", schema=PERSON)([sample('{"age": 3}'), sample("{}")]).rewards == [1.0, 0.0]
    assert json_schema('{"age": 3}', '{"type": "object"}')["reward"] == 1.0
    assert json_schema('{"age": 3}', {})["reward"] == 1.0 and json_schema("3", True)["reward"] == 1.0
    for bad in (None, 3, [1], {"type": "no such type"}, {"a": 1}, {"title": "person"}, "{", {"Type": "object"}):
        with pytest.raises(ValueError, match="schema: got"):
            json_schema("{}", bad)


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ('{"z": 9}', {"a": 1}, 0),
        ('{"a": 1}', {"a": 1}, 1),
        ('{"b": [1.0, {"c": null}], "a": 1}', '{"a": 1.0, "b": [1, {"c": null}]}', 1),
        ('So:\n```json\n{"a": 1}\n```', {"a": 1}, 1),
        ('{"a": 1, "b": 2}', {"a": 1}, 0),
        ('{"a": true}', {"a": 1}, 0),
        ('{"a": [1, 2]}', {"a": [2, 1]}, 0),
        ('{"a": [1, 2]}', {"a": (1, 2)}, 1),
        ('{"a": 1', '{"a": 1}', 0),
        ('{"a": 1, "a": 1}', {"a": 1}, 0),
        ("NaN", float("nan"), 0),
        ("3", 3, 1),
        ("0.0", False, 0),
        ("null", "null", 1),
        ('"Paris"', "Paris", 1),
        ("[" * 100_000, [], 0),
    ],
)
def test_json_match(response: str, reference: Any, score: int) -> None:
    assert json_match(response, reference) == score


def test_what_json_match_cannot_compare_with() -> None:
    for bad in (None, {"a": object()}, {1, 2}):
        with pytest.raises(ValueError, match="reference: got"):
            json_match("{}", bad)


def test_a_schema_elsewhere_is_never_fetched() -> None:
    from tests.rewards.server import serve

    with serve() as server:
        with pytest.raises(Exception, match="Unresolvable|Unretrievable|not found"):
            find_json_errors("{}", {"$ref": server.url})
        assert server.requests == []


# --- length and repetition -----------------------------------------------------------------------------------------


def test_length_and_repetition_are_those_of_the_algorithms() -> None:
    rows = [[1, 2, 1, 2, 1, 2], [5, 6, 7], [], [9] * 12]
    inputs = [sample("x" if row else "", response_ids=row) for row in rows]
    long = as_reward(functools.partial(length, target=2, per_unit=0.1))(inputs)
    assert long.rewards == length_penalty([len(row) for row in rows], target=2, per_token=0.1).tolist()
    again = as_reward(functools.partial(repetition, n=2))(inputs)
    expected = [float(repetition_penalty([row], n=2)[0]) if row else 0.0 for row in rows]
    assert again.rewards == pytest.approx(expected)
    assert torch.tensor(again.rewards).dtype == torch.float32


def test_words_and_characters_for_texts_without_tokens() -> None:
    assert repetition(["ab ab ab ab", ""], [[], []], n=1, unit="words") == [-0.75, 0.0]
    assert length(["abcd"], [[]], target=2, per_unit=0.5, unit="characters") == [-1.0]
    with pytest.raises(ValueError, match="pass them or unit='words'"):
        length(["abcd"], [[]], target=2)
    with pytest.raises(ValueError, match="unit: got 'bytes'"):
        length(["abcd"], [[]], unit="bytes")  # type: ignore[arg-type]
    assert length([], []) == [] == repetition([], [])
