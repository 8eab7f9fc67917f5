"""Copies of columns from the host to a device.

Invariant: the columns of one call travel in a single buffer, pinned where the device copies from pinned memory without
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.ragged import Ragged
from rollbook.core.rows import Column, concatenated


def copy_columns(columns: Sequence[tuple[Column, NDArray[np.int64]]], device: torch.device) -> list[torch.Tensor]:
    """Copy columns to a device, those of the host in one transfer.

    Args:
        columns: Each column, and the lengths [B] of its rows.
        device: Where they go.

    Returns:
        Each column as a tensor (total, ...) on the device.
    """
    copies: list[Any] = []
    waiting: list[tuple[int, Column, NDArray[np.int64], torch.dtype, tuple[int, ...], int]] = []
    size = 0
    for column, lengths in columns:
        if isinstance(column, torch.Tensor) and (
            column.device.type != "cpu" or (column.dim() == 1 and _is_constant(column))
        ):
            # A constant needs no transfer, and a column on a device none from the host.
            copies.append(column[:1].to(device).expand(column.shape) if _is_constant(column) else column.to(device))
            continue
        dtype = column.dtype if not isinstance(column, Ragged) else getattr(torch, column.dtype)
        trailing = tuple(column.shape[1:]) if isinstance(column, torch.Tensor) else column.trailing
        shape = (int(lengths.sum()), *trailing)
        waiting.append((len(copies), column, lengths, dtype, shape, size))
        size += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64  # views of another type need alignment
        copies.append(None)
    stage = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = []
    for index, column, lengths, dtype, shape, start in waiting:
        stop = start + int(np.prod(shape)) * dtype.itemsize
        concatenated(column, lengths, out=stage[start:stop].view(dtype).reshape(shape))
        parts.append((index, start, stop, dtype, shape))
    moved = stage.to(device, non_blocking=True)
    for index, start, stop, dtype, shape in parts:
        copies[index] = moved[start:stop].view(dtype).reshape(shape)
    return copies


def _is_constant(column: torch.Tensor) -> bool:
    """Whether a column is one value in the memory of one (see `torch.Tensor.expand`)."""
    return column.dim() == 1 and column.stride(0) == 0 and len(column) > 0


__all__ = ["copy_columns"]
