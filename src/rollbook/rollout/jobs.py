"""A prompt under way at a server: what was sent, what has come in, and the samples that it makes.

Invariant: a sample is made of a server's ids, log-probs and reasons as they came, or not at all: what is missing, of
another length, or not a probability, is an error that says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollbook.core.sampling import FinishReason, LogprobsKind, Prompt, Sample
from rollbook.rollout.connection import BadReply, ServerError
from rollbook.rollout.dialects import Dialect, Piece, kind_of
from rollbook.rollout.engine import Request

REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
}
"""Servers' finish reasons; any other is an error."""


@dataclass(frozen=True)
class Opening:
    """How a prompt goes to the server: as `text`, `ids` or `messages`. `prompt_ids`: those that are known before;
    `made_here`: by our tokenizer, though messages are sent. `uncut`: why it could not be counted and cut before."""

    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    truncated_from: int | None = None
    made_here: bool = False
    uncut: str = ""


@dataclass(frozen=True)
class Terms:
    """What an engine's samples have in common: its server's dialect, and what its user said."""

    dialect: Dialect
    run_id: str
    tokenizer: Any
    retokenize: bool
    logprobs_kind: LogprobsKind | None
    clean: Callable[[str], str]


class Job:
    """A prompt and its samples. `parts` [k] are what came in of sample k, request by request; `owed`, the samples that
    were not given yet, each of which is given once."""

    def __init__(self, request: Request, terms: Terms, emit: Callable[[Any], Any], stream: bool) -> None:
        self.request = request
        self.terms = terms
        self.stream = stream
        self.opening = Opening()
        self.parts: list[list[Piece]] = [[] for _ in request.eids]
        seeded = request.sampling.seed is not None
        self.seeds: list[int | None] = [seed if seeded else None for seed in request.seeds]  # those that are sent
        self.owed = set(range(len(request.eids)))
        self.done = request.done
        self.retries = [0 for _ in request.eids]
        self._prompt_made = False
        self._said: str | None = None
        self._emit = emit
        self._start = time.monotonic()

    def tried_again(self, ks: Iterable[int] | None = None) -> None:
        """Count a further try, on behalf of samples `ks`, or of all."""
        for k in range(len(self.retries)) if ks is None else ks:
            self.retries[k] += 1

    def finish(self, k: int, aborted: bool = False) -> None:
        """Give sample k as far as it came, or say what is wrong with it."""
        try:
            self._give(k, self._sample(k, aborted))
        except (ServerError, ValueError) as error:
            self.fail(error, [k])

    def fail(self, error: BaseException, ks: Iterable[int]) -> None:
        """Give samples that have no response, and why."""
        text = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
        known: dict[str, Any] = {}
        if self.request.started is None and self.opening.prompt_ids is not None:
            known["prompt_ids"] = self.opening.prompt_ids
        for k in ks:
            known |= {"metrics": self._metrics(k), "sampling": self._options(k)}
            self._give(k, self.request.failed(k, self.terms.clean(text), self.terms.run_id, **known))

    def _give(self, k: int, sample: Sample) -> None:
        if k in self.owed:
            self.owed.remove(k)
            self._emit((self.request.position + k, sample))

    def _metrics(self, k: int) -> dict[str, float]:
        return {"retries": float(self.retries[k]), "seconds": time.monotonic() - self._start}

    def _options(self, k: int) -> dict[str, Any]:
        """How sample k was sampled, by the seed that was sent, or none, rather than by that of its stream."""
        sent: Any = tuple(self.seeds)
        return replace(self.request, seeds=sent).options(k)

    # --- ids ----------------------------------------------------------------------------------------------------------

    def prompt_ids(self) -> list[int]:
        """The prompt's ids: the server's word, which must not contradict what it was sent."""
        opening, firsts = self.opening, [parts[0] for parts in self.parts if parts]
        said = next((piece.prompt_ids for piece in firsts if piece.prompt_ids is not None), None)
        counted = next((piece.prompt_count for piece in firsts if piece.prompt_count is not None), None)
        if opening.ids is not None and opening.prompt_ids is not None:
            if said is not None and said != opening.ids:
                raise BadReply(
                    f"prompt_token_ids: got {len(said)}, other ids than the {len(opening.ids)} that were sent"
                )
            return opening.prompt_ids
        if said is not None:
            return said
        if opening.prompt_ids is not None:
            if counted is not None and counted != len(opening.prompt_ids):
                whose = "the tokenizer's" if opening.made_here else "the server's"
                raise BadReply(f"prompt_tokens: got {counted}, but {whose} template has {len(opening.prompt_ids)}")
            self._prompt_made = opening.made_here
            return opening.prompt_ids
        if self.terms.retokenize:
            self._prompt_made = True
            return rendered(self.terms, self.request.prompt)
        raise BadReply(self._no_ids("prompt's token ids"))

    def ids(self, piece: Piece) -> list[int]:
        """A piece's ids, made from its texts only where that is allowed and needed."""
        if piece.ids is None:
            if not self.terms.retokenize:
                raise BadReply(self._no_ids("token ids of the response"))
            piece.retokenized = True
            piece.ids = self._encoded(piece.text)
            if piece.tokens:
                piece.ids = [one for token in piece.tokens for one in self._encoded(token)]
                told = [self.terms.tokenizer.decode([one]) for one in piece.ids]
                if told != piece.tokens:
                    odd = next((i for i, one in enumerate(told) if piece.tokens[i] != one), len(told))
                    raise BadReply(f"tokens[{odd}]: got {piece.tokens[odd]!r}, expected one token of the tokenizer")
        return piece.ids

    def _encoded(self, text: str) -> list[int]:
        return list(self.terms.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _no_ids(self, what: str) -> str:
        dialect, given = self.terms.dialect, "" if self.terms.tokenizer is not None else "a tokenizer and "
        return (
            f"{dialect.name} did not give the {what}: {dialect.ids_from}; or give the engine {given}retokenize=True, "
            "which makes them from texts"
        )

    # --- samples ---------------------------------------------------------------------------------------------------

    def _sample(self, k: int, aborted: bool) -> Sample:
        """Sample k from what came in."""
        request, how, before = self.request, self.request.sampling, self.request.started
        pieces = [piece for piece in self.parts[k] if not aborted or piece.ids is not None]
        ids = list(before.response_ids) if before is not None else []
        logprobs = list((before.logprobs if before is not None else None) or ())
        versions = list((before.versions if before is not None else None) or ())
        for piece in pieces:
            new = self.ids(piece)
            if how.logprobs is not None:
                if piece.logprobs is None and new:
                    name, hint = self.terms.dialect.name, self.terms.dialect.logprobs_from
                    raise BadReply(f"{name} did not give the log-probs (logprobs=None asks for none): {hint}")
                if len(piece.logprobs or ()) != len(new):
                    raise BadReply(f"logprobs: got {len(piece.logprobs or ())}, expected {len(new)}, one for each id")
                logprobs += piece.logprobs or ()
            barred = next((one for one in new if one in how.suppress), None)
            if barred is not None:
                raise BadReply(f"suppress: the server sampled {barred}, which it was told not to")
            ids += new
            versions += piece.versions()
        last = pieces[-1] if pieces else Piece()
        reason: FinishReason = "abort"
        if last.finish is not None or not aborted:
            if last.finish not in REASONS:
                raise BadReply(f"finish_reason: got {last.finish!r}, expected one of {', '.join(REASONS)}")
            reason = REASONS[last.finish]
        if reason == "stop" and (last.message or {}).get("tool_calls"):
            reason = "tool_calls"  # of a call that was asked for by name servers say "stop"
        if reason == "length" and request.pauses and len(ids) - self.done >= request.budget:
            reason = "abort"
        if before is not None:
            prompt_ids = list(before.prompt_ids) if before.prompt_ids else self.prompt_ids() if pieces else []
        else:
            prompt_ids = self.prompt_ids() if pieces else self.opening.prompt_ids or []
        most = how.max_prompt_tokens
        if most is not None and before is None and len(prompt_ids) > most:  # of one with images it is known only now
            raise ValueError(
                f"prompt: got {len(prompt_ids)} tokens, expected at most max_prompt_tokens ({most}){self.opening.uncut}"
            )
        text = self._text(k, ids)
        info: dict[str, Any] = dict(before.info) if before is not None else {}
        if self._prompt_made or any(piece.retokenized for piece in pieces):
            info["retokenized"] = True
        if self.opening.truncated_from is not None:
            info["prompt_truncated_from"] = self.opening.truncated_from
        message = None
        if last.message is not None and len(pieces) == 1 and not self.done:
            message = {key: value for key, value in last.message.items() if key == "content" or value is not None}
        if message is None and request.prompt.messages is not None:
            message = {"role": "assistant", "content": text}
        known = len(logprobs) == len(ids) and how.logprobs is not None
        kind = kind_of(self.terms.logprobs_kind or self.terms.dialect.kind, how, self.terms.dialect.constrained(how))
        if known and before is not None and before.logprobs and before.logprobs_kind != kind:
            raise ValueError(f"logprobs: the sample began with {before.logprobs_kind!r} ones, and these are {kind!r}")
        return Sample(
            prompt=request.prompt,
            eid=request.eids[k],
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=logprobs if known else None,
            logprobs_kind=kind if known else None,
            finish_reason=reason,
            stop_reason=last.stop if last.stop in (*how.stop, *how.stop_token_ids) else None,
            versions=versions if len(versions) == len(ids) else None,
            text=text,
            prompt_text=self._prompt_text(prompt_ids),
            sampling=self._options(k),
            run_id=self.terms.run_id,
            group_size=before.group_size if before is not None else how.n,
            message=message if reason != "abort" else None,
            metrics=self._metrics(k),
            info=info,
        )

    def _prompt_text(self, prompt_ids: Sequence[int]) -> str | None:
        """A chat's text, where it can be told; the same for all samples, and so told once."""
        if self.request.started is not None:
            return self.request.started.prompt_text
        if self._said is None and self.request.prompt.messages is not None and self.terms.tokenizer is not None:
            self._said = str(self.terms.tokenizer.decode(list(prompt_ids)))
        return self._said

    def _text(self, k: int, ids: list[int]) -> str:
        """The response's text: the server's, whose parts a tokenizer joins where a character may lie across them."""
        pieces, before = self.parts[k], self.request.started
        if self.terms.tokenizer is not None and (len(pieces) > 1 or self.done):
            return str(self.terms.tokenizer.decode(ids, skip_special_tokens=True))
        text = "".join([(before.text or "") if before is not None else "", *(piece.text for piece in pieces)])
        stop = pieces[-1].stop if pieces else None
        trimmed = self.terms.dialect.trims_stop and self.request.sampling.include_stop
        return text + stop if trimmed and isinstance(stop, str) else text


def rendered(terms: Terms, prompt: Prompt) -> list[int]:
    """A text's or a chat's ids by the tokenizer here."""
    if terms.tokenizer is None:
        raise ValueError(f"tokenizer: got None, expected one: {terms.dialect.name} does not say which ids a prompt has")
    text = prompt.text
    if prompt.messages is not None:
        text = terms.tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            add_generation_prompt=True,
            tokenize=False,
        )
    return list(terms.tokenizer(text, add_special_tokens=False)["input_ids"])
