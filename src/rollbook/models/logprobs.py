"""Log-probs, entropies and most likely tokens, from logits (`from_logits`, `top_k`) or hidden states (`from_hidden`).

Invariant: the only tensor of the size of the logits that is allocated, forward or backward, is their gradient.
Computation is in float32, or in float64 for float64 logits. Up to rounding, results do not depend on how tokens and
vocabulary are divided into chunks.

With m the largest logit of a token, s = sum e^((x - m) / T) and t = sum ((m - x) / T) e^((x - m) / T), the log-prob of
label y is (x_y - m) / T - log s and the entropy is log s + t / s. All terms of both sums are nonnegative, so that
there is no cancellation, and sums over parts of the vocabulary can be combined. Gradients are recomputed from x, m and
s. The sums come from Triton kernels on a CUDA device (except in float64), elsewhere from torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch

from rollbook.algorithms.kernels import vocabulary as _vocabulary
from rollbook.algorithms.kernels.vocabulary import (
    BackwardState,
    SoftmaxSums,
    Targets,
    TopLogits,
    check_floats,
    check_positive,
    flatten_logits,
    logits_gradient,
    row_chunks,
    softmax_sums,
)
from rollbook.core.checks import check_int

__all__ = [
    "OutputLayer",
    "TokenStats",
    "TopK",
    "entropy_from_logits",
    "from_hidden",
    "from_logits",
    "top_k",
    "top_k_from_hidden",
]

_TILE_CPU = (512, 2048)
_TILE_CUDA = (4096, 16384)
"""Size (tokens, vocabulary) of the tiles in which logits are computed from hidden states."""
_BACKWARD_TILE_ENTRIES = 1 << 25
"""Number of entries of a tile in the backward pass on a CUDA device."""
_IGNORE = -100


class TokenStats(NamedTuple):
    """Log-probs and entropies of tokens, in the shape of the labels.

    Args:
        logprobs: Log-probs of the labels.
        entropy: Entropies, if they were requested.

    >>> TokenStats(torch.zeros(2), None).entropy is None
    True
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    """`None` unless it was requested."""


class TopK(NamedTuple):
    """The most likely tokens at each position, [..., k], in descending order of probability.

    Args:
        ids: [..., k] Token ids.
        logprobs: [..., k] Their log-probs.

    >>> TopK(torch.tensor([3]), torch.tensor([0.0])).ids.tolist()
    [3]
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


def from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy: bool = False,
    ignore_index: int = _IGNORE,
) -> TokenStats:
    """Compute log-probs of labels, and entropies, under softmax(logits / temperature).

    Both results have first derivatives by the logits, of the dtype of the logits. A logit of -inf excludes a token of
    the vocabulary: it has probability 0 and gradient 0. If all logits are -inf, or one is NaN or inf, both results and
    the gradient are NaN. A position without an incoming gradient, such as an ignored one, has gradient 0 even if its
    logits are NaN.

    On a CUDA device, labels and temperatures are not checked, since that would synchronize with the device: a label
    outside the vocabulary or a temperature that is not positive gives a log-prob of NaN.

    Args:
        logits: [..., V] A slice of a larger tensor (`logits[:, :-1]`) is not copied, unless it has four or more
            dimensions and several of them are sliced.
        labels: [...] Token ids.
        temperature: A number, or a tensor that broadcasts to the labels' shape; it gets no gradient.
        entropy: Whether to compute entropies.
        ignore_index: Labels of this value have log-prob 0. Their entropy is computed.

    Returns:
        Log-probs [...] and, if requested, entropies [...] in nats; float32, or float64 for float64 logits.

    Raises:
        ValueError: If shapes, types or devices do not match, or a label is outside the vocabulary.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    >>> stats = from_logits(logits, torch.tensor([2, 3]), entropy=True)
    >>> stats.logprobs
    tensor([-1.3863, -0.4402])
    >>> stats.entropy
    tensor([1.3863, 0.9475])
    """
    targets = _targets("logits", logits, labels, _vocabulary_size(logits), temperature, ignore_index)
    logprobs, entropies = _FromLogits.apply(flatten_logits(logits), targets, entropy)  # type: ignore[no-untyped-call]
    return TokenStats(logprobs.view(labels.shape), entropies.view(labels.shape) if entropy else None)


def entropy_from_logits(logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Compute the entropies of softmax(logits / temperature).

    Args:
        logits: [..., V]
        temperature: See `from_logits`.

    Returns:
        [...] Entropies in nats, with the gradients of `from_logits`.

    >>> entropy_from_logits(torch.tensor([[0.0, 0.0], [0.0, -float("inf")]]))
    tensor([0.6931, 0.0000])
    """
    vocabulary = _vocabulary_size(logits)
    targets = _targets("logits", logits, _ignored_labels(logits), vocabulary, temperature, _IGNORE)
    entropies: torch.Tensor = _FromLogits.apply(flatten_logits(logits), targets, True)[1]  # type: ignore[no-untyped-call]
    return entropies.view(logits.shape[:-1])


def from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    entropy: bool = False,
    ignore_index: int = _IGNORE,
    softcap: float | None = None,
) -> TokenStats:
    """Compute `from_logits` of `hidden @ weight.T + bias` without allocating the logits.

    There are gradients by the hidden states, weight and bias; the backward pass computes the logits again. Logits and
    gradients are accumulated in float32 (float64 for float64). (On a CUDA device, the gradients of 16-bit logits are
    rounded to 16 bits before they are multiplied; float32 products follow torch's setting for TF32.) Hidden states of
    tokens without an incoming gradient may be NaN: their gradient is 0, and they do not affect other gradients.

    Besides results and gradients, it needs some tens of MB on a CPU and under 512 MiB on a CUDA device. The backward
    pass also needs 4 N D bytes for the sum of the gradient by N hidden states, and a copy of the hidden states for the
    gradient by the weight.

    Args:
        hidden: [..., D] Hidden states.
        weight: [V, D] Weight of the output layer.
        labels: [...] Token ids.
        bias: [V] Bias of the output layer.
        temperature: See `from_logits`.
        entropy: Whether to compute entropies.
        ignore_index: See `from_logits`.
        softcap: Soft cap c of the logits x, c tanh(x / c).

    Returns:
        Log-probs [...] and, if requested, entropies [...]; see `from_logits`.

    Raises:
        ValueError: If shapes, types or devices do not match, or a label is outside the vocabulary.

    >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> from_hidden(hidden, weight, torch.tensor([2])).logprobs
    tensor([-0.4076])
    >>> from_logits(hidden @ weight.T, torch.tensor([2])).logprobs
    tensor([-0.4076])
    """
    layer = OutputLayer.from_tensors(hidden, weight, bias, softcap)
    targets = _targets("hidden", hidden, labels, len(weight), temperature, ignore_index)
    flat = hidden.reshape(labels.numel(), weight.shape[1])
    logprobs, entropies = _FromHidden.apply(flat, weight, bias, layer, targets, entropy)  # type: ignore[no-untyped-call]
    return TokenStats(logprobs.view(labels.shape), entropies.view(labels.shape) if entropy else None)


def top_k(logits: torch.Tensor, k: int, *, temperature: float | torch.Tensor = 1.0) -> TopK:
    """Find the `k` most likely tokens at each position, without gradients.

    Args:
        logits: [..., V]
        k: Number of tokens, from 1 to V. Of equally likely tokens, the lower id comes first.
        temperature: See `from_logits`.

    Returns:
        Ids and log-probs [..., k], normalized over the whole vocabulary.

    Raises:
        ValueError: If `k` is out of range.

    >>> top_k(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3)
    TopK(ids=tensor([1, 2, 3]), logprobs=tensor([-0.9176, -0.9176, -1.9176]))
    """
    vocabulary = _vocabulary_size(logits)
    targets = _targets("logits", logits, _ignored_labels(logits), vocabulary, temperature, _IGNORE)
    k = check_int("k", k, 1, vocabulary)
    with torch.no_grad():
        flat = flatten_logits(logits)
        sums = softmax_sums(flat, targets, 0, False)
        largest = TopLogits(targets.count, k, vocabulary, flat)
        for rows, chunk in row_chunks(flat):
            largest.update(rows, chunk, 0)
    return TopK(*largest.finish(sums, targets, logits.shape[:-1]))


def top_k_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> TopK:
    """Compute `top_k` of `hidden @ weight.T + bias` without allocating the logits.

    Args:
        hidden: [..., D] Hidden states.
        weight: [V, D] Weight of the output layer.
        k: See `top_k`.
        bias: [V] Bias of the output layer.
        temperature: See `from_logits`.
        softcap: See `from_hidden`.

    Returns:
        Ids and log-probs [..., k].

    Raises:
        ValueError: If shapes, types or devices do not match, or `k` is out of range.

    >>> hidden, weight = torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> top_k_from_hidden(hidden, weight, 2)
    TopK(ids=tensor([2, 1]), logprobs=tensor([-0.4076, -1.4076]))
    """
    layer = OutputLayer.from_tensors(hidden, weight, bias, softcap)
    targets = _targets("hidden", hidden, _ignored_labels(hidden), len(weight), temperature, _IGNORE)
    k = check_int("k", k, 1, len(weight))
    with torch.no_grad():
        flat = hidden.reshape(targets.count, weight.shape[1])
        largest = TopLogits(targets.count, k, len(weight), torch.empty(0, dtype=layer.dtype, device=hidden.device))
        sums = SoftmaxSums.zeros(targets.count, layer.dtype, hidden.device)
        for rows, start, tile in layer.tiles(flat):
            sums.add(rows, softmax_sums(tile[None], targets.take(rows), start, False), targets.scales)
            for selection, chunk in row_chunks(tile[None]):
                largest.update(slice(rows.start + selection.start, rows.start + selection.stop), chunk, start)
    return TopK(*largest.finish(sums, targets, hidden.shape[:-1]))


# --- arguments --------------------------------------------------------------------------------------------------------


def _targets(
    name: str,
    scored: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: int,
    temperature: float | torch.Tensor,
    ignore_index: int,
) -> Targets:
    """Check labels and temperatures against `scored`, the logits or hidden states that errors call `name`."""
    if scored.dim() == 0 or vocabulary == 0:
        raise ValueError(f"{name}: got shape {tuple(scored.shape)}, expected at least one entry in the last dimension")
    if not isinstance(labels, torch.Tensor):
        raise ValueError(f"labels: got {type(labels).__name__}, expected a tensor")
    if labels.shape != scored.shape[:-1]:
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {tuple(scored.shape[:-1])}, as {name} has")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise ValueError(f"labels: got {labels.dtype}, expected integers")
    if labels.device != scored.device:
        raise ValueError(f"labels: got device {labels.device}, expected {scored.device}, as {name} has")
    flat = labels.reshape(-1).long()
    ignored = flat == check_int("ignore_index", ignore_index, -(1 << 63))
    invalid: torch.Tensor | None = ~ignored & ((flat < 0) | (flat >= vocabulary))
    if invalid is not None and not invalid.is_cuda:
        if invalid.any():
            raise ValueError(
                f"labels: got {int(flat[invalid][0])}, expected 0 to {vocabulary - 1}, or {ignore_index} to be ignored"
            )
        invalid = None
    return Targets(
        len(flat), flat.masked_fill(ignored, -1), ignored, invalid, _scales(temperature, labels.shape, scored)
    )


def _scales(temperature: float | torch.Tensor, shape: torch.Size, scored: torch.Tensor) -> torch.Tensor | None:
    """Return 1 / temperature of each token, [N]; `None` if all temperatures are 1."""
    dtype = torch.promote_types(scored.dtype, torch.float32)
    if not isinstance(temperature, torch.Tensor):
        if not isinstance(temperature, Real):
            raise ValueError(f"temperature: got {reprlib.repr(temperature)}, expected a number or a tensor")
        number = check_positive("temperature", temperature, dtype)
        if number == 1:
            return None
        return torch.full((shape.numel(),), 1 / number, dtype=dtype, device=scored.device)
    if temperature.dtype.is_complex or temperature.dtype == torch.bool:
        raise ValueError(f"temperature: got {temperature.dtype}, expected positive numbers")
    if temperature.requires_grad:
        raise ValueError("temperature: got a tensor that requires a gradient, expected a constant")
    try:
        temperatures = temperature.to(device=scored.device, dtype=dtype).expand(shape).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, expected one that broadcasts to {tuple(shape)}"
        ) from None
    inverse = temperatures.reciprocal()
    valid = (temperatures > 0) & temperatures.isfinite() & inverse.isfinite()
    if not temperatures.is_cuda and not valid.all():
        raise ValueError(
            f"temperature: got {temperatures[~valid][0].item():g}, expected positive numbers that "
            f"{str(dtype).removeprefix('torch.')} holds, and their inverses too"
        )
    return inverse.masked_fill_(~valid, torch.nan)


def _ignored_labels(scored: torch.Tensor) -> torch.Tensor:
    return torch.full(scored.shape[:-1], _IGNORE, device=scored.device)


def _vocabulary_size(logits: torch.Tensor) -> int:
    check_floats("logits", logits)
    return logits.shape[-1:].numel()


# --- gradients --------------------------------------------------------------------------------------------------------


def _check_first_derivative() -> None:
    # Without this check, a second derivative is silently 0 if the loss is linear in the results.
    if torch.is_grad_enabled():
        raise RuntimeError("log-probs and entropies can be differentiated once: there is no gradient with create_graph")


class _Context(Protocol):
    """The context of an autograd function, with the attributes that the backward pass needs."""

    targets: Targets
    cap: float | None
    dtype: torch.dtype
    factor_dtype: torch.dtype
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, logits: torch.Tensor, targets: Targets, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.targets = targets
        sums = softmax_sums(logits, targets, 0, entropy)
        logprobs, entropies, log_mass = targets.finish(sums)
        ctx.save_for_backward(logits, sums.top, log_mass, entropies.clone())
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        _check_first_derivative()
        logits, *saved = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        state = BackwardState.from_saved(tuple(saved), ctx.targets.ignored, (grads[0], grads[1]))
        logits_gradient(logits, gradient, ctx.targets, 0, state)
        return gradient, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: OutputLayer,
        targets: Targets,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.targets, ctx.cap, ctx.dtype, ctx.factor_dtype = targets, layer.cap, layer.dtype, layer.factor_dtype
        # An autocast around the call must not convert these products.
        with torch.autocast(hidden.device.type, enabled=False):
            kernels = _vocabulary.kernels_for(hidden) if hidden.is_cuda else None
            if kernels is not None and kernels.supports(hidden, weight):
                sums = SoftmaxSums(
                    *kernels.product_sums(hidden, weight, bias, targets.labels, targets.scales, layer.cap, entropy)
                )
            else:
                sums = SoftmaxSums.zeros(len(hidden), layer.dtype, hidden.device)
                for rows, start, tile in layer.tiles(hidden):
                    sums.add(rows, softmax_sums(tile[None], targets.take(rows), start, entropy), targets.scales)
            logprobs, entropies, log_mass = targets.finish(sums)
        ctx.save_for_backward(hidden, weight, bias, sums.top, log_mass, entropies.clone())
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_first_derivative()
        hidden, weight, bias, *saved = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * 6
        layer = OutputLayer(weight, bias, ctx.cap, ctx.dtype, ctx.factor_dtype)
        state = BackwardState.from_saved(tuple(saved), ctx.targets.ignored, (grads[0], grads[1]))
        with torch.autocast(hidden.device.type, enabled=False):
            return *layer.gradients(hidden, ctx.targets, state, ctx.needs_input_grad), None, None, None


@dataclass(frozen=True)
class OutputLayer:
    """Weight, bias and soft cap of an output layer, whose logits are computed tile by tile.

    Args:
        weight: [V, D] Weight.
        bias: [V] Bias, if there is one.
        cap: Soft cap of the logits, if there is one.
        dtype: Type of the logits: float32 or float64.
        factor_dtype: Type of the factors. It has 16 bits only if the device accumulates such products in float32.

    >>> hidden = torch.ones(3, 2)
    >>> layer = OutputLayer.from_tensors(hidden, torch.ones(5, 2), bias=None, softcap=None)
    >>> [(start, list(logits.shape)) for _, start, logits in layer.tiles(hidden, (2, 4))]
    [(0, [2, 4]), (0, [1, 4]), (4, [2, 1]), (4, [1, 1])]
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    cap: float | None
    dtype: torch.dtype
    factor_dtype: torch.dtype

    @staticmethod
    def from_tensors(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
    ) -> OutputLayer:
        """Build the layer, after checking the tensors against hidden states [..., D].

        Args:
            hidden: [..., D] Hidden states.
            weight: [V, D] Weight.
            bias: [V] Bias, if there is one.
            softcap: Soft cap of the logits, if there is one.

        Returns:
            The layer.

        Raises:
            ValueError: Shapes, types or devices do not match.
        """
        for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            if tensor is not None:
                check_floats(name, tensor)
        if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"weight: got shape {tuple(weight.shape)}, expected (V, {hidden.shape[-1:].numel()}), "
                f"since hidden has shape {tuple(hidden.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected ({len(weight)},)")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.device != hidden.device:
                raise ValueError(f"{name}: got device {tensor.device}, expected {hidden.device}, as hidden has")
        factor_dtype = torch.promote_types(hidden.dtype, weight.dtype)
        dtype = torch.float64 if factor_dtype == torch.float64 else torch.float32
        if softcap is not None:
            softcap = check_positive("softcap", softcap, dtype)
        accumulates = hidden.is_cuda and torch.version.cuda is not None
        return OutputLayer(weight, bias, softcap, dtype, factor_dtype if accumulates else dtype)

    def product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
        """Write left @ right to `out`, or add it to `out`. Products are accumulated in the dtype of `out`.

        Args:
            left: [n, m] The left factor.
            right: [m, k] The right factor.
            out: [n, k] The result.
            add: Whether to add to `out`.

        Returns:
            `out`.
        """
        if left.dtype == out.dtype:
            return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
        if add:
            return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        return torch.mm(left, right, out_dtype=out.dtype, out=out)

    def tiles(
        self, hidden: torch.Tensor, shape: tuple[int, int] | None = None
    ) -> Iterator[tuple[slice, int, torch.Tensor]]:
        """Iterate over tiles of the logits.

        The outer loop is over the vocabulary, the inner loop over tokens. The memory of a tile is reused for the next.

        Args:
            hidden: [N, D] Hidden states.
            shape: Tokens and entries of the vocabulary in a tile; `None`: by the device.

        Yields:
            The tokens, the start in the vocabulary, and the logits.
        """
        height, width = shape or (_TILE_CUDA if hidden.is_cuda else _TILE_CPU)
        size = min(height, len(hidden)) * min(width, len(self.weight))
        memory = torch.empty(size, dtype=self.dtype, device=hidden.device)
        for start in range(0, len(self.weight), width):
            weight = self.weight[start : start + width].to(self.factor_dtype)
            for first in range(0, len(hidden), height):
                block = hidden[first : first + height].to(self.factor_dtype)
                tile = memory[: len(block) * len(weight)].view(len(block), len(weight))
                self.product(block, weight.T, tile)
                if self.bias is not None:
                    tile += self.bias[start : start + width]
                if self.cap is not None:
                    tile.div_(self.cap).tanh_().mul_(self.cap)
                yield slice(first, first + len(block)), start, tile

    def gradients(
        self, hidden: torch.Tensor, targets: Targets, state: BackwardState, needed: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Compute the gradients by hidden states, weight and bias; `None` for those that are not `needed`.

        Args:
            hidden: [N, D] Hidden states.
            targets: Labels and scales of the tokens.
            state: What the forward pass saved, and the incoming gradients.
            needed: Which of the three gradients are computed.

        Returns:
            The gradients; `None` for those that are not needed.
        """
        options: dict[str, Any] = {"device": hidden.device, "dtype": self.dtype}
        by_hidden = torch.zeros(hidden.shape, **options) if needed[0] else None
        by_weight = torch.empty_like(self.weight) if needed[1] else None
        by_bias = torch.zeros(len(self.weight), **options) if needed[2] else None
        height, width = _TILE_CPU
        if hidden.is_cuda:
            # All tokens in one tile if they fit: then each part of the weight's gradient is a single product.
            width = min(max(_BACKWARD_TILE_ENTRIES // max(len(hidden), 1) // 256 * 256, 1024), 8192)
            height = max(_BACKWARD_TILE_ENTRIES // width, 1)
        memory = summed = torch.empty(0, **options)
        if self.factor_dtype != self.dtype:
            size = min(height, len(hidden)) * min(width, len(self.weight))
            memory = torch.empty(size, device=hidden.device, dtype=self.factor_dtype)
        if by_weight is not None and len(hidden) == 0:
            by_weight.zero_()
        if by_weight is not None and (hidden.is_cuda or state.no_grad.any()):
            # 0 * NaN is NaN, so hidden states without a gradient become 0. On CUDA, a copy is faster than a check.
            hidden = hidden.masked_fill(state.no_grad[:, None], 0)
        for rows, start, tile in self.tiles(hidden, (height, width)):
            end = start + tile.shape[1]
            by_logits = tile if self.factor_dtype == self.dtype else memory[: tile.numel()].view(tile.shape)
            logits_gradient(tile[None], by_logits[None], targets.take(rows), start, state.take(rows), self.cap)
            if by_hidden is not None:
                self.product(by_logits, self.weight[start:end].to(self.factor_dtype), by_hidden[rows], add=True)
            if by_bias is not None:
                by_bias[start:end] += by_logits.sum(0, dtype=self.dtype)
            if by_weight is not None:
                hidden_rows = hidden[rows].to(self.factor_dtype)
                if len(hidden_rows) == len(hidden) and by_weight.dtype == self.factor_dtype:
                    torch.mm(by_logits.T, hidden_rows, out=by_weight[start:end])
                    continue
                if rows.start == 0:
                    summed = torch.empty(end - start, hidden.shape[1], **options)
                self.product(by_logits.T, hidden_rows, summed, add=rows.start > 0)
                if rows.stop == len(hidden):
                    by_weight[start:end] = summed
        return (
            None if by_hidden is None else by_hidden.to(hidden.dtype),
            by_weight,
            None if by_bias is None or self.bias is None else by_bias.to(self.bias.dtype),
        )
