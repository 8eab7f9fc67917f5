"""Batches on a CUDA device, padded and packed, and attention over ragged input (`make test-gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from rollbook.batch import Batch
from rollbook.batch.device import pin_memory
from rollbook.compat.lightrft.batch import ExperienceBatch, from_experiences
from rollbook.compat.lightrft.replay_buffer import NaiveReplayBuffer, make_experience_batch, split_experience_batch
from rollbook.core.experiences import Experiences
from tests import test_layout_model as layouts
from tests.strategies import full_record

DEVICE = torch.device("cuda")


def records() -> Experiences:
    return Experiences([full_record(kind, seed) for seed, kind in enumerate(["single_turn", "multi_turn"] * 4)])


@pytest.mark.parametrize("options", [{}, {"layout": "prompt_left_response_right"}, {"packing_samples": True}])
def test_columns_are_unchanged_on_the_device(options: dict[str, Any]) -> None:
    experiences = records()
    gpu_batch = from_experiences(experiences, pad_token_id=5, device=DEVICE, **options)
    cpu_batch = from_experiences(experiences, pad_token_id=5, **options)
    tensors = [value for value in vars(gpu_batch).values() if isinstance(value, torch.Tensor)]
    tensors += [value.values for value in vars(gpu_batch).values() if hasattr(value, "cu_seqlens")]
    assert len(tensors) > 4
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert gpu_batch.to_device("cpu") == cpu_batch
    assert from_experiences(experiences, pad_token_id=5, **options).to_device(DEVICE).to_device("cpu") == cpu_batch


@pytest.mark.parametrize("options", [{}, {"side": "right"}, {"packed": True}])
@pytest.mark.parametrize("columns", [None, ("tokens",), ("action_mask", "logprobs", "advantages")])
def test_batches_are_created_on_the_device(options: dict[str, Any], columns: Any) -> None:
    experiences = records()
    gpu_batch = Batch.from_records(experiences, columns, pad_token_id=5, device=DEVICE, **options)
    cpu_batch = Batch.from_records(experiences, columns, pad_token_id=5, **options)
    assert gpu_batch.device.type == "cuda" and gpu_batch.to_device("cpu") == cpu_batch
    for moved in (cpu_batch.to_device(DEVICE), cpu_batch.pin_memory().to_device(DEVICE)):
        assert moved.to_device("cpu") == cpu_batch
    assert gpu_batch.pack().to_device("cpu") == cpu_batch.pack() and gpu_batch.pad(7).to_device("cpu") == cpu_batch.pad(
        7
    )


@pytest.mark.parametrize("options", [{}, {"layout": "prompt_left_response_right"}, {"packing_samples": True}])
def test_layouts_change_on_the_device(options: dict[str, Any]) -> None:
    items = layouts.samples()
    cpu_batch = make_experience_batch(items, **options)
    assert make_experience_batch(items, **options).to_device(DEVICE).pack().to_device("cpu") == cpu_batch.pack()
    gpu_batch = make_experience_batch(items, **options).to_device(DEVICE)
    assert gpu_batch.pad(7).to_device("cpu") == cpu_batch.pad(7)
    for there_items in (split_experience_batch(gpu_batch), split_experience_batch(gpu_batch, unpad=True)):
        assert there_items[0].sequences.device.type == "cuda"
    apart = [item.to_device("cpu") for item in split_experience_batch(gpu_batch, unpad=True)]
    assert apart == items
    again = make_experience_batch(split_experience_batch(gpu_batch, unpad=True), **options)
    assert again.sequences[0].device.type == "cuda"
    assert again.to_device("cpu") == cpu_batch


def test_memory_is_pinned() -> None:
    batch = make_experience_batch(layouts.samples())
    batch.info["nested"] = {"deep": [torch.ones(2), None]}
    assert batch.pin_memory() is batch
    for value in (batch.sequences, batch.base_action_log_probs, batch.info["nested"]["deep"][0]):
        assert value.is_pinned()
    packed = make_experience_batch(layouts.samples(), packing_samples=True).pin_memory()
    assert packed.sequences.values.is_pinned()
    assert packed.sequences[0].is_pinned()
    on_device = torch.ones(2, device=DEVICE)
    assert pin_memory([on_device, None])[0] is on_device


def test_buffer_keeps_on_the_host_and_samples_to_the_device() -> None:
    items = layouts.samples()
    buffer = NaiveReplayBuffer(sample_batch_size=4, seed=0)
    buffer.append(make_experience_batch(items).to_device(DEVICE))
    assert buffer[0].sequences.device.type == "cpu"
    assert buffer.sample().sequences.device.type == "cuda"
    device_buffer = NaiveReplayBuffer(sample_batch_size=4, seed=0, cpu_offload=False)
    device_buffer.append(make_experience_batch(items).to_device(DEVICE))
    assert device_buffer[0].sequences.device.type == "cuda"
    device_buffer._random.seed(1)
    buffer._random.seed(1)
    assert device_buffer.sample().to_device("cpu") == buffer.sample().to_device("cpu")
    device_buffer.normalize("advantages")
    buffer.normalize("advantages")
    torch.testing.assert_close(device_buffer[1].advantages.cpu(), buffer[1].advantages)


@pytest.mark.parametrize("attention", layouts.CLOSE)
def test_layouts_give_equal_model_outputs(attention: str) -> None:
    policy, items = layouts.model(attention).to(DEVICE), layouts.samples()
    outputs = []
    for make in layouts.LAYOUTS.values():
        batch = make(items).to_device(DEVICE)
        outputs.append(layouts.flat(batch, layouts.log_probs(policy, batch)))
    for output in outputs[1:]:
        layouts.close(output, outputs[0], attention)


def test_varlen_attention_uses_the_boundaries() -> None:
    from torch.nn.attention.varlen import varlen_attn

    batch: ExperienceBatch = make_experience_batch(layouts.samples(), packing_samples=True).to_device(DEVICE)
    inputs = batch.model_inputs()
    tokens = inputs["input_ids"].shape[1]
    draw = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = torch.randn(3, tokens, 4, 64, generator=draw, device=DEVICE, dtype=torch.bfloat16)
    bounds, longest = inputs["cu_seq_lens_q"], inputs["max_length_q"]
    try:
        actual = varlen_attn(q, k, v, bounds, inputs["cu_seq_lens_k"], longest, longest, window_size=(-1, 0))
    except TypeError:
        actual = varlen_attn(q, k, v, bounds, inputs["cu_seq_lens_k"], longest, longest, is_causal=True)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = functional.scaled_dot_product_attention(
            *(part[start:stop].transpose(0, 1)[None] for part in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(actual[start:stop], alone[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
