"""One record: what its constructor takes, makes, refuses and keeps."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.core.fields import FIELDS
from rollbook.core.wire import to_trxp


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"tokens": [1, 2]}, "single_turn"),
        ({"tokens": [1, 2], "action_mask": [1]}, "multi_turn"),
        ({"tokens": [1, 2], "chosen": [3], "rejected": [4]}, "dpo"),
        ({"tokens": [1, 2], "chosen": [3], "rejected": [4], "action_mask": [True]}, "multi_turn"),
        ({"tokens": [1, 2], "action_mask": [1], "experience_type": "single_turn"}, "single_turn"),
    ],
)
def test_kind_is_inferred_once_and_kept(columns: dict[str, Any], kind: str) -> None:
    record = Experience(**columns)
    assert record.experience_type == kind
    copies = [
        record.replace(reward=1.0),
        dataclasses.replace(record, reward=1.0),
        copy.copy(record),
        copy.deepcopy(record),
        pickle.loads(pickle.dumps(record)),
        Experience.deserialize(record.serialize()),
        Experiences([record])[0],
    ]
    assert {other.experience_type for other in copies} == {kind}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [1, 2, 3], "logprobs": [0.0]}, "logprobs: got 1 entries, expected 2"),
        ({"tokens": [1, 2, 3], "advantages": torch.tensor(0.5)}, r"advantages: got shape \[\], expected 1 dim"),
        ({"tokens": [1, 2, 3], "teacher_logprobs": [0.0] * 3}, "teacher_logprobs: got 3 entries, expected 2"),
        ({"tokens": [1, 2, 3], "policy_versions": [1]}, "policy_versions: got 1 entries, expected 2"),
        ({"tokens": [1, 2, 3], "routed_experts": [[1], [2]]}, "routed_experts: got shape .* expected 3 dim"),
        ({"tokens": [[1, 2], [3, 4]]}, r"tokens: got shape \[2, 2\]"),
        ({"tokens": []}, "tokens: got no tokens, expected a prompt and a response"),
        ({"tokens": [1.7, 2.2]}, "tokens: got values of float64, expected integers"),
        ({"tokens": [2**31, 1]}, "tokens: got 2147483648, which int32 cannot represent"),
        ({"tokens": [1, "x"]}, r"tokens\[1\]: got str 'x', expected integers"),
        ({"tokens": [[1], [2, 3]]}, r"tokens: got list \[\[1\], \[2, 3\]\], expected numbers"),
        ({"tokens": torch.ones(3)}, "tokens: got a tensor of float32, expected integers"),
        ({"tokens": torch.ones(3, dtype=torch.bool)}, "tokens: got a tensor of bool"),
        ({"tokens": [1, 2], "logprobs": torch.ones(1, dtype=torch.complex64)}, "logprobs: got a tensor of complex64"),
        ({"tokens": [1, 2, 3], "action_mask": [0.5, 1.0]}, "action_mask: got 0.5, expected 0 and 1"),
        ({"tokens": [1, 2], "prompt_length": -3}, "prompt_length: got -3"),
        ({"tokens": [1, 2], "prompt_length": 1.0}, "prompt_length: got float 1.0, expected an int"),
        ({"tokens": [1, 2], "prompt_length": 3, "action_mask": []}, "prompt_length: got 3, expected 0 to 2"),
        ({"tokens": [1, 2], "chosen": [1]}, "rejected: got None, expected tokens"),
        ({"tokens": [1, 2], "rejected": [1]}, "chosen: got None, expected tokens"),
        ({"tokens": [1, 2], "experience_type": "dpo"}, "chosen: got None, expected tokens in a dpo record"),
        ({"tokens": [1, 2], "experience_type": "other"}, "experience_type: got 'other', expected one of"),
        ({"tokens": [1, 2], "reward": "good"}, "reward: got str 'good', expected a number"),
        ({"tokens": [1, 2], "reward": torch.ones(2)}, r"reward: got a tensor of shape \[2\]"),
        ({"tokens": [1, 2], "info": [1]}, r"info: got list \[1\], expected a dict"),
        ({"tokens": [1, 2], "prompt_text": b"x"}, "prompt_text: got bytes"),
        ({"tokens": [1, 2], "eid": "1/2"}, "eid: got str '1/2', expected an EID or a dict"),
        ({"tokens": [1, 2], "eid": {"bacth": 1}}, "eid: got the key 'bacth', expected batch, task"),
        ({"tokens": [1, 2], "eid": {"run": "a"}}, "EID.run: got 'a', expected an int"),
        ({"tokens": [1, 2], "multi_modal_inputs": {"p": None}}, r"multi_modal_inputs\['p'\]: got NoneType"),
        ({"tokens": [1, 2], "multi_modal_inputs": [1]}, "multi_modal_inputs: got list, expected a dict"),
        ({"tokens": [1, 2], "custom_fields": ["x"]}, "CustomField: got 'x'"),
        ({"tokens": [1, 2], "group_size": 0}, "group_size: got 0, expected at least 1"),
        ({"tokens": None}, "tokens: got None, expected token ids"),
        ({"tokens": "hello"}, "tokens: got str 'hello', expected integers"),
        ({"tokens": [1, None]}, r"tokens\[1\]: got NoneType None, expected integers"),
        ({"tokens": [1, 2], "logprobs": [1e300]}, "logprobs: got a number that float32 cannot represent"),
        ({"tokens": [1, 2], "prompt_length": torch.tensor(1.5)}, "prompt_length: got Tensor .*, expected an int"),
        ({"tokens": [1, 2], "messages": "hello"}, "messages: got str 'hello', expected a list"),
        ({"tokens": [1, 2], "reward": [0.0] * 100_000}, "^.{0,200}$"),
        ({"tokens": [1, 2], "eid": "1/2/0/0/x"}, "EID.parse"),
        ({"tokens": [1, 2, 3], "truncate_status": "prompt_truncated"}, "logprobs: got None, expected them"),
    ],
)
def test_bad_input_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experience(**columns)


def test_unknown_and_missing_keywords() -> None:
    with pytest.raises(TypeError, match="rewrad"):
        Experience(tokens=[1, 2], rewrad=1)
    with pytest.raises(TypeError, match="tokens"):
        Experience(reward=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Experience([1, 2])  # type: ignore[misc]


def test_prompt_truncated() -> None:
    record = Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[0.0, 0.0], truncate_status="prompt_truncated")
    assert record.action_mask.tolist() == [False, False]
    with pytest.raises(ValueError, match="advantages: got 1 entries, expected 2"):
        record.replace(advantages=[0.0])
    with pytest.raises(ValueError, match="action_mask: got True, expected all False"):
        Experience(tokens=[1, 2], logprobs=[0.0], action_mask=[1], truncate_status="prompt_truncated")


def test_multi_turn_may_have_no_prompt_or_no_response() -> None:
    assert Experience(tokens=[1, 2], prompt_length=0, action_mask=[0, 1]).prompt_length == 0
    empty = Experience(tokens=[1, 2], prompt_length=2, action_mask=[])
    assert (len(empty.action_mask), empty.action_mask.dtype) == (0, torch.bool)


def test_tensors_are_kept_and_everything_else_is_copied() -> None:
    tokens, array = torch.tensor([1, 2, 3], dtype=torch.uint16), np.array([0.5, 0.25])
    info, messages = {"a": {"b": [1]}}, [{"role": "user", "content": ["x"]}]
    first = Experience(tokens=tokens, logprobs=array, info=info, messages=messages)
    second = Experience(tokens=tokens, logprobs=array, info=info, messages=messages)
    assert first.tokens is tokens
    array[:] = 9.0
    assert first.logprobs.tolist() == [0.5, 0.25]
    first.info["a"]["b"].append(2)
    first.messages[0]["content"].append("y")
    assert second.info == info == {"a": {"b": [1]}}
    assert second.messages == messages == [{"role": "user", "content": ["x"]}]


def test_ids_are_the_records_own() -> None:
    eid = EID(batch=1, task=2)
    records = [Experience(eid=eid, tokens=[1, 2]) for _ in range(3)]
    for run, record in enumerate(records):
        record.eid.run = run
    assert [record.eid.run for record in records] == [0, 1, 2]
    assert eid.run == 0


def test_reward_none_is_not_nan() -> None:
    unscored, unscorable = Experience(tokens=[1, 2]), Experience(tokens=[1, 2], reward=float("nan"))
    assert unscored.reward is None
    assert unscorable.reward != unscorable.reward
    for back in (Experience.deserialize_many(Experience.serialize_many([unscored, unscorable])),):
        assert back[0].reward is None
        assert back[1].reward != back[1].reward
    for number in (1, np.float32(1.0), np.int64(1), torch.tensor(1.0), torch.tensor([1]), np.array(1.0), True):
        assert type(Experience(tokens=[1, 2], reward=number).reward) is float


def test_equality() -> None:
    eid = EID(suffix="x")

    def make(**changes: Any) -> Experience:
        columns = {"eid": eid, "tokens": [1, 2, 3], "logprobs": [0.5, float("nan")], "info": {"t": torch.ones(2)}}
        return Experience(**(columns | changes))

    assert make() == make()
    assert make(reward=float("nan")) == make(reward=float("nan"))
    for changes in (
        {"tokens": [1, 2, 4]},
        {"tokens": torch.tensor([1, 2, 3])},
        {"logprobs": [0.5, 0.5]},
        {"info": {"t": torch.zeros(2)}},
        {"info": {}},
        {"reward": 0.0},
        {"eid": EID(suffix="y")},
        {"messages": []},
    ):
        assert make(**changes) != make(), changes
    assert make() != "something else"
    with pytest.raises(TypeError):
        hash(make())


def test_dataclass_tools() -> None:
    record = Experience(tokens=[1, 2], reward=0.5, custom_fields=[CustomField("a", "b", torch.int32)])
    names = [field.name for field in dataclasses.fields(record)]
    assert names == list(FIELDS)
    as_dict = dataclasses.asdict(record)
    assert list(as_dict) == names
    assert as_dict["eid"]["suffix"] == record.eid.suffix
    assert Experience(**as_dict) == record


class TaggedRecord(Experience):
    tag = "kept"


def test_copies_of_a_subclass_are_of_the_subclass() -> None:
    record = TaggedRecord(tokens=[1, 2])
    for new in (record.replace(reward=1.0), dataclasses.replace(record), copy.copy(record), copy.deepcopy(record)):
        assert type(new) is TaggedRecord and new.tag == "kept"


def test_to_dict_has_what_is_not_none() -> None:
    parts = Experience(tokens=[1, 2], prompt_text="", messages=[], tools=[], sampling={}).to_dict()
    assert (parts["prompt_text"], parts["messages"], parts["tools"], parts["sampling"]) == ("", [], [], {})
    assert "response_text" not in parts and "chosen_messages" not in parts


def test_compact_frees_a_row_from_its_parent() -> None:
    experiences = Experiences([Experience(tokens=list(range(1000)), info={"i": i}) for i in range(50)])
    row = experiences[7]
    assert row.tokens.untyped_storage().nbytes() >= 50 * 4000
    small = row.compact()
    assert small == row
    assert small.tokens.untyped_storage().nbytes() == 4000
    assert len(pickle.dumps(row)) < 10_000, "a pickled row does not take its parent along"
    assert copy.deepcopy(row).tokens.untyped_storage().nbytes() == 4000


def test_custom_field() -> None:
    field = CustomField("is_expert", "expert_mask", torch.bool)
    assert hash(field) == hash(CustomField("is_expert", "expert_mask", torch.bool))
    assert CustomField.from_dict(field.to_dict()) == field
    with pytest.raises(dataclasses.FrozenInstanceError):
        field.source_field = "x"  # type: ignore[misc]
    for bad in (("a", "tokens", torch.bool), ("a", "input_ids", torch.bool), ("", "b", torch.bool)):
        with pytest.raises(ValueError, match="CustomField"):
            CustomField(*bad)
    for kind in ("torch.bool", torch.load, None, bool):
        with pytest.raises(ValueError, match="data_type"):
            CustomField("a", "b", kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data_type"):
        CustomField.from_dict({"source_field": "a", "destination_field": "b", "data_type": "torch.load"})


def test_eid_parse() -> None:
    for eid in (
        EID(1, 2, 3, 4, "abc"),
        EID("10/eval", "50%", -1, 0, "x/y"),
        EID("%2F", "%", 0, 0, "%25"),
        EID("", "", 0, 0, ""),
        EID("01", "1", 0, 0, "é"),
        EID(-5, 10**30, 0, 0, "a b"),
    ):
        assert EID.parse(eid.uid) == eid
        assert EID.parse(eid.uid).uid == eid.uid
    assert EID.parse("1/01/0/0/x").to_dict() == {"batch": 1, "task": "01", "run": 0, "step": 0, "suffix": "x"}
    for bad in ("", "1/2/3", "1/2/a/4/x", "1/2/3/4/x/y", "%/2/3/4/x", "1/2/03/4/x", 7):
        with pytest.raises(ValueError, match="uid"):
            EID.parse(bad)  # type: ignore[arg-type]


def test_ownership_reaches_subclasses_sets_and_arrays() -> None:
    info: dict[str, Any] = {"a": defaultdict(list), "b": OrderedDict(x=[1]), "c": {1}, "d": np.zeros(2)}
    first, second = (Experience(tokens=[1, 2], info=info) for _ in range(2))
    first.info["a"]["k"].append(1)
    first.info["b"]["x"].append(2)
    first.info["c"].add(2)
    first.info["d"] += 1
    for other in (second.info, info):
        assert (dict(other["a"]), other["b"]["x"], other["c"], other["d"].tolist()) == ({}, [1], {1}, [0, 0])
    assert type(first.info["a"]) is defaultdict
    deep = copy.deepcopy(second)
    deep.info["b"]["x"].append(3)
    assert second.info["b"]["x"] == [1]


def test_replacing_tokens_makes_an_implied_mask_again() -> None:
    record = Experience(tokens=[1, 2, 3])
    assert record.replace(prompt_length=2).action_mask.tolist() == [True]
    assert record.replace(tokens=[1, 2, 3, 4]).action_mask.tolist() == [True] * 3
    truncated = Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[0.0], truncate_status="prompt_truncated")
    assert truncated.replace(truncate_status=None).action_mask.tolist() == [True]
    masked = Experience(tokens=[1, 2, 3], action_mask=[1, 0])
    with pytest.raises(ValueError, match="action_mask: got 2 entries, expected 1"):
        masked.replace(prompt_length=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("eid", "b/t", "eid: got str"),
        ("tokens", None, "tokens: got None"),
        ("tokens", torch.ones(2), "tokens: got a tensor of float32, expected integers"),
        ("prompt_length", None, "prompt_length: got None"),
        ("prompt_length", 99, "prompt_length: got 99"),
        ("custom_fields", [1], "CustomField: got 1"),
        ("advantages", np.array([1.0, 2.0]), "advantages: got 2 entries, expected 1"),
        ("advantages", torch.ones(1, dtype=torch.complex64), "advantages: got a tensor of complex64"),
        ("info", [1], "info: got list"),
        ("reward", "x", "reward: got str 'x', expected a number"),
        ("experience_type", "zz", "experience_type: got 'zz'"),
        ("group_size", 0, "group_size: got 0"),
    ],
)
@pytest.mark.parametrize("write", [Experiences, Experience.serialize_many, to_trxp])
def test_what_is_assigned_is_checked_before_it_is_written(write: Any, name: str, value: Any, message: str) -> None:
    record = Experience(tokens=[1, 2])
    setattr(record, name, value)
    for rows in ([record], [Experience(tokens=[1, 2]), record]):
        with pytest.raises(ValueError, match=f"^record {len(rows) - 1}: {message}"):
            write(rows)


def test_what_is_assigned_is_converted_when_records_are_collected() -> None:
    values: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "eid": {"batch": 1, "suffix": "a"},
        "reward": torch.tensor(1.0),
        "advantages": (1.0, 2.0),
        "returns": np.ones(2),
        "policy_versions": np.int64(3),
        "prompt_length": np.int64(1),
        "multi_modal_inputs": {"pixel_values": [[0.5]]},
        "custom_fields": [{"source_field": "a", "destination_field": "b", "data_type": "int32"}],
        "info": None,
    }
    record, untouched = Experience(tokens=[4, 5, 6]), Experience(tokens=[7, 8])
    for name, value in values.items():
        setattr(record, name, value)
    expected = [untouched, Experience(**values)]
    for rows in (
        Experiences([untouched, record]),
        Experience.deserialize_many(Experience.serialize_many([untouched, record])),
        Experience.deserialize_many(to_trxp([untouched, record])),
    ):
        assert list(rows) == expected
    assert record.reward is values["reward"] and record.tokens is values["tokens"], "the record is left alone"


@pytest.mark.parametrize("data", [5, "text", None, [b"x"]])
def test_only_bytes_are_deserialized(data: Any) -> None:
    for read in (Experience.deserialize, Experience.deserialize_many):
        with pytest.raises(ValueError, match=f"data: got {type(data).__name__}, expected bytes"):
            read(data)


def test_parts_of_an_id_that_were_set_are_checked_before_they_are_written() -> None:
    record = Experience(tokens=[1, 2])
    record.eid.task = np.int64(5)  # type: ignore[assignment]
    assert type(Experience.deserialize(record.serialize()).eid.task) is int
    for bad in (None, 1.5):
        record.eid.batch = bad  # type: ignore[assignment]
        with pytest.raises(ValueError, match="EID.batch"):
            record.serialize()


def test_equality_of_what_has_no_values() -> None:
    meta = Experience(tokens=torch.ones(2, dtype=torch.int32, device="meta"), eid=EID(suffix="x"))
    assert meta != Experience(tokens=[1, 1], eid=EID(suffix="x"))
    sparse = Experience(tokens=[1, 2], info={"s": torch.eye(2).to_sparse()}, eid=EID(suffix="x"))
    assert sparse == Experience(tokens=[1, 2], info={"s": torch.eye(2).to_sparse()}, eid=EID(suffix="x"))
