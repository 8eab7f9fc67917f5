"""One row of a task's data as a `Prompt`: columns by our names, all of them checked, and a digest of what it holds.

Invariant: a row is a prompt or an error that names the row and the column; nothing of a row is left out unless it is
said (`Reader.dropped`), and a digest goes by what the data say (paths as they are written), not by where they lie.

A row's names: `prompt` (text, a chat or token ids) or `messages` (a chat), `reference`, `label`, `images`, `videos`,
`tools`, `response` (to learn from), `chosen` and `rejected` (a pair), `info`; every other column goes to `info` too.
Answers travel in the prompt's `info`, under their names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from rollbook.core.checks import suggest
from rollbook.core.images import source_key
from rollbook.core.sampling import Prompt, as_media

NAMES = ("prompt", "messages", "reference", "label", "images", "videos", "tools", "response", "chosen", "rejected",
         "info")  # fmt: skip
ANSWERS = ("response", "chosen", "rejected")
_RESERVED = ("error", "errors", "reward_error", "reward_source", "segments", "drift", "branch", "truncated",
             "prompt_truncated_from")  # fmt: skip
"""What records say of themselves in `info`: an `error` there means that the sample failed."""
_ADDRESS = re.compile(r"(data:|https?://)")


class Row(NamedTuple):
    """A row: its number in the data, the prompt (without an id), and digests of what is asked and of all it says."""

    number: int
    prompt: Prompt
    content: bytes
    whole: bytes


class Reader:
    """Makes rows of mappings, one after the other.

    `columns` says where our names are found: {"prompt": "question", "reference": "reward_model.ground_truth"}; a dot
    leads into a mapping, and `None` leaves the column of that name out. `keep` names the other columns that go to
    `info` (by default all). Media paths are relative to `folder`. `confined`: the rows come from a file, so that a path
    outside of `folder`, links followed, is refused, and every path if there is no folder.

    >>> reader = Reader("demo", {"prompt": "question"})
    >>> row = reader.row("line 1", {"question": "2+2=", "reference": 4, "level": "easy", "blob": b"x"})
    >>> row.prompt.text, row.prompt.reference, row.prompt.info, reader.dropped
    ('2+2=', 4, {'level': 'easy'}, {'blob': 'bytes, which is no JSON (first in line 1)'})
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
        self.columns: dict[str, str | None] = {each: each for each in NAMES}
        for ours, theirs in (columns or {}).items():
            if ours not in NAMES:
                raise ValueError(f"columns: {ours!r} is none of a row's names{suggest(ours, list(NAMES))}")
            if theirs is not None and (not isinstance(theirs, str) or not theirs):
                raise ValueError(f"columns[{ours!r}]: got {theirs!r}, expected a column's name, or None")
            self.columns[ours] = theirs
        if isinstance(keep, str):
            raise ValueError(f"keep: got {keep!r}, expected a list of columns")
        self.keep = None if keep is None else frozenset(keep)
        self.dropped: dict[str, str] = {}
        """What is not kept in `info`, by column, and why."""
        self._count = 0
        self._unseen = {theirs for theirs in (columns or {}).values() if theirs is not None}
        left_out = {ours for ours, theirs in self.columns.items() if theirs is None}
        self._used = left_out | {theirs for theirs in self.columns.values() if theirs is not None}
        self._seen: dict[Any, None] = {}

    @property
    def wanted(self) -> set[str] | None:
        """The columns that it reads, where others need not be read; `None`: all."""
        if self.keep is None:
            return None
        ours = {theirs for theirs in self.columns.values() if theirs is not None}
        return ours | {each.partition(".")[0] for each in ours} | self.keep

    def row(self, place: str, given: Any) -> Row:
        """The next row; `place` says in errors where it stands."""
        number, self._count = self._count, self._count + 1
        where = f"{self.name}, {place}"
        if isinstance(given, Prompt):
            asked = [given.text, given.messages, given.token_ids, given.images, given.videos, given.tools]
            return _row(where, number, given.replace(eid=None), asked)
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: got {type(given).__name__}, expected a mapping with a prompt, or a Prompt")
        found = {ours: self._found(given, theirs) for ours, theirs in self.columns.items() if theirs is not None}
        found = {ours: value for ours, value in found.items() if value is not None}
        found["info"] = self._info(where, place, given, found.get("info"))
        return self._made(where, number, found)

    def finish(self) -> None:
        """Say whether a column that was named is in no row at all."""
        if self._unseen and self._count:
            column = min(self._unseen)
            ours = next(name for name, theirs in self.columns.items() if theirs == column)
            known = suggest(column, [str(each) for each in self._seen])
            raise ValueError(f"{self.name}: columns[{ours!r}]: no row has a column {column!r}{known}")

    # --- columns ------------------------------------------------------------------------------------------------------

    def _found(self, given: Mapping[str, Any], column: str) -> Any:
        if column in given:
            self._unseen.discard(column)
            return given[column]
        if "." not in column:
            return None
        value: Any = given
        for part in column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        self._unseen.discard(column)
        return value

    def _info(self, where: str, place: str, given: Mapping[str, Any], own: Any) -> dict[str, Any]:
        """The columns that have no name of ours, beside what is in the row's own `info`."""
        if own is not None and not isinstance(own, Mapping):
            raise ValueError(f"{where}: {self._called('info')}: got {type(own).__name__}, expected a mapping")
        others = {
            column: value
            for column, value in given.items()
            if column not in self._used and (self.keep is None or column in self.keep)
        }
        self._seen.update(dict.fromkeys(given))
        both = next((column for column in others if own is not None and column in own), None)
        if both is not None:
            raise ValueError(f"{where}: {both}: got a column and an entry of `info` of this name, expected one of them")
        info = {}
        for column, value in {**(own or {}), **others}.items():
            if value is None:
                continue
            try:
                if column in _RESERVED:
                    raise TypeError("a name under which records say something of themselves")
                info[_key(column)] = plain(value)
            except TypeError as error:
                self.dropped.setdefault(str(column), f"{error} (first in {place})")
        return info

    def _called(self, ours: str) -> str:
        theirs = self.columns[ours]
        return ours if theirs in (ours, None) else f"{theirs} ({ours})"

    # --- what it asks -------------------------------------------------------------------------------------------------

    def _made(self, where: str, number: int, found: dict[str, Any]) -> Row:
        asked = self._asked(where, found)
        answers = {name: self._answer(where, name, found[name], asked) for name in ANSWERS if name in found}
        if ("chosen" in answers) != ("rejected" in answers):
            missing = "rejected" if "chosen" in answers else "chosen"
            raise ValueError(
                f"{where}: {missing}: got nothing, expected an answer, since the pair's other one is there"
            )
        if isinstance(asked, list) and asked and isinstance(asked[-1], dict) and asked[-1]["role"] == "assistant":
            if answers:
                raise ValueError(
                    f"{where}: {self._called('messages')}: got a chat that ends with the assistant's message beside "
                    f"{' and '.join(answers)}, expected one that ends before the answer"
                )
            # What a model is to say is never shown to it: a chat with its answer is a prompt and a response.
            answers["response"] = self._answer(where, "messages", asked.pop(), asked)
            if not asked:
                raise ValueError(
                    f"{where}: {self._called('messages')}: got an answer alone, expected a prompt before it"
                )
        kept: dict[str, Any] = {"tools": self._tools(where, found["tools"]) if "tools" in found else None}
        for name in ("reference", "label"):
            try:
                kept[name] = plain(found.get(name))
            except TypeError as error:
                raise ValueError(f"{where}: {self._called(name)}: got {error}") from None
        media = {name: self._media(where, name, found[name]) for name in ("images", "videos") if name in found}
        given = [asked, *(media.get(name, ()) for name in ("images", "videos")), kept["tools"]]
        for name, value in media.items():
            kept[name] = tuple(self._located(where, name, one) for one in value)
        if isinstance(asked, list) and isinstance(asked[0], dict):
            asked = [self._with_places(where, message) for message in asked]
        clash = next((name for name in answers if name in found["info"]), None)
        if clash is not None:
            raise ValueError(
                f"{where}: info: got an entry {clash!r} beside the answer of this name, expected one of them"
            )
        try:
            form = "text" if isinstance(asked, str) else "messages" if isinstance(asked[0], dict) else "token_ids"
            prompt = Prompt(info={**found["info"], **answers}, **kept, **{form: asked})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return _row(where, number, prompt, given)

    def _asked(self, where: str, found: Mapping[str, Any]) -> Any:
        """The prompt's text, messages or token ids, as lists and dicts of its own."""
        names = [name for name in ("prompt", "messages") if name in found]
        shared = _shared(found.get("chosen"), found.get("rejected"))
        if len(names) == 2:
            raise ValueError(
                f"{where}: got {self._called('prompt')} and {self._called('messages')}, expected one of them; "
                "columns={'messages': None} leaves the other out"
            )
        if not names:
            if shared:
                return shared  # chats of a pair hold their prompt
            raise ValueError(
                f"{where}: {self._called('prompt')}: got nothing, expected text in a column of that name, or messages; "
                f"the row has {', '.join(map(str, self._seen))}"
            )
        name, value = names[0], found[names[0]]
        called = self._called(name)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str) and name == "prompt":
            if not value:
                raise ValueError(f"{where}: {called}: got '', expected text that is not empty")
            # A pair's chats may repeat the prompt that stands beside them.
            return shared if any(message.get("content") == value for message in shared) else value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            return [_message(f"{where}: {called}[{i}]", message) for i, message in enumerate(value)]
        if isinstance(value, (list, tuple)) and value and name == "prompt" and isinstance(value[0], int):
            return list(value)
        what = "an empty list" if isinstance(value, (list, tuple)) and not value else type(value).__name__
        expected = "text, chat messages or token ids" if name == "prompt" else "a list of {'role', 'content'}"
        raise ValueError(f"{where}: {called}: got {what}, expected {expected}")

    def _answer(self, where: str, name: str, value: Any, asked: Any) -> Any:
        """An answer's text, or the assistant's message where that has more than text."""
        called = f"{where}: {self._called(name)}"
        if isinstance(value, (list, tuple)):
            chat = [_message(f"{called}[{i}]", message) for i, message in enumerate(value)]
            if isinstance(asked, list) and chat[: len(asked)] == asked:
                chat = chat[len(asked) :]
            if len(chat) != 1:
                raise ValueError(f"{called}: got {len(chat)} messages after the prompt, expected the assistant's alone")
            value = chat[0]
        if isinstance(value, Mapping):
            message = _message(called, value)
            if message["role"] != "assistant":
                raise ValueError(f"{called}: got a message of {message['role']!r}, expected the assistant's")
            value = message.get("content") if message.keys() <= {"role", "content"} else message
        if not isinstance(value, (str, dict)) or not value:
            what = repr(value) if isinstance(value, str) else type(value).__name__
            raise ValueError(f"{called}: got {what}, expected text that is not empty, or the assistant's message")
        return self._with_places(where, value) if isinstance(value, dict) else value

    def _tools(self, where: str, value: Any) -> list[dict[str, Any]]:
        """Tools as a list, or as its JSON: columns of one type cannot hold schemas that differ."""
        called = self._called("tools")
        try:
            made = json.loads(value) if isinstance(value, str) else plain(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {called}: {error}") from None
        if not isinstance(made, list) or not all(isinstance(tool, dict) for tool in made):
            raise ValueError(f"{where}: {called}: got {type(value).__name__}, expected a list of mappings, or its JSON")
        return [_without_none(tool) for tool in made]

    # --- media --------------------------------------------------------------------------------------------------------

    def _media(self, where: str, name: str, value: Any) -> tuple[Any, ...]:
        called = f"{where}: {self._called(name)}"
        media = as_media(called, value)
        for i, one in enumerate(media):
            if not isinstance(one, (str, os.PathLike, bytes, bytearray, memoryview, Mapping)) and not (
                hasattr(one, "convert") or hasattr(one, "__array__")
            ):
                raise ValueError(f"{called}[{i}]: got {type(one).__name__}, expected a path, bytes or a picture")
        return media

    def _located(self, where: str, name: str, one: Any) -> Any:
        """A path from where the data lie, of a file that is there: a missing one should not be found at step 900."""
        if isinstance(one, Mapping):
            key = source_key(one)
            return one if key is None else {**one, key: self._located(where, name, one[key])}
        if not isinstance(one, (str, os.PathLike)) or _ADDRESS.match(os.fspath(one)):
            return one
        address = os.fspath(one).startswith("file:")
        path = Path(one) if self.folder is None else self.folder / one
        if self.confined:
            if self.folder is None or address or not path.resolve().is_relative_to(self.folder.resolve()):
                expected = "the image itself" if self.folder is None else f"a path in the data's folder {self.folder}"
                raise ValueError(f"{where}: {name}: got {os.fspath(one)!r}, expected {expected}")
        elif address:
            return one
        if not path.is_file():
            raise ValueError(f"{where}: {name}: got {os.fspath(one)!r}, but there is no file {path}")
        return str(path)

    def _with_places(self, where: str, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [self._located(where, "messages", part) for part in message["content"]]}


def plain(value: Any) -> Any:
    """A copy of a value in JSON's types; `TypeError` for what has none.

    >>> plain({"a": (1, np.float32(0.5)), "b": np.arange(2)})
    {'a': [1, 0.5], 'b': [0, 1]}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biufU":
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__}, which is no JSON")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key of {type(key).__name__}, which is no JSON")
    return key


def _without_none(value: Any) -> Any:
    """Tables give every mapping of a column the keys of all of them, with nothing in most."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _message(called: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str) or not given["role"]:
        what = f"keys {sorted(map(str, given))}" if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"{called}: got {what}, expected a message with 'role' and 'content'")
    message: dict[str, Any] = _without_none(given)
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not parts and not (content is None and len(message) > 1):
        raise ValueError(f"{called}.content: got {type(content).__name__}, expected text, or a list of parts")
    return message


def _shared(one: Any, other: Any) -> list[dict[str, Any]]:
    """The messages that two chats begin with alike."""
    if not isinstance(one, (list, tuple)) or not isinstance(other, (list, tuple)):
        return []
    shared: list[dict[str, Any]] = []
    for a, b in zip(one[:-1], other[:-1], strict=False):
        if a != b or not isinstance(a, Mapping) or not isinstance(a.get("role"), str):
            break
        shared.append(_without_none(a))
    return shared


# --- digests ----------------------------------------------------------------------------------------------------------


def _row(where: str, number: int, prompt: Prompt, asked: Any) -> Row:
    try:
        content = digest(asked)
        whole = digest([content, prompt.reference, prompt.label, prompt.info])
    except TypeError as error:
        raise ValueError(f"{where}: got {error}, expected text, numbers, lists, mappings or pictures") from None
    return Row(number, prompt, content, whole)


def digest(value: Any) -> bytes:
    """16 bytes that go by what a value holds: JSON's types, bytes, arrays, tensors and pictures.

    >>> digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1}) != digest({"a": 1, "b": [3]})
    True
    """
    try:
        data = orjson.dumps(value, default=_mark, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # whole numbers of more than 64 bits, halves of surrogate pairs
        data = json.dumps(value, default=_mark, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _mark(value: Any) -> Any:
    """What stands for a value that JSON does not have."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": hashlib.blake2b(value, digest_size=16).hexdigest()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "convert") and hasattr(value, "tobytes"):  # a PIL image
        return [value.mode, list(value.size), _mark(value.tobytes())]
    if hasattr(value, "detach"):  # a tensor, of a type that numpy may not have
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind != "O":
            return [array.dtype.str, list(array.shape), _mark(array.tobytes())]
    raise TypeError(type(value).__name__)
