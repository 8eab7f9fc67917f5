"""Books for the doctor: a healthy run of any size, and one function for each check that plants it, and it alone.

`Run(seed)` has columns over samples that a plant changes; `write()` makes a real book of them: records come in step by
step, versions are announced, some records are dropped and the rest leased and trained on. `planted` says which samples
are ill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rollbook
from rollbook import EID, Experiences

PROMPT = 4


class Run:
    """A healthy run: `steps` steps of `groups` prompts with `runs` samples each."""

    def __init__(
        self, seed: int, *, steps: int = 12, groups: int = 8, runs: int = 4, kind: str = "binary", tokens: int = 40
    ) -> None:
        self.dice = dice = np.random.default_rng(seed)
        self.runs = runs
        shape = (steps, groups, runs)
        self.n = n = steps * groups * runs
        self.step, self.task, self.run = (indices.reshape(-1) for indices in np.indices(shape))
        self.group = self.step * groups + self.task
        self.time = self.step / max(steps - 1, 1)
        """[N] from 0 to 1 over the run."""
        first, last = dice.uniform(0.25, 0.45), dice.uniform(0.45, 0.65)
        skill = (
            np.log(1 / (1 / (first + (last - first) * self.time) - 1)) + dice.normal(0, 0.8, steps * groups)[self.group]
        )
        self.right = dice.random(n) < 1 / (1 + np.exp(-skill))
        self.tidy = dice.random(n) < 0.7 + 0.2 * self.time
        growth = dice.uniform(0.9, 1.4)
        lengths = (
            tokens * (1 + (growth - 1) * self.time) * np.exp(dice.normal(0, 0.25, n)) * np.where(self.right, 1, 1.1)
        )
        self.lengths = np.maximum(lengths, 20).astype(int)
        self.truncated = self.lengths > 2 * tokens
        self.lengths[self.truncated] = 2 * tokens
        self.right &= ~self.truncated
        self.parts: dict[str, Any] = {}
        if kind == "binary":
            self.reward = self.right.astype(float)
        elif kind == "signs":
            self.reward = np.where(self.right, 1.0, -1.0)
        elif kind == "continuous":
            self.reward = np.where(self.truncated, -2.0, dice.normal(0, 1, n) + 1.5 * self.right)
        elif kind == "parts":
            self.parts = {"accuracy": self.right.astype(float), "format": self.tidy.astype(float)}
            self.reward = self.parts["accuracy"] + 0.2 * self.parts["format"]
            self.parts["seconds"] = dice.gamma(2.0, 3.0, n)
        else:
            self.reward = np.full(n, np.nan)
        self.scored = kind != "none"
        fall = dice.uniform(0.5, 1.0)
        self.entropy = 0.6 * (1 + (fall - 1) * self.time) * np.exp(dice.normal(0, 0.1, n))
        self.mismatch = 0.01 * np.exp(dice.normal(0, 0.4, n))
        self.kl = (0.002 + 0.05 * self.time) * np.exp(dice.normal(0, 0.4, n))
        self.staleness = dice.integers(0, 2, n)
        self.stride = 1
        """Versions from one step to the next."""
        self.dropped = dice.random(n) < 0.08
        self.advantages: Any = None
        """[N]; `None`: made from rewards within groups."""
        self.nan_at = np.zeros(n, bool)
        self.loop = np.zeros(n, bool)
        self.copies: dict[int, int] = {}
        self.missing = np.zeros(n, bool)
        self.failed = np.zeros(n, bool)
        self.planted = np.zeros(n, bool)
        self.measured = True
        self.evaluation = False

    def uid(self, i: Any) -> str:
        return self.eid(i).uid

    def eid(self, i: Any) -> EID:
        return EID(batch=str(self.step[i]), task=str(self.task[i]), run=int(self.run[i]), step=0, suffix="s")

    def centered(self) -> Any:
        """[N] rewards less their group's mean, in its standard deviations."""
        scored = np.isfinite(self.reward)
        counts = np.maximum(np.bincount(self.group, scored), 1)
        filled = np.where(scored, self.reward, 0.0)
        apart = np.where(scored, filled - (np.bincount(self.group, filled) / counts)[self.group], 0.0)
        spread = np.sqrt(np.bincount(self.group, apart**2) / counts)[self.group]
        return np.where(spread > 1e-9, apart / np.maximum(spread, 1e-9), 0.0)

    def records(self, indices: Any, advantages: Any) -> Experiences:
        """Some samples, as columns."""
        counts = self.lengths[indices]
        sizes = counts + PROMPT
        offsets = np.concatenate([[0], np.cumsum(counts)])
        starts = np.cumsum(sizes) - sizes
        sources = np.array([self.copies.get(int(i), int(i)) for i in indices], np.int64)
        place = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
        # Any mixing will do that gives each sample tokens of its own, and copies the same.
        ids = (np.repeat(sources * 2_654_435_761, sizes) + place * 40_503 + place * place * 977) % 65_521 % 30_000 + 10
        prompt = place < PROMPT
        ids[prompt] = np.repeat(self.group[indices], sizes)[prompt] + place[prompt]
        for at in np.flatnonzero(self.loop[indices]):
            end = starts[at] + sizes[at]
            start = starts[at] + PROMPT + counts[at] // 4
            ids[start:end] = np.resize(ids[start : start + 3], end - start)
        columns: dict[str, Any] = {}
        if self.measured:
            sign = np.where((np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)) % 2, 1.0, -1.0)
            policy = np.repeat(-self.entropy[indices], counts) + sign * np.repeat(self.mismatch[indices], counts)
            values = np.repeat(advantages[indices], counts)
            values[(offsets[:-1] + counts // 2)[self.nan_at[indices]]] = np.nan
            columns = {
                "logprobs": np.repeat(-self.entropy[indices], counts),
                "old_logprobs": policy,
                "ref_logprobs": policy + np.repeat(np.interp(self.kl[indices], _K3, _STEPS), counts),
                "entropy": np.repeat(self.entropy[indices], counts),
                "advantages": values,
            }
            columns = {name: (column.astype(np.float32), offsets) for name, column in columns.items()}
            versions = (self.step[indices] + 10) * self.stride - self.staleness[indices]
            columns["policy_versions"] = (np.repeat(versions, counts).astype(np.int32), offsets)
            columns["group_size"] = [self.runs] * len(indices)
        if self.scored:
            columns["reward"] = self.reward[indices]
        if self.parts:
            columns["metrics"] = [{name: float(column[i]) for name, column in self.parts.items()} for i in indices]
        return Experiences.from_columns(
            {
                "eid": [self.eid(i) for i in indices],
                "tokens": (ids.astype(np.int32), np.concatenate([starts, [len(ids)]])),
                "prompt_length": [PROMPT] * len(indices),
                "truncate_status": ["response_truncated" if self.truncated[i] else None for i in indices],
                "finish_reason": ["length" if self.truncated[i] else "stop" for i in indices],
                **columns,
            }
        )

    def write(self, path: Any = "memory:") -> Any:
        """A book of it."""
        book = rollbook.open(path)
        advantages = self.centered() if self.advantages is None else self.advantages
        for step in np.unique(self.step).tolist():
            of_step = np.flatnonzero((self.step == step) & ~self.missing)
            failed = [self.eid(i) for i in of_step if self.failed[i]]
            if failed:
                book.fail(failed, group_size=self.runs)
            of_step = of_step[~self.failed[of_step]]
            book.append(self.records(of_step, advantages), evaluation=self.evaluation)
            if self.evaluation or not self.measured:
                continue
            book.announce((step + 10) * self.stride)
            given_up = [self.uid(i) for i in of_step if self.dropped[i]]
            if given_up:
                book.drop(given_up)
            with book.lease(len(of_step)) as lease:
                lease.ack(step=step)
        return book


_STEPS = np.linspace(0, 6, 6001)
_K3 = np.exp(_STEPS) - 1 - _STEPS
"""The k3 estimate of a reference that is so much more likely."""

Plant = Callable[[Run, float], None]
PLANTS: dict[str, tuple[Plant, float, float, dict[str, Any]]] = {}
"""By check: how to plant it, a dose that is ill, one that is not, and what run it needs."""


def plant(check: str, ill: float, well: float, **needs: Any) -> Callable[[Plant], Plant]:
    """Enter a function in the table."""

    def put(function: Plant) -> Plant:
        PLANTS[check] = (function, ill, well, needs)
        return function

    return put


def _groups(run: Run, share: float) -> Any:
    """[N] the samples of so many of the groups, spread evenly."""
    count = int(run.group.max()) + 1
    chosen = np.floor((np.arange(count) + 1) * share) > np.floor(np.arange(count) * share)
    return chosen[run.group]


@plant("zero-variance", 0.9, 0.2, steps=16)
def zero_variance(run: Run, dose: float) -> None:
    """`dose` of the groups are all right or all wrong."""
    run.truncated[:] = False
    flat = _groups(run, dose)
    run.reward[flat] = (run.group[flat] * 7 // 3 % 2).astype(float)
    rest = ~flat
    run.reward[rest] = ((run.run[rest] + run.group[rest]) % 2).astype(float)
    run.planted = flat


@plant("reward-collapse", 0.9, 0.15)
def reward_collapse(run: Run, dose: float) -> None:
    """From two thirds on, `dose` of the rewards are lost."""
    late = run.time > 0.6
    lost = late & (run.dice.random(run.n) < dose)
    run.reward[lost] = 0.0
    run.planted = late & (run.reward == 0)


@plant("reward-saturation", 1.0, 0.5)
def reward_saturation(run: Run, dose: float) -> None:
    """From half way on, `dose` of the samples are right."""
    late = run.time > 0.5
    run.truncated[late] = False
    run.reward[late] = (run.dice.random(int(late.sum())) < dose).astype(float)
    run.planted = late & (run.reward == 1)


@plant("entropy-collapse", 0.02, 0.6)
def entropy_collapse(run: Run, dose: float) -> None:
    """The entropy falls to `dose` of what it was."""
    run.entropy = 0.6 * dose**run.time * np.exp(run.dice.normal(0, 0.05, run.n))
    run.planted = run.time > 0.5


@plant("length-explosion", 4.0, 1.4)
def length_explosion(run: Run, dose: float) -> None:
    """Lengths grow `dose` times; rewards stay as they are at first."""
    run.reward = (run.dice.random(run.n) < 0.5).astype(float)
    run.truncated[:] = False
    run.lengths = (30 * dose**run.time * np.exp(run.dice.normal(0, 0.15, run.n))).astype(int)
    run.planted = run.time > 0.3


@plant("truncation-rewarded", 0.9, 0.02)
def truncation_rewarded(run: Run, dose: float) -> None:
    """A tenth of the samples are cut off, and `dose` of those rewarded."""
    run.truncated = run.dice.random(run.n) < 0.1
    run.lengths[run.truncated] = 80
    good = run.truncated & (run.dice.random(run.n) < dose)
    run.reward[run.truncated] = 0.0
    run.reward[good] = 1.0
    run.planted = good


@plant("truncation", 0.8, 0.3)
def truncation(run: Run, dose: float) -> None:
    """`dose` of the samples are cut off, and none of those rewarded."""
    run.truncated = run.dice.random(run.n) < dose
    run.lengths[run.truncated] = 80
    run.reward = (~run.truncated & (run.dice.random(run.n) < 0.6)).astype(float)
    run.planted = run.truncated


@plant("repetition-loops", 0.2, 0.02)
def repetition_loops(run: Run, dose: float) -> None:
    """`dose` of the samples end in a loop."""
    run.loop = run.dice.random(run.n) < dose
    run.reward[run.loop] = 0.0
    run.planted = run.loop.copy()


@plant("duplicates", 0.8, 0.1)
def duplicates(run: Run, dose: float) -> None:
    """In `dose` of the groups the second sample is the first one again."""
    for i in np.flatnonzero(_groups(run, dose) & (run.run == 1)):
        run.copies[int(i)] = int(i) - 1
        for name in ("lengths", "truncated", "reward"):
            getattr(run, name)[i] = getattr(run, name)[i - 1]
        run.planted[[i - 1, i]] = True


@plant("train-inference-mismatch", 0.2, 0.02)
def logprob_mismatch(run: Run, dose: float) -> None:
    """From half way on, log-probs differ by `dose`."""
    late = run.time > 0.5
    run.mismatch[late] = dose * np.exp(run.dice.normal(0, 0.2, int(late.sum())))
    run.planted = late


@plant("stale-data", 7.0, 2.0)
def stale_data(run: Run, dose: float) -> None:
    """Half of the samples are `dose` versions old."""
    old = run.dice.random(run.n) < 0.5
    run.staleness[old] = int(dose)
    run.planted = old


@plant("nans", 0.05, 0.0)
def nans(run: Run, dose: float) -> None:
    """`dose` of the samples have a NaN among their advantages."""
    run.nan_at = run.dice.random(run.n) < dose
    run.planted = run.nan_at.copy()


@plant("advantage-mean", 0.5, 0.01)
def advantage_mean(run: Run, dose: float) -> None:
    """Advantages are `dose` too high."""
    run.advantages = run.centered() + dose
    run.planted = run.advantages > 0


@plant("kl-blowup", 3.0, 0.1)
def kl_blowup(run: Run, dose: float) -> None:
    """The KL rises to `dose` in the last third."""
    run.kl += np.maximum(0, run.time - 0.66) / 0.34 * dose
    run.planted = run.time > 0.66


@plant("reward-follows-length", 1.0, 0.3, kind="continuous")
def reward_follows_length(run: Run, dose: float) -> None:
    """`dose` of the reward is the length."""
    run.truncated[:] = False
    run.lengths = 30 + run.dice.integers(0, 40, run.n)
    run.reward = (
        dose * (run.lengths - 50) / 10 + (1 - dose) * run.dice.normal(0, 1, run.n) + 0.02 * run.dice.normal(0, 1, run.n)
    )
    run.planted[:] = True


@plant("reward-follows-format", 1.0, 0.0, kind="parts")
def reward_follows_format(run: Run, dose: float) -> None:
    """Nobody is right any more (with dose 1), so that the format alone is paid."""
    run.truncated[:] = False
    run.parts["accuracy"] = run.parts["accuracy"] * (1 - dose)
    run.parts["format"] = (run.dice.random(run.n) < 0.5).astype(float)
    run.reward = run.parts["accuracy"] + 0.2 * run.parts["format"]
    run.planted = run.parts["format"] == 1


@plant("component-dominates", 30.0, 1.0, kind="parts")
def component_dominates(run: Run, dose: float) -> None:
    """A judge's score has `dose` times the spread of the other parts."""
    run.truncated[:] = False
    run.parts["judge"] = run.dice.normal(0, 0.5 * dose, run.n)
    run.parts["format"] = run.tidy.astype(float)
    run.reward = run.parts["accuracy"] + 0.2 * run.parts["format"] + run.parts["judge"]
    run.planted[:] = True


@plant("keep-rate-bias", 0.8, 0.08)
def keep_rate_bias(run: Run, dose: float) -> None:
    """Of the samples longer than the others of their step, `dose` are dropped."""
    middle = np.array([np.median(run.lengths[run.step == step]) for step in range(run.step.max() + 1)])
    long = run.lengths > middle[run.step]
    run.dropped = np.where(long, run.dice.random(run.n) < dose, run.dice.random(run.n) < 0.05)
    run.planted = run.dropped & long & ~run.truncated


@plant("groups-incomplete", 0.4, 0.01)
def groups_incomplete(run: Run, dose: float) -> None:
    """`dose` of the groups lack their last run."""
    short = _groups(run, dose)
    run.missing = short & (run.run == run.runs - 1)
    run.planted = short
