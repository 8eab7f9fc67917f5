"""A book keeps the vocabulary of the tokenizer it was first written with, whatever kind of book it is."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook import Experience
from rollbook.book import append, fork, read_vocabulary, snapshot
from rollbook.book.check import check
from rollbook.book.errors import CorruptBookError
from rollbook.core.vocabulary import Vocabulary
from tests.tiny import bytes_, words


def record(number: int = 0) -> Experience:
    return Experience(eid={"batch": 1, "task": number}, tokens=[1, 20 + number, 30], prompt_length=1)


def test_it_is_there_after_the_first_append_and_not_before(url: str) -> None:
    with rollbook.open(url, tokenizer=bytes_()) as book:
        assert read_vocabulary(book) is None
        book.append(record())
        assert read_vocabulary(book) == Vocabulary.from_tokenizer(bytes_())
        assert book.state.pending_tokenizer is None, "the tokenizer is let go of"


def test_a_fingerprint_keeps_none(url: str) -> None:
    with rollbook.open(url, tokenizer="some fingerprint") as book:
        book.append(record())
        assert read_vocabulary(book) is None


def test_without_a_tokenizer_there_is_none(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(record())
        assert read_vocabulary(book) is None


def test_it_outlives_its_writer_and_is_built_once(durable_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = Vocabulary.from_tokenizer
    monkeypatch.setattr(Vocabulary, "from_tokenizer", lambda tokenizer: built.append(1) or build(tokenizer))
    for number in range(3):
        with rollbook.open(durable_url, tokenizer=words()) as book:
            book.append(record(number))
            book.append(record(number + 10))
    with rollbook.open(durable_url, "r") as book:
        assert read_vocabulary(book) == build(words())
        assert check(book).ok
    assert len(built) == 1


def test_a_book_that_had_only_a_fingerprint_gets_it_later(durable_url: str) -> None:
    from rollbook.core.vocabulary import tokenizer_fingerprint

    with rollbook.open(durable_url, tokenizer=tokenizer_fingerprint(words())) as book:
        book.append(record())
    with rollbook.open(durable_url, tokenizer=words()) as book:
        assert read_vocabulary(book) is None
        book.append(record(1))
        assert read_vocabulary(book) is not None


def test_copies_have_it(url: str, tmp_path: Path) -> None:
    with rollbook.open(url, tokenizer=words()) as book:
        book.append(record())
        saved = book.checkpoint()
        with snapshot(book, tmp_path / "copy") as copy, fork(book, saved, "memory:") as twin:
            assert read_vocabulary(copy) == read_vocabulary(twin) == Vocabulary.from_tokenizer(words())


def test_damage_is_one_error(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book", tokenizer=words()) as book:
        book.append(record())
    for value in ("", "AAAA", "not base64!", b"\xff\xfe", 7, "UkJWMQAAAAA="):
        with sqlite3.connect(tmp_path / "book" / "ledger.sqlite") as connection:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'vocabulary'", (value,))
        connection.close()
        with (
            rollbook.open(tmp_path / "book", "r") as book,
            pytest.raises(CorruptBookError, match="the vocabulary in its ledger"),
        ):
            _ = read_vocabulary(book)


class Odd:
    """A tokenizer that has ids no vocabulary can have."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": -1}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_a_tokenizer_without_a_usable_vocabulary_does_not_stop_an_append() -> None:
    with rollbook.open("memory:", tokenizer=Odd()) as book:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert book.append(record()).admitted == 1
            assert book.append(record(1)).admitted == 1
        assert [str(warning.message) for warning in caught if "its vocabulary is not stored" in str(warning.message)]
        assert read_vocabulary(book) is None
        assert append.read_vocabulary(book) is None
