"""Sums over the vocabulary for log-probs and entropies, their gradients, and the largest logits.

Invariant: sums over parts of a vocabulary, combined in any order, equal the sums over all of it, up to rounding. Only a
few chunks of the logits [O, I, V] are copied. Computation is in float32, or in float64 for float64 logits.

The formulas are in the docstring of `rollbook.models.logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import NamedTuple

import torch

from rollbook.core.checks import check_float

# Entries of a chunk of logits. On a CPU chunks should stay in the cache, and each thread should get its share.
_PIECE_CPU = 1 << 18
_PIECE_CUDA = 1 << 23
# exp of this is 0 in every type: clamping a difference here changes no result, and avoids 0 * inf.
_FLOOR = -1e4


class SoftmaxSums(NamedTuple):
    """Sums over a vocabulary, or over a part of it, for N tokens; all [N], float32 or float64."""

    top: torch.Tensor
    """The largest logit."""
    mass: torch.Tensor
    """The sum of e^((x - top) / T)."""
    spread: torch.Tensor
    """The sum of ((top - x) / T) e^((x - top) / T); undefined unless entropies are computed."""
    chosen: torch.Tensor
    """The label's logit; 0 if it is in another part."""

    @staticmethod
    def zeros(count: int, dtype: torch.dtype, device: torch.device) -> SoftmaxSums:
        """Return the sums over no part of a vocabulary."""
        zeros = torch.zeros(count, dtype=dtype, device=device)
        return SoftmaxSums(torch.full_like(zeros, -torch.inf), zeros, zeros.clone(), zeros.clone())

    def add(self, rows: slice, chunk: SoftmaxSums, scales: torch.Tensor | None) -> None:
        """Add, in place, the sums over another part of the vocabulary to those of some tokens.

        Args:
            rows: Which tokens.
            chunk: Their sums over the other part.
            scales: [N] 1 / temperature of all tokens; `None` if all are 1.
        """
        previous = SoftmaxSums(self.top[rows], self.mass[rows], self.spread[rows], self.chosen[rows])
        top = torch.maximum(previous.top, chunk.top)
        reference = top.masked_fill(top == -torch.inf, 0)
        mass, spread = torch.zeros_like(top), torch.zeros_like(top)
        for sums in (previous, chunk):
            rise = reference - sums.top
            if scales is not None:
                rise *= scales[rows]
            factor = rise.neg().exp_()
            spread += factor * (sums.spread + rise.clamp_(max=-_FLOOR) * sums.mass)
            mass += factor * sums.mass
        previous.chosen.add_(chunk.chosen)
        previous.top.copy_(top)
        previous.mass.copy_(mass)
        previous.spread.copy_(spread)


@dataclass(frozen=True)
class Targets:
    """Checked labels and temperatures of N tokens."""

    count: int
    labels: torch.Tensor
    """[N] int64; -1 for ignored labels."""
    ignored: torch.Tensor
    """[N] bool."""
    wrong: torch.Tensor | None
    """[N] bool: labels outside the vocabulary; `None` if there are none."""
    scales: torch.Tensor | None
    """[N] 1 / temperature; `None` if all are 1."""

    def take(self, rows: slice) -> Targets:
        """Return those of some tokens."""
        scales = None if self.scales is None else self.scales[rows]
        wrong = None if self.wrong is None else self.wrong[rows]
        labels, ignored = self.labels[rows], self.ignored[rows]
        return Targets(len(labels), labels, ignored, wrong, scales)

    def finish(self, sums: SoftmaxSums) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute log-probs, entropies and the logarithms of the masses, [N] each."""
        log_mass = sums.mass.log()
        logprobs = sums.chosen - sums.top
        if self.scales is not None:
            logprobs *= self.scales
        logprobs -= log_mass
        if self.wrong is not None:
            logprobs.masked_fill_(self.wrong, torch.nan)
        return logprobs.masked_fill_(self.ignored, 0), log_mass + sums.spread / sums.mass, log_mass


# --- arguments --------------------------------------------------------------------------------------------------------


def check_floats(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the argument is a floating point tensor of at least 16 bits."""
    if not isinstance(tensor, torch.Tensor):
        # Not converted: a list would be copied to the CPU.
        raise ValueError(f"{name}: got {type(tensor).__name__}, expected a tensor")
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise ValueError(f"{name}: got {tensor.dtype}, expected float16, bfloat16, float32 or float64")


def check_positive(name: str, number: float, dtype: torch.dtype) -> float:
    """Return a positive number that, with its inverse, is representable in a type; raise `ValueError` otherwise."""
    limit = torch.finfo(dtype).max
    expected = f"a positive number that {str(dtype).removeprefix('torch.')} holds, and its inverse too"
    checked = check_float(name, number, 0, limit, expected)
    if checked == 0 or 1 / checked > limit:
        raise ValueError(f"{name}: got {number!r}, expected {expected}")
    return checked


# --- chunks -----------------------------------------------------------------------------------------------------------


def flatten_logits(logits: torch.Tensor) -> torch.Tensor:
    """Merge all dimensions but the last into two; a view, if strides allow one. Shape: [O, I, V]."""
    *lead, vocabulary = logits.shape
    for shape in ((1, prod(lead)), (prod(lead[:-1]), prod(lead[-1:]))):
        try:
            return logits.view(*shape, vocabulary)
        except RuntimeError:
            continue
    return logits.reshape(1, prod(lead), vocabulary)


def row_chunks(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Iterate over [O, I, V] in chunks of rows [rows, V], each with its place among all rows."""
    outer, inner, vocabulary = logits.shape
    # The two scratch chunks must stay small beside the logits, also if many threads would want large ones.
    entries = _PIECE_CUDA if logits.is_cuda else min(_PIECE_CPU * torch.get_num_threads(), logits.numel() // 64)
    step = max(entries, _PIECE_CPU) // vocabulary or 1
    for o in range(outer):
        for start in range(0, inner, step):
            chunk = logits[o, start : start + step]
            yield slice(o * inner + start, o * inner + start + len(chunk)), chunk


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """Import the Triton kernels; `None` for tensors that they do not support."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from rollbook.algorithms.kernels import logits_triton

    return logits_triton if logits_triton.AVAILABLE else None


# --- sums -------------------------------------------------------------------------------------------------------------


def softmax_sums(logits: torch.Tensor, targets: Targets, start: int, entropy: bool) -> SoftmaxSums:
    """Compute the sums over a part of the vocabulary.

    Args:
        logits: [O, I, V] Logits of tokens `start` to `start + V` of the vocabulary.
        targets: Labels and temperatures of the O * I tokens.
        start: Where the part begins in the vocabulary.
        entropy: Whether to compute `spread`.
    """
    kernels = kernels_for(logits) if logits.is_cuda else None
    if kernels is not None:
        return SoftmaxSums(*kernels.sums(logits, targets.labels, start, targets.scales, entropy))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    sums = SoftmaxSums.zeros(targets.count, dtype, logits.device)
    scratch: torch.Tensor | None = None
    for rows, chunk in row_chunks(logits):
        if scratch is None:  # the first chunk is the largest
            scratch = torch.empty((2, *chunk.shape), dtype=dtype, device=chunk.device)
        distance, power = scratch[0, : len(chunk)], scratch[1, : len(chunk)]
        top = chunk.amax(-1, keepdim=True).to(dtype)
        sums.top[rows] = top[:, 0]
        _subtract(chunk, top.masked_fill_(top == -torch.inf, 0), distance)
        if targets.scales is not None:
            distance *= targets.scales[rows, None]
        torch.exp(distance, out=power)
        torch.sum(power, -1, out=sums.mass[rows])
        if entropy:
            torch.sum(distance.clamp_(min=_FLOOR).mul_(power), -1, out=sums.spread[rows])
        labels = targets.labels[rows, None] - start
        inside = (labels >= 0) & (labels < chunk.shape[1])
        chosen = chunk.gather(1, labels.clamp(0, chunk.shape[1] - 1)).to(dtype)
        sums.chosen[rows] = torch.where(inside, chosen, 0)[:, 0]
    sums.spread.neg_()
    return sums


def _subtract(chunk: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> None:
    if chunk.dtype == out.dtype:
        torch.sub(chunk, reference, out=out)
    else:
        out.copy_(chunk).sub_(reference)


# --- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardState:
    """Results of the forward pass that the gradient needs, and the incoming gradients; all [N]."""

    top: torch.Tensor
    log_mass: torch.Tensor
    entropy: torch.Tensor
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None
    no_grad: torch.Tensor
    """bool: tokens without an incoming gradient, such as ignored ones. Their logits get a gradient of 0 even if they
    are NaN, which multiplying by the incoming gradient would not give: 0 * NaN is NaN."""

    @staticmethod
    def from_saved(
        saved: tuple[torch.Tensor, ...], ignored: torch.Tensor, grads: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> BackwardState:
        """Build the state from saved tensors (`top`, `log_mass`, `entropy`) and incoming gradients."""
        top, log_mass, entropy = saved
        grad_logprobs = torch.zeros_like(top) if grads[0] is None else grads[0].masked_fill(ignored, 0)
        no_grad = grad_logprobs == 0
        if grads[1] is None:
            return BackwardState(top, log_mass, entropy, grad_logprobs, None, no_grad)
        return BackwardState(top, log_mass, entropy, grad_logprobs, grads[1].contiguous(), no_grad & (grads[1] == 0))

    def take(self, rows: slice) -> BackwardState:
        """Return those of some tokens."""
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return BackwardState(
            self.top[rows],
            self.log_mass[rows],
            self.entropy[rows],
            self.grad_logprobs[rows],
            grad_entropy,
            self.no_grad[rows],
        )


def logits_gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    targets: Targets,
    start: int,
    state: BackwardState,
    cap: float | None = None,
) -> None:
    """Write the gradient by the logits [O, I, V] into `out`, contiguous; with a `cap`, by those before the cap."""
    kernels = kernels_for(logits) if logits.is_cuda else None
    if kernels is not None:
        saved = (state.top, state.log_mass, state.entropy)
        kernels.logits_gradient(
            logits, out, targets.labels, start, targets.scales, saved, state.grad_logprobs, state.grad_entropy, cap
        )
        return
    rows_out = out.view(-1, out.shape[-1])
    scratch: torch.Tensor | None = None
    for rows, chunk in row_chunks(logits):
        if scratch is None:  # the first chunk is the largest
            scratch = torch.empty((2, *chunk.shape), dtype=state.top.dtype, device=chunk.device)
        logprobs, gradient = scratch[0, : len(chunk)], scratch[1, : len(chunk)]
        chunk_state = state.take(rows)
        weight = chunk_state.grad_logprobs[:, None]
        _subtract(chunk, chunk_state.top[:, None], logprobs)
        if targets.scales is not None:
            logprobs *= targets.scales[rows, None]
        logprobs -= chunk_state.log_mass[:, None]
        torch.exp(logprobs, out=gradient)
        if chunk_state.grad_entropy is not None:
            factor = logprobs.clamp_(min=_FLOOR).add_(chunk_state.entropy[:, None])
            gradient *= factor.mul_(chunk_state.grad_entropy[:, None]).add_(weight)
        else:
            gradient *= weight
        gradient.neg_()
        labels = targets.labels[rows, None] - start
        clamped_labels = labels.clamp(0, chunk.shape[1] - 1)
        gains = (labels == clamped_labels) & (chunk.gather(1, clamped_labels) != -torch.inf)
        gradient.scatter_add_(1, clamped_labels, torch.where(gains, weight, 0))
        if targets.scales is not None:
            gradient *= targets.scales[rows, None]
        if cap is not None:
            gradient *= torch.div(chunk, cap, out=logprobs).square_().neg_().add_(1)
        if gradient.is_cuda:  # `nonzero` would wait for the device
            gradient.masked_fill_(chunk_state.no_grad[:, None], 0)
        else:
            gradient.index_fill_(0, chunk_state.no_grad.nonzero()[:, 0], 0)
        rows_out[rows] = gradient


# --- largest logits ---------------------------------------------------------------------------------------------------


class TopLogits:
    """The `k` largest logits of each row so far; parts of the vocabulary may come in any order.

    Up to 32 bits, a logit and its id make one integer that orders by both, so that no two are equal. In float64, which
    leaves no room for ids, parts must come in ascending order, and sorting is stable.
    """

    def __init__(self, count: int, k: int, vocabulary: int, like: torch.Tensor) -> None:
        self.k, self.vocabulary, self.exact = k, vocabulary, like.dtype == torch.float64
        dtype = torch.float64 if self.exact else torch.int64
        lowest = -torch.inf if self.exact else torch.iinfo(dtype).min
        self.keys = torch.full((count, k), lowest, dtype=dtype, device=like.device)
        self.ids = torch.full((count, k if self.exact else 0), vocabulary, device=like.device)

    def update(self, rows: slice, chunk: torch.Tensor, start: int) -> None:
        """Take in logits [rows, part] of the part of the vocabulary that begins at `start`."""
        ids = torch.arange(start, start + chunk.shape[1], device=chunk.device)
        if self.exact:
            # Earlier entries come first: their ids are lower. Free entries have an id beyond the vocabulary.
            free = self.ids[rows] == self.vocabulary
            keys = torch.cat([self.keys[rows], chunk], 1)
            all_ids = torch.cat([self.ids[rows], ids.expand(chunk.shape)], 1)
            front = torch.cat([free, torch.zeros_like(chunk, dtype=torch.bool)], 1)
            order = front.sort(dim=1, stable=True).indices
            keys, all_ids = keys.gather(1, order), all_ids.gather(1, order)
            keys, order = keys.sort(dim=1, descending=True, stable=True)
            self.keys[rows] = keys[:, : self.k]
            self.ids[rows] = all_ids.gather(1, order[:, : self.k])
            return
        bits = (chunk.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal, but their bits differ
        ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits).long()
        keys = (ordered << 32).bitwise_or_(self.vocabulary - 1 - ids)
        largest = keys.topk(min(self.k, keys.shape[1]), 1).values
        self.keys[rows] = torch.cat([self.keys[rows], largest], 1).topk(self.k, 1).values

    def finish(self, sums: SoftmaxSums, targets: Targets, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and log-probs [*shape, k], given the sums over the whole vocabulary."""
        if self.exact:
            ids, logits = self.ids, self.keys
        else:
            ids = self.vocabulary - 1 - (self.keys & 0xFFFF_FFFF)
            ordered = (self.keys >> 32).int()
            logits = torch.where(ordered < 0, ordered ^ 0x7FFF_FFFF, ordered).view(torch.float32)
        logprobs = logits - sums.top[:, None]
        if targets.scales is not None:
            logprobs *= targets.scales[:, None]
        logprobs -= sums.mass.log()[:, None]
        return ids.reshape(*shape, self.k), logprobs.reshape(*shape, self.k)
