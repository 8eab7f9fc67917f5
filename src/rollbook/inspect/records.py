"""Records, as columns, to `Trajectory` and strict JSON, without torch.

Invariant: entry j of a response-axis field belongs to token `prompt_length + j`; a field without an entry for each
response token is omitted, with a note.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from rollbook.book.append import read_vocabulary
from rollbook.book.errors import MissingSegmentError
from rollbook.book.ledger import chunks
from rollbook.book.media import BOOK_COLUMNS, open_blob, references
from rollbook.book.read import fetch, fetch_present, find_seqs
from rollbook.book.segments.files import Place
from rollbook.core import freeform
from rollbook.core.columns import texts
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import DTYPES, FIELDS, owner
from rollbook.core.ids import EID, record_step
from rollbook.core.ragged import Ragged, check_shape
from rollbook.core.vocabulary import Vocabulary, VocabularySource
from rollbook.inspect.images import Album, ImageExtractor, Reference, locate_images
from rollbook.inspect.measures import classify_status, extract_declared_parts, extract_numbers
from rollbook.inspect.serialization import json_safe
from rollbook.inspect.trajectory import Trajectory, derive_lenses, find_segments, hash_prompt

if TYPE_CHECKING:
    from rollbook.book.book import Book

_NUMBER_FIELDS = (
    *("logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "entropy", "values"),
    *("advantages", "returns", "token_level_reward", "loss_weights"),
)
"""Response-axis fields shown by lenses."""
_TRAJECTORY_FIELDS = ("segments", "label", "reference", "kept", "reward_parts")
"""Entries of `info` that are fields of a trajectory."""
_EMPTY_VOCABULARY = Vocabulary(())


TokenizerLike: TypeAlias = "str | os.PathLike[str] | Vocabulary | VocabularySource"
"""A tokenizer, a vocabulary, or the path of a tokenizer.json or its folder."""


def load_vocabulary(tokenizer: TokenizerLike | None) -> Vocabulary | None:
    """Return the vocabulary of a tokenizer argument; `None` for `None`."""
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        return Vocabulary.from_path(tokenizer)
    return Vocabulary.from_tokenizer(tokenizer)


class Reader:
    """Reads a book's records as trajectories.

    Args:
        book: The book.
        vocabulary: Vocabulary of the tokenizer; by default the one in the book. Without one, texts are token ids.

    >>> import rollbook
    >>> book = rollbook.open("memory:")
    >>> row = rollbook.Experience(eid={"batch": 3, "task": 1, "suffix": "a"}, tokens=[5, 6, 7], logprobs=[-0.5, -1.0])
    >>> _ = book.append(row)
    >>> trajectory, = Reader(book).trajectories([row.eid.uid])
    >>> trajectory.step, trajectory.text, trajectory.tokenized, trajectory.arrays["logprob"].tolist()
    (3, '⟨5⟩⟨6⟩⟨7⟩', 'ids', [nan, -0.5, -1.0])
    """

    def __init__(self, book: Book, vocabulary: Vocabulary | None = None) -> None:
        self.book = book
        self.album = Album(self._blob)
        self._vocabulary = vocabulary

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary, which a new book may get later."""
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self.book)
        return self._vocabulary

    def trajectories(self, uids: Sequence[str]) -> list[Trajectory]:
        """Return records by id, in this order. `KeyError` names an unknown one. Records deleted meanwhile are omitted;
        for a single one, `BookError` is raised.
        """
        numbers = find_seqs(self.book, list(uids))
        if len(numbers) > 1:
            numbers, records = fetch_present(self.book, numbers, media=False)
            if not numbers:
                return []
        else:
            records = fetch(self.book, numbers, media=False)
        evaluation: dict[int, bool] = {}
        versions: dict[int, int | None] = {}
        with self.book.ledger.read() as tx:
            for marks, chunk in chunks(numbers):
                for seq, flag, version in tx.all(
                    f"SELECT seq, evaluation, version_min FROM records WHERE seq IN ({marks})", chunk
                ):
                    evaluation[seq], versions[seq] = bool(flag), version
        trajectories = convert_records(records, self.vocabulary, self.album)
        for trajectory, number, eid in zip(trajectories, numbers, records.eids(), strict=True):
            trajectory.evaluation = evaluation[number]
            trajectory.step = record_step(eid.batch, versions[number])
        return trajectories

    def record(self, uid: str) -> dict[str, Any]:
        """Return a record as strict JSON."""
        return record_json(fetch(self.book, find_seqs(self.book, [uid]), media=False))

    def media(self, name: str) -> tuple[bytes, str] | None:
        """Return the bytes and type of a picture of a trajectory."""
        return self.album.media(name)

    def _blob(self, name: str) -> bytes | None:
        with self.book.ledger.read() as tx:
            row = tx.first("SELECT segment, start, size FROM media WHERE hash = ?", (name,))
        if row is None:
            return None
        try:
            blob = open_blob(self.book.store.get(Place(*row)))
            if blob.kind == "tensor":
                return None
            return bytes(blob.payload) if blob.kind == "bytes" else binascii.a2b_base64(blob.payload)
        except (MissingSegmentError, ValueError):
            return None  # moved meanwhile, or damaged


def convert_records(
    records: Experiences, vocabulary: Vocabulary | None = None, album: Album | None = None
) -> list[Trajectory]:
    """Return records as trajectories; their pictures are added to `album`."""
    table = _RecordColumns(records)
    return [_TrajectoryBuilder(table, i, vocabulary, album or Album()).build() for i in range(len(records))]


class _RecordColumns:
    """Columns of records by field, each decoded once."""

    def __init__(self, records: Experiences) -> None:
        self.records = records
        self.columns = records.columns
        self.references = references(records)
        self._values: dict[str, list[Any]] = {}

    def value(self, name: str, index: int) -> Any:
        """Return a text, number or id of a record; for a free-form field, its JSON."""
        if name not in self._values:
            if FIELDS[name].kind in ("json", "custom_fields"):
                column = self.columns.get(name)
                self._values[name] = [None] * len(self.records) if column is None else texts(column)
            else:
                self._values[name] = self.records.values(name)
        return self._values[name][index]

    def freeform(self, name: str, index: int) -> Any:
        """Return a free-form value without torch: tensors as arrays, large bytes as references."""
        text = self.value(name, index)
        if text is None:
            return None
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise WireError(f"record {index}: {name}: not JSON: {error}") from None
        return decode_tagged(content, self.references[index]) if '"$' in text or "\\u0024" in text else content

    def array(self, name: str, index: int) -> NDArray[Any] | int | None:
        """Return a tensor of a record as an array, or the single number that represents it."""
        main = self.columns.get(name)
        if isinstance(main, Ragged) and (main.valid is None or main.valid[index]):
            values = main.values[int(main.offsets[index]) : int(main.offsets[index + 1])]
            return _decode_numbers(values, main.dtype)
        other = self.columns.get(f"{name}__other")
        if other is not None and other[index].is_valid:
            item = other[index].as_py()
            return _array(item["dtype"], item["shape"], item["data"], f"{name}__other")
        broadcast = self.columns.get(f"{name}__one")
        return None if broadcast is None else broadcast[index].as_py()


def _decode_numbers(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert stored values to numbers: bfloat16 is stored as uint16, bool as uint8."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values != 0 if dtype == "bool" else values


def _array(dtype: str, shape: Sequence[int], data: bytes, prefix: str) -> NDArray[Any] | None:
    """Return the elements of a tensor; `None` for types that numpy lacks."""
    sizes = check_shape(dtype, shape, len(data), prefix)
    if DTYPES[dtype].code == 0:
        return None
    return _decode_numbers(np.frombuffer(data, dtype=DTYPES[dtype].storage).reshape(sizes), dtype)


def decode_tagged(value: Any, references: Collection[str] = (), depth: int = freeform.MAX_DEPTH) -> Any:
    """Convert tagged JSON of `rollbook.core.freeform` to plain values, arrays, bytes and references to bytes.

    >>> decode_tagged({"a": {"$float": "nan"}, "b": {"$bytes": "AAE="}, "c": {"$tuple": [1]}})
    {'a': nan, 'b': b'\\x00\\x01', 'c': [1]}
    """
    if not isinstance(value, (dict, list)):
        return value
    if depth <= 0:
        raise WireError("free-form value nested too deeply")
    if isinstance(value, list):
        return [decode_tagged(item, references, depth - 1) for item in value]
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {name: decode_tagged(item, references, depth - 1) for name, item in value.items()}
    tag, content = next(iter(value.items()))
    if tag == "$dict" and isinstance(content, dict):
        return {name: decode_tagged(item, references, depth - 1) for name, item in content.items()}
    if tag == "$tuple" and isinstance(content, list):
        return [decode_tagged(item, references, depth - 1) for item in content]
    if (
        tag == "$map"
        and isinstance(content, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    ):
        return {
            str(json_safe(decode_tagged(key, references, depth - 1))): decode_tagged(item, references, depth - 1)
            for key, item in content
        }
    data = content.get("data") if isinstance(content, dict) else content
    if isinstance(data, str) and data.startswith("sha256:"):
        if data[7:] not in references:
            raise WireError(f"{tag}: refers to bytes that the record does not have")
        return Reference(data) if tag == "$bytes" else f"⟨{tag[1:]} {content.get('dtype')} {content.get('shape')}⟩"
    if tag == "$tensor" and isinstance(content, dict):
        try:
            raw = binascii.a2b_base64(content["data"], strict_mode=True)
            array = _array(content["dtype"], content["shape"], raw, tag)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{tag}: invalid value: {error}") from None
        return f"⟨tensor {content['dtype']} {content['shape']}⟩" if array is None else array
    return freeform.loads(orjson.dumps(value).decode())


class _TrajectoryBuilder:
    """Converts one record to a trajectory."""

    def __init__(self, table: _RecordColumns, index: int, vocabulary: Vocabulary | None, album: Album) -> None:
        self.table = table
        self.index = index
        self.vocabulary = vocabulary
        self.notes: list[str] = []
        self.images = ImageExtractor(album, table.references[index])
        self.fields = {
            name: table.value(name, index)
            for name in FIELDS
            if FIELDS[name].kind in ("eid", "text", "number", "integer")
        }
        self.messages = self.images.extract(table.freeform("messages", index))
        self.info: dict[str, Any] = self.images.extract(table.freeform("info", index) or {})

    def array(self, name: str) -> NDArray[Any] | int | None:
        return self.table.array(name, self.index)

    def ids(self, name: str) -> NDArray[np.int64]:
        column = self.array(name)
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            return np.empty(0, dtype=np.int64)
        return column.astype(np.int64)

    def build(self) -> Trajectory:
        tokens = self.ids("tokens")
        if self.fields["experience_type"] == "dpo":
            return self.pair(tokens)
        start = min(max(int(self.fields["prompt_length"] or 0), 0), len(tokens))
        return self.trajectory(tokens, start, self.mask(len(tokens), start), "messages")

    def pair(self, tokens: NDArray[np.int64]) -> Trajectory:
        """Return a preference pair: the chosen answer, with the rejected one in `rejected`."""
        both = []
        for name in ("chosen", "rejected"):
            ids = np.concatenate([tokens, self.ids(name)])
            both.append(self.trajectory(ids, len(tokens), np.arange(len(ids)) >= len(tokens), f"{name}_messages"))
        both[0].rejected = both[1]
        return both[0]

    def mask(self, length: int, start: int) -> NDArray[np.bool_]:
        """Return [L] which tokens are trained on; without a mask, the whole response."""
        column = self.array("action_mask")
        mask = np.arange(length) >= start
        if isinstance(column, np.ndarray) and column.shape == (length - start,):
            mask[start:] = column != 0
        elif self.fields["truncate_status"] == "prompt_truncated":
            mask[:] = False
        elif column is not None:
            self.note_wrong_shape("action_mask", column, length - start)
        return mask

    def note_wrong_shape(self, name: str, column: NDArray[Any] | float, expected: int) -> None:
        shape = list(column.shape) if isinstance(column, np.ndarray) else type(column).__name__
        self.notes.append(f"{name} omitted: shape {shape}, expected [{expected}] (one value per response token).")

    def response(self, name: str, length: int, start: int) -> NDArray[np.float64] | None:
        """Return a response-axis field as [L], with NaN on the prompt."""
        column = self.array(name)
        if column is None:
            return None
        if not isinstance(column, np.ndarray) or column.shape != (length - start,):
            self.note_wrong_shape(name, column, length - start)
            return None
        values = np.full(length, np.nan)
        values[start:] = column
        non_finite = int((~np.isfinite(values[start:])).sum())
        if non_finite:
            self.notes.append(f"{name}: {non_finite} of {length - start} values are NaN/Inf.")
        return values

    def sampled(self, length: int, start: int, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Return which tokens [L] the model sampled, if the record has a mask."""
        spans = self.info.get("segments")
        if isinstance(spans, list) and all(isinstance(span, dict) for span in spans):
            sampled = np.zeros(length, dtype=np.bool_)
            for span in spans:
                if span.get("kind") == "model" and type(span.get("start")) is type(span.get("stop")) is int:
                    sampled[max(span["start"], start) : max(span["stop"], 0)] = True
            if sampled.any():
                return sampled
        if self.fields["experience_type"] == "single_turn":
            return np.arange(length) >= start
        return mask if mask.any() else None

    def versions(self, length: int, start: int, sampled: NDArray[np.bool_] | None) -> NDArray[np.int64] | None:
        column = self.array("policy_versions")
        if column is None:
            return None
        if isinstance(column, np.ndarray) and column.shape != (length - start,):
            self.note_wrong_shape("policy_versions", column, length - start)
            return None
        versions = np.full(length, -1, dtype=np.int64)
        versions[start:] = column
        if sampled is not None:
            versions[~sampled] = -1
        return versions

    def arrays(
        self, length: int, start: int, mask: NDArray[np.bool_], sampled: NDArray[np.bool_] | None
    ) -> dict[str, NDArray[np.float32]]:
        fields = {name: self.response(name, length, start) for name in _NUMBER_FIELDS}
        behavior = fields["logprobs"]
        if behavior is not None:
            # Tokens that were not sampled have no engine log-prob; engines fill in zeros.
            silent = ~mask & (behavior == 0)
            behavior[silent if sampled is None else ~sampled & silent] = np.nan
        return derive_lenses(fields, mask)

    def trajectory(self, ids: NDArray[np.int64], start: int, mask: NDArray[np.bool_], messages: str) -> Trajectory:
        fields, length = self.fields, len(ids)
        eid: EID = fields["eid"]
        text, ends = (self.vocabulary or _EMPTY_VOCABULARY).decode_with_ends(ids)
        pair = fields["experience_type"] == "dpo"
        sampled = np.arange(length) >= start if pair else self.sampled(length, start, mask)
        arrays = {} if pair else self.arrays(length, start, mask, sampled)
        versions = None if pair else self.versions(length, start, sampled)
        segments = find_segments(
            text,
            ends,
            start,
            mask,
            sampled=sampled,
            spans=None if pair else self.info.get("segments"),
            exact=self.vocabulary is not None,
        )
        spoken = self.messages if messages == "messages" else self.table.freeform(messages, self.index) or self.messages
        if messages != "messages" and spoken is not self.messages:
            spoken = ImageExtractor(self.images.album, self.images.references).extract(spoken)
        pictures = [] if messages == "rejected_messages" else list(self.images.pictures)
        locate_images(pictures, text, ends, segments)
        metrics = self.table.freeform("metrics", self.index) or {}
        failed = self.info.get("error") is not None
        status = "error" if failed else classify_status(fields["finish_reason"], fields["truncate_status"])
        tid = eid.tid
        return Trajectory(
            uid=eid.uid,
            gid=eid.uid if tid == "/" else tid,
            step=record_step(eid.batch, None if versions is None else _oldest(versions, mask)),
            task=str(eid.task),
            run=eid.run,
            turn=eid.step,
            prompt=hash_prompt(ids[:start]),
            text=text,
            ends=ends,
            ids=ids,
            special=np.zeros(length, np.bool_) if self.vocabulary is None else self.vocabulary.is_special(ids),
            prompt_tokens=start,
            tokenized="ids" if self.vocabulary is None else "exact",
            mask=mask,
            versions=versions,
            arrays=arrays,
            segments=segments,
            reward=fields["reward"],
            parts=extract_numbers(metrics),
            declared=extract_declared_parts(self.info),
            advantage=_mean(arrays.get("advantage"), mask),
            status="unfinished"
            if status == "finished" and not length - start and not fields["finish_reason"]
            else status,
            finish_reason=fields["finish_reason"],
            truncate_status=fields["truncate_status"],
            kind=fields["experience_type"],
            group_size=fields["group_size"],
            parent=fields["parent"],
            prompt_text=fields["prompt_text"],
            response_text=None if messages == "rejected_messages" else fields["response_text"],
            messages=spoken,
            tools=self.table.freeform("tools", self.index),
            sampling=self.table.freeform("sampling", self.index),
            label=self.info.get("label"),
            reference=self.info.get("reference"),
            pictures=pictures,
            info={name: value for name, value in self.info.items() if name not in _TRAJECTORY_FIELDS},
            metrics=metrics,
            kept=self.info["kept"] if isinstance(self.info.get("kept"), str) else None,
            notes=[*self.notes, *self.describe_problems(pictures)],
        )

    def describe_problems(self, pictures: Sequence[Any]) -> list[str]:
        """Return notes on the record."""
        texts = []
        reward = self.fields["reward"]
        if reward is not None and reward != reward:
            texts.append("The reward is NaN (not scored).")
        if self.images.external:
            texts.append(f"{self.images.external} images are recorded as URLs only and are not fetched.")
        media = self.table.columns.get("multi_modal_inputs")
        if media is not None and media[self.index].is_valid and not pictures:
            names = ", ".join(str(item["key"]) for item in media[self.index].as_py())
            texts.append(f"Media recorded as tensors ({names}) are not shown.")
        return texts


def _mean(values: NDArray[np.float32] | None, mask: NDArray[np.bool_]) -> float | None:
    if values is None:
        return None
    counted = values[mask & np.isfinite(values)].astype(np.float64)
    return float(counted.mean()) if counted.size else None


def _oldest(versions: NDArray[np.int64], mask: NDArray[np.bool_]) -> int | None:
    counted = versions[(versions >= 0) & mask] if mask.any() else versions[versions >= 0]
    return int(counted.min()) if counted.size else None


def record_json(records: Experiences, index: int = 0) -> dict[str, Any]:
    """Return a record as strict JSON: tensors as lists, non-finite numbers as `null`, media as type and shape.

    >>> from rollbook import Experience
    >>> record = record_json(Experiences([Experience(eid={"suffix": "a"}, tokens=[1, 2, 3], reward=float("nan"))]))
    >>> record["uid"], record["tokens"], record["reward"], record["action_mask"]
    ('//0/0/a', [1, 2, 3], None, [True, True])
    """
    table = _RecordColumns(records)
    eid: EID = table.value("eid", index)
    fields: dict[str, Any] = {"uid": eid.uid, "eid": eid.to_dict()}
    for name, field in FIELDS.items():
        if field.kind == "eid":
            continue
        if field.kind == "tensor":
            fields[name] = json_safe(table.array(name, index))
        elif field.kind == "media":
            column = table.columns.get(name)
            items = None if column is None else column[index].as_py()
            fields[name] = items and {str(i["key"]): {"dtype": i["dtype"], "shape": i["shape"]} for i in items}
        elif field.kind in ("json", "custom_fields"):
            fields[name] = json_safe(table.freeform(name, index))
        else:
            fields[name] = json_safe(table.value(name, index))
    for name, column in table.columns.items():
        if owner(name) is None and name not in BOOK_COLUMNS and not isinstance(column, Ragged):
            fields[name] = json_safe(column[index].as_py())
    return {name: value for name, value in fields.items() if value is not None or name == "reward"}
