"""Frames: the format as docs/wire.md specifies it, streams, compression, limits, memory."""

from __future__ import annotations

import io
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollbook import Experience, Experiences, WireError
from rollbook.core import freeform, wire
from rollbook.core.columns import to_arrays
from rollbook.core.fields import DTYPES, FIELDS, SIDES
from rollbook.io.arrow import from_table

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "wire.md").read_text()


def record(**changes: Any) -> Experience:
    columns: dict[str, Any] = {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.25], "reward": 1.0, "info": {"a": 1}}
    return Experience(**(columns | changes))


def records(count: int = 5) -> list[Experience]:
    return [record(tokens=list(range(i + 3)), logprobs=[0.5] * (i + 2), prompt_text="é" * i) for i in range(count)]


# --- the page -------------------------------------------------------------------------------------------------------


def undump(text: str) -> bytes:
    """The bytes of a hex dump in which `*` repeats the line before it."""
    data = bytearray()
    line, repeat = b"", False
    for row in text.strip().splitlines():
        if row == "*":
            repeat = True
            continue
        at, _, hexes = row.partition("  ")
        while repeat and len(data) < int(at, 16):
            data += line
        repeat = False
        assert len(data) == int(at, 16)
        line = bytes.fromhex(hexes)
        data += line
    return bytes(data)


def block(kind: str, containing: str) -> str:
    blocks = re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)
    return next(text for text in blocks if containing in text)


def test_hex_dump_is_what_the_code_writes_and_reads() -> None:
    frame = undump((DOCS / "wire_example.txt").read_text())
    scope: dict[str, Any] = {}
    exec(block("python", "EID(1, 2, 3, 4"), scope)
    assert scope["frame"] == frame
    assert Experience.deserialize(frame) == scope["record"]


def test_hex_dump_ranges() -> None:
    frame = undump((DOCS / "wire_example.txt").read_text())
    ranges = {
        text: frame[int(a, 16) : int(b, 16) + 1]
        for a, b, text in re.findall(r"\| `(0x\w+)`–`(0x\w+)` \| (.*) \|", PAGE)
    }
    by_range = {text.split(":")[0]: data for text, data in ranges.items()}
    assert by_range["values of `tokens`"] == np.array([11, 12, 13], dtype="<i4").tobytes()
    assert by_range["values of `logprobs`"] == np.array([-0.5, -0.25], dtype="<f4").tobytes()
    assert by_range["text of `info`"] == b'{"a":{"$tuple":[1]}}'
    assert by_range["text of `eid.suffix`"] == b"abc123"
    assert by_range["the frame's header"] == frame[:64]
    assert by_range["Arrow's end of stream"] == b"\xff\xff\xff\xff\0\0\0\0"
    assert by_range["Arrow schema message"][:4] == by_range["Arrow record batch message"][:4] == b"\xff\xff\xff\xff"


def test_a_stranger_reads_it() -> None:
    """The reader on the page uses the header layout, stock Arrow and JSON, and nothing of ours."""
    scope: dict[str, Any] = {"frame": undump((DOCS / "wire_example.txt").read_text())}
    exec(block("python", "def read("), scope)
    row = scope["read"](undump((DOCS / "wire_example.txt").read_text()))[0]
    assert (row["tokens"], row["logprobs"], row["reward"]) == ([11, 12, 13], [-0.5, -0.25], 1.0)
    assert row["info"] == {"a": {"$tuple": [1]}}
    assert row["eid"] == {"batch": "1", "task": "2", "run": 3, "step": 4, "suffix": "abc123", "ints": 3}


def test_page_names_every_field_code_side_and_tag() -> None:
    for name in FIELDS:
        assert f"`{name}`" in PAGE, name
    for dtype in DTYPES.values():
        assert f"`{dtype.name}`" in PAGE
        if dtype.code:
            assert f"{dtype.code} `{dtype.name}`" in PAGE.replace("\n", " ")
    for side in {side for sides in SIDES.values() for side in sides}:
        assert f"`X__{side}`" in PAGE
    for tag in re.findall(r"\{\"(\$\w+)\"", str(freeform.__doc__)):
        assert f'{{"{tag}"' in PAGE


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_compression(compression: str | None) -> None:
    rows = records(50)
    data = wire.encode(rows, compression=compression)
    header = wire.read_header(data)
    assert (header.compression, header.count, header.stop) == (compression, 50, len(data))
    assert (header.decoded > header.length) == (compression is not None)
    assert wire.decode(data) == rows
    with pytest.raises(ValueError, match="compression"):
        wire.encode(rows, compression="gzip")


def test_frames_follow_one_another(tmp_path: Path) -> None:
    parts = [records(3), [], records(2), [record(tokens=torch.tensor([1, 2, 3]))]]
    data = b"".join(
        wire.encode(part, compression=c) for part, c in zip(parts, (None, "zstd", "lz4", None), strict=True)
    )
    rows = [row for part in parts for row in part]
    assert wire.decode(data) == rows
    assert Experience.deserialize_many(data) == rows
    assert [list(frame) for frame in wire.iter_frames(io.BytesIO(data))] == parts
    path = tmp_path / "frames"
    with path.open("wb") as file:
        written = sum(wire.write_frame(file, part) for part in parts)
    assert written == path.stat().st_size
    with path.open("rb") as file:
        assert [row for frame in wire.iter_frames(file) for row in frame] == rows


class Trickle(io.RawIOBase):
    """A stream that gives a few bytes at a time, as a socket does."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self.data.read(min(size, 7))


def test_iter_frames_reads_short_reads_and_names_the_byte() -> None:
    data = wire.encode(records(2)) * 2
    assert sum(len(frame) for frame in wire.iter_frames(Trickle(data))) == 4  # type: ignore[arg-type]
    frames = wire.iter_frames(io.BytesIO(data[:-1]))
    next(frames)
    with pytest.raises(WireError, match=r"byte \d+: the frame takes"):
        next(frames)
    frames = wire.iter_frames(io.BytesIO(data[: len(data) // 2] + b"junk" * 16))
    next(frames)
    with pytest.raises(WireError, match=f"byte {len(data) // 2}: bad magic"):
        next(frames)
    flipped = bytearray(data)
    flipped[-70] ^= 1
    frames = wire.iter_frames(io.BytesIO(flipped))
    next(frames)
    with pytest.raises(WireError, match=f"byte {len(data) // 2 + 64}: the body does not match"):
        next(frames)


def test_out_is_reused() -> None:
    rows = Experiences(records(20))
    buffer = bytearray(b"\xff" * (wire.encoded_size(rows) + 100))
    view = wire.encode(rows, out=buffer)
    assert bytes(view) == wire.encode(rows)
    assert len(view) == wire.encoded_size(rows)
    assert bytes(buffer[len(view) :]) == b"\xff" * 100
    with pytest.raises(ValueError, match="out: got 10 bytes, expected at least"):
        wire.encode(rows, out=bytearray(10))
    with pytest.raises(ValueError, match="read-only"):
        wire.encode(rows, out=bytes(100_000))


def test_rows_and_columns_give_the_same_bytes() -> None:
    rows = [record(tokens=torch.arange(i + 3), logprobs=torch.rand(i + 2).bfloat16()) for i in range(20)]
    assert wire.encode(rows) == wire.encode(Experiences(rows)) == Experience.serialize_many(iter(rows))
    middle = Experiences(rows)[5:9]
    assert wire.decode(wire.encode(middle)) == rows[5:9]
    assert len(wire.encode(middle)) < len(wire.encode(rows[5:9])) + 256, "a slice writes its own rows and no others"


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (wire.Limits(max_bytes=100), "bytes"),
        (wire.Limits(max_items=4), "records"),
        (wire.Limits(max_columns=3), "columns"),
    ],
)
def test_limits(limits: wire.Limits, word: str) -> None:
    data = wire.encode(records(5))
    with pytest.raises(WireError, match=f"{word}.*over the limit"):
        wire.decode(data, limits=limits)


def test_depth_limits() -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    assert Experience.deserialize(record(messages=deep).serialize()).messages == deep
    with pytest.raises(ValueError, match="messages.*nested too deeply"):
        record(messages=[deep]).serialize()
    shallow = wire.Limits(max_depth=3)
    assert wire.decode(record(messages=[[[1]]]).serialize(), limits=shallow)[0].messages == [[[1]]]
    with pytest.raises(WireError, match="record 0: messages: .*nested too deeply"):
        wire.decode(record(messages=[[[[1]]]]).serialize(), limits=shallow)
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    row = record()
    row.messages = holds_itself
    with pytest.raises(ValueError, match="nested too deeply"):
        row.serialize()


def test_what_cannot_be_kept_is_named_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"record 1: info: \$\.turns\[0\]\.image: a value of type object"):
        Experience.serialize_many([record(), record(info={"turns": [{"image": object()}]})])
    row = record()
    row.advantages = [0.5]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="record 0: advantages: got 1 entries, expected 2"):
        row.serialize()
    row.advantages = torch.ones(1)
    with pytest.raises(ValueError, match="record 0: advantages: got 1 entries, expected 2"):
        row.serialize()


def test_memory_is_not_copied_until_a_tensor_is_asked_for() -> None:
    data = wire.encode([record(tokens=list(range(1000)), logprobs=[0.0] * 999)] * 100)
    columns = wire.decode(data)
    start = np.frombuffer(data, dtype=np.uint8).ctypes.data
    values = columns.column("tokens").values
    assert start <= values.ctypes.data < start + len(data), "the column lies in the bytes"
    row = columns[3]
    row.tokens.add_(1)
    assert not start <= row.tokens.data_ptr() < start + len(data), "a tensor does not"
    assert wire.decode(data)[3].tokens[0] == 0


def test_private_maps_are_written_on(tmp_path: Path) -> None:
    path = tmp_path / "frame"
    path.write_bytes(wire.encode(records(3)))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
        with pytest.raises(ValueError, match="private"):
            wire.decode(shared, private=True)
    with path.open("rb") as file:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rows = wire.decode(private, private=True)
    rows[1].tokens.add_(7)
    assert rows[1].tokens[0] == 7, "rows are views of the map"
    assert wire.decode(path.read_bytes())[1].tokens[0] == 0, "and the file is untouched"


def test_unaligned_buffers() -> None:
    rows = records(4)
    data = wire.encode(rows)
    for shift in range(1, 9):
        assert wire.decode(memoryview(b"x" * shift + data)[shift:]) == rows
    with pytest.raises(ValueError, match="strided"):
        wire.decode(memoryview(data)[::2])


def test_unknown_columns_are_kept_and_written_back() -> None:
    rows = Experiences(records(3))
    arrays = to_arrays(rows.columns) | {
        "mood": pa.array(["good", None, "bad"]),
        "scores__v2": pa.array([[1.5], [], None], pa.list_(pa.float64())),
    }
    newer = from_table(pa.table(arrays))
    data = wire.encode(newer)
    back = wire.decode(data)
    assert back.column("mood").to_pylist() == ["good", None, "bad"]
    again = wire.decode(Experience.serialize_many(list(back)[::-1]))
    assert again.column("mood").to_pylist() == ["bad", None, "good"]
    assert again.column("scores__v2").to_pylist() == [None, [], [1.5]]
    mixed = wire.decode(Experience.serialize_many([*back, record()]))
    assert mixed.column("mood").to_pylist() == ["good", None, "bad", None]
    rewritten = Experience.deserialize(back[2].serialize())
    assert rewritten == back[2]
    assert rewritten.replace(reward=2.0).unknown["mood"].to_pylist() == ["bad"]


def test_a_body_that_zstd_makes_tiny_is_stored_as_lz4() -> None:
    """Readers refuse a ratio over 500 in what decodes to more than 64 MiB, and nothing that was written is refused."""
    zeros = [Experience(tokens=torch.zeros(1 << 20, dtype=torch.int32))]
    data = wire.encode(zeros, compression="zstd")
    frame = wire.read_header(data)
    assert frame.compression == "lz4" and frame.decoded < 500 * frame.length
    assert wire.decode(data) == zeros
    varied = [Experience(tokens=torch.arange(1 << 10))]
    assert wire.read_header(wire.encode(varied, compression="zstd")).compression == "zstd"
