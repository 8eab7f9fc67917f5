"""Actors and critics on a CUDA device equal those on the CPU, also in bfloat16, and never hold all logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollbook.compat.lightrft.batch import from_experiences
from rollbook.compat.lightrft.models import Actor, forward_batch, native_batch
from rollbook.models import Critic
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import test_vision_models, zoo
from tests.models.zoo import policy_log_probs, reference_log_probs, values

DEVICE = torch.device("cuda")
SHAPES = [(3, 40), (1, 6), (50, 20), (2, 0), (0, 3), (40, 100), (7, 7)]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", zoo.TEXTS)
def test_logprobs_on_the_device_equal_those_on_the_cpu(name: str, packed: bool) -> None:
    cpu_actor, records = Actor(zoo.text(name)), zoo.records(SHAPES)
    gpu_actor = Actor(copy.deepcopy(zoo.text(name)), device=DEVICE)
    assert gpu_actor.device.type == "cuda" and gpu_actor.packs and gpu_actor.head_path == "hidden"
    expected = policy_log_probs(cpu_actor, records, entropy=True)
    for budget in (1, 200, 10_000):
        actual = policy_log_probs(gpu_actor, records, entropy=True, packed=packed, token_budget=budget)
        for gpu_column, cpu_column in ((actual.logprobs, expected.logprobs), (actual.entropy, expected.entropy)):
            torch.testing.assert_close(
                gpu_column.tensor_of_values(), cpu_column.tensor_of_values(), rtol=1e-4, atol=1e-4
            )
    assert 0 < actual.stats["forward_seconds"] <= actual.stats["seconds"] * 1.01
    # A batch gets its results where it lies, or where it is told; it need not lie where the model does.
    for home in ("cpu", "cuda"):
        batch = from_experiences(records, packing_samples=packed).to_device(home)
        scored = forward_batch(gpu_actor, batch, ("logprobs",))["logprobs"]
        flat = scored.values if packed else scored
        assert flat.device.type == home and batch.sequences[0].device.type == home
        trained = gpu_actor.token_stats(native_batch(batch)).logprobs
        assert (trained.values if packed else trained).device.type == "cuda"
        torch.testing.assert_close((trained.values if packed else trained).cpu(), flat.cpu(), rtol=1e-4, atol=1e-4)
    moved = forward_batch(gpu_actor, from_experiences(records), ("logprobs",), device="cuda")["logprobs"]
    assert moved.device.type == "cuda"
    here_batch = zoo.batch_of(records, packed=packed)
    for batch in (here_batch, zoo.batch_of(records, packed=packed, device=DEVICE), here_batch.pin_memory()):
        again = batch.flatten_response(gpu_actor.token_stats(batch).logprobs).cpu()
        torch.testing.assert_close(again, expected.logprobs.tensor_of_values(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [None, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_sampled_logprobs_equal_recomputed_ones(
    name: str, dtype: torch.dtype, packed: bool | None, record_property: Callable[[str, object], None]
) -> None:
    actor = Actor(zoo.TEXTS[name](dtype=dtype), device=DEVICE, tokenizer=tiny.words())
    largest, mean = 0.0, 0.0
    for temperature in (0.5, 1.0, 1.5):
        samples = TransformersEngine(actor).generate(
            [[5, 6, 7, 9], [8], [10, 11]], n=8, max_tokens=64, temperature=temperature, logprobs="tempered", seed=1
        )
        records = [sample.to_experience() for sample in samples]
        scored = policy_log_probs(actor, records, temperature=temperature, packed=packed).logprobs
        off = (scored.tensor_of_values() - torch.cat([record.logprobs for record in records])).abs()
        largest, mean = max(largest, float(off.max())), max(mean, float(off.mean()))
    record_property("largest difference", largest)
    print(f"\n{name} {dtype} {'packed' if packed else 'padded'}: largest {largest:.3g}, mean {mean:.3g}")
    assert largest < 1e-4 if dtype == torch.float32 else mean < 0.02


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_are_never_in_memory(dtype: torch.dtype, packed: bool) -> None:
    vocabulary, slots = 151_936, 16 * 1000
    actor = Actor(tiny.llama(vocab=vocabulary, max_position_embeddings=1024, dtype=dtype), device=DEVICE)
    records = zoo.records([(24, 1000)] * 16, vocab=vocabulary)
    batch = zoo.batch_of(records, packed=packed, device=DEVICE)
    assert actor.packs and actor.head_path == "hidden"
    policy_log_probs(actor, records[:2], entropy=True)  # kernels are made
    logits = slots * vocabulary * dtype.itemsize

    def peak(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def train() -> None:
        actual = actor.token_stats(batch, entropy=True)
        (actual.logprobs.values if packed else actual.logprobs).sum().backward()

    scoring = peak(lambda: policy_log_probs(actor, records, entropy=True, packed=packed, token_budget=1 << 20))
    training = peak(train)
    print(f"\n{dtype}: logits {logits >> 20} MiB, scoring {scoring >> 20} MiB, training {training >> 20} MiB")
    assert scoring < logits / 2 and training < logits / 2


def test_adapters_and_critics() -> None:
    records = zoo.records(SHAPES)
    actor = Actor(tiny.llama(), device=DEVICE, lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}).train()
    base = policy_log_probs(Actor(tiny.llama()), records).logprobs.tensor_of_values()
    for name, parameter in actor.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    actual = reference_log_probs(actor, records).logprobs.tensor_of_values()
    torch.testing.assert_close(actual, base, rtol=1e-4, atol=1e-4)
    assert float((policy_log_probs(actor, records).logprobs.tensor_of_values() - base).abs().max()) > 0.1
    torch.manual_seed(0)
    critic = Critic(tiny.llama(), value_head="normal")
    cpu_values = values(critic, records).values.tensor_of_values()
    gpu_values = values(copy.deepcopy(critic).to(DEVICE), records, packed=True).values.tensor_of_values()
    torch.testing.assert_close(gpu_values, cpu_values, rtol=1e-4, atol=1e-4)
    half = Critic(tiny.llama(), dtype="bfloat16", device=DEVICE, value_head="normal")
    assert half.value_head.weight.dtype == torch.float32 and values(half, records).values.dtype == "float32"


@pytest.mark.parametrize("name", test_vision_models.MODELS)
def test_images(name: str) -> None:
    model, records = (make() for make in test_vision_models.MODELS[name])
    expected = policy_log_probs(Actor(model), records).logprobs.tensor_of_values()
    gpu_actor = Actor(copy.deepcopy(model), device=DEVICE)
    for packed in (None, True):
        actual = policy_log_probs(gpu_actor, records, packed=packed, token_budget=40).logprobs.tensor_of_values()
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_generating() -> None:
    actor = Actor(tiny.llama(), device=DEVICE, tokenizer=tiny.words())
    ids = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6]])
    actual = actor.generate(ids.to(DEVICE), (ids != 0).long(), max_new_tokens=8, do_sample=False)
    assert {tensor.device.type for tensor in actual} == {"cuda"}
    cpu_actor = Actor(tiny.llama(), tokenizer=tiny.words())
    assert torch.equal(
        actual[0].cpu(), cpu_actor.generate(ids, (ids != 0).long(), max_new_tokens=8, do_sample=False)[0]
    )
