"""Items, padded and packed batches: every conversion between them, through a sheet.

Invariant: to a sheet and back is the identity for items without padding and for packed batches; of a padded batch a
sheet keeps what is attended, and the response slots that speak of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rollbook.batch import BufferItem, ExperienceBatch, Origin, token_fields
from rollbook.convert import own
from rollbook.fields import BATCH_FIELDS, BATCH_MEDIA, FIELDS
from rollbook.info import collate_info, pick_info
from rollbook.jagged import Column, Rows, Segments, Spans, concatenated, segments, unbind_copy
from rollbook.media import Pool
from rollbook.ragged import promote
from rollbook.sheet import SAMPLE_LISTS, Lengths, Sheet, constant, on_tokens

LAYOUTS = ("left", "prompt_left_response_right")


# --- from items ---------------------------------------------------------------------------------------------------


def sheet_of_items(items: Sequence[Any]) -> Sheet:
    """The sheet of buffer items, each as it is (padding that an item still has is taken for content)."""
    for i, item in enumerate(items):
        if not isinstance(item, BufferItem):
            raise ValueError(f"items[{i}]: got {type(item).__name__}, expected a BufferItem")
    states = [item.__dict__ for item in items]
    touched = set[str]().union(*states)
    sheet = _lying(states, touched) or _gathered(states)

    def values(name: str) -> list[Any]:
        return [
            state[name] if name in state else state["_source"][0].value(name, state["_source"][1]) for state in states
        ]

    # Rows that nobody touched since their sheet was made are taken from its columns.
    whole = {id(state["_source"][0]): state["_source"][0] for state in states if "_source" in state}
    single = next(iter(whole.values())) if len(whole) == 1 and all("_source" in state for state in states) else None
    picked = None
    if single is not None and not touched & {"info", "info_kinds"} and not single.origin.absent.get("info"):
        picked = pick_info(single.info, single.origin.info, [state["_source"][1] for state in states])
    if picked is not None:
        sheet.info = picked
    else:
        infos = values("info")
        sheet.info, sheet.origin.info = collate_info(infos, values("info_kinds"))
        if bare := frozenset(i for i, info in enumerate(infos) if info is None):
            sheet.origin.absent["info"] = bare
    for name, item_name in SAMPLE_LISTS.items():
        if single is None or item_name in touched or single.lists.get(name) is not None:
            sheet.lists[name] = _listed(values(item_name))
    for name in BATCH_MEDIA:
        if single is None or name in touched or single.media.get(name) is not None:
            sheet.media[name] = _listed(values(name))
    if single is None or "media" in touched or any(name.startswith("media.") for name in single.media):
        media = values("media")
        for key in dict.fromkeys(key for one in media for key in one or ()):
            sheet.media[f"media.{key}"] = [(one or {}).get(key) for one in media]
    return sheet


def _listed(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _lying(states: list[dict[str, Any]], touched: set[str]) -> Sheet | None:
    """The sheet of rows of other sheets, without making tensors of them; `None` where that cannot be."""
    if "extras" in touched or not all("_source" in state for state in states):
        return None
    sources = [state["_source"] for state in states]
    sheets = {id(one): one for one, _ in sources}
    first = next(iter(sheets.values()))
    if not all(one.arrays is not None and one.regular and one.kinds == first.kinds for one in sheets.values()):
        return None
    sheet = Sheet(
        np.array([one.tokens[i] for one, i in sources], dtype=np.int64),
        np.array([one.responses[i] for one, i in sources], dtype=np.int64),
        Origin(),
    )
    starts = [[one.bounds[axis][i] for one, i in sources] for axis in (0, 1)]
    for name, (dtype, trailing) in first.kinds.items():
        if dtype is None and name not in touched:
            sheet.columns[name] = None
        elif name not in touched:
            if len(sheets) == 1:
                arrays = [first.arrays[name]] * len(sources)
            else:
                arrays = [one.arrays[name] for one, _ in sources]
            sheet.columns[name] = Segments(arrays, starts[on_tokens(name)], dtype, trailing)
        else:
            rows = [s[name] if name in s else s["_source"][0].row(name, s["_source"][1]) for s in states]
            expected = sheet.lengths(name).tolist()
            if any(row is not None and len(row) != n for row, n in zip(rows, expected, strict=True)):
                return None  # assigned anew, with a length of their own
            for i, row in enumerate(rows):
                _check_row(name, i, row)
            sheet.columns[name] = column_of(name, rows, sheet)
    return sheet


def _gathered(states: list[dict[str, Any]]) -> Sheet:
    """The sheet of items that each hold their own tensors."""

    def value(state: dict[str, Any], name: str) -> Any:
        return state[name] if name in state else state["_source"][0].value(name, state["_source"][1])

    rows = {name: [value(state, name) for state in states] for name in BATCH_FIELDS}
    extras = [value(state, "extras") for state in states]
    for name in dict.fromkeys(name for one in extras for name in one or ()):
        rows[f"extras.{name}"] = [(one or {}).get(name) for one in extras]
    for i, row in enumerate(rows["sequences"]):
        if row is None:
            raise ValueError(f"items[{i}].sequences: got None, expected token ids")
    lengths = [np.full(len(states), -1, dtype=np.int64) for _ in range(2)]
    for name, found in rows.items():
        known = lengths[on_tokens(name)]
        for i, row in enumerate(found):
            if row is None:
                continue
            _check_row(name, i, row)
            if known[i] < 0:
                known[i] = len(row)
            elif known[i] != len(row):
                raise ValueError(
                    f"items[{i}].{name}: got {len(row)} entries, expected {known[i]}, as its other fields have"
                )
    sheet = Sheet(lengths[1], np.maximum(lengths[0], 0), Origin())
    over = np.flatnonzero(sheet.responses > sheet.tokens)
    if over.size:
        i = int(over[0])
        raise ValueError(f"items[{i}]: got {sheet.responses[i]} response slots, expected at most {sheet.tokens[i]}")
    device = rows["sequences"][0].device if states else "cpu"
    sheet.device = device
    for name, found in rows.items():
        sheet.columns[name] = column_of(name, found, sheet)
    return sheet


def _check_row(name: str, i: int, row: Any) -> None:
    if row is None:
        return
    if not isinstance(row, torch.Tensor):
        raise ValueError(f"items[{i}].{name}: got {type(row).__name__}, expected a tensor")
    if row.dim() != 1 and not (row.dim() and name.startswith("extras.")):
        raise ValueError(f"items[{i}].{name}: got shape {list(row.shape)}, expected one dimension")


def column_of(name: str, rows: list[Any], sheet: Sheet) -> Column | None:
    """Rows as one column; what is absent is filled in, and noted."""
    present = [row for row in rows if row is not None]
    lengths = sheet.lengths(name)
    if not present:
        return _implied_mask(name, lengths, sheet)
    model = present[0]
    dtype = model.dtype
    dtypes = {row.dtype for row in present}
    if len(dtypes) > 1:
        joined = promote(str(kind).removeprefix("torch.") for kind in dtypes)
        if joined is None:
            shown = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"{name}: got items of types {shown}, expected types that one can hold exactly")
        dtype = getattr(torch, joined)
        sheet.origin.dtypes[name] = tuple(dtype if row is None else row.dtype for row in rows)
        rows = [row if row is None else row.to(dtype) for row in rows]
    if len(present) < len(rows):
        sheet.origin.absent[name] = frozenset(i for i, row in enumerate(rows) if row is None)
        fill = BATCH_FIELDS[name].absent if name in BATCH_FIELDS else 0
        rows = [
            model.new_full((int(length), *model.shape[1:]), fill, dtype=dtype) if row is None else row
            for row, length in zip(rows, lengths, strict=True)
        ]
    if model.dim() > 1 and len({row.shape[1:] for row in rows}) > 1:
        shown = ", ".join(str(list(row.shape)) for row in rows)
        raise ValueError(f"{name}: got shapes {shown}, expected all but the first size to be the same")
    try:
        return segments(rows)
    except RuntimeError as error:
        raise ValueError(f"{name}: the items cannot be put into one tensor: {error}") from None


def _implied_mask(name: str, lengths: Lengths, sheet: Sheet) -> torch.Tensor | None:
    """No mask says that everything counts; where rows differ in length, padding must be told from that."""
    absent = BATCH_FIELDS[name].absent if name in BATCH_FIELDS else 0
    if not absent or len(set(lengths.tolist())) < 2:
        return None
    sheet.origin.absent[name] = frozenset(range(len(lengths)))
    return constant(absent, int(lengths.sum()), torch.int64 if on_tokens(name) else torch.bool, sheet.device)


# --- items without their padding ----------------------------------------------------------------------------------


def unpadded_item(i: int, item: BufferItem) -> BufferItem:
    """A new item: what is attended of the tokens, and the response slots that speak of it."""
    if not isinstance(item, BufferItem):
        raise ValueError(f"items[{i}]: got {type(item).__name__}, expected a BufferItem")
    source = item.__dict__.get("_source")
    if source is not None and len(item.__dict__) == 1 and source[0].compact:
        return BufferItem.of(*source)
    given = item.__getstate__()
    fields = token_fields(item)
    width, slots = None, None
    for name, value in fields:
        _check_row(name, i, value)
        if value is None:
            continue
        size = len(value)
        if on_tokens(name):
            width = size if width is None else width
        else:
            slots = size if slots is None else slots
        if size != (width if on_tokens(name) else slots):
            raise ValueError(f"items[{i}].{name}: got {size} entries, expected {width if on_tokens(name) else slots}")
    if width is None or item.sequences is None:
        raise ValueError(f"items[{i}].sequences: got None, expected token ids")
    mask = None if item.attention_mask is None else item.attention_mask.reshape(1, -1)
    tokens, responses = _spans(mask, 1, width, slots or 0, np.array([item.action_start]))
    (first,), (length,), (start,), (kept,) = tokens.starts, tokens.lengths, responses.starts, responses.lengths

    def cut(name: str, value: Any) -> Any:
        at, size = (first, length) if on_tokens(name) else (start, kept)
        return None if value is None else value[at : at + size].detach().clone()

    for name, value in fields:
        if name in BATCH_FIELDS:
            given[name] = cut(name, value)
    if item.extras:
        given["extras"] = {name: cut(f"extras.{name}", value) for name, value in item.extras.items()}
    given["info"] = own(item.info, tensors=True)
    given["action_start"] = 0
    return BufferItem(**given)


def padding_removed(items: Sequence[Any]) -> list[Any]:
    """The items themselves where they have no padding, new ones without it where they have."""
    return [item if _bare(item) else unpadded_item(i, item) for i, item in enumerate(items)]


def _bare(item: Any) -> bool:
    if not isinstance(item, BufferItem):
        return True  # it is refused later, by name
    state = item.__dict__
    if "_source" in state and state["_source"][0].compact and not state.keys() & {"attention_mask", "action_start"}:
        return True
    mask = item.attention_mask
    padded_mask = isinstance(mask, torch.Tensor) and bool(mask.numel()) and not (mask[0] and mask[-1])
    return not (item.action_start or padded_mask)


# --- from batches -------------------------------------------------------------------------------------------------


def sheet_of_batch(batch: ExperienceBatch, pool: Pool | None = None) -> Sheet:
    """The sheet of a batch: of a padded one, what is attended; media kept in the pool, if there is one."""
    count = len(batch)
    values = _token_values(batch)
    if batch.layout == "packed":
        sheet = Sheet(*_packed_lengths(batch, values), batch.origin)
        for name, value in values.items():
            if value is not None:
                value = value.values.clone() if isinstance(value, Rows) else torch.cat(list(value)) if count else value
            sheet.columns[name] = value
    else:
        width, slots = batch.sequences.shape[1], 0
        slots = next((v.shape[1] for name, v in values.items() if v is not None and not on_tokens(name)), 0)
        starts = np.zeros(count, dtype=np.int64)
        if batch.action_starts is not None:
            starts = np.asarray(batch.action_starts.cpu(), dtype=np.int64)
            if starts.shape != (count,) or (starts < 0).any() or (starts > slots).any():
                raise ValueError(f"action_starts: got {starts.tolist()}, expected {count} numbers from 0 to {slots}")
        tokens, responses = _spans(batch.attention_mask, count, width, slots, starts)
        sheet = Sheet(tokens.lengths, responses.lengths, batch.origin)
        for name, value in values.items():
            spans = tokens if on_tokens(name) else responses
            if value is None:
                sheet.columns[name] = None
            elif name == "attention_mask" and tokens.solid:
                sheet.columns[name] = constant(1, int(tokens.lengths.sum()), value.dtype, value.device)
            else:
                sheet.columns[name] = spans.unpad(value)
    sheet.info = own(batch.info, tensors=True)
    for name in SAMPLE_LISTS:
        sheet.lists[name] = checked_list(name, getattr(batch, name), count)
    sheet.media = media_of_batch(batch)
    if pool is not None:
        sheet.keep_media(pool)
    sheet.device = batch.sequences[0].device if count else "cpu"
    return sheet


def _token_values(batch: ExperienceBatch) -> dict[str, Any]:
    """The per-token fields, once they are known to agree."""
    values: dict[str, Any] = dict(token_fields(batch))
    count, is_packed = len(batch), batch.layout == "packed"
    widths: dict[bool, tuple[str, int]] = {}
    for name, value in values.items():
        if value is None:
            continue
        kind: Any = list if is_packed else torch.Tensor
        if not isinstance(value, kind):
            expected = "a list of tensors" if is_packed else "a tensor"
            raise ValueError(f"{name}: got {type(value).__name__}, expected {expected}, as the batch is {batch.layout}")
        if len(value) != count if is_packed or value.dim() else True:
            got = len(value) if is_packed or value.dim() else "no"
            raise ValueError(f"{name}: got {got} rows, expected {count}, as sequences has")
        if is_packed:
            continue
        if value.dim() < 2 or (value.dim() > 2 and name in BATCH_FIELDS):
            raise ValueError(f"{name}: got shape {list(value.shape)}, expected two dimensions")
        first, width = widths.setdefault(on_tokens(name), (name, value.shape[1]))
        if value.shape[1] != width:
            raise ValueError(f"{name}: got {value.shape[1]} columns, expected {width}, as {first} has")
    if False in widths and widths[False][1] > widths[True][1]:
        name, width = widths[False]
        raise ValueError(f"{name}: got {width} columns, expected at most {widths[True][1]}, as sequences has")
    return values


def _packed_lengths(batch: ExperienceBatch, values: dict[str, Any]) -> tuple[Lengths, Lengths]:
    lengths = [np.full(len(batch), -1, dtype=np.int64) for _ in range(2)]
    for name, value in values.items():
        known = lengths[on_tokens(name)]
        for i, row in enumerate(value or ()):
            if not isinstance(row, torch.Tensor) or not row.dim():
                raise ValueError(f"{name}[{i}]: got {type(row).__name__}, expected a tensor of one dimension")
            if known[i] >= 0 and len(row) != known[i]:
                raise ValueError(f"{name}[{i}]: got {len(row)} entries, expected {known[i]}, as its other fields have")
            known[i] = len(row)
    return lengths[1], np.maximum(lengths[0], 0)


def _spans(mask: torch.Tensor | None, count: int, width: int, slots: int, starts: Lengths) -> tuple[Spans, Spans]:
    """Where in padded rows the samples' tokens lie, and their response slots.

    A row's tokens go from the first that is attended to the last. Slot j speaks of token `width - slots + j`, and goes
    with it; slots before `starts` are padding.
    """
    solid = False
    if mask is None or not width:
        first, last = np.zeros(count, dtype=np.int64), np.full(count, width, dtype=np.int64)
    else:
        kept = (mask.detach() != 0).cpu().numpy()
        first = kept.argmax(axis=1)
        last = width - kept[:, ::-1].argmax(axis=1)
        none = ~kept[np.arange(count), first]
        first, last = np.where(none, width, first), np.where(none, width, last)
        solid = mask.dtype == torch.bool and all(
            row[a:b].all() for row, a, b in zip(kept, first.tolist(), last.tolist(), strict=True)
        )
    begin = np.maximum(starts, first - (width - slots))
    end = np.maximum(np.minimum(slots, last - (width - slots)), begin)
    tokens = Spans(last - first, first, width)
    tokens.solid = solid
    return tokens, Spans(end - begin, begin, slots)


def checked_list(name: str, value: Any, count: int) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.dim() == 1 else list(value)
    if len(value) != count:
        raise ValueError(f"{name}: got {len(value)} entries, expected {count}, one for each sample")
    return list(value)


def media_of_batch(batch: ExperienceBatch) -> dict[str, list[Any] | None]:
    """Each sample's media: views of the batch's tensors."""
    count = len(batch)
    result: dict[str, list[Any] | None] = {}
    rows: dict[str, list[int]] = {}
    for pixels, grids, number in (
        ("pixel_values", "image_grid_thws", "image_num"),
        ("pixel_values_videos", "video_grid_thws", "video_num"),
    ):
        shapes, data = getattr(batch, grids), getattr(batch, pixels)
        known = batch.origin.media_rows
        counts = _counts(batch, number)
        if isinstance(shapes, torch.Tensor):
            if shapes.dim() != 2:
                raise ValueError(f"{grids}: got shape {list(shapes.shape)}, expected two dimensions")
            rows[grids] = list(known.get(grids) or counts or ([1] * count if len(shapes) == count else ()))
            if not rows[grids]:
                raise ValueError(
                    f"{grids}: got {len(shapes)} rows for {count} samples, expected info[{number!r}] to say how many "
                    "each sample has"
                )
        result[grids] = _divided(grids, shapes, rows.get(grids), count, batch.origin.absent.get(grids), empty=None)
        if isinstance(data, torch.Tensor):
            rows[pixels] = list(known.get(pixels) or _pixel_rows(pixels, data, result[grids], counts, count))
        result[pixels] = _divided(pixels, data, rows.get(pixels), count, batch.origin.absent.get(pixels), empty=0)
    for key, tensors in (batch.media or {}).items():
        result[f"media.{key}"] = checked_list(f"media[{key!r}]", tensors, count)
    return result


def _counts(batch: ExperienceBatch, number: str) -> list[int] | None:
    """How many images each sample has, if `info` says so."""
    given = (batch.info or {}).get(number)
    if given is None:
        return None
    counts = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    if len(counts) != len(batch) or not all(float(c).is_integer() and c >= 0 for c in counts):
        raise ValueError(f"info[{number!r}]: got {counts}, expected {len(batch)} whole numbers")
    return [int(c) for c in counts]


def _pixel_rows(name: str, data: torch.Tensor, grids: Any, counts: list[int] | None, count: int) -> list[int]:
    if grids is not None:
        return [0 if grid is None else int(grid.reshape(-1, grid.shape[-1]).prod(-1).sum()) for grid in grids]
    if counts and sum(counts) and len(data) % sum(counts) == 0:
        each = len(data) // sum(counts)  # without grids every image has as many rows
        return [each * number for number in counts]
    if count and len(data) % count == 0:
        return [len(data) // count] * count
    raise ValueError(f"{name}: got {len(data)} rows for {count} samples, expected grids that say how many each has")


def _divided(name: str, value: Any, rows: list[int] | None, count: int, absent: Any, empty: int | None) -> Any:
    """Each sample's part: `None` where it is absent, or where it is empty and that is what emptiness means."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return checked_list(name, value, count)
    if rows is None or len(rows) != count or sum(rows) != len(value):
        raise ValueError(f"{name}: got {len(value)} rows, expected {sum(rows or ())}, those of {count} samples")
    parts: list[Any] = list(torch.split(value, rows))
    if absent is not None:
        return [None if i in absent else part for i, part in enumerate(parts)]
    return [None if empty is None and not len(part) else part for part in parts]


# --- to batches ---------------------------------------------------------------------------------------------------


def packed(sheet: Sheet) -> ExperienceBatch:
    """The packed batch of a sheet."""
    tokens, responses = sheet.tokens.tolist(), sheet.responses.tolist()

    def rows(name: str, column: Column) -> Rows:
        values = concatenated(column, sheet.lengths(name)).contiguous()
        return Rows(values, tokens if on_tokens(name) else responses)

    return _batch(sheet, rows, None)


def padded(sheet: Sheet, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
    """The padded batch of a sheet."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)):
        raise ValueError(f"pad_token_id: got {pad_token_id!r}, expected a token id")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")
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

    def matrix(name: str, column: Column) -> torch.Tensor:
        spans = tokens if on_tokens(name) else responses
        source = name.removeprefix("extras.")
        fill = pad_token_id if name == "sequences" else FIELDS[source].pad if source in FIELDS else 0
        return spans.pad(column, fill)

    return _batch(sheet, matrix, starts)


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
            media[name.removeprefix("media.")] = None if parts is None else list(parts)
        else:
            given[name] = _joined(name, parts, origin)
    if starts is not None:
        starts = starts.to(sheet.device)
    return ExperienceBatch(
        **given,
        info=sheet.info,
        labels=sheet.lists.get("labels"),
        references=sheet.lists.get("references"),
        ids=sheet.lists.get("ids"),
        raw_images=sheet.lists.get("raw_images"),
        media=media or None,
        extras=extras or None,
        action_starts=starts,
        origin=origin,
    )


def _joined(name: str, parts: list[Any] | None, origin: Origin) -> torch.Tensor | None:
    """The samples' media in one tensor, with what is needed to divide it again."""
    present = [part for part in parts or () if part is not None]
    if not present or parts is None:
        return None
    for i, part in enumerate(parts):
        if part is not None and not isinstance(part, torch.Tensor):
            raise ValueError(f"items[{i}].{name}: got {type(part).__name__}, expected a tensor")
    if "grid" in name:
        parts = [part.unsqueeze(0) if part is not None and part.dim() == 1 else part for part in parts]
        present = [part for part in parts if part is not None]
    for i, part in enumerate(parts):
        if part is not None and (
            not part.dim() or part.shape[1:] != present[0].shape[1:] or part.dtype != present[0].dtype
        ):
            raise ValueError(
                f"items[{i}].{name}: got {list(part.shape)} of {part.dtype}, expected (rows, "
                f"{', '.join(map(str, present[0].shape[1:]))}) of {present[0].dtype}, as others have"
            )
    absent = frozenset(i for i, part in enumerate(parts) if part is None)
    origin.absent[name] = absent
    origin.media_rows[name] = tuple(0 if part is None else len(part) for part in parts)
    return torch.cat(present)


# --- to items -----------------------------------------------------------------------------------------------------


def items_of_batch(batch: ExperienceBatch, pool: Pool) -> list[BufferItem]:
    """The samples of a batch without their padding, on the sheet's memory; media shared through the pool."""
    sheet = sheet_of_batch(batch, pool)
    return [BufferItem.of(sheet, i) for i in range(len(sheet))]


def padded_items_of_batch(batch: ExperienceBatch, pool: Pool) -> list[BufferItem]:
    """The samples of a padded batch as wide as it is, each on memory of its own."""
    count, width = batch.sequences.shape if batch.sequences.dim() == 2 else (len(batch), 0)
    values = _token_values(batch)
    slots = next((v.shape[1] for name, v in values.items() if v is not None and not on_tokens(name)), 0)
    sheet = Sheet(np.full(count, width, dtype=np.int64), np.full(count, slots, dtype=np.int64), batch.origin)
    sheet.info = own(batch.info, tensors=True)
    for name in SAMPLE_LISTS:
        sheet.lists[name] = checked_list(name, getattr(batch, name), count)
    sheet.media = media_of_batch(batch)
    sheet.keep_media(pool)
    rows: dict[str, Any] = {}
    for name, value in values.items():
        if value is not None:
            found: list[Any] = unbind_copy(value) if count else []
            if name in batch.origin.dtypes:
                found = [row.to(kind) for row, kind in zip(found, batch.origin.dtypes[name], strict=True)]
            for i in batch.origin.absent.get(name, ()):
                found[i] = None
            rows[name] = found
    starts = None if batch.action_starts is None else batch.action_starts.tolist()
    items = []
    for i in range(count):
        item = BufferItem.of(sheet, i)
        for name in BATCH_FIELDS:
            item.__dict__[name] = rows[name][i] if name in rows else None
        extras = {
            n.removeprefix("extras."): r[i] for n, r in rows.items() if n not in BATCH_FIELDS and r[i] is not None
        }
        item.__dict__["extras"] = extras or None
        item.__dict__["action_start"] = 0 if starts is None else starts[i]
        items.append(item.detach())
    return items
