"""What a step takes from the book: the newest groups, or any, once or again, and an expert's records beside them.

Invariant: what is taken follows from the seed, the step and the book's state, so that a run that goes on from a
checkpoint takes what it took. An expert's book is only read.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.book.book import Book
from rollbook.book.consumer import MaxUses
from rollbook.book.sampler import SAMPLERS
from rollbook.core.checks import check_choice, check_float, check_int, suggest
from rollbook.core.experiences import Experiences
from rollbook.rollout.engine import derive_seed

KINDS = ("on_policy", "replay")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Which records a step learns from.

    `on_policy`: the groups that were made for it, each once. `replay`: groups by `sampler`, each up to `reuse` times,
    of those no staler than `max_staleness`.

    >>> ReplayConfig(kind="replay", reuse=4, max_staleness=8).settings()["max_staleness"]
    8
    >>> ReplayConfig(reuse=2)
    Traceback (most recent call last):
        ...
    ValueError: intake.reuse: got 2, expected 1, since kind is 'on_policy'
    """

    kind: str = "on_policy"
    """`on_policy`: what was made for the step, once; `replay`: what the sampler chooses, again and again."""
    sampler: str | None = None
    """How a replay chooses: a sampler of `rollbook.book.sampler.SAMPLERS` by name; `None` for `"uniform"`."""
    sampler_options: dict[str, Any] | None = None
    """Options of the sampler, by name."""
    reuse: int | None = 1
    """How often a record may be learnt from; none: for ever."""
    max_staleness: int | None = None
    """How many policy versions old a record may be; none: any."""
    make_every: int = 1
    """A rollout every so many steps; in between, a replay learns from what there is."""
    expert_share: float = 0.0
    """The share of a step's records that is an expert's."""
    timeout: float = 0.0
    """How many seconds to wait for groups that others bring."""
    lease_seconds: float = 3600.0
    """How long a step's records are this trainer's without a sign of life."""
    consumer: str = "train"
    """The book's consumer group that this trainer is."""

    def __post_init__(self) -> None:
        check_choice("intake.kind", self.kind, KINDS)
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise ValueError(
                f"intake.sampler: got {self.sampler!r}, expected a sampler{suggest(self.sampler, SAMPLERS)}"
            )
        if self.reuse is not None:
            check_int("intake.reuse", self.reuse, 1)
        if self.max_staleness is not None:
            check_int("intake.max_staleness", self.max_staleness)
        check_int("intake.make_every", self.make_every, 1)
        check_float("intake.expert_share", self.expert_share, 0, 1)
        check_float("intake.timeout", self.timeout, 0)
        check_float("intake.lease_seconds", self.lease_seconds, 1, 1e9)
        if self.kind == "on_policy":
            for name, value, expected in (("reuse", self.reuse, 1), ("make_every", self.make_every, 1)):
                if value != expected:
                    raise ValueError(f"intake.{name}: got {value}, expected {expected}, since kind is 'on_policy'")
            if self.sampler is not None:
                raise ValueError(f"intake.sampler: got {self.sampler!r}, expected none, since kind is 'on_policy'")

    def settings(self, seed: int = 0) -> dict[str, Any]:
        """What the book's consumer group is to be like; `seed`: of a sampler's chance."""
        made: dict[str, Any] = {"max_staleness": self.max_staleness}
        if self.kind == "replay":
            try:
                made["sampler"] = SAMPLERS[self.sampler or "uniform"](**(self.sampler_options or {}))
            except TypeError as error:
                raise ValueError(f"intake.sampler_options: {error}") from None
            made |= {"removers": (MaxUses(self.reuse),), "seed": seed}
        return made

    def experts(self, expert: Book | None, own: int, *, seed: int, step: int, known: list[str]) -> Experiences | None:
        """The expert's records beside `own` of one's own; `known` are the ids of all that it has, to be filled once."""
        if not self.expert_share:
            return None
        if expert is None:
            raise ValueError(f"expert: got None, and intake.expert_share is {self.expert_share:g}, expected a book")
        if not known:
            known += [record.eid.uid for record in expert]
        if not known:
            raise ValueError(f"expert: {expert.url} has no records, and intake.expert_share is {self.expert_share:g}")
        wanted = math.ceil(own * self.expert_share / (1 - self.expert_share)) if self.expert_share < 1 else own
        names = chosen(known, wanted, derive_seed(seed, f"expert/{step}"))
        once = list(dict.fromkeys(names))
        return expert.get(once).take([once.index(name) for name in names])


def chosen(names: Sequence[str], count: int, seed: int) -> list[str]:
    """So many of the names, none twice before all were had once.

    >>> sorted(chosen(["a", "b"], 5, 0))[:2]
    ['a', 'a']
    """
    rng = random.Random(seed)
    made: list[str] = []
    while len(made) < count:
        made += rng.sample(list(names), min(len(names), count - len(made)))
    return made
