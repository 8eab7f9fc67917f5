"""`Sheet`: samples without padding, column by column: what every batch and item is made from, and turned into.

Invariant: a sheet owns its columns; row i of a per-token column lies between the offsets of its axis, and what an item
gets of it is a copy. An item made from a sheet reads as if it held its fields from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.batch.device import to
from rollbook.compat.lightrft.info import info_arrays, row_kinds, split_info
from rollbook.core.experience import own
from rollbook.core.fields import BATCH_FIELDS
from rollbook.core.ids import EID
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import NUMPY, Column, Spans, concatenated, memory

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import Origin
    from rollbook.core.media import Pool

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
class Sheet:
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
        held = (name for name, column in self.columns.items() if column is not None)
        return frozenset("extras" if name.startswith("extras.") else name for name in held)

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
        masks = [name for name, one in BATCH_FIELDS.items() if one.absent]
        return all(self.columns.get(name) is not None for name in masks) and all(
            dtype is None or dtype in NUMPY for dtype, _ in self.kinds.values()
        )

    @cached_property
    def infos(self) -> tuple[list[Any], Any]:
        """[B] Each sample's `info`, and what is to be remembered of its numbers."""
        found, kinds = split_info(self.info, len(self), self.origin.info)
        infos: list[Any] = list(found)
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
            found = {key: parts[i] for key, parts in self.media.items() if key.startswith("media.") and parts}
            return {key.removeprefix("media."): one for key, one in found.items() if one is not None} or None
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

    def move(self, device: Any) -> None:
        """Take everything to a device; what comes from the host is gathered in one pinned buffer and copied at once."""
        target = torch.device(device)
        columns = {name: column for name, column in self.columns.items() if column is not None}
        if target.type == "cpu":
            self.columns |= {name: c.cpu() if isinstance(c, torch.Tensor) else c for name, c in columns.items()}
        else:
            shipped = _ship([(column, self.lengths(name)) for name, column in columns.items()], target)
            self.columns |= dict(zip(columns, shipped, strict=True))
        self.info = to(self.info, target)
        self.media = to(self.media, target)
        self.lists = to(self.lists, target)
        self.device = target


class WideSheet(Sheet):
    """The samples of a padded batch as wide as it is: what a split without unpadding gives.

    What is attended is copied at once, into `bare`. Padding is read from the batch (`columns` are its own tensors, (B,
    width, ...)) unless somebody has written into it; then a row is padded with what its first and last entries were.
    """

    bare: Sheet
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
        cls, values: dict[str, Any], origin: Origin, bare: Sheet, spans: tuple[Spans, Spans], starts: list[int]
    ) -> WideSheet:
        """The rows of padded fields, (B, width, ...), which `bare` has without padding: `spans` say where, as those of
        `spans_of_rows` do."""
        tokens, responses = (np.full(len(bare), one.width, dtype=np.int64) for one in spans)
        wide = cls(tokens, responses, origin, values, bare.info, bare.lists, bare.media, bare.device)
        wide.bare, wide.spans, wide.starts = bare, spans, starts
        held = {name: value for name, value in values.items() if value is not None}
        wide.versions = {name: _version(value) for name, value in held.items()}
        wide.edges = {name: _edges(value) for name, value in held.items()}
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


def _ship(columns: list[tuple[Column, Lengths]], device: torch.device) -> list[torch.Tensor]:
    """Each column as a tensor on the device; those of the host travel together."""
    result: list[Any] = []
    waiting: list[tuple[int, Column, Lengths, torch.dtype, tuple[int, ...], int]] = []
    size = 0
    for column, lengths in columns:
        if isinstance(column, torch.Tensor) and (
            column.device.type != "cpu" or (column.dim() == 1 and _constant(column))
        ):
            # One value for all needs no transfer, and what is on a device none from the host.
            result.append(column[:1].to(device).expand(column.shape) if _constant(column) else column.to(device))
            continue
        dtype = column.dtype if not isinstance(column, Ragged) else getattr(torch, column.dtype)
        trailing = tuple(column.shape[1:]) if isinstance(column, torch.Tensor) else column.trailing
        shape = (int(lengths.sum()), *trailing)
        waiting.append((len(result), column, lengths, dtype, shape, size))
        size += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64  # views of another type ask for alignment
        result.append(None)
    stage = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = []
    for at, column, lengths, dtype, shape, start in waiting:
        stop = start + int(np.prod(shape)) * dtype.itemsize
        concatenated(column, lengths, out=stage[start:stop].view(dtype).reshape(shape))
        parts.append((at, start, stop, dtype, shape))
    moved = stage.to(device, non_blocking=True)
    for at, start, stop, dtype, shape in parts:
        result[at] = moved[start:stop].view(dtype).reshape(shape)
    return result


def _constant(column: torch.Tensor) -> bool:
    """Whether a column is one value, said once (see `torch.Tensor.expand`)."""
    return column.dim() == 1 and column.stride(0) == 0 and len(column) > 0


def constant(value: float, length: int, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
    """(length,) One value throughout, in the memory of one."""
    return torch.full((1,), value, dtype=dtype, device=device).expand(length)
