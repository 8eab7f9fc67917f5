"""`Critic`: computes a value for each response token from the backbone's hidden state at the token before.

Invariant: value j belongs to the state before response token j, as log-prob j does. Values are float32, computed by a
float32 head for any dtype of the backbone, and 0 for padding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rollbook.batch.batch import Batch, Tokens
from rollbook.core.checks import check_choice
from rollbook.models.actor import Actor
from rollbook.models.head import (
    Slots,
    Wrapper,
    batch_from_call,
    get_backbone,
    model_inputs,
    run,
    text_config,
    to_lightrft,
    unwrap,
)
from rollbook.models.loading import VALUE_HEAD, load_model
from rollbook.models.lora import has_adapters

if TYPE_CHECKING:
    from rollbook.batch.batch import Device
    from rollbook.models.loading import DType, ModelSource

_HEADS = ("score", "classifier")
"""Attribute names of the head in classifiers of transformers."""


class Critic(Wrapper):
    """A value head over the backbone of a transformers model.

    Args:
        model: A module, a configuration (random weights), a folder (of a critic, a model or a classifier) or a name on
            the hub. A language model provides the backbone, a classifier with one label (such as a reward model) also
            the head.
        dtype: A floating point type, or its name. `None`: the dtype of the model.
        device: Device to which the model is moved. `None`: the model is not moved.
        attn_implementation: See `Actor`.
        value_head: Initialization of a new head: `zeros` (all values are 0 at first) or `normal` (standard deviation
            1 / sqrt(width)).
        backbone_from: Actor whose backbone is copied, instead of `model`.

    Raises:
        ValueError: If both or neither of `model` and `backbone_from` are passed, or the model has an unsuitable head.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> Critic(config)(torch.tensor([[1, 5, 6, 7]]), num_actions=2).tolist()
    [[0.0, 0.0]]
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        dtype: DType | None = None,
        device: Device | None = None,
        attn_implementation: str | None = None,
        value_head: Literal["zeros", "normal"] = "zeros",
        backbone_from: Actor | None = None,
    ) -> None:
        super().__init__()
        check_choice("value_head", value_head, ("zeros", "normal"))
        if (model is None) == (backbone_from is None):
            raise ValueError("model: expected either model or backbone_from, got both or neither")
        source: Any = model if backbone_from is None else _copy_backbone(backbone_from)
        loaded = load_model(source, purpose="values", dtype=dtype, attn_implementation=attn_implementation)
        backbone = get_backbone(loaded)
        head = next((getattr(loaded, name) for name in _HEADS if hasattr(loaded, name)), None)
        self.backbone: nn.Module = loaded if backbone is None else backbone
        if backbone is None or head is None:
            head = nn.Linear(int(text_config(self.backbone).hidden_size), 1)
            nn.init.zeros_(head.bias)
            if value_head == "zeros":
                nn.init.zeros_(head.weight)
            else:
                nn.init.normal_(head.weight, std=head.in_features**-0.5)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            raise ValueError(f"model: got a head {head}, expected a linear one with a single output")
        self.value_head = head
        if isinstance(model, (str, os.PathLike)) and (Path(model) / VALUE_HEAD).is_file():
            from safetensors.torch import load_file

            self.value_head.load_state_dict(load_file(Path(model) / VALUE_HEAD))
        self.value_head.float()
        self.to(self.device if device is None else device)  # moves a new head to the device of the backbone

    @property
    def _inner(self) -> nn.Module:
        return self.backbone

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int | Sequence[int] | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | torch.Tensor | None = None,
        **media: torch.Tensor | None,
    ) -> Any:
        """Compute values as LightRFT's critic does: [B, R] or, packed, [1, actions]; see `Actor.forward`."""
        values, output = self._values(batch_from_call(sequences, num_actions, attention_mask, packed_seq_lens), media)
        return (to_lightrft(values), output) if return_output else to_lightrft(values)

    def token_values(self, batch: Batch) -> Tokens:
        """Compute the value of every response slot of a batch in one pass, with gradients.

        Args:
            batch: The batch. It is copied to the device of the model if needed.

        Returns:
            [B, R] or, packed, `Rows`, on the model's device; 0 for padding.
        """
        values: Tokens = self._values(batch.to_device(self.device))[0]
        return values

    def _values(self, batch: Batch, media: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        if batch.layout == "packed":
            self._check_packs()
        slots = Slots.from_batch(batch)
        output = run(self.backbone, model_inputs(self.backbone, batch, media))
        hidden = slots.pick(output[0])
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.value_head(hidden.float())[:, 0]
        return slots.put(values), output

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Save the backbone in the format of transformers, and the head beside it, for `Critic(folder)`.

        Args:
            folder: Where to save.
            state_dict: Complete weights by the names of this module, if its own are sharded.
            options: Passed to `save_pretrained` of transformers.
        """
        from safetensors.torch import save_file

        weights = self.state_dict() if state_dict is None else state_dict
        backbone = {name.removeprefix("backbone."): weights[name] for name in weights if name.startswith("backbone.")}
        head = {name.removeprefix("value_head."): weights[name] for name in weights if name.startswith("value_head.")}
        self.backbone.save_pretrained(os.fspath(folder), state_dict=backbone, **options)  # type: ignore[operator]
        save_file({name: value.detach().cpu().contiguous() for name, value in head.items()}, Path(folder) / VALUE_HEAD)


def _copy_backbone(actor: Actor) -> nn.Module:
    """Copy the backbone of an actor with its current weights; adapters are merged into it."""
    if has_adapters(actor.model):
        merged: Any = copy.deepcopy(actor.model)
        copied = get_backbone(merged.merge_and_unload())
    else:
        backbone = get_backbone(actor.model)
        copied = None if backbone is None else copy.deepcopy(backbone)
    if copied is None:
        raise ValueError(f"backbone_from: got a {type(unwrap(actor.model)).__name__}, which has no separate backbone")
    trainable: nn.Module = copied.requires_grad_(True)
    return trainable
