"""Media of an `ExperienceBatch`: joined for a batch, divided by sample.

Invariant: `divided` is the inverse of `joined`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollbook.core.fields import BATCH_MEDIA

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import ExperienceBatch, InfoOrigin, Origin

_COUNTED = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Fields of pixels and of grids, and the key of `info` that says how many images or videos each sample has."""
_IN_BATCH = (*BATCH_MEDIA, "media")
_NO_MEDIA = {name: None for pixels, grids, _ in _COUNTED for name in (grids, pixels)}


def divided(batch: ExperienceBatch) -> dict[str, list[Any] | None]:
    """Each sample's media, by field (other inputs as `media.NAME`): views of the batch's tensors."""
    if all(getattr(batch, name) is None for name in _IN_BATCH):
        return dict(_NO_MEDIA)
    count = len(batch)
    result: dict[str, list[Any] | None] = {}
    rows: dict[str, list[int]] = {}
    for pixels, grids, number in _COUNTED:
        shapes, data = getattr(batch, grids), getattr(batch, pixels)
        media_rows = batch.origin.media_rows
        counts = _counts(batch, number)
        if isinstance(shapes, torch.Tensor):
            if shapes.dim() != 2:
                raise ValueError(f"{grids}: got shape {list(shapes.shape)}, expected two dimensions")
            alike = [len(shapes) // count] * count if count and len(shapes) in (0, count) else []
            rows[grids] = list(media_rows.get(grids) or counts or alike)
            if not rows[grids] and count:
                raise ValueError(
                    f"{grids}: got {len(shapes)} rows for {count} samples, expected info[{number!r}] to say how many "
                    "each sample has"
                )
        result[grids] = _divided(grids, shapes, rows.get(grids), count, batch.origin.absent.get(grids), empty=None)
        if isinstance(data, torch.Tensor):
            rows[pixels] = list(media_rows.get(pixels) or _pixel_rows(pixels, data, result[grids], counts, count))
        result[pixels] = _divided(pixels, data, rows.get(pixels), count, batch.origin.absent.get(pixels), empty=0)
    if not isinstance(batch.media, (dict, type(None))):
        raise ValueError(f"media: got {type(batch.media).__name__}, expected a dict of lists")
    for key, tensors in (batch.media or {}).items():
        result[f"media.{key}"] = sample_list(f"media[{key!r}]", tensors, count)
    return result


def _counts(batch: ExperienceBatch, number: str) -> list[int] | None:
    """How many images each sample has, if `info` says so."""
    entry = (batch.info or {}).get(number)
    if entry is None:
        return None
    counts = entry.tolist() if isinstance(entry, (torch.Tensor, np.ndarray)) else entry
    good = isinstance(counts, (list, tuple)) and len(counts) == len(batch)
    if not good or not all(isinstance(c, (int, float)) and float(c).is_integer() and c >= 0 for c in counts):
        raise ValueError(f"info[{number!r}]: got {counts!r}, expected {len(batch)} whole numbers")
    return [int(c) for c in counts]


def _pixel_rows(name: str, data: torch.Tensor, grids: Any, counts: list[int] | None, count: int) -> list[int]:
    if grids is not None:
        return [0 if grid is None else int(grid.reshape(-1, grid.shape[-1]).prod(-1).sum()) for grid in grids]
    if counts and sum(counts) and len(data) % sum(counts) == 0:
        rows_per_image = len(data) // sum(counts)  # without grids every image has as many rows
        return [rows_per_image * number for number in counts]
    if count and len(data) % count == 0:
        return [len(data) // count] * count
    raise ValueError(f"{name}: got {len(data)} rows for {count} samples, expected grids that say how many each has")


def _divided(name: str, value: Any, rows: list[int] | None, count: int, absent: Any, empty: int | None) -> Any:
    """Each sample's part: `None` where it is absent, or where it is empty and that is what emptiness means."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return sample_list(name, value, count)
    if rows is None or len(rows) != count or sum(rows) != len(value):
        raise ValueError(f"{name}: got {len(value)} rows, expected {sum(rows or ())}, those of {count} samples")
    parts: list[Any] = list(torch.split(value, rows))
    if absent is not None:
        return [None if i in absent else part for i, part in enumerate(parts)]
    return [None if empty is None and not len(part) else part for part in parts]


def count_media(media: Mapping[str, Any], info: dict[Any, Any], origin: InfoOrigin) -> None:
    """Put `image_num` and `video_num` [B] into the `info` of samples with grids.

    Samples that did not have them are without them again after a split. What all samples have is left as it is.
    """
    for _, grids, number in _COUNTED:
        parts = media.get(grids)
        missing = range(len(parts or ())) if number not in info else origin.missing.get((number,), ())
        if not parts or not missing or not all(isinstance(part, (torch.Tensor, type(None))) for part in parts):
            continue
        counts = [0 if part is None else len(part) if part.dim() > 1 else 1 for part in parts]
        before = list(info[number]) if number in info else [None] * len(parts)
        origin.missing[number,], origin.given[number,] = frozenset(missing), (counts, before)
        info[number] = torch.tensor(counts)


def sample_list(name: str, value: Any, count: int) -> list[Any] | None:
    """An entry for each sample, once there are as many."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a list of {count}, an entry for each sample")
    if len(value) != count:
        raise ValueError(f"{name}: got {len(value)} entries, expected {count}, one for each sample")
    return list(value)


def joined(name: str, parts: list[Any] | None, origin: Origin) -> torch.Tensor | None:
    """The samples' media in one tensor, with what is needed to divide it again."""
    present = [part for part in parts or () if part is not None]
    if not present or parts is None:
        return None
    for i, part in enumerate(parts):
        if part is not None and not isinstance(part, torch.Tensor):
            raise ValueError(f"items[{i}].{name}: got {type(part).__name__}, expected a tensor")
    if "grid" in name:
        parts = [part.unsqueeze(0) if part is not None and part.dim() == 1 else part for part in parts]
        present = [part for part in parts if part is not None]
    for i, part in enumerate(parts):
        if part is not None and (
            not part.dim() or part.shape[1:] != present[0].shape[1:] or part.dtype != present[0].dtype
        ):
            raise ValueError(
                f"items[{i}].{name}: got {list(part.shape)} of {part.dtype}, expected (rows, "
                f"{', '.join(map(str, present[0].shape[1:]))}) of {present[0].dtype}, as others have"
            )
    absent = frozenset(i for i, part in enumerate(parts) if part is None)
    origin.absent[name] = absent
    origin.media_rows[name] = tuple(0 if part is None else len(part) for part in parts)
    return torch.cat(present)
