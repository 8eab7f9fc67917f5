"""The repetition score against its definition, and phrases of reflection against plain searches."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.io.trajectories import REFLECTIONS, count_reflections, repeat_score


def by_definition(text: str) -> float:
    suffixes = sorted(text[i:] for i in range(len(text)))
    total = 0
    for left, right in pairwise(suffixes):
        while left[:1] and left[:1] == right[:1]:
            left, right, total = left[1:], right[1:], total + 1
    return 2 * total / (len(text) * (len(text) + 1)) if len(text) > 1 else 0.0


@settings(max_examples=150)
@given(
    st.one_of(st.text("ab", max_size=60), st.text("abcdefgh é😀漢", max_size=60), st.text(max_size=40)),
    st.integers(1, 4),
)
def test_score(text: str, times: int) -> None:
    assert repeat_score(text * times) == by_definition(text * times)


@pytest.mark.parametrize("text", ["a" * 5000, "abc" * 1500, "".join(map(chr, range(32, 5000)))])
def test_long_texts(text: str) -> None:
    n = len(text)
    period = 1 if text[0] == text[1] else 3 if text[:3] == text[3:6] else n
    distinct = sum(min(period, n - k + 1) for k in range(1, n + 1))
    assert repeat_score(text) == pytest.approx(1 - distinct / (n * (n + 1) / 2), abs=1e-12)


WORDS = ["wait", "Wait", "WAIT!", "await", "waits", "let", "me", "think", "let\nme\tthink", "Let me  reconsider"]
WORDS += ["actually", "_wrong", "wrong", "rethink", "\u212a", "rethin\u212a", "mi\u017ftake", "correct\u0130on", "é"]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*WORDS, " ", " ", ".", "_", "7"]), max_size=30))
def test_reflections(words: list[str]) -> None:
    text = "".join(words)
    counts = {name: len(re.findall(rf"\b{phrase}\b", text, re.IGNORECASE)) for name, phrase in REFLECTIONS.items()}
    assert count_reflections(text) == (counts if text else {})
