"""Media once: pixel values, grids and images are kept by content, and shared by all samples that show the same.

Invariant: `pool.keep(x)` equals x; what it gives for equal content is one object, and nothing the caller owns is
changed. A pool holds no memory of its own but for what somebody still uses (bytes, which Python cannot watch, are
held until `prune`). Only a batch has media expanded, and `divided` is the inverse of `joined`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from rollbook.core.equality import same
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.ragged import tensor_bytes

if TYPE_CHECKING:
    from rollbook.compat.lightrft.batch import ExperienceBatch, InfoOrigin, Origin


class Pool:
    """Objects by the hash of their content.

    >>> pool = Pool()
    >>> first = pool.keep(torch.ones(2, 3))
    >>> pool.keep(torch.ones(2, 3)) is first, pool.keep(torch.zeros(2, 3)) is first
    (True, False)
    """

    def __init__(self, hold_bytes: bool = True) -> None:
        self._watched: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._held: dict[Any, bytes] | None = {} if hold_bytes else None

    def keep(self, value: Any) -> Any:
        """The object with this content: an earlier one if there is one, else a copy. Lists and tuples are kept item by
        item; paths, and what has no content of its own to hash, are given back as they are."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.keep(item) for item in value)
        if isinstance(value, bytes):
            return value if self._held is None else self._held.setdefault(xxhash.xxh3_128_digest(value), value)
        key = content_key(value)
        if key is None:
            return value
        known_object = self._watched.get(key)
        # Compared, not trusted: somebody may have written into the tensor since it was hashed.
        if known_object is not None and same(known_object, value):
            return known_object
        if isinstance(value, torch.Tensor):
            value = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            value = value.copy()
        self._watched[key] = value
        return value

    def prune(self, used: Iterable[Any] = ()) -> None:
        """Let go of bytes that are not among `used`."""
        alive = {id(item) for item in _flat(used)}
        if self._held is not None:
            self._held = {key: item for key, item in self._held.items() if id(item) in alive}

    def __len__(self) -> int:
        return len(self._watched) + len(self._held or ())

    def __reduce__(self) -> Any:
        return Pool, (self._held is not None,)  # what it knew is found again when it is next kept


SHARED = Pool(hold_bytes=False)
"""The pool of whoever brings none of their own; it keeps nothing alive."""


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def content_key(value: Any) -> Any:
    """A hash of type, shape and content, or `None` for what is not an image in memory."""
    if isinstance(value, torch.Tensor):
        # On a device too: equal content is worth the way to the host.
        return "tensor", str(value.dtype), value.device, tuple(value.shape), _digest(tensor_bytes(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        return (
            "array",
            str(value.dtype),
            value.shape,
            _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8)),
        )
    if is_picture(value):
        return "picture", value.mode, value.size, _digest(value.tobytes())
    return None


def _digest(memory: Any) -> bytes:
    return xxhash.xxh3_128_digest(memory)


def is_picture(value: Any) -> bool:
    """Whether this is a PIL image (if PIL was never imported, nothing is)."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def carries_media(holder: Any) -> bool:
    """Whether a batch or an item has any pixels, grids, images or other media."""
    for name in _MEDIA:
        value = getattr(holder, name, None)
        if value is not None and _any_content(value):
            return True
    return False


_MEDIA = (*BATCH_MEDIA, "raw_images", "media")


def _any_content(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_any_content(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_any_content(item) for item in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return bool(value.shape[0]) if value.ndim else True
    return value is not None


_COUNTED = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Fields of pixels and of grids, and the key of `info` that says how many images or videos each sample has."""


_IN_BATCH = (*BATCH_MEDIA, "media")
_NO_MEDIA = {name: None for pixels, grids, _ in _COUNTED for name in (grids, pixels)}


# --- in a batch ----------------------------------------------------------------------------------------------------


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
