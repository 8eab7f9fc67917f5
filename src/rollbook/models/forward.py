"""Forward passes of a model over many records in planned micro-batches, without gradients.

Invariant: results are in the order of the records, and depend on the plan only by rounding. A pass does not change the
modes, gradients or adapters of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import as_column
from rollbook.batch import Batch
from rollbook.batch.columns import Lengths, count_tokens, read_columns
from rollbook.batch.plan import Layout, plan
from rollbook.core.checks import check_int
from rollbook.core.experience import Experience
from rollbook.core.experiences import Experiences
from rollbook.core.process_group import ProcessGroup
from rollbook.core.ragged import Ragged, compute_offsets
from rollbook.core.rows import concatenated
from rollbook.models.head import has_adapters, scoring, text_config
from rollbook.models.logprobs import TokenStats
from rollbook.models.protocols import LogprobModel, ValueModel

__all__ = ["forward"]

_MAX_LOGITS = 1 << 28
"""Entries of logits of a micro-batch, for models that need all logits: 1 GiB of float32."""
_FILLER = Experiences([Experience(tokens=[0, 0])])
"""Records of a micro-batch that does not count."""
TOKEN_BUDGET = 16384
"""Default number of tokens of a micro-batch."""


def forward(
    model: LogprobModel | ValueModel,
    records: Experiences,
    outputs: Sequence[str],
    *,
    token_budget: int = TOKEN_BUDGET,
    packed: bool | None = None,
    temperature: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    stats: dict[str, float] | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Ragged]:
    """Compute per-token outputs of a model for every record, without gradients and without dropout.

    Args:
        model: A `LogprobModel`, or a `ValueModel` for `values`.
        records: Records with tokens, prompt lengths and media; other fields are ignored.
        outputs: Names of the results: `entropy`, `values`, or any name of log-probs, such as `old_logprobs`.
        token_budget: Tokens of a micro-batch; a longer record is alone. Micro-batches are planned over all records.
        packed: Whether to pack the micro-batches. `None`: pack if the attention implementation makes it cheap.
        temperature: Sampling temperature; `None`: the actor's.
        progress: Called after each micro-batch with the number of tokens done, and of all tokens.
        stats: A dict that gets `seconds` in total, `forward_seconds` in the model, `micro_batches`, `tokens`, response
            `slots`, and `padding`, the share of padding among all computed tokens.
        process_group: The ranks over which the model is sharded, all of which make this call. Those with fewer
            micro-batches run more of them, of padding.

    Returns:
        By name, a float32 column on the host with a row for each record. Numbers that are not finite are replaced by 0
        where `action_mask` is False.

    Raises:
        ValueError: If the model does not compute these outputs, or a record is a preference pair.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = Experiences([Experience(tokens=[1, 2, 3, 4], prompt_length=2), Experience(tokens=[5, 6, 7])])
    >>> {name: column.lengths.tolist() for name, column in forward(actor, records, ("old_logprobs", "entropy")).items()}
    {'old_logprobs': [2, 2], 'entropy': [2, 2]}
    """
    lengths, response_lengths = count_tokens(records)
    # Log-probs give the response length of a truncated prompt.
    truncated = "prompt_truncated" in records.values("truncate_status")
    narrow = records.select("truncate_status", "multi_modal_inputs", *(["logprobs"] if truncated else []))
    start_time = time.perf_counter()
    is_critic = "values" in outputs
    if is_critic and len(outputs) > 1:
        raise ValueError(f"outputs: got {list(outputs)}, expected 'values' alone: another model computes the others")
    runner: Any = model
    if not hasattr(model, "token_values" if is_critic else "token_stats"):
        kind = type(model).__name__
        if is_critic:
            raise ValueError(f"model: got {kind}, expected a Critic")
        raise ValueError(f"model: got {kind}, expected an Actor or its reference()")
    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    budget = check_int("token_budget", token_budget, 1)
    if getattr(model, "head_path", None) == "logits" and hasattr(model, "config"):
        budget = min(budget, max(_MAX_LOGITS // int(text_config(model).vocab_size), 1))
    if packed and not getattr(runner, "packs", runner.packs_cheaply):
        raise ValueError("packed: got True, but the model does not separate packed samples; expected False or None")
    if packed is None:
        packed = bool(runner.packs_cheaply)
    layout: Layout = "packed" if packed else "padded"
    rows = np.flatnonzero(response_lengths > 0)  # the others have nothing to compute
    total_tokens = int(lengths[rows].sum())
    clock = None if stats is None else _Clock(model.device)
    parts: dict[str, list[torch.Tensor]] = {}
    order: list[Lengths] = []
    done = computed = 0
    with scoring(model):
        planned = plan(lengths[rows], token_cap=budget, layout=layout, oversize="alone")[0] if len(rows) else ()
        passes = [[len(planned)]] if process_group is None else process_group.gather([len(planned)])
        [max_passes] = max(passes)
        for micro in planned:
            chosen = rows[micro.indices]
            # Padded with token 0, which every vocabulary has; the pad token may be outside the model's.
            batch = Batch.from_records(narrow.take(chosen), ("tokens",), packed=packed, device=model.device)
            if clock is not None:
                clock.start()
            if is_critic:
                columns = TokenStats(runner.token_values(batch), None)
            else:
                columns = runner.token_stats(batch, entropy="entropy" in outputs, **options)
            if clock is not None:
                clock.stop()
            for name in outputs:
                column: Any = columns.entropy if name == "entropy" else columns.logprobs
                parts.setdefault(name, []).append(batch.flatten_response(column).float())
            order.append(chosen)
            done, computed = done + micro.tokens, computed + micro.size
            if progress is not None:
                progress(done, total_tokens)
        for _ in range(max_passes - len(planned)):
            filler = Batch.from_records(_FILLER, ("tokens",), packed=False, device=model.device)
            runner.token_values(filler) if is_critic else runner.token_stats(filler)

    # Response tokens of all rows in the order of the plan, and where each belongs.
    flat = dict.fromkeys(outputs, torch.zeros(0))
    if order:
        planned_rows = np.concatenate(order)
        counts = response_lengths[planned_rows]
        shifts = compute_offsets(response_lengths)[planned_rows] - compute_offsets(counts)[:-1]
        row_index = torch.from_numpy(np.arange(int(counts.sum())) + np.repeat(shifts, counts))
        for name, pieces in parts.items():
            column = torch.cat(pieces).cpu()
            flat[name] = torch.empty_like(column).index_copy_(0, row_index, column)
    if stats is not None and clock is not None:
        stats["forward_seconds"] = clock.seconds()
        stats["seconds"] = time.perf_counter() - start_time
        stats["micro_batches"], stats["tokens"] = float(len(planned)), float(done)
        stats["slots"] = float(response_lengths.sum())
        stats["padding"] = 1 - done / computed if computed else 0.0
    offsets = compute_offsets(response_lengths)
    results = {}
    for name, column in flat.items():
        if not isfinite(column.sum()):
            column = _zero_outside_mask(column, records)
        results[name] = as_column(column, offsets)
    return results


def _zero_outside_mask(column: torch.Tensor, records: Experiences) -> torch.Tensor:
    """Replace numbers that are not finite by 0 where the mask is False."""
    columns = read_columns(records, ("action_mask",))
    mask = columns.by_response_token["action_mask"]
    return torch.where((concatenated(mask, columns.response_lengths) != 0) | column.isfinite(), column, 0.0)


class _Clock:
    """Measures the seconds that a device spent in the model, without synchronizing in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host = device, 0.0
        self.events: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        if self.device.type == "cuda":
            self.events.append((self._started, self._now()))
        else:
            self.host += self._now() - self._started

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


def without_adapters(model: LogprobModel) -> LogprobModel:
    """Return the reference of an actor that has adapters; any other model as it is."""
    from rollbook.models.actor import Actor

    return model.reference() if isinstance(model, Actor) and has_adapters(model.model) else model
