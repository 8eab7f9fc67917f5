"""Recursions from the last token of a row to its first, GAE and discounted returns: padded or packed, on any device.

Invariant: a token that does not take part is never read, and a token that does not count is 0 in the result. On the
CPU, sums are in float64, and the compiled and the plain implementation do the same operations in the same order, so
that results do not depend on which one runs.

Implementations:

- On the CPU numba, if it is installed (`pip install rollbook[fast]`) and the call has `LARGE` tokens or an earlier one
  had: loading the compiled code takes half a second, compiling it, once on a machine, ten.
- On a CUDA device Triton, which comes with torch there: one pass, in the type of the tensors.
- Else numpy, one step for all rows at a time. Tensors on other devices are copied to the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.core.checks import check_choice, check_float
from rollbook.core.ragged import offsets_of
from rollbook.core.rows import empty

OBSERVATIONS = ("skip", "through", "zeroed")
LARGE = 1 << 15
"""How many tokens a call has for which numba is loaded; once it is, smaller calls use it too."""

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
    """Advantages and returns: `A_i = r_i + gamma V_j - V_i + gamma lam A_j`, and `A_i + V_i`.

    rewards, values, mask (bool): [B, R], or [total] with the `lengths` of rows. j is the next token after i that takes
    part; after the last one V and A are 0. Which take part besides the tokens that count (`mask`) is said by
    `observations`; their results are 0 in any case:

    - `skip`: none. What a tool wrote is no state of the policy, and costs no discount.
    - `through`: those between a row's first and last token that counts, or all of `response` (bool) where that is
      given, with their own values and rewards.
    - `zeroed`: the same ones, with values and rewards of 0.

    Nothing here has a gradient: advantages are constants of a loss.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.9, 0.2]])
    >>> gae_scan(rewards, values, torch.tensor([[True, False, True]]), gamma=0.9, lam=0.5)[0]
    tensor([[0.0400, 0.0000, 0.8000]])
    """
    check_float("lam", lam, 0, 1)
    rewards, values, mask, part = _ready(gamma, observations, mask, response, lengths, rewards=rewards, values=values)
    kernels = _triton_module(rewards.device.type)
    if kernels is not None:
        results = kernels.gae(rewards, values, part, _offsets_on(rewards, lengths), gamma, lam)
    else:
        offsets = _offsets(mask, lengths)
        flat = _flat(rewards), _flat(values), _flat(part)
        compiled = _compiled(mask.numel())
        if compiled is not None:
            out = empty(tuple(mask.shape), rewards.dtype), empty(tuple(mask.shape), rewards.dtype)
            compiled.gae(*flat, offsets, gamma, lam, _flat(out[0]), _flat(out[1]))
        else:
            out = _plain_gae(*flat, offsets, gamma, lam, mask.shape)
        results = out if mask.device.type == "cpu" else (out[0].to(mask.device), out[1].to(mask.device))
    if part is not mask:
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
    """Returns-to-go: `R_i = r_i + gamma R_j`, with j the next token after i that takes part; arguments as `gae_scan`.

    >>> return_scan(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, True]), [1, 2], gamma=0.5)
    tensor([1., 4., 4.])
    """
    rewards, _, mask, part = _ready(gamma, observations, mask, response, lengths, rewards=rewards)
    kernels = _triton_module(rewards.device.type)
    if kernels is not None:
        returns = kernels.discounted(rewards, part, _offsets_on(rewards, lengths), gamma)
    else:
        offsets, compiled = _offsets(mask, lengths), _compiled(mask.numel())
        if compiled is not None:
            out = empty(tuple(mask.shape), rewards.dtype)
            compiled.discounted(_flat(rewards), _flat(part), offsets, gamma, _flat(out))
        else:
            steps = _Steps(_flat(part), offsets)
            sums = steps.sums(_flat(rewards)[steps.index].astype(np.float64), gamma)
            out = steps.put(sums, rewards.dtype, mask.shape)
        returns = out.to(mask.device)
    if part is not mask:
        returns.masked_fill_(~mask, 0)
    return returns  # type: ignore[no-any-return]


def taking_part(
    mask: torch.Tensor, lengths: list[int] | None, observations: str, response: torch.Tensor | None = None
) -> torch.Tensor:
    """[of `mask`] bool: the tokens that a recursion goes through.

    >>> mask = torch.tensor([[False, True, False, True, False]])
    >>> taking_part(mask, None, "through").tolist()
    [[False, True, True, True, False]]
    """
    check_choice("observations", observations, OBSERVATIONS)
    if observations == "skip":
        return mask
    if response is not None:
        return mask | response
    _, first, last = Places(mask, lengths).ends()
    change = torch.zeros(mask.numel() + 1, dtype=torch.int32, device=mask.device)
    change[first] = 1
    change[last + 1] -= 1
    return (change.cumsum(0)[:-1] > 0).reshape(mask.shape)


class Places:
    """Where the tokens that count lie among the slots of all rows, which are numbered end to end in any layout."""

    def __init__(self, mask: torch.Tensor, lengths: list[int] | None) -> None:
        self.offsets = torch.from_numpy(_offsets(mask, lengths)).to(mask.device)
        """[B + 1] The slot where each row begins, and the end."""
        self.index = mask.reshape(-1).nonzero()[:, 0]
        """[tokens that count] The slot of each."""
        bounds = torch.searchsorted(self.index, self.offsets)
        self.begin, self.end = bounds[:-1], bounds[1:]
        """[B] Which of the tokens that count are each row's."""

    def ends(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that have tokens that count, and the slots of each one's first and last."""
        rows = (self.end > self.begin).nonzero()[:, 0]
        return rows, self.index[self.begin[rows]], self.index[self.end[rows] - 1]

    def row_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The row that each slot belongs to."""
        return torch.searchsorted(self.offsets, slots, right=True) - 1

    def nearest(self, slots: torch.Tensor) -> torch.Tensor:
        """For slots of rows that have tokens that count: the slot of the last one up to there, else of the first."""
        before = torch.searchsorted(self.index, slots, right=True) - 1
        return self.index[torch.maximum(before, self.begin[self.row_of(slots)])]


def spread_scan(scores: torch.Tensor, mask: torch.Tensor, offsets: Ints) -> torch.Tensor:
    """(total,) Each row's score, (B,), on its tokens that count, packed and on the CPU; 0 on the others.

    >>> spread_scan(torch.tensor([2.0, 3.0]), torch.tensor([True, False, True]), np.array([0, 2, 3]))
    tensor([2., 0., 3.])
    """
    compiled = _compiled(mask.numel())
    if compiled is None or scores.dtype not in (torch.float32, torch.float64):
        spread = np.repeat(scores.numpy(), np.diff(offsets))
        np.copyto(spread, 0, where=~mask.numpy())  # in place, six times as fast as torch.where
        return torch.from_numpy(spread)
    out = empty((len(mask),), scores.dtype)
    compiled.spread(scores.numpy(), mask.numpy(), offsets, out.numpy())
    return out


class Survey(NamedTuple):
    """What there is to say of rewards before a recursion goes over them; on the host, one number for each row."""

    counts: Ints
    """[B] How many tokens are taken."""
    broken: Ints
    """[B] How many of their rewards are NaN or infinite."""
    off: Ints
    """[B] How many finite rewards other than 0 lie on tokens that are not taken."""


def survey(rewards: torch.Tensor, taken: torch.Tensor, lengths: list[int] | None = None) -> Survey:
    """Count rewards that are broken, and rewards where none is taken from: [B, R] or [total] with `lengths`.

    >>> survey(torch.tensor([[0.0, float("nan"), 2.0]]), torch.tensor([[True, True, False]]))
    Survey(counts=array([2]), broken=array([1]), off=array([1]))
    """
    offsets = _offsets(taken, lengths)
    if rewards.device.type != "cpu":
        finite = torch.isfinite(rewards)
        odd = torch.where(taken, ~finite, finite & (rewards != 0))
        if not odd.any():  # nothing but one number has to cross
            place = Places(taken, lengths)
            none = np.zeros(len(offsets) - 1, dtype=np.int64)
            return Survey((place.end - place.begin).cpu().numpy(), none, none)
    flat, mask = _flat(rewards), _flat(taken)
    compiled = _compiled(len(flat))
    if compiled is not None and flat.dtype in (np.float32, np.float64):
        return Survey(*compiled.survey(flat, mask, offsets))
    finite_ = np.isfinite(flat)
    flags = (mask, mask & ~finite_, ~mask & finite_ & (flat != 0))
    rows = len(offsets) - 1
    rows_of = (np.searchsorted(offsets, np.flatnonzero(flag), side="right") - 1 for flag in flags)
    return Survey(*(np.bincount(flag, minlength=rows).astype(np.int64) for flag in rows_of))


def backend(tokens: int = LARGE, device: torch.device | str = "cpu") -> str:
    """Which way a call of this size takes on a device: `numba`, `triton` or `numpy`.

    >>> backend(10) in ("numba", "numpy")  # numba only if a large call has loaded it
    True
    """
    if _triton_module(torch.device(device).type) is not None:
        return "triton"
    return "numpy" if _compiled(tokens) is None else "numba"


# --- what all ways share --------------------------------------------------------------------------------------------


def _ready(
    gamma: float,
    observations: str,
    mask: torch.Tensor,
    response: torch.Tensor | None,
    lengths: list[int] | None,
    rewards: torch.Tensor,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values, mask and the tokens that take part: checked, of one type, contiguous and without gradient."""
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
    part = taking_part(mask, lengths, observations, response)
    wide = torch.float64 in (rewards.dtype, None if values is None else values.dtype)
    kind = torch.float64 if wide else torch.float32

    tensors = []
    for tensor in (rewards, values):
        if tensor is not None:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if tensor.dtype != kind or not tensor.is_contiguous():
                tensor = tensor.to(kind).contiguous()
            tensors.append(tensor.masked_fill(~mask, 0) if observations == "zeroed" else tensor)
    return tensors[0], tensors[-1], mask.contiguous(), part.contiguous()


def _flat(tensor: torch.Tensor) -> NDArray[Any]:
    """The numbers on the host, end to end, in a type that numpy has; a view where that is possible."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.detach().to("cpu", torch.float32 if tensor.dtype.itemsize == 2 else tensor.dtype)
    array: NDArray[Any] = tensor.numpy()
    return array.reshape(-1)


def _offsets(mask: torch.Tensor, lengths: list[int] | None) -> Ints:
    """[B + 1] Where rows begin in the flat tensor."""
    if lengths is not None:
        return offsets_of(lengths)
    return np.arange(mask.shape[0] + 1, dtype=np.int64) * mask.shape[1]


def _offsets_on(tensor: torch.Tensor, lengths: list[int] | None) -> torch.Tensor | None:
    """[B + 1] The offsets on a CUDA device. So few bytes are taken from the host at once: nobody has to wait."""
    return None if lengths is None else torch.from_numpy(offsets_of(lengths)).to(tensor.device, non_blocking=True)


# --- which way ------------------------------------------------------------------------------------------------------

_numba: list[Any] = []
"""The module of compiled scans, once it was asked for; `None` in it if numba is not installed."""


def _compiled(tokens: int) -> Any:
    """The module of compiled scans, if it is loaded or the call is worth loading it; else `None`."""
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

    return scan_triton if scan_triton.READY else None


# --- the plain way --------------------------------------------------------------------------------------------------


# What is not finite is not hidden, and no cause for a warning either: the compiled way has none.
_quiet = np.errstate(all="ignore")


class _Steps:
    """The tokens that take part, by how many come after them in their row: what is one step of all rows lies together.

    Rows are in the order of falling length, so that the tokens of step t are those of the first `active[t]` rows, and
    each stands where its row's token of step t - 1 stood.
    """

    def __init__(self, taken: NDArray[np.bool_], offsets: Ints) -> None:
        self.index = np.flatnonzero(taken)
        row = np.searchsorted(offsets, self.index, side="right") - 1
        counts = np.bincount(row, minlength=len(offsets) - 1)
        ends = np.cumsum(counts)
        step = ends[row] - 1 - np.arange(len(self.index))
        self.last = step == 0
        """[tokens] Whether a token is its row's last."""
        longest_first = np.argsort(-counts, kind="stable")
        rank = np.empty(len(counts), dtype=np.int64)
        rank[longest_first] = np.arange(len(counts))
        active = np.bincount(step, minlength=1)
        begin = np.concatenate(([0], np.cumsum(active)))
        self._place = begin[step] + rank[row]
        self._begin: list[int] = begin.tolist()
        self._size = len(taken)

    @_quiet
    def sums(self, entries: Floats, decay: float) -> Floats:
        """[tokens] `S_i = entries_i + decay S_j`, with j the next token of the row."""
        sums = np.empty(len(entries))
        sums[self._place] = entries
        begin = self._begin
        room = np.empty(begin[1] if len(begin) > 1 else 0)
        for t in range(1, len(begin) - 1):
            here, stop = begin[t], begin[t + 1]
            decayed = np.multiply(sums[begin[t - 1] : begin[t - 1] + stop - here], decay, out=room[: stop - here])
            np.add(sums[here:stop], decayed, out=sums[here:stop])
        summed: Floats = sums[self._place]
        return summed

    @_quiet
    def put(self, sums: Floats, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The sums where their tokens lie, zero elsewhere."""
        out = torch.zeros(self._size, dtype=dtype)
        out.numpy()[self.index] = sums
        return out.reshape(shape)


@_quiet
def _plain_gae(
    rewards: NDArray[Any],
    values: NDArray[Any],
    taken: NDArray[np.bool_],
    offsets: Ints,
    gamma: float,
    lam: float,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = _Steps(taken, offsets)
    value = values[steps.index].astype(np.float64)
    after = np.append(value[1:], 0.0)
    after[steps.last] = 0
    deltas = rewards[steps.index].astype(np.float64) + gamma * after - value
    sums = steps.sums(deltas, gamma * lam)
    dtype = torch.float64 if rewards.dtype == np.float64 else torch.float32
    return steps.put(sums, dtype, shape), steps.put(sums + value, dtype, shape)
