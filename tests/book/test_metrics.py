"""Measurements in the book: what is logged comes back, whatever it is, and a rewind takes back what came after it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook.book import Book, ReadOnlyError, fork, repair, snapshot
from rollbook.book.errors import CorruptBookError
from rollbook.book.reports import decode_metrics, encode_metrics
from rollbook.inspect.index import Index
from rollbook.inspect.records import Reader
from rollbook.inspect.sources import Follower
from tests.book.records import record, records

NUMBERS = st.floats() | st.integers(-(2**63), 2**63 - 1)


def logged(book: Book, *steps: int, mark: float = 0.0) -> None:
    for step in steps:
        book.log(step, {"loss": step + mark})


def losses(book: Book) -> list[tuple[int, float]]:
    return [(step, metrics["loss"]) for step, metrics in book.metrics()]


def test_what_was_logged_is_read_by_step_and_outlives_the_process(durable_url: str) -> None:
    with rollbook.open(durable_url) as book:
        assert book.metrics() == []
        book.log(1, {"loss": 0.5, "tokens": 7, "grad_norm": math.inf, "kl": math.nan, "low": -math.inf})
        book.log(0, {})
        book.log(1, {"loss": np.float32(0.25), "eval/avg@4": np.int64(1)})
        assert book.check().ok
    with rollbook.open(durable_url, "r") as book:
        (first, none), (step, logged) = book.metrics()
        assert (first, none, step) == (0, {}, 1)
        assert math.isnan(logged.pop("kl"))
        assert logged == {"loss": 0.25, "tokens": 7, "grad_norm": math.inf, "low": -math.inf, "eval/avg@4": 1}
        with pytest.raises(ReadOnlyError, match="log"):
            book.log(2, {"loss": 1.0})


@given(st.dictionaries(st.text(min_size=1), NUMBERS))
def test_every_number_survives_strict_json(metrics: dict[str, float]) -> None:
    text = json.dumps(encode_metrics(metrics), allow_nan=False)
    decoded = decode_metrics(json.loads(text), "a line")
    assert decoded.keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(decoded[name]) is type(value)
        assert decoded[name] == value or (math.isnan(value) and math.isnan(decoded[name]))


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (1, {"loss": "0.5"}, r"metrics\['loss'\]: got '0.5', expected an int or a float"),
        (1, {"loss": None}, r"metrics\['loss'\]: got 'None'"),
        (1, {"ok": True}, r"metrics\['ok'\]: got 'True'"),
        (1, {"loss": torch.tensor(0.5)}, r"metrics\['loss'\]: .*\.item\(\)"),
        (1, {"z": 1j}, r"metrics\['z'\]"),
        (1, {"n": 10**400}, r"metrics\['n'\]: got int, too large"),
        (1, {"": 1.0}, "metrics: got the name ''"),
        (1, {3: 1.0}, "metrics: got the name 3"),
        (1, [("loss", 1.0)], "metrics: got list"),
        (-1, {}, "step: got -1"),
        (1.5, {}, "step: got 1.5"),
        (2**63, {}, "step: got 9223372036854775808"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(step: Any, metrics: Any, message: str) -> None:
    with rollbook.open("memory:") as book:
        with pytest.raises(ValueError, match=message):
            book.log(step, metrics)
        assert book.metrics() == []


def test_a_rewind_leaves_out_what_came_after_its_checkpoint(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        logged(book, 1, 2, 3)
        book.checkpoint("three")
        logged(book, 4, 5)
        book.rewind("three")
        assert losses(book) == [(1, 1.0), (2, 2.0), (3, 3.0)]
        logged(book, 4, mark=0.5)
        assert losses(book) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
        book.checkpoint("four")
        logged(book, 5, mark=0.5)
        book.rewind("four")
        logged(book, 5, mark=0.75)
        assert losses(book)[3:] == [(4, 4.5), (5, 5.75)]
        book.rewind("three")
        assert losses(book) == [(1, 1.0), (2, 2.0), (3, 3.0)]
        logged(book, 4, mark=0.9)
        assert losses(book)[3:] == [(4, 4.9)]
        assert book.check().ok
        logged_losses = book.sql(
            "select step, cast(detail->>'loss' as double) from ledger where kind = 'metrics' order by id"
        )
        assert len(logged_losses.rows()) == 9  # nothing is erased


def test_forks_and_snapshots_have_the_measurements_of_their_moment(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        logged(book, 1)
        book.checkpoint("one")
        logged(book, 2)
        book.rewind("one")
        logged(book, 2, mark=0.5)
        book.checkpoint("two")
        logged(book, 3)
        for name, copy in (("one", fork(book, "one", "memory:")), ("two", fork(book, "two", "memory:"))):
            with copy:
                assert losses(copy) == [(1, 1.0), (2, 2.5)][: 1 if name == "one" else 2]
                logged(copy, 9)
                assert losses(copy)[-1] == (9, 9.0)
                assert copy.check().ok
        with snapshot(book, "memory:") as copy:
            assert losses(copy) == losses(book) == [(1, 1.0), (2, 2.5), (3, 3.0)]
            copy.rewind("two")
            assert losses(copy) == [(1, 1.0), (2, 2.5)]


def test_a_mended_book_keeps_them(tmp_path: Any) -> None:
    place = tmp_path / "book"
    with rollbook.open(place) as book:
        book.append(records(2))
        logged(book, 1, 2)
    repair(place)
    with rollbook.open(place) as book:
        assert losses(book) == [(1, 1.0), (2, 2.0)]
        assert book.check().ok


def test_sql_reads_numbers_that_are_not_finite(url: str) -> None:
    with rollbook.open(url) as book:
        for step, value in enumerate((0.5, math.inf, math.nan)):
            book.log(step, {"policy/kl": value})
        query = "select step, cast(detail->>'policy/kl' as double) from events where kind = 'metrics' order by step"
        (_, first), (_, second), (_, third) = book.sql(query).rows()
        assert (first, second) == (0.5, math.inf) and math.isnan(third)


def test_those_who_follow_a_book_pass_over_them(url: str) -> None:
    with rollbook.open(url) as book:
        row = record(1)
        book.append([row])
        index = Index()
        follower = Follower(book, index, Reader(book))
        while follower.refresh() is not None:
            pass
        logged(book, *range(1, 4))
        assert follower.refresh() is None
        with book.lease(1) as lease:
            lease.ack(step=1)
        logged(book, 4)
        assert follower.refresh() is not None
        assert [entry.kind for entry in book.history(row.eid.uid)] == ["admitted", "leased", "trained"]
        assert book.counts().adds_up
        index.close()


@pytest.mark.parametrize(
    ("column", "value"), [("detail", '{"loss": [1]}'), ("detail", "[1]"), ("detail", "{"), ("step", None)]
)
def test_a_damaged_row_is_said_to_be_one(column: str, value: Any) -> None:
    with rollbook.open("memory:") as book:
        logged(book, 1)
        with book.ledger.write() as tx:
            tx.run(f"UPDATE events SET {column} = ? WHERE kind = 'metrics'", (value,))
        with pytest.raises(CorruptBookError, match="event 1"):
            book.metrics()
