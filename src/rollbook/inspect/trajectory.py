"""`Trajectory`: a sample as pages show it, with segments, pictures and lenses.

`find_segments` assigns tokens to speakers and kinds: turns, thinking, tool calls and results, images.

Invariant: every array of a trajectory has one entry per token, and entry i belongs to token i; missing fields are
absent. Segments cover the tokens in order without gap or overlap, in time linear in the text. Sampled tokens belong to
the assistant, even if they contain another speaker's marks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A JSON value of unknown shape, such as a field of a file."""

ROLES = ("system", "user", "assistant", "tool", "text")
KINDS = ("text", "think", "tool_call", "tool_result", "image")
STATUSES = ("finished", "truncated", "aborted", "error", "unfinished")


class Segment(NamedTuple):
    """The tokens [start, stop) of one speaker and kind.

    >>> Segment("assistant", "think", "", 4, 9, True, 0).stop
    9
    """

    role: str
    """One of `ROLES`."""
    kind: str
    """One of `KINDS`."""
    name: str
    """Name of the tool, or ""."""
    start: int
    stop: int
    trained: bool
    """Whether any of its tokens is trained on."""
    turn: int
    """Index of the assistant's turn from 0; a segment before a turn has its index."""


@dataclass
class Picture:
    """An image of a sample; its bytes are requested by `sha256`."""

    sha256: str
    mime: str
    width: int | None = None
    height: int | None = None
    token: int | None = None
    """Position in the tokens, if known."""


@dataclass
class Trajectory:
    """A sample: its text, its L tokens with their values, and its metadata.

    >>> trajectory = Trajectory(uid="1/2/0/0/a", text="2+2=4", ends=np.array([1, 2, 3, 4, 5]), prompt_tokens=4)
    >>> trajectory.tokens, trajectory.token(4), trajectory.mask.tolist()
    (5, '4', [False, False, False, False, True])
    """

    uid: str
    text: str = ""
    """Prompt and response, with special tokens."""
    ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[L] End of each token in characters of `text`; a token that ends inside a character has the end of the previous
    one.
    """
    prompt_tokens: int = 0
    gid: str = ""
    step: int | None = None
    """The training step (see `record_step`)."""
    task: str = ""
    run: int = 0
    turn: int = 0
    """The `step` of the id."""
    prompt: str = ""
    """Hash of the prompt, 16 hex digits (see `hash_prompt`)."""
    ids: NDArray[np.int64] | None = None
    """[L]"""
    special: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """[L] Special tokens; by default none."""
    tokenized: str = "exact"
    """`exact`; `ids`: no vocabulary, the text shows ids; `words`: only text, split into words."""
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """[L] True: trained on. By default the whole response."""
    versions: NDArray[np.int64] | None = None
    """[L] Policy version that sampled each token; -1: not sampled."""
    arrays: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """[L] arrays by lens id; NaN without a value."""
    segments: list[Segment] = field(default_factory=list)
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Named numbers: reward parts and metrics (see `reward_parts`)."""
    declared: tuple[str, ...] = ()
    """Names of the parts that the reward declared."""
    advantage: float | None = None
    """Mean over trained tokens."""
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
    """The record's `info` without entries that are fields here."""
    metrics: dict[str, Any] = field(default_factory=dict)
    kept: str | None = None
    """Why a saver selected it."""
    notes: list[str] = field(default_factory=list)
    """Notes on missing or changed values."""
    rejected: Trajectory | None = None
    """For a preference pair: prompt and rejected answer; this one has the chosen answer."""

    def __post_init__(self) -> None:
        length = len(self.ends)
        if not len(self.special):
            self.special = np.zeros(length, dtype=np.bool_)
        if not len(self.mask):
            self.mask = np.arange(length) >= self.prompt_tokens
        if not self.segments:
            self.segments = prompt_and_response(length, self.prompt_tokens, self.mask)
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
            raise ValueError(
                f"{self.uid}: ends: expected ascending offsets up to {len(self.text)}, the length of the text"
            )
        if not 0 <= self.prompt_tokens <= length:
            raise ValueError(f"{self.uid}: prompt_tokens: got {self.prompt_tokens}, expected 0 to {length}")

    @property
    def tokens(self) -> int:
        """Number of tokens L."""
        return len(self.ends)

    def token(self, index: int) -> str:
        """Return the text of a token."""
        return self.text[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @property
    def prompt_end(self) -> int:
        """End of the prompt in characters of `text`."""
        return int(self.ends[self.prompt_tokens - 1]) if self.prompt_tokens else 0


def prompt_and_response(length: int, prompt_tokens: int, mask: NDArray[np.bool_]) -> list[Segment]:
    """Return prompt and response as segments, without further information."""
    spans = (("user", 0, prompt_tokens), ("assistant", prompt_tokens, length))
    return [Segment(role, "text", "", a, b, bool(mask[a:b].any()), 0) for role, a, b in spans if a < b]


Scale = Literal["sequential", "diverging"]


class Lens(NamedTuple):
    """A way to color tokens: its array in `Trajectory.arrays`, key, help and scale."""

    id: str
    key: str
    label: str
    help: str
    scale: Scale
    middle: float | None
    """Neutral value of a diverging scale."""


LENSES: dict[str, Lens] = {
    lens.id: lens
    for lens in (
        Lens("entropy", "1", "Entropy", "Entropy of the policy at the token.", "sequential", None),
        Lens("logprob", "2", "Log-prob", "Log-prob of the token when it was sampled.", "sequential", None),
        Lens("mismatch", "3", "Mismatch", "Train-inference mismatch: old_logprobs - logprobs.", "diverging", 0.0),
        Lens(
            "ratio",
            "4",
            "Importance",
            "Importance ratio exp(old_logprobs - logprobs) of trainer and engine, before the update.",
            "diverging",
            1.0,
        ),
        Lens("kl", "5", "KL", "KL to the reference policy at the token (k3 estimate).", "sequential", None),
        Lens("advantage", "6", "Advantage", "Advantage of the token.", "diverging", 0.0),
        Lens(
            "credit",
            "7",
            "Credit",
            "Advantage times loss weight; 0 if masked.",
            "diverging",
            0.0,
        ),
        Lens("value", "8", "Value", "Value estimate before the token.", "diverging", 0.0),
        Lens("reward", "9", "Reward", "Reward at the token.", "diverging", 0.0),
        Lens("return", "", "Return", "Return from the token on.", "diverging", 0.0),
        Lens("weight", "", "Loss weight", "Weight of the token's loss.", "sequential", None),
        Lens("teacher", "", "Teacher", "Teacher log-prob of the token.", "sequential", None),
        Lens("version", "", "Policy version", "Policy version that sampled the token.", "sequential", None),
    )
}
"""Lenses in the order of their keys. `version` shows `Trajectory.versions`; all others an array."""


def hash_prompt(ids: ArrayLike | None, text: str = "") -> str:
    """Hash a prompt to 16 hex digits: its token ids, or its text without ids.

    >>> hash_prompt([1, 2, 3]) == hash_prompt(np.array([1, 2, 3], dtype=np.int32)), len(hash_prompt(None, "hello"))
    (True, 16)
    """
    data = text.encode("utf-8", "surrogatepass") if ids is None else np.asarray(ids, dtype="<i8").tobytes()
    return blake2b(data, digest_size=8).hexdigest()


def derive_lenses(arrays: Mapping[str, NDArray[Any] | None], mask: NDArray[np.bool_]) -> dict[str, NDArray[np.float32]]:
    """Compute the lenses [L] that follow from recorded fields; NaN without a value.

    Args:
        arrays: Any of `logprobs`, `old_logprobs`, `ref_logprobs`, `teacher_logprobs`, `entropy`, `values`,
            `advantages`, `returns`, `token_level_reward` and `loss_weights`, each [L].
        mask: [L] trained tokens.

    >>> recorded = {"logprobs": np.array([np.nan, -1.0]), "old_logprobs": np.array([np.nan, -0.5])}
    >>> lenses = derive_lenses(recorded, np.array([False, True]))
    >>> sorted(lenses), lenses["mismatch"].tolist()
    (['logprob', 'mismatch', 'ratio'], [nan, 0.5])
    """
    fields = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items() if array is not None}
    behavior, policy, reference = (fields.get(name) for name in ("logprobs", "old_logprobs", "ref_logprobs"))
    advantage = fields.get("advantages")
    lenses = {lens: fields[name] for name, lens in _LENS_FIELDS.items() if name in fields}
    sampled = behavior if behavior is not None else policy
    with np.errstate(all="ignore"):
        if sampled is not None:
            lenses["logprob"] = sampled
        if behavior is not None and policy is not None:
            lenses["mismatch"] = policy - behavior
            lenses["ratio"] = np.exp(lenses["mismatch"])
        now = policy if policy is not None else behavior
        if now is not None and reference is not None:
            gap = reference - now
            lenses["kl"] = np.expm1(gap) - gap
        if advantage is not None:
            weighted = advantage if "weight" not in lenses else advantage * lenses["weight"]
            lenses["credit"] = np.where(mask | np.isnan(weighted), weighted, 0.0)
        return {name: array.astype(np.float32) for name, array in lenses.items()}


# --- segments --------------------------------------------------------------------------------------------------------

_LENS_FIELDS = {
    "entropy": "entropy",
    "advantages": "advantage",
    "values": "value",
    "token_level_reward": "reward",
    "returns": "return",
    "loss_weights": "weight",
    "teacher_logprobs": "teacher",
}
"""Fields of a record that are lenses unchanged."""


_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "User"), "user"),
    **dict.fromkeys(("assistant", "model", "gpt", "bot", "Assistant"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "environment", "tool_response"), "tool"),
}
"""Names of speakers in chat templates."""

_FULLWIDTH_BAR = "\uff5c"
"""The fullwidth bar of DeepSeek's marks."""
_THINK = ("think", "thinking", "thought", "reasoning")
_CALL = ("tool_call", "function_call", "tool_calls")
_RESULT = ("tool_response", "tool_result", "function_response")
_IMAGES = (
    r"\|vision_start\|>|\|vision_end\|>|\|image_pad\|>|\|video_pad\|>|\|image\|>|\|image_[0-9]{1,3}\|>|image>|/image>|"
    r"video>|image_soft_token>|start_of_image>|end_of_image>|IMG_CONTEXT>|img>|/img>"
)
_MARK_ACTIONS: dict[str, tuple[str, str]] = {
    **{f"<|{name}|>": ("role", role) for name, role in _ROLES.items()},
    **{f"<{_FULLWIDTH_BAR}{name}{_FULLWIDTH_BAR}>": ("role", role) for name, role in _ROLES.items()},
    **{f"<{name}>": ("open", "think") for name in _THINK},
    **{f"</{name}>": ("close", "think") for name in _THINK},
    **{f"<{name}>": ("open", "tool_call") for name in _CALL},
    **{f"</{name}>": ("close", "tool_call") for name in _CALL},
    **{f"<{name}>": ("open", "tool_result") for name in _RESULT},
    **{f"</{name}>": ("close", "tool_result") for name in _RESULT},
    **dict.fromkeys(("[THINK]", "<|channel|>analysis<|message|>"), ("open", "think")),
    **dict.fromkeys(("[/THINK]", "<|channel|>final<|message|>"), ("close", "think")),
    **dict.fromkeys(("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call_begin|>"), ("open", "tool_call")),
    **dict.fromkeys(
        (f"<{_FULLWIDTH_BAR}tool▁call▁begin{_FULLWIDTH_BAR}>", f"<{_FULLWIDTH_BAR}tool▁calls▁begin{_FULLWIDTH_BAR}>"),
        ("open", "tool_call"),
    ),
    **dict.fromkeys(
        (
            "<|tool_call_end|>",
            f"<{_FULLWIDTH_BAR}tool▁call▁end{_FULLWIDTH_BAR}>",
            f"<{_FULLWIDTH_BAR}tool▁calls▁end{_FULLWIDTH_BAR}>",
        ),
        ("close", "tool_call"),
    ),
    **dict.fromkeys(
        (
            "[TOOL_RESULTS]",
            f"<{_FULLWIDTH_BAR}tool▁output▁begin{_FULLWIDTH_BAR}>",
            f"<{_FULLWIDTH_BAR}tool▁outputs▁begin{_FULLWIDTH_BAR}>",
        ),
        ("open", "tool_result"),
    ),
    **dict.fromkeys(
        (
            "[/TOOL_RESULTS]",
            f"<{_FULLWIDTH_BAR}tool▁output▁end{_FULLWIDTH_BAR}>",
            f"<{_FULLWIDTH_BAR}tool▁outputs▁end{_FULLWIDTH_BAR}>",
        ),
        ("close", "tool_result"),
    ),
    "[INST]": ("role", "user"),
    "[/INST]": ("role", "assistant"),
    **dict.fromkeys(("<<SYS>>", "[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"), ("role", "system")),
    **dict.fromkeys(("<</SYS>>", "[/SYSTEM_PROMPT]", "[/AVAILABLE_TOOLS]"), ("role", "user")),
    **dict.fromkeys(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>"), ("end", "")),
    **dict.fromkeys(
        (
            "<|end|>",
            "<|call|>",
            "<|return|>",
            f"<{_FULLWIDTH_BAR}end▁of▁sentence{_FULLWIDTH_BAR}>",
            f"<{_FULLWIDTH_BAR}begin▁of▁sentence{_FULLWIDTH_BAR}>",
        ),
        ("end", ""),
    ),
    **dict.fromkeys(("<s>", "</s>", "<bos>", "<eos>", "<pad>", "<|endoftext|>", "<|begin_of_text|>"), ("end", "")),
}
"""Constant marks and their actions."""

_WORD = r"[A-Za-z_]{1,24}"
_NAMED_MARKS = (
    rf"\|im_start\|>(?:{_WORD})?\n?",
    rf"\|start_header_id\|>(?:{_WORD})?<\|end_header_id\|>",
    rf"\|header_start\|>(?:{_WORD})?<\|header_end\|>",
    rf"\|im_(?:system|user|assistant|tool)\|>(?:{_WORD})?<\|im_middle\|>",
    rf"\|start\|>{_WORD}",
    rf"start_of_turn>(?:{_WORD})?\n?",
)
"""Marks that contain the speaker's name, all after a `<`."""


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(re.escape(name[1:]) for name in sorted(names, key=len, reverse=True))


_MARKS = re.compile(
    f"<(?:(?P<images>(?:{_IMAGES})(?:<(?:{_IMAGES}))*)|(?P<named>{'|'.join(_NAMED_MARKS)})|"
    f"(?:{_alternatives(name for name in _MARK_ACTIONS if name[0] == '<')}))|"
    rf"\[(?:(?P<squares>IMG(?:_BREAK|_END)?\](?:\[IMG(?:_BREAK|_END)?\])*)|"
    f"(?:{_alternatives(name for name in _MARK_ACTIONS if name[0] == '[')}))"
)
"""Starts with one of two characters, and has no ambiguous repeats."""
_NAME_IN_MARK = re.compile(rf"<\|im_(system|user|assistant|tool)\||>({_WORD})")
_VISIBLE = re.compile(r"\S")
_TOOL_NAME = re.compile(
    r"\"name\"\s{0,8}:\s{0,8}\"([^\"\\\n]{1,80})\"|<function=([^>\s]{1,80})>|\[TOOL_CALLS\](\w{1,80})"
)
_MAX_NAME_SEARCH = 4000
"""Characters of a tool call in which its name is searched."""
_ASSISTANT_KINDS = frozenset(("think", "tool_call"))


class _Mark(NamedTuple):
    """A mark in the text that changes speaker or kind: action, role or kind, and position."""

    action: str
    label: str
    start: int
    stop: int
    first_token: int
    """First token of a segment that starts with this mark."""
    next_token: int
    """First token of a segment that starts after this mark."""


@dataclass
class _Span:
    role: str
    kind: str
    token: int
    """First token."""
    char: int
    blank: bool = True
    """Whether it contains only marks and whitespace."""
    opened: bool = False
    """Whether it starts with a speaker's mark."""
    stop: int = 0


def find_segments(
    text: str,
    ends: NDArray[np.int64],
    prompt_tokens: int,
    mask: NDArray[np.bool_],
    *,
    sampled: NDArray[np.bool_] | None = None,
    spans: Json = None,
    exact: bool = True,
) -> list[Segment]:
    """Return the segments of a trajectory's L tokens.

    Args:
        text: The text.
        ends: [L] end of each token in `text`.
        prompt_tokens: Number of prompt tokens.
        mask: [L] trained tokens.
        sampled: [L] tokens that the model sampled; `None` if unknown, in which case marks in the response count too.
        spans: Segments that an episode recorded in `info["segments"]`, which override `sampled`.
        exact: Whether the ends are a tokenizer's, so that a mark that is one token differs from equal text.

    >>> text = "<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>easy</think>4<|im_end|>"
    >>> ends = np.arange(1, len(text) + 1)
    >>> segments = find_segments(text, ends, 54, np.zeros(len(text), dtype=bool))
    >>> [(s.role, s.kind, text[s.start:s.stop]) for s in segments][1:]
    [('assistant', 'think', '<|im_start|>assistant\\n<think>easy</think>'), ('assistant', 'text', '4<|im_end|>')]
    """
    length = len(ends)
    if not length:
        return []
    episode = _parse_recorded(spans, length)
    if episode:
        sampled = np.zeros(length, dtype=np.bool_)
        for kind, start, stop in episode:
            sampled[start:stop] = kind == "model"
    marks = _find_marks(text, ends, exact)
    starts = _speaker_changes(episode, sampled, prompt_tokens, length)
    if not marks and len(starts) < 2:
        return prompt_and_response(length, prompt_tokens, mask)
    segments = _SegmentBuilder(text, ends, sampled, prompt_tokens).run(marks, starts)
    return _merge_spans(text, ends, segments, mask)


def _parse_recorded(spans: Json, length: int) -> list[tuple[str, int, int]]:
    """Return recorded spans, if they are valid: they cover the tokens in order."""
    if not isinstance(spans, (list, tuple)) or not spans or len(spans) > length + 1000:
        return []
    spans_recorded: list[tuple[str, int, int]] = []
    at = 0
    for span in spans:
        if not isinstance(span, dict) or span.get("kind") not in ("prompt", "model", "observation"):
            return []
        start, stop = span.get("start"), span.get("stop")
        if type(start) is not int or type(stop) is not int or start != at or stop < start or stop > length:
            return []
        at = stop
        if stop > start:
            spans_recorded.append((span["kind"], start, stop))
    return spans_recorded if at == length else []


def _speaker_changes(
    episode: list[tuple[str, int, int]], sampled: NDArray[np.bool_] | None, prompt_tokens: int, length: int
) -> list[tuple[int, str]]:
    """Return tokens at which the speaker changes without a mark, because sampled tokens begin or end."""
    if episode:
        return [(start, kind) for kind, start, _ in episode if kind != "prompt"]
    if sampled is None or not sampled.any():
        return [(prompt_tokens, "model")] if prompt_tokens < length else []
    edges = np.flatnonzero(np.diff(sampled.astype(np.int8), prepend=0)).tolist()
    changes = [(edge, "model" if sampled[edge] else "rest") for edge in edges if edge >= prompt_tokens]
    if not changes or changes[0][0] > prompt_tokens:
        changes.insert(0, (prompt_tokens, "model"))
    return changes


def _find_marks(text: str, ends: NDArray[np.int64], exact: bool) -> list[_Mark]:
    matches = list(_MARKS.finditer(text))
    if not matches:
        return []
    starts = np.array([match.start() for match in matches])
    stops = np.array([match.end() for match in matches])
    at, until = np.searchsorted(ends, starts), np.searchsorted(ends, stops)
    clean = ends[np.minimum(at, len(ends) - 1)] == starts
    first = np.where(starts == 0, 0, at + clean).tolist()
    behind = np.minimum(until + 1, len(ends)).tolist()
    marks = []
    for i, match in enumerate(matches):
        if match["images"] or match["squares"]:
            action, label = "image", ""
        elif match["named"]:
            # An unknown name is an unknown speaker.
            name = _NAME_IN_MARK.search(match[0])
            action, label = "role", _ROLES.get(name[name.lastindex or 0], "text") if name else "text"
        else:
            action, label = _MARK_ACTIONS[match[0]]
        marks.append(_Mark(action, label, match.start(), match.end(), first[i], behind[i]))
    if not exact:
        return marks
    # Each mark of a template is one token. Text that only looks like a mark is several tokens and is ignored, unless
    # the tokenizer has none of the marks.
    head = [match.end() if match["named"] is None else text.index(">", match.start()) + 1 for match in matches]
    heads = np.array(head)
    at_token = ends[np.minimum(np.searchsorted(ends, heads), len(ends) - 1)] == heads
    begun = (starts == 0) | clean
    single = (at_token & begun & (np.searchsorted(ends, heads) == first)).tolist()
    believed = {"role", "end"}
    if any(match for match, mark in zip(single, marks, strict=True) if mark.action in believed):
        return [mark for match, mark in zip(single, marks, strict=True) if match or mark.action not in believed]
    return marks


class _SegmentBuilder:
    """Walks through the marks once, tracking speaker and kind."""

    def __init__(
        self, text: str, ends: NDArray[np.int64], sampled: NDArray[np.bool_] | None, prompt_tokens: int
    ) -> None:
        self.text = text
        self.ends = ends
        self.sampled = sampled
        self.spans = [_Span("user", "text", 0, 0)]
        self.has_thought = False
        """Whether this turn contains thinking."""
        self.turn = 0
        """Index of the first span of this turn."""
        self.awaiting_tool = False
        """Whether an observation has started without a tool's mark."""
        self.kind_after_call = "text"
        """Kind after a tool call: "think" if the call is inside a thought."""

    @property
    def now(self) -> _Span:
        return self.spans[-1]

    def begin(self, role: str, kind: str, token: int, char: int, opened: bool = False) -> None:
        self.now.stop = char
        self.spans.append(_Span(role, kind, token, char, opened=opened))

    def begin_turn(self, role: str, kind: str, token: int, char: int, opened: bool) -> None:
        self.begin(role, kind, token, char, opened)
        self.has_thought, self.turn, self.awaiting_tool, self.kind_after_call = (
            False,
            len(self.spans) - 1,
            False,
            "text",
        )

    def run(self, marks: Sequence[_Mark], starts: Sequence[tuple[int, str]]) -> list[_Span]:
        places = [int(self.ends[token - 1]) if token else 0 for token, _ in starts]
        at = next_start = 0
        for mark in marks:
            while next_start < len(starts) and places[next_start] <= mark.start:
                self.add_text(at, places[next_start])
                at = places[next_start]
                self.change_speaker(*starts[next_start], at)
                next_start += 1
            self.add_text(at, mark.start)
            at = mark.stop
            self.add_mark(mark)
        for (token, kind), position in zip(starts[next_start:], places[next_start:], strict=True):
            self.add_text(at, position)
            at = max(at, position)
            self.change_speaker(token, kind, position)
        self.add_text(at, len(self.text))
        self.now.stop = len(self.text)
        return self.spans

    def add_text(self, start: int, stop: int) -> None:
        """Handle text without marks."""
        if start < stop and (self.awaiting_tool or self.now.blank) and _VISIBLE.search(self.text, start, stop):
            if self.awaiting_tool and self.now.role == "assistant":
                token = int(np.searchsorted(self.ends, start))
                self.begin_turn("tool", "tool_result", token + int(self.ends[token] == start), start, False)
            self.awaiting_tool = False
            self.now.blank = False

    def change_speaker(self, token: int, kind: str, char: int) -> None:
        if kind == "model":
            self.awaiting_tool = False
            if self.now.role != "assistant":
                self.begin_turn("assistant", "text", token, char, False)
        elif kind == "observation":
            self.awaiting_tool = True

    def add_mark(self, mark: _Mark) -> None:
        role, kind = self.now.role, self.now.kind
        by_model = (
            self.sampled is not None and mark.first_token < len(self.sampled) and bool(self.sampled[mark.first_token])
        )
        if mark.action == "role":
            if not by_model:
                self.begin_turn(mark.label, "text", mark.first_token, mark.start, True)
            elif self.now.blank:
                self.now.blank = False
        elif mark.action == "end":
            if kind in _ASSISTANT_KINDS and not by_model:
                self.begin(role, "text", mark.first_token, mark.start)
        elif mark.action == "image":
            self.begin(role, "image", mark.first_token, mark.start)
            self.now.blank = False
            self.begin(role, kind, mark.next_token, mark.stop)
        elif mark.label == "tool_result":
            self.add_result_mark(mark, by_model)
        elif role == "assistant":
            self.add_assistant_mark(mark)
        else:
            self.now.blank = False  # a mark that is only mentioned

    def add_result_mark(self, mark: _Mark, by_model: bool) -> None:
        role, kind = self.now.role, self.now.kind
        if by_model or role == "system":
            self.now.blank = False
        elif mark.action == "open" and kind != "tool_result":
            if self.now.blank and self.now.opened:
                # In a user message of the template, everything from the tool's first mark on is the tool's.
                self.now.role, self.now.kind = "tool", "tool_result"
            else:
                self.begin("tool", "tool_result", mark.first_token, mark.start)
            self.awaiting_tool = False
        elif mark.action == "close" and kind == "tool_result":
            self.begin("tool", "text", mark.next_token, mark.stop)

    def add_assistant_mark(self, mark: _Mark) -> None:
        kind = self.now.kind
        if mark.action == "open" and kind != mark.label and not (kind == "tool_call" and mark.label == "think"):
            self.kind_after_call = kind if kind == "think" else "text"
            self.begin("assistant", mark.label, mark.first_token, mark.start)
            self.now.blank = False
            self.has_thought = self.has_thought or mark.label == "think"
        elif mark.action == "close" and kind == mark.label:
            self.begin("assistant", self.kind_after_call if kind == "tool_call" else "text", mark.next_token, mark.stop)
            self.kind_after_call = "text"
        elif mark.action == "close" and mark.label == "think" and not self.has_thought and kind == "text":
            # The opening mark was in the template or cut off: the turn so far was thinking.
            self.has_thought = True
            for span in self.spans[self.turn :]:
                span.kind = "think" if span.kind == "text" else span.kind
            self.now.blank = False
            self.begin("assistant", "text", mark.next_token, mark.stop)


def _merge_spans(text: str, ends: NDArray[np.int64], spans: list[_Span], mask: NDArray[np.bool_]) -> list[Segment]:
    """Convert spans to segments: empty ones are dropped, and those with only marks are merged into a neighbor."""
    merged: list[_Span] = []
    for previous, span in pairwise(spans):
        span.token = max(
            span.token, previous.token
        )  # one token may contain the end of a mark and the start of the next
    for i, span in enumerate(spans):
        stop = spans[i + 1].token if i + 1 < len(spans) else len(ends)
        if stop <= span.token:
            continue
        last = merged[-1] if merged else None
        if last is None or "image" in (last.kind, span.kind):
            merged.append(span)
        elif span.blank and not span.opened:
            last.stop = span.stop
        elif last.blank and not (last.opened if span.opened else last.role != span.role):
            span.token, span.char, span.opened = last.token, last.char, last.opened
            merged[-1] = span
        else:
            merged.append(span)
    turns = _number_turns(merged)
    called: deque[str] = deque()
    segments = []
    for i, (span, turn) in enumerate(zip(merged, turns, strict=True)):
        stop = merged[i + 1].token if i + 1 < len(merged) else len(ends)
        name = ""
        if span.kind == "tool_call":
            tool_name = _TOOL_NAME.search(text, span.char, min(span.stop, span.char + _MAX_NAME_SEARCH))
            name = next((name_group for name_group in tool_name.groups() if name_group), "") if tool_name else ""
            called.append(name)
        elif span.kind == "tool_result" and called:
            name = called.popleft()
        segments.append(
            Segment(span.role, span.kind, name, span.token, stop, bool(mask[span.token : stop].any()), turn)
        )
    return segments


def _number_turns(spans: Sequence[_Span]) -> list[int]:
    """Return the assistant turn of each span, or the one it precedes; spans after the last have its index."""
    turns: list[int] = []
    turn, speaking = -1, False
    for span in spans:
        if span.role == "assistant" and not speaking:
            turn += 1
        speaking = span.role == "assistant"
        turns.append(turn if speaking else turn + 1)
    last = max(turn, 0)
    return [min(number, last) for number in turns]
