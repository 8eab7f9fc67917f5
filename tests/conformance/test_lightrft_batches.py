"""What LightRFT was seen to do with batches, case by case; where that was judged wrong, what is right, and why.

`lightrft.json` holds executed inputs and outputs. A `conform` case is reproduced: values, types, shapes. A `defect` or
`partial` case is done as its `better` says; where that is said in words, `BETTER` has it as data. An `error` case
raises `ValueError`, which is an `AssertionError` too where that was upstream's. A further case of a target below runs
as soon as it stands in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.compat.lightrft.maker import Experience, ExperienceVL, Samples
from rollbook.compat.lightrft.replay_buffer import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)

DATA = json.loads((Path(__file__).parent / "lightrft.json").read_text())
ALL: dict[str, dict[str, Any]] = {case["id"]: case for case in DATA["cases"]}

WHY_DIFFERENT = {
    "unpad_doc_example_is_wrong": "padding is what is not attended, not a count of zeros in the action mask",
    "unpad_interior_mask_zero_drops_last_action": "a masked slot within the response is no padding behind it",
    "unpad_all_zero_action_mask": "a response whose mask is all False is attended, and keeps its tokens",
    "split_text_items": "nothing is dropped (kl, labels, references), and dicts are split by sample",
    "roundtrip_split_unpad_batch": "nothing is dropped, types survive, vectors and dicts are collated again",
    "batch_packed_format": "action_entropy is ragged like every other per-token field",
    "split_info_0d_tensor": "one number for the whole batch is every sample's",
    "is_vl_text_only_ExperienceVL": "a batch without media is not one of vision, whatever made it",
    "vl_resplit_raises": "a batch knows how many images each of its samples has",
}


# --- the cases' notation --------------------------------------------------------------------------------------------


def decode(value: Any) -> Any:
    """A value of the cases as what it stands for."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    if "__tensor__" in value:
        return torch.tensor(decode(value["data"]), dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    return {key: decode(item) for key, item in value.items()}


def tensor(data: Any, dtype: str = "float32") -> dict[str, Any]:
    """A tensor as the cases write it."""
    built = torch.tensor(data, dtype=getattr(torch, dtype))
    return {"__tensor__": True, "dtype": dtype, "shape": list(built.shape), "data": data}


def agree(actual: Any, expected: Any, place: str = "result") -> None:
    """`actual` is what the cases say: of an object the fields they name, of a tensor type, shape and every value."""
    if isinstance(expected, dict) and "__tensor__" in expected:
        reference = decode(expected)
        assert isinstance(actual, torch.Tensor), f"{place}: {actual!r}"
        assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape), f"{place}: {actual!r}"
        assert torch.equal(torch.nan_to_num(actual, nan=1234.5), torch.nan_to_num(reference, nan=1234.5)), (
            f"{place}: {actual!r}"
        )
    elif isinstance(expected, dict) and not isinstance(actual, dict):
        for name, value in expected.items():
            agree(getattr(actual, name), value, f"{place}.{name}")
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), place
        for key, value in expected.items():
            agree(actual[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, list) and isinstance(actual, torch.Tensor):
        assert actual.tolist() == expected, f"{place}: a tensor that equals the list"
    elif isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), f"{place}: {actual!r}"
        for i, (actual_part, expected_part) in enumerate(zip(actual, expected, strict=True)):
            agree(actual_part, expected_part, f"{place}[{i}]")
    else:
        assert type(actual) is type(expected) and actual == expected, f"{place}: {actual!r}, expected {expected!r}"


def experience(inputs: dict[str, Any], make: Callable[..., Any] = Experience) -> Any:
    """The batch of a case; what it leaves out is `None`, the tokens of a case that is not about them are ones."""
    if isinstance(inputs.get("experience"), str):
        named = re.fullmatch(r"same as (\w+)", inputs["experience"])
        assert named, inputs
        return experience(ALL[named[1]]["inputs"])
    names = "sequences action_log_probs base_action_log_probs values returns advantages attention_mask action_mask info"
    return make(**dict.fromkeys(names.split()) | {"sequences": torch.ones(2, 3, dtype=torch.int64)} | decode(inputs))


# --- what each target does ------------------------------------------------------------------------------------------

_RECIPE = {
    "action_log_probs": -1.0,
    "base_action_log_probs": -2.0,
    "values": 0.1,
    "returns": 0.2,
    "advantages": 0.3,
    "action_entropy": 0.5,
}


def padded_item(inputs: dict[str, Any]) -> BufferItem:
    """An item of which a case gives tokens and masks, and says in words that the rest is a multiple of 1 to A."""
    columns = {
        name: torch.tensor(value) if isinstance(value, list) else decode(value)
        for name, value in inputs.items()
        if name != "others"
    }
    if "others" in inputs:
        counted = torch.arange(1, len(columns["action_mask"]) + 1, dtype=torch.float32)
        columns |= {name: counted * scale for name, scale in _RECIPE.items()}
    return BufferItem(**{"info": {}} | columns)


def run_unpad(inputs: dict[str, Any]) -> Any:
    if "items" in inputs:
        return remove_padding_in_sequences([padded_item(item) for item in inputs["items"]])
    return remove_padding_in_sequences([padded_item(inputs)])[0]


def run_round_trip(inputs: dict[str, Any]) -> Any:
    return make_experience_batch(remove_padding_in_sequences(split_experience_batch(experience(inputs))))


def run_packed(inputs: dict[str, Any]) -> Any:
    assert inputs == {"items": "from roundtrip case"}
    items = remove_padding_in_sequences(
        split_experience_batch(experience(ALL["roundtrip_split_unpad_batch"]["inputs"]))
    )
    return make_experience_batch(items, packing_samples=True)


def run_is_vl(inputs: dict[str, Any]) -> bool:
    assert inputs == {"experience": "ExperienceVL(sequences=[[1]]) without any image"}
    return is_vl_experience(ExperienceVL(torch.tensor([[1]])))


def run_split_vl(inputs: dict[str, Any]) -> Any:
    rows, width = map(int, re.fullmatch(r"arange\((\d+)\*(\d+)\)\.reshape\(\1,\2\)", inputs["pixel_values"]).groups())
    counts = inputs["image_num"]
    batch = ExperienceVL(
        torch.ones(len(counts), 3, dtype=torch.int64),
        pixel_values=torch.arange(rows * width, dtype=torch.float32).reshape(rows, width),
        image_grid_thws=torch.tensor(inputs["image_grid_thws"]),
        info={"image_num": counts},
    )
    return split_experience_batch(batch)


def items_with_images(counts: list[int]) -> list[BufferItem]:
    """Items with so many images each, no two images alike, and of different sizes."""
    items, number = [], 0
    for count in counts:
        grids, pixels = [], []
        for _ in range(count):
            number += 1
            grids.append([1, 2, 2 * number])
            pixels.append(torch.full((4 * number, 2), float(number)))
        items.append(
            BufferItemVL(
                torch.arange(1, 4 + number),
                pixel_values=torch.cat(pixels) if pixels else None,
                image_grid_thws=torch.tensor(grids) if grids else None,
                attention_mask=torch.ones(3 + number, dtype=torch.int64),
                info={"image_num": count},
            )
        )
    return items


def run_resplit_vl(inputs: dict[str, Any]) -> Any:
    items = items_with_images(inputs["images per sample"])
    back = remove_padding_in_sequences(split_experience_batch(make_experience_batch(items)))
    return "identical items" if back == items else back


def run_packed_samples(inputs: dict[str, Any]) -> Samples:
    """What a packed batch of the same samples says of itself, in the form of `Samples`."""
    prompts, outputs = inputs["prompts tokens"], inputs["outputs"]
    items = [
        BufferItem(torch.tensor(prompt + output), torch.zeros(len(output)), *[None] * 6, {})
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    batch = make_experience_batch(items, packing_samples=True)
    lengths, responses = batch.cu_seqlens.diff(), batch.action_cu_seqlens.diff()
    number = torch.arange(1, len(items) + 1)
    return Samples(
        sequences=batch.sequences.values.unsqueeze(0),
        attention_mask=torch.repeat_interleave(number, lengths).unsqueeze(0),
        action_mask=None,
        num_actions=responses.tolist(),
        packed_seq_lens=lengths.tolist(),
        response_length=responses.float(),
        total_length=lengths.float(),
        prompts=None,
        labels=None,
        pad_len=None,
    )


TARGETS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "zero_pad_sequences": lambda inputs: zero_pad_sequences(**decode(inputs)),
    "remove_padding_in_sequences": run_unpad,
    "split_experience_batch": lambda inputs: split_experience_batch(experience(inputs)),
    "split+remove_padding+make_experience_batch": run_round_trip,
    "make_experience_batch(packing_samples=True)": run_packed,
    "is_vl_experience": run_is_vl,
    "split_experience_batch(VL)": run_split_vl,
    "split(make_batch(VL))": run_resplit_vl,
    "FastExperienceMaker._build_packed_sample": run_packed_samples,
}
CASES = {name: case for name, case in ALL.items() if case["target"] in TARGETS}


# --- what is better, as data ----------------------------------------------------------------------------------------


def counted(first: int, last: int) -> dict[str, Any]:
    """The action tensors of an unpadding case, slots `first` to `last` (counted from 1)."""
    numbers = torch.arange(first, last + 1, dtype=torch.float32)
    return {name: tensor((numbers * scale).tolist()) for name, scale in _RECIPE.items()}


def split_text_items(upstream: Any) -> Any:
    inputs = ALL["split_text_items"]["inputs"]
    for i, item in enumerate(upstream):
        item["info"]["reward_metrics"] = {"format_reward": [1.0, 0.0][i]}
        item |= {"labels": f"l{i}", "references": f"r{i}", "kl": tensor(inputs["kl"]["data"][i])}
    return upstream


def roundtrip_split_unpad_batch(upstream: Any) -> Any:
    info = upstream["info"] | {
        "reward": tensor([1.0, 2.0], "float64"),
        "count": tensor([1, 2], "int32"),
        "vec": tensor([[1.0, 2.0], [3.0, 4.0]]),
        "reward_metrics": {"format_reward": tensor([1.0, 0.0])},
    }
    kl = tensor([[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    return upstream | {"info": info, "kl": kl, "labels": ["l0", "l1"], "references": ["r0", "r1"]}


def batch_packed_format(upstream: Any) -> Any:
    rows = upstream["action_entropy"]["data"]
    return upstream | {"action_entropy": [tensor(rows[0][1:]), tensor(rows[1])]}


BETTER: dict[str, Callable[[Any], Any]] = {
    "unpad_doc_example_is_wrong": lambda _: {
        "sequences": tensor([1, 2, 3], "int64"),
        "attention_mask": tensor([1, 1, 1], "int64"),
        "action_mask": tensor([1, 1, 1], "int64"),
        **counted(3, 5),
    },
    "unpad_interior_mask_zero_drops_last_action": lambda _: {
        "sequences": tensor([5, 6, 7, 2, 8, 2], "int64"),
        "attention_mask": tensor([1] * 6, "int64"),
        "action_mask": tensor([True, True, False, True], "bool"),
        **counted(1, 4),
    },
    "unpad_all_zero_action_mask": lambda _: {
        "sequences": tensor([5, 6, 7, 8, 2], "int64"),
        "attention_mask": tensor([1] * 5, "int64"),
        "action_mask": tensor([False] * 3, "bool"),
        **counted(1, 3),
    },
    "split_text_items": split_text_items,
    "roundtrip_split_unpad_batch": roundtrip_split_unpad_batch,
    "batch_packed_format": batch_packed_format,
    "split_info_0d_tensor": lambda _: [{"info": {"s": 1.0}}, {"info": {"s": 1.0}}],
}
"""From what upstream gave to what is right, of cases that say so in words; of the others `better` itself is data."""


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    upstream = json.loads(json.dumps(case["lightrft_output"]))
    run = TARGETS[case["target"]]
    if name in BETTER:
        result = run(case["inputs"])
        agree(result, BETTER[name](upstream))
        if isinstance(case.get("better"), dict):
            agree(result, case["better"])
    elif "better" in case:
        agree(run(case["inputs"]), case["better"])
    elif case["kind"] == "error":
        with pytest.raises(ValueError) as caught:
            run(case["inputs"])
        assert str(caught.value)
        if upstream["__raises__"] == "AssertionError":
            assert isinstance(caught.value, AssertionError), "both, for those who catch what upstream documents"
    else:
        assert case["kind"] == "conform"
        agree(run(case["inputs"]), upstream)


def test_every_difference_has_its_reason() -> None:
    different = {name for name, case in CASES.items() if "better" in case or name in BETTER}
    assert different == set(WHY_DIFFERENT)
    assert {case["target"] for case in CASES.values()} == set(TARGETS), "no target is without a case"


def test_unpadding_leaves_its_argument_alone() -> None:
    item = padded_item(ALL["unpad_left_and_right"]["inputs"])
    before = padded_item(ALL["unpad_left_and_right"]["inputs"])
    (bare,) = remove_padding_in_sequences([item])
    bare.sequences.fill_(99)
    assert item == before


@pytest.mark.parametrize(
    "counts", [[2, 1], torch.tensor([2, 1]), torch.tensor([2.0, 1.0])], ids=["list", "int tensor", "float tensor"]
)
def test_image_counts_of_any_kind(counts: Any) -> None:
    """Upstream documents `image_num` as a tensor of floats, and failed on one."""
    case = ALL["vl_split_multi_image"]
    agree(run_split_vl(case["inputs"] | {"image_num": counts}), case["lightrft_output"])


@pytest.mark.parametrize("counts", [[2, 1], [2, 0], [0, 2], [1, 1], [0, 0], [3, 0, 1, 2]], ids=str)
def test_images_stay_with_their_samples(counts: list[int]) -> None:
    """Upstream gave a text sample the other's second image ([2, 0]); the counts need not be in `info`."""
    items = items_with_images(counts)
    for item in items:
        item.info.pop("image_num")
    for packing in (False, True):
        batch = make_experience_batch(items, packing)
        assert remove_padding_in_sequences(split_experience_batch(batch)) == items
        assert is_vl_experience(batch) == bool(sum(counts))
        if sum(counts):  # as upstream documents, and does not do
            assert batch.info["image_num"].tolist() == counts
            assert batch.pad().pack().info["image_num"].tolist() == counts
    assert [is_vl_experience(item) for item in items] == [count > 0 for count in counts]


def test_split_items_own_their_storage() -> None:
    batch = experience(ALL["split_text_items"]["inputs"])
    items = split_experience_batch(batch)
    batch.sequences.zero_()
    batch.kl.zero_()
    batch.info["reward_metrics"]["format_reward"].zero_()
    agree(items, split_text_items(json.loads(json.dumps(ALL["split_text_items"]["lightrft_output"]))))
