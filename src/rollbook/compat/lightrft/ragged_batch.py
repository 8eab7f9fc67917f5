"""`RaggedBatch`: samples without padding, column by column: what every batch and item is made from, and turned into.

Invariant: a sheet owns its columns; row i of a per-token column lies between the offsets of its axis, and what an item
gets of it is a copy. An item made from a sheet reads as if it held its fields from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.inputs import Inputs, all_of, group_id, run_id
from rollbook.batch.device import copy_columns, to
from rollbook.batch.media import BY_TOKEN, GRIDS, TYPES, sample_positions, token_types
from rollbook.compat.lightrft.batch import (
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
from rollbook.core.experience import own
from rollbook.core.fields import BATCH_FIELDS, BATCH_MEDIA, FIELDS
from rollbook.core.ids import EID
from rollbook.core.ragged import offsets_of
from rollbook.core.rows import NUMPY, Column, Rows, Spans, concatenated, memory

if TYPE_CHECKING:
    from rollbook.core.media import Pool


_COUNTED = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Fields of pixels and of grids, and the key of `info` that says how many images or videos each sample has."""
_IN_BATCH = (*BATCH_MEDIA, "media")
_NO_MEDIA = {name: None for pixels, grids, _ in _COUNTED for name in (grids, pixels)}


def divided(batch: ExperienceBatch) -> dict[str, list[Any] | None]:
    """Each sample's media, by field (other inputs as `media.NAME`): views of the batch's tensors."""
    if all(getattr(batch, name) is None for name in _IN_BATCH):
        return dict(_NO_MEDIA)
    count = len(batch)
    result: dict[str, list[Any] | None] = {}
    rows: dict[str, list[int]] = {}
    for pixels, grids, number in _COUNTED:
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
                    f"{grids}: got {len(shapes)} rows for {count} samples, expected info[{number!r}] to say how many "
                    "each sample has"
                )
        result[grids] = _divided(grids, shapes, rows.get(grids), count, batch.origin.absent.get(grids), empty=None)
        if isinstance(data, torch.Tensor):
            rows[pixels] = list(media_rows.get(pixels) or _pixel_rows(pixels, data, result[grids], counts, count))
        result[pixels] = _divided(pixels, data, rows.get(pixels), count, batch.origin.absent.get(pixels), empty=0)
    if not isinstance(batch.media, (dict, type(None))):
        raise ValueError(f"media: got {type(batch.media).__name__}, expected a dict of lists")
    for key, tensors in (batch.media or {}).items():
        result[f"media.{key}"] = sample_list(f"media[{key!r}]", tensors, count)
    return result


def _counts(batch: ExperienceBatch, number: str) -> list[int] | None:
    """How many images each sample has, if `info` says so."""
    entry = (batch.info or {}).get(number)
    if entry is None:
        return None
    counts = entry.tolist() if isinstance(entry, (torch.Tensor, np.ndarray)) else entry
    good = isinstance(counts, (list, tuple)) and len(counts) == len(batch)
    if not good or not all(isinstance(c, (int, float)) and float(c).is_integer() and c >= 0 for c in counts):
        raise ValueError(f"info[{number!r}]: got {counts!r}, expected {len(batch)} whole numbers")
    return [int(c) for c in counts]


def _pixel_rows(
    name: str, data: torch.Tensor, grids: list[Any] | None, counts: list[int] | None, count: int
) -> list[int]:
    if grids is not None:
        return [0 if grid is None else int(grid.reshape(-1, grid.shape[-1]).prod(-1).sum()) for grid in grids]
    if counts and sum(counts) and len(data) % sum(counts) == 0:
        rows_per_image = len(data) // sum(counts)  # without grids every image has as many rows
        return [rows_per_image * number for number in counts]
    if count and len(data) % count == 0:
        return [len(data) // count] * count
    raise ValueError(f"{name}: got {len(data)} rows for {count} samples, expected grids that say how many each has")


def _divided(
    name: str,
    value: torch.Tensor | Sequence[Any] | None,
    rows: list[int] | None,
    count: int,
    absent: frozenset[int] | None,
    empty: int | None,
) -> Any:
    """Each sample's part: `None` where it is absent, or where it is empty and that is what emptiness means."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return sample_list(name, value, count)
    if rows is None or len(rows) != count or sum(rows) != len(value):
        raise ValueError(f"{name}: got {len(value)} rows, expected {sum(rows or ())}, those of {count} samples")
    parts: list[Any] = list(torch.split(value, rows))
    if absent is not None:
        return [None if i in absent else part for i, part in enumerate(parts)]
    return [None if empty is None and not len(part) else part for part in parts]


def count_media(media: Mapping[str, Any], info: dict[Any, Any], origin: InfoOrigin) -> None:
    """Put `image_num` and `video_num` [B] into the `info` of samples with grids.

    Samples that did not have them are without them again after a split. What all samples have is left as it is.
    """
    for _, grids, number in _COUNTED:
        parts = media.get(grids)
        missing = range(len(parts or ())) if number not in info else origin.missing.get((number,), ())
        if not parts or not missing or not all(isinstance(part, (torch.Tensor, type(None))) for part in parts):
            continue
        counts = [0 if part is None else len(part) if part.dim() > 1 else 1 for part in parts]
        before = list(info[number]) if number in info else [None] * len(parts)
        origin.missing[number,], origin.originals[number,] = frozenset(missing), (counts, before)
        info[number] = torch.tensor(counts)


def sample_list(name: str, value: Sequence[Any] | NDArray[Any] | None, count: int) -> list[Any] | None:
    """An entry for each sample, once there are as many."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a list of {count}, an entry for each sample")
    if len(value) != count:
        raise ValueError(f"{name}: got {len(value)} entries, expected {count}, one for each sample")
    return list(value)


def joined(name: str, parts: list[Any] | None, origin: Origin) -> torch.Tensor | None:
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


Lengths = NDArray[np.int64]
SAMPLE_LISTS = {"labels": "labels", "references": "references", "raw_images": "raw_images", "ids": "eid"}
"""A batch's lists with an entry for each sample, and an item's name for the entry."""


def own_entry(name: str, value: Any) -> Any:
    """An entry of a batch's list that a sample can change without changing another's (images are shared)."""
    if name == "raw_images":
        return list(value) if isinstance(value, list) else value
    return value.replace() if isinstance(value, EID) else own(value, tensors=True)


def on_tokens(name: str) -> bool:
    """Whether a per-token field runs over all tokens; if not, over the response."""
    return name in _ON_TOKENS


_ON_TOKENS = frozenset(name for name, one in BATCH_FIELDS.items() if one.axis == "sequence")


@dataclass(eq=False)
class RaggedBatch:
    """B samples without padding: T tokens and U response slots in all."""

    tokens: Lengths
    """[B] How many tokens each sample has."""
    responses: Lengths
    """[B] How many response slots."""
    origin: Origin
    columns: dict[str, Column | None] = field(default_factory=dict)
    """By per-token field (extras as `extras.NAME`), the values: (T, ...) or (U, ...)."""
    info: dict[Any, Any] | None = None
    lists: dict[str, list[Any] | None] = field(default_factory=dict)
    media: dict[str, list[Any] | None] = field(default_factory=dict)
    """By media field (other inputs as `media.NAME`), each sample's tensor or `None`."""
    device: Any = "cpu"
    long_tokens: bool = False
    """Whether a batch has the tokens in int64, as losses and most models take them, whatever they are here."""

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self, name: str) -> Lengths:
        """[B] The lengths of the axis that a per-token field has."""
        return self.tokens if on_tokens(name) else self.responses

    # --- rows -----------------------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> tuple[list[int], list[int]]:
        """[B + 1] each: where the samples begin on the response axis, and on the token axis."""
        return offsets_of(self.responses).tolist(), offsets_of(self.tokens).tolist()

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The columns' memory, of a sheet whose columns are tensors on the host."""
        return {name: memory(column) for name, column in self.columns.items() if isinstance(column, torch.Tensor)}

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        """By per-token field, its type and trailing sizes; sheets with equal kinds can be mixed."""
        return {
            name: (column.dtype, tuple(column.shape[1:])) if isinstance(column, torch.Tensor) else (None, ())
            for name, column in self.columns.items()
        }

    @cached_property
    def large(self) -> frozenset[str]:
        """The item's fields that the columns are read by."""
        names = (name for name, column in self.columns.items() if column is not None)
        return frozenset("extras" if name.startswith("extras.") else name for name in names)

    @cached_property
    def regular(self) -> bool:
        """Whether every sample has every per-token field that there is, all of one type, on the host."""
        irregular = self.origin.absent.keys() | self.origin.dtypes.keys()
        return not irregular & self.columns.keys() and torch.device(self.device).type == "cpu"

    @cached_property
    def plain(self) -> bool:
        """Whether every sample has masks and whatever other fields there are, of types that numpy has, and neither
        media nor extras nor an `info` that is `None`."""
        if not self.regular or any(self.media.values()) or self.lists.get("raw_images") or self.origin.absent:
            return False
        if not self.columns.keys() <= BATCH_FIELDS.keys():
            return False
        masks = [name for name, batch_field in BATCH_FIELDS.items() if batch_field.absent]
        return all(self.columns.get(name) is not None for name in masks) and all(
            dtype is None or dtype in NUMPY for dtype, _ in self.kinds.values()
        )

    @cached_property
    def infos(self) -> tuple[list[Any], Any]:
        """[B] Each sample's `info`, and what is to be remembered of its numbers."""
        split, kinds = split_info(self.info, len(self), self.origin.info)
        infos: list[Any] = list(split)
        for i in self.origin.absent.get("info", ()):
            infos[i] = infos[i] or None
        return infos, kinds

    @cached_property
    def plain_fields(self) -> list[tuple[str, bool, torch.dtype, tuple[int, ...], NDArray[Any]]]:
        """The columns there are: name, axis (see `bounds`), type, trailing sizes, memory."""
        return [
            (name, on_tokens(name), kind, trailing, self.arrays[name])
            for name, (kind, trailing) in self.kinds.items()
            if kind is not None
        ]

    @cached_property
    def listed(self) -> bool:
        """Whether there are labels, references, ids or images."""
        return any(entries is not None for entries in self.lists.values())

    @cached_property
    def info_arrays(self) -> dict[Any, Any] | None:
        """What `pick_info` takes, if this `info` is plain."""
        return None if "info" in self.origin.absent else info_arrays(self.info, self.origin.info)

    def view(self, name: str, i: int) -> torch.Tensor | None:
        """A per-token field of sample i where it lies, to be read only; `None` if it has none."""
        column = self.columns.get(name)
        if column is None or i in self.origin.absent.get(name, ()):
            return None
        values = column if isinstance(column, torch.Tensor) else concatenated(column, self.lengths(name))
        bounds = self.bounds[on_tokens(name)]
        return self._typed(name, i, values[bounds[i] : bounds[i + 1]])

    def _typed(self, name: str, i: int, row: torch.Tensor) -> torch.Tensor:
        row = row.detach()
        return row.to(self.origin.dtypes[name][i]) if name in self.origin.dtypes else row

    def row(self, name: str, i: int) -> torch.Tensor | None:
        """A per-token field of sample i, copied; `None` if it has none."""
        row = self.view(name, i)
        return None if row is None else row.clone(memory_format=torch.contiguous_format)

    def value(self, name: str, i: int) -> Any:
        """What sample i has as an item's field."""
        if name in BATCH_FIELDS:
            return self.row(name, i)
        if name == "info":
            return own(self.infos[0][i], tensors=True)
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
            return None if listed is None else own_entry(_LISTED[name], listed[i])
        entries = self.media.get(name)
        return None if entries is None else entries[i]

    def keep_media(self, pool: Pool) -> None:
        """Hold media through a pool: once by content, on memory of their own."""
        for name, parts in self.media.items():
            if parts:
                self.media[name] = [pool.keep(part) for part in parts]
        images = self.lists.get("raw_images")
        if images:
            self.lists["raw_images"] = [pool.keep(image) for image in images]

    # --- devices --------------------------------------------------------------------------------------------

    def move(self, device: torch.device | str | int) -> None:
        """Take everything to a device; what comes from the host is gathered in one pinned buffer and copied at once."""
        target = torch.device(device)
        columns = {name: column for name, column in self.columns.items() if column is not None}
        if target.type == "cpu":
            self.columns |= {name: c.cpu() if isinstance(c, torch.Tensor) else c for name, c in columns.items()}
        else:
            shipped = copy_columns([(column, self.lengths(name)) for name, column in columns.items()], target)
            self.columns |= dict(zip(columns, shipped, strict=True))
        self.info = to(self.info, target)
        self.media = to(self.media, target)
        self.lists = to(self.lists, target)
        self.device = target


class PaddedRaggedBatch(RaggedBatch):
    """The samples of a padded batch as wide as it is: what a split without unpadding gives.

    What is attended is copied at once, into `bare`. Padding is read from the batch (`columns` are its own tensors, (B,
    width, ...)) unless somebody has written into it; then a row is padded with what its first and last entries were.
    """

    bare: RaggedBatch
    """The same samples without padding."""
    spans: tuple[Spans, Spans]
    """Where in its rows the samples' tokens lie, and their response slots."""
    starts: list[int]
    """[B] Each sample's first response slot that is its own."""
    versions: dict[str, int]
    edges: dict[str, Any]

    @property
    def regular(self) -> bool:
        """Its rows are read one by one."""
        return False

    @property
    def plain(self) -> bool:
        """Its rows are read one by one."""
        return False

    @classmethod
    def of(
        cls, values: dict[str, Any], origin: Origin, bare: RaggedBatch, spans: tuple[Spans, Spans], starts: list[int]
    ) -> PaddedRaggedBatch:
        """The rows of padded fields, (B, width, ...), which `bare` has without padding: `spans` say where, as those of
        `spans_of_rows` do."""
        tokens, responses = (np.full(len(bare), axis_spans.width, dtype=np.int64) for axis_spans in spans)
        wide = cls(tokens, responses, origin, values, bare.info, bare.lists, bare.media, bare.device)
        wide.bare, wide.spans, wide.starts = bare, spans, starts
        columns = {name: value for name, value in values.items() if value is not None}
        wide.versions = {name: _version(value) for name, value in columns.items()}
        wide.edges = {name: _edges(value) for name, value in columns.items()}
        return wide

    def view(self, name: str, i: int) -> torch.Tensor | None:
        """A per-token field of sample i, copied; `None` if it has none."""
        column: Any = self.columns.get(name)
        if column is None:
            return None
        on_sequence = on_tokens(name)
        spans, start = self.spans[not on_sequence], self.bare.bounds[on_sequence][i]
        begin, length = int(spans.starts[i]), int(spans.lengths[i])
        row: torch.Tensor = column[i].detach().clone(memory_format=torch.contiguous_format)
        if _version(column) != self.versions[name] and len(row):
            ends = torch.as_tensor(self.edges[name][i])
            row[:begin], row[begin + length :] = ends[0], ends[-1]
        inside: Any = self.bare.columns.get(name)
        row[begin : begin + length] = int(name in _MASKS) if inside is None else inside[start : start + length]
        lacks = i in self.origin.absent.get(name, ()) and name not in _MASKS
        return None if lacks and not row.any() else self._typed(name, i, row)

    row = view

    def value(self, name: str, i: int) -> Any:
        """What sample i has as an item's field."""
        if name == "action_start":
            return self.starts[i]
        if name == "implied":  # as long as there is padding, a mask tells it from the rest
            return frozenset(mask for mask in _MASKS if i in self.origin.absent.get(mask, ()))
        return super().value(name, i)


def _edges(matrix: torch.Tensor) -> Any:
    """(B, 1 or 2, ...) The first and the last column, copied."""
    ends = slice(None, None, max(matrix.shape[1] - 1, 1))
    if matrix.is_cpu and matrix.dtype in NUMPY:
        return memory(matrix)[:, ends].copy()  # a third of the time
    return matrix.detach()[:, ends].clone()


def _version(tensor: torch.Tensor) -> int:
    """A number that changes when a tensor is written to."""
    return -1 if tensor.is_inference() else tensor._version  # there torch counts nothing


_MASKS = tuple(name for name, one in BATCH_FIELDS.items() if one.absent)
_LISTED = {item: batch for batch, item in SAMPLE_LISTS.items()}


def constant(value: float, length: int, dtype: torch.dtype, device: Device = "cpu") -> torch.Tensor:
    """(length,) One value throughout, in the memory of one."""
    return torch.full((1,), value, dtype=dtype, device=device).expand(length)


LAYOUTS = ("left", "prompt_left_response_right")
_LARGE_MASK = 1 << 17
"""A mask with more entries is worth a look whether it needs to be copied."""


# --- from batches -------------------------------------------------------------------------------------------------


def sheet_of_batch(batch: ExperienceBatch, in_one: bool = False) -> RaggedBatch:
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


def unpadded(batch: ExperienceBatch, values: dict[str, Any], in_one: bool) -> tuple[RaggedBatch, tuple[Spans, Spans]]:
    """The sheet of a padded batch with the fields `values`, and where its tokens and response slots lie there."""
    width = int(values["sequences"].shape[1])
    slots = next(
        (int(column.shape[1]) for name, column in values.items() if column is not None and not on_tokens(name)), 0
    )
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


def still_absent(sheet: RaggedBatch) -> None:
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


def whole_sheet(batch: ExperienceBatch, tokens: Lengths, responses: Lengths) -> RaggedBatch:
    """A sheet with everything of a batch but its per-token columns."""
    count = len(batch)
    sheet = RaggedBatch(tokens, responses, batch.origin.copy())
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
    first_columns: dict[bool, tuple[str, int]] = {}
    for name, value in values.items():
        if value is not None:
            first, width = first_columns.setdefault(on_tokens(name), (name, value.shape[1]))
            if value.shape[1] != width:
                raise ValueError(f"{name}: got {value.shape[1]} columns, expected {width}, as {first} has")
    name, slots = first_columns.get(False, ("", 0))
    if slots > first_columns[True][1]:
        raise ValueError(f"{name}: got {slots} columns, expected at most {first_columns[True][1]}, as sequences has")
    return first_columns[True][1], slots


def action_starts(batch: ExperienceBatch, slots: int) -> Lengths:
    """[B] The first slot that is a row's own, checked."""
    slots_before = batch.action_starts
    count = len(batch)
    if slots_before is None:
        return np.zeros(count, dtype=np.int64)
    starts = np.asarray(slots_before.cpu() if isinstance(slots_before, torch.Tensor) else slots_before)
    if starts.dtype.kind not in "iu" or starts.shape != (count,) or (starts < 0).any() or (starts > slots).any():
        raise ValueError(f"action_starts: got {starts.tolist()}, expected {count} whole numbers from 0 to {slots}")
    return starts.astype(np.int64)


def predicted_mask(batch: ExperienceBatch) -> Any:
    """A batch's `action_mask`, (B, A) or `Rows`, False on slots that speak of a sample's first token.

    Nothing comes before such a token, so that no model predicts it; a batch of records has it masked already
    (`rollbook.batch.columns.mask_unpredicted`). `None`, or the batch's own mask, if there is no such slot.

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
        row_lengths = lengths[on_tokens(name)]
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
        first, last, solid = _row_edges(mask, look_solid)
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


def _row_edges(mask: torch.Tensor, look_solid: bool) -> tuple[Lengths, Lengths, bool]:
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


def packed(sheet: RaggedBatch) -> ExperienceBatch:
    """The packed batch of a sheet."""
    tokens, responses = sheet.tokens.tolist(), sheet.responses.tolist()

    def rows(name: str, column: Column) -> Rows:
        values = concatenated(column, sheet.lengths(name)).contiguous()
        if name == "sequences" and sheet.long_tokens:
            values = values.long()
        return Rows(values, tokens if on_tokens(name) else responses)

    return _batch(sheet, rows, None)


def padded(sheet: RaggedBatch, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
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

    for name, batch_field in BATCH_FIELDS.items():
        spans = tokens if on_tokens(name) else responses
        if batch_field.absent and sheet.columns.get(name) is None and not spans.full:
            # No mask says that everything counts; now padding must be told from that.
            sheet.origin.absent[name] = frozenset(range(len(sheet)))
            dtype = torch.int64 if on_tokens(name) else torch.bool
            sheet.columns[name] = constant(batch_field.absent, int(spans.lengths.sum()), dtype, sheet.device)

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


def _batch(sheet: RaggedBatch, lay_out: Callable[[str, Column], Any], starts: torch.Tensor | None) -> ExperienceBatch:
    fields: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    for name, column in sheet.columns.items():
        value = None if column is None else lay_out(name, column)
        if name.startswith("extras."):
            extras[name.removeprefix("extras.")] = value
        else:
            fields[name] = value
    origin = Origin(dict(sheet.origin.absent), dict(sheet.origin.dtypes), {}, sheet.origin.info)
    media: dict[str, Any] = {}
    for name, parts in sheet.media.items():
        if name.startswith("media."):
            media[name.removeprefix("media.")] = parts and [own(part, tensors=True) for part in parts]
        else:
            fields[name] = joined(name, parts, origin)
    if starts is not None:
        starts = starts.to(sheet.device)
    fields |= sheet.lists
    fields |= {"info": sheet.info, "media": media or None, "extras": extras or None}
    return ExperienceBatch.of({**fields, "action_starts": starts}, origin)


def media_inputs(batch: ExperienceBatch, config: Any = None) -> dict[str, torch.Tensor]:
    """The media of a batch under the model's names; by-token ones padded with 0, or end to end, as the tokens are.

    Samples with image or video grids need `mm_token_type_ids`; with the model's `config`, those that came without get
    them from their placeholder ids.
    """
    inputs: dict[str, torch.Tensor] = {}
    for name, key in BATCH_MEDIA.items():
        value = getattr(batch, name)
        if isinstance(value, list):
            present = [part for part in value if part is not None]
            value = torch.cat(present) if present else None
        if isinstance(value, torch.Tensor) and len(value):
            inputs[key] = value
    media = dict(batch.media or {})
    if config is not None and any(grid in inputs for grid in GRIDS):
        types = media.get(TYPES) or [None] * len(batch)
        if any(part is None for part in types):
            rows = zip(_places(batch), types, strict=True)
            media[TYPES] = [
                token_types(_tokens(batch, i, place), config) if part is None else part
                for i, (place, part) in enumerate(rows)
            ]
    for key, parts in media.items():
        present = [part for part in parts if part is not None]
        if present:
            inputs[key] = _by_token(batch, key, parts, present[0]) if key in BY_TOKEN else torch.cat(present)
    return inputs


def _by_token(batch: ExperienceBatch, key: str, parts: list[Any], model: torch.Tensor) -> torch.Tensor:
    places = _places(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    matrix = model.new_zeros(shape)
    for i, ((row, start, length), part) in enumerate(zip(places, parts, strict=True)):
        if part is not None:
            entries = part.reshape(-1)
            if len(entries) > length:
                raise ValueError(f"media[{key!r}][{i}]: got {len(entries)} entries, expected at most {length} tokens")
            matrix[row, start : start + len(entries)] = entries
    return matrix


def _places(batch: ExperienceBatch) -> list[tuple[int, int, int]]:
    """For each sample the row it lies in, where it begins there, and how many tokens it has."""
    if batch.layout == "packed":
        bounds = batch.cu_seqlens.tolist()
        return [(0, start, stop - start) for start, stop in pairwise(bounds)]
    width, slots = widths(checked(batch))
    spans, _ = spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return [(i, a, n) for i, (a, n) in enumerate(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True))]


def _tokens(batch: ExperienceBatch, i: int, place: tuple[int, int, int]) -> torch.Tensor:
    """[n] The token ids of sample i, without padding."""
    _, start, length = place
    row: torch.Tensor = batch.sequences[i]
    return row[start : start + length] if batch.layout == "padded" else row


def rope_positions(batch: ExperienceBatch, get_rope_index: Callable[..., Any], config: Any = None) -> torch.Tensor:
    """(4, B, S) or, packed, (4, 1, tokens): the text's positions, then the three of images and videos.

    `get_rope_index` is that method of the model, and is asked sample by sample; 1 on padding. `config`: the model's, of
    whose placeholder ids `mm_token_type_ids` are derived where a sample came without.
    """
    media = divided(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    positions = torch.ones((4, *shape), dtype=torch.int64, device=batch.sequences[0].device)
    names = {BATCH_MEDIA.get(name, name.removeprefix("media.")): name for name in media}
    for i, place in enumerate(_places(batch)):
        row, start, length = place
        sample = {key: parts[i] for key, name in names.items() if (parts := media[name]) and parts[i] is not None}
        spatial = sample_positions(_tokens(batch, i, place), sample, get_rope_index, config)
        positions[0, row, start : start + length] = torch.arange(length, device=positions.device)
        positions[1:, row, start : start + length] = spatial
    return positions


def estimator_inputs(batch: ExperienceBatch, keys: Mapping[str, str]) -> Inputs:
    info = batch.info or {}
    extras = batch.extras or {}
    inner = info.get("info") or {}

    def ids() -> list[EID]:
        eids = [eid for eid in batch.ids or () if eid is not None]
        if len(eids) != len(batch):
            raise ValueError("batch: got rows without ids, expected an id for each, to group by")
        return [eid if isinstance(eid, EID) else EID.parse(eid) for eid in eids]

    def whole(name: str, value: Any) -> Any:
        """A field that every row has, or none; rows that lack it read as padding, and are no data."""
        absent = batch.origin.absent.get(name)
        if value is None or not absent:
            return value
        raise ValueError(f"{name}: row {min(absent)} has none, expected it in every row, or in none")

    def rewards() -> Any:
        """As `row_rewards` of the records."""
        row_rewards, token_rewards = info.get("reward"), extras.get("token_level_reward")
        row_rewards = [None] * len(batch) if row_rewards is None else row_rewards
        if token_rewards is None or isinstance(row_rewards, torch.Tensor):
            return row_rewards
        absent = batch.origin.absent.get("extras.token_level_reward", ())
        sums = [None if i in absent else float(row.double().sum()) for i, row in enumerate(token_rewards)]
        return [total if reward is None else reward for reward, total in zip(row_rewards, sums, strict=True)]

    makers: dict[str, Callable[[], Any]] = {
        "rewards": rewards,
        "groups": lambda: [group_id(eid) for eid in ids()],
        "runs": lambda: [run_id(eid) for eid in ids()],
        "steps": lambda: [eid.step for eid in ids()],
        "ids": lambda: [eid.uid for eid in ids()],
        "mask": lambda: predicted_mask(batch),
        "response": lambda: _response(batch),
        "token_rewards": lambda: extras.get("token_level_reward"),
        "without_token_rewards": lambda: sorted(batch.origin.absent.get("extras.token_level_reward", ())),
        "values": lambda: whole("values", batch.values),
        "old_logprobs": lambda: whole("action_log_probs", batch.action_log_probs),
        "ref_logprobs": lambda: whole("base_action_log_probs", batch.base_action_log_probs),
        "teacher_logprobs": lambda: whole("extras.teacher_logprobs", extras.get("teacher_logprobs")),
        "entropy": lambda: whole("action_entropy", batch.action_entropy),
    }
    makers |= {name: lambda key=key: info.get(key, inner.get(key)) for name, key in keys.items()}  # type: ignore[misc]
    return Inputs(makers, len(batch))


def _response(batch: ExperienceBatch) -> Any:
    """The slots that are a row's response, tools' tokens at its end included, and no padding."""
    if isinstance(batch.action_mask, Rows):
        return all_of(batch.action_mask)
    if batch.action_mask is None:
        return None
    width, slots = batch.sequences.shape[1], batch.action_mask.shape[1]
    _, acting = spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return acting.mask(torch.bool, batch.action_mask.device)
