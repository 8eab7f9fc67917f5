"""`ReplayConfig`: which records a training step takes from the book, and how many expert records it adds.

Invariant: the records of a step depend on the seed, the step and the state of the book, so that a resumed run takes the
same ones. The expert's book is only read.
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

__all__ = ["ReplayConfig"]

KINDS = ("on_policy", "replay")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Which records a training step takes from the book.

    `on_policy` takes the groups that the step generated, each once. `replay` takes the groups that `sampler` selects
    among those that are at most `max_staleness` versions old, each up to `reuse` times.

    Args:
        kind: `on_policy` or `replay`.
        sampler: Sampler for `replay`, a key of `rollbook.book.sampler.SAMPLERS`; `None`: `uniform`.
        sampler_options: Keyword arguments of the sampler.
        reuse: Maximum number of times a record is trained on; `None`: no limit.
        max_staleness: Maximum age of a record in policy versions; `None`: no limit.
        rollout_interval: Generate new rollouts every N steps; the steps in between replay existing records.
        expert_share: Share of expert records among the records of a step.
        timeout: Seconds to wait for records that other processes append.
        lease_seconds: Lease duration in seconds. Must exceed the longest training step.
        consumer: Consumer group of the book that this trainer belongs to.

    >>> ReplayConfig(kind="replay", reuse=4, max_staleness=8).settings()["max_staleness"]
    8
    >>> ReplayConfig(reuse=2)
    Traceback (most recent call last):
        ...
    ValueError: replay.reuse: got 2, expected 1, since kind is 'on_policy'
    """

    kind: str = "on_policy"
    sampler: str | None = None
    sampler_options: dict[str, Any] | None = None
    reuse: int | None = 1
    max_staleness: int | None = None
    rollout_interval: int = 1
    expert_share: float = 0.0
    timeout: float = 0.0
    lease_seconds: float = 3600.0
    consumer: str = "train"

    def __post_init__(self) -> None:
        check_choice("replay.kind", self.kind, KINDS)
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise ValueError(
                f"replay.sampler: got {self.sampler!r}, expected a sampler{suggest(self.sampler, SAMPLERS)}"
            )
        if self.reuse is not None:
            check_int("replay.reuse", self.reuse, 1)
        if self.max_staleness is not None:
            check_int("replay.max_staleness", self.max_staleness)
        check_int("replay.rollout_interval", self.rollout_interval, 1)
        check_float("replay.expert_share", self.expert_share, 0, 1)
        check_float("replay.timeout", self.timeout, 0)
        check_float("replay.lease_seconds", self.lease_seconds, 1, 1e9)
        if self.kind == "on_policy":
            for name, setting in (("reuse", self.reuse), ("rollout_interval", self.rollout_interval)):
                if setting != 1:
                    raise ValueError(f"replay.{name}: got {setting}, expected 1, since kind is 'on_policy'")
            if self.sampler is not None:
                raise ValueError(f"replay.sampler: got {self.sampler!r}, expected none, since kind is 'on_policy'")

    def settings(self, seed: int = 0) -> dict[str, Any]:
        """Return the settings of the book's consumer group.

        Args:
            seed: Seed of random samplers.

        Raises:
            ValueError: The sampler does not take `sampler_options`.
        """
        settings: dict[str, Any] = {"max_staleness": self.max_staleness}
        if self.kind == "replay":
            try:
                settings["sampler"] = SAMPLERS[self.sampler or "uniform"](**(self.sampler_options or {}))
            except TypeError as error:
                raise ValueError(f"replay.sampler_options: {error}") from None
            settings |= {"removers": (MaxUses(self.reuse),), "seed": seed}
        return settings

    def experts(self, expert: Book | None, count: int, *, seed: int, step: int, uids: list[str]) -> Experiences:
        """Sample the expert records of a step.

        Args:
            expert: The expert's book.
            count: Number of other records of the step; `expert_share` is a share of all.
            seed: Seed of the run.
            step: Number of the step.
            uids: Ids of all records of the book; filled by the first call.

        Returns:
            The sampled records; a record can occur repeatedly.

        Raises:
            ValueError: There is no book, or it is empty.
        """
        if expert is None:
            raise ValueError(f"expert: got None, and replay.expert_share is {self.expert_share:g}, expected a book")
        if not uids:
            uids += [record.eid.uid for record in expert]
        if not uids:
            raise ValueError(f"expert: {expert.url} has no records, and replay.expert_share is {self.expert_share:g}")
        share = self.expert_share
        needed = math.ceil(count * share / (1 - share)) if share < 1 else count
        chosen = sample_names(uids, needed, derive_seed(seed, f"expert/{step}"))
        distinct = list(dict.fromkeys(chosen))
        return expert.get(distinct).take([distinct.index(uid) for uid in chosen])


def sample_names(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Sample `count` names at random, without repetition until every name was drawn once.

    >>> sorted(sample_names(["a", "b"], 5, 0))[:2]
    ['a', 'a']
    """
    rng = random.Random(seed)
    sampled: list[str] = []
    while len(sampled) < count:
        sampled += rng.sample(list(names), min(len(names), count - len(sampled)))
    return sampled
