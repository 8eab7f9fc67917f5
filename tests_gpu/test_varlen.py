"""`varlen` attention on a CUDA device runs torch's kernel for ragged input and equals attention per sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from rollbook.models import Actor, Critic
from rollbook.models import varlen as module
from rollbook.models.varlen import NAME, best_attention, varlen_attention
from rollbook.rollout import TransformersEngine
from tests import tiny
from tests.models import zoo
from tests.models.zoo import policy_log_probs

DEVICE = torch.device("cuda")
SHAPES = [(3, 40), (1, 6), (50, 20), (2, 0), (0, 3), (40, 100), (7, 7), (0, 1), (100, 100)]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Counted:
    """Counts the calls of torch's function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        inner = module._kernel

        def counting(*args: Any) -> torch.Tensor:
            self.calls += 1
            return inner(*args)

        monkeypatch.setattr(module, "_kernel", counting)


def llama(dtype: torch.dtype, **config: Any) -> Any:
    return tiny.llama(dtype=dtype, hidden_size=128, intermediate_size=256, **config)


@pytest.mark.parametrize("repeated", [False, True], ids=["shared heads", "repeated heads"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 4, 64), (8, 2, 64), (6, 1, 128), (4, 2, 8), (4, 2, 256)])
def test_output_and_gradients_are_those_of_each_sample(
    heads: int, keys: int, size: int, dtype: torch.dtype, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if repeated:
        monkeypatch.setattr(module, "_shares_heads", lambda: False)  # as before torch 2.12
    counted = Counted(monkeypatch)
    bounds = [0, 1, 38, 38, 103, 104, 300]
    draw = torch.Generator(DEVICE).manual_seed(0)
    query, key, value, pull = (
        torch.randn(1, head_count, 300, size, generator=draw, device=DEVICE)
        for head_count in (heads, keys, keys, heads)
    )
    layer = torch.nn.Module()
    layer.num_key_value_groups = heads // keys  # type: ignore[assignment]
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    marks = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    output, _ = varlen_attention(layer, *inputs, None, scaling=0.1, cu_seq_lens_q=marks, cu_seq_lens_k=marks)
    assert counted.calls == 1 and output.shape == (1, 300, heads, size) and output.dtype == dtype
    gradients = torch.autograd.grad(output, inputs, pull.to(dtype).transpose(1, 2))
    # What half precision loses is in the inputs: the reference has the same ones, and computes in float32.
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    parts = []
    for a, b in itertools.pairwise(sorted(set(bounds))):
        q, k, v = (tensor[:, :, a:b] for tensor in exact)
        k, v = (tensor.repeat_interleave(heads // keys, 1) for tensor in (k, v))
        scores = q @ k.transpose(-1, -2) * 0.1
        ahead = torch.ones(b - a, b - a, dtype=torch.bool, device=DEVICE).triu(1)
        parts.append((scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v).transpose(1, 2))
    expected_output = torch.cat(parts, 1)
    expected = torch.autograd.grad(expected_output, exact, pull.to(dtype).float().transpose(1, 2))
    close = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(output.float(), expected_output, rtol=close, atol=close)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        off = (gradient.float() - expected_gradient).norm() / expected_gradient.norm()
        assert off < close, f"{float(off):.3g}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_log_probs_and_gradients_of_a_model(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(kind: torch.dtype, attention: str, device: Any = DEVICE) -> Actor:
        sizes = {**zoo.TEXT, "hidden_size": 128, "initializer_range": 0.05}
        configs = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
        config = configs[name](**sizes) if name in configs else transformers.Qwen3Config(head_dim=32, **sizes)
        torch.manual_seed(0)
        return Actor(Actor(config).model, dtype=kind, device=device, attn_implementation=attention)

    def learned(actor: Actor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = zoo.stats_of(actor, records, packed).logprobs.values
        ramp = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
        loss = (logprobs * ramp).sum() / len(logprobs)
        pulls = torch.autograd.grad(loss, [parameter for parameter in actor.parameters() if parameter.requires_grad])
        return logprobs.detach().cpu(), torch.cat([parameter.float().flatten().cpu() for parameter in pulls])

    records = zoo.records(SHAPES)
    exact, pull = learned(build(torch.float32, "sdpa", "cpu"), False)
    varlen = build(dtype, "varlen")
    assert varlen.packs_cheaply and varlen.config._attn_implementation == NAME
    counted = Counted(monkeypatch)
    actual, varlen_gradient = learned(varlen, True)
    assert counted.calls == 2
    expected, sdpa_gradient = learned(build(dtype, "sdpa"), False)
    # Half precision has its error with either; packed it is no larger to speak of.
    for ours_off, sdpa_off in (
        ((actual - exact).abs().mean(), (expected - exact).abs().mean()),
        ((varlen_gradient - pull).norm() / pull.norm(), (sdpa_gradient - pull).norm() / pull.norm()),
    ):
        print(f"\n{name} {dtype}: varlen {float(ours_off):.4g}, padded SDPA {float(sdpa_off):.4g}")
        assert ours_off < 2 * sdpa_off + 1e-3
    # In float32 there is no kernel: each sample by itself, exactly.
    logprobs, slope = learned(build(torch.float32, "varlen"), True)
    torch.testing.assert_close(logprobs, exact, rtol=1e-4, atol=1e-4)
    assert (slope - pull).norm() / pull.norm() < 1e-4
    assert counted.calls == 2


def test_gradient_checkpointing_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    records = zoo.records(SHAPES)
    actor = Actor(llama(torch.float32), device=DEVICE, attn_implementation="varlen")
    assert actor.packs
    counted = Counted(monkeypatch)

    def slope() -> torch.Tensor:
        actor.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logprobs = zoo.stats_of(actor, records).logprobs.values
        logprobs.mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in actor.parameters() if parameter.grad is not None])

    once = slope()
    assert counted.calls == 2, "the kernel, though weights are float32"
    actor.train().gradient_checkpointing_enable()
    again = slope()
    assert counted.calls == 6, "computed again, in the backward pass"
    assert torch.isfinite(once).all() and (again - once).norm() / once.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_samples_equal_those_with_sdpa(dtype: torch.dtype) -> None:
    varlen, plain = (
        Actor(llama(dtype), device=DEVICE, attn_implementation=attention, tokenizer=tiny.words())
        for attention in ("varlen", "sdpa")
    )
    # Beside a mask the engine shows SDPA keys in multiples of a length; the same for both, or rounding differs.
    TransformersEngine(varlen).runner.stride = TransformersEngine(plain).runner.stride
    options = {"n": 4, "max_tokens": 32, "temperature": 0.8, "logprobs": "tempered", "seed": 3}
    varlen_samples, sdpa_samples = (
        TransformersEngine(item_).generate([[5, 6, 7, 9], [8], [10, 11]], **options) for item_ in (varlen, plain)
    )
    assert [sample.response_ids for sample in varlen_samples] == [sample.response_ids for sample in sdpa_samples]
    records = [sample.to_experience() for sample in varlen_samples]
    recorded = torch.cat([record.logprobs for record in records])
    scored = policy_log_probs(varlen, records, temperature=0.8).logprobs.tensor_of_values()
    off = (scored - recorded).abs()
    assert off.max() < 1e-4 if dtype == torch.float32 else off.mean() < 0.03


def test_memory_grows_linearly_with_samples() -> None:
    """32,768 tokens in 64 samples: a mask over all pairs alone would take a gibibyte."""
    config = transformers.LlamaConfig(**{**zoo.TEXT, "hidden_size": 128, "max_position_embeddings": 1024})
    actor = Actor(config, dtype="bfloat16", device=DEVICE, attn_implementation="varlen")
    critic = Critic(backbone_from=actor)
    records = zoo.records([(256, 256)] * 64)
    first, every = (zoo.batch_of(some, packed=True, device=DEVICE) for some in (records[:2], records))
    for model, score in ((actor, actor.token_stats), (critic, critic.token_values)):
        assert model.packs_cheaply
        score(first)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            score(every)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"\n{type(model).__name__}: {peak / 2**20:.0f} MiB")
        assert peak < 2**29


def test_choice_of_the_attention() -> None:
    half = best_attention(DEVICE, "bfloat16", transformers.LlamaConfig())
    assert half == ("flash_attention_2" if transformers.utils.is_flash_attn_2_available() else "varlen")
    assert best_attention("cuda:0", torch.float16) == half
    assert best_attention(DEVICE, torch.float32) == "sdpa"
    if half == "varlen":
        assert best_attention(DEVICE, "bfloat16", transformers.Gemma2Config()) == "sdpa"


def test_head_sizes_beyond_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    draw = torch.Generator(DEVICE).manual_seed(0)
    marks = torch.tensor([0, 7, 20], dtype=torch.int32, device=DEVICE)
    for size in (12, 264):
        query, key, value = torch.randn(3, 1, 2, 20, size, generator=draw, device=DEVICE, dtype=torch.bfloat16)
        output, _ = varlen_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=marks)
        for a, b in ((0, 7), (7, 20)):
            parts = (tensor[:, :, a:b] for tensor in (query, key, value))
            alone = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
            torch.testing.assert_close(output[:, a:b], alone, rtol=2e-2, atol=2e-2)
    assert counted.calls == 0
