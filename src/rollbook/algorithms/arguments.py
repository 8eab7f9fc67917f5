"""How losses and their neighbours read arguments: numbers of rows put on their tokens, flags, options, saved states.

Invariant: what is read is 0 wherever the mask is False, and one number for each row means the same as that number on
every token of the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import Layout, PerRow, PerToken, as_floats, as_tensor
from rollbook.core.checks import check_float
from rollbook.core.ragged import Ragged
from rollbook.core.rows import Rows


def is_per_row(layout: Layout, name: str, value: PerToken | PerRow) -> bool:
    """Whether a value has one entry for each row, (B,), and not for each token.

    Among packed tokens both values end to end and numbers of rows are flat. Where B rows have B tokens in all, but not
    one each, a flat tensor is taken for numbers of rows, and refused if other tokens of the call are end to end, too.

    >>> layout = Layout.of(None, log_probs=[[-1.0, -2.0], [-3.0]])
    >>> [is_per_row(layout, "weights", value) for value in ([1.0, 2.0], [[1.0, 2.0], [3.0]], torch.ones(3))]
    [True, False, False]
    >>> is_per_row(Layout.of(None, log_probs=[[-1.0, -2.0], []]), "weights", torch.ones(2))
    True
    """
    if isinstance(value, (Rows, Ragged)):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim != 1 or layout.lengths is None:
            return value.ndim == 1
        if layout.flat and len(value) == layout.rows == layout.shape[0] and set(layout.lengths) != {1}:
            raise ValueError(
                f"{name}: got {len(value)} numbers for as many rows and as many tokens, expected Rows(values, lengths) "
                "for tokens, or a list for rows"
            )
        return len(value) == layout.rows
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        got = value if value is None or isinstance(value, (int, float)) else type(value).__name__
        raise ValueError(f"{name}: got {got}, expected one number for each row or token: (B,), (B, A), or packed")
    first = value[0] if len(value) else None
    return not hasattr(first, "__len__") or getattr(first, "ndim", 1) == 0


def row_numbers(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """[B] Numbers of rows, of at least float32.

    >>> row_numbers(Layout.of(torch.ones(2, 3)), "rewards", [1, 0])
    tensor([1., 0.])
    """
    tensor = as_tensor(name, value, layout.mask.device)
    if tuple(tensor.shape) != (layout.rows,):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [{layout.rows}], one for each row")
    return as_floats(tensor)


def row_flags(layout: Layout, name: str, value: PerRow) -> torch.Tensor:
    """[B] Whether something holds for each row, as bool.

    >>> row_flags(Layout.of(torch.ones(2, 3)), "chosen", [1, 0])
    tensor([ True, False])
    """
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
    # A column is of tokens, which `is_per_row` knows too, but a type checker does not.
    if not isinstance(value, Ragged) and is_per_row(layout, name, value):
        return layout.masked(layout.spread(row_numbers(layout, name, value)))
    return layout.take(name, value)


def constant(layout: Layout, value: float) -> torch.Tensor:
    """[of `layout.shape`] One number on every slot, for a metric that is the same for all tokens.

    >>> constant(Layout.of(torch.ones(1, 2)), 0.1)
    tensor([[0.1000, 0.1000]])
    """
    return torch.full(layout.shape, float(value), device=layout.mask.device)


def optional_number(name: str, value: Any, low: float, what: str) -> None:
    """Refuse an option that is neither `None` nor a number above `low`.

    >>> optional_number("dual_clip", 1.0, 1, "a number above 1")
    Traceback (most recent call last):
        ...
    ValueError: dual_clip: got 1.0, expected a number above 1, or None
    """
    if value is not None and check_float(name, value, low, what=f"{what}, or None") == low:
        raise ValueError(f"{name}: got {value!r}, expected {what}, or None")


def state_of(state: Any, names: Collection[str]) -> Mapping[str, Any]:
    """A state that was saved, once it is known to have these fields and no others.

    >>> state_of({"value": 1.0}, ("value",))
    {'value': 1.0}
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {type(state).__name__}, expected a mapping of {', '.join(names)}")
    if set(state) != set(names):
        raise ValueError(f"state: got {', '.join(map(str, state)) or 'nothing'}, expected {', '.join(names)}")
    return state
