"""Quarantine: records that a repair recovered without knowing whether they were trained on.

Invariant: a quarantined record can be read and queried, and is leased to no consumer, old or new, until it is released.
Its rows of `work` are dropped as "quarantined"; `meta` has the first event that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.book import consumers, work
from rollbook.book.ledger import Transaction, chunks

QUARANTINED = "quarantined"
"""The reason in `work`, the kind of the events and of the findings."""
_QUARANTINE_KEY = "quarantine"


def add_to_quarantine(tx: Transaction, seqs: Sequence[int], first: int | None = None) -> None:
    """Put records in quarantine; `first` is the oldest event that counts, by default the next one."""
    if first is None:
        first = tx.one("SELECT COALESCE(MAX(id), 0) + 1 FROM events")[0]
    tx.run("INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING", (_QUARANTINE_KEY, str(first)))
    work.record_events(tx, [work.Event(QUARANTINED, seq) for seq in seqs])


def _first_quarantine_event(tx: Transaction) -> int | None:
    row = tx.one("SELECT value FROM meta WHERE key = ?", (_QUARANTINE_KEY,))
    return None if row is None else int(row[0])


def find_quarantined(tx: Transaction, seqs: Sequence[int]) -> set[int]:
    """Return those of these records that are in quarantine."""
    first = _first_quarantine_event(tx)
    if first is None:
        return set()
    return {
        seq
        for marks, part in chunks(seqs)
        for (seq,) in tx.all(
            f"SELECT seq FROM events WHERE kind = '{QUARANTINED}' AND id >= {first} AND seq IN ({marks})", part
        )
    }


def quarantined_uids(tx: Transaction) -> list[str]:
    """Return the ids of the records in quarantine, in the order of admission."""
    first = _first_quarantine_event(tx)
    if first is None:
        return []
    rows = tx.all(
        "SELECT uid FROM records WHERE gone IS NULL AND evaluation = 0 AND seq IN "
        f"(SELECT seq FROM events WHERE id >= {first} AND kind = '{QUARANTINED}') ORDER BY seq"
    )
    return [uid for (uid,) in rows]


def release_quarantine(tx: Transaction) -> int:
    """Offer all records in quarantine to consumers; return how many there were."""
    count = len(quarantined_uids(tx))
    tx.run("DELETE FROM meta WHERE key = ?", (_QUARANTINE_KEY,))
    for consumer in consumers.all_consumers(tx):
        sampler = consumer.settings.sampler
        while rows := work.select_rows(
            tx, f"consumer = ? AND state = 'dropped' AND reason = '{QUARANTINED}' LIMIT 1000", (consumer.id,)
        ):
            moves = []
            for row in rows:
                rank = sampler.rank(consumer.item(row.seq, row.uses, row.version, row.value), consumer.state)
                moves.append((row, row._replace(state=work.WAITING, reason=None, rank=rank)))
            events = [work.Event("returned", row.seq, consumer.id, "offered") for row in rows]
            work.change_rows(tx, consumer, moves, events)
        while not work.drop_over_size(tx, consumer, 1000):
            pass
        consumers.save_consumer(tx, consumer)
    return count
