"""Micro-batch planner: `plan` assigns every sample to a micro-batch of a rank, given the lengths of the samples.

The module contains `plan`, its results (`Plan`, `MicroBatch`, `Denominators`, `PlanReport`, `PlanError`), the cost
model `Cost`, and below them the bin packing that the planner uses.

A plan guarantees, for all lengths, groups, modalities, caps and ranks:

- once: every sample is in exactly one micro-batch; none is dropped or duplicated.
- whole: no sample is split, and so no image: a micro-batch has all tokens and all images of its samples.
- cap: no micro-batch exceeds `token_cap` or `image_cap`, except for a sample that exceeds it on its own and, with
  `oversize="alone"`, gets a micro-batch of its own.
- steps: every rank has the same number of micro-batches: `micro_batches`, if that is given.
- groups: a group that must stay together is in one micro-batch, or on one rank.
- modality: with `uniform_modality`, micro-batches that run at the same time are all of one modality.
- empty: a micro-batch is empty only with `empty="allow"`, and then its weight is 0.
- counts: with `equal_counts`, micro-batches that run at the same time have equally many samples.
- balance: packed and without caps, a micro-batch costs at most one sample (with `keep_groups="micro_batch"`, one group)
  more than the mean: over all micro-batches; with `uniform_modality`, over those of its modality; with
  `keep_groups="rank"`, over those of them on its rank, and then a rank costs at most one group more than the mean rank.
- loss: means over micro-batches, times their weights, add up to the mean over all samples, for any split.
- order: `x[plan.order][plan.inverse]` is `x`, and `order` is the micro-batches one after the other.
- same: the same input gives the same plan on every rank and machine, so that each rank can plan for itself; with the
  samples in another order, each rank and step has samples of the same lengths, costs, images, loss tokens and modality.
- named: a constraint that cannot be met raises `PlanError` with the constraint and the sample. The packing is a
  heuristic: it may raise for a request that only an optimal packing would meet.
- pure: numpy and the standard library only; the arguments are not modified.
"""

from __future__ import annotations

import heapq
import reprlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rollbook.core.checks import check_int
from rollbook.core.errors import RollbookError

__all__ = ["Cost", "Denominators", "MicroBatch", "Plan", "PlanError", "PlanReport", "plan"]

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from rollbook.core.experiences import Experiences
    from rollbook.core.freeform import Json

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bins = list[list[int]]
"""Numbers of the atoms in each bin."""

KeepGroups = Literal["none", "micro_batch", "rank"]
Layout = Literal["packed", "padded"]
Oversize = Literal["error", "alone"]
Empty = Literal["error", "allow"]

_MAX_MICRO_BATCHES = 1 << 22  # a plan of this size takes gigabytes; a larger number is a mistake
_MAX_PRINTED_RANKS = 16


def plan(
    lengths: Sequence[int] | NDArray[Any] | torch.Tensor | Experiences,
    *,
    token_cap: int | None = None,
    ranks: int = 1,
    micro_batches: int | None = None,
    groups: Iterable[Hashable] | None = None,
    keep_groups: KeepGroups = "none",
    modality: Iterable[Hashable] | None = None,
    uniform_modality: bool = False,
    images: Iterable[int] | None = None,
    image_cap: int | None = None,
    cost: Cost | Iterable[float] | None = None,
    loss_tokens: Iterable[int] | None = None,
    layout: Layout = "packed",
    equal_counts: bool = False,
    oversize: Oversize = "error",
    empty: Empty = "error",
) -> Plan:
    """Assign every sample to a micro-batch of a rank; the module docstring lists what a plan guarantees.

    Args:
        lengths: [N] Tokens of each sample: a list, array or tensor of integers, or `Experiences`.
        token_cap: Tokens that a micro-batch may occupy: the sum of its lengths or, with `layout="padded"`, samples
            times the longest. `None`: no cap.
        ranks: Number of ranks.
        micro_batches: Micro-batches of each rank. `None`: as few as the caps allow; without caps, one.
        groups: [N] A key for each sample, such as its task id. Equal keys are one group, in any order.
        keep_groups: `"micro_batch"` keeps each group in one micro-batch, `"rank"` on one rank.
        modality: [N] A label for each sample, such as `"text"` or `"image"`.
        uniform_modality: Whether all ranks have the same modality in a step, so that either all or none run the vision
            tower. Steps are in alphabetical order of the labels.
        images: [N] Images (or vision tokens) of each sample.
        image_cap: Images that a micro-batch may have. `None`: no cap.
        cost: The quantity to balance: a `Cost`, or [N] numbers. `None`: tokens. Padded, each sample costs as much as
            the costliest of its micro-batch.
        loss_tokens: [N] Tokens that count in the loss, at most `lengths`. `None`: all; of `Experiences`, those in the
            `action_mask`.
        layout: Whether micro-batches are `"packed"` or `"padded"`.
        equal_counts: Whether all ranks get equally many samples in a step; not together with caps.
        oversize: A sample over a cap is an `"error"`, or gets a micro-batch of its own (`"alone"`).
        empty: Fewer samples (or groups) than micro-batches is an `"error"`, or leaves some empty (`"allow"`).

    Returns:
        The plan. The micro-batches of a rank are in descending order of cost (for each modality), so that a device that
        is too small fails at the first one.

    Raises:
        PlanError: If a constraint cannot be met.
        ValueError: If an argument is invalid.

    >>> planned = plan([700, 200, 300, 100, 600, 400], token_cap=1000, groups="aabbcc", keep_groups="micro_batch")
    >>> [batch.indices.tolist() for batch in planned[0]]
    [[4, 5], [0, 1], [2, 3]]
    """
    for name, option, kind in (
        ("keep_groups", keep_groups, KeepGroups),
        ("layout", layout, Layout),
        ("oversize", oversize, Oversize),
        ("empty", empty, Empty),
    ):
        if not isinstance(option, str) or option not in get_args(kind):
            raise ValueError(f"{name}: got {option!r}, expected one of {', '.join(map(repr, get_args(kind)))}")
    for name, flag in (("uniform_modality", uniform_modality), ("equal_counts", equal_counts)):
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name}: got {flag!r}, expected True or False")
    for name, required, column in (
        (f"groups: got None with keep_groups={keep_groups!r}", keep_groups != "none", groups),
        ("modality: got None with uniform_modality=True", uniform_modality, modality),
        (f"images: got None with image_cap={image_cap!r}", image_cap is not None, images),
    ):
        if required and column is None:
            raise ValueError(f"{name}, expected a value for each sample")
    token_cap = None if token_cap is None else check_int("token_cap", token_cap, 1)
    image_cap = None if image_cap is None else check_int("image_cap", image_cap, 1)
    ranks = check_int("ranks", ranks, 1, _MAX_MICRO_BATCHES)
    if micro_batches is not None:
        micro_batches = check_int("micro_batches", micro_batches, 1, _MAX_MICRO_BATCHES // ranks)
    if equal_counts and (token_cap is not None or image_cap is not None):
        raise ValueError("equal_counts: got True with token_cap or image_cap, expected one without the other")

    records: Any = lengths if callable(getattr(lengths, "token_lengths", None)) else None
    tokens = _integers("lengths", lengths if records is None else records.token_lengths())
    count = len(tokens)
    if loss_tokens is None and records is not None:
        loss_tokens = _count_loss_tokens(records, tokens)
    loss_counts = tokens if loss_tokens is None else _integers("loss_tokens", loss_tokens, count)
    if (loss_counts > tokens).any():
        i = int(np.flatnonzero(loss_counts > tokens)[0])
        raise ValueError(f"loss_tokens[{i}]: got {loss_counts[i]}, expected at most {tokens[i]}, the sample's length")
    image_counts = np.zeros(count, np.int64) if images is None else _integers("images", images, count)
    costs = tokens.astype(np.float64) if cost is None else _costs(cost, tokens)
    group_of, group_keys = (None, []) if groups is None else _keys("groups", groups, count)
    labels = None if modality is None else _sorted_keys(*_keys("modality", modality, count))
    if not count and empty != "allow":
        raise PlanError("lengths", "there are no samples; empty='allow' gives every rank an empty micro-batch")

    # Columns that were not given follow from the lengths.
    columns: list[Ints | Floats] = [tokens]
    columns += [] if cost is None or isinstance(cost, Cost) else [costs]
    columns += [] if images is None else [image_counts]
    columns += [] if loss_counts is tokens else [loss_counts]
    columns += [] if labels is None else [labels[0]]
    kinds = _kinds(columns)
    # The size of all samples together, padded to the longest; packed it is less.
    total_size = count * max(int(tokens.max(initial=0)), 1)
    limits = Limits(
        None if token_cap is None else min(token_cap, max(total_size, 1)),
        None if image_cap is None else min(image_cap, max(int(image_counts.sum()), 1)),
        layout == "padded",
    )
    atom_of = group_of if keep_groups == "micro_batch" else None
    request = Request(
        ranks=ranks,
        micro_batches=micro_batches,
        token_cap=token_cap,
        image_cap=image_cap,
        limits=limits,
        lengths=tokens,
        images=image_counts,
        costs=costs,
        loss_tokens=loss_counts,
        group_of=group_of,
        group_keys=group_keys,
        keep_groups=keep_groups,
        modality=labels,
        uniform_modality=bool(uniform_modality),
        equal_counts=bool(equal_counts),
        alone=oversize == "alone",
        may_be_empty=empty == "allow",
        atom_of=atom_of,
        kinds=kinds,
        atoms=Atoms.from_samples(atom_of, tokens, image_counts, costs, kinds),
    )
    return _assemble(request, *_place(request))


class PlanError(RollbookError, ValueError):
    """Raised when a constraint cannot be met.

    Args:
        constraint: The argument that states the constraint.
        message: What is wrong.
        sample: Index of the sample that violates it, if it is a single one.

    >>> from rollbook.batch.plan import plan
    >>> plan([3, 9], token_cap=8)
    Traceback (most recent call last):
        ...
    rollbook.batch.plan.PlanError: token_cap: sample 1 takes 9 tokens, over the cap of 8; oversize='alone' gives it a
    micro-batch of its own
    """

    def __init__(self, constraint: str, message: str, sample: int | None = None) -> None:
        super().__init__(f"{constraint}: {message}")
        self.constraint = constraint
        self.message = message
        self.sample = sample


@dataclass(frozen=True, slots=True)
class Denominators:
    """Denominators of a loss over the whole batch, over all ranks and micro-batches.

    Attributes:
        tokens: Number of tokens in the loss.
        sequences: Number of samples with a token in the loss.
        samples: Number of samples.

    >>> plan([3, 2], loss_tokens=[2, 0]).denominators
    Denominators(tokens=2, sequences=1, samples=2)
    """

    tokens: int
    sequences: int
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The samples of one forward pass.

    Attributes:
        rank: Rank that runs it.
        step: Number among the micro-batches of its rank. Micro-batches of one step run at the same time.
        indices: [B] The samples, ascending.
        tokens: Sum of their lengths.
        size: Tokens that they occupy: `tokens` if packed, samples times the longest if padded.
        loss_tokens: Number of tokens in the loss.
        sequences: Number of samples with a token in the loss.
        images: Number of images.
        cost: Cost of the samples.
        modality: Label that all samples share, else `None`. An empty micro-batch has the label of its uniform step.
        oversize: Whether it is one sample that exceeds a cap on its own.
        token_weight: Share of all tokens in the loss, the factor of its mean over tokens.
        sequence_weight: Share of all sequences, the factor of its mean over sequences.

    >>> batch = plan([5, 3])[0][0]
    >>> batch.indices.tolist(), batch.tokens, batch.token_weight
    ([0, 1], 8, 1.0)
    """

    rank: int
    step: int
    indices: NDArray[np.int64]
    tokens: int
    size: int
    loss_tokens: int
    sequences: int
    images: int
    cost: float
    modality: Hashable
    oversize: bool
    token_weight: float
    sequence_weight: float

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Plan:
    """Assignment of samples to micro-batches: `plan[rank][step]` is a `MicroBatch`.

    **The loss.** Over all micro-batches of all ranks, the sum of `token_weight * (mean over its tokens)`, or of
    `(sum over its tokens) / denominators.tokens`, is the mean over all tokens; the sum of `sequence_weight * (mean over
    its sequences)` is the mean over all sequences with a token in the loss. DDP and FSDP *average* gradients over
    ranks: multiply the loss by `ranks` there. An empty micro-batch has weight 0 and no mean: use a loss of 0 (and still
    run the model if other ranks wait for it).

    Attributes:
        ranks: Number of ranks.
        steps: Micro-batches of each rank.
        micro_batches: All micro-batches, rank by rank.
        denominators: Denominators of the loss.
        order: [N] All samples as planned: rank by rank, step by step.
        inverse: [N] Inverse of the order: `x[order][inverse]` is `x`.
        layout: `packed` or `padded`.
        token_cap: Cap on tokens, or `None`.
        image_cap: Cap on images, or `None`.
        needed: Micro-batches that the caps required, before ranks got equally many; `None` without caps.
        lower_bound: Lower bound of `needed` for any plan; `None` without caps.
        oversize: The samples that exceed a cap on their own.
        longest: Sample with the most tokens; `None` if there are no samples.
        longest_tokens: Its number of tokens.
        groups: Number of groups; `None` if no groups were given.
        split_groups: Number of groups with samples on several ranks; `None` if no groups were given.
        modalities: Numbers of samples and tokens of each modality.

    >>> from rollbook.batch.plan import plan
    >>> planned = plan([5, 8, 3, 2, 6], token_cap=8, ranks=3)
    >>> [[batch.indices.tolist() for batch in rank] for rank in planned]
    [[[1]], [[3, 4]], [[0, 2]]]
    >>> planned.order.tolist(), planned.inverse.tolist()
    ([1, 3, 4, 0, 2], [3, 0, 4, 1, 2])
    >>> losses = np.array([0.5, 0.25, 1.0, 2.0, 1.5])  # the mean over each sample's tokens
    >>> lengths = np.array([5, 8, 3, 2, 6])
    >>> float((losses * lengths).sum() / lengths.sum())
    0.8541666666666666
    >>> sum(batch.token_weight * np.average(losses[batch.indices], weights=lengths[batch.indices]).item()
    ...     for batch in planned.micro_batches)
    0.8541666666666666
    """

    ranks: int
    steps: int
    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    order: NDArray[np.int64]
    inverse: NDArray[np.int64]
    layout: str
    token_cap: int | None
    image_cap: int | None
    needed: int | None
    lower_bound: int | None
    oversize: tuple[int, ...]
    longest: int | None
    longest_tokens: int
    groups: int | None
    split_groups: int | None
    modalities: Mapping[Hashable, tuple[int, int]]

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
        """Return the micro-batches that run at the same time, one of each rank.

        Args:
            step: Number of the step; negative numbers count from the last.

        Returns:
            The micro-batch of each rank.

        Raises:
            IndexError: The plan has no such step.
        """
        if not -self.steps <= step < self.steps:
            raise IndexError(f"step {step}: the plan has {self.steps}")
        return self.micro_batches[step % self.steps :: self.steps]

    def report(self) -> PlanReport:
        """Return the balance and the waste of the plan; print it for a table."""
        return PlanReport.from_plan(self)

    def __repr__(self) -> str:
        cap = "" if self.token_cap is None else f", at most {self.token_cap} tokens each"
        return f"Plan({len(self.order)} samples, {self.ranks} ranks x {self.steps} micro-batches{cap})"


@dataclass(frozen=True)
class PlanReport:
    """Balance and waste of a plan. Shares are between 0 and 1; an imbalance is max/mean, at best 1.

    Attributes that `Plan` and `MicroBatch` have, too, are described there.

    Attributes:
        empty: Number of empty micro-batches.
        largest: Tokens that the largest micro-batch occupies.
        most_images: Largest number of images in a micro-batch.
        filled: Share of the cap that samples fill, over micro-batches that are not empty; `None` without a cap.
        padding: Share of the occupied tokens that is padding.
        waiting: Share of time that ranks wait for the slowest, if they synchronize after each step and cost is time.
        step_imbalance: Imbalance of cost over ranks in each step.
        rank_imbalance: Imbalance of cost over ranks in all steps together.
        rank_samples: Number of samples of each rank.
        rank_tokens: Tokens of each rank.
        rank_cost: Cost of each rank.

    >>> from rollbook.batch.plan import plan
    >>> print(plan([5, 3, 8, 2, 6], token_cap=8, ranks=3).report())
    5 samples, 24 tokens (24 in the loss), packed, on 3 ranks x 1 micro-batches
    micro-batches  3: the cap of 8 tokens takes 3, lower bound 3; 0 empty, 0 over the cap
    filled         100.00% of the cap (largest 8 tokens); longest sample 2 with 8 tokens
    padding        0.00% of what is occupied
    waiting        0.00% of the ranks' time; imbalance 1.0000 in the worst step (0), 1.0000 in all
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
    most_images: int
    filled: float | None
    padding: float
    waiting: float
    step_imbalance: tuple[float, ...]
    rank_imbalance: float
    rank_samples: tuple[int, ...]
    rank_tokens: tuple[int, ...]
    rank_cost: tuple[float, ...]
    oversize: tuple[int, ...]
    longest: int | None
    longest_tokens: int
    groups: int | None
    split_groups: int | None
    modalities: Mapping[Hashable, tuple[int, int]]

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanReport:
        """Compute the report of a plan.

        Args:
            plan: The plan.

        Returns:
            The report.
        """
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
        filled = "no cap" if self.filled is None else f"{self.filled:.2%} of the cap"
        lines = [
            f"{self.samples:,} samples, {self.tokens:,} tokens ({self.loss_tokens:,} in the loss), {self.layout}, on "
            f"{self.ranks} ranks x {self.steps} micro-batches",
            f"micro-batches  {self.micro_batches}: {took}{self.empty} empty, {len(self.oversize)} over the cap",
            f"filled         {filled} (largest {self.largest:,} tokens)"
            + ("" if self.longest is None else f"; longest sample {self.longest} with {self.longest_tokens:,} tokens"),
            f"padding        {self.padding:.2%} of what is occupied",
            f"waiting        {self.waiting:.2%} of the ranks' time; imbalance "
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
        del rows[_MAX_PRINTED_RANKS + 1 :]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.ranks > _MAX_PRINTED_RANKS:
            lines.append(f"... {self.ranks - _MAX_PRINTED_RANKS} more ranks")
        return "\n".join(lines)


def _imbalance(costs: NDArray[np.float64]) -> float:
    mean = float(costs.mean())
    return float(costs.max()) / mean if mean else 1.0


def _some(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


# --- costs ------------------------------------------------------------------------------------------------------------

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOE_KEYS = {
    *_EXPERTS,
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "moe_layer_freq",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Cost:
    """FLOPs of a sample of L tokens: `constant + linear * L + quadratic * L**2`, plus a term for sliding windows.

    A plan depends only on proportions, so the backward pass, which multiplies all terms by three, is left out.

    Args:
        linear: Matrix products, per token.
        quadratic: Full attention, per squared token; the factor 1/2 of causal attention is included.
        constant: Cost of each sample.
        windows: (window, coefficient) of sliding-window attention: `coefficient * L**2` up to L = `window`, then
            linear, `coefficient * window * (2 * L - window)`.

    >>> Cost(linear=10, quadratic=2)([0, 1, 3]).tolist()
    [0.0, 12.0, 48.0]
    >>> Cost(linear=0, windows=((4, 1.0),))([2, 4, 5]).tolist()  # 4 * (2 * 5 - 4) = 24, one less than 5 * 5
    [4.0, 16.0, 24.0]
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        parts = {"linear": self.linear, "quadratic": self.quadratic, "constant": self.constant}
        for i, (window, coefficient) in enumerate(self.windows):
            parts[f"windows[{i}][1]"] = coefficient
            if isinstance(window, bool) or not isinstance(window, int) or window < 1:
                raise ValueError(f"windows[{i}][0]: got {window!r}, expected an integer >= 1")
        for name, value in parts.items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1e100:
                raise ValueError(f"{name}: got {value!r}, expected a number in [0, 1e100)")
        if not any(parts.values()):
            raise ValueError("linear, quadratic, constant, windows: got 0 in all of them, expected a cost")

    def __call__(self, lengths: Sequence[int] | Ints) -> NDArray[np.float64]:
        """[N] Compute the costs of samples of these lengths."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total: NDArray[np.float64] = self.constant + tokens * (self.linear + self.quadratic * tokens)
        for window, coefficient in self.windows:
            seen = np.minimum(tokens, window)
            total = total + coefficient * seen * (2 * tokens - seen)
        return total

    @classmethod
    def from_config(cls, config: PretrainedConfig | Mapping[str, Any], *, gated: bool = True) -> Cost:
        """Derive the cost of a decoder from its transformers config. A vision tower is not counted.

        Required: `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `vocab_size`.
        Supported: `num_key_value_heads`, `head_dim`; experts (`num_experts`, `num_local_experts` or
        `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `shared_expert_intermediate_size`,
        `n_shared_experts`) and which layers have them (`mlp_only_layers`, `decoder_sparse_step`,
        `first_k_dense_replace`, `moe_layer_freq`); windows (`sliding_window`, `layer_types`, `use_sliding_window` with
        `max_window_layers`, `sliding_window_pattern`); latent attention (`kv_lora_rank` and related sizes).

        Args:
            config: The config, or a dict of its values; its `text_config` is used if it has one. Prefer the object,
                which fills in `layer_types`.
            gated: Whether the MLP has three matrices (gated) or two.

        Returns:
            The cost.

        Raises:
            ValueError: A required value is missing, or the experts are described in an unknown way.

        An example: two layers. Each has 8*8 + 2*8*4 + 8*8 = 192 weights in attention (two heads of four, one of keys
        and values) and 3*8*16 = 384 in its MLP; the head has 8*32 = 256. A weight is two FLOPs per token:
        2 * (2*576 + 256) = 2816. Scores and values are 2 * 2 * 8 FLOPs for each pair of tokens, half of which is
        causal: 2 * 16 = 32.

        >>> tiny = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...             num_key_value_heads=1, head_dim=4, vocab_size=32)
        >>> Cost.from_config(tiny)
        Cost(linear=2816.0, quadratic=32.0, constant=0.0, windows=())
        >>> float(Cost.from_config(tiny)([10])[0])  # 2816 * 10 + 32 * 10 * 10
        31360.0

        Four experts of width 16, two for each token, and a router of 8*4: only the two count.

        >>> moe = tiny | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        >>> Cost.from_config(moe).linear == 2 * (2 * (192 + 2 * 384 + 8 * 4) + 256)
        True
        """
        inner = _find(config, "text_config")
        model = _Config(config if inner is None else inner)
        hidden, layers = model.size("hidden_size"), model.size("num_hidden_layers")
        projections, scores = _attention(model, hidden)
        weights = layers * projections + hidden * model.size("vocab_size")
        weights += sum(_mlp(model, hidden, layers, 3 if gated else 2))
        kinds = _layer_windows(model, layers)
        windows = sorted({window for window in kinds if window is not None})
        return cls(
            linear=2.0 * weights,
            quadratic=float(scores * kinds.count(None)),
            windows=tuple((window, float(scores * kinds.count(window))) for window in windows),
        )


class _Config:
    """Values of a config by name; `None` if missing."""

    def __init__(self, config: PretrainedConfig | Mapping[str, Any]) -> None:
        if config is None or isinstance(config, (str, bytes, Sequence, Real)):
            raise ValueError(f"config: got {type(config).__name__}, expected a dict or a transformers config")
        self.config = config

    def get(self, name: str) -> Any:
        return _find(self.config, name)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of the config, which is required if there is no default."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"config: {name!r} is missing, expected an integer")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"config: {name!r}: got {value!r}, expected an integer >= {least}")
        return value

    def names(self) -> list[str]:
        return list(self.config if isinstance(self.config, Mapping) else vars(self.config))


def _find(config: PretrainedConfig | Mapping[str, Any], name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _attention(model: _Config, hidden: int) -> tuple[int, int]:
    """Return the weights of the projections, and the FLOPs per squared token of causal attention, of a layer."""
    heads = model.size("num_attention_heads")
    if model.get("kv_lora_rank") is not None:  # latent attention: keys and values come from a small shared vector
        rope, nope = model.size("qk_rope_head_dim"), model.size("qk_nope_head_dim")
        value, latent = model.size("v_head_dim"), model.size("kv_lora_rank")
        rank = model.get("q_lora_rank")
        query = heads * (nope + rope)
        weights = hidden * query if rank is None else model.size("q_lora_rank") * (hidden + query)
        weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return weights, heads * (nope + rope + value)
    if model.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config: 'hidden_size' {hidden} is no multiple of 'num_attention_heads' {heads}, and no head_dim"
        )
    width = model.size("head_dim", hidden // heads)
    shared = model.size("num_key_value_heads", heads)
    return 2 * hidden * width * (heads + shared), 2 * heads * width


def _mlp(model: _Config, hidden: int, layers: int, matrices: int) -> list[int]:
    """Return the active weights in the MLP of each layer: dense, or a router and the active experts."""
    dense = matrices * hidden * model.size("intermediate_size")
    for name in model.names():
        named = "expert" in name or name.startswith(("moe_", "interleave_moe"))
        value = model.get(name) if named and name not in _MOE_KEYS else None
        # Flags, coefficients and names of kernels do not change the count; unknown sizes and lists of layers may.
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
            raise ValueError(
                f"config: {name!r}: got {reprlib.repr(value)}, which is not supported; "
                "use Cost(linear=..., quadratic=...)"
            )
    experts = next((model.size(name, 0, least=0) for name in _EXPERTS if model.get(name) is not None), 0)
    if not experts:
        return [dense] * layers
    width = model.size("moe_intermediate_size", model.size("intermediate_size"))
    active = model.size("num_experts_per_tok") * width
    active += model.size("shared_expert_intermediate_size", 0, least=0)
    active += model.size("n_shared_experts", 0, least=0) * width
    sparse = hidden * experts + matrices * hidden * active
    always_dense = set(model.get("mlp_only_layers") or ())
    first, every = model.size("first_k_dense_replace", 0, least=0), model.size("moe_layer_freq", 1)
    step = model.size("decoder_sparse_step", 1)
    return [dense if i in always_dense or (i + 1) % step or i < first or i % every else sparse for i in range(layers)]


def _layer_windows(model: _Config, layers: int) -> list[int | None]:
    """Return the attention window of each layer, `None` for full attention."""
    kinds = model.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ValueError(f"config: 'layer_types': got {len(kinds)} entries, expected {layers}, one for each layer")
        for kind in kinds:
            if kind not in (_FULL, _SLIDING):
                raise ValueError(f"config: 'layer_types': got {kind!r}, expected {_FULL!r} or {_SLIDING!r}")
        return [model.size("sliding_window") if kind == _SLIDING else None for kind in kinds]
    if not model.get("sliding_window") or model.get("use_sliding_window") is False:
        return [None] * layers
    window = model.size("sliding_window")
    full_before = model.size("max_window_layers", 0, least=0)
    pattern = model.size("sliding_window_pattern", 0, least=0)
    return [None if i < full_before or (pattern and not (i + 1) % pattern) else window for i in range(layers)]


# --- arguments of `plan` ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The checked arguments of `plan`. N samples; A atoms: samples, or groups that stay in one micro-batch."""

    ranks: int
    micro_batches: int | None
    token_cap: int | None
    image_cap: int | None
    limits: Limits
    """The caps, limited to the size of all samples, so that any integer may be a cap."""
    lengths: Ints
    images: Ints
    costs: Floats
    loss_tokens: Ints
    group_of: Ints | None
    group_keys: list[Hashable]
    keep_groups: KeepGroups
    modality: tuple[Ints, list[Hashable]] | None
    """[N] The number of each sample's label, and the labels in alphabetical order."""
    uniform_modality: bool
    equal_counts: bool
    alone: bool
    may_be_empty: bool
    atom_of: Ints | None
    """[N] Each sample's atom, if atoms are groups."""
    kinds: Ints
    """[N] Rows that are equal in everything but the group have the same number."""
    atoms: Atoms

    def make_atoms(self, codes: Ints | None) -> Atoms:
        """Return one atom for each sample, or for each group that `codes` [N] numbers."""
        return Atoms.from_samples(codes, self.lengths, self.images, self.costs, self.kinds)

    def samples(self, atom: int) -> Ints:
        """Return the samples of an atom."""
        return np.array([atom]) if self.atom_of is None else np.flatnonzero(self.atom_of == atom)

    def describe(self, atom: int) -> str:
        """Describe an atom in an error message."""
        if self.atom_of is None:
            return f"sample {atom}"
        samples = self.samples(atom)
        shown = ", ".join(map(str, samples[:4])) + (", ..." if len(samples) > 4 else "")
        return f"group {self.group_keys[atom]!r} (samples {shown})"

    @property
    def noun(self) -> str:
        """`samples` or `groups`, whichever the atoms are."""
        return "samples" if self.atom_of is None else "groups"


def _list(name: str, values: Iterable[Any], count: int | None) -> Any:
    """Return the values as an array or a list, or raise `ValueError` if there are not `count` of them."""
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: got {type(values).__name__}, expected a value for each sample")
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1 and not isinstance(values, str):  # numpy's strings have a shape, []
        raise ValueError(f"{name}: got shape {list(shape)}, expected one dimension")
    if not isinstance(values, np.ndarray):
        # Tensors on any device become lists, so that torch is not needed here.
        values = values.tolist() if hasattr(values, "tolist") and not isinstance(values, str) else list(values)
    if count is not None and len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values, expected {count}, one for each sample")
    return values


def _integers(name: str, values: Iterable[Any], count: int | None = None) -> Ints:
    entries = _list(name, values, count)
    if not isinstance(entries, np.ndarray) or entries.dtype.kind not in "iu":
        for i, entry in enumerate(entries):
            if isinstance(entry, (bool, np.bool_)) or not isinstance(entry, Integral):
                raise ValueError(f"{name}[{i}]: got {entry!r}, expected an integer >= 0")
    numbers: Ints = np.array([min(int(n), 2**62) for n in entries] if isinstance(entries, list) else entries, np.int64)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= 2**40):
        i = int(np.flatnonzero((numbers < 0) | (numbers >= 2**40))[0])
        raise ValueError(f"{name}[{i}]: got {entries[i]}, expected an integer in [0, 2**40)")
    return numbers


def _costs(cost: Cost | Iterable[float], lengths: Ints) -> Floats:
    if cost is None:
        return lengths.astype(np.float64)
    if isinstance(cost, Cost):
        return cost(lengths)
    values = _list("cost", cost, len(lengths))
    try:
        numbers: Floats = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"cost: got {values!r}, expected a Cost or a number for each sample") from None
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers < 1e200)))  # so that sums and products stay finite
    if len(wrong):
        raise ValueError(f"cost[{wrong[0]}]: got {values[wrong[0]]!r}, expected a number in [0, 1e200)")
    return numbers


def _count_loss_tokens(records: Experiences, lengths: Ints) -> list[int]:
    """Count the tokens of each record in the loss: those in its mask or, without one, all of its response."""
    from rollbook.batch.columns import mask_unpredicted

    records = mask_unpredicted(records)
    responses = (lengths - np.minimum(records.prompt_lengths(), lengths)).tolist()
    masks = records.values("action_mask")
    return [
        response if mask is None else int((mask != 0).sum()) for mask, response in zip(masks, responses, strict=True)
    ]


def _keys(name: str, values: Iterable[Hashable], count: int) -> tuple[Ints, list[Hashable]]:
    """[N] Number the keys in the order of first appearance; return the numbers and the distinct keys."""
    numbers: dict[Hashable, int] = {}
    codes = []
    values = _list(name, values, count)
    for i, label in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        key = _as_key(label)
        if key is None:
            raise ValueError(f"{name}[{i}]: got {label!r}, expected a key, such as a string or a number")
        codes.append(numbers.setdefault(key, len(numbers)))
    return np.array(codes, dtype=np.int64), list(numbers)


def _as_key(key: Json) -> Hashable:
    """Return a key with numpy and torch scalars as Python values, or `None` if it is NaN or not hashable.

    Tensors hash by identity: two tensors of the same number would be two keys.
    """
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, tuple):
        parts = [(entry, _as_key(entry)) for entry in key]
        if all(entry is plain for entry, plain in parts):
            return key
        return None if any(plain is None for entry, plain in parts if entry is not None) else tuple(p for _, p in parts)
    if hasattr(key, "ndim") and hasattr(key, "item"):
        if key.ndim:
            return None
        key = key.item()
    if not isinstance(key, Hashable) or (isinstance(key, (float, complex)) and key != key):
        return None
    return key


def _sorted_keys(codes: Ints, keys: list[Hashable]) -> tuple[Ints, list[Hashable]]:
    """Renumber keys in alphabetical order, independent of the order of samples."""
    order = sorted(range(len(keys)), key=lambda code: (str(keys[code]), type(keys[code]).__name__))
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys))
    return number[codes], [keys[code] for code in order]


def _kinds(columns: list[Ints | Floats]) -> Ints:
    """[N] Number the samples so that those that agree in all columns [N] have the same number, the largest first."""
    order = np.lexsort(-np.stack(columns[::-1]))
    changes = np.zeros(len(order), dtype=np.bool_)
    for column in columns:
        changes[1:] |= np.diff(column[order]) != 0
    kinds = np.empty(len(order), dtype=np.int64)
    kinds[order] = np.cumsum(changes)
    return kinds


# --- which atom goes where --------------------------------------------------------------------------------------------


def _place(request: Request) -> tuple[list[Bins], list[Hashable], list[_Phase]]:
    """Return the atoms of each [rank][step], the modality of each step, and the phases that the steps come from."""
    limits, atoms = request.limits, request.atoms
    over = limits.over(atoms)
    if over.any():
        _check_oversize(request, over)
    rank_of = None
    if request.group_of is not None and request.keep_groups == "rank":
        rank_of = _assign_groups(request, request.group_of)

    # Each modality is a phase; its atoms are packed for all ranks together, or rank by rank.
    everything = np.arange(len(atoms.count))
    by_modality: list[tuple[Hashable, Ints]] = [(None, everything)] if len(everything) else []
    if request.uniform_modality and request.modality is not None:
        by_modality = _by_modality(request, *request.modality)
    phases = []
    for label, ids in by_modality:
        shares = [(list(range(request.ranks)), ids)]
        if rank_of is not None:
            shares = [([rank], ids[rank_of[ids] == rank]) for rank in range(request.ranks)]
        pools = []
        steps = 1
        for ranks, share in shares:
            alone, rest = share[over[share]], share[~over[share]]
            if limits.fit_one_bin(atoms, rest):
                start = [rest.tolist()] if len(rest) else []
            else:
                bound = len(alone) + _lower_bound(request, rest)
                start = _pack(atoms, rest, limits, enough=-(-bound // len(ranks)) * len(ranks) - len(alone))
            pools.append(_Pool(ranks, alone, rest, start, len(alone) + len(start)))
            steps = max(steps, -(-pools[-1].needed // len(ranks)))
        bound = int(over[ids].sum()) + _lower_bound(request, ids[~over[ids]])
        total = fsum(atoms.cost[ids].tolist())  # exact, and so independent of the order of samples
        phases.append(_Phase(label, pools, bound, total, steps))
    if request.micro_batches is not None:
        _share_steps(request, phases, request.micro_batches)

    grid: list[Bins] = [[] for _ in range(request.ranks)]
    labels: list[Hashable] = []
    totals = [0.0] * request.ranks
    for phase in phases:
        labels += [phase.label] * phase.steps
        for pool in phase.pools:
            count = phase.steps * len(pool.ranks)
            if request.equal_counts or len(pool.alone) + len(pool.rest) < count:
                _check_enough(request, phase, pool, count)
            bins: Bins = np.expand_dims(pool.alone, 1).tolist()
            if request.ranks == 1 and limits.capped and pool.needed == count:
                bins += pool.start  # with one rank, none waits for another: costs need not be level
            else:
                bins += _level_bins(atoms, pool.rest, count - len(bins), limits, pool.start, equal=request.equal_counts)
            if count == 1:
                grid[pool.ranks[0]] += bins
            else:
                _arrange(request, bins, pool.ranks, totals, grid)
    if not phases:
        labels = [None] * (request.micro_batches or 1)
        grid = [[[] for _ in labels] for _ in range(request.ranks)]
    return grid, labels, phases


@dataclass
class _Phase:
    """Steps of one modality, or of all where they may mix."""

    label: Hashable
    pools: list[_Pool]
    bound: int
    cost: float
    steps: int


@dataclass
class _Pool:
    """Atoms of one modality that may go to any of these ranks."""

    ranks: list[int]
    alone: Ints
    """Atoms over a cap, each with a micro-batch of its own."""
    rest: Ints
    start: Bins
    """The rest in few bins."""
    needed: int
    """Bins of both."""


def _check_oversize(request: Request, over: NDArray[np.bool_]) -> None:
    """Raise for an atom over a cap, unless it is a sample that may be alone."""
    limits, atoms = request.limits, request.atoms
    for atom in np.flatnonzero(over).tolist():
        if request.alone and atoms.count[atom] == 1:
            continue
        size = int(atoms.count[atom] * atoms.longest[atom] if limits.padded else atoms.tokens[atom])
        name, cap, noun = "token_cap", request.token_cap, "tokens"
        if cap is None or size <= cap:
            size, name, cap, noun = int(atoms.images[atom]), "image_cap", request.image_cap, "images"
        hint = "oversize='alone' gives it a micro-batch of its own"
        if atoms.count[atom] > 1:
            hint = "keep_groups='micro_batch' does not let it be divided"
        sample = int(request.samples(atom)[0])
        raise PlanError(name, f"{request.describe(atom)} takes {size} {noun}, over the cap of {cap}; {hint}", sample)


def _assign_groups(request: Request, groups: Ints) -> Ints:
    """[N] Assign whole groups to ranks; returns the rank of each sample."""
    keys = request.group_keys
    blocks = request.make_atoms(groups)
    ids = np.arange(len(keys))
    if len(ids) < request.ranks and not request.may_be_empty:
        raise PlanError(
            "ranks",
            f"{len(ids)} groups (the first is {keys[0]!r}, of sample 0), each on one rank, leave some of "
            f"{request.ranks} ranks with nothing; empty='allow' gives those empty micro-batches",
            0,
        )
    if request.equal_counts:
        odd = np.flatnonzero(blocks.count != blocks.count[0]) if len(ids) else ids
        if len(odd):
            sample = int(np.flatnonzero(groups == odd[0])[0])
            raise PlanError(
                "equal_counts",
                f"group {keys[odd[0]]!r} (sample {sample}) has {blocks.count[odd[0]]} samples and group {keys[0]!r} "
                f"{blocks.count[0]}, so ranks that keep groups cannot hold equally many",
                sample,
            )
        if len(ids) % request.ranks:
            raise PlanError("equal_counts", f"{len(ids)} groups are no multiple of {request.ranks} ranks", 0)
    rank_of_group = np.empty(len(keys), dtype=np.int64)
    for rank, members in enumerate(_level_bins(blocks, ids, request.ranks, Limits(), [], equal=request.equal_counts)):
        rank_of_group[members] = rank
    return rank_of_group[groups]


def _by_modality(request: Request, codes: Ints, labels: list[Hashable]) -> list[tuple[Hashable, Ints]]:
    """Return the atoms of each modality."""
    of_atom = codes
    if request.atom_of is not None:
        of_atom = np.zeros(len(request.atoms.count), dtype=np.int64)
        of_atom[request.atom_of] = codes
        mixed = np.flatnonzero(of_atom[request.atom_of] != codes)
        if len(mixed):
            sample = int(mixed[0])
            atom = int(request.atom_of[sample])
            raise PlanError(
                "uniform_modality",
                f"sample {sample} is {labels[codes[sample]]!r}, but {request.describe(atom)} also has "
                f"{labels[of_atom[atom]]!r}, and keep_groups='micro_batch' does not let it be divided",
                sample,
            )
    return [(label, np.flatnonzero(of_atom == code)) for code, label in enumerate(labels)]


def _lower_bound(request: Request, ids: Ints) -> int:
    """Bound the number of bins of these atoms from below."""
    limits, atoms = request.limits, request.atoms
    if limits.fit_one_bin(atoms, ids):
        return min(len(ids), 1)
    if request.atom_of is not None and limits.padded:
        # The padding that a group causes depends on its neighbors: bounded by its samples, each for itself.
        ids, atoms = np.flatnonzero(np.isin(request.atom_of, ids)), request.make_atoms(None)
    bounds = [1]
    if limits.token_cap is not None:
        if limits.padded:  # of samples, cutting the sorted row is optimal
            bounds.append(len(_cut_row(atoms, ids, Limits(limits.token_cap, padded=True))))
        else:
            bounds.append(-(-int(atoms.tokens[ids].sum()) // limits.token_cap))
            bounds.append(int((2 * atoms.tokens[ids] > limits.token_cap).sum()))
    if limits.image_cap is not None:
        bounds.append(-(-int(atoms.images[ids].sum()) // limits.image_cap))
    return max(bounds)


def _share_steps(request: Request, phases: list[_Phase], steps: int) -> None:
    """Give the steps that are left over to the phases whose steps cost the most."""
    least = sum(phase.steps for phase in phases)
    if least > steps:
        needed, bound = sum(pool.needed for p in phases for pool in p.pools), sum(p.bound for p in phases)
        caps = {"token_cap": request.token_cap, "image_cap": request.image_cap}
        stated = " and ".join(f"{name}={cap}" for name, cap in caps.items() if cap is not None) or "no cap"
        kinds = f" of {len(phases)} modalities" if len(phases) > 1 else ""
        raise PlanError(
            "micro_batches",
            f"got {steps} on each of {request.ranks} ranks, {steps * request.ranks} in all, but with {stated} "
            f"{len(request.lengths)} samples{kinds} with {int(request.lengths.sum())} tokens were packed into no fewer "
            f"than {needed} (at least {bound}), which takes {least} on each",
        )
    if len(phases) == 1:
        phases[0].steps = steps
        return
    for _ in range(steps - least if phases else 0):
        # One that could fill another step, if there is one.
        def worth(phase: _Phase) -> tuple[bool, float]:
            pools = ((len(p.alone) + len(p.rest), (phase.steps + 1) * len(p.ranks)) for p in phase.pools)
            return all(available >= enough for available, enough in pools), phase.cost / phase.steps

        max(phases, key=worth).steps += 1


def _check_enough(request: Request, phase: _Phase, pool: _Pool, count: int) -> None:
    """Raise if a micro-batch would stay empty, or counts would differ, and that is not allowed."""
    ids = np.sort(np.concatenate((pool.alone, pool.rest)))
    location = "" if phase.label is None else f" of modality {phase.label!r}"
    location += f" on rank {pool.ranks[0]}" if len(pool.ranks) < request.ranks else ""
    slots = f"{count} micro-batches ({phase.steps} on each of {len(pool.ranks)} ranks)"
    first = int(request.samples(int(ids[0]))[0]) if len(ids) else None
    if len(ids) < count and not request.may_be_empty:
        name = "ranks" if phase.steps == 1 else "token_cap" if request.micro_batches is None else "micro_batches"
        listed = ", ".join(request.describe(atom) for atom in ids[:4].tolist()) + (", ..." if len(ids) > 4 else "")
        raise PlanError(
            name,
            f"{len(ids)} {request.noun}{location} ({listed or 'none'}) cannot fill {slots}; "
            "empty='allow' leaves some empty, with weight 0",
            first,
        )
    if request.equal_counts:
        first_size = len(phase.pools[0].rest)  # without caps none is alone
        if len(ids) != first_size:
            raise PlanError("equal_counts", f"{len(ids)} samples{location}, but {first_size} on rank 0", first)
    if request.equal_counts and len(ids):
        uneven = ids[request.atoms.count[ids] != request.atoms.count[ids[0]]]
        if len(uneven):
            sizes = request.atoms.count[[uneven[0], ids[0]]].tolist()
            both = (
                f"{request.describe(int(uneven[0]))} has {sizes[0]} samples, {request.describe(int(ids[0]))} {sizes[1]}"
            )
            raise PlanError("equal_counts", f"{both}: not all alike", int(request.samples(int(uneven[0]))[0]))
        if len(ids) % count:
            raise PlanError("equal_counts", f"{len(ids)} {request.noun}{location} are no multiple of {slots}", first)


def _arrange(request: Request, bins: Bins, ranks: list[int], totals: list[float], grid: list[Bins]) -> None:
    """Put bins of similar cost into one step, the costliest on the rank with the lowest cost so far."""
    peak, cost, count = (column.tolist() for column in (request.atoms.peak, request.atoms.cost, request.atoms.count))
    if request.limits.padded:
        costs = [sum(count[a] for a in members) * max((peak[a] for a in members), default=0.0) for members in bins]
    else:
        costs = [sum(sorted(cost[a] for a in members)) for members in bins]
    first = [int(request.atoms.rank[members[0]]) if members else 0 for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], not bins[b], first[b]))
    for at in range(0, len(order), len(ranks)):
        idlest = sorted(ranks, key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(idlest, order[at : at + len(ranks)], strict=True):
            grid[rank].append(bins[chosen])
            totals[rank] += costs[chosen]


def _assemble(request: Request, grid: list[Bins], labels: list[Hashable], phases: list[_Phase]) -> Plan:
    """Build the plan from the atoms of each [rank][step]."""
    ranks, steps, count = request.ranks, len(labels), len(request.lengths)
    cells = list(chain.from_iterable(grid))
    slot_of_atom = np.empty(len(request.atoms.count), dtype=np.int64)
    slot_of_atom[list(chain.from_iterable(cells))] = np.repeat(np.arange(len(cells)), list(map(len, cells)))
    slot = slot_of_atom if request.atom_of is None else slot_of_atom[request.atom_of]
    slots = ranks * steps
    order = np.argsort(slot, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(count)
    for array in (order, inverse):
        array.flags.writeable = False

    counts = np.bincount(slot, minlength=slots)
    ends = np.cumsum(counts)
    # Sums over the samples of each micro-batch: differences of running sums, exact for integers.
    columns = np.stack([request.lengths, request.loss_tokens, request.images, request.loss_tokens > 0])
    running = np.zeros((4, count + 1), dtype=np.int64)
    np.cumsum(columns[:, order], axis=1, out=running[:, 1:])
    tokens, loss, images, sequences = (running[:, ends] - running[:, ends - counts]).tolist()
    starts, stops = (ends - counts).tolist(), ends.tolist()
    if request.limits.padded:
        sizes = (counts * _largest(request.lengths, slot, slots)).tolist()
        cost = (counts * _largest(request.costs, slot, slots)).tolist()
    else:
        sizes, cost = tokens, np.bincount(slot, weights=request.costs, minlength=slots).tolist()
    over = np.flatnonzero(request.limits.over(request.atoms if request.atom_of is None else request.make_atoms(None)))
    oversize = set(slot[over].tolist())
    denominators = Denominators(int(request.loss_tokens.sum()), int((request.loss_tokens > 0).sum()), count)
    kinds: list[Hashable] = [None] * slots
    modalities: dict[Hashable, tuple[int, int]] = {}
    if request.modality is not None:
        codes, names = request.modality
        high = _largest(codes, slot, slots)
        low = len(names) - _largest(len(names) - codes, slot, slots)
        kinds = [names[h] if n and h == w else None for h, w, n in zip(high, low, counts, strict=True)]
        for code, name in enumerate(names):
            modalities[name] = (int((codes == code).sum()), int(request.lengths[codes == code].sum()))
    split = None
    if request.group_of is not None:
        places = np.unique(request.group_of * ranks + slot // steps) // ranks
        split = int((np.bincount(places, minlength=1) > 1).sum())
    batches = []
    for at in range(slots):
        batch = MicroBatch(
            rank=at // steps,
            step=at % steps,
            indices=order[starts[at] : stops[at]],
            tokens=tokens[at],
            size=sizes[at],
            loss_tokens=loss[at],
            sequences=sequences[at],
            images=images[at],
            cost=cost[at],
            modality=labels[at % steps] if labels[at % steps] is not None else kinds[at],
            oversize=at in oversize,
            token_weight=loss[at] / max(denominators.tokens, 1),
            sequence_weight=sequences[at] / max(denominators.sequences, 1),
        )
        batches.append(batch)
    needed = bound = 0
    for phase in phases:
        bound += phase.bound
        for pool in phase.pools:
            needed += pool.needed
    longest = int(np.argmax(request.lengths)) if count else None
    return Plan(
        ranks=ranks,
        steps=steps,
        micro_batches=tuple(batches),
        denominators=denominators,
        order=order,
        inverse=inverse,
        layout="padded" if request.limits.padded else "packed",
        token_cap=request.token_cap,
        image_cap=request.image_cap,
        needed=needed if request.limits.capped else None,
        lower_bound=bound if request.limits.capped else None,
        oversize=tuple(over.tolist()),
        longest=longest,
        longest_tokens=0 if longest is None else int(request.lengths[longest]),
        groups=None if request.group_of is None else len(request.group_keys),
        split_groups=split,
        modalities=modalities,
    )


def _largest(values: NDArray[Any], slot: Ints, slots: int) -> NDArray[Any]:
    """[slots] Compute the largest value of each slot, 0 for empty ones."""
    largest = np.zeros(slots, dtype=values.dtype)
    np.maximum.at(largest, slot, values)
    return largest


# --- bin packing ------------------------------------------------------------------------------------------------------

_LEVEL = 5e-4  # stop if the costliest bin is at most this far above the mean: a smaller difference cannot be measured
_SWEEPS = 64
_HALVINGS = 20
_SHIFTS = 4
_PAIRS_AT_ONCE = 1 << 15  # exchanges looked at in one sweep: a fraction of a millisecond
_MAX_SLOTS = 1 << 22  # 32 MB for each array of a sweep
_MAX_TRIES = 64
_PAIRS_TRIED = 16
_MAX_COMPLETE_ATOMS = 16_384  # taking atoms out of a long list takes longer than finding them


@dataclass(frozen=True)
class Atoms:
    """A atoms: samples or groups of samples that are not split. All fields are arrays [A]."""

    tokens: Ints
    count: Ints
    """Number of samples."""
    longest: Ints
    """Tokens of the longest sample."""
    images: Ints
    cost: Floats
    """Sum of the costs of the samples."""
    peak: Floats
    """Largest cost of a sample."""
    rank: Ints
    """Rank among all atoms, sorted by content, then by index. It breaks ties, so that the order of samples does not
    matter."""

    @classmethod
    def from_samples(cls, codes: Ints | None, lengths: Ints, images: Ints, costs: Floats, kinds: Ints) -> Atoms:
        """Build an atom for each sample, or for each group if `codes` [N] has the group of each sample, from 0.

        `kinds` [N] numbers the samples by content: samples with the same number are interchangeable.
        """
        order = np.argsort(kinds, kind="stable")
        rank = np.empty_like(order)
        if codes is None:
            rank[order] = np.arange(len(order))
            return cls(lengths, np.ones_like(lengths), lengths, images, costs, costs, rank)
        # In the order of kinds, so that sums of floats do not depend on the order of the samples.
        codes, lengths, images, costs = codes[order], lengths[order], images[order], costs[order]
        groups = int(codes.max(initial=-1)) + 1
        tokens, image_count, cost = np.zeros(groups, np.int64), np.zeros(groups, np.int64), np.zeros(groups)
        longest, peak = np.zeros(groups, np.int64), np.zeros(groups)
        np.add.at(tokens, codes, lengths)
        np.add.at(image_count, codes, images)
        np.add.at(cost, codes, costs)
        np.maximum.at(longest, codes, lengths)
        np.maximum.at(peak, codes, costs)
        count = np.bincount(codes, minlength=groups).astype(np.int64)
        members = kinds[order][np.argsort(codes, kind="stable")].tolist()  # group by group, sorted in each
        ends = np.cumsum(count).tolist()
        contents = [members[end - size : end] for end, size in zip(ends, count.tolist(), strict=True)]
        rank = np.empty(groups, np.int64)
        rank[sorted(range(groups), key=contents.__getitem__)] = np.arange(groups)
        return cls(tokens, count, longest, image_count, cost, peak, rank)


@dataclass(frozen=True)
class Limits:
    """Capacity of one bin, in numbers that fit int64. Padded, every sample of a bin takes as much room, and costs as
    much, as the largest."""

    token_cap: int | None = None
    image_cap: int | None = None
    padded: bool = False

    @property
    def capped(self) -> bool:
        """Whether there is any limit."""
        return self.token_cap is not None or self.image_cap is not None

    def over(self, atoms: Atoms) -> NDArray[np.bool_]:
        """[A] Whether an atom exceeds a limit on its own."""
        over = np.zeros(len(atoms.tokens), dtype=np.bool_)
        if self.token_cap is not None:
            over |= (atoms.count * atoms.longest if self.padded else atoms.tokens) > self.token_cap
        if self.image_cap is not None:
            over |= atoms.images > self.image_cap
        return over

    def fit_one_bin(self, atoms: Atoms, ids: Ints) -> bool:
        """Whether all these atoms fit into one bin."""
        size = int(atoms.tokens[ids].sum())
        if self.padded:
            size = int(atoms.count[ids].sum()) * int(atoms.longest[ids].max(initial=0))
        return (self.token_cap is None or size <= self.token_cap) and (
            self.image_cap is None or int(atoms.images[ids].sum()) <= self.image_cap
        )

    def cost(self, atoms: Atoms, members: Sequence[int]) -> float:
        """Compute the cost of a bin."""
        if not members:
            return 0.0
        if self.padded:
            return float(atoms.count[members].sum() * atoms.peak[members].max())
        return float(atoms.cost[members].sum())


def _pack(atoms: Atoms, ids: Ints, limits: Limits, enough: int) -> Bins:
    """Pack atoms into few bins; a packing of at most `enough` bins is not improved."""
    bins = _best_fit(atoms, ids, limits)
    if len(bins) > enough:
        second: Bins = []
        if limits.padded:
            second = _cut_row(atoms, ids, limits)
        elif limits.token_cap is not None and limits.image_cap is not None:
            second = _best_fit(atoms, ids, limits, by_share=True)
        elif limits.token_cap is not None and len(ids) <= _MAX_COMPLETE_ATOMS:
            second = _complete(atoms, ids, limits.token_cap)
        if second and len(second) < len(bins):
            return second
    return bins


def _best_fit(atoms: Atoms, ids: Ints, limits: Limits, by_share: bool = False) -> Bins:
    """Put the largest atom first, each into the fullest bin with room for it.

    Size is in tokens or, with `by_share`, the larger share of a cap. Padded, the first sample of a bin is its longest
    and determines how many fit, so that room is counted in samples.
    """
    if limits.padded:
        order, sizes = _by_length(atoms, ids), atoms.count
    else:
        order, sizes = _by_size(atoms, ids), atoms.tokens
    if by_share and limits.token_cap is not None and limits.image_cap is not None:
        shares = np.maximum(sizes[order] / limits.token_cap, atoms.images[order] / limits.image_cap)
        order = order[np.argsort(-shares, kind="stable")]
    everything = int(sizes[ids].sum())
    smallest = int(sizes[ids].min(initial=everything))
    # Without a cap on images they are not counted. Atoms with images skip bins without room for any.
    brought = np.zeros_like(atoms.images) if limits.image_cap is None else atoms.images
    fewest_images = int(brought[ids][brought[ids] > 0].min(initial=np.iinfo(np.int64).max))
    bins: Bins = []
    open_: list[tuple[int, int]] = []  # (room left, bin), sorted
    open_to_images: list[tuple[int, int]] = []  # those with room for the atom with the fewest images
    images_left: list[int] = []
    columns = zip(
        order.tolist(), sizes[order].tolist(), atoms.longest[order].tolist(), brought[order].tolist(), strict=True
    )
    for atom, size, longest, images in columns:
        among = open_to_images if images else open_
        at = bisect_left(among, (size, -1))
        while at < len(among) and images_left[among[at][1]] < images:
            at += 1
        if at < len(among):
            free, chosen = among[at]
            del open_[bisect_left(open_, (free, chosen))]
            if images_left[chosen] >= fewest_images:
                del open_to_images[bisect_left(open_to_images, (free, chosen))]
        else:
            free, chosen = everything, len(bins)
            if limits.token_cap is not None:
                free = limits.token_cap // max(longest, 1) if limits.padded else limits.token_cap
            bins.append([])
            images_left.append(limits.image_cap or 0)
        bins[chosen].append(atom)
        images_left[chosen] -= images
        if free - size >= smallest:
            insort(open_, (free - size, chosen))
            if images_left[chosen] >= fewest_images:
                insort(open_to_images, (free - size, chosen))
    return bins


def _complete(atoms: Atoms, ids: Ints, cap: int) -> Bins:
    """Fill bin by bin with the largest atoms left; the last one is replaced by the best pair if that fills more.

    Among a thousand atoms there is nearly always a pair that fills a bin exactly.
    """
    order = _by_size(atoms, ids)[::-1]
    left, sizes = order.tolist(), atoms.tokens[order].tolist()  # ascending
    bins: Bins = []
    while left:
        taken: list[int] = []
        free, at = cap, len(left)
        while (at := bisect_right(sizes, free, 0, at) - 1) >= 0:
            taken.append(at)
            free -= sizes[at]
        if free and len(taken) > 1:
            last = taken.pop()
            free += sizes[last]
            taken += _best_pair(sizes, free, last, taken)
        bins.append([left[at] for at in taken])
        for at in sorted(taken, reverse=True):
            del left[at], sizes[at]
    return bins


def _best_pair(sizes: list[int], free: int, last: int, taken: list[int]) -> list[int]:
    """Return the positions of a pair that fills `free` best, or `[last]` if that is as good; tries some pairs."""
    best, pair = sizes[last], [last]
    # The larger of a better pair is more than half of the last one.
    low, high = bisect_right(sizes, best // 2), bisect_right(sizes, free)
    for larger in range(high - 1, low - 1, -max((high - low) // _PAIRS_TRIED, 1)):
        # An atom that was skipped did not fit beside those taken after it, so its partner is not one of them.
        smaller = bisect_right(sizes, free - sizes[larger], 0, larger) - 1
        if smaller >= 0 and larger not in taken and sizes[larger] + sizes[smaller] > best:
            best, pair = sizes[larger] + sizes[smaller], [larger, smaller]
            if best == free:
                break
    return pair


def _level_bins(atoms: Atoms, ids: Ints, count: int, limits: Limits, start: Bins, *, equal: bool = False) -> Bins:
    """Pack atoms into `count` bins of level costs; some are empty only if there are fewer atoms.

    `start` is a packing into at most `count` bins, used if leveling alone breaks a limit. With `equal`, every bin gets
    equally many atoms: their number must be a multiple of `count`, and there must be no limits.
    """
    if equal:
        if limits.padded:
            return [block.tolist() for block in np.split(_by_length(atoms, ids), count)]
        return _level(atoms, _fold(atoms, ids, count), limits, moves=False)
    if limits.padded:
        return _split(atoms, _level_rows(atoms, ids, count, limits, start), count, limits)
    bins = _lightest_first(atoms, ids, count, limits)
    if bins is None:
        bins = _split(atoms, start, count, limits)
    return _level(atoms, bins, limits)


def _lightest_first(atoms: Atoms, ids: Ints, count: int, limits: Limits) -> Bins | None:
    """Put the costliest atom first, each into the cheapest bin with room; `None` if the limits prevent that."""
    order = _by_cost(atoms, ids)
    bins: Bins = [[] for _ in range(count)]
    heap = [(0.0, 0, b) for b in range(count)]  # (cost, atoms, bin): empty bins before those of free atoms
    columns = zip(order.tolist(), atoms.cost[order].tolist(), strict=True)
    if not limits.capped:
        for atom, cost in columns:
            total, members, chosen = heap[0]
            bins[chosen].append(atom)
            heapq.heapreplace(heap, (total + cost, members + 1, chosen))
        return bins
    tokens, images = atoms.tokens.tolist(), atoms.images.tolist()
    free_tokens = [limits.token_cap if limits.token_cap is not None else sum(tokens)] * count
    images_left = [limits.image_cap if limits.image_cap is not None else sum(images)] * count
    for atom, cost in columns:
        full = []
        while heap and (free_tokens[heap[0][2]] < tokens[atom] or images_left[heap[0][2]] < images[atom]):
            full.append(heapq.heappop(heap))
            if len(full) > _MAX_TRIES:
                return None
        if not heap:
            return None
        total, members, chosen = heap[0]
        bins[chosen].append(atom)
        free_tokens[chosen] -= tokens[atom]
        images_left[chosen] -= images[atom]
        heapq.heapreplace(heap, (total + cost, members + 1, chosen))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fold(atoms: Atoms, ids: Ints, count: int) -> Bins:
    """Give each bin equally many atoms: row by row of the sorted atoms, the costliest to the cheapest bin."""
    rows = _by_cost(atoms, ids).reshape(-1, count)
    totals = np.zeros(count)
    placed = np.empty_like(rows)
    for row, costs, out in zip(rows, atoms.cost[rows], placed, strict=True):
        cheapest = np.argsort(totals, kind="stable")
        out[cheapest] = row
        totals[cheapest] += costs
    bins: Bins = placed.T.tolist()
    return bins


def _split(atoms: Atoms, bins: Bins, count: int, limits: Limits) -> Bins:
    """Split the costliest bins until there are `count`; with too few atoms, add empty ones."""
    done = [members for members in bins if len(members) < 2]
    heap = [(-limits.cost(atoms, members), b, members) for b, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(heap)
    number = len(bins)
    while heap and len(heap) + len(done) < count:
        members = heapq.heappop(heap)[2]
        halves = [members[: len(members) // 2], members[len(members) // 2 :]]
        if not limits.padded:
            halves = _lightest_first(atoms, np.array(members), 2, Limits()) or halves
        for half in halves:
            number += 1
            if len(half) > 1:
                heapq.heappush(heap, (-limits.cost(atoms, half), number, half))
            else:
                done.append(half)
    parts = [members for _, _, members in sorted(heap)] + done
    return parts + [[] for _ in range(count - len(parts))]


def _level(atoms: Atoms, bins: Bins, limits: Limits, moves: bool = True) -> Bins:
    """Exchange atoms between costly and cheap bins, many pairs of bins at once, until the costs are level.

    Bins are rows of slots; with `moves` each has an empty slot, and an exchange with that is a move.
    """
    count = len(bins)
    width = max((len(members) for members in bins), default=0) + moves
    if count < 2 or width < 1 or count * width > _MAX_SLOTS:
        return bins
    no_atom = len(atoms.cost)
    slots = np.full((count, width), no_atom)
    for row, members in zip(slots, bins, strict=True):
        row[: len(members)] = members
    cost = np.append(atoms.cost, 0.0)
    total = cost[slots].sum(axis=1)
    goal = total.mean() * (1 + _LEVEL)
    capped = [
        (np.append(amount, 0), np.append(amount, 0)[slots].sum(axis=1), cap)
        for amount, cap in ((atoms.tokens, limits.token_cap), (atoms.images, limits.image_cap))
        if cap is not None
    ]
    columns = np.unique(np.linspace(0, width - 1, min(width, 256)).astype(np.int64))
    max_pairs = max(_PAIRS_AT_ONCE // len(columns) ** 2, 1)
    skipped = shift = 0
    for _ in range(_SWEEPS):
        above = int((total > goal).sum())
        pairs = min(above - skipped, (count - shift - skipped) // 2, max_pairs)
        if pairs < 1:
            break
        ranked = np.argsort(-total, kind="stable")
        high, low = ranked[skipped : skipped + pairs], ranked[::-1][shift : shift + pairs]  # no bin is in two pairs
        gap = total[high] - total[low]
        from_costly, from_cheap = slots[np.ix_(high, columns)], slots[np.ix_(low, columns)]
        less = cost[from_costly][:, :, None] - cost[from_cheap][:, None, :]
        off = np.abs(less - gap[:, None, None] / 2)
        for amount, sums, cap in capped:
            change = amount[from_costly][:, :, None] - amount[from_cheap][:, None, :]
            off[(change > (cap - sums[low])[:, None, None]) | (-change > (cap - sums[high])[:, None, None])] = np.inf
        best = off.reshape(pairs, -1).argmin(axis=1)
        mine, other = columns[best // len(columns)], columns[best % len(columns)]
        saved = gap / 2 - off.reshape(pairs, -1)[np.arange(pairs), best]  # of the costlier bin
        good = saved > _LEVEL / 100 * goal
        if not good.any():
            # Try other cheap bins for these, then less costly bins.
            shift = (shift + 1) % _SHIFTS
            skipped += 0 if shift else pairs
            continue
        shift = 0
        high, low, mine, other = high[good], low[good], mine[good], other[good]
        moved_down, moved_up = slots[high, mine], slots[low, other]
        slots[high, mine], slots[low, other] = moved_up, moved_down
        for amount, sums in ((cost, total), *((amount, sums) for amount, sums, _ in capped)):
            sums[high] += amount[moved_up] - amount[moved_down]
            sums[low] += amount[moved_down] - amount[moved_up]
    rows: Bins = slots.tolist()
    return [[atom for atom in row if atom != no_atom] for row in rows] if moves else rows


def _cut_row(atoms: Atoms, ids: Ints, limits: Limits, ceiling: float = np.inf) -> Bins:
    """Sort atoms by length, and cut where the next one would break a limit or make a bin cost more than `ceiling`."""
    order = _by_length(atoms, ids)
    longest, peak = atoms.longest[order].tolist(), atoms.peak[order].tolist()
    samples = np.concatenate(([0], np.cumsum(atoms.count[order]))).tolist()
    images = np.concatenate(([0], np.cumsum(atoms.images[order]))).tolist()
    bins: Bins = []
    at = 0
    while at < len(order):
        max_samples = samples[-1]
        if limits.token_cap is not None:
            max_samples = min(max_samples, limits.token_cap // max(longest[at], 1))
        if peak[at] > 0 and ceiling < max_samples * peak[at]:
            max_samples = int(ceiling // peak[at])
        end = bisect_right(samples, samples[at] + max_samples) - 1
        if limits.image_cap is not None:
            end = min(end, bisect_right(images, images[at] + limits.image_cap) - 1)
        end = max(end, at + 1)
        bins.append(order[at:end].tolist())
        at = end
    return bins


def _level_rows(atoms: Atoms, ids: Ints, count: int, limits: Limits, start: Bins) -> Bins:
    """Cut the sorted row into at most `count` bins, with the lowest ceiling on a bin's cost that allows it."""
    best = _cut_row(atoms, ids, limits)
    if len(best) > count:
        return start
    low, high = 0.0, float(atoms.count[ids].sum() * atoms.peak[ids].max(initial=0.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        bins = _cut_row(atoms, ids, limits, middle)
        if len(bins) <= count:
            best, high = bins, middle
        else:
            low = middle
    return best


def _by_size(atoms: Atoms, ids: Ints) -> Ints:
    return ids[np.lexsort((atoms.rank[ids], -atoms.cost[ids], -atoms.images[ids], -atoms.tokens[ids]))]


def _by_cost(atoms: Atoms, ids: Ints) -> Ints:
    return ids[np.lexsort((atoms.rank[ids], -atoms.images[ids], -atoms.tokens[ids], -atoms.cost[ids]))]


def _by_length(atoms: Atoms, ids: Ints) -> Ints:
    keys = (atoms.rank, -atoms.images, -atoms.count, -atoms.peak, -atoms.longest)
    return ids[np.lexsort([key[ids] for key in keys])]
