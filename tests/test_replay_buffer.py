"""Split, unpad and batch on concrete samples; the buffer, and what memory its items hold."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from rollbook import EID
from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.replay_buffer import (
    BufferItem,
    BufferItemVL,
    NaiveReplayBuffer,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from rollbook.core.freeform import same
from rollbook.core.rows import Rows

FIELDS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "kl", "action_entropy"]
NOTHING = dict.fromkeys([*FIELDS[:5], "attention_mask", "action_mask", "info"])
MB = 1 << 20


def batch_of(rows: int = 2, prompt: int = 3, response: int = 4, seed: int = 0, **changes: Any) -> ExperienceBatch:
    """A batch of a fresh rollout: prompts padded on the left, responses on the right, something in every field."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, prompt + 1, rows), rng.integers(1, response + 1, rows)
    column = np.arange(prompt + response)
    attended = (column >= prompt - prompts[:, None]) & (column < prompt + responses[:, None])
    columns: dict[str, Any] = {name: torch.from_numpy(rng.normal(size=(rows, response))).float() for name in FIELDS}
    columns["sequences"] = torch.from_numpy(rng.integers(1, 100, attended.shape) * attended)
    columns["attention_mask"] = torch.from_numpy(attended).long()
    columns["action_mask"] = torch.from_numpy(attended[:, prompt:])
    columns["info"] = {"reward": torch.arange(float(rows)), "n": torch.arange(rows)}
    columns["labels"] = [f"label {i}" for i in range(rows)]
    return ExperienceBatch(**NOTHING | columns | changes)


def text_item(tokens: list[int], *, response: int = 1, **changes: Any) -> BufferItem:
    defaults = {"sequences": torch.tensor(tokens), "action_log_probs": torch.zeros(response), "info": {}}
    return BufferItem(**NOTHING | defaults | changes)


# --- what is held ---------------------------------------------------------------------------------------------------

_LEAVES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


def held_bytes(*roots: Any) -> int:
    """The bytes of all tensors, arrays, pictures and bytes that are kept alive by the objects, each memory once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (_LEAVES, str, int, float, weakref.ref)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, np.ndarray):
            if value.base is not None:
                waiting.append(value.base)
            else:
                sizes[value.ctypes.data] = value.nbytes
        elif isinstance(value, Image.Image):
            sizes[id(value)] = value.width * value.height * len(value.getbands())
        elif isinstance(value, (bytes, bytearray, memoryview)):
            sizes[id(value)] = len(value)
        elif isinstance(value, weakref.WeakValueDictionary):
            continue
        else:
            waiting.extend(gc.get_referents(value))
    return sum(sizes.values())


def payload(items: Iterable[BufferItem]) -> int:
    """The bytes of what text items show."""
    names = ["sequences", "attention_mask", "action_mask", *FIELDS]
    return sum(getattr(item, name).nbytes for item in items for name in names)


def test_held_sees_what_is_kept_alive() -> None:
    """The measure itself: a view counts for all of what it keeps, and the same memory once."""
    big = torch.zeros(MB, dtype=torch.uint8)
    assert held_bytes([big[:1], {"a": big[5:]}]) == MB
    assert held_bytes(big.numpy()[3:4]) == MB
    assert held_bytes([b"x" * 100, Image.new("RGB", (10, 10))]) == 400
    item = text_item([1, 2], values=big)
    assert held_bytes(item) == MB + 16 + 4
    assert held_bytes(lambda: None, weakref.ref(item)) == 0


# --- split, unpad, batch --------------------------------------------------------------------------------------------


def test_split_unpad_batch() -> None:
    batch = ExperienceBatch(
        sequences=torch.tensor([[0, 0, 5, 6, 7, 8, 2, 0], [0, 4, 5, 6, 7, 8, 9, 2]]),
        action_log_probs=torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-4.0, -5.0, -6.0, -7.0]]),
        base_action_log_probs=None,
        values=None,
        returns=None,
        advantages=torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 6.0, 7.0]]),
        attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1]]),
        action_mask=torch.tensor([[True, False, True, False], [True, True, True, True]]),
        info={"reward": torch.tensor([0.5, 1.5]), "epoch": 3},
        kl=torch.tensor([[0.1, 0.2, 0.3, 0.0], [0.4, 0.5, 0.6, 0.7]]),
        labels=["a", "b"],
    )
    wide = split_experience_batch(batch)
    assert [item.sequences.tolist() for item in wide] == batch.sequences.tolist()
    assert [item.info for item in wide] == [{"reward": 0.5, "epoch": 3}, {"reward": 1.5, "epoch": 3}]
    bare = remove_padding_in_sequences(wide)
    assert bare[0].sequences.tolist() == [5, 6, 7, 8, 2]
    assert bare[0].attention_mask.tolist() == [1] * 5
    assert bare[0].action_log_probs.tolist() == [-1, -2, -3], "a masked slot within the response is kept"
    assert bare[0].action_mask.tolist() == [True, False, True]
    assert bare[0].kl.tolist() == batch.kl[0, :3].tolist()
    assert bare[0].values is None
    assert bare[1].sequences.tolist() == [4, 5, 6, 7, 8, 9, 2]
    assert wide[0].sequences.tolist() == batch.sequences[0].tolist(), "what was given is left alone"
    again = make_experience_batch(bare, pad_token_id=9)
    assert again.sequences.tolist() == [[9, 9, 5, 6, 7, 8, 2], [4, 5, 6, 7, 8, 9, 2]]
    assert again.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1] * 7]
    assert again.action_log_probs.tolist() == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert again.advantages.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert again.action_mask.tolist() == [[False, True, False, True], [True] * 4]
    assert again.info["reward"].tolist() == [0.5, 1.5] and again.info["epoch"].tolist() == [3, 3]
    assert again.labels == ["a", "b"]
    packed = make_experience_batch(bare, packing_samples=True)
    assert isinstance(packed.sequences, Rows)
    assert packed.sequences.values.tolist() == [5, 6, 7, 8, 2, 4, 5, 6, 7, 8, 9, 2]
    assert packed.action_log_probs.values.tolist() == [-1, -2, -3, -4, -5, -6, -7]


def test_packing_items_that_still_have_padding() -> None:
    batch = batch_of(rows=4)
    wide, bare = split_experience_batch(batch), split_experience_batch(batch, unpad=True)
    assert make_experience_batch(wide, packing_samples=True) == make_experience_batch(bare, packing_samples=True)
    repadded = make_experience_batch(wide, layout="prompt_left_response_right")
    assert repadded == make_experience_batch(bare, layout="prompt_left_response_right")


def test_a_response_that_is_all_masked_keeps_its_tokens() -> None:
    batch = batch_of(action_mask=torch.zeros(2, 4, dtype=torch.bool))
    for item, mask in zip(split_experience_batch(batch, unpad=True), batch.attention_mask, strict=True):
        assert len(item.sequences) == int(mask.sum())
        assert len(item.action_mask) == int(mask[3:].sum()) and not item.action_mask.any()


def test_optional_fields_survive_in_any_order() -> None:
    with_values = text_item([1, 2, 3], values=torch.tensor([0.5]), info={"a": 1})
    without = text_item([4, 5], info={"b": "x"})
    for items in ([with_values, without], [without, with_values]):
        batch = make_experience_batch(items)
        assert sorted(batch.values.reshape(-1).tolist()) == [0, 0.5]
        assert set(batch.info) == {"a", "b"}
        assert split_experience_batch(batch, unpad=True) == items


# --- the buffer -----------------------------------------------------------------------------------------------------


def test_append_keeps_the_samples_without_padding() -> None:
    buffer = NaiveReplayBuffer(2)
    batch = batch_of()
    before = copy.deepcopy(batch)
    buffer.append(batch)
    assert batch == before, "the batch is left alone"
    buffer.append(batch_of(rows=3, seed=1))
    assert len(buffer) == 5
    assert buffer.items[:2] == split_experience_batch(batch, unpad=True)
    assert buffer[0] == buffer.items[0] and buffer[-1] == buffer.items[4]
    assert [len(item.sequences) for item in buffer] == [int(item.attention_mask.sum()) for item in buffer]


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_sample_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=f"sample_batch_size: got {size}"):
        NaiveReplayBuffer(size)


def test_what_is_no_batch_is_refused() -> None:
    buffer = NaiveReplayBuffer(1)
    with pytest.raises(ValueError, match="experience: got BufferItem"):
        buffer.append(text_item([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values: got 3 rows"):
        buffer.append(batch_of(values=torch.ones(3, 4)))
    assert len(buffer) == 0


def tokens_of(batch: ExperienceBatch) -> list[list[int]]:
    return [item.sequences.tolist() for item in split_experience_batch(batch, unpad=True)]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sampling(packing: bool) -> None:
    batch = batch_of(rows=20)
    everything = {tuple(row) for row in tokens_of(batch)}
    assert len(everything) == 20

    def buffer(seed: int | None, size: int = 8) -> NaiveReplayBuffer:
        filled = NaiveReplayBuffer(size, packing_samples=packing, seed=seed)
        filled.append(batch)
        return filled

    first, same, other = buffer(1), buffer(1), buffer(2)
    runs = [[tokens_of(sampled_buffer.sample()) for _ in range(3)] for sampled_buffer in (first, same, other)]
    assert runs[0] == runs[1] != runs[2], "a seed makes it repeatable"
    for rows in (rows for run in runs for rows in run):
        drawn = {tuple(row) for row in rows}
        assert len(drawn) == len(rows) == 8, "without replacement"
        assert drawn <= everything
    assert {tuple(row) for row in tokens_of(buffer(3, size=20).sample())} == everything
    assert first.sample().layout == ("packed" if packing else "padded")
    random.seed(5)
    unseeded = tokens_of(buffer(None).sample())
    random.seed(5)
    assert tokens_of(buffer(None).sample()) == unseeded, "without one it is Python's random that decides"
    counts = dict.fromkeys(everything, 0)
    for _ in range(200):
        for row in tokens_of(first.sample()):
            counts[tuple(row)] += 1
    assert min(counts.values()) > 40, "80 expected of each"


def test_sampling_from_too_few() -> None:
    buffer = NaiveReplayBuffer(3)
    buffer.append(batch_of())
    with pytest.raises(ValueError, match="has 2.*sample_batch_size, 3"):
        buffer.sample()
    with pytest.raises(ValueError, match="has 0 samples"):
        NaiveReplayBuffer(1).sample()


def test_sampled_batches_are_padded_with_the_pad_id_and_go_to_the_device() -> None:
    buffer = NaiveReplayBuffer(2, pad_token_id=77)
    buffer.append(batch_of())
    batch = buffer.sample()
    assert (batch.sequences[batch.attention_mask == 0] == 77).all() and (batch.attention_mask == 0).any()
    away = NaiveReplayBuffer(2, device="meta")
    away.append(batch_of())
    assert away.sample().sequences.is_meta and away.sample().info["reward"].is_meta
    assert not away[0].sequences.is_meta


def test_it_works_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    buffer = NaiveReplayBuffer(2, cpu_offload=False)
    buffer.append(batch_of())
    assert buffer.target_device.type == "cpu"
    assert buffer.sample().sequences.device.type == "cpu"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_data_loader_over_the_buffer(packing: bool, workers: int) -> None:
    buffer = NaiveReplayBuffer(3, packing_samples=packing, pad_token_id=5)
    buffer.append(batch_of(rows=5))
    buffer.append(batch_of(rows=3, seed=1))
    loader = DataLoader(
        buffer,  # type: ignore[arg-type]
        batch_size=3,
        shuffle=False,
        collate_fn=buffer.collate_fn,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert batches == [buffer.collate_fn(buffer.items[i : i + 3]) for i in (0, 3, 6)]
    assert [item for batch in batches for item in split_experience_batch(batch, unpad=True)] == buffer.items


def test_limit_keeps_the_newest() -> None:
    buffer = NaiveReplayBuffer(1, limit=4)
    newest: list[list[int]] = []
    for seed in range(5):
        batch = batch_of(rows=3, seed=seed)
        buffer.append(batch)
        newest = (newest + tokens_of(batch))[-4:]
        assert [item.sequences.tolist() for item in buffer] == newest
    buffer.append(batch_of(rows=9, seed=9))
    assert [item.sequences.tolist() for item in buffer] == tokens_of(batch_of(rows=9, seed=9))[-4:]
    for limit in (0, -1):
        unlimited = NaiveReplayBuffer(1, limit=limit)
        for _ in range(3):
            unlimited.append(batch_of(rows=3))
        assert len(unlimited) == 9


def test_clear() -> None:
    buffer = NaiveReplayBuffer(1)
    buffer.append(batch_of())
    buffer.clear()
    assert len(buffer) == 0 and buffer.items == []
    buffer.append(batch_of())
    assert len(buffer) == 2


def test_packed_batches_can_be_appended() -> None:
    buffer, padded = NaiveReplayBuffer(2), NaiveReplayBuffer(2)
    buffer.append(batch_of().pack())
    padded.append(batch_of())
    assert buffer.items == padded.items


# --- normalize ------------------------------------------------------------------------------------------------------


def buffer_with(advantages: Any, mask: Any, dtype: torch.dtype = torch.float32) -> NaiveReplayBuffer:
    """A buffer of samples with these advantages and masks, of any lengths."""
    buffer = NaiveReplayBuffer(1)
    items = [
        BufferItem(
            **NOTHING
            | {
                "sequences": torch.ones(len(row) + 1, dtype=torch.int64),
                "advantages": torch.tensor(row, dtype=dtype),
                "action_mask": None if on is None else torch.tensor(on),
            }
        )
        for row, on in zip(advantages, mask, strict=True)
    ]
    buffer.append(make_experience_batch(items))
    return buffer


def test_normalize_counts_actions_alone() -> None:
    """Upstream mixed a sum over all slots with a count over actions, and gave -1.02, 0.96, -0.98."""
    buffer = buffer_with([[1.0, 100.0, 3.0]], [[1, 0, 1]])
    buffer.normalize("advantages", None)
    assert buffer[0].advantages.tolist() == [-1, 0, 1]


def test_normalize_over_all_samples() -> None:
    rows = [[1.0, 2.0], [3.0, 50.0, 4.0], [], [6.0]]
    buffer = buffer_with(rows, [[True, True], [True, False, True], [], [True]])
    before = copy.deepcopy(buffer.items)
    buffer.normalize("advantages")
    chosen = np.array([1, 2, 3, 4, 6.0])
    expected = (chosen - chosen.mean()) / chosen.std()
    normalized = torch.cat([item.advantages[item.action_mask.bool()] for item in buffer])
    np.testing.assert_allclose(normalized.numpy(), expected, rtol=1e-6)
    assert buffer[1].advantages[1] == 0
    assert all(item.advantages.dtype == torch.float32 for item in buffer)
    for item, old in zip(buffer, before, strict=True):
        item.advantages = old.advantages
        assert item == old, "nothing else is changed"
    assert make_experience_batch(buffer.items).advantages[3, -1] == 6


def test_normalize_changes_no_item_outside_the_buffer() -> None:
    filled = buffer_with([[1.0, 3.0], [5.0, 7.0]], [[True, True]] * 2)
    items = split_experience_batch(make_experience_batch(filled.items))
    buffer = NaiveReplayBuffer(1)
    buffer.items = remove_padding_in_sequences(items)
    others = remove_padding_in_sequences(items)
    buffer.normalize("advantages")
    assert buffer[1].advantages.tolist() != [5, 7]
    assert others[1].advantages.tolist() == items[1].advantages.tolist() == [5, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalize_is_exact_far_from_zero(dtype: torch.dtype) -> None:
    buffer = buffer_with([[4096.0, 4128.0]], [[True, True]], dtype)
    buffer.normalize("advantages")
    assert buffer[0].advantages.tolist() == [-1, 1] and buffer[0].advantages.dtype == dtype


def test_normalize_without_spread_or_actions() -> None:
    constant = buffer_with([[5.0, 5.0], [5.0]], [[True, True], [True]])
    constant.normalize("advantages")
    assert [item.advantages.tolist() for item in constant] == [[0, 0], [0]]
    masked = buffer_with([[5.0, 7.0]], [[False, False]])
    masked.normalize("advantages")
    assert masked[0].advantages.tolist() == [0, 0]
    unmasked = buffer_with([[1.0, 3.0], [1.0, 3.0]], [None, None])
    unmasked.normalize("advantages")
    assert [item.advantages.tolist() for item in unmasked] == [[-1, 1], [-1, 1]]
    NaiveReplayBuffer(1).normalize("advantages")


def test_normalize_refuses() -> None:
    buffer = buffer_with([[1.0, 2.0]], [[True, True]])
    for name in ("values", "no_such_field", "labels"):
        with pytest.raises(ValueError, match=rf"{name}.*items\[0\]"):
            buffer.normalize(name)
    with pytest.raises(ValueError, match="sequences.*shape"):
        buffer.normalize("sequences")
    assert buffer[0].advantages.tolist() == [1, 2]


class ProcessGroup:
    """ProcessGroup as threads, whose `all_reduce` adds up."""

    def __init__(self, count: int) -> None:
        self.reduced: list[torch.Tensor] = []
        self.barrier = threading.Barrier(count, timeout=30)

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        assert op == "sum"
        self.reduced.append(tensor.clone())
        self.barrier.wait()
        total = torch.stack(self.reduced).sum(0)
        self.barrier.wait()
        return total


def test_normalize_over_ranks_is_that_of_one() -> None:
    rows = [[1.0, 2.0], [3.0, 50.0, 4.0], [6.0], [8.0, -3.0]]
    masks = [[True, True], [True, False, True], [True], [False, True]]
    single = buffer_with(rows, masks)
    single.normalize("advantages")
    # One rank has a sample without actions only, and takes part all the same.
    shards = [buffer_with(rows[:1], masks[:1]), buffer_with(rows[1:], masks[1:]), buffer_with([[9.0]], [[False]])]
    ranks = ProcessGroup(len(shards))
    threads = [threading.Thread(target=shard.normalize, args=("advantages", ranks)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    advantages = [item.advantages for shard in shards[:2] for item in shard]
    assert all(torch.equal(a, b.advantages) for a, b in zip(advantages, single, strict=True))
    assert shards[2][0].advantages.tolist() == [0]


# --- memory ---------------------------------------------------------------------------------------------------------


def long_batch(seed: int = 0, rows: int = 8) -> ExperienceBatch:
    """A batch that is mostly padding: one long sample, the rest short."""
    batch = batch_of(rows=rows, prompt=50, response=3000, seed=seed)
    length = torch.full((rows,), 20)
    length[0] = 3000
    column = torch.arange(3050)
    attended = (column >= 40) & (column < 50 + length[:, None])
    return ExperienceBatch(**vars(batch) | {"attention_mask": attended.long(), "action_mask": attended[:, 50:]})


@pytest.mark.parametrize("unpad", [False, True], ids=["wide", "bare"])
def test_items_are_on_memory_of_their_own(unpad: bool) -> None:
    batch = long_batch()
    items = split_experience_batch(batch, unpad=unpad)
    for item in items:
        for name in ("sequences", "attention_mask", "action_mask", *FIELDS):
            tensor = getattr(item, name)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    expected = copy.deepcopy(items)
    for name in ("sequences", "attention_mask", "action_mask", *FIELDS):
        getattr(batch, name).zero_()
    batch.info["reward"].zero_()
    assert items == expected


def test_overwriting_the_batch_changes_no_item_that_was_not_looked_at() -> None:
    batch, other = long_batch(), long_batch()
    items, expected = split_experience_batch(batch, unpad=True), split_experience_batch(other, unpad=True)
    for name in ("sequences", "attention_mask", "action_mask", *FIELDS):
        getattr(batch, name).zero_()
    batch.info["reward"].zero_()
    batch.labels[0] = "changed"
    batch.advantages = None
    batch.info = {}
    assert items == expected


@pytest.mark.parametrize("unpad", [False, True], ids=["wide", "bare"])
def test_items_share_nothing_with_each_other(unpad: bool) -> None:
    """Nor with what is made of them: tensors, `info` however deep, labels, ids."""
    info = {"deep": [{"a": [1]}, {"a": [1]}], "vec": torch.ones(2, 2)}
    batch = batch_of(info=info, labels=[{"x": [1]}] * 2, ids=[EID(suffix="s")] * 2)
    items = split_experience_batch(batch, unpad=unpad)
    before, others = copy.deepcopy(items), [*remove_padding_in_sequences(items), items[1]]
    items[0].info["deep"]["a"].append(2)
    items[0].info["vec"].zero_()
    items[0].labels["x"].append(2)
    items[0].eid.run = 7
    items[0].sequences.zero_()
    assert others == [*remove_padding_in_sequences(before), before[1]]
    assert batch.info["deep"] == [{"a": [1]}, {"a": [1]}] and batch.labels == [{"x": [1]}] * 2
    assert batch.ids[0].run == 0
    again = make_experience_batch(items)
    again.info["deep"]["a"][0].append(3)
    again.labels[0]["x"].append(3)
    again.ids[0].run = 8
    assert items[0].info["deep"]["a"] == items[0].labels["x"] == [1, 2] and items[0].eid.run == 7


def test_unpadding_takes_what_was_read_or_set_before() -> None:
    """Items of one batch, untouched or not, in any order and number, are the same without their padding."""
    batch = long_batch()
    expected = split_experience_batch(batch, unpad=True)
    items = split_experience_batch(batch)
    assert remove_padding_in_sequences(items) == expected
    assert remove_padding_in_sequences(items[::-2]) == expected[::-2]
    for name in ("action_mask", "info", "attention_mask", "returns"):
        assert all(getattr(item, name) is not None for item in items)
        assert remove_padding_in_sequences(items) == expected
    items[2].info["reward"], items[3].advantages = 7.0, torch.zeros(3000)
    bare = remove_padding_in_sequences(items)
    assert bare[2].info["reward"] == 7.0 and not bare[3].advantages.any() and len(bare[3].advantages) == 20
    items[2].info["reward"] = 8.0
    assert bare[2].info["reward"] == 7.0 and bare[4] == expected[4]
    assert remove_padding_in_sequences([item.detach() for item in split_experience_batch(batch)]) == expected


def test_padding_that_says_something_is_read_from_the_batch() -> None:
    batch = long_batch()
    items, expected = split_experience_batch(batch), batch.advantages.clone()
    assert torch.equal(items[1].advantages, expected[1]) and expected[1, 100:].any()
    batch.advantages.zero_()
    batch.sequences.numpy()[:] = 0
    assert torch.equal(items[2].advantages[:20], expected[2, :20])
    assert torch.equal(items[2].advantages[20:], expected[2, -1:].expand(2980))
    assert items[2].sequences[40:70].all()


def test_items_pin_no_padded_batch() -> None:
    batch = long_batch()
    padded, size = held_bytes(batch), payload(split_experience_batch(batch, unpad=True))
    assert size < padded / 5
    alive = [weakref.ref(getattr(batch, name)) for name in ("sequences", "attention_mask", *FIELDS)]
    alive.append(weakref.ref(batch))
    items = split_experience_batch(batch, unpad=True)
    assert held_bytes(batch, items) == held_bytes(batch) + held_bytes(items), "they share no memory"
    del batch
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert held_bytes(items) < 1.1 * size + 2000, "before they are looked at"
    assert payload(items) == size
    assert held_bytes([item.detach() for item in items]) < 1.1 * size + 2000, "and after"


def test_pickled_items_are_as_large_as_what_they_hold() -> None:
    for unpad in (False, True):
        items = split_experience_batch(long_batch(), unpad=unpad)
        for item in items:
            size = payload([item])
            assert size <= len(pickle.dumps(item)) < size + 8000
        assert len(pickle.dumps(items)) < payload(items) + 8000 * len(items)
        assert pickle.loads(pickle.dumps(items)) == items


def test_an_item_alone_pins_nothing_once_detached() -> None:
    items = split_experience_batch(long_batch(), unpad=True)
    short = items[3].detach()
    del items
    gc.collect()
    assert held_bytes(short) < payload([short]) * 1.1 + 1000


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_limit_releases_memory(rows: int) -> None:
    buffer = NaiveReplayBuffer(1, limit=48)
    for seed in range(20):
        buffer.append(batch_of(rows=rows, prompt=50, response=200, seed=seed))
        if len(buffer) == 48:
            copied_bytes = payload(copy.deepcopy(buffer.items))
            assert held_bytes(buffer) < 2.2 * copied_bytes + 100_000
    buffer.clear()
    gc.collect()
    assert held_bytes(buffer) == 0


def test_the_last_samples_of_a_large_batch_do_not_keep_it() -> None:
    buffer = NaiveReplayBuffer(1, limit=8)
    buffer.append(batch_of(rows=64, prompt=50, response=200))
    for seed in range(7):
        buffer.append(batch_of(rows=1, prompt=50, response=200, seed=seed))
        assert held_bytes(buffer) < 2.2 * payload(copy.deepcopy(buffer.items)) + 20_000
    assert buffer[0] == split_experience_batch(batch_of(rows=64, prompt=50, response=200), unpad=True)[-1]


def test_a_sampled_batch_shares_nothing_with_the_buffer() -> None:
    """Also where nothing needs padding and a single sample is the whole batch."""
    for rows, packing in ((1, False), (1, True), (4, False), (4, True)):
        buffer = NaiveReplayBuffer(rows, packing_samples=packing)
        full = torch.ones(rows, 7, dtype=torch.int64)
        buffer.append(
            batch_of(
                rows=rows,
                attention_mask=full,
                pixel_values=torch.ones(rows * 4, 2),
                image_grid_thws=torch.tensor([[1, 2, 2]] * rows),
                media={"sound": [torch.ones(3) for _ in range(rows)]},
            )
        )
        before = copy.deepcopy(buffer.items)
        batch = buffer.sample()
        for name in ("sequences", "attention_mask", "action_mask", "pixel_values", "image_grid_thws", *FIELDS):
            value = getattr(batch, name)
            (value.values if isinstance(value, Rows) else value).zero_()
        batch.info["reward"].zero_()
        batch.media["sound"][0].zero_()
        assert buffer.items == before


# --- media ----------------------------------------------------------------------------------------------------------

SIDE = 1182  # SIDE * SIDE * 3 bytes are 4 MB


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


RAW: dict[str, Callable[[], Any]] = {
    "PIL": lambda: Image.fromarray(noise()),
    "array": noise,
    "bytes": lambda: noise().tobytes(),
    "tensor": lambda: torch.from_numpy(noise()),
}


def vision_batch(rows: int, raw: Callable[[], Any] | None) -> ExperienceBatch:
    """`rows` samples of one prompt with one image, each with its own copy of it."""
    columns: dict[str, Any]
    if raw is None:
        pixels = torch.from_numpy(noise()).reshape(-1, SIDE)[: SIDE * 3 // 4].float()
        columns = {
            "pixel_values": torch.cat([pixels] * rows),
            "image_grid_thws": torch.tensor([[1, 1, len(pixels)]] * rows),
        }
    else:
        columns = {"raw_images": [[raw()] for _ in range(rows)]}
    return batch_of(rows=rows, **columns)


@pytest.mark.parametrize("kind", ["pixel_values", *RAW])
@pytest.mark.parametrize("rows", [8, 1], ids=["at once", "one by one"])
def test_an_image_is_held_once(kind: str, rows: int) -> None:
    """Eight samples of a prompt with a 4 MB image hold 4 MB."""
    buffer = NaiveReplayBuffer(1)
    for _ in range(8 // rows):
        buffer.append(vision_batch(rows, RAW.get(kind)))
    gc.collect()
    size = held_bytes(buffer.items)
    assert 3.9 * MB < size < 4.2 * MB
    for item in buffer:
        shown = [item.pixel_values] if kind == "pixel_values" else item.raw_images
        assert len(shown) == 1 and held_bytes(shown) > 3.9 * MB
    assert held_bytes(buffer) < 4.2 * MB, "nor does the buffer itself hold more"
    assert held_bytes([item.detach() for item in buffer]) < 4.2 * MB, "and when items are let go from where they came"


def test_different_images_are_different() -> None:
    images = [[Image.fromarray(noise(seed)[:4, :4])] for seed in (1, 2, 1)]
    buffer = NaiveReplayBuffer(1)
    buffer.append(batch_of(rows=3, raw_images=images))
    assert [item.raw_images[0].tobytes() for item in buffer] == [image[0].tobytes() for image in images]
    same_bytes = [np.zeros((2, 6), np.uint8), np.zeros((3, 4), np.uint8), np.zeros((2, 6), np.int8)]
    buffer.append(batch_of(rows=3, raw_images=same_bytes))
    assert [(i.raw_images.shape, i.raw_images.dtype) for i in buffer.items[3:]] == [
        (a.shape, a.dtype) for a in same_bytes
    ]
    gray = [Image.new("L", (2, 2)), Image.new("P", (2, 2))]
    buffer.append(batch_of(rows=2, raw_images=gray))
    assert [item.raw_images.mode for item in buffer.items[6:]] == ["L", "P"]


def test_pictures_of_one_size_and_another_palette_are_different() -> None:
    first, second = Image.new("P", (2, 2)), Image.new("P", (2, 2))
    first.putpalette([255, 0, 0] * 256)
    second.putpalette([0, 0, 255] * 256)
    items = split_experience_batch(batch_of(raw_images=[first, second]))
    assert [item.raw_images.convert("RGB").getpixel((0, 0)) for item in items] == [(255, 0, 0), (0, 0, 255)]


def test_the_callers_images_are_left_alone_and_paths_are_kept() -> None:
    picture, array, data = Image.fromarray(noise()[:40, :50]), noise()[:4, :4].copy(), b"raw bytes"
    images = [[picture, "/images/a.png", None], [array, data], [], None, picture, "/images/b.png"]
    before = picture.tobytes(), array.copy()
    batch = batch_of(rows=6, raw_images=list(images))
    buffer = NaiveReplayBuffer(6)
    buffer.append(batch)
    items = buffer.items
    assert picture.tobytes() == before[0] and picture.size == (50, 40)
    assert (array == before[1]).all()
    assert batch.raw_images[0][0] is picture and batch.raw_images[1][0] is array
    assert items[0].raw_images[1:] == ["/images/a.png", None] and items[0].raw_images[0].tobytes() == before[0]
    assert (items[1].raw_images[0] == array).all() and items[1].raw_images[1] == b"raw bytes"
    assert items[2].raw_images == [] and items[3].raw_images is None
    assert items[4].raw_images is items[0].raw_images[0], "one picture, one object"
    assert items[5].raw_images == "/images/b.png"
    assert make_experience_batch(items).raw_images == [item.raw_images for item in items]


def test_an_image_goes_when_its_last_sample_does() -> None:
    for kind in ("pixel_values", *RAW):
        buffer = NaiveReplayBuffer(1, limit=4)
        buffer.append(vision_batch(4, RAW.get(kind)))
        assert held_bytes(buffer) > 3.9 * MB
        buffer.append(batch_of(rows=4))
        gc.collect()
        assert held_bytes(buffer) < 0.1 * MB, kind


def test_overwriting_the_batchs_media_changes_no_item() -> None:
    for rows in (1, 2):
        grids = torch.tensor([[1, 2, 2]] * rows)
        batch = batch_of(rows=rows, pixel_values=torch.ones(4 * rows, 2), image_grid_thws=grids)
        for unpad in (False, True):
            items = split_experience_batch(batch, unpad=unpad)
            expected = copy.deepcopy(items)
            batch.pixel_values.zero_()
            batch.image_grid_thws.zero_()
            assert items == expected
            batch.pixel_values.fill_(1)
            batch.image_grid_thws.copy_(torch.tensor([[1, 2, 2]] * rows))


def test_images_and_videos_stay_with_their_samples() -> None:
    def make_item(images: list[int], videos: list[int], mark: float) -> BufferItem:
        return BufferItemVL(
            torch.tensor([1, 2, 3]),
            pixel_values=torch.full((sum(images), 2), mark) if images else None,
            image_grid_thws=torch.tensor([[1, 1, n] for n in images]) if images else None,
            pixel_values_videos=torch.full((sum(videos), 3), -mark) if videos else None,
            video_grid_thws=torch.tensor([[1, n, 1] for n in videos]) if videos else None,
            info={},
        )

    items = [
        make_item([2, 3], [], 1.0),
        make_item([], [], 2.0),
        make_item([1], [4, 5], 3.0),
        make_item([], [2], 4.0),
        make_item([6], [], 5.0),
    ]
    batch = make_experience_batch(items)
    assert batch.pixel_values[:, 0].tolist() == [1.0] * 5 + [3.0] + [5.0] * 6
    assert batch.image_grid_thws.tolist() == [[1, 1, 2], [1, 1, 3], [1, 1, 1], [1, 1, 6]]
    assert batch.pixel_values_videos[:, 0].tolist() == [-3.0] * 9 + [-4.0] * 2
    assert split_experience_batch(batch) == items
    assert split_experience_batch(batch.pack()) == items
    buffer = NaiveReplayBuffer(5, seed=0)
    buffer.append(batch)
    assert buffer.items == items
    sampled = split_experience_batch(buffer.sample(), unpad=True)
    for item in sampled:
        assert item in items


@pytest.mark.parametrize("large", [0, 1 << 30])
def test_items_with_tensors_of_their_own_lose_padding_in_either_way(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bytes are copied item by item, many onto one sheet: the items are the same, and the given ones unchanged."""
    monkeypatch.setattr("rollbook.compat.lightrft.replay_buffer.LARGE", large)
    items = [
        BufferItem(
            torch.tensor([0, 5, 6, 7, 0]),
            torch.tensor([0.1, 0.2, 0.0]),
            None,
            None,
            None,
            None,
            torch.tensor([0, 1, 1, 1, 0]),
            torch.tensor([True, True, False]),
            {"reward": reward, "parts": {"x": torch.tensor([1.0, 2.0])}},
            labels=["a"],
        )
        for reward in (0.5, 1.0)
    ]
    before = copy.deepcopy(items)
    bare = remove_padding_in_sequences(items)
    assert items == before
    assert [item.sequences.tolist() for item in bare] == [[5, 6, 7]] * 2
    assert [item.action_log_probs.tolist() for item in bare] == [items[0].action_log_probs[:2].tolist()] * 2
    assert same([item.info for item in bare], [item.info for item in items])
    assert bare[0].labels == ["a"] and bare[0].labels is not items[0].labels
    assert bare[0].sequences.untyped_storage().nbytes() == 24


@pytest.mark.parametrize("kind", [ExperienceBatch, BufferItem])
def test_constructors_take_every_field_by_name_and_by_place(kind: Any) -> None:
    """As a dataclass's do: handwritten ones must not accept more, or less."""
    names = [field.name for field in dataclasses.fields(kind) if field.name != "origin"]
    by_name = kind(**{name: i for i, name in enumerate(names)})
    assert [getattr(by_name, name) for name in names] == list(range(len(names)))
    by_place = kind(*range(len(names)))
    assert [getattr(by_place, name) for name in names] == list(range(len(names)))
    assert list(inspect.signature(kind).parameters) == [field.name for field in dataclasses.fields(kind)]
    with pytest.raises(TypeError, match="'reward'"):
        kind(*[None] * 9, reward=1)
    with pytest.raises(TypeError, match="multiple values"):
        kind(*[None] * 14, **{names[13]: None})
    with pytest.raises(TypeError, match="arguments"):
        kind(*[None] * 30)
