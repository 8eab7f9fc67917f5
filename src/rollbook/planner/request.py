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


@dataclass(frozen=True)
class Request:
    """What was asked for. N samples; A atoms: samples, or groups that stay in one micro-batch."""

    ranks: int
    micro_batches: int | None
    limits: Limits
    lengths: Ints
    images: Ints
    costs: Floats
    loss_tokens: Ints
    group_of: Ints | None
    group_keys: list[Hashable]
    keep_groups: KeepGroups
    modality: tuple[Ints, list[Hashable]] | None
    uniform_modality: bool
    equal_counts: bool
    alone: bool
    may_be_empty: bool
    whole: Ints | None
    """[N] Each sample's atom, where atoms are groups."""
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
        limits = Limits(
            None if token_cap is None else _positive("token_cap", token_cap),
            None if image_cap is None else _positive("image_cap", image_cap),
            layout == "padded",
        )
        if equal_counts and limits.capped:
            raise ValueError("equal_counts: got True with token_cap or image_cap, expected one without the other")
        records = callable(getattr(lengths, "token_lengths", None))
        tokens = _whole_numbers("lengths", lengths.token_lengths() if records else lengths)
        count = len(tokens)
        if loss_tokens is None:
            loss_tokens = _loss_tokens(lengths, tokens) if records else tokens
        found = np.zeros(count, np.int64) if images is None else _whole_numbers("images", images, count)
        costs = _costs(cost, tokens)
        group_of, group_keys = (None, []) if groups is None else _keys("groups", groups, count)
        whole = group_of if keep_groups == "micro_batch" else None
        request = cls(
            ranks=_positive("ranks", ranks),
            micro_batches=None if micro_batches is None else _positive("micro_batches", micro_batches),
            limits=limits,
            lengths=tokens,
            images=found,
            costs=costs,
            loss_tokens=_whole_numbers("loss_tokens", loss_tokens, count),
            group_of=group_of,
            group_keys=group_keys,
            keep_groups=keep_groups,
            modality=None if modality is None else _keys("modality", modality, count),
            uniform_modality=bool(uniform_modality),
            equal_counts=bool(equal_counts),
            alone=oversize == "alone",
            may_be_empty=empty == "allow",
            whole=whole,
            atoms=Atoms.of(whole, tokens, found, costs),
        )
        if not count and not request.may_be_empty:
            raise PlanError("lengths", "there are no samples; empty='allow' gives every rank an empty micro-batch")
        return request

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


def _positive(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a whole number, 1 or more")
    return int(value)


def _list(name: str, values: Any, count: int | None) -> Any:
    """The values as an array or a list, once there are `count` of them."""
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: got {type(values).__name__}, expected a value for each sample")
    if not isinstance(values, np.ndarray):
        # A tensor, on whatever device, becomes a list; so nothing of torch is needed here.
        values = values.tolist() if hasattr(values, "tolist") else list(values)
    if not isinstance(values, list) and values.ndim != 1:
        raise ValueError(f"{name}: got shape {list(values.shape)}, expected one dimension")
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
    for i, key in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
        if key is None or not isinstance(key, Hashable):
            raise ValueError(f"{name}[{i}]: got {key!r}, expected a key, such as a string or a number")
        codes.append(numbers.setdefault(key, len(numbers)))
    return np.array(codes, dtype=np.int64), list(numbers)


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
    responses = (lengths - np.minimum(records.prompt_lengths(), lengths)).tolist()
    masks = records.values("action_mask")
    return [
        response if mask is None else int((mask != 0).sum()) for mask, response in zip(masks, responses, strict=True)
    ]
