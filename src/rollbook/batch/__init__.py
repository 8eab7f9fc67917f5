"""Padded and packed batches of records, and the micro-batch planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook.core import lazily

if TYPE_CHECKING:
    from rollbook.batch.batch import Batch as Batch
    from rollbook.batch.plan import Cost as Cost
    from rollbook.batch.plan import Plan as Plan

_HOMES = {"Batch": "rollbook.batch.batch", "Cost": "rollbook.batch.plan", "Plan": "rollbook.batch.plan"}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazily(__name__, _HOMES)
