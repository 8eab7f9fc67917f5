"""`BufferItem`: one sample of a batch, as a buffer keeps it.

Invariant: an item of a sheet reads as if it held its fields from the start; what it was asked for once is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollbook.batch.device import Movable, assign_rest, constructor_signature
from rollbook.core.fields import BATCH_FIELDS

if TYPE_CHECKING:
    from rollbook.compat.lightrft.ragged_batch import Sheet
    from rollbook.core.ids import EID


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
    def of(cls, sheet: Sheet, row: int) -> BufferItem:
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
