"""Selecting and SQL: conditions in the ledger and on records, columns as Arrow, and DuckDB over all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import rollbook
from rollbook import EID, Experience
from rollbook.book import Book, BookError, export_records
from rollbook.book.query import QueryError
from rollbook.inspect.records import Reader
from tests.book.records import check, group, numbers, record, records, take
from tests.strategies import exact_rows


def filled(url: str, **settings: Any) -> Book:
    """Eight records of two tasks in three frames."""
    book = rollbook.open(url, **settings)
    rows = [
        Experience(
            eid=EID(batch=1, task="even" if i % 2 == 0 else 7, run=i, suffix="s"),
            tokens=list(range(4 + i)),
            prompt_length=2,
            logprobs=torch.full((2 + i,), -0.5),
            reward=[0.0, 0.25, None, math.nan, 1.0, 0.5, -1.0, 2.0][i],
            response_text="漢字" if i == 3 else f"text {i}",
            finish_reason="stop" if i % 3 else "length",
            policy_versions=i,
            info={"i": i, "level": "hard" if i > 5 else i / 2},
            metrics={"seconds": float(i)},
        )
        for i in range(8)
    ]
    book.append(rows[:3])
    book.append(rows[3:7])
    book.append(rows[7], evaluation=True)
    return book


@pytest.mark.parametrize(
    ("conditions", "equal", "expected"),
    [
        ([], {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([("reward", ">", 0.25)], {}, [4, 5, 7]),
        ([("reward", ">=", 0.25), ("reward", "<", 1)], {}, [1, 5]),
        ([("reward", "is", None)], {}, [2]),
        ([("reward", "=", None)], {}, [2]),
        ([("reward", "is not", None)], {}, [0, 1, 3, 4, 5, 6, 7]),
        ([("reward", "!=", None)], {}, [0, 1, 3, 4, 5, 6, 7]),
        ([("reward", "!=", 0.5)], {}, [0, 1, 3, 4, 6, 7]),
        ([("reward", "not in", [0.5, 1.0])], {}, [0, 1, 3, 6, 7]),
        ([("reward", "in", [0.5, 1.0])], {}, [4, 5]),
        ([("reward", "in", [])], {}, []),
        ([("reward", "not in", [])], {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([("reward", "<", math.inf)], {}, [0, 1, 4, 5, 6, 7]),
        ([], {"task": "even"}, [0, 2, 4, 6]),
        ([], {"task": 7, "evaluation": False}, [1, 3, 5]),
        ([], {"task": [7, "none"]}, [1, 3, 5, 7]),
        ([("run", "<=", 10**30), ("run", ">", 2.5)], {"batch": 1}, [3, 4, 5, 6, 7]),
        ([("length", "==", 9)], {}, [5]),
        ([("version_max", ">", 5)], {}, [6, 7]),
        ([("finish_reason", "!=", "stop")], {}, [0, 3, 6]),
        ([("uid", "=", "1/7/3/0/s")], {}, [3]),
        ([("response_text", "=", "漢字")], {}, [3]),
        ([("response_text", "in", ["text 1", "text 6"])], {}, [1, 6]),
        ([("info.level", ">", 1)], {}, [3, 4, 5]),
        ([("info.level", "=", "hard")], {}, [6, 7]),
        ([("info.none", "is", None), ("metrics.seconds", "<", 2)], {}, [0, 1]),
        ([("info.none", "is not", None)], {}, []),
        ([("info.i", "not in", [0, 1, 2]), ("reward", ">", 0)], {}, [4, 5, 7]),
    ],
)
def test_conditions(conditions: list[Any], equal: dict[str, Any], expected: list[int], eight: Book) -> None:
    selection = eight.where(*conditions, **equal)
    assert numbers(selection) == expected
    assert selection.count() == len(expected) == len(selection.uids())


@pytest.fixture(scope="module")
def eight() -> Any:
    with filled("memory:") as book:
        yield book


def test_every_kind_of_book_means_the_same_by_a_condition(url: str) -> None:
    with filled(url) as book:
        everything = test_conditions.pytestmark[0].args[1]
        assert len(everything) > 20
        for conditions, equal, expected in everything:
            assert numbers(book.where(*conditions, **equal)) == expected, (conditions, equal)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (("rewrd", ">", 1), r"unknown column 'rewrd'.*did you mean 'reward'\? \((?!.*\breward,.*\breward,)"),
        (("reward", "~", 1), "reward: got operator '~', expected one of"),
        (("reward", ">"), r"expected \(column, operator, value\)"),
        ("reward > 1", r"expected \(column, operator, value\)"),
        (("reward", ">", None), "got > None, expected 'is' or 'is not'"),
        (("reward", "is", 3), "got is 3, expected is None"),
        (("reward", ">", "high"), "where: reward: got 'high', expected a number"),
        (("reward", "<", math.nan), "where: reward: got nan, expected a number"),
        (("run", "in", [1, "two"]), "where: run: got 'two', expected a number"),
        (("task", "in", "even"), "task: got in 'even', expected several values"),
        (("task", "in", 3), "task: got in 3, expected several values"),
        (("uid", "=", 3), "uid: got 3, expected a string"),
        (("uid", "=", "a\0b"), "uid: got 'a\\\\x00b', expected a string without NUL"),
        (("uid", "in", map(str, range(10_001))), "got 10001 values, expected at most 10000"),
        (("tokens", "=", 3), "'tokens' is a tensor; conditions are on numbers and texts, book.sql on all"),
    ],
)
def test_conditions_that_mean_nothing_are_refused(condition: Any, message: str, eight: Book) -> None:
    with pytest.raises(ValueError, match=message):
        eight.where(condition)


def test_a_selection_is_narrowed_and_read_in_pieces(url: str) -> None:
    with filled(url) as book:
        selection = book.where(("reward", ">=", 0)).where(("info.i", ">", 0), evaluation=False)
        assert numbers(selection) == [1, 4, 5]
        assert [len(piece) for piece in book.where().batches(rows=3)] == [3, 3, 2]
        assert exact_rows(book.where().experiences()) == exact_rows(book.where())
        assert repr(selection) == (f"Selection({book.url!r}, reward >= 0 and info.i > 0 and evaluation = 0)")


def test_scanning_some_columns(url: str) -> None:
    with filled(url) as book:
        batches = list(book.where(("reward", ">", 0.25)).scan(["uid", "tokens", "reward"]))
        assert all(isinstance(batch, pa.RecordBatch) for batch in batches)
        table = pa.Table.from_batches(batches)
        assert table.column_names == ["uid", "tokens", "reward"]
        assert table["tokens"].to_pylist() == [list(range(4 + i)) for i in (4, 5, 7)]
        assert table["reward"].to_pylist() == [1.0, 0.5, 2.0]
        ledger_only = pa.Table.from_batches(book.where().scan(["seq", "evaluation", "reward"]))
        assert ledger_only["evaluation"].to_pylist() == [False] * 7 + [True]
        assert ledger_only["reward"].to_pylist()[2] is None and math.isnan(ledger_only["reward"].to_pylist()[3])
        first_batch = next(book.where().scan())
        assert {"uid", "tokens", "logprobs", "info", "admitted"} <= set(first_batch.schema.names)
        assert [batch.num_rows for batch in book.where().scan(["uid"], rows=3)] == [3, 3, 2]
        for bad in ("tokn", 3):
            with pytest.raises(ValueError, match=f"columns: got {bad!r}, expected names of columns"):
                list(book.where().scan([bad]))  # type: ignore[list-item]
        with pytest.raises(ValueError, match="rows"):
            list(book.where().scan(rows=0))


class Closed:
    """A store that nobody may read from."""

    private = True
    transactional = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the store was asked to {name}")


def test_columns_that_are_not_named_are_not_touched(url: str) -> None:
    with filled(url) as book:
        assert next(book.where().scan(["tokens"])).schema.names == ["tokens"]
        assert book.sql("select tokens from experiences").arrow().column_names == ["tokens"]
        store, book.store = book.store, Closed()
        try:
            # The ledger has it all.
            table = pa.Table.from_batches(book.where(("task", "=", "even")).scan(["uid", "reward", "length"]))
            assert table["length"].to_pylist() == [4, 6, 8, 10]
            assert book.where(("reward", ">", 0)).count() == 4
            assert len(book.sql("select task, avg(reward), max(length) from experiences group by 1")) == 2
            with pytest.raises(AssertionError, match="the store was asked"):
                list(book.where().scan(["tokens"]))
        finally:
            book.store = store


def test_records_that_are_gone(url: str) -> None:
    with rollbook.open(url) as book:
        appended = records(4, reward=0.5)
        book.append(appended)
        book.fail(EID(batch=0, task="a"), "crashed")
        book.delete(appended[1], author="ana")
        assert numbers(book.where()) == [0, 2, 3]
        assert book.where(("removed_reason", "is", None)).count() == 3
        assert book.where(removed_reason=["deleted", "crashed"]).count() == 2
        assert numbers(book.where(("info.i", ">", 0))) == [2, 3]
        assert sum(batch.num_rows for batch in book.where().scan(["tokens"])) == 3
        rows = book.sql("select removed_reason, len(tokens), reward from experiences order by seq").rows()
        assert rows == [
            (None, 5, 0.5),
            ("deleted", None, None),
            (None, 5, 0.5),
            (None, 5, 0.5),
            ("crashed", None, None),
        ]
        assert book.sql("select count(*) from experiences").rows() == [(5,)]
        assert len(book.sql("select tokens from experiences")) == 5
        check(book)


def test_records_that_are_deleted_while_they_are_read_are_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = [row.eid.uid for row in records(20)]
    readers: list[Callable[[Book], int]] = [
        lambda book: len(list(book)),
        lambda book: sum(map(len, book.where().batches())),
        lambda book: len(book.where(("info.i", ">=", 0)).experiences()),
        lambda book: sum(batch.num_rows for batch in book.where().scan(["uid", "tokens"])),
        lambda book: export_records(book, tmp_path / "out.jsonl", overwrite=True),
        lambda book: len(book.sql("select seq from experiences where tokens is not null")),
        lambda book: len(Reader(book).trajectories([uid for uid in uids if uid not in deleted])),
    ]
    with rollbook.open(url) as book:
        book.append(records(8))
        book.append(records(12, start=8))
        deleted: list[str] = []
        read = book.ledger.read
        for reader in readers:
            for after in (1, 2):
                reads = count(1)

                @contextmanager
                def interrupted(after: int = after, reads: Iterator[int] = reads) -> Iterator[Any]:
                    with read() as tx:
                        yield tx
                    if next(reads) == after:  # Another process, between two looks into the ledger.
                        monkeypatch.setattr(book.ledger, "read", read)
                        book.delete(uids[len(deleted)], author="ana")
                        book.compact(garbage=0.0)

                monkeypatch.setattr(book.ledger, "read", interrupted)
                assert reader(book) in (20 - len(deleted), 19 - len(deleted))
                if book.ledger.read != read:  # It looked only once.
                    assert after == 2
                    monkeypatch.setattr(book.ledger, "read", read)
                else:
                    deleted.append(uids[len(deleted)])
        with pytest.raises(BookError, match=r"data was removed \(deleted\)"):
            Reader(book).trajectories(deleted[:1])
        with pytest.raises(BookError, match=r"data was removed \(deleted\)"):
            book.get([uids[-1], deleted[0]])


def test_records_of_different_types_in_one_book(url: str) -> None:
    with rollbook.open(url) as book:
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
        for i, kind in enumerate(kinds):
            book.append(record(suffix=f"{i}", logprobs=torch.tensor([0.5, -1.0, 2.0], dtype=kind)))
        book.append(
            [record(suffix="4"), record(suffix="5", logprobs=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))]
        )
        rows = book.sql("select list_sum(logprobs) from experiences order by seq").rows()
        assert [row[0] for row in rows] == [1.5, 1.5, 1.5, 1.5, None, pytest.approx(0.6, abs=1e-12)]
        experiences = book.where().experiences()
        assert [None if row.logprobs is None else row.logprobs.dtype for row in experiences] == [
            *kinds,
            None,
            torch.float64,
        ]
        assert sum(batch.num_rows for batch in book.where().scan(["logprobs"])) == 6


def test_sql_over_records_tokens_and_info(url: str) -> None:
    with filled(url) as book:
        counted = book.sql(
            "select task, count(*) as n, max(len(tokens)), sum(case when reward > 0 then 1 else 0 end) as good "
            "from experiences where not evaluation group by task order by task"
        )
        # DuckDB holds NaN for greater than every number.
        assert counted.rows() == [("7", 3, 9, 3), ("even", 4, 10, 1)]
        assert book.sql("select tid, rid from experiences where run = 3").rows() == [("1/7", "1/7/3")]
        assert book.sql("select info->>'i' from experiences where info->>'level' = 'hard' order by 1").rows() == [
            ("6",),
            ("7",),
        ]
        assert book.sql("select cast(metrics->'seconds' as double) from experiences where run = 5").rows() == [(5.0,)]
        assert book.sql("select tokens[3] from experiences where run = ?", [4]).rows() == [(2,)]
        assert book.sql("select run from experiences where task = $t and run < $n", {"t": "even", "n": 3}).rows() == [
            (0,),
            (2,),
        ]
        assert book.sql("select run from experiences where isnan(reward)").rows() == [(3,)]
        assert book.sql("select run from experiences where reward is null").rows() == [(2,)]
        assert book.sql("select response_text from experiences where run = 3").rows() == [("漢字",)]
        assert book.sql("select list_avg(logprobs) from experiences limit 1").rows() == [(-0.5,)]


def test_sql_joins_records_with_the_ledger(url: str) -> None:
    with filled(url) as book:
        take(book, 2)
        book.lease(1)
        book.drop("1/7/3/0/s", "odd")
        rows = book.sql(
            "select e.run, w.state, w.reason from experiences e join queue w on w.uid = e.uid and w.consumer = 'train' "
            "order by e.run"
        ).rows()
        assert rows[:4] == [(0, "trained", None), (1, "trained", None), (2, "leased", None), (3, "dropped", "odd")]
        assert len(rows) == 7
        kinds = book.sql("select kind, count(*) from events group by 1 order by 1").rows()
        assert kinds == [("admitted", 8), ("dropped", 1), ("leased", 3), ("trained", 2)]
        assert book.sql("select count(*) from ledger").rows() == book.sql("select count(*) from events").rows()
        assert book.sql("select state, count from leases order by id").rows() == [("acked", 2), ("active", 1)]
        waited = book.sql(
            "select max(t.time - a.time) from events a join events t on t.uid = a.uid "
            "where a.kind = 'admitted' and t.kind = 'trained'"
        ).rows()[0][0]
        assert waited >= 0


def test_sql_counts_steps_and_hides_what_was_rewound(url: str) -> None:
    def records_of(batch: int | str, count: int) -> list[Experience]:
        return [
            Experience(eid=EID(batch=batch, run=i, suffix="s"), tokens=[1, 2], policy_versions=7) for i in range(count)
        ]

    with rollbook.open(url) as book:
        book.append([*records_of(2, 1), *records_of(10, 2), *records_of("warmup", 1)])
        book.append(records_of("eval-10", 3), evaluation=True)
        book.log(2, {"loss": 0.5, "kl": math.nan})
        saved = book.checkpoint()
        book.append(records_of(11, 2))
        book.append(records_of("eval-11", 1), evaluation=True)
        book.log(11, {"loss": 0.25})
        book.rewind(saved, later="drop")
        book.append(records_of(11, 1))
        steps = "select train_step, count(*), sum(len(tokens)) from {} group by 1 order by 1"
        assert book.sql(steps.format("training")).rows() == [(2, 1, 2), (7, 1, 2), (10, 2, 4), (11, 1, 2)]
        assert book.sql(steps.format("evaluations")).rows() == [(10, 3, 6)]
        assert book.sql("select count(*), sum(len(tokens)) from experiences").rows() == [(8, 16)]
        assert book.sql("select count(*), count(removed_reason), sum(len(tokens)) from all_experiences").rows() == [
            (11, 3, 16)
        ]
        assert (
            book.sql("select typeof(train_step), batch from training where train_step = 10").rows()
            == [("BIGINT", "10")] * 2
        )
        metrics = book.sql("select * from metrics where not isnan(value)")
        assert (metrics.columns, metrics.rows()) == (["train_step", "name", "value"], [(2, "loss", 0.5)])
        assert book.sql("select name from metrics where isnan(value)").rows() == [("kl",)]


def test_sql_as_arrow_pandas_and_polars(url: str) -> None:
    with filled(url) as book:
        query = "select run, reward from experiences order by run"
        result = book.sql(query)
        assert result.arrow().column_names == ["run", "reward"] == result.columns
        assert result.pandas()["run"].tolist() == list(range(8))
        assert result.polars()["run"].to_list() == list(range(8))
        assert len(result) == 8 and result.dicts()[0] == {"run": 0, "reward": 0.0}
        assert np.isnan(result.pandas()["reward"][3])


def test_sql_only_reads(eight: Book) -> None:
    for query in ("delete from experiences", "create table x (y int)", "select * from read_csv('/etc/passwd')"):
        with pytest.raises(QueryError):
            eight.sql(query)
    with pytest.raises(QueryError, match="rewrd"):
        eight.sql("select rewrd from experiences")
    with pytest.raises(QueryError, match="experiences"):
        eight.sql("select * from records")
    assert len(eight.sql("select * from experiences")) == 8


def test_sql_of_an_empty_book(url: str) -> None:
    with rollbook.open(url) as book:
        assert book.sql("select count(*), avg(reward), max(len(tokens)) from experiences").rows() == [(0, None, None)]
        for name in ("training", "metrics", "events", "queue", "leases", "revisions", "checkpoints", "media", "ledger"):
            assert book.sql(f"select * from {name}").rows() == []


def test_a_book_that_is_read_while_it_is_written(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(4))
        pieces = book.where().batches(rows=2)
        assert numbers(next(pieces)) == [0, 1]
        book.append(records(2, start=4))
        book.delete("//0/0/0002", author="ana")
        book.compact(garbage=0.0, small=0)
        assert [i for piece in pieces for i in numbers(piece)] == [3, 4, 5]


def test_reading_only(durable_url: str) -> None:
    with filled(durable_url):
        pass
    with rollbook.open(durable_url, mode="r") as book:
        assert numbers(book.where(("reward", ">", 0.25))) == [4, 5, 7]
        assert book.sql("select count(*) from experiences").rows() == [(8,)]
        assert len(list(book.where().scan(["tokens"]))) == 3
        assert len(group("a", 1)) == 1 and book.counts().waiting == 7
