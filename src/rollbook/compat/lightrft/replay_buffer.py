"""Split, unpad and batch, and the buffer in memory: LightRFT's `replay_buffer_utils` and `replay_buffer`.

Invariant: `remove_padding_in_sequences(split_experience_batch(make_experience_batch(items)))` is `items`, for every
field, in every order, whichever items lack which; items own compact memory, and media are kept once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from rollbook.batch.columns import custom_columns, mask_unpredicted, token_counts
from rollbook.compat.lightrft.batch import (
    ITEM_DEFAULTS,
    BufferItem,
    BufferItemVL,
    Device,
    ExperienceBatch,
    InfoOrigin,
    Origin,
    Records,
    collate_info,
    peek,
    pick_info,
)
from rollbook.compat.lightrft.ragged_batch import (
    SAMPLE_LISTS,
    Lengths,
    PaddedRaggedBatch,
    RaggedBatch,
    action_starts,
    check_layout,
    checked,
    constant,
    count_media,
    edges,
    on_tokens,
    own_entry,
    packed,
    padded,
    sheet_of_batch,
    still_absent,
    unpadded,
)
from rollbook.core.errors import RollbookError, explain_missing
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.fields import BATCH_FIELDS, BATCH_MEDIA, FIELDS
from rollbook.core.media import SHARED, Pool, carries_media
from rollbook.core.ragged import Ragged, offsets_of, promote
from rollbook.core.rows import LARGE, Column, Rows, Segments, blank, check_fill, concatenated, empty, memory, segments


def sheet_of_items(items: Sequence[Any]) -> RaggedBatch:
    """The sheet of buffer items, each as it is (padding that an item still has is taken for content)."""
    for i, item in enumerate(items):
        if not isinstance(item, BufferItem) or len(item.__dict__) > 1:
            check_item(i, item)
    states = [item.__dict__ for item in items]
    touched = set[str]().union(*states)
    sheet = _lying(states, touched) or _gathered(states)

    detached = not any("_source" in state for state in states)

    def values(name: str) -> list[Any]:
        if detached:
            default = ITEM_DEFAULTS.get(name)
            return [state.get(name, default) for state in states]
        return [peek(state, name) for state in states]

    # Rows that nobody touched since their sheet was made are taken from its columns.
    sources = [state.get("_source") for state in states]
    first = sources[0]
    is_single = first is not None and all(source is not None and source[0] is first[0] for source in sources)
    single = first[0] if is_single else None
    if single is not None and single.info_arrays is not None and not touched & {"info", "info_kinds"}:
        sheet.info = pick_info(single.info_arrays, np.array([row for _, row in sources]))
    else:
        infos = values("info")
        sheet.info, sheet.origin.info = collate_info(infos, values("info_kinds"))
        if bare := frozenset(i for i, info in enumerate(infos) if info is None):
            sheet.origin.absent["info"] = bare
    for name, item_name in SAMPLE_LISTS.items():
        if single is None or item_name in touched or single.lists.get(name) is not None:
            entries = _listed(values(item_name))
            sheet.lists[name] = entries and [own_entry(name, entry) for entry in entries]
    for name in BATCH_MEDIA:
        if single is None or name in touched or single.media.get(name) is not None:
            sheet.media[name] = _listed(values(name))
    if single is None or "media" in touched or any(name.startswith("media.") for name in single.media):
        media = values("media")
        for key in dict.fromkeys(key for source in media for key in source or ()):
            sheet.media[f"media.{key}"] = [(source or {}).get(key) for source in media]
    if sheet.info is not None:
        count_media(sheet.media, sheet.info, sheet.origin.info)
    return sheet


def check_item(i: int, item: BufferItem) -> None:
    """Refuse what is no item, or holds what an item cannot."""
    if not isinstance(item, BufferItem):
        raise ValueError(f"items[{i}]: got {type(item).__name__}, expected a BufferItem")
    state = item.__dict__
    for name in ("info", "extras", "media"):
        if not isinstance(state.get(name), (dict, type(None))):
            raise ValueError(f"items[{i}].{name}: got {type(state[name]).__name__}, expected a dict")
    start = state.get("action_start", 0)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ValueError(f"items[{i}].action_start: got {start!r}, expected a whole number")


def _listed(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def drawn(items: Sequence[Any], pad_token_id: int, packing_samples: bool = False) -> ExperienceBatch | None:
    """The left-padded or packed batch of items that nobody touched since they were split, if it is a plain one.

    The same as by way of a sheet, in half the time: a trainer draws thousands of small batches.
    """
    states = [item.__dict__ for item in items if type(item) is BufferItem]
    sources: list[Any] = [state.get("_source") if len(state) == 1 else None for state in states]
    if len(sources) != len(items) or None in sources:
        return None
    sheets = {id(sheet): sheet for sheet, _ in sources}
    first = sources[0][0]
    if type(pad_token_id) is not int or not all(
        sheet.plain and sheet.kinds == first.kinds for sheet in sheets.values()
    ):
        return None
    fields: dict[str, Any] = {}
    origin = Origin()
    if len(sheets) == 1 and first.info_arrays is not None:
        fields["info"] = pick_info(first.info_arrays, np.array([i for _, i in sources]))
    else:
        infos = [sheet.infos[0][i] for sheet, i in sources]
        fields["info"], origin.info = collate_info(infos, [sheet.value("info_kinds", i) for sheet, i in sources])
    if any(sheet.listed for sheet in sheets.values()):
        for name, item_name in SAMPLE_LISTS.items():
            fields[name] = _listed([sheet.value(item_name, i) for sheet, i in sources])
    if packing_samples:
        fields |= _drawn_rows(sources, single=len(sheets) == 1)
        return ExperienceBatch.of(fields, origin)
    places = []
    for axis in (0, 1):
        bounds = [(sheet.bounds[axis][i], sheet.bounds[axis][i + 1]) for sheet, i in sources]
        width = max([stop - start for start, stop in bounds])
        # Where a row goes in the matrix, laid flat, and where it comes from: made once for all fields of an axis.
        moves = [
            (slice(end * width - stop + start, end * width), slice(start, stop))
            for end, (start, stop) in enumerate(bounds, 1)
        ]
        places.append((width, moves))
    for name, axis, dtype, trailing, array in first.plain_fields:
        width, moves = places[axis]
        fill = pad_token_id if name == "sequences" else 0
        if fill:
            check_fill(fill, dtype)
        matrix = blank((len(sources), width, *trailing), dtype, fill)
        flat = matrix.numpy().reshape(-1, *trailing)
        if len(sheets) == 1:
            for into, out_of in moves:
                flat[into] = array[out_of]
        else:
            for (sheet, _), (into, out_of) in zip(sources, moves, strict=True):
                flat[into] = sheet.arrays[name][out_of]
        fields[name] = matrix
    width = places[0][0]
    starts = [width - out_of.stop + out_of.start for _, out_of in places[0][1]]
    fields["action_starts"] = torch.from_numpy(np.array(starts)) if any(starts) else None
    return ExperienceBatch.of(fields, origin)


class _Apart(NamedTuple):
    """Items that hold their own tensors, all of them with the same plain fields."""

    states: list[dict[str, Any]]
    arrays: dict[str, list[NDArray[Any]]]
    """By field that they have, each item's."""
    dtypes: dict[str, torch.dtype]
    lengths: tuple[list[int], list[int]]
    """How many response slots and how many tokens each has."""


def _apart(items: Sequence[Any]) -> _Apart | None:
    """The items, if each holds host tensors of its own with one dimension, masks among them, and neither media nor
    extras: what nearly all items are that somebody has read. Of others `None`; they take the longer way, which also
    says what is wrong with them."""
    states = [item.__dict__ for item in items if type(item) is BufferItem]
    if len(states) != len(items):
        return None
    for state in states:
        if "_source" in state or not isinstance(state["info"], dict) or type(state.get("action_start", 0)) is not int:
            return None
        if state.get("implied"):
            return None
        for name in _NOT_PLAIN:
            if name in state and state[name] is not None:
                return None
    arrays: dict[str, list[NDArray[Any]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    lengths: list[list[int] | None] = [None, None]
    for name in BATCH_FIELDS:
        rows = [state.get(name) for state in states]
        model = rows[0]
        if model is None:
            if any(row is not None for row in rows):
                return None
            continue
        try:
            arrays[name] = columns = list(map(torch.Tensor.numpy, rows))  # type: ignore[arg-type]
        except (RuntimeError, TypeError):  # no tensor, on a device, of a type that numpy lacks, or with a gradient
            return None
        kind, axis = columns[0].dtype, on_tokens(name)
        if {column.ndim for column in columns} != {1} or any(column.dtype is not kind for column in columns):
            return None
        sizes = list(map(len, columns))
        if lengths[axis] is None:
            lengths[axis] = sizes
        elif lengths[axis] != sizes:
            return None
        dtypes[name] = model.dtype
    responses, tokens = lengths
    if (
        not all(name in arrays for name in ("sequences", "attention_mask", "action_mask"))
        or not responses
        or not tokens
    ):
        return None
    if any(slots > size for slots, size in zip(responses, tokens, strict=True)):
        return None
    return _Apart(states, arrays, dtypes, (responses, tokens))


_NOT_PLAIN = (*BATCH_MEDIA, "raw_images", "media", "extras")


def batch_of_apart(items: Sequence[Any], pad_token_id: int, packing_samples: bool = False) -> ExperienceBatch | None:
    """The left-padded or packed batch of items that hold plain tensors of their own, as `drawn` makes it of others."""
    apart = _apart(items) if type(pad_token_id) is int else None
    if apart is None or any(state.get("action_start") for state in apart.states):
        return None
    states = apart.states
    if packing_samples and not all(mask.size and mask[0] and mask[-1] for mask in apart.arrays["attention_mask"]):
        return None  # padding that is not to be packed
    fields: dict[str, Any] = {**_sample_lists(states)}
    origin = Origin()
    fields["info"], origin.info = _collated(states)
    if packing_samples:
        for name, rows in apart.arrays.items():
            fields[name] = Rows(_joined(rows, apart.dtypes[name]), apart.lengths[on_tokens(name)])
        return ExperienceBatch.of(fields, origin)
    width = [max(lengths) for lengths in apart.lengths]
    ends = [
        [slice(end * size - n, end * size) for end, n in enumerate(lengths, 1)]
        for size, lengths in zip(width, apart.lengths, strict=True)
    ]
    for name, rows in apart.arrays.items():
        axis, dtype = on_tokens(name), apart.dtypes[name]
        fill = pad_token_id if name == "sequences" else 0
        if fill:
            check_fill(fill, dtype)
        fields[name] = matrix = blank((len(states), width[axis]), dtype, fill)
        flat = matrix.numpy().reshape(-1)
        for place, row in zip(ends[axis], rows, strict=True):
            flat[place] = row
    starts = [width[0] - n for n in apart.lengths[0]]
    fields["action_starts"] = torch.from_numpy(np.array(starts)) if any(starts) else None
    return ExperienceBatch.of(fields, origin)


def _joined(rows: list[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    """Arrays of one type end to end."""
    total = sum(map(len, rows))
    if total * dtype.itemsize < LARGE:
        return torch.from_numpy(np.concatenate(rows))
    values = empty((total, *rows[0].shape[1:]), dtype)
    np.concatenate(rows, out=memory(values))
    return values


def _drawn_rows(sources: list[tuple[RaggedBatch, int]], single: bool) -> dict[str, Rows]:
    """By field, the rows of plain sheets end to end; `single`: they are all of one sheet."""
    first = sources[0][0]
    bounds = [[slice(sheet.bounds[axis][i], sheet.bounds[axis][i + 1]) for sheet, i in sources] for axis in (0, 1)]
    lengths = [[row.stop - row.start for row in rows] for rows in bounds]
    columns: dict[str, Rows] = {}
    # Rows that lie one after the other are copied at once: a draw of a whole buffer in order, as for a forward pass.
    adjoin = (
        single
        and all(a.stop == b.start for a, b in pairwise(bounds[1]))
        and all(a.stop == b.start for a, b in pairwise(bounds[0]))
    )
    for name, axis, dtype, _, array in first.plain_fields:
        if adjoin:
            parts = [array[bounds[axis][0].start : bounds[axis][-1].stop]]
        elif single:
            parts = [array[row] for row in bounds[axis]]
        else:
            parts = [sheet.arrays[name][row] for (sheet, _), row in zip(sources, bounds[axis], strict=True)]
        columns[name] = Rows(_joined(parts, dtype), lengths[axis])
    return columns


def _lying(states: list[dict[str, Any]], touched: set[str]) -> RaggedBatch | None:
    """The sheet of rows of other sheets, without making tensors of them; `None` where that cannot be."""
    sources: list[Any] = [state.get("_source") for state in states]
    if "extras" in touched or None in sources:
        return None
    sheets = {id(sheet): sheet for sheet, _ in sources}
    first = next(iter(sheets.values()))
    if not all(sheet.regular and sheet.kinds == first.kinds for sheet in sheets.values()):
        return None
    starts = [[sheet.bounds[axis][i] for sheet, i in sources] for axis in (0, 1)]
    stops = [[sheet.bounds[axis][i + 1] for sheet, i in sources] for axis in (0, 1)]
    responses, tokens = (np.array(stops[axis]) - np.array(starts[axis]) for axis in (0, 1))
    sheet = RaggedBatch(tokens, responses, Origin())
    for name, (dtype, trailing) in first.kinds.items():
        if dtype is None and name not in touched:
            sheet.columns[name] = None
        elif name not in touched:
            axis = on_tokens(name)
            arrays = repeat(first.arrays[name]) if len(sheets) == 1 else [sheet.arrays[name] for sheet, _ in sources]
            sheet.columns[name] = Segments(arrays, starts[axis], stops[axis], dtype, trailing)
        else:
            rows = [peek(state, name) for state in states]
            expected = sheet.lengths(name).tolist()
            if any(row is not None and len(row) != n for row, n in zip(rows, expected, strict=True)):
                return None  # assigned anew, with a length of their own
            for i, row in enumerate(rows):
                _check_row(name, i, row)
            sheet.columns[name] = column_of(name, rows, sheet)
    return sheet


def _gathered(states: list[dict[str, Any]]) -> RaggedBatch:
    """The sheet of items that each hold their own tensors."""
    if any("_source" in state for state in states):
        rows = {name: [_own_or_lying(state, name) for state in states] for name in BATCH_FIELDS}
    else:
        rows = {name: [state.get(name) for state in states] for name in BATCH_FIELDS}
    extras = [peek(state, "extras") for state in states]
    for name in dict.fromkeys(name for entries in extras for name in entries or ()):
        rows[f"extras.{name}"] = [(entries or {}).get(name) for entries in extras]
    for i, row in enumerate(rows["sequences"]):
        if row is None:
            raise ValueError(f"items[{i}].sequences: got None, expected token ids")
    lengths: list[list[int] | None] = [None, None]
    for name, column in rows.items():
        axis = on_tokens(name)
        lengths[axis] = _measured(name, column, lengths[axis])
    tokens, responses = (np.array(lengths[axis] or [-1] * len(states), dtype=np.int64) for axis in (1, 0))
    sheet = RaggedBatch(tokens, np.maximum(responses, 0), Origin())
    over = np.flatnonzero(sheet.responses > sheet.tokens)
    if over.size:
        i = int(over[0])
        raise ValueError(f"items[{i}]: got {sheet.responses[i]} response slots, expected at most {sheet.tokens[i]}")
    device = rows["sequences"][0].device if states else "cpu"
    sheet.device = device
    for name, column in rows.items():
        sheet.columns[name] = column_of(name, column, sheet)
    for i, state in enumerate(states):
        for name in peek(state, "implied"):
            sheet.origin.absent[name] = sheet.origin.absent.get(name, frozenset()) | {i}
    return sheet


def _own_or_lying(state: dict[str, Any], name: str) -> Any:
    """A per-token field of an item with this state, to be read only."""
    source = state.get("_source")
    return state.get(name) if source is None or name in state else source[0].view(name, source[1])


def replace_column(
    items: Sequence[BufferItem], sheets: Sequence[RaggedBatch], name: str, columns: Sequence[torch.Tensor]
) -> None:
    """Have other values in a field of items whose sheets `whole_sheets` gave: they move to copies of those."""
    at = iter(items)
    for sheet, values in zip(sheets, columns, strict=True):
        changed = dataclasses.replace(sheet, columns={**sheet.columns, name: values})
        for i in range(len(sheet)):
            next(at).__dict__["_source"] = changed, i


def whole_sheets(items: Sequence[BufferItem], *names: str) -> list[RaggedBatch] | None:
    """The sheets that the items are all samples of, in order, if these have tensors for the fields and no item has a
    value of its own; `None` of other items."""
    sheets: list[RaggedBatch] = []
    touched = set(names)
    at = 0
    while at < len(items):
        sheet, _ = items[at].__dict__.get("_source", (None, 0))
        if sheet is None or not sheet.regular:
            return None
        if not all(isinstance(sheet.columns.get(name), torch.Tensor) for name in names):
            return None
        states = [item.__dict__ for item in items[at : at + len(sheet)]]
        sources = [state.get("_source") for state in states]
        if sources != [(sheet, i) for i in range(len(sheet))] or not all(map(touched.isdisjoint, states)):
            return None
        sheets.append(sheet)
        at += len(sheet)
    return sheets


def _measured(name: str, rows: list[Any], axis_lengths: list[int] | None) -> list[int] | None:
    """The rows' lengths (-1 where nothing is known yet), held to those that other fields of the axis have."""
    try:
        if set(map(torch.Tensor.dim, rows)) == {1}:
            lengths = list(map(torch.Tensor.numel, rows))
            if axis_lengths is None or lengths == axis_lengths:
                return lengths
    except TypeError:
        pass  # some are absent, or no tensors
    lengths = axis_lengths or [-1] * len(rows)
    for i, row in enumerate(rows):
        if row is None:
            continue
        _check_row(name, i, row)
        if lengths[i] >= 0 and lengths[i] != len(row):
            raise ValueError(
                f"items[{i}].{name}: got {len(row)} entries, expected {lengths[i]}, as its other fields have"
            )
        lengths[i] = len(row)
    return lengths


def _check_row(name: str, i: int, row: torch.Tensor | None) -> None:
    if row is None:
        return
    if not isinstance(row, torch.Tensor):
        raise ValueError(f"items[{i}].{name}: got {type(row).__name__}, expected a tensor")
    if row.dim() != 1 and not (row.dim() and name.startswith("extras.")):
        raise ValueError(f"items[{i}].{name}: got shape {list(row.shape)}, expected one dimension")


def column_of(name: str, rows: list[Any], sheet: RaggedBatch) -> Column | None:
    """Rows as one column; what is absent is filled in, and noted."""
    present = [row for row in rows if row is not None]
    lengths = sheet.lengths(name)
    if not present:
        return None
    model = present[0]
    dtype = model.dtype
    dtypes = set(map(attrgetter("dtype"), present))
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
    if name not in BATCH_FIELDS and len({row.shape[1:] for row in rows}) > 1:
        shown = ", ".join(str(list(row.shape)) for row in rows)
        raise ValueError(f"{name}: got shapes {shown}, expected all but the first size to be the same")
    try:
        return segments(rows)
    except RuntimeError as error:
        raise ValueError(f"{name}: the items cannot be put into one tensor: {error}") from None


# --- items without their padding ----------------------------------------------------------------------------------


def without_padding(items: Sequence[Any]) -> list[BufferItem]:
    """New items: what is attended of the tokens, and the response slots that speak of it."""
    listed, bare = list(items), list[BufferItem]()
    for i, item in enumerate(listed):
        new = _already_bare(i, item)
        if new is None:
            break
        bare.append(new)
    else:
        return bare
    if not bare and (narrowed := _narrowed_apart(listed)) is not None:
        return narrowed
    sheet = _narrowed(sheet_of_items(listed), [peek(item.__dict__, "action_start") for item in listed])
    sheet.keep_media(SHARED)
    return [BufferItem.of(sheet, i) for i in range(len(sheet))]


def _narrowed_apart(items: list[Any]) -> list[BufferItem] | None:
    """`without_padding` of items that hold plain tensors of their own: item by item, with no sheet between."""
    apart = _apart(items)
    if apart is None:
        return None
    masks = apart.arrays["attention_mask"]
    cuts = []
    for i, (state, mask) in enumerate(zip(apart.states, masks, strict=True)):
        start = state.get("action_start", 0)
        slots, tokens = apart.lengths[0][i], apart.lengths[1][i]
        if not 0 <= start <= slots:
            return None
        first, last = edges((mask != 0).tobytes())
        begin = max(start, first - (tokens - slots))
        cuts.append((slice(begin, max(min(slots, last - (tokens - slots)), begin)), slice(first, last)))
    fields = [(name, on_tokens(name), rows) for name, rows in apart.arrays.items()]
    size = sum(cut[axis].stop - cut[axis].start for cut in cuts for _, axis, _ in fields)
    if size > LARGE:
        return _items_of_cuts(apart, cuts)
    narrowed = []
    for i, (state, cut) in enumerate(zip(apart.states, cuts, strict=True)):
        item = BufferItem.__new__(BufferItem)
        new = item.__dict__
        for name, value in state.items():
            if name not in BATCH_FIELDS and name != "action_start":
                new[name] = None if value is None else own_entry(name, value)
        for name in _REQUIRED:
            new[name] = None
        for name, axis, rows in fields:
            new[name] = torch.from_numpy(rows[i][cut[axis]].copy())
        narrowed.append(item)
    return narrowed


def _items_of_cuts(apart: _Apart, cuts: list[tuple[slice, slice]]) -> list[BufferItem]:
    """Items of parts of the rows, on one sheet: much memory is sooner had at once than row by row."""
    responses, tokens = (np.array([cut[axis].stop - cut[axis].start for cut in cuts]) for axis in (0, 1))
    sheet = RaggedBatch(tokens, responses, Origin(), dict.fromkeys(BATCH_FIELDS))
    for name, rows in apart.arrays.items():
        axis = on_tokens(name)
        sheet.columns[name] = _joined([row[cut[axis]] for row, cut in zip(rows, cuts, strict=True)], apart.dtypes[name])
    sheet.info, sheet.origin.info = _collated(apart.states)
    sheet.lists = _sample_lists(apart.states)
    return [BufferItem.of(sheet, i) for i in range(len(sheet))]


def _collated(states: list[dict[str, Any]]) -> tuple[dict[Any, Any], InfoOrigin]:
    return collate_info([state["info"] for state in states], [state.get("info_kinds") for state in states])


def _sample_lists(states: list[dict[str, Any]]) -> dict[str, list[Any] | None]:
    """The lists of a batch, from items that hold their own entries."""
    lists: dict[str, list[Any] | None] = {}
    for name, item_name in SAMPLE_LISTS.items():
        entries = _listed([state.get(item_name) for state in states])
        lists[name] = entries and [own_entry(name, entry) for entry in entries]
    return lists


_REQUIRED = tuple(name for name in BATCH_FIELDS if name not in ITEM_DEFAULTS)


def _already_bare(i: int, item: BufferItem) -> BufferItem | None:
    """The item without padding if a sheet has it: that of an item whose per-token fields nobody has read."""
    state = item.__dict__ if isinstance(item, BufferItem) else {}
    if "_source" not in state or not _PER_TOKEN.isdisjoint(state):
        return None
    if len(state) > 1:
        check_item(i, item)
    sheet, row = state["_source"]
    new = BufferItem.of(sheet.bare if isinstance(sheet, PaddedRaggedBatch) else sheet, row)
    for name in state.keys() - {"_source"}:
        value = state[name]
        if name == "media":
            new.media = value and {key: SHARED.keep(tensor) for key, tensor in value.items()}
        else:
            setattr(new, name, SHARED.keep(value) if name in _MEDIA else own_entry(name, value))
    return new


_PER_TOKEN = frozenset((*BATCH_FIELDS, "extras", "action_start", "implied"))
_MEDIA = (*BATCH_MEDIA, "raw_images")


def _narrowed(sheet: RaggedBatch, starts: list[int]) -> RaggedBatch:
    """A sheet without the padding that its rows still have; each row's own response slots begin at `starts`."""
    over = np.flatnonzero(np.array(starts, dtype=np.int64) > sheet.responses)
    if over.size:
        i = int(over[0])
        raise ValueError(f"items[{i}].action_start: got {starts[i]}, expected 0 to {sheet.responses[i]}")
    first, last = _attended(sheet)
    prompts = sheet.tokens - sheet.responses
    begin = np.maximum(starts, first - prompts)
    end = np.maximum(np.minimum(sheet.responses, last - prompts), begin)
    columns: dict[str, Any] = {}
    for name, column in sheet.columns.items():
        low, high = (first, last) if on_tokens(name) else (begin, end)
        if isinstance(column, torch.Tensor):
            parts = torch.split(column, sheet.lengths(name).tolist())
            columns[name] = torch.cat([part[i:j] for part, i, j in zip(parts, low, high, strict=True)])
        elif isinstance(column, Segments):
            at = np.array(column.starts, dtype=np.int64)
            narrow = column._replace(starts=(at + low).tolist(), stops=(at + high).tolist())
            columns[name] = concatenated(narrow, high - low)
    rest = {"info": sheet.info, "lists": sheet.lists, "media": sheet.media, "device": sheet.device}
    narrowed = RaggedBatch(last - first, end - begin, sheet.origin, columns, **rest)
    still_absent(narrowed)
    return narrowed


def _attended(sheet: RaggedBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B] Where the attended part of each row begins, and where it ends (both its length if there is none)."""
    first, last = np.zeros_like(sheet.tokens), sheet.tokens.copy()
    column = sheet.columns.get("attention_mask")
    rows: list[Any] = []
    if isinstance(column, torch.Tensor):
        rows = [row.cpu().numpy() for row in torch.split(column != 0, sheet.tokens.tolist())]
    elif isinstance(column, Segments):
        rows = [array[i:j] for array, i, j in zip(column.arrays, column.starts, column.stops, strict=False)]
    for i, row in enumerate(rows):
        first[i], last[i] = edges((row != 0).tobytes())
    return first, last


def padding_removed(items: Sequence[Any]) -> Sequence[Any]:
    """The items themselves if they have no padding, new ones without it if some have."""
    return items if all(map(_bare, items)) else without_padding(items)


def _bare(item: BufferItem) -> bool:
    if not isinstance(item, BufferItem):
        return True  # it is refused later, by name
    state = item.__dict__
    if len(state) == 1 and "_source" in state and type(state["_source"][0]) is RaggedBatch:
        return True
    wide = isinstance(state.get("_source", (None,))[0], PaddedRaggedBatch)
    if "_source" in state and not wide and not state.keys() & {"attention_mask", "action_start"}:
        return True  # a sheet has no padding
    mask = _own_or_lying(state, "attention_mask")
    padded_mask = isinstance(mask, torch.Tensor) and bool(mask.numel()) and not (mask[0] and mask[-1])
    return not (peek(state, "action_start") or padded_mask)


# --- to items -----------------------------------------------------------------------------------------------------


def items_of_batch(batch: ExperienceBatch, pool: Pool, device: Device = None) -> list[BufferItem]:
    """The samples of a batch without their padding, on the sheet's memory; media shared through the pool."""
    sheet = sheet_of_batch(batch, in_one=True)
    if device is not None and torch.device(device) != torch.device(sheet.device):
        sheet.move(device)
    sheet.keep_media(pool)
    return [BufferItem.of(sheet, i) for i in range(len(sheet))]


def let_go(items: Sequence[BufferItem]) -> None:
    """Free the first items from their sheet if most of its samples are gone, which it would keep alive."""
    source = items[0].__dict__.get("_source") if items else None
    if source is None:
        return
    left = 0
    while left < len(items) and items[left].__dict__.get("_source", (None,))[0] is source[0]:
        left += 1
    if 2 * left <= len(source[0]):
        for item in items[:left]:
            item.detach()


def padded_items_of_batch(batch: ExperienceBatch, pool: Pool) -> list[BufferItem]:
    """The samples of a padded batch as wide as it is; what is attended is copied."""
    values = checked(batch)
    bare, spans = unpadded(batch, values, in_one=True)
    bare.keep_media(pool)
    starts = action_starts(batch, spans[1].width).tolist()
    wide = PaddedRaggedBatch.of(values, batch.origin.copy(), bare, spans, starts)
    return [BufferItem.of(wide, i) for i in range(len(wide))]


def sheet_of_experiences(experiences: Records) -> RaggedBatch:
    """The sheet of records, from their columns."""
    records = mask_unpredicted(as_experiences(experiences))
    count = len(records)
    tokens, responses = token_counts(records)
    sheet = RaggedBatch(tokens, responses, Origin(), long_tokens=True)
    used = set()
    for batch_field in BATCH_FIELDS.values():
        sources = [name for name in (*batch_field.sources, batch_field.name) if name in FIELDS]
        source = next((name for name in sources if _everywhere(records, name)), sources[-1] if sources else None)
        if source is not None:
            sheet.columns[batch_field.name] = _record_column(records, source, batch_field.name, sheet)
            used.add(source)
        else:
            sheet.columns[batch_field.name] = None
    for name, record_field in FIELDS.items():
        if record_field.kind == "tensor" and record_field.axis == "response" and name not in used:
            column = _record_column(records, name, f"extras.{name}", sheet)
            if column is not None:
                sheet.columns[f"extras.{name}"] = column
    if not count:
        sheet.columns["sequences"] = torch.empty(0, dtype=getattr(torch, FIELDS["tokens"].dtype))
    sheet.columns["attention_mask"] = constant(1, int(tokens.sum()), torch.int64)
    sheet.info, sheet.origin.info = _record_info(records, sheet)
    sheet.lists["ids"] = list(records.eids()) if count else []
    media = records.values("multi_modal_inputs")
    keys = {key: name for name, key in BATCH_MEDIA.items()}
    for key in dict.fromkeys(key for record_field in media for key in record_field or ()):
        sheet.media[keys.get(key, f"media.{key}")] = [(record_field or {}).get(key) for record_field in media]
    count_media(sheet.media, sheet.info, sheet.origin.info)
    return sheet


def _everywhere(records: Experiences, name: str) -> bool:
    column = records.column(name)
    if isinstance(column, Ragged) and column.valid is None:
        return True
    return all(value is not None for value in records.values(name))


def _record_column(records: Experiences, source: str, name: str, sheet: RaggedBatch) -> Column | None:
    """A record field's column as it lies, or put together again where rows are absent or of several types."""
    column = records.column(source)
    if isinstance(column, Ragged) and column.valid is None and column.codes is None:
        if not np.array_equal(column.lengths, sheet.lengths(name)):
            _raise_length(records, source, column.lengths, sheet.lengths(name))
        return column
    values = records.values(source)
    if all(value is None for value in values):
        return None
    lengths = sheet.lengths(name)
    for i, value in enumerate(values):
        if isinstance(value, int):
            values[i] = torch.full((int(lengths[i]),), value, dtype=getattr(torch, FIELDS[source].dtype))
        elif value is not None and (value.dim() != 1 + FIELDS[source].trailing or len(value) != lengths[i]):
            _raise_length(records, source, [len(v) if v is not None and v.dim() else 0 for v in values], lengths)
    if name == "sequences":
        values = [value.long() for value in values]
    return column_of(name, values, sheet)


def _raise_length(records: Experiences, name: str, lengths: Sequence[int] | Lengths, expected: Lengths) -> None:
    i = next(i for i, (a, b) in enumerate(zip(lengths, expected, strict=True)) if a != b)
    raise ValueError(f"record {i} ({records.eids()[i]}): {name}: got {lengths[i]} entries, expected {expected[i]}")


def _record_info(records: Experiences, sheet: RaggedBatch) -> tuple[dict[Any, Any], InfoOrigin]:
    rewards = [{} if reward is None else {"reward": reward} for reward in records.values("reward")]
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
    for name, record_field in FIELDS.items():
        if record_field.kind == "json" and record_field.always:
            values = records.values(name)
            if any(values):
                collated, inner = collate_info(values)
                info[name] = collated
                origin.missing |= {(name, *path): rows for path, rows in inner.missing.items()}
                origin.originals |= {(name, *path): pair for path, pair in inner.originals.items()}
    info |= custom_columns(records)
    return info, origin


try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None


class PaddingSideError(RollbookError, ValueError, AssertionError):
    """The padding side is neither left nor right."""


def is_vl_experience(experience: ExperienceBatch | BufferItem) -> bool:
    """Whether a batch or an item carries media: pixels, grids, images, videos.

    >>> is_vl_experience(BufferItemVL(torch.tensor([1])))
    False
    >>> is_vl_experience(BufferItemVL(torch.tensor([1]), pixel_values=torch.zeros(4, 6)))
    True
    """
    if type(experience) is ExperienceBatch and (
        experience.pixel_values is None
        and experience.image_grid_thws is None
        and experience.raw_images is None
        and experience.pixel_values_videos is None
        and experience.video_grid_thws is None
        and experience.media is None
    ):
        return False  # spelled out: a loop over the names takes several times as long
    return carries_media(experience)


def zero_pad_sequences(sequences: Sequence[torch.Tensor], side: str = "left") -> torch.Tensor:
    """(B, longest) 1-D tensors, padded with zeros to the longest on one side; types are joined as torch does.

    >>> zero_pad_sequences([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    tensor([[1, 2, 3],
            [0, 4, 5]])
    """
    if side not in ("left", "right"):
        raise PaddingSideError(f"side: got {side!r}, expected 'left' or 'right'")
    rows = list(sequences)
    if not rows:
        raise ValueError("sequences: got none, expected at least one")
    for i, row in enumerate(rows):
        if not isinstance(row, torch.Tensor) or row.dim() != 1:
            shown = f"shape {list(row.shape)}" if isinstance(row, torch.Tensor) else type(row).__name__
            raise ValueError(f"sequences[{i}]: got {shown}, expected a 1-D tensor")
    try:
        dtype = reduce(torch.promote_types, {row.dtype for row in rows})
        rows = [row if row.dtype == dtype else row.to(dtype) for row in rows]
        return pad_sequence(rows, batch_first=True, padding_side=side)
    except RuntimeError as error:
        raise ValueError(f"sequences: they cannot be put into one tensor: {error}") from None


@torch.no_grad()
def split_experience_batch(
    experience: ExperienceBatch, *, unpad: bool = False, pool: Pool | None = None
) -> list[BufferItem]:
    """One item for each sample of a batch, nothing lost, each on memory of its own.

    Items of a padded batch are as wide as it is (padding is read from the batch, what is attended is copied);
    `unpad=True` gives what `remove_padding_in_sequences` makes of them. One-element entries of `info` become Python
    numbers, dicts are split by key. Media with the same content are one object in all items that are alive (or, with a
    `rollbook.core.media.Pool`, in all that came through it).

    >>> batch = ExperienceBatch(torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[-1.0], [-2.0]]), *[None] * 4,
    ...                         torch.tensor([[0, 1, 1], [1, 1, 1]]), None, {"reward": torch.tensor([1.0, 0.0])})
    >>> [(item.sequences.tolist(), item.info) for item in split_experience_batch(batch)]
    [([0, 7, 8], {'reward': 1.0}), ([4, 5, 6], {'reward': 0.0})]
    >>> split_experience_batch(batch, unpad=True)[0].sequences.tolist()
    [7, 8]
    """
    if not isinstance(experience, ExperienceBatch):
        raise ValueError(f"experience: got {type(experience).__name__}, expected an ExperienceBatch")
    pool = SHARED if pool is None else pool
    if unpad or experience.layout == "packed":
        return items_of_batch(experience, pool)
    return padded_items_of_batch(experience, pool)


def remove_padding_in_sequences(items: Sequence[BufferItem]) -> list[BufferItem]:
    """New items without their padding: of the tokens what is attended, from the first to the last, and the response
    slots that speak of those. The items given are left alone.

    >>> item = BufferItem(torch.tensor([0, 0, 1, 2, 3, 0, 0]), None, None, None, None, None,
    ...                   torch.tensor([0, 0, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 0, 1, 0, 0]), {})
    >>> bare, = remove_padding_in_sequences([item])
    >>> bare.sequences.tolist(), bare.action_mask.tolist()
    ([1, 2, 3], [1, 0, 1])
    """
    return without_padding(items)


def make_experience_batch(
    items: Sequence[BufferItem], packing_samples: bool = False, *, pad_token_id: int = 0, layout: str = "left"
) -> ExperienceBatch:
    """A batch of items: padded on the left of both axes, or packed.

    Tokens are padded with `pad_token_id`, everything else with 0. Fields and `info` keys that only some items have are
    kept; a row without one reads as padding, and is without it again after a split. A packed batch holds what is
    attended. `layout="prompt_left_response_right"` pads prompts on the left and responses on the right. Of items with
    grids, `info` has `image_num` and `video_num` [B], which items that came without are without again after a split.

    >>> items = [BufferItem(torch.tensor([7, 8]), torch.tensor([-1.0]), *[None] * 6, {"reward": 1.0}),
    ...          BufferItem(torch.tensor([4, 5, 6]), torch.tensor([-2.0, -3.0]), *[None] * 6, {"reward": 0.0})]
    >>> batch = make_experience_batch(items, pad_token_id=9)
    >>> batch.sequences.tolist(), batch.action_log_probs.tolist(), batch.info
    ([[9, 7, 8], [4, 5, 6]], [[0.0, -1.0], [-2.0, -3.0]], {'reward': tensor([1., 0.])})
    """
    listed = list(items)
    if not listed:
        raise ValueError("items: got none, expected at least one")
    check_layout(layout)
    if packing_samples or layout == "left":
        batch = drawn(listed, pad_token_id, packing_samples)
        if batch is None:
            batch = batch_of_apart(listed, pad_token_id, packing_samples)
        if batch is not None:
            return batch
    if packing_samples or layout != "left":
        listed = list(padding_removed(listed))
    sheet = sheet_of_items(listed)
    if packing_samples:
        return packed(sheet)
    batch = padded(sheet, pad_token_id, layout)
    starts = [peek(item.__dict__, "action_start") for item in listed]
    if any(starts):
        # Items that were split with their padding still have it.
        batch.action_starts = torch.tensor(starts) + (0 if batch.action_starts is None else batch.action_starts)
    return batch


def _clear(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the values where the mask is True to 0, whatever they are."""
    if values.is_cpu:
        np.copyto(values.numpy(), 0, where=mask.numpy())
    else:
        values.masked_fill_(mask, 0)


def _end_to_end(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not parts:
        return torch.zeros(0)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class NaiveReplayBuffer:
    """Samples in memory: append batches, sample batches.

    `sample_batch_size` items make a batch; `limit` above 0 keeps the newest so many; `cpu_offload` keeps them in host
    memory; `packing_samples` gives packed batches. `seed` makes sampling repeatable (without one, Python's `random`
    is used); sampled batches go to `device`, the current accelerator if there is one.

    >>> buffer = NaiveReplayBuffer(sample_batch_size=2, seed=0)
    >>> batch = ExperienceBatch(torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[-1.0], [-2.0]]), *[None] * 4,
    ...                         torch.tensor([[0, 1, 1], [1, 1, 1]]), None, {})
    >>> buffer.append(batch)
    >>> len(buffer), buffer[0].sequences.tolist(), sorted(map(len, buffer.sample().sequences.tolist()))
    (2, [7, 8], [3, 3])
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
        *,
        pad_token_id: int = 0,
        seed: int | None = None,
        device: Device = None,
    ) -> None:
        if isinstance(sample_batch_size, bool) or not isinstance(sample_batch_size, int) or sample_batch_size < 1:
            raise ValueError(f"sample_batch_size: got {sample_batch_size!r}, expected a whole number of at least 1")
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise ValueError(f"limit: got {limit!r}, expected a whole number; 0 or less for none")
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.cpu_offload = cpu_offload
        self.packing_samples = packing_samples
        self.pad_token_id = pad_token_id
        if device is None and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
        self.target_device = torch.device("cpu" if device is None else device)
        self.items: list[BufferItem] = []
        self._random = None if seed is None else random.Random(seed)
        self._pool = Pool()

    @torch.no_grad()
    def append(self, experience: ExperienceBatch) -> None:
        """Keep the samples of a batch, without its padding; the batch itself is left alone."""
        if not isinstance(experience, ExperienceBatch):
            raise ValueError(f"experience: got {type(experience).__name__}, expected an ExperienceBatch")
        self.items.extend(items_of_batch(experience, self._pool, "cpu" if self.cpu_offload else None))
        if 0 < self.limit < len(self.items):
            del self.items[: len(self.items) - self.limit]
            self._pool.prune(item.raw_images for item in self.items)
            let_go(self.items)

    @torch.no_grad()
    def sample(self) -> ExperienceBatch:
        """A batch of `sample_batch_size` different samples, at random."""
        if len(self.items) < self.sample_batch_size:
            raise ValueError(
                f"sample: the buffer holds {len(self.items)} samples, expected at least sample_batch_size "
                f"{self.sample_batch_size}"
            )
        batch = self.collate_fn((self._random or random).sample(self.items, self.sample_batch_size))
        return batch.to_device(self.target_device) if self.target_device.type != "cpu" else batch

    def collate_fn(self, batch: Sequence[BufferItem]) -> ExperienceBatch:
        """The items as a batch, for a torch `DataLoader` over the buffer."""
        return make_experience_batch(batch, self.packing_samples, pad_token_id=self.pad_token_id)

    @torch.no_grad()
    def normalize(self, attribute: str, strategy: Any = None) -> None:
        """Shift and scale a response-axis field to mean 0 and variance 1 over the actions of all samples.

        Masked slots do not count, and become 0. `strategy.all_reduce(tensor, "sum")` joins the statistics of all ranks.
        """
        sheets = whole_sheets(self.items, attribute, "action_mask")
        values: list[Any] = [sheet.columns[attribute] for sheet in sheets or ()]
        masks: list[Any] = [sheet.columns["action_mask"] for sheet in sheets or ()]
        if sheets is None or any(a.shape != b.shape for a, b in zip(values, masks, strict=True)):
            sheets, (values, masks) = None, self._rows(attribute)
        every = _end_to_end(values).to(torch.float64, copy=True)
        masked = torch.logical_not(_end_to_end(masks))  # several times as fast as == 0
        _clear(every, masked)
        if every.is_cpu:  # by numpy, whose small operations take a fraction of torch's time
            array: Any = every.numpy()
            count = float(masked.numel() - np.count_nonzero(masked.numpy()))
        else:
            array, count = every, float(masked.numel() - int(masked.sum()))
        sums = [float(array.sum()), count, float(array @ array)]
        if strategy is not None:
            sums = strategy.all_reduce(every.new_tensor(sums), "sum").tolist()
        total, count, squares = sums
        mean = total / count if count else 0.0
        scale = max(squares / count - mean**2, 1e-8) ** -0.5 if count else 0.0
        array -= mean
        array *= scale
        _clear(every, masked)
        if len(values) == 1:
            changed = [every.to(values[0].dtype)]
        else:
            parts = every.split_with_sizes([row.shape[0] for row in values]) if values else ()
            changed = [part.to(row.dtype, copy=True) for part, row in zip(parts, values, strict=True)]
        if sheets is not None:
            replace_column(self.items, sheets, attribute, changed)
            return
        for item, row in zip(self.items, changed, strict=True):
            setattr(item, attribute, row)

    def _rows(self, attribute: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A response-axis field and the action mask of each item, checked."""
        rows, masks = [], []
        for i, item in enumerate(self.items):
            value = getattr(item, attribute, None)
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"attribute: got {attribute!r}, expected a tensor that every item has; items[{i}] lacks it"
                )
            mask = torch.ones_like(value, dtype=torch.bool) if item.action_mask is None else item.action_mask
            if mask.shape != value.shape:
                raise ValueError(
                    f"attribute: got {attribute!r} with shape {list(value.shape)} in items[{i}], expected "
                    f"{list(mask.shape)}, as its action_mask has"
                )
            rows.append(value)
            masks.append(mask)
        return rows, masks

    def clear(self) -> None:
        """Forget everything."""
        self.items.clear()
        self._pool = Pool()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> BufferItem:
        return self.items[index]


__all__ = [
    "BufferItem",
    "BufferItemVL",
    "NaiveReplayBuffer",
    "is_vl_experience",
    "make_experience_batch",
    "remove_padding_in_sequences",
    "split_experience_batch",
    "zero_pad_sequences",
]
