"""What a vision-language model is called with, beyond the tokens: media of all samples, and positions in space.

Invariant: the inputs of a padded and of a packed batch are the same, sample by sample, as those of each sample alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.media import divided

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import ExperienceBatch

BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Media with an entry for each token, from a sample's first on, rather than for each image."""
TYPES = BY_TOKEN[0]
GRIDS = ("image_grid_thw", "video_grid_thw")
_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "start": ("vision_start_token_id",),
}


def placeholders(config: Any) -> dict[str, int]:
    """The token ids that stand for media, by what they stand for, as a model's config has them.

    >>> class Config:
    ...     image_token_id = 8
    >>> placeholders(Config()), placeholders(None)
    ({'image': 8}, {})
    """
    token_ids = {}
    for kind, names in _PLACEHOLDERS.items():
        candidates = [getattr(config, name, None) for name in names]
        valid = [candidate for candidate in candidates if isinstance(candidate, int) and candidate >= 0]
        if valid:
            token_ids[kind] = valid[0]
    return token_ids


def token_types(ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Derive `mm_token_type_ids` from placeholder ids: 1 on image tokens, 2 on video tokens, 0 on all others.

    Args:
        ids: Token ids of any shape, with one placeholder for each patch that the model gets.
        config: The model's configuration, or a processor, that has the placeholder ids.

    Returns:
        int64 types, of the shape and on the device of `ids`.

    Raises:
        ValueError: If `config` has neither an image nor a video placeholder.

    >>> class Config:
    ...     image_token_id, video_token_id = 8, 9
    >>> token_types(torch.tensor([5, 8, 8, 6, 9]), Config())
    tensor([0, 1, 1, 0, 2])
    """
    token_ids = placeholders(config)
    types = torch.zeros_like(ids, dtype=torch.int64)
    if "image" not in token_ids and "video" not in token_ids:
        raise ValueError(
            f"media[{TYPES!r}]: got None, expected an entry for each token: {type(config).__name__} has no "
            "image_token_id or video_token_id to derive them from"
        )
    for kind, type_id in (("image", 1), ("video", 2)):
        if kind in token_ids:
            types[ids == token_ids[kind]] = type_id
    return types


def sample_types(ids: torch.Tensor, types: torch.Tensor | None, config: Any) -> torch.Tensor:
    """[n] The types of a sample's n tokens: those it came with, 0 after their end, or else derived (`token_types`)."""
    if types is None:
        return token_types(ids, config)
    filled = torch.zeros_like(ids, dtype=types.dtype)
    filled[: types.numel()] = types.reshape(-1)
    return filled


def config_of(get_rope_index: Callable[..., Any] | None) -> Any:
    """The configuration of the model whose method this is; `None` of another function."""
    return getattr(getattr(get_rope_index, "__self__", None), "config", None)


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
    from rollbook.compat.lightrft.layouts import action_starts, checked, spans_of_rows, widths

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


def sample_positions(
    ids: torch.Tensor, media: Mapping[str, torch.Tensor], get_rope_index: Callable[..., Any], config: Any = None
) -> torch.Tensor:
    """(3, n) The positions in space of one sample's tokens [n], by the model's `get_rope_index`.

    `media` are the sample's, under the model's names; of these the method gets what it names (grids, and
    `second_per_grid_ts` of videos). `config` as `rope_positions` takes it.
    """
    parameters = inspect.signature(get_rope_index).parameters
    arguments = {key: media.get(key) for key in parameters if key in GRIDS or (key in media and key not in BY_TOKEN)}
    if TYPES in parameters:
        has_grids = any(media.get(grid) is not None for grid in GRIDS)
        types = sample_types(ids, media.get(TYPES), config) if has_grids else torch.zeros_like(ids)
        arguments[TYPES] = types.unsqueeze(0)
    row = ids.unsqueeze(0)
    positions: torch.Tensor = get_rope_index(input_ids=row, attention_mask=torch.ones_like(row), **arguments)[0]
    return positions.squeeze(1)
