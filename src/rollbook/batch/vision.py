"""Token types and positions in space of one sample of a vision-language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

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
