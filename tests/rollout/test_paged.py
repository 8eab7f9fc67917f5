"""Decoding over a paged cache without CUDA graphs: samples equal those of decoding token by token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rollbook.algorithms.kernels import decode_triton
from rollbook.core.sampling import Prompt, Sample
from rollbook.rollout import TransformersEngine
from rollbook.rollout.engine import Cancel
from rollbook.rollout.paged import (
    _ALIVE,
    PAGE_SIZE,
    STEPS_PER_SYNC,
    FusedKernels,
    PagedDecoder,
    PagePool,
    UnsupportedModelError,
    pages_for,
    unsupported_reason,
)
from tests import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LENGTHS = (5, 63, 64, 65, 130, 9)


def make_model(name: str = "llama") -> Any:
    torch.manual_seed(0)
    if name == "gemma2":  # sliding windows and soft caps
        config = Gemma2Config(**SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=20)
        return Gemma2ForCausalLM(config).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def paged_engine(model: Any, tokenizer: Any = None, rows: int = 6, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(model, tokenizer, max_batch_rows=rows, **options)
    assert unsupported_reason(engine.runner) is None
    decoder = PagedDecoder(engine.runner, rows, capture=False)
    engine._paged_decoder = lambda: None if engine._not_paged else decoder  # type: ignore[method-assign]
    engine._paged = decoder
    return engine


def assert_same(samples: list[Sample], others: list[Sample]) -> None:
    for sample, other in zip(samples, others, strict=True):
        assert sample.error is None
        assert (sample.response_ids, sample.finish_reason, sample.stop_reason, sample.text) == (
            other.response_ids,
            other.finish_reason,
            other.stop_reason,
            other.text,
        )
        assert sample.logprobs == (other.logprobs and pytest.approx(other.logprobs, abs=1e-4))
        assert sample.versions == other.versions


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "logprobs": None},
        {"temperature": 0.3, "top_p": 0.9, "first_temperature": 2.0},
        {"top_k": 5, "min_p": 0.01, "top_p": 0.95},
        {"min_tokens": 10, "stop_token_ids": list(range(3, 97, 9)), "logprobs": "raw"},
        {"suppress": [5, 6, 7], "logprobs": "tempered", "temperature": 0.8},
    ],
)
def test_samples_equal_those_of_the_loop(name: str, options: dict[str, Any]) -> None:
    model = make_model(name)
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 3, "ignore_eos": True, **options}
    engine = paged_engine(model)
    samples = engine.generate(make_prompts(), **arguments)  # 18 samples in 6 rows: most join later
    assert_same(samples, TransformersEngine(model, max_batch_rows=6).generate(make_prompts(), **arguments))
    assert engine._not_paged is None and engine._paged is not None
    assert engine.stats.prompts == len(LENGTHS) and engine.stats.steps < 3 * 60
    assert engine._paged.pool.available == engine._paged.cache.pages - 1


def test_rows_leave_a_full_cache_and_come_back() -> None:
    model = make_model()
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 200, "seed": 3, "ignore_eos": True}
    engine = paged_engine(model, rows=12, max_batch_tokens=1024)
    samples = engine.generate(make_prompts(), **arguments)
    assert engine.stats.prompts > len(LENGTHS)  # some ran again
    assert_same(samples, TransformersEngine(model).generate(make_prompts(), **arguments))


def test_stop_texts_pauses_and_cancels() -> None:
    model, tokenizer = tiny.llama(), tiny.bytes_()
    prompts = [Prompt(text=text) for text in ("abc", "a longer prompt than the first", "z")]
    arguments: dict[str, Any] = {"n": 4, "max_tokens": 40, "seed": 3, "stop": ["a", "the"], "batch": 1}
    engine = paged_engine(model, tokenizer)
    samples = engine.generate(prompts, **arguments)
    assert_same(samples, TransformersEngine(model, tokenizer).generate(prompts, **arguments))
    assert {"stop", "length"} & {sample.finish_reason for sample in samples}

    parts = engine.generate(prompts, **arguments, pause_after=5)
    assert max(len(part.response_ids) for part in parts) == 5
    engine.version = 4
    resumed = engine.generate([part for part in parts if part.finish_reason == "abort"])
    expected = {str(sample.eid): sample.response_ids for sample in samples}
    assert resumed and all(sample.response_ids == expected[str(sample.eid)] for sample in resumed)
    assert resumed[0].versions is not None and resumed[0].versions[:6] == [0] * 5 + [4]

    cancel = Cancel()
    stream = engine.stream(prompts, n=20, max_tokens=60, ignore_eos=True, cancel=cancel)
    first = next(stream)
    cancel.request()
    rest = list(stream)
    assert len(rest) == 59 and "abort" in {sample.finish_reason for sample in rest} and first.finish_reason == "length"
    assert engine._paged is not None and engine._paged.calls == 0


def test_two_calls_at_once_share_the_cache() -> None:
    engine = paged_engine(make_model(), rows=4)
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 3, "ignore_eos": True, "batch": 1}
    alone = engine.generate(make_prompts((9, 70)), **arguments)
    inner: list[Sample] = []
    for _ in engine.stream(make_prompts(), **arguments):
        inner = inner or engine.generate(make_prompts((9, 70)), **arguments)
    assert_same(inner, alone)


def test_rows_that_do_not_fit_beside_another_call_are_decoded_token_by_token() -> None:
    engine = paged_engine(make_model(), rows=2)
    arguments: dict[str, Any] = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "batch": 1}
    expected = engine.generate(make_prompts((300,)), **arguments)
    engine._paged.release()  # type: ignore[union-attr]
    stream = engine.stream(make_prompts((5,)), n=2, **arguments)
    next(stream)
    with pytest.warns(UserWarning, match="rows of up to 340 tokens do not fit into the key-value cache of another"):
        samples = engine.generate(make_prompts((300,)), **arguments)
    list(stream)
    assert_same(samples, expected)
    assert engine._not_paged is None


def test_a_failing_prompt_fails_alone() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    samples = paged_engine(model).generate([[5, 6], [7, 8], [9, 10]], max_tokens=4, suppress=[7], ignore_eos=True)
    assert [sample.finish_reason for sample in samples] == ["length", "error", "length"]
    assert "logits are NaN" in str(samples[1].error)


def test_models_that_cannot_be_paged_are_decoded_token_by_token() -> None:
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None)
    model = GptOssForCausalLM(config).eval()  # attention sinks, which a prefill finds
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 5, "seed": 1, "ignore_eos": True, "batch": 1}
    engine = paged_engine(model)
    with pytest.warns(UserWarning, match="without CUDA graphs: UnsupportedModelError: its attention has s_aux"):
        samples = engine.generate(make_prompts(), **arguments)
    assert model.config._attn_implementation != "rollbook_paged"
    assert_same(samples, TransformersEngine(model).generate(make_prompts(), **arguments))
    assert engine._not_paged is not None and engine._paged is None

    model = make_model()
    model._supports_attention_backend = False
    assert "does not let its attention be replaced" in str(unsupported_reason(TransformersEngine(model).runner))


@pytest.mark.parametrize(
    ("error", "is_disabled"), [(torch.OutOfMemoryError("full"), False), (UnsupportedModelError("no capture"), True)]
)
@pytest.mark.parametrize("failing_window", [0, 1])  # after rows that their first token ended; after rows were removed
def test_every_row_is_finished_if_a_window_fails(failing_window: int, error: Exception, is_disabled: bool) -> None:
    model, prompts = make_model(), make_prompts((40, 42, 9))
    options = [{"max_tokens": count} for count in (30, 30, 1)]
    arguments: dict[str, Any] = {"n": 4, "seed": 3, "ignore_eos": True, "batch": 1}
    expected = TransformersEngine(model).generate(prompts, options, **arguments)
    engine = paged_engine(model, rows=12, max_batch_tokens=768)
    decoder = engine._paged
    assert decoder is not None
    rows_by_window: list[int] = []
    run_steps = decoder.run_steps

    def fail_once(variant: Any, count: int) -> None:
        rows_by_window.append(int(decoder.state.integers[_ALIVE].sum()))
        if len(rows_by_window) == failing_window + 1:
            raise error
        run_steps(variant, count)

    decoder.run_steps = fail_once  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=f"without CUDA graphs: {type(error).__name__}: {error}"):
        samples = engine.generate(prompts, options, **arguments)
    assert_same(samples, expected)
    assert rows_by_window == [8, 6][: failing_window + 1]
    assert decoder.cache is None and decoder.calls == 0  # the loop needs its memory
    assert (engine._not_paged is not None) is is_disabled
    if not is_disabled:
        assert_same(engine.generate(prompts, options, **arguments), expected)
        assert len(rows_by_window) > failing_window + 1


def test_a_prompt_that_fails_in_prefill() -> None:
    model = make_model()
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 10, "seed": 3, "ignore_eos": True, "batch": 1}
    expected = TransformersEngine(model).generate(make_prompts(), **arguments)
    engine = paged_engine(model, rows=12)
    assert engine._paged is not None
    prefill = engine._paged.prefill
    error: Exception = RuntimeError("broken")

    def fail(rows: Any, pages: Any) -> Any:
        if any(len(row.prepared.ids) == 130 for row in rows):
            raise error
        return prefill(rows, pages)

    engine._paged.prefill = fail  # type: ignore[method-assign]
    samples = engine.generate(make_prompts(), **arguments)
    failed = [sample for sample in samples if sample.failed]
    assert [len(sample.prompt_ids) for sample in failed] == [130, 130] and "broken" in str(failed[0].error)
    assert_same([s for s in samples if not s.failed], [e for e in expected if len(e.prompt_ids) != 130])
    assert engine.stats.splits == 3 and engine.stats.prompts == 5  # groups are not cut
    assert engine._paged.pool.available == engine._paged.cache.pages - 1

    error = torch.OutOfMemoryError("full")  # the loop may have room for it
    with pytest.warns(UserWarning, match="without CUDA graphs: OutOfMemoryError: full"):
        assert_same(engine.generate(make_prompts(), **arguments), expected)


@pytest.mark.parametrize("cause", [None, torch.OutOfMemoryError("full")])
def test_a_capture_that_fails(cause: Exception | None) -> None:
    engine = paged_engine(make_model())
    decoder = engine._paged
    assert decoder is not None

    def fail(variant: Any) -> None:
        try:
            if cause is not None:
                raise cause
        finally:
            raise RuntimeError("the capture is invalid")

    decoder.capture, decoder._capture = True, fail  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="the capture is invalid"):
        samples = engine.generate(make_prompts(), max_tokens=3, ignore_eos=True)
    assert [len(sample.response_ids) for sample in samples] == [3] * len(LENGTHS)
    assert (engine._not_paged is None) is (cause is not None)


def test_the_cache_is_allocated_a_few_times_for_ragged_calls() -> None:
    decoder = PagedDecoder(paged_engine(make_model()).runner, 8, capture=False)
    generator = torch.Generator().manual_seed(0)
    caches: dict[int, Any] = {}
    for _ in range(100):
        lengths = torch.randint(20, 2000, (8,), generator=generator).tolist()
        assert decoder.reserve(max(lengths), sum(lengths), 1 << 20)
        caches[decoder.cache.pages] = decoder.cache
        assert sum(lengths) <= (decoder.cache.pages - 1) * PAGE_SIZE
    assert len(caches) <= 3

    decoder.reserve(1000, 1 << 20, 20_000)  # bounded
    assert decoder.cache.pages == pages_for(20_000) + 1
    decoder.release()
    assert decoder.reserve(1000, 8000, 64)  # there is room for one row
    assert decoder.cache.pages == pages_for(1000 + STEPS_PER_SYNC) + 1


def test_memory_is_released_above_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged_engine(make_model())
    decoder = engine._paged
    assert decoder is not None
    engine.generate(make_prompts(), max_tokens=3, ignore_eos=True)
    storage = decoder.cache.storage.nbytes
    assert decoder.nbytes > storage + decoder.state.stops.nbytes
    memory = SimpleNamespace(total_memory=8 * decoder.nbytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    engine.release_memory()
    assert decoder.cache is not None
    memory.total_memory -= 1
    engine.release_memory()
    assert decoder.cache is None and decoder.nbytes == 0


def test_fused_kernels_are_used_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have no gradients, so a training pass in another thread must not get them."""

    def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: bool) -> torch.Tensor:
        normed = hidden.detach() * torch.rsqrt(hidden.detach().square().mean(-1, keepdim=True) + epsilon)
        return normed * (weight.detach() + offset)

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(query.detach(), key.detach(), cos, sin)

    monkeypatch.setattr(decode_triton, "rms_norm", rms_norm)
    monkeypatch.setattr(decode_triton, "rotate", rotate)
    model = make_model()
    fused = FusedKernels(model)
    ids = torch.tensor([[5]])
    expected = model(ids).logits

    def weights_with_gradients() -> int:
        model.zero_grad()
        logits = model(ids).logits
        torch.testing.assert_close(logits, expected)
        if logits.requires_grad:
            logits.sum().backward()
        return sum(parameter.grad is not None for parameter in model.parameters())

    count = len(list(model.parameters()))
    with fused(), ThreadPoolExecutor(1) as other:
        assert other.submit(weights_with_gradients).result() == count
        assert weights_with_gradients() < count
    assert weights_with_gradients() == count


def test_images_are_decoded_after_their_own_prefill() -> None:
    model, processor = tiny.llava()
    prompts: list[Any] = [
        Prompt(text=f"{processor.image_token}what?", images=[tiny.picture()]),
        Prompt(text="no picture"),
    ]
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 20, "seed": 3, "ignore_eos": True, "batch": 1}
    engine = paged_engine(model, processor)
    samples = engine.generate(prompts, **arguments)
    assert_same(samples, TransformersEngine(model, processor).generate(prompts, **arguments))
    assert engine._not_paged is None and engine.stats.prompts == 2

    model = tiny.qwen_vl()  # positions in space
    media = {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = [5, tiny.START, *[tiny.IMAGE] * 4, tiny.END, 7, 8]
    prompts = [Prompt(token_ids=ids, images=media), Prompt(token_ids=[5, 6, 7])]
    engine = paged_engine(model)
    samples = engine.generate(prompts, **arguments)
    assert_same(samples, TransformersEngine(model).generate(prompts, **arguments))
    assert engine._not_paged is None and engine.stats.prompts == 2


def test_hidden_positions_stay_hidden_when_short_rows_leave() -> None:
    """The loop on CUDA rounds its cache up; once no row is padded, a mask of ones alone would show the zeros there."""
    model = make_model()
    arguments: dict[str, Any] = {"n": 3, "max_tokens": 40, "seed": 3, "ignore_eos": True, "logprobs": "raw"}
    arguments |= {"min_tokens": 10, "stop_token_ids": list(range(3, 97, 9))}
    engine = TransformersEngine(model, max_batch_rows=12)
    engine.runner.stride = 64
    samples = engine.generate(make_prompts((5, 63, 64, 65, 200, 9)), **arguments)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_pages_are_counted() -> None:
    pool = PagePool(5)
    pages = pool.take(3)
    pool.share(pages[:2])
    pool.release(pages)
    assert pool.available == 2
    pool.release(pages[:2])
    with pytest.raises(ValueError, match="count: got 5, expected at most 4"):
        pool.take(5)
    assert pool.available == 4 and 0 not in pool.take(4)


def test_an_end_token_beyond_the_vocabulary_is_ignored() -> None:
    model = make_model()
    model.generation_config.eos_token_id = [5, 200]
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 30, "min_tokens": 10, "seed": 3}
    engine = paged_engine(model)
    samples = engine.generate(make_prompts(), **arguments)
    assert_same(samples, TransformersEngine(model, max_batch_rows=6).generate(make_prompts(), **arguments))
    assert engine._not_paged is None


def test_engines_in_two_threads_do_not_mix_their_passes() -> None:
    models = [make_model("llama"), make_model("gemma2")]
    arguments: dict[str, Any] = {"n": 2, "max_tokens": 40, "seed": 3, "ignore_eos": True, "batch": 1}
    alone = [paged_engine(model).generate(make_prompts(), **arguments) for model in models]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(paged_engine(model).generate, make_prompts(), **arguments) for model in models]
        for call, expected in zip(calls, alone, strict=True):
            assert_same(call.result(), expected)
