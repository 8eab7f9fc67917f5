"""Model inputs for the media of an `ExperienceBatch`, and positions in space.

Invariant: the inputs of a padded and of a packed batch are the same, sample by sample, as those of each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rollbook.batch.vision import BY_TOKEN, GRIDS, TYPES, sample_positions, token_types
from rollbook.compat.lightrft.layouts import action_starts, checked, spans_of_rows, widths
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.media import divided

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import ExperienceBatch


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
        found = sample_positions(_tokens(batch, i, place), sample, get_rope_index, config)
        positions[0, row, start : start + length] = torch.arange(length, device=positions.device)
        positions[1:, row, start : start + length] = found
    return positions
