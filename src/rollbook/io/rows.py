"""Rows of JSONL and Parquet files within limits (`read_rows`), and errors of rows (`ErrorHandler`, `Report`).

Invariant: only the path itself and regular files directly in it are opened. No line or row larger than its limit is
held in memory. A row that cannot be read raises an error or is in the report.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.freeform import MAX_DEPTH, Json
from rollbook.io import parquet

MAX_ROW_BYTES = 256 << 20
"""Default limit of the bytes of one line, row or stored record. Trinity's limit is 32 MiB."""
MAX_LISTED = 10_000
"""Maximum number of rows that a report lists. It counts all."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that could not be read.

    Args:
        row: Its id, or its file and line.
        reason: Why it was skipped.

    >>> Skipped("7.jsonl:3", "no output").reason
    'no output'
    """

    row: int | str
    reason: str


@dataclass(slots=True)
class Report:
    """The rows that `on_error="skip"` skipped.

    Attributes:
        count: Number of rows that were skipped.
        skipped: The first `MAX_LISTED` of them.

    >>> report = Report()
    >>> report.add("7.jsonl:3", ValueError("no output"))
    >>> report.count, report.skipped[0]
    (1, Skipped(row='7.jsonl:3', reason='no output'))
    """

    count: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, row: int | str, error: Exception) -> None:
        """Add a row.

        Args:
            row: Its id, or its file and line.
            error: Why it was skipped.
        """
        self.count += 1
        if len(self.skipped) < MAX_LISTED:
            self.skipped.append(Skipped(row, str(error)))


class ErrorHandler:
    """Handles rows that cannot be read: raises an error that names the row, or with `skip` reports the row."""

    def __init__(self, skip: bool, report: Report) -> None:
        self.skip = skip
        self.report = report

    def handle(self, row: int | str, error: Exception) -> None:
        """Raise `WireError`, or report the row."""
        if not self.skip:
            raise WireError(f"row {row}: {error}") from None
        self.report.add(row, error)


def regroup(batches: Iterable[Experiences], size: int) -> Iterator[Experiences]:
    """Join and split batches so that each has exactly `size` records, except the last.

    >>> parts = [Experiences.from_columns({"tokens": [[1, 2]] * n}) for n in (1, 5, 1)]
    >>> [len(batch) for batch in regroup(parts, 3)]
    [3, 3, 1]
    """
    pending: list[Experiences] = []
    count = 0
    for batch in batches:
        if not isinstance(batch, Experiences):
            raise ValueError(f"batches: got a {type(batch).__name__}, expected Experiences")
        pending.append(batch)
        count += len(batch)
        if count < size:
            continue
        joined = Experiences.concat(pending)
        for start in range(0, count - count % size, size):
            yield joined[start : start + size]
        # Copied, not sliced: the remainder must not keep the rest in memory.
        pending, count = [joined[count - count % size :].compact()], count % size
    if count:
        yield Experiences.concat(pending)


# --- files --------------------------------------------------------------------------------------------------------


def list_files(path: str, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Return the path itself if it is a file, else the regular files directly in the folder, in natural order.

    A symbolic link to outside the folder is rejected.
    """
    if not os.path.isdir(path):
        return [path]
    root = os.path.realpath(path)
    paths = []
    for name in os.listdir(path):
        full_path = os.path.join(path, name)
        if name.startswith(".") or not os.path.isfile(full_path) or (pattern and not pattern.fullmatch(name)):
            continue
        if os.path.dirname(os.path.realpath(full_path)) != root:
            raise WireError(f"{full_path}: symbolic link to outside the folder; not followed")
        paths.append(full_path)
    return sorted(paths, key=lambda file_path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", file_path)])


def read_lines(path: str, max_row_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    """Read (file:line, text) of every line that is not blank; the text is `None` if it is over the limit."""
    name = os.path.basename(path)
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_row_bytes + 2):
            number += 1
            location = f"{name}:{number}"
            if len(line.rstrip(b"\r\n")) > max_row_bytes:
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 20)
                yield location, None
            elif text := line.strip():
                yield location, text


def parse_object(text: bytes | None, max_row_bytes: int, strict: bool = True) -> dict[str, Any]:
    """Parse one line as an object of bounded depth; with `strict=False`, also Python's NaN and Infinity."""
    if text is None:
        raise WireError(f"the line is over the limit of {max_row_bytes} bytes (max_row_bytes)")
    try:
        value = orjson.loads(text)
    except ValueError as error:
        if strict or not (b"NaN" in text or b"Infinity" in text):
            raise WireError(f"invalid JSON: {error}") from None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as other:
            raise WireError(f"invalid JSON: {other}") from None
    if type(value) is not dict:
        raise WireError(f"got a JSON {type(value).__name__}, expected one object per line")
    # Free-form values, which may have MAX_DEPTH levels, are inside the object of the line.
    check_depth(value, MAX_DEPTH + 2)
    return value


def check_depth(value: Json, depth: int) -> None:
    """Raise `WireError` if values are nested deeper than `depth`. Not recursive, since the input is untrusted."""
    layer = [value]
    for _ in range(depth + 1):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not layer:
            return
    raise WireError(f"values are nested deeper than {depth}")


_ROW_FILES = re.compile(r".*\.(jsonl|json|parquet)")


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def list_float_columns(path: str) -> list[str]:
    """Return the names of the float columns of the Parquet files of a path."""
    import pyarrow.parquet as pq

    names: dict[str, None] = {}
    for name in filter(_is_parquet, list_files(path, _ROW_FILES)):
        try:
            schema = pq.read_schema(name)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise WireError(f"{name}: cannot read Parquet file: {error}") from None
        names |= {column.name: None for column in schema if pa.types.is_floating(column.type)}
    return list(names)


def read_rows(path: str, errors: ErrorHandler, max_row_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read (file:number, row) of every row of a JSONL or Parquet file, or of a folder of such files."""
    for name in list_files(path, _ROW_FILES):
        if _is_parquet(name):
            number = 0
            # Small batches: Python values take many times the memory of the Arrow rows.
            for batch in parquet.batches(name, 64, max_row_bytes=max_row_bytes):
                for row in batch.to_pylist():
                    yield f"{os.path.basename(name)}:{number}", row
                    number += 1
            continue
        for location, text in read_lines(name, max_row_bytes):
            try:
                row = parse_object(text, max_row_bytes, strict=False)
            except WireError as error:
                errors.handle(location, error)
                continue
            yield location, row
