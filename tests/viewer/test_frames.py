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
    integers = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return Trajectory(
        uid=draw(CHARACTERS),
        text="".join(pieces),
        ends=ends,
        prompt_tokens=draw(st.integers(0, length)),
        ids=draw(st.none() | integers.map(lambda ids: np.array(ids, dtype=np.int64))),
        special=np.array(draw(flags), dtype=bool),
        mask=np.array(draw(flags), dtype=bool),
        versions=draw(st.none() | integers.map(lambda ids: np.array(ids, dtype=np.int64) - 1)),
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


def check(trajectory: Trajectory, decoded: dict[str, Any], dtype: str) -> None:
    assert decoded["text"] == replaced(trajectory.text)
    assert decoded["uid"] == replaced(trajectory.uid)
    assert decoded["tokens"] == trajectory.tokens
    assert decoded["ends"].tolist() == trajectory.ends.tolist()
    units = [len(trajectory.token(i).encode("utf-16-le", "surrogatepass")) // 2 for i in range(trajectory.tokens)]
    assert decoded["widths"].tolist() == units
    assert (
        decoded["mask"].tolist() == trajectory.mask.tolist()
        and decoded["special"].tolist() == trajectory.special.tolist()
    )
    for name in ("ids", "versions"):
        given_ids, column = getattr(trajectory, name), decoded[name]
        assert (column is None) if given_ids is None else column.tolist() == given_ids.tolist()
    assert set(decoded["arrays"]) == set(trajectory.arrays)
    for name, values in trajectory.arrays.items():
        if dtype == "f4":
            np.testing.assert_array_equal(decoded["arrays"][name], values)
        else:
            with np.errstate(over="ignore"):
                expected = np.where(np.isfinite(values), np.clip(values, -65504, 65504), values).astype(np.float16)
            np.testing.assert_array_equal(decoded["arrays"][name], expected)
    assert [part[:2] + part[3:] for part in decoded["segments"]] == [
        part[:2] + part[3:] for part in trajectory.segments
    ]
    assert decoded["reward"] == (
        trajectory.reward if trajectory.reward is not None and np.isfinite(trajectory.reward) else None
    )
    assert decoded["prompt_text"] == (
        None if trajectory.tokenized == "exact" or trajectory.prompt_text is None else replaced(trajectory.prompt_text)
    )
    assert [picture["sha256"] for picture in decoded["pictures"]] == [picture.sha256 for picture in trajectory.pictures]
    if trajectory.rejected is None:
        assert decoded["rejected"] is None
    else:
        check(trajectory.rejected, decoded["rejected"], dtype)


@given(st.lists(trajectories(), max_size=3), st.sampled_from(["f4", "f2"]))
def test_there_and_back(drawn: list[Trajectory], dtype: str) -> None:
    data = encode(drawn, dtype)
    (size,) = struct.unpack_from("<I", data)
    assert (4 + size) % 8 == 0 and len(data) % 8 == 0

    def no_constant(name: str) -> Any:
        raise AssertionError(name)

    header = json.loads(data[4 : 4 + size].decode(), parse_constant=no_constant)
    for entry in header["trajectories"]:
        assert all(place[0] % 8 == 0 for place in entry["blobs"].values())
    decoded = decode(data)
    assert len(decoded) == len(drawn)
    for trajectory, other in zip(drawn, decoded, strict=True):
        check(trajectory, other, dtype)


def test_widths_are_what_javascript_counts() -> None:
    text = "a😀é" + "x" * 300
    trajectory = Trajectory(uid="u", text=text, ends=np.array([0, 1, 1, 2, 3, 303]))
    decoded = decode(encode([trajectory]))[0]
    assert decoded["widths"].tolist() == [0, 1, 0, 2, 1, 300]


def test_ids_below_zero_are_kept() -> None:
    trajectory = Trajectory(uid="u", text="ab", ends=np.array([1, 2]), ids=np.array([-200, 5]))
    assert decode(encode([trajectory]))[0]["ids"].tolist() == [-200, 5]


def test_what_json_cannot_say_is_said_otherwise() -> None:
    info = {
        "bytes": b"abc",
        3: (1, 2),
        "array": np.ones(2),
        "image": "data:image/png;base64," + "A" * 9000,
        "o": object(),
    }
    trajectory = Trajectory(uid="u", info=info, metrics={"inf": float("inf")}, label={1})
    decoded = decode(encode([trajectory]))[0]
    assert (
        decoded["info"]["bytes"] == "⟨3 bytes⟩"
        and decoded["info"]["3"] == [1, 2]
        and decoded["info"]["array"] == [1.0, 1.0]
    )
    assert decoded["info"]["image"] == "data:image/png;base64,⟨9022 characters⟩" and decoded["info"]["o"] == "⟨object⟩"
    assert decoded["metrics"] == {"inf": None} and decoded["label"] == [1]


@given(st.data())
def test_whatever_is_no_frame_is_one_error(data: st.DataObject) -> None:
    trajectory = Trajectory(uid="u", text="né😀", ends=np.array([1, 2, 3]), arrays={"entropy": np.ones(3, np.float32)})
    encoded = encode([trajectory])
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(damaged), encoded[:at], data.draw(st.binary(max_size=40))):
        try:
            decoded = decode(bad)
        except WireError:
            continue
        assert isinstance(decoded, list)


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
    encoded = encode([Trajectory(uid="u", text="abc", ends=np.array([1, 2, 3]))])
    (size,) = struct.unpack_from("<I", encoded)
    header = json.loads(encoded[4 : 4 + size])
    header["trajectories"][0].update(change)
    text = json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    with pytest.raises(WireError):
        decode(struct.pack("<I", len(text)) + text + encoded[4 + size :])


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype: got 'f8', expected 'f4' or 'f2'"):
        encode([], "f8")
