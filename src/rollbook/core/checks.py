"""Argument checks: return the value, or raise `ValueError` with its name, the value and what was expected."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from math import nan
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")


def suggest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest name, and all names.

    Args:
        name: The unknown name.
        names: The known names.

    Returns:
        The text, to be appended to the message.

    >>> suggest("epsilon", ["eps", "gamma"]), suggest("beta", ["eps", "gamma"])
    ("; did you mean 'eps'? (eps, gamma)", '; choose from eps, gamma')
    >>> suggest("refrence", ["ref", "reference"]), suggest("learning_rate", ["lr", "eps"])
    ("; did you mean 'reference'? (ref, reference)", "; did you mean 'lr'? (lr, eps)")
    >>> suggest("grad_clip", ["lr", "max_grad_norm"])
    "; did you mean 'max_grad_norm'? (lr, max_grad_norm)"
    """
    names, name = list(names), str(name)
    by_lower = {candidate.lower(): candidate for candidate in names}
    words = name.split("_")
    # A misspelling first; then names that are part of the unknown one (mask for action_mask, eps for epsilon) or its
    # initials (lr for learning_rate); then any similar name, and one that shares a word.
    guesses = [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.85)]
    guesses += [
        candidate
        for candidate in names
        if candidate in words
        or (len(candidate) > 2 and name.startswith(candidate))
        or (len(candidate) > 1 and candidate == "".join(word[:1] for word in words))
    ]
    guesses += [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    guesses += [candidate for candidate in names if {word for word in words if len(word) > 2} & {*candidate.split("_")}]
    if guesses:
        return f"; did you mean {guesses[0]!r}? ({', '.join(names)})"
    return f"; choose from {', '.join(names)}" if names else "; none exist"


def describe_range(
    kind: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    """Describe the allowed values of a number, for errors and documentation.

    Args:
        kind: `a number` or `an integer`.
        low: Lower bound.
        high: Upper bound.
        above: Lower bound, itself excluded.
        below: Upper bound, itself excluded.

    Returns:
        The description.

    >>> describe_range("an integer", low=1), describe_range("an integer", low=0, high=10**6)
    ('an integer >= 1', 'an integer from 0 to 1,000,000')
    >>> describe_range("a number", above=0), describe_range("a number", above=0, high=1)
    ('a number > 0', 'a number in (0, 1]')
    """
    # Infinite bounds are none.
    low, high = (None if bound in (float("-inf"), float("inf")) else bound for bound in (low, high))
    smallest, largest = low if above is None else above, high if below is None else below
    if smallest is None or largest is None:
        limits = [
            *([f"{'>=' if above is None else '>'} {_format_bound(smallest)}"] if smallest is not None else []),
            *([f"{'<=' if below is None else '<'} {_format_bound(largest)}"] if largest is not None else []),
        ]
        return " ".join([kind, *limits])
    if above is None and below is None:
        return f"{kind} from {_format_bound(smallest)} to {_format_bound(largest)}"
    # No thousands separators next to the comma of the interval.
    bounds = ", ".join(_format_bound(bound).replace(",", "") for bound in (smallest, largest))
    return f"{kind} in {'[' if above is None else '('}{bounds}{']' if below is None else ')'}"


def _format_bound(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def check_choice(name: str, value: T, choices: tuple[T, ...]) -> None:
    """Raise `ValueError` if a value is not one of the choices.

    >>> check_choice("side", "top", ("left", "right"))
    Traceback (most recent call last):
        ...
    ValueError: side: got 'top', expected one of 'left', 'right'
    """
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_float(
    name: str, value: object, low: float = float("-inf"), high: float = float("inf"), expected: str = ""
) -> float:
    """Check a number.

    Args:
        name: Name of the argument.
        value: A real number, not a bool or NaN.
        low: Smallest value.
        high: Largest value.
        expected: Description of what is expected; by default the range.

    Returns:
        The number as a float.

    Raises:
        ValueError: The value is not a number, or out of range.

    >>> check_float("top_p", 1, 0, 1)
    1.0
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        number = nan
    if not low <= number <= high:
        raise ValueError(f"{name}: got {value!r}, expected {expected or describe_range('a number', low, high)}")
    return number


def check_bool(name: str, value: bool) -> bool:
    """Check a bool. Other values, such as 1 or "false", raise `ValueError`.

    >>> check_bool("whiten", True)
    True
    """
    kind = type(value)
    # numpy's bool by name: the command line starts without importing numpy.
    if kind is not bool and (kind.__module__, kind.__name__) not in (("numpy", "bool"), ("numpy", "bool_")):
        raise ValueError(f"{name}: got {value!r}, expected True or False")
    return bool(value)


def check_int(name: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """Check an integer.

    Args:
        name: Name of the argument.
        value: An integer, not a bool.
        low: Smallest value.
        high: Largest value, or `None` for no limit.

    Returns:
        The number as an int.

    Raises:
        ValueError: The value is not an integer, or out of range.

    >>> check_int("group_size", 0, 1)
    Traceback (most recent call last):
        ...
    ValueError: group_size: got 0, expected an integer >= 1
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}: got {value!r}, expected {describe_range('an integer', low, high)}")
    return number
