"""`Tree`: the spans, turns and branches of an episode.

Invariant: tokens come in spans of one origin, with their log-probs and versions, and a span never changes; branches
with a common beginning share its spans. A turn is appended completely or not at all, directly after the tokens that
the model was given; if the model was given other tokens, it is appended to a fork.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollbook.core.ids import EID
from rollbook.core.media import source_key
from rollbook.core.sampling import LogprobsKind, Prompt, Sample, Sampling
from rollbook.core.vocabulary import Tokenizer, template_fingerprint
from rollbook.rollout.chat import Drift, Drifts, Renderer, compare_tokens
from rollbook.rollout.engine import derive_seed

SpanKind = Literal["prompt", "model", "observation"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """n tokens of one origin. Branches that share them have the same span, by its `number`.

    Spans of the `model` have `logprobs` and `versions` [n], if the engine returned them.
    """

    number: int
    kind: SpanKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    experts: Any = None
    """[n, layers, k] Selected experts, if the engine returned them."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A response of the model: one span, or several if it was paused and continued."""

    pieces: tuple[Span, ...]
    text: str | None
    """Text without end tokens; `None` without a tokenizer."""
    message: Mapping[str, Any] | None
    finish_reason: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling options, including the seed."""
    logprobs_kind: LogprobsKind | None = None
    stop_reason: str | int | None = None
    run_id: str | None = None
    drift: Drift | None = None
    """Comparison with a new rendering before the turn; `None` for the first turn."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the turn."""
        return tuple(token for piece in self.pieces for token in piece.ids)

    @property
    def ended(self) -> bool:
        """Whether the model ended the turn, not a limit or a cancel."""
        return self.finish_reason in ("stop", "tool_calls")

    @property
    def key(self) -> int:
        """Number of the turn: that of its last span. Turns with the same beginning and different ends differ."""
        return self.pieces[-1].number

    def joined(self, name: Literal["logprobs", "versions"]) -> list[Any] | None:
        """Return the log-probs or versions of all tokens of the turn.

        Args:
            name: The column.

        Returns:
            [n] One entry per token; `None` if the engine returned none.
        """
        columns = [getattr(piece, name) for piece in self.pieces]
        return None if None in columns else [entry for column in columns for entry in column]


@dataclass(frozen=True, kw_only=True)
class PendingObservation:
    """An observation since the last turn: a message, or token ids with an optional message."""

    message: Mapping[str, Any] | None = None
    ids: tuple[int, ...] | None = None
    images: tuple[Any, ...] = ()


def extract_images(message: Mapping[str, Any], separate_images: Iterator[Any]) -> PendingObservation:
    """Move the images out of a message.

    Args:
        message: The message.
        separate_images: Images of the parts that have none of their own, in order.

    Returns:
        The message without images, and the images.

    Raises:
        ValueError: There are fewer images than parts that need one.
    """
    images: list[Any] = []
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return PendingObservation(message=dict(message))
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            key = source_key(part)
            image = part[key] if key is not None else next(separate_images, None)
            if image is None:
                raise ValueError("images: got fewer images than the messages have image parts")
            images.append(image)
            part = {"type": "image"}
        parts.append(part)
    return PendingObservation(message={**message, "content": parts}, images=tuple(images))


@dataclass(kw_only=True)
class Branch:
    """One path of an episode: its spans and its conversation."""

    number: int
    parent: int | None = None
    continued_as: int | None = None
    """Number of the fork that continues this branch, if any."""
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """All turns of the conversation, including those before a fork, whose tokens are in the origin."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    pending: list[PendingObservation] = field(default_factory=list)
    unchecked: str = ""
    """Why the conversation cannot be rendered as a whole."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None
    """Error of the last attempt at a turn, until one succeeds."""
    full: bool = False
    """Whether a turn was truncated or not started because the context is full."""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    media: list[Mapping[str, Any]] = field(default_factory=list)
    engine_media: Mapping[str, Any] | None = None

    @property
    def ids(self) -> list[int]:
        """All tokens except pending observations."""
        return [token for span in self.spans for token in span.ids]

    @property
    def state(self) -> tuple[int, int, int]:
        """Changes whenever the tokens change."""
        return self.number, len(self.spans), len(self.pending)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the spans."""
        return tuple(span.number for span in self.spans)

    @property
    def own_turns(self) -> list[Turn]:
        """Turns whose tokens are in this branch."""
        numbers = set(self.numbers)
        return [turn for turn in self.turns if turn.key in numbers]

    @property
    def open(self) -> Turn | None:
        """The last turn, if it is unfinished and can be continued."""
        last = self.turns[-1] if self.turns and not self.pending else None
        return last if last is not None and last.finish_reason == "abort" else None

    def copy(self, number: int) -> Branch:
        """Return a branch with the same history; spans and turns are shared, lists are copied.

        Args:
            number: Number of the new branch.
        """
        lists = ("spans", "turns", "messages", "pending", "errors", "images", "media")
        copies: dict[str, Any] = {name: list(getattr(self, name)) for name in lists}
        return replace(self, number=number, parent=self.number, reward=None, info=dict(self.info), **copies)


def recorded_branches(branches: Sequence[Branch]) -> list[Branch]:
    """Return the branches that become records: those that no other continues, or that have a reward.

    Args:
        branches: All branches of an episode.
    """
    paths = [branch.numbers for branch in branches]
    recorded = []
    for i, (branch, path) in enumerate(zip(branches, paths, strict=True)):
        covered = any(
            other[: len(path)] == path and (len(other) > len(path) or k < i) for k, other in enumerate(paths) if k != i
        )
        if not covered or branch.reward is not None:
            recorded.append(branch)
    return recorded


def branch_eid(eid: EID, number: int) -> EID:
    """Return the id of a branch: the id of the run, with the number of the branch added to its step.

    Args:
        eid: Id of the run.
        number: Number of the branch.

    >>> branch_eid(EID(batch=0, task=7, run=2, suffix="a"), 0).uid, branch_eid(EID(0, 7, 2, 0, "a"), 3).rid
    ('0/7/2/0/a', '0/7/2')
    """
    if not number:
        return eid
    digest = hashlib.blake2b(f"{eid.uid}/{number}".encode(), digest_size=8).hexdigest()
    return eid.replace(step=eid.step + number, suffix=digest)


def full_conversation(branch: Branch) -> list[Mapping[str, Any]]:
    """Return the conversation, including pending observations.

    Args:
        branch: The branch.
    """
    return [
        *branch.messages,
        *(observation.message for observation in branch.pending if observation.message is not None),
    ]


def sampled_text(turns: Iterable[Turn]) -> str | None:
    """Return the texts of the turns, one per line; `None` without a tokenizer.

    Args:
        turns: The turns.
    """
    texts = [turn.text for turn in turns]
    return None if None in texts else "\n".join(text for text in texts if text is not None)


def collect_drifts(turns: Iterable[Turn]) -> Drifts:
    """Return the comparisons before these turns, each once.

    Args:
        turns: Turns of one or more branches.
    """
    by_span = {turn.pieces[0].number: turn.drift for turn in turns if turn.drift is not None}
    return Drifts(by_span[number] for number in sorted(by_span))


def place_media(media: Mapping[str, Any], branch: Branch, observation: Sequence[PendingObservation]) -> dict[str, Any]:
    """Return the media of an observation, with entries per token from the first token of the branch on.

    Entries per token of messages that follow other tokens are left out: their position is not known until the
    conversation is rendered. The model derives them from the placeholder ids.

    Args:
        media: Tensors of the processor, by name.
        branch: The branch that the observation is appended to.
        observation: The observation.

    Returns:
        The tensors. Those per token are [1, n] for the first n tokens of the branch.

    Raises:
        ValueError: A tensor per token does not match the token ids of the observation.
    """
    import torch

    from rollbook.batch.media import BY_TOKEN

    lengths = [len(branch.ids), *(None if pending.ids is None else len(pending.ids) for pending in branch.pending)]
    start = None if None in lengths else sum(length for length in lengths if length is not None)
    ids = [observed.ids for observed in observation]
    placed: dict[str, Any] = dict(media)
    for key in BY_TOKEN:
        if key not in placed:
            continue
        entries = torch.as_tensor(placed.pop(key)).reshape(1, -1)
        count = sum(len(observed_ids) for observed_ids in ids if observed_ids is not None)
        if None not in ids and entries.shape[1] != count:
            raise ValueError(f"media[{key!r}]: got {entries.shape[1]} entries, expected {count}, one for each token")
        if start == 0 or (start is not None and None not in ids):
            placed[key] = torch.nn.functional.pad(entries, (start, 0))
    return placed


def drop_token_types(media: Mapping[str, Any]) -> dict[str, Any]:
    """Return media without entries per token.

    Args:
        media: Tensors of the processor, by name.
    """
    from rollbook.batch.media import BY_TOKEN

    return {key: value for key, value in media.items() if key not in BY_TOKEN}


# --- serialization --------------------------------------------------------------------------------------------------

_PLAIN_FIELDS = ("number", "parent", "continued_as", "unchecked", "failed", "full", "reward", "engine_media")
_LISTS = ("errors", "images", "media", "messages")


def branches_to_dict(branches: Sequence[Branch]) -> dict[str, Any]:
    """Convert branches to plain values, with each span and turn once.

    Args:
        branches: All branches of an episode.
    """
    spans = {span.number: span for branch in branches for span in branch.spans}
    # By identity: a turn may be unfinished in one branch and finished in another with the same tokens.
    turns = list({id(turn): turn for branch in branches for turn in branch.turns}.values())
    turn_indices = {id(turn): i for i, turn in enumerate(turns)}
    return {
        "spans": [_span_to_dict(span) for _, span in sorted(spans.items())],
        "turns": [_turn_to_dict(turn) for turn in turns],
        "branches": [
            {
                **{name: getattr(branch, name) for name in _PLAIN_FIELDS},
                **{name: list(getattr(branch, name)) for name in _LISTS},
                "info": dict(branch.info),
                "spans": list(branch.numbers),
                "turns": [turn_indices[id(turn)] for turn in branch.turns],
                "pending": [
                    {
                        **vars(pending),
                        "ids": None if pending.ids is None else list(pending.ids),
                        "images": list(pending.images),
                    }
                    for pending in branch.pending
                ],
            }
            for branch in branches
        ],
    }


def _span_to_dict(span: Span) -> dict[str, Any]:
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(span).items()}
    return {**fields, "experts": span.experts.tolist() if hasattr(span.experts, "tolist") else span.experts}


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    fields = {**vars(turn), "pieces": [piece.number for piece in turn.pieces], "sampling": dict(turn.sampling)}
    return {**fields, "drift": None if turn.drift is None else turn.drift.to_dict()}


def branches_from_dict(state: Mapping[str, Any]) -> list[Branch]:
    """Restore branches from `branches_to_dict`.

    Args:
        state: The plain values.

    >>> span = Span(number=0, kind="prompt", ids=(1, 2))
    >>> branches_from_dict(branches_to_dict([Branch(number=0, spans=[span])])) == [Branch(number=0, spans=[span])]
    True
    """
    spans: dict[int, Span] = {}
    for entry in state["spans"]:
        tuples = {name: None if entry[name] is None else tuple(entry[name]) for name in ("ids", "logprobs", "versions")}
        spans[entry["number"]] = Span(**{**entry, **tuples})
    turns = []
    for entry in state["turns"]:
        drift = None if entry["drift"] is None else Drift(**entry["drift"])
        turns.append(Turn(**{**entry, "pieces": tuple(spans[piece] for piece in entry["pieces"]), "drift": drift}))
    branches = []
    for entry in state["branches"]:
        pending = [
            PendingObservation(
                message=observed["message"],
                ids=None if observed["ids"] is None else tuple(observed["ids"]),
                images=tuple(observed["images"]),
            )
            for observed in entry["pending"]
        ]
        fields = {name: list(entry[name]) for name in _LISTS}
        fields |= {"spans": [spans[span] for span in entry["spans"]], "turns": [turns[turn] for turn in entry["turns"]]}
        branches.append(Branch(**{**entry, **fields, "info": dict(entry["info"]), "pending": pending}))
    return branches


DriftPolicy = Literal["keep", "fork"]
NextTokens = tuple[list[int], Drift | None]
"""The tokens before a turn, and their comparison with a new rendering."""
Parse = Callable[[str], Mapping[str, Any] | None]
FORMAT = 1
"""Version of the format of `Tree.to_dict`."""
_OBSERVE = "expected an observation before the next"
_OPAQUE = "token ids were observed without a message"


@dataclass(frozen=True)
class TurnRequest:
    """A request to an engine, and the state of the branch that it is for."""

    prompt: Prompt | Sample
    sampling: Sampling
    state: tuple[int, int, int]
    next: NextTokens


@dataclass(kw_only=True)
class Tree:
    """An episode: its settings, its branches, and the rewards of its turns by `Turn.key`."""

    renderer: Renderer | None
    prompt: Prompt
    eid: EID
    sampling: Sampling
    context_limit: int | None
    group_size: int | None
    policies: Mapping[str, DriftPolicy]
    """Policies for the outcomes `realigned` and `forked`."""
    parse: Parse | None
    branches: list[Branch] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    spans: int = 0
    """Number of spans so far."""

    @property
    def chat(self) -> bool:
        """Whether the conversation consists of messages."""
        return self.renderer is not None and self.renderer.chat

    def record_eid(self, branch: Branch) -> EID:
        """Return the id of a branch's record.

        Args:
            branch: The branch.
        """
        return branch_eid(self.eid, branch.number)

    def tail(self, branch: Branch, generation: bool) -> list[int]:
        """Render the pending observations.

        Args:
            branch: The branch.
            generation: Whether to add the beginning of the next turn.

        Returns:
            [n] The tokens that follow those of the branch.

        Raises:
            ValueError: The template cannot render the observations there.
        """
        # Observations of ids contain their placeholders already.
        rendered = [observation for observation in branch.pending if observation.ids is None]
        return self._tail(branch, generation, [image for observation in rendered for image in observation.images])

    def _tail(self, branch: Branch, generation: bool, images: Sequence[Any]) -> list[int]:
        messages = [
            observation.message
            for observation in branch.pending
            if observation.ids is None and observation.message is not None
        ]
        raw = [token for observation in branch.pending for token in observation.ids or ()]
        if not messages or self.renderer is None:
            return raw
        if not branch.turns:
            return self.renderer.prompt(messages, generation, images) + raw
        turn, context = branch.turns[-1], branch.messages
        rendered = self.renderer.after(context[:-1], context[-1], turn.ids, turn.ended, messages, generation, images)
        return rendered + raw

    def next(self, branch: Branch) -> NextTokens:
        """Return the tokens before the next turn, and compare them with a new rendering.

        Args:
            branch: The branch.

        Raises:
            ValueError: The pending observations cannot be rendered.
        """
        renderer, conversation = self.renderer, full_conversation(branch)
        try:
            tokens = branch.ids + self.tail(branch, True)
        except ValueError:
            if renderer is None or not branch.turns or self.policies["forked"] != "fork":
                raise
            # Messages that cannot be rendered after a turn may be rendered with the whole conversation.
            tokens = renderer.prompt(conversation, True, branch.images)
            drift = Drift(outcome="forked", what="text", kept=len(branch.ids), rendered=len(tokens), policy="fork")
            return tokens, drift
        if not branch.turns or not branch.pending:
            return tokens, None
        reason = branch.unchecked or (_OPAQUE if _has_raw_ids(branch) else "")
        if renderer is None or reason:
            return tokens, Drift(outcome="unchecked", what=reason or "there is no tokenizer")
        try:
            previous, current = renderer.text(branch.messages[:-1], True), renderer.text(conversation, True)
        except Exception as error:  # templates raise any exception
            return tokens, Drift(outcome="unchecked", what=f"{type(error).__name__}: {error}")
        # Compared with the rendering before this turn, so that earlier differences are not reported again; and without
        # images on both sides, since a processor expands placeholders in the same way everywhere.
        has_images = any(observation.images for observation in branch.pending)
        tail = self._tail(branch, True, ()) if has_images else tokens[len(branch.ids) :]
        start, rendered = renderer.endings(previous, current)
        drift = compare_tokens([*start, *branch.turns[-1].ids, *tail], rendered, renderer.decode)
        policy = self.policies.get(drift.outcome, "keep")
        if policy == "fork":
            tokens = renderer.prompt(conversation, True, branch.images)
        return tokens, replace(drift, policy=policy)

    # --- requests --------------------------------------------------------------------------------------------------

    def request_turn(self, branch: Branch, following: NextTokens, options: Mapping[str, Any]) -> TurnRequest | Sample:
        """Return the request for the next turn.

        Args:
            branch: The branch.
            following: Result of `next`.
            options: Changes of the sampling options.

        Returns:
            The request; if the context is full, a sample without tokens instead.

        Raises:
            ValueError: Nothing was observed since the last turn, or an option is invalid.
        """
        unfinished = branch.open
        if unfinished is None and branch.turns and not branch.pending:
            raise ValueError(f"act: the last turn ended ({branch.turns[-1].finish_reason}), {_OBSERVE}")
        recorded = {} if unfinished is None else unfinished.sampling
        recorded = {name: option for name, option in recorded.items() if name in Sampling.__dataclass_fields__}
        settings = check_single(Sampling.of(recorded or self.sampling, **options))
        tokens, done = following[0], () if unfinished is None else unfinished.ids
        prompt = self.prompt.replace(
            text=None,
            messages=None,
            tools=None,
            token_ids=tokens[: len(tokens) - len(done)],
            images=branch.images,
            eid=self.record_eid(branch),
        )
        if self.context_limit is not None:
            tokens_left = self.context_limit - len(prompt.token_ids or ())
            if tokens_left <= len(done):
                return self._end_at_limit(branch, prompt, settings)
            limit = min(settings.max_tokens, tokens_left)
            settings = replace(settings, max_tokens=limit, min_tokens=min(settings.min_tokens, limit))
        if unfinished is not None:
            return TurnRequest(self._unfinished(branch, unfinished, prompt), settings, branch.state, following)
        if settings.seed is not None:
            # Each turn (and, by its id, each branch) has its own random stream.
            settings = replace(settings, seed=derive_seed(settings.seed, len(branch.turns)))
        return TurnRequest(prompt, settings, branch.state, following)

    def _end_at_limit(self, branch: Branch, prompt: Prompt, settings: Sampling) -> Sample:
        """End the conversation at the context limit, and return a sample without tokens."""
        if branch.open is not None:
            branch.turns[-1] = replace(branch.open, finish_reason="length")
        branch.full, branch.failed = True, None
        return Sample(
            prompt=prompt,
            eid=self.record_eid(branch),
            prompt_ids=list(prompt.token_ids or ()),
            response_ids=[],
            finish_reason="length",
            sampling=settings.to_dict(),
        )

    def _unfinished(self, branch: Branch, turn: Turn, prompt: Prompt) -> Sample:
        """Return the unfinished sample for an engine to continue."""
        return Sample(
            prompt=prompt,
            eid=self.record_eid(branch),
            prompt_ids=list(prompt.token_ids or ()),
            response_ids=list(turn.ids),
            logprobs=turn.joined("logprobs"),
            logprobs_kind=turn.logprobs_kind,
            finish_reason="abort",
            versions=turn.joined("versions"),
            text=turn.text,
            sampling=dict(turn.sampling),
            run_id=turn.run_id,
            media=branch.engine_media,
        )

    # --- turns ------------------------------------------------------------------------------------------------------

    def append(self, branch: Branch, sample: Sample, following: NextTokens | None = None) -> Branch:
        """Append a turn.

        Args:
            branch: The branch.
            sample: The turn.
            following: Result of `next`; computed by default.

        Returns:
            The branch of the turn: this one or a fork.

        Raises:
            ValueError: The turn does not match the branch, which is then unchanged.
        """
        if sample.failed:
            branch.failed = sample.error
            branch.errors.append({"turn": len(branch.turns), "error": sample.error})
            return branch
        if branch.open is not None and self._continue_turn(branch, branch.open, sample):
            return branch
        prompt_ids, branch_ids = list(sample.prompt_ids), branch.ids
        ended = bool(branch.turns) and not branch.pending
        if ended and prompt_ids in ([], branch_ids):
            raise ValueError(f"sample: got a turn after one that ended ({branch.turns[-1].finish_reason}), {_OBSERVE}")
        tokens, drift = following or self.next(branch)
        if prompt_ids and prompt_ids != tokens:
            # The engine was given other tokens. If they differ only after the last turn, they replace the pending
            # observations; if they differ before, the turn belongs to another branch.
            drift = None
            if prompt_ids[: len(branch_ids)] != branch_ids:
                decode = _spell_ids if self.renderer is None else self.renderer.decode
                drift = replace(compare_tokens(tokens, prompt_ids, decode, by="engine"), policy="fork")
            elif branch.turns:
                drift = Drift(outcome="clean", by="engine")
            branch.media = [drop_token_types(media) for media in branch.media]
            tokens = prompt_ids
        unchecked = "an engine was given tokens that were not observed" if ended else ""
        return self._append(branch, sample, tokens, drift, unchecked)

    def _append(self, branch: Branch, sample: Sample, tokens: list[int], drift: Drift | None, unchecked: str) -> Branch:
        piece = self._piece(branch, sample, 0)  # raises before anything is changed
        unchecked = branch.unchecked or unchecked or (_OPAQUE if _has_raw_ids(branch) else "")
        if drift is not None and drift.policy == "fork":
            branch = self._fork(branch)
        branch.unchecked = unchecked
        observation = self._span("observation" if branch.spans else "prompt", tokens[len(branch.ids) :])
        branch.messages = [*full_conversation(branch), {}]  # the message of the turn follows
        branch.pending = []
        branch.turns.append(Turn(pieces=(piece,), text=None, message=None, finish_reason="abort", drift=drift))
        branch.spans += [observation] if observation.ids or observation.kind == "prompt" else []
        branch.spans.append(piece)
        self._finish(branch, branch.turns[-1], sample)
        return branch

    def _fork(self, branch: Branch) -> Branch:
        """Create the branch that continues this conversation from a new rendering."""
        fork = branch.copy(len(self.branches))
        fork.spans, fork.reward = [], branch.reward
        fork.media = [drop_token_types(media) for media in fork.media]  # its tokens are at other positions
        next_turn = len(branch.turns)
        fork.errors = [error for error in branch.errors if error["turn"] == next_turn]
        branch.errors = [error for error in branch.errors if error["turn"] != next_turn]
        branch.pending, branch.continued_as, branch.reward, branch.failed = [], fork.number, None, None
        self.branches.append(fork)
        return fork

    def _continue_turn(self, branch: Branch, turn: Turn, sample: Sample) -> bool:
        """Append the rest of an unfinished turn; return whether the sample continues it."""
        done, branch_ids = turn.ids, branch.ids
        ids, prompt_ids = tuple(sample.response_ids), list(sample.prompt_ids)
        is_complete = ids[: len(done)] == done and prompt_ids in ([], branch_ids[: len(branch_ids) - len(done)])
        if not is_complete and prompt_ids not in ([], branch_ids):
            return False
        piece = self._piece(branch, sample, len(done) if is_complete else 0)
        if piece.ids:
            branch.spans.append(piece)
            turn = replace(turn, pieces=(*turn.pieces, piece))
        self._finish(branch, turn, sample)
        return True

    def _finish(self, branch: Branch, turn: Turn, sample: Sample) -> None:
        """Set the last turn, and its message."""
        text, ids, message = sample.text, turn.ids, sample.message
        content = None
        if self.renderer is not None:
            text = self.renderer.content(branch.messages[:-1], ids, sample.finish_reason in ("stop", "tool_calls"))
            content = text if self.chat else self.renderer.decode(ids)
        if self.parse is not None and text is not None and sample.finish_reason != "abort":
            try:
                message = self.parse(text)
                if message is not None and (not isinstance(message, Mapping) or "role" not in message):
                    raise ValueError(f"got {message!r}, expected a message with a role, or None")
            except Exception as error:  # the text of the model may not parse
                problem = f"parse: {type(error).__name__}: {error}"
                branch.errors.append({"turn": len(branch.turns) - 1, "error": problem})
                message = None
        turn_message = dict(message) if message is not None else {"role": "assistant", "content": content or ""}
        branch.messages[-1] = turn_message
        branch.turns[-1] = replace(
            turn,
            text=text,
            message=turn_message,
            finish_reason=sample.finish_reason,
            sampling=dict(sample.sampling) or turn.sampling,
            logprobs_kind=sample.logprobs_kind,
            stop_reason=sample.stop_reason,
            run_id=sample.run_id,
        )
        branch.failed = None
        limit = self.context_limit
        branch.full = sample.finish_reason == "length" and limit is not None and len(branch.ids) >= limit
        if sample.media is not None:
            branch.engine_media = sample.media

    def _piece(self, branch: Branch, sample: Sample, start: int) -> Span:
        """Return the tokens of a sample from `start` on as a span, after checking that it matches the other turns."""
        columns: dict[str, Any] = {"logprobs": sample.logprobs, "versions": sample.versions}
        ids = sample.response_ids[start:]
        earlier = [piece for turn in branch.turns for piece in turn.pieces if piece.ids]
        for name, values in columns.items():
            if ids and earlier and (values is None) != (getattr(earlier[0], name) is None):
                actual, expected = ("None", "some") if values is None else ("some", "None")
                raise ValueError(f"sample.{name}: got {actual}, expected {expected}, as in the turns before")
            columns[name] = tuple(values[start:]) if values is not None else None if ids else ()
        kinds = [turn.logprobs_kind for turn in branch.turns if turn.ids]
        if ids and kinds and columns["logprobs"] is not None and kinds[0] != sample.logprobs_kind:
            raise ValueError(
                f"sample.logprobs_kind: got {sample.logprobs_kind!r}, expected {kinds[0]!r}, as in the turns before"
            )
        experts = None if sample.routed_experts is None else sample.routed_experts[start:]
        return self._span("model", ids, experts=experts, **columns)

    def _span(self, kind: SpanKind, ids: Sequence[int], **more: Any) -> Span:
        span = Span(number=self.spans, kind=kind, ids=tuple(ids), **more)
        self.spans += 1
        return span

    # --- serialization ----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, without the engine, the tokenizer and `parse`."""
        names = ("text", "messages", "token_ids", "tools", "videos", "reference", "label", "info")
        prompt = {name: getattr(self.prompt, name) for name in names}
        return {
            "format": FORMAT,
            "prompt": {name: list(value) if isinstance(value, tuple) else value for name, value in prompt.items()},
            "eid": self.eid.to_dict(),
            "sampling": self.sampling.to_dict(),
            "context_limit": self.context_limit,
            "group_size": self.group_size,
            "policies": dict(self.policies),
            "template_options": None if self.renderer is None else dict(self.renderer.options),
            "template": _template(self.renderer),
            "turn_rewards": [[key, value] for key, value in self.turn_rewards.items()],
            "made_spans": self.spans,
            **branches_to_dict(self.branches),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], tokenizer: Tokenizer | None, parse: Parse | None) -> Tree:
        """Restore a tree from `to_dict`.

        Args:
            state: The plain values.
            tokenizer: Tokenizer or processor with the same chat template.
            parse: See `Episode`.

        Raises:
            ValueError: The format or the chat template differs.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"format: got {state.get('format')!r}, expected {FORMAT}")
        prompt = Prompt(**state["prompt"])
        renderer = make_renderer(tokenizer, prompt, state["template_options"])
        if _template(renderer) != state["template"]:
            raise ValueError(f"tokenizer: got chat template {_template(renderer)}, expected {state['template']}")
        return cls(
            renderer=renderer,
            prompt=prompt,
            eid=EID(**state["eid"]),
            sampling=Sampling(**state["sampling"]),
            context_limit=state["context_limit"],
            group_size=state["group_size"],
            policies=dict(state["policies"]),
            parse=parse,
            branches=branches_from_dict(state),
            turn_rewards=dict(state["turn_rewards"]),
            spans=state["made_spans"],
        )


def _template(renderer: Renderer | None) -> str | None:
    return template_fingerprint(renderer.tokenizer) if renderer is not None and renderer.chat else None


def make_renderer(tokenizer: Tokenizer | None, prompt: Prompt, options: Mapping[str, Any] | None) -> Renderer | None:
    """Return the renderer of a prompt.

    Args:
        tokenizer: Tokenizer or processor.
        prompt: The prompt.
        options: Options of the chat template.

    Returns:
        The renderer; `None` for token ids without a tokenizer.

    Raises:
        ValueError: The tokenizer, or its chat template, is missing.
    """
    if tokenizer is None:
        if prompt.token_ids is None:
            raise ValueError("tokenizer: missing, required for a prompt that is not token ids")
        return None
    return Renderer(tokenizer, chat=prompt.messages is not None, tools=prompt.tools, options=options)


def check_single(settings: Sampling) -> Sampling:
    """Check that options are for a single sample.

    Args:
        settings: The options.

    Returns:
        The options.

    Raises:
        ValueError: `n` is not 1.
    """
    if settings.n != 1:
        raise ValueError(f"sampling.n: got {settings.n}, expected 1; for several samples see Episode.group and branch")
    return settings


def _has_raw_ids(branch: Branch) -> bool:
    return any(observation.ids is not None and observation.message is None for observation in branch.pending)


def _spell_ids(ids: Sequence[int], special: bool = True) -> str:
    """Convert ids to a text without a tokenizer."""
    return " ".join(map(str, ids))
