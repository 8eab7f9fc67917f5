"""Which formats there are, and which of them a path holds.

Invariant: content decides. An extension is asked only of a file that has nothing in it yet; what fits no format, or
fits several, is refused with what was found.
"""

from __future__ import annotations

import os
from typing import Any

from rollbook.core.checks import suggest
from rollbook.core.errors import WireError
from rollbook.core.files import check_regular
from rollbook.core.trxp import MAGIC as TRXP
from rollbook.core.wire import MAGIC as FRAME
from rollbook.io.rows import MAX_ROW_BYTES, files, json_object, lines
from rollbook.io.trinity_sqlite import tables

FORMATS: dict[str, str] = {
    "parquet": "one Parquet file of ordinary columns, a row group a batch; read and written",
    "hf": "a folder of Dataset.save_to_disk, or a datasets.Dataset; read and written",
    "jsonl": "one record a line, strict JSON that loses nothing; read and written",
    "frames": "Rollbook's frames one after the other; read and written",
    "trxp": "Trinity-RFT's payloads one after the other (or one of its pickles); read and written",
    "trinity-sqlite": "a table of Trinity-RFT's SQLite buffers, 0.5.x and 0.6.x; read",
    "verl": "rollouts that verl dumped: {step}.jsonl in rollout_data_dir, or Parquet; read",
    "trl": "completions that TRL logged (log_completions), Parquet or JSONL; read",
    "openrlhf": "samples that OpenRLHF wrote, JSONL or Parquet; read",
}
EXTENSIONS = {".parquet": "parquet", ".jsonl": "jsonl", ".frames": "frames", ".trxp": "trxp", ".hf": "hf"}
"""What a new file's name says, and an empty one's."""


def known(name: Any, writing: bool = False) -> str:
    """The format of that name, else an error with those that exist."""
    names = [each for each, words in FORMATS.items() if not writing or words.endswith("written")]
    if name not in names:
        also = " for writing" if writing and name in FORMATS else ""
        raise ValueError(f"format: got {name!r}, which is none{also}{suggest(str(name), names)}")
    return str(name)


def for_writing(path: str) -> str:
    """The format that a new file's name asks for."""
    suffix = os.path.splitext(path)[1]
    if suffix not in EXTENSIONS:
        raise ValueError(
            f"path: {path!r} says no format, expected format= or a name that ends in one of {', '.join(EXTENSIONS)}"
        )
    return EXTENSIONS[suffix]


def is_saved_dataset(path: str) -> bool:
    """Whether a folder is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` made."""
    return any(os.path.isfile(os.path.join(path, each)) for each in ("state.json", "dataset_dict.json"))


def guess(path: Any) -> str:
    """The name of the format that a file, a folder or a `datasets.Dataset` holds.

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
        return _of_file(name)
    if is_saved_dataset(name):
        return "hf"
    found = files(name)
    kinds: dict[str, str] = {}
    for each in found:
        kinds.setdefault(_of_file(each), each)
        if len(kinds) > 1:
            what = " and ".join(f"{kind} ({os.path.basename(file)})" for kind, file in kinds.items())
            raise ValueError(f"{name}: the folder holds {what}, expected files of one format")
    if not kinds:
        raise ValueError(f"{name}: the folder has no files; {_names()}")
    return next(iter(kinds))


def _names() -> str:
    return f"the formats are {', '.join(FORMATS)}"


def _of_file(path: str) -> str:
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        suffix = os.path.splitext(path)[1]
        if suffix in EXTENSIONS and suffix != ".parquet":
            return EXTENSIONS[suffix]
        raise ValueError(f"{path}: the file is empty; {_names()}")
    if head.startswith(FRAME):
        return "frames"
    # A pickle of protocol 2 or later, as Trinity wrote before TRXP.
    if head.startswith(TRXP) or (head[0] == 0x80 and head[1] < 6):
        return "trxp"
    if head.startswith(b"SQLite format 3\0"):
        if not tables(path):
            raise ValueError(f"{path}: found an SQLite database without a table of Trinity's; {_names()}")
        return "trinity-sqlite"
    if head.startswith(b"PAR1"):
        return _of_keys(path, _columns(path), "parquet", "a Parquet file with the columns")
    if head.lstrip()[:1] == b"{":
        _, text = next(lines(path, MAX_ROW_BYTES))
        try:
            row = json_object(text, MAX_ROW_BYTES, strict=False)
        except WireError as error:
            raise ValueError(f"{path}: line 1: {error.message}; {_names()}") from None
        return _of_keys(path, row, "jsonl", "JSON lines with the keys")
    what = "a JSON array, not one object a line" if head.lstrip()[:1] == b"[" else f"bytes that begin {head[:16]!r}"
    raise ValueError(f"{path}: found {what}; {_names()}")


def _columns(path: str) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return dict.fromkeys(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WireError(f"{path}: no Parquet file that can be read: {error}") from None


def _of_keys(path: str, row: dict[str, Any], own: str, what: str) -> str:
    keys = set(row)
    if "tokens" in keys or (own == "parquet" and "tokens__other" in keys) or "rollbook" in keys:
        return own
    # verl's generation writes a list of answers beside its dataset's columns; its trainer writes ids and masks.
    by_verl = keys & {"data_source", "reward_model", "response_mask", "attention_mask", "input_ids"}
    if {"input", "output"} <= keys and keys & {"score", "gts", "step"}:
        return "verl"
    if "responses" in keys and keys & {"prompt", "prompts"} and by_verl:
        return "verl"
    if keys >= {"prompt", "completion"} or keys >= {"prompt_ids", "completion_ids"}:
        return "trl"
    if {"input", "output"} <= keys or "observation_tokens" in keys or keys >= {"prompt", "chosen", "rejected"}:
        return "openrlhf"
    if keys & {"prompt", "prompts"} and keys & {"response", "responses"}:
        return "openrlhf"
    shown = ", ".join(sorted(map(str, keys))[:20])
    raise ValueError(f"{path}: found {what} {shown}; {_names()}")
