"""`Actor` and `Critic`: log-probs and values of response tokens, computed over transformers models.

Invariant: log-probs are of the distribution that is sampled from at `temperature`, without the tokens of `suppress`.
They are float32, equal for padded and packed input up to rounding, and no tensor of (tokens, vocabulary) is allocated
unless the model requires it (see `head_path`). Value j belongs to the state before response token j, as log-prob j
does. Values are float32, computed by a float32 head for any dtype of the backbone, and 0 for padding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rollbook.algorithms.kernels.vocabulary import check_positive
from rollbook.batch.batch import Batch, Tokens
from rollbook.batch.media import placeholders
from rollbook.core.checks import check_bool, check_choice
from rollbook.core.sampling import token_ids
from rollbook.models.head import (
    Head,
    Slots,
    Wrapper,
    get_backbone,
    has_adapters,
    model_inputs,
    run,
    text_config,
    unwrap,
)
from rollbook.models.loading import BASE, VALUE_HEAD, load_model, load_tokenizers
from rollbook.models.logprobs import TokenStats
from rollbook.models.lora import Reference, attach, save_base

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from rollbook.batch.batch import Device
    from rollbook.models.loading import DType, ModelSource

__all__ = ["Actor", "Critic"]


class Actor(Wrapper):
    """A policy over a transformers model.

    Args:
        model: A module, a transformers configuration (random weights), a local folder or a name on the hub: causal
            language models, and vision-language models where the configuration has vision. A folder may be one that
            `save_pretrained` wrote, with or without adapters.
        tokenizer: For generation; loaded with the model if it comes from a folder or the hub.
        processor: For generation with images; loaded likewise.
        lora: Options of LoRA adapters: then adapters are trained, and `reference()` is the base model.
        dtype: A floating point type, or its name; `None`: that of the model.
        device: Where the model is moved; `None`: where it is.
        attn_implementation: One of transformers' (`sdpa`, `flash_attention_2`, ...), or `varlen`, with which packed
            batches cost as much as their samples, with torch alone (`rollbook.models.best_attention` chooses).
        temperature: Divisor of the logits, here and in sampling, unless a call sets another one.
        trainable: Whether the model is trained; if not, it has no gradients and no dropout.
        suppress: Token ids that are never sampled and have no probability in training. The placeholders of a
            vision-language model are always among them, since the engine never samples one.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> actor = Actor(config)
    >>> from rollbook import Batch, Experience, Experiences
    >>> batch = Batch.from_records(Experiences([Experience(tokens=[1, 5, 6, 7], prompt_length=2)]))
    >>> actor.token_stats(batch).logprobs.shape
    torch.Size([1, 2])
    >>> actor.head_path
    'hidden'
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        lora: LoraConfig | Mapping[str, Any] | None = None,
        dtype: DType | None = None,
        device: Device | None = None,
        attn_implementation: str | None = None,
        temperature: float = 1.0,
        trainable: bool = True,
        suppress: Sequence[int] = (),
    ) -> None:
        super().__init__()
        loaded = load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        if lora is not None:
            loaded = attach(loaded, lora)
        self.model = loaded if device is None else loaded.to(device)
        self.temperature = _check_temperature(temperature)
        self.suppress = _suppressed(self.model, suppress)
        self.trainable = check_bool("trainable", trainable)
        if tokenizer is None and processor is None:
            tokenizer, processor = load_tokenizers(model, getattr(unwrap(loaded), "config", None))
        self.processor = processor
        self.tokenizer = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", None)
        self._head: Head | None = None
        self.engine: Any = None
        """The engine over these weights, once there is one. A map of engines by actor would keep a sharded actor."""
        if not self.trainable:
            self.requires_grad_(False).eval()

    @property
    def _inner(self) -> nn.Module:
        return self.model

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """How log-probs are computed; probed once, on a few tokens, and again if the output layer was replaced."""
        head = self._head
        if (
            head is None
            or head.suppress != self.suppress
            or (head.layer is not None and unwrap(self.model).get_output_embeddings() is not head.layer)
        ):
            head = self._head = Head.from_model(self.model, self.suppress)
        return head

    def probe(self) -> None:
        """Also determine how log-probs are computed."""
        super().probe()
        _ = self.head

    @property
    def head_path(self) -> str:
        """`hidden`: from hidden states and the weight of the output layer, or `logits`: from the model's logits."""
        return self.head.path

    # --- scoring ------------------------------------------------------------------------------------------------------

    def token_stats(self, batch: Batch, *, entropy: bool = False, temperature: float | None = None) -> TokenStats:
        """Compute log-probs of every response slot of a batch in one pass, with gradients.

        Args:
            batch: The batch; it is copied to the device of the model if it is elsewhere.
            entropy: Whether to compute entropies, too.
            temperature: What logits are divided by. `None`: the actor's.

        Returns:
            [B, R] or, packed, `Rows`, on the model's device; 0 where a slot is padding.
        """
        if batch.layout == "packed":
            self._check_packs()
        temperature = self.temperature if temperature is None else _check_temperature(temperature)
        return self.head.stats(batch.to_device(self.device), temperature=temperature, entropy=entropy)[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_head": None, "engine": None}  # rebuilt on first use

    @property
    def pad_token_id(self) -> int:
        """The pad token of the tokenizer or the configuration, else the first end token, else 0."""
        for holder in (self.tokenizer, self.config, text_config(self)):
            for name in ("pad_token_id", "eos_token_id"):
                token_id = getattr(holder, name, None)
                token_id = token_id[0] if isinstance(token_id, (list, tuple)) and token_id else token_id
                if isinstance(token_id, int):
                    return token_id
        return 0

    # --- reference, saving, training ----------------------------------------------------------------------------------

    def reference(self) -> Actor | Reference:
        """Return the reference policy: with adapters, the base model without them, which shares its weights; else a
        frozen copy with the current weights."""
        if has_adapters(self.model):
            return Reference(self)
        reference = Actor(
            copy.deepcopy(self.model),
            tokenizer=self.tokenizer,
            processor=self.processor,
            temperature=self.temperature,
            trainable=False,
            suppress=self.suppress,
        )
        reference._packs = self._packs
        return reference

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Save the model, or its adapters, with tokenizer and processor, for `Actor(folder)`.

        The base model of adapters is saved too if it came from neither a folder nor the hub.

        Args:
            folder: Where to save.
            state_dict: Complete weights by the names of this module, if its own are sharded.
            options: Passed to `save_pretrained` of transformers.
        """
        path = os.fspath(folder)
        state = None if state_dict is None else {name.removeprefix("model."): state_dict[name] for name in state_dict}
        self.model.save_pretrained(path, state_dict=state, **options)  # type: ignore[operator]
        if has_adapters(self.model) and not getattr(self.config, "name_or_path", None):
            save_base(self.model, os.path.join(path, BASE), state, **options)
        for preprocessor in (self.processor, self.tokenizer):
            if preprocessor is not None:
                preprocessor.save_pretrained(path)


def _check_temperature(temperature: float) -> float:
    return check_positive("temperature", temperature, torch.float32)


def _suppressed(model: nn.Module, suppress: Sequence[int]) -> tuple[int, ...]:
    """Return the suppressed ids, sorted: those given, and the placeholders of the model."""
    config = getattr(unwrap(model), "config", None)
    suppressed = token_ids("suppress", list(suppress))
    if config is None:
        return tuple(sorted(set(suppressed)))
    vocabulary = int(text_config(unwrap(model)).vocab_size)
    for i, token_id in enumerate(suppressed):
        if token_id >= vocabulary:
            raise ValueError(f"suppress[{i}]: got {token_id}, expected an id below {vocabulary}")
    placeholder_ids = (token_id for token_id in placeholders(config).values() if token_id < vocabulary)
    return tuple(sorted({*suppressed, *placeholder_ids}))


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
    >>> from rollbook import Batch, Experience, Experiences
    >>> batch = Batch.from_records(Experiences([Experience(tokens=[1, 5, 6, 7], prompt_length=2)]))
    >>> Critic(config).token_values(batch).tolist()
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

    def token_values(self, batch: Batch) -> Tokens:
        """Compute the value of every response slot of a batch in one pass, with gradients.

        Args:
            batch: The batch. It is copied to the device of the model if needed.

        Returns:
            [B, R] or, packed, `Rows`, on the model's device; 0 for padding.
        """
        values: Tokens = self._values(batch.to_device(self.device))[0]
        return values

    def _values(self, batch: Batch, inputs: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if batch.layout == "packed":
            self._check_packs()
        slots = Slots.from_batch(batch)
        output = run(self.backbone, model_inputs(self.backbone, batch) if inputs is None else inputs)
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
