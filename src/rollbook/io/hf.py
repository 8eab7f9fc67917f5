"""Hugging Face datasets of records: `Dataset` objects, and the folders of `Dataset.save_to_disk`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.io.arrow import from_table, to_table, write_tables
from rollbook.io.rows import ErrorHandler

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["from_hf", "to_hf"]


def to_hf(records: Experiences) -> Dataset:
    """Convert records to a `datasets.Dataset`.

    Args:
        records: The records.

    Returns:
        The dataset, from which `from_hf` reads the same records.

    >>> records = Experiences.from_columns({"tokens": [[1, 2, 3], [4, 5]], "reward": [1.0, 0.0]})
    >>> from_hf(to_hf(records)) == records
    True
    """
    # Empty columns have the null type, so that `concatenate_datasets` accepts any type in another dataset.
    return dataset_from_table(to_table(records, portable=True, typed=False))


def from_hf(dataset: Dataset) -> Experiences:
    """Read the records of a `datasets.Dataset`.

    Args:
        dataset: The dataset, which may have been filtered, sorted or shuffled.

    Returns:
        The records.

    Raises:
        ValueError: `dataset` is not a `datasets.Dataset`.
        WireError: Its columns are not those of records.

    >>> records = Experiences.from_columns({"tokens": [[1, 2, 3], [4, 5]], "reward": [1.0, 0.0]})
    >>> from_hf(to_hf(records).select([1])).values("reward")
    [0.0]
    """
    if not hasattr(dataset, "with_format") or isinstance(dataset, dict):
        raise ValueError(f"dataset: got {type(dataset).__name__}, expected a datasets.Dataset")
    return from_table(dataset.with_format("arrow")[:])


def dataset_from_table(table: pa.Table) -> Dataset:
    """Wrap a table in a `datasets.Dataset` whose fingerprint is a hash of its content."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # Without a fingerprint, datasets pickles the table to compute one.
    digest = xxhash.xxh3_128(str(table.schema).encode())
    for column in table.columns:
        for chunk in column.chunks:
            digest.update(f"{len(chunk)} {chunk.offset}".encode())
            for buffer in chunk.buffers():
                digest.update(b"" if buffer is None else buffer)
    return Dataset(InMemoryTable(table), fingerprint=digest.hexdigest()[:16])


# --- saved datasets -------------------------------------------------------------------------------------------------


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError("format 'hf' needs the package datasets: install the extra 'hf' of Rollbook") from None
    return datasets


def write(batches: Iterable[Experiences], path: str, *, max_shard_size: int | str = "1GB") -> int:
    """Write a folder as `Dataset.save_to_disk` makes it; return the number of records."""
    datasets = _import_datasets()
    spool = f"{path}.arrow"
    try:
        count = write_tables(batches, spool, typed=False, open_writer=pa.ipc.new_stream, read_tables=_read_stream)
        dataset = datasets.Dataset.from_file(spool)
        quiet = not datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            # Without rows, the library would write no shard, and could not load the result.
            dataset.save_to_disk(path, **({"max_shard_size": max_shard_size} if count else {"num_shards": 1}))
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        del dataset
    finally:
        if os.path.exists(spool):
            os.remove(spool)
    return count


def _read_stream(path: str) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
        yield from stream


def read(
    path: str | Dataset | DatasetDict, batch_rows: int, errors: ErrorHandler, *, split: str | None = None
) -> Iterator[Experiences]:
    """Read a saved dataset or a `Dataset` object (its `split`, if there are several) in batches."""
    dataset: Any = path if not isinstance(path, str) else _load(path)
    if isinstance(dataset, dict):
        names = list(dataset)
        if split is None and len(names) != 1:
            raise ValueError(f"split: got None, expected one of {', '.join(map(repr, names))}: the dataset has several")
        if split is not None and split not in dataset:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(map(repr, names))}")
        dataset = dataset[names[0] if split is None else split]
    elif split is not None:
        raise ValueError(f"split: got {split!r}, but the dataset has no splits")
    for table in dataset.with_format("arrow").iter(batch_size=batch_rows):
        # Copied, not sliced: a slice would keep the whole dataset in memory.
        yield from_table(table.take(pa.array(np.arange(len(table)))))


def _load(path: str) -> Dataset | DatasetDict:
    folders = [path]
    listing = os.path.join(path, "dataset_dict.json")
    if os.path.isfile(listing):
        folders = [
            os.path.join(path, _check_file_name(name, listing)) for name in _load_json(listing).get("splits", [])
        ]
    for folder in folders:
        # The library would open any file that these name, also outside of the folder.
        state = os.path.join(folder, "state.json")
        for key in ("_data_files", "_indices_data_files"):
            for entry in _load_json(state).get(key) or []:
                name = _check_file_name(entry.get("filename") if isinstance(entry, dict) else None, state)
                real = os.path.realpath(os.path.join(folder, name))
                if os.path.dirname(real) != os.path.realpath(folder):
                    raise WireError(f"{state}: {name!r} is a symbolic link to outside the folder")
    try:
        return _import_datasets().load_from_disk(path)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise WireError(f"{path}: cannot read saved dataset: {error}") from None


def _load_json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            parsed = json.loads(file.read(16 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise WireError(f"{path}: {error}") from None
    if not isinstance(parsed, dict):
        raise WireError(f"{path}: got a {type(parsed).__name__}, expected an object")
    return parsed


def _check_file_name(name: str | None, prefix: str) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
        raise WireError(f"{prefix}: {name!r} is not a plain file name")
    return name
