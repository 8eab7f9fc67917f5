"""Batches, items and samples: their signatures, devices, layouts, equality, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollbook import EID, CustomField, Experience, Experiences
from rollbook.algorithms.inputs import read_inputs
from rollbook.batch.device import move_to_device, pin_memory
from rollbook.batch.plan import plan
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.maker import Experience as BatchOfTheMaker
from rollbook.compat.lightrft.maker import ExperienceVL, Samples, Scorer
from rollbook.compat.lightrft.replay_buffer import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)
from rollbook.compat.lightrft.samples import batch_from_samples
from rollbook.core.rows import Rows


def words(text: str) -> list[str]:
    return text.split()


TOKENS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "kl", "action_entropy"]
NOTHING = dict.fromkeys(
    words("sequences action_log_probs base_action_log_probs values returns advantages attention_mask action_mask info")
)


def item(length: int = 3, response: int = 2, **changes: Any) -> BufferItem:
    """An item of tokens 1, 2, ... and log-probs 1, 2, ..., and what is given."""
    defaults = {
        "sequences": torch.arange(1, length + 1),
        "action_log_probs": torch.arange(1.0, response + 1),
        "info": {},
    }
    return BufferItem(**NOTHING | defaults | changes)


def batch_of(**changes: Any) -> ExperienceBatch:
    """A padded batch of two samples, (2, 3) and (2, 2), and what is given."""
    defaults = {"sequences": torch.tensor([[0, 4, 5], [1, 2, 3]]), "action_log_probs": torch.ones(2, 2), "info": {}}
    return ExperienceBatch(**NOTHING | defaults | changes)


def full_items() -> list[BufferItem]:
    """Two items with something in every field."""
    return [
        BufferItem(
            sequences=torch.arange(1, 3 + n),
            **{name: torch.arange(float(n)) + k for k, name in enumerate(TOKENS)},
            attention_mask=torch.ones(2 + n, dtype=torch.int64),
            action_mask=torch.ones(n, dtype=torch.bool),
            info={
                "reward": float(n),
                "vec": torch.ones(2),
                "deep": {"er": {"x": torch.ones(n)}},
                "list": [torch.ones(1)],
            },
            labels=f"label {n}",
            references={"answer": torch.ones(1)},
            eid=EID(task=n, suffix="s"),
            pixel_values=torch.full((4 * n, 2), float(n)),
            image_grid_thws=torch.tensor([[1, 2, 2 * n]]),
            raw_images=[torch.ones(2, 2), None],
            pixel_values_videos=torch.full((8, 2), float(n)),
            video_grid_thws=torch.tensor([[2, 2, 2]]),
            media={"sound": torch.ones(n, 3)},
            extras={"loss_weights": torch.ones(n), "routed_experts": torch.ones(n, 2, 2, dtype=torch.int16)},
        )
        for n in (1, 2)
    ]


def tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in any nest, and where it is."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from tensors_in(element, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        if isinstance(value, Rows):
            yield f"{place}.values", value.values
        for i, element in enumerate(value):
            yield from tensors_in(element, f"{place}[{i}]")


# --- signatures -----------------------------------------------------------------------------------------------------

BATCH_ORDER = words("""
sequences action_log_probs base_action_log_probs values returns advantages attention_mask action_mask
info kl action_entropy labels references""")
BATCH_VL_ORDER = words("""
sequences pixel_values image_grid_thws raw_images pixel_values_videos video_grid_thws
action_log_probs base_action_log_probs values returns advantages attention_mask action_mask info kl action_entropy
labels references""")
ITEM_ORDER = words("""
sequences action_log_probs base_action_log_probs values returns advantages attention_mask action_mask
info action_entropy labels references kl eid""")
ITEM_VL_ORDER = words("""
sequences pixel_values image_grid_thws pixel_values_videos video_grid_thws raw_images
action_log_probs base_action_log_probs values returns advantages attention_mask action_mask info action_entropy""")
SAMPLES_ORDER = words("""
sequences attention_mask action_mask num_actions packed_seq_lens response_length total_length prompts
labels pad_len references""")


@pytest.mark.parametrize(
    ("make", "order", "required", "kind"),
    [
        (BatchOfTheMaker, BATCH_ORDER, 9, ExperienceBatch),
        (ExperienceVL, BATCH_VL_ORDER, 1, ExperienceBatch),
        (BufferItem, ITEM_ORDER, 9, BufferItem),
        (BufferItemVL, ITEM_VL_ORDER, 1, BufferItem),
        (Samples, SAMPLES_ORDER, 9, Samples),
    ],
    ids=["Experience", "ExperienceVL", "BufferItem", "BufferItemVL", "Samples"],
)
def test_signature(make: Any, order: list[str], required: int, kind: type) -> None:
    """In this order by position, by name, and `None` where it may be left out."""
    values = {name: f"the {name}" for name in order}
    for built in (make(*values.values()), make(**values)):
        assert type(built) is kind
        assert isinstance(built, make)
        assert {name: getattr(built, name) for name in order} == values
    least = make(*list(values.values())[:required])
    assert [getattr(least, name) for name in order[required:]] == [None] * (len(order) - required)
    with pytest.raises(TypeError):
        make(*list(values.values())[: required - 1])
    with pytest.raises(TypeError, match="no_such_field"):
        make(**values, no_such_field=1)
    with pytest.raises(TypeError):
        make(*values.values(), **{order[0]: 1})


def test_the_vision_classes_are_constructors_of_the_same_class() -> None:
    batch = ExperienceVL(torch.tensor([[1, 2]]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))
    assert batch == ExperienceBatch(
        **NOTHING | {"sequences": torch.tensor([[1, 2]])},
        pixel_values=torch.zeros(4, 6),
        image_grid_thws=torch.tensor([[1, 2, 2]]),
    )
    assert isinstance(batch_of(), ExperienceVL) and not isinstance(item(), ExperienceVL)
    assert isinstance(item(), BufferItemVL) and not isinstance(batch_of(), BufferItemVL)
    assert dataclasses.fields(ExperienceVL) == dataclasses.fields(ExperienceBatch)


class TaggedBatch(ExperienceVL):  # type: ignore[misc, valid-type]
    tag = "kept"


class CountedItem(BufferItemVL):  # type: ignore[misc, valid-type]
    def __init__(self, *arguments: Any, count: int, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.count = count


def test_subclasses_of_the_vision_classes_are_built_as_such() -> None:
    tokens, pixels, grid = torch.tensor([[1, 2]]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]])
    batch = TaggedBatch(tokens, pixels, grid, info={"reward": torch.ones(1)})
    assert type(batch) is TaggedBatch and batch.tag == "kept" and batch.advantages is None
    assert batch.pixel_values is pixels and batch.image_grid_thws is grid
    assert type(dataclasses.replace(batch)) is type(copy.deepcopy(batch)) is type(batch.to_device("cpu")) is TaggedBatch
    assert isinstance(batch, ExperienceVL) and not isinstance(batch_of(), TaggedBatch)
    counted = CountedItem(tokens[0], pixels, image_grid_thws=grid, count=3)
    assert type(counted) is CountedItem and counted.count == 3 and counted.pixel_values is pixels
    (split,) = split_experience_batch(batch)
    assert type(split) is BufferItem


def test_grids_in_a_list_are_split_to_rows() -> None:
    """One image of each sample, its grid with or without the axis of images."""
    for grids in ([torch.tensor([1, 2, 2])] * 2, [torch.tensor([[1, 2, 2]])] * 2, torch.tensor([[1, 2, 2]] * 2)):
        batch = ExperienceVL(torch.ones(2, 3).long(), torch.zeros(8, 6), grids, info={})
        assert [item.image_grid_thws.tolist() for item in split_experience_batch(batch)] == [[[1, 2, 2]]] * 2


def test_samples_keep_lengths_as_tensors() -> None:
    packed = Samples(None, None, None, [2, 3], [4, 5], None, None, None, None, None)
    for lengths, expected in ((packed.num_actions, [2, 3]), (packed.packed_seq_lens, [4, 5])):
        assert lengths.dtype == torch.int64 and lengths.shape == (2,)
        assert lengths.tolist() == expected
        assert (lengths == torch.tensor(expected)).all()
    padded = Samples(torch.ones(2, 3), None, None, 2, None, None, None, ["a", "b"], None, None)
    assert (padded.num_actions, padded.packed_seq_lens, padded.references) == (2, None, None)


def test_vision_is_what_carries_media() -> None:
    assert not is_vl_experience(batch_of())
    assert not is_vl_experience(item(raw_images=[]))
    assert not is_vl_experience(item(raw_images=[None]))
    assert not is_vl_experience(ExperienceVL(torch.ones(2, 3), pixel_values=torch.zeros(0, 4), raw_images=[[], []]))
    for name, value in {
        "pixel_values": torch.zeros(4, 6),
        "image_grid_thws": torch.ones(1, 3),
        "pixel_values_videos": torch.zeros(4, 6),
        "video_grid_thws": torch.ones(1, 3),
        "raw_images": ["a path"],
        "media": {"sound": torch.zeros(1)},
    }.items():
        assert is_vl_experience(item(**{name: value})), name
        batch = batch_of()
        assert not batch.may_have_media
        setattr(batch, name, value)
        copies = copy.copy(batch), copy.deepcopy(batch), dataclasses.replace(batch), pickle.loads(pickle.dumps(batch))
        assert all(map(is_vl_experience, (batch_of(**{name: value}), batch, *copies))), name
        setattr(batch, name, None)
        assert not is_vl_experience(batch), name
    assert is_vl_experience(make_experience_batch([item(raw_images=["a path"])]))


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_to_device_reaches_every_tensor_of_a_batch(packing: bool) -> None:
    batch = make_experience_batch(full_items(), packing)
    before = [place for place, _ in tensors_in(batch)]
    for name in (*TOKENS, "sequences", "attention_mask", "action_mask", "pixel_values", "image_grid_thws"):
        assert any(place.startswith(f".{name}") for place in before), name
    assert {".info['reward']", ".info['deep']['er']['x'][0]", ".media['sound'][0]"} <= set(before)
    assert {".references[0]['answer']", ".raw_images[0][0]"} <= set(before)
    assert batch.to_device("meta") is batch
    after = dict(tensors_in(batch))
    assert list(after) == before
    assert [place for place, tensor in after.items() if not tensor.is_meta] == []
    assert batch.labels == ["label 1", "label 2"]
    assert isinstance(batch.sequences, Rows) == packing


def test_to_device_reaches_every_tensor_of_items_and_samples() -> None:
    split = split_experience_batch(make_experience_batch(full_items()), unpad=True)
    samples = Samples(
        torch.ones(1, 5), torch.ones(1, 5), None, [1, 2], [2, 3], torch.ones(2), torch.ones(2), None, None, 0
    )
    for holder in (*full_items(), *split, samples):
        before = [place for place, _ in tensors_in(holder)]
        assert len(before) >= 6
        assert holder.to_device("meta") is holder
        after = dict(tensors_in(holder))
        assert list(after) == before
        assert all(tensor.is_meta for tensor in after.values())
    assert split[0].info["reward"] == 1.0


@pytest.mark.filterwarnings("ignore:pin_memory")
def test_nothing_to_move_is_fine() -> None:
    empty = ExperienceBatch(**NOTHING)
    assert empty.to_device("meta") is empty
    assert empty.pin_memory() is empty
    assert BufferItem(**NOTHING).to_device("meta").sequences is None
    assert Samples(*[None] * 10).to_device("meta").sequences is None


@pytest.mark.filterwarnings("ignore:pin_memory")
def test_moving_forgets_nothing() -> None:
    items = [item(advantages=torch.ones(2)), item(2, 1, info={"tag": "a"})]
    batch = make_experience_batch(items).to_device("cpu").pin_memory()
    assert split_experience_batch(batch, unpad=True) == items


def test_to() -> None:
    Pair = namedtuple("Pair", "a b")
    tensor = torch.ones(1)
    moved = move_to_device(
        [tensor, None, {"a": (tensor, "b", 3)}, Pair(tensor, 1), Rows(torch.ones(3), [1, 2])], "meta"
    )
    assert moved[0].is_meta and moved[1] is None
    assert moved[2]["a"][0].is_meta and moved[2]["a"][1:] == ("b", 3)
    assert type(moved[3]) is Pair and moved[3].a.is_meta and moved[3].b == 1
    assert isinstance(moved[4], Rows) and moved[4].values.is_meta and [row.is_meta for row in moved[4]] == [True] * 2
    assert move_to_device(None, "meta") is None
    assert move_to_device("text", "meta") == "text"
    assert tensor.device.type == "cpu", "what was given stays where it is"


def test_pin_memory_without_an_accelerator_says_so_once() -> None:
    """In a process of its own, where nobody has been told yet."""
    code = """
import warnings, torch
torch.accelerator.is_available = lambda: False
from rollbook.batch.device import pin_memory
from rollbook.compat.lightrft.batch import ExperienceBatch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    one, batch = torch.ones(1), ExperienceBatch(torch.ones(1, 2), torch.ones(1, 1), *[None] * 7)
    tensor = batch.sequences
    assert pin_memory([one, None])[0] is one and pin_memory(None) is None
    assert batch.pin_memory() is batch and batch.sequences is tensor
    pin_memory(one)
print(len(caught), "accelerator" in str(caught[0].message))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]


def test_pinning_reaches_what_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    assert pin_memory([torch.zeros(1), None, {"a": torch.zeros(1)}])[2]["a"].item() == 1
    batch = make_experience_batch(full_items(), packing_samples=True)
    before = {place: tensor.clone() for place, tensor in tensors_in(batch)}
    batch.pin_memory()
    for place, tensor in tensors_in(batch):
        assert torch.equal(tensor, before[place] + 1), place
    meta = torch.zeros(1, device="meta")
    assert pin_memory(meta) is meta, "what is on a device cannot be pinned"


# --- fields that are assigned ---------------------------------------------------------------------------------------


def test_assigning_a_field_makes_it_that_of_every_sample() -> None:
    batch = make_experience_batch([item(advantages=torch.ones(2).double()), item(), item(advantages=torch.ones(2))])
    batch.advantages = torch.arange(6.0).reshape(3, 2)
    advantages = [sample.advantages for sample in split_experience_batch(batch, unpad=True)]
    assert [row.tolist() for row in advantages] == [[0, 1], [2, 3], [4, 5]]
    assert {row.dtype for row in advantages} == {torch.float32}, "types of what was there before are forgotten, too"


def test_assigning_info_and_media() -> None:
    batch = make_experience_batch(
        [
            item(info={"a": 1}, pixel_values=torch.ones(4, 2), image_grid_thws=torch.tensor([[1, 2, 2]])),
            item(info={}),
        ]
    )
    batch.info = {"a": [None, None]}
    batch.image_grid_thws = torch.tensor([[1, 1, 2], [1, 1, 2]])
    batch.pixel_values = torch.arange(8.0).reshape(4, 2)
    split = split_experience_batch(batch, unpad=True)
    assert [sample.info for sample in split] == [{"a": None}, {"a": None}]
    assert [sample.pixel_values.tolist() for sample in split] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_assigning_leaves_other_fields_and_other_batches_alone() -> None:
    items = [item(advantages=torch.ones(2), values=torch.ones(2)), item(info={"tag": "a"})]
    batch = make_experience_batch(items)
    split = split_experience_batch(batch, unpad=True)
    others = [copy.copy(batch), copy.deepcopy(batch), dataclasses.replace(batch), pickle.loads(pickle.dumps(batch))]
    batch.advantages = torch.zeros(2, 2)
    batch.info = {}
    assert split_experience_batch(batch, unpad=True)[1].values is None
    assert split == items, "items that were split before stay what they were"
    for other in others:
        assert split_experience_batch(other, unpad=True) == items
    others[0].values = torch.zeros(2, 2)
    assert split_experience_batch(batch, unpad=True)[1].values is None


def test_replacing_a_field_is_assigning_it_to_a_copy() -> None:
    items = [item(advantages=torch.ones(2), values=torch.ones(2)), item()]
    batch = make_experience_batch(items)
    other = dataclasses.replace(batch, advantages=torch.full((2, 2), 5.0))
    assert [sample.advantages.tolist() for sample in split_experience_batch(other, unpad=True)] == [[5, 5], [5, 5]]
    assert split_experience_batch(other, unpad=True)[1].values is None
    assert split_experience_batch(batch, unpad=True) == items


def test_an_item_can_be_changed_before_it_is_batched() -> None:
    split = split_experience_batch(make_experience_batch([item(values=torch.ones(2)), item(2, 1)]), unpad=True)
    split[0].advantages = torch.tensor([5.0, 6.0])
    split[1].labels = "x"
    split[1].info["reward"] = 2.0
    split[0].extras = {"loss_weights": torch.tensor([0.5, 0.25])}
    batch = make_experience_batch(split)
    assert batch.advantages.tolist() == [[5, 6], [0, 0]]
    assert batch.labels == [None, "x"]
    assert batch.info == {"reward": [None, 2.0]}
    assert batch.extras["loss_weights"].tolist() == [[0.5, 0.25], [0, 0]]
    assert split_experience_batch(batch, unpad=True) == split
    split[0].sequences = torch.tensor([7, 7, 7, 7])
    assert make_experience_batch(split).sequences.tolist() == [[7, 7, 7, 7], [0, 0, 1, 2]]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_read_as_a_list_of_views() -> None:
    rows = Rows(torch.arange(6), [2, 0, 4])
    assert isinstance(rows, list) and len(rows) == 3
    assert [row.tolist() for row in rows] == [[0, 1], [], [2, 3, 4, 5]]
    assert rows[-1].tolist() == [2, 3, 4, 5]
    assert rows.cu_seqlens.tolist() == [0, 2, 2, 6] and rows.cu_seqlens.dtype == torch.int32
    rows[2][0] = 9
    assert rows.values.tolist() == [0, 1, 9, 3, 4, 5], "a row is a view of the values"
    rows.values[0] = 8
    assert rows[0].tolist() == [8, 1]
    rows[0] = torch.tensor([5, 6])
    assert rows.values[:2].tolist() == [5, 6] and rows[0].tolist() == [5, 6]
    assert [len(row) for row in Rows(torch.ones(3, 2), [1, 2])] == [1, 2]
    assert list(Rows(torch.empty(0), [])) == []


def test_rows_refuse_to_fall_apart() -> None:
    rows = Rows(torch.arange(5), [2, 3])
    before = [row.tolist() for row in rows]
    changes: list[Callable[[], Any]] = [
        lambda: rows.append(torch.ones(1)),
        lambda: rows.extend([torch.ones(1)]),
        lambda: rows.insert(0, torch.ones(1)),
        lambda: rows.pop(),
        lambda: rows.remove(rows[0]),
        lambda: rows.clear(),
        lambda: rows.sort(),
        lambda: rows.reverse(),
        lambda: rows.__delitem__(0),
        lambda: rows.__iadd__([torch.ones(1)]),
        lambda: rows.__imul__(2),
        lambda: rows.__setitem__(slice(0, 1), [torch.ones(2)]),
        lambda: rows.__setitem__(0, torch.ones(3)),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="row"):
            change()
    assert [row.tolist() for row in rows] == before
    with pytest.raises(ValueError, match="got 5.*expected 4"):
        Rows(torch.arange(5), [2, 2])


def test_rows_are_copied_with_their_values() -> None:
    rows = Rows(torch.arange(5), [2, 3])
    for other in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert type(other) is Rows
        other[0][0] = 77
        assert other.values[0] == 77 and rows.values[0] == 0
    shallow = copy.copy(rows)
    assert type(shallow) is Rows and shallow.values is rows.values


# --- layouts --------------------------------------------------------------------------------------------------------


def test_left_and_fresh_layouts() -> None:
    items = [item(5, 1), item(3, 2)]
    left = make_experience_batch(items, pad_token_id=9)
    assert left.sequences.tolist() == [[1, 2, 3, 4, 5], [9, 9, 1, 2, 3]]
    assert left.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert left.action_log_probs.tolist() == [[0, 1], [1, 2]]
    assert left.action_mask.tolist() == [[False, True], [True, True]]
    batch = make_experience_batch(items, pad_token_id=9, layout="prompt_left_response_right")
    assert batch.sequences.tolist() == [[1, 2, 3, 4, 5, 9], [9, 9, 9, 1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert batch.action_log_probs.tolist() == [[1, 0], [1, 2]]
    assert batch.action_mask.tolist() == [[True, False], [True, True]]
    assert left.layout == batch.layout == "padded"
    assert repr(left) == "ExperienceBatch(2 samples, padded, sequences 2x5, actions 2x2)"
    assert left.pad(9, "prompt_left_response_right") == batch
    assert batch.pad(9) == left
    packed = left.pack()
    assert packed == batch.pack() and packed.layout == "packed" and packed.pack() is packed
    assert repr(packed) == "ExperienceBatch(2 samples, packed, 8 tokens)"
    assert packed.pad(9) == left


def test_cu_seqlens_and_position_ids() -> None:
    packed = make_experience_batch([item(3, 2), item(0, 0), item(2, 1)], packing_samples=True)
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 5] and packed.cu_seqlens.dtype == torch.int32
    assert packed.action_cu_seqlens.tolist() == [0, 2, 2, 3] and packed.action_cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.max_seqlen == 3
    # A packed batch whose fields are plain lists, as LightRFT makes them, is as good.
    plain = batch_of(sequences=[torch.arange(3), torch.arange(2)], action_log_probs=[torch.ones(2), torch.ones(1)])
    assert plain.layout == "packed"
    assert plain.cu_seqlens.tolist() == [0, 3, 5] and plain.action_cu_seqlens.tolist() == [0, 2, 3]
    assert plain.position_ids.tolist() == [[0, 1, 2, 0, 1]] and plain.max_seqlen == 3
    assert plain.pad().sequences.tolist() == [[0, 1, 2], [0, 0, 1]]
    bare = make_experience_batch([BufferItemVL(torch.tensor([1, 2]))], packing_samples=True)
    assert bare.action_cu_seqlens.tolist() == [0, 0], "no response-axis field, no slots"
    padded = make_experience_batch([item(3, 2), item(2, 1)])
    assert padded.position_ids.tolist() == [[0, 1, 2], [1, 0, 1]]
    assert padded.max_seqlen == 3
    masked = batch_of(attention_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert masked.position_ids.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert batch_of().position_ids.tolist() == [[0, 1, 2], [0, 1, 2]], "no mask: all is attended"
    for name in ("cu_seqlens", "action_cu_seqlens"):
        with pytest.raises(ValueError, match=f"{name}.*padded"):
            getattr(padded, name)


@pytest.mark.parametrize("sequences", [[], torch.zeros(0, 0, dtype=torch.int64)], ids=["packed", "padded"])
def test_no_samples(sequences: Any) -> None:
    batch = ExperienceVL(sequences, info={})
    assert len(batch) == 0
    assert split_experience_batch(batch) == split_experience_batch(batch, unpad=True) == []
    assert batch.pack().cu_seqlens.tolist() == [0]
    assert batch.pack().position_ids.shape == (1, 0)
    assert batch.pad().sequences.shape == (0, 0)
    assert batch.max_seqlen == 0


def test_model_inputs() -> None:
    grids = torch.tensor([[1, 2, 2]])
    items = [
        item(3, 2, pixel_values=torch.ones(4, 2), image_grid_thws=grids, media={"sound": torch.ones(2, 3)}),
        item(2, 1, media={"sound": torch.zeros(1, 3)}),
    ]
    padded = make_experience_batch(items, pad_token_id=9)
    inputs = padded.model_inputs(config=SimpleNamespace(image_token_id=2))
    assert set(inputs) == {
        "input_ids", "attention_mask", "pixel_values", "image_grid_thw", "sound", "mm_token_type_ids"
    }  # fmt: skip
    assert inputs["input_ids"] is padded.sequences and inputs["attention_mask"] is padded.attention_mask
    assert inputs["image_grid_thw"].tolist() == grids.tolist() and inputs["pixel_values"].shape == (4, 2)
    assert inputs["sound"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    with pytest.raises(ValueError, match="get_rope_index: got None"):
        make_experience_batch(items, packing_samples=True).model_inputs()
    items = [item(3, 2), item(2, 1)]
    assert make_experience_batch(items).model_inputs()["position_ids"].tolist() == [[0, 1, 2], [1, 0, 1]]
    packed = make_experience_batch(items, packing_samples=True).model_inputs()
    assert packed["input_ids"].tolist() == [[1, 2, 3, 1, 2]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["cu_seq_lens_q"].tolist() == packed["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert packed["max_length_q"] == packed["max_length_k"] == 3
    assert "attention_mask" not in packed, "a mask of ones would tell the model that this is one long sample"
    text = make_experience_batch([item(), item()]).model_inputs()
    assert set(text) == {"input_ids", "position_ids"}


def test_a_first_token_without_a_prompt_is_masked() -> None:
    kinds: dict[str, Any] = {"prompt_length": 0, "experience_type": "multi_turn"}
    rows = [
        Experience(tokens=[5, 6, 7], **kinds, action_mask=[True] * 3, reward=1.0),
        Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False], reward=0.0),
        Experience(tokens=[8, 9], **kinds, action_mask=[False, True], reward=0.0),
    ]
    experiences = Experiences(rows)
    expected = [[False, True, True], [True, False], [False, True]]
    padded, packed = from_experiences(experiences), from_experiences(experiences, packing_samples=True)
    assert (
        [row.tolist() for row in packed.action_mask] == [row.tolist() for row in padded.pack().action_mask] == expected
    )
    assert padded.info["response_length"].tolist() == [2, 1, 1]
    assert experiences[0].action_mask.tolist() == [True] * 3  # the record is as it was given
    assert plan(experiences).denominators.tokens == 4
    assert [row.tolist() for row in read_inputs(experiences)["mask"]] == expected
    for packing in (False, True):  # batches that were not made of records
        items = [item(3, 3, action_mask=torch.ones(3, dtype=torch.bool)), item(3, 2)]
        batch = make_experience_batch(items, packing)
        first, second = read_inputs(batch)["mask"]
        assert first.tolist() == [False, True, True] and second[-2:].tolist() == [True, True]
        assert batch.action_mask[0].tolist() == [True] * 3
    shared: Any = (None, None, ["a", "b"], None, None)
    attended, actions = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.ones(2, 2, dtype=torch.bool)
    generated = Samples(torch.tensor([[0, 4, 5], [1, 2, 3]]), attended, actions, 2, None, *shared)
    assert batch_from_samples(generated).action_mask.tolist() == [[False, True], [True, True]]
    generated = Samples(torch.tensor([[4, 5, 1, 2, 3]]), None, None, [2, 2], [2, 3], *shared)
    packed = batch_from_samples(generated)
    assert [row.tolist() for row in packed.action_mask] == [[False, True], [True, True]]
    words = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    scored = Scorer(None, reward_fn=lambda response: 1.0, tokenizer=words).inputs(generated, packed)
    assert [sample.response for sample in scored] == ["4 5", "2 3"]  # what the model wrote


def test_at_actions_takes_what_was_said_one_token_earlier() -> None:
    items = [item(4, 2), item(3, 1), item(2, 0)]
    predicted = [torch.arange(4) + 10, torch.arange(3) + 20, torch.arange(2) + 30]
    packed = make_experience_batch(items, packing_samples=True)
    assert packed.at_actions(torch.cat(predicted).unsqueeze(0)).tolist() == [11, 12, 21]
    wide = torch.cat(predicted).unsqueeze(0).unsqueeze(-1).expand(1, 9, 5)
    assert packed.at_actions(wide).shape == (3, 5)
    left = make_experience_batch(items)
    padded = zero_pad_sequences(predicted)
    taken = left.at_actions(padded)
    assert taken.shape == (3, 2)
    assert taken[left.action_mask].tolist() == [11, 12, 21]
    assert left.at_actions(padded.unsqueeze(-1).expand(3, 4, 5)).shape == (3, 2, 5)
    right_padded = make_experience_batch(items, layout="prompt_left_response_right")
    predictions = torch.zeros(right_padded.sequences.shape, dtype=torch.int64)
    predictions[right_padded.attention_mask.bool()] = torch.cat(predicted)
    assert right_padded.at_actions(predictions)[right_padded.action_mask].tolist() == [11, 12, 21]


def test_at_actions_without_a_prompt() -> None:
    """Of a sample's very first token nothing was said; the other slots are where they should be."""
    items = [item(3, 3), item(2, 2)]
    predicted = [torch.arange(3) + 10, torch.arange(2) + 20]
    packed = make_experience_batch(items, packing_samples=True)
    assert packed.at_actions(torch.cat(predicted).unsqueeze(0)).tolist() == [10, 10, 11, 20, 20]
    left = make_experience_batch(items)
    taken = left.at_actions(zero_pad_sequences(predicted))
    assert taken.shape == (2, 3)
    assert taken[0].tolist() == [10, 10, 11] and taken[1, 2:].tolist() == [20]
    right_padded = make_experience_batch(items, layout="prompt_left_response_right")
    taken = right_padded.at_actions(zero_pad_sequences(predicted, "right"))
    assert taken[0].tolist() == [10, 10, 11] and taken[1, :2].tolist() == [20, 20]
    single = make_experience_batch([item(1, 1)], packing_samples=True)
    assert single.at_actions(torch.tensor([[7]])).tolist() == [7]


def test_at_actions_needs_to_know_where() -> None:
    with pytest.raises(ValueError, match="at_actions.*response"):
        ExperienceVL(torch.ones(1, 2)).at_actions(torch.ones(1, 2))


def test_gradients_flow_through_batching() -> None:
    values = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    for layout in ("left", "prompt_left_response_right"):
        batch = make_experience_batch([item(3, 2, values=values[0]), item(2, 1, values=values[1])], layout=layout)
        batch.values.sum().backward()
    assert values[0].grad.tolist() == [2, 2] and values[1].grad.tolist() == [2]
    assert not split_experience_batch(batch, unpad=True)[0].values.requires_grad


# --- equality, copies -----------------------------------------------------------------------------------------------


def test_equality_is_by_value() -> None:
    assert make_experience_batch(full_items()) == make_experience_batch(full_items())
    assert full_items() == full_items()
    nan = [item(values=torch.tensor([float("nan"), 1.0]), info={"r": float("nan")}) for _ in range(2)]
    assert nan[0] == nan[1]
    assert batch_of() != batch_of(action_log_probs=torch.ones(2, 2, dtype=torch.float64)), "types count"
    assert batch_of() != batch_of(action_log_probs=torch.ones(2, 1)), "shapes count"
    assert item() != item(labels="a")
    assert item() != 3 and batch_of() != item()
    assert make_experience_batch([item(), item(advantages=torch.zeros(2))]) != make_experience_batch(
        [item(advantages=torch.zeros(2)), item(advantages=torch.zeros(2))]
    ), "a sample that lacks a field is not one that has zeros"
    for holder in (batch_of(), item(), Samples(*[None] * 10)):
        with pytest.raises(TypeError):
            hash(holder)


@pytest.mark.parametrize("changed", [name for name in ITEM_ORDER if name not in ("info", "eid")])
def test_equality_sees_every_field(changed: str) -> None:
    first, second = full_items()[0], full_items()[0]
    value = getattr(second, changed)
    setattr(
        second, changed, ~value if changed == "action_mask" else "x" if isinstance(value, (str, dict)) else value + 1
    )
    assert first != second
    assert make_experience_batch([first]) != make_experience_batch([second])


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_copies_are_equal_and_apart(packing: bool) -> None:
    batch = make_experience_batch([*full_items(), item()], packing)
    split = split_experience_batch(batch, unpad=True)
    for holder in (batch, *split, full_items()[0]):
        for other in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
            assert other == holder and type(other) is type(holder)
            other.sequences[0].fill_(77)
            assert other != holder
        assert copy.copy(holder) == dataclasses.replace(holder) == holder
    back = pickle.loads(pickle.dumps(batch))
    assert split_experience_batch(back, unpad=True) == split
    assert back.layout == batch.layout


def test_replace_of_an_item() -> None:
    split = split_experience_batch(make_experience_batch(full_items()), unpad=True)
    other = dataclasses.replace(split[0], labels="new")
    assert other.labels == "new" and split[0].labels == "label 1"
    assert dataclasses.replace(other, labels="label 1") == split[0]


def test_items_show_themselves() -> None:
    shown = repr(item(3, 2, action_mask=torch.tensor([True, False]), info={"reward": 1.0}))
    assert "3 tokens" in shown and "1 actions" in shown and "reward" in shown
    assert "no tokens" in repr(BufferItem(**NOTHING))
    with pytest.raises(AttributeError, match="no_such_field"):
        item().no_such_field  # noqa: B018


# --- what is refused ------------------------------------------------------------------------------------------------

BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no sequences": ({"sequences": None}, "sequences.*None"),
    "sequences 0-d": ({"sequences": torch.tensor(5)}, "sequences"),
    "sequences 1-d": ({"sequences": torch.tensor([1, 2])}, r"sequences.*\[2\]"),
    "sequences 3-d": ({"sequences": torch.ones(2, 3, 1, dtype=torch.int64)}, r"sequences.*\[2, 3, 1\]"),
    "sequences array": ({"sequences": np.ones((2, 3))}, "sequences.*ndarray"),
    "sequences tuple": ({"sequences": (torch.ones(3), torch.ones(3))}, "sequences.*tuple"),
    "sequences of numbers": ({"sequences": [1, 2]}, "sequences"),
    "sequences float": ({"sequences": torch.ones(2, 3)}, "sequences.*float32"),
    "rows": ({"values": torch.ones(3, 2)}, "values: got 3 rows, expected 2"),
    "width": ({"values": torch.ones(2, 1)}, "values: got 1 columns, expected 2"),
    "mask width": ({"attention_mask": torch.ones(2, 2)}, "attention_mask: got 2 columns, expected 3"),
    "field 1-d": ({"returns": torch.ones(2)}, r"returns.*\[2\].*dimension"),
    "field 0-d": ({"returns": torch.tensor(1.0)}, "returns"),
    "field 3-d": ({"kl": torch.ones(2, 2, 1)}, r"kl.*\[2, 2, 1\]"),
    "field a list": ({"values": [torch.ones(2), torch.ones(2)]}, "values.*list.*padded"),
    "field a number": ({"values": 1.0}, "values.*float"),
    "more slots than tokens": ({"action_log_probs": torch.ones(2, 4)}, "action_log_probs: got 4.*at most 3"),
    "extras width": ({"extras": {"w": torch.ones(2, 1)}}, r"extras.w: got 1 columns, expected 2"),
    "extras 1-d": ({"extras": {"w": torch.ones(2)}}, r"extras.w.*\[2\]"),
    "extras a list": ({"extras": [1]}, "extras.*list"),
    "labels": ({"labels": ["a"]}, "labels: got 1.*expected 2"),
    "labels a number": ({"labels": 5}, "labels.*int"),
    "labels a text": ({"labels": "ab"}, "labels.*str"),
    "references": ({"references": ["a", "b", "c"]}, "references: got 3.*expected 2"),
    "ids": ({"ids": []}, "ids: got 0.*expected 2"),
    "raw_images": ({"raw_images": [None]}, "raw_images: got 1.*expected 2"),
    "raw_images a text": ({"raw_images": "ab"}, "raw_images.*str"),
    "media": ({"media": {"sound": [None]}}, "media.*sound.*got 1.*expected 2"),
    "media a list": ({"media": [1]}, "media.*list"),
    "info a list": ({"info": [1, 2]}, "info.*list"),
    "info rows": ({"info": {"reward": torch.ones(3)}}, r"info\['reward'\]: got 3.*expected 2"),
    "deep info rows": ({"info": {"a": {"b": torch.ones(3)}}}, r"info\['a'\]\['b'\]: got 3.*expected 2"),
    "starts too few": ({"action_starts": torch.tensor([0])}, "action_starts.*expected 2"),
    "starts too far": ({"action_starts": torch.tensor([0, 5])}, r"action_starts.*5"),
    "starts negative": ({"action_starts": torch.tensor([0, -1])}, r"action_starts.*-1"),
    "starts halves": ({"action_starts": torch.tensor([0.5, 1])}, "action_starts"),
    "grids unknown": ({"image_grid_thws": torch.ones(3, 3)}, "image_grid_thws: got 3.*image_num"),
    "grids 1-d": ({"image_grid_thws": torch.ones(3)}, "image_grid_thws.*dimension"),
    "image_num a number": ({"image_grid_thws": torch.ones(3, 3), "info": {"image_num": 3}}, "image_num.*3"),
    "image_num text": ({"image_grid_thws": torch.ones(3, 3), "info": {"image_num": ["a", "b"]}}, "image_num"),
    "image_num half": ({"image_grid_thws": torch.ones(3, 3), "info": {"image_num": [1.5, 1.5]}}, "image_num.*1.5"),
    "image_num short": ({"image_grid_thws": torch.ones(3, 3), "info": {"image_num": [3]}}, "image_num"),
    "image_num sum": ({"image_grid_thws": torch.ones(3, 3), "info": {"image_num": [1, 1]}}, "image_grid_thws: got 3"),
    "pixels sum": (
        {"image_grid_thws": torch.ones(2, 3, dtype=torch.int64), "pixel_values": torch.ones(3, 2)},
        "pixel_values: got 3.*expected 2",
    ),
    "pixels unknown": ({"pixel_values": torch.ones(3, 2)}, "pixel_values: got 3.*2 samples"),
}
PACKED = {"sequences": [torch.arange(3), torch.arange(2)], "action_log_probs": [torch.ones(2), torch.ones(1)]}
BAD_PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"values": [torch.ones(2)]}, "values: got 1 rows, expected 2"),
    "lengths": ({"values": [torch.ones(2), torch.ones(2)]}, r"values\[1\]: got 2.*expected 1"),
    "a hole": ({"values": [torch.ones(2), None]}, r"values\[1\].*None"),
    "matrix": ({"values": torch.ones(2, 2)}, "values.*Tensor.*packed"),
    "2-d rows": ({"values": [torch.ones(2, 1), torch.ones(1, 1)]}, r"values\[0\]"),
    "more slots than tokens": ({"action_log_probs": [torch.ones(4), torch.ones(1)]}, "got 4.*at most.* 3"),
    "mask": ({"attention_mask": [torch.ones(2), torch.ones(2)]}, r"attention_mask\[0\]: got 2.*expected 3"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("unpad", [False, True], ids=["split", "unpad"])
def test_a_bad_batch_is_refused(name: str, unpad: bool) -> None:
    changes, message = BAD_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        for sample in split_experience_batch(batch_of(**changes), unpad=unpad):
            sample.detach()


@pytest.mark.parametrize("name", BAD_PACKED)
@pytest.mark.parametrize("use", [split_experience_batch, ExperienceBatch.pad], ids=["split", "pad"])
def test_a_bad_packed_batch_is_refused(name: str, use: Any) -> None:
    changes, message = BAD_PACKED[name]
    with pytest.raises(ValueError, match=message):
        use(batch_of(**PACKED | changes))


BAD_ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "no sequences": ({"sequences": None}, r"items\[1\].sequences.*None"),
    "sequences 2-d": ({"sequences": torch.ones(1, 3, dtype=torch.int64)}, r"items\[1\].sequences.*\[1, 3\]"),
    "sequences a list": ({"sequences": [1, 2, 3]}, r"items\[1\].sequences.*list"),
    "length": ({"values": torch.ones(3)}, r"items\[1\].values: got 3.*expected 2"),
    "mask length": ({"attention_mask": torch.ones(2)}, r"items\[1\].attention_mask: got 2.*expected 3"),
    "0-d": ({"values": torch.tensor(1.0)}, r"items\[1\].values.*\[\]"),
    "2-d": ({"values": torch.ones(2, 1)}, r"items\[1\].values.*\[2, 1\]"),
    "a list": ({"values": [1.0, 2.0]}, r"items\[1\].values.*list"),
    "more slots than tokens": ({"action_log_probs": torch.ones(4)}, r"items\[1\].*got 4.*at most.* 3"),
    "extras length": ({"extras": {"w": torch.ones(3)}}, r"items\[1\].extras.w: got 3.*expected 2"),
    "extras 0-d": ({"extras": {"w": torch.tensor(1.0)}}, r"items\[1\].extras.w"),
    "extras a list": ({"extras": [1]}, r"items\[1\].extras.*list"),
}
BAD_TOGETHER: dict[str, tuple[list[dict[str, Any]], str]] = {
    "types": (
        [{"values": torch.ones(2, dtype=torch.int64)}, {"values": torch.ones(2)}],
        "values.*float32.*int64",
    ),
    "trailing sizes": (
        [{"extras": {"w": torch.ones(2, 1)}}, {"extras": {"w": torch.ones(2, 2)}}],
        r"extras.w.*\[2, 1\].*\[2, 2\]",
    ),
    "dimensions": ([{"extras": {"w": torch.ones(2)}}, {"extras": {"w": torch.ones(2, 2)}}], "extras.w"),
    "pixel widths": (
        [{"pixel_values": torch.ones(2, 1)}, {"pixel_values": torch.ones(2, 2)}],
        r"items\[1\].pixel_values",
    ),
    "pixel types": (
        [{"pixel_values": torch.ones(2, 1)}, {"pixel_values": torch.ones(2, 1).half()}],
        r"items\[1\].pixel_values.*float16.*float32",
    ),
    "pixels a list": ([{"pixel_values": [1]}], r"items\[0\].pixel_values.*list"),
    "grids a list": ([{"image_grid_thws": [[1, 2, 2]]}], r"items\[0\].image_grid_thws.*list"),
    "media a list": ([{"media": [1]}], r"items\[0\].media.*list"),
    "info a list": ([{}, {"info": [1]}], r"items\[1\].info.*list"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_is_refused(name: str) -> None:
    changes, message = BAD_ITEMS[name]
    for packing in (False, True):
        with pytest.raises(ValueError, match=message):
            make_experience_batch([item(), item(**changes)], packing)
    with pytest.raises(ValueError, match=message):
        remove_padding_in_sequences([item(), item(**changes)])


@pytest.mark.parametrize("name", BAD_TOGETHER)
def test_items_that_do_not_go_together_are_refused(name: str) -> None:
    changes, message = BAD_TOGETHER[name]
    for packing in (False, True):
        with pytest.raises(ValueError, match=message):
            make_experience_batch([item(**item_changes) for item_changes in changes], packing)


def test_what_is_no_batch_and_no_item() -> None:
    with pytest.raises(ValueError, match="experience: got BufferItem"):
        split_experience_batch(item())
    with pytest.raises(ValueError, match="items: empty"):
        make_experience_batch([])
    for use in (make_experience_batch, remove_padding_in_sequences):
        with pytest.raises(ValueError, match=r"items\[1\]: got dict"):
            use([item(), {}])
    with pytest.raises(ValueError, match=r"items\[0\]: got int"):
        make_experience_batch([1], packing_samples=True)


@pytest.mark.parametrize("layout", ["right", "", "packed", None])
def test_unknown_layouts_are_refused(layout: Any) -> None:
    for use in (
        lambda: make_experience_batch([item()], layout=layout),
        lambda: make_experience_batch([item()], True, layout=layout),
        lambda: batch_of().pad(layout=layout),
        lambda: from_experiences([Experience(tokens=[1, 2])], layout=layout),
    ):
        with pytest.raises(ValueError, match="layout.*expected.*left"):
            use()


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (-1, torch.uint8),
        (256, torch.uint8),
        (2**31, torch.int32),
        (2**63, torch.int64),
        (1.0, torch.int64),
        (True, torch.int64),
        (None, torch.int64),
        ("0", torch.int64),
    ],
    ids=str,
)
def test_pad_ids_that_do_not_fit_are_refused(pad: Any, dtype: torch.dtype) -> None:
    items = [item(sequences=torch.ones(3, dtype=dtype)), item(sequences=torch.ones(2, dtype=dtype))]
    with pytest.raises(ValueError, match=f"pad.*{pad}"):
        make_experience_batch(items, pad_token_id=pad)
    with pytest.raises(ValueError, match=f"pad.*{pad}"):
        make_experience_batch(items).pad(pad)


def test_pad_ids_that_fit() -> None:
    items = [item(sequences=torch.ones(3, dtype=torch.int32)), item(sequences=torch.ones(2, dtype=torch.int32))]
    for pad in (-1, 151643, np.int64(7)):
        assert make_experience_batch(items, pad_token_id=pad).sequences[1, 0] == int(pad)


def test_zero_pad_sequences_refuses() -> None:
    with pytest.raises(AssertionError, match="side: got 'middle'"):
        zero_pad_sequences([torch.ones(1)], "middle")
    for sequences, message in (
        ([], "sequences: empty"),
        ([torch.ones(1), torch.ones(1, 2)], r"sequences\[1\]: got shape \[1, 2\]"),
        ([torch.tensor(1.0)], r"sequences\[0\]: got shape \[\]"),
        ([[1, 2]], r"sequences\[0\]: got list"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_pad_sequences(sequences)


def test_zero_pad_sequences_joins_types() -> None:
    padded = zero_pad_sequences([torch.tensor([1]), torch.tensor([1.5, 2.5])])
    assert padded.dtype == torch.float32 and padded.tolist() == [[0, 1], [1.5, 2.5]]
    assert zero_pad_sequences([torch.empty(0), torch.empty(0)]).shape == (2, 0)
    leaf = torch.ones(1, requires_grad=True)
    zero_pad_sequences([leaf, torch.ones(2)]).sum().backward()
    assert leaf.grad.tolist() == [1]


# --- from records ---------------------------------------------------------------------------------------------------


def test_records_make_a_batch() -> None:
    rows = [
        Experience(
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            logprobs=[-0.5, -0.25],
            action_mask=[True, False],
            advantages=[1.0, 2.0],
            returns=[3.0, 4.0],
            reward=1.0,
            policy_versions=7,
            info={"source": "a"},
            metrics={"score": 0.5},
            eid=EID(task=1, suffix="s"),
        ),
        Experience(tokens=[5, 6], logprobs=[-1.0], reward=0.5, metrics={"score": 0.25}, eid=EID(task=2, suffix="s")),
    ]
    for source in (rows, Experiences(rows)):
        batch = from_experiences(source, pad_token_id=9)
        assert batch.sequences.tolist() == [[1, 2, 3, 4], [9, 9, 5, 6]] and batch.sequences.dtype == torch.int64
        assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
        assert batch.action_log_probs.tolist() == [[-0.5, -0.25], [0, -1]]
        assert batch.action_mask.tolist() == [[True, False], [False, True]] and batch.action_mask.dtype == torch.bool
        assert batch.advantages.tolist() == [[1, 2], [0, 0]] and batch.returns.tolist() == [[3, 4], [0, 0]]
        assert batch.extras["policy_versions"].tolist() == [[7, 7], [0, 0]]
        assert batch.info["reward"].tolist() == [1, 0.5]
        assert batch.info["response_length"].tolist() == [1, 1], "actions, not slots"
        assert batch.info["total_length"].tolist() == [4, 2]
        assert batch.info["info"] == {"source": ["a", None]}
        assert batch.info["metrics"]["score"].tolist() == [0.5, 0.25]
        assert batch.ids == [row.eid for row in rows]
        split = split_experience_batch(batch, unpad=True)
        assert split[1].advantages is None and split[1].extras is None
        assert split[1].info["info"] == {} and split[0].eid == rows[0].eid
    packed = from_experiences(rows, packing_samples=True)
    assert packed == batch.pack()
    batch.ids[0].run = 9
    assert rows[0].eid.run == 0, "the batch's ids are its own"


def test_recomputed_log_probs_are_the_ones_to_train_on() -> None:
    new = Experience(tokens=[1, 2], logprobs=[-1.0], old_logprobs=[-2.0])
    old = Experience(tokens=[1, 2], logprobs=[-1.0])
    both = from_experiences([new, new])
    assert both.action_log_probs.tolist() == [[-2], [-2]] and both.extras["logprobs"].tolist() == [[-1], [-1]]
    some = from_experiences([new, old])
    assert some.action_log_probs.tolist() == [[-1], [-1]], "some recomputed, some not, would be neither policy's"
    assert some.extras["old_logprobs"].tolist() == [[-2], [0]]


def test_records_with_a_cut_prompt() -> None:
    row = Experience(tokens=[1, 2, 3], logprobs=[-1.0, -2.0], truncate_status="prompt_truncated", prompt_length=9)
    batch = from_experiences([row])
    assert batch.action_log_probs.tolist() == [[-1, -2]] and batch.action_mask.tolist() == [[False, False]]
    assert batch.info["response_length"].tolist() == [0]
    long = Experience(tokens=[1], logprobs=[-1.0, -2.0], truncate_status="prompt_truncated", prompt_length=9)
    with pytest.raises(ValueError, match="record 1.*got 2.*at most 1"):
        from_experiences([row, long])


def test_preference_pairs_are_refused() -> None:
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4], prompt_length=2, eid=EID(task="t", suffix="s"))
    with pytest.raises(ValueError, match="record 1 .*t.*pair.*split_preference_pairs"):
        from_experiences([Experience(tokens=[1, 2]), pair])


def test_no_records_make_an_empty_batch() -> None:
    for source in ([], Experiences()):
        for options in ({}, {"packing_samples": True}, {"layout": "prompt_left_response_right"}):
            batch = from_experiences(source, **options)
            assert len(batch) == 0
            assert split_experience_batch(batch, unpad=True) == []


def test_custom_fields_become_entries_of_info() -> None:
    expert = CustomField("expert", "expert_mask", torch.bool)
    place = CustomField("place", "xy", torch.float16)
    infos = [{"expert": True, "place": [0.5, 0.25]}, {"expert": False, "place": [1.0, 2.0]}]
    rows = [Experience(tokens=[1, 2, 3], custom_fields=[expert, place], info=info) for info in infos]
    rows[1].custom_fields.reverse()
    for batch in (from_experiences(rows), from_experiences(rows, packing_samples=True)):
        assert batch.info["expert_mask"].tolist() == [True, False] and batch.info["expert_mask"].dtype == torch.bool
        assert batch.info["xy"].tolist() == [[0.5, 0.25], [1.0, 2.0]] and batch.info["xy"].dtype == torch.float16
        assert not batch.extras
    items = split_experience_batch(from_experiences(rows), unpad=True)
    assert items[0].info["expert_mask"] is True
    assert make_experience_batch(items) == from_experiences(rows)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({}, r"custom_fields: got none, expected 'a' as 'aa' \(torch.float32\), the same as record 0"),
        ({"custom_fields": [("a", "aa", torch.int64)]}, "custom_fields: got 'a' as 'aa' .torch.int64., expected 'a'"),
        ({"custom_fields": [("c", "aa", torch.float32)]}, "custom_fields: got 'c' as 'aa' .torch.float32., expected"),
        ({"info": {}}, "info: got no 'a', expected it for the custom field 'aa'"),
        ({"info": {"a": None}}, r"info\['a'\]: got None, expected a number or an array"),
        ({"info": {"a": [1.0, 2.0]}}, r"info\['a'\]: got shape \[2\], expected \[\], the same as record 0"),
    ],
)
def test_custom_fields_that_records_do_not_share_are_refused(second: dict[str, Any], message: str) -> None:
    plain = {"tokens": [1, 2, 3], "info": {"a": 1.0, "c": 2.0}}
    field = ("a", "aa", torch.float32)
    changed = {**plain, **({"custom_fields": [field]} if "info" in second else {}), **second}
    rows = [
        Experience(
            **{
                **values,
                "custom_fields": [CustomField(*declaration) for declaration in values.get("custom_fields", ())],
            }
        )
        for values in ({**plain, "custom_fields": [field]}, changed)
    ]
    with pytest.raises(ValueError, match=f"record 1 .*: {message}"):
        from_experiences(rows)


def test_media_of_records() -> None:
    grid = torch.tensor([[1, 2, 2]])
    rows = [
        Experience(
            tokens=[1, 2],
            multi_modal_inputs={"pixel_values": torch.ones(4, 2), "image_grid_thw": grid, "sound": torch.ones(3)},
        ),
        Experience(tokens=[1, 2, 3]),
    ]
    batch = from_experiences(rows)
    assert batch.pixel_values.shape == (4, 2) and batch.image_grid_thws.tolist() == grid.tolist()
    assert batch.media["sound"][0].tolist() == [1, 1, 1] and batch.media["sound"][1] is None
    first, second = split_experience_batch(batch, unpad=True)
    assert torch.equal(first.pixel_values, torch.ones(4, 2)) and torch.equal(first.media["sound"], torch.ones(3))
    assert second.pixel_values is None and second.media is None


def test_expert_routes_keep_their_sizes() -> None:
    routes = torch.arange(12, dtype=torch.int16).reshape(2, 3, 2)
    rows = [
        Experience(tokens=[1, 2, 3], routed_experts=routes),
        Experience(tokens=[1, 2], routed_experts=routes[:1]),
    ]
    batch = from_experiences(rows)
    assert batch.extras["routed_experts"].shape == (2, 2, 3, 2)
    assert torch.equal(split_experience_batch(batch, unpad=True)[1].extras["routed_experts"], routes[:1])
    empty = [Experience(tokens=[1, 2, 3], routed_experts=routes[:, :0])]
    split = split_experience_batch(from_experiences(empty), unpad=True)
    assert split[0].extras["routed_experts"].shape == (2, 0, 2)
    with pytest.raises(ValueError, match="routed_experts"):
        from_experiences([rows[0], Experience(tokens=[1, 2], routed_experts=routes[:1, :2])])


def test_records_go_to_a_device() -> None:
    rows = [Experience(tokens=[1, 2, 3], logprobs=[-1.0, -2.0], reward=1.0), Experience(tokens=[1, 2])]
    assert from_experiences(rows, device="cpu") == from_experiences(rows)
    moved = from_experiences(rows, device="meta", packing_samples=True)
    assert all(tensor.is_meta for _, tensor in tensors_in(moved))
    assert moved.sequences.values.shape == (5,)


def test_predictions_are_of_every_token() -> None:
    experiences = Experiences(
        [Experience(tokens=[1, 2, 3], prompt_length=1), Experience(tokens=[4, 5], prompt_length=1)]
    )
    padded, packed = from_experiences(experiences), from_experiences(experiences, packing_samples=True)
    with pytest.raises(ValueError, match=r"predictions: got shape \[2, 2\], expected \[2, 3\] first"):
        padded.at_actions(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"predictions: got shape \[5\], expected \[1, 5\] first"):
        packed.at_actions(torch.zeros(5))
