"""Images in records and in files: found, checked, described, and served by hash.

Invariant: nothing is fetched from a URL, and no file outside a row's folder is read. Only PNG, JPEG, GIF and WebP,
recognized by their first bytes and of bounded size, are served as images.
"""

from __future__ import annotations

import binascii
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollbook.core.vocabulary import Vocabulary
from rollbook.inspect.file_stores import MAX_PICTURE, MAX_PIXELS, resolve_path
from rollbook.inspect.trajectory import Json, Picture, Segment

# --- images of files ------------------------------------------------------------------------------------------------

_DATA_URL = re.compile(r"data:([\w.+-]{1,40}/[\w.+-]{1,80})?((?:;[\w.+-]{1,40}(?:=[\w.+-]{0,80})?){0,4}),")

StoreImage = Callable[[str, bytes, str], None]
"""Function that gets the sha256, bytes and type of every image."""


class RowContext(NamedTuple):
    """The context of a row."""

    root: str
    """Folder of the files that the row names."""
    evaluation: bool
    """Whether the file name indicates evaluation."""
    vocabulary: Vocabulary | None
    keep: StoreImage
    log: Mapping[str, Any]
    """Metadata of the file for all rows."""


def replace_images(value: Json, seen: Mapping[str, Picture]) -> Any:
    """Replace picture bytes in messages by hash and size."""
    if isinstance(value, str):
        image = seen.get(value) if seen else None
        return value if image is None else _image_json(image)
    if isinstance(value, list):
        return [replace_images(item, seen) for item in value]
    return {key: replace_images(item, seen) for key, item in value.items()} if isinstance(value, dict) else value


def _image_json(image: Picture) -> dict[str, Any]:
    return {"picture": image.sha256, "mime": image.mime, "width": image.width, "height": image.height}


def read_image(source: Json | bytes | bytearray, context: RowContext, notes: list[str]) -> Picture | None:
    """Return the picture of a data URL, base64 text or a local file; anything else is noted and not fetched."""
    if isinstance(source, (bytes, bytearray)):
        return store_image(bytes(source), context, notes)
    if not isinstance(source, str):
        notes.append("Image omitted: no content.")
        return None
    if source.startswith("data:"):
        head = _DATA_URL.match(source)
        if head is None or ";base64" not in head[0]:
            notes.append("Image omitted: data URL without base64.")
            return None
        return _from_base64(source[head.end() :], context, notes)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", source):
        notes.append("Image omitted: remote images are not fetched.")
        return None
    path = resolve_path(context.root, source)
    if path is not None:
        with open(path, "rb") as file:
            return store_image(file.read(MAX_PICTURE + 1), context, notes)
    if len(source) > 256:
        return _from_base64(source, context, notes)
    notes.append("Image omitted: file not found.")
    return None


def _from_base64(text: str, context: RowContext, notes: list[str]) -> Picture | None:
    if len(text) > MAX_PICTURE * 4 // 3 + 4:
        notes.append(f"Image omitted: more than {MAX_PICTURE} bytes.")
        return None
    try:
        return store_image(binascii.a2b_base64(text), context, notes)
    except (binascii.Error, ValueError):
        notes.append("Image omitted: invalid base64.")
        return None


def store_image(data: bytes, context: RowContext, notes: list[str]) -> Picture | None:
    """Return a picture for these bytes, if they are an image that browsers show safely."""
    if len(data) > MAX_PICTURE:
        notes.append(f"Image omitted: more than {MAX_PICTURE} bytes.")
        return None
    kind = detect_image(data)
    if kind is None:
        notes.append("Image omitted: not PNG, JPEG, GIF or WebP.")
        return None
    mime, width, height = kind
    if (width or 0) * (height or 0) > MAX_PIXELS:
        notes.append(f"Image omitted: {width}x{height} pixels are too many.")
        return None
    name = sha256(data).hexdigest()
    context.keep(name, data, mime)
    return Picture(name, mime, width, height)


def detect_image(data: bytes) -> tuple[str, int | None, int | None] | None:
    """Return type, width and height of an image from its first bytes.

    >>> detect_image(b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR\\0\\0\\0\\x02\\0\\0\\0\\x03")
    ('image/png', 2, 3)
    >>> detect_image(b"<svg onload=alert(1)>")
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


def image_type(content: bytes) -> str | None:
    """Return the type of an image that a page may show (PNG, JPEG, GIF or WebP), from its first bytes.

    SVG is rejected because it can run scripts, and images with too many pixels because browsers would unpack them.

    >>> [image_type(content) for content in (b"GIF89a\\1\\0\\1\\0", b"GIF89a\\xff\\xff\\xff\\xff", b"<svg onload=...>")]
    ['image/gif', None, None]
    """
    image = detect_image(content)
    return None if image is None or (image[1] or 0) * (image[2] or 0) > MAX_PIXELS else image[0]


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


# --- images of records ----------------------------------------------------------------------------------------------

MAX_IMAGES = 256
"""Maximum number of pictures of a record."""
CACHE_BYTES = 64 << 20
MAX_DEPTH = 64

_IMAGE_KEYS = ("data", "b64_json", "image", "url", "bytes", "image_url")
"""Keys of base64 images without a `data:` prefix."""
_BASE64_PREFIXES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Base64 prefixes of PNG, JPEG, GIF and RIFF."""
_IMAGE_TYPES = ("image", "image_url", "input_image")
_REFERENCE = re.compile(r"sha256:([0-9a-f]{64})")
_START_MARKS = re.compile(r"<\|vision_start\|>|<start_of_image>|<img>")
_IMAGE_MARKS = re.compile(r"<\|image(?:_[0-9]{1,3})?\|>|<image>|\[IMG\]")


class Reference(str):
    """A reference to bytes stored elsewhere in the book: `sha256:` and the hash."""

    __slots__ = ()


class Album:
    """The pictures of a source: a cache of inline ones, and those that `fetch` finds by hash.

    >>> album = Album()
    >>> found = album.add(b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR\\0\\0\\0\\x02\\0\\0\\0\\x03")
    >>> found.mime, found.width, album.media(found.sha256)[1]
    ('image/png', 2, 'image/png')
    >>> album.add(b"<svg onload=alert(1)>") is None
    True
    """

    def __init__(self, fetch: Callable[[str], bytes | None] = lambda _: None) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._described: dict[str, Picture | None] = {}

    def add(self, data: bytes) -> Picture | None:
        """Return a picture for these bytes, if they are an image, and cache the bytes."""
        described = _describe_image(sha256(data).hexdigest(), data)
        if described is not None:
            with self._lock:
                self._size += len(data) - len(self._cached.pop(described.sha256, b""))
                self._cached[described.sha256] = data
                while self._size > CACHE_BYTES:
                    self._size -= len(self._cached.popitem(last=False)[1])
        return described

    def lookup(self, name: str) -> Picture | None:
        """Return the picture of a hash, if there is one."""
        if name not in self._described:
            data = self._fetch(name)
            if data is None:
                return None  # it may be available later
            described = _describe_image(name, data)
            with self._lock:
                if len(self._described) >= 1 << 16:
                    self._described.clear()
                self._described[name] = described
        return self._described.get(name)

    def media(self, name: str) -> tuple[bytes, str] | None:
        """Return the bytes and type of a picture."""
        with self._lock:
            data = self._cached.get(name)
        data = self._fetch(name) if data is None else data
        described = None if data is None else _describe_image(name, data)
        return None if described is None or data is None else (data, described.mime)


def _describe_image(name: str, data: bytes) -> Picture | None:
    kind = detect_image(data) if len(data) <= MAX_PICTURE else None
    if kind is None or (kind[1] or 0) * (kind[2] or 0) > MAX_PIXELS:
        return None
    return Picture(name, *kind)


class ImageExtractor:
    """A value with each picture replaced by `{"picture": hash, ...}`, and the list of pictures."""

    def __init__(self, album: Album, references: Collection[str] = ()) -> None:
        self.album = album
        self.references = references
        self.pictures: list[Picture] = []
        self.external = 0
        """Number of images that the record has only as URLs."""

    def extract(self, value: Any, key: str = "", depth: int = MAX_DEPTH) -> Any:
        """Return `value` with images replaced, and collect the images."""
        image: Picture | None = None
        if isinstance(value, Reference):
            image = self.album.lookup(value[7:])
        elif isinstance(value, bytes):
            image = self._cached(value)
        elif isinstance(value, str):
            image = self._in_text(value, key)
        elif isinstance(value, dict) and depth > 0:
            count_before = len(self.pictures)
            shown = {name: self.extract(item, name, depth - 1) for name, item in value.items()}
            if value.get("type") in _IMAGE_TYPES and len(self.pictures) == count_before and len(value) > 1:
                self.external += 1
            return shown
        elif isinstance(value, (list, tuple)) and depth > 0:
            return [self.extract(item, key, depth - 1) for item in value]
        if image is None:
            return value
        if len(self.pictures) < MAX_IMAGES:
            self.pictures.append(replace(image))
        return _image_json(image)

    def _cached(self, data: bytes) -> Picture | None:
        return self.album.add(data) if len(self.pictures) < MAX_IMAGES else None

    def _in_text(self, text: str, key: str) -> Picture | None:
        if text.startswith("data:"):
            head, _, body = text.partition(",")
            if not head[-16:].lower().endswith(";base64"):
                return None
        elif key in _IMAGE_KEYS and text.startswith((*_BASE64_PREFIXES, "sha256:")):
            body = text
        else:
            return None
        if match := _REFERENCE.fullmatch(body):
            # Only references of the book count: text of a record can look like one.
            return self.album.lookup(match[1]) if match[1] in self.references else None
        if len(body) > MAX_PICTURE * 4 // 3 + 4:
            return None
        try:
            return self._cached(binascii.a2b_base64(body))
        except ValueError:
            return None


def locate_images(pictures: Sequence[Picture], text: str, ends: NDArray[np.int64], segments: Sequence[Segment]) -> None:
    """Set the token of each picture, if the text has as many placeholders as there are pictures.

    >>> pictures = [Picture("a" * 64, "image/png")]
    >>> ends = np.array([1, 8, 9])
    >>> locate_images(pictures, "a<image>b", ends, [Segment("user", "image", "", 1, 2, False, 0)])
    >>> pictures[0].token
    1
    """
    runs = [segment for segment in segments if segment.kind == "image"]
    if not pictures or not runs:
        return
    for pattern in (_START_MARKS, None, _IMAGE_MARKS):
        tokens: list[int] = []
        for run in runs:
            if pattern is None:
                tokens.append(run.start)
                continue
            start = int(ends[run.start - 1]) if run.start else 0
            places = [match.start() for match in pattern.finditer(text, start, int(ends[run.stop - 1]))]
            tokens += np.searchsorted(ends, places, side="right").tolist()
        if len(tokens) == len(pictures):
            for picture, token in zip(pictures, tokens, strict=True):
                picture.token = token
            return
