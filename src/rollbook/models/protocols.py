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
    """A model that computes log-probs of response tokens: `rollbook.models.Actor`, or a user-defined one.

    Attributes:
        device: Device of the weights.
        dtype: Type of the weights.
        pad_token_id: Token id of the padding.
        packs_cheaply: Whether packed batches cost no more than their records alone.
        tokenizer: The tokenizer, or `None`.

    >>> from rollbook.models import Actor
    >>> issubclass(Actor, torch.nn.Module), isinstance(torch.nn.Linear(1, 1), Policy)
    (True, False)
    """

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def pad_token_id(self) -> int:
        """Token id of the padding."""

    @property
    def packs_cheaply(self) -> bool:
        """Whether packed batches cost no more than their records alone."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or `None`."""

    def token_stats(self, batch: Batch, *, entropy: bool = False) -> TokenStats:
        """Compute log-probs, and optionally entropies, [B, R] or `Rows`, of every response slot, with gradients."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation."""

    def reference(self) -> Policy:
        """Return the reference policy, with the current weights."""


@runtime_checkable
class ValueModel(Protocol):
    """A model that computes the value of the state before every response token: `rollbook.models.Critic`.

    Attributes:
        device: Device of the weights.
        dtype: Type of the weights.
        packs_cheaply: Whether packed batches cost no more than their records alone.

    >>> isinstance(torch.nn.Linear(1, 1), ValueModel)
    False
    """

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def packs_cheaply(self) -> bool:
        """Whether packed batches cost no more than their records alone."""

    def token_values(self, batch: Batch) -> Tokens:
        """Compute the value of every response slot, [B, R] or `Rows`, with gradients."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation."""


__all__ = ["Policy", "ValueModel"]
