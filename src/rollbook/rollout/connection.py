"""`Connection`: one server's HTTP, in an event loop of its own: bounded, tried again where that is right, and closed.

Invariant: no more than `concurrency` requests are under way, whoever asks; every failure is a `ServerError` whose words
hold no secret and no media payload.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rollbook.algorithms.registry import number, whole_number
from rollbook.retry import RETRIED, Backoff, asked_wait
from rollbook.rollout.content import scrubbed

if TYPE_CHECKING:
    import httpx

Found = TypeVar("Found")


class ServerError(RuntimeError):
    """A server's refusal, or its silence after all tries."""


class BadReply(ServerError):
    """A reply that is not what was asked for; asking again would give the same."""


class Again(Exception):
    """What may succeed when it is asked again, and how long the server asks to wait."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class Connection:
    """A server at `url`. The loop and its thread begin with the first request.

    >>> connection = Connection("http://user:word@127.0.0.1:8000/v1/", concurrency=2)
    >>> connection.url, connection.clean("a word for user")
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
            raise ValueError(f"url: got {url!r}, expected one such as 'http://127.0.0.1:8000'")
        bare = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, bare, parts.path.rstrip("/").removesuffix("/v1"), "", ""))
        self.backoff = backoff if backoff is not None else Backoff()
        self.timeout = number("timeout", timeout, 1e-3, 1e9)
        self.concurrency = whole_number("concurrency", concurrency, 1)
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._auth = (parts.username, parts.password or "") if parts.username else None
        told = [value for value in self._headers.values() if len(value) > 5]  # a "1" is no secret
        self._secrets = [api_key or "", parts.password or "", *told]
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._closed = False

    # --- the loop -----------------------------------------------------------------------------------------------------

    def submit(self, work: Coroutine[Any, Any, Found]) -> concurrent.futures.Future[Found]:
        """Start something in the loop, from any thread."""
        with self._lock:
            if self._closed:
                work.close()
                raise ValueError("engine: got a call after close(), expected a new engine")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="rollbook-http", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End what is under way, close the connections and join the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            self._closed = True
        if loop is None or thread is None:
            return

        async def end() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            if self._client is not None:
                await self._client.aclose()

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    # --- requests, in the loop ----------------------------------------------------------------------------------------

    def clean(self, text: str) -> str:
        """Words that may be recorded."""
        return scrubbed(text, self._secrets)

    async def json(self, path: str, body: Mapping[str, Any] | None = None, once: bool = False) -> Any:
        """A small question's answer: a GET, or a POST of `body`; `once`: not tried again."""

        async def attempt() -> Any:
            async with self.opened(path, body) as response:
                return parsed(await response.aread())

        return await self.tried(attempt, once=once)

    @contextlib.asynccontextmanager
    async def opened(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A reply of status 200, to be read in whole or as it comes; another status is raised."""
        client = self._http()
        method = "GET" if body is None else "POST"
        limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        async with client.stream(method, path, json=body, **limit) as response:
            if response.status_code != 200:
                raw = await response.aread()
                try:
                    said: Any = json.loads(raw)
                except ValueError:
                    said = raw.decode("utf-8", "replace")
                raise refused(response.status_code, said, asked_wait(response.headers))
            yield response

    async def tried(
        self, attempt: Callable[[], Awaitable[Found]], again: Callable[[], None] = lambda: None, once: bool = False
    ) -> Found:
        """What `attempt` gives, if need be after several tries; `again` is called before each further one."""
        import httpx

        if self._slots is None:
            self._slots = asyncio.Semaphore(self.concurrency)
        waits, tries = iter(()) if once else self.backoff.waits(), 0
        while True:
            tries += 1
            try:
                async with self._slots:
                    return await attempt()
            except httpx.TransportError as error:
                passing = Again(f"{type(error).__name__}: {error}")
            except Again as error:
                passing = error
            wait = next(waits, None)
            if wait is None:
                raise ServerError(f"{self.url}: {self.clean(str(passing))} (tried {tries} times)")
            again()
            await asyncio.sleep(max(wait, passing.wait))

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx

            most = self.concurrency + 1
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                auth=self._auth,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                timeout=httpx.Timeout(self.timeout, pool=None),
            )
        return self._client


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a streamed reply; one that tells an error is raised.

    The reply is read to its end, past its `[DONE]`, so that the connection can be used again.
    """
    async for line in _lines(response):
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data and data != b"[DONE]":
            event = parsed(data)
            if isinstance(event, dict) and event.get("error"):
                error = event["error"]
                raise refused(error.get("code") if isinstance(error, dict) else None, event, 0.0)
            yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines that end in a line feed and nothing else: a model's text may hold other characters that count as the end of
    a line (U+0085, U+2028), which httpx's own lines would be cut at."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
    yield rest


def refused(status: Any, said: Any, wait: float) -> Exception:
    """The error for a status that is not 200: one to try again, or one that is final."""
    for _ in range(3):  # servers put their words at various depths
        if isinstance(said, Mapping):
            said = next((said[key] for key in ("error", "message", "detail") if said.get(key)), str(dict(said)))
    text = f"status {status}: {said}"
    return Again(text, wait) if status in RETRIED else ServerError(text)


def parsed(data: bytes) -> Any:
    """JSON, or an error that shows how it begins.

    >>> parsed(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(data)
    except ValueError:
        raise BadReply(f"the reply is not JSON: {data[:80].decode('utf-8', 'replace')!r}") from None
