"""What a vision-language model is called with beside the tokens of a `Batch`: media of all records, positions in space.

Invariant: the inputs of a padded and of a packed batch are the same, record by record, as those of each record alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rollbook.batch.vision import BY_TOKEN, GRIDS, TYPES, sample_positions, token_types

if TYPE_CHECKING:
    from rollbook.batch.batch import Batch


def media_inputs(batch: Batch, config: Any = None) -> dict[str, torch.Tensor]:
    """Collate the media of a batch under the model's names.

    Args:
        batch: The batch.
        config: The model's configuration. Records with image or video grids that came without `mm_token_type_ids` get
            them from its placeholder ids.

    Returns:
        By name, the rows of all records; inputs with an entry for each token are laid out as the tokens are, padded
        with 0.
    """
    media = {name: parts for name, parts in batch.media.items() if _rows(parts)}
    if config is not None and any(grid in media for grid in GRIDS):
        types = media.get(TYPES) or [None] * len(batch)
        if any(part is None for part in types):
            media[TYPES] = [
                token_types(ids, config) if part is None else part
                for ids, part in zip(batch.token_rows(), types, strict=True)
            ]
    return {
        name: _lay_out_by_token(batch, name, parts) if name in BY_TOKEN else _join(name, parts)
        for name, parts in media.items()
    }


def _rows(parts: list[Any]) -> int:
    """How many rows a kind of media has in all records."""
    return sum(1 if part.dim() == 0 else len(part) for part in parts if part is not None)


def _join(name: str, parts: list[Any]) -> torch.Tensor:
    """The rows of all records, one behind the other."""
    if name in GRIDS:
        parts = [part.unsqueeze(0) if part is not None and part.dim() == 1 else part for part in parts]
    present = [part for part in parts if part is not None]
    expected = present[0]
    for i, part in enumerate(parts):
        if part is not None and (part.shape[1:] != expected.shape[1:] or part.dtype != expected.dtype):
            raise ValueError(
                f"media[{name!r}][{i}]: got {list(part.shape)} of {part.dtype}, expected (rows, "
                f"{', '.join(map(str, expected.shape[1:]))}) of {expected.dtype}, as other records have"
            )
    return torch.cat(present)


def _lay_out_by_token(batch: Batch, name: str, parts: list[Any]) -> torch.Tensor:
    expected = next(part for part in parts if part is not None)
    matrix: torch.Tensor = expected.new_zeros(batch.input_shape)
    for i, ((row, start, length), part) in enumerate(zip(batch.places(), parts, strict=True)):
        if part is not None:
            entries = part.reshape(-1)
            if len(entries) > length:
                raise ValueError(f"media[{name!r}][{i}]: got {len(entries)} entries, expected at most {length} tokens")
            matrix[row, start : start + len(entries)] = entries
    return matrix


def rope_positions(batch: Batch, get_rope_index: Callable[..., Any], config: Any = None) -> torch.Tensor:
    """Compute positions in the text and in space, record by record.

    Args:
        batch: A batch with image or video grids.
        get_rope_index: That method of the model.
        config: The model's configuration, for records without `mm_token_type_ids`.

    Returns:
        (4, B, S) or, packed, (4, 1, tokens): the position in the text, then the three in space; 1 on padding.
    """
    positions = torch.ones((4, *batch.input_shape), dtype=torch.int64, device=batch.device)
    for i, ((row, start, length), ids) in enumerate(zip(batch.places(), batch.token_rows(), strict=True)):
        media: dict[str, torch.Tensor] = {}
        for name, parts in batch.media.items():
            part = parts[i]
            if part is not None:
                media[name] = part.unsqueeze(0) if name in GRIDS and part.dim() == 1 else part
        positions[0, row, start : start + length] = torch.arange(length, device=positions.device)
        positions[1:, row, start : start + length] = sample_positions(ids, media, get_rope_index, config)
    return positions
