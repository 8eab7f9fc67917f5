"""More tiny models, each with something of its own between hidden states and logits; and records to score."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from rollbook import Experience, Experiences
from rollbook.batch import Batch
from rollbook.core.experiences import as_experiences
from rollbook.core.rows import Rows
from rollbook.models.forward import forward, without_adapters
from rollbook.models.logprobs import TokenStats
from tests import tiny

TEXT: dict[str, Any] = {"vocab_size": 300, **tiny.SIZES}


def _build(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def gemma2() -> Any:
    """A soft cap that is small enough to bend these logits."""
    return _build(transformers.Gemma2Config(**TEXT, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8))


def cohere() -> Any:
    """Logits are multiplied."""
    return _build(transformers.CohereConfig(**TEXT, logit_scale=0.25))


def granite() -> Any:
    """Logits are divided, and embeddings and residuals scaled."""
    return _build(transformers.GraniteConfig(**TEXT, logits_scaling=4.0, embedding_multiplier=2.0))


def gptj() -> Any:
    """An output layer with a bias."""
    config = transformers.GPTJConfig(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = _build(config)
    torch.nn.init.normal_(model.lm_head.bias, std=1.0, generator=torch.Generator().manual_seed(1))
    return model


TEXTS = {
    "llama": tiny.llama,
    "qwen3": tiny.qwen3,
    "gpt2": tiny.gpt2,
    "gemma2": gemma2,
    "cohere": cohere,
    "granite": granite,
    "gptj": gptj,
}


@functools.cache
def text(name: str) -> Any:
    """One of `TEXTS`, made once; not to be changed."""
    return TEXTS[name]()


def records(shapes: Sequence[tuple[int, int]], vocab: int = 300, seed: int = 0) -> list[Experience]:
    """Random tokens: (prompt, response) lengths."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for prompt, response in shapes:
        ids = torch.randint(9, vocab, (prompt + response,), generator=draw)
        kind = {} if prompt and response else {"experience_type": "multi_turn", "action_mask": [True] * response}
        rows.append(Experience(tokens=ids, prompt_length=prompt, **kind))
    return rows


def batch_of(records: Sequence[Experience], **options: Any) -> Batch:
    """What a model needs of records."""
    return Batch.from_records(Experiences(records), ("tokens",), **options)


def stats_of(actor: Any, records: Sequence[Experience], packed: bool | None = None, **options: Any) -> TokenStats:
    """Log-probs and entropies of records in one pass, a row for each."""
    batch = batch_of(records, packed=actor.packs_cheaply if packed is None else packed)
    stats = actor.token_stats(batch, **options)
    return TokenStats(*(None if column is None else by_record(batch, column) for column in stats))  # type: ignore[arg-type]


def values_of(critic: Any, records: Sequence[Experience]) -> Rows:
    """Values of records in one pass, a row for each."""
    batch = batch_of(records, packed=critic.packs_cheaply)
    return by_record(batch, critic.token_values(batch))


def by_record(batch: Batch, column: Any) -> Rows:
    """A row for each record, out of (B, A) or `Rows`."""
    return Rows(batch.flatten_response(column), batch.pack().response_cu_seqlens.diff().tolist())


def naive(model: Any, record: Experience, temperature: float = 1.0, suppress: Sequence[int] = (), **media: Any) -> Any:
    """(log-probs, entropies) [R] of a record's response from the model's own logits, the record alone: the reference
    that shares no code with what is tested. Slots without a token before them are 0."""
    tokens = record.tokens.long()
    if hasattr(model, "model") and hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    logits = model(input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None], **media).logits[0]
    logits = logits.float() / temperature
    if suppress:
        banned = torch.zeros(logits.shape[-1], dtype=torch.bool)
        banned[list(suppress)] = True
        logits = logits.masked_fill(banned, -torch.inf)
    every = torch.log_softmax(logits, -1)
    picked = every[:-1].gather(1, tokens[1:, None])[:, 0]
    entropy = -(every.exp() * every.masked_fill(every == -torch.inf, 0)).sum(-1)[:-1]
    start = record.prompt_length
    if start == 0:
        blank = picked.new_zeros(1)
        return torch.cat([blank, picked]), torch.cat([blank, entropy])
    return picked[start - 1 :], entropy[start - 1 :]


@dataclass
class Scores:
    """Columns that `forward` computed, and its statistics."""

    logprobs: Any = None
    entropy: Any = None
    values: Any = None
    stats: dict[str, float] = field(default_factory=dict)


def policy_log_probs(actor: Any, data: Any, *, entropy: bool = False, **options: Any) -> Scores:
    """`forward` for log-probs, and entropies if asked for, of any records."""
    scores = Scores()
    outputs = ("logprobs", "entropy") if entropy else ("logprobs",)
    for name, column in forward(actor, as_experiences(data), outputs, stats=scores.stats, **options).items():
        setattr(scores, name, column)
    return scores


def reference_log_probs(reference: Any, data: Any, **options: Any) -> Scores:
    """`policy_log_probs` with the adapters off."""
    return policy_log_probs(without_adapters(reference), data, **options)


def values(critic: Any, data: Any, **options: Any) -> Scores:
    """`forward` for values of any records."""
    stats: dict[str, float] = {}
    columns = forward(critic, as_experiences(data), ("values",), stats=stats, **options)
    return Scores(values=columns["values"], stats=stats)
