"""Media lifted out of records and put back: exactly, whatever the columns hold; each medium once; damage told."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import EID, Experience, Experiences
from rollbook.book import media
from rollbook.book.media import (
    REFERENCES_COLUMN,
    REFERENCES_TYPE,
    Blob,
    blob_size,
    extract,
    open_blob,
    references,
    restore,
)
from rollbook.core.columns import MEDIA
from rollbook.core.errors import WireError
from rollbook.core.fields import Field, declare, withdraw
from rollbook.core.ragged import Ragged
from rollbook.core.wire import Limits, decode, encode
from tests.strategies import ARRAYS, BOXED_DTYPES, COLUMN_DTYPES, SEEDS, exact, exact_rows, make_tensor, record_lists

PIXELS = {"pixel_values": torch.arange(4096, dtype=torch.float32).reshape(4, 1024)}
PNG = bytes(range(256)) * 8
NONE: dict[str, bytes] = {}


def record(**fields: Any) -> Experience:
    return Experience(tokens=[1, 2, 3], **fields)


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def store(lifted: media.Extracted) -> dict[str, bytes]:
    return {name: blob.data for name, blob in lifted.blobs.items()}


def same_columns(a: Experiences, b: Experiences) -> bool:
    """Whether all columns are equal as Arrow holds them, and whole."""
    left, right = a.columns, b.columns
    for column in (column for column in right.values() if isinstance(column, pa.Array)):
        column.validate(full=True)
    arrays = [name for name in left if not isinstance(left[name], Ragged)]
    return left.keys() == right.keys() and all(bits(left[name]).equals(bits(right[name])) for name in arrays)


def bits(array: pa.Array) -> pa.Array:
    """Numbers as their bits: Arrow has no NaN equal to any other."""
    return array.view(pa.int64()) if pa.types.is_float64(array.type) else array


# --- round trips --------------------------------------------------------------------------------------------------

TENSORS = st.builds(
    make_tensor,
    st.sampled_from([*COLUMN_DTYPES, *BOXED_DTYPES]),
    st.sampled_from([(), (0,), (3,), (2, 0, 4), (7, 5), (33, 32), (2, 3, 4, 5)]),
    st.integers(0, 2),
    st.sampled_from(["plain", "strided", "transposed"]),
)
"""Of few seeds, so that records share some."""
BYTES = st.builds(lambda seed, size: np.random.default_rng(seed).bytes(size), st.integers(0, 2), st.integers(0, 99))
WORDS = st.sampled_from(
    [
        "plain words",
        "漢字",
        "A" * 64,
        "sha256:" + "0" * 64,
        '"$bytes":"QUJD"',
        '{"$bytes":"QUJDREVGR0g="}',
        "data:;base64,",
        "data:text/plain;base64,AB==",
        "data:text/plain;base64," + "-_%" * 20,
        "data:a,b;base64,QUJD",
        "see data:image/png;base64,QUJDREVG here",
    ]
)
TRAPS = st.one_of(
    st.builds(
        lambda key, value: {key: value},
        st.sampled_from(["$bytes", "data", "b64_json", 'x"$bytes', "$tensor", REFERENCES_COLUMN]),
        WORDS,
    ),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}}, BYTES),
    st.builds(lambda data: {"type": "image_url", "image_url": {"url": url(data)}}, BYTES),
)
CONTENT = st.recursive(
    st.one_of(WORDS, BYTES, TENSORS, ARRAYS, TRAPS, st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["image", "data", "$bytes", "漢"]), inner, max_size=3),
        st.dictionaries(BYTES, inner, max_size=2),
    ),
    max_leaves=8,
)
MEDIA_DICTS = st.none() | st.dictionaries(st.sampled_from(["pixel_values", "grid", "漢", ""]), TENSORS, max_size=3)


@st.composite
def heavy_lists(draw: st.DrawFn) -> list[Experience]:
    """Records of every kind, and records with media in every place."""
    rows = draw(record_lists(max_size=2))
    for _ in range(draw(st.integers(0, 3))):
        rows.append(
            record(
                eid=EID(batch=0, task=len(rows), suffix="m"),
                multi_modal_inputs=draw(MEDIA_DICTS),
                messages=draw(st.none() | st.lists(CONTENT, max_size=3)),
                info=draw(st.dictionaries(st.sampled_from(["a", "$bytes", "data"]), CONTENT, max_size=2)),
                tools=draw(st.none() | st.just([])),
            )
        )
    return rows


@settings(max_examples=80)
@given(heavy_lists(), st.sampled_from([1, 2, 3, 8, 50, 1024]))
def test_what_is_lifted_comes_back_exactly(rows: list[Experience], least: int) -> None:
    experiences = Experiences(rows)
    lifted = extract(experiences, least)
    stored = decode(encode(lifted.stripped)) if rows else lifted.stripped
    assert references(stored) == lifted.uses
    assert {name for used in lifted.uses for name in used} == set(lifted.blobs)
    back = restore(stored, store(lifted).__getitem__)
    assert same_columns(experiences, back)
    assert exact_rows(back) == exact_rows(rows)


@settings(max_examples=25)
@given(heavy_lists(), heavy_lists(), SEEDS)
def test_selecting_and_joining_stripped_records_makes_no_difference(
    left: list[Experience], right: list[Experience], seed: int
) -> None:
    first, second = extract(Experiences(left), 4), extract(Experiences(right), 4)
    order = np.random.default_rng(seed).permutation(len(left) + len(right))[: 1 + seed % 4]
    joined = Experiences.concat([first.stripped, second.stripped])
    fetch = {**store(first), **store(second)}.__getitem__
    assert exact_rows(restore(joined.take(order), fetch)) == exact_rows([[*left, *right][i] for i in order])
    assert exact_rows(restore(joined[1:], fetch)) == exact_rows([*left, *right][1:])
    assert references(joined.take(order)) == [[*first.uses, *second.uses][i] for i in order]


@settings(max_examples=30)
@given(heavy_lists(), st.integers(0, 3), st.integers(0, 5))
def test_a_slice_is_lifted_by_itself(rows: list[Experience], start: int, stop: int) -> None:
    part = Experiences(rows)[start:stop]
    lifted = extract(part, 4)
    assert lifted.uses == extract(Experiences(rows[start:stop]), 4).uses
    assert exact_rows(restore(lifted.stripped, store(lifted).__getitem__)) == exact_rows(rows[start:stop])


def test_a_slice_does_not_copy_its_parent() -> None:
    rows = [record(multi_modal_inputs={"pixel_values": make_tensor(torch.uint8, (100_000,), i)}) for i in range(9)]
    column = extract(Experiences(rows)[3:4]).stripped.column("multi_modal_inputs")
    assert column is not None
    assert column.nbytes < 1000
    assert sum(buffer.size for buffer in column.buffers() if buffer is not None) < 1000


def test_a_record_says_no_to_being_read_before_it_is_restored() -> None:
    stripped = extract(Experiences([record(multi_modal_inputs=PIXELS, info={"png": PNG})])).stripped
    with pytest.raises(WireError, match="multi_modal_inputs"):
        stripped.values("multi_modal_inputs")
    with pytest.raises(WireError, match="info"):
        stripped.values("info")


def test_what_surrounds_a_medium_stays_where_it_was() -> None:
    stripped = extract(Experiences([record(multi_modal_inputs=PIXELS, messages=[{"url": url(PNG)}])])).stripped
    media, text = stripped.column("multi_modal_inputs"), stripped.column("messages")
    assert media is not None
    assert text is not None
    entry = media[0].as_py()[0]
    assert (entry["key"], entry["dtype"], entry["shape"]) == ("pixel_values", "float32", [4, 1024])
    assert entry["data"].startswith(b"sha256:")
    assert json.loads(text[0].as_py())[0]["url"].startswith("data:image/png;base64,sha256:")


# --- what is lifted -----------------------------------------------------------------------------------------------


def test_without_media_the_very_same_records_are_given_back() -> None:
    prose = "Let $x = \\frac{1}{2}$; then `x + x == 1` and so on. 漢字 " * 200
    experiences = Experiences([record(messages=[{"role": "user", "content": prose}], info={"data": "QUJD"})] * 3)
    lifted = extract(experiences)
    assert lifted.stripped is experiences
    assert (lifted.blobs, lifted.uses) == ({}, [(), (), ()])
    assert restore(experiences, NONE.__getitem__) is experiences
    assert references(experiences) == [(), (), ()]
    nothing = Experiences()
    assert extract(nothing).stripped is nothing
    assert extract(nothing).uses == references(nothing) == []


def test_small_media_stay() -> None:
    grid = {"image_grid_thw": torch.ones(1, 3, dtype=torch.int64), "pixels": torch.zeros(1023, dtype=torch.uint8)}
    experiences = Experiences([record(multi_modal_inputs=grid, info={"png": bytes(1023)})])
    assert extract(experiences).stripped is experiences
    assert [blob.shape for blob in extract(experiences, 1023).blobs.values()] == [(), (1023,)]


@pytest.mark.parametrize("least", [0, -1, 1.5, True, "1024"])
def test_least_is_a_number_of_bytes(least: Any) -> None:
    with pytest.raises(ValueError, match=r"min_bytes: got .*, expected an integer"):
        extract(Experiences([record()]), least)


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 30, 31, 32, 33, 64, 1024])
@pytest.mark.parametrize("lead", ["", "a ", "漢字 and $x$ ", "." * 45, "x" * 301])
def test_least_is_met_to_the_byte_wherever_the_piece_lies(least: int, lead: str) -> None:
    for shift in range(0, 70, 3):
        experiences = Experiences([record(info={"before": lead, "n": "," * shift, "b": bytes(least)})])
        assert [len(blob.payload) for blob in extract(experiences, least).blobs.values()] == [least]
        assert extract(experiences, least + 1).stripped is experiences


def test_each_medium_is_kept_once() -> None:
    twin = {"pixel_values": PIXELS["pixel_values"].clone()}
    rows = [record(multi_modal_inputs=PIXELS if i % 2 else twin, info={"png": PNG}) for i in range(16)]
    rows.append(record(messages=[{"image": {"url": url(PNG)}}, {"audio": {"data": base64.b64encode(PNG).decode()}}]))
    rows.append(record())
    lifted = extract(Experiences(rows))
    assert sorted(blob.kind for blob in lifted.blobs.values()) == ["bytes", "tensor"]
    assert [len(used) for used in lifted.uses] == [2] * 16 + [1, 0]
    assert len(encode(lifted.stripped)) < 20_000


def test_media_that_differ_in_anything_are_two() -> None:
    zeros = torch.zeros(2048, dtype=torch.uint8)
    different = [
        zeros,
        zeros.reshape(2, 1024),
        zeros.view(torch.int8),
        zeros.view(torch.bool),
        zeros.view(torch.bfloat16),
        zeros.view(torch.float8_e4m3fn),
        zeros.view(torch.float8_e5m2),
        torch.ones(2048, dtype=torch.uint8),
    ]
    rows = [record(multi_modal_inputs={"pixel_values": tensor}) for tensor in different]
    rows.append(record(info={"b": bytes(2048)}))
    assert len(extract(Experiences(rows)).blobs) == len(rows)


def test_base64_that_is_not_written_as_usual_comes_back_as_it_was() -> None:
    encoded = base64.b64encode(PNG).decode()
    ways = [
        encoded.rstrip("="),
        encoded.replace("+", "-").replace("/", "_"),
        encoded[:-2] + "B=",
        encoded + "==",
        "%2B" * 900,
    ]
    rows = [record(messages=[{"url": f"data:image/png;base64,{way}"}, {"data": way}]) for way in ways]
    lifted = extract(Experiences(rows))
    assert {blob.kind for blob in lifted.blobs.values()} == {"text"}
    assert all(lifted.uses)
    assert exact_rows(restore(lifted.stripped, store(lifted).__getitem__)) == exact_rows(rows)


def test_the_hash_is_sha256_of_kind_description_and_bytes() -> None:
    lifted = extract(Experiences([record(multi_modal_inputs=PIXELS, info={"png": PNG})]))
    pixels = PIXELS["pixel_values"].numpy().tobytes()
    assert set(lifted.blobs) == {
        hashlib.sha256(b"rollbook medium 1\0tensor\0float32 4,1024\0" + pixels).hexdigest(),
        hashlib.sha256(b"rollbook medium 1\0bytes\0\0" + PNG).hexdigest(),
    }


def test_a_columns_rows_that_are_null_or_no_tensors_are_left_alone() -> None:
    entries = [
        {"key": "a", "dtype": "no such", "shape": [2000], "data": bytes(2000)},
        {"key": "b", "dtype": "uint8", "shape": [3], "data": bytes(2000)},
        {"key": None, "dtype": None, "shape": None, "data": None},
        None,
        {"key": "c", "dtype": "uint8", "shape": [2000], "data": bytes(2000)},
    ]
    flat = pa.array([entries], MEDIA).values
    # The second row is null, and still has an entry beneath it.
    offsets = pa.py_buffer(np.array([0, 4, 5, 5], dtype=np.int64))
    column = pa.Array.from_buffers(MEDIA, 3, [pa.py_buffer(b"\x05"), offsets], children=[flat])
    experiences = Experiences([record()] * 3)
    malformed = Experiences.from_encoded({**experiences.columns, "multi_modal_inputs": column}, 3)
    assert extract(malformed).stripped is malformed
    lifted = extract(malformed, 1)
    assert lifted.stripped is malformed
    good = Experiences.from_encoded(
        {**experiences.columns, "multi_modal_inputs": pa.array([entries, None, entries[4:]], MEDIA)}, 3
    )
    lifted = extract(good)
    assert [len(used) for used in lifted.uses] == [1, 0, 1]
    assert same_columns(good, restore(lifted.stripped, store(lifted).__getitem__))


def test_bytes_beneath_a_null_are_nothing() -> None:
    entry = {"key": "a", "dtype": "uint8", "shape": [2000], "data": bytes(2000)}
    media = pa.array([[entry, entry]], MEDIA)
    none_there, second_there = pa.py_buffer(b"\x00"), pa.py_buffer(b"\x02")
    data = media.values.field("data")
    hidden = pa.Array.from_buffers(data.type, 2, [second_there, *data.buffers()[1:]])
    parts = [media.values.field(name) for name in ("key", "dtype", "shape")]
    for nulls, content, blobs in ((None, hidden, 1), (second_there, data, 1), (none_there, data, 0)):
        flat = pa.Array.from_buffers(media.values.type, 2, [nulls], children=[*parts, content])
        column = pa.Array.from_buffers(MEDIA, 1, media.buffers()[:2], children=[flat])
        experiences = Experiences.from_encoded({**Experiences([record()]).columns, "multi_modal_inputs": column}, 1)
        lifted = extract(experiences)
        assert len(lifted.blobs) == blobs
        back = restore(lifted.stripped, store(lifted).__getitem__)
        assert back.columns["multi_modal_inputs"].to_pylist() == column.to_pylist()
        items = lifted.stripped.columns[REFERENCES_COLUMN][0].as_py() if blobs else []
        assert [item["at"] for item in items] == [1] * blobs
    text = Experiences([record(info={"png": PNG})]).columns["info"]
    null = pa.Array.from_buffers(text.type, 1, [none_there, *text.buffers()[1:]])
    experiences = Experiences.from_encoded({**Experiences([record()]).columns, "info": null}, 1)
    assert extract(experiences).stripped is experiences


def test_text_that_is_no_json_comes_back_as_it_was() -> None:
    piece = base64.b64encode(PNG).decode()
    texts = [f'"data":"{piece}', f'{piece}"', f'{{"data":"{piece}"', f'""data":"{piece}""data":"{piece}"', None]
    experiences = Experiences([record()] * len(texts))
    malformed = Experiences.from_encoded(
        {**experiences.columns, "messages": pa.array(texts, pa.large_string())}, len(texts)
    )
    lifted = extract(malformed)
    assert [len(used) for used in lifted.uses] == [0, 0, 1, 1, 0]
    assert same_columns(malformed, restore(lifted.stripped, store(lifted).__getitem__))


# --- look-alikes --------------------------------------------------------------------------------------------------


def test_a_reference_in_a_users_data_is_data() -> None:
    key = next(iter(extract(Experiences([record(info={"png": PNG})])).blobs))
    reference = {
        "$bytes": f"sha256:{key}",
        REFERENCES_COLUMN: [{"column": "info", "at": 0, "hash": key}],
        "url": f"sha256:{key}",
    }
    rows = [record(info=reference, response_text=f"sha256:{key}"), record(info={"png": PNG, "mine": reference})]
    lifted = extract(Experiences(rows))
    assert lifted.uses == [(), (key,)]
    assert exact_rows(restore(lifted.stripped, store(lifted).__getitem__)) == exact_rows(rows)


def test_a_column_of_that_name_is_kept_under_another() -> None:
    key = "0" * 64
    claimed = pa.array([[{"column": "info", "at": 0, "hash": key}]], REFERENCES_TYPE)
    for extra in (
        {REFERENCES_COLUMN: claimed},
        {REFERENCES_COLUMN: claimed, f"{REFERENCES_COLUMN}+": pa.array([7])},
        {f"{REFERENCES_COLUMN}s": pa.array([7])},
    ):
        for fields in ({}, {"info": {"png": PNG}}):
            plain = Experiences([record(**fields)])
            experiences = decode(encode(Experiences.from_encoded({**plain.columns, **extra}, 1)))
            lifted = extract(experiences)
            assert lifted.uses == references(lifted.stripped) == [tuple(lifted.blobs)]
            back = restore(decode(encode(lifted.stripped)), store(lifted).__getitem__)
            assert same_columns(experiences, back)


def test_a_field_that_the_reader_does_not_know_is_restored_too() -> None:
    declare(Field("sketch", "json"))
    try:
        experiences = Experiences([record(sketch={"png": PNG})])
        lifted = extract(experiences)
    finally:
        withdraw("sketch")
    assert references(lifted.stripped) == [tuple(lifted.blobs)]
    back = restore(lifted.stripped, store(lifted).__getitem__)
    assert back.columns["sketch"].equals(experiences.columns["sketch"])


# --- fetching -----------------------------------------------------------------------------------------------------


def test_each_blob_is_fetched_once_and_none_for_columns_that_were_left_out() -> None:
    lifted = extract(Experiences([record(multi_modal_inputs=PIXELS, info={"png": PNG}) for _ in range(5)]))
    stored, fetched = store(lifted), list[str]()

    def fetch(key: str) -> memoryview:
        fetched.append(key)
        return memoryview(stored[key])

    restore(lifted.stripped, fetch)
    assert sorted(fetched) == sorted(stored)
    fetched.clear()
    columns = {name: c for name, c in lifted.stripped.columns.items() if name != "multi_modal_inputs"}
    part = restore(Experiences.from_encoded(columns, 5), fetch)
    assert [lifted.blobs[key].kind for key in fetched] == ["bytes"]
    assert part[0].info == {"png": PNG}


def test_writing_on_a_restored_tensor_changes_nothing_else() -> None:
    rows = [record(multi_modal_inputs=PIXELS, info={"t": PIXELS["pixel_values"]}) for _ in range(2)]
    lifted = extract(Experiences(rows))
    stored = {key: bytearray(data) for key, data in store(lifted).items()}
    back = restore(lifted.stripped, stored.__getitem__)
    first = back[0]
    assert first.multi_modal_inputs is not None
    first.multi_modal_inputs["pixel_values"].zero_()
    first.info["t"].zero_()
    assert stored == store(lifted)
    assert exact(back[1]) == exact(rows[1])
    for content in stored.values():
        content[64:] = bytes(len(content) - 64)
    assert exact(back[1]) == exact(rows[1])


@pytest.mark.parametrize(
    ("fields", "name"), [({"multi_modal_inputs": PIXELS}, "multi_modal_inputs"), ({"info": {"b": PNG}}, "info")]
)
def test_a_missing_blob_is_named(fields: dict[str, Any], name: str) -> None:
    lifted = extract(Experiences([record(), record(**fields)]))
    with pytest.raises(WireError, match=rf"record 1: {name}: the medium sha256:{lifted.uses[1][0]} is missing"):
        restore(lifted.stripped, NONE.__getitem__)


def test_a_blob_in_anothers_place_is_refused() -> None:
    lifted = extract(Experiences([record(multi_modal_inputs=PIXELS, info={"png": PNG})]))
    first, second = lifted.blobs
    swapped = {first: lifted.blobs[second].data, second: lifted.blobs[first].data}
    with pytest.raises(
        WireError, match=f"sha256:{first} was requested, got sha256:{second}|sha256:{second} was requested"
    ):
        restore(lifted.stripped, swapped.__getitem__)


# --- damage -------------------------------------------------------------------------------------------------------


def blobs() -> list[Blob]:
    text = f"data:image/png;base64,{'-_' * 40}"
    media = {"a": torch.arange(40, dtype=torch.bfloat16).reshape(5, 8), "b": torch.tensor(1.5, dtype=torch.complex128)}
    row = record(multi_modal_inputs=media, info={"png": b"0123456789" * 5, "url": text})
    return list(extract(Experiences([row]), 16).blobs.values())


def test_a_blob_is_read_back_from_its_bytes() -> None:
    assert sorted(blob.kind for blob in blobs()) == ["bytes", "tensor", "tensor", "text"]
    for blob in blobs():
        data = blob.data
        assert len(data) == blob.size == blob_size(data) == blob_size(data[:64])
        assert len(data) % 64 == 0
        assert open_blob(memoryview(data), verify=True) == blob
        assert open_blob(bytearray(data)) == blob


def test_a_blob_with_any_byte_changed_or_missing_is_refused() -> None:
    for blob in blobs():
        for at in range(blob.size):
            for flip in (1, 0x80, 0xFF):
                data = bytearray(blob.data)
                data[at] ^= flip
                with pytest.raises(WireError):
                    open_blob(data)
        for missing in (1, 64, blob.size - 64, blob.size - 1, blob.size):
            with pytest.raises(WireError):
                open_blob(blob.data[: blob.size - missing])
        with pytest.raises(WireError):
            open_blob(blob.data + bytes(64))


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_bytes_that_are_no_blob_are_refused(data: bytes, headed: bool) -> None:
    with pytest.raises(WireError):
        open_blob((media.MAGIC + b"\1\0" if headed else b"") + data)


def forged(
    kind: int, payload: bytes, description: bytes, digest: bytes = bytes(32), length: int | None = None
) -> bytes:
    """A blob whose checksum is right, whatever it holds."""
    size = len(payload) if length is None else length
    head = media._HEADER.pack(media.MAGIC, 1, kind, len(description), size, digest, 0)[:56]
    body = head + xxhash.xxh3_64_digest(head + payload + description)[::-1] + payload + description
    return body + bytes(-len(body) % 64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (forged(1, bytes(8), b"float32 3"), "takes 12 bytes, got 8"),
        (forged(1, bytes(8), b"float99 2"), "dtype 'float99'"),
        (forged(1, bytes(8), b"float32 02"), "not in canonical form"),
        (forged(1, bytes(8), b"float32 -2"), "not a tensor"),
        (forged(1, bytes(8), b""), "not a tensor"),
        (forged(1, b"", b"float32 0,9999999999999999999"), "larger than any tensor"),
        (forged(1, bytes(8), b"uint8 8" + b",1" * 70), "not a tensor"),
        (forged(2, bytes(8), b"float32 2"), "not in canonical form"),
        (forged(3, b"\xff", b""), "not ASCII"),
        (forged(4, b"", b""), "kind 4"),
        (forged(0, b"", b""), "kind 0"),
        (forged(2, b"", b"", length=2**63), "over the limit"),
        (forged(2, b"", b"", length=2**30), "takes 1073741888 bytes, 64 are there"),
    ],
)
def test_a_blob_that_describes_what_it_is_not_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        open_blob(data)


def test_a_forged_blob_is_found_by_its_hash() -> None:
    blob = next(blob for blob in blobs() if blob.shape == (5, 8))
    fake = forged(1, bytes(len(blob.payload)), b"bfloat16 5,8", bytes.fromhex(blob.hash))
    assert open_blob(fake).hash == blob.hash
    with pytest.raises(WireError, match=f"does not match its hash {blob.hash}"):
        open_blob(fake, verify=True)


def test_a_damaged_blob_names_the_record_it_was_for() -> None:
    lifted = extract(Experiences([record(), record(info={"png": PNG})]))
    damaged = {key: data[:70] + b"?" + data[71:] for key, data in store(lifted).items()}
    with pytest.raises(WireError, match=r"record 1: info: the medium sha256:\w+ is damaged: byte 56: .*checksum"):
        restore(lifted.stripped, damaged.__getitem__)


# --- hostile frames -----------------------------------------------------------------------------------------------


def with_references(stripped: Experiences, listed: Any, kind: pa.DataType = REFERENCES_TYPE) -> Experiences:
    return decode(
        encode(Experiences.from_encoded({**stripped.columns, REFERENCES_COLUMN: pa.array([listed], kind)}, 1))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash": "../../etc/passwd"}, "is not a reference"),
        ({"hash": "A" * 64}, "is not a reference"),
        ({"hash": "0" * 64 + "\n"}, "is not a reference"),
        ({"hash": None}, "is not a reference"),
        ({"at": None}, "is not a reference"),
        ({"at": -1}, "is not a reference"),
        ({"column": None}, "is not a reference"),
        ({"hash": "0" * 64}, "no reference to sha256:0+ at"),
        ({"at": 0}, " at 0$"),
        ({"at": 2**63 - 1}, " at 9223372036854775807"),
        ({"column": "tokens"}, "'tokens', which can hold no media"),
        ({"column": "eid"}, "'eid', which can hold no media"),
        ({"column": "experience_type"}, "no reference to"),
        ({"column": "multi_modal_inputs"}, "record 0: multi_modal_inputs: no reference"),
        ({"column": REFERENCES_COLUMN}, "can hold no media"),
    ],
)
def test_a_reference_that_nobody_wrote_is_refused(change: dict[str, Any], message: str) -> None:
    lifted = extract(Experiences([record(info={"png": PNG}, multi_modal_inputs={"a": torch.ones(1)})]))
    item = lifted.stripped.columns[REFERENCES_COLUMN][0].as_py()[0]
    stored = {**store(lifted), "0" * 64: b""}
    with pytest.raises(WireError, match=message):
        restore(with_references(lifted.stripped, [{**item, **change}]), stored.__getitem__)


def test_references_of_another_type_or_to_one_place_are_refused() -> None:
    lifted = extract(Experiences([record(info={"png": PNG}, multi_modal_inputs=PIXELS)]))
    fetch = store(lifted).__getitem__
    for wrong in (
        with_references(lifted.stripped, 7, pa.int64()),
        with_references(lifted.stripped, ["info"], pa.large_list(pa.large_string())),
        with_references(lifted.stripped, [None]),
    ):
        with pytest.raises(WireError, match=REFERENCES_COLUMN):
            restore(wrong, fetch)
        with pytest.raises(WireError, match=REFERENCES_COLUMN):
            references(wrong)
    items = lifted.stripped.columns[REFERENCES_COLUMN][0].as_py()
    for item in items:
        with pytest.raises(WireError, match="two references share a place"):
            restore(with_references(lifted.stripped, [*items, item]), fetch)
    assert references(with_references(lifted.stripped, items + items)) == lifted.uses


def test_a_reference_does_not_reach_into_the_next_record() -> None:
    lifted = extract(Experiences([record(info={"png": PNG})]))
    text, item = lifted.stripped.columns["info"], lifted.stripped.columns[REFERENCES_COLUMN][0].as_py()[0]
    offsets = pa.py_buffer(np.array([0, item["at"] + 70, len(text[0].as_py())], dtype=np.int64))
    split = pa.Array.from_buffers(text.type, 2, [None, offsets, text.buffers()[2]])
    listed = pa.array([[item], None], REFERENCES_TYPE)
    experiences = Experiences.from_encoded(
        {**Experiences([record(), record()]).columns, "info": split, REFERENCES_COLUMN: listed}, 2
    )
    with pytest.raises(WireError, match=f"record 0: info: no reference to sha256:{item['hash']} at"):
        restore(experiences, store(lifted).__getitem__)


def test_a_medium_that_is_not_what_the_record_says_is_refused() -> None:
    """Whoever writes a frame can refer to any medium of the book, but not as something else."""
    pixels = extract(Experiences([record(multi_modal_inputs=PIXELS)]))
    flat = extract(Experiences([record(multi_modal_inputs={"pixel_values": PIXELS["pixel_values"].reshape(-1)})]))
    entry = {**pixels.stripped.columns["multi_modal_inputs"][0].as_py()[0], "shape": [4096]}
    column = pa.array([[entry]], MEDIA)
    wrong = Experiences.from_encoded({**pixels.stripped.columns, "multi_modal_inputs": column}, 1)
    with pytest.raises(
        WireError, match=r"\['pixel_values'\]: .* is tensor float32\[4, 1024\], expected tensor float32\[4096\]"
    ):
        restore(wrong, {**store(pixels), **store(flat)}.__getitem__)


def test_a_few_references_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lifted = extract(Experiences([record(multi_modal_inputs=PIXELS) for _ in range(8)]))
    monkeypatch.setattr(media, "DEFAULT_LIMITS", Limits(max_bytes=8 * 4 * 4096 - 1))
    with pytest.raises(WireError, match="record 7: .* more than the limit of 131071 bytes"):
        restore(lifted.stripped, store(lifted).__getitem__)
    monkeypatch.setattr(media, "DEFAULT_LIMITS", Limits(max_bytes=8 * 4 * 4096))
    assert len(restore(lifted.stripped, store(lifted).__getitem__)) == 8


def test_no_torch_is_needed(tmp_path: Any) -> None:
    experiences = Experiences([record(multi_modal_inputs=PIXELS, info={"png": PNG, "t": PIXELS["pixel_values"]})])
    (tmp_path / "frame").write_bytes(encode(experiences))
    script = """
import sys
from rollbook.book.media import extract, references, restore
from rollbook.core.wire import decode, encode
many = decode(open(sys.argv[1], "rb").read())
lifted = extract(many)
stored = {key: blob.data for key, blob in lifted.blobs.items()}
back = restore(decode(encode(lifted.stripped)), stored.__getitem__)
print(len(stored), encode(back) == encode(many), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "frame")], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["3", "True", "False"]
