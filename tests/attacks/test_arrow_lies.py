"""Arrow streams that lie under a right checksum: in their metadata, their offsets, their types and their values."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollbook import Experience, WireError
from rollbook.core import fields, wire
from rollbook.core.columns import MEDIA, OTHER, PLAIN_TYPES
from rollbook.core.experience import same
from tests.attacks import corpus
from tests.attacks.outcome import decoded, refusal, stacked

FRAMES = corpus.frames()
BODIES = {name: corpus.take_apart(FRAMES[name]) for name in ("minimal", "odd_shapes", "everything", "unknown")}
ROWS = corpus.single_turn()
COUNT = len(ROWS)


def resealed(parts: corpus.Parts, *edits: tuple[int, str, Any]) -> bytes:
    return corpus.seal(corpus.patched(parts.body, *edits), parts.count)


def frame_with(rows: list[Experience] | None = None, **columns: pa.Array | None) -> bytes:
    """A frame of ordinary records in which some columns are others, or (`None`) not there."""
    arrays = corpus.columns_of(rows or ROWS)
    for name, array in columns.items():
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array
    return corpus.frame_of(corpus.batch_of(arrays))


def test_the_frame_that_columns_are_changed_in_is_good() -> None:
    assert decoded(frame_with())


# --- the metadata's numbers -----------------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 7, -1, -8, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("verify", [True, False])
def test_no_number_in_a_batchs_metadata_does_harm(name: str, verify: bool) -> None:
    parts = BODIES[name]
    places = corpus.batch_places(parts.body)
    entries = [*places.nodes, *places.buffers]
    # The large frames have hundreds of entries much alike; the short fuzz run and `make fuzz` try the others.
    entries = entries[:: {"everything": 11, "unknown": 3}.get(name, 1)]
    numbers = NUMBERS if name == "minimal" else NUMBERS[::4]
    refused = 0
    for at in [*entries, *(entry + 8 for entry in entries), places.length, places.body_length]:
        for number in numbers:
            frame = resealed(parts, (at, "<q", number))
            refused += not decoded(frame, verify=verify)
            if not verify:
                stacked(FRAMES[name], frame)
                stacked(frame, FRAMES[name])
    assert refused > len(entries)


@pytest.mark.parametrize("number", [n for n in NUMBERS if n != 1])
def test_a_row_count_other_than_the_headers_is_refused(number: int) -> None:
    parts = BODIES["minimal"]
    frame = resealed(parts, (corpus.batch_places(parts.body).length, "<q", number))
    refusal(frame)
    if 0 <= number < 2**28:
        # The same lie told twice: the header agrees with the batch, the arrays do not.
        refusal(corpus.take_apart(frame).join(count=number))


@pytest.mark.parametrize("number", [0, 8, 2**31, 2**62, -8, -1])
def test_a_body_length_other_than_what_is_there_is_refused(number: int) -> None:
    parts = BODIES["odd_shapes"]
    refusal(resealed(parts, (corpus.batch_places(parts.body).body_length, "<q", number)))


def test_overlapping_buffers_are_refused() -> None:
    parts = BODIES["odd_shapes"]
    places = corpus.batch_places(parts.body)
    spans = [struct.unpack_from("<qq", parts.body, at) for at in places.buffers]
    filled = [i for i, (_, size) in enumerate(spans) if size]
    for left, right in itertools.pairwise(filled):
        edit = (places.buffers[right], "<q", spans[left][0])
        assert "overlap" in refusal(resealed(parts, edit)), (left, right)
    for i in filled[:-1]:
        longer = (places.buffers[i] + 8, "<q", spans[-1][0] + spans[-1][1] - spans[i][0])
        assert "overlap" in refusal(resealed(parts, longer)), i


def test_misaligned_buffers_are_refused() -> None:
    parts = BODIES["odd_shapes"]
    places = corpus.batch_places(parts.body)
    for at in places.buffers:
        start, size = struct.unpack_from("<qq", parts.body, at)
        if size > 1:
            for step in (1, 2, 4):
                refusal(resealed(parts, (at, "<q", start + step), (at + 8, "<q", size - step)))


def test_null_counts_that_lie_are_refused() -> None:
    parts = BODIES["odd_shapes"]
    places = corpus.batch_places(parts.body)
    for at in places.nodes:
        length, nulls = struct.unpack_from("<qq", parts.body, at)
        for lie in (length + 1, nulls - 1 if nulls != 1 else nulls + 1):
            if lie != 0:
                refusal(resealed(parts, (at + 8, "<q", lie)))


OFFSETS = sorted(path for path, role in corpus.buffer_spans(BODIES["odd_shapes"].body) if role == "offsets")


@pytest.mark.parametrize("path", OFFSETS)
@pytest.mark.parametrize("verify", [True, False])
def test_offsets_that_fall_or_overrun_are_refused(path: str, verify: bool) -> None:
    parts = BODIES["odd_shapes"]
    start, size = corpus.buffer_spans(parts.body)[path, "offsets"]
    last = size // 8 - 1
    values = struct.unpack_from(f"<{last + 1}q", parts.body, start)
    assert values[-1] > 0, "nothing to overrun"
    lies = {
        "the last overruns": [(last, values[-1] + 1)],
        "the last is huge": [(last, 2**62)],
        "the last wraps": [(last, -(2**63))],
        "the first is negative": [(0, -1)],
        "the first is huge": [(0, 2**62)],
        "all overrun": [(i, 2**40 + i) for i in range(last + 1)],
        "one falls": [(1, values[-1]), (2, values[-1] - 1)],
        "one is negative": [(1, -1)],
        "one jumps out and back": [(1, 2**40)],
    }
    for name, entries in lies.items():
        edits = [(start + 8 * i, "<q", value) for i, value in entries]
        assert refusal(resealed(parts, *edits), verify=verify), name


def test_no_word_of_the_metadata_does_harm() -> None:
    # Every 4-byte word of both messages' metadata, where flatbuffers keep their offsets, set to numbers that point
    # before, at and behind everything.
    parts = BODIES["minimal"]
    schema, batch = corpus.messages(parts.body)
    places = [*range(schema.start, schema.data, 4), *range(batch.start, batch.data, 4)]
    refused = 0
    for at in places:
        for number in (0, 4, 2**31 - 1, 2**32 - 4):
            refused += not decoded(resealed(parts, (at, "<I", number)))
    assert refused > len(places)


def test_column_names_that_are_no_text_are_refused() -> None:
    parts = BODIES["unknown"]
    schema = corpus.messages(parts.body)[0]
    assert decoded(parts.join())
    for name in (b"made_up", b"reward", b"tokens", b"eid", b"item", b"batch"):
        at = parts.body.index(name, 0, schema.data)
        refusal(resealed(parts, (at, "<B", 0xFF)))


def test_a_byte_order_that_is_not_this_one_is_refused() -> None:
    # Arrow leaves the byte order out where it is the default, so a schema that states it is made by hand.
    for order, taken in ((0, True), (1, False), (2, False), (-1, False)):
        schema = corpus.message_of(1, corpus.Flat([("<h", order), corpus.Flat(items=[])]))
        batch = corpus.message_of(3, corpus.Flat([("<q", 0), corpus.Flat(pairs=[]), corpus.Flat(pairs=[])]))
        assert decoded(corpus.seal(schema + batch + corpus.END, 0)) == taken, order


# --- the stream's order ---------------------------------------------------------------------------------------------


def streams() -> dict[str, bytes]:
    body = BODIES["minimal"].body
    schema, batch = corpus.messages(body)
    first, second = body[: schema.stop], body[batch.start : batch.stop]
    return {
        "two batches": first + second + second + corpus.END,
        "no batch": first + corpus.END,
        "no schema": second + corpus.END,
        "nothing": corpus.END,
        "two schemas": first + first + second + corpus.END,
        "batch first": second + first + corpus.END,
        "no end": first + second,
        "half an end": first + second + corpus.END[:4],
        "two ends": first + second + corpus.END + corpus.END,
        "an end between": first + corpus.END + second,
        "bytes behind": first + second + corpus.END + bytes(8),
        "a gap": first + second + bytes(8) + corpus.END,
        "old marks": first[4:] + second[4:] + corpus.END,
        "a file": b"ARROW1\0\0" + body + b"ARROW1",
        "dictionary kind": corpus.message_of(2, corpus.Flat([("<q", 0)])) + second + corpus.END,
        "kind 0": corpus.message_of(0, corpus.Flat([])) + second + corpus.END,
        "schema with a body": corpus.message_of(1, corpus.Flat([None, corpus.Flat(items=[])]), 8) + bytes(8) + second,
        "huge metadata": corpus.patched(body, (4, "<i", 2**31 - 8)),
        "negative metadata": corpus.patched(body, (4, "<i", -8)),
        "no metadata": corpus.patched(body, (4, "<i", 0)),
    }


@pytest.mark.parametrize("name", streams())
def test_a_stream_of_other_messages_is_refused(name: str) -> None:
    body = streams()[name]
    refusal(corpus.seal(body, 1))
    refusal(corpus.seal(body, 0))
    refusal(corpus.seal(body, 2))


@pytest.mark.parametrize("count", [0, 2])
def test_batches_of_no_rows_and_of_too_many(count: int) -> None:
    batch = corpus.batch_of(corpus.columns_of(corpus.minimal()))
    refusal(corpus.seal(corpus.stream_of(*[batch] * count, schema=batch.schema), count))


@pytest.mark.parametrize("version", [pa.ipc.MetadataVersion.V4])
def test_an_older_metadata_version_is_refused(version: Any) -> None:
    batch = corpus.batch_of(corpus.columns_of(corpus.minimal()))
    assert "version" in refusal(corpus.seal(corpus.stream_of(batch, metadata_version=version), 1))


def test_the_old_stream_layout_is_refused() -> None:
    batch = corpus.batch_of(corpus.columns_of(corpus.minimal()))
    refusal(corpus.seal(corpus.stream_of(batch, use_legacy_format=True), 1))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_arrows_own_body_compression_is_refused(compression: str) -> None:
    batch = corpus.batch_of(corpus.columns_of(corpus.media()))
    assert "compression" in refusal(corpus.seal(corpus.stream_of(batch, compression=compression), batch.num_rows))


# --- types ----------------------------------------------------------------------------------------------------------


class Traced(pa.ExtensionType):
    """A registered extension type: what a process has registered must not run because a frame names it."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.traced")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"state"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, state: bytes) -> Traced:
        cls.calls += 1
        raise KeyError("an error that is not Arrow's")


def refused_columns() -> dict[str, pa.Array]:
    text = pa.array(["a", "b", "a"])
    numbers = pa.array([1, 2, 3])
    return {
        "dictionary": text.dictionary_encode(),
        "nested dictionary": pa.StructArray.from_arrays([text.dictionary_encode()], ["a"]),
        "list of dictionary": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text.dictionary_encode()),
        "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array([5, 6])),
        "sparse union": pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [numbers]),
        "dense union": pa.UnionArray.from_dense(
            pa.array([0, 0, 0], pa.int8()), pa.array([0, 1, 2], pa.int32()), [numbers]
        ),
        "interval": pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval()),
        "string view": text.cast(pa.string_view()),
        "binary view": text.cast(pa.binary_view()),
        "list view": pa.array([[1], [2], [3]], pa.list_view(pa.int64())),
        "large list view": pa.array([[1], [2], [3]], pa.large_list_view(pa.int64())),
        "uuid": pa.array([bytes(16)] * 3, pa.uuid()),
        "json": pa.array(["{}"] * 3, pa.json_()),
        "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 0], pa.int8())),
        "opaque": pa.ExtensionArray.from_storage(pa.opaque(pa.int64(), "a", "b"), numbers),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int64(), [1]), pa.array([[1], [2], [3]], pa.list_(pa.int64(), 1))
        ),
        "nested extension": pa.StructArray.from_arrays([pa.array([bytes(16)] * 3, pa.uuid())], ["a"]),
    }


@pytest.mark.parametrize("name", refused_columns())
def test_types_that_are_no_plain_columns_are_refused(name: str) -> None:
    array = refused_columns()[name]
    refusal(frame_with(made_up=array))
    refusal(frame_with(reward=array))


def test_an_extension_type_that_the_process_knows_is_refused_unread() -> None:
    """pandas and datasets register such types as soon as they are imported; their readers raise what they like."""
    pa.register_extension_type(Traced())
    try:
        frame = frame_with(made_up=pa.ExtensionArray.from_storage(Traced(), pa.array([1, 2, 3])))
        Traced.calls = 0
        refusal(frame)
        assert Traced.calls == 0
    finally:
        pa.unregister_extension_type("tests.traced")


@pytest.mark.parametrize(
    "name", ["pandas.period", "datasets.features.features.Array2DExtensionType", "arrow.uuid", "x"]
)
@pytest.mark.parametrize("state", [b"", b"{}", b"[]", b"no json", b"\xff"])
def test_extension_types_by_their_metadata_alone_are_refused(name: str, state: bytes) -> None:
    import datasets  # noqa: F401 (registers its types)
    import pandas.core.arrays.arrow.extension_types  # noqa: F401 (so does pandas)

    arrays = corpus.columns_of(ROWS)
    marks = {b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": state}
    columns = [pa.field(key, array.type) for key, array in arrays.items()]
    inner = pa.struct([pa.field("inner", pa.int64(), metadata=marks)])
    for marked in (pa.field("made_up", pa.int64(), metadata=marks), pa.field("made_up", inner)):
        schema = pa.schema([*columns, marked])
        batch = pa.RecordBatch.from_arrays([*arrays.values(), pa.nulls(COUNT, marked.type)], schema=schema)
        refusal(corpus.frame_of(batch))
    schema = pa.schema([field.with_metadata(marks) if field.name == "reward" else field for field in columns])
    refusal(corpus.frame_of(pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)))


def known_columns() -> dict[str, pa.DataType]:
    """Every physical column that the table knows, with the type it must have."""
    columns: dict[str, pa.DataType] = {}
    for field in fields.FIELDS.values():
        columns[field.name] = PLAIN_TYPES.get((field.kind, ""), pa.large_list(pa.int64()))
        if field.trailing:
            columns[field.name] = pa.large_list(pa.list_(pa.list_(pa.int64(), 2), 2))
        for side in fields.SIDES[field.kind]:
            columns[f"{field.name}__{side}"] = PLAIN_TYPES[field.kind, side]
    return columns


WRONG = [
    pa.null(), pa.bool_(), pa.int8(), pa.int32(), pa.uint8(), pa.int64(), pa.float32(), pa.float64(), pa.string(),
    pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4), pa.list_(pa.int64()), pa.list_(pa.int64(), 2),
    pa.large_list(pa.string()), pa.large_list(pa.bool_()), pa.large_list(pa.large_list(pa.int64())),
    pa.large_list(pa.list_(pa.int64(), 2)), pa.large_list(pa.list_(pa.list_(pa.int64(), 0), 2)),
    pa.large_list(pa.list_(pa.list_(pa.string(), 2), 2)), pa.large_list(pa.null()), pa.struct([]), OTHER, MEDIA,
    pa.struct([*OTHER][:2]), pa.struct([("dtype", pa.string()), *list(OTHER)[1:]]), pa.timestamp("s"),
    pa.decimal128(10), pa.map_(pa.string(), pa.int64()), pa.date32(), pa.month_day_nano_interval(), pa.float16(),
]  # fmt: skip


@pytest.mark.parametrize("column", known_columns())
def test_a_known_column_of_another_type_is_refused(column: str) -> None:
    right = known_columns()[column]
    for kind in WRONG:
        if kind != right:
            with pytest.raises(WireError):
                wire.decode(frame_with(**{column: pa.nulls(COUNT, kind)}))


def test_whole_numbers_are_demanded_where_the_table_does() -> None:
    for column in ("tokens", "chosen", "policy_versions"):
        length = 3 if column == "policy_versions" else 5
        floats = pa.array([[0.5] * (length + i) for i in range(COUNT)], pa.large_list(pa.float32()))
        refusal(frame_with(**{column: floats}))


@pytest.mark.parametrize("missing", ["eid", "tokens", "prompt_length", "experience_type"])
def test_a_column_that_every_record_has_may_not_be_missing(missing: str) -> None:
    assert missing in refusal(frame_with(**{missing: None}))


def test_a_column_that_stands_twice_is_refused() -> None:
    arrays = corpus.columns_of(ROWS)
    for name in ("reward", "tokens", "made_up"):
        both = pa.RecordBatch.from_arrays(
            [*arrays.values(), *[arrays.get(name, arrays["reward"])] * 2], names=[*arrays, name, name]
        )
        refusal(corpus.frame_of(both))


@pytest.mark.parametrize("depth", [10, 60, 64, 65, 120, 130, 20_000])
def test_columns_nested_at_any_depth_do_no_harm(depth: int) -> None:
    column = corpus.field_of(corpus.text_of("bottom"), "null")
    for _ in range(depth):
        column = corpus.field_of(corpus.text_of("level"), "struct", children=corpus.Flat(items=[column]))
    nodes = corpus.Flat(pairs=[(0, 0)] * (depth + 1))
    batch = corpus.message_of(3, corpus.Flat([("<q", 0), nodes, corpus.Flat(pairs=[(0, 0)] * depth)]))
    # A schema without the columns that every record has is refused at any depth; the deep ones are what is tried.
    refusal(corpus.seal(corpus.schema_message(corpus.Flat(items=[column])) + batch + corpus.END, 0))


PARAMETERS: list[tuple[Any, ...]] = [
    (),
    *(tuple((form, number) for _ in range(3)) for form, number in (
        ("<i", 0), ("<i", 1), ("<i", -1), ("<i", 8), ("<i", 32), ("<i", 64), ("<i", 2**31 - 1), ("<i", -(2**31)),
        ("<q", -1), ("<q", 2**40),
    )),
    (("<i", 64), ("<B", 1)),
    (("<i", 38), ("<i", 1000), ("<i", 128)),
    (("<i", 39), ("<i", 0), ("<i", 128)),
    (("<i", 76), ("<i", -(2**31)), ("<i", 256)),
    (("<h", 3), corpus.text_of("no/zone")),
    (("<h", 3), corpus.text_of(b"\xff\0")),
    (corpus.text_of("text"), corpus.text_of("text"), corpus.text_of("text")),
]  # fmt: skip


@pytest.mark.parametrize("code", [*range(32), 255])
def test_no_description_of_a_type_does_harm(code: int) -> None:
    """Every number of a type, known to Arrow or not, with parameters and children that it may not have."""
    name = corpus.text_of("a")
    leaves = [corpus.field_of(name, "null", nullable=flag) for flag in (0, 1)]
    leaves += [corpus.field_of(corpus.text_of("key"), "large_utf8", nullable=flag) for flag in (0, 1)]
    pair = [corpus.field_of(name, "struct", children=corpus.Flat(items=[a, b]), nullable=0) for a, b in
            ((leaves[0], leaves[1]), (leaves[2], leaves[3]), (leaves[3], leaves[3]))]  # fmt: skip
    families = [[], [leaves[0]], [leaves[3]], [leaves[3]] * 2, *([struct] for struct in pair)]
    batch = corpus.message_of(3, corpus.Flat([("<q", 0), corpus.Flat(pairs=[]), corpus.Flat(pairs=[])]))
    for parameters in PARAMETERS:
        for family in families:
            for nullable in (0, 1):
                column = corpus.field_of(name, code, parameters, corpus.Flat(items=family), nullable=nullable)
                schema = corpus.schema_message(corpus.Flat(items=[column]))
                # No record without tokens: refused at the latest when all types have been made.
                refusal(corpus.seal(schema + batch + corpus.END, 0))


def test_columns_that_say_they_hold_no_null_do_no_harm() -> None:
    arrays = corpus.columns_of(ROWS)
    marked = {**arrays, "made_up": pa.nulls(COUNT), "texts": pa.nulls(COUNT, pa.large_string())}
    schema = pa.schema([pa.field(name, array.type) for name, array in marked.items()])
    body = corpus.stream_of(pa.RecordBatch.from_arrays(list(marked.values()), schema=schema))
    flags = [at for at in range(corpus.messages(body)[0].data) if body[at] == 1]
    taken = sum(decoded(corpus.seal(corpus.patched(body, (at, "<B", 0)), COUNT)) for at in flags)
    assert taken, "no byte of the schema that is 1 may be 0: the flags were not found"


def test_unknown_columns_of_plain_types_are_kept() -> None:
    deep: pa.DataType = pa.int64()
    for level in range(40):
        deep = pa.struct([("a", deep)]) if level % 2 else pa.large_list(deep)
    wide = pa.struct([(f"f{i}", pa.int8()) for i in range(900)])
    for kind in (deep, wide, pa.list_(pa.null(), 0), pa.large_list(pa.struct([]))):
        assert decoded(frame_with(made_up=pa.nulls(COUNT, kind)))


# --- values ---------------------------------------------------------------------------------------------------------


def with_null(array: pa.Array, row: int = 1) -> pa.Array:
    values = array.to_pylist()
    values[row] = None
    return pa.array(values, array.type)


@pytest.mark.parametrize("column", ["eid", "tokens", "prompt_length", "experience_type"])
def test_null_where_a_value_must_be_is_refused(column: str) -> None:
    arrays = corpus.columns_of(ROWS)
    refusal(frame_with(**{column: with_null(arrays[column])}))


def test_one_number_for_a_whole_axis_is_refused_where_it_cannot_stand() -> None:
    scalars = pa.array([3, None, None], pa.int64())
    versions = pa.array([None, [1] * 4, [1] * 5], pa.large_list(pa.int32()))
    assert decoded(frame_with(policy_versions=versions, policy_versions__one=scalars))
    for column in ("logprobs", "advantages", "chosen", "routed_experts", "action_mask"):
        rows = [None, None, None] if column not in RESPONSE else [None, [0] * 4, [0] * 5]
        kind = pa.uint8() if column == "action_mask" else pa.int32()
        refusal(frame_with(**{column: pa.array(rows, pa.large_list(kind)), f"{column}__one": scalars}))


SIDES = ("other", "one", "raw", "dtype")
NO_SIDES = [
    f"{field.name}__{side}"
    for field in fields.FIELDS.values()
    for side in SIDES
    if side not in fields.SIDES[field.kind]
]


@pytest.mark.parametrize("column", NO_SIDES)
def test_a_side_column_that_a_field_has_not_got_is_not_taken_for_one(column: str) -> None:
    """The table knows no `info__other`: such a column is an unknown one, of any type, and never the field's value."""
    field = column.partition("__")[0]
    for array in (pa.array(["a"] * COUNT), pa.array([[1]] * COUNT), pa.array([5] * COUNT), pa.array([b"b"] * COUNT)):
        frame = frame_with(**{column: array})
        for row, original in zip(wire.decode(frame).rows(), ROWS, strict=True):
            assert same(getattr(row, field), getattr(original, field))
            assert column in row.unknown
        assert decoded(frame)


@pytest.mark.parametrize("part", ["batch", "task", "run", "step", "suffix", "ints"])
def test_null_in_an_id_is_refused(part: str) -> None:
    values = corpus.columns_of(ROWS)["eid"]
    rows = values.to_pylist()
    rows[1][part] = None
    refusal(frame_with(eid=pa.array(rows, values.type)))


def test_an_id_marked_as_a_number_must_be_one() -> None:
    values = corpus.columns_of(ROWS)["eid"]
    for text in ("", "x", "1e5", "0x10", "9" * 5000, "1" * 100_000):
        rows = values.to_pylist()
        rows[0]["task"] = text
        refusal(frame_with(eid=pa.array(rows, values.type)))


def test_null_inside_a_row_is_refused() -> None:
    for column in ("tokens", "logprobs", "action_mask"):
        array = corpus.columns_of(ROWS)[column]
        rows = array.to_pylist()
        rows[1][0] = None
        refusal(frame_with(**{column: pa.array(rows, array.type)}))
    kind = pa.large_list(pa.list_(pa.list_(pa.int16(), 2), 1))
    for hole in ([[None, 1]], [None], None):
        rows = [[hole or [[1, 2]]] * (3 + i) for i in range(COUNT)]
        if hole is None:
            rows[0][0] = None
        refusal(frame_with(routed_experts=pa.array(rows, kind)))


def test_a_null_row_with_values_behind_it_is_refused() -> None:
    array = corpus.columns_of(ROWS)["logprobs"]
    hidden = pa.LargeListArray.from_arrays(array.offsets, array.values, mask=pa.array([False, True, False]))
    refusal(frame_with(logprobs=hidden))


RESPONSE = [field.name for field in fields.tensor_fields("response") if not field.trailing]


@pytest.mark.parametrize("column", RESPONSE)
@pytest.mark.parametrize("change", [1, -1, 1000])
def test_lengths_that_disagree_with_the_tokens_are_refused(column: str, change: int) -> None:
    kind = pa.uint8() if column == "action_mask" else pa.int32() if column == "policy_versions" else pa.float32()
    rows = [[0] * (3 + i) for i in range(COUNT)]
    assert decoded(frame_with(**{column: pa.array(rows, pa.large_list(kind))}))
    rows[1] = [0] * (4 + change)
    assert column in refusal(frame_with(**{column: pa.array(rows, pa.large_list(kind))}))


@pytest.mark.parametrize("number", [0, -1, 5, 6, 7, 2**40, 2**63 - 1, -(2**63)])
def test_prompt_lengths_out_of_bounds_are_refused(number: int) -> None:
    refusal(frame_with(prompt_length=pa.array([2, number, 2], pa.int64())))


@pytest.mark.parametrize("text", ["", "Single_turn", "single_turn ", "dpo\0", "other"])
def test_kinds_that_are_none_are_refused(text: str) -> None:
    refusal(frame_with(experience_type=pa.array(["single_turn", text, "single_turn"], pa.large_string())))


def test_a_kind_that_its_fields_do_not_bear_out_is_refused() -> None:
    refusal(frame_with(experience_type=pa.array(["dpo"] * 3, pa.large_string())))
    refusal(frame_with(corpus.dpo(), chosen=None))
    refusal(frame_with(corpus.minimal(), truncate_status=pa.array(["prompt_truncated"], pa.large_string())))


@pytest.mark.parametrize("byte", [2, 0x80, 0xFF])
def test_bools_other_than_0_and_1_are_refused(byte: int) -> None:
    rows = [[1] * (3 + i) for i in range(COUNT)]
    rows[2][-1] = byte
    frame = frame_with(action_mask=pa.array(rows, pa.large_list(pa.uint8())))
    assert "bool" in refusal(frame)
    assert "bool" in refusal(frame, verify=False)


@pytest.mark.parametrize("codes", [[0, 12, 12], [14, 12, 12], [255] * 3, [12, None, 12], [8, 9, 8]])
def test_dtype_codes_that_are_none_or_do_not_fit_are_refused(codes: list[int | None]) -> None:
    assert "__dtype" in refusal(frame_with(logprobs__dtype=pa.array(codes, pa.uint8())))


def test_a_dtype_column_without_its_values_is_refused() -> None:
    refusal(frame_with(logprobs=None, logprobs__dtype=pa.array([12] * 3, pa.uint8())))


@pytest.mark.parametrize("code", sorted(fields.BY_CODE))
@pytest.mark.parametrize("storage", sorted({d.storage for d in fields.BY_CODE.values()}))
def test_no_pair_of_storage_and_code_does_harm(storage: str, code: int) -> None:
    values = np.full(12, 255 if storage == "uint8" else 3).astype(storage)
    column = pa.LargeListArray.from_arrays(pa.array([0, 3, 7, 12], pa.int64()), pa.array(values))
    for codes in ([code] * 3, [code, code, 12], [code, 2, 9]):
        decoded(frame_with(returns=column, returns__dtype=pa.array(codes, pa.uint8())))


TEXTS = sorted(
    path
    for path, role in corpus.buffer_spans(BODIES["everything"].body)
    if role == "data" and (path, "offsets") in corpus.buffer_spans(BODIES["everything"].body)
    and not path.endswith((".data", "__raw"))
)  # fmt: skip


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("verify", [True, False])
def test_text_that_is_not_utf8_is_refused(path: str, verify: bool) -> None:
    parts = BODIES["everything"]
    start, size = corpus.buffer_spans(parts.body)[path, "data"]
    assert size
    for at in {start, start + size - 1}:
        for byte in (0xFF, 0xC0):
            frame = resealed(parts, (at, "<B", byte))
            assert refusal(frame, verify=verify)


@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"\xed\xa0", b"\xf8\x88\x80\x80\x80", b"\xc0\x80"])
def test_raw_text_that_is_no_generalised_utf8_is_refused(data: bytes) -> None:
    frame = frame_with(response_text=None, response_text__raw=pa.array([data] * 3, pa.large_binary()))
    assert "response_text__raw" in refusal(frame)


def box(**parts: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [3], "data": bytes(12), **parts}


BAD_BOXES: list[dict[str, Any]] = [
    *(box(dtype=name) for name in (None, "", "float31", "float", "Tensor", "__class__", "float32\0", "quint8")),
    *(box(shape=shape) for shape in (None, [], [4], [3, 0], [-3], [3, None], [None], [2**62], [1] * 64 + [3])),
    *(box(data=data) for data in (None, b"", bytes(11), bytes(13))),
    box(shape=[-1, -3], data=bytes(12)),
    box(shape=[2**32, 2**32], data=b""),
    # No element, and still sizes whose product no machine holds.
    box(shape=[2**61, 2**61, 0], data=b""),
    box(shape=[0, 2**61, 2**61], data=b""),
    box(dtype="bool", shape=[3], data=b"\0\1\2"),
]


@pytest.mark.parametrize("number", range(len(BAD_BOXES)))
def test_boxed_tensors_that_lie_are_refused(number: int) -> None:
    bad = BAD_BOXES[number]
    refusal(frame_with(multi_modal_inputs=pa.array([[{"key": "a", **box()}, {"key": "b", **bad}], [], None], MEDIA)))
    refusal(frame_with(advantages__other=pa.array([None, bad, None], OTHER), advantages=None))
    refusal(
        frame_with(
            tokens__other=pa.array([None, bad, None], OTHER), tokens=with_null(corpus.columns_of(ROWS)["tokens"])
        )
    )


def test_the_box_that_lies_are_told_in_is_good() -> None:
    assert decoded(frame_with(multi_modal_inputs=pa.array([[{"key": "a", **box()}], [], None], MEDIA)))
    assert decoded(frame_with(advantages__other=pa.array([None, box(), None], OTHER), advantages=None))


@pytest.mark.parametrize("entries", [[None], [{"key": None, **box()}], [{"key": "a", **box()}] * 2])
def test_media_without_a_key_or_with_one_twice_are_refused(entries: list[Any]) -> None:
    refusal(frame_with(multi_modal_inputs=pa.array([[], entries, None], MEDIA)))


def test_tokens_given_twice_are_refused() -> None:
    refusal(frame_with(tokens__other=pa.array([None, box(dtype="int32", shape=[6], data=bytes(24)), None], OTHER)))


def custom_field(source: str = '"a"', destination: str = '"b"', kind: str = '"torch.int8"') -> str:
    return f'[{{"source_field":{source},"destination_field":{destination},"data_type":{kind}}}]'


def test_the_custom_field_that_lies_are_told_in_is_good() -> None:
    assert decoded(frame_with(custom_fields=pa.array([None, custom_field(), None], pa.large_string())))


@pytest.mark.parametrize(
    "text",
    [
        *("5", "{}", '["x"]', "[{}]", "[null]"),
        *(custom_field(source=text) for text in ("1", "null", '""', "[]")),
        *(custom_field(destination=text) for text in ('"tokens"', '"input_ids"', '""', "{}")),
        *(custom_field(kind=text) for text in ('"torch.load"', '"os.system"', '"load"', "8", "null", "[]", "{}")),
    ],
)
def test_custom_fields_that_are_none_are_refused(text: str) -> None:
    refusal(frame_with(custom_fields=pa.array([None, text, None], pa.large_string())))


@pytest.mark.parametrize("column", ["info", "metrics", "sampling"])
@pytest.mark.parametrize("text", ["[1]", "5", '"x"', "true"])
def test_what_must_be_a_dict_is_one_or_refused(column: str, text: str) -> None:
    refusal(frame_with(**{column: pa.array([None, text, None], pa.large_string())}))


# --- parts that do not go together ----------------------------------------------------------------------------------


def test_frames_whose_columns_do_not_go_together_are_refused_or_read() -> None:
    made_up: list[Callable[[], pa.Array]] = [
        lambda: pa.array([1, 2, 3]),
        lambda: pa.array(["a", "b", "c"]),
        lambda: pa.array([[1], [2], [3]]),
    ]
    for left in made_up:
        for right in made_up:
            data = frame_with(made_up=left()) + frame_with(made_up=right())
            assert decoded(data) == (left is right)
    experts = [torch.zeros(2, 2, 2, dtype=torch.int16), torch.zeros(2, 3, 1, dtype=torch.int64)]
    rows = [Experience(tokens=[1, 2, 3], routed_experts=value) for value in experts]
    assert decoded(b"".join(row.serialize() for row in rows))
