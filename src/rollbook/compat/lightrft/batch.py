"""LightRFT's classes: `ExperienceBatch`, padded or packed, its fields and rows (`BufferItem`), and `Samples`.

Invariant: slot j of a response-axis field belongs to token S - A + j of its row, in every padded layout. A packed batch
has the same rows end to end.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.batch.device import Movable
from rollbook.core.experience import copy_containers
from rollbook.core.freeform import same
from rollbook.core.rows import NUMPY, Rows, memory, unbind_copy

if TYPE_CHECKING:
    from rollbook.algorithms.inputs import Inputs
    from rollbook.batch.media import ModelConfig
    from rollbook.compat.lightrft.ragged_batch import RaggedBatch
    from rollbook.core.experience import Experience
    from rollbook.core.experiences import Experiences
    from rollbook.core.fields import Axis
    from rollbook.core.ids import EID


Device: TypeAlias = torch.device | str | int | None
Records: TypeAlias = "Sequence[Experience] | Experiences"
TokenColumn: TypeAlias = torch.Tensor | list[torch.Tensor]
"""A per-token field: (B, A), or 1-D tensors, such as `Rows`."""
Path = tuple[Any, ...]
"""Keys from the top of an `info` to an entry."""
Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape that a number had as an entry of a tensor (`(1,)` in a (B, 1) tensor)."""
Number: TypeAlias = bool | int | float | complex | np.generic

_MISSING: Any = object()
_TORCH = {numpy_type: torch_type for torch_type, numpy_type in NUMPY.items()}
_NUMBERS = (bool, int, float, complex, np.generic)
_DEFAULTS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
}


@dataclass(frozen=True, slots=True)
class BatchField:
    """A per-token field of LightRFT's batch: [B, S] on the `sequence` axis, [B, A] on the `response` axis.

    Args:
        name: Name in the batch.
        axis: Axis of the field.
        sources: Fields of the record to read it from; the first that every record has is used.
        absent: Value for records without the field. A missing mask masks nothing.

    >>> BATCH_FIELDS["action_log_probs"].axis, BATCH_FIELDS["action_log_probs"].sources
    ('response', ('old_logprobs', 'logprobs'))
    """

    name: str
    axis: Axis
    sources: tuple[str, ...] = ()
    absent: float = 0


BATCH_FIELDS: dict[str, BatchField] = {
    f.name: f
    for f in (
        BatchField("sequences", "sequence", ("tokens",)),
        BatchField("action_log_probs", "response", ("old_logprobs", "logprobs")),
        BatchField("base_action_log_probs", "response", ("ref_logprobs",)),
        BatchField("values", "response", ("values",)),
        BatchField("returns", "response", ("returns",)),
        BatchField("advantages", "response", ("advantages",)),
        BatchField("attention_mask", "sequence", absent=1),
        BatchField("action_mask", "response", ("action_mask",), absent=1),
        BatchField("kl", "response"),
        BatchField("action_entropy", "response", ("entropy",)),
    )
}
"""Per-token fields by LightRFT's names. Other response-axis fields are in `extras`, under their own names."""

BATCH_MEDIA: dict[str, str] = {
    "pixel_values": "pixel_values",
    "image_grid_thws": "image_grid_thw",
    "pixel_values_videos": "pixel_values_videos",
    "video_grid_thws": "video_grid_thw",
}
"""Media fields of a LightRFT batch and their keys in `multi_modal_inputs`; other keys are in `media`."""


@dataclass(slots=True)
class InfoOrigin:
    """What collating loses of the `info` of items, so that splitting restores it."""

    missing: dict[Path, frozenset[int]] = field(default_factory=dict)
    """Rows that lack a key."""
    originals: dict[Path, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    """Numbers of a tensor and those of the items, if conversion to the tensor changed them."""
    kinds: dict[Path, tuple[Kind | None, ...]] = field(default_factory=dict)
    """Type of a number in each row, if rows differ."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InfoOrigin):
            return NotImplemented
        return same([self.missing, self.originals, self.kinds], [other.missing, other.originals, other.kinds])

    __hash__ = None  # type: ignore[assignment]


def collate_info(infos: Sequence[Any], kinds: Sequence[Any] | None = None) -> tuple[dict[Any, Any], InfoOrigin]:
    """Collate the `info` of items: stack numbers and tensors of one shape, collate dicts by key, and list the rest.

    Args:
        infos: The `info` of each item.
        kinds: Types of the numbers of each item, as `split_info` returns them; `None`: int64, float32 or bool.

    Returns:
        One dict of tensors and lists, with `None` in a list for an item that lacks the key; and what is needed to split
        it again.

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
        entry_path = (*path, key)
        missing = frozenset(i for i, v in enumerate(column) if v is _MISSING) if ragged else frozenset()
        if missing:
            origin.missing[entry_path] = missing
        present = [value for value in column if value is not _MISSING] if missing else column
        if set(map(type, present)) == {dict}:
            result[key] = _collate([{} if value is _MISSING else value for value in column], entry_path, origin, kinds)
            continue
        stacked = None if missing else _stack(column, entry_path, origin, kinds)
        result[key] = (
            [None if v is _MISSING else copy_containers(v, tensors=True) for v in column]
            if stacked is None
            else stacked
        )
    return result


def _stack(column: list[Any], path: Path, origin: InfoOrigin, kinds: list[Any]) -> torch.Tensor | None:
    """Stack values to one tensor, or return `None` if they cannot be stacked."""
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
            origin.originals[path] = shown, copy_containers(column, tensors=True)
    return stacked


def _kind(path: Path, column: list[Any], kinds: list[Any], origin: InfoOrigin) -> Kind | None:
    """Return the type of a number in all rows; if rows differ, the widest, and record each row's in `origin`."""
    shared = {id(row_kinds): row_kinds for row_kinds in kinds}  # items of one batch share one dict
    distinct = {(row_kinds or {}).get(path) for row_kinds in shared.values()}
    if len(distinct) < 2:
        return distinct.pop() if distinct else None
    rows = tuple((row_kinds or {}).get(path) for row_kinds in kinds)
    origin.kinds[path] = rows
    if len({kind[1] for kind in rows if kind is not None}) > 1 or any(kind[1] for kind in rows if kind is not None):
        return None  # different shapes: collated as plain numbers
    wide = [_DEFAULTS.get(type(v), torch.float32) if k is None else k[0] for k, v in zip(rows, column, strict=True)]
    return reduce(torch.promote_types, wide), ()


def _number_tensor(column: list[Any], types: set[type], kind: Kind | None) -> torch.Tensor | None:
    dtype, tail = kind or (None, ())
    if dtype is not None and not all(_can_represent(dtype, value) for value in column):
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


def _can_represent(dtype: torch.dtype, number: Number) -> bool:
    if dtype.is_complex or isinstance(number, (complex, np.complexfloating)):
        return dtype.is_complex
    if dtype.is_floating_point:
        return True
    if dtype == torch.bool:
        return isinstance(number, (bool, np.bool_))
    bounds = torch.iinfo(dtype)
    real = float(number)
    return real.is_integer() and bool(bounds.min <= number <= bounds.max)  # type: ignore[operator]


def split_info(
    info: dict[Any, Any] | None, count: int, origin: InfoOrigin | None = None
) -> tuple[list[dict[Any, Any]], dict[Path, Kind] | None]:
    """Split a collated `info` into those of `count` items; see `collate_info`.

    Tensors and lists with an entry for each item are split, and one-element entries become Python numbers; dicts are
    split by key; every item gets a copy of anything else.

    Args:
        info: A collated `info`.
        count: Number of items.
        origin: What collating lost.

    Returns:
        The `info` of each item, and types of numbers for `collate_info` if they are not the usual ones.

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
    """Return the types of the numbers of one row."""
    if not origin.kinds:
        return kinds
    of_row = dict(kinds or {})
    for path, rows in origin.kinds.items():
        of_row.pop(path, None)
        kind = rows[row]
        if kind is not None:
            of_row[path] = kind
    return of_row or None


def _split(info: dict[Any, Any], count: int, path: Path, origin: InfoOrigin, kinds: dict[Path, Kind]) -> list[Any]:
    rows: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key, value in info.items():
        entry_path = (*path, key)
        entries = _entries(value, count, entry_path, origin, kinds)
        missing = origin.missing.get(entry_path, ())
        for i, (row, entry) in enumerate(zip(rows, entries, strict=True)):
            # A row that lacked the key may have been assigned a value since.
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
        return [copy_containers(item, tensors=True) for item in value]
    return [copy_containers(value, tensors=True) for _ in range(count)]


def check_info(info: Any, count: int, path: Path = ()) -> None:
    """Raise `ValueError` if a tensor in `info` does not have an entry for each of `count` samples."""
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
    recorded, originals = origin.originals.get(path, (None, None))
    if originals is not None and same(recorded, shown):
        return [copy_containers(item, tensors=True) for item in originals]
    if tail or (shown and _DEFAULTS.get(type(shown[0])) != value.dtype):
        kinds[path] = value.dtype, tail
    return shown


def info_arrays(info: Mapping[Any, Any] | None, origin: InfoOrigin) -> dict[Any, Any] | None:
    """Return the arrays of a collated `info` for `pick_info`; `None` unless all entries are tensors on the host."""
    if origin.missing or origin.originals or origin.kinds:
        return None
    result: dict[Any, Any] = {}
    for key, value in (info or {}).items():
        if isinstance(value, dict):
            result[key] = info_arrays(value, origin)
        elif isinstance(value, torch.Tensor) and value.dim() and value.is_cpu:
            result[key] = memory(value), value.dtype if value.dtype not in NUMPY else None
        else:
            return None
        if result[key] is None:
            return None
    return result


def pick_info(arrays: dict[Any, Any], rows: NDArray[np.int64]) -> dict[Any, Any]:
    """Return the collated `info` of some rows; equal to `collate_info` of their `info`, but faster."""
    result: dict[Any, Any] = {}
    for key, value in arrays.items():
        if isinstance(value, dict):
            result[key] = pick_info(value, rows)
        else:
            # numpy indexes in a fraction of torch's time.
            array, dtype = value
            picked = torch.from_numpy(array[rows])
            result[key] = picked if dtype is None else picked.view(dtype)
    return result


def _assign_rest(new: Movable, first: int, more: tuple[Any, ...], rest: dict[str, Any]) -> None:
    """Assign the constructor arguments that follow the `first` fields, positional (`more`) and by name (`rest`)."""
    names = list(new.__dataclass_fields__)
    if len(more) > len(names) - first:
        raise TypeError(f"{type(new).__name__}() takes {len(names)} arguments, got {first + len(more)}")
    assigned = dict(zip(names[first:], more, strict=False))
    for name, value in rest.items():
        if name not in names or name in assigned:
            problem = "multiple values for" if name in assigned else "an unexpected keyword"
            raise TypeError(f"{type(new).__name__}() got {problem} argument {name!r}")
        assigned[name] = value
    for name, value in assigned.items():
        if value is not None:
            setattr(new, name, value)


def _constructor_signature(kind: type[Any]) -> inspect.Signature:
    """Return the signature of the default constructor of a dataclass."""
    parameters = []
    for spec in dataclasses.fields(kind):
        default = inspect.Parameter.empty if spec.default is dataclasses.MISSING else spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = None
        parameters.append(
            inspect.Parameter(spec.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=spec.type)
        )
    return inspect.Signature(parameters)


@dataclass(eq=False, repr=False)
class BufferItem(Movable):
    """One sample of a batch, as in LightRFT's buffer: L tokens, R response slots, on its own memory.

    Fields are those of `ExperienceBatch` without the batch axis; `BufferItemVL` takes them in another order.

    Attributes:
        sequences: (L,) Token ids.
        action_log_probs: (R,); likewise `base_action_log_probs`, `values`, `returns`, `advantages`, `action_mask`,
            `action_entropy` and `kl`.
        attention_mask: (L,)
        info: By key, Python numbers, tensors or any data.
        eid: Id of the record.
        action_start: First response slot of this sample; those before are padding.
        implied: Masks that the sample lacks, which only separate its padding from the rest; unpadding drops them.
        info_kinds: Types that numbers of `info` had in the batch, if they are not the usual ones.

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
    implied: frozenset[str] = frozenset()
    info_kinds: dict[Any, Any] | None = None
    may_have_media: ClassVar[bool] = True

    if not TYPE_CHECKING:
        # Written by hand, as that of ExperienceBatch. `peek_field` returns the defaults of fields that are not set.
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
                _assign_rest(self, 10, more, rest)

    @classmethod
    def of(cls, ragged: RaggedBatch, row: int) -> BufferItem:
        """Return a row of a ragged batch. A field is copied on first access.

        Args:
            ragged: The batch.
            row: Number of the row.

        Returns:
            The item.
        """
        item = cls.__new__(cls)
        item.__dict__["_source"] = ragged, row
        return item

    def __getattr__(self, name: str) -> Any:
        if name not in ITEM_FIELDS:
            raise AttributeError(f"'BufferItem' object has no attribute {name!r}")
        # Several threads may read one item: all get the value that was stored first.
        value = self.__dict__.setdefault(name, peek_field(self.__dict__, name))
        source = self.__dict__.get("_source")
        if source is not None and name in BATCH_FIELDS and source[0].large.issubset(self.__dict__):
            self.detach()  # all large fields are copied
        return value

    def detach(self) -> BufferItem:
        """Copy the remaining fields from the ragged batch and drop the reference to it; returns itself."""
        self.__dict__.update(self.__getstate__())
        self.__dict__.pop("_source", None)
        return self

    def _move(self, move: Callable[[Any], Any], move_other: Callable[[Any], Any]) -> BufferItem:
        return super(BufferItem, self.detach())._move(move, move_other)

    def __getstate__(self) -> dict[str, Any]:
        # getattr, not `peek_field`: tensors shared between processes as files must be kept alive by the item.
        fields = {name: getattr(self, name) for name in ITEM_FIELDS}
        return {name: value for name, value in self.__dict__.items() if name != "_source"} | fields

    def __repr__(self) -> str:
        tokens = "no" if self.sequences is None else len(self.sequences)
        mask = self.action_mask
        actions = "" if mask is None else f", {int(mask.sum())} actions"
        name = "" if self.eid is None else f"{self.eid}, "
        return f"BufferItem({name}{tokens} tokens{actions}, info={sorted(self.info or (), key=str)})"


def peek_field(state: dict[str, Any], name: str) -> Any:
    """Return a field of an item with this state without storing it in the item."""
    source = state.get("_source")  # read first: another thread may detach the item
    if name in state:
        return state[name]
    return ITEM_DEFAULTS.get(name) if source is None else source[0].value(name, source[1])


ITEM_FIELDS = tuple(f.name for f in dataclasses.fields(BufferItem))
ITEM_DEFAULTS = {f.name: f.default for f in dataclasses.fields(BufferItem) if f.default is not dataclasses.MISSING}
if not TYPE_CHECKING:
    BufferItem.__signature__ = _constructor_signature(BufferItem)
for _name in ITEM_FIELDS:
    # A default on the class would hide the value in the ragged batch.
    if _name in BufferItem.__dict__:
        delattr(BufferItem, _name)
# CPython lays out the attributes of all instances as the first ones set them. If those were items of a ragged batch,
# the constructor would take 1.5 times as long.
BufferItem(None, None, None, None, None, None, None, None, None)


@dataclass(eq=False, slots=True)
class Origin:
    """What batching loses of the items of a batch, so that splitting restores them.

    An entry holds for the value that a field had when the batch was made; assigning to the field voids it.

    Attributes:
        absent: By field, the rows that lack it; they read as padding.
        dtypes: By field, the type of each row, if rows differ.
        media_rows: By media field, the number of its rows that each sample has.
        info: The same for `info`.
        described: By field of the batch, the value that the entries hold for.

    >>> Origin(absent={"values": frozenset([1])}).absent["values"]
    frozenset({1})
    """

    absent: dict[str, frozenset[int]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    media_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    info: InfoOrigin = field(default_factory=InfoOrigin)
    described: dict[str, Any] = field(default_factory=dict, compare=False)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.absent, self.dtypes, self.media_rows, self.info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.absent, self.dtypes, self.media_rows, self.info = state
        self.described = {}

    def copy(self) -> Origin:
        """Return a copy."""
        return Origin(dict(self.absent), dict(self.dtypes), dict(self.media_rows), self.info, dict(self.described))

    def describe(self, batch: ExperienceBatch) -> None:
        """Bind the entries to the current values of the batch.

        Args:
            batch: The batch.
        """
        names = {key.partition(".")[0] for paths in (self.absent, self.dtypes, self.media_rows) for key in paths}
        if self.info.missing or self.info.originals or self.info.kinds:
            names.add("info")
        self.described = {name: getattr(batch, name) for name in names}

    def void_replaced(self, batch: ExperienceBatch) -> None:
        """Drop the entries of fields that were assigned to since `describe`.

        Args:
            batch: The batch of `describe`.
        """
        for name in [name for name, value in self.described.items() if getattr(batch, name) is not value]:
            del self.described[name]
            parts: tuple[dict[str, Any], ...] = (self.absent, self.dtypes, self.media_rows)
            for path_values in parts:
                for key in [key for key in path_values if key == name or key.startswith(f"{name}.")]:
                    del path_values[key]
            if name == "info":
                self.info = InfoOrigin()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Origin):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in dataclasses.fields(self) if f.compare)

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class ExperienceBatch(Movable):
    """A batch of B samples in LightRFT's layout (its `Experience`, same positional order), for text and vision.

    S is the longest sequence, A the largest number of response slots. Padded, per-token fields are matrices, and slot j
    of a (B, A) field belongs to token S - A + j. Packed, they are `Rows`: lists of 1-D tensors that lie end to end in
    `.values`, with `cu_seqlens` and `position_ids` for attention over ragged input.

    Attributes:
        sequences: (B, S) Token ids.
        action_log_probs: (B, A); likewise `base_action_log_probs`, `values`, `returns`, `advantages`, `kl` and
            `action_entropy`.
        attention_mask: (B, S) 1 on attended tokens; `None`: all.
        action_mask: (B, A) True where the model sampled the token; `None`: everywhere. False on the first token of
            records without a prompt, which no model predicts.
        info: By key, a tensor or list with an entry for each sample, or a dict of such.
        labels: [B] A list; likewise `references`.
        ids: [B] `EID`s of the records.
        pixel_values: (rows of all images, ...); likewise `pixel_values_videos`.
        image_grid_thws: (images, 3); likewise `video_grid_thws`.
        raw_images: [B] A list of images for each sample.
        media: Other inputs: by name, a list of tensors.
        extras: Response-axis fields by the record's names, such as `loss_weights` or `policy_versions` (B, A, ...).
        action_starts: [B] First response slot of each row; `None`: 0 in every row.
        origin: What batching lost of the items.

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
    may_have_media: ClassVar[bool] = False
    """False on batches on which no media field was set."""

    if not TYPE_CHECKING:
        # Written by hand: callers pass about ten of 23 fields, and setting all would take most of the time. Fields that
        # are `None` by default are read from the class.
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
                _assign_rest(self, 13, more, rest)

    @classmethod
    def of(cls, fields: dict[str, Any], origin: Origin) -> ExperienceBatch:
        """Build a batch from fields by name, without the constructor, and bind it to its origin.

        Args:
            fields: Fields by name.
            origin: Details of the samples that the fields do not hold.

        Returns:
            The batch.
        """
        batch = cls.__new__(cls)
        state = batch.__dict__
        state.update(_EMPTY_FIELDS)
        state.update(fields)
        if not fields.keys().isdisjoint(MEDIA_FIELDS):
            state["may_have_media"] = True
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
        # A copy: `dataclasses.replace` passes the same object to both batches.
        self.__dict__["origin"] = copied = origin.copy()
        if not copied.described:
            copied.describe(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "origin": self.origin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, may_have_media=True)  # states of earlier versions do not say
        origin = self.__dict__["origin"] = state["origin"].copy()
        origin.describe(self)

    def _move(self, move: Callable[[Any], Any], move_other: Callable[[Any], Any]) -> ExperienceBatch:
        origin = self.origin if "origin" in self.__dict__ else None
        super()._move(move, move_other)
        if origin is not None:
            origin.describe(self)  # moved, not replaced
        return self

    def __len__(self) -> int:
        if self.sequences is None:
            raise ValueError("sequences: got None, expected token ids")
        tensor = isinstance(self.sequences, torch.Tensor)
        return int(self.sequences.shape[0]) if tensor else len(self.sequences)  # len(tensor) is several times slower

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
        """Return the attended tokens of all samples, packed end to end; a packed batch is returned as it is."""
        from rollbook.compat.lightrft.ragged_batch import ragged_from_batch, to_packed

        return self if self.layout == "packed" else to_packed(ragged_from_batch(self))

    def pad(self, pad_token_id: int = 0, layout: str = "left") -> ExperienceBatch:
        """Return the samples with minimal padding.

        Args:
            pad_token_id: Token id of the padding.
            layout: `left`: padded on the left of both axes. `prompt_left_response_right`: prompts padded on the left,
                responses on the right, as in a fresh rollout.
        """
        from rollbook.compat.lightrft.ragged_batch import ragged_from_batch, to_padded

        return to_padded(ragged_from_batch(self), pad_token_id, layout)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: start of each sample in the tokens of a packed batch, and the end."""
        return self._packed("cu_seqlens", self.sequences).cu_seqlens

    @property
    def action_cu_seqlens(self) -> torch.Tensor:
        """[B + 1] int32: start of each sample in the response-axis fields of a packed batch, and the end."""
        for _, value in token_fields(self, "response"):
            if value is not None:
                return self._packed("action_cu_seqlens", value).cu_seqlens
        return torch.zeros(len(self) + 1, dtype=torch.int32, device=self.cu_seqlens.device)

    def _packed(self, name: str, column: Rows | list[torch.Tensor]) -> Rows:
        if self.layout != "packed":
            raise ValueError(f"{name}: got a padded batch, expected a packed one (see pack())")
        return column if isinstance(column, Rows) else Rows(column)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens of the longest sample."""
        if self.layout == "packed":
            return max((len(row) for row in self.sequences), default=0)
        return int(self.sequences.shape[1])

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions: (1, tokens) packed, restarting with each sample; (B, S) padded, 1 on padding."""
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

    def model_inputs(
        self, get_rope_index: Callable[..., Any] | None = None, *, config: ModelConfig | None = None
    ) -> dict[str, Any]:
        """Return keyword arguments for a transformers model.

        Padded: `input_ids`, `attention_mask`, `position_ids`. Packed: `input_ids` (1, tokens), `position_ids` that
        restart, by which eager and SDPA attention separate samples (with `use_cache=False`), and the arguments of
        attention over ragged input (`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`).

        Media are included under the model's names. Models with image grids compute spatial positions themselves:
        padded batches with grids have no `position_ids`, and packed ones need `get_rope_index`, with which they are
        (4, 1, tokens), text positions first. Both need `mm_token_type_ids`.

        Args:
            get_rope_index: This method of the model.
            config: Configuration of the model, from whose placeholder ids missing `mm_token_type_ids` are derived. Not
                needed with a `get_rope_index` of the model.

        Raises:
            ValueError: If a batch with grids lacks `get_rope_index` or `mm_token_type_ids`.
        """
        inputs: dict[str, Any] = {}
        if self.layout == "packed":
            rows = self._packed("input_ids", self.sequences)
            bounds = rows.cu_seqlens
            inputs["input_ids"] = rows.values.unsqueeze(0)
            inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen}
            # With a cache, eager and SDPA attention do not separate samples.
            inputs["use_cache"] = False
        else:
            inputs["input_ids"] = self.sequences
            if self.attention_mask is not None:
                inputs["attention_mask"] = self.attention_mask
        from rollbook.batch.media import GRIDS, TYPES, get_model_config
        from rollbook.compat.lightrft.ragged_batch import media_inputs, rope_positions

        config = get_model_config(get_rope_index) if config is None else config
        inputs |= media_inputs(self, config)
        if not any(grid in inputs for grid in GRIDS):
            inputs["position_ids"] = self.position_ids
        elif get_rope_index is not None:
            inputs["position_ids"] = rope_positions(self, get_rope_index, config)
        elif self.layout == "packed":
            raise ValueError(
                "get_rope_index: got None, expected the model's method: a packed batch with image or video grids needs "
                "spatial positions that restart with each sample"
            )
        elif TYPES not in inputs:
            raise ValueError(
                f"media[{TYPES!r}]: got None with image or video grids, expected it, or config=model.config to derive "
                "it from placeholder ids: without it, a model has no spatial positions"
            )
        return inputs

    def estimator_inputs(self, keys: Mapping[str, str]) -> Inputs:
        """Return the inputs of advantage estimators.

        Args:
            keys: Keys of `info` by input name.

        Returns:
            The inputs by name.
        """
        from rollbook.compat.lightrft.ragged_batch import estimator_inputs

        return estimator_inputs(self, keys)

    def at_actions(self, predictions: torch.Tensor) -> torch.Tensor:
        """Select the predictions of response slots: those at the token before each.

        The first token of a sample has no prediction: its slot gets another entry, and must be masked.

        Args:
            predictions: (B, S, ...) or, packed, (1, tokens, ...): outputs of the model at each token.

        Returns:
            (B, A, ...) or (slots, ...), in the order of the response-axis fields.

        Raises:
            ValueError: If the batch has no response-axis field.

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
            raise ValueError("at_actions: missing a response-axis field, which gives the response slots")
        self._check_predictions(predictions, tuple(self.sequences.shape))
        begin = predictions.shape[1] - actions.shape[1]
        if begin:
            return predictions[:, begin - 1 : -1]
        return torch.cat([predictions[:, :1], predictions[:, :-1]], dim=1)

    @staticmethod
    def _check_predictions(predictions: torch.Tensor, expected: tuple[int, ...]) -> None:
        """Check that there is an entry for each token: `logits[:, :-1]` would silently shift every slot."""
        if tuple(predictions.shape[:2]) != expected:
            shape = list(predictions.shape)
            raise ValueError(
                f"predictions: got shape {shape}, expected {list(expected)} first, one entry for each token"
            )


class _MediaField:
    """A media field of a batch. Setting one sets `may_have_media`, which is faster to read than all media fields."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, batch: ExperienceBatch | None, kind: type | None = None) -> Any:
        return self if batch is None else batch.__dict__.get(self.name)

    def __set__(self, batch: ExperienceBatch, value: Any) -> None:
        batch.__dict__[self.name] = value
        if value is not None:
            batch.__dict__["may_have_media"] = True


MEDIA_FIELDS = (*BATCH_MEDIA, "raw_images", "media")
"""Fields of a batch or an item with images, videos or other inputs."""
_EMPTY_FIELDS = {f.name: None for f in dataclasses.fields(ExperienceBatch) if f.default is dataclasses.MISSING}
_EMPTY_FIELDS.pop("origin")
if not TYPE_CHECKING:
    ExperienceBatch.origin = property(ExperienceBatch._get_origin, ExperienceBatch._set_origin)
    ExperienceBatch.__signature__ = _constructor_signature(ExperienceBatch)
    for _name in MEDIA_FIELDS:
        setattr(ExperienceBatch, _name, _MediaField(_name))


def token_fields(holder: ExperienceBatch | BufferItem, axis: str | None = None) -> list[tuple[str, Any]]:
    """Return the per-token fields of a batch or item by name; extras as `extras.NAME`.

    Args:
        holder: The batch or item.
        axis: `sequence` or `response`; `None`: both.

    Returns:
        Pairs of name and value, which may be `None`.

    >>> item = BufferItem(torch.tensor([5, 6]), torch.tensor([-0.5]), *[None] * 6, {})
    >>> [name for name, value in token_fields(item) if value is not None]
    ['sequences', 'action_log_probs']
    """
    columns = [(f.name, getattr(holder, f.name)) for f in BATCH_FIELDS.values() if axis in (None, f.axis)]
    if axis in (None, "response") and holder.extras:
        columns += [(f"extras.{name}", value) for name, value in holder.extras.items()]
    return columns


class Counts(torch.Tensor):
    """[B] Integers that compare equal to a list of the same numbers, which LightRFT has in their place.

    >>> counts = torch.tensor([2, 3]).as_subclass(Counts)
    >>> counts == [2, 3], counts != [2, 3], [2, 4] == counts, (counts == torch.tensor([2, 4])).tolist()
    (True, False, False, [True, False])
    """

    def __eq__(self, other: object) -> Any:
        return self.tolist() == other if isinstance(other, list) else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return self.tolist() != other if isinstance(other, list) else super().__ne__(other)

    __hash__ = torch.Tensor.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.clone()
        memo[id(self)] = copied
        return copied


@dataclass(eq=False)
class Samples(Movable):
    """Responses of an engine to B prompts, before models and rewards.

    Attributes:
        sequences: (B, S) or, packed, (1, tokens).
        attention_mask: (B, S) or, packed, (1, tokens) with the number of the sample, from 1.
        action_mask: (B, A); packed `None`.
        num_actions: A; packed [B], which also compares equal to a list.
        packed_seq_lens: `None`; packed [B], likewise.
        response_length: [B] floats.
        total_length: [B] floats.
        prompts: [B]
        labels: [B]
        pad_len: LightRFT's.
        references: [B]
        rollouts: [B] Samples of an engine of `rollbook.rollout`.
        ids: [B] `EID`s of samples that no such engine made.
        records: [B] Records of `rollouts`.

    >>> packed = Samples(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1, 2]]), None, [1, 1], [2, 1], None, None,
    ...                  ["a", "b"], None)
    >>> packed.packed_seq_lens == [2, 1]
    True
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
        for name in ("num_actions", "packed_seq_lens"):
            counts = getattr(self, name)
            if isinstance(counts, list) or (isinstance(counts, torch.Tensor) and counts.dim() == 1):
                setattr(self, name, torch.as_tensor(counts, dtype=torch.int64).as_subclass(Counts))


class _ArgumentOrder(type):
    """Metaclass of a class with the arguments of its base in another order. Calling it builds the base.

    Subclasses of that class are built as usual.
    """

    built: type
    signature: inspect.Signature

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "built" in cls.__dict__:
            return cls.built(**cls.bind(args, options))
        return super().__call__(*args, **options)

    def bind(cls, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, with `None` for those that only the base requires."""
        try:
            bound = cls.signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}() {error}") from None
        by_name = cls.built.__dataclass_fields__.values()  # type: ignore[attr-defined]
        required = [f.name for f in by_name if f.default is f.default_factory is dataclasses.MISSING]
        return dict.fromkeys(required) | bound.arguments

    @property
    def __signature__(cls) -> inspect.Signature:
        return cls.signature

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.built) if "built" in cls.__dict__ else super().__instancecheck__(instance)


def _make_signature(built: type, first: str) -> inspect.Signature:
    names = first.split()
    names += [f.name for f in dataclasses.fields(built) if f.name not in names]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = inspect.Parameter(names[0], kind)
    return inspect.Signature([required, *(inspect.Parameter(name, kind, default=None) for name in names[1:])])


if TYPE_CHECKING:
    ExperienceVL = ExperienceBatch
    BufferItemVL = BufferItem
else:

    class ExperienceVL(ExperienceBatch, metaclass=_ArgumentOrder):
        """`ExperienceBatch` with its arguments in the order of LightRFT's vision class; only `sequences` is required.

        Args:
            sequences: As all others, see `ExperienceBatch`.

        >>> batch = ExperienceVL(torch.tensor([[1, 2]]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]]))
        >>> type(batch).__name__, batch.pixel_values.shape, isinstance(batch, ExperienceVL)
        ('ExperienceBatch', torch.Size([4, 6]), True)
        """

        built = ExperienceBatch
        signature = _make_signature(
            ExperienceBatch,
            "sequences pixel_values image_grid_thws raw_images pixel_values_videos video_grid_thws action_log_probs "
            "base_action_log_probs values returns advantages attention_mask action_mask info kl action_entropy labels "
            "references",
        )

        def __init__(self, *args, **options):
            super().__init__(**type(self).bind(args, options))  # of a subclass

    class BufferItemVL(BufferItem, metaclass=_ArgumentOrder):
        """`BufferItem` with its arguments in the order of LightRFT's vision class; only `sequences` is required.

        Args:
            sequences: As all others, see `BufferItem`.

        >>> BufferItemVL(torch.tensor([1, 2]), torch.zeros(4, 6), torch.tensor([[1, 2, 2]])).image_grid_thws
        tensor([[1, 2, 2]])
        """

        built = BufferItem
        signature = _make_signature(
            BufferItem,
            "sequences pixel_values image_grid_thws pixel_values_videos video_grid_thws raw_images action_log_probs "
            "base_action_log_probs values returns advantages attention_mask action_mask info action_entropy",
        )

        def __init__(self, *args, **options):
            super().__init__(**type(self).bind(args, options))  # of a subclass


def from_experiences(
    experiences: Records,
    *,
    packing_samples: bool = False,
    pad_token_id: int = 0,
    layout: str = "left",
    device: Device = None,
) -> ExperienceBatch:
    """Convert records to a batch, column by column; each column is copied once.

    `action_log_probs` are the `old_logprobs` if every record has them, else the engine's `logprobs`. `returns`,
    `advantages` and `action_mask` have the same names; other response-axis fields go to `extras`. `info` has `reward`,
    `response_length` (actions), `total_length`, `image_num` and `video_num` of records with grids, custom fields, and
    the collated `info` and `metrics` of the records.

    Args:
        experiences: The records.
        packing_samples: Whether to return a packed batch.
        pad_token_id: Token id of the padding.
        layout: `left` or `prompt_left_response_right`; see `ExperienceBatch.pad`.
        device: Where the batch goes. Columns are copied there packed, in one pinned buffer, and padded afterwards.

    Returns:
        The batch.

    >>> from rollbook import Experience
    >>> rows = [Experience(tokens=[1, 2, 3], logprobs=[-0.5, -0.25], reward=1.0), Experience(tokens=[4, 5], reward=0.5)]
    >>> batch = from_experiences(rows, pad_token_id=9)
    >>> batch.sequences.tolist(), batch.action_mask.tolist(), batch.info["reward"].tolist()
    ([[1, 2, 3], [9, 4, 5]], [[True, True], [False, True]], [1.0, 0.5])
    """
    from rollbook.compat.lightrft.ragged_batch import to_packed, to_padded
    from rollbook.compat.lightrft.replay_buffer import ragged_from_records

    ragged = ragged_from_records(experiences)
    if device is not None:
        ragged.move(device)
    return to_packed(ragged) if packing_samples else to_padded(ragged, pad_token_id, layout)


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
