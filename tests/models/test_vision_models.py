"""Vision-language models: rows with no, one and several images in one pass score as each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from rollbook import Experience
from rollbook.compat.lightrft.batch import ExperienceVL, from_experiences
from rollbook.compat.lightrft.models import Actor
from rollbook.models import Critic
from rollbook.models.head import model_inputs
from rollbook.train import AlgorithmConfig, Learner
from tests import tiny
from tests.models import zoo
from tests.models.batches import native_batch
from tests.models.zoo import policy_log_probs, values


def llava_records() -> list[Experience]:
    draw = torch.Generator().manual_seed(0)
    records = []
    for images, prompt, response in ((1, 3, 4), (0, 2, 3), (2, 1, 5), (0, 4, 1), (1, 2, 2)):
        parts = [torch.randint(9, 260, (prompt,), generator=draw), torch.full((4 * images,), 8)]
        tokens = torch.cat([*parts, torch.randint(9, 260, (response,), generator=draw)])
        media = {"pixel_values": torch.randn(images, 3, 16, 16, generator=draw)} if images else None
        records.append(Experience(tokens=tokens, prompt_length=prompt + 4 * images, multi_modal_inputs=media))
    return records


def qwen_records() -> list[Experience]:
    draw = torch.Generator().manual_seed(0)
    records = []
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
        records.append(Experience(tokens=tokens, prompt_length=prompt, multi_modal_inputs=media))
    return records


MODELS = {"llava": (lambda: tiny.llava()[0], llava_records), "qwen": (tiny.qwen_vl, qwen_records)}


@pytest.mark.parametrize("name", MODELS)
def test_each_row_as_if_alone(name: str) -> None:
    model, records = (make() for make in MODELS[name])
    actor = Actor(model, temperature=0.9)
    assert actor.head_path == "hidden" and actor.packs
    # Never sampled, never likely: the image, and what begins one.
    assert set(actor.suppress) >= ({8} if name == "llava" else {tiny.IMAGE, tiny.VIDEO})
    with torch.no_grad():
        expected = [
            zoo.naive(model, record, 0.9, actor.suppress, **(record.multi_modal_inputs or {})) for record in records
        ]
    for packed in (None, True):
        for budget in (1, 40, 1000):
            estimated = policy_log_probs(actor, records, entropy=True, packed=packed, token_budget=budget)
            for log_probs, entropy, pair in zip(estimated.logprobs, estimated.entropy, expected, strict=True):
                torch.testing.assert_close(log_probs, pair[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(entropy, pair[1], rtol=1e-4, atol=1e-4)
    for layout in ("left", "prompt_left_response_right"):
        batch = from_experiences(records, layout=layout)
        with torch.no_grad():
            scored = actor.token_stats(native_batch(batch)).logprobs
        for log_probs, inside, pair in zip(scored, batch.action_mask, expected, strict=True):
            torch.testing.assert_close(log_probs[inside], pair[0], rtol=1e-4, atol=1e-4)


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
    logprobs = actor(batch.sequences, slots, batch.attention_mask, **media)
    expected = actor.token_stats(native_batch(batch)).logprobs
    inside = batch.action_mask
    torch.testing.assert_close(logprobs[inside], expected[inside], rtol=1e-5, atol=1e-5)
    if name == "qwen":
        packed = batch.pack()
        lengths, counts = packed.cu_seqlens.diff(), packed.action_cu_seqlens.diff()
        numbers = torch.repeat_interleave(torch.arange(1, 5), lengths)[None]
        with pytest.raises(ValueError, match="media: got grids with packed sequences"):
            actor(packed.sequences.values[None], counts, numbers, packed_seq_lens=lengths, **media)


def test_types_of_tokens_are_derived_where_a_batch_has_none() -> None:
    """As LightRFT's batches come: pixels and grids alone. Images, a video with its time scale, and text."""
    model = tiny.qwen_vl()
    actor, video = Actor(model), [5, tiny.START, *[tiny.VIDEO] * 4, tiny.END, 7, 8, 9]
    frames = {
        "pixel_values_videos": torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5)),
        "video_grid_thw": torch.tensor([[2, 2, 4]]),
        "second_per_grid_ts": torch.tensor([3.0]),
        "mm_token_type_ids": 2 * (torch.tensor([video]) == tiny.VIDEO).long(),
    }
    typed = [*qwen_records(), Experience(tokens=video, prompt_length=8, multi_modal_inputs=frames)]
    bare = [
        record.replace(
            multi_modal_inputs={k: v for k, v in record.multi_modal_inputs.items() if k != "mm_token_type_ids"}
        )
        for record in typed
    ]
    bare[2] = typed[2]  # some have them
    torch.manual_seed(0)
    critic = Critic(backbone_from=actor, value_head="normal")
    with torch.no_grad():
        expected_rows = [
            zoo.naive(model, record, 1.0, actor.suppress, **record.multi_modal_inputs)[0] for record in typed
        ]
        state_values = critic.token_values(zoo.batch_of(typed))
        for packed in (False, True):
            batch = zoo.batch_of(bare, packed=packed)
            rows = [*zoo.by_record(batch, actor.token_stats(batch).logprobs)]
            for actual, expected in zip(rows, expected_rows, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            actual = critic.token_values(batch)
            actual = actual.values if packed else actual[batch.action_mask]
            torch.testing.assert_close(actual, state_values[from_experiences(typed).action_mask], rtol=1e-4, atol=1e-4)
    images = from_experiences(bare[:2])
    media = {"pixel_values": images.pixel_values, "image_grid_thw": images.image_grid_thws}
    slots = images.action_mask.shape[1]
    actual = actor(images.sequences, slots, images.attention_mask, **media)
    torch.testing.assert_close(actual[images.action_mask], torch.cat(expected_rows[:2]), rtol=1e-4, atol=1e-4)
    legacy = ExperienceVL(
        images.sequences, images.pixel_values, images.image_grid_thws, action_log_probs=torch.zeros(2, slots),
        attention_mask=images.attention_mask, action_mask=images.action_mask, info={"image_num": [1, 0]},
    )  # fmt: skip
    actual = actor.token_stats(native_batch(legacy)).logprobs
    torch.testing.assert_close(actual[images.action_mask], torch.cat(expected_rows[:2]), rtol=1e-4, atol=1e-4)
    divergences = []
    for records in (typed, bare):
        ready = [record.replace(logprobs=log_probs - 0.1, advantages=torch.ones_like(log_probs), reward=1.0)
                 for record, log_probs in zip(records, expected_rows, strict=True)]  # fmt: skip
        learner = Learner(Actor(tiny.qwen_vl()), AlgorithmConfig.preset("grpo", kl_coef=0.0))
        divergences.append(learner.update(ready, step=1).metrics["policy/ppo_kl"])
    assert divergences[0] == pytest.approx(divergences[1], abs=1e-5) == pytest.approx(-0.1, abs=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_types_of_a_prompt_are_completed_for_an_image_in_the_response(packed: bool) -> None:
    """The types that a processor gave for the prompt alone, of a record whose environment showed a second image."""
    model, image = tiny.qwen_vl(), [tiny.START, *[tiny.IMAGE] * 4, tiny.END]
    tokens = [5, *image, 7, *image, 9, 10]
    types = (torch.tensor(tokens) == tiny.IMAGE).int()[None]
    media = {"pixel_values": torch.randn(32, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    actor, rows = Actor(model), []
    for token_types in (types, types[:, :8], types[:, :0]):
        typed = Experience(
            tokens=tokens, prompt_length=8, multi_modal_inputs={**media, "mm_token_type_ids": token_types}
        )
        batch = zoo.batch_of([qwen_records()[0], typed], packed=packed)
        rows.append([*zoo.by_record(batch, actor.token_stats(batch).logprobs)][1])
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"'mm_token_type_ids'\]\[1\]: got 0 entries, expected one for each of 16 tok"):
        batch.model_inputs(get_rope_index=lambda input_ids, mm_token_type_ids: None)
    with pytest.raises(ValueError, match=r"\[1\]: got 0 entries.* has no image_token_id or video_tok"):
        batch.model_inputs(get_rope_index=model.model.get_rope_index, config=PretrainedConfig())
    types_of_another_kind = Experience(tokens=[5, 8, 9, 8], multi_modal_inputs={"token_type_ids": [[0, 1, 0]]})
    with pytest.raises(ValueError, match=r"'token_type_ids'\]\[0\]: got 3 entries, expected one for each placeholder"):
        zoo.batch_of([types_of_another_kind]).model_inputs(config=PretrainedConfig(image_token_id=8))


def test_types_without_grids_are_not_made_up() -> None:
    """Which tokens such a model's processor marks is not known."""

    class Marked(torch.nn.Module):
        config = PretrainedConfig(image_token_id=8)

        def forward(self, input_ids: torch.Tensor, pixel_values: Any = None, mm_token_type_ids: Any = None) -> None:
            raise AssertionError

    batch = zoo.batch_of(llava_records())
    with pytest.raises(ValueError, match=r"'mm_token_type_ids'\]: got None, expected the processor's output: Marked"):
        model_inputs(Marked(), batch)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_images_tower(name: str) -> None:
    model, records = (make() for make in MODELS[name])
    actor = Actor(model)
    for packed in (False, True):
        actor.zero_grad()
        zoo.stats_of(actor, records, packed).logprobs.values.sum().backward()
        tower = [p for n, p in model.named_parameters() if "visi" in n or "visual" in n]
        assert tower and sum(float(p.grad.abs().sum()) for p in tower if p.grad is not None) > 0


def test_a_critic_sees_images() -> None:
    model, records = (make() for make in MODELS["llava"])
    torch.manual_seed(0)
    critic = Critic(backbone_from=Actor(model), value_head="normal")
    every = values(critic, records).values
    for budget, packed in ((1, None), (30, True)):
        predicted = values(critic, records, token_budget=budget, packed=packed).values
        torch.testing.assert_close(predicted.tensor_of_values(), every.tensor_of_values(), rtol=1e-5, atol=1e-5)
    blind = [Experience(tokens=record.tokens, prompt_length=record.prompt_length,
                        multi_modal_inputs=None if record.multi_modal_inputs is None
                        else {"pixel_values": torch.zeros_like(record.multi_modal_inputs["pixel_values"])})
             for record in records]  # fmt: skip
    assert not torch.allclose(values(critic, blind).values[0], every[0])
