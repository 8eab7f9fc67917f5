"""`ExperienceBatch`: many experiences, model-ready, padded or packed; `Samples` and `BufferItem` beside it.

Invariant: slot j of a response-axis field speaks of token S - A + j of its row, in every padded layout; a packed batch
holds the same rows end to end.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.batch.device import Movable, assign_rest, constructor_signature
from rollbook.core.experience import own
from rollbook.core.fields import BATCH_FIELDS
from rollbook.core.freeform import same
from rollbook.core.rows import NUMPY, Rows, memory, unbind_copy

if TYPE_CHECKING:
    from rollbook.algorithms.inputs import Inputs
    from rollbook.compat.lightrft.ragged_batch import RaggedBatch
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.ids import EID


Device: TypeAlias = torch.device | str | int | None
Records: TypeAlias = "Sequence[Experience] | Experiences"
TokenColumn: TypeAlias = torch.Tensor | list[torch.Tensor]
"""A per-token field: (B, A), or 1-D tensors, such as `Rows`."""
Path = tuple[Any, ...]
Kind = tuple[torch.dtype, tuple[int, ...]]
"""What a number was as an entry of a tensor: its type, and its shape there (`(1,)` in a (B, 1) tensor)."""

_MISSING: Any = object()
_TORCH = {numpy_type: torch_type for torch_type, numpy_type in NUMPY.items()}
_NUMBERS = (bool, int, float, complex, np.generic)
_DEFAULTS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
}


@dataclass(slots=True)
class InfoOrigin:
    """What a collated `info` does not say of the items it came from."""

    missing: dict[Path, frozenset[int]] = field(default_factory=dict)
    """The rows that lack a key."""
    originals: dict[Path, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    """What a tensor shows, and what the items had, where a number of the tensor is not what was given."""
    kinds: dict[Path, tuple[Kind | None, ...]] = field(default_factory=dict)
    """What each row remembered of a number, where rows differed in that."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfoOrigin):
            return NotImplemented
        return same([self.missing, self.originals, self.kinds], [other.missing, other.originals, other.kinds])

    __hash__ = None  # type: ignore[assignment]


def collate_info(infos: Sequence[Any], kinds: Sequence[Any] | None = None) -> tuple[dict[Any, Any], InfoOrigin]:
    """One dict of tensors and lists, by key: numbers and tensors of one shape are stacked, dicts are collated by key,
    anything else is a list with `None` where an item lacks it.

    A number has the type that `kinds` remembers of it (see `split_info`), else int64, float32 or bool.

    >>> infos = [{"reward": 0.5, "tag": "a", "parts": {"x": 1}}, {"reward": 1.0, "parts": {"x": 2}}]
    >>> info, origin = collate_info(infos)
    >>> info
    {'reward': tensor([0.5000, 1.0000]), 'tag': ['a', None], 'parts': {'x': tensor([1, 2])}}
    >>> split_info(info, 2, origin)[0]
    [{'reward': 0.5, 'tag': 'a', 'parts': {'x': 1}}, {'reward': 1.0, 'parts': {'x': 2}}]
    """
    origin = InfoOrigin()
    return _collate([{} if info is None else info for info in infos], (), origin, list(kinds or ())), origin


def _collate(rows: list[Any], path: Path, origin: InfoOrigin, kinds: list[Any]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    keys = rows[0].keys() if rows else ()
    ragged = any(row.keys() != keys for row in rows)
    if ragged:
        keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        column = [row.get(key, _MISSING) for row in rows]
        here = (*path, key)
        missing = frozenset(i for i, v in enumerate(column) if v is _MISSING) if ragged else frozenset()
        if missing:
            origin.missing[here] = missing
        present = [value for value in column if value is not _MISSING] if missing else column
        if set(map(type, present)) == {dict}:
            result[key] = _collate([{} if value is _MISSING else value for value in column], here, origin, kinds)
            continue
        stacked = None if missing else _stack(column, here, origin, kinds)
        result[key] = [None if v is _MISSING else own(v, tensors=True) for v in column] if stacked is None else stacked
    return result


def _stack(column: list[Any], path: Path, origin: InfoOrigin, kinds: list[Any]) -> torch.Tensor | None:
    """The values as one tensor, if they can be."""
    types = set(map(type, column))
    if len(types) == 1 and not any(kinds) and (dtype := _DEFAULTS.get(type(column[0]))) is not None:
        try:
            plain = torch.tensor(column, dtype=dtype)
        except (RuntimeError, OverflowError, TypeError, ValueError):
            return None  # an integer beyond 64 bits
        shown = plain.tolist()
        if shown != column and not same(shown, column):
            origin.originals[path] = shown, list(column)
        return plain
    if all(issubclass(kind, _NUMBERS) for kind in types):
        stacked = _number_tensor(column, types, _kind(path, column, kinds, origin))
        if stacked is None:
            return None
    elif all(issubclass(kind, torch.Tensor) for kind in types):
        if len({(value.dtype, value.shape, value.device) for value in column}) > 1:
            return None
        stacked = torch.stack([value.detach() for value in column])
    else:
        return None
    if stacked[0].numel() == 1:
        shown = stacked.reshape(-1).tolist()
        if types != {type(shown[0])} or not (shown == column or same(shown, column)):
            origin.originals[path] = shown, own(column, tensors=True)
    return stacked


def _kind(path: Path, column: list[Any], kinds: list[Any], origin: InfoOrigin) -> Kind | None:
    """The type that all rows remember of a number; where they differ, the widest, and each row's is noted."""
    shared = {id(remembered): remembered for remembered in kinds}  # items of one batch share theirs
    distinct = {(remembered or {}).get(path) for remembered in shared.values()}
    if len(distinct) < 2:
        return distinct.pop() if distinct else None
    rows = tuple((remembered or {}).get(path) for remembered in kinds)
    origin.kinds[path] = rows
    if len({kind[1] for kind in rows if kind is not None}) > 1 or any(kind[1] for kind in rows if kind is not None):
        return None  # of different shapes: as numbers
    wide = [_DEFAULTS.get(type(v), torch.float32) if k is None else k[0] for k, v in zip(rows, column, strict=True)]
    return reduce(torch.promote_types, wide), ()


def _number_tensor(column: list[Any], types: set[type], kind: Kind | None) -> torch.Tensor | None:
    dtype, tail = kind or (None, ())
    if dtype is not None and not all(_holds(dtype, value) for value in column):
        dtype, tail = None, ()
    if dtype is None:
        if len(types) == 1 and all(issubclass(kind, np.generic) for kind in types):
            dtype = _TORCH.get(np.dtype(next(iter(types))))
            if dtype is None:
                return None  # dates, texts, long doubles
        if dtype is None and types <= {bool}:
            dtype = torch.bool
        if dtype is None:
            is_whole = all(issubclass(kind, (bool, int, np.integer, np.bool_)) for kind in types)
            imaginary = any(issubclass(kind, (complex, np.complexfloating)) for kind in types)
            dtype = torch.int64 if is_whole else torch.complex64 if imaginary else torch.float32
    try:
        return torch.tensor([v.item() if isinstance(v, np.generic) else v for v in column], dtype=dtype).reshape(
            len(column), *tail
        )
    except (RuntimeError, OverflowError, TypeError, ValueError):
        return None  # an integer beyond 64 bits, a date


def _holds(dtype: torch.dtype, value: Any) -> bool:
    if dtype.is_complex or isinstance(value, (complex, np.complexfloating)):
        return dtype.is_complex
    if dtype.is_floating_point:
        return True
    if dtype == torch.bool:
        return isinstance(value, (bool, np.bool_))
    bounds = torch.iinfo(dtype)
    return float(value).is_integer() and bounds.min <= value <= bounds.max


def split_info(
    info: dict[Any, Any] | None, count: int, origin: InfoOrigin | None = None
) -> tuple[list[dict[Any, Any]], dict[Path, Kind] | None]:
    """The `info` of each of `count` items, and what is to be remembered of its numbers (see `collate_info`).

    Tensors and lists with an entry for each item are split, and one-element entries become Python numbers; dicts are
    split by key; anything else goes to every item. Nothing is shared between the items or with `info`.

    >>> items, kinds = split_info({"reward": torch.tensor([1.0, 2.0], dtype=torch.float64), "epoch": 3}, 2)
    >>> items, kinds
    ([{'reward': 1.0, 'epoch': 3}, {'reward': 2.0, 'epoch': 3}], {('reward',): (torch.float64, ())})
    """
    kinds: dict[Path, Kind] = {}
    if info is None:
        return [{} for _ in range(count)], None
    if not isinstance(info, dict):
        raise ValueError(f"info: got {type(info).__name__}, expected a dict")
    return _split(info, count, (), origin or InfoOrigin(), kinds), kinds or None


def row_kinds(kinds: dict[Path, Kind] | None, origin: InfoOrigin, row: int) -> dict[Path, Kind] | None:
    """What one row remembers of its numbers."""
    if not origin.kinds:
        return kinds
    own_kinds = dict(kinds or {})
    for path, rows in origin.kinds.items():
        own_kinds.pop(path, None)
        kind = rows[row]
        if kind is not None:
            own_kinds[path] = kind
    return own_kinds or None


def _split(info: dict[Any, Any], count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]) -> list[Any]:
    rows: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key, value in info.items():
        here = (*path, key)
        entries = _entries(value, count, here, origin, kinds)
        missing = origin.missing.get(here, ())
        for i, (row, entry) in enumerate(zip(rows, entries, strict=True)):
            # A row that has the key by now was given it since the batch was made.
            empty = entry is None or (isinstance(entry, dict) and not entry)
            if not (empty and i in missing):
                row[key] = entry
    return rows


def _entries(value: Any, count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]) -> list[Any]:
    if isinstance(value, dict):
        return _split(value, count, path, origin, kinds)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return _tensor_entries(value, count, path, origin, kinds)
    if isinstance(value, list) and len(value) == count:
        return [own(item, tensors=True) for item in value]
    return [own(value, tensors=True) for _ in range(count)]


def check_info(info: Any, count: int, path: Path = ()) -> None:
    """Refuse a tensor that has not an entry for each of `count` samples."""
    if isinstance(info, dict):
        for key, value in info.items():
            check_info(value, count, (*path, key))
    elif isinstance(info, torch.Tensor) and info.dim() and info.shape[0] != count:
        name = "".join(f"[{key!r}]" for key in path)
        raise ValueError(f"info{name}: got {len(info)} entries, expected {count}, one for each sample")


def _tensor_entries(
    value: torch.Tensor, count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]
) -> list[Any]:
    if value.dim() == 0:
        return [value.item()] * count
    check_info(value, count, path)
    tail = tuple(value.shape[1:])
    if count and value[0].numel() != 1:
        return unbind_copy(value)
    shown = value.reshape(-1).tolist()
    before, originals = origin.originals.get(path, (None, None))
    if originals is not None and same(before, shown):
        return [own(item, tensors=True) for item in originals]
    if tail or (shown and _DEFAULTS.get(type(shown[0])) != value.dtype):
        kinds[path] = value.dtype, tail
    return shown


def info_arrays(info: Mapping[Any, Any] | None, origin: InfoOrigin) -> dict[Any, Any] | None:
    """A collated `info` for `pick_info`, if it is all tensors with an entry for each row: their memory and types."""
    if origin.missing or origin.originals or origin.kinds:
        return None
    result: dict[Any, Any] = {}
    for key, value in (info or {}).items():
        if isinstance(value, dict):
            result[key] = info_arrays(value, origin)
        elif isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu":
            result[key] = memory(value), value.dtype if value.dtype not in NUMPY else None
        else:
            return None
        if result[key] is None:
            return None
    return result


def pick_info(arrays: dict[Any, Any], rows: NDArray[np.int64]) -> dict[Any, Any]:
    """The collated `info` of some rows (what `collate_info` makes of the rows' own is the same, and takes longer)."""
    result: dict[Any, Any] = {}
    for key, value in arrays.items():
        if isinstance(value, dict):
            result[key] = pick_info(value, rows)
        else:
            # By way of numpy, whose indexing takes a fraction of the time.
            array, dtype = value
            picked = torch.from_numpy(array[rows])
            result[key] = picked if dtype is None else picked.view(dtype)
    return result


@dataclass(eq=False, repr=False)
class BufferItem(Movable):
    """One sample of a batch, as LightRFT's buffer keeps it: L tokens, R response slots, on memory of its own.

    `sequences`, `attention_mask` (L,); the other per-token fields (R,). Numbers in `info` are Python's. Media as in
    `ExperienceBatch`, for this sample alone; `BufferItemVL` takes them in LightRFT's order.

    >>> import torch
    >>> item = BufferItem(torch.tensor([5, 6, 7]), torch.tensor([-0.5]), *[None] * 6, {"reward": 1.0})
    >>> item.sequences.tolist(), item.info, item.labels
    ([5, 6, 7], {'reward': 1.0}, None)
    """

    sequences: Any
    action_log_probs: Any
    base_action_log_probs: Any
    values: Any
    returns: Any
    advantages: Any
    attention_mask: Any
    action_mask: Any
    info: dict[Any, Any] | None
    action_entropy: Any = None
    labels: Any = None
    references: Any = None
    kl: Any = None
    eid: EID | None = None
    pixel_values: Any = None
    image_grid_thws: Any = None
    raw_images: Any = None
    pixel_values_videos: Any = None
    video_grid_thws: Any = None
    media: dict[str, Any] | None = None
    extras: dict[str, Any] | None = None
    action_start: int = 0
    """The first response slot that is this sample's own; the ones before are padding."""
    implied: frozenset[str] = frozenset()
    """Masks that the sample lacks, and that only tell its padding from the rest; unpadding drops them."""
    info_kinds: dict[Any, Any] | None = None
    """The type that numbers of `info` had in the batch, where it is not the usual one."""

    if not TYPE_CHECKING:
        # Written by hand, as that of ExperienceBatch is; fields that are not given have their default (`peek`).
        def __init__(
            self,
            sequences,
            action_log_probs,
            base_action_log_probs,
            values,
            returns,
            advantages,
            attention_mask,
            action_mask,
            info,
            action_entropy=None,
            *more,
            **rest,
        ):
            self.sequences = sequences
            self.action_log_probs = action_log_probs
            self.base_action_log_probs = base_action_log_probs
            self.values = values
            self.returns = returns
            self.advantages = advantages
            self.attention_mask = attention_mask
            self.action_mask = action_mask
            self.info = info
            self.action_entropy = action_entropy
            if more or rest:
                assign_rest(self, 10, more, rest)

    @classmethod
    def of(cls, sheet: RaggedBatch, row: int) -> BufferItem:
        """Row `row` of a sheet, whose fields are copied out of it when they are first asked for."""
        item = cls.__new__(cls)
        item.__dict__["_source"] = sheet, row
        return item

    def __getattr__(self, name: str) -> Any:
        if name not in ITEM_FIELDS:
            raise AttributeError(f"'BufferItem' object has no attribute {name!r}")
        # Threads may read one item: all get the value that came first.
        value = self.__dict__.setdefault(name, peek(self.__dict__, name))
        source = self.__dict__.get("_source")
        if source is not None and name in BATCH_FIELDS and source[0].large.issubset(self.__dict__):
            self.detach()  # all that is large is copied out by now
        return value

    def detach(self) -> BufferItem:
        """Copy out what is still in the sheet this item was made from, and let go of that; gives itself back."""
        self.__dict__.update(self.__getstate__())
        self.__dict__.pop("_source", None)
        return self

    def _change(self, change: Callable[[Any], Any], other: Callable[[Any], Any]) -> BufferItem:
        return super(BufferItem, self.detach())._change(change, other)

    def __getstate__(self) -> dict[str, Any]:
        # Read, not looked at: processes share tensors as files, which go when a tensor that nobody keeps does.
        fields = {name: getattr(self, name) for name in ITEM_FIELDS}
        return {name: value for name, value in self.__dict__.items() if name != "_source"} | fields

    def __repr__(self) -> str:
        tokens = "no" if self.sequences is None else len(self.sequences)
        mask = self.action_mask
        actions = "" if mask is None else f", {int(mask.sum())} actions"
        name = "" if self.eid is None else f"{self.eid}, "
        return f"BufferItem({name}{tokens} tokens{actions}, info={sorted(self.info or (), key=str)})"


def peek(state: dict[str, Any], name: str) -> Any:
    """A field of an item with this state: its own, or else what its sheet has, or else the default."""
    source = state.get("_source")  # first: it goes when the last field has come
    if name in state:
        return state[name]
    return ITEM_DEFAULTS.get(name) if source is None else source[0].value(name, source[1])


ITEM_FIELDS = tuple(f.name for f in dataclasses.fields(BufferItem))
ITEM_DEFAULTS = {f.name: f.default for f in dataclasses.fields(BufferItem) if f.default is not dataclasses.MISSING}
if not TYPE_CHECKING:
    BufferItem.__signature__ = constructor_signature(BufferItem)
for _name in ITEM_FIELDS:
    # Defaults that stand on the class would be found before what the sheet has.
    if _name in BufferItem.__dict__:
        delattr(BufferItem, _name)


@dataclass(eq=False, slots=True)
class Origin:
    """What a batch's tensors alone do not say of the items it was made from, so that a split gives those back.

    An entry describes the value that the batch had when it was made: assigning to the field voids it.
    """

    absent: dict[str, frozenset[int]] = field(default_factory=dict)
    """By field, the rows that lack it; they read as padding."""
    dtypes: dict[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """By field, the type each row had, where they differed."""
    media_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By media field, how many of its rows each sample has."""
    info: InfoOrigin = field(default_factory=InfoOrigin)
    described: dict[str, Any] = field(default_factory=dict, compare=False)
    """By field of the batch, the value that the entries describe."""

    def __getstate__(self) -> tuple[Any, ...]:
        return self.absent, self.dtypes, self.media_rows, self.info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.absent, self.dtypes, self.media_rows, self.info = state
        self.described = {}

    def copy(self) -> Origin:
        """The same, to be changed apart."""
        return Origin(dict(self.absent), dict(self.dtypes), dict(self.media_rows), self.info, dict(self.described))

    def describe(self, batch: ExperienceBatch) -> None:
        """Tie the entries to the values that the batch has now."""
        names = {key.partition(".")[0] for part in (self.absent, self.dtypes, self.media_rows) for key in part}
        if self.info.missing or self.info.originals or self.info.kinds:
            names.add("info")
        self.described = {name: getattr(batch, name) for name in names}

    def void_replaced(self, batch: ExperienceBatch) -> None:
        """Drop the entries of fields that were assigned to since `describe`."""
        for name in [name for name, value in self.described.items() if getattr(batch, name) is not value]:
            del self.described[name]
            parts: tuple[dict[str, Any], ...] = (self.absent, self.dtypes, self.media_rows)
            for part in parts:
                for key in [key for key in part if key == name or key.startswith(f"{name}.")]:
                    del part[key]
            if name == "info":
                self.info = InfoOrigin()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Origin):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in dataclasses.fields(self) if f.compare)

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class ExperienceBatch(Movable):
    """Many experiences as a model takes them: LightRFT's `Experience` (its positional order), for text and vision.

    B samples; S is the longest sequence, A the most response slots. Padded, per-token fields are matrices, and slot j
    of a (B, A) field speaks of token S - A + j. Packed, they are `Rows`: lists of 1-D tensors that lie end to end in
    `.values`, with `cu_seqlens` and `position_ids` for attention over ragged input.

    - `sequences`, `attention_mask` (B, S): token ids; 1 on what is attended. No mask: everything is.
    - `action_log_probs`, `base_action_log_probs`, `values`, `returns`, `advantages`, `kl`, `action_entropy` (B, A).
    - `action_mask` (B, A): True where the model chose the token. No mask: everywhere. False on the first token of
      records without a prompt, which no model predicts.
    - `info`: by key, a tensor or list with an entry for each sample, or a dict of such.
    - `labels`, `references`, `ids` [B]: lists; `ids` are `EID`s, and name the records.
    - `pixel_values` (rows of all images, ...), `image_grid_thws` (images, 3), `pixel_values_videos`,
      `video_grid_thws`, `raw_images` (a list for each sample), `media` (name -> list of tensors, for other inputs).
    - `extras`: response-axis fields by the record's names, such as `loss_weights` or `policy_versions` (B, A, ...).
    - `action_starts` [B]: the first slot that is a row's own; `None`: 0 in every row.

    >>> batch = ExperienceBatch(
    ...     sequences=torch.tensor([[0, 5, 6, 7], [4, 5, 6, 7]]), action_log_probs=torch.tensor([[-0.1], [-0.2]]),
    ...     base_action_log_probs=None, values=None, returns=None, advantages=torch.tensor([[1.0], [-1.0]]),
    ...     attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), action_mask=torch.tensor([[True], [True]]),
    ...     info={"reward": torch.tensor([1.0, 0.0])},
    ... )
    >>> batch
    ExperienceBatch(2 samples, padded, sequences 2x4, actions 2x1)
    >>> packed = batch.pack()
    >>> packed.sequences.values.tolist(), packed.cu_seqlens.tolist(), packed.position_ids.tolist()
    ([5, 6, 7, 4, 5, 6, 7], [0, 3, 7], [[0, 1, 2, 0, 1, 2, 3]])
    >>> packed.pad() == batch
    True
    """

    sequences: Any
    action_log_probs: Any
    base_action_log_probs: Any
    values: Any
    returns: Any
    advantages: Any
    attention_mask: Any
    action_mask: Any
    info: dict[Any, Any] | None
    kl: Any = None
    action_entropy: Any = None
    labels: list[Any] | None = None
    references: list[Any] | None = None
    ids: list[EID | None] | None = None
    pixel_values: Any = None
    image_grid_thws: Any = None
    raw_images: list[Any] | None = None
    pixel_values_videos: Any = None
    video_grid_thws: Any = None
    media: dict[str, list[Any]] | None = None
    extras: dict[str, Any] | None = None
    action_starts: torch.Tensor | None = None
    origin: Origin = field(default_factory=Origin)

    if not TYPE_CHECKING:
        # Written by hand: every parameter and every attribute takes time, and of 23 fields a caller gives about ten.
        # Those that are `None` by default are looked up on the class.
        def __init__(
            self,
            sequences,
            action_log_probs,
            base_action_log_probs,
            values,
            returns,
            advantages,
            attention_mask,
            action_mask,
            info,
            kl=None,
            action_entropy=None,
            labels=None,
            references=None,
            *more,
            **rest,
        ):
            self.sequences = sequences
            self.action_log_probs = action_log_probs
            self.base_action_log_probs = base_action_log_probs
            self.values = values
            self.returns = returns
            self.advantages = advantages
            self.attention_mask = attention_mask
            self.action_mask = action_mask
            self.info = info
            if kl is not None:
                self.kl = kl
            if action_entropy is not None:
                self.action_entropy = action_entropy
            if labels is not None:
                self.labels = labels
            if references is not None:
                self.references = references
            if more or rest:
                assign_rest(self, 13, more, rest)

    @classmethod
    def of(cls, fields: dict[str, Any], origin: Origin) -> ExperienceBatch:
        """A batch from fields by name, `None` where there is none, without the constructor, and tied to its origin."""
        batch = cls.__new__(cls)
        state = batch.__dict__
        state.update(_BLANK)
        state.update(fields)
        origin.describe(batch)
        state["origin"] = origin
        return batch

    def _get_origin(self) -> Origin:
        origin: Origin | None = self.__dict__.get("origin")
        if origin is None:
            origin = self.__dict__["origin"] = Origin()
        elif origin.described:
            origin.void_replaced(self)
        return origin

    def _set_origin(self, origin: Origin) -> None:
        # A copy: `dataclasses.replace` gives both batches the one, and each is assigned to by itself.
        self.__dict__["origin"] = mine = origin.copy()
        if not mine.described:
            mine.describe(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "origin": self.origin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        origin = self.__dict__["origin"] = state["origin"].copy()
        origin.describe(self)

    def _change(self, change: Callable[[Any], Any], other: Callable[[Any], Any]) -> ExperienceBatch:
        origin = self.origin if "origin" in self.__dict__ else None
        super()._change(change, other)
        if origin is not None:
            origin.describe(self)  # moved, not replaced
        return self

    def __len__(self) -> int:
        if self.sequences is None:
            raise ValueError("sequences: got None, expected token ids")
        tensor = isinstance(self.sequences, torch.Tensor)
        return int(self.sequences.shape[0]) if tensor else len(self.sequences)  # several times as fast as len(tensor)

    @property
    def layout(self) -> str:
        """`padded` or `packed`."""
        return "packed" if isinstance(self.sequences, list) else "padded"

    def __repr__(self) -> str:
        if self.sequences is None:
            return "ExperienceBatch(no sequences)"
        if self.layout == "packed":
            total = sum(len(row) for row in self.sequences)
            return f"ExperienceBatch({len(self)} samples, packed, {total} tokens)"
        width = "x".join(map(str, self.sequences.shape))
        actions = next((v for _, v in token_fields(self, "response") if isinstance(v, torch.Tensor)), None)
        shown = "no actions" if actions is None else f"actions {'x'.join(map(str, actions.shape[:2]))}"
        return f"ExperienceBatch({len(self)} samples, padded, sequences {width}, {shown})"

    # --- layouts --------------------------------------------------------------------------------------------

    def pack(self) -> ExperienceBatch:
        """The same samples packed: what is attended, end to end. A packed batch is given back as it is."""
        from rollbook.compat.lightrft.ragged_batch import packed, sheet_of_batch

        return self if self.layout == "packed" else packed(sheet_of_batch(self))

    def pad(self, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
        """The same samples padded, with as little padding as they need.

        `left`: rows end together, on both axes. `prompt_left_response_right`: prompts end together, and responses
        begin together, as a fresh rollout has them.
        """
        from rollbook.compat.lightrft.ragged_batch import padded, sheet_of_batch

        return padded(sheet_of_batch(self), pad_token_id, layout)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: where each sample's tokens begin in a packed batch."""
        return self._packed("cu_seqlens", self.sequences).cu_seqlens

    @property
    def action_cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: where each sample's slots begin in a packed batch's response-axis fields."""
        for _, value in token_fields(self, "response"):
            if value is not None:
                return self._packed("action_cu_seqlens", value).cu_seqlens
        return torch.zeros(len(self) + 1, dtype=torch.int32, device=self.cu_seqlens.device)

    def _packed(self, name: str, column: Rows | list[torch.Tensor]) -> Rows:
        if self.layout != "packed":
            raise ValueError(f"{name}: the batch is padded; pack() gives one that has it")
        return column if isinstance(column, Rows) else Rows(column)

    @property
    def max_seqlen(self) -> int:
        """The longest sample's number of tokens."""
        if self.layout == "packed":
            return max((len(row) for row in self.sequences), default=0)
        return int(self.sequences.shape[1])

    @property
    def position_ids(self) -> torch.Tensor:
        """(1, tokens) packed, from 0 again with each sample; (B, S) padded, from 0 with the first attended token (1 on
        padding)."""
        if self.layout == "packed":
            rows = self._packed("position_ids", self.sequences)
            starts = torch.from_numpy(rows.offsets[:-1]).to(rows.values.device)
            lengths = torch.tensor(rows.lengths, dtype=torch.int64, device=rows.values.device)
            position = torch.arange(len(rows.values), device=rows.values.device)
            return (position - torch.repeat_interleave(starts, lengths)).unsqueeze(0)
        if self.attention_mask is None:
            position = torch.arange(self.sequences.shape[1], device=self.sequences.device)
            return position.expand(self.sequences.shape)
        attended = self.attention_mask.long()
        counted: torch.Tensor = attended.cumsum(-1) - 1
        return counted.masked_fill(attended == 0, 1)

    def model_inputs(self, get_rope_index: Callable[..., Any] | None = None, *, config: Any = None) -> dict[str, Any]:
        """Keyword arguments for a transformers model.

        Padded: `input_ids`, `attention_mask`, `position_ids`. Packed: `input_ids` (1, tokens), `position_ids` that
        restart, by which eager and SDPA attention keep samples apart (with `use_cache=False`), and the arguments of
        attention over ragged input (`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`).

        With media, their inputs too, under the model's names. A model whose images have a grid computes positions in
        space itself, so padded batches with grids have no `position_ids`; packed ones need the model's
        `get_rope_index`, with which they are (4, 1, tokens), the text's first. Both need `mm_token_type_ids`: samples
        that come without get them from the placeholder ids of `config`, the model's configuration (not needed beside a
        `get_rope_index` that is the model's own method).
        """
        inputs: dict[str, Any] = {}
        if self.layout == "packed":
            rows = self._packed("input_ids", self.sequences)
            bounds = rows.cu_seqlens
            inputs["input_ids"] = rows.values.unsqueeze(0)
            inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen}
            # With a cache, eager and SDPA attention would not look for where samples begin.
            inputs["use_cache"] = False
        else:
            inputs["input_ids"] = self.sequences
            if self.attention_mask is not None:
                inputs["attention_mask"] = self.attention_mask
        from rollbook.batch.media import GRIDS, TYPES, config_of
        from rollbook.compat.lightrft.ragged_batch import media_inputs, rope_positions

        config = config_of(get_rope_index) if config is None else config
        inputs |= media_inputs(self, config)
        if not any(grid in inputs for grid in GRIDS):
            inputs["position_ids"] = self.position_ids
        elif get_rope_index is not None:
            inputs["position_ids"] = rope_positions(self, get_rope_index, config)
        elif self.layout == "packed":
            raise ValueError(
                "get_rope_index: got None, expected the model's method: a packed batch with image or video grids needs "
                "positions in space that restart with each sample"
            )
        elif TYPES not in inputs:
            raise ValueError(
                f"media[{TYPES!r}]: got None beside image or video grids, expected it, or config=model.config to "
                "derive it from placeholder ids: without it, a model has no positions in space"
            )
        return inputs

    def estimator_inputs(self, keys: Mapping[str, str]) -> Inputs:
        """Return the inputs of advantage estimators; `keys` says which key of `info` holds which input."""
        from rollbook.compat.lightrft.ragged_batch import estimator_inputs

        return estimator_inputs(self, keys)

    def at_actions(self, predictions: torch.Tensor) -> torch.Tensor:
        """From what the model said at each token, what it said of each response slot: one token earlier.

        `predictions` is (B, S, ...) or, packed, (1, tokens, ...): entry t was computed from tokens up to t, and so
        speaks of token t + 1. Gives (B, A, ...) or (slots, ...), in the order of this batch's response-axis fields. Of
        a sample's very first token nothing was said: a slot that speaks of it gets some other entry, and is to be
        masked.

        >>> batch = ExperienceBatch(torch.tensor([[1, 2, 3]]), torch.zeros(1, 2), *[None] * 7)
        >>> batch.at_actions(torch.tensor([[10, 20, 30]]))
        tensor([[10, 20]])
        """
        if self.layout == "packed":
            rows = self._packed("sequences", self.sequences)
            self._check_predictions(predictions, (1, len(rows.values)))
            slots = self.action_cu_seqlens.long()
            counts = slots.diff()
            ends = rows.cu_seqlens.long()
            slot = torch.arange(int(slots[-1]), device=slots.device)
            shift = torch.repeat_interleave(ends[1:] - slots[1:], counts)
            first = torch.repeat_interleave(ends[:-1], counts)
            return predictions[0, torch.maximum(slot + shift - 1, first)]
        actions = next((value for _, value in token_fields(self, "response") if value is not None), None)
        if actions is None:
            raise ValueError("at_actions: no response-axis field is there to say where the responses are")
        self._check_predictions(predictions, tuple(self.sequences.shape))
        begin = predictions.shape[1] - actions.shape[1]
        if begin:
            return predictions[:, begin - 1 : -1]
        return torch.cat([predictions[:, :1], predictions[:, :-1]], dim=1)

    @staticmethod
    def _check_predictions(predictions: torch.Tensor, expected: tuple[int, ...]) -> None:
        """One entry for each token: with one less, as of `logits[:, :-1]`, every slot would get its neighbour's."""
        if tuple(predictions.shape[:2]) != expected:
            shape = list(predictions.shape)
            raise ValueError(
                f"predictions: got shape {shape}, expected {list(expected)} first, one entry for each token"
            )


_BLANK = {f.name: None for f in dataclasses.fields(ExperienceBatch) if f.default is dataclasses.MISSING}
_BLANK.pop("origin")
if not TYPE_CHECKING:
    ExperienceBatch.origin = property(ExperienceBatch._get_origin, ExperienceBatch._set_origin)
    ExperienceBatch.__signature__ = constructor_signature(ExperienceBatch)


def token_fields(holder: ExperienceBatch | BufferItem, axis: str | None = None) -> list[tuple[str, Any]]:
    """The per-token fields of a batch or item and their values; extras as `extras.NAME`."""
    columns = [(f.name, getattr(holder, f.name)) for f in BATCH_FIELDS.values() if axis in (None, f.axis)]
    if axis in (None, "response") and holder.extras:
        columns += [(f"extras.{name}", value) for name, value in holder.extras.items()]
    return columns


@dataclass(eq=False)
class Samples(Movable):
    """What an engine generated for B prompts, before anything was learned about it.

    Batched: `sequences`, `attention_mask` (B, S), `action_mask` (B, A), `num_actions` = A, `packed_seq_lens` `None`.
    Packed: `sequences` (1, tokens), `attention_mask` (1, tokens) with the number of the sample from 1 on,
    `action_mask` `None`, `num_actions` and `packed_seq_lens` [B]. `response_length`, `total_length` [B] are floats.
    `rollouts` [B]: the engine's own samples, if an engine of `rollbook.rollout` made them, and `records` [B], the
    native records of these; `ids` [B]: `EID`s of samples that come without.

    >>> packed = Samples(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 2]]), None, [1, 1], [2, 1], None, None,
    ...                  ["a", "b"], None)
    >>> packed.packed_seq_lens
    tensor([2, 1])
    """

    sequences: Any
    attention_mask: Any
    action_mask: Any
    num_actions: int | torch.Tensor | list[int] | None
    packed_seq_lens: torch.Tensor | list[int] | None
    response_length: Any
    total_length: Any
    prompts: list[Any] | None
    labels: list[Any] | None
    pad_len: int | None = None
    references: list[Any] | None = None
    rollouts: list[Any] | None = None
    ids: list[EID] | None = None
    records: Experiences | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_actions, list):
            self.num_actions = torch.tensor(self.num_actions, dtype=torch.int64)
        if isinstance(self.packed_seq_lens, list):
            self.packed_seq_lens = torch.tensor(self.packed_seq_lens, dtype=torch.int64)


class _Order(type):
    """Makes a class whose call takes another class's arguments in an order of its own, and builds that class."""

    built: type
    signature: inspect.Signature

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            bound = cls.signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}() {error}") from None
        defaults: dict[str, Any] = {
            f.name: None for f in dataclasses.fields(cls.built) if f.default is dataclasses.MISSING
        }
        defaults.pop("origin", None)
        return cls.built(**defaults | bound.arguments)

    @property
    def __signature__(cls) -> inspect.Signature:
        return cls.signature

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.built)


def _order(built: type, first: str) -> inspect.Signature:
    names = first.split()
    names += [f.name for f in dataclasses.fields(built) if f.name not in names]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = inspect.Parameter(names[0], kind)
    return inspect.Signature([required, *(inspect.Parameter(name, kind, default=None) for name in names[1:])])


if TYPE_CHECKING:
    ExperienceVL = ExperienceBatch
    BufferItemVL = BufferItem
else:

    class ExperienceVL(metaclass=_Order):
        """`ExperienceBatch` with its arguments in the order of LightRFT's vision class; only `sequences` is required.

        >>> batch = ExperienceVL(torch.tensor([[1, 2]]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))
        >>> type(batch).__name__, batch.pixel_values.shape, isinstance(batch, ExperienceVL)
        ('ExperienceBatch', torch.Size([4, 6]), True)
        """

        built = ExperienceBatch
        signature = _order(
            ExperienceBatch,
            "sequences pixel_values image_grid_thws raw_images pixel_values_videos video_grid_thws action_log_probs "
            "base_action_log_probs values returns advantages attention_mask action_mask info kl action_entropy labels "
            "references",
        )

    class BufferItemVL(metaclass=_Order):
        """`BufferItem` with its arguments in the order of LightRFT's vision class; only `sequences` is required.

        >>> BufferItemVL(torch.tensor([1, 2]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]])).image_grid_thws
        tensor([[1, 2, 2]])
        """

        built = BufferItem
        signature = _order(
            BufferItem,
            "sequences pixel_values image_grid_thws pixel_values_videos video_grid_thws raw_images action_log_probs "
            "base_action_log_probs values returns advantages attention_mask action_mask info action_entropy",
        )


def from_experiences(
    experiences: Records,
    *,
    packing_samples: bool = False,
    pad_token_id: int = 0,
    layout: str = "left",
    device: Device = None,
) -> ExperienceBatch:
    """A batch of records, straight from their columns: no rows are made, and each column is copied once.

    `sequences` are the tokens; `action_log_probs` the `old_logprobs` if every record has them, else the engine's
    `logprobs`; `returns`, `advantages` and `action_mask` by name; a record's other response-axis fields go to
    `extras`. `info` holds `reward`, `response_length` (actions), `total_length`, `image_num` and `video_num` of
    records with grids, the custom fields and the records' `info` and `metrics`, collated; `ids` the records' ids. With
    a `device` the columns travel packed, in one pinned buffer, and are padded there.

    >>> from rollbook import Experience
    >>> rows = [Experience(tokens=[1, 2, 3], logprobs=[-0.5, -0.25], reward=1.0), Experience(tokens=[4, 5], reward=0.5)]
    >>> batch = from_experiences(rows, pad_token_id=9)
    >>> batch.sequences.tolist(), batch.action_mask.tolist(), batch.info["reward"].tolist()
    ([[1, 2, 3], [9, 4, 5]], [[True, True], [False, True]], [1.0, 0.5])
    """
    from rollbook.compat.lightrft.ragged_batch import packed, padded
    from rollbook.compat.lightrft.replay_buffer import sheet_of_experiences

    sheet = sheet_of_experiences(experiences)
    if device is not None:
        sheet.move(device)
    return packed(sheet) if packing_samples else padded(sheet, pad_token_id, layout)


__all__ = [
    "BufferItem",
    "BufferItemVL",
    "ExperienceBatch",
    "ExperienceVL",
    "Origin",
    "Samples",
    "from_experiences",
    "token_fields",
]
