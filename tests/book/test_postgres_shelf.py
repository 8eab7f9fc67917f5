"""The shelf in PostgreSQL: the same bytes back, all or nothing, across rows, crashes, forks and broken connections."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.book import schema
from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError, NewerLayoutError, NotABookError
from rollbook.book.postgres import PostgresLedger, connect
from rollbook.book.segments import postgres
from rollbook.book.segments.files import FolderShelf, Place, Shelf, new_name
from rollbook.book.segments.postgres import PostgresShelf
from tests.book.postgres import Server

SCHEMA = 'a "book"'  # a name that has to be quoted


def make(url: str) -> PostgresLedger:
    ledger = PostgresLedger(url, SCHEMA)
    ledger.make_schema()
    schema.prepare(ledger, create=True, where=url, meta={})
    return ledger


@contextmanager
def opened(url: str) -> Iterator[tuple[PostgresLedger, PostgresShelf]]:
    ledger = make(url)
    shelf = PostgresShelf(ledger)
    yield ledger, shelf
    shelf.close()
    ledger.close()


@pytest.fixture
def shelf(postgres_url: str) -> Iterator[PostgresShelf]:
    with opened(postgres_url) as (_, shelf):
        yield shelf


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows so short that every value takes several."""
    monkeypatch.setattr(postgres, "ROW_BYTES", 192)
    return 192


def run(url: str, statement: Any, *values: Any) -> list[Any]:
    with connect(url, SCHEMA) as connection:
        cursor = connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


def test_it_is_a_shelf_with_the_bytes_of_a_folders(shelf: PostgresShelf, postgres_url: str, tmp_path: Path) -> None:
    as_shelf: Shelf = shelf
    parts: list[Any] = [b"tokens" * 50, b"", b"media", memoryview(bytearray(range(64)))]
    places = as_shelf.put(parts)
    folder = FolderShelf(tmp_path)
    others = folder.put(parts)
    folder.close()
    assert [(p.offset, p.length) for p in places] == [(p.offset, p.length) for p in others]
    assert {p.segment for p in places} == set(shelf.segments()) and len(shelf.segments()) == 1
    [(data,)] = run(postgres_url, "SELECT data FROM blobs")
    assert bytes(data) == (tmp_path / "segments" / others[0].segment).read_bytes()
    assert [bytes(shelf.get(place)) for place in places] == [bytes(part) for part in parts]
    assert shelf.put([]) == [] and len(shelf.segments()) == 1


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(parts=st.lists(st.binary(max_size=700), min_size=1, max_size=5), data=st.data())
def test_any_parts_come_back_whatever_rows_they_fall_into(
    shelf: PostgresShelf, small_rows: int, parts: list[bytes], data: st.DataObject
) -> None:
    places = shelf.put(parts)
    assert all(place.offset % 64 == 0 for place in places)
    assert [bytes(shelf.get(place)) for place in places] == parts
    size = shelf.segments()[places[0].segment]
    assert size == 64 + sum(len(part) + -len(part) % 64 for part in parts)
    start = data.draw(st.integers(64, size))
    stop = data.draw(st.integers(start, size))
    whole = b"".join(part + bytes(-len(part) % 64) for part in parts)
    assert bytes(shelf.get(Place(places[0].segment, start, stop - start))) == whole[start - 64 : stop - 64]
    middle = Place(places[0].segment, start, min(stop - start, small_rows))
    found = shelf.get_many([middle, *(place for place in places if place.length <= small_rows)])
    short = [part for part in parts if len(part) <= small_rows]
    assert [bytes(piece) for piece in found] == [whole[start - 64 : middle.stop - 64], *short]


def test_a_value_larger_than_a_row(shelf: PostgresShelf, postgres_url: str) -> None:
    data = os.urandom(1 << 20) * 19
    first, large, last = shelf.put([b"first", data, b"last"])
    assert shelf.get(large) == data
    assert (bytes(shelf.get(first)), bytes(shelf.get(last))) == (b"first", b"last")
    assert run(postgres_url, "SELECT count(*), max(octet_length(data)) FROM blobs") == [(3, 8 << 20)]
    # Stored as it is: compressed, a part in the middle could not be read without all that is before it.
    rows = run(postgres_url, "SELECT sum(pg_column_size(data)) = sum(octet_length(data)) FROM blobs")
    assert rows == [(True,)]


def test_views_are_private(shelf: PostgresShelf) -> None:
    [place] = shelf.put([b"tokens"])
    view = shelf.get(place)
    view[0] = 0
    assert bytes(shelf.get(place)) == b"tokens"


def test_segments_are_complete_at_once_and_in_order_of_time(shelf: PostgresShelf) -> None:
    names = [shelf.put([b"x" * n])[0].segment for n in range(1, 9)]
    assert list(shelf.segments()) == names
    shelf.seal()
    assert not any(shelf.busy(name) for name in names) and all(shelf.has(name) for name in names)


def test_remove_takes_every_row_of_one_segment(shelf: PostgresShelf, small_rows: int, postgres_url: str) -> None:
    # 128 bytes and the header fill one row exactly: there is no shorter one to end with.
    kept, full, several = (shelf.put([b"x" * size])[0] for size in (500, 128, 1000))
    for place in (several, full):
        shelf.remove(place.segment)
        assert not shelf.has(place.segment)
        with pytest.raises(MissingSegmentError, match=place.segment):
            shelf.get(place)
        shelf.remove(place.segment)
    assert bytes(shelf.get(kept)) == b"x" * 500
    assert run(postgres_url, "SELECT count(*) FROM blobs WHERE segment NOT LIKE %s", kept.segment + "%") == [(0,)]


def test_a_failed_put_leaves_no_row(shelf: PostgresShelf, small_rows: int, postgres_url: str) -> None:
    run(postgres_url, "ALTER TABLE blobs ADD CHECK (segment NOT LIKE '%%/2')")
    with pytest.raises(BookError, match="violates check constraint"):
        shelf.put([b"x" * 1000])
    assert shelf.segments() == {} and run(postgres_url, "SELECT count(*) FROM blobs") == [(0,)]
    [place] = shelf.put([b"y" * 200])
    assert bytes(shelf.get(place)) == b"y" * 200


@pytest.mark.parametrize("length", [65, 10_000, 2**62, 2**70])
def test_a_length_that_is_not_there_is_refused_before_memory_is_taken(shelf: PostgresShelf, length: int) -> None:
    [place] = shelf.put([b"x" * 64])
    for read in (shelf.get, lambda place: shelf.get_many([place])):
        with pytest.raises(CorruptBookError, match="the segment has 128"):
            read(Place(place.segment, 64, length))


NAMES = {"empty": "", "folder": "../x", "quoted": "x' OR true --", "continued": new_name() + "/1", "null": "\0"}


@pytest.mark.parametrize("segment", NAMES.values(), ids=NAMES)
def test_names_that_are_none_are_refused(shelf: PostgresShelf, segment: str) -> None:
    for act in (shelf.has, shelf.busy, shelf.remove, lambda name: shelf.get(Place(name, 64, 1))):
        with pytest.raises(CorruptBookError, match="is not a segment's name"):
            act(segment)


def test_damaged_rows_are_refused(shelf: PostgresShelf, small_rows: int, postgres_url: str) -> None:
    [place] = shelf.put([b"x" * 1000])
    cut = Place(place.segment, place.offset, 600)
    run(postgres_url, "UPDATE blobs SET data = substring(data FROM 1 FOR 100) WHERE segment LIKE '%%/2'")
    with pytest.raises(CorruptBookError, match="reaches to byte 664"):
        shelf.get(cut)
    run(postgres_url, "DELETE FROM blobs WHERE segment LIKE '%%/2'")
    with pytest.raises(CorruptBookError, match="reaches to byte 664"):
        shelf.get(cut)
    assert bytes(shelf.get(Place(place.segment, 64, 300))) == b"x" * 300
    run(postgres_url, "UPDATE blobs SET data = set_byte(data, 8, 9) WHERE segment = %s", place.segment)
    with pytest.raises(NewerLayoutError):
        shelf.get(cut)
    run(postgres_url, "UPDATE blobs SET data = set_byte(data, 0, 9) WHERE segment = %s", place.segment)
    with pytest.raises(CorruptBookError, match="magic"):
        shelf.get(cut)


def test_without_tables_there_is_no_book(postgres_url: str) -> None:
    shelf = PostgresShelf(PostgresLedger(postgres_url, SCHEMA))
    with pytest.raises(NotABookError, match="blobs"):
        shelf.put([b"x"])
    shelf.close()


def test_a_closed_shelf_refuses(shelf: PostgresShelf) -> None:
    [place] = shelf.put([b"x"])
    shelf.close()
    shelf.close()
    with pytest.raises(ValueError, match="closed"):
        shelf.get(place)
    with pytest.raises(ValueError, match="closed"):
        shelf.put([b"x"])


def test_a_broken_connection_is_made_again(shelf: PostgresShelf, postgres_url: str) -> None:
    [place] = shelf.put([b"before"])
    mine = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    for act in (lambda: shelf.get(place), lambda: shelf.put([b"after"]), lambda: shelf.has(place.segment)):
        assert (True,) in run(postgres_url, mine + " AND pid <> pg_backend_pid()")
        assert act()
    assert len(shelf.segments()) == 2


def test_threads_take_turns(shelf: PostgresShelf) -> None:
    wrong = []

    def work(number: int) -> None:
        for n in range(10):
            data = bytes([number, n]) * 500
            [place] = shelf.put([data])
            if bytes(shelf.get(place)) != data:
                wrong.append((number, n))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(shelf.segments()) == 40


def in_child(shelf: PostgresShelf, place: Place, answers: Any) -> None:
    answers.put((bytes(shelf.get(place)), shelf.put([b"child's"])[0]))
    shelf.close()


def test_a_forked_child_has_a_connection_of_its_own(shelf: PostgresShelf) -> None:
    [place] = shelf.put([b"parent's"])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with shelf.ledger.connection():  # as if another thread were at work when the child is made
        child = context.Process(target=in_child, args=(shelf, place, answers))
        child.start()
    seen, theirs = answers.get(timeout=60)
    child.join(60)
    assert (seen, child.exitcode) == (b"parent's", 0)
    assert bytes(shelf.get(theirs)) == b"child's" and bytes(shelf.get(place)) == b"parent's"


def test_data_waits_for_no_disk_and_is_durable_with_the_ledgers_commit(crashing_postgres: Server) -> None:
    url = crashing_postgres.database()
    # The server would flush by itself every 200 ms, which hides who did.
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET wal_writer_delay TO '10s'")
    crashing_postgres.restart()
    lost = 0
    try:
        for _ in range(6):
            with opened(url) as (ledger, shelf):
                [kept] = shelf.put([b"kept" * 1000])
                with ledger.write() as tx:
                    assert shelf.has(kept.segment)
                    tx.run("INSERT INTO orphans (segment, seen) VALUES (?, ?)", (kept.segment, tx.now))
                [alone] = shelf.put([b"alone"])
                with ledger.connection() as connection:
                    assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
                crashing_postgres.kill()
                crashing_postgres.restart()
                assert bytes(shelf.get(kept)) == b"kept" * 1000
                lost += not shelf.has(alone.segment)
    finally:
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("ALTER SYSTEM RESET wal_writer_delay")
        crashing_postgres.drop(url)
        crashing_postgres.restart()
    # What no commit followed was only in the server's memory: the put did not wait, and `has` tells the truth.
    assert lost > 0
