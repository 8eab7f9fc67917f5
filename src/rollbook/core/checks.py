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
    ("; did you mean 'eps'? (eps, gamma)", '; there are (eps, gamma)')
    >>> suggest("refrence", ["ref", "reference"]), suggest("learning_rate", ["lr", "eps"])
    ("; did you mean 'reference'? (ref, reference)", "; did you mean 'lr'? (lr, eps)")
    """
    names, name = list(names), str(name)
    by_lower = {candidate.lower(): candidate for candidate in names}
    words = name.split("_")
    # A misspelling first; then names that are part of the unknown one (mask for action_mask, eps for epsilon) or its
    # initials (lr for learning_rate); then any similar name.
    guesses = [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.85)]
    guesses += [
        candidate
        for candidate in names
        if candidate in words
        or (len(candidate) > 2 and name.startswith(candidate))
        or (len(candidate) > 1 and candidate == "".join(word[:1] for word in words))
    ]
    guesses += [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    guess = f"; did you mean {guesses[0]!r}?" if guesses else "; there are"
    return f"{guess} ({', '.join(names) or 'none'})"


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
        raise ValueError(f"{name}: got {value!r}, expected {expected or f'a number from {low:g} to {high:g}'}")
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
    """Check a whole number.

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
    ValueError: group_size: got 0, expected a whole number from 1 on
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        limit = "on" if high is None else f"to {high:,}"
        raise ValueError(f"{name}: got {value!r}, expected a whole number from {low} {limit}")
    return number
