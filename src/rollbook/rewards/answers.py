"""Built-in reward functions: compare answers (exact, numeric, boxed, symbolic, JSON) or check a response's form.

Invariant: they look at the response alone. A response without a readable answer scores 0; a missing or unreadable
reference is an error. Length and repetition are those of `rollbook.algorithms.shaping`.
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
from typing import Any, Literal

from rollbook.core.checks import check_choice, check_float
from rollbook.rewards.functions import MissingExtraError, ProcessPool, batched

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
    boxes: list[tuple[int, int, int]] = []
    openings = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
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
    read = _parse_number(_WHOLE.fullmatch(_strip_latex(text)))
    return None if read is None else read[0] / (100 if read[1] else 1)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, else `None`.

    >>> last_number("She has 3 apples, and 1,200.5 pears."), last_number("none")
    (Fraction(2401, 2), None)
    """
    read = _last_number(text)
    return None if read is None else read[0] / (100 if read[1] else 1)


def _strip_latex(text: str) -> str:
    text = _FRAC.sub(r" \1\3/\2\4", text[: 8 * _MOST_DIGITS])  # the space: 3\frac{1}{2} is three and a half
    return _DRESS.sub("", text).strip()


def _last_number(text: str) -> tuple[Fraction, bool] | None:
    tail = _strip_latex(text[-8 * _MOST_DIGITS :])
    number = None
    for match in _INSIDE.finditer(tail):
        number = _parse_number(match) or number
    return number


def _parse_number(match: re.Match[str] | None) -> tuple[Fraction, bool] | None:
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


def as_references(reference: Any) -> list[str]:
    """The answers that count as right: one, or a list of them, as texts.

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
    """A text as answers are compared: no outer space, inner space single, case folded, no final full stop.

    >>> normalize_text("  The  Answer. ")
    'the answer'
    """
    return " ".join(text.split()).casefold().rstrip(".").rstrip()


def exact_match(response: str, reference: Any, *, strict: bool = False) -> float:
    r"""1 if the answer is (one of) the reference(s), else 0.

    The answer is what the response marks as such (`final_answer`), else all of it; both are compared after
    `normalize_text`. `strict`: the whole response, character by character.

    >>> exact_match("The capital is \\boxed{Paris}.", "paris"), exact_match("Paris, I think", "Paris")
    (1.0, 0.0)
    >>> exact_match("B", ["A", "B"]), exact_match("Paris ", "Paris", strict=True)
    (1.0, 0.0)
    """
    right = as_references(reference)
    if strict:
        return float(response in right)
    answer = final_answer(response)
    text = normalize_text(response if answer is None else answer)
    return float(any(text == normalize_text(_marked_answer(expected)) for expected in right))


def _marked_answer(reference: str) -> str:
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
    rights = [_reference_number(text) for text in as_references(reference)]
    answer = final_answer(response)
    number = (
        _last_number(response)
        if answer is None
        else _parse_number(_WHOLE.fullmatch(_strip_latex(answer))) or _last_number(answer)
    )
    return float(number is not None and any(_equal_numbers(number, right, tolerance, percent) for right in rights))


def _reference_number(text: str) -> tuple[Fraction, bool]:
    answer = _marked_answer(text)
    number = _parse_number(_WHOLE.fullmatch(_strip_latex(answer))) or _last_number(answer)
    if number is None:
        raise ValueError(f"reference: got {text[:80]!r}, expected a number")
    return number


def _equal_numbers(a: tuple[Fraction, bool], b: tuple[Fraction, bool], tolerance: float, percent: Percent) -> bool:
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
    right = as_references(reference)
    answer = boxed(response)
    if answer is None:
        return 0.0
    bare = "".join(normalize_text(answer).split())
    if any(bare == "".join(normalize_text(_marked_answer(expected)).split()) for expected in right):
        return 1.0
    number = _parse_number(_WHOLE.fullmatch(_strip_latex(answer)))
    if number is None:
        return 0.0
    for expected in right:
        value = _parse_number(_WHOLE.fullmatch(_strip_latex(_marked_answer(expected))))
        if value is not None and _equal_numbers(number, value, tolerance, "either"):
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


_pool: ProcessPool | None = None
_pool_lock = threading.Lock()


def math_match(response: str, reference: Any, *, time_limit: float = 10.0, precision: int = 6) -> float:
    r"""1 if the answer equals the reference as mathematics, else 0.

    The answer is what math-verify finds in the response: its last box, else LaTeX or an expression near its end. Sets,
    intervals, tuples, matrices, equations (`x = 3` for `3`), percent and units are understood. `precision`: decimals
    that must agree. A reference is an answer, with or without a box or dollar signs, or a list of them.

    Comparisons run in processes of their own (up to 4), started when first needed. One that is not done after
    `time_limit` seconds is killed, and the answer is wrong. Only a reference that cannot be read is an error. Texts and
    plain numbers that are equal as they stand are not sent there.

    >>> math_match(r"so it is \boxed{\frac{2}{4}}", "1/2"), math_match(r"$x^2 + 2x + 1$", "(x + 1)^2")
    (1.0, 1.0)
    >>> math_match(r"\boxed{(1, 2]}", "[1, 2]"), math_match("I do not know", "7")
    (0.0, 0.0)
    """
    check_float("time_limit", time_limit, 0.01, 1e6)
    right = as_references(reference)
    answer = final_answer(response)
    if answer is not None and any(_same(answer, expected) for expected in right):
        return 1.0
    outcome = _processes().call((response, right, precision), time_limit)
    if outcome.stopped:
        return 0.0
    if outcome.fatal is not None:
        raise outcome.fatal(outcome.error)
    if outcome.error is not None:
        raise RuntimeError(f"math equivalence: {outcome.error}")
    return float(outcome.value)


def _same(answer: str, reference: str) -> bool:
    expected = final_answer(reference) or reference
    if normalize_text(answer) == normalize_text(expected):
        return True
    value = as_number(answer)
    return value is not None and value == as_number(expected)


def _processes() -> ProcessPool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ProcessPool(_Verifier(), min(4, os.cpu_count() or 1))
        return _pool


class _Verifier:
    """`_verified`, which in another process comes with SymPy loaded: that takes longer than most comparisons, and is
    not to count in anybody's limit."""

    def __reduce__(self) -> Any:
        return _ready, ()

    def __call__(self, response: str, right: list[str], precision: int) -> float:
        return _verified(response, right, precision)


def _ready() -> _Verifier:
    with contextlib.suppress(ImportError):  # the call says what is missing
        importlib.import_module("math_verify")
    return _Verifier()


def _verified(response: str, right: list[str], precision: int) -> float:
    """The comparison itself, without a limit."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MissingExtraError("math equivalence needs math-verify: pip install 'rollbook[math]'") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits that are off: ours is not
    expressions = []
    for reference in right:
        marked = final_answer(reference)
        # A bare answer is read as a box: outside of one, an interval or a letter is not found.
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
    except Exception:  # SymPy raises whatever it likes of what a model wrote
        return 0.0


_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)


def json_errors(text: str, schema: Any = None, *, most: int = 10) -> list[str]:
    """What is wrong with a text as JSON, or with its value by a schema; nothing, if it is as it should be.

    The text is JSON as a whole, or its last fenced block (three back ticks) is. `NaN`, duplicate keys and nesting that
    is too deep to read are errors. References in a schema to other documents are never fetched.

    >>> json_errors('{"age": 3}', {"type": "object", "required": ["name"]})
    ["$: 'name' is a required property"]
    >>> json_errors('{"age": ')
    ['not JSON: Expecting value: line 1 column 9 (char 8)']
    """
    try:
        value = _value(text)
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
    return [f"{error.json_path}: {error.message[:200]}" for error in problems[:most]]


def _value(text: str) -> Any:
    """The value of a text that is JSON, or whose last fenced block is."""
    blocks = _FENCE.findall(text)
    return json.loads(blocks[-1] if blocks else text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is there twice")
    return mapping


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    try:
        import jsonschema
        from referencing import Registry
    except ImportError:
        raise MissingExtraError("a JSON schema needs jsonschema: pip install 'rollbook[json]'") from None
    plain = json.loads(schema)
    kind = jsonschema.validators.validator_for(plain, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(plain)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: got one that is none: {error.message[:200]}") from None
    if isinstance(plain, dict) and plain and not plain.keys() & kind.VALIDATORS.keys():
        names = ", ".join(map(repr, list(plain)[:8]))
        raise ValueError(f"schema: got the keys {names}, expected a JSON schema: none of them checks anything")
    return kind(plain, registry=Registry())


def json_match(response: str, reference: Any) -> float:
    """1 if the response is JSON of the same value as the reference, else 0.

    reference: a value, or its JSON text (a text that is no JSON stands for itself). Numbers are equal by their value
    (`1` is `1.0`, `true` is neither), objects whatever the order of their keys. `json_schema` asks for a form instead.

    >>> json_match('{"a": 1.0, "b": [true]}', {"b": [True], "a": 1}), json_match('{"z": 9}', '{"a": 1}')
    (1.0, 0.0)
    """
    if reference is None:
        raise ValueError("reference: got None, expected a value, or its JSON text ('null' for none)")
    try:
        right = json.loads(reference) if isinstance(reference, str) else json.loads(json.dumps(reference))
    except TypeError as error:
        raise ValueError(f"reference: got {type(reference).__name__}, expected what JSON can say ({error})") from None
    except ValueError:
        right = reference
    try:
        return float(_equal_json(_value(response), right))
    except (ValueError, RecursionError):
        return 0.0


def _equal_json(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal_json, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def json_schema(response: str, reference: Any = None, *, schema: Any = None) -> dict[str, float]:
    """1 if the response is JSON that keeps the schema, else 0; `json` (it is JSON at all) and `errors` are metrics.

    schema: given once for all samples (`as_reward("json_schema", schema=...)`), else each sample's reference, a
    mapping or its JSON text. `json_errors` says what is wrong in words.

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
    wrong = json_errors(response, expected)
    parsed = not (wrong and wrong[0].startswith("not JSON"))
    return {"reward": float(not wrong), "json": float(parsed), "errors": float(len(wrong))}


Unit = Literal["tokens", "words", "characters"]


def _units(responses: Sequence[str], ids: Sequence[Sequence[int]], unit: Unit) -> list[list[int]]:
    """Each response as numbers that are equal where its units are."""
    check_choice("unit", unit, ("tokens", "words", "characters"))
    if unit == "tokens":
        for i, (text, row) in enumerate(zip(responses, ids, strict=True)):
            if text and not len(row):
                raise ValueError(f"response_ids: got none for sample {i}, expected them, or unit='words'")
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
    """[B] What each response loses for its length over `target`: `penalties.length_penalty`.

    >>> length(["a b c", "a"], [[], []], target=1, per_unit=0.25, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import length_penalty

    sizes = [len(row) for row in _units(responses, response_ids, unit)]
    if not sizes:
        return []
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
    """[B] What each response loses for repeating itself, by its n-grams: `penalties.repetition_penalty`.

    >>> repetition(["a b a b a", "a b c d"], [[], []], n=2, unit="words")
    [-0.5, 0.0]
    """
    from rollbook.algorithms.shaping import repetition_penalty

    rows = _units(responses, response_ids, unit)
    penalties: list[float] = repetition_penalty(rows, n=n, max_penalty=max_penalty).tolist() if rows else []
    return penalties
