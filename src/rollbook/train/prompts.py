"""`Prompts`: rows of JSONL, Parquet or Hugging Face data as prompts, in a seeded order with a cursor.

Columns of a row: `prompt` (text, a chat or token ids) or `messages` (a chat), `reference`, `label`, `images`, `videos`,
`tools`, `response` (an answer), `chosen` and `rejected` (a pair of answers), `info`. Other columns go to `info`, and so
do answers.

Invariant: a row is a prompt, or an error that names the row and the column. Columns that are not kept are in
`Reader.dropped`. Digests depend on the data (with paths as written), not on its location.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from rollbook.core.checks import check_bool, check_float, check_int, suggest
from rollbook.core.files import check_regular
from rollbook.core.ids import EID
from rollbook.core.media import source_key
from rollbook.core.sampling import Prompt, as_media
from rollbook.io.rows import MAX_ROW_BYTES
from rollbook.rewards.types import Image

__all__ = ["Prompts"]

COLUMN_NAMES = (
    *("prompt", "messages", "reference", "label", "images", "videos", "tools"),
    *("response", "chosen", "rejected", "info"),
)
ANSWERS = ("response", "chosen", "rejected")
_RESERVED_NAMES = ("error", "errors", "reward_error", "reward_source", "segments", "drift", "branch", "truncated",
             "prompt_truncated_from")  # fmt: skip
"""Keys of `info` that records use; an `error` there means that the sample failed."""
_URL = re.compile(r"(data:|https?://)")


Question = str | list[int] | list[dict[str, Any]]
"""A text, token ids or messages."""
Answer = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text, a message or a chat."""


class Row(NamedTuple):
    """A row of the data.

    Args:
        number: Its number in the data.
        prompt: The prompt, without an id.
        content: Digest of the question.
        digest: Digest of the whole row.
    """

    number: int
    prompt: Prompt
    content: bytes
    digest: bytes


class Reader:
    """Converts mappings to rows, one after the other.

    Args:
        name: Name of the data in errors.
        columns: Column names in the data: {"prompt": "question", "reference": "reward_model.ground_truth"}. A dot leads
            into a mapping; `None` ignores the column of that name.
        keep: Other columns that go to `info`; `None`: all.
        folder: Folder that media paths are relative to.
        confined: Whether to reject media paths outside of `folder`, links followed; for rows of a file.

    >>> reader = Reader("demo", {"prompt": "question"})
    >>> row = reader.row("line 1", {"question": "2+2=", "reference": 4, "level": "easy", "blob": b"x"})
    >>> row.prompt.text, row.prompt.reference, row.prompt.info, reader.dropped
    ('2+2=', 4, {'level': 'easy'}, {'blob': 'bytes, which is not JSON (first in line 1)'})
    >>> reader.row("line 2", {"question": 7})
    Traceback (most recent call last):
        ...
    ValueError: demo, line 2: question (prompt): got int, expected text, chat messages or token ids
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, str | None] | None = None,
        keep: Sequence[str] | None = None,
        folder: Path | None = None,
        confined: bool = False,
    ) -> None:
        self.name = name
        self.folder = folder
        self.confined = confined
        self.columns: dict[str, str | None] = {name: name for name in COLUMN_NAMES}
        for field, column in (columns or {}).items():
            if field not in COLUMN_NAMES:
                raise ValueError(f"columns: unknown column {field!r}{suggest(field, list(COLUMN_NAMES))}")
            if column is not None and (not isinstance(column, str) or not column):
                raise ValueError(f"columns[{field!r}]: got {column!r}, expected a column's name, or None")
            self.columns[field] = column
        if isinstance(keep, str):
            raise ValueError(f"keep: got {keep!r}, expected a list of columns")
        self.keep = None if keep is None else frozenset(keep)
        self.dropped: dict[str, str] = {}
        """Reasons why columns are not kept in `info`."""
        self._count = 0
        self._missing_columns = {column for column in (columns or {}).values() if column is not None}
        left_out = {field for field, column in self.columns.items() if column is None}
        self._used = left_out | {column for column in self.columns.values() if column is not None}
        self._seen_columns: dict[Any, None] = {}

    @property
    def columns_to_read(self) -> set[str] | None:
        """The columns to read; `None`: all."""
        if self.keep is None:
            return None
        used = {column for column in self.columns.values() if column is not None}
        return used | {column.partition(".")[0] for column in used} | self.keep

    def row(self, row_name: str, source: Mapping[str, Any] | Prompt) -> Row:
        """Convert the next row.

        Args:
            row_name: Its line or number in the data, for errors.
            source: The row.

        Raises:
            ValueError: A column is not valid.
        """
        number, self._count = self._count, self._count + 1
        location = f"{self.name}, {row_name}"
        if isinstance(source, Prompt):
            question = [source.text, source.messages, source.token_ids, source.images, source.videos, source.tools]
            return _build_row(location, number, source.replace(eid=None), question)
        if not isinstance(source, Mapping):
            raise ValueError(f"{location}: got {type(source).__name__}, expected a mapping with a prompt, or a Prompt")
        fields = {
            field: self._get_column(source, column) for field, column in self.columns.items() if column is not None
        }
        fields = {field: value for field, value in fields.items() if value is not None}
        fields["info"] = self._info(location, row_name, source, fields.get("info"))
        return self._build(location, number, fields)

    def finish(self) -> None:
        """Raise `ValueError` if no row has a column that `columns` names."""
        if self._missing_columns and self._count:
            column = min(self._missing_columns)
            field = next(name for name, source_column in self.columns.items() if source_column == column)
            hint = suggest(column, [str(name) for name in self._seen_columns])
            raise ValueError(f"{self.name}: columns[{field!r}]: no row has a column {column!r}{hint}")

    # --- columns ------------------------------------------------------------------------------------------------------

    def _get_column(self, source: Mapping[str, Any], column: str) -> Any:
        """Return the value of a column, or of an entry of a nested column (`a.b`); `None` if it is missing."""
        if column in source:
            self._missing_columns.discard(column)
            return source[column]
        if "." not in column:
            return None
        value: Any = source
        for key in column.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        self._missing_columns.discard(column)
        return value

    def _info(
        self, location: str, row_name: str, source: Mapping[str, Any], row_info: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the other columns, and the entries of the row's own `info`."""
        if row_info is not None and not isinstance(row_info, Mapping):
            raise ValueError(f"{location}: {self._label('info')}: got {type(row_info).__name__}, expected a mapping")
        others = {
            column: value
            for column, value in source.items()
            if column not in self._used and (self.keep is None or column in self.keep)
        }
        self._seen_columns.update(dict.fromkeys(source))
        duplicate = next((column for column in others if row_info is not None and column in row_info), None)
        if duplicate is not None:
            raise ValueError(f"{location}: {duplicate}: got a column and an entry of `info`, expected one of them")
        info = {}
        for column, value in {**(row_info or {}), **others}.items():
            if value is None:
                continue
            try:
                if column in _RESERVED_NAMES:
                    raise TypeError("a name that records use themselves")
                info[_check_key(column)] = to_json(value)
            except TypeError as error:
                self.dropped.setdefault(str(column), f"{error} (first in {row_name})")
        return info

    def _label(self, field: str) -> str:
        """Return the name of a field in errors, with the column that it is read from."""
        column = self.columns[field]
        return field if column in (field, None) else f"{column} ({field})"

    # --- question and answers -----------------------------------------------------------------------------------------

    def _build(self, location: str, number: int, fields: dict[str, Any]) -> Row:
        question = self._question(location, fields)
        answers = {name: self._answer(location, name, fields[name], question) for name in ANSWERS if name in fields}
        if ("chosen" in answers) != ("rejected" in answers):
            missing = "rejected" if "chosen" in answers else "chosen"
            raise ValueError(f"{location}: {missing}: missing, expected both answers of the pair")
        if (
            isinstance(question, list)
            and question
            and isinstance(question[-1], dict)
            and question[-1]["role"] == "assistant"
        ):
            if answers:
                raise ValueError(
                    f"{location}: {self._label('messages')}: got a chat that ends with the assistant's message and "
                    f"{' and '.join(answers)}, expected one that ends before the answer"
                )
            # A chat that ends with an answer is a prompt and a response.
            answers["response"] = self._answer(location, "messages", question.pop(), question)
            if not question:
                raise ValueError(
                    f"{location}: {self._label('messages')}: got an answer alone, expected a prompt before it"
                )
        parts: dict[str, Any] = {"tools": self._tools(location, fields["tools"]) if "tools" in fields else None}
        for name in ("reference", "label"):
            try:
                parts[name] = to_json(fields.get(name))
            except TypeError as error:
                raise ValueError(f"{location}: {self._label(name)}: got {error}") from None
        media = {name: self._media(location, name, fields[name]) for name in ("images", "videos") if name in fields}
        contents = [question, *(media.get(name, ()) for name in ("images", "videos")), parts["tools"]]
        for name, value in media.items():
            parts[name] = tuple(self._locate(location, name, file) for file in value)
        if isinstance(question, list) and isinstance(question[0], dict):
            question = [self._with_media_paths(location, message) for message in question]
        clash = next((name for name in answers if name in fields["info"]), None)
        if clash is not None:
            raise ValueError(
                f"{location}: info: got an entry {clash!r} and the answer of this name, expected one of them"
            )
        try:
            form = "text" if isinstance(question, str) else "messages" if isinstance(question[0], dict) else "token_ids"
            prompt = Prompt(**{"info": {**fields["info"], **answers}, **parts, form: question})
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        return _build_row(location, number, prompt, contents)

    def _question(self, location: str, fields: Mapping[str, Any]) -> Question:
        """Return a copy of the text, messages or token ids of the prompt."""
        names = [name for name in ("prompt", "messages") if name in fields]
        shared = _common_messages(fields.get("chosen"), fields.get("rejected"))
        if len(names) == 2:
            raise ValueError(
                f"{location}: got {self._label('prompt')} and {self._label('messages')}, expected one of them; "
                "columns={'messages': None} leaves the other out"
            )
        if not names:
            if shared:
                return shared  # the chats of a pair contain the prompt
            raise ValueError(
                f"{location}: {self._label('prompt')}: missing, expected text in a column of that name, or messages; "
                f"the row has {', '.join(map(str, self._seen_columns))}"
            )
        name, value = names[0], fields[names[0]]
        called = self._label(name)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str) and name == "prompt":
            if not value:
                raise ValueError(f"{location}: {called}: got '', expected text that is not empty")
            # The chats of a pair may repeat the prompt.
            return shared if any(message.get("content") == value for message in shared) else value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            return [_check_message(f"{location}: {called}[{i}]", message) for i, message in enumerate(value)]
        if isinstance(value, (list, tuple)) and value and name == "prompt" and isinstance(value[0], int):
            return list(value)
        kind = "an empty list" if isinstance(value, (list, tuple)) and not value else type(value).__name__
        expected = "text, chat messages or token ids" if name == "prompt" else "a list of {'role', 'content'}"
        raise ValueError(f"{location}: {called}: got {kind}, expected {expected}")

    def _answer(self, location: str, name: str, value: Answer, question: Question) -> str | dict[str, Any]:
        """Return the text of an answer, or the message of the assistant if it has more than text."""
        called = f"{location}: {self._label(name)}"
        if isinstance(value, (list, tuple)):
            chat = [_check_message(f"{called}[{i}]", message) for i, message in enumerate(value)]
            if isinstance(question, list) and chat[: len(question)] == question:
                chat = chat[len(question) :]
            if len(chat) != 1:
                raise ValueError(f"{called}: got {len(chat)} messages after the prompt, expected the assistant's alone")
            value = chat[0]
        if isinstance(value, Mapping):
            message = _check_message(called, value)
            if message["role"] != "assistant":
                raise ValueError(f"{called}: got a message of {message['role']!r}, expected the assistant's")
            value = message.get("content", "") if message.keys() <= {"role", "content"} else message
        if not isinstance(value, (str, dict)) or not value:
            text = repr(value) if isinstance(value, str) else type(value).__name__
            raise ValueError(f"{called}: got {text}, expected text that is not empty, or the assistant's message")
        return self._with_media_paths(location, value) if isinstance(value, dict) else value

    def _tools(self, location: str, value: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Read tools, a list or its JSON text: typed columns cannot hold different schemas."""
        called = self._label("tools")
        try:
            tools = json.loads(value) if isinstance(value, str) else to_json(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{location}: {called}: {error}") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(
                f"{location}: {called}: got {type(value).__name__}, expected a list of mappings, or its JSON"
            )
        return [_without_none(tool) for tool in tools]

    # --- media --------------------------------------------------------------------------------------------------------

    def _media(self, location: str, name: str, value: Image | Sequence[Image]) -> tuple[Image, ...]:
        called = f"{location}: {self._label(name)}"
        media = as_media(called, value)
        for i, entry in enumerate(media):
            if not isinstance(entry, (str, os.PathLike, bytes, bytearray, memoryview, Mapping)) and not (
                hasattr(entry, "convert") or hasattr(entry, "__array__")
            ):
                raise ValueError(f"{called}[{i}]: got {type(entry).__name__}, expected a path, bytes or a picture")
        return media

    def _locate(self, location: str, name: str, entry: Image) -> Image:
        """Join a path to the folder of the data, and check that the file exists before the training starts."""
        if isinstance(entry, Mapping):
            key = source_key(entry)
            return entry if key is None else {**entry, key: self._locate(location, name, entry[key])}
        if not isinstance(entry, (str, os.PathLike)) or _URL.match(os.fspath(entry)):
            return entry
        address = os.fspath(entry).startswith("file:")
        path = Path(entry) if self.folder is None else self.folder / entry
        if self.confined:
            if self.folder is None or address or not path.resolve().is_relative_to(self.folder.resolve()):
                expected = "the image itself" if self.folder is None else f"a path in the data's folder {self.folder}"
                raise ValueError(f"{location}: {name}: got {os.fspath(entry)!r}, expected {expected}")
        elif address:
            return entry
        if not path.is_file():
            raise ValueError(f"{location}: {name}: got {os.fspath(entry)!r}, but there is no file {path}")
        return str(path)

    def _with_media_paths(self, location: str, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [self._locate(location, "messages", part) for part in message["content"]]}


def to_json(value: Any) -> Any:
    """Copy a value to JSON types; raise `TypeError` if it has none.

    >>> to_json({"a": (1, np.float32(0.5)), "b": np.arange(2)})
    {'a': [1, 0.5], 'b': [0, 1]}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_check_key(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biufU":
        return to_json(value.tolist())
    raise TypeError(f"{type(value).__name__}, which is not JSON")


def _check_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key of {type(key).__name__}, which is not JSON")
    return key


def _without_none(value: Any) -> Any:
    """Drop null entries: in tables, every mapping of a column has the keys of all of them."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _check_message(called: str, source: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(source, Mapping) or not isinstance(source.get("role"), str) or not source["role"]:
        text = f"keys {sorted(map(str, source))}" if isinstance(source, Mapping) else type(source).__name__
        raise ValueError(f"{called}: got {text}, expected a message with 'role' and 'content'")
    message: dict[str, Any] = _without_none(source)
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not parts and not (content is None and len(message) > 1):
        raise ValueError(f"{called}.content: got {type(content).__name__}, expected text, or a list of parts")
    return message


def _common_messages(first: Answer | None, other: Answer | None) -> list[dict[str, Any]]:
    """Return the common first messages of two chats."""
    if not isinstance(first, (list, tuple)) or not isinstance(other, (list, tuple)):
        return []
    shared: list[dict[str, Any]] = []
    for a, b in zip(first[:-1], other[:-1], strict=False):
        if a != b or not isinstance(a, Mapping) or not isinstance(a.get("role"), str):
            break
        shared.append(_without_none(a))
    return shared


# --- digests ----------------------------------------------------------------------------------------------------------


def _build_row(location: str, number: int, prompt: Prompt, question: Sequence[Any]) -> Row:
    try:
        content = hash_value(question)
        row_digest = hash_value([content, prompt.reference, prompt.label, prompt.info])
    except TypeError as error:
        raise ValueError(f"{location}: got {error}, expected text, numbers, lists, mappings or pictures") from None
    return Row(number, prompt, content, row_digest)


def hash_value(value: Any) -> bytes:
    """Hash a value of JSON types, bytes, arrays, tensors and images, by its contents.

    >>> hash_value({"a": 1, "b": [2]}) == hash_value({"b": (2,), "a": 1}) != hash_value({"a": 1, "b": [3]})
    True
    """
    try:
        data = orjson.dumps(value, default=_hashable, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # integers of more than 64 bits, lone surrogates
        data = json.dumps(value, default=_hashable, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _hashable(value: Any) -> Any:
    """Return a JSON value that represents another type."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": hashlib.blake2b(value, digest_size=16).hexdigest()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "convert") and hasattr(value, "tobytes"):  # a PIL image
        return [value.mode, list(value.size), _hashable(value.tobytes())]
    if hasattr(value, "detach"):  # a tensor, of a type that numpy may not have
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind != "O":
            return [array.dtype.str, list(array.shape), _hashable(array.tobytes())]
    raise TypeError(type(value).__name__)


_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_SUFFIXES = (*_JSONL_SUFFIXES, ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

LocatedRows = Iterator[tuple[str, Any]]


def read(
    path: str | Path, *, split: str | None = None, subset: str | None = None, columns: set[str] | None = None
) -> LocatedRows:
    """Read the rows of a file, a folder or a Hugging Face dataset.

    Args:
        path: The file or folder, or the name of a dataset on the hub.
        split: Split of a dataset.
        subset: Subset of a dataset.
        columns: Columns of a table to read; `None`: all.

    Returns:
        Pairs of a row's place, for errors, and the row.

    Raises:
        ValueError: There is no such data.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "task.jsonl"
    ...     _ = file.write_text('{"prompt": "a"}\\n\\n{"prompt": "b"}\\n')
    ...     list(read(file))
    [('line 1', {'prompt': 'a'}), ('line 3', {'prompt': 'b'})]
    """
    file_path = Path(path)
    if file_path.is_dir() and ((file_path / "dataset_dict.json").is_file() or (file_path / "state.json").is_file()):
        return _read_dataset(_import_datasets(path).load_from_disk(str(file_path)), path, split, columns)
    kind = next((suffix for suffix in _SUFFIXES if str(path).endswith(suffix)), None)
    if not file_path.exists() and kind is None and _HUB_NAME.fullmatch(str(path)):
        return _read_dataset(_load_from_hub(str(path), subset, split), path, split, columns)
    if not file_path.exists():
        raise ValueError(f"data: got {str(path)!r}, but there is no such file, folder or dataset")
    for name, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise ValueError(f"{name}: got {value!r}, expected None: {str(path)!r} is not a Hugging Face dataset")
    files = [file_path]
    if file_path.is_dir():
        files = sorted(file for file in file_path.iterdir() if file.name.endswith(_SUFFIXES))
        if len({file.suffix for file in files}) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise ValueError(
                f"data: got the folder {str(path)!r}, expected files of one kind in it; there are: {names}"
            )
    elif kind is None:
        raise ValueError(f"data: got {str(path)!r}, expected a file that ends in {', '.join(_SUFFIXES)}, or a dataset")
    return _read_files(files, columns)


def _read_files(files: list[Path], columns: set[str] | None) -> LocatedRows:
    for file in files:
        check_regular(file)
        prefix = f"{file.name}, " if len(files) > 1 else ""
        rows = _read_parquet(file, columns) if file.suffix == ".parquet" else _read_json(file)
        for row_name, row in rows:
            yield prefix + row_name, row


def _read_json(file: Path) -> LocatedRows:
    if file.suffix == ".json" and (entries := _read_json_list(file)) is not None:
        for i, row in enumerate(entries):
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
        except ValueError as error:  # invalid JSON or UTF-8
            raise ValueError(f"{file}, line {number}: {error}") from None
        except (OSError, EOFError) as error:
            raise ValueError(f"{file}: {error}") from None


def _read_json_list(file: Path) -> list[Any] | None:
    """Read a JSON list; return `None` if the file has JSON lines, which is common."""
    with file.open("rb") as opened:
        start = opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        return None
    try:
        entries: list[Any] = json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return entries


def _read_parquet(file: Path, columns: set[str] | None) -> LocatedRows:
    from rollbook.io import parquet

    yield from _read_batches(parquet.batches(file, 1024, max_row_bytes=MAX_ROW_BYTES, columns=columns))


def _read_batches(batches: Iterable[Any]) -> LocatedRows:
    count = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"row {count}", row
            count += 1


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def _import_datasets(path: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{str(path)!r} is a Hugging Face dataset, which needs datasets: install the extra 'hf' of Rollbook"
        ) from error
    return datasets


def _load_from_hub(name: str, subset: str | None, split: str | None) -> Any:
    datasets = _import_datasets(name)
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # errors of the network, the hub and its libraries
        raise ValueError(
            f"data: got {name!r}, expected a file, a folder or a dataset that can be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_dataset(dataset: Any, path: str | Path, split: str | None, columns: set[str] | None) -> LocatedRows:
    if hasattr(dataset, "keys"):  # a mapping of splits
        if split is None and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            raise ValueError(f"split: got {split!r}, expected one that {str(path)!r} has: {', '.join(dataset)}")
        dataset = dataset[split]
    elif split is not None and str(dataset.split or split).partition("[")[0] != split.partition("[")[0]:
        raise ValueError(f"split: got {split!r}, expected {str(dataset.split)!r}, which {str(path)!r} is")
    if columns is not None:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    # As Arrow batches, so that images are not decoded.
    return _read_batches(dataset.with_format("arrow").iter(1024))


log = logging.getLogger("rollbook.train")

Columns = Mapping[str, str | None]


class Prompts:
    """Prompts with a seeded order and a cursor.

    A row has `prompt` (text, a chat or token ids) or `messages`; `reference`, `label`, `images`, `videos`, `tools`;
    and answers: `response`, or `chosen` and `rejected`. Other columns go to the `info` of the prompt, and so do
    answers. A chat that ends with a message of the assistant is a prompt and its `response`.

    Args:
        rows: Rows as texts, mappings or `Prompt`s, or a function that returns them, called on first use.
        seed: Seed of the order.
        shuffle: Whether to shuffle the rows in each epoch.
        name: Name of the data in errors.
        columns: Column names in the data, such as {"prompt": "question"}.
        keep: Other columns that go to `info`; `None`: all.

    Raises:
        ValueError: A row is not valid.

    >>> prompts = Prompts([{"prompt": f"{i}+1=", "reference": i + 1} for i in range(3)], seed=1)
    >>> [(prompt.text, prompt.reference, prompt.eid.tid) for prompt in prompts.take(2, step=1)]
    [('2+1=', 3, '1/2'), ('1+1=', 2, '1/1')]
    >>> state = prompts.state_dict()
    >>> [prompt.eid.tid for prompt in prompts.take(5, step=2)]  # into the third epoch: some rows come twice
    ['2/0', '2/1', '2/2', '2/0.1', '2/2.2']
    >>> prompts.load_state_dict(state)
    >>> [prompt.eid.tid for prompt in prompts.take(5, step=2)]
    ['2/0', '2/1', '2/2', '2/0.1', '2/2.2']
    """

    def __init__(
        self,
        rows: Sequence[str | Mapping[str, Any] | Prompt] | Callable[[], Sequence[str | Mapping[str, Any] | Prompt]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "",
        columns: Columns | None = None,
        keep: Sequence[str] | None = None,
    ) -> None:
        reader = Reader(name or "rows", columns, keep)

        def placed() -> LocatedRows:
            source = rows() if callable(rows) else rows
            if isinstance(source, (str, bytes, Mapping)) or not hasattr(source, "__iter__"):
                raise ValueError(f"{reader.name}: got {type(source).__name__}, expected a list of rows")
            column = reader.columns["prompt"] or "prompt"
            return ((f"row {i}", {column: row} if isinstance(row, str) else row) for i, row in enumerate(source))

        self._set(lambda: _read(reader, placed()), seed, shuffle, name)
        if not callable(rows):
            len(self)  # reads the rows, to raise their errors now

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        split: str | None = None,
        subset: str | None = None,
        columns: Columns | None = None,
        keep: Sequence[str] | None = None,
        limit: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        name: str | None = None,
    ) -> Prompts:
        """Read prompts from a file, a folder or a Hugging Face dataset.

        Paths of images and videos are relative to the file and must be in its folder, links followed.

        Args:
            path: A `.jsonl`, `.ndjson` (both also `.gz`), `.json` (a list, or JSON lines) or `.parquet` file; a folder
                of such files of one kind; the folder of a saved dataset; or the name of a dataset on the hub.
            split: Split of a dataset.
            subset: Subset of a dataset.
            columns: As in the constructor; so are `keep`, `seed` and `shuffle`.
            keep: Other columns that go to `info`.
            limit: Read only the first N rows.
            seed: Seed of the order.
            shuffle: Whether to shuffle.
            name: Name of the data in errors; `None`: the path.

        Returns:
            The prompts.

        Raises:
            ValueError: There is no such data, or a row is not valid.
        """
        location = Path(path)
        folder = (location if location.is_dir() else location.parent) if location.exists() else None
        called = str(path) if name is None else name
        reader = Reader(called, columns, keep, folder, confined=True)
        placed = read(path, split=split, subset=subset, columns=reader.columns_to_read)
        rows = _read(reader, placed, None if limit is None else check_int("limit", limit, 1))
        return cls._from_rows(rows, seed, shuffle, called)

    @classmethod
    def _from_rows(cls, rows: list[Row], seed: int, shuffle: bool, name: str) -> Prompts:
        prompts = cls.__new__(cls)
        prompts._set(lambda: rows, seed, shuffle, name)
        return prompts

    def _set(self, load: Callable[[], list[Row]], seed: int, shuffle: bool, name: str) -> None:
        self.name = name
        self.seed = check_int("seed", seed)
        self.shuffle = check_bool("shuffle", shuffle)
        self.cursor = 0
        """Number of rows taken so far."""
        self._load = load
        self._step: int | str | None = None
        self._since = 0
        """Cursor before the first row of the current step."""
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @cached_property
    def _rows(self) -> list[Row]:
        return self._load()

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        named = f" of {self.name!r}" if self.name else ""
        return f"Prompts({len(self)} rows{named}, epoch {self.epoch:g}, seed {self.seed})"

    @property
    def epoch(self) -> float:
        """Number of passes over the rows so far."""
        return self.cursor / len(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the rows and their order, in 32 hex digits. Of a media file only the path counts."""
        hasher = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            hasher.update(row.digest)
        return hasher.hexdigest()

    # --- access -------------------------------------------------------------------------------------------------------

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of the rows in an epoch, which depends on seed and epoch only.

        Args:
            epoch: Number of the epoch.

        Returns:
            [len] Positions in the data.
        """
        if self._order is None or self._order[0] != epoch:
            count = len(self)
            places = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
            self._order = epoch, places
        return self._order[1]

    def take(self, n: int, step: int | str) -> list[Prompt]:
        """Return the next rows and move the cursor.

        Args:
            n: Number of rows, which may span several epochs.
            step: Batch of the ids. Their task is the number of the row or, if the step has the row already, also from
                an earlier call, `number.epoch`.
        """
        n = check_int("n", n)
        if step != self._step:
            self._step, self._since = step, self.cursor
        seen = {self._rows[self._at(position)].number for position in self._places(self._since, self.cursor)}
        taken = []
        for position in range(self.cursor, self.cursor + n):
            row = self._rows[self._at(position)]
            task: int | str = f"{row.number}.{position // len(self)}" if row.number in seen else row.number
            seen.add(row.number)
            taken.append(_prompt(row, step, task))
        self.cursor += n
        return taken

    def at(self, position: int, prompts_per_step: int) -> Prompt:
        """Return the row at a position of the run, with the id that `take` gives it. The cursor does not move.

        Args:
            position: Position, from 0; it may lie in any epoch.
            prompts_per_step: Rows that each step takes, from step 1.

        >>> prompts = Prompts([{"prompt": letter} for letter in "abc"])
        >>> taken = [prompt for step in (1, 2) for prompt in prompts.take(2, step)]
        >>> [prompts.at(place, 2) for place in range(4)] == taken
        True
        """
        step, within = divmod(position, prompts_per_step)
        row = self._rows[self._at(position)]
        seen = {self._rows[self._at(other)].number for other in self._places(position - within, position)}
        return _prompt(row, step + 1, f"{row.number}.{position // len(self)}" if row.number in seen else row.number)

    def every(self, batch: int | str = "eval") -> list[Prompt]:
        """Return all rows in the order of the data, with ids of this batch. The cursor does not move.

        Args:
            batch: Batch of the ids.

        Returns:
            The prompts.
        """
        return [_prompt(row, batch, row.number) for row in self._rows]

    def _at(self, position: int) -> int:
        epoch, within = divmod(position, len(self))
        return int(self.order(epoch)[within])

    def _places(self, start: int, stop: int) -> range:
        """Return the last positions of a range that contain all its rows; two epochs are enough."""
        return range(max(start, stop - 2 * len(self)), stop)

    # --- parts of it --------------------------------------------------------------------------------------------------

    def split(self, size: int | float, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Split the rows. The split depends on the questions and `seed`, not on the order of the rows.

        Rows with the same question go to the same side, so that slightly fewer than `size` may be held out. Both sides
        keep the numbers of the rows.

        Args:
            size: Number of rows to hold out, or a share below 1.
            seed: Seed of the split.

        Returns:
            The remaining rows, and those held out.

        Raises:
            ValueError: One side would be empty.

        >>> rest, held_out = Prompts([{"prompt": str(i % 50)} for i in range(100)]).split(0.1)
        >>> shared = {prompt.text for prompt in rest.every()} & {prompt.text for prompt in held_out.every()}
        >>> len(rest), len(held_out), shared
        (90, 10, set())
        """
        is_share = isinstance(size, (float, np.floating))
        count = round(check_float("size", size, 0, 1) * len(self)) if is_share else check_int("size", size, 1)
        groups: dict[bytes, list[int]] = {}
        for i, row in enumerate(self._rows):
            groups.setdefault(row.content, []).append(i)
        salt = f"{check_int('seed', seed)}/".encode()
        held_out: set[int] = set()
        for content in sorted(groups, key=lambda key: hashlib.blake2b(salt + key, digest_size=16).digest()):
            if len(held_out) + len(groups[content]) <= count:
                held_out.update(groups[content])
        if not held_out or len(held_out) == len(self):
            raise ValueError(
                f"size: got {size!r}, holding out {len(held_out)} of {len(self)} rows ({len(groups)} different "
                "prompts), expected some on both sides"
            )
        parts = []
        for side, inside in (("rest", False), ("held out", True)):
            rows = [row for i, row in enumerate(self._rows) if (i in held_out) is inside]
            parts.append(self._from_rows(rows, self.seed, self.shuffle, f"{self.name or 'rows'} ({side})"))
        return parts[0], parts[1]

    def require(self, *names: str) -> None:
        """Check that every row has these columns.

        Args:
            names: Columns: `reference`, `label`, `images` or answers.

        Raises:
            ValueError: A row lacks one.

        >>> Prompts([{"prompt": "2+2=", "reference": 4}, {"prompt": "1+1="}]).require("reference")
        Traceback (most recent call last):
            ...
        ValueError: rows: row 1 has no 'reference', expected it in every row
        """
        allowed = ("reference", "label", "images", *ANSWERS)
        for name in names:
            if name not in allowed:
                raise ValueError(f"require: got {name!r}, expected one of {', '.join(allowed)}")
            for row in self._rows:
                field_value = row.prompt.info.get(name) if name in ANSWERS else getattr(row.prompt, name)
                if field_value is None or (name == "images" and not field_value):
                    location = f"{self.name or 'rows'}: row {row.number}"
                    raise ValueError(f"{location} has no {name!r}, expected it in every row")

    def shared(self, other: Prompts) -> int:
        """Count the rows whose question is also in other prompts.

        Args:
            other: The other prompts.

        Returns:
            Number of rows.

        >>> Prompts([{"prompt": "a"}, {"prompt": "b"}]).shared(Prompts([{"prompt": "b"}, {"prompt": "c"}]))
        1
        """
        contents = {row.content for row in other._rows}
        return sum(row.content in contents for row in self._rows)

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and what identifies the data, in JSON types."""
        return {
            "cursor": self.cursor,
            "step": self._step,
            "since": self._since,
            "rows": len(self),
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the cursor. With other rows, or another order, prompts would be skipped or come twice.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state belongs to other rows, or to another order.
        """
        current = self.state_dict()
        mismatched = sorted(state.keys() ^ current.keys())
        if mismatched:
            raise ValueError(
                f"state: {mismatched[0]!r} is {'not ' if mismatched[0] in current else ''}there, "
                f"expected {', '.join(current)}"
            )
        if state["fingerprint"] != current["fingerprint"]:
            actual, expected = (f"{side['rows']} rows ({str(side['fingerprint'])[:8]})" for side in (current, state))
            raise ValueError(
                f"data: got {actual}{f' of {self.name!r}' if self.name else ''}, expected the {expected} that the run "
                "began with: give it the same data, or begin another run"
            )
        for name in ("seed", "shuffle"):
            if state[name] != current[name]:
                raise ValueError(
                    f"{name}: got {current[name]!r}, expected {state[name]!r}, as the run began: the order "
                    "would be another"
                )
        cursor = check_int("state['cursor']", state["cursor"])
        since = check_int("state['since']", state["since"])
        if since > cursor:
            raise ValueError(f"state['since']: got {since}, expected at most the cursor ({cursor})")
        self.cursor, self._step, self._since = cursor, state["step"], since


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the numbers below `count` in a random order that depends on `seed` and `epoch`.

    The numbers are sorted by keys of 64 bits (SplitMix64, seeded by a digest of both). Generators of libraries are not
    used, because their streams may differ between versions.

    >>> permutation(5, seed=0, epoch=0).tolist(), permutation(5, seed=0, epoch=1).tolist()
    ([0, 1, 4, 2, 3], [2, 1, 0, 4, 3])
    """
    start = int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "big")
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


def _prompt(row: Row, batch: int | str, task: int | str) -> Prompt:
    # A copy of `info`: rewards may write into it, and the row is used again in the next epoch.
    return row.prompt.replace(eid=EID(batch=batch, task=task, suffix=""), info=dict(row.prompt.info))


def _read(reader: Reader, rows_by_name: LocatedRows, limit: int | None = None) -> list[Row]:
    rows = []
    for row_name, source in rows_by_name:
        rows.append(reader.row(row_name, source))
        if len(rows) == limit:
            break
    if not rows:
        raise ValueError(f"{reader.name}: got no rows, expected at least one")
    reader.finish()
    for column, reason in reader.dropped.items():
        log.warning("%s: column %r is not kept: %s", reader.name, column, reason)
    return rows
