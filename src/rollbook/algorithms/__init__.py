"""Pure functions of reinforcement fine-tuning: advantages, KL estimates, corrections and losses.

Invariant: nothing here imports a trainer, a book or a model. Rows are identified by id, never by position. Results do
not depend on the order of rows, on micro-batches or on padding, and are the same for padded and packed tokens.

| module | contents |
|---|---|
| `advantages` | advantage estimators (`ESTIMATORS`) and `estimate(name, records_or_batch)` |
| `kl` | k1, k2, k3 and other KL estimators; as a penalty or a loss; fixed and adaptive coefficients |
| `shaping` | penalties, clipping and normalization of rewards and advantages |
| `filters` | group filters (zero variance, dynamic sampling), row filters, high-entropy token masks |
| `corrections` | importance weights and diagnostics for off-policy tokens |
| `losses`, `aggregate` | policy, supervised, preference and value losses (`LOSSES`), and their aggregation |
| `groups`, `scan`, `layout`, `inputs`, `registry`, `results` | shared parts: group statistics, scans, token layouts |

>>> from rollbook import algorithms
>>> algorithms.advantages.grpo([1.0, 0.0, 0.5], ["a", "a", "b"], eps=0.0).advantages
tensor([ 0.7071, -0.7071,  0.0000])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.algorithms.advantages import ESTIMATORS as ESTIMATORS
    from rollbook.algorithms.advantages import estimate as estimate
    from rollbook.algorithms.filters import clip_filter_like_weight_func as clip_filter_like_weight_func
    from rollbook.algorithms.filters import high_entropy_mask as high_entropy_mask
    from rollbook.algorithms.groups import whiten as whiten
    from rollbook.algorithms.kl import KL as KL
    from rollbook.algorithms.losses import LOSSES as LOSSES
    from rollbook.core.process_group import ProcessGroup as ProcessGroup

_HOMES = {
    "ESTIMATORS": "rollbook.algorithms.advantages",
    "KL": "rollbook.algorithms.kl",
    "LOSSES": "rollbook.algorithms.losses",
    "ProcessGroup": "rollbook.core.process_group",
    "clip_filter_like_weight_func": "rollbook.algorithms.filters",
    "estimate": "rollbook.algorithms.advantages",
    "high_entropy_mask": "rollbook.algorithms.filters",
    "whiten": "rollbook.algorithms.groups",
}
_MODULES = (
    "advantages",
    "aggregate",
    "corrections",
    "filters",
    "groups",
    "inputs",
    "kl",
    "layout",
    "losses",
    "registry",
    "results",
    "scan",
    "shaping",
)

__all__ = [
    "ESTIMATORS",
    "KL",
    "LOSSES",
    "ProcessGroup",
    "clip_filter_like_weight_func",
    "estimate",
    "high_entropy_mask",
    "whiten",
]

__getattr__, __dir__ = lazily(__name__, _HOMES, _MODULES)
