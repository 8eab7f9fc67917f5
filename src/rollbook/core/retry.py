"""Trying again: how long to wait, how often, and after what.

Invariant: only what may succeed when it is asked again is asked again, and the waits between grow and are bounded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollbook.core.checks import check_float, check_int

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Waits that grow: `first` seconds, then `factor` times longer each time, never more than `most`, for at most
    `tries` tries in all; each wait is drawn from the last `jitter` share of its length, so that clients spread out.

    >>> [round(wait, 2) for wait in Backoff(tries=4, first=0.5, jitter=0.0).waits()]
    [0.5, 1.0, 2.0]
    """

    tries: int = 5
    first: float = 0.5
    factor: float = 2.0
    most: float = 30.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        check_int("tries", self.tries, 1)
        check_float("first", self.first, 0, 1e6)
        check_float("factor", self.factor, 1, 1e6)
        check_float("most", self.most, 0, 1e6)
        check_float("jitter", self.jitter, 0, 1)

    def waits(self) -> Iterator[float]:
        """The waits between one call's tries."""
        length = self.first
        for _ in range(self.tries - 1):
            yield min(length, self.most) * (1 - self.jitter * random.random())
            length *= self.factor


def asked_wait(headers: Mapping[str, str], most: float = 60.0) -> float:
    """How long a server asks to be left alone, by its `retry-after` header in seconds; 0 if it does not say.

    >>> asked_wait({"retry-after": "2"}), asked_wait({}), asked_wait({"retry-after": "soon"})
    (2.0, 0.0, 0.0)
    """
    try:
        return min(max(0.0, float(headers.get("retry-after", 0))), most)  # in this order NaN is 0
    except ValueError:
        return 0.0
