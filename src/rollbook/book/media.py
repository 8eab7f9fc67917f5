"""Media: large tensors and base64 texts are stored once per book, under their hash, and replaced by references.

Invariant: `restore(extract(records).stripped, fetch)` equals `records`, column by column and byte by byte; selecting or
joining stripped records first makes no difference. A separate column lists the references, so that no data of a user
can be mistaken for one.

Media are, from `min_bytes` on:

- a tensor in a media column (`multi_modal_inputs`);
- base64 in a free-form column, as the value of `$bytes` or `data` (bytes, tensors and arrays as
  `rollbook.core.freeform` writes them, a server's `input_audio` and `source`), of `b64_json`, or in a
  `data:...;base64,` URL.

Each is replaced by the text `sha256:` and 64 hexadecimal digits. The column `book__media` lists {column, at, hash} for
each record with media: `at` is the index of the entry in a media column, or the byte where the reference begins in a
text. The context of a medium (key, dtype, shape, the URL's type) stays in the record and can be queried. The column
`book__evaluation` is true for records for evaluation; a repair without a ledger reads it.

The layout of a blob in a store, all numbers little-endian:

    0   8  magic        8d 52 4f 4c 4c 4d 44 0a
    8   2  version      1
    10  2  kind         1 tensor, 2 bytes, 3 text
    12  4  described    bytes of description
    16  8  length       bytes of payload
    24  32 hash         sha256 of "rollbook medium 1", kind and description, each ended by a zero, and the payload
    56  8  checksum     xxh3-64 of bytes 0 to 55, payload and description
    64  …  payload      then the description (`float32 3,224,224` of a tensor), then zeros to a multiple of 64

>>> from rollbook import Experience, Experiences
>>> image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 500}}
>>> messages = [{"role": "user", "content": [image]}]
>>> records = Experiences([Experience(tokens=[1, 2, 3], messages=messages) for _ in range(4)])
>>> extracted = extract(records)
>>> [(blob.kind, len(blob.payload)) for blob in extracted.blobs.values()], [len(hashes) for hashes in extracted.uses]
([('bytes', 1500)], [1, 1, 1, 1])
>>> store = {name: blob.data for name, blob in extracted.blobs.items()}
>>> restore(extracted.stripped, store.__getitem__) == records
True
"""

from __future__ import annotations

import binascii
import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rollbook.core import columns as arrow
from rollbook.core.columns import MEDIA, Columns, Values
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import owner
from rollbook.core.ragged import allocate, check_shape, compute_offsets
from rollbook.core.wire import DEFAULT_LIMITS, RowLayout

Kind = Literal["tensor", "bytes", "text"]
MAGIC = b"\x8dROLLMD\n"
VERSION = 1
REFERENCES_COLUMN = "book__media"
"""The column of references."""
EVALUATION_COLUMN = "book__evaluation"
"""The column that marks records for evaluation; absent if there are none."""
BOOK_COLUMNS = (REFERENCES_COLUMN, EVALUATION_COLUMN)
"""Columns of the book. Other columns whose names begin so are stored with one more character."""
REFERENCES_TYPE = pa.large_list(
    pa.struct([("column", pa.large_string()), ("at", pa.int64()), ("hash", pa.large_string())]),
)
MIN_MEDIUM_BYTES = 1024
MIN_BASE64 = -(-4 * MIN_MEDIUM_BYTES // 3)
"""Length of the base64 of `MIN_MEDIUM_BYTES` bytes."""

_HEADER = struct.Struct("<8sHHIQ32sQ")
_ALIGN = 64
_PREFIX = b"sha256:"
_REFERENCE_BYTES = len(_PREFIX) + 64
_HASH = re.compile(r"[0-9a-f]{64}")
_DESCRIPTION = re.compile(rb"([a-z0-9_]{1,32}) ((?:[0-9]{1,19}(?:,[0-9]{1,19}){0,63})?)")
_KINDS: tuple[Kind, ...] = get_args(Kind)
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_%"
_IN_ALPHABET = np.isin(np.arange(256, dtype=np.uint8), np.frombuffer(_ALPHABET, dtype=np.uint8))
_WINDOW_BYTES = 32
_BASE64_PREFIX = re.compile(rb'"(?:(?:\$bytes|data|b64_json)":"|data:[ !#-+\--\[\]-~]{0,255};base64,)')
"""The text before base64, which ends at the next quote, since quotes inside JSON strings are escaped. A match of
another key that ends like one of these is harmless, since the text is restored unchanged."""


# --- blobs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blob:
    """One medium: its hash, kind and bytes, which are not copied until `data` is read."""

    hash: str
    """64 hexadecimal digits; covers kind, dtype, shape and payload."""
    kind: Kind
    """`tensor`; `bytes`, which are base64 in the text; or `text`, base64 in another form than Python writes."""
    dtype: str
    """Of a tensor, by torch's name."""
    shape: tuple[int, ...]
    """Of a tensor."""
    payload: memoryview

    @property
    def size(self) -> int:
        """How many bytes `data` has."""
        return _padded_size(len(self.payload), len(_describe(self.kind, self.dtype, self.shape)))

    @property
    def data(self) -> bytes:
        """The blob as a store keeps it; `open_blob` is the inverse."""
        described = _describe(self.kind, self.dtype, self.shape)
        length = len(self.payload)
        head = _HEADER.pack(
            MAGIC, VERSION, 1 + _KINDS.index(self.kind), len(described), length, bytes.fromhex(self.hash), 0
        )[:56]
        checksum = _checksum(head, self.payload, described)
        padding = bytes(_padded_size(length, len(described)) - _ALIGN - length - len(described))
        return b"".join((head, struct.pack("<Q", checksum), self.payload, described, padding))


def _describe(kind: Kind, dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {','.join(map(str, shape))}".encode() if kind == "tensor" else b""


def _padded_size(length: int, described: int) -> int:
    return -(-(_ALIGN + length + described) // _ALIGN) * _ALIGN


def _checksum(*pieces: bytes | memoryview) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def _digest(kind: Kind, described: bytes, payload: bytes | memoryview) -> str:
    # A cryptographic hash: a writer of a book must not be able to replace another's medium.
    state = hashlib.sha256(b"rollbook medium 1\0" + kind.encode() + b"\0" + described + b"\0")
    state.update(payload)
    return state.hexdigest()


def blob_size(head: bytes | memoryview) -> int:
    """Return the size of a blob in bytes, from its first 64 bytes or more."""
    return _read_header(memoryview(head).cast("B"))[-1]


def _read_header(view: memoryview) -> tuple[Kind, int, int, bytes, int, int]:
    if len(view) < _ALIGN:
        raise WireError(f"a blob is replacement short: {len(view)} bytes, expected {_ALIGN} of header", len(view))
    magic, version, kind, described, length, digest, checksum = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"bad magic {magic!r}: not a blob (a blob begins with {MAGIC!r})", 0)
    if version != VERSION:
        raise WireError(f"blob version {version} is not supported, expected {VERSION}", 8)
    if not 1 <= kind <= len(_KINDS):
        raise WireError(f"blob kind {kind} is unknown", 10)
    if length > DEFAULT_LIMITS.max_bytes:
        raise WireError(f"a blob of {length} bytes is over the limit of {DEFAULT_LIMITS.max_bytes}", 16)
    return _KINDS[kind - 1], described, length, digest, checksum, _padded_size(length, described)


def open_blob(data: bytes | memoryview, *, verify: bool = False) -> Blob:
    """Parse a blob without copying it.

    Args:
        data: The bytes.
        verify: Also verify the SHA-256 hash, which detects forgery and takes ten times as long. The checksum, which
            detects accidental damage, is always verified.

    Raises:
        WireError: The bytes are damaged.

    >>> blob = Blob(_digest("bytes", b"", b"png"), "bytes", "", (), memoryview(b"png"))
    >>> bytes(open_blob(blob.data, verify=True).payload), blob.size
    (b'png', 128)
    >>> open_blob(blob.data.replace(b"png", b"jpg"))
    Traceback (most recent call last):
        ...
    rollbook.core.errors.WireError: byte 56: the blob does not match its checksum
    """
    view = memoryview(data).cast("B")
    kind, described, length, digest, checksum, size = _read_header(view)
    if len(view) != size:
        raise WireError(f"the blob takes {size} bytes, {len(view)} are there", min(size, len(view)))
    payload, end = view[_ALIGN : _ALIGN + length], _ALIGN + length + described
    description = bytes(view[_ALIGN + length : end])
    if _checksum(view[:56], payload, description) != checksum:
        raise WireError("the blob does not match its checksum", 56)
    if any(view[end:]):
        raise WireError("the padding after the blob is not zero", end)
    dtype, shape = "", tuple[int, ...]()
    if kind == "tensor":
        match = _DESCRIPTION.fullmatch(description)
        if match is None:
            raise WireError(f"the blob is described as {description[:80]!r}, not a tensor", _ALIGN + length)
        dtype = match[1].decode()
        shape = check_shape(dtype, [int(size) for size in match[2].split(b",") if size], length, "a blob's tensor")
    if _describe(kind, dtype, shape) != description:
        raise WireError(f"the blob is described as {description[:80]!r}, not in canonical form", _ALIGN + length)
    if kind == "text" and not bytes(payload).isascii():
        raise WireError("the blob holds text that is not ASCII", _ALIGN)
    if verify and _digest(kind, description, payload) != digest.hex():
        raise WireError(f"the blob does not match its hash {digest.hex()}", 24)
    return Blob(digest.hex(), kind, dtype, shape, payload)


# --- extracting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extracted:
    """Records, with references instead of media, and their media."""

    stripped: Experiences
    """The same records with references; the same object if there are no media."""
    blobs: dict[str, Blob]
    """Each distinct medium, by hash."""
    uses: list[tuple[str, ...]]
    """[N] The distinct hashes that each record refers to, in the order of their first use."""


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A range of bytes of a column's data, and its replacement."""

    start: int
    stop: int
    new: Any


@dataclass
class _BlobCollector:
    """The media found so far; equal ones are hashed once."""

    blobs: dict[str, Blob] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], tuple[str, NDArray[np.uint8]]] = field(default_factory=dict)

    def add(self, kind: Kind, content: NDArray[np.uint8], dtype: str = "", shape: tuple[int, ...] = ()) -> str | None:
        """Hash and store a medium (a tensor's elements, or base64); return `None` for invalid base64."""
        # Records of a group often have the same images, which a hash that is ten times as fast finds. A match is
        # compared, not trusted.
        key = (kind, dtype, shape, len(content), xxhash.xxh3_128_intdigest(content.data))
        seen = self._seen.get(key)
        if seen is not None and np.array_equal(seen[1], content):
            return seen[0]
        payload = content.data
        if kind == "bytes":
            decoded = _from_base64(payload)
            if decoded is not None:
                payload = memoryview(decoded)
            elif bytes(payload).translate(None, _ALPHABET):
                return None
            else:
                kind = "text"
        name = _digest(kind, _describe(kind, dtype, shape), payload)
        self.blobs.setdefault(name, Blob(name, kind, dtype, shape, payload))
        self._seen[key] = name, content
        return name


def _from_base64(text: memoryview) -> bytes | None:
    """Decode base64, or return `None` if encoding the result gives another text."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return None
    # Bits after the last byte must be zero, which decoders do not check.
    tail = len(data) // 3 * 3
    canonical = len(data) % 3 == 0 or binascii.b2a_base64(data[tail:], newline=False) == bytes(text[-4:])
    return data if canonical and len(text) == -(-len(data) // 3) * 4 else None


def extract(records: Experiences, min_bytes: int = MIN_MEDIUM_BYTES, evaluation: Sequence[bool] = ()) -> Extracted:
    """Separate records from their media.

    Args:
        records: The records.
        min_bytes: The smallest size of a medium, in bytes.
        evaluation: Whether each record is for evaluation; by default none is.

    Returns:
        The records with references, the media, and the media of each record.

    >>> import torch
    >>> from rollbook import Experience
    >>> image = torch.zeros(4, 1176, dtype=torch.bfloat16)
    >>> row = Experience(tokens=[1, 2, 3], multi_modal_inputs={"pixel_values": image, "image_grid_thw": [[1, 2, 2]]})
    >>> extracted = extract(Experiences([row, row]))
    >>> [(blob.dtype, blob.shape) for blob in extracted.blobs.values()]
    [('bfloat16', (4, 1176))]
    """
    if type(min_bytes) is not int or min_bytes < 1:
        raise ValueError(f"min_bytes: got {min_bytes!r}, expected an integer >= 1")
    columns = records.columns
    gathered = _BlobCollector()
    listed: dict[int, list[dict[str, Any]]] = {}
    changed: Columns = {}
    for name, column in columns.items():
        entry = owner(name)
        if entry is None or entry[0].kind not in ("json", "media"):
            continue
        kind = entry[0].kind
        if kind == "json" and np.diff(_text_memory(column)[1]).max(initial=0) < min_bytes:
            continue  # Every text is shorter than a medium.
        replacements = (_extract_tensors if kind == "media" else _extract_texts)(column, min_bytes, gathered)
        if replacements:
            changed[name] = _replace_pieces(column, [replacement for _, _, replacement in replacements])
        for row, at, replacement in replacements:
            reference = replacement.new.removeprefix(_PREFIX).decode()
            listed.setdefault(row, []).append({"column": name, "at": at, "hash": reference})
    stripped_columns = {
        f"{name}+" if name.startswith(BOOK_COLUMNS) else name: changed.get(name, c) for name, c in columns.items()
    }
    if changed:
        stripped_columns[REFERENCES_COLUMN] = pa.array(
            [listed.get(row) for row in range(len(records))], REFERENCES_TYPE
        )
    if any(evaluation):
        stripped_columns[EVALUATION_COLUMN] = pa.array(evaluation, pa.bool_())
    stripped = (
        records
        if stripped_columns.keys() == columns.keys()
        else Experiences.from_encoded(stripped_columns, len(records))
    )
    uses: list[tuple[str, ...]] = [()] * len(records)
    for row, items in listed.items():
        uses[row] = _distinct_hashes(items)
    return Extracted(stripped, gathered.blobs, uses)


def _distinct_hashes(listed: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item["hash"] for item in listed))


def _extract_tensors(column: pa.Array, min_bytes: int, gathered: _BlobCollector) -> list[tuple[int, int, _Replacement]]:
    """Return (row, entry in the row, replacement in the data) of each large and valid tensor."""
    entries, rows = _tensor_entries(column)
    memory, bounds = _text_memory(entries.field("data"))
    heavy = np.diff(bounds) >= min_bytes
    for array in (entries, entries.field("data")):
        valid = arrow.validity(array)
        if valid is not None:
            heavy &= valid
    indices = np.flatnonzero(heavy)
    owners = np.searchsorted(rows, indices, side="right") - 1
    valid = arrow.validity(column)
    if valid is not None:
        indices, owners = indices[valid[owners]], owners[valid[owners]]
    replacements = []
    for entry, row, description in zip(
        indices.tolist(), owners.tolist(), _describe_entries(entries, indices), strict=True
    ):
        start, stop = int(bounds[entry]), int(bounds[entry + 1])
        try:
            shape = check_shape(description["dtype"], description["shape"], stop - start, "")
        except WireError:
            continue  # Not a valid tensor: it is not changed, and making a row of it raises.
        if name := gathered.add("tensor", memory[start:stop], description["dtype"], shape):
            replacements.append((row, entry - int(rows[row]), _Replacement(start, stop, _PREFIX + name.encode())))
    return replacements


def _extract_texts(column: pa.Array, min_bytes: int, gathered: _BlobCollector) -> list[tuple[int, int, _Replacement]]:
    """Return (row, byte of the reference in the row, replacement in the column's text) of each large base64 text."""
    shortest = -(-4 * min_bytes // 3)
    memory, bounds = _text_memory(column)
    replacements = []
    for row in _rows_with_runs(memory, bounds, shortest):
        if not column[row].is_valid:
            continue
        start = int(bounds[row])
        text = memory[start : int(bounds[row + 1])].tobytes()
        grown = last = 0
        while (lead := _BASE64_PREFIX.search(text, last)) is not None:
            first = lead.end()
            last = text.find(b'"', first)
            if last < 0:
                break
            if last - first - text[last - 2 : last].count(b"=") < shortest:
                continue
            name = gathered.add("bytes", memory[start + first : start + last])
            if name is not None:
                replacements.append(
                    (row, first + grown, _Replacement(start + first, start + last, _PREFIX + name.encode()))
                )
                grown += _REFERENCE_BYTES - (last - first)
    return replacements


def may_hold_media(layout: RowLayout) -> bool:
    """Return whether rows may have base64 to extract; long texts are scanned, not parsed."""
    for column in layout.columns.values():
        if isinstance(column, Values) and column.flat is not None and column.data is not None:
            texts = [text for text in column.data if text is not None and len(text) >= MIN_BASE64]
            memory = np.frombuffer(b"".join(texts), dtype=np.uint8)
            if texts and _rows_with_runs(memory, compute_offsets(list(map(len, texts))), MIN_BASE64):
                return True
    return False


def _rows_with_runs(memory: NDArray[np.uint8], bounds: NDArray[np.int64], shortest: int) -> list[int]:
    """Return the rows that may hold a run of `shortest` base64 characters, by looking at a few bytes."""
    if not len(bounds) or int(np.diff(bounds).max(initial=0)) < shortest:
        return []
    # Such a run completely covers one of the windows that begin every `step` bytes.
    width = min(_WINDOW_BYTES, -(-shortest // 2))
    step = shortest - width + 1
    first = int(bounds[0])
    text = memory[first : int(bounds[-1])]
    windows = np.lib.stride_tricks.sliding_window_view(text, width)[::step]
    starts = np.flatnonzero(_IN_ALPHABET[windows].all(axis=1)) * step + first
    rows = np.searchsorted(bounds, starts, side="right") - 1
    return [int(row) for row in np.unique(rows)]


# --- restoring ------------------------------------------------------------------------------------------------------


def references(stripped: Experiences) -> list[tuple[str, ...]]:
    """Return the distinct hashes that each record of a stored frame refers to, [N]; fetches nothing.

    >>> from rollbook import Experience
    >>> references(Experiences([Experience(tokens=[1, 2])]))
    [()]
    """
    if REFERENCES_COLUMN not in stripped.columns:
        return [()] * len(stripped)
    return [_distinct_hashes(listed) for listed in _parse_references(stripped.columns[REFERENCES_COLUMN])]


def evaluation_flags(stripped: Experiences) -> list[bool]:
    """Return whether each record of a stored frame is for evaluation, [N]."""
    column = stripped.columns.get(EVALUATION_COLUMN)
    if column is None:
        return [False] * len(stripped)
    if not isinstance(column, pa.Array) or column.type != pa.bool_():
        raise WireError(f"column {EVALUATION_COLUMN!r}: expected type bool")
    return [bool(flag) for flag in column.to_pylist()]


def _parse_references(column: pa.Array) -> list[list[dict[str, Any]]]:
    """Parse and check the references of each record."""
    if column.type != REFERENCES_TYPE:
        raise WireError(f"column {REFERENCES_COLUMN!r}: type {column.type}, expected {REFERENCES_TYPE}")
    rows: list[list[dict[str, Any]]] = [listed or [] for listed in column.to_pylist()]
    for row, listed in enumerate(rows):
        for item in listed:
            if item is None or None in item.values() or not _HASH.fullmatch(item["hash"]) or item["at"] < 0:
                raise WireError(f"record {row}: {REFERENCES_COLUMN}: {item!r} is not a reference")
    return rows


def restore(stripped: Experiences, fetch: Callable[[str], Any]) -> Experiences:
    """Return a copy of the records with their media restored.

    Args:
        stripped: The records with references. Columns may be missing.
        fetch: Returns the bytes of a blob by its hash, or raises `KeyError`; called once per hash.

    >>> from rollbook import Experience
    >>> extracted = extract(Experiences([Experience(tokens=[1, 2], info={"png": bytes(2000)})]))
    >>> restore(extracted.stripped, {}.__getitem__)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rollbook.core.errors.WireError: record 0: info: the medium sha256:... is missing
    """
    columns = stripped.columns
    if not any(name.startswith(BOOK_COLUMNS) for name in columns):
        return stripped
    places: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row, listed in enumerate(_parse_references(columns[REFERENCES_COLUMN]) if REFERENCES_COLUMN in columns else ()):
        for item in listed:
            places.setdefault(item["column"], []).append((row, item))
    opened: dict[str, Blob] = {}
    written: dict[str, bytes] = {}
    changed: Columns = {}
    bytes_left = DEFAULT_LIMITS.max_bytes
    for name, refs in places.items():
        if name not in columns:
            continue
        column = columns[name]
        if not isinstance(column, pa.Array) or column.type not in (MEDIA, pa.large_string()):
            raise WireError(f"{REFERENCES_COLUMN}: refers to column {name!r}, which can hold no media")
        replacements = []
        for (row, item), (start, stop, entry) in zip(refs, _find_references(column, refs), strict=True):
            prefix, key = f"record {row}: {name}", item["hash"]
            if start == stop:
                raise WireError(f"{prefix}: no reference to sha256:{key} at {item['at']}")
            if key not in opened:
                opened[key] = _fetch_blob(fetch, key, prefix)
            blob = opened[key]
            new: Any = blob.payload
            if entry is not None:
                if (blob.kind, blob.dtype, list(blob.shape)) != ("tensor", entry["dtype"], entry["shape"]):
                    raise WireError(
                        f"{prefix}[{entry['key']!r}]: sha256:{key} is {blob.kind} {blob.dtype}{list(blob.shape)}, "
                        f"expected tensor {entry['dtype']}{entry['shape']}"
                    )
            elif blob.kind != "text":
                if key not in written:
                    written[key] = binascii.b2a_base64(blob.payload, newline=False)
                new = written[key]
            # Small references could request any number of copies of a large medium.
            bytes_left -= len(new)
            if bytes_left < 0:
                raise WireError(f"{prefix}: the media take more than the limit of {DEFAULT_LIMITS.max_bytes} bytes")
            replacements.append(_Replacement(start, stop, new))
        changed[name] = _replace_pieces(column, replacements)
    restored = {
        name[:-1] if name.startswith(BOOK_COLUMNS) else name: changed.get(name, column)
        for name, column in columns.items()
        if name not in BOOK_COLUMNS
    }
    return Experiences.from_encoded(restored, len(stripped))


def _find_references(column: pa.Array, refs: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, int, Any]]:
    """Return where each reference is in the column's bytes (start equals stop for none), and its entry's tensor."""
    in_media = column.type == MEDIA
    entries, rows = _tensor_entries(column) if in_media else (column, None)
    memory, bounds = _text_memory(entries.field("data") if in_media else column)
    places: list[tuple[int, int, Any]] = []
    chosen = []
    for row, item in refs:
        if rows is None:
            start = int(bounds[row]) + item["at"]
            stop, limit = start + _REFERENCE_BYTES, int(bounds[row + 1])
        else:
            entry = int(rows[row]) + item["at"]
            inside = entry < int(rows[row + 1])
            chosen.append(entry if inside else 0)
            start, stop = (int(bounds[entry]), int(bounds[entry + 1])) if inside else (0, 0)
            limit = stop
        matches = stop <= limit and memory[start:stop].tobytes() == _PREFIX + item["hash"].encode()
        places.append((start, stop if matches else start, None))
    if not in_media or not len(entries):
        return places
    descriptions = _describe_entries(entries, np.array(chosen, dtype=np.int64))
    return [(start, stop, description) for (start, stop, _), description in zip(places, descriptions, strict=True)]


def _fetch_blob(fetch: Callable[[str], Any], key: str, prefix: str) -> Blob:
    try:
        blob = open_blob(fetch(key))
    except KeyError:
        raise WireError(f"{prefix}: the medium sha256:{key} is missing") from None
    except WireError as error:
        raise WireError(f"{prefix}: the medium sha256:{key} is damaged: {error}") from None
    if blob.hash != key:
        raise WireError(f"{prefix}: the medium sha256:{key} was requested, got sha256:{blob.hash}")
    return blob


# --- Arrow memory ---------------------------------------------------------------------------------------------------


def _text_memory(array: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of a text or binary array, and its offsets."""
    buffer = array.buffers()[2]
    memory = np.frombuffer(b"" if buffer is None else buffer, dtype=np.uint8)
    return memory, arrow.offsets(array, len(memory))


def _tensor_entries(column: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the tensors of a media column's rows, and the rows' offsets."""
    rows = arrow.offsets(column, len(column.values))
    return column.values.slice(int(rows[0]), int(rows[-1] - rows[0])), rows - rows[0]


def _describe_entries(entries: pa.Array, indices: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return key, dtype and shape of some entries, without their data."""
    chosen = pa.array(indices)
    parts = {name: entries.field(name).take(chosen).to_pylist() for name in ("key", "dtype", "shape")}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def _replace_pieces(column: pa.Array, replacements: list[_Replacement]) -> pa.Array:
    """Replace pieces of a column's text, or of its tensors' data."""
    in_media = column.type == MEDIA
    entries, rows = _tensor_entries(column) if in_media else (column, None)
    array = entries.field("data") if in_media else column
    memory, bounds = _text_memory(array)
    replacements = sorted(replacements, key=lambda replacement: replacement.start)
    if any(first.stop > other.start for first, other in pairwise(replacements)):
        raise WireError(f"{REFERENCES_COLUMN}: two references share a place")
    stops = np.array([replacement.stop for replacement in replacements], dtype=np.int64)
    growth = compute_offsets(
        [len(replacement.new) - (replacement.stop - replacement.start) for replacement in replacements]
    )
    moved = bounds + growth[np.searchsorted(stops, bounds, side="right")] - bounds[0]
    joined = allocate((int(moved[-1]),), np.uint8)
    at, done = 0, int(bounds[0])
    for replacement in (*replacements, _Replacement(int(bounds[-1]), int(bounds[-1]), b"")):
        length = replacement.start - done
        joined[at : at + length] = memory[done : replacement.start]
        at += length
        joined[at : at + len(replacement.new)] = np.frombuffer(replacement.new, dtype=np.uint8)
        at, done = at + len(replacement.new), replacement.stop
    data = _rebuild_array(array, [pa.py_buffer(moved), pa.py_buffer(joined)])
    if rows is None:
        return data
    parts = [data if part.name == "data" else entries.field(part.name) for part in entries.type]
    return _rebuild_array(column, [pa.py_buffer(rows)], [_rebuild_array(entries, [], parts)])


def _rebuild_array(like: pa.Array, buffers: list[pa.Buffer], children: list[pa.Array] | None = None) -> pa.Array:
    """Return an array with the type, length and nulls of `like` on other buffers."""
    valid = arrow.validity(like)
    nulls = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(like.type, len(like), [nulls, *buffers], children=children)
