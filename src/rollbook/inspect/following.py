"""`Follower`: an index kept in step with a book while others write it.

Invariant: what is new comes by number, what changed by the ledger's events; both are read with what they lead to in one
transaction, so that nothing is missed between two looks. A record is shown as soon as the ledger has it, and measured
when its bytes were read; the newest first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rollbook.book import reports
from rollbook.book.book import TRAIN
from rollbook.book.consumer import find_consumer
from rollbook.book.errors import BookError
from rollbook.book.ledger import Transaction, chunks, parsed
from rollbook.core.errors import WireError
from rollbook.core.ids import step_of
from rollbook.inspect import measures
from rollbook.inspect.bulk import READ, Bulk, columns_of
from rollbook.inspect.index import VOID, Index
from rollbook.inspect.records import Reader

if TYPE_CHECKING:
    from rollbook.book.book import Book

AT_ONCE = 4000
"""Rows of the ledger that are read in one transaction."""
PIECE = 512
PIECE_TOKENS = 1 << 20
"""Records, and tokens, that are measured together at most: what bounds the memory."""
SECONDS = 0.5
"""How long one look works before it lets others see what there is."""

_MOST_PROBLEMS = 20
_TAKEN = (
    *("uid", "gid", "batch", "task", "run", "reward", "scored", "length", "prompt_tokens", "response_tokens"),
    *("trained_tokens", "version_min", "version_max", "finish_reason", "kind", "group_size", "parent", "evaluation"),
    *("admitted", "gone"),
)
"""The ledger's columns that the index has under the same name."""
_READ = ", ".join(f"records.{name}" for name in ("seq", *_TAKEN, "step", "truncate_status"))
_MOVES = ("leased", "trained", "nacked", "expired", "rested", "dropped", "returned", "voided")
_CHANGES = ("revised", "redacted")
_GOES = ("deleted", "removed")
_ANEW = ("rewound", "repaired")
"""Events after which every record is read again."""
_BLANK = {"opening": "", "closing": "", "parts": "{}", "kept": None, "measured": 1, "digest": None}


def _state(consumer: int) -> str:
    """The column of a record's state: what a consumer has no row for yet, in its inbox, waits."""
    return "work.state" if consumer < 0 else "COALESCE(work.state, 'waiting')"


class Follower:
    """Keeps an index in step with one book.

    Args:
        book: The book to follow.
        index: The index to fill.
        reader: Reads the book's records.
        seqs: The records to read, once, by number; by default all, and whatever comes later.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(eid={"batch": 3, "task": 1}, tokens=[1, 2, 3], reward=1.0)])
    >>> index = Index()
    >>> follower = Follower(book, index, Reader(book))
    >>> follower.refresh(), follower.refresh()
    ({3}, None)
    >>> index.query("SELECT step, reward, state, measured FROM samples")
    [(3, 1.0, 'waiting', 1)]
    >>> index.close()
    """

    def __init__(self, book: Book, index: Index, reader: Reader, seqs: Sequence[int] | None = None) -> None:
        self.book = book
        self._left = seqs
        self.index = index
        self.reader = reader
        self.problems: list[str] = []
        """What could not be read, at most the first twenty."""
        self._seq = 0
        self._event: int | None = None
        self._logged = 0
        """The last event that logged metrics, since this looks."""
        self._trains = False
        """Whether anything was trained on: what waits then has no lag yet."""
        self._highs = _Highs()
        self._bulk: Bulk | None = None

    def refresh(self, seconds: float = SECONDS) -> set[int] | None:
        """Look for what is new or changed, then measure, for about so long; the steps that changed, `None` if nothing
        was left to do."""
        end = time.monotonic() + seconds
        while True:
            busy = self._look() or self._judge() or self._measure()
            if not busy or time.monotonic() > end:
                changed = self.index.settle()
                if changed or not busy:
                    return changed or None

    # --- what the ledger says -----------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Take one transaction's worth of new records or events; whether there was any."""
        # A writer beside this one may commit smaller numbers later than larger ones: nothing is read beyond the bounds.
        seqs, events = self.book.ledger.bounds()
        with self.book.ledger.read() as tx:
            train = find_consumer(tx, TRAIN)
            consumer = -1 if train is None else train.id
            if self._event is None:
                # What happens from here on is met as events; all before is in the rows.
                self._event = events
                self._highs.read(tx, 0, self._event)
                if self._left is not None:
                    self._highs.read_records(tx)
            if not self._seq:  # also after a rewind, which may take all training back
                trained = tx.one("SELECT SUM(n) FROM tallies WHERE consumer = ? AND state = 'trained'", (consumer,))
                self._trains = bool(trained and trained[0])
            if self._left is not None:
                part, self._left = self._left[:AT_ONCE], self._left[AT_ONCE:]
                rows = self._rows_of(tx, part, consumer)
                self.index.put(rows)
                return bool(rows)
            found = tx.all(
                f"SELECT {_READ}, {_state(consumer)}, work.reason FROM records LEFT JOIN work ON work.consumer = ? "
                "AND work.seq = records.seq WHERE records.seq > ? AND records.seq <= ? ORDER BY records.seq LIMIT ?",
                (consumer, self._seq, seqs, AT_ONCE),
            )
            if found:
                bounds = (found[0][0], found[-1][0])
                happened = tx.all(f"{_HAPPENED} seq >= ? AND seq <= ? ORDER BY id", bounds)
                rows = self._rows(found, happened, consumer)
            else:
                rows, changed, last = self._changes(tx, consumer, events)
        if found:
            self.index.put(rows)
            self._seq = found[-1][0]
            return True
        if last == self._event:
            return False
        if changed is None:
            self._seq = 0
        elif rows:
            self.index.put(rows)
            self.index.forget(changed)
        self._event = last
        if self._logged:
            self.index.keep("logged", self._logged)  # so that pages hear of it
        return True

    def _changes(
        self, tx: Transaction, consumer: int, bound: int
    ) -> tuple[list[dict[str, Any]], list[int] | None, int]:
        """Rows of the records that something happened to since the last event, those of them whose text changed
        (`None`: everything is to be read again), and the last event."""
        events = tx.all(
            "SELECT id, kind, seq, consumer FROM events WHERE id > ? AND id <= ? AND kind <> 'admitted' "
            "ORDER BY id LIMIT ?",
            (self._event, bound, AT_ONCE),
        )
        if not events:
            return [], [], bound
        last = events[-1][0]
        self._highs.read(tx, self._event or 0, last)
        kinds: dict[int, set[str]] = {}
        for event, kind, seq, whose in events:
            if kind == reports.METRICS_KIND:
                self._logged = event
            if kind == "trained" and whose == consumer:
                self._begin_lags()
            if kind in _ANEW:
                return [], None, last
            if seq is not None and seq <= self._seq and (whose in (None, consumer)):
                kinds.setdefault(seq, set()).add(kind)
        rows = self._rows_of(tx, sorted(kinds), consumer)
        other = {seq for seq, met in kinds.items() if not met.isdisjoint((*_CHANGES, *_GOES))}
        for row in rows:
            if row["n"] in other and row["gone"] is None:
                row["measured"] = 0
            elif row["gone"] in VOID:
                row.update(_BLANK)
        return rows, sorted(other), last

    def _begin_lags(self) -> None:
        """Forget the lags of records that wait, now that some are trained on: theirs is known when they are."""
        if not self._trains:
            self._trains = True
            waiting = self.index.query("SELECT n FROM samples WHERE state IN ('waiting', 'leased')")
            self.index.put({"n": n, "lag": None, "moment": None} for (n,) in waiting)

    def _rows_of(self, tx: Transaction, seqs: Sequence[int], consumer: int) -> list[dict[str, Any]]:
        """Rows of `samples` of some records."""
        found: list[Any] = []
        happened: list[Any] = []
        for marks, part in chunks(seqs):
            found += tx.all(
                f"SELECT {_READ}, {_state(consumer)}, work.reason FROM records LEFT JOIN work ON work.consumer = ? "
                f"AND work.seq = records.seq WHERE records.seq IN ({marks}) ORDER BY records.seq",
                (consumer, *part),
            )
            happened += tx.all(f"{_HAPPENED} seq IN ({marks}) ORDER BY id", part)
        return self._rows(found, happened, consumer)

    def _rows(self, found: Iterable[Any], happened: Iterable[Any], consumer: int) -> list[dict[str, Any]]:
        """Rows of `samples`, as far as the ledger knows them."""
        came: dict[int, int] = {}
        trained: dict[int, dict[Any, tuple[int, int | None]]] = {}
        for event, seq, kind, whose, step, lease in happened:
            if kind == "trained" and whose == consumer:
                trained.setdefault(seq, {})[lease] = (event, step)
            elif kind == "voided" and whose == consumer:
                trained.get(seq, {}).pop(lease, None)
            elif kind in ("admitted", "recovered"):
                came[seq] = event
        rows = []
        for seq, *values, turn, cut, state, reason in found:
            row = {"n": seq, **dict(zip(_TAKEN, values, strict=True))}
            last = max(trained.get(seq, {}).values(), default=None)
            row["step"] = step_of(row["batch"], row["version_min"])
            row["turn"] = turn
            failed = row["gone"] is not None and row["length"] == 0 and row["gone"] not in VOID
            row["status"] = "error" if failed else measures.status_of(row["finish_reason"], cut, row["response_tokens"])
            row["state"] = "evaluation" if row["evaluation"] else _STATES.get(state, state or "")
            row["reason"] = reason
            row["trained_step"] = None if last is None else last[1]
            waits = self._trains and state in _WAITS
            row["moment"] = last[0] if last is not None else None if waits else came.get(seq)
            row["lag"] = None
            row["evaluation"] = int(row["evaluation"])
            if row["gone"] is not None:
                row["measured"] = 1
            if row["version_max"] is not None:
                self._highs.see(came.get(seq, 0), row["version_max"])
            rows.append(row)
        return rows

    def _judge(self) -> bool:
        """Say how far behind the policy records were, once all that came before them is known; whether any were."""
        found = self.index.query(
            "SELECT n, moment, version_min FROM samples "
            "WHERE lag IS NULL AND version_min IS NOT NULL AND moment IS NOT NULL LIMIT ?",
            (AT_ONCE,),
        )
        self.index.put({"n": n, "lag": max(0, self._highs.at(moment) - version)} for n, moment, version in found)
        return bool(found)

    # --- what the bytes say -------------------------------------------------------------------------------------

    def _measure(self) -> bool:
        """Measure one piece of what is not measured yet; whether there was any."""
        waiting = self.index.query("SELECT n, length FROM samples WHERE measured = 0 ORDER BY n DESC LIMIT ?", (PIECE,))
        if not waiting:
            return False
        total, ns = 0, list[int]()
        for n, length in waiting:
            if ns and total + length > PIECE_TOKENS:
                break
            ns.append(n)
            total += length
        if self._bulk is None:
            self._bulk = Bulk(self.reader, self.index.scales)
        self.index.put(self._measured(sorted(ns)))
        self.index.declare(self._bulk.declared)
        self.index.keep("tokenized", ["ids" if self.reader.vocabulary is None else "exact"])
        if self._bulk.rescaled:
            self._bulk.rescaled = False
            self.index.keep("scales", self.index.scales.as_dict())
        return True

    def _measured(self, ns: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The measured columns of some records; what cannot be read is said, and not tried again."""
        try:
            rows = self._read(ns)
        except (BookError, WireError, ValueError, OSError) as error:
            if len(ns) > 1:
                half = len(ns) // 2
                yield from self._measured(ns[:half])
                yield from self._measured(ns[half:])
                return
            with self.book.ledger.read():
                pass  # A book that was closed, or cannot be reached, is no damage: that raises here.
            rows = {}
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(f"record number {ns[0]}: {error}")
        # Without bytes, since a moment ago: the ledger's event says so next.
        yield from ({"n": n, **rows.get(n, {"measured": 1})} for n in ns)

    def _read(self, ns: Sequence[int]) -> dict[int, dict[str, Any]]:
        bulk = self._bulk
        found: dict[int, dict[str, Any]] = {}
        if bulk is None:
            return found
        for _, run in groupby(enumerate(ns), key=lambda pair: pair[1] - pair[0]):
            numbers = [n for _, n in run]
            for batch in self.book.where(("seq", ">=", numbers[0]), ("seq", "<=", numbers[-1])).scan(
                ("seq", *READ), rows=PIECE
            ):
                columns = columns_of(batch)
                seqs = columns.pop("seq").to_pylist()
                found.update(zip(seqs, bulk.rows(columns, len(seqs)), strict=True))
        return found


_HAPPENED = (
    "SELECT id, seq, kind, consumer, step, lease FROM events "
    "WHERE kind IN ('admitted', 'recovered', 'trained', 'voided') AND"
)
_STATES = {"cooling": "waiting"}
_WAITS = ("waiting", "leased", "cooling")


class _Highs:
    """The highest policy version that was seen or announced by each event of the ledger."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, int]] = []
        self._ids: list[int] = []
        self._tops: list[int] = []
        self._top = -1
        self._fresh = True

    def see(self, event: int, version: int) -> None:
        """A record that came with this event has tokens of this version."""
        if version > self._top:
            self._top = version
            self._add(event, version, -1)

    def read_records(self, tx: Transaction) -> None:
        """The first record of each version, of which a few are among many records."""
        firsts = tx.all(
            "SELECT MIN(seq), version_max FROM records WHERE version_max IS NOT NULL GROUP BY version_max ORDER BY 1"
        )
        came: dict[int, int] = {}
        for marks, part in chunks([seq for seq, _ in firsts]):
            came |= {
                seq: event
                for event, seq, kind, *_ in tx.all(f"{_HAPPENED} seq IN ({marks}) ORDER BY id", part)
                if kind in ("admitted", "recovered")
            }
        for seq, version in firsts:
            self.see(came.get(seq, 0), version)

    def read(self, tx: Transaction, after: int, last: int) -> None:
        """What was announced, and what a rewind took back, among some events."""
        for event, kind, detail in tx.all(
            "SELECT id, kind, detail FROM events WHERE id > ? AND id <= ? AND kind IN ('announced', 'rewound') "
            "ORDER BY id",
            (after, last),
        ):
            told = parsed(detail, "an event's detail") if detail else {}
            version, back = told.get("version"), told.get("event")
            if kind == "announced" and isinstance(version, int):
                self._add(event, version, -1)
            elif kind == "rewound" and isinstance(back, int):
                self._add(event, 0, back)
                self._top = -1

    def _add(self, event: int, version: int, back: int) -> None:
        self._points.append((event, version, back))
        self._fresh = False

    def at(self, event: int) -> int:
        """The highest version by an event; 0 before any."""
        if not self._fresh:
            self._ids, self._tops = [], []
            for when, version, back in sorted(self._points):
                top = self._tops[-1] if self._tops else 0
                if back >= 0:
                    place = bisect_right(self._ids, back) - 1
                    top = self._tops[place] if place >= 0 else 0
                self._ids.append(when)
                self._tops.append(max(top, version))
            self._fresh = True
        place = bisect_right(self._ids, event) - 1
        return self._tops[place] if place >= 0 else 0
