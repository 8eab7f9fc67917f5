"""Memory that is used again: large tensors on the host, on pages that an earlier one has touched.

Invariant: memory is given out again only when the last tensor on it, and whatever looks at it, is gone; what waits to
be used again never exceeds the limit. A trainer makes a batch for each step and drops it: the first touch of fresh
pages takes many times as long as writing on used ones, and on a virtual machine may wait for the host.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

LARGE = 1 << 20
"""Below this many bytes the system's own allocator does as well."""


class Recycler:
    """Gives out memory as tensors of bytes, and takes it back when they are gone.

    >>> recycler = Recycler(limit=64 << 20)
    >>> first = recycler.tensor(5 << 20)
    >>> place = first.data_ptr()
    >>> view = first[:4].view(torch.float32)
    >>> del first
    >>> recycler.tensor(5 << 20).data_ptr() == place  # `view` still looks at it
    False
    >>> del view
    >>> recycler.tensor(5 << 20).data_ptr() == place
    True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._waiting = 0

    def tensor(self, size: int) -> torch.Tensor:
        """(size,) uint8, with anything in it."""
        room = _rounded(size)
        try:
            block = self._free[room].pop()
            self._waiting -= room
        except (KeyError, IndexError):
            block = np.empty(room, dtype=np.uint8)
        # The tensor holds this array, every view of the tensor holds its storage, and nobody else ever sees the array:
        # when it goes, so has everything on the memory.
        array = block[:size]
        weakref.finalize(array, self._take_back, block).atexit = False
        return torch.from_numpy(array)

    def _take_back(self, block: NDArray[np.uint8]) -> None:
        if self._waiting + len(block) <= self.limit:
            self._waiting += len(block)
            self._free.setdefault(len(block), []).append(block)

    def clear(self) -> None:
        """Give what waits back to the system."""
        self._free, self._waiting = {}, 0


def _rounded(size: int) -> int:
    """A size that others ask for too: up to an eighth more."""
    step = max(1 << max(size.bit_length() - 4, 0), 4096)
    return -(-size // step) * step


RECYCLER = Recycler(limit=512 << 20)
"""What batches are made on. `RECYCLER.limit = 0` and `RECYCLER.clear()` do without."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with anything in it, on used memory if it is large and there is some."""
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    return RECYCLER.tensor(size).view(dtype).reshape(shape)
