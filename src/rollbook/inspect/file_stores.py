"""Stores: rows of a file (lines, elements of a JSON array, rows of a table, members of an archive), and size limits.

A store has `grown()`, whether its file only gained rows since it was last read (otherwise a changed file is read
again); `scan(more)`, which yields (a, b, row or `WireError`) of all rows, or of new ones; `fetch(places)`; `log`,
metadata of the file for all rows; and `stamp()`, which differs when the file has changed.

Invariant: `scan` yields every row with two numbers that locate it, and `fetch` returns the same row for them while the
file is unchanged; neither holds more than a row, a batch or a member. An unreadable row is returned as the error, and
reading continues after it. Sizes, depths and names in a file are checked before use, and nothing in it is executed;
exceeding a limit is a `WireError` that names the limit.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import orjson
import pyarrow as pa

from rollbook.core.errors import WireError
from rollbook.core.wire import DEFAULT_LIMITS
from rollbook.core.wire import FREE_BYTES as FREE_BYTES
from rollbook.io import parquet
from rollbook.io.rows import check_depth

if TYPE_CHECKING:
    from rollbook.inspect.trajectory import Json

MAX_ROW = 256 << 20
"""Maximum bytes of a line, an element or a member of an archive."""
MAX_JSON = 512 << 20
"""Maximum bytes of a file that is one JSON value."""
MAX_UNPACKED = 4 << 30
"""Maximum bytes of an unpacked file."""
MAX_RATIO = DEFAULT_LIMITS.max_ratio
"""Maximum compression ratio, above `FREE_BYTES`."""
MAX_DEPTH = 128
MAX_PICTURE = 32 << 20
MAX_PIXELS = 100_000_000
MAX_FILES = 100_000
MAX_FOLDERS = 6
"""Maximum folder depth."""

_DIGITS = re.compile(r"(\d{1,18})")


def parse_json(data: bytes | memoryview, label: str = "the row") -> Any:
    """Parse a JSON value; NaN and Infinity are accepted as in Python's json.

    >>> parse_json(b'{"reward": NaN}')
    {'reward': nan}
    """
    if len(data) > MAX_ROW:
        raise WireError(f"{label} has {len(data)} bytes, over the limit of {MAX_ROW}")
    try:
        value = orjson.loads(data)
    except ValueError as error:
        text = bytes(data)
        if b"NaN" not in text and b"Infinity" not in text and b"\\ud" not in text.lower():
            raise WireError(f"{label} is not JSON: {error}") from None
        try:
            value = json.loads(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as other:
            raise WireError(f"{label} is not JSON: {other}") from None
        check_depth([value], MAX_DEPTH + 1)
        return _replace_surrogates(value)
    if type(value) is dict or type(value) is list:
        check_depth(value, MAX_DEPTH)
    return value


def _replace_surrogates(value: Json) -> Any:
    """Replace lone surrogates in texts with U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    return (
        {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def parse_row(data: bytes | memoryview) -> dict[str, Any]:
    """Parse a JSON object."""
    value = parse_json(data)
    if type(value) is not dict:
        raise WireError(f"the row is a JSON {type(value).__name__}, expected an object")
    return value


def parse_number(value: Json) -> float | None:
    """Return a number, or the only number of a list; NaN counts as one.

    >>> parse_number(True), parse_number([2]), parse_number("3"), parse_number(None)
    (1.0, 2.0, None, None)
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int):
        return float(value) if abs(value) < 2**63 else None
    return value if isinstance(value, float) else None


def parse_int(value: Json) -> int | None:
    """Return a 64-bit integer.

    >>> parse_int(3.0), parse_int("17"), parse_int(2.5), parse_int(True)
    (3, 17, None, None)
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


def parse_numbers(values: Json) -> dict[str, float]:
    """Return the finite numbers of a dict by name.

    >>> parse_numbers({"acc": True, "note": "x", "len": -0.5, "odd": float("nan")})
    {'acc': 1.0, 'len': -0.5}
    """
    if not isinstance(values, dict):
        return {}
    parsed = {str(name): parse_number(value) for name, value in values.items()}
    return {name: value for name, value in parsed.items() if value is not None and math.isfinite(value)}


# --- names ----------------------------------------------------------------------------------------------------------


def natural_sort_key(path: str) -> list[Any]:
    """Return a sort key that orders numbers in names numerically.

    >>> sorted(["10.jsonl", "9.jsonl", "a/2.json"], key=natural_sort_key)
    ['9.jsonl', '10.jsonl', 'a/2.json']
    """
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in _DIGITS.split(path) if piece]


def display_name(name: str) -> str:
    """Return a file name as text; bytes that are not UTF-8 are replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def inside(root: str, path: str) -> bool:
    """Return whether a path, with links resolved, is in the folder `root`, whose links are resolved already."""
    return os.path.realpath(path).startswith(os.path.join(root, ""))


def list_files(root: str) -> tuple[list[str], list[str]]:
    """Return the files in a folder and its subfolders, relative and sorted, and the links that leave it."""
    real = os.path.realpath(root)
    files: list[str] = []
    outside_links: list[str] = []
    for folder, folders, names in os.walk(real):
        below = os.path.relpath(folder, real)
        depth = 0 if below == "." else below.count(os.sep) + 1
        folders[:] = [name for name in folders if not name.startswith(".") and depth + 1 < MAX_FOLDERS]
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(path):
                continue
            leaves = os.path.islink(path) and not inside(real, path)
            (outside_links if leaves else files).append(name if below == "." else os.path.join(below, name))
            if len(files) > MAX_FILES:
                raise WireError(f"{root}: more than {MAX_FILES} files, expected the folder of one run")
    return sorted(files, key=natural_sort_key), outside_links


def resolve_path(root: str, name: Json) -> str | None:
    """Return the path of a file named by a row, if it is a plain relative name in the folder `root`."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or os.path.isabs(name) or ":" in name:
        return None
    if ".." in name.split("/"):
        return None
    path = os.path.join(root, name)
    return path if os.path.isfile(path) and inside(os.path.realpath(root), path) else None


Row = dict[str, Any]
Place = tuple[int, int]
ScannedRow = tuple[int, int, Row | WireError]


# --- stores ---------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """Interface of stores; see the module."""

    log: Row

    def stamp(self) -> tuple[int, ...]: ...

    def grown(self) -> bool: ...

    def scan(self, more: bool) -> Iterator[ScannedRow]: ...

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]: ...


def file_stamp(path: str) -> tuple[int, ...]:
    """Return size, modification time and inode of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


class StaticFile:
    """A file that is read again when it has changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.log: Row = {}

    def stamp(self) -> tuple[int, ...]:
        return file_stamp(self.path)

    def grown(self) -> bool:
        return False


class AppendOnlyFile:
    """An append-only file; a replaced file is detected by the first and last bytes that were read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.log: Row = {}
        self.done = 0
        """Number of bytes read so far."""
        self._seen = b""

    def stamp(self) -> tuple[int, ...]:
        return file_stamp(self.path)

    def grown(self) -> bool:
        return bool(self.done) and self._edges() == self._seen

    def remember(self) -> None:
        """Store the state at the end of a scan."""
        self._seen = self._edges()

    def _edges(self) -> bytes:
        with open(self.path, "rb") as file:
            first = file.read(min(256, self.done))
            file.seek(max(self.done - 256, 0))
            return first + file.read(min(256, self.done))


# --- lines ----------------------------------------------------------------------------------------------------------


class Lines(AppendOnlyFile):
    """JSON lines; (a, b): offset and length of a line.

    A last line without a line end is read if it is a complete object.
    """

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        self.done = self.done if more else 0
        with open(self.path, "rb") as file:
            file.seek(self.done)
            while line := file.readline(MAX_ROW + 2):
                at = self.done
                if len(line) > MAX_ROW + 1:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(1 << 20)
                    self.done = file.tell()
                    yield at, 0, WireError(f"a line is over the limit of {MAX_ROW} bytes")
                    continue
                text = line.strip()
                row: Row | WireError | None = None
                if text:
                    try:
                        row = parse_row(text)
                    except WireError as error:
                        if not line.endswith(b"\n"):
                            break  # being written
                        row = error
                self.done = at + len(line)
                if row is not None:
                    yield at, len(line), row
        self.remember()

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        rows = {}
        with open(self.path, "rb") as file:
            for at, length in places:
                file.seek(at)
                rows[at, length] = parse_row(file.read(min(length, MAX_ROW + 2)).strip())
        return rows


def unpack(path: str, into: str) -> None:
    """Unpack a gzip or zstd file to `into`, within the limits; of a truncated file, the readable part."""
    with open(path, "rb") as file, open(into, "wb") as out:
        head = file.read(4)
        file.seek(0)
        pieces = _gunzip(file) if head[:2] == b"\x1f\x8b" else _unzstd(file)
        size, packed, total = 0, os.path.getsize(path), MAX_UNPACKED
        for piece in pieces:
            size += len(piece)
            if size > total or (size > FREE_BYTES and size > packed * MAX_RATIO):
                raise WireError(
                    f"{path}: {packed} bytes become more than {size}, over the limit of {total} bytes or "
                    f"{MAX_RATIO} times the size"
                )
            out.write(piece)


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    reader = zlib.decompressobj(31)
    while data := file.read(1 << 20):
        while data:
            try:
                yield reader.decompress(data, 1 << 22)
            except zlib.error as error:
                raise WireError(f"the compressed data is damaged: {error}") from None
            data = reader.unconsumed_tail
            if reader.eof:
                data, reader = reader.unused_data, zlib.decompressobj(31)
    yield reader.flush()


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    try:
        stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    except (pa.ArrowException, ValueError, NotImplementedError):
        raise WireError("this pyarrow has no zstd") from None
    try:
        while piece := stream.read(1 << 22):
            yield piece
    except (pa.ArrowException, OSError):
        # An incomplete or damaged frame: everything before it is shown.
        return


# --- one JSON value -------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.S)


def find_elements(data: bytes | mmap.mmap, at: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the objects and lists in the array or object at byte `at`; `WireError` after the last
    complete one if the text is truncated.

    >>> data = b' [{"a": "]"}, 3, [{"b": 1}]]'
    >>> [data[a:b] for a, b in find_elements(data, 1)]
    [b'{"a": "]"}', b'[{"b": 1}]']
    """
    depth = start = 0
    for match in _TOKEN.finditer(data, at):
        begin = match.start()
        token = data[begin]
        if token == 0x22:
            if match.end() - begin == 1:
                break
            continue
        if token in (0x5B, 0x7B):
            if depth == 1:
                start = begin
            depth += 1
            continue
        depth -= 1
        if depth == 1:
            yield start, match.end()
        elif depth <= 0:
            return
    raise WireError("the file ends inside a value: it is incomplete or still being written")


_KEY = re.compile(rb'"((?:[^"\\]|\\.){1,64})"\s*:\s*\Z')


class Elements(StaticFile):
    """Objects of a JSON array, or of the array under `key` of an object; (a, b): offset and length of an element."""

    def __init__(self, path: str, key: str | None = None) -> None:
        super().__init__(path)
        self.key = key

    def _mapped(self) -> mmap.mmap:
        size = os.path.getsize(self.path)
        if size > MAX_JSON:
            raise WireError(f"{self.path}: a JSON value of {size} bytes is over the limit of {MAX_JSON}; use JSONL")
        if not size:
            raise WireError(f"{self.path}: the file is empty")
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        with self._mapped() as data:
            at = self._first(data)
            if at is None:
                return
            try:
                for begin, end in find_elements(data, at):
                    try:
                        yield begin, end - begin, parse_row(data[begin:end])
                    except WireError as error:
                        yield begin, end - begin, error
            except WireError as error:
                yield len(data), 0, error

    def _first(self, data: mmap.mmap) -> int | None:
        """Return the offset of the array; objects before it are stored in `log`."""
        begin = len(data[:4096]) - len(data[:4096].lstrip())
        if self.key is None:
            return begin
        first = None
        try:
            for a, b in find_elements(data, begin):
                name = self._name(data, a)
                if name == self.key:
                    first = a
                elif b - a <= 1 << 20:
                    self.log[name] = parse_json(data[a:b])
        except WireError:
            # Probably truncated inside the array: its complete elements are read.
            for match in re.finditer(rb'"' + re.escape(self.key.encode()) + rb'"\s*:\s*\[', data):
                return match.end() - 1
        return first

    def _name(self, data: mmap.mmap, at: int) -> str:
        match = _KEY.search(data[max(0, at - 128) : at])
        return match[1].decode("utf-8", "replace") if match else ""

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        with self._mapped() as data:
            if self.key is not None and not self.log:
                self._first(data)
            return {(at, length): parse_row(data[at : at + length]) for at, length in places}


# --- tables ---------------------------------------------------------------------------------------------------------


class Table(StaticFile):
    """Rows of a Parquet file, converted by `decode`; (a, b): number of the row, and 0."""

    def __init__(self, path: str, decode: Callable[[pa.RecordBatch], Iterable[Row]]) -> None:
        super().__init__(path)
        self.decode = decode

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        at = 0
        # Few at a time: as Python values, rows take many times their size.
        for batch in parquet.batches(self.path, 32, max_row_bytes=MAX_ROW):
            for row in self.decode(batch):
                yield at, 0, row
                at += 1

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        import pyarrow.parquet as pq

        rows: dict[Place, Row] = {}
        indices = sorted({at for at, _ in places})
        with pq.ParquetFile(self.path) as file:
            first = 0
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                rows_in_batch = [at - first for at in indices if first <= at < first + count]
                if rows_in_batch:
                    passed = 0
                    for batch in parquet.batches(self.path, 32, max_row_bytes=MAX_ROW, row_groups=[group]):
                        for at in rows_in_batch:
                            if passed <= at < passed + len(batch):
                                (row,) = self.decode(batch.slice(at - passed, 1))
                                rows[first + at, 0] = row
                        passed += len(batch)
                        if passed > rows_in_batch[-1]:
                            break
                first += count
        return rows


def to_dicts(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a batch as dicts without null values."""
    return [{name: value for name, value in row.items() if value is not None} for row in batch.to_pylist()]


# --- archives -------------------------------------------------------------------------------------------------------

_ZSTD = 93


class Members(StaticFile):
    """Members of a zip archive with matching names; (a, b): offset of a member, and 0. A later member replaces an
    earlier one of the same name.
    """

    def __init__(self, path: str, pattern: str, log: tuple[str, ...]) -> None:
        super().__init__(path)
        self.pattern = re.compile(pattern)
        self.logs = log

    def _live(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        return {info.filename: info for info in archive.infolist()}

    def _opened(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise WireError(f"{self.path}: cannot read the zip archive: {error}") from None

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        with self._opened() as archive:
            live = self._live(archive)
            self._read_log(archive, live)
            infos = [info for name, info in live.items() if self.pattern.fullmatch(name)]
            for info in sorted(infos, key=lambda info: info.header_offset):
                try:
                    yield info.header_offset, 0, parse_row(read_member(archive, info))
                except WireError as error:
                    yield info.header_offset, 0, error

    def _read_log(self, archive: zipfile.ZipFile, live: dict[str, zipfile.ZipInfo]) -> None:
        for name in self.logs:
            if name in live:
                self.log = parse_row(read_member(archive, live[name]))
                return

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        with self._opened() as archive:
            live = self._live(archive)
            if not self.log:
                self._read_log(archive, live)
            by_offset = {info.header_offset: info for info in live.values()}
            return {(at, b): parse_row(read_member(archive, by_offset[at])) for at, b in places}


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the content of a member: stored, deflated or zstd, which Python's zipfile does not support."""
    max_bytes = min(MAX_ROW, max(FREE_BYTES, info.compress_size * MAX_RATIO))
    try:
        if info.compress_type == _ZSTD:
            data = _zstd_member(archive, info, max_bytes)
        else:
            with archive.open(info) as stream:
                data = stream.read(max_bytes + 1)
    except (zipfile.BadZipFile, zlib.error, pa.ArrowException, OSError, NotImplementedError, RuntimeError) as error:
        raise WireError(f"member {info.filename!r} cannot be read: {error}") from None
    if len(data) > max_bytes:
        raise WireError(f"member {info.filename!r} is over the limit of {max_bytes} bytes")
    return data


def _zstd_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    file = archive.fp
    if file is None:
        raise WireError("the archive is closed")
    file.seek(info.header_offset)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise WireError(f"member {info.filename!r} has no header")
    file.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), os.SEEK_CUR)
    packed = file.read(min(info.compress_size, MAX_ROW))
    pieces, size = [], 0
    # Several consecutive frames, which the stream reads through.
    stream = pa.CompressedInputStream(pa.BufferReader(packed), "zstd")
    while size <= max_bytes and (piece := stream.read(1 << 22)):
        pieces.append(piece)
        size += len(piece)
    data = b"".join(pieces)
    if size <= max_bytes and (size != info.file_size or zlib.crc32(data) != info.CRC):
        raise WireError(f"member {info.filename!r} is damaged: wrong size or checksum")
    return data
