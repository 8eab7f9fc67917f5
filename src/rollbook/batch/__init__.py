"""Padded and packed batches of records, and the micro-batch planner."""

from __future__ import annotations

from rollbook.batch.batch import Batch

__all__ = ["Batch"]
