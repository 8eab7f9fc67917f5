"""Actors and critics: thin wrappers over transformers models, and forward passes over many records at once.

Names load when they are first used; transformers and peft load when a model is made.

| name | what it is |
|---|---|
| `Actor` | a policy: log-probs and entropies of response tokens, sampling, adapters and the reference without them |
| `Critic` | a value for each response token, from the state before it |
| `Policy`, `ValueModel` | what the trainer asks of these two |
| `policy_log_probs`, `reference_log_probs`, `values` | of many records, in planned micro-batches, without gradients |
| `best_attention` | which `attn_implementation` packed batches are cheapest with, on a device in a precision |
| `scoring` | a context in which a model has no dropout and no gradients, and after which it is as it was |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core.lazy import lazily

if TYPE_CHECKING:
    from rollbook.models.actor import Actor as Actor
    from rollbook.models.critic import Critic as Critic
    from rollbook.models.head import scoring as scoring
    from rollbook.models.lora import Reference as Reference
    from rollbook.models.protocols import Policy as Policy
    from rollbook.models.protocols import ValueModel as ValueModel
    from rollbook.models.varlen import best_attention as best_attention

_HOMES = {
    "Actor": "rollbook.models.actor",
    "Critic": "rollbook.models.critic",
    "Policy": "rollbook.models.protocols",
    "Reference": "rollbook.models.lora",
    "ValueModel": "rollbook.models.protocols",
    "best_attention": "rollbook.models.varlen",
    "scoring": "rollbook.models.head",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
