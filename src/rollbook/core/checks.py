"""Argument checks: return the value, or raise `ValueError` with its name, the value and what was expected."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping
from math import nan
from numbers import Real
from typing import Any


def _is_bool(value: Any) -> bool:
    """Whether a value is a bool, numpy's included. numpy is not imported: the command line starts without it."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """What to say of a name that is not known: the nearest that is, and all."""
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1)
    # action_mask: mask; epsilon: eps
    inside = [each for each in known if each in str(name).split("_") or (len(each) > 2 and str(name).startswith(each))]
    guess = f"; did you mean {(inside or [lower[close[0]]])[0]!r}?" if inside or close else "; there are"
    return f"{guess} ({', '.join(known) or 'none'})"


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_float(name: str, value: Any, low: float = float("-inf"), high: float = float("inf"), what: str = "") -> float:
    """A number within its bounds (infinity too, where they allow it), else an error that says so."""
    try:
        found = float(value) if isinstance(value, Real) and not _is_bool(value) else nan
    except OverflowError:
        found = nan
    if not low <= found <= high:
        bounds = what or f"a number from {low:g} to {high:g}"
        raise ValueError(f"{name}: got {value!r}, expected {bounds}")
    return found


def check_bool(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one of them (the text "false" would be true).

    >>> check_bool("whiten", True)
    True
    """
    if not _is_bool(value):
        raise ValueError(f"{name}: got {value!r}, expected True or False")
    return bool(value)


def check_int(name: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """A whole number within its bounds, else an error that says so."""
    try:
        found = operator.index(value)
    except TypeError:
        found = low - 1
    if _is_bool(value) or found < low or (high is not None and found > high):
        end = "on" if high is None else f"to {high:,}"
        raise ValueError(f"{name}: got {value!r}, expected a whole number from {low} {end}")
    return found
