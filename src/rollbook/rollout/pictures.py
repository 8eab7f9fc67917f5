"""Images from whatever users have: PIL images, files, addresses that need no network, bytes, arrays, tensors, mappings.

Invariant: nothing is downloaded; an image that is encoded already can be had byte for byte, and every image as pixels.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

SOURCES = ("image", "bytes", "path", "url", "image_url", "video")
"""Where a mapping, or a part of a message, may have an image or a video. Bytes come before a path: datasets of images
give both, and the path is then a name without a file."""


def source(part: Mapping[str, Any]) -> str | None:
    """Under which name a mapping has an image or a video, if it has one.

    >>> source({"type": "image", "path": "a.png"}), source({"type": "image"})
    ('path', None)
    """
    return next((name for name in SOURCES if part.get(name) is not None), None)


def encoded(name: str, given: Any) -> bytes | None:
    """The bytes of an image that comes as bytes, a file or a `data:` address, as they are; `None` of any other.

    >>> encoded("image", {"url": "data:image/png;base64,iVBORw=="})
    b'\\x89PNG'
    """
    given = _held(name, given)
    if isinstance(given, Path):
        try:
            return given.read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: got an image that cannot be read: {error}") from error
    return bytes(given) if isinstance(given, (bytes, bytearray, memoryview)) else None


def load_picture(name: str, given: Any) -> Any:
    """A PIL image of the mode that it comes in; `name` is for the error.

    >>> import numpy as np
    >>> load_picture("image", np.zeros((4, 6), np.uint8)).mode
    'L'
    >>> load_picture("image", 7)
    Traceback (most recent call last):
        ...
    ValueError: image: got int, expected a picture, a path, a file address, bytes, an array or a tensor
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: pip install 'rollbook[models]'") from error

    raw = encoded(name, given)
    given = _held(name, given) if raw is None else given
    try:
        made = given if raw is None else Image.open(io.BytesIO(raw))
        if isinstance(made, Image.Image):
            made.load()  # a file that is cut is found out here
            return made
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: got an image that cannot be read: {error}") from error
    if hasattr(given, "__array__"):
        return Image.fromarray(_pixels(name, given))
    what = f"{given[:60]!r}" if isinstance(given, str) else type(given).__name__
    raise ValueError(f"{name}: got {what}, expected a picture, a path, a file address, bytes, an array or a tensor")


def load_image(name: str, given: Any) -> Any:
    """A PIL image in RGB; of a palette or with transparency too.

    >>> import numpy as np
    >>> load_image("image", np.zeros((4, 6), np.uint8)).mode
    'RGB'
    """
    return load_picture(name, given).convert("RGB")


def _held(name: str, given: Any) -> Any:
    """What a mapping, or an address that needs no network, holds."""
    while isinstance(given, Mapping) and (key := source(given)) is not None:
        given = given[key]
    if not isinstance(given, str):
        return given
    address = urlsplit(given)
    if address.scheme == "file":
        return Path(unquote(address.path))
    if address.scheme == "data":
        head, _, data = given.partition(",")
        try:
            return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        except ValueError as error:
            raise ValueError(f"{name}: got {given[:40]!r}, expected a data: address: {error}") from None
    return given if address.scheme in ("http", "https") else Path(given)


def _pixels(name: str, given: Any) -> Any:
    """(H, W) or (H, W, C) uint8: of an array or a tensor, which may have its channels first, and floats from 0 to 1."""
    import numpy as np

    if hasattr(given, "detach"):  # a tensor, of a type that numpy may not have
        given = given.detach().cpu()
        given = given.float() if given.is_floating_point() else given
    array = np.asarray(given)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)) or not array.size:
        raise ValueError(f"{name}: got shape {list(array.shape)}, expected (height, width) and 1, 3 or 4 channels")
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):
            raise ValueError(f"{name}: got floats from {array.min():g} to {array.max():g}, expected them from 0 to 1")
        array = np.rint(array * 255)
    if array.min() < 0 or array.max() > 255:
        raise ValueError(f"{name}: got values from {array.min()} to {array.max()}, expected them from 0 to 255")
    array = array.astype(np.uint8)
    return np.ascontiguousarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)
