"""The viewer as an ASGI application, called as a server would call it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.inspect.serialization import decode
from rollbook.inspect.server import AsgiViewer, asgi_app
from tests.viewer import story
from tests.viewer.asking import SECONDS, Got

TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsgiViewer]:
    path = story.make(tmp_path_factory.mktemp("story") / "book", steps=2, evaluate=False)
    opened = asgi_app(path, token=TOKEN, port=8000, trusted_hosts=["viewer.example"])
    yield opened
    opened.close()


def scope(
    path: str, query: str = "", method: str = "GET", headers: list[tuple[str, str]] | None = None, **more: Any
) -> Any:
    sent_headers = [("Host", "127.0.0.1:8000"), ("Authorization", f"Bearer {TOKEN}")] if headers is None else headers
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent_headers],
        "client": ("127.0.0.1", 5000),
        "scheme": "http",
        **more,
    }


async def call(app: AsgiViewer, request: Any, *bodies: bytes) -> Got:
    incoming = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    incoming.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(app(request, receive, send), SECONDS)
    assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body")
    headers = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
    return Got(sent[0]["status"], headers, b"".join(message["body"] for message in sent[1:]))


def get(app: AsgiViewer, *arguments: Any, body: bytes = b"", **more: Any) -> Got:
    return asyncio.run(call(app, scope(*arguments, **more), *([body] if body else [])))


def test_it_answers_as_the_server_does(app: AsgiViewer) -> None:
    page = get(app, "/", headers=[("Host", "localhost:8000")])
    assert page.status == 200 and page.header("content-security-policy").startswith("default-src 'none'")
    assert page.header("content-length") == str(len(page.body))
    assert get(app, "/api/run").json["features"]["ledger"] is True
    assert (
        get(app, "/api/run", headers=[("Host", "viewer.example"), ("Authorization", f"Bearer {TOKEN}")]).status == 200
    )
    rows = get(app, "/api/list", "view=samples&limit=2").json["rows"]
    frame = get(app, "/api/frame", "&".join(f"uid={row['uid'].replace('/', '%2F')}" for row in rows))
    assert [trajectory["uid"] for trajectory in decode(frame.body)] == [row["uid"] for row in rows]
    assert get(app, "/static/../server.py").status == 404
    assert get(app, "/api/run", method="HEAD").body == b""
    assert get(app, "/api/run", "%ff=1").status == 400


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 421),
        ([("Host", "evil.example")], 421),
        ([("Host", "127.0.0.1:8000"), ("Host", "127.0.0.1:8000")], 421),
        ([("Host", "127.0.0.1:8000")], 401),
        ([("Host", "127.0.0.1:8000"), ("Origin", "http://evil.example")], 403),
        ([("Host", "127.0.0.1:8000"), ("Sec-Fetch-Site", "cross-site")], 403),
    ],
)
def test_it_has_the_same_guard(app: AsgiViewer, headers: list[tuple[str, str]], expected: int) -> None:
    assert get(app, "/api/run", headers=headers).status == expected


def test_bodies_are_read_in_pieces_and_bounded(app: AsgiViewer) -> None:
    headers = [("Host", "127.0.0.1:8000"), ("Authorization", f"Bearer {TOKEN}")]
    headers += [("Content-Type", "application/json"), ("X-Rollbook", "1")]
    request = scope("/api/sql", method="POST", headers=headers)
    response = asyncio.run(call(app, request, b'{"query": ', b'"select 7"}'))
    assert response.json["rows"] == [[7]]
    assert asyncio.run(call(app, request, b" " * (1 << 19), b" " * (1 << 19), b" ")).status == 413
    session = scope("/api/session", method="POST", headers=headers, scheme="https")
    assert asyncio.run(call(app, session, b"{}")).header("set-cookie").endswith("; Secure")


def test_mounted_under_a_path_it_finds_its_own(app: AsgiViewer) -> None:
    assert get(app, "/rollouts/api/run", root_path="/rollouts").status == 200
    page = get(app, "/rollouts/", root_path="/rollouts")
    assert page.header("content-type").startswith("text/html")
    for name in re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', page.body.decode()):
        assert get(app, f"/rollouts/{name}", root_path="/rollouts").status == 200, "addresses in the page are relative"
    bare = get(app, "/rollouts", root_path="/rollouts")
    assert (bare.status, bare.header("location")) == (308, "/rollouts/")
    assert get(app, "/api/run", root_path="/rollouts").status == 200, "a server may have taken the path away already"
    assert get(app, "/rolloutsx/api/run", root_path="/rollouts").status == 404


def test_events_stream_until_the_listener_goes(app: AsgiViewer) -> None:
    async def listen() -> list[Any]:
        sent: list[Any] = []
        left = asyncio.Event()
        started = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if started:
                return started.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.ensure_future(app(scope("/api/events"), receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        # Others are answered meanwhile: a stream holds no other up.
        assert (await call(app, scope("/api/run"))).status == 200
        left.set()
        await asyncio.wait_for(task, SECONDS)
        return sent

    sent = asyncio.run(listen())
    assert dict(sent[0]["headers"])[b"content-type"] == b"text/event-stream"
    assert sent[1] == {"type": "http.response.body", "body": b"retry: 3000\n\n", "more_body": True}
    assert app.api._streams._value == app.api._streams._initial_value  # type: ignore[attr-defined]


def test_a_server_that_ends_closes_it(tmp_path: Path) -> None:
    viewer = asgi_app(story.make(tmp_path / "book", steps=1, evaluate=False), token=None)
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def live() -> None:
        await viewer({"type": "lifespan"}, receive, send)

    index = viewer.api.answers.index.path
    assert index.exists() and get(viewer, "/api/run", headers=[("Host", "localhost:8000")]).status == 200
    asyncio.run(asyncio.wait_for(live(), SECONDS))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"] and not index.exists()


def test_other_kinds_of_scope_are_refused(app: AsgiViewer) -> None:
    async def nothing() -> Any:
        return {}

    with pytest.raises(ValueError, match="scope: got 'websocket'"):
        asyncio.run(app({"type": "websocket"}, nothing, lambda message: nothing()))
    with pytest.raises(ValueError, match="token: got"):
        asgi_app("nothing", token="short")
