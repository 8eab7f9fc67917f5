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

from rollbook.models.head import scoring, unwrapped

if TYPE_CHECKING:
    from peft import LoraConfig

    from rollbook.batch import Batch
    from rollbook.models.actor import Actor
    from rollbook.models.logprobs import TokenStats


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'rollbook[models]'") from error
    return peft


def attach(model: nn.Module, lora: LoraConfig | Mapping[str, Any]) -> nn.Module:
    """The model with fresh adapters: `lora` is a `peft.LoraConfig` or a mapping of its options. All else is frozen."""
    peft = _peft()
    if has_adapters(model):
        raise ValueError("lora: got a model that has adapters already, expected one without")
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
    """The base with the adapters of a folder, to be trained on."""
    adapted: nn.Module = _peft().PeftModel.from_pretrained(base, folder, is_trainable=True)
    return adapted


def save_base(model: nn.Module, folder: str, **options: Any) -> None:
    """Write the model without its adapters, as if it had never had any."""
    inner = unwrapped(model)
    weights = {}
    for name, value in inner.state_dict().items():
        parts = name.split(".")
        if not any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
            weights[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = value
    inner.save_pretrained(folder, state_dict=weights, **options)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped this model."""
    return getattr(model, "peft_config", None) is not None and hasattr(model, "disable_adapter")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base alone, as long as it lasts. What needs a gradient does so after it as before."""
    needs = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():  # type: ignore[operator]
            yield
    finally:
        for parameter, needed in needs:
            parameter.requires_grad_(needed)


class Reference:
    """An actor with its adapters off: the model that training began with, at no cost of memory.

    It is called as the actor is, and gives no gradients. It has no parameters of its own; `train`, `eval` and `to` do
    nothing, since what it is, and where it lies, is the actor's affair.

    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> reference = Actor(config, lora={"r": 2, "target_modules": ["q_proj"]}).reference()
    >>> reference(torch.tensor([[1, 5, 6, 7]]), num_actions=2).requires_grad, list(reference.parameters())
    (False, [])
    """

    training = False

    def __init__(self, actor: Actor) -> None:
        if not has_adapters(actor.model):
            raise ValueError("actor: got one without adapters, expected one made with lora=...")
        self.actor = actor

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As `Actor.forward`."""
        with self._base():
            return self.actor(*args, **options)

    def token_stats(self, batch: Batch, **options: Any) -> TokenStats:
        """As `Actor.token_stats`."""
        with self._base():
            return self.actor.token_stats(batch, **options)

    @contextmanager
    def _base(self) -> Iterator[None]:
        with scoring(self.actor), adapters_off(self.actor.model):
            yield

    @property
    def model(self) -> nn.Module:
        """The actor's model, adapters and all; to call it as it is would be to call the actor."""
        return self.actor.model

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.actor.config

    @property
    def device(self) -> torch.device:
        """Where the actor's weights lie."""
        return self.actor.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the actor's weights."""
        return self.actor.dtype

    @property
    def pad_token_id(self) -> int:
        """As the actor's."""
        return self.actor.pad_token_id

    @property
    def tokenizer(self) -> Any:
        """As the actor's."""
        return self.actor.tokenizer

    @property
    def packs(self) -> bool:
        """As the actor's."""
        return self.actor.packs

    @property
    def packs_cheaply(self) -> bool:
        """As the actor's."""
        return self.actor.packs_cheaply

    @property
    def head_path(self) -> str:
        """As the actor's."""
        return self.actor.head_path

    def parameters(self) -> Iterator[nn.Parameter]:
        """None: there is nothing here to train or to count twice."""
        return iter(())

    def reference(self) -> Reference:
        """Itself."""
        return self

    def eval(self) -> Reference:
        """Nothing to do: there is never dropout in it."""
        return self

    def train(self, mode: bool = True) -> Reference:
        """Nothing to do: it is not trained."""
        return self

    def to(self, *_: Any, **__: Any) -> Reference:
        """Nothing to do: it lies where the actor lies."""
        return self
