"""Findings: what a check says of a book, and a repair of what it did.

Invariant: a report's size is bounded, whatever it is of: all findings are counted, `LISTED` of each kind are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LISTED = 100
"""How many findings of one kind a report holds; it counts the rest."""
ERROR, NOTE = "error", "note"
_MEND = "rollbook check --repair"
_COMPACT = "none is needed; rollbook compact removes it in time"
_RECORD = f"{_MEND} marks the record as damaged and keeps the others; a copy elsewhere can be appended again"
KINDS: dict[str, tuple[str, str]] = {
    "layout": (ERROR, f"{_MEND} builds the ledger anew from what can be read"),
    "ledger": (ERROR, f"{_MEND} builds the ledger anew from what can be read"),
    "type": (ERROR, f"{_MEND} builds the ledger anew from what can be read"),
    "missing": (ERROR, _RECORD),
    "damaged": (ERROR, _RECORD),
    "another": (ERROR, _RECORD),
    "medium": (ERROR, _RECORD),
    "tags": (ERROR, f"{_MEND} takes them from the record"),
    "uses": (ERROR, f"{_MEND} counts them anew"),
    "consumer": (ERROR, f"{_MEND} resets what cannot be read"),
    "work": (ERROR, f"{_MEND} puts the rows in order, as far as events say"),
    "tally": (ERROR, f"{_MEND} counts anew"),
    "lease": (ERROR, f"{_MEND} ends it, and its records are offered again"),
    "group": (ERROR, f"{_MEND} looks at all groups anew"),
    "quarantined": (ERROR, f"{_MEND} --offer offers all of them for training, book.revise(uid, retrain=True) one"),
    "event": (ERROR, "none: the past is not made up; it does no harm to what comes"),
    "orphan": (NOTE, _COMPACT),
    "unused": (NOTE, _COMPACT),
    "pending": (NOTE, "rollbook compact; a writer that is idle has to close the book first"),
    "idle": (NOTE, f"none is needed; {_MEND} ends it"),
    "begun": (NOTE, f"none is needed; {_MEND} moves it away"),
    "leftover": (NOTE, f"none is needed; {_MEND} moves it away"),
    "stranger": (NOTE, "none: the book never reads it"),
}
"""Every kind of finding: how grave it is, and what helps."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be (`error`), or that is left over and harms nobody (`note`)."""

    kind: str
    severity: str
    what: str
    where: str
    """A record's id, a segment, a consumer or a table."""
    remedy: str


@dataclass(slots=True)
class Report:
    """What a check found, or a repair did."""

    url: str
    deep: bool = True
    """Whether every byte of the data was looked at, or only what is needed to find it."""
    records: int = 0
    media: int = 0
    segments: int = 0
    bytes: int = 0
    """What was looked at; the bytes are those of the segments."""
    findings: list[Finding] = field(default_factory=list)
    """What is wrong now: at most `LISTED` of a kind."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many findings there are of each kind."""
    repaired: list[Finding] = field(default_factory=list)
    """What a repair did, recovered and could not recover; counted in `repairs`."""
    repairs: Counter[str] = field(default_factory=Counter)
    aside: str | None = None
    """Where a repair put what it changed, as it was before."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; what is merely left over is not."""
        return not any(KINDS[kind][0] == ERROR for kind in self.counts)

    def add(self, kind: str, what: str, where: str = "") -> None:
        """Note a finding."""
        self.counts[kind] += 1
        if self.counts[kind] <= LISTED:
            severity, remedy = KINDS[kind]
            self.findings.append(Finding(kind, severity, what, where, remedy))

    def did(self, kind: str, what: str, where: str = "", count: int = 1) -> None:
        """Note what a repair did."""
        if count:
            self.repairs[kind] += count
            if sum(each.kind == kind for each in self.repaired) < LISTED:
                self.repaired.append(Finding(kind, NOTE, what, where, ""))

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "url": self.url,
            "ok": self.ok,
            "deep": self.deep,
            "records": self.records,
            "media": self.media,
            "segments": self.segments,
            "bytes": self.bytes,
            "counts": dict(self.counts),
            "findings": [{name: getattr(each, name) for name in Finding.__slots__} for each in self.findings],
            "repairs": dict(self.repairs),
            "repaired": [{name: getattr(each, name) for name in ("kind", "what", "where")} for each in self.repaired],
            "aside": self.aside,
        }
