"""One sample: the few numbers by which it is chosen, and all that is saved of it.

Invariant: value j of every array speaks of token `prompt + j`; a `Sample` shares no memory with what it was taken from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.core.ids import EID
from rollbook.io.trajectories.pictures import Picture

ARRAYS = {
    "advantages": "advantages",
    "returns": "return",
    "action_log_probs": "action_log_probs",
    "values": "values",
    "base_action_log_probs": "base_action_log_probs",
    "action_entropy": "action_entropy",
    "kl": "kl",
}
"""A batch's per-token fields, and their names in the JSON; the first four are LightRFT's, in its order."""
NUMBERS = tuple(ARRAYS.values())[:4]
"""LightRFT's, which may be one number for the whole sample."""


@dataclass(slots=True)
class Candidate:
    """What is known of a sample before it is chosen: a few numbers."""

    rank: int
    index: int
    """Its place among this process's samples."""
    experience: int
    row: int
    uid: str
    group: str
    """Samples of one prompt have the same."""
    named: bool
    """Whether it came with an id; if not, it was given one by content."""
    reward: float | None
    tokens: int
    """Of its response."""
    truncated: bool = False
    error: bool = False
    mismatch: float | None = None
    """The largest difference between the trainer's log-prob of a token and the engine's."""


@dataclass
class Sample:
    """One sample as it is saved: L tokens, of which the last R are the response's slots."""

    rank: int
    experience: int
    row: int
    eid: EID
    named: bool
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """[R] True where the model chose the token."""
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[R] each, by their names in the JSON."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What came as one number for all tokens, by its name in the JSON."""
    padded: NDArray[np.int64] | None = None
    """[S] The tokens as they were given, where there was padding around them."""
    label: Any = None
    reference: Any = None
    info: Any = None
    reward: float | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    segments: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of a record, by name."""
    images: list[Picture | None] = field(default_factory=list)
    rejected: NDArray[np.int64] | None = None
    """The other answer of a preference pair."""
    nonfinite: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why: str = ""
    weight: float | None = None

    @property
    def prompt(self) -> int:
        """How many tokens come before the response."""
        return len(self.tokens) - len(self.mask)
