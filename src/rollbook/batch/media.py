"""Media inputs, token types and spatial positions of vision-language models.

Invariant: the inputs of a padded and of a packed batch are, record by record, those of each record alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

    from rollbook.batch.batch import Batch

    ModelConfig: TypeAlias = PretrainedConfig | ProcessorMixin
    """Has the placeholder ids of media."""


BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Media with an entry for each token of a sample, rather than for each image."""
TYPES = BY_TOKEN[0]
GRIDS = ("image_grid_thw", "video_grid_thw")
_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "start": ("vision_start_token_id",),
}


def placeholders(config: ModelConfig | None) -> dict[str, int]:
    """Return the placeholder token ids of media, by kind, of a model's configuration.

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


def token_types(ids: torch.Tensor, config: ModelConfig | None) -> torch.Tensor:
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


def sample_types(
    ids: torch.Tensor, types: torch.Tensor | None, config: ModelConfig | None, record: int = 0
) -> torch.Tensor:
    """[n] Return the token types of a sample: those it came with, and for the tokens after them `token_types`.

    Args:
        ids: [n] Token ids of the sample.
        types: At most n types, of the first tokens; `None`: of none.
        config: As `token_types` takes it.
        record: Index of the sample, for errors.

    Raises:
        ValueError: If there are more than n types, or fewer and `config` has no placeholder.
    """
    count = 0 if types is None else types.numel()
    name = f"media[{TYPES!r}][{record}]: got {count} entries, expected"
    if count > len(ids):
        raise ValueError(f"{name} at most {len(ids)} tokens")
    if types is not None and count == len(ids):
        return types.reshape(-1)
    if config is None:
        raise ValueError(f"{name} one for each of {len(ids)} tokens, or config=model.config to derive the others from")
    try:
        derived = token_types(ids[count:], config)
    except ValueError as error:
        raise ValueError(f"{name} one for each of {len(ids)} tokens: {str(error).rpartition(': ')[2]}") from None
    return derived if types is None else torch.cat([types.reshape(-1), derived.to(types)])


def get_model_config(get_rope_index: Callable[..., Any] | None) -> Any:
    """Return the configuration of the model that a method belongs to, or `None`."""
    return getattr(getattr(get_rope_index, "__self__", None), "config", None)


def sample_positions(
    ids: torch.Tensor,
    media: Mapping[str, torch.Tensor],
    get_rope_index: Callable[..., Any],
    config: ModelConfig | None = None,
    record: int = 0,
) -> torch.Tensor:
    """[3, n] Compute the spatial positions of the tokens [n] of one sample, by the model's `get_rope_index`.

    `media` are the sample's, under the model's names; of these the method gets what it names (grids, and
    `second_per_grid_ts` of videos). `config` as `rope_positions` takes it; `record` is the index for errors.
    """
    parameters = inspect.signature(get_rope_index).parameters
    arguments = {key: media.get(key) for key in parameters if key in GRIDS or (key in media and key not in BY_TOKEN)}
    if TYPES in parameters:
        has_grids = any(media.get(grid) is not None for grid in GRIDS)
        types = sample_types(ids, media.get(TYPES), config, record) if has_grids else torch.zeros_like(ids)
        arguments[TYPES] = types.unsqueeze(0)
    row = ids.unsqueeze(0)
    positions: torch.Tensor = get_rope_index(input_ids=row, attention_mask=torch.ones_like(row), **arguments)[0]
    return positions.squeeze(1)


def media_inputs(batch: Batch, config: ModelConfig | None = None) -> dict[str, torch.Tensor]:
    """Collate the media of a batch under the model's names.

    Args:
        batch: The batch.
        config: The model's configuration. Records with image or video grids that came without `mm_token_type_ids`, and
            records with those of their first tokens only, get the others from its placeholder ids.

    Returns:
        By name, the rows of all records; inputs with an entry for each token are laid out as the tokens are, padded
        with 0.

    Raises:
        ValueError: If a record with media has fewer `mm_token_type_ids` than tokens, and `config` has no placeholder.
    """
    media = {name: parts for name, parts in batch.media.items() if _rows(parts)}
    if TYPES in media or (config is not None and any(grid in media for grid in GRIDS)):
        media[TYPES] = [_record_types(media, i, ids, config) for i, ids in enumerate(batch.token_rows())]
    return {
        name: _lay_out_by_token(batch, name, parts, config) if name in BY_TOKEN else _join(name, parts)
        for name, parts in media.items()
    }


def _record_types(
    media: Mapping[str, list[Any]], record: int, ids: torch.Tensor, config: ModelConfig | None
) -> torch.Tensor | None:
    """Return the token types of a record in full if it has media; those of text are 0, with which a batch is padded."""
    record_media = {name: parts[record] for name, parts in media.items() if parts[record] is not None}
    types: torch.Tensor | None = record_media.get(TYPES)
    if record_media.keys() <= set(BY_TOKEN) or (types is None and not record_media.keys() & set(GRIDS)):
        return types
    return sample_types(ids, types, config, record)


def _rows(parts: list[Any]) -> int:
    """Count the rows of a kind of media in all records."""
    return sum(1 if tensor.dim() == 0 else len(tensor) for tensor in parts if tensor is not None)


def _join(name: str, parts: list[Any]) -> torch.Tensor:
    """Concatenate the rows of all records."""
    if name in GRIDS:
        parts = [tensor.unsqueeze(0) if tensor is not None and tensor.dim() == 1 else tensor for tensor in parts]
    present = [tensor for tensor in parts if tensor is not None]
    expected = present[0]
    for i, tensor in enumerate(parts):
        if tensor is not None and (tensor.shape[1:] != expected.shape[1:] or tensor.dtype != expected.dtype):
            raise ValueError(
                f"media[{name!r}][{i}]: got {list(tensor.shape)} of {tensor.dtype}, expected (rows, "
                f"{', '.join(map(str, expected.shape[1:]))}) of {expected.dtype}, as other records have"
            )
    return torch.cat(present)


def _lay_out_by_token(batch: Batch, name: str, parts: list[Any], config: ModelConfig | None) -> torch.Tensor:
    expected = next(tensor for tensor in parts if tensor is not None)
    matrix: torch.Tensor = expected.new_zeros(batch.input_shape)
    media_ids = torch.tensor([*placeholders(config).values()], device=batch.device)
    for i, ((row, start, length), ids, tensor) in enumerate(
        zip(batch.row_bounds(), batch.token_rows(), parts, strict=True)
    ):
        if tensor is not None:
            entries = tensor.reshape(-1)
            if len(entries) > length:
                raise ValueError(f"media[{name!r}][{i}]: got {len(entries)} entries, expected at most {length} tokens")
            if len(entries) < length and name != TYPES and torch.isin(ids[len(entries) :], media_ids).any():
                # What these types are of media differs between models.
                raise ValueError(f"media[{name!r}][{i}]: got {len(entries)} entries, expected one for each placeholder")
            matrix[row, start : start + len(entries)] = entries
    return matrix


def rope_positions(batch: Batch, get_rope_index: Callable[..., Any], config: ModelConfig | None = None) -> torch.Tensor:
    """Compute text and spatial positions, record by record.

    Args:
        batch: A batch with image or video grids.
        get_rope_index: That method of the model.
        config: The model's configuration, for records without `mm_token_type_ids`.

    Returns:
        (4, B, S) or, packed, (4, 1, tokens): the position in the text, then the three in space; 1 on padding.
    """
    positions = torch.ones((4, *batch.input_shape), dtype=torch.int64, device=batch.device)
    for i, ((row, start, length), ids) in enumerate(zip(batch.row_bounds(), batch.token_rows(), strict=True)):
        media: dict[str, torch.Tensor] = {}
        for name, parts in batch.media.items():
            tensor = parts[i]
            if tensor is not None:
                media[name] = tensor.unsqueeze(0) if name in GRIDS and tensor.dim() == 1 else tensor
        positions[0, row, start : start + length] = torch.arange(length, device=positions.device)
        positions[1:, row, start : start + length] = sample_positions(ids, media, get_rope_index, config, i)
    return positions
