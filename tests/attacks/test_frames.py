"""Frames cut short, flipped and mislabelled: every one is a `WireError`, and costs no more than it may."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest

from rollbook import Experience, WireError
from rollbook.core import wire
from tests.attacks import corpus
from tests.attacks.outcome import SPARE, Meter, decoded, read_as_any, refusal, streamed

FRAMES = corpus.frames()
SMALL = ["minimal", "minimal.zstd", "minimal.lz4"]


@pytest.mark.parametrize("name", FRAMES)
def test_the_frames_that_are_attacked_are_good_ones(name: str) -> None:
    frame = FRAMES[name]
    experiences = wire.decode(frame)
    assert Experience.deserialize_many(frame) == experiences.rows() == wire.decode(wire.encode(experiences)).rows()
    assert streamed(frame)
    assert decoded(frame, verify=False)


def test_a_frame_taken_apart_and_put_together_is_the_same() -> None:
    for name in ("everything", "everything.zstd", "everything.lz4", "empty", "unknown"):
        parts = corpus.take_apart(FRAMES[name])
        assert parts.join() == FRAMES[name]
        assert corpus.seal(parts.body, parts.count, parts.compression) == FRAMES[name]


# --- cuts and flips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SMALL, "empty", "odd_shapes"])
def test_a_frame_cut_at_any_byte_is_refused(name: str) -> None:
    frame = FRAMES[name]
    for size in range(len(frame)):
        assert not decoded(frame[:size]), size
        assert not decoded(frame[:size], verify=False), size
        assert not read_as_any(frame[:size]), size
        # An empty file is a file of no frames.
        assert streamed(frame[:size]) == (size == 0), size


def test_two_frames_cut_at_any_byte_are_refused_but_between_them() -> None:
    frame, between = FRAMES["empty"] + FRAMES["minimal"], len(FRAMES["empty"])
    for size in range(between, len(frame)):
        assert decoded(frame[:size]) == (size == between), size
        assert streamed(frame[:size]) == (size == between), size


@pytest.mark.parametrize("name", SMALL)
def test_a_flip_of_any_bit_is_refused(name: str) -> None:
    frame = bytearray(FRAMES[name])
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        assert not decoded(frame), bit
        assert not read_as_any(frame), bit
        frame[bit // 8] ^= 1 << bit % 8
    assert decoded(frame)


@pytest.mark.parametrize("name", ["empty", *SMALL[1:]])
def test_a_body_cut_at_any_byte_is_refused_under_a_right_checksum(name: str) -> None:
    parts = corpus.take_apart(FRAMES[name])
    for size in range(len(parts.body)):
        assert not decoded(corpus.seal(parts.body[:size], parts.count)), size
    for size in range(len(parts.stored)):
        frame = corpus.seal(parts.body, parts.count, parts.compression, stored=parts.stored[:size])
        assert not decoded(frame), size


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_body_under_a_right_checksum_does_no_harm(verify: bool) -> None:
    parts = corpus.take_apart(FRAMES["minimal"])
    body, taken = bytearray(parts.body), 0
    for at in range(len(body)):
        for change in (0x01, 0x80) if verify else (0xFF,):
            body[at] ^= change
            taken += decoded(corpus.seal(bytes(body), parts.count), verify=verify)
            body[at] ^= change
    # Some flips change a value into another good one; were all refused, the reader behind the checksum was not tried.
    assert 0 < taken < len(body)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_flips_in_a_compressed_body_under_a_right_checksum_do_no_harm(compression: str) -> None:
    parts = corpus.take_apart(FRAMES[f"minimal.{compression}"])
    stored, refused = bytearray(parts.stored), 0
    for bit in range(0, 8 * len(stored), 3):
        stored[bit // 8] ^= 1 << bit % 8
        frame = corpus.seal(parts.body, parts.count, compression, stored=bytes(stored))
        refused += not decoded(frame)
        stored[bit // 8] ^= 1 << bit % 8
    assert refused > len(stored)


# --- lies in the header ---------------------------------------------------------------------------------------------

HEADER_LIES: list[dict[str, Any]] = [
    *({"length": n} for n in (0, 1, -1, 63, 64, -64, 2**31, 2**62, 2**63, 2**64 - 64, 2**64 - 1)),
    *({"decoded": n} for n in (0, 1, -1, 2**31, 2**62, 2**63, 2**64 - 1)),
    *({"count": n} for n in (0, 2, 2**28, 2**28 + 1, 2**62, 2**63, 2**64 - 1)),
    *({"flags": n} for n in (1, 2, 3, 4, 5, 0x8000, 0xFFFF)),
    *({"version": n} for n in (0, 1, 3, 0xFFFF)),
    *({"header_length": n} for n in (0, 56, 63, 65, 128, 2**32 - 1)),
    *({"reserved": n} for n in (1, 2**63)),
    *({"checksum": n} for n in (0, 1, 2**64 - 1)),
    *({"magic": m} for m in (b"\x8dROLLBK\r", b"ROLLBK\n\x8d", bytes(8))),
]


@pytest.mark.parametrize("lie", HEADER_LIES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_one_lie_in_the_header_is_refused(name: str, lie: dict[str, Any]) -> None:
    parts = corpus.take_apart(FRAMES[name])
    header = {key: getattr(parts, key) + n if isinstance(n, int) and -64 <= n < 0 else n for key, n in lie.items()}
    if header.get("flags") == parts.flags:
        header["flags"] = 0
    refusal(parts.join(**header))
    assert not streamed(parts.join(**header))
    if "checksum" not in lie:
        assert not decoded(parts.join(**header), verify=False)


def test_a_wrong_header_checksum_is_refused() -> None:
    frame = FRAMES["minimal"]
    for value in (0, 2**64 - 1):
        assert "checksum" in refusal(corpus.patched(frame, (56, "<Q", value)))


def test_what_follows_a_frame_must_be_a_frame() -> None:
    frame = FRAMES["minimal"]
    for rest in (b"\0", bytes(64), b"TRXP", frame[:8], frame[:64], frame[64:], b"\x80\x04]."):
        refusal(frame + rest)
        assert not streamed(frame + rest)


def test_padding_must_be_zero() -> None:
    parts = corpus.take_apart(FRAMES["minimal.zstd"])
    padding = -len(parts.stored) % 64
    assert padding, "this frame has no padding to attack"
    frame = parts.join()
    for at in range(len(frame) - padding, len(frame)):
        assert "padding" in refusal(corpus.patched(frame, (at, "<B", 1)))


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "lie"),
    [
        ({"max_bytes": 100}, {}),
        ({"max_bytes": 1 << 30}, {"length": (1 << 30) + 1, "decoded": (1 << 30) + 1}),
        ({"max_items": 0}, {}),
        ({"max_items": 1000}, {"count": 1001}),
        ({"max_columns": 3}, {}),
        ({}, {"length": 2**40, "decoded": 2**40}),
        ({}, {"length": 2**40, "decoded": 2**40, "flags": 1}),
        ({}, {"decoded": 2**40, "flags": 1}),
        ({}, {"decoded": 2**40, "flags": 2}),
        ({}, {"count": 2**40}),
    ],
)
def test_over_a_limit_is_refused_before_anything_is_allocated(limit: dict[str, int], lie: dict[str, int]) -> None:
    frame = corpus.take_apart(FRAMES["minimal"]).join(**lie)
    limits = wire.Limits(**limit)
    with pytest.raises(WireError):
        wire.decode(frame, limits=limits)
    meter = Meter()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(frame, limits=limits)
        with pytest.raises(WireError):
            list(wire.iter_frames(io.BytesIO(frame), limits=limits))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert meter.peak() < 8 << 20


def test_as_many_columns_as_the_limit_and_one_more() -> None:
    arrays = corpus.columns_of(corpus.minimal())
    exact = wire.Limits(max_columns=len(arrays))
    assert decoded(corpus.frame_of(corpus.batch_of(arrays)), limits=exact)
    arrays["one_more"] = pa.array([1])
    assert "columns" in refusal(corpus.frame_of(corpus.batch_of(arrays)), limits=exact)


# --- streams --------------------------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """A stream that begins with `head` and never ends, and counts what was taken from it."""

    def __init__(self, head: bytes) -> None:
        self.head, self.taken = head, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        part = self.head[self.taken : self.taken + size].ljust(size, b"\0")
        self.taken += size
        return part


def test_a_stream_that_lies_about_its_length_costs_what_comes() -> None:
    # 8 GiB are stated, within the limits, and 2 KiB are there.
    frame = corpus.take_apart(FRAMES["minimal"]).join(length=8 << 30, decoded=8 << 30)
    meter = Meter()
    with pytest.raises(WireError, match="bytes"):
        list(wire.iter_frames(io.BytesIO(frame)))
    assert meter.peak() < SPARE


def test_a_stream_is_not_read_past_a_bad_header() -> None:
    for lie in ({"version": 3}, {"length": 2**60, "decoded": 2**60}, {"count": 2**60}, {"reserved": 1}):
        stream = Endless(corpus.take_apart(FRAMES["minimal"]).join(**lie))
        with pytest.raises(WireError):
            next(wire.iter_frames(stream))
        assert stream.taken == 64


def test_good_frames_before_a_bad_one_are_given() -> None:
    frames = wire.iter_frames(io.BytesIO(FRAMES["two"] + b"no frame"))
    assert [len(next(frames)) for _ in range(2)] == [1, 2]
    with pytest.raises(WireError, match=f"byte {len(FRAMES['two'])}"):
        next(frames)


def test_a_stream_that_gives_a_byte_at_a_time_is_read() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(1 if size else size)

    assert [len(part) for part in wire.iter_frames(Slow(FRAMES["two"]))] == [1, 2]


# --- compressed bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_stated_size_that_lies_is_refused(compression: str) -> None:
    parts = corpus.take_apart(FRAMES[f"single_turn.{compression}"])
    for size in (1, 8, len(parts.body) - 1, len(parts.body) + 1, 2 * len(parts.body), 1 << 24):
        refusal(parts.join(decoded=size))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_what_is_no_compressed_body_is_refused(compression: str) -> None:
    parts = corpus.take_apart(FRAMES[f"single_turn.{compression}"])
    other = corpus.compress(parts.body, "lz4" if compression == "zstd" else "zstd")
    for stored in (b"", b"\0", parts.body, other, parts.stored[:-1], parts.stored[1:], bytes(100)):
        refusal(corpus.seal(parts.body, parts.count, compression, stored=stored))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_bytes_behind_a_compressed_body_are_refused(compression: str) -> None:
    parts = corpus.take_apart(FRAMES[f"single_turn.{compression}"])
    more = corpus.compress(b"more", compression)
    for rest in (b"\0", b"junk", more, more[:-1], parts.stored):
        refusal(corpus.seal(parts.body, parts.count, compression, stored=parts.stored + rest))


def zstd_header(window: int | None = None, content: int | None = None) -> bytes:
    """The head of a zstd frame (RFC 8878, 3.1.1): by window byte, or as a single segment of `content` bytes."""
    if window is not None:
        return b"\x28\xb5\x2f\xfd\x00" + bytes([window])
    assert content is not None
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", content)


def zstd_raw(data: bytes) -> bytes:
    """One last block that holds `data` as it is."""
    return (len(data) << 3 | 1).to_bytes(3, "little") + data


def test_zstd_heads_made_by_hand_are_good_ones() -> None:
    # Without this the refusals below could be those of a slip in the head.
    parts = corpus.take_apart(FRAMES["minimal"])
    for head in (zstd_header(window=0x50), zstd_header(content=len(parts.body))):
        assert decoded(corpus.seal(parts.body, 1, "zstd", stored=head + zstd_raw(parts.body)))


def zstd_frames() -> dict[str, bytes]:
    """Good data under heads that ask for far more memory than it takes."""
    body = corpus.take_apart(FRAMES["minimal"]).body
    half = zstd_header(0x50) + zstd_raw(body[:100])
    return {
        **{f"window {window:#x}": zstd_header(window) + zstd_raw(body) for window in (0x78, 0x87, 0x88, 0xA8, 0xFF)},
        **{
            f"segment of {content}": zstd_header(content=content) + zstd_raw(body)
            for content in (1, 100 << 20, 1 << 40, 2**64 - 2)
        },
        "a second window": half + zstd_header(0x88) + zstd_raw(body[100:]),
        "a second segment": half + zstd_header(content=100 << 20) + zstd_raw(body[100:]),
        "a skipped part first": b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + bytes(8) + half[:0] + zstd_header(0x50),
    }


@pytest.mark.parametrize("name", zstd_frames())
def test_a_zstd_head_that_asks_for_much_gets_nothing(name: str) -> None:
    frame = corpus.seal(corpus.take_apart(FRAMES["minimal"]).body, 1, "zstd", stored=zstd_frames()[name])
    meter = Meter()
    if "window" not in name:
        refusal(frame)
    elif decoded(frame):
        # A window is a wish: a reader that needs none may grant it and do without.
        assert wire.decode(frame) == wire.decode(FRAMES["minimal"])
    assert meter.peak() < 8 << 20


def test_many_empty_frames_take_no_longer_than_their_bytes_deserve() -> None:
    data = FRAMES["empty"] * 2000
    start = time.monotonic()
    assert len(wire.decode(data)) == 0
    assert time.monotonic() - start < 10
