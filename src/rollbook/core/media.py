"""Images and videos: a pool that keeps equal ones once, loading from every form that users give, encoding for records.

Torch is not imported here: tensors exist only where something else imported it.

Invariant: `pool.keep(x)` equals x; equal content gives one object, and nothing of the caller's is changed. A pool keeps
nothing alive that is not used elsewhere (except bytes, which cannot be weakly referenced, until `prune`).
"""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
import xxhash

from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.files import check_regular
from rollbook.core.freeform import same
from rollbook.core.ragged import tensor_bytes

Medium: TypeAlias = Any
"""An image or a video: a PIL image, array, tensor, bytes, path, URL or part of a message, or a list of them."""


class Pool:
    """Objects by the hash of their content.

    >>> import torch
    >>> pool = Pool()
    >>> first = pool.keep(torch.ones(2, 3))
    >>> pool.keep(torch.ones(2, 3)) is first, pool.keep(torch.zeros(2, 3)) is first
    (True, False)
    """

    def __init__(self, hold_bytes: bool = True) -> None:
        self._watched: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._held: dict[Any, bytes] | None = {} if hold_bytes else None

    def keep(self, value: Medium) -> Any:
        """The object with this content: an earlier one if there is one, else a copy. Lists and tuples are kept item by
        item; paths, and what has no content of its own to hash, are given back as they are."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.keep(entry) for entry in value)
        if isinstance(value, bytes):
            return value if self._held is None else self._held.setdefault(xxhash.xxh3_128_digest(value), value)
        key = content_key(value)
        if key is None:
            return value
        known_object = self._watched.get(key)
        # Compared, not trusted: somebody may have written into the tensor since it was hashed.
        if known_object is not None and same(known_object, value):
            return known_object
        if _is_tensor(value):
            import torch

            value = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            value = value.copy()
        self._watched[key] = value
        return value

    def prune(self, used: Iterable[Any] = ()) -> None:
        """Let go of bytes that are not among `used`."""
        alive = {id(entry) for entry in _flat(used)}
        if self._held is not None:
            self._held = {key: entry for key, entry in self._held.items() if id(entry) in alive}

    def __len__(self) -> int:
        return len(self._watched) + len(self._held or ())

    def __reduce__(self) -> Any:
        return Pool, (self._held is not None,)  # what it knew is found again when it is next kept


SHARED = Pool(hold_bytes=False)
"""The pool of whoever brings none of their own; it keeps nothing alive."""


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _is_tensor(value: Medium) -> bool:
    torch = sys.modules.get("torch")  # a tensor exists only where torch was imported
    return torch is not None and isinstance(value, torch.Tensor)


def content_key(value: Medium) -> Any:
    """A hash of type, shape and content, or `None` for what is not an image in memory."""
    if _is_tensor(value):
        # On a device too: equal content is worth the way to the host.
        return "tensor", str(value.dtype), value.device, tuple(value.shape), _digest(tensor_bytes(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        return (
            "array",
            str(value.dtype),
            value.shape,
            _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8)),
        )
    if is_picture(value):
        return "picture", value.mode, value.size, _digest(value.tobytes())
    return None


def _digest(memory: Any) -> bytes:
    return xxhash.xxh3_128_digest(memory)


def is_picture(value: Medium) -> bool:
    """Whether this is a PIL image (if PIL was never imported, nothing is)."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def carries_media(holder: Medium) -> bool:
    """Whether a batch or an item has any pixels, grids, images or other media."""
    for name in _MEDIA:
        value = getattr(holder, name, None)
        if value is not None and _any_content(value):
            return True
    return False


_MEDIA = (*BATCH_MEDIA, "raw_images", "media")


def _any_content(value: Medium) -> bool:
    if isinstance(value, dict):
        return any(_any_content(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return any(_any_content(entry) for entry in value)
    if _is_tensor(value) or isinstance(value, np.ndarray):
        return bool(value.shape[0]) if value.ndim else True
    return value is not None


SOURCES = ("image", "bytes", "path", "url", "image_url", "video")
"""Where a mapping, or a part of a message, may have an image or a video. Bytes come before a path: datasets of images
give both, and the path is then a name without a file."""
MAGIC_BYTES = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
"""How the files begin that servers and browsers take."""
MAX_IMAGE_BYTES = 32 << 20
"""Bytes of a picture that is kept with a record, which is as much as pages show."""

_PNG_MODES = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_PNGS_HELD, _PNGS_KNOWN = 64 << 20, 256
_pngs: OrderedDict[Any, bytes] = OrderedDict()
_lock = threading.Lock()


def source_key(part: Mapping[str, Any]) -> str | None:
    """Under which name a mapping has an image or a video, if it has one.

    >>> source_key({"type": "image", "path": "a.png"}), source_key({"type": "image"})
    ('path', None)
    """
    return next((name for name in SOURCES if part.get(name) is not None), None)


def unwrap(image: Medium) -> Any:
    """What a mapping holds, else what was given.

    >>> unwrap({"type": "image_url", "image_url": {"url": "a.png"}})
    'a.png'
    """
    while isinstance(image, Mapping) and (key := source_key(image)) is not None:
        image = image[key]
    return image


def names_file(image: Medium) -> bool:
    """Whether an image is given as text that is a path or an address, not as its content.

    A record holds such text from whoever wrote the record, so nothing opens it. A `pathlib.Path` can only come from
    code, or from a data file that confines its paths to its own folder.

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
    """The bytes of an image that comes as bytes, a file or a `data:` address, as they are; `None` of any other.

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

    raw = read_encoded(name, image)
    image = _resolve(name, image) if raw is None else image
    try:
        picture = image if raw is None else Image.open(io.BytesIO(raw))
        if isinstance(picture, Image.Image):
            if picture.format == "EPS":  # a program, which Pillow has Ghostscript run
                raise ValueError(f"{name}: got an EPS file, expected an image of pixels")
            picture.load()  # a file that is cut is found out here
            return picture
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: got an image that cannot be read: {error}") from error
    if hasattr(image, "__array__"):
        return Image.fromarray(_pixels(name, image))
    description = f"{image[:60]!r}" if isinstance(image, str) else type(image).__name__
    raise ValueError(
        f"{name}: got {description}, expected a picture, a path, a file address, bytes, an array or a tensor"
    )


def load_image(name: str, image: Medium) -> Any:
    """A PIL image in RGB; of a palette or with transparency too.

    >>> import numpy as np
    >>> load_image("image", np.zeros((4, 6), np.uint8)).mode
    'RGB'
    """
    return load_picture(name, image).convert("RGB")


def pixels_key(image: Medium) -> Any:
    """What a PIL image shows, by which its equal is known again: its pixels and their colours.

    >>> from PIL import Image
    >>> pixels_key(Image.new("L", (2, 2), 7)) == pixels_key(Image.new("L", (2, 2), 7))
    True
    """

    palette = bytes(image.getpalette() or ()) if image.mode in ("P", "PA") else b""
    return content_key(image), palette, repr(image.info.get("transparency"))


def encode_for_record(images: Sequence[Any]) -> list[bytes | str | None]:
    """Encode images for a record: PNG, JPEG, GIF and WebP files byte for byte, every other image as PNG.

    The samples of a prompt share their images: recently encoded images are cached.

    Returns:
        One entry per image. A network address is kept as text. An image that cannot be read, or takes more than
        `MAX_IMAGE_BYTES`, becomes its path, or `None` if it has none. Processed media (mappings of tensors) are left
        out.

    >>> import numpy as np
    >>> made = encode_for_record([np.zeros((4, 6), np.uint8), b"GIF89a...", "https://host/cat.png", "no/such.png", 7])
    >>> made[0][:4], made[1:]
    (b'\\x89PNG', [b'GIF89a...', 'https://host/cat.png', 'no/such.png', None])
    """
    return [_encode_image(image) for image in images if not isinstance(image, Mapping) or source_key(image) is not None]


def _encode_image(image: Medium) -> bytes | str | None:
    content = unwrap(image)
    named = os.fspath(content) if isinstance(content, (str, os.PathLike)) else None
    name = named if isinstance(named, str) and not named.startswith("data:") else None
    if name is not None and name.startswith(("http://", "https://")):
        return name
    try:
        raw = read_encoded("image", image)
        if raw is None or (len(raw) <= MAX_IMAGE_BYTES and data_url(raw[:16]) is None):
            raw = _png(load_picture("image", image if raw is None else raw))
    except (ImportError, OSError, ValueError):  # whoever shows it to a model says so; there is a record of that too
        return name
    return raw if len(raw) <= MAX_IMAGE_BYTES else name


def _png(image: Medium) -> bytes:
    """A PIL image's pixels as PNG, without the profile and the notes that came with it."""
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    key = pixels_key(image)
    with _lock:
        encoded = _pngs.get(key)
        if encoded is not None:
            _pngs.move_to_end(key)
            return encoded
    buffer = io.BytesIO()
    image.save(buffer, "PNG", icc_profile=None, exif=b"")
    encoded = buffer.getvalue()
    with _lock:
        _pngs[key] = encoded
        while len(_pngs) > _PNGS_KNOWN or sum(map(len, _pngs.values())) > _PNGS_HELD:
            _pngs.popitem(last=False)
    return encoded


def data_url(raw: bytes) -> str | None:
    """A picture's file as an address that holds it; `None` of one that browsers do not take.

    >>> data_url(b"GIF8")
    'data:image/gif;base64,R0lGOA=='
    """
    kind = next((kind for kind, mark in MAGIC_BYTES.items() if raw.startswith(mark)), None)
    return None if kind is None else f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def encode_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as a record keeps it: pictures that its parts hold, or have the path of, as `data:` addresses.

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
    shown = data_url(encoded) if isinstance(encoded, bytes) else encoded
    deeper = key == "image_url" and isinstance(part[key], Mapping)  # a server's form, with a `detail` maybe
    return {**part, key: {**part[key], "url": shown} if deeper else shown}


def _resolve(name: str, image: Medium) -> Any:
    """What a mapping, or an address that needs no network, holds."""
    image = unwrap(image)
    if not isinstance(image, str):
        return image
    address = urlsplit(image)
    if address.scheme == "file":
        return Path(unquote(address.path))
    if address.scheme == "data":
        head, _, data = image.partition(",")
        try:
            return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        except ValueError as error:
            raise ValueError(f"{name}: got {image[:40]!r}, expected a data: address: {error}") from None
    return image if address.scheme in ("http", "https") else Path(image)


def _pixels(name: str, image: Medium) -> Any:
    """(H, W) or (H, W, C) uint8: of an array or a tensor, which may have its channels first, and floats from 0 to 1."""
    import numpy as np

    if hasattr(image, "detach"):  # a tensor, of a type that numpy may not have
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
