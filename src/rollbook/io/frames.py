"""Files of frames (see `rollbook.core.wire`), and of Trinity-RFT's TRXP payloads.

Invariant: neither side holds more than one frame or payload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from rollbook.core import wire
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import owner
from rollbook.core.wire import DEFAULT_LIMITS, Limits
from rollbook.io.tables import ErrorHandler, list_files


def write_frames(batches: Iterable[Experiences], path: str, *, compression: str | None = None) -> int:
    """Write one frame per batch; return the number of records."""
    return _write(batches, path, lambda batch: wire.encode(batch, compression=compression))


def write_trxp(batches: Iterable[Experiences], path: str) -> int:
    """Write one TRXP payload per batch; Trinity reads a file of one payload with `Experience.deserialize_many`."""

    def payload(batch: Experiences) -> bytes:
        unknown = [name for name in batch.columns if owner(name) is None]
        if unknown:
            raise ValueError(f"the columns {', '.join(unknown)} of a newer version cannot be kept in TRXP")
        return wire.to_trxp(batch)

    return _write(batches, path, payload)


def _write(batches: Iterable[Experiences], path: str, encode: Callable[[Experiences], bytes]) -> int:
    count = 0
    with open(path, "wb") as file:
        for batch in batches:
            file.write(encode(batch))
            count += len(batch)
    return count


def read_frames(
    path: str, batch_rows: int, errors: ErrorHandler, *, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Experiences]:
    """Read the records of all frames. A frame with a damaged body can be skipped; a damaged header ends the file."""

    def size(head: bytes) -> int:
        return wire.read_header(head, 0, limits).stop

    def records(data: bytearray) -> Experiences:
        return wire.decode(data, limits=limits, private=True)

    for name in list_files(path):
        yield from _read(name, wire.HEADER_BYTES, size, records, errors)


def read_trxp(
    path: str, batch_rows: int, errors: ErrorHandler, *, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Experiences]:
    """Read the records of all TRXP payloads, or of the one pickle that an older Trinity wrote."""
    from rollbook.core import trxp

    def size(head: bytes) -> int:
        if head[:4] != trxp.MAGIC or len(head) < trxp._HEADER.size:
            raise WireError(f"{head[:4]!r} is not a TRXP header", 0)
        _, _, meta, tensors = trxp._HEADER.unpack(head)
        return int(trxp._HEADER.size + meta + tensors)

    def records(data: bytearray) -> Experiences:
        return Experiences(trxp.read(memoryview(data), limits))

    for name in list_files(path):
        with open(name, "rb") as file:
            first = file.read(4)
            if first and first != trxp.MAGIC:
                yield records(bytearray(first + file.read(limits.max_bytes)))
                continue
        yield from _read(name, trxp._HEADER.size, size, records, errors, limits.max_bytes)


def _read(
    path: str,
    head_bytes: int,
    size: Callable[[bytes], int],
    records: Callable[[bytearray], Experiences],
    errors: ErrorHandler,
    max_bytes: int = 1 << 62,
) -> Iterator[Experiences]:
    """Read chunks whose header states their length; memory grows with the bytes that are there, not with the header."""
    with open(path, "rb") as file:
        at = 0
        while head := file.read(head_bytes):
            where = f"{os.path.basename(path)}: byte {at}"
            try:
                total = size(head)
                if total > max_bytes:
                    raise WireError(f"{total} bytes are over the limit of {max_bytes}")
            except WireError as error:
                # The start of the next chunk is unknown.
                raise WireError(f"{os.path.basename(path)}: {error.message}", at + (error.offset or 0)) from None
            data = bytearray(head)
            _fill(file, data, total)
            try:
                if len(data) < total:
                    raise WireError(f"the file ends after {len(data)} of {total} bytes")
                batch = records(data)
            except WireError as error:
                errors.handle(where, error)
            else:
                yield batch
            at += total


def _fill(file: BinaryIO, data: bytearray, total: int) -> None:
    while len(data) < total and (part := file.read(min(total - len(data), 16 << 20))):
        data += part
