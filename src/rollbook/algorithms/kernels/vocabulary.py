"""Passes over a vocabulary, whole or in parts: what they leave of each token, the slopes of that, the largest logits.

Invariant: sums over parts of a vocabulary, put together in any order, are the sums over the whole, up to rounding; and
beside logits (O, I, V) nothing is made that is larger than a few pieces of them. They are taken as float32 at least.

The sums are those that the docstring of `tokens` explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from rollbook.core.checks import check_float

# Entries of a piece of logits. On a CPU pieces are to stay in the cache, and each thread is to have its share.
_PIECE_CPU = 1 << 18
_PIECE_CUDA = 1 << 23
# A power this far down is 0 in every type: nothing changes where a difference is held above it, and 0 * inf is avoided.
_FLOOR = -1e4


class Sums(NamedTuple):
    """What a pass over a vocabulary, or over a part of it, leaves of N tokens; all (N,), float32 or float64."""

    top: torch.Tensor
    """The largest logit."""
    mass: torch.Tensor
    """The sum of e^((x - top) / T)."""
    spread: torch.Tensor
    """The sum of ((top - x) / T) e^((x - top) / T); any number where no entropy was asked for."""
    chosen: torch.Tensor
    """The label's logit; 0 if it lies in another part."""


@dataclass(frozen=True)
class Tokens:
    """Labels and temperatures of N tokens, checked."""

    count: int
    labels: torch.Tensor
    """(N,) int64; what is to be ignored is -1."""
    ignored: torch.Tensor
    """(N,) bool."""
    wrong: torch.Tensor | None
    """(N,) bool: outside the vocabulary; `None` where that was checked."""
    scales: torch.Tensor | None
    """(N,) 1 / temperature; `None` if all are 1."""

    def cut(self, rows: slice) -> Tokens:
        """Those of some tokens."""
        scales = None if self.scales is None else self.scales[rows]
        wrong = None if self.wrong is None else self.wrong[rows]
        labels, ignored = self.labels[rows], self.ignored[rows]
        return Tokens(len(labels), labels, ignored, wrong, scales)

    def finish(self, sums: Sums) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropies and log s, (N,)."""
        log_mass = sums.mass.log()
        logprobs = sums.chosen - sums.top
        if self.scales is not None:
            logprobs *= self.scales
        logprobs -= log_mass
        if self.wrong is not None:
            logprobs.masked_fill_(self.wrong, torch.nan)
        return logprobs.masked_fill_(self.ignored, 0), log_mass + sums.spread / sums.mass, log_mass


def kind_of(given: torch.Tensor) -> torch.dtype:
    """What is computed in."""
    return torch.float64 if given.dtype == torch.float64 else torch.float32


# --- arguments ------------------------------------------------------------------------------------------------------


def check_tensor(name: str, given: Any) -> None:
    """Refuse what is no tensor: a list of logits would be copied in silence, to a device that is anyone's guess."""
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name}: got {type(given).__name__}, expected a tensor")


def check_floats(name: str, given: Any) -> None:
    """Refuse what is no tensor of floating point numbers, of 16 bits at least."""
    check_tensor(name, given)
    if not given.dtype.is_floating_point or given.dtype.itemsize < 2:
        raise ValueError(f"{name}: got {given.dtype}, expected float16, bfloat16, float32 or float64")


def positive(name: str, value: Any, kind: torch.dtype) -> float:
    """A number above 0 that can be divided by: its type holds it and its inverse."""
    limit = torch.finfo(kind).max
    expected = f"a positive number that {str(kind).removeprefix('torch.')} holds, and its inverse too"
    found = check_float(name, value, 0, limit, expected)
    if found == 0 or 1 / found > limit:
        raise ValueError(f"{name}: got {value!r}, expected {expected}")
    return found


# --- pieces ---------------------------------------------------------------------------------------------------------


def pieces_of(logits: torch.Tensor) -> torch.Tensor:
    """(O, I, V) The logits with all dimensions but two in front put together; a view, if strides allow one."""
    *lead, vocabulary = logits.shape
    for shape in ((1, prod(lead)), (prod(lead[:-1]), prod(lead[-1:]))):
        try:
            return logits.view(*shape, vocabulary)
        except RuntimeError:
            continue
    return logits.reshape(1, prod(lead), vocabulary)


def pieces(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows of (O, I, V) at a time, (rows, V), and where they lie among all."""
    outer, inner, vocabulary = logits.shape
    # Two scratch pieces are to stay small beside the logits, if many threads ask for large ones.
    entries = _PIECE_CUDA if logits.is_cuda else min(_PIECE_CPU * torch.get_num_threads(), logits.numel() // 64)
    step = max(entries, _PIECE_CPU) // vocabulary or 1
    for o in range(outer):
        for start in range(0, inner, step):
            piece = logits[o, start : start + step]
            yield slice(o * inner + start, o * inner + start + len(piece)), piece


def kernels_for(given: torch.Tensor) -> Any:
    """The module of kernels, which is not to be loaded before a device needs it; `None` where they do not apply."""
    if not given.is_cuda or given.dtype == torch.float64:
        return None
    from rollbook.algorithms.kernels import logits_triton

    return logits_triton if logits_triton.READY else None


# --- sums -----------------------------------------------------------------------------------------------------------


def sums(logits: torch.Tensor, tokens: Tokens, start: int, entropy: bool) -> Sums:
    """Of logits (O, I, V), whose first entry stands for token `start` of the vocabulary."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return Sums(*kernels.sums(logits, tokens.labels, start, tokens.scales, entropy))
    found = nothing(tokens.count, logits)
    scratch: list[torch.Tensor] = []
    for rows, piece in pieces(logits):
        # The first piece is the largest.
        scratch = scratch or [torch.empty(piece.shape, dtype=found.top.dtype, device=piece.device) for _ in range(2)]
        distance, power = (one[: len(piece)] for one in scratch)
        top = piece.amax(-1, keepdim=True).to(distance.dtype)
        found.top[rows] = top[:, 0]
        _differ(piece, top.masked_fill_(top == -torch.inf, 0), distance)
        if tokens.scales is not None:
            distance *= tokens.scales[rows, None]
        torch.exp(distance, out=power)
        torch.sum(power, -1, out=found.mass[rows])
        if entropy:
            torch.sum(distance.clamp_(min=_FLOOR).mul_(power), -1, out=found.spread[rows])
        labels = tokens.labels[rows, None] - start
        inside = (labels >= 0) & (labels < piece.shape[1])
        chosen = piece.gather(1, labels.clamp(0, piece.shape[1] - 1)).to(distance.dtype)
        found.chosen[rows] = torch.where(inside, chosen, 0)[:, 0]
    found.spread.neg_()
    return found


def _differ(piece: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> None:
    if piece.dtype == out.dtype:
        torch.sub(piece, reference, out=out)
    else:
        out.copy_(piece).sub_(reference)


def nothing(count: int, like: torch.Tensor) -> Sums:
    """The sums over no part of a vocabulary."""
    made = [torch.zeros(count, dtype=kind_of(like), device=like.device) for _ in range(4)]
    return Sums(made[0].fill_(-torch.inf), *made[1:])


def add(whole: Sums, rows: slice, part: Sums, scales: torch.Tensor | None) -> None:
    """Sums over another part of the vocabulary, added to those of some rows."""
    mine = Sums(*(one[rows] for one in whole))
    top = torch.maximum(mine.top, part.top)
    reference = top.masked_fill(top == -torch.inf, 0)
    mass, spread = torch.zeros_like(top), torch.zeros_like(top)
    for one in (mine, part):
        rise = reference - one.top
        if scales is not None:
            rise *= scales[rows]
        keep = rise.neg().exp_()
        spread += keep * (one.spread + rise.clamp_(max=-_FLOOR) * one.mass)
        mass += keep * one.mass
    for target, value in zip(mine, (top, mass, spread, mine.chosen + part.chosen), strict=True):
        target.copy_(value)


# --- slopes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What the forward pass leaves for the slopes, and the gradients of its two results; all (N,)."""

    top: torch.Tensor
    log_mass: torch.Tensor
    entropy: torch.Tensor
    of_log_prob: torch.Tensor
    of_entropy: torch.Tensor | None

    @staticmethod
    def of(
        saved: tuple[torch.Tensor, ...], ignored: torch.Tensor, grads: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> Left:
        """From saved tensors and the gradients that came."""
        top, log_mass, entropy = saved
        log_prob = torch.zeros_like(top) if grads[0] is None else grads[0].masked_fill(ignored, 0)
        return Left(top, log_mass, entropy, log_prob, None if grads[1] is None else grads[1].contiguous())

    @property
    def silent(self) -> torch.Tensor:
        """(N,) bool: tokens to which no gradient came, as none comes to a log-prob that is ignored.

        Their slopes are 0 whatever their logits are. To multiply by the gradient does not do: 0 * NaN is NaN.
        """
        still = self.of_log_prob == 0
        return still if self.of_entropy is None else still & (self.of_entropy == 0)

    def cut(self, rows: slice) -> Left:
        """Those of some tokens."""
        of_entropy = None if self.of_entropy is None else self.of_entropy[rows]
        return Left(self.top[rows], self.log_mass[rows], self.entropy[rows], self.of_log_prob[rows], of_entropy)


def slopes(
    logits: torch.Tensor, out: torch.Tensor, tokens: Tokens, start: int, left: Left, cap: float | None = None
) -> None:
    """The gradient by logits (O, I, V) into `out`, contiguous; by those before the cap, if there is one."""
    kernels = kernels_for(logits)
    if kernels is not None:
        kept = (left.top, left.log_mass, left.entropy)
        kernels.slopes(logits, out, tokens.labels, start, tokens.scales, kept, left.of_log_prob, left.of_entropy, cap)
        return
    target, silent = out.view(-1, out.shape[-1]), left.silent
    scratch: list[torch.Tensor] = []
    for rows, piece in pieces(logits):
        scratch = scratch or [torch.empty(piece.shape, dtype=left.top.dtype, device=piece.device) for _ in range(2)]
        log_prob, slope = (one[: len(piece)] for one in scratch)
        here, weight = left.cut(rows), left.of_log_prob[rows, None]
        _differ(piece, here.top[:, None], log_prob)
        if tokens.scales is not None:
            log_prob *= tokens.scales[rows, None]
        log_prob -= here.log_mass[:, None]
        torch.exp(log_prob, out=slope)
        if here.of_entropy is not None:
            factor = log_prob.clamp_(min=_FLOOR).add_(here.entropy[:, None])
            slope *= factor.mul_(here.of_entropy[:, None]).add_(weight)
        else:
            slope *= weight
        slope.neg_()
        labels = tokens.labels[rows, None] - start
        near = labels.clamp(0, piece.shape[1] - 1)
        gains = (labels == near) & (piece.gather(1, near) != -torch.inf)
        slope.scatter_add_(1, near, torch.where(gains, weight, 0))
        if tokens.scales is not None:
            slope *= tokens.scales[rows, None]
        if cap is not None:
            slope *= torch.div(piece, cap, out=log_prob).square_().neg_().add_(1)
        if slope.is_cuda:  # to look for the rows would wait for the device
            slope.masked_fill_(silent[rows, None], 0)
        else:
            slope.index_fill_(0, silent[rows].nonzero()[:, 0], 0)
        target[rows] = slope


# --- likeliest tokens -----------------------------------------------------------------------------------------------


class Best:
    """The `k` largest logits of each row so far, whatever order parts of the vocabulary come in.

    Up to 32 bits a logit and its id make one integer that orders by both, so that no two are equal. Of float64, which
    leaves no room for ids, parts come in ascending order and sorting is stable.
    """

    def __init__(self, count: int, k: int, vocabulary: int, like: torch.Tensor) -> None:
        self.k, self.vocabulary, self.exact = k, vocabulary, like.dtype == torch.float64
        kind = torch.float64 if self.exact else torch.int64
        lowest = -torch.inf if self.exact else torch.iinfo(kind).min
        self.keys = torch.full((count, k), lowest, dtype=kind, device=like.device)
        self.ids = torch.full((count, k if self.exact else 0), vocabulary, device=like.device)

    def take(self, rows: slice, piece: torch.Tensor, start: int) -> None:
        """Logits (rows, part) of the part of the vocabulary that begins at `start`."""
        ids = torch.arange(start, start + piece.shape[1], device=piece.device)
        if self.exact:
            # What there is comes first: its ids are lower. Places that are still free hold ids beyond the vocabulary.
            free = self.ids[rows] == self.vocabulary
            keys = torch.cat([self.keys[rows], piece], 1)
            every = torch.cat([self.ids[rows], ids.expand(piece.shape)], 1)
            front = torch.cat([free, torch.zeros_like(piece, dtype=torch.bool)], 1)
            order = front.sort(dim=1, stable=True).indices
            keys, every = keys.gather(1, order), every.gather(1, order)
            self.keys[rows], order = (one[:, : self.k] for one in keys.sort(dim=1, descending=True, stable=True))
            self.ids[rows] = every.gather(1, order)
            return
        bits = (piece.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal, but their bits differ
        ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits).long()
        keys = (ordered << 32).bitwise_or_(self.vocabulary - 1 - ids)
        found = keys.topk(min(self.k, keys.shape[1]), 1).values
        self.keys[rows] = torch.cat([self.keys[rows], found], 1).topk(self.k, 1).values

    def give(self, sums: Sums, tokens: Tokens, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs (*shape, k), given the sums over the whole vocabulary."""
        if self.exact:
            ids, logits = self.ids, self.keys
        else:
            ids = self.vocabulary - 1 - (self.keys & 0xFFFF_FFFF)
            ordered = (self.keys >> 32).int()
            logits = torch.where(ordered < 0, ordered ^ 0x7FFF_FFFF, ordered).view(torch.float32)
        logprobs = logits - sums.top[:, None]
        if tokens.scales is not None:
            logprobs *= tokens.scales[:, None]
        logprobs -= sums.mass.log()[:, None]
        return ids.reshape(*shape, self.k), logprobs.reshape(*shape, self.k)
