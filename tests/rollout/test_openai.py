"""`OpenAIEngine` against a real server on loopback over a real tiny model: ids and log-probs are the model's own, what
goes wrong stays with its samples, and what a server cannot give is said."""

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
    with serve() as made:
        yield made


@pytest.fixture
def engine(server):
    server.seen.clear()
    server.paths.clear()
    server.images.clear()
    server.faults.clear()
    with OpenAIEngine(server.url, backoff=QUICK) as made:
        yield made


def model_logprobs(server, sample, temperature=1.0):
    """What the model itself says of a sample's tokens."""
    with torch.no_grad():
        logits = server.model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0].double()
    rows = (logits[len(sample.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return [float(row[one]) for row, one in zip(rows, sample.response_ids, strict=True)]


def rendered(messages, tools=None):
    tokenizer = tiny.bytes_()
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- ids and log-probs ------------------------------------------------------------------------------------------------


def test_ids_and_logprobs_are_the_models_own(server, engine):
    prompts = ["hello", [20, 30, 40], CHAT]
    samples = engine.generate(prompts, n=3, max_tokens=12, seed=1, batch=0)
    expected = [tiny.bytes_()("hello")["input_ids"], [20, 30, 40], rendered(CHAT)]
    assert len(samples) == 9 and not any(one.failed for one in samples)
    for i, one in enumerate(samples):
        assert list(one.prompt_ids) == expected[i // 3]
        assert one.logprobs == pytest.approx(model_logprobs(server, one), abs=1e-5)
        assert one.eid == EID(batch=0, task=i // 3, run=i % 3, suffix=one.eid.suffix) and one.group_size == 3
        assert one.versions == [0] * len(one.response_ids)
        assert one.run_id == engine.run.id and one.metrics["retries"] == 0
    assert len(server.seen) == 3  # n samples by one request
    assert [one.message["role"] for one in samples[6:]] == ["assistant"] * 3 and samples[0].message is None


def test_nothing_is_tokenized_again(engine):
    # Two tokens whose text is one character, which a tokenizer could not give back from its text alone.
    sample = engine.generate([[20, 9 + 188, 9 + 163]], max_tokens=8, seed=5)[0]
    assert list(sample.prompt_ids) == [20, 197, 172]
    assert tiny.bytes_()(sample.text)["input_ids"] != sample.response_ids


def test_seeds_are_sent_kept_and_repeatable(server, engine):
    first = engine.generate(["a", "b"], n=3, max_tokens=8, seed=11, batch=0)
    again = engine.generate(["a", "b"], n=3, max_tokens=8, seed=11, batch=0)
    assert [one.response_ids for one in first] == [one.response_ids for one in again]
    assert len({one.sampling["seed"] for one in first}) == 6
    alone = engine.generate("a", n=1, max_tokens=8, seed=11, batch=0)[0]
    assert alone.response_ids == first[0].response_ids and alone.sampling["seed"] == first[0].sampling["seed"]
    server.seen.clear()
    free = engine.generate("a", n=2, max_tokens=8)
    assert "seed" not in server.seen[0] and [one.sampling["seed"] for one in free] == [None, None]
    greedy = engine.generate("a", n=2, max_tokens=8, temperature=0)  # vLLM refuses a request with n = 2
    assert not greedy[0].failed and greedy[0].response_ids == greedy[1].response_ids


def test_every_option_arrives(server, engine):
    how = Sampling(
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
    sample = engine.generate("go", how)[0]
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
    known = engine.generate([[50, 60]], max_tokens=30, seed=2, ignore_eos=True, stop_token_ids=[stop_id], batch=0)[0]
    length = free.response_ids.index(stop_id) + 1
    assert known.response_ids == free.response_ids[:length] and known.stop_reason == stop_id
    assert known.finish_reason == "stop" and free.finish_reason == "length" and len(free.response_ids) == 30
    letter = next(one for one in free.text if one.isascii() and one.isprintable())
    for include in (True, False):
        stopped = engine.generate(
            [[50, 60]], max_tokens=30, seed=2, ignore_eos=True, stop=letter, include_stop=include, batch=0
        )[0]
        assert stopped.stop_reason == letter and stopped.text.endswith(letter) is include
        assert stopped.response_ids == free.response_ids[: len(stopped.response_ids)]  # the tokens are kept whole
        assert len(stopped.logprobs) == len(stopped.response_ids)


def test_suppressed_tokens_stay_away_and_a_server_that_samples_them_is_told(server, engine):
    likely = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0)[0].response_ids[0]
    other = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0, suppress=[likely])[0]
    assert other.response_ids != [likely]
    caught = engine.generate([[9, 9]], n=1, max_tokens=1, temperature=0, suppress=[likely], extra={"logit_bias": None})[
        0
    ]
    assert caught.failed and f"suppress: the server sampled the suppressed token {likely}" in caught.error


@pytest.mark.parametrize("stream", [False, True])
def test_first_temperature_is_of_the_first_token_alone(server, engine, stream):
    cancel = Cancel() if stream else None
    cold = engine.generate("fire", max_tokens=6, temperature=0, batch=0)[0]
    server.seen.clear()
    samples = engine.generate(
        ["fire"], n=2, max_tokens=6, temperature=0, first_temperature=30.0, seed=4, batch=0, cancel=cancel
    )
    assert [body["max_tokens"] for body in server.seen] == [1, 5, 5] and server.seen[0]["temperature"] == 30.0
    assert server.seen[1]["prompt"][:-1] == list(samples[0].prompt_ids)
    for one in samples:
        assert len(one.response_ids) == len(one.logprobs) == 6 and one.response_ids[0] != cold.response_ids[0]
        assert one.logprobs == pytest.approx(model_logprobs(server, one), abs=1e-5)
        rest = engine.generate([[*one.prompt_ids, one.response_ids[0]]], max_tokens=5, temperature=0)[0]
        assert one.response_ids[1:] == rest.response_ids
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
        (made,) = sample.message["tool_calls"]
        assert made["function"]["name"] == "add" and json.loads(made["function"]["arguments"]) == {"a": 1}
        assert made["id"] == "call-1"
        assert sample.response_ids == [*tiny.bytes_()(CALL)["input_ids"], 2]
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample), abs=1e-5)
        record = sample.to_experience()
        assert record.messages[-1]["tool_calls"][0]["function"]["name"] == "add" and record.tools == TOOLS


def test_chats_rendered_here_are_sent_as_ids(server):
    with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), render="local") as engine:
        server.seen.clear()
        sample, text = engine.generate([CHAT, "plain"], max_tokens=4)
    assert server.seen[0]["prompt"] == rendered(CHAT) == list(sample.prompt_ids)
    assert server.seen[1]["prompt"] == tiny.bytes_()("plain")["input_ids"]
    assert sample.message == {"role": "assistant", "content": sample.text} and not text.failed
    assert sample.prompt_text == "<|user|>two plus three?<|end|><|assistant|>" and text.prompt_text is None
    assert engine.run.tokenizer is not None and engine.run.chat_template is not None


def test_long_prompts_are_refused_or_cut(server, engine):
    refused = engine.generate(["a long prompt", CHAT], max_tokens=3, max_prompt_tokens=4)
    assert all("max_prompt_tokens (4)" in one.error for one in refused) and server.seen == []
    left = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=4, prompt_overflow="left")[0]
    right = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=4, prompt_overflow="right")[0]
    whole = tiny.bytes_()("a long prompt")["input_ids"]
    assert list(left.prompt_ids) == whole[-4:] and list(right.prompt_ids) == whole[:4]
    assert left.info["prompt_truncated_from"] == len(whole)
    fits = engine.generate("a long prompt", max_tokens=3, max_prompt_tokens=20)[0]
    assert list(fits.prompt_ids) == whole and "prompt_truncated_from" not in fits.info


def test_a_tokenizer_counts_prompts_without_the_server(server):
    server.faults.clear()
    server.paths.clear()
    whole = tiny.bytes_()("a long prompt")["input_ids"]
    with OpenAIEngine(server.url, tokenizer=tiny.bytes_()) as engine:
        how = {"max_tokens": 3, "prompt_overflow": "left"}
        cut, short, chat = engine.generate(["a long prompt", "ab", CHAT], max_prompt_tokens=6, **how)
        assert list(cut.prompt_ids) == whole[-6:] and list(short.prompt_ids) == tiny.bytes_()("ab")["input_ids"]
        assert list(chat.prompt_ids) == rendered(CHAT)[-6:]
        assert chat.info["prompt_truncated_from"] == len(rendered(CHAT)) and "prompt_truncated_from" not in short.info
        assert set(server.paths) == {"/v1/completions"}
        (fits,) = engine.generate([Prompt(messages=CHAT, tools=TOOLS)], max_prompt_tokens=200, max_tokens=3)
        assert list(fits.prompt_ids) == rendered(CHAT, TOOLS) and server.paths[-1] == "/v1/chat/completions"
    with serve("openai", tokenizer=tiny.words()) as plain:
        with OpenAIEngine(plain.url, tokenizer=tiny.words(), retokenize=True) as engine:
            how = {"max_tokens": 3, "suppress": range(9), "max_prompt_tokens": 50}
            text, chat = engine.generate(["the quick fox", CHAT], **how)
            assert plain.seen[0]["prompt"] == list(text.prompt_ids) and "retokenized" in text.info
            assert not chat.failed and "messages" in plain.seen[1]
        with OpenAIEngine(plain.url) as engine:
            (one,) = engine.generate(["the quick fox"], max_tokens=3, max_prompt_tokens=50)
            assert "max_prompt_tokens: needs a tokenizer" in one.error and "/tokenize" in one.error


def test_a_server_without_tokenize_counts_by_its_reply(server, engine):
    server.lacks = {"/tokenize"}
    try:
        how = {"max_tokens": 3, "max_prompt_tokens": 12, "prompt_overflow": "right"}
        short, chat, long = engine.generate(["short", CHAT, "long" * 10], **how)
        again = engine.generate(["once more"], **how)[0]
    finally:
        server.lacks = set()
    assert not short.failed and not again.failed and list(short.prompt_ids) == tiny.bytes_()("short")["input_ids"]
    assert server.paths.count("/tokenize") <= 3 and server.paths[-1] == "/v1/completions"
    for one in (chat, long):
        assert "expected at most max_prompt_tokens (12)" in one.error, one.error
        assert "needs a tokenizer or a server with /tokenize" in one.error
        assert f"POST {server.url}/tokenize: status 404: Not Found" in one.error
    with serve("sglang") as own:
        own.lacks = {"/tokenize"}
        with OpenAIEngine(own.url) as bare, OpenAIEngine(own.url, tokenizer=tiny.bytes_()) as able:
            (one,) = bare.generate(["text"], max_tokens=3)
            assert f"POST {own.url}/tokenize: status 404" in one.error and "give the engine a tokenizer" in one.error
            (one,) = able.generate(["text"], max_tokens=3)
            assert list(one.prompt_ids) == tiny.bytes_()("text")["input_ids"] and not one.failed


# --- kinds of log-probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "how", "kind"),
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
def test_the_kind_is_what_was_asked_for_only_where_that_is_the_same_thing(true, how, kind):
    assert resolve_logprobs_kind(true, Sampling(**how)) == kind


def test_a_grammar_makes_log_probs_of_what_it_leaves():
    assert resolve_logprobs_kind("raw", Sampling(logprobs="raw"), constrained=True) == "processed"
    assert resolve_logprobs_kind("raw", Sampling(temperature=0.5), constrained=True) is None
    assert resolve_logprobs_kind("processed", Sampling(temperature=0.5), constrained=True) == "processed"


def test_a_server_of_another_mode_is_stated_by_its_user():
    how = {"max_tokens": 8, "temperature": 0.6, "top_k": 12, "seed": 1}
    with serve(logprobs_kind="processed") as server, OpenAIEngine(server.url, logprobs_kind="processed") as engine:
        sample = engine.generate("kinds", **how)[0]
        assert sample.logprobs_kind == "processed" and engine.describe()["logprobs_kind"] == "processed"
        assert sum(sample.logprobs) > sum(model_logprobs(server, sample))  # of twelve tokens rather than of all
    with serve("sglang") as server, OpenAIEngine(server.url) as engine:
        sample = engine.generate("kinds", **how)[0]
        assert sample.logprobs_kind == "tempered"
        assert sample.logprobs == pytest.approx(model_logprobs(server, sample, 0.6), abs=1e-5)
        assert engine.generate("kinds", **how, logprobs=None)[0].logprobs is None


# --- streaming, cancelling, going on ----------------------------------------------------------------------------------


def test_streamed_samples_come_as_they_finish_and_equal_whole_ones(server, engine):
    prompts = [Prompt(token_ids=[20 + i]) for i in range(4)]
    hows = [Sampling(max_tokens=length, seed=7, ignore_eos=True, n=2) for length in (40, 3, 20, 9)]
    whole = engine.generate(prompts, hows, batch=0)
    assert not any(body["stream"] for body in server.seen)
    streamed = list(engine.stream(prompts, hows, batch=0))
    assert server.seen[-1]["stream"] and server.seen[-1]["stream_interval"] > 1
    found = {str(one.eid): one for one in streamed}
    for one in whole:
        assert found[str(one.eid)].response_ids == one.response_ids and found[str(one.eid)].logprobs == one.logprobs
        assert found[str(one.eid)].text == one.text and list(found[str(one.eid)].prompt_ids) == list(one.prompt_ids)
    assert len(streamed[0].response_ids) < 40 and len(streamed[-1].response_ids) == 40


def test_samples_of_one_prompt_finish_on_their_own():
    with serve(pace=0.01) as server, OpenAIEngine(server.url) as engine:
        how = {"n": 4, "max_tokens": 60, "seed": 3, "stop_token_ids": list(range(235, 265)), "batch": 0}
        lengths = [len(one.response_ids) for one in engine.stream([[30, 31]], **how)]
        assert len(server.seen) == 1 and len(set(lengths)) > 1 and lengths == sorted(lengths)


def eventually(what):
    """Wait for something that another thread does."""
    until = time.monotonic() + 30
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    return what()


def test_cancel_keeps_what_there_is_and_it_goes_on_token_by_token():
    with serve(pace=0.002) as server, OpenAIEngine(server.url, version=1) as engine:
        # One short response among long ones: when it is there, the rest is called off.
        prompts = ["short", "once", CHAT, [40, 41]]
        hows = [Sampling(max_tokens=length, temperature=0, ignore_eos=True) for length in (40, 120, 120, 120)]
        cancel = Cancel()
        found = {}
        for one in engine.stream(prompts, hows, cancel=cancel, batch=0):
            cancel.request()
            found[one.eid.task] = one
        part = [found[task] for task in range(1, 4)]
        assert all(one.unfinished and one.error is None for one in part) and found[0].finish_reason == "length"
        assert all(0 < len(one.response_ids) < 120 and len(one.logprobs) == len(one.response_ids) for one in part)
        assert eventually(lambda: server.broken == 3 and server.open == 0)  # the server stops, too
        server.pace = 0.0
        whole = engine.generate(prompts[1:], hows[1:], batch=0)
        engine.version = 2
        done = engine.generate(part)
        for one, before, want in zip(done, part, whole, strict=True):
            assert one.response_ids == want.response_ids and one.finish_reason == "length"
            assert one.logprobs == pytest.approx(want.logprobs, abs=1e-5)
            assert one.logprobs[: len(before.logprobs)] == before.logprobs
            assert one.versions == [1] * len(before.response_ids) + [2] * (120 - len(before.response_ids))
            assert one.eid == before.eid and list(one.prompt_ids) == list(want.prompt_ids)


def test_pause_and_go_on(server, engine):
    want = engine.generate(["pause"], max_tokens=20, temperature=0, ignore_eos=True, batch=0)[0]
    one = engine.generate(["pause"], max_tokens=20, temperature=0, ignore_eos=True, batch=0, pause_after=7)[0]
    assert one.unfinished and len(one.response_ids) == 7
    one = engine.generate([one], pause_after=7)[0]
    assert one.unfinished and one.response_ids == want.response_ids[:14]
    one = engine.generate([one])[0]
    assert one.response_ids == want.response_ids and one.finish_reason == "length"
    # Random numbers are not used twice: each part has a seed of its own, made from the sample's.
    server.seen.clear()
    first = engine.generate(["pause"], max_tokens=20, seed=9, ignore_eos=True, batch=0, pause_after=5)[0]
    second = engine.generate([first])[0]
    assert server.seen[0]["seed"] != server.seen[1]["seed"] and second.sampling["seed"] == first.sampling["seed"]
    assert engine.generate([first])[0].response_ids == second.response_ids
    third = engine.generate([engine.generate([first], pause_after=4)[0]])[0]
    assert len({body["seed"] for body in server.seen}) == 3 and len(third.response_ids) == 20


def test_records_have_the_seed_that_was_sent(server, engine):
    how = {"max_tokens": 9, "ignore_eos": True, "batch": 0}
    (free,) = engine.generate(["seed"], **how, pause_after=3)
    assert free.sampling["seed"] is free.sampling["asked_seed"] is None
    (on,) = engine.generate([free])
    assert on.sampling["seed"] is None and "earlier" not in on.sampling
    (hot,) = engine.generate([free], temperature=0.5)
    assert hot.sampling["earlier"] == [{"tokens": 3, "temperature": 1.0}] and hot.sampling["temperature"] == 0.5
    how["n"] = 2
    server.seen.clear()
    seeded = engine.generate(["seed"], **how, seed=7, pause_after=3)
    assert [one.sampling["seed"] - server.seen[0]["seed"] for one in seeded] == [0, 1]
    for one in (*seeded, *engine.generate(seeded)):
        assert one.sampling["asked_seed"] == 7 and one.sampling["seed"] == seeded[one.eid.run].sampling["seed"]
        assert not any("seed" in part for part in one.sampling.get("earlier", ()))
        assert Sampling.of(one.sampling).seed == 7
    # Of what failed, and of what did not begin, too.
    cancel = Cancel()
    cancel.request()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begins = engine.generate(["seed"], **how, seed=7, cancel=cancel)
        gc.collect()
    assert all(one.unfinished and one.sampling["seed"] is not None for one in begins)
    assert [one.response_ids for one in engine.generate(begins)] == [
        one.response_ids for one in engine.generate(begins)
    ]
    server.faults = [Fault("status", times=2, status=400)]
    (lost, *_) = engine.generate(["seed"], **how)
    assert lost.failed and lost.sampling["seed"] is None
    (lost, other) = engine.generate(["seed"], **how, seed=7)
    assert lost.failed and other.sampling["seed"] == seeded[1].sampling["seed"]


def test_the_end_of_the_context_is_no_pause(server, engine):
    (one,) = engine.generate([[30] * 250], max_tokens=20, ignore_eos=True, pause_after=10)
    assert len(one.response_ids) == 6 and one.finish_reason == "length"
    (full,) = engine.generate([[30] * 256], max_tokens=20)
    assert "status 400: maximum context length is 256" in full.error


def test_a_cancel_before_anything_gives_samples_that_can_begin(engine):
    cancel = Cancel()
    cancel.request()
    (one,) = engine.generate(["later"], max_tokens=4, temperature=0, cancel=cancel, batch=0)
    assert one.unfinished and one.response_ids == []
    (begun,) = engine.generate([one])
    assert len(begun.response_ids) == 4 and begun.eid == one.eid
    assert begun.response_ids == engine.generate(["later"], max_tokens=4, temperature=0)[0].response_ids


def test_leaving_a_stream_early_ends_its_requests():
    with serve(pace=0.02) as server, OpenAIEngine(server.url) as engine:
        hows = [Sampling(max_tokens=length, ignore_eos=True) for length in (2, 200, 200)]
        for _ in engine.stream([[30], [31], [32]], hows):
            break
        assert eventually(lambda: server.open == 0 and server.broken == 2)


def test_inside_an_event_loop(server, engine):
    async def both():
        native = await engine.agenerate(["loop"], max_tokens=5, seed=1, batch=0)
        streamed = [one async for one in engine.astream(["loop"], max_tokens=5, seed=1, batch=0)]
        sync = engine.generate(["loop"], max_tokens=5, seed=1, batch=0)  # blocks this loop, and works
        many = await asyncio.gather(*(engine.agenerate([[20 + i]], max_tokens=3) for i in range(5)))
        return native, streamed, sync, [one for (one,) in many]

    native, streamed, sync, many = asyncio.run(both())
    assert native[0].response_ids == streamed[0].response_ids == sync[0].response_ids
    assert not any(one.failed for one in many)


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


def test_versions_are_the_servers_word_where_it_has_one():
    for kind in ("vllm", "sglang"):
        with serve(kind, version="41") as server, OpenAIEngine(server.url, version=7) as engine:
            for one in (*engine.generate([[30]], max_tokens=4), *engine.stream([[30]], max_tokens=4)):
                assert one.versions == [41] * len(one.response_ids)


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
def test_events_come_whole_whatever_they_say_and_however_they_are_cut(texts, sizes, windows):
    end = "\r\n" if windows else "\n"
    lines = [f"data: {json.dumps({'text': text}, ensure_ascii=windows)}" for text in texts]
    whole = "".join(f": ping{end}{end}{line}{end}{end}" for line in [*lines, "data: [DONE]"])

    async def read():
        stream = Chunks(whole.encode("utf-8", "surrogatepass"), sizes)
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
def test_what_may_pass_is_tried_again(server, engine, fault, stream):
    server.faults = [Fault(**vars(fault))]
    server.times.clear()
    how = {"n": 2, "max_tokens": 30, "seed": 3, "batch": 0, "ignore_eos": True}
    samples = engine.generate(["retry"], **how, cancel=Cancel() if stream else None)
    assert [one.metrics["retries"] for one in samples] == [fault.times] * 2
    assert len(server.seen) == fault.times + 1
    assert [one.response_ids for one in samples] == [one.response_ids for one in engine.generate(["retry"], **how)]
    assert fault.status != 429 or server.times[1] - server.times[0] > 0.25


def test_tries_end(server, engine):
    server.faults = [Fault("status", times=100, status=503, message="overloaded")]
    (one,) = engine.generate(["never"], max_tokens=3)
    assert one.error == f"POST {server.url}/v1/completions: status 503: overloaded (tried 4 times)"
    assert len(server.seen) == 4 and one.metrics["retries"] == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_refusals_are_final(server, engine, status):
    server.faults = [Fault("status", status=status, message="not like this")]
    (one,) = engine.generate(["no"], max_tokens=3)
    assert one.error == f"POST {server.url}/v1/completions: status {status}: not like this" and len(server.seen) == 1
    assert one.metrics["retries"] == 0


def test_retries_are_those_of_the_sample():
    with serve("sglang") as server, OpenAIEngine(server.url, backoff=QUICK) as engine:
        seeds = [one.sampling["seed"] for one in engine.generate([[30, 31]], n=3, max_tokens=2, seed=1, batch=0)]
        server.faults = [Fault("status", times=2, match=str(seeds[1]), status=503)]
        server.faults.append(Fault("status", times=9, match=str(seeds[2]), status=503))
        samples = engine.generate([[30, 31]], n=3, max_tokens=2, seed=1, batch=0)
        assert [one.metrics["retries"] for one in samples] == [0, 2, 3]
        assert [one.failed for one in samples] == [False, False, True]
        server.faults = [Fault("status", times=2, match="hello", status=503)]
        (one,) = engine.generate(["hello"], max_tokens=2)  # /tokenize is asked for its ids
        assert one.metrics["retries"] == 2 and server.paths[-4:] == ["/tokenize"] * 3 + ["/generate"]


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
    assert all(one.failed and words in one.error for one in samples)
    assert len(server.seen) == 1 and list(samples[0].prompt_ids) == [30, 31]
    record = samples[0].to_experience()
    assert words in record.info["error"] and not record.action_mask.any()


def test_retokenized_texts_are_recorded():
    with serve(tokenizer=tiny.words()) as words, OpenAIEngine(words.url, tokenizer=tiny.words()) as engine:
        how = {"max_tokens": 4, "suppress": range(9), "seed": 1, "batch": 0}
        (want,) = engine.generate(["the quick fox"], **how)
        words.faults = [Fault("no ids", times=9)]
        assert "give the engine retokenize=True" in engine.generate(["the quick fox"], **how)[0].error
        engine.retokenize = True
        (one,) = engine.generate(["the quick fox"], **how)
        assert one.response_ids == want.response_ids and list(one.prompt_ids) == list(want.prompt_ids)
        assert one.info == {"retokenized": True} and want.info == {}


def test_whole_replies_to_requests_for_streams(server, engine):
    server.lacks = {"stream"}
    try:
        (one,) = engine.stream(["whole"], max_tokens=5, ignore_eos=True)
    finally:
        server.lacks = set()
    assert len(one.response_ids) == 5 and one.metrics["retries"] == 0 and server.seen[0]["stream"]


@pytest.mark.parametrize(("kind", "words"), [("garbage", "not JSON"), ("nan", "got nan"), ("error", "the engine died")])
def test_bad_events_are_recorded(server, engine, kind, words):
    server.faults = [Fault(kind, times=9)]
    (one,) = engine.stream([[30, 31]], max_tokens=30, ignore_eos=True)
    assert one.failed and words in one.error
    assert len(server.seen) == (4 if kind == "error" else 1)  # an error of the server's own may pass


def test_a_failure_stays_with_its_prompt(server, engine):
    bad = {3: "status", 8: "garbage", 13: "nan"}
    server.faults = [Fault(kind, times=9, match=f'"prompt": [{100 + i}]', status=400) for i, kind in bad.items()]
    server.faults.append(Fault("status", times=1, match='"prompt": [117]', status=503))
    samples = engine.generate([[100 + i] for i in range(20)], n=2, max_tokens=5, seed=1, batch=0)
    server.faults.clear()
    clean = engine.generate([[100 + i] for i in range(20)], n=2, max_tokens=5, seed=1, batch=0)
    for i, (one, want) in enumerate(zip(samples, clean, strict=True)):
        assert one.failed is (i // 2 in bad) and str(one.eid) == str(want.eid)
        assert one.failed or (one.response_ids, one.logprobs) == (want.response_ids, want.logprobs)


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


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with OpenAIEngine(url, backoff=Backoff(tries=2, first=0.01)) as engine:
        samples = engine.generate([[30 + i] for i in range(50)], max_tokens=3)
        assert all(f"GET {url}/v1/models: ConnectError" in one.error for one in samples)
        assert all("tried 2 times" in one.error and one.metrics["retries"] == 1 for one in samples)
        assert engine.run.engine_version == "unknown" and samples[0].run_id == engine.run.id
        with pytest.raises(TimeoutError, match="not ready after 0.3 s"):
            engine.health(0.3)
    with serve() as server, OpenAIEngine(server.url) as engine:
        engine.health(10)
        assert engine.run.engine == "vllm"


def test_a_server_that_comes_later_is_known_for_what_it_is():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with OpenAIEngine(f"http://127.0.0.1:{port}", "tiny", backoff=Backoff(tries=1)) as engine:
        assert "ConnectError" in engine.generate([[30]], max_tokens=3)[0].error
        with serve(port=port):
            assert not engine.generate([[30]], max_tokens=3)[0].failed and engine.run.engine == "vllm"


def test_a_repr_says_where_and_what_but_no_secret(server):
    server.faults.clear()
    url = server.url.replace("//", "//user:pass-word-1@")
    with OpenAIEngine(url, api_key="sk-secret-1", headers={"x-team": "secret-2"}) as engine:
        assert repr(engine) == f"OpenAIEngine('{server.url}', model=None, server='auto')"
        engine.generate([[30]], max_tokens=2)
        assert repr(engine) == f"OpenAIEngine('{server.url}', model='tiny', server='vllm')"


def test_secrets_and_payloads_stay_out_of_errors(server):
    server.faults.clear()
    server.keys.clear()
    url = server.url.replace("//", "//user:pass-word-1@")
    with OpenAIEngine(url, api_key="sk-secret-1", headers={"x-team": "secret-2"}) as engine:
        server.faults = [Fault("status", status=400, message="bad sk-secret-1 secret-2 pass-word-1 " + "A" * 9000)]
        (one,) = engine.generate(["key"], max_tokens=2)
        assert one.failed and "secret-" not in one.error and "pass-word" not in one.error and len(one.error) < 600
        assert "sk-secret-1" not in json.dumps(engine.describe()) and "pass-word-1" not in engine.url
    with OpenAIEngine(server.url, api_key="sk-secret-1") as engine:
        assert not engine.generate(["key"], max_tokens=2)[0].failed and server.keys[-1] == "Bearer sk-secret-1"
    assert len(redact_secrets("x y " * 1000)) == 500


def test_nothing_is_left_open(server):
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = OpenAIEngine(server.url)
        engine.generate(["close"], max_tokens=2)
        engine.close()
        engine.close()
        assert threading.active_count() <= before + 1  # the server's own, of a connection that closes
        assert "engine: closed" in engine.generate(["closed"], max_tokens=2)[0].error


def test_an_engine_that_nobody_holds_ends_its_thread(server):
    def threads():
        return [one for one in threading.enumerate() if one.name == "rollbook-http"]

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


def test_a_program_that_ends_in_the_middle_of_a_stream_ends_quietly():
    with serve(pace=0.02) as server:
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", LEFT.format(url=server.url)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
        assert eventually(lambda: server.open == 0 and server.broken == 1)


def test_a_forked_process_is_told(server, engine):
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


def test_images_arrive_once_and_intact(server, engine, tmp_path):
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
    assert not any(one.failed for one in samples) and len(server.seen) == 4  # once for three samples
    by_count = sorted(server.images, key=len)
    assert [len(one) for one in by_count] == [0, 1, 2, 3]
    (only,) = by_count[1]
    assert only.mode == "RGB" and only.tobytes() == clear.convert("RGB").tobytes()
    assert [one.size for one in by_count[2]] == [(6, 6), (3, 8)]
    assert by_count[2][0].tobytes() == palette.convert("RGB").tobytes()
    assert by_count[3][0].format == "JPEG" and by_count[3][1].size == (9, 4) and by_count[3][2].size == (3, 8)
    assert [list(one.prompt_ids).count(8) for one in samples[::3]] == [0, 1, 2, 3]
    order = [part["type"] for part in chat_messages(prompts[2])[0]["content"]]
    assert order == ["image_url", "text", "image_url"]
    assert prompts[2].messages == tuple(placed)  # the prompt itself is as it was


def test_images_that_cannot_go(server, engine):
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
    for one, (_, words) in zip(samples, pairs, strict=True):
        assert one.failed and words in one.error, one.error
    assert server.seen == []
    with OpenAIEngine(server.url, allow_urls=True) as free:
        (one,) = free.generate([pairs[1][0]], max_tokens=2)
        assert "cannot fetch https://example.org/a.png" in one.error  # it got as far as the server
        part = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
        (one,) = free.generate([Prompt(messages=[{"role": "user", "content": [part]}])], max_tokens=2)
        assert "expected a data:, http:// or https:// URL" in one.error


def test_an_unfinished_sample_with_images_says_why_it_cannot_go_on(engine):
    prompt = Prompt(messages=CHAT, images=[spotted((2, 2), (0, 0))])
    (part,) = engine.generate(prompt, max_tokens=9, ignore_eos=True, pause_after=3)
    assert part.unfinished and len(part.response_ids) == 3
    (one,) = engine.generate([part])
    assert (
        one.failed
        and "unfinished samples with images cannot be continued" in one.error
        and one.response_ids == part.response_ids
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
        how = {"max_tokens": 24, "seed": 5, "batch": 0, "ignore_eos": True, "cancel": cancel}
        samples = engine.generate(["text", CHAT, [30, 31]], n=2, **how)
        expected = [tiny.bytes_()("text")["input_ids"], rendered(CHAT), [30, 31]]
        assert len(server.seen) == 6 and engine.run.engine == kind and engine.run.engine_version != "unknown"
        for i, one in enumerate(samples):
            assert not one.failed and list(one.prompt_ids) == expected[i // 2]
            assert one.logprobs == pytest.approx(model_logprobs(server, one), abs=1e-5)
            assert one.logprobs_kind == "processed" and one.finish_reason == "length"
        assert len({one.sampling["seed"] for one in samples}) == 6
        sent = {body.get("seed", body.get("sampling_params", {}).get("sampling_seed")) for body in server.seen}
        assert sent == {one.sampling["seed"] for one in samples}
        stop = next(letter for letter in samples[0].text if letter.isascii() and letter.isprintable())
        stopped = engine.generate(["text"], n=1, stop=stop, **how)[0]
        assert stopped.finish_reason == "stop" and stopped.stop_reason == stop and stopped.text.endswith(stop)
        assert stopped.response_ids == samples[0].response_ids[: len(stopped.response_ids)]
        assert stopped.logprobs == samples[0].logprobs[: len(stopped.response_ids)]
        part = engine.generate(["go"], max_tokens=9, temperature=0, pause_after=4, ignore_eos=True, batch=0)
        whole = engine.generate(["go"], max_tokens=9, temperature=0, ignore_eos=True, batch=0)[0]
        assert part[0].unfinished and engine.generate(part)[0].response_ids == whole.response_ids


def test_llama_cpp_chats_with_tools_and_options():
    with serve("llama.cpp") as server, OpenAIEngine(server.url) as engine:
        (one,) = engine.generate(
            Prompt(messages=CHAT, tools=TOOLS), max_tokens=60, extra={"tool_choice": "required"}, suppress=[3]
        )
        assert one.finish_reason == "tool_calls" and one.message["tool_calls"][0]["function"]["name"] == "add"
        assert list(one.prompt_ids) == rendered(CHAT) and one.response_ids[-1] == 2
        assert one.logprobs == pytest.approx(model_logprobs(server, one), abs=1e-5)
        assert server.seen[0]["logit_bias"] == [[3, False]]
        for option in ({"min_tokens": 2}, {"stop_token_ids": [4]}):
            (one,) = engine.generate(["x"], max_tokens=3, **option)
            assert f"{next(iter(option))}: got" in one.error and "llama.cpp servers have no such option" in one.error


def test_sglang_says_what_it_cannot():
    with serve("sglang") as server, OpenAIEngine(server.url) as engine:
        chat, picture, text = engine.generate(
            [CHAT, Prompt(messages=CHAT, images=[spotted((2, 2), (0, 0))]), "text"], max_tokens=3, suppress=[3]
        )
        assert "tokenizer: missing" in chat.error and "does not return the prompt ids" in picture.error
        assert not text.failed and server.paths == ["/tokenize", "/generate"]
        assert any("chat" in one for one in engine.run.limitations)


def test_transformers_serve_gives_clear_errors():
    with serve("transformers-serve") as server, OpenAIEngine(server.url) as engine:
        text, chat, ids = engine.generate(["text", CHAT, [30, 31]], max_tokens=3)
        for one in (text, chat):
            assert "transformers-serve did not return the token ids" in one.error and "vLLM" in one.error
        assert "prompt.token_ids: transformers-serve servers take no token ids" in ids.error
        assert engine.run.engine == "transformers-serve" and "log-probs" in engine.run.limitations[0]
        (fire,) = engine.generate(["text"], max_tokens=3, first_temperature=2.0)
        assert "first_temperature: transformers-serve servers take no token ids" in fire.error
    with serve("transformers-serve") as server:
        with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), retokenize=True) as engine:
            # A response without tokens, which this server may give, lacks no log-probs.
            errors = [one.error or "" for one in engine.generate(["text"] * 8, max_tokens=3)]
            assert any("did not return the log-probs (logprobs=None requests none)" in error for error in errors)
            (one,) = engine.generate(["text"], max_tokens=3, logprobs=None)
            assert not one.failed and one.logprobs is None and one.info["retokenized"] is True
            assert one.response_ids == tiny.bytes_()(one.text)["input_ids"]


def test_plain_openai():
    with serve("openai") as server:
        with OpenAIEngine(server.url) as engine:
            (one,) = engine.generate(["text"], max_tokens=3)
            assert "openai did not return the token ids of the response" in one.error and "retokenize=True" in one.error
            for option in (
                {"top_k": 3},
                {"min_p": 0.1},
                {"min_tokens": 1},
                {"ignore_eos": True},
                {"stop_token_ids": [1]},
            ):
                (one,) = engine.generate(["text"], max_tokens=3, **option)
                assert "openai servers have no such option" in one.error
        with OpenAIEngine(server.url, tokenizer=tiny.bytes_(), retokenize=True) as engine:
            (one,) = engine.generate(["text"], max_tokens=9, seed=1, batch=0)
            assert one.failed and "expected one token of the tokenizer" in one.error
    with serve("openai", tokenizer=tiny.words()) as server:
        with OpenAIEngine(server.url, tokenizer=tiny.words(), retokenize=True) as engine:
            (one, two) = engine.generate(["the quick fox"], n=2, max_tokens=5, seed=3, suppress=range(9))
            assert not one.failed and one.info["retokenized"] is True and one.logprobs_kind is None
            assert one.logprobs == pytest.approx(model_logprobs(server, one), abs=1e-5)
            assert len(server.seen) == 2 and one.sampling["seed"] != two.sampling["seed"]


def test_the_kind_of_server_and_the_model_can_be_set():
    with serve("openai") as server, OpenAIEngine(server.url, "other", server="vllm") as engine:
        (one,) = engine.generate(["text"], max_tokens=3)
        assert "status 400: Unexpected fields" in one.error and server.seen[0]["model"] == "other"
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
        (one,) = engine.generate([[30]], max_tokens=3, ignore_eos=True)
        assert one.failed and "ReadTimeout" in one.error and len(server.seen) == 2
