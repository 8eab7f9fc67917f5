"""Which sample goes into which micro-batch of which rank: a pure function from lengths to a `Plan`.

What a plan promises, whatever the lengths, groups, modalities, caps and ranks:

- once: every sample is in exactly one micro-batch; none is dropped or doubled.
- whole: no sample is cut, and so no image: a micro-batch has all tokens and all images of its samples.
- cap: no micro-batch exceeds `token_cap` or `image_cap`, but for a sample that alone exceeds it and, where
  `oversize="alone"` asks for that, is alone.
- steps: every rank has the same number of micro-batches: `micro_batches`, if that is given.
- groups: a group that is to stay together is in one micro-batch, or on one rank.
- modality: with `uniform_modality`, micro-batches that run at the same time are all of one modality.
- empty: a micro-batch is empty only where `empty="allow"` asks for it, and then it weighs 0.
- counts: with `equal_counts`, micro-batches that run at the same time hold equally many samples.
- balance: packed and without caps, a micro-batch costs at most one sample (with `keep_groups="micro_batch"`, one group)
  more than the mean: over all micro-batches; with `uniform_modality`, over those of its modality; with
  `keep_groups="rank"`, over those of them on its rank, and then a rank costs at most one group more than the mean rank.
- loss: means over micro-batches, times their weights, add up to the mean over everything, however it is split.
- order: `x[plan.order][plan.inverse]` is `x`, and `order` is the micro-batches one after the other.
- same: the same input gives the same plan on every rank and machine, so that ranks can plan each for itself; with the
  samples in another order, each rank and step has samples of the same lengths, costs, images, loss tokens and modality.
- named: what cannot be met raises `PlanError` with the constraint and the sample; nothing is mended in silence. The
  best packing is not searched for, only a good one: so a plan that just fits may not be found, and raises too.
- pure: numpy and the standard library only, and nothing that was given is changed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.batch.costs import Cost
from rollbook.batch.packing import Bins, Ints, Limits, fewest, lower_bound, spread
from rollbook.batch.plans import Denominators, MicroBatch, Plan, PlanError, PlanReport
from rollbook.batch.request import Empty, KeepGroups, Layout, Oversize, Request

__all__ = ["Cost", "Denominators", "MicroBatch", "Plan", "PlanError", "PlanReport", "plan"]


def plan(
    lengths: Any,
    *,
    token_cap: int | None = None,
    ranks: int = 1,
    micro_batches: int | None = None,
    groups: Any = None,
    keep_groups: KeepGroups = "none",
    modality: Any = None,
    uniform_modality: bool = False,
    images: Any = None,
    image_cap: int | None = None,
    cost: Any = None,
    loss_tokens: Any = None,
    layout: Layout = "packed",
    equal_counts: bool = False,
    oversize: Oversize = "error",
    empty: Empty = "error",
) -> Plan:
    """Say which sample goes into which micro-batch of which rank; the module's docstring lists the promises.

    - `lengths` [N]: tokens of each sample: a list, array or tensor of whole numbers, or `Experiences`.
    - `token_cap`: tokens that a micro-batch may occupy: the sum of its lengths or, with `layout="padded"`, samples
      times the longest. `None`: no cap.
    - `ranks`; `micro_batches` on each of them. `None`: as few as the caps allow; without caps, one.
    - `groups` [N]: a key for each sample, such as its task's id. Equal keys are one group, wherever they stand.
    - `keep_groups`: `"micro_batch"` keeps each group in one micro-batch, `"rank"` on one rank.
    - `modality` [N]: a label for each sample, such as `"text"` or `"image"`. With `uniform_modality` all ranks have the
      same one in a step, so that all run the vision tower or none does; steps go by the labels' alphabet.
    - `images` [N], `image_cap`: images (or vision tokens) of each sample, and how many a micro-batch may hold.
    - `cost`: what is balanced: a `Cost`, or [N] numbers. `None`: tokens. Padded, each sample costs what the costliest
      of its micro-batch does.
    - `loss_tokens` [N]: tokens that count in the loss, no more than `lengths`. `None`: all; of `Experiences`, those in
      the `action_mask`.
    - `equal_counts`: equally many samples for all ranks in a step; not together with caps.
    - `oversize`: a sample over a cap is an `"error"`, or goes `"alone"`.
    - `empty`: fewer samples (or groups) than micro-batches is an `"error"`, or `"allow"` leaves some empty.

    A rank's micro-batches fall in cost (for each modality), so that what the device cannot hold fails at once. Raises
    `PlanError` for what cannot be met, and `ValueError` for arguments that make no sense.

    >>> found = plan([700, 200, 300, 100, 600, 400], token_cap=1000, groups="aabbcc", keep_groups="micro_batch")
    >>> [batch.indices.tolist() for batch in found[0]]
    [[4, 5], [0, 1], [2, 3]]
    """
    request = Request.read(
        lengths,
        token_cap=token_cap,
        ranks=ranks,
        micro_batches=micro_batches,
        groups=groups,
        keep_groups=keep_groups,
        modality=modality,
        uniform_modality=uniform_modality,
        images=images,
        image_cap=image_cap,
        cost=cost,
        loss_tokens=loss_tokens,
        layout=layout,
        equal_counts=equal_counts,
        oversize=oversize,
        empty=empty,
    )
    return _assemble(request, *_place(request))


@dataclass
class _Pool:
    """Atoms of one modality that may go to any of these ranks."""

    ranks: list[int]
    alone: Ints
    rest: Ints
    start: Bins
    """The rest in as few bins as were found."""

    @property
    def needed(self) -> int:
        return len(self.alone) + len(self.start)


@dataclass
class _Phase:
    """Steps of one modality, or of all where they may mix."""

    label: Hashable
    pools: list[_Pool]
    bound: int
    cost: float
    steps: int


# --- where each atom goes ---------------------------------------------------------------------------------------


def _place(request: Request) -> tuple[list[Bins], list[Hashable], list[_Phase]]:
    """[rank][step] the atoms there, each step's modality, and the phases they come from."""
    over = _over(request)
    groups = request.group_of if request.keep_groups == "rank" else None
    home = None if groups is None else _homes(request, groups)
    phases = []
    for label, ids in _by_modality(request):
        shares = [(list(range(request.ranks)), ids)]
        if home is not None:
            shares = [([rank], ids[home[ids] == rank]) for rank in range(request.ranks)]
        pools = []
        for ranks, share in shares:
            alone, rest = share[over[share]], share[~over[share]]
            wide = len(ranks)
            bound = len(alone) + _lower_bound(request, rest)
            start = fewest(request.atoms, rest, request.limits, enough=-(-bound // wide) * wide - len(alone))
            pools.append(_Pool(ranks, alone, rest, start))
        bound = int(over[ids].sum()) + _lower_bound(request, ids[~over[ids]])
        steps = max(1, *(-(-pool.needed // len(pool.ranks)) for pool in pools))
        total = fsum(request.atoms.cost[ids].tolist())  # exact, and so the same in whatever order samples are given
        phases.append(_Phase(label, pools, bound, total, steps))
    _share_steps(request, phases)
    grid: list[Bins] = [[] for _ in range(request.ranks)]
    labels: list[Hashable] = []
    totals = [0.0] * request.ranks
    for phase in phases:
        labels += [phase.label] * phase.steps
        for pool in phase.pools:
            wanted = phase.steps * len(pool.ranks)
            _check_enough(request, phase, pool, wanted)
            bins: Bins = [[atom] for atom in pool.alone.tolist()]
            if request.ranks == 1 and request.limits.capped and pool.needed == wanted:
                bins += pool.start  # nobody waits: what is packed need not be level
            else:
                free = wanted - len(bins)
                bins += spread(request.atoms, pool.rest, free, request.limits, pool.start, request.equal_counts)
            _arrange(request, bins, pool.ranks, totals, grid)
    if not phases:
        labels = [None] * (request.micro_batches or 1)
        grid = [[[] for _ in labels] for _ in range(request.ranks)]
    return grid, labels, phases


def _over(request: Request) -> NDArray[np.bool_]:
    """[A] Which atoms go alone, as they exceed a cap; raises unless that was asked for, and always for a group."""
    limits, atoms = request.limits, request.atoms
    over = limits.over(atoms)
    for atom in np.flatnonzero(over).tolist():
        if request.alone and atoms.count[atom] == 1:
            continue
        size, name, cap, noun = int(limits.sizes(atoms)[atom]), "token_cap", request.token_cap, "tokens"
        if cap is None or size <= cap:
            size, name, cap, noun = int(atoms.images[atom]), "image_cap", request.image_cap, "images"
        hint = "oversize='alone' gives it a micro-batch of its own"
        if atoms.count[atom] > 1:
            hint = "keep_groups='micro_batch' does not let it be divided"
        sample = int(request.samples(atom)[0])
        raise PlanError(name, f"{request.describe(atom)} takes {size} {noun}, over the cap of {cap}; {hint}", sample)
    return over


def _lower_bound(request: Request, ids: Ints) -> int:
    if not request.limits.capped:
        return min(len(ids), 1)
    if request.whole is None or not request.limits.padded:
        return lower_bound(request.atoms, ids, request.limits)
    # How much padding a group causes depends on its neighbours: bounded by its samples, each for itself.
    samples = np.flatnonzero(np.isin(request.whole, ids))
    return lower_bound(request.atoms_of(None), samples, request.limits)


def _homes(request: Request, groups: Ints) -> Ints:
    """[N] Each sample's rank, where groups stay on one."""
    keys = request.group_keys
    blocks = request.atoms_of(groups)
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
    home = np.empty(len(keys), dtype=np.int64)
    for rank, members in enumerate(spread(blocks, ids, request.ranks, Limits(), [], request.equal_counts)):
        home[members] = rank
    return home[groups]


def _by_modality(request: Request) -> list[tuple[Hashable, Ints]]:
    """The atoms that may share a step, modality by modality."""
    everything = np.arange(len(request.atoms.count))
    if not request.uniform_modality or request.modality is None:
        return [(None, everything)] if len(everything) else []
    codes, labels = request.modality
    of_atom = codes
    if request.whole is not None:
        of_atom = np.zeros(len(everything), dtype=np.int64)
        of_atom[request.whole] = codes
        mixed = np.flatnonzero(of_atom[request.whole] != codes)
        if len(mixed):
            sample = int(mixed[0])
            atom = int(request.whole[sample])
            raise PlanError(
                "uniform_modality",
                f"sample {sample} is {labels[codes[sample]]!r}, but {request.describe(atom)} also has "
                f"{labels[of_atom[atom]]!r}, and keep_groups='micro_batch' does not let it be divided",
                sample,
            )
    return [(label, np.flatnonzero(of_atom == code)) for code, label in enumerate(labels)]


def _share_steps(request: Request, phases: list[_Phase]) -> None:
    """Give the steps that are left over, if their number is fixed, to the phases whose steps cost the most."""
    wanted = request.micro_batches
    if wanted is None:
        return
    least = sum(phase.steps for phase in phases)
    if least > wanted:
        needed, bound = sum(pool.needed for p in phases for pool in p.pools), sum(p.bound for p in phases)
        caps = {"token_cap": request.token_cap, "image_cap": request.image_cap}
        stated = " and ".join(f"{name}={cap}" for name, cap in caps.items() if cap is not None) or "no cap"
        kinds = f" of {len(phases)} modalities" if len(phases) > 1 else ""
        raise PlanError(
            "micro_batches",
            f"got {wanted} on each of {request.ranks} ranks, {wanted * request.ranks} in all, but with {stated} "
            f"{len(request.lengths)} samples{kinds} with {int(request.lengths.sum())} tokens were packed into no fewer "
            f"than {needed} (at least {bound}), which takes {least} on each",
        )
    if len(phases) == 1:
        phases[0].steps = wanted
        return
    for _ in range(wanted - least if phases else 0):
        # One that could fill another step, if there is one.
        def worth(phase: _Phase) -> tuple[bool, float]:
            pools = ((len(p.alone) + len(p.rest), (phase.steps + 1) * len(p.ranks)) for p in phase.pools)
            return all(there >= enough for there, enough in pools), phase.cost / phase.steps

        max(phases, key=worth).steps += 1


def _check_enough(request: Request, phase: _Phase, pool: _Pool, wanted: int) -> None:
    """Raise if a micro-batch would stay empty, or counts would differ, and that is not allowed."""
    ids = np.sort(np.concatenate((pool.alone, pool.rest)))
    where = "" if phase.label is None else f" of modality {phase.label!r}"
    where += f" on rank {pool.ranks[0]}" if len(pool.ranks) < request.ranks else ""
    slots = f"{wanted} micro-batches ({phase.steps} on each of {len(pool.ranks)} ranks)"
    first = int(request.samples(int(ids[0]))[0]) if len(ids) else None
    if len(ids) < wanted and not request.may_be_empty:
        name = "ranks" if phase.steps == 1 else "token_cap" if request.micro_batches is None else "micro_batches"
        listed = ", ".join(request.describe(atom) for atom in ids[:4].tolist()) + (", ..." if len(ids) > 4 else "")
        raise PlanError(
            name,
            f"{len(ids)} {request.noun}{where} ({listed or 'none'}) cannot fill {slots}; "
            "empty='allow' leaves some empty, with weight 0",
            first,
        )
    if request.equal_counts:
        held = [len(other.rest) for other in phase.pools]  # without caps none is alone
        if len(ids) != held[0]:
            raise PlanError("equal_counts", f"{len(ids)} samples{where}, but {held[0]} on rank 0", first)
    if request.equal_counts and len(ids):
        odd = ids[request.atoms.count[ids] != request.atoms.count[ids[0]]]
        if len(odd):
            sizes = request.atoms.count[[odd[0], ids[0]]].tolist()
            both = f"{request.describe(int(odd[0]))} has {sizes[0]} samples, {request.describe(int(ids[0]))} {sizes[1]}"
            raise PlanError("equal_counts", f"{both}: not all alike", int(request.samples(int(odd[0]))[0]))
        if len(ids) % wanted:
            raise PlanError("equal_counts", f"{len(ids)} {request.noun}{where} are no multiple of {slots}", first)


def _arrange(request: Request, bins: Bins, ranks: list[int], totals: list[float], grid: list[Bins]) -> None:
    """Put bins of like cost into one step, the costliest onto the rank that has had the least so far."""
    peak, cost, count = (column.tolist() for column in (request.atoms.peak, request.atoms.cost, request.atoms.count))
    if request.limits.padded:
        costs = [sum(count[a] for a in members) * max((peak[a] for a in members), default=0.0) for members in bins]
    else:
        costs = [sum(sorted(cost[a] for a in members)) for members in bins]
    first = [int(request.atoms.place[members[0]]) if members else 0 for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], not bins[b], first[b]))
    for at in range(0, len(order), len(ranks)):
        idlest = sorted(ranks, key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(idlest, order[at : at + len(ranks)], strict=True):
            grid[rank].append(bins[chosen])
            totals[rank] += costs[chosen]


# --- the plan itself --------------------------------------------------------------------------------------------


def _assemble(request: Request, grid: list[Bins], labels: list[Hashable], phases: list[_Phase]) -> Plan:
    ranks, steps, count = request.ranks, len(labels), len(request.lengths)
    cells = [members for row in grid for members in row]
    slot_of_atom = np.empty(len(request.atoms.count), dtype=np.int64)
    slot_of_atom[list(chain.from_iterable(cells))] = np.repeat(np.arange(len(cells)), [len(cell) for cell in cells])
    slot = slot_of_atom if request.whole is None else slot_of_atom[request.whole]
    slots = ranks * steps
    order = np.argsort(slot, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(count)
    for array in (order, inverse):
        array.flags.writeable = False

    def add(values: Any) -> list[int]:
        sums: list[int] = np.bincount(slot, weights=values, minlength=slots).astype(np.int64).tolist()
        return sums

    def largest(values: Any) -> Any:
        out = np.zeros(slots, dtype=values.dtype)
        np.maximum.at(out, slot, values)
        return out

    held = np.bincount(slot, minlength=slots)
    ends = np.cumsum(held).tolist()
    tokens, loss, images = add(request.lengths), add(request.loss_tokens), add(request.images)
    sequences = add(request.loss_tokens > 0)
    if request.limits.padded:
        sizes, cost = (held * largest(request.lengths)).tolist(), (held * largest(request.costs)).tolist()
    else:
        sizes, cost = tokens, np.bincount(slot, weights=request.costs, minlength=slots).tolist()
    over = np.flatnonzero(request.limits.over(request.atoms if request.whole is None else request.atoms_of(None)))
    oversize = set(slot[over].tolist())
    denominators = Denominators(int(request.loss_tokens.sum()), int((request.loss_tokens > 0).sum()), count)
    kinds: list[Hashable] = [None] * slots
    modalities: dict[Hashable, tuple[int, int]] = {}
    if request.modality is not None:
        codes, names = request.modality
        high, low = largest(codes), len(names) - largest(len(names) - codes)
        kinds = [names[h] if n and h == w else None for h, w, n in zip(high, low, held, strict=True)]
        for code, name in enumerate(names):
            modalities[name] = (int((codes == code).sum()), int(request.lengths[codes == code].sum()))
    split = None
    if request.group_of is not None:
        places = np.unique(request.group_of * ranks + slot // steps) // ranks
        split = int((np.bincount(places, minlength=1) > 1).sum())
    batches = tuple(
        MicroBatch(
            rank=at // steps,
            step=at % steps,
            indices=order[ends[at] - held[at] : ends[at]],
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
        for at in range(slots)
    )
    longest = int(np.argmax(request.lengths)) if count else None
    return Plan(
        ranks=ranks,
        steps=steps,
        micro_batches=batches,
        denominators=denominators,
        order=order,
        inverse=inverse,
        layout="padded" if request.limits.padded else "packed",
        token_cap=request.token_cap,
        image_cap=request.image_cap,
        needed=sum(pool.needed for p in phases for pool in p.pools) if request.limits.capped else None,
        lower_bound=sum(p.bound for p in phases) if request.limits.capped else None,
        oversize=tuple(over.tolist()),
        longest=longest,
        longest_tokens=0 if longest is None else int(request.lengths[longest]),
        groups=None if request.group_of is None else len(request.group_keys),
        split_groups=split,
        modalities=modalities,
    )
