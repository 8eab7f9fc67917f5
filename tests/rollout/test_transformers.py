"""The transformers engine: real tiny models, sampled as their own forward passes say, alone or in any batch."""

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
"""Seconds after which a test that waits gives up."""


def engine(model: Any = None, tokenizer: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(
        llama() if model is None else model, bytes_() if tokenizer is None else tokenizer, **options
    )


def numbered(prompts: list[list[int]]) -> list[Prompt]:
    """Prompts with ids of their own, so that their random streams do not depend on their places."""
    return [Prompt(token_ids=ids, eid=EID(batch=0, task=i, suffix="")) for i, ids in enumerate(prompts)]


def full_logits(model: Any, sample: Sample, **media: Any) -> torch.Tensor:
    """(R, V) float32: the logits of each response token, from one plain forward pass over the whole sample alone."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0].float()
    return logits[len(sample.prompt_ids) - 1 : -1]


def log_probs(logits: torch.Tensor, sample: Sample, how: Sampling, kind: str) -> torch.Tensor:
    """What the kinds of log-probs are, written down once more: for each token, in float64, over a sorted vocabulary."""
    found = []
    for i, token in enumerate(sample.response_ids):
        own = logits[i].double()
        heat = how.first_temperature if i == 0 and how.first_temperature is not None else how.temperature
        if kind == "raw":
            found.append(own.log_softmax(-1)[token])
            continue
        own = own / heat
        own[list(sample.sampling["suppress"])] = -torch.inf
        if kind == "processed":
            own[[2, *how.stop_token_ids] if i < how.min_tokens else []] = -torch.inf
            ordered = own.sort(descending=True).values
            if how.top_k > 0:
                own[own < ordered[how.top_k - 1]] = -torch.inf
            ordered = own.sort(descending=True).values
            mass = ordered.softmax(-1).cumsum(-1)
            own[own < ordered[min(int((mass < how.top_p).sum()), len(own) - 1)]] = -torch.inf
            if how.min_p > 0:
                own[own.softmax(-1) < how.min_p * own.softmax(-1).max() * (1 - 1e-9)] = -torch.inf
        found.append(own.log_softmax(-1)[token])
    return torch.stack(found)


# --- against the model itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
def test_greedy_is_what_generate_gives(make: Any) -> None:
    model = make()
    samples = engine(model).generate(PROMPTS, temperature=0, max_tokens=24)
    ended = 0
    for ids, sample in zip(PROMPTS, samples, strict=True):
        row = torch.tensor([ids])
        want = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=24)
        assert sample.response_ids == want[0, len(ids) :].tolist()
        assert sample.finish_reason == ("stop" if sample.response_ids[-1] == 2 else "length")
        assert sample.logprobs_kind == "raw"
        ended += sample.finish_reason == "stop"
    padded = torch.tensor([[0] * (10 - len(ids)) + ids for ids in PROMPTS])
    want = model.generate(padded, attention_mask=(padded != 0).long(), do_sample=False, max_new_tokens=24)
    for row, sample in zip(want[:, 10:].tolist(), samples, strict=True):
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
def test_log_probs_are_those_of_a_plain_forward_pass(make: Any, kind: Any, record_property: Any) -> None:
    model = make()
    hows = [Sampling.of(how, n=2, max_tokens=16, seed=3, logprobs=kind) for how in HOWS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(hows))]
    samples = engine(model).generate(prompts, hows)  # one batch of rules that all differ
    largest = 0.0
    for i, sample in enumerate(samples):
        assert sample.logprobs is not None and sample.logprobs_kind == kind
        want = log_probs(full_logits(model, sample), sample, hows[i // 2], kind)
        assert want.isfinite().all(), "a token was sampled that its rule forbids"
        largest = max(largest, (torch.tensor(sample.logprobs, dtype=torch.float64) - want).abs().max().item())
    record_property("largest difference", largest)
    print(f"{make.__name__}, {kind}: largest difference {largest:.1e}")
    assert largest < 1e-5


def test_bfloat16_log_probs(record_property: Any) -> None:
    model = llama(dtype=torch.bfloat16)
    samples = engine(model).generate(PROMPTS, n=4, max_tokens=24, seed=0, ignore_eos=True)
    gaps = torch.cat(
        [
            (torch.tensor(one.logprobs) - log_probs(full_logits(model, one), one, Sampling(), "processed")).abs()
            for one in samples
        ]
    )
    record_property("largest difference", gaps.max().item())
    print(f"bfloat16: mean {gaps.mean():.1e}, largest {gaps.max():.1e}")
    assert gaps.mean() < 0.02


def test_temperature_zero_is_raw_and_says_so() -> None:
    sample = engine().generate([PROMPTS[0]], temperature=0, max_tokens=5, logprobs="processed")[0]
    want = log_probs(full_logits(llama(), sample), sample, Sampling(), "raw")
    torch.testing.assert_close(torch.tensor(sample.logprobs, dtype=torch.float64), want, atol=1e-5, rtol=0)
    assert sample.logprobs_kind == "raw"
    assert sample.to_experience().sampling["logprobs"] == "raw"
    without = engine().generate([PROMPTS[0]], temperature=0, max_tokens=5, logprobs=None)[0]
    assert without.logprobs is None and without.response_ids == sample.response_ids


# --- seeds, batches, prefills ---------------------------------------------------------------------------------------


def outcome(samples: list[Sample]) -> dict[str, Any]:
    return {one.eid.rid: (one.response_ids, one.finish_reason, one.stop_reason, one.text) for one in samples}


def test_samples_do_not_depend_on_the_batch() -> None:
    prompts = numbered(PROMPTS)
    how = Sampling(n=3, max_tokens=20, seed=11, top_p=0.98, stop=["a"], min_tokens=1)
    want = engine().generate(prompts, how)
    assert len({tuple(one.response_ids) for one in want}) == 12
    for rows, tokens in ((1, 10**6), (2, 10**6), (5, 10**6), (256, 64), (256, 1)):
        other = engine(max_batch_rows=rows, max_batch_tokens=tokens)
        assert outcome(other.generate(prompts[::-1], how)) == outcome(want), (rows, tokens)
    alone = [one for prompt in prompts for one in engine().generate(prompt, how)]
    assert outcome(alone) == outcome(want)
    for one, two in zip(alone, want, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    unnamed = [engine().generate(PROMPTS, how) for _ in range(2)]
    assert [one.response_ids for one in unnamed[0]] == [one.response_ids for one in unnamed[1]]
    assert unnamed[0][0].eid.batch != unnamed[1][0].eid.batch
    again = engine().generate(prompts, how)
    assert [str(one.eid) for one in again] == [str(one.eid) for one in want]
    assert outcome(engine().generate(prompts, how, seed=12)) != outcome(want)


def test_samples_are_drawn_from_the_models_distribution() -> None:
    model = llama(vocab=24)
    count = 6000
    sampler = TransformersEngine(model, max_batch_rows=2000)
    samples = sampler.generate([Prompt(token_ids=[3, 4])], n=count, max_tokens=1, seed=5, top_k=15, temperature=2.0)
    assert sampler.stats.prompts == 3  # a prompt once for each batch
    seen = torch.zeros(24).index_add_(0, torch.tensor([one.response_ids[0] for one in samples]), torch.ones(count))
    logits = full_logits(model, samples[0])[0] / 2.0
    logits[logits < logits.topk(15).values[-1]] = -torch.inf
    expected = logits.softmax(-1) * count
    assert seen[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert statistic < 14 + 5 * (2 * 14) ** 0.5  # 14 degrees of freedom, five standard deviations


def test_a_prompt_is_run_once_for_all_its_samples() -> None:
    sampler = engine()
    sampler.generate(numbered(PROMPTS), n=8, max_tokens=4, ignore_eos=True)
    assert sampler.stats.prompts == 4 and sampler.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert sampler.stats.steps == 4 and sampler.stats.rows == 3 * 32 and sampler.stats.tokens == 4 * 32


def test_a_long_tail_does_not_pay_for_the_whole_batch() -> None:
    sampler = engine()
    hows = [Sampling(max_tokens=3 + 40 * (i == 7), ignore_eos=True) for i in range(16)]
    samples = sampler.generate([[5 + i] for i in range(16)], hows)
    assert [len(one.response_ids) for one in samples] == [how.max_tokens for how in hows]
    assert sampler.stats.steps == 43 and sampler.stats.rows == 2 * 16 + 40


def test_finished_rows_stay_within_learned_positions() -> None:
    model = gpt2()
    whole = [Sampling(max_tokens=250, ignore_eos=True)] * 8 + [Sampling(max_tokens=4, ignore_eos=True)]
    prompts = [*[[5 + i] for i in range(8)], [7] * 252]  # one that is finished at the last position, and is not dropped
    samples = TransformersEngine(model).generate(prompts, whole, seed=1)
    assert [one.error for one in samples] == [None] * 9
    assert [len(one.response_ids) for one in samples] == [250] * 8 + [4]


# --- ends -----------------------------------------------------------------------------------------------------------


def test_ends_of_the_model_config_and_tokenizer() -> None:
    model = llama()
    model.generation_config.eos_token_id = [2, 60]
    model.config.eos_token_id = 61
    sampler = engine(model)
    assert sampler.ends == {2, 60, 61}
    samples = sampler.generate(PROMPTS, n=32, max_tokens=40, temperature=3.0, seed=0)
    stopped = [one for one in samples if one.finish_reason == "stop"]
    assert {one.response_ids[-1] for one in stopped} == {2, 60, 61}
    assert all(one.stop_reason is None for one in stopped)
    assert not any(set(one.response_ids[:-1]) & {2, 60, 61} for one in samples)
    ignored = sampler.generate(PROMPTS, n=32, max_tokens=40, temperature=3.0, seed=0, ignore_eos=True)
    assert all(one.finish_reason == "length" for one in ignored)
    assert any(set(one.response_ids) & {2, 60, 61} for one in ignored)


def test_stop_ids_are_recorded_and_forbidden_before_min_tokens() -> None:
    stops = list(range(20, 120))
    sampler = engine()
    samples = sampler.generate(PROMPTS, n=8, max_tokens=12, temperature=3.0, seed=0, stop_token_ids=stops, min_tokens=5)
    for one in samples:
        assert not set(one.response_ids[:5]) & {2, *stops}
        if one.response_ids[-1] in stops:
            assert one.finish_reason == "stop" and one.stop_reason == one.response_ids[-1]
    assert any(one.stop_reason is not None for one in samples)
    first = sampler.generate(PROMPTS, n=8, max_tokens=12, temperature=3.0, seed=0, stop_token_ids=stops)
    assert any(len(one.response_ids) == 1 for one in first)  # an empty answer is an answer
    kept, cut = (
        sampler.generate(PROMPTS[0], max_tokens=12, seed=4, stop_token_ids=stops, include_stop=keep)[0]
        for keep in (True, False)
    )
    assert kept.response_ids == cut.response_ids and kept.stop_reason == kept.response_ids[-1]
    assert kept.text == bytes_().decode(kept.response_ids, skip_special_tokens=True)
    assert cut.text == bytes_().decode(kept.response_ids[:-1], skip_special_tokens=True)


def test_stop_texts_over_tokens_and_characters() -> None:
    tokenizer = bytes_()
    sampler = engine()
    base = sampler.generate(numbered(PROMPTS), n=4, max_tokens=60, seed=2, temperature=2.0, suppress=range(9))
    checked = 0
    for one in base:
        text = tokenizer.decode(one.response_ids)
        middle = text[12:15]
        if len(middle) < 3 or text.find(middle) != 12:
            continue
        prompt = one.prompt.replace(eid=one.eid.replace(suffix=""))
        for include in (True, False):
            got = sampler.generate(
                prompt,
                seed=2,
                temperature=2.0,
                max_tokens=60,
                suppress=range(9),
                stop=[middle, "never"],
                include_stop=include,
            )[0]
            assert got.stop_reason == middle and got.finish_reason == "stop"
            assert got.response_ids == one.response_ids[: len(got.response_ids)]
            assert middle in tokenizer.decode(got.response_ids) and middle not in tokenizer.decode(
                got.response_ids[:-1]
            )
            clean = tokenizer.decode(got.response_ids, skip_special_tokens=True)
            assert got.text == (clean if include else clean[: clean.rfind(middle)])
        checked += 1
    assert checked > 4


def test_a_stop_text_that_ends_inside_a_token() -> None:
    tokenizer = words()
    sampler = engine(llama(vocab=len(tokenizer)), tokenizer)
    base = sampler.generate([[20, 21]], temperature=0, max_tokens=30, ignore_eos=True)[0]
    text = tokenizer.decode(base.response_ids)
    stop = text.split()[6][:-1] if len(text.split()[6]) > 1 else text.split()[6]
    got = sampler.generate([[20, 21]], temperature=0, max_tokens=30, ignore_eos=True, stop=stop, include_stop=False)[0]
    assert got.stop_reason == stop
    count = next(i for i in range(1, 31) if stop in tokenizer.decode(base.response_ids[:i]))
    assert got.response_ids == base.response_ids[:count]  # whole tokens
    assert got.text == tokenizer.decode(got.response_ids, skip_special_tokens=True).split(stop)[0]


def test_text_has_no_special_tokens() -> None:
    tokenizer = words()
    sampler = engine(llama(vocab=len(tokenizer)), tokenizer)
    samples = sampler.generate([[20, 21]], n=20, max_tokens=20, temperature=5.0, seed=1, ignore_eos=True)
    assert any(set(one.response_ids) & set(range(9)) for one in samples)
    for one in samples:
        assert one.text == tokenizer.decode(one.response_ids, skip_special_tokens=True)
        assert not any(mark in one.text for mark in SPECIAL if mark != "<unk>")


# --- FIRE -----------------------------------------------------------------------------------------------------------


def test_the_first_token_alone_is_hot() -> None:
    sampler = engine()
    hot = sampler.generate(PROMPTS[:1], n=64, max_tokens=6, temperature=0, first_temperature=50.0, seed=1)
    assert len({one.response_ids[0] for one in hot}) > 30
    for one in hot:
        greedy = sampler.generate([[*PROMPTS[0], one.response_ids[0]]], max_tokens=5, temperature=0)[0]
        ended = one.response_ids[0] == 2
        assert one.response_ids[1:] == ([] if ended else greedy.response_ids)
    model = llama()
    how = Sampling(temperature=0.7, first_temperature=9.0, top_k=20, seed=3, max_tokens=4, n=8)
    for one in sampler.generate(PROMPTS, how):
        want = log_probs(full_logits(model, one), one, how, "processed")
        torch.testing.assert_close(torch.tensor(one.logprobs, dtype=torch.float64), want, atol=1e-5, rtol=0)


def test_a_hot_first_token_that_ends_the_response() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely
    sampler = engine(model)
    samples = sampler.generate([[5]], n=600, max_tokens=8, first_temperature=10.0, temperature=1.0, seed=0)
    ended = [one for one in samples if one.response_ids[0] == 2]
    assert ended
    for one in ended:
        assert one.response_ids == [2] and one.finish_reason == "stop" and one.text == "" and len(one.logprobs) == 1


# --- pausing, going on, cancelling ------------------------------------------------------------------------------------


def test_going_on_gives_what_an_uninterrupted_rollout_gives() -> None:
    how = Sampling(
        n=3, max_tokens=20, seed=7, temperature=1.5, top_p=0.97, first_temperature=3.0, min_tokens=4, stop=["b"]
    )
    want = engine().generate(numbered(PROMPTS), how)
    sampler = engine(version=1)
    samples = sampler.generate(numbered(PROMPTS), how, pause_after=3)
    assert all(one.finish_reason == "abort" and len(one.response_ids) == 3 for one in samples)
    rounds = 0
    while any(one.unfinished for one in samples):
        sampler.version += 1
        going = sampler.generate([one for one in samples if one.unfinished], pause_after=6)
        byid = {one.eid.uid: one for one in going}
        samples = [byid.get(one.eid.uid, one) for one in samples]
        rounds += 1
    assert rounds == 3
    assert outcome(samples) == outcome(want)
    for one, whole in zip(samples, want, strict=True):
        assert one.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        count = len(one.response_ids)
        assert one.versions == ([1] * 3 + [2] * 6 + [3] * 6 + [4] * 6)[:count]
        assert one.group_size == 3 and str(one.eid) == str(whole.eid)
        assert one.to_experience().policy_versions.tolist() == one.versions


def test_going_on_under_newer_weights() -> None:
    model = llama()
    sampler = engine(model, version=4)
    old = sampler.generate([PROMPTS[0]], n=4, max_tokens=10, seed=1, ignore_eos=True, pause_after=5)
    with torch.no_grad():
        model.lm_head.weight.add_(
            torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.2
        )
    sampler.version = 5
    for before, one in zip(old, sampler.generate(old), strict=True):
        assert one.response_ids[:5] == before.response_ids and one.logprobs[:5] == before.logprobs
        assert one.versions == [4] * 5 + [5] * 5
        want = log_probs(full_logits(model, one), one, Sampling(), "processed")[5:]
        torch.testing.assert_close(torch.tensor(one.logprobs[5:], dtype=torch.float64), want, atol=1e-5, rtol=0)


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


def test_a_sample_that_goes_on_keeps_its_kind_of_log_probs() -> None:
    sampler = engine()
    old = sampler.generate([PROMPTS[0]], max_tokens=10, pause_after=5, ignore_eos=True)
    failed = sampler.generate(old, {"max_tokens": 10, "logprobs": "raw"})[0]
    assert failed.error == "ValueError: logprobs: got 'raw', expected 'processed', which the sample has so far"
    assert failed.response_ids == old[0].response_ids  # as far as it got


@contextmanager
def slowly(model: Any, after: int, then: Any) -> Iterator[None]:
    """Call `then` once the model was called so many times, and let it take its time from there on."""
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
    assert len(samples) == 12 and all(one.finish_reason == "abort" for one in samples)
    lengths = [len(one.response_ids) for one in samples]
    assert max(lengths) < 200 and sorted(lengths)[5] == 0  # the second batch had not begun
    for one in samples:
        assert len(one.logprobs) == len(one.versions) == len(one.response_ids) and one.prompt_ids
    want = engine().generate(numbered(PROMPTS), n=3, max_tokens=200, seed=1, ignore_eos=True)
    assert outcome(engine().generate(samples)) == outcome(want)


def test_canceled_before_it_began() -> None:
    cancel = Cancel()
    cancel.request()
    sampler = engine()
    samples = sampler.generate(["abc", [5, 6]], max_tokens=5, seed=1, cancel=cancel)
    assert [(one.finish_reason, one.prompt_ids, one.response_ids) for one in samples] == [
        ("abort", [], []),
        ("abort", [5, 6], []),
    ]
    assert sampler.stats.steps == 0
    on = sampler.generate(samples)
    assert on[0].prompt_ids == bytes_()("abc")["input_ids"] and len(on[0].response_ids) > 0
    assert [one.error for one in on] == [None, None]


def test_streamed_as_they_finish_and_left_early() -> None:
    model = llama()
    model.train()
    sampler = engine(model)
    hows = [Sampling(max_tokens=count, ignore_eos=True) for count in (30, 3, 12)]
    lengths = [len(one.response_ids) for one in sampler.stream(PROMPTS[:3], hows)]
    assert lengths == [3, 12, 30]
    before = sampler.stats.steps
    for one in sampler.stream(PROMPTS[:3], hows):
        assert torch.is_grad_enabled() and model.training  # between samples the model is the caller's
        assert len(one.response_ids) == 3
        inner = sampler.generate([PROMPTS[3]], max_tokens=2, ignore_eos=True)  # it can be used meanwhile
        assert len(inner[0].response_ids) == 2
        break
    assert sampler.stats.steps == before + 3 + 2


def test_async() -> None:
    sampler = engine()
    how = Sampling(n=2, max_tokens=12, seed=3, ignore_eos=True)
    want = sampler.generate(numbered(PROMPTS), how)

    async def both() -> tuple[Any, ...]:
        async def streamed() -> list[Sample]:
            return [one async for one in sampler.astream(numbered(PROMPTS[::1]), how)]

        return await asyncio.wait_for(asyncio.gather(sampler.agenerate(numbered(PROMPTS), how), streamed()), SOON)

    whole, streamed = asyncio.run(both())
    assert outcome(whole) == outcome(streamed) == outcome(want)
    assert [one.eid.rid for one in whole] == [one.eid.rid for one in want]


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
    hows = [Sampling(n=2, max_tokens=8, max_prompt_tokens=64 if i == 3 else None, seed=1) for i in range(11)]
    hows[8] = Sampling.of(hows[8], suppress=[5, 300])
    hows[9] = Sampling.of(hows[9], suppress=list(range(300)))
    hows[10] = Sampling.of(hows[10], extra={"beam_width": 3})
    samples = sampler.generate(prompts, hows)
    errors = [samples[2 * i].error for i in range(11)]
    assert [one.error for one in samples[1::2]] == errors
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
    want = engine().generate(prompts[:1], hows[0], batch="x")
    assert len(want) == 2
    for one in samples:
        assert one.failed == (one.error is not None) and one.to_experience().eid == one.eid


def test_positions_end_a_response_as_a_length_does() -> None:
    sampler = engine()
    for pause in (None, 3, 100):
        sample = sampler.generate([[7] * 250], ignore_eos=True, pause_after=pause, seed=1)[0]
        while sample.unfinished:
            sample = sampler.generate(sample, pause_after=pause)[0]
        assert sample.finish_reason == "length" and len(sample.response_ids) == 6 and sample.error is None


def test_models_with_a_memory_of_another_kind_are_refused() -> None:
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


def test_wrapped_models_are_the_models_inside() -> None:
    plain = tiny.llama()
    want = TransformersEngine(plain).generate([[5, 6]], max_tokens=4, seed=1, batch=0)[0].response_ids
    compiled = torch.compile(plain)
    parallel = torch.nn.Module()
    parallel.module = plain
    for wrapped in (compiled, parallel):
        assert TransformersEngine(wrapped).generate([[5, 6]], max_tokens=4, seed=1, batch=0)[0].response_ids == want


def test_going_on_under_other_options_is_recorded() -> None:
    sampler = engine()
    half = sampler.generate([[5, 6]], temperature=0.5, max_tokens=12, pause_after=4, ignore_eos=True, seed=1)[0]
    whole = sampler.generate(half, {"temperature": 2.0})[0]
    assert whole.sampling["temperature"] == 2.0 and whole.sampling["ignore_eos"] and whole.sampling["asked_seed"] == 1
    assert whole.sampling["earlier"] == [{"tokens": 4, "temperature": 0.5}]
    assert whole.response_ids[:4] == half.response_ids and whole.logprobs[:4] == half.logprobs
    same = sampler.generate(half)[0]
    assert "earlier" not in same.sampling
    asked = Sampling(temperature=0.5, max_tokens=12, ignore_eos=True, seed=1)
    assert sampler.generate(half, asked)[0].response_ids == same.response_ids  # the same call's seed: the same stream
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


def test_prompts_that_are_cut_say_so() -> None:
    sample = engine().generate([list(range(10, 40))], max_tokens=2, max_prompt_tokens=8, prompt_overflow="left")[0]
    assert sample.prompt_ids == list(range(32, 40)) and sample.info["prompt_truncated_from"] == 30
    assert sample.to_experience().info["prompt_truncated_from"] == 30


def test_what_does_not_fit_in_memory_is_halved() -> None:
    model = llama()
    want = engine(model).generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)

    def crowded(most: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
            if ids.shape[0] * (ids.shape[1] + cache.get_seq_length()) > most:
                raise torch.OutOfMemoryError("CUDA out of memory (as a test says)")

        return model.register_forward_pre_hook(hook, with_kwargs=True)

    hook = crowded(60)
    try:
        sampler = engine(model)
        samples = sampler.generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)
        assert sampler.stats.splits > 2
        assert outcome(samples) == outcome(want)
        for one, whole in zip(samples, want, strict=True):
            assert one.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    finally:
        hook.remove()
    hook = crowded(15)  # the longest prompt has 10 tokens, and cannot have 12 more
    try:
        samples = engine(model).generate(numbered(PROMPTS), n=4, max_tokens=12, seed=1, ignore_eos=True)
    finally:
        hook.remove()
    for one, whole in zip(samples, want, strict=True):
        if one.failed:
            assert "out of memory" in one.error
            assert one.response_ids == whole.response_ids[: len(one.response_ids)] and len(one.response_ids) > 0
        else:
            assert one.response_ids == whole.response_ids
    assert {one.eid.task for one in samples if one.failed} == {1, 3}


def test_a_row_whose_logits_break_down_fails_alone() -> None:
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    samples = engine(model).generate([[5, 6], [5, 77], [9]], max_tokens=4, seed=0, suppress=[77])
    assert [one.failed for one in samples] == [False, True, False]
    assert "token 0: the model's logits are NaN" in samples[1].error


def test_the_model_is_left_as_it_was() -> None:
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


def test_dropout_does_not_touch_sampling() -> None:
    model = llama(attention_dropout=0.5)
    want = engine(model).generate([PROMPTS[1]], max_tokens=12, seed=1, ignore_eos=True)[0]
    model.train()
    again = engine(model).generate([PROMPTS[1]], max_tokens=12, seed=1, ignore_eos=True)[0]
    assert again.response_ids == want.response_ids and again.logprobs == want.logprobs


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
    hows = [Sampling(n=2, max_tokens=8 + 6 * i, seed=1, ignore_eos=True) for i in range(4)]
    sampler = engine(model)
    sampler.runner.stride = stride
    for one in sampler.generate(PROMPTS, hows):
        want = log_probs(full_logits(model, one), one, Sampling(), "processed")
        torch.testing.assert_close(torch.tensor(one.logprobs, dtype=torch.float64), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [llama, qwen3, gpt2])
def test_keys_and_values_in_steps(make: Any) -> None:
    """As on a CUDA device, where the lengths of keys are rounded up."""
    hows = [Sampling(n=3, max_tokens=10 + 5 * i, seed=1, ignore_eos=True) for i in range(4)]
    plain, stepped = engine(make()), engine(make())
    assert plain.runner.stride == 1
    stepped.runner.stride = 8
    want = plain.generate(numbered(PROMPTS), hows)
    found = stepped.generate(numbered(PROMPTS), hows)
    assert outcome(found) == outcome(want)
    for one, two in zip(found, want, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_a_lora_model() -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    sampler = engine(model)
    assert sampler.run.adapter == "default" and sampler.run.model == "LlamaForCausalLM"
    samples = sampler.generate(PROMPTS, n=2, max_tokens=10, seed=1, ignore_eos=True)
    base = engine(llama()).generate(PROMPTS, n=2, max_tokens=10, seed=1, ignore_eos=True)
    assert [one.response_ids for one in base] != [one.response_ids for one in samples]
    for one in samples:
        want = log_probs(full_logits(model, one), one, Sampling(), "processed")
        torch.testing.assert_close(torch.tensor(one.logprobs, dtype=torch.float64), want, atol=1e-5, rtol=0)


class Wrapper:
    """As an actor has its model."""

    def __init__(self, model: Any) -> None:
        self.model = model


def test_wrappers_and_what_is_no_model() -> None:
    model = llama()
    sampler = TransformersEngine(Wrapper(Wrapper(model)), bytes_())
    assert sampler.model is model
    with pytest.raises(ValueError, match="model: got str, expected a transformers model"):
        TransformersEngine("name")
    with pytest.raises(ValueError, match="max_batch_rows: got 0"):
        engine(max_batch_rows=0)


def test_the_run_says_what_made_its_samples() -> None:
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
    for one in samples:
        assert one.error is None and one.sampling["suppress"] == [IMAGE] and IMAGE not in one.response_ids
        want = log_probs(full_logits(model, one, **(one.media or {})), one, Sampling(temperature=2.0), "processed")
        largest = max(largest, (torch.tensor(one.logprobs, dtype=torch.float64) - want).abs().max().item())
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
    assert [one.response_ids for one in again[3:]] == [one.response_ids for one in samples[3:]]
    assert again[0].logprobs != samples[0].logprobs


def test_a_sample_with_images_goes_on_without_processing_them_again() -> None:
    model, processor = llava()
    prompts = [
        Prompt(text="a<image>", images=picture(), eid=EID(batch=0, task=0)),
        Prompt(text="b", eid=EID(batch=0, task=1)),
    ]
    how = Sampling(n=2, max_tokens=12, seed=4, ignore_eos=True)
    want = TransformersEngine(model, processor).generate(prompts, how)
    sampler = TransformersEngine(model, processor)
    paused = sampler.generate(prompts, how, pause_after=5)
    on = sampler.generate(paused)
    assert outcome(on) == outcome(want) and on[0].media is paused[0].media
    lost = [one.replace(media=None) for one in paused]  # read back from somewhere without its media
    assert outcome(sampler.generate(lost)) == outcome(want)


def test_bfloat16_vision() -> None:
    model, processor = llava(dtype=torch.bfloat16)
    samples = TransformersEngine(model, processor).generate(
        [Prompt(text="a<image>", images=picture()), Prompt(text="abc")], n=4, max_tokens=12, seed=0, ignore_eos=True
    )
    gaps = []
    for one in samples:
        media = {name: value.to(torch.bfloat16) for name, value in (one.media or {}).items()}
        want = log_probs(full_logits(model, one, **media), one, Sampling(), "processed")
        gaps.append((torch.tensor(one.logprobs) - want).abs())
    assert torch.cat(gaps).mean() < 0.02


@pytest.fixture(scope="module")
def qwen_vl() -> Any:
    return tiny.qwen_vl()


def pictured(images: list[tuple[int, int]], seed: int) -> Prompt:
    """Token ids with expanded placeholders, and media that are processed already."""
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
def test_positions_in_space(qwen_vl: Any, stride: int, record_property: Any) -> None:
    prompts = [pictured(images, i) for i, images in enumerate(([(4, 4)], [], [(4, 8), (8, 4)], [(4, 4), (8, 8)]))]
    sampler, places = TransformersEngine(qwen_vl), [tiny.IMAGE, tiny.VIDEO, tiny.START]
    sampler.runner.stride = stride
    how = Sampling(n=2, max_tokens=14, seed=5, ignore_eos=True)
    samples = sampler.generate(prompts, how)
    largest = 0.0
    for one in samples:
        assert one.error is None, one.error
        assert one.sampling["suppress"] == places and not set(one.response_ids) & {*places}
        qwen_vl.model.rope_deltas = None  # kept from call to call by the model
        media = dict(one.media or {})
        if media:
            kinds = torch.tensor([[int(token == tiny.IMAGE) for token in (*one.prompt_ids, *one.response_ids)]])
            assert media["mm_token_type_ids"].tolist() == kinds[:, : len(one.prompt_ids)].tolist()
            media["mm_token_type_ids"] = kinds
        want = log_probs(full_logits(qwen_vl, one, **media), one, Sampling(), "processed")
        largest = max(largest, (torch.tensor(one.logprobs, dtype=torch.float64) - want).abs().max().item())
    record_property("largest difference", largest)
    print(f"positions in space: largest difference {largest:.1e}")
    assert largest < 1e-4
    qwen_vl.model.rope_deltas = None
    paused = sampler.generate(prompts, how, pause_after=6)
    assert outcome(sampler.generate(paused)) == outcome(samples)
    assert qwen_vl.model.rope_deltas is None  # the model keeps nothing of a rollout


def test_greedy_with_images_is_what_generate_gives(qwen_vl: Any) -> None:
    prompt = pictured([(4, 8), (4, 4)], 3)
    sample = TransformersEngine(qwen_vl).generate([prompt, pictured([], 1)], temperature=0, max_tokens=10)[0]
    ids = torch.tensor([sample.prompt_ids])
    want = qwen_vl.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=10,
        **sample.media,
        suppress_tokens=[tiny.IMAGE, tiny.VIDEO, tiny.START],
    )
    qwen_vl.model.rope_deltas = None
    assert sample.response_ids == want[0, ids.shape[1] :].tolist()


def test_an_actor_has_one_engine() -> None:
    actor = Actor(tiny.llama(), tokenizer=tiny.words(), suppress=[7])
    shared = TransformersEngine(actor)
    shared.version = 4
    assert TransformersEngine(actor) is shared and TransformersEngine(actor).version == 4
    assert shared.tokenizer is actor.tokenizer and shared.model is actor.model and 7 in shared.runner.suppressed
    other = TransformersEngine(actor, max_batch_rows=2)
    assert other is not shared and other.tokenizer is actor.tokenizer and 7 in other.runner.suppressed
    assert TransformersEngine(copy.deepcopy(actor)) is not shared
    gone = weakref.ref(actor)
    del actor, shared, other
    gc.collect()
    assert gone() is None
