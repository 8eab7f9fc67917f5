"""Protocols of models that the trainer uses, and `check_model`, which names what a model lacks.

`Policy` and `ValueModel` are trained; a reference or a teacher is a `LogprobModel`. Further attributes of a policy are
read if they exist: `tokenizer` and `processor` (texts), `temperature` (default of sampling), `config`, and `reference`
(returns the initial policy, if the algorithm needs a reference and none is passed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from rollbook.batch.batch import Batch, Tokens
    from rollbook.models.logprobs import TokenStats


@runtime_checkable
class Trainable(Protocol):
    """Weights that are updated, saved and loaded, as those of every `torch.nn.Module`.

    >>> isinstance(torch.nn.Linear(1, 1), Trainable)
    True
    """

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The weights by name; those with `requires_grad` are trained."""

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation.

        Args:
            mode: Whether to train.
        """

    def state_dict(self) -> dict[str, Any]:
        """The tensors that a checkpoint has to hold, by name."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any:
        """Restore tensors that `state_dict` returned.

        Args:
            state: The tensors by name.
        """


class LogprobModel(Protocol):
    """A model that computes log-probs of response tokens."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def packs_cheaply(self) -> bool:
        """Whether packed batches cost no more than their records alone."""

    def token_stats(self, batch: Batch, *, entropy: bool = False) -> TokenStats:
        """Compute log-probs, and optionally entropies, of every response slot, with gradients.

        Args:
            batch: Batch with the fields of a forward pass.
            entropy: Whether to compute entropies.

        Returns:
            [B, R] or `Rows`: log-probs and entropies.
        """


@runtime_checkable
class Policy(LogprobModel, Trainable, Protocol):
    """A model of log-probs that can be trained: `rollbook.models.Actor`, or a user-defined one.

    >>> from rollbook.models import Actor
    >>> issubclass(Actor, torch.nn.Module), isinstance(torch.nn.Linear(1, 1), Policy)
    (True, False)
    """

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def pad_token_id(self) -> int:
        """Token id of the padding."""


@runtime_checkable
class ValueModel(Trainable, Protocol):
    """A model that computes the value of the state before every response token: `rollbook.models.Critic`.

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
        """Compute the value of every response slot, with gradients.

        Args:
            batch: Batch with the fields of a forward pass.

        Returns:
            [B, R] or `Rows`: the values.
        """


def check_model(name: str, model: object, protocol: type) -> None:
    """Raise `ValueError` if a model lacks members of a protocol.

    Args:
        name: The argument, for the message.
        model: The model.
        protocol: `Policy`, `ValueModel` or `LogprobModel`.

    >>> check_model("critic", torch.nn.Linear(1, 1), ValueModel)
    Traceback (most recent call last):
        ...
    ValueError: critic: got Linear, expected a ValueModel such as Critic; it lacks token_values, device, dtype,
    packs_cheaply
    """
    members = {member for part in protocol.__mro__ for member in vars(part) if not member.startswith("_")}
    # Properties are looked up in the class: computing them may run the model.
    missing = {member for member in members if not hasattr(type(model), member) and not hasattr(model, member)}
    if missing:
        lacking = sorted(missing, key=lambda member: (isinstance(getattr(protocol, member), property), member))
        example = "Critic" if protocol is ValueModel else "Actor"
        raise ValueError(
            f"{name}: got {type(model).__name__}, expected a {protocol.__name__} such as {example}; it lacks "
            f"{', '.join(lacking)}"
        )


__all__ = ["LogprobModel", "Policy", "Trainable", "ValueModel", "check_model"]
