"""Memory is used again, and never while anybody looks at it."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.core.rows import RECYCLER, Recycler, empty

MB = 1 << 20


@given(st.lists(st.tuples(st.sampled_from(["take", "view", "numpy", "drop"]), st.integers(1, 3000)), max_size=60))
def test_nobody_shares_memory(steps: list[tuple[str, int]]) -> None:
    recycler = Recycler(limit=16_000)
    draw = random.Random(0)
    alive: list[tuple[Any, int]] = []
    for number, (step, size) in enumerate(steps):
        if step == "take":
            tensor = recycler.tensor(size)
            assert tensor.shape == (size,) and tensor.untyped_storage().nbytes() == size
            tensor.fill_(number % 251)
            alive.append((tensor, number % 251))
        elif alive:
            at = draw.randrange(len(alive))
            holder, mark = alive[at]
            if step == "drop":
                del alive[at]
            elif step == "view" and isinstance(holder, torch.Tensor):
                alive[at] = holder[len(holder) // 2 :].view(torch.int8), mark
            elif step == "numpy" and isinstance(holder, torch.Tensor):
                alive[at] = holder.numpy()[: len(holder)], mark
            del holder
        assert all((np.asarray(holder).view(np.uint8) == mark).all() for holder, mark in alive)


def test_memory_comes_back_and_is_bounded() -> None:
    recycler = Recycler(limit=3 * MB)
    tensors = [recycler.tensor(MB) for _ in range(5)]
    places = {tensor.data_ptr() for tensor in tensors}
    tensors.clear()
    again = [recycler.tensor(MB) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} <= places
    assert recycler._free_bytes == 0
    del again
    assert recycler._free_bytes == 3 * MB
    recycler.clear()
    assert recycler._free_bytes == 0
    recycler.limit = 0
    assert len(recycler.tensor(MB)) == MB
    assert recycler._free_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64])
def test_empty(dtype: torch.dtype) -> None:
    for shape in ((3,), (1000, 300, 4), (0, 5)):
        tensor = empty(shape, dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        tensor.fill_(1)
        assert pickle.loads(pickle.dumps(tensor)).sum() == tensor.numel()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize


def test_threads() -> None:
    before = RECYCLER.limit
    faults: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = empty((MB,), torch.int32)
            tensor[::4096] = mark
            if (tensor[::4096] != mark).any():
                faults.append("another thread wrote here")
            del tensor

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not faults
    assert RECYCLER.limit == before
