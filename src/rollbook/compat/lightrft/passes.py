"""The forward passes of a rollout: what actor, reference, teacher and critic say of every token.

Invariant: a model of `rollbook.models` sees the whole rollout, planned by tokens, so that its numbers do not depend on
how the rollout was cut; any other is asked batch by batch, with LightRFT's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from reprlib import repr as shortly
from typing import Any, TypeAlias

import torch

from rollbook.compat.lightrft.batch import ExperienceBatch
from rollbook.compat.lightrft.batch_media import media_inputs
from rollbook.compat.lightrft.replay_buffer import make_experience_batch, split_experience_batch
from rollbook.compat.lightrft.rollout_batches import Whole
from rollbook.core.metrics import Progress, Stages
from rollbook.core.rows import NUMPY, Rows, memory
from rollbook.models.heads import device_of
from rollbook.rollout.engine import BaseEngine


class Passes:
    """A rollout's models, and how each is asked.

    >>> Passes(None).device, Passes(None).models
    (device(type='cpu'), {})
    """

    def __init__(
        self,
        actor: Any,
        *,
        critic: Any = None,
        reference: Any = None,
        teacher: Any = None,
        token_budget: int = 16384,
    ) -> None:
        given = {"actor": actor, "initial_model": reference, "teacher": teacher, "critic": critic}
        self.models: dict[str, Any] = {}
        for name, model in given.items():
            if model is None or (name == "actor" and isinstance(model, BaseEngine)):
                continue
            if not callable(model):
                raise ValueError(
                    f"{name}: got {type(model).__name__} ({shortly(model)}), expected a model to call, or None"
                )
            if _is_bare(model):
                maker = "rollbook.models.Critic" if name == "critic" else "rollbook.models.Actor"
                raise ValueError(f"{name}: got {type(model).__name__}, a transformers model, expected {maker}(model)")
            self.models[_STAGES[name]] = model
        self.token_budget = token_budget

    @property
    def device(self) -> torch.device:
        """Where batches are made: where the policy is."""
        policy = self.models.get("policy")
        return device_of(policy) if isinstance(policy, torch.nn.Module) else torch.device("cpu")

    @property
    def temperature(self) -> float | None:
        """What the policy's logits are divided by, where it says so."""
        found = getattr(self.models.get("policy"), "temperature", None)
        return found if isinstance(found, float) else None

    def run(
        self,
        batches: Sequence[ExperienceBatch],
        *,
        entropy: bool = False,
        stages: Stages | None = None,
        bar: Progress | None = None,
    ) -> tuple[Whole, dict[str, torch.Tensor], list[int]]:
        """Fill in `action_log_probs` (and `action_entropy`), `base_action_log_probs`, `values` and
        `extras["teacher_logprobs"]` of all batches. Without a policy, log-probs are the engine's.

        Returns:
            The batches; by field, what was filled in, and the action mask, on the CPU, end to end; and the rows'
            lengths there.
        """
        whole = Whole(batches)
        stages = stages if stages is not None else Stages()
        column = whole.column("action_mask")
        if column is None:
            raise ValueError("action_mask: got none, expected one in every batch")
        mask, lengths = column
        columns = {"action_mask": mask}

        def put(field: str, values: torch.Tensor, value_lengths: list[int]) -> None:
            columns[field] = _settled(field, values, value_lengths, mask, lengths)
            whole.put_column(field, columns[field], lengths)

        joined, tokens = None, _tokens(batches)
        for name, model in self.models.items():
            with stages(name) as stage:
                if is_planned(model):
                    joined = _joined(batches) if joined is None else joined
                    found = self._planned(name, model, joined, entropy and name == "policy", stage)
                else:
                    found = self._asked(model, whole, entropy and name == "policy")
                for field, answer in zip(_FIELDS[name], found, strict=False):
                    if answer is not None:
                        put(field, *answer)
                stage["tokens"] = tokens
            if bar is not None:
                bar.advance()
        if "policy" not in self.models and (engine := whole.column("extras.logprobs")) is not None:
            put("action_log_probs", *engine)
        return whole, columns, lengths

    def _planned(
        self, name: str, model: Any, joined: ExperienceBatch, entropy: bool, stage: dict[str, Any]
    ) -> tuple[_Column | None, ...]:
        from rollbook.compat.lightrft.batch_passes import forward_batch
        from rollbook.models.forward import without_adapters

        outputs = ("values",) if name == "values" else ("logprobs", "entropy") if entropy else ("logprobs",)
        model = without_adapters(model) if name == "reference" else model
        stats: dict[str, float] = {}
        columns = forward_batch(model, joined, outputs, token_budget=self.token_budget, device="cpu", stats=stats)
        for key in ("forward_seconds", "micro_batches", "padding"):
            stage[key] = stats[key]
        return tuple((columns[output].values, columns[output].lengths) for output in outputs)

    def _asked(self, model: Any, whole: Whole, entropy: bool) -> tuple[_Column | None, ...]:
        if entropy:
            raise ValueError(
                "entropy: this actor does not give it, expected a rollbook.models.Actor, since entropies are asked for"
            )
        if callable(getattr(model, "eval", None)):
            model.eval()
        return (whole.of_each(lambda batch: _call(model, batch)),)


_Column: TypeAlias = tuple[torch.Tensor, list[int]]
"""Rows end to end, and their lengths."""
_STAGES = {"actor": "policy", "initial_model": "reference", "teacher": "teacher", "critic": "values"}


def is_planned(model: Any) -> bool:
    """Whether a model is one of `rollbook.models`, which are asked for a whole rollout."""
    return hasattr(type(model), "token_stats") or hasattr(type(model), "token_values")


def _is_bare(model: Any) -> bool:
    """Whether it is a model of transformers by itself, which is called in another way."""
    return hasattr(type(model), "prepare_inputs_for_generation")


_FIELDS = {
    "policy": ("action_log_probs", "action_entropy"),
    "reference": ("base_action_log_probs",),
    "teacher": ("extras.teacher_logprobs",),
    "values": ("values",),
}


def _joined(batches: Sequence[ExperienceBatch]) -> ExperienceBatch:
    """One packed batch of all rows."""
    if len(batches) == 1:
        return batches[0].pack()
    items = [item for batch in batches for item in split_experience_batch(batch)]
    return make_experience_batch(items, packing_samples=True)


def _call(model: Any, batch: ExperienceBatch) -> torch.Tensor | Rows:
    """What a model that is called with LightRFT's arguments says of one batch."""
    media = media_inputs(batch)
    if batch.layout == "packed":
        lengths = batch.cu_seqlens.diff().tolist()
        numbers = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
        tokens = batch.sequences.values.unsqueeze(0)
        actions = batch.action_cu_seqlens.diff().tolist()
        found = model(tokens, actions, numbers.unsqueeze(0).to(tokens.device), packed_seq_lens=lengths, **media)
    else:
        found = model(batch.sequences, int(batch.action_mask.shape[1]), batch.attention_mask, **media)
    if batch.layout == "padded":
        return checked_answer(model, found, tuple(batch.action_mask.shape))
    return Rows(checked_answer(model, found, (1, len(batch.action_mask.values)))[0], batch.action_mask.lengths)


def checked_answer(model: Any, answer: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of a model's answer, or of the first part of it, if it has the shape."""
    answer = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(answer, torch.Tensor):
        raise ValueError(f"{type(model).__name__}: got {type(answer).__name__} back, expected a tensor (B, A)")
    if tuple(answer.shape) != shape:
        raise ValueError(f"{type(model).__name__}: got shape {list(answer.shape)} back, expected {list(shape)}")
    return answer


def _settled(
    name: str, values: torch.Tensor, value_lengths: list[int], mask: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Rows end to end as float32 on the CPU; where nothing counts, what is not a number is 0: a model says NaN of a row
    without tokens."""
    if value_lengths != lengths:
        raise ValueError(f"{name}: got rows of {value_lengths} slots, expected {lengths}")
    values = values.detach().float().cpu()
    if isfinite(values.sum()):  # of finite numbers: then they all are, unless it overflows
        return values
    return torch.where(mask | values.isfinite(), values, 0.0)


def _tokens(batches: Sequence[ExperienceBatch]) -> int:
    total = 0
    for batch in batches:
        if batch.layout == "packed":
            total += len(batch.sequences.values)
        else:
            mask = batch.attention_mask
            by_numpy = mask is not None and mask.is_cpu and mask.dtype in NUMPY  # in a fraction of torch's time
            total += batch.sequences.numel() if mask is None else int((memory(mask) if by_numpy else mask).sum())
    return total
