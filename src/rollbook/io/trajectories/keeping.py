"""Which samples of a rollout are kept: whole groups, half by chance and half by what they show.

Invariant: a choice depends on step, prefix and candidates alone, not on their order or on which rank they came from;
exactly as many are kept as were asked for, or all. Each kept sample says why, and one kept by chance how many it stands
for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.io.trajectories.sample import Candidate

KEEP = ("auto", "groups", "first", "random")


@dataclass
class Kept:
    """A chosen candidate: why, and (kept by chance) the number of samples it stands for."""

    candidate: Candidate
    why: list[str] = field(default_factory=list)
    weight: float | None = None

    @property
    def reason(self) -> str:
        """Every reason, in order."""
        return ", ".join(dict.fromkeys(self.why))


def choose(candidates: Sequence[Candidate], count: int, keep: str | Callable[..., Any], seed: str) -> list[Kept]:
    """`count` of the candidates, or all if there are no more, in the order in which they came.

    - `groups`: half of them by chance, as whole groups (samples of one prompt), the rest by what they show: the best,
      the worst, a group without variance, truncated, the largest difference of log-probs, the longest, errors, each
      with its group as far as there is room; then the next best, and so on.
    - `first`: the first, in turn from each rank. `random`: any, by chance.
    - `auto`: `groups` where samples have ids, which say of what group they are; else `first`.
    - a function of the candidates and `count`: it gives the chosen ones, or pairs of one and why.

    >>> rewards = {"a": [1, 0, 0, 1], "b": [0, 0, 0, 0], "c": [1, 1, 1, 0]}
    >>> every = [
    ...     Candidate(0, i, 0, i, f"{name}{run}", name, True, reward, 10)
    ...     for i, (name, run, reward) in enumerate((g, r, x) for g, xs in rewards.items() for r, x in enumerate(xs))
    ... ]
    >>> [(one.candidate.uid, one.reason, one.weight) for one in choose(every, 6, "groups", "3")]
    [('a0', 'random', 3.0), ('a1', 'random', 3.0), ('a2', 'random', 3.0), ('a3', 'random', 3.0),
     ('c2', 'best', None), ('c3', 'with best', None)]
    """
    if len(candidates) <= count:
        return [Kept(one, ["all"], 1.0) for one in candidates]
    if count <= 0:
        return []
    if callable(keep):
        return _asked(candidates, count, keep)
    if keep == "auto":
        keep = "groups" if any(one.named for one in candidates) else "first"
    if keep == "first":
        turns = sorted(candidates, key=lambda one: (one.index, one.rank))[:count]
        return _ordered(candidates, {one.uid: Kept(one, ["first"]) for one in turns})
    # By uid: the same whatever order the ranks' samples came in.
    lots = random.Random(seed)
    known = sorted(candidates, key=lambda one: one.uid)
    if keep == "random":
        share = len(known) / count
        return _ordered(candidates, {one.uid: Kept(one, ["random"], share) for one in lots.sample(known, count)})
    return _ordered(candidates, _Groups(known, lots).chosen(count))


def _ordered(candidates: Sequence[Candidate], kept: dict[str, Kept]) -> list[Kept]:
    return [kept[one.uid] for one in candidates if one.uid in kept]


def _asked(candidates: Sequence[Candidate], count: int, keep: Callable[..., Any]) -> list[Kept]:
    """What a user's function chose, checked."""
    known = {one.uid: one for one in candidates}
    kept: dict[str, Kept] = {}
    for given in keep(list(candidates), count):
        one, why = given if isinstance(given, tuple) and len(given) == 2 else (given, "chosen")
        if not isinstance(one, Candidate) or one.uid not in known:
            raise ValueError(f"keep: got {one!r}, expected some of the candidates, or pairs of one and why")
        kept[one.uid] = Kept(known[one.uid], [str(why)])
    return _ordered(candidates, dict(list(kept.items())[:count]))


class _Groups:
    """Candidates by group, and those of each kind from the most telling on."""

    def __init__(self, candidates: list[Candidate], lots: random.Random) -> None:
        self.lots = lots
        self.groups: dict[str, list[Candidate]] = {}
        for one in candidates:
            self.groups.setdefault(one.group, []).append(one)
        # Ties, of which rewards of 0 and 1 have many, are broken by lot, in one order for all.
        order = list(candidates)
        lots.shuffle(order)
        scored = [one for one in order if one.reward is not None and not math.isnan(one.reward)]
        flat = {name for name, some in self.groups.items() if _no_variance(some)}
        self.telling: dict[str, list[Candidate]] = {
            "best": sorted(scored, key=lambda one: -(one.reward or 0.0)),
            "worst": sorted(scored, key=lambda one: one.reward or 0.0),
            "zero variance": _one_each(one for one in order if one.group in flat),
            "truncated": [one for one in order if one.truncated],
            "mismatch": sorted((one for one in order if one.mismatch), key=lambda one: -(one.mismatch or 0.0)),
            "longest": sorted(order, key=lambda one: -one.tokens),
            "error": [one for one in order if one.error],
        }
        self.all = candidates

    def chosen(self, count: int) -> dict[str, Kept]:
        """`count` of them, by uid."""
        kept = self._by_lot(count)
        queues = {why: list(reversed(some)) for why, some in self.telling.items()}
        while len(kept) < count:
            for why, queue in queues.items():
                self._next(why, queue, kept, count)
        return kept

    def _by_lot(self, count: int) -> dict[str, Kept]:
        """Half of them: as many whole groups as fit into it, at least one; of groups that are larger, single ones."""
        half = -(-count // 2)
        largest = max(map(len, self.groups.values()))
        if largest > count:
            share = len(self.all) / half
            return {one.uid: Kept(one, ["random"], share) for one in self.lots.sample(self.all, half)}
        names = self.lots.sample(sorted(self.groups), min(max(1, half // largest), len(self.groups)))
        share = len(self.groups) / len(names)
        return {one.uid: Kept(one, ["random"], share) for name in names for one in self.groups[name]}

    def _next(self, why: str, queue: list[Candidate], kept: dict[str, Kept], count: int) -> None:
        """Keep the most telling of a kind that has not had its turn, with its group; if it is kept already, say so."""
        if not queue or len(kept) >= count:
            return
        one = queue.pop()
        if one.uid in kept:
            kept[one.uid].why.append(why)
            return
        kept[one.uid] = Kept(one, [why])
        others = [other for other in self.groups[one.group] if other.uid not in kept]
        for other in _telling_apart(others, one)[: count - len(kept)]:
            kept[other.uid] = Kept(other, [f"with {why}"])


def _no_variance(some: list[Candidate]) -> bool:
    rewards = {one.reward for one in some}
    return len(some) > 1 and len(rewards) == 1 and None not in rewards


def _one_each(some: Iterable[Candidate]) -> list[Candidate]:
    """The first of each group."""
    return list({one.group: one for one in reversed(list(some))}.values())[::-1]


def _telling_apart(some: list[Candidate], one: Candidate) -> list[Candidate]:
    """From both ends, by reward, the end that `one` is further from first: where a group does not fit whole, those do
    that differ most."""
    ranked = sorted(some, key=_score)
    if ranked and _score(one) - _score(ranked[0]) < _score(ranked[-1]) - _score(one):
        ranked.reverse()
    return [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]


def _score(one: Candidate) -> float:
    return one.reward if one.reward is not None and math.isfinite(one.reward) else 0.0
