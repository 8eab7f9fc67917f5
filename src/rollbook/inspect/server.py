"""The viewer's own server: where it listens, with which secret, and what it tells whoever starts it.

Invariant: it listens where it says and nowhere else, and nobody but this machine reaches it unless the user chose so.
`close` ends every thread, stream and file that `start` began.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import ipaddress
import os
import shutil
import signal
import socket as sockets
import stat
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from html import escape
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import Any

from rollbook.inspect.api import Api, open_api
from rollbook.inspect.guard import Guard, authorities, checked_token, new_token
from rollbook.inspect.listening import Listener

PORT = 8420
_PORTS = 32
"""How many free ports are tried."""


class Server:
    """A viewer that listens, for a `with` or between `start` and `close`.

    `path` is whatever `rollbook view` opens. `port` 0: any free one; a port that is taken is replaced by a free one.
    `token`: None makes a new one. `trusted_hosts`: names under which a proxy or a tunnel shows the viewer. `socket`:
    the path of a Unix socket, instead of an address. `host` other than this machine's loopback wants a `token`, or
    `unsafe_allow_unauthenticated`, with which everybody who can reach the port sees everything.

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
        self.listeners: list[Listener] = []
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
        self.listeners = [Listener(each) for each in listening]
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
            made = _bind_both(self.host, self.port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            made = None
        tries = 0
        while made is None:
            tries += 1
            if tries > _PORTS:
                raise OSError(errno.EADDRINUSE, f"host: no port of {self.host} is free")
            made = _bind_both(self.host, 0)
        self.port = made[0].getsockname()[1]
        return made

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
        host = "127.0.0.1"  # whatever the machine's files say of that name
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    return sockets.create_server((host, port), family=family, backlog=64)


def _bind_both(host: str, port: int) -> list[sockets.socket] | None:
    """The sockets of an address. "localhost" may mean ::1 to a browser, so that is taken too, and if somebody else has
    it, the port is not used at all: their page at this address could read the token from it."""
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
    json: bool = False,
) -> None:
    """Show `path` in a browser until Ctrl-C (or SIGTERM). The options are those of `Server`.

    `open_browser`: have the default browser open it. `quiet`: print the address alone; `json`: print one
    line, {"url", "host", "port", "socket", "token"}, for programs.
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
        if json:
            found = {"url": server.url, "host": server.host, "port": server.port}
            print(dumps({**found, "socket": server.socket_path, "token": server.token}), flush=True)
        else:
            print(server.url if quiet else "\n".join(_greeting(server, port)), flush=True)
        with _browser(server.url) if open_browser else contextlib.nullcontext():
            told.wait()
        if not quiet and not json:
            print("closing", file=sys.stderr, flush=True)


def _greeting(server: Server, wanted: int) -> Iterator[str]:
    try:
        user = f"{getpass.getuser()}@{sockets.gethostname()}"
    except (KeyError, OSError):
        user = sockets.gethostname()  # a container's user may have no name
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
