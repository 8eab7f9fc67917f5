"""LightRFT's technique for splitting, unpadding and batching, written anew from what it was observed to do.

LightRFT has no wheel that can be installed beside this project, so its released code cannot be the peer. What follows
is no copy of it: same results, same kind and number of tensor operations per item and field (commit 49e62cb observed),
own words. Text only, and only what the comparison calls; its defects are kept, since they are part of its cost:

- splitting gives views of the padded batch, so every item keeps all of it alive;
- unpadding cuts as many slots from the right as the action mask has zeros *anywhere*, in place;
- batching pads each row by itself, to the left with zeros, and stacks the padded rows: each byte is written twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TENSORS = (
    "sequences",
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
    "attention_mask",
    "action_mask",
    "action_entropy",
)
"""The nine fields that travel with an item, padded each to its own longest row."""


@dataclass
class Item:
    """One sample: every field (S,) or (A,), or None."""

    sequences: Tensor
    action_log_probs: Tensor
    base_action_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor
    advantages: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    info: dict[str, Any]
    action_entropy: Tensor | None = None


@dataclass
class Batch:
    """Many samples: every field (B, S) or (B, A), a list of (S,) or (A,) when packed, or None."""

    sequences: Any
    action_log_probs: Any
    base_action_log_probs: Any
    values: Any
    returns: Any
    advantages: Any
    attention_mask: Any
    action_mask: Any
    info: dict[str, Any]
    action_entropy: Any = None


def split_experience_batch(batch: Batch) -> list[Item]:
    """One item per row; its tensors are views of the batch, one-element `info` entries become Python numbers."""
    size = len(batch.sequences)
    found: list[dict[str, Any]] = [{"info": {}} for _ in range(size)]
    for name in TENSORS:
        column = getattr(batch, name)
        if column is None:
            rows: Sequence[Any] = [None] * size
        else:
            rows = torch.unbind(column) if isinstance(column, Tensor) else column
        for fields, row in zip(found, rows, strict=True):
            fields[name] = row
    for key, entry in batch.info.items():
        if isinstance(entry, Tensor):
            values: Sequence[Any] = [v.item() if v.numel() == 1 else v for v in torch.unbind(entry)]
        elif isinstance(entry, list) and len(entry) == size:
            values = entry
        else:
            values = [entry] * size
        for fields, value in zip(found, values, strict=True):
            fields["info"][key] = value
    return [Item(**fields) for fields in found]


def remove_padding_in_sequences(items: list[Item]) -> list[Item]:
    """The same items with shorter views, cut at the first attended token and by the *count* of masked slots."""
    for item in items:
        left = item.attention_mask.long().argmax()
        masked = (1 - item.action_mask.long()).sum()
        stop = None if masked == 0 else -masked
        item.sequences = item.sequences[left:stop]
        item.attention_mask = item.attention_mask[left:stop]
        item.action_log_probs = item.action_log_probs[:stop]
        item.returns = item.returns[:stop]
        item.advantages = item.advantages[:stop]
        item.action_mask = item.action_mask[:stop]
        if item.base_action_log_probs is not None:
            item.base_action_log_probs = item.base_action_log_probs[:stop]
        if item.values is not None:
            item.values = item.values[:stop]
        if item.action_entropy is not None:
            item.action_entropy = item.action_entropy[:stop]
    return items


def zero_pad_sequences(sequences: Sequence[Tensor], side: str = "left") -> Tensor:
    """(B, longest): each row padded with zeros by itself, then all of them stacked."""
    longest = max(len(row) for row in sequences)
    padded = []
    for row in sequences:
        missing = longest - len(row)
        padded.append(F.pad(row, (missing, 0) if side == "left" else (0, missing)))
    return torch.stack(padded)


def make_experience_batch(items: Sequence[Item], packing_samples: bool = False) -> Batch:
    """The items as one batch, padded on the left, or as lists; the first item decides which fields there are."""
    columns: dict[str, Any] = {}
    for name in TENSORS:
        rows = [getattr(item, name) for item in items]
        if rows[0] is None:
            columns[name] = None
        elif packing_samples and name != "action_entropy":
            columns[name] = rows
        else:
            columns[name] = zero_pad_sequences(rows, "left")
    info: dict[str, Any] = {}
    for key in items[0].info:
        entries = [item.info[key] for item in items]
        info[key] = torch.tensor(entries) if isinstance(entries[0], (int, float, bool)) else entries
    return Batch(info=info, **columns)


class ReplayBuffer:
    """Split and unpadded items in a list; a sample is drawn without replacement and batched."""

    def __init__(
        self, sample_batch_size: int, limit: int = 0, packing_samples: bool = False, *, seed: int | None = None
    ) -> None:
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.packing_samples = packing_samples
        self.items: list[Item] = []
        self._random: Any = random if seed is None else random.Random(seed)

    def append(self, batch: Batch) -> None:
        """Split, unpad unless packing, keep the newest `limit`."""
        items = split_experience_batch(batch)
        if not self.packing_samples:
            items = remove_padding_in_sequences(items)
        self.items.extend(items)
        if 0 < self.limit < len(self.items):
            self.items = self.items[-self.limit :]

    def sample(self) -> Batch:
        """`sample_batch_size` items at random, as a batch."""
        return make_experience_batch(self._random.sample(self.items, self.sample_batch_size), self.packing_samples)
