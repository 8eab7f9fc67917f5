"""Layouts, aggregation, moments and registries: what all functions of the package stand on."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.algorithms.aggregate import MODES, aggregate, masked_mean
from rollbook.algorithms.groups import whiten
from rollbook.algorithms.layout import Layout
from rollbook.algorithms.registry import Registry
from rollbook.algorithms.results import Report
from rollbook.batch.plan import Denominators
from rollbook.core.checks import check_float
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows

FLOATS = st.floats(-10, 10, width=32)
ROWS = st.lists(st.lists(st.tuples(FLOATS, st.booleans()), max_size=5), min_size=1, max_size=6)


def parts(rows: list[list[tuple[float, bool]]]) -> tuple[list[list[float]], list[list[bool]]]:
    return [[v for v, _ in row] for row in rows], [[m for _, m in row] for row in rows]


def padded(rows: list[list[Any]], side: str, extra: int, fill: Any, dtype: torch.dtype) -> torch.Tensor:
    width = max(map(len, rows)) + extra
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        at = width - len(row) if side == "left" else 0
        out[i, at : at + len(row)] = torch.tensor(row, dtype=dtype)
    return out


def layouts(rows: list[list[tuple[float, bool]]]) -> list[tuple[Any, Any]]:
    """The same values and mask in every form; NaN where nothing counts."""
    _, mask = parts(rows)
    broken = [[v if m else math.nan for v, m in row] for row in rows]
    lengths = [len(row) for row in rows]
    flat = torch.tensor([v for row in broken for v in row], dtype=torch.float64)
    bits = torch.tensor([m for row in mask for m in row], dtype=torch.bool)
    column = Ragged.from_arrays(broken, "float64")
    return [
        (padded(broken, "left", 0, math.nan, torch.float64), padded(mask, "left", 0, False, torch.bool)),
        (padded(broken, "right", 3, math.nan, torch.float64), padded(mask, "right", 3, 0, torch.int64)),
        (Rows(flat, lengths), Rows(bits, lengths)),
        (flat, Rows(bits.to(torch.float32), lengths)),
        (column, Rows(bits, lengths)),
        ([torch.tensor(row, dtype=torch.float64) for row in broken], mask),
    ]


@given(rows=ROWS, mode=st.sampled_from(MODES))
def test_aggregates_equal_their_loop_in_every_layout(rows: list[list[tuple[float, bool]]], mode: str) -> None:
    unmasked = [[v for v, m in row if m] for row in rows]
    tokens = [v for row in unmasked for v in row]
    full = [row for row in unmasked if row]
    expected = {
        "token-mean": sum(tokens) / max(len(tokens), 1),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in full) / max(len(full), 1),
        "seq-mean-token-sum": sum(map(sum, full)) / max(len(full), 1),
        "seq-mean-token-sum-norm": sum(tokens) / 7.5,
    }[mode]
    for values, mask in layouts(rows):
        assert aggregate(values, mask, mode=mode, norm=7.5).item() == pytest.approx(expected, abs=1e-9)


@given(rows=ROWS, mode=st.sampled_from(MODES), split=st.integers(0, 6))
def test_micro_batches_add_up_in_value_and_gradient(
    rows: list[list[tuple[float, bool]]], mode: str, split: int
) -> None:
    values, mask = parts(rows)
    counts = [sum(row) for row in mask]
    denominators = Denominators(sum(counts), sum(map(bool, counts)), len(rows))
    matrix = padded(values, "left", 0, math.nan, torch.float64).requires_grad_()
    bits = padded(mask, "left", 0, False, torch.bool)
    full_loss = aggregate(matrix, bits, mode=mode, norm=3)
    (right,) = torch.autograd.grad(full_loss, matrix)
    halves = [
        aggregate(matrix[p], bits[p], mode=mode, norm=3, denominators=denominators)
        for p in (slice(0, split), slice(split, None))
        if len(matrix[p])
    ]
    total = sum(halves)
    (summed_gradient,) = torch.autograd.grad(total, matrix)
    torch.testing.assert_close(total, full_loss)
    torch.testing.assert_close(summed_gradient, right)
    assert torch.isfinite(right).all()


@given(rows=ROWS)
def test_row_sums_and_counts_have_gradients_that_agree(rows: list[list[tuple[float, bool]]]) -> None:
    values, mask = parts(rows)
    flat = torch.tensor([v for row in values for v in row], dtype=torch.float64, requires_grad=True)
    lengths = [len(row) for row in rows]

    def through(tokens: torch.Tensor) -> torch.Tensor:
        layout = Layout.from_tokens(mask, values=Rows(tokens, lengths))
        taken = layout.take("values", tokens)
        return layout.row_means(taken**2) + layout.row_sums(taken * layout.spread(layout.row_sums(taken)))

    if len(flat):
        assert torch.autograd.gradcheck(through, (flat,))
    layout = Layout.from_tokens(mask)
    assert layout.counts.tolist() == [sum(row) for row in mask]
    assert layout.row_index.tolist() == [i for i, row in enumerate(rows) for _ in row]


@given(rows=ROWS, std=st.sampled_from(["sample", "population"]), eps_in=st.sampled_from(["variance", "std", "floor"]))
def test_whitening_equals_its_loop_in_every_layout(rows: list[list[tuple[float, bool]]], std: str, eps_in: str) -> None:
    unmasked = [v for row in rows for v, m in row if m]
    same = len(unmasked) < 2 or min(unmasked) == max(unmasked)
    mean = statistics.fmean(unmasked) if unmasked else 0.0
    deviation = 0.0 if same else (statistics.stdev if std == "sample" else statistics.pstdev)(unmasked)
    eps = 1e-4
    divisor = {
        "variance": math.sqrt(deviation**2 + eps),
        "std": deviation + eps,
        "floor": math.sqrt(max(deviation**2, eps)),
    }
    expected = [[0.0 if same or not m else (v - mean) / divisor[eps_in] for v, m in row] for row in rows]
    for values, mask in layouts(rows):
        whitened = whiten(values, mask, std=std, eps=eps, eps_in=eps_in)
        layout = Layout.from_tokens(mask, values=values)
        tokens = layout.tensor("found", whitened)
        assert tokens[layout.mask].tolist() == pytest.approx(
            [v for row, r in zip(expected, rows, strict=True) for v, (_, m) in zip(row, r, strict=True) if m], abs=1e-6
        )
        assert not tokens[~layout.mask].any()


def test_whitening_can_keep_mean_or_deviation() -> None:
    values = torch.tensor([[1.0, 3.0]])
    assert whiten(values, scale=False).tolist() == [[-1.0, 1.0]]
    assert whiten(values, shift_mean=False, std="population").tolist() == [[pytest.approx(1.0), pytest.approx(3.0)]]
    # The mean over all tokens, not over padding: an unmasked sum over a masked count was LightRFT's.
    whitened = whiten(torch.tensor([[1.0, 100.0, 3.0]]), torch.tensor([[1, 0, 1]]), std="population")
    assert whitened[0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout.from_tokens(None),
            "tokens: got nothing without row lengths, expected a matrix (B, R), or Rows",
        ),
        (lambda: Layout.from_tokens(torch.ones(3)), "tokens: got mask without row lengths"),
        (lambda: Layout.from_tokens(torch.ones(1, 2, 3)), "mask: got 3 dimensions, expected 2 (B, R), or packed rows"),
        (lambda: Layout.from_tokens([[1, 2]]), "mask: got 2, expected 0 and 1 only"),
        (lambda: Layout.from_tokens([[math.nan]]), "mask: got nan, expected 0 and 1 only"),
        (lambda: Layout.from_tokens("ab"), "mask: got str, expected a matrix"),
        (lambda: Layout.from_tokens([1, 0]), "mask: got a flat list, expected one row for each sample"),
        (lambda: aggregate(torch.ones(2, 3), torch.ones(2, 2)), "values: got shape [2, 3], expected [2, 2]"),
        (
            lambda: aggregate([[1.0], [1.0, 2.0]], [[1], [1]]),
            "values: got rows of lengths [1, 2], expected 2 packed rows of lengths [1, 1]",
        ),
        (lambda: aggregate([[[1.0]]], [[1]]), "values: row 0 has 2 dimensions, expected 1"),
        (lambda: aggregate([["a"]], [[1]]), "values: row 0: expected an array of numbers"),
        (lambda: masked_mean([1.0], [1, 1]), "mask: got shape [2], expected [1], as the values have"),
        (lambda: whiten([[1.0]], eps_in="mean"), "eps_in: got 'mean', expected one of"),
        (lambda: whiten([[1.0]], std="all"), "std: got 'all'"),
        (lambda: check_float("clip", True), "clip: got True"),
        (lambda: check_float("clip", math.nan), "clip: got nan"),
        (lambda: Report(2).with_ids(["a"]), "ids: got 1, expected 2, one for each row"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    import re

    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_registries_refuse_what_would_be_silent() -> None:
    registry = Registry("thing")
    registry.register("one", "uno", source="here")(lambda x, *, scale=1: x * scale)
    with pytest.raises(ValueError, match="thing 'uno' is registered already"):
        registry.register("uno", source="here")(lambda x: x)
    with pytest.raises(ValueError, match="thing 'two': option 'scale' has no default"):
        registry.register("two", source="here")(lambda x, *, scale: x)
    with pytest.raises(ValueError, match=r"thing 'two': takes \*\*more"):
        registry.register("two", source="here")(lambda x, **more: x)
    assert registry.names() == ["one"] and len(registry) == 2 and list(registry) == ["one", "uno"]
    assert registry["uno"].inputs == {"x": True} and registry["uno"].aliases == ("uno",)
    registry.unregister("uno")
    assert "one" not in registry


def test_a_matrix_beside_lists_makes_them_matrices() -> None:
    layout = Layout.from_tokens([[1, 0], [1, 1]], values=torch.ones(2, 2))
    assert not layout.packed and layout.mask.tolist() == [[True, False], [True, True]]
    assert layout.take("more", np.array([[1.5, 2.5], [3.5, 4.5]])).tolist() == [[1.5, 0.0], [3.5, 4.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_only_a_way_to_write_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.rand(8, 4096) + 1).to(dtype)
    packed, exact = Rows(matrix.reshape(-1), [4096] * 8), matrix.to(torch.float64)
    for mode in MODES:
        right = aggregate(exact, mode=mode, norm=7.0).item()
        for values in (matrix, packed):
            loss = aggregate(values, mode=mode, norm=7.0)
            assert loss.dtype == torch.float32 and loss.item() == pytest.approx(right, rel=1e-5)
    assert masked_mean(torch.ones(8, 16384, dtype=dtype)).item() == 1
    white = whiten(matrix)
    assert white.dtype == torch.float32
    torch.testing.assert_close(white.to(torch.float64), whiten(exact), rtol=1e-5, atol=1e-5)


def test_long_packed_rows_do_not_drift() -> None:
    torch.manual_seed(0)
    values = torch.rand(2, 1 << 17)
    lengths = [1 << 17] * 2
    padded_, packed = Layout.from_tokens(None, v=values), Layout.from_tokens(None, v=Rows(values.reshape(-1), lengths))
    right = values.to(torch.float64).sum(-1)
    for layout, tokens in ((padded_, values), (packed, values.reshape(-1))):
        torch.testing.assert_close(layout.row_sums(tokens).to(torch.float64), right, rtol=1e-7, atol=0)


def test_arrays_of_any_kind_are_read() -> None:
    mask = np.array([[1, 0], [1, 1]])
    assert Layout.from_tokens(mask[:, ::-1]).mask.tolist() == [[False, True], [True, True]]
    assert Layout.from_tokens(mask.astype(">i4")).counts.tolist() == [1, 2]
    frozen = np.ones((1, 2))
    frozen.flags.writeable = False
    assert aggregate(frozen).item() == 1
    assert Layout.from_tokens([[1, 1], []]).tensor("ids", [[5, 6], []]).dtype == torch.int64
    assert check_float("gamma", np.float32(0.5), 0, 1) == 0.5


@pytest.mark.parametrize("invalid", [5, {"tokens": 3}, (1, 2)])
def test_denominators_are_denominators(invalid: Any) -> None:
    with pytest.raises(ValueError, match="denominators: got .*, expected the Denominators of the whole batch"):
        aggregate([[1.0]], denominators=invalid)


def test_denominators_of_a_narrowed_mask_make_micro_batches_add_up() -> None:
    from rollbook.algorithms.aggregate import count_denominators

    values, mask = torch.arange(12.0).reshape(3, 4), torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    denominators = count_denominators(mask)
    assert denominators == Denominators(3, 2, 3)
    for mode in MODES[:3]:
        parts = sum(
            aggregate(values[i : i + 1], mask[i : i + 1], mode=mode, denominators=denominators) for i in range(3)
        )
        assert parts.item() == pytest.approx(aggregate(values, mask, mode=mode).item())


def test_means_of_packed_rows() -> None:
    values, mask = Rows(torch.tensor([1.0, 2.0, 4.0]), [2, 1]), Rows(torch.tensor([True, True, False]), [2, 1])
    assert masked_mean(values, mask).item() == 1.5
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 0.0]
    with pytest.raises(ValueError, match="dim: got 0, expected 1 or -1"):
        masked_mean(values, mask, dim=0)


def test_a_name_that_is_taken_leaves_the_registry_as_it_was() -> None:
    registry = Registry("thing")
    registry.register("one", source="here")(lambda x: x)
    with pytest.raises(ValueError, match="thing 'one' is registered already"):
        registry.register("two", "one", source="here")(lambda x: x)
    assert list(registry) == ["one"]
    assert registry.get("nope") is None


@pytest.mark.parametrize(("typed", "meant"), [("epsilon", "eps"), ("epz", "eps"), ("Singleton", "singleton")])
def test_the_nearest_option_is_the_one_that_was_meant(typed: str, meant: str) -> None:
    from rollbook.algorithms import ESTIMATORS

    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        ESTIMATORS.call("grpo", {"rewards": [1.0], "groups": ["a"]}, **{typed: 1})
