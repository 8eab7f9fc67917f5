"""The doctor: checks of a run for common RL failure modes, with evidence and recommendations.

Invariant: it reads an index of the run and changes nothing; every decision is a threshold.

>>> from rollbook.inspect.doctor import CHECKS, Thresholds
>>> len(CHECKS), Thresholds().zero_variance
(20, 0.6)
"""

from __future__ import annotations

from rollbook.inspect.doctor.checks import (
    CHECKS,
    Check,
    describe_checks,
    examine,
    format_report,
    render_markdown,
    triage,
)
from rollbook.inspect.doctor.findings import SEVERITIES, CheckStatus, Diagnosis, Finding, Thresholds

__all__ = [
    "CHECKS",
    "SEVERITIES",
    "Check",
    "CheckStatus",
    "Diagnosis",
    "Finding",
    "Thresholds",
    "describe_checks",
    "examine",
    "format_report",
    "render_markdown",
    "triage",
]
