"""`Book.check` finds each kind of damage and nothing else; `repair` mends it, keeps what was, names what is lost."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollbook
from rollbook import Experience
from rollbook.book import Book, BookError, NewerLayoutError, NotABookError, check, redact_records, trained_steps
from rollbook.book.check import KINDS, Report
from rollbook.book.recovery import repair
from rollbook.book.segments.files import FileSegmentStore
from rollbook.core.wire import encode
from tests.book.records import Clock, group, numbers, record, records, take


def uid(i: int) -> str:
    return f"//0/0/{i:04}"


def filled(url: str, **options: Any) -> Book:
    """A book with a little of everything: groups, acks, a living lease, revisions, a deletion, media, a checkpoint."""
    book = rollbook.open(url, **options)
    book.append(records(6, reward=0.5))
    for task in range(3):
        book.append(group(task, 2, size=2))
    book.append(record(suffix="picture", info={"png": bytes(3000)}))
    book.append(record(suffix="another", info={"png": bytes(3000)}))
    book.append(records(2, 90), evaluation=True)
    take(book, 2)
    book.consumer("groups", create=True)
    take(book, 1, by="group", consumer="groups")
    book.checkpoint("here")
    take(book, 1)
    book.revise(uid(4), reward=0.75, author="ana")
    book.delete([uid(5)], author="ana")
    return book


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_a_healthy_book_has_no_findings(url: str) -> None:
    with filled(url) as book:
        lease = book.lease(2)
        for deep in (True, False):
            report = book.check(deep=deep)
            assert kinds(report) == {"pending"} and report.ok
            assert (report.records, report.media) == (16, 1)
        lease.ack()
        book.rewind("here", later="drop")
        book.compact(garbage=0.0, grace=0.0)
        assert book.check().findings == []
        book.append(records(2, 200))
        assert book.check().findings == []


def test_checking_runs_beside_a_compactor(tmp_path: Path) -> None:
    with filled(str(tmp_path / "book"), segment_bytes=4096) as book, rollbook.open(book.url, "r+") as other:
        for start in range(300, 316, 2):
            book.append(records(2, start))
            book.delete([uid(start)], author="ana")
            book.store.seal()
            other.compact(garbage=0.0, grace=0.0)
            assert book.check().ok


def sql(statement: str, *values: Any) -> Callable[[Book], None]:
    def run(book: Book) -> None:
        with book.ledger.write() as tx:
            assert tx.count(statement, values) > 0

    return run


ILLNESSES: dict[str, tuple[str, Callable[[Book], None]]] = {
    "a reward": ("tags", sql("UPDATE records SET reward = 2.0 WHERE uid = ?", uid(0))),
    "a length": ("tags", sql("UPDATE records SET length = 9 WHERE uid = ?", uid(0))),
    "a place": ("damaged", sql("UPDATE records SET start = start + 64 WHERE uid = ?", uid(0))),
    "a slot": ("damaged", sql("UPDATE records SET slot = 77 WHERE uid = ?", uid(0))),
    "a negative slot": ("damaged", sql("UPDATE records SET slot = -1 WHERE uid = ?", uid(0))),
    "another's slot": ("another", sql("UPDATE records SET slot = 1 WHERE uid = ?", uid(0))),
    "no place": ("missing", sql("UPDATE records SET segment = NULL WHERE uid = ?", uid(0))),
    "no segment": (
        "missing",
        sql("UPDATE records SET segment = ? WHERE seq = 1", f"{'0' * 16}-{'0' * 16}.rbs"),
    ),
    "a use": ("uses", sql("DELETE FROM media_uses WHERE seq = (SELECT MIN(seq) FROM media_uses)")),
    "a medium": ("medium", sql("DELETE FROM media")),
    "a medium's place": ("medium", sql("UPDATE media SET start = 64")),
    "a count": ("tally", sql("UPDATE tallies SET n = n + 1 WHERE consumer = 1 AND state = 'waiting'")),
    "a weight": ("tally", sql("UPDATE tallies SET weight = weight + 1 WHERE consumer = 1 AND state = 'waiting'")),
    "the admitted": ("tally", sql("UPDATE tallies SET n = 1 WHERE consumer = 0 AND state = 'admitted'")),
    "a row": ("queue", sql("DELETE FROM queue WHERE consumer = 1 AND state = 'trained'")),
    "a stray row": ("queue", sql("UPDATE queue SET seq = 999 WHERE consumer = 1 AND seq = 1")),
    "a state": ("queue", sql("UPDATE queue SET state = 'odd' WHERE consumer = 1 AND seq = 1")),
    "a lease": ("lease", sql("UPDATE leases SET state = 'acked' WHERE state = 'active'")),
    "a lease's row": ("lease", sql("UPDATE queue SET lease = NULL WHERE lease IS NOT NULL")),
    "a lease of none": ("lease", sql("UPDATE queue SET lease = 1 WHERE consumer = 1 AND seq = 1")),
    "a group": ("group", sql("UPDATE groups SET ready = 1 - ready WHERE gid = '0/1'")),
    "a group's runs": ("group", sql("UPDATE groups SET runs = 1 WHERE gid = '0/1'")),
    "no group": ("group", sql("DELETE FROM groups WHERE gid = '0/1'")),
    "settings": ("consumer", sql("UPDATE consumers SET settings = '{}' WHERE id = 2")),
    "a sampler's state": ("consumer", sql("UPDATE consumers SET state = '[]' WHERE id = 2")),
    "a consumer": ("queue", sql("DELETE FROM consumers WHERE id = 2")),
}
UNMENDED = {
    "an event": ("event", sql("DELETE FROM events WHERE seq = 1 AND kind = 'admitted'")),
    "an ack": ("event", sql("DELETE FROM events WHERE seq = 1 AND kind = 'trained'")),
}


@pytest.mark.parametrize("name", [*ILLNESSES, *UNMENDED])
def test_an_illness_is_found_and_mended(name: str, tmp_path: Path) -> None:
    url = str(tmp_path / "book")
    kind, harm = (ILLNESSES | UNMENDED)[name]
    with filled(url) as book:
        book.lease(2)
        harm(book)
        report = book.check()
        assert not report.ok
        assert kind in kinds(report), report.findings
        assert all(finding.description and finding.remedy for finding in report.findings)
    fixed = repair(url)
    if name in UNMENDED:
        assert kinds(fixed) == {"event", "pending"}
        return
    assert fixed.ok, fixed.findings
    assert sum(fixed.repairs.values()) > 0
    assert fixed.backup is not None
    assert (Path(fixed.backup) / "ledger.sqlite").is_file()
    with rollbook.open(url) as book:
        for consumer in ("train", "groups"):
            if name != "a consumer" or consumer == "train":
                assert book.counts(consumer).adds_up
        left = book.where(("removed_reason", "is", None)).uids()
        assert len(book.get(left)) == len(left)
        take(book, 50)
        assert book.check().ok
    assert repair(url).repairs == {}, "a second repair has nothing to do"


def test_an_illness_of_a_shared_book_is_found_and_mended(postgres_url: str) -> None:
    with filled(postgres_url) as book:
        book.lease(2)
        sql("UPDATE records SET reward = 2.0 WHERE uid = ?", uid(0))(book)
        sql("UPDATE records SET slot = 77 WHERE uid = ?", uid(1))(book)
        sql("DELETE FROM tallies WHERE consumer = 1")(book)
        sql("DELETE FROM queue WHERE consumer = 1 AND seq = 3")(book)
        assert kinds(book.check()) == {"tags", "damaged", "tally", "queue", "pending"}
    report = repair(postgres_url)
    assert report.ok, report.findings
    assert report.backup is not None
    with rollbook.open(postgres_url) as book:
        assert book.counts().adds_up
        assert book.history(uid(1))[-1].reason == "damaged"
        with book.ledger.read() as tx:
            assert tx.first(f"SELECT reward FROM {report.backup}.records WHERE uid = ?", (uid(0),)) == (2.0,)


# --- bytes ----------------------------------------------------------------------------------------------------------


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_damaged_bytes_cost_their_records_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(3))
        book.append(records(3, 10))
        with book.ledger.read() as tx:
            (start,) = tx.first("SELECT start FROM records WHERE uid = ?", (uid(10),))
    [segment] = segments(folder)
    flip(segment, start + 300)
    with rollbook.open(folder, "r") as book:
        assert [(f.kind, f.subject) for f in book.check().findings] == [("damaged", uid(i)) for i in (10, 11, 12)]
    report = repair(folder)
    assert report.ok
    assert [finding.subject for finding in report.repaired if finding.kind == "lost"] == [uid(10), uid(11), uid(12)]
    assert report.backup is not None
    assert (Path(report.backup) / segment.name).read_bytes() == segment.read_bytes()
    with rollbook.open(folder) as book:
        assert book.counts().dropped == {"damaged": 3}
        assert [row.eid.uid for row in take(book, 9)] == [uid(0), uid(1), uid(2)]
        assert [event.kind for event in book.history(uid(10))] == ["admitted", "removed", "dropped"]
        with pytest.raises(BookError, match="damaged"):
            book[uid(10)]


def test_a_torn_segment_keeps_what_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(3))
        book.append(records(3, 10))
    [segment] = segments(folder)
    segment.write_bytes(segment.read_bytes()[:-200])
    report = repair(folder)
    assert report.ok
    assert report.repairs["lost"] == 3
    with rollbook.open(folder) as book:
        assert len(take(book, 9)) == 3


def test_a_lost_medium_takes_its_records_along(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append([record(suffix="a", info={"png": bytes(3000)}), record(suffix="b")])
        with book.ledger.read() as tx:
            (start,) = tx.first("SELECT start FROM media")
    flip(segments(folder)[0], start + 100)
    with rollbook.open(folder, "r") as book:
        assert [(f.kind, f.subject) for f in book.check().findings] == [("medium", "//0/0/a")]
        assert not book.check(deep=False).ok, "a blob's own checksum is always compared"
    assert repair(folder).ok
    with rollbook.open(folder) as book:
        assert [row.eid.suffix for row in take(book, 9)] == ["b"]


def test_leftovers_are_notes_and_are_moved_away(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(2))
    parts = folder / "segments"
    [segment] = segments(folder)
    begun = parts / "0000000000000000-00000000000000aa.rbs"
    begun.write_bytes(b"\x8dRB")
    left = parts / f".some.{'0' * 16}.tmp"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 1000,) * 2)
    young = folder / f".other.{'0' * 16}.tmp"
    young.write_bytes(b"half")
    (parts / "notes.txt").write_text("mine")
    orphan = parts / "0000000000000000-00000000000000bb.rbs"
    orphan.write_bytes(segment.read_bytes()[:64] + bytes(64))
    with rollbook.open(folder, "r") as book:
        report = book.check()
    assert report.ok
    assert kinds(report) == {"begun", "leftover", "stranger", "orphan"}
    report = repair(folder)
    assert kinds(report) == {"leftover", "stranger", "orphan"}
    assert report.backup is not None
    assert sorted(os.listdir(report.backup)) == [left.name, begun.name, "ledger.sqlite"]
    assert young.exists(), "it may be a living writer's"


def test_a_report_is_bounded_and_counts_all(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append(records(300))
        sql("UPDATE records SET reward = 2.0")(book)
        report = book.check()
    assert report.counts["tags"] == 300
    assert len(report.findings) == check.MAX_LISTED
    assert set(report.counts) <= set(KINDS)


def test_an_expired_lease_that_holds_nothing_is_a_note() -> None:
    clock = Clock()
    book = rollbook.open("memory:", clock=clock)
    book.append(records(1))
    lease = book.lease(1)
    book.delete([uid(0)], author="ana")
    book.compact()
    assert book.check().findings == []
    clock.now += 1000
    assert kinds(book.check()) == {"idle"}
    assert len(lease) == 1


# --- ledgers --------------------------------------------------------------------------------------------------------


def closed(folder: Path) -> bytes:
    """A book, closed, with its log in its ledger; the ledger's bytes."""
    filled(str(folder)).close()
    assert not (folder / "ledger.sqlite-wal").exists()
    return (folder / "ledger.sqlite").read_bytes()


def alive(folder: Path) -> dict[str, Experience]:
    with rollbook.open(folder, "r") as book:
        uids = book.where(("removed_reason", "is", None)).uids()
        return {row.eid.uid: row for row in book.get(uids)}


def test_a_missing_ledger_is_made_from_the_segments(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        rows = [*records(5, reward=0.5), record(suffix="a", info={"png": bytes(3000)})]
        book.append(rows)
        book.revise(uid(2), reward=1.0, author="ana")
    os.unlink(folder / "ledger.sqlite")
    report = repair(folder)
    assert report.repairs["recovered"] == 6
    assert report.counts == {"quarantined": 6}
    assert not report.ok
    assert alive(folder)[uid(2)].reward == 1.0
    with rollbook.open(folder) as book:
        del rows[2]
        assert book.append(rows).existing == 5, "they are what was brought, byte by byte"
        book.consumer("groups", create=True)
        for consumer in ("train", "groups"):
            assert take(book, 10, consumer=consumer) == [], "whether they were trained on is not known"
            assert book.counts(consumer).dropped == {"quarantined": 6}
        book.append(records(1, 50))
        book.rewind(book.checkpoint())
        assert numbers(take(book, 10)) == [50]
        book.close()
    report = repair(folder, offer=True)
    assert report.ok, report.findings
    assert report.repairs == {"offered": 6}
    with rollbook.open(folder) as book:
        assert len(take(book, 10)) == 6
        assert len(take(book, 10, by="group", consumer="groups")) == 7
        assert len(take(book, 10, consumer="new", create=True)) == 7
        assert [event.kind for event in book.history(uid(0))][:4] == ["recovered", "quarantined", "dropped", "dropped"]
        assert book.check().ok


def test_a_purpose_outlives_revisions_compaction_and_the_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(2))
        book.append(records(2, 2), evaluation=True)
        book.revise(uid(3), reward=1.0, author="ana")
        book.store.seal()
        assert book.compact(garbage=0.0, grace=0.0).records == 4
        assert "book__evaluation" not in book.get([uid(3)]).columns
    os.unlink(folder / "ledger.sqlite")
    repair(folder)
    with rollbook.open(folder, "r") as book:
        assert book.where(evaluation=1).uids() == [uid(2), uid(3)]


@pytest.mark.parametrize(
    "damage",
    ["nothing but zeros", "another's first page", "cut to a tenth", "cut to half", "cut short", "no database", "empty"],
)
def test_a_ruined_ledger_loses_no_record(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "book"
    data = closed(folder)
    before = alive(folder)
    with rollbook.open(folder, "r") as book:
        past = {key: book.history(key) for key in before}
        trained = {consumer: trained_steps(book, consumer).keys() for consumer in ("train", "groups")}
        were = {consumer: book.counts(consumer) for consumer in trained}
    broken = {
        "nothing but zeros": bytes(len(data)),
        "another's first page": os.urandom(4096) + data[4096:],
        "cut to a tenth": data[: len(data) // 10],
        "cut to half": data[: len(data) // 8192 * 4096],
        "cut short": data[:-5000],
        "no database": b"not a database at all",
        "empty": b"",
    }[damage]
    (folder / "ledger.sqlite").write_bytes(broken)
    if broken:
        with pytest.raises(BookError):
            rollbook.open(folder)
    report = repair(folder)
    assert not kinds(report) - {"quarantined", "event", "orphan", "pending"}, report.findings
    assert report.repairs["ledger"] == 1
    assert report.backup is not None
    assert (Path(report.backup) / "ledger.sqlite").read_bytes() == broken
    assert alive(folder) == before, "nothing is lost, and what was deleted stays so"
    with rollbook.open(folder) as book:
        assert sorted(book.where(evaluation=1).uids()) == [uid(90), uid(91)]
        counts = {consumer: book.counts(consumer) for consumer in book.consumers()}
        for consumer in trained:
            assert not trained[consumer] & {row.eid.uid for row in take(book, 50, consumer=consumer, create=True)}
        if damage == "another's first page":
            assert report.ok, "all tables were still there"
            assert [point.name for point in book.checkpoints()] == ["here"]
            assert {key: book.history(key)[: len(past[key])] for key in before} == past
        if damage in ("another's first page", "cut to half", "cut short"):
            assert counts == were


@given(
    page=st.integers(0, 60),
    at=st.integers(0, 4095),
    length=st.integers(1, 4096),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=12, deadline=None)
def test_a_ledger_with_a_bad_page_is_mended_and_brings_nothing_deleted_back(
    page: int, at: int, length: int, chance: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("page") / "book"
    data = bytearray(closed(folder))
    before = alive(folder)
    start = (page * 4096 + at) % len(data)
    data[start : start + length] = chance.randbytes(min(length, len(data) - start))
    (folder / "ledger.sqlite").write_bytes(data)
    report = repair(folder)
    assert not kinds(report) - {"event", "orphan", "unused", "pending", "quarantined"}, report.findings
    named = {finding.subject for finding in report.repaired if finding.kind == "lost"}
    after = alive(folder)
    assert after.keys() <= before.keys()
    assert before.keys() - after.keys() <= named, "what is lost is named"
    with rollbook.open(folder) as book:
        assert book.counts().adds_up
        take(book, 3)


def test_what_the_log_has_committed_is_not_lost_with_the_first_page(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(3))
        take(book, 1)
        # As a killed process leaves it: nothing was written back yet.
        copies = {name: (folder / name).read_bytes() for name in ("ledger.sqlite", "ledger.sqlite-wal")}
    assert len(copies["ledger.sqlite-wal"]) > 4096
    copies["ledger.sqlite"] = bytes(100) + copies["ledger.sqlite"][100:]
    for name, data in copies.items():
        (folder / name).write_bytes(data)
    report = repair(folder)
    assert report.ok, report.findings
    with rollbook.open(folder) as book:
        assert (book.counts().trained, book.counts().waiting) == (1, 2)


def test_a_deleted_record_does_not_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(3, response_text="secret"))
        book.delete([uid(0)], author="ana")
        redact_records(book, [uid(1)], ["response_text"], author="ana")
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute("DROP INDEX events_seq")  # Not sound any more: built anew.
    # The redacted version is damaged, the one with the secret is still there.
    segment, start = connection.execute("SELECT segment, start FROM records WHERE uid = ?", (uid(1),)).fetchone()
    connection.close()
    flip(folder / "segments" / segment, start + 200)
    report = repair(folder)
    assert report.ok, report.findings
    with rollbook.open(folder) as book:
        assert [row.eid.uid for row in take(book, 9)] == [uid(2)]
        with pytest.raises(BookError, match="deleted"):
            book[uid(0)]
        with pytest.raises(BookError, match="damaged"):
            book[uid(1)]


@pytest.mark.parametrize("listed", [True, False])
def test_a_deleted_record_whose_row_is_lost_stays_out(listed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(2))
        book.delete([uid(0)], author="ana")
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute("DELETE FROM records WHERE uid = ?", (uid(0),))
    connection.execute("DROP INDEX events_seq")
    connection.commit()
    connection.close()
    if not listed:
        (folder / "deletions.jsonl").unlink()
    report = repair(folder)
    assert report.ok, report.findings
    assert {finding.kind for finding in report.repaired if finding.subject == uid(0)} == (
        {"recovered", "deleted", "queue"} if listed else {"lost"}
    )
    with rollbook.open(folder) as book:
        assert [row.eid.uid for row in book] == [uid(1)]
        assert (uid(0) in book) == listed


def test_a_redacted_record_is_redacted_again(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(2, response_text="secret"))
        [first] = segments(folder)
        book.store.seal()
        redact_records(book, [uid(0)], ["response_text"], author="ana")
    [segment] = {*segments(folder)} - {first}
    segment.unlink()  # Only the version with the secret is left.
    os.unlink(folder / "ledger.sqlite")
    with (folder / "deletions.jsonl").open("a") as file:
        file.write("half a li")
    report = repair(folder)
    assert report.repairs["redacted"] == 1
    with rollbook.open(folder) as book:
        assert [book[uid(i)].response_text for i in (0, 1)] == [None, "secret"]


def test_a_record_of_unknown_history_is_not_handed_out_twice(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(3))
        take(book, 1)
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute("DELETE FROM records WHERE uid = ?", (uid(0),))
    connection.execute("DROP INDEX events_seq")
    connection.commit()
    connection.close()
    assert kinds(repair(folder)) == {"quarantined"}
    with rollbook.open(folder) as book:
        assert book.counts().dropped == {"quarantined": 1}
        assert [row.eid.uid for row in take(book, 9)] == [uid(1), uid(2)]
        assert len(take(book, 9, consumer="new", create=True)) == 2
        book.revise(uid(0), author="ana", retrain=True)
        assert len(take(book, 9)) == 1


def test_what_is_no_book_is_not_repaired(tmp_path: Path) -> None:
    with pytest.raises(NotABookError):
        repair(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotABookError):
        repair(tmp_path / "empty")
    rollbook.open(tmp_path / "newer").close()
    connection = sqlite3.connect(tmp_path / "newer" / "ledger.sqlite")
    connection.execute("UPDATE meta SET value = '999' WHERE key = 'layout'")
    connection.commit()
    connection.close()
    with pytest.raises(NewerLayoutError):
        repair(tmp_path / "newer")


def test_a_ledger_is_not_replaced_under_a_living_writer(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append(records(1))
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            (tmp_path / "book" / name).write_bytes(b"ruined")
        with pytest.raises(BookError, match="another process"):
            repair(tmp_path / "book")


def test_a_repair_beside_idle_books_loses_nothing_that_they_return(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        book.append(records(4))
    consumer, writer = rollbook.open(folder), rollbook.open(folder)
    lease = consumer.lease(2)
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute("DROP INDEX queue_gid")
    connection.close()
    assert repair(folder).repairs["ledger"] == 1
    for act in (lambda: lease.ack(), lambda: writer.append(records(1, 9)), lambda: writer.counts()):
        with pytest.raises(BookError, match="reopen it"):
            act()
    FileSegmentStore(folder).put(
        [encode(records(1, 9))]
    )  # as an append leaves it that raised after its bytes were written
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute("DROP INDEX queue_gid")
    connection.close()
    assert not kinds(repair(folder)) - {"orphan"}
    consumer.close()
    writer.close()
    with rollbook.open(folder) as book:
        assert (book.counts().leased, book.counts().waiting) == (2, 2)
        assert book.append(records(1, 9)).admitted == 1
        assert not kinds(book.check()) - {"orphan"}
