"""Consumer groups: their configuration (sampler, removers, rate limiters) and their state in the ledger.

Invariant: combinations of limits that could deadlock are rejected when the consumer is created.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from rollbook.book.errors import CorruptBookError, UnknownConsumerError
from rollbook.book.ledger import (
    Ledger,
    LedgerValue,
    Transaction,
    check_text,
    check_writable,
    chunks,
    parse_object,
    served,
)
from rollbook.book.sampler import SAMPLERS, First, Item, Priority, Sampler, State, part_from_json, part_to_json
from rollbook.core.checks import check_bool, check_choice, check_float, check_int, suggest

if TYPE_CHECKING:
    from rollbook.book.book import Book

__all__ = ["ConsumerConfig", "MaxAge", "MaxSize", "MaxUses", "MinSize", "SamplesToInserts", "remove_consumer"]


@lru_cache(maxsize=64)
def exact_decimal(number: float) -> Fraction:
    """Return the decimal number that `repr` prints, without the rounding error of a float.

    >>> exact_decimal(0.1) * 3 == exact_decimal(0.3)
    True
    """
    return Fraction(repr(number))


def _format_at_least(bound: Fraction) -> str:
    """Format a number that is at least the bound."""
    approximate = float(bound)
    return repr(
        approximate if exact_decimal(approximate) >= bound else math.nextafter(approximate, math.inf)
    ).removesuffix(".0")


@dataclass(frozen=True)
class MaxSize:
    """Remover: keep at most `size` waiting records.

    Args:
        size: The maximum.
        drop: Which records to drop when new ones arrive: `"oldest"`, or `"worst"` by the sampler's rank.

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
    """Remover: drop records that have waited longer than `seconds` since they were admitted.

    Args:
        seconds: The maximum age.

    >>> MaxAge(3600.0).seconds
    3600.0
    """

    seconds: float

    def __post_init__(self) -> None:
        if not check_float("MaxAge.seconds", self.seconds, 0.0) > 0:
            raise ValueError(f"MaxAge.seconds: got {self.seconds!r}, expected a number > 0")


@dataclass(frozen=True)
class MaxUses:
    """Remover: lease a record until it was acknowledged `uses` times, or without limit if `None`.

    Without this remover a record is used once.

    Args:
        uses: The maximum, or `None`.

    >>> ConsumerConfig(removers=[MaxUses(4)]).max_uses
    4
    """

    uses: int | None

    def __post_init__(self) -> None:
        if self.uses is not None:
            check_int("MaxUses.uses", self.uses, 1)


@dataclass(frozen=True)
class MinSize:
    """Rate limiter: lease nothing until `size` records are waiting, cooling down or leased.

    Args:
        size: The minimum.

    >>> MinSize(512).size
    512
    """

    size: int

    def __post_init__(self) -> None:
        check_int("MinSize.size", self.size, 1)


@dataclass(frozen=True)
class SamplesToInserts:
    """Rate limiter: keep the number of leased records within `slack` of `ratio` times the number of appended records.

    The side that is ahead waits: `append` (back-pressure) or `lease`. With
    `c = inserts * ratio - samples - min_size * ratio`, a lease of k needs `c - k >= -slack`, and an append of m needs
    `c + m * ratio <= slack`. Dropped records count on neither side. Numbers are exact decimals: 0.1 is a tenth.

    Args:
        ratio: Leased records per appended record.
        slack: Allowed difference, in leased records.
        min_size: Number of appended records before which nothing is leased.
        lease_size: Size of the largest lease.
        append_size: Size of the largest append.

    Raises:
        ValueError: The slack is so small that leases and appends could wait for each other forever.

    >>> SamplesToInserts(ratio=2.0, slack=64, lease_size=64, append_size=8).inserts_left(0, 0)
    32
    >>> SamplesToInserts(ratio=1.0, slack=4, lease_size=64, append_size=8)
    Traceback (most recent call last):
        ...
    ValueError: SamplesToInserts: with slack 4.0, leases of 64 and appends of 8 could wait for each other forever; \
expected a slack of at least 36
    """

    ratio: float
    slack: float
    min_size: int = 0
    lease_size: int = 1
    append_size: int = 1

    def __post_init__(self) -> None:
        for name in ("ratio", "slack"):
            number = check_float(f"SamplesToInserts.{name}", getattr(self, name), 0.0, 1e15)
            object.__setattr__(self, name, number)
        if not self.ratio >= 1e-9:
            raise ValueError(f"SamplesToInserts.ratio: got {self.ratio!r}, expected a number > 0")
        check_int("SamplesToInserts.min_size", self.min_size)
        check_int("SamplesToInserts.lease_size", self.lease_size, 1)
        check_int("SamplesToInserts.append_size", self.append_size, 1)
        # Both wait when c - k < -slack and c + m * ratio > slack: possible if the window is narrower than both steps.
        # If all appended records were leased, c is at most 0, and an append must still fit in.
        step = self.append_size * exact_decimal(self.ratio)
        needed = max((self.lease_size + step) / 2, step)
        if exact_decimal(self.slack) < needed:
            raise ValueError(
                f"SamplesToInserts: with slack {self.slack}, leases of {self.lease_size} and appends of "
                f"{self.append_size} could wait for each other forever; expected a slack of at least "
                f"{_format_at_least(needed)}"
            )

    def _cursor(self, inserts: int, samples: int) -> Fraction:
        return (inserts - self.min_size) * exact_decimal(self.ratio) - samples

    def samples_left(self, inserts: int, samples: int) -> int:
        """Return how many records may be leased now.

        Args:
            inserts: Records appended so far.
            samples: Records leased so far.
        """
        if inserts < self.min_size:
            return 0
        return max(math.floor(self._cursor(inserts, samples) + exact_decimal(self.slack)), 0)

    def inserts_left(self, inserts: int, samples: int) -> int:
        """Return how many records may be appended now.

        Args:
            inserts: Records appended so far.
            samples: Records leased so far.
        """
        return max(
            math.floor((exact_decimal(self.slack) - self._cursor(inserts, samples)) / exact_decimal(self.ratio)), 0
        )


Remover = MaxSize | MaxAge | MaxUses
Limiter = MinSize | SamplesToInserts
REMOVERS: dict[str, type[Remover]] = {"max_size": MaxSize, "max_age": MaxAge, "max_uses": MaxUses}
LIMITERS: dict[str, type[Limiter]] = {"min_size": MinSize, "samples_to_inserts": SamplesToInserts}
"""Removers and rate limiters by name, as in the saved settings of a consumer."""
ConsumerSetting = Sampler | Remover | Limiter | Sequence[Remover] | Sequence[Limiter] | float | None
"""The value of a field of `ConsumerConfig`; one remover or limiter is the same as a list of one."""


def check_limits(
    removers: Sequence[Remover],
    limiters: Sequence[Limiter],
    uses: int | None,
    group_size: int | None,
    partial: bool,
) -> None:
    """Raise `ValueError` if these parts could keep leases or appends waiting forever."""
    for kind in (*REMOVERS.values(), *LIMITERS.values()):
        if sum(isinstance(rule, kind) for rule in (*removers, *limiters)) > 1:
            raise ValueError(f"{kind.__name__}: got it twice, expected it once")
    max_size = min((rule.size for rule in removers if isinstance(rule, MaxSize)), default=None)
    for rule in limiters:
        floor = rule.size if isinstance(rule, MinSize) else rule.min_size
        if max_size is not None and floor > max_size:
            raise ValueError(
                f"{type(rule).__name__}: nothing is leased before {floor} records are present, but MaxSize keeps at "
                f"most {max_size}: no lease would ever succeed"
            )
        if isinstance(rule, SamplesToInserts) and uses is not None and rule.ratio > uses:
            raise ValueError(
                f"SamplesToInserts.ratio: got {rule.ratio}, but each record is leased at most {uses} time(s): "
                "samples could never keep up and appends would wait forever; expected a ratio of at most "
                f"{uses}, or a larger MaxUses"
            )
        if isinstance(rule, SamplesToInserts) and group_size and rule.lease_size < group_size:
            raise ValueError(
                f"SamplesToInserts.lease_size: got {rule.lease_size}, but groups have {group_size} runs and are "
                "leased as a whole; expected at least one group"
            )
        if isinstance(rule, SamplesToInserts):
            # All but one of them may be there, with none leased: the next append must fit in.
            minimums = [other.size for other in limiters if isinstance(other, MinSize)]
            minimum = max([*minimums, 0 if partial or group_size is None else group_size])
            needed = (minimum - 1 + rule.append_size - rule.min_size) * exact_decimal(rule.ratio)
            if minimum and exact_decimal(rule.slack) < needed:
                raise ValueError(
                    f"SamplesToInserts.slack: got {rule.slack}, but nothing is leased before {minimum} records are "
                    f"present: appends would wait forever; expected at least {_format_at_least(needed)}"
                )
    if max_size is not None and group_size and group_size > max_size and not partial:
        raise ValueError(
            f"MaxSize.size: got {max_size}, but groups need {group_size} runs to be complete: none ever would be"
        )


NUMERIC_COLUMNS = (
    "reward",
    "scored",
    "length",
    "prompt_tokens",
    "response_tokens",
    "trained_tokens",
    "version_min",
    "version_max",
    "run",
    "step",
    "group_size",
)
"""Numeric index columns of a record."""


@dataclass(frozen=True)
class ConsumerConfig:
    """Settings of a consumer group.

    Args:
        sampler: Order of the waiting records.
        removers: Any of `MaxSize`, `MaxAge`, `MaxUses`. Without `MaxUses` a record is used once, except by `Priority`.
        limiters: Any of `MinSize`, `SamplesToInserts`.
        max_staleness: How many policy versions behind the announced one a record's oldest token may be.
        keep_stale: Keep the bytes of stale records for inspection.
        group_size: Number of runs in a group whose records do not state it.
        partial_after: Seconds after which an incomplete group is leased; `None` for never.
        lease_seconds: Seconds without progress after which a lease ends and its records return to the queue.
        max_attempts: How often a record may be returned before it is dropped; `None` for no limit.
        seed: Seed of random samplers.

    Raises:
        ValueError: A setting is invalid, or the limits could keep leases or appends waiting forever.

    >>> ConsumerConfig().max_uses, ConsumerConfig(sampler=Priority()).max_uses
    (1, None)
    """

    sampler: Sampler = field(default_factory=First)
    removers: tuple[Remover, ...] = ()
    limiters: tuple[Limiter, ...] = ()
    max_staleness: int | None = None
    keep_stale: bool = False
    group_size: int | None = None
    partial_after: float | None = None
    lease_seconds: float = 300.0
    max_attempts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.sampler) not in SAMPLERS.values():
            names = ", ".join([kind.__name__ for kind in SAMPLERS.values()])
            raise ValueError(f"sampler: got {self.sampler!r}, expected one of {names}")
        for name, kinds in (("removers", REMOVERS), ("limiters", LIMITERS)):
            setting = getattr(self, name)
            parts = setting if isinstance(setting, (list, tuple)) else (setting,)
            for rule in parts:
                if type(rule) not in kinds.values():
                    expected = ", ".join([kind.__name__ for kind in kinds.values()])
                    raise ValueError(f"{name}: got {rule!r}, expected any of {expected}")
            object.__setattr__(self, name, tuple(parts))
        if self.max_staleness is not None:
            check_int("max_staleness", self.max_staleness)
        object.__setattr__(self, "keep_stale", check_bool("keep_stale", self.keep_stale))
        if self.group_size is not None:
            check_int("group_size", self.group_size, 1)
        if self.partial_after is not None:
            check_float("partial_after", self.partial_after, 0.0)
        if not check_float("lease_seconds", self.lease_seconds, 0.0, 1e9) > 0:
            raise ValueError(f"lease_seconds: got {self.lease_seconds!r}, expected a number > 0")
        if self.max_attempts is not None:
            check_int("max_attempts", self.max_attempts, 1)
        if check_int("seed", self.seed, -(1 << 63)) >= 1 << 63:
            raise ValueError(f"seed: got {self.seed}, expected a 64-bit integer")
        key = self.sampler.key
        if key is not None and key not in NUMERIC_COLUMNS and not str(key).startswith(("info.", "metrics.")):
            raise ValueError(
                f"sampler: key: got {key!r}, expected info.NAME, metrics.NAME or one of {', '.join(NUMERIC_COLUMNS)}"
            )
        check_limits(self.removers, self.limiters, self.max_uses, self.group_size, self.partial_after is not None)

    def _part(self, kind: type) -> Any:
        return next((rule for rule in (*self.removers, *self.limiters) if type(rule) is kind), None)

    @cached_property
    def max_uses(self) -> int | None:
        """Number of acknowledgements after which a record is done; `None` for no limit."""
        rule = self._part(MaxUses)
        limits = [rule.uses if rule is not None else None if isinstance(self.sampler, Priority) else 1]
        if isinstance(self.sampler, Priority):
            limits.append(self.sampler.max_uses)
        return min((limit for limit in limits if limit is not None), default=None)

    @cached_property
    def max_size(self) -> MaxSize | None:
        """The `MaxSize` remover, if any."""
        rule: MaxSize | None = self._part(MaxSize)
        return rule

    @cached_property
    def max_age(self) -> float | None:
        """Seconds that a record may wait, or `None`."""
        rule = self._part(MaxAge)
        return None if rule is None else float(rule.seconds)

    @cached_property
    def min_size(self) -> int:
        """Number of records that must be present before a lease, 0 for none."""
        rule = self._part(MinSize)
        return 0 if rule is None else int(rule.size)

    @cached_property
    def ratio(self) -> SamplesToInserts | None:
        """The `SamplesToInserts` limiter, if any."""
        rule: SamplesToInserts | None = self._part(SamplesToInserts)
        return rule

    @property
    def bounded(self) -> bool:
        """Whether records are dropped because of their age, their version or their number."""
        return bool(self.removers) or self.max_staleness is not None

    def to_json(self) -> str:
        """Return the settings as JSON, as the ledger stores them."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["sampler"] = part_to_json(SAMPLERS, self.sampler)
        plain["removers"] = [part_to_json(REMOVERS, rule) for rule in self.removers]
        plain["limiters"] = [part_to_json(LIMITERS, rule) for rule in self.limiters]
        # Numpy numbers are allowed, too.
        return json.dumps(plain, sort_keys=True, default=lambda n: int(n) if hasattr(n, "__index__") else float(n))

    @classmethod
    def from_json(cls, text: str) -> ConsumerConfig:
        """Parse settings from JSON.

        Args:
            text: The result of `to_json`.

        Returns:
            The settings.

        Raises:
            ValueError: A setting or a part is unknown or invalid.
        """
        plain = json.loads(text)
        names = {f.name for f in fields(cls)}
        if not isinstance(plain, dict) or not names.issuperset(plain):
            raise ValueError(f"a consumer's settings: got {text[:200]!r}, expected only {', '.join(sorted(names))}")
        for name in ("sampler", "removers", "limiters"):
            if name not in plain or (name != "sampler" and not isinstance(plain[name], list)):
                raise ValueError(f"a consumer's settings: {name}: got {plain.get(name)!r}, expected its parts")
        plain["sampler"] = part_from_json(SAMPLERS, "sampler", plain["sampler"])
        plain["removers"] = tuple([part_from_json(REMOVERS, "remover", rule) for rule in plain["removers"]])
        plain["limiters"] = tuple([part_from_json(LIMITERS, "limiter", rule) for rule in plain["limiters"]])
        return cls(**plain)

    def changed(self, options: Mapping[str, ConsumerSetting]) -> ConsumerConfig:
        """Return a copy with some settings replaced.

        Args:
            options: New values by name.

        Raises:
            ValueError: A setting is unknown or invalid.
        """
        by_name = {f.name: f for f in fields(self)}
        for name in options:
            if name not in by_name:
                raise ValueError(f"consumer: unknown setting {name!r}{suggest(name, by_name)}")
        return replace(self, **options)  # type: ignore[arg-type]


_MAX_JSON_CHARACTERS = 1 << 20  # characters of settings or of a sampler's state; both are a few numbers


@lru_cache(maxsize=64)
def parse_settings(text: LedgerValue) -> ConsumerConfig:
    """Parse settings from a ledger, which is not trusted."""
    if not isinstance(text, str) or len(text) > _MAX_JSON_CHARACTERS:
        raise CorruptBookError(f"a consumer's settings: got {str(text)[:100]!r}, expected a short text")
    try:
        return ConsumerConfig.from_json(text)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptBookError(f"a consumer's settings: got {text[:100]!r}, which cannot be read: {error}") from None


def parse_state(text: LedgerValue) -> State:
    """Parse a sampler's state from a ledger, which is not trusted: numbers, or lists or dicts of numbers.

    Raises:
        CorruptBookError: It is not valid JSON, or a number is not finite.

    >>> parse_state('{"clock": 1.5, "ready": [2, 2.0]}')["ready"]
    [2, 2.0]
    """
    if not isinstance(text, str) or len(text) > _MAX_JSON_CHARACTERS:
        raise CorruptBookError(f"a sampler's state: got {str(text)[:100]!r}, expected a short text")
    state = parse_object(text, "a sampler's state")
    for name, value in state.items():
        shaped = {"ready": list, "shifts": list, "rounds": dict, "group_rounds": dict}.get(name, (int, float))
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        valid = isinstance(value, shaped)
        valid &= (name != "ready" or len(numbers) == 2) and (name != "shifts" or len(numbers) % 2 == 0)
        for number in numbers:
            valid &= math.isfinite(number) if type(number) is float else type(number) is int and abs(number) < 2**63
        if not valid:
            raise CorruptBookError(f"a sampler's state: {name[:40]}: got {str(value)[:100]}, expected finite numbers")
    return state


@dataclass
class Consumer:
    """A consumer group, as one transaction sees it."""

    id: int
    name: str
    settings: ConsumerConfig
    state: State
    grouped: bool
    inserts: int
    samples: int
    floor: int | None
    """Waiting records whose oldest token is older than this version have been dropped."""
    generation: int
    waiting: float = 0.0
    """Until when a lease waits for records, by the database's clock."""
    saved: tuple[Any, ...] = ()
    """The values that the ledger has, so that `save_consumer` writes only changes."""

    def item(self, seq: int, uses: int, version: int | None, value: float | None, *, group: bool = False) -> Item:
        """Return what the sampler sees of a record or a group."""
        if "shifts" in self.state:
            seq -= get_shift(self.state, seq)
        return Item(seq, self.settings.seed, uses, version, value, group)


def get_shift(state: State, seq: int) -> int:
    """Return how many records before this one were dropped by rewinds.

    Ranks do not count them, so that records that are appended again after a rewind get the ranks of the first time.

    >>> get_shift({"shifts": [20, 10, 30, 15]}, 20), get_shift({"shifts": [20, 10, 30, 15]}, 21)
    (0, 10)
    """
    pairs = state.get("shifts", ())
    return next((pairs[i + 1] for i in range(len(pairs) - 2, -1, -2) if seq > pairs[i]), 0)


_COLUMNS = "id, name, settings, state, grouped, inserts, samples, floor, generation, waiting"


SELECT_CONSUMERS = f"SELECT {_COLUMNS} FROM consumers ORDER BY id"
SELECT_CONSUMER = f"SELECT {_COLUMNS} FROM consumers WHERE name = ?"
"""Queries whose rows `parse_consumers` reads."""


def parse_consumers(rows: Iterable[Sequence[Any]]) -> list[Consumer]:
    """Parse rows of `SELECT_CONSUMERS` or `SELECT_CONSUMER`.

    Raises:
        CorruptBookError: A value has the wrong type; SQLite stores text in a column of numbers, too.
    """
    consumers = []
    for row in rows:
        number, name, settings, state, grouped, inserts, samples, floor, generation, waiting = row
        if {*map(type, (number, grouped, inserts, samples, generation, 0 if floor is None else floor))} != {int}:
            raise CorruptBookError(f"consumer {name!r}: got {row[4:]!r}, expected integers")
        consumer = Consumer(
            number,
            name,
            parse_settings(settings),
            parse_state(state),
            bool(grouped),
            inserts,
            samples,
            floor,
            generation,
            waiting if isinstance(waiting, float) else 0.0,
            saved=(state, grouped, inserts, samples, floor, generation),
        )
        consumers.append(consumer)
    return consumers


def all_consumers(tx: Transaction) -> list[Consumer]:
    """Return every consumer of the book, in the order of creation."""
    return parse_consumers(tx.all(SELECT_CONSUMERS))


def find_consumer(tx: Transaction, name: str, lock: bool = False) -> Consumer | None:
    """Return the consumer of this name, or `None`.

    Args:
        tx: The transaction.
        name: The consumer's name.
        lock: Lock its row, so that no other transaction changes its queue until this one ends.
    """
    check_text("consumer", name, 1, 200)
    rows = tx.all(f"{SELECT_CONSUMER}{tx.for_update if lock else ''}", (name,))
    return parse_consumers(rows)[0] if rows else None


def get_consumer(tx: Transaction, name: str) -> Consumer:
    """Return the consumer of this name, or raise `UnknownConsumerError`."""
    consumer = find_consumer(tx, name)
    if consumer is None:
        names = [row[0] for row in tx.all("SELECT name FROM consumers ORDER BY id")]
        raise unknown_consumer(name, names)
    return consumer


def unknown_consumer(name: str, names: list[str]) -> UnknownConsumerError:
    """Return the error for an unknown consumer."""
    return UnknownConsumerError(f"consumer: unknown consumer group {name!r}{suggest(name, names)}")


def create_consumer(tx: Transaction, name: str, settings: ConsumerConfig) -> Consumer:
    """Create a consumer; `queue.backfill_consumer` offers it the records of the book."""
    number = 1 + _last_number(tx)
    tx.run(
        f"INSERT INTO consumers (made, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, 0, 0, 0, NULL, 0, NULL)",
        (tx.now, number, name, settings.to_json(), "{}"),
    )
    return Consumer(number, name, settings, {}, False, 0, 0, None, 0)


def _last_number(tx: Transaction) -> int:
    """Return the largest number that a consumer has or had; events keep the numbers of removed ones."""
    last = int(tx.first("SELECT COALESCE(MAX(id), 0) FROM consumers")[0])
    row = tx.first("SELECT value FROM meta WHERE key = 'last_consumer'")
    return last if row is None else max(last, _parse_number("last_consumer", row[0]))


def _parse_number(key: str, text: LedgerValue) -> int:
    """Parse a consumer's number from a ledger, which is not trusted."""
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CorruptBookError(f"meta: {key[:40]}: got {str(text)[:40]!r}, expected an integer")
    return int(text)


_REMOVED_KEY = "removed_consumer:"
NOT_REMOVED = f"'{_REMOVED_KEY}' || consumer NOT IN (SELECT key FROM meta)"
"""SQL condition on a row with a `consumer`: that consumer was not removed."""
_REMOVED_CHUNK = 2000
_CONSUMER_TABLES = {"queue": "seq", "groups": "gid", "queue_before": "seq", "groups_before": "gid"}


@served
def remove_consumer(book: Book, name: str) -> None:
    """Remove a consumer group: its leases end, and no record is kept for it any more.

    Events keep what it did, without its name. The group "train" cannot be removed.

    Args:
        book: The book.
        name: The consumer group.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.consumer("replay", create=True)
    >>> remove_consumer(book, "replay")
    >>> list(book.consumers())
    ['train']
    """
    check_writable(book, "remove_consumer")
    if name == "train":
        raise ValueError(f"remove_consumer: got {name!r}, which every book has")
    with book.ledger.write() as tx:
        consumer = get_consumer(tx, name)
        last = _last_number(tx)
        tx.run("UPDATE leases SET state = 'voided' WHERE consumer = ? AND state = 'active'", (consumer.id,))
        tx.run("DELETE FROM queue WHERE consumer = ? AND lease IS NOT NULL", (consumer.id,))
        for table, column in (("tallies", "consumer"), ("inbox", "consumer"), ("consumers", "id")):
            tx.run(f"DELETE FROM {table} WHERE {column} = ?", (consumer.id,))
        tx.run("DELETE FROM meta WHERE key = 'last_consumer'")
        notes = [("last_consumer", str(last)), (f"{_REMOVED_KEY}{consumer.id}", name)]
        tx.run_many("INSERT INTO meta (key, value) VALUES (?, ?)", notes)
    delete_removed_consumers(book.ledger)


def delete_removed_consumers(ledger: Ledger) -> None:
    """Delete the rows of removed consumers, in short transactions; also those that a crash left."""
    with ledger.read() as tx:
        # Without a value all its rows are deleted; the key stays, since events keep the number.
        keys = [
            key for (key,) in tx.all("SELECT key FROM meta WHERE key LIKE ? AND value <> ''", (f"{_REMOVED_KEY}%",))
        ]
        existing = {number for (number,) in tx.all("SELECT id FROM consumers")} if keys else set()
    for key in keys:
        number = _parse_number(key, key.removeprefix(_REMOVED_KEY))
        for table, column in _CONSUMER_TABLES.items():
            while number not in existing and _delete_chunk(ledger, table, column, number):
                pass
        with ledger.write() as tx:
            tx.run("UPDATE meta SET value = '' WHERE key = ?", (key,))


def _delete_chunk(ledger: Ledger, table: str, column: str, consumer: int) -> bool:
    """Delete some rows of a consumer; return whether there were any."""
    with ledger.write() as tx:
        rows = tx.all(f"SELECT {column} FROM {table} WHERE consumer = ? LIMIT {_REMOVED_CHUNK}", (consumer,))
        for marks, chunk in chunks([value for (value,) in rows]):
            tx.run(f"DELETE FROM {table} WHERE consumer = ? AND {column} IN ({marks})", (consumer, *chunk))
    return bool(rows)


def save_consumer(tx: Transaction, consumer: Consumer) -> None:
    """Write back what a transaction changed."""
    state = json.dumps(consumer.state)
    counts = (consumer.inserts, consumer.samples, consumer.floor, consumer.generation)
    now = (state, int(consumer.grouped), *counts)
    if now != consumer.saved:
        tx.defer(
            "consumers",
            "UPDATE consumers SET state = ?, grouped = ?, inserts = ?, samples = ?, floor = ?, generation = ? "
            "WHERE id = ?",
            (*now, consumer.id),
        )
        consumer.saved = now


def save_settings(tx: Transaction, consumer: Consumer, settings: ConsumerConfig) -> None:
    """Replace a consumer's settings; the state of a sampler that is replaced is dropped."""
    if settings.sampler != consumer.settings.sampler:
        consumer.state = {key: value for key, value in consumer.state.items() if key in ("ready", "shifts")}
    consumer.settings = settings
    consumer.generation += 1
    tx.run("UPDATE consumers SET settings = ? WHERE id = ?", (settings.to_json(), consumer.id))
    save_consumer(tx, consumer)
