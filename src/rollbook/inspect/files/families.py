"""Which tool wrote a file: told from what is in it.

Invariant: content decides, never a name alone; what fits nothing is refused with what was found, and a pickle is
refused whatever it holds.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from rollbook.core.errors import WireError
from rollbook.core.trxp import MAGIC as TRXP
from rollbook.core.wire import MAGIC as FRAME
from rollbook.inspect.documents import Trajectory
from rollbook.inspect.files import chats, records, saved, traces, trainers
from rollbook.inspect.files.images import Where
from rollbook.inspect.files.limits import MAX_JSON, MAX_ROW, parse
from rollbook.inspect.files.making import is_messages
from rollbook.inspect.files.stores import Elements, Lines, Members, Row, Store, Table, dicts, elements
from rollbook.io import formats, trinity_sqlite
from rollbook.io.formats import read_column_names


class Unknown(ValueError):
    """A file that is none of those that are read here."""


class Family(NamedTuple):
    """What reads the rows of a tool, and what it is."""

    read: Callable[[Row, Where], Iterator[Trajectory]]
    words: str
    counted: bool = False
    """Whether files without a step in their names are steps by their order."""


FAMILIES: dict[str, Family] = {
    "rollbook-json": Family(saved.rollbook, "what Rollbook's TrajectorySaver wrote: PREFIX_step_N.json"),
    "lightrft": Family(saved.lightrft, "what LightRFT's trajectory saver wrote: PREFIX_step_N.json"),
    "verl": Family(trainers.verl, "verl's rollouts: N.jsonl, or Parquet"),
    "trl": Family(trainers.trl, "TRL's completions: Parquet or JSONL"),
    "openrlhf": Family(trainers.openrlhf, "OpenRLHF's samples: JSONL or Parquet"),
    "verifiers": Family(traces.rollout, "verifiers' results.jsonl, and prime-rl's rollouts of that form", True),
    "traces": Family(traces.trace, "traces of verifiers and prime-rl: traces.jsonl, *_rollouts.jsonl", True),
    "messages": Family(chats.messages, "conversations as OpenAI's API has them: JSONL"),
    "inspect": Family(chats.inspect, "logs of inspect: .eval, .json", True),
    "parquet": Family(records.record, "Rollbook's Parquet"),
    "jsonl": Family(records.line, "Rollbook's JSONL"),
    "frames": Family(records.record, "Rollbook's frames"),
    "hf": Family(records.record, "a saved Hugging Face dataset that Rollbook wrote"),
    "trxp": Family(records.record, "Trinity-RFT's TRXP payloads"),
    "trinity-sqlite": Family(records.record, "Trinity-RFT's SQLite buffers"),
}
"""What is read, by name."""

_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")


def family_of(path: str, name: str) -> tuple[str, Store]:
    """The family of a file and the store that reads it; `name` is how a person knows it."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if head[:2] == b"PK":
        return _archive(path, name)
    if (head[:1] == b"\x80" and len(head) > 1 and head[1] < 6) or name.lower().endswith(_PICKLES):
        raise Unknown("a pickle (.pt, .pkl) runs whatever its writer wants when it is read, and is not read")
    if head.startswith(FRAME):
        return "frames", records.Frames(path)
    if head.startswith(TRXP):
        return "trxp", records.Payloads(path)
    if head.startswith(b"SQLite format 3\0"):
        if not trinity_sqlite.list_tables(path):
            raise Unknown("an SQLite database without a table of Trinity's")
        return "trinity-sqlite", _database(path)
    if head.startswith(b"PAR1"):
        family = of_keys(read_column_names(path), "parquet")
        return family, Table(path, records.of_batch if family == "parquet" else dicts)
    if head.startswith(b"\xff\xff\xff\xff") and name.endswith(".arrow"):
        return _dataset(path)
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[":
        return _array(path)
    if first == b"{":
        return _objects(path)
    raise Unknown(f"bytes that begin {head[:16]!r}")


def _database(path: str) -> Store:
    store = records.Database(path)
    for _, _, row in store.scan(False):
        if isinstance(row, records.OldPickle):
            raise Unknown(str(row))
        break
    return records.Database(path)


def _dataset(path: str) -> tuple[str, Store]:
    try:
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
            names = stream.schema.names
    except (pa.ArrowException, OSError) as error:
        raise Unknown(f"an Arrow file that cannot be read: {error}") from None
    family = of_keys(dict.fromkeys(names), "parquet")
    own = family == "parquet"
    return "hf" if own else family, records.Arrow(path, records.of_batch if own else dicts)


def _archive(path: str, name: str) -> tuple[str, Store]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise Unknown(f"a zip archive that cannot be read: {error}") from None
    if any(each.endswith((".pkl", "/data.pkl")) for each in names):
        raise Unknown("a file of torch.save (.pt), a pickle that runs whatever its writer wants, is not read")
    if "header.json" in names or "_journal/start.json" in names:
        return "inspect", Members(path, r"samples/[^/]+\.json", ("header.json", "_journal/start.json"))
    raise Unknown("a zip archive without the header.json of an inspect log")


def _array(path: str) -> tuple[str, Store]:
    """A JSON array: its first object tells."""
    store = Elements(path)
    with store._mapped() as data:
        begin = len(data[:4096]) - len(data[:4096].lstrip())
        try:
            span = next(elements(data, begin), None)
        except WireError:
            raise Unknown("a JSON array whose first object is not complete") from None
        if span is None:
            raise Unknown("a JSON array without objects")
        row = parse(data[span[0] : span[1]])
    if not isinstance(row, dict):
        raise Unknown("a JSON array, not of objects")
    return of_keys(row, "jsonl"), store


def _objects(path: str) -> tuple[str, Store]:
    """JSON lines, or one object that is written over several."""
    with open(path, "rb") as file:
        line = file.readline(MAX_ROW + 1)
        # A line that is blank, or cut by the limit, is no first row.
        while line and not line.strip():
            line = file.readline(MAX_ROW + 1)
    try:
        row = parse(line.strip())
    except WireError as error:
        row = None
        why = str(error)
    if isinstance(row, dict) and not _is_inspect(row):
        return of_keys(row, "jsonl"), Lines(path)
    if os.path.getsize(path) > MAX_JSON:
        raise Unknown(f"JSON of more than {MAX_JSON} bytes that is not one object a line")
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    if b'"eval"' in head and (b'"samples"' in head or b'"status"' in head or isinstance(row, dict)):
        return "inspect", Elements(path, "samples")
    if row is None:
        raise Unknown(f"JSON whose first line is no object: {why}")
    raise Unknown(f"a JSON object with the keys {', '.join(sorted(map(str, row))[:20])}")


def _is_inspect(row: Row) -> bool:
    return isinstance(row.get("eval"), dict) and ("samples" in row or "status" in row)


def of_keys(row: dict[str, Any], own: str) -> str:
    """The family of a row's keys (of a Parquet file, with no values); `Unknown` names them.

    >>> of_keys({"input": "2 + 2", "output": "4", "score": 1.0, "step": 3}, "jsonl")
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
        return "messages" if "tokens" not in keys else own
    if own == "parquet" and "messages" in keys and "tokens" not in keys:
        return "messages"
    try:
        return formats.guess_from_keys("", row, own, "")
    except ValueError:
        shown = ", ".join(sorted(keys)[:20])
        raise Unknown(f"rows with the keys {shown}") from None
