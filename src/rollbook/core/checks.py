"""Argument checks: return the value, or raise `ValueError` with its name, the value and what was expected."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping
from math import nan
from numbers import Real
from typing import Any


def suggest(name: str, names: Mapping[str, Any] | list[str]) -> str:
    """What to say of a name that is not known: the nearest that is, and all."""
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1)
    # action_mask: mask; epsilon: eps
    inside = [
        candidate
        for candidate in names
        if candidate in str(name).split("_") or (len(candidate) > 2 and str(name).startswith(candidate))
    ]
    guess = f"; did you mean {(inside or [lower[close[0]]])[0]!r}?" if inside or close else "; there are"
    return f"{guess} ({', '.join(names) or 'none'})"


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_float(
    name: str, value: object, low: float = float("-inf"), high: float = float("inf"), what: str = ""
) -> float:
    """A number within its bounds (infinity too, where they allow it), else an error that says so."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        number = nan
    if not low <= number <= high:
        raise ValueError(f"{name}: got {value!r}, expected {what or f'a number from {low:g} to {high:g}'}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one of them (the text "false" would be true).

    >>> check_bool("whiten", True)
    True
    """
    kind = type(value)
    # By name: numpy is not imported, since the command line starts without it.
    if kind is not bool and (kind.__module__, kind.__name__) not in (("numpy", "bool"), ("numpy", "bool_")):
        raise ValueError(f"{name}: got {value!r}, expected True or False")
    return bool(value)


def check_int(name: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """A whole number within its bounds, else an error that says so."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        end = "on" if high is None else f"to {high:,}"
        raise ValueError(f"{name}: got {value!r}, expected a whole number from {low} {end}")
    return number
