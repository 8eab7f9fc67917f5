"""A real HTTP reward server on loopback, which can be told to misbehave.

    with serve(lambda payload: {"rewards": [1.0 for _ in payload["queries"]]}, faults=[500, "close"]) as server:
        RemoteReward(server.url)(...)
        server.requests   # the JSON of each request, in the order they came

Faults are of the first requests, one each, in turn; `None` is none. A number is an HTTP status. `slow` answers only
after `delay` seconds, `count` leaves the last score out, `garbage` is no JSON, `html` a page, `list` a bare list,
`nan`, `text` and `null` spoil the first score, `ints` rounds them, `close` breaks off in the middle of a reply.
A dict from requests to faults (`faults={3: 500}`) or a function of (number, payload) says it more exactly.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]
Faults = Sequence[Any] | Mapping[int, Any] | Callable[[int, dict[str, Any]], Any]


def lengths(payload: dict[str, Any]) -> dict[str, Any]:
    """The scores of a server that was told nothing: how long each query is."""
    return {"rewards": [float(len(query)) for query in payload["queries"]]}


class Server:
    """A running server: `url`, what it was sent (`requests`, `headers`), and the most requests at once."""

    def __init__(self, answer: Answer, faults: Faults, delay: float) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_concurrent = 0
        self._now = 0
        self._answer = answer
        self._faults = faults
        self._delay = delay
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._inner = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._inner.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._inner.server_port}/score"
        threading.Thread(target=self._inner.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._leaving.set()
        self._inner.shutdown()
        self._inner.server_close()

    def _fault(self, number: int, payload: dict[str, Any]) -> Any:
        if callable(self._faults):
            return self._faults(number, payload)
        if isinstance(self._faults, Mapping):
            return self._faults.get(number)
        return self._faults[number] if number < len(self._faults) else None

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        payload = json.loads(request.rfile.read(int(request.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(payload)
            self.headers.append(dict(request.headers.items()))
            self._now += 1
            self.max_concurrent = max(self.max_concurrent, self._now)
        try:
            self._reply(request, payload, self._fault(number, payload))
        except OSError:
            request.close_connection = True  # the client left
        finally:
            with self._lock:
                self._now -= 1

    def _reply(self, request: BaseHTTPRequestHandler, payload: dict[str, Any], fault: Any) -> None:
        status, reply = 200, self._answer(payload)
        if fault == "slow":
            self._leaving.wait(self._delay)
        elif isinstance(fault, int):
            status, reply = fault, {"detail": f"told to give {fault}"}
        elif fault == "count":
            reply["rewards"].pop()
        elif fault in ("nan", "text", "null"):
            reply["rewards"][0] = {"nan": float("nan"), "text": "good", "null": None}[fault]
        elif fault == "ints":
            reply["rewards"] = [int(score) for score in reply["rewards"]]
        elif fault == "list":
            reply = reply["rewards"]
        body = json.dumps(reply).encode()
        if fault == "garbage":
            body = b"{rewards: 1"
        elif fault == "html":
            body = b"<html>Bad gateway</html>"
        request.send_response(status)
        request.send_header("content-length", str(len(body)))
        if status in (429, 503):
            request.send_header("retry-after", "0")
        request.end_headers()
        if fault == "close":
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
        else:
            request.wfile.write(body)


@contextlib.contextmanager
def serve(answer: Answer = lengths, faults: Faults = (), delay: float = 30.0) -> Iterator[Server]:
    """A server for the time of a `with`, on a port of its own."""
    server = Server(answer, faults, delay)
    try:
        yield server
    finally:
        server.close()


def nobody() -> str:
    """A URL where nobody answers: connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/score"
