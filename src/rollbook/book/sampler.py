"""Samplers: the order in which waiting records (or groups) are leased.

Invariant: a sampler computes a rank from data of the ledger, and the smallest ranks are leased by an index: a draw does
not sort or count the other records. Random numbers depend on the seed and the record's number, not on a generator, and
the state is in the ledger: a restart continues the sequence.

Uniform and proportional draws are exact at any time. The rank of a waiting record is the consumer's clock plus an
exponential time whose rate is its weight; the clock is the rank that was leased last. Exponential times are memoryless,
so it does not matter when a record arrived or was returned: the next one is record i with probability
`weight_i / sum of weights`.

>>> sampler = Uniform()
>>> state = {}
>>> ranks = [sampler.rank(Item(seq=i, seed=7), state) for i in range(4)]
>>> ranks == [sampler.rank(Item(seq=i, seed=7), state) for i in range(4)]
True
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import xxhash

from rollbook.core.checks import check_bool, check_choice, check_float, check_int
from rollbook.core.freeform import Json

__all__ = [
    "Balanced",
    "EasyToHard",
    "First",
    "Last",
    "NewestPolicy",
    "OldestPolicy",
    "Priority",
    "Proportional",
    "Sampler",
    "Uniform",
]


@dataclass(frozen=True, slots=True)
class Item:
    """What a sampler sees of a record, or of a group (number of its first record, version, mean value)."""

    seq: int
    seed: int = 0
    uses: int = 0
    version: int | None = None
    """The oldest version of the record's tokens; of a group, the newest of these, for `OldestPolicy` the oldest."""
    value: float | None = None
    """The record's value under the sampler's `key`."""
    group: bool = False


Part = TypeVar("Part")
"""A sampler, remover or limiter: a frozen dataclass."""
State = dict[str, Any]
"""A sampler's state, stored in the ledger as JSON: a few numbers."""


def hash_uniform(*parts: int) -> float:
    """Return a pseudo-random number in (0, 1) that depends only on `parts`.

    >>> hash_uniform(1, 2) == hash_uniform(1, 2), hash_uniform(1, 2) == hash_uniform(2, 1), 0 < hash_uniform(3) < 1
    (True, False, True)
    """
    word = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts)}q", *parts))
    return ((word >> 11) + 0.5) / (1 << 53)


def draw_rank(item: Item, weight: float, state: State) -> float:
    """Return the consumer's clock plus a random exponential time of rate `weight`."""
    clock = float(state.get("clock", 0.0))
    # The clock is hashed, too: an item that is ranked again later must not get the same (long) time again.
    (moment,) = struct.unpack("<q", struct.pack("<d", clock))
    return clock - math.log(hash_uniform(item.seed, item.seq, item.uses, moment)) / weight


class Sampler(Protocol):
    """Computes a rank for each item; smaller ranks are leased first."""

    keeps_rank: ClassVar[bool]
    """Whether an unchanged item keeps its rank; otherwise the rank depends on the item alone."""

    @property
    def key(self) -> str | None:
        """The value that ranks depend on: an index column, `info.NAME` or `metrics.NAME`, or `None`."""

    def rank(self, item: Item, state: State) -> float:
        """Return the rank of an item that starts to wait.

        Args:
            item: The record or group.
            state: The sampler's state, which may change.

        Returns:
            The rank; the lowest is leased first.
        """

    def weight(self, item: Item) -> float:
        """Return the item's relative probability; 1 for samplers that are not random.

        Args:
            item: The item.

        Returns:
            The relative probability.
        """

    def record_lease(self, rank: float, state: State) -> None:
        """Update the state after an item of this rank was leased.

        Args:
            rank: Rank of the leased item.
            state: State of the sampler, which is changed.
        """

    def reuse(self, item: Item) -> tuple[bool, float]:
        """Return whether an item may be used again after `item.uses` uses, and its cooldown in seconds.

        Args:
            item: The item.

        Returns:
            Whether it may be used again, and the cooldown.
        """


class _Ordered:
    """Base of samplers without randomness, state and cooldown."""

    keeps_rank: ClassVar[bool] = False
    key: str | None = None

    def weight(self, item: Item) -> float:
        return 1.0

    def record_lease(self, rank: float, state: State) -> None:
        return None

    def reuse(self, item: Item) -> tuple[bool, float]:
        return True, 0.0


@dataclass(frozen=True)
class First(_Ordered):
    """First in, first out.

    >>> First().rank(Item(seq=3), {})
    3.0
    """

    def rank(self, item: Item, state: State) -> float:
        """Return the record's number. See `Sampler.rank`."""
        return float(item.seq)


@dataclass(frozen=True)
class Last(_Ordered):
    """Last in, first out.

    >>> Last().rank(Item(seq=3), {})
    -3.0
    """

    def rank(self, item: Item, state: State) -> float:
        """Return the negative of the record's number. See `Sampler.rank`."""
        return -float(item.seq)


@dataclass(frozen=True)
class NewestPolicy(_Ordered):
    """Newest policy version first, then first in, first out. Records without a version come last.

    >>> NewestPolicy().rank(Item(seq=3, version=7), {})
    -7.0
    """

    def rank(self, item: Item, state: State) -> float:
        """Return the negative of the policy version. See `Sampler.rank`."""
        return math.inf if item.version is None else -float(item.version)


@dataclass(frozen=True)
class OldestPolicy(_Ordered):
    """Oldest policy version first, then first in, first out. Records without a version come first.

    A group has the version of its oldest record.

    >>> OldestPolicy().rank(Item(seq=3, version=7), {})
    7.0
    """

    def rank(self, item: Item, state: State) -> float:
        """Return the policy version. See `Sampler.rank`."""
        return -math.inf if item.version is None else float(item.version)


class _Random:
    """Base of random samplers, which rank by exponential times on the consumer's clock (see the module)."""

    keeps_rank: ClassVar[bool] = True

    def record_lease(self, rank: float, state: State) -> None:
        state["clock"] = max(rank, state.get("clock", 0.0))

    def reuse(self, item: Item) -> tuple[bool, float]:
        return True, 0.0


@dataclass(frozen=True)
class Uniform(_Random):
    """Draws waiting records with equal probability.

    Args:
        key: Must be `None`; `Proportional` takes a key.

    >>> Uniform().weight(Item(seq=0))
    1.0
    """

    key: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            raise ValueError(f"Uniform.key: got {self.key!r}, expected None; Proportional takes one")

    def weight(self, item: Item) -> float:
        """Return 1. See `Sampler.weight`."""
        return 1.0

    def rank(self, item: Item, state: State) -> float:
        """Return the clock plus an exponential time of rate 1. See `Sampler.rank`."""
        return draw_rank(item, 1.0, state)


@dataclass(frozen=True)
class Proportional(_Random):
    """Draws record i with probability `P(i) = p_i ** alpha / sum(p ** alpha)`, where `p` is its value under `key`.

    `Lease.weights` are the importance weights `(1 / (N * P(i))) ** beta`, divided by the largest of the lease.
    `Lease.ack(priorities=...)` changes the values.

    Args:
        key: An index column, `info.NAME` or `metrics.NAME`. The sign of the value is ignored.
        alpha: Exponent of the values.
        beta: Exponent of the importance weights.
        default: The value of records without one.
        least: The smallest value, so that records of value 0 are drawn now and then.

    >>> Proportional(key="info.td_error", alpha=0.5).weight(Item(seq=0, value=4.0))
    2.0
    """

    key: str = "reward"
    alpha: float = 0.6
    beta: float = 0.4
    default: float = 1.0
    least: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            check_float(f"Proportional.{name}", getattr(self, name), 0.0, 100.0)
        check_float("Proportional.default", self.default, 0.0)
        if not check_float("Proportional.least", self.least, 0.0) > 0:
            raise ValueError(f"Proportional.least: got {self.least!r}, expected a number > 0")

    def weight(self, item: Item) -> float:
        """Return `p ** alpha`, bounded. See `Sampler.weight`."""
        value = self.default if item.value is None or math.isnan(item.value) else abs(item.value)
        size = min(max(value, self.least), 1e100)
        powers = self.alpha * math.log10(size)
        # Bounded, because after a light item was leased, the ranks of heavy items would be equal as floats.
        return float(size**self.alpha) if abs(powers) < 12 else 10.0 ** math.copysign(12, powers)

    def rank(self, item: Item, state: State) -> float:
        """Return the clock plus an exponential time whose rate is the weight. See `Sampler.rank`."""
        return draw_rank(item, self.weight(item), state)


@dataclass(frozen=True)
class Priority(_Ordered):
    """Trinity's priorities: highest `version - decay * uses` first, then first in, first out.

    A record without a version counts as version 0.

    Args:
        function: `"linear_decay"`, or `"decay_limit_randomization"`, which adds noise and a limit of uses.
        decay: Decrease of the priority per use.
        limit: Uses of a record with `"decay_limit_randomization"`; 0 for no limit.
        sigma: Standard deviation of the noise.
        cooldown: Seconds between two uses.

    >>> Priority(decay=0.6).rank(Item(seq=3, version=4, uses=1), {})
    -3.4
    """

    function: str = "linear_decay"
    decay: float = 2.0
    limit: int = 3
    sigma: float = 0.0
    cooldown: float = 0.0

    def __post_init__(self) -> None:
        check_choice("Priority.function", self.function, ("linear_decay", "decay_limit_randomization"))
        check_float("Priority.decay", self.decay, -1e100, 1e100)
        check_float("Priority.sigma", self.sigma, 0.0, 1e100)
        check_float("Priority.cooldown", self.cooldown, 0.0, 1e9)
        check_int("Priority.limit", self.limit)

    def rank(self, item: Item, state: State) -> float:
        """Return the negative of the priority. See `Sampler.rank`."""
        priority = (item.version or 0) - self.decay * item.uses
        if self.function == "decay_limit_randomization" and self.sigma:
            radius = math.sqrt(-2 * math.log(hash_uniform(item.seed, item.seq, item.uses, 1)))
            priority += self.sigma * radius * math.cos(2 * math.pi * hash_uniform(item.seed, item.seq, item.uses, 2))
        return -priority

    def reuse(self, item: Item) -> tuple[bool, float]:
        """Return whether uses are left, and the cooldown. See `Sampler.reuse`."""
        return self.max_uses is None or item.uses < self.max_uses, self.cooldown

    @property
    def max_uses(self) -> int | None:
        """Maximum number of uses, or `None`."""
        return self.limit if self.function == "decay_limit_randomization" and self.limit else None


@dataclass(frozen=True)
class EasyToHard(_Ordered):
    """Curriculum: the largest value under `key` first (for a group, the mean), records without one last.

    Args:
        key: An index column, `info.NAME` or `metrics.NAME`.
        ascending: The smallest value first, for lengths and difficulties.

    >>> EasyToHard().rank(Item(seq=3, value=0.5), {})
    -0.5
    """

    key: str = "reward"
    ascending: bool = False

    def __post_init__(self) -> None:
        check_bool("EasyToHard.ascending", self.ascending)

    def rank(self, item: Item, state: State) -> float:
        """Return the value, negative unless `ascending`. See `Sampler.rank`."""
        if item.value is None or math.isnan(item.value):
            return math.inf
        return item.value if self.ascending else -item.value


@dataclass(frozen=True)
class Balanced(_Ordered):
    """Takes records from bands of difficulty in turn, so that a batch has easy and hard ones.

    Each band is first in, first out; empty bands are skipped.

    Args:
        key: An index column, `info.NAME` or `metrics.NAME`.
        edges: Rising values that separate the bands.

    >>> sampler, state = Balanced(), {}
    >>> [sampler.rank(Item(seq=i, value=v), state) for i, v in enumerate([0.0, 0.0, 1.0])]
    [1.0, 2.0, 1.6]
    """

    keeps_rank: ClassVar[bool] = True
    key: str = "reward"
    edges: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        edges = self.edges if isinstance(self.edges, (list, tuple)) else (self.edges,)
        object.__setattr__(self, "edges", tuple(check_float("Balanced.edges", edge) for edge in edges))
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError(f"Balanced.edges: got {list(self.edges)}, expected rising numbers")

    def rank(self, item: Item, state: State) -> float:
        """Return the band's next round plus a fraction for the band. See `Sampler.rank`."""
        bands = len(self.edges) + 1
        has_value = item.value is not None and not math.isnan(item.value)
        band = sum(item.value >= edge for edge in self.edges) if has_value else bands  # type: ignore[operator]
        # Rounds are integers; within a round the bands come in order. Groups and records have separate rounds.
        turns = state.setdefault("group_rounds" if item.group else "rounds", {})
        turn = max(int(turns.get(str(band), 0)), int(state.get("round", 0))) + 1
        turns[str(band)] = turn
        return turn + band / (bands + 1)

    def record_lease(self, rank: float, state: State) -> None:
        """Advance the round, so that a band that was empty for long does not catch up all its turns at once.

        See `Sampler.record_lease`.
        """
        state["round"] = max(int(state.get("round", 0)), math.floor(rank) - 1)


SAMPLERS: dict[str, type[Sampler]] = {
    "first": First,
    "last": Last,
    "newest_policy": NewestPolicy,
    "oldest_policy": OldestPolicy,
    "uniform": Uniform,
    "proportional": Proportional,
    "priority": Priority,
    "easy_to_hard": EasyToHard,
    "balanced": Balanced,
}
"""Samplers by name, as in the saved settings of a consumer and in training configurations."""


def part_to_json(kinds: Mapping[str, type[Part]], part: Part) -> dict[str, Any]:
    """Return a sampler, remover or limiter as JSON: its name and its options.

    >>> part_to_json(SAMPLERS, EasyToHard())
    {'name': 'easy_to_hard', 'key': 'reward', 'ascending': False}
    """
    [name] = [name for name, kind in kinds.items() if kind is type(part)]
    return {"name": name, **asdict(part)}  # type: ignore[call-overload]


def part_from_json(kinds: Mapping[str, type[Part]], label: str, description: Json) -> Part:
    """Create the sampler, remover or limiter that `part_to_json` described.

    Args:
        kinds: The classes that may be created, by name.
        label: Prefix of error messages.
        description: JSON from a ledger, which may hold anything.

    Raises:
        ValueError: Unknown name, unknown option or missing option.
    """
    if not isinstance(description, dict) or str(description.get("name")) not in kinds:
        raise ValueError(f"{label}: got {description!r}, expected one of {', '.join(kinds)}")
    kind = kinds[str(description["name"])]
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items() if k != "name"}
    if not names.issuperset(options):
        raise ValueError(f"{label} {description['name']}: unknown option {sorted(set(options) - names)[0]!r}")
    needed = {f.name for f in fields(kind) if f.default is MISSING}  # type: ignore[arg-type]
    if not needed.issubset(options):
        raise ValueError(f"{label} {description['name']}: {sorted(needed - set(options))[0]!r} is missing")
    return kind(**options)
