"""What passes between a server and the viewer: requests, responses with the headers that all have, and parameters.

Invariant: a response has the headers that keep a page from running what it shows, whoever makes it; JSON is strict; a
parameter or a field that is not known is an error, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from rollbook.inspect.files.images import sniff
from rollbook.inspect.pictures import MOST_PIXELS
from rollbook.inspect.plain import plain, text

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


def as_json(value: Any) -> bytes:
    """Strict JSON: what is no finite number is null, and a lone surrogate is U+FFFD.

    >>> as_json({"reward": float("nan"), "text": "\\ud800"}).decode()
    '{"reward":null,"text":"�"}'
    """
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        return orjson.dumps(plain(value))


def image_type(content: bytes) -> str | None:
    """The type of an image that a page may show, by its first bytes: PNG, JPEG, GIF or WebP. Nothing else is one: an
    SVG is a document that can run scripts, and one of more pixels than a browser should unpack is none either.

    >>> [image_type(content) for content in (b"GIF89a\\1\\0\\1\\0", b"GIF89a\\xff\\xff\\xff\\xff", b"<svg onload=...>")]
    ['image/gif', None, None]
    """
    found = sniff(content)
    return None if found is None or (found[1] or 0) * (found[2] or 0) > MOST_PIXELS else found[0]


# --- parameters --------------------------------------------------------------------------------------------------


def whole(name: str, given: str) -> int:
    """A whole number."""
    if re.fullmatch(r"-?[0-9]{1,18}", given) is None:
        raise ValueError(f"{name}: got {given[:40]!r}, expected a whole number")
    return int(given)


def flag(name: str, given: str) -> bool:
    """0 or 1."""
    if given not in ("0", "1"):
        raise ValueError(f"{name}: got {given[:40]!r}, expected 0 or 1")
    return given == "1"


def word(name: str, given: str) -> str:
    """Any text that is not too long."""
    if len(given) > 4096:
        raise ValueError(f"{name}: got {len(given)} characters, expected at most 4096")
    return given


def step_range(name: str, given: str) -> tuple[int, int]:
    """FIRST-LAST, or one step."""
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", given)
    if found is None:
        raise ValueError(f"{name}: got {given[:40]!r}, expected steps as FIRST-LAST")
    return int(found[1]), int(found[2] or found[1])


Reader = Callable[[str, str], Any]


def arguments(
    query: list[tuple[str, str]], known: Mapping[str, Reader], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The parameters of a question by name; one that is not known, stands twice, or is missing is an error.

    >>> arguments([("step", "137"), ("evaluation", "0")], {"step": whole, "evaluation": flag})
    {'step': 137, 'evaluation': False}
    """
    found: dict[str, Any] = {}
    for name, value in query:
        if name not in known:
            expected = ", ".join(known) or "none"
            raise ValueError(f"parameter {name[:40]!r} is not known here; expected {expected}")
        if name in found:
            raise ValueError(f"parameter {name} stands twice")
        if value:
            found[name] = known[name](name, value)
    for name in needed:
        if name not in found:
            raise ValueError(f"parameter {name} is missing")
    return found


def attachment(name: str) -> tuple[str, str]:
    """The header of what is to be saved, under a name of ours."""
    return "Content-Disposition", f'attachment; filename="{name}"'


def fields(request: Request, known: Mapping[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a posted JSON object."""
    try:
        given = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the body is expected to be a JSON object")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"field {name[:40]!r} is not known here; expected {', '.join(known)}")
        kinds = known[name] if isinstance(known[name], tuple) else (known[name],)
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}")
    for name in needed:
        if name not in given:
            raise ValueError(f"field {name} is missing")
    return given
