"""The inbox: records that a consumer has no rows of `work` for yet.

An append only notes the range of its record numbers here, one row for each consumer, so that concurrent appends change
no row in common. Whoever leases for a consumer, or changes what it has, first drains its inbox: a row of `work` is made
for each record, ranked by the sampler. A new consumer begins with one range, all records of the book.

Invariant: for every consumer, a training record is in exactly one of `work` and `inbox`. A transaction holds the
consumer's row, or is exclusive, when it drains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollbook.book import consumers, lineages, quarantine, reading, tags, work
from rollbook.book.consumers import Consumer
from rollbook.book.errors import CorruptBookError
from rollbook.book.ledger import Transaction, let_others

if TYPE_CHECKING:
    from rollbook.book.book import Book

_INBOX_COLUMNS = ("consumer", "first", "last", "count", "numbers")
CHUNK = 1000
"""How many records one transaction drains: it holds its locks for a moment only."""


def add_to_inbox(
    tx: Transaction, ids: Sequence[int], first: int, count: int, numbers: Mapping[int, str] | None = None
) -> None:
    """Note `count` new records, from number `first` on, for consumers; `numbers`: by consumer, what its sampler ranks
    them by (a JSON list), where the ledger does not have it."""
    rows = [(number, first, first + count - 1, count, (numbers or {}).get(number)) for number in sorted(ids)]
    tx.insert("inbox", _INBOX_COLUMNS, rows)


def backfill_consumer(tx: Transaction, consumer: int) -> None:
    """Note all training records of the book for a new consumer, within an exclusive transaction."""
    last, count = tx.one("SELECT MAX(seq), COUNT(*) FROM records WHERE evaluation = 0")
    if count:
        tx.insert("inbox", _INBOX_COLUMNS, [(consumer, 1, last, count, None)])


def inbox_size(tx: Transaction, consumer: int) -> int:
    """Count the records in a consumer's inbox."""
    return int(tx.one("SELECT COALESCE(SUM(count), 0) FROM inbox WHERE consumer = ?", (consumer,))[0])


def drain_inbox(tx: Transaction, book: Book, consumer: Consumer, most: int = CHUNK) -> bool:
    """Make rows of `work` for about `most` records, at least one range; return whether the inbox is empty now."""
    ranges = tx.all(
        f"SELECT first, last, numbers FROM inbox WHERE consumer = ? ORDER BY first LIMIT {most + 1}", (consumer.id,)
    )
    if not ranges:
        return True
    seqs: list[int] = []
    values: dict[int, float | None] = {}
    done: list[int] = []
    cut: tuple[int, int] | None = None
    for first, last, numbers in ranges:
        left = most - len(seqs)
        if left <= 0:
            break
        if numbers is not None:
            values.update(zip(range(first, last + 1), _parse_numbers(numbers, last - first + 1), strict=True))
        elif last - first >= left:
            cut = (first, first + left)  # a long range, of a new consumer, is drained in pieces
            seqs.extend(range(*cut))
            break
        seqs.extend(range(first, last + 1))
        done.append(first)
    records = _enter_from_inbox(tx, book, consumer, seqs, values)
    if done:
        tx.later("inbox", f"DELETE FROM inbox WHERE consumer = ? AND first {tx.in_ints}", (consumer.id, tx.array(done)))
    if cut is not None:
        tx.run(
            "UPDATE inbox SET first = ?, count = count - ? WHERE consumer = ? AND first = ?",
            (cut[1], sum(seq >= cut[0] for seq in records), consumer.id, cut[0]),
        )
    return len(done) == len(ranges)


def _parse_numbers(numbers: Any, count: int) -> list[float | None]:
    """A list of numbers from a ledger that anybody may have written."""
    try:
        values = json.loads(numbers)
    except (RecursionError, TypeError, ValueError):
        values = None
    if not isinstance(values, list) or len(values) != count or {type(n) for n in values} - {int, float, type(None)}:
        raise CorruptBookError(f"inbox: numbers: got {str(numbers)[:100]!r}, expected {count} numbers")
    return values


def _enter_from_inbox(
    tx: Transaction, book: Book, consumer: Consumer, seqs: Sequence[int], values: dict[int, float | None]
) -> list[int]:
    """Make rows for those of these numbers that are training records; return them."""
    key = consumer.settings.sampler.key
    bounded = consumer.settings.max_staleness is not None
    lineage = lineages.read_lineage(tx)
    floor = work.version_floor(lineage.announced, consumer.settings.max_staleness)
    column = f", {key}" if key in tags.IndexColumns._fields else ""
    records = tx.all(
        f"SELECT seq, gid, version_min, gone, version_max{column} FROM records "
        f"WHERE evaluation = 0 AND seq {tx.in_ints} ORDER BY seq",
        (tx.array(seqs),),
    )
    if column:
        values = {row[0]: None if row[5] is None else float(row[5]) for row in records}
    elif key is not None:
        unknown = [row[0] for row in records if row[0] not in values and row[3] is None]
        values.update(zip(unknown, reading.read_numbers(book, tx, unknown, key), strict=True))
    rows = []
    quarantined = quarantine.find_quarantined(tx, [row[0] for row in records])
    details = {}
    for seq, gid, version, gone, newest, *_ in records:
        stale = floor is not None and version is not None and version < floor
        if bounded and lineage.is_abandoned(seq, newest):
            stale, details[seq] = True, work.abandoned_detail(newest)
        dropped = gone or (quarantine.QUARANTINED if seq in quarantined else "stale" if stale else None)
        rows.append(new_row(consumer, seq, gid, version, values.get(seq), dropped))
    work.enter_rows(tx, consumer, rows, details)
    work.drop_over_size(tx, consumer, CHUNK)
    return [row.seq for row in rows]


def new_row(
    consumer: Consumer, seq: int, gid: str, version: int | None, value: float | None, dropped: str | None
) -> work.Row:
    """A record as a consumer first has it."""
    sampler = consumer.settings.sampler
    item = consumer.item(seq, 0, version, value)
    state = work.WAITING if dropped is None else work.DROPPED
    rank = sampler.rank(item, consumer.state) if dropped is None else 0.0
    return work.Row(seq, gid, state, dropped, rank, value, sampler.weight(item), version, 0, 0, None, None)


def drain_inboxes(book: Book, bounded: bool = False) -> None:
    """Drain the inbox of every consumer in short transactions; nothing if the book is read-only.

    Args:
        bounded: Leave out consumers that drop no record because of its age or their size: what is in the inbox of one
            of those waits.
    """
    if book.read_only:
        return
    with book.ledger.read() as tx:
        rows = tx.all(consumers.SELECT_CONSUMERS.replace(" ORDER", " WHERE id IN (SELECT consumer FROM inbox) ORDER"))
    for consumer in consumers.parse_consumers(rows):
        empty = bounded and not consumer.settings.bounded
        while not empty:
            # What a crash undoes is in the inbox again.
            with book.ledger.write(shared=True, durable=False) as tx:
                current = consumers.find_consumer(tx, consumer.name, lock=True)
                empty = current is None or drain_inbox(tx, book, current)
                if current is not None:
                    consumers.save_consumer(tx, current)
            if not empty:
                let_others(book.ledger)


@contextmanager
def write_drained(book: Book, timeout: float | None = None) -> Iterator[Transaction]:
    """An exclusive transaction in which every inbox is empty: each consumer has a row for each record."""
    drain_long_inboxes(book)
    with book.ledger.write(timeout=timeout) as tx:
        drain_inboxes_within(tx, book)
        yield tx


def drain_long_inboxes(book: Book) -> None:
    """Drain inboxes that are too long to be drained within one transaction."""
    if book.ledger.all("SELECT COALESCE(SUM(count), 0) FROM inbox")[0][0] > CHUNK:
        drain_inboxes(book)


def drain_inboxes_within(tx: Transaction, book: Book) -> None:
    """Drain every inbox within an exclusive transaction."""
    for (name,) in tx.all("SELECT name FROM consumers WHERE id IN (SELECT consumer FROM inbox) ORDER BY id"):
        consumer = consumers.get_consumer(tx, name)
        while not drain_inbox(tx, book, consumer):
            pass
        consumers.save_consumer(tx, consumer)
