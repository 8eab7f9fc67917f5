"""Connections to inference servers, the OpenAI-compatible API that they share, and their native APIs.

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
import random
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rollbook.core.addresses import redacted, without_user
from rollbook.core.checks import check_float, check_int
from rollbook.core.errors import RollbookError
from rollbook.core.sampling import LogprobsKind, Sampling
from rollbook.rollout.chat import redact_secrets

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")
JsonValue: TypeAlias = dict[str, Any] | list[Any] | str | float | None
"""A parsed reply of a server, or a part of it, which may have any form."""


RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Exponential backoff between retries.

    Args:
        tries: Largest number of attempts, the first included.
        first: Seconds before the first retry.
        factor: Growth of the wait from retry to retry.
        max_wait: Longest wait in seconds.
        jitter: Share of each wait that is random, so that clients spread out.

    >>> [round(wait, 2) for wait in Backoff(tries=4, first=0.5, jitter=0.0).waits()]
    [0.5, 1.0, 2.0]
    """

    tries: int = 5
    first: float = 0.5
    factor: float = 2.0
    max_wait: float = 30.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        check_int("tries", self.tries, 1)
        check_float("first", self.first, 0, 1e6)
        check_float("factor", self.factor, 1, 1e6)
        check_float("max_wait", self.max_wait, 0, 1e6)
        check_float("jitter", self.jitter, 0, 1)

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait before each retry."""
        wait = self.first
        for _ in range(self.tries - 1):
            yield min(wait, self.max_wait) * (1 - self.jitter * random.random())
            wait *= self.factor


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Parse the `retry-after` header of a reply.

    Args:
        headers: Headers of the reply.

    Returns:
        Seconds to wait, at most 60; 0 if the header is missing or is not a number.

    >>> parse_retry_after({"retry-after": "2"}), parse_retry_after({}), parse_retry_after({"retry-after": "soon"})
    (2.0, 0.0, 0.0)
    """
    try:
        return min(max(0.0, float(headers.get("retry-after", 0))), 60.0)  # in this order NaN is 0
    except ValueError:
        return 0.0


class ServerError(RollbookError, RuntimeError):
    """Raised when a server rejects a request, with its HTTP `status`, or does not reply."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class BadReplyError(ServerError):
    """Raised when a reply is malformed. It is not retried."""


class RetryableError(RollbookError):
    """A failure that may be retried, with the wait that the server requests."""

    def __init__(self, text: str, wait: float = 0.0, status: int | None = None) -> None:
        super().__init__(text)
        self.wait = wait
        self.status = status


class LoopThread:
    """An event loop in a thread of its own.

    The thread starts with the first coroutine. It ends with `close`, with the last reference to the object or with the
    program; coroutines that still run are canceled.

    Args:
        name: Name of the thread.

    >>> async def add(a: int, b: int) -> int:
    ...     return a + b
    >>> loop = LoopThread("doctest")
    >>> loop.submit(add(1, 2)).result()
    3
    >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Called in the loop at its end. They must not refer to this object."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: weakref.finalize[Any, LoopThread] | None = None
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the loop, from any thread."""
        with self._lock:
            if self._closed:
                work.close()
                raise ValueError("engine: closed")
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name=self.name, daemon=True)
                self._thread.start()
                # Not a method, which would keep the object alive. It also runs at the end of the program, before
                # modules are torn down.
                self._ended = weakref.finalize(self, _close_loop, self._loop, self._thread, self.closers)
            elif not self._thread.is_alive():
                work.close()
                raise ValueError("engine: its thread has ended; a forked process needs its own engine")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running coroutines, call the closers and join the thread."""
        with self._lock:
            self._closed = True
        if self._ended is not None:
            self._ended()  # once


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop, in its thread."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close_loop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, closers: list[Callable[[], Awaitable[None]]]
) -> None:
    """Cancel the tasks of a loop, call the closers and join its thread."""
    if not thread.is_alive():  # in a forked process
        return

    async def end() -> None:
        try:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for closer in closers:
                await closer()
            await asyncio.sleep(0)  # lets callbacks of the tasks run
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:  # a task may hold the last reference
        thread.join()


class Connection:
    """Connection to a server, in an event loop and thread of its own.

    Args:
        url: Address of the server, with or without `/v1`.
        api_key: Bearer token.
        headers: HTTP headers.
        backoff: Waits between retries.
        timeout: Seconds without a byte.
        concurrency: Largest number of requests in flight.

    Raises:
        ValueError: The address is invalid.

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
        header_secrets = [value for value in self._headers.values() if len(value) > 5]  # shorter ones are not secret
        self._secrets = [api_key or "", parts.password or "", (self._auth or ("", ""))[1], *header_secrets]
        self.loop = LoopThread("rollbook-http")
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None

    def close(self) -> None:
        """Cancel running requests, close the connections and join the thread."""
        self.loop.close()

    # --- requests (in the loop) ---------------------------------------------------------------------------------------

    def redact(self, text: str) -> str:
        """Remove secrets and media payloads from a text."""
        return redact_secrets(text, self._secrets)

    async def json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        on_retry: Callable[[], None] = lambda: None,
        once: bool = False,
    ) -> Any:
        """Return the JSON of a GET, or of a POST of `body`. For `on_retry` and `once` see `retry`."""

        async def attempt() -> Any:
            async with self.open(path, body) as response:
                return parse_json(await response.aread())

        return await self.retry(attempt, on_retry, once)

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Open a reply of status 200, to be read completely or as a stream.

        Raises:
            RetryableError: The connection failed, or the status may be retried.
            ServerError: The server replied with another status. Messages name the method and the URL.
        """
        import httpx

        client = self._http()
        method = "GET" if body is None else "POST"
        location = f"{method} {self.url}{path}"
        limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            async with client.stream(method, path, json=body, **limit) as response:
                if response.status_code != 200:
                    raw = await response.aread()
                    try:
                        body_text: Any = json.loads(raw)
                    except ValueError:
                        body_text = raw.decode("utf-8", "replace")
                    raise status_error(response.status_code, body_text, parse_retry_after(response.headers))
                yield response
        except httpx.RequestError as error:
            raise RetryableError(f"{location}: {type(error).__name__}: {error}".rstrip(": ")) from None
        except (RetryableError, ServerError) as error:
            error.args = (f"{location}: {error}",)
            raise

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], on_retry: Callable[[], None] = lambda: None, once: bool = False
    ) -> T:
        """Call `attempt` until it succeeds.

        Args:
            attempt: What to do.
            on_retry: Called before each retry.
            once: Whether to try only once.

        Raises:
            ServerError: The last attempt failed.
        """
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
            on_retry()
            await asyncio.sleep(max(wait, passing.wait))

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            max_connections = self.concurrency + 1
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                auth=self._auth,
                limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
                timeout=httpx.Timeout(self.timeout, pool=None),
            )
            self.loop.closers.append(self._client.aclose)
        return self._client


async def read_events(response: httpx.Response) -> AsyncIterator[Any]:
    """Yield the events of a streamed reply; an error event is raised.

    The reply is read to its end, after `[DONE]`, so that the connection can be reused.
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
    """Yield lines split at line feeds only: httpx also splits at characters such as U+2028, which texts may contain."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    yield rest


def status_error(status: int | str | None, reply: JsonValue, wait: float) -> Exception:
    """Return the error for a status other than 200 (or `None` if unknown).

    Args:
        status: The status.
        reply: The reply, with an error message.
        wait: Seconds that the server asks to wait.

    Returns:
        A `RetryableError` or a `ServerError`.
    """
    for _ in range(3):  # the message may be nested
        if isinstance(reply, Mapping):
            reply = next((reply[key] for key in ("error", "message", "detail") if reply.get(key)), str(dict(reply)))
    code = status if isinstance(status, int) else None
    text = str(reply) if status is None else f"status {status}: {reply}"
    return RetryableError(text, wait, code) if status in RETRY_STATUSES else ServerError(text, code)


def parse_json(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        BadReplyError: It is not JSON.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(data)
    except ValueError:
        raise BadReplyError(f"the reply is not JSON: {data[:80].decode('utf-8', 'replace')!r}") from None


PostJson = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Sends a body to a path and returns the JSON of the reply."""


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """A request for `n` samples, with exactly one of `text`, `ids` and `messages`."""

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
    version: int | None = None
    """Version of the policy; `None` for that of the engine when the request is sent."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class PartialSample:
    """The part of a sample that has arrived, with R tokens so far."""

    version: int = 0
    """Version of the policy at the request."""
    ids: list[int] | None = None
    """[R] Token ids, if the server returns them."""
    logprobs: list[float] | None = None
    """[R] Log-probs."""
    tokens: list[str] = field(default_factory=list)
    """[R] Texts of the tokens, for servers that return no ids."""
    text: str = ""
    message: dict[str, Any] | None = None
    finish: str | None = None
    stop: str | int | None = None
    prompt_ids: list[int] | None = None
    prompt_count: int | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(version, start, end) of tokens whose version the server returned."""
    retokenized: bool = False
    """Whether the ids were made from text."""

    def append(self, ids: JsonValue, logprobs: JsonValue, text: JsonValue) -> None:
        """Append tokens.

        Raises:
            BadReplyError: They are malformed.
        """
        if ids is not None:
            self.ids = [*(self.ids or ()), *_check_ids("token_ids", ids)]
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *_check_logprobs(logprobs)]
        if text is not None and not isinstance(text, str):
            # Message parts could refer to local files, which the next turn would send.
            raise BadReplyError(f"content: got {type(text).__name__}, expected text")
        self.text += text or ""

    def versions(self) -> list[int]:
        """Return the version of each token: that of the server if it returned one, else that at the request."""
        versions = [self.version] * len(self.ids or ())
        for version, start, end in self.spans:
            versions[start:end] = [version] * len(versions[start:end])
        return versions


def _check_ids(name: str, ids: JsonValue) -> list[int]:
    if not isinstance(ids, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise BadReplyError(f"{name}: got {str(ids)[:80]}, expected a list of token ids")
    return ids


def _check_logprobs(logprobs: JsonValue) -> list[float]:
    if not isinstance(logprobs, list):
        raise BadReplyError(f"logprobs: got {str(logprobs)[:80]}, expected a list of numbers")
    for i, logprob in enumerate(logprobs):
        number = isinstance(logprob, (int, float)) and not isinstance(logprob, bool)
        # Rounding may give values slightly above 0.
        if not number or not math.isfinite(logprob) or logprob > 1e-3:
            raise BadReplyError(f"logprobs[{i}]: got {logprob!r}, expected a log-probability")
    return [min(float(logprob), 0.0) for logprob in logprobs]


def parse_version(text: JsonValue) -> int | None:
    """Return a weight version as a number, or `None` if it is not one.

    >>> parse_version("12"), parse_version("default")
    (12, None)
    """
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


_SAMPLING_OPTIONS = ("min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "suppress")
"""Options of `Sampling` that not every server has."""


class Dialect:
    """The API of a kind of server: request bodies and replies. This class is the plain OpenAI API."""

    name: ClassVar[str] = "openai"
    takes_ids: ClassVar[bool] = True
    gives_ids: ClassVar[bool] = False
    chats: ClassVar[str] = "server"
    """Where chats are rendered: by the `server`, by its `template` endpoint, or by the tokenizer here (`local`)."""
    tokenizes: ClassVar[bool] = False
    """Whether texts are tokenized by the server first, since its replies do not contain the prompt ids."""
    media: ClassVar[bool] = True
    trims_stop: ClassVar[bool] = False
    """Whether texts never include the stop text, which is returned separately."""
    logprobs_kind: ClassVar[LogprobsKind | None] = None
    supported: ClassVar[frozenset[str]] = frozenset({"suppress"})
    """Supported options of `_SAMPLING_OPTIONS`."""
    shared_requests: ClassVar[bool] = True
    """Whether one request is for all n samples, if it has no seed, which they would share."""
    largest_seed: ClassVar[int] = 2**63 - 1
    limitations: ClassVar[tuple[str, ...]] = (
        "token ids: plain OpenAI replies have none (retokenize=True maps texts back to ids, and records it)",
        "log-probs of a known distribution: set logprobs_kind=",
    )
    ids_from: ClassVar[str] = "serve the model with vLLM or SGLang, which do"
    """How to get ids, for the error about a reply without them; likewise `logprobs_from`."""
    logprobs_from: ClassVar[str] = "serve the model with vLLM or SGLang, which do"

    def check(self, sampling: Sampling) -> None:
        """Check that the server supports all options.

        Raises:
            ValueError: It does not.
        """
        plain = Sampling()
        for option in _SAMPLING_OPTIONS:
            value = getattr(sampling, option)
            if value != getattr(plain, option) and option not in self.supported:
                raise ValueError(f"{option}: got {value!r}, but {self.name} servers have no such option")

    def shares_request(self, sampling: Sampling) -> bool:
        """Return whether one request is for all n samples."""
        return self.shared_requests and sampling.seed is None

    def seed_of(self, seed: int, k: int) -> int:
        """Return the seed of sample k of a shared request."""
        return seed

    async def tokenize(self, model: str, text: str | None, chat: Mapping[str, Any], json: PostJson) -> Any:
        """Request the ids of a text or a chat (`messages`, `tools`) from the server."""
        content = chat or {"prompt": text}
        return (await json("/tokenize", {"model": model, "add_special_tokens": False, **content})).get("tokens")

    def constrained(self, sampling: Sampling) -> bool:
        """Return whether a grammar is requested, which affects log-probs."""
        free = ("auto", "none", None)
        return any(
            key in ("response_format", "structured_outputs", "grammar", "json_schema") or key.startswith("guided_")
            for key, value in sampling.extra.items()
            if value is not None
        ) or (sampling.extra.get("tool_choice") not in free)

    def path(self, request: ServerRequest) -> str:
        """Return the path of a request."""
        return "/v1/completions" if request.messages is None else "/v1/chat/completions"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        """Return the body of a request."""
        body = self._common_body(request)
        if request.sampling.logprobs is not None:
            body |= {"logprobs": 1} if request.messages is None else {"logprobs": True}
        return body

    def payload(self, request: ServerRequest) -> dict[str, Any]:
        """Return the body of a request with the fields of `Sampling.extra`; `None` removes a field."""
        body = self.body(request) | dict(request.sampling.extra)
        return {name: field_value for name, field_value in body.items() if field_value is not None}

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

    def read_reply(self, reply: JsonValue, pieces: Sequence[PartialSample]) -> None:
        """Add a complete reply to its samples.

        Raises:
            BadReplyError: It is malformed.
        """
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(reply, dict) or not isinstance(choices, list):
            raise BadReplyError(f"the reply has no choices: {str(reply)[:200]}")
        if len(choices) != len(pieces):
            raise BadReplyError(f"choices: got {len(choices)}, expected {len(pieces)}")
        for position, choice in enumerate(choices):
            self._choice(reply, choice, pieces[self._index(choice, position, pieces)], "message")
        if sum(piece.finish is not None for piece in pieces) != len(pieces):
            raise BadReplyError("choices: missing finish_reason or repeated index")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        """Add an event of a streamed reply to its samples.

        Raises:
            BadReplyError: It is malformed.
        """
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(event, dict) or not isinstance(choices, list):
            raise BadReplyError(f"the event has no choices: {str(event)[:200]}")
        for choice in choices:
            self._choice(event, choice, pieces[self._index(choice, 0, pieces)], "delta")

    def _index(self, choice: JsonValue, position: int, pieces: Sequence[PartialSample]) -> int:
        index = choice.get("index", position) if isinstance(choice, dict) else None
        if not isinstance(index, int) or not 0 <= index < len(pieces):
            raise BadReplyError(f"choices: got index {index!r}, expected 0 to {len(pieces) - 1}")
        return index

    def _choice(self, reply: dict[str, Any], choice: dict[str, Any], piece: PartialSample, inner: str) -> None:
        message = choice.get(inner)
        logprobs = choice.get("logprobs") or {}
        values: Any
        tokens: Any
        ids: Any
        if "content" in logprobs:  # of a chat
            entries = logprobs["content"] or []
            values, tokens = [entry.get("logprob") for entry in entries], [entry.get("token") for entry in entries]
            ids = [entry.get("id") for entry in entries] if entries and "id" in entries[0] else None
        else:
            values, tokens, ids = logprobs.get("token_logprobs"), logprobs.get("tokens") or [], None
        token_ids = choice.get("token_ids")
        text = choice.get("text") if message is None else message.get("content")
        piece.append(token_ids if token_ids is not None else ids, values, text)
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
    """Add a streamed part to a chat message: texts are concatenated, tool calls by their index."""
    joined = dict(message or {"role": "assistant", "content": ""})
    for name, value in delta.items():
        if name == "tool_calls":
            calls = [dict(call) for call in joined.get("tool_calls", ())]
            for entry in value or ():
                at = entry.get("index", len(calls))
                if at >= len(calls):
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[at] = {**calls[at], **{k: v for k, v in entry.items() if k in ("id", "type") and v}}
                inner = entry.get("function") or {}
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
    """`transformers serve`, which takes and returns text only."""

    name = "transformers-serve"
    takes_ids = False
    supported = frozenset()
    shared_requests = False
    limitations = (
        "token ids, and log-probs: replies have none, and requests for them are ignored",
        "prompts as token ids: they are rejected, so unfinished samples cannot be continued",
    )
    ids_from = "serve the model with vLLM or SGLang, which do, or use TransformersEngine in this process"
    logprobs_from = ids_from

    def body(self, request: ServerRequest) -> dict[str, Any]:
        # It rejects unknown fields and ignores some known ones.
        left_out = {"n", "presence_penalty", "frequency_penalty"}
        return {name: value for name, value in self._common_body(request).items() if name not in left_out}


class VLLM(Dialect):
    """vLLM from 0.10.2 on: token ids with every reply, all options, n samples per request.

    Sample k of a request has seed `seed + k`. Log-probs are `raw` unless the server was started with
    `--logprobs-mode processed_logprobs`, which is not reported: then set `logprobs_kind="processed"`.
    """

    name = "vllm"
    gives_ids = True
    logprobs_kind: ClassVar[LogprobsKind | None] = "raw"
    supported = frozenset(_SAMPLING_OPTIONS)
    limitations = (
        "log-probs of another kind than the server's --logprobs-mode (raw unless logprobs_kind= says otherwise)",
        "continuing a sample with images: only token ids are sent again",
    )
    ids_from = "vLLM gives them from 0.10.2 on (return_token_ids)"
    logprobs_from = "vLLM gives them when it is asked (logprobs), unless extra= or a proxy takes that out"
    interval = 8
    """Tokens per event of a stream. Smaller events are slower; a cancel loses fewer tokens than this."""

    def shares_request(self, sampling: Sampling) -> bool:
        first = sampling.temperature if sampling.first_temperature is None else sampling.first_temperature
        return first > 0  # a greedy request must have n = 1

    def seed_of(self, seed: int, k: int) -> int:
        return seed + k

    def body(self, request: ServerRequest) -> dict[str, Any]:
        sampling = request.sampling
        body = self._common_body(request) | {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "min_tokens": request.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "include_stop_str_in_output": sampling.include_stop,
            "ignore_eos": sampling.ignore_eos,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        if sampling.logprobs is not None:
            body |= {"logprobs": 0} if request.messages is None else {"logprobs": True, "top_logprobs": 0}
        if request.stream:
            body["stream_interval"] = self.interval
        return body


def resolve_logprobs_kind(
    true: LogprobsKind | None, sampling: Sampling, constrained: bool = False
) -> LogprobsKind | None:
    """Return the kind of a server's log-probs: the requested one if both are equal, else the actual one.

    Without truncation and at temperature 1 all kinds are equal; at temperature 0 servers return raw log-probs.

    Args:
        true: Kind that the server returns, if known.
        sampling: Sampling options, with the requested kind.
        constrained: Whether a grammar excludes tokens before sampling; log-probs are then `processed` or unknown.

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


class SGLang(Dialect):
    """SGLang's `/generate`, which takes ids and returns (log-prob, id) pairs. Its OpenAI endpoints return no ids.

    Log-probs are after temperature and before truncation; for a server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 set
    `logprobs_kind="raw"`. Seeds require `--enable-deterministic-inference`.
    """

    name = "sglang"
    gives_ids = True
    chats = "local"
    tokenizes = True
    media = False
    logprobs_kind: ClassVar[LogprobsKind | None] = "tempered"
    supported = frozenset(_SAMPLING_OPTIONS)
    shared_requests = False
    largest_seed = 2**31 - 1
    limitations = (
        "the prompt ids of a chat: give a tokenizer, which renders it here",
        "the prompt ids of a prompt with images",
        "tool calls as messages: they are in the text",
        "equal samples from equal seeds, unless the server runs with --enable-deterministic-inference",
        "log-probs after truncation, or before temperature",
    )
    ids_from = "SGLang gives them by /generate, which a server or a proxy of another kind may lack"
    logprobs_from = "SGLang gives them by /generate (return_logprob)"

    def path(self, request: ServerRequest) -> str:
        return "/generate"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        options = request.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.min_tokens,
            "temperature": request.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(options.stop),
            "stop_token_ids": list(options.stop_token_ids),
            "ignore_eos": options.ignore_eos,
            "no_stop_trim": options.include_stop,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        if options.suppress:
            sampling["logit_bias"] = {str(token): -100 for token in options.suppress}
        return {
            "input_ids": list(request.ids or ()),
            "sampling_params": sampling,
            "return_logprob": options.logprobs is not None,
            "stream": request.stream,
        }

    def read_reply(self, reply: JsonValue, pieces: Sequence[PartialSample]) -> None:
        self.read_event(reply, pieces)
        if pieces[0].finish is None:
            raise BadReplyError("finish_reason: missing")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        (piece,) = pieces
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(event, dict) or not isinstance(meta, dict):
            raise BadReplyError(f"the reply has no meta_info: {str(event)[:200]}")
        pairs, ids, text = meta.get("output_token_logprobs"), event.get("output_ids"), event.get("text") or ""
        if pairs is not None:
            if any(not isinstance(pair, list) or len(pair) < 2 for pair in pairs):
                raise BadReplyError(f"output_token_logprobs: got {str(pairs)[:80]}, expected [log-prob, id, text] each")
            ids = [pair[1] for pair in pairs]
        done = meta.get("completion_tokens")
        if len(ids or ()) == done:  # all tokens so far; otherwise only new ones
            piece.ids, piece.logprobs, piece.text = None, None, ""
        piece.append(ids, None if pairs is None else [pair[0] for pair in pairs], text)
        version = parse_version(meta.get("weight_version"))
        if version is not None and piece.ids:
            start = piece.spans[-1][2] if piece.spans else 0
            piece.spans.append((version, start, max(start, len(piece.ids))))
        finish = meta.get("finish_reason")
        if isinstance(finish, dict):
            piece.finish = finish.get("type")
            piece.stop = finish.get("matched")
            if piece.finish == "abort" and finish.get("status_code"):
                raise BadReplyError(f"the server aborted the request: {str(finish.get('message'))[:300]}")


class LlamaCpp(Dialect):
    """llama.cpp's `/completion`, which takes ids and returns ids and raw log-probs.

    Chats are rendered by `/apply-template` and sent as ids. Chats with tools are sent to the chat endpoint, whose
    log-probs have ids.
    """

    name = "llama.cpp"
    gives_ids = True
    chats = "template"
    tokenizes = True
    media = False
    trims_stop = True
    logprobs_kind: ClassVar[LogprobsKind | None] = "raw"
    supported = frozenset({"top_k", "min_p", "ignore_eos", "suppress"})
    shared_requests = False
    largest_seed = 2**32 - 2  # the next value means a random seed
    limitations = (
        "stop token ids and a minimum number of tokens (stop_token_ids, min_tokens)",
        "the prompt ids of a prompt with images",
        "log-probs of another kind than raw",
    )
    ids_from = "llama.cpp gives them from the end of 2024 on (return_tokens)"
    logprobs_from = "llama.cpp gives them from the end of 2024 on (n_probs)"

    def path(self, request: ServerRequest) -> str:
        return "/completion" if request.messages is None else "/v1/chat/completions"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop),
            "stream": request.stream,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if sampling.suppress:
            body["logit_bias"] = [[token, False] for token in sampling.suppress]
        if request.messages is not None:
            chat = {
                "messages": list(request.messages),
                "max_tokens": request.max_tokens,
                "logprobs": True,
                "top_logprobs": 1,
            }
            return body | chat | ({} if request.tools is None else {"tools": list(request.tools)})
        body |= {"prompt": list(request.ids or ()), "n_predict": request.max_tokens, "return_tokens": True}
        # Complete replies lack the log-probs of the stop text's tokens, streamed ones have them.
        body["stream"] = request.stream or bool(sampling.stop)
        return body | ({} if sampling.logprobs is None else {"n_probs": 1})

    async def tokenize(self, model: str, text: str | None, chat: Mapping[str, Any], json: PostJson) -> Any:
        if chat:
            text = (await json("/apply-template", chat)).get("prompt")
        return (await json("/tokenize", {"content": text, "add_special": False, "parse_special": True})).get("tokens")

    def read_reply(self, reply: JsonValue, pieces: Sequence[PartialSample]) -> None:
        if isinstance(reply, dict) and "choices" in reply:
            super().read_reply(reply, pieces)
            return
        self.read_event(reply, pieces)
        if pieces[0].finish is None:
            raise BadReplyError("stop_type: missing")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        (piece,) = pieces
        if isinstance(event, dict) and "choices" in event:
            super().read_event(event, pieces)
            return
        if not isinstance(event, dict) or "content" not in event:
            raise BadReplyError(f"the reply has no content: {str(event)[:200]}")
        entries = event.get("completion_probabilities")
        piece.append(event.get("tokens"), [e.get("logprob") for e in entries] if entries else None, event["content"])
        if event.get("stop"):
            reason = event.get("stop_type")
            piece.finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(str(reason))
            piece.stop = event.get("stopping_word") or None
