"""Rollbook's own JSONL: one record a line, strict JSON that keeps every type and bit.

Invariant: `record(line(row))` equals `row` for every record. A field is there if the record has it:

- `tokens` and other tensors are lists where the type is the field's own, else `{"dtype": "bfloat16", "values": [...]}`;
  NaN and infinities are the texts `"nan"`, `"inf"`, `"-inf"`; types and shapes that a list cannot say are `$tensor`s.
- free-form values, ids and texts are JSON with the tags of `rollbook.freeform`.
- a single turn's mask, which follows from the kind, is left out; `odd` names fields of a shape they cannot have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import orjson

from rollbook import freeform
from rollbook.book.transfer.rows import Errors, files, json_object, lines
from rollbook.errors import WireError
from rollbook.experiences import Experiences
from rollbook.fields import COLUMNAR, FIELDS, Field

if TYPE_CHECKING:
    from rollbook.experience import Experience

VERSION = 1
KEY = "rollbook"
"""The key of every line that says which version of this layout it has."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def line(row: Experience) -> bytes:
    """One record as a line, without the newline.

    >>> from rollbook import Experience
    >>> line(Experience(eid={"batch": 1, "suffix": "a"}, tokens=[1, 2, 3], reward=float("nan"))).decode()
    '{"rollbook":1,"eid":{"batch":1,"task":"","run":0,"step":0,"suffix":"a"},"tokens":[1,2,3],"prompt_length":1,\
"reward":{"$float":"nan"},"experience_type":"single_turn"}'
    """
    from rollbook.experience import implied_mask

    if row.unknown:
        raise ValueError(
            f"record {row.eid}: the columns {', '.join(row.unknown)} of a newer version cannot be kept in JSONL; "
            "'frames' and 'parquet' keep them"
        )
    made: dict[str, Any] = {KEY: VERSION}
    for name, field in FIELDS.items():
        value = getattr(row, name)
        if value is None or (name == "action_mask" and implied_mask(row)):
            continue
        if field.kind == "tensor" and hasattr(value, "dtype"):
            made[name] = _tensor(field, value, name in row.odd)
        elif field.kind in ("tensor", "integer"):
            made[name] = value
        elif field.kind == "eid":
            made[name] = orjson.Fragment(_free(name, value.to_dict()))
        elif field.kind == "custom_fields":
            if value:
                made[name] = orjson.Fragment(_free(name, [custom.to_dict() for custom in value]))
        elif value or not field.always:
            made[name] = orjson.Fragment(_free(name, value))
    if row.odd:
        made["odd"] = sorted(row.odd)
    try:
        return orjson.dumps(made)
    except TypeError as error:
        raise ValueError(f"record {row.eid}: cannot be kept in JSONL: {error}") from None


def _free(name: str, value: Any) -> str:
    try:
        return freeform.dumps(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _tensor(field: Field, value: Any, odd: bool) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if odd or dtype not in COLUMNAR or value.dim() != 1 + field.trailing or (field.trailing and not value.numel()):
        return orjson.Fragment(_free(field.name, value))
    listed = value.detach().cpu().tolist()
    if value.is_floating_point() and not bool(value.detach().isfinite().all()):
        listed = _named(listed)
    return listed if dtype == field.dtype else {"dtype": dtype, "values": listed}


def _named(values: list[Any]) -> list[Any]:
    return [_named(v) if type(v) is list else v if math.isfinite(v) else repr(v) for v in values]


def record(text: bytes | None, max_row_bytes: int) -> Experience:
    """The record of one line; `WireError` if it is none."""
    from rollbook.experience import Experience, restore

    held = json_object(text, max_row_bytes)
    version = held.pop(KEY, VERSION)
    if version != VERSION:
        raise WireError(f"layout version {version!r}; this reader knows {VERSION}")
    odd = held.pop("odd", [])
    values: dict[str, Any] = {}
    for name, value in held.items():
        field = FIELDS.get(name)
        if field is None:
            raise WireError(f"{name!r} is no field; the fields are {', '.join(FIELDS)}")
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


def _read_tensor(field: Field, value: Any) -> Any:
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


def read(path: str, batch_rows: int, errors: Errors, *, max_row_bytes: int) -> Iterator[Experiences]:
    """The records of a file, or of a folder of such files, `batch_rows` at a time."""
    held = []
    for name in files(path):
        for where, text in lines(name, max_row_bytes):
            try:
                held.append(record(text, max_row_bytes))
            except WireError as error:
                errors.bad(where, error)
            if len(held) >= batch_rows:
                yield Experiences(held)
                held = []
    if held:
        yield Experiences(held)


def write(batches: Iterable[Experiences], path: str) -> int:
    """All records, one a line."""
    count = 0
    with open(path, "wb") as file:
        for batch in batches:
            for row in batch:
                file.write(line(row) + b"\n")
            count += len(batch)
    return count
