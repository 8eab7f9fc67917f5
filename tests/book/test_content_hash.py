"""Digests: one for equal records however they lie in columns, another for every change; and what a second record adds.

The fixed values at the end are a stored format: a change that breaks them needs a new `digests.FORMAT`.
"""

from __future__ import annotations

import copy
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest as H

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.book.content_hash import ContentHashes, content_hashes, is_late
from rollbook.book.revision import compare
from rollbook.core import freeform
from rollbook.core.fields import FIELDS, Field, declare, withdraw
from rollbook.core.freeform import same
from rollbook.core.wire import decode, encode
from rollbook.io.arrow import from_table, to_table
from rollbook.io.parquet import read_parquet, write_parquet
from tests.strategies import FREEFORM_DICTS, full_record, record_lists, records

FEW = settings(max_examples=40)
Rows = list[Experience]


def hash_record(record: Experience) -> tuple[bytes, bytes]:
    """The digests of a record that is alone in its columns."""
    hashes = content_hashes(Experiences([record]))
    return hashes.full[0], hashes.core[0]


def full_hash(**columns: Any) -> bytes:
    """The digest of a small record with some fields given."""
    return hash_record(
        Experience(**{"eid": EID(1, 2, 3, 4, "s"), "tokens": [1, 2, 3, 4], "prompt_length": 2, **columns})
    )[0]


# --- one digest, however the record came there --------------------------------------------------------------------


@FEW
@given(rows=record_lists(max_size=5))
def test_neighbours_slices_and_gathering_change_nothing(rows: Rows) -> None:
    alone = [hash_record(row) for row in rows]
    experiences = Experiences(rows)
    hashes = content_hashes(experiences)
    assert list(zip(hashes.full, hashes.core, strict=True)) == alone
    for start in range(len(rows)):
        assert content_hashes(experiences[start:]).full == hashes.full[start:]
        assert content_hashes(experiences[: start + 1]).core == hashes.core[: start + 1]
    back = list(range(len(rows)))[::-1]
    assert content_hashes(experiences.take(back)) == hashes.take(back)
    parts = Experiences.concat([Experiences([row]) for row in rows])
    assert content_hashes(parts) == hashes
    assert content_hashes(Experiences(experiences.rows())) == hashes


@FEW
@given(rows=record_lists(max_size=4))
def test_round_trips_change_nothing(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> None:
    experiences = Experiences(rows)
    hashes = content_hashes(experiences)
    assert content_hashes(decode(encode(experiences))) == hashes
    assert content_hashes(decode(encode(experiences, compression="lz4"))) == hashes
    assert content_hashes(from_table(to_table(experiences))) == hashes
    if rows:
        path = tmp_path_factory.mktemp("p") / "rows.parquet"
        write_parquet(experiences, path)
        assert content_hashes(read_parquet(path)) == hashes


def test_columns_give_what_rows_give() -> None:
    values, offsets = np.arange(7, dtype=np.int32), np.array([0, 3, 7])
    eids = [EID(1, i, 0, 0, "s") for i in range(2)]
    experiences = Experiences.from_columns({"eid": eids, "tokens": (values, offsets), "reward": [0.5, -0.0]})
    rows = [
        Experience(eid=eids[0], tokens=[0, 1, 2], reward=0.5),
        Experience(eid=eids[1], tokens=[3, 4, 5, 6], reward=0),
    ]
    assert content_hashes(experiences) == content_hashes(Experiences(rows))
    assert content_hashes(Experiences()) == ContentHashes([], [])


# --- equal or not -------------------------------------------------------------------------------------------------


@FEW
@given(a=records(), b=records(), names=st.sets(st.sampled_from(sorted(FIELDS))))
def test_digests_agree_with_equality(a: Experience, b: Experience, names: set[str]) -> None:
    """`b` takes some of its values from `a`: now and then all that differ."""
    mixed = copy.copy(a)
    for name in names:
        if getattr(b, name) is not None:
            mixed.__dict__[name] = getattr(b, name)
    try:
        Experiences([mixed])
    except ValueError:
        mixed = b
    assert (hash_record(a)[0] == hash_record(mixed)[0]) == (a == mixed)
    core = all(same(getattr(a, name), getattr(mixed, name)) for name, field in FIELDS.items() if not is_late(field))
    assert (hash_record(a)[1] == hash_record(mixed)[1]) == core


@settings(max_examples=100)
@given(a=FREEFORM_DICTS, b=FREEFORM_DICTS)
def test_free_form_values_agree_with_equality(a: dict[Any, Any], b: dict[Any, Any]) -> None:
    # By way of its text, so that no NaN is the same object: dicts find a key by identity too.
    copy = freeform.loads(freeform.dumps(a))
    assert full_hash(info=copy) == full_hash(info=a)
    assert (full_hash(info=copy) == full_hash(info=b)) == same(copy, b)
    turned = dict(reversed(list(copy.items())))
    assert (full_hash(info=a) == full_hash(info=turned)) == same(a, turned)


PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "order of keys": ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}, "a": 1}, True),
    "order of other keys": ({1: 2, "b": 3}, {"b": 3, 1: 2}, True),
    "order of items": ({"a": [1, 2]}, {"a": [2, 1]}, False),
    "int and float": ({"a": 1}, {"a": 1.0}, True),
    "int and bool": ({"a": 1}, {"a": True}, True),
    "large int and float": ({"a": 2**70}, {"a": float(2**70)}, True),
    "large int near float": ({"a": 2**70 + 1}, {"a": float(2**70)}, False),
    "int at the edge": ({"a": 2**63}, {"a": 2.0**63}, True),
    "int over the edge": ({"a": 2**64}, {"a": 2.0**64}, True),
    "half": ({"a": 0.5}, {"a": 0.25}, False),
    "zeros": ({"a": 0.0}, {"a": -0.0}, True),
    "nan": ({"a": float("nan")}, {"a": -float("nan")}, True),
    "nan and none": ({"a": float("nan")}, {"a": None}, False),
    "infinities": ({"a": float("inf")}, {"a": float("-inf")}, False),
    "none and missing": ({"a": None}, {}, False),
    "text and number": ({"a": "1"}, {"a": 1}, False),
    "key and number": ({"1": 0}, {1: 0}, False),
    "keys that are numbers": ({1: 0, 2: 1}, {2.0: 1, True: 0}, True),
    "keys of numpy": ({np.int64(3): 0, "a": 1}, {3: 0, "a": 1}, True),
    "text keys of numpy": ({np.str_("a"): 1}, {"a": 1}, True),
    "tuple and list": ({"a": (1,)}, {"a": [1]}, False),
    "a dict like a tag": ({"$tuple": [1]}, {"$tuple": [2]}, False),
    "a dict and its tag": ({"a": {"$tuple": [1]}}, {"a": (1,)}, False),
    "numpy and number": ({"a": np.float64(1.0)}, {"a": 1.0}, False),
    "zeros in arrays": ({"a": np.array([0.0, np.nan])}, {"a": np.array([-0.0, -np.nan])}, True),
    "byte orders": ({"a": np.array([1], "<i4")}, {"a": np.array([1], ">i4")}, False),
    "shapes of arrays": ({"a": np.zeros((2, 3))}, {"a": np.zeros((3, 2))}, False),
    "empty shapes": ({"a": np.zeros((0, 3))}, {"a": np.zeros((0, 2))}, False),
    "long doubles": ({"a": np.longdouble(1) / 3}, {"a": np.longdouble(1) / np.longdouble(3)}, True),
    "tensors": ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}, True),
    "types of tensors": ({"a": torch.tensor([0.0])}, {"a": torch.tensor([0])}, False),
    "surrogates": ({"a": "\ud83d\ude00"}, {"a": "\U0001f600"}, False),
    "bytes and text": ({"a": b"x"}, {"a": "x"}, False),
    "across values": ({"a": "b", "c": "d"}, {"a": 'b","c', "d": ""}, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_free_form_pairs(name: str) -> None:
    a, b, equal = PAIRS[name]
    assert same(a, b) == equal
    assert (full_hash(info=a) == full_hash(info=b)) == equal
    assert (full_hash(messages=[a]) == full_hash(messages=[b])) == equal


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]
DTYPES += [torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def test_every_byte_of_an_8_bit_float_is_told_from_those_it_differs_from() -> None:
    kinds = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    for kind in kinds:
        tensors = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind)).split(1)
        eid = EID(suffix="s")
        rows = [Experience(eid=eid, tokens=[1, 2], multi_modal_inputs={"t": tensor}) for tensor in tensors]
        hashes = content_hashes(Experiences(rows)).full
        wide = torch.cat([tensor.float() for tensor in tensors])
        alike = (wide[:, None] == wide) | (wide.isnan()[:, None] & wide.isnan())
        assert [[a == b for b in hashes] for a in hashes] == alike.tolist(), kind
        assert len(set(hashes)) >= 250


def test_types_and_shapes_of_tensors() -> None:
    tensors = [
        torch.zeros(shape, dtype=d)
        for d in DTYPES
        for shape in ((), (1,), (2,), (1, 2), (2, 1), (0,), (0, 2), (2, 0), (3, 0))
    ]
    hashes = {full_hash(multi_modal_inputs={"t": tensor}) for tensor in tensors}
    assert len(hashes) == len(tensors)
    a, b = torch.tensor([1 + 2j, complex("nan+1j")]), torch.tensor([1 + 2j, complex("5+nanj")])
    assert same(a, b) and full_hash(multi_modal_inputs={"t": a}) == full_hash(multi_modal_inputs={"t": b})
    assert full_hash(multi_modal_inputs={"a": a, "b": b}) == full_hash(multi_modal_inputs={"b": b, "a": a})
    assert len({full_hash(multi_modal_inputs=m) for m in (None, {}, {"a": a}, {"b": a}, {"a": a, "b": a})}) == 5


def test_any_nan_is_one_and_so_is_zero() -> None:
    for kind, bits in ((torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 32), (torch.float64, 64)):
        raw = getattr(torch, f"int{bits}")
        nans = torch.full((2,), -1, dtype=raw).view(kind)
        plain = torch.tensor([float("nan")] * 2, dtype=kind)
        assert (
            full_hash(advantages=nans)
            == full_hash(advantages=plain)
            != full_hash(advantages=torch.zeros(2, dtype=kind))
        )
        assert full_hash(advantages=torch.tensor([-0.0, 1], dtype=kind)) == full_hash(
            advantages=torch.tensor([0, 1], dtype=kind)
        )
    assert full_hash(reward=-0.0) == full_hash(reward=0) and full_hash(reward=float("nan")) == full_hash(
        reward=-float("nan")
    )


def test_a_row_in_a_wider_column_keeps_its_digest() -> None:
    tensors = [torch.tensor([-0.0, float("nan")]).to(d) for d in (torch.float16, torch.bfloat16, torch.float32)]
    tensors += [torch.tensor([1, 0]).to(d) for d in (torch.uint8, torch.bool, torch.int16)]
    rows = [Experience(eid=EID(suffix="s"), tokens=[1, 2, 3], returns=tensor) for tensor in tensors]
    alone = [hash_record(row)[0] for row in rows]
    assert len(set(alone)) == len(rows)
    experiences = Experiences(rows)
    assert experiences.column("returns").codes is not None
    assert content_hashes(experiences).full == alone
    # And with a type that no column holds beside them: some rows stand aside.
    wide = rows[0].replace(returns=torch.tensor([2**63, 1], dtype=torch.uint64))
    experiences = Experiences([*rows, wide])
    assert experiences.column("returns__other") is not None
    assert content_hashes(experiences).full == [*alone, hash_record(wide)[0]]


def _variants() -> dict[str, Experience]:
    """A full record, and records that differ from it in one place each."""
    base = full_record("multi_turn")
    variants = {"": base}
    for name, field in FIELDS.items():
        if name in ("eid", "tokens", "prompt_length", "experience_type", "chosen", "rejected"):
            continue
        value = getattr(base, name)
        variants[f"{name} gone"] = base.replace(**{name: None}) if name != "action_mask" else base
        if field.kind == "tensor":
            bits = value.clone()
            bits[-1] = ~bits[-1] if field.dtype == "bool" else bits[-1] + 1 if field.accepts == "integer" else 7.25
            variants[f"{name} last"] = base.replace(**{name: bits})
            other = torch.int64 if field.accepts == "integer" else torch.float64
            variants[f"{name} type"] = base.replace(**{name: value.to(other)})
        elif field.kind == "text":
            variants[f"{name} longer"] = base.replace(**{name: value + " "})
            variants[f"{name} empty"] = base.replace(**{name: ""})
        elif field.kind in ("number", "integer"):
            variants[f"{name} more"] = base.replace(**{name: value + 1})
        elif field.kind == "json":
            empty: Any = [] if field.holds == "list" else {}
            variants[f"{name} other"] = base.replace(**{name: {"n": 1} if field.holds == "dict" else [1]})
            if not field.always:
                variants[f"{name} empty"] = base.replace(**{name: empty})
    for part, value in {"batch": 2, "task": "x", "run": 5, "step": 5, "suffix": "x"}.items():
        variants[f"eid {part}"] = base.replace(eid=base.eid.replace(**{part: value}))
    variants["tokens last"] = base.replace(tokens=torch.cat([base.tokens[:-1], base.tokens[-1:] + 1]))
    variants["tokens type"] = base.replace(tokens=base.tokens.long())
    better = base.chosen + 1
    variants["chosen other"] = base.replace(chosen=better)
    variants["chosen swapped"] = base.replace(chosen=base.rejected, rejected=better)
    variants["kind"] = base.replace(experience_type="single_turn")
    variants["one version"] = base.replace(policy_versions=0)
    variants["versions"] = base.replace(policy_versions=torch.zeros(3, dtype=torch.int32))
    variants["texts moved"] = base.replace(prompt_text=base.response_text, response_text=base.prompt_text)
    variants["custom type"] = base.replace(custom_fields=[CustomField("n", "expert_mask", torch.int8)])
    del variants["action_mask gone"]
    return variants


def test_every_single_change_shows() -> None:
    variants = _variants()
    hashes = {name: hash_record(row) for name, row in variants.items()}
    assert len({pair[0] for pair in hashes.values()}) == len(variants) > 60
    for name, (_, core) in hashes.items():
        field = FIELDS.get(name.split(" ")[0])
        late = not name or (field is not None and is_late(field))
        assert (core == hashes[""][1]) == late, name
    # All of them in one batch, with their side columns beside each other.
    assert content_hashes(Experiences(list(variants.values()))).full == [pair[0] for pair in hashes.values()]


def test_empty_and_missing_are_one_only_where_a_record_cannot_tell_them_apart() -> None:
    assert full_hash() == full_hash(info={}, metrics={}, custom_fields=[])
    assert (
        len(
            {
                full_hash(),
                full_hash(sampling={}),
                full_hash(messages=[]),
                full_hash(tools=[]),
                full_hash(response_text=""),
            }
        )
        == 5
    )
    assert full_hash(eid=EID(1, "2", 3, 4, "s")) == full_hash(), "ids are equal that print alike"


def test_unknown_columns() -> None:
    rows = [full_record(seed=seed) for seed in range(3)]
    plain = content_hashes(Experiences(rows))
    columns = {
        "theirs": pa.array([1, None, 3]),
        "text": pa.array(["a", None, "漢"]),
        "flag": pa.array([True, None, False]),
        "pair": pa.array([[1.5, 2.5], None, [0.0, 1.0]], pa.list_(pa.float32(), 2)),
        "nest": pa.array([{"a": 1, "b": ["x", None]}, None, {"a": None, "b": []}]),
        "moment": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
        "nothing": pa.nulls(3),
    }
    seen = {plain.full[0]}
    for name, array in columns.items():
        experiences = from_table(to_table(Experiences(rows)).append_column(name, array))
        hashes = content_hashes(experiences)
        assert hashes.full[1] == plain.full[1], "a null is a neighbour's doing"
        assert (hashes.full[0] in seen) == (name == "nothing")
        seen.add(hashes.full[0])
        assert (hashes.core[2] != plain.core[2]) == (name != "nothing")
        assert content_hashes(decode(encode(experiences))) == hashes
        assert content_hashes(experiences[1:]) == hashes.take([1, 2])
        assert content_hashes(Experiences([*experiences.rows(), rows[0]])).full == [*hashes.full, plain.full[0]]
    union = pa.UnionArray.from_dense(
        pa.array([0] * 3, pa.int8()), pa.array([0, 1, 2], pa.int32()), [pa.array([1, 2, 3])]
    )
    experiences = Experiences(rows)
    experiences.columns["odd"] = union
    with pytest.raises(ValueError, match="column 'odd': an unknown column of type .*union"):
        content_hashes(experiences)


def test_a_new_field_changes_no_record_without_it() -> None:
    rows = list(_variants().values())[:8]
    before = content_hashes(Experiences(rows))
    declare(Field("aaa", kind="tensor", axis="response", dtype="float32"))
    declare(Field("zzz", kind="text"))
    try:
        assert content_hashes(Experiences(rows)) == before
        late, core = (hash_record(rows[0].replace(**change)) for change in ({"aaa": [1, 2, 3]}, {"zzz": "x"}))
        assert late[1] == before.core[0] != core[1]
        assert len({late[0], core[0], before.full[0]}) == 3
    finally:
        withdraw("aaa")
        withdraw("zzz")


def test_hostile_free_form_text_is_refused() -> None:
    experiences = Experiences([full_record()])
    key = '{"$tuple":[' * 500 + "1" + "]}" * 500
    for text in (
        f'{{"$map":[[{key},1]]}}',
        "[" * 70 + "]" * 70,
        '{"$tensor":{}}',
        '{"$what":1}',
        '{"$map":3}',
        '{"$int":"z"}',
        "{",
    ):
        experiences.columns["tools"] = pa.array([text], pa.large_string())
        with pytest.raises(ValueError, match="record 0: tools: "):
            content_hashes(experiences)


# --- what a second record adds ------------------------------------------------------------------------------------


@FEW
@given(record=records(), names=st.sets(st.sampled_from([name for name, field in FIELDS.items() if is_late(field)])))
def test_what_was_left_out_is_what_is_added(record: Experience, names: set[str]) -> None:
    bare = record.replace(**dict.fromkeys(names))
    addition = compare(bare, record)
    assert addition.conflict is None
    assert addition.merged == record
    expected = {n for n in names if getattr(record, n) is not None and not isinstance(getattr(record, n), dict)}
    assert {name for name in addition.added if name in FIELDS} == expected
    back = compare(record, bare)
    assert (back.merged, back.added, back.conflict) == (record, (), None)
    assert back.merged is record


def test_conflicts_are_named() -> None:
    text = "a" * 1000
    old = full_record("multi_turn", info={"n": 1, "m": 2}, response_text=text + "b" + text)
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "reward": ({"reward": 2.0}, "reward: stored 0.5, given 2.0"),
        "entry": ({"info": {"m": 3}}, "info.m: stored 2, given 3"),
        "core": ({"finish_reason": None}, "finish_reason: stored 'finish_reason 漢 0', given None"),
        "tensor": ({"loss_weights": old.loss_weights.double()}, "loss_weights: stored float32[3], given float64[3]"),
        "long text": (
            {"response_text": text + "c" + text},
            f"response_text: stored {'a' * 10 + 'b' + 'a' * 39!r} from character 990 of 2001, "
            f"given {'a' * 10 + 'c' + 'a' * 39!r} from character 990 of 2001",
        ),
    }
    for name, (change, message) in cases.items():
        addition = compare(old, old.replace(**change))
        assert addition.merged is old and not addition.added
        assert str(addition.conflict) == message, name
    tokens = old.tokens.clone()
    tokens[3] += 1
    conflict = compare(old, old.replace(tokens=tokens)).conflict
    assert conflict is not None
    assert conflict.field == "tokens" and conflict.new == f"int32[5] with {int(tokens[3])} at 3"


def test_an_addition_merges_entries_and_keeps_the_rest() -> None:
    old = full_record(info={"seed": 1, "judge": {"a": 1}}, reward=None, advantages=None)
    new = old.replace(
        reward=float("nan"), advantages=[1.0, 2.0, 3.0], returns=None, info={"late": 2, 7: 8, "seed": 1.0}
    )
    addition = compare(old, new)
    assert addition.added == ("reward", "advantages", "info.late", "info.7")
    assert addition.merged.info == {"seed": 1, "judge": {"a": 1}, "late": 2, 7: 8}
    assert same(addition.merged.returns, old.returns) and addition.merged.reward != addition.merged.reward
    assert old.reward is None and old.info == {"seed": 1, "judge": {"a": 1}}, "the stored one is left alone"
    assert hash_record(addition.merged)[1] == hash_record(old)[1]


def test_unknown_columns_conflict() -> None:
    table = to_table(Experiences([full_record(), full_record(), full_record()]))
    a, b, c = from_table(table.append_column("theirs", pa.array([1, 2, None]))).rows()
    assert str(compare(a, b).conflict) == "theirs: stored 1, given 2"
    assert str(compare(a, c).conflict) == "theirs: stored 1, given None"
    assert compare(c, full_record()).conflict is None


def test_odd_shapes_are_added_as_they_are() -> None:
    from rollbook.core.experience import restore

    old = full_record("multi_turn", advantages=None, info={"n": 1})
    columns = {name: getattr(old, name) for name in FIELDS}
    new = restore({**columns, "advantages": torch.ones(7), "info": {"m": 2}, "reward": None}, "test")
    assert new.malformed_fields == {"advantages"}
    addition = compare(old, new)
    assert addition.conflict is None
    assert addition.merged.advantages.tolist() == [1.0] * 7
    assert addition.merged.info == {"n": 1, "m": 2} and addition.merged.reward == old.reward
    assert content_hashes(Experiences([addition.merged])).core == content_hashes(Experiences([old])).core


# --- the stored format --------------------------------------------------------------------------------------------


def _golden() -> list[Experience]:
    plain = Experience(eid=EID(1, 2, 3, 4, "abc"), tokens=[1, 2, 3, 4], prompt_length=2)
    full = Experience(
        eid=EID("10/eval", "50%", -1, 0, "漢"),
        tokens=[1, 2, 3, 2**31 - 1],
        prompt_length=2,
        logprobs=[-0.5, float("-inf")],
        reward=0.1,
        advantages=torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        returns=torch.tensor([-0.0, 1e-7], dtype=torch.float64),
        action_mask=[True, False],
        truncate_status="response_truncated",
        info={"b": 1e-7, "a": [1.5, 1e300, 1e16, -3, True, None, "漢\n\x00", (1, b"x")], "c": 2**80, 5: {"$int": 1}},
        metrics={"t": torch.tensor([1.0, -0.0]), "n": np.float32(0.5), "a": np.arange(3, dtype=">i2")},
        prompt_text="?",
        response_text="\ud800",
        messages=[{"role": "user", "content": "hi"}],
        multi_modal_inputs={"pixels": torch.arange(6, dtype=torch.float16).reshape(2, 3), "e": torch.empty(2, 0)},
        custom_fields=[CustomField("n", "expert_mask", torch.bool)],
        policy_versions=7,
        routed_experts=torch.arange(8, dtype=torch.int16).reshape(2, 2, 2),
        group_size=8,
        sampling={"temperature": 1.0},
    )
    pair = Experience(eid=EID(suffix="p"), tokens=[1], chosen=[2, 3], rejected=torch.tensor([4], dtype=torch.int64))
    table = to_table(Experiences([plain])).append_column("theirs", pa.array([[{"a": 1, "b": "x"}]]))
    return [plain, full, pair, from_table(table)[0]]


GOLDEN = [
    ("9478c93b93f3f30e2b1200a32c31936d", "fd6b1e2938ade6e12d45744bf3406477"),
    ("66c178813712edde5f8f9646d95bbcbe", "452712409ea4f1056e51500eb691570b"),
    ("e075bfade9c731235d94913b7a44751d", "59e749448bbce9b36e71dc5d3a74f12b"),
    ("11fd728a7b2df35c1fbdc861cfd70802", "a576771cd27f2796194b79b5644ea540"),
]


def test_the_stored_format() -> None:
    hashes = content_hashes(Experiences(_golden()))
    assert [(a.hex(), b.hex()) for a, b in zip(*hashes, strict=True)] == GOLDEN


def test_the_format_is_what_its_description_says() -> None:
    def entry(name: str, form: str, content: bytes) -> bytes:
        return H(struct.pack("<I", len(name)) + name.encode() + form.encode()) + content

    core = H(
        b"rollbook core 1\0"
        + entry("action_mask", "tensor bool *", H(b"\1\1"))
        + entry("eid", "uid", H(b"1/2/3/4/abc"))
        + entry("experience_type", "text", H(b"single_turn"))
        + entry("prompt_length", "integer", struct.pack("<qq", 2, 0))
        + entry("tokens", "tensor int32 *", H(struct.pack("<4i", 1, 2, 3, 4)))
    )
    late = entry("info", "json", H(b'{"a":[1,0.5],"b":1}')) + entry("reward", "number", struct.pack("<dq", 0.5, 0))
    plain = _golden()[0]
    assert hash_record(plain) == (H(b"rollbook whole 1\0" + core), core)
    more = plain.replace(info={"b": True, "a": [1.0, 0.5]}, reward=0.5)
    assert hash_record(more) == (H(b"rollbook whole 1\0" + core + late), core)


def test_digests_and_tags_do_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "frame"
    path.write_bytes(encode(Experiences(_golden())))
    code = f"""
import sys
from rollbook.core.wire import decode
from rollbook.book.content_hash import content_hashes
from rollbook.book.index_columns import index_columns, number_column
many = decode(open({str(path)!r}, "rb").read())
digest, numbers = content_hashes(many).full[1].hex(), number_column(many, "metrics.n")
print(digest, len(index_columns(many)), numbers, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{GOLDEN[1][0]} 4 [None, 0.5, None, None] False\n"
