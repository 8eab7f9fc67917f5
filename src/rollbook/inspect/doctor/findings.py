"""Results of the doctor: findings, the result of each check, and the diagnosis that holds them.

Invariant: `as_dict` is strict JSON; ids are the only text in it that came with the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rollbook.core.checks import check_choice

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
"""high: training does harm or has no effect. medium: part of it is wasted or biased. low: worth a look."""
EVIDENCE = 24
"""Most ids in a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, where it is, and what to do."""

    check: str
    """Its id, one of `CHECKS`."""
    severity: Severity
    title: str
    """One line, with the number that matters."""
    detail: str
    """The numbers behind it, and what they were compared with."""
    recommendation: str
    steps: tuple[int, int]
    """First and last step it concerns."""
    uids: tuple[str, ...]
    """The most telling records, at most 24, the same ones each time."""
    count: int
    """Number of records it concerns."""
    filter: str
    """Opens those records in the viewer's list (and in `rollbook ls --where`); "" where no filter can say it."""
    share: float = 0.0
    """Share of the examined records that it concerns; orders findings of equal severity."""

    def as_dict(self) -> dict[str, Any]:
        """Strict JSON."""
        return asdict(self) | {"steps": list(self.steps), "uids": list(self.uids)}


class CheckStatus(NamedTuple):
    """The status of one check."""

    check: str
    status: Literal["ok", "found", "explained", "not judged"]
    """explained: triggered, but follows from another finding; fixing that one fixes it."""
    why: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check: a finding, or why there is none."""

    status: Literal["ok", "found", "not judged"]
    why: str
    finding: Finding | None = None


def passed(why: str) -> CheckResult:
    """Return the result of a check that was not triggered."""
    return CheckResult("ok", why)


def skipped(why: str) -> CheckResult:
    """Return the result of a check that could not run; `why` completes "could not be judged, because ..."."""
    return CheckResult("not judged", why)


def triggered(finding: Finding) -> CheckResult:
    """Return the result of a triggered check."""
    return CheckResult("found", finding.title, finding)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of examining a run."""

    source: str
    findings: tuple[Finding, ...]
    """By severity, then by how many of the records each concerns."""
    checks: tuple[CheckStatus, ...]
    """Every check, in the order of `CHECKS`."""
    records: int
    steps: tuple[int, int] | None
    """First and last examined step; `None` without records."""
    evaluation: bool = False
    left_out: int = 0
    """Records that a saver selected for their content: shares are not judged on them."""

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def judged(self) -> int:
        """Number of checks that could run."""
        return sum(check.status != "not judged" for check in self.checks)

    def status(self, fail_on: str = "medium") -> int:
        """Return the exit status of the command: 1 for a finding of severity `fail_on` or higher, else 0.

        `fail_on` may be "never". (Status 2 is for input that could not be read.)
        """
        check_choice("fail_on", fail_on, (*SEVERITIES, "never"))
        if fail_on == "never":
            return 0
        bad = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        return int(any(finding.severity in bad for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Strict JSON."""
        return {
            "source": self.source,
            "healthy": self.healthy,
            "records": self.records,
            "steps": None if self.steps is None else list(self.steps),
            "evaluation": self.evaluation,
            "left_out": self.left_out,
            "findings": [finding.as_dict() for finding in self.findings],
            "checks": [check._asdict() for check in self.checks],
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


def rank_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the worst first."""
    return tuple(
        sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.share, finding.check))
    )
