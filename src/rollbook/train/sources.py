"""Where a task's rows come from: JSON lines, a JSON list, Parquet, a folder of them, or a Hugging Face dataset.

Invariant: rows come in the order of the source, each with the words that say where it stands, and lines are read one
at a time; a source that cannot be read is an error that names it, and the line.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollbook.core.files import check_regular
from rollbook.io.rows import MAX_ROW_BYTES

_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_KINDS = (*_LINES, ".json", ".parquet")
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")

Placed = Iterator[tuple[str, Any]]


def read(
    path: str | Path, *, split: str | None = None, subset: str | None = None, columns: set[str] | None = None
) -> Placed:
    """(place, row) of each row; `split` and `subset` are of Hugging Face datasets, `columns` those that are read of a
    table, if not all.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "task.jsonl"
    ...     _ = file.write_text('{"prompt": "a"}\\n\\n{"prompt": "b"}\\n')
    ...     list(read(file))
    [('line 1', {'prompt': 'a'}), ('line 3', {'prompt': 'b'})]
    """
    where = Path(path)
    if where.is_dir() and ((where / "dataset_dict.json").is_file() or (where / "state.json").is_file()):
        return _of_dataset(_datasets(path).load_from_disk(str(where)), path, split, columns)
    kind = next((each for each in _KINDS if str(path).endswith(each)), None)
    if not where.exists() and kind is None and _HUB.fullmatch(str(path)):
        return _of_dataset(_from_hub(str(path), subset, split), path, split, columns)
    if not where.exists():
        raise ValueError(f"data: got {str(path)!r}, but there is no such file, folder or dataset")
    for name, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise ValueError(f"{name}: got {value!r}, expected None: {str(path)!r} is no Hugging Face dataset")
    files = [where]
    if where.is_dir():
        files = sorted(file for file in where.iterdir() if file.name.endswith(_KINDS))
        if len({file.suffix for file in files}) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise ValueError(
                f"data: got the folder {str(path)!r}, expected files of one kind in it; there are: {found}"
            )
    elif kind is None:
        raise ValueError(f"data: got {str(path)!r}, expected a file that ends in {', '.join(_KINDS)}, or a dataset")
    return _of_files(files, columns)


def _of_files(files: list[Path], columns: set[str] | None) -> Placed:
    for file in files:
        check_regular(file)
        part = f"{file.name}, " if len(files) > 1 else ""
        rows = _parquet(file, columns) if file.suffix == ".parquet" else _json(file)
        for place, row in rows:
            yield part + place, row


def _json(file: Path) -> Placed:
    if file.suffix == ".json" and (whole := _json_list(file)) is not None:
        for i, row in enumerate(whole):
            yield f"row {i}", row
        return
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        try:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_ROW_BYTES + 1), b""), 1):
                if len(line) > MAX_ROW_BYTES:
                    raise ValueError(f"the line is over the limit of {MAX_ROW_BYTES} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"line {number}", json.loads(text)
        except ValueError as error:  # of JSON, and of UTF-8
            raise ValueError(f"{file}, line {number}: {error}") from None
        except (OSError, EOFError) as error:
            raise ValueError(f"{file}: {error}") from None


def _json_list(file: Path) -> list[Any] | None:
    """The list that a file holds; `None` if it has lines of JSON, as many of this ending do."""
    with file.open("rb") as opened:
        start = opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        return None
    try:
        made: list[Any] = json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return made


def _parquet(file: Path, columns: set[str] | None) -> Placed:
    from rollbook.io import parquet

    yield from _of_batches(parquet.batches(file, 1024, max_row_bytes=MAX_ROW_BYTES, columns=columns))


def _of_batches(batches: Iterable[Any]) -> Placed:
    count = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"row {count}", row
            count += 1


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def _datasets(path: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is a Hugging Face dataset, which needs: pip install 'rollbook[hf]'"
        ) from error
    return datasets


def _from_hub(name: str, subset: str | None, split: str | None) -> Any:
    datasets = _datasets(name)
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # of the network, of the hub, of its libraries
        raise ValueError(
            f"data: got {name!r}, which is no file or folder here, and no dataset that can be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _of_dataset(found: Any, path: str | Path, split: str | None, columns: set[str] | None) -> Placed:
    if hasattr(found, "keys"):  # several, by split
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise ValueError(f"split: got {split!r}, expected one that {str(path)!r} has: {', '.join(found)}")
        found = found[split]
    elif split is not None and str(found.split or split).partition("[")[0] != split.partition("[")[0]:
        raise ValueError(f"split: got {split!r}, expected {str(found.split)!r}, which {str(path)!r} is")
    if columns is not None:
        found = found.select_columns([name for name in found.column_names if name in columns])
    # As the table lies: pictures stay the bytes of their files until they are looked at.
    return _of_batches(found.with_format("arrow").iter(1024))
