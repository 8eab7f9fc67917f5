"""Episodes: tokens, masks and log-probs stay together over turns, tools, branches and forks, and are trained once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollbook import EID, Experience, Experiences
from rollbook.algorithms import estimate
from rollbook.compat.lightrft.batch import from_experiences
from rollbook.core.media import load_image
from rollbook.core.wire import decode, encode
from rollbook.rollout import Cancel, Line, Prompt, Sample, Sampling, ScriptedEngine
from rollbook.rollout.environment import Episode, act_all
from rollbook.rollout.transformers import TransformersEngine
from tests import tiny
from tests.rollout import templates
from tests.rollout.templates import END, ids, merging, with_template

USER = {"role": "user", "content": "what is 6 x 7?"}
RESULT = {"role": "tool", "content": "42"}
EID_ = EID(batch=0, task=3, run=1, suffix="a")


def scripted(tokenizer: Any, *answers: Any) -> ScriptedEngine:
    """Return an engine with these answers; a text ends with the end token of a turn."""
    lines = [Line(ids=[*ids(tokenizer, answer), END]) if isinstance(answer, str) else answer for answer in answers]
    return ScriptedEngine(lines, tokenizer)


def chat(tokenizer: Any, *answers: Any, **options: Any) -> Episode:
    arguments = {"messages": [USER], "eid": EID_, **options}
    return Episode(scripted(tokenizer, *answers), tokenizer, **arguments)


def text(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def trained(record: Experience) -> list[int]:
    """Return the trained tokens of a record."""
    return record.tokens[record.prompt_length :][record.action_mask].tolist()


# --- one conversation ------------------------------------------------------------------------------------------------


def test_a_tool_between_two_turns() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "call", "42!", group_size=4)
    episode.engine.version = 5
    first = episode.act()
    assert episode.messages[-1] == {"role": "assistant", "content": "call"} and first.finish_reason == "stop"
    episode.observe(RESULT)
    assert text(tokenizer, episode.tokens) == (
        "<|user|>what is 6 x 7?<|end|><|assistant|>call<|end|><|tool|>42<|end|><|assistant|>"
    )
    episode.engine.version = 6
    episode.act()
    (record,) = episode.experiences(reward=0.5)
    assert text(tokenizer, record.tokens) == (
        "<|user|>what is 6 x 7?<|end|><|assistant|>call<|end|><|tool|>42<|end|><|assistant|>42!<|end|>"
    )
    assert record.eid == EID_ and record.group_size == 4 and record.parent is None and record.reward == 0.5
    assert text(tokenizer, record.tokens[: record.prompt_length]) == "<|user|>what is 6 x 7?<|end|><|assistant|>"
    assert text(tokenizer, trained(record)) == "call<|end|>42!<|end|>"
    assert record.response_text == "call\n42!" == episode.sampled_text()
    mask = record.action_mask
    assert record.logprobs[mask].tolist() == [-1.0] * 9 and record.logprobs[~mask].tolist() == [0.0] * 5
    assert record.policy_versions.tolist() == [5] * 5 + [5] * 5 + [6] * 4
    assert record.messages == [
        USER,
        {"role": "assistant", "content": "call"},
        RESULT,
        {"role": "assistant", "content": "42!"},
    ]
    assert record.finish_reason == "stop" and record.truncate_status is None and record.experience_type == "multi_turn"
    kinds = [
        (segment["kind"], text(tokenizer, record.tokens[segment["start"] : segment["stop"]]))
        for segment in record.info["segments"]
    ]
    assert kinds[1:] == [
        ("model", "call<|end|>"),
        ("observation", "<|tool|>42<|end|><|assistant|>"),
        ("model", "42!<|end|>"),
    ]
    assert record.info["segments"][3]["turn"] == 1 and record.info["segments"][3]["trained"] is True
    assert [drift["outcome"] for drift in record.info["drift"]] == ["clean"]
    assert (
        record.metrics["turns"] == 2
        and record.metrics["trained_tokens"] == 9
        and record.metrics["observed_tokens"] == 5
    )
    assert record.metrics["tool_messages"] == 1 and record.metrics["drift/clean"] == 1
    assert record.sampling["logprobs"] == "processed" and record.sampling["run"] == episode.engine.run.id
    assert Experience.deserialize(record.serialize()) == record
    json.dumps([record.info, record.metrics])


@pytest.mark.parametrize("template", [tiny.TEMPLATE, templates.NEWLINES, templates.THINKING, templates.TRIMMING])
def test_an_unchanged_conversation_equals_its_rendering(template: str) -> None:
    tokenizer = with_template(template)
    episode = chat(tokenizer, "one", "two", "three")
    for _ in range(2):
        episode.act()
        episode.observe([RESULT, {"role": "tool", "content": "more"}])
    episode.act()
    (record,) = episode.experiences()
    rendered = tokenizer.apply_chat_template(record.messages, tokenize=False)
    assert rendered.removesuffix("\n") == text(tokenizer, record.tokens)
    assert text(tokenizer, trained(record)) == "one<|end|>two<|end|>three<|end|>"
    assert episode.drift.counts == {"clean": 2, "realigned": 0, "forked": 0, "unchecked": 0}


def test_messages_observed_one_by_one_are_rendered_together() -> None:
    tokenizer = with_template(templates.CALLING)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}

    def parse(written: str) -> dict[str, Any] | None:
        calls = written == '{"name": "f", "arguments": {}}'
        return {"role": "assistant", "content": "", "tool_calls": [call]} if calls else None

    episode = chat(tokenizer, '{"name": "f", "arguments": {}}', "done", parse=parse)
    episode.act()
    for content in ("1", "2", "3"):
        episode.observe({"role": "tool", "content": content})
    assert text(tokenizer, episode.tokens).endswith("<|end|>\n<|user|>[1][2][3]<|end|>\n<|assistant|>")
    episode.act()
    (record,) = episode.experiences()
    assert record.metrics["tool_calls"] == 1 and record.metrics["tool_messages"] == 3
    assert episode.drift.counts["clean"] == 1
    assert record.messages[1]["tool_calls"] == [call]


def test_parse_errors_are_recorded() -> None:
    def parse(written: str) -> Any:
        return json.loads(written)

    episode = chat(tiny.bytes_(), '{"role": "assistant", "content": "x"}', "{oops", "[]", parse=parse)
    for _ in range(3):
        episode.act()
        episode.observe(RESULT)
    assert episode.messages[1] == {"role": "assistant", "content": "x"}
    assert episode.messages[3] == {"role": "assistant", "content": "{oops"}
    assert [segment["turn"] for segment in episode.errors] == [1, 2]
    assert "JSONDecodeError" in episode.errors[0]["error"] and "a role" in episode.errors[1]["error"]
    assert "error" not in episode.experiences()[0].info  # the turn itself succeeded


def test_a_trailing_observation_is_recorded_without_a_generation_prompt() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "call")
    episode.act()
    episode.observe(RESULT)
    (record,) = episode.experiences()
    assert text(tokenizer, record.tokens).endswith("call<|end|><|tool|>42<|end|>")
    assert text(tokenizer, trained(record)) == "call<|end|>"
    assert episode.tokens[-1] == templates.ASSISTANT  # which the next turn would come after


def test_text_without_a_template() -> None:
    tokenizer = tiny.bytes_()
    stop = Line(ids=ids(tokenizer, "<search>x</search>"))
    episode = Episode(scripted(tokenizer, stop, "so y"), tokenizer, "Q: ", eid=EID_)
    episode.act()
    episode.observe("<result>y</result>")
    episode.act()
    (record,) = episode.experiences()
    assert text(tokenizer, record.tokens) == "Q: <search>x</search><result>y</result>so y<|end|>"
    assert record.response_text == "<search>x</search>\nso y" and record.messages is None
    assert record.prompt_text == "Q: "
    assert episode.drift.counts["clean"] == 1


def test_token_ids_within_a_turn_and_before_the_first() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, Line(ids=ids(tokenizer, "<search>")), "so")
    episode.observe_tokens(ids(tokenizer, "<think>"))  # after what a turn begins with
    episode.act()
    episode.observe_tokens(ids(tokenizer, "found"))
    with pytest.raises(ValueError, match="got a message after token ids"):
        episode.observe(RESULT)
    episode.act()
    (record,) = episode.experiences()
    assert text(tokenizer, record.tokens).endswith("<|assistant|><think><search>foundso<|end|>")
    assert record.info["drift"][0]["outcome"] == "unchecked" and "without a message" in record.info["drift"][0]["what"]


def test_observed_ids_with_a_message_are_compared() -> None:
    tokenizer = tiny.bytes_()
    for rendered, outcome in (
        ("<|tool|>42<|end|><|assistant|>", "clean"),
        ("<|tool|> 42<|end|><|assistant|>", "realigned"),
        ("<|tool|>43<|end|><|assistant|>", "forked"),
    ):
        episode = chat(tokenizer, "call", "so")
        episode.act()
        episode.observe_tokens(ids(tokenizer, rendered), message=RESULT)
        episode.act()
        assert episode.drift[0].outcome == outcome
        assert text(tokenizer, episode.tokens).endswith(f"call<|end|>{rendered}so<|end|>")
        assert episode.messages[2] == RESULT


# --- what templates and tokenizers would change ----------------------------------------------------------------------


def test_realigned_tokens_are_kept_and_counted() -> None:
    tokenizer = merging()
    letters = [ids(tokenizer, letter)[0] for letter in "the"]
    assert len(ids(tokenizer, "the")) == 1
    episode = chat(tokenizer, Line(ids=[*letters, END], logprobs=[-0.1, -0.2, -0.3, -0.4]), "five", "six")
    episode.act()
    episode.observe(RESULT)
    episode.act()
    episode.observe(RESULT)
    episode.act()
    (record,) = episode.experiences()
    assert trained(record)[:4] == [*letters, END]
    assert record.logprobs[record.action_mask][:4].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    first, second = record.info["drift"]
    assert (first["outcome"], first["what"], first["kept"], first["rendered"]) == ("realigned", "tokens", 3, 1)
    assert second["outcome"] == "clean"  # found once, where it came
    assert record.metrics["drift/realigned"] == 1 == episode.drift.counts["realigned"]


def test_trimmed_white_space_is_glue() -> None:
    episode = chat(with_template(templates.TRIMMING), "  padded ", "so")
    episode.act()
    episode.observe(RESULT)
    episode.act()
    assert (episode.drift[0].outcome, episode.drift[0].what) == ("realigned", "glue")
    assert "<|assistant|>  padded <|end|>" in text(tiny.bytes_(), episode.tokens)


def test_sampled_thinking_is_kept() -> None:
    tokenizer = with_template(templates.THINKING)
    episode = chat(tokenizer, "<think>hm</think>\n42", "<think>ah</think>\n43", "44")
    episode.act()
    episode.observe(RESULT)
    episode.act()  # a tool's message leaves thinking where it is
    assert episode.drift.counts == {"clean": 1, "realigned": 0, "forked": 0, "unchecked": 0}
    episode.observe({"role": "user", "content": "sure?"})
    episode.act()
    assert episode.drift.counts == {"clean": 1, "realigned": 0, "forked": 1, "unchecked": 0}
    (record,) = episode.experiences(1.0)
    assert text(tokenizer, record.tokens).count("<think>") == 2 and record.metrics["drift/forked"] == 1
    assert text(tokenizer, trained(record)) == "<think>hm</think>\n42<|end|><think>ah</think>\n43<|end|>44<|end|>"


def test_a_fork_starts_with_the_new_rendering() -> None:
    tokenizer = with_template(templates.THINKING)
    episode = chat(tokenizer, "<think>hm</think>\n42", "<think>ah</think>\n43", "44", on_fork="fork")
    episode.act()
    episode.observe(RESULT)
    episode.act()
    episode.observe({"role": "user", "content": "sure?"})
    assert episode.number == 0 and "<think>" not in text(tokenizer, episode.tokens)
    prompt_tokens = episode.tokens
    sample = episode.act()
    assert episode.number == 1 and list(sample.prompt_ids) == prompt_tokens and len(episode.turns) == 3
    first, second = episode.experiences(reward=1.0)
    conversation = [*first.messages, {"role": "user", "content": "sure?"}]
    assert prompt_tokens == ids(
        tokenizer, tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    )
    assert second.tokens[: second.prompt_length].tolist() == prompt_tokens
    assert text(tokenizer, trained(first)) == "<think>hm</think>\n42<|end|><think>ah</think>\n43<|end|>"
    assert text(tokenizer, trained(second)) == "44<|end|>"
    assert (first.eid.rid, second.eid.rid, second.eid.step) == ("0/3/1", "0/3/1", 1) and second.parent == first.eid.uid
    assert first.reward == second.reward == 1.0
    assert [drift["policy"] for drift in second.info["drift"]] == ["fork"]
    assert first.info["drift"][0]["outcome"] == "clean" and first.metrics["drift/forked"] == 0
    assert episode.sampled_text() == "<think>hm</think>\n42\n<think>ah</think>\n43\n44"
    assert second.response_text == "44" and len(episode.branches) == 1


def test_a_message_that_a_template_moves_needs_a_fork() -> None:
    tokenizer = with_template(templates.HOISTING)
    brief = {"role": "system", "content": "be brief"}
    keeping = chat(tokenizer, "a", "b")
    keeping.act()
    before = keeping.to_dict()
    with pytest.raises(ValueError, match="does not render .* after the model's turn.*on_fork='fork'"):
        keeping.observe(brief)
    assert keeping.to_dict() == before
    episode = chat(tokenizer, "a", "b", on_fork="fork")
    episode.act()
    episode.observe(brief)
    (record,) = episode.experiences()  # no turn came after it
    assert "does not render" in record.info["not_rendered"] and record.messages[-1] == brief
    episode.act()
    first, second = episode.experiences()
    assert text(tokenizer, second.tokens).startswith("<|system|>be brief<|end|><|user|>")
    assert text(tokenizer, trained(first)) == "a<|end|>" and text(tokenizer, trained(second)) == "b<|end|>"
    assert episode.drift.counts["forked"] == 1


def test_a_realigned_conversation_can_be_forked() -> None:
    tokenizer = merging()
    letters = [ids(tokenizer, letter)[0] for letter in "the"]
    episode = chat(tokenizer, Line(ids=[*letters, END]), "five", on_realign="fork")
    episode.act()
    episode.observe(RESULT)
    episode.act()
    first, second = episode.experiences()
    assert trained(first) == [*letters, END] and trained(second) == [*ids(tokenizer, "five"), END]
    assert second.tokens.tolist()[: second.prompt_length].count(ids(tokenizer, "the")[0]) == 1


def test_a_template_that_cannot_render_the_conversation_leaves_it_unchecked() -> None:
    tokenizer = with_template(templates.CALLING)
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}
    for message, outcome in ((answer, "forked"), (broken, "unchecked")):
        episode = Episode(None, tokenizer, messages=[USER])
        episode.append_turn([*ids(tokenizer, "f()"), END], message=message)
        if message is broken:
            episode.observe({"role": "user", "content": "42"})
        else:
            episode.observe(RESULT)
        episode.append_turn([END])
        assert episode.drift[0].outcome == outcome


# --- what an engine says it was given --------------------------------------------------------------------------------


def given_sample(prompt_ids: list[int], response_ids: list[int], **more: Any) -> Sample:
    return Sample(prompt=Prompt(text="?"), eid=EID(), prompt_ids=prompt_ids, response_ids=response_ids, **more)


def test_an_engine_that_rendered_the_observation_itself() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer)
    first = episode.tokens
    episode.append_sample(given_sample(first, [20, END]))
    episode.observe(RESULT)
    rendered = [*first, 20, END, *ids(tokenizer, "<|tool|> 42 <|end|><|assistant|>")]
    episode.append_sample(given_sample(rendered, [21, END]))
    (record,) = episode.experiences()
    assert record.tokens.tolist() == [*rendered, 21, END] and trained(record) == [20, END, 21, END]
    assert record.info["drift"][0]["outcome"] == "clean" and record.info["drift"][0]["by"] == "engine"
    # Without an observation of ours the rest of its prompt is one.
    rendered = [*rendered, 21, END, 50, 51]
    episode.append_sample(given_sample(rendered, [22, END]))
    episode.observe(RESULT)
    episode.append_sample(given_sample([], [23, END]))
    (record,) = episode.experiences()
    assert record.tokens.tolist()[: len(rendered)] == rendered and trained(record)[-4:] == [22, END, 23, END]
    assert [drift["outcome"] for drift in record.info["drift"]] == ["clean", "clean", "unchecked"]


def test_an_engine_with_other_tokens_starts_a_branch() -> None:
    tokenizer = merging()
    letters = [ids(tokenizer, letter)[0] for letter in "the"]
    episode = chat(tokenizer)
    first = episode.tokens
    episode.append_sample(given_sample(first, [*letters, END]))
    episode.observe(RESULT)
    rendered = ids(
        tokenizer, tokenizer.apply_chat_template(episode.messages, tokenize=False, add_generation_prompt=True)
    )
    assert rendered != episode.tokens
    episode.append_sample(given_sample(rendered, [21, END]))
    record, two = episode.experiences()
    assert record.tokens.tolist() == [*first, *letters, END] and trained(record) == [*letters, END]
    assert (
        two.tokens.tolist() == [*rendered, 21, END] and trained(two) == [21, END] and two.prompt_length == len(rendered)
    )
    drift = two.info["drift"][0]
    assert (drift["outcome"], drift["by"], drift["policy"]) == ("realigned", "engine", "fork")
    without = Episode(prompt=[1])
    without.append_turn([2])
    without.observe_tokens([3])
    without.append_sample(given_sample([7, 7], [4]))
    assert [row.tokens.tolist() for row in without.experiences()] == [[1, 2], [7, 7, 4]]
    assert without.drift[0].outcome == "forked"


# --- turns that end early, fail, or find no room ---------------------------------------------------------------------


def test_a_truncated_turn_is_ended_by_the_next_observation() -> None:
    tokenizer = with_template(templates.NEWLINES)
    episode = chat(tokenizer, "a long answer", "so", sampling={"max_tokens": 6})
    assert episode.act().finish_reason == "length"
    with pytest.raises(ValueError, match="the last turn ended .length., expected an observation"):
        episode.act()
    (record,) = episode.experiences()
    assert record.finish_reason == "length" and record.truncate_status == "response_truncated"
    assert record.info["truncated"] == "turn" and trained(record)[-1] != END  # no end that was not sampled
    episode.observe(RESULT)
    episode.act()
    (record,) = episode.experiences()
    assert "a long<|end|>\n<|tool|>\n42<|end|>\n<|assistant|>\nso<|end|>" in text(tokenizer, record.tokens)
    assert text(tokenizer, trained(record)) == "a longso<|end|>" and episode.drift.counts["clean"] == 1


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_paused_turn_is_continued(is_complete: bool) -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "a long answer", "a long answer", "b")
    episode.engine.version = 1
    assert episode.act(pause_after=4).unfinished
    with pytest.raises(ValueError, match="unfinished"):
        episode.score_turn(1.0)
    tokens = episode.tokens
    if is_complete:
        episode.engine.version = 2
        assert episode.act().finish_reason == "stop"
    else:  # another engine, asked with all tokens as a prompt
        rest = [*ids(tokenizer, "ng answer"), END]
        sample = given_sample(tokens, rest, logprobs=[-1.0] * len(rest), versions=[2] * len(rest))
        episode.append_sample(sample)
    assert len(episode.turns) == 1 and episode.turns[0].text == "a long answer"
    (record,) = episode.experiences()
    assert text(tokenizer, trained(record)) == "a long answer<|end|>"
    assert record.policy_versions.tolist() == [1] * 4 + [2] * 10
    assert [segment["finish_reason"] for segment in record.info["segments"][1:]] == ["abort", "stop"]
    assert record.messages[-1]["content"] == "a long answer" and record.metrics["turns"] == 1


def test_a_canceled_turn_may_stay_unfinished() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "never", "b")
    cancel = Cancel()
    cancel.request()
    assert episode.act(cancel=cancel).unfinished and episode.finish_reason == "abort"
    episode.observe(RESULT)
    episode.act()
    (record,) = episode.experiences()
    assert text(tokenizer, record.tokens).endswith("<|assistant|><|end|><|tool|>42<|end|><|assistant|>b<|end|>")


def test_a_failed_turn_changes_nothing_else() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "call", RuntimeError("gone"), "so")
    episode.act()
    episode.observe(RESULT)
    before = episode.tokens, episode.messages, episode.turns
    sample = episode.act()
    assert sample.failed and (episode.tokens, episode.messages, episode.turns) == before
    assert episode.finish_reason == "error" and episode.errors == [{"turn": 1, "error": "RuntimeError: gone"}]
    (record,) = episode.experiences()
    assert record.info["error"] == "RuntimeError: gone" and record.finish_reason == "error"
    assert text(tokenizer, trained(record)) == "call<|end|>"
    assert episode.act().finish_reason == "stop" and episode.finish_reason == "stop"
    (record,) = episode.experiences()
    assert "error" not in record.info and record.info["errors"][0]["turn"] == 1 and record.metrics["errors"] == 1


def test_an_episode_that_failed_at_once_has_a_record() -> None:
    episode = chat(tiny.bytes_(), RuntimeError("gone"))
    episode.act()
    good = chat(tiny.bytes_(), "x")
    good.act()
    records = episode.experiences() + good.experiences(reward=1.0)
    assert records[0].info["error"] and len(records[0].tokens) == records[0].prompt_length
    for packing in (False, True):
        batch = from_experiences(records, packing_samples=packing)
        assert len(batch) == 2
    assert estimate("grpo", Experiences(records)).report.which("missing reward") == [records[0].eid.uid]


def test_a_context_limit_truncates_and_then_rejects_turns() -> None:
    tokenizer = tiny.bytes_()
    spare = 25
    episode = chat(tokenizer, "12345", "a long answer", "never", context_limit=16 + spare)
    assert len(episode.tokens) == 17 and episode.tokens_left == 24
    episode.act()
    episode.observe(RESULT)
    assert episode.tokens_left == 13
    sample = episode.act(min_tokens=20, max_tokens=30)
    assert sample.finish_reason == "length" and len(sample.response_ids) == 13
    assert sample.sampling["max_tokens"] == 13 and sample.sampling["min_tokens"] == 13
    (record,) = episode.experiences()
    assert record.info["truncated"] == "context" and len(record.tokens) == 41
    episode.observe(RESULT)
    sample = episode.act()
    assert sample.finish_reason == "length" and not sample.response_ids and episode.tokens_left == 0
    assert episode.engine._next == 2  # the engine was not asked
    (record,) = episode.experiences()
    assert len(record.tokens) == 41 and record.info["left_out_tokens"] == 5
    assert record.finish_reason == "length" and len(record.messages) == 5


def test_a_turn_that_ends_at_the_context_limit_is_complete() -> None:
    episode = chat(tiny.bytes_(), "12", context_limit=20)
    assert episode.act().finish_reason == "stop" == episode.finish_reason and episode.tokens_left == 0
    assert "truncated" not in episode.experiences()[0].info


def test_an_unfinished_turn_ends_at_the_context_limit() -> None:
    episode = chat(tiny.bytes_(), "12345678", context_limit=21)
    assert episode.act(pause_after=3).unfinished
    assert episode.act(pause_after=3).finish_reason == "length"
    other = chat(tiny.bytes_(), "12345678", context_limit=19)
    other.append_turn([20, 21], finish_reason="abort")
    assert other.act().finish_reason == "length" and other.turns[0].finish_reason == "length"
    prompt = chat(tiny.bytes_(), "x", context_limit=10)
    assert prompt.act().finish_reason == "length"
    (record,) = prompt.experiences()
    assert len(record.tokens) == 17 == record.prompt_length and record.finish_reason == "length"


# --- branches --------------------------------------------------------------------------------------------------------


def test_branches_train_shared_tokens_once() -> None:
    tokenizer = tiny.bytes_()
    root = chat(tokenizer, "a", "b", "c", "d")
    root.act()
    root.observe(RESULT)
    left, right = root.branch(), root.branch()
    assert [episode.number for episode in root.branches] == [0, 1, 2]
    left.act()
    right.act()
    right.observe(RESULT)
    right.act()
    left.reward, right.reward = 1.0, 0.0
    records = root.experiences()
    assert [text(tokenizer, trained(record)) for record in records] == ["a<|end|>b<|end|>", "c<|end|>d<|end|>"]
    assert [record.eid.uid.rsplit("/", 1)[0] for record in records] == ["0/3/1/1", "0/3/1/2"]
    assert [record.parent for record in records] == [None, records[0].eid.uid]
    assert [record.reward for record in records] == [1.0, 0.0]
    shared = records[1].info["segments"][1]
    assert shared["kind"] == "model" and shared["trained"] is False
    assert records[1].logprobs[: shared["stop"] - shared["start"]].tolist() == [-1.0, -1.0]
    assert records[0].prompt_length == records[1].prompt_length
    assert [record.tokens.tolist() for record in left.experiences()] == [record.tokens.tolist() for record in records]
    assert [record.eid for record in right.experiences()] == [record.eid for record in records]


def test_a_branch_without_new_tokens_is_recorded_only_with_a_reward() -> None:
    episode = chat(tiny.bytes_(), "a", "b")
    episode.act()
    other = episode.branch()
    assert len(episode.experiences()) == 1
    episode.observe(RESULT)
    episode.act()
    assert [record.eid.step for record in episode.experiences()] == [0]
    other.reward = 0.25
    records = episode.experiences(1.0)
    assert [(record.eid.step, record.reward, len(trained(record))) for record in records] == [(0, 1.0, 4), (1, 0.25, 0)]


def test_branches_of_an_unfinished_turn_train_their_own_rest() -> None:
    tokenizer = tiny.bytes_()
    episode = Episode(None, tokenizer, messages=[USER])
    episode.append_turn(ids(tokenizer, "ab"), finish_reason="abort")
    other = episode.branch()
    episode.append_turn([*ids(tokenizer, "c"), END])
    other.append_turn([*ids(tokenizer, "d"), END])
    other.score_turn(2.0)
    episode.score_turn(1.0)
    record, two = episode.experiences()
    assert [turn.text for turn in (*episode.turns, *other.turns)] == ["abc", "abd"]
    assert (text(tokenizer, trained(record)), text(tokenizer, trained(two))) == ("abc<|end|>", "d<|end|>")
    assert record.token_level_reward.tolist() == [0, 0, 0, 1.0] and two.token_level_reward.tolist() == [0, 0, 0, 2.0]


def test_branches_that_act_at_the_same_time() -> None:
    tokenizer = tiny.bytes_()

    def answer(prompt: Prompt, run: int) -> Any:
        assert prompt.eid is not None
        return Line(ids=[20 + prompt.eid.step, END])

    async def play() -> list[Experience]:
        episode = Episode(ScriptedEngine(answer, tokenizer), tokenizer, messages=[USER], eid=EID_)
        await episode.aact()
        episode.observe(RESULT)
        episodes = [episode, *(episode.branch() for _ in range(3))]
        await asyncio.gather(*(episode.aact() for episode in episodes))
        return episode.experiences()

    records = asyncio.run(play())
    assert [trained(record)[-2] for record in records] == [20, 21, 22, 23]
    assert [len(trained(record)) for record in records] == [4, 2, 2, 2]


def test_a_branch_must_not_change_during_a_call() -> None:
    tokenizer = tiny.bytes_()

    async def play() -> None:
        episode = chat(tokenizer, "a", "b")
        await asyncio.gather(episode.aact(), episode.aact())

    with pytest.raises(ValueError, match="the branch was changed during the call"):
        asyncio.run(play())


def test_several_episodes_act_in_one_call() -> None:
    tokenizer = tiny.bytes_()
    calls = []

    class Counting(ScriptedEngine):
        def generate(self, prompts: Any, *arguments: Any, **options: Any) -> list[Sample]:
            calls.append(len(prompts))
            return super().generate(prompts, *arguments, **options)

    engine = Counting([[20, END], [21, END], [22, END]], tokenizer)
    episodes = Episode.group(3, engine, tokenizer, messages=[USER], eid=EID(0, 5), context_limit=40)
    episodes[1].observe({"role": "user", "content": "so long that there is no room for an answer"})
    samples = act_all(episodes, max_tokens=5)
    assert calls == [2] and [sample.finish_reason for sample in samples] == ["stop", "length", "stop"]
    records = [row for episode in episodes for row in episode.experiences(reward=1.0)]
    assert [row.eid.rid for row in records] == ["0/5/0", "0/5/1", "0/5/2"]
    assert [row.group_size for row in records] == [3, 3, 3]
    assert [trained(row) for row in records] == [[20, END], [], [21, END]]
    assert episodes[0].tokens_left == 40 - len(episodes[0].tokens)
    with pytest.raises(ValueError, match="several engines"):
        act_all([chat(tokenizer, "a"), chat(tokenizer, "b")])


# --- rewards, batches, estimators ------------------------------------------------------------------------------------


def test_rewards_of_turns_are_on_their_last_tokens() -> None:
    episode = chat(tiny.bytes_(), "a", "b", "c")
    for value in (0.5, 0.25):
        episode.act()
        episode.score_turn(value)
        episode.observe(RESULT)
    episode.act()
    episode.score_turn(0.75, turn=0)  # thought better of
    (record,) = episode.experiences(reward=2.0)
    assert record.reward == 3.0
    places = record.token_level_reward.nonzero()[:, 0].tolist()
    assert [record.token_level_reward[i].item() for i in places] == [0.75, 0.25, 2.0]
    ends = [
        segment["stop"] - 1 - record.prompt_length for segment in record.info["segments"] if segment["kind"] == "model"
    ]
    assert places == ends
    assert record.info["segments"][1]["reward"] == 0.75
    to_go = estimate("reinforce", [record]).returns[0]
    assert to_go[record.action_mask].tolist() == [3.0, 3.0, 2.25, 2.25, 2.0, 2.0]
    with pytest.raises(ValueError, match="turn: got 3"):
        episode.score_turn(1.0, 3)
    with pytest.raises(ValueError, match="reward: got 'good'"):
        episode.score_turn("good")  # type: ignore[arg-type]


def test_records_of_a_fork_have_the_reward_to_come() -> None:
    episode = chat(with_template(templates.THINKING), "<think>a</think>b", "c", on_fork="fork")
    episode.act()
    episode.score_turn(0.5)
    episode.observe(USER)
    episode.act()
    episode.score_turn(0.25)
    first, second = episode.experiences(reward=lambda episode: 1.0 if episode.sampled_text().endswith("c") else 0.0)
    assert first.reward == second.reward == 1.75
    assert first.token_level_reward.sum() == 1.75 and second.token_level_reward.sum() == 1.25


def test_errors_of_a_turn_move_into_the_fork() -> None:
    episode = chat(
        with_template(templates.THINKING),
        RuntimeError("a"),
        "<think>a</think>b",
        RuntimeError("b"),
        "c",
        on_fork="fork",
    )
    episode.reward = 0.5
    episode.act()
    episode.act()
    episode.observe(USER)
    episode.act()
    episode.act()
    first, second = episode.experiences(reward=2.0)
    assert first.reward == second.reward == 0.5
    assert [error["error"] for error in first.info["errors"]] == ["RuntimeError: a"]
    assert [error["error"] for error in second.info["errors"]] == ["RuntimeError: b"] and "error" not in second.info


def test_a_shared_turn_is_rewarded_where_it_is_trained() -> None:
    episode = chat(tiny.bytes_(), "a", "b", "c")
    episode.act()
    episode.score_turn(0.5)
    episode.observe(RESULT)
    other = episode.branch()
    episode.act()
    other.act()
    first, second = episode.experiences(reward=1.0)
    assert first.reward == second.reward == 1.5
    assert first.token_level_reward.sum() == 1.5 and second.token_level_reward.sum() == 1.0
    assert (second.token_level_reward[~second.action_mask] == 0).all()


def test_a_reward_may_be_missing_or_unknown() -> None:
    episode = chat(tiny.bytes_(), "a")
    episode.act()
    assert episode.experiences()[0].reward is None
    assert episode.experiences(lambda episode: None)[0].reward is None
    episode.reward = float("nan")
    assert episode.experiences(1.0)[0].reward != episode.experiences(1.0)[0].reward
    episode.reward = None
    assert episode.experiences(torch.tensor(0.5).item())[0].reward == 0.5


def records_of_a_task(tokenizer: Any) -> list[Experience]:
    """Return the records of three runs: a plain one, one with two branches, and one with a fork."""
    records = []
    for run, on_fork in enumerate(("keep", "keep", "fork")):
        answers = ["<think>x</think>a", "b", "c"]
        episode = chat(tokenizer, *answers, eid=EID(0, 1, run), on_fork=on_fork, group_size=3)
        episode.act()
        episode.observe({"role": "user", "content": "again"})
        other = episode.branch() if run == 1 else None
        episode.act()
        if other is not None:
            other.act()
            other.reward = 0.0
        records += episode.experiences(reward=float(run))
    return records


def test_batches_and_estimators_of_episodes() -> None:
    records = records_of_a_task(with_template(templates.THINKING))
    assert len(records) == 5
    experiences = Experiences(records)
    assert decode(encode(experiences)) == experiences
    estimated = estimate("dr_grpo", experiences)
    # Runs count once: rewards 0, (1 + 0) / 2 and 2 have a mean of 2.5 / 3.
    assert estimated.scores.tolist() == pytest.approx([-2.5 / 3, 1 - 2.5 / 3, -2.5 / 3, 2 - 2.5 / 3, 2 - 2.5 / 3])
    padded, packed = (from_experiences(experiences, packing_samples=packing) for packing in (False, True))
    assert padded.info["metrics"]["turns"].tolist() == [2, 2, 2, 1, 1]
    for batch in (padded, packed):
        assert estimate("grpo", batch).advantages is not None
    values = torch.zeros_like(padded.action_mask, dtype=torch.float32)
    padded.values = values
    gae = estimate("gae", padded, gamma=1.0, lam=1.0)
    assert gae.report.metrics["lost_reward_sum"] == 0.0
    for i, record in enumerate(records):
        mask = padded.action_mask[i]
        assert gae.advantages[i][mask].tolist() == [record.reward] * int(record.action_mask.sum())
        assert (gae.advantages[i][~mask] == 0).all()


def test_each_turn_and_branch_has_its_own_random_stream() -> None:
    def seeds() -> list[int]:
        episode = chat(tiny.bytes_(), "a", sampling={"seed": 5})
        samples = [episode.act()]
        episode.observe(RESULT)
        other = episode.branch()
        samples += [episode.act(), other.act()]
        return [sample.sampling["seed"] for sample in samples]

    assert seeds() == seeds() and len(set(seeds())) == 3
    episode = chat(tiny.bytes_(), "a", sampling={"seed": 5})
    first = episode.act(pause_after=1).sampling["seed"]
    assert episode.act().sampling["seed"] == first  # which goes on


# --- a real model ----------------------------------------------------------------------------------------------------


def forward_logprobs(model: Any, record: Experience, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=record.tokens.long()[None]).logits[0] / temperature
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, record.tokens.long()[1:, None])[:, 0]
    return logprobs[record.prompt_length - 1 :]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_one_forward_pass(temperature: float) -> None:
    tokenizer = with_template(templates.NEWLINES)
    model = tiny.llama(vocab=len(tokenizer))
    engine = TransformersEngine(model, tokenizer)
    options = Sampling(max_tokens=12, temperature=temperature, seed=3)
    episode = Episode(engine, tokenizer, messages=[USER], sampling=options)
    engine.version = 1
    episode.act()
    episode.observe(RESULT)
    other = episode.branch()
    engine.version = 2
    act_all([episode, other], pause_after=5)
    engine.version = 3
    act_all([episode, other])
    records = episode.experiences()
    assert len(records) == 2
    largest = 0.0
    for record in records:
        mask = record.action_mask
        expected = forward_logprobs(model, record, temperature)
        sampled = mask.clone()
        sampled[: len(episode.turns[0].ids)] = True  # the other branch's first turn is there, not trained
        largest = max(largest, float((record.logprobs - expected)[sampled].abs().max()))
        assert (record.logprobs[~sampled] == 0).all()
    assert largest < 1e-4
    assert records[0].policy_versions.unique().tolist() == [1, 2, 3]
    assert sum(int(record.action_mask.sum()) for record in records) == (
        len(episode.turns[0].ids) + len(episode.turns[1].ids) + len(other.turns[1].ids)
    )
    again = Episode(TransformersEngine(model, tokenizer), tokenizer, messages=[USER], sampling=options, eid=episode.eid)
    again.act()
    again.observe(RESULT)
    again.act()
    assert again.tokens == episode.tokens  # the same seed and id
    first, second = episode.turns[0].ids, episode.turns[1].ids
    assert first != second[: len(first)] and other.turns[1].ids != second


def test_images_of_the_prompt_and_of_an_observation() -> None:
    model, processor = tiny.llava()
    engine = TransformersEngine(model, processor=processor)
    red, blue = tiny.picture(), tiny.picture((0, 0, 255))
    question = {"role": "user", "content": "<image>what?"}
    processor.chat_template = tiny.TEMPLATE
    options = {"max_tokens": 3, "seed": 1, "suppress": [END], "logprobs": "raw"}
    prompt = Prompt(messages=[question], images=[red])
    episode = Episode(engine, processor, prompt, sampling=options)
    assert episode.tokens.count(8) == 4
    sample = episode.act()
    assert sample.finish_reason == "length", sample.error
    episode.observe({"role": "user", "content": "and <image>?"}, images=[blue])
    sample = episode.act()
    assert not sample.failed, sample.error
    (record,) = episode.experiences()
    assert record.tokens.tolist().count(8) == 8 and record.action_mask.sum() == 6
    assert record.multi_modal_inputs["pixel_values"].shape[0] == 2
    shown = [load_image("image", picture).getpixel((0, 0)) for picture in record.info["images"]]
    assert shown == [(255, 0, 0), (0, 0, 255)]
    assert record.info["drift"][0]["outcome"] in ("clean", "realigned")  # bytes need not spell letters
    with torch.no_grad():
        logits = model(
            input_ids=record.tokens.long()[None], pixel_values=record.multi_modal_inputs["pixel_values"]
        ).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, record.tokens.long()[1:, None])[:, 0][record.prompt_length - 1 :]
    assert (record.logprobs - logprobs)[record.action_mask].abs().max() < 1e-4


def test_a_fork_has_the_images_of_the_conversation() -> None:
    _, processor = tiny.llava()
    episode = Episode(
        None,
        processor,
        Prompt(messages=[{"role": "user", "content": "<image>"}], images=[tiny.picture()]),
        on_realign="fork",
    )
    episode.append_turn([*ids(tiny.bytes_(), "é")[:1], END])  # half a letter, which no text spells
    episode.observe({"role": "user", "content": "<image>?"}, images=[tiny.picture((0, 0, 255))])
    assert episode.tokens.count(8) == 8
    episode.append_turn([END])
    first, second = episode.experiences()
    assert [row.tokens.tolist().count(8) for row in (first, second)] == [4, 8] and second.prompt_length == len(
        second.tokens
    ) - 1


def test_media_of_observations_are_joined() -> None:
    episode = Episode(prompt=[8, 8], media={"pixel_values": torch.zeros(1, 3)})
    episode.append_turn([5])
    episode.observe_tokens([8, 8], media={"pixel_values": torch.ones(2, 3), "mm_token_type_ids": torch.ones(1, 2)})
    episode.append_turn([6])
    (record,) = episode.experiences()
    assert record.multi_modal_inputs.keys() == {"pixel_values"}  # types of a part would say that the rest is text
    assert record.multi_modal_inputs["pixel_values"].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]
    typed = Episode(prompt=[7, 8], media={"pixel_values": torch.zeros(1, 3), "mm_token_type_ids": [[0, 1]]})
    typed.append_turn([5])
    typed.observe_tokens([9])
    typed.observe_tokens([8, 8, 9], media={"pixel_values": torch.ones(1, 3), "mm_token_type_ids": [[1, 1, 0]]})
    typed.append_turn([6])
    (record,) = typed.experiences()
    assert record.tokens.tolist() == [7, 8, 5, 9, 8, 8, 9, 6]
    assert record.multi_modal_inputs["mm_token_type_ids"].tolist() == [[0, 1, 0, 0, 1, 1, 0]]
    typed.observe_tokens([8, 9])
    typed.append_sample(given_sample([*typed.tokens[:-2], 9, 9, 8], [5]))  # the engine was given other tokens
    assert typed.experiences()[0].multi_modal_inputs.keys() == {"pixel_values"}
    with pytest.raises(ValueError, match=r"media\['mm_token_type_ids'\]: got 3 entries, expected 2, one for each"):
        typed.observe_tokens([8, 8], media={"mm_token_type_ids": [[1, 1, 0]]})
    pictured = Episode(
        None, tiny.bytes_(), messages=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    )
    assert pictured._branch.images == ["a.png"] and pictured.messages[0]["content"] == [{"type": "image"}]
    with pytest.raises(ValueError, match="images: got fewer"):
        Episode(None, tiny.bytes_(), messages=[{"role": "user", "content": [{"type": "image"}]}])


def test_selected_experts_are_recorded() -> None:
    episode = Episode(prompt=[1])
    for response in ([2, 3], [4]):
        experts = torch.tensor([[[token, token + 1]] for token in response], dtype=torch.uint8)
        episode.append_sample(given_sample([], response, routed_experts=experts))
        episode.observe_tokens([9])
    (record,) = episode.experiences()
    assert record.routed_experts.tolist() == [[[2, 3]], [[3, 4]], [[-1, -1]], [[4, 5]], [[-1, -1]]]


# --- saved and gone on with ------------------------------------------------------------------------------------------


def test_an_episode_saved_in_the_middle_of_a_turn_is_continued() -> None:
    tokenizer = tiny.bytes_()
    episode = chat(tokenizer, "first", "a long answer", sampling={"seed": 7}, context_limit=200)
    episode.act()
    episode.score_turn(0.5)
    episode.observe(RESULT)
    episode.act(pause_after=3)
    episode.info["seen"] = True
    saved = json.loads(json.dumps(episode.to_dict()))
    engine = scripted(tokenizer, "a long answer")
    engine.version = 9
    again = Episode.from_dict(saved, engine, tokenizer)
    assert again.to_dict() == episode.to_dict()
    again.act()
    (record,) = again.experiences(1.0)
    assert text(tokenizer, trained(record)) == "first<|end|>a long answer<|end|>"
    assert record.policy_versions[record.action_mask].tolist() == [0] * 9 + [9] * 11
    assert record.eid == episode.eid and record.reward == 1.5 and record.info["seen"] is True
    with pytest.raises(ValueError, match="chat template"):
        Episode.from_dict(saved, engine, with_template(templates.NEWLINES))
    with pytest.raises(ValueError, match="format: got 0"):
        Episode.from_dict({**saved, "format": 0})


def test_a_turn_with_two_endings_is_saved_as_two() -> None:
    tokenizer = tiny.bytes_()
    episode = Episode(None, tokenizer, messages=[USER])
    episode.append_turn(ids(tokenizer, "ab"), finish_reason="abort")
    other = episode.branch()
    other.append_turn([], finish_reason="length")
    again = Episode.from_dict(json.loads(json.dumps(episode.to_dict())), None, tokenizer)
    assert [episode.finish_reason for episode in again.branches] == ["abort", "length"]
    assert again.branches[0].turns[0].ids == again.branches[1].turns[0].ids == episode.turns[0].ids


# --- refused ---------------------------------------------------------------------------------------------------------


def test_invalid_input() -> None:
    tokenizer = tiny.bytes_()
    with pytest.raises(ValueError, match="both or neither"):
        Episode(None, tokenizer)
    with pytest.raises(ValueError, match="tokenizer: missing"):
        Episode(None, None, messages=[USER])
    with pytest.raises(ValueError, match="on_fork: got 'drop'"):
        Episode(None, tokenizer, messages=[USER], on_fork="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sampling.n: got 2.*Episode.group"):
        Episode(None, tokenizer, messages=[USER], sampling={"n": 2})
    with pytest.raises(ValueError, match="context_limit: got 0"):
        Episode(None, tokenizer, messages=[USER], context_limit=0)
    with pytest.raises(ValueError, match="engine: missing"):
        Episode(None, tokenizer, messages=[USER]).act()
    with pytest.raises(ValueError, match="unknown option 'temprature'"):
        chat(tokenizer, "a").act(temprature=1)
    episode = chat(tokenizer, "a")
    with pytest.raises(ValueError, match="observation: got 'text', expected messages"):
        episode.observe("text")
    with pytest.raises(ValueError, match=r"ids\[1\]: got -1"):
        episode.observe_tokens([1, -1])
    with pytest.raises(ValueError, match="expected text"):
        Episode(None, tokenizer, "text").observe(USER)
    with pytest.raises(ValueError, match="expected token ids"):
        Episode(prompt=[1]).observe("text")
    episode.act()
    with pytest.raises(ValueError, match="got a turn after one that ended"):
        episode.append_turn([1])
    episode.observe(RESULT)
    before = episode.to_dict()
    for wrong, message in (
        ({"ids": [1], "versions": 0}, "sample.logprobs: got None, expected some"),
        ({"ids": [1], "logprobs": [-1.0]}, "sample.versions: got None"),
        ({"ids": [1], "logprobs": [-1.0], "versions": 0, "logprobs_kind": "raw"}, "logprobs_kind: got 'raw'"),
        ({"ids": [1, 2], "logprobs": [-1.0], "versions": 0}, "logprobs: got 1 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            episode.append_turn(**wrong)
    assert episode.to_dict() == {**before, "made_spans": episode.to_dict()["made_spans"]}


def test_a_failed_observation_leaves_the_episode_unchanged() -> None:
    episode = chat(with_template(templates.CALLING), "no call")
    episode.act()
    before = episode.to_dict()
    with pytest.raises(ValueError, match="cannot render"):
        episode.observe(RESULT, images=["a.png"])
    assert episode.to_dict() == before and not before["branches"][0]["images"]


# --- any order of things ---------------------------------------------------------------------------------------------

ASCII = st.text(st.sampled_from("abc <>\n|"), max_size=4)
LETTERS = {letter: ids(tiny.bytes_(), letter)[0] for letter in "abc <>\n|"}


class Driving(RuleBasedStateMachine):
    """Acts, observations, branches, pauses, failures and saves in any order, compared with a transcript of each branch
    and the number of sampled tokens."""

    @initialize(limit=st.sampled_from([None, 60]), template=st.sampled_from([tiny.TEMPLATE, templates.NEWLINES]))
    def begin(self, limit: int | None, template: str) -> None:
        self.tokenizer = with_template(template)
        self.glue = "\n" if template == templates.NEWLINES else ""
        self.line: Any = None
        self.engine = ScriptedEngine(lambda prompt, run: self.line, self.tokenizer)
        episode = Episode(self.engine, self.tokenizer, messages=[USER], eid=EID_, context_limit=limit)
        self.limit = limit
        self.episodes = [episode]
        self.written = [text(self.tokenizer, episode.tokens)]
        self.sampled = 0
        self.waiting = [True]  # whether a turn may come
        self.last: list[tuple[list[int], str]] = [([], "")]  # the last turn as far as it got, and how it ended

    def pick(self, which: int) -> int:
        return which % len(self.episodes)

    @rule(which=st.integers(0, 9), response=ASCII, ends=st.booleans(), pause=st.booleans(), version=st.integers(0, 3))
    def act(self, which: int, response: str, ends: bool, pause: bool, version: int) -> None:
        i = self.pick(which)
        episode = self.episodes[i]
        if not self.waiting[i]:
            with pytest.raises(ValueError, match="expected an observation"):
                episode.act()
            return
        begun, last_reason = self.last[i]
        begun = begun if last_reason == "abort" else []
        tokens = begun + [LETTERS[letter] for letter in response] + [END] * ends
        reason = "abort" if pause else "stop" if ends else "length"
        left = None if self.limit is None else self.limit - len(episode.tokens)
        self.line = Line(ids=tokens, logprobs=[-float(i) for i in range(len(tokens))], finish_reason=reason)
        self.engine.version = version
        sample = episode.act()
        full = left is not None and left <= 0
        if not full:
            sampled_count = len(sample.response_ids) - len(begun)
            new = text(self.tokenizer, sample.response_ids[len(begun) :])
            self.sampled += sampled_count
            self.written[i] += new
            is_truncated = left is not None and len(tokens) - len(begun) > left
            assert sample.finish_reason == ("length" if is_truncated else reason)
        else:
            assert sample.finish_reason == "length" and not sample.response_ids
        # Where nothing is left, a turn that waited for its observation still waits; a paused one ends.
        if not full or last_reason == "abort":
            ended = "length" if full else sample.finish_reason
            self.last[i] = (begun if full else list(sample.response_ids), ended)
            self.waiting[i] = ended == "abort"

    @rule(which=st.integers(0, 9))
    def fail(self, which: int) -> None:
        i = self.pick(which)
        if self.waiting[i] and self.episodes[i].tokens_left != 0:
            before = self.episodes[i].tokens
            self.line = RuntimeError("gone")
            assert self.episodes[i].act().failed and self.episodes[i].tokens == before

    @rule(which=st.integers(0, 9), content=ASCII, role=st.sampled_from(["tool", "user"]))
    def observe(self, which: int, content: str, role: str) -> None:
        i = self.pick(which)
        self.episodes[i].observe({"role": role, "content": content})
        begin = "<|assistant|>" + self.glue
        last_reason = self.last[i][1]
        if last_reason and last_reason != "observed":
            self.written[i] += ("" if last_reason == "stop" else "<|end|>") + self.glue
        else:
            self.written[i] = self.written[i].removesuffix(begin)
        self.written[i] += f"<|{role}|>{self.glue}{content}<|end|>{self.glue}{begin}"
        self.last[i] = ([], "observed" if last_reason else "")
        self.waiting[i] = True

    @precondition(lambda self: len(self.episodes) < 5)
    @rule(which=st.integers(0, 9))
    def branch(self, which: int) -> None:
        i = self.pick(which)
        self.episodes.append(self.episodes[i].branch())
        for by_episode in (self.written, self.waiting, self.last):
            by_episode.append(by_episode[i])

    @rule(which=st.integers(0, 9))
    def save(self, which: int) -> None:
        plain = json.loads(json.dumps(self.episodes[self.pick(which)].to_dict()))
        again = Episode.from_dict(plain, self.engine, self.tokenizer)
        assert json.loads(json.dumps(again.to_dict())) == plain
        by_number = {episode.number: episode for episode in again.branches}
        self.episodes = [by_number[episode.number] for episode in self.episodes]

    @invariant()
    def together(self) -> None:
        for episode, written in zip(self.episodes, self.written, strict=True):
            assert text(self.tokenizer, episode.tokens) == written
        records = self.episodes[0].experiences()
        assert sum(int(record.action_mask.sum()) for record in records) == self.sampled
        assert sum(record.metrics["trained_tokens"] for record in records) == self.sampled
        episodes_by_number = {episode.number: episode for episode in self.episodes}
        for record in records:
            episode = episodes_by_number[record.info["branch"]]
            tokens = record.tokens.tolist()
            bounds = [0, *(segment["stop"] for segment in record.info["segments"])]
            assert [segment["start"] for segment in record.info["segments"]] == bounds[:-1] and bounds[-1] == len(
                tokens
            )
            sampled = torch.zeros(len(tokens), dtype=torch.bool)
            masked = torch.zeros(len(tokens), dtype=torch.bool)
            for segment in record.info["segments"]:
                if segment["kind"] == "model":
                    sampled[segment["start"] : segment["stop"]] = True
                    masked[segment["start"] : segment["stop"]] = segment["trained"]
            assert record.action_mask.tolist() == masked[record.prompt_length :].tolist()
            turn_ids = [token for turn in episode.turns for token in turn.ids]
            assert record.tokens[sampled].tolist() == turn_ids
            expected = [value for turn in episode.turns for value in turn.joined("logprobs") or ()]
            assert record.logprobs[sampled[record.prompt_length :]].tolist() == expected
            assert (record.logprobs[~sampled[record.prompt_length :]] == 0).all()
            length = len(tokens) if not episode._branch.pending else len(episode._branch.ids)
            assert tokens[:length] == episode.tokens[:length]
            assert record.eid.rid == EID_.rid and record.eid == episode.eid
            assert self.limit is None or not turn_ids or len(tokens) <= max(self.limit, length)
        assert len({record.eid.uid for record in records}) == len(records)
        assert all(record.parent is None or record.parent in {other.eid.uid for other in records} for record in records)


Driving.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestDriving = Driving.TestCase


@given(st.lists(st.tuples(st.lists(st.integers(0, 300), max_size=5), st.booleans()), min_size=1, max_size=6))
def test_an_episode_saved_at_any_point_is_unchanged(parts: list[tuple[list[int], bool]]) -> None:
    episode = Episode(prompt=[1, 2], eid=EID_, context_limit=1000)
    expected_tokens = [1, 2]
    for sampled, save in parts:
        episode.append_turn(sampled, [-0.1] * len(sampled), versions=1)
        episode.observe_tokens([7])
        expected_tokens += [*sampled, 7]
        if save:
            episode = Episode.from_dict(json.loads(json.dumps(episode.to_dict())))
    assert episode.tokens == expected_tokens
    (record,) = episode.experiences()
    assert record.tokens.tolist() == expected_tokens and trained(record) == [
        token for sampled, _ in parts for token in sampled
    ]


PIECES = st.sampled_from(["<think>a</think>", "the", " ", "five", "\n", "é"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["user", "tool", "branch"]), st.lists(PIECES, max_size=3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(STEPS, st.sampled_from(["keep", "fork"]), st.sampled_from(["keep", "fork"]))
def test_each_sampled_token_is_trained_once_after_its_context(
    steps: list[tuple[str, list[str], bool, bool]], on_realign: Any, on_fork: Any
) -> None:
    tokenizer = with_template(templates.THINKING, merging())
    line = Line(ids=[END])
    turns: list[tuple[list[int], list[int]]] = []

    def answer(prompt: Prompt, run: int) -> Any:
        turns.append((list(prompt.token_ids or ()), list(line.ids or ())))
        return line

    engine = ScriptedEngine(answer, tokenizer)
    episode = Episode(engine, tokenizer, messages=[USER], eid=EID_, on_realign=on_realign, on_fork=on_fork)
    in_hand, open_ = episode, True
    for kind, pieces, apart, ends in steps:
        if kind == "branch":
            in_hand = in_hand.branch()
        elif not open_:
            in_hand.observe({"role": kind, "content": "".join(pieces)})
        written = ["".join(pieces)] if not apart else pieces
        line = Line(
            ids=[token for word in written for token in ids(tokenizer, word)] + [END] * ends,
            finish_reason="stop" if ends else "length",
        )
        if in_hand._branch.pending:
            in_hand.act()
            open_ = False
    records = episode.experiences()
    rows = [(row.tokens.tolist(), row.prompt_length + row.action_mask.nonzero()[:, 0]) for row in records]
    trained_after = sorted((tokens[: int(at)], tokens[int(at)]) for tokens, places in rows for at in places)
    assert trained_after == sorted(
        (prompt + response_ids[:k], response_ids[k]) for prompt, response_ids in turns for k in range(len(response_ids))
    )
    counts = episode.drift.counts
    assert sum(counts.values()) == len(turns) - 1 if len(episode.branches) == 1 else sum(counts.values()) < len(turns)
    if on_realign == on_fork == "keep" and len(episode.branches) == 1:
        assert len(records) == 1
    if on_fork == "fork" and counts["forked"]:
        assert len(records) > 1


def test_a_seed_repeats_an_episode_without_an_id() -> None:
    engine = TransformersEngine(tiny.llama(len(tiny.bytes_())), tiny.bytes_())
    responses = []
    for _ in range(2):
        episode = Episode(engine, tiny.bytes_(), messages=[USER], sampling={"seed": 1, "max_tokens": 6})
        episode.act()
        responses.append((list(episode.tokens), episode.experiences()[0].eid.tid))
    assert (
        responses[0][0] == responses[1][0] and responses[0][1] != responses[1][1]
    )  # the same tokens, and another group
