"""What a vision-language model is called with, beyond the tokens: media of all samples, and positions in space.

Invariant: the inputs of a padded and of a packed batch are the same, sample by sample, as those of each sample alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rollbook.fields import BATCH_MEDIA
from rollbook.media import divided

if TYPE_CHECKING:
    from rollbook.batch import ExperienceBatch

BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Media with an entry for each token, from a sample's first on, rather than for each image."""
GRIDS = ("image_grid_thw", "video_grid_thw")


def media_inputs(batch: ExperienceBatch) -> dict[str, torch.Tensor]:
    """The media of a batch under the model's names; by-token ones padded with 0, or end to end, as the tokens are."""
    inputs: dict[str, torch.Tensor] = {}
    for name, key in BATCH_MEDIA.items():
        value = getattr(batch, name)
        if isinstance(value, list):
            present = [part for part in value if part is not None]
            value = torch.cat(present) if present else None
        if isinstance(value, torch.Tensor) and len(value):
            inputs[key] = value
    for key, parts in (batch.media or {}).items():
        present = [part for part in parts if part is not None]
        if present:
            inputs[key] = _by_token(batch, key, parts, present[0]) if key in BY_TOKEN else torch.cat(present)
    return inputs


def _by_token(batch: ExperienceBatch, key: str, parts: list[Any], model: torch.Tensor) -> torch.Tensor:
    places = _places(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    made = model.new_zeros(shape)
    for i, ((row, start, length), part) in enumerate(zip(places, parts, strict=True)):
        if part is not None:
            entries = part.reshape(-1)
            if len(entries) > length:
                raise ValueError(f"media[{key!r}][{i}]: got {len(entries)} entries, expected at most {length} tokens")
            made[row, start : start + len(entries)] = entries
    return made


def _places(batch: ExperienceBatch) -> list[tuple[int, int, int]]:
    """For each sample the row it lies in, where it begins there, and how many tokens it has."""
    from rollbook.layouts import action_starts, checked, spans_of_rows, widths

    if batch.layout == "packed":
        bounds = batch.cu_seqlens.tolist()
        return [(0, start, stop - start) for start, stop in pairwise(bounds)]
    width, slots = widths(checked(batch))
    spans, _ = spans_of_rows(batch.attention_mask, len(batch), width, slots, action_starts(batch, slots))
    return [(i, a, n) for i, (a, n) in enumerate(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True))]


def rope_positions(batch: ExperienceBatch, get_rope_index: Callable[..., Any]) -> torch.Tensor:
    """(4, B, S) or, packed, (4, 1, tokens): the text's positions, then the three of images and videos.

    `get_rope_index` is that method of the model, and is asked sample by sample; 1 on padding.
    """
    media = divided(batch)
    shape = batch.sequences.shape if batch.layout == "padded" else (1, sum(len(row) for row in batch.sequences))
    made = torch.ones((4, *shape), dtype=torch.int64, device=batch.sequences[0].device)
    asked = BY_TOKEN[0] in inspect.signature(get_rope_index).parameters
    grids = {name: key for name, key in BATCH_MEDIA.items() if key in GRIDS}
    for i, (row, start, length) in enumerate(_places(batch)):
        at = start if batch.layout == "padded" else 0
        ids = batch.sequences[i][at : at + length].unsqueeze(0)
        given: dict[str, Any] = {key: (media[name] or {i: None})[i] for name, key in grids.items()}
        if asked:
            kinds = (media.get(f"media.{BY_TOKEN[0]}") or {i: None})[i]
            if kinds is None and any(grid is not None for grid in given.values()):
                raise ValueError(f"media[{BY_TOKEN[0]!r}][{i}]: got None, expected it: the model asks for it")
            row_kinds = torch.zeros_like(ids)
            if kinds is not None:
                row_kinds[0, : kinds.numel()] = kinds.reshape(-1)
            given[BY_TOKEN[0]] = row_kinds
        found, _ = get_rope_index(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
        made[0, row, start : start + length] = torch.arange(length, device=made.device)
        made[1:, row, start : start + length] = found.squeeze(1)
    return made
