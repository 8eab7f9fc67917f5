"""What the doctor says: findings, judgements on each illness, and the diagnosis that holds them.

Invariant: plain data that is strict JSON when asked for; ids are the only text in it that came with the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rollbook.core.checks import check_choice

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
"""high: training does harm, or none of it does any good. medium: part of it is wasted or bent. low: worth a look."""
EVIDENCE = 24
"""Most ids in a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, where, and what to do."""

    illness: str
    """Its id, one of `ILLNESSES`."""
    severity: Severity
    title: str
    """One line, with the number that matters."""
    detail: str
    """The numbers behind it, and what they were compared with."""
    advice: str
    steps: tuple[int, int]
    """First and last step it concerns."""
    uids: tuple[str, ...]
    """The most telling records, at most 24, the same ones each time."""
    count: int
    """How many records it concerns."""
    filter: str
    """Opens those records in the viewer's list (and in `rollbook ls --where`); "" where no filter can say it."""
    share: float = 0.0
    """How large a part of the records that were looked at it concerns: the order among equal severities."""

    def as_dict(self) -> dict[str, Any]:
        """Strict JSON."""
        return asdict(self) | {"steps": list(self.steps), "uids": list(self.uids)}


class Examined(NamedTuple):
    """What was said of one illness."""

    illness: str
    status: Literal["ok", "found", "explained", "not judged"]
    """explained: it is there, and follows from another one that was found; curing that one cures it."""
    why: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a check says: a finding, or why there is none."""

    status: Literal["ok", "found", "not judged"]
    why: str
    finding: Finding | None = None


def fine(why: str) -> Judgement:
    """The illness was looked for and is not there."""
    return Judgement("ok", why)


def unknown(why: str) -> Judgement:
    """There is not enough to tell; `why` completes "could not be judged, because ..."."""
    return Judgement("not judged", why)


def found(finding: Finding) -> Judgement:
    """The illness is there."""
    return Judgement("found", finding.title, finding)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor says of a run."""

    source: str
    findings: tuple[Finding, ...]
    """By severity, then by how many of the records each concerns."""
    examined: tuple[Examined, ...]
    """Every illness, in the order of `ILLNESSES`."""
    records: int
    steps: tuple[int, int] | None
    """First and last step that was examined; `None` where there was nothing."""
    evaluation: bool = False
    left_out: int = 0
    """Records that a saver kept for what they show: shares are not judged on them."""

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def judged(self) -> int:
        """How many illnesses could be judged."""
        return sum(each.status != "not judged" for each in self.examined)

    def status(self, fail_on: str = "medium") -> int:
        """A command's exit status: 1 where something of this severity or a higher one was found, else 0. `fail_on` may
        be "never". (2 is for what could not be read.)"""
        check_choice("fail_on", fail_on, (*SEVERITIES, "never"))
        if fail_on == "never":
            return 0
        bad = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        return int(any(each.severity in bad for each in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Strict JSON."""
        return {
            "source": self.source,
            "healthy": self.healthy,
            "records": self.records,
            "steps": None if self.steps is None else list(self.steps),
            "evaluation": self.evaluation,
            "left_out": self.left_out,
            "findings": [each.as_dict() for each in self.findings],
            "examined": [each._asdict() for each in self.examined],
        }


def percent(share: float) -> str:
    """A share for people.

    >>> percent(0.314), percent(0.0042), percent(0.0), percent(0.999), percent(1.0)
    ('31%', '0.42%', '0%', '99.9%', '100%')
    """
    value = 100 * share
    if value in (0.0, 100.0):
        return f"{value:.0f}%"
    return f"{value:.2g}%" if value < 99 else f"{min(value, 99.99):.4g}%"


def amount(value: float) -> str:
    """A number for people: three digits that count.

    >>> amount(0.123456), amount(1234.5), amount(-2.0), amount(0.00001234), amount(123456.0)
    ('0.123', '1,234', '-2', '1.23e-05', '123,456')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def exact(value: float) -> str:
    """A number for a filter: as it is, so that a comparison with it holds for the sample it was taken from.

    >>> exact(0.1), exact(3.0), exact(1e-7)
    ('0.1', '3', '1e-07')
    """
    return repr(float(value)).removesuffix(".0")


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first."""
    return tuple(sorted(findings, key=lambda each: (SEVERITIES.index(each.severity), -each.share, each.illness)))
