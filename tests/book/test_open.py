"""Opening: addresses and modes, what is refused, and layouts of other versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

import rollbook
from rollbook.book import (
    AppendResult,
    BookError,
    ConnectionLostError,
    Last,
    NewerLayoutError,
    NotABookError,
    ReadOnlyError,
    disk,
    ledger,
    postgres,
    redact_records,
    snapshot,
)
from rollbook.book.book import LEDGER
from rollbook.book.disk import Disk
from rollbook.book.postgres import connect
from rollbook.book.recovery import repair
from rollbook.cli.parser import main
from rollbook.core.addresses import redacted
from rollbook.inspect.sources import BookSource
from tests.book.forgetful import open_on
from tests.book.postgres import Server
from tests.book.records import check, numbers, records, take
from tests.strategies import exact_rows


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# --- modes ----------------------------------------------------------------------------------------------------------


def test_modes(durable_url: str) -> None:
    for mode in ("r", "r+"):
        with pytest.raises(NotABookError, match="there is no book here"):
            rollbook.open(durable_url, mode=mode)
    with pytest.raises(ValueError, match="mode: got 'w'"):
        rollbook.open(durable_url, mode="w")
    with rollbook.open(durable_url) as book:
        book.append(records(2))
    with rollbook.open(durable_url, mode="r+") as book:
        assert book.append(records(3)) == AppendResult(admitted=1, existing=2)
    with rollbook.open(durable_url, mode="r") as book:
        assert numbers(book.where()) == [0, 1, 2]
        assert book.counts().waiting == 3 and book.consumer().lease_seconds == 300.0
        writes: list[Any] = [
            lambda: book.append(records(1, start=9)),
            lambda: book.lease(1),
            lambda: book.writer(),
            lambda: book.announce(1),
            lambda: book.revise("//0/0/0000", reward=1.0, author="ana"),
            lambda: redact_records(book, "//0/0/0000", ["info"], author="ana"),
            lambda: book.delete("//0/0/0000", author="ana"),
            lambda: book.drop("//0/0/0000"),
            lambda: book.fail(records(1)[0].eid),
            lambda: book.compact(),
            lambda: book.consumer("new", create=True),
            lambda: book.consumer(sampler=Last(), change=True),
        ]
        for write in writes:
            with pytest.raises(ReadOnlyError, match="opened for reading"):
                write()
    with pytest.raises(ReadOnlyError, match="settings"):
        rollbook.open(durable_url, mode="r", lease_seconds=3.0)
    with rollbook.open(durable_url) as book:
        assert len(book) == 3
        check(book)


def test_refusing_makes_nothing(tmp_path: Path) -> None:
    for mode in ("r", "r+"):
        with pytest.raises(NotABookError):
            rollbook.open(tmp_path / "book", mode=mode)
    with pytest.raises(ValueError, match="sampler"):
        rollbook.open(tmp_path / "other", sampler="uniform")
    assert not (tmp_path / "book").exists()


def test_reading_beside_a_writer(durable_url: str) -> None:
    with rollbook.open(durable_url) as book, rollbook.open(durable_url, mode="r") as reader:
        book.append(records(2))
        assert numbers(reader.where()) == [0, 1]
        take(book, 1)
        assert reader.counts().trained == 1


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["", "s3://bucket/book", "memry:", "sqlite:///x", "mysql://host/db", 3, None, b"folder"]
)
def test_addresses_that_are_none(bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="url: got .*, expected a folder, 'memory:' or 'postgresql://"):
        rollbook.open(bad)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "runs" / "a b" / "ünï") as book:
        book.append(records(1))
    assert (tmp_path / "runs" / "a b" / "ünï" / LEDGER).exists()
    with rollbook.open(str(tmp_path / "runs" / "a b" / "ünï"), mode="r") as book:
        assert len(book) == 1


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with rollbook.open("runs/demo") as book:
        monkeypatch.chdir("/")
        book.append(records(1))
        assert numbers(book.where()) == [0]
    assert (tmp_path / "runs" / "demo" / LEDGER).exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotABookError, match="got a file, expected a folder"):
        rollbook.open(tmp_path / "file")
    with pytest.raises((NotABookError, OSError)):
        rollbook.open(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(BookError, match="damaged"):
        rollbook.open(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "ledger.sqlite").symlink_to(tmp_path / "target")
    with pytest.raises(NotABookError, match="a link"):
        rollbook.open(tmp_path)


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    table = f"25 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 25 0:40 / {tmp_path} rw shared:1 - nfs4 host:/runs rw,vers=4.2\n"

    class Mounted(Disk):
        def network_file_system(self, path: str) -> str | None:
            return disk.network_mount(os.path.realpath(path), table)

    with pytest.raises(BookError, match=r"is on nfs4, where locks and syncs cannot be trusted.*postgresql://"):
        open_on(Mounted(), tmp_path / "book")
    assert not (tmp_path / "book" / LEDGER).exists()


def test_memory_is_always_new() -> None:
    with rollbook.open("memory:") as first, rollbook.open("memory:") as second:
        first.append(records(1))
        assert len(second) == 0
    for mode in ("r", "r+"):
        with pytest.raises(NotABookError, match="a book in memory is always new"):
            rollbook.open("memory:", mode=mode)
    with pytest.raises(ValueError, match="data: .* only a book in PostgreSQL"):
        rollbook.open("memory:", data="somewhere")


def test_options_are_checked() -> None:
    for options in ({"quota": 0}, {"quota": 1.5}, {"segment_bytes": 0}, {"lease_secnds": 3}, {"max_staleness": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            rollbook.open("memory:", **options)


def test_a_closed_book_says_so(url: str) -> None:
    book = rollbook.open(url)
    book.close()
    book.close()
    for call in (lambda: len(book), lambda: book.lease(1), lambda: book.counts()):
        with pytest.raises(BookError, match="closed"):
            call()


# --- layouts --------------------------------------------------------------------------------------------------------


def set_layout(url: str, layout: str) -> None:
    with rollbook.open(url) as book, book.ledger.write() as tx:
        tx.run("UPDATE meta SET value = ? WHERE key = 'layout'", (layout,))


def test_a_newer_layout_is_refused(durable_url: str) -> None:
    set_layout(durable_url, str(ledger.LAYOUT + 1))
    for mode in ("a", "r+", "r"):
        with pytest.raises(
            NewerLayoutError, match=f"has layout {ledger.LAYOUT + 1}, this version knows up to {ledger.LAYOUT}"
        ):
            rollbook.open(durable_url, mode=mode)


def test_an_older_layout_without_a_migration_is_refused(durable_url: str) -> None:
    set_layout(durable_url, "4")
    for mode in ("a", "r+", "r"):
        with pytest.raises(NotABookError, match=f"has layout 4, written by an older version of .* {ledger.LAYOUT}$"):
            rollbook.open(durable_url, mode=mode)


def test_a_layout_that_is_no_number_is_refused(durable_url: str) -> None:
    set_layout(durable_url, "one")
    with pytest.raises(NotABookError, match="got layout 'one', expected a number"):
        rollbook.open(durable_url)


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_book_refuses_another_tokenizer(durable_url: str) -> None:
    with rollbook.open(durable_url, tokenizer="first") as book:
        book.append(records(1))
    with pytest.raises(BookError, match="tokenizer: got 'second', the book's records were made with 'first'"):
        rollbook.open(durable_url, tokenizer="second")
    with rollbook.open(durable_url) as book, rollbook.open(durable_url, tokenizer="first") as other:
        assert book.append(records(2)).admitted == 1 and other.append(records(3)).admitted == 1


def test_the_first_record_decides_whose_book_it_is(durable_url: str) -> None:
    with (
        rollbook.open(durable_url, tokenizer="first") as first,
        rollbook.open(durable_url, tokenizer="second") as second,
    ):
        first.append(records(1))
        with pytest.raises(BookError, match="tokenizer: got 'second'"):
            second.append(records(1, start=1))
        assert len(second) == 1


def test_what_has_no_fingerprint_is_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        rollbook.open("memory:", tokenizer=object())


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


def test_two_books_in_one_database(postgres_url: str) -> None:
    sign = "&" if "?" in postgres_url else "?"
    with (
        rollbook.open(f"{postgres_url}{sign}schema=one") as first,
        rollbook.open(f"{postgres_url}{sign}schema=two") as second,
    ):
        first.append(records(2))
        second.append(records(1, start=5))
        assert (numbers(first.lease(9)), numbers(second.lease(9))) == ([0, 1], [5])
    with pytest.raises(ValueError, match="schema: got 'a b'"):
        rollbook.open(f"{postgres_url}{sign}schema=a b")
    with pytest.raises(NotABookError):
        rollbook.open(f"{postgres_url}{sign}schema=three", mode="r+")


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_data_beside_the_database(postgres_url: str, tmp_path: Path, kind: str) -> None:
    data = str(tmp_path / "data") if kind == "folder" else f"memory://{tmp_path.name}/data"
    rows = records(3)
    with rollbook.open(postgres_url, data=data) as book:
        book.append(rows[:2])
        book.append(rows[2])
        with book.ledger.read() as tx:
            assert tx.all("SELECT 1 FROM blobs") == []
    with pytest.raises(BookError, match=r"its data lies in .*; got data=None, expected data="):
        rollbook.open(postgres_url)
    with pytest.raises(BookError, match="its data lies in"):
        rollbook.open(postgres_url, data=str(tmp_path / "elsewhere"))
    with rollbook.open(postgres_url, data=data) as book:
        assert exact_rows(book.where()) == exact_rows(rows)
        assert numbers(take(book, 9)) == [0, 1, 2]
        book.delete(rows[0], author="ana")
        book.compact()
        assert numbers(book.where()) == [1, 2]
        check(book)
    with rollbook.open(postgres_url, mode="r", data=data) as book:
        assert book.sql("select len(tokens) from experiences where removed_reason is null").rows() == [(5,), (5,)]


def test_a_user_without_rights_is_told_so(postgres_url: str) -> None:
    """Its tables seem to be missing; a rollout worker would wait for its trainer forever."""
    import psycopg

    rollbook.open(postgres_url).close()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS bob")
        connection.execute("CREATE ROLE bob LOGIN")
        try:
            sign = "&" if "?" in postgres_url else "?"
            other = f"{postgres_url}{sign}user=bob"
            for mode in ("r", "r+", "a"):
                with pytest.raises(BookError, match="user 'bob' has no rights on the schema 'rollbook'") as caught:
                    rollbook.open(other, mode=mode)
                assert type(caught.value) is BookError
        finally:
            connection.execute("DROP ROLE bob")


def test_opening_waits_for_a_server_that_starts(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    attempts = []

    def refuse(*arguments: Any) -> Any:
        attempts.append(arguments)
        if len(attempts) < 3:
            raise ConnectionLostError("no connection to PostgreSQL: FATAL: the database system is starting up")
        return connect(*arguments)

    monkeypatch.setattr(postgres, "connect", refuse)
    with rollbook.open(postgres_url):
        assert len(attempts) == 3


def test_data_of_a_book_that_has_none_outside(postgres_url: str, tmp_path: Path) -> None:
    with rollbook.open(postgres_url):
        pass
    with pytest.raises(BookError, match="its data lies in the database; got data="):
        rollbook.open(postgres_url, data=str(tmp_path / "data"))


HIDDEN = ("hunter2", "hunter", "unter2")
"""A password, and what is left of it when it is cut at a character that means something in a URL."""


def everything(error: BaseException) -> str:
    """All that an error, and those that it came from, say."""
    text, seen = "", error
    while seen is not None:
        text += f"{seen!r} {seen} "
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)  # type: ignore[assignment]
    return text


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://ana:hunter2@127.0.0.1:1/runs?connect_timeout=2",
        "postgresql://ana@127.0.0.1:1/runs?password=hunter2&connect_timeout=2",
        "postgresql://ana@127.0.0.1:1/runs?sslpassword=hunter2&connect_timeout=2",
        "postgresql://ana:h%40hunter2@127.0.0.1:1,127.0.0.1:2/runs?connect_timeout=2",
        "postgresql://ana:#hunter2?@127.0.0.1:1/runs?connect_timeout=2",
        "postgresql://ana:h@hunter2@127.0.0.1:1/runs",
        "postgresql://ana:h/hunter2@127.0.0.1:1/runs",
        "postgresql://ana:1/hunter2@127.0.0.1:1/runs",
        "postgresql://ana:hunter2%ZZ@127.0.0.1:1/runs",
        "postgresql://ana:hunter2",
        "postgresql:/ana:hunter2@127.0.0.1/runs",
        "postgresql+psycopg://ana:hunter2@127.0.0.1/runs",
        "host=127.0.0.1 port=1 user=ana password=hunter2",
        "host=127.0.0.1 password='hunter2",
    ],
)
def test_no_error_shows_a_password(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((BookError, ValueError)) as caught:
        rollbook.open(address)
    assert not any(part in everything(caught.value) for part in HIDDEN)
    assert not any(part in redacted(address) for part in HIDDEN)
    commands = (["ls"], ["show"], ["check"], ["check", "--repair"], ["replay", "--step", "1"], ["eval"])
    for command in ([*words, address] for words in commands):
        assert main(command) == 2
    printed = capsys.readouterr()
    assert not any(part in printed.out + printed.err for part in HIDDEN)


def test_an_open_book_does_not_show_its_password(postgres_url: str, tmp_path: Path) -> None:
    parts = urlsplit(postgres_url)
    user, _, host = parts.netloc.rpartition("@")
    secret = urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:hunter2@{host}"))
    secret += ("&" if parts.query else "?") + "schema=demo"
    with rollbook.open(secret) as book:
        book.append(records(1))
        shown = [repr(book), book.url, repr(book.where()), str(book.check().as_dict()), BookSource(book).name]
        assert not any(part in text for part in HIDDEN for text in shown) and ":***@" in book.url
        with pytest.raises(BookError) as caught:
            rollbook.open(secret, data=str(tmp_path))
        assert "hunter2" not in everything(caught.value)
        with pytest.raises(ValueError, match=r"data: 's3://\*\*\*@bucket' contains a secret.*storage_options"):
            rollbook.open(secret, data="s3://key:hunter2@bucket")
        with snapshot(book, secret.replace("schema=demo", "schema=copy")) as other:
            assert other.counts().admitted == 1 and ":***@" in other.url
    assert repair(secret).ok and "hunter2" not in repair(secret).url


def test_a_server_that_is_not_there_is_named_without_the_password(postgres: Server) -> None:
    with pytest.raises(BookError, match="no connection to PostgreSQL") as caught:
        rollbook.open("postgresql://ana:secret@127.0.0.1:1/nowhere?connect_timeout=2")
    assert "secret" not in str(caught.value) and "ana" in str(caught.value)
    with pytest.raises(ValueError, match="url: .*'postgresql://ana.*shema"):
        rollbook.open("postgresql://ana@127.0.0.1:1/nowhere?shema=run7")
