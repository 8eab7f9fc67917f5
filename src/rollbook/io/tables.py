"""What the readers stand on: the files of a path, lines and rows within limits, and the report of what was left out.

Invariant: nothing is opened but the path that was given and plain files directly in it; a line or a row is never held
that is larger than its limit; and a row that cannot be read either raises or is in the report, never neither.
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
from rollbook.core.freeform import MAX_DEPTH
from rollbook.io import parquet

MAX_ROW_BYTES = 256 << 20
"""Of one line, row or stored record (Trinity's own limit is 32 MiB)."""
LISTED = 10_000
"""How many rows left out a report names; it counts all."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """One row that could not be read: where it stands (a row id, or file and line), and why."""

    row: int | str
    why: str


@dataclass(slots=True)
class Report:
    """What a reading with `on_error="skip"` left out.

    >>> report = Report()
    >>> report.add("7.jsonl:3", ValueError("no output"))
    >>> report.count, report.skipped[0]
    (1, Skipped(row='7.jsonl:3', why='no output'))
    """

    count: int = 0
    """All rows that were left out."""
    skipped: list[Skipped] = field(default_factory=list)
    """The first `LISTED` of them."""

    def add(self, row: int | str, why: Exception) -> None:
        """Count a row, and list it while there is room."""
        self.count += 1
        if len(self.skipped) < LISTED:
            self.skipped.append(Skipped(row, str(why)))


class Errors:
    """What a reader does with a row that cannot be read: `raise` says where it stands, `skip` puts it in the report."""

    def __init__(self, skip: bool, report: Report) -> None:
        self.skip = skip
        self.report = report

    def bad(self, row: int | str, why: Exception) -> None:
        if not self.skip:
            raise WireError(f"row {row}: {why}") from None
        self.report.add(row, why)


def regroup(batches: Iterable[Experiences], rows: int) -> Iterator[Experiences]:
    """The same records in batches of exactly `rows` (the last may be smaller): small ones are joined, large ones cut.

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
        if count < rows:
            continue
        joined = Experiences.concat(pending)
        for start in range(0, count - count % rows, rows):
            yield joined[start : start + rows]
        # Taken, not sliced: what is left must not keep the rest in memory.
        pending, count = [joined[count - count % rows :].compact()], count % rows
    if count:
        yield Experiences.concat(pending)


# --- files --------------------------------------------------------------------------------------------------------


def files(path: str, pattern: re.Pattern[str] | None = None) -> list[str]:
    """The path itself if it is a file, else the plain files directly in the folder, numbers in their names in order.

    A link that leaves the folder is refused: a folder from elsewhere names no file but its own.
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
            raise WireError(f"{full_path}: a link that leaves the folder, which is not followed")
        paths.append(full_path)
    return sorted(paths, key=lambda file_path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", file_path)])


def lines(path: str, max_row_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    """(file:line, text) of every line that is not blank; `None` for the text of one over the limit, which is passed
    over in pieces."""
    name = os.path.basename(path)
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_row_bytes + 2):
            number += 1
            where = f"{name}:{number}"
            if len(line.rstrip(b"\r\n")) > max_row_bytes:
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 20)
                yield where, None
            elif text := line.strip():
                yield where, text


def json_object(text: bytes | None, max_row_bytes: int, strict: bool = True) -> dict[str, Any]:
    """One line as a dict, its nesting bounded; with `strict=False`, NaN and Infinity as Python's json writes them."""
    if text is None:
        raise WireError(f"the line is over the limit of {max_row_bytes} bytes (max_row_bytes)")
    try:
        value = orjson.loads(text)
    except ValueError as error:
        if strict or not (b"NaN" in text or b"Infinity" in text):
            raise WireError(f"no JSON: {error}") from None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as other:
            raise WireError(f"no JSON: {other}") from None
    if type(value) is not dict:
        raise WireError(f"got a JSON {type(value).__name__}, expected one object a line")
    # A record's own free-form values may be MAX_DEPTH deep, inside the line's object.
    check_depth(value, MAX_DEPTH + 2)
    return value


def check_depth(value: Any, depth: int) -> None:
    """Refuse what is nested deeper than `depth`, by layers: no recursion that the text could choose the depth of."""
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


_ROWS = re.compile(r".*\.(jsonl|json|parquet)")


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def float_columns(path: str) -> list[str]:
    """The columns of floats that the Parquet files of a path have."""
    import pyarrow.parquet as pq

    names: dict[str, None] = {}
    for name in filter(_is_parquet, files(path, _ROWS)):
        try:
            schema = pq.read_schema(name)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise WireError(f"{name}: no Parquet file that can be read: {error}") from None
        names |= {column.name: None for column in schema if pa.types.is_floating(column.type)}
    return list(names)


def objects(path: str, errors: Errors, max_row_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row of JSONL and Parquet files, a file or a folder of them, as other tools write rows."""
    for name in files(path, _ROWS):
        if _is_parquet(name):
            at = 0
            # Few at a time: as Python values rows take many times their bytes.
            for batch in parquet.batches(name, 64, max_row_bytes=max_row_bytes):
                for row in batch.to_pylist():
                    yield f"{os.path.basename(name)}:{at}", row
                    at += 1
            continue
        for where, text in lines(name, max_row_bytes):
            try:
                row = json_object(text, max_row_bytes, strict=False)
            except WireError as error:
                errors.bad(where, error)
                continue
            yield where, row
