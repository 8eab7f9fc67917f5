"""Training steps of every preset give the recorded numbers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.train.preset_steps import PATH, SETTINGS, Numbers, compare_steps, measure_case

STEPS = 3
"""Fewer than recorded: `python -m tests.train.preset_steps --compare` compares all."""


@cache
def recorded() -> dict[str, list[Numbers]]:
    cases: dict[str, list[Numbers]] = json.loads(PATH.read_text())
    return cases


def test_every_case_is_recorded() -> None:
    assert list(recorded()) == list(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_give_the_recorded_numbers(name: str) -> None:
    assert compare_steps(recorded()[name][:STEPS], measure_case(name, STEPS)) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"kl_coef": 0.0011}),
        ("grpo", {"loss_options": {"clip_high": 0.19}}),
        ("grpo", {"estimator_options": {"eps": 1e-4}}),
        ("ppo", {"lam": 0.99}),
        ("ppo", {"value_clip": 0.19}),
        ("dapo", {"loss_options": {"clip_low": 0.19}}),
    ],
)
def test_a_changed_setting_is_detected(name: str, changes: dict[str, Any]) -> None:
    assert compare_steps(recorded()[name][:STEPS], measure_case(name, STEPS, **changes))
