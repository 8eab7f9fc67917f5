"""Segment store in an object store or a shared folder, through fsspec: one immutable object per `put`.

Invariant: an object is complete as soon as it is visible, is never overwritten, and exists when `put` returns.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rollbook.book.disk import Disk, hit_failpoint
from rollbook.book.errors import MissingSegmentError
from rollbook.book.segments.files import (
    ALIGN,
    HEADER,
    Place,
    align_parts,
    check_header,
    check_name,
    check_place,
    is_name,
    new_name,
    read_by_segment,
    read_pieces,
    read_segment,
    too_short_error,
)
from rollbook.core.addresses import redacted

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from typing_extensions import Buffer

Key = TypeVar("Key")
Value = TypeVar("Value")

CACHE_BYTES = 64 << 20
"""Size of the cache of parts that were read, so that the rows of one frame take one request."""
CACHE_NAMES = 1 << 16
"""Number of objects whose header is known to be valid."""
_HEADER_READ_BYTES = 64 << 10  # a part within these bytes is read together with the header


class _LRUCache(Generic[Key, Value]):
    """A thread-safe cache of the most recently used values, up to a total weight."""

    def __init__(self, max_weight: int) -> None:
        self.max_weight = max_weight
        self.weight = 0
        self._items: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key][0]

    def add(self, key: Key, value: Value, weight: int) -> None:
        if weight > self.max_weight:
            return
        with self._lock:
            self.weight += weight - self._items.pop(key, (value, 0))[1]
            self._items[key] = value, weight
            while self.weight > self.max_weight:
                self.weight -= self._items.popitem(last=False)[1][1]


class _FileObjects:
    """Objects as files of a folder that may be on a network: synced, and made visible by renaming.

    They are copied, not mapped: on NFS, touching the map of a file that another machine removed kills the process.
    """

    def __init__(self, folder: str, disk: Disk) -> None:
        self.folder = folder
        self.disk = disk

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.disk.make_folder(self.folder)
        self.disk.write_atomic(self._path(name), b"".join(pieces))

    def read(self, place: Place) -> memoryview:
        return read_segment(self.disk, self._path(place.segment), place, mapped=False)

    def read_many(self, places: Sequence[Place]) -> list[Buffer]:
        return read_by_segment(places, lambda segment, mine: read_pieces(self.disk, self._path(segment), mine))

    def has(self, name: str) -> bool:
        return self.disk.is_plain(self._path(name))

    def sizes(self) -> dict[str, int]:
        try:
            return self.disk.sizes(self.folder)
        except FileNotFoundError:
            return {}

    def remove(self, name: str) -> None:
        self.disk.remove(self._path(name))


class _RemoteObjects:
    """Objects of a store that fsspec reaches."""

    def __init__(self, url: str, options: Mapping[str, Any], prefix: str) -> None:
        self.url = url
        self.options = dict(options)
        self.prefix = prefix
        self._open()

    def _open(self) -> None:
        self._fs, root = _file_system(self.url, self.options)
        self.root = "/".join(filter(None, (root.rstrip("/"), self.prefix)))
        self._parts: _LRUCache[Place, bytes] = _LRUCache(CACHE_BYTES)
        self._checked: _LRUCache[str, bool] = _LRUCache(CACHE_NAMES)
        self._pid = os.getpid()

    @property
    def fs(self) -> Any:
        # A forked child cannot use the connections, event loop and locks of its parent.
        if self._pid != os.getpid():
            self._open()
        return self._fs

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        fs = self.fs
        data = b"".join(pieces)
        try:
            fs.pipe_file(self._path(name), data, mode="create")
        except FileNotFoundError:
            # Object stores have no folders; other servers need them created.
            fs.makedirs(self.root, exist_ok=True)
            fs.pipe_file(self._path(name), data, mode="create")

    def _bytes(self, fs: AbstractFileSystem, place: Place, start: int, stop: int) -> bytes:
        try:
            data: bytes = fs.cat_file(self._path(place.segment), start=start, end=stop)
        except FileNotFoundError:
            raise MissingSegmentError(place.segment) from None
        return data

    def read(self, place: Place) -> memoryview:
        fs = self.fs
        cached = self._parts.get(place)
        if cached is None:
            checked = self._checked.get(place.segment) is not None
            start = place.offset if checked or place.offset > _HEADER_READ_BYTES else 0
            data = self._bytes(fs, place, start, place.stop) if place.length or not checked else b""
            if not checked:
                check_header(data[:ALIGN] if not start else self._bytes(fs, place, 0, ALIGN), place.segment)
                self._checked.add(place.segment, True, 1)
            if start + len(data) < place.stop:
                raise too_short_error(place, start + len(data))
            cached = data[place.offset - start :]
            self._parts.add(place, cached, len(cached))
        return np.frombuffer(cached, dtype=np.uint8).copy().data

    def read_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Request all ranges at once, with the header of each object that was not checked yet."""
        fs = self.fs
        unchecked = [
            Place(segment, 0, ALIGN)
            for segment in dict.fromkeys(place.segment for place in places)
            if self._checked.get(segment) is None
        ]
        ranges = [*unchecked, *(place for place in places if place.length)]
        try:
            data: list[Any] = fs.cat_ranges(
                [self._path(place.segment) for place in ranges],
                [place.offset for place in ranges],
                [place.stop for place in ranges],
                on_error="return",
            )
        except FileNotFoundError as error:
            raise MissingSegmentError(ranges[0].segment) from error
        for place, piece in zip(ranges, data, strict=True):
            if isinstance(piece, FileNotFoundError):
                raise MissingSegmentError(place.segment) from None
            if isinstance(piece, BaseException):
                raise piece
        for place, piece in zip(unchecked, data, strict=False):
            check_header(bytes(piece), place.segment)
            self._checked.add(place.segment, True, 1)
        pieces = iter(data[len(unchecked) :])
        buffers: list[Buffer] = [next(pieces) if place.length else b"" for place in places]
        for place, piece in zip(places, buffers, strict=True):
            if len(memoryview(piece)) != place.length:
                raise too_short_error(place, place.offset + len(memoryview(piece)))
        return buffers

    def has(self, name: str) -> bool:
        fs = self.fs
        fs.invalidate_cache()
        return bool(fs.exists(self._path(name)))

    def sizes(self) -> dict[str, int]:
        fs = self.fs
        fs.invalidate_cache()  # a cached listing does not show objects of other processes
        try:
            entries = fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        names = ((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries)
        return {
            name: int(entry["size"])
            for name, entry in sorted(names, key=lambda pair: pair[0])
            if entry["type"] == "file"
        }

    def remove(self, name: str) -> None:
        self.fs.rm_file(self._path(name))


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError("data in an object store needs fsspec: install the extra 'objects' of Rollbook") from error
    try:
        fs, root = url_to_fs(url, **options)
    except ValueError as error:
        raise ValueError(f"url: got {redacted(url)!r}, expected one that fsspec supports ({error})") from None
    return fs, str(root)


class FsspecSegmentStore:
    """Segments as objects under `url`/`prefix` (s3://, gs://, memory://, file://, or a path): one for each put.

    `storage_options` go to fsspec: endpoint, credentials, and so on. A segment never has a writer once it is seen, so
    `busy` is always false and `seal` does nothing. A put that fails may leave an object that nothing points to.

    >>> store = FsspecSegmentStore("memory://runs", prefix="demo")
    >>> first, second = store.put([b"tokens", b"media"])
    >>> bytes(store.get(second)), store.segments() == {first.segment: 192}
    (b'media', True)
    >>> store.remove(first.segment)
    >>> store.segments()
    {}
    """

    private = True
    transactional = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        prefix: str = "",
        disk: Disk | None = None,
    ) -> None:
        url, options, prefix = os.fspath(url), storage_options or {}, prefix.strip("/")
        if ".." in prefix.split("/"):
            raise ValueError(f"prefix: got {prefix!r}, expected a path without '..'")
        fs, root = _file_system(url, options)
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        # Through fsspec a local file is neither synced nor complete when it is seen.
        self._store: _FileObjects | _RemoteObjects
        if "file" in protocols:
            self._store = _FileObjects(os.path.join(root, prefix), Disk() if disk is None else disk)
        else:
            self._store = _RemoteObjects(url, options, prefix)
        self.url = url
        self._closed = False

    def put(self, parts: Sequence[Buffer]) -> list[Place]:
        """Write all parts as one new object, which is complete when this returns."""
        if self._closed:
            raise ValueError("the segment store is closed")
        places, pieces = align_parts(parts)
        if not places:
            return []
        name = new_name()
        self._store.write(name, [HEADER, *pieces])
        # An object is written and durable at the same moment.
        hit_failpoint("after write")
        hit_failpoint("after sync")
        return [Place(name, ALIGN + at, length) for at, length in places]

    def get(self, place: Place) -> memoryview:
        """Return a copy of the bytes; recently read parts are cached."""
        return self._store.read(check_place(place))

    def get_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Return the bytes at each place: ranges of objects, requested concurrently."""
        for place in places:
            check_place(place)
        return self._store.read_many(places) if places else []

    def has(self, segment: str) -> bool:
        """Return whether the segment exists, with one request."""
        return self._store.has(check_name(segment))

    def segments(self) -> dict[str, int]:
        """Return every segment with its size in bytes, oldest first."""
        return {name: size for name, size in self._store.sizes().items() if is_name(name)}

    def busy(self, segment: str) -> bool:
        """Return false: an object is written once."""
        check_name(segment)
        return False

    def seal(self) -> None:
        """Do nothing: every `put` creates an object."""

    def remove(self, segment: str) -> None:
        """Remove a segment. A missing segment is not an error."""
        with suppress(FileNotFoundError):
            self._store.remove(check_name(segment))

    def close(self) -> None:
        """Stop writing: a later `put` raises. Stored bytes can still be read."""
        self._closed = True
