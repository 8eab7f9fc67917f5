"""The protocol of engines: forms of prompts and options, ids, seeds, failures, streams, event loops, cancellation,
continued samples and records."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook import EID, Experience
from rollbook.core.vocabulary import template_fingerprint, tokenizer_fingerprint
from rollbook.rollout import (
    BaseEngine,
    Cancel,
    Line,
    Prompt,
    RunInfo,
    Sample,
    Sampling,
    ScriptedEngine,
    TransformersEngine,
)
from rollbook.rollout.server import Backoff, parse_retry_after
from rollbook.train import AlgorithmConfig
from tests import tiny

CHAT = [{"role": "user", "content": "hi"}]


class Odd(BaseEngine):
    """An engine whose `_run` is a function, for tests of the protocol."""

    def __init__(self, work):
        self.work = work

    @property
    def run(self):
        return RunInfo(engine="odd", engine_version="1", model="none")

    def _run(self, requests, cancel):
        yield from self.work(requests, cancel)


def sample_of(request, k, ids=(7,)):
    return Sample(prompt=request.prompt, eid=request.eids[k], prompt_ids=[1], response_ids=list(ids))


# --- requests ---------------------------------------------------------------------------------------------------------


def test_forms_of_prompts():
    engine = ScriptedEngine([[7]], tokenizer=tiny.bytes_())
    for prompts, count in [
        ("text", 1),
        (["a", "b"], 2),
        ([5, 6], 1),
        ([[5, 6], [7]], 2),
        (CHAT, 1),
        ([CHAT, CHAT], 2),
        (np.array([5, 6]), 1),
        (torch.tensor([5, 6]), 1),
        (Prompt(text="a"), 1),
        (["a", [5], CHAT, Prompt(token_ids=[4])], 4),
        ((text for text in ("a", "b")), 2),
        ([], 0),
    ]:
        assert len(engine.generate(prompts)) == count


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "got nothing, expected one of text, messages, token_ids"),
        ({"text": "a", "token_ids": [1]}, "got text and token_ids"),
        ({"text": 3}, "prompt.text: got int"),
        ({"token_ids": [1, -2]}, r"prompt.token_ids\[1\]: got -2"),
        ({"token_ids": [1, True]}, r"prompt.token_ids\[1\]: got True"),
        ({"token_ids": "12"}, "prompt.token_ids: got str"),
        ({"messages": [{"content": "x"}]}, r"prompt.messages\[0\]"),
        ({"text": "a", "tools": [{}]}, "prompt.tools: got tools without messages"),
        ({"text": "a", "images": [None]}, r"prompt.images\[0\]: got None"),
    ],
)
def test_bad_prompts(wrong, words):
    with pytest.raises(ValueError, match=words):
        Prompt(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"temperature": -1},
        {"temperature": None},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 2},
        {"stop": [""]},
        {"stop_token_ids": ["2"]},
        {"include_stop": "yes"},
        {"seed": -1},
        {"prompt_overflow": "middle"},
        {"logprobs": "all"},
        {"max_prompt_tokens": 0},
    ],
    ids=str,
)
def test_errors_name_the_option(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_options_are_merged_and_unknown_ones_rejected():
    base = Sampling(temperature=0.5, stop="x")
    assert Sampling.of(base, top_p=0.5) == Sampling(temperature=0.5, stop=["x"], top_p=0.5)
    assert Sampling.of({"max_new_tokens": 3, "stop_strings": ["y"]}) == Sampling(max_tokens=3, stop=["y"])
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        ScriptedEngine([[7]]).generate("a", temprature=1.0)
    with pytest.raises(ValueError, match="sampling: got 2 entries, expected 1"):
        ScriptedEngine([[7]]).generate("a", [Sampling(), Sampling()])
    with pytest.raises(ValueError, match="sampling: got int"):
        ScriptedEngine([[7]]).generate("a", 3)
    assert Sampling(top_k=0).top_k == -1 and json.loads(json.dumps(base.to_dict()))["stop"] == ["x"]


def test_ids_have_batch_task_and_run():
    engine = ScriptedEngine([[7]])
    samples = engine.generate(["a", Prompt(text="b", eid=EID(batch=3, task="x", run=10))], n=2, batch=9)
    assert [sample.eid.rid for sample in samples] == ["9/0/0", "9/0/1", "3/x/10", "3/x/11"]
    assert len({sample.eid.uid for sample in samples}) == 4 and {sample.group_size for sample in samples} == {2}
    first, other = (engine.generate("a")[0].eid for _ in range(2))
    assert first.batch != other.batch  # calls without ids are never one group
    with pytest.raises(ValueError, match="prompts: 0 and 1 both give run 0/0/0"):
        engine.generate([Prompt(text="a", eid=EID(batch=0, task=0)), Prompt(text="b", eid=EID(batch=0, task=0))])
    with pytest.raises(ValueError, match="both give run"):
        engine.generate(
            [Prompt(text="a", eid=EID(batch=0, task=0)), Prompt(text="b", eid=EID(batch=0, task=0, run=1))], n=2
        )


@given(st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_seeds_depend_only_on_the_seed_and_the_id(seed, n, before, after):
    engine = ScriptedEngine([[7]])
    prompts = [Prompt(text="x", eid=EID(batch=0, task=i)) for i in range(before + 1 + after)]
    requests = engine.requests(prompts, n=n, seed=seed)
    alone = engine.requests(prompts[before], n=n, seed=seed)[0]
    assert requests[before].seeds == alone.seeds
    assert [str(run_seed) for run_seed in requests[before].eids] == [str(run_seed) for run_seed in alone.eids]
    more = engine.requests(prompts[before], n=n + 1, seed=seed)[0]
    assert more.seeds[:n] == alone.seeds  # one sample more changes none of the others
    seeds = [run_seed for request in requests for run_seed in request.seeds]
    assert len(set(seeds)) == len(seeds) and all(0 <= run_seed < 2**63 for run_seed in seeds)
    assert engine.requests("x", n=n, seed=seed)[0].seeds != engine.requests("x", n=n, seed=seed + 1)[0].seeds
    assert engine.requests("x", n=n)[0].seeds != engine.requests("x", n=n)[0].seeds


def test_options_per_prompt():
    engine = ScriptedEngine(lambda prompt, run: [run] * 5)
    samples = engine.generate(["a", "b"], [{"n": 3, "max_tokens": 2}, Sampling(n=1, max_tokens=9)])
    assert [len(sample.response_ids) for sample in samples] == [2, 2, 2, 5]
    assert [sample.finish_reason for sample in samples] == ["length"] * 3 + ["stop"]
    assert [sample.sampling["max_tokens"] for sample in samples] == [2, 2, 2, 9]


# --- what an engine owes ----------------------------------------------------------------------------------------------


def test_missing_samples_are_failures():
    def work(requests, cancel):
        yield 1, sample_of(requests[0], 1)
        raise OSError("the device is gone")

    samples = Odd(work).generate(["a", "b"], n=2, batch=0)
    assert [sample.failed for sample in samples] == [True, False, True, True]
    assert samples[0].error == "OSError: the device is gone" and samples[3].eid.rid == "0/1/1"
    samples = Odd(lambda requests, cancel: iter(())).generate(["a"], n=2)
    assert all("ended without this sample" in sample.error for sample in samples)


def test_a_failed_continuation_keeps_its_tokens():
    part = Sample(
        prompt=Prompt(text="a"),
        eid=EID(batch=0, task=0),
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        logprobs=[-1.0, -2.0],
        versions=[5, 5],
        finish_reason="abort",
        sampling={"max_tokens": 9, "seed": 4},
        group_size=8,
    )
    (sample,) = Odd(lambda requests, cancel: iter(())).generate([part])
    assert (
        sample.failed
        and sample.response_ids == [3, 4]
        and sample.logprobs == [-1.0, -2.0]
        and sample.versions == [5, 5]
    )
    assert sample.group_size == 8 and sample.sampling["seed"] == 4


def test_samples_that_cannot_be_continued():
    engine = ScriptedEngine([[7, 8, 9]])
    done = engine.generate("a")[0]
    with pytest.raises(ValueError, match="got a finished sample"):
        engine.generate([done])
    part = engine.generate("a", pause_after=2)[0]
    with pytest.raises(ValueError, match="max_tokens: got 2, expected more than the 2 it has"):
        engine.generate([part], max_tokens=2)
    with pytest.raises(ValueError, match="pause_after: got 0"):
        engine.generate("a", pause_after=0)


def test_leaving_a_stream_early_closes_the_generator():
    closed = threading.Event()

    def work(requests, cancel):
        try:
            for request in requests:
                yield request.position, sample_of(request, 0)
        finally:
            closed.set()

    for _ in Odd(work).stream(["a", "b", "c"]):
        break
    assert closed.wait(5)


@pytest.mark.parametrize("early", [False, True])
def test_streams_in_an_event_loop(early):
    seen = []

    def work(requests, cancel):
        for request in requests:
            if cancel.requested:
                seen.append("cancelled")
                return
            yield request.position, sample_of(request, 0)
            time.sleep(0.01)

    async def run(cancel):
        samples = []
        async for sample in Odd(work).astream([[i] for i in range(30)], cancel=cancel):
            samples.append(sample)
            if early and len(samples) == 3:
                break
        return samples

    cancel = Cancel()
    samples = asyncio.run(run(cancel))
    assert len(samples) == (3 if early else 30)
    assert cancel.requested is early  # a call that is over leaves its off-switch alone
    until = time.monotonic() + 30
    while early and not seen and time.monotonic() < until:
        time.sleep(0.01)
    assert bool(seen) is early


def test_async_calls_equal_sync_calls():
    engine = ScriptedEngine(lambda prompt, run: ValueError("no") if run == 1 else [run, 8])
    prompts = [Prompt(text="a", eid=EID(batch=0, task=0)), Prompt(text="b", eid=EID(batch=0, task=1))]
    sync = engine.generate(prompts, n=3, seed=5)
    native = asyncio.run(engine.agenerate(prompts, n=3, seed=5))
    assert [str(sample) for sample in sync] == [str(sample) for sample in native]
    assert [sample.failed for sample in sync] == [False, True, False] * 2

    def broken(requests, cancel):
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(Odd(broken).agenerate("a"))


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_forms_of_scripts():
    by_text = ScriptedEngine({"a": [[1], [2]], "b": Line(ids=(5, 6), logprobs=(-0.5, -0.25)), (7, 8): [9]})
    assert [sample.response_ids for sample in by_text.generate("a", n=3)] == [[1], [2], [1]]
    (sample,) = by_text.generate("b")
    assert sample.response_ids == [5, 6] and sample.logprobs == [-0.5, -0.25]
    assert by_text.generate([[7, 8]])[0].response_ids == [9]
    assert "script: no response to 'c'" in by_text.generate("c")[0].error
    by_task = ScriptedEngine({EID(batch=0, task="t").tid: [[4]]})
    assert by_task.generate(Prompt(messages=CHAT, eid=EID(batch=0, task="t")))[0].response_ids == [4]
    turns = ScriptedEngine([[1], "no tokenizer", Line(error="broken"), RuntimeError("raised")])
    results = turns.generate(["w", "x", "y", "z"])
    assert results[0].logprobs == [-1.0] and "the engine has no tokenizer" in results[1].error
    assert results[2].error == "broken" and results[3].error == "RuntimeError: raised"
    spoken = ScriptedEngine(["yes"], tokenizer=tiny.bytes_()).generate(CHAT)[0]
    assert spoken.text == "yes" and tiny.bytes_().decode(spoken.prompt_ids).startswith("<|user|>hi")
    with pytest.raises(ValueError, match="line: got both or neither"):
        Line()


def test_scripts_pause_resume_and_cancel():
    engine = ScriptedEngine({"a": [list(range(10, 20))]}, version=1)
    part = engine.generate("a", max_tokens=8, pause_after=3)[0]
    assert part.unfinished and part.response_ids == [10, 11, 12]
    engine.version = 2
    resumed = engine.generate([part])[0]
    assert resumed.response_ids == list(range(10, 18)) and resumed.versions == [1] * 3 + [2] * 5
    assert resumed.finish_reason == "length" and resumed.eid == part.eid
    cancel = Cancel()
    cancel.request()
    assert engine.generate("a", cancel=cancel)[0].unfinished


def test_recorded_rollouts_are_replayed():
    first = ScriptedEngine(
        {"a": [Line(ids=(7, 8), logprobs=(-0.5, -1.5)), Line(ids=(9,), finish_reason="length"), Line(error="lost")]},
        version=4,
    )
    prompts = [Prompt(text="a", eid=EID(batch=1, task=2), reference="42")]
    samples = first.generate(prompts, n=3, temperature=0.5)
    records = [sample.to_experience() for sample in samples]
    again = ScriptedEngine.replaying(records).generate(prompts, n=3)
    for sample, expected in zip(again, samples, strict=True):
        assert sample.eid.rid == expected.eid.rid and sample.response_ids == expected.response_ids
        assert sample.finish_reason == expected.finish_reason and sample.logprobs == expected.logprobs
        assert sample.versions == expected.versions and sample.failed == expected.failed
        assert sample.sampling["temperature"] == 0.5
    assert again[2].error == "lost"
    player = ScriptedEngine.replaying(records)
    assert "was not recorded" in player.generate(Prompt(text="a", eid=EID(batch=1, task=3)))[0].error
    assert "not those recorded" in player.generate(Prompt(token_ids=[5], eid=EID(batch=1, task=2)))[0].error


# --- samples and their records ----------------------------------------------------------------------------------------


def test_samples_check_their_fields():
    fields = {"prompt": Prompt(text="a"), "eid": EID(), "prompt_ids": [1], "response_ids": [2, 3]}
    for wrong, words in [
        ({"logprobs": [-1.0]}, "logprobs: got 1 entries, expected 2"),
        ({"versions": [1, 2, 3]}, "versions: got 3 entries, expected 2"),
        ({"finish_reason": "done"}, "finish_reason: got 'done'"),
        ({"finish_reason": "error"}, "error: got None with finish_reason 'error'"),
        ({"error": "x"}, "error: got 'x' with finish_reason 'stop'"),
        ({"logprobs_kind": "all"}, "logprobs_kind: got 'all'"),
    ]:
        with pytest.raises(ValueError, match=words):
            Sample(**fields | wrong)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT


@st.composite
def samples_(draw):
    prompt_ids = draw(st.lists(st.integers(0, 9), max_size=4))
    ids = draw(st.lists(st.integers(0, 9), max_size=5))
    failed = draw(st.booleans())
    row = st.lists(st.floats(-100, 0, width=32), min_size=len(ids), max_size=len(ids))
    numbers = st.lists(st.integers(0, 2**31 - 1), min_size=len(ids), max_size=len(ids))
    chat = draw(st.booleans())
    prompt = (
        Prompt(
            messages=[{"role": "user", "content": draw(TEXT)}],
            tools=draw(st.none() | st.just([{"type": "function", "function": {"name": "f"}}])),
            reference=draw(PLAIN),
            label=draw(PLAIN),
            info=draw(st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=2)),
        )
        if chat
        else Prompt(text=draw(TEXT), reference=draw(PLAIN))
    )
    return Sample(
        prompt=prompt,
        eid=EID(batch=draw(st.integers(0, 9)), task=draw(TEXT), run=draw(st.integers(0, 99))),
        prompt_ids=prompt_ids,
        response_ids=ids,
        logprobs=draw(st.none() | row),
        logprobs_kind=draw(st.sampled_from(["raw", "tempered", "processed"])),
        finish_reason="error" if failed else draw(st.sampled_from(["stop", "length", "tool_calls", "abort"])),
        error=draw(TEXT.filter(bool)) if failed else None,
        stop_reason=draw(st.none() | TEXT | st.integers(0, 9)),
        versions=draw(st.none() | numbers),
        text=draw(st.none() | TEXT),
        prompt_text=draw(st.none() | TEXT),
        sampling={"temperature": 0.5, "seed": draw(st.none() | st.integers(0, 2**63 - 1))},
        run_id="0123456789abcdef",
        group_size=draw(st.integers(1, 99)),
        message={"role": "assistant", "content": draw(TEXT)} if chat and draw(st.booleans()) else None,
        metrics={"seconds": draw(st.floats(0, 100))},
        info=draw(st.dictionaries(st.sampled_from("xyz"), PLAIN, max_size=2)),
    )


@given(samples_())
def test_records_have_all_fields_of_a_sample(sample):
    record = sample.to_experience()
    for restored in (record, Experience.deserialize(record.serialize())):
        assert restored.eid == sample.eid and restored.tokens.tolist() == [*sample.prompt_ids, *sample.response_ids]
        assert restored.prompt_length == len(sample.prompt_ids)
        for actual, expected_column in (
            (restored.logprobs, sample.logprobs),
            (restored.policy_versions, sample.versions),
        ):
            assert (None if actual is None else actual.tolist()) == expected_column
        assert restored.finish_reason == sample.finish_reason and restored.group_size == sample.group_size
        assert restored.response_text == sample.text
        assert restored.prompt_text == (sample.prompt_text if sample.prompt_text is not None else sample.prompt.text)
        assert restored.truncate_status == ("response_truncated" if sample.finish_reason == "length" else None)
        mask = [not sample.failed] * len(sample.response_ids)
        assert restored.action_mask is None or restored.action_mask.tolist() == mask
        assert not sample.failed or restored.action_mask is not None or not sample.response_ids
        assert restored.info.get("error") == sample.error and restored.sampling["run"] == sample.run_id
        for name, value in {**sample.prompt.info, **sample.info}.items():
            assert restored.info[name] == value
        for name in ("reference", "label"):
            assert restored.info.get(name) == getattr(sample.prompt, name)
        assert restored.sampling["seed"] == sample.sampling["seed"] and restored.metrics == sample.metrics
        assert restored.sampling["logprobs"] == (None if sample.logprobs is None else sample.logprobs_kind)
        assert restored.sampling.get("stop_reason") == sample.stop_reason
        if sample.prompt.messages is not None:
            reply = [] if sample.message is None else [sample.message]
            assert restored.messages == [*sample.prompt.messages, *reply]
            assert restored.tools == (None if sample.prompt.tools is None else list(sample.prompt.tools))


# --- small parts ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.just(0.0) | st.floats(1e-6, 10), st.floats(1, 5), st.floats(0, 20), st.floats(0, 1))
def test_waits_grow_up_to_the_limit(tries, first, factor, max_wait, jitter):
    waits = list(Backoff(tries=tries, first=first, factor=factor, max_wait=max_wait, jitter=jitter).waits())
    assert len(waits) == tries - 1
    for i, wait in enumerate(waits):
        length = min(first * factor**i, max_wait)
        assert length * (1 - jitter) * (1 - 1e-9) <= wait <= length * (1 + 1e-9)


def test_retry_after():
    assert parse_retry_after({"retry-after": "1.5"}) == 1.5 and parse_retry_after({"retry-after": "-3"}) == 0
    assert (
        parse_retry_after({"retry-after": "9999"}) == 60 and parse_retry_after({"retry-after": "Wed, 21 Oct 2026"}) == 0
    )
    assert parse_retry_after({"retry-after": "nan"}) == 0 and parse_retry_after({"retry-after": "inf"}) == 60
    for wrong in ({"tries": 0}, {"first": -1}, {"factor": 0.5}, {"jitter": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Backoff(**wrong)


def test_fingerprints_depend_on_the_behavior_of_a_tokenizer(tmp_path):
    words, bytes_ = tiny.words(), tiny.bytes_()
    assert tokenizer_fingerprint(words) != tokenizer_fingerprint(bytes_)
    words.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    before = tokenizer_fingerprint(words)
    assert tokenizer_fingerprint(again) == before and template_fingerprint(again) == template_fingerprint(words)
    words(["the fox", "dog"], padding=True, truncation=True, max_length=5)
    assert tokenizer_fingerprint(words) == before
    again.chat_template = "{{ messages }}"
    assert template_fingerprint(again) != template_fingerprint(words)


def test_run_ids_depend_on_the_fields():
    run = RunInfo(engine="vllm", engine_version="1", model="m")
    assert run.id == RunInfo(engine="vllm", engine_version="1", model="m").id
    assert (
        len(
            {
                run.id,
                *(RunInfo(**{**run.to_dict(), "limitations": (), name: "x"}).id for name in ("model", "tokenizer")),
            }
        )
        == 3
    )


def test_forms_of_a_single_prompt() -> None:
    engine = ScriptedEngine([[7]])
    message = {"role": "user", "content": "hi"}
    for prompt in (
        "hi",
        message,
        [message],
        [5, 6],
        np.array([5, 6]),
        [np.int64(5), np.int64(6)],
        torch.tensor([5, 6]),
    ):
        (sample,) = engine.generate(prompt)
        assert sample.prompt.messages in (None, (message,)) and sample.prompt.token_ids in (None, (5, 6))
    for invalid in (None, b"hi", 5):
        with pytest.raises(ValueError, match="prompts: got"):
            engine.generate(invalid)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"stop_token_ids": 2}, "stop_token_ids: got int, expected a list of token ids"),
        ({"suppress": 5}, "suppress: got int"),
        ({"stop": 5}, "stop: got 5, expected texts"),
        ({"extra": 5}, "extra: got 5, expected a mapping"),
    ],
)
def test_options_of_the_wrong_type(option: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Sampling(**option)


def test_ids_from_numpy_and_torch() -> None:
    sampling = Sampling(stop_token_ids=np.array([3, 4]), suppress=torch.tensor([5]))
    assert sampling.stop_token_ids == (3, 4) and sampling.suppress == (5,)


def test_samples_have_group_size_and_requested_seed() -> None:
    sample, two = ScriptedEngine([[7]]).generate("hi", n=2, seed=9, batch="b")
    assert sample.group_id == two.group_id == "b/0"
    assert sample.sampling["asked_seed"] == 9 and sample.sampling["seed"] != two.sampling["seed"]


def test_only_single_turns_are_replayed() -> None:
    turn = Experience(eid={"batch": 0, "task": 1}, tokens=[1, 2, 3], prompt_length=1, logprobs=[-1, -2], group_size=4)
    again = ScriptedEngine.replaying([turn]).generate(Prompt(token_ids=[1], eid=EID(0, 1)))[0]
    assert again.group_size == 4 and again.to_experience().experience_type == "single_turn"
    with pytest.raises(ValueError, match="script: got records, expected responses; ScriptedEngine.replaying"):
        ScriptedEngine([turn])
    engine = ScriptedEngine.replaying([turn.replace(prompt_text="a")])
    assert engine.generate(Prompt(text="a", eid=EID(0, 1)))[0].error is None
    assert "expected 'a', as 0/1 had" in (engine.generate(Prompt(text="b", eid=EID(0, 1)))[0].error or "")
    with pytest.raises(ValueError, match="got a multi-turn record"):
        ScriptedEngine.replaying([turn.replace(action_mask=[True, False], experience_type="multi_turn")])
    with pytest.raises(ValueError, match="got several of run 0/1/0, expected one"):
        ScriptedEngine.replaying([turn, turn.replace(eid=EID(0, 1, 0, step=1))])


def test_scripts_by_task_and_invalid_scripts() -> None:
    engine = ScriptedEngine({7: [[4], [5]]})
    assert [sample.response_ids for sample in engine.generate(Prompt(text="x", eid=EID(0, 7)), n=2)] == [[4], [5]]
    assert "empty list" in (ScriptedEngine([]).generate("x")[0].error or "")
    wrong = ScriptedEngine([Line(ids=(1, 2), logprobs=(-1.0,))]).generate("x")[0]
    assert wrong.error == "ValueError: response: got 1 log-probs, expected 2, one for each token"
    assert ScriptedEngine([torch.tensor([4, 5])]).generate("x")[0].response_ids == [4, 5]


def test_the_options_of_a_record_can_be_sampled_with() -> None:
    seen = []
    engine = ScriptedEngine(lambda prompt, run: seen.append(run) or [7])
    first = engine.generate(Prompt(text="x", eid=EID(0, 1)), n=2, seed=9, temperature=0.5)[1]
    again = engine.generate(Prompt(text="x", eid=EID(0, 1)), first.sampling)[1]
    assert again.sampling == first.sampling and again.eid == first.eid
    record = first.to_experience()
    assert Sampling.of({**record.sampling, "logprobs": "raw"}).seed == 9


def test_repeated_samples_are_an_error() -> None:
    def twice(requests: Any, cancel: Any) -> Any:
        yield 0, sample_of(requests[0], 0)
        yield 0, sample_of(requests[0], 0)

    with pytest.raises(ValueError, match="Odd: unexpected or repeated sample 0"):
        Odd(twice).generate(["a", "b"])


def test_a_script_and_a_version_are_checked() -> None:
    for script in (5, None, "text"):
        with pytest.raises(ValueError, match=f"script: got {type(script).__name__}, expected a function, a list"):
            ScriptedEngine(script)  # type: ignore[arg-type]
    engine = ScriptedEngine([[7]])
    for version in ("x", -5, True):
        for call in (lambda v: ScriptedEngine([[7]], version=v), lambda v: engine.update_weights(None, v)):
            with pytest.raises(ValueError, match=f"version: got {version!r}, expected an integer >= 0"):
                call(version)
    assert engine.generate("a")[0].versions == [0]


def test_help_shows_what_users_write() -> None:
    parameters = inspect.signature(TransformersEngine).parameters
    assert list(parameters)[:3] == ["model", "tokenizer", "processor"] and "max_batch_rows" in parameters
    described = inspect.getdoc(AlgorithmConfig).partition("Args:\n")[2]
    for field in dataclasses.fields(AlgorithmConfig):
        assert f"\n    {field.name}: " in f"\n{described}"
