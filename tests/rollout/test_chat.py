"""Tokens that follow a sampled turn, and the comparison of sampled tokens with a new rendering."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollbook.rollout.chat import Drift, Drifts, Renderer, compare_tokens
from tests import tiny
from tests.rollout import templates
from tests.rollout.templates import END, ids, merging, with_template

USER = {"role": "user", "content": "what is 6 x 7?"}
RESULT = {"role": "tool", "content": "42"}


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def after(renderer: Renderer, text: str, sampled: list[int], new: list[Any], ended: bool = True, **more: Any) -> str:
    """Return the appended tokens as text."""
    return renderer.decode(renderer.after([USER], turn(text), sampled, ended, new, **more))


def test_only_the_unsampled_part_of_an_ending_is_appended() -> None:
    renderer = Renderer(with_template(templates.NEWLINES))
    sampled = ids(renderer.tokenizer, "call")
    rest = "\n<|tool|>\n42<|end|>\n<|assistant|>\n"
    assert after(renderer, "call", [*sampled, END], [RESULT]) == rest
    assert after(renderer, "call", sampled, [RESULT], ended=False) == "<|end|>" + rest
    assert after(renderer, "call", sampled, [RESULT]) == "<|end|>" + rest  # by a stop text, say
    assert after(renderer, "call", [*sampled, END], [RESULT], generation=False) == "\n<|tool|>\n42<|end|>\n"
    # A turn that a limit cut just after something like its end is cut all the same.
    assert after(renderer, "call", [*sampled, END], [RESULT], ended=False) == "<|end|>" + rest


def test_appended_tokens_equal_the_rendering() -> None:
    for template in (tiny.TEMPLATE, templates.NEWLINES, templates.CALLING):
        renderer = Renderer(with_template(template))
        sampled = [*ids(renderer.tokenizer, "yes."), END]
        new = [{"role": "user", "content": "sure?"}, {"role": "user", "content": "é"}]
        tokens = renderer.prompt([USER]) + sampled + renderer.after([USER], turn("yes."), sampled, True, new)
        assert tokens == renderer.prompt([USER, turn("yes."), *new])


def test_content_has_no_end_tokens() -> None:
    renderer = Renderer(with_template(templates.NEWLINES))
    sampled = ids(renderer.tokenizer, "a <|end|> b\n")
    assert renderer.content([USER], [*sampled, END], True) == "a <|end|> b\n"
    assert renderer.content([USER], [*sampled, END, *ids(renderer.tokenizer, "\n")], True) == "a <|end|> b\n"
    assert renderer.content([USER], sampled, False) == "a <|end|> b\n"
    other_end = [*ids(renderer.tokenizer, "a"), 0]
    assert renderer.content([USER], other_end, True) == "a"  # another special token than the template's
    assert renderer.content([USER], [], True) == ""
    plain = Renderer(renderer.tokenizer, chat=False)
    assert plain.content([], [*ids(renderer.tokenizer, "a"), END], True) == "a"


def test_dropped_thinking_does_not_change_what_follows() -> None:
    renderer = Renderer(with_template(templates.THINKING))
    text = "<think>hm</think>\nfive"
    sampled = [*ids(renderer.tokenizer, text), END]
    assert after(renderer, text, sampled, [USER]) == "\n<|user|>what is 6 x 7?<|end|>\n<|assistant|>"


def test_messages_of_several_tools_are_rendered_together() -> None:
    renderer = Renderer(with_template(templates.CALLING))
    call = {"type": "function", "function": {"name": "mul", "arguments": '{"a": 6}'}}
    message = turn("", tool_calls=[call])
    sampled = [*ids(renderer.tokenizer, '{"name": "mul", "arguments": {"a": 6}}'), END]
    following = renderer.after([USER], message, sampled, True, [RESULT, {"role": "tool", "content": "43"}])
    assert renderer.decode(following) == "\n<|user|>[42][43]<|end|>\n<|assistant|>"
    assert renderer.prompt([USER]) + sampled + following == renderer.prompt(
        [USER, message, RESULT, {"role": "tool", "content": "43"}]
    )


def test_rejections_of_a_template_are_errors() -> None:
    renderer = Renderer(with_template(templates.CALLING))
    with pytest.raises(ValueError, match=r"cannot render \['tool'\].*a tool answers a call.*observe_tokens"):
        renderer.after([USER], turn("no call"), [END], True, [RESULT])
    silent = Renderer(with_template(templates.HOISTING))
    with pytest.raises(ValueError, match=r"does not render \['system'\] after the model's turn"):
        silent.after([USER], turn("x"), [END], True, [{"role": "system", "content": "be brief"}])
    with pytest.raises(ValueError, match="without a chat template"):
        Renderer(with_template(""))


def test_a_conversation_may_contain_the_placeholder() -> None:
    renderer = Renderer(with_template(tiny.TEMPLATE))
    new = [{"role": "tool", "content": "xTURNx xxTURNxx"}]
    following = renderer.after([{"role": "user", "content": "xTURNx"}], turn("xTURNx"), [END], True, new)
    assert renderer.decode(following) == "<|tool|>xTURNx xxTURNxx<|end|><|assistant|>"


def test_options_and_tools_reach_the_template() -> None:
    template = "{{ tools | length if tools else 0 }}{{ mood }}" + tiny.TEMPLATE
    renderer = Renderer(with_template(template), tools=[{"name": "f"}], options={"mood": "!"})
    assert renderer.text([USER], False).startswith("1!<|user|>")


def test_a_word_level_tokenizer() -> None:
    renderer = Renderer(tiny.words())
    following = renderer.after([USER], turn("yes"), [END], True, [{"role": "tool", "content": "the answer is five"}])
    assert renderer.decode(following, special=False) == "the answer is five"
    plain = Renderer(tiny.words(), chat=False)
    assert plain.decode(plain.encode_after("", "the answer")) == "the answer"
    assert plain.decode(plain.encode_after("", "zebra the answer")) == "<unk> the answer"
    few = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "answer": 2}, unk_token="<unk>"))
    few.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unread = Renderer(PreTrainedTokenizerFast(tokenizer_object=few, unk_token="<unk>"), chat=False)
    assert unread.encode_after("", "the answer") == [1, 2]  # though nothing before it could be read


def test_tokens_that_spell_the_same_text_are_realigned() -> None:
    renderer = Renderer(merging())
    merged, letters = ids(merging(), "the"), [ids(merging(), letter)[0] for letter in "the"]
    assert len(merged) == 1 and merged != letters
    head = renderer.prompt([USER])
    drift = compare_tokens([*head, *letters, END], [*head, *merged, END], renderer.decode)
    assert drift == Drift(outcome="realigned", what="tokens", kept=3, rendered=1)


TEXTS = st.lists(st.sampled_from(["t", "h", "e", " ", "\n", "é", "<|end|>", "<|user|>"]), max_size=12).map("".join)


@given(TEXTS, TEXTS, TEXTS)
def test_endings_drop_only_equal_tokens(head: str, first: str, other: str) -> None:
    renderer = Renderer(merging())
    before, now = head + first, head + other
    ending, ending_now = renderer.endings(before, now)
    encoded, encoded_now = renderer.encode(before), renderer.encode(now)
    left_out = len(encoded) - len(ending)
    assert (
        encoded[left_out:] == ending
        and encoded_now[left_out:] == ending_now
        and encoded[:left_out] == encoded_now[:left_out]
    )


def test_glue_is_special_tokens_and_white_space() -> None:
    renderer = Renderer(tiny.bytes_())

    def drift_of(sampled: str, rendered: str) -> Drift:
        return compare_tokens(ids(tiny.bytes_(), sampled), ids(tiny.bytes_(), rendered), renderer.decode)

    assert drift_of("a<|end|>b", "a<|end|>b").outcome == "clean"
    assert drift_of("a \n<|end|>b", "a<|end|>b") == Drift(outcome="realigned", what="glue", kept=2, rendered=0)
    assert drift_of("a<|end|>b", "a<pad>b") == Drift(outcome="realigned", what="glue", kept=1, rendered=1)
    assert drift_of("thinking a", "a") == Drift(outcome="forked", what="text", kept=9, rendered=0)
    assert drift_of("a", "a b").outcome == "forked"


@given(st.lists(st.integers(9, 12)), st.lists(st.integers(9, 12)), st.lists(st.integers(9, 12)))
def test_tokens_between_equal_ends_are_counted(head: list[int], middle: list[int], tail: list[int]) -> None:
    renderer = Renderer(tiny.bytes_())
    drift = compare_tokens([*head, *middle, *tail], [*head, *tail], renderer.decode)
    assert (drift.outcome == "clean") == (not middle)
    assert drift.kept - drift.rendered == len(middle)
    assert drift.rendered == 0  # what is left out somewhere is found as that


def test_counts() -> None:
    drifts = Drifts([Drift(outcome="clean"), Drift(outcome="unchecked", what="because")])
    assert drifts.counts == {"clean": 1, "realigned": 0, "forked": 0, "unchecked": 1}
    assert drifts[1].to_dict() == {
        "outcome": "unchecked",
        "what": "because",
        "kept": 0,
        "rendered": 0,
        "by": "template",
        "policy": "keep",
    }
