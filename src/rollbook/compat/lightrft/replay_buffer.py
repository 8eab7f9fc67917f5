"""LightRFT's `replay_buffer_utils` and `replay_buffer`: splitting, unpadding and batching of items, and the buffer.

Invariant: `remove_padding_in_sequences(split_experience_batch(make_experience_batch(items)))` equals `items`, for every
field, also if only some items have it. Items own their memory, and equal media are stored once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from rollbook.batch.columns import count_tokens, custom_columns, mask_unpredicted
from rollbook.compat.lightrft.batch import (
    BATCH_FIELDS,
    BATCH_MEDIA,
    ITEM_DEFAULTS,
    MEDIA_FIELDS,
    BufferItem,
    BufferItemVL,
    Device,
    ExperienceBatch,
    InfoOrigin,
    Origin,
    Records,
    collate_info,
    peek_field,
    pick_info,
)
from rollbook.compat.lightrft.ragged_batch import (
    SAMPLE_LISTS,
    Lengths,
    PaddedRaggedBatch,
    PlainField,
    RaggedBatch,
    action_starts,
    check_fields,
    check_layout,
    constant,
    copy_entry,
    count_media,
    find_edges,
    is_token_axis,
    ragged_from_batch,
    remove_padding,
    to_packed,
    to_padded,
    update_absent,
)
from rollbook.core.errors import RollbookError, explain_missing
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.fields import FIELDS
from rollbook.core.media import SHARED, Pool
from rollbook.core.ragged import Ragged, compute_offsets, promote
from rollbook.core.rows import LARGE, Column, Rows, Segments, blank, check_fill, concatenated, empty, memory, segments


def ragged_from_items(items: Sequence[Any]) -> RaggedBatch:
    """Convert buffer items to a ragged batch; padding of an item counts as content."""
    for i, item in enumerate(items):
        if not isinstance(item, BufferItem) or len(item.__dict__) > 1:
            check_item(i, item)
    states = [item.__dict__ for item in items]
    touched = set[str]().union(*states)
    ragged = _ragged_from_views(states, touched) or _ragged_from_tensors(states)

    detached = not any("_source" in state for state in states)

    def values(name: str) -> list[Any]:
        if detached:
            default = ITEM_DEFAULTS.get(name)
            return [state.get(name, default) for state in states]
        return [peek_field(state, name) for state in states]

    # Fields that no item has changed are taken from the columns of their ragged batch.
    sources = [state.get("_source") for state in states]
    first = sources[0]
    is_single = first is not None and all(source is not None and source[0] is first[0] for source in sources)
    single = first[0] if is_single else None
    if single is not None and single.info_arrays is not None and not touched & {"info", "info_kinds"}:
        ragged.info = pick_info(single.info_arrays, np.array([row for _, row in sources]))
    else:
        infos = values("info")
        ragged.info, ragged.origin.info = collate_info(infos, values("info_kinds"))
        if bare := frozenset(i for i, info in enumerate(infos) if info is None):
            ragged.origin.absent["info"] = bare
    for name, item_name in SAMPLE_LISTS.items():
        if single is None or item_name in touched or single.lists.get(name) is not None:
            entries = _none_if_empty(values(item_name))
            ragged.lists[name] = entries and [copy_entry(name, entry) for entry in entries]
    for name in BATCH_MEDIA:
        if single is None or name in touched or single.media.get(name) is not None:
            ragged.media[name] = _none_if_empty(values(name))
    if single is None or "media" in touched or any(name.startswith("media.") for name in single.media):
        media = values("media")
        for key in dict.fromkeys(key for source in media for key in source or ()):
            ragged.media[f"media.{key}"] = [(source or {}).get(key) for source in media]
    if ragged.info is not None:
        count_media(ragged.media, ragged.info, ragged.origin.info)
    return ragged


def check_item(i: int, item: BufferItem) -> None:
    """Raise `ValueError` unless this is a valid item."""
    if not isinstance(item, BufferItem):
        raise ValueError(f"items[{i}]: got {type(item).__name__}, expected a BufferItem")
    state = item.__dict__
    for name in ("info", "extras", "media"):
        if not isinstance(state.get(name), (dict, type(None))):
            raise ValueError(f"items[{i}].{name}: got {type(state[name]).__name__}, expected a dict")
    start = state.get("action_start", 0)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ValueError(f"items[{i}].action_start: got {start!r}, expected an integer")


def _none_if_empty(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def collate_untouched(items: Sequence[Any], pad_token_id: int, packing_samples: bool = False) -> ExperienceBatch | None:
    """Collate items that were not changed since they were split, left-padded or packed; `None` for all others.

    Equal to the general path through a ragged batch, in half the time: a trainer samples thousands of small batches.
    """
    states = [item.__dict__ for item in items if type(item) is BufferItem]
    sources: list[Any] = [state.get("_source") if len(state) == 1 else None for state in states]
    if len(sources) != len(items) or None in sources:
        return None
    ragged_batches = {id(ragged): ragged for ragged, _ in sources}
    first = sources[0][0]
    if type(pad_token_id) is not int or any(
        ragged.plain_fields is None or (ragged is not first and ragged.kinds != first.kinds)
        for ragged in ragged_batches.values()
    ):
        return None
    fields: dict[str, Any] = {}
    origin = Origin()
    if len(ragged_batches) == 1 and first.info_arrays is not None:
        fields["info"] = pick_info(first.info_arrays, np.array([i for _, i in sources]))
    else:
        infos = [ragged.infos[0][i] for ragged, i in sources]
        fields["info"], origin.info = collate_info(infos, [ragged.value("info_kinds", i) for ragged, i in sources])
    if any(ragged.has_lists for ragged in ragged_batches.values()):
        for name, item_name in SAMPLE_LISTS.items():
            fields[name] = _none_if_empty([ragged.value(item_name, i) for ragged, i in sources])
    if packing_samples:
        fields |= _collate_rows(sources, first.plain_fields, single=len(ragged_batches) == 1)
        return ExperienceBatch.of(fields, origin)
    places = []
    for axis in (0, 1):
        bounds = [(ragged.bounds[axis][i], ragged.bounds[axis][i + 1]) for ragged, i in sources]
        width = max([stop - start for start, stop in bounds])
        # Target in the flat matrix and source of each row, computed once for all fields of an axis.
        moves = [
            (slice(end * width - stop + start, end * width), slice(start, stop))
            for end, (start, stop) in enumerate(bounds, 1)
        ]
        places.append((width, moves))
    for name, axis, dtype, array in first.plain_fields:
        trailing = array.shape[1:]
        width, moves = places[axis]
        fill = pad_token_id if name == "sequences" else 0
        if fill:
            check_fill(fill, dtype)
        matrix = blank((len(sources), width, *trailing), dtype, fill)
        flat = matrix.numpy().reshape(-1, *trailing)
        if len(ragged_batches) == 1:
            for into, out_of in moves:
                flat[into] = array[out_of]
        else:
            for (ragged, _), (into, out_of) in zip(sources, moves, strict=True):
                flat[into] = ragged.arrays[name][out_of]
        fields[name] = matrix
    width = places[0][0]
    starts = [width - out_of.stop + out_of.start for _, out_of in places[0][1]]
    fields["action_starts"] = torch.from_numpy(np.array(starts)) if any(starts) else None
    return ExperienceBatch.of(fields, origin)


class _DetachedItems(NamedTuple):
    """Items that own their tensors, all with the same plain fields."""

    states: list[dict[str, Any]]
    arrays: dict[str, list[NDArray[Any]]]
    """By field, the array of each item."""
    dtypes: dict[str, torch.dtype]
    lengths: tuple[list[int], list[int]]
    """Number of response slots and of tokens of each item."""


def _detached_items(items: Sequence[Any]) -> _DetachedItems | None:
    """Return the arrays of items that own one-dimensional host tensors, with masks, without media and extras.

    `None` for all others, which the general path converts, or rejects with an error.
    """
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
        except (RuntimeError, TypeError):  # not a tensor, on a device, of a type that numpy lacks, or with a gradient
            return None
        kind, axis = columns[0].dtype, is_token_axis(name)
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
    return _DetachedItems(states, arrays, dtypes, (responses, tokens))


_NOT_PLAIN = (*MEDIA_FIELDS, "extras")


def collate_detached(items: Sequence[Any], pad_token_id: int, packing_samples: bool = False) -> ExperienceBatch | None:
    """Collate items that own plain tensors, left-padded or packed; `None` for all others."""
    detached_items = _detached_items(items) if type(pad_token_id) is int else None
    if detached_items is None or any(state.get("action_start") for state in detached_items.states):
        return None
    states = detached_items.states
    if packing_samples and not all(
        mask.size and mask[0] and mask[-1] for mask in detached_items.arrays["attention_mask"]
    ):
        return None  # has padding, which must not be packed
    fields: dict[str, Any] = {**_sample_lists(states)}
    origin = Origin()
    fields["info"], origin.info = _collated(states)
    if packing_samples:
        for name, rows in detached_items.arrays.items():
            fields[name] = Rows(_joined(rows, detached_items.dtypes[name]), detached_items.lengths[is_token_axis(name)])
        return ExperienceBatch.of(fields, origin)
    width = [max(lengths) for lengths in detached_items.lengths]
    ends = [
        [slice(end * size - n, end * size) for end, n in enumerate(lengths, 1)]
        for size, lengths in zip(width, detached_items.lengths, strict=True)
    ]
    for name, rows in detached_items.arrays.items():
        axis, dtype = is_token_axis(name), detached_items.dtypes[name]
        fill = pad_token_id if name == "sequences" else 0
        if fill:
            check_fill(fill, dtype)
        fields[name] = matrix = blank((len(states), width[axis]), dtype, fill)
        flat = matrix.numpy().reshape(-1)
        for stop, row in zip(ends[axis], rows, strict=True):
            flat[stop] = row
    starts = [width[0] - n for n in detached_items.lengths[0]]
    fields["action_starts"] = torch.from_numpy(np.array(starts)) if any(starts) else None
    return ExperienceBatch.of(fields, origin)


def _joined(rows: list[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate arrays of one type to a tensor."""
    if len(rows) == 1 and rows[0].nbytes < LARGE:
        return torch.from_numpy(rows[0].copy())
    total = sum(map(len, rows))
    if total * dtype.itemsize < LARGE:
        return torch.from_numpy(np.concatenate(rows))
    values = empty((total, *rows[0].shape[1:]), dtype)
    np.concatenate(rows, out=memory(values))
    return values


def _collate_rows(
    sources: list[tuple[RaggedBatch, int]], plain_fields: list[PlainField], single: bool
) -> dict[str, Rows]:
    """Concatenate rows of plain ragged batches, by field; `single`: all rows are of one ragged batch."""
    first = sources[0][0]
    rows = [row for _, row in sources]
    if single and rows == list(range(rows[0], rows[0] + len(rows))):
        # Copied at once, as when a whole buffer is read in order for a forward pass.
        bounds = [axis_bounds[rows[0] : rows[-1] + 2] for axis_bounds in first.bounds]
        extents = [slice(axis_bounds[0], axis_bounds[-1]) for axis_bounds in bounds]
        lengths = [[stop - start for start, stop in pairwise(axis_bounds)] for axis_bounds in bounds]
        return {
            name: Rows(_joined([array[extents[axis]]], dtype), lengths[axis])
            for name, axis, dtype, array in plain_fields
        }
    spans = [[slice(ragged.bounds[axis][i], ragged.bounds[axis][i + 1]) for ragged, i in sources] for axis in (0, 1)]
    lengths = [[span.stop - span.start for span in axis_spans] for axis_spans in spans]
    columns: dict[str, Rows] = {}
    for name, axis, dtype, array in plain_fields:
        if single:
            parts = [array[span] for span in spans[axis]]
        else:
            parts = [ragged.arrays[name][span] for (ragged, _), span in zip(sources, spans[axis], strict=True)]
        columns[name] = Rows(_joined(parts, dtype), lengths[axis])
    return columns


def _ragged_from_views(states: list[dict[str, Any]], touched: set[str]) -> RaggedBatch | None:
    """Build a ragged batch of rows of others without creating tensors for them; `None` if that is not possible."""
    sources: list[Any] = [state.get("_source") for state in states]
    if "extras" in touched or None in sources:
        return None
    ragged_batches = {id(ragged): ragged for ragged, _ in sources}
    first = next(iter(ragged_batches.values()))
    if not all(ragged.regular and ragged.kinds == first.kinds for ragged in ragged_batches.values()):
        return None
    starts = [[ragged.bounds[axis][i] for ragged, i in sources] for axis in (0, 1)]
    stops = [[ragged.bounds[axis][i + 1] for ragged, i in sources] for axis in (0, 1)]
    responses, tokens = (np.array(stops[axis]) - np.array(starts[axis]) for axis in (0, 1))
    ragged = RaggedBatch(tokens, responses, Origin())
    for name, (dtype, trailing) in first.kinds.items():
        if dtype is None and name not in touched:
            ragged.columns[name] = None
        elif name not in touched:
            axis = is_token_axis(name)
            arrays = (
                repeat(first.arrays[name])
                if len(ragged_batches) == 1
                else [ragged.arrays[name] for ragged, _ in sources]
            )
            ragged.columns[name] = Segments(arrays, starts[axis], stops[axis], dtype, trailing)
        else:
            rows = [peek_field(state, name) for state in states]
            expected = ragged.lengths(name).tolist()
            if any(row is not None and len(row) != n for row, n in zip(rows, expected, strict=True)):
                return None  # assigned since, with another length
            for i, row in enumerate(rows):
                _check_row(name, i, row)
            ragged.columns[name] = make_column(name, rows, ragged)
    return ragged


def _ragged_from_tensors(states: list[dict[str, Any]]) -> RaggedBatch:
    """Build a ragged batch of items that own their tensors."""
    if any("_source" in state for state in states):
        rows = {name: [_view_field(state, name) for state in states] for name in BATCH_FIELDS}
    else:
        rows = {name: [state.get(name) for state in states] for name in BATCH_FIELDS}
    extras = [peek_field(state, "extras") for state in states]
    for name in dict.fromkeys(name for entries in extras for name in entries or ()):
        rows[f"extras.{name}"] = [(entries or {}).get(name) for entries in extras]
    for i, row in enumerate(rows["sequences"]):
        if row is None:
            raise ValueError(f"items[{i}].sequences: got None, expected token ids")
    lengths: list[list[int] | None] = [None, None]
    for name, column in rows.items():
        axis = is_token_axis(name)
        lengths[axis] = _check_lengths(name, column, lengths[axis])
    tokens, responses = (np.array(lengths[axis] or [-1] * len(states), dtype=np.int64) for axis in (1, 0))
    ragged = RaggedBatch(tokens, np.maximum(responses, 0), Origin())
    over = np.flatnonzero(ragged.responses > ragged.tokens)
    if over.size:
        i = int(over[0])
        raise ValueError(f"items[{i}]: got {ragged.responses[i]} response slots, expected at most {ragged.tokens[i]}")
    device = rows["sequences"][0].device if states else "cpu"
    ragged.device = device
    for name, column in rows.items():
        ragged.columns[name] = make_column(name, column, ragged)
    for i, state in enumerate(states):
        for name in peek_field(state, "implied"):
            ragged.origin.absent[name] = ragged.origin.absent.get(name, frozenset()) | {i}
    return ragged


def _view_field(state: dict[str, Any], name: str) -> Any:
    """Return a read-only view of a per-token field of an item with this state."""
    source = state.get("_source")
    return state.get(name) if source is None or name in state else source[0].view(name, source[1])


def replace_column(
    items: Sequence[BufferItem], ragged_batches: Sequence[RaggedBatch], name: str, columns: Sequence[torch.Tensor]
) -> None:
    """Replace a field of items whose ragged batches `source_batches` returned; items then refer to copies of these."""
    at = iter(items)
    for ragged, values in zip(ragged_batches, columns, strict=True):
        changed = dataclasses.replace(ragged, columns={**ragged.columns, name: values})
        for i in range(len(ragged)):
            next(at).__dict__["_source"] = changed, i


def source_batches(items: Sequence[BufferItem], *names: str) -> list[RaggedBatch] | None:
    """Return the ragged batches whose samples the items are, all and in order; `None` for other items.

    The ragged batches must have tensors for the fields `names`, and no item may have its own value of one.
    """
    ragged_batches: list[RaggedBatch] = []
    touched = set(names)
    at = 0
    while at < len(items):
        ragged, _ = items[at].__dict__.get("_source", (None, 0))
        if ragged is None or not ragged.regular:
            return None
        if not all(isinstance(ragged.columns.get(name), torch.Tensor) for name in names):
            return None
        states = [item.__dict__ for item in items[at : at + len(ragged)]]
        sources = [state.get("_source") for state in states]
        if sources != [(ragged, i) for i in range(len(ragged))] or not all(map(touched.isdisjoint, states)):
            return None
        ragged_batches.append(ragged)
        at += len(ragged)
    return ragged_batches


def _check_lengths(name: str, rows: list[Any], axis_lengths: list[int] | None) -> list[int] | None:
    """Return the lengths of rows (-1 if not known yet); raise `ValueError` if other fields of the axis differ."""
    try:
        if set(map(torch.Tensor.dim, rows)) == {1}:
            lengths = list(map(torch.Tensor.numel, rows))
            if axis_lengths is None or lengths == axis_lengths:
                return lengths
    except TypeError:
        pass  # some are `None`, or not tensors
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


def make_column(name: str, rows: list[Any], ragged: RaggedBatch) -> Column | None:
    """Concatenate rows to a column; absent rows are filled in and recorded in `origin`."""
    present = [row for row in rows if row is not None]
    lengths = ragged.lengths(name)
    if not present:
        return None
    model = present[0]
    dtype = model.dtype
    dtypes = set(map(attrgetter("dtype"), present))
    if len(dtypes) > 1:
        promoted = promote(str(kind).removeprefix("torch.") for kind in dtypes)
        if promoted is None:
            shown = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"{name}: got items of types {shown}, expected types with an exact common type")
        dtype = getattr(torch, promoted)
        ragged.origin.dtypes[name] = tuple(dtype if row is None else row.dtype for row in rows)
        rows = [row if row is None else row.to(dtype) for row in rows]
    if len(present) < len(rows):
        ragged.origin.absent[name] = frozenset(i for i, row in enumerate(rows) if row is None)
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
    """Return new items without padding: the attended tokens, and their response slots."""
    listed, bare = list(items), list[BufferItem]()
    for i, item in enumerate(listed):
        new = _reuse_unpadded(i, item)
        if new is None:
            break
        bare.append(new)
    else:
        return bare
    if not bare and (narrowed := _trim_detached(listed)) is not None:
        return narrowed
    ragged = _trim(ragged_from_items(listed), [peek_field(item.__dict__, "action_start") for item in listed])
    ragged.keep_media(SHARED)
    return [BufferItem.of(ragged, i) for i in range(len(ragged))]


def _trim_detached(items: list[Any]) -> list[BufferItem] | None:
    """Compute `without_padding` of items that own plain tensors, without a ragged batch; `None` for all others."""
    detached_items = _detached_items(items)
    if detached_items is None:
        return None
    masks = detached_items.arrays["attention_mask"]
    cuts = []
    for i, (state, mask) in enumerate(zip(detached_items.states, masks, strict=True)):
        start = state.get("action_start", 0)
        slots, tokens = detached_items.lengths[0][i], detached_items.lengths[1][i]
        if not 0 <= start <= slots:
            return None
        first, last = find_edges((mask != 0).tobytes())
        begin = max(start, first - (tokens - slots))
        cuts.append((slice(begin, max(min(slots, last - (tokens - slots)), begin)), slice(first, last)))
    fields = [(name, is_token_axis(name), rows) for name, rows in detached_items.arrays.items()]
    size = sum(row_slices[axis].stop - row_slices[axis].start for row_slices in cuts for _, axis, _ in fields)
    if size > LARGE:
        return _items_from_cuts(detached_items, cuts)
    narrowed = []
    for i, (state, row_slices) in enumerate(zip(detached_items.states, cuts, strict=True)):
        item = BufferItem.__new__(BufferItem)
        new = item.__dict__
        for name, value in state.items():
            if name not in BATCH_FIELDS and name != "action_start":
                new[name] = None if value is None else copy_entry(name, value)
        for name in _REQUIRED:
            new[name] = None
        for name, axis, rows in fields:
            new[name] = torch.from_numpy(rows[i][row_slices[axis]].copy())
        narrowed.append(item)
    return narrowed


def _items_from_cuts(detached_items: _DetachedItems, cuts: list[tuple[slice, slice]]) -> list[BufferItem]:
    """Build items of parts of rows on one ragged batch: one large allocation is faster than one for each row."""
    responses, tokens = (
        np.array([row_slices[axis].stop - row_slices[axis].start for row_slices in cuts]) for axis in (0, 1)
    )
    ragged = RaggedBatch(tokens, responses, Origin(), dict.fromkeys(BATCH_FIELDS))
    for name, rows in detached_items.arrays.items():
        axis = is_token_axis(name)
        ragged.columns[name] = _joined(
            [row[row_slices[axis]] for row, row_slices in zip(rows, cuts, strict=True)], detached_items.dtypes[name]
        )
    ragged.info, ragged.origin.info = _collated(detached_items.states)
    ragged.lists = _sample_lists(detached_items.states)
    return [BufferItem.of(ragged, i) for i in range(len(ragged))]


def _collated(states: list[dict[str, Any]]) -> tuple[dict[Any, Any], InfoOrigin]:
    return collate_info([state["info"] for state in states], [state.get("info_kinds") for state in states])


def _sample_lists(states: list[dict[str, Any]]) -> dict[str, list[Any] | None]:
    """Return the lists of a batch from items that own their entries."""
    lists: dict[str, list[Any] | None] = {}
    for name, item_name in SAMPLE_LISTS.items():
        entries = _none_if_empty([state.get(item_name) for state in states])
        lists[name] = entries and [copy_entry(name, entry) for entry in entries]
    return lists


_REQUIRED = tuple(name for name in BATCH_FIELDS if name not in ITEM_DEFAULTS)


def _reuse_unpadded(i: int, item: BufferItem) -> BufferItem | None:
    """Return the item without padding from its ragged batch; `None` if a per-token field of it was read."""
    state = item.__dict__ if isinstance(item, BufferItem) else {}
    if "_source" not in state or not _PER_TOKEN.isdisjoint(state):
        return None
    if len(state) > 1:
        check_item(i, item)
    ragged, row = state["_source"]
    new = BufferItem.of(ragged.unpadded if isinstance(ragged, PaddedRaggedBatch) else ragged, row)
    for name in state.keys() - {"_source"}:
        value = state[name]
        if name == "media":
            new.media = value and {key: SHARED.keep(tensor) for key, tensor in value.items()}
        else:
            setattr(new, name, SHARED.keep(value) if name in _MEDIA else copy_entry(name, value))
    return new


_PER_TOKEN = frozenset((*BATCH_FIELDS, "extras", "action_start", "implied"))
_MEDIA = (*BATCH_MEDIA, "raw_images")


def _trim(ragged: RaggedBatch, starts: list[int]) -> RaggedBatch:
    """Remove the padding of rows; `starts` [B] are the first response slots."""
    over = np.flatnonzero(np.array(starts, dtype=np.int64) > ragged.responses)
    if over.size:
        i = int(over[0])
        raise ValueError(f"items[{i}].action_start: got {starts[i]}, expected 0 to {ragged.responses[i]}")
    first, last = _attended(ragged)
    prompts = ragged.tokens - ragged.responses
    begin = np.maximum(starts, first - prompts)
    end = np.maximum(np.minimum(ragged.responses, last - prompts), begin)
    columns: dict[str, Any] = {}
    for name, column in ragged.columns.items():
        low, high = (first, last) if is_token_axis(name) else (begin, end)
        if isinstance(column, torch.Tensor):
            parts = torch.split(column, ragged.lengths(name).tolist())
            columns[name] = torch.cat([row[i:j] for row, i, j in zip(parts, low, high, strict=True)])
        elif isinstance(column, Segments):
            at = np.array(column.starts, dtype=np.int64)
            narrow = column._replace(starts=(at + low).tolist(), stops=(at + high).tolist())
            columns[name] = concatenated(narrow, high - low)
    rest = {"info": ragged.info, "lists": ragged.lists, "media": ragged.media, "device": ragged.device}
    narrowed = RaggedBatch(last - first, end - begin, ragged.origin, columns, **rest)
    update_absent(narrowed)
    return narrowed


def _attended(ragged: RaggedBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B] Return the start and end of the attended part of each row (its length twice if there is none)."""
    first, last = np.zeros_like(ragged.tokens), ragged.tokens.copy()
    column = ragged.columns.get("attention_mask")
    rows: list[Any] = []
    if isinstance(column, torch.Tensor):
        rows = [row.cpu().numpy() for row in torch.split(column != 0, ragged.tokens.tolist())]
    elif isinstance(column, Segments):
        rows = [array[i:j] for array, i, j in zip(column.arrays, column.starts, column.stops, strict=False)]
    for i, row in enumerate(rows):
        first[i], last[i] = find_edges((row != 0).tobytes())
    return first, last


def padding_removed(items: Sequence[Any]) -> Sequence[Any]:
    """Return the items if none has padding, else new ones without it."""
    return items if all(map(_is_unpadded, items)) else without_padding(items)


def _is_unpadded(item: BufferItem) -> bool:
    if not isinstance(item, BufferItem):
        return True  # rejected later, with an error
    state = item.__dict__
    if len(state) == 1 and "_source" in state and type(state["_source"][0]) is RaggedBatch:
        return True
    wide = isinstance(state.get("_source", (None,))[0], PaddedRaggedBatch)
    if "_source" in state and not wide and not state.keys() & {"attention_mask", "action_start"}:
        return True  # a ragged batch has no padding
    mask = _view_field(state, "attention_mask")
    padded_mask = isinstance(mask, torch.Tensor) and bool(mask.numel()) and not (mask[0] and mask[-1])
    return not (peek_field(state, "action_start") or padded_mask)


# --- to items -----------------------------------------------------------------------------------------------------


def split_to_items(batch: ExperienceBatch, pool: Pool, device: Device = None) -> list[BufferItem]:
    """Split a batch to items without padding on the memory of one ragged batch; media are stored in the pool."""
    ragged = ragged_from_batch(batch, contiguous=True)
    if device is not None and torch.device(device) != torch.device(ragged.device):
        ragged.move(device)
    ragged.keep_media(pool)
    return [BufferItem.of(ragged, i) for i in range(len(ragged))]


def release_ragged(items: Sequence[BufferItem]) -> None:
    """Detach the first items from their ragged batch if most of its samples are gone, so that it can be freed."""
    source = items[0].__dict__.get("_source") if items else None
    if source is None:
        return
    left = 0
    while left < len(items) and items[left].__dict__.get("_source", (None,))[0] is source[0]:
        left += 1
    if 2 * left <= len(source[0]):
        for item in items[:left]:
            item.detach()


def split_to_padded_items(batch: ExperienceBatch, pool: Pool) -> list[BufferItem]:
    """Split a padded batch to items with its padding; attended tokens are copied."""
    values = check_fields(batch)
    bare, spans = remove_padding(batch, values, contiguous=True)
    bare.keep_media(pool)
    starts = action_starts(batch, spans[1].width).tolist()
    wide = PaddedRaggedBatch.of(values, batch.origin.copy(), bare, spans, starts)
    return [BufferItem.of(wide, i) for i in range(len(wide))]


def ragged_from_records(experiences: Records) -> RaggedBatch:
    """Convert the columns of records to a ragged batch."""
    records = mask_unpredicted(as_experiences(experiences))
    count = len(records)
    tokens, responses = count_tokens(records)
    ragged = RaggedBatch(tokens, responses, Origin(), long_tokens=True)
    used = set()
    for batch_field in BATCH_FIELDS.values():
        sources = [name for name in (*batch_field.sources, batch_field.name) if name in FIELDS]
        source = next((name for name in sources if _has_all(records, name)), sources[-1] if sources else None)
        if source is not None:
            ragged.columns[batch_field.name] = _record_column(records, source, batch_field.name, ragged)
            used.add(source)
        else:
            ragged.columns[batch_field.name] = None
    for name, record_field in FIELDS.items():
        if record_field.kind == "tensor" and record_field.axis == "response" and name not in used:
            column = _record_column(records, name, f"extras.{name}", ragged)
            if column is not None:
                ragged.columns[f"extras.{name}"] = column
    if not count:
        ragged.columns["sequences"] = torch.empty(0, dtype=getattr(torch, FIELDS["tokens"].dtype))
    ragged.columns["attention_mask"] = constant(1, int(tokens.sum()), torch.int64)
    ragged.info, ragged.origin.info = _record_info(records, ragged)
    ragged.lists["ids"] = list(records.eids()) if count else []
    media = records.values("multi_modal_inputs")
    keys = {key: name for name, key in BATCH_MEDIA.items()}
    for key in dict.fromkeys(key for record_field in media for key in record_field or ()):
        ragged.media[keys.get(key, f"media.{key}")] = [(record_field or {}).get(key) for record_field in media]
    count_media(ragged.media, ragged.info, ragged.origin.info)
    return ragged


def _has_all(records: Experiences, name: str) -> bool:
    column = records.column(name)
    if isinstance(column, Ragged) and column.valid is None:
        return True
    return all(value is not None for value in records.values(name))


def _record_column(records: Experiences, source: str, name: str, ragged: RaggedBatch) -> Column | None:
    """Return the column of a record field, or build one if rows are absent or of several types."""
    column = records.column(source)
    if isinstance(column, Ragged) and column.valid is None and column.codes is None:
        if not np.array_equal(column.lengths, ragged.lengths(name)):
            _raise_length(records, source, column.lengths, ragged.lengths(name))
        return column
    values = records.values(source)
    if all(value is None for value in values):
        return None
    lengths = ragged.lengths(name)
    for i, value in enumerate(values):
        if isinstance(value, int):
            values[i] = torch.full((int(lengths[i]),), value, dtype=getattr(torch, FIELDS[source].dtype))
        elif value is not None and (value.dim() != 1 + FIELDS[source].trailing or len(value) != lengths[i]):
            _raise_length(records, source, [len(v) if v is not None and v.dim() else 0 for v in values], lengths)
    if name == "sequences":
        values = [value.long() for value in values]
    return make_column(name, values, ragged)


def _raise_length(records: Experiences, name: str, lengths: Sequence[int] | Lengths, expected: Lengths) -> None:
    i = next(i for i, (a, b) in enumerate(zip(lengths, expected, strict=True)) if a != b)
    raise ValueError(f"record {i} ({records.eids()[i]}): {name}: got {lengths[i]} entries, expected {expected[i]}")


def _record_info(records: Experiences, ragged: RaggedBatch) -> tuple[dict[Any, Any], InfoOrigin]:
    rewards = [{} if reward is None else {"reward": reward} for reward in records.values("reward")]
    info, origin = collate_info(rewards)
    mask = ragged.columns["action_mask"]
    if mask is None:
        counts = ragged.responses
    else:
        ones = (concatenated(mask, ragged.responses) != 0).numpy()
        counts = np.zeros(len(ragged), dtype=np.int64)
        some = ragged.responses > 0  # reduceat does not support empty segments
        if some.any():
            counts[some] = np.add.reduceat(
                ones.view(np.uint8), compute_offsets(ragged.responses)[:-1][some], dtype=np.int64
            )
    info["response_length"] = torch.from_numpy(counts.astype(np.float32))
    info["total_length"] = torch.from_numpy(ragged.tokens.astype(np.float32))
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
    """Raised for a padding side other than left or right. LightRFT raises `AssertionError`."""


class ReduceStrategy(Protocol):
    """LightRFT's strategy, as `NaiveReplayBuffer.normalize` uses it."""

    def all_reduce(self, data: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce a tensor over all processes."""


def is_vl_experience(experience: ExperienceBatch | BufferItem) -> bool:
    """Return whether a batch or an item has media: pixels, grids, images, videos.

    Args:
        experience: The batch or item.

    Returns:
        Whether it has any.

    >>> is_vl_experience(BufferItemVL(torch.tensor([1])))
    False
    >>> is_vl_experience(BufferItemVL(torch.tensor([1]), pixel_values=torch.zeros(4, 6)))
    True
    """
    # A separate function: a generator expression here would make each call a third slower.
    return experience.may_have_media and _has_media(experience)


def _has_media(experience: ExperienceBatch | BufferItem) -> bool:
    return any(_has_content(getattr(experience, name)) for name in MEDIA_FIELDS)


def _has_content(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_content(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_content(entry) for entry in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return bool(value.shape[0]) if value.ndim else True
    return value is not None


def zero_pad_sequences(sequences: Sequence[torch.Tensor], side: str = "left") -> torch.Tensor:
    """Pad 1-D tensors with zeros to the longest.

    Args:
        sequences: The tensors; types are promoted as in torch.
        side: `left` or `right`.

    Returns:
        (B, longest)

    Raises:
        PaddingSideError: For another side.
        ValueError: If there are no sequences, or one is not a 1-D tensor.

    >>> zero_pad_sequences([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    tensor([[1, 2, 3],
            [0, 4, 5]])
    """
    if side not in ("left", "right"):
        raise PaddingSideError(f"side: got {side!r}, expected 'left' or 'right'")
    rows = list(sequences)
    if not rows:
        raise ValueError("sequences: empty, expected at least one")
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
    """Split a batch to one item for each sample, on its own memory, without loss.

    One-element entries of `info` become Python numbers, dicts are split by key. Media with the same content are one
    object in all items.

    Args:
        experience: The batch.
        unpad: Whether to remove padding, as `remove_padding_in_sequences` does. By default items of a padded batch keep
            its width (padding is read from the batch, attended tokens are copied).
        pool: Where media are stored; `None`: in a pool that all items share.

    Returns:
        The items.

    Raises:
        ValueError: If fields of the batch do not agree.

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
        return split_to_items(experience, pool)
    return split_to_padded_items(experience, pool)


def remove_padding_in_sequences(items: Sequence[BufferItem]) -> list[BufferItem]:
    """Return new items without padding: the tokens from the first attended one to the last, and their response slots.

    Args:
        items: Items, which are not changed.

    Returns:
        The new items.

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
    """Collate items to a batch.

    Fields and `info` keys that only some items have are kept: other rows read as padding, and lack them again after a
    split. For items with grids, `info` has `image_num` and `video_num` [B].

    Args:
        items: The items.
        packing_samples: Whether to pack the attended tokens instead of padding.
        pad_token_id: Token id of the padding; other fields are padded with 0.
        layout: `left`: padded on the left of both axes. `prompt_left_response_right`: prompts padded on the left,
            responses on the right.

    Returns:
        The batch.

    Raises:
        ValueError: If there are no items, or their fields do not agree.

    >>> items = [BufferItem(torch.tensor([7, 8]), torch.tensor([-1.0]), *[None] * 6, {"reward": 1.0}),
    ...          BufferItem(torch.tensor([4, 5, 6]), torch.tensor([-2.0, -3.0]), *[None] * 6, {"reward": 0.0})]
    >>> batch = make_experience_batch(items, pad_token_id=9)
    >>> batch.sequences.tolist(), batch.action_log_probs.tolist(), batch.info
    ([[9, 7, 8], [4, 5, 6]], [[0.0, -1.0], [-2.0, -3.0]], {'reward': tensor([1., 0.])})
    """
    listed = list(items)
    if not listed:
        raise ValueError("items: empty, expected at least one")
    check_layout(layout)
    if packing_samples or layout == "left":
        batch = collate_untouched(listed, pad_token_id, packing_samples)
        if batch is None:
            batch = collate_detached(listed, pad_token_id, packing_samples)
        if batch is not None:
            return batch
    if packing_samples or layout != "left":
        listed = list(padding_removed(listed))
    ragged = ragged_from_items(listed)
    if packing_samples:
        return to_packed(ragged)
    batch = to_padded(ragged, pad_token_id, layout)
    starts = [peek_field(item.__dict__, "action_start") for item in listed]
    if any(starts):
        # Items that were split with their padding start later.
        batch.action_starts = torch.tensor(starts) + (0 if batch.action_starts is None else batch.action_starts)
    return batch


def _clear(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Set values to 0 where the mask is True, also NaN."""
    if values.is_cpu:
        np.copyto(values.numpy(), 0, where=mask.numpy())
    else:
        values.masked_fill_(mask, 0)


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not parts:
        return torch.zeros(0)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class NaiveReplayBuffer:
    """Replay buffer in memory: append batches, sample batches.

    Args:
        sample_batch_size: Samples of a batch.
        limit: Largest number of samples; the oldest are dropped. 0 or less: no limit.
        cpu_offload: Whether to keep samples in host memory.
        packing_samples: Whether to return packed batches.
        pad_token_id: Token id of the padding.
        seed: Seed of sampling; `None`: Python's `random` is used.
        device: Where sampled batches go; `None`: the current accelerator, if there is one.

    Raises:
        ValueError: If `sample_batch_size` or `limit` is not an integer in range.

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
            raise ValueError(f"sample_batch_size: got {sample_batch_size!r}, expected an integer >= 1")
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise ValueError(f"limit: got {limit!r}, expected an integer (<= 0: no limit)")
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
        """Add the samples of a batch, without padding. The batch is not changed.

        Args:
            experience: The batch.

        Raises:
            ValueError: If it is not an `ExperienceBatch`.
        """
        if not isinstance(experience, ExperienceBatch):
            raise ValueError(f"experience: got {type(experience).__name__}, expected an ExperienceBatch")
        self.items.extend(split_to_items(experience, self._pool, "cpu" if self.cpu_offload else None))
        if 0 < self.limit < len(self.items):
            del self.items[: len(self.items) - self.limit]
            self._pool.prune(item.raw_images for item in self.items)
            release_ragged(self.items)

    @torch.no_grad()
    def sample(self) -> ExperienceBatch:
        """Return a batch of `sample_batch_size` different samples, drawn at random."""
        if len(self.items) < self.sample_batch_size:
            raise ValueError(
                f"sample: the buffer has {len(self.items)} samples, expected at least sample_batch_size, "
                f"{self.sample_batch_size}"
            )
        batch = self.collate_fn((self._random or random).sample(self.items, self.sample_batch_size))
        return batch.to_device(self.target_device) if self.target_device.type != "cpu" else batch

    def collate_fn(self, batch: Sequence[BufferItem]) -> ExperienceBatch:
        """Collate items to a batch, for a torch `DataLoader` over the buffer.

        Args:
            batch: Items of the buffer.

        Returns:
            The batch, packed if `packing_samples` is set.
        """
        return make_experience_batch(batch, self.packing_samples, pad_token_id=self.pad_token_id)

    @torch.no_grad()
    def normalize(self, attribute: str, strategy: ReduceStrategy | None = None) -> None:
        """Normalize a response-axis field to mean 0 and variance 1 over the actions of all samples.

        Args:
            attribute: The field. Masked slots are not counted, and become 0.
            strategy: Its `all_reduce(tensor, "sum")` sums the statistics of all processes; `None`: this one only.
        """
        ragged_batches = source_batches(self.items, attribute, "action_mask")
        values: list[Any] = [ragged.columns[attribute] for ragged in ragged_batches or ()]
        masks: list[Any] = [ragged.columns["action_mask"] for ragged in ragged_batches or ()]
        if ragged_batches is None or any(a.shape != b.shape for a, b in zip(values, masks, strict=True)):
            ragged_batches, (values, masks) = None, self._rows(attribute)
        normalized = _concatenate(values).to(torch.float64, copy=True)
        masked = torch.logical_not(_concatenate(masks))  # several times as fast as == 0
        _clear(normalized, masked)
        if normalized.is_cpu:  # small operations take a fraction of torch's time in numpy
            array: Any = normalized.numpy()
            count = float(masked.numel() - np.count_nonzero(masked.numpy()))
        else:
            array, count = normalized, float(masked.numel() - int(masked.sum()))
        sums = [float(array.sum()), count, float(normalized @ normalized)]  # numpy's product would start threads
        if strategy is not None:
            sums = strategy.all_reduce(normalized.new_tensor(sums), "sum").tolist()
        total, count, squares = sums
        mean = total / count if count else 0.0
        scale = max(squares / count - mean**2, 1e-8) ** -0.5 if count else 0.0
        array -= mean
        array *= scale
        _clear(normalized, masked)
        if len(values) == 1:
            changed = [normalized.to(values[0].dtype)]
        else:
            parts = normalized.split_with_sizes([row.shape[0] for row in values]) if values else ()
            changed = [part.to(row.dtype, copy=True) for part, row in zip(parts, values, strict=True)]
        if ragged_batches is not None:
            replace_column(self.items, ragged_batches, attribute, changed)
            return
        for item, row in zip(self.items, changed, strict=True):
            setattr(item, attribute, row)

    def _rows(self, attribute: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a response-axis field and the action mask of each item, checked."""
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
        """Remove all samples."""
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
