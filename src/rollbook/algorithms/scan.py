"""Backward recursions over tokens (GAE and discounted returns), padded or packed, on any device.

A token is active if the recursion reads it: a token of the mask, or by the option `observations` a tool token.

Invariant: inactive tokens are never read, and masked tokens are 0 in the result. On the CPU, sums are in float64, and
the compiled and the numpy implementation do the same operations in the same order, so that results do not depend on
which one runs.

Implementations:

- numba on the CPU, if it is installed (extra `fast`) and this call or an earlier one had `LARGE`
  tokens: loading the compiled code takes half a second; compiling it, once per machine, takes ten.
- Triton on a CUDA device: one pass, in the type of the tensors.
- numpy otherwise, one step of all rows at a time. Tensors on other devices are copied to the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.checks import check_choice, check_float
from rollbook.core.ragged import compute_offsets
from rollbook.core.rows import empty

OBSERVATIONS = ("skip", "through", "zeroed")
"""Which tool tokens are active; see `gae_scan`."""
LARGE = 1 << 15
"""Number of tokens from which a call loads numba. Once it is loaded, smaller calls use it too."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def gae_scan(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lengths: list[int] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    observations: str = "skip",
    response: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GAE advantages and returns: `A_i = r_i + gamma V_j - V_i + gamma lam A_j`, and `A_i + V_i`.

    j is the next active token after i; after the last one V and A are 0. Results have no gradient.

    Args:
        rewards: [B, R], or [total] with `lengths`.
        values: In the same layout.
        mask: bool, in the same layout: which tokens count.
        lengths: Lengths of packed rows; `None` if padded.
        gamma: Discount per token, 0 to 1.
        lam: Lambda of GAE, 0 to 1.
        observations: Which masked tokens (tool output) are active. Their results are 0 in any case.
            `skip`: none; they are left out of the recursion. `through`: those between the first and the last token
            of a row that counts, or all of `response`, with their values and rewards. `zeroed`: the same, with values
            and rewards of 0.
        response: bool, in the same layout: slots that are not padding.

    Returns:
        Advantages and returns in the same layout, 0 where the mask is False.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.9, 0.2]])
    >>> gae_scan(rewards, values, torch.tensor([[True, False, True]]), gamma=0.9, lam=0.5)[0]
    tensor([[0.0400, 0.0000, 0.8000]])
    """
    check_float("lam", lam, 0, 1)
    rewards, values, mask, active = _prepare(
        gamma, observations, mask, response, lengths, rewards=rewards, values=values
    )
    kernels = _triton_module(rewards.device.type)
    if kernels is not None:
        results = kernels.gae(rewards, values, active, _offsets_on(rewards, lengths), gamma, lam)
    else:
        offsets = _offsets(mask, lengths)
        flat = _flat(rewards), _flat(values), _flat(active)
        compiled = _compiled(mask.numel())
        if compiled is not None:
            out = empty(tuple(mask.shape), rewards.dtype), empty(tuple(mask.shape), rewards.dtype)
            compiled.gae(*flat, offsets, gamma, lam, _flat(out[0]), _flat(out[1]))
        else:
            out = _numpy_gae(*flat, offsets, gamma, lam, mask.shape)
        results = out if mask.device.type == "cpu" else (out[0].to(mask.device), out[1].to(mask.device))
    if active is not mask:
        results[0].masked_fill_(~mask, 0)
        results[1].masked_fill_(~mask, 0)
    return results[0], results[1]


def return_scan(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    lengths: list[int] | None = None,
    gamma: float = 1.0,
    observations: str = "skip",
    response: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute returns-to-go: `R_i = r_i + gamma R_j`, with j the next active token.

    Args:
        rewards: [B, R], or [total] with `lengths`.
        mask: bool, in the same layout: which tokens count.
        lengths: Lengths of packed rows; `None` if padded.
        gamma: Discount per token, 0 to 1.
        observations: Which masked tokens are active, as of `gae_scan`.
        response: bool, in the same layout: slots that are not padding.

    Returns:
        Returns in the same layout, 0 where the mask is False.

    Raises:
        ValueError: If an option is invalid, or shapes differ.

    >>> return_scan(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, True]), [1, 2], gamma=0.5)
    tensor([1., 4., 4.])
    """
    rewards, _, mask, active = _prepare(gamma, observations, mask, response, lengths, rewards=rewards)
    kernels = _triton_module(rewards.device.type)
    if kernels is not None:
        returns = kernels.discounted(rewards, active, _offsets_on(rewards, lengths), gamma)
    else:
        offsets, compiled = _offsets(mask, lengths), _compiled(mask.numel())
        if compiled is not None:
            out = empty(tuple(mask.shape), rewards.dtype)
            compiled.discounted(_flat(rewards), _flat(active), offsets, gamma, _flat(out))
        else:
            steps = _Steps(_flat(active), offsets)
            sums = steps.sums(_flat(rewards)[steps.index].astype(np.float64), gamma)
            out = steps.scatter(sums, rewards.dtype, mask.shape)
        returns = out.to(mask.device)
    if active is not mask:
        returns.masked_fill_(~mask, 0)
    return returns  # type: ignore[no-any-return]


def scan_mask(
    mask: torch.Tensor, lengths: list[int] | None, observations: str, response: torch.Tensor | None = None
) -> torch.Tensor:
    """Mark the active tokens: those that the recursion reads.

    Returns:
        bool, in the layout of `mask`.

    >>> mask = torch.tensor([[False, True, False, True, False]])
    >>> scan_mask(mask, None, "through").tolist()
    [[False, True, True, True, False]]
    """
    check_choice("observations", observations, OBSERVATIONS)
    if observations == "skip":
        return mask
    if response is not None:
        return mask | response
    _, first, last = TokenPositions(mask, lengths).ends()
    change = torch.zeros(mask.numel() + 1, dtype=torch.int32, device=mask.device)
    change[first] = 1
    change[last + 1] -= 1
    return (change.cumsum(0)[:-1] > 0).reshape(mask.shape)


class TokenPositions:
    """Slots of the masked-in tokens, numbered over all rows in order, whether rows are padded or packed."""

    def __init__(self, mask: torch.Tensor, lengths: list[int] | None) -> None:
        self.offsets = torch.from_numpy(_offsets(mask, lengths)).to(mask.device)
        """[B + 1] First slot of each row, and the end."""
        self.index = mask.reshape(-1).nonzero()[:, 0]
        """[tokens that count] Slot of each."""
        bounds = torch.searchsorted(self.index, self.offsets)
        self.begin, self.end = bounds[:-1], bounds[1:]
        """[B] Range of each row in `index`."""

    def ends(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows that have tokens that count, and the slots of the first and last of each."""
        rows = (self.end > self.begin).nonzero()[:, 0]
        return rows, self.index[self.begin[rows]], self.index[self.end[rows] - 1]

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the row of each slot."""
        return torch.searchsorted(self.offsets, slots, right=True) - 1

    def nearest(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the last slot that counts at or before each slot of the same row, or else the row's first one."""
        preceding = torch.searchsorted(self.index, slots, right=True) - 1
        return self.index[torch.maximum(preceding, self.begin[self.rows_at(slots)])]


def spread_scores(scores: torch.Tensor, mask: torch.Tensor, offsets: Ints) -> torch.Tensor:
    """Spread the score of each row over its packed tokens that count, on the CPU.

    Args:
        scores: [B] The scores.
        mask: [total] bool: which tokens count.
        offsets: [B + 1] Start of each row, and the end.

    Returns:
        [total] The scores; 0 on the other tokens.

    >>> spread_scores(torch.tensor([2.0, 3.0]), torch.tensor([True, False, True]), np.array([0, 2, 3]))
    tensor([2., 0., 3.])
    """
    compiled = _compiled(mask.numel())
    if compiled is None or scores.dtype not in (torch.float32, torch.float64):
        spread = np.repeat(scores.numpy(), np.diff(offsets))
        np.copyto(spread, 0, where=~mask.numpy())  # in place: six times as fast as torch.where
        return torch.from_numpy(spread)
    out = empty((len(mask),), scores.dtype)
    compiled.spread(scores.numpy(), mask.numpy(), offsets, out.numpy())
    return out


class RewardCounts(NamedTuple):
    """Counts of rewards by row, on the host.

    Attributes:
        counts: [B] Number of active tokens.
        nonfinite: [B] Number of NaN or infinite rewards among them.
        off_mask: [B] Number of finite nonzero rewards on other tokens.
    """

    counts: Ints
    nonfinite: Ints
    off_mask: Ints


def count_rewards(rewards: torch.Tensor, active: torch.Tensor, lengths: list[int] | None = None) -> RewardCounts:
    """Count rewards that are not finite, and rewards on inactive tokens.

    Args:
        rewards: [B, R], or [total] with `lengths`.
        active: bool, in the same layout: tokens that the recursion reads.
        lengths: Lengths of packed rows; `None` if padded.

    Returns:
        The counts of each row.

    >>> count_rewards(torch.tensor([[0.0, float("nan"), 2.0]]), torch.tensor([[True, True, False]]))
    RewardCounts(counts=array([2]), nonfinite=array([1]), off_mask=array([1]))
    """
    offsets = _offsets(active, lengths)
    if rewards.device.type != "cpu":
        finite = torch.isfinite(rewards)
        unexpected = torch.where(active, ~finite, finite & (rewards != 0))
        if not unexpected.any():  # the usual case, which copies a single flag to the host
            positions = TokenPositions(active, lengths)
            zeros = np.zeros(len(offsets) - 1, dtype=np.int64)
            return RewardCounts((positions.end - positions.begin).cpu().numpy(), zeros, zeros)
    flat, mask = _flat(rewards), _flat(active)
    compiled = _compiled(len(flat))
    if compiled is not None and flat.dtype in (np.float32, np.float64):
        return RewardCounts(*compiled.count_rewards(flat, mask, offsets))
    finite_ = np.isfinite(flat)
    flags = (mask, mask & ~finite_, ~mask & finite_ & (flat != 0))
    rows = len(offsets) - 1
    rows_of = (np.searchsorted(offsets, np.flatnonzero(flag), side="right") - 1 for flag in flags)
    return RewardCounts(*(np.bincount(flag, minlength=rows).astype(np.int64) for flag in rows_of))


def backend(tokens: int = LARGE, device: torch.device | str = "cpu") -> str:
    """Return the implementation that a call of this size uses on a device: `numba`, `triton` or `numpy`.

    >>> backend(10) in ("numba", "numpy")  # numba only if a large call has loaded it
    True
    """
    if _triton_module(torch.device(device).type) is not None:
        return "triton"
    return "numpy" if _compiled(tokens) is None else "numba"


# --- arguments ------------------------------------------------------------------------------------------------------


def _prepare(
    gamma: float,
    observations: str,
    mask: torch.Tensor,
    response: torch.Tensor | None,
    lengths: list[int] | None,
    rewards: torch.Tensor,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check arguments; return rewards, values, mask and the active tokens, contiguous and without gradient."""
    check_float("gamma", gamma, 0, 1)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask: got {mask.dtype}, expected torch.bool")
    if mask.dim() != (2 if lengths is None else 1):
        expected = "2 (B, R), or `lengths` beside it" if lengths is None else "1 (total,) beside `lengths`"
        raise ValueError(f"mask: got {mask.dim()} dimensions, expected {expected}")
    if lengths is not None and sum(lengths) != len(mask):
        raise ValueError(f"lengths: got a sum of {sum(lengths)}, expected {len(mask)}, the number of tokens")
    for name, tensor in (("rewards", rewards), ("values", values), ("response", response)):
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(mask.shape)}, as the mask has")
    active = scan_mask(mask, lengths, observations, response)
    wide = torch.float64 in (rewards.dtype, None if values is None else values.dtype)
    kind = torch.float64 if wide else torch.float32

    tensors = []
    for tensor in (rewards, values):
        if tensor is not None:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if tensor.dtype != kind or not tensor.is_contiguous():
                tensor = tensor.to(kind).contiguous()
            tensors.append(tensor.masked_fill(~mask, 0) if observations == "zeroed" else tensor)
    return tensors[0], tensors[-1], mask.contiguous(), active.contiguous()


def _flat(tensor: torch.Tensor) -> NDArray[Any]:
    """Convert a tensor to a flat array on the host, in a type that numpy has; a view if possible."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.detach().to("cpu", torch.float32 if tensor.dtype.itemsize == 2 else tensor.dtype)
    array: NDArray[Any] = tensor.numpy()
    return array.reshape(-1)


def _offsets(mask: torch.Tensor, lengths: list[int] | None) -> Ints:
    """Return the start of each row in the flat tensor, and the end. Shape: [B + 1]."""
    if lengths is not None:
        return compute_offsets(lengths)
    return np.arange(mask.shape[0] + 1, dtype=np.int64) * mask.shape[1]


def _offsets_on(tensor: torch.Tensor, lengths: list[int] | None) -> torch.Tensor | None:
    """Copy the offsets to a CUDA device, without synchronizing. Shape: [B + 1]."""
    return None if lengths is None else torch.from_numpy(compute_offsets(lengths)).to(tensor.device, non_blocking=True)


# --- choice of the implementation -----------------------------------------------------------------------------------

_numba: list[Any] = []
"""The module of compiled scans after the first attempt to load it; `[None]` if numba is not installed."""


def _compiled(tokens: int) -> Any:
    """Return the module of compiled scans if it is loaded, or if the call is large enough to load it; else `None`."""
    if not _numba and tokens >= LARGE:
        try:
            from rollbook.algorithms.kernels import scan_numba

            _numba.append(scan_numba)
        except ImportError:
            _numba.append(None)
    return _numba[0] if _numba else None


@cache
def _triton_module(device: str) -> Any:
    """Return the Triton kernels for a type of device, `None` if it has none."""
    if device != "cuda":
        return None
    from rollbook.algorithms.kernels import scan_triton

    return scan_triton if scan_triton.AVAILABLE else None


# --- numpy implementation -------------------------------------------------------------------------------------------


# Overflow gives infinity without a warning, as in the compiled implementation.
_ignore_warnings = np.errstate(all="ignore")


class _Steps:
    """Active tokens, ordered by step: the number of tokens after them in their row.

    Within a step, rows are ordered by falling length: the tokens of step t belong to the first `rows_per_step[t]` rows,
    each in the same position as the token of its row in step t - 1.
    """

    def __init__(self, active: NDArray[np.bool_], offsets: Ints) -> None:
        self.index = np.flatnonzero(active)
        row = np.searchsorted(offsets, self.index, side="right") - 1
        counts = np.bincount(row, minlength=len(offsets) - 1)
        ends = np.cumsum(counts)
        step = ends[row] - 1 - np.arange(len(self.index))
        self.last = step == 0
        """[tokens] Whether a token is the last of its row."""
        longest_first = np.argsort(-counts, kind="stable")
        rank = np.empty(len(counts), dtype=np.int64)
        rank[longest_first] = np.arange(len(counts))
        rows_per_step = np.bincount(step, minlength=1)
        begin = np.concatenate(([0], np.cumsum(rows_per_step)))
        self._positions = begin[step] + rank[row]
        self._begin: list[int] = begin.tolist()
        self._size = len(active)

    @_ignore_warnings
    def sums(self, entries: Floats, decay: float) -> Floats:
        """Compute `S_i = entries_i + decay S_j`, with j the next token of the row. Shape: [tokens]."""
        sums = np.empty(len(entries))
        sums[self._positions] = entries
        begin = self._begin
        scratch = np.empty(begin[1] if len(begin) > 1 else 0)
        for t in range(1, len(begin) - 1):
            start, stop = begin[t], begin[t + 1]
            decayed = np.multiply(sums[begin[t - 1] : begin[t - 1] + stop - start], decay, out=scratch[: stop - start])
            np.add(sums[start:stop], decayed, out=sums[start:stop])
        summed: Floats = sums[self._positions]
        return summed

    @_ignore_warnings
    def scatter(self, sums: Floats, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Place the sums on the slots of their tokens, 0 elsewhere."""
        out = torch.zeros(self._size, dtype=dtype)
        out.numpy()[self.index] = sums
        return out.reshape(shape)


@_ignore_warnings
def _numpy_gae(
    rewards: NDArray[Any],
    values: NDArray[Any],
    active: NDArray[np.bool_],
    offsets: Ints,
    gamma: float,
    lam: float,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = _Steps(active, offsets)
    value = values[steps.index].astype(np.float64)
    after = np.append(value[1:], 0.0)
    after[steps.last] = 0
    deltas = rewards[steps.index].astype(np.float64) + gamma * after - value
    sums = steps.sums(deltas, gamma * lam)
    dtype = torch.float64 if rewards.dtype == np.float64 else torch.float32
    return steps.scatter(sums, dtype, shape), steps.scatter(sums + value, dtype, shape)
