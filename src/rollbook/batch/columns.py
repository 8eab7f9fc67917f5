"""`read_columns` reads the columns of records that a batch needs: `BatchColumns`, one entry per token.

Invariant: a column is copied, row by row, only if some records lack it or its rows differ in dtype. No value is made
up: a record that lacks a column raises, unless the caller gives the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.experience import CustomField
from rollbook.core.experiences import Experiences
from rollbook.core.fields import FIELDS
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, promote
from rollbook.core.rows import Column

Lengths = NDArray[np.int64]

RESPONSE_COLUMNS = (
    *("logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "entropy"),
    *("values", "advantages", "returns", "loss_weights"),
)
"""Fields of a `Batch` with an entry for each response token, besides `action_mask`."""
_DEFAULT_FILL: dict[str, float] = {"action_mask": True, "loss_weights": 1.0}
"""What a record without a column means: no mask, and equal weights."""


@dataclass
class BatchColumns:
    """Columns of B records without padding; T tokens and R response tokens in total."""

    lengths: Lengths
    """[B] Number of tokens of each record."""
    response_lengths: Lengths
    """[B] Number of response tokens of each record."""
    tokens: Column
    """[T] Token ids."""
    by_response_token: dict[str, Column] = field(default_factory=dict)
    """[R, ...] By name: `action_mask`, `RESPONSE_COLUMNS`, and any other field of the response axis."""
    reward: torch.Tensor | None = None
    """[B] Rewards; NaN if a record has none."""
    by_record: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B, ...] By name: custom fields."""
    media: dict[str, list[Any]] = field(default_factory=dict)
    """By name of the model input: for each record, a tensor or `None`."""
    eids: list[EID] = field(default_factory=list)


def read_columns(
    records: Experiences, names: Sequence[str] | None = None, fill: Mapping[str, float] | None = None
) -> BatchColumns:
    """Read the columns that a batch needs.

    Args:
        records: Records without preference pairs.
        names: Columns to read besides tokens, media and ids. `None`: all columns that any record has.
        fill: By name, the value of each token of a record that lacks a column. By default True for `action_mask` and 1
            for `loss_weights`.

    Returns:
        The columns.

    Raises:
        ValueError: If a record lacks a column without a value in `fill`, a name is unknown, a record is a preference
            pair, or an entry has the wrong length.
    """
    if fill is not None and not isinstance(fill, Mapping):
        raise ValueError(f"fill: got {type(fill).__name__}, expected values by column name")
    fill = {**_DEFAULT_FILL, **(fill or {})}
    for name in fill:
        if name not in FIELDS or FIELDS[name].axis != "response":
            raise ValueError(f"fill: {name!r} is not a field of the response axis")
    lengths, response_lengths = count_tokens(records)
    tokens = _read_column(records, "tokens", lengths)
    if tokens is None:
        tokens = torch.empty(0, dtype=getattr(torch, FIELDS["tokens"].dtype))
    columns = BatchColumns(lengths, response_lengths, tokens, eids=records.eids())
    if records.column("multi_modal_inputs") is not None:
        columns.media = _read_media(records)
    if names is None or "action_mask" in names:
        records = mask_unpredicted(records)
    custom_names = set()
    for name in FIELDS if names is None else names:
        record_field = FIELDS.get(name)
        if record_field is not None and record_field.kind == "tensor" and record_field.axis == "response":
            column = _read_column(records, name, response_lengths, fill.get(name), required=names is not None)
            if column is not None:
                columns.by_response_token[name] = column
        elif names is not None and name not in ("tokens", "reward"):
            custom_names.add(name)
    if names is None or custom_names:
        columns.by_record = {
            name: column for name, column in custom_columns(records).items() if names is None or name in custom_names
        }
    for name in custom_names - columns.by_record.keys():
        raise ValueError(f"columns: {name!r} is neither a column of a batch nor a custom field of the records")
    if names is None or "reward" in names:
        rewards = [np.nan if reward is None else reward for reward in records.values("reward")]
        columns.reward = torch.tensor(rewards, dtype=torch.float32)
    return columns


def count_tokens(records: Experiences) -> tuple[Lengths, Lengths]:
    """Count the tokens, and the response tokens, of every record.

    The response of a record whose prompt was truncated is as long as its log-probs.

    Args:
        records: Any records.

    Returns:
        Two arrays [B].

    Raises:
        ValueError: If a record is a preference pair.
    """
    kinds = records.values("experience_type") if len(records) else []
    if "dpo" in kinds:
        i = kinds.index("dpo")
        raise ValueError(
            f"record {i} ({records.eids()[i]}): got a preference pair, expected a response; "
            "rollbook.core.experience.split_preference_pairs makes two of it"
        )
    lengths = records.token_lengths()
    response_lengths = np.maximum(lengths - records.prompt_lengths(), 0)
    status = records.values("truncate_status")
    if "prompt_truncated" in status:
        for i, logprobs in enumerate(records.values("logprobs")):
            if status[i] == "prompt_truncated":
                response_lengths[i] = len(logprobs)
                if response_lengths[i] > lengths[i]:
                    raise ValueError(
                        f"record {i} ({records.eids()[i]}): got {response_lengths[i]} log-probs, "
                        f"expected at most {lengths[i]}"
                    )
    return lengths, response_lengths


def mask_unpredicted(records: Experiences) -> Experiences:
    """Clear the first mask entry of records without a prompt, since no model predicts the first token of a sample.

    Code that trains on records, or counts their trained tokens, calls this before it reads their masks.

    Args:
        records: Any records. They are not changed.

    Returns:
        The records. Those with `prompt_length=0` have `action_mask[0]` False.

    >>> from rollbook import Experience
    >>> records = Experiences([Experience(tokens=[1, 2], prompt_length=0, action_mask=[True, True])])
    >>> mask_unpredicted(records)[0].action_mask
    tensor([False,  True])
    """
    promptless = np.flatnonzero(records.prompt_lengths() == 0).tolist() if len(records) else []
    if not promptless:
        return records
    masks, kinds, lengths = records.values("action_mask"), records.values("experience_type"), records.token_lengths()
    for i in promptless:
        if kinds[i] == "dpo" or not lengths[i]:
            continue
        mask = torch.ones(int(lengths[i]), dtype=torch.bool) if masks[i] is None else masks[i].clone()
        mask[:1] = 0
        masks[i] = mask
    return records.assign(action_mask=masks)


def _read_column(
    records: Experiences, name: str, lengths: Lengths, fill: float | None = None, required: bool = False
) -> Column | None:
    """Return a tensor field with an entry for each token: the stored column, or a copy in which gaps have `fill`.

    `None`: no record has the field, and it is not `required`.
    """
    column = records.column(name)
    if isinstance(column, Ragged) and column.valid is None and column.codes is None:
        if not np.array_equal(column.lengths, lengths):
            raise _length_error(records, name, column.lengths, lengths)
        return column
    rows = records.values(name)
    present = [row for row in rows if row is not None]
    if not rows or (not present and not required):
        return None
    if fill is None and len(present) < len(rows):
        i = next(i for i, row in enumerate(rows) if row is None)
        raise ValueError(
            f"record {i} ({records.eids()[i]}): {name}: missing, expected it in every record of the batch; "
            f"fill={{{name!r}: 0.0}} gives a value to records without it"
        )
    tensors = [row for row in present if isinstance(row, torch.Tensor)]  # the others are one number for all tokens
    record_field = FIELDS[name]
    dtypes = {str(row.dtype).removeprefix("torch.") for row in tensors} or {record_field.dtype}
    common = promote(dtypes)
    if common is None:
        raise ValueError(f"{name}: got rows of {', '.join(sorted(dtypes))}, expected types that one can hold exactly")
    dtype = getattr(torch, common)
    trailing = tuple(tensors[0].shape[1:]) if tensors else ()
    gap = 0.0 if fill is None else fill
    filled = [
        row.to(dtype)
        if isinstance(row, torch.Tensor)
        else torch.full((int(length), *trailing), gap if row is None else row, dtype=dtype)
        for row, length in zip(rows, lengths, strict=True)
    ]
    counts = np.array([len(row) if row.dim() == 1 + record_field.trailing else 0 for row in filled], dtype=np.int64)
    if not np.array_equal(counts, lengths):
        raise _length_error(records, name, counts, lengths)
    if len({row.shape[1:] for row in filled}) > 1:
        shapes = ", ".join(str(list(row.shape)) for row in filled)
        raise ValueError(f"{name}: got shapes {shapes}, expected all but the first size to be the same")
    return torch.cat(filled)


def _length_error(records: Experiences, name: str, counts: Lengths, lengths: Lengths) -> ValueError:
    i = int(np.flatnonzero(counts != lengths)[0])
    return ValueError(f"record {i} ({records.eids()[i]}): {name}: got {counts[i]} entries, expected {lengths[i]}")


def _read_media(records: Experiences) -> dict[str, list[Any]]:
    """Return by name of the model input, for each record, a tensor or `None`."""
    inputs = [media or {} for media in records.values("multi_modal_inputs")]
    return {name: [media.get(name) for media in inputs] for name in dict.fromkeys(key for m in inputs for key in m)}


def custom_columns(records: Experiences) -> dict[str, torch.Tensor]:
    """Read the custom fields of records from their `info`.

    Args:
        records: Records with the same custom fields. The `info` entries of a field have the same shape.

    Returns:
        Tensors [B, ...] by destination field.

    Raises:
        ValueError: If records differ in custom fields, or lack an entry.
    """
    fields_of_records = [tuple(custom_fields or ()) for custom_fields in records.values("custom_fields")]
    if not any(fields_of_records):
        return {}
    ids, infos, expected = records.eids(), records.values("info"), fields_of_records[0]
    for i, custom_fields in enumerate(fields_of_records):
        if set(custom_fields) != set(expected):
            raise ValueError(
                f"record {i} ({ids[i]}): custom_fields: got {_format_fields(custom_fields)}, "
                f"expected {_format_fields(expected)}, the same as record 0"
            )
    columns = {}
    for custom in dict.fromkeys(expected):
        if custom.destination_field in columns:
            raise ValueError(f"custom_fields: got several for {custom.destination_field!r}, expected one")
        rows = [_custom_value(custom, info or {}, f"record {i} ({ids[i]})") for i, info in enumerate(infos)]
        for i, row in enumerate(rows):
            if row.shape != rows[0].shape:
                raise ValueError(
                    f"record {i} ({ids[i]}): info[{custom.source_field!r}]: got shape {list(row.shape)}, "
                    f"expected {list(rows[0].shape)}, the same as record 0"
                )
        columns[custom.destination_field] = torch.stack(rows)
    return columns


def _format_fields(custom_fields: tuple[CustomField, ...]) -> str:
    texts = [f"{c.source_field!r} as {c.destination_field!r} ({c.data_type})" for c in custom_fields]
    return ", ".join(texts) or "none"


def _custom_value(custom: CustomField, info: Mapping[str, Any], record: str) -> torch.Tensor:
    source = custom.source_field
    if source not in info:
        raise ValueError(
            f"{record}: info: got no {source!r}, expected it for the custom field {custom.destination_field!r}"
        )
    try:
        return torch.as_tensor(info[source]).to(custom.data_type)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{record}: info[{source!r}]: got {info[source]!r}, expected a number or an array of numbers"
        ) from None
