"""Rollbook's data as its neighbours take it: verl's `DataProto`, TRL's batches, torch's datasets.

Invariant: importing this imports none of them; a function that needs a package says so when it is called without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbook._lazy import lazily

if TYPE_CHECKING:
    from rollbook.adapters.torch_data import ExperienceDataset as ExperienceDataset
    from rollbook.adapters.trl import from_trl as from_trl
    from rollbook.adapters.trl import to_trl as to_trl
    from rollbook.adapters.verl import experiences_from_verl as experiences_from_verl
    from rollbook.adapters.verl import from_verl as from_verl
    from rollbook.adapters.verl import to_verl as to_verl

_HOMES = {
    "ExperienceDataset": "torch_data",
    "experiences_from_verl": "verl",
    "from_trl": "trl",
    "from_verl": "verl",
    "to_trl": "trl",
    "to_verl": "verl",
}

__all__ = ["ExperienceDataset", "experiences_from_verl", "from_trl", "from_verl", "to_trl", "to_verl"]

__getattr__, __dir__ = lazily(__name__, _HOMES)
