"""Verdicts: numbers that were recorded beside the same numbers computed again, and whether they are the same.

Invariant: `same` is equal to the last bit; whatever is not compared says why, and is never counted as agreement or as
difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SAME, ROUNDING, DIFFERS, NOT = "same", "differs by rounding", "differs", "not compared"
_PLAN = ("minibatch", "micro_batch", "weight", "left_out")


@dataclass(frozen=True)
class Check:
    """One thing that was recorded, and computed again.

    >>> Check("loss", 0.5, 0.5, 0.0, SAME).verdict
    'same'
    """

    what: str
    recorded: float | str | None
    recomputed: float | str | None
    difference: float | None
    """The largest; of a plan, how many records are elsewhere."""
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding.

    Numbers: up to `absolute`, and `relative` of the larger one. Log-probs and values: up to `tokens` on the average of
    all tokens, since a few unlikely ones can be far off.
    """

    absolute: float
    relative: float
    tokens: float
    update: float
    """Of new weights: the length of the difference, as a share of the update's."""

    def __str__(self) -> str:
        numbers = f"{self.absolute:g} and {self.relative:g} of a number"
        return f"{numbers}, {self.tokens:g} on the average over tokens, {self.update:g} of an update"


HERE = Tolerance(1e-5, 1e-3, 1e-4, 1e-2)
"""Of a run that was trained in float32 on a CPU, as it is replayed."""
ELSEWHERE = Tolerance(5e-3, 1e-1, 3e-2, 5e-1)
"""Of one that was trained on a GPU, or in bfloat16."""

EXACT = Tolerance(2e-9, 1e-9, 0.0, 0.0)
"""Of counts, rates and shares, which no model is asked for."""
COUNTS = ("lr", "updates", "skipped", "rows")
_FIRST = ("loss", "grad_norm", "policy/pg_loss", "kl", "entropy", "critic/value_loss", "critic/grad_norm")


def rank(name: str) -> tuple[int, str]:
    """Where a metric stands: losses before others, counts last.

    >>> sorted(["lr", "policy/ppo_kl", "grad_norm", "loss"], key=rank)
    ['loss', 'grad_norm', 'policy/ppo_kl', 'lr']
    """
    if name in _FIRST:
        return _FIRST.index(name), ""
    return (len(_FIRST) if "/" in name and not name.startswith("left_out/") else len(_FIRST) + 1), name


def skipped(what: str, note: str, recorded: float | str | None = None) -> Check:
    """Something that is not compared, and why."""
    return Check(what, recorded, None, None, NOT, note)


def rows(
    what: str, recorded: Sequence[Any], recomputed: Sequence[Any], tolerance: Tolerance, *, size: bool = False
) -> Check:
    """Numbers of rows, or of their tokens: each must be within the tolerance. Shown is their mean, or with `size` that
    of their sizes.

    >>> rows("loss", [0.5], [0.50001], HERE).verdict, rows("loss", [0.5], [0.6], HERE).verdict
    ('differs by rounding', 'differs')
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Check(what, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _gap(old, new)
    most = np.maximum(np.abs(old), np.abs(new))
    near = gap <= tolerance.absolute + tolerance.relative * np.where(np.isfinite(most), most, 0.0)
    verdict = SAME if not gap.any() else ROUNDING if near.all() else DIFFERS
    shown = [_mean(np.abs(one) if size else one) for one in (old, new)]
    return Check(what, shown[0], shown[1], float(gap.max(initial=0.0)), verdict)


def tokens(what: str, recorded: Sequence[Any], recomputed: Sequence[Any], most: float, note: str = "") -> Check:
    """What a model says of tokens: the mean difference must be at most `most`.

    >>> tokens("log-probs", [[-1.0, -2.0]], [[-1.0, -2.001]], 1e-2).verdict
    'differs by rounding'
    """
    old, new = _flat(recorded), _flat(recomputed)
    if old.shape != new.shape:
        return Check(what, f"{old.size} numbers", f"{new.size} numbers", None, DIFFERS)
    gap = _gap(old, new)
    mean = float(gap.mean()) if gap.size else 0.0
    verdict = SAME if not gap.any() else ROUNDING if mean <= most else DIFFERS
    said = "; ".join(part for part in (note, f"mean difference {mean:.3g}" if mean else "") if part)
    return Check(what, _mean(old), _mean(new), float(gap.max(initial=0.0)), verdict, said)


def plans(recorded: Sequence[Mapping[str, Any]], recomputed: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Where records were, of each kind of place.

    >>> one = {"minibatch": 0, "micro_batch": 0, "weight": 0.5}
    >>> [each.verdict for each in plans([one, one], [one, {**one, "micro_batch": 1}])]
    ['same', 'differs by rounding', 'same']
    """
    if not any(name in one for one in recorded for name in _PLAN):
        return [skipped("plan", "the ledger has no places: another trainer acknowledged these records")]
    made: list[Check] = []
    pairs = list(zip(recorded, recomputed, strict=True))
    for name, what in (("minibatch", "plan: minibatches"), ("micro_batch", "plan: micro-batches")):
        names = (name, "left_out") if name == "minibatch" else (name,)
        odd = sum(any(old.get(each) != new.get(each) for each in names) for old, new in pairs)
        shown = [str(len({str(one[name]) for one in side if name in one})) for side in (recorded, recomputed)]
        note = ""
        verdict = DIFFERS if odd else SAME
        if odd and name == "micro_batch" and made[0].verdict == SAME:
            verdict = ROUNDING
            note = "cut for another token budget or layout, which changes numbers by rounding alone"
        made.append(Check(what, shown[0], shown[1], float(odd), verdict, note))
    weights = [[_listed(one.get("weight", 0.0)) for one in side] for side in (recorded, recomputed)]
    return [*made, rows("plan: shares of tokens", weights[0], weights[1], EXACT)]


def counted(row: Any, values: Any) -> Any:
    """What a field of a record says of the tokens that count.

    >>> from rollbook import Experience
    >>> row = Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False])
    >>> counted(row, [0.5, 0.7])
    array([0.5])
    """
    found = np.asarray(values, dtype=np.float64)
    return found if row.action_mask is None else found[np.asarray(row.action_mask, dtype=bool)]


def _listed(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def _flat(values: Sequence[Any]) -> Any:
    parts = [np.asarray(one, dtype=np.float64).reshape(-1) for one in values]
    return np.concatenate(parts) if parts else np.zeros(0)


def _gap(old: Any, new: Any) -> Any:
    """How far apart numbers are: not at all where both are the same infinity or both no number, infinitely where one
    is."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(old - new)
    gap[(old == new) | (np.isnan(old) & np.isnan(new))] = 0.0
    return np.where(np.isnan(gap), np.inf, gap)


def _mean(values: Any) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
