"""Passes over many records or a whole batch, in planned micro-batches: log-probs of a policy or reference, and values.

Invariant: what comes out is the input's order and layout, and depends on the plan by rounding alone; the caller's own
micro-batches are not known here. A model is after a pass as it was before: modes, gradients, adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import as_column
from rollbook.batch.plan import Layout, plan
from rollbook.compat.lightrft.batch import ExperienceBatch, Origin, token_fields
from rollbook.compat.lightrft.layouts import action_starts, checked, sheet_of_batch, spans_of_rows, widths
from rollbook.compat.lightrft.layouts import packed as packed_batch
from rollbook.compat.lightrft.layouts import padded as padded_batch
from rollbook.compat.lightrft.ragged_batch import Lengths, Sheet, constant
from rollbook.compat.lightrft.records import sheet_of_experiences
from rollbook.core.checks import check_int
from rollbook.core.fields import BATCH_MEDIA
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import Rows, Spans, concatenated
from rollbook.models.heads import scoring, text_config

_LOGITS = 1 << 28
"""Entries of logits that a micro-batch may make where a model leaves no other way: 1 GiB of float32."""


@dataclass
class Scores:
    """What a pass found: `log_probs` and, if asked for, `entropy`; of a critic `values`.

    Each is a `Ragged` column with a row for each record, or in the layout of the batch that was given. `stats`:
    `seconds` in all, `forward_seconds` in the model, `micro_batches`, `tokens` that were in them, `slots` that were
    scored, `padding` (the share of what was computed that was padding).

    >>> Scores(stats={"tokens": 7.0}).entropy is None
    True
    """

    log_probs: Any = None
    entropy: Any = None
    values: Any = None
    stats: dict[str, float] = field(default_factory=dict)


def policy_log_probs(
    actor: Any,
    data: Any,
    *,
    token_budget: int = 16384,
    packed: bool | None = None,
    entropy: bool = False,
    temperature: float | None = None,
    device: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Log-probs of every response token under an actor, without gradients and without dropout.

    `data`: `Experiences`, a list of records, or an `ExperienceBatch`. Micro-batches hold at most `token_budget` tokens
    (a longer record is alone), and are planned over all of the input. `packed=None` packs where the model keeps
    packed samples apart and attention does not pay for it (see `Actor.packs_cheaply`), else micro-batches are padded,
    of records of like length. Results of a batch go to `device`, its own unless told; those of records are columns
    on the host. `progress(done, of)` is told of tokens after each micro-batch.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2), Experience(tokens=[5, 6, 7], prompt_length=2)]
    >>> policy_log_probs(actor, records).log_probs.lengths.tolist()
    [2, 1]
    """
    if not hasattr(actor, "token_stats"):
        raise ValueError(f"actor: got {type(actor).__name__}, expected an Actor or its reference()")
    options: dict[str, Any] = {"entropy": entropy} | ({} if temperature is None else {"temperature": temperature})
    budget = token_budget
    if getattr(actor, "head_path", None) == "logits" and hasattr(actor, "config"):
        budget = min(budget, max(_LOGITS // int(text_config(actor).vocab_size), 1))

    def score(batch: ExperienceBatch) -> list[Any]:
        return list(actor.token_stats(batch, **options))

    found, stats = _passes(actor, data, score, 2 if entropy else 1, budget, packed, device, progress)
    return Scores(log_probs=found[0], entropy=found[1] if entropy else None, stats=stats)


def reference_log_probs(reference: Any, data: Any, **options: Any) -> Scores:
    """`policy_log_probs` of a reference model; an actor that has adapters is taken with them off.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2)]
    >>> now, then = policy_log_probs(actor, records), reference_log_probs(actor.reference(), records)
    >>> now.log_probs[0].tolist() == then.log_probs[0].tolist()
    True
    """
    from rollbook.models.actor import Actor
    from rollbook.models.lora import has_adapters

    if isinstance(reference, Actor) and has_adapters(reference.model):
        reference = reference.reference()
    return policy_log_probs(reference, data, **options)


def values(
    critic: Any,
    data: Any,
    *,
    token_budget: int = 16384,
    packed: bool | None = None,
    device: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """A critic's value of the state before every response token; all else as `policy_log_probs`.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Critic
    >>> critic = Critic(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                             num_attention_heads=2, max_position_embeddings=16))
    >>> values(critic, [Experience(tokens=[1, 2, 3, 4], prompt_length=2)]).values[0].tolist()
    [0.0, 0.0]
    """
    if not hasattr(critic, "token_values"):
        raise ValueError(f"critic: got {type(critic).__name__}, expected a Critic")

    def score(batch: ExperienceBatch) -> list[Any]:
        return [critic.token_values(batch)]

    found, stats = _passes(critic, data, score, 1, token_budget, packed, device, progress)
    return Scores(values=found[0], stats=stats)


# --- the input as rows ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Rowwise:
    """The input of a pass without padding: N rows of tokens, how many of them are responses, and their media."""

    tokens: Ragged
    responses: Lengths
    media: dict[str, list[Any] | None]
    spans: Spans | None = None
    """Where the responses lie in a padded batch; `None` of records and of packed ones."""
    source: str = "records"
    device: Any = "cpu"

    @classmethod
    def of(cls, data: Any) -> Rowwise:
        """From records or a batch."""
        if isinstance(data, ExperienceBatch):
            return cls._of_batch(data)
        return cls._of_sheet(sheet_of_experiences(data), None, "records")

    @classmethod
    def _of_batch(cls, batch: ExperienceBatch) -> Rowwise:
        slimmed = slim(batch)
        spans = None
        if batch.layout == "padded":
            width, slots = widths(checked(slimmed))
            starts = action_starts(slimmed, slots)
            spans = spans_of_rows(slimmed.attention_mask, len(batch), width, slots, starts)[1]
        return cls._of_sheet(sheet_of_batch(slimmed), spans, batch.layout)

    @classmethod
    def _of_sheet(cls, sheet: Sheet, spans: Spans | None, source: str) -> Rowwise:
        tokens = sheet.columns["sequences"]
        device = tokens.device if isinstance(tokens, torch.Tensor) else torch.device("cpu")
        if not isinstance(tokens, Ragged):
            whole = concatenated(tokens, sheet.tokens) if tokens is not None else torch.empty(0)
            tokens = as_column(whole.long(), offsets_of(sheet.tokens))
        return cls(tokens, sheet.responses, sheet.media, spans, source, device)

    def batch(self, rows: Any, *, packed: bool, device: Any) -> ExperienceBatch:
        """Some rows (`None`: all) as a model takes them, with nothing but what it needs.

        Padding is token 0, which every vocabulary has: a padding token need not be one of the model's.
        """
        chosen = np.arange(len(self.responses)) if rows is None else np.asarray(rows)
        tokens = self.tokens.take(chosen)
        responses = self.responses[chosen]
        sheet = Sheet(tokens.lengths, responses, Origin(), long_tokens=True)
        sheet.columns["sequences"] = tokens
        sheet.columns["attention_mask"] = constant(1, int(tokens.lengths.sum()), torch.int64)
        sheet.columns["action_mask"] = constant(1, int(responses.sum()), torch.bool)
        for name, parts in self.media.items():
            picked = [None] * len(chosen) if parts is None else [parts[i] for i in chosen.tolist()]
            sheet.media[name] = picked
        sheet.move(device)
        return packed_batch(sheet) if packed else padded_batch(sheet, 0, "left")

    def rows(self, found: Any) -> Rows:
        """`Rows`, one for each of the input's, from what was computed of `batch(None)`."""
        if isinstance(found, Rows):
            return found
        spans = Spans.right_aligned(self.responses, found.shape[1])
        return Rows(spans.unpad(found), self.responses.tolist())

    def give(self, flat: torch.Tensor, device: Any) -> Any:
        """(slots,) results in the input's order, in its layout."""
        if self.source == "records":
            return as_column(flat, offsets_of(self.responses))
        placed = flat.to(self.device if device is None else device)
        return Rows(placed, self.responses.tolist()) if self.spans is None else self.spans.pad(placed, 0)


def slim(batch: ExperienceBatch, device: Any = None) -> ExperienceBatch:
    """The batch with what a model needs alone, sharing its memory; on `device`, if one is given."""
    slots = next((value for _, value in token_fields(batch, "response") if value is not None), None)
    if slots is None:
        raise ValueError("batch: no response-axis field is there to say where the responses are")
    if batch.layout == "packed":
        counts = [len(row) for row in slots]
        where = batch.sequences[0].device if len(batch.sequences) else "cpu"
        mask: Any = Rows(torch.ones(sum(counts), dtype=torch.bool, device=where), counts)
    else:
        mask = torch.ones(slots.shape[:2], dtype=torch.bool, device=slots.device)
    counts_of = {name: batch.info[name] for name in ("image_num", "video_num") if batch.info and name in batch.info}
    kept = {name: getattr(batch, name) for name in (*BATCH_MEDIA, "media", "sequences", "attention_mask")}
    given = {**kept, "action_mask": mask, "action_starts": batch.action_starts, "info": counts_of or None}
    origin = Origin(media_rows=dict(batch.origin.media_rows))
    origin.absent = {name: rows for name, rows in batch.origin.absent.items() if name in BATCH_MEDIA}
    made = ExperienceBatch.of(given, origin)
    return made if device is None else made.to_device(device)


# --- running ----------------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds that a device spent in the model, found out without waiting for it in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host = device, 0.0
        self.events: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def start(self) -> None:
        self._begun = self._now()

    def stop(self) -> None:
        if self.device.type == "cuda":
            self.events.append((self._begun, self._now()))
        else:
            self.host += self._now() - self._begun

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.host + float(sum(begun.elapsed_time(ended) for begun, ended in self.events)) / 1000


def _passes(
    model: Any,
    data: Any,
    score: Callable[[ExperienceBatch], list[Any]],
    results: int,
    token_budget: int,
    packed: bool | None,
    device: Any,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Any], dict[str, float]]:
    """`score` over all rows that have a response, in planned micro-batches; its results in the input's layout."""
    began = time.perf_counter()
    budget = check_int("token_budget", token_budget, 1)
    rows = Rowwise.of(data)
    lengths = rows.tokens.lengths
    there = np.flatnonzero(rows.responses > 0)  # of the others nothing is asked
    if packed and not model.packs:
        raise ValueError("packed: got True, but the model does not keep packed samples apart; None lets it be padded")
    if packed is None:
        packed = bool(model.packs_cheaply)
    at: torch.device = model.device
    clock = _Clock(at)
    parts: list[list[torch.Tensor]] = [[] for _ in range(results)]
    order: list[Any] = []
    done = computed = steps = 0
    with scoring(model):
        layout: Layout = "packed" if packed else "padded"
        planned = plan(lengths[there], token_cap=budget, layout=layout, oversize="alone")[0] if len(there) else ()
        for micro in planned:
            chosen = there[micro.indices]
            batch = rows.batch(chosen, packed=packed, device=at)
            clock.start()
            found = score(batch)
            clock.stop()
            spans = Spans.right_aligned(rows.responses[chosen], int(rows.responses[chosen].max()))
            for kept, one in zip(parts, found, strict=False):
                kept.append((one.values if isinstance(one, Rows) else spans.unpad(one)).float())
            order.append(chosen)
            steps, done, computed = steps + 1, done + micro.tokens, computed + micro.size
            if progress is not None:
                progress(done, int(lengths[there].sum()))
        flat = [_in_order(kept, order, rows.responses) for kept in parts]
    forward = clock.seconds()
    given = [rows.give(one, device) for one in flat]
    stats = {
        "seconds": time.perf_counter() - began,
        "forward_seconds": forward,
        "micro_batches": float(steps),
        "tokens": float(done),
        "slots": float(rows.responses.sum()),
        "padding": 1 - done / computed if computed else 0.0,
    }
    return given, stats


def _in_order(parts: list[torch.Tensor], order: list[Any], responses: Lengths) -> torch.Tensor:
    """(slots,) on the host: the micro-batches' results, sample after sample in the input's order."""
    if not parts:
        return torch.zeros(int(responses.sum()))
    flat = torch.cat(parts).cpu()
    planned = np.concatenate(order)
    pieces = torch.split(flat, responses[planned].tolist())
    return torch.cat([pieces[i] for i in np.argsort(planned, kind="stable")])
