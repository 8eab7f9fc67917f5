"""`TransformersEngine` with tiny models: samples and log-probs match the forward pass, alone and in any batch."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rollbook.core.ids import EID
from rollbook.core.sampling import Prompt, Sample, Sampling
from rollbook.models import Actor
from rollbook.rollout.engine import Cancel
from rollbook.rollout.transformers import TransformersEngine
from tests import tiny
from tests.tiny import SPECIAL, bytes_, gpt2, llama, llava, picture, qwen3, words

PROMPTS = [[5, 9, 30], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [20], [40, 41, 42, 43, 44]]
IMAGE = SPECIAL.index("<image>")
SOON = 60.0
"""Seconds after which a waiting test fails."""


def engine(model: Any = None, tokenizer: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(
        llama() if model is None else model, bytes_() if tokenizer is None else tokenizer, **options
    )


def numbered(prompts: list[list[int]]) -> list[Prompt]:
    """Return prompts with ids, so that their random streams do not depend on their positions."""
    return [Prompt(token_ids=ids, eid=EID(batch=0, task=i, suffix="")) for i, ids in enumerate(prompts)]


def full_logits(model: Any, sample: Sample, **media: Any) -> torch.Tensor:
    """Compute the logits [R, V] of the response in one forward pass over the sample alone, in float32."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0].float()
    return logits[len(sample.prompt_ids) - 1 : -1]


def log_probs(logits: torch.Tensor, sample: Sample, sampling: Sampling, kind: str) -> torch.Tensor:
    """Compute log-probs of each kind independently: per token, in float64, over a sorted vocabulary."""
    chosen = []
    for i, token in enumerate(sample.response_ids):
        scores = logits[i].double()
        temperature = (
            sampling.first_temperature if i == 0 and sampling.first_temperature is not None else sampling.temperature
        )
        if kind == "raw":
            chosen.append(scores.log_softmax(-1)[token])
            continue
        scores = scores / temperature
        scores[list(sample.sampling["suppress"])] = -torch.inf
        if kind == "processed":
            scores[[2, *sampling.stop_token_ids] if i < sampling.min_tokens else []] = -torch.inf
            ordered = scores.sort(descending=True).values
            if sampling.top_k > 0:
                scores[scores < ordered[sampling.top_k - 1]] = -torch.inf
            ordered = scores.sort(descending=True).values
            mass = ordered.softmax(-1).cumsum(-1)
            scores[scores < ordered[min(int((mass < sampling.top_p).sum()), len(scores) - 1)]] = -torch.inf
            if sampling.min_p > 0:
                scores[scores.softmax(-1) < sampling.min_p * scores.softmax(-1).max() * (1 - 1e-9)] = -torch.inf
        chosen.append(scores.log_softmax(-1)[token])
    return torch.stack(chosen)


# --- against the model itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
def test_greedy_equals_generate(make: Any) -> None:
    model = make()
    samples = engine(model).generate(PROMPTS, temperature=0, max_tokens=24)
    ended = 0
    for ids, sample in zip(PROMPTS, samples, strict=True):
        row = torch.tensor([ids])
        expected = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=24)
        assert sample.response_ids == expected[0, len(ids) :].tolist()
        assert sample.finish_reason == ("stop" if sample.response_ids[-1] == 2 else "length")
        assert sample.logprobs_kind == "raw"
        ended += sample.finish_reason == "stop"
    padded = torch.tensor([[0] * (10 - len(ids)) + ids for ids in PROMPTS])
    expected = model.generate(padded, attention_mask=(padded != 0).long(), do_sample=False, max_new_tokens=24)
    for row, sample in zip(expected[:, 10:].tolist(), samples, strict=True):
        assert row[: len(sample.response_ids)] == sample.response_ids


HOWS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.8, top_p=0.8),
    Sampling(temperature=0.9, top_k=7),
    Sampling(min_p=0.05, temperature=1.3),
    Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, suppress=[11, 12, 13], first_temperature=4.0),
    Sampling(min_tokens=6, stop_token_ids=[50, 51, 52], top_p=0.95),
]


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
@pytest.mark.parametrize("kind", ["processed", "tempered", "raw"])
def test_logprobs_equal_a_forward_pass(make: Any, kind: Any, record_property: Any) -> None:
    model = make()
    samplings = [Sampling.of(sampling, n=2, max_tokens=16, seed=3, logprobs=kind) for sampling in HOWS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(samplings))]
    samples = engine(model).generate(prompts, samplings)  # one batch of rules that all differ
    largest = 0.0
    for i, sample in enumerate(samples):
        assert sample.logprobs is not None and sample.logprobs_kind == kind
        expected = log_probs(full_logits(model, sample), sample, samplings[i // 2], kind)
        assert expected.isfinite().all(), "a token was sampled that its rule forbids"
        largest = max(largest, (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max().item())
    record_property("largest difference", largest)
    print(f"{make.__name__}, {kind}: largest difference {largest:.1e}")
    assert largest < 1e-5


def test_bfloat16_log_probs(record_property: Any) -> None:
    model = llama(dtype=torch.bfloat16)
    samples = engine(model).generate(PROMPTS, n=4, max_tokens=24, seed=0, ignore_eos=True)
    gaps = torch.cat(
        [
            (
                torch.tensor(sample.logprobs) - log_probs(full_logits(model, sample), sample, Sampling(), "processed")
            ).abs()
            for sample in samples
        ]
    )
    record_property("largest difference", gaps.max().item())
    print(f"bfloat16: mean {gaps.mean():.1e}, largest {gaps.max():.1e}")
    assert gaps.mean() < 0.02


def test_temperature_zero_has_raw_logprobs() -> None:
    sample = engine().generate([PROMPTS[0]], temperature=0, max_tokens=5, logprobs="processed")[0]
    expected = log_probs(full_logits(llama(), sample), sample, Sampling(), "raw")
    torch.testing.assert_close(torch.tensor(sample.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0)
    assert sample.logprobs_kind == "raw"
    assert sample.to_experience().sampling["logprobs"] == "raw"
    without = engine().generate([PROMPTS[0]], temperature=0, max_tokens=5, logprobs=None)[0]
    assert without.logprobs is None and without.response_ids == sample.response_ids


# --- seeds, batches, prefills ---------------------------------------------------------------------------------------


def outcome(samples: list[Sample]) -> dict[str, Any]:
    return {
        sample.eid.rid: (sample.response_ids, sample.finish_reason, sample.stop_reason, sample.text)
        for sample in samples
    }


def test_samples_do_not_depend_on_the_batch() -> None:
    prompts = numbered(PROMPTS)
    sampling = Sampling(n=3, max_tokens=20, seed=11, top_p=0.98, stop=["a"], min_tokens=1)
    expected = engine().generate(prompts, sampling)
    assert len({tuple(sample.response_ids) for sample in expected}) == 12
    for rows, tokens in ((1, 10**6), (2, 10**6), (5, 10**6), (256, 64), (256, 1)):
        other = engine(max_batch_rows=rows, max_batch_tokens=tokens)
        assert outcome(other.generate(prompts[::-1], sampling)) == outcome(expected), (rows, tokens)
    alone = [sample for prompt in prompts for sample in engine().generate(prompt, sampling)]
    assert outcome(alone) == outcome(expected)
    for sample, two in zip(alone, expected, strict=True):
        assert sample.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    unnamed = [engine().generate(PROMPTS, sampling) for _ in range(2)]
    assert [sample.response_ids for sample in unnamed[0]] == [sample.response_ids for sample in unnamed[1]]
    assert unnamed[0][0].eid.batch != unnamed[1][0].eid.batch
    again = engine().generate(prompts, sampling)
    assert [str(sample.eid) for sample in again] == [str(sample.eid) for sample in expected]
    assert outcome(engine().generate(prompts, sampling, seed=12)) != outcome(expected)


def test_samples_follow_the_distribution_of_the_model() -> None:
    model = llama(vocab=24)
    count = 6000
    sampler = TransformersEngine(model, max_batch_rows=2000)
    samples = sampler.generate([Prompt(token_ids=[3, 4])], n=count, max_tokens=1, seed=5, top_k=15, temperature=2.0)
    assert sampler.stats.prompts == 3  # a prompt once for each batch
    seen = torch.zeros(24).index_add_(
        0, torch.tensor([sample.response_ids[0] for sample in samples]), torch.ones(count)
    )
    logits = full_logits(model, samples[0])[0] / 2.0
    logits[logits < logits.topk(15).values[-1]] = -torch.inf
    expected = logits.softmax(-1) * count
    assert seen[expected == 0].sum() == 0
    is_possible = expected > 0
    statistic = ((seen - expected)[is_possible] ** 2 / expected[is_possible]).sum().item()
    assert statistic < 14 + 5 * (2 * 14) ** 0.5  # 14 degrees of freedom, five standard deviations


def test_a_prompt_runs_once_for_all_its_samples() -> None:
    sampler = engine()
    sampler.generate(numbered(PROMPTS), n=8, max_tokens=4, ignore_eos=True)
    assert sampler.stats.prompts == 4 and sampler.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert sampler.stats.steps == 4 and sampler.stats.rows == 3 * 32 and sampler.stats.tokens == 4 * 32


def test_finished_rows_leave_the_batch() -> None:
    sampler = engine()
    samplings = [Sampling(max_tokens=3 + 40 * (i == 7), ignore_eos=True) for i in range(16)]
    samples = sampler.generate([[5 + i] for i in range(16)], samplings)
    assert [len(sample.response_ids) for sample in samples] == [sampling.max_tokens for sampling in samplings]
    assert sampler.stats.steps == 43 and sampler.stats.rows == 2 * 16 + 40


def test_finished_rows_stay_within_learned_positions() -> None:
    model = gpt2()
    samplings = [Sampling(max_tokens=250, ignore_eos=True)] * 8 + [Sampling(max_tokens=4, ignore_eos=True)]
    prompts = [*[[5 + i] for i in range(8)], [7] * 252]  # one that is finished at the last position, and is not dropped
    samples = TransformersEngine(model).generate(prompts, samplings, seed=1)
    assert [sample.error for sample in samples] == [None] * 9
    assert [len(sample.response_ids) for sample in samples] == [250] * 8 + [4]


# --- ends -----------------------------------------------------------------------------------------------------------


def test_end_tokens_of_model_config_and_tokenizer() -> None:
    model = llama()
    model.generation_config.eos_token_id = [2, 60]
    model.config.eos_token_id = 61
    sampler = engine(model)
    assert sampler.ends == {2, 60, 61}
    samples = sampler.generate(PROMPTS, n=32, max_tokens=40, temperature=3.0, seed=0)
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert {sample.response_ids[-1] for sample in stopped} == {2, 60, 61}
    assert all(sample.stop_reason is None for sample in stopped)
    assert not any(set(sample.response_ids[:-1]) & {2, 60, 61} for sample in samples)
    ignored = sampler.generate(PROMPTS, n=32, max_tokens=40, temperature=3.0, seed=0, ignore_eos=True)
    assert all(sample.finish_reason == "length" for sample in ignored)
    assert any(set(sample.response_ids) & {2, 60, 61} for sample in ignored)


def test_stop_ids_are_recorded_and_forbidden_before_min_tokens() -> None:
    stops = list(range(20, 120))
    sampler = engine()
    samples = sampler.generate(PROMPTS, n=8, max_tokens=12, temperature=3.0, seed=0, stop_token_ids=stops, min_tokens=5)
    for sample in samples:
        assert not set(sample.response_ids[:5]) & {2, *stops}
        if sample.response_ids[-1] in stops:
            assert sample.finish_reason == "stop" and sample.stop_reason == sample.response_ids[-1]
    assert any(sample.stop_reason is not None for sample in samples)
    first = sampler.generate(PROMPTS, n=8, max_tokens=12, temperature=3.0, seed=0, stop_token_ids=stops)
    assert any(len(sample.response_ids) == 1 for sample in first)  # an empty answer is an answer
    with_stop, without_stop = (
        sampler.generate(PROMPTS[0], max_tokens=12, seed=4, stop_token_ids=stops, include_stop=keep)[0]
        for keep in (True, False)
    )
    assert with_stop.response_ids == without_stop.response_ids and with_stop.stop_reason == with_stop.response_ids[-1]
    assert with_stop.text == bytes_().decode(with_stop.response_ids, skip_special_tokens=True)
    assert without_stop.text == bytes_().decode(with_stop.response_ids[:-1], skip_special_tokens=True)


def test_stop_texts_over_tokens_and_characters() -> None:
    tokenizer = bytes_()
    sampler = engine()
    base = sampler.generate(numbered(PROMPTS), n=4, max_tokens=60, seed=2, temperature=2.0, suppress=range(9))
    checked = 0
    for sample in base:
        text = tokenizer.decode(sample.response_ids)
        middle = text[12:15]
        if len(middle) < 3 or text.find(middle) != 12:
            continue
        prompt = sample.prompt.replace(eid=sample.eid.replace(suffix=""))
        for include in (True, False):
            stopped = sampler.generate(
                prompt,
                seed=2,
                temperature=2.0,
                max_tokens=60,
                suppress=range(9),
                stop=[middle, "never"],
                include_stop=include,
            )[0]
            assert stopped.stop_reason == middle and stopped.finish_reason == "stop"
            assert stopped.response_ids == sample.response_ids[: len(stopped.response_ids)]
            assert middle in tokenizer.decode(stopped.response_ids) and middle not in tokenizer.decode(
                stopped.response_ids[:-1]
            )
            clean = tokenizer.decode(stopped.response_ids, skip_special_tokens=True)
            assert stopped.text == (clean if include else clean[: clean.rfind(middle)])
        checked += 1
    assert checked > 4


def test_a_stop_text_that_ends_inside_a_token() -> None:
    tokenizer = words()
    sampler = engine(llama(vocab=len(tokenizer)), tokenizer)
    base = sampler.generate([[20, 21]], temperature=0, max_tokens=30, ignore_eos=True)[0]
    text = tokenizer.decode(base.response_ids)
    stop = text.split()[6][:-1] if len(text.split()[6]) > 1 else text.split()[6]
    stopped = sampler.generate(
        [[20, 21]], temperature=0, max_tokens=30, ignore_eos=True, stop=stop, include_stop=False
    )[0]
    assert stopped.stop_reason == stop
    count = next(i for i in range(1, 31) if stop in tokenizer.decode(base.response_ids[:i]))
    assert stopped.response_ids == base.response_ids[:count]  # whole tokens
    assert stopped.text == tokenizer.decode(stopped.response_ids, skip_special_tokens=True).split(stop)[0]


def test_text_has_no_special_tokens() -> None:
    tokenizer = words()
    sampler = engine(llama(vocab=len(tokenizer)), tokenizer)
    samples = sampler.generate([[20, 21]], n=20, max_tokens=20, temperature=5.0, seed=1, ignore_eos=True)
    assert any(set(sample.response_ids) & set(range(9)) for sample in samples)
    for sample in samples:
        assert sample.text == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        assert not any(mark in sample.text for mark in SPECIAL if mark != "<unk>")


# --- FIRE -----------------------------------------------------------------------------------------------------------


def test_first_temperature() -> None:
    sampler = engine()
    hot = sampler.generate(PROMPTS[:1], n=64, max_tokens=6, temperature=0, first_temperature=50.0, seed=1)
    assert len({sample.response_ids[0] for sample in hot}) > 30
    for sample in hot:
        greedy = sampler.generate([[*PROMPTS[0], sample.response_ids[0]]], max_tokens=5, temperature=0)[0]
        ended = sample.response_ids[0] == 2
        assert sample.response_ids[1:] == ([] if ended else greedy.response_ids)
    model = llama()
    sampling = Sampling(temperature=0.7, first_temperature=9.0, top_k=20, seed=3, max_tokens=4, n=8)
    for sample in sampler.generate(PROMPTS, sampling):
        expected = log_probs(full_logits(model, sample), sample, sampling, "processed")
        torch.testing.assert_close(torch.tensor(sample.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0)


def test_a_first_token_that_ends_the_response() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely
    sampler = engine(model)
    samples = sampler.generate([[5]], n=600, max_tokens=8, first_temperature=10.0, temperature=1.0, seed=0)
    ended = [sample for sample in samples if sample.response_ids[0] == 2]
    assert ended
    for sample in ended:
        assert (
            sample.response_ids == [2]
            and sample.finish_reason == "stop"
            and sample.text == ""
            and len(sample.logprobs) == 1
        )


# --- pausing, going on, cancelling ------------------------------------------------------------------------------------


def test_resumed_samples_equal_uninterrupted_ones() -> None:
    sampling = Sampling(
        n=3, max_tokens=20, seed=7, temperature=1.5, top_p=0.97, first_temperature=3.0, min_tokens=4, stop=["b"]
    )
    uninterrupted = engine().generate(numbered(PROMPTS), sampling)
    sampler = engine(version=1)
    samples = sampler.generate(numbered(PROMPTS), sampling, pause_after=3)
    assert all(sample.finish_reason == "abort" and len(sample.response_ids) == 3 for sample in samples)
    rounds = 0
    while any(sample.unfinished for sample in samples):
        sampler.version += 1
        going = sampler.generate([sample for sample in samples if sample.unfinished], pause_after=6)
        by_id = {sample.eid.uid: sample for sample in going}
        samples = [by_id.get(sample.eid.uid, sample) for sample in samples]
        rounds += 1
    assert rounds == 3
    assert outcome(samples) == outcome(uninterrupted)
    for sample, expected in zip(samples, uninterrupted, strict=True):
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        count = len(sample.response_ids)
        assert sample.versions == ([1] * 3 + [2] * 6 + [3] * 6 + [4] * 6)[:count]
        assert sample.group_size == 3 and str(sample.eid) == str(expected.eid)
        assert sample.to_experience().policy_versions.tolist() == sample.versions


def test_samples_resumed_with_newer_weights() -> None:
    model = llama()
    sampler = engine(model, version=4)
    old = sampler.generate([PROMPTS[0]], n=4, max_tokens=10, seed=1, ignore_eos=True, pause_after=5)
    with torch.no_grad():
        model.lm_head.weight.add_(
            torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.2
        )
    sampler.version = 5
    for before, sample in zip(old, sampler.generate(old), strict=True):
        assert sample.response_ids[:5] == before.response_ids and sample.logprobs[:5] == before.logprobs
        assert sample.versions == [4] * 5 + [5] * 5
        expected = log_probs(full_logits(model, sample), sample, Sampling(), "processed")[5:]
        torch.testing.assert_close(torch.tensor(sample.logprobs[5:], dtype=torch.float64), expected, atol=1e-5, rtol=0)


def test_versions_that_change_during_a_call() -> None:
    model = llama()
    sampler = engine(model)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            sampler.version = 8

    hook = model.register_forward_hook(count)
    sample = sampler.generate([PROMPTS[0]], max_tokens=5, ignore_eos=True)[0]
    hook.remove()
    assert sample.versions == [0, 0, 0, 8, 8]


def test_resumed_samples_keep_their_kind_of_logprobs() -> None:
    sampler = engine()
    old = sampler.generate([PROMPTS[0]], max_tokens=10, pause_after=5, ignore_eos=True)
    failed = sampler.generate(old, {"max_tokens": 10, "logprobs": "raw"})[0]
    assert failed.error == "ValueError: logprobs: got 'raw', expected 'processed', which the sample has so far"
    assert failed.response_ids == old[0].response_ids  # as far as it got


@contextmanager
def slowly(model: Any, after: int, then: Any) -> Iterator[None]:
    """Call `then` after a number of forward passes, and slow down the passes after it."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            then()
        if calls > after:
            time.sleep(0.002)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_canceled_from_another_thread() -> None:
    model = llama()
    cancel = Cancel()
    with slowly(model, 6, lambda: threading.Thread(target=cancel.request).start()):
        sampler = engine(model, max_batch_rows=6)
        samples = sampler.generate(numbered(PROMPTS), n=3, max_tokens=200, seed=1, ignore_eos=True, cancel=cancel)
    assert len(samples) == 12 and all(sample.finish_reason == "abort" for sample in samples)
    lengths = [len(sample.response_ids) for sample in samples]
    assert max(lengths) < 200 and sorted(lengths)[5] == 0  # the second batch had not begun
    for sample in samples:
        assert len(sample.logprobs) == len(sample.versions) == len(sample.response_ids) and sample.prompt_ids
    expected = engine().generate(numbered(PROMPTS), n=3, max_tokens=200, seed=1, ignore_eos=True)
    assert outcome(engine().generate(samples)) == outcome(expected)


def test_canceled_before_the_start() -> None:
    cancel = Cancel()
    cancel.request()
    sampler = engine()
    samples = sampler.generate(["abc", [5, 6]], max_tokens=5, seed=1, cancel=cancel)
    assert [(sample.finish_reason, sample.prompt_ids, sample.response_ids) for sample in samples] == [
        ("abort", [], []),
        ("abort", [5, 6], []),
    ]
    assert sampler.stats.steps == 0
    on = sampler.generate(samples)
    assert on[0].prompt_ids == bytes_()("abc")["input_ids"] and len(on[0].response_ids) > 0
    assert [sample.error for sample in on] == [None, None]


def test_streams_yield_finished_samples_and_can_be_left() -> None:
    model = llama()
    model.train()
    sampler = engine(model)
    samplings = [Sampling(max_tokens=count, ignore_eos=True) for count in (30, 3, 12)]
    lengths = [len(sample.response_ids) for sample in sampler.stream(PROMPTS[:3], samplings)]
    assert lengths == [3, 12, 30]
    before = sampler.stats.steps
    for sample in sampler.stream(PROMPTS[:3], samplings):
        assert torch.is_grad_enabled() and model.training  # between samples the model is the caller's
        assert len(sample.response_ids) == 3
        inner = sampler.generate([PROMPTS[3]], max_tokens=2, ignore_eos=True)  # it can be used meanwhile
        assert len(inner[0].response_ids) == 2
        break
    assert sampler.stats.steps == before + 3 + 2


def test_async() -> None:
    sampler = engine()
    sampling = Sampling(n=2, max_tokens=12, seed=3, ignore_eos=True)
    expected = sampler.generate(numbered(PROMPTS), sampling)

    async def both() -> tuple[Any, ...]:
        async def streamed() -> list[Sample]:
            return [sample async for sample in sampler.astream(numbered(PROMPTS[::1]), sampling)]

        return await asyncio.wait_for(asyncio.gather(sampler.agenerate(numbered(PROMPTS), sampling), streamed()), SOON)

    complete, streamed = asyncio.run(both())
    assert outcome(complete) == outcome(streamed) == outcome(expected)
    assert [sample.eid.rid for sample in complete] == [sample.eid.rid for sample in expected]


def test_a_canceled_task_cancels_the_call() -> None:
    model = llama()
    model.train()
    sampler = engine(model)

    async def start() -> None:
        task = asyncio.create_task(sampler.agenerate([PROMPTS[0]], max_tokens=200, ignore_eos=True))
        while sampler.stats.steps < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with slowly(model, 0, None):
        asyncio.run(asyncio.wait_for(start(), SOON))
        end = time.monotonic() + SOON
        while not model.training and time.monotonic() < end:
            time.sleep(0.005)
        steps = sampler.stats.steps
        time.sleep(0.05)
        assert sampler.stats.steps == steps < 200


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_bad_prompt_fails_alone() -> None:
    sampler = engine()
    prompts: list[Any] = [
        [5, 6],
        [5, 300],
        [],
        "too long " * 10,
        [1] * 256,
        Prompt(text="a<image>", images=[picture()]),
        "fine",
        [{"role": "user", "content": "hi"}],
        [7],
        [8],
        [9],
    ]
    samplings = [Sampling(n=2, max_tokens=8, max_prompt_tokens=64 if i == 3 else None, seed=1) for i in range(11)]
    samplings[8] = Sampling.of(samplings[8], suppress=[5, 300])
    samplings[9] = Sampling.of(samplings[9], suppress=list(range(300)))
    samplings[10] = Sampling.of(samplings[10], extra={"beam_width": 3})
    samples = sampler.generate(prompts, samplings)
    errors = [samples[2 * i].error for i in range(11)]
    assert [sample.error for sample in samples[1::2]] == errors
    assert [i for i, error in enumerate(errors) if error is None] == [0, 6, 7]
    for i, words_ in (
        (1, r"prompt[1]: got token 300, expected one below 300"),
        (2, "prompt: got no tokens"),
        (3, "got 90 tokens, expected at most 64"),
        (4, "got 256 tokens, expected fewer than 256, the model's positions"),
        (5, "expected none: no processor"),
        (8, "suppress[1]: got 300, expected an id below 300"),
        (9, "logits are NaN, infinite or all forbidden"),
        (10, "extra: got ['beam_width'], expected none"),
    ):
        assert words_ in errors[i], errors[i]
    expected = engine().generate(prompts[:1], samplings[0], batch="x")
    assert len(expected) == 2
    for sample in samples:
        assert sample.failed == (sample.error is not None) and sample.to_experience().eid == sample.eid


def test_the_end_of_the_positions_has_finish_reason_length() -> None:
    sampler = engine()
    for pause in (None, 3, 100):
        sample = sampler.generate([[7] * 250], ignore_eos=True, pause_after=pause, seed=1)[0]
        while sample.unfinished:
            sample = sampler.generate(sample, pause_after=pause)[0]
        assert sample.finish_reason == "length" and len(sample.response_ids) == 6 and sample.error is None


def test_models_without_a_key_value_cache_are_rejected() -> None:
    from transformers import MambaConfig, MambaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    griffin = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, lru_width=8
        )
    )
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM, which keeps its state in itself"):
        TransformersEngine(griffin)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM, which keeps its state in cache_params, expected"):
        TransformersEngine(mamba)


def test_wrapped_models_are_unwrapped() -> None:
    plain = tiny.llama()
    expected = TransformersEngine(plain).generate([[5, 6]], max_tokens=4, seed=1, batch=0)[0].response_ids
    compiled = torch.compile(plain)
    parallel = torch.nn.Module()
    parallel.module = plain
    for wrapped in (compiled, parallel):
        assert TransformersEngine(wrapped).generate([[5, 6]], max_tokens=4, seed=1, batch=0)[0].response_ids == expected


def test_resuming_with_other_options_is_recorded() -> None:
    sampler = engine()
    half = sampler.generate([[5, 6]], temperature=0.5, max_tokens=12, pause_after=4, ignore_eos=True, seed=1)[0]
    resumed = sampler.generate(half, {"temperature": 2.0})[0]
    assert (
        resumed.sampling["temperature"] == 2.0
        and resumed.sampling["ignore_eos"]
        and resumed.sampling["asked_seed"] == 1
    )
    assert resumed.sampling["earlier"] == [{"tokens": 4, "temperature": 0.5}]
    assert resumed.response_ids[:4] == half.response_ids and resumed.logprobs[:4] == half.logprobs
    same = sampler.generate(half)[0]
    assert "earlier" not in same.sampling
    sampling = Sampling(temperature=0.5, max_tokens=12, ignore_eos=True, seed=1)
    assert (
        sampler.generate(half, sampling)[0].response_ids == same.response_ids
    )  # the same call's seed: the same stream
    other = sampler.generate(half, seed=2)[0]
    assert other.response_ids[:4] == half.response_ids and other.response_ids != same.response_ids
    with pytest.raises(ValueError, match="n: got 2, expected 1"):
        sampler.generate(half, n=2)


def test_placeholders_without_media_are_an_error() -> None:
    model, processor = tiny.llava()
    sampler = TransformersEngine(model, processor=processor)
    bare, fine = sampler.generate(["<image>hi", "hi"], max_tokens=2)
    assert bare.error == "ValueError: prompt: got 1 media placeholders and no media, expected both or neither"
    assert fine.error is None


def test_truncated_prompts_are_recorded() -> None:
    sample = engine().generate([list(range(10, 40))], max_tokens=2, max_prompt_tokens=8, prompt_overflow="left")[0]
    assert sample.prompt_ids == list(range(32, 40)) and sample.info["prompt_truncated_from"] == 30
    assert sample.to_experience().info["prompt_truncated_from"] == 30


def test_batches_that_do_not_fit_in_memory_are_halved() -> None:
    model = llama()
    unsplit = engine(model).generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)

    def crowded(capacity: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
            if ids.shape[0] * (ids.shape[1] + cache.get_seq_length()) > capacity:
                raise torch.OutOfMemoryError("CUDA out of memory (as a test says)")

        return model.register_forward_pre_hook(hook, with_kwargs=True)

    hook = crowded(60)
    try:
        sampler = engine(model)
        samples = sampler.generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)
        assert sampler.stats.splits > 2
        assert outcome(samples) == outcome(unsplit)
        for sample, expected in zip(samples, unsplit, strict=True):
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    finally:
        hook.remove()
    hook = crowded(15)  # the longest prompt has 10 tokens, and cannot have 12 more
    try:
        samples = engine(model).generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)
    finally:
        hook.remove()
    for sample, expected in zip(samples, unsplit, strict=True):
        if sample.failed:
            assert "out of memory" in sample.error
            assert (
                sample.response_ids == expected.response_ids[: len(sample.response_ids)]
                and len(sample.response_ids) > 0
            )
        else:
            assert sample.response_ids == expected.response_ids
    assert {sample.eid.task for sample in samples if sample.failed} == {1, 3}


def test_a_row_with_nan_logits_fails_alone() -> None:
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    samples = engine(model).generate([[5, 6], [5, 77], [9]], max_tokens=4, seed=0, suppress=[77])
    assert [sample.failed for sample in samples] == [False, True, False]
    assert "token 0: the model's logits are NaN" in samples[1].error


def test_the_model_is_unchanged() -> None:
    model = llama()
    model.train()
    model.model.layers[1].eval()
    model.lm_head.weight.requires_grad_(False)
    training = {name: module.training for name, module in model.named_modules()}
    grads = {name: weight.requires_grad for name, weight in model.named_parameters()}
    engine(model).generate(PROMPTS, max_tokens=3)
    assert {name: module.training for name, module in model.named_modules()} == training
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == grads
    out = model(input_ids=torch.tensor([[5, 6]])).logits.sum()
    out.backward()  # nothing that was made without gradients is in its way
    assert torch.is_grad_enabled()


def test_dropout_is_off_while_sampling() -> None:
    model = llama(attention_dropout=0.5)
    expected = engine(model).generate([PROMPTS[1]], max_tokens=12, seed=1, ignore_eos=True)[0]
    model.train()
    again = engine(model).generate([PROMPTS[1]], max_tokens=12, seed=1, ignore_eos=True)[0]
    assert again.response_ids == expected.response_ids and again.logprobs == expected.logprobs


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 8])
def test_sliding_windows(stride: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.2,
        eos_token_id=2,
    )
    model = MistralForCausalLM(config).eval()
    samplings = [Sampling(n=2, max_tokens=8 + 6 * i, seed=1, ignore_eos=True) for i in range(4)]
    sampler = engine(model)
    sampler.runner.stride = stride
    for sample in sampler.generate(PROMPTS, samplings):
        expected = log_probs(full_logits(model, sample), sample, Sampling(), "processed")
        torch.testing.assert_close(torch.tensor(sample.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
def test_keys_and_values_in_steps(make: Any) -> None:
    """Round up the lengths of keys, as on a CUDA device."""
    samplings = [Sampling(n=3, max_tokens=10 + 5 * i, seed=1, ignore_eos=True) for i in range(4)]
    plain, stepped = engine(make()), engine(make())
    assert plain.runner.stride == 1
    stepped.runner.stride = 8
    expected = plain.generate(numbered(PROMPTS), samplings)
    samples = stepped.generate(numbered(PROMPTS), samplings)
    assert outcome(samples) == outcome(expected)
    for sample, two in zip(samples, expected, strict=True):
        assert sample.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_a_lora_model() -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    sampler = engine(model)
    assert sampler.run.adapter == "default" and sampler.run.model == "LlamaForCausalLM"
    samples = sampler.generate(PROMPTS, n=2, max_tokens=10, seed=1, ignore_eos=True)
    base = engine(llama()).generate(PROMPTS, n=2, max_tokens=10, seed=1, ignore_eos=True)
    assert [sample.response_ids for sample in base] != [sample.response_ids for sample in samples]
    for sample in samples:
        expected = log_probs(full_logits(model, sample), sample, Sampling(), "processed")
        torch.testing.assert_close(torch.tensor(sample.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0)


class Wrapper:
    """An object with a `.model`, like an actor."""

    def __init__(self, model: Any) -> None:
        self.model = model


def test_wrappers_and_invalid_models() -> None:
    model = llama()
    sampler = TransformersEngine(Wrapper(Wrapper(model)), bytes_())
    assert sampler.model is model
    with pytest.raises(ValueError, match="model: got str, expected a transformers model"):
        TransformersEngine("name")
    with pytest.raises(ValueError, match="max_batch_rows: got 0"):
        engine(max_batch_rows=0)


def test_run_describes_model_and_tokenizer() -> None:
    import transformers

    sampler = engine()
    run = sampler.run
    assert run.engine == "transformers" and run.engine_version == transformers.__version__
    assert run.model == "LlamaForCausalLM" and run.adapter is None
    assert run.tokenizer is not None and run.chat_template is not None
    assert run.tokenizer != engine(tokenizer=words()).run.tokenizer
    sample = sampler.generate([PROMPTS[0]], max_tokens=2, temperature=0.5, seed=9)[0]
    assert sample.run_id == run.id and sample.sampling["temperature"] == 0.5
    record = sample.to_experience()
    assert record.sampling["run"] == run.id and record.sampling["seed"] == sample.sampling["seed"]


# --- vision ---------------------------------------------------------------------------------------------------------


def test_no_one_and_two_images_in_one_call(record_property: Any) -> None:
    model, processor = llava()
    calls = []
    inner = type(processor).__call__

    class Counting(type(processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs.get("images"))
            return inner(self, *args, **kwargs)

    processor.__class__ = Counting
    red, green, blue = picture(), picture((0, 255, 0)), picture((0, 0, 255))
    prompts = [
        Prompt(text="a<image>b<image>", images=[red, green]),
        Prompt(text="plain text"),
        Prompt(text="<image>?", images=blue),
        Prompt(text="<image>!", images=red),
    ]
    sampler = TransformersEngine(model, processor)
    samples = sampler.generate(prompts, n=3, max_tokens=10, seed=1, temperature=2.0, ignore_eos=True)
    assert [len(images) for images in calls] == [2, 1, 1]  # once for each prompt with images
    assert sampler.stats.prompts == 4
    largest = 0.0
    for sample in samples:
        assert sample.error is None and sample.sampling["suppress"] == [IMAGE] and IMAGE not in sample.response_ids
        expected = log_probs(
            full_logits(model, sample, **(sample.media or {})), sample, Sampling(temperature=2.0), "processed"
        )
        largest = max(largest, (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max().item())
    record_property("largest difference", largest)
    assert largest < 1e-5
    assert samples[0].media is samples[2].media and samples[3].media is None
    assert samples[0].prompt_ids.count(IMAGE) == 8 and samples[6].prompt_ids.count(IMAGE) == 4
    other = sampler.generate(Prompt(text="x<image>", images=blue), max_tokens=1)[0]
    assert other.media["pixel_values"] is samples[6].media["pixel_values"]  # equal content is one object
    record = samples[0].to_experience()
    assert record.multi_modal_inputs["pixel_values"].shape == (2, 3, 16, 16)
    # The image matters, and is sent to its own prompt.
    swapped = [prompts[0].replace(images=[green, red]), *prompts[1:]]
    again = sampler.generate(swapped, n=3, max_tokens=10, seed=1, temperature=2.0, ignore_eos=True)
    assert [sample.response_ids for sample in again[3:]] == [sample.response_ids for sample in samples[3:]]
    assert again[0].logprobs != samples[0].logprobs


def test_resumed_samples_reuse_processed_images() -> None:
    model, processor = llava()
    prompts = [
        Prompt(text="a<image>", images=picture(), eid=EID(batch=0, task=0)),
        Prompt(text="b", eid=EID(batch=0, task=1)),
    ]
    sampling = Sampling(n=2, max_tokens=12, seed=4, ignore_eos=True)
    expected = TransformersEngine(model, processor).generate(prompts, sampling)
    sampler = TransformersEngine(model, processor)
    paused = sampler.generate(prompts, sampling, pause_after=5)
    on = sampler.generate(paused)
    assert outcome(on) == outcome(expected) and on[0].media is paused[0].media
    lost = [sample.replace(media=None) for sample in paused]  # read back from somewhere without its media
    assert outcome(sampler.generate(lost)) == outcome(expected)


def test_bfloat16_vision() -> None:
    model, processor = llava(dtype=torch.bfloat16)
    samples = TransformersEngine(model, processor).generate(
        [Prompt(text="a<image>", images=picture()), Prompt(text="abc")], n=4, max_tokens=12, seed=0, ignore_eos=True
    )
    gaps = []
    for sample in samples:
        media = {name: value.to(torch.bfloat16) for name, value in (sample.media or {}).items()}
        expected = log_probs(full_logits(model, sample, **media), sample, Sampling(), "processed")
        gaps.append((torch.tensor(sample.logprobs) - expected).abs())
    assert torch.cat(gaps).mean() < 0.02


@pytest.fixture(scope="module")
def qwen_vl() -> Any:
    return tiny.qwen_vl()


def pictured(images: list[tuple[int, int]], seed: int) -> Prompt:
    """Return token ids with expanded placeholders, and processed media."""
    draw = torch.Generator().manual_seed(seed)
    ids = [5 + seed]
    for height, width in images:
        ids += [tiny.START, *[tiny.IMAGE] * (height * width // 4), tiny.END]
    ids += [7 + seed, 9]
    patches = sum(height * width for height, width in images)
    media = {
        "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14, generator=draw),
        "image_grid_thw": torch.tensor([[1, height, width] for height, width in images]),
    }
    return Prompt(token_ids=ids, images=media if images else (), eid=EID(batch=0, task=seed, suffix=""))


@pytest.mark.parametrize("stride", [1, 16])
def test_spatial_positions(qwen_vl: Any, stride: int, record_property: Any) -> None:
    prompts = [pictured(images, i) for i, images in enumerate(([(4, 4)], [], [(4, 8), (8, 4)], [(4, 4), (8, 8)]))]
    sampler, places = TransformersEngine(qwen_vl), [tiny.IMAGE, tiny.VIDEO, tiny.START]
    sampler.runner.stride = stride
    sampling = Sampling(n=2, max_tokens=14, seed=5, ignore_eos=True)
    samples = sampler.generate(prompts, sampling)
    largest = 0.0
    for sample in samples:
        assert sample.error is None, sample.error
        assert sample.sampling["suppress"] == places and not set(sample.response_ids) & {*places}
        qwen_vl.model.rope_deltas = None  # kept from call to call by the model
        media = dict(sample.media or {})
        if media:
            kinds = torch.tensor([[int(token == tiny.IMAGE) for token in (*sample.prompt_ids, *sample.response_ids)]])
            assert media["mm_token_type_ids"].tolist() == kinds[:, : len(sample.prompt_ids)].tolist()
            media["mm_token_type_ids"] = kinds
        expected = log_probs(full_logits(qwen_vl, sample, **media), sample, Sampling(), "processed")
        largest = max(largest, (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max().item())
    record_property("largest difference", largest)
    print(f"positions in space: largest difference {largest:.1e}")
    assert largest < 1e-4
    qwen_vl.model.rope_deltas = None
    paused = sampler.generate(prompts, sampling, pause_after=6)
    assert outcome(sampler.generate(paused)) == outcome(samples)
    assert qwen_vl.model.rope_deltas is None  # the model keeps nothing of a rollout


def test_greedy_with_images_equals_generate(qwen_vl: Any) -> None:
    prompt = pictured([(4, 8), (4, 4)], 3)
    sample = TransformersEngine(qwen_vl).generate([prompt, pictured([], 1)], temperature=0, max_tokens=10)[0]
    ids = torch.tensor([sample.prompt_ids])
    expected = qwen_vl.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=10,
        **sample.media,
        suppress_tokens=[tiny.IMAGE, tiny.VIDEO, tiny.START],
    )
    qwen_vl.model.rope_deltas = None
    assert sample.response_ids == expected[0, ids.shape[1] :].tolist()


def test_an_actor_has_one_engine() -> None:
    actor = Actor(tiny.llama(), tokenizer=tiny.words(), suppress=[7])
    shared = TransformersEngine(actor)
    shared.version = 4
    assert TransformersEngine(actor) is shared and TransformersEngine(actor).version == 4
    assert shared.tokenizer is actor.tokenizer and shared.model is actor.model and 7 in shared.runner.suppressed
    other = TransformersEngine(actor, max_batch_rows=2)
    assert other is not shared and other.tokenizer is actor.tokenizer and 7 in other.runner.suppressed
    assert TransformersEngine(copy.deepcopy(actor)) is not shared
    reference = weakref.ref(actor)
    del actor, shared, other
    gc.collect()
    assert reference() is None
