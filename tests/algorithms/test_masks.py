"""Entropy masks against a loop that sorts each row, in every layout, for entropies of every kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.algorithms.filters import high_entropy_mask
from rollbook.core.rows import Rows
from tests.algorithms.test_corrections import Ragged, ragged

USUAL = settings(deadline=None, max_examples=100)
ODD = [0.0, -1e-7, -1.0, 1.0, 1.0, 2.5, math.inf, -math.inf, math.nan]


def naive(entropy: list[list[float]], masks: list[list[bool]], ratio: float, over: str) -> list[list[bool]]:
    """Tokens that count, sorted from the highest entropy, earlier ones first; the first k of them."""
    if ratio <= 0 or ratio >= 1:
        return [list(mask) for mask in masks]
    marked = [[False] * len(mask) for mask in masks]
    tokens = [(i, j) for i, mask in enumerate(masks) for j, m in enumerate(mask) if m]
    parts = [tokens] if over == "batch" else [[t for t in tokens if t[0] == i] for i in range(len(masks))]
    for part in parts:
        key = {t: entropy[t[0]][t[1]] for t in part}
        order = sorted(part, key=lambda t: (math.inf if math.isnan(key[t]) else -key[t], t))
        for i, j in order[: max(1, math.floor(len(part) * ratio)) if part else 0]:
            marked[i][j] = True
    return marked


@USUAL
@given(
    ragged(),
    st.sampled_from([0.2, 0.5, 0.29, 0.999, 1e-9]) | st.floats(-0.5, 1.5),
    st.sampled_from(["sample", "batch"]),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_mask_is_the_loop_in_every_layout(
    data: Ragged, ratio: float, over: str, random: Any, dtype: torch.dtype
) -> None:
    rows = [[random.choice(ODD) for _ in range(length)] for length in data.lengths]
    expected = naive([torch.tensor(row).to(dtype).tolist() for row in rows], data.masks, ratio, over)
    padded = high_entropy_mask(data.padded(rows, 9.0).to(dtype), data.padded_mask, ratio, over=over)
    assert padded.dtype == torch.bool and data.unpadded(padded) == expected
    assert not (padded & ~data.padded_mask).any()
    values = data.packed(rows)
    packed = high_entropy_mask(Rows(values.values.to(dtype), data.lengths), data.packed_mask, ratio, over=over)
    assert isinstance(packed, Rows) and packed.values.dtype == torch.bool
    assert [row.tolist() for row in packed] == expected


def test_a_hundred_tokens_are_cut_as_python_multiplies() -> None:
    assert int(100 * 0.29) == 28
    assert high_entropy_mask(torch.arange(100.0)[None], None, 0.29).sum() == 28
    assert high_entropy_mask([torch.arange(100.0)], None, 0.29)[0].sum() == 28


def test_the_whole_mask_is_a_copy_and_a_row_without_actions_has_none() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    entropy = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for ratio in (0.0, 1.0, -1.0, 2.0):
        selected = high_entropy_mask(entropy, mask, ratio)
        assert torch.equal(selected, mask)
        selected[:] = True
    assert mask.tolist() == [[True, False], [False, False]]
    assert high_entropy_mask(entropy, mask, 0.5).tolist() == [[True, False], [False, False]]
    assert high_entropy_mask(entropy, torch.zeros(2, 2), 0.5).tolist() == [[False, False], [False, False]]


def test_over_the_batch_rows_share() -> None:
    entropy = torch.tensor([[9.0, 8.0, 7.0], [1.0, 2.0, 3.0]])
    assert high_entropy_mask(entropy, None, 0.34, over="batch").tolist() == [[True, True, False], [False] * 3]
    assert high_entropy_mask(entropy, None, 0.34).tolist() == [[True, False, False], [False, False, True]]


def test_no_rows_and_no_tokens() -> None:
    assert high_entropy_mask(torch.zeros(0, 3), None, 0.5).shape == (0, 3)
    assert high_entropy_mask(torch.zeros(2, 0), None, 0.5).shape == (2, 0)
    assert [len(row) for row in high_entropy_mask([[], []], None, 0.5)] == [0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: high_entropy_mask(torch.zeros(1, 2), torch.ones(1, 3), 0.5),
            "entropy: got shape [1, 2], expected [1, 3]",
        ),
        (lambda: high_entropy_mask(torch.zeros(1, 2), None, math.nan), "ratio: got nan, expected a number"),
        (
            lambda: high_entropy_mask(torch.zeros(1, 2), None, 0.5, over="row"),
            "over: got 'row', expected one of 'sample'",
        ),
        (lambda: high_entropy_mask(torch.zeros(1, 2), torch.full((1, 2), 0.5)), "mask: got 0.5, expected 0 and 1 only"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)
