"""Read and write records in every format of `FORMATS`, a batch at a time, and detect the format of a path.

Frames and TRXP files are read and written here; the other formats have modules of their own.

Invariant: reading holds one batch and executes nothing from the file; writing leaves a complete file or none. The
content decides the format: an extension counts only for an empty or new file. A path that fits no format, or several,
is rejected with what was found.

>>> import tempfile
>>> from rollbook import Experience, Experiences
>>> records = Experiences([Experience(tokens=[1, 2, 3], reward=float(i)) for i in range(3)])
>>> with tempfile.TemporaryDirectory() as folder:
...     write([records[:2], records[2:]], f"{folder}/some.jsonl"), guess(f"{folder}/some.jsonl")
...     [len(batch) for batch in read(f"{folder}/some.jsonl", batch_rows=2)]
(3, 'jsonl')
[2, 1]
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, BinaryIO

from rollbook.core import wire
from rollbook.core.checks import check_bool, check_choice, check_int, suggest
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import owner
from rollbook.core.files import FOLDER_MODE, check_regular, make_private, sync_path, sync_tree
from rollbook.core.trxp import MAGIC as TRXP
from rollbook.core.wire import DEFAULT_LIMITS, Limits
from rollbook.core.wire import MAGIC as FRAME
from rollbook.io import frameworks, hf, jsonl, parquet, trinity_sqlite
from rollbook.io.arrow import from_table
from rollbook.io.rows import (
    MAX_ROW_BYTES,
    ErrorHandler,
    Report,
    Skipped,
    list_files,
    parse_object,
    read_lines,
    regroup,
)
from rollbook.io.trinity_sqlite import list_tables

__all__ = ["FORMATS", "Reading", "Report", "Skipped", "guess", "list_tables", "read", "write"]


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

    def records(data: bytearray) -> Experiences:
        return Experiences(trxp.read(memoryview(data), limits))

    for name in list_files(path):
        with open(name, "rb") as file:
            first = file.read(4)
            if first and first != trxp.MAGIC:
                yield records(bytearray(first + file.read(limits.max_bytes)))
                continue
        yield from _read(name, trxp.HEADER_BYTES, trxp.payload_size, records, errors, limits.max_bytes)


def _read(
    path: str,
    head_bytes: int,
    size: Callable[[bytes], int],
    records: Callable[[bytearray], Experiences],
    errors: ErrorHandler,
    max_bytes: int = 1 << 62,
) -> Iterator[Experiences]:
    """Read chunks whose header states their length. Memory grows with the bytes of the file, not with that length."""
    with open(path, "rb") as file:
        at = 0
        while head := file.read(head_bytes):
            prefix = f"{os.path.basename(path)}: byte {at}"
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
                errors.handle(prefix, error)
            else:
                yield batch
            at += total


def _fill(file: BinaryIO, data: bytearray, total: int) -> None:
    while len(data) < total and (chunk := file.read(min(total - len(data), 16 << 20))):
        data += chunk


FORMATS: dict[str, str] = {
    "parquet": "one Parquet file of ordinary columns, a row group per batch; read and written",
    "hf": "a folder of Dataset.save_to_disk, or a datasets.Dataset; read and written",
    "jsonl": "one record per line, as strict and lossless JSON; read and written",
    "frames": "consecutive frames of Rollbook; read and written",
    "trxp": "consecutive payloads of Trinity-RFT, or one of its pickles; read and written",
    "trinity-sqlite": "a table of Trinity-RFT's SQLite buffers, 0.5.x and 0.6.x; read",
    "verl": "rollouts that verl dumped: {step}.jsonl in rollout_data_dir, or Parquet; read",
    "trl": "completions that TRL logged (log_completions), Parquet or JSONL; read",
    "openrlhf": "samples that OpenRLHF wrote, JSONL or Parquet; read",
}
EXTENSIONS = {".parquet": "parquet", ".jsonl": "jsonl", ".frames": "frames", ".trxp": "trxp", ".hf": "hf"}
"""Formats of new and empty files, by extension."""


def check_format(name: str | None, writing: bool = False) -> str:
    """Check the name of a format."""
    names = list(_WRITERS if writing else _READERS)
    if name not in names:
        also = " for writing" if writing and name in FORMATS else ""
        raise ValueError(f"format: got {name!r}, unknown format{also}{suggest(str(name), names)}")
    return str(name)


def format_from_name(path: str) -> str:
    """Return the format of a new file, by its extension."""
    suffix = os.path.splitext(path)[1]
    if suffix not in EXTENSIONS:
        raise ValueError(f"path: {path!r} has no known extension, expected format= or one of {', '.join(EXTENSIONS)}")
    return EXTENSIONS[suffix]


def is_saved_dataset(path: str) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, file)) for file in ("state.json", "dataset_dict.json"))


def guess(path: str | os.PathLike[str]) -> str:
    """Detect the format of records.

    Args:
        path: A file, a folder or a `datasets.Dataset`.

    Returns:
        A key of `FORMATS`.

    Raises:
        ValueError: The content fits no format, or files of several formats are in the folder.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "17.jsonl")
    ...     _ = file.write_text('{"input": "2 + 3 =", "output": "5", "score": 1.0, "step": 17}')
    ...     guess(file)
    'verl'
    """
    if not isinstance(path, (str, os.PathLike)):
        if hasattr(path, "with_format"):
            return "hf"
        raise ValueError(f"path: got a {type(path).__name__}, expected a path or a datasets.Dataset")
    name = os.fspath(path)
    check_regular(name)
    if not os.path.isdir(name):
        return _guess_file(name)
    if is_saved_dataset(name):
        return "hf"
    paths = list_files(name)
    kinds: dict[str, str] = {}
    for file_path in paths:
        kinds.setdefault(_guess_file(file_path), file_path)
        if len(kinds) > 1:
            formats = " and ".join(f"{kind} ({os.path.basename(file)})" for kind, file in kinds.items())
            raise ValueError(f"{name}: the folder holds {formats}, expected files of one format")
    if not kinds:
        raise ValueError(f"{name}: the folder has no files; {_list_formats()}")
    return next(iter(kinds))


def _list_formats() -> str:
    return f"the formats are {', '.join(FORMATS)}"


def _guess_file(path: str) -> str:
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        suffix = os.path.splitext(path)[1]
        if suffix in EXTENSIONS and suffix != ".parquet":
            return EXTENSIONS[suffix]
        raise ValueError(f"{path}: the file is empty; {_list_formats()}")
    if head.startswith(FRAME):
        return "frames"
    # A pickle of protocol 2 or later, as Trinity wrote before TRXP.
    if head.startswith(TRXP) or (head[0] == 0x80 and head[1] < 6):
        return "trxp"
    if head.startswith(b"SQLite format 3\0"):
        if not list_tables(path):
            raise ValueError(f"{path}: found an SQLite database without a table of Trinity's; {_list_formats()}")
        return "trinity-sqlite"
    if head.startswith(b"PAR1"):
        return guess_from_keys(path, read_column_names(path), "parquet", "a Parquet file with the columns")
    if head.lstrip()[:1] == b"{":
        _, text = next(read_lines(path, MAX_ROW_BYTES))
        try:
            row = parse_object(text, MAX_ROW_BYTES, strict=False)
        except WireError as error:
            raise ValueError(f"{path}: line 1: {error.message}; {_list_formats()}") from None
        return guess_from_keys(path, row, "jsonl", "JSON lines with the keys")
    content = (
        "a JSON array, not one object per line" if head.lstrip()[:1] == b"[" else f"bytes that begin {head[:16]!r}"
    )
    raise ValueError(f"{path}: found {content}; {_list_formats()}")


def read_column_names(path: str) -> dict[str, Any]:
    """Return the names of the columns of a Parquet file, as keys."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return dict.fromkeys(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WireError(f"{path}: cannot read Parquet file: {error}") from None


def guess_from_keys(path: str, row: dict[str, Any], native: str, content: str) -> str:
    """Return the format of rows with these keys; `native` is that of Rollbook's own rows."""
    keys = set(row)
    if "tokens" in keys or (native == "parquet" and "tokens__other" in keys) or "rollbook" in keys:
        return native
    # verl's generation script writes the dataset's columns and a list of responses; its trainer writes ids and masks.
    verl_keys = keys & {"data_source", "reward_model", "response_mask", "attention_mask", "input_ids"}
    if {"input", "output"} <= keys and keys & {"score", "gts", "step"}:
        return "verl"
    if "responses" in keys and keys & {"prompt", "prompts"} and verl_keys:
        return "verl"
    if keys >= {"prompt", "completion"} or keys >= {"prompt_ids", "completion_ids"}:
        return "trl"
    if {"input", "output"} <= keys or "observation_tokens" in keys or keys >= {"prompt", "chosen", "rejected"}:
        return "openrlhf"
    if keys & {"prompt", "prompts"} and keys & {"response", "responses"}:
        return "openrlhf"
    shown = ", ".join(sorted(map(str, keys))[:20])
    raise ValueError(f"{path}: found {content} {shown}; {_list_formats()}")


def _read_parquet(path: str, batch_rows: int, errors: ErrorHandler, *, max_row_bytes: int) -> Iterator[Experiences]:
    for name in list_files(path):
        for batch in parquet.batches(name, batch_rows, max_row_bytes=max_row_bytes):
            yield from_table(batch)


_READERS: dict[str, Callable[..., Iterator[Experiences]]] = {
    "parquet": _read_parquet,
    "hf": hf.read,
    "jsonl": jsonl.read,
    "frames": read_frames,
    "trxp": read_trxp,
    "trinity-sqlite": trinity_sqlite.read,
    "verl": frameworks.read_verl,
    "trl": frameworks.read_trl,
    "openrlhf": frameworks.read_openrlhf,
}
_WRITERS: dict[str, Callable[..., int]] = {
    "parquet": parquet.write,
    "hf": hf.write,
    "jsonl": jsonl.write,
    "frames": write_frames,
    "trxp": write_trxp,
}


class Reading(Iterator[Experiences]):
    """An iterator over the batches of a path, as `read` returns it.

    Args:
        format: Format of the path.
        batches: The batches.
        report: The rows that were skipped so far.
    """

    def __init__(self, format: str, batches: Iterator[Experiences], report: Report) -> None:
        self.format = format
        self.report = report
        self._batches = batches

    def __next__(self) -> Experiences:
        return next(self._batches)

    def close(self) -> None:
        """Stop reading and close the file."""
        if inspect.isgenerator(self._batches):
            self._batches.close()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: BaseException | type[BaseException] | TracebackType | None) -> None:
        self.close()


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    batch_rows: int = 1024,
    on_error: str = "raise",
    **options: Any,
) -> Reading:
    """Read records in batches.

    Args:
        path: A file, a folder or a `datasets.Dataset`.
        format: A key of `FORMATS`; detected by default.
        batch_rows: Records per batch.
        on_error: `"skip"` leaves out rows (lines, database rows, frames, payloads) that cannot be read and lists them
            in the `report` of the result. A file that is damaged as a whole raises either way.
        options: Options of the format:

            - `max_row_bytes` (jsonl, parquet, trinity-sqlite, verl, trl, openrlhf): the largest row that is read;
            - `limits` (frames, trxp): a `rollbook.core.wire.Limits`;
            - `split` (hf): which of several splits;
            - `table` (trinity-sqlite): which of several tables (see `list_tables`);
            - `tokenizer` (verl, trl, openrlhf): a transformers tokenizer or its path, for rows without token ids;
            - `rewards` (trl): the reward columns, or a dict with their weights.

    Returns:
        An iterator over `Experiences`.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: The format or an option is unknown, or the format cannot be detected.
        WireError: Raised during iteration if the data is damaged or exceeds the limits.

    >>> import tempfile
    >>> records = Experiences.from_columns({"tokens": [[1, 2], [3, 4, 5]], "reward": [0.0, 1.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write(records, f"{folder}/records.frames")
    ...     [row.reward for batch in read(f"{folder}/records.frames") for row in batch]
    [0.0, 1.0]
    """
    name = guess(path) if format is None else check_format(format)
    location = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(location, str) and name != "hf":
        raise ValueError(f"path: got a {type(path).__name__}, expected a path for format {name!r}")
    if isinstance(location, str) and not os.path.exists(location):
        raise FileNotFoundError(f"path: {location!r} does not exist")
    if isinstance(location, str):
        check_regular(location)
    check_choice("on_error", on_error, ("raise", "skip"))
    rows = check_int("batch_rows", batch_rows, 1)
    reader = _READERS[name]
    _check_options(reader, name, options)
    if "max_row_bytes" in inspect.signature(reader).parameters:
        options["max_row_bytes"] = check_int("max_row_bytes", options.get("max_row_bytes", MAX_ROW_BYTES), 1)
    report = Report()
    batches = reader(location, rows, ErrorHandler(on_error == "skip", report), **options)
    return Reading(name, regroup(batches, rows), report)


def write(
    batches: Experiences | Iterable[Experiences],
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    batch_rows: int = 1024,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Write records to a file, which appears when it is complete.

    Args:
        batches: The records.
        path: The file, or for `hf` the folder.
        format: A key of `FORMATS`; by default given by the extension (.parquet, .jsonl, .frames, .trxp, .hf).
        batch_rows: Records per row group, frame or payload.
        overwrite: Replace an existing file.
        options: Options of the format: `compression` (parquet, by default "zstd"; frames, by default `None`),
            `max_shard_size` (hf).

    Returns:
        The number of records.

    Raises:
        FileExistsError: The file exists and `overwrite` is false, or the path is a folder that is not a saved dataset.
        ValueError: The format or an option is unknown.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Experiences.from_columns({"tokens": [[1, 2], [3, 4, 5]]}), f"{folder}/records.parquet")
    2
    """
    final = os.fspath(path).rstrip("/")
    name = format_from_name(final) if format is None else check_format(format, writing=True)
    parts: Any = [batches] if isinstance(batches, Experiences) else batches
    if not isinstance(parts, Iterable):
        raise ValueError(f"batches: got a {type(batches).__name__}, expected an iterable of Experiences")
    rows = check_int("batch_rows", batch_rows, 1)
    writer = _WRITERS[name]
    _check_options(writer, name, options)
    if not check_bool("overwrite", overwrite) and os.path.lexists(final):
        raise FileExistsError(f"path: {final!r} exists; overwrite=True replaces it")
    check_regular(final)
    if os.path.isdir(final) and not (name == "hf" and is_saved_dataset(final)):
        # Replacing the folder would delete its files.
        raise FileExistsError(f"path: {final!r} is a folder and not a saved dataset; it is not replaced")
    # Written in a private folder, which also holds the temporary files of the writer.
    working_folder = f"{final}.{os.urandom(4).hex()}.partial"
    partial = os.path.join(working_folder, os.path.basename(final))
    os.mkdir(working_folder, FOLDER_MODE)
    try:
        count = writer(regroup(parts, rows), partial, **options)
        make_private(partial)
        sync_tree(partial)
        if os.path.isdir(final) and not os.path.islink(final):
            _replace_folder(partial, final)
        else:
            os.replace(partial, final)
    finally:
        _remove(working_folder)
    sync_path(os.path.dirname(os.path.abspath(final)))
    return count


def _check_options(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    known_options = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known_options:
            raise ValueError(f"format {name!r} has no option {option!r}{suggest(option, known_options)}")


def _replace_folder(new: str, final: str) -> None:
    """Replace a folder by two renames. Between them, `final` does not exist; it is never incomplete."""
    old = f"{new}.old"
    os.rename(final, old)
    try:
        os.replace(new, final)
    except BaseException:
        os.rename(old, final)
        raise
    _remove(old)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
