"""Thresholds: given by keyword, mapping and text; what is wrong is named."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.inspect.doctor import CHECKS, Thresholds, describe_checks, render_markdown
from rollbook.inspect.doctor.checks import threshold_docs

NAMES = [field.name for field in fields(Thresholds)]


@given(st.sampled_from(NAMES))
def test_every_way_to_give_one(name: str) -> None:
    default = getattr(Thresholds(), name)
    changed = (
        default + 1 if isinstance(default, int) else min(default * 0.9 + 0.01, 0.5) if name == "window" else default
    )
    expected = Thresholds(**{name: changed})
    assert Thresholds.of(**{name: changed}) == expected
    assert Thresholds.of({name: changed}) == expected
    assert Thresholds.of({name: str(changed)}) == expected
    assert Thresholds.of(f" {name} = {changed} ") == expected
    assert Thresholds.of(expected) == expected


def test_what_comes_later_wins() -> None:
    thresholds = Thresholds.of("stale=0.1,loops=0.2", None, {"stale": 0.3}, kl=5)
    assert (thresholds.stale, thresholds.loops, thresholds.kl) == (0.3, 0.2, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("zero_varianc=1", "did you mean 'zero_variance'"),
        ("qqq=1", "unknown threshold 'qqq'$"),
        ("zero_variance", "expected name=value"),
        ("zero_variance=", "expected name=value"),
        ("zero_variance=high", "got 'high', expected a number"),
        ("groups=2.5", "got '2.5', expected an integer"),
        ("zero_variance=1.5", "expected a number from 0 to 1"),
        ("zero_variance=nan", "expected a number from 0 to 1"),
        ("kl=-1", "expected a number >= 0"),
        ({"groups": True}, "got True, expected an integer"),
        ({"groups": 1.0}, "got 1.0, expected an integer"),
        ({"stale": None}, "got None, expected a number"),
        ({3: 1}, "unknown threshold 3"),
        (7, "got int, expected Thresholds, a mapping or text"),
    ],
)
def test_what_is_wrong_is_named(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds.of(settings)


def test_each_has_a_meaning_and_the_table_has_what_decides() -> None:
    assert list(threshold_docs()) == NAMES
    assert all(text.endswith(".") for text in threshold_docs().values())
    rows = list(describe_checks())
    assert [row["id"] for row in rows] == list(CHECKS)
    for row in rows:
        assert row["thresholds"], row["id"]
        for threshold in row["thresholds"]:
            assert threshold["default"] == getattr(Thresholds(), threshold["name"])


def test_the_page_has_every_illness_and_threshold() -> None:
    text = render_markdown()
    assert all(f"(`{name}`)" in text for name in CHECKS)
    assert all(f"| `{name}` |" in text or f"`{name}={getattr(Thresholds(), name):g}`" in text for name in NAMES)
