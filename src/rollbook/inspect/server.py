"""Servers of the viewer: `serve` and `Server` on the standard library's sockets, `asgi_app` for ASGI servers.

Invariant: `Server` listens only on the address it prints, which is loopback unless the user chose another. Requests are
bounded in bytes and time, connections in number. Input that is not strict HTTP/1.1 is rejected, and access is checked
before a body is read. `close` ends every thread, stream and file that `start` created. Both servers call the same
`Api`; the ASGI application works in threads, so the event loop never waits for a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import io
import ipaddress
import os
import re
import selectors
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
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from html import escape
from http import HTTPStatus
from json import dumps
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, TypeVarTuple, cast
from urllib.parse import parse_qsl, quote

from rollbook.core.errors import RollbookError
from rollbook.inspect.api import (
    MAX_BODY,
    Api,
    Guard,
    Request,
    Response,
    accepted_hosts,
    check_token,
    create_response,
    create_token,
    error_response,
    open_api,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from rollbook.inspect.records import TokenizerLike

__all__ = ["AsgiViewer", "Server", "asgi_app", "serve"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_MAX_CONNECTIONS = 96
_MAX_LINE_BYTES = 32 << 10
_MAX_HEADER_BYTES = 32 << 10
_REQUEST_SECONDS = 30.0
"""Time limit for a request to arrive completely; idle connections end after it too."""
_SEND_SECONDS = 30.0
_SEND_BYTES = 256 << 10
_LINGER_SECONDS = 2.0
"""Time for the client to read the response before the connection is closed."""
_MAX_REJECTIONS = 8
"""Number of surplus connections that get an error response; others are closed at once."""
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])\r\n")
# Two patterns without backtracking. One pattern for the whole line, with optional spaces, would take cubic time, before
# a client is authenticated.
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


class _BadRequestError(RollbookError):
    """Raised for a request that is not HTTP or exceeds a limit. It is answered, and the connection ends."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def parse_target(target: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a request target into the raw path and its parameters in order.

    >>> parse_target("/api/frame?uid=a%2F0&uid=b&x=")
    ('/api/frame', [('uid', 'a/0'), ('uid', 'b'), ('x', '')])
    """
    path, _, query = target.partition("?")
    return path, parse_qsl(query, keep_blank_values=True, max_num_fields=256, errors="strict")


class _DeadlineReader(io.RawIOBase):
    """Bytes of a socket until a deadline, so that a slow client does not get more time than others."""

    def __init__(self, connection: sockets.socket) -> None:
        self.connection = connection
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(socketserver.BaseRequestHandler):
    """A connection, which handles requests one after the other."""

    server: Listener

    def handle(self) -> None:
        connection: sockets.socket = self.request
        if connection.family != getattr(sockets, "AF_UNIX", None):
            # With Nagle's algorithm, a small response waits 40 ms for an acknowledgment.
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        raw = _DeadlineReader(connection)
        reader = cast(BinaryIO, io.BufferedReader(raw))
        with contextlib.suppress(OSError):
            while not self.server.api.closing.is_set():
                raw.until = time.monotonic() + _REQUEST_SECONDS
                try:
                    keep = self._handle_request(reader)
                except _BadRequestError as refused:
                    self._send(error_response(refused.status, str(refused)), close=True)
                    keep = False
                if not keep:
                    _linger(connection)
                    return

    def _handle_request(self, reader: BinaryIO) -> bool:
        """Answer one request; return whether another may follow."""
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
                raise _BadRequestError(413, f"the request has {length} bytes, expected at most {MAX_BODY}")
            if length and "100-continue" in (value.lower() for value in request.all("expect")):
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.body = reader.read(length)
            if len(request.body) != length:
                return False
        except TimeoutError:
            raise _BadRequestError(408, "the request took too long to arrive") from None
        answer = self.server.api.handle(request)
        streams = not isinstance(answer.body, bytes)
        self._send(answer, close=streams or not persistent, head_only=request.method == "HEAD")
        return persistent and not streams

    def _head(self, reader: BinaryIO) -> tuple[Request, bool, int] | None:
        """Return the request without its body, whether the connection stays open, and the length of the body."""
        try:
            line = reader.readline(_MAX_LINE_BYTES + 1)
        except TimeoutError:
            return None  # no request
        if not line:
            return None
        if len(line) > _MAX_LINE_BYTES:
            raise _BadRequestError(414, f"the request line is longer than {_MAX_LINE_BYTES} bytes")
        match = _REQUEST_LINE.fullmatch(line)
        if match is None:
            raise _BadRequestError(400, "not an HTTP/1.1 request line")
        try:
            path, query = parse_target(match[2].decode("ascii"))
        except ValueError:
            raise _BadRequestError(400, "the URL has too many parameters, or parameters that are not UTF-8") from None
        headers: list[tuple[str, str]] = []
        size = 0
        while True:
            line = reader.readline(_MAX_HEADER_BYTES + 1)
            size += len(line)
            if size > _MAX_HEADER_BYTES:
                raise _BadRequestError(431, f"the headers are longer than {_MAX_HEADER_BYTES} bytes")
            if line == b"\r\n":
                break
            if not line:
                return None
            name, colon, value = line.partition(b":")
            value = value.removesuffix(b"\r\n").strip(b" \t")
            # A line that ends in LF alone has it in its value and is rejected: a proxy may read it as another header or
            # request.
            if not (colon and _NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise _BadRequestError(400, "a header line is not 'name: value'")
            headers.append((name.decode("ascii").lower(), value.decode("latin-1")))
        client = self.client_address[0] if isinstance(self.client_address, tuple) else "unix"
        request = Request(match[1].decode(), path, query, headers, peer=client, local=self._local())
        if request.all("transfer-encoding"):
            raise _BadRequestError(501, "a body requires a Content-Length")
        lengths = request.all("content-length")
        if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,12}", value) for value in lengths):
            raise _BadRequestError(400, "the Content-Length is not one number")
        options = {word.strip().lower() for value in request.all("connection") for word in value.split(",")}
        return request, match[3] == b"1" and "close" not in options, int(lengths[0]) if lengths else 0

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
            if len(body) <= _SEND_BYTES:
                connection.sendall(start + body)  # one packet if it fits
                return
            connection.sendall(start)
            for first in range(0, len(body), _SEND_BYTES):
                # The time limit applies per piece, so that a slow connection can finish.
                connection.sendall(memoryview(body)[first : first + _SEND_BYTES])
            return
        try:
            connection.sendall(start)
            for piece in () if head_only else body:
                if piece:
                    connection.sendall(piece)
                elif _is_disconnected(connection):
                    return
        finally:
            body.close()


def _linger(connection: sockets.socket) -> None:
    """End a connection so that the response arrives: closing it with unread input would reset it."""
    connection.shutdown(sockets.SHUT_WR)
    until = time.monotonic() + _LINGER_SECONDS
    for _ in range(64):
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not connection.recv(64 << 10):
            return


def _is_disconnected(connection: sockets.socket) -> bool:
    """Return whether the client has disconnected; it sends nothing while it listens."""
    # Not select(), which fails for file descriptors from 1024 on.
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0)) and not connection.recv(1, sockets.MSG_PEEK)


class Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A listening socket and the threads of its connections."""

    daemon_threads = True
    block_on_close = False
    api: Api

    def __init__(self, listening: sockets.socket) -> None:
        self.address_family = listening.family
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.refusing = threading.BoundedSemaphore(_MAX_REJECTIONS)
        self.lock = threading.Lock()
        self.open: set[sockets.socket] = set()
        self.loop: threading.Thread | None = None

    def process_request(  # type: ignore[override]
        self, request: sockets.socket, client_address: tuple[str, int] | str
    ) -> None:
        if not self.slots.acquire(blocking=False):
            if self.refusing.acquire(blocking=False):
                # In a thread, since a client that does not read must not block others.
                threading.Thread(target=self._reject, args=(request,), daemon=True).start()
            else:
                self.shutdown_request(request)
            return
        with self.lock:
            self.open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread is available now: release the slot.
            self._release(request)
            raise

    def _reject(self, connection: sockets.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                connection.settimeout(_LINGER_SECONDS)
                connection.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                _linger(connection)
        finally:
            self.shutdown_request(connection)
            self.refusing.release()

    def process_request_thread(  # type: ignore[override]
        self, request: sockets.socket, client_address: tuple[str, int] | str
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, connection: sockets.socket) -> None:
        with self.lock:
            self.open.discard(connection)
        self.slots.release()

    def handle_error(  # type: ignore[override]
        self, request: sockets.socket, client_address: tuple[str, int] | str
    ) -> None:
        self.api.report_error()

    def start(self, api: Api) -> None:
        """Answer requests with `api` in the background."""
        self.api = api
        self.loop = threading.Thread(target=self.serve_forever, args=(0.2,), name="rollbook-viewer", daemon=True)
        self.loop.start()

    def stop(self) -> None:
        """Stop listening, finish current responses, and end all connections."""
        if self.loop is not None:
            self.shutdown()
            self.loop.join()
        self.server_close()
        with self.lock:
            left = list(self.open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(sockets.SHUT_RD)  # ends waiting for requests; responses are still sent
        until = time.monotonic() + 3
        while self.open and time.monotonic() < until:
            time.sleep(0.01)


# --- the server ------------------------------------------------------------------------------------------------------

PORT = 8420
_MAX_PORT_TRIES = 32
"""Number of ports to try."""


class Server:
    """The viewer's HTTP server, as a context manager or between `start` and `close`.

    Args:
        path: Path or URL of a run, as for `rollbook view`.
        host: Address to listen on. Other than loopback, it requires `token` or `unsafe_allow_unauthenticated`.
        port: Port, or 0 for any free port; an occupied port is replaced by a free one.
        token: Access token; by default a random one.
        trusted_hosts: Host names of proxies and tunnels.
        socket: Path of a Unix socket to listen on instead.
        tokenizer: Tokenizer for records without text, as for `open_source`.
        annotate: Allow stars and notes.
        unsafe_allow_unauthenticated: Serve without a token.

    Raises:
        ValueError: The port, the host or the token is invalid, or a token is missing where other machines can connect.

    >>> Server("runs/letters", host="0.0.0.0")  # doctest: +ELLIPSIS
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
        tokenizer: TokenizerLike | None = None,
        annotate: bool = False,
        trusted_hosts: Sequence[str] = (),
        unsafe_allow_unauthenticated: bool = False,
        socket: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(port, int) or not 0 <= port < 65536:
            raise ValueError(f"port: got {port!r}, expected a number from 0 to 65535")
        if token is not None:
            check_token(token)
        elif not unsafe_allow_unauthenticated:
            if socket is None and not _is_loopback(host):
                raise ValueError(
                    f"host: got {host!r}, which other machines can reach: expected a token with it (--token), or "
                    "--unsafe-allow-unauthenticated; an SSH tunnel to 127.0.0.1 needs neither"
                )
            token = create_token()
        self.token = token
        self.host = host
        self.socket_path = None if socket is None else os.path.abspath(os.fspath(socket))
        self.listeners: list[Listener] = []
        accepted_hosts(port, host, trusted_hosts)  # validates before anything is opened
        self.port = port
        self._options: dict[str, Any] = {"tokenizer": tokenizer, "annotate": annotate}
        self._trusted = trusted_hosts
        self._path = path
        self.api: Api | None = None

    def start(self) -> Server:
        """Open the source, listen, and answer in threads."""
        if self.api is not None:
            raise ValueError("server: already started")
        listening = self._bind()
        self.listeners = [Listener(bound) for bound in listening]
        hosts = accepted_hosts(self.port, self.host, self._trusted)
        if self.socket_path is not None:
            hosts |= {name.rpartition(":")[0] for name in hosts if name.endswith(f":{self.port}")}
        guard = Guard(hosts, self.token, wildcard=self.host in ("", "0.0.0.0", "::"))
        try:
            self.api = open_api(self._path, guard, **self._options)
        except BaseException:
            self.close()
            raise
        for bound in self.listeners:
            bound.start(self.api)
        return self

    def _bind(self) -> list[sockets.socket]:
        if self.socket_path is not None:
            self.port = self.port or PORT
            return [_bind_unix(self.socket_path)]
        try:
            bound = _bind_both(self.host, self.port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            bound = None
        tries = 0
        while bound is None:
            tries += 1
            if tries > _MAX_PORT_TRIES:
                raise OSError(errno.EADDRINUSE, f"host: no free port on {self.host}")
            bound = _bind_both(self.host, 0)
        self.port = bound[0].getsockname()[1]
        return bound

    @property
    def address(self) -> str:
        """URL without the token, as a browser on this machine opens it."""
        if self.socket_path is not None:
            return f"http://localhost:{self.port}"
        name = {"": sockets.gethostname(), "0.0.0.0": sockets.gethostname(), "::": sockets.gethostname()}.get(
            self.host, self.host
        )
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    @property
    def url(self) -> str:
        """URL with the token in the fragment, which browsers do not send."""
        return f"{self.address}/" + (f"#token={self.token}" if self.token else "")

    def close(self) -> None:
        """Stop listening, end streams and threads, close the source and remove the index."""
        if self.api is not None:
            self.api.closing.set()
        for listener in self.listeners:
            listener.stop() if self.api is not None else listener.server_close()
        if self.listeners and self.socket_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket_path)
        self.listeners = []
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
        host = "127.0.0.1"  # regardless of the hosts file
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    return sockets.create_server((host, port), family=family, backlog=64)


def _bind_both(host: str, port: int) -> list[sockets.socket] | None:
    """Bind an address; for "localhost" also ::1, since browsers may use either. If another process has one of them, the
    port is not used, because its page could read the token.
    """
    first = _bind_tcp(host, port)
    if host not in ("127.0.0.1", "localhost"):
        return [first]
    try:
        return [first, _bind_tcp("::1", first.getsockname()[1])]
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            first.close()
            return None
        return [first]  # a machine without IPv6


def _bind_unix(path: str) -> sockets.socket:
    """Bind a Unix socket that only its owner can open; replace only the socket of a crashed viewer."""
    bound = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ValueError(f"socket: {path} exists and is not a socket")
            try:
                bound.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise ValueError(f"socket: {path} is in use")
            bound.close()
            bound = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        umask = os.umask(0o177)
        try:
            bound.bind(path)
        finally:
            os.umask(umask)
        bound.listen(64)
    except BaseException:
        bound.close()
        raise
    return bound


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    open_browser: bool = False,
    tokenizer: TokenizerLike | None = None,
    annotate: bool = False,
    trusted_hosts: Sequence[str] = (),
    unsafe_allow_unauthenticated: bool = False,
    socket: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    json: bool = False,
) -> None:
    """Serve the viewer of `path` until Ctrl-C or SIGTERM.

    Args:
        path: Path or URL of a run.
        open_browser: Open the default browser.
        quiet: Print only the URL.
        json: Print one line of JSON: {"url", "host", "port", "socket", "token"}.

    The other arguments are those of `Server`.
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
    with _stop_event() as stop, server:
        if json:
            address = {"url": server.url, "host": server.host, "port": server.port}
            print(dumps({**address, "socket": server.socket_path, "token": server.token}), flush=True)
        else:
            print(server.url if quiet else "\n".join(_start_messages(server, port)), flush=True)
        with _open_browser(server.url) if open_browser else contextlib.nullcontext():
            stop.wait()
        if not quiet and not json:
            print("closing", file=sys.stderr, flush=True)


def _start_messages(server: Server, requested_port: int) -> Iterator[str]:
    try:
        user = f"{getpass.getuser()}@{sockets.gethostname()}"
    except (KeyError, OSError):
        user = sockets.gethostname()  # users of containers may have no name
    if server.socket_path is not None:
        yield f"listening on {server.socket_path}; URL through an SSH tunnel:"
        yield f"  {server.url}"
        yield f"  ssh -L {server.port}:{server.socket_path} {user}"
        return
    if requested_port not in (0, server.port):
        yield f"port {requested_port} is in use; using {server.port}"
    yield f"  {server.url}"
    if _is_loopback(server.host):
        yield f"from another machine: ssh -L {server.port}:127.0.0.1:{server.port} {user}, then open the same URL"
    else:
        yield f"listening on {server.host}:{server.port}: reachable from other machines, not encrypted"
    if server.token is None:
        yield "warning: no token: anyone who can connect can read everything"
    yield "press Ctrl-C to stop"


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second Ctrl-C interrupts as usual."""
    stop = threading.Event()
    old_handlers: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, old_handlers[number])

    if threading.current_thread() is threading.main_thread():
        old_handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _open_browser(url: str) -> Iterator[None]:
    """Open the browser with a file that only its owner can read, since command lines are visible to other users."""
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


# --- ASGI ------------------------------------------------------------------------------------------------------------

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_MAX_THREADS = 48
"""More than the maximum number of streams, each of which occupies a thread."""


def asgi_app(
    path: str | os.PathLike[str],
    *,
    token: str | None,
    port: int = 8000,
    trusted_hosts: Sequence[str] = (),
    tokenizer: TokenizerLike | None = None,
    annotate: bool = False,
) -> AsgiViewer:
    """Return the viewer of `path` as an ASGI application, for uvicorn or to mount in another application.

    Args:
        path: Path or URL of a run.
        token: Access token, or `None` if the mounting application controls access.
        port: Port of the server.
        trusted_hosts: Host names that browsers use ("viewer.example", "viewer.example:8443"); others are rejected.
        tokenizer: Tokenizer for records without text, as for `open_source`.
        annotate: Allow stars and notes.

    Returns:
        The application.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: The token or a host is invalid, or nothing at the path can be opened.

    >>> import rollbook
    >>> with tempfile.TemporaryDirectory() as run:
    ...     rollbook.open(run).close()
    ...     viewer = asgi_app(run, token=None, trusted_hosts=["viewer.example"])  # application.mount("/viewer", viewer)
    ...     viewer.close()
    """
    if token is not None:
        check_token(token)
    guard = Guard(accepted_hosts(port, "localhost", trusted_hosts), token)
    return AsgiViewer(open_api(path, guard, tokenizer=tokenizer, annotate=annotate))


class AsgiViewer:
    """The ASGI application. It closes its source at the end of `lifespan`, or by `close` if the mounting application
    does not forward `lifespan`.

    Args:
        api: The requests of the viewer.
    """

    def __init__(self, api: Api) -> None:
        self.api = api
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "rollbook-viewer")

    def close(self) -> None:
        """End streams and threads, and close the source."""
        self.api.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                if message["type"] == "lifespan.shutdown":
                    await asyncio.get_running_loop().run_in_executor(None, self.close)
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            raise ValueError(f"scope: got {scope['type']!r}, expected http")
        try:
            request = _request(scope)
        except ValueError as error:
            await _send(error_response(400, str(error)), send, b"")
            return
        answer = self.api.refuse(request)
        if answer is None and not request.path:
            # Without the slash, relative URLs of the page would be wrong.
            answer = create_response(308, b"", "text/plain", ("Location", quote(scope["root_path"].rstrip("/")) + "/"))
        answer = answer or await self._body(request, receive)
        if answer is None:
            answer = await self._run(self.api.handle, request)
        if isinstance(answer.body, bytes):
            await _send(answer, send, b"" if request.method == "HEAD" else answer.body)
        else:
            await self._stream(answer, receive, send)

    async def _run(self, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _body(self, request: Request, receive: Receive) -> Response | None:
        pieces: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return error_response(400, "the request ended before its body did")
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > MAX_BODY:
                return error_response(413, f"the request has more than {MAX_BODY} bytes")
            more = message.get("more_body", False)
        request.body = b"".join(pieces)
        return None

    async def _stream(self, answer: Response, receive: Receive, send: Send) -> None:
        stream = answer.body
        if isinstance(stream, bytes):
            raise ValueError("answer: got bytes, expected a stream")
        await send({"type": "http.response.start", "status": answer.status, "headers": _headers(answer)})
        disconnected = asyncio.ensure_future(_until_gone(receive))
        try:
            while not disconnected.done():
                piece = await self._run(next, stream, None)
                if piece is None:
                    await send({"type": "http.response.body", "body": b""})
                    return
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            disconnected.cancel()
            stream.close()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request(scope: Scope) -> Request:
    path = scope["path"]
    root = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    query = parse_qsl(
        scope.get("query_string", b"").decode("ascii"), keep_blank_values=True, max_num_fields=256, errors="strict"
    )
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    peer = (scope.get("client") or ("",))[0]
    return Request(scope["method"], path, query, headers, peer=peer, scheme=scope.get("scheme", "http"))


def _headers(answer: Response) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]


async def _send(answer: Response, send: Send, body: bytes) -> None:
    headers = _headers(answer)
    if isinstance(answer.body, bytes) and answer.status not in (204, 304):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
