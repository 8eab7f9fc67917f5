"""Repairing: a book with damage becomes one that keeps its promises, with everything that can still be read.

Invariant: nothing is destroyed: what a repair changes was copied or moved aside first, and what it could not recover is
named. A record that was deleted or redacted does not come back. What the ledger lost of the past is not made up: a
record whose history is not known is quarantined, and offered to no consumer until `repair(url, offer=True)`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.book import (
    checking,
    consumers,
    deletions,
    groups,
    inbox,
    inspecting,
    quarantine,
    reading,
    rebuilding,
    tags,
    work,
)
from rollbook.book import schema as tables
from rollbook.book.book import Book
from rollbook.book.checking import Past, readable
from rollbook.book.consumers import Consumer, Settings
from rollbook.book.disk import Disk
from rollbook.book.errors import BookError, NewerLayoutError, NotABookError
from rollbook.book.findings import Report
from rollbook.book.inspecting import PAGE
from rollbook.book.ledger import BUSY_SECONDS, SQLiteLedger, Transaction, check_files, chunks
from rollbook.book.locks import folder_lock
from rollbook.book.opening import LEDGER, _folder, _postgres
from rollbook.book.opening import open as open_book
from rollbook.book.quarantine import QUARANTINED
from rollbook.book.rebuilding import LOGS
from rollbook.book.salvaging import Lost
from rollbook.book.shelves import FolderShelf, Place, is_name
from rollbook.core.addresses import POSTGRES, redacted
from rollbook.core.errors import WireError
from rollbook.core.files import FOLDER, make_private, private_opener

DAMAGED = "damaged"
OLD_SECONDS = 60.0
"""A temporary file younger than this may be a living writer's."""


def repair(url: str | os.PathLike[str], *, offer: bool = False) -> Report:
    """Mend a book, and say what was done and what is lost; `report.ok` says whether all is well now.

    Args:
        url: The book's folder, or `postgresql://...`.
        offer: Release quarantined records: those that a repair, now or before, recovered without knowing whether they
            were trained on. They can be read, but are leased only after this.

    A folder whose ledger is damaged or missing gets a new one, of what can be read of the old one and what is found in
    the segments. What is changed is copied first, to `<folder>.before-repair-<time>` beside the folder; of a book in
    PostgreSQL, the tables are copied to a schema of such a name.

    >>> import rollbook, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rollbook.open(f"{folder}/demo") as book:
    ...         _ = book.append([rollbook.Experience(eid={"suffix": "a"}, tokens=[1, 2, 3])])
    ...     os.unlink(f"{folder}/demo/ledger.sqlite")
    ...     report = repair(f"{folder}/demo")
    ...     [finding.kind for finding in report.findings], report.repairs["recovered"]
    ...     repair(f"{folder}/demo", offer=True).ok
    (['quarantined'], 1)
    True
    """
    address = os.fspath(url)
    if address.startswith(POSTGRES):
        with Book(address, *_postgres(address, "r+", None, {}, None)) as book:
            return _mended(book, Report(book.url), lambda: _copy_schema(book), offer)
    if "://" in address:
        raise ValueError(f"url: got {redacted(address)!r}, expected a folder or 'postgresql://...'")
    folder = Path(os.path.abspath(os.path.expanduser(address)))
    path = folder / LEDGER
    check_files(path)
    if not folder.is_dir():
        raise NotABookError(f"{folder}: there is no book here")
    report = Report(address)
    why = _unsound(address, path)
    if why is None:
        # Not opened as users do: that looks at a consumer, which may be what is damaged.
        with Book(address, *_folder(folder, "r+", 256 << 20, None, Disk())) as book:
            return _mended(book, report, lambda: _copy_ledger(path, _aside(folder)), offer)
    # Write transactions share this lock: those that come later see that the ledger is another one, and raise.
    with folder_lock(folder, shared=False, seconds=BUSY_SECONDS) as alone:
        if not alone:
            raise BookError(f"{folder}: other processes wrote to the book for {BUSY_SECONDS:g} s; repair it later")
        why = _unsound(address, path)
        if why is not None:
            return _rebuilt(folder, path, report, why, offer)
    return repair(url, offer=offer)  # Another repair was faster.


def _unsound(address: str, path: Path) -> str | None:
    """Why the ledger has to be built anew; `None` if it can be mended where it is."""
    if not path.exists():
        return "the ledger is missing"
    try:
        with open_book(address, "r") as book:
            report = Report(address)
            for stage in (checking._layout, checking._types):
                stage(book, report)
    except NewerLayoutError:
        raise
    except (BookError, OSError, sqlite3.Error) as error:
        return str(error)
    return next((f"{each.where}: {each.what}" for each in report.findings), None)


_UNMENDED = {"orphan", "unused", "stranger", "event", QUARANTINED}


def _mended(book: Book, report: Report, copy: Any, offer: bool) -> Report:
    """Mend a book whose ledger can be read."""
    before = checking.check(book)
    well = set(before.counts) <= _UNMENDED
    if well and not (offer and before.counts[QUARANTINED]):
        return before
    report.aside = copy()
    if not well:
        _mend(book, report)
    if offer:
        _release(book, report)
    return _with_check(book, report)


def _release(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        report.did("offered", "quarantined records are offered for training", count=quarantine.release_quarantine(tx))


def _with_check(book: Book, report: Report) -> Report:
    after = checking.check(book)
    after.repaired, after.repairs, after.aside = report.repaired, report.repairs, report.aside
    return after


# --- what is kept of what was ---------------------------------------------------------------------------------------


def _aside(folder: Path) -> str:
    """A new folder beside the book's."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    base = f"{os.path.abspath(folder)}.before-repair-{stamp}"
    for n in range(1000):
        name = base if not n else f"{base}-{n}"
        try:
            os.mkdir(name, FOLDER)
        except FileExistsError:
            continue
        return name
    raise BookError(f"{base}: a thousand repairs in a second")


def _copy_ledger(path: Path, aside: str) -> str:
    """A copy of a ledger that is in use, as one transaction sees it."""
    source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    target = sqlite3.connect(os.path.join(aside, LEDGER))
    try:
        source.backup(target)
    finally:
        target.close()
        source.close()
    make_private(os.path.join(aside, LEDGER))
    _sync(os.path.join(aside, LEDGER))
    return aside


def _copy_schema(book: Book) -> str:
    """The tables of a book in PostgreSQL, without its data, in a schema of their own."""
    name = f"before_repair_{time.strftime('%Y%m%d_%H%M%S', time.gmtime())}_{os.urandom(2).hex()}"
    with book.ledger.write() as tx:
        tx.run(f"CREATE SCHEMA {name}")
        for table in tables.TABLES:
            if table != "blobs":
                tx.run(f"CREATE TABLE {name}.{table} AS SELECT * FROM {table}")
    return name


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- mending, in order ----------------------------------------------------------------------------------------------


def _mend(book: Book, report: Report, lost: Lost | None = None) -> None:
    complete = _mend_consumers(book, report)
    if lost is not None and not complete:
        _quarantine_all(book)
    _mend_records(book, report)
    _mend_work(book, report, lost is not None and lost.any("events"))
    _mend_leases(book, report)
    _mend_counts(book, report)
    if isinstance(book.shelf, FolderShelf) and report.aside is not None:
        _mend_files(book.shelf, report.aside, report)
    with book.ledger.write() as tx:
        work.record_events(tx, [work.Event("repaired", detail=dict(report.repairs))])


def _quarantine_all(book: Book) -> None:
    """Hold all records back from new consumers: one that takes a lost consumer's name would train on them again."""
    last = 0
    while True:
        with book.ledger.write() as tx:
            rows = tx.all(
                f"SELECT seq FROM records WHERE evaluation = 0 AND gone IS NULL AND seq > ? ORDER BY seq LIMIT {PAGE}",
                (last,),
            )
            if not rows:
                return
            seqs = [seq for (seq,) in rows]
            members = quarantine.find_quarantined(tx, seqs)
            quarantine.add_to_quarantine(tx, [seq for seq in seqs if seq not in members])
        last = seqs[-1]


def _mend_consumers(book: Book, report: Report) -> bool:
    """Reset what cannot be read of consumers, and make those again that others' rows name; whether none was missing."""
    with book.ledger.write() as tx:
        for number, why in readable(tx)[1].items():
            settings, state, name = tx.one("SELECT settings, state, name FROM consumers WHERE id = ?", (number,))
            try:
                consumers.parse_settings(settings)
            except ValueError:
                settings = Settings().to_json()
                report.did("consumer", f"its settings are those of a new one now: {why}", str(name))
            try:
                consumers.parse_state(state)
            except ValueError:
                state = "{}"
                report.did("consumer", f"its sampler begins anew: {why}", str(name))
            tx.run(
                "UPDATE consumers SET settings = ?, state = ?, grouped = CASE WHEN grouped = 1 THEN 1 ELSE 0 END, "
                "floor = NULL, generation = 0, inserts = (SELECT COUNT(*) FROM work WHERE consumer = ? AND "
                "state <> 'dropped'), samples = (SELECT COALESCE(SUM(uses), 0) FROM work WHERE consumer = ? AND "
                "state <> 'dropped') WHERE id = ?",
                (settings, state, number, number, number),
            )
        lost = tx.all(
            f"SELECT consumer FROM work WHERE consumer NOT IN (SELECT id FROM consumers) AND {consumers.NOT_REMOVED} "
            "UNION SELECT consumer FROM events WHERE consumer IS NOT NULL "
            f"AND consumer NOT IN (SELECT id FROM consumers) AND {consumers.NOT_REMOVED} ORDER BY 1"
        )
        for (number,) in lost:
            # The first consumer of every book is "train".
            name = "train" if number == 1 else f"recovered-{number}"
            made = consumers.create_consumer(tx, name, Settings())
            tx.run("UPDATE consumers SET id = ? WHERE id = ?", (number, made.id))
            report.did("consumer", f"number {number} had no row: it has the settings of a new one now", name)
        return not lost and tx.one("SELECT 1 FROM consumers LIMIT 1") is not None


def _mend_records(book: Book, report: Report) -> None:
    """Records whose bytes are not what they should be are gone, the others' tags and media are put right."""
    lost = {key for key, _ in inspecting.media_problems(book, True)}
    bad: list[tuple[int, str, str]] = []
    for problem in inspecting.record_problems(book, True):
        if problem.kind == "tags":
            with book.ledger.write() as tx:
                settings = ", ".join(f"{name} = ?" for name in tags.IndexColumns._fields)
                tx.run(f"UPDATE records SET {settings} WHERE seq = ?", (*problem.mend, problem.seq))
                tx.run("UPDATE work SET gid = ? WHERE seq = ?", (problem.mend.gid, problem.seq))
            report.did("tags", problem.what, problem.uid)
        elif problem.kind == "uses":
            with book.ledger.write() as tx:
                tx.run("DELETE FROM media_uses WHERE seq = ?", (problem.seq,))
                tx.many(
                    "INSERT INTO media_uses (hash, seq) VALUES (?, ?)", [(key, problem.seq) for key in problem.mend]
                )
            report.did("uses", problem.what, problem.uid)
        else:
            bad.append((problem.seq, problem.uid, problem.what))
            if len(bad) >= PAGE:
                _give_up(book, bad, report)
                bad = []
    with book.ledger.read() as tx:
        for marks, part in chunks(sorted(lost)):
            bad += [
                (seq, uid, f"the medium sha256:{key} is damaged or missing")
                for seq, uid, key in tx.all(
                    "SELECT records.seq, records.uid, media_uses.hash FROM media_uses JOIN records "
                    f"ON records.seq = media_uses.seq WHERE media_uses.hash IN ({marks})",
                    part,
                )
            ]
    _give_up(book, bad, report)
    with book.ledger.write() as tx:
        for marks, part in chunks(sorted(lost)):
            tx.run(f"DELETE FROM media WHERE hash IN ({marks})", part)
        count = tx.count(
            "DELETE FROM media_uses WHERE NOT EXISTS (SELECT 1 FROM records WHERE records.seq = media_uses.seq "
            "AND records.segment IS NOT NULL) OR NOT EXISTS (SELECT 1 FROM media WHERE media.hash = media_uses.hash)"
        )
        report.did("uses", f"{count} uses of media by records that are not there", count=count)


def _give_up(book: Book, bad: Sequence[tuple[int, str, str]], report: Report) -> None:
    """Records that have no bytes from now on; the segments that held them are kept aside."""
    seqs = list(dict.fromkeys(seq for seq, _, _ in bad))
    if not seqs:
        return
    with book.ledger.write() as tx:
        held: set[str] = set()
        for marks, part in chunks(seqs):
            held.update(
                name
                for (name,) in tx.all(
                    f"SELECT DISTINCT segment FROM records WHERE segment IS NOT NULL AND seq IN ({marks})", part
                )
            )
            tx.run(
                f"UPDATE records SET gone = COALESCE(gone, '{DAMAGED}'), segment = NULL, start = NULL, size = NULL, "
                f"slot = NULL, bytes = 0 WHERE seq IN ({marks})",
                part,
            )
            tx.run(f"DELETE FROM media_uses WHERE seq IN ({marks})", part)
        work.record_events(tx, [work.Event("removed", seq, reason=DAMAGED) for seq in seqs])
        for consumer in consumers.all_consumers(tx):
            living = (work.WAITING, work.COOLING, work.LEASED)
            rows = [row for row in work.select_rows_by_seq(tx, consumer, seqs) if row.state in living]
            work.drop_rows(tx, consumer, rows, DAMAGED)
            consumers.save_consumer(tx, consumer)
    for seq, uid, what in bad:
        if seq in seqs:
            seqs.remove(seq)
            report.did("lost", what, uid)
    if isinstance(book.shelf, FolderShelf) and report.aside is not None:
        for name in filter(is_name, held):
            _link(book.shelf, name, report.aside)


def _link(shelf: FolderShelf, name: str, aside: str) -> None:
    """A segment under another name, so that compaction does not end it; where none is there, nothing."""
    if not shelf.has(name):
        return
    source, target = os.path.join(shelf.folder, name), os.path.join(aside, name)
    if not os.path.exists(target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            _copy(shelf.disk, source, target)


def _copy(disk: Disk, source: str, target: str) -> None:
    """A copy of a plain file, on the disk; a link or a device, which could be anything of any size, is not followed."""
    fd = disk.open_read(source)
    with os.fdopen(fd, "rb") as file, open(target, "xb", opener=private_opener) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())


def _mend_work(book: Book, report: Report, gaps: bool) -> None:
    """One row for each record and consumer; what is missing is made from the events. `gaps`: some of these are lost."""
    inbox.drain_inboxes(book)
    with book.ledger.write() as tx:
        stray = (
            "NOT EXISTS (SELECT 1 FROM records WHERE records.seq = work.seq AND records.evaluation = 0) "
            "OR consumer NOT IN (SELECT id FROM consumers)"
        )
        report.did("work", "rows of records that are not there", count=tx.count(f"DELETE FROM work WHERE {stray}"))
        for table in ("work_before", "groups_before"):
            tx.run(f"DELETE FROM {table} WHERE checkpoint NOT IN (SELECT event FROM checkpoints)")
        marks = ", ".join("?" * len(work.STATES))
        count = tx.count(f"DELETE FROM work WHERE state NOT IN ({marks})", work.STATES)
        report.did("work", "rows in no known state, made anew from their events", count=count)
        tx.run("DELETE FROM inbox")  # what is in it is missing in `work`
        for consumer in consumers.all_consumers(tx):
            _enter_missing(tx, book, consumer, report, gaps)
            consumers.save_consumer(tx, consumer)


def _enter_missing(tx: Transaction, book: Book, consumer: Consumer, report: Report, gaps: bool) -> None:
    key = consumer.settings.sampler.key
    while True:
        found = tx.all(
            "SELECT seq, uid, gid, version_min, gone FROM records WHERE evaluation = 0 AND NOT EXISTS "
            "(SELECT 1 FROM work WHERE work.consumer = ? AND work.seq = records.seq) ORDER BY seq "
            f"LIMIT {PAGE}",
            (consumer.id,),
        )
        if not found:
            return
        stored = [row[0] for row in found if row[4] is None]
        numbers = dict(zip(stored, reading.read_numbers(book, tx, stored, key), strict=True)) if key is not None else {}
        said = checking.past(tx, [row[0] for row in found])
        known = {
            seq
            for marks, part in chunks([row[0] for row in found])
            for (seq,) in tx.all(f"SELECT seq FROM events WHERE kind = 'admitted' AND seq IN ({marks})", part)
        }
        quarantined = quarantine.find_quarantined(tx, stored)
        made = []
        unknown = []
        for seq, uid, gid, version, gone in found:
            mine = said.get((seq, consumer.id), Past())
            reason = gone or (mine.reason if mine.kind == work.DROPPED else None)
            if gone is None and mine.kind not in (work.DROPPED, work.TRAINED):
                if seq not in quarantined and (gaps or seq not in known):
                    unknown.append(seq)
                reason = QUARANTINED if seq in quarantined or gaps or seq not in known else None
            row = inbox.new_row(consumer, seq, gid, version, numbers.get(seq), reason)
            uses = len(mine.acks)
            if mine.kind == work.TRAINED:
                row = row._replace(state=work.TRAINED, reason=None)
            made.append(row._replace(uses=uses))
            report.did("work", f"consumer {consumer.name!r} had no row for it: {row.state} now, as its events say", uid)
        if unknown:
            quarantine.add_to_quarantine(tx, unknown)
        work.enter_rows(tx, consumer, made)


def _mend_leases(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        for consumer in consumers.all_consumers(tx):
            found = work.select_rows(tx, f"consumer = ? AND {checking.UNHELD} ORDER BY seq", (consumer.id,))
            work.requeue_rows(tx, consumer, found, "expired", "repair")
            consumers.save_consumer(tx, consumer)
            report.did("lease", f"consumer {consumer.name!r}: records that nobody held wait again", count=len(found))
        count = tx.count(f"UPDATE work SET lease = NULL WHERE {checking.FORGOTTEN}")
        report.did("lease", "rows that named a lease and were not leased", count=count)
        count = tx.count(f"UPDATE leases SET state = 'voided' WHERE {checking.EMPTY}", (tx.now,))
        report.did("lease", "leases that held nothing are ended", count=count)


_TALLIES = "SELECT consumer, state, reason, SUM(n), SUM(weight) FROM tallies GROUP BY 1, 2, 3 HAVING SUM(n) <> 0"


def _mend_counts(book: Book, report: Report) -> None:
    with book.ledger.write() as tx:
        before = {row[:3]: row[3:] for row in tx.all(_TALLIES)}
        tx.run("DELETE FROM tallies")
        tx.run(
            "INSERT INTO tallies (consumer, state, reason, shard, n, weight) SELECT consumer, state, "
            "COALESCE(reason, ''), 0, COUNT(*), SUM(weight) FROM work GROUP BY 1, 2, 3"
        )
        tx.run(
            "INSERT INTO tallies (consumer, state, reason, shard, n, weight) SELECT 0, "
            "CASE WHEN evaluation = 0 THEN 'admitted' ELSE 'evaluation' END, '', 0, COUNT(*), 0 FROM records "
            "GROUP BY 2"
        )
        after = {row[:3]: row[3:] for row in tx.all(_TALLIES)}
        changed = sum(before.get(key, (0, 0.0)) != after.get(key, (0, 0.0)) for key in {*before, *after})
        report.did("tally", "counts were made anew", count=changed)
        for consumer in consumers.all_consumers(tx):
            wrong = checking.wrong_groups(tx, consumer)
            if wrong:
                groups.rebuild_groups(tx, consumer)
                consumers.save_consumer(tx, consumer)
                report.did("group", f"consumer {consumer.name!r}: all groups were looked at anew", count=len(wrong))


def _mend_files(shelf: FolderShelf, aside: str, report: Report) -> None:
    """Move what crashes left behind away."""
    for kind, path in checking.beside(shelf):
        if kind == "leftover" and os.lstat(path).st_mtime < time.time() - OLD_SECONDS:
            os.rename(path, os.path.join(aside, os.path.basename(path)))
            report.did("leftover", "moved away", path)
    for name in shelf.segments():
        try:
            shelf.get(Place(name, 64, 0))
        except WireError:
            if not shelf.busy(name):
                os.rename(os.path.join(shelf.folder, name), os.path.join(aside, name))
                report.did("begun", "moved away", name)
        except LookupError:
            continue


# --- a new ledger ---------------------------------------------------------------------------------------------------


def _rebuilt(folder: Path, path: Path, report: Report, why: str, offer: bool) -> Report:
    """A ledger made of what can be read of the old one and of the segments, in its place."""
    disk = Disk()
    shelf = FolderShelf(str(folder), disk)
    sizes = shelf.segments()
    if not sizes and not path.exists():
        raise NotABookError(f"{folder}: there is no book here: neither a ledger nor segments")
    held = [name for name in sizes if shelf.busy(name)]
    if held:
        raise BookError(f"{folder}: a living process writes to {held[0]}; a ledger is built anew when all are away")
    report.did("ledger", f"built anew: {why}", LEDGER)
    report.aside = aside = _aside(folder)
    for tail in LOGS:
        if os.path.exists(f"{path}{tail}"):
            _copy(disk, f"{path}{tail}", os.path.join(aside, LEDGER + tail))
    # In a folder of its own, which has a lock of its own.
    work_folder = folder / f".repair.{os.urandom(8).hex()}.tmp"
    work_folder.mkdir(FOLDER)
    fresh = work_folder / LEDGER
    try:
        ledger = SQLiteLedger(fresh)
        try:
            tables.prepare(ledger, create=True, where=str(folder), meta={})
            book = Book(str(folder), ledger, shelf)
            lost = rebuilding.take_rows(book, aside, report)
            rebuilding.take_parts(book, sizes, lost, *deletions.read_deletions(folder, disk), report)
            _mend(book, report, lost)
            if offer:
                _release(book, report)
        finally:
            ledger.close()
            shelf.close()
        _settle(fresh, path)
        disk.sync_folder(str(folder))
    finally:
        shutil.rmtree(work_folder)
    with open_book(folder, "r") as book:
        return _with_check(book, report)


def _settle(fresh: Path, path: Path) -> None:
    """Put the new ledger in the old one's place. The old one's log goes first: SQLite would play it into the new."""
    connection = sqlite3.connect(fresh)
    try:
        connection.execute("PRAGMA journal_mode=DELETE")
    finally:
        connection.close()
    _sync(str(fresh))
    for tail in LOGS[1:]:
        Path(f"{path}{tail}").unlink(missing_ok=True)
    os.replace(fresh, path)
