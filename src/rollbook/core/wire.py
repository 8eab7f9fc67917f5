"""Frames: `Experiences` as Arrow bytes with a header that says what they are, and the reader that trusts nothing.

Invariant: `decode(encode(many)) == many`, and decoding any other bytes raises `WireError` and nothing else: it runs no
code, imports nothing on the data's word, and allocates nothing it has not checked against the bytes that are there.

The format is specified in docs/wire.md. In short, all numbers little-endian:

    0   8  magic            8d 52 4f 4c 4c 42 4b 0a
    8   2  version          1
    10  2  flags            bits 0-1: compression of the body (0 none, 1 zstd, 2 lz4)
    12  4  header length    64
    16  8  body length      bytes of body as stored
    24  8  decoded length   bytes of body once decompressed
    32  8  item count
    40  8  body checksum    xxh3-64 of the stored body
    48  8  reserved         0
    56  8  header checksum  xxh3-64 of bytes 0 to 55
    64  …  body             an Arrow IPC stream of one record batch, then zeros to a multiple of 64

>>> from rollbook import Experience
>>> data = encode([Experience(tokens=[1, 2, 3], reward=1.0)])
>>> data[:8], len(data) % 64, decode(data)[0].reward
(b'\\x8dROLLBK\\n', 0, 1.0)
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rollbook.core import ipc
from rollbook.core.columns import check_columns, check_depth, check_masks, from_arrays, to_arrays
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences, from_rows
from rollbook.core.fields import owner
from rollbook.core.freeform import MAX_DEPTH
from rollbook.core.ipc import MOST_BYTES, RowLayout
from rollbook.core.ragged import Ragged, allocate, populate

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

MAGIC = b"\x8dROLLBK\n"
VERSION = 1
HEADER = struct.Struct("<8sHHIQQQQQ")
HEADER_BYTES = 64
COMPRESSION = {None: 0, "zstd": 1, "lz4": 2}
FREE_BYTES = 64 << 20
"""What compressed data may decode to whatever its size; beyond that, `Limits.max_ratio` times its size."""
_SMALL = 16 << 10
_COMPRESSION_NAMES = {code: name for name, code in COMPRESSION.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader is willing to take; a frame that states more is refused before anything is allocated."""

    max_bytes: int = 16 << 30
    """Of one frame's body, decompressed."""
    max_items: int = 1 << 28
    """Records in one frame."""
    max_ratio: int = 500
    """Bytes that a byte of compressed frames may decode to, once they decode to more than 64 MiB together."""
    max_columns: int = 1024
    max_depth: int = 64
    """Nesting of free-form values and of pickles; frames themselves hold at most 64 levels."""


DEFAULT_LIMITS = Limits()


# --- writing ------------------------------------------------------------------------------------------------------


class _Layout:
    """A frame's body as the pieces it is made of: Arrow says what they are, and copies none of them."""

    def __init__(self, many: Experiences, settle: bool = False) -> None:
        self.settle = settle
        self.count = len(many)
        arrays = to_arrays(many.columns)
        for name, array in arrays.items():
            if owner(name) is None and not ipc.keeps(array.type):
                raise ValueError(f"column {name!r}: an unknown column of type {array.type} cannot be kept in a frame")
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
        self.pieces: list[Any] = []
        self.size = 0
        self.closed = False
        self.pending = {
            column.memory.ctypes.data: column
            for column in many.columns.values()
            if isinstance(column, Ragged) and column.pending
        }
        with pa.ipc.new_stream(pa.PythonFile(self, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)

    def __len__(self) -> int:
        return self.count

    # What Arrow asks of a file.

    def write(self, piece: Any) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def fill(self, memory: NDArray[np.uint8]) -> None:
        """Copy every piece to its place."""
        jobs: list[tuple[Any, NDArray[np.uint8]]] = []
        at = 0
        # A frame has dozens of pieces of a few bytes: those that lie together are copied together.
        for small, run in groupby(self.pieces, key=lambda piece: len(piece) < _SMALL and not self._awaited(piece)):
            for piece in [b"".join(run)] if small else run:
                jobs.append((piece, memory[at : at + len(piece)]))
                at += len(piece)
        if not self.pending or self.size < MOST_BYTES:
            for piece, target in jobs:
                self._copy(piece, target)
            return
        # Gathering thousands of tensors leaves the interpreter to others most of the time: two threads share it.
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(self._copy, *job) for job in sorted(jobs, key=lambda job: -len(job[0]))]
        for job in done:
            job.result()

    def _awaited(self, piece: Any) -> Ragged | None:
        """The column whose tensors are still to be copied to the place of this piece."""
        column = self.pending.get(piece.address) if isinstance(piece, pa.Buffer) else None
        return column if column is not None and len(piece) == column.memory.nbytes else None

    def _copy(self, piece: Any, target: NDArray[np.uint8]) -> None:
        column = self._awaited(piece)
        if column is not None:
            memory = target.view(column.memory.dtype).reshape(column.memory.shape)
            column.copy_to(memory)
            if self.settle:
                column.settle(memory)
        else:
            target[:] = np.frombuffer(piece, dtype=np.uint8)


def _layout(experiences: Iterable[Experience], settle: bool = False) -> _Layout | RowLayout:
    if isinstance(experiences, Experiences):
        return _Layout(experiences, settle)
    rows = list(experiences)
    return RowLayout.of(rows) or _Layout(from_rows(rows, copy=False), settle)


def encoded_size(experiences: Iterable[Experience]) -> int:
    """How many bytes `encode` writes for these records without compression."""
    return HEADER_BYTES + _up(_layout(experiences).size)


def _up(size: int) -> int:
    return -size % HEADER_BYTES + size


def encode(
    experiences: Iterable[Experience] | RowLayout,
    *,
    compression: str | None = None,
    out: Any = None,
    settle: bool = False,
) -> Any:
    """One frame of these records: `bytes`, or, given a writable buffer `out` (or a function that makes one for a number
    of bytes), a memoryview of the part written.

    Writing many frames into one reused buffer is several times faster than making fresh bytes for each: most of the
    time goes into the first touch of fresh memory. `compression`: None, "zstd" or "lz4", of the whole body; a body that
    zstd makes more than 500 times smaller is stored as lz4, since readers refuse such a ratio. `settle`: columns
    whose tensors were still to be copied lie in the frame from then on, which the caller must leave alone as long as
    they are used.

    >>> from rollbook import Experience
    >>> many = [Experience(tokens=[1, 2, 3])]
    >>> buffer = bytearray(encoded_size(many))
    >>> decode(encode(many, out=buffer)) == many
    True
    """
    if compression not in COMPRESSION:
        raise ValueError(f"compression: got {compression!r}, expected None, 'zstd' or 'lz4'")
    layout = experiences if isinstance(experiences, RowLayout) else _layout(experiences, settle)
    stored: Any = None
    if compression is not None:
        body = allocate((layout.size,), np.uint8)
        layout.fill(body)
        stored = _compressed(body, compression)
        if layout.size > len(stored) * DEFAULT_LIMITS.max_ratio:
            compression = "lz4"  # whose ratio is at most 255
            stored = _compressed(body, compression)
    length = layout.size if stored is None else len(stored)
    total = HEADER_BYTES + _up(length)
    result: Any
    if out is None:
        result, memory = _fresh_bytes(total)
    else:
        out = out(total) if callable(out) else out
        memory = np.frombuffer(out, dtype=np.uint8)
        if not memory.flags.writeable:
            raise ValueError("out: got a read-only buffer, expected a writable one")
        if len(memory) < total:
            raise ValueError(f"out: got {len(memory)} bytes, expected at least {total}")
        memory = memory[:total]
        result = memoryview(out).cast("B")[:total]
    target = memory[HEADER_BYTES : HEADER_BYTES + length]
    if stored is None:
        layout.fill(target)
    else:
        target[:] = stored
    memory[HEADER_BYTES + length :] = 0
    memory[:HEADER_BYTES] = np.frombuffer(
        _header(COMPRESSION[compression], length, layout.size, len(layout), xxhash.xxh3_64_intdigest(target.data)),
        dtype=np.uint8,
    )
    return result


def _compressed(body: NDArray[np.uint8], compression: str) -> NDArray[np.uint8]:
    return np.frombuffer(pa.Codec(compression).compress(pa.py_buffer(body)), dtype=np.uint8)


def _header(flags: int, length: int, decoded: int, count: int, checksum: int) -> bytes:
    head = HEADER.pack(MAGIC, VERSION, flags, HEADER_BYTES, length, decoded, count, checksum, 0)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype = ctypes.c_void_p
_bytes_address.argtypes = [ctypes.py_object]


def _fresh_bytes(size: int) -> tuple[bytes, NDArray[np.uint8]]:
    """A bytes object that nobody has seen yet, and its memory to fill: saves a copy of the whole frame.

    The C API allows writing to such an object until it is handed out.
    """
    data: bytes = _new_bytes(None, size)
    address = _bytes_address(data)
    populate(address, size)
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    return data, np.frombuffer(memory, dtype=np.uint8)


def write_frame(file: BinaryIO, experiences: Iterable[Experience], *, compression: str | None = None) -> int:
    """Append one frame to an open file; returns the bytes written."""
    data = encode(experiences, compression=compression)
    file.write(data)
    return len(data)


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's header, checked."""

    start: int
    compression: str | None
    length: int
    decoded: int
    count: int
    checksum: int

    @property
    def stop(self) -> int:
        """Where the next frame begins."""
        return self.start + HEADER_BYTES + _up(self.length)


def read_header(data: Any, start: int = 0, limits: Limits = DEFAULT_LIMITS) -> Frame:
    """The header at byte `start`, every field of it checked, but not yet against the bytes that follow."""
    view = memoryview(data).cast("B")
    head = bytes(view[start : start + HEADER_BYTES])
    if head[:8] != MAGIC[: len(head)] or not head:
        hint = "; Experience.deserialize_many reads TRXP" if head[:4] == b"TRXP" else ""
        raise WireError(f"bad magic {head[:8]!r}: not a Rollbook frame (a frame begins with {MAGIC!r}){hint}", start)
    if len(head) < HEADER_BYTES:
        raise WireError(f"the header is cut short: {len(head)} of {HEADER_BYTES} bytes", start + len(head))
    _, version, flags, header_length, length, decoded, count, checksum, reserved = HEADER.unpack_from(head)
    if version != VERSION:
        raise WireError(f"format version {version}; this reader knows {VERSION}", start + 8)
    if xxhash.xxh3_64_intdigest(head[:56]) != struct.unpack_from("<Q", head, 56)[0]:
        raise WireError("the header does not match its checksum", start + 56)
    if header_length != HEADER_BYTES or flags not in _COMPRESSION_NAMES or reserved:
        raise WireError(
            f"flags {flags:#x}, header length {header_length} or reserved {reserved} is unknown", start + 10
        )
    compression = _COMPRESSION_NAMES[flags]
    if compression is None and length != decoded:
        raise WireError(f"decoded length {decoded} of an uncompressed body of {length} bytes", start + 24)
    if length > limits.max_bytes or decoded > limits.max_bytes:
        raise WireError(f"a body of {max(length, decoded)} bytes is over the limit of {limits.max_bytes}", start + 16)
    if count > limits.max_items:
        raise WireError(f"{count} records are over the limit of {limits.max_items}", start + 32)
    return Frame(start, compression, length, decoded, count, checksum)


def decode(data: Any, *, verify: bool = True, limits: Limits = DEFAULT_LIMITS, private: bool = False) -> Experiences:
    """The records of all frames in `data` (bytes, bytearray, memoryview, mmap, any buffer), without copying.

    `verify=True` checks every byte: checksum, text encoding, masks. `verify=False` checks the header, the schema and
    all offsets, which is enough to be safe on bytes that were written by oneself, not to know that they are unharmed.
    Tensors are copied out of `data`, a column at a time, when they are first asked for; with `private=True` the memory
    is the caller's to give (a private map), must be writable, and tensors are views of it.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data: got a strided buffer, expected contiguous bytes")
    view = view.cast("B")
    if private and view.readonly:
        raise ValueError("private: got a read-only buffer, expected writable memory")
    parts = list(_frames(view, verify, limits, private))
    if len(parts) == 1:
        return parts[0]
    if len({name for part in parts for name in part.columns}) > limits.max_columns:
        raise WireError(f"the frames together have more columns than the limit of {limits.max_columns}")
    try:
        return Experiences.concat(parts)
    except ValueError as error:
        raise WireError(f"the frames do not go together: {error}") from None


def decode_arrays(data: Any, fields: Collection[str], limits: Limits = DEFAULT_LIMITS) -> dict[str, pa.Array]:
    """The Arrow arrays of some fields, sides included, of one uncompressed frame, without copying.

    Checked are the header, the schema and the offsets of these arrays, which is what makes them safe to read; the
    others are not looked at.

    >>> from rollbook import Experience
    >>> decode_arrays(encode([Experience(tokens=[1, 2, 3], reward=1.0)]), ["reward"])["reward"].to_pylist()
    [1.0]
    """
    view = memoryview(data).cast("B")
    frame = read_header(view, 0, limits)
    begin, end = HEADER_BYTES, HEADER_BYTES + frame.length
    if frame.compression is not None:
        raise WireError(f"a frame compressed by {frame.compression}, expected one that is not", 10)
    if frame.stop != len(view):
        raise WireError(f"the frame takes {frame.stop} bytes, {len(view)} are there", begin)
    stored = np.frombuffer(view[begin:end], dtype=np.uint8)
    if stored.size and stored.__array_interface__["data"][0] % 8:
        stored = np.array(stored)
    batch = ipc.read_batch(stored, frame.count, limits.max_columns, begin)
    arrays = {
        name: batch.column(i)
        for i, name in enumerate(batch.schema.names)
        if (known := owner(name)) is not None and known[0].name in fields
    }
    ipc.check_arrays(arrays, False)
    return arrays


def _frames(view: memoryview, verify: bool, limits: Limits, private: bool) -> Iterator[Experiences]:
    start = stored = decoded = 0
    while True:
        frame = read_header(view, start, limits)
        if frame.compression is not None:
            # Of all frames together: many small ones are held at once, as a large one is.
            stored, decoded = stored + frame.length, decoded + frame.decoded
            if decoded > max(FREE_BYTES, stored * limits.max_ratio):
                raise WireError(
                    f"{stored} compressed bytes state a size of {decoded}, over the limit of {limits.max_ratio} times "
                    "as many (max_ratio)",
                    start + 24,
                )
        yield _decode_frame(view, frame, verify, limits, private)
        start = frame.stop
        if start == len(view):
            return


def _decode_frame(view: memoryview, frame: Frame, verify: bool, limits: Limits, private: bool) -> Experiences:
    begin, end = frame.start + HEADER_BYTES, frame.start + HEADER_BYTES + frame.length
    if frame.stop > len(view):
        raise WireError(f"the frame takes {frame.stop - frame.start} bytes, {len(view) - frame.start} are there", begin)
    if any(view[end : frame.stop]):
        raise WireError("the padding behind the body is not zero", end)
    body = view[begin:end]
    if verify and xxhash.xxh3_64_intdigest(body) != frame.checksum:
        raise WireError("the body does not match its checksum", begin)
    stored = np.frombuffer(body, dtype=np.uint8)
    if frame.compression is not None:
        stored, private = _decompress(stored, frame, begin), True
    elif stored.size and stored.ctypes.data % 8:
        # Arrow arrays must be aligned to their elements; a buffer that is not is copied once, whole.
        aligned = allocate(stored.shape, np.uint8)
        aligned[:] = stored
        stored, private = aligned, True
    batch = ipc.read_batch(stored, frame.count, limits.max_columns, begin)
    if not frame.count:
        return Experiences()
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    ipc.check_arrays(arrays, verify)
    columns = from_arrays(arrays, private)
    try:
        check_columns(columns, frame.count)
        if verify:
            check_masks(columns)
        if limits.max_depth < MAX_DEPTH:
            # The format's own bound is kept whenever a row is made; a narrower one has to be looked at now.
            check_depth(columns, limits.max_depth)
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error), begin) from None
    return Experiences._of(columns, frame.count)


def _decompress(stored: NDArray[np.uint8], frame: Frame, at: int) -> NDArray[np.uint8]:
    """The body, decompressed into memory of exactly the stated size: not a byte more is ever written."""
    try:
        if frame.compression == "zstd":
            # Writes to the output alone: as a stream, zstd would hold a window of whatever size the body asks for.
            body = pa.Codec("zstd").decompress(pa.py_buffer(stored), decompressed_size=frame.decoded)
            return np.frombuffer(body, dtype=np.uint8)
        # Not touched: the size is the writer's word, and only what is really decoded shall cost memory.
        out = allocate((frame.decoded,), np.uint8, touched=False)
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(stored)), frame.compression) as stream:
            got = 0
            while got < frame.decoded:
                step = stream.readinto(out.data[got : got + (1 << 20)])
                if not step:
                    raise WireError(f"the body decompresses to {got} bytes, {frame.decoded} are stated", at)
                got += step
            if stream.read(1):
                raise WireError(f"the body decompresses to more than the stated {frame.decoded} bytes", at)
    except MemoryError:
        raise WireError(f"there is no memory for a body of {frame.decoded} bytes", at) from None
    except (OSError, pa.ArrowException) as error:
        raise WireError(f"the body does not decompress: {error}", at) from None
    return out


def iter_frames(file: BinaryIO, *, verify: bool = True, limits: Limits = DEFAULT_LIMITS) -> Iterator[Experiences]:
    """The frames of an open file or socket stream, one at a time; memory holds one frame.

    >>> import io
    >>> from rollbook import Experience
    >>> file = io.BytesIO()
    >>> for tokens in ([1, 2], [3, 4, 5]):
    ...     _ = write_frame(file, [Experience(tokens=tokens)])
    >>> _ = file.seek(0)
    >>> [frame[0].tokens.tolist() for frame in iter_frames(file)]
    [[1, 2], [3, 4, 5]]
    """
    at = 0
    while head := _read(file, HEADER_BYTES):
        try:
            frame = read_header(head, 0, limits)
        except WireError as error:
            raise WireError(error.message, at + (error.offset or 0)) from None
        size = frame.stop
        memory = bytearray(head)
        while len(memory) < size:
            # In steps, so that a header that lies about its length costs no more than the bytes that come.
            step = _read(file, min(size - len(memory), 16 << 20))
            if not step:
                raise WireError(f"the frame takes {size} bytes, {len(memory)} are there", at + len(memory))
            memory += step
        try:
            frame_read = decode(memory, verify=verify, limits=limits, private=True)
        except WireError as error:
            raise WireError(error.message, None if error.offset is None else at + error.offset) from None
        yield frame_read
        at += size


def _read(file: BinaryIO, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def to_trxp(experiences: Iterable[Experience]) -> bytes:
    """These records as a TRXP 1 payload, which Trinity-RFT 0.5.2 and later read; see `rollbook.core.trxp`."""
    from rollbook.core import trxp

    return trxp.write(experiences)


__all__ = [
    "DEFAULT_LIMITS",
    "FREE_BYTES",
    "MAGIC",
    "VERSION",
    "Frame",
    "Limits",
    "WireError",
    "decode",
    "encode",
    "encoded_size",
    "iter_frames",
    "read_header",
    "to_trxp",
    "write_frame",
]
