"""Segment stores in a folder and in memory, and the protocol of all segment stores.

Invariant: when `put` returns, its bytes survive any crash. `get` returns private memory: changes to it reach neither
the store nor other readers. A segment's name, which may come from a hostile ledger, refers only to plain files of the
store's own folder.

A segment is append-only: a header of 64 bytes, then parts, each at a multiple of 64. All numbers little-endian:

    0   8  magic            8d 52 42 53 45 47 0d 0a
    8   4  version          1
    12  4  header length    64
    16  40 reserved         0
    56  8  header checksum  xxh3-64 of bytes 0 to 55
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from rollbook.book import disk
from rollbook.book.disk import Disk, File, file_identity, read_private
from rollbook.book.errors import (
    CorruptBookError,
    MissingSegmentError,
    NewerLayoutError,
    SegmentBusyError,
    WriterStoppedError,
    moved_error,
)
from rollbook.core.checks import check_int

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"\x8dRBSEG\r\n"
VERSION = 1
ALIGN = 64
_HEAD = struct.Struct("<8sII40x")
HEADER = _HEAD.pack(MAGIC, VERSION, ALIGN)
HEADER += struct.pack("<Q", xxhash.xxh3_64_intdigest(HEADER))
"""The first 64 bytes of a segment."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.rbs", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A range of bytes of a segment.

    >>> Place("0000019a4b1c2d3e-0123456789abcdef.rbs", 64, 1024).stop
    1088
    """

    segment: str
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """The offset of its end."""
        return self.offset + self.length


class SegmentStore(Protocol):
    """Stores the bytes of a book.

    Between a `put` and the commit of the ledger that refers to it, compaction in another process cannot see that the
    bytes are needed. Appends therefore check with `has`, in the transaction that commits, that the bytes still exist,
    and compaction also removes segments in a transaction, so that the later of the two sees the effect of the earlier.
    """

    private: bool
    """Whether views from `get` are writable memory of their own."""
    transactional: bool
    """Whether it has `insert(tx, parts)`, which writes bytes within a transaction of the ledger."""

    def put(self, parts: Sequence[Buffer]) -> list[Place]:
        """Write all parts, with one write and one sync; durable when it returns. Threads may call it at once."""

    def get(self, place: Place) -> memoryview:
        """Read bytes. `MissingSegmentError` if the segment is gone, `CorruptBookError` if it is too short."""

    def get_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Return the bytes at each of many small places, read-only, in as few requests as possible."""

    def has(self, segment: str) -> bool:
        """Return whether the segment exists."""

    def segments(self) -> dict[str, int]:
        """Return every segment with its size in bytes, oldest first."""

    def busy(self, segment: str) -> bool:
        """Return whether a live writer, of this or another process, may still append to it."""

    def seal(self) -> None:
        """End the open segment; the next `put` starts another."""

    def remove(self, segment: str) -> None:
        """Remove a segment; raise `SegmentBusyError` if it has a writer. A missing segment is not an error."""

    def close(self) -> None:
        """Stop writing. Views that were returned stay valid."""


# --- what all stores share ------------------------------------------------------------------------------------------


def check_header(head: bytes, segment: str) -> None:
    """Raise if a file is not a segment, is damaged, or was written by a newer version."""
    if len(head) < ALIGN:
        raise CorruptBookError(f"segment {segment}: the header is cut short: {len(head)} of {ALIGN} bytes", len(head))
    magic, version, length = _HEAD.unpack_from(head)
    if magic != MAGIC:
        raise CorruptBookError(f"segment {segment}: magic {magic!r} is not that of a segment, {MAGIC!r}", 0)
    if version > VERSION:
        raise NewerLayoutError(f"segment {segment}: layout {version} is newer than this version's, {VERSION}")
    if head != HEADER:
        raise CorruptBookError(f"segment {segment}: the header (version {version}, length {length}) is damaged", 8)


def new_name() -> str:
    """Return a unique name for a segment; later names sort after earlier ones."""
    return f"{time.time_ns():016x}-{os.urandom(8).hex()}.rbs"


def is_name(text: str | bytes | float | None) -> bool:
    """Return whether this is a name as `new_name` creates them: no folder, no dots but the suffix's.

    >>> is_name(new_name()), is_name("../" + new_name()), is_name("..")
    (True, False, False)
    """
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def check_name(segment: str) -> str:
    """Return the name, or raise `CorruptBookError` if it is not a segment's name."""
    if not isinstance(segment, str) or _NAME.fullmatch(segment) is None:
        raise CorruptBookError(
            f"segment {segment!r} is not a segment's name (16 hex digits, '-', 16 hex digits, '.rbs')"
        )
    return segment


def check_place(place: Place) -> Place:
    """Return the place, or raise `CorruptBookError` if no segment can have it."""
    check_name(place.segment)
    # SQLite stores text in a column of numbers, too.
    is_integer = type(place.offset) is int and type(place.length) is int
    if not is_integer or place.offset < ALIGN or place.length < 0:
        raise CorruptBookError(
            f"segment {place.segment}: no part lies at byte {place.offset!r} with {place.length!r} bytes"
        )
    return place


def too_short_error(place: Place, size: int) -> CorruptBookError:
    return CorruptBookError(
        f"segment {place.segment}: a part reaches to byte {place.stop}, the segment has {size}", size
    )


def align_parts(parts: Sequence[Buffer]) -> tuple[list[tuple[int, int]], list[bytes | memoryview]]:
    """Return the offset and length of each part, and the pieces to write: parts with zeros in between."""
    places: list[tuple[int, int]] = []
    pieces: list[bytes | memoryview] = []
    at = 0
    for data in parts:
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("parts: got a strided buffer, expected contiguous bytes")
        padding = -view.nbytes % ALIGN
        places.append((at, view.nbytes))
        pieces += [view.cast("B") if view.nbytes else b"", bytes(padding)]
        at += view.nbytes + padding
    return places, pieces


# --- segments that are files ----------------------------------------------------------------------------------------


def open_segment(disk: Disk, path: str) -> int:
    """Open a segment file; raise `MissingSegmentError`, or `CorruptBookError` if it is not a plain file."""
    try:
        return disk.open_read(path)
    except FileNotFoundError:
        raise MissingSegmentError(os.path.basename(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
            raise CorruptBookError(f"{path}: a link, a pipe or a device, expected a plain file") from None
        raise


@contextmanager
def _open_checked(disk: Disk, path: str, segment: str) -> Iterator[tuple[int, int]]:
    """Open a segment file and check its header; the value is the descriptor and the size of the file."""
    fd = open_segment(disk, path)
    try:
        check_header(os.pread(fd, ALIGN, 0), segment)
        yield fd, os.fstat(fd).st_size
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def read_segment(disk: Disk, path: str, place: Place, mapped: bool) -> memoryview:
    """Read a place of a segment file, mapped if that is faster and no process truncates the file.

    Every call opens, checks and closes the file: no descriptor keeps the space of a removed file, and no two calls
    share memory, so that a tensor that is changed in place does not change for the next reader of the record.
    """
    with _open_checked(disk, path, place.segment) as (fd, size):
        if place.stop > size:
            raise too_short_error(place, size)
        view = read_private(fd, place.offset, place.stop, mapped)
        if len(view) < place.length:
            raise too_short_error(place, place.offset + len(view))
        return view


def read_pieces(disk: Disk, path: str, places: Sequence[Place]) -> list[Buffer]:
    """Copy several places of a segment file."""
    with _open_checked(disk, path, places[0].segment) as (fd, size):
        pieces: list[Buffer] = []
        for place in places:
            # Check before allocating memory: the length in the ledger is not trusted.
            if place.stop > size:
                raise too_short_error(place, size)
            piece = os.pread(fd, place.length, place.offset)
            pieces.append(piece if len(piece) == place.length else read_private(fd, place.offset, place.stop, False))
        return pieces


def read_by_segment(places: Sequence[Place], read: Callable[[str, list[Place]], Sequence[Buffer]]) -> list[Buffer]:
    """Return the bytes at each place; `read` reads the places of one segment."""
    numbers: dict[str, list[int]] = {}
    for i, place in enumerate(places):
        numbers.setdefault(check_place(place).segment, []).append(i)
    pieces: list[Buffer] = [b""] * len(places)
    for segment, indices in numbers.items():
        for i, piece in zip(indices, read(segment, [places[i] for i in indices]), strict=True):
            pieces[i] = piece
    return pieces


# --- a folder -------------------------------------------------------------------------------------------------------


class FileSegmentStore:
    """Segments as files of `folder`/segments, one open segment for each store that writes.

    The open segment is locked for as long as its writer lives, and never continued by another: a writer that died left
    at most a tail that no ledger points to. A forked child starts a segment of its own. A folder that is moved, removed
    or replaced under the store is an error, and is not made again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FileSegmentStore(folder)
    ...     first, second = store.put([b"tokens", b"media"])
    ...     (first.offset, second.offset), bytes(store.get(second)), store.busy(first.segment)
    ...     store.close()
    ...     store.busy(first.segment), FileSegmentStore(folder).segments() == {first.segment: 192}
    ((64, 128), b'media', True)
    (False, True)
    """

    private = True
    transactional = False

    def __init__(
        self, folder: str | os.PathLike[str], disk: Disk | None = None, segment_bytes: int = 256 << 20
    ) -> None:
        self.book_folder = os.path.abspath(folder)
        self.folder = os.path.join(self.book_folder, "segments")
        self._identity = file_identity(self.book_folder)
        self.disk = Disk() if disk is None else disk
        self.segment_bytes = check_int("segment_bytes", segment_bytes, ALIGN)
        self._lock = threading.Lock()
        self._file: File | None = None
        self._size = 0
        self._stopped: BaseException | None = None
        self._closed = False
        _stores.add(self)

    def put(self, parts: Sequence[Buffer]) -> list[Place]:
        """Write all parts, with one write and one sync; durable when it returns."""
        with self._lock:
            if self._closed:
                raise ValueError("the segment store is closed")
            if self._stopped is not None:
                raise WriterStoppedError(
                    f"writing to {self.folder} stopped after an error: {self._stopped}; reopen the book"
                ) from self._stopped
            places, pieces = align_parts(parts)
            if not places:
                return []
            if self._size + sum(map(len, pieces)) > self.segment_bytes:
                self._end()
            if self._file is None:
                self._file = self._start()
            elif file_identity(self._file.path) != file_identity(self._file.fd):
                raise moved_error(self._file.path)
            file, is_new, base = self._file, not self._size, self._size or ALIGN
            try:
                size = self._size + self.disk.append(file, [HEADER, *pieces] if is_new else pieces)
                if disk.failpoints_active:
                    disk.hit_failpoint("after write")
                self.disk.sync(file)
                if is_new:
                    self.disk.sync_folder(self.folder)
                    # Another process may have made the folder and not have synced it yet.
                    self.disk.sync_folder(os.path.dirname(self.folder))
                self._size = size
            except BaseException as error:
                # How much was written, and whether it is durable, is unknown: nothing is appended to it or synced
                # again, since a second sync would report success for pages that the first one lost. After an
                # interrupt, which is no failure of the disk, the next put starts another segment.
                if isinstance(error, OSError):
                    self._stopped = error
                with suppress(OSError):
                    self._end()
                raise
        if disk.failpoints_active:
            disk.hit_failpoint("after sync")
        segment = os.path.basename(file.path)
        return [Place(segment, base + at, length) for at, length in places]

    def _start(self) -> File:
        """Create a new file and lock it, before another process could mistake it for the file of a dead writer."""
        if self._identity is None:
            self.disk.make_folder(self.book_folder)
            self._identity = file_identity(self.book_folder)
        self._check_unmoved()
        self.disk.make_folder(self.folder)
        self._check_folder()
        while True:
            file = self.disk.create(os.path.join(self.folder, new_name()))
            # Between making and locking, others may look at it (`busy`) or even remove it as a dead writer's.
            if self.disk.try_lock(file.fd) and os.fstat(file.fd).st_nlink:
                return file
            with suppress(FileNotFoundError):
                self.disk.unlink(file.path)
            file.close()

    def _end(self) -> None:
        file, self._file, self._size = self._file, None, 0
        if file is not None:
            file.close()

    def _check_folder(self) -> None:
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode):
            raise CorruptBookError(f"{self.folder}: a link or a file, expected a folder inside the book")

    def _check_unmoved(self) -> None:
        if self._identity is not None and file_identity(self.book_folder) != self._identity:
            raise moved_error(self.book_folder)

    def _path(self, segment: str) -> str:
        check_name(segment)
        with suppress(FileNotFoundError):
            self._check_folder()
        return os.path.join(self.folder, segment)

    def get(self, place: Place) -> memoryview:
        """Return the bytes as private memory: mapped if they are many, copied if they are few."""
        try:
            return read_segment(self.disk, self._path(check_place(place).segment), place, mapped=True)
        except MissingSegmentError:
            self._check_unmoved()
            raise

    def get_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Return a copy of the bytes at each place; each file is opened once."""
        return read_by_segment(places, lambda segment, mine: read_pieces(self.disk, self._path(segment), mine))

    def has(self, segment: str) -> bool:
        """Return whether the segment exists."""
        return self.disk.is_plain(self._path(segment))

    def segments(self) -> dict[str, int]:
        """Return every segment with its size in bytes, oldest first."""
        try:
            self._check_folder()
            sizes = self.disk.sizes(self.folder)
        except FileNotFoundError:
            return {}
        return {name: size for name, size in sizes.items() if is_name(name)}

    def busy(self, segment: str) -> bool:
        """Return whether a live writer, of this or another process, may still append to it."""
        try:
            fd = open_segment(self.disk, self._path(segment))
        except MissingSegmentError:
            return False
        try:
            return not self.disk.try_lock(fd, shared=True)
        finally:
            os.close(fd)

    def seal(self) -> None:
        """End the open segment; the next `put` starts another."""
        with self._lock:
            self._end()

    def remove(self, segment: str) -> None:
        """Remove a segment; raise `SegmentBusyError` if it has a writer. A missing segment is not an error."""
        path = self._path(segment)
        try:
            fd = open_segment(self.disk, path)
        except MissingSegmentError:
            return
        try:
            # The lock is kept while the file goes, so that a writer that has just made it sees that it lost it.
            # Somebody who only looks (`busy`) has it for a moment.
            for wait in (0.001, 0.01, 0.1, None):
                if self.disk.try_lock(fd):
                    break
                if wait is None:
                    raise SegmentBusyError(f"segment {segment} is being written")
                time.sleep(wait)
            with suppress(FileNotFoundError):
                self.disk.remove(path)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Stop writing: a later `put` raises. Stored bytes can still be read."""
        with self._lock:
            self._closed = True
            self._end()

    def _after_fork(self) -> None:
        """Reset a forked child: the open segment is the parent's, whose lock outlives the child's descriptor."""
        self._lock = threading.Lock()
        self._stopped = None
        with suppress(OSError):
            self._end()


# --- memory ---------------------------------------------------------------------------------------------------------


class MemorySegmentStore:
    """Segments in this process's memory, gone with it; otherwise as a folder's.

    >>> store = MemorySegmentStore()
    >>> [place] = store.put([b"tokens"])
    >>> view = store.get(place)
    >>> view[0] = 0
    >>> bytes(store.get(place))
    b'tokens'
    """

    private = True
    transactional = False

    def __init__(self, segment_bytes: int = 256 << 20) -> None:
        self.segment_bytes = check_int("segment_bytes", segment_bytes, ALIGN)
        self._lock = threading.Lock()
        self._segments: dict[str, bytearray] = {}
        self._open: str | None = None
        self._closed = False
        _stores.add(self)

    def put(self, parts: Sequence[Buffer]) -> list[Place]:
        """Copy all parts."""
        with self._lock:
            if self._closed:
                raise ValueError("the segment store is closed")
            places, pieces = align_parts(parts)
            if not places:
                return []
            size = sum(map(len, pieces))
            if self._open is None or len(self._segments[self._open]) + size > self.segment_bytes:
                self._open = new_name()
                self._segments[self._open] = bytearray(HEADER)
            memory = self._segments[self._open]
            base = len(memory)
            for piece in pieces:
                memory += piece
            return [Place(self._open, base + at, length) for at, length in places]

    def get(self, place: Place) -> memoryview:
        """Return a copy of the bytes."""
        check_place(place)
        with self._lock:
            if place.segment not in self._segments:
                raise MissingSegmentError(place.segment)
            memory = self._segments[place.segment]
            if place.stop > len(memory):
                raise too_short_error(place, len(memory))
            with memoryview(memory) as view, view[place.offset : place.stop] as piece:
                return np.array(piece, dtype=np.uint8).data

    def get_many(self, places: Sequence[Place]) -> list[Buffer]:
        """Return a copy of the bytes at each place."""
        return [self.get(place) for place in places]

    def has(self, segment: str) -> bool:
        """Return whether the segment exists."""
        return check_name(segment) in self._segments

    def segments(self) -> dict[str, int]:
        """Return every segment with its size in bytes, oldest first."""
        with self._lock:
            return {name: len(memory) for name, memory in sorted(self._segments.items())}

    def busy(self, segment: str) -> bool:
        """Return whether it is the open segment."""
        return check_name(segment) == self._open

    def seal(self) -> None:
        """End the open segment; the next `put` starts another."""
        with self._lock:
            self._open = None

    def remove(self, segment: str) -> None:
        """Remove a segment; raise `SegmentBusyError` if it is open. A missing segment is not an error."""
        with self._lock:
            if check_name(segment) == self._open:
                raise SegmentBusyError(f"segment {segment} is being written")
            self._segments.pop(segment, None)

    def close(self) -> None:
        """Stop writing: a later `put` raises. Stored bytes can still be read."""
        with self._lock:
            self._closed = True
            self._open = None

    def _after_fork(self) -> None:
        """Reset a forked child: another thread may have been in the middle of a `put`."""
        self._lock = threading.Lock()
        self._open = None


_stores: weakref.WeakSet[FileSegmentStore | MemorySegmentStore] = weakref.WeakSet()


def _reset_stores() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_reset_stores)
