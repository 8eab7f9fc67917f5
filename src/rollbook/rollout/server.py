"""Connections to inference servers, and the OpenAI-compatible API (`ServerApi`) with the variants of vLLM and
`transformers serve`. The native APIs are in `sglang.py` and `llama_cpp.py`.

Invariant: at most `concurrency` requests are in flight; every failure is a `ServerError` whose message contains no
secret and no media payload. A `ServerApi` sends every option that shapes the distribution, so that no default of the
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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar
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
    """Raised when a server rejects a request, with its HTTP `status`, or does not reply.

    Args:
        text: The message.
        status: HTTP status of the reply; `None` without one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class BadReplyError(ServerError):
    """Raised when a reply is malformed. It is not retried."""


class RetryableError(RollbookError):
    """Raised when a request failed but may be retried.

    Args:
        text: The message.
        wait: Seconds that the server asks to wait.
        status: HTTP status of the reply; `None` without one.
    """

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
        """Start a coroutine in the loop, from any thread.

        Args:
            work: The coroutine.

        Returns:
            Its future.

        Raises:
            ValueError: The loop was closed, or its thread ended in a fork.
        """
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
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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
        host = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, host, parts.path.rstrip("/").removesuffix("/v1"), "", ""))
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
        """Remove secrets and media payloads from a text.

        Args:
            text: The text, such as an error message of the server.
        """
        return redact_secrets(text, self._secrets)

    async def json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        on_retry: Callable[[], None] = lambda: None,
        once: bool = False,
    ) -> Any:
        """Request JSON by GET, or by POST if there is a body.

        Args:
            path: Path on the server.
            body: Body of a POST.
            on_retry: Called before each retry.
            once: Whether to try only once.

        Returns:
            The parsed reply.

        Raises:
            ServerError: The last attempt failed.
        """

        async def attempt() -> Any:
            async with self.open(path, body) as response:
                return parse_json(await response.aread())

        return await self.retry(attempt, on_retry, once)

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and open its reply, to be read completely or as a stream.

        Args:
            path: Path on the server.
            body: Body of a POST; `None` for a GET.
            timeout: Seconds without a byte; by default that of the connection.

        Raises:
            RetryableError: The connection failed, or the status may be retried.
            ServerError: The server replied with another status than 200. Messages name the method and the URL.
        """
        import httpx

        client = self._http()
        method = "GET" if body is None else "POST"
        endpoint = f"{method} {self.url}{path}"
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            async with client.stream(method, path, json=body, **options) as response:
                if response.status_code != 200:
                    raw = await response.aread()
                    try:
                        body_text: Any = json.loads(raw)
                    except ValueError:
                        body_text = raw.decode("utf-8", "replace")
                    raise status_error(response.status_code, body_text, parse_retry_after(response.headers))
                yield response
        except httpx.RequestError as error:
            raise RetryableError(f"{endpoint}: {type(error).__name__}: {error}".rstrip(": ")) from None
        except (RetryableError, ServerError) as error:
            error.args = (f"{endpoint}: {error}",)
            raise

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], on_retry: Callable[[], None] = lambda: None, once: bool = False
    ) -> T:
        """Call `attempt` until it succeeds.

        Args:
            attempt: Sends the request and reads its reply.
            on_retry: Called before each retry.
            once: Whether to try only once.

        Returns:
            The result of `attempt`.

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
                failure = error
            wait = next(waits, None)
            if wait is None:
                times = f" (tried {tries} times)" if tries > 1 else ""
                raise ServerError(f"{self.redact(str(failure))}{times}", failure.status)
            on_retry()
            await asyncio.sleep(max(wait, failure.wait))

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            connections = self.concurrency + 1
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                auth=self._auth,
                limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
                timeout=httpx.Timeout(self.timeout, pool=None),
            )
            self.loop.closers.append(self._client.aclose)
        return self._client


async def read_events(response: httpx.Response) -> AsyncIterator[Any]:
    """Yield the events of a streamed reply.

    The reply is read to its end, after `[DONE]`, so that the connection can be reused.

    Args:
        response: The reply.

    Raises:
        RetryableError: The server sent an error that may be retried.
        ServerError: The server sent another error, or an event that is not JSON.
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
    """Parse a reply.

    Args:
        data: Bytes of the reply.

    Returns:
        The JSON value.

    Raises:
        BadReplyError: The bytes are not JSON.

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

        Args:
            ids: [n] Token ids; `None` if the server returns none.
            logprobs: [n] Log-probs; `None` if the server returns none.
            text: Text of the tokens.

        Raises:
            BadReplyError: A value is malformed.
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
        """Return the version of each token: that of the server if it returned one, else that at the request.

        Returns:
            [R] Versions.
        """
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
    """Parse the weight version of a reply.

    Args:
        text: The version, if the reply has one.

    Returns:
        The version as a number; `None` if it is not a number.

    >>> parse_version("12"), parse_version("default")
    (12, None)
    """
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


OPTIONAL_SAMPLING = ("min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "suppress")
"""Options of `Sampling` that not every server has."""


class ServerApi:
    """API of a kind of server: bodies of requests, and how replies are read. This class is the plain OpenAI API.

    >>> ServerApi().path(ServerRequest(model="m", sampling=Sampling(), max_tokens=1, min_tokens=0, temperature=1.0))
    '/v1/completions'
    """

    name: ClassVar[str] = "openai"
    takes_ids: ClassVar[bool] = True
    """Whether prompts can be sent as token ids."""
    returns_ids: ClassVar[bool] = False
    """Whether replies contain token ids."""
    chat_rendering: ClassVar[Literal["server", "template", "local"]] = "server"
    """Where chats are rendered: by the `server`, by its `template` endpoint, or by the tokenizer here (`local`)."""
    tokenizes: ClassVar[bool] = False
    """Whether texts are tokenized by the server first, since its replies do not contain the prompt ids."""
    takes_media: ClassVar[bool] = True
    """Whether chats may contain images and videos."""
    trims_stop: ClassVar[bool] = False
    """Whether texts never include the stop text, which is returned separately."""
    logprobs_kind: ClassVar[LogprobsKind | None] = None
    """Kind of the log-probs, if known."""
    supported: ClassVar[frozenset[str]] = frozenset({"suppress"})
    """Supported options of `OPTIONAL_SAMPLING`."""
    shares_requests: ClassVar[bool] = True
    """Whether one request is for all n samples, if it has no seed, which they would share."""
    largest_seed: ClassVar[int] = 2**63 - 1
    """Largest seed that the server accepts."""
    limitations: ClassVar[tuple[str, ...]] = (
        "token ids: plain OpenAI replies have none (retokenize=True tokenizes their texts, and records it)",
        "log-probs of a known distribution: set logprobs_kind=",
    )
    """What the server cannot do, for `RunInfo`."""
    ids_hint: ClassVar[str] = "serve the model with vLLM or SGLang, which do"
    """How to get token ids, for the error about a reply without them."""
    logprobs_hint: ClassVar[str] = "serve the model with vLLM or SGLang, which do"
    """How to get log-probs, for the error about a reply without them."""

    def check_options(self, sampling: Sampling) -> None:
        """Check that the server supports all options.

        Args:
            sampling: The options.

        Raises:
            ValueError: An option is not supported.
        """
        defaults = Sampling()
        for option in OPTIONAL_SAMPLING:
            setting = getattr(sampling, option)
            if setting != getattr(defaults, option) and option not in self.supported:
                raise ValueError(f"{option}: got {setting!r}, but {self.name} servers have no such option")

    def shares_request(self, sampling: Sampling) -> bool:
        """Return whether one request is for all n samples.

        Args:
            sampling: Sampling options of the prompt.
        """
        return self.shares_requests and sampling.seed is None

    def sample_seed(self, seed: int, k: int) -> int:
        """Return the seed of sample k of a shared request.

        Args:
            seed: Seed of the request.
            k: Index of the sample.
        """
        return seed

    async def tokenize(self, model: str, text: str | None, chat: Mapping[str, Any], post: PostJson) -> Any:
        """Request the token ids of a text or a chat from the server.

        Args:
            model: Name of the model.
            text: The text; `None` for a chat.
            chat: `messages` and `tools` of a chat; empty for a text.
            post: Sends the requests.

        Returns:
            The ids as the server returned them.

        Raises:
            ServerError: A request failed.
        """
        content = chat or {"prompt": text}
        return (await post("/tokenize", {"model": model, "add_special_tokens": False, **content})).get("tokens")

    def has_grammar(self, sampling: Sampling) -> bool:
        """Return whether the options request a grammar, which affects log-probs.

        Args:
            sampling: Sampling options of the prompt.
        """
        return any(
            name in ("response_format", "structured_outputs", "grammar", "json_schema") or name.startswith("guided_")
            for name, option in sampling.extra.items()
            if option is not None
        ) or sampling.extra.get("tool_choice") not in ("auto", "none", None)

    def path(self, request: ServerRequest) -> str:
        """Return the path of a request.

        Args:
            request: The request.
        """
        return "/v1/completions" if request.messages is None else "/v1/chat/completions"

    def body(self, request: ServerRequest) -> dict[str, Any]:
        """Return the body of a request, without the fields of `Sampling.extra`.

        Args:
            request: The request.
        """
        body = self._common_body(request)
        if request.sampling.logprobs is not None:
            body |= {"logprobs": 1} if request.messages is None else {"logprobs": True}
        return body

    def payload(self, request: ServerRequest) -> dict[str, Any]:
        """Return the body of a request with the fields of `Sampling.extra`, where `None` removes a field.

        Args:
            request: The request.
        """
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

        Args:
            reply: The reply.
            pieces: The samples of the request.

        Raises:
            BadReplyError: The reply is malformed.
        """
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(reply, dict) or not isinstance(choices, list):
            raise BadReplyError(f"the reply has no choices: {str(reply)[:200]}")
        if len(choices) != len(pieces):
            raise BadReplyError(f"choices: got {len(choices)}, expected {len(pieces)}")
        for i, choice in enumerate(choices):
            self._add_choice(reply, choice, pieces[self._sample_index(choice, i, len(pieces))], "message")
        if sum(piece.finish is not None for piece in pieces) != len(pieces):
            raise BadReplyError("choices: missing finish_reason or repeated index")

    def read_event(self, event: JsonValue, pieces: Sequence[PartialSample]) -> None:
        """Add an event of a streamed reply to its samples.

        Args:
            event: The event.
            pieces: The samples of the request.

        Raises:
            BadReplyError: The event is malformed.
        """
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(event, dict) or not isinstance(choices, list):
            raise BadReplyError(f"the event has no choices: {str(event)[:200]}")
        for choice in choices:
            self._add_choice(event, choice, pieces[self._sample_index(choice, 0, len(pieces))], "delta")

    def _sample_index(self, choice: JsonValue, default: int, count: int) -> int:
        index = choice.get("index", default) if isinstance(choice, dict) else None
        if not isinstance(index, int) or not 0 <= index < count:
            raise BadReplyError(f"choices: got index {index!r}, expected 0 to {count - 1}")
        return index

    def _add_choice(
        self, reply: dict[str, Any], choice: dict[str, Any], piece: PartialSample, key: Literal["message", "delta"]
    ) -> None:
        """Add a choice of a reply, or of an event, to its sample. The message of a chat is under `key`."""
        message = choice.get(key)
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
            piece.message = _join_delta(piece.message, message) if key == "delta" else dict(message)
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
    """Add a delta of a stream to a chat message: texts are concatenated, tool calls by their index."""
    joined = dict(message or {"role": "assistant", "content": ""})
    for name, addition in delta.items():
        if name == "tool_calls":
            calls = [dict(call) for call in joined.get("tool_calls", ())]
            for call_delta in addition or ():
                i = call_delta.get("index", len(calls))
                if i >= len(calls):
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[i] = {**calls[i], **{k: v for k, v in call_delta.items() if k in ("id", "type") and v}}
                function = call_delta.get("function") or {}
                call["function"] = {
                    key: call["function"].get(key, "") + (function.get(key) or "") for key in ("name", "arguments")
                }
            if calls:
                joined["tool_calls"] = calls
        elif isinstance(addition, str) and name != "role":
            joined[name] = (joined.get(name) or "") + addition
        elif addition is not None:
            joined[name] = addition
    return joined


class TransformersServeApi(ServerApi):
    """API of `transformers serve`, which takes and returns text only."""

    name = "transformers-serve"
    takes_ids = False
    supported = frozenset()
    shares_requests = False
    limitations = (
        "token ids, and log-probs: replies have none, and requests for them are ignored",
        "prompts as token ids: they are rejected, so unfinished samples cannot be continued",
    )
    ids_hint = "serve the model with vLLM or SGLang, which do, or use TransformersEngine in this process"
    logprobs_hint = ids_hint

    def body(self, request: ServerRequest) -> dict[str, Any]:
        # It rejects unknown fields and ignores some known ones.
        unsupported = {"n", "presence_penalty", "frequency_penalty"}
        return {name: setting for name, setting in self._common_body(request).items() if name not in unsupported}


class VllmApi(ServerApi):
    """API of vLLM from 0.10.2 on: token ids with every reply, all options, n samples per request.

    Sample k of a request has seed `seed + k`. Log-probs are `raw` unless the server was started with
    `--logprobs-mode processed_logprobs`, which is not reported: then set `logprobs_kind="processed"`.
    """

    name = "vllm"
    returns_ids = True
    logprobs_kind: ClassVar[LogprobsKind | None] = "raw"
    supported = frozenset(OPTIONAL_SAMPLING)
    limitations = (
        "log-probs of another kind than the server's --logprobs-mode (raw unless logprobs_kind= says otherwise)",
        "continuing a sample with images: only token ids are sent again",
    )
    ids_hint = "vLLM returns them from 0.10.2 on (return_token_ids)"
    logprobs_hint = "vLLM returns them if they are requested (logprobs), unless extra= or a proxy removes the request"
    stream_interval = 8
    """Tokens per event of a stream. Smaller events are slower; a cancel loses fewer tokens than this."""

    def shares_request(self, sampling: Sampling) -> bool:
        first = sampling.temperature if sampling.first_temperature is None else sampling.first_temperature
        return first > 0  # a greedy request must have n = 1

    def sample_seed(self, seed: int, k: int) -> int:
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
            body["stream_interval"] = self.stream_interval
        return body


def resolve_logprobs_kind(
    actual: LogprobsKind | None, sampling: Sampling, constrained: bool = False
) -> LogprobsKind | None:
    """Return the kind of a server's log-probs: the requested one if both are equal, else the actual one.

    Without truncation and at temperature 1 all kinds are equal; at temperature 0 servers return raw log-probs.

    Args:
        actual: Kind that the server returns, if known.
        sampling: Sampling options, with the requested kind.
        constrained: Whether a grammar excludes tokens before sampling; log-probs are then `processed` or unknown.

    Returns:
        The kind to record; `None` if it is not known.

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
    untempered = temperatures == {1.0}
    excludes_tokens = sampling.needs_truncation() or bool(sampling.suppress or sampling.min_tokens)
    if constrained:
        is_processed = actual == "processed" or (actual is not None and untempered and not excludes_tokens)
        return "processed" if is_processed else None
    unprocessed = not excludes_tokens and not sampling.extra
    if actual is None:
        return requested if untempered and unprocessed else None
    if temperatures == {0.0} and unprocessed:
        actual = "raw"
    are_equal = {
        frozenset({"raw", "tempered"}): untempered,
        frozenset({"tempered", "processed"}): unprocessed,
        frozenset({"raw", "processed"}): untempered and unprocessed,
    }
    return requested if requested == actual or are_equal.get(frozenset({requested or "", actual})) else actual
