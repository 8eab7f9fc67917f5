"""Payloads written by Trinity-RFT releases from 0.1.1 on, and Rollbook's TRXP read by the released package itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import peers
from rollbook.core.experience import CustomField, Experience
from rollbook.core.wire import to_trxp

DATA = json.loads((Path(__file__).parent / "legacy.json").read_text())
PAYLOADS = {item["id"]: item for item in DATA["legacy"] + DATA["trxp"]}


def plain(value: Any) -> Any:
    """A value as the data writes it: tensors and arrays as dicts, numbers that JSON lacks as text."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(value.shape), "data": plain(value.tolist())}
    if isinstance(value, np.ndarray):
        return {"numpy": value.dtype.name, "shape": list(value.shape), "data": value.tolist()}
    if isinstance(value, np.generic):
        return {"numpy": value.dtype.name, "data": value.item()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, CustomField):
        return value.to_dict()
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def before_eids(expected: dict[str, Any]) -> dict[str, Any]:
    """What a record of 0.2.0 or earlier is here: log-probs and masks lose the part that spoke of the prompt."""
    prompt, length = expected["prompt_length"], expected["tokens"]["shape"][0]
    result = {}
    for name, value in expected.items():
        if isinstance(value, dict) and value.get("shape") == [length] and name in ("logprobs", "action_mask"):
            value = {"dtype": value["dtype"], "shape": [length - prompt], "data": value["data"][prompt:]}
        result[name] = value
    if result["action_mask"] is None and result["chosen"] is None:
        result["action_mask"] = {"dtype": "bool", "shape": [length - prompt], "data": [True] * (length - prompt)}
    return {name: ({} if name in ("info", "metrics") and value is None else value) for name, value in result.items()}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payload(name: str) -> None:
    payload = PAYLOADS[name]
    records = Experience.deserialize_many(base64.b64decode(payload["payload_b64"]))
    assert len(records) == len(payload["expected"])
    for record, expected in zip(records, payload["expected"], strict=True):
        if "eid" not in expected:
            expected = before_eids(expected)
        left_over = {}
        for field, value in expected.items():
            if field in ("group_id", "unique_id", "run_id", "chosen_text", "rejected_text"):
                left_over[field] = value
            elif field == "eid":
                assert record.eid.to_dict() == value
            elif field == "info":
                for key, item in value.items():
                    assert plain(record.info[key]) == item
            else:
                assert plain(getattr(record, field)) == value, field
        for field in ("chosen_text", "rejected_text"):
            if left_over.get(field):
                assert record.info[field] == left_over[field], "what has no field of its own here is kept in info"
    assert Experience.deserialize_many(Experience.serialize_many(records)) == records


@pytest.mark.downloads
def test_trinity_reads_what_rollbook_writes() -> None:
    """The released wheel, installed by pip when this runs, reads our TRXP: fields, types and kind."""
    trinity = peers.trinity()
    records = [
        Experience(
            eid={"batch": 1, "task": "t", "run": 2, "step": 3},
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            logprobs=torch.tensor([-0.5, -0.25], dtype=torch.bfloat16),
            reward=float("nan"),
            info={"model_version": 3, "nested": {"t": torch.ones(2)}},
            metrics={"m": 0.5},
            prompt_text="p \N{GRINNING FACE}",
            custom_fields=[CustomField("model_version", "version", torch.int32)],
            multi_modal_inputs={"pixel_values": torch.ones(2, 3)},
            policy_versions=[3, 3],
            sampling={"temperature": 0.7},
        ),
        Experience(tokens=[1, 2, 3], action_mask=[1, 0], messages=[{"role": "user", "content": "hi"}], tools=[]),
        Experience(tokens=[1, 2], chosen=[3], rejected=[4, 5], chosen_messages=[{"role": "assistant"}]),
        Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[0.0], truncate_status="prompt_truncated"),
        Experience(tokens=[1, 2, 3], routed_experts=torch.full((2, 2, 2), 300, dtype=torch.int16)),
    ]
    data = to_trxp(records)
    read = trinity.Experience.deserialize_many(data)
    assert [item.experience_type for item in read] == [record.experience_type for record in records]
    names = (
        "tokens prompt_length logprobs action_mask truncate_status metrics prompt_text messages tools chosen rejected"
    )
    for item, record in zip(read, records, strict=True):
        assert item.eid.uid == record.eid.uid
        for name in [*names.split(), "chosen_messages", "routed_experts"]:
            assert plain(getattr(item, name)) == plain(getattr(record, name)), name
    assert read[0].reward != read[0].reward
    assert read[0].info["nested"]["t"].tolist() == [1.0, 1.0]
    assert read[0].custom_fields[0].data_type == torch.int32
    assert read[0].multi_modal_inputs["pixel_values"].shape == (2, 3)
    back = Experience.deserialize_many(data)
    assert back == records, "and nothing is lost on the way back to us"
    again = Experience.deserialize_many(trinity.Experience.serialize_many(read))
    assert [record.experience_type for record in again] == [record.experience_type for record in records]
