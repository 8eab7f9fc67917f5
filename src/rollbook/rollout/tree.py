"""`Tree`: all that an episode's branches share, and the one place where a turn is appended to one of them.

Invariant: a turn is appended whole or not at all, after exactly the tokens that the model was given; what was kept
before it is never changed, and where the model was given something else, it is appended to a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollbook.core.fingerprints import template_fingerprint
from rollbook.core.ids import EID
from rollbook.core.sampling import Prompt, Sample, Sampling
from rollbook.rollout.branches import (
    Branch,
    Span,
    SpanKind,
    Turn,
    from_plain,
    messages_of,
    plain,
    row_id,
    without_types,
)
from rollbook.rollout.engine import derived
from rollbook.rollout.rendering import Drift, Renderer, compare

Policy = Literal["keep", "fork"]
Next = tuple[list[int], Drift | None]
"""The tokens that a turn comes after, and what rendering the conversation anew says of them."""
Parse = Callable[[str], Mapping[str, Any] | None]
FORMAT = 1
"""The version of what `Tree.to_dict` gives."""
_OBSERVE = "expected an observation before the next"
_OPAQUE = "token ids were put in without a message"


@dataclass(frozen=True)
class Asked:
    """What an engine is asked, and the state of the branch that its answer is for."""

    prompt: Prompt | Sample
    sampling: Sampling
    state: tuple[int, int, int]
    next: Next


@dataclass(kw_only=True)
class Tree:
    """An episode: what it is given, its branches, and the rewards of its turns by `Turn.key`."""

    renderer: Renderer | None
    prompt: Prompt
    eid: EID
    sampling: Sampling
    context_limit: int | None
    group_size: int | None
    policies: Mapping[str, Policy]
    """What to do about `realigned` and about `forked`."""
    parse: Parse | None
    branches: list[Branch] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    spans: int = 0
    """How many were made."""

    @property
    def chat(self) -> bool:
        """Whether the conversation is one of messages."""
        return self.renderer is not None and self.renderer.chat

    def id_of(self, branch: Branch) -> EID:
        """The id of a branch's record."""
        return row_id(self.eid, branch.number)

    def tail(self, branch: Branch, generation: bool) -> list[int]:
        """What is pending, as the tokens that come after those that are kept."""
        rendered = [one for one in branch.pending if one.ids is None]  # ids hold their images' placeholders
        return self._tail(branch, generation, [image for one in rendered for image in one.images])

    def _tail(self, branch: Branch, generation: bool, images: Sequence[Any]) -> list[int]:
        messages = [one.message for one in branch.pending if one.ids is None and one.message is not None]
        raw = [token for one in branch.pending for token in one.ids or ()]
        if not messages or self.renderer is None:
            return raw
        if not branch.turns:
            return self.renderer.prompt(messages, generation, images) + raw
        turn, context = branch.turns[-1], branch.messages
        rendered = self.renderer.after(context[:-1], context[-1], turn.ids, turn.ended, messages, generation, images)
        return rendered + raw

    def next(self, branch: Branch) -> Next:
        """What the next turn would come after."""
        renderer, conversation = self.renderer, messages_of(branch)
        try:
            kept = branch.ids + self.tail(branch, True)
        except ValueError:
            if renderer is None or not branch.turns or self.policies["forked"] != "fork":
                raise
            # What cannot be put after a turn can be where the whole conversation is rendered anew.
            anew = renderer.prompt(conversation, True, branch.images)
            return anew, Drift(outcome="forked", what="text", kept=len(branch.ids), rendered=len(anew), policy="fork")
        if not branch.turns or not branch.pending:
            return kept, None
        reason = branch.unchecked or (_OPAQUE if _opaque(branch) else "")
        if renderer is None or reason:
            return kept, Drift(outcome="unchecked", what=reason or "there is no tokenizer")
        try:
            before, now = renderer.text(branch.messages[:-1], True), renderer.text(conversation, True)
        except Exception as error:  # templates raise what they like
            return kept, Drift(outcome="unchecked", what=f"{type(error).__name__}: {error}")
        # Compared with the rendering before this turn, so that what was found earlier is not found again; and without
        # images on both sides, since a processor does the same to a placeholder wherever it stands.
        pictured = any(one.images for one in branch.pending)
        tail = self._tail(branch, True, ()) if pictured else kept[len(branch.ids) :]
        start, rendered = renderer.endings(before, now)
        found = compare([*start, *branch.turns[-1].ids, *tail], rendered, renderer.decode)
        policy = self.policies.get(found.outcome, "keep")
        if policy == "fork":
            kept = renderer.prompt(conversation, True, branch.images)
        return kept, replace(found, policy=policy)

    # --- asking an engine -------------------------------------------------------------------------------------------

    def ask(self, branch: Branch, following: Next, options: Mapping[str, Any]) -> Asked | Sample:
        """What to ask an engine for a turn after `following`; where the context is full, the sample that says so."""
        begun = branch.open
        if begun is None and branch.turns and not branch.pending:
            raise ValueError(f"act: the last turn ended ({branch.turns[-1].finish_reason}), {_OBSERVE}")
        known = {} if begun is None else begun.sampling
        known = {name: value for name, value in known.items() if name in Sampling.__dataclass_fields__}
        settings = of_one(Sampling.of(known or self.sampling, **options))
        tokens, done = following[0], () if begun is None else begun.ids
        prompt = self.prompt.replace(
            text=None,
            messages=None,
            tools=None,
            token_ids=tokens[: len(tokens) - len(done)],
            images=branch.images,
            eid=self.id_of(branch),
        )
        if self.context_limit is not None:
            room = self.context_limit - len(prompt.token_ids or ())
            if room <= len(done):
                return self._no_room(branch, prompt, settings)
            most = min(settings.max_tokens, room)
            settings = replace(settings, max_tokens=most, min_tokens=min(settings.min_tokens, most))
        if begun is not None:
            return Asked(self._unfinished(branch, begun, prompt), settings, branch.state, following)
        if settings.seed is not None:
            # A stream for each turn (and by their ids each branch): one for all would draw the same numbers in each.
            settings = replace(settings, seed=derived(settings.seed, len(branch.turns)))
        return Asked(prompt, settings, branch.state, following)

    def _no_room(self, branch: Branch, prompt: Prompt, settings: Sampling) -> Sample:
        if branch.open is not None:
            branch.turns[-1] = replace(branch.open, finish_reason="length")
        branch.full, branch.failed = True, None
        return Sample(
            prompt=prompt,
            eid=self.id_of(branch),
            prompt_ids=list(prompt.token_ids or ()),
            response_ids=[],
            finish_reason="length",
            sampling=settings.to_dict(),
        )

    def _unfinished(self, branch: Branch, turn: Turn, prompt: Prompt) -> Sample:
        """The sample that an engine goes on with."""
        return Sample(
            prompt=prompt,
            eid=self.id_of(branch),
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

    # --- appending its answer ---------------------------------------------------------------------------------------

    def append(self, branch: Branch, sample: Sample, asked: Next | None = None) -> Branch:
        """Append a turn; gives the branch that has it: this one, or a fork. `asked` is what `next` gave for it."""
        if sample.failed:
            branch.failed = sample.error
            branch.errors.append({"turn": len(branch.turns), "error": sample.error})
            return branch
        if branch.open is not None and self._go_on(branch, branch.open, sample):
            return branch
        given, kept = list(sample.prompt_ids), branch.ids
        ended = bool(branch.turns) and not branch.pending
        if ended and given in ([], kept):
            raise ValueError(f"sample: got a turn after one that ended ({branch.turns[-1].finish_reason}), {_OBSERVE}")
        tokens, drift = asked or self.next(branch)
        if given and given != tokens:
            # What the model was given is a fact. What came after the last turn was open until now; what came before
            # was not, and a turn that followed something else is in another branch.
            drift = None
            if given[: len(kept)] != kept:
                decode = _spelled if self.renderer is None else self.renderer.decode
                drift = replace(compare(tokens, given, decode, by="engine"), policy="fork")
            elif branch.turns:
                drift = Drift(outcome="clean", by="engine")
            branch.media = [without_types(media) for media in branch.media]
            tokens = given
        return self._append(branch, sample, tokens, drift, "an engine was given what was not observed" if ended else "")

    def _append(self, branch: Branch, sample: Sample, tokens: list[int], drift: Drift | None, unchecked: str) -> Branch:
        piece = self._piece(branch, sample, 0)  # refused before anything is changed
        unchecked = branch.unchecked or unchecked or (_OPAQUE if _opaque(branch) else "")
        if drift is not None and drift.policy == "fork":
            branch = self._fork(branch)
        branch.unchecked = unchecked
        before = self._span("observation" if branch.spans else "prompt", tokens[len(branch.ids) :])
        branch.messages = [*messages_of(branch), {}]  # the turn's own is put there when it is known
        branch.pending = []
        branch.turns.append(Turn(pieces=(piece,), text=None, message=None, finish_reason="abort", drift=drift))
        branch.spans += [before] if before.ids or before.kind == "prompt" else []
        branch.spans.append(piece)
        self._finish(branch, branch.turns[-1], sample)
        return branch

    def _fork(self, branch: Branch) -> Branch:
        """A branch that goes on with this one's conversation, rendered anew; this one is over."""
        fork = branch.copy(len(self.branches))
        fork.spans, fork.reward = [], branch.reward
        fork.media = [without_types(media) for media in fork.media]  # its tokens lie elsewhere
        now = len(branch.turns)
        fork.errors = [error for error in branch.errors if error["turn"] == now]
        branch.errors = [error for error in branch.errors if error["turn"] != now]
        branch.pending, branch.continued_as, branch.reward, branch.failed = [], fork.number, None, None
        self.branches.append(fork)
        return fork

    def _go_on(self, branch: Branch, turn: Turn, sample: Sample) -> bool:
        """Append the rest of an unfinished turn, if that is what the sample is."""
        done, kept = turn.ids, branch.ids
        ids, given = tuple(sample.response_ids), list(sample.prompt_ids)
        whole = ids[: len(done)] == done and given in ([], kept[: len(kept) - len(done)])
        if not whole and given not in ([], kept):
            return False
        piece = self._piece(branch, sample, len(done) if whole else 0)
        if piece.ids:
            branch.spans.append(piece)
            turn = replace(turn, pieces=(*turn.pieces, piece))
        self._finish(branch, turn, sample)
        return True

    def _finish(self, branch: Branch, turn: Turn, sample: Sample) -> None:
        """Put a turn, and its message, in the place of the last, which is its beginning."""
        text, ids, message = sample.text, turn.ids, sample.message
        exact = None
        if self.renderer is not None:
            text = self.renderer.content(branch.messages[:-1], ids, sample.finish_reason in ("stop", "tool_calls"))
            exact = text if self.chat else self.renderer.decode(ids)
        if self.parse is not None and text is not None and sample.finish_reason != "abort":
            try:
                message = self.parse(text)
                if message is not None and (not isinstance(message, Mapping) or "role" not in message):
                    raise ValueError(f"got {message!r}, expected a message with a role, or None")
            except Exception as error:  # what the model wrote may not parse; it wrote it all the same
                what = f"parse: {type(error).__name__}: {error}"
                branch.errors.append({"turn": len(branch.turns) - 1, "error": what})
                message = None
        spoken = dict(message) if message is not None else {"role": "assistant", "content": exact or ""}
        branch.messages[-1] = spoken
        branch.turns[-1] = replace(
            turn,
            text=text,
            message=spoken,
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
        """What a sample adds, from `start` on, once it is sure that it goes with the other turns."""
        given: dict[str, Any] = {"logprobs": sample.logprobs, "versions": sample.versions}
        ids = sample.response_ids[start:]
        earlier = [piece for turn in branch.turns for piece in turn.pieces if piece.ids]
        for name, values in given.items():
            if ids and earlier and (values is None) != (getattr(earlier[0], name) is None):
                got, expected = ("None", "some") if values is None else ("some", "None")
                raise ValueError(f"sample.{name}: got {got}, expected {expected}, as of the turns before")
            given[name] = tuple(values[start:]) if values is not None else None if ids else ()
        kinds = [turn.logprobs_kind for turn in branch.turns if turn.ids]
        if ids and kinds and given["logprobs"] is not None and kinds[0] != sample.logprobs_kind:
            raise ValueError(
                f"sample.logprobs_kind: got {sample.logprobs_kind!r}, expected {kinds[0]!r}, as of the turns before"
            )
        experts = None if sample.routed_experts is None else sample.routed_experts[start:]
        return self._span("model", ids, experts=experts, **given)

    def _span(self, kind: SpanKind, ids: Sequence[int], **more: Any) -> Span:
        made = Span(number=self.spans, kind=kind, ids=tuple(ids), **more)
        self.spans += 1
        return made

    # --- as plain values, and back ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All of it, but for the engine, the tokenizer and `parse`."""
        names = ("text", "messages", "token_ids", "tools", "videos", "reference", "label", "info")
        given = {name: getattr(self.prompt, name) for name in names}
        return {
            "format": FORMAT,
            "prompt": {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
            "eid": self.eid.to_dict(),
            "sampling": self.sampling.to_dict(),
            "context_limit": self.context_limit,
            "group_size": self.group_size,
            "policies": dict(self.policies),
            "template_options": None if self.renderer is None else dict(self.renderer.options),
            "template": _template(self.renderer),
            "turn_rewards": [[key, value] for key, value in self.turn_rewards.items()],
            "made_spans": self.spans,
            **plain(self.branches),
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], tokenizer: Any, parse: Parse | None) -> Tree:
        """The tree that `to_dict` was given; the tokenizer must have the same chat template."""
        if given.get("format") != FORMAT:
            raise ValueError(f"format: got {given.get('format')!r}, expected {FORMAT}")
        prompt = Prompt(**given["prompt"])
        renderer = renderer_for(tokenizer, prompt, given["template_options"])
        if _template(renderer) != given["template"]:
            raise ValueError(
                f"tokenizer: got one with the chat template {_template(renderer)}, expected {given['template']}"
            )
        return cls(
            renderer=renderer,
            prompt=prompt,
            eid=EID(**given["eid"]),
            sampling=Sampling(**given["sampling"]),
            context_limit=given["context_limit"],
            group_size=given["group_size"],
            policies=dict(given["policies"]),
            parse=parse,
            branches=from_plain(given),
            turn_rewards=dict(given["turn_rewards"]),
            spans=given["made_spans"],
        )


def _template(renderer: Renderer | None) -> str | None:
    return template_fingerprint(renderer.tokenizer) if renderer is not None and renderer.chat else None


def renderer_for(tokenizer: Any, prompt: Prompt, options: Mapping[str, Any] | None) -> Renderer | None:
    """What renders a prompt of this form; `None` where all is token ids."""
    if tokenizer is None:
        if prompt.token_ids is None:
            raise ValueError("tokenizer: got None, expected one for a prompt that is not token ids")
        return None
    return Renderer(tokenizer, chat=prompt.messages is not None, tools=prompt.tools, options=options)


def of_one(settings: Sampling) -> Sampling:
    """Options that ask for a single sample, else an error that says how to have several."""
    if settings.n != 1:
        raise ValueError(
            f"sampling.n: got {settings.n}, expected 1: Episode.group makes several episodes, branch() several branches"
        )
    return settings


def _opaque(branch: Branch) -> bool:
    return any(one.ids is not None and one.message is None for one in branch.pending)


def _spelled(ids: Sequence[int], special: bool = True) -> str:
    """Ids as a text, where there is no tokenizer: other ids are another text."""
    return " ".join(map(str, ids))
