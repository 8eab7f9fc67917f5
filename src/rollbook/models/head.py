"""Response slots of a batch, the output head of a model, and `Wrapper`, the base of `Actor` and `Critic`.

Invariant: a slot's prediction is the model's output one token earlier, within the same sample; a slot that is padding,
or that speaks of a sample's very first token, has none: nothing is picked for it, and 0 is put there.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rollbook.batch import Batch
from rollbook.batch.media import TYPES, token_types
from rollbook.core.checks import check_int
from rollbook.core.rows import Rows
from rollbook.models.logprobs import TokenStats, from_hidden, from_logits


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a batch that have a prediction, N of them, in the batch's order.

    >>> batch = Batch(tokens=torch.tensor([[0, 5, 6, 7]]), action_mask=torch.ones(1, 2).bool(),
    ...               attention_mask=torch.tensor([[0, 1, 1, 1]]))
    >>> slots = Slots.of(batch)
    >>> slots.index.tolist(), slots.labels.tolist()
    ([1, 2], [6, 7])
    >>> slots.put(torch.tensor([-0.5, -0.25]))
    tensor([[-0.5000, -0.2500]])
    """

    index: torch.Tensor
    """[N] Where the token before each slot lies among all tokens of the batch, row after row."""
    labels: torch.Tensor
    """[N] int64: the tokens that the slots speak of."""
    places: torch.Tensor
    """[N] Where the slots lie among all slots of the batch."""
    shape: tuple[int, ...]
    """(B, A) if padded, (slots,) if packed."""
    lengths: list[int] | None
    """How many slots each sample has, if packed."""

    @classmethod
    def of(cls, batch: Batch) -> Slots:
        """Find the slots with a prediction in a batch, padded or packed."""
        tokens = batch.tokens
        if isinstance(tokens, Rows):
            counts = np.array([len(row) for row in batch.action_mask], dtype=np.int64)
            slot = np.arange(int(counts.sum()))
            at = slot + np.repeat(tokens.offsets[1:] - np.cumsum(counts), counts)
            predicted = np.flatnonzero(at > np.repeat(tokens.offsets[:-1], counts))
            device = tokens.values.device
            index = torch.from_numpy(at[predicted]).to(device)
            places = torch.from_numpy(predicted).to(device)
            return cls(index - 1, tokens.values[index].long(), places, (len(slot),), counts.tolist())

        (count, width), slots = tokens.shape, batch.response_width
        device, begin = tokens.device, width - slots
        if batch.attention_mask is None:
            has_prediction = (torch.arange(begin, width, device=device) > 0).expand(count, slots)
        else:
            attended = batch.attention_mask != 0
            # Nothing predicts the first token of a sample.
            has_prediction = (attended & (attended.cumsum(-1) > 1))[:, begin:]
        if batch.spans is not None and batch.spans[1].starts.any():
            starts = torch.from_numpy(batch.spans[1].starts).to(device)
            has_prediction = has_prediction & (torch.arange(slots, device=device) >= starts[:, None])
        places = has_prediction.flatten().nonzero()[:, 0]
        row, column = places // max(slots, 1), places % max(slots, 1)
        index = row * width + begin + column
        return cls(index - 1, tokens.flatten()[index].long(), places, (count, slots), None)

    def pick(self, predictions: torch.Tensor) -> torch.Tensor:
        """(N, ...) What the model said at the token before each slot, of (B, S, ...) or (1, tokens, ...)."""
        return predictions.flatten(0, 1).index_select(0, self.index)

    def put(self, entries: torch.Tensor) -> Any:
        """(B, A) or `Rows`: an entry (N,) for each slot that has a prediction, 0 on the others; gradients flow."""
        flat = entries.new_zeros(int(np.prod(self.shape))).index_copy(0, self.places, entries)
        return flat.view(self.shape) if self.lengths is None else Rows(flat, self.lengths)


def called_batch(sequences: Any, num_actions: Any, attention_mask: torch.Tensor | None, packed_seq_lens: Any) -> Batch:
    """The batch that a call in LightRFT's way speaks of.

    Padded: `sequences` (B, S), `attention_mask` (B, S), the last `num_actions` tokens of each row are the response.
    Packed: `sequences` (1, tokens), `attention_mask` numbers the samples from 1 on, `num_actions` and
    `packed_seq_lens` [B].

    >>> called_batch(torch.tensor([[1, 2, 3]]), 2, None, None)
    Batch(1 records, padded, tokens 1x3, responses 1x2)
    >>> called_batch(torch.tensor([[1, 2, 3, 4]]), [1, 1], torch.tensor([[1, 1, 2, 2]]), [2, 2])
    Batch(2 records, packed, 4 tokens)
    """
    check_matrix("sequences", sequences, "(B, S), or (1, tokens) if packed")
    if attention_mask is not None and attention_mask.shape != sequences.shape:
        raise ValueError(
            f"attention_mask: got shape {list(attention_mask.shape)}, expected {list(sequences.shape)}, as sequences"
        )
    if packed_seq_lens is None:
        actions = check_int("num_actions", num_actions)
        if actions >= max(sequences.shape[1], 1):
            raise ValueError(
                f"num_actions: got {actions}, expected fewer than the {sequences.shape[1]} tokens of a row"
            )
        mask = torch.ones(len(sequences), actions, dtype=torch.bool, device=sequences.device)
        return Batch(tokens=sequences, attention_mask=attention_mask, action_mask=mask)
    lengths, counts = _numbers("packed_seq_lens", packed_seq_lens), _numbers("num_actions", num_actions)
    if len(sequences) != 1 or sum(lengths) != sequences.shape[1]:
        raise ValueError(
            f"packed_seq_lens: got {len(lengths)} samples with {sum(lengths)} tokens in all, expected as many as "
            f"sequences {list(sequences.shape)} has"
        )
    if attention_mask is not None:
        counted = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths, dtype=torch.int64))
        if not torch.equal(attention_mask[0].cpu().long(), counted):
            raise ValueError("attention_mask: expected the number of the sample, from 1 on, at each packed token")
    if len(counts) != len(lengths):
        raise ValueError(f"num_actions: got {len(counts)} entries, expected {len(lengths)}, one for each sample")
    for i, (actions, length) in enumerate(zip(counts, lengths, strict=True)):
        if actions > length:
            raise ValueError(f"num_actions[{i}]: got {actions}, expected at most its {length} tokens")
    mask = torch.ones(sum(counts), dtype=torch.bool, device=sequences.device)
    return Batch(tokens=Rows(sequences[0], lengths), action_mask=Rows(mask, counts))


def check_matrix(name: str, matrix: Any, expected: str) -> None:
    """Refuse what is not a matrix.

    >>> check_matrix("sequences", torch.zeros(3), "(B, S)")
    Traceback (most recent call last):
        ...
    ValueError: sequences: got shape [3], expected a tensor (B, S)
    """
    if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
        shown = f"shape {list(matrix.shape)}" if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise ValueError(f"{name}: got {shown}, expected a tensor {expected}")


def _numbers(name: str, numbers: Any) -> list[int]:
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"{name}: got {numbers!r}, expected a number for each packed sample")
    return [check_int(f"{name}[{i}]", number) for i, number in enumerate(numbers)]


VARLEN = "rollbook_varlen"
"""What transformers knows `rollbook.models.varlen` by."""
_PROBE = 6
"""Tokens that a check looks at; the second of two samples has as many."""


@contextmanager
def scoring(module: Any) -> Iterator[None]:
    """No gradients, and every part of the module as in evaluation (no dropout); after it, each part as it was before.

    >>> layer = nn.Dropout(0.5).train()
    >>> with scoring(layer):
    ...     layer(torch.ones(2)), layer.training
    (tensor([1., 1.]), False)
    >>> layer.training
    True
    """
    parts = list(module.modules()) if isinstance(module, nn.Module) else []  # a `Reference` sees to its own
    was = list(map(attrgetter("training"), parts))
    try:
        for part in parts:
            part.training = False
        # Not inference mode: a model keeps some of what it computes (rotary tables), which training then could not use.
        with torch.no_grad():
            yield
    finally:
        for part, training in zip(parts, was, strict=True):
            part.training = training


def unwrapped(model: Any) -> Any:
    """The transformers model inside one that peft gave adapters to (which stay in its layers); any other as it is."""
    inner = getattr(model, "get_base_model", None)
    if inner is None or getattr(model, "peft_config", None) is None:
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
        return model  # learned prompts are put in front by the wrapper itself
    return inner()


def backbone_of(model: Any) -> Any:
    """The part of a transformers model that gives hidden states; `None` where there is none to be told apart."""
    inner = getattr(unwrapped(model), "base_model", None)
    return inner if isinstance(inner, nn.Module) and inner is not unwrapped(model) else None


def text_config(model: Any) -> Any:
    """The part of a model's configuration that speaks of text; all of it, of a language model."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def device_of(module: nn.Module) -> torch.device:
    """The device that a module's first parameter lies on."""
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's first floating point parameter."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)


def run(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """A module's output for a transformers model's keyword arguments, of which it gets those that it takes."""
    parameters = inspect.signature(module.forward).parameters
    last = list(parameters.values())[-1] if parameters else None
    if last is None or last.kind is not last.VAR_KEYWORD:  # `**kwargs` is always the last parameter
        inputs = {name: value for name, value in inputs.items() if name in parameters}
    for part in (unwrapped(module), backbone_of(module)):
        if part is not None and hasattr(part, "rope_deltas"):
            part.rope_deltas = None  # kept from the last call, which was of other samples
    return module(**inputs)


def inputs_of(model: Any, batch: Batch, media: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keyword arguments of one pass over a batch, without a cache; `media` beyond the batch's own go along.

    Images and videos that come without `mm_token_type_ids` get them from their placeholder ids, if they have grids; a
    model that reads types of images without grids is refused (its processor may mark more than placeholders).
    """
    inner, backbone = unwrapped(model), backbone_of(model)
    config = getattr(inner, "config", None)
    packed = batch.layout == "packed"
    rope_index = getattr(inner, "get_rope_index", None) or getattr(backbone, "get_rope_index", None)
    # Padded, a model with spatial positions computes them itself, in one call.
    inputs = batch.model_inputs(get_rope_index=rope_index if packed else None, config=config)
    if rope_index is not None and packed and inputs["position_ids"].dim() == 2:
        # Text alone: without text positions beside the three spatial ones, such a model does not separate samples.
        inputs["position_ids"] = inputs["position_ids"].expand(4, -1, -1)
    if media:
        inputs |= {name: tensor for name, tensor in media.items() if tensor is not None}
        if any(name.endswith("grid_thw") for name in media):
            if packed:
                raise ValueError(
                    "media: got grids with packed sequences, expected a Batch that says which sample has which "
                    "image (Actor.token_stats)"
                )
            del inputs["position_ids"]
            if TYPES not in inputs:
                inputs[TYPES] = token_types(inputs["input_ids"], config)
                if batch.attention_mask is not None:
                    inputs[TYPES] *= batch.attention_mask != 0
    if (
        TYPES not in inputs
        and ("pixel_values" in inputs or "pixel_values_videos" in inputs)
        and TYPES in inspect.signature(inner.forward).parameters
    ):
        raise ValueError(
            f"media[{TYPES!r}]: got None, expected what the processor gave: {type(inner).__name__} reads it"
        )
    return {**inputs, "use_cache": False}


# --- the head -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Head:
    """How tokens of one model are scored, as it was found out.

    `path`: `hidden` (hidden states times the output layer's weight, never whole logits) or `logits` (the model's own).
    """

    model: nn.Module
    path: Literal["hidden", "logits"]
    why: str
    """In words, what made it this path."""
    suppress: tuple[int, ...] = ()
    layer: nn.Linear | None = None
    """The output layer, of the path `hidden`."""
    scale: float = 1.0
    """What the model multiplies logits by."""
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module, suppress: tuple[int, ...] = ()) -> Head:
        """Look at a model, and check on a few tokens."""
        inner, backbone = unwrapped(model), backbone_of(model)
        layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        if backbone is None or layer is None:
            return cls(model, "logits", "the model has no backbone and output layer to be told apart", suppress)
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            # Looked at, not measured: an adapter on it does nothing before the first step.
            named = f"{type(layer).__module__}.{type(layer).__qualname__}"
            return cls(model, "logits", f"the output layer is a {named}, not a plain one", suppress)
        ids = probe_ids(inner, device_of(inner))
        with scoring(inner):
            hidden = run(backbone, {"input_ids": ids, "use_cache": False})
            logits = run(inner, {"input_ids": ids, "use_cache": False}).logits.float()
            plain = layer(hidden.last_hidden_state if hasattr(hidden, "last_hidden_state") else hidden[0]).float()
        close = (1e-4 if dtype_of(inner) in (torch.float32, torch.float64) else 2e-2) * float(logits.abs().max())
        for scale, cap in _known(inner):
            scaled = plain * scale
            if cap is not None:
                scaled = cap * torch.tanh(scaled / cap)
            if bool(((scaled - logits).abs() <= close).all()):
                if cap is not None and suppress:
                    return cls(model, "logits", "tokens are suppressed, and a soft cap keeps them likely", suppress)
                return cls(model, "hidden", "it gives the model's logits", suppress, layer, scale, cap)
        off = float((plain - logits).abs().max())
        return cls(
            model, "logits", f"the model's logits are others than its output layer's, by up to {off:.3g}", suppress
        )

    def stats(
        self,
        batch: Batch,
        media: Mapping[str, Any] | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[TokenStats, Any]:
        """Log-probs and entropies of a batch's slots, (B, A) or `Rows`, and the output they were made from."""
        slots = Slots.of(batch)
        inputs = inputs_of(self.model, batch, media)
        if self.layer is None:
            output, picked = self._logits(inputs, slots)
            if self.suppress:
                picked = picked.index_fill(-1, self._suppressed(picked.device), -torch.inf)
            stats = from_logits(picked, slots.labels, temperature=temperature, entropy=entropy)
        else:
            output = run(backbone_of(self.model), inputs)
            hidden = slots.pick(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])
            stats = from_hidden(
                hidden,
                self.layer.weight,
                slots.labels,
                bias=self._suppressed_bias(self.layer) if self.suppress else self.layer.bias,
                # The logits are scaled as a whole, and so in the same place as a temperature does it.
                temperature=temperature / self.scale,
                entropy=entropy,
                softcap=self.softcap,
            )
        entropies = None if stats.entropy is None else slots.put(stats.entropy.float())
        return TokenStats(slots.put(stats.logprobs.float()), entropies), output

    def _logits(self, inputs: dict[str, Any], slots: Slots) -> tuple[Any, torch.Tensor]:
        """The model's output, and its logits (N, V) at the slots; of the others none, if the model can do that."""
        inner = unwrapped(self.model)
        keep = "logits_to_keep" in inspect.signature(inner.forward).parameters
        if keep and slots.lengths is not None:
            output = run(self.model, {**inputs, "logits_to_keep": slots.index})
            return output, _logits_of(output)[0]
        if keep:
            width = inputs["input_ids"].shape[1]
            last = min(slots.shape[1] + 1, width)
            output = run(self.model, {**inputs, "logits_to_keep": last})
            row, column = slots.index // width, slots.index % width
            return output, _logits_of(output).flatten(0, 1)[row * last + column - (width - last)]
        output = run(self.model, inputs)
        return output, slots.pick(_logits_of(output))

    def _suppressed_bias(self, layer: nn.Linear) -> torch.Tensor:
        """[V] The bias, -inf for suppressed tokens, which then have no probability and no gradient."""
        weight = layer.weight
        bias = torch.zeros(len(weight), device=weight.device) if layer.bias is None else layer.bias.float()
        return bias.index_fill(0, self._suppressed(weight.device), -torch.inf)

    def _suppressed(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.suppress, dtype=torch.int64, device=device)


def _logits_of(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output["logits"] if "logits" in output else output[0]
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise ValueError(f"model: got {type(logits).__name__} from it, expected logits (B, S, V)")
    return logits


def _known(model: Any) -> Iterator[tuple[float, float | None]]:
    """What this model may do to logits: scales and soft caps that its configuration tells of first, then neither.

    In this order, since of small logits a cap leaves no trace that a check could find.
    """
    places = [model.config, text_config(model)]

    def numbers(name: str) -> list[float]:
        values = [getattr(place, name, None) for place in places]
        return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]

    scales = [
        *numbers("logit_scale"),
        *(1 / factor for factor in numbers("logits_scaling")),
        *numbers("lm_head_multiplier"),
        1.0,
    ]
    caps: list[float | None] = [*numbers("final_logit_softcapping"), None]
    for scale in dict.fromkeys(scales):
        for cap in dict.fromkeys(caps):
            yield scale, cap


# --- checks ---------------------------------------------------------------------------------------------------------


def probe_ids(model: Any, device: torch.device, count: int = _PROBE) -> torch.Tensor:
    """(1, count) Ids of ordinary tokens, spread over the vocabulary: none that stands for an image or the like."""
    places = [model.config, text_config(model)]
    special: set[Any] = set()
    for place in places:
        for name, value in vars(place).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                special |= {
                    token_id
                    for token_id in (value if isinstance(value, list) else [value])
                    if isinstance(token_id, int)
                }
    vocabulary = int(places[-1].vocab_size)
    step = max(vocabulary // (2 * count), 1)
    ordinary = (
        [token_id for token_id in range(vocabulary) if token_id not in special] if vocabulary < 64 * count else None
    )
    if ordinary is not None:
        chosen = [ordinary[i * max(len(ordinary) // count, 1) % len(ordinary)] for i in range(count)]
    else:
        chosen = [
            next(token_id for token_id in range(i * step, vocabulary) if token_id not in special)
            for i in range(1, count + 1)
        ]
    return torch.tensor([chosen], dtype=torch.int64, device=device)


def keeps_apart(model: Any) -> bool:
    """Whether the model treats samples that lie end to end as if each were alone; found out on a few tokens.

    What the second of two samples gets is compared with what it gets alone, and, for a measure, with what it would get
    if the first were its beginning. Where that makes no difference to speak of, nothing is proved, and it is no.
    """
    inner = backbone_of(model) or model
    if not hasattr(unwrapped(model), "config"):
        return False
    device = device_of(inner)
    ids = probe_ids(unwrapped(model), device, 2 * _PROBE - 1)[0]
    first, second = ids[: _PROBE - 1], ids[_PROBE - 1 :]

    def last(rows: list[torch.Tensor]) -> torch.Tensor:
        values = Rows(torch.cat(rows), [len(row) for row in rows])
        mask = Rows(torch.ones(len(values.values), dtype=torch.bool, device=device), values.lengths)
        output = run(inner, inputs_of(model, Batch(tokens=values, action_mask=mask)))
        states: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return states[0, -_PROBE:].float()

    with scoring(inner):
        alone, packed, leaked = last([second]), last([first, second]), last([ids])
    scale = float((leaked - alone).abs().max())
    return scale > 0 and float((packed - alone).abs().max()) < 0.1 * scale


def attention_of(model: Any) -> str:
    """What a transformers model, or the part of it that reads text, attends by; empty of other modules."""
    inner = unwrapped(model)
    return str(getattr(text_config(inner), "_attn_implementation", None) or "") if hasattr(inner, "config") else ""


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
        """Whether it does, and attention over packed samples costs as much as over each sample alone.

        That holds for kernels for ragged input and for `rollbook.models.varlen`. Eager and SDPA attention use a mask
        over all pairs of tokens.
        """
        attention = attention_of(self._inner)
        return ("flash" in attention or attention in ("flex_attention", VARLEN)) and self.packs

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
