"""Rollbook's own JSONL: one record per line, as strict JSON from which every value is read back with its type.

Invariant: `decode_line(encode_line(row))` equals `row` for every record. A line has the fields that the record has:

- A tensor is a list if it has its field's dtype, else `{"dtype": "bfloat16", "values": [...]}`. NaN and infinities are
  the texts `"nan"`, `"inf"` and `"-inf"`. A tensor whose dtype or shape a list cannot represent is a `$tensor`.
- Free-form values, ids and texts are JSON with the tags of `rollbook.core.freeform`.
- The mask of a single-turn record is left out if it is the default. `odd` lists fields whose shape is not valid for
  the field.
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
from rollbook.io.rows import ErrorHandler, list_files, parse_object, read_lines

if TYPE_CHECKING:
    from rollbook.core.experience import Experience

__all__ = ["decode_line", "encode_line"]

VERSION = 1
KEY = "rollbook"
"""The key of every line that holds the version of this layout."""
_MALFORMED_KEY = "odd"
"""The key of a line that lists the fields whose shape is not valid for the field."""


def read(path: str, batch_rows: int, errors: ErrorHandler, *, max_row_bytes: int) -> Iterator[Experiences]:
    """Read a file, or a folder of such files, in batches of `batch_rows`."""
    pending = []
    for name in list_files(path):
        for location, text in read_lines(name, max_row_bytes):
            try:
                pending.append(decode_line(text, max_row_bytes))
            except WireError as error:
                errors.handle(location, error)
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


# --- encoding -------------------------------------------------------------------------------------------------------


def encode_lines(batch: Experiences) -> list[bytes]:
    """Encode each record as one line, without the newline.

    Reads the columns and does not need torch, unless a tensor does not fit its column (see `fields.SIDES`).

    Raises:
        ValueError: The records have columns of a newer version.
    """
    columns = batch.columns
    if any(name.endswith("__other") or owner(name) is None for name in columns):
        return [encode_line(row) for row in batch]
    lines: list[dict[str, Any]] = [{KEY: VERSION} for _ in range(len(batch))]
    for field in FIELDS.values():
        if any(owner(name) == (field, "") for name in columns) or f"{field.name}__one" in columns:
            for line, entry in zip(lines, _encode_column(field, batch, columns), strict=True):
                if entry is not None:
                    line[field.name] = entry
    kinds = batch.values("experience_type")
    statuses = batch.values("truncate_status")
    for line, kind, status in zip(lines, kinds, statuses, strict=True):
        mask = line.get("action_mask")
        # The constructor gives a single-turn record this mask.
        if kind == "single_turn" and type(mask) is list and all(bit is (status != "prompt_truncated") for bit in mask):
            del line["action_mask"]
    return [orjson.dumps(line) for line in lines]


def _encode_column(field: Field, batch: Experiences, columns: Mapping[str, Column]) -> list[Any]:
    """Return one field of every record in a form that orjson encodes, `None` where a record lacks it."""
    if field.kind == "tensor":
        return _encode_tensor_column(field, len(batch), columns)
    column = columns[field.name]
    if field.kind in ("json", "custom_fields"):
        # The column already holds JSON with the tags of `rollbook.core.freeform`.
        empty = "{}" if field.always else None
        return [None if text in (None, empty) else orjson.Fragment(text) for text in texts(column)]
    if field.kind == "media":
        return [None if entries is None else _encode_media(entries) for entries in column.to_pylist()]
    if field.kind == "integer":
        return numbers(column)
    values = batch.values(field.name)
    if field.kind == "eid":
        values = [eid.to_dict() for eid in values]
    return [None if entry is None else orjson.Fragment(freeform.dumps(entry)) for entry in values]


def _encode_tensor_column(field: Field, count: int, columns: Mapping[str, Column]) -> list[Any]:
    encoded: list[Any] = [None] * count
    ragged = columns.get(field.name)
    if ragged is not None:
        values, offsets = ragged.values, ragged.offsets.tolist()
        if ragged.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        for i in np.flatnonzero(ragged.present).tolist():
            dtype, row = ragged.row_dtype(i), values[offsets[i] : offsets[i + 1]]
            if dtype == "bool" or dtype in INTEGERS:  # the column may have a wider type
                row = row.astype(dtype)
            listed = row.tolist()
            if row.dtype.kind == "f" and not np.isfinite(row).all():
                listed = _name_nonfinite(listed)
            if field.trailing and not row.size:  # a list cannot represent the sizes after an empty first axis
                encoded[i] = _tag_tensor({"dtype": dtype, "shape": row.shape, "data": b""})
            else:
                encoded[i] = listed if dtype == field.dtype else {"dtype": dtype, "values": listed}
    broadcast = columns.get(f"{field.name}__one")
    for i, number in enumerate([] if broadcast is None else broadcast.to_pylist()):
        if number is not None:
            encoded[i] = number
    return encoded


def _encode_media(entries: list[dict[str, Any]]) -> dict[str, Any]:
    media = {entry["key"]: _tag_tensor(entry) for entry in entries}
    # A single key with "$" would be read as a tag.
    return {"$dict": media} if len(media) == 1 and next(iter(media)).startswith("$") else media


def _tag_tensor(entry: Mapping[str, Any]) -> dict[str, Any]:
    data = binascii.b2a_base64(entry["data"], newline=False).decode()
    return {"$tensor": {"dtype": entry["dtype"], "shape": list(entry["shape"]), "data": data}}


def encode_line(row: Experience) -> bytes:
    """Encode one record as a line, without the newline.

    Args:
        row: The record.

    Returns:
        JSON in UTF-8.

    Raises:
        ValueError: The record has columns of a newer version.

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
    line: dict[str, Any] = {KEY: VERSION}
    for name, field in FIELDS.items():
        entry = getattr(row, name)
        if entry is None or (name == "action_mask" and implied_mask(row)):
            continue
        if field.kind == "tensor" and hasattr(entry, "dtype"):
            line[name] = _encode_tensor(field, entry, malformed=name in row.malformed_fields)
        elif field.kind in ("tensor", "integer"):
            line[name] = entry
        elif field.kind == "eid":
            line[name] = _encode_freeform(name, entry.to_dict())
        elif field.kind == "custom_fields":
            if entry:
                line[name] = _encode_freeform(name, [custom.to_dict() for custom in entry])
        elif entry or not field.always:
            line[name] = _encode_freeform(name, entry)
    if row.malformed_fields:
        line[_MALFORMED_KEY] = sorted(row.malformed_fields)
    try:
        return orjson.dumps(line)
    except TypeError as error:
        raise ValueError(f"record {row.eid}: cannot be kept in JSONL: {error}") from None


def _encode_freeform(name: str, value: Json) -> orjson.Fragment:
    try:
        return orjson.Fragment(freeform.dumps(value))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _encode_tensor(field: Field, tensor: Json, *, malformed: bool) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    no_list = dtype not in COLUMNAR or tensor.dim() != 1 + field.trailing or (field.trailing and not tensor.numel())
    if malformed or no_list:
        return _encode_freeform(field.name, tensor)
    listed = tensor.detach().cpu().tolist()
    if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
        listed = _name_nonfinite(listed)
    return listed if dtype == field.dtype else {"dtype": dtype, "values": listed}


def _name_nonfinite(values: list[Any]) -> list[Any]:
    """Replace NaN and infinities in nested lists by their names, which `_parse_nonfinite` reads."""
    return [_name_nonfinite(v) if type(v) is list else v if math.isfinite(v) else repr(v) for v in values]


# --- decoding -------------------------------------------------------------------------------------------------------


def decode_line(text: bytes | None, max_row_bytes: int) -> Experience:
    """Decode one line.

    Args:
        text: The line; `None` if it is over the limit.
        max_row_bytes: Limit of the bytes of a line.

    Returns:
        The record.

    Raises:
        WireError: The line is not a record, or is over the limit.

    >>> decode_line(b'{"tokens": [1, 2, 3], "prompt_length": 2, "reward": 1.0}', 1 << 20).reward
    1.0
    """
    from rollbook.core.experience import Experience, restore

    line = parse_object(text, max_row_bytes)
    version = line.pop(KEY, VERSION)
    if version != VERSION:
        raise WireError(f"layout version {version!r} is not supported, expected {VERSION}")
    malformed = line.pop(_MALFORMED_KEY, [])
    fields: dict[str, Any] = {}
    for name, value in line.items():
        field = FIELDS.get(name)
        if field is None:
            raise WireError(f"{name!r} is not a field; the fields are {', '.join(FIELDS)}")
        if field.kind == "tensor":
            fields[name] = _decode_tensor(field, value)
        else:
            # Encoded again, because `freeform.loads` parses and checks the tags of untrusted text.
            fields[name] = freeform.loads(orjson.dumps(value).decode(), freeform.MAX_DEPTH + 1)
    if "tokens" not in fields:
        raise WireError("the line has no 'tokens'")
    try:
        return restore(fields, "the line") if malformed else Experience(**fields)
    except WireError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WireError(str(error)) from None


def _decode_tensor(field: Field, value: Json) -> Any:
    import torch

    if value is None or (field.broadcast and type(value) is int):
        return value
    dtype_name = field.dtype
    if type(value) is dict and len(value) == 1:
        return freeform.loads(orjson.dumps(value).decode())
    if type(value) is dict:
        if set(value) != {"dtype", "values"} or value["dtype"] not in COLUMNAR:
            raise WireError(f"{field.name}: got {sorted(value)}, expected 'dtype' (a known one) and 'values'")
        dtype_name, value = value["dtype"], value["values"]
    if type(value) is not list:
        raise WireError(f"{field.name}: got a {type(value).__name__}, expected a list")
    dtype = getattr(torch, dtype_name)
    try:
        if dtype.is_floating_point:
            value = _parse_nonfinite(value)
        elif not _all_of_type(value, bool if dtype_name == "bool" else int):
            raise WireError(f"{field.name}: got values that are not {dtype_name}")
        return torch.tensor(value, dtype=dtype)
    except WireError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WireError(f"{field.name}: got values that are not {dtype_name}: {error}") from None


def _all_of_type(values: list[Any], element_type: type) -> bool:
    return all(type(v) is element_type or (type(v) is list and _all_of_type(v, element_type)) for v in values)


_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _parse_nonfinite(values: list[Any]) -> list[Any]:
    """Replace the names of NaN and infinities in nested lists by the numbers."""
    if all(type(v) is float or type(v) is int for v in values):
        return values
    return [_parse_nonfinite(v) if type(v) is list else _NONFINITE.get(v, v) for v in values]
