"""The viewer as an ASGI application, for uvicorn or to mount in another application.

Invariant: requests are answered by the same `Api`, with the same rules, as behind the viewer's own server. It works in
threads, so the event loop never waits for a file; everything that a request started ends with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, quote

from rollbook.inspect.api import MAX_BODY, Api, open_api
from rollbook.inspect.http import Guard, Request, Response, authorities, checked_token, failure, respond

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_THREADS = 48
"""More than the streams that may be open, each of which waits in one."""


def asgi_app(
    path: str | os.PathLike[str],
    *,
    token: str | None,
    port: int = 8000,
    trusted_hosts: Sequence[str] = (),
    tokenizer: Any = None,
    annotate: bool = False,
) -> AsgiViewer:
    """An application that shows `path`. `uvicorn my_module:app` serves it, where `app = asgi_app("runs/letters", ...)`.

    `token` None: whoever mounts it lets nobody in whom it should not. `port`: where the server listens, and
    `trusted_hosts`: the names under which browsers see it ("viewer.example", "viewer.example:8443"); a request for
    another name is refused.
    """
    if token is not None:
        checked_token(token)
    guard = Guard(authorities(port, "localhost", trusted_hosts), token)
    return AsgiViewer(open_api(path, guard, tokenizer=tokenizer, annotate=annotate))


class AsgiViewer:
    """The callable. It opens its source at once and closes it when the server says that it ends (`lifespan`), or by
    `close`, where it is mounted in an application that keeps that message to itself."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._threads = ThreadPoolExecutor(_THREADS, "rollbook-viewer")

    def close(self) -> None:
        """End streams and threads, and close the source."""
        self.api.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                if message["type"] == "lifespan.shutdown":
                    await asyncio.get_running_loop().run_in_executor(None, self.close)
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            raise ValueError(f"scope: got {scope['type']!r}, expected http")
        try:
            request = _request(scope)
        except ValueError as error:
            await _send(failure(400, str(error)), send, b"")
            return
        answer = self.api.refuse(request)
        if answer is None and not request.path:
            # Without the slash the page would look for its files beside itself.
            answer = respond(308, b"", "text/plain", ("Location", quote(scope["root_path"].rstrip("/")) + "/"))
        answer = answer or await self._body(request, receive)
        if answer is None:
            answer = await self._run(self.api.handle, request)
        if isinstance(answer.body, bytes):
            await _send(answer, send, b"" if request.method == "HEAD" else answer.body)
        else:
            await self._stream(answer, receive, send)

    async def _run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _body(self, request: Request, receive: Receive) -> Response | None:
        pieces: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return failure(400, "the request ended before its body did")
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > MAX_BODY:
                return failure(413, f"the request has more than {MAX_BODY} bytes")
            more = message.get("more_body", False)
        request.body = b"".join(pieces)
        return None

    async def _stream(self, answer: Response, receive: Receive, send: Send) -> None:
        stream = answer.body
        if isinstance(stream, bytes):
            raise ValueError("answer: got bytes, expected a stream")
        await send({"type": "http.response.start", "status": answer.status, "headers": _headers(answer)})
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            while not gone.done():
                piece = await self._run(next, stream, None)
                if piece is None:
                    await send({"type": "http.response.body", "body": b""})
                    return
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            gone.cancel()
            stream.close()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request(scope: Scope) -> Request:
    path = scope["path"]
    root = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    query = parse_qsl(
        scope.get("query_string", b"").decode("ascii"), keep_blank_values=True, max_num_fields=256, errors="strict"
    )
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    peer = (scope.get("client") or ("",))[0]
    return Request(scope["method"], path, query, headers, peer=peer, scheme=scope.get("scheme", "http"))


def _headers(answer: Response) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]


async def _send(answer: Response, send: Send, body: bytes) -> None:
    headers = _headers(answer)
    if isinstance(answer.body, bytes) and answer.status not in (204, 304):
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
