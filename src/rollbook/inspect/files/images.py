"""Pictures that rows of files hold or name: found, checked, and known by their hash.

Invariant: no address is ever fetched, and no file read that lies outside of the row's folder; what is kept is PNG,
JPEG, GIF or WebP by its first bytes, of bounded size, whatever the row calls it.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect.documents import Picture
from rollbook.inspect.files.limits import MAX_PICTURE, MAX_PIXELS, beside

_DATA_URL = re.compile(r"data:([\w.+-]{1,40}/[\w.+-]{1,80})?((?:;[\w.+-]{1,40}(?:=[\w.+-]{0,80})?){0,4}),")

Keep = Callable[[str, bytes, str], None]
"""Told of every picture: its sha256, its bytes, its type."""


class Where(NamedTuple):
    """What a row's place says of it."""

    root: str
    """The folder that files it names lie in."""
    evaluation: bool
    """Whether the file's name says so."""
    vocabulary: Vocabulary | None
    keep: Keep
    log: Mapping[str, Any]
    """What the file says of all its rows."""


def pictured(value: Any, seen: Mapping[str, Picture]) -> Any:
    """Messages with a picture's hash and size where its bytes stood."""
    if isinstance(value, str):
        found = seen.get(value) if seen else None
        return (
            value
            if found is None
            else {"picture": found.sha256, "mime": found.mime, "width": found.width, "height": found.height}
        )
    if isinstance(value, list):
        return [pictured(item, seen) for item in value]
    return {key: pictured(item, seen) for key, item in value.items()} if isinstance(value, dict) else value


def picture(source: Any, where: Where, notes: list[str]) -> Picture | None:
    """The picture that a data URL, base64 or a file beside holds; anything else is said in `notes`, and not fetched."""
    if isinstance(source, (bytes, bytearray)):
        return kept(bytes(source), where, notes)
    if not isinstance(source, str):
        notes.append("A picture without content is left out.")
        return None
    if source.startswith("data:"):
        head = _DATA_URL.match(source)
        if head is None or ";base64" not in head[0]:
            notes.append("A picture in a data URL that is not base64 is left out.")
            return None
        return _from_base64(source[head.end() :], where, notes)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", source):
        notes.append("A picture at another address is not fetched.")
        return None
    path = beside(where.root, source)
    if path is not None:
        with open(path, "rb") as file:
            return kept(file.read(MAX_PICTURE + 1), where, notes)
    if len(source) > 256:
        return _from_base64(source, where, notes)
    notes.append("A picture that is named by a path is not there.")
    return None


def _from_base64(text: str, where: Where, notes: list[str]) -> Picture | None:
    if len(text) > MAX_PICTURE * 4 // 3 + 4:
        notes.append(f"A picture of more than {MAX_PICTURE} bytes is left out.")
        return None
    try:
        return kept(binascii.a2b_base64(text), where, notes)
    except (binascii.Error, ValueError):
        notes.append("A picture whose base64 is damaged is left out.")
        return None


def kept(data: bytes, where: Where, notes: list[str]) -> Picture | None:
    """A picture of these bytes, if they are one of a kind that browsers show safely."""
    if len(data) > MAX_PICTURE:
        notes.append(f"A picture of more than {MAX_PICTURE} bytes is left out.")
        return None
    kind = sniff(data)
    if kind is None:
        notes.append("A picture that is no PNG, JPEG, GIF or WebP is left out.")
        return None
    mime, width, height = kind
    if (width or 0) * (height or 0) > MAX_PIXELS:
        notes.append(f"A picture of {width} by {height} points is left out.")
        return None
    name = sha256(data).hexdigest()
    where.keep(name, data, mime)
    return Picture(name, mime, width, height)


def sniff(data: bytes) -> tuple[str, int | None, int | None] | None:
    """The type, width and height of a picture, by its first bytes.

    >>> sniff(b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR\\0\\0\\0\\x02\\0\\0\\0\\x03")
    ('image/png', 2, 3)
    >>> sniff(b"<svg onload=alert(1)>")
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        return "image/png", int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        return "image/gif", int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp", *_webp(data)
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg", *_jpeg(data)
    return None


def _webp(data: bytes) -> tuple[int | None, int | None]:
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8 " and len(data) >= 30:
        sizes = int.from_bytes(data[26:30], "little")
        return sizes & 0x3FFF, sizes >> 16 & 0x3FFF
    if kind == b"VP8L" and len(data) >= 25:
        sizes = int.from_bytes(data[21:25], "little")
        return (sizes & 0x3FFF) + 1, (sizes >> 14 & 0x3FFF) + 1
    return None, None


def _jpeg(data: bytes) -> tuple[int | None, int | None]:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 + max(size, 2)
    return None, None
