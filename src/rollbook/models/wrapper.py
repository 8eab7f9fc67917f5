"""`Wrapper`: what an actor and a critic have in common, as modules around a transformers model.

Invariant: packed samples go through a model only where it keeps them apart, which is found out on the model itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rollbook.core.rows import Rows
from rollbook.models.heads import VARLEN, attention_of, device_of, dtype_of, keeps_apart, packs_cheaply, unwrapped


class Wrapper(nn.Module, ABC):
    """A module around a transformers model, the `_inner` one: `rollbook.models.Actor` and `rollbook.models.Critic`."""

    def __init__(self) -> None:
        super().__init__()
        self._packs: bool | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if attention_of(self._inner) == VARLEN:  # in another process, transformers may not have heard of it
            from rollbook.models.varlen import register

            register()

    @property
    @abstractmethod
    def _inner(self) -> nn.Module:
        """The model that it is around, adapters and all."""

    @property
    def config(self) -> Any:
        """The transformers model's configuration."""
        return unwrapped(self._inner).config

    @property
    def device(self) -> torch.device:
        """Where the model's first weights lie."""
        return device_of(self._inner)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return dtype_of(self._inner)

    @property
    def packs(self) -> bool:
        """Whether the model keeps packed samples apart; found out once, on a few tokens."""
        if self._packs is None:
            self._packs = keeps_apart(self._inner)
        return self._packs

    @property
    def packs_cheaply(self) -> bool:
        """Whether it does, and attention over packed samples costs no more than over each alone."""
        return packs_cheaply(self._inner) and self.packs

    def _check_packs(self) -> None:
        if not self.packs:
            raise ValueError(
                "packed: the model does not keep packed samples apart: what it says of one depends on those before it; "
                "give it a padded batch (batch.pad())"
            )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Trade computing for memory in training; without reentry unless told otherwise, so that frozen parts do not
        cut gradients off."""
        options = {"use_reentrant": False} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        unwrapped(self._inner).gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(options))

    def gradient_checkpointing_disable(self) -> None:
        """Undo it."""
        unwrapped(self._inner).gradient_checkpointing_disable()


def flat(column: Any) -> torch.Tensor:
    """What LightRFT's models give: (B, A) as it is; packed rows as (1, all actions).

    >>> flat(Rows(torch.arange(3), [1, 2])).shape
    torch.Size([1, 3])
    """
    return column.values.unsqueeze(0) if isinstance(column, Rows) else column
