"""Items that are read where they lie, batches that are written in place: what a split gives is what is there."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rollbook.batch.device import move_to_device
from rollbook.compat.lightrft.batch import BufferItem, BufferItemVL, ExperienceBatch, ExperienceVL
from rollbook.compat.lightrft.replay_buffer import (
    NaiveReplayBuffer,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from rollbook.core.media import Pool
from rollbook.core.rows import Rows


def item(tokens: int, actions: int, **changes: Any) -> BufferItem:
    names = dict.fromkeys(["base_action_log_probs", "values", "returns", "advantages", "attention_mask", "action_mask"])
    return BufferItem(
        **{"sequences": torch.arange(1, tokens + 1), "action_log_probs": torch.arange(1.0, actions + 1), "info": {}}
        | names
        | changes
    )


def both_ways(batch: ExperienceBatch) -> list[list[BufferItem]]:
    return [split_experience_batch(batch, unpad=True), remove_padding_in_sequences(split_experience_batch(batch))]


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_that_was_written_to_is_not_absent(packing: bool) -> None:
    batch = make_experience_batch([item(3, 2, advantages=torch.ones(2)), item(2, 1), item(2, 1)], packing)
    batch.advantages[1][...] = 5
    for items in both_ways(batch):
        assert set(items[1].advantages.tolist()) == {5.0}
        assert items[2].advantages is None


def test_a_mask_that_was_only_implied_is_kept_once_it_says_something() -> None:
    batch = make_experience_batch([item(3, 2), item(2, 1)])
    batch.action_mask[0, 1] = False
    assert [row.tolist() for row in batch.pack().action_mask] == [[True, False], [True]]
    for items in both_ways(batch):
        assert items[0].action_mask.tolist() == [True, False]


def test_a_buffer_is_pickled_and_copied() -> None:
    for seed in (None, 3):
        buffer = NaiveReplayBuffer(2, seed=seed)
        buffer.append(make_experience_batch([item(3, 2), item(4, 1), item(5, 5)]))
        for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
            assert list(other.items) == list(buffer.items)
            other.append(make_experience_batch([item(3, 2)]))
            assert len(other) == 4 and len(buffer) == 3
    assert pickle.loads(pickle.dumps(Pool())).keep(b"a") == b"a"


@pytest.mark.parametrize("limit", [None, "3", True, 1.5])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(ValueError, match="^limit: got"):
        NaiveReplayBuffer(2, limit=limit)


def test_a_packed_batch_as_a_dict() -> None:
    batch = make_experience_batch([item(3, 2), item(2, 1)], packing_samples=True)
    sequences = dataclasses.asdict(batch)["sequences"]
    assert isinstance(sequences, Rows)
    assert sequences.values.tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("count", [0, 2])
def test_grids_of_nothing(count: int) -> None:
    batch = ExperienceVL(
        torch.ones(count, 3, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int64)
    )
    for sample in split_experience_batch(batch):
        assert sample.image_grid_thws is None and len(sample.pixel_values) == 0


def test_to_moves_whatever_can_move() -> None:
    class Encoding(UserDict[str, torch.Tensor]):
        def to(self, device: Any) -> Encoding:
            return Encoding({key: value.to(device) for key, value in self.items()})

    moved = move_to_device(
        {"a": Encoding(x=torch.ones(1)), "b": OrderedDict(y=torch.ones(1)), "c": [item(3, 2)], "d": "text"}, "meta"
    )
    assert moved["a"]["x"].is_meta and moved["b"]["y"].is_meta and moved["c"][0].sequences.is_meta
    assert type(moved["b"]) is OrderedDict and moved["d"] == "text"


def test_threads_read_one_item() -> None:
    batch = make_experience_batch([item(4, 2, advantages=torch.ones(2), info={"a": 1.0}) for _ in range(200)])
    names = [field.name for field in dataclasses.fields(BufferItem)]
    for sample in split_experience_batch(batch, unpad=True):
        start = threading.Barrier(2)
        seen: list[list[Any]] = []

        def read(sample: BufferItem = sample, start: threading.Barrier = start, seen: list[list[Any]] = seen) -> None:
            start.wait()
            seen.append([getattr(sample, name) for name in names])

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 2
        assert all(a is b for a, b in zip(*seen, strict=True)), "one copy of each field, whoever asked first"


def test_an_attribute_of_ones_own() -> None:
    sample = split_experience_batch(make_experience_batch([item(3, 2)]), unpad=True)[0]
    sample.mine = 1
    assert sample == item(3, 2)
    assert pickle.loads(pickle.dumps(sample)).mine == 1
    assert copy.copy(sample).mine == 1


def test_an_item_that_was_read_keeps_no_sheet() -> None:
    sample = split_experience_batch(make_experience_batch([item(3, 2), item(3, 2)]), unpad=True)[0]
    assert "_source" in vars(sample)
    assert sample == item(3, 2)
    assert "_source" not in vars(sample)


def test_pictures_are_copied_once() -> None:
    picture = Image.new("RGB", (8, 8), "red")
    batch = ExperienceVL(
        torch.ones(3, 2, dtype=torch.int64), raw_images=[[picture], [picture], [picture.copy()]], info={}
    )
    items = split_experience_batch(batch, unpad=True)
    copy = items[0].raw_images[0]
    assert copy is not picture
    assert all(sample.raw_images[0] is copy for sample in items)
    picture.putpixel((0, 0), (0, 0, 0))
    assert copy.getpixel((0, 0)) == (255, 0, 0)


def test_calls_share_what_shows_the_same() -> None:
    pixels = torch.randn(1000, 16)
    grid = torch.tensor([[1, 20, 50]])
    items = [
        split_experience_batch(ExperienceVL(torch.ones(1, 2, dtype=torch.int64), pixels.clone(), grid), unpad=True)[0]
        for _ in range(8)
    ]
    assert len({sample.pixel_values.data_ptr() for sample in items}) == 1


def test_unpadding_keeps_no_larger_storage() -> None:
    wide = torch.zeros(1000, 1000)
    sample = BufferItemVL(torch.ones(3, dtype=torch.int64), pixel_values=wide[:1])
    bare = remove_padding_in_sequences([sample])[0]
    assert bare.pixel_values.untyped_storage().nbytes() == 4000
    assert torch.equal(bare.pixel_values, wide[:1])


def test_info_of_another_length_is_refused_at_once() -> None:
    batch = make_experience_batch([item(3, 2), item(3, 2)])
    batch.info["deep"] = {"x": torch.ones(3)}
    for call in (lambda: NaiveReplayBuffer(2).append(batch), lambda: split_experience_batch(batch), batch.pack):
        with pytest.raises(ValueError, match=r"info\['deep'\]\['x'\]: got 3 entries, expected 2"):
            call()


def test_numbers_torch_has_no_type_for() -> None:
    infos = [{"t": np.timedelta64(i, "s"), "c": 1j * i, "big": 2**70 + i} for i in range(2)]
    batch = make_experience_batch([item(3, 2, info=info) for info in infos])
    assert batch.info["c"].dtype == torch.complex64
    assert [sample.info for sample in split_experience_batch(batch)] == infos


def test_a_graph_is_not_kept() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    batch = make_experience_batch([item(4, 3), item(4, 3)])
    batch.advantages = weight * 2
    batch.info["loss"] = (weight * 3).sum(1)
    for items in (split_experience_batch(batch), split_experience_batch(batch, unpad=True)):
        assert not items[0].advantages.requires_grad
        again = make_experience_batch(items)
        assert torch.equal(again.advantages, batch.advantages.detach())
        assert torch.equal(again.info["loss"], batch.info["loss"].detach())
    assert batch.pack().advantages.values.requires_grad, "a layout is changed within the graph"


def test_assigning_extras_forgets_what_was_known_of_them() -> None:
    batch = make_experience_batch([item(3, 2, extras={"w": torch.ones(2)}), item(3, 2)])
    assert split_experience_batch(batch)[1].extras is None
    batch.extras = {"w": torch.zeros(2, 2)}
    assert split_experience_batch(batch)[1].extras["w"].tolist() == [0, 0]
