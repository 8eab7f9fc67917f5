"""Every way out of a record and back is the identity: in type, order, dtype, shape, sign and bits.

The comparison is `exact` of the strategies, not the records' own `==`, which forgives the sign of zero, the order of
keys and the type of an id's parts.
"""

from __future__ import annotations

import copy
import dataclasses
import decimal
import io
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.compat.trinity import from_hf_datasets, to_hf_datasets
from rollbook.core import frame_reader, freeform, wire
from rollbook.core.fields import FIELDS
from rollbook.core.wire import decode, encode
from rollbook.io.arrow import from_table, to_table
from rollbook.io.parquet import read_parquet, write_parquet
from tests.attacks import corpus
from tests.attacks.outcome import stacked
from tests.strategies import (
    ADJACENT_SURROGATES,
    EIDS,
    FREEFORM,
    exact,
    exact_rows,
    full_record,
    memory_of,
    record_lists,
    records,
    shared,
)

Rows = list[Experience]
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


WITH_UNKNOWN = wire.decode(corpus.frames()["unknown"])


@SLOW
@given(record_lists(), st.booleans(), st.data())
def test_rows_read_alone_are_those_of_the_frame(rows: Rows, unknown: bool, data: st.DataObject) -> None:
    experiences = Experiences.concat([Experiences(rows), WITH_UNKNOWN]) if unknown else Experiences(rows)
    frame = wire.encode(experiences)
    slots = sorted(data.draw(st.sets(st.integers(0, len(experiences) - 1)))) if len(experiences) else []
    sizes = []

    def fetch(spans: list[tuple[int, int]]) -> list[bytes]:
        sizes.append(sum(stop - start for start, stop in spans))
        return [frame[start:stop] for start, stop in spans]

    expected = wire.decode(frame).take(slots)
    read = frame_reader.drive(frame_reader.read_rows(len(frame), slots), fetch)
    assert exact_rows(read.rows()) == exact_rows(expected.rows())
    assert sum(sizes[1:]) <= len(frame)
    fields = data.draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=3))
    some = frame_reader.drive(frame_reader.read_rows(len(frame), slots, fields), fetch)
    for name in fields:
        assert exact(some.values(name)) == exact(expected.values(name))


@SLOW
@given(record_lists(), record_lists())
def test_frames_read_as_one_are_the_frames(rows: Rows, others: Rows) -> None:
    stacked(wire.encode(rows), wire.encode(rows[:1] + rows), wire.encode(rows[::-1]))
    stacked(wire.encode(rows), wire.encode(others))
    plain = [
        Experience(tokens=[1, 2, 3 + i][: 3 - i % 2], reward=None if i % 3 else 0.5, prompt_text="é" * i, info={"i": i})
        for i in range(9)
    ]
    truncated = Experience(
        tokens=[1, 2], truncate_status="prompt_truncated", logprobs=[0.5], prompt_text="", reward=0.0
    )
    assert stacked(wire.encode(plain[:4]), wire.encode(plain[3:]), wire.encode(plain[:2] + plain[:1]))
    assert stacked(*(wire.encode([plain[0].replace(logprobs=[0.5, 0.5]), truncated]) for _ in range(2)))
    assert not stacked(wire.encode(plain[:4]), wire.encode(plain[4:], compression="lz4"))


# --- the ways -----------------------------------------------------------------------------------------------------


def _out(rows: Rows) -> list[Experience]:
    buffer = bytearray(b"\xaa" * (wire.encoded_size(rows) + 100))
    written = wire.encode(rows, out=buffer)
    assert len(written) == wire.encoded_size(rows)
    assert bytes(buffer[len(written) :]) == b"\xaa" * 100
    return wire.decode(written).rows()


def _one_frame_each(rows: Rows) -> list[Experience]:
    if not rows:
        return []
    return wire.decode(b"".join(wire.encode([row]) for row in rows)).rows()


def _two_frames(rows: Rows) -> list[Experience]:
    half = len(rows) // 2
    return Experience.deserialize_many(
        Experience.serialize_many(rows[:half]) + encode(Experiences(rows[half:]), compression="zstd")
    )


def _iter_frames(rows: Rows) -> list[Experience]:
    file = io.BytesIO()
    half = len(rows) // 2
    wire.write_frame(file, rows[:half])
    wire.write_frame(file, rows[half:], compression="lz4")
    file.seek(0)
    return [row for frame in wire.iter_frames(file) for row in frame]


def _parquet(rows: Rows) -> list[Experience]:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Experiences(rows), Path(folder) / "rows.parquet")
        return list(read_parquet(Path(folder) / "rows.parquet"))


def _chunked_arrow(rows: Rows) -> list[Experience]:
    table = to_table(Experiences(rows), portable=True)
    return list(from_table(pa.concat_tables([table.slice(0, 1), table.slice(1)])))


def _unaligned(rows: Rows) -> list[Experience]:
    return Experience.deserialize_many(memoryview(b"x" + Experience.serialize_many(rows))[1:])


BYTE_WAYS: dict[str, Callable[[Rows], Rows]] = {
    "serialize_many": lambda rows: Experience.deserialize_many(Experience.serialize_many(rows)),
    "serialize": lambda rows: [Experience.deserialize(row.serialize()) for row in rows],
    "bytearray": lambda rows: Experience.deserialize_many(bytearray(Experience.serialize_many(rows))),
    "unaligned memoryview": _unaligned,
    "columns": lambda rows: list(Experiences(rows)),
    "rows one by one": lambda rows: [experiences[i] for experiences in [Experiences(rows)] for i in range(len(rows))],
    "to_bytes": lambda rows: list(decode(encode(Experiences(rows)))),
    "zstd": lambda rows: list(decode(encode(Experiences(rows), compression="zstd"))),
    "lz4": lambda rows: list(decode(encode(Experiences(rows), compression="lz4"))),
    "not verified": lambda rows: list(wire.decode(Experience.serialize_many(rows), verify=False)),
    "given buffer": _out,
    "a frame each": _one_frame_each,
    "two frames": _two_frames,
    "iter_frames": _iter_frames,
    "decoded, encoded again": lambda rows: list(decode(encode(decode(encode(Experiences(rows)))))),
    "arrow": lambda rows: list(from_table(to_table(Experiences(rows)))),
    "portable arrow": lambda rows: list(from_table(to_table(Experiences(rows), portable=True))),
    "arrow in chunks": _chunked_arrow,
    "pickled columns": lambda rows: list(pickle.loads(pickle.dumps(Experiences(rows)))),
    "copied columns": lambda rows: list(copy.deepcopy(Experiences(rows))),
}
COPIES: dict[str, Callable[[Rows], Rows]] = {
    "copy.copy": lambda rows: [copy.copy(row) for row in rows],
    "dataclasses.replace": lambda rows: [dataclasses.replace(row) for row in rows],
    "replace": lambda rows: [row.replace() for row in rows],
    "compact": lambda rows: [row.compact() for row in rows],
}
DEEP_COPIES: dict[str, Callable[[Rows], Rows]] = {
    "copy.deepcopy": lambda rows: [copy.deepcopy(row) for row in rows],
    # Protocol 5: with 4, numpy itself loses the byte order of an array.
    "pickle": lambda rows: [pickle.loads(pickle.dumps(row, protocol=5)) for row in rows],
}


def picture(rows: Rows) -> Any:
    """All that a caller could see of their records: values, and how their tensors lie in memory."""
    tensors = [
        (name, id(value), value.data_ptr(), value.stride(), value.requires_grad, value._version)
        for row in rows
        for name, value in vars(row).items()
        if isinstance(value, torch.Tensor)
    ]
    return exact_rows(rows), tensors, [id(row.info) for row in rows]


def free_parts(row: Experience) -> list[Any]:
    """The values of a record that do not lie in shared columns: free-form ones and media."""
    return [getattr(row, name) for name, field in FIELDS.items() if field.kind in ("json", "media")]


def check_apart(rows: Rows, arrays: bool = True) -> None:
    """No two records have anything that can be changed in common."""
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert not shared(row, other, arrays=False)
            assert not arrays or not shared(free_parts(row), free_parts(other))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(rows=record_lists())
def test_bytes_and_columns(rows: Rows) -> None:
    before, expected = picture(rows), exact_rows(rows)
    for way, convert in BYTE_WAYS.items():
        back = convert(rows)
        assert exact_rows(back) == expected, way
        assert not shared(back, rows), way
        check_apart(back)
        assert picture(rows) == before, way


@QUICK
@given(rows=record_lists())
def test_shallow_copies(rows: Rows) -> None:
    before, expected = picture(rows), exact_rows(rows)
    for way, convert in COPIES.items():
        back = convert(rows)
        assert exact_rows(back) == expected, way
        # Tensors are the same objects, or may be; everything that holds them is not.
        assert not shared(back, rows, arrays=False), way
        check_apart(back, arrays=False)
        assert picture(rows) == before, way


@QUICK
@given(rows=record_lists())
def test_deep_copies(rows: Rows) -> None:
    before, expected = picture(rows), exact_rows(rows)
    for way, convert in DEEP_COPIES.items():
        back = convert(rows)
        assert exact_rows(back) == expected, way
        assert not shared(back, rows), way
        check_apart(back)
        assert picture(rows) == before, way


@SLOW
@given(rows=record_lists())
def test_parquet(rows: Rows) -> None:
    before = picture(rows)
    back = _parquet(rows)
    assert exact_rows(back) == exact_rows(rows)
    assert picture(rows) == before
    assert not shared(back, rows)


@QUICK
@given(rows=record_lists(trxp=True))
def test_trxp(rows: Rows) -> None:
    before = picture(rows)
    back = Experience.deserialize_many(wire.to_trxp(rows))
    assert exact_rows(back) == exact_rows(rows)
    assert picture(rows) == before
    assert not shared(back, rows)
    check_apart(back)


@SLOW
@given(rows=record_lists(), seed=st.integers(0, 99))
def test_hf(rows: Rows, seed: int) -> None:
    from datasets import Dataset, concatenate_datasets, disable_progress_bars

    disable_progress_bars()
    before = picture(rows)
    dataset = to_hf_datasets(rows)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == len(rows)
    assert exact_rows(from_hf_datasets(dataset)) == exact_rows(rows)
    order = random.Random(seed).choices(range(len(rows)), k=len(rows) // 2 + 1) if rows else []
    assert exact_rows(from_hf_datasets(dataset.select(order))) == exact_rows(rows[i] for i in order)
    if rows:
        shuffled = from_hf_datasets(dataset.shuffle(seed=seed))
        assert sorted(map(repr, exact_rows(shuffled))) == sorted(map(repr, exact_rows(rows)))
        half = len(rows) // 2
        halves = [dataset.select(range(half, len(rows))), dataset.select(range(half))]
        joined = concatenate_datasets([part for part in halves if len(part)])
        assert exact_rows(from_hf_datasets(joined)) == exact_rows(rows[half:] + rows[:half])
        with tempfile.TemporaryDirectory() as folder:
            dataset.save_to_disk(folder)
            assert exact_rows(from_hf_datasets(Dataset.load_from_disk(folder))) == exact_rows(rows)
    assert picture(rows) == before


@QUICK
@given(rows=record_lists(trxp=True))
def test_the_records_own_equality_agrees(rows: Rows) -> None:
    back = Experience.deserialize_many(Experience.serialize_many(rows))
    assert back == rows
    assert Experiences(rows) == rows
    assert Experiences(rows) == Experiences(back)


@pytest.mark.parametrize("key", [float("nan"), (1, (float("nan"),)), np.float32("nan")])
def test_a_nan_is_equal_to_a_nan_as_a_key_too(key: Any) -> None:
    record = Experience(tokens=[1, 2], info={"a": 1, key: 2})
    back = Experience.deserialize(record.serialize())
    assert back == record
    back.info[next(key for key in back.info if key != "a")] = 3
    assert back != record


@QUICK
@given(rows=record_lists())
def test_good_records_do_not_become_odd(rows: Rows) -> None:
    # A value that is in a side column because of its type or trailing sizes has a valid shape.
    assert [row.malformed_fields for row in Experience.deserialize_many(Experience.serialize_many(rows))] == [
        frozenset()
    ] * len(rows)


@QUICK
@given(row=records())
def test_gradients_stay_with_the_caller(row: Experience) -> None:
    back = Experience.deserialize(row.serialize())
    assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in vars(back).values())


# --- free-form values and ids -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FREEFORM)
def test_freeform(value: Any) -> None:
    before = exact(value)
    assert exact(freeform.loads(freeform.dumps(value))) == before
    assert exact(value) == before


@pytest.mark.parametrize(
    "value",
    [
        {"$int": "0x1f"},
        {"$dict": {"$dict": {"$int": 1}}},
        {"$map": [["a", 1]]},
        {"$tuple": []},
        {"$float": "nan"},
        {"$": None, "$int": 2},
        {"a": {"$tensor": {"dtype": "int8", "shape": [0], "data": ""}}},
        {1: "a", "1": "b", (1,): "c", None: "d", 1.5: "e", b"1": "f", np.int64(2): "g"},
        {True: 1, False: 0},
        {float("nan"): 1},
        {-0.0: 1},
        {"\ud800": "\udfff", ADJACENT_SURROGATES: [ADJACENT_SURROGATES]},
        {"": ""},
        {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
        [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 1 << 20_000, -(1 << 20_000)],
        [0.0, -0.0, 1e308, 5e-324, float("inf"), -float("inf"), float("nan")],
        [True, 1, 1.0, np.True_, np.int64(1), np.float64(1.0), "1", b"1", None],
        ((), [], {}, "", b"", None),
        np.array(["nul\x00", "漢"]),
        np.zeros((0, 3), dtype=">f4"),
        np.array(5, dtype=">i2"),
        np.float32(-0.0),
        np.longdouble(1) / 3,
        torch.tensor(5),
        torch.zeros(0, 3),
        torch.ones(4)[::4],
        torch.ones(0)[::2],
        torch.ones(3, 4)[:1, 1],
        torch.ones(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.5 + 2j]).conj().imag,
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_freeform_by_name(value: Any) -> None:
    record = Experience(tokens=[1, 2], info={"value": value})
    for back in (
        Experience.deserialize(record.serialize()),
        Experience.deserialize(wire.to_trxp([record])),
        pickle.loads(pickle.dumps(record, protocol=5)),
    ):
        assert exact(back.info["value"]) == exact(value)


@pytest.mark.parametrize("value", [np.str_("trailing nul\x00"), np.bytes_(b"trailing nul\x00")])
def test_numpy_text_is_kept_or_refused(value: np.generic) -> None:
    # numpy drops trailing zeros when such a scalar is read from memory.
    try:
        text = freeform.dumps(value)
    except ValueError:
        return
    assert exact(freeform.loads(text)) == exact(value)


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: {"$int": x}],
    ids=["list", "tuple", "dict", "map", "tag"],
)
def test_nesting_is_kept_or_refused_but_never_unreadable(wrap: Callable[[Any], Any]) -> None:
    value: Any = 5
    deepest = 0
    for depth in range(1, 80):
        value = wrap(value)
        try:
            text = freeform.dumps(value)
        except ValueError:
            assert depth > 32
            continue
        assert exact(freeform.loads(text)) == exact(value)
        deepest = depth
    assert deepest == freeform.MAX_DEPTH


def test_a_value_that_holds_itself_is_refused() -> None:
    info: dict[str, Any] = {}
    info["self"] = info
    with pytest.raises(ValueError, match="info"):
        Experience(tokens=[1, 2], info=info).serialize()


@QUICK
@given(eid=EIDS)
def test_uids_can_be_read_back(eid: EID) -> None:
    parsed = EID.parse(eid.uid)
    assert parsed == eid
    assert parsed.uid == eid.uid
    assert (parsed.tid, parsed.rid, parsed.sid) == (eid.tid, eid.rid, eid.sid)
    assert exact(EID(**eid.to_dict())) == exact(eid)
    assert exact(eid.replace()) == exact(eid)
    assert exact(copy.deepcopy(eid)) == exact(pickle.loads(pickle.dumps(eid))) == exact(eid)


@given(a=EIDS, b=EIDS)
@QUICK
def test_ids_that_print_alike_have_the_same_text(a: EID, b: EID) -> None:
    # The number 1 and the text "1" print alike; nothing else does.
    same_text = [str(part) for part in a.to_dict().values()] == [str(part) for part in b.to_dict().values()]
    assert (a.uid == b.uid) == same_text
    assert (a == b) == same_text


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("batch", "\ud800"),
        ("task", "a\udfff"),
        ("suffix", "\ud800"),
        ("run", 2**63),
        ("step", -(2**70)),
        ("task", 10**400),
    ],
)
def test_ids_that_cannot_be_kept_are_refused(part: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"EID\.{part}: got .*, expected"):
        EID(**{part: value})
    record = Experience(tokens=[1, 2])
    setattr(record.eid, part, value)
    with pytest.raises(ValueError, match=rf"record 0: eid: EID\.{part}: got"):
        record.serialize()


def test_a_custom_field_that_can_be_made_can_be_kept() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused, lost = set(), set()
    for dtype in dtypes:
        try:
            custom = CustomField("source", "destination", dtype)
        except ValueError:
            refused.add(dtype)
            continue
        record = Experience(tokens=[1, 2], custom_fields=[custom])
        try:
            back = [Experience.deserialize(record.serialize()), Experience.deserialize(wire.to_trxp([record]))]
        except ValueError:
            lost.add(dtype)
            continue
        assert exact_rows(back) == [exact(record)] * 2
    assert lost == set()
    assert not refused & {torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float8_e5m2}


# --- cases worth a name -------------------------------------------------------------------------------------------


def test_nothing_missing_and_empty_are_three_things() -> None:
    texts = [None, "", "x"]
    rows = [
        Experience(tokens=[1, 2], prompt_text=text, messages=messages, sampling=sampling, multi_modal_inputs=media)
        for text in texts
        for messages in (None, [], [{}])
        for sampling in (None, {}, {"seed": None})
        for media in (None, {}, {"p": torch.zeros(0)})
    ]
    rows += [Experience(tokens=[1, 2], reward=reward) for reward in (None, float("nan"), 0.0, -0.0, float("inf"))]
    for back in (
        Experience.deserialize_many(Experience.serialize_many(rows)),
        Experience.deserialize_many(wire.to_trxp(rows)),
        from_hf_datasets(to_hf_datasets(rows)),
        _parquet(rows),
    ):
        assert exact_rows(back) == exact_rows(rows)


def test_experts_of_every_shape_in_one_batch() -> None:
    shapes = [(2, 2, 3), (2, 1, 1), (2, 2, 3), (2, 4, 1), (2, 0, 2), (0, 2, 3)]
    rows = [
        Experience(tokens=[1] * (1 + shape[0]), action_mask=[True] * shape[0], routed_experts=np.ones(shape, np.int16))
        for shape in shapes
    ]
    rows.append(Experience(tokens=[1, 2]))
    for back in (
        Experience.deserialize_many(Experience.serialize_many(rows)),
        from_hf_datasets(to_hf_datasets(rows)),
        _parquet(rows),
        list(Experiences.concat([Experiences([row]) for row in rows])),
    ):
        assert exact_rows(back) == exact_rows(rows)
    assert exact_rows(_parquet(rows[-1:])) == exact_rows(rows[-1:])


def test_a_truncated_prompt_beside_logprobs_that_no_common_type_holds() -> None:
    # int64 and float32 share no exact type: the rarer goes to a side column, and its length still counts.
    complete = [Experience(tokens=[1, 2, 3], logprobs=torch.tensor([1, 2])) for _ in range(2)]
    truncated = Experience(tokens=[1, 2, 3], truncate_status="prompt_truncated", logprobs=[0.5, 0.25])
    rows = [*complete, truncated]
    assert exact_rows(Experience.deserialize_many(Experience.serialize_many(rows))) == exact_rows(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize("portable", [False, True])
def test_rows_without_a_value_can_be_selected_from_a_table(dtype: torch.dtype, portable: bool) -> None:
    rows = [Experience(tokens=[1, 2, 3], logprobs=torch.ones(2).to(dtype)), Experience(tokens=[1, 2])]
    table = to_table(Experiences(rows), portable)
    assert exact_rows(from_table(table.slice(1))) == exact_rows(rows[1:])
    assert exact_rows(from_table(table.take(pa.array([1, 0])))) == exact_rows(rows[::-1])


def test_tables_that_were_made_apart_can_be_joined() -> None:
    from datasets import concatenate_datasets

    rows = [
        Experience(tokens=[1, 2, 3], logprobs=torch.ones(2).to(torch.bfloat16), info={"a": 1}),
        Experience(tokens=[4, 5], prompt_text="\ud800"),
        Experience(tokens=[4, 5], policy_versions=3),
    ]
    tables = [to_table(Experiences([row]), portable=True) for row in rows]
    joined = pa.concat_tables(tables, promote_options="default")
    assert exact_rows(from_table(joined)) == exact_rows(rows)
    datasets = concatenate_datasets([to_hf_datasets([row]) for row in rows])
    assert exact_rows(from_hf_datasets(datasets)) == exact_rows(rows)


@pytest.mark.parametrize("way", [*BYTE_WAYS, *COPIES, *DEEP_COPIES, "parquet", "trxp", "hf"])
@pytest.mark.parametrize("kind", ["single_turn", "multi_turn", "dpo"])
def test_records_with_every_field(way: str, kind: str) -> None:
    ways = {**BYTE_WAYS, **COPIES, **DEEP_COPIES, "parquet": _parquet}
    ways["trxp"] = lambda rows: Experience.deserialize_many(wire.to_trxp(rows))
    ways["hf"] = lambda rows: from_hf_datasets(to_hf_datasets(rows))
    rows = [full_record(kind, seed) for seed in range(3)]
    missing = {name for row in rows for name in FIELDS if getattr(row, name) is None}
    assert missing == ({"action_mask"} if kind == "dpo" else set())
    assert exact_rows(ways[way](rows)) == exact_rows(rows)


def test_media_in_any_layout() -> None:
    matrix = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    media = {
        "transposed": matrix.t(),
        "one of a stride": matrix[:1, ::6],
        "one row of a column": matrix[:1, 2],
        "empty stride": matrix[:0, ::2],
        "0-d": matrix[1, 1],
        "expanded": matrix[:1].expand(5, 6),
        "graph": (matrix.clone().requires_grad_() * 2)[1:],
        "conjugate": torch.tensor([1 + 2j, -1j]).conj(),
        "half complex": torch.tensor([1 + 2j]).to(torch.complex32),
        "float8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn)[::2],
    }
    for name, tensor in media.items():
        record = Experience(tokens=[1, 2], multi_modal_inputs={name: tensor})
        assert exact(Experience.deserialize(record.serialize())) == exact(record), name
        assert Experience.deserialize(record.serialize()) == record, name


@pytest.mark.parametrize("key", ["\ud800", ADJACENT_SURROGATES])
def test_media_keys_that_are_not_utf8_are_kept_or_refused_by_name(key: str) -> None:
    try:
        record = Experience(tokens=[1, 2], multi_modal_inputs={key: torch.ones(1)})
        data = record.serialize()
    except ValueError as error:
        assert "multi_modal_inputs" in str(error)
        return
    assert exact(Experience.deserialize(data)) == exact(record)


def test_trxp_refuses_what_it_has_no_name_for() -> None:
    record = Experience(tokens=[1, 2], multi_modal_inputs={"p": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"multi_modal_inputs:p.*complex128"):
        wire.to_trxp([record])


def test_the_same_record_twice_is_two_records() -> None:
    info = {"array": np.ones(2), "tensor": torch.ones(2), "list": [1]}
    record = Experience(tokens=[1, 2], info=info, multi_modal_inputs={"p": torch.ones(2)})
    for back in (
        Experience.deserialize_many(Experience.serialize_many([record, record])),
        Experience.deserialize_many(wire.to_trxp([record, record])),
        _parquet([record, record]),
    ):
        check_apart(back)
        back[0].info["array"][0] = 5
        back[0].multi_modal_inputs["p"][0] = 5
        assert exact(back[1]) == exact(record)


def test_tensors_without_data_are_refused() -> None:
    empty = torch.ones(2, device="meta")
    tokens = torch.ones(3, dtype=torch.int32, device="meta")
    for given_fields in (
        {"tokens": tokens},
        {"tokens": [1, 2, 3], "logprobs": empty},
        {"tokens": [1, 2, 3], "info": {"a": empty}},
        {"tokens": [1, 2, 3], "multi_modal_inputs": {"a": empty}},
    ):
        with pytest.raises(ValueError):
            Experience(**given_fields).serialize()


# --- memory -------------------------------------------------------------------------------------------------------


def _with_unknown(rows: Rows) -> Experiences:
    table = to_table(Experiences(rows))
    return from_table(table.append_column("theirs", pa.array([f"{i} text" for i in range(len(rows))])))


@pytest.mark.parametrize("form", ["frame", "unverified", "lz4", "trxp"])
def test_rows_outlive_the_bytes_they_were_read_from(form: str) -> None:
    rows = [full_record(kind, seed) for seed, kind in enumerate(["single_turn", "multi_turn"])]
    rows[0] = rows[0].replace(info={"t": torch.ones(3), "a": np.ones(3), "b": b"bytes"})
    experiences = Experiences(rows) if form == "trxp" else _with_unknown(rows)
    encoded = {
        "frame": lambda: wire.encode(experiences),
        "unverified": lambda: wire.encode(experiences),
        "lz4": lambda: wire.encode(experiences, compression="lz4"),
        "trxp": lambda: wire.to_trxp(experiences),
    }[form]()
    data = bytearray(encoded)
    if form == "unverified":
        back = wire.decode(data, verify=False).rows()
    else:
        back = Experience.deserialize_many(data)
    before = exact_rows(back)
    assert before == exact_rows(experiences)
    data[:] = b"\xff" * len(data)
    assert exact_rows(back) == before


@QUICK
@given(rows=record_lists(max_size=3))
def test_tensors_lie_outside_the_bytes(rows: Rows) -> None:
    data = Experience.serialize_many(rows)
    start = np.frombuffer(data, dtype=np.uint8).ctypes.data
    for row in Experience.deserialize_many(data):
        for value in vars(row).values():
            if isinstance(value, torch.Tensor) and value.numel():
                value.zero_()
                assert memory_of(value).stop <= start or memory_of(value).start >= start + len(data)
    assert exact_rows(Experience.deserialize_many(data)) == exact_rows(rows)


def test_copies_of_tensors_in_a_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    record = Experience(tokens=[1, 2, 3], logprobs=weight * 2, info={"entropy": weight * 3})
    for back in (copy.deepcopy(record), pickle.loads(pickle.dumps(record)), copy.copy(record), record.compact()):
        assert exact(back) == exact(record)


def test_a_pickle_holds_no_more_than_the_record() -> None:
    large = torch.zeros(1_000_000)
    record = Experience(
        tokens=[1, 2, 3], logprobs=large[:2], multi_modal_inputs={"p": large[5:9]}, info={"entropy": large[:2]}
    )
    assert len(pickle.dumps(record)) < 100_000
    assert len(wire.to_trxp([record])) < 100_000
    assert len(record.serialize()) < 100_000


# --- unknown columns ----------------------------------------------------------------------------------------------

UNKNOWN = {
    "number": pa.array([1, None, 3]),
    "text": pa.array(["a", None, "漢"]),
    "ratio": pa.array([0.5, None, -0.0], pa.float16()),
    "flag": pa.array([True, None, False]),
    "raw": pa.array([b"\xff", None, b""]),
    "list": pa.array([[1, 2], None, []], pa.list_(pa.int8())),
    "pair": pa.array([[1.5, 2.5], None, [0.0, 1.0]], pa.list_(pa.float32(), 2)),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}]),
    "money": pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("-2.00")]),
    "moment": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
    "nothing": pa.nulls(3),
    "tokens__theirs": pa.array([1, 2, 3]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_columns_survive(name: str) -> None:
    rows = [full_record(seed=seed) for seed in range(3)]
    table = to_table(Experiences(rows)).append_column(name, UNKNOWN[name])
    experiences = decode(encode(from_table(table)))
    expected = UNKNOWN[name].to_pylist()

    def is_kept(read: Any) -> bool:
        values = [row.unknown[name].to_pylist()[0] for row in read]
        return values == expected and [row.tokens.tolist() for row in read] == [row.tokens.tolist() for row in rows]

    assert is_kept(experiences)
    assert is_kept(experiences.rows())
    assert is_kept(Experience.deserialize_many(Experience.serialize_many(experiences.rows())))
    assert is_kept(Experiences(experiences.rows()))
    assert is_kept(decode(encode(experiences, compression="zstd")))
    assert is_kept(list(Experiences.concat([experiences[:1], experiences[1:]])))
    assert is_kept(experiences[[0, 1, 2]])
    assert is_kept(experiences.compact())
    assert is_kept(from_table(to_table(experiences, portable=True)))
    assert is_kept(_parquet(experiences.rows()))
    assert is_kept([row.replace(reward=1.0) for row in experiences])
    assert is_kept([copy.copy(row) for row in experiences])
    assert is_kept([copy.deepcopy(row) for row in experiences])
    assert is_kept([row.compact() for row in experiences])
    assert is_kept(pickle.loads(pickle.dumps(experiences)))
    assert is_kept(pickle.loads(pickle.dumps(experiences.rows())))


def test_unknown_columns_beside_records_without_them() -> None:
    plain = Experience(tokens=[1, 2])
    strange = _with_unknown([Experience(tokens=[3, 4])])
    for experiences in (strange + Experiences([plain]), Experiences([*strange, plain])):
        assert experiences.column("theirs").to_pylist() == ["0 text", None]
    changed = strange[0]
    changed.unknown["theirs"] = pa.array(["mine"])
    assert strange[0].unknown["theirs"].to_pylist() == ["0 text"]


def test_a_copy_has_unknown_columns_of_its_own() -> None:
    row = _with_unknown([Experience(tokens=[3, 4])])[0]
    for other in (row.replace(), copy.copy(row), row.compact(), copy.deepcopy(row)):
        other.unknown["theirs"] = pa.array(["mine"])
        assert row.unknown["theirs"].to_pylist() == ["0 text"]


def test_a_fresh_record_has_no_unknown_columns_to_share() -> None:
    record = Experience(tokens=[1, 2])
    try:
        record.unknown["mine"] = pa.array([1])
    except TypeError:
        return  # It cannot be written on, so nothing is shared.
    try:
        assert not Experience(tokens=[1, 2]).unknown
    finally:
        record.unknown.pop("mine")
