"""Images as base64 text, for servers: each distinct image is encoded once, and arrives as it was.

Invariant: an image that comes as bytes or as a file is sent byte for byte; every other is encoded from its own pixels.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash

from rollbook.algorithms.registry import choice

ImageFormat = Literal["jpeg", "png"]

_PLAIN = {"jpeg": ("L", "RGB"), "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
"""The kinds of pixels that a format keeps; others (a palette or transparency in a JPEG) become RGB."""


class Encoder:
    """Base64 texts of images: PIL images, paths and `file://` addresses, bytes, `data:` addresses, arrays (H, W, C),
    and {"image": ...}, {"bytes": ...}, {"path": ...} of these.

    What has been seen is known by object and by content, as long as the encoder lives: the samples of a prompt share.

    >>> encoder = Encoder()
    >>> encoder.text(b"raw"), encoder.text(b"raw") is encoder.text(b"raw")
    ('cmF3', True)
    """

    def __init__(self, format: ImageFormat = "jpeg", quality: int = 95) -> None:
        choice("image_format", format, ("jpeg", "png"))
        self._format = format
        self._quality = quality
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
        if isinstance(image, Mapping):
            key = next((name for name in ("bytes", "image", "path", "url") if image.get(name) is not None), None)
            if key is None:
                raise ValueError(
                    f"image: got a mapping with {', '.join(map(str, image))}, expected image, bytes or path"
                )
            return self._text(image[key])
        if isinstance(image, str) and image.startswith("data:"):
            head, comma, body = image.partition(",")
            if not comma or not head.endswith(";base64"):
                raise ValueError(f"image: got {head[:40]!r}, expected a data: address in base64")
            return body
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            raise ValueError(f"image: got the address {image[:80]!r}, expected the image itself: nothing is downloaded")
        if isinstance(image, (str, Path)):
            path = Path(str(image).removeprefix("file://"))
            if not path.is_file():
                raise ValueError(f"image: got {str(image)[:200]!r}, expected a file that is there")
            image = path.read_bytes()
        if isinstance(image, (bytes, bytearray, memoryview)):
            return self._kept(bytes(image), bytes(image))
        return self._of_pixels(image)

    def _of_pixels(self, image: Any) -> str:
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("images need Pillow: pip install 'rollbook[models]'") from None
        if not isinstance(image, Image.Image):
            if not hasattr(image, "__array__"):
                raise ValueError(f"image: got {type(image).__name__}, expected an image, bytes, a path or an array")
            import numpy as np

            array = np.asarray(image)
            if array.dtype != np.uint8:
                raise ValueError(f"image: got an array of {array.dtype}, expected uint8 pixels (H, W, C)")
            image = Image.fromarray(array)
        if image.mode not in _PLAIN[self._format]:
            image = image.convert("RGB")
        palette = bytes(image.getpalette() or ()) + repr(image.info.get("transparency")).encode()
        seen = f"{image.mode} {image.size} ".encode() + palette + image.tobytes()
        key = xxhash.xxh3_128_digest(seen)
        if key not in self._by_content:
            buffer = io.BytesIO()  # one for each image: a shared one would send the first again
            options = {"quality": self._quality} if self._format == "jpeg" else {}
            image.save(buffer, self._format.upper(), **options)
            return self._kept(seen, buffer.getvalue())
        return self._by_content[key]

    def _kept(self, seen: bytes, data: bytes) -> str:
        key = xxhash.xxh3_128_digest(seen)
        if key not in self._by_content:
            self._by_content[key] = base64.b64encode(data).decode()
            self.encoded += 1
        return self._by_content[key]
