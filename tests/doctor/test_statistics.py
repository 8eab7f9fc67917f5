"""The statistics against brute force and against what they must do at the edges."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollbook.inspect.statistics import at_least, block_medians, by_step, fit_weights, order, pairs, trend

numbers = hnp.arrays(np.float64, st.integers(0, 40), elements=st.integers(-5, 5).map(float))


@given(numbers)
def test_a_trend_turns_with_its_series(values: np.ndarray) -> None:
    z = trend(values)
    assert trend(-values) == -z
    assert trend(values[::-1]) == -z
    if len(values) >= 3:
        signs = [np.sign(b - a) for a, b in itertools.combinations(values, 2)]
        assert np.sign(z) == 0 or np.sign(z) == np.sign(sum(signs))


def test_noise_has_no_trend() -> None:
    dice = np.random.default_rng(0)
    detections = [abs(trend(dice.normal(size=20))) > 1.64 for _ in range(500)]
    assert 0.05 < np.mean(detections) < 0.15  # Two sides of 5% each.


def test_a_long_series_is_thinned() -> None:
    dice = np.random.default_rng(0)
    assert abs(trend(dice.normal(size=20_000))) < 4
    assert trend(np.arange(20_000.0)) > 20


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_share_is_at_least_less_than_it_is(hits: int, more: int) -> None:
    total = hits + more
    low = at_least(hits, total, 2.0)
    assert 0 <= low <= (hits / total if total else 0) + 1e-12
    assert at_least(2 * hits, 2 * total, 2.0) >= low - 1e-12


@given(st.lists(st.integers(0, 5), max_size=40))
def test_all_pairs_of_small_blocks(blocks: list[int]) -> None:
    drawn = pairs(np.array(blocks, np.int64))
    actual = sorted((min(a, b), max(a, b)) for a, b in zip(drawn.left.tolist(), drawn.right.tolist(), strict=True))
    assert actual == [(a, b) for a, b in itertools.combinations(range(len(blocks)), 2) if blocks[a] == blocks[b]]


def test_large_blocks_have_some_pairs_each_once() -> None:
    drawn = pairs(np.zeros(1000, np.int64))
    unique = {(min(a, b), max(a, b)) for a, b in zip(drawn.left.tolist(), drawn.right.tolist(), strict=True)}
    assert len(unique) == len(drawn.left) == 32_000
    assert (drawn.left != drawn.right).all()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3) | st.none()), max_size=40),
)
def test_orders_by_brute_force(rows: list[tuple[int, int, int | None]]) -> None:
    blocks = np.array([row[0] for row in rows], np.int64)
    reward = np.array([row[1] for row in rows], np.float64)
    other = np.array([np.nan if row[2] is None else row[2] for row in rows], np.float64)
    ordering = order(pairs(blocks), reward, other)
    agree = [
        np.sign(reward[a] - reward[b]) * np.sign(other[a] - other[b])
        for a, b in itertools.combinations(range(len(rows)), 2)
        if blocks[a] == blocks[b] and reward[a] != reward[b] and not np.isnan(other[a] + other[b])
    ]
    assert ordering.pairs == len(agree)
    if agree:
        assert np.isclose(ordering.d, np.mean(agree))
        assert np.isclose(ordering.differs, np.mean(np.abs(agree)))


def test_the_error_of_an_order_is_that_of_groups() -> None:
    """Its size against what many draws give."""
    orderings = []
    for seed in range(300):
        dice = np.random.default_rng(seed)
        blocks = np.repeat(np.arange(40), 6)
        # Whole groups agree or disagree more than chance would have it.
        lean = np.repeat(dice.normal(0, 1, 40), 6)
        length = dice.normal(size=240)
        orderings.append(order(pairs(blocks), lean * length + dice.normal(size=240), length))
    spread = np.std([ordering.d for ordering in orderings])
    assert 0.8 < np.mean([ordering.error for ordering in orderings]) / spread < 1.2


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=50))
def test_medians_of_blocks(rows: list[tuple[int, int]]) -> None:
    place = np.array([row[0] for row in rows], np.int64)
    values = np.array([row[1] for row in rows], np.float64)
    medians = block_medians(place, values, 5)
    for block in range(5):
        in_block = values[place == block]
        assert medians[block] == np.median(in_block) if len(in_block) else np.isnan(medians[block])


def test_a_step_that_has_only_begun_is_left_out() -> None:
    steps = np.repeat([0, 1, 2], [100, 100, 5])
    assert by_step(steps, np.ones(205)).steps.tolist() == [0, 1]
    assert by_step(np.zeros(0, np.int64), np.zeros(0)).steps.tolist() == []


def test_parts_that_add_up() -> None:
    dice = np.random.default_rng(0)
    a, b, c, d = dice.normal(size=(4, 200))
    weights = fit_weights(a + 0.01 * b, {"a": a, "b": b, "c": c, "total": a + 0.01 * b})
    assert weights is not None
    assert set(weights) == {"a", "b"}
    assert np.allclose([weights["a"], weights["b"]], [1, 0.01])
    assert fit_weights(a * b, {"a": a, "b": b}) is None
    assert fit_weights(np.ones(200), {"a": a, "b": b}) is None
    assert fit_weights(a + d, {"a": a, "b": b}) is None
    rounded = fit_weights(np.round(a + 0.1 * b, 4), {"a": a, "b": b, "c": c})
    assert rounded is not None
    assert set(rounded) == {"a", "b"}
