"""Additions: what a second record under the same id adds to the first, or where the two conflict.

Invariant: of a stored record nothing changes but what was missing; whatever else differs is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import Repr
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from rollbook.book.digests import is_late
from rollbook.core.equality import same
from rollbook.core.fields import FIELDS

if TYPE_CHECKING:
    from rollbook.core.experience import Experience


class Difference(NamedTuple):
    """The first thing in which two records that should be one differ.

    >>> str(Difference("reward", "1.0", "0.5"))
    'reward: stored 1.0, given 0.5'
    """

    field: str
    """Its name; of an entry of a dict, `info.score`."""
    stored: str
    """The values, abbreviated."""
    given: str

    def __str__(self) -> str:
        return f"{self.field}: stored {self.stored}, given {self.given}"


@dataclass(frozen=True, slots=True)
class Addition:
    """What a record adds to the one that is stored under its id."""

    merged: Experience
    """The stored record with what the other adds; the stored one itself if that is nothing, or they conflict."""
    added: tuple[str, ...] = ()
    """What it adds: names of fields, and of entries of dicts as `info.score`."""
    conflict: Difference | None = None
    """Why it is another record."""


def compare(old: Experience, new: Experience) -> Addition:
    """What `new` adds to `old`, a stored record of the same id, or where they conflict.

    `new` may bring late fields (see `is_late`) that `old` lacks, and new keys in its dicts; what it does not have
    itself is left as it is. Everything else has to be equal.

    >>> from rollbook import Experience
    >>> old = Experience(eid={"suffix": "a"}, tokens=[1, 2, 3], info={"seed": 7})
    >>> late = old.replace(reward=1.0, info={"judge": "b"})
    >>> addition = compare(old, late)
    >>> addition.added, addition.merged.reward, addition.merged.info
    (('reward', 'info.judge'), 1.0, {'seed': 7, 'judge': 'b'})
    >>> str(compare(late, old.replace(reward=0.0)).conflict)
    'reward: stored 1.0, given 0.0'
    """
    added: list[str] = []
    brought: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, field in FIELDS.items():
        a, b = getattr(old, name), getattr(new, name)
        if not is_late(field):
            if not same(a, b):
                return Addition(old, conflict=_difference(name, a, b))
        elif field.kind == "json":
            found, conflict = _compare_entries(name, a, b)
            if conflict is not None:
                return Addition(old, conflict=conflict)
            added.extend(f"{name}.{key}" for key in found)
            if found:
                brought[name] = {**a, **found}
            kept[name] = {**b, **a}
        elif b is None:
            kept[name] = a
        elif a is None:
            added.append(name)
            brought[name] = b
        elif not same(a, b):
            return Addition(old, conflict=_difference(name, a, b))
    for name in sorted({*old.unknown, *new.unknown}):
        c, d = (row.unknown[name] if name in row.unknown else pa.nulls(1) for row in (old, new))
        # An unknown column's null may be a neighbour's doing (see `digests`), and is as good as no column.
        if not same(c, d) and (c.null_count, d.null_count) != (1, 1):
            return Addition(old, conflict=_difference(name, c.to_pylist()[0], d.to_pylist()[0]))
    if not added:
        return Addition(old)
    # A record read with odd shapes keeps them only by its own `replace`.
    return Addition(new.replace(**kept) if new.odd else old.replace(**brought), tuple(added))


def _compare_entries(name: str, old: dict[Any, Any], new: dict[Any, Any]) -> tuple[dict[Any, Any], Difference | None]:
    """The entries that only `new` has, and the first that both have and that differs."""
    found: dict[Any, Any] = {}
    for key, value in new.items():
        if key not in old:
            found[key] = value
        elif not same(old[key], value):
            return {}, _difference(f"{name}.{key}", old[key], value)
    return found, None


_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def _difference(field: str, old: Any, new: Any) -> Difference:
    return Difference(field, _show_value(old, new), _show_value(new, old))


def _show_value(value: Any, beside: Any) -> str:
    """A value as an error shows it; of tensors and long texts what tells it from the other."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.")
        text = f"{kind}{list(value.shape)}"
        if getattr(beside, "shape", None) == value.shape and len(value.shape) == 1:
            mine, other = value.tolist(), beside.tolist()
            at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if not same(a, b)), None)
            text += "" if at is None else f" with {mine[at]!r} at {at}"
        return text
    if isinstance(value, str) and isinstance(beside, str) and len(value) > 60:
        at = next(
            (i for i, (a, b) in enumerate(zip(value, beside, strict=False)) if a != b), min(len(value), len(beside))
        )
        start = max(0, at - 10)
        return f"{value[start : start + 50]!r} from character {start} of {len(value)}"
    return _short.repr(value)
