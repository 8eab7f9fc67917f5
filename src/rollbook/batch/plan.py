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

import heapq
import reprlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rollbook.core.errors import RollbookError

__all__ = [
    *[
        "Cost",
        "Denominators",
        "MicroBatch",
        "Plan",
        "PlanError",
        "PlanReport",
        "plan",
    ]
]

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
    """FLOPs of a sample of L tokens: `constant + linear * L + quadratic * L**2`, and a part for sliding windows.

    - `linear`: matrix products, per token.
    - `quadratic`: attention that looks at every earlier token; the causal half is in the number.
    - `windows`: (window, coefficient) for attention that looks back at most `window` tokens: `coefficient * L**2` up to
      there, then a straight line, `coefficient * window * (2 * L - window)`.
    - `constant`: per sample.

    Only proportions matter to a plan, so the backward pass, which multiplies everything by three, is left out.

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
                raise ValueError(f"windows[{i}][0]: got {window!r}, expected a whole number of tokens, 1 or more")
        for name, value in parts.items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1e100:
                raise ValueError(f"{name}: got {value!r}, expected a number, 0 or more and below 1e100")
        if not any(parts.values()):
            raise ValueError("linear, quadratic, constant, windows: got 0 in all of them, expected a cost")

    def __call__(self, lengths: Any) -> NDArray[np.float64]:
        """[N] The cost of samples of these lengths."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total: NDArray[np.float64] = self.constant + tokens * (self.linear + self.quadratic * tokens)
        for window, coefficient in self.windows:
            seen = np.minimum(tokens, window)
            total = total + coefficient * seen * (2 * tokens - seen)
        return total

    @classmethod
    def from_config(cls, config: Any, *, gated: bool = True) -> Cost:
        """The cost of a decoder from its transformers config, an object or a dict (`text_config` inside is found).

        Needed: `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `vocab_size`.
        Understood: `num_key_value_heads`, `head_dim`; experts (`num_experts`, `num_local_experts` or
        `n_routed_experts`, `num_experts_per_tok`, `moe_intermediate_size`, `shared_expert_intermediate_size`,
        `n_shared_experts`) and which layers have them (`mlp_only_layers`, `decoder_sparse_step`,
        `first_k_dense_replace`, `moe_layer_freq`); windows (`sliding_window`, `layer_types`, `use_sliding_window` with
        `max_window_layers`, `sliding_window_pattern`); latent attention (`kv_lora_rank` and its kin). A config object
        is better than its JSON file: it fills in `layer_types`. `gated=False` is for an MLP of two matrices instead of
        three. A vision tower is not counted.

        Two layers; each has 8*8 + 2*8*4 + 8*8 = 192 weights in attention (two heads of four, one of keys and values)
        and 3*8*16 = 384 in its MLP; the head has 8*32 = 256. A weight is two FLOPs per token: 2 * (2*576 + 256) =
        2816. Scores and values are 2 * 2 * 8 FLOPs for each pair of tokens, half of which is causal: 2 * 16 = 32.

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
    """A config's values by name; `None` and absent are the same thing."""

    def __init__(self, config: Any) -> None:
        if config is None or isinstance(config, (str, bytes, Sequence, Real)):
            raise ValueError(f"config: got {type(config).__name__}, expected a dict or a transformers config")
        self.config = config

    def get(self, name: str) -> Any:
        return _find(self.config, name)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of the config; without a default it must be there."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"config: {name!r} is missing, expected a whole number")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"config: {name!r}: got {value!r}, expected a whole number, {least} or more")
        return value

    def names(self) -> list[str]:
        return list(self.config if isinstance(self.config, Mapping) else vars(self.config))


def _find(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _attention(model: _Config, hidden: int) -> tuple[int, int]:
    """Weights of the projections, and FLOPs of scores and values per squared token (the causal half), per layer."""
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
    """Weights that a token meets in each layer's MLP: a dense one, or a router and the experts it is sent to."""
    dense = matrices * hidden * model.size("intermediate_size")
    for name in model.names():
        named = "expert" in name or name.startswith(("moe_", "interleave_moe"))
        value = model.get(name) if named and name not in _MOE_KEYS else None
        # Switches, coefficients and names of kernels do not change the count; unknown sizes and lists of layers may.
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool) and value:
            raise ValueError(
                f"config: {name!r}: got {reprlib.repr(value)}, and what it means for the experts is not known; build "
                "Cost(linear=..., quadratic=...) by hand"
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
    """How far back each layer looks; `None` is all the way."""
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


_RANKS_SHOWN = 16


class PlanError(RollbookError, ValueError):
    """A request that cannot be met: `constraint` is the argument that stands in the way, `sample` the sample.

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


KeepGroups = Literal["none", "micro_batch", "rank"]
Layout = Literal["packed", "padded"]
Oversize = Literal["error", "alone"]
Empty = Literal["error", "allow"]

_MOST_MICRO_BATCHES = 1 << 22  # gigabytes of them; more is a mistake that would only show when memory is full


@dataclass(frozen=True)
class Request:
    """What was asked for. N samples; A atoms: samples, or groups that stay in one micro-batch."""

    ranks: int
    micro_batches: int | None
    token_cap: int | None
    image_cap: int | None
    limits: Limits
    """The caps, or what all samples take together where that is less: so that any whole number may be a cap."""
    lengths: Ints
    images: Ints
    costs: Floats
    loss_tokens: Ints
    group_of: Ints | None
    group_keys: list[Hashable]
    keep_groups: KeepGroups
    modality: tuple[Ints, list[Hashable]] | None
    """[N] Each sample's label by number, and the labels, in the order of their alphabet."""
    uniform_modality: bool
    equal_counts: bool
    alone: bool
    may_be_empty: bool
    whole: Ints | None
    """[N] Each sample's atom, where atoms are groups."""
    kinds: Ints
    """[N] Samples of which everything but the group is the same have the same number."""
    atoms: Atoms

    @classmethod
    def read(
        cls,
        lengths: Any,
        *,
        token_cap: Any,
        ranks: Any,
        micro_batches: Any,
        groups: Any,
        keep_groups: KeepGroups,
        modality: Any,
        uniform_modality: bool,
        images: Any,
        image_cap: Any,
        cost: Any,
        loss_tokens: Any,
        layout: Layout,
        equal_counts: bool,
        oversize: Oversize,
        empty: Empty,
    ) -> Request:
        """The arguments of `planner.plan`, checked."""
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
        for name, asked, values in (
            (f"groups: got None with keep_groups={keep_groups!r}", keep_groups != "none", groups),
            ("modality: got None with uniform_modality=True", uniform_modality, modality),
            (f"images: got None with image_cap={image_cap!r}", image_cap is not None, images),
        ):
            if asked and values is None:
                raise ValueError(f"{name}, expected a value for each sample")
        token_cap = None if token_cap is None else _positive("token_cap", token_cap)
        image_cap = None if image_cap is None else _positive("image_cap", image_cap)
        ranks = _positive("ranks", ranks, _MOST_MICRO_BATCHES)
        if micro_batches is not None:
            micro_batches = _positive("micro_batches", micro_batches, _MOST_MICRO_BATCHES // ranks)
        if equal_counts and (token_cap is not None or image_cap is not None):
            raise ValueError("equal_counts: got True with token_cap or image_cap, expected one without the other")
        records = callable(getattr(lengths, "token_lengths", None))
        tokens = _whole_numbers("lengths", lengths.token_lengths() if records else lengths)
        count = len(tokens)
        if loss_tokens is None and records:
            loss_tokens = _loss_tokens(lengths, tokens)
        counted = tokens if loss_tokens is None else _whole_numbers("loss_tokens", loss_tokens, count)
        if (counted > tokens).any():
            i = int(np.flatnonzero(counted > tokens)[0])
            raise ValueError(f"loss_tokens[{i}]: got {counted[i]}, expected at most {tokens[i]}, the sample's length")
        found = np.zeros(count, np.int64) if images is None else _whole_numbers("images", images, count)
        costs = _costs(cost, tokens)
        group_of, group_keys = (None, []) if groups is None else _keys("groups", groups, count)
        whole = group_of if keep_groups == "micro_batch" else None
        labels = None if modality is None else _sorted_keys(*_keys("modality", modality, count))
        # What was not given follows from the lengths.
        columns: list[Ints | Floats] = [tokens]
        columns += [] if cost is None or isinstance(cost, Cost) else [costs]
        columns += [] if images is None else [found]
        columns += [] if counted is tokens else [counted]
        columns += [] if labels is None else [labels[0]]
        kinds = _kinds(columns)
        # What all samples take together, padded to the longest; packed it is less.
        room = count * max(int(tokens.max(initial=0)), 1)
        limits = Limits(
            None if token_cap is None else min(token_cap, max(room, 1)),
            None if image_cap is None else min(image_cap, max(int(found.sum()), 1)),
            layout == "padded",
        )
        request = cls(
            ranks=ranks,
            micro_batches=micro_batches,
            token_cap=token_cap,
            image_cap=image_cap,
            limits=limits,
            lengths=tokens,
            images=found,
            costs=costs,
            loss_tokens=counted,
            group_of=group_of,
            group_keys=group_keys,
            keep_groups=keep_groups,
            modality=labels,
            uniform_modality=bool(uniform_modality),
            equal_counts=bool(equal_counts),
            alone=oversize == "alone",
            may_be_empty=empty == "allow",
            whole=whole,
            kinds=kinds,
            atoms=Atoms.of(whole, tokens, found, costs, kinds),
        )
        if not count and not request.may_be_empty:
            raise PlanError("lengths", "there are no samples; empty='allow' gives every rank an empty micro-batch")
        return request

    def atoms_of(self, codes: Ints | None) -> Atoms:
        """One atom for each sample, or for each group that `codes` [N] numbers."""
        return Atoms.of(codes, self.lengths, self.images, self.costs, self.kinds)

    def samples(self, atom: int) -> Ints:
        """The samples of an atom."""
        return np.array([atom]) if self.whole is None else np.flatnonzero(self.whole == atom)

    def describe(self, atom: int) -> str:
        """An atom in words."""
        if self.whole is None:
            return f"sample {atom}"
        samples = self.samples(atom)
        shown = ", ".join(map(str, samples[:4])) + (", ..." if len(samples) > 4 else "")
        return f"group {self.group_keys[atom]!r} (samples {shown})"

    @property
    def noun(self) -> str:
        """What atoms are."""
        return "samples" if self.whole is None else "groups"


def _positive(name: str, value: Any, most: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a whole number, 1 or more")
    number = int(value)
    if most is not None and number > most:
        raise ValueError(
            f"{name}: got {number}, expected at most {most}: a plan has at most {_MOST_MICRO_BATCHES} micro-batches"
        )
    return number


def _list(name: str, values: Any, count: int | None) -> Any:
    """The values as an array or a list, once there are `count` of them."""
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: got {type(values).__name__}, expected a value for each sample")
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1 and not isinstance(values, str):  # numpy's strings have a shape, []
        raise ValueError(f"{name}: got shape {list(shape)}, expected one dimension")
    if not isinstance(values, np.ndarray):
        # A tensor, on whatever device, becomes a list; so nothing of torch is needed here.
        values = values.tolist() if hasattr(values, "tolist") and not isinstance(values, str) else list(values)
    if count is not None and len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values, expected {count}, one for each sample")
    return values


def _whole_numbers(name: str, values: Any, count: int | None = None) -> Ints:
    values = _list(name, values, count)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        for i, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
                raise ValueError(f"{name}[{i}]: got {value!r}, expected a whole number, 0 or more")
    numbers: Ints = np.array([min(int(v), 2**62) for v in values] if isinstance(values, list) else values, np.int64)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= 2**40):
        i = int(np.flatnonzero((numbers < 0) | (numbers >= 2**40))[0])
        raise ValueError(f"{name}[{i}]: got {values[i]}, expected a whole number, 0 or more and below 2**40")
    return numbers


def _keys(name: str, values: Any, count: int) -> tuple[Ints, list[Hashable]]:
    """[N] Numbers in place of the keys, and the keys by number, as they first appear."""
    numbers: dict[Hashable, int] = {}
    codes = []
    values = _list(name, values, count)
    for i, given in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        key = _plain(given)
        if key is None:
            raise ValueError(f"{name}[{i}]: got {given!r}, expected a key, such as a string or a number")
        codes.append(numbers.setdefault(key, len(numbers)))
    return np.array(codes, dtype=np.int64), list(numbers)


def _plain(key: Any) -> Hashable:
    """The key, with plain values for scalars of numpy and torch; `None` for what does not equal itself or has no hash.

    A tensor hashes by identity, so that two tensors of the same number would be two keys.
    """
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, tuple):
        parts = [(part, _plain(part)) for part in key]
        if all(part is plain for part, plain in parts):
            return key
        return None if any(plain is None for part, plain in parts if part is not None) else tuple(p for _, p in parts)
    if hasattr(key, "ndim") and hasattr(key, "item"):
        if key.ndim:
            return None
        key = key.item()
    if not isinstance(key, Hashable) or (isinstance(key, (float, complex)) and key != key):
        return None
    return key


def _sorted_keys(codes: Ints, keys: list[Hashable]) -> tuple[Ints, list[Hashable]]:
    """The same with keys numbered by their alphabet, and so not by where they stand."""
    order = sorted(range(len(keys)), key=lambda code: (str(keys[code]), type(keys[code]).__name__))
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys))
    return number[codes], [keys[code] for code in order]


def _kinds(columns: list[Ints | Floats]) -> Ints:
    """[N] The same number for samples that agree in all columns [N]; the largest come first."""
    order = np.lexsort([-column for column in reversed(columns)])
    changes = np.zeros(len(order), dtype=np.bool_)
    for column in columns:
        changes[1:] |= np.diff(column[order]) != 0
    kinds = np.empty(len(order), dtype=np.int64)
    kinds[order] = np.cumsum(changes)
    return kinds


def _costs(cost: Any, lengths: Ints) -> Floats:
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
        raise ValueError(f"cost[{wrong[0]}]: got {values[wrong[0]]!r}, expected a number, 0 or more and below 1e200")
    return numbers


def _loss_tokens(records: Any, lengths: Ints) -> list[int]:
    """How many tokens of each record count in the loss: those in its mask or, without one, all of its response."""
    from rollbook.batch.columns import mask_unpredicted

    records = mask_unpredicted(records)
    responses = (lengths - np.minimum(records.prompt_lengths(), lengths)).tolist()
    masks = records.values("action_mask")
    return [
        response if mask is None else int((mask != 0).sum()) for mask, response in zip(masks, responses, strict=True)
    ]


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
