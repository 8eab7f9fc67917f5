"""Ragged columns against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.core.fields import COLUMNAR, DTYPES, INTEGERS
from rollbook.core.ragged import Ragged, promote

ROWS = st.lists(st.one_of(st.none(), st.lists(st.integers(0, 100), max_size=6)), max_size=8)
DTYPE = st.sampled_from(sorted(COLUMNAR))


def column(rows: list[list[int] | None], dtype: str) -> Ragged:
    kind = getattr(torch, dtype)
    return Ragged.from_tensors([None if row is None else torch.tensor(row).to(kind) for row in rows], dtype)


def plain(ragged: Ragged) -> list[Any]:
    rows = ragged.tensors()
    assert [None if r is None else r.tolist() for r in rows] == [
        None if (t := ragged.tensor(i)) is None else t.tolist() for i in range(len(ragged))
    ]
    return [None if row is None else row.double().tolist() for row in rows]


def expected(rows: list[list[int] | None], dtype: str) -> list[Any]:
    kind = getattr(torch, dtype)
    return [None if row is None else torch.tensor(row).to(kind).double().tolist() for row in rows]


@settings(max_examples=150, deadline=None)
@given(ROWS, DTYPE, st.data())
def test_slice_take_concat_compact(rows: list[list[int] | None], dtype: str, data: st.DataObject) -> None:
    ragged, expected_rows = column(rows, dtype), expected(rows, dtype)
    assert plain(ragged) == expected_rows
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    span = data.draw(st.slices(len(rows)))
    assert plain(ragged[span]) == expected_rows[span]
    part = ragged.slice(start, stop)
    assert plain(part) == expected_rows[start:stop]
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    assert plain(ragged.take(np.array(indices, dtype=np.int64))) == [expected_rows[i] for i in indices]
    assert plain(Ragged.concat([ragged, part, ragged])) == expected_rows + expected_rows[start:stop] + expected_rows
    wide = promote({dtype, "float64"})
    if wide:
        widened = ragged.as_dtype(wide)
        assert plain(widened) == expected_rows
        assert widened.row_dtypes() <= {dtype}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 100), max_size=4), DTYPE), min_size=1, max_size=6))
def test_mixed_types_keep_their_own(rows: list[tuple[list[int], str]]) -> None:
    wide = promote(dtype for _, dtype in rows)
    if wide is None:
        return
    tensors = [torch.tensor(row).to(getattr(torch, dtype)) for row, dtype in rows]
    for taken, expected in zip(Ragged.from_tensors(tensors, wide).tensors(), tensors, strict=True):
        assert taken.dtype == expected.dtype
        assert taken.tolist() == expected.tolist()


def test_promote_is_exact() -> None:
    """Every value of each type survives the cast to the joined type and back: checked at the extremes."""
    for a in sorted(COLUMNAR):
        for b in sorted(COLUMNAR):
            joined = promote([a, b])
            for name in (a, b) if joined else ():
                kind, wide = getattr(torch, name), getattr(torch, joined)
                if name == "bool":
                    extremes = torch.tensor([True, False])
                elif name in INTEGERS:
                    info = torch.iinfo(kind)
                    extremes = torch.tensor([info.min, info.max if name != "uint64" else 2**63 - 1]).to(kind)
                else:
                    info = torch.finfo(kind)
                    extremes = torch.tensor([info.min, info.max, info.tiny, 1 + info.eps]).to(kind)
                assert torch.equal(extremes.to(wide).to(kind).double(), extremes.double()), (a, b, joined)
    assert promote([]) is None
    assert promote(["float8_e5m2"]) is None


def test_read_only_memory_is_copied_once() -> None:
    values = np.arange(6, dtype=np.int64)
    values.flags.writeable = False
    ragged = Ragged(values, np.array([0, 2, 6]), "int64")
    first = ragged.tensor(0)
    assert first is not None
    first.add_(10)
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert ragged.tensor(0).tolist() == [10, 11], "the second row asked for is a view of the same copy"


def test_storage_of_every_type() -> None:
    for name in sorted(COLUMNAR):
        ragged = column([[0, 1], [1]], name)
        assert ragged.values.dtype == np.dtype(DTYPES[name].storage)
        assert ragged.tensor(0).dtype == getattr(torch, name)
    with pytest.raises(ValueError, match="bfloat16"):
        Ragged.from_arrays([[1]], "bfloat16")


def test_an_index_of_another_type_is_refused() -> None:
    ragged = column([[1, 2], [3]], "int64")
    row = ragged[np.int64(-1)]
    assert row is not None and row.tolist() == [3]
    with pytest.raises(TypeError, match="index: got 'a', expected a row's number or a slice"):
        ragged["a"]  # type: ignore[call-overload]
