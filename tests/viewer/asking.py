"""A small HTTP client for the viewer's tests, that sends what it is told to, byte for byte."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple

from rollbook.inspect.server import Server

SECONDS = 60
"""Far above what anything here takes on a busy machine; what hangs takes longer."""


class Got(NamedTuple):
    """An answer. `headers`: names in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        values = [value for key, value in self.headers if key == name]
        assert len(values) == 1, f"{name}: {values}"
        return values[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def error(self) -> str:
        document = self.json
        assert list(document) == ["error"], document
        return str(document["error"])


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def connect(server: Server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    connection.settimeout(SECONDS)
    return connection


def send(server: Server, data: bytes) -> bytes:
    """What comes back for these bytes, until the server hangs up."""
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return receive(connection)


def receive(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


def parsed(data: bytes) -> Got:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    assert first.startswith("HTTP/1.1 "), first
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return Got(int(first.split()[1]), headers, body)


def ask(
    server: Server,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    *,
    body: Any = None,
    token: bool = True,
) -> Got:
    """An ordinary request, with the token unless told otherwise; `body` is posted as JSON."""
    sent = {"Host": f"127.0.0.1:{server.port}", "Connection": "close"}
    if token and server.token is not None:
        sent["Authorization"] = f"Bearer {server.token}"
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent |= {"Content-Type": "application/json", "X-Rollbook": "1", "Content-Length": str(len(data))}
    sent |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
    with connect(server) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + data)
        return parsed(receive(connection))


def post(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> Got:
    return ask(server, path, "POST", headers, body=body)
