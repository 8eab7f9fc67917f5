"""`OpenAIEngine`: rollouts from vLLM, SGLang, llama.cpp, `transformers serve` and other OpenAI-compatible servers.

Invariant: the ids and log-probs of a sample are those that the server returned. They are made from text only if the
caller allows it, and the sample records that. A missing, misaligned or invalid field is an error of that sample.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from rollbook.core.checks import check_bool, check_choice, check_float
from rollbook.core.sampling import KINDS, FinishReason, LogprobsKind, Prompt, RunInfo, Sample
from rollbook.core.vocabulary import Tokenizer, template_fingerprint, tokenizer_fingerprint
from rollbook.rollout.chat import chat_messages, has_media
from rollbook.rollout.engine import BaseEngine, Cancel, Request, derive_seed
from rollbook.rollout.llama_cpp import LlamaCppApi
from rollbook.rollout.server import (
    RETRY_STATUSES,
    Backoff,
    BadReplyError,
    Connection,
    LoopThread,
    PartialSample,
    RetryableError,
    ServerApi,
    ServerError,
    ServerRequest,
    TransformersServeApi,
    VllmApi,
    parse_json,
    read_events,
    resolve_logprobs_kind,
)
from rollbook.rollout.sglang import SglangApi

__all__ = ["OpenAIEngine"]

T = TypeVar("T")
SERVER_APIS: dict[str, ServerApi] = {
    api.name: api for api in (ServerApi(), VllmApi(), TransformersServeApi(), SglangApi(), LlamaCppApi())
}
"""APIs by the name of the server, for `OpenAIEngine(server=...)`."""
Emit = Callable[[tuple[int, Sample]], None]
"""Called with the index of a sample in the call, and the sample."""


@dataclass(frozen=True)
class ServerInfo:
    """API, model and version of a server."""

    api: ServerApi
    model: str
    version: str


async def detect_server(
    connection: Connection, kind: str, model: str | None, on_retry: Callable[[], None]
) -> ServerInfo:
    """Detect the kind of a server by the endpoints that only this kind has.

    Args:
        connection: The server.
        kind: Kind of the server, a key of `SERVER_APIS`, or `auto` to detect it.
        model: Name of the model; by default the first that the server lists.
        on_retry: Called before each retry.

    Returns:
        The API, the model and the version.

    Raises:
        ServerError: The server cannot be reached, or lists no model.
    """

    async def get_object(path: str) -> dict[str, Any]:
        try:
            reply = await connection.json(path, once=True)
        except ServerError:
            return {}
        return reply if isinstance(reply, dict) else {}

    try:
        listed = await connection.json("/v1/models", on_retry=on_retry)
    except ServerError as error:
        # Some servers cannot list their models. But a server that cannot be reached must not be taken for a plain one.
        is_unreachable = not isinstance(error, BadReplyError) and error.status in (None, *RETRY_STATUSES - {500})
        if model is None or is_unreachable:
            raise
        listed = {}
    entries = listed.get("data") if isinstance(listed, dict) else None
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    model = model or first.get("id")
    if not isinstance(model, str):
        raise BadReplyError("/v1/models: no model; set model=")
    owner, version = first.get("owned_by"), "unknown"
    probes = {  # a path, a key of its reply, and the owner in /v1/models
        "vllm": ("/version", "version", "vllm"),
        "sglang": ("/get_server_info", "version", "sglang"),
        "llama.cpp": ("/props", "build_info", "llamacpp"),
    }
    # The kind that /v1/models names comes first.
    for candidate, (path, key, its_owner) in sorted(probes.items(), key=lambda probe: probe[1][2] != owner):
        if kind in ("auto", candidate):
            reply = await get_object(path)
            if isinstance(reply.get(key), str):
                kind, version = candidate, reply[key]
            elif its_owner == owner:
                kind = candidate
    if kind == "auto":
        paths = (await get_object("/openapi.json")).get("paths") or {}
        kind = "transformers-serve" if "/load_model" in paths else "openai"
    return ServerInfo(SERVER_APIS[kind], model, version)


FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
}
"""Finish reasons of servers; any other is an error."""


@dataclass(frozen=True)
class PromptForm:
    """The form in which a prompt is sent: `text`, `ids` or `messages`."""

    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    """Prompt ids that are known before the reply."""
    truncated_from: int | None = None
    """Number of ids before truncation, if the prompt was truncated."""
    is_local_rendering: bool = False
    """Whether the ids are from the tokenizer here although messages are sent."""
    uncounted_reason: str = ""
    """Why the prompt could not be counted and truncated, for an error."""
    media: Mapping[str, Any] | None = None
    """Processed media, for the record."""
    media_data: Mapping[str, list[Any]] | None = None
    """Images and videos, for an engine in this process."""


@dataclass(frozen=True)
class EngineContext:
    """Settings that all samples of an engine share."""

    api: ServerApi
    run_id: str
    tokenizer: Any
    retokenize: bool
    logprobs_kind: LogprobsKind | None
    redact: Callable[[str], str]


class PromptJob:
    """A prompt and its samples. Each sample is emitted once.

    Args:
        request: The prompt, its options and the ids of its samples.
        context: Settings of the engine.
        emit: Called with each sample.
        stream: Whether replies are streamed.
    """

    def __init__(self, request: Request, context: EngineContext, emit: Emit, stream: bool) -> None:
        self.request = request
        self.context = context
        self.stream = stream
        self.form = PromptForm()
        self.pieces: list[list[PartialSample]] = [[] for _ in request.eids]
        """What arrived of each sample, by request."""
        is_seeded = request.sampling.seed is not None
        self.seeds: list[int | None] = [seed if is_seeded else None for seed in request.seeds]
        """Seeds of the samples, as they are sent."""
        self.pending = set(range(len(request.eids)))
        """Indices of the samples that were not emitted yet."""
        self.done = request.done
        """Number of response tokens before this call."""
        self.retries = [0 for _ in request.eids]
        self._is_prompt_retokenized = False
        self._decoded_prompt: str | None = None
        self._emit = emit
        self._start = time.monotonic()

    def count_retry(self, ks: Iterable[int] | None = None) -> None:
        """Count a retry.

        Args:
            ks: Indices of the samples that are requested again; all by default.
        """
        for k in range(len(self.retries)) if ks is None else ks:
            self.retries[k] += 1

    def finish(self, k: int, aborted: bool = False) -> None:
        """Emit a sample as far as it arrived, or as failed.

        Args:
            k: Index of the sample.
            aborted: Whether the call was canceled.
        """
        try:
            self._emit_sample(k, self._sample(k, aborted))
        except (ServerError, ValueError) as error:
            self.fail(error, [k])

    def fail(self, error: BaseException, ks: Iterable[int]) -> None:
        """Emit samples as failed.

        Args:
            error: The error.
            ks: Indices of the samples.
        """
        text = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
        fields: dict[str, Any] = {}
        if self.request.started is None and self.form.prompt_ids is not None:
            fields["prompt_ids"] = self.form.prompt_ids
        for k in ks:
            fields |= {"metrics": self._metrics(k), "sampling": self._options(k)}
            self._emit_sample(k, self.request.failed(k, self.context.redact(text), self.context.run_id, **fields))

    def _emit_sample(self, k: int, sample: Sample) -> None:
        if k in self.pending:
            self.pending.remove(k)
            self._emit((self.request.position + k, sample))

    def _metrics(self, k: int) -> dict[str, float]:
        return {"retries": float(self.retries[k]), "seconds": time.monotonic() - self._start}

    def _options(self, k: int) -> dict[str, Any]:
        """Return the sampling options of sample k, with the seed that was sent."""
        sent: Any = tuple(self.seeds)
        return replace(self.request, seeds=sent).options(k)

    # --- ids ----------------------------------------------------------------------------------------------------------

    def prompt_ids(self) -> list[int]:
        """Return the prompt ids: those of the server, which must match what was sent.

        Returns:
            [n] Token ids.

        Raises:
            BadReplyError: The ids or their number differ from what was sent, or the server returned none.
        """
        form, first_pieces = self.form, [pieces[0] for pieces in self.pieces if pieces]
        reported = next((piece.prompt_ids for piece in first_pieces if piece.prompt_ids is not None), None)
        counted = next((piece.prompt_count for piece in first_pieces if piece.prompt_count is not None), None)
        if form.ids is not None and form.prompt_ids is not None:
            if reported is not None and reported != form.ids:
                raise BadReplyError(
                    f"prompt_token_ids: got {len(reported)} ids that differ from the {len(form.ids)} that were sent"
                )
            return form.prompt_ids
        if reported is not None:
            return reported
        if form.prompt_ids is not None:
            if counted is not None and counted != len(form.prompt_ids):
                renderer = "the tokenizer" if form.is_local_rendering else "the server"
                raise BadReplyError(
                    f"prompt_tokens: got {counted}, expected {len(form.prompt_ids)}, as {renderer}'s template renders"
                )
            self._is_prompt_retokenized = form.is_local_rendering
            return form.prompt_ids
        if self.context.retokenize:
            self._is_prompt_retokenized = True
            return render_prompt(self.context, self.request.prompt)
        raise BadReplyError(self._no_ids("prompt's token ids"))

    def ids(self, piece: PartialSample) -> list[int]:
        """Return the ids of a piece; its text is tokenized if the server returned none and `retokenize` allows it.

        Args:
            piece: The piece.

        Returns:
            [R] Token ids.

        Raises:
            BadReplyError: The server returned no ids, or its tokens are not those of the tokenizer.
        """
        if piece.ids is None:
            if not self.context.retokenize:
                raise BadReplyError(self._no_ids("token ids of the response"))
            piece.retokenized = True
            piece.ids = self._encoded(piece.text)
            if piece.tokens:
                piece.ids = [encoded for token in piece.tokens for encoded in self._encoded(token)]
                texts = [self.context.tokenizer.decode([token]) for token in piece.ids]
                if texts != piece.tokens:
                    i = next((i for i, text in enumerate(texts) if piece.tokens[i] != text), len(texts))
                    raise BadReplyError(f"tokens[{i}]: got {piece.tokens[i]!r}, expected one token of the tokenizer")
        return piece.ids

    def _encoded(self, text: str) -> list[int]:
        return list(self.context.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _no_ids(self, missing: str) -> str:
        api, tokenizer = self.context.api, "" if self.context.tokenizer is not None else "a tokenizer and "
        return (
            f"{api.name} did not return the {missing}: {api.ids_hint}; or give the engine {tokenizer}"
            "retokenize=True, which tokenizes texts"
        )

    # --- samples ---------------------------------------------------------------------------------------------------

    def _sample(self, k: int, aborted: bool) -> Sample:
        """Return sample k, joined from its pieces."""
        request, sampling, started = self.request, self.request.sampling, self.request.started
        pieces = [piece for piece in self.pieces[k] if not aborted or piece.ids is not None]
        ids, logprobs, versions = self._join_tokens(pieces)
        last = pieces[-1] if pieces else PartialSample()
        reason = self._finish_reason(last, len(ids), aborted)
        prompt_ids = self._sampled_prompt_ids(pieces)
        text = self._text(k, ids)
        info: dict[str, Any] = dict(started.info) if started is not None else {}
        if self._is_prompt_retokenized or any(piece.retokenized for piece in pieces):
            info["retokenized"] = True
        if self.form.truncated_from is not None:
            info["prompt_truncated_from"] = self.form.truncated_from
        has_logprobs = len(logprobs) == len(ids) and sampling.logprobs is not None
        kind = resolve_logprobs_kind(
            self.context.logprobs_kind or self.context.api.logprobs_kind,
            sampling,
            self.context.api.has_grammar(sampling),
        )
        if has_logprobs and started is not None and started.logprobs and started.logprobs_kind != kind:
            raise ValueError(f"logprobs: got {kind!r}, expected {started.logprobs_kind!r}, which the sample has so far")
        return Sample(
            prompt=request.prompt,
            eid=request.eids[k],
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=logprobs if has_logprobs else None,
            logprobs_kind=kind if has_logprobs else None,
            finish_reason=reason,
            stop_reason=last.stop if last.stop in (*sampling.stop, *sampling.stop_token_ids) else None,
            versions=versions if len(versions) == len(ids) else None,
            text=text,
            prompt_text=self._prompt_text(prompt_ids),
            sampling=self._options(k),
            run_id=self.context.run_id,
            group_size=started.group_size if started is not None else sampling.n,
            message=self._message(pieces, text) if reason != "abort" else None,
            media=self.form.media,
            metrics=self._metrics(k),
            info=info,
        )

    def _join_tokens(self, pieces: Sequence[PartialSample]) -> tuple[list[int], list[float], list[int]]:
        """Return the ids, log-probs and versions of a response: those of the continued sample, then of the pieces."""
        sampling, started = self.request.sampling, self.request.started
        ids = list(started.response_ids) if started is not None else []
        logprobs = list((started.logprobs if started is not None else None) or ())
        versions = list((started.versions if started is not None else None) or ())
        for piece in pieces:
            new_ids = self.ids(piece)
            if sampling.logprobs is not None:
                if piece.logprobs is None and new_ids:
                    name, hint = self.context.api.name, self.context.api.logprobs_hint
                    raise BadReplyError(f"{name} did not return the log-probs (logprobs=None requests none): {hint}")
                if len(piece.logprobs or ()) != len(new_ids):
                    raise BadReplyError(
                        f"logprobs: got {len(piece.logprobs or ())}, expected {len(new_ids)}, one for each id"
                    )
                logprobs += piece.logprobs or ()
            suppressed = next((token for token in new_ids if token in sampling.suppress), None)
            if suppressed is not None:
                raise BadReplyError(f"suppress: the server sampled the suppressed token {suppressed}")
            ids += new_ids
            versions += piece.versions()
        return ids, logprobs, versions

    def _finish_reason(self, last: PartialSample, length: int, aborted: bool) -> FinishReason:
        """Return why a response of this length ended, by its last piece."""
        reason: FinishReason = "abort"
        if last.finish is not None or not aborted:
            if last.finish not in FINISH_REASONS:
                raise BadReplyError(f"finish_reason: got {last.finish!r}, expected one of {', '.join(FINISH_REASONS)}")
            reason = FINISH_REASONS[last.finish]
        if reason == "stop" and (last.message or {}).get("tool_calls"):
            return "tool_calls"  # servers return "stop" for a call that was required by name
        if reason == "length" and self.request.pauses and length - self.done >= self.request.budget:
            return "abort"
        return reason

    def _sampled_prompt_ids(self, pieces: Sequence[PartialSample]) -> list[int]:
        """Return the ids of the prompt that the response was sampled from."""
        started, limit = self.request.started, self.request.sampling.max_prompt_tokens
        if started is not None and started.prompt_ids:
            return list(started.prompt_ids)
        prompt_ids = self.prompt_ids() if pieces else []
        if started is not None:
            return prompt_ids
        if not pieces:
            prompt_ids = self.form.prompt_ids or []
        if limit is not None and len(prompt_ids) > limit:  # known only now for images
            raise ValueError(
                f"prompt: got {len(prompt_ids)} tokens, expected at most max_prompt_tokens ({limit})"
                f"{self.form.uncounted_reason}"
            )
        return prompt_ids

    def _message(self, pieces: Sequence[PartialSample], text: str) -> dict[str, Any] | None:
        """Return the message of a chat: the server's if it is the complete response, else one with the text."""
        message = pieces[-1].message if len(pieces) == 1 and not self.done else None
        if message is not None:
            return {key: value for key, value in message.items() if key == "content" or value is not None}
        return None if self.request.prompt.messages is None else {"role": "assistant", "content": text}

    def _prompt_text(self, prompt_ids: Sequence[int]) -> str | None:
        """Return the text of a chat, decoded once for all samples, if there is a tokenizer."""
        if self.request.started is not None:
            return self.request.started.prompt_text
        if (
            self._decoded_prompt is None
            and self.request.prompt.messages is not None
            and self.context.tokenizer is not None
        ):
            self._decoded_prompt = str(self.context.tokenizer.decode(list(prompt_ids)))
        return self._decoded_prompt

    def _text(self, k: int, ids: list[int]) -> str:
        """Return the text of the server; a tokenizer decodes several pieces, which may split a character."""
        pieces, started = self.pieces[k], self.request.started
        if self.context.tokenizer is not None and (len(pieces) > 1 or self.done):
            return str(self.context.tokenizer.decode(ids, skip_special_tokens=True))
        text = "".join([(started.text or "") if started is not None else "", *(piece.text for piece in pieces)])
        stop = pieces[-1].stop if pieces else None
        is_trimmed = self.context.api.trims_stop and self.request.sampling.include_stop
        return text + stop if is_trimmed and isinstance(stop, str) else text


def render_prompt(context: EngineContext, prompt: Prompt) -> list[int]:
    """Tokenize a text or a chat with the engine's tokenizer.

    Args:
        context: Settings of the engine.
        prompt: The prompt.

    Returns:
        [n] Token ids, without special tokens added to a text.

    Raises:
        ValueError: There is no tokenizer.
    """
    if context.tokenizer is None:
        raise ValueError(f"tokenizer: missing, and {context.api.name} does not return the ids of a prompt")
    text = prompt.text
    if prompt.messages is not None:
        text = context.tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            add_generation_prompt=True,
            tokenize=False,
        )
    return list(context.tokenizer(text, add_special_tokens=False)["input_ids"])


CANCEL_GRACE = 0.1
"""Seconds between a cancel and the end of connections, to receive tokens that were already sampled."""


Start = Callable[[Emit], Sequence[concurrent.futures.Future[None]]]
"""Starts calls that emit samples."""


def collect(start: Start) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of calls until all calls have ended. Closing the generator cancels them.

    Args:
        start: Starts the calls.
    """
    ready: queue.SimpleQueue[tuple[int, Sample] | None] = queue.SimpleQueue()
    calls = start(ready.put)
    for call in calls:
        call.add_done_callback(lambda _: ready.put(None))  # also if the call was closed before it started
    running = len(calls)
    try:
        while running:
            entry = ready.get()
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for call in calls:
            call.cancel()


async def acollect(start: Start) -> AsyncGenerator[tuple[int, Sample], None]:
    """Do the same as `collect` in an event loop.

    Args:
        start: Starts the calls.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[tuple[int, Sample] | None] = asyncio.Queue()

    def emit(entry: tuple[int, Sample] | None) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            loop.call_soon_threadsafe(ready.put_nowait, entry)

    calls = start(emit)
    for call in calls:
        call.add_done_callback(lambda _: emit(None))
    running = len(calls)
    try:
        while running:
            entry = await ready.get()
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for call in calls:
            call.cancel()


class JobEngine(BaseEngine, ABC):
    """Base class of engines that run each prompt as a job in an event loop, with the API of a server.

    A subclass defines `_get_server`, `_exchange` and `_tokenize`.

    Args:
        loop: The event loop.
        model: Name of the model; `None` if it is not known yet.
        tokenizer: Tokenizer for `render="local"`, `retokenize` and `max_prompt_tokens`.
        version: Number of the policy.
        render: Whether the `server` renders and tokenizes prompts or the tokenizer here (`local`).
        logprobs_kind: Kind of the log-probs, if it is not the default of the server.
        retokenize: Tokenize the text if the server returns no ids.
        allow_urls: Send image URLs for the server to fetch.
    """

    def __init__(
        self,
        loop: LoopThread,
        model: str | None,
        tokenizer: Tokenizer | None,
        *,
        version: int = 0,
        render: Literal["server", "local"] = "server",
        logprobs_kind: LogprobsKind | None = None,
        retokenize: bool = False,
        allow_urls: bool = False,
    ) -> None:
        check_choice("render", render, ("server", "local"))
        check_choice("logprobs_kind", logprobs_kind, (*KINDS, None))
        self.model = model
        self.tokenizer: Any = tokenizer
        self.version = version
        self.render = render
        self.logprobs_kind = logprobs_kind
        self.retokenize = check_bool("retokenize", retokenize)
        self.allow_urls = check_bool("allow_urls", allow_urls)
        for name, needed in (("render='local'", render == "local"), ("retokenize=True", self.retokenize)):
            if needed and tokenizer is None:
                raise ValueError(f"tokenizer: missing, and {name} needs it")
        self._loop = loop
        self._fingerprints = (tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer))
        self._server_info: ServerInfo | None = None
        self._tokenize_error: ServerError | None = None  # set if the server has no /tokenize

    @abstractmethod
    async def _get_server(self, on_retry: Callable[[], None] = lambda: None) -> ServerInfo:
        """Return the API, model and version of the server; `on_retry` is called before each retry."""

    @abstractmethod
    async def _exchange(
        self, server: ServerInfo, job: PromptJob, ks: list[int], request: ServerRequest, finished: Callable[[int], None]
    ) -> None:
        """Run a request for samples `ks`: add a piece to each, and call `finished` once for each."""

    @abstractmethod
    async def _tokenize(self, server: ServerInfo, job: PromptJob) -> list[int] | None:
        """Return the ids of a text or a chat by the server; `None` if it cannot tokenize and needs no ids."""

    def _redact(self, text: str) -> str:
        """Remove secrets from an error message."""
        return text

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the event loop, from any thread.

        Args:
            work: The coroutine.

        Returns:
            Its future.
        """
        return self._loop.submit(work)

    @property
    def run(self) -> RunInfo:
        """Description of the server; one that cannot be reached has version `unknown`."""
        if self._server_info is None:
            with suppress(ServerError):
                self._loop.submit(self._get_server()).result()
        return self._info()

    def _info(self) -> RunInfo:
        server = self._server_info
        if server is None:
            return RunInfo(
                engine="openai",
                engine_version="unknown",
                model=self.model or "unknown",
                tokenizer=self._fingerprints[0],
                limitations=("the server was not reached",),
            )
        return RunInfo(
            engine=server.api.name,
            engine_version=server.version,
            model=server.model,
            tokenizer=self._fingerprints[0],
            chat_template=self._fingerprints[1],
            limitations=server.api.limitations,
        )

    def close(self) -> None:
        """Cancel running requests, release the resources and end the thread."""
        self._loop.close()

    # --- a call -------------------------------------------------------------------------------------------------------

    def start(self, requests: Sequence[Request], cancel: Cancel, emit: Emit) -> concurrent.futures.Future[None]:
        """Start all requests in the loop.

        Args:
            requests: The requests.
            cancel: Stops the call.
            emit: Called with each sample as it finishes.

        Returns:
            The call, which is done when all samples are emitted.
        """
        return self.submit(self._call(requests, cancel, emit))

    def _run(self, requests: Sequence[Request], cancel: Cancel) -> Iterator[tuple[int, Sample]]:
        return collect(lambda emit: [self.start(requests, cancel, emit)])

    def _arun(self, requests: Sequence[Request], cancel: Cancel) -> AsyncGenerator[tuple[int, Sample], None]:
        return acollect(lambda emit: [self.start(requests, cancel, emit)])

    async def _call(self, requests: Sequence[Request], cancel: Cancel, emit: Emit) -> None:
        jobs = [PromptJob(request, self._context(), emit, cancel.shared) for request in requests]

        def count_retry() -> None:
            for job in jobs:
                job.count_retry()

        server = asyncio.ensure_future(self._get_server(count_retry))  # once for all jobs
        tasks = [asyncio.ensure_future(self._run_job(job, server)) for job in jobs]
        watch = asyncio.ensure_future(_watch_cancel(cancel, tasks))
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await _cancel_all([*tasks, watch, server])

    def _context(self) -> EngineContext:
        api = self._server_info.api if self._server_info is not None else ServerApi()
        run_id = self._info().id
        return EngineContext(api, run_id, self.tokenizer, self.retokenize, self.logprobs_kind, self._redact)

    async def _run_job(self, job: PromptJob, server_future: asyncio.Future[ServerInfo]) -> None:
        """Run all samples of a prompt; failures are emitted."""
        try:
            server = await asyncio.shield(server_future)
            job.context = self._context()
            await self._sample_all(server, job)
        except asyncio.CancelledError:
            for k in sorted(job.pending):
                job.finish(k, aborted=True)
            raise
        except Exception as error:  # including unexpected forms of replies
            job.fail(error, sorted(job.pending))

    async def _sample_all(self, server: ServerInfo, job: PromptJob) -> None:
        request, api, sampling = job.request, server.api, job.request.sampling
        api.check_options(sampling)
        count = len(request.eids)
        is_shared = api.shares_request(sampling) and count > 1
        if sampling.seed is not None:
            base = min(request.seeds[0], api.largest_seed - count)
            seeds = [seed % (api.largest_seed + 1) for seed in request.seeds]
            job.seeds = [api.sample_seed(base, k) for k in range(count)] if is_shared else list(seeds)
        job.form = await self._prompt_form(server, job)
        has_first_temperature = sampling.first_temperature is not None and not job.done
        sample = self._sample_in_two_steps if has_first_temperature else self._sample_at_once
        index_groups = [list(range(count))] if is_shared else [[k] for k in range(count)]
        await _gather(_run_guarded(job, ks, partial(sample, server, job, ks)) for ks in index_groups)

    async def _sample_at_once(self, server: ServerInfo, job: PromptJob, ks: list[int]) -> None:
        sampling = job.request.sampling
        request = self._make_request(server, job, ks, job.form, job.request.budget, sampling.temperature, job.done)
        await self._exchange(server, job, ks, request, job.finish)

    async def _sample_in_two_steps(self, server: ServerInfo, job: PromptJob, ks: list[int]) -> None:
        """Sample the first token at `first_temperature`, then the others."""
        sampling, budget = job.request.sampling, job.request.budget
        _check_takes_ids(server.api, "first_temperature")

        async def sample_rest(k: int) -> None:
            first = job.pieces[k][0]
            if first.finish == "length" and budget > 1:
                first.finish = None
                form = PromptForm(ids=[*job.prompt_ids(), *job.ids(first)])
                request = self._make_request(server, job, [k], form, budget - 1, sampling.temperature, 1)
                await self._exchange(server, job, [k], request, lambda k: None)
            job.finish(k)

        request = self._make_request(server, job, ks, job.form, 1, sampling.first_temperature or 0.0, 0)
        await self._exchange(server, job, ks, request, lambda k: None)
        await _gather(_run_guarded(job, [k], partial(sample_rest, k)) for k in ks)

    def _make_request(
        self,
        server: ServerInfo,
        job: PromptJob,
        ks: list[int],
        form: PromptForm,
        max_tokens: int,
        temperature: float,
        done: int,
    ) -> ServerRequest:
        """Return the request for samples `ks`, which have `done` tokens so far."""
        seed = job.seeds[ks[0]]
        if seed is not None and done:  # other random numbers than those of the tokens so far
            seed = derive_seed(seed, done) % (server.api.largest_seed + 1)
        return ServerRequest(
            model=server.model,
            sampling=job.request.sampling,
            max_tokens=max_tokens,
            min_tokens=min(max(job.request.sampling.min_tokens - done, 0), max_tokens),
            temperature=temperature,
            n=len(ks),
            seed=seed,
            stream=job.stream,
            text=form.text,
            ids=form.ids,
            messages=form.messages,
            tools=job.request.prompt.tools if form.messages is not None else None,
        )

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _prompt_form(self, server: ServerInfo, job: PromptJob) -> PromptForm:
        request, api = job.request, server.api
        prompt, sampling, started = request.prompt, request.sampling, request.started
        if started is not None and job.done:
            if has_media(prompt):
                raise ValueError("prompt.images: unfinished samples with images cannot be continued")
            _check_takes_ids(api, "an unfinished sample")
            return PromptForm(ids=[*started.prompt_ids, *started.response_ids], prompt_ids=list(started.prompt_ids))
        if has_media(prompt):
            if prompt.messages is None:
                raise ValueError("prompt.images: got text or token ids with images, expected messages")
            if not api.takes_media:
                raise ValueError(f"prompt.images: {api.name} does not return the prompt ids of images")
            return PromptForm(messages=chat_messages(prompt, self.allow_urls))
        is_chat = prompt.messages is not None
        ids = None if prompt.token_ids is None else list(prompt.token_ids)
        if ids is None and (self.render == "local" or (is_chat and api.chat_rendering == "local")):
            ids = render_prompt(job.context, prompt)
        sends_ids = ids is not None
        rendered_here, uncounted_reason = False, ""
        if sends_ids:
            _check_takes_ids(api, "prompt.token_ids" if prompt.token_ids is not None else "render='local'")
        elif sampling.max_prompt_tokens is not None or api.tokenizes:
            # If the prompt is sent as ids in any case, they are those of the server.
            rendered_here = not api.tokenizes and self._can_render(is_chat)
            ids = render_prompt(job.context, prompt) if rendered_here else await self._tokenize(server, job)
            sends_ids = rendered_here and not is_chat and api.takes_ids
            if ids is None:
                reason = self._tokenize_error
                uncounted_reason = (
                    f": to truncate it, max_prompt_tokens needs a tokenizer or a server with /tokenize ({reason})"
                )
        truncated_from, limit = None, sampling.max_prompt_tokens
        if ids is not None and limit is not None and len(ids) > limit:
            if sampling.prompt_overflow == "error":
                raise ValueError(f"prompt: got {len(ids)} tokens, expected at most max_prompt_tokens ({limit})")
            _check_takes_ids(api, f"prompt_overflow={sampling.prompt_overflow!r}")
            truncated_from = len(ids)
            ids = ids[-limit:] if sampling.prompt_overflow == "left" else ids[:limit]
        takes_chats = api.chat_rendering == "server" or (api.chat_rendering == "template" and prompt.tools is not None)
        if is_chat and takes_chats and not sends_ids and truncated_from is None:
            prompt_ids = ids if self.retokenize or not rendered_here else None
            messages = chat_messages(prompt, self.allow_urls)
            return PromptForm(
                messages=messages,
                prompt_ids=prompt_ids,
                is_local_rendering=rendered_here,
                uncounted_reason=uncounted_reason,
            )
        if ids is None or not (sends_ids or truncated_from or api.tokenizes):
            return PromptForm(text=prompt.text, uncounted_reason=uncounted_reason)
        return PromptForm(ids=ids, prompt_ids=ids, truncated_from=truncated_from)

    def _can_render(self, is_chat: bool) -> bool:
        """Return whether the tokenizer can render a prompt; a chat needs a template."""
        return self.tokenizer is not None and (not is_chat or bool(getattr(self.tokenizer, "chat_template", None)))


def _check_takes_ids(api: ServerApi, option: str) -> None:
    if not api.takes_ids:
        raise ValueError(f"{option}: {api.name} servers take no token ids; {api.ids_hint}")


class OpenAIEngine(JobEngine):
    """Rollout engine over an OpenAI-compatible server.

    The engine can be used from several threads and from any event loop. Its requests run in an event loop of its own,
    which ends with `close()`, with a `with` block, with the last reference to the engine or with the program.

    The n samples of a prompt are one request if the server seeds each of them (vLLM), otherwise n requests. With a
    seed, the seed of each sample is sent and recorded. `generate` requests complete replies; with a `Cancel` of the
    caller, and in `stream`, replies are streamed: a cancel closes the connections, and the partial samples can be
    continued from their ids. A stop text that starts before such a pause and ends after it is not detected; without a
    tokenizer, a character across the pause may be missing in the text.

    Args:
        url: Address of the server, such as `http://127.0.0.1:8000`, with or without `/v1`.
        model: Name of the model; by default the first that the server lists.
        tokenizer: Tokenizer for `render="local"`, `retokenize` and `max_prompt_tokens`.
        api_key: Bearer token.
        backoff: Waits between retries of refusals that may pass (429, 503, ...), lost connections and timeouts.
        timeout: Seconds without a byte.
        concurrency: Largest number of requests in flight, over all calls.
        server: Kind of server (`vllm`, `sglang`, `llama.cpp`, `transformers-serve`, `openai`), or `auto` to detect it
            at first use.
        headers: HTTP headers.
        version: Number of the policy.
        render: Whether the `server` renders and tokenizes prompts (its ids are recorded) or the tokenizer here
            (`local`), which sends ids. No special tokens are added to text.
        logprobs_kind: Kind of the server's log-probs, if it was started with another than its default (vLLM:
            `--logprobs-mode processed_logprobs`).
        retokenize: Tokenize the text if the server returns no ids; `info["retokenized"]` records it.
        allow_urls: Send image URLs for the server to fetch.

    `Sampling.extra` is merged into the request; `None` removes a field. `max_prompt_tokens` is counted by the tokenizer
    if there is one (a text is then sent as ids), otherwise by the server's `/tokenize`; if that is missing, a prompt
    that is too long is an error.

    Raises:
        ImportError: httpx is not installed.

    >>> with OpenAIEngine("http://127.0.0.1:8000/v1", "tiny", api_key="sk-1", concurrency=8) as engine:
    ...     engine  # and engine.generate(["2+2="], max_tokens=8)
    OpenAIEngine('http://127.0.0.1:8000', model='tiny', server='auto')
    >>> engine = OpenAIEngine("http://127.0.0.1:8000")  # without a block
    >>> engine.close()
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        api_key: str | None = None,
        backoff: Backoff | None = None,
        timeout: float = 1800.0,
        concurrency: int = 64,
        server: str = "auto",
        headers: Mapping[str, str] | None = None,
        version: int = 0,
        render: Literal["server", "local"] = "server",
        logprobs_kind: LogprobsKind | None = None,
        retokenize: bool = False,
        allow_urls: bool = False,
    ) -> None:
        try:
            import httpx  # noqa: F401  raise now, not in the middle of a run
        except ImportError:
            raise ImportError("OpenAIEngine needs httpx: install the extra 'remote' of Rollbook") from None
        check_choice("server", server, ("auto", *SERVER_APIS))
        self._connection = Connection(
            url, api_key=api_key, headers=headers, backoff=backoff, timeout=timeout, concurrency=concurrency
        )
        super().__init__(
            self._connection.loop,
            model,
            tokenizer,
            version=version,
            render=render,
            logprobs_kind=logprobs_kind,
            retokenize=retokenize,
            allow_urls=allow_urls,
        )
        self.server = server
        self.url = self._connection.url
        self._detection_lock: asyncio.Lock | None = None

    def __repr__(self) -> str:
        info = self._server_info
        model, server = (self.model, self.server) if info is None else (info.model, info.api.name)
        return f"{type(self).__name__}({self.url!r}, model={model!r}, server={server!r})"

    # --- server -------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the run, the address and the kind of log-probs."""
        run = self.run
        kind = self.logprobs_kind or (None if self._server_info is None else self._server_info.api.logprobs_kind)
        return {**run.to_dict(), "url": self.url, "logprobs_kind": kind, "render": self.render}

    def health(self, timeout: float = 120.0) -> None:
        """Wait until the server is ready.

        Args:
            timeout: Seconds to wait.

        Raises:
            TimeoutError: The server is not ready in time. The message has its last error.
        """
        check_float("timeout", timeout, 0, 1e9)
        self._loop.submit(self._wait_until_ready(timeout)).result()

    async def _wait_until_ready(self, timeout: float) -> None:
        async def get(path: str) -> None:
            async with self._connection.open(path, timeout=10.0) as response:
                await response.aread()

        deadline, wait = time.monotonic() + timeout, 0.1
        while True:
            try:
                try:
                    return await self._connection.retry(lambda: get("/health"), once=True)
                except ServerError:  # plain OpenAI servers have no /health
                    return await self._connection.retry(lambda: get("/v1/models"), once=True)
            except ServerError as error:
                if time.monotonic() + wait > deadline:
                    raise TimeoutError(f"not ready after {timeout:g} s: {error}") from None
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, 2.0)

    async def _get_server(self, on_retry: Callable[[], None] = lambda: None) -> ServerInfo:
        """Detect the server, once; `on_retry` is called before each retry."""
        if self._detection_lock is None:
            self._detection_lock = asyncio.Lock()
        async with self._detection_lock:
            if self._server_info is None:
                self._server_info = await detect_server(self._connection, self.server, self.model, on_retry)
        return self._server_info

    def _redact(self, text: str) -> str:
        return self._connection.redact(text)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _exchange(
        self, server: ServerInfo, job: PromptJob, ks: list[int], request: ServerRequest, finished: Callable[[int], None]
    ) -> None:
        """Send a request for samples `ks`, with retries; each sample is finished at most once."""
        api, finished_ks = server.api, set[int]()
        body = api.payload(request)
        for k in ks:
            job.pieces[k].append(PartialSample())

        async def attempt() -> None:
            version = self.version if request.version is None else request.version
            pieces = [PartialSample(version=version) for _ in ks]
            for k, piece in zip(ks, pieces, strict=True):
                job.pieces[k][-1] = piece

            def report_finished() -> None:
                for k, piece in zip(ks, pieces, strict=True):
                    if piece.finish is not None and k not in finished_ks:
                        finished_ks.add(k)
                        finished(k)

            async with self._connection.open(api.path(request), body) as response:
                # Some servers and proxies never stream.
                is_json = response.headers.get("content-type", "").startswith("application/json")
                if body.get("stream") and not is_json:
                    async for event in read_events(response):
                        api.read_event(event, pieces)
                        report_finished()
                else:
                    api.read_reply(parse_json(await response.aread()), pieces)
                    report_finished()
                if any(piece.finish is None for piece in pieces):
                    raise RetryableError("the reply is incomplete")

        await self._connection.retry(attempt, lambda: job.count_retry(ks))

    async def _tokenize(self, server: ServerInfo, job: PromptJob) -> list[int] | None:
        """Request the ids of a text or a chat from the server; `None` if it cannot tokenize and needs no ids."""
        prompt, api = job.request.prompt, server.api
        if not api.returns_ids:
            raise ValueError(
                f"max_prompt_tokens: needs a tokenizer (for a chat, one with a template) or a server with /tokenize, "
                f"which {api.name} servers do not have"
            )
        chat: dict[str, Any] = {}
        if prompt.messages is not None:
            chat["messages"] = chat_messages(prompt, self.allow_urls)
            chat |= {} if prompt.tools is None else {"tools": list(prompt.tools)}

        async def post(path: str, body: Mapping[str, Any]) -> Any:
            return await self._connection.json(path, body, on_retry=job.count_retry)

        try:
            if self._tokenize_error is not None:
                raise self._tokenize_error
            tokens = await api.tokenize(server.model, prompt.text, chat, post)
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            self._tokenize_error = error
            if not api.tokenizes:
                return None
            if self._can_render(bool(chat)):
                return render_prompt(job.context, prompt)
            raise ServerError(f"{error}; {api.name} takes ids: give the engine a tokenizer") from None
        if not isinstance(tokens, list) or any(not isinstance(token, int) for token in tokens):
            raise BadReplyError(f"/tokenize: got {str(tokens)[:80]}, expected a list of token ids")
        return tokens


async def _watch_cancel(cancel: Cancel, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks of a call when it is requested, after they have received what arrived."""
    has_started = not cancel.requested
    while not cancel.requested:
        await asyncio.sleep(0.02)
    if has_started:
        await asyncio.sleep(CANCEL_GRACE)
    for task in tasks:
        task.cancel()


async def _gather(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. A cancel of this call cancels all of them, and waits for their ends."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel_all(tasks)


async def _cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run_guarded(job: PromptJob, ks: list[int], work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` on samples `ks`. If it fails, only these samples fail."""
    try:
        await work()  # created in the task: a coroutine that is canceled before it starts would never be awaited
    except (ServerError, ValueError) as error:
        job.fail(error, ks)
