"""Which of a run's named numbers the reward is made of; all others are metrics that were logged beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rollbook.inspect.index import Index

DECLARED = "reward_parts"
"""The entry of a record's `info`, and the fact of the index, that names the parts a reward source declared."""
FITTED = 2000
"""Samples that the weights are fitted on, at most, spread evenly over the run."""
_PRESENT = 0.9
_ROWS_PER_COLUMN = 4


def reward_parts(index: Index) -> list[str]:
    """Names of the parts of the reward.

    Parts are what the reward source declared. Where it declared nothing, they are the numbers whose weighted sum is
    the reward: in every sample, up to rounding, with the same weights.

    >>> from rollbook.inspect.index import Index
    >>> index = Index()
    >>> index.put({"n": i, "uid": str(i), "gid": "g", "step": 0, "reward": i % 2 + 0.1 * (i % 3), "scored": 1,
    ...            "parts": json.dumps({"right": i % 2, "form": i % 3, "tool_errors": i % 7})} for i in range(40))
    >>> reward_parts(index)
    ['form', 'right']
    >>> index.close()
    """
    declared = index.fact(DECLARED, [])
    if declared:
        return list(declared)
    total = index.query("SELECT COUNT(*) FROM samples WHERE reward IS NOT NULL AND parts <> '{}'")[0][0]
    rows = index.query(
        "SELECT reward, parts FROM samples WHERE reward > -9e999 AND reward < 9e999 AND parts <> '{}' AND n % ? = 0",
        (max(1, total // FITTED),),
    )
    return _summands(np.array([row[0] for row in rows], np.float64), [json.loads(row[1]) for row in rows])


def _summands(reward: NDArray[np.float64], numbers: list[dict[str, float]]) -> list[str]:
    """Names of the columns whose weighted sum is `reward` [N]; none if no columns are."""
    from rollbook.inspect.doctor.statistics import fit_weights

    counts: dict[str, int] = {}
    for row in numbers:
        for name in row:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(name for name, count in counts.items() if count >= _PRESENT * len(numbers))
    use = [i for i, row in enumerate(numbers) if all(name in row for name in names)]
    reward = reward[use]
    if len(reward) < 2 or reward.min() == reward.max():
        return []
    columns = {name: np.array([numbers[i][name] for i in use], np.float64) for name in names}
    equal = [name for name, column in columns.items() if np.abs(column - reward).max() <= 1e-6 * np.abs(reward).max()]
    others = {name: column for name, column in columns.items() if name not in equal}
    if others and len(reward) >= _ROWS_PER_COLUMN * (len(others) + 1):
        weights = fit_weights(reward, others)
        if weights:
            return sorted(weights)
    return equal
