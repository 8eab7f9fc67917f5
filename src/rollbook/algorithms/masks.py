"""Masks that keep the tokens where the policy was least sure.

Invariant: a marked token is always one that counts, whatever the entropies are; of equal entropies the earlier token is
marked; a row's marks do not depend on padding, on other rows (unless asked for), or on the layout.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import Layout, PerToken
from rollbook.core.checks import check_choice, check_float
from rollbook.core.rows import NUMPY, memory


def high_entropy_mask(
    entropy: PerToken, mask: PerToken | None = None, ratio: float = 0.2, *, over: str = "sample"
) -> Any:
    """The tokens with the highest entropies: `ratio` of each sample's tokens that count, or of the batch's.

    "Beyond the 80/20 rule" (Wang et al., 2025, arXiv 2506.01939): most of what is learnt is learnt at few tokens.
    entropy, mask: (B, A) or packed; the result is bool, in their layout. Marked are max(1, floor(ratio * n)) of n
    tokens: in each row (`over="sample"`, as LightRFT does), or among all (`over="batch"`, as in the paper; some rows
    may then have none). A row without tokens has none marked. A ratio of 0 or less, or of 1 or more, marks all tokens
    that count, as LightRFT does. NaN ranks below every number.

    Give it to a loss as its mask, and its denominators count marked tokens only; give it as weights, and they count
    all.

    >>> entropy = torch.tensor([[1.0, 5.0, 2.0, 6.0, 3.0], [2.0, 4.0, 1.0, 5.0, 9.0]])
    >>> high_entropy_mask(entropy, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), 0.4).int()
    tensor([[0, 1, 0, 1, 0],
            [0, 0, 0, 1, 0]], dtype=torch.int32)
    """
    check_choice("over", over, ("sample", "batch"))
    check_float("ratio", ratio)
    layout = Layout.of(mask, entropy=entropy)
    values = layout.whole("entropy", entropy).detach()
    if ratio <= 0 or ratio >= 1 or not values.numel():
        return layout.give(layout.mask.clone())
    values = values if values.is_floating_point() else values.to(torch.float64)
    keys = values
    if not values.is_cpu or isnan(values.sum()):  # a sum costs a tenth of the replacement, but waits for a device
        keys = torch.where(values.isnan(), torch.full((), -torch.inf, dtype=values.dtype, device=values.device), values)
    if over == "batch":
        whole = Layout((1, keys.numel()), None, layout.mask.reshape(1, -1))
        marked = _marked(whole, keys.reshape(1, -1), ratio).reshape(layout.shape)
    else:
        marked = _marked(layout, keys, ratio)
    return layout.give(marked)


def _marked(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """[of `shape`] The tokens that count and come first in their row when it is sorted by key, from the highest."""
    if layout.mask.device.type == "cpu" and keys.dtype in NUMPY:
        return _by_row(layout, keys, ratio)
    # In float64, as Python multiplies: 100 * 0.29 is a little less than 29, here as there.
    wanted = (layout.counts.to(torch.float64) * ratio).floor().clamp(min=1).to(torch.int64)
    return _by_order(layout, keys, wanted) if layout.packed else _by_least(layout, keys, wanted, ratio)


def _by_row(layout: Layout, keys: torch.Tensor, ratio: float) -> torch.Tensor:
    """On the host, row by row, among the tokens that count alone."""
    marked = torch.zeros(layout.shape, dtype=torch.bool)
    rows: Any = map(memory, (marked, layout.mask, keys))
    if layout.packed:
        rows = [np.split(column, layout.offsets[1:-1]) for column in rows]
    for flags, mask, values in zip(*rows, strict=True):
        slots = np.flatnonzero(mask)
        if len(slots):
            count = max(1, int(len(slots) * ratio))
            first, last = slots[0], slots[-1] + 1
            where = slice(first, last) if last - first == len(slots) else slots
            candidates = values[where]
            least = np.partition(candidates, len(slots) - count)[len(slots) - count]
            highest = candidates > least
            equal = np.flatnonzero(candidates == least)
            highest[equal[: count - np.count_nonzero(highest)]] = True
            flags[where] = highest
    return marked


def _by_least(layout: Layout, keys: torch.Tensor, wanted: torch.Tensor, ratio: float) -> torch.Tensor:
    """Padded rows: all above the least key that is marked, and as many of its equals as are wanted, from the left."""
    keys = torch.where(layout.mask, keys, torch.full((), -torch.inf, dtype=keys.dtype, device=keys.device))
    most = max(1, int(layout.shape[1] * ratio))  # no row can want more, and no device is asked how many they do
    least = keys.topk(most, dim=-1).values.gather(-1, wanted[:, None] - 1)
    above = (keys > least) & layout.mask
    equal = (keys == least) & layout.mask
    return above | (equal & (equal.cumsum(-1) <= wanted[:, None] - above.sum(-1, keepdim=True)))


def _by_order(layout: Layout, keys: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Packed rows: sorted by key, then by row, so that each row lies together again; the first of each that count."""
    order = torch.argsort(keys, descending=True, stable=True)
    order = order[torch.argsort(layout.row_of[order], stable=True)]
    counting = layout.mask[order]
    place = counting.cumsum(0) - layout.spread(layout.counts.cumsum(0) - layout.counts)  # masked tokens take none
    return torch.zeros_like(layout.mask).scatter(0, order, counting & (place <= layout.spread(wanted)))
