"""Vision-language models: rows with no, one and several images in one pass score as each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollbook import Experience
from rollbook.batch import from_experiences
from rollbook.models import Actor, Critic, policy_log_probs, values
from rollbook.models.forward import Rowwise
from tests import tiny
from tests.models import zoo


def llava_records() -> list[Experience]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for images, prompt, response in ((1, 3, 4), (0, 2, 3), (2, 1, 5), (0, 4, 1), (1, 2, 2)):
        parts = [torch.randint(9, 260, (prompt,), generator=draw), torch.full((4 * images,), 8)]
        tokens = torch.cat([*parts, torch.randint(9, 260, (response,), generator=draw)])
        media = {"pixel_values": torch.randn(images, 3, 16, 16, generator=draw)} if images else None
        made.append(Experience(tokens=tokens, prompt_length=prompt + 4 * images, multi_modal_inputs=media))
    return made


def qwen_records() -> list[Experience]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for shapes, response in (([(4, 4)], 3), ([], 5), ([(4, 8), (8, 4)], 2), ([(4, 4)], 6)):
        tokens = [5 + response]
        for height, width in shapes:
            tokens += [tiny.START, *[tiny.IMAGE] * (height * width // 4), tiny.END]
        tokens.append(7)
        prompt = len(tokens)
        tokens += torch.randint(9, 90, (response,), generator=draw).tolist()
        media: dict[str, Any] = {"mm_token_type_ids": (torch.tensor(tokens) == tiny.IMAGE).long()[None]}
        if shapes:
            patches = sum(height * width for height, width in shapes)
            media["pixel_values"] = torch.randn(patches, 3 * 2 * 14 * 14, generator=draw)
            media["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in shapes])
        made.append(Experience(tokens=tokens, prompt_length=prompt, multi_modal_inputs=media))
    return made


MODELS = {"llava": (lambda: tiny.llava()[0], llava_records), "qwen": (tiny.qwen_vl, qwen_records)}


@pytest.mark.parametrize("name", MODELS)
def test_each_row_as_if_alone(name: str) -> None:
    model, records = (make() for make in MODELS[name])
    actor = Actor(model, temperature=0.9)
    assert actor.head_path == "hidden" and actor.packs
    # Never sampled, never likely: the image, and what begins one.
    assert set(actor.suppress) >= ({8} if name == "llava" else {tiny.IMAGE, tiny.VIDEO})
    with torch.no_grad():
        want = [zoo.naive(model, one, 0.9, actor.suppress, **(one.multi_modal_inputs or {})) for one in records]
    for packed in (None, True):
        for budget in (1, 40, 1000):
            found = policy_log_probs(actor, records, entropy=True, packed=packed, token_budget=budget)
            for log_probs, entropy, pair in zip(found.log_probs, found.entropy, want, strict=True):
                torch.testing.assert_close(log_probs, pair[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(entropy, pair[1], rtol=1e-4, atol=1e-4)
    for layout in ("left", "prompt_left_response_right"):
        batch = from_experiences(records, layout=layout)
        found = policy_log_probs(actor, batch, token_budget=40)
        rows = Rowwise.of(batch)
        assert rows.spans is not None
        torch.testing.assert_close(
            rows.spans.unpad(found.log_probs), torch.cat([pair[0] for pair in want]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", MODELS)
def test_media_of_a_call_in_lightrfts_way(name: str) -> None:
    model, records = (make() for make in MODELS[name])
    actor = Actor(model)
    batch = from_experiences(records)
    media = {
        key: value
        for key, value in batch.model_inputs().items()
        if key not in ("input_ids", "attention_mask", "position_ids")
    }
    slots = batch.action_mask.shape[1]
    found = actor(batch.sequences, slots, batch.attention_mask, **media)
    want = actor.token_stats(batch).log_probs
    inside = batch.action_mask
    torch.testing.assert_close(found[inside], want[inside], rtol=1e-5, atol=1e-5)
    if name == "qwen":
        packed = batch.pack()
        lengths, counts = packed.cu_seqlens.diff(), packed.action_cu_seqlens.diff()
        numbers = torch.repeat_interleave(torch.arange(1, 5), lengths)[None]
        with pytest.raises(ValueError, match="media: got grids with packed sequences"):
            actor(packed.sequences.values[None], counts, numbers, packed_seq_lens=lengths, **media)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_images_tower(name: str) -> None:
    model, records = (make() for make in MODELS[name])
    actor = Actor(model)
    for packed in (False, True):
        actor.zero_grad()
        actor.token_stats(records, packed=packed).log_probs.values.sum().backward()
        tower = [p for n, p in model.named_parameters() if "visi" in n or "visual" in n]
        assert tower and sum(float(p.grad.abs().sum()) for p in tower if p.grad is not None) > 0


def test_a_critic_sees_images() -> None:
    model, records = (make() for make in MODELS["llava"])
    torch.manual_seed(0)
    critic = Critic(trunk_from=Actor(model), value_head="normal")
    every = values(critic, records).values
    for budget, packed in ((1, None), (30, True)):
        found = values(critic, records, token_budget=budget, packed=packed).values
        torch.testing.assert_close(found.tensor_of_values(), every.tensor_of_values(), rtol=1e-5, atol=1e-5)
    blind = [Experience(tokens=one.tokens, prompt_length=one.prompt_length,
                        multi_modal_inputs=None if one.multi_modal_inputs is None
                        else {"pixel_values": torch.zeros_like(one.multi_modal_inputs["pixel_values"])})
             for one in records]  # fmt: skip
    assert not torch.allclose(values(critic, blind).values[0], every[0])
