"""Images as base64 text for remote rewards; each distinct image is encoded once.

Invariant: only what decodes as an image is sent, and no file is opened that is named by text, which may come from a
record. An image that comes as bytes or as a `pathlib.Path` is sent byte for byte; every other is encoded from its
pixels.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable
from typing import Any, Literal

import xxhash

from rollbook.core.checks import check_choice
from rollbook.core.images import encoded, load_picture, names_file

ImageFormat = Literal["jpeg", "png"]

_SAVING: dict[str, dict[str, int]] = {"jpeg": {"quality": 95}, "png": {}}
_PLAIN = {"jpeg": ("L", "RGB"), "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
"""The kinds of pixels that a format keeps; others (a palette or transparency in a JPEG) become RGB."""


class Encoder:
    """Encodes whatever `rollbook.core.images` reads as base64 text, except for paths that are text.

    Images are remembered by object and by content as long as the encoder lives: the samples of a prompt share them.

    >>> Encoder().text("/home/me/photo.png")
    Traceback (most recent call last):
        ...
    ValueError: image: got a path or an address as text, expected the image itself or a pathlib.Path
    """

    def __init__(self, format: ImageFormat = "jpeg") -> None:
        check_choice("image_format", format, ("jpeg", "png"))
        self._format = format
        self._by_object: dict[int, tuple[Any, str]] = {}
        self._by_content: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self.encoded = 0
        """How many were encoded, rather than found again."""

    def text(self, image: Any) -> str:
        """An image's base64 text."""
        with self._lock:  # two requests may show the same image
            known = self._by_object.get(id(image))
            if known is not None:
                return known[1]
            made = self._text(image)
            self._by_object[id(image)] = (image, made)  # the object is held: its address stays its own
            return made

    def _text(self, image: Any) -> str:
        if names_file(image):
            raise ValueError("image: got a path or an address as text, expected the image itself or a pathlib.Path")
        raw = encoded("image", image)
        picture = load_picture("image", image if raw is None else raw)
        if raw is not None:
            return self._kept(raw, lambda: raw)
        if picture.mode not in _PLAIN[self._format]:
            picture = picture.convert("RGB")
        palette = bytes(picture.getpalette() or ()) + repr(picture.info.get("transparency")).encode()
        seen = f"{picture.mode} {picture.size} ".encode() + palette + picture.tobytes()
        return self._kept(seen, lambda: self._saved(picture))

    def _saved(self, picture: Any) -> bytes:
        buffer = io.BytesIO()  # one for each image: a shared one would send the first again
        picture.save(buffer, self._format.upper(), **_SAVING[self._format])
        return buffer.getvalue()

    def _kept(self, seen: bytes, data: Callable[[], bytes]) -> str:
        key = xxhash.xxh3_128_digest(seen)
        if key not in self._by_content:
            self._by_content[key] = base64.b64encode(data()).decode()
            self.encoded += 1
        return self._by_content[key]
