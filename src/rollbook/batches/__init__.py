"""Padded and packed batches of records, as models and losses read them."""

from __future__ import annotations

from rollbook.batches.batch import Batch

__all__ = ["Batch"]
