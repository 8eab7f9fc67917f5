"""Rows in torch: padding and its inverse, in every type, on every path."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.core.fields import DTYPES
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows, Segments, Spans, concatenated, segments

TYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
lengths_and_room = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6)


def values_of(dtype: torch.dtype, total: int, trailing: tuple[int, ...] = ()) -> torch.Tensor:
    """Some bits of every kind, as values of the type."""
    size = total * int(np.prod(trailing, dtype=int))
    if dtype == torch.bool:
        return (torch.arange(size) % 3 == 0).reshape(total, *trailing)
    # Numbers that are neither padding nor NaN in any type.
    raw = torch.full((size * dtype.itemsize,), 0x3C, dtype=torch.uint8)
    return raw.view(dtype).reshape(total, *trailing)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(lengths_and_room, st.sampled_from(TYPES), st.sampled_from([(), (2,), (2, 3)]))
def test_pad_and_unpad_are_inverse(rows: list[tuple[int, int, int]], dtype: torch.dtype, trailing: Any) -> None:
    width = max(before + length + after for length, before, after in rows)
    spans = Spans([r[0] for r in rows], [r[1] for r in rows], width)
    values = values_of(dtype, int(spans.offsets[-1]), trailing)
    padded = spans.pad(values, 0)
    assert padded.dtype == dtype
    assert padded.shape == (len(rows), width, *trailing)
    assert bits(spans.unpad(padded)) == bits(values)
    for i, (length, before, _) in enumerate(rows):
        outside = torch.cat([padded[i, :before], padded[i, before + length :]])
        assert not any(bits(outside))


@given(lengths_and_room, st.sampled_from([0, 7, -1]))
def test_every_path_gives_the_same(rows: list[tuple[int, int, int]], fill: int) -> None:
    width = max(before + length + after for length, before, after in rows)
    spans = Spans([r[0] for r in rows], [r[1] for r in rows], width)
    values = torch.arange(1.0, 1.0 + int(spans.offsets[-1]))
    expected = torch.full((len(rows), width), float(fill))
    for i, (length, before, _) in enumerate(rows):
        expected[i, before : before + length] = values[spans.offsets[i] : spans.offsets[i + 1]]
    parts = list(torch.split(values, spans.lengths.tolist()))
    ragged = Ragged.from_arrays([np.zeros(2), *(part.numpy() for part in parts)], "float32").slice(1, len(rows) + 1)
    used = torch.full((len(rows), width), 99.0)
    learned = values.clone().requires_grad_()
    through = spans.pad(learned, fill)
    assert torch.equal(spans.pad(values, fill), expected)
    assert torch.equal(spans.pad(segments(parts), fill), expected)
    assert torch.equal(spans.pad(ragged, fill), expected)
    assert spans.pad(ragged, fill, out=used) is used
    assert torch.equal(used, expected)
    assert torch.equal(through, expected)
    if len(values):
        through.sum().backward()
        assert torch.equal(learned.grad, torch.ones_like(values))
    assert torch.equal(spans.unpad(expected.requires_grad_()), values)
    assert torch.equal(concatenated(segments(parts), spans.lengths), values)
    assert torch.equal(concatenated(ragged, spans.lengths), values)
    assert torch.equal(spans.mask(torch.int64), (spans.pad(torch.ones_like(values), 0) != 0).long())


def test_a_column_that_is_not_contiguous() -> None:
    spans = Spans([2, 1], [0, 1], 3)
    wide = torch.arange(24).reshape(4, 6)[:2, ::2]
    assert spans.unpad(wide).tolist() == [0, 2, 8]
    assert spans.pad(torch.arange(6)[::2], 9).tolist() == [[0, 2, 9], [9, 4, 9]]


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.int8, 300), (torch.bool, 2), (torch.int64, 0.5), (torch.uint8, -1), (torch.int32, float("nan"))],
)
def test_padding_that_does_not_fit(dtype: torch.dtype, fill: float) -> None:
    for width in (2, 1):  # with padding to fill, and without
        with pytest.raises(ValueError, match="cannot represent"):
            Spans([1], [0], width).pad(torch.zeros(1, dtype=dtype), fill)


@pytest.mark.parametrize(
    "out", [torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 2, device="meta")]
)
def test_an_output_that_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^out: got"):
        Spans([1], [0], 2).pad(torch.zeros(1), 0, out=out)


def test_rows() -> None:
    rows = Rows(torch.arange(5), [2, 0, 3])
    assert [row.tolist() for row in rows] == [[0, 1], [], [2, 3, 4]]
    assert rows.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert rows.cu_seqlens.dtype == torch.int32
    rows[2] = [7, 8, 9]
    assert rows.values.tolist() == [0, 1, 7, 8, 9], "a row that is set is set in the values"
    with pytest.raises(ValueError, match="row 0: got shape"):
        rows[0] = [1, 2, 3]
    for change in (lambda: rows.append(1), lambda: rows.pop(), lambda: rows.clear(), lambda: rows.__delitem__(0)):
        with pytest.raises(ValueError, match="fixed"):
            change()
    with pytest.raises(ValueError, match="slice"):
        rows[0:1] = [torch.zeros(2)]
    with pytest.raises(ValueError, match="got 5 values, expected 4"):
        Rows(torch.arange(5), [2, 2])
    for other in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows), copy.copy(rows)):
        assert [row.tolist() for row in other] == [[0, 1], [], [7, 8, 9]]
        assert isinstance(other, Rows)
    assert copy.copy(rows).values is rows.values
    assert copy.deepcopy(rows).values is not rows.values
    assert Rows(torch.empty(0), []) == []


def test_rows_on_another_device() -> None:
    spans = Spans([2, 1], [0, 1], 3)
    meta = torch.zeros(3, device="meta")
    assert spans.pad(meta, 1).shape == (2, 3)
    assert isinstance(segments([meta, meta]), torch.Tensor)
    assert isinstance(segments([torch.zeros(2)]), Segments)
