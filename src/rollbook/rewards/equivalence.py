r"""`math_match`: whether two mathematical answers are the same, by math-verify (and SymPy), under a limit that holds.

Invariant: a comparison that hangs, crashes or raises is stopped and makes the answer wrong: a response that cannot be
compared must not go without a reward. Neither threads nor event loops are touched by signals, which math-verify's own
limits need and which only a main thread may use.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from typing import Any

from rollbook.core.checks import check_float
from rollbook.rewards.answers import as_number, final_answer, plain, references
from rollbook.rewards.pools import MissingExtra, Processes

_pool: Processes | None = None
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
    right = references(reference)
    answer = final_answer(response)
    if answer is not None and any(_same(answer, one) for one in right):
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
    own = final_answer(reference) or reference
    if plain(answer) == plain(own):
        return True
    value = as_number(answer)
    return value is not None and value == as_number(own)


def _processes() -> Processes:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = Processes(_Verifier(), min(4, os.cpu_count() or 1))
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
        raise MissingExtra("math equivalence needs math-verify: pip install 'rollbook[math]'") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits that are off: ours is not
    expressions = []
    for one in right:
        marked = final_answer(one)
        # A bare answer is read as a box: outside of one, an interval or a letter is not found.
        forms = [one] if "$" in one else [f"\\boxed{{{one if marked is None else marked}}}", one]
        expected = next((parsed for form in forms if (parsed := parse(form, parsing_timeout=None))), None)
        if expected is None:
            raise ValueError(f"reference: got {one[:80]!r}, which math-verify cannot read")
        expressions.append(expected)
    try:
        found = parse(response, parsing_timeout=None)
        return float(
            any(verify(one, found, float_rounding=precision, timeout_seconds=None) for one in expressions if found)
        )
    except Exception:  # SymPy raises whatever it likes of what a model wrote
        return 0.0
