"""`OpenAIEngine` with a mock server over a tiny model: ids and log-probs equal the model's, failures stay with their
samples, and limitations of servers are reported."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings

import httpx
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from rollbook import EID
from rollbook.rollout import Cancel, Prompt, Sampling
from rollbook.rollout.chat import chat_messages, redact_secrets
from rollbook.rollout.openai import OpenAIEngine
from rollbook.rollout.server import Backoff, read_events, resolve_logprobs_kind
from tests import tiny
from tests.rollout.server import CALL, Fault, serve

QUICK = Backoff(tries=4, first=0.01, max_wait=0.05)
CHAT = [{"role": "user", "content": "two plus three?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


@pytest.fixture
def engine(server):
    server.seen.clear()
    server.paths.clear()
    server.images.clear()
    server.faults.clear()
    with OpenAIEngine(server.url, backoff=QUICK) as engine:
        yield engine


def model_logprobs(server, sample, temperature=1.0):
    """Return the model's log-probs of a sample's tokens."""
    with torch.no_grad():
        logits = server.model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0].double()
    rows = (logits[len(sample.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, sample.response_ids, strict=True)]


def rendered(messages, tools=None):
    tokenizer = tiny.bytes_()
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- ids and log-probs ------------------------------------------------------------------------------------------------


def test_ids_and_logprobs_equal_the_models(server, engine):
    prompts = ["hello", [20, 30, 40], CHAT]
    samples = engine.generate(prompts, n=3, max_tokens=12, seed=1, batch=0)
    expected = [tiny.bytes_()("hello")["input_ids"], [20, 30, 40], rendered(CHAT)]
    assert len(samples) == 9 and not any(sample.failed for sample in samples)
    for i, sample in enumerate(samples):
        assert list(sample.prompt_ids) == expected[i // 3]
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
        assert sample.eid == EID(batch=0, task=i // 3, run=i % 3, suffix=sample.eid.suffix) and sample.group_size == 3
        assert sample.versions == [0] * len(sample.response_ids)
        assert sample.run_id == engine.run.id and sample.metrics["retries"] == 0
    assert len(server.seen) == 3  # n samples by one request
    assert [sample.message["role"] for sample in samples[6:]] == ["assistant"] * 3 and samples[0].message is None


def test_ids_are_not_retokenized(engine):
    # Two tokens whose text is one character, which a tokenizer could not give back from its text alone.
    sample = engine.generate([[20, 9 + 188, 9 + 163]], max_tokens=8, seed=5)[0]
    assert list(sample.prompt_ids) == [20, 197, 172]
    assert tiny.bytes_()(sample.text)["input_ids"] != sample.response_ids


def test_seeds_are_sent_recorded_and_repeatable(server, engine):
    first = engine.generate(["a", "b"], n=3, max_tokens=8, seed=11, batch=0)
    again = engine.generate(["a", "b"], n=3, max_tokens=8, seed=11, batch=0)
    assert [sample.response_ids for sample in first] == [sample.response_ids for sample in again]
    assert len({sample.sampling["seed"] for sample in first}) == 6
    alone = engine.generate("a", n=1, max_tokens=8, seed=11, batch=0)[0]
    assert alone.response_ids == first[0].response_ids and alone.sampling["seed"] == first[0].sampling["seed"]
    server.seen.clear()
    free = engine.generate("a", n=2, max_tokens=8)
    assert "seed" not in server.seen[0] and [sample.sampling["seed"] for sample in free] == [None, None]
    greedy = engine.generate("a", n=2, max_tokens=8, temperature=0)  # vLLM refuses a request with n = 2
    assert not greedy[0].failed and greedy[0].response_ids == greedy[1].response_ids


def test_all_options_are_sent(server, engine):
    options = Sampling(
        max_tokens=9,
        min_tokens=3,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.01,
        stop=["xyz"],
        stop_token_ids=[77],
        include_stop=False,
        ignore_eos=True,
        suppress=[8, 3],
        extra={"priority": 3, "n": 1, "min_p": None},
    )
    sample = engine.generate("go", options)[0]
    assert not sample.failed and sample.logprobs_kind == "raw"
    (body,) = server.seen
    assert {name: body[name] for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k")} == {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    }
    assert body["stop"] == ["xyz"] and body["stop_token_ids"] == [77] and body["ignore_eos"] is True
    assert body["include_stop_str_in_output"] is False and body["logit_bias"] == {"8": -100, "3": -100}
    assert body["priority"] == 3 and "min_p" not in body
    # A model's generation_config would otherwise bring its own.
    assert body["repetition_penalty"] == 1.0 and body["presence_penalty"] == body["frequency_penalty"] == 0.0


def test_stops(server, engine):
    free = engine.generate([[50, 60]], max_tokens=30, seed=2, ignore_eos=True, batch=0)[0]
    stop_id = free.response_ids[4]
    stopped_by_id = engine.generate(
        [[50, 60]], max_tokens=30, seed=2, ignore_eos=True, stop_token_ids=[stop_id], batch=0
    )[0]
    length = free.response_ids.index(stop_id) + 1
    assert stopped_by_id.response_ids == free.response_ids[:length] and stopped_by_id.stop_reason == stop_id
    assert stopped_by_id.finish_reason == "stop" and free.finish_reason == "length" and len(free.response_ids) == 30
    letter = next(char for char in free.text if char.isascii() and char.isprintable())
    for include in (True, False):
        stopped = engine.generate(
            [[50, 60]], max_tokens=30, seed=2, ignore_eos=True, stop=letter, include_stop=include, batch=0
        )[0]
        assert stopped.stop_reason == letter and stopped.text.endswith(letter) is include
        assert stopped.response_ids == free.response_ids[: len(stopped.response_ids)]  # the tokens are kept whole
        assert len(stopped.logprobs) == len(stopped.response_ids)


def test_suppressed_tokens_are_sent_and_checked(server, engine):
    likely = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0)[0].response_ids[0]
    other = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0, suppress=[likely])[0]
    assert other.response_ids != [likely]
    caught = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0, suppress=[likely], extra={"logit_bias": None})[
        0
    ]
    assert caught.failed and f"suppress: the server sampled the suppressed token {likely}" in caught.error


@pytest.mark.parametrize("stream", [False, True])
def test_first_temperature_applies_to_the_first_token(server, engine, stream):
    cancel = Cancel() if stream else None
    cold = engine.generate("fire", max_tokens=6, temperature=0, batch=0)[0]
    server.seen.clear()
    samples = engine.generate(
        ["fire"], n=2, max_tokens=6, temperature=0, first_temperature=30.0, seed=4, batch=0, cancel=cancel
    )
    assert [body["max_tokens"] for body in server.seen] == [1, 5, 5] and server.seen[0]["temperature"] == 30.0
    assert server.seen[1]["prompt"][:-1] == list(samples[0].prompt_ids)
    for sample in samples:
        assert len(sample.response_ids) == len(sample.logprobs) == 6 and sample.response_ids[0] != cold.response_ids[0]
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
        rest = engine.generate([[*sample.prompt_ids, sample.response_ids[0]]], max_tokens=5, temperature=0)[0]
        assert sample.response_ids[1:] == rest.response_ids
    ended = engine.generate(
        ["fire"], max_tokens=6, temperature=0, first_temperature=1.0, stop_token_ids=range(265), batch=0
    )[0]
    assert len(ended.response_ids) == 1 and ended.finish_reason == "stop"


def test_chat_with_tools(server, engine):
    for call in (
        lambda: engine.generate(Prompt(messages=CHAT, tools=TOOLS), max_tokens=60, extra={"tool_choice": "required"}),
        lambda: list(
            engine.stream(Prompt(messages=CHAT, tools=TOOLS), max_tokens=60, extra={"tool_choice": "required"})
        ),
    ):
        (sample,) = call()
        assert sample.finish_reason == "tool_calls" and server.seen[-1]["tools"] == TOOLS
        (tool_call,) = sample.message["tool_calls"]
        assert tool_call["function"]["name"] == "add" and json.loads(tool_call["function"]["arguments"]) == {"a": 1}
        assert tool_call["id"] == "call-1"
        assert sample.response_ids == [*tiny.bytes_()(CALL)["input_ids"], 2]
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
        record = sample.to_experience()
        assert record.messages[-1]["tool_calls"][0]["function"]["name"] == "add" and record.tools == TOOLS


def test_locally_rendered_chats_are_sent_as_ids(server):
    with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), render="local") as engine:
        server.seen.clear()
        sample, text = engine.generate([CHAT, "plain"], max_tokens=4)
    assert server.seen[0]["prompt"] == rendered(CHAT) == list(sample.prompt_ids)
    assert server.seen[1]["prompt"] == tiny.bytes_()("plain")["input_ids"]
    assert sample.message == {"role": "assistant", "content": sample.text} and not text.failed
    assert sample.prompt_text == "<|user|>two plus three?<|end|><|assistant|>" and text.prompt_text is None
    assert engine.run.tokenizer is not None and engine.run.chat_template is not None


def test_long_prompts_are_rejected_or_truncated(server, engine):
    refused = engine.generate(["a long prompt", CHAT], max_tokens=3, max_prompt_tokens=4)
    assert all("max_prompt_tokens (4)" in sample.error for sample in refused) and server.seen == []
    left = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=4, prompt_overflow="left")[0]
    right = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=4, prompt_overflow="right")[0]
    ids = tiny.bytes_()("a long prompt")["input_ids"]
    assert list(left.prompt_ids) == ids[-4:] and list(right.prompt_ids) == ids[:4]
    assert left.info["prompt_truncated_from"] == len(ids)
    fits = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=20)[0]
    assert list(fits.prompt_ids) == ids and "prompt_truncated_from" not in fits.info


def test_prompts_are_counted_by_the_tokenizer(server):
    server.faults.clear()
    server.paths.clear()
    ids = tiny.bytes_()("a long prompt")["input_ids"]
    with OpenAIEngine(server.url, tokenizer=tiny.bytes_()) as engine:
        options = {"max_tokens": 3, "prompt_overflow": "left"}
        truncated, short, chat = engine.generate(["a long prompt", "ab", CHAT], max_prompt_tokens=6, **options)
        assert list(truncated.prompt_ids) == ids[-6:] and list(short.prompt_ids) == tiny.bytes_()("ab")["input_ids"]
        assert list(chat.prompt_ids) == rendered(CHAT)[-6:]
        assert chat.info["prompt_truncated_from"] == len(rendered(CHAT)) and "prompt_truncated_from" not in short.info
        assert set(server.paths) == {"/v1/completions"}
        (fits,) = engine.generate([Prompt(messages=CHAT, tools=TOOLS)], max_prompt_tokens=200, max_tokens=3)
        assert list(fits.prompt_ids) == rendered(CHAT, TOOLS) and server.paths[-1] == "/v1/chat/completions"
    with serve("openai", tokenizer=tiny.words()) as plain:
        with OpenAIEngine(plain.url, tokenizer=tiny.words(), retokenize=True) as engine:
            options = {"max_tokens": 3, "suppress": range(9), "max_prompt_tokens": 50}
            text, chat = engine.generate(["the quick fox", CHAT], **options)
            assert plain.seen[0]["prompt"] == list(text.prompt_ids) and "retokenized" in text.info
            assert not chat.failed and "messages" in plain.seen[1]
        with OpenAIEngine(plain.url) as engine:
            (sample,) = engine.generate(["the quick fox"], max_tokens=3, max_prompt_tokens=50)
            assert "max_prompt_tokens: needs a tokenizer" in sample.error and "/tokenize" in sample.error


def test_prompts_are_counted_by_the_reply_without_tokenize(server, engine):
    server.lacks = {"/tokenize"}
    try:
        options = {"max_tokens": 3, "max_prompt_tokens": 12, "prompt_overflow": "right"}
        short, chat, long = engine.generate(["short", CHAT, "long" * 10], **options)
        again = engine.generate(["once more"], **options)[0]
    finally:
        server.lacks = set()
    assert not short.failed and not again.failed and list(short.prompt_ids) == tiny.bytes_()("short")["input_ids"]
    assert server.paths.count("/tokenize") <= 3 and server.paths[-1] == "/v1/completions"
    for sample in (chat, long):
        assert "expected at most max_prompt_tokens (12)" in sample.error, sample.error
        assert "needs a tokenizer or a server with /tokenize" in sample.error
        assert f"POST {server.url}/tokenize: status 404: Not Found" in sample.error
    with serve("sglang") as native:
        native.lacks = {"/tokenize"}
        with OpenAIEngine(native.url) as bare, OpenAIEngine(native.url, tokenizer=tiny.bytes_()) as able:
            (sample,) = bare.generate(["text"], max_tokens=3)
            assert (
                f"POST {native.url}/tokenize: status 404" in sample.error
                and "give the engine a tokenizer" in sample.error
            )
            (sample,) = able.generate(["text"], max_tokens=3)
            assert list(sample.prompt_ids) == tiny.bytes_()("text")["input_ids"] and not sample.failed


# --- kinds of log-probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "options", "kind"),
    [
        ("raw", {}, "processed"),
        ("raw", {"temperature": 0.5}, "raw"),
        ("raw", {"top_p": 0.9}, "raw"),
        ("raw", {"top_p": 0.9, "logprobs": "tempered"}, "tempered"),
        ("raw", {"suppress": [3]}, "raw"),
        ("raw", {"min_tokens": 1}, "raw"),
        ("raw", {"first_temperature": 2.0}, "raw"),
        ("raw", {"extra": {"repetition_penalty": 1.2}}, "raw"),
        ("tempered", {"temperature": 0.5}, "processed"),
        ("tempered", {"temperature": 0.5, "top_k": 5}, "tempered"),
        ("tempered", {"temperature": 0.0, "logprobs": "raw"}, "raw"),
        ("processed", {"temperature": 0.5, "top_k": 5}, "processed"),
        ("processed", {"temperature": 0.5, "logprobs": "tempered"}, "tempered"),
        ("processed", {"temperature": 0.5, "logprobs": "raw"}, "processed"),
        (None, {}, "processed"),
        (None, {"temperature": 0.5}, None),
        ("processed", {"temperature": 0.0}, "raw"),
        ("tempered", {"top_k": 5, "logprobs": "raw"}, "raw"),
    ],
)
def test_resolve_logprobs_kind(true, options, kind):
    assert resolve_logprobs_kind(true, Sampling(**options)) == kind


def test_logprobs_kind_with_a_grammar():
    assert resolve_logprobs_kind("raw", Sampling(logprobs="raw"), constrained=True) == "processed"
    assert resolve_logprobs_kind("raw", Sampling(temperature=0.5), constrained=True) is None
    assert resolve_logprobs_kind("processed", Sampling(temperature=0.5), constrained=True) == "processed"


def test_logprobs_kind_of_the_server_can_be_set():
    options = {"max_tokens": 8, "temperature": 0.6, "top_k": 12, "seed": 1}
    with serve(logprobs_kind="processed") as server, OpenAIEngine(server.url, logprobs_kind="processed") as engine:
        sample = engine.generate("kinds", **options)[0]
        assert sample.logprobs_kind == "processed" and engine.describe()["logprobs_kind"] == "processed"
        assert sum(sample.logprobs) > sum(model_logprobs(server, sample))  # of twelve tokens rather than of all
    with serve("sglang") as server, OpenAIEngine(server.url) as engine:
        sample = engine.generate("kinds", **options)[0]
        assert sample.logprobs_kind == "tempered"
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample, 0.6), abs=1e-5)
        assert engine.generate("kinds", **options, logprobs=None)[0].logprobs is None


# --- streaming, cancelling, going on ----------------------------------------------------------------------------------


def test_streamed_samples_equal_complete_ones_in_order_of_finishing(server, engine):
    prompts = [Prompt(token_ids=[20 + i]) for i in range(4)]
    samplings = [Sampling(max_tokens=length, seed=7, ignore_eos=True, n=2) for length in (40, 3, 20, 9)]
    complete = engine.generate(prompts, samplings, batch=0)
    assert not any(body["stream"] for body in server.seen)
    streamed = list(engine.stream(prompts, samplings, batch=0))
    assert server.seen[-1]["stream"] and server.seen[-1]["stream_interval"] > 1
    streamed_by_eid = {str(sample.eid): sample for sample in streamed}
    for sample in complete:
        assert (
            streamed_by_eid[str(sample.eid)].response_ids == sample.response_ids
            and streamed_by_eid[str(sample.eid)].logprobs == sample.logprobs
        )
        assert streamed_by_eid[str(sample.eid)].text == sample.text and list(
            streamed_by_eid[str(sample.eid)].prompt_ids
        ) == list(sample.prompt_ids)
    assert len(streamed[0].response_ids) < 40 and len(streamed[-1].response_ids) == 40


def test_samples_of_a_shared_request_finish_separately():
    with serve(pace=0.01) as server, OpenAIEngine(server.url) as engine:
        options = {"n": 4, "max_tokens": 60, "seed": 3, "stop_token_ids": list(range(235, 265)), "batch": 0}
        lengths = [len(sample.response_ids) for sample in engine.stream([[30, 31]], **options)]
        assert len(server.seen) == 1 and len(set(lengths)) > 1 and lengths == sorted(lengths)


def eventually(condition):
    """Wait until a condition holds; return whether it does."""
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_canceled_samples_are_resumed_from_their_tokens():
    with serve(pace=0.002) as server, OpenAIEngine(server.url, version=1) as engine:
        # One short response among long ones: when it is there, the rest is called off.
        prompts = ["short", "once", CHAT, [40, 41]]
        samplings = [Sampling(max_tokens=length, temperature=0, ignore_eos=True) for length in (40, 120, 120, 120)]
        cancel = Cancel()
        samples_by_task = {}
        for sample in engine.stream(prompts, samplings, cancel=cancel, batch=0):
            cancel.request()
            samples_by_task[sample.eid.task] = sample
        partial = [samples_by_task[task] for task in range(1, 4)]
        assert (
            all(sample.unfinished and sample.error is None for sample in partial)
            and samples_by_task[0].finish_reason == "length"
        )
        assert all(
            0 < len(sample.response_ids) < 120 and len(sample.logprobs) == len(sample.response_ids)
            for sample in partial
        )
        assert eventually(lambda: server.broken == 3 and server.open == 0)  # the server stops, too
        server.pace = 0.0
        complete = engine.generate(prompts[1:], samplings[1:], batch=0)
        engine.version = 2
        resumed = engine.generate(partial)
        for sample, start, expected in zip(resumed, partial, complete, strict=True):
            assert sample.response_ids == expected.response_ids and sample.finish_reason == "length"
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert sample.logprobs[: len(start.logprobs)] == start.logprobs
            assert sample.versions == [1] * len(start.response_ids) + [2] * (120 - len(start.response_ids))
            assert sample.eid == start.eid and list(sample.prompt_ids) == list(expected.prompt_ids)


def test_pause_and_resume(server, engine):
    expected = engine.generate(["pause"], max_tokens=20, temperature=0, ignore_eos=True, batch=0)[0]
    sample = engine.generate(["pause"], max_tokens=20, temperature=0, ignore_eos=True, batch=0, pause_after=7)[0]
    assert sample.unfinished and len(sample.response_ids) == 7
    sample = engine.generate([sample], pause_after=7)[0]
    assert sample.unfinished and sample.response_ids == expected.response_ids[:14]
    sample = engine.generate([sample])[0]
    assert sample.response_ids == expected.response_ids and sample.finish_reason == "length"
    # Random numbers are not used twice: each part has a seed of its own, made from the sample's.
    server.seen.clear()
    first = engine.generate(["pause"], max_tokens=20, seed=9, ignore_eos=True, batch=0, pause_after=5)[0]
    second = engine.generate([first])[0]
    assert server.seen[0]["seed"] != server.seen[1]["seed"] and second.sampling["seed"] == first.sampling["seed"]
    assert engine.generate([first])[0].response_ids == second.response_ids
    third = engine.generate([engine.generate([first], pause_after=4)[0]])[0]
    assert len({body["seed"] for body in server.seen}) == 3 and len(third.response_ids) == 20


def test_records_have_the_seed_that_was_sent(server, engine):
    options = {"max_tokens": 9, "ignore_eos": True, "batch": 0}
    (free,) = engine.generate(["seed"], **options, pause_after=3)
    assert free.sampling["seed"] is free.sampling["asked_seed"] is None
    (on,) = engine.generate([free])
    assert on.sampling["seed"] is None and "earlier" not in on.sampling
    (hot,) = engine.generate([free], temperature=0.5)
    assert hot.sampling["earlier"] == [{"tokens": 3, "temperature": 1.0}] and hot.sampling["temperature"] == 0.5
    options["n"] = 2
    server.seen.clear()
    seeded = engine.generate(["seed"], **options, seed=7, pause_after=3)
    assert [sample.sampling["seed"] - server.seen[0]["seed"] for sample in seeded] == [0, 1]
    for sample in (*seeded, *engine.generate(seeded)):
        assert sample.sampling["asked_seed"] == 7 and sample.sampling["seed"] == seeded[sample.eid.run].sampling["seed"]
        assert not any("seed" in part for part in sample.sampling.get("earlier", ()))
        assert Sampling.of(sample.sampling).seed == 7
    # Of what failed, and of what did not begin, too.
    cancel = Cancel()
    cancel.request()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begins = engine.generate(["seed"], **options, seed=7, cancel=cancel)
        gc.collect()
    assert all(sample.unfinished and sample.sampling["seed"] is not None for sample in begins)
    assert [sample.response_ids for sample in engine.generate(begins)] == [
        sample.response_ids for sample in engine.generate(begins)
    ]
    server.faults = [Fault("status", times=2, status=400)]
    (lost, *_) = engine.generate(["seed"], **options)
    assert lost.failed and lost.sampling["seed"] is None
    (lost, other) = engine.generate(["seed"], **options, seed=7)
    assert lost.failed and other.sampling["seed"] == seeded[1].sampling["seed"]


def test_the_end_of_the_context_has_finish_reason_length(server, engine):
    (sample,) = engine.generate([[30] * 250], max_tokens=20, ignore_eos=True, pause_after=10)
    assert len(sample.response_ids) == 6 and sample.finish_reason == "length"
    (full,) = engine.generate([[30] * 256], max_tokens=20)
    assert "status 400: maximum context length is 256" in full.error


def test_samples_canceled_before_their_start_can_be_resumed(engine):
    cancel = Cancel()
    cancel.request()
    (sample,) = engine.generate(["later"], max_tokens=4, temperature=0, cancel=cancel, batch=0)
    assert sample.unfinished and sample.response_ids == []
    (begun,) = engine.generate([sample])
    assert len(begun.response_ids) == 4 and begun.eid == sample.eid
    assert begun.response_ids == engine.generate(["later"], max_tokens=4, temperature=0)[0].response_ids


def test_leaving_a_stream_early_ends_its_requests():
    with serve(pace=0.02) as server, OpenAIEngine(server.url) as engine:
        samplings = [Sampling(max_tokens=length, ignore_eos=True) for length in (2, 200, 200)]
        for _ in engine.stream([[30], [31], [32]], samplings):
            break
        assert eventually(lambda: server.open == 0 and server.broken == 2)


def test_calls_inside_an_event_loop(server, engine):
    async def both():
        native = await engine.agenerate(["loop"], max_tokens=5, seed=1, batch=0)
        streamed = [sample async for sample in engine.astream(["loop"], max_tokens=5, seed=1, batch=0)]
        sync = engine.generate(["loop"], max_tokens=5, seed=1, batch=0)  # blocks this loop, and works
        concurrent = await asyncio.gather(*(engine.agenerate([[20 + i]], max_tokens=3) for i in range(5)))
        return native, streamed, sync, [sample for (sample,) in concurrent]

    native, streamed, sync, concurrent = asyncio.run(both())
    assert native[0].response_ids == streamed[0].response_ids == sync[0].response_ids
    assert not any(sample.failed for sample in concurrent)


def test_cancelling_a_task_ends_its_requests():
    async def run(engine, server):
        task = asyncio.create_task(engine.agenerate([[30], [31]], max_tokens=200, ignore_eos=True, cancel=Cancel()))
        while server.open < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serve(pace=0.02) as server, OpenAIEngine(server.url) as engine:
        asyncio.run(run(engine, server))
        assert eventually(lambda: server.open == 0 and server.broken == 2)
        assert not engine.generate([[30]], max_tokens=2)[0].failed


def test_versions_of_the_server_are_recorded():
    for kind in ("vllm", "sglang"):
        with serve(kind, version="41") as server, OpenAIEngine(server.url, version=7) as engine:
            for sample in (*engine.generate([[30]], max_tokens=4), *engine.stream([[30]], max_tokens=4)):
                assert sample.versions == [41] * len(sample.response_ids)


class Chunks(httpx.AsyncByteStream):
    def __init__(self, data, sizes):
        self.data, self.sizes = data, sizes

    async def __aiter__(self):
        at = 0
        for size in [*self.sizes, len(self.data)]:
            yield self.data[at : at + size]
            at += size


@given(st.lists(st.text(max_size=6), max_size=4), st.lists(st.integers(0, 30), max_size=12), st.booleans())
@example(["a\u2028b", "\x85", "\x1c\u2029\x0b"], [], False)
def test_events_are_parsed_from_any_chunks(texts, sizes, windows):
    end = "\r\n" if windows else "\n"
    lines = [f"data: {json.dumps({'text': text}, ensure_ascii=windows)}" for text in texts]
    body = "".join(f": ping{end}{end}{line}{end}{end}" for line in [*lines, "data: [DONE]"])

    async def read():
        stream = Chunks(body.encode("utf-8", "surrogatepass"), sizes)
        return [event["text"] async for event in read_events(httpx.Response(200, stream=stream))]

    assert asyncio.run(read()) == texts


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", times=2, status=500),
        Fault("status", times=1, status=503),
        Fault("status", times=1, status=429, headers={"retry-after": "0.3"}),
        Fault("hang up", times=2),
    ],
    ids=["500", "503", "429", "hang up"],
)
def test_temporary_failures_are_retried(server, engine, fault, stream):
    server.faults = [Fault(**vars(fault))]
    server.times.clear()
    options = {"n": 2, "max_tokens": 30, "seed": 3, "batch": 0, "ignore_eos": True}
    samples = engine.generate(["retry"], **options, cancel=Cancel() if stream else None)
    assert [sample.metrics["retries"] for sample in samples] == [fault.times] * 2
    assert len(server.seen) == fault.times + 1
    assert [sample.response_ids for sample in samples] == [
        sample.response_ids for sample in engine.generate(["retry"], **options)
    ]
    assert fault.status != 429 or server.times[1] - server.times[0] > 0.25


def test_the_number_of_tries_is_limited(server, engine):
    server.faults = [Fault("status", times=100, status=503, message="overloaded")]
    (sample,) = engine.generate(["never"], max_tokens=3)
    assert sample.error == f"POST {server.url}/v1/completions: status 503: overloaded (tried 4 times)"
    assert len(server.seen) == 4 and sample.metrics["retries"] == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_rejections_are_not_retried(server, engine, status):
    server.faults = [Fault("status", status=status, message="not like this")]
    (sample,) = engine.generate(["no"], max_tokens=3)
    assert sample.error == f"POST {server.url}/v1/completions: status {status}: not like this" and len(server.seen) == 1
    assert sample.metrics["retries"] == 0


def test_retries_are_counted_per_sample():
    with serve("sglang") as server, OpenAIEngine(server.url, backoff=QUICK) as engine:
        seeds = [sample.sampling["seed"] for sample in engine.generate([[30, 31]], n=3, max_tokens=2, seed=1, batch=0)]
        server.faults = [Fault("status", times=2, match=str(seeds[1]), status=503)]
        server.faults.append(Fault("status", times=9, match=str(seeds[2]), status=503))
        samples = engine.generate([[30, 31]], n=3, max_tokens=2, seed=1, batch=0)
        assert [sample.metrics["retries"] for sample in samples] == [0, 2, 3]
        assert [sample.failed for sample in samples] == [False, False, True]
        server.faults = [Fault("status", times=2, match="hello", status=503)]
        (sample,) = engine.generate(["hello"], max_tokens=2)  # /tokenize is asked for its ids
        assert sample.metrics["retries"] == 2 and server.paths[-4:] == ["/tokenize"] * 3 + ["/generate"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("garbage", "the reply is not JSON"),
        ("choices", "choices: got 1, expected 2"),
        ("nan", "got nan, expected a log-probability"),
        ("positive", "got 0.5, expected a log-probability"),
        ("short", "logprobs: got 29, expected 30, one for each id"),
        ("no ids", "(return_token_ids); or give the engine a tokenizer and retokenize=True"),
        ("no logprobs", "vLLM returns them if they are requested (logprobs)"),
        ("reason", "finish_reason: got 'because'"),
        ("other prompt", "differ from the 2 that were sent"),
    ],
)
def test_bad_replies_are_recorded(server, engine, kind, words):
    server.faults = [Fault(kind, times=2)]
    samples = engine.generate([[30, 31]], n=2, max_tokens=30, ignore_eos=True)
    assert all(sample.failed and words in sample.error for sample in samples)
    assert len(server.seen) == 1 and list(samples[0].prompt_ids) == [30, 31]
    record = samples[0].to_experience()
    assert words in record.info["error"] and not record.action_mask.any()


def test_retokenized_texts_are_recorded():
    with serve(tokenizer=tiny.words()) as words, OpenAIEngine(words.url, tokenizer=tiny.words()) as engine:
        options = {"max_tokens": 4, "suppress": range(9), "seed": 1, "batch": 0}
        (expected,) = engine.generate(["the quick fox"], **options)
        words.faults = [Fault("no ids", times=9)]
        assert "give the engine retokenize=True" in engine.generate(["the quick fox"], **options)[0].error
        engine.retokenize = True
        (sample,) = engine.generate(["the quick fox"], **options)
        assert sample.response_ids == expected.response_ids and list(sample.prompt_ids) == list(expected.prompt_ids)
        assert sample.info == {"retokenized": True} and expected.info == {}


def test_complete_replies_to_streaming_requests(server, engine):
    server.lacks = {"stream"}
    try:
        (sample,) = engine.stream(["whole"], max_tokens=5, ignore_eos=True)
    finally:
        server.lacks = set()
    assert len(sample.response_ids) == 5 and sample.metrics["retries"] == 0 and server.seen[0]["stream"]


@pytest.mark.parametrize(("kind", "words"), [("garbage", "not JSON"), ("nan", "got nan"), ("error", "the engine died")])
def test_bad_events_are_recorded(server, engine, kind, words):
    server.faults = [Fault(kind, times=9)]
    (sample,) = engine.stream([[30, 31]], max_tokens=30, ignore_eos=True)
    assert sample.failed and words in sample.error
    assert len(server.seen) == (4 if kind == "error" else 1)  # an error of the server's own may pass


def test_a_failure_fails_only_its_prompt(server, engine):
    bad = {3: "status", 8: "garbage", 13: "nan"}
    server.faults = [Fault(kind, times=9, match=f'"prompt": [{100 + i}]', status=400) for i, kind in bad.items()]
    server.faults.append(Fault("status", times=1, match='"prompt": [117]', status=503))
    samples = engine.generate([[100 + i] for i in range(20)], n=2, max_tokens=5, seed=1, batch=0)
    server.faults.clear()
    clean = engine.generate([[100 + i] for i in range(20)], n=2, max_tokens=5, seed=1, batch=0)
    for i, (sample, expected) in enumerate(zip(samples, clean, strict=True)):
        assert sample.failed is (i // 2 in bad) and str(sample.eid) == str(expected.eid)
        assert sample.failed or (sample.response_ids, sample.logprobs) == (expected.response_ids, expected.logprobs)


def test_concurrency_is_bounded_over_all_calls():
    with serve(pace=0.003) as server, OpenAIEngine(server.url, concurrency=3) as engine:
        calls = [
            threading.Thread(
                target=engine.generate, args=([[30 + i, 31 + j] for i in range(6)],), kwargs={"max_tokens": 9}
            )
            for j in range(2)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        assert len(server.seen) == 12 and server.max_open == 3


def test_a_server_that_is_not_running():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with OpenAIEngine(url, backoff=Backoff(tries=2, first=0.01)) as engine:
        samples = engine.generate([[30 + i] for i in range(50)], max_tokens=3)
        assert all(f"GET {url}/v1/models: ConnectError" in sample.error for sample in samples)
        assert all("tried 2 times" in sample.error and sample.metrics["retries"] == 1 for sample in samples)
        assert engine.run.engine_version == "unknown" and samples[0].run_id == engine.run.id
        with pytest.raises(TimeoutError, match="not ready after 0.3 s"):
            engine.health(0.3)
    with serve() as server, OpenAIEngine(server.url) as engine:
        engine.health(10)
        assert engine.run.engine == "vllm"


def test_a_server_that_starts_later_is_detected():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with OpenAIEngine(f"http://127.0.0.1:{port}", "tiny", backoff=Backoff(tries=1)) as engine:
        assert "ConnectError" in engine.generate([[30]], max_tokens=3)[0].error
        with serve(port=port):
            assert not engine.generate([[30]], max_tokens=3)[0].failed and engine.run.engine == "vllm"


def test_repr_has_no_secrets(server):
    server.faults.clear()
    url = server.url.replace("//", "//user:pass-word-1@")
    with OpenAIEngine(url, api_key="sk-secret-1", headers={"x-team": "secret-2"}) as engine:
        assert repr(engine) == f"OpenAIEngine('{server.url}', model=None, server='auto')"
        engine.generate([[30]], max_tokens=2)
        assert repr(engine) == f"OpenAIEngine('{server.url}', model='tiny', server='vllm')"


def test_errors_have_no_secrets_or_payloads(server):
    server.faults.clear()
    server.keys.clear()
    url = server.url.replace("//", "//user:pass-word-1@")
    with OpenAIEngine(url, api_key="sk-secret-1", headers={"x-team": "secret-2"}) as engine:
        server.faults = [Fault("status", status=400, message="bad sk-secret-1 secret-2 pass-word-1 " + "A" * 9000)]
        (sample,) = engine.generate(["key"], max_tokens=2)
        assert (
            sample.failed
            and "secret-" not in sample.error
            and "pass-word" not in sample.error
            and len(sample.error) < 600
        )
        assert "sk-secret-1" not in json.dumps(engine.describe()) and "pass-word-1" not in engine.url
    with OpenAIEngine(server.url, api_key="sk-secret-1") as engine:
        assert not engine.generate(["key"], max_tokens=2)[0].failed and server.keys[-1] == "Bearer sk-secret-1"
    assert len(redact_secrets("x y " * 1000)) == 500


def test_close_ends_threads_and_connections(server):
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = OpenAIEngine(server.url)
        engine.generate(["close"], max_tokens=2)
        engine.close()
        engine.close()
        assert threading.active_count() <= before + 1  # the server's own, of a connection that closes
        assert "engine: closed" in engine.generate(["closed"], max_tokens=2)[0].error


def test_the_thread_ends_with_the_last_reference(server):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "rollbook-http"]

    before = len(threads())
    engine = OpenAIEngine(server.url)
    engine.generate(["close"], max_tokens=2)
    stream = engine.stream(["a", "b"], max_tokens=200, ignore_eos=True)
    next(stream)
    assert len(threads()) == before + 1
    del stream, engine
    gc.collect()
    assert eventually(lambda: len(threads()) == before)


LEFT = """
import asyncio
from rollbook.rollout import OpenAIEngine
engine = OpenAIEngine({url!r})
stream = engine.stream([[30], [31]], [dict(max_tokens=n, ignore_eos=True) for n in (2, 200)])
print(len(next(stream).response_ids))
asyncio.base_events.kept = stream  # until that module is taken apart
"""


def test_a_program_can_exit_during_a_stream():
    with serve(pace=0.02) as server:
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", LEFT.format(url=server.url)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
        assert eventually(lambda: server.open == 0 and server.broken == 1)


def test_a_forked_process_gets_an_error(server, engine):
    engine.generate([[30]], max_tokens=2)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(engine.generate([[30]], max_tokens=2)[0].error).encode())
            engine.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"a forked process needs its own engine" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    assert not engine.generate([[30]], max_tokens=2)[0].failed


# --- images -----------------------------------------------------------------------------------------------------------


def spotted(size, spot):
    image = Image.new("RGB", size, (10, 20, 30))
    image.putpixel(spot, (200, 100, 50))
    return image


def test_images_are_sent_once_and_unchanged(server, engine, tmp_path):
    clear = spotted((9, 4), (2, 3)).convert("RGBA")
    palette = spotted((6, 6), (5, 5)).convert("P", palette=Image.Palette.ADAPTIVE)
    path = tmp_path / "one.png"
    spotted((3, 8), (1, 7)).save(path)
    raw = io.BytesIO()
    spotted((16, 2), (0, 0)).save(raw, "JPEG")
    ask = [{"role": "system", "content": "look"}, {"role": "user", "content": "what?"}]
    placed = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}],
        }
    ]
    prompts = [
        Prompt(messages=ask),
        Prompt(messages=ask, images=[clear]),
        Prompt(messages=placed, images=[palette, path]),
        Prompt(messages=ask, images=[raw.getvalue(), np.asarray(clear.convert("RGB")), {"path": str(path)}]),
    ]
    samples = engine.generate(prompts, n=3, max_tokens=3)
    assert not any(sample.failed for sample in samples) and len(server.seen) == 4  # once for three samples
    by_count = sorted(server.images, key=len)
    assert [len(images) for images in by_count] == [0, 1, 2, 3]
    (only,) = by_count[1]
    assert only.mode == "RGB" and only.tobytes() == clear.convert("RGB").tobytes()
    assert [image.size for image in by_count[2]] == [(6, 6), (3, 8)]
    assert by_count[2][0].tobytes() == palette.convert("RGB").tobytes()
    assert by_count[3][0].format == "JPEG" and by_count[3][1].size == (9, 4) and by_count[3][2].size == (3, 8)
    assert [list(sample.prompt_ids).count(8) for sample in samples[::3]] == [0, 1, 2, 3]
    order = [part["type"] for part in chat_messages(prompts[2])[0]["content"]]
    assert order == ["image_url", "text", "image_url"]
    assert prompts[2].messages == tuple(placed)  # the prompt itself is as it was


def test_images_that_cannot_be_sent(server, engine):
    message = [{"role": "user", "content": "what?"}]
    pairs = [
        (Prompt(text="look", images=[spotted((2, 2), (0, 0))]), "prompt.images: got text or token ids with images"),
        (Prompt(messages=message, images=["https://example.org/a.png"]), "expected the image, or allow_urls=True"),
        (
            Prompt(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]),
            "allow_urls=True",
        ),
        (Prompt(messages=message, images=[b"not an image"]), "expected a png, jpeg, gif, webp file"),
        (Prompt(messages=message, images=["no/such/file.png"]), "prompt.images[0]: cannot read"),
        (Prompt(messages=message, images=[3]), "got int, expected a PIL image"),
        (Prompt(messages=message, images=[b"GIF89a and so on"]), "an image that cannot be read"),
        (Prompt(messages=message, videos=[__file__]), "expected an MP4, WebM"),
        (
            Prompt(messages=[{"role": "user", "content": [{"type": "image"}]}], images=[b"", b""]),
            "prompt.images[0]: got bytes",
        ),
    ]
    samples = engine.generate([prompt for prompt, _ in pairs], max_tokens=2)
    for sample, (_, words) in zip(samples, pairs, strict=True):
        assert sample.failed and words in sample.error, sample.error
    assert server.seen == []
    with OpenAIEngine(server.url, allow_urls=True) as free:
        (sample,) = free.generate([pairs[1][0]], max_tokens=2)
        assert "cannot fetch https://example.org/a.png" in sample.error  # it got as far as the server
        part = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
        (sample,) = free.generate([Prompt(messages=[{"role": "user", "content": [part]}])], max_tokens=2)
        assert "expected a data:, http:// or https:// URL" in sample.error


def test_unfinished_samples_with_images_are_rejected(engine):
    prompt = Prompt(messages=CHAT, images=[spotted((2, 2), (0, 0))])
    (part,) = engine.generate(prompt, max_tokens=9, ignore_eos=True, pause_after=3)
    assert part.unfinished and len(part.response_ids) == 3
    (sample,) = engine.generate([part])
    assert (
        sample.failed
        and "unfinished samples with images cannot be continued" in sample.error
        and sample.response_ids == part.response_ids
    )
    content = [{"type": "image", "image": spotted((2, 2), (0, 0))}, {"type": "text", "text": "what?"}]
    shown = Prompt(messages=[{"role": "user", "content": content}])
    (part,) = engine.generate(shown, max_tokens=9, ignore_eos=True, pause_after=3)
    assert (
        "unfinished samples with images cannot be continued" in engine.generate([part])[0].error
    )  # an image in a message is one, too
    (long,) = engine.generate(prompt, max_tokens=2, max_prompt_tokens=5)
    assert "expected at most max_prompt_tokens (5)" in long.error


# --- kinds of servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["sglang", "llama.cpp"])
def test_native_apis_return_ids_and_logprobs(kind, stream):
    with serve(kind) as server, OpenAIEngine(server.url, tokenizer=tiny.bytes_()) as engine:
        cancel = Cancel() if stream else None
        options = {"max_tokens": 24, "seed": 5, "batch": 0, "ignore_eos": True, "cancel": cancel}
        samples = engine.generate(["text", CHAT, [30, 31]], n=2, **options)
        expected = [tiny.bytes_()("text")["input_ids"], rendered(CHAT), [30, 31]]
        assert len(server.seen) == 6 and engine.run.engine == kind and engine.run.engine_version != "unknown"
        for i, sample in enumerate(samples):
            assert not sample.failed and list(sample.prompt_ids) == expected[i // 2]
            assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
            assert sample.logprobs_kind == "processed" and sample.finish_reason == "length"
        assert len({sample.sampling["seed"] for sample in samples}) == 6
        sent = {body.get("seed", body.get("sampling_params", {}).get("sampling_seed")) for body in server.seen}
        assert sent == {sample.sampling["seed"] for sample in samples}
        stop = next(letter for letter in samples[0].text if letter.isascii() and letter.isprintable())
        stopped = engine.generate(["text"], n=1, stop=stop, **options)[0]
        assert stopped.finish_reason == "stop" and stopped.stop_reason == stop and stopped.text.endswith(stop)
        assert stopped.response_ids == samples[0].response_ids[: len(stopped.response_ids)]
        assert stopped.logprobs == samples[0].logprobs[: len(stopped.response_ids)]
        paused = engine.generate(["go"], max_tokens=9, temperature=0, pause_after=4, ignore_eos=True, batch=0)
        complete = engine.generate(["go"], max_tokens=9, temperature=0, ignore_eos=True, batch=0)[0]
        assert paused[0].unfinished and engine.generate(paused)[0].response_ids == complete.response_ids


def test_llama_cpp_chats_with_tools_and_options():
    with serve("llama.cpp") as server, OpenAIEngine(server.url) as engine:
        (sample,) = engine.generate(
            Prompt(messages=CHAT, tools=TOOLS), max_tokens=60, extra={"tool_choice": "required"}, suppress=[3]
        )
        assert sample.finish_reason == "tool_calls" and sample.message["tool_calls"][0]["function"]["name"] == "add"
        assert list(sample.prompt_ids) == rendered(CHAT) and sample.response_ids[-1] == 2
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
        assert server.seen[0]["logit_bias"] == [[3, False]]
        for option in ({"min_tokens": 2}, {"stop_token_ids": [4]}):
            (sample,) = engine.generate(["x"], max_tokens=3, **option)
            assert (
                f"{next(iter(option))}: got" in sample.error and "llama.cpp servers have no such option" in sample.error
            )


def test_sglang_limitations():
    with serve("sglang") as server, OpenAIEngine(server.url) as engine:
        chat, picture, text = engine.generate(
            [CHAT, Prompt(messages=CHAT, images=[spotted((2, 2), (0, 0))]), "text"], max_tokens=3, suppress=[3]
        )
        assert "tokenizer: missing" in chat.error and "does not return the prompt ids" in picture.error
        assert not text.failed and server.paths == ["/tokenize", "/generate"]
        assert any("chat" in limitation for limitation in engine.run.limitations)


def test_transformers_serve_limitations():
    with serve("transformers-serve") as server, OpenAIEngine(server.url) as engine:
        text, chat, ids = engine.generate(["text", CHAT, [30, 31]], max_tokens=3)
        for sample in (text, chat):
            assert "transformers-serve did not return the token ids" in sample.error and "vLLM" in sample.error
        assert "prompt.token_ids: transformers-serve servers take no token ids" in ids.error
        assert engine.run.engine == "transformers-serve" and "log-probs" in engine.run.limitations[0]
        (fire,) = engine.generate(["text"], max_tokens=3, first_temperature=2.0)
        assert "first_temperature: transformers-serve servers take no token ids" in fire.error
    with serve("transformers-serve") as server:
        with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), retokenize=True) as engine:
            # A response without tokens, which this server may give, lacks no log-probs.
            errors = [sample.error or "" for sample in engine.generate(["text"] * 8, max_tokens=3)]
            assert any("did not return the log-probs (logprobs=None requests none)" in error for error in errors)
            (sample,) = engine.generate(["text"], max_tokens=3, logprobs=None)
            assert not sample.failed and sample.logprobs is None and sample.info["retokenized"] is True
            assert sample.response_ids == tiny.bytes_()(sample.text)["input_ids"]


def test_plain_openai():
    with serve("openai") as server:
        with OpenAIEngine(server.url) as engine:
            (sample,) = engine.generate(["text"], max_tokens=3)
            assert (
                "openai did not return the token ids of the response" in sample.error
                and "retokenize=True" in sample.error
            )
            for option in (
                {"top_k": 3},
                {"min_p": 0.1},
                {"min_tokens": 1},
                {"ignore_eos": True},
                {"stop_token_ids": [1]},
            ):
                (sample,) = engine.generate(["text"], max_tokens=3, **option)
                assert "openai servers have no such option" in sample.error
        with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), retokenize=True) as engine:
            (sample,) = engine.generate(["text"], max_tokens=9, seed=1, batch=0)
            assert sample.failed and "expected one token of the tokenizer" in sample.error
    with serve("openai", tokenizer=tiny.words()) as server:
        with OpenAIEngine(server.url, tokenizer=tiny.words(), retokenize=True) as engine:
            (sample, two) = engine.generate(["the quick fox"], n=2, max_tokens=5, seed=3, suppress=range(9))
            assert not sample.failed and sample.info["retokenized"] is True and sample.logprobs_kind is None
            assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
            assert len(server.seen) == 2 and sample.sampling["seed"] != two.sampling["seed"]


def test_the_kind_of_server_and_the_model_can_be_set():
    with serve("openai") as server, OpenAIEngine(server.url, "other", server="vllm") as engine:
        (sample,) = engine.generate(["text"], max_tokens=3)
        assert "status 400: Unexpected fields" in sample.error and server.seen[0]["model"] == "other"
        assert engine.run.engine == "vllm" and engine.run.model == "other"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "url: got"),
        ({"server": "tgi"}, "server: got 'tgi'"),
        ({"render": "here"}, "render: got 'here'"),
        ({"render": "local"}, "tokenizer: missing, and render='local' needs it"),
        ({"retokenize": True}, "retokenize=True needs it"),
        ({"logprobs_kind": "cooked"}, "logprobs_kind: got 'cooked'"),
        ({"concurrency": 0}, "concurrency: got 0"),
        ({"timeout": -1}, "timeout: got -1"),
    ],
)
def test_bad_arguments(changes, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        OpenAIEngine(**({"url": "http://127.0.0.1:1"} | changes))


def test_a_slow_server_times_out():
    with (
        serve(pace=0.3) as server,
        OpenAIEngine(server.url, timeout=0.2, backoff=Backoff(tries=2, first=0.01)) as engine,
    ):
        (sample,) = engine.generate([[30]], max_tokens=3, ignore_eos=True)
        assert sample.failed and "ReadTimeout" in sample.error and len(server.seen) == 2
