"""Optimizers: one model's parameters, how fast they move and when, and what happens when a gradient is no number.

Invariant: an update happens whole or not at all: a gradient that is not finite changes no weight, no moment and no
count. The learning rate is a function of the step alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollbook.core.checks import check_choice, check_float, check_int

PRECISIONS = ("float32", "bfloat16", "autocast")
SCHEDULES = ("constant", "linear", "cosine")
NAMES = ("adamw", "sgd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of an optimizer and of its learning rate schedule.

    The learning rate increases linearly over the first `warmup_steps` steps. Then it stays at `lr` (`constant`), or
    decreases to `min_lr_ratio * lr` at step `steps`, linearly or along a cosine.

    >>> how = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.1, steps=12)
    >>> [round(how.rate(step), 2) for step in (1, 2, 3, 7, 12, 20)]
    [0.5, 1.0, 0.91, 0.55, 0.1, 0.1]
    """

    name: str = "adamw"
    """Which optimizer: `adamw` or `sgd`."""
    lr: float = 1e-6
    """The learning rate at its highest."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of its two moments; of `sgd` the first is the momentum."""
    eps: float = 1e-8
    """What AdamW adds to the denominator."""
    weight_decay: float = 0.0
    """The decay of weights, of matrices alone."""
    max_grad_norm: float = 1.0
    """The longest gradient; 0: any."""
    warmup_steps: int = 0
    """Steps over which the rate rises."""
    schedule: str = "constant"
    """What the rate does after that: `constant`, `linear` or `cosine`."""
    min_lr_ratio: float = 0.0
    """The share of the rate that is left at the end."""
    steps: int | None = None
    """The step at which the rate has fallen to its floor; none: the run's last."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_choice("optimizer.name", self.name, NAMES)
        put(self, "lr", check_float("optimizer.lr", self.lr, 0, 10))
        betas = tuple(self.betas) if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2:
            raise ValueError(f"optimizer.betas: got {self.betas!r}, expected two numbers")
        found = (check_float("optimizer.betas[0]", betas[0], 0, 1), check_float("optimizer.betas[1]", betas[1], 0, 1))
        put(self, "betas", found)
        put(self, "eps", check_float("optimizer.eps", self.eps, 1e-30, 1, "a positive number"))
        put(self, "weight_decay", check_float("optimizer.weight_decay", self.weight_decay, 0, 1e3))
        put(self, "max_grad_norm", check_float("optimizer.max_grad_norm", self.max_grad_norm, 0))
        put(self, "warmup_steps", check_int("optimizer.warmup_steps", self.warmup_steps))
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        put(self, "min_lr_ratio", check_float("optimizer.min_lr_ratio", self.min_lr_ratio, 0, 1))
        if self.steps is not None:
            put(self, "steps", check_int("optimizer.steps", self.steps, 1))

    def rate(self, step: int) -> float:
        """The learning rate of a step; the first one is 1."""
        if self.warmup_steps and step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.lr
        gone = min(max(step - self.warmup_steps, 0) / max(self.steps - self.warmup_steps, 1), 1.0)
        share = 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


class Optimizer:
    """The parameters of one model that learn, and what moves them.

    With `masters` the weights are of a short type (bfloat16) and float32 copies of them are what moves; the weights are
    those, rounded. The next bfloat16 number is 0.4 % away: small steps would all be lost otherwise.

    >>> layer = nn.Linear(2, 1)
    >>> mover = Optimizer(layer, OptimizerConfig(name="sgd", betas=(0.0, 0.0), lr=0.1, max_grad_norm=0.0))
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> round(mover.update(step=1), 4), torch.allclose(layer.weight, before - 0.1)
    (1.7321, True)
    >>> layer.weight.grad is None
    True
    """

    def __init__(self, model: nn.Module, how: OptimizerConfig, *, masters: bool = False) -> None:
        self.how = how
        self.names = [name for name, one in model.named_parameters() if one.requires_grad]
        self.weights = [one for one in model.parameters() if one.requires_grad]
        if not self.weights:
            raise ValueError(f"model: got a {type(model).__name__} without a weight to train, expected some")
        self.masters = masters
        self.moved = [one.detach().float().clone() for one in self.weights] if masters else self.weights
        matrices = [new for old, new in zip(self.weights, self.moved, strict=True) if old.dim() > 1]
        vectors = [new for old, new in zip(self.weights, self.moved, strict=True) if old.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": how.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.inner: torch.optim.Optimizer
        if how.name == "adamw":
            fused = all(one.is_cuda for one in self.moved)
            self.inner = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps, fused=fused)
        else:
            self.inner = torch.optim.SGD(groups, lr=how.lr, momentum=how.betas[0])

    @property
    def length(self) -> float:
        """How long the gradient is."""
        grads = [one.grad for one in self.weights if one.grad is not None]
        if not grads:
            return 0.0
        return float(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]))
        )

    @property
    def finite(self) -> bool:
        """Whether every entry of the gradient is a number."""
        return math.isfinite(self.length)

    def update(self, step: int) -> float:
        """Move the weights by their gradients, which must be finite, and forget those; the gradient's length before it
        was clipped."""
        length = self.length
        if not math.isfinite(length):
            raise ValueError(f"gradient: got a length of {length}, expected a finite one; nothing was changed")
        self._hand_over()
        if self.how.max_grad_norm and length > self.how.max_grad_norm:
            share = self.how.max_grad_norm / (length + 1e-6)
            torch._foreach_mul_([one.grad for one in self.moved if one.grad is not None], share)
        for group in self.inner.param_groups:
            group["lr"] = self.how.rate(step)
        self.inner.step()
        if self.masters:
            with torch.no_grad():
                for weight, master in zip(self.weights, self.moved, strict=True):
                    weight.copy_(master)
        self.forget()
        return length

    def _hand_over(self) -> None:
        """Gradients to the float32 copies, one after the other: two whole sets of them are never there."""
        if not self.masters:
            return
        for weight, master in zip(self.weights, self.moved, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    def forget(self) -> None:
        """Drop all gradients."""
        for one in (*self.weights, *self.moved):
            one.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, counts and float32 copies; what `load_state_dict` takes, of plain tensors and numbers."""
        state: dict[str, Any] = {"names": self.names, "inner": self.inner.state_dict()}
        return {**state, "masters": [one.detach() for one in self.moved]} if self.masters else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if list(state["names"]) != self.names:
            odd = next(iter({*state["names"]} ^ {*self.names}), "their order")
            raise ValueError(f"optimizer: got the state of other weights ({odd}), expected that of this model's")
        if ("masters" in state) != self.masters:
            raise ValueError("precision: got the state of an optimizer of another precision, expected the same")
        self.forget()
        self.inner.load_state_dict(dict(state["inner"]))
        if self.masters:
            with torch.no_grad():
                for mine, theirs in zip(self.moved, state["masters"], strict=True):
                    mine.copy_(theirs)
