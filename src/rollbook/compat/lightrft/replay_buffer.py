"""Split, unpad and batch, and the buffer in memory: LightRFT's `replay_buffer_utils` and `replay_buffer`.

Invariant: `remove_padding_in_sequences(split_experience_batch(make_experience_batch(items)))` is `items`, for every
field, in every order, whichever items lack which; items own compact memory, and media are kept once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import reduce
from typing import Any

from rollbook.core.errors import explain_missing

try:
    import torch
except ModuleNotFoundError as error:
    raise explain_missing(__name__, error) from None
import numpy as np
from torch.nn.utils.rnn import pad_sequence

from rollbook.compat.lightrft import items as buffer_items
from rollbook.compat.lightrft.batch import BufferItem, BufferItemVL, ExperienceBatch
from rollbook.compat.lightrft.buffer_item import peek
from rollbook.compat.lightrft.layouts import check_layout, packed, padded
from rollbook.core.media import SHARED, Pool, carries_media


class PaddingSideError(ValueError, AssertionError):
    """The padding side is neither left nor right."""


def is_vl_experience(experience: Any) -> bool:
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
        return buffer_items.items_of_batch(experience, pool)
    return buffer_items.padded_items_of_batch(experience, pool)


def remove_padding_in_sequences(items: Sequence[BufferItem]) -> list[BufferItem]:
    """New items without their padding: of the tokens what is attended, from the first to the last, and the response
    slots that speak of those. The items given are left alone.

    >>> item = BufferItem(torch.tensor([0, 0, 1, 2, 3, 0, 0]), None, None, None, None, None,
    ...                   torch.tensor([0, 0, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 0, 1, 0, 0]), {})
    >>> bare, = remove_padding_in_sequences([item])
    >>> bare.sequences.tolist(), bare.action_mask.tolist()
    ([1, 2, 3], [1, 0, 1])
    """
    return buffer_items.without_padding(items)


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
    given = list(items)
    if not given:
        raise ValueError("items: got none, expected at least one")
    check_layout(layout)
    if packing_samples or layout == "left":
        batch = buffer_items.drawn(given, pad_token_id, packing_samples)
        if batch is None:
            batch = buffer_items.batch_of_apart(given, pad_token_id, packing_samples)
        if batch is not None:
            return batch
    if packing_samples or layout != "left":
        given = list(buffer_items.padding_removed(given))
    sheet = buffer_items.sheet_of_items(given)
    if packing_samples:
        return packed(sheet)
    batch = padded(sheet, pad_token_id, layout)
    starts = [peek(item.__dict__, "action_start") for item in given]
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
        device: Any = None,
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
        if device is None:
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        self.target_device = torch.device(device)
        self.items: list[BufferItem] = []
        self._random = None if seed is None else random.Random(seed)
        self._pool = Pool()

    @torch.no_grad()
    def append(self, experience: ExperienceBatch) -> None:
        """Keep the samples of a batch, without its padding; the batch itself is left alone."""
        if not isinstance(experience, ExperienceBatch):
            raise ValueError(f"experience: got {type(experience).__name__}, expected an ExperienceBatch")
        self.items.extend(buffer_items.items_of_batch(experience, self._pool, "cpu" if self.cpu_offload else None))
        if 0 < self.limit < len(self.items):
            del self.items[: len(self.items) - self.limit]
            self._pool.prune(item.raw_images for item in self.items)
            buffer_items.let_go(self.items)

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
        sheets = buffer_items.whole_sheets(self.items, attribute, "action_mask")
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
            buffer_items.replace_column(self.items, sheets, attribute, changed)
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
