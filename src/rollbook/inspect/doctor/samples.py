"""Samples: the rows of an index as numpy columns, with what several checks ask of them.

Invariant: one row a record, in the order of admission; a number that was not recorded is NaN, never 0. `there` is
False for runs that failed, whose rows count for their groups alone, and for records that a saver chose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollbook.inspect.doctor.findings import EVIDENCE, Thresholds
from rollbook.inspect.statistics import Floats, Ints, Mask, Series, by_step

NUMBERS = (
    *("reward", "advantage", "length", "response_tokens", "trained_tokens", "lag", "version_max", "group_size"),
    *("entropy", "logprob", "kl", "mismatch", "nans", "repetition", "loop_at"),
)
WHOLE = ("step", "run", "scored")
TEXTS = ("uid", "gid", "status", "state", "removed_reason", "kept", "parent", "parts", "digest", "prompt")
COLUMNS = (*TEXTS, *WHOLE, *NUMBERS)
"""The columns of the index's table `samples` that the doctor reads."""

_LARGEST = 1e100
"""What is larger is as good as infinite: its square is."""
_BY_CHANCE = ("all", "first", "random")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups with at least two scored runs."""

    code: Ints
    """[K] the group's number in `Samples.group`"""
    low: Floats
    high: Floats
    mean: Floats
    """[K] over its scored samples"""
    runs: Ints
    step: Ints
    """[K] its last"""


class Samples:
    """Columns over records.

    >>> rows = {"uid": ["a", "b"], "gid": ["g", "g"], "step": [0, 0], "run": [0, 1], "reward": [1.0, None]}
    >>> samples = Samples(rows)
    >>> len(samples), samples.reward.tolist(), samples.truncated.tolist()
    (2, [1.0, nan], [False, False])
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Any]], apart: str = "", evaluations: Samples | None = None
    ) -> None:
        """`apart`: what a filter must say beside, because the index has other records too. `evaluations`: the
        evaluation records of the same run."""
        n = len(columns["uid"])
        self.evaluations = evaluations
        self._apart = apart
        empty = [None] * n
        texts = {name: columns.get(name, empty) for name in TEXTS}
        numbers = {name: np.array(columns.get(name, empty), np.float64) for name in NUMBERS}
        beyond = np.abs(numbers["reward"]) > _LARGEST
        for column in numbers.values():
            column[np.abs(column) > _LARGEST] = np.nan
        self.uid: Sequence[str] = texts["uid"]
        self.step: Ints = np.array(columns["step"], np.int64)
        self.run: Ints = np.array(columns["run"], np.int64)
        self.group, self.gids = encode_texts(texts["gid"])
        self.digest, _ = encode_texts(texts["digest"])
        self.prompt, _ = encode_texts(texts["prompt"])
        """[N] the same number for the same prompt, in whatever step"""
        # What was removed to save room has its numbers still; what failed never had any.
        self.there: Mask = np.array([not reason for reason in texts["removed_reason"]], bool) | (numbers["length"] > 0)
        # What a saver kept for what it shows says nothing about shares.
        self.chosen: Mask = np.array(
            [bool(policy) and not policy.startswith(_BY_CHANCE) for policy in texts["kept"]], bool
        )
        self.partial = any(policy and not policy.startswith("all") for policy in texts["kept"])
        """Whether a saver kept some of the records only."""
        self.there &= ~self.chosen
        self.status = np.array([text or "" for text in texts["status"]], "U12")
        self.state = np.array([text or "" for text in texts["state"]], "U12")
        self.derived: Mask = np.array([text is not None for text in texts["parent"]], bool)
        """[N] made from another record, so that it may well equal it"""
        self.unscorable: Mask = np.array(columns.get("scored", empty), np.float64) == 2
        self.unscorable |= beyond
        self.reward: Floats = np.where(self.there & ~self.unscorable, numbers["reward"], np.nan)
        self.advantage = numbers["advantage"]
        self.tokens: Floats = np.where(self.there, numbers["response_tokens"], np.nan)
        self.trained_tokens = numbers["trained_tokens"]
        self.lag = numbers["lag"]
        self.version = numbers["version_max"]
        self.group_size = numbers["group_size"]
        self.entropy = numbers["entropy"]
        self.logprob = numbers["logprob"]
        self.kl = numbers["kl"]
        self.mismatch = numbers["mismatch"]
        self.nans = numbers["nans"]
        self.repetition = numbers["repetition"]
        self.loop_at = numbers["loop_at"]
        self._parts = texts["parts"]

    def __len__(self) -> int:
        return len(self.uid)

    @cached_property
    def truncated(self) -> Mask:
        """[N] cut off at a limit"""
        return np.asarray(self.status == "truncated")

    @cached_property
    def dropped(self) -> Mask:
        """[N] given up before it was trained on"""
        return np.asarray(self.state == "dropped")

    @cached_property
    def steps(self) -> Ints:
        """The steps that have records, rising."""
        return np.unique(self.step[self.there])

    @cached_property
    def low(self) -> float:
        """The run's lowest reward."""
        return float(np.nanmin(self.reward)) if np.isfinite(self.reward).any() else math.nan

    @cached_property
    def high(self) -> float:
        """The run's highest reward."""
        return float(np.nanmax(self.reward)) if np.isfinite(self.reward).any() else math.nan

    @cached_property
    def constant(self) -> bool:
        """Whether all rewards of the run are one number."""
        return self.high - self.low <= 1e-9 * max(1.0, abs(self.high))

    def window(self, count: int, thresholds: Thresholds) -> int:
        """How many of `count` steps are recent."""
        least = 2 if count >= 4 else 1
        return max(least, min(math.ceil(count * thresholds.window), thresholds.window_steps))

    def recent(self, thresholds: Thresholds, enough: int | None = None) -> Mask:
        """[N] the samples of the recent steps, or of as many more as it takes to have enough of them."""
        steps, counts = np.unique(self.step[self.there], return_counts=True)
        if not len(steps):
            return np.zeros(len(self), bool)
        w = self.window(len(steps), thresholds)
        behind = np.cumsum(counts[::-1])
        w = max(w, int(np.searchsorted(behind, thresholds.window_samples if enough is None else enough)) + 1)
        return np.asarray(self.there & (self.step >= steps[-min(w, len(steps))]))

    def series(self, values: Floats, mask: Mask | None = None, *, median: bool = False) -> Series:
        """`values` by step, over the records that are there."""
        use = self.there if mask is None else self.there & mask
        return by_step(self.step[use], values[use], median=median)

    @cached_property
    def groups(self) -> Groups:
        """The groups in which two runs or more were scored."""
        use = np.isfinite(self.reward)
        code, reward = self.group[use], self.reward[use]
        k = len(self.gids)
        low, high = np.full(k, np.inf), np.full(k, -np.inf)
        np.minimum.at(low, code, reward)
        np.maximum.at(high, code, reward)
        step = np.full(k, np.iinfo(np.int64).min, np.int64)
        np.maximum.at(step, code, self.step[use])
        runs = count_distinct(code, self.run[use], k)
        counts = np.bincount(code, minlength=k)
        mean = np.bincount(code, reward, minlength=k) / np.maximum(counts, 1)
        some = np.flatnonzero(runs >= 2)
        return Groups(some, low[some], high[some], mean[some], runs[some], step[some])

    @cached_property
    def blocks(self) -> Ints:
        """[N] within what samples are compared: the group, or the step where groups have one sample each."""
        scored = np.isfinite(self.reward)
        grouped = int(self.groups.runs.sum())
        return self.group if 2 * grouped >= int(scored.sum()) else self.step

    def parts(self, places: Ints) -> dict[str, Floats]:
        """[places] each, by name: the numbers that came with the rewards of some records; NaN where one has none."""
        parts: dict[str, Floats] = {}
        for row, i in enumerate(places.tolist()):
            text = self._parts[i]
            if not text or text == "{}":
                continue
            for name, value in json.loads(text).items():
                if isinstance(value, (int, float)) and abs(value) <= _LARGEST:
                    if name not in parts:
                        parts[name] = np.full(len(places), np.nan)
                    parts[name][row] = value
        return dict(sorted(parts.items()))

    def evidence(self, mask: Mask, by: Floats, *, apart: bool = False) -> tuple[str, ...]:
        """The ids of up to 24 records of `mask` that have most of `by`; later ones first where they are equal.

        `apart`: one record of each group before a second one of any.
        """
        places = np.flatnonzero(mask)
        order = places[np.lexsort((-places, -np.nan_to_num(by[places], nan=-np.inf)))]
        if apart:
            _, first = np.unique(self.group[order], return_index=True)
            lead = np.sort(first)
            order = np.concatenate([order[lead], np.delete(order, lead)])
        return tuple(str(self.uid[i]) for i in order[:EVIDENCE])

    def where(self, condition: str, first: int, last: int | None = None) -> str:
        """A filter of the viewer for a condition from one step on, up to another; what holds anyway is left out."""
        clauses = [condition] if condition else []
        if len(self.steps) and first > self.steps[0]:
            clauses.append(f"step >= {first}")
        if len(self.steps) and last is not None and last < self.steps[-1]:
            clauses.append(f"step <= {last}")
        if self._apart:
            clauses.append(self._apart)
        return " and ".join(clauses)

    def span(self, mask: Mask) -> tuple[int, int]:
        """First and last step of the records of `mask`."""
        return int(self.step[mask].min()), int(self.step[mask].max())


def encode_texts(texts: Sequence[Any]) -> tuple[Ints, list[Any]]:
    """A number for each text, counted in the order in which they come, -1 for `None`; and the texts by number.

    >>> numbers, names = encode_texts(["b", None, "a", "b"])
    >>> numbers.tolist(), names
    ([0, -1, 1, 0], ['b', 'a'])
    """
    codes: dict[Any, int] = {}
    numbers = [-1 if text is None else codes.setdefault(text, len(codes)) for text in texts]
    return np.array(numbers, np.int64), list(codes)


def count_distinct(block: Ints, value: Ints, blocks: int) -> Ints:
    """[blocks] How many different values each block has.

    >>> count_distinct(np.array([0, 0, 0, 2]), np.array([5, 5, 6, 5]), 3).tolist()
    [2, 0, 1]
    """
    order = np.lexsort((value, block))
    block, value = block[order], value[order]
    new = np.ones(len(block), bool)
    new[1:] = (block[1:] != block[:-1]) | (value[1:] != value[:-1])
    return np.bincount(block[new], minlength=blocks).astype(np.int64)
