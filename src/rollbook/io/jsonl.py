"""Rollbook's own JSONL: one record a line, strict JSON that keeps every type and bit.

Invariant: `decode_line(encode_line(row))` equals `row` for every record. A line has the fields that the record has:

- `tokens` and other tensors are lists where the type is the field's own, else `{"dtype": "bfloat16", "values": [...]}`;
  NaN and infinities are the texts `"nan"`, `"inf"`, `"-inf"`; types and shapes that a list cannot say are `$tensor`s.
- free-form values, ids and texts are JSON with the tags of `rollbook.core.freeform`.
- a single turn's mask, which follows from the kind, is left out; `odd` names fields of a shape they cannot have.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rollbook.core import freeform
from rollbook.core.columns import Column, numbers, texts
from rollbook.core.errors import WireError
from rollbook.core.experiences import Experiences
from rollbook.core.fields import COLUMNAR, FIELDS, INTEGERS, Field, owner
from rollbook.core.freeform import Json
from rollbook.io.tables import ErrorHandler, list_files, parse_object, read_lines

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

VERSION = 1
KEY = "rollbook"
"""The key with the version of this layout, in every line."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_lines(batch: Experiences) -> list[bytes]:
    """Encode each record as one line, without the newline.

    Reads the columns and does not need torch, unless a tensor does not fit its column (see `fields.SIDES`).

    Raises:
        ValueError: The records have columns of a newer version.
    """
    columns = batch.columns
    if any(name.endswith("__other") or owner(name) is None for name in columns):
        return [encode_line(row) for row in batch]
    rows: list[dict[str, Any]] = [{KEY: VERSION} for _ in range(len(batch))]
    for field in FIELDS.values():
        if any(owner(name) == (field, "") for name in columns) or f"{field.name}__one" in columns:
            for row, entry in zip(rows, _json_values(field, batch, columns), strict=True):
                if entry is not None:
                    row[field.name] = entry
    kinds = batch.values("experience_type")
    truncated = batch.values("truncate_status")
    for row, kind, status in zip(rows, kinds, truncated, strict=True):
        mask = row.get("action_mask")
        # The constructor gives a single turn this mask.
        if kind == "single_turn" and type(mask) is list and all(bit is (status != "prompt_truncated") for bit in mask):
            del row["action_mask"]
    return [orjson.dumps(row) for row in rows]


def _json_values(field: Field, batch: Experiences, columns: Mapping[str, Column]) -> list[Any]:
    """Return one field of every record in a form that orjson encodes, `None` where a record lacks it."""
    if field.kind == "tensor":
        return _listed_tensors(field, len(batch), columns)
    column = columns[field.name]
    if field.kind in ("json", "custom_fields"):
        # The column already holds JSON with the tags of `rollbook.core.freeform`.
        empty = "{}" if field.always else None
        return [None if text in (None, empty) else orjson.Fragment(text) for text in texts(column)]
    if field.kind == "media":
        return [None if entries is None else _media(entries) for entries in column.to_pylist()]
    if field.kind == "integer":
        return numbers(column)
    values = batch.values(field.name)
    if field.kind == "eid":
        values = [eid.to_dict() for eid in values]
    return [None if entry is None else orjson.Fragment(freeform.dumps(entry)) for entry in values]


def _listed_tensors(field: Field, count: int, columns: Mapping[str, Column]) -> list[Any]:
    rows: list[Any] = [None] * count
    ragged = columns.get(field.name)
    if ragged is not None:
        values, offsets = ragged.values, ragged.offsets.tolist()
        if ragged.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        for i in np.flatnonzero(ragged.present).tolist():
            dtype, row = ragged.row_dtype(i), values[offsets[i] : offsets[i + 1]]
            if dtype == "bool" or dtype in INTEGERS:  # the column may be of a wider type
                row = row.astype(dtype)
            listed = row.tolist()
            if row.dtype.kind == "f" and not np.isfinite(row).all():
                listed = _named(listed)
            if field.trailing and not row.size:  # a list cannot express the sizes behind an empty first axis
                rows[i] = _tagged_tensor({"dtype": dtype, "shape": row.shape, "data": b""})
            else:
                rows[i] = listed if dtype == field.dtype else {"dtype": dtype, "values": listed}
    ones = columns.get(f"{field.name}__one")
    for i, number in enumerate([] if ones is None else ones.to_pylist()):
        if number is not None:
            rows[i] = number
    return rows


def _media(entries: list[dict[str, Any]]) -> dict[str, Any]:
    media = {entry["key"]: _tagged_tensor(entry) for entry in entries}
    return {"$dict": media} if len(media) == 1 and next(iter(media)).startswith("$") else media


def _tagged_tensor(entry: Mapping[str, Any]) -> dict[str, Any]:
    data = binascii.b2a_base64(entry["data"], newline=False).decode()
    return {"$tensor": {"dtype": entry["dtype"], "shape": list(entry["shape"]), "data": data}}


def encode_line(row: Experience) -> bytes:
    """Encode one record as a line, without the newline.

    >>> from rollbook import Experience
    >>> encode_line(Experience(eid={"batch": 1, "suffix": "a"}, tokens=[1, 2, 3], reward=float("nan"))).decode()
    '{"rollbook":1,"eid":{"batch":1,"task":"","run":0,"step":0,"suffix":"a"},"tokens":[1,2,3],"prompt_length":1,\
"reward":{"$float":"nan"},"experience_type":"single_turn"}'
    """
    from rollbook.core.experience import implied_mask

    if row.unknown:
        raise ValueError(
            f"record {row.eid}: the columns {', '.join(row.unknown)} of a newer version cannot be kept in JSONL; "
            "'frames' and 'parquet' keep them"
        )
    encoded: dict[str, Any] = {KEY: VERSION}
    for name, field in FIELDS.items():
        entry = getattr(row, name)
        if entry is None or (name == "action_mask" and implied_mask(row)):
            continue
        if field.kind == "tensor" and hasattr(entry, "dtype"):
            encoded[name] = _tensor(field, entry, name in row.malformed_fields)
        elif field.kind in ("tensor", "integer"):
            encoded[name] = entry
        elif field.kind == "eid":
            encoded[name] = orjson.Fragment(_free(name, entry.to_dict()))
        elif field.kind == "custom_fields":
            if entry:
                encoded[name] = orjson.Fragment(_free(name, [custom.to_dict() for custom in entry]))
        elif entry or not field.always:
            encoded[name] = orjson.Fragment(_free(name, entry))
    if row.malformed_fields:
        encoded["odd"] = sorted(row.malformed_fields)
    try:
        return orjson.dumps(encoded)
    except TypeError as error:
        raise ValueError(f"record {row.eid}: cannot be kept in JSONL: {error}") from None


def _free(name: str, value: Json) -> str:
    try:
        return freeform.dumps(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _tensor(field: Field, value: Json, odd: bool) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if odd or dtype not in COLUMNAR or value.dim() != 1 + field.trailing or (field.trailing and not value.numel()):
        return orjson.Fragment(_free(field.name, value))
    listed = value.detach().cpu().tolist()
    if value.is_floating_point() and not bool(value.detach().isfinite().all()):
        listed = _named(listed)
    return listed if dtype == field.dtype else {"dtype": dtype, "values": listed}


def _named(values: list[Any]) -> list[Any]:
    return [_named(v) if type(v) is list else v if math.isfinite(v) else repr(v) for v in values]


def decode_line(text: bytes | None, max_row_bytes: int) -> Experience:
    """Decode one line; `WireError` if it is not a record."""
    from rollbook.core.experience import Experience, restore

    line_fields = parse_object(text, max_row_bytes)
    version = line_fields.pop(KEY, VERSION)
    if version != VERSION:
        raise WireError(f"layout version {version!r}; this reader knows {VERSION}")
    odd = line_fields.pop("odd", [])
    values: dict[str, Any] = {}
    for name, value in line_fields.items():
        field = FIELDS.get(name)
        if field is None:
            raise WireError(f"{name!r} is not a field; the fields are {', '.join(FIELDS)}")
        if field.kind == "tensor":
            values[name] = _read_tensor(field, value)
        else:
            # The tags are read by the text's own reader, which trusts nothing.
            values[name] = freeform.loads(orjson.dumps(value).decode(), freeform.MAX_DEPTH + 1)
    if "tokens" not in values:
        raise WireError("there are no 'tokens'")
    try:
        return restore(values, "the line") if odd else Experience(**values)
    except WireError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WireError(str(error)) from None


def _read_tensor(field: Field, value: Json) -> Any:
    import torch

    if value is None or (field.broadcast and type(value) is int):
        return value
    dtype = field.dtype
    if type(value) is dict and len(value) == 1:
        return freeform.loads(orjson.dumps(value).decode())
    if type(value) is dict:
        if set(value) != {"dtype", "values"} or value["dtype"] not in COLUMNAR:
            raise WireError(f"{field.name}: got {sorted(value)}, expected 'dtype' (a known one) and 'values'")
        dtype, value = value["dtype"], value["values"]
    if type(value) is not list:
        raise WireError(f"{field.name}: got a {type(value).__name__}, expected a list")
    kind = getattr(torch, dtype)
    try:
        if kind.is_floating_point:
            value = _numbers(value)
        elif not _whole(value, bool if dtype == "bool" else int):
            raise WireError(f"{field.name}: got other values than {dtype} has")
        return torch.tensor(value, dtype=kind)
    except WireError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WireError(f"{field.name}: got values that are no {dtype}: {error}") from None


def _whole(values: list[Any], kind: type) -> bool:
    return all(type(v) is kind or (type(v) is list and _whole(v, kind)) for v in values)


def _numbers(values: list[Any]) -> list[Any]:
    if all(type(v) is float or type(v) is int for v in values):
        return values
    return [_numbers(v) if type(v) is list else _NOT_FINITE.get(v, v) for v in values]


def read(path: str, batch_rows: int, errors: ErrorHandler, *, max_row_bytes: int) -> Iterator[Experiences]:
    """Read a file, or a folder of such files, in batches of `batch_rows`."""
    pending = []
    for name in list_files(path):
        for where, text in read_lines(name, max_row_bytes):
            try:
                pending.append(decode_line(text, max_row_bytes))
            except WireError as error:
                errors.handle(where, error)
            if len(pending) >= batch_rows:
                yield Experiences(pending)
                pending = []
    if pending:
        yield Experiences(pending)


def write(batches: Iterable[Experiences], path: str) -> int:
    """Write one record per line; return the number of records."""
    count = 0
    with open(path, "wb") as file:
        for batch in batches:
            file.writelines(text + b"\n" for text in encode_lines(batch))
            count += len(batch)
    return count
