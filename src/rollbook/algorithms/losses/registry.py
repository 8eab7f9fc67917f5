"""The registry of losses; each module of this package puts its own into it."""

from __future__ import annotations

from rollbook.algorithms.registry import LossEntry, Registry

LOSSES = Registry("loss", LossEntry)
"""Every loss by name: `LOSSES["ppo"].options` are its options and defaults; `LOSSES.call("ppo", data)` calls it."""
