"""Connections to PostgreSQL that break or hang, and writers that pause while they hold the ledger."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

import rollbook
from rollbook.book import LockTimeoutError, OutcomeUnknownError, disk, postgres, trained_steps
from tests.book.records import check, records

# --- a commit without an answer -------------------------------------------------------------------------------------


class Proxy:
    """A loopback TCP proxy to a server, which cuts the connection of the next commit if a test says so."""

    def __init__(self, url: str) -> None:
        with psycopg.connect(url) as connection:
            host, port = connection.info.host, connection.info.port
        self.server = (host, port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        parts = urlsplit(url)
        self.url = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{self.listener.getsockname()[1]}", query=""))
        self.cut_at = ""
        """What to cut at the next commit: its "request", its "answer", or (with what follows) "everything"."""
        self._armed = False
        self.cuts = 0
        disk.watch_failpoints(self._reach)
        threading.Thread(target=self._serve, daemon=True).start()

    def _reach(self, name: str) -> None:
        self._armed = self._armed or (name == "before commit" and bool(self.cut_at))

    def _serve(self) -> None:
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            if self.cut_at == "everything" and self.cuts:
                client.close()
                continue
            if self.server[0].startswith("/"):
                upstream = socket.socket(socket.AF_UNIX)
                upstream.connect(f"{self.server[0]}/.s.PGSQL.{self.server[1]}")
            else:
                upstream = socket.create_connection(self.server)
            for source, target in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(source, target, source is client), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_request and self._armed:
                    self._armed = False
                    self.cuts += 1
                    cut_now, self.cut_at = self.cut_at, "everything" if self.cut_at == "everything" else ""
                    if cut_now != "request":
                        source.shutdown(socket.SHUT_RDWR)
                        target.sendall(data)
                        time.sleep(0.1)  # The server commits meanwhile.
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        disk.watch_failpoints(None)
        self.listener.close()


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    proxy = Proxy(postgres_url)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("side", ["request", "answer"])
def test_calls_take_effect_once_when_a_commit_gets_no_answer(proxy: Proxy, postgres_url: str, side: str) -> None:
    with rollbook.open(postgres_url) as direct, rollbook.open(proxy.url) as book:

        def struck(act: Callable[[], object]) -> object:
            proxy.cut_at = side
            result = act()
            assert proxy.cut_at == "", "the commit was not cut"
            return result

        rows = records(4)
        assert struck(lambda: book.append(rows).admitted) == 4
        lease = struck(lambda: book.lease(2))
        assert isinstance(lease, rollbook.book.Lease) and len(lease) == 2
        assert direct.counts().leased == 2, "leased twice"
        struck(lease.renew)
        assert struck(lambda: lease.ack(step=1, uids=lease.uids[:1])) == 1
        assert struck(lambda: lease.ack(step=1)) == 1
        assert trained_steps(direct) == {uid: [1] for uid in lease.uids}
        lease = book.lease(2)
        assert struck(lease.nack) == 2 and direct.counts().waiting == 2
        assert struck(lambda: book.checkpoint("saved")) == "saved"
        assert struck(lambda: book.checkpoint(keep=1)) == direct.checkpoints()[0].name
        late = [record.replace(reward=1.0) for record in rows]
        struck(lambda: book.append([*late, *records(1, 4)], author="judge"))
        assert len(direct) == 5 and direct[rows[0].eid].reward == 1.0
        assert [event.kind for event in direct.history(rows[0].eid)].count("revised") == 1
        check(direct)
        assert direct.check().ok


def test_an_outcome_that_cannot_be_found_out_is_said_to_be_unknown(
    proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RECONNECT_SECONDS", 0.1)
    with rollbook.open(postgres_url) as direct, rollbook.open(proxy.url) as book:

        def unknown_then_repeated(act: Callable[[], object]) -> object:
            proxy.cut_at, proxy.cuts = "everything", 0
            with pytest.raises(OutcomeUnknownError, match=r"outcome is unknown; repeat the same call.*no connection"):
                act()
            proxy.cut_at = ""
            return act()

        rows = records(2)
        assert unknown_then_repeated(lambda: len(book) if book.append(rows) else 0) == 2
        lease = book.lease(2)
        assert unknown_then_repeated(lambda: lease.ack(step=3)) == 2
        assert unknown_then_repeated(lambda: book.checkpoint("saved")) == "saved"
        assert trained_steps(direct) == {uid: [3] for uid in lease.uids} and len(direct.checkpoints()) == 1


# --- a writer that pauses while it holds the ledger -----------------------------------------------------------------


@pytest.fixture
def paused(durable_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that is stopped in the middle of a checkpoint; it exits with 0 if that succeeds at last."""
    monkeypatch.setattr(postgres, "IDLE_SECONDS", 1.0)
    rollbook.open(durable_url).close()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with rollbook.open(durable_url) as book:
                stops = iter([signal.SIGSTOP])
                disk.watch_failpoints(
                    lambda name: os.kill(os.getpid(), next(stops, 0)) if name == "before commit" else None
                )
                status = int(book.checkpoint("saved") != "saved")
        finally:
            os._exit(status)
    os.waitpid(pid, os.WUNTRACED)
    yield pid
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_timeouts_include_the_wait_for_a_paused_writer(paused: int, durable_url: str) -> None:
    with rollbook.open(durable_url) as book:
        lease = book.lease(1, timeout=0.1)
        name = "process" if book.ledger.dialect == "sqlite" else "session"
        assert not lease and f"got 0: {durable_url.split('?')[0]}" in lease.short
        assert "other writers held the ledger for 0." in lease.short and f"{name} " in lease.short
        assert str(paused) in lease.short
        with pytest.raises(LockTimeoutError, match=f"other writers held the ledger for 0.*{paused}") as caught:
            book.append(records(1), timeout=0.1)
        assert isinstance(caught.value, TimeoutError) and len(book) == 0
        if book.ledger.dialect == "postgresql":
            assert book.append(records(1)).admitted == 1, "the server ends the session of the paused writer"
        os.kill(paused, signal.SIGCONT)
        assert os.waitpid(paused, 0)[1] == 0, "its checkpoint was not retried"
        assert [point.name for point in book.checkpoints()] == ["saved"]
