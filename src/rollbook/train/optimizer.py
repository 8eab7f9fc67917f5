"""`OptimizerConfig` and `Optimizer`: AdamW or SGD, with a learning rate schedule and gradient clipping.

Invariant: an update happens completely or not at all: a gradient that is not finite changes no weight and no optimizer
state. The learning rate is a function of the step alone, so that a resumed run continues with the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollbook.core.checks import check_choice, check_float, check_int, suggest
from rollbook.models.protocols import Trainable

__all__ = ["Optimizer", "OptimizerConfig"]

PRECISIONS = ("float32", "bfloat16", "autocast")
SCHEDULES = ("constant", "linear", "cosine")
NAMES = ("adamw", "sgd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of an optimizer and of its learning rate schedule.

    The learning rate increases linearly over the first `warmup_steps` steps. Then it stays at `lr` (`constant`), or
    decreases to `min_lr_ratio * lr` at step `steps`, linearly or along a cosine.

    Attributes:
        The fields, each described below its declaration and, as keys of `optimizer`, on the reference page.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.1, steps=12)
    >>> [round(config.rate(step), 2) for step in (1, 2, 3, 7, 12, 20)]
    [0.5, 1.0, 0.91, 0.55, 0.1, 0.1]
    """

    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer: `adamw` or `sgd`."""
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments; for `sgd` the first is the momentum."""
    eps: float = 1e-8
    """Term added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Weight decay, applied to matrices only."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are clipped; 0 disables clipping."""
    warmup_steps: int = 0
    """Number of steps over which the learning rate increases to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: `constant`, `linear` or `cosine`."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of `lr`."""
    steps: int | None = None
    """Step at which the schedule ends; null: the last step of the run."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_choice("optimizer.name", self.name, NAMES)
        put(self, "lr", check_float("optimizer.lr", self.lr, 0, 10))
        betas = tuple(self.betas) if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2:
            raise ValueError(f"optimizer.betas: got {self.betas!r}, expected two numbers")
        first = check_float("optimizer.betas[0]", betas[0], 0, 1)
        put(self, "betas", (first, check_float("optimizer.betas[1]", betas[1], 0, 1)))
        put(self, "eps", check_float("optimizer.eps", self.eps, 1e-30, 1, "a positive number"))
        put(self, "weight_decay", check_float("optimizer.weight_decay", self.weight_decay, 0, 1e3))
        put(self, "max_grad_norm", check_float("optimizer.max_grad_norm", self.max_grad_norm, 0))
        put(self, "warmup_steps", check_int("optimizer.warmup_steps", self.warmup_steps))
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        put(self, "min_lr_ratio", check_float("optimizer.min_lr_ratio", self.min_lr_ratio, 0, 1))
        if self.steps is not None:
            put(self, "steps", check_int("optimizer.steps", self.steps, 1))

    @classmethod
    def of(cls, source: OptimizerConfig | Mapping[str, Any] | None) -> OptimizerConfig:
        """Convert to settings of an optimizer.

        Args:
            source: An `OptimizerConfig`, a mapping of its fields, or `None` for the defaults.

        Returns:
            The settings.

        Raises:
            ValueError: A field is unknown or has an invalid value.

        >>> OptimizerConfig.of({"lr": 1e-5}).lr
        1e-05
        >>> OptimizerConfig.of({"learning_rate": 1e-5})
        Traceback (most recent call last):
            ...
        ValueError: optimizer: unknown option 'learning_rate'; did you mean 'lr'? (name, lr, betas, eps, weight_decay,
        max_grad_norm, warmup_steps, schedule, min_lr_ratio, steps)
        """
        if isinstance(source, OptimizerConfig):
            return source
        if source is not None and not isinstance(source, Mapping):
            raise ValueError(f"optimizer: got {type(source).__name__}, expected OptimizerConfig or a mapping")
        options = dict(source or {})
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"optimizer: unknown option {name!r}{suggest(name, cls.__dataclass_fields__)}")
        return cls(**options)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 1.

        Args:
            step: Number of the step.

        Returns:
            The learning rate.
        """
        if self.warmup_steps and step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.lr
        progress = min(max(step - self.warmup_steps, 0) / max(self.steps - self.warmup_steps, 1), 1.0)
        share = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


class Optimizer:
    """The trainable weights of one model and their optimizer.

    Args:
        model: The model; its weights with `requires_grad` are trained.
        config: Settings of the optimizer.
        masters: For bfloat16 weights: update float32 copies, and round these into the weights. Neighboring bfloat16
            numbers are 0.4 % apart, and smaller updates would be lost otherwise.

    Raises:
        ValueError: The model has no trainable weights.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Optimizer(layer, OptimizerConfig(name="sgd", betas=(0.0, 0.0), lr=0.1, max_grad_norm=0.0))
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> round(optimizer.update(step=1), 4), torch.allclose(layer.weight, before - 0.1)
    (1.7321, True)
    >>> layer.weight.grad is None
    True
    """

    def __init__(self, model: Trainable, config: OptimizerConfig, *, masters: bool = False) -> None:
        self.config = config
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.names, self.weights = list(trained), list(trained.values())
        if not self.weights:
            raise ValueError(f"model: got a {type(model).__name__} without trainable weights")
        self.masters = masters
        self.shards: Any = None
        """The `torch.distributed` group over whose ranks each weight is sharded, if it is."""
        self.moved = [weight.detach().float().clone() for weight in self.weights] if masters else self.weights
        matrices = [new for old, new in zip(self.weights, self.moved, strict=True) if old.dim() > 1]
        vectors = [new for old, new in zip(self.weights, self.moved, strict=True) if old.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.inner: torch.optim.Optimizer
        if config.name == "adamw":
            fused = all(weight.is_cuda for weight in self.moved)
            self.inner = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        else:
            self.inner = torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])

    def grad_norm(self) -> float:
        """Return the L2 norm of the gradient over all weights, before clipping."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        if self.shards is not None:
            gradients = [gradient.to_local() for gradient in gradients]  # type: ignore[attr-defined]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self.shards is None:
            return float(norm)
        square = norm.to(self.weights[0].device) ** 2
        torch.distributed.all_reduce(square, group=self.shards)
        return float(square.sqrt())

    def update(self, step: int, grad_norm: float | None = None) -> float:
        """Clip the gradients, update the weights and clear the gradients.

        Args:
            step: Number of the training step, which sets the learning rate.
            grad_norm: The result of `grad_norm()`, if it was computed already.

        Returns:
            The gradient norm before clipping.

        Raises:
            ValueError: The gradient is not finite. Nothing is changed.
        """
        norm = self.grad_norm() if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            raise ValueError(f"gradient: got a norm of {norm}, expected a finite one; no weight was changed")
        if self.masters:
            # One weight at a time, so that two full sets of gradients never exist.
            for weight, master in zip(self.weights, self.moved, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        max_norm = self.config.max_grad_norm
        if max_norm and norm > max_norm:
            gradients = [weight.grad for weight in self.moved if weight.grad is not None]
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        for group in self.inner.param_groups:
            group["lr"] = self.config.rate(step)
        self.inner.step()
        self.round_masters()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for weight in (*self.weights, *self.moved):
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state, and the float32 copies if there are any, as tensors and numbers."""
        state: dict[str, Any] = {"names": self.names, "inner": self.inner.state_dict()}
        return {**state, "masters": [weight.detach() for weight in self.moved]} if self.masters else state

    def tensors(self, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the weights that are updated and their optimizer state, by `weights/NAME`, `exp_avg/NAME` and so on.

        Args:
            keys: Create the state of these keys where it is missing, to load a checkpoint into it; `None`: as it is.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in zip(self.names, self.moved, strict=True):
            tensors[f"weights/{name}"] = weight.detach()
            tensors |= {f"{key}/{name}": entry for key, entry in self.inner.state[weight].items() if entry is not None}
        if keys is None:
            return tensors
        weights = dict(zip(self.names, self.moved, strict=True))
        for path in set(keys) - tensors.keys():
            key, _, name = path.partition("/")
            if name not in weights:
                raise ValueError(f"optimizer: got the state of other weights ({name}), expected that of this model's")
            weight = weights[name]
            empty = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(weight.detach())
            if key == "step" and self.inner.defaults.get("fused"):
                empty = empty.to(weight.device)
            self.inner.state[weight][key] = tensors[path] = empty
        return {path: tensors[path] for path in keys}

    def round_masters(self) -> None:
        """Round the float32 copies into the weights, after `tensors` were loaded."""
        if self.masters:
            with torch.no_grad():
                for weight, master in zip(self.weights, self.moved, strict=True):
                    weight.copy_(master)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Args:
            state: The state.

        Raises:
            ValueError: The state belongs to other weights or to another precision.
        """
        if list(state["names"]) != self.names:
            difference = next(iter({*state["names"]} ^ {*self.names}), "their order")
            raise ValueError(f"optimizer: got the state of other weights ({difference}), expected that of this model's")
        if ("masters" in state) != self.masters:
            raise ValueError("precision: got the state of an optimizer of another precision, expected the same")
        self.zero_grad()
        self.inner.load_state_dict(dict(state["inner"]))
        if self.masters:
            with torch.no_grad():
                for master, saved in zip(self.moved, state["masters"], strict=True):
                    master.copy_(saved)
