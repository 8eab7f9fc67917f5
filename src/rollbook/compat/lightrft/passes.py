"""The forward passes of a rollout: what actor, reference, teacher and critic say of every token.

Invariant: a model of `rollbook.models` sees the whole rollout, planned by tokens, so that its numbers do not depend on
how the rollout was cut; any other is asked batch by batch, with LightRFT's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from reprlib import repr as shortly
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algorithms.layout import as_column
from rollbook.batch import Batch
from rollbook.batch.columns import BatchColumns, Lengths
from rollbook.compat.lightrft.batch import ExperienceBatch, Origin, Samples, token_fields
from rollbook.compat.lightrft.estimation import RolloutBatches, mean_by_row
from rollbook.compat.lightrft.media import divided
from rollbook.compat.lightrft.ragged_batch import (
    RaggedBatch,
    action_starts,
    checked,
    media_inputs,
    sheet_of_batch,
    spans_of_rows,
    widths,
)
from rollbook.compat.lightrft.replay_buffer import make_experience_batch, split_experience_batch
from rollbook.compat.lightrft.samples import lengths_of_samples
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.metrics import Progress, Stages
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import NUMPY, Rows, Spans, concatenated, empty, memory
from rollbook.models.forward import TOKEN_BUDGET, run_micro_batches
from rollbook.models.head import device_of
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
    ) -> tuple[RolloutBatches, dict[str, torch.Tensor], list[int]]:
        """Fill in `action_log_probs` (and `action_entropy`), `base_action_log_probs`, `values` and
        `extras["teacher_logprobs"]` of all batches. Without a policy, log-probs are the engine's.

        Returns:
            The batches; by field, what was filled in, and the action mask, on the CPU, end to end; and the rows'
            lengths there.
        """
        whole = RolloutBatches(batches)
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
        from rollbook.models.forward import without_adapters

        outputs = ("values",) if name == "values" else ("logprobs", "entropy") if entropy else ("logprobs",)
        model = without_adapters(model) if name == "reference" else model
        stats: dict[str, float] = {}
        columns = forward_batch(model, joined, outputs, token_budget=self.token_budget, device="cpu", stats=stats)
        for key in ("forward_seconds", "micro_batches", "padding"):
            stage[key] = stats[key]
        return tuple((columns[output].values, columns[output].lengths) for output in outputs)

    def _asked(self, model: Any, whole: RolloutBatches, entropy: bool) -> tuple[_Column | None, ...]:
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


def padded_experience(samples: Samples, passes: Passes, stages: Stages, bar: Progress) -> ExperienceBatch | None:
    """Ask the models for a batch's log-probs and values, and measure the KL by its estimator k1.

    Returns:
        The batch, with `response_length`, `total_length` and the mean `kl` in `info`. `None` if the general path is
        needed: samples of an engine, packed or on a device, a row without a prompt, an action that is not attended, no
        policy or no reference, models that plan their own forward passes.
    """
    if type(samples) is not Samples:
        return None
    models = passes.models
    tokens, attention, actions = samples.sequences, samples.attention_mask, samples.action_mask
    if samples.rollouts is not None or samples.packed_seq_lens is not None or not _plain(tokens, attention, actions):
        return None
    if (
        "policy" not in models
        or "reference" not in models
        or "teacher" in models
        or any(map(is_planned, models.values()))
    ):
        return None
    attended = memory(attention)
    attended = attended if attended.dtype == np.bool_ else attended != 0
    mask = memory(actions)
    ends = _response_ends(attended, mask)
    if ends is None:
        return None
    columns: dict[str, torch.Tensor] = {}
    count = int(np.count_nonzero(attended))
    for name, model in models.items():
        with stages(name) as stage:
            if callable(getattr(model, "eval", None)):
                model.eval()
            answer = checked_answer(model, model(tokens, actions.shape[1], attention), tuple(actions.shape))
            columns[name] = _own_slots(answer, mask, ends)
            stage["tokens"] = count
        bar.advance()
    responses, totals = lengths_of_samples(samples)
    kl, means = _token_kl(columns["policy"], columns["reference"], mask, ends)
    batch = ExperienceBatch(
        tokens,
        columns["policy"],
        columns["reference"],
        columns.get("values"),
        None,
        None,
        attention,
        actions,
        {"kl": means, "response_length": responses, "total_length": totals},
        kl,
        None,
        samples.labels,
        samples.references,
    )
    if samples.ids is not None:
        batch.ids = list(samples.ids)
    return batch


def _plain(tokens: Any, attention: Any, actions: Any) -> bool:
    """Whether all three are matrices on the CPU that fit together."""
    for matrix in (tokens, attention, actions):
        if type(matrix) is not torch.Tensor or not matrix.is_cpu or matrix.dim() != 2:
            return False
    fit = tokens.shape == attention.shape and len(actions) == len(tokens) and actions.shape[1] <= tokens.shape[1]
    return fit and len(tokens) > 0 and actions.dtype == torch.bool and attention.dtype in NUMPY


def _response_ends(attended: NDArray[np.bool_], mask: NDArray[np.bool_]) -> list[int] | None:
    """[B] How many response slots each row has up to its last attended token; `None` if a row has no prompt, or an
    action that is not attended."""
    count, width = attended.shape
    begin = width - mask.shape[1]
    if np.greater(mask, attended[:, begin:]).any():
        return None
    flags, ends = attended.tobytes(), []  # searched as text, which takes a fraction of numpy's time
    for start in range(0, count * width, width):
        response = start + begin
        if flags.find(1, start, response) < 0:
            return None
        ends.append(max(flags.rfind(1, response, start + width) - response + 1, 0))
    return ends


def _own_slots(answer: torch.Tensor, mask: NDArray[np.bool_], ends: list[int]) -> torch.Tensor:
    """[B, A] A copy as float32, 0 after each row's end, and 0 for what is no number where nothing counts."""
    source = answer.detach().float().cpu().numpy()
    copied = empty(source.shape, torch.float32)
    matrix, squares = copied.numpy(), 0.0
    # Row by row: of a large batch most is padding, which is not read.
    for target, row, end in zip(matrix, source, ends, strict=True):
        part = row[:end]
        target[:end] = part
        target[end:] = 0
        squares += float(part.dot(part))
    if not isfinite(squares):  # some number is not finite, or the sum overflows
        matrix[~(mask | np.isfinite(matrix))] = 0
    return copied


def _token_kl(
    policy: torch.Tensor, reference: torch.Tensor, mask: NDArray[np.bool_], ends: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, A] The difference of log-probs, 0 where nothing counts, and [B] its mean over the slots that count."""
    kl = empty(mask.shape, torch.float32)
    matrix, counts, parts = kl.numpy(), np.array(ends), []
    with np.errstate(invalid="ignore"):
        for target, ours, base, end in zip(matrix, policy.numpy(), reference.numpy(), ends, strict=True):
            parts.append(np.subtract(ours[:end], base[:end], out=target[:end]))
            target[end:] = 0
    lengths = counts
    if np.count_nonzero(mask) != counts.sum():
        matrix[~mask] = 0
        counts = np.count_nonzero(mask, axis=1)
    return kl, mean_by_row(np.concatenate(parts, dtype=np.float64), lengths, counts)


def forward_batch(
    model: Any,
    batch: ExperienceBatch,
    outputs: Sequence[str],
    *,
    token_budget: int = TOKEN_BUDGET,
    device: Any = None,
    stats: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Compute per-token outputs of a model for every row of a batch, without gradients and without dropout.

    Args:
        model: An actor, its reference, or a critic.
        batch: The batch; it stays as it is.
        outputs: As of `rollbook.models.forward.forward`.
        token_budget: Tokens of a micro-batch.
        device: Where results go. `None`: where the batch is.
        stats: A dict to be filled, as of `rollbook.models.forward.forward`.

    Returns:
        By name, (B, A) of a padded batch, `Rows` of a packed one.
    """
    rows = BatchRows.of(batch)
    flat = run_micro_batches(
        model,
        rows.tokens.lengths,
        rows.response_lengths,
        lambda chosen, packed: rows.batch(chosen, packed, model.device),
        outputs,
        token_budget=token_budget,
        stats=stats,
    )
    return {name: rows.lay_out(column, device) for name, column in flat.items()}


def native_batch(batch: ExperienceBatch) -> Batch:
    """What a model needs of an `ExperienceBatch`, as `Actor.token_stats` and `Critic.token_values` take it.

    Args:
        batch: A batch with at least one response-axis field.

    Returns:
        Tokens and media on the same memory, every response slot in the mask, in the same layout.
    """
    slimmed = slim(batch)
    spans = None if batch.layout == "packed" else _spans(slimmed)
    tokens, mask = slimmed.sequences, slimmed.action_mask
    if batch.layout == "packed":
        tokens = tokens if isinstance(tokens, Rows) else Rows(tokens)
    attended = None if batch.layout == "packed" else slimmed.attention_mask
    media = _model_names(divided(slimmed))
    return Batch(tokens=tokens, action_mask=mask, attention_mask=attended, media=media, spans=spans)


def _spans(slimmed: ExperienceBatch) -> tuple[Spans, Spans]:
    width, slots = widths(checked(slimmed))
    return spans_of_rows(slimmed.attention_mask, len(slimmed), width, slots, action_starts(slimmed, slots))


def _model_names(media: dict[str, list[Any] | None]) -> dict[str, list[Any]]:
    """Each sample's media by the model's names."""
    names = {name: BATCH_MEDIA.get(name, name.removeprefix("media.")) for name in media}
    return {names[name]: parts for name, parts in media.items() if parts is not None}


@dataclass(eq=False)
class BatchRows:
    """A batch without padding: N rows of tokens, how many of them are responses, and their media."""

    tokens: Ragged
    response_lengths: Lengths
    media: dict[str, list[Any]]
    spans: Spans | None
    """Where the responses lie in a padded batch; `None` of a packed one."""
    device: Any

    @classmethod
    def of(cls, batch: ExperienceBatch) -> BatchRows:
        """The rows of a batch."""
        slimmed = slim(batch)
        spans = _spans(slimmed)[1] if batch.layout == "padded" else None
        sheet: RaggedBatch = sheet_of_batch(slimmed)
        column = sheet.columns["sequences"]
        device = column.device if isinstance(column, torch.Tensor) else torch.device("cpu")
        flat = concatenated(column, sheet.tokens) if column is not None else torch.empty(0)
        tokens = as_column(flat.long(), offsets_of(sheet.tokens))
        return cls(tokens, sheet.responses, _model_names(sheet.media), spans, device)

    def batch(self, rows: Lengths, packed: bool, device: Any) -> Batch:
        """Some rows as a model takes them."""
        tokens = self.tokens.take(rows)
        media = {name: [parts[i] for i in rows.tolist()] for name, parts in self.media.items()}
        columns = BatchColumns(tokens.lengths, self.response_lengths[rows], tokens, media=media)
        return Batch.from_columns(columns, packed=packed, device=device)

    def lay_out(self, flat: torch.Tensor, device: Any) -> Any:
        """Results of all response slots, row after row, in the batch's layout."""
        placed = flat.to(self.device if device is None else device)
        return Rows(placed, self.response_lengths.tolist()) if self.spans is None else self.spans.pad(placed, 0)


def slim(batch: ExperienceBatch) -> ExperienceBatch:
    """The batch with what a model needs alone, sharing its memory."""
    slots = next((column for _, column in token_fields(batch, "response") if column is not None), None)
    if slots is None:
        raise ValueError("batch: no response-axis field is there to say where the responses are")
    if batch.layout == "packed":
        lengths = [len(row) for row in slots]
        device = batch.sequences[0].device if len(batch.sequences) else "cpu"
        mask: Any = Rows(torch.ones(sum(lengths), dtype=torch.bool, device=device), lengths)
    else:
        mask = torch.ones(slots.shape[:2], dtype=torch.bool, device=slots.device)
    counts = {name: batch.info[name] for name in ("image_num", "video_num") if batch.info and name in batch.info}
    fields = {name: getattr(batch, name) for name in (*BATCH_MEDIA, "media", "sequences", "attention_mask")}
    fields |= {"action_mask": mask, "action_starts": batch.action_starts, "info": counts or None}
    origin = Origin(media_rows=dict(batch.origin.media_rows))
    origin.absent = {name: rows for name, rows in batch.origin.absent.items() if name in BATCH_MEDIA}
    return ExperienceBatch.of(fields, origin)
