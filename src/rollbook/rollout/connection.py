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
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rollbook.core.addresses import redacted, without_user
from rollbook.core.checks import check_float, check_int
from rollbook.core.retry import RETRIED, Backoff, asked_wait
from rollbook.rollout.content import scrubbed

if TYPE_CHECKING:
    import httpx

Found = TypeVar("Found")


class ServerError(RuntimeError):
    """A server's refusal, with its HTTP `status`, or its silence after all tries."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class BadReply(ServerError):
    """A reply that is not what was asked for; asking again would give the same."""


class Again(Exception):
    """What may succeed when it is asked again, and how long the server asks to wait."""

    def __init__(self, text: str, wait: float = 0.0, status: int | None = None) -> None:
        super().__init__(text)
        self.wait = wait
        self.status = status


class Connection:
    """A server at `url`. The loop and its thread begin with the first request, and end with `close`, with the last
    reference to this, or with the program, whichever is first.

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
        told = [value for value in self._headers.values() if len(value) > 5]  # a "1" is no secret
        self._secrets = [api_key or "", parts.password or "", (self._auth or ("", ""))[1], *told]
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._clients: list[httpx.AsyncClient] = []  # one, once it is needed
        self._ended: weakref.finalize[Any, Connection] | None = None
        self._slots: asyncio.Semaphore | None = None
        self._closed = False

    # --- the loop -----------------------------------------------------------------------------------------------------

    def submit(self, work: Coroutine[Any, Any, Found]) -> concurrent.futures.Future[Found]:
        """Start something in the loop, from any thread."""
        with self._lock:
            if self._closed:
                work.close()
                raise ValueError("engine: got a call after close(), expected a new engine")
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_running, args=(self._loop,), name="rollbook-http", daemon=True)
                self._thread.start()
                # Not a method: it must not keep this alive. It runs before modules are taken apart at the end of the
                # program, when what is under way could no longer be ended.
                self._ended = weakref.finalize(self, _end, self._loop, self._thread, self._clients)
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

    def clean(self, text: str) -> str:
        """Words that may be recorded."""
        return scrubbed(text, self._secrets)

    async def json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        once: bool = False,
        again: Callable[[], None] = lambda: None,
    ) -> Any:
        """A small question's answer: a GET, or a POST of `body`; `once` and `again`: see `tried`."""

        async def attempt() -> Any:
            async with self.opened(path, body) as response:
                return parsed(await response.aread())

        return await self.tried(attempt, again, once)

    @contextlib.asynccontextmanager
    async def opened(
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
                        said: Any = json.loads(raw)
                    except ValueError:
                        said = raw.decode("utf-8", "replace")
                    raise refused(response.status_code, said, asked_wait(response.headers))
                yield response
        except httpx.RequestError as error:
            raise Again(f"{where}: {type(error).__name__}: {error}".rstrip(": ")) from None
        except (Again, ServerError) as error:
            error.args = (f"{where}: {error}",)
            raise

    async def tried(
        self, attempt: Callable[[], Awaitable[Found]], again: Callable[[], None] = lambda: None, once: bool = False
    ) -> Found:
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
            except Again as error:
                passing = error
            wait = next(waits, None)
            if wait is None:
                times = f" (tried {tries} times)" if tries > 1 else ""
                raise ServerError(f"{self.clean(str(passing))}{times}", passing.status)
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


def _running(loop: asyncio.AbstractEventLoop) -> None:
    """A connection's thread."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, clients: list[httpx.AsyncClient]) -> None:
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
    """The error for a status that is not 200 (`None`: a reply that does not say it): one to try again, or final."""
    for _ in range(3):  # servers put their words at various depths
        if isinstance(said, Mapping):
            said = next((said[key] for key in ("error", "message", "detail") if said.get(key)), str(dict(said)))
    known = status if isinstance(status, int) else None
    text = str(said) if status is None else f"status {status}: {said}"
    return Again(text, wait, known) if status in RETRIED else ServerError(text, known)


def parsed(data: bytes) -> Any:
    """JSON, or an error that shows how it begins.

    >>> parsed(b'{"a": 1}')
    {'a': 1}
    """
    try:
        return json.loads(data)
    except ValueError:
        raise BadReply(f"the reply is not JSON: {data[:80].decode('utf-8', 'replace')!r}") from None
