"""Images from whatever users have: PIL images, files, addresses that need no network, bytes, arrays, tensors, mappings.

Invariant: nothing is downloaded; an image that is encoded already can be had byte for byte, and every image as pixels.
No image that is given is changed.
"""

from __future__ import annotations

import base64
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from rollbook.core.files import check_regular

SOURCES = ("image", "bytes", "path", "url", "image_url", "video")
"""Where a mapping, or a part of a message, may have an image or a video. Bytes come before a path: datasets of images
give both, and the path is then a name without a file."""
MARKS = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
"""How the files begin that servers and browsers take."""
MOST = 32 << 20
"""Bytes of a picture that is kept with a record, which is as much as pages show."""

_PNG_MODES = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_PNGS_HELD, _PNGS_KNOWN = 64 << 20, 256
_pngs: OrderedDict[Any, bytes] = OrderedDict()
_lock = threading.Lock()


def source(part: Mapping[str, Any]) -> str | None:
    """Under which name a mapping has an image or a video, if it has one.

    >>> source({"type": "image", "path": "a.png"}), source({"type": "image"})
    ('path', None)
    """
    return next((name for name in SOURCES if part.get(name) is not None), None)


def inner(given: Any) -> Any:
    """What a mapping holds, else what was given.

    >>> inner({"type": "image_url", "image_url": {"url": "a.png"}})
    'a.png'
    """
    while isinstance(given, Mapping) and (key := source(given)) is not None:
        given = given[key]
    return given


def names_file(given: Any) -> bool:
    """Whether an image is given as text that is a path or an address, not as its content.

    A record holds such text from whoever wrote the record, so nothing opens it. A `pathlib.Path` can only come from
    code, or from a data file that confines its paths to its own folder.

    >>> names_file("a.png"), names_file({"url": "file:///a.png"}), names_file("data:image/png;base64,AA=="), names_file(b"")
    (True, True, False, False)
    """  # noqa: E501
    content = inner(given)
    return isinstance(content, str) and not content.startswith("data:")


def as_path(given: Any) -> Any:
    """Turn a prompt's image that is named by text into a `Path`, so that it may be opened; return any other unchanged.

    >>> as_path({"path": "/a.png"}), as_path("file:///a.png") == Path("/a.png"), as_path("https://host/a.png")
    (PosixPath('/a.png'), True, 'https://host/a.png')
    """
    return _held("image", given) if names_file(given) else given


def encoded(name: str, given: Any) -> bytes | None:
    """The bytes of an image that comes as bytes, a file or a `data:` address, as they are; `None` of any other.

    >>> encoded("image", {"url": "data:image/png;base64,iVBORw=="})
    b'\\x89PNG'
    """
    given = _held(name, given)
    if isinstance(given, Path):
        check_regular(given)
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
            if made.format == "EPS":  # a program, which Pillow has Ghostscript run
                raise ValueError(f"{name}: got an EPS file, expected an image of pixels")
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


def pixels_key(image: Any) -> Any:
    """What a PIL image shows, by which its equal is known again: its pixels and their colours.

    >>> from PIL import Image
    >>> pixels_key(Image.new("L", (2, 2), 7)) == pixels_key(Image.new("L", (2, 2), 7))
    True
    """
    from rollbook.core.media import content_key

    palette = bytes(image.getpalette() or ()) if image.mode in ("P", "PA") else b""
    return content_key(image), palette, repr(image.info.get("transparency"))


def recorded(images: Sequence[Any]) -> list[bytes | str | None]:
    """Images as a record keeps them, an entry for each: PNG, JPEG, GIF and WebP files byte for byte, every other as
    PNG. An address on the network is kept as it is; of what cannot be read, or takes more than `MOST` bytes, the path
    is, and `None` if it has none. What a processor has made of images is nobody's picture, and left out.

    The runs of a prompt show the same: what was encoded lately is not encoded again.

    >>> import numpy as np
    >>> made = recorded([np.zeros((4, 6), np.uint8), b"GIF89a...", "https://host/cat.png", "no/such.png", 7])
    >>> made[0][:4], made[1:]
    (b'\\x89PNG', [b'GIF89a...', 'https://host/cat.png', 'no/such.png', None])
    """
    return [_recorded(one) for one in images if not isinstance(one, Mapping) or source(one) is not None]


def _recorded(given: Any) -> bytes | str | None:
    held = inner(given)
    named = os.fspath(held) if isinstance(held, (str, os.PathLike)) else None
    name = named if isinstance(named, str) and not named.startswith("data:") else None
    if name is not None and name.startswith(("http://", "https://")):
        return name
    try:
        raw = encoded("image", given)
        if raw is None or (len(raw) <= MOST and data_url(raw[:16]) is None):
            raw = _png(load_picture("image", given if raw is None else raw))
    except (ImportError, OSError, ValueError):  # whoever shows it to a model says so; there is a record of that too
        return name
    return raw if len(raw) <= MOST else name


def _png(image: Any) -> bytes:
    """A PIL image's pixels as PNG, without the profile and the notes that came with it."""
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    key = pixels_key(image)
    with _lock:
        made = _pngs.get(key)
        if made is not None:
            _pngs.move_to_end(key)
            return made
    buffer = io.BytesIO()
    image.save(buffer, "PNG", icc_profile=None, exif=b"")
    made = buffer.getvalue()
    with _lock:
        _pngs[key] = made
        while len(_pngs) > _PNGS_KNOWN or sum(map(len, _pngs.values())) > _PNGS_HELD:
            _pngs.popitem(last=False)
    return made


def data_url(raw: bytes) -> str | None:
    """A picture's file as an address that holds it; `None` of one that browsers do not take.

    >>> data_url(b"GIF8")
    'data:image/gif;base64,R0lGOA=='
    """
    kind = next((kind for kind, mark in MARKS.items() if raw.startswith(mark)), None)
    return None if kind is None else f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def told(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as a record keeps it: pictures that its parts hold, or have the path of, as `data:` addresses.

    >>> told({"role": "user", "content": [{"type": "image", "image": b"GIF8"}, {"type": "text", "text": "what?"}]})
    {'role': 'user', 'content': [{'type': 'image', 'image': 'data:image/gif;base64,R0lGOA=='}, {'type': 'text', 'text': 'what?'}]}
    """  # noqa: E501
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": [_told(part) if isinstance(part, Mapping) else part for part in content]}


def _told(part: Mapping[str, Any]) -> Mapping[str, Any]:
    key = source(part) if part.get("type") in ("image", "image_url") else None
    held = inner(part)
    if key is None or (isinstance(held, str) and held.startswith(("data:", "http://", "https://"))):
        return part
    made = _recorded(held)
    shown = data_url(made) if isinstance(made, bytes) else made
    deeper = key == "image_url" and isinstance(part[key], Mapping)  # a server's form, with a `detail` maybe
    return {**part, key: {**part[key], "url": shown} if deeper else shown}


def _held(name: str, given: Any) -> Any:
    """What a mapping, or an address that needs no network, holds."""
    given = inner(given)
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
