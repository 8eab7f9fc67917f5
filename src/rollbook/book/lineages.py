"""Lineages of the policy: which versions a rewind abandoned, and which records were sampled by them.

A rewind starts a new lineage. Versions up to the one that was announced at the checkpoint are shared with it; later
versions are abandoned, and the new lineage gives their numbers to other weights. A record was sampled by an abandoned
version if its newest version is later than the checkpoint's and

- it was admitted between the checkpoint and the rewind, or
- it names its lineage, `info["policy_lineage"]`, and a rewind since has abandoned that version, or
- it names none and was admitted after the rewind, before the new lineage announced that version, and an abandoned
  lineage had announced it.

The key `lineage` of the table `meta` holds the state, from the first rewind on. Ranges of records are (after, last].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rollbook.book import tags
from rollbook.book.errors import CorruptBookError
from rollbook.book.ledger import Transaction, parsed
from rollbook.core.columns import texts

if TYPE_CHECKING:
    from rollbook.core.experiences import Experiences
    from rollbook.core.row_layout import RowLayout

LINEAGE_KEY = "policy_lineage"
"""The entry of `info` in which a record names its lineage."""


@dataclass(slots=True)
class Lineage:
    """What the rewinds of a book abandoned.

    >>> lineage = Lineage(announced=5, branches=[[5, 100, 200]], top=10, seen=200)
    >>> lineage.number, lineage.is_abandoned(150, 6), lineage.is_abandoned(150, 5), lineage.is_abandoned(250, 7)
    (1, True, False, True)
    """

    announced: int | None
    branches: list[list[int]] = field(default_factory=list)
    """[version, after, last] of each rewind: the checkpoint's version, its last record, the rewind's last record."""
    top: int | None = None
    """The highest version that an abandoned lineage announced."""
    seen: int = 0
    """The last record that was there at the last rewind or announcement."""
    late: list[list[int]] = field(default_factory=list)
    """[version, top, after, last]: records of later versions, up to `top`, that came before these were announced."""
    named: list[list[int]] = field(default_factory=list)
    """[abandoned, after, last]: records of which the lineage that they name says otherwise than the rest of this."""

    @property
    def number(self) -> int:
        """How many rewinds there were."""
        return len(self.branches)

    def is_abandoned(self, seq: int, version: int | None) -> bool:
        """Whether an abandoned version sampled a record; `version` is its newest one."""
        if version is None:
            return False
        if any(version > branch and after < seq <= last for branch, after, last in self.branches):
            return True
        for abandoned, after, last in self.named:
            if after < seq <= last:
                return bool(abandoned)
        if seq > self.seen:
            return self.top is not None and (self.announced or 0) < version <= self.top
        return any(low < version <= top and after < seq <= last for low, top, after, last in self.late)

    def admit(
        self, tx: Transaction, records: Experiences | RowLayout, base: int, versions: Sequence[int | None]
    ) -> set[int]:
        """Tell which of the records that are admitted now, from number `base` on, abandoned versions sampled."""
        before = len(self.named)
        for i, lineage in enumerate(_named_lineages(records)):
            version = versions[i]
            if version is None or lineage is None or lineage not in range(self.number + 1):
                continue
            abandoned = any(version > branch for branch, _, _ in self.branches[int(lineage) :])
            if abandoned != self.is_abandoned(base + i, version):
                self.named.append([int(abandoned), base + i - 1, base + i])
        if len(self.named) > before:
            self.named = _join_ranges(self.named)
            save_lineage(tx, self)
        return {i for i, version in enumerate(versions) if self.is_abandoned(base + i, version)}

    def clipped(self, last: int) -> Lineage:
        """The state of a copy of the book that ends with record `last`."""

        def clip(ranges: list[list[int]]) -> list[list[int]]:
            return [[*values, min(after, last), min(stop, last)] for *values, after, stop in ranges]

        return Lineage(self.announced, clip(self.branches), None, last, clip(self.late), clip(self.named))


def _named_lineages(records: Experiences | RowLayout) -> list[float | None]:
    """The lineage that each record names."""
    column = records.column("info")
    if column is None or not any(text is not None and LINEAGE_KEY in text for text in texts(column)):
        return [None] * len(records)
    return tags.number_column(records, f"info.{LINEAGE_KEY}")


def _join_ranges(named: list[list[int]]) -> list[list[int]]:
    """Ranges that follow one on another, as one."""
    joined: list[list[int]] = []
    for abandoned, after, last in named:
        if joined and joined[-1][0] == abandoned and joined[-1][2] == after:
            joined[-1][2] = last
        else:
            joined.append([abandoned, after, last])
    return joined


def name_lineage(records: Experiences | RowLayout) -> bool:
    """Whether any of these records names its lineage."""
    return any(lineage is not None for lineage in _named_lineages(records))


def read_lineage(tx: Transaction, lock: bool = False) -> Lineage:
    """The policy's announced version, and what was abandoned; with `lock`, nobody else changes it until the end of the
    transaction."""
    end = f" ORDER BY key{tx.lock_row()}" if lock else ""
    return parse_lineage(dict(tx.all(f"SELECT key, value FROM meta WHERE key IN ('policy_version', 'lineage'){end}")))


def parse_lineage(values: dict[str, str]) -> Lineage:
    """The same, from the values that `meta` has."""
    announced = int(values["policy_version"]) if "policy_version" in values else None
    if "lineage" not in values:
        return Lineage(announced)
    state: dict[str, Any] = parsed(values["lineage"], "meta: lineage")
    lists: dict[str, Any] = {name: state.get(name) for name in ("branches", "late", "named")}
    numbers = [state.get("seen"), 0 if state.get("top") is None else state.get("top")]
    for (name, entries), width in zip(lists.items(), (3, 4, 3), strict=True):
        if not isinstance(entries, list) or not all(isinstance(each, list) and len(each) == width for each in entries):
            raise CorruptBookError(
                f"meta: lineage: {name}: got {str(entries)[:100]!r}, expected lists of {width} numbers"
            )
        numbers += [number for each in entries for number in each]
    if any(type(number) is not int for number in numbers):
        raise CorruptBookError(f"meta: lineage: got {values['lineage'][:100]!r}, expected whole numbers")
    return Lineage(announced, top=state["top"], seen=state["seen"], **lists)


def save_lineage(tx: Transaction, lineage: Lineage) -> None:
    """Write what was abandoned; nothing before the first rewind."""
    if not lineage.number:
        tx.run("DELETE FROM meta WHERE key = 'lineage'")
        return
    state = asdict(lineage)
    del state["announced"]
    tx.run(
        "INSERT INTO meta (key, value) VALUES ('lineage', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (json.dumps(state),),
    )


def _last_seq(tx: Transaction) -> int:
    return int(tx.one("SELECT COALESCE(MAX(seq), 0) FROM records")[0])


def _close_lineage(tx: Transaction, lineage: Lineage) -> None:
    """Remember the records that came since `seen` with versions that only an abandoned lineage has announced so far."""
    low, top, last = lineage.announced or 0, lineage.top, _last_seq(tx)
    if top is not None and tx.one(
        "SELECT 1 FROM records WHERE seq > ? AND version_max > ? AND version_max <= ? LIMIT 1", (lineage.seen, low, top)
    ):
        lineage.late.append([low, top, lineage.seen, last])
    lineage.seen = last


def branch_lineage(tx: Transaction, version: int | None, seq: int) -> Lineage:
    """Begin a lineage: a rewind goes back to a checkpoint with this announced version (none counts as 0) and this last
    record. Called before the announced version is put back."""
    lineage = read_lineage(tx)
    _close_lineage(tx, lineage)
    lineage.branches.append([version or 0, seq, lineage.seen])
    if lineage.announced is not None:
        lineage.top = max(lineage.announced, lineage.top or 0)
    lineage.announced = version
    save_lineage(tx, lineage)
    return lineage


def settle_lineage(tx: Transaction) -> None:
    """Settle which records came with versions that are about to be announced in this lineage, too."""
    lineage = read_lineage(tx)
    if lineage.top is not None and (lineage.announced or 0) < lineage.top:
        _close_lineage(tx, lineage)
        save_lineage(tx, lineage)
