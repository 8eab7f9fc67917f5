"""Passes of a model over many records in planned micro-batches, without gradients: log-probs, entropies and values.

Invariant: results are in the order of the records, and depend on the plan by rounding alone. A model is after a pass as
it was before: modes, gradients, adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch

from rollbook.algorithms.layout import as_column
from rollbook.batch import Batch
from rollbook.batch.columns import Lengths, read_columns, token_counts
from rollbook.batch.plan import Layout, plan
from rollbook.core.checks import check_int
from rollbook.core.experiences import Experiences, as_experiences
from rollbook.core.ragged import Ragged, offsets_of
from rollbook.core.rows import concatenated
from rollbook.models.head import scoring, text_config
from rollbook.models.protocols import Policy, ValueModel

_LOGITS = 1 << 28
"""Entries of logits that a micro-batch may make where a model leaves no other way: 1 GiB of float32."""
TOKEN_BUDGET = 16384
"""Tokens that go through a model at once, unless told otherwise."""


def forward(
    model: Policy | ValueModel,
    records: Experiences,
    outputs: Sequence[str],
    *,
    token_budget: int = TOKEN_BUDGET,
    packed: bool | None = None,
    temperature: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    stats: dict[str, float] | None = None,
) -> dict[str, Ragged]:
    """Compute per-token outputs of a model for every record, without gradients and without dropout.

    Args:
        model: A `Policy`, or a `ValueModel` for `values`.
        records: Records with tokens, prompt lengths and media; nothing else of them is run through the model.
        outputs: Names of the results: `entropy`, `values`, or any name of log-probs, such as `old_logprobs`.
        token_budget: Tokens of a micro-batch; a longer record is alone. Micro-batches are planned over all records.
        packed: Whether records go through the model packed. `None`: where that costs no more.
        temperature: What an actor's logits are divided by. `None`: its own.
        progress: Called with the tokens that are done, and all of them, after each micro-batch.
        stats: A dict to be filled: `seconds` in all, `forward_seconds` in the model, `micro_batches`, `tokens` in them,
            `slots` computed, and `padding`, the share of what was computed that was padding.

    Returns:
        By name, a float32 column on the host with a row for each record. A number that is not finite is 0 where
        `action_mask` is False.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = Experiences([Experience(tokens=[1, 2, 3, 4], prompt_length=2), Experience(tokens=[5, 6, 7])])
    >>> {name: column.lengths.tolist() for name, column in forward(actor, records, ("old_logprobs", "entropy")).items()}
    {'old_logprobs': [2, 2], 'entropy': [2, 2]}
    """
    lengths, response_lengths = token_counts(records)
    # Log-probs say how long the response of a truncated prompt is.
    truncated = "prompt_truncated" in records.values("truncate_status")
    narrow = records.select("truncate_status", "multi_modal_inputs", *(["logprobs"] if truncated else []))

    def make_batch(rows: Lengths, pack: bool) -> Batch:
        # Padded with token 0, which every vocabulary has: a padding token need not be one of the model's.
        return Batch.from_records(narrow.take(rows), ("tokens",), packed=pack, device=model.device)

    flat = run_micro_batches(
        model,
        lengths,
        response_lengths,
        make_batch,
        outputs,
        token_budget=token_budget,
        packed=packed,
        temperature=temperature,
        progress=progress,
        stats=stats,
    )
    offsets = offsets_of(response_lengths)
    return {name: as_column(_zero_outside_mask(values, records), offsets) for name, values in flat.items()}


def _zero_outside_mask(values: torch.Tensor, records: Experiences) -> torch.Tensor:
    if isfinite(values.sum()):  # then every number is
        return values
    columns = read_columns(records, ("action_mask",))
    mask = columns.by_token.get("action_mask")
    if mask is None:
        return values
    return torch.where((concatenated(mask, columns.response_lengths) != 0) | values.isfinite(), values, 0.0)


def run_micro_batches(
    model: Any,
    lengths: Lengths,
    response_lengths: Lengths,
    make_batch: Callable[[Lengths, bool], Batch],
    outputs: Sequence[str],
    *,
    token_budget: int = TOKEN_BUDGET,
    packed: bool | None = None,
    temperature: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    stats: dict[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Run a model over the rows that have a response, in planned micro-batches; other arguments as of `forward`.

    Args:
        lengths: [N] Tokens of each row.
        response_lengths: [N] Response tokens of each row.
        make_batch: Makes the batch of some rows, packed or not.

    Returns:
        By name, float32 numbers on the host, row after row.
    """
    began = time.perf_counter()
    _check_model(model, outputs)
    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    budget = check_int("token_budget", token_budget, 1)
    if getattr(model, "head_path", None) == "logits" and hasattr(model, "config"):
        budget = min(budget, max(_LOGITS // int(text_config(model).vocab_size), 1))
    if packed and not model.packs:
        raise ValueError("packed: got True, but the model does not keep packed samples apart; None lets it be padded")
    if packed is None:
        packed = bool(model.packs_cheaply)
    layout: Layout = "packed" if packed else "padded"
    rows = np.flatnonzero(response_lengths > 0)  # the others have nothing to compute
    clock = _Clock(model.device)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in outputs}
    order: list[Lengths] = []
    done = computed = 0
    with scoring(model):
        planned = plan(lengths[rows], token_cap=budget, layout=layout, oversize="alone")[0] if len(rows) else ()
        for micro in planned:
            chosen = rows[micro.indices]
            batch = make_batch(chosen, packed)
            clock.start()
            if "values" in outputs:
                columns = {"values": model.token_values(batch)}
            else:
                token_stats = model.token_stats(batch, entropy="entropy" in outputs, **options)
                columns = {name: token_stats.entropy if name == "entropy" else token_stats.logprobs for name in parts}
            clock.stop()
            for name, column in columns.items():
                parts[name].append(batch.flatten_response(column).float())
            order.append(chosen)
            done, computed = done + micro.tokens, computed + micro.size
            if progress is not None:
                progress(done, int(lengths[rows].sum()))
        flat = {name: _in_order(pieces, order, response_lengths) for name, pieces in parts.items()}
    if stats is not None:
        stats["forward_seconds"] = clock.seconds()
        stats["seconds"] = time.perf_counter() - began
        stats["micro_batches"], stats["tokens"] = float(len(planned)), float(done)
        stats["slots"] = float(response_lengths.sum())
        stats["padding"] = 1 - done / computed if computed else 0.0
    return flat


def _check_model(model: Any, outputs: Sequence[str]) -> None:
    if "values" not in outputs:
        if not hasattr(model, "token_stats"):
            raise ValueError(f"actor: got {type(model).__name__}, expected an Actor or its reference()")
    elif not hasattr(model, "token_values"):
        raise ValueError(f"critic: got {type(model).__name__}, expected a Critic")
    elif len(outputs) > 1:
        raise ValueError(f"outputs: got {list(outputs)}, expected 'values' alone, which is of another model")


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


def _in_order(parts: list[torch.Tensor], order: list[Any], responses: Lengths) -> torch.Tensor:
    """(slots,) on the host: the micro-batches' results, sample after sample in the input's order."""
    if not parts:
        return torch.zeros(int(responses.sum()))
    flat = torch.cat(parts).cpu()
    planned = np.concatenate(order)
    pieces = torch.split(flat, responses[planned].tolist())
    return torch.cat([pieces[i] for i in np.argsort(planned, kind="stable")])


# --- one model's results ----------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Results of a pass over records: `logprobs` and, if asked for, `entropy`; of a critic `values`.

    Each is a `Ragged` column with a row for each record. `stats` are those of `forward`.

    >>> Scores(stats={"tokens": 7.0}).entropy is None
    True
    """

    logprobs: Any = None
    entropy: Any = None
    values: Any = None
    stats: dict[str, float] = field(default_factory=dict)


def policy_log_probs(
    actor: Any,
    data: Any,
    *,
    token_budget: int = TOKEN_BUDGET,
    packed: bool | None = None,
    entropy: bool = False,
    temperature: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Compute log-probs of every response token under an actor, without gradients and without dropout.

    Args:
        actor: An `Actor`, or its `reference()`.
        data: Records.
        token_budget: As of `forward`.
        packed: As of `forward`.
        entropy: Whether to compute entropies, too.
        temperature: What logits are divided by. `None`: the actor's.
        progress: Called with the tokens that are done, and all of them, after each micro-batch.

    Returns:
        Columns on the host.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2), Experience(tokens=[5, 6, 7], prompt_length=2)]
    >>> policy_log_probs(actor, records).logprobs.lengths.tolist()
    [2, 1]
    """
    stats: dict[str, float] = {}
    columns = forward(
        actor,
        as_experiences(data),
        ("logprobs", "entropy") if entropy else ("logprobs",),
        token_budget=token_budget,
        packed=packed,
        temperature=temperature,
        progress=progress,
        stats=stats,
    )
    return Scores(logprobs=columns["logprobs"], entropy=columns.get("entropy"), stats=stats)


def reference_log_probs(reference: Any, data: Any, **options: Any) -> Scores:
    """`policy_log_probs` of a reference model; an actor that has adapters is taken with them off.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Actor
    >>> actor = Actor(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                           num_attention_heads=2, max_position_embeddings=16))
    >>> records = [Experience(tokens=[1, 2, 3, 4], prompt_length=2)]
    >>> now, then = policy_log_probs(actor, records), reference_log_probs(actor.reference(), records)
    >>> now.logprobs[0].tolist() == then.logprobs[0].tolist()
    True
    """
    return policy_log_probs(without_adapters(reference), data, **options)


def without_adapters(model: Any) -> Any:
    """The reference of an actor that has adapters; any other model as it is."""
    from rollbook.models.actor import Actor
    from rollbook.models.lora import has_adapters

    return model.reference() if isinstance(model, Actor) and has_adapters(model.model) else model


def values(critic: Any, data: Any, *, token_budget: int = TOKEN_BUDGET, packed: bool | None = None) -> Scores:
    """Compute a critic's value of the state before every response token; arguments as of `policy_log_probs`.

    >>> from rollbook import Experience
    >>> from transformers import LlamaConfig
    >>> from rollbook.models import Critic
    >>> critic = Critic(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...                             num_attention_heads=2, max_position_embeddings=16))
    >>> values(critic, [Experience(tokens=[1, 2, 3, 4], prompt_length=2)]).values[0].tolist()
    [0.0, 0.0]
    """
    stats: dict[str, float] = {}
    columns = forward(critic, as_experiences(data), ("values",), token_budget=token_budget, packed=packed, stats=stats)
    return Scores(values=columns["values"], stats=stats)
