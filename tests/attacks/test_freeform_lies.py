"""Free-form values (`info`, messages) that nest without end, or whose tags hold what they cannot."""

from __future__ import annotations

import base64
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from rollbook import WireError
from rollbook.core import freeform, wire
from tests.attacks import corpus
from tests.attacks.outcome import decoded, judged, refusal


def frame_of_info(text: str) -> bytes:
    arrays = corpus.columns_of(corpus.minimal())
    arrays["info"] = pa.array([text], pa.large_string())
    return corpus.frame_of(corpus.batch_of(arrays))


def info(value: Any) -> str:
    """A dict whose one entry is `value`, already tagged."""
    return orjson.dumps({"key": value}).decode()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_the_frame_that_lies_are_told_in_is_good() -> None:
    frame = frame_of_info(info({"$int": "0x10"}))
    assert wire.decode(frame)[0].info == {"key": 16}


# --- depth ----------------------------------------------------------------------------------------------------------

DEPTHS = (100, 1000, 100_000)
NESTS = {
    "lists": ("[", "1", "]"),
    "dicts": ('{"a":', "1", "}"),
    "tuples": ('{"$tuple":[', "1", "]}"),
    "escapes": ('{"$dict":{"a":', "1", "}}"),
    "maps": ('{"$map":[[1,', "1", "]]}"),
    "keys": ('{"$tuple":[', "1", "]}"),
    "mixed": ('[{"$tuple":[{"a":', "1", "}]}]"),
    "unclosed": ("[", "", ""),
    "unclosed tags": ('{"$tuple":[', "", ""),
}


def nest(name: str, depth: int) -> str:
    before, inside, after = NESTS[name]
    text = before * depth + inside + after * depth
    return f'{{"key":{{"$map":[[{text},1]]}}}}' if name == "keys" else f'{{"key":{text}}}'


@pytest.mark.parametrize("name", NESTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_values_nested_too_deeply_are_refused(name: str, depth: int) -> None:
    text = nest(name, depth)
    start = time.monotonic()
    refusal(frame_of_info(text))
    with pytest.raises(WireError):
        freeform.loads(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", [name for name in NESTS if "unclosed" not in name])
def test_values_as_deep_as_allowed_are_read(name: str) -> None:
    assert decoded(frame_of_info(nest(name, 8)))


# --- tags -----------------------------------------------------------------------------------------------------------


def tensor(**parts: Any) -> dict[str, Any]:
    return {"$tensor": {"dtype": "float32", "shape": [2], "data": b64(bytes(8)), **parts}}


def array(**parts: Any) -> dict[str, Any]:
    return {"$array": {"dtype": "<f4", "shape": [2], "data": b64(bytes(8)), **parts}}


def scalar(dtype: str, data: bytes) -> dict[str, Any]:
    return {"$scalar": {"dtype": dtype, "data": b64(data)}}


SHAPES = [
    None, 2, "2", {}, [3], [-2], [-1, -2], [2.0], ["2"], [[2]], [True, 2], [2**62], [2**63], [2**32, 2**32], [1] * 65,
    [2**64 - 1],
]  # fmt: skip
EMPTY_SHAPES = [[2**61, 2**61, 0], [0, 2**61, 2**61], [2**62, 0], [0] * 65, [0, -1]]
DTYPES = [
    "", "O", "|O", "O8", "V8", "|V8", "<f4,<f4", "f", "float31", "object", "<f3", "<f99", "<i16", ">M8[", "<M8",
    "(2,)<f4", "<f4\n", "<f4 ", "b", "<U", "S0", "|S0", "<U0", "<M8[0s]", "<m8[00ms]", "<M8[-1s]", None, 4, [], {},
]  # fmt: skip
BAD_TAGS: dict[str, Any] = {
    **{f"tensor shape {shape}": tensor(shape=shape) for shape in SHAPES},
    **{f"empty tensor of shape {shape}": tensor(shape=shape, data="") for shape in EMPTY_SHAPES},
    **{f"tensor dtype {name!r}": tensor(dtype=name) for name in (*DTYPES, "load", "Tensor", "_C", "qint8")},
    **{f"tensor data {data!r}": tensor(data=data) for data in (None, 8, [], "", "AA", "A===", "Ä", "AAAA" * 3)},
    "tensor bool": tensor(dtype="bool", data=b64(b"\0\2")),
    "tensor without parts": {"$tensor": {}},
    "tensor as a list": {"$tensor": [1, 2]},
    "tensor as text": {"$tensor": "float32"},
    **{f"array shape {shape}": array(shape=shape) for shape in SHAPES},
    **{f"empty array of shape {shape}": array(shape=shape, data="") for shape in EMPTY_SHAPES},
    **{f"array dtype {name!r}": array(dtype=name) for name in DTYPES},
    **{f"array data {data!r}": array(data=data) for data in (None, 8, [], "", "AA", "A===", "Ä", "AAAA" * 3)},
    "array bool": array(dtype="|b1", data=b64(b"\0\2")),
    "array of huge text": array(dtype="<U999999999", shape=[0], data=""),
    "array of what is no text": array(dtype="<U1", data=b64(b"\xff" * 8)),
    "array of times": array(dtype="<M8[0s]", shape=[1]),
    "scalar of what is no text": scalar("<U1", b"\xff\xff\xff\xff"),
    "scalar of swapped text": scalar(">U2", b"a\0\0\0b\0\0\0"),
    "scalar of no bytes": scalar("<f4", b""),
    "scalar of too many": scalar("<f4", bytes(8)),
    "scalar of time": scalar("<m8[0s]", bytes(8)),
    **{f"int {text!r}": {"$int": text} for text in ("", "x", "0x", "--1", "1.5", None, 1, [], "0x_1_", "²")},
    **{f"float {text!r}": {"$float": text} for text in ("", "1.5", "NaN", "infinity", "nan ", 1, None, [], {})},
    **{f"text {text!r}": {"$text": text} for text in ("0", "zz", "ff", "c0 80", "ed", 5, None, [])},
    **{f"bytes {text!r}": {"$bytes": text} for text in ("A", "A===", "AAAA\n", "A AA", "Ä", 5, None, [], "AA==AA==")},
    **{f"tuple {content!r}": {"$tuple": content} for content in ({}, "ab", 5, None)},
    **{f"dict {content!r}": {"$dict": content} for content in ([], "ab", 5, None)},
    **{
        f"map {content!r}": {"$map": content}
        for content in ({}, 5, None, "ab", [1], [[1]], [[1, 2, 3]], [[[], 1]], [[{}, 1]], ["ab", "c"], [None])
    },
    "map with a tensor as key": {"$map": [[tensor(), 1]]},
    "map with an array as key": {"$map": [[array(), 1]]},
    "map with a map as key": {"$map": [[{"$map": []}, 1]]},
    "map with a list in a tuple as key": {"$map": [[{"$tuple": [[]]}, 1]]},
    "map with times of no length as keys": {"$map": [[scalar("<m8[0s]", bytes(8)), 1]] * 2},
    **{f"tag {name!r}": {name: 1} for name in ("$", "$$", "$object", "$Int", "$int ", "$ref", "$py", "$import")},
}


@pytest.mark.parametrize("name", BAD_TAGS)
def test_a_tag_that_lies_is_refused(name: str) -> None:
    refusal(frame_of_info(info(BAD_TAGS[name])))


def test_a_tag_by_an_escaped_dollar_is_a_tag() -> None:
    refusal(frame_of_info('{"key":{"\\u0024tensor":1}}'))
    assert wire.decode(frame_of_info('{"key":{"\\u0024int":"0x10"}}'))[0].info == {"key": 16}


@pytest.mark.parametrize(
    "text", ["", "{", "{]", "nul", "NaN", "Infinity", "01", '{"a":1,}', "'a'", '"\\ud800"', "\0", "1 2"]
)
def test_what_is_no_json_is_refused(text: str) -> None:
    refusal(frame_of_info(text))


# --- size and time --------------------------------------------------------------------------------------------------


def test_an_integer_of_a_megabyte_is_read_in_linear_time() -> None:
    start = time.monotonic()
    rows = wire.decode(frame_of_info(info({"$int": "0x" + "f" * 1_000_000}))).rows()
    assert rows[0].info["key"].bit_length() == 4_000_000
    assert time.monotonic() - start < 2


def test_a_decimal_integer_of_a_megabyte_is_refused() -> None:
    start = time.monotonic()
    judged(lambda: wire.decode(frame_of_info('{"key":' + "9" * 1_000_000 + "}")).rows())
    assert time.monotonic() - start < 2


def keys_of_one_hash(count: int) -> str:
    """Integers that are multiples of 2**61 - 1, and so have the hash 0."""
    pairs = ",".join(f'[{{"$int":"{hex(k * (2**61 - 1))}"}},0]' for k in range(16, 16 + count))
    return f'{{"key":{{"$map":[{pairs}]}}}}'


def test_keys_that_all_have_one_hash_do_not_hang() -> None:
    text = keys_of_one_hash(40_000)
    start = time.monotonic()
    judged(lambda: freeform.loads(text))
    assert time.monotonic() - start < 2


def test_empty_shapes_allocate_nothing() -> None:
    # Base64 of nothing, and sizes that would be 2**60 bytes if one of them were not 0.
    value = [array(dtype="<f8", shape=[2**57, 0], data=""), tensor(shape=[2**57, 0], data="")]
    tracemalloc.start()
    try:
        judged(lambda: freeform.loads(info(value)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_was_read_can_be_compared_and_printed() -> None:
    good = {"a": array(), "b": scalar("<M8[ms]", bytes(8)), "c": tensor(), "d": array(dtype="<U2", shape=[1])}
    first, second = (wire.decode(frame_of_info(info(good)))[0] for _ in range(2))
    assert first == second
    assert isinstance(repr(first.info), str)
    assert first.info["key"]["b"] == np.datetime64(0, "ms")
