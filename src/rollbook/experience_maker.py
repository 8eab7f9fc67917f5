"""LightRFT's `experience_maker`: here `Experience` is the batch.

Invariant: a name here is the one that LightRFT's users import; what it is lives in the module it belongs to.
"""

from __future__ import annotations

from rollbook.algorithms.filters import clip_filter_like_weight_func
from rollbook.batch import ExperienceBatch as Experience
from rollbook.batch import ExperienceVL, Samples
from rollbook.moving import pin_memory, to

__all__ = ["Experience", "ExperienceVL", "Samples", "clip_filter_like_weight_func", "pin_memory", "to"]
