"""The viewer's HTTP API, independent of the server: requests and responses, access control, annotations, routes.

Invariant: every response has the headers that stop a page from running record content. JSON is strict, and an unknown
parameter or field is an error. Only a POST changes anything. A bad request gets a one-line error, never a traceback.
Record content is served as text, JSON, a frame or an image whose first bytes confirm its type, never as HTML.

The host of a request is checked first. Nothing under /api is answered without the token (if there is one) or to a page
of another origin. Secrets are compared in constant time. The annotations file is append-only, and each line is on disk
before it is acknowledged.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import sqlite3
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollbook.core.addresses import redacted
from rollbook.core.files import private_opener
from rollbook.inspect import html_export
from rollbook.inspect.images import image_type
from rollbook.inspect.serialization import as_json, encode, replace_surrogates
from rollbook.inspect.workers import QueryTimeoutError, ServerBusyError, Workers, format_csv

if TYPE_CHECKING:
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.records import TokenizerLike
    from rollbook.inspect.sources import Source, Watcher
    from rollbook.inspect.trajectory import Json


PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
MEDIA_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
_COMMON_HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


@dataclass
class Request:
    """An HTTP request.

    `headers` are in order, with lower-case names and duplicates. `path` is raw, without parameters. `local` is the
    address that the connection was made to, as host:port.
    """

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    peer: str = ""
    local: str = ""
    scheme: str = "http"

    def all(self, name: str) -> list[str]:
        """Return all values of a header; `name` in lower case."""
        return [value for key, value in self.headers if key == name]


@dataclass
class Response:
    """An HTTP response: bytes, or a stream that the server closes."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | Stream


def create_response(
    status: int, body: bytes | Stream, kind: str, *more: tuple[str, str], policy: str = PAGE_POLICY
) -> Response:
    """Create a response with the common headers; not cached unless `more` sets Cache-Control."""
    headers = [("Content-Type", kind), ("Content-Security-Policy", policy), *_COMMON_HEADERS, *more]
    if not any(name == "Cache-Control" for name, _ in more):
        headers.append(("Cache-Control", "no-store"))
    return Response(status, headers, body)


def error_response(status: int, error: str) -> Response:
    """Create an error response: {"error": "one sentence"}."""
    return create_response(status, orjson.dumps({"error": replace_surrogates(error)}), "application/json")


# --- parameters --------------------------------------------------------------------------------------------------


def parse_int(name: str, text: str) -> int:
    """Parse an integer."""
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise ValueError(f"{name}: got {text[:40]!r}, expected an integer")
    return int(text)


def parse_flag(name: str, text: str) -> bool:
    """Parse 0 or 1."""
    if text not in ("0", "1"):
        raise ValueError(f"{name}: got {text[:40]!r}, expected 0 or 1")
    return text == "1"


def parse_text(name: str, text: str) -> str:
    """Parse a text of limited length."""
    if len(text) > 4096:
        raise ValueError(f"{name}: got {len(text)} characters, expected at most 4096")
    return text


def parse_step_range(name: str, text: str) -> tuple[int, int]:
    """Parse FIRST-LAST, or a single step."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if match is None:
        raise ValueError(f"{name}: got {text[:40]!r}, expected steps as FIRST-LAST")
    return int(match[1]), int(match[2] or match[1])


Reader = Callable[[str, str], Any]


def parse_parameters(
    query: list[tuple[str, str]], readers: Mapping[str, Reader], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Parse the parameters of a request; unknown, repeated and missing ones raise `ValueError`.

    >>> parse_parameters([("step", "137"), ("evaluation", "0")], {"step": parse_int, "evaluation": parse_flag})
    {'step': 137, 'evaluation': False}
    """
    parsed: dict[str, Any] = {}
    for name, value in query:
        if name not in readers:
            expected = ", ".join(readers) or "none"
            raise ValueError(f"unknown parameter {name[:40]!r}, expected {expected}")
        if name in parsed:
            raise ValueError(f"parameter {name} is given twice")
        if value:
            parsed[name] = readers[name](name, value)
    for name in needed:
        if name not in parsed:
            raise ValueError(f"parameter {name} is missing")
    return parsed


def attachment_header(name: str) -> tuple[str, str]:
    """Return the header for a download under this name."""
    return "Content-Disposition", f'attachment; filename="{name}"'


def parse_body(request: Request, allowed: Mapping[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a posted JSON object, checked by name and type."""
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name not in allowed:
            raise ValueError(f"unknown field {name[:40]!r}, expected {', '.join(allowed)}")
        kinds = allowed[name] if isinstance(allowed[name], tuple) else (allowed[name],)
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}")
    for name in needed:
        if name not in body:
            raise ValueError(f"field {name} is missing")
    return body


# --- access ----------------------------------------------------------------------------------------------------------

POST_HEADER = "x-rollbook"
"""A header that forms and images of other sites cannot send, nor their scripts without CORS."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_AUTHORITY = re.compile(r"(?P<name>[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,256}")


@dataclass(frozen=True)
class Refusal:
    """Reason to reject a request, with the HTTP status."""

    status: int
    error: str


def create_token() -> str:
    """Return 128 random bits as URL-safe text.

    >>> len(create_token()), create_token() == create_token()
    (22, False)
    """
    return secrets.token_urlsafe(16)


def check_token(token: str) -> str:
    """Validate a token chosen by the user.

    >>> check_token("secret")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: token: got 6 characters, expected 16 to 256 letters, digits, '-' and '_' ...
    """
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise ValueError(
            f"token: got {len(token)} characters, expected 16 to 256 letters, digits, '-' and '_' "
            "(create one: python -c 'import secrets; print(secrets.token_urlsafe(16))')"
        )
    return token


def accepted_hosts(port: int, bound: str, trusted: Iterable[str] = ()) -> frozenset[str]:
    """Return the accepted Host headers: loopback names, the bound name and trusted names, each with its port.

    A trusted name without a port is accepted as it is (a proxy at the default port) and with `port`.

    >>> sorted(accepted_hosts(8420, "127.0.0.1", ["viewer.example", "localhost:9000"]))
    ['127.0.0.1:8420', '[::1]:8420', 'localhost:8420', 'localhost:9000', 'viewer.example', 'viewer.example:8420']
    """
    names = {*LOOPBACK, f"[{bound}]" if ":" in bound else bound.lower()} - {""}
    accepted = {f"{name}:{port}" for name in names}
    for host in trusted:
        parts = _AUTHORITY.fullmatch(host.lower())
        if parts is None:
            raise ValueError(f"trusted_hosts: got {host!r}, expected a name or an address, as 'name' or 'name:port'")
        accepted |= {host.lower()} if parts["port"] else {host.lower(), f"{host.lower()}:{port}"}
    if port == 80:
        accepted |= names
    return frozenset(accepted)


@dataclass(frozen=True)
class Guard:
    """Access rules of a viewer; `token` is `None` if the user disabled it.

    >>> guard = Guard(accepted_hosts(8420, "127.0.0.1"), "a-token-of-16-or-more")
    >>> guard.check(Request("GET", "/", headers=[("host", "evil.example:8420")])).status
    421
    >>> guard.check(Request("GET", "/", headers=[("host", "localhost:8420")]))
    >>> guard.check(Request("GET", "/api/run", headers=[("host", "localhost:8420")])).status
    401
    """

    hosts: frozenset[str]
    token: str | None = field(repr=False)
    wildcard: bool = False
    """Whether the server is bound to all addresses. Then the address of the connection is accepted as a host: unlike a
    name, a numeric address cannot be rebound by an attacker.
    """

    def check(self, request: Request) -> Refusal | None:
        """Return the reason to reject a request, or `None`. The host is checked first."""
        return (
            self._host(request)
            or self._origin(request)
            or self._site(request)
            or self._change(request)
            or self._credentials(request)
        )

    def cookie_name(self, request: Request) -> str:
        """Return the name of the session cookie. It contains the port that the browser sees, because browsers share
        cookies between the ports of a host.
        """
        return "rollbook-" + (request.all("host")[0].rpartition("]")[2].partition(":")[2] or "0")

    def session(self, request: Request) -> str:
        """Return the Set-Cookie header for a client that presented the token."""
        secure = "; Secure" if request.scheme == "https" else ""
        return f"{self.cookie_name(request)}={self._session_value()}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def _session_value(self) -> str:
        # Not the token itself, so that a copied cookie cannot be used as a token.
        return hmac.new((self.token or "").encode(), b"rollbook viewer session", hashlib.sha256).hexdigest()

    # --- the rules, in their order -------------------------------------------------------------------------------

    def _host(self, request: Request) -> Refusal | None:
        hosts = request.all("host")
        if len(hosts) != 1:
            return Refusal(421, f"the request has {len(hosts)} Host headers, expected one")
        host = hosts[0].lower()
        if host in self.hosts or (self.wildcard and request.local and host == request.local and _is_address(host)):
            return None
        shown = host if _AUTHORITY.fullmatch(host) else "this host"
        return Refusal(421, f"unknown host {shown}; start the viewer with --trusted-host {shown} to accept it")

    def _origin(self, request: Request) -> Refusal | None:
        origins = request.all("origin")
        host = request.all("host")[0].lower()
        if not origins or (len(origins) == 1 and origins[0].lower() in (f"http://{host}", f"https://{host}")):
            return None
        return Refusal(403, "the request comes from a page of another origin")

    def _site(self, request: Request) -> Refusal | None:
        if not _is_api(request.path):
            return None
        sites = request.all("sec-fetch-site")
        if not sites or (len(sites) == 1 and sites[0].lower() in ("same-origin", "none")):
            return None
        return Refusal(403, "the request comes from a page of another site")

    def _change(self, request: Request) -> Refusal | None:
        if request.method != "POST":
            return None
        kinds = request.all("content-type")
        if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, "a POST requires the content type application/json")
        if request.all(POST_HEADER) != ["1"]:
            return Refusal(403, "a POST requires the header X-Rollbook: 1")
        return None

    def _credentials(self, request: Request) -> Refusal | None:
        if self.token is None or not _is_api(request.path):
            return None
        for value in request.all("authorization"):
            kind, _, secret = value.partition(" ")
            if kind.lower() == "bearer" and _secrets_equal(secret.strip(), self.token):
                return None
        name, expected = self.cookie_name(request), self._session_value()
        # A page of another port may have set a cookie of the same name for another path: any match counts.
        cookies = [pair.strip().partition("=") for line in request.all("cookie") for pair in line.split(";")]
        if any(key == name and _secrets_equal(secret, expected) for key, _, secret in cookies):
            return None
        return Refusal(401, "missing or wrong token; open the URL that the server printed, with its #token=")


def _is_api(path: str) -> bool:
    return path == "/api" or path.startswith("/api/")


def _secrets_equal(secret: str, expected: str) -> bool:
    return hmac.compare_digest(secret.encode("utf-8", "replace"), expected.encode())


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# --- annotations ----------------------------------------------------------------------------------------------------

MAX_NOTE_LENGTH = 10_000
_MAX_LINE_LENGTH = 1 << 20


class Annotations:
    """Stars and notes of `path`, in `annotations.jsonl` in a folder or `NAME.annotations.jsonl` next to a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Annotations(folder).set("4/7/0/0/a", star=True, note="reads the answer from the prompt")
    ...     Annotations(folder).all()["4/7/0/0/a"]["star"]
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        resolved = Path(path)
        if not resolved.exists():
            raise ValueError(
                f"annotate: {redacted(path)} is not a local file or folder, so notes cannot be saved next to it"
            )
        self.path = (
            resolved / "annotations.jsonl"
            if resolved.is_dir()
            else resolved.with_name(resolved.name + ".annotations.jsonl")
        )
        if os.path.lexists(self.path) and not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise ValueError(f"annotate: {self.path} is a link or not a regular file")
        self._lock = threading.Lock()
        self._annotations: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            with open(self.path, "rb", opener=_open_private) as file:
                for line in iter(lambda: file.readline(_MAX_LINE_LENGTH), b""):
                    self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        # The file is as untrusted as the run.
        try:
            entry = json.loads(line)
            uid, note = str(entry["uid"]), str(entry["note"])[:MAX_NOTE_LENGTH]
            self._annotations[uid] = {"star": bool(entry["star"]), "note": note, "time": float(entry["time"])}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return

    def all(self) -> dict[str, dict[str, Any]]:
        """Return {uid: {"star", "note", "time"}} of annotated samples."""
        with self._lock:
            return {
                uid: annotation
                for uid, annotation in self._annotations.items()
                if annotation["star"] or annotation["note"]
            }

    def set(self, uid: str, *, star: bool | None = None, note: str | None = None) -> dict[str, Any]:
        """Set or remove a star or a note (an empty note removes it), and return the new state."""
        if note is not None and len(note) > MAX_NOTE_LENGTH:
            raise ValueError(f"note: got {len(note)} characters, expected at most {MAX_NOTE_LENGTH}")
        with self._lock:
            previous = self._annotations.get(uid, {"star": False, "note": ""})
            annotation = {
                "star": previous["star"] if star is None else star,
                "note": previous["note"] if note is None else note,
                "time": time.time(),
            }
            line = json.dumps({"uid": uid, **annotation}).encode()
            # A newline on both sides keeps a line truncated by a crash separate.
            with open(self.path, "ab", opener=_open_private) as file:
                file.write(b"\n" + line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._annotations[uid] = annotation
            return annotation


def _open_private(path: str, flags: int) -> int:
    return private_opener(path, flags | getattr(os, "O_NOFOLLOW", 0))


# --- requests -------------------------------------------------------------------------------------------------------

MAX_BODY = 1 << 20
MAX_UIDS = 64
_MAX_STREAMS = 24
_MAX_OVERDUE = 8
_REQUEST_SECONDS = 30.0
_HEARTBEAT_SECONDS = 15.0
_POLL_SECONDS = 0.5
"""Seconds between checks whether a client of an idle stream is still connected."""
_GZIP_MIN_BYTES = 4 << 10


@dataclass(frozen=True)
class _Route:
    """A route that answers with JSON: its parameters, the required ones, and the function that answers."""

    readers: Mapping[str, Reader]
    needed: tuple[str, ...]
    answer: Callable[[Api, dict[str, Any]], Any]


_UID = {"uid": parse_text}
ROUTES: dict[str, _Route] = {
    "/api/run": _Route({}, (), lambda api, query: api.run()),
    "/api/steps": _Route(
        {"since": parse_int, "evaluation": parse_flag}, (), lambda api, query: api.answers.steps(**query)
    ),
    "/api/findings": _Route({"evaluation": parse_flag}, (), lambda api, query: api.answers.findings(**query)),
    "/api/metrics": _Route({"since": parse_int}, (), lambda api, query: api.answers.metrics(**query)),
    "/api/step": _Route(
        {"step": parse_int, "evaluation": parse_flag}, ("step",), lambda api, query: api.answers.step(**query)
    ),
    "/api/list": _Route(
        {
            "view": parse_text,
            "step": parse_int,
            "gid": parse_text,
            "prompt": parse_text,
            "filter": parse_text,
            "sort": parse_text,
            "offset": parse_int,
            "limit": parse_int,
            "snapshot": parse_text,
            "evaluation": parse_flag,
        },
        (),
        lambda api, query: api.answers.list(**query),
    ),
    "/api/group": _Route({"gid": parse_text}, ("gid",), lambda api, query: api.answers.group(**query)),
    "/api/neighbors": _Route(_UID, ("uid",), lambda api, query: api.answers.neighbors(**query)),
    "/api/record": _Route(_UID, ("uid",), lambda api, query: api.source.record(query["uid"])),
    "/api/history": _Route(_UID, ("uid",), lambda api, query: api.history(query["uid"])),
    "/api/prompt": _Route({"prompt": parse_text}, ("prompt",), lambda api, query: api.answers.prompt(**query)),
    "/api/compare": _Route(
        {"a": parse_step_range, "b": parse_step_range}, ("a", "b"), lambda api, query: api.answers.compare(**query)
    ),
    "/api/search": _Route(
        {"q": parse_text, "mode": parse_text, "limit": parse_int, "step": parse_int},
        ("q",),
        lambda api, query: api.answers.search(**query),
    ),
    "/api/annotations": _Route({}, (), lambda api, query: api.notes()),
}
"""GET routes that answer with JSON; an exported file contains recorded answers of some of them."""


class Api:
    """The viewer's API of one source, for any server.

    Args:
        source: The source to show.
        answers: Answers about it.
        watcher: Follows the source; `None` if it does not change.
        guard: Access rules.
        workers: Child processes for SQL and regular expressions.
        annotations: Stars and notes; `None` for a read-only viewer.
        seconds: Time limit of a request.
    """

    source: Source
    answers: Answers

    def __init__(
        self,
        source: Source,
        answers: Answers,
        watcher: Watcher,
        guard: Guard,
        *,
        workers: Workers,
        annotations: Annotations | None = None,
        seconds: float = _REQUEST_SECONDS,
    ) -> None:
        self.source = source
        self.answers = answers
        self.watcher = watcher
        self.guard = guard
        self.workers = workers
        self.annotations = annotations
        self.seconds = seconds
        answers.searching.max_wait = seconds / 2
        self.closing = threading.Event()
        self._streams = threading.BoundedSemaphore(_MAX_STREAMS)
        self._overdue = threading.BoundedSemaphore(_MAX_OVERDUE)

    def close(self) -> None:
        """End streams, child processes and background work, close the source, and remove the index."""
        self.closing.set()
        self.workers.close()
        self.answers.close()
        self.watcher.close()
        self.source.close()
        self.answers.index.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def refuse(self, request: Request) -> Response | None:
        """Return the response to a client without access, or `None`. Servers call it before reading a body."""
        refusal = self.guard.check(request)
        if refusal is None:
            return None
        return error_response(refusal.status, refusal.error)

    def handle(self, request: Request) -> Response:
        """Return the response to a request."""
        refused = self.refuse(request)
        if refused is not None:
            return refused
        try:
            return self._route(request)
        except ServerBusyError as error:
            return error_response(429, str(error))
        except (QueryTimeoutError, TimeoutError) as error:
            # Not 408, after which browsers retry repeatedly.
            return error_response(504, str(error))
        except KeyError as error:
            return error_response(404, str(error.args[0]) if error.args else "not found")
        except (ValueError, RecursionError) as error:
            return error_response(400, str(error) or "bad request")
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                return error_response(504, f"the request took longer than {self.seconds:g} seconds")
            return self._internal_error()
        except Exception:
            return self._internal_error()

    def _internal_error(self) -> Response:
        self.report_error()
        return error_response(500, "internal error; see the server's terminal")

    def report_error(self) -> None:
        """Print a traceback with control characters replaced, since it may contain text of records."""
        report = "".join(
            letter if letter.isprintable() or letter in "\n\t" else "�" for letter in traceback.format_exc()
        )
        print(report, file=sys.stderr, flush=True)

    def _route(self, request: Request) -> Response:
        path = request.path
        if path in _POST_ROUTES:
            if request.method != "POST":
                return self._wrong_method("POST")
            return _POST_ROUTES[path](self, request)
        route = ROUTES.get(path)
        file = self._static_file(path)
        if (
            route is None
            and file is None
            and path not in ("/api/frame", "/api/events")
            and not _MEDIA_PATH.fullmatch(path)
        ):
            return error_response(404, "not found")
        if request.method not in ("GET", "HEAD"):
            return self._wrong_method("GET, HEAD")
        if file is not None:
            return self._cached(request, file.content, file.type, file.sha256)
        if path == "/api/events":
            return self._events(request)
        if path == "/api/frame":
            return self._frame(request)
        if route is None:
            return self._media(request, path.rpartition("/")[2])
        parameters = parse_parameters(request.query, route.readers, route.needed)
        answer = self._run_with_limit(lambda: route.answer(self, parameters))
        return self._json(request, answer)

    def _wrong_method(self, allowed: str) -> Response:
        wrong = error_response(405, f"method not allowed, expected {allowed}")
        wrong.headers.append(("Allow", allowed))
        return wrong

    def _run_with_limit(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or raise if it is late. Late work continues in one of few threads."""
        if not self._overdue.acquire(blocking=False):
            raise ServerBusyError("earlier requests are still running; try again later")
        self._overdue.release()
        answers: list[Any] = []
        late = threading.Event()
        done = threading.Event()

        def run() -> None:
            try:
                answers.append((work(), None))
            except BaseException as error:
                answers.append((None, error))
            with lock:
                done.set()
                if late.is_set():
                    self._overdue.release()

        lock = threading.Lock()
        threading.Thread(target=run, daemon=True).start()
        if not done.wait(self.seconds):
            with lock:
                if not done.is_set() and self._overdue.acquire(blocking=False):
                    late.set()
            raise QueryTimeoutError(f"the request took longer than {self.seconds:g} seconds")
        value, error = answers[0]
        if error is not None:
            raise error
        return value

    # --- responses ----------------------------------------------------------------------------------------------

    def _json(self, request: Request, answer: Json) -> Response:
        body = as_json(answer)
        more = [("Vary", "Accept-Encoding")]
        accepted = ",".join(request.all("accept-encoding")).lower()
        if len(body) >= _GZIP_MIN_BYTES and re.search(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", accepted):
            body = gzip.compress(body, 1, mtime=0)
            more.append(("Content-Encoding", "gzip"))
        return create_response(200, body, "application/json", *more)

    def _cached(
        self, request: Request, body: bytes, kind: str, tag: str, keep: str = "no-cache", policy: str = PAGE_POLICY
    ) -> Response:
        """Create a response that a browser may cache and revalidate by `tag`."""
        more = (("ETag", f'"{tag}"'), ("Cache-Control", keep))
        tags = {entry.strip().removeprefix("W/") for line in request.all("if-none-match") for entry in line.split(",")}
        if f'"{tag}"' in tags:
            return create_response(304, b"", kind, *more, policy=policy)
        return create_response(200, body, kind, *more, policy=policy)

    def _static_file(self, path: str) -> html_export.Asset | None:
        if path == "/":
            return html_export.load_assets()["index.html"]
        return html_export.load_assets().get(path.removeprefix("/static/")) if path.startswith("/static/") else None

    def _frame(self, request: Request) -> Response:
        uids = [value for name, value in request.query if name == "uid"]
        if len(uids) != len(request.query) or not 1 <= len(uids) <= MAX_UIDS:
            raise ValueError(f"uid: got {len(uids)} uids, expected 1 to {MAX_UIDS} and no other parameter")
        if len(set(uids)) != len(uids):
            raise ValueError("uid: got the same uid twice")

        frame = self._run_with_limit(lambda: encode(self.source.trajectories(uids)))
        # The tag is a hash of the content, so any change of a record changes it.
        tag = hashlib.blake2b(frame, digest_size=16).hexdigest()
        return self._cached(request, frame, "application/octet-stream", tag, "private, no-cache")

    def _media(self, request: Request, sha256: str) -> Response:
        image = self._run_with_limit(lambda: self.source.media(sha256))
        if image is None:
            raise KeyError("unknown image")
        content, _ = image
        kind = image_type(content)
        keep = "private, max-age=86400, immutable"
        if kind is None:
            answer = self._cached(request, content, "application/octet-stream", sha256, keep, MEDIA_POLICY)
            answer.headers.append(("Content-Disposition", f'attachment; filename="{sha256[:16]}.bin"'))
            return answer
        return self._cached(request, content, kind, sha256, keep, MEDIA_POLICY)

    def _events(self, request: Request) -> Response:
        since = [value for value in request.all("last-event-id") if re.fullmatch("[0-9]{1,18}", value)]
        cursor = int(since[0]) if since else self.answers.index.cursor
        if not self._streams.acquire(blocking=False):
            raise ServerBusyError(f"{_MAX_STREAMS} pages are already connected; close one")
        return create_response(200, Stream(self, cursor, self._streams.release), "text/event-stream")

    # --- other answers ------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Return the run's summary with the features of this server."""
        summary = dict(self.answers.run())
        summary["features"] = {**summary["features"], "export": True, "annotate": self.annotations is not None}
        return summary

    def history(self, uid: str) -> dict[str, Any]:
        """Return the ledger's entries of a record."""
        entries = self.source.history(uid)
        if entries is None:
            raise ValueError("saved rollouts have no ledger")
        return {"entries": entries}

    def notes(self) -> dict[str, Any]:
        """Return stars and notes by uid."""
        return {} if self.annotations is None else self.annotations.all()

    # --- POST ---------------------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Response:
        done = create_response(204, b"", "application/json")
        if self.guard.token is not None:
            done.headers.append(("Set-Cookie", self.guard.session(request)))
        return done

    def _sql(self, request: Request) -> Response:
        request_body = parse_body(request, {"query": str, "rows": int, "format": str}, ("query",))
        kind = request_body.pop("format", "json")
        if kind not in ("json", "csv"):
            raise ValueError(f"format: got {kind[:40]!r}, expected json or csv")
        begun = time.perf_counter()
        answer = self.workers.sql(request_body["query"], seconds=self.seconds, rows=request_body.get("rows", 1000))
        if kind == "csv":
            body = format_csv(answer["columns"], answer["rows"])
            return create_response(200, body, "text/csv; charset=utf-8", attachment_header("rollbook.csv"))
        return self._json(request, {**answer, "milliseconds": round((time.perf_counter() - begun) * 1000, 1)})

    def _export(self, request: Request) -> Response:
        kinds = {
            "uids": list,
            "gid": str,
            "filter": str,
            "title": str,
            "redact": (str, list),
            "images": bool,
            "theme": str,
        }
        body = parse_body(request, kinds, ())
        page = self._run_with_limit(
            lambda: html_export.export_html(self.source, self.answers, workers=self.workers, **body)
        )
        kind = "text/html; charset=utf-8"
        return create_response(200, page.content, kind, attachment_header(page.name), policy=MEDIA_POLICY)

    def _annotate(self, request: Request) -> Response:
        if self.annotations is None:
            return error_response(403, "read-only viewer; start it with --annotate to save stars and notes")
        body = parse_body(request, {"uid": str, "star": bool, "note": str}, ("uid",))
        self.answers.neighbors(body["uid"])  # raises KeyError for an unknown record
        return self._json(request, self.annotations.set(**body))


class Stream:
    """Server-sent events of changes after a cursor, as an iterator.

    An empty piece lets the server check whether the client is still connected. A stream occupies one of the available
    slots until it is closed.
    """

    def __init__(self, api: Api, cursor: int, release: Callable[[], None]) -> None:
        self.api = api
        self.cursor = cursor
        self._release: Callable[[], None] | None = release
        self._sent_at = 0.0
        self._lock = threading.Lock()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> bytes:
        api = self.api
        if api.closing.is_set() or self._release is None:
            raise StopIteration
        now = time.monotonic()
        if not self._sent_at:
            self._sent_at = now
            return b"retry: 3000\n\n"
        if now - self._sent_at < _POLL_SECONDS:
            # Batch small changes.
            api.closing.wait(_POLL_SECONDS - (now - self._sent_at))
        if api.answers.index.wait(self.cursor, _POLL_SECONDS, api.closing.is_set):
            change = api.answers.change(self.cursor)
            self.cursor = change["cursor"]
            self._sent_at = time.monotonic()
            return b"id: %d\nevent: change\ndata: %s\n\n" % (self.cursor, as_json(change))
        if time.monotonic() - self._sent_at > _HEARTBEAT_SECONDS:
            self._sent_at = time.monotonic()
            return b": heartbeat\n\n"
        return b""

    def close(self) -> None:
        """Release the slot."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()


_MEDIA_PATH = re.compile(r"/api/media/[0-9a-f]{64}")
_POST_ROUTES: dict[str, Callable[[Api, Request], Response]] = {
    "/api/session": Api._session,
    "/api/sql": Api._sql,
    "/api/export": Api._export,
    "/api/annotate": Api._annotate,
}


def open_api(
    path: str | os.PathLike[str], guard: Guard, *, tokenizer: TokenizerLike | None = None, annotate: bool = False
) -> Api:
    """Open the run at `path`, follow it in the background, and return its API."""
    from rollbook.inspect.answers import Answers
    from rollbook.inspect.index import Index
    from rollbook.inspect.sources import Watcher, open_source

    annotations = Annotations(path) if annotate else None
    source = open_source(path, tokenizer=tokenizer, starting=True)
    index = Index()
    watcher = Watcher(source, index).start()
    workers = Workers(os.fspath(path))
    return Api(source, Answers(source, index), watcher, guard, workers=workers, annotations=annotations)
