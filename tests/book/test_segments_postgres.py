"""The store in PostgreSQL: the same bytes back, all or nothing, across rows, crashes, forks and broken connections."""

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

from rollbook.book.errors import BookError, CorruptBookError, MissingSegmentError, NewerLayoutError, NotABookError
from rollbook.book.ledger import prepare_tables
from rollbook.book.postgres import PostgresLedger, connect
from rollbook.book.segments import postgres
from rollbook.book.segments.files import FileSegmentStore, Place, SegmentStore, new_name
from rollbook.book.segments.postgres import PostgresSegmentStore
from tests.book.postgres import Server

SCHEMA = 'a "book"'  # a name that has to be quoted


def make(url: str) -> PostgresLedger:
    ledger = PostgresLedger(url, SCHEMA)
    ledger.make_schema()
    prepare_tables(ledger, create=True, address=url, meta={})
    return ledger


@contextmanager
def opened(url: str) -> Iterator[tuple[PostgresLedger, PostgresSegmentStore]]:
    ledger = make(url)
    store = PostgresSegmentStore(ledger)
    yield ledger, store
    store.close()
    ledger.close()


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresSegmentStore]:
    with opened(postgres_url) as (_, store):
        yield store


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows so short that every value takes several."""
    monkeypatch.setattr(postgres, "ROW_BYTES", 192)
    return 192


def run(url: str, statement: Any, *values: Any) -> list[Any]:
    with connect(url, SCHEMA) as connection:
        cursor = connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


def test_it_is_a_store_with_the_bytes_of_a_folders(
    store: PostgresSegmentStore, postgres_url: str, tmp_path: Path
) -> None:
    as_store: SegmentStore = store
    parts: list[Any] = [b"tokens" * 50, b"", b"media", memoryview(bytearray(range(64)))]
    places = as_store.put(parts)
    folder = FileSegmentStore(tmp_path)
    others = folder.put(parts)
    folder.close()
    assert [(p.offset, p.length) for p in places] == [(p.offset, p.length) for p in others]
    assert {p.segment for p in places} == set(store.segments()) and len(store.segments()) == 1
    [(data,)] = run(postgres_url, "SELECT data FROM blobs")
    assert bytes(data) == (tmp_path / "segments" / others[0].segment).read_bytes()
    assert [bytes(store.get(place)) for place in places] == [bytes(part) for part in parts]
    assert store.put([]) == [] and len(store.segments()) == 1


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(parts=st.lists(st.binary(max_size=700), min_size=1, max_size=5), data=st.data())
def test_any_parts_come_back_whatever_rows_they_fall_into(
    store: PostgresSegmentStore, small_rows: int, parts: list[bytes], data: st.DataObject
) -> None:
    places = store.put(parts)
    assert all(place.offset % 64 == 0 for place in places)
    assert [bytes(store.get(place)) for place in places] == parts
    size = store.segments()[places[0].segment]
    assert size == 64 + sum(len(part) + -len(part) % 64 for part in parts)
    start = data.draw(st.integers(64, size))
    stop = data.draw(st.integers(start, size))
    joined = b"".join(part + bytes(-len(part) % 64) for part in parts)
    assert bytes(store.get(Place(places[0].segment, start, stop - start))) == joined[start - 64 : stop - 64]
    middle = Place(places[0].segment, start, min(stop - start, small_rows))
    read = store.get_many([middle, *(place for place in places if place.length <= small_rows)])
    short = [part for part in parts if len(part) <= small_rows]
    assert [bytes(piece) for piece in read] == [joined[start - 64 : middle.stop - 64], *short]


def test_a_value_larger_than_a_row(store: PostgresSegmentStore, postgres_url: str) -> None:
    data = os.urandom(1 << 20) * 19
    first, large, last = store.put([b"first", data, b"last"])
    assert store.get(large) == data
    assert (bytes(store.get(first)), bytes(store.get(last))) == (b"first", b"last")
    assert run(postgres_url, "SELECT count(*), max(octet_length(data)) FROM blobs") == [(3, 8 << 20)]
    # Stored as it is: compressed, a part in the middle could not be read without all that is before it.
    rows = run(postgres_url, "SELECT sum(pg_column_size(data)) = sum(octet_length(data)) FROM blobs")
    assert rows == [(True,)]


def test_views_are_private(store: PostgresSegmentStore) -> None:
    [place] = store.put([b"tokens"])
    view = store.get(place)
    view[0] = 0
    assert bytes(store.get(place)) == b"tokens"


def test_segments_are_complete_at_once_and_in_order_of_time(store: PostgresSegmentStore) -> None:
    names = [store.put([b"x" * n])[0].segment for n in range(1, 9)]
    assert list(store.segments()) == names
    store.seal()
    assert not any(store.busy(name) for name in names) and all(store.has(name) for name in names)


def test_remove_takes_every_row_of_one_segment(store: PostgresSegmentStore, small_rows: int, postgres_url: str) -> None:
    # 128 bytes and the header fill one row exactly: there is no shorter one to end with.
    remaining, full, several = (store.put([b"x" * size])[0] for size in (500, 128, 1000))
    for place in (several, full):
        store.remove(place.segment)
        assert not store.has(place.segment)
        with pytest.raises(MissingSegmentError, match=place.segment):
            store.get(place)
        store.remove(place.segment)
    assert bytes(store.get(remaining)) == b"x" * 500
    assert run(postgres_url, "SELECT count(*) FROM blobs WHERE segment NOT LIKE %s", remaining.segment + "%") == [(0,)]


def test_a_failed_put_leaves_no_row(store: PostgresSegmentStore, small_rows: int, postgres_url: str) -> None:
    run(postgres_url, "ALTER TABLE blobs ADD CHECK (segment NOT LIKE '%%/2')")
    with pytest.raises(BookError, match="violates check constraint"):
        store.put([b"x" * 1000])
    assert store.segments() == {} and run(postgres_url, "SELECT count(*) FROM blobs") == [(0,)]
    [place] = store.put([b"y" * 200])
    assert bytes(store.get(place)) == b"y" * 200


@pytest.mark.parametrize("length", [65, 10_000, 2**62, 2**70])
def test_a_length_that_is_not_there_is_refused_before_memory_is_taken(store: PostgresSegmentStore, length: int) -> None:
    [place] = store.put([b"x" * 64])
    for read in (store.get, lambda place: store.get_many([place])):
        with pytest.raises(CorruptBookError, match="the segment has 128"):
            read(Place(place.segment, 64, length))


NAMES = {"empty": "", "folder": "../x", "quoted": "x' OR true --", "continued": new_name() + "/1", "null": "\0"}


@pytest.mark.parametrize("segment", NAMES.values(), ids=NAMES)
def test_names_that_are_none_are_refused(store: PostgresSegmentStore, segment: str) -> None:
    for act in (store.has, store.busy, store.remove, lambda name: store.get(Place(name, 64, 1))):
        with pytest.raises(CorruptBookError, match="is not a segment's name"):
            act(segment)


def test_damaged_rows_are_refused(store: PostgresSegmentStore, small_rows: int, postgres_url: str) -> None:
    [place] = store.put([b"x" * 1000])
    shortened = Place(place.segment, place.offset, 600)
    run(postgres_url, "UPDATE blobs SET data = substring(data FROM 1 FOR 100) WHERE segment LIKE '%%/2'")
    with pytest.raises(CorruptBookError, match="reaches to byte 664"):
        store.get(shortened)
    run(postgres_url, "DELETE FROM blobs WHERE segment LIKE '%%/2'")
    with pytest.raises(CorruptBookError, match="reaches to byte 664"):
        store.get(shortened)
    assert bytes(store.get(Place(place.segment, 64, 300))) == b"x" * 300
    run(postgres_url, "UPDATE blobs SET data = set_byte(data, 8, 9) WHERE segment = %s", place.segment)
    with pytest.raises(NewerLayoutError):
        store.get(shortened)
    run(postgres_url, "UPDATE blobs SET data = set_byte(data, 0, 9) WHERE segment = %s", place.segment)
    with pytest.raises(CorruptBookError, match="magic"):
        store.get(shortened)


def test_without_tables_there_is_no_book(postgres_url: str) -> None:
    store = PostgresSegmentStore(PostgresLedger(postgres_url, SCHEMA))
    with pytest.raises(NotABookError, match="blobs"):
        store.put([b"x"])
    store.close()


def test_a_closed_store_refuses(store: PostgresSegmentStore) -> None:
    [place] = store.put([b"x"])
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.get(place)
    with pytest.raises(ValueError, match="closed"):
        store.put([b"x"])


def test_a_broken_connection_is_made_again(store: PostgresSegmentStore, postgres_url: str) -> None:
    [place] = store.put([b"before"])
    terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    for act in (lambda: store.get(place), lambda: store.put([b"after"]), lambda: store.has(place.segment)):
        assert (True,) in run(postgres_url, terminate + " AND pid <> pg_backend_pid()")
        assert act()
    assert len(store.segments()) == 2


def test_threads_take_turns(store: PostgresSegmentStore) -> None:
    wrong = []

    def work(number: int) -> None:
        for n in range(10):
            data = bytes([number, n]) * 500
            [place] = store.put([data])
            if bytes(store.get(place)) != data:
                wrong.append((number, n))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(store.segments()) == 40


def in_child(store: PostgresSegmentStore, place: Place, answers: Any) -> None:
    answers.put((bytes(store.get(place)), store.put([b"child's"])[0]))
    store.close()


def test_a_forked_child_has_a_connection_of_its_own(store: PostgresSegmentStore) -> None:
    [place] = store.put([b"parent's"])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with store.ledger.connection():  # as if another thread were at work when the child is made
        child = context.Process(target=in_child, args=(store, place, answers))
        child.start()
    seen, child_place = answers.get(timeout=60)
    child.join(60)
    assert (seen, child.exitcode) == (b"parent's", 0)
    assert bytes(store.get(child_place)) == b"child's" and bytes(store.get(place)) == b"parent's"


def test_data_waits_for_no_disk_and_is_durable_with_the_ledgers_commit(crashing_postgres: Server) -> None:
    url = crashing_postgres.database()
    # The server would flush by itself every 200 ms, which hides who did.
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET wal_writer_delay TO '10s'")
    crashing_postgres.restart()
    lost = False
    try:
        for _ in range(6):
            with opened(url) as (ledger, store):
                [stored] = store.put([b"kept" * 1000])
                with ledger.write() as tx:
                    assert store.has(stored.segment)
                    tx.run("INSERT INTO orphans (segment, seen) VALUES (?, ?)", (stored.segment, tx.now))
                [alone] = store.put([b"alone"])
                with ledger.connection() as connection:
                    assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
                crashing_postgres.kill()
                crashing_postgres.restart()
                assert bytes(store.get(stored)) == b"kept" * 1000
                lost = not store.has(alone.segment)
            if lost:  # seldom not at once
                break
    finally:
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("ALTER SYSTEM RESET wal_writer_delay")
        crashing_postgres.drop(url)
        crashing_postgres.restart()
    # What no commit followed was only in the server's memory: the put did not wait, and `has` tells the truth.
    assert lost
