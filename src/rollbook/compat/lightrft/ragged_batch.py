"""`RaggedBatch`: samples without padding, column by column. Batches and items are converted to and from it.

Invariant: a ragged batch owns its columns. Row i of a per-token column lies between the offsets of its axis, and an
item gets a copy of it. An item of a ragged batch reads as if it had its fields from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.inputs import Inputs, full_mask, group_id, run_id
from rollbook.batch.device import copy_columns, move_to_device
from rollbook.batch.media import BY_TOKEN, GRIDS, TYPES, sample_positions, sample_types
from rollbook.compat.lightrft.batch import (
    BATCH_FIELDS,
    BATCH_MEDIA,
    Device,
    ExperienceBatch,
    InfoOrigin,
    Origin,
    check_info,
    info_arrays,
    row_kinds,
    split_info,
    token_fields,
)
from rollbook.core.experience import copy_containers
from rollbook.core.fields import FIELDS
from rollbook.core.ids import EID
from rollbook.core.ragged import compute_offsets
from rollbook.core.rows import NUMPY, Column, Rows, Spans, concatenated, memory

if TYPE_CHECKING:
    from rollbook.batch.media import ModelConfig
    from rollbook.compat.lightrft.batch import TokenColumn
    from rollbook.core.media import Pool


_COUNTED_MEDIA = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Fields of pixels and of grids, and the key of `info` with the number of images or videos of each sample."""
_MEDIA_FIELDS = (*BATCH_MEDIA, "media")
_NO_MEDIA = {name: None for pixels, grids, _ in _COUNTED_MEDIA for name in (grids, pixels)}


def split_media(batch: ExperienceBatch) -> dict[str, list[Any] | None]:
    """Split the media of a batch by sample: by field (other inputs as `media.NAME`), views of the batch's tensors."""
    if all(getattr(batch, name) is None for name in _MEDIA_FIELDS):
        return dict(_NO_MEDIA)
    count = len(batch)
    result: dict[str, list[Any] | None] = {}
    rows: dict[str, list[int]] = {}
    for pixels, grids, number in _COUNTED_MEDIA:
        shapes, data = getattr(batch, grids), getattr(batch, pixels)
        media_rows = batch.origin.media_rows
        counts = _counts(batch, number)
        if isinstance(shapes, torch.Tensor):
            if shapes.dim() != 2:
                raise ValueError(f"{grids}: got shape {list(shapes.shape)}, expected two dimensions")
            alike = [len(shapes) // count] * count if count and len(shapes) in (0, count) else []
            rows[grids] = list(media_rows.get(grids) or counts or alike)
            if not rows[grids] and count:
                raise ValueError(
                    f"{grids}: got {len(shapes)} rows for {count} samples, expected info[{number!r}] with the number "
                    "of each sample"
                )
        elif isinstance(shapes, (list, tuple)):
            shapes = [s[None] if isinstance(s, torch.Tensor) and s.dim() == 1 else s for s in shapes]
        result[grids] = _split_parts(grids, shapes, rows.get(grids), count, batch.origin.absent.get(grids), empty=None)
        if isinstance(data, torch.Tensor):
            rows[pixels] = list(media_rows.get(pixels) or _pixel_rows(pixels, data, result[grids], counts, count))
        result[pixels] = _split_parts(pixels, data, rows.get(pixels), count, batch.origin.absent.get(pixels), empty=0)
    if not isinstance(batch.media, (dict, type(None))):
        raise ValueError(f"media: got {type(batch.media).__name__}, expected a dict of lists")
    for key, tensors in (batch.media or {}).items():
        result[f"media.{key}"] = sample_list(f"media[{key!r}]", tensors, count)
    return result


def _counts(batch: ExperienceBatch, number: str) -> list[int] | None:
    """Return the number of images of each sample from `info`, or `None`."""
    entry = (batch.info or {}).get(number)
    if entry is None:
        return None
    counts = entry.tolist() if isinstance(entry, (torch.Tensor, np.ndarray)) else entry
    good = isinstance(counts, (list, tuple)) and len(counts) == len(batch)
    if not good or not all(isinstance(c, (int, float)) and float(c).is_integer() and c >= 0 for c in counts):
        raise ValueError(f"info[{number!r}]: got {counts!r}, expected {len(batch)} integers")
    return [int(c) for c in counts]


def _pixel_rows(
    name: str, data: torch.Tensor, grids: list[Any] | None, counts: list[int] | None, count: int
) -> list[int]:
    if grids is not None:
        return [0 if grid is None else int(grid.reshape(-1, grid.shape[-1]).prod(-1).sum()) for grid in grids]
    if counts and sum(counts) and len(data) % sum(counts) == 0:
        rows_per_image = len(data) // sum(counts)  # without grids, all images have the same number of rows
        return [rows_per_image * number for number in counts]
    if count and len(data) % count == 0:
        return [len(data) // count] * count
    raise ValueError(f"{name}: got {len(data)} rows for {count} samples, expected grids, which give the rows of each")


def _split_parts(
    name: str,
    value: torch.Tensor | Sequence[Any] | None,
    rows: list[int] | None,
    count: int,
    absent: frozenset[int] | None,
    empty: int | None,
) -> Any:
    """Split a media field by sample: `None` where it is absent, or, with `empty=None`, where a part is empty."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return sample_list(name, value, count)
    if rows is None or len(rows) != count or sum(rows) != len(value):
        raise ValueError(f"{name}: got {len(value)} rows, expected {sum(rows or ())}, those of {count} samples")
    parts: list[Any] = list(torch.split(value, rows))
    if absent is not None:
        return [None if i in absent else tensor for i, tensor in enumerate(parts)]
    return [None if empty is None and not len(tensor) else tensor for tensor in parts]


def count_media(media: Mapping[str, Any], info: dict[Any, Any], origin: InfoOrigin) -> None:
    """Add `image_num` and `video_num` [B] to the `info` of samples with grids.

    Counts that all samples have are unchanged. Splitting removes them from samples that lacked them.
    """
    for _, grids, number in _COUNTED_MEDIA:
        parts = media.get(grids)
        missing = range(len(parts or ())) if number not in info else origin.missing.get((number,), ())
        if not parts or not missing or not all(isinstance(tensor, (torch.Tensor, type(None))) for tensor in parts):
            continue
        counts = [0 if tensor is None else len(tensor) if tensor.dim() > 1 else 1 for tensor in parts]
        counts_before = list(info[number]) if number in info else [None] * len(parts)
        origin.missing[number,], origin.originals[number,] = frozenset(missing), (counts, counts_before)
        info[number] = torch.tensor(counts)


def sample_list(name: str, value: Sequence[Any] | NDArray[Any] | None, count: int) -> list[Any] | None:
    """Return a list with an entry for each sample; raise `ValueError` if the count differs."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a list of {count}, an entry for each sample")
    if len(value) != count:
        raise ValueError(f"{name}: got {len(value)} entries, expected {count}, one for each sample")
    return list(value)


def join_media(name: str, parts: list[Any] | None, origin: Origin) -> torch.Tensor | None:
    """Concatenate a media field of all samples; `origin` gets what is needed to split it again."""
    present = [tensor for tensor in parts or () if tensor is not None]
    if not present or parts is None:
        return None
    for i, tensor in enumerate(parts):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"items[{i}].{name}: got {type(tensor).__name__}, expected a tensor")
    if "grid" in name:
        parts = [tensor.unsqueeze(0) if tensor is not None and tensor.dim() == 1 else tensor for tensor in parts]
        present = [tensor for tensor in parts if tensor is not None]
    for i, tensor in enumerate(parts):
        if tensor is not None and (
            not tensor.dim() or tensor.shape[1:] != present[0].shape[1:] or tensor.dtype != present[0].dtype
        ):
            raise ValueError(
                f"items[{i}].{name}: got {list(tensor.shape)} of {tensor.dtype}, expected (rows, "
                f"{', '.join(map(str, present[0].shape[1:]))}) of {present[0].dtype}, as others have"
            )
    absent = frozenset(i for i, tensor in enumerate(parts) if tensor is None)
    origin.absent[name] = absent
    origin.media_rows[name] = tuple(0 if tensor is None else len(tensor) for tensor in parts)
    return torch.cat(present)


Lengths = NDArray[np.int64]
PlainField: TypeAlias = tuple[str, bool, torch.dtype, NDArray[Any]]
"""Name, axis (an index into `RaggedBatch.bounds`), type and memory of a column."""
SAMPLE_LISTS = {"labels": "labels", "references": "references", "raw_images": "raw_images", "ids": "eid"}
"""Lists of a batch with an entry for each sample, and the name of the entry in an item."""


def copy_entry(name: str, value: Any) -> Any:
    """Copy an entry of a batch's list, so that samples do not share it (images are shared)."""
    if name == "raw_images":
        return list(value) if isinstance(value, list) else value
    return value.replace() if isinstance(value, EID) else copy_containers(value, tensors=True)


def is_token_axis(name: str) -> bool:
    """Return whether a per-token field has an entry for every token; if not, for every response slot."""
    return name in _ON_TOKENS


_ON_TOKENS = frozenset(name for name, field in BATCH_FIELDS.items() if field.axis == "sequence")


@dataclass(eq=False)
class RaggedBatch:
    """B samples without padding: T tokens and U response slots in all."""

    tokens: Lengths
    """[B] Number of tokens of each sample."""
    responses: Lengths
    """[B] Number of response slots of each sample."""
    origin: Origin
    columns: dict[str, Column | None] = field(default_factory=dict)
    """By per-token field (extras as `extras.NAME`), (T, ...) or (U, ...)."""
    info: dict[Any, Any] | None = None
    lists: dict[str, list[Any] | None] = field(default_factory=dict)
    media: dict[str, list[Any] | None] = field(default_factory=dict)
    """By media field (other inputs as `media.NAME`), the tensor of each sample, or `None`."""
    device: Any = "cpu"
    long_tokens: bool = False
    """Whether batches have the tokens as int64, which losses and most models expect."""

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self, name: str) -> Lengths:
        """[B] Return the lengths of the axis of a per-token field."""
        return self.tokens if is_token_axis(name) else self.responses

    # --- rows -----------------------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> tuple[list[int], list[int]]:
        """[B + 1] each: starts of the samples on the response axis and on the token axis, and the ends."""
        return [0, *accumulate(self.responses.tolist())], [0, *accumulate(self.tokens.tolist())]

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Memory of the columns that are tensors on the host."""
        return {name: memory(column) for name, column in self.columns.items() if isinstance(column, torch.Tensor)}

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        """By per-token field, its type and trailing sizes; ragged batches with equal kinds can be mixed."""
        return {
            name: (column.dtype, tuple(column.shape[1:])) if isinstance(column, torch.Tensor) else (None, ())
            for name, column in self.columns.items()
        }

    @cached_property
    def large(self) -> frozenset[str]:
        """Fields of an item that are copies of columns."""
        names = (name for name, column in self.columns.items() if column is not None)
        return frozenset("extras" if name.startswith("extras.") else name for name in names)

    @cached_property
    def regular(self) -> bool:
        """Whether all samples have the same per-token fields, of one type each, on the host."""
        irregular = (*self.origin.absent, *self.origin.dtypes)
        return self.columns.keys().isdisjoint(irregular) and torch.device(self.device).type == "cpu"

    @cached_property
    def infos(self) -> tuple[list[Any], Any]:
        """[B] `info` of each sample, and the types of its numbers."""
        split, kinds = split_info(self.info, len(self), self.origin.info)
        infos: list[Any] = list(split)
        for i in self.origin.absent.get("info", ()):
            infos[i] = infos[i] or None
        return infos, kinds

    @cached_property
    def plain_fields(self) -> list[PlainField] | None:
        """All columns that are not `None`.

        `None` unless all samples have masks and the same fields, of types that numpy has, without media and extras.
        """
        columns = self.columns
        if not self.regular or any(self.media.values()) or self.lists.get("raw_images") or self.origin.absent:
            return None
        if not columns.keys() <= BATCH_FIELDS.keys() or any(columns.get(name) is None for name in _MASKS):
            return None
        fields = []
        for name, column in columns.items():
            if column is not None:
                dtype = column.dtype
                if dtype not in NUMPY or not isinstance(column, torch.Tensor):
                    return None
                fields.append((name, name in _ON_TOKENS, dtype, memory(column)))
        return fields

    @cached_property
    def has_lists(self) -> bool:
        """Whether there are labels, references, ids or images."""
        return any(entries is not None for entries in self.lists.values())

    @cached_property
    def info_arrays(self) -> dict[Any, Any] | None:
        """Arrays for `pick_info`; `None` unless `info` has only tensors."""
        return None if "info" in self.origin.absent else info_arrays(self.info, self.origin.info)

    def view(self, name: str, i: int) -> torch.Tensor | None:
        """Return a read-only view of a per-token field of sample i; `None` if it has none."""
        column = self.columns.get(name)
        if column is None or i in self.origin.absent.get(name, ()):
            return None
        values = column if isinstance(column, torch.Tensor) else concatenated(column, self.lengths(name))
        bounds = self.bounds[is_token_axis(name)]
        return self._typed(name, i, values[bounds[i] : bounds[i + 1]])

    def _typed(self, name: str, i: int, row: torch.Tensor) -> torch.Tensor:
        row = row.detach()
        return row.to(self.origin.dtypes[name][i]) if name in self.origin.dtypes else row

    def row(self, name: str, i: int) -> torch.Tensor | None:
        """Copy a per-token field of sample i; `None` if it has none."""
        row = self.view(name, i)
        return None if row is None else row.clone(memory_format=torch.contiguous_format)

    def value(self, name: str, i: int) -> Any:
        """Return the field of sample i."""
        if name in BATCH_FIELDS:
            return self.row(name, i)
        if name == "info":
            return copy_containers(self.infos[0][i], tensors=True)
        if name == "info_kinds":
            return row_kinds(self.infos[1], self.origin.info, i)
        if name == "extras":
            rows = {key: self.row(key, i) for key in self.columns if key.startswith("extras.")}
            return {key.removeprefix("extras."): row for key, row in rows.items() if row is not None} or None
        if name == "media":
            by_name = {key: parts[i] for key, parts in self.media.items() if key.startswith("media.") and parts}
            return {key.removeprefix("media."): tensor for key, tensor in by_name.items() if tensor is not None} or None
        if name == "action_start":
            return 0
        if name == "implied":
            return frozenset()
        if name in _LISTED:
            listed = self.lists.get(_LISTED[name])
            return None if listed is None else copy_entry(_LISTED[name], listed[i])
        entries = self.media.get(name)
        return None if entries is None else entries[i]

    def keep_media(self, pool: Pool) -> None:
        """Store media in a pool, which keeps equal content once."""
        for name, parts in self.media.items():
            if parts:
                self.media[name] = [pool.keep(tensor) for tensor in parts]
        images = self.lists.get("raw_images")
        if images:
            self.lists["raw_images"] = [pool.keep(image) for image in images]

    # --- devices --------------------------------------------------------------------------------------------

    def move(self, device: torch.device | str | int) -> None:
        """Move everything to a device; columns on the host are copied through one pinned buffer."""
        target = torch.device(device)
        columns = {name: column for name, column in self.columns.items() if column is not None}
        if target.type == "cpu":
            self.columns |= {name: c.cpu() if isinstance(c, torch.Tensor) else c for name, c in columns.items()}
        else:
            shipped = copy_columns([(column, self.lengths(name)) for name, column in columns.items()], target)
            self.columns |= dict(zip(columns, shipped, strict=True))
        self.info = move_to_device(self.info, target)
        self.media = move_to_device(self.media, target)
        self.lists = move_to_device(self.lists, target)
        self.device = target


class PaddedRaggedBatch(RaggedBatch):
    """Samples of a padded batch with its padding, as a split without unpadding returns them.

    Attended tokens are copied to `unpadded` at once. Padding is read from the tensors of the batch, `columns`
    (B, width, ...). If one was written to since, rows are padded with their original first and last entries instead.
    """

    unpadded: RaggedBatch
    """The samples without padding."""
    spans: tuple[Spans, Spans]
    """Spans of the tokens and of the response slots in their rows."""
    starts: list[int]
    """[B] First response slot of each sample."""
    versions: dict[str, int]
    """Version counters of the tensors, by which writes are detected."""
    edges: dict[str, Any]
    """Original first and last columns of the tensors."""

    @property
    def regular(self) -> bool:
        """False: rows are read one by one."""
        return False

    @property
    def plain_fields(self) -> None:
        """`None`: rows are read one by one."""
        return None

    @classmethod
    def of(
        cls,
        values: dict[str, Any],
        origin: Origin,
        unpadded: RaggedBatch,
        spans: tuple[Spans, Spans],
        starts: list[int],
    ) -> PaddedRaggedBatch:
        """Build it from padded fields (B, width, ...), the same samples without padding, and the result of
        `find_spans`."""
        tokens, responses = (np.full(len(unpadded), axis_spans.width, dtype=np.int64) for axis_spans in spans)
        wide = cls(tokens, responses, origin, values, unpadded.info, unpadded.lists, unpadded.media, unpadded.device)
        wide.unpadded, wide.spans, wide.starts = unpadded, spans, starts
        columns = {name: value for name, value in values.items() if value is not None}
        wide.versions = {name: _version(value) for name, value in columns.items()}
        wide.edges = {name: _edges(value) for name, value in columns.items()}
        return wide

    def view(self, name: str, i: int) -> torch.Tensor | None:
        """Copy a per-token field of sample i; `None` if it has none."""
        column: Any = self.columns.get(name)
        if column is None:
            return None
        on_sequence = is_token_axis(name)
        spans, start = self.spans[not on_sequence], self.unpadded.bounds[on_sequence][i]
        begin, length = int(spans.starts[i]), int(spans.lengths[i])
        row: torch.Tensor = column[i].detach().clone(memory_format=torch.contiguous_format)
        if _version(column) != self.versions[name] and len(row):
            ends = torch.as_tensor(self.edges[name][i])
            row[:begin], row[begin + length :] = ends[0], ends[-1]
        inside: Any = self.unpadded.columns.get(name)
        row[begin : begin + length] = int(name in _MASKS) if inside is None else inside[start : start + length]
        lacks = i in self.origin.absent.get(name, ()) and name not in _MASKS
        return None if lacks and not row.any() else self._typed(name, i, row)

    row = view

    def value(self, name: str, i: int) -> Any:
        """Return the field of sample i."""
        if name == "action_start":
            return self.starts[i]
        if name == "implied":  # masks that exist only to separate padding from the rest
            return frozenset(mask for mask in _MASKS if i in self.origin.absent.get(mask, ()))
        return super().value(name, i)


def _edges(matrix: torch.Tensor) -> Any:
    """(B, 1 or 2, ...) Copy the first and the last column."""
    ends = slice(None, None, max(matrix.shape[1] - 1, 1))
    if matrix.is_cpu and matrix.dtype in NUMPY:
        return memory(matrix)[:, ends].copy()  # in a third of torch's time
    return matrix.detach()[:, ends].clone()


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes when a tensor is written to; inference tensors have no counter."""
    return -1 if tensor.is_inference() else tensor._version


_MASKS = tuple(name for name, field in BATCH_FIELDS.items() if field.absent)
_LISTED = {item: batch for batch, item in SAMPLE_LISTS.items()}


def constant(value: float, length: int, dtype: torch.dtype, device: Device = "cpu") -> torch.Tensor:
    """(length,) Return a constant tensor with the memory of one entry."""
    return torch.full((1,), value, dtype=dtype, device=device).expand(length)


LAYOUTS = ("left", "prompt_left_response_right")
"""Padded layouts; see `ExperienceBatch.pad`."""
_LARGE_MASK = 1 << 17
"""Masks with more entries are checked for being constant, which saves a copy."""


# --- from batches -------------------------------------------------------------------------------------------------


def ragged_from_batch(batch: ExperienceBatch, contiguous: bool = False) -> RaggedBatch:
    """Convert a batch; of a padded one, the attended tokens. Media are views of the batch's.

    With `contiguous`, columns of one type share a block of memory, which is faster to allocate than one for each.
    """
    values = check_fields(batch)
    if batch.layout == "packed":
        tokens, responses = _packed_lengths(batch, values)
        ragged = ragged_without_columns(batch, tokens, responses)
        for name, value in values.items():
            if isinstance(value, Rows):
                value = value.values.clone()
            elif value is not None:
                value = torch.cat(value) if value else torch.empty(0, dtype=torch.int64)
            ragged.columns[name] = value
        update_absent(ragged)
        return ragged
    return remove_padding(batch, values, contiguous)[0]


def remove_padding(
    batch: ExperienceBatch, values: dict[str, Any], contiguous: bool
) -> tuple[RaggedBatch, tuple[Spans, Spans]]:
    """Convert a padded batch with the fields `values`; also return the spans of its tokens and response slots."""
    width = int(values["sequences"].shape[1])
    slots = next(
        (int(column.shape[1]) for name, column in values.items() if column is not None and not is_token_axis(name)), 0
    )
    starts = action_starts(batch, slots)
    token_spans, response_spans = find_spans(batch.attention_mask, len(batch), width, slots, starts, check_solid=True)
    ragged = ragged_without_columns(batch, token_spans.lengths, response_spans.lengths)
    together: dict[Any, list[str]] = {}
    for name, value in values.items():
        spans = token_spans if is_token_axis(name) else response_spans
        if value is None:
            ragged.columns[name] = None
        elif name == "attention_mask" and token_spans.solid:
            ragged.columns[name] = constant(1, int(token_spans.lengths.sum()), value.dtype, value.device)
        elif not contiguous or not value.is_cpu or value.requires_grad:
            ragged.columns[name] = spans.unpad(value)
        else:
            ragged.columns[name] = None  # set below; this keeps the order of the fields
            together.setdefault((spans, value.dtype, value.shape[2:]), []).append(name)
    for (spans, *_), names in together.items():
        ragged.columns |= zip(names, spans.unpad_all([values[name] for name in names]), strict=True)
    update_absent(ragged)
    return ragged, (token_spans, response_spans)


def update_absent(ragged: RaggedBatch) -> None:
    """Drop rows that were written to since from the absent rows of each field, and drop fields that all rows lack."""
    for name, rows in list(ragged.origin.absent.items()):
        column = ragged.columns.get(name)
        if not isinstance(column, torch.Tensor):
            continue
        blank = column == (BATCH_FIELDS[name].absent if name in BATCH_FIELDS else 0)
        if not blank.all():
            parts = torch.split(blank, ragged.lengths(name).tolist())
            rows = frozenset(i for i in rows if parts[i].all())
        ragged.origin.absent[name] = rows
        if len(rows) == len(ragged):
            ragged.columns[name] = None
        if not rows or len(rows) == len(ragged):
            del ragged.origin.absent[name]


def ragged_without_columns(batch: ExperienceBatch, tokens: Lengths, responses: Lengths) -> RaggedBatch:
    """Convert everything of a batch but its per-token columns."""
    count = len(batch)
    ragged = RaggedBatch(tokens, responses, batch.origin.copy())
    check_info(batch.info, count)
    ragged.info = copy_containers(batch.info, tensors=True)
    for name in SAMPLE_LISTS:
        entries = getattr(batch, name)
        ragged.lists[name] = None if entries is None else sample_list(name, entries, count)
    ragged.media = split_media(batch)
    tokens_of_all = batch.sequences
    if count:
        ragged.device = (tokens_of_all if isinstance(tokens_of_all, torch.Tensor) else tokens_of_all[0]).device
    return ragged


def check_fields(batch: ExperienceBatch) -> dict[str, Any]:
    """Return the per-token fields by name; raise `ValueError` if their shapes do not agree."""
    plain = _check_plain_matrices(batch)
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


_AXES = [(name, is_token_axis(name)) for name in BATCH_FIELDS]


def _check_plain_matrices(batch: ExperienceBatch) -> dict[str, Any] | None:
    """Return the per-token fields of a batch of matrices that agree, without extras: the usual case, checked fast.

    `None` for all others, which `check_fields` checks in detail.
    """
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


def _check_dims(prefix: str, value: torch.Tensor, dims: int, name: str) -> None:
    if value.dim() < dims or (value.dim() > dims and name in BATCH_FIELDS):
        raise ValueError(f"{prefix}: got shape {list(value.shape)}, expected {dims} dimension(s)")
    if name == "sequences" and (value.is_floating_point() or value.is_complex()):
        raise ValueError(f"{prefix}: got values of {value.dtype}, expected token ids")


def widths(values: dict[str, Any]) -> tuple[int, int]:
    """Return S and A of a padded batch; raise `ValueError` if fields differ."""
    first_columns: dict[bool, tuple[str, int]] = {}
    for name, value in values.items():
        if value is not None:
            first, width = first_columns.setdefault(is_token_axis(name), (name, value.shape[1]))
            if value.shape[1] != width:
                raise ValueError(f"{name}: got {value.shape[1]} columns, expected {width}, as {first} has")
    name, slots = first_columns.get(False, ("", 0))
    if slots > first_columns[True][1]:
        raise ValueError(f"{name}: got {slots} columns, expected at most {first_columns[True][1]}, as sequences has")
    return first_columns[True][1], slots


def action_starts(batch: ExperienceBatch, slots: int) -> Lengths:
    """[B] Return the first response slot of each row, checked."""
    slots_before = batch.action_starts
    count = len(batch)
    if slots_before is None:
        return np.zeros(count, dtype=np.int64)
    starts = np.asarray(slots_before.cpu() if isinstance(slots_before, torch.Tensor) else slots_before)
    if starts.dtype.kind not in "iu" or starts.shape != (count,) or (starts < 0).any() or (starts > slots).any():
        raise ValueError(f"action_starts: got {starts.tolist()}, expected {count} integers from 0 to {slots}")
    return starts.astype(np.int64)


def predicted_mask(batch: ExperienceBatch) -> Any:
    """Return the `action_mask` of a batch, (B, A) or `Rows`, False on slots of a sample's first token.

    No model predicts that token. A batch of records has it masked already
    (`rollbook.batch.columns.mask_unpredicted`). Without such a slot, the batch's own mask, or `None`, is returned.

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
        starts = compute_offsets(lengths)[:-1]
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
    # Only rows without a prompt are checked further: they are few, and responses are long.
    promptless = torch.nonzero(~_any_attended(attended[:, :begin])).squeeze(-1)
    if not len(promptless):
        return mask
    responses = attended[promptless, begin:] != 0
    has_tokens = responses.any(-1)
    if not bool(has_tokens.any()):
        return mask
    cleared = torch.ones(slots.shape[:2], dtype=torch.bool, device=slots.device) if mask is None else mask.clone()
    cleared[promptless[has_tokens], responses[has_tokens].int().argmax(-1)] = 0
    return cleared


def _any_attended(mask: torch.Tensor) -> torch.Tensor:
    """[B] Return whether a row of a mask has a nonzero entry."""
    if mask.device.type == "cpu" and mask.dtype in NUMPY:
        return torch.from_numpy((memory(mask) != 0).any(-1))  # in a fraction of torch's time
    return (mask != 0).any(-1)


def _packed_lengths(batch: ExperienceBatch, values: dict[str, Any]) -> tuple[Lengths, Lengths]:
    lengths = [np.full(len(batch), -1, dtype=np.int64) for _ in range(2)]
    for name, value in values.items():
        row_lengths = lengths[is_token_axis(name)]
        for i, row in enumerate(value or ()):
            if row_lengths[i] >= 0 and len(row) != row_lengths[i]:
                raise ValueError(
                    f"{name}[{i}]: got {len(row)} entries, expected {row_lengths[i]}, as its other fields have"
                )
            row_lengths[i] = len(row)
    tokens, responses = lengths[1], np.maximum(lengths[0], 0)
    for i in np.flatnonzero(responses > tokens).tolist():
        raise ValueError(f"sample {i}: got {responses[i]} response slots, expected at most its {tokens[i]} tokens")
    return tokens, responses


class TokenSpans(Spans):
    """Spans of the tokens of padded rows.

    Args:
        lengths: [B] Lengths of the rows.
        starts: [B] First column of each row.
        width: Columns of the matrix.
        solid: Whether the attention mask is known to be 1 throughout the spans.
    """

    def __init__(self, lengths: Lengths, starts: Lengths, width: int, solid: bool) -> None:
        super().__init__(lengths, starts, width)
        self.solid = solid


def find_spans(
    mask: torch.Tensor | None, count: int, width: int, slots: int, starts: Lengths, check_solid: bool = False
) -> tuple[TokenSpans, Spans]:
    """Find the spans of tokens and of response slots in padded rows.

    The tokens of a row extend from the first attended one to the last. Slot j belongs to token `width - slots + j`.

    Args:
        mask: (B, S) Attention mask; `None`: all attended.
        count: B.
        width: S.
        slots: A.
        starts: [B] First slot of each row; those before are padding.
        check_solid: Whether to check if a large mask is 1 throughout the spans (`TokenSpans.solid`).
    """
    solid = False
    if mask is None or not width:
        first, last = np.zeros(count, dtype=np.int64), np.full(count, width, dtype=np.int64)
    else:
        first, last, solid = _row_edges(mask, check_solid)
    begin = np.maximum(starts, first - (width - slots))
    end = np.maximum(np.minimum(slots, last - (width - slots)), begin)
    return TokenSpans(last - first, first, width, solid), Spans(end - begin, begin, slots)


def find_edges(flags: bytes) -> tuple[int, int]:
    """Return the start and end of the ones among zeros; the length twice if there is none.

    >>> find_edges(bytes([0, 1, 0, 1, 0])), find_edges(bytes([0, 0]))
    ((1, 4), (2, 2))
    """
    last = flags.rfind(1) + 1
    return (flags.find(1), last) if last else (len(flags), len(flags))


def _row_edges(mask: torch.Tensor, check_solid: bool) -> tuple[Lengths, Lengths, bool]:
    """[B] Return the start and end of the attended part of each row (the width twice if there is none).

    Also returns whether all parts are known to be 1 throughout, which is checked for large masks only.
    """
    exact = mask.device.type == "cpu" and mask.dtype in NUMPY
    rows = memory(mask) if exact else (mask.detach() != 0).cpu().numpy()
    attended = rows if rows.dtype == np.bool_ else rows != 0
    # Searching bytes is much faster than any numpy operation here.
    flags, (count, width) = attended.tobytes(), attended.shape
    bounds = range(0, count * width + 1, width)
    firsts, lasts = [], []
    for start, stop in pairwise(bounds):
        last = flags.rfind(1, start, stop) + 1
        firsts.append((flags.find(1, start, last) if last else stop) - start)
        lasts.append((last or stop) - start)
    first, last = np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64)
    solid = check_solid and exact and mask.numel() > _LARGE_MASK and rows.dtype.kind in "biu"
    if solid:
        solid = np.count_nonzero(attended) == (last - first).sum()
        solid = bool(solid and (rows is attended or np.bitwise_or.reduce(rows, axis=None) == 1))
    return first, last, solid


# --- to batches ---------------------------------------------------------------------------------------------------


def to_packed(ragged: RaggedBatch) -> ExperienceBatch:
    """Convert a ragged batch to a packed batch."""
    tokens, responses = ragged.tokens.tolist(), ragged.responses.tolist()

    def rows(name: str, column: Column) -> Rows:
        values = concatenated(column, ragged.lengths(name)).contiguous()
        if name == "sequences" and ragged.long_tokens:
            values = values.long()
        return Rows(values, tokens if is_token_axis(name) else responses)

    return _batch(ragged, rows, None)


def to_padded(ragged: RaggedBatch, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
    """Convert a ragged batch to a padded batch."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)):
        raise ValueError(f"pad_token_id: got {pad_token_id!r}, expected a token id")
    check_layout(layout)
    slots = int(ragged.responses.max(initial=0))
    starts = None
    if layout == "left":
        tokens = Spans.right_aligned(ragged.tokens, int(ragged.tokens.max(initial=0)))
        responses = Spans.right_aligned(ragged.responses, slots)
        if responses.starts.any():
            starts = torch.from_numpy(responses.starts)
    else:
        prompts = ragged.tokens - ragged.responses
        longest = int(prompts.max(initial=0))
        tokens = Spans(ragged.tokens, longest - prompts, longest + slots)
        responses = Spans(ragged.responses, np.zeros_like(ragged.responses), slots)

    for name, batch_field in BATCH_FIELDS.items():
        spans = tokens if is_token_axis(name) else responses
        if batch_field.absent and ragged.columns.get(name) is None and not spans.full:
            # Without a mask everything counts; the padded batch needs one to exclude padding.
            ragged.origin.absent[name] = frozenset(range(len(ragged)))
            dtype = torch.int64 if is_token_axis(name) else torch.bool
            ragged.columns[name] = constant(batch_field.absent, int(spans.lengths.sum()), dtype, ragged.device)

    def matrix(name: str, column: Column) -> torch.Tensor:
        source = name.removeprefix("extras.")
        if name == "sequences" and ragged.long_tokens:
            column = concatenated(column, ragged.tokens).long()
        fill = pad_token_id if name == "sequences" else FIELDS[source].pad if source in FIELDS else 0
        return (tokens if is_token_axis(name) else responses).pad(column, fill)

    return _batch(ragged, matrix, starts)


def check_layout(layout: str) -> None:
    """Raise `ValueError` for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")


def _batch(ragged: RaggedBatch, lay_out: Callable[[str, Column], Any], starts: torch.Tensor | None) -> ExperienceBatch:
    fields: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name, column in ragged.columns.items():
        value = None if column is None else lay_out(name, column)
        if name.startswith("extras."):
            extras[name.removeprefix("extras.")] = value
        else:
            fields[name] = value
    origin = Origin(dict(ragged.origin.absent), dict(ragged.origin.dtypes), {}, ragged.origin.info)
    media: dict[str, Any] = {}
    for name, parts in ragged.media.items():
        if name.startswith("media."):
            media[name.removeprefix("media.")] = parts and [copy_containers(tensor, tensors=True) for tensor in parts]
        else:
            fields[name] = join_media(name, parts, origin)
    if starts is not None:
        starts = starts.to(ragged.device)
    fields |= ragged.lists
    fields |= {"info": ragged.info, "media": media or None, "extras": extras or None}
    return ExperienceBatch.of({**fields, "action_starts": starts}, origin)


def media_inputs(batch: ExperienceBatch, config: ModelConfig | None = None) -> dict[str, torch.Tensor]:
    """Return the media of a batch under the model's names; entries per token in the layout of the tokens.

    Samples with image or video grids need `mm_token_type_ids`. With the model's `config`, missing ones are derived from
    placeholder ids; without, fewer of them than tokens are an error.
    """
    inputs: dict[str, torch.Tensor] = {}
    for name, key in BATCH_MEDIA.items():
        value = getattr(batch, name)
        if isinstance(value, list):
            present = [tensor for tensor in value if tensor is not None]
            value = torch.cat(present) if present else None
        if isinstance(value, torch.Tensor) and len(value):
            inputs[key] = value
    media = dict(batch.media or {})
    derives = config is not None and any(grid in inputs for grid in GRIDS)
    if derives or (TYPES in media and (inputs or media.keys() - set(BY_TOKEN))):
        rows = zip(_places(batch), media.get(TYPES) or [None] * len(batch), strict=True)
        media[TYPES] = [
            sample_types(_tokens(batch, i, location), tensor, config, i) if derives or tensor is not None else None
            for i, (location, tensor) in enumerate(rows)
        ]
    for key, parts in media.items():
        present = [tensor for tensor in parts if tensor is not None]
        if present:
            inputs[key] = _by_token(batch, key, parts, present[0]) if key in BY_TOKEN else torch.cat(present)
    return inputs


def _by_token(batch: ExperienceBatch, key: str, parts: list[Any], like: torch.Tensor) -> torch.Tensor:
    places = _places(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    matrix = like.new_zeros(shape)
    for i, ((row, start, length), tensor) in enumerate(zip(places, parts, strict=True)):
        if tensor is not None:
            entries = tensor.reshape(-1)
            if len(entries) > length:
                raise ValueError(f"media[{key!r}][{i}]: got {len(entries)} entries, expected at most {length} tokens")
            matrix[row, start : start + len(entries)] = entries
    return matrix


def _places(batch: ExperienceBatch) -> list[tuple[int, int, int]]:
    """Return the row, the start in the row, and the number of tokens of each sample."""
    if batch.layout == "packed":
        bounds = batch.cu_seqlens.tolist()
        return [(0, start, stop - start) for start, stop in pairwise(bounds)]
    width, slots = widths(check_fields(batch))
    spans, _ = find_spans(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return [(i, a, n) for i, (a, n) in enumerate(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True))]


def _tokens(batch: ExperienceBatch, i: int, location: tuple[int, int, int]) -> torch.Tensor:
    """[n] Return the token ids of sample i without padding."""
    _, start, length = location
    row: torch.Tensor = batch.sequences[i]
    return row[start : start + length] if batch.layout == "padded" else row


def rope_positions(
    batch: ExperienceBatch, get_rope_index: Callable[..., Any], config: ModelConfig | None = None
) -> torch.Tensor:
    """Compute positions (4, B, S) or, packed, (4, 1, tokens): of the text, then the three spatial ones; 1 on padding.

    `get_rope_index` is this method of the model, called for each sample. Missing `mm_token_type_ids` are derived from
    the placeholder ids of `config`.
    """
    media = split_media(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    positions = torch.ones((4, *shape), dtype=torch.int64, device=batch.sequences[0].device)
    names = {BATCH_MEDIA.get(name, name.removeprefix("media.")): name for name in media}
    for i, location in enumerate(_places(batch)):
        row, start, length = location
        sample = {key: parts[i] for key, name in names.items() if (parts := media[name]) and parts[i] is not None}
        spatial = sample_positions(_tokens(batch, i, location), sample, get_rope_index, config, i)
        positions[0, row, start : start + length] = torch.arange(length, device=positions.device)
        positions[1:, row, start : start + length] = spatial
    return positions


def estimator_inputs(batch: ExperienceBatch, keys: Mapping[str, str]) -> Inputs:
    """Return the inputs of advantage estimators; `keys` are the keys of `info` by input name."""
    info = batch.info or {}
    extras = batch.extras or {}
    inner = info.get("info") or {}

    def ids() -> list[EID]:
        eids = [eid for eid in batch.ids or () if eid is not None]
        if len(eids) != len(batch):
            raise ValueError("batch: got rows without ids, expected an id for each row, to group by")
        return [eid if isinstance(eid, EID) else EID.parse(eid) for eid in eids]

    def complete(name: str, column: TokenColumn | None) -> TokenColumn | None:
        """Return a field; raise `ValueError` if only some rows have it, since the others read as padding."""
        absent = batch.origin.absent.get(name)
        if column is None or not absent:
            return column
        raise ValueError(f"{name}: missing in row {min(absent)}, expected it in every row, or in none")

    def rewards() -> Any:
        """Return the rewards of rows, as `row_rewards` does for records."""
        row_rewards, token_rewards = info.get("reward"), extras.get("token_level_reward")
        row_rewards = [None] * len(batch) if row_rewards is None else row_rewards
        if token_rewards is None or isinstance(row_rewards, torch.Tensor):
            return row_rewards
        absent = batch.origin.absent.get("extras.token_level_reward", ())
        sums = [None if i in absent else float(row.double().sum()) for i, row in enumerate(token_rewards)]
        return [total if reward is None else reward for reward, total in zip(row_rewards, sums, strict=True)]

    sources: dict[str, Callable[[], Any]] = {
        "rewards": rewards,
        "groups": lambda: [group_id(eid) for eid in ids()],
        "runs": lambda: [run_id(eid) for eid in ids()],
        "steps": lambda: [eid.step for eid in ids()],
        "ids": lambda: [eid.uid for eid in ids()],
        "mask": lambda: predicted_mask(batch),
        "response": lambda: _response(batch),
        "token_rewards": lambda: extras.get("token_level_reward"),
        "without_token_rewards": lambda: sorted(batch.origin.absent.get("extras.token_level_reward", ())),
        "values": lambda: complete("values", batch.values),
        "old_logprobs": lambda: complete("action_log_probs", batch.action_log_probs),
        "ref_logprobs": lambda: complete("base_action_log_probs", batch.base_action_log_probs),
        "teacher_logprobs": lambda: complete("extras.teacher_logprobs", extras.get("teacher_logprobs")),
        "entropy": lambda: complete("action_entropy", batch.action_entropy),
    }
    sources |= {name: lambda key=key: info.get(key, inner.get(key)) for name, key in keys.items()}  # type: ignore[misc]
    return Inputs(sources, len(batch))


def _response(batch: ExperienceBatch) -> Any:
    """Return a mask of the response slots that are not padding, tool tokens included."""
    if isinstance(batch.action_mask, Rows):
        return full_mask(batch.action_mask)
    if batch.action_mask is None:
        return None
    width, slots = batch.sequences.shape[1], batch.action_mask.shape[1]
    _, response_spans = find_spans(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return response_spans.mask(torch.bool, batch.action_mask.device)
