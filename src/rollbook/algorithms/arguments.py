"""How losses read their arguments: numbers of tokens in at least float32, and numbers of rows put on their tokens.

Invariant: what is read is 0 wherever the mask is False, and one number for each row means the same as that number on
every token of the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_tensor
from rollbook.jagged import Rows
from rollbook.ragged import Ragged


def floats(layout: Layout, name: str, value: PerToken) -> torch.Tensor:
    """[of `layout.shape`] Numbers of tokens; float64 stays, anything narrower becomes float32.

    >>> floats(Layout.of(torch.ones(1, 2)), "kl", torch.ones(1, 2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    tensor = layout.take(name, value)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_per_row(layout: Layout, name: str, value: PerToken | PerRow) -> bool:
    """Whether a value has one entry for each row, (B,), and not for each token.

    Among packed tokens both values end to end and numbers of rows are flat. Where B rows have B tokens in all, but not
    one each, a flat tensor could be either, and is refused.
    """
    if isinstance(value, (Rows, Ragged)):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim != 1 or layout.lengths is None:
            return value.ndim == 1
        if len(value) == layout.rows == layout.shape[0] and set(layout.lengths) != {1}:
            raise ValueError(
                f"{name}: got {len(value)} numbers for as many rows and as many tokens, expected Rows(values, lengths) "
                "for tokens, or a list for rows"
            )
        return len(value) == layout.rows
    first = value[0] if len(value) else None
    return not hasattr(first, "__len__") or getattr(first, "ndim", 1) == 0


def row_numbers(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """[B] Numbers of rows, of at least float32."""
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def row_flags(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """[B] Whether something holds for each row, as bool."""
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    odd = tensor[(tensor != 0) & (tensor != 1)]
    if len(odd):
        raise ValueError(f"{name}: got {odd[0].item()}, expected 0 and 1 only, or False and True")
    return tensor != 0


def on_tokens(layout: Layout, name: str, value: PerToken | PerRow) -> torch.Tensor:
    """[of `layout.shape`] Numbers of tokens, or of rows put on all tokens of each.

    >>> on_tokens(Layout.of(torch.tensor([[1, 1, 0], [1, 0, 0]])), "advantages", [0.5, -1.0])
    tensor([[ 0.5000,  0.5000,  0.0000],
            [-1.0000,  0.0000,  0.0000]])
    """
    if not isinstance(value, Ragged) and is_per_row(layout, name, value):
        return layout.masked(layout.spread(row_numbers(layout, name, value)))
    return floats(layout, name, value)


def constant(layout: Layout, value: float) -> torch.Tensor:
    """[of `layout.shape`] One number on every slot, for a metric that is the same for all tokens."""
    return torch.full(layout.shape, float(value), device=layout.mask.device)


def optional_number(name: str, value: Any, low: float, what: str) -> None:
    """Refuse an option that is neither `None` nor a number above `low`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > low:
        raise ValueError(f"{name}: got {value!r}, expected {what}, or None")
