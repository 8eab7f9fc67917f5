"""Actors and critics: wrappers of transformers models, and forward passes over many records.

Names are imported on first use; transformers and peft when a model is built.

| name | description |
|---|---|
| `Actor` | policy: log-probs and entropies of response tokens, adapters, and the reference without them |
| `Critic` | value of each response token, from the state before it |
| `Policy`, `ValueModel` | protocols of the two, which is all that the trainer needs |
| `LogprobModel` | protocol of references and teachers |
| `Reference` | an actor with its adapters disabled |
| `forward.forward` | log-probs, entropies or values of many records, in planned micro-batches, without gradients |
| `best_attention` | the cheapest `attn_implementation` for packed batches on a device |
| `scoring` | context without dropout and gradients |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.models.actor import Actor as Actor
    from rollbook.models.actor import Critic as Critic
    from rollbook.models.head import scoring as scoring
    from rollbook.models.lora import Reference as Reference
    from rollbook.models.protocols import LogprobModel as LogprobModel
    from rollbook.models.protocols import Policy as Policy
    from rollbook.models.protocols import ValueModel as ValueModel
    from rollbook.models.varlen import best_attention as best_attention

_HOMES = {
    "Actor": "rollbook.models.actor",
    "Critic": "rollbook.models.actor",
    "LogprobModel": "rollbook.models.protocols",
    "Policy": "rollbook.models.protocols",
    "Reference": "rollbook.models.lora",
    "ValueModel": "rollbook.models.protocols",
    "best_attention": "rollbook.models.varlen",
    "scoring": "rollbook.models.head",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
