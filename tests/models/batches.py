"""Batches of LightRFT as native batches, to run models on LightRFT's layouts."""

from __future__ import annotations

from typing import Any

import torch

from rollbook import Batch
from rollbook.compat.lightrft.batch import BATCH_MEDIA, ExperienceBatch, Origin, token_fields
from rollbook.compat.lightrft.ragged_batch import action_starts, check_fields, find_spans, split_media, widths
from rollbook.core.rows import Rows, Spans


def native_batch(batch: ExperienceBatch) -> Batch:
    """Convert an `ExperienceBatch` to a `Batch` for `Actor.token_stats` and `Critic.token_values`.

    Args:
        batch: A batch with at least one response-axis field.

    Returns:
        Tokens and media on the same memory, every response slot in the mask, in the same layout.
    """
    model_fields = select_model_fields(batch)
    spans = None if batch.layout == "packed" else _spans(model_fields)
    tokens, mask = model_fields.sequences, model_fields.action_mask
    if batch.layout == "packed":
        tokens = tokens if isinstance(tokens, Rows) else Rows(tokens)
    attended = None if batch.layout == "packed" else model_fields.attention_mask
    media = _model_names(split_media(model_fields))
    return Batch(tokens=tokens, action_mask=mask, attention_mask=attended, media=media, spans=spans)


def _spans(model_fields: ExperienceBatch) -> tuple[Spans, Spans]:
    width, slots = widths(check_fields(model_fields))
    return find_spans(model_fields.attention_mask, len(model_fields), width, slots, action_starts(model_fields, slots))


def _model_names(media: dict[str, list[Any] | None]) -> dict[str, list[Any]]:
    """Return the media of each sample by the model's names."""
    names = {name: BATCH_MEDIA.get(name, name.removeprefix("media.")) for name in media}
    return {names[name]: parts for name, parts in media.items() if parts is not None}


def select_model_fields(batch: ExperienceBatch) -> ExperienceBatch:
    """Return a batch with only the fields that a model reads, on the same memory."""
    slots = next((column for _, column in token_fields(batch, "response") if column is not None), None)
    if slots is None:
        raise ValueError("batch: missing a response-axis field, which gives the response slots")
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
