"""A preallocated cache equals a concatenating one, also if rows are selected in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig

from rollbook.rollout.decoding import preallocate

MOVES = st.lists(
    st.one_of(st.integers(1, 5).map(lambda n: ("grow", n)), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    min_size=1,
    max_size=12,
)


@given(MOVES, st.integers(0, 30), st.sampled_from([1, 4]))
def test_the_cache_equals_a_concatenating_one(moves: list[Any], expected_length: int, step: int) -> None:
    plain, larger = (DynamicCache(config=LlamaConfig(num_hidden_layers=2)) for _ in range(2))
    preallocate(larger, expected_length, step)
    rows, draw = 3, torch.Generator().manual_seed(0)
    for move in moves:
        if isinstance(move, list):
            if plain.get_seq_length() and max(move) < rows:
                chosen = torch.tensor(move)
                plain.reorder_cache(chosen)
                larger.reorder_cache(chosen)
                rows = len(move)
            continue
        for layer in range(2):
            keys, values = torch.randn(2, rows, 2, move[1], 4, generator=draw)
            size, _ = larger.get_mask_sizes(move[1], layer)
            for expected, actual in zip(
                plain.update(keys, values, layer), larger.update(keys, values, layer), strict=True
            ):
                length = expected.shape[-2]
                assert torch.equal(expected, actual[..., :length, :]) and not actual[..., length:, :].any()
                assert actual.shape[-2] == size and length <= size < length + step
    assert plain.get_seq_length() == larger.get_seq_length()
    larger.reset()
    assert larger.get_seq_length() == 0


def test_the_cache_is_copied_rarely_and_stays_within_its_limit() -> None:
    cache = preallocate(DynamicCache(config=LlamaConfig(num_hidden_layers=1)), 600)
    states = torch.ones(2, 1, 10, 4)
    cache.update(states, states, 0)
    places, sizes = set(), set()
    for _ in range(590):
        keys, _ = cache.update(states[..., :1, :], states[..., :1, :], 0)
        places.add(keys.data_ptr())
        sizes.add(keys.untyped_storage().nbytes() // (2 * 4 * 4))
    assert keys.shape[-2] == 600 and max(sizes) == 600 and len(sizes) <= 7 and len(places) <= 7


def test_other_kinds_of_layers_are_unchanged() -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=4)
    kinds = [type(layer).__name__ for layer in preallocate(DynamicCache(config=config), 9).layers]
    assert kinds.count("PreallocatedLayer") == config.layer_types.count("full_attention") == 1
    assert kinds.count("DynamicSlidingWindowLayer") == 5


@pytest.mark.parametrize("length", [0, 5, 100])
def test_the_cache_grows_beyond_the_expected_length(length: int) -> None:
    cache = preallocate(DynamicCache(config=LlamaConfig(num_hidden_layers=1)), length)
    states = torch.arange(8.0).view(1, 1, 2, 4)
    for i in range(5):
        keys, _ = cache.update(states + i, states, 0)
    assert keys[0, 0, :, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 4, 8]
