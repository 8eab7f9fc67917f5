"""Requests, responses, parameters and access control, shared by the viewer's servers.

Invariant: every response has the headers that keep a page from running what it shows; JSON is strict; an unknown
parameter or field is an error. A request that names no host of this server is rejected before anything else is looked
at. Nothing under /api is answered without the token (where there is one), nor to a page of another origin. Secrets are
compared in constant time, and every rule rejects what it does not know.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from rollbook.inspect.serialization import text

if TYPE_CHECKING:
    from rollbook.inspect.api import Stream


PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
MEDIA_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
_ALWAYS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


@dataclass
class Request:
    """A question. `headers`: names in lower case, in order, duplicates kept: two Hosts are not one. `path` as it came,
    without its parameters; `local`: the address that the connection came in on, as host:port."""

    method: str
    path: str
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    peer: str = ""
    local: str = ""
    scheme: str = "http"

    def all(self, name: str) -> list[str]:
        """Every value of a header; `name` in lower case."""
        return [value for key, value in self.headers if key == name]


@dataclass
class Response:
    """An answer: bytes, or a stream that its server closes."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | Stream


def respond(
    status: int, body: bytes | Stream, kind: str, *more: tuple[str, str], policy: str = PAGE_POLICY
) -> Response:
    """A response with the headers that all of them have. Nothing is kept by a browser unless `more` says so."""
    headers = [("Content-Type", kind), ("Content-Security-Policy", policy), *_ALWAYS, *more]
    if not any(name == "Cache-Control" for name, _ in more):
        headers.append(("Cache-Control", "no-store"))
    return Response(status, headers, body)


def failure(status: int, error: str) -> Response:
    """An error as pages read it: {"error": "one sentence"}."""
    return respond(status, orjson.dumps({"error": text(error)}), "application/json")


# --- parameters --------------------------------------------------------------------------------------------------


def whole(name: str, text: str) -> int:
    """A whole number."""
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise ValueError(f"{name}: got {text[:40]!r}, expected a whole number")
    return int(text)


def flag(name: str, text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise ValueError(f"{name}: got {text[:40]!r}, expected 0 or 1")
    return text == "1"


def word(name: str, text: str) -> str:
    """Any text that is not too long."""
    if len(text) > 4096:
        raise ValueError(f"{name}: got {len(text)} characters, expected at most 4096")
    return text


def step_range(name: str, text: str) -> tuple[int, int]:
    """FIRST-LAST, or one step."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if match is None:
        raise ValueError(f"{name}: got {text[:40]!r}, expected steps as FIRST-LAST")
    return int(match[1]), int(match[2] or match[1])


Reader = Callable[[str, str], Any]


def arguments(
    query: list[tuple[str, str]], readers: Mapping[str, Reader], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The parameters of a question by name; one that is not known, stands twice, or is missing is an error.

    >>> arguments([("step", "137"), ("evaluation", "0")], {"step": whole, "evaluation": flag})
    {'step': 137, 'evaluation': False}
    """
    parsed: dict[str, Any] = {}
    for name, value in query:
        if name not in readers:
            expected = ", ".join(readers) or "none"
            raise ValueError(f"parameter {name[:40]!r} is not known here; expected {expected}")
        if name in parsed:
            raise ValueError(f"parameter {name} stands twice")
        if value:
            parsed[name] = readers[name](name, value)
    for name in needed:
        if name not in parsed:
            raise ValueError(f"parameter {name} is missing")
    return parsed


def attachment(name: str) -> tuple[str, str]:
    """The header of what is to be saved, under a name of ours."""
    return "Content-Disposition", f'attachment; filename="{name}"'


def fields(request: Request, allowed: Mapping[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a posted JSON object."""
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body is expected to be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name not in allowed:
            raise ValueError(f"field {name[:40]!r} is not known here; expected {', '.join(allowed)}")
        kinds = allowed[name] if isinstance(allowed[name], tuple) else (allowed[name],)
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}")
    for name in needed:
        if name not in body:
            raise ValueError(f"field {name} is missing")
    return body


# --- access ----------------------------------------------------------------------------------------------------------

HEADER = "x-rollbook"
"""A header that a form or an image of another site cannot send; without CORS no script of one can either."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_AUTHORITY = re.compile(r"(?P<name>[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,256}")


@dataclass(frozen=True)
class Refusal:
    """Why a request is turned away; `status` is HTTP's."""

    status: int
    error: str


def new_token() -> str:
    """128 random bits, as they stand in the address.

    >>> len(new_token()), new_token() == new_token()
    (22, False)
    """
    return secrets.token_urlsafe(16)


def checked_token(token: str) -> str:
    """A token that a user chose, if it is one.

    >>> checked_token("secret")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: token: got 6 characters, expected 16 to 256 letters, digits, '-' and '_' ...
    """
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise ValueError(
            f"token: got {len(token)} characters, expected 16 to 256 letters, digits, '-' and '_' "
            "(python -c 'import secrets; print(secrets.token_urlsafe(16))' makes one)"
        )
    return token


def authorities(port: int, bound: str, trusted: Iterable[str] = ()) -> frozenset[str]:
    """What a Host header may say: loopback names, the name bound to, and trusted ones, each with its port.

    A trusted name without a port stands for itself (a proxy at the usual port) and for itself with `port`.

    >>> sorted(authorities(8420, "127.0.0.1", ["viewer.example", "localhost:9000"]))
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
    """The rules of one viewer. `token` None: nobody needs one, as the user asked.

    >>> from rollbook.inspect.http import Request
    >>> guard = Guard(authorities(8420, "127.0.0.1"), "a-token-of-16-or-more")
    >>> guard.check(Request("GET", "/", headers=[("host", "evil.example:8420")])).status
    421
    >>> guard.check(Request("GET", "/", headers=[("host", "localhost:8420")]))
    >>> guard.check(Request("GET", "/api/run", headers=[("host", "localhost:8420")])).status
    401
    """

    hosts: frozenset[str]
    token: str | None = field(repr=False)
    wildcard: bool = False
    """Bound to every address of the machine: then the address a connection came in on is a host too. A name could be
    rebound to it by whoever owns the name; an address in digits cannot."""

    def check(self, request: Request) -> Refusal | None:
        """Why this request gets no answer; None: it gets one. The order matters: the host comes first."""
        return (
            self._host(request)
            or self._origin(request)
            or self._site(request)
            or self._change(request)
            or self._credentials(request)
        )

    def cookie_name(self, request: Request) -> str:
        """The session's cookie. Browsers share cookies among the ports of a host, so the port (the one the browser
        sees, which a tunnel may change) keeps two viewers apart."""
        return "rollbook-" + (request.all("host")[0].rpartition("]")[2].partition(":")[2] or "0")

    def session(self, request: Request) -> str:
        """The Set-Cookie of who has shown the token."""
        secure = "; Secure" if request.scheme == "https" else ""
        return f"{self.cookie_name(request)}={self._session_value()}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def _session_value(self) -> str:
        # Not the token itself: a cookie that somebody copies does not open the door with other tools for ever.
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
        return Refusal(
            421, f"{shown} is not a name of this viewer; start it with --trusted-host {shown} if it should be"
        )

    def _origin(self, request: Request) -> Refusal | None:
        origins = request.all("origin")
        host = request.all("host")[0].lower()
        if not origins or (len(origins) == 1 and origins[0].lower() in (f"http://{host}", f"https://{host}")):
            return None
        return Refusal(403, "the request comes from a page of another origin")

    def _site(self, request: Request) -> Refusal | None:
        if not _guarded(request.path):
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
            return Refusal(415, "a POST is expected to have the content type application/json")
        if request.all(HEADER) != ["1"]:
            return Refusal(403, "a POST is expected to have the header X-Rollbook: 1")
        return None

    def _credentials(self, request: Request) -> Refusal | None:
        if self.token is None or not _guarded(request.path):
            return None
        for value in request.all("authorization"):
            kind, _, secret = value.partition(" ")
            if kind.lower() == "bearer" and _same(secret.strip(), self.token):
                return None
        name, expected = self.cookie_name(request), self._session_value()
        # A page of another port may have set a cookie of the same name for another path: any of them will do.
        cookies = [part.strip().partition("=") for line in request.all("cookie") for part in line.split(";")]
        if any(key == name and _same(secret, expected) for key, _, secret in cookies):
            return None
        return Refusal(401, "open the address that the server printed, with its #token=; this one is not known here")


def _guarded(path: str) -> bool:
    return path == "/api" or path.startswith("/api/")


def _same(secret: str, expected: str) -> bool:
    return hmac.compare_digest(secret.encode("utf-8", "replace"), expected.encode())


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
