"""Decoding with CUDA graphs samples the same tokens as decoding token by token."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollbook.algorithms.kernels import decode_triton
from rollbook.core.sampling import Prompt, Sample
from rollbook.rollout import TransformersEngine
from rollbook.rollout.engine import Cancel
from rollbook.rollout.paged import PAGE_SIZE, DecodeAttention, FusedKernels, PackedAttention, _find_floors
from tests import tiny

DEVICE = torch.device("cuda")
SHAPE: dict[str, Any] = {
    "vocab_size": 997,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=50)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=50)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=50)),
}


def make_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(DEVICE, dtype).eval()


def make_prompts(lengths: tuple[int, ...] = (5, 63, 64, 65, 200, 9)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 997, (length,), generator=generator).tolist() for length in lengths]


def token_by_token(model: Any, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(model, **options)
    engine._not_paged = "for comparison"
    return engine


def assert_same(samples: list[Sample], others: list[Sample], least: float = 1.0) -> None:
    """Assert that tokens agree in at least this share of the samples, and log-probs of equal tokens."""
    pairs = list(zip(samples, others, strict=True))
    same = [pair for pair in pairs if pair[0].response_ids == pair[1].response_ids]
    assert len(same) >= least * len(pairs)
    for sample, other in same:
        assert sample.error is None and sample.finish_reason == other.finish_reason
        if sample.logprobs is not None:
            torch.testing.assert_close(
                torch.tensor(sample.logprobs), torch.tensor(other.logprobs), rtol=1e-3, atol=1e-3, equal_nan=False
            )


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "min_p": 0.01, "top_p": 0.95},
        {"min_tokens": 10, "stop_token_ids": list(range(3, 997, 9)), "logprobs": "raw"},
        {"suppress": [5, 6, 7], "logprobs": "tempered", "temperature": 0.8},
    ],
)
def test_graphs_sample_the_same_as_the_loop(name: str, options: dict[str, Any]) -> None:
    model = make_model(name)
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 3, "ignore_eos": True, **options}
    engine = TransformersEngine(model, max_batch_rows=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = engine.generate(make_prompts(), **arguments)
    assert engine._paged is not None and engine._paged.graphs
    # 18 samples in 12 rows: some join later. A sample may differ where rounding decides between two tokens.
    assert_same(samples, token_by_token(model, max_batch_rows=12).generate(make_prompts(), **arguments), 0.8)
    assert engine._paged.pool.available == engine._paged.cache.pages - 1


@pytest.mark.parametrize("name", list(MODELS))
def test_log_probs_in_16_bits(name: str) -> None:
    """Prompts run packed through another kernel in 16 bits (not with soft caps); with windows, too."""
    model = make_model(name, torch.bfloat16)
    engine = TransformersEngine(model, max_batch_rows=12)
    samples = engine.generate(make_prompts(), n=2, max_tokens=40, seed=3, ignore_eos=True, logprobs="raw")
    assert engine._paged is not None and engine._paged.graphs
    exact = model.float()
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=DEVICE)
        with torch.no_grad():
            logits = exact(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected.cpu(), rtol=0, atol=0.02)


@pytest.mark.parametrize("window", [None, 3, 50])
def test_packed_attention_in_16_bits(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = (1, 64, 3, 130)
    query, key, value = (torch.randn(1, heads, sum(lengths), 64) for heads in (4, 2, 2))
    expected = PackedAttention(lengths, torch.device("cpu"))(query, key, value, 0.125, window, None)
    inputs = (tensor.to(DEVICE, torch.bfloat16) for tensor in (query, key, value))
    output = PackedAttention(lengths, DEVICE)(*inputs, 0.125, window, None)
    torch.testing.assert_close(output.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images(dtype: torch.dtype) -> None:
    model = tiny.qwen_vl().to(DEVICE, dtype)  # positions in space
    media = {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = [5, tiny.START, *[tiny.IMAGE] * 4, tiny.END, 7, 8]
    prompts = [Prompt(token_ids=ids, images=media), Prompt(token_ids=[5, 6, 7])]
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 20, "seed": 3, "ignore_eos": True}
    engine = TransformersEngine(model)
    samples = engine.generate(prompts, **arguments)
    assert engine._paged is not None and engine._paged.graphs
    if dtype == torch.float32:
        assert_same(samples, token_by_token(model).generate(prompts, **arguments), 0.6)
    assert [sample.error for sample in samples] == [None] * 6


def test_another_thread_allocates_during_a_capture() -> None:
    engine = TransformersEngine(make_model())
    decoder = engine._paged_decoder()
    assert decoder is not None
    step, sizes = decoder._step, []

    def step_beside_allocation(variant: Any) -> None:
        step(variant)
        if torch.cuda.is_current_stream_capturing():  # no such block is cached: CUDA must allocate it
            sizes.append(other.submit(torch.zeros, 1 << 26, device=DEVICE).result().numel())

    decoder._step = step_beside_allocation  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = engine.generate(make_prompts(), max_tokens=20, seed=1, ignore_eos=True)
    assert sizes == [1 << 26] and decoder.graphs
    assert [len(sample.response_ids) for sample in samples] == [20] * 6


def test_a_sample_does_not_depend_on_its_neighbors() -> None:
    model = make_model()
    prompts = make_prompts()
    together = TransformersEngine(model).generate(prompts, n=4, max_tokens=60, seed=5, ignore_eos=True, batch=1)
    engine = TransformersEngine(model, max_batch_rows=4)
    alone = [engine.generate([prompt], n=4, max_tokens=60, seed=5, ignore_eos=True, batch=1) for prompt in prompts[:1]]
    assert_same(together[:4], alone[0], 0.7)


def test_rows_leave_a_full_cache_and_come_back() -> None:
    model = make_model()
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 200, "seed": 3, "ignore_eos": True}
    small = TransformersEngine(model, max_batch_rows=12, max_batch_tokens=1024)
    samples = small.generate(make_prompts(), **arguments)
    assert small.stats.prompts > len(make_prompts())
    assert_same(samples, TransformersEngine(model).generate(make_prompts(), **arguments), 0.7)


def test_abort_and_resume() -> None:
    engine = TransformersEngine(make_model())
    complete = engine.generate(make_prompts(), n=2, max_tokens=50, seed=3, ignore_eos=True, batch=1)
    parts = engine.generate(make_prompts(), n=2, max_tokens=50, seed=3, ignore_eos=True, batch=1, pause_after=20)
    assert {(part.finish_reason, len(part.response_ids)) for part in parts} == {("abort", 20)}
    engine.version = 4
    resumed = engine.generate(parts)
    assert_same(resumed, complete, 0.7)
    assert resumed[0].versions == [0] * 20 + [4] * 30

    cancel = Cancel()
    stream = engine.stream(make_prompts((9,) * 40), max_tokens=400, ignore_eos=True, seed=1, cancel=cancel)
    threading.Timer(0.2, cancel.request).start()
    aborted = list(stream)
    assert len(aborted) == 40 and {sample.finish_reason for sample in aborted} <= {"abort", "length"}


def test_stop_texts_and_failures() -> None:
    model = make_model()

    class Letters:
        eos_token_id = None

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(97 + token % 26) for token in ids)

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [5]}

        def get_vocab(self) -> dict[str, int]:
            return {chr(97 + i): i for i in range(26)}

    arguments: dict[str, Any] = {"n": 4, "max_tokens": 100, "seed": 3, "stop": ["ab", "zq"], "ignore_eos": True}
    samples = TransformersEngine(model, Letters()).generate(make_prompts(), **arguments)
    assert_same(samples, token_by_token(model, tokenizer=Letters()).generate(make_prompts(), **arguments), 0.8)
    assert "stop" in {sample.finish_reason for sample in samples}

    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    prompts = [[5, 6], [7, 8], [9, 10]]
    engine = TransformersEngine(model)
    samples = engine.generate(prompts, max_tokens=4, suppress=[7], ignore_eos=True)
    assert [sample.finish_reason for sample in samples] == ["length", "error", "length"]
    assert "logits are NaN" in str(samples[1].error)


def test_weights_change_between_and_during_generations() -> None:
    model = make_model()
    engine = TransformersEngine(model)
    arguments: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "logprobs": "raw"}
    before = engine.generate(make_prompts(), **arguments)
    with torch.no_grad():  # in place: the captured graph reads the new weights
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.version = 1
    graphs = len(engine._paged.graphs)  # type: ignore[union-attr]
    after = engine.generate(make_prompts(), **arguments)
    assert len(engine._paged.graphs) == graphs  # type: ignore[union-attr]
    assert [a.response_ids for a in after] != [b.response_ids for b in before]
    assert_same(after, token_by_token(model).generate(make_prompts(), **arguments), 0.8)
    for parameter in model.parameters():  # other addresses: the graph is captured again
        parameter.data = parameter.data.clone() * 1.01
    assert_same(
        engine.generate(make_prompts(), **arguments), token_by_token(model).generate(make_prompts(), **arguments), 0.8
    )

    versions: list[int] = []
    for sample in engine.stream(make_prompts((5, 9)), [{"max_tokens": 8}, {"max_tokens": 100}], ignore_eos=True):
        engine.version = 2
        versions = sample.versions or []
    assert versions[0] == 1 and versions[-1] == 2 and versions == sorted(versions)


def test_lora() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    engine = TransformersEngine(model)
    arguments: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    adapted = engine.generate(make_prompts(), **arguments)
    assert engine._paged is not None and engine._paged.graphs
    assert_same(adapted, token_by_token(model).generate(make_prompts(), **arguments), 0.8)
    with model.disable_adapter():
        plain = engine.generate(make_prompts(), **arguments)
    assert [a.response_ids for a in plain] != [b.response_ids for b in adapted]
    assert_same(engine.generate(make_prompts(), **arguments), adapted, 0.8)


def test_a_model_that_cannot_be_captured_is_decoded_token_by_token() -> None:
    model = make_model()
    model._supports_attention_backend = False
    engine = TransformersEngine(model)
    with pytest.warns(UserWarning, match="without CUDA graphs: LlamaForCausalLM does not let"):
        engine.generate([[5, 6]], max_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([[5, 6]], max_tokens=2)

    model = make_model()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden * float(hidden.abs().max() > 0))  # waits for the device
    engine = TransformersEngine(model)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        samples = engine.generate([[5, 6], [7, 8]], max_tokens=20, seed=1, ignore_eos=True)
    assert [len(sample.response_ids) for sample in samples] == [20, 20]


def test_memory_is_released() -> None:
    engine = TransformersEngine(make_model(), max_batch_tokens=1 << 22)
    engine.generate([[5, 6]] * 64, n=64, max_tokens=400, min_tokens=1, stop_token_ids=list(range(0, 997, 2)))
    used = torch.cuda.memory_allocated()
    assert engine._paged is not None and engine._paged.nbytes > 0
    engine._paged.release()
    assert torch.cuda.memory_allocated() < used - 2**27
    assert len(engine.generate([[5, 6]], max_tokens=4, ignore_eos=True)[0].response_ids) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "size", "window", "softcap"),
    [(3, 14, 2, 64, None, None), (200, 8, 8, 128, None, None), (5, 4, 4, 24, 50, None), (2, 8, 1, 256, None, 5.0)],
)
def test_paged_attention(
    dtype: torch.dtype, rows: int, heads: int, key_heads: int, size: int, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(0)
    storage = torch.randn(1, 2, 20 * PAGE_SIZE, key_heads, size, dtype=dtype)
    table = torch.randint(1, 20, (rows, 4), dtype=torch.int32)
    lengths = torch.randint(0, 4 * PAGE_SIZE - 1, (rows,))
    lengths[0], lengths[-1] = 0, 4 * PAGE_SIZE - 1
    query = torch.randn(rows, heads, 1, size, dtype=dtype)

    class Cache:
        layer = 0

    cache: Any = Cache()
    cache.storage = storage.double()
    expected = DecodeAttention(cache, table, lengths)(query.double(), query, query, size**-0.5, window, softcap)
    cache.storage = storage.to(DEVICE)
    device_query = query.to(DEVICE)
    attention = DecodeAttention(cache, table.to(DEVICE), lengths.to(DEVICE))
    output = attention(device_query, device_query, device_query, size**-0.5, window, softcap)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MODELS))
def test_fused_kernels_equal_the_model(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    fused = FusedKernels(model)
    replaced = {type(module).__name__ for module, _ in fused._norms}
    assert len(replaced) == 1 and len(fused._rotary) == 1
    ids, positions = torch.tensor([[5], [9], [7]], device=DEVICE), torch.tensor([[3], [200], [0]], device=DEVICE)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits
        with fused():
            logits = model(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)
    assert not any("forward" in vars(module) for module in model.modules())


def test_truncation_floors() -> None:
    torch.manual_seed(0)
    for vocabulary in (97, 5000, 151_936):
        shares = torch.softmax(torch.randn(5, vocabulary) * 2, -1)
        shares[0, :10] = shares[0, 0]
        for mass, targets in ((False, [1.0, 5.0, 50.0, 96.0, vocabulary + 5.0]), (True, [0.1, 0.5, 0.9, 0.95, 1.5])):
            expected = _find_floors(shares, torch.tensor(targets), mass=mass)
            floors = decode_triton.find_floors(shares.to(DEVICE), torch.tensor(targets, device=DEVICE), mass=mass)
            torch.testing.assert_close(floors.cpu(), expected, rtol=1e-3, atol=0.0)
