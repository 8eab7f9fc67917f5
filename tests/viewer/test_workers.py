"""The SQL box through the viewer's address, and what runs beside it in a child: it reads one book, and it ends."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollbook.inspect.server import Server
from rollbook.inspect.workers import MAX_BYTES, QueryTimeoutError, ServerBusyError, Workers, format_csv, to_json_cell
from tests.viewer import story
from tests.viewer.asking import SECONDS, post


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(story.make(tmp_path_factory.mktemp("story") / "book", steps=3, evaluate=False))


@pytest.fixture(scope="module")
def viewer(book: Path) -> Iterator[Server]:
    with Server(book) as running:
        yield running


def test_a_question_is_answered_with_columns_and_rows(viewer: Server) -> None:
    query = "select batch, count(*) as n, avg(reward) as mean from experiences group by 1 order by 1"
    response = post(viewer, "/api/sql", {"query": query})
    assert response.status == 200, response.body
    answer = response.json
    assert answer["columns"] == ["batch", "n", "mean"] and [row[1] for row in answer["rows"]] == [48, 48, 48]
    assert answer["truncated"] is False and answer["milliseconds"] > 0


def test_rows_are_capped_and_said_to_be(viewer: Server) -> None:
    answer = post(viewer, "/api/sql", {"query": "select * from range(5000)", "rows": 10}).json
    assert [row[0] for row in answer["rows"]] == list(range(10)) and answer["truncated"] is True
    assert len(post(viewer, "/api/sql", {"query": "select * from range(5000)"}).json["rows"]) == 1000
    assert post(viewer, "/api/sql", {"query": "select 1", "rows": 0}).status == 400


def test_the_answer_is_strict_json_and_loses_nothing(viewer: Server) -> None:
    query = (
        "select 'nan'::double, '-inf'::double, 9007199254740993::bigint, 'a\"</script>', '\\x00\\xff'::blob, "
        "[1, null], {'a': 1.5}, null, true, date '2026-01-02', 12.50::decimal(9, 2), "
        "0.1234567890123456789::decimal(20, 19)"
    )
    row = post(viewer, "/api/sql", {"query": query}).json["rows"][0]
    assert row[:7] == ["NaN", "-Infinity", "9007199254740993", 'a"</script>', "0x00ff", [1, None], {"a": 1.5}]
    assert row[7:] == [None, True, "2026-01-02", 12.5, "0.1234567890123456789"]


ATTACKS = [
    "copy experiences to 'stolen.csv'",
    "copy (select 1) to '{book}/segments/more.parquet'",
    "copy experiences from '/etc/passwd'",
    "attach '{book}/ledger.sqlite' as other (type sqlite)",
    "attach ':memory:' as other",
    "install httpfs",
    "load httpfs",
    "pragma database_list",
    "pragma enable_external_access",
    "set enable_external_access = true",
    "set lock_configuration = false",
    "reset enable_external_access",
    "select * from read_csv('/etc/passwd')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('{book}/ledger.sqlite')",
    "select * from read_parquet('{book}/segments/*')",
    "select * from read_json('https://evil.example/x.json')",
    "select * from glob('/*')",
    "select * from '/etc/passwd'",
    "from '{book}/ledger.sqlite'",
    "select * from sqlite_scan('{book}/ledger.sqlite', 'records')",
    "select getenv('HOME')",
    "select * from duckdb_secrets()",
    "create table t as select 1",
    "create macro f() as 1",
    "create secret (type s3, key_id 'a', secret 'b')",
    "insert into experiences select * from experiences",
    "update experiences set reward = 1",
    "delete from experiences",
    "drop table experiences",
    "alter table experiences rename to gone",
    "select 1; drop table experiences",
    "select 1; copy (select 1) to 'stolen.csv'",
    "explain analyze copy (select 1) to 'stolen.csv'",
    "call pragma_version()",
    "export database 'stolen'",
    "import database 'stolen'",
    "vacuum",
    "checkpoint",
    "prepare p as select 1",
    "begin transaction",
    "use other",
    "",
    ";",
    "select",
    "not sql at all",
    "select * from nothing",
    "select \0",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_point_9_a_query_reads_the_book_and_does_nothing_else(viewer: Server, book: Path, attack: str) -> None:
    before = files(book)
    response = post(viewer, "/api/sql", {"query": attack.replace("{book}", str(book))})
    if attack == "select * from duckdb_secrets()":
        assert response.status == 400 or response.json["rows"] == []
    else:
        assert response.status == 400, response.body
        assert response.error and "Traceback" not in response.error
    assert files(book) == before and not Path("stolen.csv").exists() and not Path("stolen").exists()


def files(folder: Path) -> dict[str, str]:
    """Every file of a book but for SQLite's own notes."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_point_9_a_query_has_its_time(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert viewer.api is not None
    monkeypatch.setattr(viewer.api, "seconds", 0.5)
    begun = time.monotonic()
    response = post(viewer, "/api/sql", {"query": "select count(*) from range(10000000000) a, range(1000000) b"})
    assert response.status == 504 and "0.5 seconds" in response.error
    assert time.monotonic() - begun < SECONDS / 2
    monkeypatch.setattr(viewer.api, "seconds", 30.0)
    assert post(viewer, "/api/sql", {"query": "select 1"}).status == 200


def test_point_9_a_large_answer_is_cut(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "select repeat('x', 100000) from range(2000)"
    response = post(viewer, "/api/sql", {"query": query, "rows": 10_000})
    assert response.status == 200 and response.json["truncated"] is True
    assert 0 < len(response.body) <= MAX_BYTES + (1 << 20)


def test_point_9_csv_cells_are_no_formulas(viewer: Server) -> None:
    query = "select '=cmd|''/c calc''!A1' as \"=a\", '+1' as b, '-1+1' as c, '@sum(1)' as d, -1.5 as e, 'x' as f"
    response = post(viewer, "/api/sql", {"query": query, "format": "csv"})
    assert response.body.decode().splitlines() == ["'=a,b,c,d,e,f", "'=cmd|'/c calc'!A1,'+1,'-1+1,'@sum(1),-1.5,x"]
    assert post(viewer, "/api/sql", {"query": query, "format": "xlsx"}).status == 400


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=4))
@example(["\n=1", "＝1", "＋1", "－1", "＠a"])
def test_point_9_no_text_whatever_begins_a_formula(texts: list[str]) -> None:
    table = format_csv(["a"] * (len(texts) + 1), [[*texts, 1]]).decode()
    _, kept_row = csv.reader(io.StringIO(table, newline=""))
    for text, cell in zip(texts, kept_row, strict=False):
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"))
        assert cell in (text, "'" + text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=8
    )
)
def test_any_cell_is_strict_json(value: Any) -> None:
    assert json.loads(json.dumps(to_json_cell(value), allow_nan=False)) == to_json_cell(value)


# --- the children -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(book: Path) -> Iterator[Workers]:
    with Workers(str(book), children=1) as started:
        yield started


def test_a_child_is_kept_for_the_next_question_and_replaced_when_it_dies(workers: Workers) -> None:
    assert workers.sql("select 1")["rows"] == [[1]]
    (child,) = workers._idle
    assert workers.sql("select 2")["rows"] == [[2]]
    assert workers._idle == [child]
    child.process.kill()
    child.process.wait()
    assert workers.sql("select 3")["rows"] == [[3]]
    assert workers._idle != [child]


def test_a_child_that_dies_at_work_is_an_error_and_no_hang(workers: Workers) -> None:
    workers.sql("select 1")
    (child,) = workers._idle

    def end() -> None:
        time.sleep(0.3)
        os.kill(child.process.pid, 9)

    killer = threading.Thread(target=end)
    killer.start()
    with pytest.raises(ValueError, match="without an answer"):
        workers.sql("select count(*) from range(10000000000) a, range(1000000) b", seconds=SECONDS)
    killer.join()
    assert workers.sql("select 1")["rows"] == [[1]]


def test_more_questions_than_children_are_refused(workers: Workers) -> None:
    workers.sql("select 1")

    def late() -> None:
        with contextlib.suppress(QueryTimeoutError):
            workers.sql("select count(*) from range(10000000000) a, range(1000000) b", seconds=1.0)

    slow = threading.Thread(target=late)
    slow.start()
    until = time.monotonic() + SECONDS
    while workers._idle and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(ServerBusyError, match="other queries"):
        workers.sql("select 1")
    slow.join()
    assert workers.sql("select 1")["rows"] == [[1]]


def test_point_9_a_query_has_its_memory(book: Path) -> None:
    with Workers(str(book), children=1, memory=1 << 20) as small:
        with pytest.raises(ValueError, match="more than 1 MB"):
            small.sql("select count(*) from range(10000000000) a, range(1000000) b", seconds=SECONDS)


def test_point_10_covering_takes_no_longer_than_it_may(workers: Workers) -> None:
    assert workers.mask(["abc", "", "xaxbx"], ["a", "b"]) == ["██c", "", "x█x█x"]
    assert workers.mask(["aXbXc"], ["aX", "XbX"]) == ["████c"], "matches that overlap are covered whole"
    begun = time.monotonic()
    with pytest.raises(QueryTimeoutError, match=r"after 0\.5 seconds"):
        workers.mask(["a" * 60 + "b"], ["(a+)+c"], seconds=0.5)
    assert time.monotonic() - begun < SECONDS / 2
    assert workers.mask(["abc"], ["c"]) == ["ab█"]


def test_closing_ends_the_children(book: Path) -> None:
    started = Workers(str(book))
    started.sql("select 1")
    (child,) = started._idle
    started.close()
    assert child.process.poll() is not None


ORPHAN = """
from rollbook.inspect.workers import Workers
workers = Workers(children=1)
workers.mask(["a"], ["b"])
print(workers._idle[0].process.pid, flush=True)
workers.mask(["a" * 60 + "b"], ["(a+)+c"], seconds=0.5)
"""


def test_a_child_whose_server_was_killed_ends_by_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)  # it is at work
        parent.kill()
    until = time.monotonic() + SECONDS
    while running(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False
