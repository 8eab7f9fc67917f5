"""What the planner returns: a plan, its micro-batches, the denominators of a loss, and a report that a person can read.

Invariant: a plan is never changed after it was made, its arrays are read-only, and all that a report says is derived
from the plan itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import RollbookError

_RANKS_SHOWN = 16


class PlanError(RollbookError, ValueError):
    """A request that cannot be met: `constraint` is the argument that stands in the way, `sample` the sample.

    >>> from rollbook.batch.plan import plan
    >>> plan([3, 9], token_cap=8)
    Traceback (most recent call last):
        ...
    rollbook.batch.plans.PlanError: token_cap: sample 1 takes 9 tokens, over the cap of 8; oversize='alone' gives it a
    micro-batch of its own
    """

    def __init__(self, constraint: str, message: str, sample: int | None = None) -> None:
        super().__init__(f"{constraint}: {message}")
        self.constraint = constraint
        self.message = message
        self.sample = sample

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, str, int | None]]:
        return PlanError, (self.constraint, self.message, self.sample)


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a loss over the whole batch, every rank and micro-batch of it, is divided by."""

    tokens: int
    """Tokens that count in the loss."""
    sequences: int
    """Samples that have such a token."""
    samples: int
    """All samples."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The samples that go through the model together."""

    rank: int
    step: int
    """Micro-batches of one step run at the same time, one on each rank."""
    indices: NDArray[np.int64]
    """[B] The samples, ascending."""
    tokens: int
    """The sum of their lengths."""
    size: int
    """What they occupy: `tokens` if packed, samples times the longest if padded."""
    loss_tokens: int
    sequences: int
    """Samples with a token in the loss."""
    images: int
    cost: float
    modality: Hashable
    """The label that all samples share, else `None`; an empty micro-batch of a uniform step has that step's."""
    oversize: bool
    """Whether it holds one sample that alone exceeds a cap."""
    token_weight: float
    """Its share of all tokens in the loss: what to multiply its mean over tokens by."""
    sequence_weight: float
    """Its share of all sequences: what to multiply its mean over sequences by."""

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every sample goes: `plan[rank][step]` is a `MicroBatch`.

    **The loss.** Over all micro-batches of all ranks, the sum of `token_weight * (mean over its tokens)`, or of
    `(sum over its tokens) / denominators.tokens`, is the mean over all tokens; the sum of `sequence_weight * (mean over
    its sequences)` is the mean over all sequences. Sequences are those that have a token in the loss. Gradients of one
    rank's micro-batches add up, but DDP and FSDP *average* over ranks: multiply the loss by `ranks` there. An empty
    micro-batch weighs 0: its mean would be 0/0, so take 0 in its place (and still run the model, if others wait).

    >>> from rollbook.batch.plan import plan
    >>> found = plan([5, 8, 3, 2, 6], token_cap=8, ranks=3)
    >>> [[batch.indices.tolist() for batch in rank] for rank in found]
    [[[1]], [[3, 4]], [[0, 2]]]
    >>> found.order.tolist(), found.inverse.tolist()
    ([1, 3, 4, 0, 2], [3, 0, 4, 1, 2])
    >>> losses = np.array([0.5, 0.25, 1.0, 2.0, 1.5])  # the mean over each sample's tokens
    >>> lengths = np.array([5, 8, 3, 2, 6])
    >>> float((losses * lengths).sum() / lengths.sum())
    0.8541666666666666
    >>> sum(batch.token_weight * np.average(losses[batch.indices], weights=lengths[batch.indices]).item()
    ...     for batch in found.micro_batches)
    0.8541666666666666
    """

    ranks: int
    steps: int
    """How many micro-batches each rank has."""
    micro_batches: tuple[MicroBatch, ...]
    """All of them, rank by rank."""
    denominators: Denominators
    order: NDArray[np.int64]
    """[N] All samples as planned: rank by rank, step by step."""
    inverse: NDArray[np.int64]
    """[N] Undoes the order: `x[order][inverse]` is `x`."""
    layout: str
    token_cap: int | None
    image_cap: int | None
    needed: int | None
    """How many micro-batches the caps took, before ranks were given equally many; `None` without caps."""
    lower_bound: int | None
    """No plan under these caps has fewer; `None` without caps."""
    oversize: tuple[int, ...]
    """Samples that alone exceed a cap."""
    longest: int | None
    """The sample with the most tokens; `None` if there is none."""
    longest_tokens: int
    groups: int | None
    """How many groups there are; `None` if none were given. So is `split_groups`."""
    split_groups: int | None
    """How many groups have samples on several ranks."""
    modalities: Mapping[Hashable, tuple[int, int]]
    """Samples and tokens of each modality."""

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> tuple[MicroBatch, ...]:
        if not -self.ranks <= rank < self.ranks:
            raise IndexError(f"rank {rank}: the plan has {self.ranks}")
        start = rank % self.ranks * self.steps
        return self.micro_batches[start : start + self.steps]

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self[rank] for rank in range(self.ranks))

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches that run at the same time, one of each rank."""
        if not -self.steps <= step < self.steps:
            raise IndexError(f"step {step}: the plan has {self.steps}")
        return self.micro_batches[step % self.steps :: self.steps]

    def report(self) -> PlanReport:
        """What the plan wastes and how even it is; print it for a table."""
        return PlanReport.of(self)

    def __repr__(self) -> str:
        cap = "" if self.token_cap is None else f", at most {self.token_cap} tokens each"
        return f"Plan({len(self.order)} samples, {self.ranks} ranks x {self.steps} micro-batches{cap})"


@dataclass(frozen=True)
class PlanReport:
    """What a plan wastes, and how even it is. Shares are between 0 and 1; an imbalance is max/mean, 1 if perfect.

    >>> from rollbook.batch.plan import plan
    >>> print(plan([5, 3, 8, 2, 6], token_cap=8, ranks=3).report())
    5 samples, 24 tokens (24 in the loss), packed, on 3 ranks x 1 micro-batches
    micro-batches  3: the cap of 8 tokens takes 3, lower bound 3; 0 empty, 0 over the cap
    filled         100.00 % of the cap (largest 8 tokens); longest sample 2 with 8 tokens
    padding        0.00 % of what is occupied
    waiting        0.00 % of the ranks' time; imbalance 1.0000 in the worst step (0), 1.0000 in all
    rank  samples  tokens  cost  of mean
       0        1       8     8    1.000
       1        2       8     8    1.000
       2        2       8     8    1.000
    """

    samples: int
    tokens: int
    loss_tokens: int
    images: int
    layout: str
    ranks: int
    steps: int
    micro_batches: int
    empty: int
    needed: int | None
    lower_bound: int | None
    token_cap: int | None
    largest: int
    """Tokens that the largest micro-batch occupies."""
    most_images: int
    """Images in the micro-batch that has the most."""
    filled: float | None
    """Share of the cap that samples fill, over the micro-batches that are not empty; `None` without a cap."""
    padding: float
    """Share of the occupied tokens that is padding."""
    waiting: float
    """Share of the ranks' time spent waiting for the slowest one, if they meet after each step and cost is time."""
    step_imbalance: tuple[float, ...]
    """Cost, max/mean over ranks, in each step."""
    rank_imbalance: float
    """Cost, max/mean over ranks, of all steps together."""
    rank_samples: tuple[int, ...]
    rank_tokens: tuple[int, ...]
    rank_cost: tuple[float, ...]
    oversize: tuple[int, ...]
    longest: int | None
    longest_tokens: int
    groups: int | None
    split_groups: int | None
    modalities: Mapping[Hashable, tuple[int, int]]
    """Samples and tokens of each modality."""

    @classmethod
    def of(cls, plan: Plan) -> PlanReport:
        """The report on a plan."""
        shape = (plan.ranks, plan.steps)
        batches = plan.micro_batches
        cost = np.array([batch.cost for batch in batches]).reshape(shape)
        tokens = np.array([batch.tokens for batch in batches], dtype=np.int64).reshape(shape)
        sizes = np.array([batch.size for batch in batches], dtype=np.int64).reshape(shape)
        counts = np.array([len(batch) for batch in batches], dtype=np.int64).reshape(shape)
        used = int((counts > 0).sum())
        time = plan.ranks * float(cost.max(axis=0).sum())
        capacity = None if plan.token_cap is None else plan.token_cap * used
        return cls(
            samples=len(plan.order),
            tokens=int(tokens.sum()),
            loss_tokens=plan.denominators.tokens,
            images=sum(batch.images for batch in batches),
            layout=plan.layout,
            ranks=plan.ranks,
            steps=plan.steps,
            micro_batches=len(batches),
            empty=len(batches) - used,
            needed=plan.needed,
            lower_bound=plan.lower_bound,
            token_cap=plan.token_cap,
            largest=int(sizes.max()),
            most_images=max(batch.images for batch in batches),
            filled=None if capacity is None else int(tokens.sum()) / max(capacity, 1),
            padding=1 - int(tokens.sum()) / max(int(sizes.sum()), 1) if sizes.any() else 0.0,
            waiting=1 - float(cost.sum()) / time if time else 0.0,
            step_imbalance=tuple(_imbalance(column) for column in cost.T),
            rank_imbalance=_imbalance(cost.sum(axis=1)),
            rank_samples=tuple(counts.sum(axis=1).tolist()),
            rank_tokens=tuple(tokens.sum(axis=1).tolist()),
            rank_cost=tuple(cost.sum(axis=1).tolist()),
            oversize=plan.oversize,
            longest=plan.longest,
            longest_tokens=plan.longest_tokens,
            groups=plan.groups,
            split_groups=plan.split_groups,
            modalities=plan.modalities,
        )

    def __str__(self) -> str:
        worst = max(range(self.steps), key=self.step_imbalance.__getitem__)
        if self.token_cap is not None:
            took = f"the cap of {self.token_cap:,} tokens takes {self.needed}, lower bound {self.lower_bound}; "
        else:
            took = "" if self.needed is None else f"the cap on images takes {self.needed}; "
        filled = "no cap" if self.filled is None else f"{self.filled:.2%} of the cap".replace("%", " %")
        lines = [
            f"{self.samples:,} samples, {self.tokens:,} tokens ({self.loss_tokens:,} in the loss), {self.layout}, on "
            f"{self.ranks} ranks x {self.steps} micro-batches",
            f"micro-batches  {self.micro_batches}: {took}{self.empty} empty, {len(self.oversize)} over the cap",
            f"filled         {filled} (largest {self.largest:,} tokens)"
            + ("" if self.longest is None else f"; longest sample {self.longest} with {self.longest_tokens:,} tokens"),
            f"padding        {100 * self.padding:.2f} % of what is occupied",
            f"waiting        {100 * self.waiting:.2f} % of the ranks' time; imbalance "
            f"{self.step_imbalance[worst]:.4f} in the worst step ({worst}), {self.rank_imbalance:.4f} in all",
        ]
        if self.oversize:
            lines.append(f"over the cap   samples {_some(self.oversize)}")
        if self.images:
            lines.append(f"images         {self.images:,}, at most {self.most_images:,} in a micro-batch")
        if self.groups is not None:
            lines.append(f"groups         {self.groups:,}, {self.split_groups:,} of them on several ranks")
        for label, (samples, tokens) in self.modalities.items():
            lines.append(f"modality       {label}: {samples:,} samples, {tokens:,} tokens")
        mean = sum(self.rank_cost) / self.ranks
        columns = zip(self.rank_samples, self.rank_tokens, self.rank_cost, strict=True)
        rows = [("rank", "samples", "tokens", "cost", "of mean")]
        for rank, (samples, tokens, cost) in enumerate(columns):
            rows.append((str(rank), f"{samples:,}", f"{tokens:,}", f"{cost:.4g}", f"{cost / mean if mean else 1:.3f}"))
        del rows[_RANKS_SHOWN + 1 :]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.ranks > _RANKS_SHOWN:
            lines.append(f"... {self.ranks - _RANKS_SHOWN} more ranks")
        return "\n".join(lines)


def _imbalance(costs: NDArray[np.float64]) -> float:
    mean = float(costs.mean())
    return float(costs.max()) / mean if mean else 1.0


def _some(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
