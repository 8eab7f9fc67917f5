"""Triton kernels for GAE and discounted returns on a CUDA device.

Invariant: a masked slot is the identity of the recurrence: it is never read, neither decays nor adds, and is 0 in every
output. Rows are independent. Nothing here synchronizes the device.
"""
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without Triton; nothing here is then called
    triton = None

AVAILABLE = triton is not None
_BLOCK = 4096
_WARPS = 8


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def _compose(decay_first, sum_first, decay_next, sum_next):
    return decay_first * decay_next, decay_next * sum_first + sum_next


@_jit
def _gae_kernel(
    rewards,
    values,
    mask,
    offsets,
    advantages,
    returns,
    width,
    gamma,
    gamma_rest,
    decay,
    decay_rest,
    PACKED: tl.constexpr,
    VALUED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # With C = decay * A + gamma * V of a valid token, A = r - V + C of the next valid one: one linear recurrence in C.
    # A lane holds the step of the slot *after* its own, so that an inclusive scan gives it the C that it needs.
    row = tl.program_id(0).to(tl.int64)
    if PACKED:
        start = tl.load(offsets + row)
        length = tl.load(offsets + row + 1) - start
    else:
        start = row * width
        length = width + row * 0
    kind = rewards.dtype.element_ty
    carried = tl.zeros((), dtype=kind)
    gamma = carried + gamma + gamma_rest
    decay = carried + decay + decay_rest
    lanes = tl.arange(0, BLOCK)
    for done in tl.range(0, length, BLOCK):
        # From the right: lane 0 is the last slot that is left.
        slot = length - 1 - done - lanes
        later = slot + 1
        has_next = (slot >= 0) & (later < length)
        valid = tl.load(mask + start + later, mask=has_next, other=0) != 0
        reward = tl.load(rewards + start + later, mask=valid, other=0.0)
        if VALUED:
            value = tl.load(values + start + later, mask=valid, other=0.0)
            step = decay * (reward - value) + gamma * value
        else:
            step = decay * reward
        factor = tl.where(valid, decay, 1.0).to(kind)
        factor, step = tl.associative_scan((factor, step), 0, _compose)
        follows = factor * carried + step
        carried = tl.sum(tl.where(lanes == BLOCK - 1, follows, 0.0), 0).to(kind)

        inside = slot >= 0
        valid = tl.load(mask + start + slot, mask=inside, other=0) != 0
        reward = tl.load(rewards + start + slot, mask=valid, other=0.0)
        if VALUED:
            value = tl.load(values + start + slot, mask=valid, other=0.0)
            advantage = reward - value + follows
            tl.store(advantages + start + slot, tl.where(valid, advantage, 0.0), mask=inside)
            tl.store(returns + start + slot, tl.where(valid, advantage + value, 0.0), mask=inside)
        else:
            tl.store(returns + start + slot, tl.where(valid, reward + follows, 0.0), mask=inside)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    offsets: torch.Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GAE advantages and returns; see `rollbook.algorithms.scan.gae_scan`.

    All tensors are contiguous and on one CUDA device.

    Args:
        rewards: [B, R] padded or [total] packed, float32 or float64.
        values: Of the same shape and type.
        mask: bool, of the same shape: active tokens.
        offsets: [B + 1] int64: start of each packed row, and the end; `None` if padded.
        gamma: Discount per token.
        lam: Lambda of GAE.
    """
    advantages = torch.empty_like(rewards)
    return advantages, _scan(rewards, values, mask, offsets, gamma, gamma * lam, advantages)


def discounted(rewards: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor | None, gamma: float) -> torch.Tensor:
    """Compute returns-to-go `R_i = r_i + gamma R_j`, j the next active token; arguments as of `gae`."""
    return _scan(rewards, None, mask, offsets, gamma, gamma, None)


def _halves(number: float) -> tuple[float, float]:
    """Split a float64 number into two float32 ones, since kernels take float32 scalars."""
    first = float(np.float32(number))
    return first, number - first


def _scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor,
    offsets: torch.Tensor | None,
    gamma: float,
    decay: float,
    advantages: torch.Tensor | None,
) -> torch.Tensor:
    returns = torch.empty_like(rewards)
    rows = rewards.shape[0] if offsets is None else len(offsets) - 1
    if rewards.numel() == 0 or rows == 0:
        return returns
    width = rewards.shape[1] if offsets is None else 0
    longest = width or _BLOCK
    with torch.cuda.device(rewards.device):
        _gae_kernel[(rows,)](
            rewards,
            rewards if values is None else values,
            mask.view(torch.uint8),
            mask if offsets is None else offsets,
            returns if advantages is None else advantages,
            returns,
            width,
            *_halves(gamma),
            *_halves(decay),
            PACKED=offsets is not None,
            VALUED=values is not None,
            BLOCK=min(_BLOCK, max(triton.next_power_of_2(longest), 16)),
            num_warps=_WARPS,
        )
    return returns
