"""What Trinity-RFT was seen to do, case by case; where that was judged wrong, what is right, with a line that says why.

`trinity.json` holds executed inputs and outputs of 0.5.2 and 0.6.0, and payloads that they wrote. Errors that were
`AssertionError`, `TypeError`, `RuntimeError` or `EOFError` there are `ValueError` here.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook import WireError
from rollbook.compat.trinity import (
    from_hf_datasets,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
    to_hf_datasets,
)
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.ids import EID
from rollbook.core.wire import to_trxp

DATA = json.loads((Path(__file__).parent / "trinity.json").read_text())
CASES = {case["id"]: case for case in DATA["cases"]}
GOLDENS = {golden["id"]: golden for golden in DATA["goldens"]}
NEGATIVE = {case["id"]: case for case in DATA["negative"]}

WHY_DIFFERENT = {
    "eid_default": "the suffix has 64 random bits, not 24: ids collided within thousands",
    "eid_ambiguous": "parts are escaped, so that two different ids never print alike",
    "ctor_multi_turn_mask_len_unchecked": "a mask of another length than the response is an error",
    "ctor_tuple_tokens_dtype": "lists, tuples, ranges and arrays convert alike",
    "ctor_np_logprobs_dtype": "lists, tuples, ranges and arrays convert alike",
    "to_dict_dpo": "a pair's response_length counts its two answers, not nothing",
    "gather_empty": "no records make an empty batch, not an error",
    "hf_single_int64": "the round trip keeps kind and types",
    "ser_trailing_garbage": "bytes behind a payload are an error, not silence",
}
"""Every quirk in the data has its reason here; `ctor_multi_turn_float_mask_kept` is kept as it is upstream."""


def plain(value: Any) -> Any:
    """A value as the cases write it."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": value.tolist()}
    if isinstance(value, EID):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return value


def tensor(encoded: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(encoded["data"], dtype=getattr(torch, encoded["dtype"])).reshape(encoded["shape"])


def build(inputs: dict[str, Any]) -> Experience:
    return Experience(**{k: tensor(v) if isinstance(v, dict) and "dtype" in v else v for k, v in inputs.items()})


def expected_fields(record: Experience, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        actual = getattr(record, name)
        if name == "custom_fields":
            actual = [custom.to_dict() for custom in actual]
        assert plain(actual) == value, name


def test_every_quirk_has_its_reason() -> None:
    quirks = {case["id"] for case in CASES.values() if case["quirk"]}
    assert quirks - {"ctor_multi_turn_float_mask_kept"} == set(WHY_DIFFERENT)


# --- ids ------------------------------------------------------------------------------------------------------------


def test_eid_ids() -> None:
    case = CASES["eid_ids"]
    eid = EID(**case["inputs"])
    for name in ("uid", "sid", "rid", "tid"):
        assert getattr(eid, name) == case["expected"][name]
    assert str(eid) == case["expected"]["str"]
    assert repr(eid) == case["expected"]["repr"]


def test_eid_default() -> None:
    expected = CASES["eid_default"]["expected"]
    eid = EID()
    assert eid.uid.startswith(expected["uid_prefix"])
    assert (eid.sid, eid.rid, eid.tid) == (expected["sid"], expected["rid"], expected["tid"])
    assert len(eid.suffix) == 16
    assert len({EID().suffix for _ in range(10_000)}) == 10_000


def test_eid_ambiguous() -> None:
    a, b = (EID(**inputs) for inputs in CASES["eid_ambiguous"]["inputs"])
    assert a.tid != b.tid
    assert EID.parse(a.uid) == a
    assert EID.parse(b.uid) == b


def test_eid_can_be_set_and_is_not_hashable() -> None:
    eid = EID(batch=1)
    eid.run = 7
    assert eid.rid == "1//7"
    with pytest.raises(TypeError):
        hash(eid)
    assert EID(1, "2", suffix="x") == EID("1", 2, suffix="x"), "ids compare by what they print"


# --- constructor ----------------------------------------------------------------------------------------------------

CONSTRUCTED = [
    case["id"]
    for case in CASES.values()
    if case["area"] == "constructor" and isinstance(case.get("expected"), dict) and case["id"] not in WHY_DIFFERENT
]


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_constructor(name: str) -> None:
    expected_fields(build(CASES[name]["inputs"]), CASES[name]["expected"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ctor_single_len_eq_prompt", ["prompt_length", "2"]),
        ("ctor_single_prompt0", ["prompt_length", "0"]),
        ("ctor_multi_turn_mask_len_unchecked", ["action_mask", "5", "2"]),
    ],
)
def test_constructor_refuses(name: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        build(CASES[name]["inputs"])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3])], ids=lambda v: type(v).__name__
)
def test_ctor_tuple_tokens_dtype(tokens: Any) -> None:
    record = Experience(tokens=tokens)
    assert plain(record.tokens) == {"dtype": "int32", "shape": [3], "data": [1, 2, 3]}


def test_ctor_np_logprobs_dtype() -> None:
    assert Experience(tokens=[1, 2, 3], logprobs=np.array([0.1, 0.2])).logprobs.dtype == torch.float32
    double = torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert Experience(tokens=[1, 2, 3], logprobs=double).logprobs is double, "a tensor is kept as given"


def test_ctor_eid_dict() -> None:
    assert Experience(tokens=[1, 2], **CASES["ctor_eid_dict"]["inputs"]).eid.tid == CASES["ctor_eid_dict"]["expected"]


# --- to_dict, dpo, groups -------------------------------------------------------------------------------------------


def test_to_dict_single() -> None:
    case = CASES["to_dict_single"]
    assert build(case["inputs"] | {"eid": EID(**case["inputs"]["eid"])}).to_dict() == case["expected"]


def test_to_dict_dpo() -> None:
    case = CASES["to_dict_dpo"]
    plain_record = build(case["inputs"] | {"eid": EID(**case["inputs"]["eid"])}).to_dict()
    assert plain_record == case["expected"] | {"response_length": 2, "chosen_length": 1, "rejected_length": 1}


def test_split_dpo() -> None:
    case = CASES["split_dpo"]
    pair = Experience(
        **case["inputs"],
        eid=EID(1, 2, 3, 4, "abc123"),
        chosen_messages=[{"role": "assistant", "content": "c"}],
        rejected_messages=[{"role": "assistant", "content": "r"}],
        info={"k": [1]},
    )
    halves = split_dpo_experience_to_single_turn([pair])
    assert len(halves) == 2
    for half, expected in zip(halves, case["expected"], strict=True):
        assert half.experience_type == expected["type"]
        assert half.eid.tid == expected["tid"]
        assert (half.eid.run, half.eid.step) == (expected["run"], expected["step"])
        assert half.eid.suffix != pair.eid.suffix
        assert half.parent == pair.eid.uid
        expected_fields(
            half, {k: expected[k] for k in ("tokens", "prompt_length", "action_mask", "reward", "messages")}
        )
    halves[0].info["k"].append(2)
    assert pair.info == halves[1].info == {"k": [1]}, "each has an info of its own"


@pytest.mark.parametrize(("name", "id_type"), [("group_by_run", "run"), ("group_by_step", "step")])
def test_group_by(name: str, id_type: str) -> None:
    case = CASES[name]
    records = [Experience(tokens=[1, 2], eid=eid) for eid in case["inputs"]]
    for source in (records, Experiences(records)):
        groups = group_by(source, id_type)
        assert {key: [row.eid.uid for row in rows] for key, rows in groups.items()} == case["expected"]
        assert list(groups) == list(case["expected"])
        with pytest.raises(ValueError, match="id_type"):
            group_by(source, "epoch")


# --- gathers --------------------------------------------------------------------------------------------------------


def gathered(name: str) -> list[Any]:
    """The records of a gather case as rows and as columns; their tokens were int64 tensors."""
    rows = [
        build(inputs | {"tokens": torch.tensor(inputs["tokens"])})
        for inputs in CASES[name]["inputs"]["exps"]  # type: ignore[index]
    ]
    return [rows, Experiences(rows)]


def test_gathers() -> None:
    for rows in gathered("gather_tokens"):
        assert plain(gather_token_ids(rows, 2, 3, pad_token_id=9)) == CASES["gather_tokens"]["expected"]
        assert plain(gather_attention_masks(rows, 2, 3)) == CASES["gather_attn"]["expected"]
        assert plain(gather_response_attrs(rows, "logprobs", 3)) == CASES["gather_logprobs"]["expected"]
        assert plain(gather_response_attrs(rows, "logprobs", 4, -1)) == CASES["gather_logprobs_pad"]["expected"]
        assert gather_action_masks(rows, 3).tolist() == [[True, True, False], [True, False, True]]


def test_gather_too_small() -> None:
    for rows in gathered("gather_too_small"):
        with pytest.raises(ValueError, match="max_prompt_length: got 1.*record 1"):
            gather_token_ids(rows, 1, 3, 0)
        with pytest.raises(ValueError, match="max_prompt_length: got 1.*record 1"):
            gather_attention_masks(rows, 1, 3)
        with pytest.raises(ValueError, match="max_response_length: got 2.*record 1"):
            gather_response_attrs(rows, "logprobs", 2)


def test_gather_empty() -> None:
    for rows in ([], Experiences()):
        assert gather_token_ids(rows, 1, 1, 0).shape == (0, 2)
        assert gather_attention_masks(rows, 1, 1).shape == (0, 2)
        assert gather_action_masks(rows, 1).shape == (0, 1)


def test_gather_mm() -> None:
    rows = [
        Experience(tokens=[1, 2], multi_modal_inputs={"p": torch.ones(2, 2)}),
        Experience(tokens=[1, 2], multi_modal_inputs={"p": torch.zeros(1, 2), "extra": torch.ones(1)}),
    ]
    for source in (rows, Experiences(rows)):
        gathered_inputs = gather_multi_modal_inputs(source)
        assert [plain(item) for item in gathered_inputs["p"]] == CASES["gather_mm"]["expected"]["p"]
        assert [item.numel() for item in gathered_inputs["extra"]] == [0, 1], "keys are the union; nothing is dropped"


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_hf_single_int64() -> None:
    record = Experience(
        tokens=torch.tensor([1, 2, 3]),
        logprobs=torch.tensor([0.1, 0.2], dtype=torch.float64),
        reward=1.0,
        eid=EID(1, 2, 3, 4, "abc123"),
    )
    back = from_hf_datasets(to_hf_datasets([record]))
    assert back == [record]
    assert (back[0].experience_type, back[0].tokens.dtype, back[0].logprobs.dtype) == (
        "single_turn",
        torch.int64,
        torch.float64,
    )


def test_serialize() -> None:
    two_records = Experience.serialize_many([Experience(tokens=[1, 2]), Experience(tokens=[1, 2])])
    with pytest.raises(ValueError, match="got 2.*deserialize_many"):
        Experience.deserialize(two_records)
    assert Experience.deserialize_many(Experience.serialize_many([])) == CASES["ser_empty_batch"]["expected"]
    with pytest.raises(ValueError, match="no bytes"):
        Experience.deserialize_many(b"")
    record = Experience(tokens=[1, 2])
    for data in (record.serialize(), to_trxp([record])):
        assert Experience.deserialize(bytearray(data)) == Experience.deserialize(memoryview(data)) == record
        with pytest.raises(WireError):
            Experience.deserialize(data + b"junk")


def test_ser_version2() -> None:
    data = bytearray(to_trxp([Experience(tokens=[1, 2])]))
    data[4] = 2
    with pytest.raises(WireError, match="version 2"):
        Experience.deserialize(data)


def test_values_that_frames_cannot_keep_are_converted() -> None:
    record = Experience(tokens=[1, 2])
    record.info = {
        "s": {3, 1, 2},
        "f": [frozenset("ba")],
        "m": {1, "a"},
        "c": 1 + 2j,
        "b": bytearray(b"x"),
        "k": {2j: ()},
    }
    back = Experience.deserialize(to_trxp([record]))
    assert back.info == {"s": [1, 2, 3], "f": [["a", "b"]], "m": ["a", 1], "c": 1 + 2j, "b": b"x", "k": {2j: ()}}
    assert Experience.deserialize(back.serialize()) == back


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    """A payload that Trinity wrote gives back what went into it, its kind included, which Trinity itself loses."""
    golden = GOLDENS[name]
    records = Experience.deserialize_many(base64.b64decode(golden["payload_b64"]))
    assert len(records) == len(golden["original"])
    for record, original in zip(records, golden["original"], strict=True):
        expected_fields(record, original)
    assert Experience.deserialize_many(Experience.serialize_many(records)) == records
    assert Experience.deserialize_many(to_trxp(records)) == records
    assert from_hf_datasets(to_hf_datasets(records)) == records
    for record in records:
        assert dataclasses.replace(record) == record if not record.malformed_fields else record.replace() == record


@pytest.mark.parametrize("name", sorted(set(NEGATIVE) - {"neg_bitflip_tensor"}))
def test_negative(name: str) -> None:
    with pytest.raises(WireError):
        Experience.deserialize_many(base64.b64decode(NEGATIVE[name]["payload_b64"]))


def test_neg_bitflip_tensor() -> None:
    """TRXP has no checksum: this payload says, validly, that a token was masked. The same flip in a frame is seen."""
    flipped = base64.b64decode(NEGATIVE["neg_bitflip_tensor"]["payload_b64"])
    assert Experience.deserialize(flipped).action_mask.tolist() == [True, False]
    original = Experience.deserialize(base64.b64decode(GOLDENS["trxp_0.6.0_single_full"]["payload_b64"]))
    frame = bytearray(original.serialize())
    for at in range(len(frame)):
        frame[at] ^= 1
        with pytest.raises(WireError):
            Experience.deserialize(frame)
        frame[at] ^= 1


def test_hostile_names_are_told() -> None:
    for name in ("neg_hostile_meta_global", "neg_hostile_legacy_global"):
        with pytest.raises(WireError, match=r"posix\.getpid"):
            Experience.deserialize_many(base64.b64decode(NEGATIVE[name]["payload_b64"]))
