"""Index columns: the scalars of each record in the ledger, so that filters, samplers and groups read no frames.

Invariant: they are a function of the record alone, and SQLite and PostgreSQL both return every value unchanged: no NaN
(SQLite stores it as NULL), no integer beyond 64 bits, no text with a NUL or a lone surrogate.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rollbook.book.content_hash import Ids, canonical_floats, list_boxes, printed_ids
from rollbook.core import columns as arrow
from rollbook.core import freeform
from rollbook.core.checks import suggest
from rollbook.core.columns import Column
from rollbook.core.errors import WireError
from rollbook.core.fields import COLUMNAR, DTYPES, FIELDS
from rollbook.core.freeform import Json
from rollbook.core.ragged import Ragged

if TYPE_CHECKING:
    from rollbook.core.experiences import Experiences
    from rollbook.core.wire import RowLayout

UNSCORED, SCORED, NOT_A_NUMBER = 0, 1, 2
"""Values of `IndexColumns.scored`: no reward, a number (also infinite), NaN (could not be scored)."""

_MAX_INT64 = 2**63 - 1


class IndexColumns(NamedTuple):
    """The index columns of one record, in the order of the ledger's columns."""

    uid: str
    """`EID.uid`."""
    gid: str
    """The group: `EID.tid`, or the uid if batch and task are empty: a record with a default id is a group."""
    batch: str
    """A number as text, unescaped; so is `task`."""
    task: str
    run: int
    step: int
    suffix: str
    reward: float | None
    """`None` also for NaN; `scored` distinguishes the two."""
    scored: int
    """`UNSCORED`, `SCORED` or `NOT_A_NUMBER`."""
    length: int
    """All tokens, with both answers of a preference pair: `prompt_tokens + response_tokens`."""
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    """Tokens where the mask is true; without a mask, the whole response."""
    version_min: int | None
    """The oldest policy version of the trained tokens: of `policy_versions` where the mask is true (of all if it is
    false everywhere), else Trinity's `info["model_version"]`; `None` if there is neither."""
    version_max: int | None
    finish_reason: str | None
    """Of this text and the next, NUL and lone surrogates are written `\\\\x00` and `\\\\ud800`."""
    truncate_status: str | None
    kind: str
    """`experience_type`."""
    group_size: int | None
    parent: str | None


def index_columns(records: Experiences | RowLayout, ids: Ids | None = None) -> list[IndexColumns]:
    """Compute the index columns of every record.

    Args:
        records: The records.
        ids: Their printed ids, if they were computed already.

    >>> from rollbook import Experience, Experiences
    >>> rows = index_columns(Experiences([
    ...     Experience(eid={"batch": 1, "task": 2, "suffix": "a"}, tokens=[1, 2, 3, 4], prompt_length=2, reward=0.5,
    ...                action_mask=[True, False], policy_versions=[3, 4]),
    ...     Experience(eid={"suffix": "b"}, tokens=[1, 2, 3], reward=float("nan"), info={"model_version": 7}),
    ... ]))
    >>> [(row.gid, row.reward, row.scored, row.length, row.trained_tokens) for row in rows]
    [('1/2', 0.5, 1, 4, 1), ('//0/0/b', None, 2, 3, 2)]
    >>> [(row.version_min, row.version_max) for row in rows]
    [(3, 3), (7, 7)]
    """
    count = len(records)
    if not count:
        return []
    columns = dict(records.columns)
    if ids is None:
        ids = printed_ids(columns["eid"])
    if "\0" in "".join(ids.uid):
        i = next(i for i, uid in enumerate(ids.uid) if "\0" in uid)
        raise ValueError(f"record {i}: eid: got {ids.uid[i]!r}, expected no NUL, which databases cannot store")
    kinds = arrow.texts(columns["experience_type"])
    lengths, _ = arrow.token_lengths(columns, count)
    prompt = np.minimum(records.prompt_lengths(), lengths)
    if "dpo" in kinds:
        pairs = np.array([kind == "dpo" for kind in kinds])
        lengths = lengths + np.where(
            pairs, _read_lengths(columns, "chosen", count) + _read_lengths(columns, "rejected", count), 0
        )
    response = lengths - prompt
    mask = _Mask(columns, count)
    trained = np.where(mask.has_mask, mask.counts, response)
    oldest, newest = _version_ranges(columns, mask, count)
    rewards: list[float | None] = arrow.numbers(columns["reward"]) if "reward" in columns else [None] * count
    sizes: list[int | None] = arrow.numbers(columns["group_size"]) if "group_size" in columns else [None] * count
    scored = [UNSCORED if reward is None else SCORED if reward == reward else NOT_A_NUMBER for reward in rewards]
    if NOT_A_NUMBER in scored:
        rewards = [reward if flag == SCORED else None for reward, flag in zip(rewards, scored, strict=True)]
    values = (
        ids.uid,
        [uid if tid == "/" else tid for uid, tid in zip(ids.uid, ids.tid, strict=True)],
        ids.batch,
        ids.task,
        ids.run,
        ids.step,
        ids.suffix,
        rewards,
        scored,
        lengths.tolist(),
        prompt.tolist(),
        response.tolist(),
        trained.tolist(),
        oldest,
        newest,
        _read_texts(columns, "finish_reason", count),
        _read_texts(columns, "truncate_status", count),
        kinds,
        sizes,
        _read_texts(columns, "parent", count),
    )
    return list(map(IndexColumns._make, zip(*values, strict=True)))


def get_reward(row: IndexColumns) -> float | None:
    """Return the record's reward, including NaN.

    >>> from rollbook import Experience, Experiences
    >>> get_reward(index_columns(Experiences([Experience(tokens=[1, 2], reward=float("nan"))]))[0])
    nan
    """
    return math.nan if row.scored == NOT_A_NUMBER else row.reward


def _read_texts(columns: Mapping[str, Column], name: str, count: int) -> list[str | None]:
    strings: list[str | None] = arrow.texts(columns[name]) if name in columns else [None] * count
    raw = columns.get(f"{name}__raw")
    if raw is not None:
        strings = arrow.decode(FIELDS[name], columns) or strings
    if raw is not None or "\0" in "".join(filter(None, strings)):
        strings = [None if text is None else _escape(text) for text in strings]
    return strings


def _escape(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _read_lengths(columns: Mapping[str, Column], name: str, count: int) -> NDArray[np.int64]:
    column, other = columns.get(name), columns.get(f"{name}__other")
    lengths = np.zeros(count, dtype=np.int64)
    if isinstance(column, Ragged):
        lengths += column.lengths
    for i, box in enumerate(list_boxes(other, name) if other is not None else ()):
        if box is not None and box[1]:
            lengths[i] = box[1][0]
    return lengths


# --- masks and versions ---------------------------------------------------------------------------------------------


class _Mask:
    """Which response tokens are trained on: one array for the column, and separate arrays for rows of other types."""

    def __init__(self, columns: Mapping[str, Column], count: int) -> None:
        column, other = columns.get("action_mask"), columns.get("action_mask__other")
        self.has_mask = np.zeros(count, dtype=np.bool_)
        self.counts = np.zeros(count, dtype=np.int64)
        self.offsets = np.zeros(count + 1, dtype=np.int64)
        self.bits: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.other_rows: dict[int, NDArray[np.bool_]] = {}
        if isinstance(column, Ragged):
            self.offsets = column.offsets - column.offsets[0]
            self.bits = _is_true(column.values[column.offsets[0] : column.offsets[-1]], column.dtype)
            self.has_mask |= column.present
            nonempty = column.lengths > 0
            if nonempty.any():
                # Rows without tokens have no values, so the other rows are adjacent.
                starts = self.offsets[:-1][nonempty]
                self.counts[nonempty] = np.add.reduceat(self.bits.view(np.uint8), starts, dtype=np.int64)
        for i, box in enumerate(list_boxes(other, "action_mask") if other is not None else ()):
            if box is not None and not self.has_mask[i]:
                self.other_rows[i] = bits = _is_true(_tensor_elements(box[0], box[2]), box[0])
                self.counts[i], self.has_mask[i] = int(bits.sum()), True

    def row(self, i: int) -> NDArray[np.bool_]:
        """Return row i, empty if it is missing."""
        return self.other_rows[i] if i in self.other_rows else self.bits[self.offsets[i] : self.offsets[i + 1]]


def _tensor_elements(dtype: str, data: bytes | memoryview) -> NDArray[Any]:
    """Return a tensor's elements: numbers or, for types that numpy lacks, rows of bytes."""
    values = np.frombuffer(data, dtype=np.uint8)
    if dtype in COLUMNAR:
        return values.view(DTYPES[dtype].storage)
    return canonical_floats(values, dtype).view(np.uint8).reshape(-1, DTYPES[dtype].itemsize)


def _is_true(values: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    if dtype == "bool":
        return values.view(np.bool_)
    if dtype == "bfloat16":
        values = values & 0x7FFF  # -0.0 is false
    mask: NDArray[np.bool_] = values != 0
    return np.logical_or.reduce(mask, axis=1) if mask.ndim > 1 else mask


def _version_ranges(
    columns: Mapping[str, Column], mask: _Mask, count: int
) -> tuple[list[int | None], list[int | None]]:
    name = "policy_versions"
    oldest: list[int | None] = [None] * count
    newest: list[int | None] = [None] * count
    column = columns.get(name)
    if isinstance(column, Ragged) and column.offsets[-1] > column.offsets[0]:
        values = _clip_to_int64(column.values[column.offsets[0] : column.offsets[-1]])
        nonempty = column.lengths > 0
        rows = np.flatnonzero(nonempty).tolist()
        offsets = column.offsets - column.offsets[0]
        low, high = values.min(), values.max()
        if low == high:
            lows = highs = [int(low)] * len(rows)
        elif np.array_equal(offsets, mask.offsets):
            # If no token of a row is trained on, all of its tokens count.
            keep = mask.bits | np.repeat(mask.counts == 0, column.lengths)
            starts = offsets[:-1][nonempty]
            lows = np.minimum.reduceat(np.where(keep, values, high), starts).tolist()
            highs = np.maximum.reduceat(np.where(keep, values, low), starts).tolist()
        else:
            bounds = [_range(values[offsets[i] : offsets[i + 1]], mask.row(i)) for i in rows]
            lows, highs = [a for a, _ in bounds], [b for _, b in bounds]
        for i, a, b in zip(rows, lows, highs, strict=True):
            oldest[i], newest[i] = a, b
    other, single = columns.get(f"{name}__other"), columns.get(f"{name}__one")
    for i, box in enumerate(list_boxes(other, name) if other is not None else ()):
        if box is not None and oldest[i] is None and len(box[2]):
            oldest[i], newest[i] = _range(_clip_to_int64(_tensor_elements(box[0], box[2])), mask.row(i))
    for i, version in enumerate(arrow.numbers(single) if single is not None else ()):
        if oldest[i] is None and version is not None:
            oldest[i] = newest[i] = version
    if None in oldest and "info" in columns:
        for i, number in enumerate(_read_numbers(columns["info"], "model_version")):
            if oldest[i] is None and number is not None and math.isfinite(number):
                oldest[i] = newest[i] = max(-_MAX_INT64, min(int(number), _MAX_INT64))
    return oldest, newest


def _range(values: NDArray[Any], keep: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the smallest and largest value under the mask; of all values if it is empty or of another length."""
    chosen = values[keep] if len(keep) == len(values) and keep.any() else values
    return int(chosen.min()), int(chosen.max())


def _clip_to_int64(values: NDArray[Any]) -> NDArray[Any]:
    """Clip versions to the integers that databases can store."""
    return np.minimum(values, _MAX_INT64).astype(np.int64) if values.dtype == np.uint64 else values


# --- numbers by key -------------------------------------------------------------------------------------------------


def number_column(records: Experiences | RowLayout, key: str) -> list[float | None]:
    """Return one number per record, for samplers and filters.

    Booleans count as 1 and 0, texts that parse as finite numbers as those numbers, tensors and arrays of one element as
    the element. Anything else, and a missing value, is `None`.

    Args:
        records: The records.
        key: An index column, `info.NAME` or `metrics.NAME`. A NAME with dots is an entry of that name, or else a path
            through nested dicts.

    Raises:
        ValueError: The key is unknown.

    >>> from rollbook import Experience, Experiences
    >>> records = Experiences([Experience(tokens=[1, 2], info={"judge": {"score": 0.5}}), Experience(tokens=[1, 2, 3])])
    >>> number_column(records, "info.judge.score"), number_column(records, "length")
    ([0.5, None], [2.0, 3.0])
    """
    field, dot, name = key.partition(".") if isinstance(key, str) else ("", "", "")
    if dot and name and field in ("info", "metrics"):
        column = records.column(field)
        return [None] * len(records) if column is None else _read_numbers(column, name)
    if key not in IndexColumns._fields:
        raise ValueError(
            f"key: got {key!r}, expected info.NAME, metrics.NAME or an index column"
            + suggest(str(key), list(IndexColumns._fields))
        )
    if key == "reward":
        return [get_reward(row) for row in index_columns(records)]
    at = IndexColumns._fields.index(key)
    return [_to_number(row[at]) for row in index_columns(records)]


def _read_numbers(column: pa.Array, name: str) -> list[float | None]:
    """Return the number under a name in each dict of a free-form column."""
    # Most dicts lack the entry, which their text shows without parsing. Keys that JSON may escape are always parsed.
    last = name.rpartition(".")[2]
    unescaped = last.isalnum() and last.isascii()
    entries: list[float | None] = []
    flat = column.flat if isinstance(column, arrow.Values) else None
    if flat and None not in flat:
        return [_to_number(_look_up(value, name)) for value in flat if value is not None]
    for i, text in enumerate(arrow.texts(column)):
        if text is None or (unescaped and last not in text):
            entries.append(None)
            continue
        try:
            entries.append(_to_number(_look_up(_text_entries(orjson.loads(text)), name)))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise WireError(f"record {i}: {name}: a free-form value cannot be read: {error}") from None
    return entries


def _text_entries(value: Json) -> dict[str, Any]:
    """Return the entries with text keys of a dict in tagged JSON; an empty dict for anything else."""
    if not isinstance(value, dict):
        return {}
    if len(value) == 1:
        if "$dict" in value:
            value = value["$dict"]
        elif "$map" in value:
            value = {key: item for key, item in value["$map"] if isinstance(key, str)}
    return dict(value)


def _look_up(value: dict[str, Any], name: str) -> Any:
    if name in value:
        return value[name]
    for at in (at for at, letter in enumerate(name) if letter == "."):
        if name[:at] in value:
            nested = _look_up(_text_entries(value[name[:at]]), name[at + 1 :])
            if nested is not None:
                return nested
    return None


def _to_number(value: Json) -> float | None:
    """Convert a value of tagged JSON, or an index column, to a number."""
    if isinstance(value, dict) and len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag in ("$float", "$int"):
            value = float(content) if tag == "$float" else int(content, 16)
        elif tag in ("$array", "$scalar"):
            value = _single_element(np.asarray(freeform.loads(orjson.dumps(value).decode())))
        elif tag == "$tensor":
            value = _single_tensor_element(content["dtype"], binascii.a2b_base64(content["data"], strict_mode=True))
    if isinstance(value, str):
        try:
            number = float(value) if "_" not in value else math.nan
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _single_element(array: NDArray[Any]) -> Any:
    return array.item() if array.size == 1 and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 else None


def _single_tensor_element(dtype: str, data: bytes) -> Any:
    if dtype not in COLUMNAR or len(data) != DTYPES[dtype].itemsize:
        return None
    values = np.frombuffer(data, dtype=DTYPES[dtype].storage)
    return _single_element((values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values)


def column_types(records: Experiences | RowLayout) -> set[tuple[str, str]]:
    """Return (field, type) of the tensor columns: `("tokens", "int32")`, `("routed_experts", "int16x24x8")`.

    >>> from rollbook import Experience, Experiences
    >>> sorted(column_types(Experiences([Experience(tokens=[1, 2, 3])])))
    [('action_mask', 'bool'), ('tokens', 'int32')]
    """
    types = set()
    for name, column in records.columns.items():
        if isinstance(column, Ragged) and name in FIELDS:
            types.add((name, "x".join([column.dtype, *map(str, column.trailing)])))
    return types
