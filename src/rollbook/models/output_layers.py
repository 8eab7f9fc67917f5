"""Output layers, whose logits are only ever seen in tiles: sums over them, and the gradients by all that makes them.

Invariant: at no time is there more of the logits than one tile, and one of their slopes. Products are accumulated in
float32 (float64 for float64), whatever the type of their factors; every gradient is rounded to its own type once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.algorithms.kernels import vocabulary
from rollbook.algorithms.kernels.vocabulary import Left, Sums, Tokens

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
