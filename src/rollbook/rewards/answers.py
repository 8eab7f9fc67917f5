r"""Ready functions that look for an answer in a response and compare it (exact, numeric, boxed), or look at its form.

Invariant: they look at the response alone; what cannot be read as an answer is wrong (0), while a missing or unreadable
reference is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from rollbook.core.checks import check_choice, check_float

Percent = Literal["either", "hundredth", "ignored"]

# --- finding answers ------------------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with what it escapes: an escaped brace is none."""


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (or `\fbox{...}`) that is closed, braces inside it balanced; else `None`.

    >>> boxed(r"First \boxed{1}, then \boxed{\frac{1}{2}}."), boxed(r"\boxed{\{1, 2\}}"), boxed(r"\boxed{2")
    ('\\frac{1}{2}', '\\{1, 2\\}', None)
    """
    boxes = _boxes(text)
    return text[slice(*boxes[-1][1:])].strip() if boxes else None


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each closed box begins, and the bounds of what is in it; in one pass, however many are open or nested."""
    found: list[tuple[int, int, int]] = []
    openings = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    if not openings:
        return found
    stack: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            stack.append(match.start())
        elif match[0] == "}" and stack:
            start = stack.pop()
            if start in openings:
                found.append((openings[start], start + 1, match.start()))
    return sorted(found)


def final_answer(text: str) -> str | None:
    r"""The answer that a text marks as its own: its last box, else its last `<answer>`, else what follows its last
    `####` on that line; `None` if it marks none.

    >>> final_answer("<think>\\boxed{1}</think> so \\boxed{2}"), final_answer("<answer> 5 </answer>"), final_answer("5")
    ('2', '5', None)
    >>> final_answer("48 / 2 = 24, 48 + 24 = 72\n#### 72")
    '72'
    """
    box = boxed(text)
    if box is not None:
        return box
    # By search from the end, not by a pattern: one that never finds its end would look for it from every tag.
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0].strip() if mark else None


# --- numbers --------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,4}})?"
# At most one space between the parts: any number of them, twice, would take cubic time on a page of blanks.
_NUMBER = (
    rf"[$€£¥]? ?(?P<sign>[-+\u2212]?) ?[$€£¥]? ?(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}}/\d))?"
    rf"(?P<top>{_PLAIN})(?: ?/ ?(?P<bottom>{_PLAIN}))?"
    r"(?: ?(?P<percent>\\?%))?"
)
_WHOLE = re.compile(rf"{_NUMBER}(?:\s*\.)?")
"""Of a text without space around it."""
_INSIDE = re.compile(rf"(?<![\w./]){_NUMBER}")
_FRAC = re.compile(r"\s?\\[dt]?frac(?: ?\{ ?([-+]?[\d.,]+) ?\} ?\{ ?([-+]?[\d.,]+) ?\}|(\d)(\d))")
_DRESS = re.compile(
    r"\\(?:left|right|[,;:! ])|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\\\$|\\\(|\\\)|\\\[|\\\]|(?<!\\)\$(?=\s*$)"
)

_MOST_DIGITS = 1000
"""Longer numbers are not read: nobody's answer, and slow to compute with."""


def as_number(text: str) -> Fraction | None:
    r"""The exact number that a text is as a whole, else `None`.

    Thousands separators, a currency sign, fractions (`3/4`, `2 1/2`, `\frac{3}{4}`), exponents, percent (a hundredth)
    and the dress of LaTeX (`\text{ cm}`, `\,`) are read.

    >>> as_number("1,234.50"), as_number("-3/4"), as_number("50%"), as_number(r"\frac{1}{2}"), as_number("1,2")
    (Fraction(2469, 2), Fraction(-3, 4), Fraction(1, 2), Fraction(1, 2), None)
    """
    read = _read(_WHOLE.fullmatch(_undressed(text)))
    return None if read is None else read[0] / (100 if read[1] else 1)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, else `None`.

    >>> last_number("She has 3 apples, and 1,200.5 pears."), last_number("none")
    (Fraction(2401, 2), None)
    """
    read = _last(text)
    return None if read is None else read[0] / (100 if read[1] else 1)


def _undressed(text: str) -> str:
    text = _FRAC.sub(r" \1\3/\2\4", text[: 8 * _MOST_DIGITS])  # the space: 3\frac{1}{2} is three and a half
    return _DRESS.sub("", text).strip()


def _last(text: str) -> tuple[Fraction, bool] | None:
    tail = _undressed(text[-8 * _MOST_DIGITS :])
    found = None
    for match in _INSIDE.finditer(tail):
        found = _read(match) or found
    return found


def _read(match: re.Match[str] | None) -> tuple[Fraction, bool] | None:
    """(value without percent, whether there was a percent sign)."""
    if match is None or len(match.group()) > _MOST_DIGITS:
        return None
    parts = [match["top"], match["bottom"] or "1"]
    values = []
    for part in parts:
        digits, _, exponent = part.replace(",", "").lower().partition("e")
        if exponent and abs(int(exponent)) > 400:
            return None
        values.append(Fraction(digits.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0))
    if values[1] == 0:
        return None
    value = int(match["whole"] or 0) + values[0] / values[1]
    return (value if match["sign"] in ("", "+") else -value), match["percent"] is not None


# --- functions --------------------------------------------------------------------------------------------------------


def references(given: Any) -> list[str]:
    """The answers that count as right: one, or a list of them, as texts.

    >>> references(["a", 5]), references("b")
    (['a', '5'], ['b'])
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, Sequence) and given:
        return [text for one in given for text in references(one)]
    if given is None or isinstance(given, (Sequence, dict)):
        raise ValueError(f"reference: got {given!r}, expected an answer or a list of answers")
    return [str(given)]


def plain(text: str) -> str:
    """A text as answers are compared: no outer space, inner space single, case folded, no final full stop.

    >>> plain("  The  Answer. ")
    'the answer'
    """
    return " ".join(text.split()).casefold().rstrip(".").rstrip()


def exact_match(response: str, reference: Any, *, strict: bool = False) -> float:
    r"""1 if the answer is (one of) the reference(s), else 0.

    The answer is what the response marks as such (`final_answer`), else all of it; both are compared as `plain` texts.
    `strict`: the whole response, character by character.

    >>> exact_match("The capital is \\boxed{Paris}.", "paris"), exact_match("Paris, I think", "Paris")
    (1.0, 0.0)
    >>> exact_match("B", ["A", "B"]), exact_match("Paris ", "Paris", strict=True)
    (1.0, 0.0)
    """
    right = references(reference)
    if strict:
        return float(response in right)
    answer = final_answer(response)
    found = plain(response if answer is None else answer)
    return float(any(found == plain(_own(one)) for one in right))


def _own(reference: str) -> str:
    """A reference that marks its answer (a whole solution of GSM8K) stands for that answer."""
    marked = final_answer(reference)
    return reference if marked is None else marked


def numeric_match(response: str, reference: Any, *, tolerance: float = 1e-6, percent: Percent = "either") -> float:
    r"""1 if the answer is the reference's number, else 0.

    The answer is the number that the response marks (`final_answer`), else the last number in it. Equal means within
    `tolerance`, relative to the reference where that is above 1. `percent`: a percent sign that only one of the two
    has counts as a hundredth, or is ignored, or (`either`) makes both readings right.

    >>> numeric_match("It costs $1,250.00 in all.", "1250"), numeric_match(r"\boxed{\frac{1}{3}}", "0.3333333")
    (1.0, 1.0)
    >>> numeric_match("12 or 13", 12), numeric_match("50%", "0.5"), numeric_match("50%", 50), numeric_match("?", 1)
    (0.0, 1.0, 1.0, 0.0)
    """
    check_float("tolerance", tolerance, 0, 1)
    check_choice("percent", percent, ("either", "hundredth", "ignored"))
    rights = [_reference_number(one) for one in references(reference)]
    answer = final_answer(response)
    found = _last(response) if answer is None else _read(_WHOLE.fullmatch(_undressed(answer))) or _last(answer)
    return float(found is not None and any(_equal(found, right, tolerance, percent) for right in rights))


def _reference_number(text: str) -> tuple[Fraction, bool]:
    own = _own(text)
    found = _read(_WHOLE.fullmatch(_undressed(own))) or _last(own)
    if found is None:
        raise ValueError(f"reference: got {text[:80]!r}, expected a number")
    return found


def _equal(a: tuple[Fraction, bool], b: tuple[Fraction, bool], tolerance: float, percent: Percent) -> bool:
    pairs = []
    if percent != "ignored":
        pairs.append((a[0] / (100 if a[1] else 1), b[0] / (100 if b[1] else 1)))
    if percent != "hundredth":
        pairs.append((a[0], b[0]))
    return any(abs(x - y) <= Fraction(tolerance) * max(Fraction(1), abs(y)) for x, y in pairs)


def boxed_match(response: str, reference: Any, *, tolerance: float = 1e-6) -> float:
    r"""1 if the last `\boxed{...}` of the response is the reference, as a text or as a number; 0 without a box.

    >>> boxed_match(r"so \boxed{x + 1}", "x+1"), boxed_match(r"\boxed{72}", "#### 72"), boxed_match("72", "72")
    (1.0, 1.0, 0.0)
    """
    right = references(reference)
    answer = boxed(response)
    if answer is None:
        return 0.0
    bare = "".join(plain(answer).split())
    if any(bare == "".join(plain(_own(one)).split()) for one in right):
        return 1.0
    found = _read(_WHOLE.fullmatch(_undressed(answer)))
    if found is None:
        return 0.0
    for one in right:
        value = _read(_WHOLE.fullmatch(_undressed(_own(one))))
        if value is not None and _equal(found, value, tolerance, "either"):
            return 1.0
    return 0.0


def think_boxed_format(response: str, *, opened: bool = False) -> float:
    r"""1 if a thought, `<think>...</think>`, ends before the first `\boxed{...}`, and neither is empty; else 0.

    `opened`: the prompt ends with `<think>`, as some chat templates do, so that the response begins inside the thought.

    >>> think_boxed_format(r"<think>x</think> \boxed{2}"), think_boxed_format(r"\boxed{2} <think>x</think>")
    (1.0, 0.0)
    >>> think_boxed_format(r"x</think> \boxed{2}"), think_boxed_format(r"x</think> \boxed{2}", opened=True)
    (0.0, 1.0)
    """
    text = "<think>" + response if opened else response
    start = text.find("<think>")
    end = text.find("</think>", max(start, 0))
    boxes = _boxes(text)
    if min(start, end) < 0 or not text[start + len("<think>") : end].strip() or not boxes:
        return 0.0
    place, inside, closed = boxes[0]
    return float(bool(text[inside:closed].strip()) and end + len("</think>") <= place)


def think_answer_format(response: str, *, opened: bool = False) -> float:
    """1 if the response is `<think>...</think><answer>...</answer>` and nothing else, each tag once; else 0.

    >>> think_answer_format("<think>hm</think>\\n<answer>5</answer>"), think_answer_format("<answer>5</answer>")
    (1.0, 0.0)
    """
    text = ("<think>" + response if opened else response).strip()
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0.0
    form = re.fullmatch(r"<think>(.*)</think>\s*<answer>(.*)</answer>", text, re.DOTALL)
    return float(form is not None and bool(form[1].strip()) and bool(form[2].strip()))


def gsm8k(response: str, reference: Any, *, format_weight: float = 0.1) -> dict[str, float]:
    r"""GSM8K's usual reward: 0.9 for a right boxed answer and 0.1 for its form, with both as metrics.

    The same as a recipe: {"gsm8k_rule": [("boxed_match", None, 0.9), ("think_boxed_format", None, 0.1)]}; but in a
    response without a box, a number behind its last `####`, the form of GSM8K's own solutions, counts as one.

    >>> gsm8k(r"<think>6 * 12</think> \boxed{72}", "#### 72"), gsm8k(r"\boxed{72}", "72")["reward"]
    ({'reward': 1.0, 'accuracy': 1.0, 'format': 1.0}, 0.9)
    >>> gsm8k("6 * 12 = 72\n#### 72", "#### 72")["reward"], gsm8k("72", "#### 72")["reward"]
    (0.9, 0.0)
    """
    share = check_float("format_weight", format_weight, 0, 1)
    before, mark, after = response.rpartition("####")
    answer = after.strip().partition("\n")[0]
    if mark and boxed(response) is None and as_number(answer) is not None:
        response = f"{before}\\boxed{{{answer}}}"
    accuracy, form = boxed_match(response, reference), think_boxed_format(response)
    return {"reward": (1 - share) * accuracy + share * form, "accuracy": accuracy, "format": form}
