"""Removers and limiters: what leaves a consumer's waiting room unused, and when it may take or others may bring.

Invariant: parts that could wait for each other for ever are refused when a consumer is built, not found out at night.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rollbook.core.checks import check_choice, check_float, check_int


@lru_cache(maxsize=64)
def exact(number: float) -> Fraction:
    """The number as it is written: sums of it are not off by a rounding, at which both sides could wait.

    >>> exact(0.1) * 3 == exact(0.3)
    True
    """
    return Fraction(repr(number))


def _at_least(bound: Fraction) -> str:
    """A number to write that is not below the bound."""
    near = float(bound)
    return repr(near if exact(near) >= bound else math.nextafter(near, math.inf)).removesuffix(".0")


@dataclass(frozen=True)
class MaxSize:
    """At most `size` records wait when records have come; the oldest (or those of the worst rank) make room for them.

    >>> MaxSize(10_000).drop
    'oldest'
    """

    size: int
    drop: str = "oldest"

    def __post_init__(self) -> None:
        check_int("MaxSize.size", self.size, 1)
        check_choice("MaxSize.drop", self.drop, ("oldest", "worst"))


@dataclass(frozen=True)
class MaxAge:
    """Nothing waits longer than `seconds` after it was admitted."""

    seconds: float

    def __post_init__(self) -> None:
        if not check_float("MaxAge.seconds", self.seconds, 0.0) > 0:
            raise ValueError(f"MaxAge.seconds: got {self.seconds!r}, expected a number above 0")


@dataclass(frozen=True)
class MaxUses:
    """A record is handed out until it was acknowledged `uses` times; `None`: for ever. Without this part: once."""

    uses: int | None

    def __post_init__(self) -> None:
        if self.uses is not None:
            check_int("MaxUses.uses", self.uses, 1)


@dataclass(frozen=True)
class MinSize:
    """Nothing is handed out before `size` records wait, rest or are leased."""

    size: int

    def __post_init__(self) -> None:
        check_int("MinSize.size", self.size, 1)


@dataclass(frozen=True)
class SamplesToInserts:
    """Keep the records handed out near `ratio` times the records brought, within `slack` records either way.

    Whoever is ahead waits: `append` while too much is unread (back-pressure), `lease` while too little is there. With
    `c = inserts * ratio - samples - min_size * ratio`, a lease of k needs `c - k >= -slack`, an append of m needs
    `c + m * ratio <= slack`. `lease_size` and `append_size` are the largest of each that will be asked for. What was
    given up (dropped, too old, too many) counts on neither side. Numbers mean what they print: 0.1 is a tenth.

    >>> SamplesToInserts(ratio=2.0, slack=64, lease_size=64, append_size=8).inserts_left(0, 0)
    32
    >>> SamplesToInserts(ratio=1.0, slack=4, lease_size=64, append_size=8)
    Traceback (most recent call last):
        ...
    ValueError: SamplesToInserts: with slack 4.0, leases of 64 and appends of 8 could wait for each other for ever; \
expected a slack of at least 36
    """

    ratio: float
    slack: float
    min_size: int = 0
    lease_size: int = 1
    append_size: int = 1

    def __post_init__(self) -> None:
        for name in ("ratio", "slack"):
            found = check_float(f"SamplesToInserts.{name}", getattr(self, name), 0.0, 1e15)
            object.__setattr__(self, name, found)
        if not self.ratio >= 1e-9:
            raise ValueError(f"SamplesToInserts.ratio: got {self.ratio!r}, expected a number above 0")
        check_int("SamplesToInserts.min_size", self.min_size)
        check_int("SamplesToInserts.lease_size", self.lease_size, 1)
        check_int("SamplesToInserts.append_size", self.append_size, 1)
        # Both wait when c - k < -slack and c + m * ratio > slack: possible if the window is narrower than both steps.
        # And where all that came has been handed out, c is 0 at most: an append has to fit in then.
        step = self.append_size * exact(self.ratio)
        needed = max((self.lease_size + step) / 2, step)
        if exact(self.slack) < needed:
            raise ValueError(
                f"SamplesToInserts: with slack {self.slack}, leases of {self.lease_size} and appends of "
                f"{self.append_size} could wait for each other for ever; expected a slack of at least "
                f"{_at_least(needed)}"
            )

    def _cursor(self, inserts: int, samples: int) -> Fraction:
        return (inserts - self.min_size) * exact(self.ratio) - samples

    def samples_left(self, inserts: int, samples: int) -> int:
        """How many records may be handed out now."""
        if inserts < self.min_size:
            return 0
        return max(math.floor(self._cursor(inserts, samples) + exact(self.slack)), 0)

    def inserts_left(self, inserts: int, samples: int) -> int:
        """How many records may be brought now."""
        return max(math.floor((exact(self.slack) - self._cursor(inserts, samples)) / exact(self.ratio)), 0)


REMOVERS: dict[str, type] = {kind.__name__: kind for kind in (MaxSize, MaxAge, MaxUses)}
LIMITERS: dict[str, type] = {kind.__name__: kind for kind in (MinSize, SamplesToInserts)}


def check_together(
    removers: tuple[Any, ...], limiters: tuple[Any, ...], uses: int | None, group_size: int | None, partial: bool
) -> None:
    """Raise `ValueError` if these parts could keep leases or appends waiting for ever."""
    for kind in (*REMOVERS.values(), *LIMITERS.values()):
        if sum(isinstance(part, kind) for part in (*removers, *limiters)) > 1:
            raise ValueError(f"{kind.__name__}: got it twice, expected it once")
    most = min((part.size for part in removers if isinstance(part, MaxSize)), default=None)
    for part in limiters:
        floor = part.size if isinstance(part, MinSize) else part.min_size
        if most is not None and floor > most:
            raise ValueError(
                f"{type(part).__name__}: nothing is handed out before {floor} records are there, and MaxSize keeps at "
                f"most {most}: no lease would ever be given"
            )
        if isinstance(part, SamplesToInserts) and uses is not None and part.ratio > uses:
            raise ValueError(
                f"SamplesToInserts.ratio: got {part.ratio}, but each record is handed out at most {uses} time(s): "
                "samples could never keep up and appends would wait for ever; expected a ratio of at most "
                f"{uses}, or a larger MaxUses"
            )
        if isinstance(part, SamplesToInserts) and group_size and part.lease_size < group_size:
            raise ValueError(
                f"SamplesToInserts.lease_size: got {part.lease_size}, but groups have {group_size} runs and are handed "
                "out whole; expected at least one group"
            )
        if isinstance(part, SamplesToInserts):
            # All but one of them may be there, and none of those is handed out: the next append has to fit in.
            waits = [other.size for other in limiters if isinstance(other, MinSize)]
            unseen = max([*waits, 0 if partial or group_size is None else group_size])
            needed = (unseen - 1 + part.append_size - part.min_size) * exact(part.ratio)
            if unseen and exact(part.slack) < needed:
                raise ValueError(
                    f"SamplesToInserts.slack: got {part.slack}, but nothing is handed out before {unseen} records are "
                    f"there: appends would wait for ever; expected at least {_at_least(needed)}"
                )
    if most is not None and group_size and group_size > most and not partial:
        raise ValueError(
            f"MaxSize.size: got {most}, but groups need {group_size} runs to be complete: none ever would be"
        )
