"""The calculator example at a tiny size; `make trials` shows that it learns, and not from random rewards."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from rollbook.rollout import Prompt

FILE = Path(__file__).parents[2] / "examples" / "calculator.py"
STEPS, GROUPS = 2, 4


@pytest.fixture(scope="module")
def calculator() -> Iterator[Any]:
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("calculator_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    torch.set_num_threads(threads)


def test_the_calculator_computes_and_judges(calculator: Any) -> None:
    row = calculator.rows(1, seed=3)[0]
    prompt = Prompt(text=row["prompt"], reference=row["reference"])
    right = calculator.Calculator(prompt)
    shown = right.respond(row["call"])
    assert shown.observation == f"={row['reference']}>" and shown.reward == 0.5 and not shown.done
    assert right.respond(row["call"]).reward == 0, "a call is paid for once"
    assert right.respond(row["reference"]).reward == 0.5
    wrong = calculator.Calculator(prompt)
    assert wrong.respond("1+1").reward == 0 and wrong.respond("x").done
    assert calculator.compute("12-40") == "-28" and calculator.compute("12") is None
    calls = [row["call"] for row in calculator.rows(500, seed=0)]
    assert len(set(calls)) == 500


def test_a_demonstration_trains_what_the_model_is_to_write(calculator: Any) -> None:
    _, tokenizer = calculator.letters.model(0)
    row = {"prompt": "mul 41 85>", "call": "41*85", "reference": "3485"}
    (prompt,) = calculator.Prompts([row]).every()
    record = calculator.demonstrate(prompt, tokenizer)
    text = [tokenizer.decode([token]) for token in record.tokens[record.prompt_length :].tolist()]
    trained = "".join(letter for letter, counts in zip(text, record.action_mask, strict=True) if counts)
    assert "".join(text) == "41*85</s>=3485>3485</s>" and trained == "41*85</s>3485</s>"


def test_it_trains_on_every_episode(calculator: Any) -> None:
    actor, tasks, held_out = calculator.warm_up(seed=0, steps=1, log=lambda line: None)
    assert 0 <= calculator.evaluate(actor, held_out, "before") < 0.4
    start = {name: value.clone() for name, value in actor.model.state_dict().items()}
    with rollbook.open("memory:") as book:
        calculator.reinforce(actor, tasks, book, STEPS, 0, GROUPS, random_reward=True)
        assert book.counts().trained == STEPS * GROUPS * 8
        assert all(record.experience_type == "multi_turn" for record in book)
    assert any(not torch.equal(value, start[name]) for name, value in actor.model.state_dict().items())
