"""`OpenAIEngine` against a real vLLM: its ids and log-probs are transformers' for the same weights; n, seeds, chats,
tools, stops, cancelling and going on do what they say."""

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
    with vllm(folder, log, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as found:
        yield found


@pytest.fixture(scope="module")
def engine(url):
    with OpenAIEngine(url) as made:
        yield made


def test_it_is_known(engine):
    run = engine.run
    assert run.engine == "vllm" and run.engine_version[0].isdigit() and run.model == "tiny"
    assert any("--logprobs-mode" in one for one in run.limitations)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_raw_logprobs_are_those_of_transformers(engine, model, stream, record_property):
    prompts = ["hello", [20, 30, 40], CHAT]
    tokenizer = tiny.bytes_()
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    expected = [tokenizer("hello")["input_ids"], [20, 30, 40], tokenizer(text)["input_ids"]]
    worst = 0.0
    for temperature in (1.0, 0.7, 1.5):
        samples = engine.generate(
            prompts, n=4, max_tokens=64, temperature=temperature, seed=3, batch=0, cancel=Cancel() if stream else None
        )
        assert not any(one.failed for one in samples), samples[0].error
        for i, one in enumerate(samples):
            assert list(one.prompt_ids) == expected[i // 4]
            assert one.logprobs_kind == ("processed" if temperature == 1 else "raw")
            worst = max(worst, largest(one.logprobs, model_logprobs(model, one)))
        assert len({tuple(one.response_ids) for one in samples}) == 12
    record_property("largest difference", worst)
    print(f"\nlargest difference of log-probs between vLLM and transformers: {worst:.2e}")
    assert worst < 1e-4


def test_streamed_and_whole_replies_are_alike(engine):
    how = {"n": 3, "max_tokens": 40, "seed": 8, "batch": 0}
    whole = {str(one.eid): one for one in engine.generate(["a", CHAT, [50, 51]], **how)}
    for one in engine.stream(["a", CHAT, [50, 51]], **how):
        want = whole[str(one.eid)]
        assert one.response_ids == want.response_ids and list(one.prompt_ids) == list(want.prompt_ids)
        assert one.logprobs == pytest.approx(want.logprobs, abs=1e-5) and one.text == want.text
        assert one.finish_reason == want.finish_reason and one.message == want.message


def test_seeds(engine):
    how = {"max_tokens": 24, "batch": 0, "ignore_eos": True}
    first = engine.generate(["a", "b"], n=3, seed=11, **how)
    again = engine.generate(["a", "b"], n=3, seed=11, **how)
    other = engine.generate(["a", "b"], n=3, seed=12, **how)
    assert [one.response_ids for one in first] == [one.response_ids for one in again]
    assert [one.response_ids for one in first] != [one.response_ids for one in other]
    # Sample k of a request is sampled by seed + k: asked for alone, with that seed, it is the same.
    alone = engine.generate("a", **how, seed=1, extra={"seed": first[2].sampling["seed"]})[0]
    assert alone.response_ids == first[2].response_ids
    free = [one.response_ids for one in engine.generate("a", n=8, **how)]
    assert len({tuple(one) for one in free}) == 8


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_tools(engine, model, stream, named):
    prompt = Prompt(messages=CHAT, tools=TOOLS)
    chosen = {"type": "function", "function": {"name": "add"}} if named else "required"
    how = {"n": 8, "max_tokens": 200, "seed": 1, "batch": 0, "cancel": Cancel() if stream else None}
    samples = engine.generate(prompt, **how, extra={"tool_choice": chosen})
    called = [one for one in samples if one.finish_reason == "tool_calls"]
    assert called and all(one.finish_reason == "length" for one in samples if one not in called)
    for one in called:
        text = tiny.bytes_().decode(one.response_ids)
        assert one.response_ids[-1] == 2 and text.count('"name"') == len(one.message["tool_calls"])
        for call in one.message["tool_calls"]:
            assert call["function"]["name"] == "add" and call["id"]
            json.loads(call["function"]["arguments"])
        # A grammar's mask is in vLLM's log-probs whatever its mode: they are of what was left to sample from.
        assert one.logprobs_kind == "processed" and sum(one.logprobs) > sum(model_logprobs(model, one))
    (plain,) = engine.generate(prompt, max_tokens=20, seed=1)
    assert not plain.failed and "tool_calls" not in plain.message


def test_stops(engine):
    how = {"max_tokens": 60, "seed": 2, "ignore_eos": True, "batch": 0}
    free = engine.generate([[50, 60]], **how)[0]
    stop_id = free.response_ids[7]
    known = engine.generate([[50, 60]], **how, stop_token_ids=[stop_id])[0]
    assert known.response_ids == free.response_ids[: free.response_ids.index(stop_id) + 1]
    assert known.finish_reason == "stop" and known.stop_reason == stop_id and free.finish_reason == "length"
    letter = next(one for one in free.text if one.isascii() and one.isprintable())
    for include in (True, False):
        for cancel in (None, Cancel()):
            one = engine.generate([[50, 60]], **how, stop=letter, include_stop=include, cancel=cancel)[0]
            assert one.stop_reason == letter and one.text.endswith(letter) is include
            assert one.response_ids == free.response_ids[: len(one.response_ids)]
            assert len(one.logprobs) == len(one.response_ids)
    ended = engine.generate([[50, 60]], n=16, max_tokens=400, seed=2, batch=0)
    stopped = [one for one in ended if one.finish_reason == "stop"]
    assert stopped and all(one.response_ids[-1] == 2 and one.response_ids.count(2) == 1 for one in stopped)


def test_least_lengths_and_suppressed_tokens(engine):
    how = {"n": 8, "max_tokens": 40, "temperature": 1.2, "seed": 3, "batch": 0}
    wide = engine.generate([[50, 60]], **how, stop_token_ids=range(9, 200))
    held = engine.generate([[50, 60]], **how, stop_token_ids=range(9, 200), min_tokens=12)
    assert min(len(one.response_ids) for one in wide) < 12 <= min(len(one.response_ids) for one in held)
    banned = list(range(9, 250))
    kept = engine.generate([[50, 60]], **how, suppress=banned)
    assert not any(one.failed for one in kept)
    assert {token for one in kept for token in one.response_ids}.isdisjoint(banned)


def test_cancel_and_go_on(engine, model):
    prompts = ["short", "once", CHAT, [40, 41]]
    longest = MAX_LENGTH - 100
    # One short response among long ones: when it is there, the rest is called off.
    hows = [Sampling(max_tokens=most, temperature=0, ignore_eos=True) for most in (64, longest, longest, longest)]
    cancel = Cancel()
    found = {}
    for one in engine.stream(prompts, hows, cancel=cancel, batch=0):
        cancel.request()
        found[one.eid.task] = one
    assert found[0].finish_reason == "length" and len(found) == 4
    for task, prompt in enumerate(prompts[1:], 1):
        part = found[task]
        so_far = len(part.response_ids)
        assert part.unfinished and 0 < so_far < longest and len(part.logprobs) == so_far
        (more,) = engine.generate([part], max_tokens=so_far + 40)
        (whole,) = engine.generate(prompt, max_tokens=so_far + 40, temperature=0, ignore_eos=True, batch=0)
        assert more.finish_reason == "length" and list(more.prompt_ids) == list(whole.prompt_ids)
        assert more.response_ids == whole.response_ids and more.eid == part.eid
        assert largest(more.logprobs, model_logprobs(model, more)) < 1e-4


def test_pausing_and_a_first_temperature(engine, model):
    how = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "batch": 0}
    (want,) = engine.generate("pause", **how)
    (part,) = engine.generate("pause", **how, pause_after=11)
    assert part.unfinished and part.response_ids == want.response_ids[:11]
    assert engine.generate([part])[0].response_ids == want.response_ids
    fire = engine.generate("pause", **how, n=4, first_temperature=2.0, seed=5)  # vLLM takes no higher one
    assert len({one.response_ids[0] for one in fire}) > 1
    for one in fire:
        assert len(one.response_ids) == 30 and largest(one.logprobs, model_logprobs(model, one)) < 1e-4
        (rest,) = engine.generate([[*one.prompt_ids, one.response_ids[0]]], **(how | {"max_tokens": 29}))
        assert one.response_ids[1:] == rest.response_ids


def test_long_prompts_and_refusals(engine):
    over, cut, huge, fine = engine.generate(
        ["x" * 50, "x" * 40 + "y" * 10, [20] * (MAX_LENGTH + 2), "short"],
        [
            Sampling(max_tokens=4, max_prompt_tokens=20),
            Sampling(max_tokens=4, max_prompt_tokens=20, prompt_overflow="left"),
            Sampling(max_tokens=20),
            Sampling(max_tokens=4),
        ],
    )
    assert "max_prompt_tokens (20)" in over.error
    assert tiny.bytes_().decode(cut.prompt_ids) == "x" * 10 + "y" * 10 and cut.info["prompt_truncated_from"] == 50
    assert "status 400" in huge.error and str(MAX_LENGTH) in huge.error and not fine.failed


def test_many_at_once_in_an_event_loop(engine, record_property):
    async def run():
        return [
            one async for one in engine.astream([[20 + i % 200, i % 7 + 9] for i in range(128)], n=4, max_tokens=16)
        ]

    start = time.monotonic()
    found = asyncio.run(run())
    record_property("seconds for 512 rollouts", time.monotonic() - start)
    print(f"\n512 rollouts of up to 16 tokens, streamed: {time.monotonic() - start:.2f} s")
    assert [one.error for one in found if one.failed] == [] and len({str(one.eid) for one in found}) == 512
