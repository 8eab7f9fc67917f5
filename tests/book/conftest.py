"""Books for the tests: a fresh one of each kind, and one PostgreSQL server for the whole run, started on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.book.postgres import CARELESS, ENVIRONMENT, Server

DURABLE = ("folder", "postgresql")
KINDS = ("folder", "memory", "postgresql")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server: that of ROLLBOOK_TEST_POSTGRES, or one that is found or installed, started and stopped here."""
    with Server(os.environ.get(ENVIRONMENT), settings=CARELESS) as server:
        yield server


@pytest.fixture(scope="session")
def crashing_postgres() -> Iterator[Server]:
    """A server to kill and restart: beside `postgres`, whose other tests may have connections open."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def database(postgres: Server) -> Iterator[str]:
    """The URL of the database that tests share, one after another."""
    url = postgres.database()
    yield url
    postgres.drop(url)


@pytest.fixture
def postgres_url(postgres: Server, database: str) -> Iterator[str]:
    """The URL of an empty database, emptied after the test."""
    yield database
    postgres.empty(database)


def new_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "folder":
        return str(tmp_path / "book")
    if kind == "memory":
        return "memory:"
    url: str = request.getfixturevalue("postgres_url")  # only here, so that other tests start no server
    return url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What `rollbook.open` takes for a fresh book, once for each kind of book."""
    return new_url(request.param, request, tmp_path)


@pytest.fixture(params=DURABLE)
def durable_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As `url`, for the books that outlive their process."""
    return new_url(request.param, request, tmp_path)
