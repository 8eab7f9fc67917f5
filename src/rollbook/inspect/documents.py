"""One sample as pages show it: `Trajectory`, its segments and pictures, and the table of lenses.

Invariant: every array of a trajectory has one entry for each token, and entry i speaks of token i; what was not
recorded is absent, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROLES = ("system", "user", "assistant", "tool", "text")
KINDS = ("text", "think", "tool_call", "tool_result", "image")
STATUSES = ("finished", "truncated", "aborted", "error", "unfinished")
TOKENIZED = ("exact", "ids", "words")


class Segment(NamedTuple):
    """The tokens [start, stop) that one speaker wrote, of one kind.

    >>> Segment("assistant", "think", "", 4, 9, True, 0).stop
    9
    """

    role: str
    """One of `ROLES`."""
    kind: str
    """One of `KINDS`."""
    name: str
    """The tool's name, or nothing."""
    start: int
    stop: int
    trained: bool
    """Whether any of its tokens is trained on."""
    turn: int
    """Counts the assistant's turns from 0; what stands before a turn has its number."""


@dataclass
class Picture:
    """An image of a sample; its bytes are asked for by `sha256`."""

    sha256: str
    mime: str
    width: int | None = None
    height: int | None = None
    token: int | None = None
    """Where in the tokens it stands, if that is known."""


@dataclass
class Trajectory:
    """One sample: its text, its L tokens, what is known of each of them, and what is known of the whole.

    >>> one = Trajectory(uid="1/2/0/0/a", text="2+2=4", ends=np.array([1, 2, 3, 4, 5]), prompt_tokens=4)
    >>> one.tokens, one.token(4), one.mask.tolist()
    (5, '4', [False, False, False, False, True])
    """

    uid: str
    text: str = ""
    """All of it, prompt and response, special tokens visible."""
    ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[L] Where each token's text ends, in characters of `text`; a token that ends inside a character has the end of
    the one before."""
    prompt_tokens: int = 0
    gid: str = ""
    step: int | None = None
    """The training step (see `step_of`)."""
    task: str = ""
    run: int = 0
    turn: int = 0
    """The id's `step`."""
    prompt: str = ""
    """16 hex digits that are the same wherever this prompt stands (see `prompt_hash`)."""
    ids: NDArray[np.int64] | None = None
    """[L]"""
    special: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """[L] Special tokens; none if it is left out."""
    tokenized: str = "exact"
    """`exact`; `ids`: no vocabulary is known, the text shows the ids; `words`: only text was known, cut into words."""
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """[L] True: trained on. The whole response if it is left out."""
    versions: NDArray[np.int64] | None = None
    """[L] The policy that sampled each token; -1: none did."""
    arrays: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """[L] each, by the id of a lens; NaN where there is no value."""
    segments: list[Segment] = field(default_factory=list)
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Its named numbers: parts of the reward, and metrics (see `reward_parts`)."""
    declared: tuple[str, ...] = ()
    """Those of them that the reward source declared as parts of the reward."""
    advantage: float | None = None
    """The mean over the tokens that are trained on."""
    status: str = "unfinished"
    """One of `STATUSES`."""
    finish_reason: str | None = None
    truncate_status: str | None = None
    kind: str = "single_turn"
    evaluation: bool = False
    group_size: int | None = None
    parent: str | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    sampling: dict[str, Any] | None = None
    label: Any = None
    reference: Any = None
    pictures: list[Picture] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    """What the record's `info` holds, without what has a place of its own here."""
    metrics: dict[str, Any] = field(default_factory=dict)
    kept: str | None = None
    """Why a saver kept it."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know of these numbers."""
    rejected: Trajectory | None = None
    """Of a preference pair, prompt and worse answer; this one is prompt and better answer."""

    def __post_init__(self) -> None:
        length = len(self.ends)
        if not len(self.special):
            self.special = np.zeros(length, dtype=np.bool_)
        if not len(self.mask):
            self.mask = np.arange(length) >= self.prompt_tokens
        if not self.segments:
            self.segments = plain_segments(length, self.prompt_tokens, self.mask)
        columns = {
            "special": self.special,
            "mask": self.mask,
            "ids": self.ids,
            "versions": self.versions,
            **self.arrays,
        }
        for name, column in columns.items():
            if column is not None and len(column) != length:
                raise ValueError(
                    f"{self.uid}: {name}: got {len(column)} entries, expected {length}, one for each token"
                )
        if (np.diff(self.ends, prepend=0) < 0).any() or (int(self.ends[-1]) if length else 0) != len(self.text):
            raise ValueError(f"{self.uid}: ends: expected places that rise to {len(self.text)}, the length of the text")
        if not 0 <= self.prompt_tokens <= length:
            raise ValueError(f"{self.uid}: prompt_tokens: got {self.prompt_tokens}, expected 0 to {length}")

    @property
    def tokens(self) -> int:
        """L: how many tokens it has."""
        return len(self.ends)

    def token(self, index: int) -> str:
        """The text of one token."""
        return self.text[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @property
    def prompt_end(self) -> int:
        """Where the prompt ends, in characters of `text`."""
        return int(self.ends[self.prompt_tokens - 1]) if self.prompt_tokens else 0


def plain_segments(length: int, prompt_tokens: int, mask: NDArray[np.bool_]) -> list[Segment]:
    """Prompt and response, where nothing more is known."""
    spans = (("user", 0, prompt_tokens), ("assistant", prompt_tokens, length))
    return [Segment(role, "text", "", a, b, bool(mask[a:b].any()), 0) for role, a, b in spans if a < b]


Scale = Literal["sequential", "diverging"]


class Lens(NamedTuple):
    """A way to colour tokens: the array of `Trajectory.arrays` it shows, its key, what it means, and its scale."""

    id: str
    key: str
    label: str
    help: str
    scale: Scale
    middle: float | None
    """The neutral value of a diverging scale."""


LENSES: dict[str, Lens] = {
    lens.id: lens
    for lens in (
        Lens("entropy", "1", "Entropy", "Entropy of the distribution the token was drawn from.", "sequential", None),
        Lens("logprob", "2", "Log-prob", "How likely the token was when it was sampled.", "sequential", None),
        Lens("mismatch", "3", "Mismatch", "Trainer's log-prob less the engine's: 0 if they agree.", "diverging", 0.0),
        Lens(
            "ratio",
            "4",
            "Importance",
            "Trainer's probability of the token over the engine's, before the update. The loss clips another ratio.",
            "diverging",
            1.0,
        ),
        Lens("kl", "5", "KL", "Estimate (k3) of how far the policy moved from the reference here.", "sequential", None),
        Lens(
            "advantage", "6", "Advantage", "How much better than expected this choice is held to be.", "diverging", 0.0
        ),
        Lens(
            "credit",
            "7",
            "Credit",
            "What the loss multiplies: the advantage times the loss weight, 0 where masked.",
            "diverging",
            0.0,
        ),
        Lens("value", "8", "Value", "The critic's estimate before the token.", "diverging", 0.0),
        Lens("reward", "9", "Reward", "Reward given at this token.", "diverging", 0.0),
        Lens("return", "", "Return", "Reward that was still to come from this token on.", "diverging", 0.0),
        Lens("weight", "", "Loss weight", "Weight of the token's loss.", "sequential", None),
        Lens("teacher", "", "Teacher", "A teacher's log-prob of the token.", "sequential", None),
        Lens("version", "", "Policy version", "Which policy sampled the token.", "sequential", None),
    )
}
"""The lenses in the order of their keys. `version` shows `Trajectory.versions`; all others an array."""


def prompt_hash(ids: Any, text: str = "") -> str:
    """16 hex digits of a prompt: of its token ids, or of its text where there are none.

    >>> prompt_hash([1, 2, 3]) == prompt_hash(np.array([1, 2, 3], dtype=np.int32)), len(prompt_hash(None, "hello"))
    (True, 16)
    """
    data = text.encode("utf-8", "surrogatepass") if ids is None else np.asarray(ids, dtype="<i8").tobytes()
    return blake2b(data, digest_size=8).hexdigest()


def derive(arrays: Mapping[str, NDArray[Any] | None], mask: NDArray[np.bool_]) -> dict[str, NDArray[np.float32]]:
    """The lenses that follow from what was recorded, each [L], NaN where there is no value.

    `arrays`: any of `logprobs`, `policy_logprobs`, `ref_logprobs`, `teacher_logprobs`, `entropy`, `values`,
    `advantages`, `returns`, `token_level_reward` and `loss_weights`, each [L]; `mask` [L].

    >>> recorded = {"logprobs": np.array([np.nan, -1.0]), "policy_logprobs": np.array([np.nan, -0.5])}
    >>> found = derive(recorded, np.array([False, True]))
    >>> sorted(found), found["mismatch"].tolist()
    (['logprob', 'mismatch', 'ratio'], [nan, 0.5])
    """
    given = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items() if array is not None}
    behaviour, policy, reference = (given.get(name) for name in ("logprobs", "policy_logprobs", "ref_logprobs"))
    advantage = given.get("advantages")
    found = {lens: given[name] for name, lens in _SAME.items() if name in given}
    spoken = behaviour if behaviour is not None else policy
    with np.errstate(all="ignore"):
        if spoken is not None:
            found["logprob"] = spoken
        if behaviour is not None and policy is not None:
            found["mismatch"] = policy - behaviour
            found["ratio"] = np.exp(found["mismatch"])
        now = policy if policy is not None else behaviour
        if now is not None and reference is not None:
            gap = reference - now
            found["kl"] = np.expm1(gap) - gap
        if advantage is not None:
            weighted = advantage if "weight" not in found else advantage * found["weight"]
            found["credit"] = np.where(mask | np.isnan(weighted), weighted, 0.0)
        return {name: array.astype(np.float32) for name, array in found.items()}


_SAME = {
    "entropy": "entropy",
    "advantages": "advantage",
    "values": "value",
    "token_level_reward": "reward",
    "returns": "return",
    "loss_weights": "weight",
    "teacher_logprobs": "teacher",
}
"""A record's fields that are lenses as they are."""
