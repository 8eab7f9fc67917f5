"""`FileSource`: rollout files, or a folder of them, as one run; and detection of the tool that wrote a file.

Invariant: content decides, never a name alone. An unknown file is rejected with a description of its content, and a
pickle is always rejected. The source stores where a sample is, not its contents; the same files give the same ids,
however often they are read. A damaged row is counted and reported in `notes`. New rows and files appear at the next
refresh.

>>> import json, pathlib, tempfile
>>> from rollbook.inspect.index import Index
>>> with tempfile.TemporaryDirectory() as folder:
...     row = {"input": "2 + 3 =", "output": " 5", "score": 1.0, "step": 17}
...     _ = pathlib.Path(folder, "17.jsonl").write_text(json.dumps(row))
...     with FileSource(folder) as source, Index() as index:
...         source.kind, source.refresh(index), index.query("SELECT step, reward, closing FROM samples")
('verl', {17}, [(17, 1.0, '5')])
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
import zipfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.core import columns, freeform, trxp, wire
from rollbook.core.errors import RollbookError, WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS
from rollbook.core.ids import EID
from rollbook.core.ragged import check_shape
from rollbook.core.trxp import MAGIC as TRXP
from rollbook.core.wire import MAGIC as FRAME
from rollbook.core.wire import check_stream
from rollbook.inspect import file_adapters
from rollbook.inspect.file_adapters import is_messages
from rollbook.inspect.file_stores import (
    MAX_JSON,
    MAX_ROW,
    AppendOnlyFile,
    Elements,
    Lines,
    Members,
    Place,
    Row,
    ScannedRow,
    StaticFile,
    Store,
    Table,
    display_name,
    file_stamp,
    find_elements,
    list_files,
    natural_sort_key,
    parse_json,
    to_dicts,
    unpack,
)
from rollbook.inspect.images import Album, RowContext
from rollbook.inspect.records import TokenizerLike, convert_records, load_vocabulary, record_json
from rollbook.inspect.serialization import json_safe
from rollbook.inspect.trajectory import Json, Trajectory
from rollbook.io import arrow, formats, trinity_sqlite
from rollbook.io.formats import read_column_names

if TYPE_CHECKING:
    from rollbook.inspect.index import Index


_TENSORS = {name: field for name, field in FIELDS.items() if field.kind == "tensor" and not field.trailing}


def read_record(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Return the record of `row`."""
    album = Album()
    for trajectory in convert_records(row["record"], context.vocabulary, album):
        for picture in trajectory.pictures:
            image = album.media(picture.sha256)
            if image is not None:
                context.keep(picture.sha256, *image)
        yield trajectory


def split_records(records: Experiences) -> Iterator[Row]:
    """Return each record as a row."""
    for i in range(len(records)):
        yield {"record": records[i : i + 1]}


def read_batch(batch: pa.RecordBatch) -> Iterator[Row]:
    """Return the records of a table that Rollbook wrote, or of one with its column names."""
    # Taken, not sliced: limits apply to the rows that are read.
    return split_records(arrow.from_table(batch.take(pa.array(np.arange(len(batch))))))


def build_record(values: Row) -> Row:
    """Create a record from plain values and arrays by field name; free-form fields are tagged JSON or values."""
    arrays: dict[str, pa.Array] = {}
    for name, value in values.items():
        field = FIELDS.get(name)
        if field is None or value is None:
            continue
        if name in _TENSORS:
            broadcast = field.broadcast and type(value) is int
            arrays[f"{name}__one" if broadcast else name] = pa.array([value if broadcast else np.asarray(value)])
        elif field.kind == "json" and isinstance(value, _Json):
            arrays[name] = pa.array([str(value)], pa.large_string())
        elif field.kind == "eid":
            parts = {component: value[component] for component in _EID_FIELDS if value.get(component) is not None}
            arrays.update(columns.encode(field, [EID(**{"suffix": "", **parts})]))
        elif field.kind in ("number", "integer", "text", "json"):
            arrays.update(columns.encode(field, [value]))
    try:
        return {"record": arrow.from_table(pa.table(arrays))}
    except (pa.ArrowException, TypeError) as error:
        raise WireError(f"the record cannot be read: {error}") from None


class _Json(str):
    """JSON as `rollbook.core.freeform` writes it."""

    __slots__ = ()


_EID_FIELDS = ("batch", "task", "run", "step", "suffix")


def _numpy(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert bfloat16, which numpy lacks, to float32."""
    if dtype == "bfloat16" and values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.bool_) if dtype == "bool" else values


Piece = TypeVar("Piece")


def _scan_pieces(
    store: AppendOnlyFile, more: bool, read: Callable[[Any, int], tuple[Piece | None, int]]
) -> Iterator[tuple[int, Piece | WireError]]:
    """Yield consecutive complete pieces of a file and their offsets. `read` returns the piece at an offset and the next
    offset.
    """
    store.done = store.done if more else 0
    with open(store.path, "rb") as file:
        while True:
            at = store.done
            try:
                piece, store.done = read(file, at)
            except WireError as error:
                store.done = os.path.getsize(store.path)  # the start of the next one is unknown
                yield at, error
                break
            if piece is None:
                break
            yield at, piece
    store.remember()


# --- columns --------------------------------------------------------------------------------------------------------


class FrameFile(AppendOnlyFile):
    """Consecutive frames; (a, b): offset of a frame, and index of a record in it."""

    def _frame(self, file: BinaryIO, at: int) -> tuple[Experiences | None, int]:
        """Return the frame at an offset and the next offset; `None` if it is incomplete."""
        file.seek(at)
        head = file.read(wire.HEADER_BYTES)
        if len(head) < wire.HEADER_BYTES:
            return None, at
        stop = wire.read_header(head, 0, wire.DEFAULT_LIMITS).stop
        data = bytearray(head + file.read(stop - len(head)))
        if len(data) < stop:
            return None, at
        return wire.decode(data, limits=wire.DEFAULT_LIMITS, private=True), at + stop

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        for at, records in _scan_pieces(self, more, self._frame):
            if isinstance(records, WireError):
                yield at, 0, records
                continue
            for i, row in enumerate(split_records(records)):
                yield at, i, row

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        fetched: dict[Place, Row] = {}
        by_frame: dict[int, list[int]] = {}
        for at, i in places:
            by_frame.setdefault(at, []).append(i)
        with open(self.path, "rb") as file:
            for at, rows in by_frame.items():
                records, _ = self._frame(file, at)
                if records is None:
                    raise WireError(f"{self.path}: the frame at byte {at} was removed")
                for i in rows:
                    (fetched[at, i],) = split_records(records[i : i + 1])
        return fetched


class ArrowFile(StaticFile):
    """The Arrow files of a saved HF dataset, converted by `decode`; (a, b): number of a batch, and of a row in it."""

    def __init__(self, path: str, decode: Callable[[pa.RecordBatch], Iterable[Row]]) -> None:
        super().__init__(path)
        self.decode = decode

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            check_stream(self.path)
            with pa.memory_map(self.path) as file, pa.ipc.open_stream(file) as stream:
                yield from stream
        except (pa.ArrowException, OSError) as error:
            raise WireError(f"{self.path}: cannot read the Arrow stream: {error}") from None

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        try:
            for number, batch in enumerate(self._batches()):
                for first in range(0, len(batch), 64):
                    for i, row in enumerate(self.decode(batch.slice(first, 64))):
                        yield number, first + i, row
        except WireError as error:
            yield 0, 0, error

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        sorted_places = sorted(places)
        rows: dict[Place, Row] = {}
        for number, batch in enumerate(self._batches()):
            for place in sorted_places:
                if place[0] == number:
                    (rows[place],) = self.decode(batch.slice(place[1], 1))
            if number >= sorted_places[-1][0]:
                break
        return rows


# --- JSONL ----------------------------------------------------------------------------------------------------------

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_line(row: Row, context: RowContext) -> Iterator[Trajectory]:
    """Convert a line of Rollbook's JSONL."""
    yield from read_record(parse_line(row), context)


def parse_line(row: Row) -> Row:
    """Return the record of a line of Rollbook's JSONL."""
    fields: Row = {}
    for name, value in row.items():
        field = FIELDS.get(name)
        if field is None or value is None:
            continue
        if name in _TENSORS:
            fields[name] = value if type(value) is int and field.broadcast else _parse_list(name, value)
        elif field.kind == "json":
            fields[name] = _Json(json.dumps(value))
        elif field.kind == "eid":
            fields[name] = freeform.loads(json.dumps(value)) if isinstance(value, dict) else {}
        elif field.kind in ("number", "integer", "text"):
            fields[name] = freeform.loads(json.dumps(value)) if isinstance(value, dict) else value
    return build_record(fields)


def _parse_list(name: str, value: Json) -> NDArray[Any]:
    if type(value) is dict and set(value) == {"dtype", "values"}:
        value = value["values"]
    if type(value) is not list:
        raise WireError(f"{name}: got a {type(value).__name__}, expected a list")
    try:
        return np.array([_NON_FINITE.get(element, element) if type(element) is str else element for element in value])
    except ValueError as error:
        raise WireError(f"{name}: {error}") from None


# --- Trinity --------------------------------------------------------------------------------------------------------


class OldPickleError(WireError):
    """Bytes of a Trinity version before 0.5.2."""


def parse_payload(data: bytes) -> list[Row]:
    """Return the records of a TRXP payload."""
    view = memoryview(data)
    if bytes(view[:4]) != trxp.MAGIC:
        raise OldPickleError(
            "pickled records of an older Trinity are not read here; `rollbook import BOOK FILE` reads them"
        )
    rows: list[Row] = []
    for i, (item, tensors) in enumerate(trxp.split_payload(view, wire.DEFAULT_LIMITS)):
        row = dict(item)
        extra = row.pop(trxp.EXTRA, None)
        if isinstance(extra, dict):
            row |= extra
        for name, (dtype, shape, content) in tensors.items():
            if name in _TENSORS:
                check_shape(dtype, shape, len(content), f"tensor '{i}:{name}'")
                values = np.frombuffer(content, dtype=DTYPES[str(dtype)].storage).reshape(shape)
                row[name] = _numpy(values, str(dtype))
        rows.append(row)
    return rows


class PayloadFile(AppendOnlyFile):
    """Consecutive TRXP payloads; (a, b): offset of a payload, and index of a record in it."""

    def _rows(self, file: BinaryIO, at: int) -> tuple[list[Row] | None, int]:
        file.seek(at)
        head = file.read(trxp.HEADER_BYTES)
        if len(head) < trxp.HEADER_BYTES:
            return None, at
        if head[:4] != trxp.MAGIC:
            return parse_payload(head), at
        total = trxp.payload_size(head)
        if total > MAX_ROW:
            raise WireError(f"a payload of {total} bytes is over the limit of {MAX_ROW}")
        data = head + file.read(total - len(head))
        return (parse_payload(data), at + total) if len(data) == total else (None, at)

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        for at, rows in _scan_pieces(self, more, self._rows):
            if isinstance(rows, WireError):
                yield at, 0, rows
                continue
            for i, row in enumerate(rows):
                try:
                    yield at, i, build_record(row)
                except ValueError as error:
                    yield at, i, WireError(str(error))

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        rows: dict[Place, Row] = {}
        payloads: dict[int, list[Row]] = {}
        with open(self.path, "rb") as file:
            for at, i in places:
                if at not in payloads:
                    payloads[at] = self._rows(file, at)[0] or []
                rows[at, i] = build_record(payloads[at][i])
        return rows


class Database:
    """Record tables in Trinity's SQLite buffers, 0.5.2 and later; (a, b): number of a table, and id of a row.

    Rows are only added, with increasing ids.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.log: Row = {}
        self._last: dict[int, int] = {}

    def stamp(self) -> tuple[int, ...]:
        log = f"{self.path}-wal"
        return *file_stamp(self.path), *(file_stamp(log) if os.path.exists(log) else ())

    def grown(self) -> bool:
        return bool(self._last)

    def scan(self, more: bool) -> Iterator[ScannedRow]:
        if not more:
            self._last = {}
        with trinity_sqlite.open_read_only(self.path) as connection:
            for number, table in enumerate(trinity_sqlite.find_tables(connection, self.path).values()):
                query = trinity_sqlite.build_query(table).replace(" ORDER BY", " WHERE t.id > ? ORDER BY")
                for row in connection.execute(query, (MAX_ROW, MAX_ROW, self._last.get(number, -(2**62)))):
                    at = row[0] if isinstance(row[0], int) else 0
                    self._last[number] = at
                    try:
                        yield number, at, _database_row(row, table)
                    except WireError as error:
                        yield number, at, error

    def fetch(self, places: Iterable[Place]) -> dict[Place, Row]:
        rows: dict[Place, Row] = {}
        with trinity_sqlite.open_read_only(self.path) as connection:
            tables = list(trinity_sqlite.find_tables(connection, self.path).values())
            for number, at in places:
                table = tables[number]
                # The query uses the alias t and orders by id.
                query = trinity_sqlite.build_query(table).replace(" ORDER BY t.id", " WHERE t.id = ?")
                for row in connection.execute(query, (MAX_ROW, MAX_ROW, at)):
                    rows[number, at] = _database_row(row, table)
        return rows


def _database_row(row: tuple[Any, ...], table: trinity_sqlite.Table) -> Row:
    data = row[1] if row[2] is not None else row[3]
    if not isinstance(data, bytes):
        raise WireError("the bytes of the record are missing or over the limit")
    records = parse_payload(data)
    if len(records) != 1:
        raise WireError(f"got {len(records)} records, expected 1")
    record_row = records[0]
    column = {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        for name, value in zip(table.columns, row[5:], strict=True)
    }
    eid = dict(record_row.get("eid") or {})
    for name, component in (("task_id", "task"), ("run_id", "run"), ("msg_id", "suffix")):
        if column.get(name) is not None:
            eid[component] = int(column[name]) if component == "run" and str(column[name]).isdecimal() else column[name]
    record_row["eid"] = eid
    if isinstance(column.get("reward"), (int, float)):
        record_row["reward"] = float(column["reward"])
    return build_record(record_row)


# --- formats --------------------------------------------------------------------------------------------------------


class UnknownFormatError(RollbookError, ValueError):
    """Raised for a file or folder in none of the known formats."""


class FileFormat(NamedTuple):
    """A file format.

    Args:
        read: Function that converts a row to trajectories.
        description: What wrote the files, and their names.
        numbered: Whether files without a step in their names are numbered as steps.

    >>> FORMATS["verl"].description
    'verl rollouts: N.jsonl, or Parquet'
    """

    read: Callable[[Row, RowContext], Iterator[Trajectory]]
    description: str
    numbered: bool = False


FORMATS: dict[str, FileFormat] = {
    "rollbook-json": FileFormat(file_adapters.read_rollbook, "files of Rollbook's TrajectorySaver: PREFIX_step_N.json"),
    "lightrft": FileFormat(file_adapters.read_lightrft, "files of LightRFT's trajectory saver: PREFIX_step_N.json"),
    "verl": FileFormat(file_adapters.read_verl, "verl rollouts: N.jsonl, or Parquet"),
    "trl": FileFormat(file_adapters.read_trl, "TRL completions: Parquet or JSONL"),
    "openrlhf": FileFormat(file_adapters.read_openrlhf, "OpenRLHF samples: JSONL or Parquet"),
    "verifiers": FileFormat(
        file_adapters.read_verifiers, "verifiers results.jsonl, and prime-rl rollouts in the same format", True
    ),
    "traces": FileFormat(
        file_adapters.read_trace, "traces of verifiers and prime-rl: traces.jsonl, *_rollouts.jsonl", True
    ),
    "messages": FileFormat(file_adapters.read_messages, "conversations in OpenAI's format: JSONL"),
    "inspect": FileFormat(file_adapters.read_inspect, "inspect_ai logs: .eval, .json", True),
    "parquet": FileFormat(read_record, "Rollbook's Parquet"),
    "jsonl": FileFormat(read_line, "Rollbook's JSONL"),
    "frames": FileFormat(read_record, "Rollbook's frames"),
    "hf": FileFormat(read_record, "a saved Hugging Face dataset that Rollbook wrote"),
    "trxp": FileFormat(read_record, "Trinity-RFT's TRXP payloads"),
    "trinity-sqlite": FileFormat(read_record, "Trinity-RFT's SQLite buffers"),
}
"""Known formats by name."""

_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")


def detect_format(path: str, name: str) -> tuple[str, Store]:
    """Return the format of a file and the store that reads it; `name` is used in errors."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if head[:2] == b"PK":
        return _detect_archive(path, name)
    if (head[:1] == b"\x80" and len(head) > 1 and head[1] < 6) or name.lower().endswith(_PICKLES):
        raise UnknownFormatError("a pickle (.pt, .pkl) can run arbitrary code and is not read")
    if head.startswith(FRAME):
        return "frames", FrameFile(path)
    if head.startswith(TRXP):
        return "trxp", PayloadFile(path)
    if head.startswith(b"SQLite format 3\0"):
        if not trinity_sqlite.list_tables(path):
            raise UnknownFormatError("an SQLite database without Trinity tables")
        return "trinity-sqlite", _open_database(path)
    if head.startswith(b"PAR1"):
        family = detect_from_keys(read_column_names(path), "parquet")
        return family, Table(path, read_batch if family == "parquet" else to_dicts)
    if head.startswith(b"\xff\xff\xff\xff") and name.endswith(".arrow"):
        return _detect_dataset(path)
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[":
        return _detect_array(path)
    if first == b"{":
        return _detect_objects(path)
    raise UnknownFormatError(f"unknown content, starting with {head[:16]!r}")


def _open_database(path: str) -> Store:
    store = Database(path)
    for _, _, row in store.scan(False):
        if isinstance(row, OldPickleError):
            raise UnknownFormatError(str(row))
        break
    return Database(path)


def _detect_dataset(path: str) -> tuple[str, Store]:
    try:
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
            names = stream.schema.names
    except (pa.ArrowException, OSError) as error:
        raise UnknownFormatError(f"an Arrow file that cannot be read: {error}") from None
    family = detect_from_keys(dict.fromkeys(names), "parquet")
    is_parquet = family == "parquet"
    return "hf" if is_parquet else family, ArrowFile(path, read_batch if is_parquet else to_dicts)


def _detect_archive(path: str, name: str) -> tuple[str, Store]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise UnknownFormatError(f"a zip archive that cannot be read: {error}") from None
    if any(member_name.endswith((".pkl", "/data.pkl")) for member_name in names):
        raise UnknownFormatError("a torch.save file (.pt) is a pickle, which can run arbitrary code, and is not read")
    if "header.json" in names or "_journal/start.json" in names:
        return "inspect", Members(path, r"samples/[^/]+\.json", ("header.json", "_journal/start.json"))
    raise UnknownFormatError("a zip archive without the header.json of an inspect log")


def _detect_array(path: str) -> tuple[str, Store]:
    """Return the format of a JSON array, from its first object."""
    store = Elements(path)
    with store._mapped() as data:
        begin = len(data[:4096]) - len(data[:4096].lstrip())
        try:
            span = next(find_elements(data, begin), None)
        except WireError:
            raise UnknownFormatError("a JSON array whose first object is incomplete") from None
        if span is None:
            raise UnknownFormatError("a JSON array without objects")
        row = parse_json(data[span[0] : span[1]])
    if not isinstance(row, dict):
        raise UnknownFormatError("a JSON array of other values than objects")
    return detect_from_keys(row, "jsonl"), store


def _detect_objects(path: str) -> tuple[str, Store]:
    """Return the format of JSON lines, or of one object over several lines."""
    with open(path, "rb") as file:
        line = file.readline(MAX_ROW + 1)
        # Blank and truncated lines do not count as a first row.
        while line and not line.strip():
            line = file.readline(MAX_ROW + 1)
    try:
        row = parse_json(line.strip())
    except WireError as error:
        row = None
        reason = str(error)
    if isinstance(row, dict) and not _is_inspect(row):
        return detect_from_keys(row, "jsonl"), Lines(path)
    if os.path.getsize(path) > MAX_JSON:
        raise UnknownFormatError(f"JSON of more than {MAX_JSON} bytes that is not JSONL")
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    if b'"eval"' in head and (b'"samples"' in head or b'"status"' in head or isinstance(row, dict)):
        return "inspect", Elements(path, "samples")
    if row is None:
        raise UnknownFormatError(f"JSON whose first line is not an object: {reason}")
    raise UnknownFormatError(f"a JSON object with the keys {', '.join(sorted(map(str, row))[:20])}")


def _is_inspect(row: Row) -> bool:
    return isinstance(row.get("eval"), dict) and ("samples" in row or "status" in row)


def detect_from_keys(row: dict[str, Any], default: str) -> str:
    """Return the format for the keys of a row (for Parquet without values); `UnknownFormatError` names the keys.

    >>> detect_from_keys({"input": "2 + 2", "output": "4", "score": 1.0, "step": 3}, "jsonl")
    'verl'
    """
    keys = {str(key) for key in row}
    if "token_ends" in keys or ({"uid", "global_step", "mask"} <= keys and "full_sequence" in keys):
        return "rollbook-json"
    if {"global_step", "full_sequence", "generated_text"} <= keys:
        return "lightrft"
    if ("traces" in keys and ("env" in keys or "task" in keys)) or {"nodes", "task"} <= keys:
        return "traces"
    if "example_id" in keys and {"prompt", "completion"} <= keys:
        return "verifiers"
    if {"prompt", "completion", "reward"} <= keys and keys & {"metrics", "is_completed", "stop_condition", "timing"}:
        return "verifiers"
    if is_messages(row.get("messages")) or isinstance(row.get("conversations"), list):
        return "messages" if "tokens" not in keys else default
    if default == "parquet" and "messages" in keys and "tokens" not in keys:
        return "messages"
    try:
        return formats.guess_from_keys("", row, default, "")
    except ValueError:
        names = ", ".join(sorted(keys)[:20])
        raise UnknownFormatError(f"rows with the keys {names}") from None


# --- the source -----------------------------------------------------------------------------------------------------

_BATCH = 256
_REFRESH_SECONDS = 0.5
_MAX_CACHED = 64
_MAX_LISTED = 20
_READ_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    OSError,
)
"""Errors of readers on damaged values; includes `WireError`."""
_IGNORED_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".svg", ".safetensors", ".log", ".txt", ".md", ".toml", ".yaml", ".yml",
    ".py", ".sh", ".html", ".csv", "-wal", "-shm", "-journal", ".partial", ".tmp", ".lock", "metadata.json",
    "annotations.jsonl",
)  # fmt: skip
"""Other files of a run's folder, which are skipped."""
_STEP = re.compile(r"(?:^|[_./-])(?:global_?step|step|iteration|iter|checkpoint|ckpt)s?[_-]?(\d{1,15})(?![0-9])", re.I)
_NUMBER = re.compile(r"(?:^|/)(?:completions_)?(\d{1,15})\.[^/]*$")
_EVALUATION = re.compile(r"(?:^|[_./-])(?:eval|evals|evaluation|val|valid|validation|test)(?:[_./-]|$)", re.I)


@dataclass
class _File:
    name: str
    """Path relative to the folder."""
    path: str
    number: int
    format: str = ""
    store: Store | None = None
    stamp: tuple[int, ...] = ()
    """Stamp of the store or the file at the last look."""
    places: list[int] = field(default_factory=list)
    """Numbers of its samples."""
    damaged: int = 0
    errors: list[str] = field(default_factory=list)
    step: int | None = None
    spool: str = ""
    """Path of the unpacked file."""


def extract_step(name: str) -> int | None:
    """Return the step in a file name.

    >>> [extract_step(name) for name in ("trajectories_step_20.json", "step_3/train.jsonl", "17.jsonl", "a5.jsonl")]
    [20, 3, 17, None]
    """
    numbers = _STEP.findall(os.path.splitext(name)[0])
    if numbers:
        return int(numbers[-1])
    plain_number = _NUMBER.search(name)
    return int(plain_number[1]) if plain_number else None


class FileSource:
    """Rollouts in files as a `rollbook.inspect.sources.Source`.

    Args:
        path: A file or a folder of files.
        tokenizer: A tokenizer, a `Vocabulary`, or the path of a folder with a tokenizer.json, for files with token ids.
            Files with only text are split into words and need none.

    Raises:
        UnknownFormatError: If no file is in a known format.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokenizer: TokenizerLike | None = None) -> None:
        address = os.path.abspath(os.fspath(path))
        if not os.path.exists(address):
            raise FileNotFoundError(f"path: {os.fspath(path)!r} does not exist")
        self.folder = os.path.isdir(address)
        self.path = os.path.realpath(address)
        self.root = self.path if self.folder else os.path.dirname(self.path)
        self.name = display_name(os.path.basename(address.rstrip("/")) or address)
        self.vocabulary = load_vocabulary(tokenizer)
        self._lock = threading.Lock()
        """Guards the cache, which requests use during a refresh."""
        self._refreshing = threading.Lock()
        self._spools: str | None = None
        self._reset()
        self._find_files()
        families = [file.format for file in self._files.values() if file.format]
        if not families:
            self.close()
            raise UnknownFormatError(self._no_files_message())
        self.kind = max(dict.fromkeys(families), key=families.count)

    def _reset(self) -> None:
        self._files: dict[str, _File] = {}
        self._numbered_files: list[_File] = []
        self._places = array("q")
        """Per sample: file number, the place (a, b) of its row, and its index within the row."""
        self._uids: dict[str, int] = {}
        self._runs: dict[tuple[int, str], int] = {}
        self._media: dict[str, int] = {}
        """A sample that contains each image, by sha256."""
        self._cache: OrderedDict[str, Trajectory] = OrderedDict()
        self._index: weakref.ref[Index] | None = None
        self._pending: Iterator[Trajectory] | None = None
        """The rest of an unfinished refresh."""
        self._changed: set[int] = set()
        self._skipped_files: dict[str, str] = {}

    @property
    def changed(self) -> float | None:
        """See `Source`."""
        times = []
        for name in list(self._files):
            with contextlib.suppress(OSError):
                times.append(os.stat(os.path.join(self.root, name)).st_mtime)
        return max(times, default=None)

    # --- files --------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        if not self.folder:
            return [os.path.basename(self.path)]
        names, outside_links = list_files(self.path)
        for name in outside_links:
            self._skipped_files[name] = "link to a place outside the folder"
        if "state.json" in names or "dataset_dict.json" in names:
            return [n for n in names if n.endswith(".arrow") and not os.path.basename(n).startswith("cache-")]
        return [name for name in names if not name.lower().endswith(_IGNORED_SUFFIXES)]

    def _find_files(self) -> None:
        """Find new files and their formats."""
        for name in self._names():
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _File(name, os.path.join(self.root, name), len(self._numbered_files))
                self._numbered_files.append(file)
            if not file.format:
                self._recognize(file)

    def _recognize(self, file: _File) -> None:
        try:
            now = file_stamp(file.path)
            if now == file.stamp:
                return
            file.stamp = now
            if os.path.getsize(file.path) == 0:
                return  # just created by a writer
            path = self._unpack(file)
            file.format, file.store = detect_format(path, file.name)
            file.stamp = ()
            self._skipped_files.pop(file.name, None)
        except UnknownFormatError as error:
            self._skipped_files[file.name] = str(error)
            return
        except (WireError, OSError) as error:
            self._skipped_files[file.name] = str(error)
            return
        file.step = extract_step(file.name)
        if file.step is None and FORMATS[file.format].numbered:
            # Logs in one folder, ordered by name: each is a step.
            file.step = sum(1 for other in self._files.values() if other.format and other is not file)

    def _unpack(self, file: _File) -> str:
        with open(file.path, "rb") as opened:
            head = opened.read(4)
        if head[:2] != b"\x1f\x8b" and head != b"\x28\xb5\x2f\xfd":
            return file.path
        if self._spools is None:
            self._spools = tempfile.mkdtemp(prefix="rollbook-files-")
            self._remove_spools = weakref.finalize(self, shutil.rmtree, self._spools, ignore_errors=True)
        file.spool = os.path.join(self._spools, f"{file.number}.jsonl")
        unpack(file.path, file.spool)
        return file.spool

    def _no_files_message(self) -> str:
        if not self._skipped_files:
            return f"{self.path}: all files are empty. {_known_formats()}"
        named = [
            f"{display_name(name)}: {reason}" if self.folder else reason for name, reason in self._skipped_files.items()
        ]
        more = f" (and {len(named) - 3} more files)" if len(named) > 3 else ""
        prefix = f"{self.path}: no rollouts in a known format. " if self.folder else ""
        return f"{prefix}{'; '.join(named[:3])}{more}. {_known_formats()}"

    @property
    def problems(self) -> list[str]:
        """Return notes on skipped files and rows, with reasons."""
        problems = [
            f"{display_name(name)}: not read: {reason}"
            for name, reason in list(self._skipped_files.items())[:_MAX_LISTED]
        ]
        problems += [
            f"{display_name(file.name)}: {file.damaged} unreadable rows; the first: {file.errors[0]}"
            for file in self._numbered_files
            if file.damaged
        ]
        return problems[:_MAX_LISTED]

    @property
    def damaged(self) -> int:
        """Number of unreadable rows."""
        return sum(file.damaged for file in self._files.values())

    # --- the index ----------------------------------------------------------------------------------------------

    def refresh(self, index: Index) -> set[int] | None:
        """Update the index for about half a second; return the changed steps, or `None` if there was nothing to do."""
        with self._refreshing:
            if self._index is None or self._index() is not index:
                if self._index is not None:
                    self._reset()
                self._index = weakref.ref(index)
            if self._pending is None:
                self._find_files()
                self._pending = self._read_files(index)
            end = time.monotonic() + _REFRESH_SECONDS
            pending: list[Trajectory] = []
            for trajectory in self._pending:
                pending.append(trajectory)
                self._changed.add(trajectory.step or 0)
                if len(pending) >= _BATCH:
                    index.add(pending)
                    pending = []
                if time.monotonic() > end:
                    break
            else:
                self._pending = None
            if pending:
                index.add(pending)
            changed, self._changed = self._changed | index.update_summaries(), set()
            return changed or None

    def _read_files(self, index: Index) -> Iterator[Trajectory]:
        for file in sorted(self._files.values(), key=lambda file: natural_sort_key(file.name)):
            if file.format:
                yield from self._read_file(file, index)

    def _read_file(self, file: _File, index: Index) -> Iterator[Trajectory]:
        store = file.store
        if store is None:
            return
        try:
            now = file_stamp(file.path) if file.spool else store.stamp()
            if now == file.stamp:
                return
            if file.spool:
                unpack(file.path, file.spool)
            file.stamp = now
            more = store.grown()
            if not more and file.places:
                self._remove_samples(file, index)
            yield from self._scan_rows(file, store, more)
        except FileNotFoundError:
            return  # removed: its samples stay listed until the source is closed
        except _READ_ERRORS as error:
            # The whole file is unreadable: an archive being written, a truncated table.
            self._add_error(file, error)

    def _add_error(self, file: _File, error: Exception) -> None:
        file.damaged += 1
        if len(file.errors) < _MAX_LISTED:
            file.errors.append(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")

    def _scan_rows(self, file: _File, store: Store, more: bool) -> Iterator[Trajectory]:
        for a, b, row in store.scan(more):
            try:
                if isinstance(row, WireError):
                    raise row
                trajectories = list(self._read_row(file, row, {}))
            except _READ_ERRORS as error:
                self._add_error(file, error)
                continue
            for sub, trajectory in enumerate(trajectories):
                number = len(self._places) // 4
                self._identify(trajectory)
                self._places.extend((file.number, a, b, sub))
                self._uids[trajectory.uid] = number
                file.places.append(number)
                for sha256 in (picture.sha256 for picture in trajectory.pictures):
                    self._media.setdefault(sha256, number)
                yield trajectory

    def _read_row(self, file: _File, row: Row, images: dict[str, Any]) -> Iterator[Trajectory]:
        """Yield the samples of a row; add the bytes of pictures to `images` if it has their hash."""

        def keep(sha256: str, data: bytes, mime: str) -> None:
            if sha256 in images:
                images[sha256] = (data, mime)

        log = file.store.log if file.store is not None else {}
        evaluation = self.folder and bool(_EVALUATION.search(file.name))
        context = RowContext(os.path.dirname(file.path), evaluation, self.vocabulary, keep, log)
        for trajectory in FORMATS[file.format].read(row, context):
            if trajectory.step is None:
                trajectory.step = file.step or 0
            trajectory.evaluation = trajectory.evaluation or evaluation
            yield trajectory

    def _identify(self, trajectory: Trajectory) -> None:
        """Set the ids of a sample: the writer's if it has them, otherwise derived from its content."""
        short_uid = trajectory.uid[:128]
        try:
            eid = EID.parse(short_uid)
            trajectory.gid = trajectory.gid or eid.tid
            trajectory.run, trajectory.turn = eid.run, eid.step
        except ValueError:
            task, step = trajectory.task or trajectory.prompt, trajectory.step or 0
            run = trajectory.run
            if run < 0:
                # Counted in the group's order; further branches of a graph belong to the same run.
                run = self._runs.get((step, task), 0) - (1 if trajectory.turn and short_uid else 0)
                self._runs[step, task] = max(run + 1, 0)
                run = max(run, 0)
            suffix = short_uid or blake2b(trajectory.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            eid = EID(step, task, run, trajectory.turn, suffix)
            trajectory.task, trajectory.run, trajectory.gid = task, run, trajectory.gid or eid.tid
        uid = eid.uid
        again = 1
        while uid in self._uids:
            again += 1
            uid = eid.replace(suffix=f"{eid.suffix}-{again}").uid
        trajectory.uid = uid

    def _remove_samples(self, file: _File, index: Index) -> None:
        """Remove the samples of a replaced file."""
        removed = set(file.places)
        uids = [uid for uid, number in self._uids.items() if number in removed]
        for start in range(0, len(uids), 500):
            chunk = uids[start : start + 500]
            marks = ",".join("?" * len(chunk))
            rows = index.query(f"SELECT n, step, task FROM samples WHERE uid IN ({marks})", chunk)
            for _, step, task in rows:
                self._changed.add(step)
                if self._runs.get((step, task), 0) > 0:
                    self._runs[step, task] -= 1
            index.remove([n for n, _, _ in rows])
        for uid in uids:
            del self._uids[uid]
        with self._lock:
            for uid in uids:
                self._cache.pop(uid, None)
        self._media = {sha256: number for sha256, number in self._media.items() if number not in removed}
        file.places, file.damaged, file.errors = [], 0, []

    # --- samples ------------------------------------------------------------------------------------------------

    def trajectories(self, uids: Sequence[str]) -> list[Trajectory]:
        """Return samples by id, in this order; `KeyError` names an unknown one."""
        trajectories: dict[str, Trajectory] = {}
        by_file: dict[int, list[tuple[str, Place, int]]] = {}
        with self._lock:
            for uid in uids:
                number = self._uids[uid]
                if uid in self._cache:
                    self._cache.move_to_end(uid)
                    trajectories[uid] = self._cache[uid]
                elif uid not in trajectories:
                    at, a, b, sub = self._place(number)
                    by_file.setdefault(at, []).append((uid, (a, b), sub))
        for at, places in by_file.items():
            file = self._numbered_files[at]
            rows = self._fetch_rows(file, [place for _, place, _ in places])
            for uid, place, sub in places:
                trajectories[uid] = self._rebuild(file, rows[place], sub, uid)
        with self._lock:
            for places in by_file.values():
                self._cache.update({uid: trajectories[uid] for uid, _, _ in places if uid in self._uids})
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return [trajectories[uid] for uid in uids]

    def _place(self, number: int) -> tuple[int, int, int, int]:
        file, a, b, sub = self._places[4 * number : 4 * number + 4]
        return file, a, b, sub

    def _fetch_rows(self, file: _File, places: Sequence[Place]) -> dict[Place, Row]:
        try:
            if file.store is not None:
                return file.store.fetch(dict.fromkeys(places))
        except _READ_ERRORS as error:
            raise WireError(f"{display_name(file.name)}: the file has changed since it was read: {error}") from None
        raise WireError(f"{display_name(file.name)}: the file is not read")

    def _rebuild(self, file: _File, row: Row, sub: int, uid: str) -> Trajectory:
        trajectory = list(self._read_row(file, row, {}))[sub]
        eid = EID.parse(uid)
        trajectory.uid, trajectory.run, trajectory.turn = uid, eid.run, eid.step
        trajectory.gid = trajectory.gid or eid.tid
        trajectory.task = trajectory.task or str(eid.task)
        return trajectory

    def record(self, uid: str) -> dict[str, Any]:
        """Return the row of a sample as strict JSON."""
        at, a, b, sub = self._place(self._uids[uid])
        file = self._numbered_files[at]
        row = self._fetch_rows(file, [(a, b)])[a, b]
        content = record_json(row["record"]) if isinstance(row.get("record"), Experiences) else json_safe(row)
        return {"file": display_name(file.name), "uid": uid, **({"part": sub} if sub else {}), "row": content}

    def media(self, sha256: str) -> tuple[bytes, str] | None:
        """Return the bytes and type of a picture."""
        number = self._media.get(sha256)
        if number is None:
            return None
        at, a, b, _ = self._place(number)
        file = self._numbered_files[at]
        images: dict[str, Any] = {sha256: None}
        # Rebuilding the row's samples visits all of its pictures.
        for _ in self._read_row(file, self._fetch_rows(file, [(a, b)])[a, b], images):
            if images[sha256] is not None:
                break
        image: tuple[bytes, str] | None = images[sha256]
        return image

    def history(self, uid: str) -> list[dict[str, Any]] | None:
        """Return `None`: files have no ledger."""
        return None

    def sql(self, query: str, *, seconds: float, rows: int) -> dict[str, Any]:
        """Raise `ValueError`: files have no tables."""
        raise ValueError("SQL needs a book; `rollbook import BOOK FILE` creates one from files")

    def close(self) -> None:
        """Remove unpacked files."""
        with self._lock:
            self._cache.clear()
        self._pending = None
        if self._spools is not None:
            self._remove_spools()
            self._spools = None

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.close()


def _known_formats() -> str:
    return f"Known formats: {', '.join(FORMATS)}"


def recognize(path: str | os.PathLike[str]) -> str:
    """Detect the format of a file or folder.

    Args:
        path: A file or a folder.

    Returns:
        The name of the format, a key of `FORMATS`.

    Raises:
        UnknownFormatError: If no file is in a known format.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "rollouts.jsonl")
    ...     _ = path.write_text('{"messages": [{"role": "user", "content": "2 + 3?"}], "reward": 1.0}')
    ...     recognize(path)
    'messages'
    """
    with FileSource(path) as source:
        return source.kind
