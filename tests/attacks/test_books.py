"""Another user's book runs no code, reads nothing outside its folder, and costs what its size deserves: each attack is
refused with an error that says why, or does nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

import rollbook
from rollbook.book import BookError
from rollbook.book.recovery import repair
from rollbook.book.segments import files
from rollbook.cli import main
from rollbook.core import wire
from tests.attacks.outcome import SPARE, Meter, in_child
from tests.book.records import record, records, take

SECONDS = 30
"""Far above what any of these takes on a busy machine; what hangs takes longer."""
SECRET = "the secret that lies outside"


class Trap:
    """What unpickling would do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book with something in every table."""
    folder = tmp_path_factory.mktemp("template") / "book"
    with rollbook.open(folder) as book:
        book.append(records(4, reward=0.5))
        book.append([record(1, run, suffix="s", group_size=2) for run in range(2)])
        book.append(record(suffix="picture", info={"png": bytes(5000)}))
        take(book, 1)
        take(book, 1, by="group")
        book.checkpoint("here")
        book.revise("//0/0/0002", reward=1.0, author="ana")
        book.lease(1)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text(SECRET)
    return Path(shutil.copytree(template, tmp_path / "book", symlinks=True))


@contextlib.contextmanager
def ledger(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / "ledger.sqlite")
    try:
        yield connection
        connection.commit()
    finally:
        connection.close()


def segment(folder: Path) -> Path:
    return next(path for path in (folder / "segments").iterdir() if path.suffix == ".rbs")


COUNTED = [
    f"select max(hash(x)) from {name} as x"
    for name in ("events", "queue", "leases", "revisions", "checkpoints", "media")
]


def everything(book: rollbook.book.Book) -> Iterator[Callable[[], Any]]:
    """All that a user may do with a book that somebody gave them."""
    uids = ["//0/0/0000", "//0/0/0001", "//0/0/0002", "//0/0/0003", "//0/0/picture"]
    for uid in uids:
        yield lambda uid=uid: book.get([uid]).rows()
        yield lambda uid=uid: book.history(uid)
    yield lambda: book.where(("reward", ">", 0)).uids()
    yield lambda: list(book.where().scan())
    yield lambda: list(book.where().scan(["tokens", "reward", "uid"]))
    yield lambda: book.sql("select * from experiences", seconds=20).rows()
    yield lambda: book.sql(f"select count(*), {', '.join(f'({column})' for column in COUNTED)}", seconds=20).rows()
    yield book.counts
    yield lambda: rollbook.book.keep_rates(book)
    yield lambda: len(book)
    yield lambda: book.policy_version
    yield book.checkpoints
    yield book.check
    yield lambda: book.check(deep=False)
    if not book.read_only:
        for by in ("experience", "group"):
            for consumer in ("train", "new"):
                yield lambda by=by, consumer=consumer: book.lease(1, by=by, consumer=consumer, create=True).ack()
        yield lambda: book.append(records(1, 500))
        yield lambda: book.announce(7)
        yield lambda: book.rewind("here")
        yield lambda: book.compact(garbage=0.0, grace=0.0)


def refused(read: Callable[[], Any]) -> bool:
    """Whether it was refused, in a way that a user can read; anything else passes through and fails the test."""
    try:
        read()
    except (ValueError, KeyError) as error:
        assert str(error).strip(), repr(error)
        return True
    return False


def survived(folder: Path, modes: str = "ra") -> set[str]:
    """Do everything with the book, for reading and for writing: what was refused. Nothing else may happen: no file
    outside the folder changes or is read, no time and no memory beyond what the book's size deserves."""
    outside = {path: path.read_bytes() for path in folder.parent.iterdir() if path.is_file() and not path.is_symlink()}
    meter, start = Meter(), time.monotonic()
    accepted: set[str] = set()
    for mode in modes:
        try:
            book = rollbook.open(folder, mode)
        except BookError as error:
            assert str(error).strip()
            accepted.add("open")
            continue
        with book:
            for i, read in enumerate(everything(book)):
                answers: list[Any] = []
                if refused(lambda read=read, answers=answers: answers.append(read())):
                    accepted.add(f"{mode}{i}")
                assert SECRET not in repr(answers)
    assert time.monotonic() - start < SECONDS
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    assert meter.peak() < 4 * SPARE + 8 * size, f"{meter.peak() >> 20} MiB"
    with contextlib.suppress(BookError):
        repair(folder)
    for path, data in outside.items():
        assert path.read_bytes() == data, path
    canaries = [path for path in folder.parent.iterdir() if path.name == "canary"]
    assert canaries == []
    return accepted


def test_the_book_itself_is_well(folder: Path) -> None:
    assert survived(folder) == set()


# --- places ---------------------------------------------------------------------------------------------------------

NAMES = (
    "../../outside",
    "/etc/passwd",
    "file:///etc/passwd",
    "..",
    ".",
    "",
    "segments",
    "\0",
    "a" * 5000,
    "\u202e.rbs",
    "0000000000000000-0000000000000000.rbs/../../../outside",
    "0000000000000000-0000000000000000.rbs\n",
    "CON",
)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_segment_by_another_name(name: str, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute("UPDATE records SET segment = ? WHERE uid <> '//0/0/picture'", (name,))
        connection.execute("UPDATE media SET segment = ?", (name,))
        connection.execute("INSERT INTO purges VALUES (?, 0)", (name,))
        connection.execute("INSERT INTO orphans VALUES (?, 0)", (name,))
    assert survived(folder)


@pytest.mark.parametrize("value", [-1, -(1 << 63), (1 << 63) - 1, 1 << 40, 0, 63, 3.5, "64", "x", b"64", None])
def test_a_place_that_is_none(value: Any, folder: Path) -> None:
    with ledger(folder) as connection:
        for column, uid in (("start", "//0/0/0001"), ("size", "//0/0/0002"), ("slot", "//0/0/0003")):
            connection.execute(f"UPDATE records SET {column} = ? WHERE uid = ?", (value, uid))
        with contextlib.suppress(sqlite3.IntegrityError):
            connection.execute("UPDATE media SET start = ?", (value,))
    survived(folder)
    with rollbook.open(folder, "r") as book:
        assert book.check().ok, "the repair made something of it"
        assert len(book.get(["//0/0/0000"])) == 1


@pytest.mark.parametrize("kind", ["segment", "segments", "ledger", "wal", "shm", "journal"])
@pytest.mark.parametrize("to", ["file", "pipe", "device", "folder", "nothing"])
def test_links_pipes_and_devices(kind: str, to: str, folder: Path) -> None:
    path = {
        "segment": segment(folder),
        "segments": folder / "segments",
        "ledger": folder / "ledger.sqlite",
        "wal": folder / "ledger.sqlite-wal",
        "shm": folder / "ledger.sqlite-shm",
        "journal": folder / "ledger.sqlite-journal",
    }[kind]
    beside = folder.parent / "moved"
    if path.exists():
        shutil.move(path, beside)
    else:
        beside.write_bytes(bytes(8192))
    if to == "file":
        path.symlink_to(beside)
    elif to == "pipe":
        os.mkfifo(path)
    elif to == "device":
        path.symlink_to("/dev/zero")
    elif to == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder.parent / "canary")  # which SQLite would make
    assert survived(folder)


# --- what a database can do -----------------------------------------------------------------------------------------

SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
PROGRAMS = {
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM records; END",
    "a trigger that never ends": "CREATE TRIGGER t AFTER INSERT ON events BEGIN "
    f"INSERT INTO meta {SLOW} i, i FROM n; END",
    "a view of a table's name": f"DROP TABLE tallies; CREATE VIEW tallies AS {SLOW} i AS consumer, 'x' AS state, '' AS "
    "reason, i AS n, 1.0 AS weight FROM n",
    "another view": f"CREATE VIEW v AS {SLOW} i FROM n",
    "a generated column": "DROP TABLE purges; CREATE TABLE purges (segment TEXT PRIMARY KEY, "
    "since REAL AS (length(zeroblob(1000000000))))",
    "a check": "DROP TABLE purges; CREATE TABLE purges (segment TEXT PRIMARY KEY, since REAL NOT NULL "
    "CHECK (length(zeroblob(1000000000)) > 0))",
    "a default": "DROP TABLE orphans; CREATE TABLE orphans (segment TEXT PRIMARY KEY, "
    "seen REAL NOT NULL DEFAULT (length(zeroblob(1000000000))))",
    "an index that computes": "CREATE INDEX i ON events (hex(zeroblob(1000000)))",
    "a virtual table": "CREATE VIRTUAL TABLE v USING fts5(x)",
    "a table of another name": "ALTER TABLE events RENAME TO other",
    "a missing column": "ALTER TABLE events DROP COLUMN detail",
    "a missing index": "DROP INDEX events_seq",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ledger_that_computes(name: str, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.executescript(PROGRAMS[name])
    assert "open" in survived(folder)
    if name not in ("a trigger", "a trigger that never ends"):
        return
    with rollbook.open(folder, "r") as book:  # `survived` has repaired it
        assert len(book) >= 7


def test_a_ledger_cannot_load_an_extension_or_another_database(folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute(
            "INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) VALUES ('trigger', 't', 'events', 0, ?)",
            ("CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT load_extension('/tmp/x.so'); END",),
        )
    assert "open" in survived(folder)


@pytest.mark.parametrize("tail", ["-wal", "-journal"])
def test_a_log_of_another_database(tail: str, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    connection.execute("INSERT INTO meta VALUES ('layout', '1')")
    connection.commit()
    log = Path(f"{other}-wal").read_bytes()
    connection.close()
    (folder / f"ledger.sqlite{tail}").write_bytes(log)
    survived(folder)


# --- values of any type ---------------------------------------------------------------------------------------------

VALUES = (None, "text", b"\x80blob", -1, (1 << 63) - 1, 1e308, float("inf"), "x" * 100_000)
COLUMNS = {
    "records": (
        "reward",
        "length",
        "run",
        "version_min",
        "evaluation",
        "gid",
        "kind",
        "group_size",
        "removed_reason",
        "revision",
    ),
    "queue": ("state", "rank", "weight", "uses", "lease", "until", "version", "attempts", "gid"),
    "tallies": ("n", "weight", "state", "reason"),
    "groups": ("ready", "rank", "weight", "runs", "size", "due"),
    "leases": ("consumer", "expires", "state", "seconds"),
    "events": ("time", "seq", "consumer", "kind", "step", "lease", "detail", "reason"),
    "consumers": ("name", "made", "settings", "state", "grouped", "inserts", "samples", "floor", "generation"),
    "checkpoints": ("event", "seq", "state", "made"),
    "revisions": ("n", "author", "fields", "full_hash"),
    "media": ("hash",),
    "columns": ("name", "type"),
    "meta": ("value",),
}


@pytest.mark.parametrize("table", COLUMNS)
def test_values_of_any_type(table: str, template: Path, tmp_path: Path) -> None:
    """Each column in turn, with one value after another, in the last row or in all of them."""
    turns = itertools.cycle(itertools.product(VALUES, (False, True)))
    for column in COLUMNS[table]:
        for value, last in itertools.islice(turns, 1):
            folder = Path(shutil.copytree(template, tmp_path / "book"))
            condition = f"WHERE rowid = (SELECT MAX(rowid) FROM {table})" if last else ""
            with ledger(folder) as connection, contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? {condition}", (value,))
            with contextlib.suppress(BookError), rollbook.open(folder) as book:
                for read in everything(book):
                    refused(read)
            shutil.rmtree(folder)


DEEP = "[" * 100_000 + "]" * 100_000
SETTINGS = (
    "",
    "null",
    "{}",
    "[]",
    DEEP,
    '{"sampler":' + DEEP + "}",
    '{"sampler": {"name": "os.system"}, "removers": [], "limiters": []}',
    '{"sampler": {"name": ["first"]}, "removers": [], "limiters": []}',
    '{"sampler": {"name": "balanced", "edges": 5}, "removers": [], "limiters": []}',
    '{"sampler": {"name": "proportional", "alpha": 1e308, "least": "x"}, "removers": [], "limiters": []}',
    '{"sampler": {"name": "proportional", "key": 7}, "removers": [], "limiters": []}',
    '{"sampler": {"name": "first"}, "removers": [{"name": "max_size", "size": "x"}], "limiters": []}',
    '{"sampler": {"name": "first"}, "removers": [], "limiters": [], "__class__": "os"}',
    '{"sampler": {"name": "first"}, "removers": [], "limiters": [], "lease_seconds": 1e400}',
    '{"sampler": {"name": "first"}, "removers": [], "limiters": [], "group_size": 1000000000000}',
    '{"sampler": {"name": "first"}, "removers": [], "limiters": [], "seed": 9' + "9" * 5000 + "}",
    "1" * 5_000_000,
)
STATES = (
    DEEP,
    '{"ready":' + DEEP + "}",
    '{"ready": [1]}',
    '{"ready": {}}',
    '{"clock": NaN}',
    '{"clock": Infinity}',
    '{"clock": "x"}',
    '{"round": 1e300}',
    '{"rounds": [1]}',
    '{"rounds": {"0": []}}',
    '{"ready": [1000000000, 1e300]}',
    '{"x": "' + "y" * 5_000_000 + '"}',
)


@pytest.mark.parametrize(("column", "i"), [("settings", i) for i in range(len(SETTINGS))])
def test_settings_that_are_none(column: str, i: int, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute(f"UPDATE consumers SET {column} = ?", (SETTINGS[i],))
    survived(folder, "a")
    with rollbook.open(folder) as book:
        assert book.check().ok
        assert len(take(book, 1)) <= 1


@pytest.mark.parametrize("i", range(len(STATES)))
def test_a_state_that_is_none(i: int, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute("UPDATE consumers SET state = ?", (STATES[i],))
    survived(folder, "a")


BOMBS = (DEEP, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" + "1," * 300_000 + "1]", '"' + "x" * 1_000_000 + '"', "{")


@pytest.mark.parametrize("i", range(len(BOMBS)))
@pytest.mark.parametrize("table", ["events", "checkpoints"])
def test_json_bombs(table: str, i: int, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute(f"UPDATE {table} SET {'detail' if table == 'events' else 'state'} = ?", (BOMBS[i],))
    survived(folder, "a")


@pytest.mark.parametrize(
    "kind", ["int32x999999999", "int8x99999x99999", "float32" + "x1" * 5000, "object", "int32x0", ""]
)
def test_columns_of_any_type(kind: str, folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute("INSERT INTO columns (name, type) VALUES ('tokens', ?)", (kind,))
        connection.execute("INSERT INTO columns (name, type) VALUES ('routed_experts', ?)", (kind,))
        connection.execute("UPDATE records SET segment = NULL, removed_reason = 'deleted' WHERE seq = 1")
    survived(folder)


def test_counts_of_billions(folder: Path) -> None:
    with ledger(folder) as connection:
        connection.execute("UPDATE tallies SET n = 1000000000, weight = 1e300")
        connection.execute("UPDATE groups SET runs = 1000000000, size = 1")
        connection.execute("UPDATE consumers SET inserts = 1000000000000, samples = -1000000000000")
        connection.execute("UPDATE records SET length = 1000000000000, group_size = 1000000000000")
    survived(folder)
    with rollbook.open(folder) as book:
        assert book.check().ok
        assert book.counts().admitted == len(book.where(evaluation=0).uids())


# --- segments -------------------------------------------------------------------------------------------------------


def with_part(folder: Path, part: bytes, **columns: Any) -> None:
    """Have all records lie in one more segment that holds this part."""
    name = "0000000000000001-00000000000000aa.rbs"
    (folder / "segments" / name).write_bytes(files.HEADER + part)
    with ledger(folder) as connection:
        connection.execute("UPDATE records SET segment = ?, start = 64, size = ?", (name, len(part)))


def bomb() -> bytes:
    """A frame that says it is four gigabytes of zeros, and is."""
    import pyarrow as pa

    codec = pa.Codec("zstd")
    piece = bytes(codec.compress(bytes(256 << 20)))
    body = piece * 16
    head = wire.HEADER.pack(wire.MAGIC, 1, 1, 64, len(body), 4 << 30, 1, xxhash.xxh3_64_intdigest(body), 0)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + body + bytes(-len(body) % 64)


@pytest.mark.parametrize("before", [b"", wire.encode(records(9))], ids=["alone", "behind another"])
def test_a_frame_that_is_a_bomb(before: bytes, folder: Path) -> None:
    with_part(folder, before + bomb())
    assert survived(folder)


def test_a_frame_that_was_compressed(folder: Path) -> None:
    with_part(folder, wire.encode(records(4), compression="zstd"))
    assert survived(folder)


def test_a_pickle_in_the_place_of_a_frame(folder: Path) -> None:
    data = pickle.dumps(Trap(str(folder.parent / "canary")))
    with_part(folder, data)
    assert survived(folder)
    for path in (folder / "segments").iterdir():
        path.write_bytes(data)
    (folder / "ledger.sqlite").write_bytes(data)
    assert survived(folder)


def test_pickles_in_the_ledger(folder: Path) -> None:
    data = pickle.dumps(Trap(str(folder.parent / "canary")))
    with ledger(folder) as connection:
        connection.execute("UPDATE records SET full_hash = ?, core_hash = ?", (data, data))
        connection.execute("UPDATE events SET detail = ?", (data,))
        connection.execute("UPDATE consumers SET state = ?, settings = ?", (data, data))
    assert survived(folder)


def test_records_that_are_others(folder: Path) -> None:
    """Frames whose records have other ids, media that are frames, and frames that are media."""
    with_part(folder, wire.encode([record(suffix=f"other-{i}", info={"i": i}) for i in range(9)]))
    with rollbook.open(folder, "r") as book:
        assert {finding.kind for finding in book.check().findings} >= {"another"}
    with ledger(folder) as connection:
        connection.execute("UPDATE media SET segment = (SELECT segment FROM records LIMIT 1), start = 64")
    survived(folder)


def test_data_elsewhere_is_not_followed(folder: Path) -> None:
    with ledger(folder) as connection:
        for key in ("data", "store", "url", "segments", "from"):
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, f"file://{folder.parent}"))
    assert survived(folder) == set()


def test_a_sparse_segment_costs_nothing(folder: Path) -> None:
    with_part(folder, b"\x8dROLLBK\n")
    name = folder / "segments" / "0000000000000001-00000000000000aa.rbs"
    os.truncate(name, 1 << 31)
    with ledger(folder) as connection:
        connection.execute("UPDATE records SET size = ?", ((1 << 31) - 64,))
    start = time.monotonic()
    with rollbook.open(folder, "r") as book:
        assert refused(lambda: book.get(["//0/0/0000"]))
        assert not book.check().ok
    assert time.monotonic() - start < SECONDS


def test_the_command_line_refuses_them_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ledger(folder) as connection:
        connection.executescript(PROGRAMS["a view of a table's name"])
    for command in (["ls"], ["check"], ["sql", "select 1"], ["history", "//0/0/0000"], ["compact"]):
        assert main([command[0], str(folder), *command[1:]]) == 2, command
        assert len(capsys.readouterr().err.splitlines()) == 1


OPTIMISED = """
import sys
import rollbook
from rollbook.book import BookError
said = []
for folder in sys.argv[1:]:
    for mode in ("r", "a"):
        try:
            with rollbook.open(folder, mode) as book:
                book.get(["//0/0/0000"])
                said.append("read")
        except BookError as error:
            said.append(type(error).__name__)
print(json.dumps(said))
"""


def test_nothing_hangs_on_asserts(template: Path, tmp_path: Path) -> None:
    """The same refusals from an interpreter that leaves assertions out."""
    changes = {
        "path": lambda connection: connection.execute("UPDATE records SET segment = '../../outside'"),
        "view": lambda connection: connection.executescript(PROGRAMS["another view"]),
        "slot": lambda connection: connection.execute("UPDATE records SET slot = -1"),
        "settings": lambda connection: connection.execute("UPDATE consumers SET settings = ?", (DEEP,)),
    }
    folders = []
    for name, change in changes.items():
        folder = Path(shutil.copytree(template, tmp_path / name))
        with ledger(folder) as connection:
            change(connection)
        folders.append(str(folder))
    source = (
        "import json, subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-O', '-c', {'import json' + OPTIMISED!r}, *sys.argv[1:]], "
        "capture_output=True, text=True, timeout=60)\n"
        "assert done.returncode == 0, done.stderr\n"
        "print(done.stdout)\n"
    )
    assert json.loads(in_child(source, *folders)) == [
        *("CorruptBookError", "CorruptBookError"),
        *("NotABookError", "NotABookError"),
        *("CorruptBookError", "CorruptBookError"),
        *("read", "CorruptBookError"),
    ]
