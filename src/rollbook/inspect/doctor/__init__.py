"""The doctor: what is wrong with a run, with evidence and what to do.

Invariant: it reads an index of the run and changes nothing; what separates ill from well is a threshold.

>>> from rollbook.inspect.doctor import ILLNESSES, Thresholds
>>> len(ILLNESSES), Thresholds().zero_variance
(20, 0.6)
"""

from __future__ import annotations

from rollbook.inspect.doctor.checks import ILLNESSES, Illness, lines, page, table
from rollbook.inspect.doctor.diagnosis import examine, look
from rollbook.inspect.doctor.findings import SEVERITIES, Diagnosis, Examined, Finding
from rollbook.inspect.doctor.thresholds import Thresholds

__all__ = [
    "ILLNESSES",
    "SEVERITIES",
    "Diagnosis",
    "Examined",
    "Finding",
    "Illness",
    "Thresholds",
    "examine",
    "lines",
    "look",
    "page",
    "table",
]
