"""Connections to inference servers, and the OpenAI-compatible API that they share.

Invariant: at most `concurrency` requests are in flight; every failure is a `ServerError` whose message contains no
secret and no media payload. A dialect sends every option that shapes the distribution, so that no default of the
server or of the model's `generation_config` applies unnoticed, and rejects options that the server does not support.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rollbook.core.addresses import redacted, without_user
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.retry import RETRIED, Backoff, asked_wait
from rollbook.core.sampling import LogprobsKind, Sampling
from rollbook.rollout.chat import redact_secrets

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")


class ServerError(RollbookError, RuntimeError):
    """A server's refusal, with its HTTP `status`, or its silence after all tries."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class BadReplyError(ServerError):
    """A reply that is not what was asked for; asking again would give the same."""


class RetryableError(RollbookError):
    """What may succeed when it is asked again, and how long the server asks to wait."""

    def __init__(self, text: str, wait: float = 0.0, status: int | None = None) -> None:
        super().__init__(text)
        self.wait = wait
        self.status = status


class Connection:
    """A server at `url`. The loop and its thread begin with the first request, and end with `close`, with the last
    reference to this, or with the program, whichever is first.

    >>> connection = Connection("http://user:word@127.0.0.1:8000/v1/", concurrency=2)
    >>> connection.url, connection.redact("a word for user")
    ('http://127.0.0.1:8000', 'a [secret] for user')
    >>> connection.close()
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
        timeout: float = 1800.0,
        concurrency: int = 64,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {redacted(url)!r}, expected one such as 'http://127.0.0.1:8000'")
        bare = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, bare, parts.path.rstrip("/").removesuffix("/v1"), "", ""))
        self.backoff = backoff if backoff is not None else Backoff()
        self.timeout = check_float("timeout", timeout, 1e-3, 1e9)
        self.concurrency = check_int("concurrency", concurrency, 1)
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._auth = without_user(url)[1]
        header_secrets = [value for value in self._headers.values() if len(value) > 5]  # a "1" is no secret
        self._secrets = [api_key or "", parts.password or "", (self._auth or ("", ""))[1], *header_secrets]
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._clients: list[httpx.AsyncClient] = []  # one, once it is needed
        self._ended: weakref.finalize[Any, Connection] | None = None
        self._slots: asyncio.Semaphore | None = None
        self._closed = False

    # --- the loop -----------------------------------------------------------------------------------------------------

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start something in the loop, from any thread."""
        with self._lock:
            if self._closed:
                work.close()
                raise ValueError("engine: got a call after close(), expected a new engine")
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="rollbook-http", daemon=True)
                self._thread.start()
                # Not a method: it must not keep this alive. It runs before modules are taken apart at the end of the
                # program, when what is under way could no longer be ended.
                self._ended = weakref.finalize(self, _close_loop, self._loop, self._thread, self._clients)
            elif not self._thread.is_alive():
                work.close()
                raise ValueError("engine: got a call in a forked process or at its end, expected an engine made there")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End what is under way, close the connections and join the thread."""
        with self._lock:
            self._closed = True
        if self._ended is not None:
            self._ended()  # once

    # --- requests, in the loop ----------------------------------------------------------------------------------------

    def redact(self, text: str) -> str:
        """Words that may be recorded."""
        return redact_secrets(text, self._secrets)

    async def json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        once: bool = False,
        again: Callable[[], None] = lambda: None,
    ) -> Any:
        """A small question's answer: a GET, or a POST of `body`; `once` and `again`: see `retry`."""

        async def attempt() -> Any:
            async with self.open(path, body) as response:
                return parse_json(await response.aread())

        return await self.retry(attempt, again, once)

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A reply of status 200, to be read in whole or as it comes; another status is raised.

        What is raised, here or by the reader, names the method and the URL.
        """
        import httpx

        client = self._http()
        method = "GET" if body is None else "POST"
        where = f"{method} {self.url}{path}"
        limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            async with client.stream(method, path, json=body, **limit) as response:
                if response.status_code != 200:
                    raw = await response.aread()
                    try:
                        body_text: Any = json.loads(raw)
                    except ValueError:
                        body_text = raw.decode("utf-8", "replace")
                    raise status_error(response.status_code, body_text, asked_wait(response.headers))
                yield response
        except httpx.RequestError as error:
            raise RetryableError(f"{where}: {type(error).__name__}: {error}".rstrip(": ")) from None
        except (RetryableError, ServerError) as error:
            error.args = (f"{where}: {error}",)
            raise

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], again: Callable[[], None] = lambda: None, once: bool = False
    ) -> T:
        """What `attempt` gives, if need be after several tries; `again` is called before each further one. `once`:
        after one."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.concurrency)
        waits, tries = iter(()) if once else self.backoff.waits(), 0
        while True:
            tries += 1
            try:
                async with self._slots:
                    return await attempt()
            except RetryableError as error:
                passing = error
            wait = next(waits, None)
            if wait is None:
                times = f" (tried {tries} times)" if tries > 1 else ""
                raise ServerError(f"{self.redact(str(passing))}{times}", passing.status)
            again()
            await asyncio.sleep(max(wait, passing.wait))

    def _http(self) -> httpx.AsyncClient:
        if not self._clients:
            import httpx

            most = self.concurrency + 1
            self._clients.append(
                httpx.AsyncClient(
                    base_url=self.url,
                    headers=self._headers,
                    auth=self._auth,
                    limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                    timeout=httpx.Timeout(self.timeout, pool=None),
                )
            )
        return self._clients[0]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """A connection's thread."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, clients: list[httpx.AsyncClient]) -> None:
    """End what is under way in a loop, close its connections, and wait for its thread."""
    if not thread.is_alive():  # in a forked process, where it never ran
        return

    async def end() -> None:
        try:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for client in clients:
                await client.aclose()
            await asyncio.sleep(0)  # those that wait for a task hear of its end
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:  # the last reference may be that of a task
        thread.join()


async def read_events(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a streamed reply; one that tells an error is raised.

    The reply is read to its end, past its `[DONE]`, so that the connection can be used again.
    """
    async for line in _read_lines(response):
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data and data != b"[DONE]":
            event = parse_json(data)
            if isinstance(event, dict) and event.get("error"):
                error = event["error"]
                raise status_error(error.get("code") if isinstance(error, dict) else None, event, 0.0)
            yield event


async def _read_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines that end in a line feed and nothing else: a model's text may hold other characters that count as the end of
    a line (U+0085, U+2028), which httpx's own lines would be cut at."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    yield rest


def status_error(status: Any, reply: Any, wait: float) -> Exception:
    """The error for a status that is not 200 (`None`: a reply that does not say it): one to try again, or final."""
    for _ in range(3):  # servers put their words at various depths
        if isinstance(reply, Mapping):
            reply = next((reply[key] for key in ("error", "message", "detail") if reply.get(key)), str(dict(reply)))
    code = status if isinstance(status, int) else None
    text = str(reply) if status is None else f"status {status}: {reply}"
    return RetryableError(text, wait, code) if status in RETRIED else ServerError(text, code)


def parse_json(data: bytes) -> Any:
    """JSON, or an error that shows how it begins.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(data)
    except ValueError:
        raise BadReplyError(f"the reply is not JSON: {data[:80].decode('utf-8', 'replace')!r}") from None


Json = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Ask a path a question, and get the answer's JSON."""


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """One request to a server: exactly one of `text`, `ids` and `messages`, for `n` samples of up to `max_tokens`."""

    model: str
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    temperature: float
    n: int = 1
    seed: int | None = None
    stream: bool = False
    text: str | None = None
    ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass
class PartialSample:
    """What has come in of one sample. R tokens so far: `ids` [R] and `logprobs` [R], or none; `tokens` are their texts,
    which name them only where a server gives no ids; `retokenized` says that `ids` were made from texts. `spans`:
    (version, start, end) of the policies that sampled them.
    """

    version: int = 0
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    tokens: list[str] = field(default_factory=list)
    text: str = ""
    message: dict[str, Any] | None = None
    finish: str | None = None
    stop: str | int | None = None
    prompt_ids: list[int] | None = None
    prompt_count: int | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    retokenized: bool = False

    def more(self, ids: Any, logprobs: Any, text: Any) -> None:
        """Take in further tokens."""
        if ids is not None:
            self.ids = [*(self.ids or ()), *_check_ids("token_ids", ids)]
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *_check_logprobs(logprobs)]
        if text is not None and not isinstance(text, str):
            # Parts could name files of this machine, which the next turn would send.
            raise BadReplyError(f"content: got {type(text).__name__}, expected text")
        self.text += text or ""

    def versions(self) -> list[int]:
        """The policy's version for each token: the server's word where it gives one, else that at the request."""
        versions = [self.version] * len(self.ids or ())
        for version, start, end in self.spans:
            versions[start:end] = [version] * len(versions[start:end])
        return versions


def _check_ids(name: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise BadReplyError(f"{name}: got {str(ids)[:80]}, expected a list of token ids")
    return ids


def _check_logprobs(logprobs: Any) -> list[float]:
    if not isinstance(logprobs, list):
        raise BadReplyError(f"logprobs: got {str(logprobs)[:80]}, expected a list of numbers")
    for i, logprob in enumerate(logprobs):
        number = isinstance(logprob, (int, float)) and not isinstance(logprob, bool)
        # A server's float32 sums may end a hair above 0.
        if not number or not math.isfinite(logprob) or logprob > 1e-3:
            raise BadReplyError(f"logprobs[{i}]: got {logprob!r}, expected a log-probability")
    return [min(float(logprob), 0.0) for logprob in logprobs]


def parse_version(text: Any) -> int | None:
    """A weight version as a number, if it is one.

    >>> parse_version("12"), parse_version("default")
    (12, None)
    """
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


class Dialect:
    """Plain OpenAI, and what the others change. Nothing here is sent over a wire."""

    name: ClassVar[str] = "openai"
    takes_ids: ClassVar[bool] = True
    gives_ids: ClassVar[bool] = False
    chats: ClassVar[str] = "server"
    """Who renders a chat: the `server`, its `template` endpoint for prompts that go as ids, or we (`local`)."""
    tokenizes: ClassVar[bool] = False
    """Whether a text is turned into ids by the server first, since its replies do not say which it used."""
    media: ClassVar[bool] = True
    trims_stop: ClassVar[bool] = False
    """Whether its texts never have the text that stopped them, but it says which it was."""
    logprobs_kind: ClassVar[LogprobsKind | None] = None
    supported: ClassVar[frozenset[str]] = frozenset({"suppress"})
    """The options it knows, of those that not every server does."""
    largest_seed: ClassVar[int] = 2**63 - 1
    cannot: ClassVar[tuple[str, ...]] = (
        "token ids: plain OpenAI replies have none (retokenize=True maps texts back to ids, and records it)",
        "say which distribution log-probs are of: state it with logprobs_kind=",
    )
    ids_from: ClassVar[str] = "serve the model with vLLM or SGLang, which do"
    """Where ids are to be had, for the error of a reply that has none; `logprobs_from` likewise."""
    logprobs_from: ClassVar[str] = "serve the model with vLLM or SGLang, which do"

    def check(self, sampling: Sampling) -> None:
        """Refuse options that this server has no word for."""
        plain = Sampling()
        for option in ("min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "suppress"):
            value = getattr(sampling, option)
            if value != getattr(plain, option) and option not in self.supported:
                raise ValueError(f"{option}: got {value!r}, but {self.name} servers have no such option")

    def shares_request(self, sampling: Sampling) -> bool:
        """Whether n samples go in one request: only without a seed, which all n would share."""
        return sampling.seed is None

    def seed_of(self, seed: int, k: int) -> int:
        """The seed that sample k of a request for several has."""
        return seed

    async def tokenize(self, model: str, text: str | None, chat: Mapping[str, Any], json: Json) -> Any:
        """The ids that the server makes of a text or a chat (`messages`, `tools`), by asking it."""
        content = chat or {"prompt": text}
        return (await json("/tokenize", {"model": model, "add_special_tokens": False, **content})).get("tokens")

    def constrained(self, sampling: Sampling) -> bool:
        """Whether a grammar is asked for, of which log-probs are then taken, too."""
        free = ("auto", "none", None)
        return any(
            key in ("response_format", "structured_outputs", "grammar", "json_schema") or key.startswith("guided_")
            for key, value in sampling.extra.items()
            if value is not None
        ) or (sampling.extra.get("tool_choice") not in free)

    def path(self, request: ServerRequest) -> str:
        """Where a request goes."""
        return "/v1/completions" if request.messages is None else "/v1/chat/completions"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        """A request's JSON."""
        body = self._common_body(request)
        if request.sampling.logprobs is not None:
            body |= {"logprobs": 1} if request.messages is None else {"logprobs": True}
        return body

    def _common_body(self, request: ServerRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": request.model,
            "n": request.n,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stream": request.stream,
        }
        if request.messages is not None:
            body["messages"] = list(request.messages)
            if request.tools is not None:
                body["tools"] = list(request.tools)
        else:
            body["prompt"] = request.text if request.ids is None else list(request.ids)
        if request.seed is not None:
            body["seed"] = request.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.suppress:
            body["logit_bias"] = {str(token): -100 for token in sampling.suppress}
        return body

    def read_reply(self, reply: Any, pieces: Sequence[PartialSample]) -> None:
        """Take in a whole reply."""
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list):
            raise BadReplyError(f"the reply has no choices: {str(reply)[:200]}")
        if len(choices) != len(pieces):
            raise BadReplyError(f"choices: got {len(choices)}, expected {len(pieces)}")
        for place, choice in enumerate(choices):
            self._choice(reply, choice, pieces[self._index(choice, place, pieces)], "message")
        if sum(piece.finish is not None for piece in pieces) != len(pieces):
            raise BadReplyError(
                "choices: got some without a finish_reason or with the same index, expected one of each"
            )

    def read_event(self, event: Any, pieces: Sequence[PartialSample]) -> None:
        """Take in one event of a streamed reply."""
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list):
            raise BadReplyError(f"the event has no choices: {str(event)[:200]}")
        for choice in choices:
            self._choice(event, choice, pieces[self._index(choice, 0, pieces)], "delta")

    def _index(self, choice: Any, place: int, pieces: Sequence[PartialSample]) -> int:
        index = choice.get("index", place) if isinstance(choice, dict) else None
        if not isinstance(index, int) or not 0 <= index < len(pieces):
            raise BadReplyError(f"choices: got index {index!r}, expected 0 to {len(pieces) - 1}")
        return index

    def _choice(self, reply: dict[str, Any], choice: dict[str, Any], piece: PartialSample, inner: str) -> None:
        message = choice.get(inner)
        logprobs = choice.get("logprobs") or {}
        values: Any
        tokens: Any
        ids: Any
        if "content" in logprobs:  # a chat's
            entries = logprobs["content"] or []
            values, tokens = [entry.get("logprob") for entry in entries], [entry.get("token") for entry in entries]
            ids = [entry.get("id") for entry in entries] if entries and "id" in entries[0] else None
        else:
            values, tokens, ids = logprobs.get("token_logprobs"), logprobs.get("tokens") or [], None
        token_ids = choice.get("token_ids")
        text = choice.get("text") if message is None else message.get("content")
        piece.more(token_ids if token_ids is not None else ids, values, text)
        piece.tokens += tokens
        if message is not None:
            piece.message = _join_delta(piece.message, message) if inner == "delta" else dict(message)
        prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        if prompt_ids is not None:
            piece.prompt_ids = _check_ids("prompt_token_ids", prompt_ids)
        count = (reply.get("usage") or {}).get("prompt_tokens")
        piece.prompt_count = count if isinstance(count, int) else piece.prompt_count
        for span in choice.get("weight_versions") or ():
            version = parse_version(span.get("version"))
            if version is not None:
                piece.spans.append((version, span["start"], span["end"]))
        piece.finish = choice.get("finish_reason") or piece.finish
        stop = choice.get("stop_reason")
        piece.stop = piece.stop if stop is None else stop


def _join_delta(message: dict[str, Any] | None, delta: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message with a further part of it: texts grow, tool calls by their index."""
    joined = dict(message or {"role": "assistant", "content": ""})
    for name, value in delta.items():
        if name == "tool_calls":
            calls = [dict(call) for call in joined.get("tool_calls", ())]
            for part in value or ():
                at = part.get("index", len(calls))
                if at >= len(calls):
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[at] = {**calls[at], **{k: v for k, v in part.items() if k in ("id", "type") and v}}
                inner = part.get("function") or {}
                call["function"] = {
                    key: call["function"].get(key, "") + (inner.get(key) or "") for key in ("name", "arguments")
                }
            if calls:
                joined["tool_calls"] = calls
        elif isinstance(value, str) and name != "role":
            joined[name] = (joined.get(name) or "") + value
        elif value is not None:
            joined[name] = value
    return joined


class TransformersServe(Dialect):
    """`transformers serve`: text in, text out. It takes no token ids and gives neither ids nor log-probs."""

    name = "transformers-serve"
    takes_ids = False
    supported = frozenset()
    cannot = (
        "token ids, and log-probs: replies have none, and requests for them are ignored",
        "prompts as token ids: they are refused, so that nothing unfinished can go on",
    )
    ids_from = "serve the model with vLLM or SGLang, which do, or use TransformersEngine in this process"
    logprobs_from = ids_from

    def shares_request(self, sampling: Sampling) -> bool:
        return False

    def body(self, request: ServerRequest) -> dict[str, Any]:
        # It refuses words that it does not know, and ignores a few that it does.
        left_out = {"n", "presence_penalty", "frequency_penalty"}
        return {name: value for name, value in self._common_body(request).items() if name not in left_out}


def resolve_logprobs_kind(
    true: LogprobsKind | None, sampling: Sampling, constrained: bool = False
) -> LogprobsKind | None:
    """Which kind a server's log-probs are of: the one asked for where that is the same thing, else what they truly are.

    Without truncation, and at temperature 1, there is no difference; at temperature 0 servers give the model's own.
    `constrained`: a grammar rules tokens out before any of them is taken, which makes them `processed` or nothing.

    >>> resolve_logprobs_kind("raw", Sampling(logprobs="processed"))
    'processed'
    >>> resolve_logprobs_kind("raw", Sampling(logprobs="processed", temperature=0.5))
    'raw'
    >>> resolve_logprobs_kind("tempered", Sampling(logprobs="processed", temperature=0.5))
    'processed'
    """
    requested = sampling.logprobs
    temperatures = {sampling.temperature}
    if sampling.first_temperature is not None:
        temperatures.add(sampling.first_temperature)
    even = temperatures == {1.0}
    ruled_out = sampling.needs_truncation() or bool(sampling.suppress or sampling.min_tokens)
    if constrained:
        return "processed" if true == "processed" or (true is not None and even and not ruled_out) else None
    masked = ruled_out or bool(sampling.extra)
    if true is None:
        return requested if even and not masked else None
    if temperatures == {0.0} and not masked:
        true = "raw"
    alike = {
        frozenset({"raw", "tempered"}): even,
        frozenset({"tempered", "processed"}): not masked,
        frozenset({"raw", "processed"}): even and not masked,
    }
    return requested if requested == true or alike.get(frozenset({requested or "", true})) else true
