"""The viewer's own server: HTTP/1.1 out of the standard library, for one user and a few tabs.

Invariant: it listens where it says and nowhere else; a request is bounded in bytes and time, connections in number;
who may not ask is answered before a body is read. `close` ends every thread, stream and file that `start` began.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import io
import ipaddress
import os
import re
import select
import shutil
import signal
import socket as sockets
import socketserver
import stat
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from html import escape
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl

from rollbook.viewer.api import MAX_BODY, Api, Request, Response, failure, open_api
from rollbook.viewer.guard import Guard, authorities, checked_token, new_token

PORT = 8420
_CONNECTIONS = 96
_LINE = 32 << 10
_HEADERS = 32 << 10
_REQUEST_SECONDS = 30.0
"""From the moment a connection waits for a request until all of it is there: idle connections end after it too."""
_SEND_SECONDS = 30.0
_PIECE = 256 << 10
_FIRST = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])\r?\n")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*\r?\n")


class _Refused(Exception):
    """A request that is no HTTP, or too much of it: answered, and the connection ends."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def parse_target(target: str) -> tuple[str, list[tuple[str, str]]]:
    """A path, taken as it stands (nothing here has a name that needs escapes), and its parameters in order.

    >>> parse_target("/api/frame?uid=a%2F0&uid=b&x=")
    ('/api/frame', [('uid', 'a/0'), ('uid', 'b'), ('x', '')])
    """
    path, _, query = target.partition("?")
    return path, parse_qsl(query, keep_blank_values=True, max_num_fields=256, errors="strict")


class _Timed(io.RawIOBase):
    """A socket's bytes, until a time: a client that sends one byte now and then gets no longer than others."""

    def __init__(self, connection: sockets.socket) -> None:
        self.connection = connection
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(socketserver.BaseRequestHandler):
    """One connection: requests one after the other."""

    server: _Listener

    def handle(self) -> None:
        connection: sockets.socket = self.request
        if connection.family != getattr(sockets, "AF_UNIX", None):
            # With Nagle's algorithm a small answer waits 40 ms for the other side's acknowledgement.
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        raw = _Timed(connection)
        reader = cast(BinaryIO, io.BufferedReader(raw))
        with contextlib.suppress(OSError):
            while not self.server.api.closing.is_set():
                raw.until = time.monotonic() + _REQUEST_SECONDS
                try:
                    keep = self._one(reader)
                except _Refused as refused:
                    self._send(failure(refused.status, str(refused)), close=True)
                    keep = False
                if not keep:
                    self._linger()
                    return

    def _one(self, reader: BinaryIO) -> bool:
        """Answer one request; whether another may follow."""
        try:
            head = self._head(reader)
            if head is None:
                return False
            request, persistent, length = head
            refusal = self.server.api.refuse(request)
            if refusal is not None:
                self._send(refusal, close=not persistent or length > 0)
                return persistent and not length
            if length > MAX_BODY:
                raise _Refused(413, f"the request has {length} bytes, expected at most {MAX_BODY}")
            if length and "100-continue" in (value.lower() for value in request.all("expect")):
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.body = reader.read(length)
            if len(request.body) != length:
                return False
        except TimeoutError:
            raise _Refused(408, "the request took too long to arrive") from None
        answer = self.server.api.handle(request)
        streams = not isinstance(answer.body, bytes)
        self._send(answer, close=streams or not persistent, head_only=request.method == "HEAD")
        return persistent and not streams

    def _head(self, reader: BinaryIO) -> tuple[Request, bool, int] | None:
        """The request but for its body, whether the connection stays open, and the body's length."""
        try:
            line = reader.readline(_LINE + 1)
        except TimeoutError:
            return None  # nobody asked
        if not line:
            return None
        if len(line) > _LINE:
            raise _Refused(414, f"the request line is longer than {_LINE} bytes")
        found = _FIRST.fullmatch(line)
        if found is None:
            raise _Refused(400, "this is no request line of HTTP/1.1 with a path")
        try:
            path, query = parse_target(found[2].decode("ascii"))
        except ValueError:
            raise _Refused(400, "the address has parameters that are not UTF-8, or too many of them") from None
        headers: list[tuple[str, str]] = []
        size = 0
        while True:
            line = reader.readline(_HEADERS + 1)
            size += len(line)
            if size > _HEADERS:
                raise _Refused(431, f"the headers are longer than {_HEADERS} bytes")
            if line in (b"\r\n", b"\n"):
                break
            if not line:
                return None
            field = _FIELD.fullmatch(line)
            if field is None:
                raise _Refused(400, "a header line is not 'name: value'")
            headers.append((field[1].decode("ascii").lower(), field[2].decode("latin-1")))
        client = self.client_address[0] if isinstance(self.client_address, tuple) else "unix"
        request = Request(found[1].decode(), path, query, headers, peer=client, local=self._local())
        if request.all("transfer-encoding"):
            raise _Refused(501, "a body is expected with its Content-Length")
        lengths = request.all("content-length")
        if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,12}", value) for value in lengths):
            raise _Refused(400, "the Content-Length is not one number")
        said = {word.strip().lower() for value in request.all("connection") for word in value.split(",")}
        return request, found[3] == b"1" and "close" not in said, int(lengths[0]) if lengths else 0

    def _local(self) -> str:
        name = self.request.getsockname()
        if not isinstance(name, tuple):
            return ""
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def _send(self, answer: Response, *, close: bool, head_only: bool = False) -> None:
        connection: sockets.socket = self.request
        connection.settimeout(_SEND_SECONDS)
        body = answer.body
        head = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", f"Date: {formatdate(usegmt=True)}"]
        head += [f"{name}: {value}" for name, value in answer.headers]
        if isinstance(body, bytes) and answer.status not in (204, 304):
            head.append(f"Content-Length: {len(body)}")
        if close:
            head.append("Connection: close")
        start = "\r\n".join([*head, "", ""]).encode("latin-1")
        if head_only:
            body = b"" if isinstance(body, bytes) else body
        if isinstance(body, bytes):
            if len(body) <= _PIECE:
                connection.sendall(start + body)  # one packet where it fits
                return
            connection.sendall(start)
            for place in range(0, len(body), _PIECE):
                # Each piece has its own time, so that a slow line may take what it needs while it moves.
                connection.sendall(memoryview(body)[place : place + _PIECE])
            return
        try:
            connection.sendall(start)
            for piece in () if head_only else body:
                if piece:
                    connection.sendall(piece)
                elif _gone(connection):
                    return
        finally:
            body.close()

    def _linger(self) -> None:
        """End a connection so that what was sent arrives: closing it over unread bytes would take that back."""
        connection: sockets.socket = self.request
        connection.shutdown(sockets.SHUT_WR)
        connection.settimeout(0.5)
        for _ in range(16):
            if not connection.recv(64 << 10):
                return


def _gone(connection: sockets.socket) -> bool:
    """Whether the other side has hung up; it is not expected to say anything while it listens."""
    ready, _, _ = select.select([connection], [], [], 0)
    return bool(ready) and not connection.recv(1, sockets.MSG_PEEK)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A listening socket and the threads of its connections."""

    daemon_threads = True
    block_on_close = False
    api: Api

    def __init__(self, listening: sockets.socket) -> None:
        self.address_family = listening.family
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.slots = threading.BoundedSemaphore(_CONNECTIONS)
        self.lock = threading.Lock()
        self.open: set[sockets.socket] = set()
        self.loop: threading.Thread | None = None

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.settimeout(0.2)
                request.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        with self.lock:
            self.open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.lock:
                self.open.discard(request)
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.api.report_error()

    def start(self, api: Api) -> None:
        self.api = api
        self.loop = threading.Thread(target=self.serve_forever, args=(0.2,), name="rollbook-viewer", daemon=True)
        self.loop.start()

    def stop(self) -> None:
        if self.loop is not None:
            self.shutdown()
            self.loop.join()
        self.server_close()
        with self.lock:
            left = list(self.open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(sockets.SHUT_RD)  # who waits for a request sees its end; answers still go out
        until = time.monotonic() + 3
        while self.open and time.monotonic() < until:
            time.sleep(0.01)


class Server:
    """A viewer that listens, for a `with` or between `start` and `close`.

    `path` is whatever `rollbook view` opens. `port` 0: any free one; a port that is taken is replaced by a free one.
    `token`: None makes a new one. `trusted_hosts`: names under which a proxy or a tunnel shows the viewer. `socket`:
    the path of a Unix socket, instead of an address. `host` other than this machine's loopback wants a `token`, or
    `unsafe_allow_unauthenticated`, with which everybody who can reach the port sees everything.

    >>> Server("runs/demo", host="0.0.0.0")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: host: got '0.0.0.0', which other machines can reach: expected a token with it ...
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tokenizer: Any = None,
        annotate: bool = False,
        trusted_hosts: Sequence[str] = (),
        unsafe_allow_unauthenticated: bool = False,
        socket: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(port, int) or not 0 <= port < 65536:
            raise ValueError(f"port: got {port!r}, expected a number from 0 to 65535")
        if token is not None:
            checked_token(token)
        elif not unsafe_allow_unauthenticated:
            if socket is None and not _is_loopback(host):
                raise ValueError(
                    f"host: got {host!r}, which other machines can reach: expected a token with it (--token), or "
                    "--unsafe-allow-unauthenticated; an SSH tunnel to 127.0.0.1 needs neither"
                )
            token = new_token()
        self.token = token
        self.host = host
        self.socket_path = None if socket is None else os.path.abspath(os.fspath(socket))
        self.listeners: list[_Listener] = []
        authorities(port, host, trusted_hosts)  # refused before anything is opened
        self.port = port
        self._options = {"tokenizer": tokenizer, "annotate": annotate}
        self._trusted = trusted_hosts
        self._path = path
        self.api: Api | None = None

    def start(self) -> Server:
        """Open the source, listen, and answer in threads."""
        if self.api is not None:
            raise ValueError("server: it was started already")
        listening = self._bind()
        self.listeners = [_Listener(each) for each in listening]
        hosts = authorities(self.port, self.host, self._trusted)
        if self.socket_path is not None:
            hosts |= {name.rpartition(":")[0] for name in hosts if name.endswith(f":{self.port}")}
        guard = Guard(hosts, self.token, wildcard=self.host in ("", "0.0.0.0", "::"))
        try:
            self.api = open_api(self._path, guard, **self._options)
        except BaseException:
            self.close()
            raise
        for each in self.listeners:
            each.start(self.api)
        return self

    def _bind(self) -> list[sockets.socket]:
        if self.socket_path is not None:
            self.port = self.port or PORT
            return [_bind_unix(self.socket_path)]
        try:
            first = _bind_tcp(self.host, self.port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            first = _bind_tcp(self.host, 0)
        self.port = first.getsockname()[1]
        if self.host in ("127.0.0.1", "localhost") and sockets.has_ipv6 and first.family == sockets.AF_INET:
            # "localhost" may mean ::1 to a browser: nobody else should answer there.
            with contextlib.suppress(OSError):
                return [first, _bind_tcp("::1", self.port)]
        return [first]

    @property
    def address(self) -> str:
        """http://host:port, as a browser on this machine opens it."""
        if self.socket_path is not None:
            return f"http://localhost:{self.port}"
        name = {"": sockets.gethostname(), "0.0.0.0": sockets.gethostname(), "::": sockets.gethostname()}.get(
            self.host, self.host
        )
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    @property
    def url(self) -> str:
        """The address with the token, which stays in the browser: a fragment is never sent."""
        return f"{self.address}/" + (f"#token={self.token}" if self.token else "")

    def close(self) -> None:
        """Stop listening, end streams and threads, close the source and remove the index."""
        if self.api is not None:
            self.api.closing.set()
        for each in self.listeners:
            each.stop() if self.api is not None else each.server_close()
        self.listeners = []
        if self.socket_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket_path)
        if self.api is not None:
            self.api.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind_tcp(host: str, port: int) -> sockets.socket:
    if host == "localhost":
        host = "127.0.0.1"  # whatever the machine's files say of that name
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    return sockets.create_server((host, port), family=family, backlog=64)


def _bind_unix(path: str) -> sockets.socket:
    """A socket that its owner alone can open; one that a viewer left behind is replaced, anything else is not."""
    made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ValueError(f"socket: {path} is there and is no socket")
            try:
                made.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise ValueError(f"socket: somebody listens at {path}")
            made.close()
            made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(before)
        made.listen(64)
    except BaseException:
        made.close()
        raise
    return made


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    open_browser: bool = False,
    tokenizer: Any = None,
    annotate: bool = False,
    trusted_hosts: Sequence[str] = (),
    unsafe_allow_unauthenticated: bool = False,
    socket: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> None:
    """Show `path` in a browser until Ctrl-C (or SIGTERM). The options are those of `Server`.

    `open_browser`: have the default browser open it. `quiet`: print the address alone.
    """
    server = Server(
        path,
        host=host,
        port=port,
        token=token,
        tokenizer=tokenizer,
        annotate=annotate,
        trusted_hosts=trusted_hosts,
        unsafe_allow_unauthenticated=unsafe_allow_unauthenticated,
        socket=socket,
    )
    with _until_told() as told, server:
        print(server.url if quiet else "\n".join(_greeting(server, port)), flush=True)
        with _browser(server.url) if open_browser else contextlib.nullcontext():
            told.wait()
        if not quiet:
            print("closing", file=sys.stderr, flush=True)


def _greeting(server: Server, wanted: int) -> Iterator[str]:
    user = f"{getpass.getuser()}@{sockets.gethostname()}"
    if server.socket_path is not None:
        yield f"listening on {server.socket_path}; through a tunnel it is"
        yield f"  {server.url}"
        yield f"  ssh -L {server.port}:{server.socket_path} {user}"
        return
    if wanted not in (0, server.port):
        yield f"port {wanted} is taken"
    yield f"  {server.url}"
    if _is_loopback(server.host):
        yield f"from another machine: ssh -L {server.port}:127.0.0.1:{server.port} {user}, then the same address"
    else:
        yield f"listening on {server.host}, port {server.port}: reachable from other machines, and not encrypted"
    if server.token is None:
        yield "no token: whoever reaches this address sees everything"
    yield "Ctrl-C ends it"


@contextlib.contextmanager
def _until_told() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; the second Ctrl-C works as ever."""
    told = threading.Event()
    before: dict[int, Any] = {}

    def tell(number: int, frame: Any) -> None:
        told.set()
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextlib.contextmanager
def _browser(url: str) -> Iterator[None]:
    """Open the browser by a file that only its owner can read: other users of the machine see the command line."""
    folder = tempfile.mkdtemp(prefix="rollbook-")
    try:
        page = Path(folder, "open.html")
        page.touch(mode=0o600)
        page.write_text(
            f'<!doctype html><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={escape(url)}"><a href="{escape(url)}">open the viewer</a>'
        )
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
