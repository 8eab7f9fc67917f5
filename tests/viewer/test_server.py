"""The viewer's server over real sockets, on a real book: what it answers, whom, with which headers, and its limits.

Tests named after a point are those of the security notes, in their order.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.inspect import api as apis
from rollbook.inspect import html_export, server
from rollbook.inspect.api import ROUTES, Annotations, Request
from rollbook.inspect.images import image_type
from rollbook.inspect.serialization import decode
from rollbook.inspect.server import Server
from rollbook.inspect.workers import Workers
from tests.viewer import story
from tests.viewer.asking import SECONDS, Got, ask, connect, parsed, post, receive, send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    return story.make(tmp_path_factory.mktemp("story") / "book", steps=6)


@pytest.fixture(scope="module")
def viewer(book: str) -> Iterator[Server]:
    with Server(book) as running:
        settled(running)
        yield running


def settled(running: Server) -> dict[str, Any]:
    """What the run is once everything was read."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        run: dict[str, Any] = ask(running, "/api/run").json
        if run["records"] and run["progress"]["measured"] == run["progress"]["total"]:
            return run
        time.sleep(0.05)
    raise AssertionError(f"not read in {SECONDS} seconds: {run}")


@pytest.fixture(scope="module")
def rows(viewer: Server) -> list[dict[str, Any]]:
    return list(ask(viewer, "/api/list?view=samples&limit=200").json["rows"])


def quoted(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"%{byte:02X}" for letter in text for byte in letter.encode())


# --- what is answered ---------------------------------------------------------------------------------------------


def test_every_question_of_the_pages_is_answered(viewer: Server, rows: list[dict[str, Any]]) -> None:
    run = settled(viewer)
    assert run["features"]["export"] and not run["features"]["annotate"] and run["features"]["sql"]
    uid, gid = rows[0]["uid"], rows[0]["gid"]
    queries = {
        "/api/steps": "",
        "/api/findings": "",
        "/api/metrics": "?since=3",
        "/api/step": "?step=3&evaluation=0",
        "/api/list": "?view=groups&step=3&sort=-mean&offset=0&limit=5",
        "/api/group": f"?gid={quoted(gid)}",
        "/api/neighbors": f"?uid={quoted(uid)}",
        "/api/record": f"?uid={quoted(uid)}",
        "/api/history": f"?uid={quoted(uid)}",
        "/api/prompt": f"?prompt={rows[0]['prompt']}",
        "/api/compare": "?a=0-2&b=3-5",
        "/api/search": "?q=boxes&mode=substring&limit=5",
        "/api/annotations": "",
        "/api/run": "",
    }
    assert set(queries) == set(ROUTES), "every route is asked"
    for path, query in queries.items():
        response = ask(viewer, path + query)
        assert response.status == 200, (path, response.body)
        assert response.header("content-type") == "application/json"
        assert isinstance(response.json, dict)
    assert ask(viewer, f"/api/history?uid={quoted(uid)}").json["entries"][0]["kind"] == "admitted"
    assert ask(viewer, f"/api/record?uid={quoted(uid)}").json["uid"] == uid


def test_a_frame_holds_the_samples_in_their_order(viewer: Server, rows: list[dict[str, Any]]) -> None:
    uids = [row["uid"] for row in rows[:3]][::-1]
    response = ask(viewer, "/api/frame?" + "&".join(f"uid={quoted(uid)}" for uid in uids))
    assert response.status == 200 and response.header("content-type") == "application/octet-stream"
    assert [trajectory["uid"] for trajectory in decode(response.body)] == uids
    assert [trajectory["tokens"] for trajectory in decode(response.body)] == [row["length"] for row in rows[:3]][::-1]


def test_a_frame_is_kept_until_its_record_changes(tmp_path: Path) -> None:
    path = story.make(tmp_path / "book", steps=1, evaluate=False)
    with Server(path) as running:
        settled(running)
        uid = ask(running, "/api/list?view=samples&limit=1").json["rows"][0]["uid"]
        address = f"/api/frame?uid={quoted(uid)}"
        first = ask(running, address)
        tag = first.header("etag")
        again = ask(running, address, headers={"If-None-Match": f'"other", W/{tag}'})
        assert (again.status, again.body) == (304, b"")
        assert "no-cache" in first.header("cache-control"), "a browser asks each time, since revisions change records"
        with rollbook.open(path) as book:
            book.revise(uid, reward=0.125, author="ana")
        changed = ask(running, address, headers={"If-None-Match": tag})
        assert changed.status == 200 and changed.header("etag") != tag
        assert decode(changed.body)[0]["reward"] == 0.125


def test_static_files_are_the_packages_and_kept_by_hash(viewer: Server) -> None:
    for name, asset in html_export.load_assets().items():
        response = ask(viewer, f"/static/{name}", token=False)
        assert (response.status, response.header("content-type")) == (200, asset.type)
        assert hashlib.sha256(response.body).hexdigest() == asset.sha256
        assert ask(viewer, f"/static/{name}", headers={"If-None-Match": response.header("etag")}).status == 304
    assert ask(viewer, "/", token=False).body == html_export.load_assets()["index.html"].content


def test_large_json_is_packed_for_who_takes_it(viewer: Server) -> None:
    address = "/api/list?view=samples&limit=100"
    plain, packed = ask(viewer, address), ask(viewer, address, headers={"Accept-Encoding": "br, gzip;q=0.8"})
    assert packed.header("content-encoding") == "gzip" and len(packed.body) < len(plain.body) / 3
    taken = [{**document, "milliseconds": 0, "snapshot": ""} for document in (plain.json, packed_json(packed))]
    assert taken[0] == taken[1]
    refused = ask(viewer, address, headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in dict(refused.headers) and refused.header("vary") == "Accept-Encoding"


def packed_json(response: Got) -> Any:
    return Got(200, [], gzip.decompress(response.body)).json


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("/api/nothing", 404, "not found"),
        ("/nothing", 404, "not found"),
        ("/api", 404, "not found"),
        ("/api/run/", 404, "not found"),
        ("/api/run?x=1", 400, "unknown parameter 'x'"),
        ("/api/step", 400, "parameter step is missing"),
        ("/api/step?step=", 400, "parameter step is missing"),
        ("/api/step?step=two", 400, "step: got 'two', expected an integer"),
        ("/api/step?step=1&step=2", 400, "parameter step is given twice"),
        ("/api/step?step=1&evaluation=yes", 400, "evaluation: got 'yes', expected 0 or 1"),
        ("/api/group?gid=nobody", 404, "nobody"),
        ("/api/neighbors?uid=nobody", 404, "nobody"),
        ("/api/record?uid=nobody", 404, "nobody"),
        ("/api/history?uid=nobody", 404, "nobody"),
        ("/api/prompt?prompt=0000000000000000", 404, "0000000000000000"),
        ("/api/frame?uid=nobody", 404, "nobody"),
        ("/api/frame", 400, "uid: got 0"),
        ("/api/frame?uid=a&uid=a", 400, "twice"),
        ("/api/frame?uid=a&path=/etc/passwd", 400, "no other parameter"),
        ("/api/frame?" + "&".join(f"uid={n}" for n in range(65)), 400, "uid: got 65"),
        ("/api/list?view=files", 400, "view"),
        ("/api/list?filter=reward+%3C", 400, "filter"),
        ("/api/list?sort=-nothing", 400, "sort"),
        ("/api/list?limit=-1", 400, "limit"),
        ("/api/list?filter=" + "x" * 5000, 400, "filter: got 5000 characters"),
        ("/api/compare?a=1-2&b=later", 400, "b: got 'later', expected steps"),
        ("/api/search?q=x&mode=guess", 400, "mode"),
        ("/api/search?q=(&mode=regex", 400, ""),
        ("/api/media/" + "0" * 64, 404, "unknown image"),
        ("/api/run?%ff=1", 400, "not UTF-8"),
        ("/api/run?" + "&".join("a=1" for _ in range(300)), 400, "too many"),
    ],
)
def test_a_bad_question_gets_a_sentence(viewer: Server, address: str, status: int, message: str) -> None:
    response = ask(viewer, address)
    assert response.status == status, response.body
    assert message in response.error and "Traceback" not in response.error and "\n" not in response.error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/api/run", "GET, HEAD"),
        ("PUT", "/api/run", "GET, HEAD"),
        ("DELETE", "/api/frame", "GET, HEAD"),
        ("OPTIONS", "/api/run", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
        ("GET", "/api/sql", "POST"),
        ("GET", "/api/export", "POST"),
        ("GET", "/api/session", "POST"),
        ("GET", "/api/annotate", "POST"),
        ("HEAD", "/api/sql", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(viewer: Server, method: str, path: str, allowed: str) -> None:
    response = ask(viewer, path, method, body={} if method == "POST" else None)
    assert (response.status, response.header("allow")) == (405, allowed)


def test_head_is_get_without_its_body(viewer: Server) -> None:
    full, head = ask(viewer, "/"), ask(viewer, "/", "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.header("content-length") == str(len(full.body))


def test_one_connection_takes_many_questions_and_answers_at_once(viewer: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=SECONDS)
    took = []
    for _ in range(40):
        begun = time.perf_counter()
        connection.request("GET", "/static/main.js")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read() == html_export.load_assets()["main.js"].content
        took.append(time.perf_counter() - begun)
    connection.close()
    # With Nagle's algorithm against delayed acknowledgements each would take 40 ms.
    assert sorted(took)[10] < 0.03


# --- 1: what a page could run ---------------------------------------------------------------------------------------


def every_kind(viewer: Server, rows: list[dict[str, Any]]) -> Iterator[tuple[str, Got]]:
    uid = quoted(rows[0]["uid"])
    seen = next(row for row in rows if row["images"])
    picture = decode(ask(viewer, f"/api/frame?uid={quoted(seen['uid'])}").body)[0]["pictures"][0]
    addresses = [
        "/",
        "/static/main.js",
        "/static/theme.css",
        "/static/nothing.js",
        "/nothing",
        "/api/run",
        "/api/nothing",
    ]
    addresses += [f"/api/frame?uid={uid}", f"/api/record?uid={uid}", f"/api/media/{picture['sha256']}", "/api/step"]
    for address in addresses:
        yield address, ask(viewer, address)
        yield f"{address} without token", ask(viewer, address, token=False)
        yield f"{address} of another host", ask(viewer, address, headers={"Host": "evil.example"})
    yield "PUT", ask(viewer, "/api/run", "PUT")
    yield "sql", post(viewer, "/api/sql", {"query": "select 1"})
    yield "bad sql", post(viewer, "/api/sql", {"query": "drop table experiences"})
    yield "csv", post(viewer, "/api/sql", {"query": "select 1", "format": "csv"})
    yield "export", post(viewer, "/api/export", {"uids": [rows[0]["uid"]]})
    yield "session", post(viewer, "/api/session", {})
    yield "no HTTP", parsed(send(viewer, b"hello\r\n\r\n"))


def test_points_1_and_4_every_answer_has_the_headers_and_none_the_token(
    viewer: Server, rows: list[dict[str, Any]]
) -> None:
    for name, response in every_kind(viewer, rows):
        policy = response.header("content-security-policy")
        if "/api/media/" in name or name == "export":
            assert policy == (
                "default-src 'none'; frame-ancestors 'none'; sandbox" if response.status == 200 else POLICY
            ), name
        else:
            assert policy == POLICY, name
        assert response.header("x-content-type-options") == "nosniff", name
        assert response.header("referrer-policy") == "no-referrer", name
        assert response.header("cross-origin-opener-policy") == "same-origin", name
        assert response.header("cross-origin-resource-policy") == "same-origin", name
        assert response.header("cache-control"), name
        assert not any(key.startswith("access-control-") for key, _ in response.headers), "no CORS, ever"
        assert "server" not in dict(response.headers)
        assert str(viewer.token).encode() not in response.body, name
        assert all(str(viewer.token) not in value for _, value in response.headers), name
        if response.status >= 400:
            assert response.header("content-type") == "application/json" and response.error


def test_point_1_types_are_exact_and_no_text_of_a_record_is_a_page(viewer: Server, rows: list[dict[str, Any]]) -> None:
    hostile = next(
        row for row in rows if row["step"] == 5 and story.question(0) and "window.__pwn" in found_text(viewer, row)
    )
    uid = quoted(hostile["uid"])
    for address, kind in [
        (f"/api/frame?uid={uid}", "application/octet-stream"),
        (f"/api/record?uid={uid}", "application/json"),
        (f"/api/neighbors?uid={uid}", "application/json"),
        (f"/api/group?gid={quoted(hostile['gid'])}", "application/json"),
        ("/api/search?q=window.__pwn&mode=substring", "application/json"),
        ("/api/record?uid=%3Cscript%3Ealert(1)%3C/script%3E", "application/json"),
    ]:
        assert ask(viewer, address).header("content-type") == kind
    pages = [asset for asset in html_export.load_assets().values() if asset.type.startswith("text/html")]
    assert len(pages) == 1, "one page is HTML, and it is ours"


def found_text(viewer: Server, row: dict[str, Any]) -> str:
    return str(decode(ask(viewer, f"/api/frame?uid={quoted(row['uid'])}").body)[0]["text"])


def test_point_1_downloads_are_attachments_with_names_of_ours(viewer: Server, rows: list[dict[str, Any]]) -> None:
    response = post(viewer, "/api/export", {"uids": [rows[0]["uid"]], "title": '"; filename="evil.exe'})
    assert response.header("content-type") == "text/html; charset=utf-8"
    assert re.fullmatch(
        r'attachment; filename="rollbook-sample-[0-9a-f]{8}\.html"', response.header("content-disposition")
    )
    response = post(viewer, "/api/sql", {"query": "select 1", "format": "csv"})
    assert response.header("content-type") == "text/csv; charset=utf-8"
    assert response.header("content-disposition") == 'attachment; filename="rollbook.csv"'


PNG = story.picture(3)
KINDS = [
    (PNG, "image/png"),
    (b"\xff\xd8\xff\xe0" + bytes(20), "image/jpeg"),
    (b"GIF89a\x01\x00\x01\x00", "image/gif"),
    (b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(20), "image/webp"),
    (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", None),
    (b"<html><script>alert(1)</script>", None),
    (b"\n<svg onload=alert(1)>", None),
    (b"%PDF-1.7", None),
    (b"BM" + bytes(40), None),
    (b"RIFF\x00\x00\x00\x00WAVE", None),
    (b"GIF89a\xff\xff\xff\xff", None),
    (PNG[:16] + b"\x7f\xff\xff\xff" * 2 + PNG[24:], None),
    (b"", None),
]


@pytest.mark.parametrize(("content", "kind"), KINDS)
def test_point_1_media_are_what_their_first_bytes_say(viewer: Server, content: bytes, kind: str | None) -> None:
    assert image_type(content) == kind
    api = viewer.api
    assert api is not None
    name = hashlib.sha256(content).hexdigest()

    class Media:
        def media(self, sha256: str) -> tuple[bytes, str]:
            return content, "text/html"  # what a record claims is not believed

    media_api = apis.Api(Media(), api.answers, api.watcher, api.guard, workers=api.workers)  # type: ignore[arg-type]
    headers = [("host", f"127.0.0.1:{viewer.port}"), ("authorization", f"Bearer {viewer.token}")]
    response = media_api.handle(Request("GET", f"/api/media/{name}", headers=headers))
    sent_headers = dict(response.headers)
    assert (
        sent_headers["Content-Security-Policy"].endswith("sandbox")
        and sent_headers["X-Content-Type-Options"] == "nosniff"
    )
    assert sent_headers["Content-Type"] == (kind or "application/octet-stream")
    assert sent_headers.get("Content-Disposition") == (None if kind else f'attachment; filename="{name[:16]}.bin"')


def test_media_are_the_records_own_and_kept(viewer: Server, rows: list[dict[str, Any]]) -> None:
    seen = next(row for row in rows if row["images"])
    picture = decode(ask(viewer, f"/api/frame?uid={quoted(seen['uid'])}").body)[0]["pictures"][0]
    response = ask(viewer, f"/api/media/{picture['sha256']}")
    assert response.status == 200 and hashlib.sha256(response.body).hexdigest() == picture["sha256"]
    assert response.header("content-type") == "image/png" and "immutable" in response.header("cache-control")
    assert (
        ask(viewer, f"/api/media/{picture['sha256']}", headers={"If-None-Match": response.header("etag")}).status == 304
    )


# --- 3: where it listens --------------------------------------------------------------------------------------------


def test_point_3_it_listens_on_loopback_and_says_where(viewer: Server) -> None:
    bound = [listener.server_address[:2] for listener in viewer.listeners]
    assert ("127.0.0.1", viewer.port) in bound and set(bound) <= {("127.0.0.1", viewer.port), ("::1", viewer.port)}
    assert viewer.url == f"http://127.0.0.1:{viewer.port}/#token={viewer.token}"
    greeting = "\n".join(server._start_messages(viewer, viewer.port))
    assert viewer.url in greeting and f"ssh -L {viewer.port}:127.0.0.1:{viewer.port} " in greeting


def test_point_3_a_port_that_is_taken_is_replaced(viewer: Server, book: str) -> None:
    with Server(book, port=viewer.port) as other:
        assert other.port != viewer.port
        assert ask(other, "/api/run").status == 200
        assert f"port {viewer.port} is in use" in "\n".join(server._start_messages(other, viewer.port))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_point_3_a_port_that_somebody_has_under_the_other_loopback_is_not_used(
    book: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser may take localhost for ::1, and a page that is there reads the token from the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bind = server._bind_tcp

    def bound(name: str, wanted_port: int) -> socket.socket:
        if (name, wanted_port) == ("::1", port):
            raise OSError(errno.EADDRINUSE, "taken")
        return bind(name, wanted_port)

    monkeypatch.setattr(server, "_bind_tcp", bound)
    with Server(book, host=host, port=port) as running:
        assert running.port != port and ask(running, "/api/run").status == 200
    monkeypatch.setattr(server.getpass, "getuser", lambda: {}["nobody"])
    assert " ssh -L " in "\n".join(server._start_messages(running, 0)), "in a container a user may have no name"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.5", "192.168.1.1", "gpu-node-7", "127.0.0.1.evil.example"]
)
def test_point_3_other_machines_need_a_token_that_was_given(book: str, host: str) -> None:
    with pytest.raises(ValueError, match="host: got .* expected a token"):
        Server(book, host=host)
    with pytest.raises(ValueError, match="token: got"):
        Server(book, host=host, token="short")
    assert Server(book, host=host, token="x" * 22).token == "x" * 22
    assert Server(book, host=host, unsafe_allow_unauthenticated=True).token is None


def test_point_3_bound_to_every_address(book: str) -> None:
    with Server(book, host="0.0.0.0", token="a-token-that-was-given") as running:
        assert ask(running, "/api/run").status == 200
        assert ask(running, "/api/run", token=False).status == 401
        assert ask(running, "/api/run", headers={"Host": f"evil.example:{running.port}"}).status == 421
        assert "not encrypted" in "\n".join(server._start_messages(running, running.port))


def test_point_3_without_a_token_the_other_rules_stay(book: str) -> None:
    with Server(book, unsafe_allow_unauthenticated=True) as running:
        assert running.token is None and "#" not in running.url
        assert ask(running, "/api/run").status == 200
        assert ask(running, "/api/run", headers={"Host": "evil.example"}).status == 421
        assert ask(running, "/api/run", headers={"Sec-Fetch-Site": "cross-site"}).status == 403
        assert "can read everything" in "\n".join(server._start_messages(running, 0))


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="there are no Unix sockets here")
def test_point_3_a_unix_socket_is_its_owners(book: str, tmp_path: Path) -> None:
    path = tmp_path / "viewer.sock"
    with Server(book, socket=path, port=8420) as running:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for host, expected in [("localhost", 200), ("localhost:8420", 200), ("127.0.0.1:8420", 200), ("evil", 421)]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(SECONDS)
                connection.connect(str(path))
                head = f"GET /api/run HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {running.token}\r\n"
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
                assert parsed(receive(connection)).status == expected, host
        other = Server(book, socket=path)
        with pytest.raises(ValueError, match="is in use"):
            other.start()
        other.close()
        assert path.exists(), "it is not the other's to remove"
        assert f"ssh -L 8420:{path} " in "\n".join(server._start_messages(running, 8420))
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ValueError, match="is not a socket"):
        Server(book, socket=path).start()
    assert path.read_text() == "precious"


# --- 4: the secret --------------------------------------------------------------------------------------------------


def test_point_4_the_token_is_exchanged_for_a_cookie_once(viewer: Server) -> None:
    assert ask(viewer, "/api/run", token=False).status == 401
    assert post(viewer, "/api/session", {}, {"Authorization": "Bearer wrong"}).status == 401
    response = post(viewer, "/api/session", {})
    assert response.status == 204
    cookie = response.header("set-cookie")
    assert cookie.startswith(f"rollbook-{viewer.port}=") and cookie.endswith("; HttpOnly; SameSite=Strict")
    assert str(viewer.token) not in cookie
    cookies = {"Cookie": cookie.partition(";")[0]}
    assert ask(viewer, "/api/run", headers=cookies, token=False).status == 200
    sql = {"query": "select 1"}
    assert ask(viewer, "/api/sql", "POST", cookies, body=sql, token=False).status == 200


def test_point_4_two_viewers_have_two_tokens_and_two_cookies(viewer: Server, book: str) -> None:
    with Server(book) as other:
        assert other.token != viewer.token
        names = [
            post(running, "/api/session", {}).header("set-cookie").partition("=")[0] for running in (viewer, other)
        ]
        assert names[0] != names[1]
        foreign_cookie = post(viewer, "/api/session", {}).header("set-cookie").partition(";")[0]
        assert ask(other, "/api/run", headers={"Cookie": foreign_cookie}, token=False).status == 401


def test_point_4_the_browser_is_opened_by_a_file_that_only_its_owner_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    seen: list[Any] = []

    def browse(url: str) -> None:
        page = Path(url.removeprefix("file://"))
        seen.extend(
            [url, stat.S_IMODE(page.stat().st_mode), stat.S_IMODE(page.parent.stat().st_mode), page.read_text()]
        )
        opened.set()

    monkeypatch.setattr(server.webbrowser, "open", browse)
    with server._open_browser("http://127.0.0.1:1/#token=secret"):
        assert opened.wait(SECONDS)
    url, mode, folder_mode, text = seen
    assert "secret" not in url, "other users of the machine see the command line"
    assert mode == 0o600 and folder_mode == 0o700 and "http://127.0.0.1:1/#token=secret" in text
    assert not Path(url.removeprefix("file://")).exists()


# --- 5 and 6: other names, other sites (the tables are in test_guard.py) ----------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Host: {own}"], 200),
        ([], 421),
        (["Host: {own}", "Host: {own}"], 421),
        (["Host: {own}", "host: evil.example"], 421),
        (["Host: evil.example"], 421),
        (["Host: evil.example:{port}"], 421),
        (["Host: "], 421),
        (["Host: {own}", "Origin: http://{own}"], 200),
        (["Host: {own}", "Origin: http://evil.example"], 403),
        (["Host: {own}", "Origin: null"], 403),
        (["Host: {own}", "Sec-Fetch-Site: same-origin"], 200),
        (["Host: {own}", "Sec-Fetch-Site: cross-site"], 403),
        (["Host: {own}", "Sec-Fetch-Site: same-site"], 403),
        (["Host : {own}"], 400),
        (["Host: {own}", " evil.example"], 400),
        (["Host: {own}", "no colon"], 400),
        (["Host: {own}", "X: \x00"], 400),
        (["Host: {own}", "X: a\rb"], 400),
    ],
)
def test_point_5_and_6_over_the_wire(viewer: Server, lines: list[str], expected: int) -> None:
    host = f"127.0.0.1:{viewer.port}"
    header_lines = [line.format(own=host, port=viewer.port) for line in lines]
    head = [
        "GET /api/run HTTP/1.1",
        *header_lines,
        f"Authorization: Bearer {viewer.token}",
        "Connection: close",
        "",
        "",
    ]
    assert parsed(send(viewer, "\r\n".join(head).encode("latin-1"))).status == expected


def test_point_5_a_target_with_a_host_of_its_own_is_refused(viewer: Server) -> None:
    for target in ("http://evil.example/api/run", f"http://127.0.0.1:{viewer.port}/api/run", "*", "evil.example:80"):
        head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{viewer.port}\r\nAuthorization: Bearer {viewer.token}\r\n\r\n"
        assert parsed(send(viewer, head.encode())).status == 400


def test_point_6_no_get_changes_anything(viewer: Server, book: str, rows: list[dict[str, Any]]) -> None:
    def state() -> dict[str, str]:
        files = (path for path in Path(book).rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = state()
    uid = quoted(rows[0]["uid"])
    for path in [*ROUTES, *apis._POST_ROUTES, f"/api/frame?uid={uid}", f"/api/history?uid={uid}"]:
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            ask(viewer, path, method)
    assert state() == before


def test_point_6_reading_is_all_it_does_unless_told_to_annotate(
    viewer: Server, book: str, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    uid = rows[0]["uid"]
    refused = post(viewer, "/api/annotate", {"uid": uid, "star": True})
    assert refused.status == 403 and "--annotate" in refused.error
    path = shutil.copytree(book, tmp_path / "book")
    with Server(path, annotate=True) as running:
        settled(running)
        assert ask(running, "/api/run").json["features"]["annotate"] is True
        assert post(running, "/api/annotate", {"uid": uid, "star": True, "note": "</script>"}).json["star"] is True
        assert post(running, "/api/annotate", {"uid": "nobody", "star": True}).status == 404
        assert post(running, "/api/annotate", {"uid": uid, "star": "yes"}).status == 400
        assert post(running, "/api/annotate", {"uid": uid, "note": "x" * 10_001}).status == 400
        post(running, "/api/annotate", {"uid": rows[1]["uid"], "star": True})
        post(running, "/api/annotate", {"uid": rows[1]["uid"], "star": False})
    with open(path / "annotations.jsonl", "ab") as file:
        file.write(b'{"uid": "cut off by a cra')
    with Server(path, annotate=True) as running:
        notes = ask(running, "/api/annotations").json
        assert list(notes) == [uid] and notes[uid]["note"] == "</script>"
        post(running, "/api/annotate", {"uid": uid, "note": ""})
        assert ask(running, "/api/annotations").json[uid]["star"] is True
    with rollbook.open(path, mode="r") as again:
        assert again.check().ok, "the book is as it was"


def test_point_6_a_file_of_notes_may_be_a_strangers(tmp_path: Path) -> None:
    lines = [b"[" * 100_000, b'{"uid": "a", "star": 1, "note": "' + b"x" * 20_000 + b'", "time": 1}', b"1", b"\xff"]
    lines += [b'{"uid": "b", "star": 1, "note": "", "time": 1' + b"0" * 5000 + b"}", b'{"uid": "c", "star": 1}']
    notes = tmp_path / "annotations.jsonl"
    notes.write_bytes(b"\n".join([*lines, b'{"uid": "d", "star": true, "note": "kept", "time": 2}']))
    annotations = Annotations(tmp_path)
    assert {uid: len(entry["note"]) for uid, entry in annotations.all().items()} == {"a": 10_000, "d": 4}
    annotations.set("e\n", note='"}\n{"uid": "forged", "star": true, "note": "", "time": 1}\r\u2028')
    assert set(Annotations(tmp_path).all()) == {"a", "d", "e\n"}, "no note begins a line"
    for make in (lambda: notes.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(notes), notes.mkdir):
        notes.unlink()
        make()
        with pytest.raises(ValueError, match="annotate: .* not a regular file"):
            Annotations(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# --- 7: paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/static/../api.py",
        "/static/../../__init__.py",
        "/static/%2e%2e/api.py",
        "/static/..%2fapi.py",
        "/static/..\\api.py",
        "/static/..%5capi.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/./main.js",
        "/static/pages/../main.js",
        "/static/pages",
        "/static/pages/",
        "/static/",
        "/static",
        "/static/main.js%00.css",
        "/static/main.js/",
        "/static/MAIN.JS",
        "/static/main.js::$DATA",
        "/static/con",
        "/static/file:///etc/passwd",
        "/static/index.html%20",
        "//static/main.js",
        "/../../etc/passwd",
        "/etc/passwd",
        "/index.html",
        "/main.js",
        "/api.py",
        "/api/media/..%2f..%2fledger.sqlite",
        "/api/media/../run",
        "/api/media/" + "0" * 63,
        "/api/media/" + "0" * 65,
        "/api/media/" + "A" * 64,
        "/api/media/" + "0" * 64 + "/",
        "/api/media/" + "0" * 64 + "%0a",
        "/api/media/",
        "/.git/config",
    ],
)
def test_point_7_nothing_outside_the_manifest_has_an_address(viewer: Server, path: str) -> None:
    response = ask(viewer, path)
    assert response.status == 404 and response.error == "not found"


@pytest.mark.parametrize(
    "uid", ["../../etc/passwd", "/etc/passwd", "..\\..\\secret", "file:///etc/passwd", "a\0b", "CON"]
)
def test_point_7_ids_are_looked_up_and_never_opened(viewer: Server, uid: str, tmp_path: Path) -> None:
    for path in ("record", "history", "neighbors", "frame"):
        assert ask(viewer, f"/api/{path}?uid={quoted(uid)}").status in (400, 404)
    assert ask(viewer, f"/api/group?gid={quoted(uid)}").status == 404
    assert post(viewer, "/api/export", {"uids": [uid]}).status in (400, 404)


def test_point_7_a_book_with_a_segment_elsewhere_shows_nothing_of_it(book: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(book, tmp_path / "book"))
    outside = tmp_path / "outside"
    outside.mkdir()
    for segment in list((path / "segments").iterdir()):
        shutil.move(segment, outside / segment.name)
        segment.symlink_to(outside / segment.name)
    running = Server(path)
    with contextlib.suppress(ValueError):
        with running:
            uid = ask(running, "/api/list?view=samples&limit=1").json["rows"][0]["uid"]
            response = ask(running, f"/api/frame?uid={quoted(uid)}")
            assert response.status in (400, 404, 500), "its bytes lie outside of the book"


# --- 8: what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "a JSON object"),
        (b'"text"', "a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"query": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", ""),
        (b'{"query": NaN}', "not JSON"),
        (b'{"query": "\xff"}', "not JSON"),
        (b'{"query": 1}', "query: got int, expected str"),
        (b'{"query": "select 1", "rows": true}', "rows: got bool, expected int"),
        (b'{"query": "select 1", "path": "/etc"}', "unknown field 'path'"),
        (b"{}", "field query is missing"),
        (b'{"query": ""}', "query"),
    ],
)
def test_point_8_a_body_is_a_small_flat_object(viewer: Server, body: bytes, message: str) -> None:
    response = post(viewer, "/api/sql", body)
    assert response.status == 400 and message in response.error


@pytest.mark.parametrize(
    "body",
    [
        {"uids": [{}]},
        {"uids": [["a"]]},
        {"uids": [1, None]},
        {"uids": ["{uid}"], "redact": "a{99999999999999}"},
        {"uids": ["{uid}"], "redact": "(" * 900},
        {"uids": ["{uid}"], "redact": "x" * 1001},
        {"uids": ["{uid}"], "redact": ["x"] * 101},
        {"uids": ["{uid}"], "redact": [{}]},
    ],
)
def test_point_8_what_is_asked_of_an_export_is_checked(
    viewer: Server, rows: list[dict[str, Any]], body: dict[str, Any]
) -> None:
    uids = [rows[0]["uid"] if uid == "{uid}" else uid for uid in body["uids"]]
    response = post(viewer, "/api/export", {**body, "uids": uids})
    assert response.status == 400 and re.match("uids: got|redact: ", response.error)


# --- 10: regular expressions that never end -------------------------------------------------------------------------


def test_point_10_a_regex_that_never_ends_is_stopped(book: str, rows: list[dict[str, Any]]) -> None:
    with Server(book) as running:
        settled(running)
        assert running.api is not None
        running.api.seconds = 1.0
        begun = time.monotonic()
        response = ask(running, "/api/search?mode=regex&q=" + quoted("(\\w+\\s?)+\\1(\\w+\\s?)+$~"))
        assert response.status == 504 or not response.json["complete"]
        pattern = r"(?:[\s\S]+)+~{99}"
        response = post(running, "/api/export", {"uids": [rows[0]["uid"]], "redact": pattern})
        assert response.status == 504, response.body
        assert time.monotonic() - begun < SECONDS
        assert ask(running, "/api/run").status == 200


# --- 13: limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 10_000 + b"\r\n", 431),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET / x HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: +1\r\n\r\na", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\nHost: {own}\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nX: a\nY: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\n\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: 0, 0\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: {own}\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: {own}\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc", 200),
    ],
)
def test_point_13_requests_are_bounded_and_strict(viewer: Server, data: bytes, status: int) -> None:
    response = parsed(send(viewer, data.replace(b"{own}", f"127.0.0.1:{viewer.port}".encode())))
    assert response.status == status
    if status != 200:
        assert response.error and response.header("connection") == "close"


def test_point_13_no_header_takes_long_to_read(viewer: Server) -> None:
    begun = time.monotonic()
    for spaces in (b" " * 2000 + b"\0", b"a" + b" \t" * 1000 + b"\0", b"\t" * 2000 + b"b" + b" " * 2000 + b"\0"):
        assert parsed(send(viewer, b"GET / HTTP/1.1\r\nX:" + spaces + b"\r\n\r\n")).status == 400
    # A pattern that tries each space in three places takes half a minute, in which nobody is answered.
    assert time.monotonic() - begun < 10


def test_point_13_who_may_not_ask_sends_no_body(viewer: Server) -> None:
    with connect(viewer) as connection:
        head = f"POST /api/sql HTTP/1.1\r\nHost: 127.0.0.1:{viewer.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}X-Rollbook: 1\r\nContent-Length: 1000000\r\n\r\n".encode())
        # The body is not waited for.
        assert parsed(receive(connection)).status == 401


def test_point_13_a_body_that_is_announced_is_asked_for(viewer: Server) -> None:
    with connect(viewer) as connection:
        head = f"POST /api/sql HTTP/1.1\r\nHost: 127.0.0.1:{viewer.port}\r\nContent-Type: application/json\r\n"
        head += (
            f"Authorization: Bearer {viewer.token}\r\nX-Rollbook: 1\r\nExpect: 100-continue\r\nConnection: close\r\n"
        )
        connection.sendall(f"{head}Content-Length: 21\r\n\r\n".encode())
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"query": "select 1"}')
        assert parsed(receive(connection)).json["rows"] == [[1]]


def test_point_13_slow_clients_are_not_waited_for(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.6)
    with Server(book) as running:
        with connect(running) as idle, connect(running) as slow, connect(running) as stuck:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
            head = f"POST /api/sql HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {running.token}"
            stuck.sendall(
                f"{head}\r\nContent-Type: application/json\r\nX-Rollbook: 1\r\nContent-Length: 9\r\n\r\n".encode()
            )
            for _ in range(4):
                # A byte now and then buys no time.
                time.sleep(0.2)
                with contextlib.suppress(OSError):
                    slow.sendall(b"a")
            assert receive(idle) == b""
            assert parsed(receive(stuck)).status == 408
            with contextlib.suppress(ConnectionError):
                assert parsed(receive(slow)).status == 408


def test_point_13_connections_are_counted(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 4)
    with Server(book) as running, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(running)) for _ in range(4)]
        until = time.monotonic() + SECONDS
        while len(running.listeners[0].open) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        with connect(running) as refused:
            # What comes after the answer was sent does not take it back: the connection is not cut over it.
            time.sleep(0.2)
            refused.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(0.1)
            refused.shutdown(socket.SHUT_WR)
            assert receive(refused).startswith(b"HTTP/1.1 429 ")
        connections[0].close()
        while len(running.listeners[0].open) > 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert ask(running, "/").status == 200


def test_point_13_a_connection_that_finds_no_thread_keeps_no_place(
    book: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 1)

    def none_left(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with Server(book) as running:
        with monkeypatch.context() as patched:
            patched.setattr(server.socketserver.ThreadingMixIn, "process_request", none_left)
            for _ in range(3):
                with contextlib.suppress(OSError):
                    send(running, b"GET / HTTP/1.1\r\n\r\n")
        assert ask(running, "/").status == 200
        assert "can't start new thread" in capfd.readouterr().err


def test_point_13_a_process_with_many_files_serves_as_any_other(viewer: Server) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 and hard > 0 else 4096, hard))
    descriptors: list[int] = []
    try:
        while not descriptors or descriptors[-1] < 1100:
            descriptors.append(os.dup(0))
        with listen(viewer) as stream:
            read_until(stream, b"retry: ")
            stream.settimeout(1.5)
            with pytest.raises(TimeoutError):
                stream.recv(1)  # it goes on
        assert viewer.api is not None
        with Workers() as workers:
            assert workers.mask(["abc"], ["b"]) == ["a█c"]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def listen(running: Server, cursor: int | None = None) -> socket.socket:
    connection = connect(running)
    head = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {running.token}\r\n"
    if cursor is not None:
        head += f"Last-Event-ID: {cursor}\r\n"
    connection.sendall(f"{head}\r\n".encode())
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    return received


def test_point_13_streams_are_counted_and_given_back(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "_MAX_STREAMS", 2)
    with Server(book) as running:
        streams = [listen(running) for _ in range(2)]
        for stream in streams:
            read_until(stream, b"retry: ")
        refused = ask(running, "/api/events")
        assert refused.status == 429 and "already connected" in refused.error
        assert ask(running, "/api/events", "HEAD").status == 429
        streams[0].close()
        until = time.monotonic() + SECONDS
        while ask(running, "/api/events", "HEAD").status == 429:
            # A tab that was closed is noticed at once, not at the next heartbeat.
            assert time.monotonic() < until
            time.sleep(0.05)
        streams[1].close()


def test_events_tell_what_is_new_and_resume(tmp_path: Path) -> None:
    path = story.make(tmp_path / "book", steps=1, evaluate=False)
    with Server(path) as running:
        run = settled(running)
        with listen(running) as stream:
            head = read_until(stream, b"retry: ")
            assert b"Content-Type: text/event-stream" in head
            with rollbook.open(path) as book:
                story.more(book, 1)
            received = read_until(stream, b"event: change\n")
            if b"\n\n" not in received.partition(b"event: change\n")[2]:
                received += read_until(stream, b"\n\n")
        cursor = int(re.findall(rb"id: (\d+)", received)[0])
        change = Got(200, [], re.findall(rb"data: (.*)\n", received)[0]).json
        assert change["cursor"] == cursor > run["cursor"]
        assert set(change) == {"cursor", "records", "measured", "steps"}
        with listen(running, run["cursor"]) as stream:
            read_until(stream, b"event: change\n")  # what came while nobody listened is told
        assert settled(running)["records"] == 96


def test_point_13_a_question_has_its_time(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    api = viewer.api
    assert api is not None
    release = threading.Event()
    monkeypatch.setattr(api, "seconds", 0.2)
    monkeypatch.setattr(api.source, "record", lambda uid: release.wait(SECONDS) and {})
    late = [ask(viewer, "/api/record?uid=x") for _ in range(apis._MAX_OVERDUE)]
    assert {response.status for response in late} == {504} and "longer than 0.2 seconds" in late[0].error
    # What is late still works somewhere: no more is taken on until it is done.
    assert ask(viewer, "/api/record?uid=x").status == 429
    release.set()
    until = time.monotonic() + SECONDS
    while ask(viewer, "/api/record?uid=x").status == 429:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert ask(viewer, "/api/record?uid=x").status == 200


def test_an_error_of_ours_is_told_to_the_terminal_only(
    viewer: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert viewer.api is not None

    def broken(uid: str) -> dict[str, Any]:
        raise RuntimeError("the secret \x1b]52;c;aGk=\x07 of /home/ana")

    monkeypatch.setattr(viewer.api.source, "record", broken)
    response = ask(viewer, "/api/record?uid=x")
    assert (response.status, response.error) == (500, "internal error; see the server's terminal")
    printed = capfd.readouterr().err
    assert "RuntimeError: the secret" in printed and "\x1b" not in printed and "\x07" not in printed


# --- ending -----------------------------------------------------------------------------------------------------------


def test_closing_ends_threads_streams_and_files(book: str) -> None:
    before = threading.active_count()
    running = Server(book).start()
    settled(running)
    assert running.api is not None
    index = running.api.answers.index.path
    assert index.exists()
    streams = [listen(running) for _ in range(3)]
    for stream in streams:
        read_until(stream, b"retry: ")
    idle = connect(running)
    # One that nobody has taken up yet would be cut, by the system: it is answered once.
    idle.sendall(f"HEAD / HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode())
    read_until(idle, b"\r\n\r\n")
    running.close()
    assert not index.exists()
    for stream in [*streams, idle]:
        receive(stream)
        stream.close()
    until = time.monotonic() + SECONDS
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=1)
    running.close()  # twice is once


def test_a_path_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    running = Server(tmp_path / "nothing")
    with pytest.raises((ValueError, OSError)):
        running.start()
    assert running.listeners == []


SERVE = """
import sys
from rollbook.inspect.server import serve
serve(sys.argv[1], port=0, json=len(sys.argv) > 2)
"""


def test_the_command_prints_its_address_and_ends_when_told(book: str) -> None:
    command = [sys.executable, "-c", SERVE, book]
    signals = {signal.SIGINT: [], signal.SIGTERM: ["json"]}
    processes = [
        subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for more in signals.values()
    ]
    try:
        for process, (signum, for_programs) in zip(processes, signals.items(), strict=True):
            assert process.stdout is not None
            first = process.stdout.readline().decode()
            if for_programs:
                announced = json.loads(first)
                url = announced["url"]
                assert announced["token"] in url and str(announced["port"]) in url and announced["socket"] is None
            else:
                url = first.strip()
                assert process.stdout.readline().startswith(b"from another machine: ssh -L ")
            address, _, token = url.partition("/#token=")
            assert len(token) == 22
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=SECONDS)
            connection.request("GET", "/api/events", headers={"Authorization": f"Bearer {token}"})
            assert connection.getresponse().status == 200  # a page listens: it holds nothing up
            os.kill(process.pid, signum)
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0 and b"Traceback" not in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
