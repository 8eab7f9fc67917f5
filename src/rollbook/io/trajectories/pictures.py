"""Images of samples on their way to files: small copies, as PNG, each content once.

Invariant: an image that is given is never changed; equal content is one `Picture`, and one file.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.images import load_picture, pixels_key, read_encoded, source_key, unwrap

_KEPT_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA"))
"""The kinds of pixels that PNG holds and that can be made smaller; others become RGB, or RGBA."""
_ORIENTATION = 0x0112
"""EXIF's number for which way up an image is."""
_REMEMBERED = 256
"""So many images of earlier saves are known again without being encoded."""


@dataclass
class Picture:
    """An image as PNG."""

    sha256: str
    png: bytes
    width: int
    height: int


class Pictures:
    """Makes pictures of whatever users give as images (see `rollbook.core.images`).

    >>> from PIL import Image
    >>> given = Image.new("RGB", (1024, 600))
    >>> pictures = Pictures(512)
    >>> made = pictures.of(given)
    >>> (made.width, made.height), given.size, pictures.of(given.copy()) is made
    ((512, 300), (1024, 600), True)
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._by_content: OrderedDict[Any, Picture] = OrderedDict()

    def of(self, given: Any) -> Picture:
        """The picture of an image; `ValueError` for what is none, or cannot be read."""
        raw = read_encoded("image", given)
        image = None if raw is not None else load_picture("image", given)
        key: Any = hashlib.sha256(raw).digest() if raw is not None else _content(image)
        if key not in self._by_content:
            try:
                self._by_content[key] = self._made(load_picture("image", raw) if raw is not None else image)
            except OSError as error:
                raise ValueError(f"image: got one that cannot be written as PNG: {error}") from error
            if len(self._by_content) > _REMEMBERED:
                self._by_content.popitem(last=False)
        self._by_content.move_to_end(key)
        return self._by_content[key]

    def _made(self, image: Any) -> Picture:
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(image)  # a copy, the right way up
        if image.mode.startswith(("I", "F")):
            image = Image.fromarray(_gray(image))
        elif image.mode not in _KEPT_MODES:
            clear = image.mode in ("PA", "La", "RGBa") or "transparency" in image.info
            image = image.convert("RGBA" if clear else "RGB")
        if max(image.size) > self.max_size:
            image = image.convert("L") if image.mode == "1" else image
            image.thumbnail((self.max_size, self.max_size), Image.Resampling.LANCZOS)
        bare = Image.new(image.mode, image.size)
        bare.paste(image)  # pixels alone: no profile, comment or time of the original
        data = io.BytesIO()
        bare.save(data, "PNG")
        png = data.getvalue()
        return Picture(hashlib.sha256(png).hexdigest(), png, *image.size)


def _content(image: Any) -> Any:
    """What makes the picture of an image: its pixels, their colours, and which way up they are."""
    return pixels_key(image), image.getexif().get(_ORIENTATION)


def _gray(image: Any) -> NDArray[np.uint8]:
    """(H, W) Numbers of more than 8 bits as grey: those from 0 to 255 as they are, others from least to most."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if low < 0 or high > 255:
        values = (values - low) * (255 / max(high - low, 1e-12))
    return np.rint(values).astype(np.uint8)


def flat(given: Any) -> list[Any]:
    """The images of one sample, in order, `None` among them: of nothing, one bare image, or lists in lists.

    >>> flat(["a", [None, ["b"]]]), flat(None), flat("c")
    (['a', None, 'b'], [], ['c'])
    """
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return [one for item in given for one in (flat(item) if isinstance(item, (list, tuple)) else [item])]
    return [given]


def shown(messages: Iterable[Any] | None) -> list[Mapping[str, Any]]:
    """The parts of a conversation that have an image, in order."""
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    return [
        part
        for content in contents
        for part in (content if isinstance(content, (list, tuple)) else ())
        if isinstance(part, Mapping) and "image" in str(part.get("type", "")) and source_key(part) is not None
    ]


def remote(given: Any) -> bool:
    """Whether an image is an address on the network, which is never fetched."""
    given = unwrap(given)
    return isinstance(given, str) and given.startswith(("http://", "https://"))
