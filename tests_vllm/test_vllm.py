"""`OpenAIEngine` with a vLLM server: ids and log-probs equal those of transformers with the same weights; n, seeds,
chats, tools, stops, cancellation and continued samples."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from rollbook.rollout import Cancel, Prompt, Sampling
from rollbook.rollout.openai import OpenAIEngine
from tests import tiny
from tests_vllm.conftest import MAX_LENGTH, largest, model_logprobs, vllm

CHAT = [{"role": "user", "content": "two plus three?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        },
    }
]


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm(folder, log, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as address:
        yield address


@pytest.fixture(scope="module")
def engine(url):
    with OpenAIEngine(url) as engine:
        yield engine


def test_the_server_is_detected(engine):
    run = engine.run
    assert run.engine == "vllm" and run.engine_version[0].isdigit() and run.model == "tiny"
    assert any("--logprobs-mode" in limitation for limitation in run.limitations)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_raw_logprobs_equal_those_of_transformers(engine, model, stream, record_property):
    prompts = ["hello", [20, 30, 40], CHAT]
    tokenizer = tiny.bytes_()
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    expected = [tokenizer("hello")["input_ids"], [20, 30, 40], tokenizer(text)["input_ids"]]
    worst = 0.0
    for temperature in (1.0, 0.7, 1.5):
        samples = engine.generate(
            prompts, n=4, max_tokens=64, temperature=temperature, seed=3, batch=0, cancel=Cancel() if stream else None
        )
        assert not any(sample.failed for sample in samples), samples[0].error
        for i, sample in enumerate(samples):
            assert list(sample.prompt_ids) == expected[i // 4]
            assert sample.logprobs_kind == ("processed" if temperature == 1 else "raw")
            worst = max(worst, largest(sample.logprobs, model_logprobs(model, sample)))
        assert len({tuple(sample.response_ids) for sample in samples}) == 12
    record_property("largest difference", worst)
    print(f"\nlargest difference of log-probs between vLLM and transformers: {worst:.2e}")
    assert worst < 1e-4


def test_streamed_replies_equal_complete_ones(engine):
    options = {"n": 3, "max_tokens": 40, "seed": 8, "batch": 0}
    complete = {str(sample.eid): sample for sample in engine.generate(["a", CHAT, [50, 51]], **options)}
    for sample in engine.stream(["a", CHAT, [50, 51]], **options):
        expected = complete[str(sample.eid)]
        assert sample.response_ids == expected.response_ids and list(sample.prompt_ids) == list(expected.prompt_ids)
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5) and sample.text == expected.text
        assert sample.finish_reason == expected.finish_reason and sample.message == expected.message


def test_seeds(engine):
    options = {"max_tokens": 24, "batch": 0, "ignore_eos": True}
    first = engine.generate(["a", "b"], n=3, seed=11, **options)
    again = engine.generate(["a", "b"], n=3, seed=11, **options)
    other = engine.generate(["a", "b"], n=3, seed=12, **options)
    assert [sample.response_ids for sample in first] == [sample.response_ids for sample in again]
    assert [sample.response_ids for sample in first] != [sample.response_ids for sample in other]
    # Sample k of a request is sampled by seed + k: asked for alone, with that seed, it is the same.
    alone = engine.generate("a", **options, seed=1, extra={"seed": first[2].sampling["seed"]})[0]
    assert alone.response_ids == first[2].response_ids
    free = [sample.response_ids for sample in engine.generate("a", n=8, **options)]
    assert len({tuple(sample) for sample in free}) == 8


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_tools(engine, model, stream, named):
    prompt = Prompt(messages=CHAT, tools=TOOLS)
    chosen = {"type": "function", "function": {"name": "add"}} if named else "required"
    options = {"n": 8, "max_tokens": 200, "seed": 1, "batch": 0, "cancel": Cancel() if stream else None}
    samples = engine.generate(prompt, **options, extra={"tool_choice": chosen})
    called = [sample for sample in samples if sample.finish_reason == "tool_calls"]
    assert called and all(sample.finish_reason == "length" for sample in samples if sample not in called)
    for sample in called:
        text = tiny.bytes_().decode(sample.response_ids)
        assert sample.response_ids[-1] == 2 and text.count('"name"') == len(sample.message["tool_calls"])
        for call in sample.message["tool_calls"]:
            assert call["function"]["name"] == "add" and call["id"]
            json.loads(call["function"]["arguments"])
        # A grammar's mask is in vLLM's log-probs whatever its mode: they are of what was left to sample from.
        assert sample.logprobs_kind == "processed" and sum(sample.logprobs) > sum(model_logprobs(model, sample))
    (plain,) = engine.generate(prompt, max_tokens=20, seed=1)
    assert not plain.failed and "tool_calls" not in plain.message


def test_stops(engine):
    options = {"max_tokens": 60, "seed": 2, "ignore_eos": True, "batch": 0}
    free = engine.generate([[50, 60]], **options)[0]
    stop_id = free.response_ids[7]
    stopped = engine.generate([[50, 60]], **options, stop_token_ids=[stop_id])[0]
    assert stopped.response_ids == free.response_ids[: free.response_ids.index(stop_id) + 1]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == stop_id and free.finish_reason == "length"
    letter = next(char for char in free.text if char.isascii() and char.isprintable())
    for include in (True, False):
        for cancel in (None, Cancel()):
            sample = engine.generate([[50, 60]], **options, stop=letter, include_stop=include, cancel=cancel)[0]
            assert sample.stop_reason == letter and sample.text.endswith(letter) is include
            assert sample.response_ids == free.response_ids[: len(sample.response_ids)]
            assert len(sample.logprobs) == len(sample.response_ids)
    ended = engine.generate([[50, 60]], n=16, max_tokens=400, seed=2, batch=0)
    stopped = [sample for sample in ended if sample.finish_reason == "stop"]
    assert stopped and all(sample.response_ids[-1] == 2 and sample.response_ids.count(2) == 1 for sample in stopped)


def test_min_tokens_and_suppress(engine):
    options = {"n": 8, "max_tokens": 40, "temperature": 1.2, "seed": 3, "batch": 0}
    wide = engine.generate([[50, 60]], **options, stop_token_ids=range(9, 200))
    long_enough = engine.generate([[50, 60]], **options, stop_token_ids=range(9, 200), min_tokens=12)
    assert (
        min(len(sample.response_ids) for sample in wide) < 12 <= min(len(sample.response_ids) for sample in long_enough)
    )
    banned = list(range(9, 250))
    suppressed = engine.generate([[50, 60]], **options, suppress=banned)
    assert not any(sample.failed for sample in suppressed)
    assert {token for sample in suppressed for token in sample.response_ids}.isdisjoint(banned)


def test_cancel_and_resume(engine, model):
    prompts = ["short", "once", CHAT, [40, 41]]
    longest = MAX_LENGTH - 100
    # One short response among long ones: when it is there, the rest is called off.
    samplings = [
        Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for max_tokens in (64, longest, longest, longest)
    ]
    cancel = Cancel()
    canceled = {}
    for sample in engine.stream(prompts, samplings, cancel=cancel, batch=0):
        cancel.request()
        canceled[sample.eid.task] = sample
    assert canceled[0].finish_reason == "length" and len(canceled) == 4
    for task, prompt in enumerate(prompts[1:], 1):
        part = canceled[task]
        so_far = len(part.response_ids)
        assert part.unfinished and 0 < so_far < longest and len(part.logprobs) == so_far
        (more,) = engine.generate([part], max_tokens=so_far + 40)
        (complete,) = engine.generate(prompt, max_tokens=so_far + 40, temperature=0, ignore_eos=True, batch=0)
        assert more.finish_reason == "length" and list(more.prompt_ids) == list(complete.prompt_ids)
        assert more.response_ids == complete.response_ids and more.eid == part.eid
        assert largest(more.logprobs, model_logprobs(model, more)) < 1e-4


def test_pause_and_first_temperature(engine, model):
    options = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "batch": 0}
    (expected,) = engine.generate("pause", **options)
    (part,) = engine.generate("pause", **options, pause_after=11)
    assert part.unfinished and part.response_ids == expected.response_ids[:11]
    assert engine.generate([part])[0].response_ids == expected.response_ids
    fire = engine.generate("pause", **options, n=4, first_temperature=2.0, seed=5)  # vLLM takes no higher one
    assert len({sample.response_ids[0] for sample in fire}) > 1
    for sample in fire:
        assert len(sample.response_ids) == 30 and largest(sample.logprobs, model_logprobs(model, sample)) < 1e-4
        (rest,) = engine.generate([[*sample.prompt_ids, sample.response_ids[0]]], **(options | {"max_tokens": 29}))
        assert sample.response_ids[1:] == rest.response_ids


def test_long_prompts(engine):
    over, truncated, huge, fine = engine.generate(
        ["x" * 50, "x" * 40 + "y" * 10, [20] * (MAX_LENGTH + 2), "short"],
        [
            Sampling(max_tokens=4, max_prompt_tokens=20),
            Sampling(max_tokens=4, max_prompt_tokens=20, prompt_overflow="left"),
            Sampling(max_tokens=20),
            Sampling(max_tokens=4),
        ],
    )
    assert "max_prompt_tokens (20)" in over.error
    assert (
        tiny.bytes_().decode(truncated.prompt_ids) == "x" * 10 + "y" * 10
        and truncated.info["prompt_truncated_from"] == 50
    )
    assert "status 400" in huge.error and str(MAX_LENGTH) in huge.error and not fine.failed


def test_concurrent_samples_in_an_event_loop(engine, record_property):
    async def run():
        return [
            sample
            async for sample in engine.astream([[20 + i % 200, i % 7 + 9] for i in range(128)], n=4, max_tokens=16)
        ]

    start = time.monotonic()
    samples = asyncio.run(run())
    record_property("seconds for 512 rollouts", time.monotonic() - start)
    print(f"\n512 rollouts of up to 16 tokens, streamed: {time.monotonic() - start:.2f} s")
    assert [sample.error for sample in samples if sample.failed] == [] and len(
        {str(sample.eid) for sample in samples}
    ) == 512
