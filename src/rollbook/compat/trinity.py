"""The public names of Trinity-RFT's `trinity.common.experience`: records, padded tensors, groups, and HF datasets.

Invariant: a list of records and `Experiences` give the same result. Nothing is truncated: a record that exceeds a
maximum length raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rollbook.core.checks import check_int
from rollbook.core.experience import (
    CustomField,
    Experience,
    check_records,
    dtype_name,
    implied_mask,
    result_dtype,
    split_preference_pairs,
)
from rollbook.core.experiences import Experiences, as_experiences, id_part
from rollbook.core.fields import FIELDS, Field
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Spans, segments
from rollbook.io.hf import dataset_from_table, from_hf, to_hf

if TYPE_CHECKING:
    from datasets import Dataset

Records: TypeAlias = Sequence[Experience] | Experiences


def _check_sequence(experiences: Records) -> None:
    if not isinstance(experiences, Sequence):
        raise ValueError(f"experiences: got {type(experiences).__name__}, expected a list or Experiences")
    if not isinstance(experiences, Experiences):
        check_records(experiences)


def _lengths(experiences: Records) -> tuple[Any, Any]:
    """Return the prompt and response lengths, each [N]."""
    _check_sequence(experiences)
    if isinstance(experiences, Experiences):
        prompts = experiences.prompt_lengths()
        totals = experiences.token_lengths()
    else:
        prompts = np.array([row.prompt_length for row in experiences], dtype=np.int64)
        totals = np.array([len(row.tokens) for row in experiences], dtype=np.int64)
    # A truncated prompt may have fewer tokens than `prompt_length`: then all tokens are prompt.
    prompts = np.minimum(prompts, totals)
    return prompts, totals - prompts


def _checked_lengths(experiences: Records, max_prompt: int, max_response: int) -> tuple[Any, Any]:
    """Return the prompt and response lengths, each [N], checked against the maxima."""
    prompts, responses = _lengths(experiences)
    _check_limit("max_prompt_length", max_prompt, prompts, experiences)
    _check_limit("max_response_length", max_response, responses, experiences)
    return prompts, responses


def _check_limit(name: str, limit: int, lengths: NDArray[np.int64], experiences: Records) -> None:
    over = np.flatnonzero(lengths > check_int(name, limit))
    if over.size:
        i = int(over[0])
        raise ValueError(
            f"{name}: got {limit}, expected at least {int(lengths.max())}: "
            f"record {i} ({experiences[i].eid}) has {int(lengths[i])}"
        )


def _response_lengths(experiences: Records) -> Any:
    """Return the response lengths [N]. With a truncated prompt, it is the number of log-probs."""
    _, responses = _lengths(experiences)
    if isinstance(experiences, Experiences):
        status, logprobs = experiences.values("truncate_status"), experiences.values("logprobs")
    else:
        status = [row.truncate_status for row in experiences]
        logprobs = [row.logprobs for row in experiences]
    for i, (state, values) in enumerate(zip(status, logprobs, strict=True)):
        if state == "prompt_truncated" and isinstance(values, torch.Tensor) and values.dim():
            responses[i] = len(values)
    return responses


def _tensors(experiences: Records, name: str) -> list[torch.Tensor]:
    """Return a tensor field of every record. A single number is expanded to all response tokens."""
    field = FIELDS[name]
    if isinstance(experiences, Experiences):
        rows = experiences.values(name)
    else:
        rows = [getattr(row, name) for row in experiences]
    shapes = set()
    widths = _response_lengths(experiences) if field.broadcast else None
    device = "cpu" if isinstance(experiences, Experiences) or not rows else experiences[0].tokens.device
    for i, row in enumerate(rows):
        if widths is not None and isinstance(row, int):
            rows[i] = row = torch.full((int(widths[i]),), row, dtype=getattr(torch, field.dtype), device=device)
        if not isinstance(row, torch.Tensor):
            raise ValueError(
                f"{name}: got {row!r} in record {i} ({experiences[i].eid}), expected a tensor in every record"
            )
        shapes.add(tuple(row.shape[1:]))
        if row.dim() != 1 + field.trailing or len(shapes) > 1:
            raise ValueError(
                f"{name}: got shape {list(row.shape)} in record {i} ({experiences[i].eid}), "
                f"expected {1 + field.trailing} dimension(s), all but the first the same in every record"
            )
    return rows


def _pad_field(
    experiences: Records,
    name: str,
    width: int,
    fill: float,
    starts: NDArray[np.int64] | Sequence[int],
    lengths: NDArray[np.int64],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [N, width, ...]: the field `name`, `lengths[i]` entries from column `starts[i]`, the rest `fill`."""
    spans = Spans(lengths, starts, width)
    column = experiences.column(name) if isinstance(experiences, Experiences) else None
    if isinstance(column, Ragged) and column.valid is None:
        kind = result_dtype(name, column.row_dtypes(), fill)
        if kind != column.dtype:
            # The column has a wider type than these rows, because of rows that are not selected.
            padded = spans.pad(column, fill).to(getattr(torch, kind))
            return padded if out is None else out.copy_(padded)
        return spans.pad(column, fill, out)
    rows = _tensors(experiences, name)
    if not rows:
        return torch.full((0, width), fill, dtype=getattr(torch, FIELDS[name].dtype))
    target = getattr(torch, result_dtype(name, {dtype_name(row) for row in rows}, fill))
    return spans.pad(segments([row.to(target) for row in rows]), fill, out)


def gather_token_ids(
    experiences: Records,
    max_prompt_length: int,
    max_response_length: int,
    pad_token_id: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pad token ids: prompts on the left, responses on the right.

    Args:
        experiences: The records.
        max_prompt_length: P.
        max_response_length: R.
        pad_token_id: Token id of the padding.
        out: A tensor of the result's shape and type to write to and return, which takes a third of the time.

    Returns:
        [N, P + R]

    Raises:
        ValueError: If a prompt or response is longer than its maximum.

    >>> from rollbook import Experience
    >>> rows = [Experience(tokens=[11, 12, 13]), Experience(tokens=[21, 22, 23, 24, 25], prompt_length=2)]
    >>> gather_token_ids(rows, max_prompt_length=2, max_response_length=3, pad_token_id=9)
    tensor([[ 9, 11, 12, 13,  9],
            [21, 22, 23, 24, 25]], dtype=torch.int32)
    """
    prompts, responses = _checked_lengths(experiences, max_prompt_length, max_response_length)
    starts = max_prompt_length - prompts
    width = max_prompt_length + max_response_length
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)):
        raise ValueError(f"pad_token_id: got {pad_token_id!r}, expected a token id")
    return _pad_field(experiences, "tokens", width, int(pad_token_id), starts, prompts + responses, out)


def gather_attention_masks(experiences: Records, max_prompt_length: int, max_response_length: int) -> torch.Tensor:
    """Return the attention masks of `gather_token_ids`.

    Args:
        experiences: The records.
        max_prompt_length: P.
        max_response_length: R.

    Returns:
        [N, P + R] bool: True on tokens, False on padding.

    Raises:
        ValueError: If a prompt or response is longer than its maximum.

    >>> from rollbook import Experience
    >>> gather_attention_masks([Experience(tokens=[11, 12, 13])], 2, 3)
    tensor([[False,  True,  True,  True, False]])
    """
    prompts, responses = _checked_lengths(experiences, max_prompt_length, max_response_length)
    device = "cpu"
    if not isinstance(experiences, Experiences) and len(experiences):
        device = str(experiences[0].tokens.device)
    width = max_prompt_length + max_response_length
    return Spans(prompts + responses, max_prompt_length - prompts, width).mask(torch.bool, device)


def gather_action_masks(experiences: Records, max_response_length: int) -> torch.Tensor:
    """Pad the action masks on the right with False.

    Args:
        experiences: The records.
        max_response_length: R.

    Returns:
        [N, R] bool.

    Raises:
        ValueError: If a response is longer than R.

    >>> from rollbook import Experience
    >>> gather_action_masks([Experience(tokens=[1, 2, 3, 4], action_mask=[1, 0, 1])], 4)
    tensor([[ True, False,  True, False]])
    """
    return gather_response_attrs(experiences, "action_mask", max_response_length)


def gather_response_attrs(
    experiences: Records, attr_name: str, max_response_length: int, pad_value: float = 0
) -> torch.Tensor:
    """Pad a response-axis field on the right.

    Args:
        experiences: The records.
        attr_name: Name of the field.
        max_response_length: R.
        pad_value: Value of the padding.

    Returns:
        [N, R, ...]

    Raises:
        ValueError: If the field is unknown or missing in a record, or a response is longer than R.

    >>> from rollbook import Experience
    >>> rows = [Experience(tokens=[1, 2], logprobs=[-0.5]), Experience(tokens=[1, 2, 3], logprobs=[-1.0, -2.0])]
    >>> gather_response_attrs(rows, "logprobs", 3, pad_value=1)
    tensor([[-0.5000,  1.0000,  1.0000],
            [-1.0000, -2.0000,  1.0000]])
    """
    field = FIELDS.get(attr_name)
    if field is None or field.kind != "tensor" or field.axis != "response":
        names = ", ".join(f.name for f in FIELDS.values() if f.axis == "response")
        raise ValueError(f"attr_name: got {attr_name!r}, expected a response-axis field: {names}")
    _check_sequence(experiences)
    column = experiences.column(attr_name) if isinstance(experiences, Experiences) else None
    if isinstance(column, Ragged) and column.valid is None:
        lengths = column.lengths
    else:
        lengths = np.array([len(row) for row in _tensors(experiences, attr_name)], dtype=np.int64)
    _check_limit("max_response_length", max_response_length, lengths, experiences)
    return _pad_field(experiences, attr_name, max_response_length, pad_value, np.zeros_like(lengths), lengths)


def gather_multi_modal_inputs(experiences: Records) -> dict[str, list[torch.Tensor]]:
    """Return the media tensors of records by name.

    Args:
        experiences: The records.

    Returns:
        By name, a tensor for each record; an empty one for a record without it.

    >>> from rollbook import Experience
    >>> rows = [Experience(tokens=[1, 2], multi_modal_inputs={"p": torch.ones(2, 2)}), Experience(tokens=[1, 2])]
    >>> [tuple(t.shape) for t in gather_multi_modal_inputs(rows)["p"]]
    [(2, 2), (0, 2)]
    """
    _check_sequence(experiences)
    if isinstance(experiences, Experiences):
        inputs = experiences.values("multi_modal_inputs")
    else:
        inputs = [row.multi_modal_inputs for row in experiences]
    media = [item or {} for item in inputs]
    examples: dict[str, torch.Tensor] = {}
    for item in media:
        for key, tensor in item.items():
            examples.setdefault(key, tensor)
    return {
        key: [item[key] if key in item else example.new_empty((0, *example.shape[1:])) for item in media]
        for key, example in examples.items()
    }


def group_by(experiences: Records, id_type: str) -> dict[str, Any]:
    """Group records by id, in order of appearance.

    Args:
        experiences: The records.
        id_type: `task`, `run` or `step`.

    Returns:
        Records by id: lists for a list, `Experiences` for `Experiences`.

    >>> from rollbook import EID, Experience
    >>> rows = [Experience(eid=EID(0, task, run), tokens=[1, 2]) for task in range(2) for run in range(2)]
    >>> [(tid, len(group)) for tid, group in group_by(rows, "task").items()]
    [('0/0', 2), ('0/1', 2)]
    """
    _check_sequence(experiences)
    if isinstance(experiences, Experiences):
        return experiences.group_by(id_type)
    part = id_part(id_type)
    groups: dict[str, list[Experience]] = {}
    for row in experiences:
        groups.setdefault(getattr(row.eid, part), []).append(row)
    return groups


def split_dpo_experience_to_single_turn(experiences: Records) -> list[Experience]:
    """Split each preference pair into two single-turn records.

    Everything that applies to both answers is copied to both; see `rollbook.core.experience.split_preference_pairs`.

    Args:
        experiences: Preference pairs.

    Returns:
        Two records for each pair, the chosen one first. `parent` is the uid of the pair; suffixes are new.

    Raises:
        ValueError: If a record is not a preference pair, or an answer is empty.

    >>> from rollbook import Experience
    >>> pair = Experience(tokens=[1, 2], chosen=[3, 4], rejected=[5])
    >>> [half.tokens.tolist() for half in split_dpo_experience_to_single_turn([pair])]
    [[1, 2, 3, 4], [1, 2, 5]]
    """
    return split_preference_pairs(experiences)


def to_hf_datasets(experiences: Records, *, for_trinity: bool = False) -> Any:
    """Convert records to a `datasets.Dataset` with a column for every field.

    Args:
        experiences: The records.
        for_trinity: Write the columns and types that Trinity-RFT's own `from_hf_datasets` reads. Fields that Trinity
            lacks (`policy_versions`, `sampling`, ...) are left out, keys of `info` that some records lack become
            `None`, and tensors are read with Trinity's types. `rollbook.core.wire.to_trxp` is lossless.

    Returns:
        A dataset. Without `for_trinity`, `from_hf_datasets` reads the same records from it.

    Raises:
        ValueError: With `for_trinity`, if the records have custom fields, or values of different types under one key.

    >>> from rollbook import Experience
    >>> to_hf_datasets([Experience(tokens=[1, 2], info={"a": 1})], for_trinity=True)[0]["info"]
    {'a': 1}
    """
    records = as_experiences(experiences)
    return dataset_from_table(_trinity_table(records)) if for_trinity else to_hf(records)


def _trinity_table(records: Experiences) -> pa.Table:
    """Return a table with the columns and types of Trinity's own `to_hf_datasets`: structs and lists."""
    names = list(FIELDS)
    arrays = {}
    for name in names[: names.index("custom_fields")]:  # the table begins with Trinity's fields, in its order
        values = _trinity_values(records, FIELDS[name])
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{name}: Trinity's datasets need values of one type in all records: {error}; "
                "rollbook.core.wire.to_trxp writes these records"
            ) from None
    for i, custom_fields in enumerate(records.values("custom_fields")):
        if custom_fields:
            raise ValueError(
                f"record {i} ({records.eids()[i]}): custom_fields: got {len(custom_fields)}, expected none: Trinity's "
                "datasets cannot hold them; rollbook.core.wire.to_trxp writes them"
            )
    return pa.table(arrays)


def _trinity_values(records: Experiences, field: Field) -> list[Any]:
    values = records.values(field.name)
    if field.kind == "eid":
        parts = [eid.to_dict() for eid in records.eids()]
        for name in ("batch", "task"):
            if len({type(part[name]) for part in parts}) > 1:  # a column has one type: numbers become text
                parts = [{**part, name: str(part[name])} for part in parts]
        return parts
    if field.kind == "media":
        keys = [value.keys() if value else None for value in values]
        first = next((entry for entry in keys if entry is not None), None)
        for i, entry in enumerate(keys):
            if entry is not None and entry != first:
                raise ValueError(
                    f"record {i} ({records.eids()[i]}): {field.name}: got the keys {sorted(entry)}, expected "
                    f"{sorted(first or ())}: Trinity's datasets need the same in all records that have any"
                )
        return [{key: tensor.tolist() for key, tensor in value.items()} if value else None for value in values]
    if field.name == "action_mask":
        # Without a mask, Trinity creates the mask of a single turn, and infers the type of the record.
        return [
            None if value is None or implied_mask(row) else (value != 0).tolist()
            for row, value in zip(records.rows(), values, strict=True)
        ]
    if field.kind == "tensor":
        return [None if value is None else value.tolist() for value in values]
    return [value if value or field.kind != "json" else None for value in values]


def from_hf_datasets(dataset: Dataset) -> list[Experience]:
    """Return the records of a dataset.

    Args:
        dataset: A dataset from `to_hf_datasets`, also Trinity's.

    Returns:
        The records.

    >>> from rollbook import Experience
    >>> from_hf_datasets(to_hf_datasets([Experience(tokens=[1, 2], reward=0.5)]))[0].reward
    0.5
    """
    return from_hf(dataset).rows()


__all__ = [
    "EID",
    "CustomField",
    "Experience",
    "Experiences",
    "from_hf_datasets",
    "gather_action_masks",
    "gather_attention_masks",
    "gather_multi_modal_inputs",
    "gather_response_attrs",
    "gather_token_ids",
    "group_by",
    "split_dpo_experience_to_single_turn",
    "to_hf_datasets",
]
