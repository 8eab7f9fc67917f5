"""Checks of a book (tables, places, bytes, counts, leases, groups, events, files), and reports of checks and repairs.

Invariant: the size of a report is bounded: all findings are counted, and at most `MAX_LISTED` of each kind are stored.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.book import compaction, media, queue
from rollbook.book.consumer import NOT_REMOVED, Consumer, find_consumer
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError
from rollbook.book.index_columns import IndexColumns, index_columns
from rollbook.book.ledger import INDICES, LAYOUT, TABLES, Transaction, chunks
from rollbook.book.read import read_frame
from rollbook.book.segments.files import ALIGN, FileSegmentStore, Place
from rollbook.core.errors import WireError

if TYPE_CHECKING:
    from rollbook.book.book import Book
    from rollbook.core.experiences import Experiences


MAX_LISTED = 100
"""Findings of one kind that a report stores; it counts the rest."""
ERROR, NOTE = "error", "note"
_REPAIR = "rollbook check --repair"
_COMPACT = "none is needed; rollbook compact removes it in time"
_REPAIR_RECORD = f"{_REPAIR} marks the record as damaged and keeps the others; a copy elsewhere can be appended again"
KINDS: dict[str, tuple[str, str]] = {
    "layout": (ERROR, f"{_REPAIR} rebuilds the ledger from its readable parts"),
    "ledger": (ERROR, f"{_REPAIR} rebuilds the ledger from its readable parts"),
    "type": (ERROR, f"{_REPAIR} rebuilds the ledger from its readable parts"),
    "missing": (ERROR, _REPAIR_RECORD),
    "damaged": (ERROR, _REPAIR_RECORD),
    "another": (ERROR, _REPAIR_RECORD),
    "medium": (ERROR, _REPAIR_RECORD),
    "tags": (ERROR, f"{_REPAIR} takes them from the record"),
    "uses": (ERROR, f"{_REPAIR} recounts them"),
    "consumer": (ERROR, f"{_REPAIR} resets the parts that cannot be read"),
    "queue": (ERROR, f"{_REPAIR} restores the rows from the events"),
    "tally": (ERROR, f"{_REPAIR} recounts"),
    "lease": (ERROR, f"{_REPAIR} ends it and returns its records to the queue"),
    "group": (ERROR, f"{_REPAIR} rebuilds all groups"),
    "quarantined": (ERROR, f"{_REPAIR} --offer offers all of them for training, book.revise(uid, retrain=True) one"),
    "event": (ERROR, "none: lost events are not reconstructed; later operations are not affected"),
    "orphan": (NOTE, _COMPACT),
    "unused": (NOTE, _COMPACT),
    "pending": (NOTE, "rollbook compact; a writer that is idle has to close the book first"),
    "idle": (NOTE, f"none is needed; {_REPAIR} ends it"),
    "begun": (NOTE, f"none is needed; {_REPAIR} moves it away"),
    "leftover": (NOTE, f"none is needed; {_REPAIR} moves it away"),
    "stranger": (NOTE, "none: the book never reads it"),
}
"""Kinds of findings, with their severity and remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem (`error`) or a harmless leftover (`note`).

    Attributes:
        kind: A key of `KINDS`.
        severity: `"error"` or `"note"`.
        description: What is wrong.
        subject: A record's id, a segment, a consumer or a table.
        remedy: What to do about it.

    >>> Finding("orphan", NOTE, "a segment without references", "0001.rbs", "none").severity
    'note'
    """

    kind: str
    severity: str
    description: str
    subject: str
    remedy: str


@dataclass(slots=True)
class Report:
    """The result of a check or a repair.

    Attributes:
        url: Address of the book.
        deep: Whether every byte of the data was checked, or only its place.
        records: Records that were checked.
        media: Media that were checked.
        segments: Segments that were checked.
        bytes: Size of these segments.
        findings: Current findings, at most `MAX_LISTED` of a kind.
        counts: Number of findings of each kind.
        repaired: What a repair did, recovered and could not recover, at most `MAX_LISTED` of a kind.
        repairs: Number of these actions of each kind.
        backup: Where a repair put copies of what it changed.

    >>> report = Report("runs/demo/book")
    >>> report.add("orphan", "a segment without references")
    >>> report.ok, report.counts["orphan"]
    (True, 1)
    """

    url: str
    deep: bool = True
    records: int = 0
    media: int = 0
    segments: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    repaired: list[Finding] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    backup: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error; notes do not count."""
        return not any(KINDS[kind][0] == ERROR for kind in self.counts)

    def add(self, kind: str, description: str, subject: str = "") -> None:
        """Add a finding.

        Args:
            kind: A key of `KINDS`.
            description: What is wrong.
            subject: A record's id, a segment, a consumer or a table.
        """
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_LISTED:
            severity, remedy = KINDS[kind]
            self.findings.append(Finding(kind, severity, description, subject, remedy))

    def add_repair(self, kind: str, description: str, subject: str = "", count: int = 1) -> None:
        """Add an action of a repair.

        Args:
            kind: The kind of finding that was repaired.
            description: What was done.
            subject: A record's id, a segment, a consumer or a table.
            count: How often it was done; nothing is added for 0.
        """
        if count:
            self.repairs[kind] += count
            if sum(repair.kind == kind for repair in self.repaired) < MAX_LISTED:
                self.repaired.append(Finding(kind, NOTE, description, subject, ""))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "url": self.url,
            "ok": self.ok,
            "deep": self.deep,
            "records": self.records,
            "media": self.media,
            "segments": self.segments,
            "bytes": self.bytes,
            "counts": dict(self.counts),
            "findings": [{name: getattr(finding, name) for name in Finding.__slots__} for finding in self.findings],
            "repairs": dict(self.repairs),
            "repaired": [
                {name: getattr(finding, name) for name in ("kind", "description", "subject")}
                for finding in self.repaired
            ],
            "backup": self.backup,
        }


PAGE_ROWS = 1000
"""Rows of the ledger that are checked together."""


class Problem(NamedTuple):
    """What is wrong with one record."""

    kind: str
    seq: int
    uid: str
    description: str
    fix: Any = None
    """Of kind `tags`, the record's index columns; of kind `uses`, the hashes of its media."""


class _Row(NamedTuple):
    seq: int
    segment: Any
    start: Any
    size: Any
    slot: Any
    removed_reason: str | None
    tags: IndexColumns


_SELECT_ROWS = f"SELECT seq, segment, start, size, slot, removed_reason, {', '.join(IndexColumns._fields)} FROM records"


def _read_rows(tx: Transaction, condition: str, values: Sequence[Any]) -> list[_Row]:
    rows = tx.all(f"{_SELECT_ROWS} WHERE {condition}", values)
    return [_Row._make((*row[:6], IndexColumns(*row[6:]))) for row in rows]


def read_pages(book: Book) -> Iterator[list[_Row]]:
    """Yield all records, a page at a time."""
    last = -(1 << 63)
    while True:
        with book.ledger.read() as tx:
            rows = _read_rows(tx, f"seq > ? ORDER BY seq LIMIT {PAGE_ROWS}", (last,))
        if not rows:
            return
        yield rows
        last = rows[-1].seq


def record_problems(book: Book, deep: bool, report: Report | None = None) -> Iterator[Problem]:
    """Yield the problems of records, in order; records that were moved or revised meanwhile are checked again."""
    for page in read_pages(book):
        if report is not None:
            report.records += len(page)
        suspects = [problem.seq for problem in _check_rows(book, page, deep)]
        for marks, chunk in chunks(list(dict.fromkeys(suspects))):
            with book.ledger.read() as tx:
                reread = _read_rows(tx, f"seq IN ({marks}) ORDER BY seq", chunk)
            yield from _check_rows(book, reread, deep)


def _check_rows(book: Book, rows: Sequence[_Row], deep: bool) -> Iterator[Problem]:
    stored: defaultdict[tuple[Any, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        if row.segment is not None:
            stored[row.segment, row.start, row.size].append(row)
        elif row.removed_reason is None:
            yield Problem("missing", row.seq, row.tags.uid, "the ledger has neither its place nor why it was removed")
    for frame_address, mine in stored.items():
        try:
            records = read_frame(book, Place(*frame_address), deep)
        except MissingSegmentError:
            for row in mine:
                yield Problem("missing", row.seq, row.tags.uid, f"segment {frame_address[0]} is not there")
            continue
        except (WireError, OSError) as error:
            for row in mine:
                yield Problem("damaged", row.seq, row.tags.uid, str(error))
            continue
        yield from _check_frame(book, records, mine)


def _check_frame(book: Book, frame: Experiences, rows: Sequence[_Row]) -> Iterator[Problem]:
    inside = []
    for row in rows:
        if type(row.slot) is int and 0 <= row.slot < len(frame):
            inside.append(row)
        else:
            description = f"slot {row.slot!r} of a frame of {len(frame)} records"
            yield Problem("damaged", row.seq, row.tags.uid, description)
    if not inside:
        return
    try:
        records = frame.take([row.slot for row in inside])
        expected = index_columns(records)
        references = media.references(records)
    except (WireError, ValueError) as error:
        for row in inside:
            yield Problem("damaged", row.seq, row.tags.uid, str(error))
        return
    uses: defaultdict[int, set[str]] = defaultdict(set)
    stored_hashes: set[str] = set()
    with book.ledger.read() as tx:
        for marks, chunk in chunks([row.seq for row in inside]):
            for seq, key in tx.all(f"SELECT seq, hash FROM media_uses WHERE seq IN ({marks})", chunk):
                uses[seq].add(key)
        for marks, chunk in chunks(list({key for keys in references for key in keys})):
            stored_hashes.update(key for (key,) in tx.all(f"SELECT hash FROM media WHERE hash IN ({marks})", chunk))
    for row, mine, keys in zip(inside, expected, references, strict=True):
        uid = row.tags.uid
        if mine.uid != uid:
            yield Problem("another", row.seq, uid, f"the record that lies there is {mine.uid!r}")
            continue
        unlike = [name for name in IndexColumns._fields if getattr(mine, name) != getattr(row.tags, name)]
        if unlike:
            name = unlike[0]
            description = f"{name}: the ledger has {getattr(row.tags, name)!r}, the record {getattr(mine, name)!r}"
            yield Problem("tags", row.seq, uid, description, mine)
        missing = [key for key in keys if key not in stored_hashes]
        if missing:
            yield Problem("medium", row.seq, uid, f"the medium sha256:{missing[0]} is not in the book")
        elif uses[row.seq] != set(keys):
            description = f"the ledger counts {len(uses[row.seq])} media, the record refers to {len(set(keys))}"
            yield Problem("uses", row.seq, uid, description, tuple(dict.fromkeys(keys)))


def media_problems(book: Book, deep: bool, report: Report | None = None) -> Iterator[tuple[str, str]]:
    """Yield (hash, problem) of media whose bytes are damaged or missing."""
    last = ""
    while True:
        with book.ledger.read() as tx:
            rows = tx.all(
                f"SELECT hash, segment, start, size FROM media WHERE hash > ? ORDER BY hash LIMIT {PAGE_ROWS}", (last,)
            )
        if not rows:
            return
        last = rows[-1][0]
        if report is not None:
            report.media += len(rows)
        for key, *location in rows:
            problem = _check_medium(book, key, Place(*location), deep)
            if problem is None:
                continue
            with book.ledger.read() as tx:  # Compaction may have moved it.
                now = tx.first("SELECT segment, start, size FROM media WHERE hash = ?", (key,))
            problem = None if now is None else _check_medium(book, key, Place(*now), deep)
            if problem is not None:
                yield key, problem


def _check_medium(book: Book, key: str, place: Place, deep: bool) -> str | None:
    try:
        digest = media.open_blob(book.store.get(place), verify=deep).hash
    except MissingSegmentError:
        return f"segment {place.segment} is not there"
    except (WireError, OSError) as error:
        return str(error)
    return None if digest == key else f"what lies there is sha256:{digest}"


LEFTOVER_NAME = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.ASCII)
"""Name of a temporary file that a crash left."""


def check(book: Book, *, deep: bool = True) -> Report:
    """Implement `Book.check`.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> _ = book.append([rollbook.Experience(tokens=[1, 2, 3], reward=1.0)])
    >>> check(book).ok
    True
    >>> with book.ledger.write() as tx:
    ...     _ = tx.run("UPDATE records SET reward = 2.0")
    >>> [(finding.kind, finding.description) for finding in check(book).findings]
    [('tags', 'reward: the ledger has 2.0, the record 1.0')]
    """
    report = Report(book.url, deep)
    for name, check_part in _CHECKS.items():
        if report.counts["layout"]:
            break  # Missing tables cannot be queried.
        try:
            check_part(book, report)
        except (BookError, WireError, sqlite3.Error) as error:
            report.add("ledger", f"{name}: {error}")
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            # A value has another type than its column, which SQLite allows.
            report.add("type", f"{name}: {type(error).__name__}: {error}")
    return report


# --- the ledger's tables --------------------------------------------------------------------------------------------


def read_columns(tx: Transaction, dialect: str, table: str) -> list[str]:
    """Return the names of a table's columns; none if the table does not exist."""
    if dialect == "sqlite":
        rows = tx.all("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))
    else:
        rows = tx.all(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = current_schema() "
            "AND table_name = ? ORDER BY ordinal_position",
            (table,),
        )
    return [name for (name,) in rows]


def expected_columns(table: str) -> list[str]:
    """Return the names of the columns that a table must have."""
    return [column.split()[0] for column in TABLES[table] if not column.startswith("PRIMARY KEY")]


def check_layout(book: Book, report: Report) -> None:
    dialect = book.ledger.dialect
    with book.ledger.read() as tx:
        for table in TABLES:
            found_columns = read_columns(tx, dialect, table)
            missing = [name for name in expected_columns(table) if name not in found_columns]
            if missing:
                report.add(
                    "layout", f"columns are missing: {', '.join(missing)}" if found_columns else "no such table", table
                )
        if report.counts["layout"]:
            return
        source = "sqlite_master WHERE type = 'index'" if dialect == "sqlite" else "pg_indexes"
        name = "name" if dialect == "sqlite" else "indexname"
        schema_filter = "" if dialect == "sqlite" else " WHERE schemaname = current_schema()"
        indices = {row[0] for row in tx.all(f"SELECT {name} FROM {source}{schema_filter}")}
        for index in (sql.split()[2] for sql in INDICES):
            if index not in indices:
                report.add("ledger", "the index is missing", index)
        row = tx.first("SELECT value FROM meta WHERE key = 'layout'")
        if row is None or str(row[0]) != str(LAYOUT):
            report.add("layout", f"layout {row and row[0]!r}, expected {LAYOUT}", "meta")
        if dialect == "sqlite":
            for (message,) in tx.all(f"PRAGMA integrity_check({MAX_LISTED})"):
                if message != "ok":
                    report.add("ledger", str(message), "ledger.sqlite")


_STORED_TYPES = {"TEXT": "('text')", "{INT}": "('integer')", "{REAL}": "('real', 'integer')", "{BYTES}": "('blob')"}


def check_types(book: Book, report: Report) -> None:
    if book.ledger.dialect != "sqlite":
        return  # PostgreSQL enforces the declared types.
    for table, columns in TABLES.items():
        wrong = []
        for column in columns:
            name, declared, *rest = column.split()
            if declared in _STORED_TYPES:
                allowed = _STORED_TYPES[declared]
                if "NOT" not in rest and "KEY" not in rest:
                    allowed = f"{allowed[:-1]}, 'null')"
                wrong.append(f"typeof({name}) NOT IN {allowed}")
        if wrong:
            with book.ledger.read() as tx:
                rows = tx.all(f"SELECT rowid FROM {table} WHERE {' OR '.join(wrong)} LIMIT {MAX_LISTED}")
            for (row,) in rows:
                report.add("type", "a value of another type than its column's", f"{table} row {row}")


# --- records and media ----------------------------------------------------------------------------------------------


def _check_records(book: Book, report: Report) -> None:
    for problem in record_problems(book, report.deep, report):
        report.add(problem.kind, problem.description, problem.uid)


def _check_media(book: Book, report: Report) -> None:
    for key, description in media_problems(book, report.deep, report):
        with book.ledger.read() as tx:
            rows = tx.all(
                "SELECT records.uid FROM media_uses JOIN records ON records.seq = media_uses.seq "
                f"WHERE media_uses.hash = ? LIMIT {MAX_LISTED}",
                (key,),
            )
        for (uid,) in rows or [("",)]:
            report.add("medium", f"sha256:{key}: {description}", uid)
    with book.ledger.read() as tx:
        unused = "FROM media WHERE NOT EXISTS (SELECT 1 FROM media_uses WHERE media_uses.hash = media.hash)"
        for (key,) in tx.all(f"SELECT hash {unused} LIMIT {MAX_LISTED}"):
            report.add("unused", "no record uses the medium", f"sha256:{key}")
        lost = (
            "FROM media_uses WHERE NOT EXISTS (SELECT 1 FROM media WHERE media.hash = media_uses.hash) OR NOT EXISTS "
            "(SELECT 1 FROM records WHERE records.seq = media_uses.seq AND records.segment IS NOT NULL)"
        )
        for key, seq in tx.all(f"SELECT hash, seq {lost} LIMIT {MAX_LISTED}"):
            report.add("uses", f"sha256:{key}: a use by record number {seq}, one of which is not there")


# --- consumers ------------------------------------------------------------------------------------------------------


def parse_each_consumer(tx: Transaction) -> tuple[list[Consumer], dict[int, str]]:
    """Return the consumers that can be parsed, and the errors of the others by number."""
    good: list[Consumer] = []
    bad: dict[int, str] = {}
    for number, name in tx.all("SELECT id, name FROM consumers ORDER BY id"):
        try:
            consumer = find_consumer(tx, name)
        except ValueError as error:
            bad[number] = str(error)
        else:
            if consumer is not None:
                good.append(consumer)
    return good, bad


def recount(tx: Transaction, consumer: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Compute the tallies of a consumer from its rows."""
    rows = tx.all(
        "SELECT state, COALESCE(reason, ''), COUNT(*), SUM(weight) FROM queue WHERE consumer = ? GROUP BY 1, 2",
        (consumer,),
    )
    return {(state, reason): (n, weight) for state, reason, n, weight in rows}


def _check_counts(book: Book, report: Report) -> None:
    with book.ledger.read() as tx:
        readable, unreadable = parse_each_consumer(tx)
        for number, reason in unreadable.items():
            report.add("consumer", reason, f"consumer number {number}")
        stored = dict(tx.all("SELECT evaluation, COUNT(*) FROM records GROUP BY 1"))
        totals = dict(tx.all("SELECT state, SUM(n) FROM tallies WHERE consumer = 0 GROUP BY 1"))
        for state, key in (("admitted", 0), ("evaluation", 1)):
            if totals.get(state, 0) != stored.get(key, 0):
                report.add(
                    "tally", f"{state}: counted {totals.get(state, 0)}, there are {stored.get(key, 0)}", "records"
                )
        for consumer in readable:
            _check_consumer(tx, report, consumer, totals.get("admitted", 0))
        stray = f"consumer NOT IN (SELECT id FROM consumers) AND {NOT_REMOVED}"
        _add_stray_rows(tx, report, "queue", stray, "of a consumer that is not there")
        without_record = "NOT EXISTS (SELECT 1 FROM records WHERE records.seq = queue.seq)"
        _add_stray_rows(tx, report, "queue", without_record, "of a record that is not there")


def _check_consumer(tx: Transaction, report: Report, consumer: Consumer, admitted: int) -> None:
    name = f"consumer {consumer.name!r}"
    counted = recount(tx, consumer.id)
    rows = tx.all(
        "SELECT state, reason, SUM(n), SUM(weight) FROM tallies WHERE consumer = ? GROUP BY 1, 2", (consumer.id,)
    )
    tallies = {(state, reason): (n, weight) for state, reason, n, weight in rows}
    total_weight = sum(weight for _, weight in counted.values())  # Rounding errors grow with the total.
    for key in sorted({*counted, *tallies}):
        n, weight = tallies.get(key, (0, 0.0))
        real, real_weight = counted.get(key, (0, 0.0))
        label = " ".join(filter(None, key))
        if n != real:
            report.add("tally", f"{label}: counted {n}, there are {real}", name)
        elif abs(weight - real_weight) > 1e-6 * max(abs(real_weight), 1.0) + 1e-12 * total_weight:
            report.add("tally", f"{label}: weight {weight!r}, there is {real_weight!r}", name)
        if key[0] not in queue.STATES:
            report.add("queue", f"{real} rows in unknown state {key[0]!r}", name)
    total = sum(n for n, _ in counted.values()) + queue.inbox_size(tx, consumer.id)
    if total != admitted:
        report.add("queue", f"{admitted} records were admitted, {total} are waiting, leased, trained or dropped", name)
    missing = tx.all(
        "SELECT uid FROM records WHERE evaluation = 0 AND NOT EXISTS (SELECT 1 FROM queue "
        "WHERE queue.seq = records.seq AND queue.consumer = ?) AND NOT EXISTS (SELECT 1 FROM inbox "
        f"WHERE inbox.consumer = ? AND records.seq BETWEEN inbox.first AND inbox.last) LIMIT {MAX_LISTED}",
        (consumer.id, consumer.id),
    )
    for (uid,) in missing:
        report.add("queue", f"{name} has no row for it", uid)
    evaluation_uids = tx.all(
        "SELECT records.uid FROM records JOIN queue ON queue.seq = records.seq WHERE records.evaluation <> 0 AND "
        f"queue.consumer = ? LIMIT {MAX_LISTED}",
        (consumer.id,),
    )
    for (uid,) in evaluation_uids:
        report.add("queue", f"{name} has a row for a record that is for evaluation", uid)


def _add_stray_rows(tx: Transaction, report: Report, kind: str, condition: str, description: str) -> None:
    for consumer, seq in tx.all(f"SELECT consumer, seq FROM queue WHERE {condition} LIMIT {MAX_LISTED}"):
        report.add(kind, f"a row {description}", f"consumer number {consumer}, record number {seq}")


def _check_quarantine(book: Book, report: Report) -> None:
    with book.ledger.read() as tx:
        for uid in queue.quarantined_uids(tx):
            problem = "its history was lost: it is held back from consumers that may have trained on it"
            report.add(queue.QUARANTINED, problem, uid)


LEASED_WITHOUT_LEASE = (
    "state = 'leased' AND (lease IS NULL OR NOT EXISTS "
    "(SELECT 1 FROM leases WHERE leases.id = queue.lease AND leases.state = 'active'))"
)
"""Condition on `queue`: leased, but by no active lease."""
LEASE_WITHOUT_STATE = "state <> 'leased' AND lease IS NOT NULL"
EXPIRED_AND_EMPTY = (
    "state = 'active' AND expires <= ? AND NOT EXISTS "
    "(SELECT 1 FROM queue WHERE queue.lease = leases.id AND queue.state = 'leased')"
)
"""Condition on `leases`: expired, without records."""


def _check_leases(book: Book, report: Report) -> None:
    with book.ledger.read() as tx:
        _add_stray_rows(tx, report, "lease", LEASED_WITHOUT_LEASE, "that is leased, by no lease that lives")
        _add_stray_rows(tx, report, "lease", LEASE_WITHOUT_STATE, "that is not leased and names a lease")
        for (number,) in tx.all(f"SELECT id FROM leases WHERE {EXPIRED_AND_EMPTY} LIMIT {MAX_LISTED}", (tx.now,)):
            report.add("idle", "its time is up, and it holds nothing", f"lease {number}")


def wrong_groups(tx: Transaction, consumer: Consumer) -> list[tuple[str, str]]:
    """Return (group, problem) of a consumer that leases by group, at most `MAX_LISTED`."""
    if not consumer.grouped or "ungrouped" in consumer.state or "unranked" in consumer.state:
        return []
    settings = consumer.settings
    size = "COALESCE(actual.size, ?)"
    after = settings.partial_after
    complete = f"({size} IS NULL OR actual.runs >= {size})"
    waits = "(COALESCE(states.waiting, 0) > 0 AND COALESCE(states.leased, 0) = 0)"
    # A due group is made ready by the next lease.
    early = "1 = 1" if after is None else f"actual.since + {float(after)!r} > {tx.now!r}"
    rows = tx.all(
        "SELECT actual.gid, stored.ready, stored.runs, actual.runs FROM "
        "(SELECT records.gid, COUNT(DISTINCT run) AS runs, MAX(group_size) AS size, MIN(admitted) AS since "
        "FROM records JOIN queue ON queue.consumer = ? AND queue.seq = records.seq "
        "WHERE evaluation = 0 AND (removed_reason IS NULL OR removed_reason <> 'rewound') "
        "GROUP BY records.gid) AS actual "
        "LEFT JOIN (SELECT gid, ready, runs FROM groups WHERE consumer = ?) AS stored ON stored.gid = actual.gid "
        "LEFT JOIN (SELECT gid, SUM(CASE WHEN state = 'waiting' THEN 1 ELSE 0 END) AS waiting, "
        "SUM(CASE WHEN state = 'leased' THEN 1 ELSE 0 END) AS leased FROM queue WHERE consumer = ? GROUP BY gid) "
        "AS states ON states.gid = actual.gid WHERE stored.gid IS NULL OR stored.runs <> actual.runs "
        f"OR (stored.ready = 0 AND {complete} AND {waits}) OR (stored.ready <> 0 AND NOT {waits}) "
        f"OR (stored.ready <> 0 AND NOT {complete} AND {early}) ORDER BY actual.gid LIMIT {MAX_LISTED}",
        (consumer.id, consumer.id, consumer.id, *[settings.group_size] * 4),
    )
    wrong = [
        (gid, "the ledger has no such group" if ready is None else f"ready {ready} with {had} runs, there are {runs}")
        for gid, ready, had, runs in rows
    ]
    ready = tx.first("SELECT COUNT(*) FROM groups WHERE consumer = ? AND ready = 1", (consumer.id,))[0]
    counted = consumer.state.get("ready", (0, 0.0))[0]
    if counted != ready:
        wrong.append(("", f"counted {counted} groups that are ready, there are {ready}"))
    return wrong


def _check_groups(book: Book, report: Report) -> None:
    with book.ledger.read() as tx:
        for consumer in parse_each_consumer(tx)[0]:
            for gid, description in wrong_groups(tx, consumer):
                report.add("group", f"consumer {consumer.name!r}: {description}", gid)


# --- events ---------------------------------------------------------------------------------------------------------

_STATES_AFTER = {
    "leased": (queue.LEASED,),
    "trained": (queue.TRAINED, queue.WAITING, queue.COOLING),
    "nacked": (queue.WAITING,),
    "expired": (queue.WAITING,),
    "rested": (queue.WAITING,),
    "returned": (queue.WAITING,),
    "dropped": (queue.DROPPED,),
    "voided": queue.STATES,
}
"""States that a record can have for a consumer after its last event."""


class EventSummary(NamedTuple):
    """The state of a record for a consumer, according to its events."""

    kind: str | None = None
    """Kind of the last event that changed the state; `None` for a record without one, which is waiting."""
    reason: str | None = None
    event: int = 0
    acks: frozenset[int | None] = frozenset()
    """The leases under which it was trained, without those that were voided."""


def summarize_events(tx: Transaction, seqs: Sequence[int]) -> dict[tuple[int, int], EventSummary]:
    """Summarize the events of records, by record and consumer."""
    histories: dict[tuple[int, int], EventSummary] = {}
    for marks, chunk in chunks(seqs):
        rows = tx.all(
            "SELECT seq, consumer, kind, reason, id, lease FROM events WHERE consumer IS NOT NULL "
            f"AND seq IN ({marks}) ORDER BY id",
            chunk,
        )
        for seq, consumer, kind, reason, event, lease in rows:
            if kind in _STATES_AFTER:
                acks = histories.get((seq, consumer), EventSummary()).acks
                acks = acks | {lease} if kind == "trained" else acks - {lease} if kind == "voided" else acks
                histories[seq, consumer] = EventSummary(kind, reason, event, acks)
    return histories


_STRICT_JSON = "replace(replace(detail, 'Infinity', '0'), 'NaN', '0')"
"""SQL: `detail` without the infinities and NaN of Python's JSON, which SQLite rejects."""


def _check_events(book: Book, report: Report) -> None:
    with book.ledger.read() as tx:
        without_event = "NOT EXISTS (SELECT 1 FROM events WHERE events.seq = records.seq AND events.kind IN {})"
        for (uid,) in tx.all(f"SELECT uid FROM records WHERE {without_event.format(_FIRST_EVENTS)} LIMIT {MAX_LISTED}"):
            report.add("event", "it has no event of its append", uid)
        rewound = tx.first("SELECT COALESCE(MAX(id), 0) FROM events WHERE kind = 'rewound'")[0]
        if book.ledger.dialect == "sqlite":
            for (event,) in tx.all(
                f"SELECT id FROM events WHERE detail IS NOT NULL AND NOT json_valid({_STRICT_JSON}) LIMIT {MAX_LISTED}"
            ):
                report.add("event", "invalid JSON in its detail", f"event {event}")
        good = parse_each_consumer(tx)[0]
    for page in read_pages(book):
        seqs = [row.seq for row in page]
        with book.ledger.read() as tx:
            histories = summarize_events(tx, seqs)
            rows = [(consumer, row) for consumer in good for row in queue.select_rows_by_seq(tx, consumer, seqs)]
        uids = {row.seq: row.tags.uid for row in page}
        for consumer, row in rows:
            mine = histories.get((row.seq, consumer.id), EventSummary())
            if mine.event < rewound:
                continue  # A rewind restores rows without an event for each.
            name = f"consumer {consumer.name!r}"
            allowed = (queue.WAITING,) if mine.kind is None else _STATES_AFTER[mine.kind]
            if row.state not in allowed:
                report.add("event", f"{name}: it is {row.state}, its last event is {mine.kind}", uids[row.seq])
            elif row.uses != len(mine.acks):
                description = f"{name}: used {row.uses} times, {len(mine.acks)} times by its events"
                report.add("event", description, uids[row.seq])


_FIRST_EVENTS = "('admitted', 'recovered')"


# --- the store ------------------------------------------------------------------------------------------------------


def _check_store(book: Book, report: Report) -> None:
    # Segments first: what is committed in between is then not reported as missing.
    stored_segments = book.store.segments()
    report.segments, report.bytes = len(stored_segments), sum(stored_segments.values())
    with book.ledger.read() as tx:
        used = {
            name
            for table in ("records", "media")
            for (name,) in tx.all(f"SELECT DISTINCT segment FROM {table} WHERE segment IS NOT NULL")
        }
    for name in stored_segments:
        try:
            book.store.get(Place(name, ALIGN, 0))
        except MissingSegmentError:
            continue
        except CorruptBookError as error:
            if name not in used and not book.store.busy(name):
                report.add("begun", f"incomplete segment: {error}", name)
            continue
        if name not in used and not book.store.busy(name):
            report.add("orphan", "a segment that nothing in the ledger points to", name)
    for name, reason in compaction.pending_purges(book).items():
        report.add("pending", f"holds deleted or redacted bytes; {reason}", name)
    if isinstance(book.store, FileSegmentStore):
        for kind, path in find_foreign_files(book.store):
            description = "a file left by a crash" if kind == "leftover" else "not part of a book"
            report.add(kind, description, path)


def find_foreign_files(store: FileSegmentStore) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) of foreign files in a book's folder."""
    for folder in (os.path.dirname(store.folder), store.folder):
        try:
            with os.scandir(folder) as entries:
                names = sorted((entry.name, entry.is_symlink()) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name, link in names:
            path = os.path.join(folder, name)
            if LEFTOVER_NAME.fullmatch(name):
                yield "leftover", path
            elif link or (folder == store.folder and not name.endswith(".rbs")):
                yield "stranger", path


_CHECKS: dict[str, Callable[[Book, Report], None]] = {
    "layout": check_layout,
    "types": check_types,
    "records": _check_records,
    "media": _check_media,
    "counts": _check_counts,
    "quarantined": _check_quarantine,
    "leases": _check_leases,
    "groups": _check_groups,
    "events": _check_events,
    "store": _check_store,
}
"""In this order; a check that fails is named in its finding."""
