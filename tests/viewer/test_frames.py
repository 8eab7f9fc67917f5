"""The browser's frame: every field there and back, UTF-16 widths, and one error for whatever is no frame."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.core.errors import WireError
from rollbook.inspect.serialization import decode, encode
from rollbook.inspect.trajectory import KINDS, LENSES, ROLES, Picture, Segment, Trajectory

CHARACTERS = st.text(st.characters(categories=["L", "N", "P", "S", "Z", "Cc", "Cf", "Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | CHARACTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CHARACTERS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw: Any, nested: bool = True) -> Trajectory:
    pieces = draw(st.lists(CHARACTERS, max_size=6))
    length = len(pieces)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    floats = st.lists(st.floats(width=32), min_size=length, max_size=length)
    whole = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return Trajectory(
        uid=draw(CHARACTERS),
        text="".join(pieces),
        ends=ends,
        prompt_tokens=draw(st.integers(0, length)),
        ids=draw(st.none() | whole.map(lambda ids: np.array(ids, dtype=np.int64))),
        special=np.array(draw(flags), dtype=bool),
        mask=np.array(draw(flags), dtype=bool),
        versions=draw(st.none() | whole.map(lambda ids: np.array(ids, dtype=np.int64) - 1)),
        arrays={name: np.array(draw(floats), np.float32) for name in draw(st.sets(st.sampled_from(sorted(LENSES))))},
        segments=[
            Segment(draw(st.sampled_from(ROLES)), draw(st.sampled_from(KINDS)), draw(CHARACTERS), a, b, True, 0)
            for a, b in itertools.pairwise(cuts)
        ],
        reward=draw(st.none() | st.floats()),
        parts=draw(st.dictionaries(CHARACTERS, st.floats(), max_size=2)),
        info=draw(st.dictionaries(CHARACTERS, JSON, max_size=2)),
        pictures=[Picture("a" * 64, "image/png", 3, None, 0)] * draw(st.integers(0, 1)),
        tokenized=draw(st.sampled_from(["exact", "ids", "words"])),
        prompt_text=draw(st.none() | CHARACTERS),
        rejected=draw(st.none() | trajectories(nested=False)) if nested else None,
    )


def replaced(text: str) -> str:
    return "".join("\ufffd" if 0xD800 <= ord(character) < 0xE000 else character for character in text)


def check(one: Trajectory, found: dict[str, Any], dtype: str) -> None:
    assert found["text"] == replaced(one.text)
    assert found["uid"] == replaced(one.uid)
    assert found["tokens"] == one.tokens
    assert found["ends"].tolist() == one.ends.tolist()
    units = [len(one.token(i).encode("utf-16-le", "surrogatepass")) // 2 for i in range(one.tokens)]
    assert found["widths"].tolist() == units
    assert found["mask"].tolist() == one.mask.tolist() and found["special"].tolist() == one.special.tolist()
    for name in ("ids", "versions"):
        given_ids, got = getattr(one, name), found[name]
        assert (got is None) if given_ids is None else got.tolist() == given_ids.tolist()
    assert set(found["arrays"]) == set(one.arrays)
    for name, values in one.arrays.items():
        if dtype == "f4":
            np.testing.assert_array_equal(found["arrays"][name], values)
        else:
            with np.errstate(over="ignore"):
                expected = np.where(np.isfinite(values), np.clip(values, -65504, 65504), values).astype(np.float16)
            np.testing.assert_array_equal(found["arrays"][name], expected)
    assert [part[:2] + part[3:] for part in found["segments"]] == [part[:2] + part[3:] for part in one.segments]
    assert found["reward"] == (one.reward if one.reward is not None and np.isfinite(one.reward) else None)
    assert found["prompt_text"] == (
        None if one.tokenized == "exact" or one.prompt_text is None else replaced(one.prompt_text)
    )
    assert [picture["sha256"] for picture in found["pictures"]] == [picture.sha256 for picture in one.pictures]
    if one.rejected is None:
        assert found["rejected"] is None
    else:
        check(one.rejected, found["rejected"], dtype)


@given(st.lists(trajectories(), max_size=3), st.sampled_from(["f4", "f2"]))
def test_there_and_back(many: list[Trajectory], dtype: str) -> None:
    data = encode(many, dtype)
    (size,) = struct.unpack_from("<I", data)
    assert (4 + size) % 8 == 0 and len(data) % 8 == 0

    def no_constant(name: str) -> Any:
        raise AssertionError(name)

    header = json.loads(data[4 : 4 + size].decode(), parse_constant=no_constant)
    for each in header["trajectories"]:
        assert all(place[0] % 8 == 0 for place in each["blobs"].values())
    found = decode(data)
    assert len(found) == len(many)
    for one, other in zip(many, found, strict=True):
        check(one, other, dtype)


def test_widths_are_what_javascript_counts() -> None:
    text = "a😀é" + "x" * 300
    one = Trajectory(uid="u", text=text, ends=np.array([0, 1, 1, 2, 3, 303]))
    found = decode(encode([one]))[0]
    assert found["widths"].tolist() == [0, 1, 0, 2, 1, 300]


def test_ids_below_zero_are_kept() -> None:
    one = Trajectory(uid="u", text="ab", ends=np.array([1, 2]), ids=np.array([-200, 5]))
    assert decode(encode([one]))[0]["ids"].tolist() == [-200, 5]


def test_what_json_cannot_say_is_said_otherwise() -> None:
    info = {
        "bytes": b"abc",
        3: (1, 2),
        "array": np.ones(2),
        "image": "data:image/png;base64," + "A" * 9000,
        "o": object(),
    }
    one = Trajectory(uid="u", info=info, metrics={"inf": float("inf")}, label={1})
    found = decode(encode([one]))[0]
    assert (
        found["info"]["bytes"] == "⟨3 bytes⟩" and found["info"]["3"] == [1, 2] and found["info"]["array"] == [1.0, 1.0]
    )
    assert found["info"]["image"] == "data:image/png;base64,⟨9022 characters⟩" and found["info"]["o"] == "⟨object⟩"
    assert found["metrics"] == {"inf": None} and found["label"] == [1]


@given(st.data())
def test_whatever_is_no_frame_is_one_error(data: st.DataObject) -> None:
    one = Trajectory(uid="u", text="né😀", ends=np.array([1, 2, 3]), arrays={"entropy": np.ones(3, np.float32)})
    whole = encode([one])
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(damaged), whole[:at], data.draw(st.binary(max_size=40))):
        try:
            found = decode(bad)
        except WireError:
            continue
        assert isinstance(found, list)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": True},
        {"tokens": 10**12},
        {"blobs": {}},
        {"blobs": {"text": [0, 10**9], "widths": [0, 0, "u1"], "flags": [0, 0, "u1"]}},
        {"blobs": {"text": [0, 0], "widths": [0, 3, "u9"], "flags": [0, 0, "u1"]}},
        {"blobs": {"text": [4, 0], "widths": [0, 3, "u1"], "flags": [0, 3, "u1"]}},
        {"segments": [["nobody", "text", "", 0, 1, True, 0]]},
        {"segments": [[1, 2]]},
        {"rejected": {}},
    ],
)
def test_headers_are_not_believed(change: dict[str, Any]) -> None:
    whole = encode([Trajectory(uid="u", text="abc", ends=np.array([1, 2, 3]))])
    (size,) = struct.unpack_from("<I", whole)
    header = json.loads(whole[4 : 4 + size])
    header["trajectories"][0].update(change)
    text = json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    with pytest.raises(WireError):
        decode(struct.pack("<I", len(text)) + text + whole[4 + size :])


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype: got 'f8', expected 'f4' or 'f2'"):
        encode([], "f8")
