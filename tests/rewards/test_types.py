"""Reward inputs from samples and records, and scores."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rollbook import EID, Experience, Experiences
from rollbook.core.media import encode_message, load_image
from rollbook.rewards import Reward, RewardInput, RewardResult, as_reward
from rollbook.rewards.types import as_float, check_on_error, run_sync
from rollbook.rollout import Prompt, Sample
from tests.rewards.server import serve
from tests.tiny import bytes_, words


def make_sample(**more: object) -> Sample:
    fields: dict[str, object] = {
        "prompt": Prompt(text="the quick", reference="fox", label="animals", info={"level": 2}),
        "eid": EID(1, 2, suffix="a"),
        "prompt_ids": words()("the quick").input_ids,
        "response_ids": [*words()("brown fox").input_ids, 2],
        "finish_reason": "stop",
    }
    return Sample(**{**fields, **more})  # type: ignore[arg-type]


def test_a_sample_is_decoded_without_special_tokens() -> None:
    reward_input = RewardInput.of(make_sample(), words())
    assert (reward_input.prompt, reward_input.response) == ("the quick", "brown fox")
    assert reward_input.query == "the quickbrown fox"
    assert (reward_input.reference, reward_input.label, reward_input.info, reward_input.finish_reason) == (
        "fox",
        "animals",
        {"level": 2},
        "stop",
    )
    assert reward_input.eid is not None and reward_input.eid.uid == "1/2/0/0/a"
    assert list(reward_input.response_ids)[-1] == 2


def test_the_engines_text_is_used_as_it_is() -> None:
    assert RewardInput.of(make_sample(text="brown fox!")).response == "brown fox!"


def test_neither_text_nor_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample 1/2/0/0/a: got no response text and no tokenizer"):
        RewardInput.of(make_sample())


def test_a_chat_keeps_its_messages() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    reward_input = RewardInput.of(make_sample(prompt=Prompt(messages=chat), text="hello"))
    assert reward_input.messages == tuple(chat)
    assert reward_input.prompt == "hi\nthere"


def test_an_experience_of_several_turns_leaves_the_tool_out() -> None:
    tokenizer = bytes_()
    turns = [("ask ", True), ("TOOL SAYS 5", False), ("five", True)]
    parts = [(tokenizer(text).input_ids, by_model) for text, by_model in turns]
    prompt = tokenizer("q: ").input_ids
    record = Experience(
        tokens=prompt + [i for ids, _ in parts for i in ids],
        prompt_length=len(prompt),
        action_mask=[by_model for ids, by_model in parts for _ in ids],
        info={"reference": "5", "label": "math"},
    )
    reward_input = RewardInput.of(record, tokenizer)
    assert (reward_input.prompt, reward_input.response) == ("q: ", "ask \nfive")
    assert (reward_input.reference, reward_input.label) == ("5", "math")


def test_a_sample_and_its_record_are_the_same_to_a_reward() -> None:
    chat = [{"role": "user", "content": "hi"}]
    reply = {"role": "assistant", "content": "brown fox"}
    sample = make_sample(prompt=Prompt(messages=chat, reference="r", label="l"), text="brown fox", message=reply)
    first, second = RewardInput.of(sample, words()), RewardInput.of(sample.to_experience(), words())
    assert (first.prompt, first.response, first.reference) == (second.prompt, second.response, second.reference)
    assert [dict(m) for m in first.messages or ()] == second.messages
    assert list(first.response_ids) == list(second.response_ids)


def as_values(scored: RewardInput) -> dict[str, Any]:
    """All fields as plain values, images as pixels."""
    values = {field.name: getattr(scored, field.name) for field in dataclasses.fields(scored)}
    messages = [encode_message(message) for message in scored.messages] if scored.messages is not None else None
    pixels = [load_image("image", image).tobytes() for image in scored.images]
    return values | {"messages": messages, "images": pixels, "info": dict(scored.info)}


@pytest.mark.parametrize("tokenizer", [None, words()], ids=["none", "words"])
@pytest.mark.parametrize("text", [None, "brown fox"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("images", [False, True])
def test_the_input_of_a_record_equals_that_of_its_sample(
    tokenizer: Any, text: str | None, chat: bool, images: bool, tmp_path: Path
) -> None:
    picture = Image.new("RGB", (3, 2), (200, 10, 60))
    picture.save(tmp_path / "a.png")
    content: Any = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}] if images else "what?"
    prompt = Prompt(
        messages=[{"role": "user", "content": content}] if chat else None,
        text=None if chat else "what?",
        images=[picture, str(tmp_path / "a.png"), np.full((2, 3), 7, np.uint8)] if images else (),
        reference=["fox", 3],
        label="animals",
        info={"level": 2},
    )
    reply = {"role": "assistant", "content": "brown fox"} if chat else None
    sample = make_sample(prompt=prompt, text=text, message=reply, info={"retokenized": True})
    for record in (sample.to_experience(), Experiences([sample.to_experience()])[0]):
        scored = RewardInput.from_record(record, tokenizer)
        readable = sample.replace(text="") if text is None and tokenizer is None else sample
        assert as_values(scored) == as_values(RewardInput.of(readable, tokenizer))


def test_a_record_without_text_needs_no_tokenizer_for_a_reward_of_ids() -> None:
    record = make_sample().to_experience()
    assert RewardInput.from_record(record).response == ""
    with pytest.raises(ValueError, match="got no response text and no tokenizer"):
        RewardInput.of(record)


def test_a_sample_becomes_a_record_with_all_its_columns() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = Prompt(messages=[{"role": "user", "content": "hi"}], tools=[tool], reference="r", label="l", info={"a": 1})
    sample = make_sample(
        prompt=prompt,
        logprobs=[-0.5, -0.25, -1.0],
        logprobs_kind="raw",
        versions=[3, 4, 4],
        finish_reason="length",
        text="brown fox",
        prompt_text="user: hi",
        message={"role": "assistant", "content": "brown fox"},
        media={"pixel_values": torch.ones(1, 2)},
        sampling={"temperature": 0.5, "seed": 9},
        run_id="run",
        group_size=4,
        metrics={"seconds": 0.5},
        info={"b": 2},
    )
    record = sample.to_experience()
    assert record.eid == sample.eid and record.tokens.tolist() == [*sample.prompt_ids, *sample.response_ids]
    assert record.prompt_length == len(sample.prompt_ids) and record.logprobs.tolist() == [-0.5, -0.25, -1]
    assert record.action_mask is None or record.action_mask.tolist() == [True] * 3
    assert record.policy_versions.tolist() == [3, 4, 4] and record.group_size == 4
    assert (record.finish_reason, record.truncate_status) == ("length", "response_truncated")
    assert (record.prompt_text, record.response_text) == ("user: hi", "brown fox")
    assert record.messages == [*prompt.messages, sample.message] and record.tools == [tool]
    assert list(record.multi_modal_inputs) == ["pixel_values"]
    assert record.sampling == {"temperature": 0.5, "seed": 9, "logprobs": "raw", "run": "run"}
    assert record.info == {"a": 1, "b": 2, "reference": "r", "label": "l"} and record.metrics == {"seconds": 0.5}
    assert record.reward is None

    failed = make_sample(logprobs=None, finish_reason="error", error="lost").to_experience()
    assert failed.info["error"] == "lost" and not any(failed.action_mask.tolist())


def test_other_things_are_refused() -> None:
    with pytest.raises(ValueError, match="got str, expected a Sample"):
        RewardInput.of("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="response: got int"):
        RewardInput(prompt="", response=3)  # type: ignore[arg-type]


def test_rewards_take_samples_and_records_and_inputs_alike() -> None:
    sample = make_sample(text="brown fox")
    record = sample.to_experience()
    inputs = [sample, record, RewardInput.of(sample)]

    def right(response: str, reference: str) -> float:
        return float(response == f"brown {reference}")

    async def later(response: str, reference: str) -> float:
        return right(response, reference)

    class Width(torch.nn.Module):
        def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return attention_mask.sum(1).float()

    size = float(len(sample.prompt_ids) + len(sample.response_ids))
    recipe = {"animals": [("exact_match", None, 1.0)]}
    for source, score in ((right, 1.0), (later, 1.0), (Width(), size), ([right, later], 2.0), (recipe, 0.0)):
        reward = as_reward(source)
        some = inputs if source is not recipe else [sample, RewardInput.of(sample)]
        assert reward(some).rewards == [score] * len(some)
        assert asyncio.run(reward.score_async(some)).rewards == [score] * len(some)
        for single in (sample, record, RewardInput.of(sample), "text", None):
            with pytest.raises(ValueError, match=f"inputs: got a single {type(single).__name__}, expected a list of"):
                reward(single)  # type: ignore[arg-type]
    assert as_reward(right)(Experiences([record, record])).rewards == [1.0, 1.0]
    with serve(lambda body: {"rewards": [len(body["queries"])] * len(body["queries"])}) as server:
        assert as_reward(server.url)(inputs).rewards == [3.0] * 3
    with pytest.raises(ValueError, match="sample: got int"):
        as_reward(right)([3])


def test_scores_are_float32_tensors() -> None:
    rewards, metrics = RewardResult(rewards=[1, True], metrics={"n": [2, 3]}).to_tensors()
    assert rewards.dtype == metrics["n"].dtype == torch.float32
    assert rewards.tolist() == [1.0, 1.0]


def test_scores_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="n: got 1 entries, expected 2"):
        RewardResult(rewards=[1.0, 2.0], metrics={"n": [1.0]})


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (True, 1.0), (torch.tensor(2), 2.0), (torch.tensor([0.5]), 0.5), (torch.tensor([[1]]), 1.0)],
)
def test_what_is_a_score(value: object, number: float) -> None:
    assert as_float(value) == number and isinstance(as_float(value), float)


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), [1.0], torch.ones(2), 1j, 10**400])
def test_what_is_no_score(value: object) -> None:
    with pytest.raises(ValueError, match="gave"):
        as_float(value)


@pytest.mark.parametrize("value", ["skip", None, True, float("nan"), float("inf")])
def test_what_to_do_of_errors_is_checked(value: object) -> None:
    with pytest.raises(ValueError, match="on_error"):
        check_on_error(value)


def test_a_coroutine_runs_in_and_out_of_a_loop() -> None:
    async def inner() -> int:
        await asyncio.sleep(0)
        return 3

    async def outer() -> int:
        return run_sync(inner)

    assert run_sync(inner) == 3 == asyncio.run(outer())

    async def bad() -> int:
        raise ValueError("no")

    async def outer_bad() -> int:
        return run_sync(bad)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(outer_bad())


def test_a_reward_of_ones_own_has_the_rest() -> None:
    class Mine(Reward):
        def __call__(self, inputs):  # type: ignore[no-untyped-def]
            return RewardResult(rewards=[math.pi] * len(inputs))

    mine = Mine()
    assert isinstance(mine, Reward)
    assert asyncio.run(mine.score_async([RewardInput(prompt="", response="")])).rewards == [math.pi]
    mine.close()
