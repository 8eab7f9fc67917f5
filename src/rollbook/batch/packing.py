"""Bins for a plan: as few as a cap allows, then a given number of them with their costs level. Arrays in, lists out.

Invariant: every function places each atom it is given exactly once and leaves no bin over a limit; ties go to the atom
whose place is lower, and places go by what is in an atom, so that the same atoms in any order give the same bins. An
atom is what may not be divided: a sample, or a group that stays together. Atoms over a limit must have been set aside
by the caller.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bins = list[list[int]]

_LEVEL = 5e-4  # the costliest bin at most this far above the mean: nobody can measure less
_SWEEPS = 64
_HALVINGS = 20
_SHIFTS = 4
_PAIRS_AT_ONCE = 1 << 15  # exchanges looked at in one sweep: a fraction of a millisecond
_MOST_SLOTS = 1 << 22  # 32 MB for each array of a sweep
_MOST_TRIES = 64
_PAIRS_TRIED = 16
_COMPLETE_AT_MOST = 16_384  # taking atoms out of a long list takes longer than finding them


@dataclass(frozen=True)
class Atoms:
    """[A] What is placed whole: tokens, samples and images in each, its longest sample, what all of it costs, and what
    its costliest sample does; and its place among all atoms sorted by what is in them, and only then by number."""

    tokens: Ints
    count: Ints
    longest: Ints
    images: Ints
    cost: Floats
    peak: Floats
    place: Ints

    @classmethod
    def of(cls, codes: Ints | None, lengths: Ints, images: Ints, costs: Floats, kinds: Ints) -> Atoms:
        """One atom for each sample, or for each group where `codes` [N] numbers the groups from 0.

        `kinds` [N] sorts the samples by what is in them: those with the same number may stand for each other.
        """
        order = np.argsort(kinds, kind="stable")
        place = np.empty_like(order)
        if codes is None:
            place[order] = np.arange(len(order))
            return cls(lengths, np.ones_like(lengths), lengths, images, costs, costs, place)
        # In order of their kinds, so that sums of floats do not depend on the order in which samples were given.
        codes, lengths, images, costs = codes[order], lengths[order], images[order], costs[order]
        groups = int(codes.max(initial=-1)) + 1
        tokens, found, cost = np.zeros(groups, np.int64), np.zeros(groups, np.int64), np.zeros(groups)
        longest, peak = np.zeros(groups, np.int64), np.zeros(groups)
        np.add.at(tokens, codes, lengths)
        np.add.at(found, codes, images)
        np.add.at(cost, codes, costs)
        np.maximum.at(longest, codes, lengths)
        np.maximum.at(peak, codes, costs)
        count = np.bincount(codes, minlength=groups).astype(np.int64)
        members = kinds[order][np.argsort(codes, kind="stable")].tolist()  # group by group, sorted in each
        ends = np.cumsum(count).tolist()
        contents = [members[end - held : end] for end, held in zip(ends, count.tolist(), strict=True)]
        place = np.empty(groups, np.int64)
        place[sorted(range(groups), key=contents.__getitem__)] = np.arange(groups)
        return cls(tokens, count, longest, found, cost, peak, place)


@dataclass(frozen=True)
class Limits:
    """What one bin may hold, in numbers that fit int64. Padded, every sample of a bin takes as much room, and costs as
    much, as the largest."""

    token_cap: int | None = None
    image_cap: int | None = None
    padded: bool = False

    @property
    def capped(self) -> bool:
        """Whether there is any limit."""
        return self.token_cap is not None or self.image_cap is not None

    def sizes(self, atoms: Atoms) -> Ints:
        """[A] The room that each atom takes in a bin of its own."""
        return atoms.count * atoms.longest if self.padded else atoms.tokens

    def over(self, atoms: Atoms) -> NDArray[np.bool_]:
        """[A] Which atoms fit no bin."""
        over = np.zeros(len(atoms.tokens), dtype=np.bool_)
        if self.token_cap is not None:
            over |= self.sizes(atoms) > self.token_cap
        if self.image_cap is not None:
            over |= atoms.images > self.image_cap
        return over

    def cost(self, atoms: Atoms, members: Sequence[int]) -> float:
        """What a bin costs."""
        if not members:
            return 0.0
        if self.padded:
            return float(atoms.count[members].sum() * atoms.peak[members].max())
        return float(atoms.cost[members].sum())


def lower_bound(atoms: Atoms, ids: Ints, limits: Limits) -> int:
    """No packing of these atoms has fewer bins (padded: of these samples, for which cutting the sorted row is best)."""
    bounds = [min(len(ids), 1)]
    if limits.token_cap is not None:
        if limits.padded:
            bounds.append(len(_rows(atoms, ids, Limits(limits.token_cap, padded=True))))
        else:
            bounds.append(-(-int(atoms.tokens[ids].sum()) // limits.token_cap))
            bounds.append(int((2 * atoms.tokens[ids] > limits.token_cap).sum()))
    if limits.image_cap is not None:
        bounds.append(-(-int(atoms.images[ids].sum()) // limits.image_cap))
    return max(bounds)


def fewest(atoms: Atoms, ids: Ints, limits: Limits, enough: int) -> Bins:
    """As few bins as are found; one that has at most `enough` is not improved upon."""
    if not limits.capped:
        return [ids.tolist()] if len(ids) else []
    bins = _best_fit(atoms, ids, limits)
    if len(bins) > enough:
        second: Bins = []
        if limits.padded:
            second = _rows(atoms, ids, limits)
        elif limits.token_cap is not None and limits.image_cap is not None:
            second = _best_fit(atoms, ids, limits, by_share=True)
        elif limits.token_cap is not None and len(ids) <= _COMPLETE_AT_MOST:
            second = _complete(atoms, ids, limits.token_cap)
        if second and len(second) < len(bins):
            return second
    return bins


def spread(atoms: Atoms, ids: Ints, wanted: int, limits: Limits, start: Bins, equal: bool = False) -> Bins:
    """`wanted` bins with level costs; some are empty only if there are fewer atoms than that.

    `start` is a packing into at most `wanted` bins, for when levelling alone breaks a limit. With `equal`, every bin
    gets as many atoms: their number must be a multiple of `wanted`, and there may be no limits.
    """
    if equal:
        if limits.padded:
            return [block.tolist() for block in np.split(_by_length(atoms, ids), wanted)]
        return _level(atoms, _fold(atoms, ids, wanted), limits, moves=False)
    if limits.padded:
        return _split(atoms, _level_rows(atoms, ids, wanted, limits, start), wanted, limits)
    bins = _lightest_first(atoms, ids, wanted, limits)
    if bins is None:
        bins = _split(atoms, start, wanted, limits)
    return _level(atoms, bins, limits)


# --- packed: as few bins as possible ----------------------------------------------------------------------------


def _best_fit(atoms: Atoms, ids: Ints, limits: Limits, by_share: bool = False) -> Bins:
    """Largest atom first, each into the fullest bin that still takes it; largest in tokens or, `by_share`, in the share
    it takes of either cap.

    Padded, a bin's first sample is its longest and fixes how many it holds, so that room is counted in samples.
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
    # Without a cap on images none count. Those who bring some do not look at bins that can take none.
    brought = np.zeros_like(atoms.images) if limits.image_cap is None else atoms.images
    fewest_images = int(brought[ids][brought[ids] > 0].min(initial=np.iinfo(np.int64).max))
    bins: Bins = []
    open_: list[tuple[int, int]] = []  # (room left, bin), sorted
    open_to_images: list[tuple[int, int]] = []  # those of them with room for an image, or as many as the fewest are
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
            room, chosen = among[at]
            del open_[bisect_left(open_, (room, chosen))]
            if images_left[chosen] >= fewest_images:
                del open_to_images[bisect_left(open_to_images, (room, chosen))]
        else:
            room, chosen = everything, len(bins)
            if limits.token_cap is not None:
                room = limits.token_cap // max(longest, 1) if limits.padded else limits.token_cap
            bins.append([])
            images_left.append(limits.image_cap or 0)
        bins[chosen].append(atom)
        images_left[chosen] -= images
        if room - size >= smallest:
            insort(open_, (room - size, chosen))
            if images_left[chosen] >= fewest_images:
                insort(open_to_images, (room - size, chosen))
    return bins


def _by_size(atoms: Atoms, ids: Ints) -> Ints:
    return ids[np.lexsort((atoms.place[ids], -atoms.cost[ids], -atoms.images[ids], -atoms.tokens[ids]))]


def _complete(atoms: Atoms, ids: Ints, cap: int) -> Bins:
    """Bin by bin: the largest atoms left, and for the last place the two that fill it best, if they beat one.

    Among a thousand atoms there is nearly always a pair that leaves no room at all.
    """
    order = _by_size(atoms, ids)[::-1]
    left, sizes = order.tolist(), atoms.tokens[order].tolist()  # ascending
    bins: Bins = []
    while left:
        taken: list[int] = []
        room, at = cap, len(left)
        while (at := bisect_right(sizes, room, 0, at) - 1) >= 0:
            taken.append(at)
            room -= sizes[at]
        if room and len(taken) > 1:
            last = taken.pop()
            room += sizes[last]
            taken += _best_pair(sizes, room, last, taken)
        bins.append([left[at] for at in taken])
        for at in sorted(taken, reverse=True):
            del left[at], sizes[at]
    return bins


def _best_pair(sizes: list[int], room: int, last: int, taken: list[int]) -> list[int]:
    """Where the two are that fill `room` best, or only `last` if that is as good. Looks at some pairs, not at all."""
    best, found = sizes[last], [last]
    # The larger of two that beat the last one is more than half of that.
    low, high = bisect_right(sizes, best // 2), bisect_right(sizes, room)
    for larger in range(high - 1, low - 1, -max((high - low) // _PAIRS_TRIED, 1)):
        # What was passed over did not fit beside what was taken after it, so that its partner is none of those.
        smaller = bisect_right(sizes, room - sizes[larger], 0, larger) - 1
        if smaller >= 0 and larger not in taken and sizes[larger] + sizes[smaller] > best:
            best, found = sizes[larger] + sizes[smaller], [larger, smaller]
            if best == room:
                break
    return found


# --- packed: level costs ----------------------------------------------------------------------------------------


def _by_cost(atoms: Atoms, ids: Ints) -> Ints:
    return ids[np.lexsort((atoms.place[ids], -atoms.images[ids], -atoms.tokens[ids], -atoms.cost[ids]))]


def _lightest_first(atoms: Atoms, ids: Ints, wanted: int, limits: Limits) -> Bins | None:
    """Costliest atom first, each into the cheapest bin that takes it; `None` where the limits get in the way."""
    order = _by_cost(atoms, ids)
    bins: Bins = [[] for _ in range(wanted)]
    heap = [(0.0, 0, b) for b in range(wanted)]  # (cost, atoms, bin): empty bins before those of free atoms
    columns = zip(order.tolist(), atoms.cost[order].tolist(), strict=True)
    if not limits.capped:
        for atom, cost in columns:
            total, held, chosen = heap[0]
            bins[chosen].append(atom)
            heapq.heapreplace(heap, (total + cost, held + 1, chosen))
        return bins
    tokens, images = atoms.tokens.tolist(), atoms.images.tolist()
    room = [limits.token_cap if limits.token_cap is not None else sum(tokens)] * wanted
    images_left = [limits.image_cap if limits.image_cap is not None else sum(images)] * wanted
    for atom, cost in columns:
        full = []
        while heap and (room[heap[0][2]] < tokens[atom] or images_left[heap[0][2]] < images[atom]):
            full.append(heapq.heappop(heap))
            if len(full) > _MOST_TRIES:
                return None
        if not heap:
            return None
        total, held, chosen = heap[0]
        bins[chosen].append(atom)
        room[chosen] -= tokens[atom]
        images_left[chosen] -= images[atom]
        heapq.heapreplace(heap, (total + cost, held + 1, chosen))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fold(atoms: Atoms, ids: Ints, wanted: int) -> Bins:
    """As many atoms for each bin: row by row of the sorted atoms, the costliest to the bin that is cheapest so far."""
    rows = _by_cost(atoms, ids).reshape(-1, wanted)
    totals = np.zeros(wanted)
    placed = np.empty_like(rows)
    for row, costs, out in zip(rows, atoms.cost[rows], placed, strict=True):
        cheapest = np.argsort(totals, kind="stable")
        out[cheapest] = row
        totals[cheapest] += costs
    bins: Bins = placed.T.tolist()
    return bins


def _split(atoms: Atoms, bins: Bins, wanted: int, limits: Limits) -> Bins:
    """Cut the costliest bins in two until there are `wanted`; empty ones make up for atoms that are too few."""
    done = [members for members in bins if len(members) < 2]
    heap = [(-limits.cost(atoms, members), b, members) for b, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(heap)
    number = len(bins)
    while heap and len(heap) + len(done) < wanted:
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
    cut = [members for _, _, members in sorted(heap)] + done
    return cut + [[] for _ in range(wanted - len(cut))]


def _level(atoms: Atoms, bins: Bins, limits: Limits, moves: bool = True) -> Bins:
    """Exchange atoms between costly and cheap bins, many pairs of bins at once, until the costs are level.

    Bins lie as rows of slots; with `moves` each has an empty slot, and an exchange with that is a move.
    """
    count = len(bins)
    width = max((len(members) for members in bins), default=0) + moves
    if count < 2 or width < 1 or count * width > _MOST_SLOTS:
        return bins
    nothing = len(atoms.cost)
    slots = np.full((count, width), nothing)
    for row, members in zip(slots, bins, strict=True):
        row[: len(members)] = members
    cost = np.append(atoms.cost, 0.0)
    total = cost[slots].sum(axis=1)
    goal = total.mean() * (1 + _LEVEL)
    held = [
        (np.append(amount, 0), np.append(amount, 0)[slots].sum(axis=1), cap)
        for amount, cap in ((atoms.tokens, limits.token_cap), (atoms.images, limits.image_cap))
        if cap is not None
    ]
    columns = np.unique(np.linspace(0, width - 1, min(width, 256)).astype(np.int64))
    most = max(_PAIRS_AT_ONCE // len(columns) ** 2, 1)
    skipped = shift = 0
    for _ in range(_SWEEPS):
        above = int((total > goal).sum())
        pairs = min(above - skipped, (count - shift - skipped) // 2, most)
        if pairs < 1:
            break
        ranked = np.argsort(-total, kind="stable")
        high, low = ranked[skipped : skipped + pairs], ranked[::-1][shift : shift + pairs]  # no bin is in two pairs
        gap = total[high] - total[low]
        ours, theirs = slots[np.ix_(high, columns)], slots[np.ix_(low, columns)]
        less = cost[ours][:, :, None] - cost[theirs][:, None, :]
        off = np.abs(less - gap[:, None, None] / 2)
        for amount, sums, cap in held:
            change = amount[ours][:, :, None] - amount[theirs][:, None, :]
            off[(change > (cap - sums[low])[:, None, None]) | (-change > (cap - sums[high])[:, None, None])] = np.inf
        best = off.reshape(pairs, -1).argmin(axis=1)
        mine, other = columns[best // len(columns)], columns[best % len(columns)]
        saved = gap / 2 - off.reshape(pairs, -1)[np.arange(pairs), best]  # of the costlier bin
        good = saved > _LEVEL / 100 * goal
        if not good.any():
            # Other cheap bins for these, then what is less costly: the cheapest bins still gain from that.
            shift = (shift + 1) % _SHIFTS
            skipped += 0 if shift else pairs
            continue
        shift = 0
        high, low, mine, other = high[good], low[good], mine[good], other[good]
        given, got = slots[high, mine], slots[low, other]
        slots[high, mine], slots[low, other] = got, given
        for amount, sums in ((cost, total), *((amount, sums) for amount, sums, _ in held)):
            sums[high] += amount[got] - amount[given]
            sums[low] += amount[given] - amount[got]
    rows: Bins = slots.tolist()
    return [[atom for atom in row if atom != nothing] for row in rows] if moves else rows


# --- padded -----------------------------------------------------------------------------------------------------


def _by_length(atoms: Atoms, ids: Ints) -> Ints:
    keys = (atoms.place, -atoms.images, -atoms.count, -atoms.peak, -atoms.longest)
    return ids[np.lexsort([key[ids] for key in keys])]


def _rows(atoms: Atoms, ids: Ints, limits: Limits, ceiling: float = np.inf) -> Bins:
    """The atoms sorted by length, cut where the next one would break a limit or make a bin cost more than `ceiling`."""
    order = _by_length(atoms, ids)
    longest, peak = atoms.longest[order].tolist(), atoms.peak[order].tolist()
    samples = np.concatenate(([0], np.cumsum(atoms.count[order]))).tolist()
    images = np.concatenate(([0], np.cumsum(atoms.images[order]))).tolist()
    bins: Bins = []
    at = 0
    while at < len(order):
        room = samples[-1]
        if limits.token_cap is not None:
            room = min(room, limits.token_cap // max(longest[at], 1))
        if peak[at] > 0 and ceiling < room * peak[at]:
            room = int(ceiling // peak[at])
        end = bisect_right(samples, samples[at] + room) - 1
        if limits.image_cap is not None:
            end = min(end, bisect_right(images, images[at] + limits.image_cap) - 1)
        end = max(end, at + 1)
        bins.append(order[at:end].tolist())
        at = end
    return bins


def _level_rows(atoms: Atoms, ids: Ints, wanted: int, limits: Limits, start: Bins) -> Bins:
    """Cuts of the sorted row into at most `wanted` bins, with the lowest ceiling on a bin's cost that allows it."""
    best = _rows(atoms, ids, limits)
    if len(best) > wanted:
        return start
    low, high = 0.0, float(atoms.count[ids].sum() * atoms.peak[ids].max(initial=0.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        bins = _rows(atoms, ids, limits, middle)
        if len(bins) <= wanted:
            best, high = bins, middle
        else:
            low = middle
    return best
