"""What a plan is asked for: the planner's arguments, read and checked.

Invariant: a `Request` holds N numbers wherever it says [N], all of them whole or finite and none negative, and options
that do not contradict each other; anything else has raised `ValueError` with the argument's name, what was got and
what was expected.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from rollbook.planner.costs import Cost
from rollbook.planner.packing import Atoms, Floats, Ints, Limits
from rollbook.planner.plans import PlanError

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
    from rollbook.batches.columns import mask_unpredicted

    records = mask_unpredicted(records)
    responses = (lengths - np.minimum(records.prompt_lengths(), lengths)).tolist()
    masks = records.values("action_mask")
    return [
        response if mask is None else int((mask != 0).sum()) for mask, response in zip(masks, responses, strict=True)
    ]
