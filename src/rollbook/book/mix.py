"""Mixes: one lease over several books, or several consumers of one book, by ratio.

Invariant: over time the shares are exact, not only on average. Rounding is carried over to the next lease; the balance
is in the first part's ledger, so that a restart continues with it. Each part's records are leased and acknowledged in
its own book.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollbook.book.errors import BookError, LeaseLostError
from rollbook.book.lease import Lease, empty_lease
from rollbook.book.ledger import Transaction
from rollbook.core.checks import check_float, check_int
from rollbook.core.experiences import Experiences

if TYPE_CHECKING:
    from rollbook.batch import Batch
    from rollbook.book.book import Book
    from rollbook.core.experience import Experience


@dataclass(frozen=True)
class Part:
    """One source of a mix. To use its records repeatedly, give its consumer group `removers=[MaxUses(None)]`."""

    book: Book
    share: float
    """Relative to the other parts: 4 and 1 are 0.8 and 0.2."""
    consumer: str = "train"
    """The consumer group to lease for."""
    by: str = "experience"
    """`"experience"` or `"group"`: what the share counts."""


class MixedLease:
    """The leases of all parts as one, in the order of the parts."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        """One per part, in order; some may be empty."""

    @property
    def experiences(self) -> Experiences:
        """The records of all parts."""
        return Experiences.concat([lease.experiences for lease in self.leases])

    @property
    def sources(self) -> list[int]:
        """The index of each record's part, to tell expert data from rollouts."""
        return [i for i, lease in enumerate(self.leases) for _ in range(len(lease))]

    @property
    def uids(self) -> list[str]:
        """The ids of all records."""
        return [uid for lease in self.leases for uid in lease.uids]

    @property
    def short(self) -> str:
        """Which parts have fewer records than requested, and why."""
        return "; ".join(f"part {i}: {lease.short}" for i, lease in enumerate(self.leases) if lease.short)

    @property
    def weights(self) -> list[float] | None:
        """Importance weights, 1 for parts without any; `None` if no part has any."""
        if all(lease.weights is None for lease in self.leases):
            return None
        return [weight for lease in self.leases for weight in lease.weights or [1.0] * len(lease)]

    def batch(self, **options: Any) -> Batch:
        """Return all records as one batch, with importance weights in `extra["weights"]`.

        Args:
            options: Arguments of `Batch.from_records`.
        """
        if not self:
            raise BookError(f"lease.batch: the lease is empty: {self.short}")
        from rollbook.batch import Batch

        batch = Batch.from_records(self.experiences, **options)
        if self.weights is not None:
            import torch

            batch.extra["weights"] = torch.tensor(self.weights)
        return batch

    def renew(self, seconds: float | None = None) -> None:
        """Restart the expiry time of every part.

        Args:
            seconds: As of `Lease.renew`.
        """
        for lease in self.leases:
            if lease:
                lease.renew(seconds)

    def ack(self, step: int | None = None) -> int:
        """Acknowledge every part.

        Args:
            step: The optimizer step.

        Returns:
            How many records were acknowledged.

        Raises:
            LeaseLostError: A part's lease has ended. The parts before it are acknowledged, the others are not.
        """
        return sum(lease.ack(step) for lease in self.leases if lease)

    def nack(self, reason: str = "given back") -> int:
        """Give the records of every part back.

        Args:
            reason: Stored in the ledgers.

        Returns:
            How many records were given back.
        """
        return sum(lease.nack(reason) for lease in self.leases if lease)

    def __len__(self) -> int:
        return sum(len(lease) for lease in self.leases)

    def __bool__(self) -> bool:
        return any(self.leases)

    def __iter__(self) -> Iterator[Experience]:
        for lease in self.leases:
            yield from lease

    def __repr__(self) -> str:
        return f"MixedLease({' + '.join(str(len(lease)) for lease in self.leases)} records)"

    def __enter__(self) -> MixedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost: LeaseLostError | None = None
        for lease in self.leases:
            try:
                lease.__exit__(kind, error, trace)
            except LeaseLostError as failure:  # The others are given back all the same.
                lost = lost or failure
        if lost is not None:
            raise lost


class Mix:
    """Leases from several books by ratio, such as expert data and rollouts.

    Args:
        parts: The sources.
        name: Under which the first part's book stores the balance.

    >>> import rollbook
    >>> rollouts, expert = rollbook.open("memory:"), rollbook.open("memory:")
    >>> for book in (rollouts, expert):
    ...     _ = book.append([rollbook.Experience(tokens=[1, 2, i]) for i in range(40)])
    >>> mix = Mix([Part(rollouts, 0.75), Part(expert, 0.25)])
    >>> for _ in range(2):
    ...     with mix.lease(10) as lease:
    ...         print(lease)
    ...         _ = lease.ack()
    MixedLease(8 + 2 records)
    MixedLease(7 + 3 records)
    """

    def __init__(self, parts: Sequence[Part], name: str = "mix") -> None:
        self.parts = tuple(parts)
        self.name = name
        """Under which the first part's book stores the balance."""
        if not self.parts:
            raise ValueError("parts: missing, expected at least one")
        for i, part in enumerate(self.parts):
            if not isinstance(part, Part):
                raise ValueError(f"parts[{i}]: got {type(part).__name__}, expected a Part(book, share)")
            if not check_float(f"parts[{i}].share", part.share, 0.0, 1e9) > 0:
                raise ValueError(f"parts[{i}].share: got {part.share!r}, expected a number above 0")
        self._total = sum(part.share for part in self.parts)

    @property
    def owed(self) -> list[float]:
        """By how many records each part is behind (or ahead of) its share."""
        with self.parts[0].book.ledger.read() as tx:
            return self._owed(tx)

    def shares(self, n: int, owed: Sequence[float]) -> list[int]:
        """Split `n` over the parts, by their shares and balances, rounded so that the sum is `n`.

        Args:
            n: The size of a lease.
            owed: By how many records each part is behind.

        Returns:
            The number of records of each part.
        """
        shares = [debt + n * part.share / self._total for debt, part in zip(owed, self.parts, strict=True)]
        counts = [max(int(want), 0) for want in shares]
        order = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
        for i in order[: max(n - sum(counts), 0)]:
            counts[i] += 1
        while sum(counts) > n:
            counts[max(range(len(counts)), key=lambda i: counts[i] - shares[i] if counts[i] else -1e18)] -= 1
        return counts

    def lease(
        self, n: int, *, timeout: float | None = 0.0, max_staleness: int | None = None, seconds: float | None = None
    ) -> MixedLease:
        """Lease `n` records (or groups) in total.

        A part with too few records is not replaced by another; `short` reports it, and its balance does not grow.

        Args:
            n: Number of records or groups.
            timeout: As of `Book.lease`, for all parts together.
            max_staleness: As of `Book.lease`.
            seconds: As of `Book.lease`.

        Returns:
            The lease, a context manager.
        """
        check_int("n", n, 1)
        end = None if timeout is None else time.monotonic() + timeout
        counts = self._promise(n)
        leases: list[Lease] = []
        try:
            for part, count in zip(self.parts, counts, strict=True):
                if not count:
                    leases.append(empty_lease(part.book, part.consumer))
                    continue
                leases.append(
                    part.book.lease(
                        count,
                        by=part.by,
                        consumer=part.consumer,
                        timeout=None if end is None else max(end - time.monotonic(), 0.001 if timeout else 0.0),
                        max_staleness=max_staleness,
                        seconds=seconds,
                    )
                )
        except BaseException:
            for lease in leases:
                lease.nack("another part of the mix failed")
            self._owe(counts, self._due(n))
            raise
        return MixedLease(leases)

    def _due(self, n: int) -> list[float]:
        """Return each part's exact share of `n`."""
        return [n * part.share / self._total for part in self.parts]

    def _promise(self, n: int) -> list[int]:
        """Split `n` and update the balances in one transaction, so that concurrent leases do not settle one twice."""
        with self.parts[0].book.ledger.write() as tx:
            owed = self._owed(tx)
            counts = self.shares(n, owed)
            self._write(tx, [debt + due - count for debt, due, count in zip(owed, self._due(n), counts, strict=True)])
        return counts

    def _owe(self, more: Sequence[float], less: Sequence[float]) -> None:
        with self.parts[0].book.ledger.write() as tx:
            self._write(tx, [debt + a - b for debt, a, b in zip(self._owed(tx), more, less, strict=True)])

    def _owed(self, tx: Transaction) -> list[float]:
        row = tx.one("SELECT value FROM meta WHERE key = ?", (f"mix:{self.name}",))
        debts: list[float] = json.loads(row[0]) if row is not None else []
        return debts if len(debts) == len(self.parts) else [0.0] * len(self.parts)

    def _write(self, tx: Transaction, debts: Sequence[float]) -> None:
        tx.run(
            "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (f"mix:{self.name}", json.dumps([round(debt, 9) for debt in debts])),
        )

    def acks(self) -> Mapping[int, int]:
        """Return how many records of each part, by index, were trained on."""
        return {i: part.book.counts(part.consumer).trained for i, part in enumerate(self.parts)}
