"""Free-form values: what goes in comes out, in every type; what cannot is refused with its path."""

from __future__ import annotations

import json
import math
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import WireError
from rollbook.core.experience import same
from rollbook.core.freeform import MAX_DEPTH, dumps, loads

TEXT = st.text(st.characters(), max_size=8)  # lone surrogates included
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    TEXT,
    st.binary(max_size=8),
    st.sampled_from(["$int", "$dict", "$tensor", "$"]),
)
KEYS = st.one_of(TEXT, st.integers(), st.none(), st.booleans(), st.sampled_from(["$int", "$dict", "$map", "$"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.tuples(st.integers(), TEXT), inner, max_size=2),
    ),
    max_leaves=20,
)


def exactly(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down, the sign of zero and the order of keys included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            exactly(k, j) and exactly(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return same(a, b)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_round_trip(value: Any) -> None:
    text = dumps(value)
    json.loads(text, parse_constant=refuse_constant)
    text.encode()
    assert exactly(loads(text), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64("nan"),
        np.bool_(True),
        np.int8(-3),
        np.str_("h\N{LATIN SMALL LETTER E WITH ACUTE}"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.datetime64("2026-01-01"),
        np.complex64(1j),
        np.arange(6).reshape(2, 3),
        np.arange(6, dtype=">i4")[::2],
        np.asfortranarray(np.ones((2, 3))),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array(["a", "bcd"]),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 3),
        torch.ones(2, requires_grad=True).detach(),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        10**5000,
        -(2**63),
        2**64,
    ],
    ids=lambda value: type(value).__name__,
)
def test_exact_types(value: Any) -> None:
    for wrapped in (value, {"a": [value]}, (value,), {1: value}):
        back = loads(dumps(wrapped))
        assert exactly(back, wrapped)
    array = loads(dumps([value]))[0]
    if isinstance(array, np.ndarray) and array.size:
        array[...] = array  # its memory is its own


def test_plain_values_are_plain_json() -> None:
    value = {"a": 1, "b": [1.5, "x", None, True], "c": {"d": {}}}
    assert json.loads(dumps(value)) == value


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [{1}, object(), 1j, Colour.RED, bytearray(b"x"), np.array([object()]), range(3)])
def test_what_cannot_be_kept(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^\$\.a\[1\]\.b: .* cannot be kept"):
        dumps({"a": [0, {"b": value}]})
    with pytest.raises(ValueError, match=r"^\$"):
        dumps(value)


def test_the_padding_of_long_doubles_is_zero() -> None:
    bits = np.array([np.longdouble(1) / 3] * 2)
    if np.finfo(np.longdouble).nmant == 63:
        bits.view(np.uint8).reshape(2, -1)[1, 10:] = 7
    first, second = (dumps({"x": bits[i : i + 1]}) for i in range(2))
    assert first == second and loads(first)["x"] == bits[:1]


def test_depth() -> None:
    value: Any = 1
    for level in range(MAX_DEPTH):
        value = [{"x": value}, (value,), {1: value}][level % 3] if level < 3 else [value]
    assert exactly(loads(dumps(value)), value)
    with pytest.raises(ValueError, match="nested too deeply"):
        dumps([value])
    for text in ("[" * 100 + "]" * 100, '{"a":' * 100 + "1" + "}" * 100, '{"$tuple":[' * 100 + "]}" * 100):
        with pytest.raises(WireError, match="nested too deeply"):
            loads(text)
    with pytest.raises(WireError):
        loads("[" * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "Infinity",
        '{"$nothing": 1}',
        '{"$float": "1.5"}',
        '{"$float": 1.5}',
        '{"$int": 7}',
        '{"$int": "zz"}',
        '{"$text": "zz"}',
        '{"$text": "ff"}',
        '{"$bytes": "a"}',
        '{"$bytes": "\\u00e9"}',
        '{"$tuple": 1}',
        '{"$map": [[1]]}',
        '{"$map": [[[1], 2]]}',
        '{"$map": [[{"$array": {"dtype": "<f4", "shape": [0], "data": ""}}, 2]]}',
        '{"$map": 1}',
        '{"$dict": 1}',
        '{"$tensor": {}}',
        '{"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAA"}}',
        '{"$tensor": {"dtype": "float32", "shape": [-1], "data": ""}}',
        '{"$tensor": {"dtype": "float32", "shape": [4611686018427387904, 4], "data": ""}}',
        '{"$tensor": {"dtype": "load", "shape": [], "data": ""}}',
        '{"$tensor": {"dtype": ["float32"], "shape": [], "data": ""}}',
        '{"$array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$array": {"dtype": "V8", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$array": {"dtype": "<i4,<i4", "shape": [1], "data": "AAAAAAAAAAA="}}',
        '{"$array": {"dtype": "<U0", "shape": [1000000000000], "data": ""}}',
        '{"$scalar": {"dtype": "<f4", "data": ""}}',
        '{"\\u0024nothing": 1}',
    ],
)
def test_bad_texts(text: str) -> None:
    with pytest.raises(WireError):
        loads(text)
