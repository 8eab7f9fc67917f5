"""The registry of advantage estimators; each module of this package puts its own into it."""

from __future__ import annotations

from rollbook.algorithms.registry import Estimator, Registry

ESTIMATORS = Registry("advantage estimator", Estimator)
"""Every estimator by name: `ESTIMATORS["grpo"].options` are its options and defaults."""
