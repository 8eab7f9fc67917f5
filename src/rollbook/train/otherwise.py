"""A step under another choice: another estimator, loss option, reward or cut, from the same records and weights.

Invariant: both sides begin from the same weights, optimizer states and records; what is not changed is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollbook.core.experiences import Experiences
from rollbook.train import building
from rollbook.train.config.schema import Config, differences
from rollbook.train.learner import UpdateResult
from rollbook.train.rebuilding import Rebuilt, Weights, less, on_cpu, put_state
from rollbook.train.verdicts import counted, rank

_MAKING = ("algorithm.n", "algorithm.refill", "algorithm.drop_constant_groups")
"""Keys of an algorithm that say how records are made."""
_NAMES = ("algorithm.preset", "algorithm.name")
_OTHER = ("algorithm.", "batch.", "optimizer.", "critic_optimizer", "rewards", "steps")
"""Where another choice can be put in the place of a recorded one."""


@dataclass(frozen=True)
class Moved:
    """A record whose advantage another choice changes."""

    uid: str
    prompt: str
    reward: tuple[float, float]
    """As it was trained, and as it would have been."""
    advantage: tuple[float, float]
    """Means over its tokens."""


@dataclass(frozen=True)
class Changed:
    """A step under another choice, beside the step as it was; of two numbers the first is of what was trained."""

    changes: list[str]
    numbers: dict[str, tuple[float | None, float | None]]
    """By name: mean sizes of advantages, losses, metrics, gradient and update."""
    signs: int
    """How many records have an advantage of another sign."""
    rows: int
    """How many records have an advantage."""
    correlation: float | None
    """Between the advantages of records."""
    cosine: float | None
    """Between the two updates of the policy's weights."""
    moved: list[Moved]
    """The records whose advantage changes most."""
    notes: list[str] = field(default_factory=list)


def choices(config: Config, other: Config) -> tuple[list[str], list[str]]:
    """What another configuration changes, of all that a replay can change; and what it changes that is not replayed.

    >>> choices(Config(), Config.of({"algorithm": {"preset": "grpo", "estimator": "rloo", "n": 4}}))
    (['algorithm.estimator: "rloo", was "grpo"'], ['algorithm.n'])
    >>> choices(Config(), Config(seed=1))
    Traceback (most recent call last):
        ...
    ValueError: seed: got another value, and the records are what they are, expected changes of algorithm, rewards, batch or optimizer
    """  # noqa: E501
    found = differences(on_cpu(config), on_cpu(other))
    for one in found:
        if not one.path.startswith(_OTHER) or one.path == "batch.prompts":
            raise ValueError(
                f"{one.path}: got another value, and the records are what they are, expected changes of algorithm, "
                "rewards, batch or optimizer"
            )
    made = [str(one) for one in found if one.path not in (*_MAKING, *_NAMES)]
    if not made:
        said = ", ".join(one.path for one in found) or "the run's own values"
        raise ValueError(f"changes: got {said}, which changes nothing of a step whose records are there")
    return made, [one.path for one in found if one.path in _MAKING]


def change(
    run: Rebuilt,
    other: Config,
    *,
    state: Mapping[str, Any],
    weights: Weights,
    trained: tuple[Experiences, UpdateResult, torch.Tensor],
) -> Changed:
    """The step of `run` under another configuration. `state`, `weights`: what the step began with. `trained`: the
    records as they were learnt from, what came of it, and the update of the policy's weights."""
    before, learned, update = trained
    made, left = choices(run.config, other)
    notes = [f"{name}: of how records are made, which they are already; not replayed" for name in left]
    own = run.own
    run.put(weights)
    if other.algorithm.estimator is not None:
        source = None
        if other.rewards != run.config.rewards:
            source = building.reward_of(other.rewards)
            if source is None:
                raise ValueError("rewards: got none, expected some")
        found = run.estimated(other.algorithm, source)
        if source is not None:
            source.close()
        names = ("reward", "advantages", "returns")
        own = own.assign(**{name: [found[uid][name] for uid in run.traced.uids] for name in names})
    records, flags = run.beside(own, run.step, other.algorithm)
    records = run.completed(records, other.algorithm, expert=flags)
    learner = run.learner_of(other)
    if other.optimizer.name == run.config.optimizer.name:
        put_state(learner, state)
    else:
        notes.append(f"optimizer.name: {other.optimizer.name} begins without a state")
    changed = learner.update(records, step=run.step, expert=flags, weights=run.weighed(run.traced, records))
    new = less(run.weights()["policy"], weights["policy"])
    rows = _advantages(before, records, len(own))
    numbers: dict[str, tuple[float | None, float | None]] = {}
    old, now = [[abs(pair[k]) for _, pair in rows] for k in (0, 1)]
    if rows:
        numbers["mean size of advantages"] = (float(np.mean(old)), float(np.mean(now)))
    for name in sorted({**learned.metrics, **changed.metrics}, key=rank):
        numbers[name] = (learned.metrics.get(name), changed.metrics.get(name))
    numbers["length of the update"] = (float(update.norm()), float(new.norm()))
    moved = sorted(rows, key=lambda row: -abs(row[1][1] - row[1][0]))
    return Changed(
        made,
        numbers,
        signs=sum(int(np.sign(a) != np.sign(b)) for _, (a, b) in rows),
        rows=len(rows),
        correlation=_correlation([a for _, (a, _) in rows], [b for _, (_, b) in rows]),
        cosine=_cosine(update, new),
        moved=[_moved(run, i, pair, records) for i, pair in moved[:5] if pair[0] != pair[1]],
        notes=notes,
    )


def _moved(run: Rebuilt, i: int, advantage: tuple[float, float], records: Experiences) -> Moved:
    row = run.own[i]
    asked = row.prompt_text
    if asked is None and row.messages:
        asked = str(row.messages[-1].get("content"))
    if asked is None and run.models.policy.tokenizer is not None:
        asked = run.models.policy.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
    rewards = [math.nan if one.reward is None else float(one.reward) for one in (row, records[i])]
    return Moved(row.eid.uid, str(asked or ""), (rewards[0], rewards[1]), advantage)


def _advantages(before: Experiences, after: Experiences, count: int) -> list[tuple[int, tuple[float, float]]]:
    """Of the first `count` records that have advantages on both sides: their numbers, and means over their tokens."""
    made = []
    for i in range(count):
        pair = (before[i], after[i])
        if all(row.advantages is not None for row in pair):
            old, new = (counted(row, row.advantages) for row in pair)
            made.append((i, (float(old.mean()), float(new.mean())) if len(old) and len(new) else (0.0, 0.0)))
    return made


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float | None:
    lengths = float(one.norm() * other.norm())
    return float(one @ other) / lengths if lengths > 0 else None


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 2 or not np.std(one) or not np.std(other):
        return None
    return float(np.corrcoef(one, other)[0, 1])


__all__ = ["Changed", "Moved", "change", "choices"]
