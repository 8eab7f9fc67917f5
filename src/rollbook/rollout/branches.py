"""What an episode is made of: spans of tokens, and the turns and branches they form.

Invariant: tokens come in spans of one origin, with their log-probs and versions, and a span never changes; branches
that went the same way hold the same spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollbook.core.ids import EID
from rollbook.core.images import source
from rollbook.core.sampling import LogprobsKind
from rollbook.rollout.rendering import Drift, Drifts

SpanKind = Literal["prompt", "model", "observation"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """n tokens of one origin. Branches that share them hold the same span, by its `number`.

    `logprobs` and `versions` are of the `model`'s tokens: n entries, or none where the engine gave none.
    """

    number: int
    kind: SpanKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    experts: Any = None
    """[n, layers, k] The experts that were chosen, if the engine said."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer of the model: a span, or several if it was paused and went on."""

    pieces: tuple[Span, ...]
    text: str | None
    """What the model wrote, without the tokens that end a turn; `None` where there is no tokenizer."""
    message: Mapping[str, Any] | None
    finish_reason: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The options it was sampled with, its seed too."""
    logprobs_kind: LogprobsKind | None = None
    stop_reason: str | int | None = None
    run_id: str | None = None
    drift: Drift | None = None
    """What came of the comparison before it; `None` for an episode's first."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All its tokens."""
        return tuple(one for piece in self.pieces for one in piece.ids)

    @property
    def ended(self) -> bool:
        """Whether the model ended it, rather than a limit or a caller."""
        return self.finish_reason in ("stop", "tool_calls")

    @property
    def key(self) -> int:
        """Its number: that of its last piece. Turns that begin alike and end otherwise are different turns."""
        return self.pieces[-1].number

    def joined(self, name: Literal["logprobs", "versions"]) -> list[Any] | None:
        """Its log-probs or versions, if it has them."""
        parts = [getattr(piece, name) for piece in self.pieces]
        return None if None in parts else [one for part in parts for one in part]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Something observed that no turn was sampled after yet: a message, or token ids (and the message they are)."""

    message: Mapping[str, Any] | None = None
    ids: tuple[int, ...] | None = None
    images: tuple[Any, ...] = ()


def observed(message: Mapping[str, Any], beside: Iterator[Any]) -> Observed:
    """A message with bare image parts, and their images: their own, else the next of those beside it."""
    images: list[Any] = []
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return Observed(message=dict(message))
    bare = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            key = source(part)
            image = part[key] if key is not None else next(beside, None)
            if image is None:
                raise ValueError("images: got fewer than the messages have image parts, expected one for each")
            images.append(image)
            part = {"type": "image"}
        bare.append(part)
    return Observed(message={**message, "content": bare}, images=tuple(images))


@dataclass(kw_only=True)
class Branch:
    """One way that an episode went: its spans, and the conversation they are."""

    number: int
    parent: int | None = None
    continued_as: int | None = None
    """The branch that went on from the same conversation, rendered anew; then this one is over."""
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """All of the conversation's, those before a fork too, whose tokens are in the branch that was forked from."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    pending: list[Observed] = field(default_factory=list)
    unchecked: str = ""
    """Why the conversation cannot be rendered as a whole."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None
    """The error of the last attempt at a turn, until one succeeds."""
    full: bool = False
    """Whether a turn was cut, or not begun, since the context has no room for more."""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    media: list[Mapping[str, Any]] = field(default_factory=list)
    engine_media: Mapping[str, Any] | None = None

    @property
    def ids(self) -> list[int]:
        """All tokens, but for what is pending."""
        return [one for span in self.spans for one in span.ids]

    @property
    def state(self) -> tuple[int, int, int]:
        """Another one after whatever changes its tokens."""
        return self.number, len(self.spans), len(self.pending)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its spans: its path."""
        return tuple(span.number for span in self.spans)

    @property
    def own_turns(self) -> list[Turn]:
        """The turns whose tokens it has."""
        numbers = set(self.numbers)
        return [turn for turn in self.turns if turn.key in numbers]

    @property
    def open(self) -> Turn | None:
        """The last turn, if it is unfinished and can go on."""
        last = self.turns[-1] if self.turns and not self.pending else None
        return last if last is not None and last.finish_reason == "abort" else None

    def copy(self, number: int) -> Branch:
        """Another branch that so far went the same way; spans and turns are shared, lists are its own."""
        lists = ("spans", "turns", "messages", "pending", "errors", "images", "media")
        own: dict[str, Any] = {name: list(getattr(self, name)) for name in lists}
        return replace(self, number=number, parent=self.number, reward=None, info=dict(self.info), **own)


def rows(branches: Sequence[Branch]) -> list[Branch]:
    """The branches that become records: those that another does not go on from, or that were given a reward."""
    paths = [branch.numbers for branch in branches]
    found = []
    for i, (branch, path) in enumerate(zip(branches, paths, strict=True)):
        covered = any(
            other[: len(path)] == path and (len(other) > len(path) or k < i) for k, other in enumerate(paths) if k != i
        )
        if not covered or branch.reward is not None:
            found.append(branch)
    return found


def row_id(eid: EID, number: int) -> EID:
    """A branch's id: the same run, the branch's number for a step; branch 0 has the id that was given.

    >>> row_id(EID(batch=0, task=7, run=2, suffix="a"), 0).uid, row_id(EID(0, 7, 2, 0, "a"), 3).rid
    ('0/7/2/0/a', '0/7/2')
    """
    if not number:
        return eid
    digest = hashlib.blake2b(f"{eid.uid}/{number}".encode(), digest_size=8).hexdigest()
    return eid.replace(step=eid.step + number, suffix=digest)


def messages_of(branch: Branch) -> list[Mapping[str, Any]]:
    """The conversation, with what is pending."""
    return [*branch.messages, *(one.message for one in branch.pending if one.message is not None)]


def sampled_text(turns: Iterable[Turn]) -> str | None:
    """What the model wrote, turn by turn on lines of their own, and nothing else; `None` without a tokenizer."""
    texts = [turn.text for turn in turns]
    return None if None in texts else "\n".join(text for text in texts if text is not None)


def drifts(turns: Iterable[Turn]) -> Drifts:
    """The comparisons before these turns, each once."""
    made = {turn.pieces[0].number: turn.drift for turn in turns if turn.drift is not None}
    return Drifts(made[number] for number in sorted(made))


def placed_media(media: Mapping[str, Any], branch: Branch, observation: Sequence[Observed]) -> dict[str, Any]:
    """Media of an observation, whose by-token entries count from the branch's first token on.

    By-token entries of messages that follow other tokens are left out: which tokens are theirs is not known until the
    conversation is rendered, and a model derives types from placeholder ids.
    """
    import torch

    from rollbook.batch.vision import BY_TOKEN

    before = [len(branch.ids), *(None if each.ids is None else len(each.ids) for each in branch.pending)]
    start = None if None in before else sum(length for length in before if length is not None)
    ids = [each.ids for each in observation]
    placed: dict[str, Any] = dict(media)
    for key in BY_TOKEN:
        if key not in placed:
            continue
        entries = torch.as_tensor(placed.pop(key)).reshape(1, -1)
        count = sum(len(each) for each in ids if each is not None)
        if None not in ids and entries.shape[1] != count:
            raise ValueError(f"media[{key!r}]: got {entries.shape[1]} entries, expected {count}, one for each token")
        if start == 0 or (start is not None and None not in ids):
            placed[key] = torch.nn.functional.pad(entries, (start, 0))
    return placed


def without_types(media: Mapping[str, Any]) -> dict[str, Any]:
    """Media without by-token entries."""
    from rollbook.batch.vision import BY_TOKEN

    return {key: value for key, value in media.items() if key not in BY_TOKEN}


# --- as plain values, and back ---------------------------------------------------------------------------------------

_AS_THEY_ARE = ("number", "parent", "continued_as", "unchecked", "failed", "full", "reward", "engine_media")
_LISTS = ("errors", "images", "media", "messages")


def plain(branches: Sequence[Branch]) -> dict[str, Any]:
    """Branches as plain values: each span and each turn once, however many branches hold it."""
    spans = {span.number: span for branch in branches for span in branch.spans}
    # By identity: a turn that one branch left unfinished may have ended in another without a further token.
    turns = list({id(turn): turn for branch in branches for turn in branch.turns}.values())
    places = {id(turn): i for i, turn in enumerate(turns)}
    return {
        "spans": [_plain_span(span) for _, span in sorted(spans.items())],
        "turns": [_plain_turn(turn) for turn in turns],
        "branches": [
            {
                **{name: getattr(branch, name) for name in _AS_THEY_ARE},
                **{name: list(getattr(branch, name)) for name in _LISTS},
                "info": dict(branch.info),
                "spans": list(branch.numbers),
                "turns": [places[id(turn)] for turn in branch.turns],
                "pending": [
                    {**vars(one), "ids": None if one.ids is None else list(one.ids), "images": list(one.images)}
                    for one in branch.pending
                ],
            }
            for branch in branches
        ],
    }


def _plain_span(span: Span) -> dict[str, Any]:
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(span).items()}
    return {**found, "experts": span.experts.tolist() if hasattr(span.experts, "tolist") else span.experts}


def _plain_turn(turn: Turn) -> dict[str, Any]:
    found = {**vars(turn), "pieces": [piece.number for piece in turn.pieces], "sampling": dict(turn.sampling)}
    return {**found, "drift": None if turn.drift is None else turn.drift.to_dict()}


def from_plain(given: Mapping[str, Any]) -> list[Branch]:
    """The branches that `plain` was given.

    >>> span = Span(number=0, kind="prompt", ids=(1, 2))
    >>> from_plain(plain([Branch(number=0, spans=[span])])) == [Branch(number=0, spans=[span])]
    True
    """
    spans: dict[int, Span] = {}
    for one in given["spans"]:
        tuples = {name: None if one[name] is None else tuple(one[name]) for name in ("ids", "logprobs", "versions")}
        spans[one["number"]] = Span(**{**one, **tuples})
    turns = []
    for one in given["turns"]:
        drift = None if one["drift"] is None else Drift(**one["drift"])
        turns.append(Turn(**{**one, "pieces": tuple(spans[piece] for piece in one["pieces"]), "drift": drift}))
    found = []
    for one in given["branches"]:
        pending = [
            Observed(
                message=each["message"],
                ids=None if each["ids"] is None else tuple(each["ids"]),
                images=tuple(each["images"]),
            )
            for each in one["pending"]
        ]
        own = {name: list(one[name]) for name in _LISTS}
        own |= {"spans": [spans[span] for span in one["spans"]], "turns": [turns[turn] for turn in one["turns"]]}
        found.append(Branch(**{**one, **own, "info": dict(one["info"]), "pending": pending}))
    return found
