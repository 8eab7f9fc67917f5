"""Chats as servers take them: plain messages with each prompt's own images and videos inside.

Invariant: every image of a prompt stands in its messages exactly once, in its order, and none of another prompt does.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.core.files import check_regular
from rollbook.core.images import MARKS, data_url, inner, load_image, load_picture, source
from rollbook.core.sampling import Prompt

_VIDEO = re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI |OggS|FLV\x01|\0\0\x01[\xba\xb3]|G.{187}G", re.DOTALL)
"""The first bytes of MP4 and MOV, WebM and Matroska, AVI, Ogg, Flash and MPEG (program stream, video, transport)."""
_PAYLOAD = re.compile(r"(data:[\w./+-]+;base64,)?[A-Za-z0-9+/=_-]{120,}")


def chat_messages(prompt: Prompt, allow_urls: bool = False) -> list[dict[str, Any]]:
    """A prompt's messages, ready for JSON, with its media as `data:` URLs.

    Parts `{"type": "image"}` (and `"video"`) say where they go, in order; without any, all stand before the text of
    the last user message. A part may also hold its own: `{"type": "image", "image": picture}`. Images are PIL images,
    encoded bytes, arrays (height, width, 3) of bytes, paths, `data:` URLs, or a mapping with one of them under
    `image`, `path`, `url` or `bytes`. `http` URLs, which the server would fetch, are refused unless `allow_urls`.

    >>> chat_messages(Prompt(messages=[{"role": "user", "content": "hi"}]))
    [{'role': 'user', 'content': 'hi'}]
    >>> pictured = Prompt(messages=[{"role": "user", "content": "what?"}], images=["data:image/png;base64,AA=="])
    >>> [part["type"] for part in chat_messages(pictured)[0]["content"]]
    ['image_url', 'text']
    """
    messages = [dict(message) for message in prompt.messages or ()]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str):
            message["content"] = [_filled(f"prompt.messages[{i}]", part, allow_urls) for part in message["content"]]
    for kind, media, encode in (("image", prompt.images, image_url), ("video", prompt.videos, video_url)):
        urls = [encode(f"prompt.{kind}s[{i}]", one, allow_urls) for i, one in enumerate(media)]
        _put(messages, kind, urls)
    return messages


def shows(prompt: Prompt) -> bool:
    """Whether parts of a prompt's messages are something else than text.

    >>> shows(Prompt(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]))
    False
    """
    contents = [message.get("content") for message in prompt.messages or ()]
    return any(part.get("type") != "text" for parts in contents if isinstance(parts, (list, tuple)) for part in parts)


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _filled(name: str, part: Mapping[str, Any], allow_urls: bool) -> dict[str, Any]:
    """A message's part, with the image that it holds itself, if any, as a URL; the URLs that it has are checked."""
    for kind, encode in (("image", image_url), ("video", video_url)):
        if part.get("type") == kind and source(part) is not None:
            return _part(kind, encode(f"{name}.{kind}", part, allow_urls))
        held = part.get(f"{kind}_url")
        url = held.get("url") if isinstance(held, Mapping) else held
        if isinstance(url, str):
            _as_given(f"{name}.{kind}_url", url, allow_urls)
    return dict(part)


def _put(messages: list[dict[str, Any]], kind: str, urls: list[str]) -> None:
    parts = [_part(kind, url) for url in urls]
    places = [
        (message["content"], i)
        for message in messages
        if isinstance(message.get("content"), list)
        for i, part in enumerate(message["content"])
        if part.get("type") == kind
    ]
    if places and len(places) != len(parts):
        raise ValueError(f"prompt.{kind}s: got {len(parts)}, expected {len(places)}, one for each place in the chat")
    if places:
        for (content, i), part in zip(places, parts, strict=True):
            content[i] = part
    elif parts:
        asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
        if asked is None:
            raise ValueError(f"prompt.{kind}s: got {len(parts)}, but there is no user message to put them in")
        content = asked.get("content") or []
        asked["content"] = parts + ([{"type": "text", "text": content}] if isinstance(content, str) else content)


def image_url(name: str, image: Any, allow_urls: bool = False) -> str:
    """Encode an image as a `data:` URL; a PIL image as PNG, palettes and alpha turned into RGB.

    Raises:
        ValueError: The bytes, or those of the file, cannot be decoded as an image.

    >>> from PIL import Image
    >>> image_url("image", Image.new("L", (1, 1)))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    image = inner(image)
    if hasattr(image, "convert") or hasattr(image, "__array__"):  # a PIL image; an array or a tensor
        made = io.BytesIO()
        load_image(name, image).save(made, "PNG")
        return _data("image/png", made.getvalue())
    if isinstance(image, str) and image.startswith(("data:", "http://", "https://")):
        return _as_given(name, image, allow_urls)
    raw = _bytes(name, image, "a PIL image, bytes, a path or a data: URL")
    made_of = data_url(raw)
    if made_of is None:
        raise ValueError(f"{name}: got bytes that begin with {raw[:8]!r}, expected a {', '.join(MARKS)} file")
    load_picture(name, raw)
    return made_of


def video_url(name: str, video: Any, allow_urls: bool = False) -> str:
    """Encode a video file as a `data:` URL.

    Raises:
        ValueError: The file does not begin like a video.

    >>> video_url("video", bytes(4) + b"ftyp")
    'data:video/mp4;base64,AAAAAGZ0eXA='
    """
    video = inner(video)
    if isinstance(video, str) and video.startswith(("data:", "http://", "https://")):
        return _as_given(name, video, allow_urls)
    raw = _bytes(name, video, "a video file's bytes, a path or a data: URL")
    if not _VIDEO.match(raw):
        raise ValueError(f"{name}: got bytes that begin with {raw[:8]!r}, expected an MP4, WebM, AVI, Ogg or MPEG file")
    return _data("video/mp4", raw)


def scrubbed(text: str, secrets: Sequence[str] = (), most: int = 500) -> str:
    """A server's words, fit for a record: no secret, no media payload, and not long.

    >>> scrubbed("no image data:image/png;base64," + "A" * 5000 + " for key-1", ["key-1"])
    'no image [payload] for [secret]'
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "[secret]")
    text = _PAYLOAD.sub("[payload]", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _bytes(name: str, given: Any, expected: str) -> bytes:
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    if isinstance(given, (str, os.PathLike)):
        check_regular(given)
        try:
            return Path(given).read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: cannot read {str(given)[:200]!r}: {error.strerror or error}") from None
    raise ValueError(f"{name}: got {type(given).__name__}, expected {expected}")


def _data(kind: str, raw: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _as_given(name: str, url: str, allow_urls: bool) -> str:
    if url.startswith("data:") or (allow_urls and url.startswith(("http://", "https://"))):
        return url
    if allow_urls:
        raise ValueError(f"{name}: got {url[:80]!r}, expected a data:, http:// or https:// URL")
    raise ValueError(f"{name}: got a URL that the server would fetch, expected the image, or allow_urls=True")
