"""Trinity-RFT's SQLite buffers: `data/` has files that the storages of 0.5.1, 0.5.2 and 0.6.0 wrote, and one that 0.5.1
wrote and 0.6.0 then went on with. Every row comes out or is reported, and the files stay as they are."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook import Experience, WireError
from rollbook.core.wire import to_trxp
from rollbook.io import trinity_sqlite
from rollbook.io.formats import guess, list_tables, read

DATA = Path(__file__).parent / "data"
RELEASES = ["0.5.1", "0.5.2", "0.6.0"]


@pytest.fixture
def database(tmp_path: Path) -> Any:
    def unpack(name: str) -> Path:
        path = tmp_path / f"{name}.db"
        path.write_bytes(gzip.decompress((DATA / f"trinity_{name}.db.gz").read_bytes()))
        return path

    return unpack


def rows(path: Path, table: str | None = None, **options: Any) -> list[Any]:
    return [row for batch in read(path, table=table, **options) for row in batch]


def change(path: Path, *statements: Any) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(*((statement,) if isinstance(statement, str) else statement))
    connection.commit()
    connection.close()


def traces(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in sorted(folder.iterdir())}


# --- what the releases wrote --------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_released_databases(release: str, database: Any, tmp_path: Path) -> None:
    path = database(release)
    before = traces(tmp_path)
    assert guess(path) == "trinity-sqlite"
    assert list(list_tables(path)) == ["experiences", "sft", "pairs"]
    assert all(("0.6" if release == "0.6.0" else "0.5") in layout for layout in list_tables(path).values())
    records = rows(path, "experiences", batch_rows=4)
    assert [row.eid.task for row in records] == [0, 0, 1, 1, "algebra/7", 2], "a number stays one"
    assert [(row.eid.batch, row.eid.run, row.eid.suffix) for row in records] == [
        (3, i % 2, f"{i:06x}") for i in range(6)
    ]
    assert [row.tokens.tolist() for row in records] == [[1, 2, 3, 4 + i] for i in range(6)]
    assert [row.logprobs.tolist() for row in records] == [[-0.5, -0.25 * i] for i in range(6)]
    assert [row.reward for row in records if row.reward == row.reward] == [0.0, 1.0, None, 4.0, 5.0]
    assert math.isnan(records[2].reward or 0.0), "SQLite keeps no NaN, the bytes do"
    assert [row.info for row in records] == [{"model_version": 7}] * 5 + [{"model_version": 7, "note": "last"}]
    assert {row.experience_type for row in records} == {"single_turn"}
    assert [len(batch) for batch in read(path, table="experiences", batch_rows=4)] == [4, 2]
    (sft,) = rows(path, "sft")
    assert sft.action_mask.tolist() == [True, False] and sft.messages == [{"role": "user", "content": "hi"}]
    assert "model_version" not in sft.info
    (pair,) = rows(path, "pairs")
    assert pair.experience_type == "dpo" and pair.rejected.tolist() == [4, 5]
    assert traces(tmp_path) == before


def test_a_file_that_the_new_release_took_over(database: Any) -> None:
    """0.6.0 finds nothing in the older rows of such a file; all twelve are there."""
    path = database("0.5.1_then_0.6.0")
    assert "and in 'experiences_blob'" in list_tables(path)["experiences"]
    records = rows(path)
    assert len(records) == 12 and records[0].tokens.tolist() == records[6].tokens.tolist()
    assert [row.eid.suffix for row in records] == [f"{i % 6:06x}" for i in range(12)]


def test_several_tables_are_not_guessed_from(database: Any, tmp_path: Path) -> None:
    path = database("0.6.0")
    with pytest.raises(ValueError, match="table: got None, expected one of 'experiences', 'sft', 'pairs'"):
        rows(path)
    with pytest.raises(ValueError, match="table: got 'experience', .*did you mean 'experiences'"):
        rows(path, "experience")
    with pytest.raises(ValueError, match="experiences_blob"):
        rows(path, "experiences_blob")
    other = tmp_path / "other.db"
    change(other, "CREATE TABLE tasks (id INTEGER PRIMARY KEY, raw_task JSON)")
    with pytest.raises(ValueError, match="no table of Trinity's experiences"):
        rows(other, format="trinity-sqlite")
    with pytest.raises(ValueError, match="found an SQLite database without a table of Trinity's; the formats are"):
        guess(other)


# --- columns and bytes --------------------------------------------------------------------------------------------


def test_columns_override_the_bytes(database: Any) -> None:
    path = database("0.6.0")
    change(
        path,
        "UPDATE experiences SET reward = 9.5, model_version = 11, task_id = 'other', run_id = 4, msg_id = 'm' "
        "WHERE id = 1",
        "UPDATE experiences SET reward = NULL, model_version = NULL, task_id = NULL, run_id = NULL, msg_id = NULL "
        "WHERE id = 2",
        "UPDATE experiences SET model_version = NULL, task_id = '1.0' WHERE id = 3",
        "UPDATE experiences SET task_id = 77 WHERE id = 4",
    )
    records = rows(path, "experiences")
    assert records[0].eid.to_dict() == {"batch": 3, "task": "other", "run": 4, "step": 0, "suffix": "m"}
    assert (records[0].reward, records[0].info["model_version"]) == (9.5, 11)
    assert records[1].eid.to_dict() == {"batch": 3, "task": 0, "run": 1, "step": 0, "suffix": "000001"}, (
        "NULL says nothing"
    )
    assert records[1].reward is None and records[1].info == {"model_version": 7}
    assert records[2].eid.task == "1.0" and math.isnan(records[2].reward or 0.0), "1.0 does not print as 1"
    assert records[3].eid.task == "77"


def test_no_version_is_not_a_version_of_none(database: Any) -> None:
    path = database("0.6.0")
    data = to_trxp([Experience(tokens=[1, 2], info={"a": 1})])
    change(
        path,
        ("UPDATE experiences_blob SET experience_bytes = ? WHERE id = 1", (data,)),
        "UPDATE experiences SET model_version = NULL WHERE id = 1",
    )
    assert rows(path, "experiences")[0].info == {"a": 1}


# --- rows that cannot be read -------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_bad_rows_are_reported(database: Any, tmp_path: Path) -> None:
    path, mark = database("0.6.0"), tmp_path / "ran"
    two_records = to_trxp([Experience(tokens=[1, 2])] * 2)
    blob = "UPDATE experiences_blob SET experience_bytes = ? WHERE id = ?"
    change(
        path,
        "DELETE FROM experiences_blob WHERE id = 1",
        (blob, (pickle.dumps(Bomb(mark)), 2)),
        (blob, (two_records, 3)),
        (blob, ("text", 4)),
        (blob, (b"TRXP\x01 cut", 5)),
    )
    with pytest.raises(
        WireError, match=r"row 1: the record's bytes are missing \(looked in table 'experiences_blob'\)"
    ):
        rows(path, "experiences")
    reading = read(path, table="experiences", on_error="skip")
    assert [row.eid.suffix for batch in reading for row in batch] == ["000005"]
    report = reading.report
    assert (report.count, [skipped.row for skipped in report.skipped]) == (5, [1, 2, 3, 4, 5])
    reasons = [skipped.reason for skipped in report.skipped]
    assert (
        "touch" in reasons[1] and "2 records" in reasons[2] and "got a" not in reasons[1] and "cut short" in reasons[4]
    )
    assert not mark.exists(), "a pickle is read, not run"


def test_rows_over_the_limit_are_not_fetched(database: Any) -> None:
    path = database("0.6.0")
    change(path, "UPDATE experiences_blob SET experience_bytes = zeroblob(50000000) WHERE id = 3")
    reading = read(path, table="experiences", on_error="skip", max_row_bytes=100_000)
    assert sum(map(len, reading)) == 5
    assert reading.report.skipped[0].reason == "50000000 bytes are over the limit of 100000 (max_row_bytes)"


def test_a_blob_table_that_is_missing(database: Any) -> None:
    path = database("0.6.0")
    change(path, "DROP TABLE experiences_blob")
    assert list_tables(path)["experiences"] == "no bytes: the table of blobs is missing"
    reading = read(path, table="experiences", on_error="skip")
    assert list(reading) == [] and reading.report.count == 6
    assert "a table 'experiences_blob', which is missing" in reading.report.skipped[0].reason


def test_columns_that_hold_what_they_cannot(database: Any) -> None:
    path = database("0.5.2")
    change(
        path,
        "UPDATE experiences SET reward = 'high' WHERE id = 1",
        "UPDATE experiences SET run_id = 'first' WHERE id = 2",
        "UPDATE experiences SET task_id = CAST(x'ff' AS TEXT) WHERE id = 3",
    )
    reading = read(path, table="experiences", on_error="skip")
    assert sum(map(len, reading)) == 3
    assert [skipped.row for skipped in reading.report.skipped] == [1, 2, 3]


# --- hostile and damaged files ------------------------------------------------------------------------------------


def test_a_hostile_schema_is_only_a_schema(database: Any) -> None:
    path = database("0.6.0")
    nasty = 'a"; DROP TABLE experiences; --'
    change(
        path,
        f'''CREATE TABLE "{nasty.replace('"', '""')}" (id INTEGER PRIMARY KEY, experience_bytes BLOB)''',
        "CREATE VIEW v AS SELECT id, experience_bytes FROM experiences_blob",
        "CREATE VIRTUAL TABLE f USING fts5(id, experience_bytes)",
    )
    assert list(list_tables(path)) == ["experiences", "sft", "pairs", nasty]
    assert rows(path, nasty) == [] and len(rows(path, "experiences")) == 6


@pytest.mark.parametrize("length", [50, 4096, 20_000])
def test_damaged_files(database: Any, length: int) -> None:
    path = database("0.6.0")
    data = path.read_bytes()
    path.write_bytes(data[:length])
    with pytest.raises(WireError, match="cannot be read|missing"):
        rows(path, "experiences")
    path.write_bytes(data[:100] + bytes(len(data) - 100))
    with pytest.raises((WireError, ValueError)):
        rows(path, "experiences")


# --- leaving no trace ---------------------------------------------------------------------------------------------

WRITER = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode = " + sys.argv[2])
connection.execute("PRAGMA wal_autocheckpoint = 0")
connection.execute("PRAGMA cache_spill = 1")
connection.execute("PRAGMA cache_size = 1")
connection.execute("UPDATE experiences SET run_id = 40")
connection.commit()
if sys.argv[3] == "half":
    connection.execute("UPDATE experiences SET run_id = 50, msg_id = hex(randomblob(3000))")
if sys.argv[3] != "close":
    os._exit(0)
connection.close()
"""


def killed(path: Path, mode: str, method: str) -> None:
    subprocess.run([sys.executable, "-c", WRITER, str(path), mode, method], check=True)


@pytest.mark.parametrize("shared", [True, False])
def test_the_log_of_a_writer_that_was_killed(database: Any, tmp_path: Path, shared: bool) -> None:
    path = database("0.6.0")
    killed(path, "wal", "exit")
    if not shared:
        os.remove(f"{path}-shm")
    before = traces(tmp_path)
    assert f"{path.name}-wal" in before
    assert {row.eid.run for row in rows(path, "experiences")} == {40}, "what is in the log was committed"
    after = traces(tmp_path)
    assert list(after) == list(before)
    assert all(after[name] == before[name] for name in before if not name.endswith("-shm"))


def test_a_logged_database_at_rest(database: Any, tmp_path: Path) -> None:
    path = database("0.6.0")
    killed(path, "wal", "close")
    before = traces(tmp_path)
    assert list(before) == [path.name]
    assert {row.eid.run for row in rows(path, "experiences")} == {40}
    assert traces(tmp_path) == before, "no log was made"


def test_half_a_transaction_is_not_seen_and_not_undone(database: Any, tmp_path: Path) -> None:
    path = database("0.6.0")
    killed(path, "delete", "half")
    before = traces(tmp_path)
    assert f"{path.name}-journal" in before
    assert {row.eid.run for row in rows(path, "experiences")} == {40}
    assert traces(tmp_path) == before


def test_a_database_that_is_being_written(database: Any) -> None:
    for mode in ("wal", "delete"):
        path = database("0.6.0")
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("UPDATE experiences SET run_id = 41")
        connection.commit()
        connection.execute("UPDATE experiences SET run_id = 42")
        assert {row.eid.run for row in rows(path, "experiences")} == {41}
        connection.rollback()
        connection.close()
        os.remove(path)


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_folder_that_cannot_be_written(database: Any, tmp_path: Path, mode: str) -> None:
    path = database("0.6.0")
    killed(path, mode, "close")
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(rows(path, "experiences")) == 6
    finally:
        tmp_path.chmod(0o755)


def test_names_with_odd_characters(database: Any, tmp_path: Path) -> None:
    path = database("0.5.2")
    renamed = tmp_path / "a?mode=rwc#b %20 c.db"
    os.rename(path, renamed)
    assert len(rows(renamed, "experiences")) == 6
    assert list(traces(tmp_path)) == [renamed.name]


def test_every_row_is_one_or_the_other(database: Any) -> None:
    """Whatever byte of the pages is flipped, no row vanishes silently: it is read, reported, or all raises."""
    path = database("0.6.0")
    data = path.read_bytes()
    for at in range(5000, len(data), 1777):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        reading = read(path, table="experiences", on_error="skip")
        try:
            read_count = sum(map(len, reading))
        except (WireError, ValueError):
            continue
        connection = sqlite3.connect(path)
        (stored,) = connection.execute("SELECT count(*) FROM (SELECT id FROM experiences NOT INDEXED)").fetchone()
        connection.close()
        assert read_count + reading.report.count == stored


def test_the_layout_is_told() -> None:
    table = trinity_sqlite.Table("t", "serialized_exp", None, ())
    assert table.layout == "bytes in 'serialized_exp' (0.5)"
