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

from rollbook.core.equality import same
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.ragged import tensor_bytes


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
