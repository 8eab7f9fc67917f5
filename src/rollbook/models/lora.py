"""LoRA adapters through peft: attached to a model, saved and loaded, and switched off for the reference model.

Invariant: a reference shares the base weights of the actor, which adapters do not change, and a pass of the reference
does not change adapters, gradients or modes of the actor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollbook.models.head import has_adapters, scoring, unwrap

if TYPE_CHECKING:
    from peft import LoraConfig

    from rollbook.batch import Batch
    from rollbook.batch.batch import Device
    from rollbook.models.actor import Actor
    from rollbook.models.logprobs import TokenStats

__all__ = ["Reference", "attach"]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need peft: install the extra 'models' of Rollbook") from error
    return peft


def attach(model: nn.Module, lora: LoraConfig | Mapping[str, Any]) -> nn.Module:
    """Add fresh adapters to a model, and freeze all other weights.

    Args:
        model: A model of transformers.
        lora: A `peft.LoraConfig`, or its options.

    Returns:
        The model with adapters.

    Raises:
        ValueError: The model has adapters, or the options are invalid.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> model = attach(LlamaForCausalLM(config), {"r": 2, "target_modules": ["q_proj"]})
    >>> model.print_trainable_parameters()
    trainable params: 32 || all params: 1,016 || trainable%: 3.1496
    """
    peft = _peft()
    if has_adapters(model):
        raise ValueError("lora: got a model with adapters, expected one without")
    if isinstance(lora, Mapping):
        try:
            lora = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **lora})
        except TypeError as error:
            raise ValueError(f"lora: {error}") from None
    if not isinstance(lora, peft.LoraConfig):
        raise ValueError(f"lora: got {type(lora).__name__}, expected a peft.LoraConfig or a dict of its options")
    adapted: nn.Module = peft.get_peft_model(model, lora)
    return adapted


def load_adapter(base: nn.Module, folder: str) -> nn.Module:
    """Add the adapters of a folder to a base model, as trainable."""
    adapted: nn.Module = _peft().PeftModel.from_pretrained(base, folder, is_trainable=True)
    return adapted


def save_base(
    model: nn.Module, folder: str, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> None:
    """Save the model without its adapters; `state_dict` has its complete weights if they are sharded."""
    inner = unwrap(model)
    weights = {}
    for name, value in (inner.state_dict() if state_dict is None else state_dict).items():
        parts = name.removeprefix("base_model.model.").split(".")
        if not any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
            weights[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = value
    inner.save_pretrained(folder, state_dict=weights, **options)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters within the context; `requires_grad` of all parameters is restored."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():  # type: ignore[operator]
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


class Reference:
    """An actor with its adapters disabled: the initial model, without additional memory.

    It has no gradients and no parameters of its own; `train`, `eval` and `to` do nothing, since mode and device are
    those of the actor.

    Args:
        actor: An actor with adapters.

    Raises:
        ValueError: The actor has no adapters.

    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> reference = Actor(config, lora={"r": 2, "target_modules": ["q_proj"]}).reference()
    >>> from rollbook import Batch, Experience, Experiences
    >>> batch = Batch.from_records(Experiences([Experience(tokens=[1, 5, 6, 7], prompt_length=2)]))
    >>> reference.token_stats(batch).logprobs.requires_grad, list(reference.parameters())
    (False, [])
    """

    training = False

    def __init__(self, actor: Actor) -> None:
        if not has_adapters(actor.model):
            raise ValueError("actor: got one without adapters, expected Actor(..., lora=...)")
        self.actor = actor

    def token_stats(self, batch: Batch, *, entropy: bool = False, temperature: float | None = None) -> TokenStats:
        """Compute log-probs without adapters; see `Actor.token_stats`.

        Args:
            batch: Batch with the fields of a forward pass.
            entropy: Whether to compute entropies.
            temperature: Sampling temperature; `None`: the actor's.

        Returns:
            [B, R] or `Rows`: log-probs and entropies.
        """
        with self._base():
            return self.actor.token_stats(batch, entropy=entropy, temperature=temperature)

    @contextmanager
    def _base(self) -> Iterator[None]:
        with scoring(self.actor), disable_adapters(self.actor.model):
            yield

    @property
    def model(self) -> nn.Module:
        """The model of the actor, with its adapters; calling it is calling the actor."""
        return self.actor.model

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.actor.config

    @property
    def device(self) -> torch.device:
        """Device of the actor."""
        return self.actor.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights of the actor."""
        return self.actor.dtype

    @property
    def pad_token_id(self) -> int:
        """That of the actor."""
        return self.actor.pad_token_id

    @property
    def tokenizer(self) -> Any:
        """That of the actor."""
        return self.actor.tokenizer

    @property
    def packs(self) -> bool:
        """That of the actor."""
        return self.actor.packs

    @property
    def packs_cheaply(self) -> bool:
        """That of the actor."""
        return self.actor.packs_cheaply

    @property
    def head_path(self) -> str:
        """That of the actor."""
        return self.actor.head_path

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return no parameters: there are none to train or to count twice."""
        return iter(())

    def reference(self) -> Reference:
        """Return itself."""
        return self

    def eval(self) -> Reference:
        """Do nothing: there is never dropout."""
        return self

    def train(self, mode: bool = True) -> Reference:
        """Do nothing: it is not trained.

        Args:
            mode: Ignored.

        Returns:
            The reference.
        """
        return self

    def to(self, *_: Device | torch.dtype, **__: Device | torch.dtype | bool | None) -> Reference:
        """Do nothing: it is on the device of the actor. See `torch.nn.Module.to`."""
        return self
