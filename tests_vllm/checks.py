"""Checks of `VllmEngine`, called by the tests in process and over servers."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rollbook
from rollbook.models import Actor
from rollbook.rollout import Cancel, Prompt, Sample, StaleWeightsError, VllmEngine, check_sync
from rollbook.train.config import load_config
from rollbook.train.run import run
from tests import tiny
from tests_vllm.conftest import largest, model_logprobs

CHAT = [{"role": "user", "content": "two plus three?"}]
ENDLESS = 8000
"""More tokens than a response that is canceled has, also on a busy machine."""


def perturb(model: Any, seed: int, scale: float = 0.02) -> None:
    """Change all weights, like an update."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def check_samples(engine: VllmEngine, model: Any) -> None:
    """Check that ids and log-probs equal those of transformers, and check n, seeds and chats."""
    tokenizer = tiny.bytes_()
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    expected = [tokenizer("hello")["input_ids"], [20, 30, 40], tokenizer(text)["input_ids"]]
    options = {"n": 4, "max_tokens": 48, "seed": 3, "batch": 0}
    for cancel in (None, Cancel()):  # complete and streamed
        samples = engine.generate(["hello", [20, 30, 40], CHAT], **options, cancel=cancel)
        assert not any(sample.failed for sample in samples), samples[0].error
        for i, sample in enumerate(samples):
            assert list(sample.prompt_ids) == expected[i // 4] and sample.group_size == 4
            assert largest(sample.logprobs, model_logprobs(model, sample)) < 1e-4
            assert set(sample.versions) == {engine.version}
        again = engine.generate(["hello", [20, 30, 40], CHAT], **options)
        assert [sample.response_ids for sample in again] == [sample.response_ids for sample in samples]
        assert len({tuple(sample.response_ids) for sample in samples}) == 12
    greedy = engine.generate(["hello", CHAT], n=2, max_tokens=8, temperature=0)
    assert [sample.error for sample in greedy] == [None] * 4
    assert [greedy[i].response_ids for i in (0, 2)] == [greedy[i].response_ids for i in (1, 3)]


def check_stops(engine: VllmEngine) -> None:
    options = {"max_tokens": 60, "seed": 2, "ignore_eos": True, "batch": 0}
    (free,) = engine.generate([[50, 60]], **options)
    stop_id = free.response_ids[7]
    (stopped,) = engine.generate([[50, 60]], **options, stop_token_ids=[stop_id])
    assert stopped.response_ids == free.response_ids[: free.response_ids.index(stop_id) + 1]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == stop_id
    letter = next(char for char in free.text if char.isascii() and char.isprintable())
    (texted,) = engine.generate([[50, 60]], **options, stop=letter, include_stop=False)
    assert texted.stop_reason == letter and not texted.text.endswith(letter)
    banned = list(range(9, 250))
    (suppressed,) = engine.generate([[50, 60]], **options, suppress=banned)
    assert not suppressed.failed and set(suppressed.response_ids).isdisjoint(banned)


def check_tools(engine: VllmEngine) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    (sample,) = engine.generate(Prompt(messages=CHAT, tools=tools), max_tokens=8, seed=1)
    assert not sample.failed, sample.error
    assert sample.message["role"] == "assistant" and sample.versions == [engine.version] * len(sample.response_ids)


def check_cancel(engine: VllmEngine, model: Any) -> None:
    """Check that paused and canceled samples are continued from their tokens."""
    options = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "batch": 0}
    (expected,) = engine.generate("pause", **options)
    (partial,) = engine.generate("pause", **options, pause_after=11)
    assert partial.unfinished and partial.response_ids == expected.response_ids[:11]
    assert engine.generate([partial])[0].response_ids == expected.response_ids
    for delay in (1.0, 3.0, 6.0):  # on a busy machine it takes seconds until there are tokens
        cancel = Cancel()
        threading.Timer(delay, cancel.request).start()
        (partial,) = engine.generate("once", max_tokens=ENDLESS, temperature=0, ignore_eos=True, cancel=cancel)
        if partial.response_ids:
            break
    length = len(partial.response_ids)
    assert partial.unfinished and 0 < length < ENDLESS and len(partial.versions) == length
    (resumed,) = engine.generate([partial], max_tokens=length + 20)
    assert resumed.response_ids[:length] == partial.response_ids
    assert largest(resumed.logprobs, model_logprobs(model, resumed)) < 1e-4


def check_update(engine: VllmEngine, actor: Actor) -> None:
    """Check that a stale engine is found, and that an update corrects it."""
    version = engine.version
    assert check_sync(engine, actor, version) < 1e-5
    perturb(actor.model, seed=1)
    with pytest.raises(StaleWeightsError, match="differ by"):
        check_sync(engine, actor, version)
    engine.update_weights(actor, version + 1)
    assert check_sync(engine, actor, version + 1) < 1e-5
    with pytest.raises(StaleWeightsError, match=f"expected {version}"):
        check_sync(engine, actor, version)


def check_update_during_generation(engine: VllmEngine, actor: Actor) -> None:
    """Check that an update in the middle of responses is recorded for each token.

    Args:
        engine: An engine of one replica: on two cores, servers are pinned to the same one and sample in turns.
        actor: The actor whose weights it gets.
    """
    version = engine.version
    engine.update_weights(actor, version + 1)
    before = {name: tensor.clone() for name, tensor in actor.model.state_dict().items()}

    def update(delay: float) -> None:
        time.sleep(delay)
        perturb(actor.model, seed=2)
        engine.update_weights(actor, version + 2)

    def cancel_after(updater: threading.Thread, seconds: float, cancel: Cancel) -> None:
        updater.join()
        time.sleep(seconds)
        cancel.request()

    def update_during_generation(is_canceled: bool, before_update: float) -> list[Sample]:
        actor.model.load_state_dict(before)
        if engine.version != version + 1:
            engine.update_weights(actor, version + 1)
        options = {"n": 2, "ignore_eos": True, "seed": 5}
        start = time.monotonic()
        engine.generate([[40, 41], [50]], max_tokens=200, **options)
        tokens_per_second = 200 / (time.monotonic() - start)
        length = ENDLESS if is_canceled else min(int(3 * before_update * tokens_per_second), ENDLESS)
        cancel = Cancel() if is_canceled else None
        updater = threading.Thread(target=update, args=(before_update,))
        updater.start()
        if cancel is not None:
            threading.Thread(target=cancel_after, args=(updater, before_update, cancel)).start()
        samples = engine.generate([[40, 41], [50]], max_tokens=length, **options, cancel=cancel)
        updater.join()
        return samples

    for is_canceled in (False, True):  # complete replies, and streams that are canceled after the update
        for before_update in (2.0, 4.0, 8.0):  # seconds; on a busy machine it takes some until there are tokens
            samples = update_during_generation(is_canceled, before_update)
            assert not any(sample.failed for sample in samples), [sample.error for sample in samples]
            if all(set(sample.versions) == {version + 1, version + 2} for sample in samples):
                break
        after = {name: tensor.clone() for name, tensor in actor.model.state_dict().items()}
        for sample in samples:
            assert sample.unfinished is is_canceled
            switch = sample.versions.index(version + 2)
            assert 0 < switch < len(sample.response_ids)
            assert sample.versions == [version + 1] * switch + [version + 2] * (len(sample.response_ids) - switch)
            # Each token's log-prob is that of the weights of its version.
            actor.model.load_state_dict(before)
            assert largest(sample.logprobs[:switch], model_logprobs(actor.model, sample)[:switch]) < 1e-4
            actor.model.load_state_dict(after)
            assert largest(sample.logprobs[switch:], model_logprobs(actor.model, sample)[switch:]) < 1e-4


def check_adapters(engine: VllmEngine, actor: Actor) -> None:
    """Check that only the adapters of an actor with LoRA are sent."""
    assert check_sync(engine, actor) < 1e-5  # fresh adapters change nothing
    for version in (1, 2):
        perturb(actor.model, seed=version, scale=0.1)
        with pytest.raises(StaleWeightsError):
            check_sync(engine, actor)
        engine.update_weights(actor, version)
        assert check_sync(engine, actor, version) < 1e-4
    files = [file.name for file in engine.folder.rglob("*") if file.is_file() and "start" not in file.parts]
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def check_letters(out: Path, *engine: str) -> None:
    """Check a short run of the letters recipe: the engine has the weights of each step, and tokens their version."""
    changes = ["steps=3", "batch.prompts_per_step=8", "warmup.steps=20", "data.held_out=50", f"out={out}"]
    run(load_config("letters", [*changes, "engine.kind=vllm", *engine]), stream=io.StringIO())
    with rollbook.open(out / "book", mode="r") as book:
        metrics = {step: numbers for step, numbers in book.metrics() if "seconds" in numbers}
        records = [record for record in book.where() if not str(record.eid.batch).startswith("eval")]
    assert [metrics[step]["sync/logprob_difference"] < 1e-5 for step in (1, 2, 3)] == [True] * 3
    assert {(record.eid.batch, version) for record in records for version in record.policy_versions.tolist()} == {
        (1, 0),
        (2, 1),
        (3, 2),
    }
    # The recorded log-probs are those of the weights before the step, recomputed by the trainer.
    for record in records:
        assert largest(record.logprobs.tolist(), record.old_logprobs.tolist()) < 1e-4


def check_worker(out: Path, *engine: str) -> None:
    """Check that a rollout worker samples from vLLM with published weights, within the bound on staleness."""
    changes = ["steps=4", "batch.prompts_per_step=8", "warmup.steps=20", "data.held_out=20", f"out={out}"]
    changes += ["rollout.workers=1", "replay.max_staleness=2", "checkpoint.interval=1", "checkpoint.keep_last=9"]
    run(load_config("letters", [*changes, "rollout.mode=async", "engine.kind=vllm", *engine]), stream=io.StringIO())
    with rollbook.open(out / "book", mode="r") as book:
        records = [record for record in book.where() if not str(record.eid.batch).startswith("eval")]
        assert all(numbers.get("staleness", 0) <= 2 for _, numbers in book.metrics())
    assert len({version for record in records for version in record.policy_versions.tolist()}) > 1
    # Each token's log-prob is that of the weights of its version, which are in the checkpoint of that step.
    for version in range(5):
        model = Actor(str(out / f"checkpoints/step-{version:06}/model")).model
        for record in records:
            start, tokens = record.prompt_length, record.tokens.tolist()
            sample = SimpleNamespace(prompt_ids=tokens[:start], response_ids=tokens[start:])
            expected = torch.tensor(model_logprobs(model, sample))
            chosen = record.policy_versions == version
            assert largest(record.logprobs[chosen].tolist(), expected[chosen].tolist()) < 1e-4
