"""Faults of disks and files: each a clear error that names the file, and nothing lost of what it left unharmed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.book import BookError, CorruptBookError, NewerLayoutError, NotABookError, ReadOnlyError, append, ledger
from rollbook.book import ledger as ledgers
from rollbook.book.book import Book
from rollbook.book.disk import folder_lock
from rollbook.book.errors import WriterStoppedError
from rollbook.book.ledger import SQLiteLedger
from rollbook.core.errors import WireError
from tests.book.forgetful import FailingDisk, open_on
from tests.book.trials.log import Log
from tests.book.trials.records import Piece, digest, expected, make_records
from tests.book.trials.verify import check

LEDGER = "ledger.sqlite"
ROOT = Path(__file__).parents[2]
PIECES = [Piece("a", task, 2) for task in range(1, 7)]  # number 4 has a picture


def filled(folder: Path, pieces: list[Piece] = PIECES) -> Log:
    """A book that was closed, and what was said of it."""
    log = Log()
    with rollbook.open(folder) as book:
        for piece in pieces:
            put(book, piece, log)
    return log


def put(book: Book, piece: Piece, log: Log) -> None:
    log.feed(f"try append {piece}")
    book.append(make_records(piece))
    log.feed(f"did append {piece}")


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def readable(book: Book, pieces: list[Piece]) -> list[Piece]:
    """Those whose records come back as they were."""
    intact = []
    for piece in pieces:
        try:
            rows = book.get(piece.uids).rows()
        except (WireError, NewerLayoutError):  # a flipped version is one that this one does not know
            continue
        assert tuple(map(digest, rows)) == expected(piece)
        intact.append(piece)
    return intact


# --- a disk that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", ["create", "append", "sync", "sync_folder"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failing_disk_stops_the_writer_and_a_reopened_book_goes_on(
    tmp_path: Path, operation: str, at: int, code: int
) -> None:
    folder = tmp_path / "book"
    log = filled(folder)
    with open_on(FailingDisk(operation, at, code, written=100), folder, segment_bytes=20_000) as book:
        failed: Piece | None = None
        for piece in [Piece("b", task, 2) for task in range(1, 9)]:
            try:
                put(book, piece, log)
            except OSError as error:
                assert error.errno == code
                assert str(folder) in str(error)
                failed = piece
                break
        assert failed is not None, "the disk did not fail"
        if operation != "create":  # nothing was written to a file that could not be made
            with pytest.raises(WriterStoppedError, match=r"reopen the book"):
                book.append(make_records(failed))
        assert readable(book, list(log.appended)) == list(log.appended)
        assert book.lease(2).ack() == 2
    log = filled(folder, [*log.appended])  # all known
    with rollbook.open(folder) as book:
        assert book.append(make_records(failed)).admitted == 2
        log.feed(f"try append {failed}")
        log.feed(f"did append {failed}")
        assert readable(book, list(log.appended)) == list(log.appended)
        assert book.counts().adds_up
        assert book.counts().trained == 2


def test_a_full_disk_under_the_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    log = filled(folder)
    with rollbook.open(folder) as book:
        assert isinstance(book.ledger, SQLiteLedger)
        with book.ledger.read() as tx:
            pages = tx.first("PRAGMA page_count")[0]
            tx.first(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(OSError, match=LEDGER) as caught:
            for task in range(1000):
                put(book, Piece("b", task, 8), log)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(folder / LEDGER)
        failed = log.unsettled()
        assert len(failed) == 1
        assert failed[0].uids[0] not in book
        assert book.counts().adds_up
        # What frees space, or asks for little, still works; with space again, all does.
        with book.ledger.read() as tx:
            tx.first("PRAGMA max_page_count = 1000000")
        put(book, failed[0], log)
    assert check(str(folder), log) == []


# --- a folder that cannot be written --------------------------------------------------------------------------------

AS_NOBODY = """
import os, sys
import rollbook
from tests.book.trials.crash import warm
from tests.book.trials.records import Piece, make_records
warm()
if os.geteuid() == 0:  # whom no permission stops
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for folder, mode in ((folder, mode) for folder in sys.argv[1:] for mode in ("a", "r+", "r")):
    print(f"\\n{folder} {mode}", end="")
    try:
        with rollbook.open(folder, mode) as book:
            rewards = book.get(Piece("a", 1, 2).uids).values("reward")
            print("; opened", len(book), rewards, book.counts().waiting, end="")
            book.append(make_records(Piece("b", 1, 1)))
    except Exception as error:
        print(";", type(error).__name__, getattr(error, "errno", None), error, end="")
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="rollbook-"))
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_books_in_read_only_folders(public: Path) -> None:
    """Closed ones can be read; others, as a crash or a copy of a living book leaves them, with SQLite's index only."""
    filled(public / "closed")
    with rollbook.open(public / "living") as book:
        book.append(make_records(PIECES[0]))
        for name in ("whole", "part"):
            shutil.copytree(public / "living", public / name)
    (public / "part" / f"{LEDGER}-shm").unlink()
    folders = [str(public / name) for name in ("closed", "whole", "part")]
    for path in public.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *folders], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    heard = {}
    for line in done.stdout.strip().splitlines():
        case, _, answer = line.partition("; ")
        heard[Path(case.split(" ")[0]).name, case.split(" ")[1]] = answer
    rewards = [row.reward for row in make_records(PIECES[0])]
    assert heard["closed", "r"].startswith(f"opened 12 {rewards} 12; ReadOnlyError None append")
    assert heard["whole", "r"].startswith(f"opened 2 {rewards} 2; ReadOnlyError None append")
    for mode in ("a", "r+"):
        assert heard["closed", mode].startswith(f"PermissionError {errno.EACCES} ")
        assert str(public / "closed" / LEDGER) in heard["closed", mode]
        # Nothing had to be written to open it.
        assert (
            "PermissionError 13" in heard["whole", mode] and str(public / "whole" / "segments") in heard["whole", mode]
        )
    for mode in ("a", "r+", "r"):
        assert heard["part", mode].startswith("BookError")
        assert f"{LEDGER}-wal" in heard["part", mode] and str(public / "part" / LEDGER) in heard["part", mode]


def test_mode_r_writes_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "book")
    before = {path: path.read_bytes() for path in (tmp_path / "book").rglob("*") if path.is_file()}
    with rollbook.open(tmp_path / "book", "r") as book:
        assert readable(book, PIECES) == PIECES
        acts: list[Any] = [
            lambda: book.append(make_records(PIECES[0])),
            lambda: book.lease(1),
            lambda: book.revise(PIECES[0].uids[0], reward=1.0, author="ana"),
            lambda: book.compact(),
        ]
        for act in acts:
            with pytest.raises(ReadOnlyError, match="opened for reading"):
                act()
    for path, data in before.items():
        assert path.read_bytes() == data


# --- a folder that is moved or replaced -----------------------------------------------------------------------------


def replace_ledger(folder: Path) -> None:
    shutil.copyfile(folder / LEDGER, folder / "copy")
    os.replace(folder / "copy", folder / LEDGER)


REMOVALS: dict[str, Any] = {
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "removed": shutil.rmtree,
    "replaced": lambda folder: (folder.rename(folder.with_name("elsewhere")), filled(folder)),
    "new ledger": replace_ledger,
    "no segments": lambda folder: shutil.rmtree(folder / "segments"),
}


@pytest.mark.parametrize("name", REMOVALS)
@pytest.mark.parametrize("busy", [True, False])
def test_a_book_that_is_moved_or_replaced_takes_no_writes(tmp_path: Path, name: str, busy: bool) -> None:
    folder = tmp_path / "book"
    filled(folder)
    with rollbook.open(folder) as book:
        lease = book.lease(2)
        if busy:
            book.append(make_records(Piece("b", 1, 2)))
        REMOVALS[name](folder)
        before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
        if name == "no segments" and not busy:
            assert book.append(make_records(Piece("b", 2, 2))).admitted == 2, "a segment is begun in a new folder"
            return
        with pytest.raises(BookError, match=r"moved, removed or replaced .* reopen it"):
            book.append(make_records(Piece("b", 2, 2)))
        with pytest.raises(BookError, match="reopen it|segment that the ledger refers to"):
            lease.experiences  # noqa: B018
        assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before, "nothing was written anywhere"
        if name != "no segments":
            with pytest.raises(BookError, match="reopen it"):
                lease.ack()
    if name == "moved":
        with rollbook.open(tmp_path / "elsewhere") as book:
            assert book.append(make_records(Piece("b", 2, 2))).admitted == 2
            assert book.check().ok


def test_a_writer_waits_for_a_repair_and_then_sees_the_new_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    with rollbook.open(folder) as book, ThreadPoolExecutor(1) as pool:
        with folder_lock(folder, shared=False, seconds=0.0) as alone:
            assert alone
            drop = pool.submit(book.drop, PIECES[0].uids[:1])
            assert book.counts().waiting == 12, "readers go on"
            with pytest.raises(FutureTimeout):
                drop.result(0.05)
            replace_ledger(folder)
        with pytest.raises(BookError, match="reopen it"):
            drop.result(10)


def test_an_append_that_is_always_overtaken_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "MAX_ATTEMPTS", 3)
    book = rollbook.open("memory:")
    monkeypatch.setattr(book.store, "has", lambda segment: False)
    with pytest.raises(
        BookError, match="failed 3 times because other writers added the same records or removed its segment"
    ):
        book.append(make_records(PIECES[0]))
    assert len(book) == 0


# --- segments -------------------------------------------------------------------------------------------------------


def places(folder: Path) -> dict[Piece, tuple[int, int]]:
    with rollbook.open(folder, "r") as book, book.ledger.read() as tx:
        starts = dict(tx.all("SELECT task, start FROM records WHERE run = 0"))
        sizes = dict(tx.all("SELECT task, size FROM records WHERE run = 0"))
    return {piece: (starts[str(piece.task)], sizes[str(piece.task)]) for piece in PIECES}


def test_a_torn_segment_costs_what_it_held_and_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    spans = places(folder)
    (segment,) = segments(folder)
    start, _ = spans[PIECES[3]]
    os.truncate(segment, start + 10)
    with rollbook.open(folder) as book:
        assert readable(book, PIECES) == PIECES[:3]
        with pytest.raises(CorruptBookError, match=segment.name):
            book.get(PIECES[3].uids)
        with pytest.raises(CorruptBookError, match=segment.name):
            book.lease(12).experiences  # noqa: B018
        assert book.append(make_records(Piece("b", 1, 2))).admitted == 2
        book.compact(garbage=0.0, grace=0.0)
        assert readable(book, [*PIECES, Piece("b", 1, 2)]) == [*PIECES[:3], Piece("b", 1, 2)]
        assert book.counts().adds_up


@pytest.mark.parametrize("size", [0, 10, 63])
def test_a_segment_cut_in_its_header(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    os.truncate(segment, size)
    with rollbook.open(folder) as book:
        with pytest.raises(CorruptBookError, match=segment.name):
            book.get(PIECES[0].uids)
        assert book.append(make_records(Piece("b", 1, 2))).admitted == 2
        assert readable(book, [Piece("b", 1, 2)])


def test_no_flipped_bit_passes_for_data(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    data = segment.read_bytes()
    chance = random.Random(0)
    spans = places(folder)
    with rollbook.open(folder) as book:
        for at in sorted({*range(0, 64, 5), *(chance.randrange(len(data)) for _ in range(150))}):
            harmed = bytearray(data)
            harmed[at] ^= 1 << chance.randrange(8)
            segment.write_bytes(bytes(harmed))
            left = readable(book, PIECES)  # which compares with what was appended
            inside = {piece for piece, (start, size) in spans.items() if start <= at < start + size}
            if at < 64:
                assert left == []
            else:
                # Zeros between the parts are nobody's; a picture belongs to the record that shows it.
                assert not inside & set(left)
                assert len(left) >= len(PIECES) - 1


def test_a_flipped_medium_names_its_segment(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    with rollbook.open(folder) as book, book.ledger.read() as tx:
        name, start, size = tx.first("SELECT segment, start, size FROM media")
    data = bytearray((folder / "segments" / name).read_bytes())
    data[start + size // 2] ^= 4
    (folder / "segments" / name).write_bytes(bytes(data))
    with rollbook.open(folder) as book, pytest.raises(CorruptBookError, match=name):
        book.get(PIECES[3].uids)


def test_a_missing_segment(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    with rollbook.open(folder) as book:
        book.append(make_records(Piece("b", 1, 2)))
    segment.unlink()
    with rollbook.open(folder) as book:
        assert readable(book, [*PIECES, Piece("b", 1, 2)]) == [Piece("b", 1, 2)]
        with pytest.raises(CorruptBookError, match=segment.name):
            book.get(PIECES[0].uids)
        assert book.append(make_records(PIECES[0])).existing == 2  # the ledger still knows it
        book.compact(garbage=0.0, grace=0.0)
        assert book.counts().adds_up


def test_a_folder_in_the_place_of_a_segment(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    segment.unlink()
    segment.mkdir()
    with rollbook.open(folder) as book, pytest.raises(CorruptBookError, match=segment.name):
        book.get(PIECES[0].uids)


# --- the ledger -----------------------------------------------------------------------------------------------------


def zeros(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))


def garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(0).randbytes(path.stat().st_size - 4096))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def stub(path: Path) -> None:
    os.truncate(path, 1000)


def text(path: Path) -> None:
    path.write_text("no database at all\n" * 500)


@pytest.mark.parametrize("harm", [zeros, garbage, half, stub, text])
@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_corrupt_ledger_is_said_to_be_one(tmp_path: Path, harm: Any, mode: str) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    content = segment.read_bytes()
    harm(folder / LEDGER)
    with (
        pytest.raises(CorruptBookError, match=f"{LEDGER}.*rollbook check --repair"),
        rollbook.open(folder, mode) as book,
    ):
        book.counts()
        book.get([uid for piece in PIECES for uid in piece.uids])
        with book.ledger.read() as tx:  # the pages that the above did not touch
            for table in ("records", "events", "queue", "tallies"):
                tx.all(f"SELECT * FROM {table}")
    assert segment.read_bytes() == content, "the records are still there for a repair"


@pytest.mark.parametrize("left", [None, 0])
@pytest.mark.parametrize("mode", ["a", "r+", "r"])
def test_a_lost_ledger_does_not_become_an_empty_book(tmp_path: Path, left: int | None, mode: str) -> None:
    folder = tmp_path / "book"
    filled(folder)
    (segment,) = segments(folder)
    content = segment.read_bytes()
    (folder / LEDGER).unlink()
    if left is not None:
        (folder / LEDGER).touch()
    with pytest.raises((NotABookError, CorruptBookError), match="ledger|no book here"):
        rollbook.open(folder, mode).close()
    assert segment.read_bytes() == content


def test_another_that_makes_the_book_meanwhile_is_not_taken_for_a_lost_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "book"
    real, others = ledger.read_layout, [PIECES[0]]

    def look(opened: SQLiteLedger) -> int | None:
        version = real(opened)
        while others:  # between the look for tables and what comes next
            filled(folder, [others.pop()])
        return version

    monkeypatch.setattr(ledger, "read_layout", look)
    with rollbook.open(folder) as book:
        assert len(book) == 2


def test_a_hung_writer_holds_others_up_for_a_stated_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "book"
    log = filled(folder)
    monkeypatch.setattr(ledgers, "BUSY_SECONDS", 0.3)
    hung = sqlite3.connect(folder / LEDGER, isolation_level=None)
    hung.execute("BEGIN IMMEDIATE")
    with rollbook.open(folder) as book:
        with pytest.raises(BookError, match=f"{LEDGER}: other writers held the ledger for 0.3 s"):
            put(book, Piece("b", 1, 2), log)
        assert "other writers held the ledger for 0.3 s" in book.lease(1).short
        assert readable(book, PIECES) == PIECES, "readers go on"
        assert book.counts().waiting == 12
        hung.execute("ROLLBACK")
        put(book, Piece("b", 1, 2), log)
    hung.close()
    assert check(str(folder), log) == []
