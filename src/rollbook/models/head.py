"""Response slots of a batch, the output head of a model, and `Wrapper`, the base class of `Actor` and `Critic`.

Invariant: the prediction of a slot is the output of the model one token earlier, within the same sample. Slots of
padding, and of the first token of a sample, have no prediction, and get 0.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from rollbook.batch import Batch
from rollbook.batch.media import TYPES
from rollbook.core.rows import Rows
from rollbook.models.logprobs import TokenStats, from_hidden, from_logits

if TYPE_CHECKING:
    from rollbook.models.protocols import LogprobModel, ValueModel


@dataclass(frozen=True, eq=False)
class Slots:
    """The N response slots of a batch that have a prediction, in the order of the batch.

    >>> batch = Batch(tokens=torch.tensor([[0, 5, 6, 7]]), action_mask=torch.ones(1, 2).bool(),
    ...               attention_mask=torch.tensor([[0, 1, 1, 1]]))
    >>> slots = Slots.from_batch(batch)
    >>> slots.index.tolist(), slots.labels.tolist()
    ([1, 2], [6, 7])
    >>> slots.put(torch.tensor([-0.5, -0.25]))
    tensor([[-0.5000, -0.2500]])
    """

    index: torch.Tensor
    """[N] Index of the token before each slot among all tokens of the batch, row after row."""
    labels: torch.Tensor
    """[N] int64: the tokens of the slots."""
    slot_index: torch.Tensor
    """[N] Index of each slot among all slots of the batch."""
    shape: tuple[int, ...]
    """(B, R) if padded, (slots,) if packed."""
    lengths: list[int] | None
    """Number of slots of each sample, if packed."""

    @classmethod
    def from_batch(cls, batch: Batch) -> Slots:
        """Find the slots with a prediction in a batch, padded or packed."""
        tokens = batch.tokens
        if isinstance(tokens, Rows):
            counts = np.array([len(row) for row in batch.action_mask], dtype=np.int64)
            slot = np.arange(int(counts.sum()))
            at = slot + np.repeat(tokens.offsets[1:] - np.cumsum(counts), counts)
            predicted = np.flatnonzero(at > np.repeat(tokens.offsets[:-1], counts))
            device = tokens.values.device
            index = torch.from_numpy(at[predicted]).to(device)
            slot_index = torch.from_numpy(predicted).to(device)
            return cls(index - 1, tokens.values[index].long(), slot_index, (len(slot),), counts.tolist())

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
        slot_index = has_prediction.flatten().nonzero()[:, 0]
        row, column = slot_index // max(slots, 1), slot_index % max(slots, 1)
        index = row * width + begin + column
        return cls(index - 1, tokens.flatten()[index].long(), slot_index, (count, slots), None)

    def pick(self, predictions: torch.Tensor) -> torch.Tensor:
        """Select the output at the token before each slot, of [B, S, ...] or [1, tokens, ...]. Shape: [N, ...]."""
        return predictions.flatten(0, 1).index_select(0, self.index)

    def put(self, entries: torch.Tensor) -> Any:
        """Place entries [N] on the slots that have a prediction, 0 on the others; gradients flow.

        Returns:
            [B, R] or `Rows`.
        """
        flat = entries.new_zeros(int(np.prod(self.shape))).index_copy(0, self.slot_index, entries)
        return flat.view(self.shape) if self.lengths is None else Rows(flat, self.lengths)


VARLEN = "rollbook_varlen"
"""Name of `rollbook.models.varlen` in transformers."""
_PROBE = 6
"""Number of tokens of a probe."""


@contextmanager
def scoring(module: LogprobModel | ValueModel | nn.Module) -> Iterator[None]:
    """Disable gradients and dropout within the context; the mode of every module is restored.

    Args:
        module: The model. A `Reference` disables both itself.

    >>> layer = nn.Dropout(0.5).train()
    >>> with scoring(layer):
    ...     layer(torch.ones(2)), layer.training
    (tensor([1., 1.]), False)
    >>> layer.training
    True
    """
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    modes = list(map(attrgetter("training"), parts))
    try:
        for submodule in parts:
            submodule.training = False
        # Not inference mode: models cache tensors (rotary tables) that training could then not use.
        with torch.no_grad():
            yield
    finally:
        for submodule, training in zip(parts, modes, strict=True):
            submodule.training = training


def unwrap(model: nn.Module) -> Any:
    """Return the transformers model inside a peft model (adapters stay in its layers); any other model as it is."""
    inner, adapters = getattr(model, "get_base_model", None), getattr(model, "peft_config", None)
    if inner is None or adapters is None:
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in adapters.values()):
        return model  # learned prompts are put in front by the wrapper itself
    return inner()


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped this model."""
    return getattr(model, "peft_config", None) is not None and hasattr(model, "disable_adapter")


def get_backbone(model: nn.Module) -> Any:
    """Return the backbone of a transformers model, which computes hidden states; `None` if it has none."""
    inner = getattr(unwrap(model), "base_model", None)
    return inner if isinstance(inner, nn.Module) and inner is not unwrap(model) else None


def text_config(model: nn.Module | LogprobModel | ValueModel) -> Any:
    """Return the text part of a model's configuration; of a language model all of it; `None` if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def get_device(module: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module."""
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def get_dtype(module: nn.Module) -> torch.dtype:
    """Return the type of the first floating point parameter of a module."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)


def run(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Call a module with those of the keyword arguments of a transformers model that it accepts."""
    parameters = inspect.signature(module.forward).parameters
    last = list(parameters.values())[-1] if parameters else None
    if last is None or last.kind is not last.VAR_KEYWORD:  # `**kwargs` is always the last parameter
        inputs = {name: value for name, value in inputs.items() if name in parameters}
    for submodule in (unwrap(module), get_backbone(module)):
        if submodule is not None and hasattr(submodule, "rope_deltas"):
            submodule.rope_deltas = None  # cached from the last call, for other samples
    return module(**inputs)


def model_inputs(model: nn.Module, batch: Batch, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build the keyword arguments of one forward pass over a batch, without a cache, and `extra` ones.

    Missing `mm_token_type_ids` of images and videos with grids are derived from placeholder ids. Without grids they are
    required if the model reads them, since its processor may mark more than placeholders.
    """
    inner, backbone = unwrap(model), get_backbone(model)
    config = getattr(inner, "config", None)
    packed = batch.layout == "packed"
    rope_index = getattr(inner, "get_rope_index", None) or getattr(backbone, "get_rope_index", None)
    # Padded, a model with spatial positions computes them itself, in one call.
    inputs = batch.model_inputs(get_rope_index=rope_index if packed else None, config=config)
    if rope_index is not None and packed and inputs["position_ids"].dim() == 2:
        # Text alone: without text positions beside the three spatial ones, such a model does not separate samples.
        inputs["position_ids"] = inputs["position_ids"].expand(4, -1, -1)
    inputs |= extra or {}
    if (
        TYPES not in inputs
        and ("pixel_values" in inputs or "pixel_values_videos" in inputs)
        and TYPES in inspect.signature(inner.forward).parameters
    ):
        raise ValueError(
            f"media[{TYPES!r}]: got None, expected the processor's output: {type(inner).__name__} reads it"
        )
    return {**inputs, "use_cache": False}


# --- the head -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Head:
    """How the log-probs of one model are computed, as determined by a probe.

    Attributes:
        model: The model.
        path: `hidden` (hidden states times the weight of the output layer, tile by tile) or `logits` (of the model).
        reason: Why the model has this path.
        suppress: Token ids without probability.
        layer: The output layer, for the path `hidden`.
        scale: Factor that the model multiplies logits by.
        softcap: Soft cap of the logits.
    """

    model: nn.Module
    path: Literal["hidden", "logits"]
    reason: str
    suppress: tuple[int, ...] = ()
    layer: nn.Linear | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_model(cls, model: nn.Module, suppress: tuple[int, ...] = ()) -> Head:
        """Probe a model on a few tokens."""
        inner, backbone = unwrap(model), get_backbone(model)
        layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        if backbone is None or layer is None:
            return cls(model, "logits", "the model has no separate backbone and output layer", suppress)
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            # By type, not by the probe: an adapter on the layer has no effect before the first step.
            kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
            return cls(model, "logits", f"the output layer is a {kind}, expected nn.Linear", suppress)
        ids = probe_ids(inner, get_device(inner))
        with scoring(inner):
            hidden = run(backbone, {"input_ids": ids, "use_cache": False})
            logits = run(inner, {"input_ids": ids, "use_cache": False}).logits.float()
            plain = layer(hidden.last_hidden_state if hasattr(hidden, "last_hidden_state") else hidden[0]).float()
        close = (1e-4 if get_dtype(inner) in (torch.float32, torch.float64) else 2e-2) * float(logits.abs().max())
        for scale, cap in _logit_transforms(inner):
            scaled = plain * scale
            if cap is not None:
                scaled = cap * torch.tanh(scaled / cap)
            if bool(((scaled - logits).abs() <= close).all()):
                if cap is not None and suppress:
                    return cls(model, "logits", "a soft cap would keep suppressed tokens likely", suppress)
                return cls(model, "hidden", "the output layer gives the model's logits", suppress, layer, scale, cap)
        off = float((plain - logits).abs().max())
        return cls(
            model, "logits", f"the model's logits differ from those of its output layer by up to {off:.3g}", suppress
        )

    def stats(
        self,
        batch: Batch,
        inputs: dict[str, Any] | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[TokenStats, Any]:
        """Compute log-probs and entropies of the slots, [B, R] or `Rows`; also returns the output of the model.

        Keyword arguments of the model that are not those of `model_inputs` are passed as `inputs`.
        """
        slots = Slots.from_batch(batch)
        inputs = model_inputs(self.model, batch) if inputs is None else inputs
        if self.layer is None:
            output, picked = self._logits(inputs, slots)
            if self.suppress:
                picked = picked.index_fill(-1, self._suppressed(picked.device), -torch.inf)
            stats = from_logits(picked, slots.labels, temperature=temperature, entropy=entropy)
        else:
            output = run(get_backbone(self.model), inputs)
            hidden = slots.pick(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])
            stats = from_hidden(
                hidden,
                self.layer.weight,
                slots.labels,
                bias=self._suppressing_bias(self.layer) if self.suppress else self.layer.bias,
                # A factor of all logits is an inverse temperature.
                temperature=temperature / self.scale,
                entropy=entropy,
                softcap=self.softcap,
            )
        entropies = None if stats.entropy is None else slots.put(stats.entropy.float())
        return TokenStats(slots.put(stats.logprobs.float()), entropies), output

    def _logits(self, inputs: dict[str, Any], slots: Slots) -> tuple[Any, torch.Tensor]:
        """Run the model; return its output and the logits [N, V] of the slots, computing no others if it can."""
        inner = unwrap(self.model)
        keep = "logits_to_keep" in inspect.signature(inner.forward).parameters
        if keep and slots.lengths is not None:
            output = run(self.model, {**inputs, "logits_to_keep": slots.index})
            return output, _get_logits(output)[0]
        if keep:
            width = inputs["input_ids"].shape[1]
            last = min(slots.shape[1] + 1, width)
            output = run(self.model, {**inputs, "logits_to_keep": last})
            row, column = slots.index // width, slots.index % width
            return output, _get_logits(output).flatten(0, 1)[row * last + column - (width - last)]
        output = run(self.model, inputs)
        return output, slots.pick(_get_logits(output))

    def _suppressing_bias(self, layer: nn.Linear) -> torch.Tensor:
        """[V] The bias, -inf for suppressed tokens, which then have no probability and no gradient."""
        weight = layer.weight
        bias = torch.zeros(len(weight), device=weight.device) if layer.bias is None else layer.bias.float()
        return bias.index_fill(0, self._suppressed(weight.device), -torch.inf)

    def _suppressed(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.suppress, dtype=torch.int64, device=device)


def _get_logits(output: torch.Tensor | Mapping[Any, Any] | tuple[Any, ...]) -> torch.Tensor:
    if isinstance(output, Mapping):
        logits = output["logits"] if "logits" in output else output[0]
    else:
        logits = output[0] if isinstance(output, tuple) else output
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise ValueError(f"model: returned {type(logits).__name__}, expected logits (B, S, V)")
    return logits


def _logit_transforms(model: nn.Module) -> Iterator[tuple[float, float | None]]:
    """Iterate over scales and soft caps that this model may apply to logits: those of its configuration, then neither.

    In this order, since a cap has no detectable effect on small logits.
    """
    configs = [model.config, text_config(model)]

    def numbers(name: str) -> list[float]:
        values = [getattr(config, name, None) for config in configs]
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


def probe_ids(model: nn.Module, device: torch.device, count: int = _PROBE) -> torch.Tensor:
    """Choose ids of ordinary tokens, spread over the vocabulary, without special tokens and placeholders.

    Returns:
        [1, count].
    """
    configs = [model.config, text_config(model)]
    special: set[Any] = set()
    for config in configs:
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                special |= {
                    token_id
                    for token_id in (value if isinstance(value, list) else [value])
                    if isinstance(token_id, int)
                }
    vocabulary = int(configs[-1].vocab_size)
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


def separates_samples(model: nn.Module) -> bool:
    """Check on a few tokens whether the model separates packed samples.

    The output for the second of two samples is compared with its output alone, relative to the difference that the
    first makes as its prefix. If that difference is 0, the check proves nothing, and the result is False.
    """
    inner = get_backbone(model) or model
    if not hasattr(unwrap(model), "config"):
        return False
    device = get_device(inner)
    ids = probe_ids(unwrap(model), device, 2 * _PROBE - 1)[0]
    first, second = ids[: _PROBE - 1], ids[_PROBE - 1 :]

    def last(rows: list[torch.Tensor]) -> torch.Tensor:
        values = Rows(torch.cat(rows), [len(row) for row in rows])
        mask = Rows(torch.ones(len(values.values), dtype=torch.bool, device=device), values.lengths)
        output = run(inner, model_inputs(model, Batch(tokens=values, action_mask=mask)))
        states: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return states[0, -_PROBE:].float()

    with scoring(inner):
        alone, packed, leaked = last([second]), last([first, second]), last([ids])
    scale = float((leaked - alone).abs().max())
    return scale > 0 and float((packed - alone).abs().max()) < 0.1 * scale


def attention_implementation(model: nn.Module) -> str:
    """Return the attention implementation of the text part of a transformers model; empty for other modules."""
    inner = unwrap(model)
    return str(getattr(text_config(inner), "_attn_implementation", None) or "") if hasattr(inner, "config") else ""


class Wrapper(nn.Module, ABC):
    """A module around a transformers model, `_inner`: the base class of `Actor` and `Critic`."""

    def __init__(self) -> None:
        super().__init__()
        self._packs: bool | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if attention_implementation(self._inner) == VARLEN:  # not yet registered in another process
            from rollbook.models.varlen import register

            register()

    @property
    @abstractmethod
    def _inner(self) -> nn.Module:
        """The wrapped model, with its adapters."""

    @property
    def config(self) -> Any:
        """The transformers model's configuration."""
        return unwrap(self._inner).config

    @property
    def device(self) -> torch.device:
        """Device of the first weights of the model."""
        return get_device(self._inner)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights of the model."""
        return get_dtype(self._inner)

    @property
    def packs(self) -> bool:
        """Whether the model separates packed samples; checked once, on a few tokens."""
        if self._packs is None:
            self._packs = separates_samples(self._inner)
        return self._packs

    def probe(self) -> None:
        """Determine what is probed once, before the model is sharded: probes call parts of it on their own."""
        _ = self.packs

    @property
    def packs_cheaply(self) -> bool:
        """Whether the model separates packed samples, and their attention costs no more than that of each alone.

        That holds for kernels for ragged input and for `rollbook.models.varlen`. Eager and SDPA attention use a mask
        over all pairs of tokens.
        """
        attention = attention_implementation(self._inner)
        return ("flash" in attention or attention in ("flex_attention", VARLEN)) and self.packs

    def _check_packs(self) -> None:
        if not self.packs:
            raise ValueError(
                "packed: the model does not separate packed samples: the output for one depends on those before it; "
                "expected a padded batch (batch.pad())"
            )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Recompute activations in training to save memory; by default without reentry, which would cut gradients at
        frozen parts."""
        options = {"use_reentrant": False} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        unwrap(self._inner).gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(options))

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing."""
        unwrap(self._inner).gradient_checkpointing_disable()
