"""A vision-language model gets the same from a batch, padded or packed, as from each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rollbook import Experience
from rollbook.compat.lightrft.batch import BufferItem, BufferItemVL, ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import make_experience_batch
from tests import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.qwen_vl()


def sample(images: Sequence[tuple[int, int]], after: int, seed: int) -> BufferItem:
    """Text around some images of so many patches; tokens 0 and up are text."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [5 + seed]
    for height, width in images:
        tokens += [tiny.START, *[tiny.IMAGE] * (height * width // 4), tiny.END]
    tokens += torch.randint(1, 90, (after,), generator=draw).tolist()
    ids = torch.tensor(tokens)
    patches = sum(height * width for height, width in images)
    return BufferItemVL(
        sequences=ids,
        pixel_values=torch.randn(patches, 3 * 2 * 14 * 14, generator=draw) if images else None,
        image_grid_thws=torch.tensor([[1, h, w] for h, w in images]) if images else None,
        action_log_probs=torch.zeros(after),
        attention_mask=torch.ones_like(ids),
        action_mask=torch.ones(after, dtype=torch.bool),
        info={},
        media={"mm_token_type_ids": (ids == tiny.IMAGE).long()},
    )


def alone(model: Any, item: BufferItem) -> torch.Tensor:
    inputs = {"input_ids": item.sequences[None], "attention_mask": item.attention_mask[None]}
    if item.pixel_values is not None:
        inputs |= {"pixel_values": item.pixel_values, "image_grid_thw": item.image_grid_thws}
    inputs["mm_token_type_ids"] = item.media["mm_token_type_ids"][None]
    return called(model, inputs)[0]


def called(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    model.model.rope_deltas = None  # kept from call to call by the model
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("rope", [False, True], ids=["the model's positions", "given positions"])
@pytest.mark.parametrize("layout", ["left", "prompt_left_response_right", "packed"])
def test_each_sample_as_if_alone(model: Any, layout: str, rope: bool) -> None:
    items = [sample([(4, 4)], 3, 0), sample([], 5, 1), sample([(4, 8), (8, 4)], 2, 2), sample([(4, 4)], 6, 3)]
    expected = [alone(model, item) for item in items]
    packed = layout == "packed"
    batch: ExperienceBatch = make_experience_batch(items, packed, layout="left" if packed else layout)
    if packed and not rope:
        with pytest.raises(ValueError, match="get_rope_index: got None"):
            batch.model_inputs()
        return
    inputs = batch.model_inputs(get_rope_index=model.model.get_rope_index if rope else None)
    assert ("position_ids" in inputs) is rope
    logits = called(model, inputs)
    for i, (item, expected_logits) in enumerate(zip(items, expected, strict=True)):
        if packed:
            start = int(batch.cu_seqlens[i])
            actual = logits[0, start : start + len(item.sequences)]
        else:
            actual = logits[i][batch.attention_mask[i] != 0]
        torch.testing.assert_close(actual, expected_logits, rtol=1e-3, atol=1e-3, msg=f"sample {i}")


def test_text_alone_needs_nothing(model: Any) -> None:
    items = [sample([], 5, 1), sample([], 3, 2)]
    for packing in (False, True):
        inputs = make_experience_batch(items, packing).model_inputs()
        assert "position_ids" in inputs
        assert inputs["mm_token_type_ids"].shape == inputs["input_ids"].shape


def test_types_of_tokens_are_laid_out_as_the_tokens_are() -> None:
    records = [
        Experience(
            tokens=[1, tiny.IMAGE, 2, 3], prompt_length=3, multi_modal_inputs={"mm_token_type_ids": [[0, 1, 0]]}
        ),
        Experience(tokens=[4, 5]),
    ]
    padded, packed = from_experiences(records), from_experiences(records, packing_samples=True)
    assert padded.model_inputs()["mm_token_type_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert packed.model_inputs()["mm_token_type_ids"].tolist() == [[0, 1, 0, 0, 0, 0]]
    packed.media["mm_token_type_ids"][1] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"media\['mm_token_type_ids'\]\[1\]: got 3 entries, expected at most 2"):
        packed.model_inputs()


def test_types_are_derived_from_placeholders(model: Any) -> None:
    items = [sample([(4, 4)], 3, 0), sample([], 5, 1), sample([(4, 8), (8, 4)], 2, 2)]
    expected_logits = [alone(model, item) for item in items]
    for item in items[:2]:
        item.media = None
    items[2].media = {"mm_token_type_ids": items[2].media["mm_token_type_ids"][:9]}  # without those of its second image
    padded, packed = make_experience_batch(items), make_experience_batch(items, True)
    with pytest.raises(ValueError, match=r"'mm_token_type_ids'\]\[2\]: got 9 entries, expected one for each of"):
        padded.model_inputs()
    logits = called(model, padded.model_inputs(config=model.config))
    for i, expected in enumerate(expected_logits):
        actual = logits[i][padded.attention_mask[i] != 0]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, msg=f"sample {i}")
    logits = called(model, packed.model_inputs(get_rope_index=model.model.get_rope_index))[0]
    torch.testing.assert_close(logits, torch.cat(expected_logits), rtol=1e-3, atol=1e-3)
    del padded.media["mm_token_type_ids"]
    with pytest.raises(ValueError, match=r"'mm_token_type_ids'\]: got None with image or video grids"):
        padded.model_inputs()
    with pytest.raises(ValueError, match="LlamaConfig has no image_token_id or video_token_id to derive them from"):
        padded.model_inputs(config=LlamaConfig())
