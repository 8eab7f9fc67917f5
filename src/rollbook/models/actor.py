"""`Actor`: a policy over a transformers model, called as LightRFT's is, and scored without whole logits in memory.

Invariant: log-probs are of the distribution that is sampled from at `temperature`, with `suppress` never in it; they
are float32, the same for padded and packed input up to rounding, and no tensor of (tokens, vocabulary) is made unless
the model leaves no other way (`head_path` says which it is).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rollbook.algorithms.kernels.vocabulary import check_positive
from rollbook.batch import Batch
from rollbook.batch.media import placeholders
from rollbook.core.checks import check_bool
from rollbook.core.sampling import token_ids
from rollbook.models.head import Head, Wrapper, called_batch, flat, inputs_of, run, text_config, unwrapped
from rollbook.models.loading import BASE, load_model, load_tokenizers
from rollbook.models.logprobs import TokenStats
from rollbook.models.lora import Reference, attach, has_adapters, save_base


class Actor(Wrapper):
    """A policy.

    - `model`: a module, a transformers configuration (random weights), a local folder or a name on the hub: causal
      language models, and vision-language models where the configuration has vision. What `save_pretrained` wrote is
      such a folder, with adapters or without.
    - `tokenizer`, `processor`: for generation; loaded with the model if it comes from a folder or the hub.
    - `lora`: a `peft.LoraConfig` or a dict of its options: then adapters are trained, and `reference()` is the base.
    - `attn_implementation`: one of transformers' (`sdpa`, `flash_attention_2`, ...), or `varlen`, by which packed
      batches cost what their samples cost, with torch alone (`rollbook.models.best_attention` chooses).
    - `temperature`: that logits are divided by, here and in sampling, unless a call says otherwise.
    - `suppress`: ids that are never sampled and have no probability in training. A vision-language model's placeholders
      are always among them, since the engine never samples one.
    - `trainable=False`: no gradients, no dropout.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=16)
    >>> actor = Actor(config)
    >>> actor(torch.tensor([[1, 5, 6, 7]]), num_actions=2).shape
    torch.Size([1, 2])
    >>> actor.head_path
    'hidden'
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        processor: Any = None,
        lora: Any = None,
        dtype: Any = None,
        device: Any = None,
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
            tokenizer, processor = load_tokenizers(model, getattr(unwrapped(loaded), "config", None))
        self.processor = processor
        self.tokenizer = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", None)
        self._head: Head | None = None
        if not self.trainable:
            self.requires_grad_(False).eval()

    @property
    def _inner(self) -> nn.Module:
        return self.model

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """How its tokens are scored; looked into once, on a few tokens, and again if its output layer was replaced."""
        head = self._head
        if (
            head is None
            or head.suppress != self.suppress
            or (head.layer is not None and unwrapped(self.model).get_output_embeddings() is not head.layer)
        ):
            head = self._head = Head.of(self.model, self.suppress)
        return head

    @property
    def head_path(self) -> str:
        """`hidden`: from hidden states and the output layer's weight, or `logits`: from the model's own logits."""
        return self.head.path

    # --- scoring ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: Any = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Any = None,
        *,
        entropy: bool = False,
        temperature: float | None = None,
        **media: Any,
    ) -> Any:
        """Log-probs of actions, as LightRFT's actor gives them; 0 on slots that are not attended.

        Padded: `sequences` (B, S) and the last `num_actions` of each row give (B, A). Packed: `sequences` (1, tokens),
        `attention_mask` that numbers the samples from 1 on, `num_actions` and `packed_seq_lens` [B] give (1, all
        actions). With `return_output` also the model's output, which has `action_entropy` if `entropy` is asked for.
        Without `num_actions` the model's output alone. `media` go to the model (pixel_values, image_grid_thw, ...).
        """
        if num_actions is None:
            if not return_output:
                raise ValueError("num_actions: got None, expected it, or return_output=True for the model's output")
            lengths = [] if packed_seq_lens is None else [0] * len(packed_seq_lens)
            batch = called_batch(sequences, lengths or 0, attention_mask, packed_seq_lens)
            return run(self.model, inputs_of(self.model, batch, media))
        batch = called_batch(sequences, num_actions, attention_mask, packed_seq_lens)
        if batch.layout == "packed":
            self._check_packs()
        temperature = self.temperature if temperature is None else _check_temperature(temperature)
        stats, output = self.head.stats(batch, media, temperature=temperature, entropy=entropy)
        columns = [None if column is None else flat(column) for column in stats]
        if not return_output:
            return columns[0]
        if isinstance(output, torch.Tensor):
            output = {"logits": output}
        if columns[1] is not None:
            output["action_entropy"] = columns[1]
        return columns[0], output

    def token_stats(self, batch: Batch, *, entropy: bool = False, temperature: float | None = None) -> TokenStats:
        """Compute log-probs of every response slot of a batch in one pass, with gradients.

        Args:
            batch: The batch; it is copied to the model's device if it lies elsewhere.
            entropy: Whether to compute entropies, too.
            temperature: What logits are divided by. `None`: the actor's.

        Returns:
            [B, A] or, packed, `Rows`, on the model's device; 0 where a slot is padding.
        """
        if batch.layout == "packed":
            self._check_packs()
        temperature = self.temperature if temperature is None else _check_temperature(temperature)
        return self.head.stats(batch.to_device(self.device), temperature=temperature, entropy=entropy)[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_head": None}  # made again when it is needed

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's, else the configuration's, else the first end token, else 0."""
        for holder in (self.tokenizer, self.config, text_config(self)):
            for name in ("pad_token_id", "eos_token_id"):
                token_id = getattr(holder, name, None)
                token_id = token_id[0] if isinstance(token_id, (list, tuple)) and token_id else token_id
                if isinstance(token_id, int):
                    return token_id
        return 0

    # --- reference, saving, training ----------------------------------------------------------------------------------

    def reference(self) -> Actor | Reference:
        """The model to measure divergence from: with adapters, the base without them, sharing its weights; else a
        frozen copy of the weights as they are now."""
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

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write what `Actor(folder)` reads: the model, or its adapters (and the base too, if it came from no folder and
        no name by which it would be found again), with tokenizer and processor."""
        where = os.fspath(folder)
        self.model.save_pretrained(where, **options)  # type: ignore[operator]
        if has_adapters(self.model) and not getattr(self.config, "name_or_path", None):
            save_base(self.model, os.path.join(where, BASE), **options)
        for part in (self.processor, self.tokenizer):
            if part is not None:
                part.save_pretrained(where)


def _check_temperature(temperature: float) -> float:
    return check_positive("temperature", temperature, torch.float32)


def _suppressed(model: nn.Module, suppress: Sequence[int]) -> tuple[int, ...]:
    """The ids that are never to be, sorted: those asked for, and the model's placeholders."""
    config = getattr(unwrapped(model), "config", None)
    suppressed = token_ids("suppress", list(suppress))
    if config is None:
        return tuple(sorted(set(suppressed)))
    vocabulary = int(text_config(unwrapped(model)).vocab_size)
    for i, token_id in enumerate(suppressed):
        if token_id >= vocabulary:
            raise ValueError(f"suppress[{i}]: got {token_id}, expected an id below {vocabulary}")
    placeholder_ids = (token_id for token_id in placeholders(config).values() if token_id < vocabulary)
    return tuple(sorted({*suppressed, *placeholder_ids}))
