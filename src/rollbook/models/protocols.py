"""Protocols of models that the trainer uses: `Policy` and `ValueModel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch

if TYPE_CHECKING:
    from rollbook.batch.batch import Batch, Tokens
    from rollbook.models.logprobs import TokenStats


@runtime_checkable
class Policy(Protocol):
    """A model that gives log-probs of response tokens: `rollbook.models.Actor`, or a user's own."""

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""

    @property
    def pad_token_id(self) -> int:
        """What tokens are padded with."""

    @property
    def packs_cheaply(self) -> bool:
        """Whether packed batches cost no more than each record alone."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or `None`."""

    def token_stats(self, batch: Batch, *, entropy: bool = False) -> TokenStats:
        """Log-probs, and entropies if asked for, of every response slot of a batch, with gradients."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation."""

    def reference(self) -> Policy:
        """The model that divergence is measured from, with weights that stay as they are now."""


@runtime_checkable
class ValueModel(Protocol):
    """A model that gives the value of the state before every response token: `rollbook.models.Critic`."""

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""

    @property
    def packs_cheaply(self) -> bool:
        """Whether packed batches cost no more than each record alone."""

    def token_values(self, batch: Batch) -> Tokens:
        """The value of every response slot of a batch, with gradients."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation."""


__all__ = ["Policy", "ValueModel"]
