"""Media once: pixel values, grids and images are kept by content, and shared by all samples that show the same.

Invariant: `pool.keep(x)` equals x; what it gives for equal content is one object, and nothing the caller owns is
changed. A pool holds no memory of its own but for what somebody still uses (bytes, which Python cannot watch, are
held until `prune`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from rollbook.equality import same
from rollbook.ragged import tensor_bytes


class Pool:
    """Objects by the hash of their content.

    >>> pool = Pool()
    >>> first = pool.keep(torch.ones(2, 3))
    >>> pool.keep(torch.ones(2, 3)) is first, pool.keep(torch.zeros(2, 3)) is first
    (True, False)
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._held: dict[Any, bytes] = {}

    def keep(self, value: Any) -> Any:
        """The object with this content: an earlier one if there is one, else `value` itself (a copy if it is a view,
        which would keep more alive than it shows). Lists and tuples are kept item by item; paths, and what has no
        content of its own to hash, are given back as they are."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.keep(item) for item in value)
        if isinstance(value, bytes):
            return self._held.setdefault(xxhash.xxh3_128_digest(value), value)
        key = content_key(value)
        if key is None:
            return value
        found = self._watched.get(key)
        # Compared, not trusted: somebody may have written into the tensor since it was hashed.
        if found is not None and same(found, value):
            return found
        value = compact(value)
        self._watched[key] = value
        return value

    def prune(self, used: Iterable[Any] = ()) -> None:
        """Let go of bytes that are not among `used`."""
        alive = {id(item) for item in _flat(used)}
        self._held = {key: item for key, item in self._held.items() if id(item) in alive}

    def __len__(self) -> int:
        return len(self._watched) + len(self._held)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def content_key(value: Any) -> Any:
    """A hash of type, shape and content, or `None` for what is not an image in memory."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return None  # hashing would bring it to the host
        return "tensor", str(value.dtype), tuple(value.shape), _digest(tensor_bytes(value))
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


def compact(value: Any) -> Any:
    """The value, copied if it is a view of something larger or needs a gradient."""
    if isinstance(value, torch.Tensor):
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole and value.is_contiguous() and not value.requires_grad else value.detach().clone()
    if isinstance(value, np.ndarray) and value.base is not None:
        return value.copy()
    return value


def carries_media(holder: Any) -> bool:
    """Whether a batch or an item has any pixels, grids, images or other media."""
    from rollbook.fields import BATCH_MEDIA

    names = (*BATCH_MEDIA, "raw_images", "media")
    return any(_any_content(getattr(holder, name, None)) for name in names)


def _any_content(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_any_content(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_any_content(item) for item in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return bool(value.shape[0]) if value.ndim else True
    return value is not None
