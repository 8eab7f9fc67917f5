"""Ready functions that read answers: parsers by property, formats by the shared cases, and time that stays bounded."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.rewards import (
    as_reward,
    boxed_match,
    exact_match,
    extract_boxed,
    extract_final_answer,
    extract_last_number,
    gsm8k,
    numeric_match,
    parse_number,
    think_answer_format,
    think_boxed_format,
)
from tests.rewards.helpers import sample

# --- boxes ---------------------------------------------------------------------------------------------------------

plain_text = st.text(st.sampled_from("abc 12+=\n.,\\"), max_size=12).filter(lambda text: not text.endswith("\\"))
balanced = st.recursive(
    st.text(st.sampled_from("abc 12+-"), max_size=6),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        inner.map(lambda text: "{" + text + "}"),
        inner.map(lambda text: r"\{" + text + r"\}"),
        inner.map(lambda text: r"\frac{" + text + "}{2}"),
    ),
    max_leaves=6,
)


@given(st.lists(st.tuples(plain_text, balanced), min_size=1, max_size=4), plain_text)
def test_the_last_closed_box_is_found_whole(parts: list[tuple[str, str]], tail: str) -> None:
    text = "".join(f"{before} \\boxed{{{inside}}}" for before, inside in parts) + " " + tail
    assert extract_boxed(text) == parts[-1][1].strip()
    assert extract_boxed(text + r" \boxed{left {open") == parts[-1][1].strip()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{}", ""),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{a}} \boxed{b}", "b"),
        (r"{ \boxed{b}", "b"),
        (r"boxed{7}", None),
        (r"\boxed 7", None),
        ("", None),
    ],
)
def test_boxes(text: str, inside: str | None) -> None:
    assert extract_boxed(text) == inside


@pytest.mark.parametrize("text", ["\\boxed{", "1 ", "$ ", "1,111", "\\text{", "#### 1 "])
def test_looking_for_an_answer_takes_linear_time(text: str) -> None:
    def seconds(n: int) -> float:
        response = "\\boxed{1" + text * n + "}" * n
        times = []
        for _ in range(3):
            start = time.process_time()
            gsm8k(response, "3")
            numeric_match(response, "3")
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(16_000) < 24 * seconds(2_000) + 0.02  # 8 times the text; quadratic would be 64 times as long


# --- numbers -------------------------------------------------------------------------------------------------------

numbers = st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=1000)


@given(st.integers(-(10**15), 10**15))
def test_integers_in_every_dress(value: int) -> None:
    for text in (f"{value}", f"{value:,}", f" {value} ", f"{value}.", f"{value:,}.00", f"${value:,}"):
        assert parse_number(text) == value, text
    assert extract_last_number(f"First 3, then {value:,}.") == value
    assert parse_number(str(value).replace("-", "−")) == value


@given(numbers)
def test_fractions_and_percent(value: Fraction) -> None:
    top, bottom = value.numerator, value.denominator
    assert parse_number(f"{top}/{bottom}") == value
    assert parse_number(rf"\frac{{{top}}}{{{bottom}}}") == value
    assert parse_number(f"{top}%") == Fraction(top, 100)


@given(st.decimals(-1000, 1000, places=3))
def test_decimals_are_exact(value: Any) -> None:
    assert parse_number(str(value)) == Fraction(value)
    assert numeric_match(f"It is {value}", str(value)) == 1.0


@given(st.integers(0, 999), st.integers(1, 9), st.integers(10, 99))
def test_mixed_numbers(units: int, top: int, bottom: int) -> None:
    value = units + Fraction(top, bottom)
    assert parse_number(f"{units} {top}/{bottom}") == value
    assert parse_number(rf"{units}\frac{{{top}}}{{{bottom}}}") == value


@pytest.mark.parametrize(
    "text", ["", "x", "1,2", "1,2345", "12,34,567", "1e9999", "5/0", "1 2", "(3)", "--5", "9" * 5000]
)
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=-5", -5),
        ("10-5", 5),
        ("5 - 3 = 2", 2),
        ("(1,2)", 2),
        ("v2.5", None),
        ("version 2.5.1", Fraction(5, 2)),
        ("She has 3 apples.", 3),
        ("about 50% of 1,000,000", 1000000),
        (".5", Fraction(1, 2)),
        ("1.5e3 m", 1500),
        ("abc123", None),
        ("3 1/2 kg", Fraction(7, 2)),
    ],
)
def test_the_last_number(text: str, value: Any) -> None:
    assert extract_last_number(text) == value


@given(st.text(max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    for read in (parse_number, extract_last_number, extract_boxed, extract_final_answer):
        read(text)
    for match in (exact_match, numeric_match, boxed_match):
        assert match(text, "7") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("The answer is 1,250.", 1250, 1),
        ("The answer is 1,250.", "1250.0", 1),
        (r"12 and \boxed{13}, not 14", "13", 1),
        ("<answer>13 apples</answer> or 14", "13", 1),
        ("so\n#### 13\n", "work 5\n#### 13", 1),
        ("0.333333", "1/3", 1),
        ("0.33", "1/3", 0),
        ("1000000.5", "1000000", 1),
        ("5", ["4", "5"], 1),
        ("no idea", "5", 0),
        (r"\boxed{x}", "5", 0),
        ("-5", "5", 0),
        ("$\\frac{3}{4}$", "0.75", 1),
        ("50 %", ".5", 1),
        ("50 %", "50", 1),
        ("0.5", "50%", 1),
    ],
)
def test_numeric_match(response: str, reference: Any, score: int) -> None:
    assert numeric_match(response, reference) == score


def test_percent_and_tolerance_by_choice() -> None:
    assert numeric_match("50%", "50", percent="hundredth") == 0.0 == numeric_match("50%", "0.5", percent="ignored")
    assert numeric_match("3.2", "3", tolerance=0.1) == 1.0
    for options in ({"percent": "never"}, {"tolerance": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            numeric_match("1", "1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", [None, [], {}, "none here"])
def test_a_reference_that_is_none_is_an_error_and_not_a_zero(reference: Any) -> None:
    with pytest.raises(ValueError, match="reference: got"):
        numeric_match("5", reference)
    scores = as_reward(numeric_match)([sample("5", reference=reference), sample("5", reference="5")])
    assert scores.errors[0] is not None and scores.rewards[1] == 1.0


def test_exact_match() -> None:
    assert exact_match(" The  Answer. ", "the answer") == 1.0
    assert exact_match("answer", "The answer") == 0.0
    assert exact_match("5", 5) == 1.0 and exact_match("b", ("a", "B")) == 1.0
    assert exact_match("a", "A", strict=True) == 0.0


def test_boxed_match() -> None:
    assert boxed_match(r"\boxed{1,000}", "1000") == 1.0
    assert boxed_match(r"\boxed{\frac{1}{2}}", "0.5") == 1.0
    assert boxed_match(r"\boxed{ x+1 }", "x + 1") == 1.0
    assert boxed_match(r"\boxed{1, 2}", "2") == 0.0
    assert boxed_match("7", "7") == 0.0
    assert boxed_match(r"\boxed{about 7}", "7") == 0.0


# --- forms ---------------------------------------------------------------------------------------------------------


def test_the_shared_gsm8k_cases() -> None:
    assert think_boxed_format("<think>x</think> \\boxed{2}") == 1.0
    assert think_boxed_format("\\boxed{2} <think>x</think>") == 0.0
    leaked = (
        "...enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{} after. assistant: banana"
    )
    assert think_boxed_format(leaked) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"<think>a</think>\boxed{1}", 1),
        (r"<think>a \boxed{1}</think>", 0),
        (r"<think>a \boxed{1}</think> \boxed{1}", 0),
        (r"<think></think>\boxed{1}", 0),
        (r"<think>a</think>\boxed{}", 0),
        (r"<think>a</think>\boxed{1", 0),
        (r"a</think>\boxed{1}", 0),
        (r"<think>a\boxed{1}", 0),
        (r"</think><think>a</think>\boxed{1}", 1),
        ("", 0),
    ],
)
def test_thought_then_box(text: str, score: int) -> None:
    assert think_boxed_format(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n\n<answer>b</answer>\n", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer></answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
    ],
)
def test_thought_then_answer(text: str, score: int) -> None:
    assert think_answer_format(text) == score


def test_a_thought_that_the_prompt_opened() -> None:
    assert think_boxed_format(r"a</think>\boxed{1}", opened=True) == 1.0
    assert think_answer_format("a</think><answer>b</answer>", opened=True) == 1.0


def test_gsm8k() -> None:
    good = r"<think>48 + 24</think> \boxed{72}"
    assert gsm8k(good, "48/2 = 24\n#### 72") == {"reward": 1.0, "accuracy": 1.0, "format": 1.0}
    assert gsm8k(r"<think>48 + 24</think> \boxed{71}", "72")["reward"] == pytest.approx(0.1)
    assert gsm8k(r"\boxed{72}", "72")["reward"] == pytest.approx(0.9)
    assert gsm8k("banana", "72")["reward"] == 0.0
    work = "48 / 2 = 24, 48 + 24 = 72"
    for response, accuracy, form in [
        (f"{work}\n#### 72", 1, 0),
        (f"<think>{work}</think>\n#### 72\n", 1, 1),
        (f"<think>{work}</think> #### $1,072.00\nThank you", 0, 1),
        (f"#### Step 1\n{work}\n#### 72", 1, 0),
        (r"\boxed{71} #### 72", 0, 0),
        (f"<think>{work}</think>\n#### Conclusion", 0, 0),
        ("#### 71", 0, 0),
        ("#### ", 0, 0),
        ("72", 0, 0),
    ]:
        score = gsm8k(response, f"{work}\n#### 72")
        assert (score["accuracy"], score["format"]) == (accuracy, form), response
    assert gsm8k("#### 1,072", "#### 1072")["accuracy"] == 1.0
    scores = as_reward("gsm8k")([sample(good, prompt=r"<think> </think> \boxed{}", reference="72")])
    assert scores.rewards == [1.0] and scores.metrics == {"accuracy": [1.0], "format": [1.0]}


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "1",
        "1,",
        "{",
        "\\",
        r"\boxed{",
        "<answer>",
        "</answer>",
        "<think>",
        "-",
        "1 ",
        "1/",
        "$ ",
        r"\frac{",
        "#### ",
    ],
)
def test_long_texts_take_no_longer_than_they_are(text: str) -> None:
    start = time.monotonic()
    for match in (exact_match, numeric_match, boxed_match):
        match(text * 30_000, "7")
    think_boxed_format(text * 30_000), think_answer_format(text * 30_000)
    assert time.monotonic() - start < 5  # quadratic: minutes
