"""Measurements: the numbers of a run by its steps (loss, reward, length ...), kept in the ledger as events.

Invariant: what is read back is what was logged in the lineage of the surviving weights: a rewind leaves out what came
after its checkpoint, and nothing is erased. Every number survives, those that are not finite too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from rollbook.book import work
from rollbook.book.errors import CorruptBookError
from rollbook.book.ledger import parsed
from rollbook.core.checks import check_int

if TYPE_CHECKING:
    from rollbook.book.book import Book

METRICS_KIND = "metrics"
"""Of the events: `step` is the step's number, `detail` the numbers by name."""
_MOST = 1 << 63


def json_number(metrics: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Numbers by name, as strict JSON has them: NaN and infinity are the texts that `float` (and SQL's CAST) reads.

    >>> import numpy as np
    >>> json_number({"loss": np.float32(0.5), "kl": float("nan"), "low": -float("inf"), "tokens": 7})
    {'loss': 0.5, 'kl': 'NaN', 'low': '-Infinity', 'tokens': 7}
    >>> json_number({"loss": "0.5"})
    Traceback (most recent call last):
        ...
    ValueError: metrics['loss']: got '0.5', expected an int or a float
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics: got {type(metrics).__name__}, expected numbers by name")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"metrics: got the name {name!r}, expected a text that is not empty")
    return name


def _number(name: str, value: Any) -> int | float | str:
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        hint = "; .item() gives a tensor's" if hasattr(value, "item") else ""
        raise ValueError(f"metrics[{name!r}]: got {str(value)[:60]!r}, expected an int or a float{hint}")
    if isinstance(value, Integral) and -_MOST <= int(value) < _MOST:
        return int(value)
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"metrics[{name!r}]: got {value.__class__.__name__}, too large for a float") from None
    if math.isfinite(found):
        return found
    return "NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity"


def finite_numbers(told: Mapping[str, Any], what: str) -> dict[str, float]:
    """Numbers from what `json_number` made of them, which anybody may have written.

    >>> finite_numbers({"loss": 0.5, "kl": "NaN", "tokens": 7}, "a line")
    {'loss': 0.5, 'kl': nan, 'tokens': 7}
    """
    found: dict[str, float] = {}
    for name, value in told.items():
        if value in ("NaN", "Infinity", "-Infinity"):
            found[name] = float(value)
        elif type(value) in (int, float):
            found[name] = value
        else:
            raise CorruptBookError(f"{what}: {name}: got {str(value)[:60]!r}, expected a number")
    return found


def log_metrics(book: Book, step: int, metrics: Mapping[str, Any]) -> None:
    """See `Book.log`."""
    if check_int("step", step) >= _MOST:
        raise ValueError(f"step: got {step}, expected a whole number of 64 bits")
    event = work.Event(METRICS_KIND, step=int(step), detail=json_number(metrics))
    with book.ledger.write() as tx:
        work.record_events(tx, [event])


def read_metrics(book: Book) -> list[tuple[int, dict[str, float]]]:
    """See `Book.metrics`."""
    with book.ledger.read() as tx:
        # Events of no record are few, and together in the index.
        found = tx.all(
            "SELECT id, kind, step, detail FROM events WHERE seq IS NULL AND kind IN ('metrics', 'rewound') ORDER BY id"
        )
    kept: list[tuple[int, int, dict[str, float]]] = []
    for event, kind, step, detail in found:
        told = parsed(detail, f"event {event}")
        if kind == METRICS_KIND:
            if type(step) is not int:
                raise CorruptBookError(f"event {event}: step: got {step!r}, expected a whole number")
            kept.append((event, step, finite_numbers(told, f"event {event}")))
        else:
            back = told.get("event")
            if type(back) is not int:
                raise CorruptBookError(
                    f"event {event}: got {str(told)[:60]!r}, expected the checkpoint that was gone back to"
                )
            while kept and kept[-1][0] > back:
                kept.pop()
    steps: dict[int, dict[str, float]] = {}
    for _, step, told in kept:
        steps.setdefault(step, {}).update(told)
    return sorted(steps.items())
