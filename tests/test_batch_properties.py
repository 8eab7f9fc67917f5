"""Split, unpad, batch, pad and pack on random items: exact inverses, whatever the items hold and whichever lack what.

Presence and types are drawn as bits of one number for each item, tensor contents come from a seed: what shrinks is the
structure. The references here know nothing of sheets and columns: they are loops over samples and slots.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image

from rollbook import EID, Experience, Experiences
from rollbook.compat.lightrft.batch import BATCH_FIELDS, ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import (
    BufferItem,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from rollbook.core.fields import FIELDS
from rollbook.core.wire import decode, encode
from tests.strategies import SEEDS, exact, make_tensor, record_lists

ITEM_FIELDS = [f.name for f in dataclasses.fields(BufferItem)]
REQUIRED = dict.fromkeys([*list(BATCH_FIELDS)[:8], "info"])
"""What the constructors of both ask for, as `None`."""
BATCH_NAMES = [f.name for f in dataclasses.fields(ExperienceBatch) if f.name != "origin"]
MEDIA = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws"]
LISTS = {"labels": "labels", "references": "references", "raw_images": "raw_images", "ids": "eid"}
LAYOUTS = ["left", "prompt_left_response_right", "packed"]


def laid_out(items: Sequence[BufferItem], layout: str, pad_token_id: int = 0) -> ExperienceBatch:
    if layout == "packed":
        return make_experience_batch(items, packing_samples=True)
    return make_experience_batch(items, pad_token_id=pad_token_id, layout=layout)


# --- comparing ------------------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """`exact`, for what batches hold; the one thing forgiven beside NaNs is the order of a dict's keys."""
    if isinstance(value, dict):
        return ("dict", frozenset((exact(key), frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("tuple" if isinstance(value, tuple) else "list", tuple(map(frozen, value)))
    if isinstance(value, (frozenset, torch.dtype)):
        return value
    if isinstance(value, torch.Tensor) and "float8" in str(value.dtype):
        return (str(value.dtype), exact(value.float()))  # its NaNs differ, too
    if isinstance(value, Image.Image):
        return ("picture", value.mode, value.size, value.tobytes())
    if isinstance(value, BufferItem):
        return ("item", tuple((name, frozen(getattr(value, name))) for name in ITEM_FIELDS))
    if isinstance(value, ExperienceBatch):
        return ("batch", tuple((name, frozen(getattr(value, name))) for name in BATCH_NAMES))
    return exact(value)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bit for bit; of items and batches, says which field is not."""
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for left, right in zip(actual, expected, strict=True):
            assert_same(left, right)
        return
    for kind, names in ((BufferItem, ITEM_FIELDS), (ExperienceBatch, BATCH_NAMES)):
        if isinstance(actual, kind) and isinstance(expected, kind):
            for name in names:
                left, right = getattr(actual, name), getattr(expected, name)
                assert frozen(left) == frozen(right), f"{name}: {left!r}, expected {right!r}"
            return
    assert frozen(actual) == frozen(expected), f"{actual!r}, expected {expected!r}"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a batch, an item, or any nest."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (BufferItem, ExperienceBatch)):
        names = ITEM_FIELDS if isinstance(value, BufferItem) else BATCH_NAMES
        for name in names:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


# --- items ----------------------------------------------------------------------------------------------------------

_FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
_TYPES: dict[str, list[torch.dtype]] = {
    "sequences": [torch.int64, torch.int32, torch.uint8, torch.int16],
    "attention_mask": [torch.int64, torch.bool, torch.int32, torch.uint8],
    "action_mask": [torch.bool, torch.int64, torch.int32, torch.bool],
    "extras.policy_versions": [torch.int32, torch.int64, torch.int16, torch.int32],
    "extras.routed_experts": [torch.int16, torch.uint8, torch.int32, torch.int16],
}
_EXTRAS = {"loss_weights": (), "policy_versions": (), "routed_experts": (2, 2), "of my own": (3,), "empty": (0,)}
_LAYOUTS = ["plain", "plain", "strided", "offset", "expanded", "leaf"]
_OPTIONAL = [name for name in BATCH_FIELDS if name != "sequences"] + [f"extras.{name}" for name in _EXTRAS]
_LABELS: list[Any] = ["gsm8k", {"answer": [1, 2]}, 7, ["a", "b"], ("漢", 1)]
_RAW: list[Callable[[int], Any]] = [
    lambda seed: np.full((2, 2, 3), seed % 256, dtype=np.uint8),
    lambda seed: Image.new("RGB", (2, 3), (seed % 256, 0, 0)),
    lambda seed: bytes([seed % 256, 1, 2]),
    lambda seed: f"/images/{seed}.png",
    lambda seed: None,
]


def _info_kinds() -> dict[str, st.SearchStrategy[Any]]:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float8_e4m3fn]

    def tensors(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
        return st.builds(make_tensor, st.sampled_from(dtypes), st.just(shape), SEEDS)

    numbers = st.one_of(
        st.floats(),
        st.integers(-5, 5),
        st.booleans(),
        st.sampled_from([2**70, -(2**63), 2**63, float("nan"), -0.0, 1e300, 16777217]),
        st.integers(0, 3).map([np.float64(0.1), np.int32(7), np.float32("nan"), np.bool_(True)].__getitem__),
    )
    return {
        "floats": st.floats(width=32),
        "wide floats": st.floats(),
        "ints": st.integers(-(2**40), 2**40),
        "bools": st.booleans(),
        "numbers": numbers,
        "vectors": st.builds(make_tensor, st.just(torch.float32), st.just((2,)), SEEDS),
        "ones": tensors((1,)),
        "scalars": tensors(()),
        "tensors": st.sampled_from([(), (1,), (2,), (0,), (2, 2)]).flatmap(tensors),
        "texts": st.sampled_from(["", "a", "漢"]),
        "numpy texts": st.just(np.str_("漢")),
        "numpy times": st.integers(0, 9).map(lambda n: np.timedelta64(n, "s")),
        "numpy halves": st.integers(0, 9).map(np.float16),
        "numpy wide": st.integers(0, 9).map(np.longdouble),
        "nothing": st.none(),
        "anything": st.one_of(
            numbers, st.none(), st.just("x"), st.just({}), st.just([1, 2]), st.just((1, {"a": 2})), tensors((2,))
        ),
    }


INFO_KINDS = _info_kinds()
_PLAN = st.sampled_from(sorted(INFO_KINDS))
INFO_PLANS = st.dictionaries(
    st.sampled_from(["reward", "image_num?", 3, "a", "b"]),
    st.one_of(_PLAN, st.dictionaries(st.sampled_from("xy"), st.one_of(_PLAN, st.just({"deep": "floats"})), max_size=2)),
    max_size=4,
)
"""By key what kind of value the items have there, or by key again."""


def _drawn_info(draw: st.DrawFn, plan: dict[Any, Any], gaps: bool) -> dict[Any, Any]:
    info: dict[Any, Any] = {}
    for key, kind in plan.items():
        if gaps and draw(st.integers(0, 3)) == 0:
            continue
        info[key] = _drawn_info(draw, kind, gaps) if isinstance(kind, dict) else draw(INFO_KINDS[kind])
    return info


def _media(seed: int, count: int, media: int, columns: dict[str, Any]) -> None:
    """`count` images of different sizes; of videos and sound, what `media` says."""
    rng = np.random.default_rng(seed)
    for bit, (pixels, grids) in ((0, MEDIA[:2]), (2, MEDIA[2:])):
        if media >> bit & 1 and (count or seed % 2):  # with no image, an empty tensor or none
            sizes = rng.integers(1, 3, (count, 3))
            columns[grids] = torch.from_numpy(sizes)
            if media >> bit & 2:
                columns[pixels] = make_tensor(torch.float32, (int(sizes.prod(1).sum()), 2), seed, "plain")
    if media & 16:
        columns["media"] = {"sound": make_tensor(torch.float32, (count, 3), seed + 1)}
    if media & 32:
        images = [_RAW[(seed + i) % len(_RAW)](seed + i) for i in range(count)]
        columns["raw_images"] = images[0] if count == 1 and seed % 2 else images


def make_item(
    length: int, response: int, present: int, kinds: int, seed: int, info: Any, images: int = 0, media: int = 0
) -> BufferItem:
    """An item without padding: bits of `present` say which fields it has, digits of `kinds` of which type."""
    columns: dict[str, Any] = dict(REQUIRED)
    extras: dict[str, torch.Tensor] = {}
    for i, name in enumerate(["sequences", *_OPTIONAL]):
        if i and not present >> (i - 1) & 1:
            continue
        dtype = _TYPES.get(name, _FLOATS)[kinds >> (2 * i) & 3]
        size = length if name in ("sequences", "attention_mask") else response
        shape = (size, *_EXTRAS.get(name.removeprefix("extras."), ()))
        layout = _LAYOUTS[(seed + i) % len(_LAYOUTS)]
        if name.endswith("_mask"):
            rng = np.random.default_rng(seed + i)
            ones = rng.integers(0, 2, size) if seed % 2 else np.ones(size, dtype=np.int64)
            if name == "attention_mask" and size:
                ones[[0, -1]] = 1  # what is not attended there would be padding
            value = torch.from_numpy(ones).to(dtype)
        else:
            value = make_tensor(dtype, shape, seed + i, layout)
        if name.startswith("extras."):
            extras[name.removeprefix("extras.")] = value
        else:
            columns[name] = value
    rest = present >> len(_OPTIONAL)
    columns["extras"] = extras or None
    columns["labels"] = _LABELS[seed % len(_LABELS)] if rest & 1 else None
    columns["references"] = f"reference {seed}" if rest & 2 else None
    columns["eid"] = EID(task=seed, suffix="s") if rest & 4 else None
    columns["info"] = info
    _media(seed, images, media, columns)
    return BufferItem(**columns)


_BITS = len(_OPTIONAL) + 3
_MASKS = sum(1 << i for i, name in enumerate(_OPTIONAL) if name.endswith("_mask"))
_EXTRA_BITS = sum(1 << i for i, name in enumerate(_OPTIONAL) if name.startswith("extras."))


@st.composite
def item_lists(draw: st.DrawFn, max_size: int = 5) -> list[BufferItem]:
    """Items that each have fields and types of their own, or all the same, or that are of the plainest kind: masks and
    text alone, as most are."""
    sort = draw(st.sampled_from(["each", "alike", "plain"]))
    alike, plain = sort != "each", sort == "plain"
    presence = st.integers(0, 2**_BITS - 1)
    types = st.integers(0, 4 ** (len(_OPTIONAL) + 1) - 1)
    present, kinds = draw(presence), draw(st.one_of(st.just(0), types))
    present = (present | _MASKS) & ~_EXTRA_BITS if plain else present
    shown = 0 if plain else draw(st.one_of(st.just(0), st.integers(0, 63)))
    plan = draw(INFO_PLANS)
    items = []
    for _ in range(draw(st.integers(1, max_size))):
        length = draw(st.integers(0, 12))
        items.append(
            make_item(
                length,
                draw(st.integers(0, length)),
                present if alike else draw(presence),
                kinds if alike else draw(types),
                draw(SEEDS),
                None if not alike and draw(st.integers(0, 5)) == 0 else _drawn_info(draw, plan, not alike),
                draw(st.integers(0, 3)) if shown else 0,
                shown if alike or not shown else shown & draw(st.integers(0, 63)),
            )
        )
    if len(items) > 1 and draw(st.integers(0, 5)) == 0:
        items.append(items[0])
    return items


def plain_item(length: int, response: int, **changes: Any) -> BufferItem:
    """An item with tokens and log-probs, and what the test is about."""
    columns = REQUIRED | {"info": {}}
    columns |= {"sequences": torch.arange(1, length + 1), "action_log_probs": torch.arange(1.0, response + 1)}
    return BufferItem(**columns | changes)


# --- the reference --------------------------------------------------------------------------------------------------


def length_of(item: BufferItem) -> int:
    return len(item.sequences)


def response_of(item: BufferItem) -> int:
    fields = [getattr(item, name) for name, field in BATCH_FIELDS.items() if field.axis == "response"]
    return next((len(value) for value in (*fields, *(item.extras or {}).values()) if value is not None), 0)


class CannotJoin(Exception):
    """Rows that no one tensor holds exactly."""


_MANTISSA = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def joined_type(dtypes: set[torch.dtype]) -> torch.dtype:
    """The one type, else the narrowest integer, else float32 or float64, that holds every value of all exactly."""
    if len(dtypes) == 1:
        return next(iter(dtypes))

    def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
        if narrow == torch.bool:
            return True
        if narrow.is_floating_point:
            return wide.is_floating_point and torch.finfo(wide).bits >= torch.finfo(narrow).bits
        info = torch.iinfo(narrow)
        if wide.is_floating_point:
            return info.bits - (info.min < 0) <= _MANTISSA[str(wide).removeprefix("torch.")]
        return torch.iinfo(wide).min <= info.min and torch.iinfo(wide).max >= info.max

    floating = any(dtype.is_floating_point for dtype in dtypes)
    integers = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64]
    for wide in [torch.float32, torch.float64] if floating else [*integers, torch.int64]:
        if all(holds(wide, narrow) for narrow in dtypes):
            return wide
    raise CannotJoin(dtypes)


def places(items: Sequence[BufferItem], layout: str) -> tuple[int, int, list[int], list[int]]:
    """The widths of both axes, and in which column each row begins on each."""
    lengths, responses = [length_of(item) for item in items], [response_of(item) for item in items]
    slots = max(responses)
    if layout == "left":
        width = max(lengths)
        return width, slots, [width - n for n in lengths], [slots - n for n in responses]
    prompts = [n - r for n, r in zip(lengths, responses, strict=True)]
    return max(prompts) + slots, slots, [max(prompts) - p for p in prompts], [0] * len(items)


def reference_matrix(name: str, rows: list[Any], items: Sequence[BufferItem], layout: str, pad: int) -> Any:
    """A field of the padded batch, slot by slot; a mask that nobody has is implied where there is padding."""
    on_tokens = name in ("sequences", "attention_mask")
    width, slots, token_starts, slot_starts = places(items, layout)
    size, starts = (width, token_starts) if on_tokens else (slots, slot_starts)
    lengths = [length_of(item) if on_tokens else response_of(item) for item in items]
    present = [row for row in rows if row is not None]
    implied = 1 if name in ("attention_mask", "action_mask") else 0
    if not present:
        if not implied or all(length == size for length in lengths):
            return None
        dtype, trailing = torch.int64 if on_tokens else torch.bool, torch.Size()
    else:
        dtype, trailing = joined_type({row.dtype for row in present}), present[0].shape[1:]
        if any(row.shape[1:] != trailing for row in present):
            raise CannotJoin(name)
    out = torch.full((len(items), size, *trailing), pad if name == "sequences" else 0, dtype=dtype)
    for i, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
        for j in range(length):
            out[i, start + j] = implied if row is None else row[j].detach().to(dtype)
    return out


def token_rows(items: Sequence[BufferItem]) -> dict[str, list[Any]]:
    """The items' per-token fields by name, extras as `extras.NAME`."""
    rows = {name: [getattr(item, name) for item in items] for name in BATCH_FIELDS}
    names = dict.fromkeys(name for item in items for name in item.extras or ())
    return rows | {f"extras.{name}": [(item.extras or {}).get(name) for item in items] for name in names}


def field_of(batch: ExperienceBatch, name: str) -> Any:
    first, _, rest = name.partition(".")
    return getattr(batch, first) if not rest else (batch.extras or {}).get(rest)


def assert_reference(batch: ExperienceBatch, items: Sequence[BufferItem], layout: str, pad: int) -> None:
    """The batch is what the loops make of the items: every slot of every field, lists, media, info."""
    for name, rows in token_rows(items).items():
        actual = field_of(batch, name)
        if layout != "packed":
            expected = reference_matrix(name, rows, items, layout, pad)
            assert frozen(actual) == frozen(expected), f"{name}: {actual!r}, expected {expected!r}"
            continue
        if all(row is None for row in rows):
            assert actual is None or all(bool((row == 1).all()) for row in actual), name
            continue
        matrix = reference_matrix(name, rows, items, "left", pad)
        lengths = [length_of(i) if name in ("sequences", "attention_mask") else response_of(i) for i in items]
        expected_rows = [row[len(row) - length :] for row, length in zip(matrix, lengths, strict=True)]
        assert_same(list(actual), expected_rows)
        assert_same(actual.values, torch.cat(expected_rows))
    assert set(batch.extras or ()) == {name for item in items for name in item.extras or ()}
    for name, item_name in LISTS.items():
        values = [getattr(item, item_name) for item in items]
        assert_same(getattr(batch, name), None if all(value is None for value in values) else values)
    for name in MEDIA:
        parts = [getattr(item, name) for item in items if getattr(item, name) is not None]
        assert_same(getattr(batch, name), torch.cat(parts) if parts else None)
    names = dict.fromkeys(name for item in items for name in item.media or ())
    media = {name: [(item.media or {}).get(name) for item in items] for name in names}
    assert_same(batch.media, media or None)
    infos = [dict(item.info or {}) for item in items]
    for grids, number in (("image_grid_thws", "image_num"), ("video_grid_thws", "video_num")):
        grids_of_items = [getattr(item, grids) for item in items]
        if any(grid is not None for grid in grids_of_items):
            for info, grid in zip(infos, grids_of_items, strict=True):
                info[number] = 0 if grid is None else len(grid) if grid.dim() == 2 else 1
    assert_info(batch.info, infos)


_MISSING = object()


def findable(value: Any) -> bool:
    """Whether every key of a nest of dicts equals itself when it is made anew."""
    if not isinstance(value, dict):
        return True
    return all(pickle.loads(pickle.dumps(key)) == key and findable(content) for key, content in value.items())


def assert_info(info: dict[Any, Any], rows: list[dict[Any, Any]]) -> None:
    """Entry i of every key is sample i's: as it was in a list, to the tensor's precision in a tensor."""
    assert set(info) == {key for row in rows for key in row}
    for key, column in info.items():
        values = [row.get(key, _MISSING) for row in rows]
        present = [value for value in values if value is not _MISSING]
        if isinstance(column, dict):
            assert all(isinstance(value, dict) for value in present)
            assert_info(column, [{} if value is _MISSING else value for value in values])
        elif isinstance(column, torch.Tensor):
            assert len(present) == len(rows) == len(column)
            for entry, value in zip(column, values, strict=True):
                if not isinstance(value, torch.Tensor):
                    number = value.item() if isinstance(value, np.generic) else value
                    value = torch.tensor(number, dtype=column.dtype).reshape(entry.shape)
                assert frozen(entry) == frozen(value), f"{key}: {entry!r}, expected {value!r}"
        else:
            assert_same(column, [None if value is _MISSING else value for value in values])


# --- items to batches and back --------------------------------------------------------------------------------------


@example(items=[plain_item(3, 2), plain_item(2, 1)], layout="left", pad=9)
@example(items=[plain_item(4, 1), plain_item(4, 3)], layout="prompt_left_response_right", pad=9)
@given(items=item_lists(), layout=st.sampled_from(LAYOUTS), pad=st.sampled_from([0, 1, 7]))
def test_batching_and_back_is_the_identity(items: list[BufferItem], layout: str, pad: int) -> None:
    before = frozen(items)
    batch = laid_out(items, layout, pad)
    assert_reference(batch, items, layout, pad)
    split = split_experience_batch(batch)
    assert_same(remove_padding_in_sequences(split), items)
    assert_same(split_experience_batch(batch, unpad=True), items)
    assert remove_padding_in_sequences(split) == split_experience_batch(batch, unpad=True) == items
    assert frozen(items) == before, "batching leaves the items alone"


@example(items=[plain_item(3, 2), plain_item(2, 1)], layout="left", pad=9)
@given(items=item_lists(), layout=st.sampled_from(LAYOUTS), pad=st.sampled_from([0, 1, 7]))
def test_splitting_and_back_is_the_identity(items: list[BufferItem], layout: str, pad: int) -> None:
    batch = laid_out(items, layout, pad)
    for rows in (
        split_experience_batch(batch, unpad=True),
        remove_padding_in_sequences(split_experience_batch(batch)),
        [item.detach() for item in split_experience_batch(batch, unpad=True)],
    ):
        again = laid_out(rows, layout, pad)
        assert_same(again, batch)
        assert again == batch


@given(items=item_lists(), layout=st.sampled_from(LAYOUTS[:2]))
def test_a_padded_split_batched_again_is_the_batch(items: list[BufferItem], layout: str) -> None:
    batch = laid_out(items, layout)
    again = make_experience_batch(split_experience_batch(batch))
    for name in (*BATCH_FIELDS, "extras", "info", *LISTS, *MEDIA, "media"):
        assert frozen(getattr(again, name)) == frozen(getattr(batch, name)), name
    assert_same(split_experience_batch(again, unpad=True), items)


@given(items=item_lists(), layout=st.sampled_from(LAYOUTS), random=st.randoms(use_true_random=False))
def test_order_changes_nothing_but_order(items: list[BufferItem], layout: str, random: Any) -> None:
    order = list(range(len(items)))
    random.shuffle(order)
    batch, other = laid_out(items, layout), laid_out([items[i] for i in order], layout)

    def permuted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[order]
        if isinstance(value, dict):
            return {key: permuted(item) for key, item in value.items()}
        return None if value is None else [value[i] for i in order]

    for name in (*BATCH_FIELDS, "extras", "info", "media", *LISTS):
        actual, expected = getattr(other, name), permuted(getattr(batch, name))
        assert frozen(actual) == frozen(expected), f"{name}: {actual!r}, expected {expected!r}"
    assert_same(split_experience_batch(other, unpad=True), [items[i] for i in order])
    # Rows of one split, in another order and from several batches, are batched from where they lie.
    lying = split_experience_batch(batch, unpad=True)
    assert_same(laid_out([lying[i] for i in order], layout), other)
    first, second = laid_out(items[:1], layout), laid_out(items[1:] or items, layout)
    several = split_experience_batch(second, unpad=True) + split_experience_batch(first, unpad=True)
    assert_same(laid_out(several, layout), laid_out([*(items[1:] or items), items[0]], layout))


@example(items=[plain_item(4, 1), plain_item(4, 3)], layout="prompt_left_response_right", pad=9)
@given(items=item_lists(), layout=st.sampled_from(LAYOUTS[:2]), pad=st.sampled_from([0, 1, 7]))
def test_packed_and_padded_are_one_thing(items: list[BufferItem], layout: str, pad: int) -> None:
    padded, packed = laid_out(items, layout, pad), laid_out(items, "packed")
    assert_reference(packed, items, "packed", pad)
    assert_same(packed.pad(pad, layout), padded)
    assert packed.pad(pad, layout).pack() == packed
    assert padded.pack().pad(pad, layout) == padded
    for other in LAYOUTS[:2]:
        assert_same(padded.pad(pad, other), packed.pad(pad, other))
    assert_same(remove_padding_in_sequences(split_experience_batch(padded.pack())), items)
    assert packed.cu_seqlens.tolist() == np.cumsum([0, *map(length_of, items)]).tolist()
    assert packed.action_cu_seqlens.tolist() == np.cumsum([0, *map(response_of, items)]).tolist()
    assert packed.position_ids.tolist() == [[i for item in items for i in range(length_of(item))]]
    assert packed.max_seqlen == max(map(length_of, items))


# --- batches that somebody else made --------------------------------------------------------------------------------


def _mask(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Ones and zeros at random, or a run of ones in each row that has the last column but one, or with a hole."""
    if kind == "noise" or shape[1] < 2:
        return rng.integers(0, 2, shape)
    column, (count, width) = np.arange(shape[1]), shape
    first, last = rng.integers(0, width - 1, (count, 1)), rng.integers(width - 1, width + 1, (count, 1))
    mask = (column >= first) & (column < last)
    if kind == "holes":
        mask &= rng.random(shape) < 0.8
    return mask.astype(np.int64)


@st.composite
def padded_batches(draw: st.DrawFn) -> ExperienceBatch:
    """A batch from its constructor alone: any mask, padding on any side, `info` of tensors."""
    count, width = draw(st.integers(0, 4)), draw(st.integers(0, 12))
    slots = draw(st.integers(0, width))
    seed, present, kinds = draw(SEEDS), draw(st.integers(0, 2**_BITS - 1)), draw(st.integers(0, 4**14))
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = dict(REQUIRED)
    extras: dict[str, Any] = {}
    for i, name in enumerate(["sequences", *_OPTIONAL]):
        if i and not present >> (i - 1) & 1:
            continue
        dtype = _TYPES.get(name, _FLOATS)[kinds >> (2 * i) & 3]
        size = width if name in ("sequences", "attention_mask") else slots
        shape = (count, size, *_EXTRAS.get(name.removeprefix("extras."), ()))
        if name.endswith("_mask"):
            value = torch.from_numpy(_mask(rng, shape, ["noise", "runs", "holes"][seed % 3])).to(dtype)
            if name == "attention_mask" and count and seed % 5 == 0:
                value[seed % count] = 0  # nothing of this row is attended
        else:
            value = make_tensor(dtype, shape, seed + i, _LAYOUTS[(seed + i) % 5])
        if name.startswith("extras."):
            extras[name.removeprefix("extras.")] = value
        else:
            columns[name] = value
    columns["extras"] = extras or None
    rest = present >> len(_OPTIONAL)
    columns["labels"] = [_LABELS[(seed + i) % len(_LABELS)] for i in range(count)] if rest & 1 else None
    columns["ids"] = [EID(task=i, suffix="s") for i in range(count)] if rest & 4 else None
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float8_e5m2]
    tails = [(), (), (1,), (2,), (1, 1), (0,)]
    columns["info"] = {
        key: {"deep": value} if nested else value
        for key, (dtype, tail, nested) in draw(
            st.dictionaries(
                st.sampled_from("abcd"),
                st.tuples(st.sampled_from(dtypes), st.sampled_from(tails), st.booleans()),
                max_size=4,
            )
        ).items()
        for value in [make_tensor(dtype, (count, *tail), seed)]
    }
    return ExperienceBatch(**columns)


def attended(batch: ExperienceBatch, i: int) -> tuple[int, int]:
    """From which column to which row i is attended."""
    width = batch.sequences.shape[1]
    if batch.attention_mask is None:
        return 0, width
    places = [j for j in range(width) if batch.attention_mask[i, j]]
    return (places[0], places[-1] + 1) if places else (width, width)


@given(batch=padded_batches())
def test_any_padded_batch_splits_and_unpads(batch: ExperienceBatch) -> None:
    before = copy.deepcopy(batch)
    wide, bare = split_experience_batch(batch), split_experience_batch(batch, unpad=True)
    assert_same(remove_padding_in_sequences(wide), bare)
    assert remove_padding_in_sequences(wide) == bare
    for i, (item, unpadded) in enumerate(zip(wide, bare, strict=True)):
        start, stop = attended(batch, i)
        for name, value in token_rows([item]).items():
            column = field_of(batch, name)
            assert_same(value[0], None if column is None else column[i].detach())
            if column is None:
                continue
            on_tokens = name in ("sequences", "attention_mask")
            offset = 0 if on_tokens else batch.sequences.shape[1] - column.shape[1]
            inside = [j for j in range(column.shape[1]) if start <= j + offset < stop]
            assert_same(token_rows([unpadded])[name][0], column[i, inside].detach())
        assert item.labels == unpadded.labels == (None if batch.labels is None else batch.labels[i])
        assert item.info.keys() == unpadded.info.keys() == batch.info.keys()
    assert_same(batch, before)
    if wide:
        again = make_experience_batch(wide)
        assert_same(again, batch)
        assert make_experience_batch(wide) == batch
        pads = make_experience_batch(bare, pad_token_id=3)
        assert_same(pads.info, batch.info)
        assert_same(split_experience_batch(pads, unpad=True), bare)
        assert_reference(pads, [item.detach() for item in bare], "left", 3)
        assert batch.pad(3) == pads
        assert batch.pack().pad(3) == pads


# --- memory and devices ---------------------------------------------------------------------------------------------


@given(items=item_lists(), layout=st.sampled_from(LAYOUTS), unpad=st.booleans())
def test_items_hold_what_they_show(items: list[BufferItem], layout: str, unpad: bool) -> None:
    batch = laid_out(items, layout)
    split = split_experience_batch(batch, unpad=unpad)
    expected = frozen(split_experience_batch(batch, unpad=unpad))
    for tensor in tensors_in(batch):
        if tensor.numel() and tensor.dtype not in (torch.float8_e4m3fn,):
            tensor.detach().zero_()
    for item in split:
        for name in (*BATCH_FIELDS, "extras", *MEDIA):
            for tensor in tensors_in(getattr(item, name)):
                payload = tensor.numel() * tensor.element_size()
                assert tensor.untyped_storage().nbytes() == payload, name
                assert not tensor.requires_grad
    assert frozen(split) == expected, "nothing of the batch is shared"


@given(items=item_lists(), layout=st.sampled_from(LAYOUTS))
def test_devices_reach_every_tensor(items: list[BufferItem], layout: str) -> None:
    batch = laid_out(items, layout)
    for holder in (batch, *split_experience_batch(batch, unpad=True), *map(copy.deepcopy, items)):
        count = len(list(tensors_in(holder)))
        assert holder.to_device("meta") is holder
        tensors = list(tensors_in(holder))
        assert len(tensors) == count >= 1
        assert all(tensor.is_meta for tensor in tensors)


# --- records --------------------------------------------------------------------------------------------------------

_KINDS = ("single_turn", "multi_turn", "single_turn cut", "multi_turn cut")


def item_of(row: Experience, recomputed: bool) -> BufferItem:
    """A record as an item; `recomputed`: every record has `old_logprobs`, which are the ones to train on then."""
    tokens = len(row.tokens)
    is_cut = row.truncate_status == "prompt_truncated"
    response = len(row.logprobs) if is_cut else tokens - row.prompt_length
    if response > tokens:
        raise CannotJoin("more log-probs than tokens")
    extras = {}
    used = {"returns", "advantages", "action_mask", "old_logprobs" if recomputed else "logprobs"}
    used |= {"ref_logprobs", "entropy", "values"}
    for name, field in FIELDS.items():
        value = getattr(row, name)
        if field.kind == "tensor" and field.axis == "response" and name not in used and value is not None:
            extras[name] = torch.full((response,), value, dtype=torch.int32) if isinstance(value, int) else value
    media = dict(row.multi_modal_inputs or {})
    mask = row.action_mask
    if not row.prompt_length and response:  # no model predicts the first token
        mask = torch.ones(response, dtype=torch.bool) if mask is None else mask.detach().clone()
        mask[0] = 0
    actions = response if mask is None else int((mask != 0).sum())
    info = {"response_length": float(actions), "total_length": float(tokens), "info": row.info, "metrics": row.metrics}
    return plain_item(
        0,
        0,
        sequences=row.tokens.long(),
        action_log_probs=row.old_logprobs if recomputed else row.logprobs,
        base_action_log_probs=row.ref_logprobs,
        values=row.values,
        action_entropy=row.entropy,
        returns=row.returns,
        advantages=row.advantages,
        action_mask=mask,
        attention_mask=torch.ones(tokens, dtype=torch.int64),
        extras=extras or None,
        pixel_values=media.pop("pixel_values", None),
        image_grid_thws=media.pop("image_grid_thw", None),
        media=media or None,
        eid=row.eid,
        info=info | ({} if row.reward is None else {"reward": row.reward}),
    )


@st.composite
def batch_records(draw: st.DrawFn) -> list[Experience]:
    """Records of a batch: no pairs, media that belong together, no wish for `info` columns."""
    rows = []
    for row in draw(record_lists(max_size=4, kinds=_KINDS)):
        media: dict[str, torch.Tensor] | None = None
        if row.multi_modal_inputs:
            rows_of_pixels = draw(st.integers(0, 3))
            media = {
                "pixel_values": torch.full((rows_of_pixels, 2), 1.5),
                "image_grid_thw": torch.ones(rows_of_pixels, 3, dtype=torch.int64),
                "sound": torch.zeros(draw(st.integers(0, 2)), 2),
            }
        rows.append(row.replace(custom_fields=[], multi_modal_inputs=media))
    return rows


@given(rows=batch_records().filter(bool), layout=st.sampled_from(LAYOUTS), pad=st.sampled_from([0, 1, 7]))
def test_records_to_a_batch(rows: list[Experience], layout: str, pad: int) -> None:
    # A key with a NaN in it is found by no look-up once it was written and read.
    assume(all(findable(row.info) and findable(row.metrics) for row in rows))
    options: dict[str, Any] = {"packing_samples": True} if layout == "packed" else {"layout": layout}
    recomputed = all(row.old_logprobs is not None for row in rows)
    try:
        items = [item_of(row, recomputed) for row in rows]
        for name, values in token_rows(items).items():
            reference_matrix(name, values, items, layout, pad)
    except CannotJoin:
        for source in (rows, Experiences(rows)):
            with pytest.raises(ValueError):
                from_experiences(source, pad_token_id=pad, **options)
        return
    for name in ("info", "metrics"):
        if not any(item.info[name] for item in items):
            for item in items:
                del item.info[name]
    for source in (rows, Experiences(rows), decode(encode(Experiences(rows)))):
        batch = from_experiences(source, pad_token_id=pad, **options)
        assert_reference(batch, items, layout, pad)
        for row, item in zip(rows, split_experience_batch(batch, unpad=True), strict=True):
            assert_same(item.sequences, row.tokens.detach().long())
            assert item.eid == row.eid
            assert item.info.get("reward", None) == row.reward or row.reward != row.reward
    before = frozen([row.tokens for row in rows])
    for tensor in tensors_in(batch):
        tensor.detach().zero_()
    assert frozen([row.tokens for row in rows]) == before, "the batch owns its memory"


# --- losses ---------------------------------------------------------------------------------------------------------


def trained(items: Sequence[BufferItem], layout: str) -> tuple[float, torch.Tensor]:
    """The loss of a tiny model over the items' actions, a mean over tokens, and its gradient."""
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(2, 20).requires_grad_()
    batch = laid_out(items, layout, pad_token_id=19)
    packed = layout == "packed"

    def flat(value: Any) -> torch.Tensor:
        return value.values if packed else value

    tokens = flat(batch.sequences).unsqueeze(0) if packed else batch.sequences
    # What this model says at a token depends on the token and on how far into the sample it is.
    logprobs = -torch.nn.functional.softplus(weight[0][tokens] + weight[1][batch.position_ids.clamp(max=19)])
    spoken = batch.at_actions(logprobs)
    mask = flat(batch.action_mask).bool()
    ratio = (spoken - flat(batch.action_log_probs)).exp()
    losses = -torch.minimum(ratio * flat(batch.advantages), ratio.clamp(0.8, 1.2) * flat(batch.advantages))
    loss = torch.where(mask, losses, 0).sum() / mask.sum().clamp(min=1)
    loss.backward()
    return loss.item(), weight.grad


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4),
    empty=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3),
    seed=SEEDS,
    layout=st.sampled_from(LAYOUTS),
    random=st.randoms(use_true_random=False),
)
def test_rows_without_actions_change_no_loss(
    lengths: list[tuple[int, int]], empty: list[tuple[int, int]], seed: int, layout: str, random: Any
) -> None:
    """Filtered rows (all False) and empty ones: loss and gradient are finite, and those of training without them."""
    rng = np.random.default_rng(seed)

    def item(prompt: int, response: int, has_actions: bool) -> BufferItem:
        return plain_item(
            0,
            0,
            sequences=torch.from_numpy(rng.integers(0, 19, prompt + response)),
            action_log_probs=torch.from_numpy(rng.normal(-1, 0.5, response)),
            advantages=torch.from_numpy(rng.normal(0, 1, response)),
            attention_mask=torch.ones(prompt + response, dtype=torch.int64),
            action_mask=torch.from_numpy(rng.integers(0, 2, response) > 0) & torch.tensor(has_actions),
        )

    full = [item(prompt, response, True) for prompt, response in lengths]
    mixed = full + [item(prompt, response, False) for prompt, response in empty]
    random.shuffle(mixed)
    loss, gradient = trained(full, layout)
    other, other_gradient = trained(mixed, layout)
    assert np.isfinite(other)
    assert other == pytest.approx(loss, abs=1e-12)
    assert torch.isfinite(other_gradient).all()
    torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-12)
    for also in LAYOUTS:
        assert trained(full, also)[0] == pytest.approx(loss, abs=1e-12), "every layout trains alike"
