"""Padded and packed batches: every conversion between them, through a sheet.

Invariant: to a sheet and back is the identity for packed batches; of a padded batch a sheet keeps what is attended, and
the response slots that speak of it. A field that does not agree with the others is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rollbook.compat.lightrft.batch import ExperienceBatch, Origin, token_fields
from rollbook.compat.lightrft.info import check_info
from rollbook.compat.lightrft.ragged_batch import SAMPLE_LISTS, Lengths, Sheet, constant, on_tokens
from rollbook.core.experience import own
from rollbook.core.fields import BATCH_FIELDS, FIELDS
from rollbook.core.media import divided, joined, sample_list
from rollbook.core.ragged import offsets_of
from rollbook.core.rows import NUMPY, Column, Rows, Spans, concatenated, memory

LAYOUTS = ("left", "prompt_left_response_right")
_LARGE_MASK = 1 << 17
"""A mask with more entries is worth a look whether it needs to be copied."""


# --- from batches -------------------------------------------------------------------------------------------------


def sheet_of_batch(batch: ExperienceBatch, in_one: bool = False) -> Sheet:
    """The sheet of a batch: of a padded one, what is attended. Media are views of the batch's.

    `in_one` puts the columns into one block of memory: one is sooner had than many.
    """
    values = checked(batch)
    if batch.layout == "packed":
        tokens, responses = _packed_lengths(batch, values)
        sheet = whole_sheet(batch, tokens, responses)
        for name, value in values.items():
            if isinstance(value, Rows):
                value = value.values.clone()
            elif value is not None:
                value = torch.cat(value) if value else torch.empty(0, dtype=torch.int64)
            sheet.columns[name] = value
        still_absent(sheet)
        return sheet
    return unpadded(batch, values, in_one)[0]


def unpadded(batch: ExperienceBatch, values: dict[str, Any], in_one: bool) -> tuple[Sheet, tuple[Spans, Spans]]:
    """The sheet of a padded batch with the fields `values`, and where its tokens and response slots lie there."""
    width = int(values["sequences"].shape[1])
    slots = next((int(one.shape[1]) for name, one in values.items() if one is not None and not on_tokens(name)), 0)
    starts = action_starts(batch, slots)
    lying, acting = spans_of_rows(batch.attention_mask, len(batch), width, slots, starts, look_solid=True)
    sheet = whole_sheet(batch, lying.lengths, acting.lengths)
    together: dict[Any, list[str]] = {}
    for name, value in values.items():
        spans = lying if on_tokens(name) else acting
        if value is None:
            sheet.columns[name] = None
        elif name == "attention_mask" and lying.solid:
            sheet.columns[name] = constant(1, int(lying.lengths.sum()), value.dtype, value.device)
        elif not in_one or not value.is_cpu or value.requires_grad:
            sheet.columns[name] = spans.unpad(value)
        else:
            sheet.columns[name] = None  # in the order of the fields
            together.setdefault((spans, value.dtype, value.shape[2:]), []).append(name)
    for (spans, *_), names in together.items():
        sheet.columns |= zip(names, spans.unpad_all([values[name] for name in names]), strict=True)
    still_absent(sheet)
    return sheet, (lying, acting)


def still_absent(sheet: Sheet) -> None:
    """Of the rows that lack a field, forget those that were written to since; a mask that every row lacks, and that
    only told padding from the rest, goes."""
    for name, rows in list(sheet.origin.absent.items()):
        column = sheet.columns.get(name)
        if not isinstance(column, torch.Tensor):
            continue
        blank = column == (BATCH_FIELDS[name].absent if name in BATCH_FIELDS else 0)
        if not blank.all():
            parts = torch.split(blank, sheet.lengths(name).tolist())
            rows = frozenset(i for i in rows if parts[i].all())
        sheet.origin.absent[name] = rows
        if len(rows) == len(sheet):
            sheet.columns[name] = None
        if not rows or len(rows) == len(sheet):
            del sheet.origin.absent[name]


def whole_sheet(batch: ExperienceBatch, tokens: Lengths, responses: Lengths) -> Sheet:
    """A sheet with everything of a batch but its per-token columns."""
    count = len(batch)
    sheet = Sheet(tokens, responses, batch.origin.copy())
    check_info(batch.info, count)
    sheet.info = own(batch.info, tensors=True)
    for name in SAMPLE_LISTS:
        entries = getattr(batch, name)
        sheet.lists[name] = None if entries is None else sample_list(name, entries, count)
    sheet.media = divided(batch)
    tokens_of_all = batch.sequences
    if count:
        sheet.device = (tokens_of_all if isinstance(tokens_of_all, torch.Tensor) else tokens_of_all[0]).device
    return sheet


def checked(batch: ExperienceBatch) -> dict[str, Any]:
    """The per-token fields by name, once they are known to agree with each other."""
    plain = _plain_matrices(batch)
    if plain is not None:
        return plain
    if not isinstance(batch.sequences, (list, torch.Tensor)):
        raise ValueError(f"sequences: got {type(batch.sequences).__name__}, expected a tensor or a list of tensors")
    for name in ("info", "extras"):
        if not isinstance(getattr(batch, name), (dict, type(None))):
            raise ValueError(f"{name}: got {type(getattr(batch, name)).__name__}, expected a dict")
    values: dict[str, Any] = dict(token_fields(batch))
    is_packed = batch.layout == "packed"
    if isinstance(batch.sequences, torch.Tensor):
        _check_dims("sequences", batch.sequences, 2, "sequences")
    count = len(batch)
    kind: Any = list if is_packed else torch.Tensor
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, kind):
            expected = "a list of tensors" if is_packed else "a tensor"
            raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}, as the batch is {batch.layout}")
        if is_packed:
            _check_count(name, len(value), count)
            for i, row in enumerate(value):
                if not isinstance(row, torch.Tensor):
                    raise ValueError(f"{name}[{i}]: got {type(row).__name__}, expected a tensor")
                _check_dims(f"{name}[{i}]", row, 1, name)
        else:
            _check_dims(name, value, 2, name)
            _check_count(name, value.shape[0], count)
    if not is_packed:
        widths(values)
    return values


_AXES = [(name, on_tokens(name)) for name in BATCH_FIELDS]


def _plain_matrices(batch: ExperienceBatch) -> dict[str, Any] | None:
    """The per-token fields if they are matrices that agree, as those of nearly every batch are, and there are no
    extras; `None` of other batches, whose fault is then looked for."""
    sequences, info = batch.sequences, batch.info
    if type(sequences) is not torch.Tensor or batch.extras or not (info is None or isinstance(info, dict)):
        return None
    shape = sequences.shape
    if len(shape) != 2 or sequences.is_floating_point() or sequences.is_complex():
        return None
    count, width = shape
    slots: int | None = None
    values: dict[str, Any] = {}
    for name, on_sequence in _AXES:
        value = values[name] = getattr(batch, name)
        if value is None:
            continue
        if type(value) is not torch.Tensor:
            return None
        shape = value.shape
        if len(shape) != 2 or shape[0] != count:
            return None
        if on_sequence:
            if shape[1] != width:
                return None
        elif slots is None:
            slots = shape[1]
        elif shape[1] != slots:
            return None
    return values if slots is None or slots <= width else None


def _check_count(name: str, rows: int, count: int) -> None:
    if rows != count:
        raise ValueError(f"{name}: got {rows} rows, expected {count}, as sequences has")


def _check_dims(where: str, value: torch.Tensor, dims: int, name: str) -> None:
    if value.dim() < dims or (value.dim() > dims and name in BATCH_FIELDS):
        raise ValueError(f"{where}: got shape {list(value.shape)}, expected {dims} dimension(s)")
    if name == "sequences" and (value.is_floating_point() or value.is_complex()):
        raise ValueError(f"{where}: got values of {value.dtype}, expected token ids")


def widths(values: dict[str, Any]) -> tuple[int, int]:
    """How many columns the two axes of a padded batch have: S and A."""
    found: dict[bool, tuple[str, int]] = {}
    for name, value in values.items():
        if value is not None:
            first, width = found.setdefault(on_tokens(name), (name, value.shape[1]))
            if value.shape[1] != width:
                raise ValueError(f"{name}: got {value.shape[1]} columns, expected {width}, as {first} has")
    name, slots = found.get(False, ("", 0))
    if slots > found[True][1]:
        raise ValueError(f"{name}: got {slots} columns, expected at most {found[True][1]}, as sequences has")
    return found[True][1], slots


def action_starts(batch: ExperienceBatch, slots: int) -> Lengths:
    """[B] The first slot that is a row's own, checked."""
    given = batch.action_starts
    count = len(batch)
    if given is None:
        return np.zeros(count, dtype=np.int64)
    starts = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
    if starts.dtype.kind not in "iu" or starts.shape != (count,) or (starts < 0).any() or (starts > slots).any():
        raise ValueError(f"action_starts: got {starts.tolist()}, expected {count} whole numbers from 0 to {slots}")
    return starts.astype(np.int64)


def predicted_mask(batch: ExperienceBatch) -> Any:
    """A batch's `action_mask`, (B, A) or `Rows`, False on slots that speak of a sample's first token.

    Nothing comes before such a token, so that no model predicts it; a batch of records has it masked already
    (`rollbook.compat.lightrft.records.mask_unpredicted`). `None`, or the batch's own mask, if there is no such slot.

    >>> mask = torch.tensor([[True, True], [True, True]])
    >>> attended = torch.tensor([[0, 1, 1], [1, 1, 1]])
    >>> predicted_mask(ExperienceBatch(torch.ones(2, 3).long(), *[None] * 5, attended, mask, None))
    tensor([[False,  True],
            [ True,  True]])
    """
    mask = batch.action_mask
    slots = next((value for _, value in token_fields(batch, "response") if value is not None), None)
    if slots is None:
        return mask
    if batch.layout == "packed":
        tokens = [len(row) for row in batch.sequences]
        lengths = [len(row) for row in slots]
        starts = offsets_of(lengths)[:-1]
        first = [int(at) for at, n, count in zip(starts, lengths, tokens, strict=True) if n and n == count]
        if not first:
            return mask
        device = batch.sequences[0].device
        flat = torch.ones(sum(lengths), dtype=torch.bool, device=device) if mask is None else torch.cat(list(mask))
        flat = flat.clone()
        flat[first] = 0
        return Rows(flat, lengths)
    begin = batch.sequences.shape[1] - slots.shape[1]
    attended = torch.ones_like(batch.sequences) if batch.attention_mask is None else batch.attention_mask
    # The response is looked at in rows without a prompt alone: of a long one there is much, and of such rows few.
    alone = torch.nonzero(~_any_attended(attended[:, :begin])).squeeze(-1)
    if not len(alone):
        return mask
    responses = attended[alone, begin:] != 0
    has_tokens = responses.any(-1)
    if not bool(has_tokens.any()):
        return mask
    cleared = torch.ones(slots.shape[:2], dtype=torch.bool, device=slots.device) if mask is None else mask.clone()
    cleared[alone[has_tokens], responses[has_tokens].int().argmax(-1)] = 0
    return cleared


def _any_attended(mask: torch.Tensor) -> torch.Tensor:
    """[B] Whether a row of a mask has an entry that is not 0."""
    if mask.device.type == "cpu" and mask.dtype in NUMPY:
        return torch.from_numpy((memory(mask) != 0).any(-1))  # in a fraction of torch's time
    return (mask != 0).any(-1)


def _packed_lengths(batch: ExperienceBatch, values: dict[str, Any]) -> tuple[Lengths, Lengths]:
    lengths = [np.full(len(batch), -1, dtype=np.int64) for _ in range(2)]
    for name, value in values.items():
        known = lengths[on_tokens(name)]
        for i, row in enumerate(value or ()):
            if known[i] >= 0 and len(row) != known[i]:
                raise ValueError(f"{name}[{i}]: got {len(row)} entries, expected {known[i]}, as its other fields have")
            known[i] = len(row)
    tokens, responses = lengths[1], np.maximum(lengths[0], 0)
    for i in np.flatnonzero(responses > tokens).tolist():
        raise ValueError(f"sample {i}: got {responses[i]} response slots, expected at most its {tokens[i]} tokens")
    return tokens, responses


def spans_of_rows(
    mask: torch.Tensor | None, count: int, width: int, slots: int, starts: Lengths, look_solid: bool = False
) -> tuple[Spans, Spans]:
    """Where in padded rows the samples' tokens lie, and their response slots.

    A row's tokens go from the first that is attended to the last. Slot j speaks of token `width - slots + j`, and goes
    with it; slots before `starts` are padding. `look_solid`: find out whether the mask is 1 throughout the tokens'
    spans, if it is large (`Spans.solid`).
    """
    solid = False
    if mask is None or not width:
        first, last = np.zeros(count, dtype=np.int64), np.full(count, width, dtype=np.int64)
    else:
        first, last, solid = _edges(mask, look_solid)
    begin = np.maximum(starts, first - (width - slots))
    end = np.maximum(np.minimum(slots, last - (width - slots)), begin)
    lying = Spans(last - first, first, width)
    lying.solid = solid
    return lying, Spans(end - begin, begin, slots)


def edges(flags: bytes) -> tuple[int, int]:
    """Where the ones among zeros begin and end; both at the end if there is none.

    >>> edges(bytes([0, 1, 0, 1, 0])), edges(bytes([0, 0]))
    ((1, 4), (2, 2))
    """
    last = flags.rfind(1) + 1
    return (flags.find(1), last) if last else (len(flags), len(flags))


def _edges(mask: torch.Tensor, look_solid: bool) -> tuple[Lengths, Lengths, bool]:
    """[B] Where the attended part of each row begins and ends (both at its end if there is none), and whether all of
    these parts are known to be 1 throughout, which only large masks are looked at for."""
    exact = mask.device.type == "cpu" and mask.dtype in NUMPY
    rows = memory(mask) if exact else (mask.detach() != 0).cpu().numpy()
    attended = rows if rows.dtype == np.bool_ else rows != 0
    # All rows as one text of bytes: its search is by far the fastest there is.
    flags, (count, width) = attended.tobytes(), attended.shape
    bounds = range(0, count * width + 1, width)
    firsts, lasts = [], []
    for start, stop in pairwise(bounds):
        last = flags.rfind(1, start, stop) + 1
        firsts.append((flags.find(1, start, last) if last else stop) - start)
        lasts.append((last or stop) - start)
    first, last = np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64)
    solid = look_solid and exact and mask.numel() > _LARGE_MASK and rows.dtype.kind in "biu"
    if solid:
        solid = np.count_nonzero(attended) == (last - first).sum()
        solid = bool(solid and (rows is attended or np.bitwise_or.reduce(rows, axis=None) == 1))
    return first, last, solid


# --- to batches ---------------------------------------------------------------------------------------------------


def packed(sheet: Sheet) -> ExperienceBatch:
    """The packed batch of a sheet."""
    tokens, responses = sheet.tokens.tolist(), sheet.responses.tolist()

    def rows(name: str, column: Column) -> Rows:
        values = concatenated(column, sheet.lengths(name)).contiguous()
        if name == "sequences" and sheet.long_tokens:
            values = values.long()
        return Rows(values, tokens if on_tokens(name) else responses)

    return _batch(sheet, rows, None)


def padded(sheet: Sheet, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
    """The padded batch of a sheet."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)):
        raise ValueError(f"pad_token_id: got {pad_token_id!r}, expected a token id")
    check_layout(layout)
    slots = int(sheet.responses.max(initial=0))
    starts = None
    if layout == "left":
        tokens = Spans.right_aligned(sheet.tokens, int(sheet.tokens.max(initial=0)))
        responses = Spans.right_aligned(sheet.responses, slots)
        if responses.starts.any():
            starts = torch.from_numpy(responses.starts)
    else:
        prompts = sheet.tokens - sheet.responses
        longest = int(prompts.max(initial=0))
        tokens = Spans(sheet.tokens, longest - prompts, longest + slots)
        responses = Spans(sheet.responses, np.zeros_like(sheet.responses), slots)

    for name, one in BATCH_FIELDS.items():
        spans = tokens if on_tokens(name) else responses
        if one.absent and sheet.columns.get(name) is None and not spans.full:
            # No mask says that everything counts; now padding must be told from that.
            sheet.origin.absent[name] = frozenset(range(len(sheet)))
            dtype = torch.int64 if on_tokens(name) else torch.bool
            sheet.columns[name] = constant(one.absent, int(spans.lengths.sum()), dtype, sheet.device)

    def matrix(name: str, column: Column) -> torch.Tensor:
        source = name.removeprefix("extras.")
        if name == "sequences" and sheet.long_tokens:
            column = concatenated(column, sheet.tokens).long()
        fill = pad_token_id if name == "sequences" else FIELDS[source].pad if source in FIELDS else 0
        return (tokens if on_tokens(name) else responses).pad(column, fill)

    return _batch(sheet, matrix, starts)


def check_layout(layout: str) -> None:
    """Refuse a layout that there is not."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")


def _batch(sheet: Sheet, lay_out: Callable[[str, Column], Any], starts: torch.Tensor | None) -> ExperienceBatch:
    given: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name, column in sheet.columns.items():
        value = None if column is None else lay_out(name, column)
        if name.startswith("extras."):
            extras[name.removeprefix("extras.")] = value
        else:
            given[name] = value
    origin = Origin(dict(sheet.origin.absent), dict(sheet.origin.dtypes), {}, sheet.origin.info)
    media: dict[str, Any] = {}
    for name, parts in sheet.media.items():
        if name.startswith("media."):
            media[name.removeprefix("media.")] = parts and [own(part, tensors=True) for part in parts]
        else:
            given[name] = joined(name, parts, origin)
    if starts is not None:
        starts = starts.to(sheet.device)
    given |= sheet.lists
    given |= {"info": sheet.info, "media": media or None, "extras": extras or None}
    return ExperienceBatch.of({**given, "action_starts": starts}, origin)
