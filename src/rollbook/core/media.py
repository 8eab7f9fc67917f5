"""Images and videos: a pool without duplicates, loading from all supported forms, encoding for records.

This module does not import torch: it handles tensors only if the caller has imported torch.

Invariant: `pool.keep(x)` equals x, equal content gives one object, and arguments do not change. A pool keeps only bytes
alive, which cannot be weakly referenced, until `prune`.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollbook.core.files import check_regular
from rollbook.core.freeform import same
from rollbook.core.ragged import tensor_bytes

Medium: TypeAlias = Any
"""An image or a video: a PIL image, array, tensor, bytes, path, URL or part of a message, or a list of them."""


class Pool:
    """Media by the hash of their content, without duplicates.

    Args:
        hold_bytes: Whether to deduplicate bytes, which keeps them alive until `prune`.

    >>> import torch
    >>> pool = Pool()
    >>> first = pool.keep(torch.ones(2, 3))
    >>> pool.keep(torch.ones(2, 3)) is first, pool.keep(torch.zeros(2, 3)) is first
    (True, False)
    """

    def __init__(self, hold_bytes: bool = True) -> None:
        self._objects: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._bytes: dict[Any, bytes] | None = {} if hold_bytes else None

    def keep(self, value: Medium) -> Any:
        """Return the pool's object with the same content.

        Args:
            value: A tensor, array, image or bytes, or a list or tuple of them. Others are returned unchanged.

        Returns:
            An earlier object with equal content, or a copy of `value`.
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self.keep(entry) for entry in value)
        if isinstance(value, bytes):
            return value if self._bytes is None else self._bytes.setdefault(xxhash.xxh3_128_digest(value), value)
        key = content_key(value)
        if key is None:
            return value
        existing = self._objects.get(key)
        # Compared, since the tensor may have changed after it was hashed.
        if existing is not None and same(existing, value):
            return existing
        if _is_tensor(value):
            import torch

            value = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            value = value.copy()
        self._objects[key] = value
        return value

    def prune(self, used: Iterable[Medium] = ()) -> None:
        """Drop all bytes except those in `used`."""
        alive = {id(entry) for entry in _flat(used)}
        if self._bytes is not None:
            self._bytes = {key: entry for key, entry in self._bytes.items() if id(entry) in alive}

    def __len__(self) -> int:
        return len(self._objects) + len(self._bytes or ())

    def __reduce__(self) -> Any:
        return Pool, (self._bytes is not None,)  # a copy starts empty


SHARED = Pool(hold_bytes=False)
"""The default pool. It keeps nothing alive."""


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _is_tensor(value: Medium) -> bool:
    torch = sys.modules.get("torch")  # if torch was not imported, there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def content_key(value: Medium) -> tuple[Hashable, ...] | None:
    """Return a key of type, shape and content, or `None` if the value is not a tensor, an array or a PIL image."""
    if _is_tensor(value):
        # Also for tensors on a device, although they are copied to the host: finding duplicates is worth it.
        raw = tensor_bytes(value).data
        return "tensor", str(value.dtype), value.device, tuple(value.shape), xxhash.xxh3_128_digest(raw)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return "array", str(value.dtype), value.shape, xxhash.xxh3_128_digest(raw)
    if is_picture(value):
        return "picture", value.mode, value.size, xxhash.xxh3_128_digest(value.tobytes())
    return None


def is_picture(value: Medium) -> bool:
    """Return whether a value is a PIL image."""
    module = sys.modules.get("PIL.Image")  # if PIL was not imported, there are no images
    return module is not None and isinstance(value, module.Image)


SOURCES = ("image", "bytes", "path", "url", "image_url", "video")
"""Keys under which a mapping, or a part of a message, may have an image or a video. Bytes come before a path: image
datasets have both, and the path is then the name of a file that does not exist."""
MAGIC_BYTES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
"""First bytes of the image formats that servers and browsers support."""
MAX_IMAGE_BYTES = 32 << 20
"""Largest encoded image that is stored with a record."""

_PNG_MODES = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_MAX_CACHE_BYTES, _MAX_CACHE_ENTRIES = 64 << 20, 256
_png_cache: OrderedDict[tuple[Hashable, ...], bytes] = OrderedDict()
_png_cache_lock = threading.Lock()


def source_key(part: Mapping[str, Any]) -> str | None:
    """Return the key under which a mapping has an image or a video, or `None`.

    >>> source_key({"type": "image", "path": "a.png"}), source_key({"type": "image"})
    ('path', None)
    """
    return next((name for name in SOURCES if part.get(name) is not None), None)


def unwrap(image: Medium) -> Any:
    """Return the image or video in a mapping; any other value unchanged.

    >>> unwrap({"type": "image_url", "image_url": {"url": "a.png"}})
    'a.png'
    """
    while isinstance(image, Mapping) and (key := source_key(image)) is not None:
        image = image[key]
    return image


def names_file(image: Medium) -> bool:
    """Return whether an image is a text with a path or URL, rather than content or a `pathlib.Path`.

    Text in a record comes from the record's author and is never opened. A `Path` can only come from code, or from a
    data file that restricts its paths to its own folder.

    >>> names_file("a.png"), names_file({"url": "file:///a.png"}), names_file("data:image/png;base64,AA=="), names_file(b"")
    (True, True, False, False)
    """  # noqa: E501
    content = unwrap(image)
    return isinstance(content, str) and not content.startswith("data:")


def as_path(image: Medium) -> Any:
    """Turn a prompt's image that is named by text into a `Path`, so that it may be opened; return any other unchanged.

    >>> as_path({"path": "/a.png"}), as_path("file:///a.png") == Path("/a.png"), as_path("https://host/a.png")
    (PosixPath('/a.png'), True, 'https://host/a.png')
    """
    return _resolve("image", image) if names_file(image) else image


def read_encoded(name: str, image: Medium) -> bytes | None:
    """Read the encoded bytes of an image.

    Args:
        name: Name of the argument, for errors.
        image: Bytes, a path, or a `data:` or `file:` URL, or a mapping with one.

    Returns:
        The bytes as they are; `None` for any other form.

    Raises:
        ValueError: The image cannot be read.

    >>> read_encoded("image", {"url": "data:image/png;base64,iVBORw=="})
    b'\\x89PNG'
    """
    image = _resolve(name, image)
    if isinstance(image, Path):
        check_regular(image)
        try:
            return image.read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: got an image that cannot be read: {error}") from error
    return bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None


def load_picture(name: str, image: Medium) -> Any:
    """Load a PIL image, in its own mode.

    Args:
        name: Name of the argument, for errors.
        image: A PIL image, path, `file:` or `data:` URL, bytes, array [H, W], [H, W, C] or [C, H, W], or tensor.

    Returns:
        The image.

    Raises:
        ValueError: The image cannot be read.

    >>> import numpy as np
    >>> load_picture("image", np.zeros((4, 6), np.uint8)).mode
    'L'
    >>> load_picture("image", 7)
    Traceback (most recent call last):
        ...
    ValueError: image: got int, expected an image, a path, a file URL, bytes, an array or a tensor
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: install the extra 'models' of Rollbook") from error

    raw = read_encoded(name, image)
    image = _resolve(name, image) if raw is None else image
    try:
        picture = image if raw is None else Image.open(io.BytesIO(raw))
        if isinstance(picture, Image.Image):
            if picture.format == "EPS":  # a program, which Pillow would run in Ghostscript
                raise ValueError(f"{name}: got an EPS file, expected an image of pixels")
            picture.load()  # raises if the file is truncated
            return picture
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: got an image that cannot be read: {error}") from error
    if hasattr(image, "__array__"):
        return Image.fromarray(_pixels(name, image))
    description = f"{image[:60]!r}" if isinstance(image, str) else type(image).__name__
    raise ValueError(f"{name}: got {description}, expected an image, a path, a file URL, bytes, an array or a tensor")


def load_image(name: str, image: Medium) -> Any:
    """Load a PIL image and convert it to RGB. For the arguments, see `load_picture`.

    >>> import numpy as np
    >>> load_image("image", np.zeros((4, 6), np.uint8)).mode
    'RGB'
    """
    return load_picture(name, image).convert("RGB")


def pixels_key(image: Medium) -> tuple[Hashable, ...]:
    """Return a key of the pixels and colors of a PIL image.

    >>> from PIL import Image
    >>> pixels_key(Image.new("L", (2, 2), 7)) == pixels_key(Image.new("L", (2, 2), 7))
    True
    """
    palette = bytes(image.getpalette() or ()) if image.mode in ("P", "PA") else b""
    return content_key(image), palette, repr(image.info.get("transparency"))


def encode_for_record(images: Sequence[Any]) -> list[bytes | str | None]:
    """Encode images for a record: PNG, JPEG, GIF and WebP files byte for byte, every other image as PNG.

    Recently encoded images are cached, since the samples of a prompt share their images.

    Args:
        images: Images in any form.

    Returns:
        One entry per image. A network address is kept as text. An image that cannot be read, or takes more than
        `MAX_IMAGE_BYTES`, becomes its path, or `None` if it has none. Processed media (mappings of tensors) are left
        out.

    >>> import numpy as np
    >>> encoded = encode_for_record([np.zeros((4, 6), np.uint8), b"GIF89a...", "https://host/cat.png", "no.png", 7])
    >>> encoded[0][:4], encoded[1:]
    (b'\\x89PNG', [b'GIF89a...', 'https://host/cat.png', 'no.png', None])
    """
    return [_encode_image(image) for image in images if not isinstance(image, Mapping) or source_key(image) is not None]


def _encode_image(image: Medium) -> bytes | str | None:
    content = unwrap(image)
    text = os.fspath(content) if isinstance(content, (str, os.PathLike)) else None
    path = text if isinstance(text, str) and not text.startswith("data:") else None
    if path is not None and path.startswith(("http://", "https://")):
        return path
    try:
        raw = read_encoded("image", image)
        if raw is None or (len(raw) <= MAX_IMAGE_BYTES and data_url(raw[:16]) is None):
            raw = _encode_png(load_picture("image", image if raw is None else raw))
    except (ImportError, OSError, ValueError):  # reported where the image is passed to a model
        return path
    return raw if len(raw) <= MAX_IMAGE_BYTES else path


def _encode_png(image: Medium) -> bytes:
    """Encode the pixels of a PIL image as PNG, without color profile and metadata."""
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    key = pixels_key(image)
    with _png_cache_lock:
        encoded = _png_cache.get(key)
        if encoded is not None:
            _png_cache.move_to_end(key)
            return encoded
    buffer = io.BytesIO()
    image.save(buffer, "PNG", icc_profile=None, exif=b"")
    encoded = buffer.getvalue()
    with _png_cache_lock:
        _png_cache[key] = encoded
        while len(_png_cache) > _MAX_CACHE_ENTRIES or sum(map(len, _png_cache.values())) > _MAX_CACHE_BYTES:
            _png_cache.popitem(last=False)
    return encoded


def data_url(raw: bytes) -> str | None:
    """Return an encoded image as a `data:` URL, or `None` if browsers do not support its format.

    >>> data_url(b"GIF8")
    'data:image/gif;base64,R0lGOA=='
    """
    kind = next((kind for kind, mark in MAGIC_BYTES.items() if raw.startswith(mark)), None)
    return None if kind is None else f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def encode_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a chat message for a record: images in its parts, and those given by path, become `data:` URLs.

    >>> encode_message({"role": "user", "content": [{"type": "image", "image": b"GIF8"}, {"type": "text", "text": "what?"}]})
    {'role': 'user', 'content': [{'type': 'image', 'image': 'data:image/gif;base64,R0lGOA=='}, {'type': 'text', 'text': 'what?'}]}
    """  # noqa: E501
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": [_encode_part(part) if isinstance(part, Mapping) else part for part in content]}


def _encode_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    key = source_key(part) if part.get("type") in ("image", "image_url") else None
    content = unwrap(part)
    if key is None or (isinstance(content, str) and content.startswith(("data:", "http://", "https://"))):
        return part
    encoded = _encode_image(content)
    url = data_url(encoded) if isinstance(encoded, bytes) else encoded
    nested = key == "image_url" and isinstance(part[key], Mapping)  # the form of servers: {"url": ..., "detail": ...}
    return {**part, key: {**part[key], "url": url} if nested else url}


def _resolve(name: str, image: Medium) -> Any:
    """Return the content of a mapping, or of a URL that needs no network; a path as `Path`."""
    image = unwrap(image)
    if not isinstance(image, str):
        return image
    url = urlsplit(image)
    if url.scheme == "file":
        return Path(unquote(url.path))
    if url.scheme == "data":
        head, _, data = image.partition(",")
        try:
            return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        except ValueError as error:
            raise ValueError(f"{name}: got {image[:40]!r}, expected a data: URL: {error}") from None
    return image if url.scheme in ("http", "https") else Path(image)


def _pixels(name: str, image: Medium) -> NDArray[np.uint8]:
    """Convert an array or a tensor, with channels first or last, of bytes or floats in [0, 1].

    Returns:
        [H, W] or [H, W, C].
    """
    if hasattr(image, "detach"):  # a tensor, possibly of a type that numpy does not have
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    array = np.asarray(image)
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
