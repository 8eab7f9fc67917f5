"""Who may ask the viewer: tables of Host, Origin, Sec-Fetch-Site, content types and credentials, on the guard alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.inspect import api
from rollbook.inspect.api import Guard, Request, accepted_hosts, check_token, create_token

TOKEN = "a-token-for-the-tests"
HOSTS = accepted_hosts(8420, "127.0.0.1", ["viewer.example", "tunnel.example:9000"])
GUARD = Guard(HOSTS, TOKEN)
OPEN = Guard(HOSTS, None)


def ask(
    headers: list[tuple[str, str]],
    path: str = "/api/run",
    method: str = "GET",
    host: str | None = "127.0.0.1:8420",
    **more: Any,
) -> Request:
    first = [] if host is None else [("host", host)]
    return Request(method, path, headers=[*first, *headers], **more)


def status(guard: Guard, request: Request) -> int:
    refusal = guard.check(request)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1:8420"], 200),
        (["localhost:8420"], 200),
        (["LocalHost:8420"], 200),
        (["[::1]:8420"], 200),
        (["viewer.example"], 200),
        (["viewer.example:8420"], 200),
        (["tunnel.example:9000"], 200),
        ([], 421),
        ([""], 421),
        (["127.0.0.1:8420", "127.0.0.1:8420"], 421),
        (["127.0.0.1:8420", "evil.example"], 421),
        (["evil.example"], 421),
        (["evil.example:8420"], 421),
        (["localhost"], 421),
        (["127.0.0.1"], 421),
        (["localhost:8421"], 421),
        (["localhost:08420"], 421),
        (["localhost.:8420"], 421),
        (["localhost.evil.example:8420"], 421),
        (["127.0.0.1.evil.example:8420"], 421),
        (["evil.example@127.0.0.1:8420"], 421),
        (["127.0.0.1:8420@evil.example"], 421),
        (["127.1:8420"], 421),
        (["2130706433:8420"], 421),
        (["0.0.0.0:8420"], 421),
        (["[::ffff:127.0.0.1]:8420"], 421),
        (["::1:8420"], 421),
        (["10.0.0.5:8420"], 421),
        (["tunnel.example"], 421),
        (["tunnel.example:8420"], 421),
        (["127.0.0.1:8420/"], 421),
        (["127.0.0.1:8420\t"], 421),
        (["127.0.0.1:8420, evil.example"], 421),
    ],
)
def test_point_5_a_host_that_is_not_ours_is_refused_before_anything_else(hosts: list[str], expected: int) -> None:
    for path in ("/", "/static/main.js", "/api/run", "/nothing"):
        request = ask([("host", host) for host in hosts], path, host=None)
        # Even with the token, and with everything else wrong too: the host decides first.
        request.headers += [("authorization", f"Bearer {TOKEN}")]
        assert status(GUARD, request) == expected
        if expected == 421:
            request.headers += [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")]
            request.method = "POST"
            assert status(GUARD, request) == 421


def test_point_5_a_refused_host_is_told_how_to_be_trusted_and_never_echoed_raw() -> None:
    refusal = GUARD.check(ask([], host="laptop.example:9000"))
    assert refusal is not None and "--trusted-host laptop.example:9000" in refusal.error
    refusal = GUARD.check(ask([], host="<script>"))
    assert refusal is not None and "<" not in refusal.error


def test_point_3_bound_to_every_address_the_one_that_was_reached_is_a_host_and_no_name_is() -> None:
    everywhere = Guard(accepted_hosts(8420, "0.0.0.0"), TOKEN, wildcard=True)
    bearer = [("authorization", f"Bearer {TOKEN}")]
    for local, host, expected in [
        ("10.0.0.5:8420", "10.0.0.5:8420", 200),
        ("[fe80::1]:8420", "[fe80::1]:8420", 200),
        ("10.0.0.5:8420", "10.0.0.6:8420", 421),
        ("10.0.0.5:8420", "evil.example:8420", 421),
        ("evil.example:8420", "evil.example:8420", 421),
        ("", "", 421),
    ]:
        assert status(everywhere, ask(bearer, host=host, local=local)) == expected, host
        assert status(GUARD, ask(bearer, host=host, local=local)) == 421, "only where every address is bound"


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ([], 200),
        (["http://127.0.0.1:8420"], 200),
        (["https://127.0.0.1:8420"], 200),
        (["HTTP://127.0.0.1:8420"], 200),
        (["http://localhost:8420"], 403),
        (["http://127.0.0.1"], 403),
        (["http://127.0.0.1:8421"], 403),
        (["http://evil.example"], 403),
        (["http://127.0.0.1:8420.evil.example"], 403),
        (["http://127.0.0.1:8420/"], 403),
        (["null"], 403),
        ([""], 403),
        (["file://"], 403),
        (["chrome-extension://abc"], 403),
        (["http://127.0.0.1:8420", "http://127.0.0.1:8420"], 403),
        (["http://127.0.0.1:8420", "http://evil.example"], 403),
    ],
)
def test_point_6_an_origin_is_the_requests_own_or_refused(origins: list[str], expected: int) -> None:
    headers = [*(("origin", origin) for origin in origins), ("authorization", f"Bearer {TOKEN}")]
    for path in ("/", "/api/run"):
        assert status(GUARD, ask(headers, path)) == expected
    posted = [*headers, ("content-type", "application/json"), ("x-rollbook", "1")]
    assert status(GUARD, ask(posted, "/api/sql", "POST")) == expected


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([], 200),
        (["same-origin"], 200),
        (["none"], 200),
        (["cross-site"], 403),
        (["same-site"], 403),
        (["Cross-Site"], 403),
        (["anything-new"], 403),
        ([""], 403),
        (["same-origin", "cross-site"], 403),
    ],
)
def test_point_6_other_sites_read_nothing_under_api(sites: list[str], expected: int) -> None:
    headers = [*(("sec-fetch-site", site) for site in sites), ("authorization", f"Bearer {TOKEN}")]
    for path in ("/api/run", "/api/frame", "/api/media/" + "0" * 64, "/api/events", "/api"):
        assert status(GUARD, ask(headers, path)) == expected
    # A link from elsewhere may open the page, which holds no data.
    assert status(GUARD, ask(headers, "/")) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("content-type", "application/json"), ("x-rollbook", "1")], 200),
        ([("content-type", "Application/JSON; charset=utf-8"), ("x-rollbook", "1")], 200),
        ([("x-rollbook", "1")], 415),
        ([("content-type", "text/plain"), ("x-rollbook", "1")], 415),
        ([("content-type", "text/plain;application/json"), ("x-rollbook", "1")], 415),
        ([("content-type", "application/x-www-form-urlencoded"), ("x-rollbook", "1")], 415),
        ([("content-type", "multipart/form-data"), ("x-rollbook", "1")], 415),
        ([("content-type", "application/json"), ("content-type", "text/plain"), ("x-rollbook", "1")], 415),
        ([("content-type", "application/json")], 403),
        ([("content-type", "application/json"), ("x-rollbook", "0")], 403),
        ([("content-type", "application/json"), ("x-rollbook", "1"), ("x-rollbook", "1")], 403),
    ],
)
def test_point_6_a_change_is_json_with_a_header_that_forms_cannot_send(
    headers: list[tuple[str, str]], expected: int
) -> None:
    for path in ("/api/sql", "/api/export", "/api/annotate", "/api/session"):
        assert status(OPEN, ask(headers, path, "POST")) == expected
        assert status(GUARD, ask([*headers, ("authorization", f"Bearer {TOKEN}")], path, "POST")) == expected


def session(guard: Guard, host: str = "127.0.0.1:8420") -> str:
    return guard.session(ask([], host=host)).partition(";")[0]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 401),
        ([("authorization", f"Bearer {TOKEN}")], 200),
        ([("authorization", f"bearer {TOKEN}")], 200),
        ([("authorization", f"Bearer {TOKEN}x")], 401),
        ([("authorization", f"Bearer {TOKEN[:-1]}")], 401),
        ([("authorization", f"Bearer {TOKEN.upper()}")], 401),
        ([("authorization", "Bearer ")], 401),
        ([("authorization", "Bearer é€")], 401),
        ([("authorization", TOKEN)], 401),
        ([("authorization", f"Basic {TOKEN}")], 401),
        ([("cookie", session(GUARD))], 200),
        ([("cookie", f"other=1; {session(GUARD)}; more=2")], 200),
        ([("cookie", f"rollbook-8420=stale; {session(GUARD)}")], 200),
        ([("cookie", "rollbook-8420=")], 401),
        ([("cookie", f"rollbook-8420={TOKEN}")], 401),
        ([("cookie", session(GUARD).replace("8420", "8421"))], 401),
        ([("cookie", session(Guard(HOSTS, TOKEN + "2")))], 401),
    ],
)
def test_point_4_nothing_under_api_without_the_token(headers: list[tuple[str, str]], expected: int) -> None:
    for path in ("/api/run", "/api/frame", "/api/events", "/api/media/" + "0" * 64, "/api", "/api/nothing"):
        assert status(GUARD, ask(headers, path)) == expected
    posted = [*headers, ("content-type", "application/json"), ("x-rollbook", "1")]
    assert status(GUARD, ask(posted, "/api/session", "POST")) == expected
    # The page itself holds no data: it is what asks for the token.
    assert status(GUARD, ask(headers, "/")) == 200
    assert status(GUARD, ask(headers, "/static/main.js")) == 200


def test_point_4_the_cookie_is_kept_from_scripts_and_sites_and_two_viewers_have_two() -> None:
    cookie = GUARD.session(ask([]))
    parts = cookie.split("; ")
    assert parts[1:] == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert TOKEN not in cookie
    name = parts[0].partition("=")[0]
    assert name == "rollbook-8420"
    # A tunnel shows the viewer at another port, and a browser gives cookies of one host to all its ports.
    assert session(GUARD, "tunnel.example:9000").startswith("rollbook-9000=")
    assert session(GUARD, "[::1]:8420").startswith("rollbook-8420=")
    assert session(GUARD, "viewer.example").startswith("rollbook-0=")
    assert GUARD.session(ask([], scheme="https")).endswith("; Secure")


def test_point_4_tokens_have_128_bits_and_are_compared_in_constant_time() -> None:
    tokens = {create_token() for _ in range(100)}
    assert len(tokens) == 100 and {len(token) for token in tokens} == {22}  # 22 letters of 6 bits
    assert all(check_token(token) == token for token in tokens)
    for bad in ("", "short", "x" * 15, "x" * 257, "with space in the token", "slash/in/the/token/", "nül" * 8):
        with pytest.raises(ValueError, match="token: got"):
            check_token(bad)
    assert "compare_digest" in inspect.getsource(api._secrets_equal)
    assert TOKEN not in repr(GUARD)


def test_a_trusted_host_is_a_name_or_an_address() -> None:
    assert accepted_hosts(80, "127.0.0.1") >= {"127.0.0.1", "localhost", "[::1]", "localhost:80"}
    assert accepted_hosts(8420, "::1") == accepted_hosts(8420, "127.0.0.1")
    for bad in ("", "*", "http://name", "name:port", "a b", "name:123456", "-name", "name/path", "[::1", "é.example"):
        with pytest.raises(ValueError, match="trusted_hosts: got"):
            accepted_hosts(8420, "127.0.0.1", [bad])


@given(st.text(max_size=40), st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_no_header_breaks_the_guard_and_none_but_the_right_one_opens_it(
    host: str, origin: str, cookie: str, authorization: str
) -> None:
    request = ask([("origin", origin), ("cookie", cookie), ("authorization", authorization)], host=host)
    assert status(GUARD, request) in (421, 403)
    assert status(GUARD, ask([("cookie", cookie), ("authorization", authorization)])) == 401
