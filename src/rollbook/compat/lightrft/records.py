"""From records to a sheet: a batch straight from columns, without rows.

Invariant: each column is read where it lies; only a field that some records lack, or that has several types, is put
together row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollbook.compat.lightrft.batch import Origin
from rollbook.compat.lightrft.info import InfoOrigin, collate_info
from rollbook.compat.lightrft.items import column_of
from rollbook.compat.lightrft.ragged_batch import Lengths, Sheet, constant
from rollbook.core.experience import CustomField
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.fields import BATCH_FIELDS, BATCH_MEDIA, FIELDS
from rollbook.core.media import count_media
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import Column, concatenated


def mask_unpredicted(records: Experiences) -> Experiences:
    """Clear the first mask entry of records without a prompt: no model predicts a sample's first token.

    Whatever trains on records, or counts what is trained on, reads their masks through this.

    Args:
        records: Any records; they stay as they are.

    Returns:
        The same records, those with `prompt_length=0` with `action_mask[0]` False.

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


def sheet_of_experiences(experiences: Any) -> Sheet:
    """The sheet of records, from their columns."""
    many = mask_unpredicted(as_experiences(experiences))
    count = len(many)
    kinds = many.values("experience_type") if count else []
    if "dpo" in kinds:
        i = kinds.index("dpo")
        raise ValueError(
            f"record {i} ({many.eids()[i]}): got a preference pair, expected a response; "
            "rollbook.compat.trinity.split_dpo_experience_to_single_turn makes two of it"
        )
    tokens = many.token_lengths()
    responses = np.maximum(tokens - many.prompt_lengths(), 0)
    if "prompt_truncated" in (status := many.values("truncate_status")):
        for i, logprobs in enumerate(many.values("logprobs")):
            if status[i] == "prompt_truncated":
                responses[i] = len(logprobs)
                if responses[i] > tokens[i]:
                    raise ValueError(
                        f"record {i} ({many.eids()[i]}): got {responses[i]} log-probs, expected at most {tokens[i]}"
                    )
    sheet = Sheet(tokens, responses, Origin(), long_tokens=True)
    used = set()
    for batch_field in BATCH_FIELDS.values():
        sources = [name for name in (*batch_field.sources, batch_field.name) if name in FIELDS]
        source = next((name for name in sources if _everywhere(many, name)), sources[-1] if sources else None)
        if source is not None:
            sheet.columns[batch_field.name] = _record_column(many, source, batch_field.name, sheet)
            used.add(source)
        else:
            sheet.columns[batch_field.name] = None
    for name, one in FIELDS.items():
        if one.kind == "tensor" and one.axis == "response" and name not in used:
            column = _record_column(many, name, f"extras.{name}", sheet)
            if column is not None:
                sheet.columns[f"extras.{name}"] = column
    if not count:
        sheet.columns["sequences"] = torch.empty(0, dtype=getattr(torch, FIELDS["tokens"].dtype))
    sheet.columns["attention_mask"] = constant(1, int(tokens.sum()), torch.int64)
    sheet.info, sheet.origin.info = _record_info(many, sheet)
    sheet.lists["ids"] = list(many.eids()) if count else []
    media = many.values("multi_modal_inputs")
    keys = {key: name for name, key in BATCH_MEDIA.items()}
    for key in dict.fromkeys(key for one in media for key in one or ()):
        sheet.media[keys.get(key, f"media.{key}")] = [(one or {}).get(key) for one in media]
    count_media(sheet.media, sheet.info, sheet.origin.info)
    return sheet


def _everywhere(many: Experiences, name: str) -> bool:
    column = many.column(name)
    if isinstance(column, Ragged) and column.valid is None:
        return True
    return all(value is not None for value in many.values(name))


def _record_column(many: Experiences, source: str, name: str, sheet: Sheet) -> Column | None:
    """A record field's column as it lies, or put together again where rows are absent or of several types."""
    column = many.column(source)
    if isinstance(column, Ragged) and column.valid is None and column.codes is None:
        if not np.array_equal(column.lengths, sheet.lengths(name)):
            _raise_length(many, source, column.lengths, sheet.lengths(name))
        return column
    values = many.values(source)
    if all(value is None for value in values):
        return None
    lengths = sheet.lengths(name)
    for i, value in enumerate(values):
        if isinstance(value, int):
            values[i] = torch.full((int(lengths[i]),), value, dtype=getattr(torch, FIELDS[source].dtype))
        elif value is not None and (value.dim() != 1 + FIELDS[source].trailing or len(value) != lengths[i]):
            _raise_length(many, source, [len(v) if v is not None and v.dim() else 0 for v in values], lengths)
    if name == "sequences":
        values = [value.long() for value in values]
    return column_of(name, values, sheet)


def _raise_length(many: Experiences, name: str, got: Any, expected: Lengths) -> None:
    i = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    raise ValueError(f"record {i} ({many.eids()[i]}): {name}: got {got[i]} entries, expected {expected[i]}")


def _custom_values(many: Experiences) -> dict[str, torch.Tensor]:
    """[B, ...] by destination: the `info` entries that the records' custom fields name.

    Every record must have the same custom fields, and the `info` entries they read, all of one shape.
    """
    fields_of_records = [tuple(custom_fields or ()) for custom_fields in many.values("custom_fields")]
    if not any(fields_of_records):
        return {}
    ids, infos, expected = many.eids(), many.values("info"), fields_of_records[0]
    for i, custom_fields in enumerate(fields_of_records):
        if set(custom_fields) != set(expected):
            raise ValueError(
                f"record {i} ({ids[i]}): custom_fields: got {_shown(custom_fields)}, "
                f"expected {_shown(expected)}, the same as record 0"
            )
    values = {}
    for custom in dict.fromkeys(expected):
        if custom.destination_field in values:
            raise ValueError(f"custom_fields: got several for {custom.destination_field!r}, expected one")
        rows = [_custom_value(custom, info or {}, f"record {i} ({ids[i]})") for i, info in enumerate(infos)]
        for i, row in enumerate(rows):
            if row.shape != rows[0].shape:
                raise ValueError(
                    f"record {i} ({ids[i]}): info[{custom.source_field!r}]: got shape {list(row.shape)}, "
                    f"expected {list(rows[0].shape)}, the same as record 0"
                )
        values[custom.destination_field] = torch.stack(rows)
    return values


def _shown(custom_fields: tuple[CustomField, ...]) -> str:
    shown = [f"{c.source_field!r} as {c.destination_field!r} ({c.data_type})" for c in custom_fields]
    return ", ".join(shown) or "none"


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


def _record_info(many: Experiences, sheet: Sheet) -> tuple[dict[Any, Any], InfoOrigin]:
    rewards = [{} if reward is None else {"reward": reward} for reward in many.values("reward")]
    info, origin = collate_info(rewards)
    mask = sheet.columns["action_mask"]
    if mask is None:
        counts = sheet.responses
    else:
        ones = (concatenated(mask, sheet.responses) != 0).numpy()
        counts = np.zeros(len(sheet), dtype=np.int64)
        some = sheet.responses > 0  # reduceat gives an entry even for nothing
        if some.any():
            counts[some] = np.add.reduceat(ones.view(np.uint8), offsets_of(sheet.responses)[:-1][some], dtype=np.int64)
    info["response_length"] = torch.from_numpy(counts.astype(np.float32))
    info["total_length"] = torch.from_numpy(sheet.tokens.astype(np.float32))
    for name, one in FIELDS.items():
        if one.kind == "json" and one.always:
            values = many.values(name)
            if any(values):
                held, inner = collate_info(values)
                info[name] = held
                origin.missing |= {(name, *path): rows for path, rows in inner.missing.items()}
                origin.given |= {(name, *path): pair for path, pair in inner.given.items()}
    info |= _custom_values(many)
    return info, origin
