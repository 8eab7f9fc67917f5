"""Sources: a book followed while it is written, what happens to its records, and what a path can be."""

from __future__ import annotations

import base64
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.book import Book, redact_records
from rollbook.book.errors import BookError
from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect.answers import Answers
from rollbook.inspect.index import Index
from rollbook.inspect.sources import BookSource, Watcher, load, open_source, run_name
from tests.book.conftest import *  # noqa: F403 (the fixtures of books of each kind)

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
) + bytes(2000)


def sample(step: int, task: int, run: int, **fields: Any) -> Experience:
    """Two tokens asked, three said, by the policy of the step."""
    columns: dict[str, Any] = {"reward": float(run), "policy_versions": step, "group_size": 2, "finish_reason": "stop"}
    columns |= fields
    tokens = columns.pop("tokens", [1, 2, 10 + run, 11, 12])
    return Experience(eid=EID(batch=step, task=task, run=run, suffix="s"), tokens=tokens, prompt_length=2, **columns)


def group(step: int, task: int, **fields: Any) -> list[Experience]:
    """Two runs of a task."""
    return [sample(step, task, run, **fields) for run in range(2)]


def rows(index: Index, columns: str, order: str = "n") -> list[tuple[Any, ...]]:
    """Some columns of all samples."""
    return index.query(f"SELECT {columns} FROM samples ORDER BY {order}")


def test_a_book_is_followed_while_it_is_written(url: str) -> None:
    book = rollbook.open(url)
    source, index = BookSource(book), Index()
    assert source.refresh(index) is None
    book.append(group(1, 5))
    load(source, index)
    assert rows(index, "uid, gid, step, task, run, reward, state, length, measured") == [
        ("1/5/0/0/s", "1/5", 1, "5", 0, 0.0, "waiting", 5, 1),
        ("1/5/1/0/s", "1/5", 1, "5", 1, 1.0, "waiting", 5, 1),
    ]
    before = index.cursor
    assert source.refresh(index) is None
    assert index.cursor == before  # nothing new changes nothing
    book.append(group(2, 5))
    book.append([sample(2, 9, 0, reward=None)], evaluation=True)
    assert source.refresh(index) == {2}
    with book.lease(1, by="group") as lease:
        load(source, index)
        assert rows(index, "state") == [("leased",)] * 2 + [("waiting",)] * 2 + [("evaluation",)]
        lease.ack(step=7)
    book.drop(["2/5/0/0/s"], "too short")
    assert source.refresh(index) == {1, 2}
    assert rows(index, "state, reason, trained_step") == [
        ("trained", None, 7),
        ("trained", None, 7),
        ("dropped", "too short", None),
        ("waiting", None, None),
        ("evaluation", None, None),
    ]
    book.revise("2/5/1/0/s", reward=0.25, advantages=[1.0, 1.0, 4.0], metrics={"late": 3}, author="ana")
    load(source, index)
    assert rows(index, "reward, advantage, parts")[3] == (0.25, 2.0, '{"late": 3.0}')
    book.delete(["1/5/0/0/s"], author="ana")
    assert source.refresh(index) == {1}
    assert rows(index, "removed_reason, opening, closing")[0] == ("deleted", "", "")
    assert index.query("SELECT n FROM groups WHERE gid = '1/5'") == [(1,)]
    index.close()
    source.close()


def test_a_rewind_gives_back_what_was_trained_and_takes_what_came_later(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    source, index = BookSource(book), Index()
    book.append(group(1, 5))
    book.announce(1)
    saved = book.checkpoint()
    book.lease(1, by="group").ack(step=1)
    book.append(group(2, 5))
    book.announce(9)
    load(source, index)
    assert rows(index, "state, trained_step") == [("trained", 1)] * 2 + [("waiting", None)] * 2
    book.rewind(saved, later="drop")
    load(source, index)
    assert rows(index, "state, trained_step, removed_reason")[:2] == [("waiting", None, None)] * 2
    assert index.query("SELECT step FROM groups") == [(1,)]
    book.append(group(2, 5, reward=0.5))  # the same ids again
    load(source, index)
    listed = rows(index, "uid, removed_reason, reward, staleness")
    assert [row[0] for row in listed[2:]] == ["2/5/0/0/s~3", "2/5/1/0/s~4", "2/5/0/0/s", "2/5/1/0/s"]
    # Version 9 was taken back with the rest: what comes now is fresh.
    assert [row[1:] for row in listed[4:]] == [(None, 0.5, 0)] * 2
    index.close()
    source.close()


def test_lag_is_judged_when_a_record_was_trained_and_what_waits_has_none(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    book.append(group(1, 5))
    book.announce(2)
    book.append(group(1, 6))  # of version 1, when 2 is trained already
    book.announce(4)
    book.lease(1, by="group").ack(step=4)  # task 5, by a policy three versions on
    book.append(group(6, 7, policy_versions=[5, 6, 6]))
    source, index = BookSource(book), Index()
    load(source, index)
    assert rows(index, "task, staleness", "n")[::2] == [("5", 3), ("6", None), ("7", None)]
    # Followed live, the same comes out.
    other = Index()
    live = rollbook.open(tmp_path / "live")
    source_ = BookSource(live)
    live.append(group(1, 5))
    live.append(group(2, 6))
    load(source_, other)
    assert rows(other, "staleness") == [(0,)] * 4  # nothing was trained: as they came
    live.announce(4)
    live.lease(1, by="group").ack(step=4)
    load(source_, other)
    assert rows(other, "staleness") == [(3,), (3,), (None,), (None,)]
    for opened in (index, other, source, source_):
        opened.close()


def test_failed_runs_are_errors_that_complete_their_group(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    book.fail([EID(batch=1, task=5, run=1)], "crashed", group_size=2)
    book.append([sample(1, 5, 0), sample(2, 5, 0, group_size=1, info={"error": "timeout"})])
    source, index = BookSource(book), Index()
    load(source, index)
    assert rows(index, "status, removed_reason, measured", "step, run") == [
        ("finished", None, 1),
        ("error", "crashed", 1),
        ("error", None, 1),
    ]
    assert index.query("SELECT runs, expected, zero_variance FROM groups WHERE step = 1") == [(2, 2, 0)]
    index.close()
    source.close()


def test_redacted_and_removed_bytes_leave_the_index_too(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book", max_staleness=0)
    book.append(group(1, 5, prompt_text="my secret", response_text="a secret too"))
    source, index = BookSource(book), Index()
    load(source, index)
    assert rows(index, "opening, closing")[0] == ("my secret", "a secret too")
    redact_records(book, ["1/5/0/0/s"], ["prompt_text", "response_text"], author="ana")
    load(source, index)
    assert "secret" not in str(rows(index, "opening, closing")[0])
    book.announce(5)  # both are dropped as stale, and compaction takes their bytes
    book.compact()
    load(source, index)
    assert rows(index, "state, reason, removed_reason, reward") == [
        ("dropped", "stale", "stale", float(run)) for run in (0, 1)
    ]
    index.close()
    source.close()


def test_damaged_records_are_named_and_the_others_are_measured(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        for task in range(4):
            book.append(group(1, task, entropy=[1.0, 2.0, 3.0]))
        with book.ledger.read() as tx:
            segment, start, size = tx.first("SELECT segment, start, size FROM records WHERE seq = 3")
    path = next(path for path in (tmp_path / "book").rglob("*") if path.is_file() and segment in path.name)
    data = bytearray(path.read_bytes())
    data[start + 8 : start + size] = bytes(size - 8)
    path.write_bytes(bytes(data))
    source, index = open_source(tmp_path / "book"), Index()
    load(source, index)
    assert [row[0] for row in rows(index, "entropy")] == [2.0] * 2 + [None] * 2 + [2.0] * 4
    assert isinstance(source, BookSource)
    assert [problem.split(":")[0] for problem in source.problems] == ["record number 3", "record number 4"]
    assert Answers(source, index).run()["problems"] == source.problems
    index.close()
    source.close()


def test_a_book_that_is_closed_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    book.append(group(1, 5))
    source, index = BookSource(book), Index()
    load(source, index)
    index.put([{"n": 1, "measured": 0}])
    assert source._follower is not None
    book.close()
    with pytest.raises(BookError, match="closed"):
        source._follower._measure()
    assert source.problems == []
    assert rows(index, "measured") == [(0,), (1,)]  # it is tried again
    index.close()


def test_texts_come_from_the_record_or_the_vocabulary(tmp_path: Path) -> None:
    words = Vocabulary([None, b"what", b" now", *[None] * 7, b"so", b" it", b" ends"])
    book = rollbook.open(tmp_path / "book")
    book.append([sample(1, 1, 0), sample(1, 2, 0, response_text="written down")])
    plain, read = BookSource(book), BookSource(book, vocabulary=words)
    uids = ["1/2/0/0/s", "1/1/0/0/s"]
    assert plain.texts(uids) == [("", "written down"), ("", "")]
    assert read.texts(uids) == [("what now", "written down"), ("what now", "so it ends")]
    index = Index()
    load(read, index)
    assert rows(index, "opening, closing") == [("what now", "so it ends"), ("what now", "written down")]
    with pytest.raises(KeyError, match="9/9"):
        read.texts(["9/9/0/0/s"])
    index.close()
    book.close()


def test_documents_records_media_history_and_sql_come_from_the_book(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with rollbook.open(tmp_path / "book") as book:
        book.append([sample(1, 5, 0, messages=messages)])
        book.lease(1).ack(step=3)
    source, index = open_source(tmp_path / "book"), Index()
    load(source, index)
    (trajectory,) = source.trajectories(["1/5/0/0/s"])
    assert (trajectory.uid, trajectory.step, trajectory.reward) == ("1/5/0/0/s", 1, 0.0)
    assert rows(index, "images, turns") == [(1, 1)]
    media = source.media(trajectory.pictures[0].sha256)
    assert media is not None and media[0].startswith(PNG[:8]) and media[1] == "image/png"
    assert source.media("0" * 64) is None
    assert source.record("1/5/0/0/s")["tokens"] == [1, 2, 10, 11, 12]
    history = source.history("1/5/0/0/s")
    assert history is not None
    assert [(entry["kind"], entry["step"]) for entry in history] == [
        ("admitted", None),
        ("leased", None),
        ("trained", 3),
    ]
    queried = source.sql("select range as n from range(5)", seconds=20, rows=3)
    assert queried == {"columns": ["n"], "rows": [[0], [1], [2]], "truncated": True}
    with pytest.raises(ValueError, match="expected one statement that reads"):
        source.sql("drop table experiences", seconds=5, rows=3)
    with pytest.raises(KeyError, match="nobody"):
        source.trajectories(["nobody"])
    index.close()
    source.close()


def test_paths_are_books_folders_of_one_or_refused_with_what_is_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rollbook.open(tmp_path / "two" / name).close()
    rollbook.open(tmp_path / "one" / "deep" / "run").close()
    for path in (tmp_path / "two" / "a", tmp_path / "two" / "a" / "ledger.sqlite", tmp_path / "one"):
        source = open_source(path)
        assert source.kind == "book"
        assert source.name in ("a", "run")
        source.close()
    with pytest.raises(ValueError, match=r"contains 2 books, expected one of: .*a, .*b"):
        open_source(tmp_path / "two")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected a book"):
        open_source("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        open_source(tmp_path / "empty")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(ValueError, match="note.txt"):
        open_source(tmp_path / "note.txt")


def test_a_linked_ledger_is_not_followed(tmp_path: Path) -> None:
    rollbook.open(tmp_path / "real").close()
    (tmp_path / "fake").mkdir()
    os.symlink(tmp_path / "real" / "ledger.sqlite", tmp_path / "fake" / "ledger.sqlite")
    with pytest.raises(ValueError, match="link"):
        open_source(tmp_path / "fake")


def test_a_watcher_follows_a_book_and_says_what_went_wrong(tmp_path: Path) -> None:
    writing = rollbook.open(tmp_path / "book")
    writing.append(group(1, 5))
    source, index = open_source(tmp_path / "book"), Index()
    with Watcher(source, index, seconds=0.02) as watcher:
        assert len(rows(index, "n")) == 2  # the first look was waited for
        deadline = time.monotonic() + 30
        while not watcher.loaded and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watcher.loaded
        cursor = index.cursor
        assert len(rows(index, "n")) == 2
        writing.append(group(2, 5))
        assert watcher.wait(cursor, 30)
        deadline = time.monotonic() + 30
        while rows(index, "measured") != [(1,)] * 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watcher.error is None
        source.close()
        while watcher.error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watcher.error is not None and "closed" in watcher.error
        (problem,) = Answers(source, index).run()["problems"]
        assert "closed" in problem
        assert len(rows(index, "n")) == 4  # what was read is still there
    writing.close()
    index.close()
    assert not any(thread.name == "rollbook-watcher" for thread in threading.enumerate())


def test_many_writers_and_a_follower_agree(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    source, index = open_source(tmp_path / "book"), Index()

    def write(task: int) -> None:
        for step in range(5):
            book.append(group(step, task))

    writers = [threading.Thread(target=write, args=(task,)) for task in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        source.refresh(index)
    load(source, index)
    assert index.query("SELECT COUNT(*), SUM(measured), COUNT(DISTINCT uid) FROM samples")[0] == (40, 40, 40)
    assert index.query("SELECT COUNT(*), SUM(n) FROM groups")[0] == (20, 40)
    for opened in (index, source, book):
        opened.close()
    assert isinstance(book, Book)


def test_a_run_is_never_called_by_its_address_which_may_have_a_password() -> None:
    assert run_name("postgresql://ana:secret@db.example/runs?schema=demo") == "runs/demo"
    assert run_name("postgresql://ana:secret@") == run_name("postgresql://ana:secret@db.example/") == "postgresql"


def test_a_run_that_has_no_book_yet_is_followed_until_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n")
    with pytest.raises(ValueError, match="has no book yet"):
        open_source(run)
    source, index = open_source(run, starting=True), Index()
    answers = Answers(source, index)
    load(source, index)
    assert (answers.run()["name"], answers.run()["records"], answers.run()["live"]) == ("run", 0, True)
    assert answers.metrics()["steps"] == []
    with pytest.raises(KeyError, match="no book yet"):
        source.trajectories(["1/5/0/0/s"])
    book = rollbook.open(run / "book")
    book.append(group(1, 5))
    book.log(1, {"loss": 0.5, "grad_norm": float("nan")})
    load(source, index)
    assert answers.run()["records"] == 2 and source.trajectories(["1/5/0/0/s"])[0].step == 1
    assert answers.metrics()["steps"] == [[1, {"loss": 0.5, "grad_norm": "NaN"}]]
    before = index.cursor
    book.log(2, {"loss": 0.25})
    load(source, index)
    assert index.cursor > before  # pages hear of it
    assert answers.metrics(since=2)["steps"] == [[2, {"loss": 0.25}]] and answers.metrics(since=2)["count"] == 2
    answers.close()
    index.close()
    source.close()


def test_a_run_is_live_while_it_changes(tmp_path: Path) -> None:
    book = rollbook.open(tmp_path / "book")
    book.append(group(1, 5))
    source, index = BookSource(book), Index()
    answers = Answers(source, index)
    assert answers.run()["live"] and answers.run()["idle"] < 60
    with book.ledger.write() as tx:
        tx.run("UPDATE events SET time = time - 3600")
    assert not answers.run()["live"] and answers.run()["idle"] > 3500
    saved = tmp_path / "rollouts.jsonl"
    saved.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n')
    os.utime(saved, (1e9, 1e9))
    files = open_source(saved)
    assert files.changed == 1e9
    files.close()
    answers.close()
    index.close()
    source.close()
