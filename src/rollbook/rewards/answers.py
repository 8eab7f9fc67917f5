"""Built-in reward functions, and the extraction of answers and numbers from responses that they use.

- Answers: `exact_match`, `numeric_match`, `boxed_match`, `gsm8k`, `math_match` (symbolic), `json_match`.
- Form: `think_boxed_format`, `think_answer_format`, `json_schema`, `length`, `repetition`.

Invariant: the functions read only the response, not the prompt. A response without a readable answer scores 0. A
missing or unreadable reference is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from rollbook.core.checks import check_choice, check_float
from rollbook.rewards.functions import MissingExtraError, ProcessPool, batched
from rollbook.rewards.types import Json, Reference

__all__ = [
    "boxed_match",
    "exact_match",
    "extract_boxed",
    "extract_final_answer",
    "extract_last_number",
    "find_json_errors",
    "gsm8k",
    "json_match",
    "json_schema",
    "length",
    "math_match",
    "normalize_text",
    "numeric_match",
    "parse_number",
    "repetition",
    "think_answer_format",
    "think_boxed_format",
]

Percent = Literal["either", "hundredth", "ignored"]

# --- extraction of answers --------------------------------------------------------------------------------------------

_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with the character that it escapes."""


def extract_boxed(text: str) -> str | None:
    r"""Extract the contents of the last closed `\boxed{...}` or `\fbox{...}`.

    Args:
        text: The text.

    Returns:
        The contents, which may have balanced braces, or `None`.

    >>> [extract_boxed(text) for text in (r"First \boxed{1}, then \boxed{\frac{1}{2}}.", r"\boxed{\{1\}}", r"\boxed{2")]
    ['\\frac{1}{2}', '\\{1\\}', None]
    """
    boxes = _find_boxes(text)
    return text[slice(*boxes[-1][1:])].strip() if boxes else None


def _find_boxes(text: str) -> list[tuple[int, int, int]]:
    """Return (start, content start, content end) of each closed box, in order. Takes linear time."""
    boxes: list[tuple[int, int, int]] = []
    openings = {match.end() - 1: match.start() for match in _BOX_START.finditer(text)}
    if not openings:
        return boxes
    stack: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            stack.append(match.start())
        elif match[0] == "}" and stack:
            start = stack.pop()
            if start in openings:
                boxes.append((openings[start], start + 1, match.start()))
    return sorted(boxes)


def extract_final_answer(text: str) -> str | None:
    r"""Extract the marked answer: the last box, else the last `<answer>`, else the line after the last `####`.

    Args:
        text: The text.

    Returns:
        The answer, or `None` if the text marks none.

    >>> texts = ("<think>\\boxed{1}</think> so \\boxed{2}", "<answer> 5 </answer>", "5")
    >>> [extract_final_answer(text) for text in texts]
    ['2', '5', None]
    >>> extract_final_answer("48 / 2 = 24, 48 + 24 = 72\n#### 72")
    '72'
    """
    box = extract_boxed(text)
    if box is not None:
        return box
    # Not a regular expression: without a closing tag it would take quadratic time.
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    _, mark, after = text.rpartition("####")
    return after.strip().partition("\n")[0].strip() if mark else None


# --- numbers --------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,4}})?"
# At most one space between the parts: with ` *`, matching a page of blanks would take cubic time.
_NUMBER = (
    rf"[$€£¥]? ?(?P<sign>[-+\u2212]?) ?[$€£¥]? ?(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}}/\d))?"
    rf"(?P<top>{_UNSIGNED})(?: ?/ ?(?P<bottom>{_UNSIGNED}))?"
    r"(?: ?(?P<percent>\\?%))?"
)
_WHOLE_TEXT = re.compile(rf"{_NUMBER}(?:\s*\.)?")
"""Matches a text that is a number as a whole."""
_IN_TEXT = re.compile(rf"(?<![\w./]){_NUMBER}")
_FRAC = re.compile(r"\s?\\[dt]?frac(?: ?\{ ?([-+]?[\d.,]+) ?\} ?\{ ?([-+]?[\d.,]+) ?\}|(\d)(\d))")
_LATEX_MARKUP = re.compile(
    r"\\(?:left|right|[,;:! ])|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\\\$|\\\(|\\\)|\\\[|\\\]|(?<!\\)\$(?=\s*$)"
)

_MAX_DIGITS = 1000
"""Maximum number of digits. Longer numbers, which are slow to compute with, are not read."""

_Number: TypeAlias = tuple[Fraction, bool]
"""A number without its percent sign, and whether it has one."""


def parse_number(text: str) -> Fraction | None:
    r"""Parse a text that is a number as a whole.

    Thousands separators, currency signs, fractions (`3/4`, `2 1/2`, `\frac{3}{4}`), exponents, percent (a hundredth)
    and LaTeX markup (`\text{ cm}`, `\,`) are supported.

    Args:
        text: The text.

    Returns:
        The exact number, or `None`.

    >>> [str(parse_number(text)) for text in ("1,234.50", "-3/4", "50%", r"\frac{1}{2}", "1,2")]
    ['2469/2', '-3/4', '1/2', '1/2', 'None']
    """
    number = _parse_whole_text(text)
    return None if number is None else _apply_percent(number)


def extract_last_number(text: str) -> Fraction | None:
    """Extract the last number in a text.

    Args:
        text: The text.

    Returns:
        The exact number, or `None`.

    >>> extract_last_number("She has 3 apples, and 1,200.5 pears."), extract_last_number("none")
    (Fraction(2401, 2), None)
    """
    number = _find_last_number(text)
    return None if number is None else _apply_percent(number)


def _strip_latex(text: str) -> str:
    text = _FRAC.sub(r" \1\3/\2\4", text[: 8 * _MAX_DIGITS])  # the space: 3\frac{1}{2} is three and a half
    return _LATEX_MARKUP.sub("", text).strip()


def _parse_whole_text(text: str) -> _Number | None:
    return _parse_number(_WHOLE_TEXT.fullmatch(_strip_latex(text)))


def _apply_percent(number: _Number) -> Fraction:
    """Return the value of a number, in which a percent sign is a hundredth."""
    value, has_percent = number
    return value / 100 if has_percent else value


def _find_last_number(text: str) -> _Number | None:
    tail = _strip_latex(text[-8 * _MAX_DIGITS :])
    number = None
    for match in _IN_TEXT.finditer(tail):
        number = _parse_number(match) or number
    return number


def _parse_number(match: re.Match[str] | None) -> _Number | None:
    if match is None or len(match.group()) > _MAX_DIGITS:
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


# --- text and numbers -------------------------------------------------------------------------------------------------


def as_references(reference: Reference) -> list[str]:
    """Return the accepted answers of a reference, which is an answer or a list of answers, as texts.

    >>> as_references(["a", 5]), as_references("b")
    (['a', '5'], ['b'])
    """
    if isinstance(reference, str):
        return [reference]
    if isinstance(reference, Sequence) and reference:
        return [text for entry in reference for text in as_references(entry)]
    if reference is None or isinstance(reference, (Sequence, dict)):
        raise ValueError(f"reference: got {reference!r}, expected an answer or a list of answers")
    return [str(reference)]


def normalize_text(text: str) -> str:
    """Normalize a text for comparison: single spaces, case folded, no final period.

    Args:
        text: The text.

    Returns:
        The normalized text.

    >>> normalize_text("  The  Answer. ")
    'the answer'
    """
    return " ".join(text.split()).casefold().rstrip(".").rstrip()


def exact_match(response: str, reference: Reference, *, strict: bool = False) -> float:
    r"""Return 1 if the answer equals the reference, or one of several, after `normalize_text`; else 0.

    Args:
        response: The response. Its answer is the marked one (`extract_final_answer`), else the whole text.
        reference: The accepted answer, or a list of them.
        strict: Compare the whole response, character by character.

    Returns:
        1 or 0.

    Raises:
        ValueError: The reference is missing.

    >>> exact_match("The capital is \\boxed{Paris}.", "paris"), exact_match("Paris, I think", "Paris")
    (1.0, 0.0)
    >>> exact_match("B", ["A", "B"]), exact_match("Paris ", "Paris", strict=True)
    (1.0, 0.0)
    """
    references = as_references(reference)
    if strict:
        return float(response in references)
    answer = extract_final_answer(response)
    text = normalize_text(response if answer is None else answer)
    return float(any(text == normalize_text(_marked_answer(expected)) for expected in references))


def _marked_answer(reference: str) -> str:
    """Return the answer that a reference marks, such as a solution of GSM8K, else the reference."""
    marked = extract_final_answer(reference)
    return reference if marked is None else marked


def numeric_match(
    response: str, reference: Reference, *, tolerance: float = 1e-6, percent: Percent = "either"
) -> float:
    r"""Return 1 if the answer is the same number as the reference, else 0.

    Args:
        response: The response. Its answer is the marked number (`extract_final_answer`), else the last number.
        reference: The accepted number, or a list of them.
        tolerance: Tolerance, relative to references above 1.
        percent: Whether a percent sign is a `hundredth`, is `ignored`, or `either` of them may match.

    Returns:
        1 or 0.

    Raises:
        ValueError: The reference is not a number.

    >>> numeric_match("It costs $1,250.00 in all.", "1250"), numeric_match(r"\boxed{\frac{1}{3}}", "0.3333333")
    (1.0, 1.0)
    >>> numeric_match("12 or 13", 12), numeric_match("50%", "0.5"), numeric_match("50%", 50), numeric_match("?", 1)
    (0.0, 1.0, 1.0, 0.0)
    """
    check_float("tolerance", tolerance, 0, 1)
    check_choice("percent", percent, ("either", "hundredth", "ignored"))
    accepted = [_reference_number(text) for text in as_references(reference)]
    answer = extract_final_answer(response)
    number = _find_last_number(response) if answer is None else _parse_whole_text(answer) or _find_last_number(answer)
    return float(number is not None and any(_equal_numbers(number, other, tolerance, percent) for other in accepted))


def _reference_number(text: str) -> _Number:
    answer = _marked_answer(text)
    number = _parse_whole_text(answer) or _find_last_number(answer)
    if number is None:
        raise ValueError(f"reference: got {text[:80]!r}, expected a number")
    return number


def _equal_numbers(a: _Number, b: _Number, tolerance: float, percent: Percent) -> bool:
    pairs = []
    if percent != "ignored":
        pairs.append((_apply_percent(a), _apply_percent(b)))
    if percent != "hundredth":
        pairs.append((a[0], b[0]))
    return any(abs(x - y) <= Fraction(tolerance) * max(Fraction(1), abs(y)) for x, y in pairs)


def boxed_match(response: str, reference: Reference, *, tolerance: float = 1e-6) -> float:
    r"""Return 1 if the last `\boxed{...}` is the reference, as a text or as a number; 0 without a box.

    Args:
        response: The response.
        reference: The accepted answer, or a list of them.
        tolerance: Tolerance of numbers, relative to references above 1.

    Returns:
        1 or 0.

    >>> boxed_match(r"so \boxed{x + 1}", "x+1"), boxed_match(r"\boxed{72}", "#### 72"), boxed_match("72", "72")
    (1.0, 1.0, 0.0)
    """
    references = as_references(reference)
    answer = extract_boxed(response)
    if answer is None:
        return 0.0
    compact = "".join(normalize_text(answer).split())
    if any(compact == "".join(normalize_text(_marked_answer(expected)).split()) for expected in references):
        return 1.0
    number = _parse_whole_text(answer)
    if number is None:
        return 0.0
    for expected in references:
        other = _parse_whole_text(_marked_answer(expected))
        if other is not None and _equal_numbers(number, other, tolerance, "either"):
            return 1.0
    return 0.0


def think_boxed_format(response: str, *, opened: bool = False) -> float:
    r"""Return 1 if `<think>...</think>` ends before the first `\boxed{...}` and neither is empty; else 0.

    Args:
        response: The response.
        opened: Whether the prompt ends with `<think>`, as in some chat templates.

    Returns:
        1 or 0.

    >>> think_boxed_format(r"<think>x</think> \boxed{2}"), think_boxed_format(r"\boxed{2} <think>x</think>")
    (1.0, 0.0)
    >>> think_boxed_format(r"x</think> \boxed{2}"), think_boxed_format(r"x</think> \boxed{2}", opened=True)
    (0.0, 1.0)
    """
    text = "<think>" + response if opened else response
    start = text.find("<think>")
    end = text.find("</think>", max(start, 0))
    boxes = _find_boxes(text)
    if min(start, end) < 0 or not text[start + len("<think>") : end].strip() or not boxes:
        return 0.0
    box_start, content_start, content_end = boxes[0]
    return float(bool(text[content_start:content_end].strip()) and end + len("</think>") <= box_start)


def think_answer_format(response: str, *, opened: bool = False) -> float:
    """Return 1 if the response is `<think>...</think><answer>...</answer>`, with each tag once; else 0.

    Args:
        response: The response.
        opened: Whether the prompt ends with `<think>`.

    Returns:
        1 or 0.

    >>> think_answer_format("<think>hm</think>\\n<answer>5</answer>"), think_answer_format("<answer>5</answer>")
    (1.0, 0.0)
    """
    text = ("<think>" + response if opened else response).strip()
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0.0
    form = re.fullmatch(r"<think>(.*)</think>\s*<answer>(.*)</answer>", text, re.DOTALL)
    return float(form is not None and bool(form[1].strip()) and bool(form[2].strip()))


def gsm8k(response: str, reference: Reference, *, format_weight: float = 0.1) -> dict[str, float]:
    r"""Compute the usual reward of GSM8K: 0.9 for a correct boxed answer and 0.1 for its format.

    It equals the recipe {"gsm8k_rule": [("boxed_match", None, 0.9), ("think_boxed_format", None, 0.1)]}, except that in
    a response without a box, a number after the last `####` counts as boxed.

    Args:
        response: The response.
        reference: The accepted answer, or a solution of GSM8K.
        format_weight: Weight of the format.

    Returns:
        `reward`, and the metrics `accuracy` and `format`.

    >>> gsm8k(r"<think>6 * 12</think> \boxed{72}", "#### 72"), gsm8k(r"\boxed{72}", "72")["reward"]
    ({'reward': 1.0, 'accuracy': 1.0, 'format': 1.0}, 0.9)
    >>> gsm8k("6 * 12 = 72\n#### 72", "#### 72")["reward"], gsm8k("72", "#### 72")["reward"]
    (0.9, 0.0)
    """
    check_float("format_weight", format_weight, 0, 1)
    reasoning, mark, after = response.rpartition("####")
    answer = after.strip().partition("\n")[0]
    if mark and extract_boxed(response) is None and parse_number(answer) is not None:
        response = f"{reasoning}\\boxed{{{answer}}}"
    accuracy, form = boxed_match(response, reference), think_boxed_format(response)
    return {"reward": (1 - format_weight) * accuracy + format_weight * form, "accuracy": accuracy, "format": form}


# --- math -------------------------------------------------------------------------------------------------------------

_pool: ProcessPool | None = None
_pool_lock = threading.Lock()


def math_match(response: str, reference: Reference, *, time_limit: float = 10.0, precision: int = 6) -> float:
    r"""Return 1 if the answer is mathematically equal to the reference, else 0.

    math-verify finds the answer in the response: its last box, else LaTeX or an expression near its end. It supports
    sets, intervals, tuples, matrices, equations (`x = 3` for `3`), percent and units. Comparisons run in up to 4
    separate processes, except if the texts or numbers are equal.

    Args:
        response: The response.
        reference: The accepted answer, with or without a box or dollar signs, or a list of them.
        time_limit: Seconds after which a comparison is stopped and the answer counts as wrong.
        precision: Number of decimals that must agree.

    Returns:
        1 or 0.

    Raises:
        ValueError: The reference cannot be read.

    >>> math_match(r"so it is \boxed{\frac{2}{4}}", "1/2"), math_match(r"$x^2 + 2x + 1$", "(x + 1)^2")
    (1.0, 1.0)
    >>> math_match(r"\boxed{(1, 2]}", "[1, 2]"), math_match("I do not know", "7")
    (0.0, 0.0)
    """
    check_float("time_limit", time_limit, 0.01, 1e6)
    references = as_references(reference)
    answer = extract_final_answer(response)
    if answer is not None and any(_is_equal_text(answer, expected) for expected in references):
        return 1.0
    outcome = _get_pool().call((response, references, precision), time_limit)
    if outcome.stopped:
        return 0.0
    if outcome.fatal is not None:
        raise outcome.fatal(outcome.error)
    if outcome.error is not None:
        raise RuntimeError(f"math equivalence: {outcome.error}")
    return float(outcome.value)


def _is_equal_text(answer: str, reference: str) -> bool:
    expected = extract_final_answer(reference) or reference
    if normalize_text(answer) == normalize_text(expected):
        return True
    value = parse_number(answer)
    return value is not None and value == parse_number(expected)


def _get_pool() -> ProcessPool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ProcessPool(_Verifier(), min(4, os.cpu_count() or 1))
        return _pool


class _Verifier:
    """`_verify` for a process pool. Unpickling it imports SymPy, so that the import does not count in a time limit."""

    def __reduce__(self) -> Any:
        return _load_verifier, ()

    def __call__(self, response: str, references: list[str], precision: int) -> float:
        return _verify(response, references, precision)


def _load_verifier() -> _Verifier:
    with contextlib.suppress(ImportError):  # the call reports the missing package
        importlib.import_module("math_verify")
    return _Verifier()


def _verify(response: str, references: list[str], precision: int) -> float:
    """Compare a response with references by math-verify, without a time limit."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MissingExtraError("math equivalence needs math-verify: install the extra 'math' of Rollbook") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    expressions = []
    for reference in references:
        marked = extract_final_answer(reference)
        # math-verify finds intervals and single letters only inside a box.
        forms = (
            [reference] if "$" in reference else [f"\\boxed{{{reference if marked is None else marked}}}", reference]
        )
        expected = next((parsed for form in forms if (parsed := parse(form, parsing_timeout=None))), None)
        if expected is None:
            raise ValueError(f"reference: got {reference[:80]!r}, which math-verify cannot read")
        expressions.append(expected)
    try:
        answers = parse(response, parsing_timeout=None)
        return float(
            any(
                verify(expression, answers, float_rounding=precision, timeout_seconds=None)
                for expression in expressions
                if answers
            )
        )
    except Exception:  # SymPy raises many kinds of errors for malformed answers
        return 0.0


# --- JSON -------------------------------------------------------------------------------------------------------------

_MAX_ERRORS = 10
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)


def find_json_errors(text: str, schema: Json = None) -> list[str]:
    """Find the errors of a text that should be JSON and, optionally, match a JSON schema.

    `NaN`, duplicate keys and too deep nesting are errors. A schema's references to other documents are never fetched.

    Args:
        text: JSON, or a text whose last fenced block is JSON.
        schema: A JSON schema.

    Returns:
        The errors, at most 10; empty if there are none.

    >>> find_json_errors('{"age": 3}', {"type": "object", "required": ["name"]})
    ["$: 'name' is a required property"]
    >>> find_json_errors('{"age": ')
    ['not JSON: Expecting value: line 1 column 9 (char 8)']
    """
    try:
        value = _parse_json(text)
    except (ValueError, RecursionError) as error:
        return [f"not JSON: {str(error)[:200]}"]
    if schema is None:
        return []
    try:
        problems = sorted(
            _validator(json.dumps(schema)).iter_errors(value), key=lambda error: list(map(str, error.path))
        )
    except RecursionError:
        return ["$: nested too deep to be checked"]
    return [f"{error.json_path}: {error.message[:200]}" for error in problems[:_MAX_ERRORS]]


def _parse_json(text: str) -> Any:
    """Parse a text that is JSON, or whose last fenced block is."""
    blocks = _FENCE.findall(text)
    return json.loads(blocks[-1] if blocks else text, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("duplicate key")
    return mapping


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    try:
        import jsonschema
        from referencing import Registry
    except ImportError:
        raise MissingExtraError("a JSON schema needs jsonschema: install the extra 'json' of Rollbook") from None
    document = json.loads(schema)
    validator = jsonschema.validators.validator_for(document, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(document)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: got an invalid JSON schema: {error.message[:200]}") from None
    if isinstance(document, dict) and document and not document.keys() & validator.VALIDATORS.keys():
        names = ", ".join(map(repr, list(document)[:8]))
        raise ValueError(f"schema: got the keys {names}, expected a JSON schema: none of them checks anything")
    return validator(document, registry=Registry())


def json_match(response: str, reference: Reference) -> float:
    """Return 1 if the response is JSON with the value of the reference, else 0.

    Numbers are compared by value: `1` equals `1.0`, but not `true`. The order of keys does not matter.

    Args:
        response: JSON, or a text whose last fenced block is JSON.
        reference: A value, or its JSON text. A text that is not JSON is a string.

    Returns:
        1 or 0.

    Raises:
        ValueError: The reference is missing, or is not a JSON value.

    >>> json_match('{"a": 1.0, "b": [true]}', {"b": [True], "a": 1}), json_match('{"z": 9}', '{"a": 1}')
    (1.0, 0.0)
    """
    if reference is None:
        raise ValueError("reference: got None, expected a value, or its JSON text ('null' for none)")
    try:
        expected = json.loads(reference) if isinstance(reference, str) else json.loads(json.dumps(reference))
    except TypeError as error:
        raise ValueError(f"reference: got {type(reference).__name__}, expected a JSON value ({error})") from None
    except ValueError:
        expected = reference
    try:
        return float(_equal_json(_parse_json(response), expected))
    except (ValueError, RecursionError):
        return 0.0


def _equal_json(a: Json, b: Json) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal_json, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def json_schema(response: str, reference: Reference = None, *, schema: Json = None) -> dict[str, float]:
    """Return a reward of 1 if the response is JSON that satisfies a schema, else 0.

    Args:
        response: JSON, or a text whose last fenced block is JSON.
        reference: The schema, or its JSON text, if `schema` is not given.
        schema: The schema of all samples (`as_reward("json_schema", schema=...)`).

    Returns:
        `reward`, and the metrics `json` (whether it is JSON) and `errors` (number of errors of `find_json_errors`).

    Raises:
        ValueError: The schema is missing or invalid.

    >>> shape = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    >>> json_schema('{"age": 3}', shape), json_schema('{"age": "three"}', shape)["reward"], json_schema("three", shape)
    ({'reward': 1.0, 'json': 1.0, 'errors': 0.0}, 0.0, {'reward': 0.0, 'json': 0.0, 'errors': 1.0})
    >>> json_schema('{"z": 9}', {"a": 1})
    Traceback (most recent call last):
        ...
    ValueError: schema: got the keys 'a', expected a JSON schema: none of them checks anything
    """
    expected = schema if schema is not None else reference
    if isinstance(expected, str):
        try:
            expected = json.loads(expected)
        except ValueError as error:
            raise ValueError(f"schema: got {expected[:80]!r}, expected JSON ({error})") from None
    if not isinstance(expected, (dict, bool)):
        raise ValueError(f"schema: got {type(expected).__name__}, expected a JSON schema, or one as the reference")
    errors = find_json_errors(response, expected)
    is_json = not (errors and errors[0].startswith("not JSON"))
    return {"reward": float(not errors), "json": float(is_json), "errors": float(len(errors))}


# --- length and repetition --------------------------------------------------------------------------------------------

Unit = Literal["tokens", "words", "characters"]


def _split_units(responses: Sequence[str], ids: Sequence[Sequence[int]], unit: Unit) -> list[list[int]]:
    """Split each response into units, and return them as integers; equal units have equal integers."""
    check_choice("unit", unit, ("tokens", "words", "characters"))
    if unit == "tokens":
        for i, (text, row) in enumerate(zip(responses, ids, strict=True)):
            if text and not len(row):
                raise ValueError(f"response_ids: missing for sample {i}; pass them or unit='words'")
        return [list(row) for row in ids]
    if unit == "characters":
        return [[ord(mark) for mark in text] for text in responses]
    seen: dict[str, int] = {}
    return [[seen.setdefault(word, len(seen)) for word in text.split()] for text in responses]


@batched
def length(
    responses: Sequence[str],
    response_ids: Sequence[Sequence[int]],
    *,
    target: int = 1024,
    per_unit: float = 0.001,
    max_penalty: float = 1.0,
    unit: Unit = "tokens",
) -> list[float]:
    """Compute penalties for lengths above a target (`rollbook.algorithms.shaping.length_penalty`).

    Args:
        responses: [B] The responses.
        response_ids: [B] Their token ids.
        target: Length without a penalty.
        per_unit: Penalty per unit above the target.
        max_penalty: Largest penalty.
        unit: Unit of length.

    Returns:
        [B] The penalties, 0 or negative.

    >>> length(["a b c", "a"], [[], []], target=1, per_unit=0.25, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import length_penalty

    sizes = [len(row) for row in _split_units(responses, response_ids, unit)]
    penalties: list[float] = length_penalty(sizes, target=target, per_token=per_unit, max_penalty=max_penalty).tolist()
    return penalties


@batched
def repetition(
    responses: Sequence[str],
    response_ids: Sequence[Sequence[int]],
    *,
    n: int = 4,
    max_penalty: float = 1.0,
    unit: Unit = "tokens",
) -> list[float]:
    """Compute penalties for repeated n-grams (`rollbook.algorithms.shaping.repetition_penalty`).

    Args:
        responses: [B] The responses.
        response_ids: [B] Their token ids.
        n: Length of the n-grams.
        max_penalty: Largest penalty.
        unit: Unit of the n-grams.

    Returns:
        [B] The penalties, 0 or negative.

    >>> repetition(["a b a b a", "a b c d"], [[], []], n=2, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import repetition_penalty

    rows = _split_units(responses, response_ids, unit)
    penalties: list[float] = repetition_penalty(rows, n=n, max_penalty=max_penalty).tolist()
    return penalties
