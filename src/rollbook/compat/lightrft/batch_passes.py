"""Passes of a model over an `ExperienceBatch`, in its own layout.

Invariant: what comes out is in the batch's order and layout, and depends on the plan by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollbook.algorithms.layout import as_column
from rollbook.batch import Batch
from rollbook.batch.columns import BatchColumns, Lengths
from rollbook.compat.lightrft.batch import ExperienceBatch, Origin, token_fields
from rollbook.compat.lightrft.layouts import action_starts, checked, sheet_of_batch, spans_of_rows, widths
from rollbook.compat.lightrft.ragged_batch import Sheet
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.media import divided
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import Rows, Spans, concatenated
from rollbook.models.forward import TOKEN_BUDGET, run_micro_batches


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
        sheet: Sheet = sheet_of_batch(slimmed)
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
