"""What a model thinks of tokens: log-probs, entropies and likeliest alternatives, from logits or from hidden states.

Invariant: no tensor of the logits' size is ever made beside the logits, in neither direction, save for the gradient
that is asked for; every logit is taken as float32 at least, whatever its type, and the result does not depend on how
tokens or vocabulary are cut into pieces, except for rounding.

With m the largest logit of a token, s = sum e^((x - m) / T) and t = sum ((m - x) / T) e^((x - m) / T), the log-prob of
label y is (x_y - m) / T - log s and the entropy log s + t / s: sums of terms that are never negative, so that no digit
is lost to cancellation. Both sums can be put together from parts of the vocabulary. The slopes of both are found again
from x, m and s. On a CUDA device the sums come from Triton kernels (float64 excepted), elsewhere from plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral, Real
from reprlib import repr as shortly
from typing import Any, NamedTuple

import torch

from rollbook.algorithms.kernels import vocabulary
from rollbook.algorithms.kernels import vocabulary as _vocabulary
from rollbook.algorithms.kernels.vocabulary import Best, Left, Sums, Tokens

# Tiles of a product, (tokens, vocabulary): on a CPU, on a CUDA device forwards, and how many entries backwards.
_TILE_CPU = (512, 2048)
_TILE_CUDA = (4096, 16384)
_TILE_BACK = 1 << 25


@dataclass(frozen=True)
class Head:
    """An output layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    cap: float | None
    kind: torch.dtype
    """What logits are: float32 or float64."""
    factors: torch.dtype
    """What is multiplied: 16 bits where the device accumulates such products in float32."""

    @staticmethod
    def of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None) -> Head:
        """Checked against hidden states."""
        for name, part in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            if part is not None:
                vocabulary.check_floats(name, part)
        if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"weight: got shape {tuple(weight.shape)}, expected (V, {hidden.shape[-1:].numel()}), "
                f"since hidden has shape {tuple(hidden.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected ({len(weight)},)")
        for name, part in (("weight", weight), ("bias", bias)):
            if part is not None and part.device != hidden.device:
                raise ValueError(f"{name}: got device {part.device}, expected {hidden.device}, as hidden has")
        factors = torch.promote_types(hidden.dtype, weight.dtype)
        kind = torch.float64 if factors == torch.float64 else torch.float32
        if softcap is not None:
            softcap = vocabulary.positive("softcap", softcap, kind)
        wide = hidden.is_cuda and torch.version.cuda is not None
        return Head(weight, bias, softcap, kind, factors if wide else kind)

    def product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, onto: bool = False) -> torch.Tensor:
        """left @ right into `out`, or added to it; accumulated in `out`'s type."""
        if left.dtype == out.dtype:
            return torch.addmm(out, left, right, out=out) if onto else torch.mm(left, right, out=out)
        if onto:
            return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        return torch.mm(left, right, out_dtype=out.dtype, out=out)

    def tiles(
        self, hidden: torch.Tensor, shape: tuple[int, int] | None = None
    ) -> Iterator[tuple[slice, int, torch.Tensor]]:
        """Logits tile by tile, all tokens of one part of the vocabulary before the next: tokens, its start, the logits.

        A tile's memory is used again for the next.
        """
        tall, wide = shape or (_TILE_CUDA if hidden.is_cuda else _TILE_CPU)
        memory = torch.empty(
            min(tall, len(hidden)) * min(wide, len(self.weight)), dtype=self.kind, device=hidden.device
        )
        for start in range(0, len(self.weight), wide):
            weight = self.weight[start : start + wide].to(self.factors)
            for first in range(0, len(hidden), tall):
                part = hidden[first : first + tall].to(self.factors)
                tile = memory[: len(part) * len(weight)].view(len(part), len(weight))
                self.product(part, weight.T, tile)
                if self.bias is not None:
                    tile += self.bias[start : start + wide]
                if self.cap is not None:
                    tile.div_(self.cap).tanh_().mul_(self.cap)
                yield slice(first, first + len(part)), start, tile


def product_sums(hidden: torch.Tensor, head: Head, tokens: Tokens, entropy: bool) -> Sums:
    """`_vocabulary.sums` of the logits that the output layer gives."""
    kernels = vocabulary.kernels_for(hidden)
    if kernels is not None and kernels.takes(hidden, head.weight):
        return Sums(
            *kernels.product_sums(hidden, head.weight, head.bias, tokens.labels, tokens.scales, head.cap, entropy)
        )
    sums = vocabulary.nothing(len(hidden), torch.empty(0, dtype=head.kind, device=hidden.device))
    for rows, start, tile in head.tiles(hidden):
        vocabulary.add(sums, rows, vocabulary.sums(tile[None], tokens.cut(rows), start, entropy), tokens.scales)
    return sums


def product_slopes(
    hidden: torch.Tensor, head: Head, tokens: Tokens, left: Left, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients by hidden states, weight and bias, those that are needed."""
    made: dict[str, Any] = {"device": hidden.device, "dtype": head.kind}
    by_hidden = torch.zeros(hidden.shape, **made) if needed[0] else None
    by_weight = torch.empty_like(head.weight) if needed[1] else None
    by_bias = torch.zeros(len(head.weight), **made) if needed[2] else None
    tall, wide = _TILE_CPU
    if hidden.is_cuda:
        # All tokens at once if they fit: then each part of the weight's gradient is a single product.
        wide = min(max(_TILE_BACK // max(len(hidden), 1) // 256 * 256, 1024), 8192)
        tall = max(_TILE_BACK // wide, 1)
    memory = summed = torch.empty(0, **made)
    if head.factors != head.kind:
        size = min(tall, len(hidden)) * min(wide, len(head.weight))
        memory = torch.empty(size, device=hidden.device, dtype=head.factors)
    if by_weight is not None and len(hidden) == 0:
        by_weight.zero_()
    silent = left.silent
    if by_weight is not None and (hidden.is_cuda or silent.any()):
        # Slopes of 0 do not keep a NaN out of the weight's gradient. One copy costs less than to wait for the device.
        hidden = hidden.masked_fill(silent[:, None], 0)
    for rows, start, tile in head.tiles(hidden, (tall, wide)):
        end = start + tile.shape[1]
        slopes = tile if head.factors == head.kind else memory[: tile.numel()].view(tile.shape)
        vocabulary.slopes(tile[None], slopes[None], tokens.cut(rows), start, left.cut(rows), head.cap)
        if by_hidden is not None:
            head.product(slopes, head.weight[start:end].to(head.factors), by_hidden[rows], onto=True)
        if by_bias is not None:
            by_bias[start:end] += slopes.sum(0, dtype=head.kind)
        if by_weight is not None:
            part = hidden[rows].to(head.factors)
            if len(part) == len(hidden) and by_weight.dtype == head.factors:
                torch.mm(slopes.T, part, out=by_weight[start:end])
                continue
            if rows.start == 0:
                summed = torch.empty(end - start, hidden.shape[1], **made)
            head.product(slopes.T, part, summed, onto=rows.start > 0)
            if rows.stop == len(hidden):
                by_weight[start:end] = summed
    return (
        None if by_hidden is None else by_hidden.to(hidden.dtype),
        by_weight,
        None if by_bias is None or head.bias is None else by_bias.to(head.bias.dtype),
    )


_IGNORE = -100


class TokenStats(NamedTuple):
    """Of each token, in the shape of the labels.

    >>> TokenStats(torch.zeros(2), None).entropy is None
    True
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    """`None` unless it was asked for."""


class TopK(NamedTuple):
    """The likeliest tokens at each place, (..., k), likeliest first.

    >>> TopK(torch.tensor([3]), torch.tensor([0.0])).ids.tolist()
    [3]
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


# --- public functions -----------------------------------------------------------------------------------------------


def from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    entropy: bool = False,
    ignore_index: int = _IGNORE,
) -> TokenStats:
    """Log-probs of `labels` (...) under softmax(logits (..., V) / temperature), and the entropies of it if asked.

    Results are float32 (float64 for float64 logits); 16-bit logits lose nothing on the way. Both can be differentiated
    by the logits, once; the gradient has the logits' type. A logit of -inf is a token that cannot be: it adds nothing,
    and its gradient is 0. Where all are -inf, or one is NaN or inf, there is no distribution, and both results and the
    gradient are NaN. An ignored label has log-prob 0 and no gradient from it; its entropy is there as any other. Where
    no gradient comes to a token (an ignored one, or one that the loss leaves out), its logits have a gradient of 0,
    even if they are NaN.

    `temperature` is a number, or a tensor that broadcasts to the labels' shape; it has no gradient. Logits may be a
    slice of a larger tensor (`logits[:, :-1]`): nothing is copied, unless four dimensions are cut in several of them.

    On a CUDA device labels and a tensor of temperatures are not checked, since that would wait for the device: a label
    outside the vocabulary gives log-prob NaN, and so does a temperature that is not positive.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    >>> found = from_logits(logits, torch.tensor([2, 3]), entropy=True)
    >>> found.logprobs
    tensor([-1.3863, -0.4402])
    >>> found.entropy
    tensor([1.3863, 0.9475])
    """
    tokens = _tokens("logits", logits, labels, _vocabulary_of(logits), temperature, ignore_index)
    logprobs, entropies = _apply(_FromLogits, _vocabulary.pieces_of(logits), tokens, entropy)
    return TokenStats(logprobs.view(labels.shape), entropies.view(labels.shape) if entropy else None)


def entropy_from_logits(logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Entropies (...) of softmax(logits (..., V) / temperature), in nats; as `from_logits` in every other respect.

    >>> entropy_from_logits(torch.tensor([[0.0, 0.0], [0.0, -float("inf")]]))
    tensor([0.6931, 0.0000])
    """
    vocabulary = _vocabulary_of(logits)
    tokens = _tokens("logits", logits, _unlabelled(logits), vocabulary, temperature, _IGNORE)
    entropies: torch.Tensor = _apply(_FromLogits, _vocabulary.pieces_of(logits), tokens, True)[1]
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
    """As `from_logits` of `hidden @ weight.T + bias`, without the logits ever lying in memory.

    `hidden` is (..., D), `weight` (V, D) as an output layer holds it, `bias` (V,), `labels` (...). With a `softcap` c
    the logits are c tanh(x / c). Hidden states, weight and bias can be differentiated by; the products are computed
    again for it. They are accumulated and kept in float32 (float64 for float64), and so are the gradients until each
    is whole: its last rounding is the only one to its type. (On a CUDA device the slopes of 16-bit logits are rounded
    to 16 bits before they are multiplied; float32 products obey torch's setting for TF32.) Hidden states of tokens to
    which no gradient comes, as those of ignored labels, may be NaN: their gradient is 0, they add nothing to others.

    Beside results and gradients it needs some tens of MB on a CPU and under 512 MiB on a CUDA device; backwards also
    4 N D bytes, in which the gradient of N hidden states is summed, and for the weight's a copy of the hidden states.

    >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> from_hidden(hidden, weight, torch.tensor([2])).logprobs
    tensor([-0.4076])
    >>> from_logits(hidden @ weight.T, torch.tensor([2])).logprobs
    tensor([-0.4076])
    """
    head = Head.of(hidden, weight, bias, softcap)
    tokens = _tokens("hidden", hidden, labels, len(weight), temperature, ignore_index)
    flat = hidden.reshape(labels.numel(), weight.shape[1])
    logprobs, entropies = _apply(_FromHidden, flat, weight, bias, head, tokens, entropy)
    return TokenStats(logprobs.view(labels.shape), entropies.view(labels.shape) if entropy else None)


def top_k(logits: torch.Tensor, k: int, *, temperature: float | torch.Tensor = 1.0) -> TopK:
    """The `k` likeliest tokens at each place of logits (..., V), with log-probs over the whole vocabulary.

    Of equally likely ones the lower id comes first. Nothing is differentiated.

    >>> top_k(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3)
    TopK(ids=tensor([1, 2, 3]), logprobs=tensor([-0.9176, -0.9176, -1.9176]))
    """
    vocabulary = _vocabulary_of(logits)
    tokens = _tokens("logits", logits, _unlabelled(logits), vocabulary, temperature, _IGNORE)
    k = _checked(k, vocabulary)
    with torch.no_grad():
        whole = _vocabulary.pieces_of(logits)
        sums = _vocabulary.sums(whole, tokens, 0, False)
        best = Best(tokens.count, k, vocabulary, whole)
        for rows, piece in _vocabulary.pieces(whole):
            best.take(rows, piece, 0)
    return TopK(*best.give(sums, tokens, logits.shape[:-1]))


def top_k_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> TopK:
    """As `top_k` of `hidden @ weight.T + bias`, (..., D) and (V, D), without the logits ever lying in memory.

    >>> hidden, weight = torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> top_k_from_hidden(hidden, weight, 2)
    TopK(ids=tensor([2, 1]), logprobs=tensor([-0.4076, -1.4076]))
    """
    head = Head.of(hidden, weight, bias, softcap)
    tokens = _tokens("hidden", hidden, _unlabelled(hidden), len(weight), temperature, _IGNORE)
    k = _checked(k, len(weight))
    with torch.no_grad():
        flat = hidden.reshape(tokens.count, weight.shape[1])
        best: Best | None = None
        sums: Sums | None = None
        for rows, start, tile in head.tiles(flat):
            best = best or Best(tokens.count, k, len(weight), tile)
            sums = sums or _vocabulary.nothing(tokens.count, tile)
            _vocabulary.add(sums, rows, _vocabulary.sums(tile[None], tokens.cut(rows), start, False), tokens.scales)
            for part, piece in _vocabulary.pieces(tile[None]):
                best.take(slice(rows.start + part.start, rows.start + part.stop), piece, start)
        if best is None or sums is None:  # there are no tokens
            empty = torch.empty(0, 1, dtype=head.kind, device=hidden.device)
            best, sums = Best(0, k, len(weight), empty), _vocabulary.nothing(0, empty)
    return TopK(*best.give(sums, tokens, hidden.shape[:-1]))


# --- arguments ------------------------------------------------------------------------------------------------------


def _tokens(
    name: str,
    given: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: int,
    temperature: float | torch.Tensor,
    ignore_index: int,
) -> Tokens:
    """The arguments that all functions share, checked against logits or hidden states."""
    if given.dim() == 0 or vocabulary == 0:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected at least one entry in the last dimension")
    _vocabulary.check_tensor("labels", labels)
    if labels.shape != given.shape[:-1]:
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {tuple(given.shape[:-1])}, as {name} has")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise ValueError(f"labels: got {labels.dtype}, expected integers")
    if labels.device != given.device:
        raise ValueError(f"labels: got device {labels.device}, expected {given.device}, as {name} has")
    flat = labels.reshape(-1).long()
    ignored = flat == _integer("ignore_index", ignore_index)
    wrong: torch.Tensor | None = ~ignored & ((flat < 0) | (flat >= vocabulary))
    if wrong is not None and not wrong.is_cuda:
        if wrong.any():
            raise ValueError(
                f"labels: got {int(flat[wrong][0])}, expected 0 to {vocabulary - 1}, or {ignore_index} to be ignored"
            )
        wrong = None
    return Tokens(len(flat), flat.masked_fill(ignored, -1), ignored, wrong, _scales(temperature, labels.shape, given))


def _scales(temperature: float | torch.Tensor, shape: torch.Size, given: torch.Tensor) -> torch.Tensor | None:
    """1 / temperature of each token."""
    kind = _vocabulary.kind_of(given)
    if not isinstance(temperature, torch.Tensor):
        if not isinstance(temperature, Real):
            raise ValueError(f"temperature: got {shortly(temperature)}, expected a number or a tensor")
        number = _vocabulary.positive("temperature", temperature, kind)
        if number == 1:
            return None
        return torch.full((shape.numel(),), 1 / number, dtype=kind, device=given.device)
    if temperature.dtype.is_complex or temperature.dtype == torch.bool:
        raise ValueError(f"temperature: got {temperature.dtype}, expected positive numbers")
    if temperature.requires_grad:
        raise ValueError("temperature: got a tensor that requires a gradient, expected a constant")
    try:
        each = temperature.to(device=given.device, dtype=kind).expand(shape).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, expected one that broadcasts to {tuple(shape)}"
        ) from None
    inverse = each.reciprocal()
    fine = (each > 0) & each.isfinite() & inverse.isfinite()
    if not each.is_cuda and not fine.all():
        raise ValueError(
            f"temperature: got {each[~fine][0].item():g}, expected positive numbers that "
            f"{str(kind).removeprefix('torch.')} holds, and their inverses too"
        )
    return inverse.masked_fill_(~fine, torch.nan)


def _unlabelled(given: torch.Tensor) -> torch.Tensor:
    return torch.full(given.shape[:-1], _IGNORE, device=given.device)


def _vocabulary_of(logits: torch.Tensor) -> int:
    """How many tokens there are, once it is known that these are logits."""
    _vocabulary.check_floats("logits", logits)
    return logits.shape[-1:].numel()


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}: got {value!r}, expected an integer")
    return int(value)


def _checked(k: Any, vocabulary: int) -> int:
    found = _integer("k", k)
    if not 1 <= found <= vocabulary:
        raise ValueError(f"k: got {found}, expected 1 to {vocabulary}")
    return found


# --- gradients ------------------------------------------------------------------------------------------------------


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # torch has no type for it


def _check_once() -> None:
    # Torch's own guard lets a second derivative be silently 0 where the loss is linear in these results.
    if torch.is_grad_enabled():
        raise RuntimeError("log-probs and entropies can be differentiated once: there is no gradient with create_graph")


def _as_given(device: torch.device) -> AbstractContextManager[None]:
    """No product here is to be cast by an autocast outside."""
    return torch.autocast(device.type, enabled=False)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: Tokens, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.tokens = tokens
        sums = _vocabulary.sums(logits, tokens, 0, entropy)
        logprobs, entropies, log_mass = tokens.finish(sums)
        ctx.save_for_backward(logits, sums.top, log_mass, entropies.clone())
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        _check_once()
        logits, *saved = ctx.saved_tensors
        if all(one is None for one in grads):
            return None, None, None
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        left = Left.of(tuple(saved), ctx.tokens.ignored, (grads[0], grads[1]))
        _vocabulary.slopes(logits, out, ctx.tokens, 0, left)
        return out, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        tokens: Tokens,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.tokens, ctx.cap, ctx.kind, ctx.factors = tokens, head.cap, head.kind, head.factors
        with _as_given(hidden.device):
            sums = product_sums(hidden, head, tokens, entropy)
            logprobs, entropies, log_mass = tokens.finish(sums)
        ctx.save_for_backward(hidden, weight, bias, sums.top, log_mass, entropies.clone())
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_once()
        hidden, weight, bias, *saved = ctx.saved_tensors
        if all(one is None for one in grads):
            return (None,) * 6
        head = Head(weight, bias, ctx.cap, ctx.kind, ctx.factors)
        left = Left.of(tuple(saved), ctx.tokens.ignored, (grads[0], grads[1]))
        with _as_given(hidden.device):
            return *product_slopes(hidden, head, ctx.tokens, left, ctx.needs_input_grad), None, None, None
