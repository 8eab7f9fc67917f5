"""Experience from and to other formats, a batch at a time; see `FORMATS`.

Invariant: reading holds a batch and runs nothing that a file says; writing leaves a whole file under its name or none.

>>> import tempfile
>>> from rollbook import Experience, Experiences
>>> many = Experiences([Experience(tokens=[1, 2, 3], reward=float(i)) for i in range(3)])
>>> with tempfile.TemporaryDirectory() as folder:
...     write([many[:2], many[2:]], f"{folder}/some.jsonl"), guess(f"{folder}/some.jsonl")
...     [len(batch) for batch in read(f"{folder}/some.jsonl", batch_rows=2)]
(3, 'jsonl')
[2, 1]
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rollbook.core.checks import check_bool, check_choice, check_int, suggest
from rollbook.core.experiences import Experiences
from rollbook.core.files import FOLDER, check_regular, make_private
from rollbook.io import frameworks, jsonl, native, trinity_sqlite
from rollbook.io.formats import FORMATS, for_writing, guess, is_saved_dataset, known
from rollbook.io.rows import MAX_ROW_BYTES, Errors, Report, Skipped, regroup
from rollbook.io.trinity_sqlite import tables

_READERS: dict[str, Callable[..., Iterator[Experiences]]] = {
    "parquet": native.read_parquet,
    "hf": native.read_hf,
    "jsonl": jsonl.read,
    "frames": native.read_frames,
    "trxp": native.read_trxp,
    "trinity-sqlite": trinity_sqlite.read,
    "verl": frameworks.read_verl,
    "trl": frameworks.read_trl,
    "openrlhf": frameworks.read_openrlhf,
}
_WRITERS: dict[str, Callable[..., int]] = {
    "parquet": native.write_parquet,
    "hf": native.write_hf,
    "jsonl": jsonl.write,
    "frames": native.write_frames,
    "trxp": native.write_trxp,
}


class Reading(Iterator[Experiences]):
    """The batches of a path, its format, and the report of what was left out; closes its file at the end."""

    def __init__(self, format: str, batches: Iterator[Experiences], report: Report) -> None:
        self.format = format
        self.report = report
        self._batches = batches

    def __next__(self) -> Experiences:
        return next(self._batches)

    def close(self) -> None:
        """Stop reading, and close the file now."""
        if inspect.isgenerator(self._batches):
            self._batches.close()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(
    path: Any, format: str | None = None, *, batch_rows: int = 1024, on_error: str = "raise", **options: Any
) -> Reading:
    """The records at `path` (a file, a folder, a `datasets.Dataset`), in batches of `batch_rows`.

    `format` is guessed if it is not given. With `on_error="skip"` a row (a line, a database row, a frame, a payload)
    that cannot be read is left out and named in `report` of what is returned; a file that is damaged as a whole raises
    either way. Options of a format:

    - `max_row_bytes` (jsonl, parquet, trinity-sqlite, verl, trl, openrlhf): the largest row that is read.
    - `limits` (frames, trxp): a `rollbook.core.wire.Limits`.
    - `split` (hf): which of several. `table` (trinity-sqlite): which of several; `tables(path)` names them.
    - `tokenizer` (verl, trl, openrlhf): a transformers tokenizer or the path of one, for rows that have text alone.
    - `rewards` (trl): the columns that are rewards, or a dict with their weights.
    """
    name = guess(path) if format is None else known(format)
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(where, str) and name != "hf":
        raise ValueError(f"path: got a {type(path).__name__}, expected a path for format {name!r}")
    if isinstance(where, str) and not os.path.exists(where):
        raise FileNotFoundError(f"path: {where!r} does not exist")
    if isinstance(where, str):
        check_regular(where)
    check_choice("on_error", on_error, ("raise", "skip"))
    rows = check_int("batch_rows", batch_rows, 1)
    reader = _READERS[name]
    _check(reader, name, options)
    if "max_row_bytes" in inspect.signature(reader).parameters:
        options["max_row_bytes"] = check_int("max_row_bytes", options.get("max_row_bytes", MAX_ROW_BYTES), 1)
    report = Report()
    batches = reader(where, rows, Errors(on_error == "skip", report), **options)
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
    """Write all records to `path`, in pieces of `batch_rows` (a row group, a frame, a payload); how many there were.

    `format` is what the name ends in (.parquet, .jsonl, .frames, .trxp, .hf) if it is not given. The file appears when
    it is complete. Options: `compression` (parquet: "zstd"; frames: None), `max_shard_size` (hf).
    """
    final = os.fspath(path).rstrip("/")
    name = for_writing(final) if format is None else known(format, writing=True)
    given: Any = [batches] if isinstance(batches, Experiences) else batches
    if not isinstance(given, Iterable):
        raise ValueError(f"batches: got a {type(batches).__name__}, expected an iterable of Experiences")
    rows = check_int("batch_rows", batch_rows, 1)
    writer = _WRITERS[name]
    _check(writer, name, options)
    if not check_bool("overwrite", overwrite) and os.path.lexists(final):
        raise FileExistsError(f"path: {final!r} exists; overwrite=True replaces it")
    check_regular(final)
    if os.path.isdir(final) and not (name == "hf" and is_saved_dataset(final)):
        # Whatever is in it would go with it.
        raise FileExistsError(f"path: {final!r} is a folder and no saved dataset; it is not replaced")
    # In a folder that nobody else can enter, also for what a writer has beside its file.
    aside = f"{final}.{os.urandom(4).hex()}.partial"
    partial = os.path.join(aside, os.path.basename(final))
    os.mkdir(aside, FOLDER)
    try:
        count = writer(regroup(given, rows), partial, **options)
        make_private(partial)
        _sync(partial)
        if os.path.isdir(final) and not os.path.islink(final):
            _replace_folder(partial, final)
        else:
            os.replace(partial, final)
    finally:
        _remove(aside)
    _sync_folder(os.path.dirname(os.path.abspath(final)))
    return count


def _check(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    takes = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in takes:
            raise ValueError(f"format {name!r} has no option {option!r}{suggest(option, takes)}")


def _sync(path: str) -> None:
    for name in [path] if os.path.isfile(path) else [os.path.join(path, each) for each in os.listdir(path)]:
        with open(name, "rb") as file:
            os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _replace_folder(made: str, final: str) -> None:
    """Put a folder in the place of another; between the two renames there is none under the name, never half a one."""
    old = f"{made}.old"
    os.rename(final, old)
    try:
        os.replace(made, final)
    except BaseException:
        os.rename(old, final)
        raise
    _remove(old)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


__all__ = ["FORMATS", "Reading", "Report", "Skipped", "guess", "read", "tables", "write"]
