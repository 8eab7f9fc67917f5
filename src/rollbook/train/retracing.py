"""What a book says of a step that was trained: which records, in which order, where each was, and what came with them.

Invariant: the ledger is only read, and what a rewind voided is not of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.book.book import Book
from rollbook.book.consumer import find_consumer
from rollbook.book.ledger import Transaction, chunks, parsed
from rollbook.core.experiences import Experiences

_PLACE = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class Traced:
    """The records that a step learnt from.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"task": i}, tokens=[1, 2, 3]) for i in range(2)])
    >>> with book.lease(2) as lease:
    ...     _ = lease.ack(step=1, details={uid: {"minibatch": 0, "weight": 0.5} for uid in lease.uids})
    >>> found = trace(book, 1)
    >>> found.uids == lease.uids, found.places[0]["weight"]
    (True, 0.5)
    """

    step: int
    uids: list[str]
    """In the order of the lease, which is that of the batch."""
    places: list[dict[str, Any]]
    """[records] What was acknowledged of each: `minibatch`, `micro_batch` and `weight`, or `left_out`."""
    importance: list[float] | None = None
    """[records] What a sampler had each weigh; `None` where it has no weights."""
    together: list[list[str]] = field(default_factory=list)
    """The records of each append that some of these came with, as far as their bytes are there: a rollout, whole."""
    lost: int = 0
    """How many of those have no bytes any more."""
    revised: dict[str, str] = field(default_factory=dict)
    """The records that were changed after they were trained on, and by whom."""

    def records(self, book: Book) -> Experiences:
        """The records as they are now; one whose bytes are gone is an error that names it."""
        return book.get(self.uids)


def trace(book: Book, step: int, consumer: str = "train") -> Traced:
    """The records that a step learnt from; none if there was nothing to learn from."""
    with book.ledger.read() as tx:
        own = find_consumer(tx, consumer)
        if own is None:
            raise ValueError(f"{book.url}: got no consumer {consumer!r}, expected the one that the run trained as")
        found = tx.all(
            "SELECT id, seq, kind, lease, detail FROM events WHERE kind IN ('trained', 'voided') AND step = ? "
            "AND consumer = ? ORDER BY id",
            (step, own.id),
        )
        told = [
            (event, seq, kind, lease, parsed(detail, f"event {event}")) for event, seq, kind, lease, detail in found
        ]
        void = {detail.get("event") for _, _, kind, _, detail in told if kind == "voided"}
        done = {
            seq: (event, lease, detail)
            for event, seq, kind, lease, detail in told
            if kind == "trained" and event not in void
        }
        order = _order(tx, {lease for _, lease, _ in done.values()})
        seqs = sorted(done, key=lambda seq: order[done[seq][1], seq])
        known = _known(tx, seqs)
        together, lost = _together(tx, [known[seq][1:] for seq in seqs])
        revised = _revised(tx, {seq: done[seq][0] for seq in seqs})
    weights: list[Any] = [done[seq][2].get("importance") for seq in seqs]
    return Traced(
        step,
        [known[seq][0] for seq in seqs],
        [{name: done[seq][2][name] for name in _PLACE if name in done[seq][2]} for seq in seqs],
        [float(weight) for weight in weights] if weights and None not in weights else None,
        together,
        lost,
        {known[seq][0]: author for seq, author in revised.items()},
    )


def _order(tx: Transaction, leases: set[int]) -> dict[tuple[int, int], int]:
    """Where each record was in its lease."""
    found: dict[tuple[int, int], int] = {}
    for marks, part in chunks(sorted(leases)):
        rows = tx.all(f"SELECT lease, seq, id FROM events WHERE kind = 'leased' AND lease IN ({marks})", part)
        found.update({(lease, seq): event for lease, seq, event in rows})
    return found


def _known(tx: Transaction, seqs: Sequence[int]) -> dict[int, tuple[str, str, float]]:
    found: dict[int, tuple[str, str, float]] = {}
    for marks, part in chunks(seqs):
        rows = tx.all(f"SELECT seq, uid, batch, admitted FROM records WHERE seq IN ({marks})", part)
        found.update({seq: (uid, batch, admitted) for seq, uid, batch, admitted in rows})
    return found


def _together(tx: Transaction, appends: Sequence[tuple[str, float]]) -> tuple[list[list[str]], int]:
    made: list[list[str]] = []
    lost = 0
    for one in dict.fromkeys(appends):
        rows = tx.all(
            "SELECT uid, segment FROM records WHERE batch = ? AND admitted = ? AND evaluation = 0 ORDER BY seq", one
        )
        made.append([uid for uid, segment in rows if segment is not None])
        lost += len(rows) - len(made[-1])
    return made, lost


def _revised(tx: Transaction, since: dict[int, int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for marks, part in chunks(list(since)):
        rows = tx.all(
            f"SELECT id, seq, detail FROM events WHERE kind IN ('revised', 'redacted') AND seq IN ({marks})", part
        )
        for event, seq, detail in rows:
            if event > since[seq]:
                found[seq] = str(parsed(detail, f"event {event}").get("author", ""))
    return found
